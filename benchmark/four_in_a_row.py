"""How often a trained player of connect four keeps the value of a position, by a solver; and its points against others.

python benchmark/four_in_a_row.py RUN_DIR [--positions 500] [--games 200] [--opponents one-ply,uct-1000,minimax-4]

The positions have 12 to 30 stones, none is over, and in each there is a better and a worse move. They come from games
between players of different strength, each of which begins with random moves. Those with more than 300,000 positions
to look at are left out, and their number is said.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

import solorl
from solorl.games.boards import Board
from solorl.games.opponents import player
from solorl.run.load import Play, play_script, script_of

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests/doubles")]
from four_solver import Solver, TooMany  # noqa: E402

FOUR = Board(6, 7, 4, stones_fall=True)


def positions(count, seed=0):
    """Different positions (count, 2) of 12 to 30 stones from games of mixed players."""
    rng, found = np.random.default_rng(seed), {}
    players = [player(name, FOUR) for name in ("random", "one-ply", "minimax-2", "minimax-4")]
    while len(found) < count:
        position, opening = FOUR.start(1), int(rng.integers(9))
        pair, stones = rng.choice(len(players), 2), int(rng.integers(12, 31))
        for number in range(stones):
            choose = players[0 if number < opening else pair[number % 2]]
            position = FOUR.play(position, choose(position, rng))
            if FOUR.over(position)[0]:
                break
        else:
            found[tuple(position[0].tolist())] = None
    return np.array([*found])


def judge(act, count):
    """Among positions in which moves have different values: the fraction of moves that keep the best, their number, and
    that of positions which the solver has left out."""
    solver, asked, values, left_out = Solver(), [], [], 0
    for position in positions(count):
        mask, value = FOUR.mask(position), np.full(FOUR.num_actions, -2)
        try:
            for column in np.flatnonzero(mask):
                value[column] = solver.after(*map(int, position), int(column))
        except TooMany:
            left_out += 1
            continue
        if value[mask].min() < value.max():
            asked.append(position)
            values.append(value)
    asked, values = np.array(asked), np.array(values)
    action = act(FOUR.observation(asked), FOUR.mask(asked))
    return (values[np.arange(len(asked)), action] == values.max(1)).mean(), len(asked), left_out


def main():
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--positions", type=int, default=500)
    parser.add_argument("--games", type=int, default=200, help="on each side of the board; 0: none")
    parser.add_argument("--opponents", default="one-ply,minimax-4,uct-1000")
    args = parser.parse_args()
    policy = solorl.load(args.run_dir)
    kept, asked, left_out = judge(lambda obs, mask: policy(obs, action_mask=mask), args.positions)
    print(f"{kept:.3f} of the moves keep the value of {asked} positions; {left_out} were too hard for the solver")
    copy, original = script_of(args.run_dir)
    for name in args.opponents.split(",") if args.games else ():
        play = Play(episodes=args.games, opponent=name)
        play_script(original or copy, args.run_dir, play, neighbours=original not in (None, copy))


if __name__ == "__main__":
    main()
