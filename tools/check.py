"""`solo check`: the algorithm files against the rules of the project."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from solorl.catalog.header import find_path, parse_header
from solorl.cli import Parser
from solorl.errors import refuse
from solorl.files import shown
from solorl.scripts import in_catalogue, script_paths
from tools.budget import parents_in_words, set_budget
from tools.rules import NOTE, check_file, check_own, check_together
from tools.source import Problem, neighbours


def problems_of(paths: Sequence[Path]) -> list[Problem]:
    """The problems of the given files, and notes; those between files are found with all families next to them, those
    of a user's own file with the catalogue."""
    wanted = {path.resolve() for path in paths}
    found = [problem for path in sorted(wanted) for problem in check_file(path)]
    for path in sorted(path for path in wanted if not in_catalogue(path)):
        found += check_own(path)
    for path in {path.parent.parent: path for path in sorted(wanted) if in_catalogue(path)}.values():
        found += [problem for problem in check_together(neighbours(path)) if problem.path.resolve() in wanted]
    return sorted(found, key=lambda problem: (str(problem.path), problem.line))


def set_budgets(paths: Sequence[Path]) -> int:
    """Write the budgets of the given files; UsageError for a file that has no parent."""
    for path in paths:
        script = parse_header(path)
        lines, budget = set_budget(script)
        print(f"{path.name} differs from {parents_in_words(script)} in {lines} lines; its budget is {budget} now")
    return 0


def main(argv: Sequence[str]) -> int:
    """Print one line per problem or note and return 1 if there are problems."""
    parser = Parser("check", "Check algorithm files (default: all) against the rules in CONTRIBUTING.md.")
    parser.add_argument("files", metavar="FILE", nargs="*", help="algorithm names or .py files")
    now = "make the present diff of each FILE, rounded up, its budget (R3)"
    parser.add_argument("--set-budget", action="store_true", help=now)
    args = parser.parse(argv)
    paths = [find_path(name) for name in args.files] or list(script_paths().values())
    if args.set_budget:
        refuse(not args.files, "solo check --set-budget needs the files whose budget is to be set")
        return set_budgets(paths)
    found = problems_of(paths)
    for problem in found:
        print(replace(problem, path=Path(shown(problem.path))))
    problems = [problem for problem in found if problem.rule != NOTE]
    if problems:
        files = len(list(groupby(problems, key=lambda problem: problem.path)))
        print(f"{len(problems)} problem{'s'[: len(problems) != 1]} in {files} of {len(paths)} files")
        return 1
    print(f"{len(paths)} file{'s'[: len(paths) != 1]}, no problems")
    return 0
