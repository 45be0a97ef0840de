"""Seeds that are trained together: their run folders, and from which checkpoint they continue."""

import dataclasses
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from solorl.args.arguments import check_unchanged, saved_arguments
from solorl.errors import UsageError
from solorl.files import is_plain_name, read_json, write_atomically
from solorl.run.verbs import Run
from solorl.runfolder import CONFIG, TOGETHER, checkpoints, status_of, step_of


def arguments_of(args: Any, threads: int) -> list[Any]:
    """The arguments of each seed of a group as if it were trained alone, so that it can be resumed alone, with the
    `threads` of XLA for all. UsageError for run folders that do not continue together."""
    folders = [args.resume] * args.num_seeds
    if args.resume and args.num_seeds > 1:
        first = Path(args.resume)
        names = read_json(first / TOGETHER).get("runs")
        names = names if isinstance(names, list) and names and all(map(is_plain_name, names)) else [first.name]
        if len(names) != args.num_seeds or names[0] != first.name:
            all_of_them = f"--resume {shlex.quote(str(first.with_name(names[0])))} --num-seeds {len(names)}"
            what = f"{first} is one of {len(names)} seeds trained together"
            raise UsageError(f"{what}; continue them all by {all_of_them}, or with one by its own folder")
        folders = [str(first.with_name(name)) for name in names]
        if gone := [folder for folder in folders if not Path(folder, CONFIG).exists()]:
            raise UsageError(f"there is no run folder {gone[0]}; continue one seed by its own folder")
    alone: dict[str, Any] = {"num_seeds": 1, "threads": threads}
    arguments = [dataclasses.replace(args, seed=args.seed + i, resume=each, **alone) for i, each in enumerate(folders)]
    for each in arguments[1:] if args.resume else ():
        check_unchanged(each, saved_arguments(Path(each.resume), type(each)))
    return arguments


def note_group(active: Sequence[Run], names: Sequence[str]) -> None:
    """Each run folder knows the names of all, so that all continue together."""
    for run in active:
        write_atomically(run.dir / TOGETHER, json.dumps({"runs": names}).encode())


def choose_checkpoints(runs: Sequence[Run], say: Callable[[str], None]) -> list[int]:
    """Let seeds continue from the newest step of which each has a checkpoint, for the process may have been killed
    after some of them had saved. A seed that had come to its end before the others is left out. Returns the seeds that
    continue. UsageError where they cannot."""
    steps = [[step_of(path) for path in checkpoints(run.dir)] for run in runs]
    newest = [max(each, default=0) for each in steps]
    statuses = [str(status_of(run.dir).get("status", "")) for run in runs]
    ended = [status == "finished" or status.startswith("diverged") for status in statuses]
    if all(ended) and len(set(newest)) > 1:
        raise UsageError(f"the seeds stand at different steps ({newest}); resume each alone, by its own folder")
    active = [i for i in range(len(runs)) if not ended[i] or newest[i] == max(newest)]
    common = max(set.intersection(*(set(steps[i]) for i in active)), default=0)
    saves = [len(steps[i]) for i in active]
    if common == 0 and (min(saves) > 0 or max(saves) > 1):  # else they were killed before each had saved once
        why = f"their newest are of the steps {newest}"
        raise UsageError(f"the seeds have no checkpoint of one step ({why}); resume each alone, by its folder")
    for i, run in enumerate(runs):
        if i not in active:
            say(f"seed {run.args.seed} stays as it is: {statuses[i]}, last saved at step {newest[i]:,}")
        elif steps[i]:  # a seed without a checkpoint may begin again only if it never had one
            run.checkpoints.until = common
    return active
