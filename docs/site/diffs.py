"""Which file comes from which, by how many lines they differ, and the page that shows two of them side by side."""

from solorl.catalog.header import find_named
from tools.budget import counted
from tools.source import count_changes


def address(parent, child):
    """The page that compares two algorithms: one for all pairs, whose script reads the sources."""
    return f"compare.html?a={parent.name}&b={child.name}"


def edges(scripts):
    """All pairs of a parent and its child."""
    known = {script.path: script for script in scripts.values()}
    return [(known[find_named(child, name)], child) for child in scripts.values() for name in child.parents]


def changes(parent, child):
    """Lines added and removed, the line `Details` of the header not counted."""
    return count_changes(counted(parent.path), counted(child.path))


def parents(script, scripts):
    """The files that a script comes from: each with the address of the comparison and the lines added and removed."""
    return [(a, address(a, b), *changes(a, b)) for a, b in edges(scripts) if b is script]


def children(script, scripts):
    """The files that come from a script, as `parents` has them."""
    return [(b, address(a, b), *changes(a, b)) for a, b in edges(scripts) if a is script]
