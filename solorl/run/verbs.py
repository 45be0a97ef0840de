"""Everything a training script needs that is not the algorithm, behind a few verbs.

    require, vector_env, multi_agent_env, compile, fast, gradient_step, resume, reset, loop, episodes, gather, learned,
        log, evaluate, save, close
    teacher: the trained policy of another run; dataset: the transitions that other runs have recorded
    place, share, first, answers: objects in other processes, for scripts that play and learn side by side;
        evaluation_seeds, where one of them evaluates

No verb changes what is learned. This module knows no algorithm, no network and no loss. The rest is done by parts
that work without a run: `folder`, `meter`, `checkpoints`, `evaluator`. They raise; only the verbs end a run.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from solorl import signals
from solorl.checkpoints import env_state
from solorl.compute.device import EVALUATE, TRAIN, env_seed
from solorl.data.dataset import Dataset, open_datasets
from solorl.envs import openers
from solorl.envs.async_envs import AsyncEnvs
from solorl.envs.guest import hosted, refuse_statistics, try_out
from solorl.envs.ids import is_atari
from solorl.envs.returns import teams_of
from solorl.envs.spaces import action_kind, flattens, obs_kind
from solorl.envs.surroundings import undisturbed
from solorl.envs.vector import VectorEnvs
from solorl.errors import in_one_sentence, missing_extra, quit_with
from solorl.run.course import require
from solorl.run.evaluation import Policy
from solorl.run.products import Products
from solorl.run.teacher import Teacher
from solorl.scripts import file_for, use_instead
from solorl.terminal import warn


class Run(Products):
    """One training: its seeds, device, run folder, metrics, checkpoints, evaluations and how it ends.

    `device` is that of a framework other than torch; a `quiet` run says its errors only, because another one in this
    process speaks for it. A script that says `parallel` can be trained by several processes, started by torchrun or
    `solo train ... --nproc N`: `rank` of `world_size`. All have the same random numbers, environments of their own and
    the same modules; rank 0 alone speaks, evaluates and has the run folder.
    """

    _masks = _reads_masks = False  # whether the environment gives masks, and the script reads them

    # ------------------------------------------------------------------ verbs, in the order of a script
    def require(self, condition: Any, sentence: str) -> None:
        """End with `sentence` and exit code 2 unless `condition` holds. Nothing has been written before `resume`."""
        require(condition, sentence)

    def require_spaces(self, envs: Any, obs: str, action: str) -> None:
        """End with one sentence and exit code 2 unless the spaces are of the kinds named.

        `obs` is "vector" (Box of numbers, of any shape except () and that of an image), "image" (Box of bytes with 3
        dimensions), "dict" or "tuple"; `action` is "discrete", "continuous", "bounded" (continuous, each entry with
        finite bounds), "multidiscrete" or "tuple". Where `envs`
        are games of several agents (`multi_agent_env`), those of one agent are meant. The sentence names the script
        that fits, or the two nearest where there is none, from the headers of all files.
        """
        env_id = getattr(self.args, "env_id", "the environment")
        games = teams_of(envs.envs[0] if isinstance(envs, gym.vector.SyncVectorEnv) else envs)
        if games and not teams_of(envs):
            use = use_instead(self.script, "several agents")
            quit_with(f"{env_id} has several agents, but {self.script.name} takes one{use}")
        kinds = "agent" if games else "single"
        spaces = (getattr(envs, f"{kinds}_observation_space"), getattr(envs, f"{kinds}_action_space"))
        found, bounded = (obs_kind(spaces[0]), action_kind(spaces[1])), action == "bounded"
        action = "continuous" if bounded else action
        for what, wanted, kind in (("observations", obs, found[0]), ("actions", action, found[1])):
            if kind != wanted:
                use = file_for(self.script, *found, atari=found[0] == "image" and is_atari(env_id))
                if wanted == "vector" and not use.startswith("; use") and flattens(spaces[0]):
                    use += "; gymnasium.wrappers.FlattenObservation makes a vector of the observations"
                quit_with(f"{env_id} has {kind} {what}, but {self.script.name} takes {wanted} {what}{use}")
        space = spaces[1]
        self.require(not bounded or space.is_bounded(), f"{env_id} has actions without finite bounds")
        with in_one_sentence():
            refuse_statistics(envs, env_id)
        if self._masks and not (games or self.play or self.quiet or self._reads_masks):
            warn(f"{env_id} gives an action_mask, which {self.script.name} does not use")

    def iterations(self, steps: int, minibatches: int | None = None, batch: int | None = None) -> int:
        """How many iterations of `steps` environment steps `--total-timesteps` gives.

        Ends with one sentence and exit code 2 where that is none; where the `minibatches` of `--num-minibatches` do not
        divide the steps into parts of two or more; and where the replay buffer never holds a `batch` of `--batch-size`.
        """
        total = int(self.args.total_timesteps)  # type: ignore[attr-defined]
        self.require(total >= steps, f"--total-timesteps {total} is less than one iteration of {steps} steps")
        if minibatches is not None:
            unequal = f"--num-minibatches {minibatches} must divide the batch of {steps} steps into parts of 2 or more"
            self.require(steps % minibatches == 0 and steps > minibatches, unequal)
        if batch is not None:
            most = min(int(self.args.buffer_size), total // steps * steps)  # type: ignore[attr-defined]
            self.require(batch <= most, f"--batch-size must be at most {most} by --buffer-size and --total-timesteps")
        return total // steps

    def vector_env(self, make_env: Callable[..., Any], env_id: str, num_envs: int) -> VectorEnvs:
        """`num_envs` environments `make_env(env_id)` side by side, which reset in the same step (see `VectorEnvs`): in
        this process, with `--async-envs` in one each (see `AsyncEnvs`). Each is a guest (see `Guest`); one more, which
        is closed at once, shows mistakes in its own code."""
        envs: VectorEnvs = self._side_by_side(VectorEnvs, make_env, env_id, num_envs)
        return envs

    def _side_by_side(self, kind: type, make_env: Callable[..., Any], env_id: str, num_envs: int) -> Any:
        apart = self.args.async_envs and not self.play
        self._reads_masks = "action_mask" in self.script.read_text(encoding="utf-8")
        with in_one_sentence():
            manners = try_out(make_env, env_id, self._reads_masks and kind is VectorEnvs)
        self._masks = manners.mask is not None
        several = f"--async-envs is for environments of one agent, not for games of several as {env_id}"
        self.require(not apart or (kind is VectorEnvs and not manners.agents), several)
        return (AsyncEnvs if apart else kind)([hosted(make_env, env_id, ends=not apart)] * num_envs)

    def multi_agent_env(self, make_env: Callable[..., Any], env_id: str, num_envs: int) -> Any:
        """`num_envs` games of several agents `make_env(env_id)` side by side, which reset in the same step: games
        `team/NAME` in one compiled call (see `TeamEnvs`), unless `make_env` wraps them; all others one after the other
        (see `PettingZooEnvs`, whose arrays both have)."""
        with undisturbed():  # some modules draw random numbers where they are imported for the first time
            from solorl.envs.pettingzoo import PettingZooEnvs

            if (stepped := openers(env_id).stepped) and (games := stepped(make_env, env_id, num_envs)):
                return games
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
            self.taught = Teacher.find(address, self.dir, device, trust_script)
            self.taught.check(str(getattr(self.args, "env_id", "")), envs, part)
        return self.taught.policy

    def dataset(self, folders: str, envs: Any) -> Dataset:
        """The transitions that other runs have recorded in `folders`, separated by commas (see `Dataset`). Ends with
        one sentence and exit code 2 unless each is a data set of the same environment, with the spaces of `envs`. A run
        that is only played needs none: then the data set is empty. To be called before `resume`.
        """
        with in_one_sentence():
            return open_datasets(folders, str(getattr(self.args, "env_id", "")), envs, empty=bool(self.play))

    def resume(self, **parts: Any) -> int:
        """Name all that a checkpoint must hold; with `--resume` bring it into the saved state. In all ranks modules
        begin with the values they have in rank 0.

        `parts` are modules, optimisers, arrays, tensors, generators, vector environments (see `checkpoint.capture`) and
        replay buffers (see `replay`), which are saved with `--save-replay` only.
        Returns the iteration to start from, in the loop in which the run stopped. Opens the run folder: nothing has
        been written before.
        """
        start = self.fit(parts)
        if self.world_size > 1:
            self._start_together(start, parts)
        if not self.play:
            self.begin(start)
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
            self._before = signals.listen(self.hear)
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

    def save(self, global_step: int) -> None:
        """Write a checkpoint every `--save-every` steps and where the loop ends.

        NaN or infinite numbers in a module, optimiser, array or tensor end the run as in `log` and are not saved.
        Here several ranks agree on the end, and rank 0 writes what all hand over.
        """
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

        return Forward(module, self.args.fast, self._graphs())

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
            graphs = self._graphs() if average is None else None
            return GradientStep(
                loss_of, module, optimizer, max_grad_norm, self.compile, self.args.fast, average, graphs
            )

    def _graphs(self) -> Any:
        """What records CUDA graphs on this device, if they are wanted."""
        from solorl.compute.graphs import Cuda, wanted

        return Cuda(self.device) if wanted(self.device, self.args.fast) else None

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.compile(function)` with `--compile`, else the function itself. On the CPU what calls the compiled
        pieces is C++, too: with small networks that would take as long as the pieces."""
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
