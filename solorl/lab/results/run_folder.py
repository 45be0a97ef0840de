"""The result of a run folder, with its curves thinned."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from solorl import runfolder
from solorl.catalog.header import origins
from solorl.files import read_regular
from solorl.lab.results import result as results
from solorl.lab.results.result import DECLARED, EVAL_COLUMNS, TRAIN_COLUMNS, Columns, Result, ResultError
from solorl.lab.results.statistics import Array

BINS = 200  # rows that the training episodes of one run are thinned to
EVAL_NAMES = ("eval/episodic_return", "eval/episodic_return_std", "eval/episodic_length")
LOCAL = ("runs_dir", "resume", "resume_changed", "wandb_entity")  # arguments that say where, not what


def read_run(run_dir: Path, curves: bool = False, strict: bool = True) -> Result:
    """The result of a run folder, its status as it is now, on request with its `curves`; the variant is its `exp_name`.

    Raises ResultError where a file is missing or damaged. Without `strict`, damaged rows are left out, and the status
    is empty where there is none.
    """
    with results.reading(run_dir):
        config, status = runfolder.config_of(run_dir), runfolder.status_of(run_dir)
        args, copy = config["args"], run_dir / Path(config["script"]).name
        metrics = run_dir / runfolder.METRICS
        if metrics.exists() and not metrics.is_file():
            raise ResultError(f"{metrics} cannot be read: it is not a regular file")
        rows = runfolder.read_rows(metrics, strict=strict)[0]
        total = int(status.get("global_step") or (rows[-1]["global_step"] if rows else 0))
        episodes = select(rows, "charts/episodic_return", "charts/episodic_length")
        rates = [float(row["charts/SPS"]) for row in rows if "charts/SPS" in row]
        variant = str(args.get("exp_name") or "")
        logged = ((name, row["global_step"], row[name]) for row in rows if curves for name in row if "/" in name)
        result = Result(
            env_id=args["env_id"], script=copy.stem, seed=args["seed"], variant="" if variant == copy.stem else variant,
            script_sha256=str(config.get("script_sha256", "")), args=_portable(args), git=config.get("git"),
            python=str(config.get("python", "")), versions=dict(config.get("versions") or {}),
            machine=_described(dict(config.get("machine") or {})), started=str(config.get("started", "")),
            status=runfolder.status_now(run_dir, str(status["status"] if strict else status.get("status", ""))),
            global_step=total, wall_time=float(status.get("wall_time") or 0.0), together=_together(run_dir),
            eval=evaluations(select(rows, *EVAL_NAMES)), train=thinned(episodes, total), curves=curves_of(logged),
            declared={name: found[-1][2] for name in DECLARED if (found := select(rows, f"eval/{name}"))},
            last_100_episodes=last_mean([row[2] for row in episodes]), sps=median(rates) if rates else None,
            parents=origins(copy) if copy.is_file() else [], source=str(run_dir),
        )  # fmt: skip
        results.check(result)
        return result


def curves_of(points: Iterable[tuple[str, Any, Any]]) -> dict[str, tuple[Array, Array]]:
    """Curves out of (name, step, value); what is not a finite number is left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, step, value in points:
        if isinstance(value, int | float) and math.isfinite(value):
            found.setdefault(name, []).append((float(step), float(value)))
    return {name: (table[:, 0], table[:, 1]) for name, rows in found.items() if (table := np.array(rows)).size}


def _together(run_dir: Path) -> int:
    """How many runs the process trained at once."""
    path = run_dir / runfolder.TOGETHER
    names = json.loads(read_regular(path, results.MOST_BYTES)) if path.exists() else [run_dir.name]
    return len(names["runs"] if isinstance(names, dict) else names)  # a list in runs of version 0.1


def _portable(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments without those that say where things lie; of any other absolute path only the last name."""
    paths = {name: Path(value) for name, value in args.items() if isinstance(value, str)}
    short = {name: path.name for name, path in paths.items() if path.is_absolute()}
    return {name: value for name, value in (args | short).items() if name not in LOCAL}


def _described(machine: dict[str, Any]) -> dict[str, Any]:
    """The machine without what names it rather than describes it: of the system only its kind and version."""
    system = re.match(r"[A-Za-z]+(-\d+(\.\d+)*)?", str(machine.get("system", "")))
    return {**machine, "system": system.group() if system else ""}


def select(rows: Sequence[dict[str, Any]], *names: str) -> list[list[float]]:
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
        means = [sum(column) / len(rows) for column in list(zip(*rows, strict=True))[2:]]
        values = (min(edge, max(total, int(rows[-1][0]))), rows[-1][1], *means, len(rows))
        for name, value in zip(TRAIN_COLUMNS, values, strict=True):
            columns[name].append(value)
    return columns


def last_mean(returns: Sequence[float], count: int = 100) -> float | None:
    """The mean of the last `count` values, or of all where there are fewer; None for no value."""
    last = returns[-count:]
    return sum(last) / len(last) if last else None
