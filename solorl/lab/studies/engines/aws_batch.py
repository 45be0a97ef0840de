"""The engine `aws-batch`: workers are containers of AWS Batch, one array job for each submission.

Containers see no folder of the submitting machine: the study must be in S3, and the package comes with the image, whose
entry point is `solo`. Batch itself starts again what lost its machine or left 75; all else is left to the fleet.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from solorl.errors import UsageError, did_you_mean
from solorl.lab.studies.engines.aws import clients, told
from solorl.lab.studies.engines.cluster import AGAIN, Submission, check_options
from solorl.lab.studies.resources import Resources

OPTIONS = ("queue", "image", "definition", "region", "job_role", "execution_role", "log_group", "endpoint_url")
MEMORY = 4096  # MiB of a task that names none: Batch needs a number
STARTS = 10  # of one job, as many as Batch allows
SLACK = 600  # seconds over a task's time limit, which the worker keeps itself, after which Batch kills
GROUP = 100  # jobs that one call may ask about
LIVE = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")
LOG_GROUP = "/aws/batch/job"  # where Batch writes logs unless the definition says otherwise


class BatchCluster:
    """Jobs in one queue of AWS Batch."""

    name = "aws-batch"
    array_limit = 10_000

    def __init__(self, options: Mapping[str, str], batch: Any, logs: Any):
        self._options, self._batch, self._logs = options, batch, logs

    def check(self) -> None:
        """UsageError unless the queue takes jobs and the definition, if one is given, is there."""
        queue, definition = self._options["queue"], self._options.get("definition")
        region = self._batch.meta.region_name
        with told("the queue cannot be looked at"):
            found = self._batch.describe_job_queues(jobQueues=[queue])["jobQueues"]
            names = [] if found else [one["jobQueueName"] for one in self._batch.describe_job_queues()["jobQueues"]]
            if definition and not self._definitions(definition):
                raise UsageError(f"AWS Batch has no active job definition {definition} in {region}")
        if not found:
            hint = did_you_mean(queue, names) or f"; there are {', '.join(names[:9]) or 'none'}"
            raise UsageError(f"AWS Batch has no job queue {queue} in {region}{hint}")
        state = [found[0].get(key, "") for key in ("state", "status", "statusReason")]
        if state[0] != "ENABLED" or state[1] in ("INVALID", "DELETING", "DELETED"):
            raise UsageError(f"the job queue {queue} takes no jobs: it is {', '.join(filter(None, state))}")

    def submit(self, submission: Submission) -> list[str]:
        """See `Cluster.submit`."""
        many, wanted = len(submission.tasks), submission.resources
        command = submission.words(None if many > 1 else 0)
        request: dict[str, Any] = {"arrayProperties": {"size": many}} if many > 1 else {}  # there are no arrays of one
        if wanted.time:
            request["timeout"] = {"attemptDurationSeconds": wanted.time + SLACK}
        with told(f"{submission.name} is refused", silent=True):
            job = self._batch.submit_job(
                jobName=re.sub(r"[^A-Za-z0-9]+", "-", f"solo-{submission.title[:80]}-{submission.name[12:-5]}"),
                jobQueue=self._options["queue"],
                jobDefinition=self._options.get("definition") or self._definition(),
                containerOverrides={"command": command, "resourceRequirements": requirements(wanted)},
                **request,
            )["jobId"]
        return [f"{job}:{index}" for index in range(many)] if many > 1 else [job]

    def alive(self, handles: Sequence[str]) -> set[str]:
        """See `Cluster.alive`. UsageError where Batch says that it can never start a job that waits."""
        jobs = self._live(handles)
        for job in jobs:
            if job["status"] == "RUNNABLE" and (why := job.get("statusReason", "")).startswith("MISCONFIGURATION"):
                raise UsageError(f"AWS Batch cannot start {job['jobName']}: {why}; take it back: solo bench cancel")
        return {job["jobId"] for job in jobs}

    def cancel(self, handles: Sequence[str], force: bool = False) -> None:
        """See `Cluster.cancel`. Waiting jobs are withdrawn. Running ones are told by the files of the study only,
        because Batch would kill them 30 seconds after its SIGTERM; with `force` it does."""
        call = self._batch.terminate_job if force else self._batch.cancel_job
        with told("a job cannot be cancelled"):
            for job in self._live(handles):
                call(jobId=job["jobId"], reason="solo bench cancel")

    def logs(self, handle: str) -> str:
        """See `Cluster.logs`: of the last start, its newest 10,000 lines."""
        with told("there is no log", silent=True):
            container: dict[str, Any] = next((job.get("container", {}) for job in self._described([handle])), {})
            group = container.get("logConfiguration", {}).get("options", {}).get("awslogs-group")
            where = {"logGroupName": group or self._options.get("log_group", LOG_GROUP)}
            with contextlib.suppress(self._logs.exceptions.ResourceNotFoundException, KeyError):  # nothing printed yet
                found = self._logs.get_log_events(logStreamName=container["logStreamName"], **where)["events"]
                return "\n".join(event["message"] for event in found)
        return ""

    def _live(self, handles: Sequence[str]) -> list[dict[str, Any]]:
        """Those that wait or run. Of an array that has ended, which is one question, no part is asked about."""
        with told("it does not say what is alive", silent=True):
            arrays = self._described(handle.partition(":")[0] for handle in handles)
            live = {job["jobId"] for job in arrays if job["status"] in LIVE}
            jobs = self._described(handle for handle in handles if handle.partition(":")[0] in live)
        return [job for job in jobs if job["status"] in LIVE]

    def _described(self, handles: Iterable[str]) -> list[dict[str, Any]]:
        """What Batch knows about jobs; those that it has forgotten are left out."""
        names, found = sorted(set(handles)), []
        for i in range(0, len(names), GROUP):
            found += self._batch.describe_jobs(jobs=names[i : i + GROUP])["jobs"]
        return found

    def _definitions(self, name: str) -> list[dict[str, Any]]:
        words = {"jobDefinitions": [name]} if ":" in name else {"jobDefinitionName": name}
        found: list[dict[str, Any]] = self._batch.describe_job_definitions(status="ACTIVE", **words)["jobDefinitions"]
        return found

    def _definition(self) -> str:
        """The name of a job definition for the image, which is registered unless it is there."""
        content = definition(self._options, self._batch.meta.region_name)
        name = f"solo-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}"
        if not self._definitions(name):
            self._batch.register_job_definition(jobDefinitionName=name, **content)
        return name


def definition(options: Mapping[str, str], region: str) -> dict[str, Any]:
    """A job definition for an image: what all jobs have in common."""
    again = [{"onStatusReason": "Host EC2*", "action": "RETRY"}, {"onExitCode": str(AGAIN), "action": "RETRY"}]
    roles = {"jobRoleArn": options.get("job_role"), "executionRoleArn": options.get("execution_role")}
    container: dict[str, Any] = {key: value for key, value in roles.items() if value}
    if "log_group" in options:
        group = {"awslogs-group": options["log_group"], "awslogs-region": region, "awslogs-stream-prefix": "work"}
        container["logConfiguration"] = {"logDriver": "awslogs", "options": group}
    container |= {
        "image": options["image"],
        "command": ["--help"],  # each job brings its own, and its resources
        "resourceRequirements": requirements(Resources()),
        "environment": [{"name": "AWS_DEFAULT_REGION", "value": region}],
    }
    retry = {"attempts": STARTS, "evaluateOnExit": [*again, {"onReason": "*", "action": "EXIT"}]}
    return {"type": "container", "containerProperties": container, "retryStrategy": retry}


def requirements(wanted: Resources) -> list[dict[str, str]]:
    """Resources in the words of Batch."""
    memory = -(-wanted.memory * 10**6 // 2**20) or MEMORY
    amounts = {"VCPU": wanted.cores, "MEMORY": memory, "GPU": wanted.gpus}
    return [{"type": kind, "value": str(value)} for kind, value in amounts.items() if value]


def open(options: Mapping[str, str]) -> BatchCluster:
    """The engine. UsageError for missing or unknown options, without boto3, credentials, region or rights, and where
    the queue takes no jobs."""
    check_options(options, OPTIONS, "aws-batch")
    if not options.get("queue"):
        raise UsageError("the engine aws-batch needs the name of a job queue: --engine-option queue=NAME")
    if ("image" in options) == ("definition" in options):
        raise UsageError("the engine aws-batch needs either --image NAME:TAG or --engine-option definition=NAME")
    for key in {"job_role", "execution_role"} & set(options):
        if "definition" in options or not options[key].startswith("arn:"):
            wrong = "belongs to the job definition" if "definition" in options else "must be an ARN, arn:aws:iam::..."
            raise UsageError(f"the option {key} of the engine aws-batch {wrong}")
    cluster = BatchCluster(options, *clients(("batch", "logs"), options.get("region"), options.get("endpoint_url")))
    cluster.check()
    return cluster
