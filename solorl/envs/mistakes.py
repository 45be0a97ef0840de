"""The usual mistakes in an environment of a user's own, found in one step before a training begins."""

import inspect
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from solorl.envs.vector import not_finite
from solorl.errors import UsageError


def try_out(env: gym.Env, env_id: str) -> bool:
    """Reset an environment and take a step; returns whether its infos have an `action_mask`. UsageError where it does
    not have Gymnasium's interface, or an observation is not of its space, or a number is not finite."""
    own = env.unwrapped
    known = inspect.signature(own.reset).parameters.values()
    if not any(each.name == "seed" or each.kind is each.VAR_KEYWORD for each in known):
        raise UsageError(f"{env_id}: its reset takes no seed; write `def reset(self, *, seed=None, options=None)`")
    begun = own.reset(seed=0)
    if not (isinstance(begun, tuple) and len(begun) == 2 and isinstance(begun[1], Mapping)):
        raise UsageError(f"{env_id}: its reset must return two values, obs and a dict info")
    taken = own.step(_action(own.action_space, begun[1]))
    if len(taken) != 5:
        what = "must return five values, obs, reward, terminated, truncated, info"
        raise UsageError(f"{env_id}: its step {what}, but returns {len(taken)}")
    obs, info = env.reset(seed=0)
    _check_obs(f"{env_id}: the observation of its reset", env.observation_space, obs)
    obs, reward, *_ = env.step(_action(env.action_space, info))
    _check_obs(f"{env_id}: the observation of its step", env.observation_space, obs)
    if shape := np.asarray(reward).shape:
        raise UsageError(f"{env_id}: its reward must be one number, but is an array of shape {shape}")
    if (value := not_finite(reward)) is not None:
        raise UsageError(f"{env_id}: the reward of its step is {value}")
    return "action_mask" in info


def _action(space: gym.Space, info: Mapping[str, Any]) -> Any:
    """An action, one that the mask of a `Discrete` space allows, or that of a `MultiDiscrete` one, which has the masks
    of all parts in a row; the same at each call."""
    space.seed(0)
    mask = None if info.get("action_mask") is None else np.asarray(info["action_mask"], np.int8)
    if isinstance(space, gym.spaces.MultiDiscrete) and mask is not None and space.nvec.ndim == mask.ndim == 1:
        return space.sample(mask=tuple(np.split(mask, np.cumsum(space.nvec)[:-1])))
    return space.sample(mask if isinstance(space, gym.spaces.Discrete) else None)


def _check_obs(what: str, space: gym.Space, obs: Any) -> None:
    """UsageError unless an array, or each one in a dict, can be stored as one of its space."""
    if isinstance(space, gym.spaces.Dict):
        if not (isinstance(obs, Mapping) and obs.keys() == space.keys()):
            raise UsageError(f"{what} must be a dict with the keys of its space: {', '.join(space)}")
        for name, part in space.items():
            _check_obs(f"{what} ({name})", part, obs[name])
    if isinstance(space, gym.spaces.Box):
        array = np.asarray(obs)
        if array.shape != space.shape:
            raise UsageError(f"{what} has shape {array.shape}, but its space has {space.shape}")
        if not np.can_cast(array.dtype, space.dtype, "same_kind"):
            raise UsageError(f"{what} is of type {array.dtype}, but its space of {space.dtype}")
        if (value := not_finite(array)) is not None:
            raise UsageError(f"{what} is {value}: all its numbers must be finite")
