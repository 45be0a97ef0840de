"""Games of several agents: PettingZoo's parallel API with Gymnasium's interfaces.

    envs = PettingZooEnvs([lambda: gym.make("mpe/simple_spread_v3") for _ in range(4)])  # trained on
    env = gym.make("mpe/simple_spread_v3")  # a `Game`, for evaluation; registered when this module is imported

Every array has an axis of agents, in the order of PettingZoo's `possible_agents`; an agent that has left keeps its
place. All agents of a game have equal spaces, or are padded on request: `gym.make(env_id, pad=True)`.
API: Terry et al. (2021), https://arxiv.org/abs/2009.14471
"""

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import iterate

from solorl.envs.ids import GAMES
from solorl.envs.vector import masks_in, with_next_obs
from solorl.errors import UsageError, quit_with, refuse

EQUAL = "all agents must have equal spaces"
PADDING = "; vectors and numbers of actions are padded by gym.make(env_id, pad=True)"
PARTS = {"observation", "action_mask"}  # of a Dict observation
STATELESS = {"sisl/multiwalker_v9"}  # whose state() raises an exception once a walker has fallen


class Game(gym.Env[np.ndarray, np.ndarray]):
    """One game of PettingZoo's parallel API as a Gymnasium environment with stacked agents.

    Observations are (num_agents, *obs_shape), actions (num_agents, ...), rewards (num_agents,). Rows of agents that do
    not play are 0, but the last observation of one that leaves is seen once; their actions are ignored. `step` returns
    whether the whole game has ended; `terminated` and `truncated` (num_agents,) say it of each agent, from the step in
    which it leaves to the end of the game, so that `alive` is neither. `info` holds, of the same moment as the
    observation, `alive` (num_agents,), the central `state` (the game's `state()`; where it has none, all observations
    in a row) and, where the game gives it, `action_mask` (num_agents, num_actions), True for what is allowed: what the
    game says of each agent, all its actions where it says nothing, as of agents that have left.

    `teams`: name -> names of its agents; "each": every agent is a team; None: all agents are one. The first team is
    the one whose return stands for the game. `own_state=False`: the central state is all observations in a row, though
    the game has a `state()`. One sentence and exit code 2 where the agents' spaces are not equal or
    not plain arrays. It is deterministic given its seed, and can be saved, if the game is.

    `pad`: vectors of unequal lengths are filled up with 0 to the longest, numbers of discrete actions raised to the
    largest. `agent_obs_dims` and `agent_action_dims` (entries, or the number of discrete actions) are the true sizes of
    each agent, `action_mask` has its discrete actions, and continuous ones are cut before the game gets them.
    """

    def __init__(self, game: Any, teams: Any = None, own_state: bool = True, pad: bool = False):
        self.own_state, self.game, self.metadata = own_state, game, dict(game.metadata)
        self.name = str(game.metadata.get("name", type(game.unwrapped).__name__))
        self.render_mode = getattr(game.unwrapped, "render_mode", None)
        if not getattr(game, "possible_agents", None):
            quit_with(f"{self.name} does not list its possible_agents, so its arrays would have no fixed shape")
        self.agents: list[str] = list(game.possible_agents)
        self.teams = self._teams(teams)
        obs, actions = self._agent_spaces(pad)
        self.agent_observation_space, self.observation_space = _boxes(obs)
        self.agent_obs_dims = [int(np.prod(box.shape)) for box in obs]
        if isinstance(actions[0], gym.spaces.Discrete):
            self.agent_action_dims, start = [int(one.n) for one in actions], int(actions[0].start)
            self._masked |= len(set(self.agent_action_dims)) > 1
            self.agent_action_space: Any = gym.spaces.Discrete(max(self.agent_action_dims), start=start)
            self.action_space = gym.spaces.MultiDiscrete(self.agent_action_dims, start=[start] * len(actions))
        else:
            self.agent_action_dims = [int(np.prod(box.shape)) for box in actions]
            self.agent_action_space, self.action_space = _boxes(actions)
        self.alive = self.terminated = self.truncated = np.zeros(len(self.agents), bool)
        self.info: dict[str, np.ndarray] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """See `gymnasium.Env.reset`. The game's own seed is drawn from this environment's generator, each time."""
        super().reset(seed=seed)
        obs, infos = self._call(2, self.game.reset, seed=int(self.np_random.integers(2**31)), options=options)
        self.terminated = self.truncated = np.zeros(len(self.agents), bool)
        self.alive = np.array([name in self.game.agents for name in self.agents])
        refuse(not self.alive.any(), f"{self.name}: its agents are {self.game.agents} after its reset: nobody plays")
        return self._told(obs, infos)

    def step(self, action: Any) -> tuple[np.ndarray, np.ndarray, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`. ValueError where `action` is not of the shape of the action space."""
        action = np.asarray(action)
        if action.shape != self.action_space.shape:
            raise ValueError(f"actions of {self.name} are {self.action_space.shape}, not {action.shape}")
        acting = {name: self._own(k, action[k]) for k, name in enumerate(self.agents) if self.alive[k]}
        obs, rewards, terminated, truncated, infos = self._call(5, self.game.step, acting)
        rewards = dict.fromkeys(self.agents, 0.0) | dict.fromkeys(acting) | dict(rewards)  # None where it says none
        reward = np.array([self._array(f"the reward of {name}", rewards[name], ()) for name in self.agents], float)
        out, cut = (np.array([bool(ends.get(name)) for name in self.agents]) for ends in (terminated, truncated))
        self.alive = np.array([name in self.game.agents for name in self.agents]) & ~out & ~cut
        self.truncated = ~self.alive & (self.truncated | (cut & ~out))
        self.terminated = ~self.alive & ~self.truncated
        obs, info = self._told(obs, infos)
        over = not self.alive.any()
        return obs, reward, over and not self.truncated.any(), over and bool(self.truncated.any()), info

    def render(self) -> Any:
        """See `gymnasium.Env.render`."""
        return self.game.render()

    def close(self) -> None:
        """See `gymnasium.Env.close`."""
        self.game.close()

    def _call(self, count: int, method: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """The dicts that a method of the game returns. UsageError where that is anything else."""
        given = method(*inputs, **named)
        dicts = isinstance(given, tuple) and len(given) == count and all(isinstance(each, Mapping) for each in given)
        refuse(not dicts, f"{self.name}: its {method.__name__} must return {count} dicts, each by agent")
        return given

    def _array(self, what: str, given: Any, shape: Any, dtype: Any = float) -> np.ndarray:
        """What the game gives as an array; UsageError where it has another shape, or numbers of another type."""
        array = np.asarray(given)
        if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
            raise UsageError(f"{self.name}: {what} must be {np.dtype(dtype)} of shape {shape}, not {given!r:.100}")
        return array

    def _own(self, k: int, action: Any) -> Any:
        """The action of one agent without padding. ValueError where a discrete one is padding itself."""
        size, space = self.agent_action_dims[k], self.agent_action_space
        if not isinstance(space, gym.spaces.Discrete):
            return action[:size] if action.ndim == 1 else action
        if action >= space.start + size:
            raise ValueError(f"{self.agents[k]} of {self.name} has {size} actions: {action} is padding")
        return action

    def _told(self, observations: Mapping[str, Any], infos: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
        """The observation, in an array of its own, and `info`, from what the game says of each agent."""
        box = self.agent_observation_space
        obs = np.zeros((len(self.agents), *box.shape), box.dtype)
        sizes, masked = self.agent_action_dims, self._masked
        allowed = np.arange(max(sizes)) < np.array(sizes)[:, None]  # (num_agents, num_actions)
        for k, name in enumerate(self.agents):
            seen, mask = observations.get(name), infos.get(name, {}).get("action_mask")
            if isinstance(seen, Mapping):
                seen, mask = seen["observation"], seen.get("action_mask", mask)
            if seen is not None or self.alive[k]:
                row = obs[k, : self.agent_obs_dims[k]] if obs.ndim == 2 else obs[k, ...]
                row[...] = self._array(f"the observation of {name}", seen, row.shape, box.dtype)
            if mask is not None:
                mask, masked = self._array(f"the action_mask of {name}", mask, (sizes[k],)).astype(bool), True
                allowed[k, : sizes[k]] = mask | ~mask.any()  # a policy needs one, also of who has left
        told = {"alive": self.alive.copy(), "state": self._state(obs)}
        self.info = told | {"action_mask": allowed} if masked else told
        return obs, dict(self.info)

    def _state(self, obs: np.ndarray) -> np.ndarray:
        try:
            state = np.array(self.game.state()) if self.own_state else obs.flatten()
        except NotImplementedError:
            state = obs.flatten()
        return self._array("its state()", state, self.info.get("state", state).shape)

    def _agent_spaces(self, pad: bool) -> tuple[list[gym.spaces.Box], list[Any]]:
        """The spaces of each agent, without action masks; one sentence and exit code 2 where they cannot be stacked."""
        found = [(self.game.observation_space(name), self.game.action_space(name)) for name in self.agents]
        obs, actions = map(list, zip(*found, strict=True))
        parts = [space.spaces if isinstance(space, gym.spaces.Dict) else {} for space in obs]
        self._masked: bool = any("action_mask" in part for part in parts)
        obs = [part["observation"] if {"observation"} <= {*part} <= PARTS else obs[k] for k, part in enumerate(parts)]
        for name, space, action in zip(self.agents, obs, actions, strict=True):
            for kind, one, two in (("observations", obs[0], space), ("actions", actions[0], action)):
                if one != two and not (pad and _can_pad(one, two)):
                    what = f"{self.agents[0]} has {kind} {one}, {name} has {two}"
                    quit_with(f"{self.name}: {what}; {EQUAL}{PADDING if _can_pad(one, two) else ''}")
        if not isinstance(obs[0], gym.spaces.Box):
            quit_with(f"{self.name} has observations {obs[0]}; allowed are Box, and Dict of observation, action_mask")
        if not isinstance(actions[0], gym.spaces.Discrete | gym.spaces.Box):
            quit_with(f"{self.name} has actions {actions[0]}; allowed are Discrete and Box")
        return obs, actions

    def _teams(self, teams: Mapping[str, Sequence[str]] | str | None) -> dict[str, list[int]]:
        """Team -> places of its agents; one sentence and exit code 2 unless each agent is in exactly one."""
        teams = {"all": self.agents} if teams is None else teams
        named: Any = {name: [name] for name in self.agents} if teams == "each" else teams
        members = [name for names in named.values() for name in names] if isinstance(named, Mapping) else []
        if sorted(members) != sorted(self.agents) or not all(named.values()):
            quit_with(f"{self.name}: teams {teams!r} must hold each of {', '.join(self.agents)} once, or be 'each'")
        return {team: [self.agents.index(name) for name in names] for team, names in named.items()}


def _can_pad(one: Any, two: Any) -> bool:
    """Whether two spaces differ in what padding makes equal: lengths and bounds of vectors, or numbers of actions."""
    if isinstance(one, gym.spaces.Discrete) and isinstance(two, gym.spaces.Discrete):
        return bool(one.start == two.start)
    boxes = isinstance(one, gym.spaces.Box) and isinstance(two, gym.spaces.Box)
    return boxes and one.dtype == two.dtype and len(one.shape) == len(two.shape) == 1


def _boxes(boxes: Sequence[gym.spaces.Box]) -> tuple[gym.spaces.Box, gym.spaces.Box]:
    """The space of any one agent, and that of all (num_agents, ...), in which what is padded is 0."""
    dtype: Any = boxes[0].dtype.type
    low, high = (np.zeros((len(boxes), *np.max([box.shape for box in boxes], 0)), dtype) for _ in range(2))
    for k, box in enumerate(boxes):
        here: Any = (k, *map(slice, box.shape))
        low[here], high[here] = box.low, box.high
    return gym.spaces.Box(low.min(0), high.max(0), dtype=dtype), gym.spaces.Box(low, high, dtype=dtype)


class PettingZooEnvs(gym.vector.SyncVectorEnv):
    """`num_envs` games side by side, with Gymnasium's vector interface and `AutoresetMode.SAME_STEP`.

    Observations are (num_envs, num_agents, *obs_shape), actions (num_envs, num_agents, ...), rewards, `terminated` and
    `truncated` (num_envs, num_agents). A game ends when all its agents are done, which is `done.all(-1)`, and is reset
    in the same step: then `infos["final_obs"][i]` (num_agents, *obs_shape) and `infos["final_info"]` are those of its
    end, with `state` and `action_mask` of the final observation; `infos["next_obs"]`, `next_state` and
    `next_action_mask` are what every step led to. The last observation of an agent that leaves earlier is in its row of
    the observations, its mask in that of `action_mask`.

    `alive`, `state` and `action_mask` (None where the game has none), (num_envs, ...), belong to the present
    observations, after a reset and a resume, too; the `infos` of a step have the same, see `Game`.
    `make_games` are functions that give games, wrapped or not; one sentence and exit code 2 where one gives another
    environment.
    """

    def __init__(self, make_games: Sequence[Callable[[], gym.Env]]):
        super().__init__(make_games, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
        game = self.envs[0].unwrapped
        if not isinstance(game, Game):
            name = self.envs[0].spec.id if self.envs[0].spec else type(game).__name__
            quit_with(f"{name} has one agent; games of several are those of PettingZoo, such as mpe/simple_spread_v3")
        self.agents, self.num_agents, self.teams = game.agents, len(game.agents), game.teams
        self.agent_observation_space, self.agent_action_space = game.agent_observation_space, game.agent_action_space
        self.agent_obs_dims, self.agent_action_dims = game.agent_obs_dims, game.agent_action_dims

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One step of every game; see the class."""
        reward = np.zeros((self.num_envs, self.num_agents))
        terminated, truncated = np.zeros((2, self.num_envs, self.num_agents), bool)
        infos: dict[str, Any] = {}
        for i, (env, action) in enumerate(zip(self.envs, iterate(self.action_space, actions), strict=True)):
            obs, reward[i], end, cut, info = env.step(action)
            game: Any = env.unwrapped
            # end and cut may be those of a wrapper
            terminated[i], truncated[i] = game.terminated | (game.alive & end), game.truncated | (game.alive & cut)
            if (terminated[i] | truncated[i]).all():
                infos = self._add_info(infos, {"final_obs": obs, "final_info": info}, i)
                obs, info = env.reset()
            self._env_obs[i] = obs
            infos = self._add_info(infos, info, i)
        now = np.array(self._env_obs)
        return now, reward, terminated, truncated, with_next_obs(now, infos, ["state", "action_mask"])

    @property
    def alive(self) -> np.ndarray:
        """Which agents play now, (num_envs, num_agents)."""
        return np.stack([info["alive"] for info in self.present()])

    @property
    def state(self) -> np.ndarray:
        """The central states, (num_envs, *state_shape)."""
        return np.stack([info["state"] for info in self.present()])

    @property
    def action_mask(self) -> np.ndarray | None:
        """The actions that are allowed now, (num_envs, num_agents, num_actions); None where no game says."""
        return masks_in(self.present())

    def present(self) -> list[Any]:
        """What each game says of its present observation."""
        return [env.unwrapped.info for env in self.envs]  # type: ignore[attr-defined]


def open_game(env_id: str, teams: Any = None, pad: bool = False, **kwargs: Any) -> Game:
    """The game `FAMILY/NAME` of PettingZoo; `kwargs` are those of its `parallel_env`. One sentence and exit code 2
    where a package is missing that this game needs."""
    import pettingzoo
    from pettingzoo.env_registry.exceptions import FailedToImport

    family, _, name = env_id.partition("/")
    try:
        if family == "mpe":  # not in PettingZoo's registry
            game = importlib.import_module(f"mpe2.{name}").parallel_env(**kwargs)
        else:
            if family == "atari":
                import ale_py  # which has the files of the games

                kwargs = {"auto_rom_install_path": str(Path(ale_py.__file__).parent), **kwargs}
            game = pettingzoo.make("parallel", re.sub(r"_v(\d+)$", r"-v\1", env_id), **kwargs)
            game = game.unwrapped if family == "atari" else game  # the conversions around it take much time
    except (ImportError, FailedToImport) as error:
        what = getattr(error.__cause__ if isinstance(error, FailedToImport) else error, "name", None) or "a package"
        package = {"mpe": "mpe2", "atari": "'solorl[pettingzoo]'"}.get(family, f"'pettingzoo[{family}]'")
        quit_with(f"{env_id} needs {what}, which is not installed: pip install {package}")
    return Game(game, teams, own_state=env_id not in STATELESS, pad=pad)


def register(env_id: str, parallel_env: Callable[..., Any], teams: Any = None) -> None:
    """Name a game of your own: `gym.make(env_id, pad=..., **kwargs)` then gives `Game(parallel_env(**kwargs), teams)`,
    padded on request."""

    def make(pad: bool = False, **kwargs: Any) -> Game:
        return Game(parallel_env(**kwargs), teams, pad=pad)

    gym.register(env_id, make, disable_env_checker=True)


def _ids() -> Iterator[str]:
    """The games that are installed: those of PettingZoo's registry, under the names of its modules, and those of mpe2,
    without importing it."""
    if importlib.util.find_spec("pettingzoo"):
        from pettingzoo import parallel_registry

        families = tuple(pattern.removesuffix("*") for pattern in GAMES)
        yield from (re.sub(r"-v(\d+)$", r"_v\1", name) for name in parallel_registry if name.startswith(families))
    if spec := importlib.util.find_spec("mpe2"):
        found = pkgutil.iter_modules(spec.submodule_search_locations)
        yield from (f"mpe/{module.name}" for module in found if re.search(r"_v\d+$", module.name))


for _id in _ids():
    gym.register(_id, "solorl.envs.pettingzoo:open_game", kwargs={"env_id": _id}, disable_env_checker=True)
