"""`gym.make("team/NAME")`: mpe2's own game, or one of ours with PettingZoo's parallel API, as a `Game`."""

import re
from functools import cache
from typing import Any

import gymnasium as gym
import jax
import numpy as np

from solorl.envs import pettingzoo
from solorl.envs.interface import key_of
from solorl.games.teams import GAMES, team_game


@cache  # compiled once for all games of an evaluation
def compiled(game: Any) -> Any:
    """Two compiled functions: `begin(key)` -> state, told, and `advance(state, action)` -> state, told, reward,
    terminated. What is told are observations, central states and masks."""

    def told(state: Any) -> Any:
        return state, (game.observe(state), game.state_of(state), game.mask_of(state))

    def advance(state: Any, action: Any) -> Any:
        state, reward, terminated = game.step(state, action)
        return *told(state), reward, terminated

    return jax.jit(lambda key: told(game.start(key, 1))), jax.jit(advance)


class ParallelGame:
    """One `TeamGame` with PettingZoo's parallel API. The seed of `reset` decides all that is random."""

    render_mode = None

    def __init__(self, game: Any):
        self.game, self.metadata, self.unwrapped = game, {"name": game.name, "render_modes": []}, self
        self.possible_agents, self.agents = list(game.agents), []  # type: ignore[var-annotated]

    def observation_space(self, agent: str) -> gym.Space:
        """The space of one agent, without what fills it up."""
        return gym.spaces.Box(-np.inf, np.inf, (self.game.obs_dims[self.game.agents.index(agent)],), np.float32)

    def action_space(self, agent: str) -> gym.Space:
        """The space of one agent."""
        size = self.game.action_dims[self.game.agents.index(agent)]
        return gym.spaces.Box(0.0, 1.0, (size,), np.float32) if self.game.continuous else gym.spaces.Discrete(size)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """A new game: observations and infos of each agent."""
        self.inner, told = compiled(self.game)[0](key_of(seed))
        self.agents, self.steps = list(self.possible_agents), 0
        return self._observations(told)

    def step(self, actions: dict[str, Any]) -> Any:
        """One step: observations, rewards, terminated, truncated, infos of each agent."""
        action = [np.asarray(actions[name]) for name in self.possible_agents]
        if self.game.continuous:
            action = [np.pad(one, (0, max(self.game.action_dims) - len(one))) for one in action]
        self.inner, told, reward, terminated = compiled(self.game)[1](self.inner, np.stack(action)[None])
        self.steps += 1
        over = bool(terminated[0])
        cut = self.steps >= self.game.max_steps and not over
        self.agents = [] if over or cut else self.agents
        obs, infos = self._observations(told)
        everyone = self.possible_agents
        ends = dict.fromkeys(everyone, over), dict.fromkeys(everyone, cut)
        return obs, dict(zip(everyone, np.asarray(reward)[0].tolist(), strict=True)), *ends, infos

    def state(self) -> np.ndarray:
        """The central state."""
        return self.central

    def _observations(self, told: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        obs, central, mask = told
        obs, self.central, seen, infos = np.array(obs)[0], np.array(central)[0], {}, {}
        for k, name in enumerate(self.possible_agents):
            seen[name] = obs[k, : self.game.obs_dims[k]]
            infos[name] = {} if mask is None else {"action_mask": np.array(mask)[0, k, : self.game.action_dims[k]]}
        return seen, infos

    def close(self) -> None:
        """Nothing to close."""


def open_game(name: str, teams: Any = None, pad: bool = True, **kwargs: Any) -> pettingzoo.Game:
    """The game `team/NAME`, always padded; `kwargs` are those of its function in JAX, or of mpe2's `parallel_env`."""
    entry, own, known = GAMES[name]
    teams = known if teams is None else teams
    if entry.startswith("particles"):
        original = re.sub(r"_continuous(_v\d+)$", r"\1", name)
        return pettingzoo.open_game(f"mpe/{original}", teams, pad=True, **{**own, **kwargs})
    return pettingzoo.Game(ParallelGame(team_game(name, **kwargs)), teams, pad=True)
