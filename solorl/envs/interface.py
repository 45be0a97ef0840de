"""What every kind of environments for compiled loops has in common."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
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


def advancing(envs: Any) -> Callable[..., Any]:
    """`advance(key, state, action)` -> key, state, step: a step of these environments, which splits the key itself."""

    def advance(key: Any, state: Any, action: Any) -> Any:
        key, step_key = jax.random.split(key)
        return key, *envs.step(step_key, state, action)

    return advance
