"""Level-based foraging (`lbf/Foraging-8x8-2p-3f-v3`): environments with `Tuple` spaces and lists of rewards, as
a `Game`. Importing this module registers them.

The package reports its time limit as the end of the task. Here it is truncated. It tells which actions are valid, which
becomes the mask. Papoudakis et al. (2021), https://arxiv.org/abs/2006.07869
"""

from typing import Any

import gymnasium as gym
import lbforaging  # noqa: F401  registers its ids
import numpy as np
from gymnasium.envs.registration import EnvSpec

from solorl.envs.pettingzoo import Game


class TupleGame:
    """An environment with `Tuple` spaces, with PettingZoo's parallel API."""

    def __init__(self, env: Any):
        self.env, self.unwrapped, self.metadata = env, self, {**env.metadata, "name": env.spec.id}
        self.render_mode = env.render_mode
        self.possible_agents = [f"agent_{k}" for k in range(len(env.action_space))]
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> gym.Space:
        """The space of one agent."""
        return self.env.observation_space[self.possible_agents.index(agent)]

    def action_space(self, agent: str) -> gym.Space:
        """The space of one agent."""
        return self.env.action_space[self.possible_agents.index(agent)]

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """A new game: observations and infos of each agent."""
        obs, _ = self.env.reset(seed=seed, options=options)
        self.agents = list(self.possible_agents)
        return self._each(obs), self._infos()

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """One step: observations, rewards, terminated, truncated, infos of each agent."""
        obs, rewards, over, _, _ = self.env.step([int(actions[name]) for name in self.possible_agents])
        won = over and not self.env.field.any()  # no food is left
        self.agents = [] if over else self.agents
        ends = (dict.fromkeys(self.possible_agents, end) for end in (won, over and not won))
        return self._each(obs), self._each(map(float, rewards)), *ends, self._infos()

    def _each(self, values: Any) -> dict[str, Any]:
        return dict(zip(self.possible_agents, values, strict=True))

    def _infos(self) -> dict[str, Any]:
        masks = np.zeros((len(self.possible_agents), self.env.action_space[0].n), bool)
        for k, player in enumerate(self.env.players):
            masks[k, [action.value for action in self.env._valid_actions[player]]] = True
        return self._each({"action_mask": mask} for mask in masks)

    def render(self) -> Any:
        """See `gymnasium.Env.render`."""
        return self.env.render(mode=self.render_mode)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def open_game(env_id: str, teams: Any = None, pad: bool = False, **kwargs: Any) -> Game:
    """The game `lbf/ID`; `kwargs` are those of the environment."""
    env = gym.make(env_id.partition("/")[2], disable_env_checker=True, **kwargs)
    return Game(TupleGame(env.unwrapped), teams, own_state=False, pad=pad)


for _id in [f"lbf/{name}" for name in gym.registry if name.startswith("Foraging-")]:
    # not by gym.register, which compares each of them with all others
    _entry = "solorl.envs.tuple_games:open_game"
    gym.registry[_id] = EnvSpec(_id, _entry, kwargs={"env_id": _id}, disable_env_checker=True)
