"""EnvPool's tasks with goals, the goals as entries of a Dict, and with the function of their rewards."""

from typing import Any

import gymnasium as gym
import numpy as np

from solorl.envs.envpool_env import EnvPoolEnv

PARKING = np.array([1, 0.3, 0, 0, 0.02, 0.02])  # weights of position, velocity and direction


class EnvPoolGoals(gym.ObservationWrapper):
    """One environment of EnvPool: a Dict of `observation`, `achieved_goal` and `desired_goal`, of float32;
    `compute_reward(achieved_goal, desired_goal, info)` and `compute_terminated`, also of batches."""

    def __init__(self, env_id: str, near: float, offset: float):
        super().__init__(EnvPoolEnv(env_id))
        self.near, self.offset, self.parks = near, offset, env_id.startswith("parking")
        self.sizes = {name: part.shape[0] for name, part in self.env.envs.space.items()}  # type: ignore[attr-defined]
        boxes = [(name, gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)) for name, size in self.sizes.items()]
        self.observation_space = gym.spaces.Dict(boxes)

    def observation(self, observation: Any) -> Any:
        """See `gymnasium.ObservationWrapper`."""
        return dict(zip(self.sizes, np.split(observation, np.cumsum([*self.sizes.values()])[:-1]), strict=True))

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: Any) -> np.ndarray:
        """Goals (..., size) -> rewards (...), without the penalty of a crash."""
        apart = np.abs(achieved_goal - desired_goal)
        return -np.sqrt(apart @ PARKING) if self.parks else (np.linalg.norm(apart, axis=-1) < self.near) + self.offset

    def compute_terminated(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: Any) -> np.ndarray:
        """Goals (..., size) -> whether the task is over (...), as where a car is parked."""
        return self.parks & (self.compute_reward(achieved_goal, desired_goal, info) > -0.12)
