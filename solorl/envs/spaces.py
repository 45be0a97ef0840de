"""Kinds of spaces in the words of the headers, and batches of what is in them."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from solorl.envs.returns import declared_in


def as_arrays(batch: Any) -> Any:
    """A batch as NumPy arrays: of `Dict` spaces a dict of them, of `Tuple` spaces a tuple."""
    if isinstance(batch, Mapping):
        return {name: as_arrays(part) for name, part in batch.items()}
    return tuple(map(as_arrays, batch)) if isinstance(batch, tuple) else np.asarray(batch)


def not_finite(tree: Any, name: str = "") -> tuple[str, float] | None:
    """Name and value of the first NaN or infinite number in the arrays and tensors of a tree, None without any."""
    if isinstance(tree, (Mapping, list, tuple)):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        return next(filter(None, (not_finite(value, f"{name}.{key}") for key, value in items)), None)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tree, torch.Tensor):
        bad = ~torch.isfinite(tree)
    elif hasattr(tree, "shape") and "float" in (tree := np.asarray(tree)).dtype.name:  # JAX's too
        bad = ~np.isfinite(tree)
    else:
        return None
    return (name, float(tree[bad][0])) if bad.any() else None


def bare_action_space(envs: Any) -> Any:
    """The action space of the first of vector environments without the wrappers of `make_env`, but with those of the
    function that is registered: as `gym.make` gives it. Of environments that are not made one by one that of `envs`."""
    env = getattr(envs, "envs", [envs])[0]
    while isinstance(env, gym.Wrapper) and not isinstance(env, gym.wrappers.OrderEnforcing):  # `gym.make` adds that
        env = env.env
    return env.action_space


def batch_of(space: gym.Space, values: Sequence[Any]) -> Any:
    """A batch, as vector environments have it, of observations or actions of a space."""
    empty: Any = create_empty_array(space, len(values))
    return concatenate(space, values, empty)


def flattens(space: Any) -> bool:
    """Whether `FlattenObservation` makes a vector of a space that is worth learning from: none of images."""
    parts = space.spaces.values() if isinstance(space, gym.spaces.Dict) else getattr(space, "spaces", ())
    kind = obs_kind(space)
    if kind == "image" or kind.startswith("empty") or any(obs_kind(part) == "image" for part in parts):
        return False
    flat = gym.spaces.flatten_space(space)
    return isinstance(flat, gym.spaces.Box) and flat.shape != (0,)


def wrapper_for(obs: Any, action: Any) -> str:
    """A wrapper of Gymnasium that helps where no file takes spaces, as a phrase; empty where none is known."""
    kind, said = action_kind(action), ""
    if obs_kind(obs) != "vector" and flattens(obs):
        said = "FlattenObservation makes a vector of the observations"
    elif kind == "continuous":
        said = "DiscretizeAction makes choices of them" if action.is_bounded() else "TransformAction gives bounds"
    elif kind.endswith("continuous"):
        said = "TransformAction makes one axis of all"
    return f"; gymnasium.wrappers.{said}" if said else ""


def obs_kind(space: Any) -> str:
    """ "vector", "image", "dict", ...: the kind of an observation space."""
    if type(space).__name__ == "Box":
        image = space.dtype == np.uint8 and len(space.shape) == 3
        return "scalar" if space.shape == () else "image" if image else "vector"
    return ("empty " if getattr(space, "spaces", None) in ({}, ()) else "") + type(space).__name__.lower()


def action_kind(space: Any) -> str:
    """ "discrete", "continuous", "multidiscrete", "tuple", ...: the kind of an action space."""
    if type(space).__name__ == "Box":
        if not np.issubdtype(space.dtype, np.floating):
            return "integer"
        return "continuous" if len(space.shape) == 1 else f"{len(space.shape)}-dimensional continuous"
    if type(space).__name__ == "Discrete" and space.start != 0:
        return f"discrete (from {space.start})"
    if type(space).__name__ == "MultiDiscrete" and np.any(space.start):
        return "multidiscrete (not from 0)"
    return type(space).__name__.lower()


class First(gym.Env[Any, Any]):
    """A vector environment of one environment, resetting in the same step, as that environment."""

    def __init__(self, envs: gym.vector.VectorEnv):
        self.envs, self.metadata = envs, envs.metadata
        self.observation_space, self.action_space = envs.single_observation_space, envs.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.Env.reset`."""
        obs, infos = self.envs.reset(seed=None if seed is None else [seed], options=options)  # type: ignore[arg-type]
        return self._only(obs), self._info(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        obs, reward, terminated, truncated, infos = self.envs.step(batch_of(self.action_space, [action]))
        seen = self._only(obs)
        if terminated[0] or truncated[0]:
            seen, infos = infos["final_obs"][0], infos.get("final_info", infos)
        said = self._info(infos) | declared_in(infos, 0, False)
        return seen, float(reward[0]), bool(terminated[0]), bool(truncated[0]), said

    def _only(self, obs: Any) -> Any:
        return next(iter(iterate(self.envs.observation_space, obs)))

    def _info(self, infos: Any) -> dict[str, Any]:
        return {name: infos[name][0] for name in ("action_mask", "lives") if name in infos}

    def render(self) -> Any:
        """See `gymnasium.Env.render`."""
        frames = self.envs.render()
        return None if frames is None else np.asarray(frames)[0]

    def close(self) -> None:
        """See `gymnasium.Env.close`."""
        self.envs.close()


class Seeded(First):
    """The same; each reset draws the seed of its episode from the generator of this environment."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.Env.reset`."""
        gym.Env.reset(self, seed=seed)
        return super().reset(seed=int(self.np_random.integers(2**31)))
