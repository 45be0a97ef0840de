"""The result of a run folder, with its curves thinned."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from solorl import runfolder
from solorl.catalog.header import origins
from solorl.files import read_regular
from solorl.lab.results import result as results
from solorl.lab.results.result import DECLARED, EVAL_COLUMNS, TRAIN_COLUMNS, Columns, Result, ResultError

BINS = 200  # rows that the training episodes of one run are thinned to
EVAL_NAMES = ("eval/episodic_return", "eval/episodic_return_std", "eval/episodic_length")
LOCAL = ("runs_dir", "resume", "resume_changed", "wandb_entity")  # arguments that say where, not what
CRITIC_COLUMNS = ("global_step", "wall_time", "mean", "rows")
# What a critic learns -> the metrics that say it, of which a run has the first one that it logs.
CRITIC = {
    "loss": ("losses/qf_loss", "losses/td_loss", "losses/value_loss"),
    "value": ("losses/q_values", "losses/qf_values", "losses/qf1_values"),
}


def read_run(run_dir: Path) -> Result:
    """The result of a run folder, its status as it is; the variant is the run's `exp_name`.

    Raises ResultError where a file is missing or damaged.
    """
    with results.reading(run_dir):
        config, status = runfolder.config_of(run_dir), runfolder.status_of(run_dir)
        metrics = run_dir / runfolder.METRICS
        if metrics.exists() and not metrics.is_file():
            raise ResultError(f"{metrics} cannot be read: it is not a regular file")
        rows = runfolder.read_rows(metrics, strict=True)[0]
        total = int(status.get("global_step") or (rows[-1]["global_step"] if rows else 0))
        episodes = select(rows, "charts/episodic_return", "charts/episodic_length")
        rates = [float(row["charts/SPS"]) for row in rows if "charts/SPS" in row]
        copy = run_dir / Path(config["script"]).name
        result = described(
            run_dir, config, status, global_step=total,
            eval=evaluations(select(rows, *EVAL_NAMES)), train=thinned(episodes, total), critic=_critic(rows, total),
            declared={name: found[-1][2] for name in DECLARED if (found := select(rows, f"eval/{name}"))},
            last_100_episodes=last_mean([row[2] for row in episodes]), sps=median(rates) if rates else None,
            parents=origins(copy) if copy.is_file() else [],
        )  # fmt: skip
        results.check(result)
        return result


def described(run_dir: Path, config: dict[str, Any], status: dict[str, Any], **measured: Any) -> Result:
    """The result of a run folder: what its files say of it, and what was measured."""
    args, script = config["args"], Path(config["script"])
    variant = str(args.get("exp_name") or "")
    return Result(
        env_id=args["env_id"], script=script.stem, seed=args["seed"], variant="" if variant == script.stem else variant,
        script_sha256=str(config.get("script_sha256", "")), args=_portable(args), git=config.get("git"),
        python=str(config.get("python", "")), versions=dict(config.get("versions") or {}),
        machine=_described(dict(config.get("machine") or {})), started=str(config.get("started", "")),
        status=str(status["status"]), wall_time=float(status.get("wall_time") or 0.0), together=_together(run_dir),
        source=str(run_dir), **measured,
    )  # fmt: skip


def _critic(rows: Sequence[dict[str, Any]], total: int) -> dict[str, Columns]:
    """What a run has logged of its critic."""
    logged = {name for row in rows for name in row}
    names = {kind: next((name for name in known if name in logged), "") for kind, known in CRITIC.items()}
    return {kind: thinned(select(rows, name), total, CRITIC_COLUMNS) for kind, name in names.items() if name}


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
