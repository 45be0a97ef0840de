"""Does one task of a study, anywhere: `solo work` is this.

It takes the task's lease, makes or resumes the run folder (in a storage without folders: downloads the newest whole
checkpoint), runs the script as a child process, tells it to save when a signal or the time limit comes, brings each
new checkpoint up, and writes the result. The exit code is for the scheduler: 0: nothing is left to do here, 1: failed,
2: bad input, 75: stopped after saving, run me again.
"""

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from solorl import signals
from solorl.errors import UsageError
from solorl.files import read_json
from solorl.machine import is_alive
from solorl.studies.child import Child, environment, is_locked
from solorl.studies.engines.cluster import AGAIN, GRACE
from solorl.studies.found import Found, checkpoints, is_whole, run_dirs, trainer, verdict
from solorl.studies.lease import Heart, Lease
from solorl.studies.mirror import Mirror
from solorl.studies.ready import check_package, runnable
from solorl.studies.storage import refusal
from solorl.studies.study import Study, installed, used
from solorl.studies.task import Task

LOOK = 0.1  # seconds between two looks for a new checkpoint
LISTENED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Worker:
    """One task, done by this process."""

    def __init__(self, study: Study, task: Task, say: Callable[[str], None]):
        self._study, self._task, self._say = study, task, say
        self._lease = Lease(study, task.id)
        self._child: Child | None = None
        self._signal = 0  # the first one that was heard
        self._why = ""  # why the training was told to end: signal, time, cancelled, taken
        self._forced = False
        self._told = 0.0
        self._lines: Iterable[str] = ()  # the last ones that the training printed

    def run(self) -> int:
        """The exit code. UsageError where this machine cannot do the task; OSError where the storage refuses."""
        with signals.handled(self._hear, LISTENED):
            if self._is_over() or not self._take():
                return AGAIN if self._signal else 0
            try:
                return 0 if self._is_over() else self._attempt()
            finally:
                self._lease.release()

    def _is_over(self) -> bool:
        task_id = self._task.id
        if over := self._study.storage.exists(f"results/{task_id}.json"):
            self._say(f"{self._task} has finished before")
        elif over := self._study.is_cancelled(task_id):
            self._say(f"{self._task} is cancelled; `solo bench retry` allows it again")
        return over

    def _take(self) -> bool:
        if mine := self._lease.take():
            if self._lease.oddity:
                self._say(f"{self._task}: {self._lease.oddity}")
            return mine
        self._say(f"{self._task}: waiting for process {self._lease.holder().get('handle', '')}, which has it")
        mine = self._lease.wait(lambda: bool(self._signal))
        if not mine and not self._signal:
            self._say(f"{self._task}: another worker does it")
        return mine

    # ------------------------------------------------------------------ one attempt
    def _attempt(self) -> int:
        """Count the attempt, do it, and note how it ended."""
        before = self._study.attempts(self._task.id)
        if used(before) >= self._study.limit:
            self._say(f"{self._task} has failed {used(before)} times, as often as it may; see `solo bench retry`")
            return 1
        began = time.time()
        number = self._study.begin(self._task.id, {**self._lease.owner, "started": began})
        heart = Heart(self._study, self._task.id, self._lease, self._task.resources.time, self._end)
        heart.start()
        code, found, refused = 2, Found("failed", "the worker was killed"), {}
        try:
            found, code = self._work(number)
        except (UsageError, OSError) as error:
            found.reason = str(error) if isinstance(error, UsageError) else refusal(error)
            refused = {"refused": True} if isinstance(error, UsageError) else {}  # so it would be the next time
            raise
        finally:
            heart.stop()
            seconds = round(time.time() - began, 3)
            about = {**refused, "state": found.state, "reason": found.reason, "seconds": seconds, "ended": time.time()}
            self._note(number, {**about, "exit_code": code, "tail": [*self._lines] if found.state == "failed" else []})
        self._say(f"{self._task}: {found.state}{found.reason and ': '}{found.reason}")
        if found.state == "stopped":
            forced = 128 + self._signal if self._forced and self._signal else AGAIN
            return 0 if self._why in ("taken", "cancelled") else forced
        return int(found.state == "failed")

    def _work(self, number: int) -> tuple[Found, int]:
        """Run the script where it left off: what became of it, and its exit code."""
        storage = self._study.storage
        scratch = None if storage.folder else Path(tempfile.mkdtemp(prefix="solorl-"))
        work = (scratch or storage.folder or Path()) / "tasks" / self._task.id
        try:
            work.mkdir(parents=True, exist_ok=True)
            check_package(self._study)
            mirror = Mirror(storage, work, f"tasks/{self._task.id}") if scratch else None
            if mirror:
                mirror.download()
            task = runnable(self._study, self._task, scratch)
            self._wait_for_others(work)
            found, code = self._find(work), 0
            if found.status != "finished":
                code = self._train(task, work, number, found, mirror)
                found = self._find(work)
            found.state, found.reason = verdict(task, found, code, self._why in ("signal", "cancelled", "taken"))
            if self._why == "time" and found.state != "finished":
                found.state, found.reason = "failed", f"its time limit of {task.resources.time:,} seconds was reached"
            if self._why != "taken" and mirror:
                mirror.upload()
            if found.state == "finished":
                self._accept(work, found, number)
            return found, code
        finally:
            if scratch:
                shutil.rmtree(scratch, ignore_errors=True)

    def _find(self, work: Path) -> Found:
        """The newest run folder and its status; a finished one before any other."""
        dirs = run_dirs(work, self._task)
        finished = [path for path in dirs if read_json(path / "status.json").get("status") == "finished"]
        run_dir = [*dirs, *finished][-1] if dirs else None
        status = str(read_json(run_dir / "status.json").get("status", "")) if run_dir else ""
        return Found("new", "", run_dir, status)

    def _accept(self, work: Path, found: Found, number: int) -> None:
        """Write the result; of several workers that come so far the first one."""
        at = f"tasks/{self._task.id}"
        status = read_json(found.run_dir / "status.json") if found.run_dir else {}
        run_dir = f"{at}/{found.run_dir.relative_to(work).as_posix()}" if found.run_dir else ""
        about = {"attempt": number, "run_dir": run_dir, "status": status, "ended": time.time(), "solorl": installed()}
        if not self._study.accept(self._task.id, {**self._lease.owner, **about}):
            self._say(f"{self._task}: a result was accepted before this one")

    def _note(self, number: int, changes: dict[str, Any]) -> None:
        """Note how an attempt ended; where the storage refuses, in a file of this machine that a sentence names."""
        try:
            self._study.note(self._task.id, number, changes)
        except OSError as error:
            elsewhere = Path(tempfile.gettempdir()) / f"solorl-{self._task.id}-{number}.json"
            with contextlib.suppress(OSError):
                elsewhere.write_text(json.dumps(changes))
            kept = f"; it is in {elsewhere}" if elsewhere.exists() else ""
            self._say(f"what became of attempt {number} could not be noted: {refusal(error)}{kept}")

    def _wait_for_others(self, work: Path) -> None:
        """Wait until no process trains in the run folder: one may outlive its worker for a moment."""
        while not self._why:
            run_dir = self._find(work).run_dir
            if not is_alive(trainer(run_dir, self._task.id)) and not is_locked(run_dir):
                return
            time.sleep(LOOK)

    # ------------------------------------------------------------------ the child
    def _train(self, task: Task, work: Path, number: int, found: Found, mirror: Mirror | None) -> int:
        """Run the script to its end; its exit code."""
        if self._why:
            return 0
        cwd = Path() if task.script.ours else work / f"attempt-{number}"
        cwd.mkdir(exist_ok=True)
        own = {} if task.script.ours else {"SOLORL_RUN_DIR": str(cwd)}
        more = ("--runs-dir", str(work))
        if found.run_dir and not found.status.startswith("diverged") and not self._is_hopeless(found.run_dir):
            more = ("--resume", str(found.run_dir))
        argv = task.argv(*(more if task.script.ours else ()))
        self._say(f"{task}, attempt {number}: {' '.join(argv)}")
        self._child = Child(argv, cwd, {**environment(task, os.environ), **own}, work / f"output-{number}.txt")
        try:
            if self._why:  # it came before there was a child to tell
                self._end(self._why)
            self._watch(self._child, work, mirror)
        finally:
            code = self._child.close()
            self._lines = self._child.lines
        return code

    def _is_hopeless(self, run_dir: Path) -> bool:
        """Whether resuming has failed before and can only fail again."""
        last = [one for one in self._study.attempts(self._task.id) if one.get("state") == "failed"][-1:]
        found = checkpoints(run_dir)
        return bool(last and found) and not any(is_whole(path) for path in found)

    def _watch(self, child: Child, work: Path, mirror: Mirror | None) -> None:
        """Until the child has ended: bring up each new checkpoint, and kill what does not end after being told."""
        seen: set[Path] = set()
        while child.poll(LOOK) is None:
            if self._why == "time" and time.monotonic() - self._told > GRACE:
                child.tell(force=True)
            there = {path for path in work.glob("*/checkpoint/step_*") if (path / "manifest.json").exists()}
            if mirror and there - seen and self._why != "taken":
                try:
                    mirror.upload()
                    seen = there
                except OSError as error:
                    self._say(f"the checkpoint could not be brought up, which is tried again: {refusal(error)}")
                    time.sleep(1.0)

    # ------------------------------------------------------------------ endings
    def _hear(self, number: int, frame: Any) -> None:
        """The first signal: save and end. A second one kills, unless the first one was a SIGUSR1: that is a scheduler's
        warning, and its SIGTERM comes while the training saves."""
        if self._signal in (0, signal.SIGUSR1):
            self._signal = number
            self._end("signal")
        elif number != signal.SIGUSR1:
            self._forced = True
            if self._child:
                self._child.tell(force=True)

    def _end(self, why: str) -> None:
        """Tell the training to save and end, once; where the task is another worker's now, end it at once."""
        first = not self._told
        self._why = why if why == "taken" else self._why or why
        if self._child:
            self._told = self._told or time.monotonic()
            if first or why == "taken":
                self._child.tell(force=why == "taken")
