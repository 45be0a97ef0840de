"""A team of one training against the other teams of another one: is its play better against the same opponents?

python benchmark/cross_play.py --team predators --ours runs/A1 runs/A2 --theirs runs/B1 runs/B2 --games 1000

Every policy of `--ours` and of `--theirs` plays the team, against the policies of all these runs in the other seats.
The same seeds begin all games. Prints a Markdown table: the team's mean return for each pair, and at the end the mean
difference between ours and theirs over all pairs and games, with its 95 % bootstrap interval over games.
"""

import argparse
from pathlib import Path

import numpy as np

import solorl
from solorl.run.evaluation import play_games, stepwise


def team_returns(members, policy, opponent, games, seeds):
    """The returns (games,) of a team that `policy` plays while `opponent` plays all others."""
    ours, theirs = (stepwise(each, len(games)) for each in (policy, opponent))

    def act(obs, action_mask):
        infos = [{}] * len(games) if action_mask is None else [{"action_mask": mask} for mask in action_mask]
        actions = np.array(theirs(obs, infos))
        actions[:, members] = ours(obs, infos)[:, members]
        return actions

    return play_games(games, act, seeds)[0][:, members].sum(1)


def interval(differences, reps=5_000):
    """Mean of (games,) and its 95 % percentile bootstrap interval."""
    index = np.random.default_rng(0).integers(len(differences), size=(reps, len(differences)))
    return differences.mean(), *np.percentile(differences[index].mean(1), [2.5, 97.5])


def cross_play(team, ours, theirs, count, chunk=100):
    """Run folder -> opponent's run folder -> returns (count,) of the team."""
    policies = {path: solorl.load(path, trust_script=True) for path in [*ours, *theirs]}
    games = [next(iter(policies.values())).make_env() for _ in range(min(chunk, count))]
    teams = games[0].unwrapped.teams
    if team not in teams:
        raise SystemExit(f"there is no team {team}; there are {', '.join(teams)}")
    found = {path: {} for path in policies}
    for path, policy in policies.items():
        for other, opponent in policies.items():
            parts = np.array_split(np.arange(count), -(-count // len(games)))
            returns = [
                team_returns(
                    list(teams[team]), policy.policy, opponent.policy, games[: len(part)], [int(i) for i in part]
                )
                for part in parts
            ]
            found[path][other] = np.concatenate(returns)
    return found


def main():
    """Play, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--team", required=True, help="name of the team that is compared")
    parser.add_argument("--ours", nargs="+", required=True, type=Path, help="run folders")
    parser.add_argument("--theirs", nargs="+", required=True, type=Path, help="run folders")
    parser.add_argument("--games", type=int, default=1_000, help="games of each pair (1000)")
    args = parser.parse_args()
    found = cross_play(args.team, args.ours, args.theirs, args.games)
    print(f"| {args.team} of | against {' | against '.join(path.name for path in found)} |")
    print("|---|" + "---:|" * len(found))
    for path, row in found.items():
        print(f"| {path.name} | " + " | ".join(f"{returns.mean():.1f}" for returns in row.values()) + " |")
    mean = {  # over the policies of a side and all opponents, (games,)
        side: np.mean([returns for path in paths for returns in found[path].values()], 0)
        for side, paths in (("ours", args.ours), ("theirs", args.theirs))
    }
    print("\nours less theirs: {:.2f} [{:.2f}, {:.2f}]".format(*interval(mean["ours"] - mean["theirs"])))


if __name__ == "__main__":
    main()
