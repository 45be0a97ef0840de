"""Where trainings run: on this machine (`local.py`), or where a scheduler puts them (the contract: `cluster.py`)."""

from collections.abc import Mapping
from importlib import import_module

from solorl.errors import UsageError, did_you_mean
from solorl.machine import own_cores
from solorl.studies.engines.cluster import AGAIN, Cluster, Submission, check_options
from solorl.studies.engines.local import UNKNOWN, Engine, Job, LocalEngine
from solorl.studies.resources import Resources

__all__ = [
    "AGAIN", "ENGINES", "UNKNOWN", "Cluster", "Engine", "Job", "LocalEngine", "Submission", "check_options",
    "check_storage", "open_engine", "open_pool",
]  # fmt: skip
# Name -> its module, which has `open(options) -> Cluster` and imports its packages inside of functions; the function
# where it has another name.
ENGINES = {
    "local": "solorl.studies.engines.workers",
    "ray": "solorl.studies.engines.ray",
    "slurm": "solorl.studies.engines.slurm",
    "aws-batch": "solorl.studies.engines.aws_batch",
    "kubernetes": "solorl.studies.engines.written:open_kubernetes",
    "skypilot": "solorl.studies.engines.written:open_skypilot",
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
        hint = did_you_mean(name, ENGINES) or f"; there are {', '.join(ENGINES)}"
        raise UsageError(f"there is no engine {name}{hint}")
    place, _, function = ENGINES[name].partition(":")
    try:
        module = import_module(place)
    except ModuleNotFoundError as error:
        if error.name != place:
            raise
        raise UsageError(f"this version of solorl cannot use {name} yet; it has the engine local") from None
    cluster: Cluster = getattr(module, function or "open")(options)
    return cluster


def open_pool(name: str, options: Mapping[str, str], resources: Resources, workers: int | None) -> Engine:
    """The engine of that name for a `Pool`: at most `workers` jobs at once, None: as many as there is room for.
    UsageError for an engine that runs no pools, and as `open_engine`."""
    if name == "local":
        check_options(options, (), "local")
        return LocalEngine(workers or len(own_cores()))
    if name != "ray":
        hint = did_you_mean(name, ("local", "ray")) or "; it has local and ray"
        raise UsageError(f"solo tune cannot use the engine {name}{hint}")
    from solorl.studies.engines import ray_pool

    return ray_pool.open_pool(options, resources, workers)
