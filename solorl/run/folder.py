"""The run folder: who may write there, its script, config.json, status.json and rows, and what could not be written."""

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from solorl.args.arguments import ONCE, RunArgs
from solorl.compute.device import device_name
from solorl.errors import UsageError, denied
from solorl.files import git_state, near, remove_leftovers, sha256, write_atomically
from solorl.machine import cpu_model
from solorl.run.hub import Kept
from solorl.run.trackers import MetricsFile, Safe, trackers_of
from solorl.runfolder import CHECKPOINTS, CONFIG, FORMAT, METRICS, STOP, as_written, config_of, lock, write_config
from solorl.scripts import PACKAGE, in_checkout, script_paths
from solorl.terminal import warn
from solorl.trust import note_start, refuse_hard_link

PACKAGES = ("solorl", "gymnasium", "numpy", "torch", "jax", "mujoco", "ale-py", "envpool", "Box2D")


def new_path(args: RunArgs, script: Path) -> Path:
    """Where the folder of a run that starts now will be."""
    env_id = str(getattr(args, "env_id", "run")).replace("/", "_").replace(":", "_")
    name = f"{env_id}__{args.exp_name or script.stem}__{args.seed}"
    return Path(args.runs_dir) / f"{name}__{time.strftime('%Y%m%d-%H%M%S')}"


@cache
def own_state() -> str:
    """After the version of this library, the commit of its checkout; nothing where it is installed."""
    git = git_state(PACKAGE, ".") if in_checkout() else None
    return f"+g{git['commit'][:12]}{'.changed' * git['dirty']}" if git else ""


git_at_start = cache(git_state)  # a process may begin thousands of runs


def circumstances(args: RunArgs, script: Path, device: Any) -> dict[str, Any]:
    """The circumstances of a run: its arguments, command, versions, git commit and machine."""
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name) + own_state() * (name == "solorl")
    return {
        "format": FORMAT,
        "script": script.name,
        "script_path": str(script.absolute()),
        "script_sha256": sha256(script),
        "args": as_written(args),
        "command": [script.name, *sys.argv[1:]],
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "git": git_at_start(script.parent),
        "python": platform.python_version(),
        "versions": versions,
        "machine": {
            "system": platform.platform(terse=True),
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "device": device_name(device),
        },
    }


class RunFolder:
    """The folder of one run. Nothing is written before `open`, and nothing at all where that is not called."""

    def __init__(self, path: Path):
        self.path = path
        self.kept, self.data = Kept(), dict[str, list[str]]()  # data: what config.json says of the run's data sets
        self.status = ""
        self.problems: dict[str, str] = {}  # what the run has to leave here -> why it could not be written, or ""
        self.metrics: MetricsFile | None = None
        self.trackers: list[Safe] = []
        self._lock: Any = None  # an open file, while this process trains here

    def lock(self) -> None:
        """Keep other processes from training here until `unlock`. UsageError where one does so already."""
        refuse_hard_link(self.path / METRICS)  # all else that is written here is a new file
        self._lock = lock(self.path)

    def unlock(self) -> None:
        """Let other processes train here."""
        if self._lock:
            self._lock.close()

    def make(self) -> None:
        """Make the folder, with a counter after its name where that exists already, and lock it. UsageError."""
        for i in count(1):
            path = self.path if i == 1 else self.path.with_name(f"{self.path.name}-{i}")
            try:
                path.mkdir(parents=True)
            except OSError as error:
                if os.path.lexists(path):  # else there is a link to nowhere on the way
                    continue
                raise UsageError(f"the run folder {near(self.path)} cannot be written: {error.strerror}") from None
            self.path = path
            return self.lock()

    def open(self, args: RunArgs, script: Path, device: Any, saved: dict[str, Any]) -> None:
        """Write the script and its circumstances, unless they are there, and cut the rows back to those of the
        checkpoint whose counters are `saved` (empty: to none). UsageError where that cannot be done."""
        with denied(f"the run folder {near(self.path)} cannot be written"):
            remove_leftovers(self.path)
            (self.path / CHECKPOINTS).mkdir(exist_ok=True)
            write_atomically(self.path / script.name, script.read_bytes())  # a resumed run may have a newer version
            if not args.resume:
                write_config(self.path, circumstances(args, script, device) | self.data)
            if script not in script_paths().values():
                note_start(script.absolute())
                note_start((self.path / script.name).resolve())  # so that the run is played when the script has changed
            (self.path / STOP).unlink(missing_ok=True)
            self.metrics = MetricsFile(self.path / METRICS, saved.get("metrics_bytes", 0))
            self.kept.copy_to(self.path)
            if args.resume:
                self._record_changes(args, script, saved.get("step", 0))
        note_start(self.path / CONFIG)
        forgotten = saved.get("step", -1) + 1 if args.resume else None  # events from this step on
        self.trackers = trackers_of(args, self.path, forgotten)

    def _record_changes(self, args: RunArgs, script: Path, step: int) -> None:
        """What the command line of a resumed run changes is the run's from now on: the next `--resume` has it, too. So
        is the script: the weights that it trains would be others in its older version."""
        config = config_of(self.path)
        now = {"script_sha256": sha256(script), **self.data}
        version = {name: [config.get(name), x] for name, x in now.items() if x != config.get(name, x)}
        if "script_sha256" in version:
            warn(f"{script.name} has changed since the run in {near(self.path)} was started, which has the new one now")
            now |= {"script_path": str(script.absolute())}
        old = config["args"]
        changed = {k: [old.get(k), x] for k, x in as_written(args).items() if k not in ONCE and x != old.get(k)}
        if changed or version:
            config.setdefault("changes", []).append({"step": step, "args": changed, **version})
            config |= {**now, "args": old | {name: value for name, (_, value) in changed.items()}}
            write_config(self.path, config)

    @contextmanager
    def writing(self, name: str, what: str = "", kept: bool = False) -> Iterator[None]:
        """What is written inside is `name`, which the run has to leave here. Where that fails, a warning calls it
        `what`, says whether an earlier one is `kept`, and `problems` has the reason."""
        try:
            yield
            self.problems[name] = ""
        except OSError as error:
            self.problems[name] = str(error.strerror)
            note = "; the one before it is kept" if kept else ""
            warn(f"{what or name} could not be written ({error.strerror}){note}")

    def write_rows(self, rows: list[dict[str, float]], step: int = 0, tracked: dict[str, float] | None = None) -> None:
        """Append to metrics.jsonl, and give the trackers the row of `step` that is `tracked`, if there is one."""
        if self.metrics is not None:
            self.metrics.write(rows)
            self.problems[METRICS] = str(self.metrics.problem.strerror) if self.metrics.problem else ""
        if tracked:
            for tracker in self.trackers:
                tracker.write(step, tracked)

    def missing(self) -> dict[str, str]:
        """What the run had to leave here and is not here -> why."""
        gone = {name: "it is gone" for name in self.problems if not (self.path / name).exists()}
        return gone | {name: why for name, why in self.problems.items() if why}
