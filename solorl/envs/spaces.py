"""Kinds of spaces in the words of the headers, and batches of what is in them."""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array


def as_arrays(batch: Any) -> Any:
    """A batch as NumPy arrays: of `Dict` spaces a dict of them, of `Tuple` spaces a tuple."""
    if isinstance(batch, Mapping):
        return {name: as_arrays(part) for name, part in batch.items()}
    return tuple(map(as_arrays, batch)) if isinstance(batch, tuple) else np.asarray(batch)


def batch_of_one(space: gym.Space, value: Any) -> Any:
    """A batch, as vector environments have it, that holds one observation or action of a space."""
    empty: Any = create_empty_array(space, 1)
    return concatenate(space, [value], empty)


def obs_kind(space: Any) -> str:
    """ "vector", "image", "dict", ...: the kind of an observation space."""
    if type(space).__name__ == "Box":
        if space.shape == ():
            return "scalar"
        return "image" if space.dtype == np.uint8 and len(space.shape) == 3 else "vector"
    return type(space).__name__.lower()


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
