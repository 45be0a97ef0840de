"""Returns of episodes, of one agent or of several in teams, and the numbers that `info` declares of them.

With several agents every reward has a last axis of agents. A team's return is the sum over its agents; the first team's
stands for the game wherever one number is needed (best model, target, progress).

`info["is_success"]` or `info["success"]` of its last step says whether an episode succeeded (0 where that step does
not say it), `info["cost"]` is summed over its steps.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

DECLARED = ("is_success", "success", "cost")  # numbers of `info`
Teams = Mapping[str, Sequence[int]]  # name -> places of its agents, the most important team first


def teams_of(env: Any) -> Teams | None:
    """The teams of a `Game`, `PettingZooEnvs` or their like (see solorl.envs.pettingzoo); None where there is one
    agent."""
    env = getattr(env, "unwrapped", env)  # which environments inside a compiled loop do not have
    return env.teams if hasattr(env, "agent_action_space") else None


def of_game(returns: np.ndarray, teams: Teams | None) -> np.ndarray:
    """The first team's return (...,) from the agents' returns (..., num_agents); of one agent (...,) its own."""
    if teams is None:
        return returns
    return returns[..., list(next(iter(teams.values())))].sum(-1)


def named(key: str, returns: np.ndarray, teams: Teams | None, agents: Sequence[str] = ()) -> dict[str, Any]:
    """`key`: the return of the game; with two teams or more `key_TEAM`, for each of `agents`, if there are any,
    `key_AGENT`. `returns` as in `of_game`."""
    values = {key: of_game(returns, teams)}
    if teams is not None and len(teams) > 1:
        values |= {f"{key}_{team}": returns[..., list(members)].sum(-1) for team, members in teams.items()}
    return values | {f"{key}_{agent}": returns[..., place] for place, agent in enumerate(agents)}


def rollout(reward: Any, done: Any, teams: Teams | None) -> tuple[np.ndarray, np.ndarray]:
    """Rewards (steps, num_envs) or (steps, num_envs, num_agents), and whether the episode ended (steps, num_envs).

    From the same shapes, or those without the axis of steps. With several agents an episode ends where all are done.
    ValueError where the shapes of `reward` and `done` differ, or do not have this number of agents.
    """
    reward, done = np.asarray(reward), np.asarray(done, bool)
    dims = 2 if teams is None else 3
    reward, done = (x[None] if x.ndim == dims - 1 else x for x in (reward, done))
    agents = None if teams is None else 1 + max(place for members in teams.values() for place in members)
    if reward.shape != done.shape or reward.ndim != dims or agents not in (None, reward.shape[-1]):
        shape = "(steps, num_envs)" if agents is None else f"(steps, num_envs, {agents})"
        raise ValueError(f"reward and done must be {shape}, the first axis may miss; not {reward.shape}, {done.shape}")
    return reward, done if teams is None else done.all(-1)


def ended(
    returns: np.ndarray, lengths: np.ndarray, reward: np.ndarray, done: np.ndarray
) -> Iterator[tuple[int, np.ndarray, int]]:
    """The step, return (float, or (num_agents,)) and length of every episode that ends in a rollout.

    `reward` and `done` are those of `rollout`. `returns` (num_envs,) or (num_envs, num_agents) and `lengths`
    (num_envs,) of the running episodes are brought up to date in place, once all episodes have been taken.
    """
    begin = 0
    for t in np.flatnonzero(done.any(axis=1)).tolist():
        returns += reward[begin : t + 1].sum(0, dtype=np.float64)
        lengths += t + 1 - begin
        begin = t + 1
        for i in np.flatnonzero(done[t]):
            yield t, returns[i].copy(), int(lengths[i])
            returns[i], lengths[i] = 0.0, 0
    returns += reward[begin:].sum(0, dtype=np.float64)
    lengths += len(reward) - begin


def number(value: Any) -> float | None:
    """A scalar, also one in an array without axes, as a float; None of anything else."""
    array = np.asarray(value) if np.isscalar(value) or hasattr(value, "shape") else np.array(None)
    return None if array.shape or array.dtype.kind not in "biuf" else float(array)


def declared(info: Mapping[str, Any]) -> dict[str, float]:
    """Those of DECLARED that are finite numbers in the info of a step."""
    found = {name: number(info[name]) for name in DECLARED if name in info}
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def declared_in(infos: Mapping[str, Any], place: int, done: bool) -> dict[str, float]:
    """The same of the infos of a vector environment, of the environment at `place`, whose episode may be `done`."""
    infos = infos.get("final_info", infos) if done else infos
    given = [name for name in DECLARED if name in infos and (f"_{name}" not in infos or infos[f"_{name}"][place])]
    return declared({name: infos[name][place] for name in given})


def note(episode: dict[str, float], numbers: Mapping[str, float]) -> None:
    """Add to an episode, metric -> number so far, what one more step declares."""
    success = numbers.get("is_success", numbers.get("success"))
    if success is not None or "success_rate" in episode:
        episode["success_rate"] = success or 0.0
    if "cost" in numbers:
        episode["episodic_cost"] = episode.get("episodic_cost", 0.0) + numbers["cost"]


def means(episodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric that any episode has; one that does not have it counts 0."""
    names = sorted({name for episode in episodes for name in episode})
    return {name: sum(episode.get(name, 0.0) for episode in episodes) / len(episodes) for name in names}
