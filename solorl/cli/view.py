"""What `solo bench` shows while it runs: lines, and in a terminal a live table below them."""

import time
from contextlib import nullcontext
from typing import Any

from solorl.lab.studies.bench import Bench
from solorl.lab.studies.runs import find
from solorl.lab.studies.worker import SCORE, Worker
from solorl.runfolder import METRICS, args_of, last_rows
from solorl.terminal import duration, scores

COLUMNS = ("running", "seed", "done", "evaluation", "for")


class Lines(nullcontext[None]):
    """Plain lines, for pipes and files."""

    def say(self, text: str) -> None:
        """Print a line at once."""
        print(f"{text}\n", end="", flush=True)  # one piece: several threads may say something

    def refresh(self, bench: Bench) -> None:
        """Nothing: lines are printed as things happen."""


class Table:
    """A live table below the lines, for terminals: what runs, how far it is, and the time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._next = 0.0

    def __enter__(self) -> "Table":
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(text, markup=False, soft_wrap=True)

    def refresh(self, bench: Bench) -> None:
        """Draw the table again, once a second."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 1
            self._live.update(table(bench), refresh=True)


def table(bench: Bench) -> Any:
    """The rich table of a bench: a row for each worker, the counts and the time left below."""
    from rich.table import Table as Rich
    from rich.text import Text

    workers = [(worker, [*worker.tasks]) for worker in bench.pool.workers if worker.tasks]
    shown = [(tasks, *progress(worker), time.time() - worker.began) for worker, tasks in workers if tasks]
    left = seconds_left(bench, [(tasks[0].kind, took, share) for tasks, share, _, took in shown])
    count = len(bench.skipped | bench.finished)
    counts = f"{count} of {len(bench.tasks)} finished, {len(shown)} running"
    drawn = Rich(caption=f"{counts}{'' if left is None else f', {duration(left)} left'}", caption_justify="left")
    for name in COLUMNS:
        drawn.add_column(name, justify="left" if name == "running" else "right")
    for (task, *others), share, score, took in shown:
        variant = f" [{task.variant}]" if task.variant else ""
        drawn.add_row(
            Text(f"{task.script.name}{variant} {task.env_id}"), f"{task.seed}{f'-{others[-1].seed}' if others else ''}",
            "" if share is None else f"{100 * share:.0f} %", "" if score is None else scores(score)[0], duration(took),
        )  # fmt: skip
    return drawn


def progress(worker: Worker) -> tuple[float | None, float | None]:
    """The fraction of its steps that a worker has done and its last evaluation, where they are known."""
    run_dir = next((find(worker.study, task).run_dir for task in worker.tasks), None)
    if not run_dir or not (rows := last_rows(run_dir / METRICS)):
        return None, None
    total, step = args_of(run_dir).get("total_timesteps"), rows[-1].get("global_step", 0)
    scores = [row[SCORE] for row in rows if SCORE in row]
    return (min(1.0, step / total) if total else None), (scores[-1] if scores else None)


def seconds_left(bench: Bench, running: list[tuple[str, float, float | None]]) -> float | None:
    """An estimate from the seconds of finished tasks, and for those that run (kind, seconds so far, fraction done) from
    their progress; None without either."""
    known = {name: sum(seconds) / len(seconds) for name, seconds in bench.seconds.items()}
    for name, took, share in running:
        if share:
            known.setdefault(name, took / share)
    if not known:
        return None
    mean, done = sum(known.values()) / len(known), bench.skipped | bench.finished
    rests = [max(0.0, known.get(name, mean) - took) for name, took, _ in running]
    kinds = [task.kind for task in bench.tasks if task.id not in done]
    for name, *_ in running:
        kinds.remove(name)
    waiting = [known.get(name, mean) for name in kinds]
    return max([sum(rests + waiting) / len(bench.pool.workers), *rests])
