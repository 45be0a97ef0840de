"""`solo work`: one task of a study, wherever a scheduler starts it."""

import os
import sys
from collections.abc import Mapping, Sequence

from solorl import signals
from solorl.cli import Parser
from solorl.errors import UsageError
from solorl.lab.studies.storage import read_object, refusal
from solorl.lab.studies.study import Study, open_study
from solorl.lab.studies.task import Task
from solorl.lab.studies.worker import LISTENED, Worker

INDICES = ("SLURM_ARRAY_TASK_ID", "AWS_BATCH_JOB_ARRAY_INDEX", "JOB_COMPLETION_INDEX")  # of schedulers, from 0 on


def main(argv: Sequence[str]) -> int:
    """Do one task; UsageError for one that is not there, and where this machine cannot do it."""
    parser = Parser("work", "Do one task of a study: what `solo bench --engine` lets a scheduler start.")
    parser.add_argument("plan", metavar="PLAN", help="the folder or URL of the study")
    parser.add_argument("task", metavar="TASK", help="the id of a task, or submissions/NNNNNN.json and its index")
    default = f"of the task in the submission, from 0 on; default: {', '.join(INDICES)}"
    parser.add_argument("--index", metavar="I", type=int, help=default)
    args = parser.parse(argv)
    study = open_study(args.plan)
    task = chosen(study, args.task, args.index, os.environ)
    try:
        worker = Worker(study, [task], say)
        with signals.handled(worker.hear, LISTENED):
            return worker.run()
    except OSError as error:
        say(f"failed: {refusal(error, args.plan)}")
        return 1


def say(text: str) -> None:
    """A line for the scheduler's log."""
    print(f"solo work: {text}", file=sys.stderr, flush=True)


def chosen(study: Study, name: str, index: int | None, given: Mapping[str, str]) -> Task:
    """The task of that id, or of that index in a submission; UsageError where there is none."""
    if not name.startswith("submissions/"):
        if index is not None:
            raise UsageError(f"solo work: --index is for submissions/NNNNNN.json; {name} is a task")
        return study.find(name)
    try:
        ids = read_object(study.storage, name).get("tasks")
    except OSError as error:
        raise UsageError(f"{study.storage.where}/{name} cannot be read: {error.strerror}") from None
    if not isinstance(ids, list):
        raise UsageError(f"the study in {study.storage.where} has no submission {name}")
    text = next((given[key] for key in INDICES if key in given), "") if index is None else str(index)
    if not text.isdecimal() or int(text) >= len(ids):
        where = "--index" if index is not None else f"--index or one of {', '.join(INDICES)}"
        allowed = f"from 0 to {len(ids) - 1}, not {text or 'nothing'}"
        raise UsageError(f"solo work: {name} has {len(ids)} tasks; {where} must be {allowed}")
    return study.find(str(ids[int(text)]))
