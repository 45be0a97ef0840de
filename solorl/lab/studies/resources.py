"""What a task needs of a machine: cores, GPUs, memory, time."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from solorl.errors import UsageError
from solorl.lab.studies.checks import refuse_unknown

MEMORY = {"MB": 1, "GB": 1000, "TB": 1_000_000}  # in megabytes
TIME = {"s": 1, "min": 60, "h": 3600, "d": 86400}  # in seconds
MOST = 1024  # cores, and GPUs, of one task


@dataclass(frozen=True)
class Resources:
    """What one task gets. The defaults: one core, no GPU, as much memory and time as the scheduler gives."""

    cores: int = 1
    gpus: int = 0
    memory: int = 0  # megabytes of 1,000,000 bytes; 0: what the scheduler gives
    time: int = 0  # seconds; 0: no limit of ours, and the scheduler's default


def read_resources(table: Mapping[str, Any], where: str) -> Resources:
    """Resources from `{cores = 2, gpus = 1, memory = "4 GB", time = "2 h"}`; what is not there is as by default.

    UsageError for an unknown key, and for a value that is not such an amount.
    """
    values = asdict(Resources())
    refuse_unknown(table, values, where)
    for key, value in table.items():
        if key in ("memory", "time"):
            values[key] = amount(value, MEMORY if key == "memory" else TIME, f"{key} in {where}")
        else:
            values[key] = count(value, int(key == "cores"), f"{key} in {where}")
    return Resources(**values)


def count(value: Any, least: int, where: str) -> int:
    """A number of cores or GPUs; UsageError where it is none."""
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 9 else value
    if type(number) is not int or not least <= number <= MOST:
        raise UsageError(f"{where} must be a whole number from {least} to {MOST:,}, not {value!r:.40}")
    return number


def amount(value: Any, units: Mapping[str, int], where: str) -> int:
    """A text like `4 GB` or `90min` in the unit that counts 1, rounded up; UsageError where it is none."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)\s*([A-Za-z]+)", value.strip()) if isinstance(value, str) else None
    names = {name.lower(): size for name, size in units.items()}
    size = names.get(match[2].lower()) if match else None
    number = float(match[1]) * size if match and size else 0.0
    if not 0 < number <= 10**9:
        known = ", ".join(units)
        raise UsageError(f"{where} must be a number with a unit ({known}), such as 4 {[*units][1]}, not {value!r:.40}")
    return int(-(-number // 1))
