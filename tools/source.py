"""An algorithm file as the rules see it: its text, its tree, what it contains, and where it comes from."""

import ast
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import SequenceMatcher
from io import StringIO
from pathlib import Path

from solorl.args.arguments import RunArgs
from solorl.catalog.header import Script, find_named, lines_of, parse_header
from solorl.scripts import algorithms_folder, in_catalogue, script_paths

FREE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@dataclass(frozen=True)
class Problem:
    """One breach of a rule, and where."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


@dataclass
class Source:
    """An algorithm file as the rules see it."""

    path: Path
    text: str
    tree: ast.Module
    script: Script

    def problem(self, line: int, rule: str, text: str) -> Problem:
        """A problem of this file."""
        return Problem(self.path, line, rule, text)

    def header_line(self, key: str) -> int:
        """The line of a key of the header; 1 if it is not there."""
        found = (i for i, line in enumerate(lines_of(self.text), 1) if line[:10].rstrip() == key)
        return next(found, 1)


PLUMBING = frozenset(field.name for field in fields(RunArgs))  # flags of every file, which only the library uses


def uses_of_args(tree: ast.AST) -> list[tuple[str, int]]:
    """Every `args.field`, also of `setup.args.field`, with its line."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return [(n.attr, n.lineno) for n in nodes if "args" in (getattr(n.value, "id", ""), getattr(n.value, "attr", ""))]


def neighbours(path: Path) -> list[Path]:
    """The files of all families next to that of an algorithm, or of the folder of a user's own file; itself too."""
    folder = path.resolve().parent
    return list(script_paths(folder.parent).values()) if in_catalogue(path) else sorted(folder.glob("[!_]*.py"))


def families_of(path: Path) -> Path:
    """The folder of families against which a file is checked: its own, or for a user's own file the catalogue's."""
    return path.resolve().parent.parent if in_catalogue(path) else algorithms_folder()


def split_header(text: str) -> tuple[str, str, str]:
    """What stands above the docstring of a file (its PEP 723 block), the docstring, and what follows it."""
    tree, lines = ast.parse(text), lines_of(text)
    if ast.get_docstring(tree, clean=False) is None:
        return "", "", text
    start, end = tree.body[0].lineno - 1, tree.body[0].end_lineno or 0
    return "".join(lines[:start]), "".join(lines[start:end]), "".join(lines[end:])


def code_lines(text: str) -> int:
    """The lines of code of a Python file: comments, docstrings and blank lines are free."""
    documented, code, docstrings = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type not in FREE and not (token.type == tokenize.STRING and token.start[0] in docstrings):
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code)


def parent_paths(script: Script) -> list[Path]:
    """The files that a script differs from; those that do not exist are left out."""
    found = [find_named(script, name) for name in script.parents]
    return [path for path in found if path]


def origin_of(script: Script, seen: frozenset[Path] = frozenset()) -> Path | None:
    """The file of the catalogue that a user's own file comes from: the one its line Run names where it is a copy, else
    its nearest ancestor there; None without one."""
    words, paths = script.run.split(), script_paths()
    if words[:2] == ["solo", "train"] and words[2:] and words[2].removesuffix(".py") in paths:
        return paths[words[2].removesuffix(".py")]
    parent = next(iter(parent_paths(script)), None)
    if parent is None or parent in seen or parent in paths.values():
        return parent if parent not in seen else None
    return origin_of(parse_header(parent), seen | {parent})


def changes(a: Sequence[str], b: Sequence[str]) -> list[tuple[str, int, int, int, int]]:
    """difflib's line diff of two texts, without what is equal."""
    return [code for code in SequenceMatcher(None, a, b, autojunk=False).get_opcodes() if code[0] != "equal"]


def count_changes(a: Sequence[str], b: Sequence[str]) -> tuple[int, int]:
    """Lines added to and removed from `a` to get `b`."""
    changed = changes(a, b)
    return sum(j2 - j1 for *_, j1, j2 in changed), sum(i2 - i1 for _, i1, i2, _, _ in changed)
