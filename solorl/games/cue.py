"""Memory: one of two cues is shown at the start and asked for at the end."""

from typing import Any

import gymnasium as gym
import numpy as np


class Cue(gym.Env[np.ndarray, Any]):
    """One of 2 cues at the start; `steps` steps later the question: which one was it? The return is 1 for the right
    answer, else 0: without memory 0.5 in the mean, at best 1.

    Observations (3,): cue 0 is shown, cue 1 is shown, the question is asked. Actions: Discrete(2); with `continuous`
    Box(1), whose sign is the answer; with `masked` Discrete(3), of which `info["action_mask"]` allows only 2 (wait)
    before the question and only 0 and 1 (answers) at it. Before the question no action has an effect.
    """

    def __init__(self, steps: int = 30, continuous: bool = False, masked: bool = False):
        self.steps, self.continuous, self.masked = steps, continuous, masked
        self.observation_space = gym.spaces.Box(0.0, 1.0, (3,), np.float32)
        self.action_space: gym.Space = gym.spaces.Discrete(3 if masked else 2)
        if continuous:
            self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        self.cue, self.time = int(self.np_random.integers(2)), 0
        return self._obs(), self._info()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`. ValueError for an action that the mask does not allow."""
        if self.masked and not self._info()["action_mask"][action]:
            raise ValueError(f"action {action} is not allowed in step {self.time} of {self.steps}")
        answer = int(action[0] > 0) if self.continuous else int(action)
        asked = self.time == self.steps
        self.time += 1
        return self._obs(), float(asked and answer == self.cue), asked, False, self._info()

    def _obs(self) -> np.ndarray:
        shown = self.time == 0
        return np.array([shown and self.cue == 0, shown and self.cue == 1, self.time == self.steps], np.float32)

    def _info(self) -> dict[str, Any]:
        asked = self.time >= self.steps
        return {"action_mask": np.array([asked, asked, not asked])} if self.masked else {}
