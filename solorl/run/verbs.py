"""Everything a training script needs that is not the algorithm, behind a few verbs.

    require, require_spaces, iterations, vector_env, multi_agent_env, compile, fast, gradient_step, resume, reset, loop,
        episodes, episode, gather, learned, log, evaluate, save, close
    keep: a teacher; dataset: recorded steps; place, share, first, answers, evaluation_seeds: of other processes

No verb changes what is learned. The rest is done by parts that work without a run: `folder`, `meter`, `checkpoints`,
`evaluator`, `ending`. They raise UsageError; the verbs make one sentence of it, with exit code 2.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from solorl.args.arguments import RunArgs, script_path
from solorl.checkpoints import env_state
from solorl.compute.device import EVALUATE, choose_device, device_words, seed_all
from solorl.compute.processes import Processes
from solorl.compute.ranks import Ranks, from_environment
from solorl.data.dataset import Dataset, open_datasets
from solorl.envs.async_envs import AsyncEnvs
from solorl.envs.guest import refuse_statistics
from solorl.envs.returns import teams_of
from solorl.envs.vector import VectorEnvs
from solorl.errors import UsageError, fitting, in_one_sentence, missing_extra, quit_with, refuse
from solorl.files import near
from solorl.machine import check_replay
from solorl.run.ending import Ending, Voice
from solorl.run.environments import Opened, check_spaces, count_iterations, first_observations
from solorl.run.evaluation import Also, Evaluator, MakeEnv, Policy
from solorl.run.folder import RunFolder, new_path
from solorl.run.hub import check_upload
from solorl.run.load import play_wanted
from solorl.run.meter import Meter
from solorl.run.saving import Checkpoints
from solorl.run.trackers import check_wandb
from solorl.runfolder import MODEL, config_of
from solorl.terminal import Progress, warn


class Run:
    """One training: its seeds, device, run folder, metrics, checkpoints, evaluations and how it ends.

    `device`: of a framework other than torch; a `quiet` run says its errors only. A script that is `parallel` can be
    trained by `world_size` processes with equal random numbers and modules and own environments; rank 0 has the folder.
    """

    def __init__(self, args: RunArgs, *, parallel: bool = False, device: Any = None, quiet: bool = False):
        self.args, self.script = args, script_path().absolute()  # an environment may change the current folder
        self.play = play_wanted()  # no training, only this
        self.obs_shape: Any = None  # of one observation, after `require_spaces`; None of a dict or a tuple
        with in_one_sentence():
            self.rank, self.world_size = (0, 1) if self.play else from_environment()
            what = f"{self.script.name} trains in one process, but WORLD_SIZE is {self.world_size}"
            refuse(self.world_size > 1 and not parallel, f"{what}; start it without torchrun and without --nproc")
            # the number of this process among those on its machine is that of its CUDA device
            index = int(os.environ.get("LOCAL_RANK", "0")) if self.world_size > 1 else None
            self.device = choose_device(args, index) if device is None else device
            if not self.play:
                check_wandb(args)
                check_upload(args)
        seed_all(args)
        self.env_id = str(getattr(args, "env_id", "the environment"))
        self.say = Voice(quiet or self.rank > 0)
        self.ranks, self.processes = Ranks(self.rank, self.world_size), Processes(self.say)
        self.folder = RunFolder((Path(args.resume) if args.resume else new_path(args, self.script)).absolute())
        self.meter, self.evaluator = Meter(), Evaluator(args)
        self.checkpoints = Checkpoints(self.folder.path, self.ranks)
        parts = (self.folder, self.meter, self.evaluator, self.checkpoints, self.ranks, self.say)
        self.ending = Ending(args, self.script, self.env_id, *parts)
        self.opened = Opened(self.script, args.async_envs and not self.play, args.seed, self.rank)
        self.restarted: list[int] = []  # environments whose episodes `resume` could not continue and started again
        self._line = Progress()
        if self.world_size > 1:
            with in_one_sentence():
                self.ranks.open(self.device)

    @property
    def dir(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def step(self) -> int:
        """Environment steps at the last call of log, evaluate or save."""
        return self.meter.step

    # ------------------------------------------------------------------ verbs, in the order of a script
    def require(self, condition: Any, sentence: str) -> None:
        """End with `sentence` and exit code 2 unless `condition` holds. Nothing has been written before `resume`."""
        if not condition:
            quit_with(sentence)

    @in_one_sentence()
    def require_spaces(self, envs: Any, obs: str, action: str) -> None:
        """End with one sentence and exit code 2 unless the spaces are of the kinds named.

        `obs` is "vector" (Box of numbers, of any shape except () and that of an image), "image" (Box of bytes with 3
        dimensions), "dict" or "tuple"; `action` is "discrete", "continuous", "bounded" (continuous, each entry with
        finite bounds), "multidiscrete" or "tuple". Where `envs` are games of several agents (`multi_agent_env`), those
        of one agent are meant. The sentence names the script that fits, or the two nearest where there is none.
        """
        self.obs_shape = check_spaces(self.script, self.env_id, envs, obs, action).shape
        if self.opened.unread_mask and not (teams_of(envs) or self.play or self.say.quiet):
            warn(f"{self.env_id} gives an action_mask, which {self.script.name} does not use")

    @in_one_sentence()
    def iterations(self, steps: int, minibatches: int | None = None, batch: int | None = None) -> int:
        """How many iterations of `steps` environment steps `--total-timesteps` gives.
        Ends with one sentence and exit code 2 where that is none; where the `minibatches` of `--num-minibatches` do not
        divide the steps into parts of two or more; and where the replay buffer never holds a `batch` of `--batch-size`.
        """
        return count_iterations(self.args, self.meter.sizes, steps, minibatches, batch)

    @in_one_sentence()
    def vector_env(self, make_env: MakeEnv, env_id: str, num_envs: int) -> VectorEnvs:
        """`num_envs` environments `make_env(env_id)` side by side, each a guest (see `Guest`), which reset in the same
        step (see `VectorEnvs`): in this process, with `--async-envs` in one each (see `AsyncEnvs`)."""
        envs: VectorEnvs = self.opened.vector_env(VectorEnvs, make_env, env_id, num_envs)
        return envs

    @in_one_sentence()
    def multi_agent_env(self, make_env: MakeEnv, env_id: str, num_envs: int) -> Any:
        """The same with games of several agents (see `PettingZooEnvs`); games `team/NAME` in one compiled call (see
        `TeamEnvs`), unless `make_env` wraps them."""
        return self.opened.multi_agent_env(make_env, env_id, num_envs)

    @in_one_sentence()
    def keep(self, address: str) -> Path:
        """The folder of another run that this one needs, for `solorl.load`; `address` is a run folder, or
        hf://USER/NAME on the Hugging Face hub, which is pulled. This run's folder gets a copy when it opens, which a
        resumed run takes. Ends with one sentence and exit code 2 where there is no such run. Before `resume`."""
        return self.folder.kept.find(address, self.dir)

    @in_one_sentence()
    def dataset(self, folders: str, envs: Any) -> Dataset:
        """The transitions recorded in `folders`, separated by commas (see `Dataset`); none where a run is only played.
        Ends with one sentence and exit code 2 unless all are of the environment, with the spaces of `envs`, and those
        with which a resumed run was started. Before `resume`."""
        data = open_datasets(folders, self.env_id, envs, empty=bool(self.play))
        self.folder.data, same = {"dataset_sha256": data.sha256}, self.args.resume and not self.args.resume_changed
        before = config_of(self.dir).get("dataset_sha256") if data.sha256 and same else None
        refuse(before not in (None, data.sha256), f"{folders} has changed since the start; --resume-changed allows it")
        return data

    def resume(self, **parts: Any) -> int:
        """Name all that a checkpoint must hold; with `--resume` bring it into the saved state. In all ranks modules
        begin with the values they have in rank 0. `parts`: see `checkpoint.capture`; replay buffers (see `replay`) are
        saved with `--save-replay` only. Returns the iteration to start from, in the loop in which the run stopped.
        Opens the run folder: nothing has been written before."""
        start = self.fit(parts)
        if not self.play:
            self.begin(start)
        return start

    def reset(self, envs: Any) -> Any:
        """The first observations (num_envs, *obs_shape), of seeds no other environment has; resumed: the last ones."""
        if self.checkpoints.resumed:
            return env_state.observations(envs)
        return first_observations(envs, self.args.seed, self.rank * envs.num_envs)  # those of no other rank

    def loop(self, start: int, num_iterations: int, last: bool = True) -> Iterator[int]:
        """Count iterations from `start`. Ends early, always after a `save`, on Ctrl+C, SIGTERM, a reached
        `--target-return` or a file named `stop` in the run folder. Signals are heard until `close` is done.

        A training in several phases has a loop for each, each with its own iterations from 0; all except the last one
        say `last=False`. `start` belongs to the loop in which a resumed run stopped: those before it are empty, as are
        those after one that ended early.
        """
        iterations = self.next_loop(start, num_iterations, last)
        if self.meter.phase == self.checkpoints.resumed.get("phase", 0):
            self.checkpoints.resume_random()
        if not self.play:
            self.ending.listen()
        try:
            for iteration in iterations:
                self.meter.iteration, self.meter.is_last = iteration, last and iteration + 1 == num_iterations
                yield iteration
                if self.ending.why:
                    break
        except BaseException:
            self.ending.deaf()
            raise
        self.meter.trained = last or self.ending.why != ""

    def episodes(self, global_step: int, reward: Any, done: Any, per_agent: bool = False) -> None:
        """Count episode returns and lengths from raw rewards and end flags, both (num_envs,) or (steps, num_envs), of
        which the last row is that of `global_step`.

        An episode that ends is logged as `charts/episodic_return` and `charts/episodic_length` (agent steps). With
        several agents both have a last axis of agents, and an episode ends where all are done: the return is the first
        team's, two teams or more have `charts/episodic_return_TEAM`, with `per_agent` each agent its own. Several ranks
        give those of their own environments, and count all.
        """
        if self.world_size > 1:
            found = self.ranks.everyone((np.atleast_2d(reward), np.atleast_2d(done)))
            reward, done = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
        self.meter.episodes(global_step, reward, done, per_agent)

    def episode(self, global_step: int, episodic_return: float, length: int) -> None:
        """Count one whole episode, for a script that does not step its environments itself (see `episodes`)."""
        self.meter.episode(global_step, episodic_return, length)

    def gather(self, tensors: Sequence[Any], dim: int) -> list[Any]:
        """Tensors of equal shapes in all ranks, put together along `dim` in the order of ranks."""
        return self.ranks.gather(tensors, dim)

    def learned(self, metrics: Mapping[str, Any]) -> None:
        """Count the metrics of one gradient step (numbers or 0-dimensional tensors) into the means of the next row."""
        self.meter.learned(metrics)

    def log(self, global_step: int, metrics: Mapping[str, Any]) -> None:
        """Every `--log-every` steps and in the last iteration: write one row of metrics (numbers or 0-dimensional
        arrays), the means of `learned` and `charts/SPS`, and one line of progress.

        NaN or infinity ends the run with a sentence, exit code 3 and a snapshot in `crash/`. `global_step` never falls.
        """
        self._reach(global_step)
        if not (self.meter.is_due("log", self.args.log_every, global_step) or self.meter.is_last):
            return
        with self.ending.where_diverged():
            self.ending.write_rows(self.meter.report(global_step, metrics))
        if not self.say.quiet and self._line.is_due():
            total = getattr(self.args, "total_timesteps", 0)
            self._line.show(self.step, total, self.meter.recent_return, self.evaluator.score, self.meter.sps)

    def evaluate(
        self, global_step: int, policy: Policy, make_env: MakeEnv, also: Also = None, played: Any = None
    ) -> None:
        """Every `--eval-every` steps and in the last iteration: play the policy on environments and seeds of its own.

        `policy` maps a NumPy batch of observations (n, *obs_shape) to a NumPy batch of actions; `make_env` is called
        as `make_env(env_id, **kwargs)`. Logs `eval/episodic_return` (mean), its standard deviation and the length.
        `also` names other environments, such as those with another opponent, in each of which the policy plays as many
        episodes: `eval/episodic_return_NAME` is a metric, the score is that of `make_env`.

        Where a placed object plays while the training continues, `played` is its answer: the returns (n,) and lengths
        (n,) of episodes of the policy, which count at once; see `evaluation_seeds`.
        """
        self._reach(global_step)
        due = played is not None or self.meter.is_due("evaluate", self.args.eval_every, global_step)
        if self.rank == 0 and (due or (self.meter.is_last and not self.ending.signal)):
            self.ending.evaluate(policy, make_env, also, played)

    def evaluation_seeds(self, global_step: int) -> list[int]:
        """The seeds of the episodes that `evaluate` would play at this step; none where no evaluation is due."""
        due = self.meter.is_due("evaluate", self.args.eval_every, global_step)
        return self.evaluator.seeds(EVALUATE, 0) if due else []

    def save(self, global_step: int) -> None:
        """Write a checkpoint every `--save-every` steps and where the loop ends. What is not finite ends the run as in
        `log`. Here several ranks agree on the end; rank 0 writes what all have."""
        self._reach(global_step)
        due = self.meter.is_due("save", self.args.save_every, global_step)
        self.ending.look()
        if due or self.ending.why or self.meter.is_last:
            with self.meter.paused(), self.ending.where_diverged():
                of_ranks = self.ranks.everyone(self.checkpoints.of_rank()) if self.world_size > 1 else []
                if self.rank == 0:
                    self.ending.checkpoint(of_ranks[1:])

    def close(self, policy: Policy, make_env: MakeEnv, sample: Policy | None = None, tell: Any = None) -> None:
        """Evaluate the final policy unless that is done, draw the learning curve, and say where everything is. `sample`
        is the policy that draws its actions at random, for `solo play --stochastic` and `solorl.load`; `tell` gives
        the values (n,) and visits of moves (n, num_actions) of a search, for `solo play --opponent human`.

        After Ctrl+C or SIGTERM only the way to continue is said; Ctrl+C then leaves with exit code 130. Where something
        could not be written, one sentence says what, and the exit code is 4.
        """
        if self.play:
            self.play(self.args, self.dir, policy, make_env, self.checkpoints.networks(), sample, tell, self.obs_shape)
            return
        self.ending.listen(again=True)  # the script may have left the last loop by a `break`
        self.ranks.close()
        self.processes.close()
        try:
            if self.rank == 0 and self.ending.why == "signal":
                self.ending.stop()
            elif self.rank == 0:
                self.ending.end(policy, make_env)
        finally:  # after a signal no further one shows a traceback, as late as it may come
            self.ending.release()

    def fast(self, module: Any) -> Callable[[np.ndarray], np.ndarray]:
        """A module as a function from a NumPy batch (n, ...) to a NumPy batch, with its current weights at each call:
        for a few rows on the CPU several times as fast as torch, if it is an `nn.Sequential` of simple layers."""
        from solorl.compute.speed import Forward

        return Forward(module, self.args.fast, self._graphs())

    def gradient_step(
        self, loss_of: Callable[..., Any], module: Any, optimizer: Any, max_grad_norm: float = math.inf
    ) -> Callable[..., Any]:
        """`metrics = step(*inputs)` takes one step of `optimizer` down the gradient of the loss: `loss, metrics =
        loss_of(module, *inputs)`. What the algorithm needs of the loss is a third value, a tensor or a tree of tensors:
        `loss, metrics, extra = loss_of(...)`, then `metrics, extra = step(*inputs)`, all detached.

        The optimiser's parameters must be `module`'s; all others are frozen. The gradient's global norm is clipped to
        `max_grad_norm`. Steps may share modules, parameters and optimisers. With several ranks gradients and metrics
        are means over them, `extra` is each rank's own. Before `resume`, which is given all. See `GradientStep`."""
        from solorl.compute.speed import GradientStep

        average = self.ranks.average if self.world_size > 1 else None
        with in_one_sentence():
            graphs = self._graphs() if average is None else None
            parts = (loss_of, module, optimizer, max_grad_norm, self.compile, self.args.fast, average, graphs)
            self.checkpoints.steps.append(GradientStep(*parts))
        return self.meter.timed("update", self.checkpoints.steps[-1])

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.compile(function)` with `--compile`, else the function itself."""
        if not self.args.compile:
            return function
        from solorl.compute.speed import compiled

        with in_one_sentence():
            return compiled(function, self.device)

    # ------------------------------------------------------------------ verbs for objects in other processes
    def place(self, cls: type, inputs: Sequence[tuple[Any, ...]], here: bool = False) -> list[Any]:
        """An object `cls(*each)` for each of `inputs`: in this process if `here`, else in one that Ray places; then its
        methods return promises at once. What has ended is started again, and the run says so. Before `resume`."""
        if here:
            return [cls(*each) for each in inputs]
        try:
            return [] if self.play else self.processes.place(cls, inputs)
        except (ModuleNotFoundError, ConnectionError) as error:
            quit_with(missing_extra(self.script.name, error) or str(error))

    def share(self, value: Any) -> Any:
        """A value to hand to several placed objects, which is sent once."""
        return self.processes.share(value)

    def first(self, promises: Sequence[Any]) -> tuple[int, Any]:
        """Wait for the first of several promises; its index and answer, which is None where its object has ended."""
        with in_one_sentence():
            return self.processes.first(promises)

    @in_one_sentence()
    def answers(self, promises: Sequence[Any]) -> list[Any]:
        """The answers of promises, None where the object has ended; of an object `here` what it has returned."""
        return self.processes.answers(promises)

    # ------------------------------------------------------------------ the halves of `resume`, and what verbs share
    @in_one_sentence()
    def fit(self, parts: Mapping[str, Any], models: Mapping[str, Any] | None = None) -> int:
        """The first half of `resume`, which writes nothing. `models`: see `Checkpoints`."""
        if self.opened.apart and not any(isinstance(part, AsyncEnvs) for part in parts.values()):
            raise UsageError(f"--async-envs: {self.script.name} steps its environments in another way")
        self.checkpoints.name(parts, models)
        for envs in filter(env_state.is_vector_env, parts.values()):
            refuse_statistics(envs, self.env_id)
            envs.step = self.meter.timed("environment", envs.step)
            if teams := teams_of(envs):
                self.meter.teams, self.meter.agents = teams, list(envs.agents)
        if self.play:
            if self.play.model:
                self.checkpoints.load_model(self.play.model)
            return 0
        for replay in self.checkpoints.replays.values():
            check_replay(self.args, replay.arrays.values())
        if self.args.resume:
            if self.rank == 0:
                self.folder.lock()
            try:
                self.restarted = self.checkpoints.resume()
                if saved := self.checkpoints.resumed:
                    with fitting(f"the checkpoint in {near(self.dir)}"):
                        self.meter.resume(saved, getattr(self.args, "num_envs", None))
                        self.evaluator.resume(saved)
                    self.ending.resume(saved)
            except BaseException:
                self.folder.unlock()
                raise
        start = int(self.checkpoints.resumed.get("iteration", 0))
        local = 0 if self.meter.returns is None else len(self.meter.returns) // self.world_size  # of each rank
        self.meter.begin_episodes(self.checkpoints.same_in_all_ranks(start, self.restarted, local))
        return start

    @in_one_sentence()
    def begin(self, start: int) -> None:
        """The second half of `resume`, which opens the run folder; `start` is what the first half has returned."""
        if self.rank > 0:
            return
        if not self.args.resume:
            self.folder.make()
        self.checkpoints.open(self.dir)
        self.folder.open(self.args, self.script, self.device, self.checkpoints.resumed)
        self.ending.begin()
        self.say(f"run folder {near(self.dir)}")
        self.say(device_words(self.device, self.args.threads))
        size = sum(array.nbytes for replay in self.checkpoints.replays.values() for array in replay.arrays.values())
        if self.args.save_replay and size > 1e9:
            self.say(f"the replay buffer will take up to {size / 1e9:.1f} GB in {near(self.dir / 'replay')}")
        if self.checkpoints.resumed:
            self.say(f"resumed at step {self.step:,} (iteration {start})")
        elif self.args.resume:
            self.say(f"no checkpoint in {near(self.dir)} yet: starting from the beginning")
        if self.args.resume and self.evaluator.score is None and (self.dir / MODEL).exists():
            (self.dir / MODEL).replace(self.dir / "model_before.safetensors")  # of another training or environment

    @in_one_sentence()
    def next_loop(self, start: int, num_iterations: int, last: bool) -> range:
        """The iterations of one more loop; see `loop`."""
        refuse(not (self.play or self.rank or self.dir.is_dir()), "run.resume(...) must come before run.loop")
        return self.meter.next_loop(start, num_iterations, last, bool(self.play or self.ending.why))

    @in_one_sentence()
    def _reach(self, global_step: int) -> None:
        self.meter.reach(global_step)

    def _graphs(self) -> Any:
        """What records CUDA graphs on this device, if they are wanted."""
        from solorl.compute.graphs import Cuda, wanted

        return Cuda(self.device) if wanted(self.device, self.args.fast) else None
