"""Goals: reach what the observation names. Nearly all rewards are -1, so random actions tell next to nothing."""

from copy import copy
from typing import Any

import gymnasium as gym
import numpy as np


class GoalGame(gym.Env[Any, Any]):
    """What both games share: observations are a Dict of `observation`, `achieved_goal`, which is the same here, and
    `desired_goal`. `compute_reward(achieved_goal, desired_goal, info)` takes batches, too: 0 where the goal is reached,
    else -1; `compute_terminated` likewise, whether an episode ends there. `info["is_success"]` says which it was."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 5, "numbers": ["is_success"]}  # noqa: RUF012

    def __init__(self, low: float, size: int, steps: int, ends: bool, render_mode: str | None):
        self.steps, self.ends, self.render_mode = steps, ends, render_mode
        names, box = ("observation", "achieved_goal", "desired_goal"), gym.spaces.Box(low, 1.0, (size,), np.float32)
        self.observation_space = gym.spaces.Dict({name: copy(box) for name in names})

    def _begin(self, place: np.ndarray, goal: np.ndarray) -> tuple[Any, dict[str, Any]]:
        self.place, self.goal, self.time = np.asarray(place, np.float32), np.asarray(goal, np.float32), 0
        return self._obs(), {"is_success": False}

    def _move(self, place: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place, self.time = np.asarray(place, np.float32), self.time + 1
        reward = float(self.compute_reward(self.place, self.goal, {}))
        return self._obs(), reward, self.ends and reward == 0, self.time == self.steps, {"is_success": reward == 0}

    def _obs(self) -> dict[str, np.ndarray]:
        return {"observation": self.place, "achieved_goal": self.place, "desired_goal": self.goal.copy()}

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: Any) -> np.ndarray:
        """Goals (..., size) -> rewards (...)."""
        return np.where(np.linalg.norm(achieved_goal - desired_goal, axis=-1) < 0.05, 0.0, -1.0)

    def compute_terminated(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: Any) -> np.ndarray:
        """Goals (..., size) -> whether the task is over (...)."""
        return self.ends & (self.compute_reward(achieved_goal, desired_goal, info) == 0)


class BitFlip(GoalGame):
    """`bits` bits of 0 and 1; an action flips one of them. The episode ends when they equal the goal, or after `bits`
    steps. Of 15 bits random actions reach it once in 2,300 episodes, the best ones always: the mean return is -6.5.
    From Andrychowicz et al. (2017), https://arxiv.org/abs/1707.01495.

    Entries of the observation are (bits,). Actions: Discrete(bits).
    """

    def __init__(self, bits: int = 15, render_mode: str | None = None):
        super().__init__(0.0, bits, bits, True, render_mode)
        self.action_space = gym.spaces.Discrete(bits)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.Env.reset`. Any bits, any goal."""
        super().reset(seed=seed)
        return self._begin(*self.np_random.integers(2, size=(2, self.steps)))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        return self._move(np.abs(self.place - np.eye(self.steps)[int(action)]))

    def render(self) -> np.ndarray | None:
        """The bits above the goal, white for 1."""
        image = np.stack([self.place, self.goal]).repeat(20, 0).repeat(20, 1)[..., None]
        return None if self.render_mode is None else (255 * image).astype(np.uint8).repeat(3, 2)


class PointReach(GoalGame):
    """A point in a square with sides of length 2 begins in the middle; an action moves it by at most 0.05 in both
    directions, walls stop it. The goal is anywhere; nearer than 0.05 is there. An episode has 50 steps and does not end
    at the goal, where the point has to stay. Random actions reach few goals, the best ones each: the mean return is
    -11.8.

    Entries of the observation are (2,). Actions: Box(2), from -1 to 1.
    """

    def __init__(self, render_mode: str | None = None):
        super().__init__(-1.0, 2, 50, False, render_mode)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        return self._begin(np.zeros(2), self.np_random.uniform(-1, 1, 2))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        return self._move(np.clip(self.place + 0.05 * np.clip(action, -1, 1), -1, 1))

    def render(self) -> np.ndarray | None:
        """The goal, green, and the point, red."""
        image, axis = np.full((256, 256, 3), 255, np.uint8), np.linspace(-1, 1, 256)
        for (x, y), colour in ((self.goal, (60, 160, 60)), (self.place, (220, 40, 40))):
            image[np.hypot(axis - x, axis[::-1, None] - y) < 0.05] = colour
        return None if self.render_mode is None else image
