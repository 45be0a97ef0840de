"""Environments whose state can be saved: by replaying the running episode.

Gymnasium's simulators draw every random number from one generator and are otherwise deterministic, so the state of an
episode is fully given by the generator's state before its reset and the actions since. `Recorder` notes both; `restore`
resets and replays, and compares the observation it arrives at. Where that differs, or where the environments are of
another kind than `SyncVectorEnv` or `AsyncEnvs`, which do this in their own processes, the episode restarts and the run
says so.

The emulator of Atari games has a generator of its own; so its state before the reset, which it hands out as bytes, is
noted, too. Its state in the middle of an episode would not do: it lacks the action of the last frame, which a sticky
action repeats.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils.env_checker import data_equivalence

from solorl.envs.async_envs import AsyncEnvs
from solorl.envs.guest import guest_in
from solorl.envs.spaces import as_arrays, batch_of
from solorl.envs.surroundings import RANDOM

RECORDED: Any = gym.vector.SyncVectorEnv | AsyncEnvs


class Recorder(gym.Wrapper):
    """Notes how the running episode came about. Observations pass through as copies, for an environment may write each
    into the same array, and the vector environment keeps the last one of an episode while the next one begins."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.start: dict[str, Any] = {}
        self.actions: list[Any] = []
        self.obs: Any = None

    def reset(self, *, seed=None, options=None):
        """Reset the environment, noting the seed or else the states of its generators."""
        game: Any = self.unwrapped
        self.start = {"seed": seed, "generator": None, "options": options, "random": _own(self.env).get(RANDOM)}
        if seed is None:
            self.start["generator"] = game.np_random.bit_generator.state
            if hasattr(game, "ale"):
                self.start["emulator"] = np.frombuffer(game.clone_state(include_rng=True).serialize(), np.uint8)
        self.actions = []
        obs, info = self.env.reset(seed=seed, options=options)
        self.obs = _copied(obs)
        return self.obs, info

    def step(self, action):
        """Step the environment, noting the action."""
        self.actions.append(_copied(action) if isinstance(action, (tuple, Mapping)) else np.array(action))
        obs, *result = self.env.step(action)
        self.obs = _copied(obs)
        return self.obs, *result

    def replay(self, start: dict[str, Any], actions: Any) -> bool:
        """Bring the environment to the state after `actions`, as `_columns` made them, since the noted reset; False
        where its episode ends before the last of them, or one of them raises."""
        game: Any = self.unwrapped
        if start.get("random"):
            _own(self.env)[RANDOM] = start["random"]
        if start["generator"] is not None:
            game.np_random.bit_generator.state = start["generator"]
        if "emulator" in start:
            import ale_py

            game.restore_state(ale_py.ALEState(start["emulator"].tobytes()))
        self.reset(seed=start["seed"], options=start["options"])
        left = iter(actions if isinstance(actions, np.ndarray) else itertools.chain(*actions))
        with suppress(Exception):  # of its code, which goes another way
            any(any(self.step(action)[2:4]) for action in left)  # up to the end of the episode
            return next(left, None) is None
        return False


def _own(env: gym.Env) -> dict[str, Any]:
    """The states that a guest has of its own; empty where it has none."""
    return getattr(guest_in(env), "own", None) or {}


def _copied(obs: Any) -> Any:
    """An observation that no later step changes; arrays of other libraries (JAX's) as NumPy's."""
    if hasattr(obs, "__array__") and not isinstance(obs, np.generic):
        return np.array(obs)
    return copy.deepcopy(obs)


def _columns(actions: Sequence[Any]) -> Any:
    """Actions one after the other as an array (steps, *action_shape), or as a list of such arrays where their type
    changes: a step with float64 may end otherwise than one with float32. Those of `Tuple` and `Dict` spaces as they
    are, in a list of one list."""
    if actions and isinstance(actions[0], (tuple, Mapping)):
        return [list(actions)]
    parts = [np.array(list(part)) for _, part in itertools.groupby(actions, lambda action: action.dtype)]
    return parts[0] if len(parts) == 1 else parts


def is_vector_env(part: Any) -> bool:
    """Whether `part` is a Gymnasium vector environment."""
    return isinstance(part, gym.vector.VectorEnv)


def record(envs: Any) -> None:
    """Wrap each environment of a `SyncVectorEnv` or `AsyncEnvs` in a `Recorder`, in place; other kinds stay as they
    are."""
    if isinstance(envs, AsyncEnvs):
        envs.call("wrap", Recorder)
    elif isinstance(envs, gym.vector.SyncVectorEnv):
        envs.envs = [env if isinstance(env, Recorder) else Recorder(env) for env in envs.envs]


def _each(envs: Any, function: Callable[..., Any], *inputs: Sequence[Any]) -> list[Any]:
    """What `function(env, ...)` returns for each environment, in the process where that is."""
    if isinstance(envs, AsyncEnvs):
        return envs.each(function, *inputs)
    return [function(env, *own) for env, *own in zip(envs.envs, *inputs, strict=True)]


def capture(envs: Any) -> dict[str, Any]:
    """How each environment got where it is, and the states of the action spaces' generators."""
    spaces = envs.action_space, envs.single_action_space
    tree: dict[str, Any] = {"spaces": [space.np_random.bit_generator.state for space in spaces]}
    if not isinstance(envs, RECORDED):
        return tree
    autoreset = np.array(getattr(envs, "_autoreset_envs", np.zeros(envs.num_envs, bool)))
    return tree | {"autoreset": autoreset, "envs": _each(envs, _state_of)}


def _state_of(env: Recorder) -> dict[str, Any]:
    return {"start": env.start, "actions": _columns(env.actions), "obs": env.obs}


def restore(envs: Any, tree: dict[str, Any]) -> list[str]:
    """Bring every environment to its captured state; returns a sentence where the episodes restart instead.

    Raises ValueError where there were more or fewer environments.
    """
    for space, state in zip((envs.action_space, envs.single_action_space), tree["spaces"], strict=True):
        space.np_random.bit_generator.state = state
    envs._restarted = range(envs.num_envs)
    if not isinstance(envs, RECORDED):
        return [f"the state of {type(envs).__name__} cannot be saved, so its running episodes restart"]
    if len(tree["envs"]) != envs.num_envs:
        raise ValueError(f"there were {len(tree['envs'])} environments, not {envs.num_envs}")
    envs._restarted = restarted = [i for i, back in enumerate(_each(envs, _bring_back, tree["envs"])) if not back]
    if isinstance(envs, gym.vector.SyncVectorEnv):
        envs._env_obs = [env.obs for env in envs.envs]  # type: ignore[attr-defined]
        envs._autoreset_envs = np.array(tree["autoreset"], bool).reshape(envs.num_envs)
    what = f"the simulator did not replay exactly, so the running episodes of environments {restarted} restart"
    return [what] if restarted else []


def _bring_back(env: Recorder, saved: dict[str, Any]) -> bool:
    """Bring an environment to its captured state; False where its episode restarts instead."""
    there = env.replay(saved["start"], saved["actions"])
    if not (there and data_equivalence(as_arrays(env.obs), as_arrays(saved["obs"]), exact=True)):
        env.reset()
        return False
    return True


def restarted(envs: Any) -> Iterable[int]:
    """The environments whose episodes `restore` could not continue."""
    return getattr(envs, "_restarted", ())


def observations(envs: Any) -> Any:
    """The current observations of all environments, (num_envs, *obs_shape), after `restore`: those it has brought back,
    or, where the state could not be saved, those of new episodes."""
    if not isinstance(envs, RECORDED):
        return envs.obs if hasattr(envs, "load_state_dict") else envs.reset()[0]
    return batch_of(envs.single_observation_space, _each(envs, attrgetter("obs")))
