"""Runs algorithm files with `--device cuda` for a few steps, stops each, and resumes it: side by side, 40 seconds each.

    python benchmark/gpu/files.py --out benchmark/results/cuda     # those that benchmark/results/cuda does not name
    python benchmark/gpu/files.py --files droq pqn --out .

Flags, data sets and teachers are those of tests/test_golden.py. Writes files.json: of each file "yes", or the last
lines of its output, as where it needs a package that is not there.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = []  # all that were started
REAL = {"Catch-v5": "Pong-v5", "CatchEasy-v0": "StarpilotEasy-v0"}  # EnvPool's games in the place of the tests' own


def unseen():
    """The files that no table in benchmark/results/cuda names."""
    pages = [page.read_text() for page in (ROOT / "benchmark/results/cuda").glob("*.md")]
    seen = {name for page in pages for name in re.findall(r"^\| `(\w+)`", page, re.M)}
    return sorted(path.stem for path in (ROOT / "algorithms").glob("*/*.py") if path.stem not in seen)


def run(words, limit):
    """The exit code (None: ended after `limit` seconds) and output of `solo train WORDS`."""
    path = f"{ROOT / 'tests/doubles'}:{os.environ.get('PYTHONPATH', '')}"
    variables = {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OMP_NUM_THREADS": "1"}
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "solorl.cli", "train", *map(str, words)], env=inherited | variables, cwd=ROOT,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    PROCESSES.append(process)
    try:
        return process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        end(process)
        return process.communicate()[0], None


def end(process):
    """End it and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def stop(*_):
    """On a signal: nothing goes on without this process."""
    for process in PROCESSES:
        if process.poll() is None:
            end(process)
    os._exit(1)


def short(name):
    """The words of a short training of a file: those of the tests, which also record data and train teachers."""
    sys.path.insert(0, str(ROOT / "tests"))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # of this process alone: EnvPool's games are not for JAX on a GPU
    from test_golden import flags_of

    return [REAL.get(word, word) for word in flags_of(name)]


def outcome(output, code):
    """Of a training, in a word, or the last lines of what it said."""
    return "yes" if code == 0 else [*output.splitlines()[-4:], f"exit code {code}"]


def check(name, words, folder, device, limit):
    """What happened to a file."""
    began, found = time.perf_counter(), {"file": name}
    [path] = (ROOT / "algorithms").glob(f"*/{name}.py")
    end = words.index("--total-timesteps") + 1
    common = ["--device", device, "--eval-every", 0]
    output, code = run([path, *words, *common, "--runs-dir", folder / name], limit)
    found["ran"] = outcome(output, code)
    runs = sorted(path.parent for path in (folder / name).glob("*/config.json"))
    if code == 0 and runs:  # half as many steps more, from its last checkpoint
        more = ["--resume", runs[0], "--total-timesteps", int(words[end]) * 3 // 2, "--resume-changed"]
        found["resumed"] = outcome(*run([path, *more, *common], limit))
    print(found, flush=True)
    return found | {"seconds": round(time.perf_counter() - began, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", nargs="+", default=unseen())
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=40, help="seconds of one training")
    parser.add_argument("--side-by-side", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT", "."), help="folder for files.json")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, stop)
    found, out, words = [], Path(args.out), {}
    out.mkdir(parents=True, exist_ok=True)
    for name in args.files:
        try:
            words[name] = short(name)
        except (Exception, SystemExit) as error:
            found.append({"file": name, "ran": [f"no data or teacher: {error}"]})
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.side_by_side) as pool:
        jobs = [pool.submit(check, name, words[name], Path(folder), args.device, args.limit) for name in words]
        for job in as_completed(jobs):
            found.append(job.result())
            (out / "files.json").write_text(json.dumps(found, indent=1) + "\n")
    print(sum(each["ran"] == "yes" for each in found), "of", len(found), "ran;", end=" ")
    print(sum(each.get("resumed") == "yes" for each in found), "were resumed")


if __name__ == "__main__":
    main()
