"""Environments with continuous actions whose best policy and values are known; `probes_offpolicy:Aim-v0` and so on."""

import gymnasium as gym
import numpy as np

LOW, HIGH = np.array([-2.0, 0.0], np.float32), np.array([1.0, 10.0], np.float32)  # another centre and range in each


class ContinuousProbe(gym.Env):
    """Observation in [-1, 1] (1,), actions (2,) within LOW and HIGH; a subclass says what a step gives."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Box(LOW, HIGH)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.obs = np.array([self.draw()], np.float32)
        return self.obs, {}

    def draw(self):
        return 0.0

    def step(self, action):
        self.steps += 1
        assert self.action_space.contains(np.asarray(action, self.action_space.dtype)), action
        low, high = self.action_space.low.astype(np.float64), self.action_space.high.astype(np.float64)
        reward, terminated = self.outcome((action - low) / (high - low))
        return self.obs, float(reward), terminated, False, {}


class OneStepBox(ContinuousProbe):
    """One step, reward 1: the value is 1."""

    def outcome(self, share):
        return 1.0, True


class AimWhereSeen(ContinuousProbe):
    """One step; the best action stands at a quarter and three quarters of the two ranges for observation 1, at three
    quarters and a quarter for -1."""

    def draw(self):
        return self.np_random.choice([-1.0, 1.0])

    def outcome(self, share):
        return -4 * np.sum((share - 0.5 - 0.25 * self.obs[0] * np.array([-1, 1])) ** 2), True


class AimAside(AimWhereSeen):
    """The same within bounds around other centres than 0."""

    action_space = gym.spaces.Box(np.array([-3.0, 0.0], np.float32), np.array([1.0, 10.0], np.float32))


class AimTiny(AimWhereSeen):
    """The same within tiny bounds."""

    action_space = gym.spaces.Box(0.0, 0.001, (2,), np.float64)


class AimHuge(AimWhereSeen):
    """The same within huge bounds."""

    action_space = gym.spaces.Box(0.0, 1e6, (2,), np.float32)


class DelayedBox(ContinuousProbe):
    """Two steps, observations 0 and 1, reward 1 with the second: values gamma and 1."""

    def outcome(self, share):
        self.obs = np.array([1.0], np.float32)
        return float(self.steps == 2), self.steps == 2


class ForeverBox(ContinuousProbe):
    """Reward 1 for ever, cut by a time limit: the value is 1 / (1 - gamma)."""

    def outcome(self, share):
        return 1.0, False


class Regulator(gym.Env):
    """Ten steps; an action moves a point, which is to stay at 0: half of its square distance is lost in each step."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.obs = 0, self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.obs, {}

    def step(self, action):
        self.steps, self.obs = self.steps + 1, self.obs + action
        return self.obs, -0.5 * float(self.obs @ self.obs), self.steps == 10, False, {}


class Diary(gym.Env):
    """The observation tells who, when: (number of the environment's first seed, episode, step). Episodes end by turns
    after 3 steps (the task is over) and after 4 (a time limit); the reward is 100 episodes + step. `received` lists
    the actions."""

    observation_space = gym.spaces.Box(0.0, np.inf, (3,), np.float64)
    action_space = gym.spaces.Box(LOW, HIGH)

    def __init__(self):
        self.who, self.episode, self.received = None, -1, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.who, self.episode = seed % 2**20, -1
        self.episode += 1
        self.steps = 0
        return self.look(), {}

    def look(self):
        return np.array([self.who, self.episode, self.steps], np.float64)

    def step(self, action):
        self.steps += 1
        self.received.append(action)
        over = self.steps == (3, 4)[self.episode % 2]
        reward = 100.0 * self.episode + self.steps
        return self.look(), reward, over and self.episode % 2 == 0, over and self.episode % 2 == 1, {}


class DiscreteDiary(Diary):
    """The same with four actions."""

    action_space = gym.spaces.Discrete(4)


class ReusedDiary(DiscreteDiary):
    """The same, every observation written into the same array."""

    def __init__(self):
        super().__init__()
        self.array = np.zeros(3)

    def look(self):
        self.array[:] = super().look()
        return self.array


class ExactBox(ContinuousProbe):
    """Actions within bounds of double precision that no float32 equals; the nearest one lies beyond them."""

    action_space = gym.spaces.Box(-0.1, 0.1, (2,), np.float64)

    def step(self, action):
        self.steps += 1
        assert self.action_space.contains(action), action
        return self.obs, 1.0, self.steps == 3, False, {}


class WholeBox(ContinuousProbe):
    """Actions that are whole numbers."""

    action_space = gym.spaces.Box(0, 5, (2,), np.int64)

    def outcome(self, share):
        return 1.0, True


class Boundless(ContinuousProbe):
    """Actions without bounds."""

    action_space = gym.spaces.Box(-np.inf, np.inf, (2,))

    def outcome(self, share):
        return 1.0, True


class HalfBounded(Boundless):
    """One dimension bounded, the other from above only."""

    action_space = gym.spaces.Box(np.array([0.0, -np.inf], np.float32), np.array([1.0, 0.0], np.float32))


class WideBox(ContinuousProbe):
    """Observations of shape (2, 3), to be flattened; bounds of one action dimension."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2, 3), np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.np_random.uniform(-1, 1, (2, 3))
        return self.obs, {}

    def outcome(self, share):
        return 1.0, self.steps == 3


for cls in (
    *(OneStepBox, AimWhereSeen, AimAside, AimTiny, AimHuge, DelayedBox, Regulator, Diary, DiscreteDiary, ReusedDiary),
    *(ExactBox, WholeBox, Boundless, HalfBounded, WideBox),
):
    gym.register(f"{cls.__name__}-v0", f"probes_offpolicy:{cls.__name__}", disable_env_checker=True)
gym.register("ForeverBox-v0", "probes_offpolicy:ForeverBox", max_episode_steps=10, disable_env_checker=True)
