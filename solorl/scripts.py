"""Where the algorithm files are, and the fields of their headers."""

import ast
import shlex
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


KEYS = ("Paper", "Run", "Spaces", "Differs", "Not for", "Details")
OPTIONAL = ("Twin", "Copy of")  # keys that not every header has


PAGES = "docs/algorithms"  # the page of each algorithm file, NAME.md: from the folder above that of the families


BUDGETS = "diff_budget.toml"  # the table of rule R3, next to the folders of the families


VALUE_COLUMN = 10  # keys stand before this column, values and continuation lines start at it


def in_checkout() -> bool:
    """Whether the package runs from a checkout of the project, where the algorithm files may be edited."""
    return (PACKAGE.parent / "algorithms").is_dir() and (PACKAGE.parent / "pyproject.toml").is_file()


def algorithms_folder() -> Path:
    """The folder of the families: next to the package in a checkout, inside the package when it is installed."""
    return (PACKAGE.parent if in_checkout() else PACKAGE) / "algorithms"


def spaces_folder() -> Path:
    """The folder of the search spaces for `solo tune`, which the wheel has inside the package."""
    return PACKAGE.parent / "benchmark" / "spaces" if in_checkout() else PACKAGE / "spaces"


def in_catalogue(path: Path) -> bool:
    """Whether a file stands in a folder of families, of this installation or of a checkout; else it is a user's own."""
    folder = path.resolve().parent.parent
    return folder == algorithms_folder().resolve() or (folder / BUDGETS).is_file()


def script_paths(folder: Path | None = None) -> dict[str, Path]:
    """Name -> file of every algorithm below `folder` (default: the catalogue), family by family."""
    paths = sorted((folder or algorithms_folder()).glob("*/*.py"))
    return {path.stem: path for path in paths if not path.name.startswith("_")}


def header_fields(docstring: str) -> dict[str, str]:
    """Key -> value of a header; a line that starts with ten spaces continues the value above it."""
    fields: dict[str, str] = {}
    key = ""
    for line in docstring.splitlines()[1:]:
        start, value = line[:VALUE_COLUMN].strip(), line[VALUE_COLUMN:].strip()
        if start in KEYS or start in OPTIONAL:
            key = start
            fields[key] = value
        elif key and value and not start:
            fields[key] += f" {value}"
        else:
            key = ""
    return fields


def not_for(fields: dict[str, str]) -> dict[str, str]:
    """What a file is not made for, each with the file that is: `{"images": "ppo_atari.py"}`."""
    parts = [part.rpartition(":") for part in fields.get("Not for", "").split(";")]
    return {what.strip(): file.strip() for what, colon, file in parts if colon}


def use_instead(script: Path, what: str) -> str:
    """`"; use FILE"` where a script's header names a file for what the script is not made for, else an empty string."""
    try:
        docstring = ast.get_docstring(ast.parse(script.read_bytes()), clean=False) or ""
    except (OSError, ValueError, SyntaxError):  # somebody's own script may be anything
        docstring = ""
    other = not_for(header_fields(docstring)).get(what)
    return f"; use {other}" if other else ""


def as_typed(path: Path) -> str:
    """How a command names a file, quoted: a file of the catalogue by its name, any other by its path from here."""
    known, full, here = script_paths().get(path.stem), path.resolve(), Path.cwd()
    if known and known.resolve() == full:
        return shlex.quote(path.stem)
    return shlex.quote(str(full.relative_to(here) if full.is_relative_to(here) else path))
