"""What JAX trains: a pytree for each seed, its buffers and parts in a checkpoint, its policy in an evaluation."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from solorl.compute.xla import compiled
from solorl.envs.spaces import as_arrays
from solorl.errors import refuse
from solorl.machine import own_cores
from solorl.run.saving import Checkpoints

OF_ENVIRONMENTS = ("replay", "env_state", "obs")  # fields of a training that are not learned


def names_of(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree under names like `params.actor.0.weight`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _replaced(tree: Any, field: str, new: Any) -> Any:
    """A NamedTuple with another value in a field, or in a field of a field (`learner.actor`)."""
    if not field:
        return new
    first, _, rest = field.partition(".")
    return tree._replace(**{first: _replaced(getattr(tree, first), rest, new)})


# ---------------------------------------------------------------------- replay buffers
# as `checkpoints.replay.ReplayLog` takes them: rows are read and written piece by piece, so that a buffer of gigabytes
# never is in memory twice. A buffer is a field of the training, a NamedTuple of arrays (capacity, ...) with `inserted`,
# the number of rows ever inserted; row i lies at index i % capacity. A field `replay` without `inserted` is saved like
# all other fields.
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
    return array.at[index].set(rows)


class Rows:
    """An array of a buffer, of which only some rows at once are NumPy's: a field (`replay.obs`) of one of `trainings`
    (see `Trainings`)."""

    def __init__(self, trainings: Any, index: int, field: str):
        self._get, self._put = partial(trainings.of, index, field), partial(trainings.put, index, field)
        array = self._get()
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self._get(rows=index))

    def __setitem__(self, index: np.ndarray, rows: np.ndarray) -> None:
        """Write rows (n, ...) to an index (n,), in place."""
        self._put(_written(self._get(), np.asarray(index, np.int32), rows))


class JaxReplay:
    """A buffer as a part of a checkpoint: a field (`replay`) of one of `trainings`."""

    def __init__(self, trainings: Any, index: int, field: str):
        count, arrays = f"{field}.inserted", [x for x in trainings.of(index, field)._fields if x != "inserted"]
        self._get, self._put = partial(trainings.of, index, count), partial(trainings.put, index, count)
        self.arrays = {name: Rows(trainings, index, f"{field}.{name}") for name in arrays}

    @property
    def inserted(self) -> int:
        """The number of rows ever inserted."""
        return int(self._get())

    @inserted.setter
    def inserted(self, count: int) -> None:
        self._put(jnp.int32(count))


# ---------------------------------------------------------------------- trainings
class Trainings:
    """The training of each seed as it is now: a pytree each, or, where one call trains all (vmap), a single one whose
    leaves have a first axis of seeds. `begin` makes one of each key; where they will be stacked `side_by_side`, they
    wait in the memory of the host. `apart` are the fields that are a part of their own in a checkpoint."""

    def __init__(self, begin: Callable[[Any], Any], keys: Sequence[Any], side_by_side: bool):
        start = jax.jit(jax.vmap(begin) if side_by_side else begin)
        if side_by_side:
            found = jax.device_get(start(jnp.stack(keys)))
            self.each = [jax.tree.map(lambda x, i=i: x[i], found) for i in range(len(keys))]
        else:
            self.each = [with_own_buffers(start(key)) for key in keys]
        self.apart = replays_of(self.each[0])
        self._stack: Any = None

    def stack(self) -> None:
        """From now on all seeds are trained by one call."""
        self._stack = jax.tree.map(lambda *leaves: jnp.array(np.stack(leaves)), *self.each)

    def of(self, index: int, field: str = "", rows: Any = ...) -> Any:
        """The training of one seed as it is now, one field of it, or some rows of one array. Its arrays are gone once
        the training continues."""
        tree = self.each[index] if self._stack is None else self._stack
        tree = attrgetter(field)(tree) if field else tree
        if self._stack is not None:
            return jax.tree.map(lambda x: x[index] if rows is ... else x[index, rows], tree)
        return tree if rows is ... else tree[rows]

    def put(self, index: int, field: str, tree: Any) -> None:
        """Replace the training of one seed, or one field of it; before `compile`."""
        self.each[index] = _replaced(self.each[index], field, tree)

    def all(self) -> Any:
        """The trainings of all seeds as the script has them, see `Runs.resume`."""
        return self._stack or (self.each[0] if len(self.each) == 1 else list(self.each))

    def take(self, training: Any) -> None:
        """Continue from the trainings that the script has."""
        if self._stack is not None:
            self._stack = training
        else:
            self.each = [training] if len(self.each) == 1 else list(training)

    def train(self, iteration: Callable[..., Any], chunk: int, *shared: Any) -> Callable[[range, Sequence[int]], Any]:
        """Compile `train(iterations, active)`: all active seeds, on the CPU as many at once as there are cores; what
        they report, (seeds, iterations, ...). `shared`: see `Runs.compile`."""
        return (self._in_threads if self._stack is None else self._together)(iteration, chunk, *shared)

    def _in_threads(self, iteration: Callable[..., Any], chunk: int, *shared: Any) -> Callable[..., Any]:
        call = compiled(iteration, chunk, self.each[0], *shared)
        pool = ThreadPoolExecutor(len(own_cores()))

        def one(index: int, count: int) -> Any:
            self.each[index], report = call(self.each[index], jnp.int32(count), *shared)
            return jax.tree.map(lambda x: x[:count], jax.device_get(report))  # waits for the end

        def train(iterations: range, active: Sequence[int]) -> Any:
            reports = dict(zip(active, pool.map(lambda index: one(index, len(iterations)), active), strict=True))
            every = (reports.get(i, reports[active[0]]) for i in range(len(self.each)))
            return jax.tree.map(lambda *leaves: np.stack(leaves), *every)

        return train

    def _together(self, iteration: Callable[..., Any], chunk: int, *shared: Any) -> Callable[..., Any]:
        call = compiled(jax.vmap(iteration, (0, *[None] * len(shared))), chunk, self._stack, *shared)

        def train(iterations: range, active: Sequence[int]) -> Any:
            self._stack, report = call(self._stack, jnp.int32(len(iterations)), *shared)
            return jax.tree.map(lambda x: np.moveaxis(x[: len(iterations)], 1, 0), jax.device_get(report))

        return train


class Part:
    """What a checkpoint holds of one seed: its training, or one field of it (`params`, `learner.actor`)."""

    def __init__(self, trainings: Trainings, index: int, checkpoints: Checkpoints, field: str = ""):
        self.trainings, self.index, self.checkpoints, self.field = trainings, index, checkpoints, field

    def tree(self) -> Any:
        """The arrays as the script has them."""
        return self.trainings.of(self.index, self.field)

    def _tree(self, without: Sequence[str]) -> Any:
        """The field, or all fields of the training but those named."""
        if self.field:
            return self.tree()
        fields = self.trainings.each[self.index]._fields
        return {field: self.trainings.of(self.index, field) for field in fields if field not in without}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Name -> array."""
        return {name: np.asarray(leaf) for name, leaf in names_of(self._tree(self.trainings.apart)).items()}

    def must_be_finite(self) -> dict[str, np.ndarray]:
        """Name -> array of the whole training, without what belongs to the environments."""
        learned = self._tree((*OF_ENVIRONMENTS, *self.trainings.apart))
        return {name: np.asarray(leaf) for name, leaf in names_of(learned).items()}

    def load_state_dict(self, arrays: Mapping[str, Any]) -> None:
        """Bring the training into the saved state; UsageError where the arrays do not fit.

        The arrays of a field named `replay`, rings of rows, may be longer than the saved ones if those have not begun
        to overwrite their rows.
        """
        tree = self._tree(self.trainings.apart)
        leaves = []
        for name, leaf in names_of(tree).items():
            if name.startswith("replay.") and name in arrays:
                rows = len(arrays[name])
                if self.checkpoints.resumed.get("step", 0) <= rows < len(leaf):
                    missing = [(0, len(leaf) - rows), *[(0, 0)] * (leaf.ndim - 1)]
                    arrays = {**arrays, name: np.pad(arrays[name], missing)}
            fits = name in arrays and np.shape(arrays[name]) == leaf.shape
            refuse(not fits, f"what was saved does not fit: {name} is missing or has another shape than {leaf.shape}")
            leaves.append(jnp.asarray(np.asarray(arrays[name]), leaf.dtype))
        tree = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), leaves)
        for field, value in ({self.field: tree} if self.field else tree).items():
            self.trainings.put(self.index, field, value)


@dataclasses.dataclass(eq=False)
class PolicyOfSeed:
    """A policy of one seed, NumPy to NumPy, with the signature of `act` without the model and without `key`: it may
    have memory, masks and an axis of agents (see `Policy` in evaluation.py).

    Observations have the shape that the environment gave them; JAX makes 32 bits of 64. Where `act` has a parameter
    `key`, it gets a new one at each call, drawn from NumPy's random numbers.
    """

    act: Callable[..., Any]  # a pure function of the model and of observations, as a script has it
    compiled: Callable[..., Any]  # the same
    model: Callable[[], Any]  # returns the model

    def __post_init__(self) -> None:
        known = list(inspect.signature(self.act).parameters.values())
        self.draws = any(each.name == "key" for each in known)
        self.__signature__ = inspect.Signature([each for each in known[1:] if each.name != "key"])

    def __call__(self, obs: Any, *memory: Any, **given: Any) -> Any:
        """The actions for a batch of observations; with memory also the next state, as JAX has it."""
        if self.draws:
            given["key"] = jax.random.PRNGKey(np.random.randint(2**31 - 1))
        result = self.compiled(self.model(), obs, *memory, **given)
        if "state" not in self.__signature__.parameters:
            return as_arrays(result)
        action, state = result
        return as_arrays(action), state
