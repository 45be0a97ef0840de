"""The pages that show a file next to the one it comes from."""

import re
from collections import Counter
from difflib import SequenceMatcher
from itertools import groupby, zip_longest

import sources
from markupsafe import Markup

from solorl.catalog.header import count_changes, find_named, opcodes
from tools.budget import counted

CONTEXT = 3  # unchanged lines shown around a change
ALIKE = 0.5  # fraction of the words that two lines must have in common to stand side by side as one changed line
MAX_PAIRS = 100_000  # larger blocks are not searched for lines that are alike


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


# ---------------------------------------------------------------------- which line belongs to which
def words(line):
    """A line cut into words, spaces and signs."""
    return re.findall(r"\w+|\s+|[^\w\s]", line)


def likeness(a, b):
    """Fraction of words in common, 0 to 1."""
    return 2 * (a & b).total() / max(1, a.total() + b.total())


def pairs(a, b):
    """The lines of two replaced blocks that are alike, in order: the most alike first, then what fits to these."""
    if len(a) * len(b) > MAX_PAIRS:
        return []
    counted_a, counted_b = ([Counter(w for w in words(line) if w.strip()) for line in text] for text in (a, b))
    scored = [(likeness(x, y), i, j) for i, x in enumerate(counted_a) for j, y in enumerate(counted_b)]
    found = []
    for _, i, j in sorted((one for one in scored if one[0] >= ALIKE), key=lambda one: -one[0]):
        if all((i - k) * (j - m) > 0 for k, m in found):
            found.append((i, j))
    return sorted(found)


def rows(a, b):
    """The lines of two texts side by side."""
    for tag, i1, i2, j1, j2 in opcodes(a, b):
        if tag == "equal":
            yield from zip(range(i1, i2), range(j1, j2), strict=True)
            continue
        i, j = i1, j1
        for next_i, next_j in [*((i1 + x, j1 + y) for x, y in pairs(a[i1:i2], b[j1:j2])), (i2, j2)]:
            yield from zip_longest(range(i, next_i), range(j, next_j))
            if next_i < i2 and next_j < j2:
                yield next_i, next_j
            i, j = next_i + 1, next_j + 1


def fold(all_rows, a, b):
    """Stretches of rows, each with whether it is to be folded away: unchanged and far from every change."""
    changed = [i for i, row in enumerate(all_rows) if not is_equal(row, a, b)]
    near = {k for i in changed for k in range(i - CONTEXT, i + CONTEXT + 1)}
    for hidden, stretch in groupby(range(len(all_rows)), key=lambda i: i not in near):
        yield hidden, [all_rows[i] for i in stretch]


def is_equal(row, a, b):
    """Whether a row holds the same line twice."""
    return row[0] is not None and row[1] is not None and a[row[0]] == b[row[1]]


def parts_of(row, a, b):
    """Both lines of a row in pieces; those that are changed are marked where the lines are alike."""
    left, right = ("" if i is None else text[i] for i, text in zip(row, (a, b), strict=True))
    wa, wb = words(left), words(right)
    if left == right or likeness(Counter(w for w in wa if w.strip()), Counter(w for w in wb if w.strip())) < ALIKE:
        return [(left, False)], [(right, False)]
    codes = SequenceMatcher(None, wa, wb, autojunk=False).get_opcodes()
    ours = [("".join(wa[i1:i2]), tag != "equal") for tag, i1, i2, _, _ in codes if i1 < i2]
    theirs = [("".join(wb[j1:j2]), tag != "equal") for tag, _, _, j1, j2 in codes if j1 < j2]
    return ours, theirs
