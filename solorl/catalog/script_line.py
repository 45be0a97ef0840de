"""Rewriting lines of an algorithm file's header."""

import ast

from solorl.scripts import KEYS, VALUE_COLUMN, header_fields


def with_header(text: str, values: dict[str, str]) -> str:
    """`text` with the header's lines of the given keys replaced, left out for an empty value, or put above the first
    line of KEYS where they were not there; all other lines stay as they are."""
    tree = ast.parse(text)
    docstring, fields = tree.body[0], header_fields(ast.get_docstring(tree, clean=False) or "")
    new = {key: value for key, value in values.items() if value and key not in fields}
    end = "\r\n" if "\r\n" in text else "\n"
    lines, skipping = [], False
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        key = line[:VALUE_COLUMN].strip()
        if docstring.lineno <= number <= (docstring.end_lineno or 0):
            if key in KEYS:
                lines += [f"{each:{VALUE_COLUMN}}{value}{end}" for each, value in new.items()]
                new = {}
            if key in values:
                lines += [f"{key:{VALUE_COLUMN}}{values[key]}{end}"] * bool(values[key])
                skipping = True
                continue
            skipping = skipping and not key and bool(line.strip())  # the rest of a replaced value
        if not skipping:
            lines.append(line)
    return "".join(lines)
