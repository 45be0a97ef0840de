"""Where trainings run: in this process (`workers.py`), or where a scheduler puts them (the contract: `cluster.py`)."""

import os
import shlex
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from solorl.errors import UsageError, hint, missing_extra, reason
from solorl.lab.studies.engines.cluster import AGAIN, Cluster, Submission, check_options

__all__ = [
    "AGAIN", "ENGINES", "Cluster", "Submission", "check_options", "check_storage", "open_again", "open_engine",
]  # fmt: skip
# Name -> its module, which has `open(options) -> Cluster`.
ENGINES = {
    "local": "solorl.lab.studies.engines.workers",
    "ray": "solorl.lab.studies.engines.ray",
    "slurm": "solorl.lab.studies.engines.slurm",
    "aws-batch": "solorl.lab.studies.engines.aws_batch",
    "manual": "solorl.lab.studies.engines.manual",
}
# Engine -> its option that says where to connect, the variables that say it without, and where it is without these.
ADDRESSES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "ray": ("address", ("RAY_ADDRESS",), "auto"),
    "aws-batch": ("endpoint_url", ("AWS_ENDPOINT_URL_BATCH", "AWS_ENDPOINT_URL"), ""),
}
STORAGES = {"aws-batch": "s3://"}  # engines whose workers see no folder of the submitting machine


def check_storage(name: str, where: str | None) -> None:
    """UsageError where the workers of an engine do not see a storage."""
    needed = STORAGES.get(name, "")
    if not (where or "").startswith(needed):
        raise UsageError(f"the engine {name} needs --storage {needed}BUCKET/STUDY, not {where or 'a folder'}")


def open_engine(name: str, options: Mapping[str, str]) -> Cluster:
    """The engine of that name, able to submit. UsageError for an unknown name or option, and where the engine's
    packages, its scheduler or the rights to it are missing."""
    if name not in ENGINES:
        raise UsageError(f"there is no engine {name}{hint(name, ENGINES, 'there are')}")
    try:
        module = import_module(ENGINES[name])
    except ModuleNotFoundError as error:
        raise UsageError(missing_extra(f"the engine {name}", error) or reason(error)) from None
    cluster: Cluster = module.open(options)
    return cluster


def open_again(about: Mapping[str, Any], address: str) -> Cluster:
    """The engine of a submission, at the `address` that the user gives; else where a variable or its default says.
    UsageError, also as `open_engine`, where the submission says another one: the study may come from elsewhere, and who
    answers there is believed."""
    name, options = str(about.get("engine")), dict(about.get("options", {}))
    key, variables, default = ADDRESSES.get(name, ("", (), ""))
    own = address or next(filter(None, map(os.environ.get, variables)), default)
    there = str(options.pop(key, "") or own)
    if there != own and not address:
        where = f"this study was submitted to {name} at {there!r}, which you have not named here"
        raise UsageError(f"{where}; to connect, if you trust that machine, add --address {shlex.quote(there)}")
    return open_engine(name, {**options, key: own} if key and own else options)
