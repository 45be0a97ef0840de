"""Simulators that step batches of torch's tensors: what `ppo_continuous_action_batched` needs of one, and a small one.

A simulator of your own (Isaac Lab's, say) needs a class with the same methods, and its module, on its last line,
    gym.register("MyRobot-v0", vector_entry_point="my_module:MyRobot")
Then `--env-id my_module:MyRobot-v0` opens it as `MyRobot(num_envs=..., device=...)`. docs/guides/batched_simulator.md
has one in thirty lines.

The class is a `gym.vector.VectorEnv` that starts an ended episode again in the same step. It has `num_envs`, `device`
and Gymnasium's four spaces; actions beyond their bounds are its own matter. All arrays are tensors on `device`:
    reset(seed=..., options=None) -> obs (num_envs, obs_dim), infos
    step(action (num_envs, action_dim)) -> obs, reward, terminated, truncated (num_envs,) each, infos
`infos["next_obs"]` (num_envs, obs_dim) has the observations to which the step led: `obs`, except where an episode has
ended, whose last observation it is. Where a simulator does not tell that one, the observation before the step is near.

With `state_dict`, `load_state_dict` and `obs`, the current observations, a resumed run continues exactly. Without them
the running episodes restart, and the run says so.
"""

from collections.abc import Mapping, Sequence
from math import pi
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space


class Batched(gym.vector.VectorEnv):
    """What such classes have in common."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 as in Gymnasium

    def __init__(self, num_envs: int, device: str, observation_space: gym.Space, action_space: gym.Space):
        self.num_envs, self.device = num_envs, torch.device(device)
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)


class Pendulum(Batched):
    """Gymnasium's Pendulum-v1 in tensors: `games/TensorPendulum-v0`."""

    def __init__(self, num_envs: int, device: str = "cpu"):
        high = np.array([1.0, 1.0, 8.0], np.float32)
        super().__init__(num_envs, device, gym.spaces.Box(-high, high), gym.spaces.Box(-2.0, 2.0, (1,)))
        self._random = torch.Generator()  # on the CPU, so that a run can be resumed on any device

    def _start(self) -> torch.Tensor:  # (num_envs, 2): any angle, slow
        drawn = torch.rand(self.num_envs, 2, generator=self._random) * 2 - 1
        return (drawn * torch.tensor([pi, 1.0])).to(self.device)

    def _look(self) -> torch.Tensor:
        angle, speed = self._state.T
        return torch.stack([angle.cos(), angle.sin(), speed], 1)

    def reset(self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None) -> Any:
        """New episodes everywhere. `seed`, a number or one for each environment, decides all that is random."""
        if seed is not None:
            self._random.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        self._state, self._steps = self._start(), torch.zeros(self.num_envs, device=self.device)
        self.obs = self._look()
        return self.obs, {}

    def step(self, actions: torch.Tensor) -> Any:
        """One step everywhere."""
        (angle, speed), torque = self._state.T, actions[:, 0].clamp(-2, 2)
        cost = ((angle + pi) % (2 * pi) - pi) ** 2 + 0.1 * speed**2 + 0.001 * torque**2
        speed = (speed + 0.05 * (15 * angle.sin() + 3 * torque)).clamp(-8, 8)
        self._state, steps = torch.stack([angle + 0.05 * speed, speed], 1), self._steps + 1
        next_obs, truncated = self._look(), steps >= 200
        self._state = torch.where(truncated[:, None], self._start(), self._state)
        self._steps, self.obs = steps * ~truncated, self._look()
        return self.obs, -cost, torch.zeros_like(truncated), truncated, {"next_obs": next_obs}

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on."""
        return {"random": self._random.get_state(), "state": self._state, "steps": self._steps, "obs": self.obs}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from such a state. ValueError where it is of another number of environments."""
        if len(saved["obs"]) != self.num_envs:
            raise ValueError(f"it is not of {self.num_envs} environments of this kind")
        self._random.set_state(saved["random"].cpu())
        self._state, self._steps, self.obs = (saved[name].to(self.device) for name in ("state", "steps", "obs"))
