"""`gym.make("team/NAME")`: mpe2's own game, or one of ours with PettingZoo's parallel API, as a `Game`."""

import re
from functools import cached_property
from typing import Any

import gymnasium as gym
import jax
import numpy as np

from solorl.envs import pettingzoo
from solorl.envs.teams import GAMES, team_game


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

    @cached_property
    def _told(self) -> Any:
        return jax.jit(lambda state: (self.game.observe(state), self.game.state_of(state), self.game.mask_of(state)))

    @cached_property
    def _step(self) -> Any:
        return jax.jit(self.game.step)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """A new game: observations and infos of each agent."""
        self.inner = self.game.start(jax.random.PRNGKey(np.random.SeedSequence(seed).generate_state(1)[0]), 1)
        self.agents, self.steps = list(self.possible_agents), 0
        return self._observations()

    def step(self, actions: dict[str, Any]) -> Any:
        """One step: observations, rewards, terminated, truncated, infos of each agent."""
        sizes, continuous = self.game.action_dims, self.game.continuous
        action = np.zeros(
            (1, len(sizes), max(sizes)) if continuous else (1, len(sizes)), np.float32 if continuous else int
        )
        for k, name in enumerate(self.possible_agents):
            action[(0, k, slice(sizes[k])) if continuous else (0, k)] = actions[name]
        self.inner, reward, terminated = self._step(self.inner, action)
        self.steps += 1
        over = bool(terminated[0])
        cut = self.steps >= self.game.max_steps and not over
        self.agents = [] if over or cut else self.agents
        obs, infos = self._observations()
        everyone = self.possible_agents
        ends = dict.fromkeys(everyone, over), dict.fromkeys(everyone, cut)
        return obs, dict(zip(everyone, np.asarray(reward)[0].tolist(), strict=True)), *ends, infos

    def state(self) -> np.ndarray:
        """The central state."""
        return self.central

    def _observations(self) -> tuple[dict[str, Any], dict[str, Any]]:
        obs, central, mask = (None if x is None else np.array(x)[0] for x in self._told(self.inner))
        self.central, sizes = central, (self.game.obs_dims, self.game.action_dims)
        infos = [{} if mask is None else {"action_mask": mask[k, : sizes[1][k]]} for k in range(len(obs))]
        seen = {name: obs[k, : sizes[0][k]] for k, name in enumerate(self.possible_agents)}
        return seen, dict(zip(self.possible_agents, infos, strict=True))

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
