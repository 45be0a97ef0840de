"""What a task needs of a machine: cores, GPUs, memory, time."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from solorl.errors import refuse
from solorl.lab.studies.checks import refuse_unknown

MOST = 1024  # cores, and GPUs, of one task
# What each may be: the smallest and largest, and its units.
AMOUNTS: dict[str, tuple[int, int, dict[str, int]]] = {
    "cores": (1, MOST, {"": 1}),
    "gpus": (0, MOST, {"": 1}),
    "memory": (1, 10**9, {"MB": 1, "GB": 1000, "TB": 1_000_000}),
    "time": (1, 10**9, {"s": 1, "min": 60, "h": 3600, "d": 86400}),
}


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
        least, most, units = AMOUNTS[key]
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)\s*([A-Za-z]*)", str(value).strip())
        size = {name.lower(): each for name, each in units.items()}.get(match[2].lower()) if match else None
        number = float(match[1]) * size if match and size else -1.0
        such = "a whole number" if "" in units else f"a number with a unit ({', '.join(units)})"
        wrong = not least <= math.ceil(number) <= most or (size == 1 and "" in units and number % 1)
        refuse(wrong, f"{key} in {where} must be {such} from {least} to {most:,}, not {value!r:.40}")
        values[key] = math.ceil(number)
    return Resources(**values)
