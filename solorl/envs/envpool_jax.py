"""Environments of EnvPool, stepped inside compiled JAX code through its XLA interface.

    envs = EnvPoolEnvs("LunarLander-v3", num_envs=8)  # used like the classes of solorl.envs.classic
    envs = EnvPoolGames("Pong-v5", num_envs=8)  # the same, for games of Atari: bytes, and `step.lives`

EnvPool itself resets an environment one step late: it ignores one action and emits a dummy transition with reward 0.
Here an environment is reset in the step that ends its episode, as in `solorl.envs.classic`: `final_obs` is the last
observation of the episode, `obs` the first one of the next. Python is called for that, and in no other step. If the
task ends in the very last step that the time limit allows, EnvPool calls that a time limit; so its limit is one step
more than ours, and ours is applied here.

Games of Atari are those of `EnvPoolVectorEnv`, step by step: whole games, rewards that are not clipped, FIRE after a
lost life, 27,000 steps at most.

EnvPool cannot hand out the state of its environments (`saved` is False): a resumed run starts new episodes.
"""

import warnings
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from solorl.envs.envpool import FIRE, EnvPoolVectorEnv
from solorl.envs.ids import check_envpool_id
from solorl.envs.interface import Step, where_ended
from solorl.errors import in_one_sentence, quit_with


class State(NamedTuple):
    """Where the environments of a seed stand; all but the first two (num_envs,)."""

    number: Any  # of the pool, ()
    handle: Any  # of EnvPool, which passes through each call, so that none overtakes another
    steps: Any  # of the running episodes
    lives: Any = None  # games of Atari only, as the next one
    life_lost: Any = None  # in the last step


class EnvPoolEnvs:
    """`num_envs` environments of one kind side by side, for each call of `reset` (one per seed). On the CPU only.

    Actions beyond the bounds of the action space are clipped, as `gymnasium.wrappers.ClipAction` does. One sentence and
    exit code 2 where EnvPool is not installed or does not know the environment, or the device is not the CPU.
    """

    saved = False  # a checkpoint cannot hold the environments
    fire = False
    _lives: Any = None  # shape and type

    def __init__(self, env_id: str, num_envs: int, num_threads: int = 1):
        with in_one_sentence():
            self.envpool = check_envpool_id(env_id)
        _require_cpu(env_id)
        env = gym.make(env_id)
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        env.close()
        self.max_steps = gym.spec(env_id).max_episode_steps or 2**31 - 2
        self._obs = jax.ShapeDtypeStruct((num_envs, *(env.observation_space.shape or ())), jnp.float32)
        self.env_id, self.num_envs, self.num_threads = env_id, num_envs, num_threads
        self.pools: list[Any] = []  # one for each seed: EnvPool's own, its step in compiled code, the type of actions

    def reset(self, key: Any) -> tuple[Any, Any]:
        """Open environments whose random numbers depend on the key: state, obs (num_envs, *obs_shape)."""
        number, obs, lives = io_callback(self._open, (jax.ShapeDtypeStruct((), jnp.int32), self._obs, self._lives), key)
        return self._begun(number, jnp.zeros(8, jnp.uint8), lives), obs

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, Step]:
        """One step everywhere: state, Step. EnvPool has random numbers of its own, `key` is not used."""
        if self.fire:  # a game stands still after a lost life until this button is pressed
            action = jnp.where(state.life_lost, FIRE, action)
        calls = [partial(self._step, step, dtype) for _, step, dtype in self.pools]
        handle, obs, reward, terminated, lives = jax.lax.switch(state.number, calls, state.handle, action)
        steps = state.steps + 1
        truncated = (steps >= self.max_steps) & ~terminated
        done = terminated | truncated
        life_lost = None if lives is None else (lives < state.lives) & ~done
        begin = partial(self._begin, state.number, done)
        handle, first_obs, first_lives = jax.lax.cond(done.any(), begin, lambda *same: same, handle, obs, lives)
        state = State(state.number, handle, jnp.where(done, 0, steps), first_lives, life_lost)
        return state, Step(first_obs, reward, terminated, truncated, obs, first_lives, lives)

    def _begun(self, number: Any, handle: Any, lives: Any) -> State:
        """The state where all episodes begin."""
        none = jnp.zeros(self.num_envs, jnp.int32)
        return State(number, handle, none, lives, none.astype(bool) if self._lives else None)

    def _open(self, key: Any) -> tuple[Any, Any, Any]:
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
        return self._kept(pool, dtype), np.asarray(pool.reset()[0], np.float32), None

    def _kept(self, pool: Any, dtype: Any) -> np.int32:
        """The number of a new pool."""
        with jax.enable_x64(True):  # MuJoCo's arrays are of double precision
            self.pools.append((pool, pool.xla()[3], dtype))
        return np.int32(len(self.pools) - 1)

    def _step(self, step: Any, dtype: Any, handle: Any, action: Any) -> tuple[Any, ...]:
        if isinstance(self.single_action_space, gym.spaces.Box):
            action = action.clip(self.single_action_space.low, self.single_action_space.high)
        with jax.enable_x64(True):
            handle, (obs, reward, terminated, _, info) = step(handle, action.astype(dtype))
            lives = info["lives"].astype(jnp.int32) if self._lives else None
            return handle, obs.astype(self._obs.dtype), reward.astype(jnp.float32), terminated, lives

    def _begin(self, number: Any, done: Any, handle: Any, obs: Any, lives: Any) -> tuple[Any, Any, Any]:
        """New episodes where they have ended: first observations and lives there, the others elsewhere."""
        # only small arrays go to Python: a copy of a large one may wait for the thread that waits here (jax#24255)
        shapes = jax.ShapeDtypeStruct(handle.shape, handle.dtype), self._obs, self._lives
        handle, *first = io_callback(self._first, shapes, number, done, handle)
        return handle, *where_ended(done, first, [obs, lives])

    def _first(self, number: Any, done: Any, handle: Any) -> tuple[Any, Any, Any]:
        obs, lives = np.zeros(self._obs.shape, self._obs.dtype), None
        rows, info = self.pools[int(number)][0].reset(np.flatnonzero(done))
        obs[info["env_id"]] = rows
        if self._lives:
            lives = np.zeros(self.num_envs, np.int32)
            lives[info["env_id"]] = info["lives"]
        return np.asarray(handle), obs, lives


class EnvPoolGames(EnvPoolEnvs):
    """`num_envs` games of Atari side by side, for each call of `reset` (one per seed). On the CPU only.

    With the seeds `seeds_of(key)` they are those of `EnvPoolVectorEnv` (see there): observations, rewards, lives, ends.
    One sentence and exit code 2 where EnvPool is not installed or has no such game, or the device is not the CPU.
    """

    def __init__(self, env_id: str, num_envs: int, num_threads: int = 1):
        with in_one_sentence():
            self._make = partial(EnvPoolVectorEnv, env_id, num_envs, num_threads)
            games = self._make()
        _require_cpu(env_id)
        self.single_observation_space = games.single_observation_space
        self.single_action_space = games.single_action_space
        self.max_steps, self.fire, self.num_envs = games.max_steps, games.fire, num_envs
        self._obs = jax.ShapeDtypeStruct(games.observation_space.shape or (), jnp.uint8)
        self._lives = jax.ShapeDtypeStruct((num_envs,), jnp.int32)
        self.pools = []

    def seeds_of(self, key: Any) -> list[int]:
        """The seeds of the games that `reset(key)` opens: 64 bits of the key and the number of the game."""
        first, second = (int(word) for word in np.asarray(key).ravel()[-2:])
        return [(first << 32 | second) << 32 | i for i in range(self.num_envs)]

    def restart(self, state: Any) -> tuple[Any, Any]:
        """New games everywhere: state, obs."""
        old = jnp.zeros(self._obs.shape, self._obs.dtype), state.lives
        handle, obs, lives = self._begin(state.number, jnp.ones(self.num_envs, bool), state.handle, *old)
        return self._begun(state.number, handle, lives), obs

    def _open(self, key: Any) -> tuple[Any, Any, Any]:
        games = self._make()
        obs, info = games.reset(seed=self.seeds_of(key))
        return self._kept(games.pool, jnp.int32), np.asarray(obs), np.asarray(info["lives"], np.int32)


def _require_cpu(env_id: str) -> None:
    """Compiled code holds addresses of this process: it is of no use to another one, so it is not kept."""
    if any(device.platform != "cpu" for device in jnp.zeros(()).devices()):
        quit_with(f"{env_id} runs in EnvPool, on the CPU; --device cpu trains there")
    jax.config.update("jax_enable_compilation_cache", False)
