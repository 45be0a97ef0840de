"""Matrix games: both agents get the same payoff, and none knows the other's action.

Each agent's reward is the payoff / 2, so that the return of the team is the payoff. Observations are equal for both.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from solorl.games.teams.game import TeamGame

AGENTS = ("agent_0", "agent_1")
TWO_STEP = np.array([[[0, 0], [0, 0]], [[7, 7], [7, 7]], [[0, 1], [1, 8]]], np.float32)  # of states 1, 2A, 2B
QTRAN = [[8, -12, -12], [-12, 0, 0], [-12, 0, 0]]
CLIMBING = [[11, -30, 0], [-30, 7, 6], [0, 0, 5]]


def shared(payoff: Any) -> Any:
    """Payoffs (n,) -> rewards (n, 2)."""
    return jnp.stack([payoff, payoff], 1) / 2


def two_step() -> TeamGame:
    """Agent 0 chooses the second state, where the payoff is 7, or at best 8. Rashid et al. 2018, section 5
    (https://arxiv.org/abs/1803.11485). Observation and central state: the state as a one-hot vector."""

    def start(key: Any, n: int) -> Any:
        return jnp.zeros(n, jnp.int32)

    def step(state: Any, action: Any) -> Any:
        payoff = jnp.asarray(TWO_STEP)[state, action[:, 0], action[:, 1]]
        return jnp.where(state == 0, 1 + action[:, 0], state), shared(payoff), state > 0

    def central(state: Any) -> Any:
        return jax.nn.one_hot(state, 3)

    def observe(state: Any) -> Any:
        return jnp.repeat(central(state)[:, None], 2, 1)

    return TeamGame("two_step", AGENTS, (3, 3), (2, 2), 2, start, step, observe, central)


def repeated(name: str, payoffs: Any, times: int) -> TeamGame:
    """The matrix `payoffs`, played `times` times; one time ends the game, more are a time limit. All that is observed
    is the number 1."""
    table = jnp.asarray(payoffs, jnp.float32)

    def start(key: Any, n: int) -> Any:
        return jnp.ones((n, 1))

    def step(state: Any, action: Any) -> Any:
        return state, shared(table[action[:, 0], action[:, 1]]), jnp.full(len(state), times == 1)

    def observe(state: Any) -> Any:
        return jnp.repeat(state[:, None], 2, 1)

    return TeamGame(name, AGENTS, (1, 1), (len(table),) * 2, times, start, step, observe, lambda state: state)


def qtran_matrix() -> TeamGame:
    """One step that no sum of the agents' own values explains. Son et al. 2019, table 1
    (https://arxiv.org/abs/1905.05408)."""
    return repeated("qtran_matrix", QTRAN, 1)


def climbing(times: int = 25) -> TeamGame:
    """A mistake of one agent makes the best action of the other the worst. Claus & Boutilier 1998."""
    return repeated("climbing", CLIMBING, times)


def penalty(k: float = -100.0, times: int = 25) -> TeamGame:
    """Two equally good pairs of actions, and the penalty `k` where the agents choose different ones. Claus & Boutilier
    1998."""
    return repeated("penalty", [[10, 0, k], [0, 2, 0], [k, 0, 10]], times)
