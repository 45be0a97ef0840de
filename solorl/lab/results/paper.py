"""What goes from a report into a paper: tables in LaTeX, the points of all curves, and scores as rliable takes them."""

import csv
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from solorl.data.dataset import unpacked
from solorl.files import read_regular, write
from solorl.lab.results import comparison as cmp
from solorl.lab.results import curves as cv
from solorl.lab.results import statistics as st
from solorl.lab.results import text
from solorl.lab.results.result import MOST_BYTES, Result, ResultError, reading

MOST_SCORES = 100_000  # of a file: each becomes a run of the report
ENVIRONMENTS = "environments"  # the names of the columns in the file of scores
TAKEN = (ENVIRONMENTS, "file", "allow_pickle")  # what no method can be called there: np.savez has such parameters
SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
           ">": r"\textgreater{}", "|": r"\textbar{}", **{sign: f"\\{sign}" for sign in "&%$#_{}"}}  # fmt: skip


def write_all(comparison: cmp.Comparison, folder: Path) -> list[str]:
    """Write tables.tex, curves.csv and, where the methods share an environment, scores.npz into `folder`.

    Returns sentences on what was left out. Raises OSError where one cannot be written.
    """
    write(folder / "tables.tex", tables(comparison).encode())
    write(folder / "curves.csv", points(comparison).encode())
    if not comparison.shared:
        return []
    found, notes = scores(comparison)
    data = io.BytesIO()
    np.savez(data, **found)  # type: ignore[arg-type]  # names are those of methods
    write(folder / "scores.npz", data.getvalue())
    return notes


# ---------------------------------------------------------------------- LaTeX
def latex(words: str) -> str:
    """A text as LaTeX shows it: its special signs, and minus signs before numbers."""
    return re.sub(r"(?<![\w.-])-(?=\d)", "$-$", "".join(SPECIAL.get(sign, sign) for sign in words))


def tables(comparison: cmp.Comparison) -> str:
    """The tables of the report for the package booktabs: every environment and method, then all environments."""
    head, rows = text.env_table(comparison)
    named, last = [], ""
    for row in rows:
        env_id, *others = map(text.words, row[:7])
        named.append([env_id if env_id != last else "", *others])
        last = env_id
    score = f"The score of a run is its {cmp.METRICS[comparison.metric]}"
    caption = f"{score}. Interquartile mean (IQM), mean and median over runs{text.brackets(comparison)}."
    found = ["% \\usepackage{booktabs}\n", _table(head[:7], named, 2, caption, "environments")]
    head, rows = text.total_table(comparison)
    if rows:
        totals = [list(map(text.words, row)) for row in rows]
        found.append(_table(head, totals, 1, text.total_caption(comparison), "all"))
    return "\n".join(found)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int, caption: str, label: str) -> str:
    """A table, its first `left` columns to the left; a rule before each row with a name in the first column."""
    lines = []
    for i, row in enumerate(rows):
        lines += [r"\midrule"] if i and left > 1 and row[0] else []
        lines.append(" & ".join(map(latex, row)) + r" \\")
    return "\n".join([
        r"\begin{table}", r"\centering", rf"\caption{{{latex(caption)}}}", rf"\label{{tab:{label}}}",
        rf"\begin{{tabular}}{{{'l' * left}{'r' * (len(head) - left)}}}", r"\toprule",
        " & ".join(map(latex, head)) + r" \\", r"\midrule", *lines, r"\bottomrule", r"\end{tabular}",
        r"\end{table}", "",
    ])  # fmt: skip


# ---------------------------------------------------------------------- numbers
COLUMNS = ("environment", "method", "seed", "step", "return")  # of Open RL Benchmark's tables


def points(comparison: cmp.Comparison) -> str:
    """The curves of all runs as CSV: environment, method, seed, step, return."""
    data = io.StringIO()
    table = csv.writer(data, lineterminator="\n")
    table.writerow(COLUMNS)
    for (env_id, method), runs in comparison.groups.items():
        for run in runs:
            steps, returns = cv.points(run, comparison.metric, "steps")
            table.writerows(
                [env_id, method, run.seed, f"{x:.0f}", f"{y:.6g}"] for x, y in zip(steps, returns, strict=True)
            )
    return data.getvalue()


def read_points(path: Path) -> list[Result]:
    """The runs in a table as `points` makes it, also with further columns. Raises ResultError for any other table."""
    curves: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    with reading(path):
        rows = csv.DictReader(read_regular(path, MOST_BYTES).decode("utf-8-sig", errors="replace").splitlines())
    if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
        raise ResultError(f"{path} has no column {', '.join(missing)}; a table of curves has {', '.join(COLUMNS)}")
    for line, row in enumerate(rows, 2):
        try:
            key = str(row["environment"]), str(row["method"]), int(row["seed"])
            point = float(row["step"]), float(row["return"])
        except (TypeError, ValueError) as error:
            raise ResultError(f"{path} is damaged in line {line}: {error}") from None
        if math.isfinite(point[0]):
            curves.setdefault(key, []).append(point)
    return [_run(path, method, env_id, seed, sorted(curve)) for (env_id, method, seed), curve in curves.items()]


def scores(comparison: cmp.Comparison) -> tuple[dict[str, st.Array], list[str]]:
    """Method -> scores (num_runs, num_environments) on the environments that all methods have, and under ENVIRONMENTS
    their names, which say where scores are normalised. And a sentence for each method of which runs are left out,
    because it has not equally many on each environment, or whose name is TAKEN."""
    envs, notes = comparison.shared, []
    names = [env if comparison.scale[env] == (0.0, 1.0) else f"{env}, normalised" for env in envs]
    found = {ENVIRONMENTS: np.array(names)}
    for method in comparison.methods:
        columns = [comparison.scores(env, method, normalised=True) for env in envs]
        fewest = min(map(len, columns))
        if fewest < max(map(len, columns)):
            notes.append(f"scores.npz has only the first {fewest} runs of {method} on each environment.")
        name = f"method {method}" if method in TAKEN else method
        notes += [f"scores.npz calls {method} {name!r}."] * (name != method)
        found[name] = np.stack([column[:fewest] for column in columns], axis=-1)
    return found, notes


def read_scores(path: Path) -> list[Result]:
    """The runs in a file of scores: method -> (num_runs, num_environments), as `scores` makes it or for rliable, with
    or without names of environments. Raises ResultError where it holds anything else."""
    with reading(path):
        found = unpacked(read_regular(path, MOST_BYTES), MOST_BYTES, "fiuUS")
    names = found.pop(ENVIRONMENTS, None)
    if (count := sum(table.size for table in found.values())) > MOST_SCORES:
        raise ResultError(f"{path} has {count:,} scores, more than the {MOST_SCORES:,} that a report can have")
    results = []
    for method, table in found.items():
        if table.ndim != 2 or table.dtype.kind not in "fiu" or not np.isfinite(table).all():
            raise ResultError(f"{path}: {method} is not a table of numbers (runs, environments)")
        envs = [f"environment {i + 1}" for i in range(table.shape[1])] if names is None else names.astype(str).tolist()
        if len(envs) != table.shape[1]:
            raise ResultError(f"{path}: {method} has {table.shape[1]} columns, but there are {len(envs)} environments")
        for env, column in zip(envs, table.T.tolist(), strict=True):
            results += [_run(path, method, env, seed, [(0.0, float(score))]) for seed, score in enumerate(column)]
    return results


def _run(path: Path, method: str, env_id: str, seed: int, curve: Sequence[tuple[float, float]]) -> Result:
    """A run of which only steps and returns are known."""
    steps, returns = (list(column) for column in zip(*curve, strict=True))
    nothing = [0.0] * len(curve)
    columns = {"global_step": steps, "wall_time": nothing, "mean": returns, "std": nothing, "length": nothing}
    source = f"{path} ({method}, {env_id}, run {seed})"
    status = "finished" if all(map(math.isfinite, returns)) else "diverged: a return is not finite"
    return Result(env_id, method, seed, global_step=int(steps[-1]), eval=columns, source=source, status=status)
