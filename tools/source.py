"""An algorithm file as the rules see it: its text, its tree, and what it contains."""

import ast
from dataclasses import dataclass, fields
from pathlib import Path

from solorl.args.arguments import RunArgs
from solorl.catalog.header import Script
from solorl.scripts import algorithms_folder, in_catalogue, script_paths


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
        found = (i for i, line in enumerate(self.text.splitlines(), 1) if line[:10].rstrip() == key)
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
