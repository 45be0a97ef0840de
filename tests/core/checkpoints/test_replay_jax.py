"""Replay buffers of trainings in JAX on the disk: row by row, also after the ring has wrapped."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solorl.checkpoints import replay
from solorl.run.trainings import JaxReplay, replays_of, with_own_buffers, without_replay


class Ring(NamedTuple):
    x: Any
    n: Any
    inserted: Any


class Training(NamedTuple):
    params: Any
    target_params: Any
    replay: Ring


def ring(capacity):
    return Ring(jnp.zeros((capacity, 2)), jnp.zeros(capacity, jnp.int32), jnp.int32(0))


class Holder:
    """What holds a training: a ring whose rows are filled with their numbers."""

    def __init__(self, capacity):
        self.ring = ring(capacity)
        self.part = JaxReplay(self, 0, "replay")

    def of(self, index, field, rows=...):
        name = field.partition(".")[2]
        return getattr(self.ring, name)[rows] if name else self.ring

    def put(self, index, field, array):
        self.ring = self.ring._replace(**{field.partition(".")[2]: array})

    def add(self, count):
        number = np.arange(self.part.inserted, self.part.inserted + count)
        index = number % len(self.ring.n)
        x, n = self.ring.x.at[index].set(number[:, None] / 7), self.ring.n.at[index].set(number)
        self.ring = Ring(x, n, jnp.int32(self.part.inserted + count))

    def arrays(self):
        return [np.array(array) for array in self.ring]


@pytest.mark.parametrize("counts", [(3, 4), (10, 3, 0, 2), (4, 4, 4, 4, 4, 4)])
def test_every_checkpoint_and_the_one_before_can_be_loaded(counts, tmp_path, monkeypatch):
    """In segments of three rows; into a buffer whose arrays stay where they are."""
    monkeypatch.setattr(replay, "MOST_BYTES", 36)
    mine, log, before = Holder(10), replay.ReplayLog(tmp_path), []
    assert replay.is_replay(mine.part)
    for count in counts:
        mine.add(count)
        before.append((log.append(mine.part), mine.arrays()))
        for saved, arrays in before[-2:]:
            other = Holder(10)
            places = [array.unsafe_buffer_pointer() for array in other.ring[:2]]
            replay.ReplayLog(tmp_path).load(other.part, saved)
            for got, want in zip(other.arrays(), arrays, strict=True):
                np.testing.assert_array_equal(got, want)
            assert places == [array.unsafe_buffer_pointer() for array in other.ring[:2]]
    sizes = [each["stop"] - each["start"] for each in before[-1][0]["segments"]]
    assert max(sizes) <= 3


def test_a_buffer_of_another_size_is_filled(tmp_path):
    mine = Holder(10)
    mine.add(14)
    saved = replay.ReplayLog(tmp_path).append(mine.part)
    larger, smaller = Holder(16), Holder(6)
    for other in (larger, smaller):
        replay.ReplayLog(tmp_path).load(other.part, saved)
    assert larger.part.inserted == 10 and larger.ring.n.tolist() == [*range(4, 14), *[0] * 6]
    assert smaller.part.inserted == 14 and smaller.ring.n.tolist() == [12, 13, 8, 9, 10, 11]


def begin(key):
    params = jax.random.normal(key, (3,))
    return Training(params, params, ring(10))


def test_all_leaves_of_a_training_have_buffers_of_their_own():
    """Those of the replay buffer where they were."""
    made = begin(jax.random.PRNGKey(0))  # both networks are one array
    training = with_own_buffers(made)
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(training)]
    assert len(set(places)) == 5 and places[2:] == [leaf.unsafe_buffer_pointer() for leaf in made.replay]
    np.testing.assert_array_equal(training.params, made.params)


def test_those_who_only_play_have_no_buffer():
    training = without_replay(begin, jax.random.PRNGKey(0))
    assert training.replay is None and training.params.shape == (3,)
    assert replays_of(begin(jax.random.PRNGKey(0))) == ("replay",) and replays_of(training) == ()
    assert replays_of(training._replace(target_params=ring(3), replay=ring(4))) == ("target_params", "replay")
