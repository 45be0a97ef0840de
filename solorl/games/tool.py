"""Mixed actions: choose a tool, then how strongly to use it."""

from typing import Any

import gymnasium as gym
import numpy as np


class Tool(gym.Env[np.ndarray, Any]):
    """Each step names one of 3 tools and a strength from -1 to 1. The reward is 1 minus the distance of the chosen
    strength from the named one, not less than 0, divided by the number of steps of an episode (10); 0 for another tool.
    A policy that ignores the strength has a mean return of at most 0.5 (the right tool, strength 0), the best one 1.

    Observations (4,): the tool as a one-hot vector, the strength. Actions: Tuple(Discrete(3), Box(1)).
    """

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Box(-1.0, 1.0, (1,), np.float32)))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        return self._next(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        tool, strength = int(action[0]), float(np.asarray(action[1]).item())
        error = abs(min(max(strength, -1.0), 1.0) - self.strength)
        reward = max(0.0, 1 - error) / 10 if tool == self.tool else 0.0
        return self._next(), reward, False, False, {}

    def _next(self) -> np.ndarray:
        self.tool, self.strength = int(self.np_random.integers(3)), float(self.np_random.uniform(-1, 1))
        obs = np.zeros(4, np.float32)
        obs[self.tool], obs[3] = 1, self.strength
        return obs
