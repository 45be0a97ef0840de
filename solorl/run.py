"""Everything a training script needs that is not the algorithm, behind a few verbs.

    require, resume, reset, loop, episodes, log, evaluate, save, close, compile

No verb changes what is learned. This module knows no algorithm, no network and no loss.
"""

import atexit
import fcntl
import hashlib
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
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from solorl import memory, signals, simulators, state
from solorl.arguments import RunArgs, script_path
from solorl.errors import UsageError, fitting, quit_with
from solorl.evaluation import Policy, draw_learning_curve, film, play_episodes, undisturbed, watch
from solorl.replay import ReplayLog, is_replay
from solorl.safety import check_checkpoint, check_running_episodes
from solorl.trackers import MetricsFile, Safe, TensorBoard, WandB, say, warn

DIVERGED = 3  # exit code of a run that met a NaN or an infinite number
TRAIN, EVALUATE, CONFIRM = range(3)  # streams of environment seeds


@dataclass
class Play:
    """What `solo play` asks of a run: no training, only the policy of its best evaluation."""

    episodes: int = 10
    video: bool = False
    render: bool = False
    seed: int | None = None


def env_seed(seed: int, stream: int, index: int, rank: int = 0) -> int:
    """A seed that no other run seed (< 2^31), stream (< 4), rank (< 2^10) or environment index (< 2^20) shares."""
    return ((seed * 4 + stream) * 2**10 + rank) * 2**20 + index


class Run:
    """One training: its seeds, device, run folder, metrics, checkpoints, evaluations and how it ends."""

    play: ClassVar[Play | None] = None  # set by `solo play`

    def __init__(self, args: RunArgs):
        self.args = args
        self.script = script_path()
        self.device = self._device()
        self._seed()
        self.dir = Path(args.resume) if args.resume else self._new_dir()
        self._parts: dict[str, Any] = {}
        self._replays: dict[str, tuple[Any, ReplayLog]] = {}
        self._tree: dict[str, Any] | None = None  # the checkpoint that is resumed
        self._step = 0  # environment steps at the last call of log, evaluate or save
        self._due: dict[str, int] = {}  # step of the last call per verb
        self._ending, self._signal = "", 0
        self._best, self._last_eval = -math.inf, (-1, 0.0, 0.0)
        self._confirmations = 0
        self.restarted: list[int] = []  # environments whose episodes `resume` could not go on with and began anew
        self._returns: np.ndarray | None = None  # of the running episodes, (num_envs,)
        self._lengths: np.ndarray | None = None
        self._rows: list[dict[str, float]] = []
        self._recent: deque[float] = deque(maxlen=100)
        self._eval_envs: list[Any] = []
        self._lock: Any = None  # of the run folder, while this process trains there
        self._status = ""
        self._elapsed, self._resumed_at = 0.0, time.perf_counter()
        self._plumbing = 0.0  # seconds spent on evaluation and saving since the last row
        self._rate = (0, 0.0)  # step and wall time of the last row
        self._printed, self._looked = -math.inf, -math.inf
        self._total = int(getattr(args, "total_timesteps", 0))

    # ------------------------------------------------------------------ verbs, in the order of a script
    def require(self, condition: Any, sentence: str) -> None:
        """End with `sentence` and exit code 2 unless `condition` holds. Nothing has been written before `resume`."""
        if not condition:
            quit_with(sentence)

    def require_spaces(self, envs: Any, obs: str, action: str) -> None:
        """End with one sentence and exit code 2 unless the spaces are of the kinds named.

        `obs` is "vector" (Box of numbers, of any shape but that of an image) or
        "image" (Box of bytes with 3 dimensions); `action` is "discrete" or "continuous". The sentence names the script
        that fits, from the line `Not for` of the running script's header.
        """
        found = (_obs_kind(envs.single_observation_space), _action_kind(envs.single_action_space))
        for what, wanted, kind in (("observations", obs, found[0]), ("actions", action, found[1])):
            if kind != wanted:
                env_id = getattr(self.args, "env_id", "the environment")
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

    def _load_checkpoint(self) -> dict[str, Any] | None:
        """The newest whole checkpoint, None where there is none yet; where all are damaged, one sentence and exit 2."""
        tree, notes = state.load_checkpoint(self.dir / "checkpoint")
        if notes and tree is None:
            quit_with(f"no checkpoint in {self.dir} is whole ({'; '.join(notes)}); the run is left as it is")
        for note in notes:
            warn(f"{note}; going on from the checkpoint before it")
        return tree

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
                notes = state.restore(part, self._tree["parts"][name])
            for note in notes:
                warn(note)
        with fitting(f"the checkpoint in {self.dir}"):
            check_running_episodes(self._tree["run"], getattr(self.args, "num_envs", None))
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
        """Count iterations from `start`. Ends early, always behind a `save`, on Ctrl+C, SIGTERM, a reached
        `--target-return` or a file named `stop` in the run folder."""
        if Run.play is not None:
            return
        self._resumed_at = time.perf_counter()
        if self._tree is not None:
            state.set_random_states(self._tree["random"])
        with signals.handled(self._on_signal):
            for iteration in range(start, num_iterations):
                self._iteration, self._is_last = iteration, iteration + 1 == num_iterations
                yield iteration
                if self._ending:
                    break

    def episodes(self, global_step: int, reward: Any, done: Any) -> None:
        """Count episode returns and lengths from raw rewards and end flags, both (num_envs,) or (steps, num_envs).

        `global_step` is the count of environment steps behind the last row. An episode that ends is logged as
        `charts/episodic_return` and `charts/episodic_length` (agent steps) at the step at which it ended.
        """
        reward, done = np.atleast_2d(reward), np.atleast_2d(done)
        steps, num_envs = reward.shape
        if self._returns is None or self._lengths is None:
            self._returns, self._lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        begin = 0
        for t in map(int, np.flatnonzero(done.any(axis=1))) if done.any() else ():
            self._returns += reward[begin : t + 1].sum(0, dtype=np.float64)
            self._lengths += t + 1 - begin
            begin = t + 1
            for i in np.flatnonzero(done[t]):
                step = global_step - (steps - 1 - t) * num_envs
                self._recent.append(float(self._returns[i]))
                self._add_row(
                    step,
                    {
                        "charts/episodic_return": float(self._returns[i]),
                        "charts/episodic_length": float(self._lengths[i]),
                    },
                )
                self._returns[i], self._lengths[i] = 0.0, 0
        self._returns += reward[begin:].sum(0, dtype=np.float64)
        self._lengths += steps - begin

    def log(self, global_step: int, metrics: Mapping[str, Any]) -> None:
        """Write one row of metrics (numbers or 0-dimensional arrays) with `charts/SPS`, and one line of progress.

        A NaN or infinite value ends the run with exit code 3, a sentence and a snapshot in `crash/`.
        """
        self._step = global_step
        values = {name: float(value) for name, value in metrics.items()}
        episodes = [row["charts/episodic_return"] for row in self._rows]
        for name, value in [*values.items(), *(("charts/episodic_return", value) for value in episodes)]:
            if not math.isfinite(value):
                self._diverged(name, value)
        now = self._wall_time()
        seconds = max(1e-9, now - self._rate[1] - self._plumbing)
        values["charts/SPS"] = round((global_step - self._rate[0]) / seconds)
        self._rate, self._plumbing = (global_step, now), 0.0
        summary = dict(values)
        for name in ("charts/episodic_return", "charts/episodic_length"):
            if self._rows:
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
        if self._is_due("evaluate", self.args.eval_every, global_step) or (self._is_last and not self._signal):
            self._evaluate(global_step, policy, make_env)

    def save(self, global_step: int, **parts: Any) -> None:
        """Write a checkpoint every `--save-every` steps and where the loop ends. `parts`: see `resume`; those left
        out are taken as they were named there."""
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

        After Ctrl+C or SIGTERM only the way to go on is said; Ctrl+C then leaves with exit code 130.
        """
        if Run.play is not None:
            self._play(Run.play, policy, make_env)
            return
        if self._ending == "signal":
            self._finish("stopped")
            self._draw()
            lost = " (without its replay buffer: --save-replay)" if self._replays and not self.args.save_replay else ""
            name = signal.Signals(self._signal).name
            self._say(f"{name}: saved at step {self._step:,}{lost}; {self._how_to_go_on()}")
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

    def _how_to_go_on(self) -> str:
        """The command that resumes this run, as it can be typed here."""
        script, folder = shlex.quote(_near(self.script)), shlex.quote(str(self.dir))
        return f"go on with: {_solo()} train {script} --resume {folder}"

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
                from solorl.products import ProductsByOneDNN, onednn_is_faster

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
            (self.dir / "checkpoint").mkdir(exist_ok=True)
            if not self.args.resume:
                shutil.copyfile(self.script, self.dir / self.script.name)
                state.write_atomically(self.dir / "config.json", json.dumps(self._config(), indent=2).encode())
            (self.dir / "stop").unlink(missing_ok=True)
            self._metrics = MetricsFile(self.dir / "metrics.jsonl")
            self._metrics.truncate(self._tree["run"]["metrics_bytes"] if self._tree else 0)
        except OSError as error:
            quit_with(f"the run folder {self.dir} cannot be written: {error.strerror}")
        if self.args.resume:
            saved = json.loads((self.dir / "config.json").read_text())
            if saved.get("script_sha256") != _sha256(self.script):
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
            state.write_atomically(self.dir / "config.json", json.dumps(config, indent=2).encode())

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
            "script_sha256": _sha256(self.script),
            "args": asdict(self.args),
            "command": [self.script.name, *sys.argv[1:]],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "git": _git(self.script.parent),
            "python": platform.python_version(),
            "versions": versions,
            "machine": {
                "system": platform.platform(terse=True),
                "cpu": _cpu_model(),
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
        self._best, self._last_eval = saved["best"], tuple(saved["last_eval"])
        self._confirmations = saved["confirmations"]
        self._elapsed, self._returns, self._lengths = saved["wall_time"], saved["returns"], saved["lengths"]
        self._recent.extend(saved["recent"])
        self._rate = (self._step, self._elapsed)
        return saved["iteration"]

    # ------------------------------------------------------------------ while it runs
    def _on_signal(self, number: int, frame: Any) -> None:
        """The first signal ends the run behind the next save; the second ends at once: Ctrl+C as an exception, which
        leaves the variables to `python -i`, SIGTERM without any further code of the script's."""
        if self._signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal:
            self._flush()
            self._set_status("failed")
            os._exit(128 + number)
        self._signal = number
        self._say(f"{signal.Signals(number).name}: finishing this iteration and saving; once more ends at once")

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

    def _flush(self) -> None:
        self._metrics.write(self._rows)
        self._rows = []

    def _evaluate(self, step: int, policy: Policy, make_env: Callable[..., Any]) -> None:
        began = time.perf_counter()
        with undisturbed():
            returns, lengths = self._play_seeds(EVALUATE, 0, policy, make_env)
            mean, std = float(returns.mean()), float(returns.std())
            if not math.isfinite(mean):
                self._diverged("eval/episodic_return", mean)
            row = {
                "eval/episodic_return": mean,
                "eval/episodic_return_std": std,
                "eval/episodic_length": float(lengths.mean()),
            }
            self._add_row(step, row)
            self._flush()
            for tracker in self._trackers:
                tracker.write(step, row)
            self._last_eval = (step, mean, std)
            self._say(f"step {step:>10,}  evaluation {mean:.1f} ± {std:.1f} over {len(returns)} episodes")
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
        return play_episodes(self._eval_envs, policy, seeds)

    def _confirm(self, mean: float, policy: Policy, make_env: Callable[..., Any]) -> None:
        """End the run if the target is reached also on seeds never used before."""
        target = self.args.target_return
        if target is None or mean < target:
            return
        first = self._confirmations * self.args.eval_episodes
        self._confirmations += 1
        again = float(self._play_seeds(CONFIRM, first, policy, make_env)[0].mean())
        self._say(f"target {target:g} reached; on fresh seeds {again:.1f}: {'done' if again >= target else 'going on'}")
        if again >= target:
            self._ending = "target"

    def _film(self, name: str, seed: int, policy: Policy, make_env: Callable[..., Any]) -> Path | None:
        path = self.dir / "videos" / name
        try:
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
        try:
            state.save_checkpoint(self.dir / "checkpoint", step, self._capture(step))
            for _, log in self._replays.values():
                log.forget()
        except OSError as error:
            warn(f"the checkpoint of step {step:,} could not be written ({error.strerror}); the one before it is kept")

    def _capture(self, step: int) -> dict[str, Any]:
        self._flush()
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
                "metrics_bytes": self._metrics.sync(),
            },
            "random": state.random_states(),
            "parts": {name: state.capture(part) for name, part in self._parts.items()},
            "replay": {name: log.append(part) for name, (part, log) in self._replays.items()}
            if self.args.save_replay
            else {},
        }

    def _diverged(self, name: str, value: float) -> None:
        """Leave a snapshot to look at, and end."""
        where = self.dir / "crash"
        try:
            shutil.rmtree(where, ignore_errors=True)
            parts = {part: state.capture(value) for part, value in self._parts.items()}
            state.write_state(where, {"parts": parts, "random": state.random_states(), "step": self._step})
            note = f"a snapshot is in {where}"
        except OSError as error:
            note = f"no snapshot ({error.strerror})"
        self._flush()
        self._finish(f"diverged: {name} is {value}")
        iteration = self._iteration
        self._say(f"error: {name} is {value} in iteration {iteration} (step {self._step:,}); {note}", sys.stderr)
        raise SystemExit(DIVERGED)

    # ------------------------------------------------------------------ models
    def _modules(self) -> dict[str, Any]:
        return {name: part for name, part in self._parts.items() if hasattr(part, "named_parameters")}

    def _write_model(self, name: str, score: float) -> None:
        """All modules among the parts, keys prefixed by the part's name, with step and evaluation as metadata."""
        from safetensors.numpy import save

        arrays: dict[str, np.ndarray] = {}
        for part, module in self._modules().items():
            for key, tensor in module.state_dict().items():
                state.encode(tensor, arrays, f"{part}.{key}")
        about = {"step": str(self._step), "eval/episodic_return": repr(score), "script": self.script.name}
        try:
            state.write_atomically(self.dir / name, save(arrays, metadata=about))
        except OSError as error:
            warn(f"{name} could not be written ({error.strerror}); the one before it is kept")

    def _load_model(self) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = self.dir / "model.safetensors"
        try:
            arrays = load_file(path)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:  # the last: types NumPy has not
            quit_with(f"{path} cannot be read ({error}); the run writes it with its first evaluation")
        for part, module in self._modules().items():
            prefix = f"{part}."
            mine: dict[str, Any] = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
            if (torch := sys.modules.get("torch")) and isinstance(module, torch.nn.Module):
                mine = {k: torch.from_numpy(v) for k, v in mine.items()}
            with fitting(f"the model {path}"):
                module.load_state_dict(mine)

    def _play(self, play: Play, policy: Policy, make_env: Callable[..., Any]) -> None:
        """Evaluate the loaded policy; film or show it where asked."""
        seed = self.args.seed if play.seed is None else play.seed
        seeds = [env_seed(seed, CONFIRM, 2**19 + i) for i in range(play.episodes)]
        env_id = self.args.env_id  # type: ignore[attr-defined]
        with undisturbed():
            if play.render:
                env = make_env(env_id, render_mode="human")
                returns = np.array(watch(env, policy, seeds))
                env.close()
            else:
                returns, _ = play_episodes([make_env(env_id) for _ in seeds], policy, seeds)
            print(f"{env_id}: {returns.mean():.1f} ± {returns.std():.1f} over {len(seeds)} greedy episodes, "
                  f"from {returns.min():.1f} to {returns.max():.1f}")  # fmt: skip
            if play.video and (path := self._film("play.mp4", seeds[0], policy, make_env)):
                print(f"video {path}")

    # ------------------------------------------------------------------ what people see
    def _say(self, text: str, file: Any = None) -> None:
        """One whole line; wipes the progress line first."""
        file = file or sys.stdout
        say(f"\r\033[K{text}" if file.isatty() else text, file)

    def _progress(self, sps: float) -> None:
        """In a terminal one line that renews itself, elsewhere a line every 10 seconds."""
        now, tty = time.perf_counter(), sys.stdout.isatty()
        if now - self._printed < (0.1 if tty else 10.0):
            return
        self._printed = now
        recent = f"{np.mean(self._recent):.1f}" if self._recent else "-"
        evaluation = f"{self._last_eval[1]:.1f}" if self._last_eval[0] >= 0 else "-"
        left = max(0, self._total - self._step) / max(1.0, sps)
        share = f"{100 * self._step / self._total:3.0f} %" if self._total else ""
        line = (
            f"step {self._step:>10,} {share}  return {recent:>8}  evaluation {evaluation:>8}  "
            f"{sps:>9,.0f} steps/s  {_duration(left)} left"
        )
        line = f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}" if tty else line
        say(line, sys.stdout, end="" if tty else "\n")

    def _draw(self) -> None:
        title = f"{self.script.stem} on {getattr(self.args, 'env_id', '')}, seed {self.args.seed}"
        try:
            draw_learning_curve(self.dir / "metrics.jsonl", self.dir / "learning_curve.png", title)
        except OSError as error:
            warn(f"no learning curve: {error.strerror}")

    def _summary(self) -> None:
        _, mean, std = self._last_eval
        videos = sorted((self.dir / "videos").glob("*.mp4"), key=lambda path: path.stat().st_mtime)
        lines = {
            "trained": f"{self._step:,} steps in {_duration(self._wall_time())}",
            "evaluation": f"{mean:.1f} ± {std:.1f} over {self.args.eval_episodes} episodes, best {self._best:.1f}",
            "curve": self.dir / "learning_curve.png",
            "video": videos[-1] if videos else "none (--capture-video)",
            "model": self.dir / "model.safetensors" if self.args.save_model else "none (--save-model)",
            "play it": f"{_solo()} play {shlex.quote(str(self.dir))}",
        }
        self._say("")
        for name, value in lines.items():
            self._say(f"{name:<11} {value}")

    def _set_status(self, status: str) -> None:
        self._status = status
        record = {"status": status, "pid": os.getpid(), "global_step": self._step, "wall_time": self._wall_time()}
        if self._last_eval[0] >= 0:
            record["eval/episodic_return"] = self._last_eval[1]
        try:
            state.write_atomically(self.dir / "status.json", json.dumps(record).encode())
        except OSError as error:
            warn(f"status.json could not be written ({error.strerror})")

    def _finish(self, status: str) -> None:
        self._flush()
        for tracker in self._trackers:
            tracker.close()
        for env in self._eval_envs:
            env.close()
        self._set_status(status)
        self._lock.close()

    def _at_exit(self) -> None:
        if self._status == "running":
            self._flush()
            self._set_status("failed")


# ---------------------------------------------------------------------- small facts
def _obs_kind(space: Any) -> str:
    """ "vector", "image", "dict", ...: the kind of an observation space, in the words of the headers."""
    if type(space).__name__ == "Box":
        return "image" if space.dtype == np.uint8 and len(space.shape) == 3 else "vector"
    return type(space).__name__.lower()


def _action_kind(space: Any) -> str:
    """ "discrete", "continuous", "multidiscrete", ...: the kind of an action space, in the words of the headers."""
    if type(space).__name__ == "Box":
        return "continuous" if len(space.shape) == 1 else f"{len(space.shape)}-dimensional continuous"
    if type(space).__name__ == "Discrete" and space.start != 0:
        return f"discrete (from {space.start})"
    return type(space).__name__.lower()


def _not_for(kind: str) -> str:
    """`"; use FILE"` where the running script's header names a file for this kind, else an empty string."""
    from solorl.catalog import parse_header

    try:
        other = parse_header(script_path()).not_for.get(kind)
    except UsageError:  # somebody's own script need not have our header
        other = None
    return f"; use {other}" if other else ""


def _make_unique(path: Path) -> Path:
    """Make the folder; where it exists already, one with a counter behind its name."""
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
    """The command `solo` as it can be typed here, be it on the PATH or only beside the running Python."""
    beside = Path(sys.executable).parent / "solo"
    if shutil.which("solo") or not beside.exists():
        return "solo"
    return shlex.quote(_near(beside))


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit of the repository around `folder` and whether its files differ from it; None outside a repository."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_model() -> str:
    """The name of the processor with its numbers: a virtual machine may show the same name for different ones."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
        about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
        return f"{about['model name']}, family {about['cpu family']}, model {about['model']}"
    except (OSError, KeyError):
        return platform.processor()


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
