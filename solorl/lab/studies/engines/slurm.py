"""The engine `slurm`: an array of jobs by `sbatch`, which go back into the queue until no task is left.

Slurm warns a job before its time limit, and before a job of higher priority takes its place: SIGUSR1 goes to the batch
script, which tells the worker to save. A job that ends in its grace time has finished for Slurm, so the script puts a
worker that has saved (exit code 75), or was killed (over 128), back into the queue.
"""

import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from solorl.errors import UsageError, refuse, told
from solorl.lab.studies.engines import Job
from solorl.lab.studies.worker import AGAIN, GRACE
from solorl.machine import command_of

PASSED = ("partition", "account", "qos", "nice", "time", "constraint", "exclude")  # to sbatch as they are
OPTIONS = (*PASSED, "sbatch", "setup", "python", "logs")
# The shell outlives signals, and passes them on as SIGUSR1: where Slurm sends SIGTERM, all processes of the job have it
# already, and a second one would end the worker at once. A job that is cancelled, or that Slurm itself puts back, is
# COMPLETING by now; `scontrol requeue` would revive a cancelled one.
SCRIPT = """#!/bin/bash
{directives}

told= worker=
trap 'told=1; [ "$worker" ] && kill -USR1 $worker 2>/dev/null' TERM USR1
{setup}
{command} &
worker=$!
[ "$told" ] && kill -USR1 $worker
while told=; wait $worker; code=$?; [ "$told" ]; do :; done
if [ $code -eq {again} ] || [ $code -gt 128 ]; then
    job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
    [ "$(squeue --noheader --format=%T --jobs=$job)" = RUNNING ] && scontrol requeue $job
fi
exit $code
"""


def start(job: Job, options: Mapping[str, str], dry: bool) -> str:
    """See `solorl.lab.studies.engines`."""
    folder = Path(options.get("logs", "slurm" if "://" in job.where else f"{job.where}/slurm")).absolute()
    wanted = job.resources
    words = {
        "job-name": re.sub(r"[^\w.+-]", "_", job.title), "array": f"0-{job.workers - 1}", "open-mode": "append",
        "output": str(folder).replace("%", "%%") + "/%A_%a.txt", "signal": f"B:USR1@{GRACE}",
        "nodes": "1", "ntasks": "1", "cpus-per-task": str(wanted.cores),
        "gres": f"gpu:{wanted.gpus}" if wanted.gpus else "",
        "mem": f"{math.ceil(wanted.memory * 1e6 / 2**20)}M" if wanted.memory else "",
        **{key: value for key, value in options.items() if key in PASSED},
    }  # fmt: skip
    lines = [f"#SBATCH --{key}={shlex.quote(value)}" for key, value in words.items() if value]
    lines += ["#SBATCH --requeue", *([f"#SBATCH {options['sbatch']}"] if "sbatch" in options else [])]
    command = shlex.join(command_of(*job.words, python=options.get("python", sys.executable)))
    parts = {"directives": "\n".join(lines), "setup": options.get("setup", ""), "command": command}
    script = SCRIPT.format(**parts, again=AGAIN)
    if dry:
        return script
    if shutil.which("sbatch") is None:
        raise UsageError("this machine has no sbatch: the engine slurm needs a login node of a Slurm cluster")
    with told("nothing could be submitted to Slurm", str):
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, timeout=120)
    said = [line.partition("rror: ")[2] or line for line in done.stderr.splitlines() if line.strip()]
    refuse(done.returncode, f"Slurm refuses the workers: sbatch: {'; '.join(said[-2:]) or done.returncode}")
    return f"job {done.stdout.strip().partition(';')[0]} of Slurm; its output is in {folder}"
