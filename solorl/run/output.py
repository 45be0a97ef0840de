"""What a run leaves: evaluations, checkpoints, models, pictures, and the words at its end."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solorl.args.arguments import RunArgs
from solorl.compute.device import EVALUATE, env_seed
from solorl.envs.surroundings import undisturbed
from solorl.errors import in_one_sentence
from solorl.files import near
from solorl.run.ending import Ending
from solorl.run.evaluation import SCORE, Also, MakeEnv, Policy
from solorl.run.folder import RunFolder
from solorl.run.pictures import draw_learning_curve, film_to
from solorl.run.saving import Checkpoints
from solorl.run.summary import how_to_go_on, summary
from solorl.run.upload import solo, upload
from solorl.runfolder import CHECKPOINTS, LAST_MODEL, METRICS, MODEL, PICTURE
from solorl.terminal import paint, scores, warn

UNSAVED = 4  # exit code of a run that has come to its end, but could not write all of it


class Output:
    """Evaluates, saves and says where everything is; the verbs of a run say when."""

    def __init__(self, args: RunArgs, script: Path, folder: RunFolder, checkpoints: Checkpoints, ending: Ending):
        self.args, self.script, self.folder, self.checkpoints, self.ending = args, script, folder, checkpoints, ending
        self.meter, self.evaluator, self.say = ending.meter, ending.evaluator, ending.say
        self.env_id = str(getattr(args, "env_id", ""))

    def evaluate(self, policy: Policy, make_env: MakeEnv, also: Also = None, played: Any = None) -> None:
        """See `Run.evaluate`."""
        evaluator, ending, step, run_dir = self.evaluator, self.ending, self.meter.step, self.folder.path
        with self.meter.paused(), ending.where_diverged(), in_one_sentence(), undisturbed():
            ending.check_finite()
            row = evaluator.evaluate(step, policy, make_env, also, played)
            self.meter.add_row(step, row)
            ending.write_rows(row)
            score = " ± ".join(scores(*evaluator.last[1:]))
            self.say(paint(f"step {step:>10,}  evaluation {score} over {evaluator.episodes} episodes", "cyan"))
            if evaluator.improved and self.args.save_model:
                self.save_model(MODEL)
            if (again := evaluator.confirm(policy, make_env)) is not None:
                reached = evaluator.reaches(again)
                ending.why = "target" if reached else ending.why
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
        self.ending.check_finite()
        step = self.meter.step
        with self.folder.writing(CHECKPOINTS, f"the checkpoint of step {step:,}", self.checkpoints.are_there()):
            counters = self.meter.counters() | self.evaluator.counters()
            counters["metrics_bytes"] = self.folder.metrics.sync() if self.folder.metrics else 0
            self.checkpoints.save(step, counters, self.args.save_replay, others)
            self.ending.set_status(self.folder.status)

    def save_model(self, name: str) -> None:
        """Write the models into one file; a warning where that fails."""
        about = {"step": str(self.meter.step), SCORE: repr(self.evaluator.last[1]), "script": self.script.name}
        with self.folder.writing(name, kept=(self.folder.path / name).exists()):
            self.checkpoints.save_model(name, about)

    # ------------------------------------------------------------------ the end
    def end(self, policy: Policy, make_env: MakeEnv) -> None:
        """The end of a training that was not interrupted."""
        if self.evaluator.last[0] != self.meter.step:
            self.evaluate(policy, make_env)
        if self.args.save_model:
            self.save_model(LAST_MODEL)
        self.ending.finish("stopped" if self.ending.why == "stop" else "finished")
        self._draw()
        mean, std, best = scores(*self.evaluator.last[1:], self.evaluator.best)
        score = f"{mean} ± {std} over {self.evaluator.episodes} episodes, best {best}"
        words = (self.folder.path, self.meter.step, self.meter.wall_time(), score, self.args.save_model)
        for line in summary(*words):
            self.say(line)
        self._require_saved()
        if self.args.upload_model:
            upload(self.folder.path, self.args, self.say)

    def stop(self) -> None:
        """The end after a signal: how to continue. Ctrl+C then leaves with exit code 130."""
        self.ending.finish("stopped")
        self._require_saved()
        number = self.ending.signal
        is_lost = self.checkpoints.replays and not self.args.save_replay
        lost = " (without its replay buffer: --save-replay)" if is_lost else ""
        how = how_to_go_on(self.script, self.folder.path, self.ending.ranks.world_size)
        self.say(f"{signal.Signals(number).name}: saved at step {self.meter.step:,}{lost}; {how}")
        self._draw()
        if number == signal.SIGINT:
            raise SystemExit(130)

    def _draw(self) -> None:
        """Draw the learning curve; a warning where it cannot be written."""
        title = f"{self.script.stem} on {self.env_id}, seed {self.args.seed}"
        try:
            draw_learning_curve(self.folder.path / METRICS, self.folder.path / PICTURE, title)
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
