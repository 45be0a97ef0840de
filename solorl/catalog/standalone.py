"""An algorithm file that needs no SoloRL: the import of the library replaced by a short stand-in (stub.py)."""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Collection, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from solorl.catalog.header import ENTRANCES, METADATA, lines_of, parse_source, read_source, with_header
from solorl.errors import UsageError, refuse
from solorl.scripts import PACKAGE, facts_of, header_fields, in_checkout

STUB = PACKAGE / "catalog/stub.py"
ENVPOOL = (PACKAGE / "envs/load_envpool.py", PACKAGE / "catalog/stub_envpool.py", PACKAGE / "envs/envpool.py")
READER = PACKAGE / "args/command_line.py"
VECTOR = PACKAGE / "envs/vector.py"
ONLY_OURS = ("run.dataset", "run.keep", "run.multi_agent_env", "run.place")  # verbs that the stub has not
BANNER = "# ---- SoloRL's run library in short: the same seeds and environments, no run folder, no checkpoints\n"


def stub_parts(names: Collection[str]) -> tuple[list[str], str]:
    """The import lines and the definitions of the reader of command lines, of environments side by side, of the stub,
    and of EnvPool's environments where they are among the `names` that a script imports."""
    imports, codes = [], []
    for path in (READER, VECTOR, STUB, *(ENVPOOL if "EnvPoolVectorEnv" in names else ())):
        text = read_source(path)
        lines = lines_of(text)
        nodes = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        imports += [lines[node.lineno - 1] for node in nodes]
        codes.append("".join(lines[nodes[-1].end_lineno :]).strip("\n") + "\n")
    return [line for line in dict.fromkeys(imports) if "solorl" not in line], "\n\n".join(codes)


def library_import(path: Path) -> ast.ImportFrom:
    """The statement `from solorl import ...`; UsageError if there is none or the file needs more of the library."""
    nodes = [node for node in ast.walk(parse_source(path)) if isinstance(node, ast.Import | ast.ImportFrom)]
    ours: list[Any] = [node for node in nodes if re.search(r"\bsolorl\b", ast.unparse(node))]
    known = set(ENTRANCES) - {"PettingZooEnvs", "Runs", "vector_env"}  # which the stub has not
    for node in ours:
        plain = isinstance(node, ast.ImportFrom) and node.module == "solorl" and node.col_offset == 0
        if not plain or node is not ours[0] or any(name.name not in known or name.asname for name in node.names):
            raise UsageError(f"{path.name} cannot stand alone: it says `{ast.unparse(node)}`")
    refuse(not ours, f"{path.name} stands alone already: it does not import solorl")
    return ours[0]


def extras() -> dict[str, list[str]]:
    """What each extra of SoloRL installs."""
    if in_checkout():
        return tomllib.loads(read_source(PACKAGE.parent / "pyproject.toml"))["project"]["optional-dependencies"]
    found: dict[str, list[str]] = {}
    for line in metadata.requires("solorl") or []:
        if match := re.search(r"""^(.*?)\s*;\s*extra == ['"](.+)['"]""", line):
            found.setdefault(match.group(2), []).append(match.group(1))
    return found


def without_solorl(lines: Sequence[str]) -> str:
    """The PEP 723 block with what SoloRL's extras install in the place of SoloRL."""
    told = tomllib.loads("\n".join(line[2:] for line in lines))
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
    tree, lines = ast.parse(text), lines_of(text)
    lacking = [verb for verb in ONLY_OURS if f"{verb}(" in text] + ["opponents"] * (facts_of(path).env_kind == "board")
    if lacking:
        raise UsageError(f"{path.name} cannot stand alone: the library alone has {lacking[0]}")
    last = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))][-1].end_lineno or 0
    imports, code = stub_parts([alias.name for alias in ours.names])
    missing = [line for line in imports if line not in lines]
    before, after = lines[: ours.lineno - 1], lines[ours.end_lineno : last]
    text = "".join([*before, *missing, *after, "\n\n", BANNER, code, *lines[last:]])
    if match := METADATA.match(text):
        text = without_solorl(match.group(1).splitlines()) + text[match.end() :]
    run = shlex.split(header_fields(ast.get_docstring(ast.parse(text), clean=False) or "").get("Run", ""))
    if run[:2] != ["solo", "train"]:
        return text
    return with_header(text, {"Run": shlex.join(["python", name, *run[3:]])})
