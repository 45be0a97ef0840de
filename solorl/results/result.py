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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from solorl.args.arguments import RunArgs
from solorl.catalog.header import origins
from solorl.files import write_atomically
from solorl.metrics import read_rows
from solorl.terminal import plain

FORMAT = 1
BINS = 200  # rows that the training episodes of one run are thinned to
DIGITS = 6  # significant digits of stored numbers
MOST_BYTES = 2**24  # of a result file, unpacked, and of each JSON file of a run folder
LARGEST = 1e100  # larger numbers are damage: their sums would be infinite
LOCAL = ("runs_dir", "resume", "resume_changed", "wandb_entity")  # arguments that say where, not what
SAME = {"env_id", "seed", "num_seeds"}  # arguments in which the runs of one method may differ
BUDGET = {"total_timesteps", "target_return"}  # how long a run trains: of a method on one environment the same
NOT_OWN = (SAME | {item.name for item in fields(RunArgs)} | {"torch_threads"}) - BUDGET  # and what no script adds
# What a critic learns -> the metrics that say it, of which a run has the first one that it logs.
CRITIC = {
    "loss": ("losses/qf_loss", "losses/td_loss", "losses/value_loss"),
    "value": ("losses/q_values", "losses/qf_values", "losses/qf1_values"),
}
NOT_STORED = ("source", "method", "critic")
EVAL_COLUMNS = ("global_step", "wall_time", "mean", "std", "length")
TRAIN_COLUMNS = ("global_step", "wall_time", "return", "length", "episodes")
CRITIC_COLUMNS = ("global_step", "wall_time", "mean", "rows")

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
        return parse_bytes(_bytes(path), str(path))
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}") from error


def _bytes(path: Path) -> bytes:
    """The bytes of a file. Raises ResultError where there are too many, and for what is not a file, as a device."""
    if path.exists() and not path.is_file():
        raise ResultError(f"{path} cannot be read: it is not a regular file")
    with open(path, "rb") as file:
        return _read_some(file, path)


def _read_some(file: Any, source: object) -> bytes:
    """All bytes of an open file, at most MOST_BYTES; else ResultError."""
    data: bytes = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ResultError(f"{source} cannot be read: it has more than {MOST_BYTES >> 20} MiB")
    return data


def parse_bytes(data: bytes, source: str) -> Result:
    """The result in the bytes of a result file. Raises ResultError, which names `source`, where it is none."""
    try:
        with gzip.open(BytesIO(data)) as file:
            content = json.loads(_read_some(file, source))
    except ResultError:
        raise
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise ResultError(f"{source} cannot be read: {_reason(error)}") from error
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
    "together": lambda value: type(value) is int and 1 <= value <= LARGEST,
}


def gathered(
    readers: Iterable[Callable[[], Result]], whole: bool = False, unfinished: bool = False
) -> tuple[list[Result], list[str]]:
    """The results that functions return or fail to return with ResultError, and the sentences of `read_all`."""
    results: list[Result] = []
    problems: list[str] = []
    for read_one in readers:
        try:
            result = _printable(read_one())
            if result.status != "finished" and not unfinished:
                raise ResultError(f"{result.source} is left out: the run is not finished ({result.status[:99]})")
            results.append(result)
        except ResultError as error:
            problems.append(plain(str(error)))
    kept, left_out = _newest(named(_each_once(results), whole))
    return kept, problems + left_out


def _printable(result: Result) -> Result:
    names = ("env_id", "script", "variant", "status", "source")
    texts: dict[str, Any] = {name: plain(getattr(result, name)) for name in names}
    return replace(result, **texts)


def _each_once(results: Sequence[Result]) -> list[Result]:
    """The results without the copies: a run folder and the file made of it are one, and its variant is the file's."""
    contents = [repr((one.env_id, one.script, one.seed, _content(one))) for one in results]
    with_variant = {content for one, content in zip(results, contents, strict=True) if one.variant}
    kept: dict[tuple[str, str], Result] = {}
    for one, content in zip(results, contents, strict=True):
        if one.variant or content not in with_variant:
            kept.setdefault((content, one.variant), one)
    return list(kept.values())


def _content(result: Result) -> Any:
    """What a run folder and the file made of it share, and no other run."""
    return _rounded([result.started, result.global_step, result.args, result.eval, result.last_100_episodes])


def _newest(results: Sequence[Result]) -> tuple[list[Result], list[str]]:
    """One result for each environment, method and seed, the newest, and a sentence for each of the others."""
    kept: dict[tuple[str, str, int], Result] = {}
    left_out = []
    for result in results:
        key = (result.env_id, result.name, result.seed)
        other = kept.setdefault(key, result)
        if other is not result:
            kept[key] = best = max(other, result, key=lambda one: (one.started, one.global_step))
            worse = other if best is result else result
            left_out.append(
                f"{worse.source} is left out: {best.source} is newer, of the same seed and {_alike(best, worse)}"
            )
    return list(kept.values()), left_out


def _alike(one: Result, other: Result) -> str:
    """The same settings, or what else than these two runs differ in."""
    differing = sorted(name for name in one.args.keys() | other.args if one.args.get(name) != other.args.get(name))
    differing += ["the script itself"] * (one.script_sha256 != other.script_sha256)
    return f"the same settings{' except ' * bool(differing)}{', '.join(differing)}"


# ---------------------------------------------------------------------- names of methods
def named(results: Sequence[Result], whole: bool = False) -> list[Result]:
    """The results with the names of their methods: the script, its variant, and the arguments in which runs differ.

    Runs of one script and variant on one environment belong to one method if the script's own arguments are equal;
    those of RunArgs count where a variant is made of them. What differs is in the name on every environment, but how
    long a run trains (BUDGET) only where it differs, because each environment has its own. A variant that only lists
    flags, as `solo bench` has it, is not a name: the arguments say it. With `whole` it is one like any other.
    """
    listed = [None if whole and one.variant else _listed_flags(one) for one in results]
    groups: dict[tuple[str, str], list[int]] = {}
    for i, one in enumerate(results):
        groups.setdefault((one.script, one.variant if listed[i] is None else ""), []).append(i)
    names = {}
    for (script, variant), members in groups.items():
        flags = {name for i in members for name in listed[i] or ()} - SAME
        differing = _differing([results[i] for i in members], flags)
        for i in members:
            args, env_id = _arguments(results[i]), results[i].env_id
            counted = {name for name, env in differing if name not in BUDGET or env == env_id}
            words = [_word(name, args[name]) for name in sorted(counted) if name in args]
            names[i] = " ".join(filter(None, [script, variant, *words]))
    return [replace(one, method=names[i]) for i, one in enumerate(results)]


def _arguments(result: Result) -> dict[str, Any]:
    """The arguments as their file would hold them; those of other libraries' scripts are flags, with dashes."""
    return {name.replace("-", "_"): _rounded(value) for name, value in result.args.items()}


def _listed_flags(result: Result) -> list[str] | None:
    """The arguments whose values the variant lists, as in `learning-rate=0.001 no-anneal-lr`; None for a name."""
    args, found = _arguments(result), []
    for word in result.variant.split():
        flag, _, value = word.partition("=")
        name = flag.replace("-", "_")
        if name not in args and name.startswith("no_") and args.get(name[3:]) is False:
            name = name[3:]
        elif name not in args or not _is_value(args[name], value):
            return None
        found.append(name)
    return found


def _is_value(value: Any, text: str) -> bool:
    """Whether `text` is how a command line has this value, "" for a switch."""
    if not text or isinstance(value, bool):
        return not text and (value is True or value == "")
    try:
        return float(value) == float(text)
    except (TypeError, ValueError, OverflowError):
        return _text(value).replace(" ", ",") == text


def _differing(results: Sequence[Result], flags: set[str]) -> set[tuple[str, str]]:
    """The own arguments of a script, and `flags`, that have several values on one environment, with that environment.

    A missing value is one only among `flags`: a script that got a new argument is not another method.
    """
    values: dict[tuple[str, str], set[str]] = {}
    for result in results:
        args = _arguments(result)
        own = [name for name in args if name not in NOT_OWN]
        for name in {*own, *flags}:
            values.setdefault((name, result.env_id), set()).add(repr(args.get(name)))
    return {key for key, several in values.items() if len(several) > 1}


def _word(name: str, value: Any) -> str:
    """An argument in the name of a method: `learning-rate=0.001`, `no-anneal-lr`."""
    flag = name.replace("_", "-")
    if isinstance(value, bool) or value == "":
        return f"no-{flag}" if value is False else flag
    return f"{flag}={plain(_text(value))}"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# ---------------------------------------------------------------------- run folders
def read_run(run_dir: Path) -> Result:
    """The result of a run folder (see `solorl.run.verbs`), its status as it is; the variant is the run's `exp_name`.

    Raises ResultError where a file is missing or damaged.
    """
    config, status = _read_json(run_dir / "config.json"), _read_json(run_dir / "status.json")
    rows = _rows(run_dir / "metrics.jsonl")
    try:
        return checked(_result(run_dir, config, status, rows))
    except ResultError:
        raise
    except KeyError as error:
        raise ResultError(f"{run_dir} is damaged: its files have no {error}") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ResultError(f"{run_dir} is damaged: {type(error).__name__}: {error}") from error


def _result(run_dir: Path, config: dict[str, Any], status: dict[str, Any], rows: list[dict[str, Any]]) -> Result:
    args = config["args"]
    if not isinstance(args, dict):
        raise ResultError(f"{run_dir / 'config.json'} is damaged: its args are not a JSON object")
    total = int(status.get("global_step") or (rows[-1]["global_step"] if rows else 0))
    episodes = _select(rows, "charts/episodic_return", "charts/episodic_length")
    rates = sorted(float(row["charts/SPS"]) for row in rows if "charts/SPS" in row)
    variant = str(args.get("exp_name") or "")
    return Result(
        env_id=args["env_id"],
        script=Path(config["script"]).stem,
        seed=args["seed"],
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
        critic=_critic(rows, total),
        last_100_episodes=last_mean([row[2] for row in episodes]),
        sps=middle(rates),
        together=_together(run_dir),
        parents=_parents(run_dir / Path(config["script"]).name),
        source=str(run_dir),
    )


def _critic(rows: Sequence[dict[str, Any]], total: int) -> dict[str, Columns]:
    """What a run has logged of its critic."""
    logged = {name for row in rows for name in row}
    names = {kind: next((name for name in known if name in logged), "") for kind, known in CRITIC.items()}
    return {kind: thinned(_select(rows, name), total, CRITIC_COLUMNS) for kind, name in names.items() if name}


def _parents(script: Path) -> list[str]:
    """The scripts that the header of a run's copy of its script names."""
    return origins(script) if script.is_file() else []


def _together(run_dir: Path) -> int:
    """How many runs the process trained at once."""
    path = run_dir / "together.json"
    return len(_json(path, list)) if path.exists() else 1


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = _json(path, dict)
    return content


def _json(path: Path, kind: type) -> Any:
    """The object or list in a JSON file. Raises ResultError where it holds none."""
    try:
        content = json.loads(_bytes(path))
    except ResultError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ResultError(f"{path} cannot be read: {_reason(error)}") from error
    if not isinstance(content, kind):
        raise ResultError(f"{path} cannot be read: it holds no JSON {'list' if kind is list else 'object'}")
    return content


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a last line that a kill cut short is left out. Raises ResultError."""
    try:
        if path.exists() and not path.is_file():
            raise ResultError(f"{path} cannot be read: it is not a regular file")
        return read_rows(path, strict=True)[0]
    except ResultError:
        raise
    except (OSError, UnicodeError) as error:
        raise ResultError(f"{path} cannot be read: {_reason(error)}") from error
    except ValueError as error:
        raise ResultError(str(error)) from error


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


def thinned(episodes: Sequence[Sequence[float]], total: int, names: Sequence[str] = TRAIN_COLUMNS) -> Columns:
    """At most BINS rows of equal step width of episodes (global_step, wall_time, return, length), ordered by step.

    A bin's step is its right edge, its time that of its last episode, its return and length are means over its
    episodes; bins without an episode are left out. With other `names`, the last one for the number of rows in a bin,
    of other rows.
    """
    width = max(1, math.ceil(total / BINS))
    bins: dict[int, list[Sequence[float]]] = {}
    for row in episodes:
        bins.setdefault(math.ceil(max(1, row[0]) / width) * width, []).append(row)
    columns: Columns = {name: [] for name in names}
    for edge, rows in bins.items():
        means = [sum(column) / len(rows) for column in list(zip(*rows, strict=True))[2:]]
        values = (min(edge, max(total, int(rows[-1][0]))), rows[-1][1], *means, len(rows))
        for name, value in zip(names, values, strict=True):
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
