"""Seconds from the start of `solo train ppo_jax --target-return 500` to its end: imports, compilation, training,
evaluations, the confirmation of 500.0 on fresh seeds, the learning curve.

    python benchmark/jax_start.py --rounds 5

Each round is another seed: first with an empty folder of compiled code, then with what the first run left there. The
table gives the median, the range and the training's share. Writes the numbers to `--out`.
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
    """Seconds of one run, the step at which it ended and the seconds of training and compilation."""
    words = [sys.executable, "-m", "solorl.cli", "train", speed.ROOT / "algorithms/ppo/ppo_jax.py"]
    words += ["--seed", seed, "--target-return", 500, "--runs-dir", folder, "--device", "cpu"]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    began = time.perf_counter()
    subprocess.run([str(word) for word in words], check=True, capture_output=True, env=environment, cwd=speed.ROOT)
    seconds = time.perf_counter() - began
    (status,) = Path(folder).glob("*/status.json")
    status = json.loads(status.read_text())
    return {"seconds": seconds, "global_step": status["global_step"], "training": status["wall_time"]}


def table(path):
    """The measurements of a file as a Markdown table."""
    about = json.loads(Path(path).read_text())
    lines = [
        "| `solo train ppo_jax --target-return 500` | seconds, median | range | of these training | steps, median |"
    ]
    lines.append("|---|---:|---:|---:|---:|")
    for name in NAMES:
        runs = [each[name] for each in about["rounds"]]
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        span = f"{min(run['seconds'] for run in runs):.1f} to {max(run['seconds'] for run in runs):.1f}"
        cells = [name, f"{middle['seconds']:.1f}", span, f"{middle['training']:.1f}", f"{middle['global_step']:,.0f}"]
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
