"""A bench: a pool of workers on this machine that brings its tasks of a study to their end, and collects their tables;
other commands and machines may work on the same study."""

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solorl.lab.studies.collect import Collector
from solorl.lab.studies.runs import command, find, following, to_resume
from solorl.lab.studies.study import State, Study
from solorl.lab.studies.task import Task
from solorl.lab.studies.worker import Pool


class Bench:
    """Brings tasks of a study to their end, and their tables into a folder. `view` shows what happens: `say(text)`, and
    `refresh(bench)` a few times a second."""

    def __init__(self, study: Study, tasks: Sequence[Task], pool: Pool, view: Any, folder: Path):
        self.study, self.tasks, self.pool, self.view = study, list(tasks), pool, view
        self.collector = Collector(study, folder, view.say, tasks[0].variant)
        self.skipped: set[str] = set()  # ids of tasks that had finished before
        self.finished: set[str] = set()  # and of those that have finished since then
        self.states: dict[str, State] = {}  # what the files said last
        self._looked = 0.0

    def run(self) -> int:
        """0: all finished; 1: some failed or were not begun; 128 + signal: interrupted. Raises OSError
        where the storage refuses."""
        done = self.study.ids()
        for task in [task for task in self.tasks if task.id in done]:
            if self.collector.keep(task, before=True):
                self.skipped.add(task.id)
            else:
                self.view.say(f"lost       {task}: its run folder and its table are gone, so it runs again")
                self.study.storage.delete(f"results/{task.id}.json")
        self.pool.run(self._turn)
        self._turn(last=True)
        self.states = self.study.states(self.tasks)
        for task in (each for each in self.tasks if self.states[each.id].reason.startswith("diverged")):
            self.collector.keep(task)  # a table without those that fell would show the survivors only
        if self.pool.signal:
            return 128 + self.pool.signal
        return int(bool(len(self.skipped) + len(self.finished) < len(self.tasks) or self.collector.problems))

    def _turn(self, last: bool = False) -> None:
        """Bring the tables of what has finished since the last look, here or elsewhere."""
        if last or time.monotonic() - self._looked > self.pool.look:
            self._looked, done = time.monotonic(), self.study.ids()
            for task in self.tasks:
                if task.id in done and task.id not in self.skipped | self.finished:
                    self.finished.add(task.id)
                    self.collector.keep(task)
        self.view.refresh(self)


def dry_run(study: Study, tasks: Sequence[Task]) -> int:
    """Print a command a line, ready to paste, for all that is not finished; how many are."""
    root, done = study.storage.folder or Path(), study.ids()
    found = {task.id: find(study, task) for task in tasks}
    waiting = [task for task in tasks if task.id not in done and found[task.id].status != "finished"]
    count = len(tasks) - len(waiting)
    while waiting:
        task = waiting.pop(0)
        fresh = [other for other in waiting if found[other.id].run_dir is None]
        several = following(task, fresh) if found[task.id].run_dir is None else []
        waiting = [other for other in waiting if other not in several]
        argv, cwd = command(task, root / "tasks" / task.id, to_resume(task, found[task.id]), 1 + len(several))
        line, where = shlex.join(argv), shlex.quote(str(cwd))
        print(line if task.script.ours else f"(mkdir -p {where} && cd {where} && SOLORL_RUN_DIR={where} {line})")
    if count:
        print(f"{count} of {len(tasks)} are finished", file=sys.stderr)
    return count
