"""Replay buffers on the disk: appended, never rewritten, exact after the ring has wrapped."""

from types import SimpleNamespace

import numpy as np
import pytest

from solorl.checkpoints.checkpoint import CheckpointError
from solorl.checkpoints.replay import ReplayLog, is_replay


class Ring:
    """A buffer of one float and one integer array, filled with the row's number."""

    def __init__(self, capacity):
        self.arrays = {"x": np.zeros((capacity, 2), np.float32), "n": np.zeros(capacity, np.int64)}
        self.inserted = 0

    def add(self, count):
        for _ in range(count):
            i = self.inserted % len(self.arrays["n"])
            self.arrays["x"][i], self.arrays["n"][i] = self.inserted / 7, self.inserted
            self.inserted += 1


@pytest.mark.parametrize("counts", [(3, 4), (10, 3, 0, 2), (7, 9, 25, 1), (4, 4, 4, 4, 4, 4)])
def test_every_checkpoint_and_the_one_before_can_be_loaded(counts, tmp_path):
    ring, log, before = Ring(10), ReplayLog(tmp_path), []
    for count in counts:
        ring.add(count)
        before.append((log.append(ring), {key: array.copy() for key, array in ring.arrays.items()}, ring.inserted))
        for saved, arrays, inserted in before[-2:]:
            other = Ring(10)
            ReplayLog(tmp_path).load(other, saved)
            assert other.inserted == inserted
            assert all(np.array_equal(other.arrays[key], arrays[key]) for key in arrays)
    rows = sum(segment["stop"] - segment["start"] for segment in before[-1][0]["segments"])
    assert rows <= 10 + max(counts)  # what is on the disk stays bounded


def test_a_checkpoint_writes_only_the_new_rows(tmp_path):
    ring, log = Ring(1000), ReplayLog(tmp_path)
    ring.add(500)
    log.append(ring)
    first = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    ring.add(3)
    log.append(ring)
    assert all(path.stat().st_mtime_ns == time for path, time in first.items())
    assert sorted(path.name for path in tmp_path.iterdir() if path not in first) == [
        "000000000500_000000000503.safetensors"
    ]


def test_resuming_goes_on_without_what_a_killed_session_wrote_after_its_checkpoint(tmp_path):
    ring, log = Ring(10), ReplayLog(tmp_path)
    ring.add(8)
    saved = log.append(ring)
    ring.add(5)
    log.append(ring)  # segments written, but the checkpoint never was
    other, again = Ring(10), ReplayLog(tmp_path)
    again.load(other, saved)
    assert other.arrays["n"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 0]
    other.add(5)
    final = again.append(other)
    third = Ring(10)
    ReplayLog(tmp_path).load(third, final)
    assert np.array_equal(third.arrays["n"], ring.arrays["n"])


def test_a_larger_buffer_leaves_the_checkpoint_whole_until_there_is_a_new_one(tmp_path, monkeypatch):
    """It counts its rows from 0 again, so that segments of other rows would have the same names."""
    monkeypatch.setattr("solorl.checkpoints.replay.MOST_BYTES", 32)  # two rows
    ring, log = Ring(4), ReplayLog(tmp_path)
    ring.add(6)
    log.append(ring)
    log.forget()
    ring.add(2)
    saved = log.append(ring)  # its segments hold the rows from 4 on
    log.forget()
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for _ in range(2):  # twice: a session that was killed before its checkpoint leaves files, too
        larger, again = Ring(9), ReplayLog(tmp_path)
        again.load(larger, saved)
        larger.add(4)
        new = again.append(larger)
        assert all((tmp_path / name).read_bytes() == data for name, data in kept.items())
    ReplayLog(tmp_path).load(Ring(4), saved)
    again.forget()  # the new checkpoint is whole
    again.append(larger)
    again.forget()
    other = Ring(9)
    ReplayLog(tmp_path).load(other, new)
    assert all(np.array_equal(other.arrays[key], larger.arrays[key]) for key in other.arrays)
    assert {path.name for path in tmp_path.iterdir()} == {segment["name"] for segment in new["segments"]}


def test_damage_is_found(tmp_path):
    ring, log = Ring(10), ReplayLog(tmp_path)
    ring.add(8)
    saved = log.append(ring)
    path = next(tmp_path.iterdir())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is missing or damaged"):
        ReplayLog(tmp_path).load(Ring(10), saved)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing or damaged"):
        ReplayLog(tmp_path).load(Ring(10), saved)


def test_rows_of_another_shape_are_refused(tmp_path):
    ring, log = Ring(10), ReplayLog(tmp_path)
    ring.add(8)
    saved = log.append(ring)
    other = Ring(10)
    other.arrays = {"x": np.zeros((10, 4), np.float16), "n": np.zeros(10, np.int64)}  # as many bytes
    with pytest.raises(CheckpointError, match="does not fit"):
        ReplayLog(tmp_path).load(other, saved)
    assert other.inserted == 0 and not other.arrays["x"].any()


def test_what_a_buffer_remembers_is_saved_whole(tmp_path):
    """A dict of arrays or a namespace of numbers and arrays; arrays keep their place, other shapes are refused."""
    for kind in (dict, SimpleNamespace):
        ring, other, log = Ring(10), Ring(10), ReplayLog(tmp_path / kind.__name__)
        for each, value in ((ring, 3), (other, 0)):
            each.state = kind(
                weight=np.full(2, value), largest=np.array(float(value)) if kind is dict else float(value)
            )
        ring.add(8)
        saved, kept = log.append(ring), other.state["weight"] if kind is dict else other.state.weight
        ReplayLog(tmp_path / kind.__name__).load(other, saved)
        largest = other.state["largest"] if kind is dict else other.state.largest
        assert largest == 3 and kept.tolist() == [3, 3]
        other.state = kind(weight=np.zeros(3), largest=np.zeros(()))
        with pytest.raises(CheckpointError, match="does not fit"):
            ReplayLog(tmp_path / kind.__name__).load(other, saved)


def test_what_a_buffer_is():
    assert is_replay(Ring(3)) and not is_replay(np.zeros(3)) and not is_replay(object())
