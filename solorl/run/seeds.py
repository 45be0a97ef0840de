"""The verbs of `Run` for JAX: one process trains the seeds seed, seed + 1, ..., each with a run folder of its own.

    require, resume, compile, loop, episodes, log, evaluate, save, close

What the training of a seed is at any moment stands in one pytree. The host meets it between chunks of iterations
only: a chunk is one call of compiled code. On the CPU every seed is trained by the same code as when it is alone, one
thread per core; its results are the same to the last bit if XLA has as many threads (`--threads`), else up to the order
in which floating-point numbers are added. So they are on other devices, where one call trains all seeds side by side
(vmap). This module knows no algorithm, no network and no loss.
"""

import dataclasses
import functools
import inspect
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from solorl import memory, signals
from solorl.args.arguments import RunArgs, check_unchanged, saved_arguments
from solorl.checkpoints import checkpoint
from solorl.checkpoints.replay_jax import JaxReplay, replays_of, with_own_buffers, without_replay
from solorl.checkpoints.safety import is_plain_name
from solorl.compute.device import device_words
from solorl.envs.open import open_envs
from solorl.envs.spaces import as_arrays
from solorl.errors import UsageError, quit_with
from solorl.files import write_atomically
from solorl.machine import own_cores
from solorl.run.folder import read_status
from solorl.run.summary import how_to_go_on
from solorl.run.verbs import DIVERGED, UNSAVED, Run
from solorl.terminal import Progress, paint, say, warn, wiped

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "solorl" / "jax"  # of compiled code
# Operations of microseconds: handing them to other threads costs more than it brings.
PARALLEL = ("xla_cpu_multi_thread_eigen", "xla_cpu_enable_concurrency_optimized_scheduler")
ONE_THREAD: dict[str, str | bool] = dict.fromkeys(PARALLEL, False)
WITHOUT_EFFECT = {  # flags that files in JAX have like all others: why they change nothing
    "compile": "these files are always compiled",
    "fast": "these files have no other way",
    "torch_deterministic": "these files do not use torch",
    "save_replay": "checkpoints of these files hold everything anyway",
}
OF_ENVIRONMENTS = ("replay", "env_state", "obs")  # fields of a training that are not learned


def names_of(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree under names like `params.actor.0.weight`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _replaced(tree: Any, field: str, new: Any) -> Any:
    """A NamedTuple with another value in a field, or in a field of a field (`learner.actor`)."""
    if not field:
        return new
    first, _, rest = field.partition(".")
    return tree._replace(**{first: _replaced(getattr(tree, first), rest, new)})


class _Part:
    """What a checkpoint holds of one seed: its training, or one field of it (`params`, `learner.actor`)."""

    def __init__(self, runs: "Runs", index: int, field: str = ""):
        self.runs, self.index, self.field = runs, index, field

    def tree(self) -> Any:
        """The arrays as the script has them."""
        return self.runs.training(self.index, self.field)

    def _tree(self, without: Sequence[str]) -> Any:
        """The field, or all fields of the training but those named."""
        if self.field:
            return self.runs.training(self.index, self.field)
        fields = self.runs._trainings[self.index]._fields
        return {field: self.runs.training(self.index, field) for field in fields if field not in without}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Name -> array."""
        return {name: np.asarray(leaf) for name, leaf in names_of(self._tree(self.runs.saved_apart)).items()}

    def must_be_finite(self) -> dict[str, np.ndarray]:
        """Name -> array of the whole training, without what belongs to the environments."""
        return {
            name: np.asarray(leaf)
            for name, leaf in names_of(self._tree((*OF_ENVIRONMENTS, *self.runs.saved_apart))).items()
        }

    def load_state_dict(self, arrays: Mapping[str, Any]) -> None:
        """Bring the training into the saved state; UsageError where the arrays do not fit.

        The arrays of a field named `replay`, rings of rows, may be longer than the saved ones if those have not begun
        to overwrite their rows.
        """
        tree = self._tree(self.runs.saved_apart)
        leaves = []
        for name, leaf in names_of(tree).items():
            if name.startswith("replay.") and name in arrays:
                rows = len(arrays[name])
                saved = self.runs.runs[self.index].checkpoints.resumed.get("step", 0)
                if saved <= rows < len(leaf):
                    missing = [(0, len(leaf) - rows), *[(0, 0)] * (leaf.ndim - 1)]
                    arrays = {**arrays, name: np.pad(arrays[name], missing)}
            if name not in arrays or np.shape(arrays[name]) != leaf.shape:
                what = f"{name} is missing or has another shape than {leaf.shape}"
                raise UsageError(f"what was saved does not fit: {what}")
            leaves.append(jnp.asarray(np.asarray(arrays[name]), leaf.dtype))
        tree = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), leaves)
        for field, value in {self.field: tree}.items() if self.field else tree.items():
            self.runs.put(self.index, field, value)


@dataclasses.dataclass(eq=False)
class PolicyOfSeed:
    """A policy of one seed, NumPy to NumPy, with the signature of `act` without the model and without `key`: it may
    have memory, masks and an axis of agents (see `Policy` in evaluation.py).

    Observations have the shape that the environment gave them; JAX makes 32 bits of 64. Where `act` has a parameter
    `key`, it gets a new one at each call, drawn from NumPy's random numbers.
    """

    act: Callable[..., Any]  # a pure function of the model and of observations, as a script has it
    compiled: Callable[..., Any]  # the same
    model: Callable[[], Any]  # returns the model

    def __post_init__(self) -> None:
        known = list(inspect.signature(self.act).parameters.values())
        self.draws = any(each.name == "key" for each in known)
        self.__signature__ = inspect.Signature([each for each in known[1:] if each.name != "key"])

    def __call__(self, obs: Any, *memory: Any, **given: Any) -> Any:
        """The actions for a batch of observations; with memory also the next state, as JAX has it."""
        if self.draws:
            given["key"] = jax.random.PRNGKey(np.random.randint(2**31 - 1))
        try:
            result = self.compiled(self.model(), obs, *memory, **given)
        except (TypeError, ValueError):
            self._refuse_where_flat(obs, *memory, **given)
            raise
        if "state" not in self.__signature__.parameters:
            return as_arrays(result)
        action, state = result
        return as_arrays(action), state

    def _refuse_where_flat(self, obs: Any, *memory: Any, **given: Any) -> None:
        """UsageError where `act` takes flat observations, as the library once gave them."""
        try:
            flat = np.asarray(obs, np.float32).reshape(len(obs), -1)
            jax.eval_shape(self.act, self.model(), flat, *memory, **given)
        except Exception:  # then that is not the reason
            return
        what = f"observations come as the environment gives them, here {np.shape(obs)}, and act takes flat ones"
        raise UsageError(f"{what}; it must begin with: obs = obs.reshape(len(obs), -1)")

    def with_weights(self, arrays: Mapping[str, Any]) -> "PolicyOfSeed":
        """The same policy with another model, given as name -> array."""
        model = self.model()
        other = jax.tree.unflatten(jax.tree.structure(model), [arrays[name] for name in names_of(model)])
        return dataclasses.replace(self, model=lambda: other)


class Runs:
    """The trainings of `--num-seeds` seeds in one process."""

    def __init__(self, args: RunArgs):
        self.args = args
        self.num_seeds: int = args.num_seeds  # type: ignore[attr-defined]
        # of XLA, for all seeds: with as many a seed continues exactly, together and alone (see _arguments)
        self.threads = _start_xla(args.threads if args.resume else args.threads * self.num_seeds)
        _choose_device(args.device if args.cuda or args.device != "auto" else "cpu")
        _keep_compiled_code(self.threads)
        device = jnp.zeros(()).device  # that of new arrays
        self.runs = [Run(each, device=device, quiet=self.num_seeds > 1) for each in self._arguments()]
        self.play = self.runs[0].play
        self._model = ""  # the field of a training that `act` needs
        self.side_by_side = self.num_seeds > 1 and not _is_cpu(self.runs[0].device)  # vmap
        self._envs: Any = None
        self.saved_apart: tuple[str, ...] = ()  # the fields of a training that are a part of their own in a checkpoint
        self._trainings: list[Any] = []
        self._stack: Any = None  # all trainings in one, an axis of seeds in front of each leaf, where side_by_side
        self._active = list(range(self.num_seeds))
        self._chunk, self._line = 1, Progress()
        self._code: Any = None  # with which a seed has ended that did not come to its end
        self._common: int | None = None  # step of the newest checkpoint that all active seeds have
        self._acts: dict[Any, Any] = {}
        self._made: tuple[Any, Any, Sequence[str]] = (None, None, ())  # what `evaluate` got
        self._waiting: list[int] = []  # seeds that have ended before there was a policy to close them with
        self._before: dict[int, Any] = {}  # as in `Run`

    # ------------------------------------------------------------------ verbs, in the order of a script
    def require(self, condition: Any, sentence: str) -> None:
        """See `Run.require`."""
        self.runs[0].require(condition, sentence)

    def require_spaces(self, envs: Any, obs: str, action: str) -> None:
        """See `Run.require_spaces`."""
        self.runs[0].require_spaces(envs, obs, action)

    def open_envs(self, env_id: str, num_envs: int) -> Any:
        """Environments for training: in JAX if there are any of this kind, else in EnvPool."""
        self._envs = open_envs(env_id, num_envs, num_threads=max(1, len(own_cores()) // self.num_seeds))
        return self._envs

    def teacher(self, address: str, envs: Any, part: str, trust_script: bool = False) -> Any:
        """See `Run.teacher`; all seeds have the same one."""
        policy = self.runs[0].teacher(address, envs, part, trust_script)
        for run in self.runs[1:]:
            run._teacher = self.runs[0]._teacher
        return policy

    def resume(self, begin: Callable[[Any], Any], model: str, envs: Sequence[str] = ()) -> tuple[Any, int]:
        """Begin the training of each seed: `begin` maps the key of a seed to a NamedTuple of all that will change; a
        checkpoint holds it. `model` is the field of it that `act` needs (`params`, `learner.actor`): it becomes
        model.safetensors. A replay buffer that counts its rows (see `replay_jax`) is saved with `--save-replay` only.

        With `--resume` the trainings are as saved, except the fields `envs` where no checkpoint can hold the
        environments: then their episodes start again, and the run says so. Several seeds continue from the newest step
        of which all have a whole checkpoint; one that had ended before the others stays as it is. Opens the run
        folders: nothing has been written before.

        Returns the training and the iteration to start from, as `Run.resume` does. With several seeds the training is a
        list of one for each, because on the CPU each runs the same code as alone; on other devices, where one call
        trains all (vmap), it is one whose leaves have a first axis of seeds.
        """
        lost = () if self._envs.saved else tuple(envs)
        if self.play:
            begin = functools.partial(without_replay, begin)
        start = jax.jit(begin)
        keys = [jax.random.PRNGKey(run.args.seed) for run in self.runs]
        for leaf in jax.tree.leaves(jax.eval_shape(begin, keys[0])) if _is_cpu(self.runs[0].device) else ():
            memory.check_array(self.args, leaf.shape, leaf.dtype.itemsize * self.num_seeds)
        self._trainings = [with_own_buffers(start(key)) for key in keys]
        self.saved_apart = replays_of(self._trainings[0])
        again = jax.jit(lambda key: {field: getattr(begin(key), field) for field in lost})
        if teams := getattr(self._envs, "teams", None):
            for run in self.runs:
                run.meter.teams, run.meter.agents = teams, list(self._envs.agents)
        if self.args.resume and self.num_seeds > 1:
            self._choose_checkpoints()
        self._model, starts = model, []
        for i in self._active:
            run = self.runs[i]
            models = {model.rpartition(".")[2]: _Part(self, i, model)}
            parts = {field: self._replay(i, field) for field in self.saved_apart}
            starts.append(run._fit({"training": _Part(self, i), **parts}, models))
            if lost and starts[-1]:
                for field, fresh in again(jax.random.fold_in(keys[i], starts[-1])).items():
                    self.put(i, field, fresh)
                run.meter.begin_episodes()
        if len(set(starts)) > 1:
            quit_with(f"the seeds stand at different iterations ({starts}); resume each alone, by its own folder")
        active = [self.runs[i] for i in self._active]
        for run in active if not self.play else ():  # nothing has been written before all fit
            run._begin(starts[0])
        if lost and starts[0]:
            warn(f"the environments of {self.args.env_id} cannot be saved, so their running episodes start again")  # type: ignore[attr-defined]
        if self.num_seeds > 1 and not self.play:
            names = [run.dir.name for run in self.runs]
            for run in active:
                write_atomically(run.dir / "together.json", json.dumps(names).encode())
            self._say(f"run folders {names[0]} to {names[-1]} in {self.runs[0].dir.parent}")
            if self._common is not None:
                self._say(f"resumed at step {self._common:,} (iteration {starts[0]})")
            elif self.args.resume:
                self._say("not all seeds have a checkpoint yet: starting from the beginning")
            self._say(device_words(self.runs[0].device, self.threads))
        if self.side_by_side and not self.play:
            self._stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *self._trainings)
        return self._all(), starts[0]

    def training(self, index: int, field: str = "", rows: Any = ...) -> Any:
        """The training of one seed as it is now, one field of it, or some rows of one array. Its arrays are gone once
        the training continues."""
        tree = self._trainings[index] if self._stack is None else self._stack
        tree = attrgetter(field)(tree) if field else tree
        if self._stack is not None:
            return jax.tree.map(lambda x: x[index] if rows is ... else x[index, rows], tree)
        return tree if rows is ... else tree[rows]

    def put(self, index: int, field: str, tree: Any) -> None:
        """Replace the training of one seed, or one field of it; before `compile`."""
        self._trainings[index] = _replaced(self._trainings[index], field, tree)

    def compile(self, iteration: Callable[[Any], Any], chunk: int) -> Callable[[Any, range], Any]:
        """Compile up to `chunk` iterations into one call; returns `train(training, iterations)`, which does as many as
        the range is long and returns the training after them, and what they report, as NumPy arrays (num_seeds,
        len(iterations), ...). It writes over the training that it gets. Rows of seeds that have reached
        `--target-return` mean nothing.

        `iteration` maps the training of one seed to that one iteration later and a pytree to report. It is compiled in
        the first call; compiled code is kept on the disk for later runs. A training in several phases has an
        `iteration` for each, which is named right before its loop.
        """
        self._chunk = chunk

        @functools.cache
        def compiled() -> Callable[[range], Any]:
            began = time.perf_counter()
            if self.side_by_side:
                train = self._side_by_side(_compiled(jax.vmap(iteration), chunk, self._stack))
            else:
                train = self._in_threads(_compiled(iteration, chunk, self._trainings[0]))
            self._say(f"compiled in {time.perf_counter() - began:.1f} s")
            return train

        def train(training: Any, iterations: range) -> Any:
            self._take(training)
            report = compiled()(iterations)
            return self._all(), report

        return train

    def loop(self, start: int, num_iterations: int, batch_size: int, last: bool = True) -> Iterator[range]:
        """Chunks of iterations from `start` on, as ranges, so that evaluations and checkpoints are due at their ends.
        `batch_size` is the number of environment steps of one iteration. Ends early, and may be followed by other loops
        unless it is the `last` one, as `Run.loop`."""
        found = [self.runs[i]._iterations(start, num_iterations, last) for i in self._active]
        iterations = max(found, key=len, default=range(0))
        start, stop = iterations.start, iterations.stop
        begun = max(run.step for run in self.runs) - start * batch_size  # environment steps before this loop
        if not self._before and not self.play:
            self._start()
        if self.num_seeds == 1 and start < stop:
            (self.runs[0].dir / "together.json").unlink(missing_ok=True)  # from now on it is trained alone
        try:
            while start < stop and self._active:
                end = stop
                for every in filter(None, (self._chunk * batch_size, self.args.eval_every, self.args.save_every)):
                    due = ((begun + start * batch_size) // every + 1) * every  # the next step at which one is due
                    end = min(end, -(-(due - begun) // batch_size))
                for i in self._active:
                    self.runs[i].iteration, self.runs[i].is_last = end - 1, last and end == stop
                yield range(start, end)
                if all(self.runs[i].ending == "signal" for i in self._active):  # else it came between two saves
                    break
                start = end
        except BaseException:
            signals.restore(self._before)
            raise
        for run in self.runs:
            run.trained = last or run.ending != ""

    def _start(self) -> None:
        """What the first loop begins with."""
        for name, reason in WITHOUT_EFFECT.items():
            if getattr(self.args, name) != getattr(RunArgs, name) and not (name == "save_replay" and self.saved_apart):
                flag = name.replace("_", "-")
                warn(f"--{'no-' if getattr(RunArgs, name) else ''}{flag} changes nothing here: {reason}")
        for run in self.runs:
            run.meter.start()
        self._before = signals.listen(self._on_signal)  # XLA must not be interrupted

    def episodes(self, global_step: int, reward: Any, done: Any, per_agent: bool = False) -> None:
        """See `Run.episodes`; both (num_seeds, iterations, ..., num_envs), with a last axis of agents where the
        environments have several (`teams` and `agents`, as `PettingZooEnvs` has them)."""
        last = 1 if self.runs[0].meter.teams is None else 2
        shape = (-1, *reward.shape[-last:])
        for i in self._active:
            self.runs[i].episodes(global_step, reward[i].reshape(shape), done[i].reshape(shape), per_agent)

    def learned(self, sums: Mapping[str, Any], count: Any) -> None:
        """Count metrics of gradient steps into the means that the next row of `log` will have: their sums over the
        gradient steps of each iteration, and how many there were, all (num_seeds, iterations)."""
        for i in self._active:
            self.runs[i].meter.learned({name: total[i].sum() for name, total in sums.items()}, int(count[i].sum()))

    def log(self, global_step: int, metrics: Mapping[str, Any]) -> None:
        """Write a row of each seed, metrics are (num_seeds,); see `Run.log`. `charts/SPS` counts steps of a seed.
        A seed that diverges ends, the others continue; the exit code is 3 in the end."""
        self._each(lambda i, run: run.log(global_step, {name: value[i] for name, value in metrics.items()}))
        if self.num_seeds > 1 and self._line.is_due():
            self._progress(global_step)

    def evaluate(
        self, global_step: int, act: Callable[..., Any], make_env: Callable[..., Any], opponents: Sequence[str] = ()
    ) -> None:
        """See `Run.evaluate`; the policy of a seed is `act(model, obs)`, compiled here, with the field `model`. Memory,
        masks and agents are as in torch: `act(model, obs, state, first, action_mask)`."""
        self._made = (act, make_env, opponents)
        self._each(self._alone(lambda i, run: run.evaluate(global_step, self._policy(act, i), make_env, opponents)))
        self._say_evaluations(f"step {global_step:>10,}", global_step)

    def save(self, global_step: int, training: Any) -> None:
        """See `Run.save`. A seed that has reached `--target-return` is closed; the others continue."""
        self._take(training)
        alone = self._alone(lambda i, run: run.save(global_step))

        def save(i: int, run: Run) -> None:
            run.checkpoints.keep = self._common  # where another seed cannot write, as on a full disk
            alone(i, run)
            if run.ending not in ("", "signal"):
                if self._made[0] is None:
                    self._waiting.append(i)
                else:
                    run.close(self._policy(self._made[0], i), *self._made[1:])
                self._active.remove(i)

        self._each(save)
        if self._active and all(self.runs[i].checkpoints.newest == global_step for i in self._active):
            self._common = global_step

    def close(
        self, act: Callable[..., Any], make_env: Callable[..., Any], opponents: Sequence[str] = (), sample: Any = None
    ) -> None:
        """See `Run.close`. `sample(model, obs, key)` is a policy with a parameter `key` more than `act`."""
        try:
            self._close(act, make_env, opponents, sample)
        finally:
            if not self.runs[0].signal or signals.in_a_shell():
                signals.restore(self._before)

    def _close(self, act: Callable[..., Any], make_env: Callable[..., Any], opponents: Any, sample: Any) -> None:
        for i in (*self._waiting, *self._active):
            try:
                drawn = None if sample is None else self._policy(sample, i)
                self.runs[i].close(self._policy(act, i), make_env, opponents, drawn)
            except SystemExit as end:
                self._code = UNSAVED if self._code == UNSAVED else end.code
        if not self.play:
            self._say_evaluations("in the end:    ")
            if self._code != UNSAVED:
                self._say_where()
        if self._code is not None:
            raise SystemExit(self._code)

    # ------------------------------------------------------------------ parts of the verbs
    def _end(self, index: int, code: Any) -> None:
        """A seed has diverged; the others continue, if there are any."""
        self._code = code
        self._active.remove(index)
        if not (self._active or self._waiting):
            raise SystemExit(code)

    def _choose_checkpoints(self) -> None:
        """Let the seeds continue from the newest step of which each has a whole checkpoint, whether the process was
        killed after some of them had saved or a checkpoint is damaged. Seeds that had ended before the others
        are left out."""
        folders = [run.dir / "checkpoint" for run in self.runs]
        found = [[checkpoint.step_of(path) for path in checkpoint.checkpoints(folder)] for folder in folders]
        newest = [max(steps, default=0) for steps in found]
        statuses = [str(read_status(run.dir).get("status", "")) for run in self.runs]
        self._active = _going_on(newest, statuses)
        if not self._active:
            quit_with(f"the seeds stand at different steps ({newest}); resume each alone, by its own folder")
        self._common, notes = checkpoint.newest_common([folders[i] for i in self._active])
        killed = any(_finality(statuses[i]) == 0 for i in self._active)
        saves = [len(found[i]) for i in self._active]
        first_save = killed and min(saves) == 0 and max(saves) <= 1  # it came only to some of them, if any
        if self._common is None and not first_save:
            why = "; ".join(notes) or f"their newest are of the steps {newest}"
            quit_with(f"the seeds have no whole checkpoint of one step ({why}); resume each alone, by its own folder")
        for note in notes:
            warn(f"{note}; all seeds continue from the checkpoint before it")
        for i, run in enumerate(self.runs):
            if found[i]:  # a seed without a checkpoint may begin again only if it never had one
                run.checkpoints.until = self._common or 0
            if i not in self._active:
                self._say(f"seed {run.args.seed} stays as it is: {statuses[i]}, last saved at step {newest[i]:,}")
                self._code = DIVERGED if statuses[i].startswith("diverged") else self._code

    def _replay(self, index: int, field: str) -> JaxReplay:
        """The replay buffer of a seed as a part of a checkpoint."""

        def get(name: str, rows: Any = ...) -> Any:
            return self.training(index, f"{field}.{name}", rows)

        def put(name: str, array: Any) -> None:
            self.put(index, f"{field}.{name}", array)

        return JaxReplay(getattr(self._trainings[index], field)._fields, get, put)

    def _arguments(self) -> list[Any]:
        """The arguments of each seed as if it were trained alone, so that it can be resumed alone."""
        folders = [self.args.resume] * self.num_seeds
        if self.args.resume and self.num_seeds > 1:
            first = Path(self.args.resume)
            file = first / "together.json"
            names = _names_in(file) if file.exists() else [first.name]
            if len(names) != self.num_seeds or names[0] != first.name:
                quit_with(
                    f"{first} is one of {len(names)} seeds trained together; continue them all by "
                    f"--resume {shlex.quote(str(first.with_name(names[0])))} --num-seeds {len(names)}, "
                    "or with one by its own folder"
                )
            folders = [str(first.with_name(name)) for name in names]
            if gone := [folder for folder in folders if not Path(folder, "config.json").exists()]:
                quit_with(f"there is no run folder {gone[0]}; continue one seed by its own folder")
        alone: dict[str, Any] = {"num_seeds": 1, "threads": self.threads}
        arguments = [
            dataclasses.replace(self.args, seed=self.args.seed + i, resume=folder, **alone)
            for i, folder in enumerate(folders)
        ]
        try:
            for each in arguments[1:] if self.args.resume else ():
                check_unchanged(each, saved_arguments(Path(each.resume), type(each)))
        except UsageError as error:
            quit_with(error)
        return arguments

    def _all(self) -> Any:
        """The trainings of all seeds as the script has them: see `resume`."""
        if self._stack is not None:
            return self._stack
        return self._trainings[0] if self.num_seeds == 1 else list(self._trainings)

    def _take(self, training: Any) -> None:
        """Continue from the trainings that the script has."""
        if self._stack is not None:
            self._stack = training
        else:
            self._trainings = [training] if self.num_seeds == 1 else list(training)

    def _in_threads(self, call: Callable[..., Any]) -> Callable[[range], Any]:
        """All seeds in a chunk, as many at once as there are cores."""
        pool = ThreadPoolExecutor(len(own_cores()))

        def one(index: int, count: int) -> Any:
            self._trainings[index], report = call(self._trainings[index], jnp.int32(count))
            return jax.tree.map(lambda x: np.asarray(x)[:count], report)  # waits for the end

        def train(iterations: range) -> Any:
            found = pool.map(lambda index: one(index, len(iterations)), self._active)
            reports = dict(zip(self._active, found, strict=True))
            any_of_them = reports[self._active[0]]
            return jax.tree.map(
                lambda *leaves: np.stack(leaves), *(reports.get(i, any_of_them) for i in range(self.num_seeds))
            )

        return train

    def _side_by_side(self, call: Callable[..., Any]) -> Callable[[range], Any]:
        """All seeds in a chunk by one call."""

        def train(iterations: range) -> Any:
            self._stack, report = call(self._stack, jnp.int32(len(iterations)))
            return jax.tree.map(lambda x: np.moveaxis(np.asarray(x)[: len(iterations)], 1, 0), report)

        return train

    def _policy(self, act: Callable[..., Any], index: int) -> "PolicyOfSeed":
        """A policy of one seed, NumPy to NumPy."""
        if act not in self._acts:
            self._acts[act] = jax.jit(act)
        model = functools.cache(lambda: self.training(index, self._model))  # only where it acts
        return PolicyOfSeed(act, self._acts[act], model)

    def _each(self, verb: Callable[[int, Run], None]) -> None:
        """Call a verb for each seed that continues. One that diverges ends; the others continue, if there are any."""
        for i in list(self._active):
            try:
                verb(i, self.runs[i])
            except SystemExit as end:
                self._end(i, end.code)

    def _alone(self, verb: Callable[[int, Run], None]) -> Callable[[int, Run], None]:
        """The verb of one seed; the time it takes is not training time of the others."""

        def timed(index: int, run: Run) -> None:
            began = time.perf_counter()
            verb(index, run)
            for other in self._active:
                if other != index:
                    self.runs[other].meter.pause(time.perf_counter() - began)

        return timed

    def _on_signal(self, number: int, frame: Any) -> None:
        for run in self.runs[1:]:
            if run.signal:
                run._abandon("stopped" if run.trained else "failed")
            run.signal = number
        self.runs[0].quiet = False  # it speaks for all
        self.runs[0]._on_signal(number, frame)
        self.runs[0].quiet = self.num_seeds > 1

    def _say(self, text: str) -> None:
        say(wiped(text, sys.stdout), sys.stdout)

    def _progress(self, global_step: int) -> None:
        """One line for several seeds: means over those that have a number."""
        recent, scores = [run.meter.recent_return for run in self.runs], [run.evaluator.score for run in self.runs]
        known = ([value for value in values if value is not None] for values in (recent, scores))
        episode, evaluation = (float(np.mean(values)) if values else None for values in known)
        rate = sum(self.runs[i].meter.sps for i in self._active)
        self._line.show(global_step, self.args.total_timesteps, episode, evaluation, rate, len(self._active))  # type: ignore[attr-defined]

    def _say_where(self) -> None:
        """For several seeds: how to continue where a signal has ended them, else where everything is."""
        first, folders = self.runs[0], [run.dir for run in self.runs]
        stopped = [run for run in self.runs if run.ending == "signal"]
        if self.num_seeds > 1 and len(stopped) == self.num_seeds:
            self._say(
                f"saved at step {first.step:,}; {how_to_go_on(first.script, first.dir)} --num-seeds {self.num_seeds}"
            )
        elif self.num_seeds > 1 and stopped:  # the others have ended before
            for run in stopped:
                self._say(f"saved at step {run.step:,}; {how_to_go_on(run.script, run.dir)}")
        elif self.num_seeds > 1:
            play = f"solo play {shlex.quote(str(folders[0]))}"
            self._say(f"curves and models in {folders[0]} to {folders[-1].name}; play one: {play}")

    def _say_evaluations(self, when: str, step: int | None = None) -> None:
        """One line for the evaluations of several seeds: those at `step`, or the last ones."""
        found = [run.evaluator.last[:2] for run in self.runs]
        means = [mean for at, mean in found if (step is None and at >= 0) or at == step]
        if self.num_seeds > 1 and means:
            span = f"from {min(means):.1f} to {max(means):.1f}"
            self._say(paint(f"{when}  evaluation {np.mean(means):.1f}, {span}, {len(means)} seeds", "cyan"))


def _compiled(iteration: Callable[[Any], Any], chunk: int, training: Any) -> Callable[[Any, Any], Any]:
    """A call of `count` iterations, at most `chunk`, that writes over its argument: the training after them, and their
    reports (chunk, ...), of which the first `count` mean something."""

    def many(training: Any, count: Any) -> Any:
        report = jax.eval_shape(iteration, training)[1]
        history = jax.tree.map(lambda x: jnp.zeros((chunk, *x.shape), x.dtype), report)

        def body(i: Any, carry: Any) -> Any:
            training, report = iteration(carry[0])
            return training, jax.tree.map(lambda all, one: all.at[i].set(one), carry[1], report)

        return jax.lax.fori_loop(0, count, body, (training, history))

    options = ONE_THREAD if _is_cpu(jax.tree.leaves(training)[0].device) else None
    return jax.jit(many, donate_argnums=0).lower(training, jnp.int32(0)).compile(options)


def _finality(status: str) -> int:
    """2: the run has come to its end, 1: it was stopped, 0: it was killed."""
    return 2 if status.startswith("diverged") else {"stopped": 1, "finished": 2}.get(status, 0)


def _going_on(newest: Sequence[int], statuses: Sequence[str]) -> list[int]:
    """The seeds that continue together: those that were killed (else those that were stopped, else all), and those that
    ended at the same step; none where all have ended at different steps. `newest`: steps of their last checkpoints."""
    ended = [_finality(status) for status in statuses]
    steps = [step for step, how in zip(newest, ended, strict=True) if how == min(ended)]
    if min(ended) == 2 and len(set(steps)) > 1:
        return []
    return [i for i, step in enumerate(newest) if ended[i] == min(ended) or step == max(steps)]


def _names_in(file: Path) -> list[str]:
    """The run folders that `together.json` names; one sentence and exit code 2 where it does not hold such names."""
    try:
        names = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(map(is_plain_name, names)) or len(set(names)) < max(1, len(names)):
        quit_with(f"{file} is malformed: it must be a list of different names of run folders; one seed continues alone")
    return names


def _is_cpu(device: Any) -> bool:
    return device.platform == "cpu"


def _keep_compiled_code(threads: int) -> None:
    """Compiled code, which is another one for every number of threads, stays on the disk; the environment variable
    JAX_COMPILATION_CACHE_DIR says where else."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        folder = CACHE / f"threads_{threads}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _start_xla(threads: int) -> int:
    """Start XLA, which has one pool of threads for all seeds, as large as an environment variable says while it starts.
    One that the user has set stays; in a process in which XLA runs already nothing changes. Returns the number."""
    if os.environ.get("NPROC", "").isdigit():
        return int(os.environ["NPROC"])
    threads = min(threads, len(own_cores()))
    os.environ["NPROC"] = str(threads)
    try:
        jax.devices()
    finally:
        del os.environ["NPROC"]  # not for processes started from here
    return threads


def _choose_device(name: str) -> None:
    """Let JAX use the device of `--device`; one sentence and exit code 2 where there is none."""
    if name == "auto":
        return
    platform, _, number = name.partition(":")
    try:
        devices = jax.devices({"cuda": "gpu"}.get(platform, platform))
        jax.config.update("jax_default_device", devices[int(number or 0)])
    except (RuntimeError, ValueError, IndexError):
        there = sorted({device.platform for device in jax.devices()})
        quit_with(f"--device {name} was asked for, but JAX sees only {', '.join(there)}; --device cpu runs everywhere")
