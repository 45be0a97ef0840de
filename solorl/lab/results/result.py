"""Results: what a report needs to know of a finished run, as one small file that belongs into git.

In read.py `collect` turns a run folder into `{env_id}__{script}[__{variant}]__{seed}.json.gz` (about 3 kB), and
`read_all` reads such files, run folders, and TensorBoard folders of CleanRL and Stable-Baselines3. Steps are those of
the environment, summed over environments, times are seconds of training, returns are sums of raw rewards.
"""

import gzip
import json
import math
import re
import reprlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from solorl.files import read_regular, write_atomically

FORMAT = 1
DIGITS = 6  # significant digits of stored numbers
MOST_BYTES = 2**24  # of a result file, unpacked, and of each JSON file of a run folder
LARGEST = 1e100  # larger numbers are damage: their sums would be infinite
NOT_STORED = ("source", "method", "critic")
EVAL_COLUMNS = ("global_step", "wall_time", "mean", "std", "length")
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
    critic: dict[str, Columns] = field(default_factory=dict)  # CRITIC in bins of equal step width; not stored
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
    content = {"format": FORMAT, **asdict(result)}
    for name in NOT_STORED:
        del content[name]
    text = json.dumps(rounded(content), separators=(",", ":"), allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / result.file_name
    write_atomically(path, gzip.compress(text.encode(), compresslevel=9, mtime=0))
    return path


def rounded(value: Any) -> Any:
    """Floats with DIGITS significant digits, whole ones as integers, infinite ones as None; through lists and dicts."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{DIGITS}g}")
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


# ---------------------------------------------------------------------- reading
def read(path: Path) -> Result:
    """The result in a file that `collect` wrote. Raises ResultError, which names the file, where it is damaged."""
    with reading(path):
        return parse_bytes(bytes_of(path), str(path))


@contextmanager
def reading(source: object) -> Iterator[None]:
    """What goes wrong inside, where a file is read, becomes a ResultError that names it."""
    try:
        yield
    except ResultError:
        raise
    except (OSError, EOFError, ValueError, RecursionError, zlib.error, BadZipFile) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ResultError(f"{source} cannot be read: {why}") from error


def require_regular(path: Path) -> None:
    """ResultError for what is there and not a file, as a device."""
    if path.exists() and not path.is_file():
        raise ResultError(f"{path} cannot be read: it is not a regular file")


def bytes_of(path: Path) -> bytes:
    """The bytes of a file. Raises ResultError where there are too many, and for what is not a file, as a device."""
    with reading(path):
        return read_regular(path, MOST_BYTES)


def _read_some(file: Any, source: object) -> bytes:
    """All bytes of an open file, at most MOST_BYTES; else ResultError."""
    data: bytes = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ResultError(f"{source} cannot be read: it has more than {MOST_BYTES >> 20} MiB")
    return data


def parse_bytes(data: bytes, source: str) -> Result:
    """The result in the bytes of a result file. Raises ResultError, which names `source`, where it is none."""
    with reading(source), gzip.open(BytesIO(data)) as file:
        content = json.loads(_read_some(file, source))
    return parse(content, source)


def parse(content: Any, source: str) -> Result:
    """The result in the JSON of a result file. Raises ResultError, which names `source`, where it is none."""
    if not isinstance(content, dict) or "format" not in content:
        raise ResultError(f"{source} is not a result file")
    if content["format"] != FORMAT:
        form = reprlib.repr(content["format"])
        raise ResultError(f"{source} has format {form}, but this version reads format {FORMAT}")
    stored = [name for name in Result.__dataclass_fields__ if name in content and name not in NOT_STORED]
    try:
        return checked(Result(**{name: content[name] for name in stored}, source=source))
    except TypeError as error:
        raise ResultError(f"{source} is incomplete: {error}") from error


def checked(result: Result) -> Result:
    """The result itself. Raises ResultError, which names its source, where a value is not of the kind it should be."""
    for name, fits in KINDS.items():
        if not fits(getattr(result, name)):
            value = reprlib.repr(getattr(result, name))
            raise ResultError(f"{result.source} is damaged: its {name} cannot be {value}")
    return result


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_name(value: Any) -> bool:
    return _is_text(value) and 0 < len(value) < 256


def _is_shallow(value: Any, depth: int = 5) -> bool:
    """Whether lists and objects lie in each other at most so deep."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_shallow(item, depth - 1) for item in inside)


def _is_number(value: Any) -> bool:
    """Whether this is a number, finite and of a size that can be calculated with."""
    return type(value) in (int, float) and abs(value) <= LARGEST


def _is_amount(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_table(columns: Any, names: Sequence[str]) -> bool:
    """Whether `columns` is empty or holds the named columns, all of equal length, of numbers only, by step."""
    if columns == {}:
        return True
    if not isinstance(columns, dict) or not all(isinstance(columns.get(name), list) for name in names):
        return False
    numbers = all(_is_number(value) for name in names for value in columns[name])
    ascending = numbers and all(a <= b for a, b in pairwise(columns["global_step"]))
    return ascending and len({len(columns[name]) for name in names}) == 1


KINDS: dict[str, Callable[[Any], bool]] = {  # what the fields of a result must be
    **dict.fromkeys(("env_id", "script"), _is_name),
    "seed": lambda value: type(value) is int and _is_number(value),
    "variant": lambda value: value == "" or _is_name(value),
    **dict.fromkeys(("script_sha256", "python", "started", "status"), _is_text),
    **dict.fromkeys(("args", "versions", "machine"), lambda value: isinstance(value, dict) and _is_shallow(value)),
    "git": lambda value: value is None or (isinstance(value, dict) and _is_shallow(value)),
    **dict.fromkeys(("global_step", "wall_time"), _is_amount),
    "eval": lambda value: _is_table(value, EVAL_COLUMNS),
    "train": lambda value: _is_table(value, TRAIN_COLUMNS) and all(n > 0 for n in value.get("episodes", [])),
    "last_100_episodes": lambda value: value is None or _is_number(value),
    "sps": lambda value: value is None or _is_amount(value),
    "parents": lambda value: isinstance(value, list) and all(map(_is_name, value)),
    "first": lambda value: isinstance(value, bool),
    "together": lambda value: type(value) is int and 1 <= value <= LARGEST,
}
