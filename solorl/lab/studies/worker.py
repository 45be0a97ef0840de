"""Does tasks of a study, anywhere: `solo work` is this, and so is each thread of a `solo bench` of this machine.

It takes the leases of its tasks, makes or resumes the run folder (in a storage without folders: downloads the newest
whole checkpoint), runs the script as a child process, tells it to save when a signal or the time limit comes, brings
each new checkpoint up, and writes the results. The exit code is for a scheduler: 0: nothing is left to do here, 1:
failed, 2: bad input, 75: stopped after saving, run me again.
"""

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from solorl.errors import UsageError
from solorl.files import read_json, shown
from solorl.lab.studies.child import Child, environment
from solorl.lab.studies.engines.cluster import AGAIN, GRACE
from solorl.lab.studies.found import Found, checkpoints, is_whole, newest, newest_step, trainer, verdict
from solorl.lab.studies.lease import Heart, Lease
from solorl.lab.studies.mirror import Mirror
from solorl.lab.studies.ready import check_package, runnable
from solorl.lab.studies.storage import refusal
from solorl.lab.studies.study import Study, installed, used
from solorl.lab.studies.task import Task
from solorl.machine import is_alive, pinned
from solorl.runfolder import is_locked

LOOK = 0.1  # seconds between two looks for a new checkpoint
LISTENED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Worker:
    """One task, or new tasks of one kind whose seeds follow each other, which one process trains; done by this thread.

    `env` and `cores` are for the training where this is one of many threads: it waits for no other worker then, and
    does not print what the training prints.
    """

    def __init__(
        self, study: Study, tasks: Sequence[Task], say: Callable[[str], None],
        env: Mapping[str, str] | None = None, cores: Sequence[int] = (),
    ):  # fmt: skip
        self.study, self.tasks, self._say, self._env, self._cores = study, list(tasks), say, env, [*cores]
        self.began = time.time()
        self.found: dict[str, Found] = {}  # task id -> what has become of it
        self._leases: list[Lease] = []
        self._root = study.storage.folder or Path()
        self._child: Child | None = None
        self._heart: Heart | None = None
        self._signal = 0  # the first one that was heard
        self._why = ""  # why the training was told to end: signal, time, cancelled, taken
        self._forced = False
        self._told = 0.0
        self._about: dict[str, Any] = {}  # what is noted about the attempt at its end

    def __str__(self) -> str:
        return f"{self.tasks[0]}{f' to {self.tasks[-1].seed}' if len(self.tasks) > 1 else ''}"

    def run(self) -> int:
        """The exit code. UsageError where this machine cannot do the tasks; OSError where the storage refuses."""
        try:
            if not (taken := self._take(*self.tasks)):
                return AGAIN if self._why == "signal" else 0
            self.tasks = taken
            return self._attempt()
        finally:
            for lease in self._leases:
                lease.release()

    def find(self, task: Task) -> Found:
        """A run folder of a task and its status: a finished one, else the newest."""
        return newest([self._root / work for work in self.study.works(task.id)], task)

    # ------------------------------------------------------------------ leases
    def _take(self, first: Task, *others: Task) -> list[Task]:
        """The tasks whose leases this worker gets: the first, and those after it as long as nothing of them is there;
        none where the first is another's or done."""
        if self._is_over(first) or not self._lease(first) or self._is_over(first):
            return []
        taken = [first]
        for task in others:
            begun = self.find(first).run_dir or self.find(task).run_dir
            if begun or self._is_over(task) or not self._lease(task):
                break
            taken.append(task)
        return taken

    def _is_over(self, task: Task) -> bool:
        if over := self.study.is_done(task.id):
            self._say_alone(f"{task} has finished before")
        elif over := self.study.is_cancelled(task.id):
            self._say_alone(f"{task} is cancelled; `solo bench retry` allows it again")
        return over

    def _say_alone(self, text: str) -> None:
        """Say what a command of many threads sees by itself."""
        if self._env is None:
            self._say(text)

    def _lease(self, task: Task) -> bool:
        lease = Lease(self.study, task.id)
        mine = lease.take()
        if lease.oddity:
            self._say(f"{task}: {lease.oddity}")
        if not mine:
            if self._env is not None:
                return False
            process = f"process {lease.holder().get('handle', '').partition(':')[0]}"
            self._say(f"{task}: waiting for {process}, which has it")
            mine = lease.wait(lambda: bool(self._why))
            if not mine and not self._why:
                self._say(f"{task}: another worker does it")
        self._leases += [lease] if mine else []
        return mine

    # ------------------------------------------------------------------ one attempt
    def _attempt(self) -> int:
        """Count the attempt, do it, and note how it ended."""
        first = self.tasks[0]
        if (count := used(self.study.attempts(first.id))) >= self.study.limit:
            self._say_alone(f"{first} has failed {count} times, as often as it may; see `solo bench retry`")
            return 1
        self.began = time.time()
        # a command that dies with its threads has not failed
        about = {"started": self.began, "work": first.id, "forgiven": self._env is not None}
        numbers = {task.id: self.study.begin(task.id, {**self._leases[0].owner, **about}) for task in self.tasks}
        heart = self._heart = Heart(self.study, self._leases, first.resources.time, self.end)
        if self._env is None or self.study.storage.folder is None:
            heart.start()
        self.found = {task.id: Found("failed", "the worker was killed") for task in self.tasks}
        code = 2
        try:
            code = self._work(numbers[first.id])
        except (UsageError, OSError) as error:
            for found in self.found.values():
                found.reason = str(error) if isinstance(error, UsageError) else refusal(error)
            self._about["refused"] = isinstance(error, UsageError)  # so it would be the next time
            raise
        finally:
            heart.stop()
            for task in self.tasks:
                found, lines = self.found[task.id], self._child.lines() if self._child else []
                self._note(task.id, numbers[task.id], {
                    **self._about, "state": found.state, "reason": found.reason, "seconds": self._seconds(),
                    "ended": time.time(), "exit_code": code, "tail": lines if found.state == "failed" else [],
                    "forgiven": False,
                })  # fmt: skip
        return self._code()

    def _code(self) -> int:
        states = [found.state for found in self.found.values()]
        if "stopped" in states:
            again = "resumes it" if self.find(self.tasks[0]).run_dir else "starts it again"
            self._say(f"stopped    {self}: the same command {again}")
            forced = 128 + self._signal if self._forced and self._signal else AGAIN
            return 0 if self._why in ("taken", "cancelled") else forced
        for task in self.tasks:
            self._say_alone(f"{task}: {self.found[task.id].state} {self.found[task.id].reason}".rstrip())
        return int("failed" in states)

    def _seconds(self) -> float:
        """Of each task of this process."""
        return round((time.time() - self.began) / len(self.tasks), 3)

    def _work(self, number: int) -> int:
        """Run the script where it left off, and judge; its exit code."""
        storage, first = self.study.storage, self.tasks[0]
        scratch = None if storage.folder else Path(tempfile.mkdtemp(prefix="solorl-"))
        self._root = scratch or self._root
        work = self._root / "tasks" / first.id
        try:
            work.mkdir(parents=True, exist_ok=True)
            check_package(self.study)
            mirror = Mirror(storage, work, f"tasks/{first.id}") if scratch else None
            if mirror:
                mirror.download()
            task = runnable(self.study, first, scratch)
            self._wait_for_others()
            code, begun = 0, self.find(first)
            if begun.status != "finished":
                code = self._train(task, work, number, begun, mirror)
            for each in self.tasks:
                self.found[each.id] = self._judge(each, code, begun, work / f"attempt-{number}")
            if self._why != "taken" and mirror:
                mirror.upload()
            for each in self.tasks:
                if self.found[each.id].state == "finished":
                    self._accept(each, number)
            return code
        finally:
            if scratch:
                shutil.rmtree(scratch, ignore_errors=True)

    def _judge(self, task: Task, code: int, begun: Found, cwd: Path) -> Found:
        """What has become of a task whose process has ended with `code`."""
        found = self.find(task) if task.script.ours or not cwd.exists() else newest([cwd], task)
        found.state, found.reason = verdict(task, found, code, self._why in ("signal", "cancelled", "taken"))
        if self._why == "time" and found.state != "finished":
            found.state, found.reason = "failed", f"its time limit of {task.resources.time:,} seconds was reached"
        if found.state == "failed" and self._about.get("resumed"):
            step = newest_step(found.run_dir)
            if found.run_dir and step == newest_step(begun.run_dir) == self._about["step"]:
                hint = f"where it never gets further, delete {shown(found.run_dir)}"
                found.reason += f", again after step {step or 0:,}; {hint}"
        return found

    def _accept(self, task: Task, number: int) -> None:
        """Write the result; of several workers that come so far the first one."""
        run_dir = self.found[task.id].run_dir
        name = run_dir.relative_to(self._root).as_posix() if run_dir else ""
        status = read_json(run_dir / "status.json") if run_dir else {}
        about = {"attempt": number, "run_dir": name, "status": status, "seconds": self._seconds(), "ended": time.time()}
        if not self.study.accept(task.id, {**self._leases[0].owner, **about, "solorl": installed()}):
            self._say(f"{task}: a result was accepted before this one")

    def _note(self, task_id: str, number: int, changes: dict[str, Any]) -> None:
        """Note how an attempt ended; where the storage refuses, in a file of this machine that a sentence names."""
        try:
            self.study.note(task_id, number, changes)
        except OSError as error:
            elsewhere = Path(tempfile.gettempdir()) / f"solorl-{task_id}-{number}.json"
            with contextlib.suppress(OSError):
                elsewhere.write_text(json.dumps(changes))
            kept = f"; it is in {elsewhere}" if elsewhere.exists() else ""
            self._say(f"what became of attempt {number} could not be noted: {refusal(error)}{kept}")

    def _wait_for_others(self) -> None:
        """Wait until no process trains in the run folder: one may outlive its worker until it has saved."""
        said = False
        while not self._why:
            run_dir = self.find(self.tasks[0]).run_dir
            if run_dir is None or not (is_alive(trainer(run_dir)) or is_locked(run_dir)):
                return
            if not said:
                self._say(f"waiting    {self}: it still runs for a command that was killed")
            said = True
            self._beat()
            time.sleep(LOOK)

    # ------------------------------------------------------------------ the child
    def _train(self, task: Task, work: Path, number: int, begun: Found, mirror: Mirror | None) -> int:
        """Run the script to its end; its exit code."""
        if self._why:
            return 0
        why = why_again(begun, self.study.attempts(task.id))
        resumed = task.script.ours and begun.run_dir is not None and not why
        self._about |= {"resumed": resumed, "step": newest_step(begun.run_dir)}
        argv, cwd, own = command(task, work, number, begun.run_dir if resumed else None, len(self.tasks))
        cwd.mkdir(exist_ok=True)
        line = f", attempt {number}: {' '.join(argv)}" if self._env is None else ""
        self._say(f"{'resumed' if resumed else 'started':<10} {self}{f' from the beginning: {why}' * bool(why)}{line}")
        given = os.environ if self._env is None else self._env
        env = {**environment(task, given), **own}
        with pinned(self._cores):
            self._child = Child(argv, cwd, env, work / f"output-{number}.txt", echo=self._env is None)
        try:
            if self._why:  # it came before there was a child to tell
                self._child.tell(force=self._forced)
            self._watch(self._child, work, mirror)
        finally:
            code = self._child.close()
        return code

    def _watch(self, child: Child, work: Path, mirror: Mirror | None) -> None:
        """Until the child has ended: bring up each new checkpoint, and kill what does not end after being told."""
        seen: set[Path] = set()
        while child.poll(LOOK) is None:
            self._beat()
            if self._told and time.monotonic() - self._told > GRACE:
                child.tell(force=True)
            if mirror is None or self._why == "taken":
                continue
            there = {path for path in work.glob("*/checkpoint/step_*") if (path / "manifest.json").exists()}
            if there - seen:
                try:
                    mirror.upload()
                    seen = there
                except OSError as error:
                    self._say(f"the checkpoint could not be brought up, which is tried again: {refusal(error)}")
                    time.sleep(1.0)

    def _beat(self) -> None:
        """Renew the leases where the heart has no thread: one of many threads needs no second one."""
        if self._heart and not self._heart.is_alive():
            self._heart.turn()

    # ------------------------------------------------------------------ endings
    def hear(self, number: int, frame: Any) -> None:
        """The first signal: save and end. A second one kills, unless the first one was a SIGUSR1: that is a scheduler's
        warning, and its SIGTERM comes while the training saves."""
        if self._signal in (0, signal.SIGUSR1):
            self._signal = number
            self.end("signal")
        elif number != signal.SIGUSR1:
            self.kill()

    def end(self, why: str) -> None:
        """Tell the training to save and end, once; where the task is another worker's now, end it at once."""
        first = not self._told
        self._why = why if why == "taken" else self._why or why
        self._told = self._told or time.monotonic()
        if why == "taken":
            self.kill()
        elif self._child and first:
            self._child.tell()

    def kill(self) -> None:
        """End the training at once."""
        self._forced = True
        if self._child:
            self._child.tell(force=True)


def why_again(found: Found, attempts: Sequence[Mapping[str, Any]]) -> str:
    """Why a training begins again although it has a run folder; empty where it need not.

    A failure alone is not a reason, however often it comes: a run that can be resumed loses no step.
    """
    if found.run_dir is None:
        return ""
    if found.status.startswith("diverged"):
        return f"it has {found.status}; {shown(found.run_dir)} is kept"
    failed = [one for one in attempts if one.get("state") == "failed"]
    if failed and failed[-1].get("resumed") and not any(map(is_whole, checkpoints(found.run_dir))):
        return f"resuming failed and no checkpoint in {shown(found.run_dir)} is whole; the folder is kept"
    return ""


def command(
    task: Task, work: Path, number: int, run_dir: Path | None, seeds: int = 1
) -> tuple[Any, Path, dict[str, str]]:
    """The words that train a task, on in `run_dir` where there is one; the folder where they run, and what they need in
    the environment. A script that is not ours runs in a folder of each attempt."""
    if not task.script.ours:
        cwd = work / f"attempt-{number}"
        return task.argv(), cwd, {"SOLORL_RUN_DIR": str(cwd.resolve())}
    more = ("--resume", str(run_dir)) if run_dir else ("--runs-dir", str(work))
    return task.argv(*more, seeds=seeds), Path(), {}
