"""Action masks: nearly all actions are invalid at any moment, as in real-time strategy games."""

from typing import Any

import gymnasium as gym
import numpy as np

MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])  # up, down, left, right; then HARVEST and RETURN
HARVEST, RETURN = 4, 5


class ResourceGrid(gym.Env[np.ndarray, Any]):
    """A worker on a map of `size` x `size` cells harvests the resource in one corner and returns it to the base in the
    opposite one, over and over. An action names a cell and what the unit there shall do; valid are only those that name
    the worker's cell and something that it can do there, as in Huang & Ontañón (2020), https://arxiv.org/abs/2006.14171.

    The return is the number of resources returned, plus `invalid_reward` for each invalid action, which does nothing
    else. Observations (size**2 + 1,): the worker's cell as a one-hot vector, whether it carries a resource. Actions:
    Discrete(6 * size**2), cell * 6 + (up, down, left, right, harvest, return); `info["action_mask"]` says which are
    valid.
    """

    def __init__(self, size: int = 4, invalid_reward: float = 0.0):
        self.size, self.invalid_reward = size, invalid_reward
        self.observation_space = gym.spaces.Box(0.0, 1.0, (size**2 + 1,), np.float32)
        self.action_space = gym.spaces.Discrete(6 * size**2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """See `gymnasium.Env.reset`. The worker begins in any cell, without a resource."""
        super().reset(seed=seed)
        self.place, self.carries = self.np_random.integers(self.size, size=2), False
        return self._obs(), {"action_mask": self._mask()}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        kind, reward = int(action) % 6, 0.0
        if not self._mask()[action]:
            reward = self.invalid_reward
        elif kind < HARVEST:
            self.place = self.place + MOVES[kind]
        else:
            self.carries, reward = kind == HARVEST, float(kind == RETURN)
        return self._obs(), reward, False, False, {"action_mask": self._mask()}

    def _cell(self) -> int:
        return int(self.place[0] * self.size + self.place[1])

    def _mask(self) -> np.ndarray:
        mask, cell = np.zeros((self.size**2, 6), bool), self._cell()
        moved = self.place + MOVES
        mask[cell, :HARVEST] = ((moved >= 0) & (moved < self.size)).all(1)
        mask[cell, HARVEST] = cell == 0 and not self.carries
        mask[cell, RETURN] = cell == self.size**2 - 1 and self.carries
        return mask.flatten()

    def _obs(self) -> np.ndarray:
        obs = np.zeros(self.size**2 + 1, np.float32)
        obs[self._cell()], obs[-1] = 1, self.carries
        return obs
