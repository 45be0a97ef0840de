"""`solo diff`: two files side by side, in the terminal or as a page for the browser."""

import html
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from solorl.catalog.header import find_path, parse_header, read_source
from solorl.catalog.square import count_changes, opcodes
from solorl.cli import Parser
from solorl.errors import UsageError
from solorl.files import shown, write

CONTEXT = 3  # unchanged lines shown around a change
ALIKE = 0.5  # fraction of the words that two lines must have in common to stand side by side as one changed line
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
    """The lines of two replaced blocks that are alike, in order: the choice with the greatest likeness in sum."""
    if len(a) * len(b) > MAX_PAIRS:
        return []
    counted_a, counted_b = ([Counter(w for w in words(line) if w.strip()) for line in text] for text in (a, b))
    best: list[list[tuple[float, bool]]] = [[(0.0, False)] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            score = likeness(counted_a[i], counted_b[j])
            together = best[i + 1][j + 1][0] + score if score >= ALIKE else 0.0
            best[i][j] = max((best[i + 1][j][0], False), (best[i][j + 1][0], False), (together, together > 0))
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        score, together = best[i][j]
        if together:
            found.append((i, j))
            i, j = i + 1, j + 1
        elif score == best[i + 1][j][0]:
            i += 1
        else:
            j += 1
    return found


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
    stretch: list[Row] = []
    hidden = bool(all_rows) and 0 not in near
    for i, row in enumerate(all_rows):
        if (i not in near) != hidden:
            yield hidden, stretch
            stretch, hidden = [], not hidden
        stretch.append(row)
    if stretch:
        yield hidden, stretch


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
def print_diff(console: Console, names: tuple[str, str], a: Sequence[str], b: Sequence[str]) -> None:
    """Print two texts side by side, as wide as the console."""
    table = Table.grid(padding=(0, 1))
    digits = len(str(max(len(a), len(b), 1)))
    side = max(10, (console.width - 2 * digits - 7) // 2)
    for _ in range(2):
        table.add_column(width=digits, justify="right", style="dim")
        table.add_column(width=1)
        table.add_column(width=side, overflow="fold")
    table.add_row("", "", Text(names[0], "bold"), "", "", Text(names[1], "bold"))
    for hidden, stretch in fold(list(rows(a, b)), a, b):
        if hidden:
            text = f"... {len(stretch)} equal line{'s'[: len(stretch) != 1]}"
            table.add_row("", "", Text(text, "dim"), "", "", Text(text, "dim"))
            continue
        for row in stretch:
            equal, (left, right) = is_equal(row, a, b), parts_of(row, a, b)
            cells = (*_cells(row[0], "-", left, "red", equal), *_cells(row[1], "+", right, "green", equal))
            table.add_row(*cells)
    console.print(table)


def _cells(number: int | None, sign: str, parts: Sequence[Part], color: str, equal: bool) -> tuple[str, Text, Text]:
    if number is None:
        return "", Text(), Text()
    plain = Style() if equal else Style(color=color)
    text = Text.assemble(*((part, plain + Style(reverse=changed)) for part, changed in parts))
    return str(number + 1), Text("" if equal else sign, plain), text


# ---------------------------------------------------------------------- in the browser
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{left} and {right}</title>
<style>
:root {{ color-scheme: light dark; --back: #fff; --text: #1f2328; --soft: #646c76; --line: #d1d9e0; --fold: #f0f3f6;
  --minus: #ffebe9; --minus-word: #ffb8b0; --plus: #e3f8e8; --plus-word: #96e0a8; }}
@media (prefers-color-scheme: dark) {{ :root {{ --back: #0d1117; --text: #e6edf3; --soft: #929ca8; --line: #30363d;
  --fold: #161b22; --minus: #341a1d; --minus-word: #842e31; --plus: #12291c; --plus-word: #1e6433; }} }}
body {{ margin: 0; background: var(--back); color: var(--text);
  font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }}
header {{ padding: 1rem; border-bottom: 1px solid var(--line); font-family: system-ui, sans-serif; }}
h1 {{ margin: 0 0 .5rem; font-size: 1.25rem; overflow-wrap: anywhere; }}
p {{ margin: .25rem 0; }}
.row {{ display: grid; grid-template-columns: 3.5em minmax(0, 1fr) 3.5em minmax(0, 1fr); }}
.row > b {{ padding: 0 .5em; text-align: right; font-weight: normal; color: var(--soft); user-select: none; }}
.row > span {{ padding: 0 .5em 0 1.5em; white-space: pre-wrap; overflow-wrap: anywhere; text-indent: -1em; }}
.row > span::before {{ content: " "; display: inline-block; width: 1em; text-indent: 0; }}
.minus {{ background: var(--minus); }}
.plus {{ background: var(--plus); }}
.row > .minus::before {{ content: "-"; }}
.row > .plus::before {{ content: "+"; }}
del, ins {{ text-decoration: none; border-radius: 2px; }}
del {{ background: var(--minus-word); }}
ins {{ background: var(--plus-word); }}
summary {{ padding: .15rem 1rem; background: var(--fold); color: var(--soft); cursor: pointer; }}
.count {{ padding: 0 .4em; border-radius: 4px; }}
@media (max-width: 60rem) {{
  body {{ font-size: 12px; }}
  .row {{ grid-template-columns: 3em minmax(0, 1fr); }}
  .none, .twin {{ display: none; }}
}}
</style>
</head>
<body>
<header>
<h1>{left} → {right}</h1>
<p><strong>{left}</strong> {left_title}</p>
<p><strong>{right}</strong> {right_title}</p>
<p><span class="count plus">+{added}</span> <span class="count minus">-{removed}</span> lines</p>
</header>
<main>
{body}
</main>
</body>
</html>
"""


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
    left, right, left_title, right_title = map(html.escape, (*names, *titles))
    return PAGE.format(
        left=left, right=right, left_title=left_title, right_title=right_title,
        added=added, removed=removed, body="\n".join(body),
    )  # fmt: skip


# ---------------------------------------------------------------------- the verb
def title_of(path: Path) -> str:
    """The first line of a file's docstring, or nothing."""
    try:
        return parse_header(path).title
    except UsageError:
        return ""


def main(argv: Sequence[str]) -> int:
    """Compare two files; UsageError for an unknown name and for a page that would replace a script."""
    parser = Parser("diff", "Compare two algorithm files side by side.")
    parser.add_argument("a", metavar="A", help="an algorithm, or a path to a .py file")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page for the browser instead")
    parser.add_argument("--no-color", action="store_true", help="no colours in the terminal")
    args = parser.parse(argv)
    paths = find_path(args.a), find_path(args.b)
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
        width = shutil.get_terminal_size((160, 24)).columns
        console = Console(file=sys.stdout, width=width, no_color=args.no_color or None, highlight=False)
        print_diff(console, names, a, b)
    print(f"{names[0]} -> {names[1]}: +{added}/-{removed} lines")
    return 0
