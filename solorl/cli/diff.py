"""`solo diff`: what two files differ in, by git; the site shows it side by side."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from solorl.catalog.header import find_named, find_path, origins, parse_header
from solorl.cli import Parser
from solorl.errors import UsageError
from solorl.files import shown
from solorl.terminal import has_colors

WORDS = ("--color=always", r"--word-diff-regex=[[:alnum:]_]+|[^[:space:]]", "--word-diff=color")


def origin(path: Path) -> Path:
    """The file that a file comes from, as its header says; UsageError where it names none that is there."""
    for stem in origins(path):
        if found := find_named(parse_header(path), f"{stem}.py"):
            return found
    raise UsageError(f"the header of {shown(path)} names no file that it comes from: solo diff needs a second file")


def main(argv: Sequence[str]) -> int:
    """Compare two files, or one with what it comes from; UsageError for an unknown name, and without git."""
    parser = Parser("diff", "Compare two algorithm files.")
    parser.add_argument("a", metavar="A", help="an algorithm, or a path to a .py file")
    parser.add_argument("b", metavar="B", nargs="?", help="another one; without it A is compared with what it is from")
    parser.add_argument("--no-color", action="store_true", help="no colours in the terminal")
    args = parser.parse(argv)
    first = find_path(args.a)
    files = map(shown, (first, find_path(args.b)) if args.b else (origin(first), first))
    how = WORDS if has_colors(sys.stdout) and not args.no_color else ("--color=never",)
    words = ["git", "--no-pager", "diff", "--no-index", "--no-ext-diff", "--shortstat", "--patch", "--no-prefix", *how]
    sys.stdout.flush()
    try:
        subprocess.run([*words, "--", *files])
    except OSError:
        raise UsageError("solo diff needs git to print a difference") from None
    return 0
