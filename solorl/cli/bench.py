"""Run scripts x environments x seeds x variants, many at once, and collect their results.

a suite file or scripts; flags after -- go to every script:
  solo bench benchmark/suites/classic.toml --workers 4
  solo bench ppo my_ppo.py --env-ids CartPole-v1 Acrobot-v1 --num-seeds 10 -- --learning-rate 1e-3
  solo bench ppo --env-ids CartPole-v1 --num-seeds 10 --sweep clip-coef=0.1,0.2 --sweep anneal-lr=true,false
  solo bench peer.py --python peers/bin/python --env-ids CartPole-v1

Any script that takes --env-id and --seed works; one that needs packages of its own runs with --python PATH, in a suite
`python = "PATH"`. What counts is the run folder or the TensorBoard files that it writes below its working folder. To
continue after an interruption, repeat the command: it skips what is finished, resumes what is half done and repeats
what failed; what has diverged or was cancelled only with --retry. A suite runs the first seed of all its jobs before
the second one; with `in_order = true` job by job.

The same command on another machine with the same --storage, a folder or a URL, joins the work. --engine slurm, ray or
aws starts workers there (`solo work STORAGE`) and returns; --dry-run shows what would be submitted. Then:
  solo bench status STORAGE [--json]  what has finished, runs, has failed; exit code 1 if any failed
  solo bench logs STORAGE TASK        what a run printed
  solo bench cancel STORAGE [TASK]    save and stop
  solo bench retry STORAGE [TASK]     allow what has failed or was cancelled again
  solo bench collect STORAGE          write the tables of what has finished
A script called status is meant by status.py.

Exit code 0: all finished, 1: not all (failed runs show their last lines), 130: Ctrl+C.
"""

import json
import shlex
import sys
import time
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from solorl.cli import Parser, at_least, say
from solorl.cli.view import Lines, Table
from solorl.envs.ids import check_env_id_of
from solorl.errors import UsageError, refuse
from solorl.lab.studies import plan as plans
from solorl.lab.studies.bench import Bench, dry_run
from solorl.lab.studies.checks import check_name, check_texts
from solorl.lab.studies.collect import Collector
from solorl.lab.studies.engines import ENGINES, Job, start
from solorl.lab.studies.resources import Resources, read_resources
from solorl.lab.studies.runs import find
from solorl.lab.studies.storage import Folder, open_storage, refusal
from solorl.lab.studies.study import ATTEMPTS, LEASE, Study, open_study, read_plans
from solorl.lab.studies.task import Task
from solorl.lab.studies.until import expected, read_time
from solorl.lab.studies.worker import Pool
from solorl.terminal import duration, plain

VERBS = ("status", "logs", "cancel", "retry", "collect")
RESOURCES = ("cores", "gpus", "memory", "time")
MOST_WORKERS = 1_000


def main(argv: Sequence[str]) -> int:
    """Run or print a plan; UsageError for a plan that cannot be."""
    check_texts(list(argv), "solo bench")
    if argv and argv[0] in VERBS:
        return look_after(argv)
    own, extra = split(argv)
    args = _parser().parse(own)
    given = {name: getattr(args, name) for name in RESOURCES if getattr(args, name) is not None}
    plan = (suite_plan if args.what[0].endswith(".toml") else script_plan)(args, extra, given)
    local, made = args.engine == "local", plans.of_modules(plan.tasks)
    options = {**plan.engines.get(args.engine, {}), **dict(args.engine_option)}
    folder = args.results or Path("benchmark/results") / plan.name
    where = args.storage or str(Path("runs/bench", plan.name))
    for path in (folder, Path(where)):
        refuse(path.exists() and not path.is_dir(), f"solo bench: {path} is a file, but should be a folder")
    refuse(args.until and not local, "solo bench: --until is for this machine; on a cluster --time limits each run")
    until, tasks = 0.0 if args.until is None else read_time(args.until), {task.id: task for task in plan.tasks}
    refuse(args.dry_run and local and "://" in where, "solo bench: --dry-run prints commands for folders, not buckets")
    if args.dry_run and local:
        dry_run(Study(Folder(Path(where)), plan.name, tasks), plan.tasks)
        for env_id in dict.fromkeys(task.env_id for task in made):
            print(f"not checked: {plain(env_id)}; only the run itself imports its module", file=sys.stderr)
    elif args.dry_run:
        print(start(args.engine, job(where, plan.name, plan.tasks, args.workers), options, dry=True))
    if args.dry_run:
        return 0
    for task in made:  # who runs a suite has started the modules that it names
        check_env_id_of(task.script.path, task.env_id, task.script.env_kind)
    try:
        storage = open_storage(where)
        there = read_plans(storage) or Study(storage, "", {}, 1 if local else ATTEMPTS)
        study = Study(storage, plan.name, tasks, args.attempts or there.attempts, args.lease or there.lease)
        study.write()
        study.retry(plan.tasks, final=args.retry)
        if local and args.workers != 0:
            return run(study, plan, args.workers or 0, until, folder)
        if not local and args.workers != 0:
            left = [task for task in plan.tasks if task.id not in study.ids()]
            say(start(args.engine, job(storage.where, plan.name, left, args.workers), options))
    except OSError as error:
        raise UsageError(refusal(error, where)) from None
    say(f"the plan is in {shlex.quote(where)}; look: solo bench status {shlex.quote(where)}")
    return 0


def job(where: str, name: str, tasks: Sequence[Task], workers: int | None) -> Job:
    """Workers with the largest resources that any of these tasks needs, one for each unless a number is given."""
    most = {each: max((getattr(task.resources, each) for task in tasks), default=0) for each in RESOURCES}
    there = where if "://" in where else str(Path(where).absolute())
    return Job(name, ("work", there), there, workers or min(len(tasks), MOST_WORKERS) or 1, Resources(**most))


def _parser() -> Parser:
    parser = Parser("bench", __doc__ or "")
    add = parser.add_argument
    add("what", metavar="SUITE.toml | SCRIPT", nargs="+", help="a suite, or algorithms and .py files")
    add("--env-ids", metavar="ID", nargs="+", default=[], help="environments; of a suite: only these")
    add("--num-seeds", metavar="N", type=at_least(1), help="of each (default 1); of a suite: first N")
    add("--start-seed", metavar="S", type=int, help="the first seed (default 1)")
    add("--sweep", metavar="FLAG=V,V", action="append", default=[], help="a variant for each value, kl-coef=0,0.1,1")
    add("--variant", metavar="NAME", help="name of the flags after -- in results (default: the flags)")
    add("--python", metavar="PATH", type=plans.find_python, help="the Python that runs the scripts (default: this one)")
    add("--workers", metavar="N", type=at_least(0, MOST_WORKERS), help="runs at once (default: one a core); 0: none")
    add("--results", metavar="DIR", type=Path, help="default benchmark/results/NAME OF THE SUITE")
    add("--storage", "--runs-dir", metavar="WHERE", help="folder or URL of the study (default runs/bench/SUITE)")
    add("--until", metavar="HH:MM", help="begin no run that cannot end by this time of day")
    add("--retry", action="store_true", help="begin what has diverged or was cancelled again, too")
    add("--attempts", metavar="N", type=at_least(1, 100), help=f"that may fail (default 1; engines: {ATTEMPTS})")
    lost = f"seconds without a sign of a worker, then it is dead (default {LEASE:.0f})"
    add("--lease", metavar="SECONDS", type=at_least(1, 86_400, float), help=lost)
    add("--dry-run", action="store_true", help="print the commands and run nothing")
    add_engine_flags(parser)
    return parser


def add_engine_flags(parser: Parser) -> None:
    """The flags that choose an engine, its options, and what each run gets of it."""
    add = parser.add_argument_group("on a cluster").add_argument
    add("--engine", metavar="NAME", default="local", help=f"{', '.join(ENGINES)} (default local)")
    add("--engine-option", metavar="KEY=VALUE", action="append", type=pair, default=[], help="as partition=gpu")
    add("--cores", metavar="N", help="of each run (default 1)")
    add("--gpus", metavar="N", help="of each run (default 0)")
    add("--memory", metavar="SIZE", help="of each run, as 4GB (default: what the scheduler gives)")
    add("--time", metavar="TIME", help="that each run may take, as 2h (default: no limit)")


def pair(text: str) -> tuple[str, str]:
    """The type of a flag that takes KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ArgumentTypeError(f"must be KEY=VALUE, such as partition=gpu, not {text}")
    return key, value


def split(argv: Sequence[str]) -> tuple[list[str], plans.Flags]:
    """The command's own words, and the flags after `--`."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], plans.parse_flags(words[cut + 1 :])


def suite_plan(args: Any, extra: plans.Flags, given: dict[str, Any]) -> plans.Plan:
    """The tasks of a suite file; UsageError for flags that a suite sets itself."""
    if len(args.what) > 1:
        raise UsageError(f"solo bench takes one suite or scripts, not {args.what[0]} and {args.what[1]}")
    for flag in ("start_seed", "variant", "sweep"):
        if getattr(args, flag) not in (None, []):
            raise UsageError(f"solo bench: --{flag.replace('_', '-')} is for scripts; {args.what[0]} says it itself")
    return plans.load_suite(Path(args.what[0]), extra, args.env_ids, args.num_seeds, args.python or "", given)


def sweep(text: str) -> list[plans.Flags]:
    """The flags of each value in `FLAG=VALUE,VALUE`; UsageError for any other text."""
    name, _, values = text.removeprefix("--").partition("=")
    found = values.split(",")
    if not all(found) or len(set(found)) < len(found):
        raise UsageError(f"solo bench: --sweep is a flag with different values, as kl-coef=0,0.1,1, not {text}")
    return [plans.as_flag(name, {"true": True, "false": False}.get(value, value), "--sweep") for value in found]


def script_plan(args: Any, extra: plans.Flags, given: dict[str, Any]) -> plans.Plan:
    """The tasks of a command line without a suite; UsageError where it names no environments."""
    scripts = [plans.load_script(name) for name in args.what]
    refuse(not args.env_ids, "solo bench needs --env-ids, such as --env-ids CartPole-v1 Acrobot-v1")
    count, first = (1 if each is None else each for each in (args.num_seeds, args.start_seed))
    seeds = plans.seed_range(count, first, "solo bench")
    swept = [plans.merge(*parts) for parts in product(*map(sweep, args.sweep))]
    refuse(any(len(part) < len(args.sweep) for part in swept), "solo bench: --sweep names a flag twice")
    names = [plans.short(plans.merge(extra, part)) for part in swept]
    if args.variant is not None:
        names = [f"{args.variant} {plans.short(part)}".strip() for part in swept]
    variants = {name: plans.merge(extra, part) for name, part in zip(names, swept, strict=True)}
    resources = read_resources(given, "the flags of solo bench")
    tasks = plans.make_tasks(scripts, dict.fromkeys(args.env_ids), seeds, variants, None, args.python or "", resources)
    name = "-".join(dict.fromkeys(script.name for script in scripts))
    check_name(name, "solo bench: the names of the scripts, joined,")
    return plans.Plan(name, plans.ordered(tasks))


def run(study: Study, plan: plans.Plan, workers: int, until: float, folder: Path) -> int:
    """Bring the plan to its end on this machine and say how it went; the exit code."""
    view: Lines | Table = Table() if sys.stdout.isatty() else Lines()
    pool = Pool(study, plan.tasks, workers, view.say)
    if until:
        pool.may_begin = lambda tasks: time.time() + expected(study, tasks, folder) < until
    bench, began, place = Bench(study, plan.tasks, pool, view, folder), time.monotonic(), study.storage.where
    with view:
        runs = f"{len(plan.tasks)} {'run' if len(plan.tasks) == 1 else 'runs'}"
        view.say(f"{runs} with {len(pool.workers)} at once; output in {shlex.quote(place)}")
        code = bench.run()
    for line in conclusion(bench, code, time.monotonic() - began):
        print(line)
    return code


def conclusion(bench: Bench, code: int, seconds: float) -> list[str]:
    """The last lines: what is there, what is not, and what to do."""
    tasks, collector, count = bench.tasks, bench.collector, len(bench.skipped | bench.finished)
    before = f" ({len(bench.skipped)} of them before)" if bench.skipped else ""
    lines = [f"{count} of {len(tasks)} finished{before} in {duration(seconds)}"]
    reasons = {name: {key: one.reason for key, one in bench.states.items() if one.name == name}
               for name in ("failed", "cancelled")}  # fmt: skip
    for what, found in (
        ("failed; the same command tries them again, with --retry what has diverged, too:", reasons["failed"]),
        ("cancelled; --retry begins them again:", reasons["cancelled"]),
        ("finished but not collected; the same command collects them:", collector.problems),
        ("finished without a table; no run folder and no TensorBoard files were in:", collector.bare),
    ):
        lines += [f"{len(found)} {what}"] if found else []
        lines += [f"  {task}: {found[task.id]}".rstrip(": ") for task in tasks if task.id in found]
    if late := len(bench.pool.late):
        lines.append(f"{late} not begun, because they could not end in time; the same command continues")
    lines += ["interrupted; the same command continues"] if code > 1 else []
    if old := sum(task.id not in collector.tables and collector.table(task).exists() for task in tasks):
        lines.append(f"{old} of these runs have the table of an earlier one there, maybe of another script or flags")
    folder = shlex.quote(str(collector.folder))
    return [*lines, *([f"results in {folder}; compare them: solo report {folder}"] if collector.tables else [])]


# ---------------------------------------------------------------------- a study that is there
def look_after(argv: Sequence[str]) -> int:
    """`solo bench VERB STORAGE [TASK]`; UsageError for a study or task that is not there."""
    verb = argv[0]
    parser = Parser(f"bench {verb}", "Look after a study that `solo bench` has made.")
    parser.add_argument("storage", metavar="STORAGE", help="the folder or URL of the study")
    parser.add_argument("task", metavar="TASK", nargs=None if verb == "logs" else "?", help="an id, or its start")
    parser.add_argument("--json", action="store_true", help="of status: for programs")
    parser.add_argument("--results", metavar="DIR", type=Path, help="of collect: default benchmark/results/NAME")
    args = parser.parse(argv[1:])
    study = open_study(args.storage)
    tasks = [study.find(args.task)] if args.task is not None else list(study.tasks.values())
    try:
        if verb == "status":
            return status(study, tasks, args.json)
        if verb == "cancel":
            say(f"{study.cancel(tasks)} cancelled; what runs saves and stops within {study.lease / 4:.0f} seconds")
        elif verb == "retry":
            say(f"{study.retry(tasks)} tasks may run again, by workers that are there or `solo bench`")
        elif verb == "logs":
            # a process that trains several seeds prints where the first one is
            at = find(study, tasks[0]).run_dir if tasks[0].script.ours else None
            name = f"tasks/{at.parent.name if at else tasks[0].id}/output.txt"
            text = study.storage.read(name).decode(errors="replace")
            say("\n".join(plain(line) for line in text.rstrip().splitlines()))
        else:
            folder, done = args.results or Path("benchmark/results") / study.name, study.ids()
            collector = Collector(study, folder, say, tasks[0].variant)
            newest = {collector.table(task): task for task in tasks if task.id in done}  # the last one planned
            lost = [task for task in newest.values() if not collector.keep(task)]
            for task in lost:
                say(f"lost       {task}: its run folder is gone")
            if older := sum(task.id in done for task in tasks) - len(newest):
                say(f"{older} left out: a later plan, with another script or flags, has runs of the same names")
            say(f"{len(collector.tables)} tables in {collector.folder}")
            return int(bool(collector.problems or lost))
    except FileNotFoundError:
        say(f"{args.task} has printed nothing yet")
    except OSError as error:
        raise UsageError(refusal(error, study.storage.where)) from None
    return 0


def status(study: Study, tasks: Sequence[Task], as_json: bool) -> int:
    """Say what has become of each task; 1 where any has failed."""
    found = study.states(tasks)
    counts = Counter(one.name for one in found.values())
    if as_json:
        about = {task_id: {"state": one.name, "reason": one.reason, "failures": len(one.failures), **one.holder}
                 for task_id, one in found.items()}  # fmt: skip
        say(json.dumps({"name": study.name, "counts": counts, "tasks": about}, indent=1))
        return int("failed" in counts)
    for task in tasks:
        one = found[task.id]
        if one.name != "finished" or len(tasks) == 1:
            say(f"{one.name:<10} {task.id}" + f": {one.reason}" * bool(one.reason))
            if one.name == "failed":
                say("".join(f"    | {plain(str(line))}\n" for line in one.last("tail")).rstrip("\n"))
    numbers = ", ".join(f"{count} {name}" for name, count in counts.items())
    say(f"{study.name}: {len(tasks)} tasks: {numbers}")
    return int("failed" in counts)
