"""Environments with masks, with observations and actions of several parts; use them as `kinds:Allowed-v0` and so on."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple


class Allowed(gym.Env):
    """Four actions, of which a random half is allowed; reward 1 for one that is. Episodes last 2 to 5 steps."""

    observation_space, action_space = Box(-1.0, 1.0, (2, 3), np.float64), Discrete(4)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, gives=True, render_mode=None):
        self.gives, self.render_mode = gives, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(2, 6))
        return self.told()

    def told(self):
        self.mask = np.isin(np.arange(4), self.np_random.choice(4, 2, replace=False))
        obs = np.full((2, 3), self.left / 5)
        return obs, {"action_mask": self.mask.astype(np.int8)} if self.gives else {}

    def step(self, action):
        self.left, reward = self.left - 1, float(self.mask[action])
        obs, info = self.told()
        return obs, reward, self.left == 0, False, info

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


class Parts(Allowed):
    """A number and bytes are seen; reward 1 for the action that names both: (number, [number, mean of the bytes])."""

    observation_space = Dict({"number": Discrete(5), "bytes": Box(0, 255, (2, 2), np.uint8)})
    action_space = Tuple((Discrete(5), Box(0.0, 255.0, (2,), np.float32)))

    def told(self):
        self.number = self.np_random.integers(5)
        self.bytes = self.np_random.integers(0, 255, (2, 2), np.uint8)
        return {"number": self.number, "bytes": self.bytes}, {}

    def step(self, action):
        self.left, (number, (again, mean)) = self.left - 1, action
        reward = float(number == self.number == again and mean == np.float32(self.bytes.mean(dtype=np.float32)))
        return self.told()[0], reward, self.left == 0, False, {}


class Pairs(Parts):
    """A pair is seen; reward 1 for the two actions that repeat it."""

    observation_space, action_space = Tuple((Discrete(3), Box(0.0, 1.0, (1,), np.float32))), MultiDiscrete([3, 2])

    def told(self):
        self.pair = self.np_random.integers(3), self.np_random.integers(2)
        return (self.pair[0], np.full(1, self.pair[1], np.float32)), {}

    def step(self, action):
        self.left, reward = self.left - 1, float(tuple(action) == self.pair)
        return self.told()[0], reward, self.left == 0, False, {}


def obey(obs, action_mask):
    """The policy that `Allowed` rewards."""
    return action_mask.argmax(-1)


def name_parts(obs):
    """The policy that `Parts` rewards."""
    mean = obs["bytes"].mean((1, 2), dtype=np.float32)
    return obs["number"], np.stack([obs["number"].astype(np.float32), mean], 1)


def repeat_pair(obs):
    """The policy that `Pairs` rewards."""
    return np.stack([obs[0], obs[1][:, 0].astype(np.int64)], 1)


for kind in (Allowed, Parts, Pairs):
    gym.register(f"{kind.__name__}-v0", kind)
