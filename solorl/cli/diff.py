"""`solo diff`: what two files differ in, by git; the site shows it side by side."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from solorl.catalog.header import count_changes, find_named, find_path, origins, parse_header, read_source
from solorl.cli import Parser
from solorl.errors import UsageError
from solorl.files import shown
from solorl.terminal import has_colors

WORD = r"[[:alnum:]_]+|[^[:space:]]"  # of a line, for git


def print_diff(a: Path, b: Path, color: bool) -> None:
    """Let git print what differs, words in colours or lines with signs; UsageError without git."""
    how = ["--color=always", f"--word-diff-regex={WORD}", "--word-diff=color"] if color else ["--color=never"]
    names = ["--no-prefix", "--", shown(a), shown(b)]
    sys.stdout.flush()
    try:
        subprocess.run(["git", "--no-pager", "diff", "--no-index", "--no-ext-diff", *how, *names])
    except OSError:
        raise UsageError("solo diff needs git to print a difference") from None


def origin(path: Path) -> Path:
    """The file that a file comes from, as its header says; UsageError where it names none that is there."""
    for stem in origins(path):
        if found := find_named(parse_header(path), f"{stem}.py"):
            return found
    raise UsageError(f"the header of {shown(path)} names no file that it comes from: solo diff needs a second file")


def main(argv: Sequence[str]) -> int:
    """Compare two files, or one with what it comes from; UsageError for an unknown name."""
    parser = Parser("diff", "Compare two algorithm files.")
    parser.add_argument("a", metavar="A", help="an algorithm, or a path to a .py file")
    parser.add_argument("b", metavar="B", nargs="?", help="another one; without it A is compared with what it is from")
    parser.add_argument("--no-color", action="store_true", help="no colours in the terminal")
    args = parser.parse(argv)
    first = find_path(args.a)
    paths = (first, find_path(args.b)) if args.b else (origin(first), first)
    a, b = (read_source(path).splitlines() for path in paths)
    names = paths[0].name, paths[1].name
    if names[0] == names[1]:
        names = shown(paths[0]), shown(paths[1])
    added, removed = count_changes(a, b)
    print_diff(*paths, has_colors(sys.stdout) and not args.no_color)
    print(f"{names[0]} -> {names[1]}: +{added}/-{removed} lines")
    return 0
