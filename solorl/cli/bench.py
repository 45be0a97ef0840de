"""`solo bench`: scripts x environments x seeds x variants, many at once; to continue, repeat the command."""

import shlex
import sys
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from solorl.cli import Parser, fleet
from solorl.cli.view import Lines, Table
from solorl.envs.ids import check_env_id_of
from solorl.errors import UsageError
from solorl.lab.studies.checks import check_name, check_texts
from solorl.lab.studies.engines import check_storage, open_engine
from solorl.lab.studies.engines.workers import following
from solorl.lab.studies.fleet import Fleet, retry, standings
from solorl.lab.studies.found import newest
from solorl.lab.studies.plan import (
    Flags,
    Plan,
    as_flag,
    find_python,
    load_script,
    load_suite,
    make_tasks,
    merge,
    of_modules,
    ordered,
    parse_flags,
    seed_range,
    short,
)
from solorl.lab.studies.plan_file import LONGEST_LEASE, MOST_ATTEMPTS
from solorl.lab.studies.resources import read_resources
from solorl.lab.studies.storage import Folder, open_storage
from solorl.lab.studies.study import ATTEMPTS, LEASE, Study
from solorl.lab.studies.task import Task
from solorl.lab.studies.until import expected, read_time
from solorl.lab.studies.worker import command, why_again
from solorl.machine import own_cores
from solorl.terminal import duration, plain

EPILOG = """a suite file or scripts; flags after -- go to every script:
  solo bench benchmark/suites/classic.toml --workers 4
  solo bench ppo my_ppo.py --env-ids CartPole-v1 Acrobot-v1 --num-seeds 10 -- --learning-rate 1e-3
  solo bench ppo --env-ids CartPole-v1 --num-seeds 10 --sweep clip-coef=0.1,0.2 --sweep anneal-lr=true,false
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
    plan = (suite_plan if args.what[0].endswith(".toml") else script_plan)(args, extra, given)
    if args.storage or args.engine != "local":
        for flag in ("dry_run", "runs_dir"):
            if getattr(args, flag):
                raise UsageError(f"solo bench: --{flag.replace('_', '-')} is for runs without --storage")
        check_storage(args.engine, args.storage)
    worker_count(args.workers, "solo bench")
    folder = args.results or Path("benchmark/results") / plan.name
    default = Path("runs", "bench" if args.engine == "local" else "studies", plan.name)
    where = args.storage or str(args.runs_dir or default)
    for path in (folder, Path(where)):
        if path.exists() and not path.is_dir():
            raise UsageError(f"solo bench: {path} is a file, but should be a folder")
    if args.dry_run:
        return dry_run(Study(Folder(Path(where)), plan.name, {task.id: task for task in plan.tasks}), plan.tasks)
    return run(plan, args, where, folder)


def _parser() -> Parser:
    parser = Parser("bench", "Run scripts x environments x seeds x variants and collect their results.")
    parser.formatter_class, parser.epilog = RawDescriptionHelpFormatter, EPILOG
    parser.add_argument("what", metavar="SUITE.toml | SCRIPT", nargs="+", help="a suite, or algorithms and .py files")
    parser.add_argument("--env-ids", metavar="ID", nargs="+", default=[], help="environments; of a suite: only these")
    parser.add_argument("--num-seeds", metavar="N", type=int, help="seeds of each (default 1); of a suite: the first N")
    parser.add_argument("--start-seed", metavar="S", type=int, help="the first seed (default 1)")
    parser.add_argument(
        "--sweep", metavar="FLAG=V,V", action="append", default=[], help="a variant for each value, kl-coef=0,0.1,1"
    )
    parser.add_argument("--variant", metavar="NAME", help="name of the flags after -- in results (default: the flags)")
    parser.add_argument("--python", metavar="PATH", help="the Python that runs the scripts (default: this one)")
    parser.add_argument("--workers", metavar="N", type=int, help="runs at once (default: one for each core)")
    parser.add_argument(
        "--results", metavar="DIR", type=Path, help="default benchmark/results/NAME OF SUITE OR SCRIPTS"
    )
    parser.add_argument("--runs-dir", metavar="DIR", type=Path, help="default runs/bench/NAME OF SUITE OR SCRIPTS")
    parser.add_argument("--until", metavar="HH:MM", help="begin no run that cannot end by this time of day")
    fleet.add_flags(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    return parser


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
    for flag, value in (
        ("--start-seed", args.start_seed),
        ("--variant", args.variant),
        ("--sweep", args.sweep or None),
    ):
        if value is not None:
            raise UsageError(f"solo bench: {flag} is for scripts; {args.what[0]} says it itself")
    if args.num_seeds is not None and args.num_seeds < 1:
        raise UsageError(f"solo bench: --num-seeds must be at least 1, not {args.num_seeds}")
    python = "" if args.python is None else find_python(args.python)
    return load_suite(Path(args.what[0]), extra, args.env_ids, args.num_seeds, python, given)


def sweep(text: str) -> list[Flags]:
    """The flags of each value in `FLAG=VALUE,VALUE`; UsageError for any other text."""
    name, _, values = text.removeprefix("--").partition("=")
    found = values.split(",")
    if not all(found) or len(set(found)) < len(found):
        raise UsageError(f"solo bench: --sweep is a flag with different values, as kl-coef=0,0.1,1, not {text}")
    return [as_flag(name, {"true": True, "false": False}.get(value, value), "--sweep") for value in found]


def script_plan(args: Any, extra: Flags, given: dict[str, Any]) -> Plan:
    """The tasks of a command line without a suite; UsageError where it names no environments."""
    scripts = [load_script(name) for name in args.what]
    if not args.env_ids:
        raise UsageError("solo bench needs --env-ids, such as --env-ids CartPole-v1 Acrobot-v1")
    count = 1 if args.num_seeds is None else args.num_seeds
    seeds = seed_range(count, 1 if args.start_seed is None else args.start_seed, "solo bench")
    swept = [merge(*parts) for parts in product(*map(sweep, args.sweep))]
    names = [
        short(merge(extra, part)) if args.variant is None else f"{args.variant} {short(part)}".strip() for part in swept
    ]
    variants = {name: merge(extra, part) for name, part in zip(names, swept, strict=True)}
    if any(len(part) < len(args.sweep) for part in swept):
        raise UsageError("solo bench: --sweep names a flag twice")
    python = "" if args.python is None else find_python(args.python)
    resources = read_resources(given, "the flags of solo bench")
    tasks = make_tasks(scripts, dict.fromkeys(args.env_ids), seeds, variants, python=python, resources=resources)
    name = "-".join(dict.fromkeys(script.name for script in scripts))
    check_name(name, "solo bench: the names of the scripts, joined,")
    return Plan(name, ordered(tasks))


def dry_run(study: Study, tasks: Sequence[Task]) -> int:
    """Print a command a line, ready to paste, for all that is not finished."""
    root, done = study.storage.folder or Path(), study.done()
    found = {task.id: newest([root / work for work in study.works(task.id)], task) for task in tasks}
    waiting = [task for task in tasks if task.id not in done and found[task.id].status != "finished"]
    count = len(tasks) - len(waiting)
    while waiting:
        task, run_dir = waiting.pop(0), None
        if not why_again(found[task.id], study.attempts(task.id)):
            run_dir = found[task.id].run_dir
        fresh = [other for other in waiting if found[other.id].run_dir is None]
        several = following(task, fresh) if found[task.id].run_dir is None else []
        waiting = [other for other in waiting if other not in several]
        number = len(study.attempts(task.id)) + 1
        argv, cwd, _ = command(task, root / "tasks" / task.id, number, run_dir, 1 + len(several))
        line, where = shlex.join(argv), shlex.quote(str(cwd))
        print(line if task.script.ours else f"(mkdir -p {where} && cd {where} && SOLORL_RUN_DIR={where} {line})")
    for env_id in dict.fromkeys(task.env_id for task in of_modules(tasks)):
        print(f"not checked: {plain(env_id)}; only the run itself imports its module", file=sys.stderr)
    if count:
        print(f"{count} of {len(tasks)} are finished", file=sys.stderr)
    return 0


def run(plan: Plan, args: Any, where: str, folder: Path) -> int:
    """Bring the plan to its end on the engine and say how it went; the exit code. UsageError where it cannot begin."""
    local, kept = args.engine == "local", args.storage is not None
    attempts = (ATTEMPTS if kept or not local else 1) if args.attempts is None else args.attempts
    lease = LEASE if args.lease is None else args.lease
    if not 1 <= attempts <= MOST_ATTEMPTS:
        raise UsageError(f"solo bench: --attempts must be from 1 to {MOST_ATTEMPTS}, not {attempts}")
    if not 1 <= lease <= LONGEST_LEASE:
        raise UsageError(f"solo bench: --lease must be from 1 to {LONGEST_LEASE:,.0f} seconds, not {lease:g}")
    if local and args.detach:
        raise UsageError("solo bench: --detach is for clusters; the engine local works only while the command runs")
    for task in of_modules(plan.tasks):  # who runs a suite has started the modules that it names
        check_env_id_of(task.script.path, task.env_id, task.script.env_kind)
    if args.until and not local:
        raise UsageError("solo bench: --until is for the engine local; on a cluster --time limits each run")
    until = read_time(args.until) if args.until else 0.0
    options = fleet.engine_options(args, plan)
    cluster = open_engine(args.engine, options)
    view: Lines | Table = Table() if local and sys.stdout.isatty() else Lines()
    study = Study(open_storage(where), plan.name, {task.id: task for task in plan.tasks}, attempts, lease)
    runner = Fleet(study, plan.tasks, cluster, options, view, folder)
    if until and runner.local:
        runner.local.may_begin = lambda task: time.time() + expected(study, task, folder) < until
    began, place = time.monotonic(), shlex.quote(where)
    write(study, plan, forgive=local and not kept)
    count = f"{len(plan.tasks)} {'run' if len(plan.tasks) == 1 else 'runs'}"
    with view:
        at_once = f"with {runner.local.slots} at once" if runner.local else f"on {args.engine}"
        view.say(f"{count} {at_once}; output in {place}")
        code = runner.run(args.detach)
    again = f"to try again: solo bench retry {place}, then the same command" if kept or not local else ""
    for line in conclusion(runner, code, time.monotonic() - began, again):
        print(line)
    if args.detach or (code > 1 and not local):
        print(f"what is submitted continues; look: solo bench status {place}")
    return code


def write(study: Study, plan: Plan, forgive: bool) -> None:
    """Write the plan; with `forgive` what has failed before may fail again. UsageError where the storage refuses,
    unless all is there."""
    try:
        study.write()
        if forgive:
            found = standings(study, plan.tasks)
            retry(study, [task for task in plan.tasks if found[task.id].state in ("failed", "cancelled")])
    except OSError as error:
        if {task.id for task in plan.tasks} - study.done():
            raise UsageError(f"{study.storage.where} cannot be written: {error.strerror or error}") from None


def conclusion(runner: Fleet, code: int, seconds: float, again: str) -> list[str]:
    """The last lines: what is there, what is not, and what to do; `again` is it for what has failed."""
    tasks, collector = runner.tasks, runner.collector
    before = f" ({len(runner.skipped)} of them before)" if runner.skipped else ""
    lines = [f"{runner.count()} of {len(tasks)} finished{before} in {duration(seconds)}"]
    failed = {task_id: found.reason for task_id, found in runner.failed.items()}
    for what, reasons in (
        (f"failed; {again or 'the same command tries them again'}:", failed),
        ("finished but not collected; the same command collects them:", collector.problems),
        ("finished without a table; no run folder and no TensorBoard files were in:", collector.bare),
    ):
        lines += [f"{len(reasons)} {what}"] if reasons else []
        lines += [f"  {task}: {reasons[task.id]}" for task in tasks if task.id in reasons]
    if late := len(runner.late):
        lines.append(f"{late} not begun, because they could not end in time; the same command continues")
    if code > 1:
        lines.append("interrupted; the same command continues")
    if collector.tables:
        lines.append(f"results in {collector.folder}; compare them: solo report {shlex.quote(str(collector.folder))}")
    return lines
