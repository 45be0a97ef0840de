"""The rules of the algorithm files that a machine can check. CONTRIBUTING.md says why each of them is there.

R1 one file, R2 same name same body, R3 diff budget (see budget.py), R5 plumbing is visible; and complete headers,
script metadata that covers the imports, no dead flags.
"""

import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from solorl import budget
from solorl.catalog import KEYS, PACKAGE, Script, parse_header, parse_source, read_source, top_modules
from solorl.errors import UsageError, did_you_mean

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

# What differs between siblings by nature: settings, networks and, in JAX, state and loop.
EXEMPT = (
    *("Args", "make_env", "Agent", "Actor", "Critic", "QNetwork"),
    *("Training", "Learner", "init_params", "policy", "evaluate", "act", "begin", "iteration"),
)
MAX_LINES, MAX_LINES_DEMANDING = 250, 350
MAX_WIDTH = 120
MAX_DEPTH = 5
ENTRANCES = ("Run", "Runs", "RunArgs", "parse")  # what a script may use of the library besides the verbs of `run`
NEVER = ("seed", "device")  # Run uses them; a script that does so too would change results with plumbing

# Where the name of a module is not that of its distribution or extra.
PROVIDERS = {
    "yaml": ("pyyaml",),
    "cv2": ("opencv-python", "opencv-python-headless"),
    "PIL": ("pillow",),
    "ale_py": ("ale-py", "atari"),
    "stable_baselines3": ("stable-baselines3",),
}
METADATA = re.compile(r"# /// script\n((?:#(?: .*)?\n)+?)# ///\n")  # PEP 723, at the top of the file

COMPOUND = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.If, ast.For, ast.AsyncFor, ast.While),
    *(ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match),
)


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


# ---------------------------------------------------------------------- what a file contains
def definitions(tree: ast.Module) -> dict[str, Definition]:
    """Name -> top-level function or class."""
    return {node.name: node for node in tree.body if isinstance(node, Definition)}


def fields_of(tree: ast.Module, name: str) -> dict[str, int]:
    """Field -> line of the dataclass `name`; empty if there is none."""
    node = definitions(tree).get(name)
    if not isinstance(node, ast.ClassDef):
        return {}
    return {x.target.id: x.lineno for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}


@lru_cache
def plumbing_flags() -> frozenset[str]:
    """The fields of RunArgs, read from the library's source."""
    found = (fields_of(parse_source(path), "RunArgs") for path in sorted(PACKAGE.glob("*.py")))
    return frozenset(next(fields for fields in found if fields))


def main_block(tree: ast.Module) -> ast.If | None:
    """The statement `if __name__ == "__main__":` of a file."""
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            return node
    return None


def uses_of_args(tree: ast.AST) -> list[tuple[str, int]]:
    """Every `args.field` with its line."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return [(n.attr, n.lineno) for n in nodes if isinstance(n.value, ast.Name) and n.value.id == "args"]


def siblings(script: Script) -> list[Path]:
    """The other files of the same folder and framework."""
    paths = sorted(path for path in script.path.parent.glob("*.py") if not path.name.startswith("_"))
    others = [path for path in paths if not path.samefile(script.path)]
    return [path for path in others if ("jax" in top_modules(parse_source(path))) == (script.framework == "jax")]


# ---------------------------------------------------------------------- R1
def depths(nodes: Sequence[ast.stmt], depth: int = 0) -> Iterator[tuple[int, int]]:
    """(depth, line) of every compound statement; `elif` is no deeper than its `if`."""
    for node in nodes:
        if not isinstance(node, COMPOUND):
            continue
        yield depth + 1, node.lineno
        for name in ("body", "handlers", "cases", "orelse", "finalbody"):
            for inner in _blocks(getattr(node, name, [])):
                is_elif = name == "orelse" and isinstance(node, ast.If) and _is_elif(inner, node)
                yield from depths(inner, depth if is_elif else depth + 1)


def _blocks(nodes: Sequence[ast.AST]) -> Iterator[Sequence[ast.stmt]]:
    """The blocks of statements in a part of a compound statement (one, or one per handler or case)."""
    if nodes and isinstance(nodes[0], (ast.ExceptHandler, ast.match_case)):
        yield from (node.body for node in nodes if isinstance(node, (ast.ExceptHandler, ast.match_case)))
    else:
        yield [node for node in nodes if isinstance(node, ast.stmt)]


def _is_elif(block: Sequence[ast.stmt], node: ast.If) -> bool:
    return len(block) == 1 and isinstance(block[0], ast.If) and block[0].col_offset == node.col_offset


def check_imports(source: Source) -> Iterator[Problem]:
    """R1: standard library, third party and solorl; no other algorithm."""
    others = {path.stem for path in source.path.resolve().parent.parent.glob("*/*.py")} | {"algorithms"}
    others |= {path.stem for path in source.path.parent.glob("*.py")}
    for module, line in top_modules(source.tree).items():
        if module in others and module not in sys.stdlib_module_names:
            yield source.problem(line, "R1", f"imports {module}, another algorithm; a file stands alone")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield source.problem(node.lineno, "R1", "imports relative to its folder; a file stands alone")


def check_size(source: Source) -> Iterator[Problem]:
    """R1: lines, width and nesting."""
    lines = source.text.splitlines()
    demanding = budget.is_demanding(source.path)
    limit = MAX_LINES_DEMANDING if demanding else MAX_LINES
    if len(lines) > limit:
        hint = "" if demanding else f" (demanding variants, listed in {budget.TABLE}, may have {MAX_LINES_DEMANDING})"
        yield source.problem(limit + 1, "R1", f"has {len(lines)} lines, but may have {limit}{hint}")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_WIDTH:
            yield source.problem(number, "R1", f"the line has {len(line)} characters, but may have {MAX_WIDTH}")
    for depth, number in depths(source.tree.body):
        if depth == MAX_DEPTH + 1:
            yield source.problem(number, "R1", f"is nested {depth} deep, but may be {MAX_DEPTH}")


# ---------------------------------------------------------------------- header, script metadata, flags
def check_header(source: Source) -> Iterator[Problem]:
    """All keys are there; parent, page and command exist."""
    script, fields = source.script, source.script.fields
    for key in KEYS:
        if not fields.get(key):
            place = "keys stand in columns 0-9, values start at column 10"
            yield source.problem(1, "header", f"the header has no line {key} ({place})")
    if fields.get("Differs") and script.parent is None and not fields["Differs"].startswith("root of its family"):
        text = "Differs must say `from SIBLING.py: how` or `root of its family`"
        yield source.problem(source.header_line("Differs"), "header", text)
    path = source.path.resolve()
    page = re.split(r"[\s:;,]", fields.get("Details", ""))[0]
    if page and not (path.parents[2] / page).is_file():
        yield source.problem(source.header_line("Details"), "header", f"there is no file {page}")
    if script.run and (text := bad_command(script, source.tree)):
        yield source.problem(source.header_line("Run"), "header", text)
    for twin in sorted(set(path.parents[1].glob(f"*/{path.name}")) - {path}):
        yield source.problem(1, "header", f"the name is taken by {twin.parent.name}/{twin.name}")


def bad_command(script: Script, tree: ast.Module) -> str:
    """What is wrong with the header's line Run, or an empty string."""
    try:
        words = shlex.split(script.run)
    except ValueError as error:
        return f"the command under Run cannot be read: {error}"
    if words[:2] != ["solo", "train"] or words[2:3] not in ([script.name], [script.path.name]):
        return f"Run must start with `solo train {script.name}`"
    allowed = plumbing_flags() | set(fields_of(tree, "Args"))
    for word in words[3:]:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and name not in allowed and name.removeprefix("no_") not in allowed:
            return f"the command under Run has the unknown flag {word}{did_you_mean(name, allowed)}"
    return ""


def check_metadata(source: Source) -> Iterator[Problem]:
    """PEP 723: the block is the first thing in the file and its dependencies cover the imports."""
    match = METADATA.match(source.text)
    if not match:
        yield source.problem(1, "PEP 723", "the file must start with a block from `# /// script` to `# ///`")
        return
    try:
        block = tomllib.loads("\n".join(line[2:] for line in match.group(1).splitlines()))
    except tomllib.TOMLDecodeError as error:
        yield source.problem(2, "PEP 723", f"the block is not TOML: {error}")
        return
    for key in ("requires-python", "dependencies"):
        if key not in block:
            yield source.problem(1, "PEP 723", f"the block has no {key}")
    provided = provided_names(block.get("dependencies", []))
    for module, line in top_modules(source.tree).items():
        names = PROVIDERS.get(module, (normal(module),))
        if module not in sys.stdlib_module_names and not provided.intersection(names):
            yield source.problem(line, "PEP 723", f"imports {module}, but the dependencies do not name {names[0]}")


def normal(name: str) -> str:
    """A distribution's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def provided_names(dependencies: Sequence[str]) -> set[str]:
    """Normalised names of the distributions and of their extras: solorl[box2d]>=0.1 -> solorl, box2d."""
    heads = (re.split(r"[<>=!~;@ (]", dependency)[0] for dependency in dependencies)
    return {normal(name) for head in heads for name in re.split(r"[\[\],]", head) if name}


def check_flags(source: Source) -> Iterator[Problem]:
    """No dead flags: each field of Args is read outside the class."""
    used = {name for name, _ in uses_of_args(source.tree)}
    if any(isinstance(node, ast.alias) and node.name == "Runs" for node in ast.walk(source.tree)):
        used.add("num_seeds")  # Runs reads it
    for name, line in fields_of(source.tree, "Args").items():
        if name not in used and name not in plumbing_flags():
            yield source.problem(line, "flags", f"args.{name} is never used; a flag that does nothing misleads")


# ---------------------------------------------------------------------- R5
def check_plumbing(source: Source) -> Iterator[Problem]:
    """R5: the library is called in the main block, in statements that begin with `run.`; its flags are not read."""
    own = set(fields_of(source.tree, "Args"))
    for name, line in uses_of_args(source.tree):
        if name in NEVER or (name in plumbing_flags() and name not in own):
            yield source.problem(line, "R5", f"reads args.{name}, which only the library uses")
    block = main_block(source.tree)
    if block is None:
        yield source.problem(1, "R5", 'the file has no block `if __name__ == "__main__":`')
        return
    inside = {id(node) for node in ast.walk(block)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and node.id == "run" and id(node) not in inside:
            yield source.problem(node.lineno, "R5", "uses run outside the main block")
    yield from _check_calls(source, block)


def _check_calls(source: Source, block: ast.If) -> Iterator[Problem]:
    beginning = {id(expression) for node in ast.walk(block) for expression in _beginnings(node)}
    library = {
        alias.asname or alias.name
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "solorl"
        for alias in node.names
        if alias.name not in ENTRANCES
    }
    for node in ast.walk(block):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if _root(node.func) in library:
                yield source.problem(
                    node.lineno, "R5", f"calls {name} of the library; only the verbs of `run` are for scripts"
                )
            if _root(node.func) == "run" and id(node) not in beginning:
                yield source.problem(node.lineno, "R5", f"hides {name} inside a statement; begin it with `run.`")
        if isinstance(node, ast.Attribute) and _root(node) == "run" and node.attr.startswith("_"):
            yield source.problem(node.lineno, "R5", f"uses {ast.unparse(node)}, which is private to the library")


def _beginnings(node: ast.AST) -> list[ast.expr]:
    """The expressions with which a statement begins, seen without what it assigns to."""
    if isinstance(node, (ast.Expr, ast.Assign, ast.AnnAssign)) and node.value is not None:
        return list(node.value.elts) if isinstance(node.value, ast.Tuple) else [node.value]
    return [node.iter] if isinstance(node, ast.For) else []


def _root(node: ast.expr) -> str:
    """The name at the start of `name.a.b`, or an empty string."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


# ---------------------------------------------------------------------- the checks as a whole
def check_file(path: Path) -> list[Problem]:
    """All that can be said of one file alone, in the order of its lines."""
    try:
        source = Source(path, read_source(path), parse_source(path), parse_header(path))
    except UsageError as error:
        return [Problem(path, 1, "header", str(error).removeprefix(str(path)).lstrip())]
    checks = (check_imports, check_size, check_header, check_metadata, check_flags, check_plumbing)
    return sorted((problem for check in checks for problem in check(source)), key=lambda problem: problem.line)


def check_family(paths: Sequence[Path]) -> list[Problem]:
    """R2 and R3 for the files of one folder. Files without a header are left to `check_file`."""
    found = []
    for path in paths:
        try:
            found.append(parse_header(path))
        except UsageError:
            continue
    return [*check_same_bodies(found), *check_budgets(found)]


def check_same_bodies(scripts: Sequence[Script]) -> Iterator[Problem]:
    """R2: a definition with the same name is equal, up to formatting, to that of the family's first file: the root."""
    first: dict[tuple[str, str], tuple[str, Script]] = {}
    for script in sorted(scripts, key=lambda script: (script.parent is not None, script.path.name)):
        for name, node in definitions(parse_source(script.path)).items():
            if name in EXEMPT:
                continue
            text, owner = first.setdefault((script.framework, name), (ast.unparse(node), script))
            if ast.unparse(node) != text:
                what = f"{name} is not the {name} of {owner.path.name}; rename it, or repair it"
                yield Problem(script.path, node.lineno, "R2", f"{what}: solo sync {name} --from {owner.name}")


def check_budgets(scripts: Sequence[Script]) -> Iterator[Problem]:
    """R3: the diff of each file that is not a root stays within its budget."""
    for script in scripts:
        if script.parent and (text := budget.breach(script)):
            line = Source(script.path, read_source(script.path), ast.Module([], []), script).header_line("Differs")
            yield Problem(script.path, line, "R3", text)
