"""The replay buffers of a training in JAX as `replay.ReplayLog` takes them: rows are read and written piece by piece,
so that a buffer of gigabytes never is in memory twice.

A buffer is a field of the training, a NamedTuple of arrays (capacity, ...) with `inserted`, the number of rows ever
inserted; row i lies at index i % capacity. A field `replay` without `inserted` is saved like all other fields.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def replays_of(training: Any) -> tuple[str, ...]:
    """The fields of a training that are buffers in the sense above."""
    return tuple(field for field in training._fields if hasattr(getattr(training, field), "inserted"))


def without_replay(begin: Callable[[Any], Any], key: Any) -> Any:
    """The training that `begin` makes, without its buffers: for those who only play."""
    training = begin(key)
    return training._replace(**dict.fromkeys(replays_of(training)))


def with_own_buffers(training: Any) -> Any:
    """A new training whose leaves have memory of their own, for the compiled code writes over them. Replay buffers,
    which are not copied, have it: no other leaf is as large."""
    replays = {field: getattr(training, field) for field in replays_of(training)}
    rest = training._replace(**dict.fromkeys(replays))
    return jax.tree.map(lambda x: jnp.array(x, copy=True), rest)._replace(**replays)


@partial(jax.jit, donate_argnums=0)
def _written(array: Any, index: Any, rows: Any) -> Any:
    return array.at[index].set(rows, mode="drop")


class Rows:
    """An array of a buffer, of which only some rows at once are NumPy's."""

    def __init__(self, get: Callable[..., Any], put: Callable[[Any], None]):
        self._get, self._put = get, put
        array = get()
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self._get(index))

    def __setitem__(self, index: np.ndarray, rows: np.ndarray) -> None:
        """Write rows (n, ...) to an index (n,), in place: compiled for n rounded up to a power of two."""
        more = (1 << (len(index) - 1).bit_length()) - len(index)
        index = np.pad(np.asarray(index, np.int32), (0, more), constant_values=len(self))  # after the end: not written
        self._put(_written(self._get(), index, np.pad(rows, [(0, more), *[(0, 0)] * (rows.ndim - 1)])))


class JaxReplay:
    """The buffer of one training: `get(name)` is one of its arrays or, with an index, some rows of it;
    `put(name, array)` replaces it."""

    def __init__(self, names: Sequence[str], get: Callable[..., Any], put: Callable[[str, Any], None]):
        self._get, self._put = get, put
        arrays = [name for name in names if name != "inserted"]
        self.arrays = {name: Rows(partial(get, name), partial(put, name)) for name in arrays}

    @property
    def inserted(self) -> int:
        """The number of rows ever inserted."""
        return int(self._get("inserted"))

    @inserted.setter
    def inserted(self, count: int) -> None:
        self._put("inserted", jnp.int32(count))
