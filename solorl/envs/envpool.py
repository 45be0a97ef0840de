"""Environments of EnvPool, stepped together in C++, with the interface of Gymnasium's vector environments.

    envs = EnvPoolVectorEnv("Pong-v5", num_envs=8, num_threads=2)
    obs, infos = envs.reset(seed=[...])
    obs, reward, terminated, truncated, infos = envs.step(action)

EnvPool itself resets an environment one step late: it ignores one action and emits a dummy transition with reward 0.
Here an environment is reset in the step that ends its episode (Gymnasium's SAME_STEP): `obs` is the first observation
of the next episode, `infos["final_obs"][i]` the last one of the episode that has ended. If the task ends in the very
last step that the time limit allows, EnvPool calls that a time limit; so its limit is one step more than ours, and ours
is applied here.

Atari games are whole games: rewards are not clipped, and a lost life ends nothing. `infos["lives"]` (num_envs,) tells
the lives of the game that `obs` is of, `infos["final_info"]["lives"]` those of the game that has ended. After a lost
life the next action is FIRE in the games that have that button, for such a game stands still until it is pressed.

A game of Procgen ends by itself after as many steps as it is allowed, and calls that an end of the task. So there our
limit is one step less: what ends then is known to be ended by time.

Where EnvPool tells what is allowed, `action_mask` and `infos["action_mask"]` (num_envs, num_actions) are the masks of
the current observations, `infos["final_info"]["action_mask"]` those of the final ones. Observations of a `Dict` space
become one vector of all other parts (see `flat`).

EnvPool cannot hand out the state of its environments: a resumed run starts new episodes.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from solorl.envs.ids import check_envpool_id
from solorl.envs.returns import DECLARED
from solorl.envs.vector import with_next_obs

ATARI_STEPS = 27_000  # of an agent, the usual limit: 108,000 frames
MASKS = ("action_mask", "legal_action_mask")  # EnvPool's names for what is allowed
FIRE = 1  # the number of this button in all games that have it


class EnvPoolVectorEnv(gym.vector.VectorEnv):
    """`num_envs` environments of one kind. `options` are EnvPool's, as `stack_num` or `repeat_action_probability`, and
    `render_mode`: "rgb_array" lets `render` give pictures (num_envs, height, width, 3).

    They are stepped by `num_threads`, by default as many as torch uses. The seeds of `reset` decide all that is random;
    the environments are opened there. UsageError where EnvPool is not installed or does not know the id.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 as in Gymnasium

    def __init__(
        self, env_id: str, num_envs: int, num_threads: int | None = None, max_steps: int | None = None, **options: Any
    ):
        self.envpool = check_envpool_id(env_id)
        self.render_mode = options.get("render_mode")
        spec = self.envpool.make_spec(env_id, **{name: x for name, x in options.items() if name != "render_mode"})
        self.is_atari = hasattr(spec.config, "use_fire_reset")
        longest = spec.config.max_episode_steps - 1 if hasattr(spec.config, "distribution_mode") else 2**31 - 2
        self.max_steps = min(longest, max_steps or (ATARI_STEPS if self.is_atari else spec.config.max_episode_steps))
        self.env_id, self.num_envs, self.options = env_id, num_envs, options
        torch = sys.modules.get("torch")
        self.num_threads = min(num_envs, num_threads or (torch.get_num_threads() if torch else 1))
        self.space, self.single_action_space = spec.observation_space, spec.action_space  # the first: EnvPool's own
        self.single_observation_space = flat_space(self.space)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.fire = self.is_atari and has_fire(spec.config.task, self.action_space)
        self.pool: Any = None  # EnvPool's own, from the first reset on
        self.action_mask: np.ndarray | None = None

    def reset(self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin new episodes everywhere; with `seed`, a number or one for each environment, as if newly made."""
        if seed is None and self.pool is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0])
        if seed is not None:
            seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
            self.pool = self.envpool.make_gymnasium(
                self.env_id,
                num_envs=self.num_envs,
                num_threads=self.num_threads,
                env_seed=[int(np.random.SeedSequence(one).generate_state(1)[0]) >> 1 for one in seeds],  # of 31 bits
                max_episode_steps=self.max_steps + 1,
                **self.options,
            )
        obs, info = self._seen(*self.pool.reset())
        self._steps = np.zeros(self.num_envs, np.int64)
        self._life_lost = np.zeros(self.num_envs, bool)
        self._lives = np.array(info["lives"]) if self.is_atari else np.zeros(self.num_envs, np.int32)
        self.action_mask = mask_in(info)
        return obs, ({"lives": self._lives} if self.is_atari else {}) | self._mask()

    def step(self, actions: Any) -> Any:
        """One step everywhere: obs, reward (num_envs,), terminated, truncated, infos."""
        if self.fire and self._life_lost.any():
            actions = np.where(self._life_lost, FIRE, actions)
        obs, reward, terminated, _, info = self.pool.step(np.asarray(actions))
        obs, info = self._seen(obs, info)
        self._steps += 1
        self.action_mask = mask_in(info)
        truncated = (self._steps >= self.max_steps) & ~terminated
        done = terminated | truncated
        infos: dict[str, Any] = {name: info[name] for name in DECLARED if name in info}
        if self.is_atari:
            lives = np.array(info["lives"])
            self._life_lost, self._lives = (lives < self._lives) & ~done, lives
            infos["lives"] = lives
        if done.any():
            ended = np.flatnonzero(done)
            infos["final_obs"], infos["_final_obs"] = np.full(self.num_envs, None, object), done
            for i in ended:
                infos["final_obs"][i] = obs[i].copy()
            infos["final_info"] = self._mask() | {name: infos[name] for name in DECLARED if name in infos}
            first_obs, first_info = self._seen(*self.pool.reset(ended))
            obs = np.array(obs)
            obs[first_info["env_id"]] = first_obs
            self._steps[ended] = 0
            if self.is_atari:
                infos["final_info"], infos["_final_info"] = {"lives": lives.copy(), "_lives": done}, done
                self._lives[first_info["env_id"]] = first_info["lives"]
            if self.action_mask is not None:
                self.action_mask = self.action_mask.copy()
                self.action_mask[first_info["env_id"]] = mask_in(first_info)
        return obs, reward, terminated, truncated, with_next_obs(obs, infos) | self._mask()

    def _seen(self, obs: Any, info: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
        """Observations as arrays, and the infos, with the mask where it is a part of the observations."""
        if not isinstance(obs, dict):
            return obs, info
        return flat(self.space, obs), info | {name: obs[name] for name in MASKS if name in obs}

    def _mask(self) -> dict[str, Any]:
        return {} if self.action_mask is None else {"action_mask": self.action_mask}

    def render(self) -> Any:
        """The pictures of all environments, (num_envs, height, width, 3)."""
        return self.pool.render()

    def close_extras(self, **kwargs: Any) -> None:
        """Let the environments go."""
        self.pool = None


def mask_in(info: Mapping[str, Any]) -> np.ndarray | None:
    """What is allowed, (n, num_actions), as an array of its own; None where EnvPool does not say."""
    return next((np.array(info[name], bool) for name in MASKS if name in info), None)


def flat(space: gym.Space, obs: Any) -> np.ndarray:
    """Observations (n, ...) as vectors (n, size): of a `Dict` all parts but the mask, one after the other, those of a
    `Discrete` space as a fraction of the number of its values."""
    if isinstance(space, gym.spaces.Dict):
        return np.concatenate([flat(part, obs[name]) for name, part in space.items() if name not in MASKS], axis=1)
    numbers = np.asarray(obs, np.float32)
    return numbers.reshape(len(numbers), -1) / np.float32(space.n if isinstance(space, gym.spaces.Discrete) else 1)


def flat_space(space: gym.Space) -> gym.Space:
    """The space of what `flat` makes of a `Dict` space; any other as it is."""
    if not isinstance(space, gym.spaces.Dict):
        return space
    one = gym.vector.utils.create_empty_array(space, 1)
    return gym.spaces.Box(-np.inf, np.inf, flat(space, one).shape[1:], np.float32)


def has_fire(game: str, actions: Any) -> bool:
    """Whether the game has a button FIRE that starts it: action 1 of three or more (as in the usual FireReset)."""
    import ale_py
    from ale_py import roms

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.loadROM(roms.get_rom_path(game))  # type: ignore[arg-type]
    buttons = ale.getMinimalActionSet() if actions.nvec[0] < 18 else ale.getLegalActionSet()
    return len(buttons) >= 3 and buttons[1] == ale_py.Action.FIRE
