"""The algorithm files as a catalogue: what the header of each file says, and how a name finds its file."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path

import solorl
from solorl.errors import UsageError, denied, did_you_mean, refuse
from solorl.files import expanded
from solorl.scripts import KEYS, VALUE_COLUMN, header_fields, in_catalogue, not_for, script_paths

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
METADATA = re.compile(r"# /// script\n((?:#(?: .*)?\n)+?)# ///\n")  # PEP 723, at the top of the file
ENTRANCES = solorl.MODULES  # what a script may use of the library in addition to the verbs of `run`


@dataclass
class Script:
    """One algorithm file and what its header says of it."""

    name: str
    path: Path
    family: str
    framework: str  # torch | jax
    title: str
    lines: int
    fields: dict[str, str]  # all that the header says; what follows is from there
    paper: str  # authors, year and address
    run: str  # a command that works
    spaces: str  # `observations -> actions`
    observations: str  # their kind: `vector`
    actions: str  # `discrete` or `continuous`, without what `Spaces` says after a comma
    parents: list[str]  # of `Differs   from X.py: ...` or `from X.py, Y.py: ...`; none for the root of a family
    relatives: list[str]  # of `Differs   relatives X.py, Y.py: ...`, of a file that is mostly new
    parent: str | None  # the first of the parents
    twin: str | None  # of `Twin   X.py`: the torch file that a file in JAX corresponds to
    copy_of: str | None  # of `Copy of   X.py (SoloRL 0.1.0)`, as `solo copy` writes it
    not_for: dict[str, str]  # what it is not made for, each with the file that is: `{"images": "ppo_atari.py"}`


def named(word: str, differs: str) -> list[str]:
    """The file names that `Differs` has after `from` or `relatives`."""
    match = re.match(rf"{word} ([^\s,:]+\.py(?:, *[^\s,:]+\.py)*)(?![\w.])", differs)
    return re.split(r", *", match.group(1)) if match else []


def scripts(folder: Path | None = None) -> list[Script]:
    """Every algorithm of the catalogue; UsageError if one of the files has no header."""
    return [parse_header(path) for path in script_paths(folder).values()]


def read_source(path: Path) -> str:
    """The text of a Python file; UsageError if it cannot be read."""
    try:
        with denied(f"{path} cannot be read"):
            return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file in UTF-8") from None


def parse_source(path: Path, text: str | None = None) -> ast.Module:
    """The syntax tree of a Python file, of its `text` where that was read already; UsageError if it cannot be read or
    is not valid Python."""
    try:
        return ast.parse(read_source(path) if text is None else text)
    except SyntaxError as error:
        raise UsageError(f"{path}:{error.lineno} is not valid Python: {error.msg}") from None
    except ValueError as error:  # a null byte in some versions of Python
        raise UsageError(f"{path} is not valid Python: {error}") from None


def top_modules(tree: ast.Module) -> dict[str, int]:
    """First part of every absolutely imported module, with the line of its first import."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        else:
            continue
        for name in names:
            found.setdefault(name.split(".")[0], node.lineno)
    return found


def parse_header(path: Path) -> Script:
    """What the docstring of an algorithm file says; UsageError if the file has none."""
    return _header(path, path.resolve().parent.name, read_source(path))


@cache  # a search reads the headers of all files
def _header(path: Path, family: str, text: str) -> Script:
    tree = parse_source(path, text)
    docstring = ast.get_docstring(tree, clean=False)
    if not (docstring and docstring.strip()):
        raise UsageError(f"{path} has no header: its docstring must start with a title and say {', '.join(KEYS)}")
    said = header_fields(docstring)
    observations, _, actions = said.get("Spaces", "").partition("->")
    parents = named("from", said.get("Differs", ""))
    copy = re.match(r"(.+?\.py)(?= \(|$)", said.get("Copy of", ""))
    return Script(
        name=path.stem,
        path=path,
        family=family,
        framework="jax" if "jax" in top_modules(tree) else "torch",
        title=docstring.splitlines()[0].strip(),
        lines=len(text.splitlines()),
        fields=said,
        paper=said.get("Paper", ""),
        run=said.get("Run", ""),
        spaces=said.get("Spaces", ""),
        observations=observations.strip(),
        actions=actions.partition(",")[0].strip(),
        parents=parents,
        relatives=named("relatives", said.get("Differs", "")),
        parent=next(iter(parents), None),
        twin=said.get("Twin") or None,
        copy_of=copy.group(1) if copy else None,
        not_for=not_for(said),
    )


def origins(path: Path) -> list[str]:
    """The names of the scripts that a file says it comes from, the nearest first: the one it is a copy of, by its line
    `Copy of` or a line `Run` that trains another file, its parents or relatives. None for a file without a header."""
    try:
        script = parse_header(path)
    except (UsageError, RecursionError, MemoryError):
        return []
    trained = re.match(r"solo train (\S+)", script.run)
    names = [script.copy_of, trained.group(1) if trained else None, *script.parents, *script.relatives]
    return [stem for stem in dict.fromkeys(Path(name).stem for name in names if name) if stem != script.name]


def find_path(name: str) -> Path:
    """The file of `ppo`, `ppo.py` or a path to any .py file (a file that exists wins); else UsageError."""
    path = expanded(name)
    if path.suffix == ".py" and path.is_file():
        return path
    paths, stem = script_paths(), name.removesuffix(".py")
    if stem in paths:
        return paths[stem]
    refuse(path.is_dir(), f"{name} is a folder; name an algorithm or a .py file")
    refuse(path.is_file(), f"{name} is not a .py file")
    what = "file" if path.suffix == ".py" else "algorithm"
    raise UsageError(f"there is no {what} {name}{did_you_mean(path.stem, paths, n=2) or '; `solo list` shows all'}")


def find_named(script: Script, name: str) -> Path | None:
    """The file that a header names: in its own folder, or else in another family; for a user's own file in the
    catalogue of this installation, or else next to it."""
    folder = script.path.resolve().parent
    known = {path.name: path for path in script_paths().values()}
    if name in known and not in_catalogue(script.path):
        return known[name]
    return next((path for path in [folder / name, *sorted(folder.parent.glob(f"*/{name}"))] if path.is_file()), None)


def definitions(tree: ast.Module) -> dict[str, Definition]:
    """Name -> top-level function or class."""
    return {node.name: node for node in tree.body if isinstance(node, Definition)}


def fields_of(tree: ast.Module, name: str = "Args") -> dict[str, ast.AnnAssign]:
    """Field -> definition in the dataclass `name`; empty if there is none."""
    node = definitions(tree).get(name)
    if not isinstance(node, ast.ClassDef):
        return {}
    return {x.target.id: x for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}


def lines_of(text: str) -> list[str]:
    """The lines of a source with their ends, as Python counts them: none ends at a form feed, as for `splitlines`."""
    return list(StringIO(text, newline=""))


def with_header(text: str, values: dict[str, str]) -> str:
    """`text` with the header's lines of the given keys replaced, left out for an empty value, or put above the first
    line of KEYS where they were not there; all other lines stay as they are."""
    tree = ast.parse(text)
    docstring, fields = tree.body[0], header_fields(ast.get_docstring(tree, clean=False) or "")
    new = {key: value for key, value in values.items() if value and key not in fields}
    end = "\r\n" if "\r\n" in text else "\n"
    lines, skipping = [], False
    for number, line in enumerate(lines_of(text), 1):
        key = line[:VALUE_COLUMN].strip()
        if docstring.lineno <= number <= (docstring.end_lineno or 0):
            if key in KEYS:
                lines += [f"{each:{VALUE_COLUMN}}{value}{end}" for each, value in new.items()]
                new = {}
            if key in values:
                lines += [f"{key:{VALUE_COLUMN}}{values[key]}{end}"] * bool(values[key])
                skipping = True
                continue
            skipping = skipping and not key and bool(line.strip())  # the rest of a replaced value
        if not skipping:
            lines.append(line)
    return "".join(lines)
