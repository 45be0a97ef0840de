"""The work folder of a task on this machine and its copy in a storage without folders.

A checkpoint is there once its manifest is: that goes up last, after rows at least as long as the checkpoint says, and
old checkpoints go only after it.
"""

import contextlib
from pathlib import Path

from solorl.studies.storage import Storage

MANIFEST = "manifest.json"


class Mirror:
    """Copies `work` to `name` in the storage, what has changed only."""

    def __init__(self, storage: Storage, work: Path, name: str):
        self._storage, self._work, self._name = storage, work, name
        self._there: dict[str, tuple[int, int]] = {}  # file -> size and time of what the storage has

    def download(self) -> None:
        """The newest run folder, without checkpoints that did not come up whole. Raises OSError."""
        prefix = f"{self._name}/"
        names = [name.removeprefix(prefix) for name in self._storage.list(self._name)]
        runs = {name.partition("/")[0] for name in names if name.count("/") == 1 and name.endswith("/config.json")}
        for name in [name for name in names if runs and name.startswith(f"{max(runs)}/")]:
            folder = name.rpartition("/")[0]
            if "/checkpoint/step_" in name and f"{folder}/{MANIFEST}" not in names:
                continue
            self._storage.get(prefix + name, self._work / name)
            self._there[name] = _mark(self._work / name)

    def upload(self) -> None:
        """Bring up what is new, and delete there what is gone here. Raises OSError; what is there stays usable."""
        marks = self._marks()  # before anything goes up: a checkpoint that comes later waits for the next call
        changed = [name for name, mark in marks.items() if self._there.get(name) != mark]
        broken = set()
        for name in sorted(changed, key=_order):
            folder = name.rpartition("/")[0]
            if folder in broken:
                continue
            try:
                self._storage.put(self._work / name, f"{self._name}/{name}")
                self._there[name] = marks[name]
            except FileNotFoundError:  # the training has deleted it meanwhile, as it does with old checkpoints
                broken.add(folder if "/checkpoint/step_" in name else name)
        for name in sorted(set(self._there) - set(marks), key=_order, reverse=True):
            self._storage.delete(f"{self._name}/{name}")
            del self._there[name]

    def _marks(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for path in self._work.rglob("*"):
            name = path.relative_to(self._work).as_posix()
            if not any(part.startswith(".") for part in name.split("/")):
                with contextlib.suppress(OSError):
                    found |= {name: _mark(path)} if path.is_file() else {}
        return found


def _mark(path: Path) -> tuple[int, int]:
    return path.stat().st_size, path.stat().st_mtime_ns


def _order(name: str) -> int:
    """Files outside of checkpoints, then those of checkpoints, then manifests."""
    return 2 if name.endswith(f"/{MANIFEST}") else int("/checkpoint/" in name)
