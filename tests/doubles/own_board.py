"""Boards as a user would register them: three in a row on 3 x 4 cells, and rules of one's own."""

import gymnasium as gym

from solorl.envs.spaces import Seeded
from solorl.games.boards import Board
from solorl.games.matches import Match, Matches
from solorl.games.opponents import player


class NoDiagonals(Board):
    """Rows to the right and down win, diagonal ones do not."""

    def __init__(self, *rules):
        super().__init__(*rules)
        self.shifts = self.shifts[[0, 2]]


class NoDiagonalsMatches(Matches):
    """Games on it against a player that knows these rules."""

    def __init__(self, rules, opponent="one-ply", **kwargs):
        super().__init__(rules, opponent=opponent, **kwargs)
        self.game = NoDiagonals(*rules)
        self.choose = player(opponent, self.game)


class NoDiagonalsMatch(Match):
    """One of them."""

    def __init__(self, **kwargs):
        Seeded.__init__(self, NoDiagonalsMatches(**kwargs))
        self.game, self.render_mode = self.envs.game, self.envs.render_mode


gym.register(
    "ThreeInARow-v0",
    "solorl.games.matches:Match",
    vector_entry_point="solorl.games.matches:Matches",
    kwargs={"rules": (3, 4, 3, False)},
)
gym.register(
    "NoDiagonals-v0",
    NoDiagonalsMatch,
    vector_entry_point=NoDiagonalsMatches,
    kwargs={"rules": (3, 3, 3, False)},
)
