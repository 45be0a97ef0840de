"""A best action of each small game. It may look at the hidden state."""

import numpy as np

from solorl.games.resource_grid import HARVEST, RETURN

GAINS = np.array([0.69, 0.91, 6.38, 1.57])  # of the pole: a linear-quadratic regulator, by the Riccati equation


def cue(env):
    """The right answer; before the question any allowed action."""
    if env.continuous:
        return np.array([2.0 * env.cue - 1.0], np.float32)
    return 2 if env.masked and env.time < env.steps else env.cue


def key_and_door(env):
    """A step on the shortest way."""
    if env.has_key:
        return 3 if env.place[1] < env.size - 1 else 1
    return 2 if env.place[1] > 0 else 1


def resource_grid(env):
    """A step on the shortest way: to the resource in the first corner, with it to the base in the last one."""
    goal = env.size - 1 if env.carries else 0
    row, column = env.place
    kind = RETURN if env.carries else HARVEST
    if row != goal:
        kind = int(row < goal)
    elif column != goal:
        kind = 2 + int(column < goal)
    return int(row * env.size + column) * 6 + kind


def two_numbers(env):
    """The first allowed number and the one that completes it."""
    first = int(np.flatnonzero(env.allowed)[0])
    return np.array([first, (env.sum - first) % env.size])


def two_senses(env):
    """1 where both entries agree."""
    answer = int(env.left == env.up)
    return np.array([2.0 * answer - 1.0], np.float32) if env.continuous else answer


BEST = {
    "Cue": cue,
    "KeyAndDoor": key_and_door,
    "ResourceGrid": resource_grid,
    "Tool": lambda env: (env.tool, np.array([env.strength], np.float32)),  # as named
    "TwoNumbers": two_numbers,
    "TwoSenses": two_senses,
    "MovingDot": lambda env: env.direction,  # of the last move; before the first one of the hidden state
    "BitFlip": lambda env: int(np.argmax(env.place != env.goal)),  # the first bit that is wrong
    "PointReach": lambda env: np.clip((env.goal - env.place) / 0.05, -1, 1),  # straight to the goal
    "Pole": lambda env: np.clip(GAINS @ env.state, -1, 1, dtype=np.float32).reshape(1),
}


def best_action(env):
    """Of a game, with or without wrappers, as it is now."""
    return BEST[type(env.unwrapped).__name__](env.unwrapped)
