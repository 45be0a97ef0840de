"""The engine `manual`: a submission is written and nothing is started.

Tools that have no engine here (Kubernetes, SkyPilot) start `solo work PLAN SUBMISSION` for each index of it. There is
no connection to them, so none counts as alive: a repeated command submits what has neither a result nor a lease.
"""

from collections.abc import Mapping, Sequence

from solorl.lab.studies.engines.cluster import Submission, check_options


class Manual:
    """Workers that somebody else starts."""

    name = "manual"
    array_limit = 10_000

    def submit(self, submission: Submission) -> list[str]:
        """See `Cluster.submit`: the file of the submission is there already."""
        return [f"{submission.name}/{index}" for index in range(len(submission.tasks))]

    def alive(self, handles: Sequence[str]) -> set[str]:
        """None: the leases of the study tell what runs."""
        return set()

    def cancel(self, handles: Sequence[str], force: bool = False) -> None:
        """Nothing: a worker sees in the study that its task is cancelled."""

    def logs(self, handle: str) -> str:
        """Nothing: ask the tool that has started the worker."""
        return ""


def open(options: Mapping[str, str]) -> Manual:
    """The engine. UsageError for any option."""
    check_options(options, (), "manual")
    return Manual()
