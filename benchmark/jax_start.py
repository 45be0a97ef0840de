"""Seconds from the start of `solo train ppo_jax --target-return 500` until it says that 500 was reached: imports,
compilation, training, evaluations, the confirmation on fresh seeds. And to its end: checkpoint and learning curve, too.

    python benchmark/jax_start.py --rounds 5

Each round is another seed: first with an empty folder of compiled code, then with what the first run left there. The
table gives medians, ranges and the share of training and evaluations. Writes the numbers to `--out`.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import speed

NAMES = ["nothing compiled before", "compiled code kept from a run before"]


def measure(seed, cache, folder):
    """Seconds of one run until the target was reached, in all, and of training; the step at which it ended."""
    words = [sys.executable, "-m", "solorl.cli", "train", speed.ROOT / "algorithms/ppo/ppo_jax.py"]
    words += ["--seed", seed, "--target-return", 500, "--runs-dir", folder, "--device", "cpu"]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
    reached, began = [], time.perf_counter()
    command = subprocess.Popen(
        [str(word) for word in words], stdout=subprocess.PIPE, text=True, env=environment, cwd=speed.ROOT
    )
    for line in command.stdout:
        if line.startswith("target 500 reached") and line.endswith("done\n"):
            reached.append(time.perf_counter() - began)
    if command.wait() or len(reached) != 1:
        sys.exit(f"{' '.join(map(str, words))}: exit code {command.returncode}, target reached {len(reached)} times")
    seconds = time.perf_counter() - began
    (status,) = Path(folder).glob("*/status.json")
    status = json.loads(status.read_text())
    return {
        "reached": reached[0],
        "seconds": seconds,
        "global_step": status["global_step"],
        "training": status["wall_time"],
    }


def table(path):
    """The measurements of a file as a Markdown table."""
    about = json.loads(Path(path).read_text())
    lines = [
        "| `solo train ppo_jax --target-return 500` | seconds to 500 | range | to the end | range | training | steps |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in NAMES:
        runs = [each[name] for each in about["rounds"]]
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        cells = [name]
        for key in ("reached", "seconds"):
            values = [run[key] for run in runs]
            cells += [f"{middle[key]:.1f}", f"{min(values):.1f} to {max(values):.1f}"]
        cells += [f"{middle['training']:.1f}", f"{middle['global_step']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{speed.where(about['rounds'], about)}."])


def main():
    args = speed.arguments("jax_start", __doc__).parse_args()
    rounds = []
    for seed in range(1, args.rounds + 1):
        with tempfile.TemporaryDirectory() as cache:
            found = {}
            for name in NAMES:
                with tempfile.TemporaryDirectory() as folder:
                    found[name] = measure(seed, cache, folder)
        rounds.append(found)
    speed.write(args.out, rounds=rounds)
    print(table(args.out))


if __name__ == "__main__":
    main()
