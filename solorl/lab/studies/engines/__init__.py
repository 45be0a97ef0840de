"""Where else workers run: an engine starts some of them by the client of its scheduler, and returns.

An engine is a module with `OPTIONS`, the options that `--engine-option KEY=VALUE` may give, and
`start(job, options, dry)`, which starts `job.workers` workers and returns what to say; with `dry` it starts nothing and
returns what it would submit. It knows no task: workers find theirs in the storage, which also says what runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from solorl.errors import UsageError, hint, missing_extra, reason, refuse
from solorl.lab.studies.checks import refuse_unknown
from solorl.lab.studies.resources import Resources

ENGINES = ("slurm", "ray", "aws")


@dataclass(frozen=True)
class Job:
    """Workers to be started."""

    title: str  # the study's name, for people who look at the queue
    words: tuple[str, ...]  # of each worker, after `solo`
    where: str  # the storage
    workers: int
    resources: Resources  # of each


def start(engine: str, job: Job, options: Mapping[str, str], dry: bool = False) -> str:
    """Start workers on an engine; what to say. UsageError for an unknown name or option, and, in one sentence, where
    the engine's packages or its scheduler are missing or refuse."""
    refuse(engine not in ENGINES, f"there is no engine {engine}{hint(engine, ('local', *ENGINES), 'there are')}")
    try:
        module = import_module(f"solorl.lab.studies.engines.{engine}")
    except ModuleNotFoundError as error:
        raise UsageError(missing_extra(f"the engine {engine}", error) or reason(error)) from None
    refuse_unknown(options, module.OPTIONS, f"the engine {engine}")
    return str(module.start(job, options, dry))
