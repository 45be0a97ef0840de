"""A plan on the disk: the tasks of one command as a table of JSON. Every field is checked when it is read, because a
study may come from somebody else."""

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from reprlib import repr as shown  # cuts what is long
from typing import Any

from solorl.errors import UsageError
from solorl.lab.studies.checks import LONGEST, check_name
from solorl.lab.studies.resources import MOST, Resources
from solorl.lab.studies.task import RESERVED, Script, Task

MAX_SEED = 2**31 - 1  # as scripts of ours have it
MOST_ATTEMPTS = 100
LONGEST_LEASE = 86_400.0  # seconds
LONGEST_PATH = 4096  # characters
LIMITS = {"cores": range(1, MOST + 1), "gpus": range(MOST + 1), "memory": range(10**9 + 1), "time": range(10**9 + 1)}


def as_table(name: str, limit: int, lease: float, package: dict[str, str], tasks: Iterable[Task]) -> dict[str, Any]:
    """A plan as JSON has it."""
    tasks = list(tasks)
    scripts = {
        script.sha256: {"path": str(script.path.resolve()), "ours": script.ours, "args": list(script.args)}
        for script in {task.script.sha256: task.script for task in tasks}.values()
    }
    lines = [
        {"id": task.id, "script": task.script.sha256, "env_id": task.env_id, "seed": task.seed,
         "flags": {name: list(values) for name, values in task.flags.items()},
         "variant": task.variant, "python": task.python, "resources": asdict(task.resources)}
        for task in tasks
    ]  # fmt: skip
    return {"format": 1, "name": name, "attempts": limit, "lease": lease, "solorl": package, "scripts": scripts,
            "tasks": lines}  # fmt: skip


def read_table(table: Any) -> tuple[str, int, float, dict[str, str], dict[str, Task]]:
    """Name, limit of attempts, lease, package and tasks (by id) of a plan; ValueError, in few words, where one of them
    cannot be."""
    _take(table, "format", int, lambda number: number == 1)
    name = _take(table, "name", str, _is_name)
    limit = _take(table, "attempts", int, range(1, MOST_ATTEMPTS + 1).__contains__)
    lease = float(_take(table, "lease", float | int, lambda seconds: 1 <= seconds <= LONGEST_LEASE))
    package = _take(table, "solorl", dict)
    package = {"version": _take(package, "version", str, _is_text), "sha256": _take(package, "sha256", str, _is_hash)}
    scripts = {sha: _script(sha, about) for sha, about in _take(table, "scripts", dict).items()}
    tasks = [_task(about, scripts) for about in _take(table, "tasks", list)]
    return name, limit, lease, package, {task.id: task for task in tasks}


def _script(sha: str, about: Any) -> Script:
    if not _is_hash(sha):
        raise ValueError(f"{shown(sha)} is not the hash of a script")
    path = _take(about, "path", str, lambda path: _is_path(path) and path.endswith(".py") and "\\" not in path)
    args = _take(about, "args", list, lambda args: all(map(_is_text, args)))
    return Script(Path(path), sha, _take(about, "ours", bool), tuple(args))


def _task(about: Any, scripts: dict[str, Script]) -> Task:
    sha = _take(about, "script", str, scripts.__contains__)
    flags = {
        name: tuple(_take(about["flags"], name, list, lambda values: all(map(_is_text, values))))
        for name in _take(about, "flags", dict, lambda flags: all(map(_is_flag, flags)))
    }
    wanted = _take(about, "resources", dict, lambda each: each.keys() == LIMITS.keys())
    for key, allowed in LIMITS.items():
        _take(wanted, key, int, allowed.__contains__)
    task = Task(
        scripts[sha],
        _take(about, "env_id", str, lambda text: text and _is_text(text)),
        _take(about, "seed", int, range(MAX_SEED + 1).__contains__),
        flags,
        _take(about, "variant", str, _is_text),
        _take(about, "python", str, _is_path),
        Resources(**wanted),
    )
    if _take(about, "id", str) != task.id:
        raise ValueError(f"the task {shown(about['id'])} is not what its id says")
    return task


def _take(table: Any, key: str, kind: Any, right: Callable[[Any], Any] = lambda value: True) -> Any:
    """A value of a table; ValueError where it is missing, of another kind, or not right."""
    if not isinstance(table, dict) or key not in table:
        raise ValueError(f"it has no {key}")
    value = table[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or not right(value):
        raise ValueError(f"{shown(key)} cannot be {shown(value)}")
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= LONGEST


def _is_path(value: str) -> bool:
    return value.isprintable() and len(value) <= LONGEST_PATH


def _is_hash(value: str) -> bool:
    return re.fullmatch("[0-9a-f]{64}", value) is not None


def _is_flag(value: str) -> bool:
    return _is_text(value) and re.match("--[A-Za-z]", value) is not None and value.replace("_", "-") not in RESERVED


def _is_name(value: str) -> bool:
    try:
        check_name(value, "")
    except (UsageError, UnicodeEncodeError):
        return False
    return value.isprintable()
