"""Which files take an environment, the best first: in the order of which.toml, those that it does not name last."""

import importlib.util
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from solorl.envs import openers
from solorl.envs.envpool import EnvPoolVectorEnv
from solorl.envs.guest import try_out
from solorl.envs.ids import check_env_id, envpool_has, is_batched, is_board, is_envpool_game, is_procgen, misfit
from solorl.envs.returns import teams_of
from solorl.envs.spaces import action_kind, obs_kind, wrapper_for
from solorl.scripts import WRAPPED, Facts, file_for, known_facts, script_paths

TABLE = Path(__file__).with_name("which.toml")
NAMES = re.compile(r"`(\w+)`")  # of files, in a cell of it


class Seen(NamedTuple):
    """What an environment is."""

    env_id: str
    obs: Any  # the space, with several agents that of each
    action: Any
    kinds: Sequence[str]  # of `envs.ids.KINDS`: those that have it
    agents: bool = False  # whether there are several
    masks: bool = False  # whether it says which actions are allowed

    @property
    def pair(self) -> tuple[str, str]:
        """The kinds of its spaces as files name them in their headers."""
        kind = action_kind(self.action).partition(" (")[0]
        return obs_kind(self.obs), WRAPPED.get(kind, kind)

    @property
    def given(self) -> list[str]:
        """What it has of what files need (see `Facts.needs`); whether it has costs is not known."""
        goals = {"achieved_goal", "desired_goal"} <= set(getattr(self.obs, "spaces", ()))
        planes = ["MinAtar's planes"] * self.env_id.endswith("-MinAtar")
        return ['info["action_mask"]'] * self.masks + ["goals"] * goals + planes


def look(env_id: str) -> Seen:
    """Open an environment and take some steps. UsageError where it does not exist or does not work."""
    of_envpool = env_id not in gym.registry and (is_envpool_game(env_id) or is_procgen(env_id))
    if not of_envpool:
        check_env_id(env_id)
    if of_envpool or is_batched(env_id):
        envs: Any = EnvPoolVectorEnv(env_id, 1) if of_envpool else gym.make_vec(env_id, 1, "vector_entry_point")
        kinds: list[str] = ["envpool-atari", "envpool-procgen", "jax"] if of_envpool else ["batched"]
        kinds += ["gymnasium", "jax"] if openers(env_id).compiled else []
        return Seen(env_id, envs.single_observation_space, envs.single_action_space, kinds)
    masks, env = try_out(gym.make, env_id, needs_masks=True).mask is not None, gym.make(env_id)
    env.close()
    if teams_of(env):
        obs, action = map(env.get_wrapper_attr, ("agent_observation_space", "agent_action_space"))
        return Seen(env_id, obs, action, ["agents", "pettingzoo-atari", "agents-jax"], True, masks)
    kinds = ["gymnasium", "atari", *["text"] * hasattr(env.unwrapped, "rewards"), *["jax"] * _in_jax(env_id)]
    kinds += ["board"] * is_board(env_id)
    return Seen(env_id, env.observation_space, env.action_space, kinds, False, masks)


def _in_jax(env_id: str) -> bool:
    """Whether `open_envs` has it."""
    if importlib.util.find_spec("jax") is None:
        return False
    from solorl.envs.classic import DYNAMICS

    return env_id in DYNAMICS or bool(openers(env_id).compiled) or envpool_has(env_id, "max_episode_steps")


def takes(facts: Facts, name: str, seen: Seen) -> bool:
    """Whether a file takes an environment; files of images take grey ones, without an axis for channels, too."""
    grey = isinstance(seen.obs, gym.spaces.Box) and seen.obs.dtype == np.uint8 and len(seen.obs.shape) == 2
    return (
        facts.env_kind in seen.kinds
        and (seen.pair in facts.spaces or (grey and ("image", seen.pair[1]) in facts.spaces))
        and facts.needs in ("", "costs", *seen.given)
        and not misfit(seen.env_id, facts.env_kind, name)
        and not (facts.bounded and hasattr(seen.action, "is_bounded") and not seen.action.is_bounded())
    )


def best(seen: Seen) -> dict[str, str]:
    """Name -> what it is for, of every file that takes the environment; empty for those that the table does not name.
    Where there are masks or goals, the files that need them come first."""
    known = {name: known_facts(path) for name, path in script_paths().items()}
    fit, found = [name for name, facts in known.items() if takes(facts, f"{name}.py", seen)], dict[str, str]()
    for what, _, *both in tomllib.loads(TABLE.read_text(encoding="utf-8"))["several" if seen.agents else "one"]:
        for when, files in zip(("cheap", "dear"), both, strict=True):
            for name in filter(fit.__contains__, NAMES.findall(files)):
                found.setdefault(name, f"{what}; steps are {when}")
    found |= {name: "" for name in fit if name not in found}
    return dict(sorted(found.items(), key=lambda one: known[one[0]].needs not in seen.given))


def nearest(seen: Seen) -> tuple[list[str], str]:
    """The nearest files where none takes the environment, and a wrapper that helps, as a phrase."""
    helps = wrapper_for(seen.obs, seen.action).removeprefix("; ")
    if "Flatten" in helps:  # then these take it
        return list(best(seen._replace(obs=gym.spaces.flatten_space(seen.obs))))[:2], helps
    return re.findall(r"(\w+)\.py", file_for(Path(), *seen.pair)), helps


def in_words(space: Any) -> str:
    """What a space has, as a phrase."""
    if isinstance(space, gym.spaces.Discrete):
        return f"one of {space.n}" + (f", from {space.start} on" if space.start else "")
    if isinstance(space, gym.spaces.Box):
        return f"{' x '.join(map(str, space.shape))} {'bytes' if space.dtype == np.uint8 else 'numbers'}"
    parts = space.spaces if isinstance(space, gym.spaces.Dict) else dict(enumerate(getattr(space, "spaces", ()), 1))
    return "; ".join(f"{name}: {in_words(part)}" for name, part in parts.items()) or str(space)
