"""Steps per second and memory of the streaming agents, next to DQN and SAC on the same tasks, measured in turn.

    python benchmark/streaming_speed.py --rounds 5

Defaults of the files, one thread, but SAC learns from step 1,000 on. The clock starts after the steps in which nothing
is learned (DQN 15,000, all others 2,000). Memory is that of all tensors that a training of 20,000 steps keeps: weights,
traces, optimisers and the rows of replay, 10,000 of DQN, whose buffer is full, and 20,000 of SAC.
"""

import json
import tempfile
from pathlib import Path

import speed

CLOCKS = {  # task -> contestant -> file, last and first step of the clock, further flags
    "CartPole-v1": {
        "SoloRL dqn": ("dqn/dqn.py", 45_000, 15_000, "--exploration-fraction", "0.2"),
        "SoloRL stream_q": ("streaming/stream_q.py", 12_000, 2_000),
        "SoloRL stream_ac": ("streaming/stream_ac.py", 12_000, 2_000),
    },
    "Pendulum-v1": {
        "SoloRL sac_continuous_action": (
            "actor_critic/sac_continuous_action.py", 5_000, 2_000, "--learning-starts", "1000",
        ),
        "SoloRL stream_ac_continuous": ("streaming/stream_ac_continuous.py", 12_000, 2_000),
    },
}  # fmt: skip
PEERS = {"CartPole-v1": "dqn", "Pendulum-v1": "sac_continuous_action"}


def kept(script, task, *flags):
    """Bytes of the tensors that a training of 20,000 steps keeps: its last checkpoint and its replay buffer."""
    flags += () if script.startswith("streaming") else ("--save-replay",)
    flags += ("--learning-starts", "19_000") if "sac" in script else ()
    with tempfile.TemporaryDirectory() as folder:
        speed.train(script, 20_000, folder, "--env-id", task, *flags)
        return sum(
            file.stat().st_size
            for part in ("checkpoint", "replay")
            for file in Path(folder).glob(f"*/{part}/*/*.safetensors")
        )


def table(path):
    """The measurements of a file as Markdown."""
    about, lines = json.loads(Path(path).read_text()), []
    for task, rounds in about["rounds"].items():
        lines += [f"| {task} | steps/s, median | range | ratio to {PEERS[task]} | kB |", "|---|---:|---:|---:|---:|"]
        sizes = {name: f"{about['bytes'][name] / 1000:,.0f}" for name in rounds[0]}
        lines += [*speed.rows(rounds, [f"SoloRL {PEERS[task]}"], more=sizes), ""]
    where = speed.where(next(iter(about["rounds"].values())), about)
    return "\n".join([*lines, f"{where}. kB: what is kept after 20,000 steps, weights, traces, optimisers and replay."])


def main():
    args = speed.arguments("streaming", __doc__).parse_args()
    rounds = {task: [] for task in CLOCKS}
    for _ in range(args.rounds):
        for task, contestants in CLOCKS.items():
            rates = {name: speed.solorl(*clock, "--env-id", task) for name, clock in contestants.items()}
            rounds[task].append(rates)
    sizes = {name: kept(clock[0], task, *clock[3:]) for task in CLOCKS for name, clock in CLOCKS[task].items()}
    speed.write(args.out, rounds=rounds, bytes=sizes, threads=1)
    print(table(args.out))


if __name__ == "__main__":
    main()
