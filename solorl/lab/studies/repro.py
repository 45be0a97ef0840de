"""Does a published number still hold? What `solo repro` does: it trains again what a result file says, and compares."""

import math
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from statistics import NormalDist, fmean, stdev

from solorl.lab.results.comparison import ENOUGH
from solorl.lab.results.result import Result, rounded
from solorl.lab.studies.plan import as_flag, load_script, merge
from solorl.lab.studies.task import Task
from solorl.lab.studies.worker import SCORE
from solorl.machine import cpu_model, dying_with_parent
from solorl.runfolder import METRICS, rows_of
from solorl.scripts import PACKAGE, in_checkout

# Arguments that cannot be flags of a study, or change nothing that is learned.
LEFT_OUT = ("env_id", "seed", "num_seeds", "exp_name", "track", "wandb_project_name", "hf_entity", "capture_video",
            "upload_model", "plot", "save_model")  # fmt: skip

ANY = "--target-return=-1e300"  # it ends after the first evaluation


def task_of(result: Result, seed: int) -> Task:
    """The training that a result came from, with another seed. UsageError where its script is not there; arguments
    that the script does not have any more are left out."""
    script = load_script(result.script)
    known = {*script.arguments()} - {*LEFT_OUT}
    args = {name: value for name, value in result.args.items() if name in known and value is not None and value != ""}
    flags = merge(*(as_flag(name.replace("_", "-"), value) for name, value in args.items()))
    return Task(script, result.env_id, seed, flags)


def train(task: Task, *more: str) -> list[tuple[int, float]]:
    """(step, mean return) of the evaluations of a training in a process of its own, with `more` flags. Raises
    RuntimeError with what it said where it fails."""
    with tempfile.TemporaryDirectory() as place:
        words = [*dying_with_parent(), *task.argv("--runs-dir", place, "--no-save-model", *more)]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        rows = [row for metrics in Path(place).glob(f"*/{METRICS}") for row in rows_of(metrics, key=SCORE)]
    if done.returncode or not rows:
        raise RuntimeError((done.stdout.strip().splitlines() or ["it said nothing"])[-1])
    return [(int(row["global_step"]), float(row[SCORE])) for row in rows]


def circumstances(result: Result, task: Task) -> Iterator[str]:
    """Lines: what differs between then and now."""
    same = task.script.sha256 == result.script_sha256
    yield "script      as it was" if same else "script      has changed since (git log says how)"
    golden = PACKAGE.parent / "tests" / "test_golden.py"
    if in_checkout() and golden.is_file():
        name = f"{golden}::test_the_first_iterations_are_the_recorded_ones[{result.script}]"
        words = [task.argv()[0], "-mpytest", "-q", "-n", "0", name]
        held = subprocess.run(words, capture_output=True, cwd=PACKAGE.parent).returncode == 0
        yield f"first steps {'as recorded' if held else 'not as recorded in tests/golden'}"
    now = {each.metadata["Name"].replace("_", "-"): each.version for each in distributions()}
    moved = [(name, then) for name, then in result.versions.items() if now.get(name) != then and name != "solorl"]
    changed = [f"{name} {then} -> {now.get(name, 'not installed')}" for name, then in moved]
    yield f"packages    {', '.join(changed) or 'as they were'}"


def first_evaluation(result: Result) -> str:
    """Compare the first evaluation of the same seed: equal on the same kind of processor, else near."""
    if not result.eval.get("mean"):
        return "the result has no evaluations"
    then = rounded([int(result.eval["global_step"][0]), result.eval["mean"][0]])  # as result files have it
    step, value = rounded(train(task_of(result, result.seed), ANY)[0])
    if [step, value] == then:
        return f"equal: {then[1]:g} at step {step:,}"
    where = result.machine.get("cpu", "")
    why = "the same kind of processor" if where == cpu_model() else f"another processor, then {where or 'unknown'}"
    moved = f", at step {step:,} instead of {then[0]:,}" if step != then[0] else ""
    return f"not equal: {value:g}, then {then[1]:g}{moved} (difference {abs(value - then[1]):g}; {why})"


def quantile(df: int, level: float = 0.975) -> float:
    """Student's t by its expansion about the normal quantile (Abramowitz, Stegun 26.7.5), within 1 % from df 3 on."""
    z = NormalDist().inv_cdf(level)
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / df**i for i, term in enumerate(terms))


def verdict(then: Sequence[float], now: Sequence[float]) -> str:
    """Whether the mean of new seeds lies in the 95 % prediction interval of the old ones."""
    if len(then) < ENOUGH or not now:
        return f"too few: {len(then)} seeds then (at least {ENOUGH}), {len(now)} now"
    half = quantile(len(then) - 1) * stdev(then) * math.sqrt(1 / len(then) + 1 / len(now))
    low, high, mean = fmean(then) - half, fmean(then) + half, fmean(now)
    word = "consistent" if low - 1e-9 <= mean <= high + 1e-9 else "not consistent"
    return f"{word}: {len(now)} new seeds have {mean:g}, the interval of {len(then)} old ones is [{low:g}, {high:g}]"
