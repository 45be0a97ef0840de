"""The boundary to environments. An environment is a guest that does odd things: it may be wrong, but it must not make a
training wrong without a word.

    make = hosted(make_env, env_id)  # a function that gives the environment as a `Guest`

`try_out` finds the usual mistakes in one reset and one step of one more environment. It also sees what the environment
changes of the process; what can be the environment's own (`surroundings.OWN`), it then gets of its own, which take the
place of the process's during each of its calls. All others pay nothing for that. Of `info` only what the library needs
is read, and what `env.metadata["numbers"]` lists.
"""

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

import gymnasium as gym
import numpy as np

from solorl.envs.returns import teams_of
from solorl.envs.surroundings import OWN, PUT_BACK, RANDOM, at_home, bring_back, now, plain, random_states, seeded
from solorl.envs.vector import Masked
from solorl.errors import UsageError, quit_with
from solorl.terminal import warn

READ = ("action_mask", "lives", "alive", "state")  # of `info`; the last two are those of games of several agents
NUMBER, FLAG = "biuf", "biu"  # kinds of NumPy's types
MASK_STEPS = 100  # in which an environment has to show its first mask
RESET = "def reset(self, *, seed=None, options=None)"


class Manners(NamedTuple):
    """What `try_out` has seen of an environment."""

    changes: tuple[str, ...] = ()  # of the process, see `surroundings.STATES`
    mask: tuple[int, ...] | None = None  # the shape of its action_mask; None: it gives none


KNOWN: dict[str, Manners] = {}  # by the id
SAID: set[str] = set()


class Guest(Masked):
    """An environment at the boundary. What it does wrong is a UsageError with a sentence that names it; where
    `ends`, the program ends with the sentence and exit code 1.

    `wrong` is the first reward, or first or last observation of an episode, that is NaN or infinite, as a phrase; to
    look at every observation would take too long, `look` does so with the current one. `own` are the states of the
    process that it has of its own, None where it shares them.
    """

    own: dict[str, Any] | None = None
    wrong = ""
    now: tuple[Any, int] = (None, 0)  # current observation, steps of the episode; a tuple is not saved in checkpoints

    def __init__(self, make_env: Callable[[], Any], env_id: str, manners: Manners | None = None, ends: bool = False):
        self.env_id, self.terms = env_id, (KNOWN.get(env_id, Manners()) if manners is None else manners, ends)
        self.home, drawn = now(OWN[1:]), random_states()
        env = self._watched(make_env)
        bring_back({RANDOM: drawn})
        if not isinstance(env, gym.Env):
            self.fault(f"make_env gives a {type(env).__name__}, not an environment of Gymnasium")
        super().__init__(env)
        if self.terms[0].changes and self.own is None:
            self.own = now(OWN)
        self.agents = tuple(self.unwrapped.agents) if teams_of(env) else ()  # type: ignore[attr-defined]
        box = isinstance(env.observation_space, gym.spaces.Box)
        self.shape = env.observation_space.shape if box else None
        self.reads = (*READ, *env.metadata.get("numbers", ()))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.Env.reset`."""
        if self.terms[0].changes and self.own and seed is not None:
            self.own[RANDOM] = seeded(seed)
        obs, info = self._watched(self.env.reset, seed=seed, options=options)
        self.now = (obs, 0)
        self.look()
        return obs, self._read(info)

    def step(self, action: Any) -> Any:
        """See `gymnasium.Env.step`."""
        obs, reward, terminated, truncated, info = self._visit(self.env.step, action)
        self.now = (obs, self.now[1] + 1)
        if not (isinstance(reward, float) and math.isfinite(reward)):
            reward = self._reward(reward)
        if not (isinstance(terminated, bool | np.bool_) and isinstance(truncated, bool | np.bool_)):
            ends = ("terminated", terminated), ("truncated", truncated)
            terminated, truncated = (bool(self._array(f"{name} of its step", end, FLAG)) for name, end in ends)
        if terminated or truncated:
            self.look()
        return obs, reward, terminated, truncated, self._read(info)

    def render(self) -> Any:
        """See `gymnasium.Env.render`."""
        return self._visit(self.env.render)

    def look(self) -> str:
        """`wrong`, after a look at the current observation."""
        obs, length = self.now
        if not self.wrong and (value := not_finite(obs)) is not None:
            self.wrong = f"the observation {f'after {length} steps' if length else 'of a reset'} is {value}"
        return self.wrong

    def fault(self, what: str) -> NoReturn:
        """Say what is wrong with the environment."""
        if self.terms[1]:
            quit_with(f"{self.env_id}: {what}; --resume continues from the last checkpoint", 1)
        raise UsageError(f"{self.env_id}: {what}")

    def _visit(self, call: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """What a call of the environment's code returns."""
        home = now(OWN) if self.own else {}
        bring_back(self.own or {})
        try:
            return call(*inputs, **named)
        except SystemExit as end:
            self.fault(f"{getattr(call, '__name__', 'its code')} ends the program by sys.exit({end.code!r})")
        except UsageError as error:
            self.fault(str(error).removeprefix(f"{self.env_id}: "))
        finally:
            if home:
                self.own = now(OWN)
                bring_back(home)

    def _watched(self, call: Callable[..., Any], **named: Any) -> Any:
        """The same, after which the process is as it was; what was changed is the environment's own from then on."""
        before = now(PUT_BACK) | self.home  # what a step has changed, too
        result = self._visit(call, **named)
        after = now(PUT_BACK)
        if after != before:
            changed = tuple(name for name in PUT_BACK if after[name] != before[name])
            if self.own is None and any(name in OWN for name in changed):
                self.own = now(OWN)
            bring_back(before)
            tell(self.env_id, changed)
        return result

    def _read(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """What the library reads of `info`, with the mask, in an array of its own, if the environment is known to give
        any: then all is allowed where it gives none."""
        obs, length = self.now
        if self.shape is not None and (shape := getattr(obs, "shape", self.shape)) != self.shape:
            what = f"the observation of its {'step' if length else 'reset'} has shape {shape}"
            self.fault(f"{what}, but its space has {self.shape}")
        kept = {name: info[name] for name in self.reads if name in info} if info else {}
        shape = self.terms[0].mask
        mask = kept.pop("action_mask", None)
        self.mask = None if shape is None else np.ones(shape, bool)
        if mask is not None:
            self.mask = np.array(mask, bool)
            if shape not in (None, self.mask.shape):
                self.fault(f"its action_mask has shape {self.mask.shape} after {length} steps, not {shape}")
        for name in self.reads[len(READ) :]:
            kept[name] = float(self._array(f"{name} of its info", info.get(name, math.nan), NUMBER))
        return kept if self.mask is None else kept | {"action_mask": self.mask}

    def _reward(self, reward: Any) -> Any:
        """A reward as a float, of several agents an array; NaN and infinity are noted."""
        found = self._array("the reward of its step", reward, NUMBER, (len(self.agents),) if self.agents else ())
        for place in () if self.wrong else np.flatnonzero(~np.isfinite(found)):
            whose = f" of {self.agents[place]}" if self.agents else ""
            self.wrong = f"the reward{whose} is {found.flat[place]} in step {self.now[1]} of an episode"
            break
        return found if self.agents else float(found)

    def _array(self, what: str, value: Any, kinds: str, shape: tuple[int, ...] = ()) -> np.ndarray:
        """A value as an array of this shape, whose type is of these kinds."""
        with contextlib.suppress(ValueError):  # ragged lists
            array = np.asarray(value)
            if array.shape == shape and array.dtype.kind in kinds:
                return array
            if array.dtype.kind in kinds:
                one = f"one number for each of {len(self.agents)} agents" if shape else "one number"
                self.fault(f"{what} must be {one}, but is an array of shape {array.shape}")
        self.fault(f"{what} must be {'a number' if kinds == NUMBER else 'True or False'}, but is {value!r:.60}")


def say_once(sentence: str) -> None:
    """Say it, of several ranks the first, and not again."""
    if sentence not in SAID and os.environ.get("RANK", "0") in ("0", ""):
        SAID.add(sentence)
        warn(sentence)


def tell(env_id: str, changed: tuple[str, ...]) -> None:
    """Say what an environment changes of the process."""
    if changed:
        verb = "seeds or draws from" if changed == (RANDOM,) else "changes"
        what = "it gets its own, next to the training's" if {*changed} & {*OWN} else "what it changed is put back"
        say_once(f"{env_id} {verb} {' and '.join(changed)}: {what}")


def hosted(make_env: Callable[..., Any], env_id: str, ends: bool = False, **named: Any) -> Callable[[], Guest]:
    """A function that gives the environment `make_env(env_id, **named)` as a `Guest`. Another process can have it."""
    return partial(Guest, partial(make_env, env_id, **named), env_id, KNOWN.get(env_id, Manners()), ends)


def looks(envs: Any) -> list[str]:
    """What is NaN or infinite in each environment side by side, see `Guest.look`; empty where nothing is known."""
    found = map(guest_in, envs.envs if isinstance(envs, gym.vector.SyncVectorEnv) else ())
    return [guest.look() if guest else "" for guest in found]


def wrong(envs: Any) -> str:
    """The first environment that gave NaN or infinite numbers, as a phrase; empty where none is known to."""
    told = envs.looks() if hasattr(envs, "looks") else looks(envs.unwrapped)  # in other processes, or here
    return next((f"in environment {i} {what}" for i, what in enumerate(told) if what), "")


def guest_in(env: Any) -> Guest | None:
    """The guest below the wrappers of the library."""
    while not isinstance(env, Guest) and isinstance(env, gym.Wrapper):
        env = env.env
    return env if isinstance(env, Guest) else None


def not_finite(obs: Any) -> float | None:
    """The first number of an observation that is NaN or infinite; None where all are finite."""
    if isinstance(obs, (Mapping, tuple)):
        found = map(not_finite, obs.values() if isinstance(obs, Mapping) else obs)
        return next((value for value in found if value is not None), None)
    array = np.asarray(obs)
    wrong = array[~np.isfinite(array)].tolist() if array.dtype.kind == "f" else []
    return wrong[0] if wrong else None


def random_action(space: Any, info: Mapping[str, Any]) -> Any:
    """A random action, one that the mask of a `Discrete` space allows, or that of a `MultiDiscrete` one: all parts in a
    row, or a row for each part (of each agent)."""
    mask = info.get("action_mask")
    if mask is None or not isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        return space.sample()
    mask = np.asarray(mask, np.int8)
    if isinstance(space, gym.spaces.Discrete):
        return space.sample(mask)
    if space.nvec.ndim > 1:
        return space.sample()
    parts = np.split(mask, np.cumsum(space.nvec)[:-1]) if mask.ndim == 1 else mask
    return space.sample(mask=tuple(part[:n] for part, n in zip(parts, space.nvec, strict=True)))


# ---------------------------------------------------------------------- before a training
def refuse_statistics(env: Any, env_id: str) -> None:
    """UsageError where a wrapper, also of vector environments, has running statistics."""
    while isinstance(env, gym.Wrapper | gym.vector.VectorWrapper):
        if any(type(part).__name__ == "RunningMeanStd" for part in vars(env).values()):
            what = f"the wrapper {type(env).__name__} has running statistics, which no evaluation and no checkpoint has"
            instead = "ppo_normalized.py and ppo_continuous_action.py have a normaliser that is a part of the agent"
            raise UsageError(f"{env_id}: {what}; {instead}")
        env = env.env


def try_out(make_env: Callable[..., Any], env_id: str, needs_masks: bool = False) -> Manners:
    """Make an environment, reset it and take a step, with `needs_masks` until it gives the first mask; returns what was
    seen, which `KNOWN` has from then on. UsageError where it does not have Gymnasium's interface, or an observation is
    not of its space, or a number is not finite."""
    with at_home(), contextlib.closing(Guest(partial(make_env, env_id), env_id, Manners())) as env:
        env.own = env.own or now(OWN)
        refuse_statistics(env, env_id)
        code, space = env.unwrapped, env.action_space
        space.seed(0)
        known = inspect.signature((code.game.unwrapped if env.agents else code).reset).parameters.values()  # type: ignore[attr-defined]
        for name in ("seed", "options"):
            if not any(each.name == name or each.kind is each.VAR_KEYWORD for each in known):
                raise UsageError(f"{env_id}: its reset takes no {name}; write `{RESET}`")
        begun = env._visit(code.reset, seed=0)
        if not (isinstance(begun, tuple) and len(begun) == 2 and isinstance(begun[1], Mapping)):
            raise UsageError(f"{env_id}: its reset must return two values, obs and a dict info")
        taken = env._visit(code.step, random_action(code.action_space, begun[1]))
        if len(taken) != 5:
            what = "must return five values, obs, reward, terminated, truncated, info"
            raise UsageError(f"{env_id}: its step {what}, but returns {len(taken)}")
        drawn = plain(env.own[RANDOM])  # what the first calls import may draw, too
        obs, info = env.reset(seed=0)
        _check_obs(f"{env_id}: the observation of its reset", env.observation_space, obs)
        for step in range(MASK_STEPS if needs_masks else 1):
            if step and env.mask is not None:
                break
            obs, _, terminated, truncated, info = env.step(random_action(space, info))
            _check_obs(f"{env_id}: the observation of its step", env.observation_space, obs)
            if env.wrong and step == 0:
                raise UsageError(f"{env_id}: {env.wrong}")
            mask = env.mask
            if terminated or truncated:
                obs, info = env.reset()
        env.reset()
        changes = [name for name in OWN[1:] if env.own[name] != env.home[name]]
        changes += [RANDOM] if plain(env.own[RANDOM]) != drawn else []
    KNOWN[env_id] = manners = Manners(tuple(changes), None if mask is None else mask.shape)
    tell(env_id, manners.changes)
    return manners


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
