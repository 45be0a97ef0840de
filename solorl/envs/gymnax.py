"""MinAtar's games as gymnax has them: pure JAX for training, and the same as Gymnasium environments for evaluation.

    envs = GymnaxEnvs("Breakout-MinAtar", num_envs=64)  # used like the classes of solorl.envs.classic
    env = gymnasium.make("Breakout-MinAtar")  # registered when this module is imported

Observations (10, 10, channels) become vectors of numbers. Unlike the original, gymnax's games have no sticky actions
and cut episodes off at 1,000 steps. Freeway's 2,500 steps, a termination there, are a truncation here.
"""

from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from solorl.envs import register
from solorl.envs.interface import Step
from solorl.errors import needs_extra, quit_with

GAMES = tuple(f"{name}-MinAtar" for name in ("Asterix", "Breakout", "Freeway", "SpaceInvaders"))


class GymnaxEnvs:
    """`num_envs` games of one kind side by side. `env_id` is one of `GAMES`."""

    def __init__(self, env_id: str, num_envs: int):
        try:
            import gymnax
        except ImportError:
            quit_with(needs_extra(env_id, "gymnax"))
        (self.game, self.params), self.num_envs = gymnax.make(env_id), num_envs
        size = int(np.prod(self.game.observation_space(self.params).shape))
        self.single_observation_space = gym.spaces.Box(0.0, 1.0, (size,), np.float32)
        self.single_action_space = gym.spaces.Discrete(self.game.num_actions)

    def reset(self, key: Any) -> tuple[Any, Any]:
        """New episodes everywhere: state, obs (num_envs, obs_dim)."""
        obs, state = jax.vmap(self.game.reset, (0, None))(jax.random.split(key, self.num_envs), self.params)
        return state, self._vector(obs)

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, Step]:
        """One step everywhere: state, Step. The games are random; `key` decides."""
        keys, step = jax.random.split(key, self.num_envs), jax.vmap(self.game.step, (0, 0, 0, None))
        obs, state, reward, terminated, truncated, info = step(keys, state, action, self.params)
        final_obs = self._vector(info["final_observation"])
        return state, Step(self._vector(obs), reward, terminated, truncated & ~terminated, final_obs)

    def _vector(self, obs: Any) -> Any:
        return obs.reshape(self.num_envs, -1).astype(jnp.float32)


register("*-MinAtar", compiled=GymnaxEnvs)
for _game in GAMES:
    gym.register(_game, "solorl.envs.open:FunctionalEnv", kwargs={"env_id": _game}, disable_env_checker=True)
