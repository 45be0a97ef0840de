"""`solo runs`: the run folders there are, and deleting some of them."""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from solorl import runfolder
from solorl.cli import Parser
from solorl.errors import UsageError, denied, hint, refuse
from solorl.files import expanded, missing
from solorl.runfolder import CONFIG, LOCK, METRICS, STATUS, TAIL, config_of, is_locked, is_run, lock, rows_of, status_of
from solorl.terminal import aligned, duration, scores

COLUMNS = ("env", "script", "seed", "status", "step", "evaluation", "size", "age", "folder")
NUMBERS = (2, 4, 5, 6, 7)  # columns
STATUSES = ("running", "finished", "stopped", "failed", "diverged", "killed", "unknown")
FILTERS = ("env_id", "script", "status")
Run = dict[str, Any]  # what is shown of a run folder: the names of FILTERS and folder, seed, step, evaluation, size ...


def run_folders(path: Path) -> Iterator[Path]:
    """The run folders at or below `path`; links and hidden folders are not followed."""
    for place, folders, _ in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if is_run(Path(place)):
            folders.clear()
            yield Path(place)


def stats(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    """Size and times of those files that are still there: a run that trains replaces and deletes some."""
    for path in paths:
        with suppress(OSError):
            yield path.lstat()


def read(path: Path) -> Run:
    """What the files of a run folder say, its size in bytes, and when it changed, in seconds since 1970; a run without
    its process was killed."""
    config, status = config_of(path), status_of(path)
    rows = rows_of(path / METRICS, -TAIL)
    word = runfolder.status_now(path, str(status.get("status", "unknown")).partition(":")[0])
    found = [row["eval/episodic_return"] for row in rows if "eval/episodic_return" in row]
    return {
        "folder": str(path),
        "env_id": str(config["args"].get("env_id", "")),
        "script": Path(str(config["script"])).stem,
        "seed": config["args"].get("seed"),
        "status": word if word in STATUSES else "unknown",
        "step": max(int(row.get("global_step", 0)) for row in (status, *rows[-1:])),
        "evaluation": found[-1] if found else status.get("eval/episodic_return"),
        "size": sum(one.st_size for one in stats(Path(at, name) for at, _, names in os.walk(path) for name in names)),
        "changed": max(one.st_mtime for one in stats(path / name for name in (CONFIG, STATUS, METRICS))),
    }


def table(found: Sequence[Run], width: int | None) -> list[str]:
    """The lines of the table; where they are wider than `width`, without what the folder's name says already."""
    rows: list[Sequence[str]] = [COLUMNS]
    for run in found:
        evaluation = "-" if run["evaluation"] is None else scores(run["evaluation"])[0]
        seconds = max(0.0, time.time() - run["changed"])
        age = duration(seconds) if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"
        what = (run["env_id"], run["script"], "-" if run["seed"] is None else str(run["seed"]), run["status"])
        rows.append((*what, f"{run['step']:,}", evaluation, decimal(run["size"]), age, run["folder"]))
    lines = aligned(rows, NUMBERS)
    if width is not None and max(map(len, lines)) > width:
        lines = aligned([row[3:] for row in rows], [i - 3 for i in NUMBERS])
    return lines


def chosen(paths: Sequence[Path], wanted: dict[str, list[str]]) -> list[Run]:
    """The run folders at or below the paths that are of one of the values of each filter, that with the latest change
    last; UsageError for a path that is none, and for a value that no run has."""
    for path in paths:
        if not path.is_dir():
            raise missing("folder", path)
    unique = {folder.resolve(): folder for path in paths for folder in run_folders(path)}
    found = sorted(map(read, unique.values()), key=lambda run: (run["changed"], run["folder"]))
    for name, values in wanted.items():
        allowed = STATUSES if name == "status" else sorted({run[name] for run in found})
        if wrong := [value for value in values if value not in allowed]:
            raise UsageError(f"no run has --{name.replace('_', '-')} {wrong[0]}{hint(wrong[0], allowed, 'there are')}")
    return [run for run in found if all(run[name] in values for name, values in wanted.items() if values)]


def delete(runs: Sequence[Run], yes: bool) -> int:
    """Delete run folders once that is confirmed; UsageError, and all are kept, where one cannot be deleted."""
    count = f"{len(runs)} run folder{'s'[: len(runs) != 1]}"
    for folder in (Path(run["folder"]) for run in runs):
        refuse(folder.is_symlink(), f"{folder} is a link; name the folder that it leads to")
        has_lock = (folder / LOCK).exists()  # else what the run has said last must do
        if is_locked(folder) or (not has_lock and status_of(folder).get("status") == "running"):
            raise UsageError(f"nothing is deleted: a process is training in {folder}")
    size = decimal(sum(run["size"] for run in runs))
    print("\n".join(run["folder"] for run in runs))
    if not yes and not confirmed(f"delete {count} ({size})? [y/N] "):
        print("nothing is deleted")
        return 1
    for run in runs:
        with denied(f"{run['folder']} cannot be deleted"), closing(lock(Path(run["folder"]))):
            shutil.rmtree(run["folder"])
    print(f"deleted {count}, {size}")
    return 0


def confirmed(question: str) -> bool:
    """Whether the answer is yes; no answer at all is a no."""
    with suppress(EOFError):
        return input(question).strip().lower() in ("y", "yes")
    return False


def main(argv: Sequence[str]) -> int:
    """List or delete run folders; UsageError for what is none, or where a process trains in one to be deleted."""
    parser = Parser("runs", "List run folders: `solo runs`. Delete them: `solo runs delete --status failed`.")
    parser.add_argument("what", metavar="delete | FOLDER", nargs="*", help="run folders or folders of them (runs)")
    parser.add_argument("--env-id", metavar="ID", action="append", default=[], help="only runs on this environment")
    parser.add_argument("--script", metavar="NAME", action="append", default=[], help="only runs of this script")
    only = f"only runs that are {', '.join(STATUSES)}"
    parser.add_argument("--status", metavar="WORD", action="append", default=[], help=only)
    parser.add_argument("--json", action="store_true", help="all of it for programs")
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    args = parser.parse(argv)
    deleting = args.what[:1] == ["delete"]
    paths = [*map(expanded, args.what[deleting:])]
    wanted = {name: getattr(args, name) for name in FILTERS}
    if deleting and not any(wanted.values()):
        refuse(not paths, "solo runs delete needs run folders, or a filter such as --status failed")
        for path in paths:
            refuse(path.is_dir() and not is_run(path), f"{path} is not a run folder, so it is not deleted")
    found = chosen(paths or [path for path in (Path("runs"),) if path.is_dir()], wanted)
    if args.json and not deleting:
        print(json.dumps(found, indent=2))
    elif not found:
        print("no run folders" + ("" if any(wanted.values()) or paths else " below runs"))
    elif deleting:
        return delete(found, args.yes)
    else:
        print("\n".join(table(found, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)))
    return 0
