"""Environments whose action spaces are not those that networks give, `odd_actions:OddFromMinusOne-v0` and so on. Each
checks that what it gets is of its space; the reward is 1 for the largest action."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete


class Odd(gym.Env):
    """Five steps an episode; the observation is a random number."""

    observation_space = Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 5
        return self.see(), {}

    def see(self):
        return self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)

    def step(self, action):
        assert action in self.action_space, action
        self.left -= 1
        return self.see(), float(np.all(action == self.best)), self.left == 0, False, {}


SPACES = {
    "FromMinusOne": (Discrete(3, start=-1), 1),
    "FromTwo": (Discrete(2, start=2), 3),
    "Small": (Discrete(2, dtype=np.int8), 1),
    "Byte": (Discrete(2, dtype=np.uint8), 1),
    "Switches": (MultiBinary(3), [1, 1, 1]),
    "Board": (MultiBinary((2, 2)), [[1, 1], [1, 1]]),
    "Levels": (Box(np.array([-1, 2], np.int32), np.array([1, 3], np.int32), dtype=np.int32), [1, 3]),
    "Bytes": (Box(250, 255, (1,), np.uint8), [255]),
    "Started": (MultiDiscrete([2, 3], start=[1, -1]), [2, 1]),
    "Numbers": (Box(0, 2**40, (2,), np.int64), [0, 0]),  # too many to choose one
    "Boundless": (Box(-np.inf, np.inf, (2,), np.float32), [0.0, 0.0]),
    "Table": (Box(-1.0, 1.0, (2, 2), np.float32), [[0.0, 0.0], [0.0, 0.0]]),
}
for _name, (_space, _best) in SPACES.items():
    _kind = type(_name, (Odd,), {"action_space": _space, "best": np.array(_best, _space.dtype)})
    gym.register(f"Odd{_name}-v0", _kind, disable_env_checker=True)
