"""Brax's bodies in batches of torch's tensors: what `ppo_continuous_action_batched` needs of a simulator.

A simulator of your own (Isaac Lab's, say) needs a class with the same methods, and its module, on its last line,
    gym.register("MyRobot-v0", vector_entry_point="my_module:MyRobot")
Then `--env-id my_module:MyRobot-v0` opens it as `MyRobot(num_envs=..., device=...)`.

The class is a `gym.vector.VectorEnv` that starts an ended episode again in the same step. It has `num_envs`, `device`
and Gymnasium's four spaces; actions beyond their bounds are its own matter. All arrays are tensors on `device`:
    reset(seed=..., options=None) -> obs (num_envs, obs_dim), infos
    step(action (num_envs, action_dim)) -> obs, reward, terminated, truncated (num_envs,) each, infos
`infos["final_obs"]` (num_envs, obs_dim) has the last observation of each episode that ended, other rows may be
anything. Where a simulator does not tell it, the observation before the step comes near.

With `state_dict`, `load_state_dict` and `obs`, the current observations, a resumed run continues exactly. Without them
the running episodes restart, and the run says so.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import jax
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from solorl.envs.interface import key_of, restored
from solorl.envs.open import compiled


class BraxTensors(gym.vector.VectorEnv):
    """`num_envs` bodies of Brax. torch and JAX hand each other the memory of their arrays (DLPack): nothing is copied,
    unless JAX computes on another device than `device`. So who gets a tensor must not write into it."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 as in Gymnasium

    def __init__(self, env_id: str, num_envs: int, device: str = "cpu"):
        self.num_envs, self.device = num_envs, torch.device(device)
        envs, self._begin, self._advance = compiled(env_id, num_envs)
        self.single_observation_space = envs.single_observation_space
        self.single_action_space = envs.single_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._key: Any = None  # until the first reset

    def reset(self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None) -> Any:
        """New episodes everywhere. `seed`, a number or one for each environment, decides all that is random."""
        if seed is not None or self._key is None:
            self._key = key_of(seed)
        self._key, key = jax.random.split(self._key)
        self._state, obs = self._begin(key)
        self.obs = self._tensor(obs)
        return self.obs, {}

    def step(self, actions: torch.Tensor) -> Any:
        """One step everywhere."""
        actions = jax.device_put(jax.dlpack.from_dlpack(actions.contiguous()), self._key.device)
        self._key, self._state, step = self._advance(self._key, self._state, actions)
        self.obs, *others, final_obs = map(self._tensor, step[:5])
        return self.obs, *others, {"final_obs": final_obs}

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_dlpack(array).to(self.device)

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self._state)]
        return {"key": np.asarray(self._key), "obs": self.obs, "leaves": leaves}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from such a state. ValueError where it is of other environments."""
        key = jax.random.PRNGKey(0)
        arrays = [saved["key"], *saved["leaves"], saved["obs"].cpu()]
        like = (key, *jax.eval_shape(self._begin, key))
        self._key, self._state, _ = restored(like, arrays, f"{self.num_envs} environments")
        self.obs = saved["obs"].to(self.device)
