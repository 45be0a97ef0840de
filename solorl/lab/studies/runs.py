"""What run folders say about a task, read without the libraries; and the command that trains it."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from solorl.lab.studies.study import Study
from solorl.lab.studies.task import Task
from solorl.runfolder import CONFIG, METRICS, args_of, status_of


@dataclass
class Found:
    """A run folder of a task, where there is one, what it says, and what has become of the task."""

    run_dir: Path | None = None
    status: str = ""  # running | finished | stopped | failed | diverged: ...
    state: str = ""  # finished | stopped | failed
    reason: str = ""


def find(study: Study, task: Task, root: Path | None = None) -> Found:
    """The newest run folder of a task below `root`, which is that of a study in a folder; a finished one before any
    other. A process that trained several seeds has left their folders in that of the first."""
    alike = [each for each in [*study.tasks.values()] if each.kind == task.kind] if task.script.many_seeds else []
    return newest(((root or study.storage.folder or Path()) / "tasks" / each.id for each in [*alike, task]), task)


def newest(works: Iterable[Path], task: Task) -> Found:
    """The same below these folders."""
    found = [path for work in dict.fromkeys(works) for path in run_dirs(work, task)]
    states = [Found(path, str(status_of(path).get("status", ""))) for path in found]
    return [Found(), *states, *(one for one in states if one.status == "finished")][-1]


def run_dirs(work: Path, task: Task) -> list[Path]:
    """The run folders of a task below `work`, oldest first; those of another script may lie deeper, and may have
    nothing but TensorBoard files."""
    configs = [*work.glob(f"*/{CONFIG}")] if task.script.ours else [*work.rglob(CONFIG)]
    configs = [path for path in configs if task.script.ours or (path.parent / METRICS).is_file()]  # of runs as ours are
    configs = [path for path in configs if args_of(path.parent).get("seed", task.seed) == task.seed]
    events = [] if configs or task.script.ours else work.rglob("events.out.tfevents*")
    return [path.parent for path in sorted([*configs, *events], key=lambda path: path.stat().st_mtime_ns)]


def verdict(task: Task, found: Found, code: int, told: str) -> tuple[str, str]:
    """State and reason of a task whose process has ended with `code`; `told`: why it was told to end, if it was."""
    if found.status == "finished" or (code == 0 and not (found.status or told or task.script.ours)):
        return "finished", ""
    if found.status.startswith("diverged"):
        return "failed", found.status
    if told == "time":
        return "failed", f"its time limit of {task.resources.time:,} seconds was reached"
    if told or (found.status == "stopped" and code in (0, 130, -signal.SIGTERM)):
        return ("stopped", "") if told else ("failed", "it was told to end, by a signal or a file")
    if code == 0:
        return "failed", "exit code 0, but " + (f"its status is {found.status}" if found.status else "no run folder")
    return "failed", f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"


def signal_name(number: int) -> str:
    """`SIGTERM`, or the number of a signal without a name."""
    return next((each.name for each in signal.Signals if each == number), f"signal {number}")


def command(task: Task, work: Path, run_dir: Path | None, seeds: int = 1) -> tuple[tuple[str, ...], Path]:
    """The words that train a task, on in `run_dir` where there is one, and the folder where they run: for a script that
    is not ours a new one each time."""
    if not task.script.ours:
        return task.argv(), work / f"attempt-{1 + len([*work.glob('attempt-*')])}"
    place = ("--resume", str(run_dir)) if run_dir else ("--runs-dir", str(work))
    return task.argv(*place, seeds=seeds), Path()


def to_resume(task: Task, found: Found) -> Path | None:
    """The run folder in which a task continues: not that of one that has diverged."""
    return found.run_dir if task.script.ours and not found.status.startswith("diverged") else None


def following(task: Task, others: Iterable[Task]) -> list[Task]:
    """Those of `others` with the seeds after this one, for a script that trains several seeds in one process."""
    seeds = {other.seed: other for other in others if other.kind == task.kind} if task.script.many_seeds else {}
    found: list[Task] = []
    while other := seeds.get(task.seed + len(found) + 1):
        found.append(other)
    return found
