"""Ids of environments: which exist, what they need, which was meant."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from solorl.errors import UsageError, did_you_mean, missing_extra, nearest, needs_extra
from solorl.scripts import header_fields, not_for
from solorl.trust import check_module

# Where the simulators of Gymnasium's families come from: module of the entry point -> (module to import, our extra).
EXTRAS = {
    "gymnasium.envs.box2d": ("Box2D", "box2d"),
    "gymnasium.envs.mujoco": ("mujoco", "mujoco"),
    "gymnasium.envs.phys2d": ("jax", "jax"),
    "gymnasium.envs.tabular": ("jax", "jax"),
    "ale_py.env": ("ale_py", "atari"),
    "ale_py": ("cv2", "atari"),  # of the wrapper that makes images smaller
}


# Environments that exist in JAX only: pattern of their ids -> (class that steps many of them, in a module that
# registers them; our extra, named as the package it brings).
REGISTER = {
    "*-MinAtar": ("solorl.envs.gymnax:GymnaxEnvs", "gymnax"),
    "brax/*": ("solorl.envs.brax:BraxEnvs", "brax"),
}


# Games of several agents: pattern of their ids -> package that has them. `solorl.envs.pettingzoo` registers them; our
# extra of that name brings the packages.
GAMES = {"mpe/*": "mpe2"} | dict.fromkeys(("atari/*", "butterfly/*", "sisl/*"), "pettingzoo")


# Families that other packages register: the part of an id before the slash -> (module, what pip installs).
NAMESPACES = {
    "games": ("solorl.envs.games", ""),  # ours
    "ALE": ("ale_py", ""),  # our extra
    "MinAtar": ("minatar", "minatar"),
    "dm_control": ("shimmy", "'shimmy[dm-control]'"),
}


def _newest(ids: Iterable[str]) -> list[str]:
    """Of each environment only the id with the highest version, or that without one."""
    newest: dict[str, int] = {}
    unversioned = []
    for env_id in ids:
        name, _, version = env_id.rpartition("-v")
        if name and version.isdigit():
            newest[name] = max(newest.get(name, 0), int(version))
        else:
            unversioned.append(env_id)
    return [f"{name}-v{version}" for name, version in newest.items()] + unversioned


def family_of(env_id: str) -> tuple[str, str] | None:
    """What `REGISTER` says of an environment that exists in JAX only; None of any other."""
    return next((family for pattern, family in REGISTER.items() if fnmatch(env_id, pattern)), None)


def _register_games(env_id: str) -> None:
    """Register PettingZoo's games if `env_id` is like one of them; UsageError where its package is not installed."""
    for pattern, package in GAMES.items():
        if fnmatch(env_id, pattern):
            if any(importlib.util.find_spec(name) is None for name in ("pettingzoo", package)):
                raise UsageError(needs_extra(env_id, "pettingzoo"))
            importlib.import_module("solorl.envs.pettingzoo")


def _import_module_of(env_id: str, module: str, typed: bool) -> None:
    """Import the module of an id `module:Name-v0`. It may lie in the current folder, which is searched last, so that
    nothing there hides another module. UsageError with the true reason where the import fails, and where
    `check_module` refuses it."""
    if not module or module.startswith("."):
        raise UsageError(f"there is no environment {env_id}; one of another package is `package:Name-v0`")
    try:
        if "" not in sys.path and importlib.util.find_spec(module.partition(".")[0]) is None:
            sys.path.append("")  # the current folder
        check_module(env_id, module, typed)
        importlib.import_module(module)
    except UsageError:
        raise
    except Exception as error:  # whatever the code of the module raises
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            hint = did_you_mean(module, [path.stem for path in Path().glob("*.py")])
            where = f"no module {module} is installed or in this folder{hint}"
            raise UsageError(f"there is no environment {env_id}: {where}") from error
        if isinstance(error, ImportError) and (sentence := missing_extra(env_id, error)):
            raise UsageError(sentence) from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{env_id} cannot be used: importing the module {module} fails with {reason}") from error


def _file_of(module: str) -> str:
    return getattr(sys.modules[module], "__file__", None) or "a folder without code"


def check_env_id(env_id: str, typed: bool = True) -> None:
    """Refuse an environment that is not registered or whose simulator is not installed, and one of a module that only
    a run folder names, where it is not `typed` (see `check_module`)."""
    import gymnasium as gym

    try:
        module, colon, name = env_id.rpartition(":")
        space, family = "ALE" if "NoFrameskip-v" in name else name.partition("/")[0], family_of(name)
        games = [package for pattern, package in GAMES.items() if fnmatch(name, pattern)]
        for package in (*(family or ())[1:], *NAMESPACES.get(space, ())[:1], *games):  # what this id imports
            check_module(env_id, package, typed)
        if family:
            if importlib.util.find_spec(family[1]) is None:
                raise UsageError(needs_extra(env_id, family[1]))
            importlib.import_module(family[0].partition(":")[0])
        _register_games(name)
        if space in NAMESPACES and importlib.util.find_spec(NAMESPACES[space][0]):
            importlib.import_module(NAMESPACES[space][0])  # which registers its ids
        if colon:
            _import_module_of(env_id, module, typed)
        spec = gym.spec(name)
    except (gym.error.Error, ImportError) as error:
        if isinstance(error, ImportError) and (sentence := missing_extra(env_id, error)):
            raise UsageError(sentence) from error
        if space in NAMESPACES and importlib.util.find_spec(NAMESPACES[space][0]) is None:
            package = NAMESPACES[space][1]
            sentence = f"{env_id} needs a package: pip install {package}" if package else needs_extra(env_id, "atari")
            raise UsageError(sentence) from error
        for where, package in (*REGISTER.values(), ("solorl.envs.pettingzoo", "pettingzoo")):
            if importlib.util.find_spec(package):
                with contextlib.suppress(ImportError):  # without jax
                    importlib.import_module(where.partition(":")[0])  # which registers its ids
        near = [f"{module}{colon}{one}" for one in nearest(name, _newest(gym.registry), n=3)]
        hint = f"; did you mean {' or '.join(near)}?" if near else "; one of another package is `package:Name-v0`"
        if colon:
            hint = f": the module {module} ({_file_of(module)}) registers no {name}{hint if near else ''}"
        raise UsageError(f"there is no environment {env_id}{hint}") from error
    entry = spec.entry_point if isinstance(spec.entry_point, str) else ""
    for prefix, (module, extra) in EXTRAS.items():
        if entry.startswith(prefix) and importlib.util.find_spec(module) is None:
            raise UsageError(needs_extra(env_id, extra))
    newest = _newest(gym.registry)
    if name not in newest:  # some ids of the past have lost their simulators
        try:
            gym.make(env_id).close()
        except ImportError as error:
            same = [one for one in newest if one.rpartition("-v")[0] == name.rpartition("-v")[0]]
            hint = f"; take {same[0]}" if same else f": {error}"
            raise UsageError(f"{env_id} can no longer be made{hint}") from error


def check_env_id_of(script: Path, env_id: str, typed: bool = True) -> None:
    """Refuse an environment that the script cannot train on: EnvPool's ids where it imports `EnvPoolVectorEnv`.
    `typed`: see `check_env_id`."""
    text = script.read_text(errors="replace")
    if "EnvPoolVectorEnv" not in text:
        check_env_id(env_id, typed)
        return
    envpool = check_envpool_id(env_id)
    fields = header_fields(text.partition('"""')[2].partition('"""')[0])
    if fields.get("Spaces", "").startswith("image") and not hasattr(envpool.make_spec(env_id).config, "use_fire_reset"):
        use = not_for(fields).get("vector observations", "another script")
        raise UsageError(f"{env_id} is no Atari game; {use} takes vector observations")


def check_envpool_id(env_id: str) -> Any:
    """EnvPool, the module. Refuses an environment that it does not have, and missing packages."""
    for package, extra in (("envpool", "envpool"), ("ale_py", "atari")):
        if importlib.util.find_spec(package) is None:
            raise UsageError(needs_extra(env_id, extra))
    import envpool

    known = envpool.list_all_envs()
    if env_id not in known:
        hint = did_you_mean(env_id.rpartition("/")[2].replace("NoFrameskip-v4", "-v5"), known)
        raise UsageError(f"EnvPool has no environment {env_id}{hint}")
    return envpool
