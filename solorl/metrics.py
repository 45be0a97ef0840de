"""Reading metrics.jsonl: one row a line, appended while a run trains, cut back to the checkpoint when it is resumed."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

TAIL = 60_000  # bytes that `last_rows` reads

Row = dict[str, Any]  # metric -> value, with global_step (environment steps) and wall_time (seconds)


def read_rows(path: Path, start: int = 0, key: str = "", strict: bool = False) -> tuple[list[Row], int]:
    """The rows from byte `start` on (negative: counted from the end), and the byte after the last of them.

    A last line without its line end is not a row: it is being written, or a kill cut it short. Any other line that
    cannot be read is left out, or refused with `strict`. With `key` only the rows that have it count.

    Raises OSError where the file cannot be read; with `strict` also UnicodeDecodeError, and ValueError with a sentence
    that names the damaged line.
    """
    with open(path, "rb") as file:
        start = file.seek(max(0, file.seek(0, os.SEEK_END) + start) if start < 0 else start)
        data = file.read()
    data = data[: data.rfind(b"\n") + 1]
    rows: list[Row] = []
    wanted = f"{json.dumps(key)}:" if key else ""
    for number, line in enumerate(data.decode(errors="strict" if strict else "replace").split("\n"), 1):
        if not line or wanted not in line:
            continue
        try:
            row = json.loads(line)
            why = "" if isinstance(row, dict) else "it holds no JSON object"
        except (ValueError, RecursionError) as error:
            row, why = {}, str(error)
        if why and strict:
            raise ValueError(f"{path} is damaged in line {number}: {why}")
        rows += [row] if row and not why and (not key or key in row) else []
    return rows, start + len(data)


def last_rows(path: Path) -> list[Row]:
    """The rows in the last TAIL bytes; none where the file cannot be read."""
    with contextlib.suppress(OSError):
        return read_rows(path, -TAIL)[0]
    return []
