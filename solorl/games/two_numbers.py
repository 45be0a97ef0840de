"""Multi-discrete actions: two numbers that must agree."""

from typing import Any

import gymnasium as gym
import numpy as np


class TwoNumbers(gym.Env[np.ndarray, np.ndarray]):
    """Each step shows a number s below `size`; the agent names two whose sum is s, modulo `size`. The reward is 1
    divided by the number of steps of an episode (10) for a right pair, else 0: the return is the fraction of right
    pairs, 1 / size for random actions, at best 1.

    Observations (size,), with `masked` (2 * size,): s as a one-hot vector, then which first numbers are allowed.
    Actions: MultiDiscrete([size, size]). With `masked` half of the first numbers, drawn in each step, are not allowed:
    `info["action_mask"]` (2 * size,) has the mask of the first number, then that of the second.
    """

    def __init__(self, size: int = 4, masked: bool = False):
        self.size, self.masked = size, masked
        self.observation_space = gym.spaces.Box(0.0, 1.0, (2 * size if masked else size,), np.float32)
        self.action_space = gym.spaces.MultiDiscrete([size, size])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        return self._next(), self._info()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`. ValueError for a first number that the mask does not allow."""
        first, second = (int(number) for number in action)
        if not self.allowed[first]:
            raise ValueError(f"the first number {first} is not allowed; allowed are {np.flatnonzero(self.allowed)}")
        reward = float((first + second) % self.size == self.sum) / 10
        return self._next(), reward, False, False, self._info()

    def _next(self) -> np.ndarray:
        self.sum, self.allowed = int(self.np_random.integers(self.size)), np.ones(self.size, bool)
        if self.masked:
            self.allowed[self.np_random.permutation(self.size)[: self.size // 2]] = False
        shown = np.zeros(self.size, np.float32)
        shown[self.sum] = 1
        return np.concatenate([shown, self.allowed.astype(np.float32)]) if self.masked else shown

    def _info(self) -> dict[str, Any]:
        return {"action_mask": np.concatenate([self.allowed, np.ones(self.size, bool)])} if self.masked else {}
