"""Results: what a report needs to know of a finished run, as one small file that belongs into git.

In read.py `collect` turns a run folder into `{env_id}__{script}[__{variant}]__{seed}.json.gz` (about 3 kB), and
`read_all` reads such files, run folders, and TensorBoard folders of CleanRL and Stable-Baselines3. Steps are those of
the environment, summed over environments, times are seconds of training, returns are sums of raw rewards.
"""

import gzip
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from solorl.files import read_regular, write_atomically
from solorl.lab.results.statistics import Array

FORMAT = 1
DIGITS = 6  # significant digits of stored numbers
MOST_BYTES = 2**24  # of a result file, unpacked, and of each JSON file of a run folder
NOT_STORED = ("source", "method", "curves")
EVAL_COLUMNS = ("global_step", "wall_time", "mean", "std", "length")
DECLARED = ("success_rate", "episodic_cost")  # what some environments declare, see `envs.returns`
TRAIN_COLUMNS = ("global_step", "wall_time", "return", "length", "episodes")

Columns = dict[str, list[float]]


class ResultError(ValueError):
    """A file or folder holds no result that can be read; the message is one sentence that names it."""


@dataclass(frozen=True)
class Result:
    """One finished run. Its identity is (env_id, script, variant, seed)."""

    env_id: str
    script: str  # the script's name without .py
    seed: int
    variant: str = ""
    script_sha256: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    git: dict[str, Any] | None = None
    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    started: str = ""  # UTC, ISO 8601
    status: str = "finished"
    global_step: int = 0
    wall_time: float = 0.0
    eval: Columns = field(default_factory=dict)  # greedy evaluations, columns of equal length: EVAL_COLUMNS
    train: Columns = field(default_factory=dict)  # training episodes in bins of equal step width: TRAIN_COLUMNS
    last_100_episodes: float | None = None  # mean return of the last 100 training episodes
    sps: float | None = None  # median environment steps per second
    together: int = 1  # runs trained at once by one process: the time is that of all, the speed that of this one
    parents: list[str] = field(default_factory=list)  # scripts that the script says it comes from, the nearest first
    declared: dict[str, float] = field(default_factory=dict)  # DECLARED of the last evaluation that has them
    # metric -> (steps, values) of all rows, where they were asked for; not stored
    curves: dict[str, tuple[Array, Array]] = field(default_factory=dict, compare=False)
    first: bool = False  # whether its variant is the first of the study
    source: str = ""  # where it was read from; not stored
    method: str = ""  # what `named` calls its method; not stored

    @property
    def name(self) -> str:
        """How a report calls the method: what `named` says, else the script and, where there is one, the variant."""
        return self.method or f"{self.script} {self.variant}".strip()

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What no two files of one results folder share."""
        return (self.env_id, self.script, self.variant, self.seed)

    @property
    def file_name(self) -> str:
        """The name of its file in a results folder."""
        parts = [self.env_id, self.script, *([self.variant] if self.variant else []), str(self.seed)]
        return "__".join(re.sub(r"[^\w.+=,-]", "_", part) for part in parts) + ".json.gz"


# ---------------------------------------------------------------------- writing


def write(result: Result, folder: Path) -> Path:
    """Write a result into `folder`, which is made where it is missing. Raises OSError where that fails."""
    stored = {name: value for name, value in asdict(result).items() if name not in NOT_STORED}
    text = json.dumps(rounded({"format": FORMAT, **stored}), separators=(",", ":"), allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / result.file_name
    write_atomically(path, gzip.compress(text.encode(), compresslevel=9, mtime=0))
    return path


def rounded(value: Any, digits: int = DIGITS) -> Any:
    """Floats with `digits` significant digits, whole ones as integers, NaN and infinite ones as None; through lists and
    dicts."""
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, digits) for item in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


# ---------------------------------------------------------------------- reading
def read(path: Path) -> Result:
    """The result in a file that `collect` wrote. Raises ResultError, which names the file, where it is damaged."""
    with reading(path):
        with gzip.open(BytesIO(read_regular(path, MOST_BYTES))) as file:
            content = json.loads(file.read(MOST_BYTES))
        if content["format"] != FORMAT:
            raise ResultError(f"{path} has another format than {FORMAT}, which this version reads")
        stored = [name for name in Result.__dataclass_fields__ if name in content and name not in NOT_STORED]
        result = Result(**{name: content[name] for name in stored}, source=str(path))
        check(result)
        return result


@contextmanager
def reading(source: object) -> Iterator[None]:
    """What goes wrong inside, where a file or folder is read, becomes a ResultError that names it."""
    try:
        yield
    except ResultError:
        raise
    except KeyError as error:
        raise ResultError(f"{source} is damaged: it has no {error!s:.80}") from error
    except Exception as error:  # a file can be wrong in more ways than can be listed
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ResultError(f"{source} cannot be read: {' '.join(why.split()):.200}") from error


KINDS = get_type_hints(Result)


def check(result: Result) -> None:
    """ValueError where a value of a result is not of its kind, or its columns are not of numbers and equally long."""
    for name, hint in KINDS.items():
        kinds = [get_origin(each) or each for each in (get_args(hint) if isinstance(hint, UnionType) else [hint])]
        if not isinstance(getattr(result, name), (*kinds, *[int] * (float in kinds))):
            raise ValueError(f"its {name} is of another kind")
    for table, names in ((result.eval, EVAL_COLUMNS), (result.train, TRAIN_COLUMNS)):
        columns = [[math.isfinite(value) for value in table[name]] for name in names if table]
        if not all(map(all, columns)) or len(set(map(len, columns))) > 1:
            raise ValueError("its columns do not fit together")
    if not all(map(math.isfinite, result.declared.values())):
        raise ValueError("its declared numbers are not finite")
