"""What `solo bench` and `solo tune` are to run: scripts, flags, suites, and the tasks they come to.

A task is one script on one environment with one seed and fixed flags. Its `id` names these four and holds a hash of the
script's contents, so that a changed script is a new task and the same command finds its tasks again.
"""

import ast
import json
import math
import os
import re
import shutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from reprlib import repr as shown  # cuts what is long
from typing import Any

from solorl.catalog.header import fields_of, find_path, parse_source
from solorl.envs.ids import check_env_id_of
from solorl.errors import UsageError, denied, did_you_mean, refuse, told
from solorl.files import expanded, missing, sha256
from solorl.lab.results.result import Result
from solorl.lab.studies.checks import check_texts, refuse_unknown
from solorl.lab.studies.engines import ENGINES
from solorl.lab.studies.resources import Resources, read_resources
from solorl.lab.studies.task import Flags, Script, Task
from solorl.scripts import facts_of

JOB_KEYS = "script scripts python env_ids seeds num_seeds start_seed flags variants env_flags resources".split()
MAX_SEED = 2**31 - 1  # as scripts of ours have it
MAX_RUNS = 100_000  # of one command
MAX_FILE_NAME = 240  # bytes of a result file's name; systems allow 255, and it is written under a longer one


# ---------------------------------------------------------------------- flags
def parse_flags(words: Sequence[str]) -> Flags:
    """`["--a", "1", "--b=2", "--no-c"]` as Flags; UsageError for a word that belongs to no flag."""
    flags, name = Flags(), ""
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word.partition("=")
            flags = merge(flags, {name: (value,) if equals else ()})
        elif name:
            flags[name] += (word,)
        else:
            raise UsageError(f"{word} is not a flag; flags for the scripts look like --learning-rate 1e-3")
    return flags


def table_flags(table: Any, where: str) -> Flags:
    """A TOML table `{learning-rate = 1e-3, anneal-lr = false}` or a list of words as Flags; else UsageError."""
    if isinstance(table, list) and all(isinstance(word, str) for word in table):
        return parse_flags(table)
    refuse(not isinstance(table, dict), f"{where} must be a table such as {{learning-rate = 1e-3}} or a list of words")
    return merge(*(as_flag(name.removeprefix("--"), value, where) for name, value in table.items()))


def as_flag(name: str, value: Any, where: str = "a flag") -> Flags:
    """One named value as on a command line: a boolean as --x or --no-x, a list as several words."""
    if not re.fullmatch(r"[A-Za-z][^\s=]*", name):
        raise UsageError(f"{where}: {shown(name)} is not a flag; flags look like learning-rate")
    if isinstance(value, bool):
        return {f"--{'' if value else 'no-'}{name}": ()}
    values = value if isinstance(value, list) else [value]
    for part in values:
        good = isinstance(part, int | str) or (isinstance(part, float) and math.isfinite(part))
        need(good, f"{where}: {name}", "a finite number, a text, true, false or a list", value)
    return {f"--{name}": tuple(map(str, values))}


def merge(*parts: Flags) -> Flags:
    """All flags together; a later one replaces an earlier one, also --no-x an --x, and --a_b an --a-b."""
    merged: dict[str, tuple[str, tuple[str, ...]]] = {}  # by names with dashes: names as they were given, values
    for given, values in [item for part in parts for item in part.items()]:
        name = given.replace("_", "-")
        merged.pop("--" + name[5:] if name.startswith("--no-") else "--no-" + name[2:], None)
        merged[name] = given, values
    return dict(merged.values())


def short(flags: Flags) -> str:
    """Flags as a name people can read: `learning-rate=0.001 no-anneal-lr`."""
    return " ".join("=".join(filter(None, (name[2:], ",".join(values)))) for name, values in sorted(flags.items()))


# ---------------------------------------------------------------------- scripts
def load_script(name: str, near: Path | None = None) -> Script:
    """The script of a name or path, looked for next to `near` first; UsageError where there is none."""
    there = near / name if near else None
    with denied(f"the script {shown(name)} cannot be read"):  # its name is too long, for example
        path = there if there and there.is_file() and there.suffix == ".py" else find_path(name)
    tree = parse_source(path)
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    names = {each.name for node in imports if node.module == "solorl" and not node.level for each in node.names}
    return Script(path, sha256(path), "RunArgs" in names, tuple(fields_of(tree)), facts_of(path).env_kind)


def find_python(name: str, near: Path | None = None) -> str:
    """The absolute path of another Python, looked for next to `near` first, and on the PATH where it has no folder.

    UsageError where there is none that can be executed.
    """
    given = str(expanded(name)) if name.startswith("~") else name
    if found := next(filter(None, map(shutil.which, [*([str(near / given)] if near else []), given])), None):
        return os.path.abspath(found)  # noqa: PTH100  not resolved: a virtual environment is known by its link
    inside = Path(given) / "bin/python"
    more = f"; did you mean {inside}?" if inside.is_file() else "; name one such as venv/bin/python"
    raise UsageError(f"there is no Python interpreter {shown(name)} that can be executed{more}")


# ---------------------------------------------------------------------- tasks
@dataclass
class Plan:
    """All tasks of one command."""

    name: str
    tasks: list[Task]
    engines: dict[str, dict[str, str]] = field(default_factory=dict)  # engine -> its options, as the suite has them


def make_tasks(
    scripts: Iterable[Script], env_ids: Iterable[str], seeds: Sequence[int], variants: Mapping[str, Flags],
    env_flags: Mapping[str, Flags] | None = None, python: str = "", resources: Resources = Resources(),  # noqa: B008
) -> list[Task]:  # fmt: skip
    """Every script with every variant's flags on every environment with every seed, run by `python`.

    UsageError for a wrong flag, an unknown environment, and more than MAX_RUNS. Ids `module:Name` are not looked at:
    that would execute the module, see `of_modules`.
    """
    found, rows = list[Task](), [*product(scripts, variants.items(), env_ids)]
    if len(rows) * len(seeds) > MAX_RUNS:
        raise UsageError(f"{len(rows) * len(seeds):,} runs are too many for one command, which may have {MAX_RUNS:,}")
    for script, (name, flags), env_id in rows:
        merged = merge(flags, (env_flags or {}).get(env_id, {}))
        script.check(merged)
        if script.ours and script.args:  # it takes both spellings
            merged = {flag.replace("_", "-"): values for flag, values in merged.items()}
        if script.ours and not python and ":" not in env_id:  # another Python has environments of its own
            check_env_id_of(script.path, env_id, script.env_kind)
        found += [Task(script, env_id, seed, merged, name, python, resources) for seed in seeds]
    return found


def of_modules(tasks: Iterable[Task]) -> list[Task]:
    """A task for each script and each environment `module:Name`, which is unknown before the module is imported."""
    ours = [task for task in tasks if task.script.ours and not task.python and ":" in task.env_id]
    return list({(task.script.path, task.env_id): task for task in ours}.values())


def ordered(tasks: Sequence[Task], by_seed: bool = True) -> list[Task]:
    """Each task once; with `by_seed` all of one seed before those of the next: half a suite is then a smaller suite.

    UsageError where the results could not tell two tasks apart, and where the name of a result file would be too long.
    """
    known: dict[str, Task] = {}
    for task in tasks:
        name = Result(task.env_id, task.script.name, task.seed, task.variant).file_name
        if len(name.encode()) > MAX_FILE_NAME:
            long = max(task.variant, task.env_id, task.script.name, key=len)
            raise UsageError(f"the name {shown(long)} is too long for the name of a result file; give a shorter one")
        other = known.setdefault(name, task)
        if (other.id, other.python) != (task.id, task.python):
            how = "rename a script, or give two sets of flags as variants with a name"
            raise UsageError(f"{other} and {task} are different and would have the same result file, {name}; {how}")
    once = list({task.id: task for task in tasks}.values())
    return sorted(once, key=lambda task: task.seed) if by_seed else once


# ---------------------------------------------------------------------- suites
def load_suite(
    path: Path, extra: Flags, only: Sequence[str] = (), num_seeds: int | None = None, python: str = "",
    given: Mapping[str, Any] | None = None,
) -> Plan:  # fmt: skip
    """The tasks of a suite file with `extra` flags on each; of the environments `only`, the first `num_seeds` seeds;
    run by `python` where it is given; with the resources that are `given`, else those of the suite.

    UsageError for a file that cannot be read, an unknown key, a value of the wrong kind, and an environment in `only`
    that the suite does not have.
    """
    table = read_toml(path)
    refuse_unknown(table, ("name", "python", "in_order", "resources", "engine", "job"), str(path))
    in_order, jobs, name = table.get("in_order", False), table.get("job"), table.get("name", path.stem)
    need(isinstance(in_order, bool), f"{path}: in_order", "true or false", in_order)
    if not (isinstance(jobs, list) and jobs and all(isinstance(job, dict) for job in jobs)):
        raise UsageError(f"{path} has no [[job]]; a suite is a list of them")
    good = isinstance(name, str) and re.fullmatch(r"[\w.-]{1,240}", name) and name.strip(".")
    need(good, f"{path}: name", "the name of a folder, of letters, digits, points and dashes", name)
    for job in jobs:
        own = _table(job, "resources", f"a [[job]] of {path}")
        job["resources"] = {**_table(table, "resources", str(path)), **own, **(given or {})}
        job["python"] = job.get("python", table.get("python", ""))
    tasks = [task for job in jobs for task in ordered(_job_tasks(job, path, extra, num_seeds, python))]
    for env_id in only:
        if env_id not in (known := {task.env_id for task in tasks}):
            raise UsageError(f"{path} has no environment {env_id}{did_you_mean(env_id, known)}")
    tasks = [task for task in tasks if not only or task.env_id in only]
    engines = _table(table, "engine", str(path))
    refuse_unknown(engines, ("local", *ENGINES), f"engine in {path}")
    options = {name: {k: str(value) for k, value in _table(engines, name, str(path)).items()} for name in engines}
    return Plan(name, ordered(tasks, by_seed=not in_order), options)


def _table(table: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """A table in a table, empty where there is none; UsageError where it is something else."""
    found = table.get(key, {})
    need(isinstance(found, dict), f"{key} in {where}", "a table", found)
    return dict(found)


def _job_tasks(job: dict[str, Any], path: Path, extra: Flags, limit: int | None, python: str) -> list[Task]:
    where = f"a [[job]] of {path}"
    refuse_unknown(job, JOB_KEYS, where)
    refuse(("script" in job) == ("scripts" in job), f"{where} must have script or scripts, and not both")
    names = texts(job, "scripts" if "scripts" in job else "script", where)
    scripts = [load_script(name, path.parent) for name in dict.fromkeys(names)]
    own = job.get("python", "")
    need(isinstance(own, str), f"python in {where}", "the path of a Python", own)
    python = python or (find_python(own, path.parent) if own else "")
    env_ids = list(dict.fromkeys(texts(job, "env_ids", where)))
    flags = table_flags(job.get("flags", {}), f"flags in {where}")
    variants = _named_flags(job, "variants", where) or {"": {}}
    variants = {name: merge(flags, part, extra) for name, part in variants.items()}
    if len({json.dumps(sorted(part.items())) for part in variants.values()}) < len(variants):
        raise UsageError(f"two variants in {where} have the same flags: {', '.join(variants)}")
    env_flags = {env_id: merge(part, extra) for env_id, part in _named_flags(job, "env_flags", where).items()}
    if wrong := [env_id for env_id in env_flags if env_id not in env_ids]:
        raise UsageError(f"env_flags in {where}: {wrong[0]} is not in env_ids{did_you_mean(wrong[0], env_ids)}")
    resources = read_resources(job["resources"], f"resources of {where}")
    return make_tasks(scripts, env_ids, _seeds(job, where)[:limit], variants, env_flags, python, resources)


def _named_flags(job: dict[str, Any], key: str, where: str) -> dict[str, Flags]:
    return {name: table_flags(value, f"{key}.{name} in {where}") for name, value in _table(job, key, where).items()}


def _seeds(job: dict[str, Any], where: str) -> Sequence[int]:
    """`seeds` as a list or as "1-10", or `num_seeds` of them from `start_seed` (default 1) on."""
    seeds = job.get("seeds")
    if (seeds is None) == ("num_seeds" not in job) or (seeds is not None and "start_seed" in job):
        raise UsageError(f"{where} must have either seeds, or num_seeds with or without start_seed")
    if seeds is None:
        return seed_range(job["num_seeds"], job.get("start_seed", 1), where)
    match = re.fullmatch(r"(\d{1,20})-(\d{1,20})", seeds) if isinstance(seeds, str) else None
    if match and int(match[1]) <= int(match[2]):
        return seed_range(int(match[2]) - int(match[1]) + 1, int(match[1]), where)
    good = isinstance(seeds, list) and seeds and all(type(seed) is int and 0 <= seed <= MAX_SEED for seed in seeds)
    need(good, f"seeds in {where}", 'a list such as [1, 2, 3] or a text such as "1-10", all smaller than 2**31', seeds)
    return list(dict.fromkeys(seeds))


def seed_range(count: Any, first: Any, where: str) -> range:
    """`count` seeds from `first` on; UsageError unless both are integers, at least 1 and 0, and not too large."""
    given = f"{shown(count)} from {shown(first)} on"
    if type(count) is not int or type(first) is not int or count < 1 or first < 0:
        raise UsageError(f"{where}: there must be at least 1 seed, the first at least 0, both whole, not {given}")
    if count > MAX_RUNS or first + count - 1 > MAX_SEED:
        raise UsageError(f"{where}: there may be {MAX_RUNS:,} seeds at most, all smaller than 2**31, not {given}")
    return range(first, first + count)


def texts(table: dict[str, Any], key: str, where: str) -> list[str]:
    """A value that is a text or a list of texts, as a list; UsageError for anything else or nothing."""
    value = table.get(key)
    found = [value] if isinstance(value, str) else value
    good = isinstance(found, list) and found and all(isinstance(text, str) and text for text in found)
    need(good, f"{key} in {where}", "a text or a list of texts", value)
    return list(found or ())


def need(right: object, what: str, such: str, value: object) -> None:
    """UsageError unless a value is right."""
    refuse(not right, f"{what} must be {such}, not {shown(value)}")


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file; UsageError where it cannot be read or holds text that cannot be shown."""
    if not path.exists():
        raise missing("file", path, "*.toml")
    with denied(f"{path} cannot be read"):
        data = path.read_bytes()
    deep = "its lists or tables are nested too deeply"
    with told(f"{path} is not valid TOML", lambda error: deep if isinstance(error, RecursionError) else str(error)):
        table = tomllib.loads(data.decode())
    check_texts(table, str(path))
    return table
