"""The pages that show a file next to the one it comes from."""

import sources
from markupsafe import Markup

from solorl.catalog.budget import counted
from solorl.catalog.square import count_changes, find_named
from solorl.cli.diff import fold, is_equal, parts_of, rows


def address(parent, child):
    """The page with the difference of two algorithms."""
    return f"diffs/{parent.name}--{child.name}.html"


def edges(scripts):
    """All pairs of a parent and its child."""
    known = {script.path: script for script in scripts.values()}
    found = [(find_named(child, name), child) for child in scripts.values() for name in child.parents]
    return [(known[path], child) for path, child in found]


def changes(parent, child):
    """Lines added and removed, the line `Details` of the header not counted."""
    return count_changes(counted(parent.path), counted(child.path))


def parents(script, scripts):
    """The files that a script comes from: each with the address of the diff and the lines added and removed."""
    return [(a, address(a, b), *changes(a, b)) for a, b in edges(scripts) if b is script]


def children(script, scripts):
    """The files that come from a script, as `parents` has them."""
    return [(b, address(a, b), *changes(a, b)) for a, b in edges(scripts) if a is script]


def page(parent, child):
    """What the template of a diff needs."""
    texts = [script.path.read_text(encoding="utf-8") for script in (parent, child)]
    a, b = (text.splitlines() for text in texts)
    shades = [sources.coloured(text, script.path.name) for text, script in zip(texts, (parent, child), strict=True)]
    body = []
    for hidden, stretch in fold(list(rows(a, b)), a, b):
        lines = "".join(row_html(row, a, b, shades) for row in stretch)
        many = f"{len(stretch)} equal line{'s'[: len(stretch) != 1]}"
        body.append(f"<details><summary>{many}</summary>{lines}</details>" if hidden else lines)
    added, removed = changes(parent, child)
    return {"parent": parent, "child": child, "added": added, "removed": removed, "body": Markup("".join(body))}


def row_html(row, a, b, shades):
    """One row; on a narrow screen its halves stand below each other and the twin of an equal line is hidden."""
    equal, parts = is_equal(row, a, b), parts_of(row, a, b)
    cells = []
    for number, kind, marks, shade, tag in zip(
        row, ("", "twin") if equal else ("minus", "plus"), parts, shades, ("del", "ins"), strict=True
    ):
        kind = "none" if number is None else kind
        line = "" if number is None else sources.to_html(shade[number], () if equal else marks, tag)
        shown = f' class="{kind}"' if kind else ""
        cells.append(f"<b{shown}>{'' if number is None else number + 1}</b><span{shown}>{line}</span>")
    return f'<div class="row">{"".join(cells)}</div>\n'
