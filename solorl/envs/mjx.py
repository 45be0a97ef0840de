"""Gymnasium's robots in MJX, MuJoCo written in JAX: thousands of bodies side by side, meant for a GPU.

    envs = MjxEnvs("mjx/HalfCheetah", num_envs=4096)  # used like the classes of solorl.envs.classic
    env = gymnasium.make("mjx/HalfCheetah")  # registered when this module is imported

The tasks are HalfCheetah-v5, Hopper-v5, Walker2d-v5 and Ant-v5 in single precision. Model, time limit, weights of the
reward, healthy ranges and the noise of resets are read from Gymnasium's classes; what these do with them is written
here. Ant observes and pays for the forces of contacts, as there. Two things differ: actions beyond their bounds are
clipped, also where their cost is computed, and a state that is not finite ends an episode of any task.
"""

import contextlib
import inspect
import io
from functools import cache
from math import inf
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from solorl.envs import register
from solorl.envs.classic import Dynamics, JaxEnvs

# Task -> what only the methods of its class say: the largest velocity that is observed, the distribution of velocities
# at a reset, in numbers of the noise.
UNIFORM, NORMAL = lambda key, shape: jax.random.uniform(key, shape, minval=-1, maxval=1), jax.random.normal
TASKS = {
    "HalfCheetah": (inf, NORMAL),  # gymnasium.envs.mujoco.half_cheetah_v5.HalfCheetahEnv; the others likewise
    "Hopper": (10.0, UNIFORM),
    "Walker2d": (10.0, UNIFORM),
    "Ant": (inf, NORMAL),
}
ANYTHING = (-inf, inf)


class Body(NamedTuple):
    """The states of `num_envs` bodies; all (num_envs, ...)."""

    qpos: jax.Array
    qvel: jax.Array
    warmstart: jax.Array  # accelerations, where the solver begins
    x: jax.Array  # (num_envs,), from where the next step forward counts
    forces: jax.Array  # of contacts, each between -1 and 1; of Ant only


@cache
def _dynamics(name: str) -> Dynamics:
    with contextlib.redirect_stdout(io.StringIO()):  # of an engine that is not installed
        from mujoco import mjx

    env: Any = gym.make(f"{name}-v5").unwrapped
    max_velocity, velocity = TASKS[name]
    default = {name: each.default for name, each in inspect.signature(type(env)).parameters.items()}
    z_range, angle_range, state_range = (default.get(f"healthy_{of}_range", ANYTHING) for of in ("z", "angle", "state"))
    parts, noise, costs = env.observation_structure, default["reset_noise_scale"], default["ctrl_cost_weight"]
    skipped, num_forces = parts["skipped_qpos"], parts.get("cfrc_ext", 0)  # the height comes first of what is observed
    model, empty = mjx.put_model(env.model, impl="jax"), mjx.make_data(env.model, impl="jax")

    def start(key: Any, n: int) -> Body:
        keys = jax.random.split(key)
        qpos = env.init_qpos + noise * UNIFORM(keys[0], (n, env.model.nq))
        qvel = env.init_qvel + noise * velocity(keys[1], (n, env.model.nv))
        # no forces until the first step, as in Gymnasium
        return Body(qpos, qvel, jnp.zeros_like(qvel), qpos[:, 0], jnp.zeros((n, num_forces)))

    def move(body: Body, action: Any) -> Any:
        data = empty.replace(qpos=body.qpos, qvel=body.qvel, qacc_warmstart=body.warmstart, ctrl=action)
        data = jax.lax.fori_loop(0, env.frame_skip, lambda _, data: mjx.step(model, data), data)
        qpos, qvel, x, forces = data.qpos, data.qvel, data.qpos[0], body.forces
        if num_forces:  # Ant's place is that of its torso, which MuJoCo computes before it moves for the last time
            x, forces = data.xpos[1, 0], mjx.rne_postconstraint(model, data)._impl.cfrc_ext[1:].clip(-1, 1).ravel()
        inside = lambda value, bounds: jnp.all((bounds[0] < value) & (value < bounds[1]))  # noqa: E731
        healthy = inside(qpos[skipped], z_range) & inside(qpos[skipped + 1], angle_range)
        healthy &= inside(jnp.concatenate([qpos[2:], qvel]), state_range)
        cost = costs * (action**2).sum() + default.get("contact_cost_weight", 0) * (forces**2).sum()
        forward = default["forward_reward_weight"] * (x - body.x) / env.dt
        reward = forward + default.get("healthy_reward", 0) * healthy - cost
        finite = jnp.isfinite(qpos).all() & jnp.isfinite(qvel).all()  # nobody learns from NaN: the body stays
        after = Body(qpos, qvel, data.qacc_warmstart, x, forces), reward
        after, reward = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, (body, 0.0))
        return after, reward, ~healthy

    def step(body: Body, action: Any) -> Any:
        with jax.default_matmul_precision("highest"):  # else a GPU rounds to 10 bits
            return jax.vmap(move)(body, action.clip(env.action_space.low, env.action_space.high))

    def observe(body: Body) -> Any:
        return jnp.concatenate([body.qpos[:, skipped:], body.qvel.clip(-max_velocity, max_velocity), body.forces], 1)

    return Dynamics(start, step, observe)


class MjxEnvs(JaxEnvs):
    """`num_envs` bodies of one kind side by side. `env_id` is one that this module registers."""

    def __init__(self, env_id: str, num_envs: int):
        name = env_id.removeprefix("mjx/")
        super().__init__(f"{name}-v5", num_envs, _dynamics(name))
        self.single_observation_space = gym.spaces.Box(-inf, inf, self.single_observation_space.shape, np.float32)


register("mjx/*", compiled=MjxEnvs)
_REST: dict[str, Any] = {"disable_env_checker": True, "vector_entry_point": "solorl.envs.dlpack:JaxTensors"}
for _name in TASKS:
    _id = f"mjx/{_name}"
    gym.register(_id, "solorl.envs.open:FunctionalEnv", kwargs={"env_id": _id}, **_REST)
