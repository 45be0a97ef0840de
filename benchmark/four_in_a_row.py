"""How often a trained player of connect four keeps the value of a position, by a solver; and its points against others.

python benchmark/four_in_a_row.py RUN_DIR [--simulations 64,512] [--games 200] [--opponents one-ply,uct-1000,minimax-4]
python benchmark/four_in_a_row.py one-ply minimax-4 uct-1000   # how often these players keep the value
python benchmark/four_in_a_row.py --solve 500                  # make the positions again: half an hour

The positions have 12 to 30 stones, none is over, and in each there is a better and a worse move. They come from games
between players of different strength, each of which begins with random moves. Those with more than 300,000 positions
to look at are left out and counted. Positions and values of moves are in `four_in_a_row.json`.
"""

import argparse
import json
import shutil
import sys
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

import solorl
from solorl.games.boards import Board
from solorl.games.opponents import player
from solorl.run.load import Play, play_script, script_of

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests/doubles")]
from four_solver import Solver, TooMany  # noqa: E402

SOLVED = Path(__file__).with_suffix(".json")
FOUR = Board(6, 7, 4, stones_fall=True)


@contextmanager
def with_simulations(run_dir, number):
    """A copy of the run, gone afterwards, whose search makes this many; the run itself without a number."""
    if not number:
        yield run_dir
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(run_dir, Path(folder) / run_dir.resolve().name)
        config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        config["args"]["eval_simulations"] = int(number)
        (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield copy


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


def solve(count):
    """Write positions in which moves have different values, and the value of each move, -2 where it is not allowed."""
    solver, left_out, rows = Solver(), 0, []
    for position in positions(count):
        mask, value = FOUR.mask(position), np.full(FOUR.num_actions, -2)
        try:
            for column in np.flatnonzero(mask):
                value[column] = solver.after(*map(int, position), int(column))
        except TooMany:
            left_out += 1
            continue
        if value[mask].min() < value.max():
            rows.append({"position": [int(stones) for stones in position], "values": value.tolist()})
    lines = ",\n".join(json.dumps(row) for row in rows)
    SOLVED.write_text(f'{{"drawn": {count}, "left_out": {left_out}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def judge(name, act):
    """Say which fraction of its moves keep the best value. act: positions (n, 2) -> columns (n,)."""
    solved = json.loads(SOLVED.read_text(encoding="utf-8"))
    asked = np.array([row["position"] for row in solved["rows"]])
    values = np.array([row["values"] for row in solved["rows"]])
    kept = values[np.arange(len(asked)), act(asked)] == values.max(1)
    few = np.array([bin(own | other).count("1") < 20 for own, other in asked.tolist()])
    few_kept = f"{kept[few].mean():.3f} of {few.sum()} with 12 to 19 stones"
    print(f"{name}: {kept.mean():.3f} of {len(asked)} moves keep the value, {few_kept}", flush=True)


def by_policy(policy, position):
    """The moves of a trained player."""
    return policy(FOUR.observation(position), action_mask=FOUR.mask(position))


def main():
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("players", nargs="*", help="a run folder, or names of opponents")
    parser.add_argument("--simulations", default="", help="of the search of a run, separated by commas; empty: its own")
    parser.add_argument("--games", type=int, default=0, help="of a run, on each side of the board; 0: none")
    parser.add_argument("--opponents", default="one-ply,minimax-4,uct-1000")
    parser.add_argument("--solve", type=int, default=0, help="make this many positions first")
    parser.add_argument("--trust-script", action="store_true", help="execute the script of another version")
    args = parser.parse_args()
    if args.solve:
        solve(args.solve)
    for name in args.players:
        if not (run_dir := Path(name)).is_dir():
            judge(name, partial(player(name, FOUR), rng=np.random.default_rng(0)))
            continue
        for number in args.simulations.split(","):
            with with_simulations(run_dir, number) as folder:
                policy = solorl.load(folder, trust_script=args.trust_script)
            judge(f"{run_dir.name} {number}".rstrip(), partial(by_policy, policy))
        copy, original = script_of(run_dir)
        for opponent in args.opponents.split(",") if args.games else ():
            play = Play(episodes=args.games, opponent=opponent)
            play_script(original or copy, run_dir, play, neighbours=original not in (None, copy))


if __name__ == "__main__":
    main()
