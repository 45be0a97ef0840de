"""Environments whose steps cost something; `probes_cost:Toll-v0` and so on."""

import gymnasium as gym
import numpy as np


class Toll(gym.Env):
    """Each step costs its number in the episode, which is seen; episodes end by turns with the task after 3 steps and
    with a time limit after 4."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self):
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        over = self.steps == (3, 4)[self.episode % 2]
        ends = over and self.episode % 2 == 0, over and self.episode % 2 == 1
        return np.full(1, self.steps / 4, np.float32), 1.0, *ends, {"cost": self.steps}


class Temptation(Toll):
    """One step: the reward is the action, and an action above 0 costs 1."""

    def step(self, action):
        return np.zeros(1, np.float32), float(action[0]), True, False, {"cost": float(action[0] > 0)}


class Crash(Toll):
    """The last of 400 steps costs 1, which is seen three steps before."""

    def step(self, action):
        self.steps += 1
        over = self.steps == 400
        return np.full(1, max(0, self.steps - 396) / 4, np.float32), 1.0, over, False, {"cost": float(over)}


class Free(Toll):
    """Nothing costs anything, and no info says so."""

    def step(self, action):
        return *super().step(action)[:4], {}


for _cls in (Toll, Temptation, Crash, Free):
    gym.register(f"{_cls.__name__}-v0", f"probes_cost:{_cls.__name__}", disable_env_checker=True)
