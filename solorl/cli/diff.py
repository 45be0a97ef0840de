"""`solo diff`: what two files differ in, by git in the terminal, or side by side as a page for the browser."""

import html
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import groupby, zip_longest
from pathlib import Path

from solorl.catalog.header import find_path, origins, parse_header, read_source
from solorl.catalog.square import count_changes, find_named, opcodes
from solorl.cli import Parser
from solorl.errors import UsageError
from solorl.files import filled, shown, write
from solorl.terminal import has_colors

CONTEXT = 3  # unchanged lines shown around a change
ALIKE = 0.5  # fraction of the words that two lines must have in common to stand side by side as one changed line
WORD = r"[[:alnum:]_]+|[^[:space:]]"  # of a line, for git
MAX_PAIRS = 100_000  # larger blocks are not searched for lines that are alike

Row = tuple[int | None, int | None]  # a line of either text, or None where there is none
Part = tuple[str, bool]  # a piece of a line, and whether it is changed


# ---------------------------------------------------------------------- which line belongs to which
def words(line: str) -> list[str]:
    """A line cut into words, spaces and signs."""
    return re.findall(r"\w+|\s+|[^\w\s]", line)


def likeness(a: Counter[str], b: Counter[str]) -> float:
    """Fraction of words in common, 0 to 1."""
    return 2 * (a & b).total() / max(1, a.total() + b.total())


def pairs(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """The lines of two replaced blocks that are alike, in order: the most alike first, then what fits to these."""
    if len(a) * len(b) > MAX_PAIRS:
        return []
    counted_a, counted_b = ([Counter(w for w in words(line) if w.strip()) for line in text] for text in (a, b))
    scored = [(likeness(x, y), i, j) for i, x in enumerate(counted_a) for j, y in enumerate(counted_b)]
    found: list[tuple[int, int]] = []
    for _, i, j in sorted((one for one in scored if one[0] >= ALIKE), key=lambda one: -one[0]):
        if all((i - k) * (j - m) > 0 for k, m in found):
            found.append((i, j))
    return sorted(found)


def rows(a: Sequence[str], b: Sequence[str]) -> Iterator[Row]:
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


def fold(all_rows: Sequence[Row], a: Sequence[str], b: Sequence[str]) -> Iterator[tuple[bool, list[Row]]]:
    """Stretches of rows, each with whether it is to be folded away: unchanged and far from every change."""
    changed = [i for i, row in enumerate(all_rows) if not is_equal(row, a, b)]
    near = {k for i in changed for k in range(i - CONTEXT, i + CONTEXT + 1)}
    for hidden, stretch in groupby(range(len(all_rows)), key=lambda i: i not in near):
        yield hidden, [all_rows[i] for i in stretch]


def is_equal(row: Row, a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether a row holds the same line twice."""
    return row[0] is not None and row[1] is not None and a[row[0]] == b[row[1]]


def parts_of(row: Row, a: Sequence[str], b: Sequence[str]) -> tuple[list[Part], list[Part]]:
    """Both lines of a row in pieces; those that are changed are marked where the lines are alike."""
    left, right = ("" if i is None else text[i] for i, text in zip(row, (a, b), strict=True))
    wa, wb = words(left), words(right)
    if left == right or likeness(Counter(w for w in wa if w.strip()), Counter(w for w in wb if w.strip())) < ALIKE:
        return [(left, False)], [(right, False)]
    codes = SequenceMatcher(None, wa, wb, autojunk=False).get_opcodes()
    ours = [("".join(wa[i1:i2]), tag != "equal") for tag, i1, i2, _, _ in codes if i1 < i2]
    theirs = [("".join(wb[j1:j2]), tag != "equal") for tag, _, _, j1, j2 in codes if j1 < j2]
    return ours, theirs


# ---------------------------------------------------------------------- in the terminal
def print_diff(a: Path, b: Path, color: bool) -> None:
    """Let git print what differs, words in colours or lines with signs; UsageError without git."""
    how = ["--color=always", f"--word-diff-regex={WORD}", "--word-diff=color"] if color else ["--color=never"]
    names = ["--no-prefix", "--", shown(a), shown(b)]
    sys.stdout.flush()
    try:
        subprocess.run(["git", "--no-pager", "diff", "--no-index", "--no-ext-diff", *how, *names])
    except OSError:
        raise UsageError("solo diff needs git to print a difference; --html FILE writes a page without it") from None


# ---------------------------------------------------------------------- in the browser
PAGE = Path(__file__).with_name("diff.html")


def html_row(row: Row, a: Sequence[str], b: Sequence[str]) -> str:
    """One row; on a narrow screen its halves stand below each other and the twin of an equal line is hidden."""
    equal, (left, right) = is_equal(row, a, b), parts_of(row, a, b)
    kinds = ("", "twin") if equal else ("minus", "plus")
    cells = []
    for number, kind, parts, tag in zip(row, kinds, (left, right), ("del", "ins"), strict=True):
        kind = "none" if number is None else kind
        text = "".join(f"<{tag}>{html.escape(x)}</{tag}>" if marked else html.escape(x) for x, marked in parts)
        shown_class = f' class="{kind}"' if kind else ""
        cells.append(f"<b{shown_class}>{'' if number is None else number + 1}</b><span{shown_class}>{text}</span>")
    return f'<div class="row">{"".join(cells)}</div>'


def html_page(names: tuple[str, str], titles: tuple[str, str], a: Sequence[str], b: Sequence[str]) -> str:
    """A page that needs no other file."""
    body = []
    for hidden, stretch in fold(list(rows(a, b)), a, b):
        lines = "\n".join(html_row(row, a, b) for row in stretch)
        summary = f"<summary>{len(stretch)} equal line{'s'[: len(stretch) != 1]}</summary>"
        body.append(f"<details>{summary}\n{lines}\n</details>" if hidden else lines)
    added, removed = count_changes(a, b)
    named = zip(("LEFT", "RIGHT", "LEFT_TITLE", "RIGHT_TITLE"), map(html.escape, (*names, *titles)), strict=True)
    return filled(PAGE, {**dict(named), "ADDED": str(added), "REMOVED": str(removed), "BODY": "\n".join(body)})


# ---------------------------------------------------------------------- the verb
def title_of(path: Path) -> str:
    """The first line of a file's docstring, or nothing."""
    try:
        return parse_header(path).title
    except UsageError:
        return ""


def origin(path: Path) -> Path:
    """The file that a file comes from, as its header says; UsageError where it names none that is there."""
    for stem in origins(path):
        if found := find_named(parse_header(path), f"{stem}.py"):
            return found
    raise UsageError(f"the header of {shown(path)} names no file that it comes from: solo diff needs a second file")


def main(argv: Sequence[str]) -> int:
    """Compare two files, or one with what it comes from; UsageError for an unknown name and for a page that would
    replace a script."""
    parser = Parser("diff", "Compare two algorithm files.")
    parser.add_argument("a", metavar="A", help="an algorithm, or a path to a .py file")
    parser.add_argument("b", metavar="B", nargs="?", help="another one; without it A is compared with what it is from")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page for the browser instead")
    parser.add_argument("--no-color", action="store_true", help="no colours in the terminal")
    args = parser.parse(argv)
    first = find_path(args.a)
    paths = (first, find_path(args.b)) if args.b else (origin(first), first)
    a, b = (read_source(path).splitlines() for path in paths)
    names = paths[0].name, paths[1].name
    if names[0] == names[1]:
        names = shown(paths[0]), shown(paths[1])
    added, removed = count_changes(a, b)
    if args.html:
        if args.html.suffix not in (".html", ".htm"):
            raise UsageError(f"solo diff writes a page: {args.html} must end in .html")
        write(args.html, html_page(names, (title_of(paths[0]), title_of(paths[1])), a, b).encode())
        print(f"wrote {shown(args.html)}")
    else:
        print_diff(*paths, has_colors(sys.stdout) and not args.no_color)
    print(f"{names[0]} -> {names[1]}: +{added}/-{removed} lines")
    return 0
