"""Tables in the terminal."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as lines of aligned columns; those numbered in `right` stand at the right. Control characters become `?`."""
    rows = [["".join(c if c.isprintable() else "?" for c in cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
