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

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS, WARM_UP = 50_000, 15_000
PEERS = {"Stable-Baselines3, 1 thread": 1, "Stable-Baselines3, 2 threads": 2}
OURS = {
    "SoloRL dqn": ("dqn",),
    "SoloRL dqn, compiled": ("dqn", "--compile"),
    "SoloRL c51": ("c51",),
    "SoloRL c51, compiled": ("c51", "--compile"),
}


def sb3(threads):
    """Steps per second of Stable-Baselines3's DQN; runs in a process of its own."""
    import torch
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback

    class Clock(BaseCallback):
        start = 0.0

        def _on_step(self):
            if self.num_timesteps == WARM_UP:
                self.start = time.perf_counter()
            return True

    torch.set_num_threads(threads)
    model = DQN(
        "MlpPolicy", "CartPole-v1", learning_rate=2.5e-4, buffer_size=10_000, learning_starts=10_000, batch_size=128,
        tau=1.0, gamma=0.99, train_freq=10, gradient_steps=1, target_update_interval=500, exploration_fraction=0.2,
        exploration_final_eps=0.05, policy_kwargs={"net_arch": [120, 84]}, device="cpu", seed=1,
    )  # fmt: skip
    clock = Clock()
    model.learn(STEPS, callback=clock)
    print((STEPS - WARM_UP) / (time.perf_counter() - clock.start))


def solorl(script, *flags):
    """Steps per second of a script, from the wall times in its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "solorl.cli", "train", ROOT / f"algorithms/dqn/{script}.py", *flags]
        words += ["--device", "cpu", "--total-timesteps", STEPS, "--exploration-fraction", 0.2, "--runs-dir", folder]
        words += ["--eval-every", 0, "--eval-episodes", 1, "--save-every", 0]
        subprocess.run([str(word) for word in words], check=True, capture_output=True, env=environment(), cwd=ROOT)
        lines = next(Path(folder).glob("*/metrics.jsonl")).read_text().splitlines()
    at = {row["global_step"]: row["wall_time"] for row in map(json.loads, lines) if "charts/SPS" in row}
    return (STEPS - WARM_UP) / (at[STEPS] - at[WARM_UP])


def environment(threads=1):
    return os.environ | {"OMP_NUM_THREADS": str(threads)}


def measure(name):
    if name in PEERS:
        words = [sys.executable, __file__, "--sb3", str(PEERS[name])]
        return float(subprocess.check_output(words, text=True, env=environment(PEERS[name])).split()[-1])
    return solorl(*OURS[name])


def shares(script):
    """Where the time of the eager script goes."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            ROOT / "benchmark/phases.py",
            ROOT / f"algorithms/dqn/{script}.py",
            "--eval-every",
            "0",
        ]
        words += ["--total-timesteps", STEPS, "--exploration-fraction", 0.2, "--eval-episodes", "1"]
        words += ["--save-every", "0", "--runs-dir", folder]
        out = subprocess.check_output([str(word) for word in words], text=True, env=environment())
    return json.loads(out.splitlines()[-1])


def table(path):
    """The measurements of a file as a Markdown table."""
    about = json.loads(Path(path).read_text())
    lines = ["| | steps/s, median | range | ratio to Stable-Baselines3 |", "|---|---:|---:|---:|"]
    for name in about["rounds"][0]:
        rates = [each[name] for each in about["rounds"]]
        ratio = statistics.median(each[name] / max(each[peer] for peer in PEERS) for each in about["rounds"])
        span = f"{min(rates):,.0f} to {max(rates):,.0f}"
        lines.append(f"| {name} | {statistics.median(rates):,.0f} | {span} | {ratio:.2f} |")
    where = f"{len(about['rounds'])} rounds in turn on {about['date']}, {about['cpu']}, Python {about['python']}."
    for script, parts in about["shares"].items():
        where += f" Where the time of {script} goes (eager): "
        where += ", ".join(f"{name} {100 * share:.0f} %" for name, share in parts.items()) + "."
    return "\n".join([*lines, "", where])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark/results/speed/dqn.json")
    parser.add_argument("--sb3", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sb3:
        sb3(args.sb3)
        return
    rounds = [{name: measure(name) for name in (*PEERS, *OURS)} for _ in range(args.rounds)]
    parts = {script: shares(script) for script in ("dqn", "c51")}
    from solorl.run import _cpu_model, _git

    about = {"rounds": rounds, "shares": parts, "cpu": _cpu_model(), "python": platform.python_version()}
    about |= {"date": time.strftime("%Y-%m-%d"), "git": _git(ROOT), "threads": 1, "cores": os.cpu_count()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(about, indent=1) + "\n")
    print(table(args.out))


if __name__ == "__main__":
    main()
