"""Where metrics go: a file of JSON lines and TensorBoard always, Weights & Biases with `--track`.

A row is a dict of floats with `global_step` (environment steps) and `wall_time` (seconds of training so far, sessions
before a resume included). No tracker can stop a training: one that fails gives one warning and is left alone.
"""

import importlib.util
import json
import math
import netrc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from solorl.args.arguments import RunArgs
from solorl.errors import needs_extra, refuse
from solorl.files import sync_file
from solorl.terminal import warn


class MetricsFile:
    """`metrics.jsonl`: one row a line, complete after a kill. It begins with the first `size` bytes, those of the
    checkpoint that is resumed, and says so where some of them are missing. Raises OSError.

    `problem` is the error for which rows wait in memory; None where all are written.
    """

    def __init__(self, path: Path, size: int = 0):
        self.path, self._size = path, size
        self.problem: OSError | None = None
        self._waiting: list[str] = []  # rows that a full disk has not taken yet
        path.touch()
        if size > path.stat().st_size:
            self._size = path.read_bytes().rfind(b"\n") + 1
            warn(f"rows of {path} are missing: of {size} bytes {self._size} are left")
        os.truncate(path, self._size)

    def write(self, rows: list[dict[str, float]]) -> None:
        """Append the rows; where the disk is full they wait in memory for the next call, with one warning.

        JSON has no NaN and no infinite numbers: such a value is left out.
        """
        finite = [{name: value for name, value in row.items() if math.isfinite(value)} for row in rows]
        self._waiting += [json.dumps(row) + "\n" for row in finite]
        data = "".join(self._waiting).encode()
        try:
            with open(self.path, "ab") as file:
                self._size = min(self._size, file.tell())  # it is less where somebody has removed the file
                file.truncate(self._size)  # a full disk may have taken a part of the rows that wait
                file.write(data)
        except OSError as error:
            if self.problem is None:
                warn(f"metrics wait in memory: {self.path} cannot be written ({error.strerror})")
            self.problem = error
            return
        self._size += len(data)
        self._waiting, self.problem = [], None

    def sync(self) -> int:
        """Put all rows on the disk and return the file's size in bytes. Raises OSError where that fails."""
        self.write([])
        if self.problem is not None:
            raise self.problem
        sync_file(self.path)
        return self._size


class TensorBoard:
    """An event file in the run folder. Each row is written here and now: the thread of tensorboardX's own writer ends
    where a disk is full, and the queue before it then blocks the training for ever."""

    def __init__(self, folder: Path, purge_step: int | None):
        # tensorboardX would load torch, seconds, for no use, unless it is there already
        torch: Any = sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        try:
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.record_writer import masked_crc32c
        finally:
            if torch is None:
                del sys.modules["torch"]
        self._event, self._crc = Event, masked_crc32c
        self._path = folder / f"events.out.tfevents.{int(time.time())}.{os.getpid()}"
        self._append(file_version="brain.Event:2")
        if purge_step is not None:
            self._append(step=purge_step, session_log={"status": 1})  # START: forget the events from this step on

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """One event with all scalars: 8 times cheaper than an event each. Raises OSError."""
        self._append(step=step, summary={"value": [{"tag": tag, "simple_value": x} for tag, x in metrics.items()]})

    def _append(self, **facts: Any) -> None:
        """One record: length, event, and a checksum after each."""
        event = self._event(wall_time=time.time(), **facts).SerializeToString()
        parts = (len(event).to_bytes(8, "little"), event)
        with open(self._path, "ab") as file:
            file.write(b"".join(part + self._crc(part).to_bytes(4, "little") for part in parts))

    def close(self) -> None:
        """Nothing is open."""


class WandB:
    """Weights & Biases; WANDB_MODE=offline needs no account and no network."""

    def __init__(self, args: RunArgs, folder: Path):
        import wandb

        run_id = "".join(c if c.isalnum() or c in "-_" else "-" for c in folder.name)[-128:]
        of_run: dict[str, Any] = {"name": folder.name, "id": run_id, "dir": str(folder), "config": asdict(args)}
        of_run |= {"project": args.wandb_project_name, "entity": args.wandb_entity}
        self._run = wandb.init(resume="allow", reinit="create_new", **of_run)  # of several seeds each has its own
        self._run.define_metric("*", step_metric="global_step")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """One row at `step`."""
        self._run.log({"global_step": step, **metrics})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Safe:
    """A tracker that may fail: the first failure is told once, then the tracker is left alone."""

    def __init__(self, name: str, make: Callable[[], Any]):
        self._name = name
        self._tracker: Any = self._tried(make)

    def _tried(self, action: Callable[..., Any], *inputs: Any) -> Any:
        try:
            return action(*inputs)
        except Exception as error:  # whatever a tracker throws must not reach the training
            self._tracker = None
            warn(f"{self._name} is off, the training continues: {type(error).__name__}: {error}")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """One row at `step`."""
        if self._tracker is not None:
            self._tried(self._tracker.write, step, metrics)

    def close(self) -> None:
        """Close the tracker."""
        if self._tracker is not None:
            self._tried(self._tracker.close)


def check_wandb(args: RunArgs) -> None:
    """UsageError where `--track` cannot work; a folder named `wandb` is not the package."""
    if not args.track:
        return
    spec = importlib.util.find_spec("wandb")
    refuse(spec is None or spec.origin is None, f"{needs_extra('--track', 'wandb')}; --no-track trains without")
    how = "`wandb login` or WANDB_API_KEY; WANDB_MODE=offline needs none"
    refuse(not _has_login(), f"--track needs a login of Weights & Biases: {how}, and --no-track trains without")


def _has_login() -> bool:
    """Whether Weights & Biases finds a key, where `wandb login` leaves it or in the environment, or needs none."""
    offline = os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled")
    if offline or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        hosts = netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").hosts
    except (OSError, netrc.NetrcParseError):
        return False
    server = urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc  # else of wandb.ai, or of `wandb login --host`
    return server in hosts if server else any("wandb" in host for host in hosts)


def trackers_of(args: RunArgs, folder: Path, purge_step: int | None) -> list[Safe]:
    """TensorBoard, which forgets its events from `purge_step` on, and Weights & Biases with `--track`."""
    found = [Safe("TensorBoard", lambda: TensorBoard(folder, purge_step))]
    if args.track:
        found.append(Safe("Weights & Biases", lambda: WandB(args, folder)))
    return found
