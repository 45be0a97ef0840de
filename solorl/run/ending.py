"""What a run leaves, and how it ends: signals, a file named `stop`, a reached target, numbers that are not finite."""

import atexit
import math
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from solorl import signals
from solorl.args.arguments import RunArgs
from solorl.checkpoints import env_state
from solorl.compute.device import EVALUATE, env_seed
from solorl.compute.ranks import Ranks
from solorl.envs.guest import wrong
from solorl.envs.surroundings import undisturbed
from solorl.errors import in_one_sentence
from solorl.files import near
from solorl.run.evaluation import SCORE, Also, Evaluator, MakeEnv, Policy
from solorl.run.folder import RunFolder
from solorl.run.hub import solo, upload
from solorl.run.meter import RETURN, Diverged, Meter, check_finite
from solorl.run.pictures import draw_learning_curve, film_to
from solorl.run.saving import Checkpoints
from solorl.runfolder import CHECKPOINTS, LAST_MODEL, METRICS, MODEL, PICTURE, STATUS, STOP, checkpoints, write_status
from solorl.scripts import as_typed
from solorl.terminal import duration, paint, say, scores, warn

# Exit codes: of a run that met a NaN or an infinite number, and of one that has come to its end, but could not write
# all of it.
DIVERGED, UNSAVED = 3, 4


class Voice:
    """What a run says. A `quiet` one says its errors only, because another run in this process speaks for it."""

    def __init__(self, quiet: bool = False):
        self.quiet = quiet

    def __call__(self, text: str, file: Any = None) -> None:
        """One whole line; wipes the progress line first. A quiet run writes to standard error only."""
        if not self.quiet or file is not None:
            say(text, file or sys.stdout)


@dataclass(eq=False)
class Ending:
    """What a run leaves, and why and how it ends; the verbs of a run say when. It knows the other parts of the run:
    what they count, and where that is written."""

    args: RunArgs
    script: Path
    env_id: str
    folder: RunFolder
    meter: Meter
    evaluator: Evaluator
    checkpoints: Checkpoints
    ranks: Ranks
    say: Voice
    why = ""  # "signal", "stop" or "target"; empty: the run continues
    signal = 0  # the signal that has come
    looked = -math.inf  # when it has looked for a file named `stop`, in seconds
    _before: dict[int, Any] = field(default_factory=dict)  # where signals went before the first loop

    # ------------------------------------------------------------------ status and rows
    def set_status(self, status: str) -> None:
        """Write status.json."""
        score = self.evaluator.score
        facts: dict[str, Any] = {"pid": os.getpid(), "global_step": self.meter.step}
        facts |= {"wall_time": self.meter.wall_time(), "checkpoint": self.checkpoints.newest}
        self.folder.status = status
        with self.folder.writing(STATUS):
            write_status(self.folder.path, status, facts | ({} if score is None else {SCORE: score}))

    def begin(self) -> None:
        """The run folder is open: from now on it is left in order, however this process ends."""
        self.set_status("running")
        atexit.register(self.abandon, "failed")

    def abandon(self, status: str) -> None:
        """Leave the run folder in order where the process ends before `finish`."""
        if self.folder.status == "running":
            self.folder.write_rows(self.meter.take_rows())
            self.set_status(status)
            if self.meter.trained and status == "failed":
                warn(f"{near(self.folder.path)}: the script ended without run.close, so there is no last model")

    def finish(self, status: str) -> None:
        """The end of the run: nothing is written to its folder any more, except pictures and models."""
        self.folder.write_rows(self.meter.take_rows())
        if status == "finished" and self.folder.metrics and self.folder.metrics.problem:
            status = "failed"  # what is evaluated from the folder lacks rows
        for tracker in self.folder.trackers:
            tracker.close()
        self.set_status(status)
        atexit.unregister(self.abandon)  # which would keep all of this run
        self.folder.unlock()
        self.evaluator.close()

    def write_rows(self, tracked: dict[str, float] | None = None) -> None:
        """Write the rows that wait, and `tracked` to the trackers. Raises Diverged where a row is not finite."""
        rows = self.meter.take_rows()
        self.folder.write_rows(rows, self.meter.step, tracked)
        check_finite(*rows)

    def check_finite(self) -> None:
        """Diverged where something is NaN or infinite, before it replaces what is good."""
        self.write_rows()
        self.checkpoints.check_finite({RETURN: self.meter.returns})

    # ------------------------------------------------------------------ signals
    def listen(self, again: bool = False) -> None:
        """Hear signals from now on; `again`: only where there was a loop that heard them."""
        if self._before or not again:
            self._before = signals.listen(self.hear, signals.ending()) | self._before

    def deaf(self) -> None:
        """Signals go where they went before."""
        signals.restore(self._before)

    def release(self) -> None:
        """The run is over: signals go where they went before, but not after one in a process that ends."""
        if not self.signal or signals.in_a_shell():
            self.deaf()

    def hear(self, number: int, frame: Any) -> None:
        """The first signal ends the run after the next save; the second ends at once."""
        if self.signal:
            of_torchrun = self.signal != number and self.ranks.world_size > 1  # it sends SIGTERM after a Ctrl+C
            if of_torchrun or signals.below_a_worker():
                return
            self._end_at_once(number)
        self.signal = number
        doing = "all is saved, evaluating and drawing" if self.meter.trained else "finishing this iteration and saving"
        self.say(f"{signal.Signals(number).name}: {doing}; once more ends at once")

    def _end_at_once(self, number: int) -> NoReturn:
        """Leave without any further code of the script's, but its variables to a shell (`python -i`)."""
        self.abandon("stopped" if self.meter.trained else "failed")
        newest = self.checkpoints.newest
        saved = "before its first checkpoint" if newest is None else f"saved up to step {newest:,}"
        self.say(f"{signal.Signals(number).name}: the run ends at once, {saved}")
        if number == signal.SIGINT and signals.in_a_shell():
            raise KeyboardInterrupt
        os._exit(128 + number)

    # ------------------------------------------------------------------ reasons to end
    def look(self) -> None:
        """Note a signal, or a file named `stop`; several ranks agree."""
        self.why = self.why or ("signal" if self.signal else "stop" if self._stop_asked() else "")
        if self.ranks.world_size > 1:
            said = self.ranks.everyone((self.why, self.signal))
            self.why = next((why for why, _ in said if why), "")
            self.signal = self.signal or next((number for _, number in said if number), 0)  # one may have come since

    def _stop_asked(self) -> bool:
        now = time.perf_counter()
        if now - self.looked < 0.5 and not self.meter.is_last:  # a look at the disk is too dear for every step
            return False
        self.looked, file = now, self.folder.path / STOP
        if self.ranks.rank > 0 or not file.exists():
            return False
        file.unlink(missing_ok=True)
        self.say(f"the file {near(file)} asks to end here")
        return True

    @contextmanager
    def where_diverged(self) -> Iterator[None]:
        """What diverges inside ends the run: a snapshot to look at, a sentence, and exit code 3."""
        try:
            yield
        except Diverged as error:
            if self.ranks.rank > 0:
                self.ranks.wait_for_the_end()  # rank 0 has found the same and writes a snapshot
                raise SystemExit(DIVERGED) from None
            step, iteration = self.meter.step, self.meter.iteration
            try:
                self.folder.path.stat()  # OSError where it was moved or removed: no part of it must be made again
                note = f"a snapshot is in {self.checkpoints.save_crash(step)}"
            except OSError as problem:
                note = f"no snapshot ({problem.strerror})"
            self.finish(f"diverged: {error}")
            found = map(wrong, filter(env_state.is_vector_env, self.checkpoints.parts.values()))
            cause = next((f": {what}" for what in found if what), "")
            what = f"{paint('error:', 'red', sys.stderr)} {error} in iteration {iteration} (step {step:,}){cause}"
            self.say(f"{what}; {note}", sys.stderr)
            raise SystemExit(DIVERGED) from None

    # ------------------------------------------------------------------ what a run leaves
    def evaluate(self, policy: Policy, make_env: MakeEnv, also: Also = None, played: Any = None) -> None:
        """See `Run.evaluate`."""
        evaluator, step, run_dir = self.evaluator, self.meter.step, self.folder.path
        with self.meter.paused(), self.where_diverged(), in_one_sentence(), undisturbed():
            self.check_finite()
            row = evaluator.evaluate(step, policy, make_env, also, played)
            self.meter.add_row(step, row)
            self.write_rows(row)
            score = " ± ".join(scores(*evaluator.last[1:]))
            self.say(paint(f"step {step:>10,}  evaluation {score} over {evaluator.episodes} episodes", "cyan"))
            if evaluator.improved and self.args.save_model:
                self.save_model(MODEL)
            if (again := evaluator.confirm(policy, make_env)) is not None:
                reached = evaluator.reaches(again)
                self.why = "target" if reached else self.why
                line = f"target {self.args.target_return:g} reached; on fresh seeds {scores(again)[0]}: "
                done, colour = ("done", "green") if reached else ("continuing", "cyan")
                self.say(paint(line + done, colour))
            if self.args.capture_video:
                seed = env_seed(self.args.seed, EVALUATE, 0)
                film_to(run_dir, f"step_{step}.mp4", seed, policy, make_env, self.env_id)
            if self.args.plot:
                drawn, why = solo("plot", str(run_dir), "--out", str(run_dir / "curve.png"))
                if not drawn:
                    warn(f"no curve.png: {why}")

    def checkpoint(self, others: Sequence[Any]) -> None:
        """Write a checkpoint, unless something is not finite; `others`: what the other ranks have."""
        self.check_finite()
        step = self.meter.step
        with self.folder.writing(CHECKPOINTS, f"the checkpoint of step {step:,}", bool(checkpoints(self.folder.path))):
            self.folder.path.stat()  # as above
            counters = self.meter.counters() | self.evaluator.counters()
            counters["metrics_bytes"] = self.folder.metrics.sync() if self.folder.metrics else 0
            counters |= {"reached": self.args.target_return} if self.why == "target" else {}
            self.checkpoints.save(step, counters, self.args.save_replay, others)
            self.set_status(self.folder.status)

    def save_model(self, name: str) -> None:
        """Write the models into one file; a warning where that fails."""
        about = {"step": str(self.meter.step), SCORE: repr(self.evaluator.last[1]), "script": self.script.name}
        with self.folder.writing(name, kept=(self.folder.path / name).exists()):
            self.checkpoints.save_model(name, about)

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue from these counters: a run that had reached its target ends."""
        self.why = "target" if saved.get("reached", "") == self.args.target_return else ""

    # ------------------------------------------------------------------ the end
    def end(self, policy: Policy, make_env: MakeEnv) -> None:
        """The end of a training that was not interrupted."""
        if self.evaluator.last[0] != self.meter.step:
            self.evaluate(policy, make_env)
        if self.args.save_model:
            self.save_model(LAST_MODEL)
        self.finish("stopped" if self.why == "stop" else "finished")
        self._draw()
        mean, std, best = scores(*self.evaluator.last[1:], self.evaluator.best)
        score = f"{mean} ± {std} over {self.evaluator.episodes} episodes, best {best}"
        for line in summary(self.folder.path, self.meter.step, self.meter.wall_time(), score, self.args.save_model):
            self.say(line)
        self._require_saved()
        if self.args.upload_model:
            upload(self.folder.path, self.args, self.say)

    def stop(self) -> None:
        """The end after a signal: how to continue. Ctrl+C then leaves with exit code 130."""
        self.finish("stopped")
        self._require_saved()
        is_lost = self.checkpoints.replays and not self.args.save_replay
        lost = " (without its replay buffer: --save-replay)" if is_lost else ""
        how = how_to_go_on(self.script, self.folder.path, self.ranks.world_size)
        self.say(f"{signal.Signals(self.signal).name}: saved at step {self.meter.step:,}{lost}; {how}")
        self._draw()
        if self.signal == signal.SIGINT:
            raise SystemExit(130)

    def _draw(self) -> None:
        """Draw the learning curve; a warning where it cannot be written."""
        title, folder = f"{self.script.stem} on {self.env_id}, seed {self.args.seed}", self.folder.path
        try:
            draw_learning_curve(folder / METRICS, folder / PICTURE, title, self.args.eval_episodes)
        except OSError as error:
            warn(f"no learning curve: {error.strerror}")

    def _require_saved(self) -> None:
        """One sentence and exit code 4 where something that this run had to leave in its folder is not there."""
        if not (missing := self.folder.missing()):
            return
        where = near(self.folder.path)
        what = ", ".join(f"{name} ({why})" for name, why in missing.items())
        what = f"the final files could not be written to {where}: {what}"
        if not self.folder.path.is_dir():
            what = f"the final files could not be written: {where} has been moved or removed"
        self.say(f"error: the training has come to step {self.meter.step:,}, but {what}", sys.stderr)
        raise SystemExit(UNSAVED)


# ---------------------------------------------------------------------- what is said in the end
def how_to_go_on(script: Path, run_dir: Path, world_size: int = 1) -> str:
    """The command that resumes a run with this number of ranks, as it can be typed here."""
    ranks = f" --nproc {world_size}" if world_size > 1 else ""
    return f"continue with: {_solo()} train {as_typed(script)} --resume {shlex.quote(near(run_dir))}{ranks}"


def summary(run_dir: Path, step: int, seconds: float, evaluation: str, save_model: bool) -> list[str]:
    """Lines that say how the training went and where its curve, video and model are."""
    videos = sorted((run_dir / "videos").glob("*.mp4"), key=lambda path: path.stat().st_mtime)
    curve, model = run_dir / PICTURE, run_dir / MODEL
    facts = {
        "trained": f"{step:,} steps in {duration(seconds)}",
        "evaluation": evaluation,
        "curve": near(curve) if curve.exists() else "none",
        "video": near(videos[-1]) if videos else "none (solo play --video makes one)",
        "model": near(model) if model.exists() else "none" if save_model else "none (--save-model)",
    }
    if model.exists():
        facts["play it"] = f"{_solo()} play {shlex.quote(near(run_dir))}"
    return ["", *(f"{paint(name.ljust(11), 'bold')} {value}" for name, value in facts.items())]


def _solo() -> str:
    """The command `solo` as it can be typed here, be it on the PATH or only next to the running Python."""
    own = Path(sys.executable).parent / "solo"
    return "solo" if shutil.which("solo") or not own.exists() else shlex.quote(near(own))
