"""Games `team/NAME` in one compiled call a step, with the interface of `PettingZooEnvs`: NumPy in and out."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import gymnasium as gym
import jax
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from solorl.envs.interface import advancing, key_of, restored
from solorl.envs.vector import with_next_obs
from solorl.errors import quit_with
from solorl.games.teams import function_of
from solorl.games.teams.game import JaxTeams


@cache  # compiled once for all that step as many games
def compiled(env_id: str, num_envs: int, **kwargs: Any) -> Any:
    """The games, and two compiled functions: `begin(key)` -> key, state, obs, central state, action mask, and
    `advance(key, state, action)` -> key, state, TeamStep, which split the key themselves."""
    envs = JaxTeams(env_id, num_envs, **kwargs)

    def begin(key: Any) -> Any:
        key, reset_key = jax.random.split(key)
        state, obs = envs.reset(reset_key)
        return key, state, obs, envs.central(state), envs.action_mask(state)

    return envs, jax.jit(begin), jax.jit(advancing(envs))


def _array(x: Any) -> Any:
    return None if x is None else np.array(x)


class TeamEnvs(gym.vector.VectorEnv):
    """`num_envs` games with the interface of `PettingZooEnvs`, which see; no agent leaves before the end of the game.

    `state_dict` holds everything: a resumed run continues exactly. `kwargs` are those of `JaxTeams`.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 as in Gymnasium

    def __init__(self, env_id: str, num_envs: int, teams: Any = None, **kwargs: Any):
        self.num_envs = num_envs
        envs, self._begin, self._advance = compiled(env_id, num_envs, **kwargs)
        self.game, self.agents, self.num_agents, self.teams = envs.game, envs.agents, envs.num_agents, envs.teams
        if teams is not None:
            self.teams = JaxTeams(env_id, num_envs, teams, **kwargs).teams
        self.agent_observation_space, self.agent_action_space = envs.agent_observation_space, envs.agent_action_space
        self.agent_obs_dims, self.agent_action_dims = envs.agent_obs_dims, envs.agent_action_dims
        self.single_observation_space = envs.single_observation_space
        self.single_action_space = copy.deepcopy(envs.single_action_space)  # with a generator of its own
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._key: Any = None  # until the first reset

    def reset(self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None) -> Any:
        """New games everywhere. `seed`, a number or one for each game, decides all that is random."""
        if seed is not None or self._key is None:
            self._key = key_of(seed)
        self._key, self._games, *now = self._begin(self._key)
        self._now(*now)
        return self.obs.copy(), self._infos()

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One step of every game; see `PettingZooEnvs`."""
        self._key, self._games, step = self._advance(self._key, self._games, self._checked(actions))
        self._now(step.obs, step.central, step.action_mask)
        ends = [np.repeat(np.asarray(x)[:, None], self.num_agents, 1) for x in (step.terminated, step.truncated)]
        infos, done = self._infos(), ends[0][:, 0] | ends[1][:, 0]
        if done.any():
            final = {"alive": np.zeros_like(self.alive), "state": _array(step.final_central)}
            if step.final_action_mask is not None:
                final["action_mask"] = _array(step.final_action_mask)
            infos |= {"final_obs": _array(step.final_obs), "_final_obs": done, "final_info": final, "_final_info": done}
        obs = self.obs.copy()
        return obs, np.array(step.reward, np.float64), *ends, with_next_obs(obs, infos, ("state", "action_mask"))

    def _checked(self, actions: Any) -> np.ndarray:
        """The actions; ValueError where they are of another shape, or one is of another agent only."""
        actions = np.asarray(actions)
        if actions.shape != self.action_space.shape:
            raise ValueError(f"actions are {self.action_space.shape}, not {actions.shape}")
        if not self.game.continuous and ((actions < 0) | (actions >= self.agent_action_dims)).any():
            what = f"agents have {self.agent_action_dims} actions"
            raise ValueError(f"{what}: one was chosen that its agent does not have")
        return actions

    def _now(self, obs: Any, central: Any, mask: Any) -> None:
        self.obs, self.state, self.action_mask = map(_array, (obs, central, mask))
        self.alive = np.ones((self.num_envs, self.num_agents), bool)

    def _infos(self) -> dict[str, Any]:
        found = {"alive": self.alive, "state": self.state}
        return found if self.action_mask is None else found | {"action_mask": self.action_mask}

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on, with the generators of the action spaces."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self._games)]
        spaces = [space.np_random.bit_generator.state for space in (self.action_space, self.single_action_space)]
        now = {"obs": self.obs, "state": self.state, "action_mask": self.action_mask}
        return {"key": np.asarray(self._key), "leaves": leaves, "spaces": spaces, **now}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from such a state. ValueError where it is of other games."""
        told = [saved[name] for name in ("obs", "state", "action_mask") if saved[name] is not None]
        like = jax.eval_shape(self._begin, jax.random.PRNGKey(0))
        games = restored(like, [saved["key"], *saved["leaves"], *told], f"{self.num_envs} games")
        for space, state in zip((self.action_space, self.single_action_space), saved["spaces"], strict=True):
            space.np_random.bit_generator.state = state
        self._key, self._games = games[:2]
        self._now(saved["obs"], saved["state"], saved["action_mask"])


def open_games(make_env: Callable[..., Any], env_id: str, num_envs: int) -> Any:
    """`num_envs` games `make_env(env_id)` where that gives a game `team/NAME` without wrappers, else None."""
    game = make_env(env_id)
    game.close()
    if game.spec is None or not game.spec.id.startswith("team/") or game.spec.additional_wrappers:
        return None
    kwargs = {key: value for key, value in game.spec.kwargs.items() if key not in ("name", "pad")}
    known = inspect.signature(function_of(game.spec.kwargs["name"])).parameters
    if foreign := sorted(kwargs.keys() - {*known, "teams"}):
        quit_with(f"{env_id} does not take {', '.join(foreign)}; it takes {', '.join([*known, 'teams'])}")
    return TeamEnvs(game.spec.id, num_envs, **kwargs)
