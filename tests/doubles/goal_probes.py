"""Tasks with goals whose episodes have different lengths; `goal_probes:Walks-v0` and so on."""

import gymnasium as gym
import numpy as np

from solorl.games.goals import BitFlip

BOX = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)


class Walks(gym.Env):
    """Observation: [number of the episode, step]; achieved: step. Episodes have 3 and 5 steps in turn; every second one
    of each length ends by time. The goal is the number of the episode."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, continuous=False, wrong=0.0, entries=("observation", "achieved_goal", "desired_goal")):
        self.episode, self.wrong = -1, wrong
        if continuous:
            self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        spaces = {"observation": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)} | dict.fromkeys(entries[1:], BOX)
        self.observation_space = gym.spaces.Dict(spaces)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = self.episode + 1, 0
        return self.obs(), {}

    def obs(self):
        values = {
            "observation": [self.episode, self.time],
            "achieved_goal": [self.time],
            "desired_goal": [self.episode],
        }
        return {name: np.array(values[name], np.float32) for name in self.observation_space}

    def step(self, action):
        self.time += 1
        over, by_time = self.time == (3, 5)[self.episode % 2], self.episode // 2 % 2 == 1
        reward = float(self.compute_reward(np.array([self.time]), np.array([self.episode]), {})) + self.wrong
        return self.obs(), reward, over and not by_time, over and by_time, {}

    def compute_reward(self, achieved_goal, desired_goal, info):
        return -np.abs(achieved_goal - desired_goal).sum(-1)


class ByOne(Walks):
    """Its rewards are those of one goal, not of a batch: a single number for all."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return -np.linalg.norm(achieved_goal - desired_goal)


class WithInfo(Walks):
    """Its rewards need more than goals."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return super().compute_reward(achieved_goal, desired_goal, info) * info["weight"]

    def step(self, action):
        self.time += 1
        return self.obs(), 0.0, False, self.time == 3, {"weight": 1.0}


class EndsByOne(Walks):
    """Its ends are those of one goal; of a batch it asks how far all are together."""

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return bool(np.linalg.norm(achieved_goal - desired_goal) < 0.5)


class EndsByBool(Walks):
    """The same, of code that a batch breaks."""

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return bool(np.linalg.norm(achieved_goal - desired_goal, axis=-1) < 0.5)


class EndsInColumns(Walks):
    """Ends (batch, 1)."""

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return np.abs(achieved_goal - desired_goal) < 0.5


class GoesOn(Walks):
    """As all tasks of Gymnasium-Robotics that continue at the goal: a single answer, whatever the goals."""

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return False


class Hidden(gym.Wrapper):
    """No function of rewards."""

    def get_wrapper_attr(self, name):
        if name == "compute_reward":
            raise AttributeError(name)
        return super().get_wrapper_attr(name)


gym.register("WithoutRewards-v0", lambda: Hidden(Walks()), disable_env_checker=True)
for name, kwargs in {
    "Walks": {}, "WalksContinuous": {"continuous": True}, "Wrong": {"wrong": 1.0},
    "WrongContinuous": {"wrong": 1.0, "continuous": True}, "NoGoals": {"entries": ("observation", "achieved_goal")},
}.items():  # fmt: skip
    gym.register(f"{name}-v0", Walks, kwargs=kwargs, disable_env_checker=True)
for kind in (ByOne, WithInfo, EndsByOne, EndsByBool, EndsInColumns, GoesOn):
    gym.register(f"{kind.__name__}-v0", kind, disable_env_checker=True)
    gym.register(f"{kind.__name__}Continuous-v0", kind, kwargs={"continuous": True}, disable_env_checker=True)
gym.register("BitFlip5-v0", BitFlip, kwargs={"bits": 5})
