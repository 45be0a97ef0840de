"""What the speed benchmarks share: a process for each measurement, one file for the numbers of all rounds."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = {  # what Stable-Baselines3 and libraries with its interface need to do the work of our defaults on CartPole-v1
    "ppo": {
        "n_steps": 128, "batch_size": 128, "n_epochs": 4, "learning_rate": 2.5e-4, "ent_coef": 0.01, "clip_range": 0.2,
    },
    "dqn": {
        "learning_rate": 2.5e-4, "buffer_size": 10_000, "learning_starts": 10_000, "batch_size": 128, "tau": 1.0,
        "gamma": 0.99, "train_freq": 10, "gradient_steps": 1, "target_update_interval": 500,
        "exploration_final_eps": 0.05, "policy_kwargs": {"net_arch": [120, 84]},
    },
}  # fmt: skip


def environment(threads=1):
    """The environment of a process that measures."""
    return os.environ | {"OMP_NUM_THREADS": str(threads)}


def arguments(name, doc):
    """A parser with the flags of every speed benchmark; its numbers go into results/speed/NAME.json."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / f"benchmark/results/speed/{name}.json")
    parser.add_argument("--sb3", nargs="*", help=argparse.SUPPRESS)  # measure Stable-Baselines3 in this process
    return parser


def time_sb3(model, steps, warm_up):
    """Print the steps per second of a model of Stable-Baselines3 that learns until `steps`, from `warm_up` on."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Clock(BaseCallback):
        start = 0.0

        def _on_rollout_start(self):
            if self.num_timesteps == warm_up:
                self.start = time.perf_counter()

        def _on_step(self):
            return True

    clock = Clock()
    model.learn(steps, callback=clock)
    print((steps - warm_up) / (time.perf_counter() - clock.start))


def printed(python, *words, threads=1, **variables):
    """Steps per second, the last word that `PYTHON WORDS` prints."""
    command = [python, *map(str, words)]
    return float(subprocess.check_output(command, text=True, env=environment(threads) | variables).split()[-1])


def sb3(benchmark, *words, threads=1, **variables):
    """Steps per second that `python BENCHMARK --sb3 WORDS` prints."""
    return printed(sys.executable, benchmark, "--sb3", *words, threads=threads, **variables)


def train(script, steps, folder, *flags, threads=1):
    """Train a script (its path below algorithms/) for some steps, with its run folders in `folder`."""
    words = [sys.executable, "-m", "solorl.cli", "train", ROOT / "algorithms" / script, *flags, "--device", "cpu"]
    words += ["--total-timesteps", steps, "--eval-every", 0, "--eval-episodes", 1, "--runs-dir", folder]
    words = [str(word) for word in [*words, "--threads", threads]]
    subprocess.run(words, check=True, capture_output=True, env=environment(threads), cwd=ROOT)


def solorl(script, steps, warm_up, *flags, threads=1):
    """Steps per second of a script (its path below algorithms/) between two steps, by the wall times in its metrics; of
    all seeds together where it trains several."""
    with tempfile.TemporaryDirectory() as folder:
        train(script, steps, folder, *flags, threads=threads)
        seeds = [file.read_text().splitlines() for file in Path(folder).glob("*/metrics.jsonl")]
    rate = 0.0
    for lines in seeds:
        at = {row["global_step"]: row["wall_time"] for row in map(json.loads, lines) if "charts/SPS" in row}
        rate += (steps - warm_up) / (at[steps] - at[warm_up])
    return rate


def shares(script, steps, *flags):
    """Where the time of a script goes: the share of each phase."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, ROOT / "benchmark/phases.py", ROOT / "algorithms" / script, "--total-timesteps", steps]
        words += ["--eval-every", 0, "--eval-episodes", 1, "--runs-dir", folder, *flags]
        out = subprocess.check_output([str(word) for word in words], text=True, env=environment())
    return json.loads(out.splitlines()[-1])


def gemm(threads):
    """Floating-point operations per second of the faster product of 256 x 256 matrices; in a process of its own."""
    code = f"""
import time, torch
torch.set_num_threads({threads})
x, y, best = torch.randn(256, 256), torch.randn(256, 256), 1e9
for product in (torch.mm, lambda x, y: torch.ops.mkldnn._linear_pointwise(x, y, None, "none", [], "")):
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(100):
            product(x, y)
        best = min(best, (time.perf_counter() - began) / 100)
print(2 * 256**3 / best)
"""
    return float(subprocess.check_output([sys.executable, "-c", code], text=True, env=environment(threads)))


def forward_flops(*widths):
    """Of the products of one sample through layers of these widths: 2 for each multiplication and addition."""
    return 2 * sum(a * b for a, b in pairwise(widths))


def train_flops(*widths):
    """Forward, derivatives in the weights and, except for the first layer, in the inputs."""
    return 3 * forward_flops(*widths) - 2 * widths[0] * widths[1]


def products(about):
    """What large products of matrices reach on one thread, in operations per second: as measured with the rates, else
    (data from before that) on the same machine with SAC and TD3 in JAX; None where there is no such number."""
    other = json.loads((ROOT / "benchmark/results/speed/jax_actor_critic.json").read_text())
    return about.get("gemm") or (other["gemm"] if other["cpu"] == about["cpu"] else None)


def share(rounds, name, flops, most):
    """Of what products could do, what a contestant does, with `flops` operations a step; a cell of a table."""
    return f"{100 * statistics.median(each[name] for each in rounds) * flops / most:.1f} %"


def row(name, rates, *cells):
    """A row of a table: median and range of the rates of all rounds, and further cells: texts, or ratios of all rounds,
    of which it holds the median."""
    span = f"{min(rates):,.0f} to {max(rates):,.0f}"
    texts = [cell if isinstance(cell, str) else f"{statistics.median(cell):.2f}" for cell in cells]
    return f"| {' | '.join([name, f'{statistics.median(rates):,.0f}', span, *texts])} |"


def rows(rounds, *bases, more=None):
    """A row for each contestant; the ratios are those to the fastest of each base, a list of contestants, in the same
    round. `more` holds one more cell for each contestant."""
    for name in rounds[0]:
        ratios = [[each[name] / max(each[peer] for peer in peers) for each in rounds] for peers in bases]
        yield row(name, [each[name] for each in rounds], *ratios, *([more[name]] if more else []))


def tables(path, titles, peer, peers, ending, unit="steps/s"):
    """The measurements of a file as Markdown: a table for each of its cases, whose ratio is that to the fastest of
    `peers`, called `peer`; below them where they were made."""
    about, lines = json.loads(Path(path).read_text()), []
    for name, rounds in about["rounds"].items():
        lines += [f"| {titles[name]} | {unit}, median | range | ratio to {peer} |", "|---|---:|---:|---:|"]
        lines += [*rows(rounds, peers), ""]
    return "\n".join([*lines, f"{where(next(iter(about['rounds'].values())), about)}{ending}"])


def in_words(parts):
    """Shares of phases as one line."""
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in parts.items())


def where(rounds, about):
    """How many rounds were measured, when and on what."""
    return f"{len(rounds)} rounds in turn on {about['date']}, {about['cpu']}, Python {about['python']}"


def write(path, **numbers):
    """Write the numbers with the circumstances in which they were measured."""
    from solorl.files import git_state
    from solorl.machine import cpu_model

    about = numbers | {"cpu": cpu_model(), "python": platform.python_version(), "cores": os.cpu_count()}
    about |= {"date": time.strftime("%Y-%m-%d"), "git": git_state(ROOT)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about, indent=1) + "\n")
