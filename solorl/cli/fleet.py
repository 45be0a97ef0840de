"""`solo bench` on a cluster, and its verbs for a study that is there: status, logs, cancel, retry, collect."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from solorl.cli import Parser
from solorl.errors import UsageError
from solorl.lab.studies import fleet
from solorl.lab.studies.checks import check_texts
from solorl.lab.studies.collect import Collector
from solorl.lab.studies.engines import ENGINES, open_again
from solorl.lab.studies.plan import Plan
from solorl.lab.studies.storage import refusal
from solorl.lab.studies.study import ATTEMPTS, LEASE, Study, open_study
from solorl.lab.studies.task import Task
from solorl.terminal import plain

VERBS = ("status", "logs", "cancel", "retry", "collect")
RESOURCES = ("cores", "gpus", "memory", "time")


def add_flags(parser: Parser) -> None:
    """The flags of `solo bench` that are for clusters."""
    group = parser.add_argument_group("on a cluster, or with --storage")
    add_engine_flags(group, ENGINES)
    group.add_argument("--image", metavar="NAME", help="container of the workers: --engine-option image=NAME")
    group.add_argument("--storage", metavar="WHERE", help="folder or URL of the study (default runs/studies/NAME)")
    group.add_argument("--attempts", metavar="N", type=int, help=f"how often a run may fail (default {ATTEMPTS})")
    lost = f"without a sign of a worker, then it is dead (default {LEASE:.0f})"
    group.add_argument("--lease", metavar="SECONDS", type=float, help=lost)
    group.add_argument("--detach", action="store_true", help="submit and return")


def add_engine_flags(group: Any, engines: Iterable[str]) -> None:
    """The flags that choose an engine, its options, and what each run gets of it."""
    group.add_argument("--engine", metavar="NAME", default="local", help=f"{', '.join(engines)} (default local)")
    group.add_argument("--engine-option", metavar="KEY=VALUE", action="append", help="an option of the engine")
    group.add_argument("--cores", metavar="N", help="of each run (default 1)")
    group.add_argument("--gpus", metavar="N", help="of each run (default 0)")
    group.add_argument("--memory", metavar="SIZE", help="of each run, as 4GB (default: what the scheduler gives)")
    group.add_argument("--time", metavar="TIME", help="that each run may take, as 2h (default: no limit)")


def given_resources(args: Any) -> dict[str, str]:
    """The resources that flags give."""
    return {name: getattr(args, name) for name in RESOURCES if getattr(args, name, None) is not None}


def engine_options(args: Any, plan: Plan) -> dict[str, str]:
    """The options of the engine: the suite's, then those of the command line. UsageError for one that is none."""
    options = {**plan.engines.get(args.engine, {}), **read_options(args.engine_option, "solo bench")}
    args.detach |= args.engine == "manual"
    if args.image:
        options["image"] = args.image
    if args.workers is not None:
        if args.engine != "local":
            raise UsageError("solo bench: --workers is for the engine local; a cluster starts as many as it can")
        options["workers"] = str(args.workers)
    return options


def read_options(given: Sequence[str] | None, verb: str) -> dict[str, str]:
    """What `--engine-option` says, each KEY=VALUE; UsageError for one that is none."""
    options = {}
    for text in given or []:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"{verb}: --engine-option must be KEY=VALUE, such as partition=gpu, not {text}")
        options[key] = value
    return options


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def collect(study: Study, tasks: Sequence[Task], folder: Path) -> int:
    """Write the tables of what has finished and say so; 1 where one could not be written."""
    collector, done = Collector(study, folder, say), study.done()
    for task in tasks:
        if task.id in done:
            collector.keep(task)
    if collector.tables:
        say(f"{len(collector.tables)} tables in {folder}; compare them: solo report {shlex.quote(str(folder))}")
    return int(bool(collector.problems))


# ---------------------------------------------------------------------- verbs
def main(argv: Sequence[str]) -> int:
    """`solo bench VERB PLAN [TASK]`; UsageError for a study or task that is not there."""
    verb = argv[0]
    check_texts(list(argv), f"solo bench {verb}")
    parser = Parser(f"bench {verb}", "Look after a study that `solo bench --storage` has made.")
    parser.add_argument("plan", metavar="PLAN", help="the folder or URL of the study")
    parser.add_argument(
        "task", metavar="TASK", nargs=None if verb == "logs" else "?", help="the id of a task, or its start"
    )
    if verb == "collect":
        parser.add_argument("--results", metavar="DIR", type=Path, help="default benchmark/results/NAME OF STUDY")
    if verb in ("logs", "cancel"):
        where = "of Ray (HOST:PORT) or AWS (a URL), unless RAY_ADDRESS or AWS_ENDPOINT_URL says it"
        parser.add_argument("--address", metavar="WHERE", default="", help=where)
    args = parser.parse(argv[1:])
    study = open_study(args.plan)
    tasks = [study.find(args.task)] if args.task else list(study.tasks.values())
    try:
        if verb == "collect":
            return collect(study, tasks, args.results or Path("benchmark/results") / study.name)
        if verb in ("logs", "cancel"):
            return (logs if verb == "logs" else cancel)(study, tasks, args.address)
        return (status if verb == "status" else retry)(study, tasks)
    except OSError as error:
        raise UsageError(refusal(error, study.storage.where)) from None


def status(study: Study, tasks: Sequence[Task]) -> int:
    """Say how each task stands; 1 where any has failed."""
    found = fleet.standings(study, tasks)
    states = [one.state for one in found.values()]
    for task in tasks:
        one = found[task.id]
        if one.state != "finished" or len(tasks) == 1:
            count = f" after {one.used} of {study.limit} attempts" if one.used else ""
            say(f"{one.state:<10} {task.id}{count}{one.reason and ': '}{one.reason}")
            if one.state == "failed":
                say("".join(f"    | {line}\n" for line in one.tail).rstrip("\n"))
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    say(f"{study.name}: {len(tasks)} tasks: {', '.join(counts)}")
    return int("failed" in states)


def logs(study: Study, tasks: Sequence[Task], address: str) -> int:
    """Print what a task's attempts printed, as far as it came up to the storage; else what the scheduler has."""
    task = tasks[0]
    names = [name for name in study.storage.list(f"tasks/{task.id}") if name.split("/")[2].startswith("output-")]
    for name in names:
        say_all(f"==== {name}\n{study.storage.read(name).decode(errors='replace')}")
    handles = [
        (about, handle)
        for about in study.submissions()
        for task_id, handle in zip(about.get("tasks", []), about.get("handles", []), strict=False)
        if task_id == task.id
    ]
    if not names and handles:
        about, handle = handles[-1]
        say_all(open_again(about, address).logs(handle) or f"{task.id} has printed nothing yet")
    return 0


def say_all(text: str) -> None:
    """Print what a training has printed, line by line: it may not control this terminal."""
    say("\n".join(plain(line) for line in text.rstrip().splitlines()))


def cancel(study: Study, tasks: Sequence[Task], address: str) -> int:
    """Cancel tasks that have not finished."""
    fleet.cancel(study, tasks, lambda about: open_again(about, address))
    say(f"cancelled; what runs saves and stops within {study.lease / 4:.0f} seconds")
    return 0


def retry(study: Study, tasks: Sequence[Task]) -> int:
    """Allow tasks again that have failed or were cancelled."""
    say(f"{fleet.retry(study, tasks)} tasks may run again; the command that has made the study submits them")
    return 0
