"""Exploration: a reward only for who has fetched the key and then opens the door."""

from typing import Any

import gymnasium as gym
import numpy as np

MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])  # up, down, left, right


class KeyAndDoor(gym.Env[np.ndarray, Any]):
    """A room of `size` x `size` cells: the agent begins in the upper left corner, the key lies in the lower left one,
    the door is in the lower right one. The return is 1 if the agent reaches the door with the key, which ends the
    episode, else 0. Random actions hardly ever get there: the shortest way takes 2 * (size - 1) steps.

    Observations (2 * size + 1,): the row and the column as one-hot vectors, whether the agent has the key. Actions:
    Discrete(4), moves up, down, left, right; walls stop them.
    """

    def __init__(self, size: int = 10):
        self.size = size
        self.observation_space = gym.spaces.Box(0.0, 1.0, (2 * size + 1,), np.float32)
        self.action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        self.place, self.has_key = np.zeros(2, int), False
        return self._obs(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        self.place = (self.place + MOVES[action]).clip(0, self.size - 1)
        row, column = self.place
        last = self.size - 1
        self.has_key = self.has_key or (row == last and column == 0)
        opened = bool(self.has_key and row == last and column == last)
        return self._obs(), float(opened), opened, False, {}

    def _obs(self) -> np.ndarray:
        obs = np.zeros(2 * self.size + 1, np.float32)
        obs[[self.place[0], self.size + self.place[1]]] = 1
        obs[-1] = self.has_key
        return obs
