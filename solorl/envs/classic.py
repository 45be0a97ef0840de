"""Environments as pure JAX functions, to be stepped inside a compiled loop.

    envs = JaxEnvs("CartPole-v1", num_envs=4)
    state, obs = envs.reset(key)
    state, step = envs.step(key, state, action)      # step.obs, .reward, .terminated, .truncated, .final_obs

The dynamics are those of Gymnasium's classic control, in single precision. An environment whose episode ends is reset
in the same step: `final_obs` is where the step led, `obs` where the next episode starts (both are equal elsewhere). A
time limit is `truncated`, never `terminated`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from solorl.envs.interface import Step, where_ended


@dataclass(frozen=True)
class Dynamics:
    """One environment: functions of `num_envs` states side by side.

    start: (key, num_envs) -> state (num_envs, state_dim), or a tree of such arrays
    step: (state, action) -> state, reward (num_envs,), terminated (num_envs,)
    observe: state -> obs (num_envs, obs_dim)
    """

    start: Callable[..., Any]
    step: Callable[..., Any]
    observe: Callable[..., Any] = lambda state: state


def near_zero(bound):
    """A start of four numbers from -bound to bound."""
    return lambda key, n: jax.random.uniform(key, (n, 4), minval=-bound, maxval=bound)


# ---------------------------------------------------------------------- CartPole
def cartpole_step(state, action):
    """Euler steps of 0.02 s; falls at 12 degrees or 2.4 units. Barto, Sutton, Anderson 1983."""
    _, x_dot, theta, theta_dot = state.T
    force = jnp.where(action == 1, 10.0, -10.0)
    cos, sin = jnp.cos(theta), jnp.sin(theta)
    push = (force + 0.05 * theta_dot**2 * sin) / 1.1  # 0.05: mass 0.1 times half length 0.5; 1.1: both masses
    theta_acc = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    x_acc = push - 0.05 * theta_acc * cos / 1.1
    rates = jnp.stack([x_dot, x_acc, theta_dot, theta_acc], 1)
    state = state + 0.02 * rates
    fallen = (jnp.abs(state[:, 0]) > 2.4) | (jnp.abs(state[:, 2]) > 12 * 2 * np.pi / 360)
    return state, jnp.ones(len(state)), fallen


# ---------------------------------------------------------------------- MountainCar
def mountain_car_step(state, action):
    """Moore 1990; over at position 0.5, an inelastic wall at -1.2."""
    position, velocity = state.T
    velocity = jnp.clip(velocity + 0.001 * (action - 1) - 0.0025 * jnp.cos(3 * position), -0.07, 0.07)
    position = jnp.clip(position + velocity, -1.2, 0.6)
    velocity = jnp.where((position <= -1.2) & (velocity < 0), 0.0, velocity)
    return jnp.stack([position, velocity], 1), -jnp.ones(len(state)), (position >= 0.5) & (velocity >= 0)


def mountain_car_start(key, n):
    """At rest near the bottom of the valley."""
    return jnp.stack([jax.random.uniform(key, (n,), minval=-0.6, maxval=-0.4), jnp.zeros(n)], 1)


# ---------------------------------------------------------------------- Pendulum
def pendulum_step(state, action):
    """Torque in [-2, 2]; the cost is the squared angle from upright, plus little for speed and torque."""
    theta, theta_dot = state.T
    torque = jnp.clip(action[:, 0], -2.0, 2.0)
    angle = (theta + np.pi) % (2 * np.pi) - np.pi
    cost = angle**2 + 0.1 * theta_dot**2 + 0.001 * torque**2
    theta_dot = jnp.clip(theta_dot + (15.0 * jnp.sin(theta) + 3.0 * torque) * 0.05, -8.0, 8.0)
    return jnp.stack([theta + theta_dot * 0.05, theta_dot], 1), -cost, jnp.zeros(len(state), bool)


def pendulum_start(key, n):
    """At any angle, slow."""
    return jax.random.uniform(key, (n, 2), minval=-1.0, maxval=1.0) * jnp.array([np.pi, 1.0])


def pendulum_observe(state):
    """Cosine and sine of the angle, angular velocity."""
    theta, theta_dot = state.T
    return jnp.stack([jnp.cos(theta), jnp.sin(theta), theta_dot], 1)


# ---------------------------------------------------------------------- Acrobot
def acrobot_rates(state, torque):
    """Time derivatives (num_envs, 4) by the equations of the book. Sutton & Barto 2018, section 11.3 of 1998."""
    theta1, theta2, dtheta1, dtheta2 = state.T
    cos2, sin2 = jnp.cos(theta2), jnp.sin(theta2)
    d1 = 0.25 + (1.0 + 0.25 + cos2) + 2.0
    d2 = 0.25 + 0.5 * cos2 + 1.0
    phi2 = 0.5 * 9.8 * jnp.cos(theta1 + theta2 - np.pi / 2)
    phi1 = -0.5 * dtheta2**2 * sin2 - dtheta2 * dtheta1 * sin2 + 1.5 * 9.8 * jnp.cos(theta1 - np.pi / 2) + phi2
    acc2 = (torque + d2 / d1 * phi1 - 0.5 * dtheta1**2 * sin2 - phi2) / (0.25 + 1.0 - d2**2 / d1)
    acc1 = -(d2 * acc2 + phi1) / d1
    return jnp.stack([dtheta1, dtheta2, acc1, acc2], 1)


def acrobot_step(state, action):
    """One Runge-Kutta step of order 4 of 0.2 s; over when the tip is one link above the base."""
    torque, h = (action - 1).astype(jnp.float32), 0.2
    k1 = acrobot_rates(state, torque)
    k2 = acrobot_rates(state + h / 2 * k1, torque)
    k3 = acrobot_rates(state + h / 2 * k2, torque)
    k4 = acrobot_rates(state + h * k3, torque)
    state = state + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    angles = (state[:, :2] + np.pi) % (2 * np.pi) - np.pi
    speeds = jnp.clip(state[:, 2:], jnp.array([-4 * np.pi, -9 * np.pi]), jnp.array([4 * np.pi, 9 * np.pi]))
    state = jnp.concatenate([angles, speeds], 1)
    up = -jnp.cos(angles[:, 0]) - jnp.cos(angles.sum(1)) > 1.0
    return state, jnp.where(up, 0.0, -1.0), up


def acrobot_observe(state):
    """Cosines and sines of the two angles, both angular velocities."""
    theta1, theta2, dtheta1, dtheta2 = state.T
    return jnp.stack([jnp.cos(theta1), jnp.sin(theta1), jnp.cos(theta2), jnp.sin(theta2), dtheta1, dtheta2], 1)


DYNAMICS = {
    "CartPole-v1": Dynamics(near_zero(0.05), cartpole_step),
    "MountainCar-v0": Dynamics(mountain_car_start, mountain_car_step),
    "Pendulum-v1": Dynamics(pendulum_start, pendulum_step, pendulum_observe),
    "Acrobot-v1": Dynamics(near_zero(0.1), acrobot_step, acrobot_observe),
}


# ---------------------------------------------------------------------- many of them, with time limits and resets


class JaxEnvs:
    """`num_envs` environments of one kind side by side, with Gymnasium's time limit; see the top of this file.

    `env_id` is one of `DYNAMICS`, or any of Gymnasium's that `dynamics` are those of.
    """

    def __init__(self, env_id: str, num_envs: int, dynamics: Dynamics | None = None):
        env: Any = gym.make(env_id)
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        env.close()
        self.dynamics, self.num_envs = dynamics or DYNAMICS[env_id], num_envs
        self.max_steps = env.spec.max_episode_steps or np.iinfo(np.int32).max

    def reset(self, key):
        """New episodes everywhere: state, obs (num_envs, obs_dim)."""
        state = self.dynamics.start(key, self.num_envs)
        return (state, jnp.zeros(self.num_envs, jnp.int32)), self.dynamics.observe(state)

    def step(self, key, state, action):
        """One step everywhere: state, Step. Episodes that end start again in states drawn with `key`."""
        inner, steps = state
        inner, reward, terminated = self.dynamics.step(inner, action)
        steps = steps + 1
        truncated = (steps >= self.max_steps) & ~terminated
        done = terminated | truncated
        final_obs = self.dynamics.observe(inner)
        inner = where_ended(done, self.dynamics.start(key, self.num_envs), inner)
        steps = jnp.where(done, 0, steps)
        return (inner, steps), Step(self.dynamics.observe(inner), reward, terminated, truncated, final_obs)
