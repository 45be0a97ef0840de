"""One set of hyper-parameters over several environments and seeds, found by Optuna with the workers of `solo bench`.

The score of a trial: each run's last evaluation is normalised by its environment's target scores (low is 0, high is 1);
the mean over environments is one number per seed, the median (or mean) over seeds is the trial's.

A search is a study in a folder. Its trials are in `optuna.log` there, Optuna's own journal, which several commands may
share. A worker holds the lease of the trial that it does. A trial that Optuna calls running and whose lease is free was
left by a worker that is gone: the next worker takes that same trial, its parameters are known and its runs continue. So
none is lost or counted twice, and nothing is queued again. (Optuna's own heartbeat needs a database, and ends a trial.)
"""

import fcntl
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna import TrialPruned, pruners
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState

from solorl.errors import UsageError, denied, did_you_mean, refuse, told
from solorl.lab.studies.plan import Flags, Script, Task, as_flag, merge
from solorl.lab.studies.resources import Resources
from solorl.lab.studies.runs import find
from solorl.lab.studies.study import Study
from solorl.lab.studies.task import words
from solorl.lab.studies.worker import SCORE, Pool, Worker
from solorl.runfolder import METRICS, rows_of

JOURNAL = "optuna.log"
SEED_STEPS = 10_000  # pruning steps of one seed: its evaluations 1, 2, ...; the last step is the score so far


# ---------------------------------------------------------------------- what is searched for
@dataclass(frozen=True)
class Search:
    """All that makes two trials comparable."""

    script: Script
    env_ids: tuple[str, ...]
    targets: Mapping[str, tuple[float, float]]  # environment -> the scores that count as 0 and as 1
    seeds: tuple[int, ...]
    space: Mapping[str, Any]
    flags: Flags = field(default_factory=dict)  # given to every run
    aggregate: str = "median"  # median | mean, over seeds
    metric: str = SCORE
    resources: Resources = field(default_factory=Resources)  # of each run, for engines that ask for them

    def about(self) -> dict[str, Any]:
        """What must be equal for a search to continue, as JSON."""
        names = ("env_ids", "targets", "seeds", "space", "flags", "aggregate", "metric")
        about = {name.replace("_", "-"): repr(getattr(self, name)) for name in names}
        return {"script": f"{self.script.path.name} {self.script.sha256[:12]}", **about}

    def params(self, trial: Any) -> dict[str, Any]:
        """The values of a trial."""
        return {name: trial._suggest(name, values) for name, values in self.space.items()}

    def tasks(self, params: Mapping[str, Any], seed: int) -> list[Task]:
        """The runs of one seed of a trial: every parameter is a flag of each."""
        flags = self.all_flags(params)
        return [Task(self.script, env_id, seed, flags, resources=self.resources) for env_id in self.env_ids]

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


def values(run_dir: Path | None, metric: str) -> list[float]:
    """All values so far of a metric of a run, those that are numbers."""
    found = [row[metric] for row in rows_of(run_dir / METRICS, key=metric)] if run_dir else []
    return [float(value) for value in found if isinstance(value, int | float)]


def final_score(run_dir: Path | None, metric: str) -> float | None:
    """The last evaluation of a run, or the mean of its last 50 values of another metric; None where there is none."""
    if metric == SCORE and (found := values(run_dir, metric)):
        return found[-1]
    last = values(run_dir, "charts/episodic_return" if metric == SCORE else metric)[-50:]
    return statistics.fmean(last) if last else None


# ---------------------------------------------------------------------- the trials
class Sampler(optuna.samplers.TPESampler):
    """TPE whose draws for a trial depend on a seed, the number of the trial and what has finished: commands that share
    a seed draw different trials, those that one command would draw."""

    def __init__(self, seed: int | None):
        super().__init__(seed=seed, multivariate=True)
        self._seed = seed

    def before_trial(self, study: Any, trial: Any) -> None:
        """Optuna calls this when a trial begins."""
        if self._seed is not None:  # a search has 10**6 trials at most
            super().__init__(seed=(self._seed * 10**6 + trial.number) % 2**32, multivariate=True)
        super().before_trial(study, trial)


def open_trials(folder: Path, search: Search, pruner: str, prune_after: int, seed: int | None) -> Any:
    """Optuna's study of a search in a folder, made where there is none.

    UsageError where the study there searches for something else.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = (folder / JOURNAL).absolute()  # Optuna's lock is a link to it, which must not point nowhere
    median = pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=prune_after, n_min_trials=3)
    with told(f"{path} is not a journal of Optuna"), denied(f"{path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        found = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(path))), study_name=search.script.name, sampler=Sampler(seed),
            direction="maximize", load_if_exists=True, pruner=median if pruner == "median" else pruners.NopPruner(),
        )  # fmt: skip
    about, saved = search.about(), found.user_attrs.get("solorl")
    if saved is None:
        found.set_user_attr("solorl", about)
    elif different := [key for key in about if saved.get(key) != about[key]]:
        raise UsageError(f"the search in {folder} was made with different {different[0]}; --storage names a new folder")
    return found


class Tuner(Pool):
    """Workers that ask Optuna for trials and do their runs, until there are as many trials as there should be."""

    def __init__(self, search: Search, found: Any, study: Study, trials: int, slots: int, say: Callable[[str], None]):
        failed = sum(trial.state.name == "FAIL" for trial in found.get_trials(deepcopy=False))  # others in their place
        self.search, self.found, self.wanted, self._say = search, found, trials + failed, say
        super().__init__(study, search.tasks({}, 1), slots, lambda text: None)

    def search_all(self) -> int:
        """0 when there are all trials and a best one, 1 when all failed, 128 + signal when interrupted. Raises OSError
        where the storage refuses."""
        self.run()
        return 128 + self.signal if self.signal else int(all(trial.state.name != "COMPLETE" for trial in self.trials()))

    def trials(self) -> list[Any]:
        """Optuna's trials that have begun, whatever has become of them."""
        return [trial for trial in self.found.get_trials(deepcopy=False) if trial.state.name != "WAITING"]

    def serve(self, worker: Worker) -> None:
        """Do one trial after the other: those whose worker is gone, then new ones."""
        while not self._over.is_set():
            if trial := self._next_trial():
                try:
                    self._do(worker, trial)
                finally:
                    self.leases.release(f"trial-{trial.number}")
            elif len(self.trials()) >= self.wanted and all(one.state.is_finished() for one in self.trials()):
                return
            else:  # others are at work, and may be killed
                self._over.wait(self.look)

    def _next_trial(self) -> Any:
        """A trial, leased and drawn; None where there is none at present. Of several commands one at a time asks."""
        with self._lock, open(Path(self.study.storage.where) / "asking", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for one in [each for each in self.trials() if not each.state.is_finished()]:
                if self.leases.take(name := f"trial-{one.number}") is not None:
                    if not next(each for each in self.trials() if each.number == one.number).state.is_finished():
                        return Trial(self.found, one._trial_id)
                    self.leases.release(name)
            if len(self.trials()) >= self.wanted:
                return None
            trial = self.found.ask()
            self.leases.take(f"trial-{trial.number}")
            self.search.params(trial)
            return trial

    def _do(self, worker: Worker, trial: Any) -> None:
        """Do the runs of a trial and tell Optuna how it ended; an interrupted one stays as it is."""
        params = self.search.params(trial)
        flags = " ".join(words(merge(*(as_flag(name, value) for name, value in params.items()))))
        try:
            value = self._value(worker, trial, params)
        except (TrialPruned, Failed) as end:
            trial.set_user_attr("reason", str(end))
            self.found.tell(trial.number, state=TrialState.FAIL if isinstance(end, Failed) else TrialState.PRUNED)
            self._say(f"trial {trial.number}: {'failed' if isinstance(end, Failed) else 'pruned'}, {end}  {flags}")
        else:
            if value is not None:
                self.found.tell(trial.number, value)
                self._say(f"trial {trial.number}: {value:.3f} (best {self.found.best_value:.3f})  {flags}")

    def _value(self, worker: Worker, trial: Any, params: Mapping[str, Any]) -> float | None:
        """The score of a trial; None where it is interrupted. Raises TrialPruned and Failed."""
        search, per_seed, value = self.search, list[float](), 0.0
        raw: dict[str, list[float]] = {env_id: [] for env_id in search.env_ids}
        known = {*self.found.get_trials(deepcopy=False)[trial.number].intermediate_values}  # told before a kill

        def tell(step: int, value: float) -> bool:
            """Whether the pruner, which is told each value once, ends the trial."""
            if step not in known:
                known.add(step)
                trial.report(value, step)
                return bool(trial.should_prune())
            return False

        def report(seed: int, tasks: Sequence[Task]) -> str:
            """Tell the evaluations that all environments of a seed have, averaged; why the trial is hopeless."""
            curves = [values(find(self.study, task).run_dir, search.metric) for task in tasks]
            for k, column in enumerate(zip(*curves, strict=False), 1):
                mean = statistics.fmean(map(search.normalised, search.env_ids, column))
                if tell(SEED_STEPS * len(per_seed) + k, mean):
                    return f"{mean:.3f} at evaluation {k} of seed {seed}"
            return ""

        for seed in search.seeds:
            tasks = search.tasks(params, seed)
            for task in tasks:
                score = self._train(worker, task, lambda tasks=tasks, seed=seed: report(seed, tasks))  # type: ignore[misc]
                if score is None:
                    return None
                raw[task.env_id].append(score)
                trial.set_user_attr(task.env_id, raw[task.env_id])
            while report(seed, tasks):  # to the end, for the comparison with later trials
                pass
            per_seed.append(statistics.fmean(search.normalised(env_id, each[-1]) for env_id, each in raw.items()))
            value = search.value(per_seed)
            if tell(SEED_STEPS * len(per_seed) - 1, value) and seed != search.seeds[-1]:
                raise TrialPruned(f"{value:.3f} after seed {seed}")
        return value

    def _train(self, worker: Worker, task: Task, report: Callable[[], str]) -> float | None:
        """Bring a run to its end, which another trial may have, too: its score, or None where it is interrupted. Raises
        TrialPruned and Failed."""
        hopeless, begun = "", False

        def watch() -> None:
            nonlocal hopeless
            if not hopeless and (hopeless := report()):
                worker.end("pruned")

        self.study.tasks[task.id] = task
        worker.watched = watch
        while not self.study.storage.exists(f"results/{task.id}.json"):
            state = self.study.states([task])[task.id]
            if self._over.is_set():
                return None
            if state.name == "failed" and begun:
                raise Failed(": ".join([str(task), state.reason, *state.last("tail")[-1:]]))
            if state.name == "failed":  # in an earlier trial; it may not in this one
                self.study.retry([task])
            if begun := self._take(task):
                self.do(worker, [task])
            else:
                self._over.wait(self.look)
            if hopeless:
                raise TrialPruned(hopeless)
        run_dir, metric = find(self.study, task).run_dir, self.search.metric
        score = final_score(run_dir, metric)
        known = {name for row in rows_of(run_dir / METRICS) for name in row} if run_dir and score is None else {metric}
        refuse(metric not in {SCORE, *known}, f"{task} has no metric {metric}{did_you_mean(metric, known)}")
        if score is None or not abs(score) < float("inf"):  # NaN is not, either
            raise Failed(f"{task} has no finite {metric} in its {METRICS}")
        return score


class Failed(Exception):
    """A run of a trial has failed."""
