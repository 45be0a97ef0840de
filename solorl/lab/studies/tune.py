"""One set of hyper-parameters over several environments and seeds, found by Optuna with the engines of `solo bench`.

The score of a trial: each run's last evaluation is normalised by its environment's target scores (low is 0, high is 1);
the mean over environments is one number per seed, the median (or mean) over seeds is the trial's.

All trials are in a journal file, so that the same command continues after a kill and several commands share the work.
"""

import contextlib
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from solorl import signals
from solorl.errors import UsageError
from solorl.lab.studies.elsewhere import Elsewhere
from solorl.lab.studies.engines import Submission
from solorl.lab.studies.engines.workers import LocalCluster
from solorl.lab.studies.fleet import retry, standing
from solorl.lab.studies.found import newest
from solorl.lab.studies.journal import completed, counted, is_owned, states, this_command
from solorl.lab.studies.lease import Lease
from solorl.lab.studies.plan import Flags, Script, Task, as_flag, merge
from solorl.lab.studies.resources import Resources
from solorl.lab.studies.space import Space
from solorl.lab.studies.storage import refusal
from solorl.lab.studies.study import Study
from solorl.lab.studies.task import words
from solorl.runfolder import read_rows

SEED_STEPS = 10_000  # pruning steps of one seed: its evaluations 1, 2, ...; the last step is the score so far
LOOK = 1.0  # seconds between two looks at the learning curves
TICK = 0.05  # seconds between two looks at the runs
METRIC = "eval/episodic_return"


# ---------------------------------------------------------------------- what is searched for
@dataclass(frozen=True)
class Search:
    """All that makes two trials comparable."""

    script: Script
    env_ids: tuple[str, ...]
    targets: Mapping[str, tuple[float, float]]  # environment -> the scores that count as 0 and as 1
    seeds: tuple[int, ...]
    space: Space
    flags: Flags = field(default_factory=dict)  # given to every run
    aggregate: str = "median"  # median | mean, over seeds
    metric: str = METRIC
    resources: Resources = field(default_factory=Resources)  # of each run, for engines that ask for them

    def about(self) -> dict[str, Any]:
        """What must be equal for a study to continue, as JSON."""
        return {
            "script": f"{self.script.path.name} {self.script.sha256[:12]}",
            "--env-ids": list(self.env_ids),
            "--target-scores": {env_id: list(bounds) for env_id, bounds in sorted(self.targets.items())},
            "--num-seeds": list(self.seeds),
            "space": {name: repr(choice) for name, choice in sorted(self.space.items())},
            "flags": json.loads(json.dumps(sorted(self.flags.items()))),
            "--aggregate": self.aggregate,
            "--metric": self.metric,
        }

    def params(self, trial: Any) -> dict[str, Any]:
        """The values of a trial."""
        return {name: choice.suggest(trial, name) for name, choice in self.space.items()}

    def tasks(self, params: Mapping[str, Any], seed: int) -> list[Task]:
        """The runs of one seed of a trial: every parameter is a flag of each."""
        return [
            Task(self.script, env_id, seed, self.all_flags(params), resources=self.resources) for env_id in self.env_ids
        ]

    def all_flags(self, params: Mapping[str, Any]) -> Flags:
        """All flags of a run with these parameters."""
        return merge(self.flags, *(as_flag(name, value) for name, value in params.items()))

    def normalised(self, env_id: str, score: float) -> float:
        """A score on the scale of its environment's targets; as it is where there are none."""
        low, high = self.targets.get(env_id, (0.0, 1.0))
        return (score - low) / (high - low)

    def value(self, per_seed: Sequence[float]) -> float:
        """The score of a trial from those of its seeds."""
        return statistics.median(per_seed) if self.aggregate == "median" else statistics.fmean(per_seed)


def final_score(run_dir: Path | None, metric: str) -> float | None:
    """The last evaluation of a run, or the mean of its last 50 values of another metric; None where there is none."""
    values = Curve(metric).read(run_dir)
    if values:
        return values[-1] if metric == METRIC else statistics.fmean(values[-50:])
    training = Curve("charts/episodic_return").read(run_dir)[-50:] if metric == METRIC else []
    return statistics.fmean(training) if training else None


class Curve:
    """The values of one metric in a metrics.jsonl that grows, and is cut back when its run is resumed."""

    def __init__(self, metric: str):
        self.metric, self.values = metric, list[float]()
        self._path, self._offset = Path(), 0

    def read(self, run_dir: Path | None) -> list[float]:
        """All values so far; reads only what is new."""
        path = run_dir / "metrics.jsonl" if run_dir else self._path
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            if path != self._path or size < self._offset:
                self._path, self._offset, self.values = path, 0, []
            rows, self._offset = read_rows(path, self._offset, self.metric)
            self.values += [float(row[self.metric]) for row in rows]
        return self.values


# ---------------------------------------------------------------------- the search
Workers = LocalCluster | Elsewhere


@dataclass
class Trial:
    """A trial at work."""

    asked: Any  # Optuna's trial
    params: dict[str, Any]
    seeds: list[int]  # still to run, the first one now
    waiting: list[Task] = field(default_factory=list)  # of this seed, not yet started
    scores: dict[str, float] = field(default_factory=dict)  # of this seed: environment -> normalised score
    raw: dict[str, list[float]] = field(default_factory=dict)  # environment -> score per seed
    per_seed: list[float] = field(default_factory=list)
    curves: dict[str, Curve] = field(default_factory=dict)  # of this seed, by environment
    reported: int = 0  # evaluations of this seed told to the pruner
    end: str = ""  # pruned | failed | interrupted: nothing of it is started any more
    reason: str = ""


class Tuner:
    """Asks Optuna for trials and does their runs, several at once, until there are as many trials as there should be.

    The runs are tasks of the study `runs`, done by workers of this process, or `Elsewhere`.
    """

    def __init__(
        self, search: Search, found: Any, runs: Study, workers: Workers, trials: int, say: Callable[[str], None]
    ):
        self.search, self.found, self.runs, self.workers, self.say = search, found, runs, workers, say
        self.wanted = trials
        self.trials: list[Trial] = []
        self.running: dict[str, tuple[Trial, Task]] = {}  # by id of the task
        self.signal, self._forced = 0, False
        self._looked = 0.0
        workers.join(runs, [], lambda text: None)

    def run(self) -> int:
        """0 when the study has all its trials and a best one, 1 when all failed, 128 + signal when interrupted.
        UsageError where the runs cannot be written."""
        try:
            with signals.handled(self._hear, signals.listened()):
                self._reclaim()
                while self._turn():
                    pass
        except OSError as error:
            raise UsageError(f"{refusal(error, self.runs.storage.where)}: no run can begin") from None
        finally:
            self.workers.close()
        return 128 + self.signal if self.signal else int(not completed(self.found))

    def _hear(self, number: int, frame: Any) -> None:
        self._forced, self.signal = bool(self.signal), number

    def _turn(self) -> bool:
        """One look at everything; False when nothing is left to do."""
        self.workers.changed.wait(TICK)
        self.workers.changed.clear()
        alive = self.workers.alive([*self.running])
        for task_id in self.running.keys() - alive:
            self._settle(*self.running.pop(task_id))
        if self.signal:
            self._interrupt()
        else:
            self._fill()
            self._prune()
        for trial in [trial for trial in self.trials if trial.end and not self._is_running(trial)]:
            self._close(trial)
        return bool(self.trials)

    # ------------------------------------------------------------------ trials
    def _reclaim(self) -> None:
        """Give the parameters of trials whose command was killed to be run again; their finished runs still count."""
        from optuna.trial import Trial as Asked

        for trial in self.found.get_trials(deepcopy=False, states=states("RUNNING")):
            if is_owned(trial):
                continue
            with contextlib.suppress(RuntimeError, ValueError):  # another command has done it
                self.say(f"trial {trial.number}: its command was killed; its parameters are tried again")
                self._give_back(Asked(self.found, trial._trial_id), trial.params)

    def _give_back(self, asked: Any, params: dict[str, Any]) -> None:
        """End a trial that does not count, and queue its parameters; nothing where another command was faster."""
        asked.set_user_attr("interrupted", True)
        self.found.tell(asked.number, state=states("FAIL")[0])
        if set(params) == set(self.search.space):
            self.found.enqueue_trial(params)

    def _ask(self) -> Trial | None:
        """The next trial, or None where the study has enough."""
        if sum(not trial.end for trial in self.trials) >= self.workers.slots or len(counted(self.found)) >= self.wanted:
            return None
        asked = self.found.ask()
        asked.set_user_attr("owner", this_command())
        if sum(number < asked.number for number in counted(self.found)) >= self.wanted:  # another command was faster
            self._give_back(asked, {})
            return None
        trial = Trial(asked, self.search.params(asked), list(self.search.seeds))
        trial.waiting = self.search.tasks(trial.params, trial.seeds[0])
        self.trials.append(trial)
        return trial

    def _is_running(self, trial: Trial) -> bool:
        return any(one is trial for one, _ in self.running.values())

    def _close(self, trial: Trial) -> None:
        """Tell Optuna how a trial ended, and say so."""
        self.trials.remove(trial)
        number, params = trial.asked.number, (as_flag(name, value) for name, value in trial.params.items())
        flags = " ".join(words(merge(*params)))
        if trial.end == "interrupted":
            self._give_back(trial.asked, trial.params)
            return
        for env_id, scores in trial.raw.items():
            trial.asked.set_user_attr(env_id, scores)
        if trial.reason:
            trial.asked.set_user_attr("reason", trial.reason)
        if trial.end == "done":
            value = self.search.value(trial.per_seed)
            self.found.tell(trial.asked, value)
            self.say(f"trial {number}: {value:.3f} (best {self.found.best_value:.3f})  {flags}")
            return
        self.found.tell(trial.asked, state=states("PRUNED" if trial.end == "pruned" else "FAIL")[0])
        self.say(f"trial {number}: {trial.end}, {trial.reason}  {flags}")

    # ------------------------------------------------------------------ runs
    def _fill(self) -> None:
        """Give every free slot a run: of the oldest trial that has one, else of a new trial."""
        while len(self.running) < self.workers.slots:
            candidates = [(trial, task) for trial in self.trials if not trial.end for task in trial.waiting]
            if any(self._begin(trial, task) for trial, task in candidates):
                continue
            if self._ask() is None:
                return

    def _begin(self, trial: Trial, task: Task) -> bool:
        """Start a run, or take its score where it is finished; False where another command, or trial, does it."""
        lease = Lease(self.runs, task.id)
        if task.id in self.running or lease.is_fresh(lease.holder()):
            return False
        trial.waiting.remove(task)
        self.runs.tasks[task.id] = task
        if self.runs.is_done(task.id):
            self._score(trial, task)
            return True
        if task.env_id not in trial.curves:  # what has failed in an earlier trial may fail in this one, too
            retry(self.runs, [task])
        trial.curves[task.env_id] = Curve(self.search.metric)
        self.running[task.id] = trial, task
        self.workers.submit(Submission(self.runs.storage.where, "", self.runs.name, (task.id,), task.resources))
        return True

    def _settle(self, trial: Trial, task: Task) -> None:
        """Note how a run ended, and score it where it has finished."""
        if trial.end:
            return
        if self.runs.is_done(task.id):
            self._score(trial, task)
            return
        found = standing(self.runs, task, set(), set(), begun=True)
        if found.state == "failed":
            self._end(trial, "failed", ": ".join([str(task), found.reason, *found.tail[-1:]]))
        elif trouble := self.workers.logs(task.id):
            self._end(trial, "failed", f"{task}: {trouble}")
        else:  # another command had it, and has left it
            trial.waiting.append(task)

    def _run_dir(self, task: Task) -> Path | None:
        root = self.runs.storage.folder or Path()
        return newest([root / work for work in self.runs.works(task.id)], task).run_dir

    def _score(self, trial: Trial, task: Task) -> None:
        """Take the score of a finished run; the last one of a seed brings the next seed, or the trial's end."""
        run_dir = self._run_dir(task)
        score = final_score(run_dir, self.search.metric)
        if score is None or score != score:
            self._end(trial, "failed", f"{task} has no {self.search.metric} in its metrics.jsonl")
            return
        trial.raw.setdefault(task.env_id, []).append(score)
        trial.scores[task.env_id] = self.search.normalised(task.env_id, score)
        trial.curves.setdefault(task.env_id, Curve(self.search.metric)).read(run_dir)
        if len(trial.scores) == len(self.search.env_ids):
            self._next_seed(trial)

    def _next_seed(self, trial: Trial) -> None:
        deque(self._report_curves(trial), maxlen=0)  # to its end, for the comparison with later trials
        seed = trial.seeds.pop(0)
        trial.per_seed.append(statistics.fmean(trial.scores.values()))
        value = self.search.value(trial.per_seed)
        trial.asked.report(value, SEED_STEPS * len(trial.per_seed) - 1)
        trial.scores, trial.curves, trial.reported = {}, {}, 0
        if not trial.seeds:
            trial.end = "done"
        elif trial.asked.should_prune():
            self._end(trial, "pruned", f"{value:.3f} after seed {seed}")
        else:
            trial.waiting = self.search.tasks(trial.params, trial.seeds[0])

    def _prune(self) -> None:
        """Once a second: tell the pruner the evaluations of running runs, and end the trials that look hopeless."""
        if time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        for trial in [trial for trial in self.trials if not trial.end]:
            for task in [task for one, task in self.running.values() if one is trial]:
                trial.curves[task.env_id].read(self._run_dir(task))
            for mean in self._report_curves(trial):
                if trial.asked.should_prune():
                    self._end(trial, "pruned", f"{mean:.3f} at evaluation {trial.reported} of seed {trial.seeds[0]}")
                    break

    def _report_curves(self, trial: Trial) -> Iterator[float]:
        """Tell the pruner, one after the other, the evaluations that all environments of this seed have, averaged."""
        if len(trial.curves) < len(self.search.env_ids):
            return
        curves = {env_id: curve.values for env_id, curve in trial.curves.items()}
        for k in range(trial.reported, min(map(len, curves.values()))):
            mean = statistics.fmean(self.search.normalised(env_id, values[k]) for env_id, values in curves.items())
            trial.reported = k + 1
            trial.asked.report(mean, SEED_STEPS * len(trial.per_seed) + k + 1)
            yield mean

    # ------------------------------------------------------------------ endings
    def _end(self, trial: Trial, end: str, reason: str) -> None:
        """Start nothing more of a trial and ask its processes to end."""
        trial.end, trial.reason, trial.waiting = end, reason, []
        self.workers.cancel([task_id for task_id, (one, _) in self.running.items() if one is trial])

    def _interrupt(self) -> None:
        """All running trials save and end; their parameters wait for the next command. A second signal kills."""
        if not self.workers.ended:
            self.say(f"interrupted: {len(self.running)} runs save and end; once more kills them")
        self.workers.end(self._forced)
        for trial in [trial for trial in self.trials if not trial.end]:
            self._end(trial, "interrupted", "")
