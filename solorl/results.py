"""Results: what a report needs to know of a finished run, as one small file that belongs into git.

`collect` turns a run folder into `{env_id}__{script}[__{variant}]__{seed}.json.gz` (about 3 kB); `read_all` reads such
files, run folders, and TensorBoard folders of CleanRL and Stable-Baselines3. Steps are environment steps summed over
environments, times are seconds of training, returns are sums of raw rewards.
"""

import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from solorl.state import write_atomically

FORMAT = 1
BINS = 200  # rows that the training episodes of one run are thinned to
DIGITS = 6  # significant digits of stored numbers
LOCAL = ("runs_dir", "resume", "resume_changed", "wandb_entity")  # arguments that say where, not what
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
    source: str = ""  # where it was read from; not stored

    @property
    def name(self) -> str:
        """How a report calls the method: the script and, where there is one, the variant."""
        return f"{self.script} {self.variant}".strip()

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What no two results of one report share."""
        return (self.env_id, self.script, self.variant, self.seed)

    @property
    def file_name(self) -> str:
        """The name of its file in a results folder."""
        parts = [self.env_id, self.script, *([self.variant] if self.variant else []), str(self.seed)]
        return "__".join(re.sub(r"[^\w.+=,-]", "_", part) for part in parts) + ".json.gz"


# ---------------------------------------------------------------------- writing
def collect(run_dir: Path, folder: Path, variant: str = "") -> Path:
    """Turn the finished run in `run_dir` into one file in `folder` and return its path.

    The bytes depend on the run only, and the file appears whole or not at all. Raises ResultError (a ValueError) where
    the run is not finished or cannot be read, OSError where the file cannot be written.
    """
    result = read_folder(run_dir)
    if result.status != "finished":
        raise ResultError(f"{run_dir} is not finished ({result.status})")
    return write(replace(result, variant=variant), folder)


def write(result: Result, folder: Path) -> Path:
    """Write a result into `folder`, which is made where it is missing. Raises OSError where that fails."""
    content = {"format": FORMAT, **asdict(result)}
    del content["source"]
    text = json.dumps(_rounded(content), separators=(",", ":"), allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / result.file_name
    write_atomically(path, gzip.compress(text.encode(), compresslevel=9, mtime=0))
    return path


def _rounded(value: Any) -> Any:
    """Floats with DIGITS significant digits, whole ones as integers, infinite ones as None; through lists and dicts."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{DIGITS}g}")
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


# ---------------------------------------------------------------------- reading
def read(path: Path) -> Result:
    """The result in a file that `collect` wrote. Raises ResultError, which names the file, where it is damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}") from error
    return parse_bytes(data, str(path))


def parse_bytes(data: bytes, source: str) -> Result:
    """The result in the bytes of a result file. Raises ResultError, which names `source`, where it is none."""
    try:
        content = json.loads(gzip.decompress(data))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ResultError(f"{source} cannot be read: {_reason(error)}") from error
    return parse(content, source)


def parse(content: Any, source: str) -> Result:
    """The result in the JSON of a result file. Raises ResultError, which names `source`, where it is none."""
    if not isinstance(content, dict) or "format" not in content:
        raise ResultError(f"{source} is no result file")
    if content["format"] != FORMAT:
        raise ResultError(f"{source} has format {content['format']}, but this version reads format {FORMAT}")
    known = {name: content[name] for name in Result.__dataclass_fields__ if name in content and name != "source"}
    try:
        result = Result(**known, source=source)
        whole = _is_table(result.eval, EVAL_COLUMNS) and _is_table(result.train, TRAIN_COLUMNS)
        named = isinstance(result.env_id, str) and isinstance(result.script, str) and isinstance(result.seed, int)
    except TypeError as error:
        raise ResultError(f"{source} is incomplete: {error}") from error
    if not whole or not named:
        raise ResultError(f"{source} is damaged: its names, seed or columns are not of the kind they should be")
    return result


def _is_table(columns: Columns, names: Sequence[str]) -> bool:
    """Whether `columns` is empty or holds the named columns, all of equal length and of numbers only."""
    values = [columns[name] for name in names if name in columns]
    numbers = all(isinstance(value, (int, float)) for column in values for value in column)
    return not columns or (len(values) == len(names) and len({len(column) for column in values}) == 1 and numbers)


def read_all(paths: Iterable[Path]) -> tuple[list[Result], list[str]]:
    """Everything found in result files, run folders, TensorBoard folders, and folders of these at any depth.

    Returns the results, ordered as found, and a sentence for each file that could not be read or was left out. Of two
    runs with the same environment, script, variant and seed the one started last counts. Finds nothing silently:
    a path that does not exist or holds no result is a sentence, too.
    """
    found: dict[str, Callable[[], Result]] = {}
    missing = []
    for path in paths:
        sources = _sources(path)
        if not sources:
            missing.append(f"{path} holds no result" if path.exists() else f"there is no {path}")
        for source in sources:
            found[str(source.resolve())] = partial(read_folder if source.is_dir() else read, source)
    results, problems = gathered(found.values())
    return results, missing + problems


def gathered(readers: Iterable[Callable[[], Result]]) -> tuple[list[Result], list[str]]:
    """The results that functions return or fail to return with ResultError, and the sentences of `read_all`."""
    results: dict[tuple[str, str, str, int], Result] = {}
    problems: list[str] = []
    for read_one in readers:
        try:
            result = read_one()
            if result.status != "finished":
                raise ResultError(f"{result.source} is left out: the run is not finished ({result.status})")
            _add(result, results, problems)
        except ResultError as error:
            problems.append(str(error))
    return list(results.values()), problems


def _add(result: Result, results: dict[tuple[str, str, str, int], Result], problems: list[str]) -> None:
    """Put a result among the others; of two with the same key the later one stays. The same run twice is no problem."""
    other = results.get(result.key)
    if other is not None and _content(result) == _content(other):
        return  # a run folder and the file made of it
    if other is not None:
        newer, older = (result, other) if result.started >= other.started else (other, result)
        problems.append(f"{older.source} is left out: {newer.source} is a later run of the same seed")
        result = newer
    results[result.key] = result


def _content(result: Result) -> Any:
    """What is the same in a run folder and in the file made of it, and in no other run."""
    return _rounded([result.started, result.global_step, result.args, result.eval, result.last_100_episodes])


def _sources(path: Path) -> list[Path]:
    """The result files, run folders and TensorBoard folders at or below `path`, sorted by name."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    if _is_run(path):
        return [path]
    found = [] if not any(path.glob("events.out.tfevents.*")) else [path]
    for child in sorted(path.iterdir(), key=_natural):
        if child.is_dir() and not child.name.startswith("."):
            found += _sources(child)
        elif child.name.endswith(".json.gz") and not child.name.startswith("."):
            found.append(child)
    return found


def _natural(path: Path) -> list[Any]:
    """A key that sorts seed 2 before seed 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def _is_run(path: Path) -> bool:
    return (path / "config.json").is_file() and ((path / "metrics.jsonl").exists() or (path / "status.json").exists())


def read_folder(path: Path) -> Result:
    """The result of a run folder or of a TensorBoard folder. Raises ResultError where it is neither or damaged."""
    if (path / "config.json").is_file():
        return read_run(path)
    if any(path.glob("events.out.tfevents.*")):
        from solorl.foreign import read_tensorboard

        return read_tensorboard(path)
    raise ResultError(f"{path} is no run folder: it has neither config.json nor TensorBoard files")


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# ---------------------------------------------------------------------- run folders
def read_run(run_dir: Path) -> Result:
    """The result of a run folder (see `solorl.run`), its status as it is; the variant is the run's `exp_name`.

    Raises ResultError where a file is missing or damaged.
    """
    config, status = _read_json(run_dir / "config.json"), _read_json(run_dir / "status.json")
    rows = _rows(run_dir / "metrics.jsonl")
    try:
        return _result(run_dir, config, status, rows)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ResultError(f"{run_dir} is damaged: {type(error).__name__}: {error}") from error


def _result(run_dir: Path, config: dict[str, Any], status: dict[str, Any], rows: list[dict[str, Any]]) -> Result:
    args = dict(config["args"])
    total = int(status.get("global_step") or (rows[-1]["global_step"] if rows else 0))
    episodes = _select(rows, "charts/episodic_return", "charts/episodic_length")
    rates = sorted(float(row["charts/SPS"]) for row in rows if "charts/SPS" in row)
    variant = str(args.get("exp_name") or "")
    return Result(
        env_id=str(args["env_id"]),
        script=Path(config["script"]).stem,
        seed=int(args["seed"]),
        variant="" if variant == Path(config["script"]).stem else variant,
        script_sha256=str(config.get("script_sha256", "")),
        args=_portable(args),
        git=config.get("git"),
        python=str(config.get("python", "")),
        versions=dict(config.get("versions") or {}),
        machine=_described(dict(config.get("machine") or {})),
        started=str(config.get("started", "")),
        status=str(status.get("status", "unknown")),
        global_step=total,
        wall_time=float(status.get("wall_time") or 0.0),
        eval=evaluations(_select(rows, "eval/episodic_return", "eval/episodic_return_std", "eval/episodic_length")),
        train=thinned(episodes, total),
        last_100_episodes=last_mean([row[2] for row in episodes]),
        sps=middle(rates),
        together=_together(run_dir),
        source=str(run_dir),
    )


def _together(run_dir: Path) -> int:
    """How many runs the process trained at once."""
    path = run_dir / "together.json"
    return len(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else 1


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultError(f"{path} cannot be read: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise ResultError(f"{path} cannot be read: it holds no JSON object")
    return content


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a last line that a kill cut short is left out."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ResultError(f"{path} cannot be read: {_reason(error)}") from error
    try:
        return [json.loads(line) for line in lines[:-1] if line]  # whatever is behind the last line end is no row
    except ValueError as error:
        raise ResultError(f"{path} is damaged: {error}") from error


def _portable(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments without those that say where things lie; of any other absolute path only the last name."""
    return {
        name: Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
        for name, value in args.items()
        if name not in LOCAL
    }


def _described(machine: dict[str, Any]) -> dict[str, Any]:
    """The machine without what names it rather than describes it: of the system only its kind and version."""
    system = re.match(r"[A-Za-z]+(-\d+(\.\d+)*)?", str(machine.get("system", "")))
    return {**machine, "system": system.group() if system else ""}


def _select(rows: Sequence[dict[str, Any]], *names: str) -> list[list[float]]:
    """[global_step, wall_time, *values] of every row that has the first name, by step; missing values are 0."""
    chosen = [row for row in rows if names[0] in row]
    table = [[float(row.get(name) or 0.0) for name in ("global_step", "wall_time", *names)] for row in chosen]
    return sorted((row for row in table if all(map(math.isfinite, row))), key=lambda row: row[0])


def evaluations(rows: Sequence[Sequence[float]]) -> Columns:
    """The columns EVAL_COLUMNS of rows (global_step, wall_time, mean, std, length); of equal steps the last counts."""
    by_step = {int(row[0]): [int(row[0]), *row[1:]] for row in rows}
    return {name: [row[i] for row in by_step.values()] for i, name in enumerate(EVAL_COLUMNS)}


def thinned(episodes: Sequence[Sequence[float]], total: int) -> Columns:
    """At most BINS rows of equal step width of episodes (global_step, wall_time, return, length), ordered by step.

    A bin's step is its right edge, its time that of its last episode, its return and length are means over its
    episodes; bins without an episode are left out.
    """
    width = max(1, math.ceil(total / BINS))
    bins: dict[int, list[Sequence[float]]] = {}
    for row in episodes:
        bins.setdefault(math.ceil(max(1, row[0]) / width) * width, []).append(row)
    columns: Columns = {name: [] for name in TRAIN_COLUMNS}
    for edge, rows in bins.items():
        means = [sum(row[i] for row in rows) / len(rows) for i in (2, 3)]
        values = (min(edge, max(total, int(rows[-1][0]))), rows[-1][1], *means, len(rows))
        for name, value in zip(TRAIN_COLUMNS, values, strict=True):
            columns[name].append(value)
    return columns


def last_mean(returns: Sequence[float], count: int = 100) -> float | None:
    """The mean of the last `count` values, or of all where there are fewer; None for no value."""
    last = returns[-count:]
    return sum(last) / len(last) if last else None


def middle(values: Sequence[float]) -> float | None:
    """The median of sorted values; None for no value."""
    n = len(values)
    return (values[(n - 1) // 2] + values[n // 2]) / 2 if n else None
