"""Continuous actions for what is seen as images, as several entries, or only once: `probes_seen:Image-v0` and so on."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict

LOW, HIGH = np.array([-0.5, 0.0], np.float32), np.array([0.5, 1.0], np.float32)


class Seen(gym.Env):
    """Aim at a number from -0.5 to 0.5 with the first part of an action, at 0.5 with the second: the reward is 0 at
    best. Episodes end by turns after 5 steps (the task is over) and after 7 (a time limit)."""

    action_space = Box(LOW, HIGH)
    episode = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.episode = 0, 0 if seed is not None else self.episode + 1
        return self.draw(), {}

    def draw(self):
        self.target = self.np_random.uniform(-0.5, 0.5)
        return self.look()

    def step(self, action):
        assert self.action_space.contains(np.asarray(action, np.float32)), action
        reward = -((action[0] - self.target) ** 2) - (action[1] - 0.5) ** 2
        self.time += 1
        over = self.time == (7 if self.episode % 2 else 5)
        return self.draw(), float(reward), over and not self.episode % 2, over and bool(self.episode % 2), {}


class Image(Seen):
    """The number is how bright the image is, pixels around it are random."""

    observation_space = Box(0, 255, (16, 20, 3), np.uint8)

    def look(self):
        return (255 * (self.target + 0.5) * self.np_random.uniform(0.5, 1, (16, 20, 3))).astype(np.uint8)


class SeenEntries(Seen):
    """The size of the number is in a vector far from 0 and of a large scale, its sign in the half of the image with a
    dot; a matrix has nothing."""

    observation_space = Dict(
        items=Box(0, 255, (6, 8, 1), np.uint8),
        keys=Box(-np.inf, np.inf, (2,), np.float64),
        matrix=Box(-1.0, 1.0, (2, 3), np.float32),
    )

    def look(self):
        image = np.zeros((6, 8, 1), np.uint8)
        image[self.np_random.integers(6), self.np_random.integers(4) + 4 * (self.target > 0)] = 255
        keys = np.array([1.7e9 + 1000 * abs(self.target), self.np_random.uniform(-1, 1)])
        return {"items": image, "keys": keys, "matrix": self.np_random.uniform(-1, 1, (2, 3)).astype(np.float32)}


class Once(Seen):
    """The number is shown at the start of an episode only, on a large scale; then it must be remembered."""

    observation_space = Box(-np.inf, np.inf, (2, 2), np.float64)

    def draw(self):
        if self.time == 0:
            self.target = self.np_random.uniform(-0.5, 0.5)
        noise = self.np_random.uniform(-1, 1)
        return np.array([[1000 * self.target * (self.time == 0), self.time == 0], [noise, 7.0]])


for _cls in (Image, SeenEntries, Once):
    gym.register(f"{_cls.__name__}-v0", f"probes_seen:{_cls.__name__}", disable_env_checker=True)
