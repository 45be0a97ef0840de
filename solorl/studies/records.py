"""Runs of an earlier version, which kept `tasks/ID.json` for each task, and its run folders below `ID/`. They become
results and attempts of the study in the same folder."""

import json

from solorl.errors import UsageError
from solorl.files import read_json
from solorl.machine import is_alive
from solorl.studies.found import newest, trainer
from solorl.studies.study import Study, attempt_name


def read_records(study: Study) -> None:
    """Take over what an earlier version has left of the study's tasks. UsageError where it still runs."""
    if (root := study.storage.folder) is None:
        return
    known = {path.stem: path for path in root.glob("tasks/*.json")}
    for task_id in [task_id for task_id in study.tasks if task_id in known]:
        task, record = study.tasks[task_id], read_json(known[task_id])
        work = str(record.get("work", task_id))
        work = work if work in study.tasks else task_id
        old, new = root / work, root / "tasks" / work
        if old.is_dir() and not new.exists():
            if is_alive(trainer(newest([old], task).run_dir)):
                raise UsageError(f"{task} still runs for a command of an earlier version, which must end first")
            old.rename(new)
        number = count if isinstance(count := record.get("attempts"), int) else 1
        found = newest([new if task.script.ours else new / f"attempt-{number}"], task)
        finished = "finished" in (found.status, record.get("state"))
        if not study.attempts(task_id):
            about = {"state": "finished" if finished else "stopped", "work": work, "seconds": record.get("seconds")}
            study.storage.create(attempt_name(task_id, number), json.dumps(about).encode())
        if finished and (found.run_dir or not task.script.ours):
            name = found.run_dir.relative_to(root).as_posix() if found.run_dir else ""
            study.accept(task_id, {"run_dir": name, "attempt": number, "seconds": record.get("seconds")})
        known[task_id].unlink()
