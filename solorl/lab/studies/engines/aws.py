"""The engine `aws`: workers are containers of AWS Batch, parts of one array job. Batch itself starts one again that
lost its machine, was killed or has saved (exit code 75), as the job definition says.

Containers see no folder of this machine: the study must be in S3, and the package comes with the image, whose entry
point is `solo`. `cloud/aws` makes queue, definition and bucket.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import boto3
from botocore.config import Config

from solorl.errors import refuse, told
from solorl.lab.studies.engines import Job

OPTIONS = ("queue", "definition", "region", "endpoint_url")
MEMORY = 4096  # MiB of a worker whose tasks name none: Batch needs a number


def why(error: BaseException) -> str:
    """What an exception of boto3 says, in words; of the answer of the server first."""
    about = (getattr(error, "response", None) or {}).get("Error", {})  # None where a server has hung up
    return f"{about.get('Code', '')} {about.get('Message') or error}".strip()


def start(job: Job, options: Mapping[str, str], dry: bool) -> str:
    """See `solorl.lab.studies.engines`."""
    refuse(not job.where.startswith("s3://"), f"the engine aws needs --storage s3://BUCKET/STUDY, not {job.where}")
    for name in ("queue", "definition"):
        refuse(not options.get(name), f"the engine aws needs the name of a job {name}: --engine-option {name}=NAME")
    wanted = {"VCPU": job.resources.cores, "MEMORY": -(-job.resources.memory * 10**6 // 2**20) or MEMORY}
    wanted |= {"GPU": job.resources.gpus} if job.resources.gpus else {}
    amounts = [{"type": kind, "value": str(value)} for kind, value in wanted.items()]
    request: dict[str, Any] = {
        "jobName": re.sub(r"[^A-Za-z0-9]+", "-", f"solo-{job.title[:80]}"),
        "jobQueue": options["queue"], "jobDefinition": options["definition"],
        "containerOverrides": {"command": [*job.words], "resourceRequirements": amounts},
        **({"arrayProperties": {"size": job.workers}} if job.workers > 1 else {}),  # there are no arrays of one
    }  # fmt: skip
    if dry:
        return json.dumps(request, indent=1)
    where = {"region_name": options.get("region"), "endpoint_url": options.get("endpoint_url")}
    config = Config(retries={"mode": "standard", "total_max_attempts": 3}, connect_timeout=5, read_timeout=60)
    with told("AWS Batch takes no workers", why):
        found = boto3.client("batch", **where, config=config).submit_job(**request)["jobId"]
    return f"job {found} of AWS Batch"
