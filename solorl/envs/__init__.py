"""Environments: one interface for all that can be stepped."""

from collections.abc import Callable
from fnmatch import fnmatch
from importlib import import_module
from typing import Any, NamedTuple


class Openers(NamedTuple):
    """How many environments of a kind are opened at once; None where they are made one by one."""

    compiled: Callable[[str, int], Any] | None  # (env_id, num_envs), to be stepped inside a compiled loop
    stepped: Callable[..., Any] | None  # (make_env, env_id, num_envs), for files in torch; may return None


_openers: dict[str, Openers] = {}


def register(pattern: str, compiled: Any = None, stepped: Any = None) -> None:
    """Say how environments whose ids match `pattern` (see fnmatch) are opened, see `Openers`."""
    _openers[pattern] = Openers(compiled, stepped)


def openers(env_id: str) -> Openers:
    """What is registered for an id, the last registration first."""
    from solorl.envs.ids import FAMILIES  # here: it imports other modules of this room

    for pattern, (module, *_) in FAMILIES.items():
        if fnmatch(env_id, pattern) and module.startswith("solorl."):
            import_module(module)  # which registers itself
    return next((both for pattern, both in reversed(_openers.items()) if fnmatch(env_id, pattern)), Openers(None, None))
