"""The work folder of a task on this machine and its copy in a bucket.

A checkpoint is there once its manifest is: that goes up last, after rows at least as long as the checkpoint says, and
old checkpoints go only after it.
"""

import contextlib
import os
import tempfile
from pathlib import Path

from solorl.lab.studies.storage import Bucket

MANIFEST = "manifest.json"


class Mirror:
    """Copies `work` to `name` in the storage, what has changed only."""

    def __init__(self, storage: Bucket, work: Path, name: str):
        self._storage, self._work, self._name = storage, work, name
        self._there: dict[str, tuple[int, int]] = {}  # file -> size and time of what the storage has

    def download(self) -> None:
        """The newest run folder with a whole checkpoint, and none that did not come up whole; nothing where there is
        none, for such a run begins again. Raises OSError."""
        names = [name.removeprefix(f"{self._name}/") for name in self._storage.list(self._name)]
        runs = {name.partition("/")[0] for name in names if _order(name) == 2}
        for name in [name for name in names if runs and name.startswith(f"{max(runs)}/")]:
            if _order(name) and f"{name.rpartition('/')[0]}/{MANIFEST}" not in names:
                self._there[name] = (0, 0)  # a worker was killed while it went up or was deleted: it goes with the old
                continue
            self._storage.get(f"{self._name}/{name}", self._work / name)
            self._there[name] = _mark(self._work / name)

    def upload(self) -> None:
        """Bring up what is new, and delete there what is gone here. Raises OSError; what is there stays usable.

        The training may delete a checkpoint while it goes up, so links to its files are what goes up.
        """
        marks = self._marks()  # before anything goes up: a checkpoint that comes later waits for the next call
        changed = sorted((name for name, mark in marks.items() if self._there.get(name) != mark), key=_order)
        with tempfile.TemporaryDirectory(prefix=".", dir=self._work.parent) as held:
            lost = set()  # checkpoints that are already gone
            for name in filter(_order, changed):
                (Path(held) / name).parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(self._work / name, Path(held) / name)
                except FileNotFoundError:
                    lost.add(name.rpartition("/")[0])
            for name in [name for name in changed if name.rpartition("/")[0] not in lost]:
                with contextlib.suppress(FileNotFoundError):  # the training has deleted it meanwhile
                    self._storage.put((Path(held) if _order(name) else self._work) / name, f"{self._name}/{name}")
                    self._there[name] = marks[name]
        old = set(self._there) - set(marks)
        if not any(_order(name) == 2 for name in set(self._there) - old):  # no new one is up: the old one stays
            old = {name for name in old if not _order(name)}
        for name in sorted(old, key=_order, reverse=True):
            self._storage.delete(f"{self._name}/{name}")
            del self._there[name]

    def _marks(self) -> dict[str, tuple[int, int]]:
        found = {}
        for path in self._work.rglob("*"):
            name = path.relative_to(self._work)
            with contextlib.suppress(OSError):
                if path.is_file() and not any(part.startswith(".") for part in name.parts):
                    found[name.as_posix()] = _mark(path)
        return found


def _mark(path: Path) -> tuple[int, int]:
    return path.stat().st_size, path.stat().st_mtime_ns


def _order(name: str) -> int:
    """Files outside of checkpoints, then those of checkpoints, then manifests."""
    return 2 * name.endswith(f"/{MANIFEST}") or int("/checkpoint/step_" in name)
