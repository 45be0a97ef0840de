"""What run folders say about a task, read without the libraries."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solorl.files import read_json, sha256
from solorl.lab.studies.task import Task
from solorl.machine import command_line, process_start


@dataclass
class Found:
    """What the files say about a task."""

    state: str  # new | finished | stopped | failed
    reason: str = ""  # why it failed
    run_dir: Path | None = None
    status: str = ""  # of the run folder's status.json


def newest(works: Iterable[Path], task: Task) -> Found:
    """The newest run folder of a task below these folders, and its status; a finished one before any other."""
    dirs = [path for work in works for path in run_dirs(work, task)]
    finished = [path for path in dirs if read_json(path / "status.json").get("status") == "finished"]
    run_dir = [*dirs, *finished][-1] if dirs else None
    return Found("new", "", run_dir, str(read_json(run_dir / "status.json").get("status", "")) if run_dir else "")


def verdict(task: Task, found: Found, code: int, cancelled: bool) -> tuple[str, str]:
    """State and reason of a task whose process has ended with `code`."""
    if found.status == "finished":
        return "finished", ""
    if found.status.startswith("diverged"):
        return "failed", found.status
    if cancelled or (found.status == "stopped" and code in (0, 130, -signal.SIGTERM)):
        return "stopped", "it was ended before it had finished"
    if code == 0 and not found.status and not task.script.ours:
        return "finished", ""
    if code == 0:
        return "failed", "exit code 0, but " + (f"its status is {found.status}" if found.status else "no run folder")
    return "failed", f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"


def signal_name(number: int) -> str:
    """`SIGTERM`, or the number of a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def run_dirs(work: Path, task: Task) -> list[Path]:
    """The run folders of a task below `work`, oldest first: with config.json, or else with TensorBoard files."""
    pattern = "*/config.json" if task.script.ours else "**/config.json"
    configs = [path for path in work.glob(pattern) if task.script.ours or is_run_dir(path.parent)]
    configs = [path for path in configs if args_of(path.parent).get("seed", task.seed) == task.seed]
    events = [] if configs or task.script.ours else list(work.glob("**/events.out.tfevents*"))
    newest_last = sorted(configs or events, key=lambda path: path.stat().st_mtime_ns)
    return [path.parent for path in newest_last]


def is_run_dir(folder: Path) -> bool:
    """Whether a folder of any script is a run folder as ours are, not one with a config.json of another kind."""
    return (folder / "config.json").is_file() and (folder / "metrics.jsonl").is_file()


def newest_step(run_dir: Path | None) -> int | None:
    """The step of a run folder's newest checkpoint; None where there is none."""
    return max((int(path.name[5:]) for path in checkpoints(run_dir)), default=None) if run_dir else None


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first, as `checkpoints/checkpoint.py` has them."""
    return sorted(path for path in run_dir.glob("checkpoint/step_*") if path.name[5:].isdecimal() and path.is_dir())


def has_sha256(path: Path, digest: Any) -> bool:
    """Whether a file can be read and has this SHA-256."""
    try:
        return sha256(path) == digest
    except OSError:
        return False


def is_whole(checkpoint: Path) -> bool:
    """Whether the files of a checkpoint are those of its manifest."""
    digests = read_json(checkpoint / "manifest.json").get("sha256")
    if not isinstance(digests, dict) or not digests:
        return False
    return all(has_sha256(checkpoint / name, digest) for name, digest in digests.items())


def trainer(run_dir: Path | None) -> str:
    """The handle of the process of this machine that trains in a run folder; empty where none does."""
    status = read_json(run_dir / "status.json") if run_dir else {}
    pid = status.get("pid")
    if not run_dir or status.get("status") != "running" or not isinstance(pid, int):
        return ""
    return f"{pid}:{process_start(pid)}" if run_dir.parent.name in command_line(pid) else ""


def args_of(run_dir: Path) -> dict[str, Any]:
    """The arguments of a run."""
    args = read_json(run_dir / "config.json").get("args")
    return args if isinstance(args, dict) else {}
