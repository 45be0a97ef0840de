"""What every kind of environments for compiled loops has in common."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Step(NamedTuple):
    """What a step of every environment brought; all (num_envs, ...)."""

    obs: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_obs: jax.Array
    lives: jax.Array | None = None  # of the game that `obs` is of; games of Atari only, as the next one
    final_lives: jax.Array | None = None  # of the game that `final_obs` is of


def key_of(seed: int | Sequence[int] | None) -> Any:
    """JAX's key of the seed of a `reset`, a number or one for each environment; None: one by chance."""
    return jax.random.PRNGKey(int(np.random.SeedSequence(seed).generate_state(1)[0]) >> 1)


def where_ended(done: Any, first: Any, here: Any) -> Any:
    """A tree of arrays (num_envs, ...): `first` where an episode has ended, `done` (num_envs,), `here` elsewhere."""

    def choose(first: Any, here: Any) -> Any:
        return jnp.where(done.reshape(-1, *[1] * (here.ndim - 1)), first, here).astype(here.dtype)

    return jax.tree.map(choose, first, here)


def restored(like: Any, arrays: Sequence[Any], what: str) -> Any:
    """The tree that has the leaves `arrays`. ValueError unless these are of the shapes and types of those of `like`."""
    leaves = [np.asarray(array) for array in arrays]
    if [(leaf.shape, leaf.dtype) for leaf in leaves] != [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(like)]:
        raise ValueError(f"it is not of {what} of this kind")
    return jax.tree.unflatten(jax.tree.structure(like), map(jnp.asarray, leaves))


def advancing(envs: Any) -> Callable[..., Any]:
    """`advance(key, state, action)` -> key, state, step: a step of these environments, which splits the key itself."""

    def advance(key: Any, state: Any, action: Any) -> Any:
        key, step_key = jax.random.split(key)
        return key, *envs.step(step_key, state, action)

    return advance
