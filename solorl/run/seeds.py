"""The verbs of `Run` for JAX: one process trains the seeds seed, seed + 1, ..., each with a run folder of its own.

    require, resume, compile, loop, episodes, log, evaluate, save, close
    keep: another run, such as a teacher; dataset, vector_env: for scripts that learn from recorded transitions

What the training of a seed is at any moment stands in one pytree. The host meets it between chunks of iterations
only: a chunk is one call of compiled code. On the CPU every seed is trained by the same code as when it is alone, one
thread per core; its results are the same to the last bit if XLA has as many threads (`--threads`), else up to the order
in which floating-point numbers are added. So they are on other devices, where one call trains all seeds side by side
(vmap). This module knows no algorithm, no network and no loss.
"""

import dataclasses
import functools
import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from solorl import signals
from solorl.args.arguments import RunArgs, check_unchanged, saved_arguments
from solorl.compute import xla
from solorl.compute.device import device_words
from solorl.envs.open import open_envs
from solorl.errors import UsageError, in_one_sentence, quit_with, refuse
from solorl.files import is_plain_name, near, read_json, write_atomically
from solorl.machine import check_array, own_cores
from solorl.run.ending import UNSAVED, Voice, how_to_go_on
from solorl.run.evaluation import Also, MakeEnv
from solorl.run.trainings import JaxReplay, Part, PolicyOfSeed, Trainings, names_of, without_replay
from solorl.run.verbs import Run
from solorl.runfolder import CONFIG, TOGETHER, checkpoints, status_of, step_of
from solorl.terminal import Progress, paint, scores, warn

OF_TORCH = ("compile", "fast", "torch_deterministic")  # flags that files in JAX have like all others


class Runs:
    """The trainings of `--num-seeds` seeds in one process. `require`, `require_spaces`, `iterations`, `vector_env`,
    `dataset` and `keep` are the verbs of `Run`; all seeds have the same data set and keep the same runs."""

    def __init__(self, args: RunArgs):
        self.args = args
        self.num_seeds: int = args.num_seeds  # type: ignore[attr-defined]
        # of XLA, for all seeds: with as many a seed continues exactly, together and alone (see `arguments_of`)
        self.threads = xla.start_xla(args.threads if args.resume else args.threads * self.num_seeds)
        xla.choose_device(args.device)
        xla.keep_compiled_code(self.threads)
        device = jnp.zeros(()).device  # that of new arrays
        with in_one_sentence():
            arguments = arguments_of(args, self.threads)
        self.runs = [Run(each, device=device, quiet=self.num_seeds > 1) for each in arguments]
        self.say = Voice()
        self.play = (first := self.runs[0]).play
        # verbs of `Run` that are the same for all seeds; a vector_env is for its spaces: compiled code cannot step it
        self.require, self.require_spaces, self.iterations = first.require, first.require_spaces, first.iterations
        self.vector_env, self.dataset, self.keep = first.vector_env, first.dataset, first.keep
        self._model = ""  # the field of a training that `act` needs
        self.side_by_side = self.num_seeds > 1 and not xla.is_cpu(self.runs[0].device)  # vmap
        self._envs: Any = None
        self._active = list(range(self.num_seeds))
        self._chunk, self._line = 1, Progress()
        self._code: Any = None  # with which a seed has ended that did not come to its end
        self._compiled = functools.cache(jax.jit)  # policies
        self._made: tuple[Any, Any] = (None, None)  # the policy and `make_env` that `evaluate` got
        self._before: dict[int, Any] = {}  # as in `Run`

    # ------------------------------------------------------------------ verbs, in the order of a script
    def open_envs(self, env_id: str, num_envs: int) -> Any:
        """Environments for training: in JAX if there are any of this kind, else in EnvPool."""
        self._envs = open_envs(env_id, num_envs, num_threads=max(1, len(own_cores()) // self.num_seeds))
        return self._envs

    def resume(self, begin: Callable[[Any], Any], model: str, envs: Sequence[str] = ()) -> tuple[Any, int]:
        """Begin the training of each seed: `begin` maps the key of a seed to a NamedTuple of all that will change; a
        checkpoint holds it. `model` is the field of it that `act` needs (`params`, `learner.actor`): it becomes
        model.safetensors. A replay buffer that counts its rows (see `JaxReplay`) is saved with `--save-replay` only.

        With `--resume` the trainings are as saved, except the fields `envs` where no checkpoint can hold the
        environments: then their episodes start again, and the run says so. Several seeds continue from the newest step
        of which all have a whole checkpoint; one that had ended before the others stays as it is. Opens the run
        folders: nothing has been written before.

        UsageError where a checkpoint cannot hold a training.

        Returns the training and the iteration to start from, as `Run.resume` does. With several seeds the training is a
        list of one for each, because on the CPU each runs the same code as alone; on other devices, where one call
        trains all (vmap), it is one whose leaves have a first axis of seeds.
        """
        first, lost = self.runs[0], tuple(envs) if envs and not getattr(self._envs, "saved", True) else ()
        if self.play:
            begin = functools.partial(without_replay, begin)
        keys = [jax.random.PRNGKey(run.args.seed) for run in self.runs]
        for name, leaf in names_of(jax.eval_shape(begin, keys[0])).items():
            refuse(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key), f"{name} must be a key of jax.random.PRNGKey")
            if xla.is_cpu(first.device):
                check_array(self.args, leaf.shape, leaf.dtype.itemsize * self.num_seeds)
        self.trainings = Trainings(begin, keys, self.side_by_side)
        again = jax.jit(lambda key: {field: getattr(begin(key), field) for field in lost})
        if teams := getattr(self._envs, "teams", None):
            for run in self.runs:
                run.meter.teams, run.meter.agents = teams, list(self._envs.agents)
        if self.args.resume and self.num_seeds > 1:
            with in_one_sentence():
                self._active = choose_checkpoints(self.runs, self.say)
        self._model, starts = model, []
        for i in self._active:
            run = self.runs[i]
            run.meter.sizes = first.meter.sizes
            models = {model.rpartition(".")[2]: Part(self.trainings, i, run.checkpoints, model)}
            parts = {field: JaxReplay(self.trainings, i, field) for field in self.trainings.apart}
            starts.append(run.fit({"training": Part(self.trainings, i, run.checkpoints), **parts}, models))
            if lost and starts[-1]:
                for field, fresh in again(jax.random.fold_in(keys[i], starts[-1])).items():
                    self.trainings.put(i, field, fresh)
                run.meter.begin_episodes()
        if len(set(starts)) > 1:
            quit_with(f"the seeds stand at different iterations ({starts}); resume each alone, by its own folder")
        active = [self.runs[i] for i in self._active]
        if self.play:
            return self.trainings.all(), starts[0]
        for run in active:  # nothing has been written before all fit
            run.folder.kept, run.folder.data = self.runs[0].folder.kept, self.runs[0].folder.data
            run.begin(starts[0])
        for name in OF_TORCH:
            if getattr(self.args, name) != (default := getattr(RunArgs, name)):
                warn(f"--{'no-' * default}{name.replace('_', '-')} changes nothing here: it is for files in torch")
        if lost and starts[0]:
            warn(f"the environments of {self.args.env_id} cannot be saved, so their running episodes start again")  # type: ignore[attr-defined]
        if self.num_seeds > 1:
            names = [run.dir.name for run in self.runs]
            for run in active:  # each run folder knows the names of all, so that all continue together
                write_atomically(run.dir / TOGETHER, json.dumps({"runs": names}).encode())
            self.say(f"run folders {names[0]} to {names[-1]} in {near(self.runs[0].dir.parent)}")
            if starts[0]:
                self.say(f"resumed at step {active[0].step:,} (iteration {starts[0]})")
            elif self.args.resume:
                self.say("not all seeds have a checkpoint yet: starting from the beginning")
            self.say(device_words(self.runs[0].device, self.threads))
        if self.side_by_side:
            self.trainings.stack()
        return self.trainings.all(), starts[0]

    def compile(self, iteration: Callable[..., Any], chunk: int, *shared: Any) -> Callable[[Any, range], Any]:
        """Compile up to `chunk` iterations into one call; returns `train(training, iterations)`, which does as many as
        the range is long and returns the training after them, and what they report, as NumPy arrays (num_seeds,
        len(iterations), ...). It writes over the training that it gets. Rows of seeds that have reached
        `--target-return` mean nothing.

        `iteration` maps the training of one seed to that one iteration later and a pytree to report. It gets `shared`,
        too, pytrees that all seeds read and that are in memory once. It is compiled in the first call; compiled code is
        kept on the disk for later runs. A training in several phases has an `iteration` for each, which is named right
        before its loop.
        """
        self._chunk = chunk

        @functools.cache
        def compiled() -> Callable[[range, Sequence[int]], Any]:
            began = time.perf_counter()
            train = self.trainings.train(iteration, chunk, *shared)
            self.say(f"compiled in {time.perf_counter() - began:.1f} s")
            return train

        def train(training: Any, iterations: range) -> Any:
            self.trainings.take(training)
            report = compiled()(iterations, self._active)
            return self.trainings.all(), report

        return train

    def loop(self, start: int, num_iterations: int, batch_size: int, last: bool = True) -> Iterator[range]:
        """Chunks of iterations from `start` on, as ranges, so that evaluations and checkpoints are due at their ends.
        `batch_size` is the number of environment steps of one iteration. Ends early, and may be followed by other loops
        unless it is the `last` one, as `Run.loop`."""
        found = [self.runs[i].next_loop(start, num_iterations, last) for i in self._active]
        iterations = max(found, key=len, default=range(0))
        start, stop = iterations.start, iterations.stop
        begun = max(run.step for run in self.runs) - start * batch_size  # environment steps before this loop
        if not self.play:  # XLA must not be interrupted
            self._before = signals.listen(self._on_signal, signals.ending()) | self._before
        if self.num_seeds == 1 and start < stop:
            (self.runs[0].dir / TOGETHER).unlink(missing_ok=True)  # from now on it is trained alone
        try:
            while start < stop and self._active:
                end = stop
                for every in filter(None, (self._chunk * batch_size, self.args.eval_every, self.args.save_every)):
                    due = ((begun + start * batch_size) // every + 1) * every  # the next step at which one is due
                    end = min(end, -(-(due - begun) // batch_size))
                for i in self._active:
                    self.runs[i].meter.iteration, self.runs[i].meter.is_last = end - 1, last and end == stop
                yield range(start, end)
                if all(self.runs[i].ending.why for i in self._active):  # else a signal came between two saves
                    break
                start = end
        except BaseException:
            signals.restore(self._before)
            raise
        for run in self.runs:
            run.meter.trained = last or run.ending.why != ""

    def episodes(self, global_step: int, reward: Any, done: Any, per_agent: bool = False) -> None:
        """See `Run.episodes`; both (num_seeds, iterations, ..., num_envs), with a last axis of agents where the
        environments have several (`teams` and `agents`, as `PettingZooEnvs` has them)."""
        shape = (-1, *reward.shape[-1 if self.runs[0].meter.teams is None else -2 :])
        for i in self._active:
            self.runs[i].episodes(global_step, reward[i].reshape(shape), done[i].reshape(shape), per_agent)

    def learned(self, sums: Mapping[str, Any], count: Any) -> None:
        """Count metrics of gradient steps into the means that the next row of `log` will have: their sums over the
        gradient steps of each iteration, and how many there were, all (num_seeds, iterations)."""
        for i in self._active:
            self.runs[i].meter.learned({name: total[i].sum(0) for name, total in sums.items()}, int(count[i].sum()))

    def log(self, global_step: int, metrics: Mapping[str, Any]) -> None:
        """Write a row of each seed, metrics are (num_seeds,); see `Run.log`. `charts/SPS` counts steps of a seed.
        A seed that diverges ends, the others continue; the exit code is 3 in the end."""
        self._each(lambda i, run: run.log(global_step, {name: value[i] for name, value in metrics.items()}))
        if self.num_seeds > 1 and self._line.is_due():
            self._progress(global_step)

    def evaluate(self, global_step: int, act: Callable[..., Any], make_env: MakeEnv, also: Also = None) -> None:
        """See `Run.evaluate`; the policy of a seed is `act(model, obs)`, compiled here, with the field `model`. Memory,
        masks and agents are as in torch: `act(model, obs, state, first, action_mask)`."""
        self._made = (act, make_env)
        self._each(lambda i, run: run.evaluate(global_step, self._policy(act, i), make_env, also), paused=True)
        self._say_evaluations(f"step {global_step:>10,}", global_step)

    def save(self, global_step: int, training: Any) -> None:
        """See `Run.save`. A seed that has reached `--target-return` is closed; the others continue."""
        self.trainings.take(training)

        def save(i: int, run: Run) -> None:
            run.save(global_step)
            act, make_env = self._made
            if run.ending.why not in ("", "signal") and act is not None:  # else `close` does it
                run.close(self._policy(act, i), make_env)
                self._active.remove(i)

        self._each(save, paused=True)

    def close(self, act: Callable[..., Any], make_env: MakeEnv, sample: Any = None, tell: Any = None) -> None:
        """See `Run.close`. `sample(model, obs, key)` is a policy with a parameter `key` more than `act`; `tell` has
        the parameters of `act`."""
        if self._before:  # as in `Run`
            signals.listen(self._on_signal, signals.ending())
        try:
            for i in self._active:
                try:
                    others = [None if each is None else self._policy(each, i) for each in (sample, tell)]
                    self.runs[i].close(self._policy(act, i), make_env, *others)
                except SystemExit as end:
                    self._code = UNSAVED if self._code == UNSAVED else end.code
            if not self.play:
                self._say_evaluations("in the end:    ")
                if self._code != UNSAVED:
                    self._say_where()
            if self._code is not None:
                raise SystemExit(self._code)
        finally:
            if not self.runs[0].ending.signal or signals.in_a_shell():
                signals.restore(self._before)

    # ------------------------------------------------------------------ parts of the verbs
    def _policy(self, act: Callable[..., Any], index: int) -> PolicyOfSeed:
        """A policy of one seed, NumPy to NumPy."""
        model = functools.cache(lambda: self.trainings.of(index, self._model))  # only where it acts
        return PolicyOfSeed(act, self._compiled(act), model)

    def _each(self, verb: Callable[[int, Run], None], paused: bool = False) -> None:
        """Call a verb for each seed that continues. One that diverges ends; the others continue, if there are any. If
        `paused`, the time that it takes is not training time of the others."""
        for i in list(self._active):
            began = time.perf_counter()
            try:
                verb(i, self.runs[i])
            except SystemExit as end:
                self._code = end.code
                self._active.remove(i)
                if not self._active:
                    raise
            if paused:
                for other in {*self._active} - {i}:
                    self.runs[other].meter.pause(time.perf_counter() - began)

    def _on_signal(self, number: int, frame: Any) -> None:
        for run in self.runs[1:]:
            if run.ending.signal and not signals.below_a_worker():
                run.ending.abandon("stopped" if run.meter.trained else "failed")
            run.ending.signal = number
        first = self.runs[0]
        first.say.quiet = False  # it speaks for all
        first.ending.hear(number, frame)
        first.say.quiet = self.num_seeds > 1

    def _progress(self, global_step: int) -> None:
        """One line for several seeds: means over those that have a number."""
        recent, scores = [run.meter.recent_return for run in self.runs], [run.evaluator.score for run in self.runs]
        known = ([value for value in values if value is not None] for values in (recent, scores))
        episode, evaluation = (float(np.mean(values)) if values else None for values in known)
        rate = sum(self.runs[i].meter.sps for i in self._active)
        self._line.show(global_step, self.args.total_timesteps, episode, evaluation, rate, len(self._active))  # type: ignore[attr-defined]

    def _say_where(self) -> None:
        """For several seeds: how to continue where a signal has ended them, else where everything is."""
        if self.num_seeds == 1:
            return
        folders, stopped = [run.dir for run in self.runs], [run for run in self.runs if run.ending.why == "signal"]
        if not stopped:
            play = f"solo play {shlex.quote(str(folders[0]))}"
            self.say(f"curves and models in {folders[0]} to {folders[-1].name}; play one: {play}")
        together = len(stopped) == self.num_seeds  # else the others have ended before
        for run in stopped[:1] if together else stopped:
            how = how_to_go_on(run.script, run.dir) + f" --num-seeds {self.num_seeds}" * together
            self.say(f"saved at step {run.step:,}; {how}")

    def _say_evaluations(self, when: str, step: int | None = None) -> None:
        """One line for the evaluations of several seeds: those at `step`, or the last ones."""
        found = [run.evaluator.last[:2] for run in self.runs if not run.folder.status.startswith("diverged")]
        means = [mean for at, mean in found if (step is None and at >= 0) or at == step]
        if self.num_seeds > 1 and means:
            mean, *ends = scores(float(np.mean(means)), min(means), max(means))
            self.say(paint(f"{when}  evaluation {mean}, from {' to '.join(ends)}, {len(means)} seeds", "cyan"))


# ---------------------------------------------------------------------- seeds that are trained together
def arguments_of(args: Any, threads: int) -> list[Any]:
    """The arguments of each seed of a group as if it were trained alone, so that it can be resumed alone, with the
    `threads` of XLA for all. UsageError for run folders that do not continue together."""
    folders = [args.resume] * args.num_seeds
    if args.resume and args.num_seeds > 1:
        first = Path(args.resume)
        names = read_json(first / TOGETHER).get("runs")
        names = names if isinstance(names, list) and names and all(map(is_plain_name, names)) else [first.name]
        if len(names) != args.num_seeds or names[0] != first.name:
            how = f"continue all by --resume {shlex.quote(str(first.with_name(names[0])))} --num-seeds {len(names)}"
            what = f"{first} is one of {len(names)} seeds trained together; {how}, or one alone by its own folder"
            raise UsageError(what if len(names) > 1 else f"{first} was trained alone; continue each seed by its folder")
        folders = [str(first.with_name(name)) for name in names]
        if gone := [folder for folder in folders if not Path(folder, CONFIG).exists()]:
            raise UsageError(f"there is no run folder {gone[0]}; continue one seed by its own folder")
    alone: dict[str, Any] = {"num_seeds": 1, "threads": threads}
    arguments = [dataclasses.replace(args, seed=args.seed + i, resume=each, **alone) for i, each in enumerate(folders)]
    for each in arguments[1:] if args.resume else ():
        check_unchanged(each, saved_arguments(Path(each.resume), type(each)))
    return arguments


def choose_checkpoints(runs: Sequence[Run], say: Callable[[str], None]) -> list[int]:
    """Let seeds continue from the newest step of which each has a checkpoint, for the process may have been killed
    after some of them had saved. A seed that had come to its end before the others is left out. Returns the seeds that
    continue. UsageError where they cannot."""
    steps = [[step_of(path) for path in checkpoints(run.dir)] for run in runs]
    newest = [max(each, default=0) for each in steps]
    statuses = [str(status_of(run.dir).get("status", "")) for run in runs]
    ended = [status == "finished" or status.startswith("diverged") for status in statuses]
    if all(ended) and len(set(newest)) > 1:
        raise UsageError(f"the seeds stand at different steps ({newest}); resume each alone, by its own folder")
    active = [i for i in range(len(runs)) if not ended[i] or newest[i] == max(newest)]
    common = max(set.intersection(*(set(steps[i]) for i in active)), default=0)
    saves = [len(steps[i]) for i in active]
    killed = min(saves) == 0 and max(saves) <= 1  # before each had saved once
    what = f"the seeds have no checkpoint of one step (their newest are of the steps {newest})"
    refuse(common == 0 and not killed, f"{what}; resume each alone, by its folder")
    for i, run in enumerate(runs):
        if i not in active:
            say(f"seed {run.args.seed} stays as it is: {statuses[i]}, last saved at step {newest[i]:,}")
        elif steps[i]:  # a seed without a checkpoint may begin again only if it never had one
            run.checkpoints.until = common
    return active
