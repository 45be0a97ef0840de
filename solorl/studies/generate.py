"""Files for clusters that have no engine of their own here: a Kubernetes Indexed Job and a SkyPilot task.

Both start the worker command for each task of a submission, as the engines do. They are written as JSON, which both
tools read (JSON is a part of YAML).
"""

import json
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from solorl.errors import UsageError
from solorl.studies.engines.cluster import AGAIN, GRACE
from solorl.studies.resources import Resources
from solorl.studies.study import ATTEMPTS

BAD_INPUT = 2  # exit code of the worker: no repetition helps


def kubernetes_job(
    plan_url: str,
    submission_name: str,
    count: int,
    resources: Resources,
    image: str,
    parallelism: int = 0,
    *,
    attempts: int = ATTEMPTS,
    service_account: str = "",
) -> dict[str, Any]:
    """An Indexed Job (Kubernetes 1.33 or newer) of `count` workers, at most `parallelism` at once (0: no limit).

    An interrupted pod starts again, also after it saved itself, and counts as no attempt. UsageError for a plan that
    pods cannot reach, an image without a name, or numbers below 1.
    """
    parallelism = min(parallelism or count, count)
    _check(plan_url, image, count=count, parallelism=parallelism, attempts=attempts)
    gpus = {"nvidia.com/gpu": str(resources.gpus)} if resources.gpus else {}
    memory = {"memory": f"{resources.memory}M"} if resources.memory else {}  # megabytes
    container = {
        "name": "worker",
        "image": image,
        "args": ["work", plan_url, submission_name],  # the index comes by JOB_COMPLETION_INDEX
        "resources": {
            "requests": {"cpu": str(resources.cores), **memory, **gpus},
            "limits": {**memory, **gpus},  # a limit of cores would slow a training down, not protect others
        },
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {
        "restartPolicy": "Never",  # the job counts attempts, not the node
        "terminationGracePeriodSeconds": GRACE,
        # The worker keeps the time limit itself; this ends one that hangs.
        **({"activeDeadlineSeconds": resources.time + 2 * GRACE} if resources.time else {}),
        "automountServiceAccountToken": False,
        **({"serviceAccountName": service_account} if service_account else {}),
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _exit_code(AGAIN)},
        {"action": "FailIndex", "onExitCodes": _exit_code(BAD_INPUT)},
    ]
    labels = {"app.kubernetes.io/name": "solorl"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": label(plan_url, submission_name), "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": parallelism,
            "backoffLimitPerIndex": attempts - 1,
            "podFailurePolicy": {"rules": rules},
            "podReplacementPolicy": "Failed",  # not while the old pod still saves: two would train the same task
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def skypilot(
    plan_url: str,
    submission_name: str,
    count: int,
    resources: Resources,
    image: str,
    *,
    attempts: int = ATTEMPTS,
    gpu: str = "L4",
) -> dict[str, Any]:
    """A managed job on spot machines; `sky jobs launch --num-jobs COUNT FILE` starts `count` of them, one for a task.

    SkyPilot tells each its number, and rents a new machine where one was taken away. UsageError as in `kubernetes_job`.
    """
    _check(plan_url, image, count=count, attempts=attempts)
    # On a virtual machine, with its network, because the machine hands out the rights to the bucket.
    docker = ["docker", "run", "--rm", "--network", "host", *(["--gpus", "all"] if resources.gpus else []), image]
    worker = shlex.join([*docker, "work", plan_url, submission_name])
    return {
        "name": label(plan_url, submission_name),
        "resources": {
            "cpus": f"{resources.cores}+",
            **({"memory": f"{math.ceil(resources.memory / 1000)}+"} if resources.memory else {}),  # gigabytes
            **({"accelerators": {gpu: resources.gpus}} if resources.gpus else {}),
            "use_spot": True,
            "job_recovery": {"max_restarts_on_errors": attempts - 1, "recover_on_exit_codes": [AGAIN]},
        },
        "run": f'{worker} --index "$SKYPILOT_JOB_RANK"\n',
    }


def label(plan_url: str, submission_name: str) -> str:
    """A name that Kubernetes and SkyPilot accept, with room for `-INDEX`: study and number of the submission."""
    study = PurePosixPath(urlsplit(plan_url).path).name or urlsplit(plan_url).netloc
    words = f"solorl-{study[:32]}-{PurePosixPath(submission_name).stem}".lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


def text(document: Mapping[str, Any]) -> str:
    """The document as it stands in a file."""
    return json.dumps(document, indent=2) + "\n"


def _exit_code(code: int) -> dict[str, Any]:
    return {"containerName": "worker", "operator": "In", "values": [code]}


def _check(plan_url: str, image: str, **numbers: int) -> None:
    scheme = urlsplit(plan_url).scheme
    if scheme in ("", "file", "local", "memory"):
        raise UsageError(f"a cluster cannot reach {plan_url}: the study must be in a bucket, such as s3://BUCKET/STUDY")
    if not re.fullmatch(r"\S+", image):
        raise UsageError(
            f"--image must name an image that the cluster can fetch, such as ghcr.io/me/solorl:1, not {image!r}"
        )
    for name, number in numbers.items():
        if number < 1:
            raise UsageError(f"{name} must be at least 1, not {number}")
