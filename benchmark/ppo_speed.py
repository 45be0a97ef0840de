"""Steps per second of PPO on CartPole-v1: SoloRL (eager and compiled) and Stable-Baselines3, the same work in turn.

    pip install stable-baselines3
    python benchmark/ppo_speed.py --rounds 5

Equal settings: 4 environments x 128 steps, 4 minibatches, 4 epochs, two hidden layers of 64 tanh units, Adam, value and
policy clipping, one torch thread, CPU. Each measurement is a process of its own that trains 100 iterations; the clock
starts behind the first 20, so that imports, compilation and caches are left out, and everything a user gets (metrics,
TensorBoard, episode statistics) is in. A round measures every contestant once, in turn; the table gives the median,
the range and the ratio to Stable-Baselines3 within the same round. Writes the numbers to `--out`.
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
STEPS, WARM_UP = 100 * 512, 20 * 512


def sb3():
    """Steps per second of Stable-Baselines3's PPO; runs in a process of its own."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class Clock(BaseCallback):
        start = 0.0

        def _on_rollout_start(self):
            if self.num_timesteps == WARM_UP:
                self.start = time.perf_counter()

        def _on_step(self):
            return True

    torch.set_num_threads(1)
    model = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", 4), n_steps=128, batch_size=128, n_epochs=4, learning_rate=2.5e-4,
        ent_coef=0.01, clip_range=0.2, clip_range_vf=0.2, device="cpu", seed=1,
    )  # fmt: skip
    clock = Clock()
    model.learn(STEPS, callback=clock)
    print((STEPS - WARM_UP) / (time.perf_counter() - clock.start))


def solorl(*flags):
    """Steps per second of ppo.py, from the wall times in its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "solorl.cli", "train", ROOT / "algorithms/ppo/ppo.py", *flags, "--device", "cpu"]
        words += ["--total-timesteps", STEPS, "--eval-every", 0, "--eval-episodes", 1, "--runs-dir", folder]
        subprocess.run([str(word) for word in words], check=True, capture_output=True, env=environment(), cwd=ROOT)
        lines = next(Path(folder).glob("*/metrics.jsonl")).read_text().splitlines()
    at = {row["global_step"]: row["wall_time"] for row in map(json.loads, lines) if "charts/SPS" in row}
    return (STEPS - WARM_UP) / (at[STEPS] - at[WARM_UP])


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1"}


def measure(name):
    if name == "Stable-Baselines3":
        words = [sys.executable, __file__, "--sb3"]
        return float(subprocess.check_output(words, text=True, env=environment()).split()[-1])
    return solorl("--compile") if "compiled" in name else solorl()


def shares():
    """Where the time of the eager script goes."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, ROOT / "benchmark/phases.py", ROOT / "algorithms/ppo/ppo.py", "--eval-every", "0"]
        words += ["--total-timesteps", STEPS, "--eval-episodes", "1", "--runs-dir", folder]
        out = subprocess.check_output([str(word) for word in words], text=True, env=environment())
    return json.loads(out.splitlines()[-1])


def table(path):
    """The measurements of a file as a Markdown table."""
    about = json.loads(Path(path).read_text())
    lines = ["| | steps/s, median | range | ratio to Stable-Baselines3 |", "|---|---:|---:|---:|"]
    for name in about["rounds"][0]:
        rates = [each[name] for each in about["rounds"]]
        ratio = statistics.median(each[name] / each["Stable-Baselines3"] for each in about["rounds"])
        span = f"{min(rates):,.0f} to {max(rates):,.0f}"
        lines.append(f"| {name} | {statistics.median(rates):,.0f} | {span} | {ratio:.2f} |")
    parts = ", ".join(f"{name} {100 * share:.0f} %" for name, share in about["shares"].items())
    where = f"{len(about['rounds'])} rounds in turn on {about['date']}, {about['cpu']}, Python {about['python']}"
    return "\n".join([*lines, "", f"{where}. Where SoloRL's time goes (eager): {parts}."])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark/results/speed/ppo.json")
    parser.add_argument("--sb3", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sb3:
        sb3()
        return
    names = ["Stable-Baselines3", "SoloRL", "SoloRL compiled"]
    rounds = [{name: measure(name) for name in names} for _ in range(args.rounds)]
    parts = shares()
    from solorl.run import _cpu_model, _git

    about = {"rounds": rounds, "shares": parts, "cpu": _cpu_model(), "python": platform.python_version()}
    about |= {"date": time.strftime("%Y-%m-%d"), "git": _git(ROOT), "threads": 1, "cores": os.cpu_count()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(about, indent=1) + "\n")
    print(table(args.out))


if __name__ == "__main__":
    main()
