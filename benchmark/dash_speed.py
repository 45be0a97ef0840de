"""How long `solo dash` takes to open 500 runs of 5,000 rows: for the first time, and at a later start.

    python benchmark/dash_speed.py --runs 500 --rows 5000

Makes the runs in a folder (250 MB: 100 groups of 5 seeds on 5 environments), starts `solo dash` as a process, and
measures from its start until the page has arrived, which has all curves and tables: seconds, and seconds of CPU, which
say the same on a loaded machine. A later start finds one more row in 10 of the runs. Drawing is up to the browser.
"""

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import cache
from pathlib import Path

SEEDS, ENVS = 5, 5


@cache
def metrics(seed, rows):
    """Episodes, and for every 50 of them an evaluation and a row of losses."""
    rng, lines = random.Random(seed), []
    for i in range(1, rows + 1):
        score = 500 * (1 - math.exp(-3 * i / rows)) + rng.gauss(0, 20)
        row = {"global_step": 100 * i, "wall_time": i + 0.001}
        if i % 52 == 0:
            row |= {"eval/episodic_return": score, "eval/episodic_return_std": 9.5, "eval/episodic_length": 200.0}
        elif i % 52 == 1:
            row |= {"charts/SPS": 1000.0, "losses/value_loss": rng.random(), "losses/entropy": rng.random()}
        else:
            row |= {"charts/episodic_return": score, "charts/episodic_length": 200.0}
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)


def make(folder, number, rows):
    """The run of a number, unless it is there."""
    group, seed = divmod(number, SEEDS)
    run = folder / f"Env{group % ENVS}-v0__ppo__{number}"
    if not run.exists():
        run.mkdir(parents=True)
        args = {"env_id": f"Env{group % ENVS}-v0", "seed": seed, "size": group // ENVS, "total_timesteps": 100 * rows}
        status = {"status": "finished", "global_step": 100 * rows, "wall_time": rows}
        (run / "config.json").write_text(json.dumps({"script": "ppo.py", "script_sha256": "", "args": args}))
        (run / "metrics.jsonl").write_text(metrics(seed, rows))
        (run / "status.json").write_text(json.dumps(status))
    return run


def opened(folder):
    """What `solo dash` took from its start until its page had arrived."""
    began, before = time.perf_counter(), os.times()
    command = [sys.executable, "-m", "solorl.cli", "dash", str(folder), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        page = urllib.request.urlopen(process.stdout.readline().split()[0]).read()
        seconds = time.perf_counter() - began
        process.send_signal(signal.SIGINT)
    cpu = sum(os.times()[2:4]) - sum(before[2:4])  # with what it keeps at its end
    return f"{seconds:.2f} s, {cpu:.2f} s of CPU, page of {len(page) / 1e6:.1f} MB"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--rows", type=int, default=5_000)
    parser.add_argument("--folder", type=Path, help="where to make the runs, and to leave them (default: for the time)")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job after `&` ignores it, and so would `solo dash`
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        runs = [make(folder, number, args.rows) for number in range(args.runs)]
        print("again" if (folder / ".solo").exists() else "first", opened(folder), flush=True)
        for _ in range(3):
            for run in runs[:10]:
                with open(run / "metrics.jsonl", "a") as file:
                    file.write('{"global_step": 1, "wall_time": 1.0, "charts/episodic_return": 0.5}\n')
            print("later", opened(folder), flush=True)


if __name__ == "__main__":
    main()
