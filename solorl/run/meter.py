"""What a training counts: loops, steps, returns of episodes, means of what was learned, rows of metrics, seconds."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from solorl.envs.returns import Teams, ended, named, rollout
from solorl.errors import UsageError, refuse, told

RETURN, LENGTH = "charts/episodic_return", "charts/episodic_length"


class Diverged(Exception):
    """A number of a training is NaN or infinite; the message says which one."""


def check_finite(*rows: Mapping[str, float]) -> None:
    """Diverged for the first value that is NaN or infinite."""
    for name, value in (pair for row in rows for pair in row.items()):
        if not math.isfinite(value):
            raise Diverged(f"{name} is {value}")


class Meter:
    """The counters of one training. It writes nothing: `take_rows` hands over what is to be written."""

    def __init__(self) -> None:
        self.step = 0  # environment steps at the last call of log, evaluate or save
        self.phase, self.iteration, self.is_last = -1, 0, False  # the number of the loop, and of its iteration
        self.trained = False  # the last loop is over: all that was learned is saved
        self.teams: Teams | None = None  # of the environments, if they have several agents
        self.agents: list[str] = []  # their names
        self.returns: np.ndarray | None = None  # of the running episodes, (num_envs,) or (num_envs, num_agents)
        self.lengths: np.ndarray | None = None
        self.rows: list[dict[str, float]] = []  # that wait to be written
        self.sps = 0.0  # steps per second at the last row of metrics
        self._recent: deque[float] = deque(maxlen=100)  # returns
        self._sums: dict[str, Any] = {}  # of each metric since the last row, of episodes too
        self._vectors: dict[tuple[str, ...], Any] = {}  # the same where all metrics of a step are a vector
        self._counts: Counter[str] = Counter()  # of what the sums and the vectors have of each name
        self._due: dict[str, int] = {}  # step of the last call per verb
        self._elapsed, self._resumed_at = 0.0, time.perf_counter()  # seconds of earlier sessions, start of this one
        self._paused = 0.0  # seconds spent on evaluation and saving since the last row
        self._spent: dict[str, float] = {}  # name -> seconds since the last row in what `timed` looks at
        self._last_row = (0, 0.0)  # its step and wall time
        self._stopped = 0  # the loop in which the run that is resumed stopped
        self.sizes: list[int] = []  # environment steps of an iteration, of each loop that says it

    # ------------------------------------------------------------------ loops
    def next_loop(self, start: int, num_iterations: int, last: bool, over: bool) -> range:
        """The iterations of one more loop; none where the training is `over` or was resumed in a later loop. Training
        time counts from the first loop on. UsageError where the script has other loops than it had."""
        if self.phase < 0:
            self._resumed_at, self._spent = time.perf_counter(), dict.fromkeys(self._spent, 0.0)
        self.phase += 1
        refuse(self.trained and not over, "a loop came after the last one: those before it say last=False")
        if last and self.phase < self._stopped:
            raise UsageError("the run was started by another script, with another number of loops: start a new run")
        if over or self.phase < self._stopped:
            return range(0)
        return range(start if self.phase == self._stopped else 0, num_iterations)

    def reach(self, step: int) -> None:
        """Note the step of a verb; UsageError where it is less than before."""
        if step < self.step:
            fell = f"global_step fell from {self.step:,} to {step:,}"
            raise UsageError(f"{fell}: it must count on, also in a later loop and after --resume-changed")
        self.step = int(step)

    # ------------------------------------------------------------------ time
    def wall_time(self) -> float:
        """Seconds of training so far, earlier sessions included."""
        return self._elapsed + time.perf_counter() - self._resumed_at

    def pause(self, seconds: float) -> None:
        """Do not count these seconds in the steps per second."""
        self._paused += seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside does not count in the steps per second."""
        began = time.perf_counter()
        yield
        self.pause(time.perf_counter() - began)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function; each row says as `time/NAME` how many seconds it took since the row before."""

        def call(*inputs: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = function(*inputs, **named)
            self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - began
            return result

        return call

    def is_due(self, verb: str, every: int, step: int) -> bool:
        """Whether a multiple of `every` steps (0: never) lies between the last call for this verb and `step`."""
        before, self._due[verb] = self._due.get(verb, 0), step
        return every > 0 and step // every > before // every

    # ------------------------------------------------------------------ what happens
    def episodes(self, global_step: int, reward: Any, done: Any, per_agent: bool = False) -> None:
        """Count rewards and ends of episodes, both (num_envs,) or (steps, num_envs), of which the last row is that of
        `global_step`; with several agents both have a last axis of agents. Every episode that ends gives a row."""
        reward, done = rollout(reward, done, self.teams)
        steps, num_envs = done.shape
        if self.returns is None or self.lengths is None:
            self.returns, self.lengths = np.zeros(reward.shape[1:]), np.zeros(num_envs, np.int64)
        agents = self.agents if per_agent else ()
        for t, total, length in ended(self.returns, self.lengths, reward, done):
            values = named(RETURN, total, self.teams, agents)
            row = {name: float(value) for name, value in values.items()} | {LENGTH: float(length)}
            self._ended(global_step - (steps - 1 - t) * num_envs, row)

    def episode(self, global_step: int, episodic_return: float, length: int) -> None:
        """Count one whole episode, which ended at `global_step`."""
        self._ended(global_step, {RETURN: float(episodic_return), LENGTH: float(length)})

    def _ended(self, step: int, row: Mapping[str, float]) -> None:
        self._recent.append(row[RETURN])
        self.add_row(step, row)
        self.learned(row)  # rows may be written before a row of metrics is due

    def begin_episodes(self, indices: list[int] | None = None) -> None:
        """The episodes of these environments (default: of all) begin again."""
        if indices is None:
            self.returns = self.lengths = None
        elif self.returns is not None and self.lengths is not None:
            self.returns[indices] = self.lengths[indices] = 0

    @property
    def recent_return(self) -> float | None:
        """Mean return of the last 100 episodes; None before the first."""
        return float(np.mean(self._recent)) if self._recent else None

    def learned(self, sums: Mapping[str, Any], number: int = 1) -> None:
        """Count metrics into the means of the next row: `sums` over `number` gradient steps."""
        for name in sums:
            self._counts[name] += number
        vector = getattr(sums, "vector", None)  # of all metrics: one addition on the device instead of one for each
        if vector is not None:
            names = tuple(sums)
            if names not in self._vectors and self._sums.keys() & sums.keys():  # of a checkpoint
                self._vectors[names] = vector.new_tensor([float(self._sums.pop(name, 0.0)) for name in names])
            self._vectors[names] = self._vectors.get(names, 0.0) + vector
            return
        for name, value in sums.items() if number else ():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def _learned(self) -> dict[str, tuple[Any, int]]:
        """The sum of each metric since the last row, and of how many gradient steps or episodes."""
        found = dict(self._sums)
        for names, vector in self._vectors.items():
            for name, value in zip(names, vector, strict=True):
                found[name] = found.get(name, 0.0) + value
        return {name: (total, self._counts[name]) for name, total in found.items()}

    # ------------------------------------------------------------------ rows
    def add_row(self, step: int, values: Mapping[str, float]) -> None:
        """Note a row, with the time."""
        own = {"global_step": int(step), "wall_time": round(self.wall_time(), 3)}  # first, whatever `values` holds
        self.rows.append(own | dict(values) | own)

    def take_rows(self) -> list[dict[str, float]]:
        """The rows that wait; none waits any more."""
        rows, self.rows = self.rows, []
        return rows

    def report(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Add the row of `step`: metrics, the means of what was learned, the steps per second, and where the time went.
        Returns it with the means of the episodes that have ended since the last one. Raises Diverged, and then adds no
        row; UsageError where one is not a number."""
        means = {name: total / count for name, (total, count) in self._learned().items()}
        self._sums, self._vectors, self._counts = {}, {}, Counter()
        episodes = {name: means.pop(name) for name in list(means) if name.startswith("charts/episodic_")}
        values: dict[str, float] = {}
        for name, value in (*metrics.items(), *means.items()):
            with told(f"the metric {name} must be one number"):
                values[name] = float(value)
        check_finite(values, *self.rows)
        now = self.wall_time()
        seconds = max(1e-9, now - self._last_row[1] - self._paused)
        self.sps = values["charts/SPS"] = round((step - self._last_row[0]) / seconds)
        if self._spent:
            spent = self._spent | {"other": max(0.0, seconds - sum(self._spent.values()))}
            values |= {f"time/{name}": round(value, 3) for name, value in spent.items()}
        self._last_row, self._paused, self._spent = (step, now), 0.0, dict.fromkeys(self._spent, 0.0)
        self.add_row(step, values)
        return values | episodes

    # ------------------------------------------------------------------ resuming
    def counters(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {
            "phase": self.phase,
            "iteration": self.iteration + 1,
            "sizes": self.sizes,
            "step": self.step,
            "due": self._due,
            "wall_time": self.wall_time(),
            "returns": self.returns,
            "lengths": self.lengths,
            "recent": list(self._recent),
            "learned": {name: list(pair) for name, pair in self._learned().items()},
        }

    def resume(self, saved: Mapping[str, Any], num_envs: int | None = None) -> None:
        """Continue from these counters. ValueError where they are of another number of environments, or of steps of an
        iteration."""
        if saved["returns"] is not None and len(saved["returns"]) != (num_envs or len(saved["returns"])):
            raise ValueError(f"there were {len(saved['returns'])} environments, not {num_envs}")
        if saved.get("sizes", self.sizes) != self.sizes:
            raise ValueError(
                f"an iteration had {saved['sizes']} environment steps, not {self.sizes}: it must keep them"
            )
        self.step, self.iteration, self._stopped = saved["step"], saved["iteration"] - 1, saved["phase"]
        self._due, self._elapsed = dict(saved["due"]), saved["wall_time"]
        self.returns, self.lengths = saved["returns"], saved["lengths"]
        self._recent.extend(saved["recent"])
        self._sums = {name: total for name, (total, _) in saved["learned"].items()}
        self._counts = Counter({name: count for name, (_, count) in saved["learned"].items()})
        self._last_row = (self.step, self._elapsed)
