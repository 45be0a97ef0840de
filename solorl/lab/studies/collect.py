"""The tables of finished tasks, brought into a folder of results, each once."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from solorl.lab.results import result as results
from solorl.lab.results.read import collect
from solorl.lab.results.tensorboard import read_tensorboard
from solorl.lab.studies.runs import find
from solorl.lab.studies.storage import Folder
from solorl.lab.studies.study import Study
from solorl.lab.studies.task import Task
from solorl.runfolder import CONFIG, METRICS

UNREAD = ("checkpoint", "replay", "videos", "crash")  # folders of a run that no table needs


class Collector:
    """Writes the tables of a study into `folder`; `first` is the variant that others are compared with."""

    def __init__(self, study: Study, folder: Path, say: Callable[[str], None], first: str):
        self.folder, self._study, self._say, self._first = folder, study, say, first
        self.tables: set[str] = set()  # ids of tasks whose table lies in the folder
        self.bare: dict[str, str] = {}  # task id -> where it should have left something, but did not
        self.problems: dict[str, str] = {}  # task id -> why its table could not be written

    def keep(self, task: Task, before: bool = False) -> bool:
        """Bring the table of a finished task into the folder; of one that had finished `before` only where it is not
        there, whole. False where neither the run nor its table is left."""
        try:
            if before and self._is_there(task):
                self.tables.add(task.id)
                return True
            with self._run_dir(task) as run_dir:
                if run_dir:
                    if before:
                        self._say(f"again      {task}: its table was missing, damaged or of another run")
                    collected(task, run_dir, self.folder, first=task.variant == self._first)
                    self.tables.add(task.id)
                elif not task.script.ours:
                    self.bare[task.id] = f"{self._study.storage.where}/tasks/{task.id}"
                return bool(run_dir) or not task.script.ours
        except (OSError, ValueError) as error:
            self.problems[task.id] = reason = getattr(error, "strerror", None) or str(error)
            self._say(f"not kept   {task} is finished, but its table is not in {self.folder}: {reason}")
            return True

    def table(self, task: Task) -> Path:
        """Where the table of a task lies, and may lie of an earlier run of this name, with another script or flags."""
        return self.folder / results.Result(task.env_id, task.script.name, task.seed, task.variant).file_name

    def _is_there(self, task: Task) -> bool:
        with contextlib.suppress(ValueError):
            found, status = results.read(self.table(task)), self._study.result(task.id).get("status")
            took = results.rounded(status.get("wall_time")) if isinstance(status, dict) else None
            mine = (task.env_id, task.script.name, task.variant, task.seed), task.script.sha256
            return (found.key, found.script_sha256) == mine and took in (None, found.wall_time)
        return False

    @contextlib.contextmanager
    def _run_dir(self, task: Task) -> Iterator[Path | None]:
        """The run folder of a finished task, on this machine; None where there is none."""
        storage, name = self._study.storage, str(self._study.result(task.id).get("run_dir", ""))
        if isinstance(storage, Folder):
            noted = storage.folder / name if name else None
            yield noted if noted and noted.is_dir() else find(self._study, task).run_dir
            return
        with tempfile.TemporaryDirectory(prefix="solorl-") as there:
            for each in storage.list(name) if name else ():
                if not set(UNREAD) & set(each.removeprefix(f"{name}/").split("/")):
                    storage.get(each, Path(there) / each)
            yield Path(there) / name if name and (Path(there) / name).is_dir() else None


def collected(task: Task, run_dir: Path, folder: Path, first: bool = False) -> Path:
    """Write the table of a finished run into `folder`; `first`: whether its variant is the first of the study. The name
    of a TensorBoard folder does not say whose it is.

    Raises ResultError (a ValueError) where the run cannot be read, OSError where the table cannot be written.
    """
    if task.script.ours or all((run_dir / name).is_file() for name in (CONFIG, METRICS)):
        return collect(run_dir, folder, task.variant, first)
    args = {name.removeprefix("--"): " ".join(values) for name, values in task.flags.items()}
    result = read_tensorboard(run_dir, (task.env_id, task.script.name, task.seed))
    result = replace(result, script=task.script.name, script_sha256=task.script.sha256, args=args)
    return results.write(replace(result, variant=task.variant, first=first), folder)
