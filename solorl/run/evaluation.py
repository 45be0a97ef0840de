"""Playing the greedy policy, on environments and seeds of its own, without moving the training."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from solorl.compute.device import CONFIRM, EVALUATE, env_seed
from solorl.envs.guest import hosted, say_once
from solorl.envs.returns import declared, declared_in, means, named, note, of_game, teams_of
from solorl.envs.spaces import First, as_arrays
from solorl.envs.vector import masks_in
from solorl.run.meter import check_finite

# A NumPy batch of observations (n, *obs_shape) -> a NumPy batch of actions (n, ...). A policy with memory is a function
# `act(obs, state, first) -> actions, state`: `state` is None before the first step, `first` (n,) says where an episode
# begins with this observation. A policy with a parameter `action_mask` gets (n, num_actions), True for what is allowed,
# or None where the environments give no `info["action_mask"]`. With several agents observations are
# (n, num_agents, *obs_shape), actions (n, num_agents, ...) and masks (n, num_agents, num_actions). Observations of a
# `Dict` space are a dict of arrays (n, ...), of a `Tuple` space a tuple of them; so are actions of such spaces.
Policy = Callable[..., Any]
MakeEnv = Callable[..., Any]  # `make_env(env_id, **kwargs)`, or of several environments `make_env(env_id, num_envs)`
Said = list[dict[str, float]] | None  # what the infos of each episode declare: metric -> number
Also = Mapping[str, MakeEnv] | None  # name -> other environments, in which the policy is evaluated, too
SCORE = "eval/episodic_return"
EPISODES = "eval/episodes"
MAX_STEPS = 100_000  # an episode without a time limit is cut here
LONG = 10_000  # steps after which an episode of an evaluation is spoken of


def stepwise(policy: Policy, num_envs: int) -> Callable[..., Any]:
    """The policy as a function of the observations and the infos that came with them (see `masks_in`), for `num_envs`
    episodes that all begin with the first call; what a policy with memory remembers is kept here. Where episodes follow
    each other, `first` (num_envs,) says in each call which begin."""
    known = inspect.signature(policy).parameters
    state, begin = None, np.ones(num_envs, bool)

    def act(obs: Any, infos: Any, first: Any = None) -> Any:
        nonlocal state, begin
        given: dict[str, Any] = {}
        if "action_mask" in known:
            given["action_mask"] = masks_in(infos)
        if "state" not in known:
            return as_arrays(policy(obs, **given))
        action, state = policy(obs, state, begin if first is None else first, **given)
        begin = np.zeros(num_envs, bool)
        return as_arrays(action)

    return act


def open_games(make_env: MakeEnv, env_id: str, seeds: Sequence[int], **named: Any) -> list[Any]:
    """Environments for `play_episodes`, one for each of `seeds`, by which they are built. A `make_env(env_id, num_envs,
    **kwargs)` makes them together, as one vector environment; a `make_env(env_id, **kwargs)` makes one at a time."""
    if "num_envs" in inspect.signature(make_env).parameters:
        return [make_env(env_id, len(seeds), **named)]
    return [hosted(make_env, env_id, seed=each, **named)() for each in seeds]


def open_game(make_env: MakeEnv, env_id: str, render_mode: str, seed: int) -> Any:
    """One environment to be looked at, see `open_games`."""
    [env] = open_games(make_env, env_id, [seed], render_mode=render_mode)
    return First(env) if isinstance(env, gym.vector.VectorEnv) else env


def play_episodes(
    envs: Sequence[Any], policy: Policy, seeds: Sequence[int], seen: Callable[[], Any] = lambda: None, said: Said = None
) -> tuple[np.ndarray, np.ndarray]:
    """One episode in each environment, side by side: returns (n,) of raw rewards and lengths (n,) in agent steps.

    Every environment plays exactly one episode, so that short episodes do not count twice. `envs` are environments, or
    a list with one vector environment that resets in the same step. With several agents the returns are those of the
    first team. `seen` is called after the reset and each step. What the infos of each episode declare (see
    `returns.note`) is appended to `said`.
    """
    returns, lengths = play_games(envs, policy, seeds, seen, said)
    return of_game(returns, teams_of(envs[0])), lengths


def play_games(
    envs: Sequence[Any], policy: Policy, seeds: Sequence[int], seen: Callable[[], Any] = lambda: None, said: Said = None
) -> tuple[np.ndarray, np.ndarray]:
    """`play_episodes` with the returns (n, num_agents) of all agents, where there are several."""
    episodes: list[dict[str, float]] = [{} for _ in seeds]
    if said is not None:
        said += episodes
    if isinstance(envs[0], gym.vector.VectorEnv):
        return _play_together(envs[0], policy, seeds, episodes)
    space, teams = envs[0].observation_space, teams_of(envs[0])
    action_space = batch_space(envs[0].action_space, len(envs))
    begun = [env.reset(seed=seed) for env, seed in zip(envs, seeds, strict=True)]
    obs, infos = [each for each, _ in begun], [info for _, info in begun]
    returns = np.zeros(len(envs) if teams is None else (len(envs), sum(map(len, teams.values()))))
    lengths = np.zeros(len(envs), int)
    running, act = set(range(len(envs))), stepwise(policy, len(envs))
    batch: Any = create_empty_array(space, len(envs))
    seen()
    while running:
        batch = concatenate(space, obs, batch)
        actions = list(iterate(action_space, act(batch, infos)))
        for i in sorted(running):
            obs[i], reward, terminated, truncated, infos[i] = envs[i].step(actions[i])
            returns[i] += float(reward) if teams is None else reward
            lengths[i] += 1
            note(episodes[i], declared(infos[i]))
            if lengths[i] == LONG:
                tell_long(envs[i])
            if terminated or truncated or lengths[i] == MAX_STEPS:
                running.discard(i)
        seen()
    return returns, lengths


def tell_long(env: Any) -> None:
    """Say that an evaluation takes long because an episode does not end."""
    what = f"an episode of {getattr(env, 'env_id', type(env.unwrapped).__name__)} has come to {LONG:,} steps"
    limit = "a time limit is `max_episode_steps` of gym.register"
    say_once(f"{what} in an evaluation, which cuts it at {MAX_STEPS:,}; {limit}")


def _play_together(
    envs: gym.vector.VectorEnv, policy: Policy, seeds: Sequence[int], episodes: Sequence[dict[str, float]]
) -> tuple[np.ndarray, np.ndarray]:
    """The first episode of each environment of a vector environment."""
    obs, infos = envs.reset(seed=list(seeds))  # type: ignore[arg-type]
    returns, lengths = np.zeros(envs.num_envs), np.zeros(envs.num_envs, int)
    running, act = np.ones(envs.num_envs, bool), stepwise(policy, envs.num_envs)
    while running.any():
        obs, reward, terminated, truncated, infos = envs.step(act(obs, infos))
        returns += running * reward
        lengths += running
        for i in map(int, np.flatnonzero(running)):
            note(episodes[i], declared_in(infos, i, terminated[i] or truncated[i]))
        if lengths.max() == LONG and running.any():
            tell_long(envs)
        running &= ~(terminated | truncated) & (lengths < MAX_STEPS)
    return returns, lengths


def interval(points: np.ndarray, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval (Wilson) of the mean of points from 0 to 1; with draws it is wider than it need be."""
    n, mean = len(points), float(points.mean())
    middle, half = mean + z * z / (2 * n), z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


class Evaluator:
    """Plays greedy policies on `--eval-episodes` environments with seeds of their own."""

    def __init__(self, args: Any):
        self.args, self._env_id = args, getattr(args, "env_id", "")
        self.best = -math.inf  # mean return
        self.last = (-1, 0.0, 0.0)  # step (-1: none yet), mean return and its standard deviation
        self.episodes = args.eval_episodes  # of the last one
        self.improved = False  # whether the last one is better than all before it
        self._confirmed = 0  # episodes
        self._envs: dict[str, list[Any]] = {}

    def play(
        self, stream: int, first: int, policy: Policy, make_env: MakeEnv, name: str = "", said: Said = None
    ) -> Any:
        """`play_games` with the seeds from number `first` of a stream on, in environments that are kept as `name`."""
        if name not in self._envs:
            self._envs[name] = open_games(make_env, self.args.env_id, self.seeds(EVALUATE, 0))
        return play_games(self._envs[name], policy, self.seeds(stream, first), said=said)

    def seeds(self, stream: int, first: int) -> list[int]:
        """Those from number `first` of a stream on, one for each episode."""
        return [env_seed(self.args.seed, stream, first + i) for i in range(self.args.eval_episodes)]

    def evaluate(
        self, step: int, policy: Policy, make_env: MakeEnv, also: Also = None, played: Any = None
    ) -> dict[str, float]:
        """Play, note the score, and return its row of metrics; see `Run.evaluate`. `played`: returns and lengths, where
        they are known. Raises Diverged where the mean return is not finite."""
        said: list[dict[str, float]] = []
        returns, lengths = self.play(EVALUATE, 0, policy, make_env, said=said) if played is None else played
        teams = teams_of(self._envs[""][0]) if "" in self._envs else None
        mean = float(of_game(returns, teams).mean())
        if self.args.eval_more and (mean > self.best or self.reaches(mean)):
            more = self.play(EVALUATE, self.args.eval_episodes, policy, make_env, said=said)
            returns, lengths = np.concatenate([returns, more[0]]), np.concatenate([lengths, more[1]])
        scores = named(SCORE, returns, teams)
        score = scores.pop(SCORE)
        mean, std = float(score.mean()), float(score.std())
        check_finite({SCORE: mean})
        self.last, self.improved = (step, mean, std), mean > self.best
        self.best, self.episodes = max(self.best, mean), len(lengths)
        for name, make_other in (also or {}).items():
            others, _ = self.play(EVALUATE, 0, policy, make_other, name)
            key, game = f"{SCORE}_{name}", self._envs[name][0]
            scores[key] = of_game(others, teams_of(game))
            if game.metadata.get("points"):  # then the fraction of points has an interval
                scores[f"{key}_low"], scores[f"{key}_high"] = map(np.array, interval(scores[key]))
        return {
            SCORE: mean,
            "eval/episodic_return_std": std,
            "eval/episodic_length": float(lengths.mean()),
            **({EPISODES: self.episodes} if self.args.eval_more else {}),
            **{name: float(value.mean()) for name, value in scores.items()},
            **{f"eval/{name}": value for name, value in means(said).items()},
        }

    @property
    def score(self) -> float | None:
        """Mean return of the last evaluation; None before the first."""
        return self.last[1] if self.last[0] >= 0 else None

    def reaches(self, mean: float) -> bool:
        """Whether a mean return is as high as `--target-return` asks."""
        return self.args.target_return is not None and mean >= self.args.target_return

    def confirm(self, policy: Policy, make_env: MakeEnv) -> float | None:
        """Where the last evaluation has reached `--target-return`: the mean score on seeds never used before."""
        if not self.reaches(self.last[1]):
            return None
        returns, _ = self.play(CONFIRM, self._confirmed, policy, make_env)
        self._confirmed += self.args.eval_episodes
        return float(of_game(returns, teams_of(self._envs[""][0])).mean())

    def close(self) -> None:
        """Close the environments."""
        for env in (env for envs in self._envs.values() for env in envs):
            env.close()

    def counters(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        last = {"last_eval": list(self.last), "last_eval_episodes": self.episodes, "env_id": self._env_id}
        return last | {"best": self.best, "confirmed": self._confirmed}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue from these counters; what was scored in another environment says nothing of this one."""
        if saved.get("env_id", self._env_id) == self._env_id:  # an older checkpoint does not say which it was
            self.best, self.last, self.episodes = saved["best"], tuple(saved["last_eval"]), saved["last_eval_episodes"]
        # an older checkpoint does not count episodes
        self._confirmed = saved.get("confirmed", saved.get("confirmations", 0) * self.args.eval_episodes)
