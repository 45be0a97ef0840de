"""Saving a replay buffer little by little: each checkpoint appends the rows inserted since the one before.

A buffer is any object with `arrays`, a dict of NumPy arrays whose first axis is the capacity, and `inserted`, the
number of rows ever inserted; row i lies at index i % capacity. Each segment on the disk is one safetensors file of
consecutive rows, never rewritten; its SHA-256 stands in the checkpoint. Segments that neither of the last two
checkpoints needs are deleted. A segment has at most `MOST_BYTES`, so that saving and loading a buffer of gigabytes
needs little more memory than the buffer. What else a buffer must remember stands in `state`, a `SimpleNamespace` (or
dict) of numbers and NumPy arrays that each checkpoint holds whole; a buffer may have none.
"""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from solorl.checkpoints.checkpoint import CheckpointError, safetensors
from solorl.files import remove_leftovers, sha256, sync_file, write_atomically

MOST_BYTES = 2**26  # of the rows of a segment


def is_replay(part: Any) -> bool:
    """Whether `part` is a replay buffer in the sense above."""
    return isinstance(getattr(part, "arrays", None), dict) and hasattr(part, "inserted")


def _state(replay: Any) -> dict[str, Any]:
    """What a buffer must remember in addition to its rows, by name; a change of it changes the buffer."""
    state = getattr(replay, "state", {})
    return state if isinstance(state, dict) else vars(state)


class ReplayLog:
    """The segments of one buffer in a folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._segments: list[dict[str, Any]] = []
        self._needed: set[str] = set()  # names in the last checkpoint that is whole

    def append(self, replay: Any) -> dict[str, Any]:
        """Write the rows inserted since the last call; returns what the checkpoint must hold. Raises OSError."""
        capacity = len(next(iter(replay.arrays.values())))
        stop = int(replay.inserted)
        start = max(stop - capacity, self._segments[-1]["stop"] if self._segments else 0)
        count = max(1, MOST_BYTES // sum(array[:1].nbytes for array in replay.arrays.values()))
        new = [self._write(replay, first, min(first + count, stop)) for first in range(start, stop, count)]
        self._segments = [each for each in self._segments + new if each["stop"] > stop - capacity]
        return {"inserted": stop, "segments": self._segments, "state": dict(_state(replay))}

    def _write(self, replay: Any, start: int, stop: int) -> dict[str, Any]:
        """One segment, the rows from `start` on, before `stop`, whole on the disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name, rows = f"{start:012d}_{stop:012d}.safetensors", np.arange(start, stop)
        while (self.folder / name).exists():  # a checkpoint may need it: a larger buffer counts from 0 again
            name = f"again_{name}"
        arrays = {key: array[rows % len(array)] for key, array in replay.arrays.items()}
        write_atomically(self.folder / name, safetensors(arrays))
        sync_file(self.folder)
        return {"name": name, "start": start, "stop": stop, "sha256": sha256(self.folder / name)}

    def arrays(self, saved: dict[str, Any]) -> dict[str, np.ndarray]:
        """Empty arrays for all rows of a buffer that was saved, by its first segment. Raises what the library of the
        files raises."""
        first = load_file(self.folder / saved["segments"][0]["name"])
        return {name: np.empty((saved["inserted"], *rows.shape[1:]), rows.dtype) for name, rows in first.items()}

    def forget(self) -> None:
        """The checkpoint with what `append` returned is whole: delete the segments that only older ones need."""
        names = {segment["name"] for segment in self._segments}
        remove_leftovers(self.folder)
        for path in self.folder.glob("*.safetensors"):
            if path.name not in names | self._needed:
                path.unlink(missing_ok=True)
        self._needed = names

    def load(self, replay: Any, saved: dict[str, Any]) -> None:
        """Fill the buffer from its segments; it may have another capacity than the saved one. Raises CheckpointError
        where a segment is missing or damaged, or does not fit."""
        capacity = len(next(iter(replay.arrays.values())))
        oldest = saved["segments"][0]["start"] if saved["segments"] else saved["inserted"]
        # a larger buffer would hold rows that are gone: count from the oldest one that is left
        gone = oldest if oldest > max(0, saved["inserted"] - capacity) else 0
        for segment in saved["segments"]:
            path, count = self.folder / segment["name"], segment["stop"] - segment["start"]
            if not path.is_file() or sha256(path) != segment["sha256"]:
                raise CheckpointError(f"the replay segment {path.name} is missing or damaged")
            arrays = load_file(path)
            fits = {key: (count, *array.shape[1:]) for key, array in replay.arrays.items()}
            if {key: rows.shape for key, rows in arrays.items()} != fits:
                raise CheckpointError(f"the replay segment {path.name} does not fit")
            for key, rows in arrays.items():
                replay.arrays[key][np.arange(segment["start"] - gone, segment["stop"] - gone) % capacity] = rows
        state, kept = _state(replay), saved.get("state", {})
        if {key: np.shape(value) for key, value in state.items()} != {key: np.shape(x) for key, x in kept.items()}:
            raise CheckpointError("the state of the replay buffer does not fit")
        for key, value in state.items():
            if isinstance(value, np.ndarray):
                value[...] = kept[key]  # in place: others may hold it, too
            else:
                state[key] = type(value)(kept[key])
        replay.inserted = saved["inserted"] - gone
        self._segments = [] if gone else list(saved["segments"])
        self._needed = {segment["name"] for segment in saved["segments"]}
