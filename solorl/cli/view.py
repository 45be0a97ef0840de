"""What `solo bench` shows while it runs: lines, and in a terminal bars below them."""

import time
from contextlib import nullcontext
from typing import Any

from solorl.files import DAY
from solorl.lab.studies.bench import Bench
from solorl.lab.studies.runs import find
from solorl.lab.studies.worker import SCORE, Worker
from solorl.runfolder import METRICS, TAIL, args_of, rows_of
from solorl.terminal import scores


class Lines(nullcontext[None]):
    """Plain lines, for pipes and files."""

    def say(self, text: str) -> None:
        """Print a line at once."""
        print(f"{text}\n", end="", flush=True)  # one piece: several threads may say something

    def refresh(self, bench: Bench) -> None:
        """Nothing: lines are printed as things happen."""


class Table:
    """Bars below the lines, for terminals: of all runs, with the time left, and of each that is under way."""

    def __init__(self) -> None:
        from rich import progress as rich
        from rich.console import Console

        columns = (rich.TextColumn("{task.description}", markup=False), rich.BarColumn(), rich.TaskProgressColumn(),
                   rich.TextColumn("{task.fields[score]}"), rich.TimeElapsedColumn(), rich.TextColumn("left:"),
                   rich.TimeRemainingColumn())  # fmt: skip
        self.progress = rich.Progress(*columns, console=Console(highlight=False), auto_refresh=False, transient=True,
                                      speed_estimate_period=DAY)  # fmt: skip
        self._all = self.progress.add_task("", score="")
        self._rows: dict[str, Any] = {}  # id of the first task of a worker -> its bar
        self._next = 0.0

    def __enter__(self) -> "Table":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self.progress.console.print(text, markup=False, soft_wrap=True)

    def refresh(self, bench: Bench) -> None:
        """Draw the bars again, once a second."""
        if time.monotonic() < self._next:
            return
        self._next, count = time.monotonic() + 1, len(bench.skipped | bench.finished)
        running = {tasks[0].id: (worker, tasks) for worker in bench.pool.workers if (tasks := [*worker.tasks])}
        for task_id in self._rows.keys() - running.keys():
            self.progress.remove_task(self._rows.pop(task_id))
        shares = 0.0
        for task_id, (worker, (first, *others)) in running.items():
            if task_id not in self._rows:
                name = f"{first} to {others[-1].seed}" if others else str(first)
                self._rows[task_id] = self.progress.add_task(name, total=None, score="")
            share, score = progress(worker)
            shares += (share or 0.0) * (1 + len(others))
            told = "" if score is None else scores(score)[0]
            self.progress.update(self._rows[task_id], total=1.0 if share else None, completed=share or 0.0, score=told)
        words = f"{count} of {len(bench.tasks)} finished, {len(running)} running"
        self.progress.update(self._all, total=len(bench.tasks), completed=count + shares, description=words)
        self.progress.refresh()


def progress(worker: Worker) -> tuple[float | None, float | None]:
    """The fraction of its steps that a worker has done and its last evaluation, where they are known."""
    run_dir = next((find(worker.study, task).run_dir for task in worker.tasks), None)
    if not run_dir or not (rows := rows_of(run_dir / METRICS, -TAIL)):
        return None, None
    total, step = args_of(run_dir).get("total_timesteps"), rows[-1].get("global_step", 0)
    scores = [row[SCORE] for row in rows if SCORE in row]
    return (min(1.0, step / total) if total else None), (scores[-1] if scores else None)
