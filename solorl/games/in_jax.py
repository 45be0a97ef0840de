"""Cue, and key and door, as pure functions in JAX: see `Dynamics` in solorl/envs/classic.py."""

import jax
import jax.numpy as jnp

from solorl.envs.classic import Dynamics

STEPS, SIZE = 30, 10  # of games/Cue-v0 and games/KeyAndDoor-v0


def cue_start(key, n):
    """States (n, 2): the cue, the steps so far."""
    return jnp.stack([jax.random.randint(key, (n,), 0, 2), jnp.zeros(n, jnp.int32)], 1)


def cue_step(state, action):
    """The question is asked after `STEPS` steps, and the answer ends the episode."""
    cue, time = state.T
    asked = time == STEPS
    return jnp.stack([cue, time + 1], 1), jnp.where(asked & (action == cue), 1.0, 0.0), asked


def cue_observe(state):
    """Which cue is shown, whether the question is asked."""
    cue, time = state.T
    return jnp.stack([(time == 0) & (cue == 0), (time == 0) & (cue == 1), time == STEPS], 1).astype(jnp.float32)


def door_start(key, n):
    """States (n, 3): row, column, whether the agent has the key."""
    return jnp.zeros((n, 3), jnp.int32)


def door_step(state, action):
    """Moves up, down, left, right; walls stop them."""
    moves = jnp.array([[-1, 0], [1, 0], [0, -1], [0, 1]])
    place = (state[:, :2] + moves[action]).clip(0, SIZE - 1)
    below = place[:, 0] == SIZE - 1
    has_key = (state[:, 2] == 1) | (below & (place[:, 1] == 0))
    opened = has_key & below & (place[:, 1] == SIZE - 1)
    return jnp.concatenate([place, has_key[:, None]], 1), opened.astype(jnp.float32), opened


def door_observe(state):
    """Row and column as one-hot vectors, whether the agent has the key."""
    row, column = jax.nn.one_hot(state[:, 0], SIZE), jax.nn.one_hot(state[:, 1], SIZE)
    return jnp.concatenate([row, column, state[:, 2:].astype(jnp.float32)], 1)


DYNAMICS = {
    "games/Cue-v0": Dynamics(cue_start, cue_step, cue_observe),
    "games/KeyAndDoor-v0": Dynamics(door_start, door_step, door_observe),
}
