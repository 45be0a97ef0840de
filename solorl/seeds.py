"""The verbs of `Run` for JAX: one process trains the seeds seed, seed + 1, ..., each with a run folder of its own.

    resume, compile, loop, episodes, log, evaluate, save, close

What a training is at any moment stands in one pytree, `training`, whose leaves have an axis of seeds in front. The host
meets it between chunks of iterations only: a chunk is one call of compiled code. This module knows no algorithm, no
network and no loss.
"""

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from solorl import state
from solorl.arguments import RunArgs
from solorl.errors import quit_with
from solorl.run import Run, signals

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "solorl" / "jax"  # of compiled code


def names_of(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree under names like `params.actor.0.weight`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


class _Slice:
    """What a checkpoint holds of one seed: its slice of every leaf of `runs.training`, or of one field of it."""

    def __init__(self, runs: "Runs", index: int, field: str = ""):
        self.runs, self.index, self.field = runs, index, field
        self.loaded: dict[str, np.ndarray] | None = None

    def state_dict(self) -> dict[str, np.ndarray]:
        """Name -> array, of this seed."""
        tree = getattr(self.runs.training, self.field) if self.field else self.runs.training
        return {name: np.asarray(leaf[self.index]) for name, leaf in names_of(tree).items()}

    def load_state_dict(self, arrays: Mapping[str, Any]) -> None:
        """Keep the arrays until all seeds have theirs. Raises CheckpointError where they do not fit."""
        mine = self.state_dict()
        for name, array in mine.items():
            if name not in arrays or np.shape(arrays[name]) != array.shape:
                raise state.CheckpointError(f"{name} is missing or of another shape than {array.shape}")
        self.loaded = {name: np.asarray(arrays[name], array.dtype) for name, array in mine.items()}


class _SeedRun(Run):
    """The run of one seed; its model is a field of the training."""

    model: _Slice
    quiet = False  # of several seeds the group speaks

    def _device(self) -> Any:
        return jax.config.jax_default_device or jax.devices()[0]

    def _modules(self) -> dict[str, Any]:
        return {self.model.field: self.model}

    def _say(self, text: str, file: Any = None) -> None:
        if not self.quiet or file is not None:
            super()._say(text, file)

    def _progress(self, sps: float) -> None:
        self.sps = sps
        if not self.quiet:
            super()._progress(sps)

    def start_clock(self) -> None:
        """Training time counts from now on: compilation is part of the wait."""
        self._resumed_at = time.perf_counter()

    def at(self, iteration: int, is_last: bool) -> None:
        """Say which iteration the verbs are called behind."""
        self._iteration, self._is_last = iteration, is_last

    def pause(self, seconds: float) -> None:
        """Do not count these seconds as training time."""
        self._plumbing += seconds

    def stop_by(self, number: int) -> None:
        """End behind the next save, as after a signal."""
        self._signal = number

    @property
    def ending(self) -> str:
        """Why the run ends; empty while it goes on."""
        return self._ending

    @property
    def recent_return(self) -> float:
        """Mean return of the last 100 episodes; NaN before the first."""
        return float(np.mean(self._recent)) if self._recent else math.nan

    @property
    def last_evaluation(self) -> tuple[int, float]:
        """Step (-1: none yet) and mean return of the last evaluation."""
        return self._last_eval[:2]


class Runs:
    """The trainings of `--num-seeds` seeds, side by side in one process."""

    def __init__(self, args: RunArgs):
        self.args = args
        self.num_seeds: int = args.num_seeds  # type: ignore[attr-defined]
        _choose_device(args.device if args.cuda or args.device != "auto" else "cpu")
        folders = self._folders()
        self.runs = [_SeedRun(self._args_of(i, folders)) for i in range(self.num_seeds)]
        for run in self.runs:
            run.quiet = self.num_seeds > 1
        self.keys = jnp.stack([jax.random.PRNGKey(run.args.seed) for run in self.runs])  # (num_seeds, 2)
        self.training: Any = None
        self._active = list(range(self.num_seeds))
        self._chunk, self._printed = 1, 0.0
        self._policies: dict[Any, Any] = {}

    # ------------------------------------------------------------------ verbs, in the order of a script
    def require(self, condition: Any, sentence: str) -> None:
        """See `Run.require`."""
        self.runs[0].require(condition, sentence)

    def require_spaces(self, envs: Any, obs: str, action: str) -> None:
        """See `Run.require_spaces`."""
        self.runs[0].require_spaces(envs, obs, action)

    def resume(self, training: Any, model: str) -> tuple[int, Any]:
        """Name all that a checkpoint must hold: `training`, a NamedTuple with an axis of seeds in front of every leaf.
        `model` is the field of it that `act` needs: it becomes model.safetensors.

        Returns the iteration to start from, and the training: as given, or with `--resume` as saved. Opens the run
        folders: nothing has been written before.
        """
        self.training = training
        starts = []
        for i, run in enumerate(self.runs):
            run.model, part = _Slice(self, i, model), _Slice(self, i)
            try:
                starts.append(run.resume(training=part))
            except state.CheckpointError as error:
                quit_with(f"the checkpoint in {run.dir} does not fit: {error}")
            for loaded, field in ((part.loaded, ""), (run.model.loaded, model)):
                if loaded is not None:
                    self._put(i, loaded, field)
        if len(set(starts)) > 1:
            quit_with(f"the seeds stand at different iterations ({starts}); resume each alone, with its own folder")
        if self.num_seeds > 1 and Run.play is None:
            names = [run.dir.name for run in self.runs]
            for run in self.runs:
                state.write_atomically(run.dir / "together.json", json.dumps(names).encode())
            self._say(f"run folders {names[0]} to {names[-1]} in {self.runs[0].dir.parent}")
        return starts[0], self.training

    def compile(self, iteration: Callable[[Any], Any], chunk: int) -> Callable[[Any, range], Any]:
        """Compile up to `chunk` iterations of all seeds into one call, `train(training, iterations)`.

        `iteration` maps the training of one seed to what it is one iteration later and a pytree to report. `train`
        returns the training and the reports as NumPy arrays (num_seeds, len(iterations), ...). The buffers of its
        argument are used again: only the training it returns is alive. Compiled code is kept on disk for later runs.
        """
        if Run.play is not None:
            return lambda training, iterations: (training, None)
        began = time.perf_counter()
        for run in self.runs:
            run.start_clock()
        self._chunk = chunk
        CACHE.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(CACHE)))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        compiled = jax.jit(_chunk_of(_of_all_seeds(iteration, self.num_seeds), chunk), donate_argnums=0)
        call = compiled.lower(self.training, jnp.int32(0)).compile()
        self._say(f"compiled in {time.perf_counter() - began:.1f} s")

        def train(training: Any, iterations: range) -> Any:
            self.training, history = call(training, jnp.int32(len(iterations)))
            cut = jax.tree.map(lambda x: np.moveaxis(np.asarray(x)[: len(iterations)], 1, 0), history)
            return self.training, cut

        return train

    def loop(self, start: int, num_iterations: int, batch_size: int) -> Iterator[range]:
        """Chunks of iterations from `start` on, as ranges, so that evaluations and checkpoints are due at their ends.
        `batch_size` is the number of environment steps of one iteration. Ends early as `Run.loop` does."""
        if Run.play is not None:
            return
        with signals(self._on_signal):
            while start < num_iterations and self._active:
                end = min(num_iterations, (start // self._chunk + 1) * self._chunk)
                for every in filter(None, (self.args.eval_every, self.args.save_every)):
                    due = (start * batch_size // every + 1) * every  # the next step at which one is due
                    end = min(end, -(-due // batch_size))
                for i in self._active:
                    self.runs[i].at(end - 1, end == num_iterations)
                yield range(start, end)
                if any(self.runs[i].ending == "signal" for i in self._active):
                    break
                start = end

    def episodes(self, global_step: int, reward: Any, done: Any) -> None:
        """See `Run.episodes`; both (num_seeds, iterations, num_steps, num_envs)."""
        for i in self._active:
            shape = (-1, reward.shape[-1])
            self.runs[i].episodes(global_step, reward[i].reshape(shape), done[i].reshape(shape))

    def log(self, global_step: int, metrics: Mapping[str, Any]) -> None:
        """Write a row of each seed, metrics are (num_seeds,); see `Run.log`. `charts/SPS` counts the steps of a seed."""
        for i in self._active:
            self.runs[i].log(global_step, {name: value[i] for name, value in metrics.items()})
        self._progress(global_step)

    def evaluate(self, global_step: int, act: Callable[..., Any], params: Any, make_env: Callable[..., Any]) -> None:
        """See `Run.evaluate`; the policy of a seed is `act(params of the seed, obs)`, compiled here."""
        for i in self._active:
            self._alone(i, lambda run, i=i: run.evaluate(global_step, self._policy(act, params, i), make_env))
        self._say_mean(global_step)
        self._ends = (act, params, make_env)

    def save(self, global_step: int) -> None:
        """See `Run.save`. A seed that has reached `--target-return` is closed; the others go on."""
        for i in list(self._active):
            self._alone(i, lambda run: run.save(global_step))
            if self.runs[i].ending not in ("", "signal"):
                self._close(i, *self._ends)
                self._active.remove(i)

    def close(self, act: Callable[..., Any], params: Any, make_env: Callable[..., Any]) -> None:
        """See `Run.close`."""
        code = None
        for i in self._active:
            try:
                self._close(i, act, params, make_env)
            except SystemExit as exit:
                code = exit.code
        if self.num_seeds > 1 and Run.play is None:
            self._say_mean(-1)
        if code is not None:
            raise SystemExit(code)

    # ------------------------------------------------------------------ parts of the verbs
    def _folders(self) -> list[str]:
        """The folders to resume, one a seed, or empty names."""
        if not self.args.resume or self.num_seeds == 1:
            return [self.args.resume] * self.num_seeds
        first = Path(self.args.resume)
        try:
            names = json.loads((first / "together.json").read_text())
        except OSError:
            names = [first.name]
        if len(names) != self.num_seeds or names[0] != first.name:
            quit_with(
                f"{first} holds seed 1 of {len(names)} trained together, not of {self.num_seeds}; "
                f"go on with --num-seeds {len(names)} and the folder of the first seed, or with one seed alone"
            )
        return [str(first.with_name(name)) for name in names]

    def _args_of(self, index: int, folders: list[str]) -> Any:
        """The arguments of one seed as if it were trained alone, so that it can be resumed alone."""
        return dataclasses.replace(
            self.args, seed=self.args.seed + index, resume=folders[index], num_seeds=1
        )  # type: ignore[call-arg]

    def _put(self, index: int, arrays: Mapping[str, np.ndarray], field: str) -> None:
        """Write the arrays of one seed into the training."""
        tree = getattr(self.training, field) if field else self.training
        leaves = [leaf.at[index].set(arrays[name]) for name, leaf in names_of(tree).items()]
        tree = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), leaves)
        self.training = self.training._replace(**{field: tree}) if field else tree

    def _policy(self, act: Callable[..., Any], params: Any, index: int) -> Callable[[Any], Any]:
        """The greedy policy of one seed, NumPy to NumPy."""
        if act not in self._policies:
            self._policies[act] = jax.jit(act)
        mine = jax.tree.map(lambda x: x[index], params)
        return lambda obs: np.asarray(self._policies[act](mine, np.asarray(obs, np.float32).reshape(len(obs), -1)))

    def _alone(self, index: int, verb: Callable[[Run], None]) -> None:
        """Call a verb of one run; what it takes is not training time of the others."""
        began = time.perf_counter()
        verb(self.runs[index])
        for other in self._active:
            if other != index:
                self.runs[other].pause(time.perf_counter() - began)

    def _say(self, text: str) -> None:
        Run._say(self.runs[0], text)

    def _close(self, index: int, act: Callable[..., Any], params: Any, make_env: Callable[..., Any]) -> None:
        self.runs[index].close(self._policy(act, params, index), make_env)

    def _on_signal(self, number: int, frame: Any) -> None:
        for run in self.runs[1:]:
            run.stop_by(number)
        self.runs[0].quiet = False  # it speaks for all
        self.runs[0].on_signal(number, frame)
        self.runs[0].quiet = self.num_seeds > 1

    def _progress(self, global_step: int) -> None:
        now = time.perf_counter()
        if self.num_seeds == 1 or now - self._printed < 10.0:
            return
        self._printed = now
        recent = [run.recent_return for run in self.runs]
        rate = sum(self.runs[i].sps for i in self._active)
        self._say(
            f"step {global_step:>10,}  return {np.nanmean(recent):>8.1f} over {self.num_seeds} seeds  {rate:>9,.0f} steps/s"
        )

    def _say_mean(self, global_step: int) -> None:
        """One line for the evaluations of all seeds at this step; of their last ones for -1."""
        if self.num_seeds == 1:
            return
        found = [run.last_evaluation for run in self.runs]
        means = [mean for step, mean in found if global_step in (-1, step)]
        if means:
            when = f"step {global_step:>10,}" if global_step >= 0 else "in the end:    "
            self._say(
                f"{when}  evaluation {np.mean(means):.1f}, from {min(means):.1f} to {max(means):.1f}, of {len(means)} seeds"
            )


def _of_all_seeds(iteration: Callable[[Any], Any], num_seeds: int) -> Callable[[Any], Any]:
    """`iteration` for trainings with an axis of seeds in front."""
    if num_seeds > 1:
        return jax.vmap(iteration)

    def one(training: Any) -> Any:
        result = iteration(jax.tree.map(lambda x: x[0], training))
        return jax.tree.map(lambda x: x[None], result)

    return one


def _chunk_of(iteration: Callable[[Any], Any], chunk: int) -> Callable[[Any, Any], Any]:
    """`count` iterations in a row, at most `chunk`, and their reports (chunk, ...), of which the first `count` count."""

    def many(training: Any, count: Any) -> Any:
        report = jax.eval_shape(iteration, training)[1]
        history = jax.tree.map(lambda x: jnp.zeros((chunk, *x.shape), x.dtype), report)

        def body(i: Any, carry: Any) -> Any:
            training, report = iteration(carry[0])
            return training, jax.tree.map(lambda all, one: all.at[i].set(one), carry[1], report)

        return jax.lax.fori_loop(0, count, body, (training, history))

    return many


def _choose_device(name: str) -> None:
    """Let JAX use the device of `--device`; one sentence and exit code 2 where there is none."""
    if name == "auto":
        return
    platform, _, number = name.partition(":")
    platform = {"cuda": "gpu"}.get(platform, platform)
    try:
        devices = jax.devices(platform)
        jax.config.update("jax_default_device", devices[int(number or 0)])
    except (RuntimeError, ValueError, IndexError):
        there = sorted({device.platform for device in jax.devices()})
        quit_with(f"--device {name} was asked for, but JAX sees only {', '.join(there)}; --device cpu runs everywhere")
