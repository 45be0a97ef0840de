"""Switch: two agents change rooms through a corridor in which only one has room, so that one of them must wait.

The grid has 3 x 7 cells; `#` is a wall. Agent 0 starts at 0, and its home is the cell a; agent 1 starts at 1, with the
home b. Actions: stay, up, down, left, right. Agent 0 moves first; a move into the other agent's cell is not made, one
into a wall is masked. Who comes home gets 5 and stays there; each step of who is not home costs 0.1. The game
terminates when both are home, and is truncated after 50 steps. An agent sees its own cell and the other's, each as a
row and a column in one-hot vectors; the central state is what agent 0 sees.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from solorl.games.teams.game import TeamGame

GRID = "b0###1a", ".......", "..###.."
FLOOR = np.pad(np.array([[cell != "#" for cell in row] for row in GRID]), 1)  # with a wall around
START, HOME = (np.array([[0, GRID[0].index(cell)] for cell in cells]) for cells in ("01", "ab"))
MOVES = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])


def start(key: Any, n: int) -> Any:
    """The cells of both agents, (n, 2, 2): row, column."""
    return jnp.broadcast_to(jnp.asarray(START, jnp.int32), (n, 2, 2))


def is_floor(cells: Any) -> Any:
    """Whether cells (..., 2) are not walls, (...)."""
    return jnp.asarray(FLOOR)[cells[..., 0] + 1, cells[..., 1] + 1]


def step(state: Any, action: Any) -> Any:
    """See the top of this file."""
    was_home, cells = (state == HOME).all(2), state
    for k in (0, 1):
        wanted = cells[:, k] + jnp.asarray(MOVES)[action[:, k]]
        free = is_floor(wanted) & (wanted != cells[:, 1 - k]).any(1) & ~was_home[:, k]
        cells = cells.at[:, k].set(jnp.where(free[:, None], wanted, cells[:, k]))
    is_home = (cells == HOME).all(2)
    return cells, jnp.where(was_home, 0.0, jnp.where(is_home, 5.0, -0.1)), is_home.all(1)


def observe(state: Any) -> Any:
    """(n, 2, 20): the own cell, and the other's."""
    own = jnp.concatenate([jax.nn.one_hot(state[..., 0], 3), jax.nn.one_hot(state[..., 1], 7)], 2)
    return jnp.concatenate([own, own[:, ::-1]], 2)


def mask(state: Any) -> Any:
    """(n, 2, 5): no moves into walls, and none away from home."""
    home = (state == HOME).all(2)[..., None]
    return is_floor(state[:, :, None] + MOVES) & (~home | (jnp.arange(5) == 0))


def switch() -> TeamGame:
    """See the top of this file."""
    central = lambda state: observe(state)[:, 0]  # noqa: E731
    return TeamGame("switch", ("agent_0", "agent_1"), (20, 20), (5, 5), 50, start, step, observe, central, mask)
