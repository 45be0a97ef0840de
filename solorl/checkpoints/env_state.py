"""Environments whose state can be saved: by replaying the running episode.

Gymnasium's simulators draw every random number from one generator and are otherwise deterministic, so the state of an
episode is fully given by the generator's state before its reset and the actions since. `Recorder` notes both; `restore`
resets and replays, and compares the observation it arrives at. Where that differs, or where the environments are of
another kind than `SyncVectorEnv` or `AsyncEnvs`, which do this in their own processes, the episode restarts and the run
says so.

The Arcade Learning Environment hands out its state, with its generator, as bytes: no replay is needed. Then the state
of the wrappers around it is saved, too: their attributes that are numbers, arrays or queues of arrays. The bytes lack
one thing, the action of the last frame, which a sticky action repeats; `_last_action` finds it out.
"""

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils.env_checker import data_equivalence

from solorl.envs.async_envs import AsyncEnvs
from solorl.envs.guest import guest_in
from solorl.envs.spaces import as_arrays
from solorl.envs.surroundings import RANDOM

ASKED = 12  # frames whose actions are noted; the chance that all were sticky, so that an earlier one continues, is 6e-8
BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")  # all that NumPy has


def generator_in(state: Any) -> np.random.Generator:
    """A generator in the saved state. Raises ValueError unless it names one of NumPy's: the name comes from a file and
    is looked up among NumPy's functions, so any other could call anything."""
    name = state.get("bit_generator") if isinstance(state, dict) else None
    if name not in BIT_GENERATORS:
        raise ValueError(f"NumPy has no bit generator {name!r:.80}; it has {', '.join(BIT_GENERATORS)}")
    generator = np.random.Generator(getattr(np.random, name)())
    generator.bit_generator.state = state
    return generator


class Recorder(gym.Wrapper):
    """Notes how the running episode came about. Observations pass through as copies, for an environment may write each
    into the same array, and the vector environment keeps the last one of an episode while the next one begins."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.start: dict[str, Any] = {}
        self.actions: list[Any] = []
        self.obs: Any = None
        self.hands_out_state = hasattr(getattr(env.unwrapped, "ale", None), "cloneState")  # as Atari's emulator does
        if self.hands_out_state:
            _note_actions(env.unwrapped)

    def reset(self, *, seed=None, options=None):
        """Reset the environment, noting the seed or else the state of its generator."""
        generator = None if seed is not None else self.env.unwrapped.np_random.bit_generator.state
        self.start = {"seed": seed, "generator": generator, "options": options, **_own(self.env)}
        self.actions = []
        obs, info = self.env.reset(seed=seed, options=options)
        self.obs = _copied(obs)
        return self.obs, info

    def step(self, action):
        """Step the environment, noting the action."""
        if not self.hands_out_state:
            self.actions.append(_copied(action) if isinstance(action, (tuple, Mapping)) else np.array(action))
        obs, *result = self.env.step(action)
        self.obs = _copied(obs)
        return self.obs, *result

    def replay(self, start: dict[str, Any], actions: Any) -> None:
        """Bring the environment to the state after `actions` (steps, *action_shape) since the noted reset; of `Tuple`
        and `Dict` spaces a tuple or dict of such arrays."""
        _give(self.env, start)
        if start["generator"] is not None:
            self.env.unwrapped.np_random = generator_in(start["generator"])
        self.reset(seed=start["seed"], options=start["options"])
        for action in _rows(actions):
            self.step(action)


def _own(env: gym.Env) -> dict[str, Any]:
    """The random states that a guest has of its own."""
    guest = guest_in(env)
    return {"random": guest.own[RANDOM]} if guest and guest.own else {}


def _give(env: gym.Env, saved: Mapping[str, Any]) -> None:
    """Give them back to the guest."""
    if (guest := guest_in(env)) and guest.own and "random" in saved:
        guest.own[RANDOM] = saved["random"]


def _note_actions(game: Any) -> None:
    """From now on, the actions asked of an Atari game stand in `game.asked`, the newest last."""
    step, game.asked = game.step, deque(getattr(game, "asked", ()), maxlen=ASKED)

    def noting(action):
        game.asked.append(int(game._action_set[action].value))
        return step(action)

    game.step = noting


def _ask(game: Any, action: int, state: Any) -> None:
    """Make `action` that of the last frame, and the rest of the emulator as in `state`."""
    import ale_py

    for _ in range(30):  # each is sticky at most once in four times
        game.ale.act(ale_py.Action(action))
    game.restore_state(state)


def _last_action(game: Any, state: Any) -> int:
    """The action of the last frame: of those asked for, the one with which the game continues as it does now."""
    import ale_py

    def later() -> bytes:
        for _ in range(ASKED):
            game.ale.act(ale_py.Action.NOOP)
        return bytes(game.clone_state(include_rng=True).serialize())

    found = list(dict.fromkeys(reversed(game.asked))) or [0]
    if len(found) > 1:
        goes_on = later()
        for action in found:
            _ask(game, action, state)
            if later() == goes_on:
                break
        _ask(game, action, state)
        return action
    return found[0]


def _wrappers(env: gym.Env) -> list[tuple[gym.Wrapper, dict[str, Any]]]:
    """The wrappers around an environment that have a state, with it, the outermost first."""
    found = []
    while isinstance(env, gym.Wrapper):
        if own := {name: value for name, value in vars(env).items() if _is_plain(value)}:
            found.append((env, own))
        env = env.env
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, deque):
        return all(isinstance(one, np.ndarray) for one in value)
    return isinstance(value, (bool, int, float, np.ndarray))


def _emulator_state(env: gym.Env) -> dict[str, Any]:
    """The state of an Atari game and of the wrappers around it."""
    state = env.unwrapped.clone_state(include_rng=True)  # type: ignore[attr-defined]
    wrappers = [own for _, own in _wrappers(env)]
    return {
        "emulator": np.frombuffer(state.serialize(), np.uint8),
        "last_action": _last_action(env.unwrapped, state),
        "generator": env.unwrapped.np_random.bit_generator.state,
        "wrappers": [{name: list(x) if isinstance(x, deque) else x for name, x in own.items()} for own in wrappers],
        **_own(env),
    }


def _restore_emulator(env: gym.Env, tree: dict[str, Any]) -> None:
    """Bring an Atari game and its wrappers to a state of `_emulator_state`. ValueError where it does not fit."""
    import ale_py

    last = tree["last_action"]
    env.reset(seed=0)
    wrappers = _wrappers(env)
    states = [saved for saved in tree["wrappers"] if saved]
    if [saved.keys() for saved in states] != [own.keys() for _, own in wrappers]:
        raise ValueError("it is of a game with other wrappers")
    for (wrapper, own), saved in zip(wrappers, states, strict=True):
        for name, value in saved.items():
            if isinstance(now := own[name], deque):
                now.extend(value)
            elif isinstance(now, np.ndarray):
                now[...] = value
            else:
                setattr(wrapper, name, value)
    env.unwrapped.np_random = generator_in(tree["generator"])
    state = ale_py.ALEState(np.asarray(tree["emulator"], np.uint8).tobytes())
    env.unwrapped.asked.append(last)  # type: ignore[attr-defined]
    _ask(env.unwrapped, last, state)
    _give(env, tree)


def _copied(obs: Any) -> Any:
    """An observation that no later step changes; arrays of other libraries (JAX's) as NumPy's."""
    if hasattr(obs, "__array__") and not isinstance(obs, np.generic):
        return np.array(obs)
    return copy.deepcopy(obs)


def _columns(actions: Sequence[Any]) -> Any:
    """Actions one after the other as an array (steps, *action_shape), or as a list of such arrays where their type
    changes: a step with float64 may end otherwise than one with float32. See `Recorder.replay`."""
    first = actions[0] if actions else None
    if isinstance(first, tuple):
        return tuple(_columns([action[i] for action in actions]) for i in range(len(first)))
    if isinstance(first, Mapping):
        return {name: _columns([action[name] for action in actions]) for name in first}
    parts = [np.array(list(part)) for _, part in itertools.groupby(actions, lambda action: np.asarray(action).dtype)]
    return parts if len(parts) > 1 else parts[0] if parts else np.array([])


def _rows(columns: Any) -> Iterable[Any]:
    """The actions one after the other from what `_columns` has made of them."""
    if isinstance(columns, tuple):
        return zip(*map(_rows, columns), strict=True)
    if isinstance(columns, Mapping):
        return [dict(zip(columns, row, strict=True)) for row in zip(*map(_rows, columns.values()), strict=True)]
    return itertools.chain(*columns) if isinstance(columns, list) else columns


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


def _recorded(envs: Any) -> bool:
    return isinstance(envs, gym.vector.SyncVectorEnv | AsyncEnvs)


def _each(envs: Any, function: Callable[..., Any], *inputs: Sequence[Any]) -> list[Any]:
    """What `function(env, ...)` returns for each environment, in the process where that is."""
    if isinstance(envs, AsyncEnvs):
        return envs.each(function, *inputs)
    return [function(env, *own) for env, *own in zip(envs.envs, *inputs, strict=True)]


def _spaces(envs: Any) -> list[gym.Space]:
    return [envs.action_space, envs.single_action_space]


def capture(envs: Any) -> dict[str, Any]:
    """How each environment got where it is, and the states of the action spaces' generators."""
    tree: dict[str, Any] = {"spaces": [space.np_random.bit_generator.state for space in _spaces(envs)]}
    if not _recorded(envs):
        return tree
    autoreset = np.array(getattr(envs, "_autoreset_envs", np.zeros(envs.num_envs, bool)))
    return tree | {"autoreset": autoreset, "envs": _each(envs, _state_of)}


def _state_of(env: Recorder) -> dict[str, Any]:
    if env.hands_out_state:
        return {"obs": env.obs, **_emulator_state(env.env)}
    return {"start": env.start, "actions": _columns(env.actions), "obs": env.obs}


def restore(envs: Any, tree: dict[str, Any]) -> list[str]:
    """Bring every environment to its captured state; returns a sentence where the episodes restart instead.

    Raises ValueError where there were more or fewer environments.
    """
    for space, state in zip(_spaces(envs), tree["spaces"], strict=True):
        space.np_random.bit_generator.state = state
    envs._restarted = range(envs.num_envs)
    if not _recorded(envs):
        return [f"the state of {type(envs).__name__} cannot be saved, so its running episodes restart"]
    if len(tree["envs"]) != envs.num_envs:
        raise ValueError(f"there were {len(tree['envs'])} environments, not {envs.num_envs}")
    came_back = _each(envs, _bring_back, tree["envs"])
    envs._restarted = restarted = [i for i, back in enumerate(came_back) if not back]
    if isinstance(envs, gym.vector.SyncVectorEnv):
        envs._env_obs = [env.obs for env in envs.envs]  # type: ignore[attr-defined]
        envs._autoreset_envs = np.array(tree["autoreset"], bool).reshape(envs.num_envs)
    if restarted:
        return [f"the simulator did not replay exactly, so the running episodes of environments {restarted} restart"]
    return []


def _bring_back(env: Recorder, saved: dict[str, Any]) -> bool:
    """Bring an environment to its captured state; False where its episode restarts instead."""
    if env.hands_out_state:
        _restore_emulator(env.env, saved)
        env.obs = saved["obs"]
        return True
    env.replay(saved["start"], saved["actions"])
    came_back = data_equivalence(as_arrays(env.obs), as_arrays(saved["obs"]), exact=True)
    if not came_back:
        env.reset()
    return came_back


def restarted(envs: Any) -> Iterable[int]:
    """The environments whose episodes `restore` could not continue."""
    return getattr(envs, "_restarted", ())


def observations(envs: Any) -> Any:
    """The current observations of all environments, (num_envs, *obs_shape), after `restore`: those it has brought back,
    or, where the state could not be saved, those of new episodes."""
    if not _recorded(envs):
        return envs.obs if hasattr(envs, "load_state_dict") else envs.reset()[0]
    space, obs = envs.single_observation_space, _each(envs, attrgetter("obs"))
    empty: Any = gym.vector.utils.create_empty_array(space, len(obs))
    return gym.vector.utils.concatenate(space, obs, empty)
