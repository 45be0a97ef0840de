"""Environments of EnvPool, stepped inside compiled JAX code through its XLA interface.

    envs = EnvPoolEnvs("LunarLander-v3", num_envs=8)  # used like the classes of solorl.envs.classic

EnvPool itself resets an environment one step late: it ignores one action and emits a dummy transition with reward 0.
Here an environment is reset in the step that ends its episode, as in `solorl.envs.classic`: `final_obs` is the last
observation of the episode, `obs` the first one of the next. Python is called for that, and in no other step. If the
task ends in the very last step that the time limit allows, EnvPool calls that a time limit; so its limit is one step
more than ours, and ours is applied here.

EnvPool cannot hand out the state of its environments (`saved` is False): a resumed run starts new episodes.
"""

import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from solorl.envs.classic import DYNAMICS
from solorl.envs.interface import Step
from solorl.errors import did_you_mean, quit_with


class EnvPoolEnvs:
    """`num_envs` environments of one kind side by side, for each call of `reset` (one per seed). On the CPU only.

    Actions beyond the bounds of the action space are clipped, as `gymnasium.wrappers.ClipAction` does. One sentence and
    exit code 2 where EnvPool is not installed or does not know the environment, or the device is not the CPU.
    """

    saved = False  # a checkpoint cannot hold the environments

    def __init__(self, env_id: str, num_envs: int, num_threads: int = 1):
        self.envpool = _import_envpool(env_id)
        known = [name for name in self.envpool.list_all_envs() if name in gym.registry]
        if env_id not in known:
            hint = did_you_mean(env_id, [*DYNAMICS, *known]) or f"; in JAX there are {', '.join(DYNAMICS)}"
            quit_with(f"{env_id} is neither written in JAX nor known to both EnvPool and Gymnasium{hint}")
        if any(device.platform != "cpu" for device in jnp.zeros(()).devices()):
            quit_with(f"{env_id} runs in EnvPool, on the CPU; --device cpu trains there")
        env = gym.make(env_id)
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        env.close()
        self.max_steps = gym.spec(env_id).max_episode_steps or 2**31 - 2
        self._obs = jax.ShapeDtypeStruct((num_envs, *(env.observation_space.shape or ())), jnp.float32)
        self.env_id, self.num_envs, self.num_threads = env_id, num_envs, num_threads
        self.pools: list[Any] = []  # one for each seed
        # the compiled code holds addresses of this process: of no use to another one
        jax.config.update("jax_enable_compilation_cache", False)

    def reset(self, key: Any) -> tuple[Any, Any]:
        """Open environments whose random numbers depend on the key: state, obs (num_envs, *obs_shape)."""
        number, obs = io_callback(self._open, (jax.ShapeDtypeStruct((), jnp.int32), self._obs), key)
        return (number, jnp.zeros(8, jnp.uint8)), obs

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, Step]:
        """One step everywhere: state, Step. EnvPool has random numbers of its own, `key` is not used."""
        number, handle = state
        steps = [partial(self._step, pool) for pool in self.pools]
        handle, obs, reward, terminated, truncated = jax.lax.switch(number, steps, handle, action)
        done = terminated | truncated
        # the handle passes through each call, so that none overtakes another
        shapes = self._obs, jax.ShapeDtypeStruct(handle.shape, handle.dtype)
        begin = lambda: io_callback(self._begin, shapes, number, done, obs, handle)  # noqa: E731
        first_obs, handle = jax.lax.cond(done.any(), begin, lambda: (obs, handle))
        return (number, handle), Step(first_obs, reward, terminated, truncated, obs)

    def _open(self, key: Any) -> tuple[Any, Any]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*precision lowered")
            pool = self.envpool.make_gymnasium(
                self.env_id,
                num_envs=self.num_envs,
                num_threads=min(self.num_envs, self.num_threads),
                seed=int(np.asarray(key).ravel()[-1]) >> 1,  # of 31 bits
                max_episode_steps=self.max_steps + 1,
            )
            dtype = pool.spec.action_array_spec["action"].dtype
        with jax.enable_x64(True):  # MuJoCo's arrays are of double precision
            self.pools.append((pool, pool.xla()[3], dtype))
        return np.int32(len(self.pools) - 1), np.asarray(pool.reset()[0], np.float32)

    def _step(self, opened: Any, handle: Any, action: Any) -> tuple[Any, ...]:
        _, step, dtype = opened
        if isinstance(self.single_action_space, gym.spaces.Box):
            action = action.clip(self.single_action_space.low, self.single_action_space.high)
        with jax.enable_x64(True):
            handle, (obs, reward, terminated, _, info) = step(handle, action.astype(dtype))
            truncated = (info["elapsed_step"] >= self.max_steps) & ~terminated
            return handle, obs.astype(jnp.float32), reward.astype(jnp.float32), terminated, truncated

    def _begin(self, number: Any, done: Any, obs: Any, handle: Any) -> tuple[Any, Any]:
        """First observations where episodes have ended, `obs` elsewhere."""
        obs = np.array(obs)
        rows, info = self.pools[int(number)][0].reset(np.flatnonzero(done))
        obs[info["env_id"]] = rows
        return obs, np.asarray(handle)


def _import_envpool(env_id: str) -> Any:
    try:
        import envpool
    except ImportError:
        quit_with(
            f"{env_id} is none of the environments written in JAX ({', '.join(DYNAMICS)}); EnvPool, which has others, "
            "is not installed: pip install 'solorl[envpool]' (Linux)"
        )
    return envpool
