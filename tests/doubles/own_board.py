"""Boards as a user would register them: three in a row on 3 x 4 cells, and rules of one's own."""

import gymnasium as gym
import numpy as np

from solorl.games.boards import Board


class NoDiagonals(Board):
    """Rows to the right and down win, diagonal ones do not."""

    def __init__(self, *rules):
        super().__init__(*rules)
        self.shifts = self.shifts[[0, 2]]


class Begun(Board):
    """Games begin with a stone of each player at the bottom of the first column."""

    def start(self, count):
        return super().start(count) + np.array([1, 2])


OWN = {"NoDiagonals-v0": NoDiagonals(3, 3, 3, False), "Begun-v0": Begun(3, 3, 3, False)}
for name, rules in {"ThreeInARow-v0": (3, 4, 3, False), **OWN}.items():
    gym.register(
        name,
        "solorl.games.matches:Match",
        vector_entry_point="solorl.games.matches:Matches",
        kwargs={"rules": rules},
    )
