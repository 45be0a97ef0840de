"""Whether a task can end by a given time: by the runs of its script on its environment that have finished."""

import glob
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median

from solorl.args.command_line import whole_number
from solorl.errors import UsageError
from solorl.lab.results.result import Result, ResultError, read
from solorl.lab.studies.runs import find
from solorl.lab.studies.study import Study
from solorl.lab.studies.task import Task
from solorl.runfolder import newest_step


def read_time(text: str) -> float:
    """The next moment at which the clock shows `text`, as `06:30`, in seconds since 1970; UsageError for others."""
    now = datetime.now()  # without a zone: `timestamp` knows which nights have another length
    try:
        clock = datetime.strptime(text, "%H:%M")
    except ValueError:
        raise UsageError(f"solo bench: --until must be a time of day, such as 06:30, not {text}") from None
    then = now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
    return (then if then > now else then + timedelta(days=1)).timestamp()


def expected(study: Study, tasks: list[Task], results: Path) -> float:
    """The seconds that a task still takes: its steps, times those of a step by the folder of `results` and the folders
    next to it; 0 where no run there tells. Several seeds in one process take as long as such a process took, and where
    it had fewer seeds in proportion longer."""
    task = tasks[0]
    name = glob.escape(Result(task.env_id, task.script.name, 0).file_name.removesuffix("0.json.gz"))
    runs: list[Result] = []
    for path in results.parent.glob(f"*/{name}*.json.gz"):
        with suppress(ResultError):
            runs += [run] if (run := read(path)).global_step else []
    if not (alike := [run for run in runs if run.variant == task.variant] or runs):
        return 0.0
    budgets = [float(run.args.get("total_timesteps", run.global_step)) for run in alike]
    for text in task.flags.get("--total-timesteps", ()):
        with suppress(ValueError):  # which the script will say itself
            budgets = [whole_number(text)]
    run_dir = find(study, task).run_dir
    left = median(budgets) - ((newest_step(run_dir) if run_dir else None) or 0)
    return max(0.0, left) * median(run.wall_time / run.global_step * max(1, len(tasks) / run.together) for run in alike)
