"""A process to run, for engines that start processes themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

UNKNOWN = 256  # exit code of a job whose end nobody saw; no process has it


@dataclass(frozen=True)
class Job:
    """One process to run."""

    argv: tuple[str, ...]
    output: Path  # standard output and standard error are appended to this file, whose folder exists
    cwd: Path = Path()
    env: Mapping[str, str] = field(default_factory=dict)  # added to the environment
