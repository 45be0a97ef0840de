"""What every kind of environments for compiled loops has in common."""

from typing import NamedTuple

import jax


class Step(NamedTuple):
    """What a step of every environment brought; all (num_envs, ...)."""

    obs: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_obs: jax.Array
    lives: jax.Array | None = None  # of the game that `obs` is of; games of Atari only, as the next one
    final_lives: jax.Array | None = None  # of the game that `final_obs` is of
