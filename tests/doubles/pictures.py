"""Images of many shapes whose pixels are known: `gym.make("pictures:ColoursLast-v0")`."""

import gymnasium as gym
import numpy as np

SHAPES = {
    "ColoursLast": (20, 30, 3),
    "ColoursFirst": (3, 20, 30),
    "FourLast": (20, 30, 4),
    "OneFirst": (1, 20, 30),
    "OneLast": (20, 30, 1),
    "TwoAxes": (20, 30),
    "Both": (3, 20, 4),
    "Neither": (20, 30, 5),
    "Small": (20, 14, 3),
}


class Picture(gym.Env):
    """Random images; an episode has 5 steps, after which a time limit ends it. `space` bounds need not be 0 and 255."""

    def __init__(self, shape, dtype=np.uint8):
        self.observation_space = gym.spaces.Box(0, 200, shape, dtype)
        self.action_space = gym.spaces.Discrete(3)

    def _obs(self):
        self.seen.append(self.np_random.integers(201, size=self.observation_space.shape).astype(np.uint8))
        return self.seen[-1].astype(self.observation_space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen = []
        return self._obs(), {}

    def step(self, action):
        return self._obs(), float(action == 1), False, False, {}


for name, shape in SHAPES.items():
    gym.register(f"{name}-v0", "pictures:Picture", max_episode_steps=5, kwargs={"shape": shape})
gym.register("Floats-v0", "pictures:Picture", kwargs={"shape": (20, 30, 3), "dtype": np.float32})
