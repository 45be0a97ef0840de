"""Seeds that are trained together: their run folders, and from which checkpoint they continue."""

import dataclasses
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from solorl.args.arguments import check_unchanged, saved_arguments
from solorl.checkpoints import checkpoint
from solorl.checkpoints.safety import is_plain_name
from solorl.errors import UsageError, quit_with
from solorl.files import read_json
from solorl.run.verbs import Run
from solorl.terminal import warn


def arguments_of(args: Any, threads: int) -> list[Any]:
    """The arguments of each seed of a group as if it were trained alone, so that it can be resumed alone, with the
    `threads` of XLA for all. One sentence and exit code 2 for run folders that do not continue together."""
    folders = [args.resume] * args.num_seeds
    if args.resume and args.num_seeds > 1:
        first = Path(args.resume)
        file = first / "together.json"
        names = names_in(file) if file.exists() else [first.name]
        if len(names) != args.num_seeds or names[0] != first.name:
            quit_with(
                f"{first} is one of {len(names)} seeds trained together; continue them all by "
                f"--resume {shlex.quote(str(first.with_name(names[0])))} --num-seeds {len(names)}, "
                "or with one by its own folder"
            )
        folders = [str(first.with_name(name)) for name in names]
        if gone := [folder for folder in folders if not Path(folder, "config.json").exists()]:
            quit_with(f"there is no run folder {gone[0]}; continue one seed by its own folder")
    alone: dict[str, Any] = {"num_seeds": 1, "threads": threads}
    arguments = [
        dataclasses.replace(args, seed=args.seed + i, resume=folder, **alone) for i, folder in enumerate(folders)
    ]
    try:
        for each in arguments[1:] if args.resume else ():
            check_unchanged(each, saved_arguments(Path(each.resume), type(each)))
    except UsageError as error:
        quit_with(error)
    return arguments


def names_in(file: Path) -> list[str]:
    """The run folders that `together.json` names; one sentence and exit code 2 where it does not hold such names."""
    try:
        names = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(map(is_plain_name, names)) or len(set(names)) < max(1, len(names)):
        quit_with(f"{file} is malformed: it must be a list of different names of run folders; one seed continues alone")
    return names


def choose_checkpoints(runs: Sequence[Run], say: Callable[[str], None]) -> tuple[list[int], int | None, bool]:
    """Let seeds continue from the newest step of which each has a whole checkpoint, whether the process was killed
    after some of them had saved or a checkpoint is damaged. Seeds that had ended before the others are left out.

    Returns the seeds that continue, the step (None: from the beginning), and whether a seed that does not continue had
    diverged. One sentence and exit code 2 where they cannot continue together.
    """
    folders = [run.dir / "checkpoint" for run in runs]
    found = [[checkpoint.step_of(path) for path in checkpoint.checkpoints(folder)] for folder in folders]
    newest = [max(steps, default=0) for steps in found]
    statuses = [str(read_json(run.dir / "status.json").get("status", "")) for run in runs]
    active = going_on(newest, statuses)
    if not active:
        quit_with(f"the seeds stand at different steps ({newest}); resume each alone, by its own folder")
    common, notes = checkpoint.newest_common([folders[i] for i in active])
    killed = any(finality(statuses[i]) == 0 for i in active)
    saves = [len(found[i]) for i in active]
    first_save = killed and min(saves) == 0 and max(saves) <= 1  # it came only to some of them, if any
    if common is None and not first_save:
        why = "; ".join(notes) or f"their newest are of the steps {newest}"
        quit_with(f"the seeds have no whole checkpoint of one step ({why}); resume each alone, by its own folder")
    for note in notes:
        warn(f"{note}; all seeds continue from the checkpoint before it")
    for i, run in enumerate(runs):
        if found[i]:  # a seed without a checkpoint may begin again only if it never had one
            run.checkpoints.until = common or 0
        if i not in active:
            say(f"seed {run.args.seed} stays as it is: {statuses[i]}, last saved at step {newest[i]:,}")
    diverged = any(statuses[i].startswith("diverged") for i in range(len(runs)) if i not in active)
    return active, common, diverged


def finality(status: str) -> int:
    """2: the run has come to its end, 1: it was stopped, 0: it was killed."""
    return 2 if status.startswith("diverged") else {"stopped": 1, "finished": 2}.get(status, 0)


def going_on(newest: Sequence[int], statuses: Sequence[str]) -> list[int]:
    """The seeds that continue together: those that were killed (else those that were stopped, else all), and those that
    ended at the same step; none where all have ended at different steps. `newest`: steps of their last checkpoints."""
    ended = [finality(status) for status in statuses]
    steps = [step for step, how in zip(newest, ended, strict=True) if how == min(ended)]
    if min(ended) == 2 and len(set(steps)) > 1:
        return []
    return [i for i, step in enumerate(newest) if ended[i] == min(ended) or step == max(steps)]
