"""Everything a training script needs that is not the algorithm, behind a few verbs.

    require, vector_env, multi_agent_env, compile, fast, gradient_step, resume, reset, loop, episodes, gather, learned,
        log, evaluate, save, close
    teacher: the trained policy of another run
    place, share, first, answers: objects in other processes, for scripts that play and learn side by side;
        evaluation_seeds, where one of them evaluates

No verb changes what is learned. This module knows no algorithm, no network and no loss. The rest is done by parts
that work without a run: `folder`, `meter`, `checkpoints`, `evaluator`. They raise; only the verbs end a run.
"""

import atexit
import contextlib
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np

from solorl import memory, signals
from solorl.args.arguments import RunArgs, script_path
from solorl.checkpoints import env_state
from solorl.compute.device import EVALUATE, TRAIN, choose_device, device_words, env_seed, seed_all
from solorl.compute.processes import Processes
from solorl.compute.ranks import Ranks, from_environment, local_rank
from solorl.envs.ids import is_atari
from solorl.envs.mistakes import try_out
from solorl.envs.returns import teams_of
from solorl.envs.spaces import action_kind, obs_kind
from solorl.envs.vector import VectorEnvs
from solorl.envs.workers import InWorkers, in_workers
from solorl.errors import UsageError, in_one_sentence, missing_extra, quit_with
from solorl.run.evaluation import OPPONENTS, Evaluator, Policy, draw_learning_curve, film_to, undisturbed
from solorl.run.folder import RunFolder, new_path
from solorl.run.load import play_wanted
from solorl.run.meter import Diverged, Meter, check_finite
from solorl.run.saving import Checkpoints
from solorl.run.summary import how_to_go_on, summary
from solorl.run.teacher import Teacher
from solorl.run.trackers import Safe, check_wandb, trackers_of
from solorl.run.upload import check_upload, require_matplotlib, solo, upload
from solorl.scripts import use_instead
from solorl.terminal import Progress, paint, say, warn, wiped

DIVERGED = 3  # exit code of a run that met a NaN or an infinite number
UNSAVED = 4  # exit code of a run that has come to its end, but could not write all of it


class Run:
    """One training: its seeds, device, run folder, metrics, checkpoints, evaluations and how it ends.

    `device` is that of a framework other than torch; a `quiet` run says its errors only, because another one in this
    process speaks for it. A script that says `parallel` can be trained by several processes, started by torchrun or
    `solo train ... --nproc N`: `rank` of `world_size`. All have the same random numbers, environments of their own and
    the same modules; rank 0 alone speaks, evaluates and has the run folder.
    """

    def __init__(self, args: RunArgs, *, parallel: bool = False, device: Any = None, quiet: bool = False):
        self.args, self.script = args, script_path()
        self.play = play_wanted()  # no training, only this
        with in_one_sentence():
            self.rank, self.world_size = (0, 1) if self.play else from_environment()
            if self.world_size > 1 and not parallel:
                what = f"{self.script.name} trains in one process, but WORLD_SIZE is {self.world_size}"
                raise UsageError(f"{what}; start it without torchrun and without --nproc")
            self.quiet = quiet or self.rank > 0
            index = local_rank() if self.world_size > 1 else None
            self.device = choose_device(args, index) if device is None else device
            if args.track and not self.play:
                check_wandb()
            if args.upload_model and not self.play:
                check_upload(args)
            if args.plot and not self.play:
                require_matplotlib("--plot")
        seed_all(args)
        self.ranks = Ranks(self.rank, self.world_size)
        self.processes = Processes(self._say)
        self.folder = RunFolder(Path(args.resume) if args.resume else new_path(args, self.script))
        self.meter, self.evaluator = Meter(), Evaluator(args)
        self.checkpoints = Checkpoints(self.folder.path, self.ranks)
        self.restarted: list[int] = []  # environments whose episodes `resume` could not continue and started again
        self.step = 0  # environment steps at the last call of log, evaluate or save
        self.phase, self.iteration, self.is_last = -1, 0, False  # the number of the loop, and of its iteration
        self.ending, self.signal = "", 0  # why the run ends, and the signal that has come
        self.trained = False  # the last loop is over: all that was learned is saved
        self._before: dict[int, Any] = {}  # where signals went before the first loop
        self._teacher: Teacher | None = None
        self.opponents: tuple[str, ...] | None = None  # in evaluations; None: not known yet
        self._trackers: list[Safe] = []
        self._looked, self._line = -math.inf, Progress()
        if self.world_size > 1:
            with in_one_sentence():
                self.ranks.open(self.device, self._lost)  # from now on `_lost` may be called

    @property
    def dir(self) -> Path:
        """The run folder."""
        return self.folder.path

    # ------------------------------------------------------------------ verbs, in the order of a script
    def require(self, condition: Any, sentence: str) -> None:
        """End with `sentence` and exit code 2 unless `condition` holds. Nothing has been written before `resume`."""
        if not condition:
            quit_with(sentence)

    def require_spaces(self, envs: Any, obs: str, action: str) -> None:
        """End with one sentence and exit code 2 unless the spaces are of the kinds named.

        `obs` is "vector" (Box of numbers, of any shape except () and that of an image), "image" (Box of bytes with 3
        dimensions), "dict" or "tuple"; `action` is "discrete", "continuous", "multidiscrete" or "tuple". Where `envs`
        are games of several agents (`multi_agent_env`), those of one agent are meant. The sentence names the script
        that fits, from the line `Not for` of the running script's header. One more environment, which is closed
        afterwards, shows mistakes in its own code.
        """
        env_id = getattr(self.args, "env_id", "the environment")
        games = teams_of(envs.envs[0] if isinstance(envs, gym.vector.SyncVectorEnv) else envs)
        if games and not teams_of(envs):
            use = use_instead(self.script, "several agents")
            quit_with(f"{env_id} has several agents, but {self.script.name} takes one{use}")
        kinds = "agent" if games else "single"
        spaces = (getattr(envs, f"{kinds}_observation_space"), getattr(envs, f"{kinds}_action_space"))
        found = (obs_kind(spaces[0]), action_kind(spaces[1]))
        for what, wanted, kind in (("observations", obs, found[0]), ("actions", action, found[1])):
            if kind != wanted:
                is_game = kind == "image" and is_atari(env_id)
                use = use_instead(self.script, "Atari games" if is_game else f"{kind} {what}")
                if wanted == "vector" and not use:
                    use = "; gymnasium.wrappers.FlattenObservation makes a vector of them"
                quit_with(f"{env_id} has {kind} {what}, but {self.script.name} takes {wanted} {what}{use}")
        if isinstance(envs, gym.vector.SyncVectorEnv) and not games and not self.play:
            with undisturbed(), in_one_sentence(), contextlib.closing(envs.env_fns[0]()) as env:
                masked = try_out(env, env_id)
            if masked and not self.quiet and "action_mask" not in self.script.read_text(encoding="utf-8"):
                warn(f"{env_id} gives an action_mask, which {self.script.name} does not use")

    def vector_env(self, make_env: Callable[..., Any], env_id: str, num_envs: int) -> VectorEnvs:
        """`num_envs` environments `make_env(env_id)` side by side, which reset in the same step (see `VectorEnvs`): in
        this process, with `--env-workers` in others (see `in_workers`)."""
        return self._side_by_side(VectorEnvs, make_env, env_id, num_envs)

    def _side_by_side(self, kind: type, make_env: Callable[..., Any], env_id: str, num_envs: int) -> Any:
        make_envs, workers = [lambda: make_env(env_id)] * num_envs, 0 if self.play else self.args.env_workers
        unequal = f"--env-workers {workers} cannot have equal parts of {num_envs} environments"
        self.require(not workers or num_envs % workers == 0, unequal)
        return in_workers(kind, make_envs, workers) if workers else kind(make_envs)

    def multi_agent_env(self, make_env: Callable[..., Any], env_id: str, num_envs: int) -> Any:
        """`num_envs` games of several agents `make_env(env_id)` side by side, which reset in the same step: games
        `team/NAME` in one compiled call (see `TeamEnvs`), unless `make_env` wraps them; all others one after the other
        (see `PettingZooEnvs`, whose arrays both have), or in processes of their own as in `vector_env`."""
        with undisturbed():  # some modules draw random numbers where they are imported for the first time
            from solorl.envs.pettingzoo import PettingZooEnvs

            if env_id.startswith("team/"):
                from solorl.envs.teams.vector import open_games

                together = f"--env-workers: {env_id} steps all its games together, in this process"
                self.require(self.play or not self.args.env_workers, together)
                return open_games(make_env, env_id, num_envs)
            return self._side_by_side(PettingZooEnvs, make_env, env_id, num_envs)

    def teacher(self, address: str, envs: Any, part: str, trust_script: bool = False) -> Any:
        """The trained policy of another run as `solorl.load` gives it, on the device of this run; `address` is a run
        folder or hf://USER/NAME. Ends with one sentence and exit code 2 unless that run has a model named `part` and a
        score, and was trained on the same environment, with the spaces of `envs`. `trust_script`: see `load`.

        The run folder gets a copy of the teacher, which a resumed run takes. A run that is only played needs none:
        then None is returned. To be called before `resume`.
        """
        if self.play:
            return None
        device = getattr(self.device, "platform", str(self.device))
        with in_one_sentence():
            self._teacher = Teacher.find(address, self.dir, device, trust_script)
            self._teacher.check(str(getattr(self.args, "env_id", "")), envs, part)
        return self._teacher.policy

    def resume(self, **parts: Any) -> int:
        """Name all that a checkpoint must hold; with `--resume` bring it into the saved state. In all ranks modules
        begin with the values they have in rank 0.

        `parts` are modules, optimisers, arrays, tensors, generators, vector environments (see `checkpoint.capture`) and
        replay buffers (see `replay`), which are saved with `--save-replay` only.
        Returns the iteration to start from, in the loop in which the run stopped. Opens the run folder: nothing has
        been written before.
        """
        start = self._fit(parts)
        if self.world_size > 1:
            self._start_together(start, parts)
        if not self.play:
            self._begin(start)
        return start

    def reset(self, envs: Any) -> Any:
        """The first observations (num_envs, *obs_shape): of a reset with seeds no other environment has, or, resumed,
        those at which the run stopped."""
        if self.checkpoints.resumed:
            return env_state.observations(envs)
        first = self.rank * envs.num_envs  # so that several ranks play the games that one would
        seeds = [env_seed(self.args.seed, TRAIN, first + i) for i in range(envs.num_envs)]
        envs.action_space.seed(seeds[0])
        envs.single_action_space.seed(seeds[0])
        return envs.reset(seed=seeds)[0]

    def loop(self, start: int, num_iterations: int, last: bool = True) -> Iterator[int]:
        """Count iterations from `start`. Ends early, always after a `save`, on Ctrl+C, SIGTERM, a reached
        `--target-return` or a file named `stop` in the run folder. Signals are heard until `close` is done.

        A training in several phases has a loop for each, always the same number of them, each with its own iterations
        from 0; all except the last one say `last=False`. `start` belongs to the loop in which a resumed run stopped:
        those before it are empty, as are those after one that ended early.
        """
        iterations = self._iterations(start, num_iterations, last)
        if self.phase == self.checkpoints.resumed.get("phase", 0):
            self.checkpoints.resume_random()
        if not self._before and not self.play:
            self.meter.start()
            self._before = signals.listen(self._on_signal)
        try:
            for iteration in iterations:
                self.iteration, self.is_last = iteration, last and iteration + 1 == num_iterations
                yield iteration
                if self.ending:
                    break
        except BaseException:
            signals.restore(self._before)
            raise
        self.trained = last or self.ending != ""

    def episodes(self, global_step: int, reward: Any, done: Any, per_agent: bool = False) -> None:
        """Count episode returns and lengths from raw rewards and end flags, both (num_envs,) or (steps, num_envs).

        `global_step` is the number of environment steps after the last row. An episode that ends is logged as
        `charts/episodic_return` and `charts/episodic_length` (agent steps) at the step at which it ended. With several
        agents both have a last axis of agents, and an episode ends where all are done: the return is the first team's,
        two teams or more have `charts/episodic_return_TEAM`, and with `per_agent` each agent has its own. Several ranks
        give those of their own environments, and count all.
        """
        if self.world_size > 1:
            found = self.ranks.everyone((np.atleast_2d(reward), np.atleast_2d(done)))
            reward, done = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
        self.meter.episodes(global_step, reward, done, per_agent)

    def gather(self, tensors: Sequence[Any], dim: int) -> list[Any]:
        """Tensors of equal shapes in all ranks, put together along `dim` in the order of ranks."""
        return self.ranks.gather(tensors, dim)

    def learned(self, metrics: Mapping[str, Any]) -> None:
        """Count the metrics of one gradient step (numbers or 0-dimensional tensors) into the means that the next row
        of `log` will have."""
        self.meter.learned(metrics)

    def log(self, global_step: int, metrics: Mapping[str, Any]) -> None:
        """Every `--log-every` steps and in the last iteration: write one row of metrics (numbers or 0-dimensional
        arrays), the means of `learned` and `charts/SPS`, and one line of progress.

        A NaN or infinite value ends the run with exit code 3, a sentence and a snapshot in `crash/`. `global_step`
        must never be less than before, also in a later loop.
        """
        self._reach(global_step)
        if not (self.meter.is_due("log", self.args.log_every, global_step) or self.is_last):
            return
        with self._ending_where_diverged():
            values = self.meter.report(global_step, metrics)
            self._write_rows(values)
        if not self.quiet and self._line.is_due():
            total = int(getattr(self.args, "total_timesteps", 0))
            self._line.show(self.step, total, self.meter.recent_return, self.evaluator.score, self.meter.sps)

    def evaluate(
        self,
        global_step: int,
        policy: Policy,
        make_env: Callable[..., Any],
        opponents: Sequence[str] = (),
        played: Any = None,
    ) -> None:
        """Every `--eval-every` steps and in the last iteration: play the policy on environments and seeds of its own.

        `policy` maps a NumPy batch of observations (n, *obs_shape) to a NumPy batch of actions; `make_env` is called
        as `make_env(env_id, **kwargs)`. Logs `eval/episodic_return` (mean), its standard deviation and the length.

        With `opponents`, "random" (actions) or "older" (the policy after a quarter to a half of the steps so far, see
        `Checkpoints.remember`), the policy plays the seat of each team in turn, the opponent all others. The score is
        then the mean over the seats of the team's return against the first opponent; that against each is in
        `eval/episodic_return_vs_OPPONENT`.

        Where a placed object plays while the training continues, `played` is its answer: the returns (n,) and lengths
        (n,) of episodes of the policy. It is counted at once, and nothing is played here; see `evaluation_seeds`.
        """
        self._reach(global_step)
        self._choose(opponents)
        due = played is not None or self.meter.is_due("evaluate", self.args.eval_every, global_step)
        if self.rank == 0 and (due or (self.is_last and not self.signal)):
            self._evaluate(policy, make_env, played)

    def evaluation_seeds(self, global_step: int) -> list[int]:
        """The seeds of the episodes that `evaluate` would play at this step; none where no evaluation is due."""
        due = self.meter.is_due("evaluate", self.args.eval_every, global_step)
        return self.evaluator.seeds(EVALUATE, 0) if due else []

    def save(self, global_step: int, **parts: Any) -> None:
        """Write a checkpoint every `--save-every` steps and where the loop ends. `parts`: see `resume`; those left
        out are taken as they were named there.

        NaN or infinite numbers in a module, optimiser, array or tensor end the run as in `log` and are not saved.
        Here several ranks agree on the end, and rank 0 writes what all hand over.
        """
        self.checkpoints.update(parts)
        self._reach(global_step)
        due = self.meter.is_due("save", self.args.save_every, global_step)
        self.ending = self.ending or self._reason_to_end()
        if self.world_size > 1:
            said = self.ranks.everyone((self.ending, self.signal))
            self.ending = next((ending for ending, _ in said if ending), "")
            self.signal = next((number for _, number in said if number), 0)
        if due or self.ending or self.is_last:
            with self.meter.paused(), self._ending_where_diverged():
                of_ranks = self.ranks.everyone(self.checkpoints.of_rank()) if self.world_size > 1 else []
                if self.rank == 0:
                    self._checkpoint(of_ranks)

    def close(
        self,
        policy: Policy,
        make_env: Callable[..., Any],
        opponents: Sequence[str] = (),
        sample: Policy | None = None,
    ) -> None:
        """Evaluate the final policy unless that is done, draw the learning curve, and say where everything is. The
        `opponents` must be those of `evaluate`; a run that is only played has random ones in their place. `sample` is
        the policy that draws its actions at random, for `solo play --stochastic` and `solorl.load`.

        After Ctrl+C or SIGTERM only the way to continue is said; Ctrl+C then leaves with exit code 130. Where something
        could not be written, one sentence says what, and the exit code is 4.
        """
        if self.play:
            self.play(self.args, self.folder, policy, make_env, self.checkpoints.networks(), opponents, sample)
            return
        self._choose(opponents)
        self.ranks.close()
        self.processes.close()
        try:
            if self.rank == 0 and self.ending == "signal":
                self._stop()
            elif self.rank == 0:
                self._end(policy, make_env)
        finally:  # after a signal no further one shows a traceback, as late as it may come
            if not self.signal or signals.in_a_shell():
                signals.restore(self._before)

    def fast(self, module: Any) -> Callable[[np.ndarray], np.ndarray]:
        """A module as a function from a NumPy batch (n, ...) to a NumPy batch, with its current weights at each call:
        for a few rows on the CPU several times as fast as torch, if it is an `nn.Sequential` of simple layers."""
        from solorl.compute.speed import Forward

        return Forward(module, self.args.fast)

    def gradient_step(
        self, loss_of: Callable[..., Any], module: Any, optimizer: Any, max_grad_norm: float = math.inf
    ) -> Callable[..., Any]:
        """`metrics = step(*inputs)` takes one step of `optimizer` down the gradient of the loss: `loss, metrics =
        loss_of(module, *inputs)`. What the algorithm needs of the loss is a third value, a tensor or a tree of tensors:
        `loss, metrics, extra = loss_of(...)`, then `metrics, extra = step(*inputs)`, all detached.

        The parameters of the optimiser must be parameters of `module`; all others are frozen. One that takes no part in
        the loss, or has `requires_grad` False, stays as it is. The global norm of the gradient of the optimiser's
        parameters is clipped to `max_grad_norm`. Steps may share modules, parameters and optimisers. With `--compile`
        the loss and its derivative are compiled together. Several ranks give inputs of equal shapes; gradients, before
        they are clipped, and metrics are means over the ranks, `extra` is each rank's own. To be called before
        `resume`."""
        from solorl.compute.speed import GradientStep

        average = self.ranks.average if self.world_size > 1 else None
        with in_one_sentence():
            return GradientStep(loss_of, module, optimizer, max_grad_norm, self.compile, self.args.fast, average)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.compile(function)` with `--compile`, else the function itself. On the CPU what calls the compiled
        pieces is C++, too: with small networks that would take as long as the pieces. See also `onednn`."""
        if not self.args.compile:
            return function
        from solorl.compute.speed import compiled

        with in_one_sentence():
            return compiled(function, self.device)

    # ------------------------------------------------------------------ verbs for objects in other processes
    def place(self, cls: type, inputs: Sequence[tuple[Any, ...]], here: bool = False) -> list[Any]:
        """An object `cls(*each)` for each of `inputs`: in this process if `here`, else each in one of its own, which
        Ray places (in the cluster of RAY_ADDRESS or on this machine). Then its methods return promises at once. What
        has ended is started again, and the run says so. Nothing is placed elsewhere where the run is played. Ends with
        one sentence and exit code 2 where Ray cannot be used. To be called before `resume`."""
        if here:
            return [cls(*each) for each in inputs]
        try:
            return [] if self.play else self.processes.place(cls, inputs)
        except ModuleNotFoundError as error:
            quit_with(missing_extra(self.script.name, error) or str(error))
        except ConnectionError as error:
            quit_with(str(error))

    def share(self, value: Any) -> Any:
        """A value to hand to several placed objects, which is sent once."""
        return self.processes.share(value)

    def first(self, promises: Sequence[Any]) -> tuple[int, Any]:
        """Wait for the first of several promises; its index and answer, which is None where its object has ended."""
        return self.processes.first(promises)

    def answers(self, promises: Sequence[Any]) -> list[Any]:
        """The answers of promises, None where the object has ended; of an object `here` what it has returned."""
        return self.processes.answers(promises)

    # ------------------------------------------------------------------ start
    def _fit(self, parts: Mapping[str, Any], models: Mapping[str, Any] | None = None) -> int:
        """The first half of `resume`, which writes nothing. `models`: see `Checkpoints`."""
        shared_out = self.play or any(isinstance(part, InWorkers) for part in parts.values())
        other = f"--env-workers: {self.script.name} steps its environments in another way"
        self.require(shared_out or not self.args.env_workers, other)
        self.checkpoints.name(parts, models)
        for envs in filter(env_state.is_vector_env, parts.values()):
            if teams := teams_of(envs):
                self.meter.teams, self.meter.agents = teams, list(envs.agents)
        with in_one_sentence():
            if self.play:
                self.checkpoints.load_model(self.play.model)
                return 0
            for replay in self.checkpoints.replays.values():
                memory.check_replay(self.args, replay.arrays.values())
            if not self.args.resume:
                return 0
            if self.rank == 0:
                self.folder.lock()
            try:
                self.restarted = self.checkpoints.resume(getattr(self.args, "num_envs", None), len(self.meter.agents))
            except BaseException:
                self.folder.unlock()
                raise
        if not (saved := self.checkpoints.resumed):
            return 0
        self.meter.resume(saved)
        if self.world_size == 1:
            self.meter.begin_episodes(self.restarted)
        self.evaluator.resume(saved)
        self.step, self.iteration = saved["step"], saved["iteration"] - 1
        return saved["iteration"]

    def _begin(self, start: int) -> None:
        """The second half of `resume`, which opens the run folder; `start` is what the first half has returned."""
        if self.rank > 0:
            return
        saved = self.checkpoints.resumed
        with in_one_sentence():
            if not self.args.resume:
                self.folder.make()
            self.checkpoints.open(self.dir)
            self.folder.open(self.args, self.script, self.device, saved)
            if self._teacher is not None:
                self._teacher.keep(self.dir)
        self._trackers = trackers_of(self.args, self.dir, saved["step"] + 1 if saved else None)
        self._set_status("running")
        atexit.register(self._abandon, "failed")
        self._say(f"run folder {self.dir}")
        self._say(device_words(self.device, self.args.threads))
        if self._teacher is not None:
            self._say(f"teacher {self._teacher}")
        size = sum(array.nbytes for replay in self.checkpoints.replays.values() for array in replay.arrays.values())
        if size > 1e9 and self.args.save_replay:
            self._say(f"the replay buffer will take up to {size / 1e9:.1f} GB in {self.dir / 'replay'}")
        if saved:
            self._say(f"resumed at step {self.step:,} (iteration {start})")
        elif self.args.resume:
            self._say(f"no checkpoint in {self.dir} yet: starting from the beginning")
            if (self.dir / "model.safetensors").exists():
                (self.dir / "model.safetensors").replace(self.dir / "model_before.safetensors")

    def _start_together(self, start: int, parts: Mapping[str, Any]) -> None:
        """What is between the two halves with several ranks."""
        self.require(not self.checkpoints.replays, "replay buffers are not supported with several ranks")
        starts, restarted = zip(*self.ranks.everyone((start, self.restarted)), strict=True)
        self.require(len(set(starts)) == 1, f"the ranks do not see the same run folder: they start from {starts}")
        if self.meter.returns is not None:
            local = len(self.meter.returns) // self.world_size  # environments of each rank
            self.meter.begin_episodes([rank * local + i for rank, own in enumerate(restarted) for i in own])
        for part in parts.values():
            if hasattr(part, "named_parameters"):
                self.ranks.copy_from_first(part)

    # ------------------------------------------------------------------ while it runs
    def _iterations(self, start: int, num_iterations: int, last: bool) -> range:
        """The iterations of one more loop; see `loop`."""
        self.phase += 1
        saved = self.checkpoints.resumed
        stopped = saved.get("phase", 0)  # the loop in which the run that is resumed stopped
        self.require(self.ending or not self.trained, "a loop came after the last one: those before it say last=False")
        fits = self.phase >= stopped if last else "phase" in saved or not saved
        what = f"the run in {self.dir} was started by another {self.script.name}, with another number of loops"
        self.require(fits, f"{what}: resume it with {self.dir / self.script.name}, or start a new run")
        if self.play or self.ending or self.phase < stopped:
            return range(0)
        return range(start if self.phase == stopped else 0, num_iterations)

    def _reach(self, global_step: int) -> None:
        """Note the step of a verb."""
        if global_step < self.step:
            fell = f"global_step fell from {self.step:,} to {global_step:,}"
            quit_with(f"{fell}: it must count on, also in a later loop and after --resume-changed")
        self.step = global_step

    def _lost(self, rank: int, code: int | None) -> None:
        """Another rank has ended, and this one with it; called in the thread that watches. Rank 0 says so, or rank 1
        where rank 0 could not say why it ends."""
        if self.folder.status == "running":
            self._set_status("failed")
        if self.rank == 0 or (self.rank == 1 and code is None):
            what = f"{paint('error:', 'red', sys.stderr)} rank {rank} died; stopping all {self.world_size} ranks"
            self._say(f"{what}; --resume continues from the last checkpoint", sys.stderr)
        self.ranks.leave(code or 1)
        os._exit(code or 1)

    def _on_signal(self, number: int, frame: Any) -> None:
        """The first signal ends the run after the next save; the second ends at once."""
        if self.signal and self.signal != number and self.world_size > 1:
            return  # of torchrun, which sends SIGTERM after a Ctrl+C
        if self.signal and signals.below_a_worker():
            return
        if self.signal:
            self._end_at_once(number)
        self.signal = number
        doing = "all is saved, evaluating and drawing" if self.trained else "finishing this iteration and saving"
        self._say(f"{signal.Signals(number).name}: {doing}; once more ends at once")

    def _end_at_once(self, number: int) -> NoReturn:
        """Leave without any further code of the script's, but its variables to a shell (`python -i`)."""
        self._abandon("stopped" if self.trained else "failed")
        newest = self.checkpoints.newest
        saved = "before its first checkpoint" if newest is None else f"saved up to step {newest:,}"
        self._say(f"{signal.Signals(number).name}: the run ends at once, {saved}")
        if number == signal.SIGINT and signals.in_a_shell():
            raise KeyboardInterrupt
        self.ranks.leave(128 + number)
        os._exit(128 + number)

    def _abandon(self, status: str) -> None:
        """Leave the run folder in order where the process ends before `close` has done it."""
        if self.folder.status == "running":
            self.folder.write_rows(self.meter.take_rows())
            self._set_status(status)

    def _reason_to_end(self) -> str:
        if self.signal:
            return "signal"
        now = time.perf_counter()
        if now - self._looked < 0.5 and not self.is_last:  # seconds: a look at the disk is too dear for every step
            return ""
        self._looked = now
        if self.rank > 0 or not self.folder.stop_asked():
            return ""
        self._say(f"the file {self.dir / 'stop'} asks to end here")
        return "stop"

    def _write_rows(self, tracked: dict[str, float] | None = None) -> None:
        """Write the rows that wait, and `tracked` to the trackers. Raises Diverged where a row is not finite."""
        rows = self.meter.take_rows()
        if self.rank == 0:
            self.folder.write_rows(rows)
        for row in rows:
            check_finite(row)
        for tracker in self._trackers:
            if tracked:
                tracker.write(self.step, tracked)

    def _check_finite(self) -> None:
        """Diverged where something is NaN or infinite, before it replaces what is good."""
        self._write_rows()
        self.checkpoints.check_finite()
        self.meter.check_returns()

    def _choose(self, opponents: Sequence[str]) -> None:
        """Note the opponents of evaluations, which are the same in all of them."""
        now = tuple(opponents)
        self.require(OPPONENTS.issuperset(now), f"opponents are {now}; allowed are random and older")
        before, self.opponents = self.opponents, now
        self.require(before in (None, now), f"run.evaluate has the opponents {before}, run.close has {now}")

    def _evaluate(self, policy: Policy, make_env: Callable[..., Any], played: Any = None) -> None:
        evaluator = self.evaluator
        with self.meter.paused(), self._ending_where_diverged(), in_one_sentence(), undisturbed():
            self._check_finite()
            names = self.opponents or ()
            if "older" in names:
                self.checkpoints.remember(self.step)
            others = {name: self.checkpoints.older(policy) if name == "older" else name for name in names}
            opponent = next(iter(others.values()), None)
            row = evaluator.evaluate(self.step, policy, make_env, others, played)
            self.meter.add_row(self.step, row)
            self._write_rows(row)
            _, mean, std = evaluator.last
            score = f"evaluation {mean:.1f} ± {std:.1f} over {evaluator.episodes} episodes"
            self._say(paint(f"step {self.step:>10,}  {score}", "cyan"))
            if evaluator.improved and self.args.save_model:
                self._save_model("model.safetensors")
            if (again := evaluator.confirm(policy, make_env, opponent)) is not None:
                reached = evaluator.reaches(again)
                self.ending = "target" if reached else self.ending
                line = f"target {self.args.target_return:g} reached; on fresh seeds {again:.1f}: "
                done, colour = ("done", "green") if reached else ("continuing", "cyan")
                self._say(paint(line + done, colour))
            if self.args.capture_video:
                seed, env_id = env_seed(self.args.seed, EVALUATE, 0), evaluator.args.env_id
                film_to(self.folder, f"step_{self.step}.mp4", seed, policy, make_env, env_id, opponent)
            if self.args.plot:
                self._plot()

    def _plot(self) -> None:
        """Draw curve.png; where that fails, one warning says so."""
        done, said = solo("plot", str(self.dir), "--out", str(self.dir / "curve.png"))
        if not done:
            warn(f"no curve.png: {said}")

    def _checkpoint(self, of_ranks: Sequence[Any]) -> None:
        self._check_finite()
        with self.folder.writing("checkpoint", f"the checkpoint of step {self.step:,}", self.checkpoints.are_there()):
            self.folder.require()
            counters = {"phase": self.phase, "iteration": self.iteration + 1, "step": self.step}
            counters |= self.meter.counters() | self.evaluator.counters()
            counters["metrics_bytes"] = self.folder.metrics.sync()
            self.checkpoints.save(self.step, counters, self.args.save_replay, of_ranks[1:])
            self._set_status(self.folder.status)

    def _save_model(self, name: str) -> None:
        score = repr(self.evaluator.last[1])
        about = {"step": str(self.step), "eval/episodic_return": score, "script": self.script.name}
        with self.folder.writing(name, kept=(self.dir / name).exists()):
            self.checkpoints.save_model(name, about)

    # ------------------------------------------------------------------ how it ends
    @contextmanager
    def _ending_where_diverged(self) -> Iterator[None]:
        """What diverges inside ends the run: a snapshot to look at, a sentence, and exit code 3."""
        try:
            yield
        except Diverged as error:
            if self.rank > 0:
                self.ranks.wait_for_the_end()  # rank 0 has found the same and writes a snapshot
            try:
                self.folder.require()
                note = f"a snapshot is in {self.checkpoints.save_crash(self.step)}"
            except OSError as problem:
                note = f"no snapshot ({problem.strerror})"
            self._finish(f"diverged: {error}")
            found = (part.wrong() for part in self.checkpoints.parts.values() if isinstance(part, VectorEnvs))
            cause = next((f": {wrong}" for wrong in found if wrong), "")
            what = f"{paint('error:', 'red', sys.stderr)} {error} in iteration {self.iteration} (step {self.step:,})"
            self._say(f"{what}{cause}; {note}", sys.stderr)
            self.ranks.leave(DIVERGED)
            raise SystemExit(DIVERGED) from None

    def _stop(self) -> None:
        """The end after a signal."""
        self._finish("stopped")
        self._require_saved()
        is_lost = self.checkpoints.replays and not self.args.save_replay
        lost = " (without its replay buffer: --save-replay)" if is_lost else ""
        name = signal.Signals(self.signal).name
        self._say(f"{name}: saved at step {self.step:,}{lost}; {how_to_go_on(self.script, self.dir, self.world_size)}")
        self._draw()
        if self.signal == signal.SIGINT:
            raise SystemExit(130)

    def _end(self, policy: Policy, make_env: Callable[..., Any]) -> None:
        """The end of a training that was not interrupted."""
        if self.evaluator.last[0] != self.step:
            self._evaluate(policy, make_env)
        if self.args.save_model:
            self._save_model("model_last.safetensors")
        self._finish("stopped" if self.ending == "stop" else "finished")
        self._draw()
        _, mean, std = self.evaluator.last
        score = f"{mean:.1f} ± {std:.1f} over {self.evaluator.episodes} episodes, best {self.evaluator.best:.1f}"
        for line in summary(self.dir, self.step, self.meter.wall_time(), score, self.args.save_model):
            self._say(line)
        self._require_saved()
        if self.args.upload_model:
            self._upload()

    def _upload(self) -> None:
        """Publish the run; where that fails, one warning says so, and the run is what it would be without."""
        done, said = upload(self.dir, self.script, self.args)
        if done:
            self._say(said)
        else:
            warn(f"the model was not uploaded: {said}; `solo push {shlex.quote(str(self.dir))}` does it later")

    def _finish(self, status: str) -> None:
        self.folder.write_rows(self.meter.take_rows())
        if status == "finished" and self.folder.metrics.problem:
            status = "failed"  # what is evaluated from the folder lacks rows
        for tracker in self._trackers:
            tracker.close()
        self.evaluator.close()
        self._set_status(status)
        atexit.unregister(self._abandon)  # which would keep all of this run
        self.folder.unlock()

    def _set_status(self, status: str) -> None:
        score = self.evaluator.score
        facts: dict[str, Any] = {"pid": os.getpid(), "global_step": self.step, "wall_time": self.meter.wall_time()}
        facts |= {"checkpoint": self.checkpoints.newest} | ({} if score is None else {"eval/episodic_return": score})
        self.folder.write_status(status, facts)

    def _draw(self) -> None:
        title = f"{self.script.stem} on {getattr(self.args, 'env_id', '')}, seed {self.args.seed}"
        try:
            draw_learning_curve(self.dir / "metrics.jsonl", self.dir / "learning_curve.png", title)
        except OSError as error:
            warn(f"no learning curve: {error.strerror}")

    def _require_saved(self) -> None:
        """One sentence and exit code 4 where something that this run had to leave in its folder is not there."""
        if not (missing := self.folder.missing()):
            return
        what = ", ".join(f"{name} ({why})" for name, why in missing.items())
        what = f"the final files could not be written to {self.dir}: {what}"
        if not self.dir.is_dir():
            what = f"the final files could not be written: {self.dir} has been moved or removed"
        self._say(f"error: the training has come to step {self.step:,}, but {what}", sys.stderr)
        raise SystemExit(UNSAVED)

    def _say(self, text: str, file: Any = None) -> None:
        """One whole line; wipes the progress line first. A quiet run writes to standard error only."""
        if not self.quiet or file is not None:
            file = file or sys.stdout
            say(wiped(text, file), file)
