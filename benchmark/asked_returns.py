"""The returns that a decision transformer reaches for those it is asked for, as a Markdown table.

python benchmark/asked_returns.py RUN --returns -500 500 1000 2000 4000
"""

import argparse
from pathlib import Path

import solorl
from solorl.compute.device import CONFIRM, env_seed
from solorl.run.evaluation import play_games


def main():
    """Play, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--returns", nargs="+", required=True, type=float, help="returns to ask for")
    parser.add_argument("--episodes", type=int, default=20, help="episodes for each (20)")
    args = parser.parse_args()
    policy = solorl.load(args.run, last=True)
    games = [policy.make_env() for _ in range(args.episodes)]
    seeds = [env_seed(policy.args.seed, CONFIRM, i) for i in range(args.episodes)]
    print("| asked for | mean return | standard deviation | lowest | highest |\n|---:|---:|---:|---:|---:|")
    for asked in args.returns:
        policy.models["actor"].target = asked
        found = play_games(games, policy.policy, seeds)[0]
        print(f"| {asked:,.0f} | {found.mean():,.1f} | {found.std():,.1f} | {found.min():,.1f} | {found.max():,.1f} |")


if __name__ == "__main__":
    main()
