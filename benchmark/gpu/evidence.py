"""Trainings of evidence.toml for the minutes that are left, in order, as many side by side as their shares allow.

    python benchmark/gpu/evidence.py --minutes 4 --out OUT                      # writes OUT/NAME-ENV.tar.gz.0 ...
    python benchmark/gpu/evidence.py --minutes 4 --out OUT --continue BEFORE    # from the archives in BEFORE

They are stopped (SIGTERM, so that they save) before the time is over. An archive holds a job's run folders, in parts of
at most 16 MiB.
"""

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT, MOST, SAVING = HERE.parents[1], 16 * 2**20, 25  # bytes of an archive; seconds for saving and packing


def jobs(names):
    """(name, share, words after `solo train`, flags as a dict) of each training of the file, or of those named."""
    for job in tomllib.loads((HERE / "evidence.toml").read_text())["job"]:
        for env_id in job["env_ids"]:
            words = [ROOT / "algorithms" / job["script"], "--env-id", env_id]
            for name, value in job["flags"].items():
                words += [f"--{name}", *([] if value is True else [ROOT / value if name == "dataset" else value])]
            if not names or job["name"] in names:
                yield f"{job['name']}-{env_id}", job["share"], words, job["flags"]


def going_on(folder, flags):
    """The words that continue the runs in the folder, if there are any; None where they have ended."""
    runs = sorted(path.parent for path in folder.glob("*/config.json"))
    done = [json.loads((run / "status.json").read_text())["status"] == "finished" for run in runs]
    if runs and all(done):
        return None
    return ["--resume", runs[0], "--num-seeds", flags["num-seeds"]][: 4 if "num-seeds" in flags else 2] if runs else []


def pack(folder, out):
    """The run folders as an archive, in parts of MOST bytes."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as file:
        file.add(folder, folder.name)
    for i, start in enumerate(range(0, len(data.getvalue()), MOST)):
        (out / f"{folder.name}.tar.gz.{i}").write_bytes(data.getvalue()[start : start + MOST])


def unpack(before, work):
    """What `pack` has written."""
    for first in sorted(before.glob("*.tar.gz.0")):
        parts = [first.with_suffix(f".{i}") for i in range(len(list(before.glob(f"{first.stem}.*"))))]
        with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as file:
            file.extractall(work, filter="data")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--names", nargs="*", default=[], help="jobs of evidence.toml, default: all")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT", "."))
    parser.add_argument("--continue", dest="before", type=Path, help="folder with archives of another time")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    stop = time.monotonic() + 60 * args.minutes - SAVING
    work = Path(tempfile.mkdtemp())
    waiting, running = list(jobs(args.names)), {}
    if args.before:
        unpack(args.before, work)
    while (waiting or running) and time.monotonic() < stop:
        while waiting and waiting[0][1] + sum(share for _, share in running.values()) <= 1:
            name, share, words, flags = waiting.pop(0)
            more = going_on(work / name, flags)
            if more is not None:
                command = [*words, *more, "--runs-dir", work / name, "--device", args.device]
                command = [sys.executable, "-m", "solorl.cli", "train", *map(str, command)]
                environment = os.environ | {"OMP_NUM_THREADS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
                running[name] = subprocess.Popen(command, env=environment, cwd=ROOT), share
        time.sleep(0.2)
        running = {name: pair for name, pair in running.items() if pair[0].poll() is None}
    for process, _ in running.values():
        process.send_signal(signal.SIGTERM)
    for process, _ in running.values():
        try:
            process.wait(timeout=SAVING - 10)
        except subprocess.TimeoutExpired:
            process.kill()
    for folder in sorted(work.iterdir()) if work.exists() else ():
        pack(folder, Path(args.out))


if __name__ == "__main__":
    main()
