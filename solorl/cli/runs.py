"""`solo runs`: the run folders there are, and deleting some of them."""

import fcntl
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from solorl.cli import Parser
from solorl.errors import UsageError, hint
from solorl.files import missing, read_json
from solorl.runfolder import is_locked, last_rows
from solorl.terminal import aligned, duration, scores

COLUMNS = ("env", "script", "seed", "status", "step", "evaluation", "size", "age", "folder")
NUMBERS = (2, 4, 5, 6, 7)  # columns
STATUSES = ("running", "finished", "stopped", "failed", "diverged", "killed", "unknown")
FILTERS = ("env_id", "script", "status")


@dataclass
class RunFolder:
    """What is shown of a run folder."""

    folder: str
    env_id: str
    script: str
    seed: int | None
    status: str  # one of STATUSES
    step: int
    evaluation: float | None
    size: int  # bytes
    changed: float  # seconds since 1970, of the last change

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)


def is_run(path: Path) -> bool:
    """Whether a folder is one that a run has made: its config.json says so, and there is something of the run."""
    config = read_json(path / "config.json")
    ours = isinstance(config.get("args"), dict) and isinstance(config.get("script"), str) and "script_sha256" in config
    return ours and any((path / name).exists() for name in ("status.json", "metrics.jsonl", "checkpoint"))


def run_folders(path: Path) -> Iterator[Path]:
    """The run folders at or below `path`; links and hidden folders are not followed."""
    if is_run(path):
        yield path
        return
    try:
        children = sorted(path.iterdir())
    except OSError:
        return
    for child in children:
        if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
            yield from run_folders(child)


def read(path: Path) -> RunFolder:
    """What config.json, status.json and the last rows of metrics.jsonl say; a run without its process was killed."""
    config, status = read_json(path / "config.json"), read_json(path / "status.json")
    rows = last_rows(path / "metrics.jsonl")
    word = str(status.get("status", "unknown")).partition(":")[0]
    if word == "running" and not is_locked(path):
        word = "killed"
    scores = [row["eval/episodic_return"] for row in rows if "eval/episodic_return" in row]
    steps = [_number(row.get("global_step")) or 0.0 for row in (status, *rows[-1:])]
    files = [path / name for name in ("config.json", "status.json", "metrics.jsonl")]
    seed = _number(config["args"].get("seed"))
    return RunFolder(
        folder=str(path),
        env_id=str(config["args"].get("env_id", "")),
        script=Path(config["script"]).stem,
        seed=None if seed is None else int(seed),
        status=word if word in STATUSES else "unknown",
        step=int(max(steps)),
        evaluation=_number(scores[-1] if scores else status.get("eval/episodic_return")),
        size=sum(file.lstat().st_size for file in _files(path)),
        changed=max(file.stat().st_mtime for file in files if file.exists()),
    )


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:  # an integer beyond all floating-point numbers
        return None


def _files(path: Path) -> list[Path]:
    return [Path(place, name) for place, _, names in os.walk(path) for name in names]


def as_row(run: RunFolder) -> tuple[str, ...]:
    """The cells of one line."""
    evaluation = "-" if run.evaluation is None else scores(run.evaluation)[0]
    seed = "-" if run.seed is None else str(run.seed)
    age = days(time.time() - run.changed)
    numbers = (f"{run.step:,}", evaluation, bytes_of(run.size), age)
    return run.env_id, run.script, seed, run.status, *numbers, run.folder


def table(found: Sequence[RunFolder], width: int | None) -> list[str]:
    """The lines of the table; where they are wider than `width`, without what the folder's name says already."""
    rows = [COLUMNS, *map(as_row, found)]
    lines = aligned(rows, NUMBERS)
    if width is not None and max(map(len, lines)) > width:
        lines = aligned([row[3:] for row in rows], [i - 3 for i in NUMBERS])
    return lines


def days(seconds: float) -> str:
    """A time that has passed, as people say it."""
    return duration(max(0.0, seconds)) if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def bytes_of(size: float) -> str:
    """A number of bytes as people say it."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def found_below(paths: Sequence[Path]) -> list[RunFolder]:
    """The run folders at or below the paths, that with the latest change last; UsageError for a path that is none."""
    for path in paths:
        if not path.is_dir():
            raise missing("folder", path)
    unique = {folder.resolve(): folder for path in paths for folder in run_folders(path)}
    return sorted(map(read, unique.values()), key=lambda run: (run.changed, run.folder))


def chosen(found: Sequence[RunFolder], wanted: dict[str, list[str]]) -> list[RunFolder]:
    """Those that are of one of the values of each filter; UsageError for a value that none has."""
    for name, values in wanted.items():
        allowed = STATUSES if name == "status" else sorted({getattr(run, name) for run in found})
        for value in values:
            if value not in allowed:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"no run has {flag} {value}{hint(value, allowed, 'there are')}")
    return [run for run in found if all(getattr(run, name) in values for name, values in wanted.items() if values)]


def delete(runs: Sequence[RunFolder], yes: bool) -> int:
    """Delete run folders once that is confirmed; UsageError, and all are kept, where one cannot be deleted."""
    with ExitStack() as locks:
        for run in runs:
            if run.path.is_symlink():
                raise UsageError(f"{run.folder} is a link; name the folder that it leads to")
            if not lock(run.path, locks):
                raise UsageError(f"nothing is deleted: a process is training in {run.folder}")
        size = bytes_of(sum(run.size for run in runs))
        print("\n".join(run.folder for run in runs))
        if not yes and not confirmed(f"delete {_count(runs)} ({size})? [y/N] "):
            print("nothing is deleted")
            return 1
        for run in runs:
            try:
                shutil.rmtree(run.path)
            except OSError as error:
                raise UsageError(f"{run.folder} cannot be deleted: {error.strerror}") from None
    print(f"deleted {_count(runs)}, {size}")
    return 0


def lock(path: Path, locks: ExitStack) -> bool:
    """Keep any process from training in the folder until `locks` ends; False where one does so already."""
    try:
        file = locks.enter_context(open(path / ".lock"))  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no such file, or a file system without locks: then what status.json says must do
        return read_json(path / "status.json").get("status") != "running"
    return True


def confirmed(question: str) -> bool:
    """Whether the answer is yes; no answer at all is a no."""
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _count(runs: Sequence[RunFolder]) -> str:
    return f"{len(runs)} run folder{'s'[: len(runs) != 1]}"


def main(argv: Sequence[str]) -> int:
    """List or delete run folders; UsageError for what is none, or where a process trains in one to be deleted."""
    parser = Parser("runs", "List run folders: `solo runs`. Delete them: `solo runs delete --status failed`.")
    parser.add_argument("what", metavar="delete | FOLDER", nargs="*", help="run folders or folders of them (runs)")
    parser.add_argument("--env-id", metavar="ID", action="append", default=[], help="only runs on this environment")
    parser.add_argument("--script", metavar="NAME", action="append", default=[], help="only runs of this script")
    parser.add_argument(
        "--status", metavar="WORD", action="append", default=[], help=f"only runs that are {', '.join(STATUSES)}"
    )
    parser.add_argument("--json", action="store_true", help="all of it for programs")
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    args = parser.parse(argv)
    deleting = args.what[:1] == ["delete"]
    paths = [Path(name).expanduser() for name in args.what[deleting:]]
    wanted = {name: getattr(args, name) for name in FILTERS}
    if deleting and not any(wanted.values()):
        if not paths:
            raise UsageError("solo runs delete needs run folders, or a filter such as --status failed")
        for path in paths:
            if path.is_dir() and not is_run(path):
                raise UsageError(f"{path} is not a run folder, so it is not deleted")
    default = [Path("runs")] if Path("runs").is_dir() else []
    found = chosen(found_below(paths or default), {name: list(values) for name, values in wanted.items()})
    if args.json and not deleting:
        print(json.dumps([asdict(run) for run in found], indent=2))
        return 0
    if not found:
        print("no run folders" + ("" if any(wanted.values()) or paths else " below runs"))
        return 0
    if deleting:
        return delete(found, args.yes)
    print("\n".join(table(found, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)))
    return 0
