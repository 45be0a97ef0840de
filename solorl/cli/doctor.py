"""`solo doctor`: what looks wrong in a training, in words, and what to try."""

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from solorl.cli import Parser
from solorl.errors import refuse
from solorl.terminal import paint, plain


def main(argv: Sequence[str]) -> int:
    """Print what looks wrong in each training; UsageError where there is none to be read."""
    parser = Parser("doctor", "Say what looks wrong in a training, why, and what to try.")
    what = "run folders, also of running trainings, TensorBoard folders of CleanRL or Stable-Baselines3, result files"
    parser.add_argument("paths", metavar="RUN_DIR", nargs="+", type=Path, help=f"{what}, and folders of these")
    args = parser.parse(argv)
    from solorl.lab.results import doctor  # here, because it loads NumPy
    from solorl.lab.results.read import trainings

    found, problems = trainings(args.paths)
    refuse(not found, f"nothing to examine: {'; '.join(problems[:3])}")
    for problem in problems:
        print(plain(f"note: {problem}"))
    for training in found:
        findings = doctor.examine(training)
        score = "" if training.score is None else f", score {doctor.number(training.score)}"
        head = f"{training.script} on {training.env_id}, seed {training.seed}: {training.steps:,.0f} steps{score}"
        print(f"\n{paint(plain(head), 'bold')}\n{plain(training.source)}")
        if not findings:
            print("  nothing looks wrong" + ": the task is solved" * training.is_solved)
        show(findings)
    kind = attrgetter("kind")
    for _, group in groupby(sorted(found, key=kind), key=kind):
        if findings := doctor.disagreement(seeds := list(group)):
            head = f"{seeds[0].script} on {seeds[0].env_id}, all seeds"
            print(f"\n{paint(plain(head), 'bold')}")
            show(findings)
    return 0


def show(findings: Sequence[tuple[str, str, str, str]]) -> None:
    """Print findings, numbered."""
    for i, (what, seen, remedy, source) in enumerate(findings, 1):
        print(f"  {i}. {paint(plain(what), 'yellow')}\n     seen    {plain(seen)}\n     try     {plain(remedy)}")
        print(f"     source  {plain(source)}")
