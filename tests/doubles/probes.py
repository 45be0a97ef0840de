"""Environments of a few lines whose optimal policy and values are known; use them as `probes:OneStep-v0` and so on."""

import gymnasium as gym
import numpy as np


class Probe(gym.Env):
    """Observation in [-1, 1] (1,), two actions; a subclass says what a step gives."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    first = 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.obs = np.array([self.draw()], np.float32)
        return self.obs, {}

    def draw(self):
        return self.first

    def step(self, action):
        self.steps += 1
        reward, terminated = self.outcome(int(action))
        return self.obs, reward, terminated, False, {}


class OneStep(Probe):
    """One step, reward 1: the value is 1."""

    def outcome(self, action):
        return 1.0, True


class SeesReward(Probe):
    """One step, reward = observation (-1 or 1): the value is the observation."""

    def draw(self):
        return self.np_random.choice([-1.0, 1.0])

    def outcome(self, action):
        return float(self.obs[0]), True


class Delayed(Probe):
    """Two steps, observations 0 and 1, reward 1 with the second: values gamma and 1."""

    def outcome(self, action):
        self.obs = np.array([1.0], np.float32)
        return float(self.steps == 2), self.steps == 2


class ActionCounts(Probe):
    """One step, reward 1 for action 1, else -1."""

    def outcome(self, action):
        return 2.0 * action - 1.0, True


class ActionMustMatch(SeesReward):
    """One step, reward 1 for action 1 at observation 1 and action 0 at -1, else -1."""

    def outcome(self, action):
        return 1.0 if (action == 1) == (self.obs[0] > 0) else -1.0, True


class Faint(SeesReward):
    """One step, reward 1 for action 1 at observation 100.01 and action 0 at 100, else -1."""

    observation_space = gym.spaces.Box(0.0, 200.0, (1,), np.float32)

    def draw(self):
        return self.np_random.choice([100.0, 100.01])

    def outcome(self, action):
        return 1.0 if (action == 1) == (self.obs[0] > 100.005) else -1.0, True


class Forever(Probe):
    """Reward 1 for ever, cut by a time limit: the value is 1 / (1 - gamma)."""

    def outcome(self, action):
        return 1.0, False


class Broken(Probe):
    """The reward is NaN from the 100th step on."""

    total = 0

    def outcome(self, action):
        Broken.total += 1
        return float("nan") if Broken.total > 100 else 1.0, True


class NanOnce(Probe):
    """The reward is NaN in the 150th step since it was made, in an episode of one step."""

    length = 1
    total = 0

    def outcome(self, action):
        self.total += 1
        return float("nan") if self.total == 150 else 1.0, self.total % self.length == 0


class NanOnceLong(NanOnce):
    """In an episode of 100 steps; the next one is longer than any training."""

    def outcome(self, action):
        reward, _ = super().outcome(action)
        return reward, self.total == 100


class NanSight(Probe):
    """The observation is NaN from the 100th step since it was made on; episodes of 30 steps."""

    length, wrong = 30, float("nan")
    total = 0

    def draw(self):
        return self.wrong if self.total >= 100 else 0.0

    def outcome(self, action):
        self.total += 1
        self.obs = np.array([self.draw()], np.float32)
        return 1.0, self.steps == self.length


class NanSightLong(NanSight):
    """It is infinite, in an episode that is longer than any training."""

    length, wrong = 100_000, float("inf")


class Pixels(Probe):
    """Image observations."""

    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = np.zeros((8, 8, 3), np.uint8)
        return self.obs, {}

    def outcome(self, action):
        return 1.0, True


class Entries(Probe):
    """Dict observations."""

    observation_space = gym.spaces.Dict({"x": Probe.observation_space})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = {"x": self.obs}
        return self.obs, {}

    def outcome(self, action):
        return 1.0, True


class Scalar(Probe):
    """Observations of shape ()."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = np.float32(0)
        return self.obs, {}

    def outcome(self, action):
        return 1.0, True


class Matrix(Probe):
    """Observations of shape (2, 3), to be flattened."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2, 3), np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.np_random.uniform(-1, 1, (2, 3))
        return self.obs, {}

    def outcome(self, action):
        return 1.0, self.steps == 3


class Fickle(Probe):
    """Draws from a generator that nobody can restore: its episodes cannot be replayed."""

    def draw(self):
        return float(np.random.default_rng().uniform(-1, 1))

    def outcome(self, action):
        return 1.0, self.steps == 1000


for cls in (
    OneStep,
    SeesReward,
    Delayed,
    ActionCounts,
    ActionMustMatch,
    Faint,
    Broken,
    NanOnce,
    NanOnceLong,
    NanSight,
    NanSightLong,
    Pixels,
    Entries,
    Scalar,
    Matrix,
    Fickle,
):
    gym.register(f"{cls.__name__}-v0", f"probes:{cls.__name__}", disable_env_checker=True)
gym.register("Forever-v0", "probes:Forever", max_episode_steps=10, disable_env_checker=True)
gym.register("ShortCartPole-v0", "gymnasium.envs.classic_control.cartpole:CartPoleEnv", max_episode_steps=5)
