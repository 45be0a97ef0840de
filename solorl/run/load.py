"""Running the script of a run folder again: as `solo play` does, and to hand its trained policy to other code.

policy = solorl.load("runs/CartPole-v1__ppo__1__20261123-101500")
env = policy.make_env()
obs, _ = env.reset(seed=1)
action = policy(obs[None])[0]
"""

import contextlib
import importlib
import io
import os
import re
import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from solorl.compute.device import CONFIRM, env_seed
from solorl.envs.ids import is_board
from solorl.envs.returns import means
from solorl.envs.spaces import as_arrays
from solorl.envs.surroundings import undisturbed
from solorl.errors import UsageError, missing_extra, refuse, told
from solorl.files import is_plain_name, missing
from solorl.run.evaluation import MakeEnv, Policy, interval, open_game, open_games, play_episodes
from solorl.run.pictures import film_to
from solorl.runfolder import CONFIG, LAST_MODEL, MODEL, config_of
from solorl.terminal import plain, scores
from solorl.trust import FLAG, HOW, not_trusted, refuse_links, trusted

CACHE_SETTINGS = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "enable_compilation_cache")
LOADING = threading.RLock()  # one load at a time: each changes sys.argv and other things of the whole process
JAX_SETTINGS = [f"jax_{name}" for name in ("default_device", *CACHE_SETTINGS)]  # that a script in JAX changes


@dataclass(frozen=True)
class LoadedPolicy:
    """The trained policy of a run folder: `policy(obs)` maps a NumPy batch of observations (n, *obs_shape) to a NumPy
    batch of greedy actions (n, ...), as the environments of `make_env` take them. A policy with memory takes and
    returns it: `action, state = policy(obs, state, first)`; `state` is None before the first step, `first` (n,) says
    where an episode begins with this observation. Observations of a `Dict` space are a dict of arrays (n, ...), of a
    `Tuple` space a tuple of them; so are such actions."""

    env_id: str
    args: Any  # the arguments of the training
    policy: Policy  # as the script hands it to `run.close`
    maker: Callable[..., Any]  # of environments, the same
    # What the model file holds, under the names that it has there: modules of torch, in JAX trees of arrays.
    models: Mapping[str, Any] = field(default_factory=dict)
    score: float | None = None  # mean return of the evaluation after which the model was saved
    sampler: Policy | None = None  # the stochastic policy, where the script hands one to `run.close`
    obs_shape: Any = None  # of one observation; None where that is a dict or a tuple

    def __call__(self, obs: Any, *memory: Any, **given: Any) -> Any:
        """The greedy actions for a batch of observations; UsageError where it cannot act on them, as on one without
        the axis of a batch. `given`: what the policy takes by name, such as `action_mask` (n, num_actions)."""
        return _actions(self.policy, self.obs_shape, obs, *memory, **given)

    def sample(self, obs: Any, *memory: Any, **given: Any) -> Any:
        """The same with actions drawn at random; UsageError where the script hands over no such policy."""
        return _actions(self.required_sampler(), self.obs_shape, obs, *memory, **given)

    def required_sampler(self) -> Policy:
        """The stochastic policy as the script hands it over; UsageError where it hands over none."""
        if self.sampler is None:
            raise UsageError("this script has no stochastic policy: it would hand one to run.close(..., sample=...)")
        return self.sampler

    def make_env(self, **kwargs: Any) -> Any:
        """An environment as the training had it; `kwargs` go to `gymnasium.make`, e.g. `render_mode="human"`."""
        return self.maker(self.env_id, **kwargs)


def _actions(policy: Policy, shape: Any, obs: Any, *memory: Any, **given: Any) -> Any:
    """The actions of a policy as arrays, with its memory where it has one."""
    obs = as_arrays(obs)
    how = "a policy takes a batch (n, *obs_shape), so one observation as policy(obs[None])[0], and cannot act on"
    with told(how := f"{how} {getattr(obs, 'shape', 'these')}"):  # a file that subtracts means would act on some
        refuse(shape and obs.shape[1:][-len(shape) :] != shape, f"{how}: an observation has the shape {shape}")
        result = policy(obs, *memory, **given)
    return (as_arrays(result[0]), result[1]) if memory else as_arrays(result)


@dataclass
class Play:
    """What `solo play` and `solorl.load` need of a run: no training, only the policy of a saved model."""

    episodes: int = 10
    video: bool = False
    render: bool = False
    seed: int | None = None
    stochastic: bool = False  # play the policy that draws its actions at random
    opponent: str = ""  # on boards, see `solorl.games.opponents`; empty: that of the script
    model: str = MODEL  # empty: none, the networks stay as the script makes them
    take: Callable[[LoadedPolicy], None] | None = None  # gets it; then nothing is played

    def __call__(
        self, args: Any, run_dir: Path, policy: Policy, make_env: Any, models: Any, sample: Any = None,
        tell: Any = None, obs_shape: Any = None,
    ) -> None:  # fmt: skip
        """Hand over the loaded policies and their models, or evaluate one; film or show it on request."""
        loaded = LoadedPolicy(args.env_id, replace(args), policy, make_env, models, None, sample, obs_shape)
        if self.take is not None:
            return self.take(loaded)
        policy = loaded.required_sampler() if self.stochastic else policy
        seed = args.seed if self.seed is None else self.seed
        seeds, said = [env_seed(seed, CONFIRM, 2**19 + i) for i in range(self.episodes)], list[dict[str, float]]()
        with undisturbed():
            if self.opponent:
                refuse(not is_board(args.env_id), f"{args.env_id} has no opponents, as games/TicTacToe-v0 has")
                make_env = partial(make_env, opponent=self.opponent)
            if self.opponent not in ("", "human"):
                return self._points(args.env_id, policy, make_env, seeds)
            text = getattr(args, "env_kind", "") == "text"  # prompts and answers are printed
            if (self.render and not text) or self.opponent:
                policy = partial(_told, policy, tell) if self.opponent and tell else policy
                games = [open_game(make_env, args.env_id, "human" if self.render else "rgb_array", seeds[0])]
                returns = np.concatenate([play_episodes(games, policy, [each], said=said)[0] for each in seeds])
            else:
                games = open_games(make_env, args.env_id, seeds)
                returns, _ = play_episodes(games, policy, seeds, said=said)
                print(*(f"{plain(str(game.unwrapped.render()))}\n" for game in games if text), sep="", end="")
            for game in games:
                game.close()
            mean, std, low, high = scores(returns.mean(), returns.std(), returns.min(), returns.max())
            who = f"{len(seeds)} {'stochastic' if self.stochastic else 'greedy'} episodes"
            also = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in means(said).items())
            print(f"{plain(args.env_id)}: {mean} ± {std} over {who}, from {low} to {high}{also}")
            if self.video and (path := film_to(run_dir, "play.mp4", seeds[0], policy, make_env, args.env_id)):
                print(f"video {plain(str(path))}")

    def _points(self, env_id: str, policy: Policy, make_env: MakeEnv, seeds: Sequence[int]) -> None:
        """Say the fraction of points on each side of the board."""
        for side, word in enumerate(("first", "second")):
            points, _ = play_episodes(open_games(partial(make_env, side=side), env_id, seeds), policy, seeds)
            low, high = interval(points)
            said = f"{points.mean():.3f} of the points in {len(seeds)} games, 95 % interval {low:.3f} to {high:.3f}"
            print(f"{plain(env_id)} against {plain(self.opponent)}, moving {word}: {said}")


def _told(policy: Policy, tell: Policy, obs: Any, action_mask: Any) -> Any:
    """The actions of a policy that says first what its search has found."""
    for value, visits in zip(*tell(obs, action_mask), strict=True):
        print(f"value {value:+.2f}, visits", ", ".join(f"{move}: {n:.0f}" for move, n in enumerate(visits, 1)))
    return policy(obs, action_mask)


_PLAY: ContextVar[Play | None] = ContextVar("play", default=None)


def play_wanted() -> Play | None:
    """What the runs that are made now are for, while `play_script` runs their script; None: they train."""
    return _PLAY.get()


def load(
    run_dir: str | os.PathLike[str], *, last: bool = False, trust_script: bool = False, device: str | None = None
) -> LoadedPolicy:
    """The policy of a run folder's best evaluation; with `last`, the one at the end of training (`model_last`). It
    computes on `device`, as `--device` takes it; by default on a GPU where there is one, else on the CPU.

    This executes the script that made the folder, up to its `run.close`. It must be equal to the algorithm of its name
    in this installation or to your own file from which the run was started; `trust_script` executes any other. Random
    states, `sys.argv` and settings of torch and JAX are afterwards as they were; nothing is printed. Several threads
    may load: one waits for the other. UsageError, with one sentence, where that cannot be done.
    """
    return _load(run_dir, LAST_MODEL if last else MODEL, trust_script, device)


def environment_of(run_dir: Path, trust_script: bool) -> Any:
    """An environment as the training had it, also of a run without a model; see `load`."""
    return _load(run_dir, "", trust_script, "cpu").make_env()


def _load(run_dir: str | os.PathLike[str], model: str, trust_script: bool, device: str | None) -> LoadedPolicy:
    refuse(str(run_dir).startswith("hf://"), f"{run_dir} is on the hub; `solo pull` makes a run folder of it")
    copy, original = script_of(Path(run_dir))
    refuse(original is None and not trust_script, not_trusted(copy))
    found: list[LoadedPolicy] = []
    play = Play(model=model, take=found.append)
    imports = set(re.findall(r"^\s*(?:import|from) (jax|torch)\b", copy.read_text(encoding="utf-8"), flags=re.M))
    with _unchanged(imports), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            flags = () if device is None else ("--device", device)
            how, own = "" if trust_script else FLAG, original not in (None, copy)
            play_script(original or copy, Path(run_dir), play, own, flags, how)
        except SystemExit as end:
            said = " ".join(getattr(end, "__notes__", ())) or f"{copy.name} ended before run.close ({end.code})"
            raise UsageError(said) from end
    refuse(not found, f"{copy} came to its end without run.close, which hands over the policy")
    return replace(found[-1], score=score_of(Path(run_dir) / model) if model else None)


def score_of(model: Path) -> float | None:
    """The mean return of the evaluation after which a model file was saved; None where it names none."""
    from safetensors import safe_open

    with contextlib.suppress(ValueError), safe_open(model, framework="numpy") as file:
        return float((file.metadata() or {}).get("eval/episodic_return", ""))
    return None


def play_script(
    path: Path, run_dir: Path, play: Play, neighbours: bool, flags: Sequence[str] = (), how: str = FLAG
) -> None:
    """Run a script as `solo play` needs it: it loads the model, its loop is empty, and `run.close` does what `play`
    says. `flags` may be those of the run library, such as `--device`. `how`: see `trust.HOW`."""
    before, asked = _PLAY.set(play), HOW.set(how)
    try:
        # on what there is here, since who trains on a GPU may play on a machine that has none
        run_script(path, ["--resume", str(run_dir), "--device", "auto", *flags], neighbours)
    finally:
        _PLAY.reset(before)
        HOW.reset(asked)


def run_script(path: Path, flags: Sequence[str], neighbours: bool = True) -> None:
    """Run a file in this process as `python path flags...` would; its exceptions and SystemExit pass through. Without
    `neighbours` it does not find the modules in its folder. UsageError if it imports a module that is missing and that
    one of our extras brings, and any that is missing without `neighbours` or where the run is only played."""
    argv, search = sys.argv, list(sys.path)
    sys.argv = [str(path), *flags]
    if neighbours:
        sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except ModuleNotFoundError as error:
        alone = "" if neighbours else "; a copy finds no modules next to it: set PYTHONPATH"
        lacks = f"{path} needs {error.name}, which is not installed{alone}"
        if sentence := missing_extra(path.name, error) or ((alone or play_wanted()) and lacks):
            raise UsageError(sentence) from error
        raise
    finally:
        sys.argv, sys.path[:] = argv, search


def script_of(run_dir: Path) -> tuple[Path, Path | None]:
    """The copied script in a run folder, and the file outside of it that may be executed for it, if there is one;
    UsageError if the folder, its config.json or the script is missing, or the folder holds links."""
    refuse(run_dir.is_file(), f"{run_dir} is a file, but a run is a folder: {run_dir.parent}")
    if not run_dir.is_dir():
        raise missing("run folder", run_dir)
    refuse_links(run_dir)
    if not (config := config_of(run_dir)):
        raise UsageError(f"{run_dir} is not a run folder: it has no {CONFIG} that can be read")
    name = config.get("script")
    if not (is_plain_name(name) and name.endswith(".py") and (run_dir / name).is_file()):
        raise UsageError(f"{run_dir} has lost its script {name}; without it the agent cannot be played")
    return run_dir / name, trusted(run_dir / name, config.get("script_path"))


@contextlib.contextmanager
def _unchanged(imports: set[str]) -> Iterator[None]:
    """Whatever a script does inside leaves random states, environment variables, the hook for uncaught exceptions and
    the settings of torch and JAX as they were. `imports`: those of torch and JAX that it imports."""
    for name in imports:  # now, so that their states are known
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from unittest import mock  # here, because it is slow to import

    with LOADING, contextlib.ExitStack() as after, mock.patch.dict(os.environ), undisturbed():
        after.callback(setattr, sys, "excepthook", sys.excepthook)
        if torch := sys.modules.get("torch"):
            after.callback(torch.set_num_threads, torch.get_num_threads())
            after.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
            after.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            memory = torch.utils.deterministic
            after.callback(setattr, memory, "fill_uninitialized_memory", memory.fill_uninitialized_memory)
        if jax := sys.modules.get("jax"):
            for name in JAX_SETTINGS:
                after.callback(jax.config.update, name, getattr(jax.config, name))
        yield
