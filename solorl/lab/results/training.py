"""One training with all that it has logged, out of a run folder, a TensorBoard folder or a result file."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from solorl import runfolder
from solorl.lab.results.reference_scores import reference
from solorl.lab.results.result import Result
from solorl.lab.results.run_folder import curves_of, read_run
from solorl.lab.results.statistics import Array
from solorl.lab.results.tensorboard import read_tensorboard

# Games of several sides: boards, PettingZoo's games of Atari, particles that are not one team.
VERSUS = re.compile(r"games/(TicTacToe|ConnectFour)-|atari/|(mpe|team)/simple_(adversary|crypto|push|tag|world_comm)_")


def real(value: Any) -> float | None:
    """The number that an argument is; None for all else, such as a text of a script from elsewhere."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class Training(Result):
    """A result with all curves, by the names of our metrics."""

    copy: Path | None = None  # the script that ran
    edited: bool = True  # whether it may be another than some version of the library has

    @property
    def steps(self) -> float:
        """The last step that any curve has."""
        return max((float(steps[-1]) for steps, _ in self.curves.values()), default=0.0)

    @property
    def total(self) -> float:
        """The steps that it was to train."""
        return real(self.args.get("total_timesteps")) or self.steps

    @property
    def gamma(self) -> float:
        """The discount factor; 0.99 where it is not known."""
        gamma = real(self.args.get("gamma"))
        return 0.99 if gamma is None else gamma

    def values(self, *names: str, begin: float = 0.0, end: float = 1.0) -> Array:
        """The values of the first curve that there is, between two fractions of the steps; empty without one."""
        for name in names:
            if name in self.curves:
                steps, values = self.curves[name]
                return values[(steps >= begin * self.steps) & (steps <= end * self.steps)]
        return np.zeros(0)

    @property
    def score(self) -> float | None:
        """The last evaluation, else the mean of the last tenth of the training episodes."""
        last = self.values("eval/episodic_return")[-1:]
        last = last if len(last) else self.values("charts/episodic_return", begin=0.9)
        return float(last.mean()) if len(last) else None

    @property
    def low(self) -> float | None:
        """The return of random actions: as measured, else that of the first episodes. None where these are another game
        than an evaluation, which other sides or opponents play: it may have further scores, eval/episodic_return_*."""
        known, first = reference(self.env_id), self.values("charts/episodic_return")[:10]
        other = VERSUS.match(self.env_id) or any(re.match("eval/episodic_return_(?!std$)", x) for x in self.curves)
        return known[0] if known else float(first.mean()) if len(first) and not other else None

    @property
    def kind(self) -> tuple[str, ...]:
        """What its seeds share: environment, script and its contents, arguments."""
        args = sorted((name, repr(value)) for name, value in self.args.items() if name != "seed")
        return self.env_id, self.script, self.script_sha256, repr(args)

    @property
    def is_solved(self) -> bool:
        """Whether its score is what counts as solved, where that is known; not where rewards have another scale."""
        known, score = reference(self.env_id), self.score
        return known is not None and score is not None and known[1] <= score <= known[1] + 10 * (known[1] - known[0])


# ---------------------------------------------------------------------- reading
def of_run(folder: Path) -> Training:
    """A run folder, also of a run that has not ended or with damaged rows. Raises ResultError where it is damaged."""
    result, path = read_run(folder, curves=True, strict=False), runfolder.config_of(folder).get("script_path", "")
    copy, clean = folder / f"{result.script}.py", not (result.git or {}).get("dirty")
    edited = not (clean and "algorithms" in Path(str(path)).parts)
    return Training(**vars(result), copy=copy if copy.is_file() else None, edited=edited)


def of_tensorboard(folder: Path) -> Training:
    """A TensorBoard folder of CleanRL or Stable-Baselines3, also one without returns. Raises ResultError."""
    return Training(**vars(read_tensorboard(folder, strict=False)))


def of_result(one: Result) -> Training:
    """A result file, which has returns only."""
    shown = (("charts/episodic_return", one.train, "return"), ("charts/episodic_length", one.train, "length"),
             ("eval/episodic_return", one.eval, "mean"), ("eval/episodic_return_std", one.eval, "std"))  # fmt: skip
    points = ((name, *point) for name, of, key in shown if of for point in zip(of["global_step"], of[key], strict=True))
    return Training(**vars(replace(one, curves=curves_of(points))))
