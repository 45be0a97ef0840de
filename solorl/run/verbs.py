"""Everything a training script needs that is not the algorithm, behind a few verbs.

    require, compile, fast, gradient_step, resume, reset, loop, episodes, learned, log, evaluate, save, close

No verb changes what is learned. This module knows no algorithm, no network and no loss.
"""

import ast
import atexit
import errno
import fcntl
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import random
import shlex
import shutil
import signal
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import gymnasium as gym
import numpy as np

from solorl.errors import UsageError, fitting, needs_extra, quit_with
from solorl.files import remove_leftovers, sha256, write_atomically
from solorl.machine import cpu_model, git_state
from solorl.run import checkpoint as state
from solorl.run import env_state as simulators
from solorl.run import memory, returns, signals
from solorl.run.arguments import RunArgs, script_path
from solorl.run.evaluation import Policy, draw_learning_curve, film, play_episodes, play_games, undisturbed, watch
from solorl.run.replay import ReplayLog, is_replay
from solorl.run.safety import check_checkpoint, check_running_episodes
from solorl.run.trackers import MetricsFile, Safe, TensorBoard, WandB
from solorl.scripts import as_typed, header_fields, not_for
from solorl.terminal import Progress, duration, paint, say, warn, wiped

DIVERGED = 3  # exit code of a run that met a NaN or an infinite number
UNSAVED = 4  # exit code of a run that has come to its end, but could not write all of it
WRITTEN = {  # model -> when a run writes it
    "model.safetensors": "the run writes it with its first evaluation",
    "model_last.safetensors": "the run writes it at its end",
}
TRAIN, EVALUATE, CONFIRM = range(3)  # streams of environment seeds


@dataclass
class Play:
    """What `solo play` and `solorl.load` need of a run: no training, only the policy of a saved model."""

    episodes: int = 10
    video: bool = False
    render: bool = False
    seed: int | None = None
    model: str = "model.safetensors"
    take: Callable[[Any, Policy, Callable[..., Any]], None] | None = None  # gets args, policy, make_env; plays nothing


def env_seed(seed: int, stream: int, index: int, rank: int = 0) -> int:
    """A seed that no other run seed (< 2^31), stream (< 4), rank (< 2^10) or environment index (< 2^20) shares."""
    return ((seed * 4 + stream) * 2**10 + rank) * 2**20 + index


class Run:
    """One training: its seeds, device, run folder, metrics, checkpoints, evaluations and how it ends."""

    play: ClassVar[Play | None] = None  # set while `solo play` or `solorl.load` runs a script
    _teams: returns.Teams | None = None  # of the environments among the parts, if they have several agents
    _agents: tuple[str, ...] = ()  # their names

    def __init__(self, args: RunArgs):
        self.args = args
        self.script = script_path()
        self.device = self._device()
        self._check_tracker()
        self._seed()
        self.dir = Path(args.resume) if args.resume else self._new_dir()
        self._parts: dict[str, Any] = {}
        self._replays: dict[str, tuple[Any, ReplayLog]] = {}
        self._tree: dict[str, Any] | None = None  # the checkpoint that is resumed
        self._until = math.inf  # step of the newest checkpoint that may be resumed
        self._keep: int | None = None  # step of a checkpoint that stays although there are two newer ones
        self._step = 0  # environment steps at the last call of log, evaluate or save
        self._due: dict[str, int] = {}  # step of the last call per verb
        self._ending, self._signal = "", 0
        self._iteration, self._is_last = 0, False
        self.trained = False  # the loop is over: all that was learned is saved
        self._before: dict[int, Any] = {}  # where signals went before the loop
        self._saved: int | None = None  # step of the newest checkpoint
        self._files: dict[str, str] = {}  # what this run has to leave in its folder -> why it could not be written
        self._best, self._last_eval = -math.inf, (-1, 0.0, 0.0)
        self._confirmations = 0
        self.restarted: list[int] = []  # environments whose episodes `resume` could not continue and started again
        self._returns: np.ndarray | None = None  # of the running episodes, (num_envs,) or (num_envs, num_agents)
        self._lengths: np.ndarray | None = None
        self._rows: list[dict[str, float]] = []
        self._recent: deque[float] = deque(maxlen=100)
        self._means: dict[str, tuple[Any, int]] = {}  # of each metric since the last row: sum, number of gradient steps
        self._eval_envs: list[Any] = []
        self._lock: Any = None  # of the run folder, while this process trains there
        self._status = ""
        self._elapsed, self._resumed_at = 0.0, time.perf_counter()
        self._plumbing = 0.0  # seconds spent on evaluation and saving since the last row
        self._rate = (0, 0.0)  # step and wall time of the last row
        self._looked, self._line = -math.inf, Progress()
        self._total = int(getattr(args, "total_timesteps", 0))

    # ------------------------------------------------------------------ verbs, in the order of a script
    def require(self, condition: Any, sentence: str) -> None:
        """End with `sentence` and exit code 2 unless `condition` holds. Nothing has been written before `resume`."""
        if not condition:
            quit_with(sentence)

    def require_spaces(self, envs: Any, obs: str, action: str) -> None:
        """End with one sentence and exit code 2 unless the spaces are of the kinds named.

        `obs` is "vector" (Box of numbers, of any shape except () and that of an image) or
        "image" (Box of bytes with 3 dimensions); `action` is "discrete" or "continuous". Where `envs` are games of
        several agents (`PettingZooEnvs`), those of one agent are meant. The sentence names the script
        that fits, from the line `Not for` of the running script's header.
        """
        env_id = getattr(self.args, "env_id", "the environment")
        games = isinstance(envs, gym.vector.SyncVectorEnv) and returns.teams_of(envs.envs[0])
        if games and not returns.teams_of(envs):
            quit_with(f"{env_id} has several agents, but {self.script.name} takes one{_not_for('several agents')}")
        kinds = "agent" if games else "single"
        spaces = (getattr(envs, f"{kinds}_observation_space"), getattr(envs, f"{kinds}_action_space"))
        found = (_obs_kind(spaces[0]), _action_kind(spaces[1]))
        for what, wanted, kind in (("observations", obs, found[0]), ("actions", action, found[1])):
            if kind != wanted:
                use = _not_for(f"{kind} {what}")
                quit_with(f"{env_id} has {kind} {what}, but {self.script.name} takes {wanted} {what}{use}")

    def resume(self, **parts: Any) -> int:
        """Name all that a checkpoint must hold; with `--resume` bring it into the saved state.

        `parts` are modules, optimisers, arrays, tensors, generators, vector environments (see `state.capture`) and
        replay buffers (see `replay`), which are saved with `--save-replay` only.
        Returns the iteration to start from. Opens the run folder: nothing has been written before.
        """
        start = self._fit(**parts)
        if Run.play is None:
            self._begin(start)
        return start

    def _fit(self, **parts: Any) -> int:
        """The first half of `resume`, which writes nothing."""
        replays = {name: part for name, part in parts.items() if is_replay(part)}
        self._parts = parts = {name: part for name, part in parts.items() if name not in replays}
        for part in parts.values():
            if simulators.is_vector_env(part):
                simulators.record(part)
                if teams := returns.teams_of(part):
                    self._teams, self._agents = teams, tuple(part.agents)
        if Run.play is not None:
            self._load_model()
            return 0
        for part in replays.values():
            memory.check_replay(self.args, part.arrays.values())
        self._replays = {name: (part, ReplayLog(self.dir / "replay" / name)) for name, part in replays.items()}
        self._lock = locked(self.dir) if self.args.resume else None
        try:
            self._tree = self._load_checkpoint() if self.args.resume else None
            start = self._restore(parts) if self._tree is not None else 0
        except SystemExit:
            self._lock.close()
            raise
        return start

    def _begin(self, start: int) -> None:
        """The second half of `resume`, which opens the run folder; `start` is what the first half has returned."""
        self._open()
        if self._tree is not None:
            self._say(f"resumed at step {self._step:,} (iteration {start})")
        elif self.args.resume:
            self._say(f"no checkpoint in {self.dir} yet: starting from the beginning")
            if (self.dir / "model.safetensors").exists():
                (self.dir / "model.safetensors").replace(self.dir / "model_before.safetensors")

    def _load_checkpoint(self) -> dict[str, Any] | None:
        """The newest whole checkpoint, None where there is none yet; where all are damaged, one sentence and exit 2."""
        tree, notes = state.load_checkpoint(self.dir / "checkpoint", self._until)
        if notes and tree is None:
            quit_with(f"no checkpoint in {self.dir} is whole ({'; '.join(notes)}); the run is left as it is")
        if tree is None and self._until != 0 and (sign := self._had_checkpoint()):
            quit_with(f"{self.dir} has lost its checkpoint ({sign}) and is left as it is; start a new run instead")
        for note in notes:
            warn(f"{note}; going on from the checkpoint before it")
        return tree

    def _had_checkpoint(self) -> str:
        """What shows that the run in this folder, which has no checkpoint, was not killed before its first one; else
        an empty string: what such a run has left, the same seed makes again."""
        record = read_status(self.dir)
        if record.get("checkpoint") is not None:
            return f"it had one of step {record['checkpoint']}"
        if record.get("status", "running") not in ("running", "failed"):
            return f"its status is {record['status']}"
        known = "checkpoint" in record  # folders of version 0.1 do not say
        models = ["model_last.safetensors"] if known else ["model_last.safetensors", "model.safetensors"]
        return next((f"there is a {name}" for name in models if (self.dir / name).exists()), "")

    def _restore(self, parts: dict[str, Any]) -> int:
        """Bring all parts into the state of the checkpoint; returns the iteration to start from. Writes nothing."""
        assert self._tree is not None
        with fitting(f"the checkpoint in {self.dir}"), undisturbed():
            check_checkpoint(self._tree)
            state.set_random_states(self._tree["random"])
        for name, part in parts.items():
            if name not in self._tree["parts"]:
                quit_with(f"the checkpoint in {self.dir} has no part named {name}")
            with fitting(f"the part {name} of the checkpoint"):
                notes = state.restore(part, self._tree["parts"].pop(name))  # a restored part is not kept in memory
            for note in notes:
                warn(note)
        with fitting(f"the checkpoint in {self.dir}"):
            check_running_episodes(self._tree["run"], getattr(self.args, "num_envs", None), len(self._agents))
        self._resume_replays()
        start = self._resume_counters(self._tree["run"])
        for envs in filter(simulators.is_vector_env, parts.values()):
            self.restarted = list(simulators.restarted(envs))
            if self._returns is not None and self._lengths is not None:
                self._returns[self.restarted] = self._lengths[self.restarted] = 0
        return start

    def reset(self, envs: Any) -> Any:
        """The first observations (num_envs, *obs_shape): of a reset with seeds no other environment has, or, resumed,
        those at which the run stopped."""
        if self._tree is not None:
            return simulators.observations(envs)
        seeds = [env_seed(self.args.seed, TRAIN, i) for i in range(envs.num_envs)]
        envs.action_space.seed(seeds[0])
        envs.single_action_space.seed(seeds[0])
        return envs.reset(seed=seeds)[0]

    def loop(self, start: int, num_iterations: int) -> Iterator[int]:
        """Count iterations from `start`. Ends early, always after a `save`, on Ctrl+C, SIGTERM, a reached
        `--target-return` or a file named `stop` in the run folder. Signals are heard until `close` is done."""
        if Run.play is not None:
            return
        self._resumed_at = time.perf_counter()
        if self._tree is not None:
            state.set_random_states(self._tree["random"])
        self._before = signals.listen(self._on_signal)
        try:
            for iteration in range(start, num_iterations):
                self._iteration, self._is_last = iteration, iteration + 1 == num_iterations
                yield iteration
                if self._ending:
                    break
        except BaseException:
            signals.restore(self._before)
            raise
        self.trained = True

    def episodes(self, global_step: int, reward: Any, done: Any, per_agent: bool = False) -> None:
        """Count episode returns and lengths from raw rewards and end flags, both (num_envs,) or (steps, num_envs).

        `global_step` is the number of environment steps after the last row. An episode that ends is logged as
        `charts/episodic_return` and `charts/episodic_length` (agent steps) at the step at which it ended. With several
        agents both have a last axis of agents, and an episode ends where all are done: the return is the first team's,
        two teams or more have `charts/episodic_return_TEAM`, and with `per_agent` each agent has its own.
        """
        reward, done = returns.rollout(reward, done, self._teams)
        steps, num_envs = done.shape
        if self._returns is None or self._lengths is None:
            self._returns, self._lengths = np.zeros(reward.shape[1:]), np.zeros(num_envs, np.int64)
        agents = self._agents if per_agent else ()
        for t, total, length in returns.ended(self._returns, self._lengths, reward, done):
            values = returns.named("charts/episodic_return", total, self._teams, agents)
            row = {name: float(value) for name, value in values.items()} | {"charts/episodic_length": float(length)}
            self._recent.append(row["charts/episodic_return"])
            self._add_row(global_step - (steps - 1 - t) * num_envs, row)

    def learned(self, metrics: Mapping[str, Any]) -> None:
        """Count the metrics of one gradient step (numbers or 0-dimensional tensors) into the means that the next row
        of `log` will have."""
        self._add_learned(metrics, 1)

    def _add_learned(self, sums: Mapping[str, Any], number: int) -> None:
        """The same for `number` gradient steps, from the sums of their metrics."""
        for name, value in sums.items() if number else ():
            total, count = self._means.get(name, (0.0, 0))
            self._means[name] = (total + value, count + number)

    def log(self, global_step: int, metrics: Mapping[str, Any]) -> None:
        """Every `--log-every` steps and in the last iteration: write one row of metrics (numbers or 0-dimensional
        arrays), the means of `learned` and `charts/SPS`, and one line of progress.

        A NaN or infinite value ends the run with exit code 3, a sentence and a snapshot in `crash/`.
        """
        self._step = global_step
        if not (self._is_due("log", self.args.log_every, global_step) or self._is_last):
            return
        means = {name: total / count for name, (total, count) in self._means.items()}
        self._means = {}
        values = {name: float(value) for name, value in (*metrics.items(), *means.items())}
        episodes = [row["charts/episodic_return"] for row in self._rows]
        for name, value in [*values.items(), *(("charts/episodic_return", value) for value in episodes)]:
            if not math.isfinite(value):
                self._diverged(name, value)
        now = self._wall_time()
        seconds = max(1e-9, now - self._rate[1] - self._plumbing)
        values["charts/SPS"] = round((global_step - self._rate[0]) / seconds)
        self._rate, self._plumbing = (global_step, now), 0.0
        summary = dict(values)
        for name in self._rows[0] if self._rows else ():
            if name.startswith("charts/episodic_"):
                summary[name] = float(np.mean([row[name] for row in self._rows]))
        self._add_row(global_step, values)
        self._flush()
        for tracker in self._trackers:
            tracker.write(global_step, summary)
        self._progress(values["charts/SPS"])

    def evaluate(self, global_step: int, policy: Policy, make_env: Callable[..., Any]) -> None:
        """Every `--eval-every` steps and in the last iteration: play the policy on environments and seeds of its own.

        `policy` maps a NumPy batch of observations (n, *obs_shape) to a NumPy batch of actions; `make_env` is called
        as `make_env(env_id, **kwargs)`. Logs `eval/episodic_return` (mean), its standard deviation and the length.
        """
        self._step = global_step
        if self._is_due("evaluate", self.args.eval_every, global_step) or (self._is_last and not self._signal):
            self._evaluate(global_step, policy, make_env)

    def save(self, global_step: int, **parts: Any) -> None:
        """Write a checkpoint every `--save-every` steps and where the loop ends. `parts`: see `resume`; those left
        out are taken as they were named there.

        NaN or infinite numbers in a module, optimiser, array or tensor end the run as in `log` and are not saved.
        """
        self._parts |= {name: part for name, part in parts.items() if name not in self._replays}
        self._step = global_step
        due = self._is_due("save", self.args.save_every, global_step)
        self._ending = self._ending or self._reason_to_end()
        if due or self._ending or self._is_last:
            began = time.perf_counter()
            self._checkpoint(global_step)
            self._plumbing += time.perf_counter() - began

    def close(self, policy: Policy, make_env: Callable[..., Any]) -> None:
        """Evaluate the final policy unless that is done, draw the learning curve, and say where everything is.

        After Ctrl+C or SIGTERM only the way to go on is said; Ctrl+C then leaves with exit code 130. Where something
        could not be written, one sentence says what, and the exit code is 4.
        """
        if Run.play is not None:
            self._play(Run.play, policy, make_env)
            return
        try:
            self._end(policy, make_env)
        finally:  # after a signal no further one shows a traceback, as late as it may come
            if not self._signal or signals.in_a_shell():
                signals.restore(self._before)

    def _end(self, policy: Policy, make_env: Callable[..., Any]) -> None:
        """What `close` does after a training."""
        if self._ending == "signal":
            self._finish("stopped")
            self._require_saved()
            lost = " (without its replay buffer: --save-replay)" if self._replays and not self.args.save_replay else ""
            name = signal.Signals(self._signal).name
            self._say(f"{name}: saved at step {self._step:,}{lost}; {self._how_to_go_on()}")
            self._draw()
            if self._signal == signal.SIGINT:
                raise SystemExit(130)
            return
        if self._last_eval[0] != self._step:
            self._evaluate(self._step, policy, make_env)
        if self.args.save_model:
            self._write_model("model_last.safetensors", self._last_eval[1])
        self._finish("stopped" if self._ending == "stop" else "finished")
        self._draw()
        self._summary()
        self._require_saved()

    def _how_to_go_on(self) -> str:
        """The command that resumes this run, as it can be typed here."""
        return f"go on with: {_solo()} train {as_typed(self.script)} --resume {shlex.quote(_near(self.dir))}"

    def fast(self, module: Any) -> Callable[[np.ndarray], np.ndarray]:
        """A module as a function from a NumPy batch (n, ...) to a NumPy batch, with its present weights at each call:
        for a few rows on the CPU several times as fast as torch, if it is an `nn.Sequential` of simple layers."""
        from solorl.run.speed import Forward

        return Forward(module, self.args.fast)

    def gradient_step(
        self, loss_of: Callable[..., Any], module: Any, optimizer: Any, max_grad_norm: float = math.inf
    ) -> Callable[..., Any]:
        """`metrics = step(*inputs)` takes one step of `optimizer`, which has the parameters of `module` and no others,
        down the gradient of the loss: `loss, metrics = loss_of(module, *inputs)`. The gradient's global norm is clipped
        to `max_grad_norm`. With `--compile` the loss and its derivative are compiled together. To be called before
        `resume`."""
        from solorl.run.speed import GradientStep

        return GradientStep(loss_of, module, optimizer, max_grad_norm, self.compile, self.args.fast)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.compile(function)` with `--compile`, else the function itself. On the CPU what calls the compiled
        pieces is C++, too: with small networks that would take as long as the pieces. See also `products`."""
        if not self.args.compile:
            return function
        import torch

        if hasattr(torch._dynamo.config, "trace_autograd_ops"):  # else torch.autograd.grad cuts the graph in two
            torch._dynamo.config.trace_autograd_ops = True
        options: dict[str, Any] = {}
        if self.device.type == "cpu":
            problem = _compile_problem(Path(torch.__file__).parent)
            if problem:
                quit_with(f"--compile {problem}; train without --compile")
            options["cpp_wrapper"] = True
            if importlib.util.find_spec("torch._inductor.custom_graph_pass"):  # since torch 2.6
                from solorl.run.onednn import ProductsByOneDNN, onednn_is_faster

                if onednn_is_faster():
                    options["post_grad_custom_pre_pass"] = ProductsByOneDNN()
        return torch.compile(function, dynamic=False, options=options)

    # ------------------------------------------------------------------ start
    def _device(self) -> Any:
        torch = sys.modules.get("torch")
        name = self.args.device
        if torch is None:
            return name
        if name == "auto":
            name = "cuda" if self.args.cuda and torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
        except RuntimeError:
            quit_with(f"--device {name} is unknown; allowed are auto, cpu, cuda, cuda:N and mps")
        if device.type == "cuda" and not torch.cuda.is_available():
            quit_with(f"--device {name} was asked for, but torch sees no CUDA device; --device cpu runs everywhere")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            quit_with(f"--device {name} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
        if device.type == "mps" and not torch.backends.mps.is_available():
            quit_with(f"--device {name} was asked for, but torch sees no MPS device; --device cpu runs everywhere")
        if device.type not in ("cpu", "cuda", "mps"):
            quit_with(f"--device {name} is not supported; allowed are auto, cpu, cuda, cuda:N and mps")
        return device

    def _check_tracker(self) -> None:
        """One sentence and exit code 2 where `--track` cannot work; a folder named `wandb` is not the package."""
        if not self.args.track or Run.play is not None:
            return
        spec = importlib.util.find_spec("wandb")
        if spec is None or spec.origin is None:
            quit_with(f"{needs_extra('--track', 'wandb')}; --no-track trains without")

    def _device_words(self) -> str:
        """Where the training runs, said at its start."""
        kind = getattr(self.device, "type", None) or getattr(self.device, "platform", "cpu")
        if kind == "cpu":
            return f"device cpu, {self.args.threads} thread{'s'[: self.args.threads != 1]}"
        name = getattr(self.device, "device_kind", None) or _device_name(self.device)
        return f"device {kind}, {name}" if name != kind else f"device {kind}"

    def _seed(self) -> None:
        random.seed(self.args.seed)
        np.random.seed(self.args.seed)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.manual_seed(self.args.seed)
            torch.set_num_threads(self.args.threads)
            if self.args.torch_deterministic:
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.use_deterministic_algorithms(True, warn_only=True)
                torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads such memory
                torch.backends.cudnn.benchmark = False

    def _new_dir(self) -> Path:
        env_id = str(getattr(self.args, "env_id", "run")).replace("/", "_").replace(":", "_")
        name = f"{env_id}__{(self.args.exp_name or self.script.stem).replace('/', '_')}__{self.args.seed}"
        return Path(self.args.runs_dir) / f"{name}__{time.strftime('%Y%m%d-%H%M%S')}"

    def _open(self) -> None:
        """Make the run folder with the script and its circumstances, and start the trackers."""
        try:
            if not self.args.resume:
                self.dir = _make_unique(self.dir)
                self._lock = locked(self.dir)
            remove_leftovers(self.dir)
            (self.dir / "checkpoint").mkdir(exist_ok=True)
            if not self.args.resume:
                shutil.copyfile(self.script, self.dir / self.script.name)
                write_atomically(self.dir / "config.json", json.dumps(self._config(), indent=2).encode())
            (self.dir / "stop").unlink(missing_ok=True)
            state.delete_newer(self.dir / "checkpoint", self._tree["run"]["step"] if self._tree else 0)
            self._metrics = MetricsFile(self.dir / "metrics.jsonl")
            self._metrics.truncate(self._tree["run"]["metrics_bytes"] if self._tree else 0)
        except OSError as error:
            quit_with(f"the run folder {self.dir} cannot be written: {error.strerror}")
        if self.args.resume:
            saved = json.loads((self.dir / "config.json").read_text())
            if saved.get("script_sha256") != sha256(self.script):
                warn(f"{self.script.name} has changed since the run in {self.dir} was started")
            self._record_changes(saved)
        purge = self._tree["run"]["step"] + 1 if self._tree else None
        self._trackers = [Safe("TensorBoard", lambda: TensorBoard(self.dir, purge))]
        if self.args.track:
            project, entity = self.args.wandb_project_name, self.args.wandb_entity
            config = asdict(self.args)
            self._trackers.append(
                Safe("Weights & Biases", lambda: WandB(project, entity, self.dir.name, config, self.dir))
            )
        self._set_status("running")
        atexit.register(self._at_exit)
        self._say(f"run folder {self.dir}")
        self._say(self._device_words())

    def _record_changes(self, config: dict[str, Any]) -> None:
        """What the command line of a resumed run changes is the run's from now on: the next `--resume` has it, too."""
        arguments = asdict(self.args)
        changed = {
            name: [config["args"].get(name), value]
            for name, value in arguments.items()
            if name not in ("resume", "resume_changed") and value != config["args"].get(name)
        }
        if changed:
            step = self._tree["run"]["step"] if self._tree else 0
            config.setdefault("changes", []).append({"step": step, "args": changed})
            config["args"] |= {name: value for name, (_, value) in changed.items()}
            write_atomically(self.dir / "config.json", json.dumps(config, indent=2).encode())

    def _config(self) -> dict[str, Any]:
        names = ("solorl", "gymnasium", "numpy", "torch", "jax", "mujoco", "ale-py", "envpool", "Box2D")
        versions = {}
        for name in names:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return {
            "format": 1,
            "script": self.script.name,
            "script_path": str(self.script.absolute()),
            "script_sha256": sha256(self.script),
            "args": asdict(self.args),
            "command": [self.script.name, *sys.argv[1:]],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "git": git_state(self.script.parent),
            "python": platform.python_version(),
            "versions": versions,
            "machine": {
                "system": platform.platform(terse=True),
                "cpu": cpu_model(),
                "cores": os.cpu_count(),
                "device": _device_name(self.device),
            },
        }

    def _resume_replays(self) -> None:
        saved = (self._tree or {}).get("replay", {})
        for name, (part, log) in self._replays.items():
            if name not in saved:
                warn(f"the part {name} was not saved (--save-replay does it): it starts empty, so this run will differ")
                continue
            try:
                log.load(part, saved[name])
            except state.CheckpointError as error:
                warn(f"{error}: the part {name} starts empty, so this run will differ")

    def _resume_counters(self, saved: dict[str, Any]) -> int:
        self._step, self._due = saved["step"], dict(saved["due"])
        self._saved, self._iteration = saved["step"], saved["iteration"] - 1
        self._best, self._last_eval = saved["best"], tuple(saved["last_eval"])
        self._confirmations = saved["confirmations"]
        self._elapsed, self._returns, self._lengths = saved["wall_time"], saved["returns"], saved["lengths"]
        self._recent.extend(saved["recent"])
        self._means = {name: tuple(pair) for name, pair in saved["learned"].items()}
        self._rate = (self._step, self._elapsed)
        return saved["iteration"]

    # ------------------------------------------------------------------ while it runs
    def _on_signal(self, number: int, frame: Any) -> None:
        """The first signal ends the run after the next save; the second ends at once."""
        if self._signal:
            self._end_at_once(number)
        self._signal = number
        doing = "all is saved, evaluating and drawing" if self.trained else "finishing this iteration and saving"
        self._say(f"{signal.Signals(number).name}: {doing}; once more ends at once")

    def _end_at_once(self, number: int) -> NoReturn:
        """Leave without any further code of the script's, but its variables to a shell (`python -i`)."""
        self._abandon("stopped" if self.trained else "failed")
        saved = "before its first checkpoint" if self._saved is None else f"saved up to step {self._saved:,}"
        self._say(f"{signal.Signals(number).name}: the run ends at once, {saved}")
        if number == signal.SIGINT and signals.in_a_shell():
            raise KeyboardInterrupt
        os._exit(128 + number)

    def _abandon(self, status: str) -> None:
        """Leave the run folder in order where the process ends before `close` has done it."""
        if self._status == "running":
            self._write_rows()
            self._set_status(status)

    def _reason_to_end(self) -> str:
        if self._signal:
            return "signal"
        now = time.perf_counter()
        if now - self._looked < 0.5 and not self._is_last:  # seconds: a look at the disk is too dear for every step
            return ""
        self._looked = now
        stop = self.dir / "stop"
        if stop.exists():
            stop.unlink(missing_ok=True)
            self._say(f"the file {stop} asks to end here")
            return "stop"
        return ""

    def _is_due(self, verb: str, every: int, step: int) -> bool:
        before, self._due[verb] = self._due.get(verb, 0), step
        return every > 0 and step // every > before // every

    def _wall_time(self) -> float:
        return self._elapsed + time.perf_counter() - self._resumed_at

    def _add_row(self, step: int, values: dict[str, float]) -> None:
        self._rows.append({"global_step": step, "wall_time": round(self._wall_time(), 3), **values})

    def _write_rows(self) -> None:
        rows, self._rows = self._rows, []
        self._metrics.write(rows)
        self._files["metrics.jsonl"] = str(self._metrics.problem.strerror) if self._metrics.problem else ""

    def _flush(self) -> None:
        """Write the waiting rows; a NaN or infinite number among them ends the run."""
        rows = self._rows
        self._write_rows()
        for name, value in (item for row in rows for item in row.items()):
            if not math.isfinite(value):
                self._diverged(name, value)

    def _evaluate(self, step: int, policy: Policy, make_env: Callable[..., Any]) -> None:
        began = time.perf_counter()
        self._flush()
        self._check_finite()
        with undisturbed():
            totals, lengths = self._play_seeds(EVALUATE, 0, policy, make_env)
            scores = returns.named("eval/episodic_return", totals, returns.teams_of(self._eval_envs[0]))
            score = scores.pop("eval/episodic_return")
            mean, std = float(score.mean()), float(score.std())
            if not math.isfinite(mean):
                self._diverged("eval/episodic_return", mean)
            row = {
                "eval/episodic_return": mean,
                "eval/episodic_return_std": std,
                "eval/episodic_length": float(lengths.mean()),
                **{name: float(value.mean()) for name, value in scores.items()},
            }
            self._add_row(step, row)
            self._flush()
            for tracker in self._trackers:
                tracker.write(step, row)
            self._last_eval = (step, mean, std)
            line = f"step {step:>10,}  evaluation {mean:.1f} ± {std:.1f} over {len(score)} episodes"
            self._say(paint(line, "cyan"))
            if mean > self._best:
                self._best = mean
                if self.args.save_model:
                    self._write_model("model.safetensors", mean)
            self._confirm(mean, policy, make_env)
            if self.args.capture_video:
                self._film(f"step_{step}.mp4", env_seed(self.args.seed, EVALUATE, 0), policy, make_env)
        self._plumbing += time.perf_counter() - began

    def _play_seeds(self, stream: int, first: int, policy: Policy, make_env: Callable[..., Any]) -> Any:
        count = self.args.eval_episodes
        if not self._eval_envs:
            self._eval_envs = [make_env(self.args.env_id) for _ in range(count)]  # type: ignore[attr-defined]
        seeds = [env_seed(self.args.seed, stream, first + i) for i in range(count)]
        return play_games(self._eval_envs, policy, seeds)

    def _confirm(self, mean: float, policy: Policy, make_env: Callable[..., Any]) -> None:
        """End the run if the target is reached also on seeds never used before."""
        target = self.args.target_return
        if target is None or mean < target:
            return
        first = self._confirmations * self.args.eval_episodes
        self._confirmations += 1
        totals, _ = self._play_seeds(CONFIRM, first, policy, make_env)
        again = float(returns.of_game(totals, returns.teams_of(self._eval_envs[0])).mean())
        line = f"target {target:g} reached; on fresh seeds {again:.1f}: {'done' if again >= target else 'going on'}"
        self._say(paint(line, "green" if again >= target else "cyan"))
        if again >= target:
            self._ending = "target"

    def _film(self, name: str, seed: int, policy: Policy, make_env: Callable[..., Any]) -> Path | None:
        path = self.dir / "videos" / name
        try:
            self._require_folder()
            env = make_env(self.args.env_id, render_mode="rgb_array")  # type: ignore[attr-defined]
            try:
                film(env, policy, seed, path)
            finally:
                env.close()
        except Exception as error:  # no renderer, no codec, no space: a film is not worth a training
            warn(f"no video: {type(error).__name__}: {error}")
            return None
        return path

    def _checkpoint(self, step: int) -> None:
        self._flush()
        self._check_finite()
        try:
            self._require_folder()
            state.save_checkpoint(self.dir / "checkpoint", step, self._capture(step), self._keep)
            for _, log in self._replays.values():
                log.forget()
        except OSError as error:
            self._files["checkpoint"] = str(error.strerror)
            kept = "; the one before it is kept" if state.checkpoints(self.dir / "checkpoint") else ""
            warn(f"the checkpoint of step {step:,} could not be written ({error.strerror}){kept}")
            return
        self._files["checkpoint"], self._saved = "", step
        self._set_status(self._status)

    def _require_folder(self) -> None:
        """OSError where the run folder has been moved or removed: no part of it must be made again."""
        if not self.dir.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the run folder is gone")

    def _learned_parts(self) -> dict[str, Any]:
        """What must be finite wherever it is saved: all parts but environments and replay buffers."""
        return {name: state.capture(part) for name, part in self._parts.items() if not simulators.is_vector_env(part)}

    def _check_finite(self) -> None:
        """End the run where something that was learned is NaN or infinite, before it replaces what is good."""
        for name, tree in {**self._learned_parts(), "charts/episodic_return": self._returns}.items():
            if found := state.not_finite(tree, name):
                self._diverged(*found)

    def _capture(self, step: int) -> dict[str, Any]:
        return {
            "run": {
                "iteration": self._iteration + 1,
                "step": step,
                "due": self._due,
                "best": self._best,
                "last_eval": list(self._last_eval),
                "confirmations": self._confirmations,
                "wall_time": self._wall_time(),
                "returns": self._returns,
                "lengths": self._lengths,
                "recent": list(self._recent),
                "learned": {name: list(pair) for name, pair in self._means.items()},
                "metrics_bytes": self._metrics.sync(),
            },
            "random": state.random_states(),
            "parts": {name: state.capture(part) for name, part in self._parts.items()},
            "replay": {name: log.append(part) for name, (part, log) in self._replays.items()}
            if self.args.save_replay
            else {},
        }

    def _diverged(self, name: str, value: float) -> NoReturn:
        """Leave a snapshot to look at, and end."""
        where = self.dir / "crash"
        try:
            self._require_folder()
            shutil.rmtree(where, ignore_errors=True)
            parts = {part: state.capture(value) for part, value in self._parts.items()}
            state.write_state(where, {"parts": parts, "random": state.random_states(), "step": self._step})
            note = f"a snapshot is in {where}"
        except OSError as error:
            note = f"no snapshot ({error.strerror})"
        self._finish(f"diverged: {name} is {value}")
        iteration = self._iteration
        what = f"{paint('error:', 'red', sys.stderr)} {name} is {value}"
        self._say(f"{what} in iteration {iteration} (step {self._step:,}); {note}", sys.stderr)
        raise SystemExit(DIVERGED)

    # ------------------------------------------------------------------ models
    def _modules(self) -> dict[str, Any]:
        return {name: part for name, part in self._parts.items() if hasattr(part, "named_parameters")}

    def _write_model(self, name: str, score: float) -> None:
        """All modules among the parts, keys prefixed by the part's name, with step and evaluation as metadata."""
        arrays: dict[str, np.ndarray] = {}
        for part, module in self._modules().items():
            for key, tensor in module.state_dict().items():
                state.encode(tensor, arrays, f"{part}.{key}")
        about = {"step": str(self._step), "eval/episodic_return": repr(score), "script": self.script.name}
        try:
            write_atomically(self.dir / name, b"".join(state.safetensors_pieces(arrays, about)))
            self._files[name] = ""
        except OSError as error:
            self._files[name] = str(error.strerror)
            kept = "; the one before it is kept" if (self.dir / name).exists() else ""
            warn(f"{name} could not be written ({error.strerror}){kept}")

    def _load_model(self) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = self.dir / (Run.play.model if Run.play else "model.safetensors")
        try:
            arrays = load_file(path)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:  # the last: types NumPy has not
            quit_with(f"{path} cannot be read ({error}); {WRITTEN[path.name]}")
        for part, module in self._modules().items():
            prefix = f"{part}."
            mine: dict[str, Any] = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
            if (torch := sys.modules.get("torch")) and isinstance(module, torch.nn.Module):
                mine = {k: torch.from_numpy(v) for k, v in mine.items()}
            with fitting(f"the model {path}"):
                module.load_state_dict(mine)

    def _play(self, play: Play, policy: Policy, make_env: Callable[..., Any]) -> None:
        """Hand over the loaded policy, or evaluate it; film or show it on request."""
        if play.take is not None:
            play.take(self.args, policy, make_env)
            return
        seed = self.args.seed if play.seed is None else play.seed
        seeds = [env_seed(seed, CONFIRM, 2**19 + i) for i in range(play.episodes)]
        env_id = self.args.env_id  # type: ignore[attr-defined]
        with undisturbed():
            if play.render:
                env = make_env(env_id, render_mode="human")
                scores = np.array(watch(env, policy, seeds))
                env.close()
            else:
                scores, _ = play_episodes([make_env(env_id) for _ in seeds], policy, seeds)
            print(f"{env_id}: {scores.mean():.1f} ± {scores.std():.1f} over {len(seeds)} greedy episodes, "
                  f"from {scores.min():.1f} to {scores.max():.1f}")  # fmt: skip
            if play.video and (path := self._film("play.mp4", seeds[0], policy, make_env)):
                print(f"video {path}")

    # ------------------------------------------------------------------ what people see
    def _say(self, text: str, file: Any = None) -> None:
        """One whole line; wipes the progress line first."""
        file = file or sys.stdout
        say(wiped(text, file), file)

    def _progress(self, sps: float) -> None:
        """In a terminal one line that renews itself, elsewhere a line every 10 seconds."""
        if self._line.is_due():
            recent = float(np.mean(self._recent)) if self._recent else None
            evaluation = self._last_eval[1] if self._last_eval[0] >= 0 else None
            self._line.show(self._step, self._total, recent, evaluation, sps)

    def _draw(self) -> None:
        title = f"{self.script.stem} on {getattr(self.args, 'env_id', '')}, seed {self.args.seed}"
        try:
            draw_learning_curve(self.dir / "metrics.jsonl", self.dir / "learning_curve.png", title)
        except OSError as error:
            warn(f"no learning curve: {error.strerror}")

    def _summary(self) -> None:
        _, mean, std = self._last_eval
        videos = sorted((self.dir / "videos").glob("*.mp4"), key=lambda path: path.stat().st_mtime)
        curve, model = self.dir / "learning_curve.png", self.dir / "model.safetensors"
        lines = {
            "trained": f"{self._step:,} steps in {duration(self._wall_time())}",
            "evaluation": f"{mean:.1f} ± {std:.1f} over {self.args.eval_episodes} episodes, best {self._best:.1f}",
            "curve": curve if curve.exists() else "none",
            "video": videos[-1] if videos else "none (--capture-video)",
            "model": model if model.exists() else "none" if self.args.save_model else "none (--save-model)",
        }
        if model.exists():
            lines["play it"] = f"{_solo()} play {shlex.quote(str(self.dir))}"
        self._say("")
        for name, value in lines.items():
            self._say(f"{paint(f'{name:<11}', 'bold')} {value}")

    def _set_status(self, status: str) -> None:
        self._status = status
        record = {"status": status, "pid": os.getpid(), "global_step": self._step, "wall_time": self._wall_time()}
        record["checkpoint"] = self._saved
        if self._last_eval[0] >= 0:
            record["eval/episodic_return"] = self._last_eval[1]
        try:
            write_atomically(self.dir / "status.json", json.dumps(record).encode())
            self._files["status.json"] = ""
        except OSError as error:
            self._files["status.json"] = str(error.strerror)
            warn(f"status.json could not be written ({error.strerror})")

    def _finish(self, status: str) -> None:
        self._write_rows()
        if status == "finished" and self._metrics.problem:
            status = "failed"  # what is evaluated from the folder lacks rows
        for tracker in self._trackers:
            tracker.close()
        for env in self._eval_envs:
            env.close()
        self._set_status(status)
        self._lock.close()

    def _require_saved(self) -> None:
        """One sentence and exit code 4 where something that this run had to leave in its folder is not there."""
        problems = {
            name: why or "it is gone" for name, why in self._files.items() if why or not (self.dir / name).exists()
        }
        if not problems:
            return
        what = ", ".join(f"{name} ({why})" for name, why in problems.items())
        what = f"its end is not saved in {self.dir}: {what}"
        if not self.dir.is_dir():
            what = f"its end is not saved: {self.dir} has been moved or removed"
        self._say(f"error: the training has come to step {self._step:,}, but {what}", sys.stderr)
        raise SystemExit(UNSAVED)

    def _at_exit(self) -> None:
        self._abandon("failed")


# ---------------------------------------------------------------------- small facts
def _obs_kind(space: Any) -> str:
    """ "vector", "image", "dict", ...: the kind of an observation space, in the words of the headers."""
    if type(space).__name__ == "Box":
        if space.shape == ():
            return "scalar"
        return "image" if space.dtype == np.uint8 and len(space.shape) == 3 else "vector"
    return type(space).__name__.lower()


def _action_kind(space: Any) -> str:
    """ "discrete", "continuous", "multidiscrete", ...: the kind of an action space, in the words of the headers."""
    if type(space).__name__ == "Box":
        if not np.issubdtype(space.dtype, np.floating):
            return "integer"
        return "continuous" if len(space.shape) == 1 else f"{len(space.shape)}-dimensional continuous"
    if type(space).__name__ == "Discrete" and space.start != 0:
        return f"discrete (from {space.start})"
    return type(space).__name__.lower()


def _not_for(kind: str) -> str:
    """`"; use FILE"` where the running script's header names a file for this kind, else an empty string."""
    try:
        docstring = ast.get_docstring(ast.parse(script_path().read_bytes()), clean=False) or ""
    except (OSError, ValueError, SyntaxError):  # somebody's own script may be anything
        docstring = ""
    other = not_for(header_fields(docstring)).get(kind)
    return f"; use {other}" if other else ""


def read_status(folder: Path) -> dict[str, Any]:
    """What status.json says; empty where it cannot be read."""
    try:
        record = json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _make_unique(path: Path) -> Path:
    """Make the folder; where it exists already, one with a counter after its name."""
    for i in range(1, 10_000):
        candidate = path if i == 1 else path.with_name(f"{path.name}-{i}")
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            continue
    raise UsageError(f"{path} and 10,000 like it exist")


def locked(folder: Path) -> Any:
    """An open file that no other process holds while it is open; one sentence and exit code 2 where one does."""
    try:
        file = open(folder / ".lock", "a")  # noqa: SIM115
    except OSError as error:
        quit_with(f"the run folder {folder} cannot be written: {error.strerror}")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        quit_with(f"another process is training in {folder}; it must end first")
    except OSError as error:  # a file system without locks
        warn(f"{folder} cannot be locked ({error.strerror}): let no other process train there")
    return file


def _near(path: Path) -> str:
    """The path as one would type it here: relative where it lies below the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path)


def _solo() -> str:
    """The command `solo` as it can be typed here, be it on the PATH or only next to the running Python."""
    own = Path(sys.executable).parent / "solo"
    if shutil.which("solo") or not own.exists():
        return "solo"
    return shlex.quote(_near(own))


def _compile_problem(folder: Path) -> str | None:
    """Why torch, which is in `folder`, cannot compile for the CPU here."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    headers = sysconfig.get_path("include")
    if " " in str(folder):
        return f"fails where the path of torch has a space, as {folder} has"
    if not shutil.which(compiler):
        return f"needs a C++ compiler, but there is no {compiler} (Debian: apt install g++)"
    if not Path(headers, "Python.h").is_file():
        return f"needs the headers of Python, but {headers} lacks Python.h (Debian: apt install python3-dev)"
    return None


def _device_name(device: Any) -> str:
    if getattr(device, "type", "") == "cuda":
        return sys.modules["torch"].cuda.get_device_name(device)
    return str(device)
