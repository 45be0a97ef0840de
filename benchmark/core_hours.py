"""Core-hours of a training: the cores that a run had, and what the defaults of each algorithm file take."""

import ast
from functools import cache
from pathlib import Path
from statistics import median

from solorl.catalog.header import Script, fields_of, parse_source, scripts
from solorl.lab.results.read import read_all
from solorl.lab.results.result import Result

ROOT = Path(__file__).resolve().parent.parent


def cores(run: Result) -> float:
    """The cores that a run had: those of its process, one or more, over the runs that it trained at once."""
    threads = run.args.get("threads") or 1
    return float(min(run.machine.get("cores") or threads, threads * run.together)) / float(run.together)


def core_seconds(run: Result) -> float:
    """Seconds of one core that a run took per environment step."""
    return cores(run) / run.sps if run.sps else 0.0


def default_budget(script: Script) -> tuple[str, int]:
    """The defaults of `--env-id` and `--total-timesteps`; ("", 0) where the file has none."""
    fields = fields_of(parse_source(script.path))
    found = {name: field.value.value for name, field in fields.items() if isinstance(field.value, ast.Constant)}
    return str(found.get("env_id", "")), int(found.get("total_timesteps", 0))


@cache
def of_defaults(results: Path = ROOT / "benchmark/results") -> dict[str, str]:
    """Script -> core-hours of a training with its defaults, by its runs on its default environment."""
    measured, found = read_all([results])[0], {}
    for script in scripts():
        env_id, steps = default_budget(script)
        runs = [r for r in measured if (r.script, r.env_id) == (script.name, env_id) and r.sps and not r.variant]
        hours = steps * median(map(core_seconds, runs)) / 3600 if runs else None
        found[script.name] = "not measured" if hours is None else f"{float(f'{hours:.2g}'):g}"
    return found
