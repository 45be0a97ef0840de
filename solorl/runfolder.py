"""The run folder, the only wall between code that trains a run and code that looks at runs: its names, and reading and
writing them.

    config.json      arguments, command, versions, git commit, machine; written at the start
    status.json      {"status": running | finished | stopped | failed | diverged: ..., "global_step", "wall_time", ...}
    metrics.jsonl    a row a line, appended while a run trains, cut back to the checkpoint when it is resumed
    checkpoint/step_000000001024/, model.safetensors, model_best.safetensors, the script that ran
"""

import contextlib
import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from solorl.errors import UsageError, denied, refuse
from solorl.files import near, read_json, write_atomically
from solorl.terminal import warn

CONFIG, STATUS, METRICS, LOCK, STOP = "config.json", "status.json", "metrics.jsonl", ".lock", "stop"
MODEL, LAST_MODEL = "model.safetensors", "model_last.safetensors"  # of the best evaluation; at the end
CHECKPOINTS, PICTURE = "checkpoint", "learning_curve.png"
TOGETHER = "together.json"  # of seeds that are trained together: the names of all their folders
FORMAT = 2  # of a run folder; those of version 0.1 have 1, or none
TAIL = 60_000  # bytes at the end of the rows, which are enough for the newest ones

Row = dict[str, Any]  # metric -> value, with global_step (environment steps) and wall_time (seconds)


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, not one with a config.json of another kind."""
    config = read_json(folder / CONFIG)
    here = any((folder / name).exists() for name in (STATUS, METRICS, CHECKPOINTS))
    return here and isinstance(config.get("args"), dict) and {"script", "script_sha256"} <= config.keys()


def config_of(folder: Path) -> dict[str, Any]:
    """The circumstances of a run; empty where they cannot be read."""
    return read_json(folder / CONFIG)


def args_of(folder: Path) -> dict[str, Any]:
    """The arguments of a run; empty where they cannot be read."""
    args = config_of(folder).get("args")
    return args if isinstance(args, dict) else {}


def status_of(folder: Path) -> dict[str, Any]:
    """What a run has said last; empty where it cannot be read."""
    return read_json(folder / STATUS)


def as_written(args: Any) -> dict[str, Any]:
    """The arguments of a script as config.json has them: what JSON does not know is a list, an object or a text."""
    return json.loads(json.dumps(asdict(args), default=lambda x: getattr(x, "__qualname__", str(x))))


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Raises OSError."""
    write_atomically(folder / CONFIG, json.dumps(config, indent=2).encode())


def write_status(folder: Path, status: str, facts: dict[str, Any]) -> None:
    """Raises OSError."""
    write_atomically(folder / STATUS, json.dumps({"status": status, **facts}).encode())


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return steps_in(folder / CHECKPOINTS)


def steps_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder of them, oldest first."""
    return sorted(path for path in folder.glob("step_*") if path.name[5:].isdecimal() and path.is_dir())


def step_of(checkpoint: Path) -> int:
    """The environment steps after which a checkpoint was written."""
    return int(checkpoint.name[5:])


def newest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint of a run; None where there is none."""
    return max(map(step_of, checkpoints(folder)), default=None)


def lock(folder: Path) -> Any:
    """Keep other processes from training in a run folder: an open file, to be closed in the end. UsageError where one
    does so already; a warning where the file system has no locks."""
    with denied(f"the run folder {near(folder)} cannot be written"):
        file = open(folder / LOCK, "a")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"another process is training in {near(folder)}; it must end first") from None
    except OSError as error:
        warn(f"{near(folder)} cannot be locked ({error.strerror}): let no other process train there")
    return file


def refuse_old(folder: Path) -> None:
    """UsageError where a run folder was made by a version whose runs this one cannot resume."""
    what = f"the run in {near(folder)} was made by SoloRL 0.1 and can be played, but not resumed"
    how = "check out the version that made it (git checkout a9e391d), or start a new run"
    refuse(config_of(folder).get("format", 1) != FORMAT, f"{what}: {how}")


def is_locked(folder: Path) -> bool:
    """Whether a process trains in a run folder, as far as the file system tells."""
    try:
        with open(os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK)) as file:  # a FIFO is not waited for
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def status_now(folder: Path, said: str) -> str:
    """The status of a run that has `said` one last: a run that says running, but has no process, was killed."""
    return "killed" if said == "running" and not is_locked(folder) else said


def read_rows(path: Path, start: int = 0, key: str = "", strict: bool = False) -> tuple[list[Row], int]:
    """The rows from byte `start` on (negative: counted from the end), and the byte after the last of them.

    A last line without its line end is not a row: it is being written, or a kill cut it short. Any other line that
    cannot be read is left out, or refused with `strict`. With `key` only the rows that have it count.

    Raises OSError where the file cannot be read; with `strict` also UnicodeDecodeError, and ValueError with a sentence
    that names the damaged line.
    """
    with open(path, "rb") as file:
        start = file.seek(max(0, file.seek(0, os.SEEK_END) + start) if start < 0 else start)
        data = file.read()
    data = data[: data.rfind(b"\n") + 1]
    rows: list[Row] = []
    wanted = f"{json.dumps(key)}:" if key else ""
    for number, line in enumerate(data.decode(errors="strict" if strict else "replace").split("\n"), 1):
        if not line or wanted not in line:
            continue
        try:
            row = json.loads(line)
            why = "" if isinstance(row, dict) else "it holds no JSON object"
        except (ValueError, RecursionError) as error:
            row, why = {}, str(error)
        if why and strict:
            raise ValueError(f"{path} is damaged in line {number}: {why}")
        rows += [row] if row and not why and (not key or key in row) else []
    return rows, start + len(data)


def rows_of(path: Path, start: int = 0, key: str = "") -> list[Row]:
    """The rows of `read_rows`; none where the file cannot be read."""
    with contextlib.suppress(OSError):
        return read_rows(path, start, key)[0]
    return []
