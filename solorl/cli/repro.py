"""`solo repro`: does a published number still hold?"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from solorl.cli import Parser, at_least, say
from solorl.errors import UsageError, did_you_mean, refuse
from solorl.terminal import paint, plain


def main(argv: Sequence[str]) -> int:
    """Train again what result files say, and compare; exit code 1 where something is not consistent. UsageError where
    there are none."""
    about = "Does a published number still hold? Compares script, packages and the first evaluation of the same seed."
    parser = Parser("repro", about)
    known = "an algorithm, whose rows are in benchmark/results; or result files and folders of them"
    parser.add_argument("rows", metavar="ROW", nargs="+", help=known)
    parser.add_argument("--env-ids", metavar="ID", nargs="+", default=[], help="only these environments")
    parser.add_argument("--seeds", metavar="N", type=at_least(0), default=0, help="also train N new seeds to the end")
    args = parser.parse(argv)
    from solorl.lab.results import comparison as cmp  # here, because it loads NumPy
    from solorl.lab.results.read import read_all
    from solorl.lab.results.result import Result
    from solorl.lab.studies import repro

    results, look = list[Result](), cache(lambda path: read_all([path], whole=True))
    for row in args.rows:
        is_path = Path(row).exists()
        found, problems = look(Path(row if is_path else "benchmark/results"))
        mine = [run for run in found if is_path or run.script == row]
        near = did_you_mean(row, {run.script for run in found})
        refuse(not mine, f"no result of {row}{near if found else ': ' + '; '.join(problems[:3])}")
        results += mine
    results = cmp.only(results, args.env_ids)
    worst = 0
    for (env_id, method), runs in cmp.grouped(results).items():
        first = min(runs, key=lambda run: run.seed)
        say(paint(plain(f"{method} on {env_id}, {len(runs)} seeds of {first.started[:10]}"), "bold"))
        try:
            task = repro.task_of(first, first.seed)
            for line in repro.circumstances(first, task):
                say(f"  {plain(line)}")
            said = [repro.first_evaluation(first)]
            say(f"  evaluation  {said[0]}")
            if args.seeds:
                then = [score for run in runs if (score := cmp.score(run, "eval")) is not None]
                begin = max(run.seed for run in runs) + 1
                new = range(begin, begin + args.seeds if len(then) >= cmp.ENOUGH else begin)
                now = [repro.train(repro.task_of(first, seed))[-1][1] for seed in new]
                said += [repro.verdict(then, now)]
                say(f"  new seeds   {said[1]}")
            worst |= any(words.startswith("not ") for words in said)
        except (UsageError, RuntimeError) as error:
            say(plain(f"  cannot be repeated: {error}"))
            worst = 1
    return worst
