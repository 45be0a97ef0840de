"""An environment with all that is hard to hand over to another process; `moody:Moody-v0` and so on."""

import time

import gymnasium as gym
import numpy as np


class Moody(gym.Env):
    """Episodes of random lengths, which end in both ways, with random rewards. Observations, and some infos, stand in
    arrays that the next step changes; infos come and go, and are of all types. Not all actions are allowed.

    At step `fails` of an episode it divides by 0, at step `sleeps` it sleeps for a minute, at `spoils` the reward is
    NaN. `masked=False` gives no infos at all.
    """

    observation_space = gym.spaces.Box(-10.0, 10.0, (3,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, fails=0, sleeps=0, spoils=0, masked=True):
        self.fails, self.sleeps, self.spoils, self.masked = fails, sleeps, spoils, masked
        self.obs, self.mask, self.noise = np.zeros(3, np.float32), np.ones(3, np.int8), np.zeros(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.length = 0, int(self.np_random.integers(3, 12))
        return self.now(0)

    def now(self, action):
        self.steps += 1
        self.obs[:] = self.np_random.normal(size=3) + action
        self.mask[:] = [1, self.steps % 2, self.np_random.random() < 0.5]
        self.noise[:] = self.np_random.normal(size=2)
        infos = {"count": self.steps, "noise": self.noise, "deep": {"is_even": self.steps % 2 == 0, "word": "x" * 3}}
        infos = {key: infos[key] for key in infos if self.np_random.random() < 0.5}
        return self.obs, infos | {"action_mask": self.mask} if self.masked else {}

    def step(self, action):
        if self.steps == self.fails > 0:
            action = 1 // (self.fails - self.steps)
        if self.steps == self.sleeps > 0:
            time.sleep(60)
        obs, infos = self.now(action)
        reward = float("nan") if self.steps == self.spoils else float(self.obs.sum())
        return obs, reward, self.steps > self.length and self.length % 2 == 0, self.steps > self.length, infos


gym.register("Moody-v0", Moody)
gym.register("Plain-v0", Moody, kwargs={"masked": False})
gym.register("Fails-v0", Moody, kwargs={"fails": 3, "masked": False})
gym.register("Sleeps-v0", Moody, kwargs={"sleeps": 3, "masked": False})
