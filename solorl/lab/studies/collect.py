"""The tables of finished tasks, brought into a folder of results, each once."""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from solorl.files import sha256
from solorl.lab.results import result as results
from solorl.lab.results.read import collect
from solorl.lab.results.tensorboard import read_tensorboard
from solorl.lab.studies.found import has_sha256, is_run_dir, newest
from solorl.lab.studies.storage import read_object
from solorl.lab.studies.study import Study
from solorl.lab.studies.task import Task

UNREAD = ("checkpoint", "replay", "videos", "crash")  # folders of a run that no table needs


class Collector:
    """Writes the tables of a study into `folder`, and remembers in the study what it has written."""

    def __init__(self, study: Study, folder: Path, say: Callable[[str], None]):
        self.folder, self._study, self._say = folder, study, say
        self.tables: set[str] = set()  # ids of tasks whose table lies in the folder
        self.bare: dict[str, str] = {}  # task id -> where it should have left something, but did not
        self.problems: dict[str, str] = {}  # task id -> why its table could not be written

    def keep(self, task: Task, said: bool = False) -> bool:
        """Bring the table of a finished task into the folder, unless it is there and whole; False where neither the run
        nor its table is left."""
        note = read_object(self._study.storage, f"collected/{task.id}.json")
        path = Path(str(note.get("path", "")))
        ours = bool(note) and path.parent.resolve() == self.folder.resolve()
        if ours and has_sha256(path, note.get("sha256")):
            self.tables.add(task.id)
            return True
        try:
            with self._run_dir(task) as run_dir:
                if run_dir is None:
                    return self._is_kept_without(task, said)
                if ours:
                    self._say(f"again      {task}: its table {path} is missing, damaged or of another run")
                first = task.variant == next(iter(self._study.tasks.values())).variant
                path = collected(task, run_dir, self.folder, first)
            self.tables.add(task.id)
            about = {"path": str(path.absolute()), "sha256": sha256(path)}
            with contextlib.suppress(OSError):
                self._study.storage.write(f"collected/{task.id}.json", json.dumps(about).encode())
        except (OSError, ValueError) as error:
            self.problems[task.id] = reason = getattr(error, "strerror", None) or str(error)
            self._say(f"not kept   {task} is finished, but its table is not in {self.folder}: {reason}")
        return True

    def _is_kept_without(self, task: Task, said: bool) -> bool:
        """Whether a finished task needs no run folder: another script's may leave none, or the table is there."""
        if not task.script.ours:
            self.bare[task.id] = str((self._study.storage.folder or Path()) / self._study.works(task.id)[-1])
            if said:
                self._say(f"no table   {task}: no run folder and no TensorBoard files in {self.bare[task.id]}")
            return True
        name = results.Result(task.env_id, task.script.name, task.seed, task.variant).file_name
        with contextlib.suppress(ValueError):
            if results.read(self.folder / name).script_sha256 == task.script.sha256:
                self.tables.add(task.id)
                return True
        return False

    @contextlib.contextmanager
    def _run_dir(self, task: Task) -> Iterator[Path | None]:
        """The run folder of a finished task, on this machine; None where there is none."""
        storage, works = self._study.storage, self._study.works(task.id)
        name = self._study.result(task.id).get("run_dir")
        if name is None and storage.folder:  # the result is damaged
            found = newest([storage.folder / work for work in works], task)
            yield found.run_dir if found.status == "finished" else None
            return
        if not isinstance(name, str) or not name.isprintable() or ".." in name.split("/"):
            name = ""
        temporary = tempfile.TemporaryDirectory(prefix="solorl-") if storage.folder is None else None
        with temporary or contextlib.nullcontext(storage.folder) as there:
            place = Path(str(there))
            known = any(name.startswith(f"{work}/") for work in works)
            for each in storage.list(name) if known and not storage.folder else ():
                if not set(UNREAD) & set(each.removeprefix(f"{name}/").split("/")):
                    storage.get(each, place / each)
            yield place / name if known and (place / name).is_dir() else None


def collected(task: Task, run_dir: Path, folder: Path, first: bool = False) -> Path:
    """Write the table of a finished run into `folder`; `first`: whether its variant is the first of the study. The name
    of a TensorBoard folder does not say whose it is.

    Raises ResultError (a ValueError) where the run cannot be read, OSError where the table cannot be written.
    """
    if task.script.ours or is_run_dir(run_dir):
        return collect(run_dir, folder, task.variant, first)
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
        first=first,
    )
    return results.write(result, folder)
