"""Running many trainings so that nothing finished is lost or counted twice, whatever is killed in the middle.

All state is in files below one folder, `runs/bench/NAME`:

    tasks/ID.json   what became of a task: state, attempts, exit code, seconds, run folder, collected table
    tasks/ID.lock   the process that takes care of it now (process id, its start time, machine)
    ID/             where it runs: output.txt and its run folders

A training of ours is finished when the status.json of its run folder says so, any other when it left exit code 0.
A training that outlives a killed `solo bench` is waited for if its run folder exists, because that will tell how it
ended; without one it is ended and started again.
"""

import contextlib
import fcntl
import json
import math
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from solorl.files import read_json, sha256, write_atomically
from solorl.machine import is_alive, own_handle
from solorl.metrics import last_rows
from solorl.results import result as results
from solorl.results.read import collect
from solorl.results.tensorboard import read_tensorboard
from solorl.studies.engines import Engine, Job
from solorl.studies.found import (
    Found,
    args_of,
    checkpoints,
    has_sha256,
    is_run_dir,
    is_whole,
    newest_step,
    run_dirs,
    signal_name,
    trainer,
    verdict,
)  # fmt: skip
from solorl.studies.plan import Plan, Task
from solorl.studies.pool import Ended, Pool
from solorl.studies.storage import refusal

LOOK_AGAIN = 1.0  # seconds between two looks at a task that another process has
TAIL = 12  # last lines shown of a failed training


class Store:
    """The files of tasks below one folder. Methods that write raise OSError where the disk refuses."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tasks = folder / "tasks"

    # ------------------------------------------------------------------ records
    def record(self, task: Task) -> dict[str, Any]:
        """What was noted about a task; empty where nothing was, or nothing that can be read."""
        return read_json(self.tasks / f"{task.id}.json")

    def note(self, task: Task, safe: bool = False, **changes: Any) -> None:
        """Change a task's record, whole or not at all; `safe` also from a power cut."""
        about = {"script": task.script.name, "script_sha256": task.script.sha256, "variant": task.variant}
        given = {"env_id": task.env_id, "seed": task.seed, "flags": task.flags}
        record = {"format": 1, **about, **given, **self.record(task), **changes}
        path, text = self.tasks / f"{task.id}.json", json.dumps(record, indent=1)
        if safe:
            write_atomically(path, text.encode())
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(text)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    # ------------------------------------------------------------------ locks
    def lock(self, task: Task) -> str:
        """Take care of a task from now on: an empty text, or who does already. A dead process's lock is taken over."""
        path = self.tasks / f"{task.id}.lock"
        with self._alone():
            holder = read_json(path)
            pid, host = str(holder.get("handle", "")).partition(":")[0], holder.get("host")
            if holder and host != platform.node():
                return f"process {pid} on {host} (if that machine is gone, delete {path})"
            if holder and is_alive(holder["handle"]):
                return f"process {pid}"
            path.unlink(missing_ok=True)
            _create(path, json.dumps({"handle": own_handle(), "host": platform.node()}))
        return ""

    def unlock(self, task: Task) -> None:
        """Leave a task to others."""
        (self.tasks / f"{task.id}.lock").unlink(missing_ok=True)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process is inside at the same time; the system ends this when a process dies."""
        self.tasks.mkdir(parents=True, exist_ok=True)
        with open(self.tasks / ".mutex", "a") as file:
            # without locks in the file system, files that are created alone do as well
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # ------------------------------------------------------------------ what happened
    def find(self, task: Task) -> Found:
        """What the files say about a task, its run folder before its record."""
        record = self.record(task)
        run_dir, status = self._run_dir(task, record)
        state = str(record.get("state", "new"))
        if status == "finished":
            state = "finished"
        elif status and state in ("finished", "new"):  # the run folder knows better
            state = "stopped"
        return Found(state, str(record.get("reason", "")), run_dir, status, record)

    def place(self, task: Task, record: dict[str, Any]) -> Path:
        """The folder below which the last attempt of a task leaves its results."""
        work = self.folder / str(record.get("work", task.id))
        return work if task.script.ours else work / f"attempt-{record.get('attempts', 1)}"

    def _run_dir(self, task: Task, record: dict[str, Any]) -> tuple[Path | None, str]:
        """The task's run folder and its status: a finished one, else the newest."""
        work = self.place(task, record)
        found = [(path, str(read_json(path / "status.json").get("status", ""))) for path in run_dirs(work, task)]
        finished = [item for item in found if item[1] == "finished"]
        return (finished or found)[-1] if found else (None, "")

    def survivors(self, task: Task, found: Found) -> list[str]:
        """Handles of processes that may still run this task for a command that was killed."""
        handles = [str(found.record.get("handle", ""))] if found.record.get("state") == "running" else []
        if found.run_dir:
            handles.append(trainer(found.run_dir, found.run_dir.parent.name))
        return [handle for handle in handles if handle]

    def progress(self, task: Task) -> tuple[float | None, float | None]:
        """The fraction of its steps that a running task has done and its last evaluation, where they are known."""
        run_dir, _ = self._run_dir(task, self.record(task))
        rows = last_rows(run_dir / "metrics.jsonl") if run_dir else []
        if not run_dir or not rows:
            return None, None
        total = args_of(run_dir).get("total_timesteps")
        step = rows[-1].get("global_step", 0)
        scores = [row["eval/episodic_return"] for row in rows if "eval/episodic_return" in row]
        return (min(1.0, step / total) if total else None), (scores[-1] if scores else None)

    # ------------------------------------------------------------------ running
    def resumable(self, task: Task, found: Found) -> bool:
        """Whether to continue in the run folder, where training has begun."""
        half = found.state in ("running", "stopped", "failed") and found.run_dir is not None
        return task.script.ours and half and not self.why_not_resumed(task, found)

    def why_not_resumed(self, task: Task, found: Found) -> str:
        """Why a training of ours begins again although it has a run folder; empty where it need not.

        A failure alone is not a reason, however often it comes: a run that can be resumed loses no step.
        """
        if found.run_dir is None or found.state == "finished" or not task.script.ours:
            return ""
        if found.status.startswith("diverged"):
            return f"it has {found.status}; {found.run_dir} is kept"
        failed_again = found.state == "failed" and bool(found.record.get("resumed"))
        if failed_again and not any(is_whole(path) for path in checkpoints(found.run_dir)):
            return f"resuming failed and no checkpoint in {found.run_dir} is whole; the folder is kept"
        return ""

    def is_fresh(self, task: Task, found: Found) -> bool:
        """Whether a training can begin in one process with others: nothing of it is left that counts."""
        begun = self.resumable(task, found) or bool(self.why_not_resumed(task, found))
        return found.state in ("new", "failed") and not begun

    def job(self, tasks: list[Task], found: Found) -> Job:
        """The process that trains these tasks: one, or several seeds that follow each other. Writes nothing."""
        task, work = tasks[0], self.folder / tasks[0].id
        output = work / "output.txt"
        if not task.script.ours:
            cwd = (work / f"attempt-{found.record.get('attempts', 0) + 1}").resolve()
            return Job(task.argv(), output, cwd, {"SOLORL_RUN_DIR": str(cwd)})
        more = ("--resume", str(found.run_dir)) if self.resumable(task, found) else ("--runs-dir", str(work))
        return Job(task.argv(*more, seeds=len(tasks)), output)

    def start(self, tasks: list[Task], start: Callable[[Job], str]) -> str:
        """Start the process of these tasks with `start`, job -> handle; everything is noted before and after, so that a
        kill finds it."""
        found = self.find(tasks[0])
        job = self.job(tasks, found)
        job.output.parent.mkdir(parents=True, exist_ok=True)
        job.cwd.mkdir(parents=True, exist_ok=True)
        attempts = found.record.get("attempts", 0) + 1
        with open(job.output, "a") as file:
            file.write(f"{'' if attempts == 1 else chr(10)}==== attempt {attempts}: {' '.join(job.argv)}\n")
            if why := self.why_not_resumed(tasks[0], found):
                file.write(f"from the beginning: {why}\n")
        common = {"state": "running", "attempts": attempts, "work": tasks[0].id, "started": time.time()}
        resumed = self.resumable(tasks[0], found)
        common |= {"resumed": resumed, "resumed_at": newest_step(found.run_dir) if resumed else None}
        for task in tasks:
            self.note(task, **common, handle="", reason="")
        handle = start(job)
        with contextlib.suppress(OSError):  # it runs now, also where the disk is full
            for task in tasks:
                self.note(task, handle=handle)
        return handle

    def settle(self, task: Task, code: int, cancelled: bool = False, share: int = 1) -> Found:
        """Note how a process ended that ran `share` tasks: finished, stopped (to be gone on with) or failed."""
        found = self.find(task)
        found.state, found.reason = verdict(task, found, code, cancelled)
        record = found.record
        seconds = (time.time() - record.get("started", time.time())) / share + record.get("seconds", 0.0)
        changes = {"state": found.state, "reason": found.reason, "exit_code": code, "seconds": round(seconds, 3)}
        found.record = record | changes
        self.note(task, safe=True, **changes, ended=time.time(), run_dir=str(found.run_dir) if found.run_dir else None)
        return found

    def tail(self, task: Task) -> list[str]:
        """The last lines that the last attempt of a task printed."""
        path = self.folder / str(self.record(task).get("work", task.id)) / "output.txt"
        try:
            with open(path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 8000))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        lines = text.split("==== attempt ")[-1].splitlines()[1:]
        return [line.rstrip() for line in lines if line.strip()][-TAIL:]


def _create(path: Path, text: str) -> None:
    """Create a file that must not exist; OSError, and no file, where that fails."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY), "w") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink(missing_ok=True)
            raise


def following(task: Task, others: Iterable[Task]) -> list[Task]:
    """Those of `others` with the seeds after this one, for a script that trains several seeds in one process."""
    kind = (task.script, task.env_id, task.variant, task.flags)
    seeds = {other.seed: other for other in others if (other.script, other.env_id, other.variant, other.flags) == kind}
    found: list[Task] = []
    while task.script.many_seeds and (other := seeds.get(task.seed + len(found) + 1)):
        found.append(other)
    return found


# ---------------------------------------------------------------------- the runner
class View(Protocol):
    """Where a runner shows what happens."""

    def say(self, text: str) -> None:
        """Something happened."""

    def refresh(self, runner: "Runner") -> None:
        """Some time has passed."""


class Runner:
    """Brings every task of a plan to its end and into the results folder, as many at once as the engine has slots."""

    def __init__(self, plan: Plan, store: Store, engine: Engine, folder: Path, view: View):
        self.plan, self.store, self.folder, self.view = plan, store, folder, view
        self.pool = Pool[list[Task]](engine, self._say_ending)
        self.queue = deque(plan.tasks)
        self.running = self.pool.running
        self.elsewhere: dict[str, Task] = {}  # tasks that another command takes care of
        self.skipped: list[Task] = []  # finished before this command
        self.finished: list[Task] = []
        self.failed: dict[str, str] = {}  # task id -> reason
        self.uncollected: dict[str, str] = {}
        self.tables: set[str] = set()  # ids of finished tasks whose table lies in the results folder
        self.bare: dict[str, Path] = {}  # task id -> where a finished task should have left something, but did not
        self.began = time.time()
        self._looked = 0.0
        self._seconds: dict[tuple[str, str, str], list[float]] = {}  # of finished tasks by script, variant, environment

    def run(self) -> int:
        """The exit code: 0 when everything is finished and collected, 1 when not, 128 + signal when interrupted."""
        with self.pool.listening():
            while self.running or (not self.pool.signal and (self.queue or self.elsewhere)):
                for ended in self.pool.ended():
                    self._settle(ended)
                if not self.pool.signal:
                    self._fill()
                self.view.refresh(self)
        return self.pool.exit_code or int(bool(self.failed or self.uncollected))

    def _say_ending(self) -> None:
        if self.running:
            name, count = signal_name(self.pool.signal), len(self.running)
            self.view.say(f"{name}: {count} running {_plural('training', count)} save and end; once more kills them")

    # ------------------------------------------------------------------ the loop
    def _fill(self) -> None:
        """Give every free slot a task."""
        if self.elsewhere and not self.queue and time.monotonic() - self._looked > LOOK_AGAIN:
            self._looked = time.monotonic()
            self.queue.extend(self.elsewhere.values())
        while self.queue and self.pool.free and not self.pool.signal:
            self._take(self.queue.popleft())
            self.view.refresh(self)

    def _take(self, task: Task) -> None:
        """Lock one task and do what is left to do; another command's is looked at again later."""
        try:
            holder = self.store.lock(task)
        except OSError as error:
            self._fail(task, f"{self.store.tasks} cannot be written: {error.strerror}")
            return
        if holder:
            if task.id not in self.elsewhere:
                self.view.say(f"elsewhere  {task}: {holder} takes care of it")
            self.elsewhere[task.id] = task
            return
        theirs = self.elsewhere.pop(task.id, None) is not None
        try:
            self._proceed(task, theirs)
        except OSError as error:
            self._fail(task, refusal(error, self.store.folder))
        if not any(task in tasks for tasks in self.running.values()):
            self.store.unlock(task)

    def _proceed(self, task: Task, theirs: bool) -> None:
        """Skip, collect, wait for, resume or start a task whose lock is held."""
        found = self.store.find(task)
        if found.state == "finished" and not self._is_lost(task, found):
            self.skipped += [] if theirs else [task]
            self.finished += [task] if theirs else []
            self._remember(task, found)
            self._collect(task, found)
        elif found.state == "failed" and found.record.get("ended", 0.0) >= self.began:
            self._fail(task, f"{found.reason} (run by another command)")
        elif handle := self.pool.adopt(self.store.survivors(task, found), [task]):
            self._wait_for(task, found, handle)
        elif not has_sha256(task.script.path, task.script.sha256):
            self._fail(task, f"{task.script.path.name} has changed since this command began; the same command runs it")
        else:
            self._start(task, found)

    def _is_lost(self, task: Task, found: Found) -> bool:
        """Whether a finished training of ours left neither its run folder nor a table that can be read."""
        lost = task.script.ours and found.run_dir is None and not self._is_collected(task, found)
        if lost:
            self.view.say(f"lost       {task}: its run folder and its table are gone, so it runs again")
        return lost

    def _wait_for(self, task: Task, found: Found, handle: str) -> None:
        if found.status:
            self.view.say(f"waiting    {task}: it still runs for a command that was killed")
        else:
            self.view.say(f"ending     {task}: it still runs for a command that was killed, and starts again")
            self.pool.cancel(handle, force=True)

    def _start(self, task: Task, found: Found) -> None:
        resumed = self.store.resumable(task, found)
        tasks = [task] if resumed else [task, *self._neighbours(task)]
        try:
            self.store.start(tasks, lambda job: self.pool.start(job, tasks))
        except OSError:
            for other in tasks[1:]:
                self.queue.append(other)
                self.store.unlock(other)
            raise
        seeds = f" to {tasks[-1].seed}" if len(tasks) > 1 else ""
        again = f" from the beginning: {why}" if (why := self.store.why_not_resumed(task, found)) else ""
        self.view.say(f"{'resumed' if resumed else 'started':<10} {task}{seeds}{again}")

    def _neighbours(self, task: Task) -> list[Task]:
        """The queued tasks with the seeds after this one that the same process can train, such that every free slot
        gets some; takes their locks. Not those after a half-done one, which continues in its own process."""
        others, taken = following(task, self.queue), []
        share = math.ceil((len(others) + 1) / self.pool.free)
        for other in others[: share - 1]:
            if not self.store.is_fresh(other, self.store.find(other)) or self.store.lock(other):
                break
            self.queue.remove(other)
            taken.append(other)
        return taken

    def _settle(self, ended: Ended[list[Task]]) -> None:
        """Note how each task of a process ended."""
        for task in ended.work:
            try:
                found = self.store.settle(task, ended.code, bool(self.pool.signal), len(ended.work))
                self._report(task, found, ended.adopted)
            except OSError as error:
                self._fail(task, refusal(error, self.store.folder))
            self.store.unlock(task)

    def _report(self, task: Task, found: Found, adopted: bool) -> None:
        if found.state == "finished":
            self.finished.append(task)
            self._remember(task, found)
            score = read_json(found.run_dir / "status.json").get("eval/episodic_return") if found.run_dir else None
            evaluation = f", evaluation {score:.1f}" if isinstance(score, (int, float)) else ""
            self.view.say(f"finished   {task} in {found.record['seconds']:.1f} s{evaluation}  ({self.summary()})")
            self._collect(task, found)
        elif adopted and not self.pool.signal:
            self.queue.appendleft(task)  # it outlived its command but did not finish: start or resume it here
        elif self.pool.signal:
            again = "resumes it" if self.store.resumable(task, found) else "starts it again"
            self.view.say(f"stopped    {task}: the same command {again}")
        else:
            step = newest_step(found.run_dir)
            stuck = step is not None and step == found.record.get("resumed_at")
            hint = f", again after step {step:,}; where it never gets further, delete {found.run_dir}" if stuck else ""
            self._fail(task, found.reason + hint)

    def _fail(self, task: Task, reason: str) -> None:
        self.failed[task.id] = reason
        lines = "".join(f"\n    | {line}" for line in self.store.tail(task))
        self.view.say(f"failed     {task}: {reason}{lines}")

    # ------------------------------------------------------------------ results
    def _is_collected(self, task: Task, found: Found) -> bool:
        """Whether the task's table lies in the results folder as it was written; where the run folder is gone, also
        whether it is a table of this script and can be read."""
        name = found.record.get("result")
        if not name or Path(name).parent.resolve() != self.folder.resolve():
            return False
        if has_sha256(Path(name), found.record.get("result_sha256")):
            return True
        try:
            return found.run_dir is None and results.read(Path(name)).script_sha256 == task.script.sha256
        except ValueError:
            return False

    def _collect(self, task: Task, found: Found) -> None:
        """Bring the task's table into the results folder, unless it is there and whole."""
        if self._is_collected(task, found):
            self.tables.add(task.id)
            return
        if found.run_dir is None:
            self.bare[task.id] = self.store.place(task, found.record)
            if task not in self.skipped:
                self.view.say(f"no table   {task}: no run folder and no TensorBoard files in {self.bare[task.id]}")
            return
        if found.record.get("result"):
            self.view.say(
                f"again      {task}: its table {found.record['result']} is missing, damaged or of another run"
            )
        try:
            path = collected(task, found.run_dir, self.folder)
            self.store.note(task, safe=True, state="finished", result=str(path), result_sha256=sha256(path))
            self.tables.add(task.id)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self.uncollected[task.id] = reason
            self.view.say(f"not kept   {task} is finished, but its table is not in {self.folder}: {reason}")

    # ------------------------------------------------------------------ numbers to show
    def summary(self) -> str:
        """How far this command is, in a few words."""
        parts = [f"{len(self.finished) + len(self.skipped)} of {len(self.plan.tasks)} finished"]
        parts += [f"{len(self.failed)} failed"] if self.failed else []
        parts += [f"{len(self.uncollected)} not collected"] if self.uncollected else []
        return ", ".join(parts)

    def _remember(self, task: Task, found: Found) -> None:
        if seconds := found.record.get("seconds"):
            self._seconds.setdefault(_kind(task), []).append(seconds)

    def seconds_left(self) -> float | None:
        """An estimate from the seconds of finished tasks and the progress of running ones; None without either."""
        known = {kind: sum(seconds) / len(seconds) for kind, seconds in self._seconds.items()}
        running = []
        for task in [tasks[0] for tasks in self.running.values()]:
            elapsed = time.time() - self.store.record(task).get("started", time.time())
            share, _ = self.store.progress(task)
            if share:
                known.setdefault(_kind(task), elapsed / share)
            running.append((task, elapsed, share))
        if not known:
            return None
        mean = sum(known.values()) / len(known)
        rests = [
            known.get(_kind(task), mean) * (1 - share) if share else max(0.0, known.get(_kind(task), mean) - elapsed)
            for task, elapsed, share in running
        ]
        waiting = [known.get(_kind(task), mean) for task in self.queue]
        return max([sum(rests + waiting) / self.pool.workers, *rests])


def collected(task: Task, run_dir: Path, folder: Path) -> Path:
    """Write the table of a finished run into `folder`; the name of a TensorBoard folder does not say whose it is.

    Raises ResultError (a ValueError) where the run cannot be read, OSError where the table cannot be written.
    """
    if task.script.ours or is_run_dir(run_dir):
        return collect(run_dir, folder, task.variant)
    found = read_tensorboard(run_dir, (task.env_id, task.script.name, task.seed))
    result = replace(
        found,
        env_id=task.env_id,
        script=task.script.name,
        seed=task.seed,
        variant=task.variant,
        script_sha256=task.script.sha256,
        args={name.removeprefix("--"): " ".join(values) for name, values in task.flags.items()},
        status="finished",
    )
    return results.write(result, folder)


def _kind(task: Task) -> tuple[str, str, str]:
    return task.script.name, task.variant, task.env_id


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
