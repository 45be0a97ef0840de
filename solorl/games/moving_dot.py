"""Images of any size: say where the dot moves."""

from typing import Any

import gymnasium as gym
import numpy as np

MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])  # up, down, left, right


class MovingDot(gym.Env[np.ndarray, Any]):
    """A dot moves over the image in one of 4 directions, which is drawn again with probability 0.1 in each step; what
    leaves the image comes in at the opposite border. The agent names the direction of the last move. The reward is 1
    divided by the number of steps of an episode (20) for the right one, else 0: the mean return of random actions is
    0.25, that of a policy that compares two images 0.96, as the first image of an episode shows no move.

    Observations: (height, width, 3) bytes, a red dot on a blue ground, or with `grey` (height, width) bytes. Actions:
    Discrete(4): up, down, left, right. `channels_first` gives (3, height, width).
    """

    def __init__(
        self, height: int = 64, width: int = 64, grey: bool = False, channels_first: bool = False,
        render_mode: str | None = None,
    ):  # fmt: skip
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 5}
        self.size, self.grey, self.channels_first, self.render_mode = (height, width), grey, channels_first, render_mode
        shape = (height, width) if grey else (3, height, width) if channels_first else (height, width, 3)
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.action_space = gym.spaces.Discrete(4)
        self.dot = max(2, min(height, width) // 10)  # side of the dot, and what it moves in a step

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        self.place, self.direction = self.np_random.integers(self.size), int(self.np_random.integers(4))
        return self._obs(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        reward = float(int(action) == self.direction) / 20
        if self.np_random.random() < 0.1:
            self.direction = int(self.np_random.integers(4))
        self.place = (self.place + self.dot * MOVES[self.direction]) % self.size
        return self._obs(), reward, False, False, {}

    def render(self) -> np.ndarray | None:
        """The image in colour, enlarged to at least 256 pixels."""
        if self.render_mode is None:
            return None
        return self._image().repeat(scale := -(-256 // min(self.size)), 0).repeat(scale, 1)

    def _image(self) -> np.ndarray:
        rows, columns = (
            (start + np.arange(self.dot)) % side for start, side in zip(self.place, self.size, strict=True)
        )
        image = np.zeros((*self.size, 3), np.uint8)
        image[..., 2] = 80
        image[np.ix_(rows, columns)] = (255, 40, 0)
        return image

    def _obs(self) -> np.ndarray:
        image = self._image()
        if self.grey:
            return image[..., 0].copy()
        return image.transpose(2, 0, 1).copy() if self.channels_first else image
