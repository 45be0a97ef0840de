"""The course of a run: how it begins, hears signals, meets numbers that are not finite, and ends."""

import atexit
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from solorl import memory, signals
from solorl.args.arguments import RunArgs, script_path
from solorl.checkpoints import env_state
from solorl.compute.device import choose_device, device_words, seed_all
from solorl.compute.processes import Processes
from solorl.compute.ranks import Ranks, from_environment, local_rank
from solorl.envs.async_envs import AsyncEnvs
from solorl.envs.guest import refuse_statistics, wrong
from solorl.envs.returns import teams_of
from solorl.errors import UsageError, in_one_sentence, quit_with
from solorl.files import near
from solorl.run.evaluation import Evaluator
from solorl.run.folder import RunFolder, new_path
from solorl.run.load import play_wanted
from solorl.run.meter import Diverged, Meter, check_finite
from solorl.run.saving import Checkpoints
from solorl.run.teacher import Teacher
from solorl.run.trackers import Safe, check_wandb, trackers_of
from solorl.run.upload import check_upload
from solorl.terminal import Progress, paint, say, wiped

DIVERGED = 3  # exit code of a run that met a NaN or an infinite number


def require(condition: Any, sentence: str) -> None:
    """End with `sentence` and exit code 2 unless `condition` holds."""
    if not condition:
        quit_with(sentence)


class Course:
    """A run without its verbs. Its parts work without it and raise; it turns what they raise into a sentence and an
    exit code."""

    def __init__(self, args: RunArgs, *, parallel: bool = False, device: Any = None, quiet: bool = False):
        self.args, self.script = args, script_path().absolute()  # an environment may change the current folder
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
        seed_all(args)
        self.ranks = Ranks(self.rank, self.world_size)
        self.processes = Processes(self._say)
        self.folder = RunFolder((Path(args.resume) if args.resume else new_path(args, self.script)).absolute())
        self.meter, self.evaluator = Meter(), Evaluator(args)
        self.checkpoints = Checkpoints(self.folder.path, self.ranks)
        self.restarted: list[int] = []  # environments whose episodes `resume` could not continue and started again
        self.step = 0  # environment steps at the last call of log, evaluate or save
        self.phase, self.iteration, self.is_last = -1, 0, False  # the number of the loop, and of its iteration
        self.ending, self.signal = "", 0  # why the run ends, and the signal that has come
        self.trained = False  # the last loop is over: all that was learned is saved
        self._before: dict[int, Any] = {}  # where signals went before the first loop
        self.taught: Teacher | None = None
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

    # ------------------------------------------------------------------ start
    def fit(self, parts: Mapping[str, Any], models: Mapping[str, Any] | None = None) -> int:
        """The first half of `resume`, which writes nothing. `models`: see `Checkpoints`."""
        apart = self.play or any(isinstance(part, AsyncEnvs) for part in parts.values())
        other = f"--async-envs: {self.script.name} steps its environments in another way"
        require(apart or not self.args.async_envs, other)
        self.checkpoints.name(parts, models)
        for envs in filter(env_state.is_vector_env, parts.values()):
            with in_one_sentence():
                refuse_statistics(envs, getattr(self.args, "env_id", ""))
            if teams := teams_of(envs):
                self.meter.teams, self.meter.agents = teams, list(envs.agents)
        with in_one_sentence():
            if self.play:
                if self.play.model:
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

    def begin(self, start: int) -> None:
        """The second half of `resume`, which opens the run folder; `start` is what the first half has returned."""
        if self.rank > 0:
            return
        saved = self.checkpoints.resumed
        with in_one_sentence():
            if not self.args.resume:
                self.folder.make()
            self.checkpoints.open(self.dir)
            self.folder.open(self.args, self.script, self.device, saved)
            if self.taught is not None:
                self.taught.keep(self.dir)
        self._trackers = trackers_of(self.args, self.dir, saved["step"] + 1 if saved else None)
        self._set_status("running")
        atexit.register(self.abandon, "failed")
        self._say(f"run folder {near(self.dir)}")
        self._say(device_words(self.device, self.args.threads))
        if self.taught is not None:
            self._say(f"teacher {self.taught}")
        size = sum(array.nbytes for replay in self.checkpoints.replays.values() for array in replay.arrays.values())
        if size > 1e9 and self.args.save_replay:
            self._say(f"the replay buffer will take up to {size / 1e9:.1f} GB in {near(self.dir / 'replay')}")
        if saved:
            self._say(f"resumed at step {self.step:,} (iteration {start})")
        elif self.args.resume:
            self._say(f"no checkpoint in {near(self.dir)} yet: starting from the beginning")
            if (self.dir / "model.safetensors").exists():
                (self.dir / "model.safetensors").replace(self.dir / "model_before.safetensors")

    def _start_together(self, start: int, parts: Mapping[str, Any]) -> None:
        """What is between the two halves with several ranks."""
        require(not self.checkpoints.replays, "replay buffers are not supported with several ranks")
        starts, restarted = zip(*self.ranks.everyone((start, self.restarted)), strict=True)
        require(len(set(starts)) == 1, f"the ranks do not see the same run folder: they start from {starts}")
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
        require(self.ending or not self.trained, "a loop came after the last one: those before it say last=False")
        fits = self.phase >= stopped if last else "phase" in saved or not saved
        what = f"the run in {near(self.dir)} was started by another {self.script.name}, with another number of loops"
        require(fits, f"{what}: resume it with {near(self.dir / self.script.name)}, or start a new run")
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

    def hear(self, number: int, frame: Any) -> None:
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
        self.abandon("stopped" if self.trained else "failed")
        newest = self.checkpoints.newest
        saved = "before its first checkpoint" if newest is None else f"saved up to step {newest:,}"
        self._say(f"{signal.Signals(number).name}: the run ends at once, {saved}")
        if number == signal.SIGINT and signals.in_a_shell():
            raise KeyboardInterrupt
        self.ranks.leave(128 + number)
        os._exit(128 + number)

    def abandon(self, status: str) -> None:
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
        self._say(f"the file {near(self.dir / 'stop')} asks to end here")
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
            found = map(wrong, filter(env_state.is_vector_env, self.checkpoints.parts.values()))
            cause = next((f": {what}" for what in found if what), "")
            what = f"{paint('error:', 'red', sys.stderr)} {error} in iteration {self.iteration} (step {self.step:,})"
            self._say(f"{what}{cause}; {note}", sys.stderr)
            self.ranks.leave(DIVERGED)
            raise SystemExit(DIVERGED) from None

    def _finish(self, status: str) -> None:
        self.folder.write_rows(self.meter.take_rows())
        if status == "finished" and self.folder.metrics.problem:
            status = "failed"  # what is evaluated from the folder lacks rows
        for tracker in self._trackers:
            tracker.close()
        self.evaluator.close()
        self._set_status(status)
        atexit.unregister(self.abandon)  # which would keep all of this run
        self.folder.unlock()

    def _set_status(self, status: str) -> None:
        score = self.evaluator.score
        facts: dict[str, Any] = {"pid": os.getpid(), "global_step": self.step, "wall_time": self.meter.wall_time()}
        facts |= {"checkpoint": self.checkpoints.newest} | ({} if score is None else {"eval/episodic_return": score})
        self.folder.write_status(status, facts)

    def _say(self, text: str, file: Any = None) -> None:
        """One whole line; wipes the progress line first. A quiet run writes to standard error only."""
        if not self.quiet or file is not None:
            file = file or sys.stdout
            say(wiped(text, file), file)
