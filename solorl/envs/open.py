"""Opening environments by their id."""

from functools import cache
from typing import Any

import gymnasium as gym
import jax
import numpy as np

from solorl.envs import openers
from solorl.envs.classic import DYNAMICS, JaxEnvs
from solorl.envs.ids import is_envpool_game
from solorl.envs.interface import advancing
from solorl.errors import refuse


def open_envs(env_id: str, num_envs: int, num_threads: int = 1) -> Any:
    """`num_envs` environments to be stepped inside a compiled loop: JaxEnvs, JaxTeams, GymnaxEnvs or MjxEnvs if there
    are any of this kind, else EnvPoolGames or EnvPoolEnvs, stepped by `num_threads`; one sentence and exit code 2 where
    there are none."""
    if env_id in DYNAMICS:
        return JaxEnvs(env_id, num_envs)
    if compiled := openers(env_id).compiled:
        return compiled(env_id, num_envs)
    # EnvPool has neither ours nor those of a user's module
    refuse(":" in env_id or env_id.startswith("games/"), f"{env_id} is not written in JAX; the files in torch take it")
    from solorl.envs.envpool_jax import EnvPoolEnvs, EnvPoolGames

    return (EnvPoolGames if is_envpool_game(env_id) else EnvPoolEnvs)(env_id, num_envs, num_threads)


class FunctionalEnv(gym.Env[np.ndarray, Any]):
    """One environment that exists in JAX only (see `ids.FAMILIES`) with Gymnasium's interface, compiled step by
    step, for evaluation and for the files in torch. The `seed` of `reset` decides all that is random."""

    def __init__(self, env_id: str):
        self.envs, self._begin, self._advance = compiled(env_id)
        self.observation_space, self.action_space = self.envs.single_observation_space, self.envs.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        self._key, key = jax.random.split(jax.random.PRNGKey(int(self.np_random.integers(2**31))))
        self._state, obs = self._begin(key)
        return np.asarray(obs)[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        self._key, self._state, step = self._advance(self._key, self._state, np.asarray(action)[None])
        step = jax.device_get(step)  # at once: an access to an array of JAX is an operation of its own
        reward, terminated, truncated = (x[0].item() for x in (step.reward, step.terminated, step.truncated))
        return step.final_obs[0], reward, terminated, truncated, {}


@cache  # compiled once for all environments of an evaluation
def compiled(env_id: str, num_envs: int = 1) -> Any:
    """Environments of `open_envs`, and two compiled functions: `begin(key)` -> state, obs, and
    `advance(key, state, action)` -> key, state, Step, which splits the key itself."""
    envs = open_envs(env_id, num_envs)
    return envs, jax.jit(envs.reset), jax.jit(advancing(envs))
