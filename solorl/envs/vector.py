"""Environments of one agent side by side, and which actions are allowed (masks)."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode


def stacked_masks(masks: Sequence[Any]) -> np.ndarray | None:
    """Masks (n, num_actions) from one of each environment, True for what is allowed; where an environment gives none
    (None) everything is allowed. None where none of them gives one."""
    like = next((np.asarray(mask) for mask in masks if mask is not None), None)
    if like is None:
        return None
    return np.stack([np.ones(like.shape, bool) if mask is None else np.asarray(mask, bool) for mask in masks])


def masks_in(infos: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> np.ndarray | None:
    """The masks (n, num_actions) in the infos of a vector environment, or in those of n environments."""
    if not isinstance(infos, Mapping):
        return stacked_masks([info.get("action_mask") for info in infos])
    masks = infos.get("action_mask", ())
    given = infos.get("_action_mask", np.ones(len(masks), bool))
    return stacked_masks([mask if here else None for mask, here in zip(masks, given, strict=True)])


def with_next_obs(obs: Any, infos: dict[str, Any], names: Sequence[str] = ("lives", "cost")) -> dict[str, Any]:
    """The infos of a step with `next_obs` (num_envs, *obs_shape), the observations to which the step led: `obs`, except
    where an episode has ended, whose last observation is in `infos["final_obs"]`. Of `names` that the infos have,
    `next_NAME` in the same way, from `infos["final_info"]`."""
    ended, final = np.flatnonzero(infos.get("_final_obs", ())), infos.get("final_info", {})
    found: dict[str, tuple[Any, Any]] = {"next_obs": (obs, infos.get("final_obs"))}
    for name in names:
        if name in infos or name in final:  # only there where no other environment says it
            found[f"next_{name}"] = infos.get(name, final.get(name)), final.get(name, infos.get(name))
    if not ended.size:
        return infos | {name: now for name, (now, _) in found.items()}
    return infos | {name: _replaced(now, ended, [last[i] for i in ended]) for name, (now, last) in found.items()}


def _replaced(obs: Any, places: np.ndarray, rows: Sequence[Any]) -> Any:
    """A copy of a batch of observations with other rows at some places; of `Dict` and `Tuple` spaces part by part."""
    if isinstance(obs, Mapping):
        return {name: _replaced(part, places, [row[name] for row in rows]) for name, part in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_replaced(part, places, [row[k] for row in rows]) for k, part in enumerate(obs))
    obs = obs.copy()
    obs[places] = rows
    return obs


class Masked(gym.Wrapper):
    """Keeps the `action_mask` (num_actions,) that the environment gave with its current observation, or None. The last
    observation of an episode is a copy: a reset may write into it."""

    mask: np.ndarray | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.Env.reset`."""
        obs, info = self.env.reset(seed=seed, options=options)
        self.mask = np.array(info["action_mask"], bool) if "action_mask" in info else None
        return obs, info

    def step(self, action: Any) -> Any:
        """See `gymnasium.Env.step`."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.mask = np.array(info["action_mask"], bool) if "action_mask" in info else None
        return copy.deepcopy(obs) if terminated or truncated else obs, reward, terminated, truncated, info


class VectorEnvs(gym.vector.SyncVectorEnv):
    """Environments side by side, with Gymnasium's vector interface and `AutoresetMode.SAME_STEP`: `obs` begins the next
    episode where one has ended, whose last observation is in `infos["final_obs"]`, its last info, with its mask, in
    `infos["final_info"]`. `infos["next_obs"]` has the observations to which the step led, in games of Atari
    `infos["next_lives"]` the lives that it left, `infos["next_cost"]` what it cost, see `with_next_obs`.

    `action_mask` (num_envs, num_actions) says which actions are allowed at the current observations, True for those
    that are, also after a reset and a resume; None where the environments give no `info["action_mask"]`.
    """

    def __init__(self, make_envs: Sequence[Callable[[], gym.Env]]):
        super().__init__(make_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        self._masked = [env if isinstance(env, Masked) else Masked(env) for env in self.envs]
        self.envs = list(self._masked)  # which others may wrap later

    def step(self, actions: Any) -> Any:
        """One step in every environment; see the class."""
        obs, *ends, infos = super().step(actions)
        return obs, *ends, with_next_obs(obs, infos)

    def __reduce__(self) -> Any:
        """For an object in another process: there the same functions make environments of its own."""
        return _again, (type(self), self.env_fns, dict(gym.registry))

    @property
    def action_mask(self) -> np.ndarray | None:
        """See the class."""
        return stacked_masks([env.mask for env in self._masked])


def _again(kind: type, make_envs: Sequence[Callable[[], gym.Env]], registry: dict[str, Any]) -> VectorEnvs:
    gym.registry.update(registry)
    return kind(make_envs)
