"""Three-way merges of algorithm files, by `git merge-file`: squares (rule R3) and `solo sync --main`.

A square is four files: a base, two files that each change it, and one that has both changes (`d3qn.py` from
`dueling_dqn.py` and `double_dqn.py`, both from `dqn.py`). Merging the two changes must give the fourth file.
"""

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from solorl.catalog.header import Script, parse_header, read_source
from solorl.errors import UsageError
from tools.source import changes, count_changes, parent_paths, split_header

MERGE = ("git", "-c", "merge.conflictStyle=merge", "merge-file", "-p")
START, END = "<<<<<<< ", ">>>>>>> "
IN_CONFLICT = "\0"  # before a line of a conflict, so that it is equal to no line of a file


# ---------------------------------------------------------------------- who comes from whom


def ancestors(path: Path) -> list[Path]:
    """A file and all that it comes from, the nearest first."""
    found = [path.resolve()]
    for each in found:  # grows while it is walked
        found += [up.resolve() for up in parent_paths(parse_header(each)) if up.resolve() not in found]
    return found


def descendants(path: Path, known: Sequence[Script]) -> list[Script]:
    """The scripts that come from a file, each after its parents: it has one ancestor more than they, or several."""
    above = {script.path: ancestors(script.path) for script in known}
    below = [script for script in known if path.resolve() in above[script.path][1:]]
    return sorted(below, key=lambda script: len(above[script.path]))


# ---------------------------------------------------------------------- merging
def merge(ours: str, base: str, theirs: str, *flags: str) -> tuple[str, int]:
    """`ours` with the change from `base` to `theirs`, and the number of conflicts. UsageError without git."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for path, text in zip(paths, (ours, base, theirs), strict=True):
            path.write_bytes(text.encode())
        try:
            done = subprocess.run([*MERGE, *flags, *map(str, paths)], capture_output=True, check=False)
        except FileNotFoundError:
            raise UsageError("merging files needs git, which is not installed") from None
    if done.returncode not in range(128):  # git ends with the number of conflicts, or with 255
        raise UsageError(f"git merge-file failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode(), done.returncode


def marked(merged: str) -> list[str]:
    """The lines of a merge; the markers of a conflict are left out, all lines between them are marked."""
    lines, inside = [], False
    for line in merged.splitlines():
        if line.startswith((START, END)) or (inside and line == "======="):
            inside = line.startswith(START) or (inside and not line.startswith(END))
        else:
            lines.append(IN_CONFLICT * inside + line)
    return lines


def square(script: Script, left: Path, right: Path) -> tuple[int, str]:
    """The file against the merge of its parents, headers apart: lines added and removed, of which all lines of a
    conflict count, and where they begin, in words. UsageError where the parents share none."""
    above = ancestors(right)
    base = next((path for path in ancestors(left) if path in above), None)
    if base is None:
        raise UsageError(f"Differs names {left.name} and {right.name}, which come from no common file")
    ours, old, theirs = (split_header(read_source(path))[2] for path in (left, base, right))
    head, docstring, body = split_header(read_source(script.path))
    want, have = marked(merge(ours, old, theirs)[0]), body.splitlines()
    changed = changes(want, have)
    if not changed:
        return 0, ""
    _, i1, i2, j1, j2 = changed[0]
    number = len((head + docstring).splitlines()) + j1 + 1
    says = f"`{have[j1].strip()}`" if j2 > j1 else "nothing"
    merge_says = (
        "a conflict" if IN_CONFLICT in "".join(want[i1:i2]) else f"`{want[i1].strip()}`" if i2 > i1 else "nothing"
    )
    return sum(count_changes(want, have)), f"line {number} has {says} where the merge has {merge_says}"
