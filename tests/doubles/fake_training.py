"""A training of milliseconds that keeps a run folder as ours do, without the libraries: made to be killed."""

import argparse
import fcntl
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path

if False:
    from solorl import RunArgs  # noqa: F401  the sign of a script of ours


def arguments():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--env-id", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--runs-dir", default="runs")
    parser.add_argument("--resume", default="")
    parser.add_argument("--total-timesteps", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.01)  # seconds of a step
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--fail-at", type=int, default=-1)  # step at which it ends with an error
    parser.add_argument("--fail-after", type=int, default=-1)  # the same, in steps of this process
    parser.add_argument("--fail-by", type=int, default=0)  # a signal, rather than exit code 1
    parser.add_argument("--diverge-at", type=int, default=-1)
    parser.add_argument("--fail-once", default="")  # a file: fails unless it exists, and makes it
    return parser.parse_args()


def write(path, content):
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def save(folder, step):
    """A checkpoint of empty files, whole or not there at all; the previous one is deleted."""
    names, digest = ("tensors.safetensors", "state.json"), hashlib.sha256().hexdigest()
    (writing := folder / "checkpoint/.writing").mkdir(parents=True, exist_ok=True)
    for name in names:
        (writing / name).touch()
    (writing / "manifest.json").write_text(json.dumps({"sha256": dict.fromkeys(names, digest)}))
    writing.rename(folder / f"checkpoint/step_{step:012d}")
    for path in sorted((folder / "checkpoint").glob("step_*"))[:-1]:
        shutil.rmtree(path)


def fail(args):
    print("some line\nRuntimeError: the simulator has crashed", file=sys.stderr, flush=True)
    if args.fail_by:
        os.kill(os.getpid(), args.fail_by)
    sys.exit(1)


def score(args, share):
    """Best with --learning-rate 1e-3; grows linearly while it trains."""
    return share * (100 - 20 * abs(math.log10(args.learning_rate) + 3)) + args.seed / 100


def open_folder(args):
    if args.resume:
        return Path(args.resume), max(int(path.name[5:]) for path in (Path(args.resume) / "checkpoint").glob("step_*"))
    folder = Path(args.runs_dir) / f"{args.env_id}__fake__{args.seed}__{time.time_ns()}"
    save(folder, 0)
    sha256 = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    config = {"format": 1, "script": Path(__file__).name, "script_sha256": sha256, "args": vars(args)}
    write(folder / "config.json", config | {"command": sys.argv, "started": str(time.time())})
    return folder, 0


def main():
    args = arguments()
    ending = []
    signal.signal(signal.SIGTERM, lambda *_: ending.append(1))
    folder, start = open_folder(args)
    lock = open(folder / ".lock", "a")  # noqa: SIM115  until this process ends
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    status = {"status": "running", "pid": os.getpid(), "global_step": start, "wall_time": 0.1}
    write(folder / "status.json", status)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True) if start else []
    (folder / "metrics.jsonl").write_text("".join(lines[:start]))
    if args.fail_once and not Path(args.fail_once).exists():
        Path(args.fail_once).touch()
        sys.exit("error: the first attempt fails")
    for step in range(start, args.total_timesteps):
        time.sleep(args.pause)
        if step == args.fail_at or step - start == args.fail_after:
            fail(args)
        if step == args.diverge_at:
            write(folder / "status.json", status | {"status": "diverged: losses/value_loss is nan"})
            sys.exit(3)
        if journal := os.environ.get("FAKE_JOURNAL"):
            with open(journal, "a") as file:
                file.write(f"{args.env_id} {args.seed} {args.learning_rate} {step}\n")
        value = score(args, (step + 1) / args.total_timesteps)
        row = {"global_step": step + 1, "wall_time": step * args.pause, "eval/episodic_return": value}
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row | {"eval/episodic_return_std": 1.0, "eval/episodic_length": 9.0}) + "\n")
        save(folder, step + 1)
        if ending:
            write(folder / "status.json", status | {"status": "stopped", "global_step": step + 1})
            return
    write(folder / "status.json", status | {"status": "finished", "global_step": args.total_timesteps,
                                            "eval/episodic_return": score(args, 1.0)})  # fmt: skip


if __name__ == "__main__":
    main()
