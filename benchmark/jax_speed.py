"""Steps per second of the files in JAX, of their torch twins, of SBX and of Stable-Baselines3: the same work in turn.

    pip install stable-baselines3 sbx-rl envpool
    python benchmark/jax_speed.py --rounds 5 --algorithms ppo dqn c51

PPO and DQN (and C51) on CartPole-v1, SAC and TD3 on HalfCheetah-v5; nets, batches and numbers of updates are those of
the torch files' defaults, SAC and TD3 begin to learn after 1,000 random steps. Each measurement is a process of its
own on the CPU; the clock starts when everything is imported and compiled and learning has begun. The files in JAX
hold CartPole in the compiled code and step EnvPool's HalfCheetah from there, the others step Gymnasium's. A round
measures every contestant once, in turn; the table gives the median, the range, the ratios to the best of SBX (to
which XLA gives all cores, unless told otherwise) and to the torch twin within the same round, and of SAC and TD3 the
share of what matrix products on one thread allow (see actor_critic_speed.py). `--seeds 1 2 4 8` measures one process
that trains so many seeds, all their steps counted. `--rejax PYTHON` adds rejax's PPO, whole trainings compiled as
PureJaxRL does; it needs an older JAX than ours, hence a Python of its own with what peers/rejax_ppo.py lists. Writes
the numbers to `--out`.
"""

import json
from pathlib import Path

import actor_critic_speed
import dqn_speed
import ppo_speed
import speed

SBX = {"SBX": {}, "SBX, one thread": {"NPROC": "1"}}  # with the variables of its process
PEERS = ("Stable-Baselines3", *SBX)
REJAX_PPO = Path(__file__).parent / "peers/rejax_ppo.py"
REJAX = {"rejax": [], "rejax, one core": ["--one-core"]}
CASES = {  # algorithm: environment, torch file, JAX file, (steps, before the clock starts) of peers and torch, of JAX
    "ppo": ("CartPole-v1", "ppo/ppo.py", "ppo/ppo_jax.py", (100 * 512, 20 * 512), (800 * 512, 80 * 512)),
    "dqn": ("CartPole-v1", "dqn/dqn.py", "dqn/dqn_jax.py", (30_000, 15_000), (200_000, 20_000)),
    "c51": ("CartPole-v1", "dqn/c51.py", "dqn/c51_jax.py", (30_000, 15_000), (100_000, 20_000)),
    "sac": (
        "HalfCheetah-v5",
        *(f"actor_critic/sac_continuous_action{x}.py" for x in ("", "_jax")),
        *[(3_000, 1_500)] * 2,
    ),
    "td3": (
        "HalfCheetah-v5",
        *(f"actor_critic/td3_continuous_action{x}.py" for x in ("", "_jax")),
        *[(3_000, 1_500)] * 2,
    ),
}
FLAGS = {
    "dqn": ["--exploration-fraction", 0.05],
    "c51": ["--exploration-fraction", 0.05],
    "sac": ["--learning-starts", 1_000],
    "td3": ["--learning-starts", 1_000],
}


WIDE = "SoloRL, JAX, 64 environments"  # of PPO: 16 times the batch, as many minibatches and epochs
WIDE_STEPS = (7 * 16 * 64 * 128, 16 * 64 * 128)


def peer(library, algorithm):
    """Measure the algorithm of a library with Stable-Baselines3's interface; in a process of its own."""
    import importlib

    from stable_baselines3.common.env_util import make_vec_env

    if library == "Stable-Baselines3":
        import torch

        torch.set_num_threads(1)
    env_id, _, _, (steps, before), _ = CASES[algorithm]
    settings = {
        "ppo": speed.PEERS["ppo"],
        "dqn": speed.PEERS["dqn"] | {"exploration_fraction": 0.05},
        "sac": {"learning_starts": 1_000, "batch_size": 256, "policy_kwargs": {"net_arch": [256, 256]}},
        "td3": {"learning_starts": 1_000, "batch_size": 256, "policy_kwargs": {"net_arch": [256, 256]}},
    }[algorithm]
    if algorithm == "td3":
        settings |= {"train_freq": 1, "gradient_steps": 1}
    envs = make_vec_env(env_id, 4 if algorithm == "ppo" else 1)
    module = importlib.import_module("sbx" if library in SBX else "stable_baselines3")
    model = getattr(module, algorithm.upper())("MlpPolicy", envs, device="cpu", seed=1, **settings)
    speed.time_sb3(model, steps, before)


def measure(algorithm, name, num_seeds=1, python=None):
    if name in REJAX:
        return speed.printed(python, REJAX_PPO, "--num-seeds", num_seeds, *REJAX[name])
    if name in PEERS:
        return speed.sb3(__file__, name, algorithm, **SBX.get(name, {}))
    env_id, torch, jax, there, here = CASES[algorithm]
    flags = ["--env-id", env_id, "--save-every", 0, *FLAGS.get(algorithm, [])]
    if name == WIDE:
        return speed.solorl(jax, *WIDE_STEPS, *flags, "--num-envs", 64)
    if name == "SoloRL, JAX":
        return speed.solorl(jax, *here, *flags, "--num-seeds", num_seeds)
    return speed.solorl(torch, *there, *flags)


def contestants(algorithm, python):
    peers = PEERS if algorithm != "c51" else ()
    rejax = REJAX if algorithm == "ppo" and python else ()
    return [*peers, *rejax, "SoloRL, torch", "SoloRL, JAX", *([WIDE] if algorithm == "ppo" else [])]


def flops(algorithm):
    """Floating-point operations of the matrix products of one step."""
    if algorithm == "ppo":
        return ppo_speed.flops(CASES[algorithm][0])
    return (actor_critic_speed if algorithm in ("sac", "td3") else dqn_speed).flops(algorithm)


def share(algorithm, name, rounds, most):
    """Of the products that one thread could do, those a contestant does; empty for SBX, which has all cores."""
    return "" if name in ("SBX", "rejax") else speed.share(rounds, name, flops(algorithm), most)


def table(path):
    """The measurements of a file as Markdown tables."""
    about = json.loads(Path(path).read_text())
    lines, most = [], speed.products(about)
    for algorithm, rounds in about["rounds"].items():
        peers = [name for name in SBX if name in rounds[0]] or ["SoloRL, torch"]
        peer = "the best of SBX" if len(peers) > 1 else peers[0]
        bases = {f"ratio to {peer}": peers, "ratio to SoloRL, torch": ["SoloRL, torch"]}
        shares = {name: share(algorithm, name, rounds, most) for name in rounds[0]} if most else None
        head = [f"{algorithm.upper()} on {CASES[algorithm][0]}", "steps/s, median", "range", *bases]
        head += ["share of products"] if shares else []
        lines += ["", f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
        lines += speed.rows(rounds, *bases.values(), more=shares)
    if about["seeds"]:
        lines += [
            "",
            "| PPO in JAX, seeds together | steps/s of all | range | ratio to one seed |",
            "|---:|---:|---:|---:|",
        ]
        lines += speed.rows(about["seeds"], list(about["seeds"][0])[:1])
    longest = max([*about["rounds"].values(), about["seeds"]], key=len)
    free = "SBX, rejax" if "rejax" in about["rounds"].get("ppo", [{}])[0] else "SBX"
    threads = f"one thread each ({free}: as XLA chooses)"
    if about["seeds"]:
        threads += f", seeds together one for each of {about['cores']} cores"
    if most:
        threads += f"; products of matrices reach {most / 1e9:.0f} GFLOP/s on one thread"
    return "\n".join([*lines[1:], "", f"{speed.where(longest, about)}, {threads}."])


def main():
    parser = speed.arguments("jax", __doc__)
    parser.add_argument("--algorithms", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--seeds", nargs="*", type=int, default=[])
    parser.add_argument("--rejax", metavar="PYTHON", help="measure rejax's PPO, too, with this interpreter")
    args = parser.parse_args()
    if args.sb3 is not None:
        peer(*args.sb3)
        return
    rounds = {algorithm: [] for algorithm in args.algorithms}
    seeds, products = [], 0.0
    for _ in range(args.rounds):
        products = max(products, speed.gemm(1))
        for algorithm in args.algorithms:
            names = contestants(algorithm, args.rejax)
            rounds[algorithm].append({name: measure(algorithm, name, python=args.rejax) for name in names})
        if args.seeds:
            seeds.append({str(n): measure("ppo", "SoloRL, JAX", n) for n in args.seeds})
            if args.rejax:
                seeds[-1] |= {f"rejax, {n}": measure("ppo", "rejax", n, args.rejax) for n in args.seeds if n > 1}
        # so that an interruption loses one round
        speed.write(args.out, rounds=rounds, seeds=seeds, threads=1, gemm=products)
    print(table(args.out))


if __name__ == "__main__":
    main()
