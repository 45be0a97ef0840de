"""Workers: each takes a free task of a study, trains it as a child process, notes what became of it, takes the next.

`solo work` is one worker, `solo bench` a pool of them as threads; they are the same everywhere, and meet in the files
of the study only. The exit code of `solo work` is for a scheduler: 0: nothing is left to do here, 1: something failed,
2: bad input, 75: stopped after saving, run me again.
"""

import contextlib
import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from solorl import signals
from solorl.errors import UsageError, refuse
from solorl.files import sha256, shown
from solorl.lab.studies.lease import Leases
from solorl.lab.studies.mirror import Mirror
from solorl.lab.studies.resources import MOST
from solorl.lab.studies.runs import Found, command, find, following, newest, signal_name, to_resume, verdict
from solorl.lab.studies.storage import Folder, refusal
from solorl.lab.studies.study import State, Study, script_name
from solorl.lab.studies.task import Task
from solorl.machine import dying_with_parent, own_cores, pinned, shares, visible_gpus
from solorl.runfolder import is_locked, newest_step, status_of
from solorl.scripts import script_paths
from solorl.terminal import plain, scores

AGAIN = 75  # exit code of a worker that has saved and is to be run again (EX_TEMPFAIL)
GRACE = 120  # seconds that a training which was told to end has to save; then it is killed
SCORE = "eval/episodic_return"
TAIL, TAIL_BYTES = 12, 8000  # last lines of a training that a failure keeps
LISTENED = (*signals.listened(), signal.SIGUSR1)


class Worker:
    """One of the workers of a pool, with cores and GPUs of its own as far as there are enough."""

    def __init__(self, pool: "Pool", cores: Sequence[int] = (), gpus: str | None = None):
        self.pool, self.study, self._cores, self._gpus = pool, pool.study, [*cores], gpus
        self.tasks: list[Task] = []  # that it does now
        self.began = 0.0
        self.watched: Callable[[], None] = lambda: None  # called about once a second while a training runs
        self._child: subprocess.Popen[bytes] | None = None
        self._offset = 0  # of this attempt in the output
        self._why, self._told, self._forced = "", 0.0, False  # why, when and how the training was told to end

    def __str__(self) -> str:
        first, *others = self.tasks
        return f"{first} to {others[-1].seed}" if others else str(first)

    def do(self, tasks: list[Task]) -> list[Found]:
        """Train tasks whose leases are ours, several seeds of a kind in one process, and note what became of each.
        Raises OSError where the storage refuses."""
        storage, name = self.study.storage, f"tasks/{tasks[0].id}"
        self.tasks, self.began, self._why, self._told = tasks, time.time(), "", 0.0
        if self.pool.signal:
            self.end("signal")
        temporary = tempfile.TemporaryDirectory(prefix="solorl-") if not isinstance(storage, Folder) else None
        with temporary or contextlib.nullcontext(storage.folder) as place:
            work = Path(str(place)) / name
            work.mkdir(parents=True, exist_ok=True)
            mirror = Mirror(storage, work, name) if not isinstance(storage, Folder) else None
            if mirror:
                mirror.download()
            found = self._train(Path(str(place)), work, mirror)
            if mirror and self._why != "taken":
                mirror.upload()
            for task, one in zip(tasks, found, strict=True):
                self._note(task, one, Path(str(place)), tail(work / "output.txt", self._offset))
            return found

    def _train(self, root: Path, work: Path, mirror: Mirror | None) -> list[Found]:
        """Run the script where it left off, and judge."""
        first, code, cwd = self.tasks[0], 0, work
        while (begun := find(self.study, first, root)).run_dir and is_locked(begun.run_dir) and not self._why:
            time.sleep(0.1)  # a training of a command that was killed still saves
        run_dir = to_resume(first, begun)
        step = newest_step(run_dir) if run_dir else None
        if begun.status != "finished" and not self._why:
            try:
                argv, cwd = command(self._runnable(root, first), work, run_dir, len(self.tasks))
            except UsageError as error:
                return [Found(state="failed", reason=str(error)) for _ in self.tasks]
            self.pool.say(f"{'resumed' if run_dir else 'started':<10} {self}")
            code = self._run(argv, cwd, work, mirror)
        all_found = [find(self.study, each, root) if each.script.ours else newest([cwd], each) for each in self.tasks]
        for task, one in zip(self.tasks, all_found, strict=True):
            one.state, one.reason = verdict(task, one, code, self._why)
            if one.state == "failed" and run_dir and one.run_dir == run_dir and newest_step(run_dir) == step:
                one.reason += f", again after step {step or 0:,}; to begin again, delete {shown(run_dir)}"
        return all_found

    def _runnable(self, root: Path, task: Task) -> Task:
        """The task with a script of this machine: where it was planned, of the catalogue, or of the study."""
        if task.python and not shutil.which(task.python):
            raise UsageError(f"the Python of {task}, {task.python}, is not on this machine")
        name, script = script_name(task.script), task.script
        if not (stored := root / name).exists() and not isinstance(self.study.storage, Folder):
            with contextlib.suppress(FileNotFoundError):
                self.study.storage.get(name, stored)
        for path in (script.path, script_paths().get(script.name, stored), stored):
            if path.is_file() and sha256(path) == script.sha256:
                return replace(task, script=replace(script, path=path))
        raise UsageError(f"{name} in {self.study.storage.where} is missing or damaged")

    def _note(self, task: Task, one: Found, root: Path, lines: list[str]) -> None:
        """Write the result, of several workers that come so far the first one's; or the failure. And say it."""
        seconds, text = round((time.time() - self.began) / len(self.tasks), 3), ""
        if one.state == "finished":
            status = status_of(one.run_dir) if one.run_dir else {}
            name = one.run_dir.relative_to(root).as_posix() if one.run_dir else ""
            self.study.accept(task.id, run_dir=name, status=status, seconds=seconds, ended=time.time())
            score = f", evaluation {scores(status[SCORE])[0]}" if isinstance(status.get(SCORE), int | float) else ""
            text = f" in {seconds:.1f} s{score}  ({self.pool.summary()})"
        elif one.state == "failed":
            died = one.reason.startswith("killed by")
            final = one.reason.partition(",")[0] == "exit code 2" or one.reason.startswith("diverged")
            self.study.add_failure(task.id, reason=one.reason, tail=lines, died=died, final=final, ended=time.time())
            text = "\n    | ".join([f": {plain(one.reason)}", *map(plain, lines)])
        elif self._why in ("signal", ""):
            text = f": the same command {'resumes it' if one.run_dir else 'starts it again'}"
        self.pool.say(f"{one.state:<10} {task}{text}")

    # ------------------------------------------------------------------ the child
    def _run(self, argv: Sequence[str], cwd: Path, work: Path, mirror: Mirror | None) -> int:
        """Run a training to its end, in a session of its own that saves and ends where this process is killed; its exit
        code. Meanwhile bring up each new checkpoint, and kill what does not end after being told."""
        cwd.mkdir(parents=True, exist_ok=True)
        words, limit, looked, seen = dying_with_parent(), self.tasks[0].resources.time, time.time(), set[Path]()
        with open(work / "output.txt", "ab") as output, pinned(self._cores):
            self._offset = output.tell()
            child = self._child = subprocess.Popen(
                [*words, *argv], cwd=cwd, env=self._environment(cwd), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            if self._why:  # it came before there was a child to tell
                self._signal(self._forced)
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.1)
                if limit and time.time() - self.began > limit and not self._why:
                    self.end("time")
                if self._told and time.monotonic() - self._told > GRACE:
                    self._signal(force=True)
                if time.time() - looked < 1.0:
                    continue
                looked = time.time()
                self.watched()
                there = set(work.glob("*/checkpoint/step_*/manifest.json"))
                if mirror and self._why != "taken" and there - seen:
                    try:
                        mirror.upload()
                        seen = there
                    except OSError as error:
                        self.pool.say(f"a checkpoint could not be brought up, which is tried again: {refusal(error)}")
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # and what it has left
            code, self._child = child.wait(), None
        return code

    def _environment(self, cwd: Path) -> dict[str, str]:
        """Threads and GPUs of the worker, else of the task's resources, unless the user or a scheduler has set them;
        and the sign that a worker looks after the training."""
        wanted = self.tasks[0].resources
        threads, sign = str(len(self._cores) or wanted.cores), {"SOLORL_WORKER": str(os.getpid())}
        own = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
        own |= {} if self._cores else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(wanted.gpus)))}
        sign |= {} if self._gpus is None else {"CUDA_VISIBLE_DEVICES": self._gpus}
        return {**own, **os.environ, **sign, **({"SOLORL_RUN_DIR": str(cwd.resolve())} if cwd != Path() else {})}

    def end(self, why: str, force: bool = False) -> None:
        """Tell the training to save and end, once; where the task is another worker's now, or with `force`, at once."""
        first, self._forced = not self._told, force or why == "taken"
        self._why = why if why == "taken" else self._why or why
        self._told = self._told or time.monotonic()
        if first or self._forced:
            self._signal(self._forced)

    def _signal(self, force: bool) -> None:
        if child := self._child:
            child.send_signal(signal.SIGKILL if force else signal.SIGTERM)


def tail(path: Path, start: int) -> list[str]:
    """The last lines of a text, from a byte on."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(start, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        return [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()][-TAIL:]
    return []


class Pool:
    """Workers as threads of this process, for some tasks of a study. With `stay` they end when all these tasks are
    over, whoever does them, else when none is free and the others have given a sign of life."""

    def __init__(self, study: Study, tasks: Sequence[Task], slots: int, say: Callable[[str], None], stay: bool = True):
        self.study, self.tasks, self.say, self.stay = study, list(tasks), say, stay
        self.may_begin: Callable[[list[Task]], bool] = lambda tasks: True  # in one process
        self.late: set[str] = set()  # ids of tasks that may not begin any more
        self.failed: set[str] = set()  # ids of tasks whose last attempt here has failed
        self.signal = 0
        self.error: BaseException | None = None
        self.leases = Leases(study.storage, study.lease, self._lost)
        self._over, self._lock = threading.Event(), threading.RLock()
        self._beats: dict[str, object] = {}  # task id -> its first heartbeat that was seen
        self.look = min(study.lease / 8, 0.5 if isinstance(study.storage, Folder) else 10.0)  # seconds
        self.workers = [Worker(self)] if not stay else self._workers(slots)

    def _workers(self, slots: int) -> list[Worker]:
        """Workers that divide the cores and GPUs; `slots` 0: as many as fit. UsageError for tasks that do not fit."""
        cards, mine, most = visible_gpus(), own_cores(), {}
        for name, count in (("cores", len(mine)), ("gpus", len(cards))):
            most[name] = max((getattr(task.resources, name) for task in self.tasks), default=0)
            refuse(most[name] > count, f"a task wants {most[name]} {name}, but this machine has {count}: --{name}")
        each = max(1, most["gpus"])
        groups = [",".join(cards[i : i + each]) for i in range(0, len(cards) - each + 1, each)]
        fit = min(len(mine) // max(1, most["cores"]), len(groups) if most["gpus"] else MOST)
        parts = enumerate(shares(mine, slots or fit))
        return [Worker(self, part, groups[i % len(groups)] if groups else None) for i, part in parts]

    def run(self, turn: Callable[[], None] = lambda: None) -> None:
        """Work until the end, which a signal may bring; meanwhile call `turn` a few times a second. Raises what a
        worker has raised."""
        threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in self.workers]
        before = signals.listen(self.hear, LISTENED)
        try:
            for thread in [self.leases, *threads]:
                thread.start()
            while alive := [thread for thread in threads if thread.is_alive()]:
                turn()
                alive[0].join(0.2)
        except BaseException:
            self._end_all()
            raise
        finally:
            self._over.set()
            for thread in threads:
                thread.join()
            self.leases.over.set()
            signals.restore(before)
        if self.error:
            raise self.error

    def hear(self, number: int, frame: object) -> None:
        """The first signal: save and end. A second one kills, unless the first one was a SIGUSR1: that is a scheduler's
        warning, and its SIGTERM comes while the training saves."""
        first = self.signal in (0, signal.SIGUSR1)
        if self.signal and number == signal.SIGUSR1:
            return
        self.signal = number
        self._over.set()
        for worker in (busy := [worker for worker in self.workers if worker.tasks]):
            worker.end("signal", force=not first)
        if busy and first:  # last, for it may fail
            self.say(f"{signal_name(number)}: {len(busy)} running, which save and end; once more kills them")

    def _end_all(self) -> None:
        if not self.signal:  # a second one would kill
            self.hear(signal.SIGTERM, None)

    def _lost(self, task_id: str, why: str) -> None:
        for worker in self.workers:
            if any(task.id == task_id for task in worker.tasks):
                worker.end(why)

    def summary(self) -> str:
        """How far the tasks are, in a few words."""
        return f"{len(self.study.ids() & {task.id for task in self.tasks})} of {len(self.tasks)} finished"

    # ------------------------------------------------------------------ threads
    def _run(self, worker: Worker) -> None:
        try:
            self.serve(worker)
        except BaseException as error:  # of any kind: `run` raises it
            self.error = self.error or error
            self._end_all()

    def serve(self, worker: Worker) -> None:
        """Do one task after the other."""
        while tasks := self._next(worker):
            self.do(worker, tasks)

    def do(self, worker: Worker, tasks: list[Task]) -> None:
        """Do tasks whose leases are ours, and release these."""
        try:
            for task, one in zip(tasks, worker.do(tasks), strict=True):
                self.failed.discard(task.id)
                if one.state == "failed":
                    self.failed.add(task.id)
        finally:
            for task in tasks:
                self.leases.release(task.id)
            worker.tasks = []

    def _next(self, worker: Worker) -> list[Task]:
        """Free tasks that a worker does next, leased; none where nothing is left to do."""
        while not self._over.is_set():
            with self._lock:
                states = self.study.states([task for task in self.tasks if task.id not in self.late])
                free = [task for task in self.tasks if task.id in states and states[task.id].name == "waiting"]
                for task in sorted(free, key=lambda task: len(states[task.id].failures)):
                    if not self.may_begin([task]):
                        self.late.add(task.id)
                    elif self._take(task):
                        worker.tasks = [task, *self._group(task, free)]
                        return worker.tasks
                if not self._is_something_left(states):
                    return []
            self._over.wait(self.look)
        return []

    def _take(self, task: Task) -> bool:
        """Take the lease of a task, unless somebody has been faster; a dead holder's end is noted."""
        before = self.leases.take(task.id)
        if before is not None and self.study.storage.exists(f"results/{task.id}.json"):
            self.leases.release(task.id)
            return False
        if before:
            self.study.add_failure(task.id, reason="its worker was killed", died=True, ended=time.time())
        return before is not None

    def _group(self, task: Task, free: Sequence[Task]) -> list[Task]:
        """Tasks with the seeds after this one that one process can train with it, and of which nothing is there; such
        that each idle worker gets some."""
        taken = list[Task]()
        if self.stay and isinstance(self.study.storage, Folder) and not find(self.study, task).run_dir:
            others, idle = following(task, free), sum(not worker.tasks for worker in self.workers)
            for other in others[: math.ceil((len(others) + 1) / idle) - 1]:
                begun = find(self.study, other).run_dir
                if begun or not self.may_begin([task, *taken, other]) or not self._take(other):
                    break
                taken.append(other)
        return taken

    def _is_something_left(self, states: dict[str, State]) -> bool:
        """Whether a task may yet become free: its worker may die, or it may fail."""
        beats = {task_id: one.holder.get("beat") for task_id, one in states.items() if one.name == "running"}
        waiting = any(one.name == "waiting" and task_id not in self.late for task_id, one in states.items())
        alive = not self.stay and all(self._beats.setdefault(task_id, beat) != beat for task_id, beat in beats.items())
        return waiting or bool(beats and not alive)
