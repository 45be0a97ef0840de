"""The engine `slurm`: workers as one array job for each submission, by Slurm's own commands on this machine.

Slurm warns a job before its time limit, and before a job of higher priority takes its place: SIGUSR1 goes to the batch
script, which tells the worker to save. A job that ends in its grace time has finished for Slurm, so the script puts a
task that is to continue (exit code 75) back into the queue. A killed task is submitted again by `solo bench`.
"""

import contextlib
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from solorl.errors import UsageError
from solorl.files import filled
from solorl.lab.studies.engines.cluster import AGAIN, GRACE, Submission, check_options

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol")
OPTIONS = ("partition", "account", "qos", "nice", "max_running", "sbatch", "setup", "python", "logs")
MARGIN = 300  # seconds that a job gets beyond the time of its task, which the worker watches itself
PATIENCE = 120  # seconds that a command of Slurm may take
# What is over, and what is over soon: the words of Slurm.
GONE = r"Invalid job id|already complet"
SILENT = r"not answered|Unable to contact|timed out|temporarily unavailable|Connection refused"
# The shell outlives signals, and passes them on as SIGUSR1: where Slurm sends SIGTERM, all processes of the job have it
# already, and a second one would end the worker at once. A worker that SIGUSR1 ends (138) had not begun. A job that is
# cancelled, or that Slurm itself puts back, is COMPLETING by now; `scontrol requeue` would revive a cancelled one.
SCRIPT = Path(__file__).with_name("slurm.sh")


class Slurm:
    """Slurm, by its commands. A handle is `JOB_INDEX@FOLDER`, the folder that of its output."""

    name = "slurm"

    def __init__(self, options: Mapping[str, str], array_limit: int):
        self._options, self.array_limit = options, array_limit

    def submit(self, submission: Submission) -> list[str]:
        """See `Cluster.submit`."""
        folder = self._folder(submission.plan)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"the folder {folder} for Slurm's output cannot be made: {error.strerror}") from None
        try:
            job = _run(["sbatch", "--parsable"], self.script(submission)).strip().partition(";")[0]
        except OSError as error:
            if re.search(SILENT, str(error)):
                raise
            raise UsageError(f"Slurm refuses the tasks: {error}") from None
        return [f"{job}_{index}@{folder}" for index in range(len(submission.tasks))]

    def script(self, submission: Submission) -> str:
        """The batch script of a submission."""
        given, wanted = self._options, submission.resources
        most = f"%{given['max_running']}" if "max_running" in given else ""
        output = str(self._folder(submission.plan)).replace("%", "%%")
        words = {
            "job-name": re.sub(r"[^\w.+-]", "_", submission.title),
            "array": f"0-{len(submission.tasks) - 1}{most}",
            "output": _quoted(f"{output}/%A_%a.txt"),
            "open-mode": "append",
            "signal": f"B:USR1@{GRACE}",  # Slurm may do so a minute earlier
            "nodes": "1",
            "ntasks": "1",
            "cpus-per-task": str(wanted.cores),
            "gres": f"gpu:{wanted.gpus}" if wanted.gpus else "",
            "mem": f"{math.ceil(wanted.memory * 1e6 / 2**20)}M" if wanted.memory else "",
            "time": str(math.ceil((wanted.time + MARGIN) / 60)) if wanted.time else "",
            **{key: _quoted(given[key]) for key in ("partition", "account", "qos", "nice") if key in given},
        }
        lines = ["#SBATCH --requeue", *(f"#SBATCH --{key}={value}" for key, value in words.items() if value)]
        lines += [f"#SBATCH {given['sbatch']}"] if "sbatch" in given else []
        setup = f"{given['setup']}\n" if "setup" in given else ""
        command = shlex.join(submission.command(python=given.get("python", sys.executable)))
        parts = {"DIRECTIVES": "\n".join(lines), "SETUP": setup, "COMMAND": command, "AGAIN": str(AGAIN)}
        return filled(SCRIPT, parts)

    def alive(self, handles: Sequence[str]) -> set[str]:
        """See `Cluster.alive`."""
        jobs = {handle.partition("_")[0] for handle in handles}
        if not jobs:
            return set()
        words = ["squeue", "--noheader", "--array", "--format=%F_%K", "--jobs", ",".join(sorted(jobs))]
        found = {line.strip() for line in _run(words, ignored=GONE).splitlines()}
        return {handle for handle in handles if _job(handle) in found}

    def cancel(self, handles: Sequence[str], force: bool = False) -> None:
        """See `Cluster.cancel`. Slurm kills what has not ended after its KillWait, 30 seconds in general."""
        alive = self.alive(handles)
        jobs = [_job(handle) for handle in handles if handle in alive]
        for part in [jobs[i : i + 500] for i in range(0, len(jobs), 500)]:
            if force:
                _run(["scancel", "--full", "--signal=KILL", *part], ignored=GONE)
            _run(["scancel", *part], ignored=GONE)

    def logs(self, handle: str) -> str:
        """See `Cluster.logs`."""
        with contextlib.suppress(FileNotFoundError):
            return Path(handle.partition("@")[2], f"{_job(handle)}.txt").read_text(errors="replace")
        return ""

    def _folder(self, plan: str) -> Path:
        """Where the output of jobs goes: a folder that all machines see."""
        default = "slurm" if "://" in plan else f"{plan}/slurm"
        return Path(self._options.get("logs", default)).absolute()


def _job(handle: str) -> str:
    return handle.partition("@")[0]


def _quoted(text: str) -> str:
    """A word of an #SBATCH line."""
    return text if re.fullmatch(r"[\w%@:,./+-]+", text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _run(words: Sequence[str], script: str = "", ignored: str = "") -> str:
    """What a command of Slurm prints, also where it fails with words that are to be ignored. OSError with its words
    where it fails or does not answer."""
    try:
        done = subprocess.run(words, input=script, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise OSError(f"{words[0]} has not answered for {PATIENCE} seconds") from None
    if done.returncode and not (ignored and re.search(ignored, done.stderr)):
        said = [line.partition("rror: ")[2] or line for line in done.stderr.splitlines() if line.strip()]
        raise OSError(f"{words[0]}: {'; '.join(said[-2:]) or f'exit code {done.returncode}'}")
    return done.stdout


def open(options: Mapping[str, str]) -> Slurm:
    """The engine. UsageError for an option that is none, and where Slurm's commands are missing or fail."""
    check_options(options, OPTIONS, "slurm")
    for name, pattern in (("nice", r"-?\d{1,9}"), ("max_running", r"[1-9]\d{0,8}")):
        if name in options and not re.fullmatch(pattern, options[name]):
            least = " from 1" if name == "max_running" else ""
            raise UsageError(f"the option {name} of slurm must be a whole number{least}, not {options[name]:.40}")
    if "sbatch" in options and not re.fullmatch(r"-[^\n]*", options["sbatch"]):
        raise UsageError("the option sbatch of slurm must be options of sbatch, such as --exclude=node7")
    if missing := [name for name in COMMANDS if shutil.which(name) is None]:
        raise UsageError(f"this machine has no {missing[0]}: the engine slurm needs a login node of a Slurm cluster")
    try:
        found = re.search(r"MaxArraySize\s*=\s*(\d+)", _run(["scontrol", "show", "config"]))
    except OSError as error:
        raise UsageError(f"Slurm does not answer: {error}") from None
    return Slurm(options, int(found[1]) if found else 1000)
