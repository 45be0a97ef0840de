"""How long `solo dash` takes to open 500 runs of 5,000 rows: for the first time, and at a later start.

    python benchmark/dash_speed.py --runs 500 --rows 5000

Makes the runs in a temporary folder (300 MB: 20 methods of 5 seeds on 5 environments), starts `solo dash` as a process
of its own, and measures from its start until the page has arrived, which has all curves and tables. A later start finds
one more row in 10 of the runs. Drawing is up to the browser.
"""

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

SEEDS, ENVS = 5, 5


def make(folder, number, rows):
    """The run of a number: an evaluation and a row of losses for every 50 episodes."""
    method, seed = divmod(number, SEEDS)
    env, lr = f"Env{method % ENVS}-v0", 10.0 ** -(1 + method // ENVS)
    run, rng = folder / f"{env}__ppo__{number}", random.Random(number)
    run.mkdir(parents=True)
    args = {"env_id": env, "seed": seed, "learning_rate": lr, "total_timesteps": 100 * rows}
    (run / "config.json").write_text(json.dumps({"script": "ppo.py", "script_sha256": "", "args": args}))
    (run / "status.json").write_text(json.dumps({"status": "finished", "global_step": 100 * rows, "wall_time": rows}))
    lines = []
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
    (run / "metrics.jsonl").write_text("".join(lines))
    return run


def opened(folder):
    """Seconds from the start of `solo dash` until its page has arrived, and the bytes of the page."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "solorl.cli", "dash", str(folder), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        page = urllib.request.urlopen(process.stdout.readline().split()[0]).read()
        seconds = time.perf_counter() - began
        process.send_signal(2)
    return seconds, len(page)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--rows", type=int, default=5_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        runs = [make(Path(name), number, args.rows) for number in range(args.runs)]
        print(f"first   {opened(name)[0]:.2f} s")
        for _ in range(3):
            for run in runs[:10]:
                with open(run / "metrics.jsonl", "a") as file:
                    file.write('{"global_step": 1, "wall_time": 1.0, "charts/episodic_return": 0.5}\n')
            seconds, size = opened(name)
            print(f"later   {seconds:.2f} s, page of {size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
