"""Brax's environments: physics in JAX, thousands of bodies side by side; meant for a GPU.

    envs = BraxEnvs("brax/ant", num_envs=4096)  # used like the classes of solorl.envs.classic
    env = gymnasium.make("brax/ant")  # registered when this module is imported

`brax/ant-spring`, `-positional`, `-generalized` and `-mjx` choose the physics, `brax/ant` leaves it to the environment.
Episodes are cut off after 1,000 steps, as in Brax's own trainings. Unlike there every episode starts in a state of its
own, not always in its environment's first one.
"""

import contextlib
import io
import warnings
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from solorl.envs.interface import Step, where_ended
from solorl.errors import quit_with

BODIES = (
    *("ant", "halfcheetah", "hopper", "humanoid", "humanoidstandup", "inverted_pendulum", "inverted_double_pendulum"),
    *("pusher", "reacher", "swimmer", "walker2d", "fast"),  # fast: no physics, for tests
)
PHYSICS = ("generalized", "positional", "spring", "mjx")
MAX_STEPS = 1_000


def _make(env_id: str) -> Any:
    name, _, physics = env_id.removeprefix("brax/").partition("-")
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():  # of engines that are not installed
        warnings.simplefilter("ignore")
        try:
            from brax import envs
        except ImportError:
            quit_with(f"{env_id} needs an extra: pip install 'solorl[brax]'")
        return envs.get_environment(name, **({"backend": physics} if physics else {}))


class BraxEnvs:
    """`num_envs` bodies of one kind side by side. `env_id` is one that this module registers.

    Actions beyond [-1, 1] are clipped.
    """

    saved = True  # their state is part of the training, and so of a checkpoint

    def __init__(self, env_id: str, num_envs: int):
        self.body, self.num_envs = _make(env_id), num_envs
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (self.body.observation_size,), np.float32)
        self.single_action_space = gym.spaces.Box(-1.0, 1.0, (self.body.action_size,), np.float32)

    def reset(self, key: Any) -> tuple[Any, Any]:
        """New episodes everywhere: state, obs (num_envs, obs_dim)."""
        inner = jax.vmap(self.body.reset)(jax.random.split(key, self.num_envs))
        return (inner, jnp.zeros(self.num_envs, jnp.int32)), inner.obs

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, Step]:
        """One step everywhere: state, Step. Episodes that end start again in states drawn with `key`."""
        inner, steps = state
        inner, steps = jax.vmap(self.body.step)(inner, action.clip(-1.0, 1.0)), steps + 1
        terminated = inner.done > 0.5
        truncated = (steps >= MAX_STEPS) & ~terminated
        done = terminated | truncated
        keys = jax.random.split(key, self.num_envs)
        begin = lambda: where_ended(done, jax.vmap(self.body.reset)(keys), inner)  # noqa: E731
        begun = jax.lax.cond(done.any(), begin, lambda: inner)  # a reset costs as much as a part of a step
        step = Step(begun.obs, inner.reward, terminated, truncated, inner.obs)
        return (begun, jnp.where(done, 0, steps)), step


for _body in BODIES:
    _engines = PHYSICS if _body != "swimmer" else PHYSICS[:1]  # of which Brax refuses the others
    for _id in (f"brax/{_body}", *(f"brax/{_body}-{_physics}" for _physics in _engines)):
        gym.register(
            _id,
            "solorl.envs.open:FunctionalEnv",
            kwargs={"env_id": _id},
            disable_env_checker=True,
            vector_entry_point="solorl.envs.batched:BraxTensors",
        )
