"""What a machine must have to do a task: the package of the plan, the script, the Python."""

import shutil
from dataclasses import replace
from pathlib import Path

from solorl.errors import UsageError
from solorl.lab.studies.found import has_sha256
from solorl.lab.studies.study import Study, installed, script_name
from solorl.lab.studies.task import Task
from solorl.scripts import script_paths


def check_package(study: Study) -> None:
    """UsageError unless the package here is the one that made the plan."""
    ours, theirs = installed(), study.package
    if ours["sha256"] != theirs["sha256"]:
        raise UsageError(
            f"solorl {ours['version']} ({ours['sha256'][:8]}) of this machine is not the {theirs['version']} "
            f"({theirs['sha256'][:8]}) of the plan; install the same one, in an image by building "
            "it again, or write the plan again with `solo bench` of this one"
        )


def runnable(study: Study, task: Task, scratch: Path | None) -> Task:
    """The task with a script of this machine: where it was planned, of the catalogue, or of the study."""
    script = task.script
    stored = (scratch or study.storage.folder or Path()) / script_name(script)
    path = script.path
    if not has_sha256(path, script.sha256):
        path = script_paths().get(script.name, stored)
        path = path if has_sha256(path, script.sha256) else stored
    if path is stored and scratch:
        study.storage.get(script_name(script), stored)
    if not has_sha256(path, script.sha256):
        raise UsageError(f"{script_name(script)} in {study.storage.where} is missing or damaged")
    if task.python and not shutil.which(task.python):
        raise UsageError(f"the Python of {task}, {task.python}, is not on this machine")
    return replace(task, script=replace(script, path=path))
