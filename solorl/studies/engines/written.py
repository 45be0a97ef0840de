"""Kubernetes and SkyPilot: what a submission needs is written into a file, which their own tools start.

There is no connection to either, so none counts as alive. A repeated command writes a file for what is missing.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from solorl.errors import UsageError
from solorl.files import shown, write
from solorl.studies.engines.cluster import Submission, check_options
from solorl.studies.generate import kubernetes_job, skypilot, text
from solorl.studies.resources import count


class Written:
    """A cluster whose submissions are files: FILE, and for more than one FILE-2, FILE-3."""

    array_limit = 10_000

    def __init__(self, name: str, path: Path, document: Callable[[Submission], dict[str, Any]], start: str):
        self.name, self._path, self._document, self._start = name, path, document, start
        self._written = 0

    def submit(self, submission: Submission) -> list[str]:
        """See `Cluster.submit`. UsageError for a study in a folder, and where the file cannot be written."""
        content = text(self._document(submission)).encode()
        self._written += 1
        number = f"-{self._written}" if self._written > 1 else ""
        path = self._path.with_stem(self._path.stem + number)
        write(path, content)
        print(
            f"wrote      {shown(path)}; start it: {self._start.format(count=len(submission.tasks), file=shown(path))}"
        )
        return [f"{path.resolve()}/{index}" for index in range(len(submission.tasks))]

    def alive(self, handles: Sequence[str]) -> set[str]:
        """None: there is no connection. The leases of the study tell what runs."""
        return set()

    def cancel(self, handles: Sequence[str], force: bool = False) -> None:
        """Nothing: a worker sees in the study that its task is cancelled."""

    def logs(self, handle: str) -> str:
        """Nothing: ask `kubectl logs` or `sky jobs logs`."""
        return ""


def _image(options: Mapping[str, str], engine: str) -> str:
    if not options.get("image"):
        raise UsageError(f"the engine {engine} needs --engine-option image=NAME, a container image with solorl")
    return options["image"]


def open_kubernetes(options: Mapping[str, str]) -> Written:
    """An Indexed Job in the file `write`. Options: image, parallelism, service_account."""
    check_options(options, ("write", "image", "parallelism", "service_account"), "kubernetes")
    image = _image(options, "kubernetes")
    most = count(options.get("parallelism", "0"), 0, "the option parallelism of the engine kubernetes")

    def document(one: Submission) -> dict[str, Any]:
        account = options.get("service_account", "")
        return kubernetes_job(
            one.plan, one.name, len(one.tasks), one.resources, image, most, service_account=account
        )  # fmt: skip

    return Written("kubernetes", Path(options.get("write", "job.json")), document, "kubectl apply --filename {file}")


def open_skypilot(options: Mapping[str, str]) -> Written:
    """A managed job in the file `write`. Options: image, gpu (the kind, such as L4)."""
    check_options(options, ("write", "image", "gpu"), "skypilot")
    image, gpu = _image(options, "skypilot"), options.get("gpu", "L4")

    def document(one: Submission) -> dict[str, Any]:
        return skypilot(one.plan, one.name, len(one.tasks), one.resources, image, gpu=gpu)

    start = "sky jobs launch --num-jobs {count} {file}"
    return Written("skypilot", Path(options.get("write", "sky.yaml")), document, start)
