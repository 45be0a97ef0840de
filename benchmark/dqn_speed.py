"""Steps per second of DQN on CartPole-v1: SoloRL (eager and compiled) and Stable-Baselines3, the same work in turn.

    pip install stable-baselines3
    python benchmark/dqn_speed.py --rounds 5

Equal settings: 1 environment, layers of 120 and 84 ReLU units, a replay buffer of 10,000, batches of 128, one update of
Adam every 10 steps from step 10,000 on, the target copied every 500 steps, CPU. Epsilon has fallen to 0.05 when the
clock starts at step 15,000, so that imports, compilation, random actions and steps without updates are left out, and
everything a user gets (metrics, TensorBoard, episode statistics) is in; it stops at step 50,000. Each measurement is a
process of its own. Stable-Baselines3 runs with one thread and with two; a round measures every contestant once, in
turn; the table gives the median, the range and the ratio to the faster Stable-Baselines3 within the same round. C51
does more work per update than the DQN it is compared with. Writes the numbers to `--out`.
"""

import json
from pathlib import Path

import speed

STEPS, WARM_UP = 50_000, 15_000
FLAGS = ["--exploration-fraction", "0.2", "--save-every", "0"]
PEERS = {"Stable-Baselines3, 1 thread": 1, "Stable-Baselines3, 2 threads": 2}
OURS = {
    "SoloRL dqn": ("dqn",),
    "SoloRL dqn, compiled": ("dqn", "--compile"),
    "SoloRL c51": ("c51",),
    "SoloRL c51, compiled": ("c51", "--compile"),
}


def sb3(threads):
    """Measure Stable-Baselines3's DQN; in a process of its own."""
    import torch
    from stable_baselines3 import DQN

    torch.set_num_threads(threads)
    settings = speed.PEERS["dqn"] | {"exploration_fraction": 0.2}
    model = DQN("MlpPolicy", "CartPole-v1", device="cpu", seed=1, **settings)
    speed.time_sb3(model, STEPS, WARM_UP)


def measure(name):
    if name in PEERS:
        return speed.sb3(__file__, PEERS[name], threads=PEERS[name])
    script, *flags = OURS[name]
    return speed.solorl(f"dqn/{script}.py", STEPS, WARM_UP, *FLAGS, *flags)


def flops(name):
    """Floating-point operations of the matrix products of one step of DQN or C51: a batch in ten steps."""
    widths = (4, 120, 84, 2 * 101 if "c51" in name else 2)
    return speed.forward_flops(*widths) + 128 / 10 * (speed.forward_flops(*widths) + speed.train_flops(*widths))


def table(path):
    """The measurements of a file as a Markdown table."""
    about = json.loads(Path(path).read_text())
    most, rounds = speed.products(about), about["rounds"]
    shares = {name: speed.share(rounds, name, flops(name), most) for name in rounds[0]}
    lines = [
        "| | steps/s, median | range | ratio to Stable-Baselines3 | share of products |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += speed.rows(rounds, PEERS, more=shares)
    where = f"{speed.where(rounds, about)}. {flops('dqn') / 1e6:.2f} MFLOP a step of DQN, "
    where += f"{flops('c51') / 1e6:.2f} of C51; products of matrices reach {most / 1e9:.0f} GFLOP/s on one thread."
    for script, parts in about["shares"].items():
        where += f" Where the time of {script} goes (eager): {speed.in_words(parts)}."
    return "\n".join([*lines, "", where])


def main():
    args = speed.arguments("dqn", __doc__).parse_args()
    if args.sb3 is not None:
        sb3(int(args.sb3[0]))
        return
    rounds = [{name: measure(name) for name in (*PEERS, *OURS)} for _ in range(args.rounds)]
    parts = {script: speed.shares(f"dqn/{script}.py", STEPS, *FLAGS) for script in ("dqn", "c51")}
    speed.write(args.out, rounds=rounds, shares=parts, threads=1, gemm=speed.gemm(1))
    print(table(args.out))


if __name__ == "__main__":
    main()
