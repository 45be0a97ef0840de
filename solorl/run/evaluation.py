"""Playing the greedy policy: on environments and seeds of its own, without moving the training."""

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from solorl.files import write_atomically
from solorl.run.checkpoint import random_states, set_random_states
from solorl.run.returns import of_game, teams_of

# A NumPy batch of observations (n, *obs_shape) -> a NumPy batch of actions (n, ...). A policy with memory is a function
# `act(obs, state, first) -> actions, state`: `state` is None before the first step, `first` (n,) says where an episode
# begins with this observation. With several agents observations are (n, num_agents, *obs_shape) and actions
# (n, num_agents, ...); a policy with a parameter `action_mask` gets (n, num_agents, num_actions), or None where the
# games give none.
Policy = Callable[..., Any]
DRAWN = ("global_step", "charts/episodic_return", "eval/episodic_return", "eval/episodic_return_std")
MAX_STEPS = 100_000  # an episode without a time limit is cut here


@contextmanager
def undisturbed():
    """Whatever runs inside leaves the global random states as they were."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


def stepwise(policy: Policy, num_envs: int) -> Callable[[Any, Sequence[dict[str, Any]]], np.ndarray]:
    """The policy as a function of the observations and the infos that came with them, for `num_envs` episodes that all
    begin with the first call; what a policy with memory remembers is kept here."""
    known = inspect.signature(policy).parameters
    state, first = None, np.ones(num_envs, bool)

    def act(obs: Any, infos: Sequence[dict[str, Any]]) -> np.ndarray:
        nonlocal state, first
        given: dict[str, Any] = {}
        if "action_mask" in known:
            masks = [info["action_mask"] for info in infos if "action_mask" in info]
            given["action_mask"] = np.stack(masks) if masks else None
        if "state" not in known:
            return np.asarray(policy(obs, **given))
        action, state = policy(obs, state, first, **given)
        first = np.zeros(num_envs, bool)
        return np.asarray(action)

    return act


def play_episodes(envs: Sequence[gym.Env], policy: Policy, seeds: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """One episode in each environment, side by side: returns (n,) of raw rewards and lengths (n,) in agent steps.

    Every environment plays exactly one episode, so that short episodes do not count twice. With several agents the
    returns are those of the first team.
    """
    returns, lengths = play_games(envs, policy, seeds)
    return of_game(returns, teams_of(envs[0])), lengths


def play_games(envs: Sequence[gym.Env], policy: Policy, seeds: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """`play_episodes` with the returns (n, num_agents) of all agents, where there are several."""
    space, teams = envs[0].observation_space, teams_of(envs[0])
    begun = [env.reset(seed=seed) for env, seed in zip(envs, seeds, strict=True)]
    obs, infos = [each for each, _ in begun], [info for _, info in begun]
    returns = np.zeros(len(envs) if teams is None else (len(envs), sum(map(len, teams.values()))))
    lengths = np.zeros(len(envs), int)
    running, act = set(range(len(envs))), stepwise(policy, len(envs))
    batch: Any = gym.vector.utils.create_empty_array(space, len(envs))
    while running:
        batch = gym.vector.utils.concatenate(space, obs, batch)
        actions = act(batch, infos)
        for i in sorted(running):
            obs[i], reward, terminated, truncated, infos[i] = envs[i].step(actions[i])
            returns[i] += float(reward) if teams is None else reward
            lengths[i] += 1
            if terminated or truncated or lengths[i] == MAX_STEPS:
                running.discard(i)
    return returns, lengths


def film(env: gym.Env, policy: Policy, seed: int, path: Path) -> float:
    """Play one episode in an environment made with `render_mode="rgb_array"` and write it as H.264 to `path`.

    Returns the episode's return, with several agents that of the first team. The file appears whole or not at all.
    """
    import imageio.v2 as imageio

    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # without a display SDL complains on every start
    video: Any
    temporary = path.with_name(f".{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    total, over, steps, act = 0.0, False, 0, stepwise(policy, 1)
    obs, info = env.reset(seed=seed)
    fps = env.metadata.get("render_fps") or 30
    with imageio.get_writer(temporary, format="FFMPEG", fps=fps, macro_block_size=2) as video:
        video.append_data(env.render())
        while not over and steps < MAX_STEPS:
            obs, reward, terminated, truncated, info = env.step(act(np.asarray(obs)[None], [info])[0])
            video.append_data(env.render())
            total += float(of_game(np.asarray(reward), teams_of(env)))
            over, steps = terminated or truncated, steps + 1
    temporary.replace(path)
    return total


def watch(env: gym.Env, policy: Policy, seeds: Sequence[int]) -> list[float]:
    """Play one episode per seed in an environment made with `render_mode="human"`; returns their returns."""
    return [float(play_episodes([env], policy, [seed])[0][0]) for seed in seeds]


def draw_learning_curve(metrics: Path, picture: Path, title: str) -> None:
    """Draw training returns (grey, and their running mean) and evaluations (mean and standard deviation) from
    `metrics.jsonl` into a PNG; lines that cannot be read are left out."""
    from io import BytesIO

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = []
    for line in metrics.read_text(errors="replace").splitlines() if metrics.exists() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError, OverflowError):
            row = json.loads(line)
            rows.append({name: float(row[name]) for name in DRAWN if name in row or name == "global_step"})
    train = [(row["global_step"], row["charts/episodic_return"]) for row in rows if "charts/episodic_return" in row]
    test = [
        (row["global_step"], row["eval/episodic_return"], row.get("eval/episodic_return_std", 0.0))
        for row in rows
        if "eval/episodic_return" in row
    ]
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    if train:
        step, value = np.array(train, float).T
        window = max(1, min(100, len(value) // 10))
        mean = np.convolve(value, np.ones(window) / window, "valid")
        axes.plot(step, value, ".", color="#b8b8b8", markersize=2, label="training episodes")
        axes.plot(step[window - 1 :], mean, color="#7a7a7a", label=f"mean of {window} episodes")
    if test:
        step, value, spread = np.array(test, float).T
        axes.fill_between(step, value - spread, value + spread, color="#1f6feb", alpha=0.15, linewidth=0)
        axes.plot(step, value, "o-", color="#1f6feb", markersize=3, label="greedy evaluation")
    axes.set(title=title, xlabel="environment steps", ylabel="episodic return")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k" if x else "0")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if train or test:
        axes.legend(frameon=False)
    data = BytesIO()
    FigureCanvasAgg(figure).print_png(data)
    write_atomically(picture, data.getvalue())
