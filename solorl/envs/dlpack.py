"""Environments written in JAX in batches of torch's tensors, as solorl/envs/batched.py describes."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from solorl.envs.batched import Batched
from solorl.envs.interface import key_of, restored
from solorl.envs.open import compiled


class JaxTensors(Batched):
    """`num_envs` environments of `open_envs`. torch and JAX hand each other the memory of their arrays (DLPack):
    nothing is copied, unless JAX computes on another device than `device`. So who gets a tensor must not write into
    it."""

    def __init__(self, env_id: str, num_envs: int, device: str = "cpu"):
        envs, self._begin, self._advance = compiled(env_id, num_envs)
        super().__init__(num_envs, device, envs.single_observation_space, envs.single_action_space)
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
        self.obs, *others, next_obs = map(self._tensor, step[:5])
        return self.obs, *others, {"next_obs": next_obs}

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
