"""Rewriting lines of an algorithm file's header."""

import ast

from solorl.scripts import VALUE_COLUMN


def with_header(text: str, values: dict[str, str]) -> str:
    """`text` with the header's lines of the given keys replaced, or left out for an empty value; all other lines stay
    as they are."""
    docstring = ast.parse(text).body[0]
    lines, skipping = [], False
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        key = line[:VALUE_COLUMN].strip()
        if docstring.lineno <= number <= (docstring.end_lineno or 0):
            if key in values:
                lines += [f"{key:{VALUE_COLUMN}}{values[key]}\n"] * bool(values[key])
                skipping = True
                continue
            skipping = skipping and not key and bool(line.strip())  # the rest of a replaced value
        if not skipping:
            lines.append(line)
    return "".join(lines)
