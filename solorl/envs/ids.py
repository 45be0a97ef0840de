"""Ids of environments: which exist, what they need, which was meant."""

import contextlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from solorl.envs.load_envpool import import_envpool
from solorl.envs.surroundings import at_home
from solorl.errors import BRINGS, UsageError, did_you_mean, missing_extra, nearest, needs_extra, reason, refuse
from solorl.scripts import use_instead
from solorl.trust import check_module

# Where the simulators of Gymnasium's families come from: module of the entry point -> (module to import, our extra).
EXTRAS = {
    "gymnasium.envs.box2d": ("Box2D", "box2d"),
    "gymnasium.envs.mujoco": ("mujoco", "mujoco"),
    "gymnasium.envs.phys2d": ("jax", "jax"),
    "gymnasium.envs.tabular": ("jax", "jax"),
    "ale_py": ("cv2", "atari"),  # of the wrapper that makes images smaller
}
# Games of several agents: pattern of their ids -> the module that registers them, and packages that they need.
GAMES = {
    "mpe/*": ("solorl.envs.pettingzoo", "pettingzoo", "mpe2"),
    "atari/*": ("solorl.envs.pettingzoo", "pettingzoo", "multi_agent_ale_py", "ale_py"),  # which has the games' files
    "butterfly/*": ("solorl.envs.pettingzoo", "pettingzoo"),
    "sisl/*": ("solorl.envs.pettingzoo", "pettingzoo"),
    "team/simple_*": ("solorl.games.teams", "pettingzoo", "mpe2", "jax"),
    "team/*": ("solorl.games.teams", "jax"),
    "lbf/*": ("solorl.envs.tuple_games", "lbforaging"),
}
# Other families, likewise; those of a package register themselves.
OTHERS = {
    "games/*": ("solorl.games",),
    "text/*": ("solorl.games.text",),
    "*-MinAtar": ("solorl.envs.gymnax", "gymnax"),
    "mjx/*": ("solorl.envs.mjx", "mujoco.mjx"),
    "envpool/*": ("solorl.envs.envpool_env", "envpool"),
    **dict.fromkeys(("ALE/*", "*NoFrameskip-v*"), ("ale_py",) * 2),
    **dict.fromkeys("Fetch* Hand* AntMaze* PointMaze* Adroit*".split(), ("gymnasium_robotics",) * 2),
    **dict.fromkeys(("MiniGrid-*", "BabyAI-*"), ("minigrid",) * 2),
    "MinAtar/*": ("minatar.gym", "minatar"),
    "dm_control/*": ("shimmy",) * 2,
}
FAMILIES: dict[str, tuple[str, ...]] = GAMES | OTHERS
# What pip installs where it is not one of our extras.
INSTALL = {name: name.replace("_", "-") for name in ("gymnasium_robotics", "minatar", "minigrid")}
INSTALL["shimmy"] = "'shimmy[dm-control]'"
# What `Args.env_kind` of a script can say of its --env-id: any environment of Gymnasium or of EnvPool; games of Atari,
# Gymnasium's, EnvPool's or, of several agents, PettingZoo's; of Procgen; games of several agents, all or those written
# in JAX (`solorl.games.teams`); environments written in JAX, and those that EnvPool and Gymnasium have under the same
# id; simulators that step batches of tensors (`solorl.envs.batched`); tasks of text (`solorl.games.text`); boards on
# which two players move in turn (`solorl.games.matches`).
KINDS = "gymnasium envpool atari envpool-atari pettingzoo-atari envpool-procgen agents agents-jax jax batched".split()
KINDS += ["text", "board"]


def _like(env_id: str, ids: Iterable[str]) -> list[str]:
    """The ids that may be meant: that of the same name in any family, with the highest version; else the nearest."""
    ids, parts = list(ids), re.compile(r"(?:.*/)?(.*?)(?:NoFrameskip)?(?:[-_]v(\d+))?", re.IGNORECASE | re.DOTALL)
    found = {one: parts.fullmatch(one).groups("0") for one in [env_id, *ids]}  # type: ignore[union-attr]

    def newest(name: str, within: str = "") -> list[str]:
        same = [one for one in ids if found[one][0].lower() == found[name][0].lower() and one.startswith(within)]
        return [max(same, key=lambda one: (int(found[one][1]), -len(one)))] if same else []

    near = [one for name in nearest(env_id, ids, n=3) for one in newest(name, "".join(name.rpartition("/")[:2]))]
    return newest(env_id) or [*dict.fromkeys(near)]


def _is_there(package: str) -> bool:
    """Whether a package is installed, or a part of one, whose parent may be missing."""
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(package) is not None
    return False


def _register(env_id: str, typed: bool) -> None:
    """Import what registers ids like this one, whose packages `check_module` must allow; UsageError where one of them
    is not installed."""
    import gymnasium as gym

    for registers, *packages in (row for pattern, row in FAMILIES.items() if fnmatch(env_id, pattern)):
        for package in packages:
            check_module(env_id, package, typed)
            if _is_there(package) or (package in INSTALL and env_id in gym.registry):
                continue
            refuse(package in INSTALL, f"{env_id} needs a package: pip install {INSTALL.get(package)}")
            family = "pettingzoo" if registers == "solorl.envs.pettingzoo" else package  # one extra brings all of it
            raise UsageError(needs_extra(env_id, BRINGS[family]))
        if all(map(_is_there, packages)):
            module = importlib.import_module(registers)
            if registers == "minatar.gym" and "MinAtar/Breakout-v1" not in gym.registry:
                module.register_envs()  # its entry point, of which Gymnasium calls none since 1.0


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
        with at_home():
            importlib.import_module(module)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # whatever the code of the module raises
        cannot = f"{env_id} cannot be used: importing the module {module}"
        sentence = " ".join(f"{cannot} fails with {type(error).__name__}: {error}".split())
        if isinstance(error, SystemExit):
            around = "put `if __name__ == '__main__':` around that"
            sentence = f"{cannot} ends the program by sys.exit({error.code!r}); {around}"
        elif isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            hint = did_you_mean(module, [path.stem for path in Path().glob("*.py")])
            sentence = f"there is no environment {env_id}: no module {module} is installed or in this folder{hint}"
        elif isinstance(error, ImportError):
            sentence = missing_extra(env_id, error) or sentence
        raise UsageError(sentence) from error


def check_env_id(env_id: str, typed: bool = True) -> None:
    """Refuse an environment that is not registered or whose simulator is not installed, and one of a module that only
    a run folder names, where it is not `typed` (see `check_module`)."""
    import gymnasium as gym

    module, colon, name = env_id.rpartition(":")
    refuse(not name, f"there is no environment without a name; write `CartPole-v1`, or `{module or 'package'}:Name-v0`")
    try:
        if colon:
            _import_module_of(env_id, module, typed)
        else:
            _register(name, typed)
        spec = gym.spec(name)
    except (gym.error.Error, ImportError) as error:
        if sentence := missing_extra(env_id, error):
            raise UsageError(sentence) from error
        for registers, *packages in FAMILIES.values():
            ours = registers.startswith(("solorl.", "ale_py")) and "envpool" not in packages  # which repeats ids
            if ours and all(map(_is_there, packages)):
                with contextlib.suppress(ImportError):  # without jax
                    importlib.import_module(registers)
        near = [f"{module}{colon}{one}" for one in _like(name, gym.registry)]
        hint = f"; did you mean {' or '.join(near)}?" if near else "; one of another package is `package:Name-v0`"
        if colon:
            where = getattr(sys.modules[module], "__file__", None) or "a folder without code"
            hint = f": the module {module} ({where}) registers no {name}{hint if near else ''}"
        raise UsageError(f"there is no environment {env_id}{hint}") from error
    entry = spec.entry_point if isinstance(spec.entry_point, str) else ""
    for prefix, (module, extra) in EXTRAS.items():
        refuse(entry.startswith(prefix) and importlib.util.find_spec(module) is None, needs_extra(env_id, extra))
    same = [one for one in gym.registry.values() if (one.namespace, one.name) == (spec.namespace, spec.name)]
    if spec is not (newest := max(same, key=lambda one: one.version or 0)):  # some ids have lost their simulators
        try:
            gym.make(env_id).close()
        except ImportError as error:
            raise UsageError(f"{env_id} can no longer be made; take {newest.id}") from error


def check_env_id_of(script: Path, env_id: str, kind: str, typed: bool = True) -> None:
    """Refuse an environment that a script does not take; `kind`, one of KINDS, is what its `Args.env_kind` says.
    `typed`: see `check_env_id`."""
    if kind not in KINDS:
        hint = did_you_mean(str(kind), KINDS) or f"; allowed are {', '.join(KINDS)}"
        raise UsageError(f"{script.name} says env_kind = {kind!r}, which is not known{hint}")
    if kind.startswith("envpool"):
        check_envpool_id(env_id)
    elif kind != "jax" or not is_atari(env_id):
        check_env_id(env_id, typed)

    if found := misfit(env_id, kind, script.name):
        why, *others = found
        advice = "".join(f"{use} for {what}" for what in others if (use := use_instead(script, what)))
        raise UsageError(f"{env_id} {why}{advice}")


def misfit(env_id: str, kind: str, name: str) -> tuple[str, ...]:
    """Why the file `name` of this kind does not take an environment, and what its header may call that; else empty."""
    one, several = f"has one agent, but {name} takes several", f"has several agents, but {name} takes one"
    many = fnmatch(env_id.rpartition(":")[2], "atari/*")
    if kind == "batched" and not is_batched(env_id):
        return "does not step batches of tensors", "other environments"
    if kind == "text" and not fnmatch(env_id, "text/*") and ":" not in env_id:
        return "is not a task of text, as text/reverse-8 is", "other environments"
    if kind == "board" and not is_board(env_id):
        return "is not a board, as games/TicTacToe-v0 is", "several agents" if has_agents(env_id) else "one agent"
    if kind.startswith("agents") and not has_agents(env_id) and ":" not in env_id:
        return one, "one agent"
    if kind == "agents-jax" and not fnmatch(env_id, "team/*"):
        return "is not a game of several agents written in JAX, as team/simple_spread_v3 is", "other games"
    if kind == "jax" and has_agents(env_id):
        return several, "several agents"
    if kind == "jax" and is_atari(env_id):
        return f"is an Atari game, but {name} takes vector observations", "Atari games"
    if kind.endswith("atari") and many != (kind == "pettingzoo-atari") and (many or is_atari(env_id)):
        return (several, "several agents") if many else (one, "one agent")
    if kind.endswith("atari") and not (many or is_atari(env_id)):
        if kind.startswith("envpool") and is_procgen(env_id):
            return "is not an Atari game", "games of Procgen"
        return "is not an Atari game", "vector observations", "other images"
    if kind.endswith("procgen") and not is_procgen(env_id):
        return "is not a game of Procgen", "Atari games" if is_atari(env_id) else "vector observations"
    return ()


def check_envpool_id(env_id: str) -> Any:
    """EnvPool, the module. Refuses an environment that it does not have, and missing packages."""
    refuse(importlib.util.find_spec("envpool") is None, needs_extra(env_id, "envpool"))
    envpool = import_envpool()
    known = envpool.list_all_envs()
    if env_id not in known:
        meant = "".join(f"; did you mean {near}?" for near in _like(env_id, known)[:1])
        raise UsageError(f"EnvPool has no environment {env_id}{meant}")
    # ale_py knows the buttons
    refuse(is_envpool_game(env_id) and importlib.util.find_spec("ale_py") is None, needs_extra(env_id, "atari"))
    return envpool


def is_envpool_game(env_id: str) -> bool:
    """Whether EnvPool has a game of Atari with this id; UsageError where it lacks a library of the system, as Qt."""
    return envpool_has(env_id, "use_fire_reset")


def is_procgen(env_id: str) -> bool:
    """Whether EnvPool has a game of Procgen with this id; UsageError as above."""
    return envpool_has(env_id, "distribution_mode")


def envpool_has(env_id: str, option: str) -> bool:
    """Whether EnvPool has an environment of this id with such an option."""
    if importlib.util.find_spec("envpool") is None:
        return False
    try:
        return hasattr(_envpool_config(import_envpool(), env_id), option)
    except ImportError as error:
        if "Qt" in str(error) and importlib.util.find_spec("PyQt5") is None:
            raise UsageError(needs_extra(env_id, "procgen")) from error
        raise UsageError(f"EnvPool cannot make {env_id}: {reason(error)}") from error


@cache  # it takes EnvPool 0.3 seconds
def _envpool_config(envpool: Any, env_id: str) -> Any:
    """The options of an environment, None where EnvPool does not have it."""
    return envpool.make_spec(env_id).config if env_id in envpool.list_all_envs() else None


def _spec(env_id: str) -> Any:
    """What Gymnasium's registry says of an environment; None where it does not have it."""
    import gymnasium as gym  # here, because the verbs that need no environment start without it

    return gym.registry.get(env_id.rpartition(":")[2])


def is_atari(env_id: str) -> bool:
    """Whether it is a game of Atari, Gymnasium's (or one that is made like those) or EnvPool's."""
    if spec := _spec(env_id):
        return "game" in spec.kwargs
    return not any(fnmatch(env_id.rpartition(":")[2], known) for known in FAMILIES) and is_envpool_game(env_id)


def has_agents(env_id: str) -> bool:
    """Whether it is one of `GAMES`; games of other modules, which `PettingZooEnvs` takes, are not known before."""
    return any(fnmatch(env_id, pattern) for pattern in GAMES)


def is_board(env_id: str) -> bool:
    """Whether it is a board, or one that is registered like those: with `rules`."""
    return "rules" in getattr(_spec(env_id), "kwargs", ())


def is_batched(env_id: str) -> bool:
    """Whether it is a simulator as `solorl.envs.batched` describes: vector environments of Gymnasium and ALE are not,
    nor are boards."""
    entry = _spec(env_id).vector_entry_point
    return entry is not None and not is_board(env_id) and not str(entry).startswith(("gymnasium.", "ale_py."))


def reward_threshold(env_id: str) -> float:
    """The mean return from which on an environment counts as solved; UsageError where its spec does not say it."""
    threshold: Any = getattr(_spec(env_id), "reward_threshold", None)
    refuse(threshold is None, f"{env_id} has no reward threshold for --target-return auto; give a number")
    return float(threshold)
