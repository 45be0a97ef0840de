"""What a run leaves: evaluations, checkpoints, models, pictures, and the words at its end."""

import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from solorl.compute.device import EVALUATE, env_seed
from solorl.envs.surroundings import undisturbed
from solorl.errors import in_one_sentence
from solorl.files import near
from solorl.run.course import Course, require
from solorl.run.evaluation import OPPONENTS, Policy
from solorl.run.pictures import draw_learning_curve, film_to
from solorl.run.summary import how_to_go_on, summary
from solorl.run.upload import solo, upload
from solorl.terminal import paint, scores, warn

UNSAVED = 4  # exit code of a run that has come to its end, but could not write all of it


class Products(Course):
    """A run that evaluates, saves and comes to its end; its verbs say when."""

    def _choose(self, opponents: Sequence[str]) -> None:
        """Note the opponents of evaluations, which are the same in all of them."""
        now = tuple(opponents)
        require(OPPONENTS.issuperset(now), f"opponents are {now}; allowed are random and older")
        before, self.opponents = self.opponents, now
        require(before in (None, now), f"run.evaluate has the opponents {before}, run.close has {now}")

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
            score = f"evaluation {' ± '.join(scores(mean, std))} over {evaluator.episodes} episodes"
            self._say(paint(f"step {self.step:>10,}  {score}", "cyan"))
            if evaluator.improved and self.args.save_model:
                self._save_model("model.safetensors")
            if (again := evaluator.confirm(policy, make_env, opponent)) is not None:
                reached = evaluator.reaches(again)
                self.ending = "target" if reached else self.ending
                line = f"target {self.args.target_return:g} reached; on fresh seeds {scores(again)[0]}: "
                done, colour = ("done", "green") if reached else ("continuing", "cyan")
                self._say(paint(line + done, colour))
            if self.args.capture_video:
                seed, env_id = env_seed(self.args.seed, EVALUATE, 0), evaluator.args.env_id
                film_to(self.folder, f"step_{self.step}.mp4", seed, policy, make_env, env_id, opponent)
            if self.args.plot:
                drawn, why = solo("plot", str(self.dir), "--out", str(self.dir / "curve.png"))
                if not drawn:
                    warn(f"no curve.png: {why}")

    def _checkpoint(self, of_ranks: Sequence[Any]) -> None:
        self._check_finite()
        with self.folder.writing("checkpoint", f"the checkpoint of step {self.step:,}", self.checkpoints.are_there()):
            self.folder.require()
            counters: dict[str, Any] = {"phase": self.phase, "iteration": self.iteration + 1, "step": self.step}
            counters |= self.meter.counters() | self.evaluator.counters()
            counters["metrics_bytes"] = self.folder.metrics.sync()
            self.checkpoints.save(self.step, counters, self.args.save_replay, of_ranks[1:])
            self._set_status(self.folder.status)

    def _save_model(self, name: str) -> None:
        score = repr(self.evaluator.last[1])
        about = {"step": str(self.step), "eval/episodic_return": score, "script": self.script.name}
        with self.folder.writing(name, kept=(self.dir / name).exists()):
            self.checkpoints.save_model(name, about)

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
        mean, std, best = scores(*self.evaluator.last[1:], self.evaluator.best)
        score = f"{mean} ± {std} over {self.evaluator.episodes} episodes, best {best}"
        for line in summary(self.dir, self.step, self.meter.wall_time(), score, self.args.save_model):
            self._say(line)
        self._require_saved()
        if self.args.upload_model:
            self._upload()

    def _upload(self) -> None:
        """Publish the run; where that fails, one warning says so, and the run is what it would be without."""
        done, said = upload(self.dir, self.args)
        if done:
            self._say(said)
        else:
            warn(f"the model was not uploaded: {said}; `solo push {shlex.quote(near(self.dir))}` does it later")

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
        what = f"the final files could not be written to {near(self.dir)}: {what}"
        if not self.dir.is_dir():
            what = f"the final files could not be written: {near(self.dir)} has been moved or removed"
        self._say(f"error: the training has come to step {self.step:,}, but {what}", sys.stderr)
        raise SystemExit(UNSAVED)
