"""The boundary to environments. An environment is a guest that does odd things: it may be wrong, but it must not make a
training wrong without a word.

    make = hosted(make_env, env_id)  # a function that gives the environment as a `Guest`

`try_out` finds the usual mistakes in one reset and one step of one more environment. It also sees what the environment
changes of the process; what can be the environment's own (`surroundings.OWN`) it then gets of its own, which takes the
place of the process's during each of its calls. All others pay nothing for that. Of `info` only what the library needs
is read: masks, lives, success and cost (`returns.DECLARED`), and the numbers that `env.metadata["numbers"]` lists.
"""

import contextlib
import copy
import inspect
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

import gymnasium as gym
import numpy as np

from solorl.envs.returns import declared, number, teams_of
from solorl.envs.spaces import not_finite
from solorl.envs.surroundings import LIGHT, OWN, RANDOM, at_home, bring_back, now, plain, seeded, undisturbed
from solorl.envs.vector import Masked, VectorEnvs
from solorl.errors import UsageError, quit_with, refuse, told
from solorl.terminal import warn

READ = ("action_mask", "lives", "alive", "state")  # of `info`; the last two are those of games of several agents
FLAGS = (bool, int, np.generic, np.ndarray)  # what `terminated` and `truncated` can be
MASK_STEPS = 100  # in which an environment has to show its first mask


class Manners(NamedTuple):
    """What `try_out` has seen of an environment."""

    changes: tuple[str, ...] = ()  # of the process, see `surroundings.OWN`
    mask: tuple[int, ...] | None = None  # the shape of its action_mask; None: it gives none
    agents: bool = False  # whether there are several
    short: bool = False  # whether its reset takes no seed of more than 32 bits


KNOWN: dict[str, Manners] = {}  # by the id
SAID: set[str] = set()


class Guest(Masked):
    """An environment at the boundary. What it does wrong is a UsageError with a sentence that names it; where
    `ends` is the id of this process, the program ends with the sentence and exit code 1. What its construction draws
    from the global generators depends on `seed` only.

    `wrong` is the first reward, or first or last observation of an episode, that is NaN or infinite, as a phrase; to
    look at every observation would take too long, `look` does so with the current one. `own` are the states of the
    process that it has of its own, None where it shares them.
    """

    own: dict[str, Any] | None = None
    wrong = ""
    now: tuple[Any, int] = (None, 0)  # current observation, steps of the episode

    def __init__(self, make_env: Callable[[], gym.Env], env_id: str, manners: Manners, ends: int = 0, seed: int = 0):
        self.env_id, self._manners, self._ends, self._home = env_id, manners, ends, dict[str, Any]()
        with undisturbed():
            bring_back({RANDOM: seeded(2**63 + seed)})  # to build it; seeds of resets are smaller
            super().__init__(self._watched(make_env))
        if manners.changes and self.own is None:
            self.own = now(OWN)
        self._agents = tuple(self.unwrapped.agents) if teams_of(self) else ()  # type: ignore[attr-defined]
        self._shape = self.observation_space.shape if isinstance(self.observation_space, gym.spaces.Box) else None
        self._numbers = tuple(self.metadata.get("numbers", ()))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.Env.reset`."""
        if self.own and self._manners.changes and seed is not None:
            self.own[RANDOM] = seeded(seed)
        if self._manners.short and seed is not None:  # its last bits are equal in all runs, these 31 are not
            seed = int(np.random.SeedSequence(seed).generate_state(1)[0] >> 1)
        self._home = self._home or now(OWN[1:])  # of the first one: till then the script may change it
        obs, info = self._watched(self.env.reset, seed=seed, options=options)
        self.now = (obs, 0)
        self.look()
        return obs, self._read(info)

    def step(self, action: Any) -> Any:
        """See `gymnasium.Env.step`."""
        # arrays are views of what the script keeps: the environment may change its own
        action = copy.deepcopy(action) if isinstance(action, (np.ndarray, tuple, dict)) else action
        obs, reward, terminated, truncated, info = self._visit(self.env.step, action)
        self.now = (obs, self.now[1] + 1)
        if not (isinstance(reward, (float, int)) and math.isfinite(reward)):
            reward = self._reward(reward)
        if not all(type(x) is bool or (isinstance(x, FLAGS) and np.size(x) == 1) for x in (terminated, truncated)):
            self.fault(f"its step ends by {terminated!r:.40} and {truncated!r:.40}, which are not True or False")
        if terminated or truncated:
            self.look()
            obs = copy.deepcopy(obs)  # a reset may write into it
        return obs, reward, terminated, truncated, self._read(info)

    def render(self) -> Any:
        """See `gymnasium.Env.render`."""
        return self._visit(self.env.render)

    def close(self) -> None:
        """See `gymnasium.Env.close`. What fails there must not hide what was to be said."""
        with contextlib.suppress(Exception, SystemExit):
            self.env.close()

    def look(self) -> str:
        """`wrong`, after a look at the current observation."""
        obs, length = self.now
        if not self.wrong and (found := not_finite(obs)):
            when = f"after {length} steps" if length else "of a reset"
            self.wrong = f"the observation {when} is {found[1]}"
        return self.wrong

    def fault(self, what: str) -> NoReturn:
        """Say what is wrong with the environment."""
        if self._ends == os.getpid():
            quit_with(f"{self.env_id}: {what}; --resume continues from the last checkpoint", 1)
        raise UsageError(f"{self.env_id}: {what}")

    def _visit(self, call: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """What a call of the environment's code returns."""
        home = now(OWN) if self.own else {}
        bring_back(self.own or {})
        try:
            return call(*inputs, **named)
        except SystemExit as end:
            if hasattr(end, "__notes__"):  # `quit_with` has said why
                raise
            self.fault(f"{getattr(call, '__name__', 'its code')} ends the program by sys.exit({end.code!r})")
        except UsageError as error:
            self.fault(str(error))
        finally:
            if home:
                self.own = now(OWN)
                bring_back(home)

    def _watched(self, call: Callable[..., Any], **named: Any) -> Any:
        """The same, after which the process is as it was; what was changed is the environment's own from then on."""
        before = now(LIGHT) | self._home  # what a step has changed, too
        result = self._visit(call, **named)
        after = now(LIGHT)  # the current folder is empty where somebody has removed it
        if changed := tuple(name for name in LIGHT if after[name] not in (before[name], "")):
            if self.own is None and {*changed} & {*OWN}:
                self.own = now(OWN)
            bring_back(before)
            tell(self.env_id, changed)
        return result

    def _read(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """What the library reads of `info`, with the mask, in an array of its own, if the environment is known to give
        any: then all is allowed where it gives none."""
        shape, (obs, length) = self._manners.mask, self.now
        if self._shape is not None and (found := getattr(obs, "shape", self._shape)) != self._shape:
            what = f"the observation of its {'step' if length else 'reset'} has shape {found}"
            self.fault(f"{what}, but its space has {self._shape}")
        kept = {x: info[x] for x in READ[: 4 if self._agents else 2] if x in info} | declared(info) if info else {}
        mask = kept.pop("action_mask", None)
        mask = np.ones(shape, bool) if mask is None and shape is not None else mask
        if mask is not None and shape not in (None, np.shape(mask)):
            self.fault(f"its action_mask has shape {np.shape(mask)} after {length} steps, not {shape}")
        self.mask = None if mask is None else np.array(mask, bool)
        kept |= {name: self._number(f"its {name} of info", info.get(name, math.nan)) for name in self._numbers}
        return kept if mask is None else kept | {"action_mask": self.mask}

    def _reward(self, reward: Any) -> Any:
        """A reward as a float, of several agents as it is; NaN and infinity are noted."""
        reward = reward if self._agents else self._number("its reward", reward)
        bad = np.flatnonzero(~np.isfinite(reward))
        if bad.size and not self.wrong:
            whose = f" of {self._agents[bad[0]]}" if self._agents else ""
            self.wrong = f"the reward{whose} is {np.ravel(reward)[bad[0]]} in step {self.now[1]} of an episode"
        return reward

    def _number(self, what: str, value: Any) -> float:
        if (one := number(value)) is None:
            shape = getattr(value, "shape", ())
            found = f"an array of shape {shape}" if shape else f"{value!r:.60}"
            self.fault(f"{what} must be one number, but is {found}")
        return one


def tell(env_id: str, changed: tuple[str, ...]) -> None:
    """Say what an environment changes of the process."""
    verb = "seeds or draws from" if changed == (RANDOM,) else "changes"
    what = "it gets its own, next to the training's" if {*changed} & {*OWN} else "what it changed is put back"
    say_once(f"{env_id} {verb} {' and '.join(changed)}: {what}")


def say_once(sentence: str) -> None:
    """Say it, of several ranks the first, and not again."""
    if sentence not in SAID and os.environ.get("RANK", "0") in ("0", ""):
        SAID.add(sentence)
        warn(sentence)


def hosted(make_env: Callable[..., Any], env_id: str, ends: bool = False, seed: int = 0, **more: Any) -> partial[Guest]:
    """A function that gives the environment `make_env(env_id, **more)` as a `Guest`. Another process can have it."""
    manners, process = KNOWN.get(env_id, Manners()), os.getpid() if ends else 0
    return partial(Guest, partial(make_env, env_id, **more), env_id, manners, process, seed)


def vector_env(make_env: Callable[..., Any], env_id: str, num_envs: int) -> VectorEnvs:
    """Environments as those of `Run.vector_env`, for an object in another process: what they do wrong is raised.
    Their observations are copies, which no later step and no reset changes."""
    if env_id not in KNOWN:
        try_out(make_env, env_id)

    def make(seed: int) -> gym.Env:
        return gym.wrappers.TransformObservation(hosted(make_env, env_id, seed=seed)(), copy.deepcopy, None)

    return VectorEnvs([partial(make, i) for i in range(num_envs)])


def guest_in(env: Any) -> Guest | None:
    """The guest below the wrappers of the library."""
    while not isinstance(env, Guest) and isinstance(env, gym.Wrapper):
        env = env.env
    return env if isinstance(env, Guest) else None


def _look(env: Any) -> str:
    return guest.look() if (guest := guest_in(env)) else ""


def wrong(envs: Any) -> str:
    """The first environment that gave NaN or infinite numbers, as a phrase; empty where none is known to."""
    envs = envs.unwrapped  # which may be in other processes
    looks = envs.each(_look) if hasattr(envs, "each") else map(_look, getattr(envs, "envs", ()))
    return next((f"in environment {i} {what}" for i, what in enumerate(looks) if what), "")


def random_action(space: Any, info: Mapping[str, Any]) -> Any:
    """A random action, one that the mask of a `Discrete` space allows, or that of a `MultiDiscrete` one: all parts in a
    row, or a row for each part (of each agent)."""
    kind = type(space).__name__
    if info.get("action_mask") is None or kind not in ("Discrete", "MultiDiscrete") or len(space.shape) > 1:
        return space.sample()
    mask: Any = np.asarray(info["action_mask"], np.int8)
    if kind == "MultiDiscrete":
        parts = mask if mask.ndim == 2 else np.split(mask, np.cumsum(space.nvec)[:-1])
        mask = tuple(part[:n] for part, n in zip(parts, space.nvec, strict=True))
    return space.sample(mask)


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
        refuse_statistics(env, env_id)
        env.own, code, short = env.own or now(OWN), env.unwrapped, False
        for space in (env.action_space, code.action_space):
            space.seed(0)
        known = inspect.signature((code.game.unwrapped if env._agents else code).reset).parameters.values()  # type: ignore[attr-defined]
        for name in ("seed", "options"):
            if not any(each.name == name or each.kind is each.VAR_KEYWORD for each in known):
                env.fault(f"its reset takes no {name}; write `def reset(self, *, seed=None, options=None)`")
        try:
            begun = env._visit(code.reset, seed=2**32)  # as large as those of a training
        except (OverflowError, TypeError, ValueError):  # wrappers need not outlive that
            begun, short = env._visit(code.reset, seed=0), True
        if not (isinstance(begun, tuple) and len(begun) == 2 and isinstance(begun[1], Mapping)):
            env.fault("its reset must return two values, obs and a dict info")
        with told(f"{env_id}: its action_mask does not fit {code.action_space}"):
            action = random_action(code.action_space, begun[1])
        taken = env._visit(code.step, action)
        if not isinstance(taken, tuple) or len(taken) != 5:
            what = "its step must return five values, obs, reward, terminated, truncated, info"
            env.fault(f"{what}, but returns {len(taken) if isinstance(taken, tuple) else repr(taken)[:40]}")
        env.own[RANDOM] = seeded(2**31 - 7)  # others: a seed in each reset leads to the same states again
        drawn = plain(env.own[RANDOM])  # now, since what the first calls import may draw, too
        obs, info = env.reset(seed=0)
        _check_obs(f"{env_id}: the observation of its reset", env.observation_space, obs)
        mask = env.mask
        for step in range(MASK_STEPS if needs_masks else 1):
            obs, _, terminated, truncated, info = env.step(random_action(env.action_space, info))
            _check_obs(f"{env_id}: the observation of its step", env.observation_space, obs)
            if env.wrong and step == 0:
                env.fault(env.wrong)
            if (mask := env.mask if mask is None else mask) is not None:
                break
            info = env.reset()[1] if terminated or truncated else info
        env.reset()
        changes = [name for name in OWN[1:] if env.own[name] != env._home[name]]
        changes += [RANDOM] if plain(env.own[RANDOM]) != drawn else []
    KNOWN[env_id] = manners = Manners(tuple(changes), mask if mask is None else mask.shape, bool(env._agents), short)
    if changes:
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
        refuse(array.shape != space.shape, f"{what} has shape {array.shape}, but its space has {space.shape}")
        if not np.can_cast(array.dtype, space.dtype, "same_kind"):
            raise UsageError(f"{what} is of type {array.dtype}, but its space of {space.dtype}")
        if found := not_finite(array):
            raise UsageError(f"{what} is {found[1]}: all its numbers must be finite")
