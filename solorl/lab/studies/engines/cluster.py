"""What an engine is that runs workers elsewhere: a cluster, a cloud, or processes that outlive a command.

The contract. An engine starts `solo work`, says what is alive, cancels, fetches logs, and knows nothing else: which
task has finished stands in the files of the study (`solorl/lab/studies/study.py`), not in the scheduler.

    class MyCluster:                      # solorl/lab/studies/engines/NAME.py
        name = "my-cluster"
        array_limit = 1000                # tasks of one submission, at most
        def submit(self, submission): ...
    def open(options): ...                # the engine; options: the texts of `--engine-option KEY=VALUE`

A worker's exit code tells the scheduler: 0: nothing is left to do, 1: failed, 2: bad input, 75: preempted and saved,
run me again. An engine may let the scheduler repeat a worker that was killed or left 75; it need not.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from solorl.errors import UsageError, hint
from solorl.lab.studies.resources import Resources
from solorl.machine import command_of

AGAIN = 75  # exit code of a worker that has saved and is to be run again (EX_TEMPFAIL)
GRACE = 120  # seconds that a training which was told to end has to save; then it is killed


@dataclass(frozen=True)
class Submission:
    """Tasks that are started together, with equal resources. The worker finds its task by its index in them."""

    plan: str  # the study: an absolute path, or a URL
    name: str  # "submissions/000001.json", the file in the study that lists the tasks
    title: str  # the study's name, for people who look at the queue
    tasks: tuple[str, ...]  # ids
    resources: Resources

    def command(self, index: int | None = None, python: str = sys.executable) -> list[str]:
        """The words that do one task. Without an index the worker takes the one that the scheduler gives to each part
        of an array (SLURM_ARRAY_TASK_ID, AWS_BATCH_JOB_ARRAY_INDEX, JOB_COMPLETION_INDEX), counted from 0."""
        return command_of(*self.words(index), python=python)

    def words(self, index: int | None = None) -> list[str]:
        """The same without the program, for containers that start `solo`."""
        words = ["work", self.plan, self.name]
        return words if index is None else [*words, "--index", str(index)]


class Cluster(Protocol):
    """Where workers run."""

    name: str
    array_limit: int  # tasks that one submission may have

    def submit(self, submission: Submission) -> list[str]:
        """Start a worker for each task: one array job where the scheduler has arrays. Returns a handle for each task,
        in order: text by which a later process finds it. UsageError, in one sentence, where the scheduler refuses;
        OSError where it does not answer: the caller asks again later."""

    def alive(self, handles: Sequence[str]) -> set[str]:
        """Those of the handles that wait or run. One that the scheduler does not know is not alive. OSError where the
        scheduler does not answer: the caller asks again later."""

    def cancel(self, handles: Sequence[str], force: bool = False) -> None:
        """Ask workers to save and end (SIGTERM), or end them at once. One that has ended is passed over."""

    def logs(self, handle: str) -> str:
        """What a worker has printed, as far as the scheduler keeps it; else an empty text."""


def check_options(options: Mapping[str, str], known: Sequence[str], engine: str) -> None:
    """UsageError for an option that an engine does not have."""
    for name in options:
        if name not in known:
            raise UsageError(f"the engine {engine} has no option {name}{hint(name, known, 'it has')}")
