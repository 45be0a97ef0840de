"""Steps per second of SAC and TD3 on HalfCheetah-v5: SoloRL and Stable-Baselines3, the same work in turn.

    pip install stable-baselines3
    python benchmark/actor_critic_speed.py --rounds 5

Equal settings: one environment, one gradient step per environment step, batches of 256, two hidden layers of 256 units,
Adam, CPU. SAC's actor steps once per step in Stable-Baselines3, twice at every second step in SoloRL: the same number.
Each measurement is a process of its own; the clock starts behind 1,000 random steps and 500 steps of training, so that
imports, compilation and caches are left out, and covers 1,000 steps with everything a user gets (metrics, TensorBoard,
episode statistics). A round measures every contestant once, in turn. The table gives the median, the range, the ratio
to the best of Stable-Baselines3 within the same round, and the share of what matrix products allow: the floating-point
operations of one step, over the rate of a product of 256 x 256 matrices. Writes the numbers to `--out`.
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
RANDOM, WARM_UP, STEPS = 1_000, 1_500, 2_500
PEER = "Stable-Baselines3"
WAYS = [PEER, "SoloRL", "SoloRL compiled"]
NAMES = {f"{way}, {threads} thread{'s' * (threads > 1)}": (way, threads) for way in WAYS for threads in (1, 2)}


def sb3(algorithm, threads):
    """Steps per second of Stable-Baselines3; runs in a process of its own."""
    import gymnasium as gym
    import numpy as np
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.noise import NormalActionNoise

    class Clock(BaseCallback):
        start = 0.0

        def _on_step(self):
            if self.num_timesteps == WARM_UP:
                self.start = time.perf_counter()
            return True

    torch.set_num_threads(threads)
    extra = {"action_noise": NormalActionNoise(np.zeros(6), np.full(6, 0.1))} if algorithm == "td3" else {}
    model = getattr(stable_baselines3, algorithm.upper())(
        "MlpPolicy", gym.make("HalfCheetah-v5"), learning_starts=RANDOM, batch_size=256, train_freq=1, gradient_steps=1,
        policy_kwargs={"net_arch": [256, 256]}, device="cpu", seed=1, **extra,
    )  # fmt: skip
    clock = Clock()
    model.learn(STEPS, callback=clock)
    print((STEPS - WARM_UP) / (time.perf_counter() - clock.start))


def solorl(algorithm, threads, *flags):
    """Steps per second of our script, from the wall times in its metrics."""
    script = ROOT / f"algorithms/actor_critic/{algorithm}_continuous_action.py"
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, script, "--env-id", "HalfCheetah-v5", "--total-timesteps", STEPS, *flags]
        words += ["--learning-starts", RANDOM, "--torch-threads", threads, "--device", "cpu", "--save-every", 0]
        words += ["--eval-every", 0, "--eval-episodes", 1, "--runs-dir", folder]
        words = [str(word) for word in words]
        subprocess.run(words, check=True, capture_output=True, env=environment(threads), cwd=ROOT)
        lines = next(Path(folder).glob("*/metrics.jsonl")).read_text().splitlines()
    at = {row["global_step"]: row["wall_time"] for row in map(json.loads, lines) if "charts/SPS" in row}
    return (STEPS - WARM_UP) / (at[STEPS] - at[WARM_UP])


def gemm(threads):
    """Floating-point operations per second of torch's product of 256 x 256 matrices; in a process of its own."""
    code = f"""
import time, torch
torch.set_num_threads({threads})
x, y, best = torch.randn(256, 256), torch.randn(256, 256), 1e9
for _ in range(20):
    began = time.perf_counter()
    for _ in range(100):
        torch.mm(x, y)
    best = min(best, (time.perf_counter() - began) / 100)
print(2 * 256**3 / best)
"""
    return float(subprocess.check_output([sys.executable, "-c", code], text=True, env=environment(threads)))


def flops(algorithm):
    """Floating-point operations of the matrix products of one step: 2 for each multiplication and addition."""
    obs_dim, action_dim, hidden, batch = 17, 6, 256, 256

    def forward(fan_in, fan_out):
        return 2 * (fan_in * hidden + hidden * hidden + hidden * fan_out)

    def train(fan_in, fan_out):  # forward, derivatives in the weights and, but for the first layer, in the inputs
        return 3 * forward(fan_in, fan_out) - 2 * fan_in * hidden

    policy = (obs_dim, 2 * action_dim if algorithm == "sac" else action_dim)
    value = (obs_dim + action_dim, 1)
    critics = forward(*policy) + 2 * forward(*value) + 2 * train(*value)
    critics_of_actor, frequency = (2, 1) if algorithm == "sac" else (1, 0.5)
    return batch * (critics + frequency * (train(*policy) + critics_of_actor * 2 * forward(*value)))


def environment(threads):
    return os.environ | {"OMP_NUM_THREADS": str(threads)}


def measure(algorithm, name):
    way, threads = NAMES[name]
    if way == PEER:
        words = [sys.executable, __file__, "--sb3", algorithm, str(threads)]
        return float(subprocess.check_output(words, text=True, env=environment(threads)).split()[-1])
    return solorl(algorithm, threads, *(["--compile"] if "compiled" in way else []))


def best(rates, way):
    """The best rate of a contestant in one round, over its settings."""
    return max(rate for name, rate in rates.items() if name.startswith(way))


def table(path):
    """The measurements of a file as a Markdown table."""
    about = json.loads(Path(path).read_text())
    head = "| steps/s, median | range | ratio to the best Stable-Baselines3 | share of the machine's products |"
    lines = []
    for algorithm, rounds in about["rounds"].items():
        lines += ["", f"| {algorithm.upper()} {head}", "|---|---:|---:|---:|---:|"]
        for name in rounds[0]:
            rates = [each[name] for each in rounds]
            ratio = statistics.median(each[name] / best(each, PEER) for each in rounds)
            share = statistics.median(rates) * flops(algorithm) / about["gemm"][str(NAMES[name][1])]
            span = f"{min(rates):,.0f} to {max(rates):,.0f}"
            lines.append(f"| {name} | {statistics.median(rates):,.0f} | {span} | {ratio:.2f} | {100 * share:.0f} % |")
        ratio = statistics.median(best(each, "SoloRL") / best(each, PEER) for each in rounds)
        lines.append(f"| best of SoloRL over best of {PEER} | | | **{ratio:.2f}** | |")
    count = {len(rounds) for rounds in about["rounds"].values()}
    where = f"{max(count)} rounds in turn on {about['date']}, {about['cpu']}, Python {about['python']}"
    rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s (threads: {threads})" for threads, rate in about["gemm"].items())
    work = ", ".join(
        f"{flops(algorithm) / 1e6:.0f} MFLOP a step of {algorithm.upper()}" for algorithm in about["rounds"]
    )
    return "\n".join([*lines[1:], "", f"{where}. {work}; matrix products reach {rates}."])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--algorithms", nargs="+", default=["sac", "td3"], choices=["sac", "td3"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark/results/speed/actor_critic.json")
    parser.add_argument("--sb3", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sb3:
        sb3(args.sb3[0], int(args.sb3[1]))
        return
    names = [name for name, (_, threads) in NAMES.items() if threads in args.threads]
    rounds = {algorithm: [] for algorithm in args.algorithms}
    rates = {threads: [] for threads in args.threads}
    for _ in range(args.rounds):
        for threads in args.threads:
            rates[threads].append(gemm(threads))
        for algorithm in args.algorithms:
            rounds[algorithm].append({name: measure(algorithm, name) for name in names})
    from solorl.run import _cpu_model, _git

    about = {"rounds": rounds, "gemm": {str(threads): max(each) for threads, each in rates.items()}}
    about |= {"cpu": _cpu_model(), "python": platform.python_version(), "cores": os.cpu_count()}
    about |= {"date": time.strftime("%Y-%m-%d"), "git": _git(ROOT)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(about, indent=1) + "\n")
    print(table(args.out))


if __name__ == "__main__":
    main()
