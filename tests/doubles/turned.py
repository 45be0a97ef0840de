"""An environment that a registered function wraps: its actions are in [0, 5], those of the one inside in [-2, 2]."""

import gymnasium as gym
import numpy as np


def make(**kwargs):
    return gym.wrappers.RescaleAction(gym.make("Pendulum-v1", **kwargs), np.float32(0), np.float32(5))


gym.register("Turned-v0", make)
