"""An algorithm file that needs no SoloRL: the import of the library replaced by a short stand-in (stub.py)."""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Collection
from importlib import metadata
from pathlib import Path

from solorl.catalog.header import ENTRANCES, METADATA, parse_source, read_source, with_header
from solorl.errors import UsageError
from solorl.scripts import PACKAGE, facts_of, header_fields, in_checkout

STUB = Path(__file__).with_name("stub.py")
ENVPOOL = (
    PACKAGE / "envs" / "load_envpool.py", Path(__file__).with_name("stub_envpool.py"), PACKAGE / "envs" / "envpool.py"
)  # fmt: skip
READER = PACKAGE / "args" / "command_line.py"
PROCESSES = PACKAGE / "compute" / "processes.py"
VECTOR = PACKAGE / "envs" / "vector.py"
BANNER = "# ---- SoloRL's run library in short: the same seeds and environments, no run folder, no checkpoints\n"


def attributes_of(name: str, node: ast.AST) -> set[str]:
    """The names `x` of all `name.x` in it."""
    attributes = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return {each.attr for each in attributes if isinstance(each.value, ast.Name) and each.value.id == name}


def stub_with(used: set[str]) -> str:
    """The stub with the verbs that are `used`, and those that they use in turn."""
    text = read_source(STUB)
    [run] = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Run"]
    verbs = {node.name: node for node in run.body if isinstance(node, ast.FunctionDef)}
    kept: set[str] = set()
    found = {"__init__", *used} & set(verbs)
    while not found <= kept:
        kept |= found
        found = set().union(*(attributes_of("self", verbs[name]) for name in kept)) & set(verbs)
    lines: list[str] = text.splitlines(keepends=True)
    for node in (verbs[name] for name in set(verbs) - kept):
        end = node.end_lineno or 0
        lines[node.lineno - 2 : end] = [""] * (end - node.lineno + 2)  # with the empty line before it
    return "".join(lines)


def stub_parts(names: Collection[str], used: set[str]) -> tuple[list[str], str]:
    """The import lines and the definitions of the reader of command lines, of environments side by side, of the stub
    with the verbs that are `used`, of EnvPool's environments where they are among the `names` that a script imports,
    and of what places objects in other processes where it does that."""
    imports, codes = [], []
    more = (*(ENVPOOL if "EnvPoolVectorEnv" in names else ()), *([PROCESSES] if "place" in used else []))
    for path in (READER, VECTOR, STUB, *more):
        text = stub_with(used) if path == STUB else read_source(path)
        lines = text.splitlines(keepends=True)
        nodes = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        imports += [lines[node.lineno - 1] for node in nodes]
        codes.append("".join(lines[nodes[-1].end_lineno :]).strip("\n") + "\n")
    return [line for line in dict.fromkeys(imports) if "solorl" not in line], "\n\n".join(codes)


def library_import(path: Path) -> ast.ImportFrom:
    """The statement `from solorl import ...`; UsageError if there is none or the file needs more of the library."""
    found = None
    for node in ast.walk(parse_source(path)):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "solorl" for alias in node.names):
            raise UsageError(f"{path.name} cannot stand alone: it says `{ast.unparse(node)}`")
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "solorl":
            known = set(ENTRANCES) - {"Runs"}  # which the stub has not; a teacher is refused later
            plain = all(alias.name in known and alias.asname is None for alias in node.names)
            if found or node.module != "solorl" or node.col_offset or not plain:
                raise UsageError(f"{path.name} cannot stand alone: it says `{ast.unparse(node)}`")
            found = node
    if found is None:
        raise UsageError(f"{path.name} stands alone already: it does not import solorl")
    return found


def extras() -> dict[str, list[str]]:
    """What each extra of SoloRL installs."""
    if in_checkout():
        project = tomllib.loads(read_source(PACKAGE.parent / "pyproject.toml"))["project"]
        return project["optional-dependencies"]
    found: dict[str, list[str]] = {}
    for line in metadata.requires("solorl") or []:
        if match := re.search(r"""^(.*?)\s*;\s*extra == ['"](.+)['"]""", line):
            found.setdefault(match.group(2), []).append(match.group(1))
    return found


def without_solorl(block: str) -> str:
    """The PEP 723 block with what SoloRL's extras install in the place of SoloRL."""
    match = METADATA.match(block)
    if not match:
        return ""
    told = tomllib.loads("\n".join(line[2:] for line in match.group(1).splitlines()))
    needed: list[str] = []
    for name in told.get("dependencies", []):
        ours = re.match(r"solorl(?:\[([\w,\s-]*)\])?(?![\w-])", name)
        if ours is None:
            needed.append(name)
            continue
        for extra in (ours.group(1) or "").split(","):
            needed += extras().get(extra.strip(), [])
    python = json.dumps(told.get("requires-python", ">=3.11"))
    return f"# /// script\n# requires-python = {python}\n# dependencies = {json.dumps(needed)}\n# ///\n"


def standalone(path: Path, name: str) -> str:
    """The text of `path` without the library, for a file `name`; UsageError if it needs more than the stub has."""
    ours, text = library_import(path), read_source(path)
    tree = ast.parse(text)
    used = attributes_of("run", tree)
    if "keep" in used:
        raise UsageError(f"{path.name} cannot stand alone: its teacher is a run folder, which the library reads")
    if "dataset" in used:
        raise UsageError(f"{path.name} cannot stand alone: its data set is a folder, which the library reads")
    if {"multi_agent_env", "PettingZooEnvs", "board"} & {*used, facts_of(path).env_kind, *(a.name for a in ours.names)}:
        raise UsageError(f"{path.name} cannot stand alone: the library has its games of several agents and opponents")
    lines = text.splitlines(keepends=True)
    body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    last = body[-1].end_lineno or 0
    imports, code = stub_parts([alias.name for alias in ours.names], used)
    missing = [line for line in imports if line not in lines]
    before, after = lines[: ours.lineno - 1], lines[ours.end_lineno : last]
    text = "".join([*before, *missing, *after, "\n\n", BANNER, code, *lines[last:]])
    if match := METADATA.match(text):
        text = without_solorl(text) + text[match.end() :]
    run = shlex.split(header_fields(ast.get_docstring(ast.parse(text), clean=False) or "").get("Run", ""))
    if run[:2] != ["solo", "train"]:
        return text
    return with_header(text, {"Run": shlex.join(["python", name, *run[3:]])})
