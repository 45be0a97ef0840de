"""One set of hyper-parameters over several environments and seeds, found by Optuna with the engine of `solo bench`.

The score of a trial: each run's last evaluation is normalised by its environment's target scores (low is 0, high is 1);
the mean over environments is one number per seed, the median (or mean) over seeds is the trial's.

A search space is written in one small language, in a TOML file (`learning-rate = "log 1e-5..1e-2"`) or in the comment
after a field of the script's Args (`# learning rate [tune: log 1e-5..1e-2]`):

    0.9..0.999        between two numbers, whole ones where both are (and the field is an int)
    log 1e-5..1e-2    the same, equally likely on a logarithmic scale
    32..512 step 32   a multiple of the step above the lower bound
    64 | 128 | 256    one of these; true | false for a switch

All trials are in a journal file, so that the same command continues after a kill and several commands share the work.
"""

import ast
import contextlib
import hashlib
import json
import platform
import re
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from solorl.args.command_line import whole_number
from solorl.catalog.header import parse_source, read_source
from solorl.errors import UsageError
from solorl.machine import is_alive, own_handle
from solorl.metrics import read_rows
from solorl.scripts import in_catalogue, spaces_folder
from solorl.studies.bench import Found, Store, View
from solorl.studies.engines import Engine
from solorl.studies.plan import Flags, Script, Task, args_fields, as_flag, merge, read_toml
from solorl.studies.pool import Ended, Pool
from solorl.studies.storage import refusal

SEED_STEPS = 10_000  # pruning steps of one seed: its evaluations 1, 2, ...; the last step is the score so far
LOOK = 1.0  # seconds between two looks at the learning curves
METRIC = "eval/episodic_return"
NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+|[kKM])?"


# ---------------------------------------------------------------------- the search space
@dataclass(frozen=True)
class Choice:
    """One of some values."""

    values: tuple[Any, ...]

    def suggest(self, trial: Any, name: str) -> Any:
        """The value of a trial."""
        return trial.suggest_categorical(name, list(self.values))


@dataclass(frozen=True)
class Range:
    """A number between two bounds, both included."""

    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False

    def suggest(self, trial: Any, name: str) -> Any:
        """The value of a trial."""
        if self.whole:
            return trial.suggest_int(name, int(self.low), int(self.high), step=int(self.step or 1), log=self.log)
        return trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log)


Space = dict[str, Choice | Range]  # flag name without its dashes in front -> what it may be


def parse_space(text: str, where: str, kind: str = "") -> Choice | Range:
    """The language above; `kind` is the field's annotation, if there is one. UsageError for anything else."""
    if "|" in text:
        return Choice(tuple(_value(part.strip(), kind) for part in text.split("|")))
    match = re.fullmatch(rf"(log )?\s*({NUMBER})\s*\.\.\s*({NUMBER})\s*(?:step ({NUMBER}))?", text.strip())
    if not match:
        raise UsageError(f'{where}: {text!r} is none of "0.9..0.999", "log 1e-5..1e-2", "32..512 step 32", "64 | 128"')
    low, high = _number(match[2], kind), _number(match[3], kind)
    step = _number(match[4], kind) if match[4] else None
    whole = all(isinstance(part, int) for part in (low, high, step or 1))
    if kind.startswith("int") and not whole:
        raise UsageError(f"{where}: {text!r} must have whole bounds, because the field is an integer")
    if low >= high or (match[1] and low <= 0) or (step is not None and (step <= 0 or match[1])):
        if match[1] and step:
            raise UsageError(f"{where}: {text!r} has both log and a step; only one is allowed")
        if match[1] and low <= 0:
            raise UsageError(f"{where}: a log range must have bounds above 0, got {text!r}")
        raise UsageError(f"{where}: the lower bound must be below the upper one and a step above 0, got {text!r}")
    return Range(low, high, bool(match[1]), step, whole)


def _value(text: str, kind: str) -> Any:
    """A number where the text is one, true or false, else the text."""
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(NUMBER, text) and not kind.startswith("str"):
        return _number(text, kind)
    return text


def _number(text: str, kind: str) -> float:
    """An int where the field is one, as on a command line, or where it may be and the text is one without a point or an
    exponent; else a float."""
    if kind.startswith("int") or not (kind.startswith("float") or re.search(r"[.eE]", text)):
        with contextlib.suppress(ValueError):
            return whole_number(text)
    return float(re.sub("[kK]$", "e3", text).replace("M", "e6"))


def space_of(script: Script) -> Space:
    """The space in the comments of a script's Args, else the one that we ship for an algorithm; UsageError where there
    is none."""
    lines, space = read_source(script.path).splitlines(), Space()
    for name, item in args_fields(parse_source(script.path)).items():
        comment = lines[(item.end_lineno or item.lineno) - 1].partition("#")[2]
        if match := re.search(r"\[tune: ([^\]]+)\]", comment):
            where = f"{script.path.name}:{item.lineno}"
            space[name.replace("_", "-")] = parse_space(match[1], where, ast.unparse(item.annotation))
    shipped = spaces_folder() / f"{script.path.stem.removesuffix('_jax')}.toml"
    if not space and in_catalogue(script.path) and shipped.is_file():
        return space_from_file(shipped, script)
    if not space:
        lacks = f"{script.path.name} has no field with `[tune: log 1e-5..1e-2]` in its comment"
        raise UsageError(f"{lacks}; use --space FILE.toml (`solo tune --help` shows one)")
    return space


def space_from_file(path: Path, script: Script) -> Space:
    """The space in a TOML file; UsageError for what is not a space and for a flag that the script does not have."""
    space, annotations = Space(), args_fields(parse_source(script.path))
    for key, text in read_toml(path).items():
        name, where = key.removeprefix("--").replace("_", "-"), f"{key} in {path}"
        item = annotations.get(name.replace("-", "_"))
        if isinstance(text, list) and text and all(isinstance(part, (bool, int, float, str)) for part in text):
            space[name] = Choice(tuple(text))
        elif isinstance(text, str):
            space[name] = parse_space(text, where, ast.unparse(item.annotation) if item else "")
        else:
            raise UsageError(f'{where} must be a text such as "log 1e-5..1e-2" or a list of values')
    if not space:
        raise UsageError(f"{path} names no parameter")
    script.check({f"--{name}": () for name in space})
    return space


# ---------------------------------------------------------------------- what is searched for
@dataclass(frozen=True)
class Study:
    """All that makes two trials comparable."""

    script: Script
    env_ids: tuple[str, ...]
    targets: Mapping[str, tuple[float, float]]  # environment -> the scores that count as 0 and as 1
    seeds: tuple[int, ...]
    space: Space
    flags: Flags = field(default_factory=dict)  # given to every run
    aggregate: str = "median"  # median | mean, over seeds
    metric: str = METRIC

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
        return [Task(self.script, env_id, seed, self.all_flags(params)) for env_id in self.env_ids]

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
    """Asks Optuna for trials and runs them, several at once, until the study has as many as it should."""

    def __init__(self, study: Study, found: Any, store: Store, engine: Engine, trials: int, view: View):
        self.study, self.found, self.store, self.view = study, found, store, view
        self.pool = Pool[tuple[Trial, Task]](engine, self._interrupt)
        self.wanted = trials
        self.trials: list[Trial] = []
        self._looked = 0.0

    def run(self) -> int:
        """0 when the study has all its trials and a best one, 1 when all failed, 128 + signal when interrupted."""
        with self.pool.listening():
            self._reclaim()
            while self._turn():
                pass
        return self.pool.exit_code or int(not completed(self.found))

    def _turn(self) -> bool:
        """One look at everything; False when nothing is left to do."""
        for ended in self.pool.ended():
            self._settle(ended)
        if not self.pool.signal:
            self._fill()
            self._prune()
        for trial in [trial for trial in self.trials if trial.end and not self._is_running(trial)]:
            self._close(trial)
        return bool(self.trials)

    # ------------------------------------------------------------------ trials
    def _reclaim(self) -> None:
        """Give the parameters of trials whose command was killed to be run again; their finished runs still count."""
        from optuna.trial import Trial as Asked

        for trial in self.found.get_trials(deepcopy=False, states=_states("RUNNING")):
            if _is_owned(trial):
                continue
            with contextlib.suppress(RuntimeError, ValueError):  # another command has done it
                self.view.say(f"trial {trial.number}: its command was killed; its parameters are tried again")
                self._give_back(Asked(self.found, trial._trial_id), trial.params)

    def _give_back(self, asked: Any, params: dict[str, Any]) -> None:
        """End a trial that does not count, and queue its parameters; nothing where another command was faster."""
        asked.set_user_attr("interrupted", True)
        self.found.tell(asked.number, state=_states("FAIL")[0])
        if set(params) == set(self.study.space):
            self.found.enqueue_trial(params)

    def _ask(self) -> Trial | None:
        """The next trial, or None where the study has enough."""
        if sum(not trial.end for trial in self.trials) >= self.pool.workers or len(counted(self.found)) >= self.wanted:
            return None
        asked = self.found.ask()
        asked.set_user_attr("owner", {"handle": own_handle(), "host": _host()})
        if sum(number < asked.number for number in counted(self.found)) >= self.wanted:  # another command was faster
            self._give_back(asked, {})
            return None
        trial = Trial(asked, self.study.params(asked), list(self.study.seeds))
        trial.waiting = self.study.tasks(trial.params, trial.seeds[0])
        self.trials.append(trial)
        return trial

    def _is_running(self, trial: Trial) -> bool:
        return any(one is trial for one, _ in self.pool.running.values())

    def _close(self, trial: Trial) -> None:
        """Tell Optuna how a trial ended, and say so."""
        self.trials.remove(trial)
        number, flags = trial.asked.number, " ".join(_words(trial.params))
        if trial.end == "interrupted":
            self._give_back(trial.asked, trial.params)
            return
        for env_id, scores in trial.raw.items():
            trial.asked.set_user_attr(env_id, scores)
        if trial.reason:
            trial.asked.set_user_attr("reason", trial.reason)
        if trial.end == "done":
            value = self.study.value(trial.per_seed)
            self.found.tell(trial.asked, value)
            self.view.say(f"trial {number}: {value:.3f} (best {self.found.best_value:.3f})  {flags}")
            return
        self.found.tell(trial.asked, state=_states("PRUNED" if trial.end == "pruned" else "FAIL")[0])
        self.view.say(f"trial {number}: {trial.end}, {trial.reason}  {flags}")

    # ------------------------------------------------------------------ runs
    def _fill(self) -> None:
        """Give every free slot a run: of the oldest trial that has one, else of a new trial."""
        while self.pool.free:
            candidates = [(trial, task) for trial in self.trials if not trial.end for task in trial.waiting]
            if any(self._begin(trial, task) for trial, task in candidates):
                continue
            if self._ask() is None:
                return

    def _begin(self, trial: Trial, task: Task) -> bool:
        """Start a run, or take its score where it is finished; False where another process has it."""
        try:
            if self.store.lock(task):
                return False
        except OSError as error:
            self._end(trial, "failed", f"{task}: {refusal(error, self.store.tasks)}")
            return True
        trial.waiting.remove(task)
        found = self.store.find(task)
        if found.state == "finished":
            self._score(trial, task, found)
            self.store.unlock(task)
            return True
        try:
            if not self.pool.adopt(self.store.survivors(task, found), (trial, task)):
                self.store.start([task], lambda job: self.pool.start(job, (trial, task)))
        except OSError as error:
            self.store.unlock(task)
            self._end(trial, "failed", f"{task}: {refusal(error, self.store.folder)}")
            return True
        trial.curves[task.env_id] = Curve(self.study.metric)
        return True

    def _settle(self, ended: Ended[tuple[Trial, Task]]) -> None:
        """Note how a run ended, and score it where it has finished."""
        trial, task = ended.work
        try:
            found = self.store.settle(task, ended.code, ended.cancelled)
        except OSError as error:
            found = Found("failed", refusal(error, self.store.folder))
        self.store.unlock(task)
        if found.state == "finished" and not trial.end:
            self._score(trial, task, found)
        elif ended.adopted and not trial.end:
            trial.waiting.append(task)
        elif not trial.end:
            last = self.store.tail(task)[-1:]
            self._end(trial, "failed", ": ".join([str(task), found.reason, *last]))

    def _score(self, trial: Trial, task: Task, found: Found) -> None:
        """Take the score of a finished run; the last one of a seed brings the next seed, or the trial's end."""
        score = final_score(found.run_dir, self.study.metric)
        if score is None or score != score:
            self._end(trial, "failed", f"{task} has no {self.study.metric} in its metrics.jsonl")
            return
        trial.raw.setdefault(task.env_id, []).append(score)
        trial.scores[task.env_id] = self.study.normalised(task.env_id, score)
        trial.curves.setdefault(task.env_id, Curve(self.study.metric)).read(found.run_dir)
        if len(trial.scores) == len(self.study.env_ids):
            self._next_seed(trial)

    def _next_seed(self, trial: Trial) -> None:
        deque(self._report_curves(trial), maxlen=0)  # to its end, for the comparison with later trials
        seed = trial.seeds.pop(0)
        trial.per_seed.append(statistics.fmean(trial.scores.values()))
        value = self.study.value(trial.per_seed)
        trial.asked.report(value, SEED_STEPS * len(trial.per_seed) - 1)
        trial.scores, trial.curves, trial.reported = {}, {}, 0
        if not trial.seeds:
            trial.end = "done"
        elif trial.asked.should_prune():
            self._end(trial, "pruned", f"{value:.3f} after seed {seed}")
        else:
            trial.waiting = self.study.tasks(trial.params, trial.seeds[0])

    def _prune(self) -> None:
        """Once a second: tell the pruner the evaluations of running runs, and end the trials that look hopeless."""
        if time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        for trial in [trial for trial in self.trials if not trial.end]:
            for task in [task for one, task in self.pool.running.values() if one is trial]:
                trial.curves[task.env_id].read(self.store.find(task).run_dir)
            for mean in self._report_curves(trial):
                if trial.asked.should_prune():
                    self._end(trial, "pruned", f"{mean:.3f} at evaluation {trial.reported} of seed {trial.seeds[0]}")
                    break

    def _report_curves(self, trial: Trial) -> Iterator[float]:
        """Tell the pruner, one after the other, the evaluations that all environments of this seed have, averaged."""
        if len(trial.curves) < len(self.study.env_ids):
            return
        curves = {env_id: curve.values for env_id, curve in trial.curves.items()}
        for k in range(trial.reported, min(map(len, curves.values()))):
            mean = statistics.fmean(self.study.normalised(env_id, values[k]) for env_id, values in curves.items())
            trial.reported = k + 1
            trial.asked.report(mean, SEED_STEPS * len(trial.per_seed) + k + 1)
            yield mean

    # ------------------------------------------------------------------ endings
    def _end(self, trial: Trial, end: str, reason: str) -> None:
        """Start nothing more of a trial and ask its processes to end."""
        trial.end, trial.reason, trial.waiting = end, reason, []
        for handle, (one, _) in self.pool.running.items():
            if one is trial:
                self.pool.cancel(handle)

    def _interrupt(self) -> None:
        """All running trials save and end; their parameters wait for the next command."""
        self.view.say(f"interrupted: {len(self.pool.running)} runs save and end; once more kills them")
        for trial in [trial for trial in self.trials if not trial.end]:
            self._end(trial, "interrupted", "")


# ---------------------------------------------------------------------- the journal file
def open_study(path: Path, study: Study, pruner: str, prune_after: int, seed: int | None) -> Any:
    """The Optuna study in a journal file, made where there is none.

    UsageError where Optuna is not installed, or the study in the file searches for something else.
    """
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ModuleNotFoundError:
        raise UsageError("solo tune needs an extra: pip install 'solorl[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruners = {
        "median": optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=prune_after, n_min_trials=3),
        "none": optuna.pruners.NopPruner(),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        storage = JournalStorage(JournalFileBackend(str(path)))
        found = optuna.create_study(
            storage=storage, study_name=study.script.name, direction="maximize", load_if_exists=True,
            pruner=pruners[pruner],
        )  # fmt: skip
        first = (
            None if seed is None else seed + len(found.trials)
        )  # a study that continues must not draw the same again
        found.sampler = optuna.samplers.TPESampler(seed=first, multivariate=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    except (ValueError, KeyError) as error:
        raise UsageError(f"{path} is not a journal of Optuna: {error}") from None
    _check_same(path, found, study.about())
    return found


def _check_same(path: Path, found: Any, about: dict[str, Any]) -> None:
    """UsageError unless the trials in the file were made for the same question."""
    saved = found.user_attrs.get("solorl")
    if saved is None:
        found.set_user_attr("solorl", about)
    elif different := [key for key in about if saved.get(key) != about[key]]:
        raise UsageError(f"the study in {path} was made with different {different[0]}; --storage names a new file")


def _states(*names: str) -> tuple[Any, ...]:
    from optuna.trial import TrialState

    return tuple(TrialState[name] for name in names)


def completed(found: Any) -> list[Any]:
    """The trials that ran to their end."""
    return found.get_trials(deepcopy=False, states=_states("COMPLETE"))


def counted(found: Any) -> list[int]:
    """Numbers of the trials that count: over in any way but interruption, or running in a process that lives."""
    over = found.get_trials(deepcopy=False, states=_states("COMPLETE", "PRUNED", "FAIL"))
    running = found.get_trials(deepcopy=False, states=_states("RUNNING"))
    valid = [trial for trial in over if not trial.user_attrs.get("interrupted")] + [*filter(_is_owned, running)]
    return [trial.number for trial in valid]


def _is_owned(trial: Any) -> bool:
    """Whether the command that runs a trial is alive, as far as this machine can tell."""
    owner = trial.user_attrs.get("owner")
    if owner is None:  # asked for a moment ago, or its command died in that moment
        return trial.datetime_start is not None and time.time() - trial.datetime_start.timestamp() < 60
    return owner["host"] != _host() or is_alive(owner["handle"])


def _host() -> str:
    """This machine, by a number that does not tell its name."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


def _words(params: Mapping[str, Any]) -> list[str]:
    """Parameters as words of a command line."""
    flags = merge(*(as_flag(name, value) for name, value in params.items()))
    return [" ".join([name, *values]) for name, values in flags.items()]
