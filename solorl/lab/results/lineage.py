"""What a method is compared with: what its script comes from, its twin in torch, or the baseline of the report."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from solorl.catalog.header import origins
from solorl.lab.results.result import Result
from solorl.scripts import facts_of, script_paths

Runs = Mapping[str, Sequence[Result]]  # method -> its runs


def ancestors(script: str, runs: Runs) -> list[str]:
    """The scripts that a script comes from, the nearest first: as its copies in run folders say, else our files."""
    paths, found = script_paths(), [script]
    said = {run.script: run.parents for several in runs.values() for run in several if run.parents}
    for name in found:  # grows while it is walked
        names = said.get(name) or (origins(paths[name]) if name in paths else [])
        found += [each for each in names if each not in found]
    return found[1:]


def origin(runs: Runs) -> str:
    """The first method of a script that others come from, and that comes from none of them; of the variants of one
    script the first of its study; else the first method."""
    scripts, first = {method: several[0].script for method, several in runs.items()}, next(iter(runs))
    if len(set(scripts.values())) == 1:
        return next((method for method in runs if any(run.first for run in runs[method])), first)
    known = set(scripts.values())
    above = {script: known.intersection(ancestors(script, runs)) for script in known}
    named = set().union(*above.values())
    return next((method for method, script in scripts.items() if script in named and not above[script]), first)


def opponents(runs: Runs, baseline: str, derived: bool) -> dict[str, str]:
    """What each method is compared with.

    A file in JAX with its twin of the same variant (`ppo_jax tuned` with `ppo tuned`); where `derived`, any other with
    the nearest file that it comes from; else with the baseline.
    """
    found = {}
    for method in runs:
        script = runs[method][0].script
        twin = twin_of(script) + method.removeprefix(script)
        found[method] = twin if twin in runs else (derived and nearest(method, runs)) or baseline
    return found


def nearest(method: str, runs: Runs) -> str | None:
    """The method of the nearest script that a method comes from, on one of its environments: of several the one with
    the same environment steps to train, and of those the one of the same variant. None without one."""
    own = runs[method][0].script
    budgets = {name: {(run.env_id, repr(run.args.get("total_timesteps"))) for run in runs[name]} for name in runs}
    envs = {name: {env_id for env_id, _ in budgets[name]} for name in runs}
    for script in ancestors(own, runs):
        if found := [name for name in runs if runs[name][0].script == script and envs[name] & envs[method]]:
            variant = script + method.removeprefix(own)
            return min(found, key=lambda name: (not budgets[name] & budgets[method], name != variant))
    return None


def twin_of(script: str) -> str:
    """The torch script that the header of a script in JAX names; an empty string without one."""
    path = script_paths().get(script)
    return Path(facts_of(path).fields.get("Twin", "")).stem if path else ""
