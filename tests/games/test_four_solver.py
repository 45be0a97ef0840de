"""The solver of connect four that judges players: against the plain recursion, and on positions that are known."""

import numpy as np
import pytest
from four_solver import Solver, TooMany

from solorl.games.boards import Board

FOUR = Board(6, 7, 4, True)


def random_position(stones, rng):
    """One that is not over, (2,); None where the game ended before."""
    position = FOUR.start(1)
    for _ in range(stones):
        position = FOUR.play(position, np.array([rng.choice(np.flatnonzero(FOUR.mask(position)[0]))]))
        if FOUR.over(position)[0]:
            return None
    return position[0]


def plain(position, known):
    """The value by looking at all games."""
    key = tuple(position.tolist())
    if key not in known:
        if FOUR.lost(position):
            known[key] = -1
        elif FOUR.over(position):
            known[key] = 0
        else:
            children = FOUR.children(position)[FOUR.mask(position)]
            known[key] = max(-plain(child, known) for child in children)
    return known[key]


def test_values_are_those_of_all_games():
    rng, solver, known, seen = np.random.default_rng(0), Solver(), {}, []
    while len(seen) < 40 or 0 not in seen:
        if (position := random_position(31, rng)) is not None:
            own, other = map(int, position)
            seen.append(plain(position, known))
            assert solver.value(own, other) == seen[-1]
            for column in np.flatnonzero(FOUR.mask(position)):
                child = FOUR.play(position, column)
                assert solver.after(own, other, int(column)) == -plain(child, known)
    assert {-1, 1} < set(seen)


def test_a_solver_gives_up_after_the_positions_that_it_may_look_at():
    with pytest.raises(TooMany):
        Solver(most=1000).value(0, 0)
