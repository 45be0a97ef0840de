"""Steps per second of SAC in one process and with explorers in processes of their own, the same work in turn.

    python benchmark/parallel_speed.py --rounds 5

HalfCheetah-v5, 4 environments, one critic update for 4 environment steps (and as many of the actor), batches of 256,
one torch thread in each process. sac_parallel.py has one explorer with all 4 environments, so it uses two cores. The
clock starts after 1,000 random steps and some of training; how a round measures and what it includes is said in
ppo_speed.py.
"""

import json
from pathlib import Path

import speed

ONE, PARALLEL = "sac_continuous_action", "sac_parallel"
STEPS, WARM_UP = 12_000, 4_000
FLAGS = ["--env-id", "HalfCheetah-v5", "--num-envs", 4, "--utd-ratio", 0.25, "--learning-starts", 1_000]


def measure(name):
    return speed.solorl(f"actor_critic/{name}.py", STEPS, WARM_UP, *FLAGS, "--save-every", 0, "--log-every", 4_000)


def table(path):
    """The measurements of a file as a Markdown table."""
    about = json.loads(Path(path).read_text())
    lines = [f"| SAC, 4 environments, one update for 4 steps | steps/s, median | range | ratio to {ONE} |"]
    lines += ["|---|---:|---:|---:|", *speed.rows(about["rounds"], [ONE])]
    return "\n".join([*lines, "", f"{speed.where(about['rounds'], about)}, one torch thread in each process."])


def main():
    args = speed.arguments("parallel", __doc__).parse_args()
    rounds = []
    for _ in range(args.rounds):
        rounds.append({name: measure(name) for name in (ONE, PARALLEL)})
        speed.write(args.out, rounds=rounds)  # so that an interruption loses one round
    print(table(args.out))


if __name__ == "__main__":
    main()
