"""The training of a worker: a child process with threads and GPUs, which saves and ends where the worker is killed."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from solorl.lab.studies.task import Task
from solorl.machine import dying_with_parent, end_with_parent

TAIL = 12  # last lines of a training that a failed attempt keeps
TAIL_BYTES = 8000


class Child:
    """A process in a session of its own. What it prints goes to the file `output`, and with `echo` to our output."""

    def __init__(self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], output: Path, echo: bool):
        self._output, self._lines = output, deque[str](maxlen=TAIL)
        words = dying_with_parent()
        with open(os.devnull if echo else output, "ab") as file:
            self.process = subprocess.Popen(
                [*words, *argv], cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if echo else file,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=None if words else end_with_parent(),
            )  # fmt: skip
        self._end = -1  # of the system: becomes readable when the process ends, at once
        with contextlib.suppress(OSError, AttributeError):
            self._end = os.pidfd_open(self.process.pid)
        self._reader = threading.Thread(target=self._tee, daemon=True) if echo else None
        if self._reader:
            self._reader.start()

    def lines(self) -> list[str]:
        """The last lines that it has printed."""
        if not self._reader:
            with contextlib.suppress(OSError), open(self._output, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                text = [line.rstrip() for line in file.read().decode(errors="replace").splitlines()]
                return [line for line in text if line][-TAIL:]
        return [*self._lines]

    def poll(self, seconds: float) -> int | None:
        """Wait so long for its end: the exit code, or None."""
        if self._end >= 0:
            poll = select.poll()
            poll.register(self._end, select.POLLIN)
            poll.poll(seconds * 1000)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        return self.process.poll()

    def tell(self, force: bool = False) -> None:
        """Ask it to save and end, or end it at once."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL if force else signal.SIGTERM)

    def close(self) -> int:
        """End it and what it has left; its exit code."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        if self._end >= 0:
            os.close(self._end)
        if self._reader:
            self._reader.join(5)  # seconds; a process that has left its group may keep the pipe open
        return code

    def _tee(self) -> None:
        """Copy what it prints; what the disk refuses is left out, for the last lines are kept here."""
        with contextlib.ExitStack() as stack:
            places = [sys.stdout.buffer]
            with contextlib.suppress(OSError):
                places.append(stack.enter_context(open(self._output, "ab")))
            for line in self.process.stdout or ():
                self._lines.append(line.decode(errors="replace").rstrip())
                for place in places:
                    with contextlib.suppress(OSError):
                        place.write(line)
                        place.flush()


def environment(task: Task, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a training: threads and GPUs of its resources, unless the scheduler has set them; and the sign
    that a worker looks after it."""
    threads, gpus = str(task.resources.cores), ",".join(map(str, range(task.resources.gpus)))
    own = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": gpus}
    return {**own, "PYTHONUNBUFFERED": "1", **given, "SOLORL_WORKER": str(os.getpid())}
