"""Dict observations: an image and a vector, of which neither tells anything alone."""

from typing import Any

import gymnasium as gym
import numpy as np


class TwoSenses(gym.Env[Any, Any]):
    """The image shows a bright dot in its left or its right half, the vector points up or down: action 1 is right where
    left meets up or right meets down, action 0 else. The reward is 1 divided by the number of steps of an episode (10)
    for the right action, else 0: with one of the two entries no policy gets more than 0.5 in the mean, at best 1.

    Observations: Dict of `image` (8, 8, 1) bytes and `vector` (2,). Actions: Discrete(2); with `continuous`
    Box(1), whose sign is the answer. `hide` names an entry that is always 0.
    """

    def __init__(self, hide: str | None = None, continuous: bool = False):
        self.hide, self.continuous = hide, continuous
        image, vector = gym.spaces.Box(0, 255, (8, 8, 1), np.uint8), gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = gym.spaces.Dict({"image": image, "vector": vector})
        yes_or_no, sign = gym.spaces.Discrete(2), gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space: gym.Space = sign if continuous else yes_or_no

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        return self._next(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        answer = int(action[0] > 0) if self.continuous else int(action)
        reward = float(answer == (self.left == self.up)) / 10
        return self._next(), reward, False, False, {}

    def _next(self) -> dict[str, np.ndarray]:
        self.left, self.up = (bool(x) for x in self.np_random.integers(2, size=2))
        image, row, column = np.zeros((8, 8, 1), np.uint8), *self.np_random.integers([8, 4])
        image[row, column if self.left else column + 4] = 255
        vector = np.array([self.np_random.uniform(-1, 1), 1.0 if self.up else -1.0], np.float32)
        obs: dict[str, np.ndarray] = {"image": image, "vector": vector}
        return obs if self.hide is None else obs | {self.hide: np.zeros_like(obs[self.hide])}
