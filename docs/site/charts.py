"""Learning curves and tables of scores, from the data in benchmark/results."""

import ast
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import results

from solorl.catalog.header import fields_of, parse_source
from solorl.lab.results import comparison as cmp
from solorl.lab.results import curves as cv
from solorl.lab.results import page, text
from solorl.lab.results.read import read_all

MOST_SEEDS = 10  # whose own curves a page has


def all_of(scripts):
    """Algorithm -> its chart: the curves that its picture in docs/curves shows, by steps and by time, and a table."""
    return {path.stem: Chart(scripts[path.stem], *found) for path, found in results.curves().items()}


class Chart:
    """The runs of an algorithm and of the files that it comes from, on the environments on which it was run."""

    def __init__(self, script, comparison, curves):
        self.script, self.comparison, self.curves = script, comparison, curves

    def data(self):
        """What the script of the page draws."""
        both = {"steps": self.curves, "time": cv.curves(self.comparison, self.comparison.metric, "time")}
        found, metric = {}, self.comparison.metric
        for axis, curves in both.items():
            for env, of_env in cv.panels(self.comparison, curves, {}):
                found.setdefault(env, {})[f"{metric} {axis}"] = page.lines(self.comparison, of_env, MOST_SEEDS)
        panels = [{"title": env, "lines": lines} for env, lines in found.items() if f"{metric} steps" in lines]
        return {"methods": self.comparison.methods, "start": {"axis": "steps", "metric": metric}, "panels": panels}

    def rows(self):
        """The scores after training, a row for each environment and method, and whether it is one of the file itself
        among those of others."""
        others = any(runs[0].script != self.script.name for runs in self.comparison.groups.values())
        for row in cmp.env_rows(self.comparison):
            runs = self.comparison.groups[row.env_id, row.method]
            score = text.estimate(row.iqm).replace("-", "\N{MINUS SIGN}")
            cells = [row.env_id, row.method, score, row.seeds, f"{row.steps:,.0f}", text.training_time(row), row.date]
            yield others and runs[0].script == self.script.name, cells

    def bands(self):
        """What the bands around the curves are."""
        kinds = {curve.kind for curve in self.curves.values() if curve.kind}
        return {"the 95 % interval" if kind == "interval" else "the range of the runs" for kind in kinds}

    def commands(self):
        """The commands that repeat the rows of the algorithm itself."""
        groups = self.comparison.groups.items()
        own = [(env, runs) for (env, _), runs in groups if runs[0].script == self.script.name]
        return [(env, command(runs, self.script), sorted(run.seed for run in runs)) for env, runs in own]


def command(runs, script):
    """The command that repeats the first of the runs of a method: what differs from the defaults of the file."""
    run, defaults = min(runs, key=lambda run: run.seed), defaults_of(script.path)
    words = ["solo", "train", script.name, "--env-id", run.env_id]
    for name, value in run.args.items():
        flag = name.replace("_", "-")
        if name in ("env_id", "seed") or name not in defaults or value == defaults[name] or value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    if run.together > 1:
        words += ["--num-seeds", str(run.together)]
    return shlex.join([*words, "--seed", str(run.seed)])


def defaults_of(path):
    """The fields of `Args` of a file and their defaults."""
    found = {"target_return": None}
    for name, field in fields_of(parse_source(path)).items():
        try:
            found[name] = ast.literal_eval(field.value)
        except ValueError:
            found[name] = ast.unparse(field.value)
    return found


def chosen(found, names):
    """The data of one chart of several algorithms: a panel for each with its own curve on one environment, and what its
    bands are."""
    panels, bands, names = [], set(), [each for each in names if each[0] in found]
    for number, (name, env) in enumerate(names):
        data, bands = found[name].data(), bands | found[name].bands()
        lines, own = next(each["lines"] for each in data["panels"] if each["title"] == env), data["methods"].index(name)
        lines = {key: [line | {"m": number} for line in of_key if line["m"] == own] for key, of_key in lines.items()}
        panels.append({"title": f"{name}, {env}", "lines": lines})
    methods, start = [name for name, _ in names], {"axis": "steps", "metric": "eval"}
    return {"methods": methods, "start": start, "panels": panels}, bands


def runs_below(path, root):
    """What a page says of the result files in a folder, or of one: a row for each run."""
    files = sorted(path.glob("*.json.gz")) if path.is_dir() else [path] * (path.suffix == ".gz")
    found, _ = read_all(files) if files else ([], [])
    return [
        {
            "env": run.env_id, "method": run.name, "seed": run.seed, "steps": f"{run.global_step:,}",
            "score": text.number(run.eval["mean"][-1]) if run.eval.get("mean") else "–",
            "date": run.started[:10], "file": Path(run.source).resolve().relative_to(root).as_posix(),
        }
        for run in sorted(found, key=lambda run: (run.env_id, run.name, run.seed))
    ]  # fmt: skip
