"""`solo bench`: scripts x environments x seeds x variants, many at once; to continue, repeat the command."""

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solorl.cli import Parser, fleet
from solorl.errors import UsageError
from solorl.machine import own_cores
from solorl.studies.bench import Runner, Store, following
from solorl.studies.checks import check_name, check_texts
from solorl.studies.engines import LocalEngine
from solorl.studies.plan import (
    Flags,
    Plan,
    find_python,
    load_script,
    load_suite,
    make_tasks,
    ordered,
    parse_flags,
    seed_range,
    short,
)
from solorl.studies.resources import read_resources

EPILOG = """a suite file or scripts; flags after -- go to every script:
  solo bench benchmark/suites/classic.toml --workers 4
  solo bench ppo my_ppo.py --env-ids CartPole-v1 Acrobot-v1 --num-seeds 10 -- --learning-rate 1e-3
  solo bench peer.py --python peers/bin/python --env-ids CartPole-v1

Any script that takes --env-id and --seed works; one that needs packages of its own runs with --python PATH, in a suite
`python = "PATH"`. What counts is the run folder or the TensorBoard files that it writes below its working folder. To
continue after an interruption, repeat the command: it skips what is finished, resumes what is half done and repeats
what failed. A suite runs the first seed of all its jobs before the second one; with `in_order = true` job by job.

On a cluster: --engine ray, slurm or aws-batch starts a worker for each run, with --cores, --gpus, --memory and --time;
--storage names the folder or URL where all that happens is noted (--engine local takes it, too). Then:
  solo bench status PLAN          what has finished, runs, has failed; exit code 1 if any failed
  solo bench logs PLAN TASK       what a run printed
  solo bench cancel PLAN [TASK]   save and stop
  solo bench retry PLAN [TASK]    allow what has failed or was cancelled again
  solo bench collect PLAN         write the tables of what has finished
PLAN is the folder or URL. A script called status is meant by status.py.

Exit code 0: all finished, 1: not all (failed runs show their last lines), 130: Ctrl+C."""

MAX_WORKERS = 1_000


def main(argv: Sequence[str]) -> int:
    """Run or print a plan; UsageError for a plan that cannot be."""
    check_texts(list(argv), "solo bench")
    if argv and argv[0] in fleet.VERBS:
        return fleet.main(argv)
    own, extra = split(argv)
    args = _parser().parse(own)
    given = fleet.given_resources(args)
    if is_suite := args.what[0].endswith(".toml"):
        plan = suite_plan(args, extra, given)
    else:
        plan = script_plan(args, extra, given)
    if args.storage or args.engine != "local":
        return fleet.run(plan, args, is_suite)
    fleet.refuse_flags(args)
    workers = worker_count(args.workers, "solo bench")
    folder = args.results or Path("benchmark/results") / plan.name
    store = Store(args.runs_dir or Path("runs/bench") / plan.name)
    for path in (folder, store.folder):
        if path.exists() and not path.is_dir():
            raise UsageError(f"solo bench: {path} is a file, but should be a folder")
    if args.dry_run:
        return dry_run(plan, store)
    return run(plan, store, workers, folder)


def _parser() -> Parser:
    parser = Parser("bench", "Run scripts x environments x seeds x variants and collect their results.")
    parser.formatter_class = _raw_formatter()
    parser.epilog = EPILOG
    parser.add_argument("what", metavar="SUITE.toml | SCRIPT", nargs="+", help="a suite, or algorithms and .py files")
    parser.add_argument("--env-ids", metavar="ID", nargs="+", default=[], help="environments; of a suite: only these")
    parser.add_argument("--num-seeds", metavar="N", type=int, help="seeds of each (default 1); of a suite: the first N")
    parser.add_argument("--start-seed", metavar="S", type=int, help="the first seed (default 1)")
    parser.add_argument("--variant", metavar="NAME", help="name of the flags after -- in results (default: the flags)")
    parser.add_argument("--python", metavar="PATH", help="the Python that runs the scripts (default: this one)")
    parser.add_argument("--workers", metavar="N", type=int, help="runs at once (default: one for each core)")
    parser.add_argument(
        "--results", metavar="DIR", type=Path, help="default benchmark/results/NAME OF SUITE OR SCRIPTS"
    )
    parser.add_argument("--runs-dir", metavar="DIR", type=Path, help="default runs/bench/NAME OF SUITE OR SCRIPTS")
    fleet.add_flags(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    return parser


def _raw_formatter() -> Any:
    from argparse import RawDescriptionHelpFormatter

    return RawDescriptionHelpFormatter


def worker_count(given: int | None, verb: str) -> int:
    """`--workers` as it was given, or one for each core; UsageError outside 1 to MAX_WORKERS."""
    workers = len(own_cores()) if given is None else given
    if not 1 <= workers <= MAX_WORKERS:
        raise UsageError(f"{verb}: --workers must be at least 1 and at most {MAX_WORKERS:,}, not {workers:,}")
    return workers


def split(argv: Sequence[str]) -> tuple[list[str], Flags]:
    """The command's own words, and the flags after `--`."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], parse_flags(words[cut + 1 :])


def suite_plan(args: Any, extra: Flags, given: dict[str, Any]) -> Plan:
    """The tasks of a suite file; UsageError for flags that a suite sets itself."""
    if len(args.what) > 1:
        raise UsageError(f"solo bench takes one suite or scripts, not {args.what[0]} and {args.what[1]}")
    for flag, value in (("--start-seed", args.start_seed), ("--variant", args.variant)):
        if value is not None:
            raise UsageError(f"solo bench: {flag} is for scripts; {args.what[0]} says it itself")
    if args.num_seeds is not None and args.num_seeds < 1:
        raise UsageError(f"solo bench: --num-seeds must be at least 1, not {args.num_seeds}")
    python = "" if args.python is None else find_python(args.python)
    return load_suite(Path(args.what[0]), extra, args.env_ids, args.num_seeds, python, given)


def script_plan(args: Any, extra: Flags, given: dict[str, Any]) -> Plan:
    """The tasks of a command line without a suite; UsageError where it names no environments."""
    scripts = [load_script(name) for name in args.what]
    if not args.env_ids:
        raise UsageError("solo bench needs --env-ids, such as --env-ids CartPole-v1 Acrobot-v1")
    count = 1 if args.num_seeds is None else args.num_seeds
    seeds = seed_range(count, 1 if args.start_seed is None else args.start_seed, "solo bench")
    variant = short(extra) if args.variant is None else args.variant
    python = "" if args.python is None else find_python(args.python)
    resources = read_resources(given, "the flags of solo bench")
    tasks = make_tasks(
        scripts, dict.fromkeys(args.env_ids), seeds, {variant: extra}, python=python, resources=resources
    )
    name = "-".join(dict.fromkeys(script.name for script in scripts))
    check_name(name, "solo bench: the names of the scripts, joined,")
    return Plan(name, ordered(tasks))


def dry_run(plan: Plan, store: Store) -> int:
    """Print a command a line, ready to paste, for all that is not finished."""
    found = {task.id: store.find(task) for task in plan.tasks}
    waiting = [task for task in plan.tasks if found[task.id].state != "finished"]
    while waiting:
        task = waiting.pop(0)
        fresh = [other for other in waiting if store.is_fresh(other, found[other.id])]
        several = [] if store.resumable(task, found[task.id]) else following(task, fresh)
        waiting = [other for other in waiting if other not in several]
        job = store.job([task, *several], found[task.id])
        command = shlex.join(job.argv)
        if not task.script.ours:
            where = shlex.quote(str(job.cwd))
            command = f"(mkdir -p {where} && cd {where} && SOLORL_RUN_DIR={where} {command})"
        print(command)
    if done := sum(one.state == "finished" for one in found.values()):
        print(f"{done} of {len(plan.tasks)} are finished", file=sys.stderr)
    return 0


def run(plan: Plan, store: Store, workers: int, folder: Path) -> int:
    """Run the plan on this machine and say how it went; the exit code."""
    view: Lines | Table = Table() if sys.stdout.isatty() else Lines()
    runner = Runner(plan, store, LocalEngine(workers), folder, view)
    count, began = len(plan.tasks), time.monotonic()
    view.say(f"{count} {'run' if count == 1 else 'runs'} with {workers} at once; output in {store.folder}")
    with view:
        code = runner.run()
    for line in conclusion(runner, code, time.monotonic() - began):
        print(line)
    return code


def conclusion(runner: Runner, code: int, seconds: float) -> list[str]:
    """The last lines: what is there, what is not, and what to do."""
    before = f" ({len(runner.skipped)} of them before)" if runner.skipped else ""
    total = len(runner.plan.tasks)
    lines = [f"{len(runner.finished) + len(runner.skipped)} of {total} finished{before} in {duration(seconds)}"]
    if runner.failed:
        lines.append(f"{len(runner.failed)} failed; the same command tries them again:")
        lines += [f"  {task}: {runner.failed[task.id]}" for task in runner.plan.tasks if task.id in runner.failed]
    if runner.uncollected:
        lines.append(f"{len(runner.uncollected)} finished but not collected; the same command collects them:")
        lines += [
            f"  {task}: {runner.uncollected[task.id]}" for task in runner.plan.tasks if task.id in runner.uncollected
        ]
    if code > 1:
        lines.append("interrupted; the same command continues")
    if runner.bare:
        lines.append(f"{len(runner.bare)} finished without a table; no run folder and no TensorBoard files were in:")
        lines += [f"  {task}: {runner.bare[task.id]}" for task in runner.plan.tasks if task.id in runner.bare]
    if runner.tables:
        lines.append(f"results in {runner.folder}; compare them: solo report {shlex.quote(str(runner.folder))}")
    return lines


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class Lines:
    """Plain lines, for pipes and files."""

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def say(self, text: str) -> None:
        """Print a line at once."""
        print(text, flush=True)

    def refresh(self, runner: Runner) -> None:
        """Nothing: lines are printed as things happen."""


class Table:
    """A live table below the lines, for terminals: what runs, how far it is, and the time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._next = 0.0

    def __enter__(self) -> "Table":
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(text, markup=False, soft_wrap=True)

    def refresh(self, runner: Runner) -> None:
        """Draw the table again, once a second."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 1
            self._live.update(table(runner), refresh=True)


def table(runner: Runner) -> Any:
    """The rich table of a runner: a row for each running task, the counts and the time left below."""
    from rich.table import Table as Rich
    from rich.text import Text

    left = runner.seconds_left()
    counts = f"{runner.summary()}, {len(runner.running)} running, {len(runner.queue)} waiting"
    drawn = Rich(caption=f"{counts}{'' if left is None else f', {duration(left)} left'}", caption_justify="left")
    for name, justify in (
        ("running", "left"),
        ("seed", "right"),
        ("done", "right"),
        ("evaluation", "right"),
        ("for", "right"),
    ):
        drawn.add_column(name, justify=justify)  # type: ignore[arg-type]
    for tasks in runner.running.values():
        share, score = runner.store.progress(tasks[0])
        variant = f" [{tasks[0].variant}]" if tasks[0].variant else ""
        seeds = str(tasks[0].seed) + (f"-{tasks[-1].seed}" if len(tasks) > 1 else "")
        started = runner.store.record(tasks[0]).get("started", time.time())
        drawn.add_row(
            Text(f"{tasks[0].script.name}{variant} {tasks[0].env_id}"),
            seeds,
            "" if share is None else f"{100 * share:.0f} %",
            "" if score is None else f"{score:.1f}",
            duration(time.time() - started),
        )
    return drawn
