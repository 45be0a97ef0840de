"""The rules of the algorithm files that a machine can check. CONTRIBUTING.md says why each of them is there.

R1 one file, R2 same name same body, R3 diff budget (see budget.py), R5 plumbing is visible; checkpoints that hold what
changes. What a file says of itself is in claims.py.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from solorl.catalog import header
from solorl.catalog.header import Script, definitions, fields_of, parse_header, parse_source, read_source
from solorl.errors import UsageError
from solorl.scripts import BUDGETS, as_typed, in_catalogue
from tools import budget
from tools.claims import check_flags, check_header, check_metadata
from tools.main_block import beginnings, main_block, rebound, root
from tools.source import PLUMBING, Problem, Source, code_lines, families_of, neighbours, uses_of_args

# What may differ between files of one framework under one name, because that name stands for a role; and why.
EXEMPT = {
    "Args": "the settings of an algorithm",
    "Agent": "the networks of an algorithm",
    "Actor": "a policy for a kind of actions",
    "Critic": "a value function for a kind of actions",
    "QNetwork": "the network of a DQN, which dueling and distributional variants change",
    "Batch": "what a rollout or a replay buffer holds",
    "Training": "in JAX: all that changes in a training",
    "Learner": "in JAX: parameters and optimiser states of one algorithm",
    "Setup": "in JAX: what stays the same in a training",
    "init_params": "in JAX: the networks of an algorithm",
    "begin": "in JAX: the first Training",
    "train_iteration": "in JAX: the main loop's body",
    "q_values": "in JAX: the network of a DQN",
    "logits_of": "in JAX: the network of a C51",
    "act": "in JAX: the policy in evaluation",
    "evaluate_actions": "in JAX: log-probabilities for a kind of actions",
}
BY_SPACES = ("make_env", "make_envs")  # equal among the files of a family with equal Spaces
MAX_CODE_ROOT, MAX_CODE, MAX_CODE_LONG = 180, 240, 320
MAX_WIDTH = 120
MAX_DEPTH, MAX_DEPTH_MAIN = 5, 6
NOTE = "note"  # in the place of a rule: what is worth knowing of a user's own file, but no problem
NEVER = ("seed", "device")  # Run uses them; a script that does so too would change results with plumbing

COMPOUND = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.If, ast.For, ast.AsyncFor, ast.While),
    *(ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match),
)


def is_bound(name: str, a: Script, b: Script) -> bool:
    """R2: whether the top-level definition `name` must be equal in both files, if both have it."""
    same_env = a.spaces == b.spaces and a.family == b.family  # PPO acts in the environment's units, SAC in [-1, 1]
    return a.framework == b.framework and name not in EXEMPT and (name not in BY_SPACES or same_env)


# ---------------------------------------------------------------------- R1
def depths(nodes: Iterable[ast.AST], depth: int = 0) -> Iterator[tuple[int, int]]:
    """(depth, line) of every compound statement; `elif` is no deeper than its `if`."""
    for node in nodes:
        children, inside = list(ast.iter_child_nodes(node)), depth
        if isinstance(node, COMPOUND):
            inside = depth + 1
            yield inside, node.lineno
        if isinstance(node, ast.If):
            elifs = [each for each in node.orelse if each.col_offset == node.col_offset]
            yield from depths(elifs, depth)
            children = [each for each in children if each not in elifs]
        yield from depths(children, inside)


def check_imports(source: Source) -> Iterator[Problem]:
    """R1: standard library, third party and solorl; no other algorithm."""
    others = {path.stem for path in families_of(source.path).glob("*/*.py")} | {"algorithms"}
    others |= {path.stem for path in source.path.parent.glob("*.py")}
    for module, line in header.top_modules(source.tree).items():
        if module in others and module not in sys.stdlib_module_names:
            yield source.problem(line, "R1", f"imports {module}, another algorithm; a file stands alone")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield source.problem(node.lineno, "R1", "imports relative to its folder; a file stands alone")


def check_size(source: Source) -> Iterator[Problem]:
    """R1: lines of code, width and nesting."""
    lines, long = code_lines(source.text), budget.may_be_long(source.path)
    is_root = source.script.framework == "torch" and not (source.script.parents or source.script.relatives)
    limit = MAX_CODE_LONG if long else MAX_CODE_ROOT if is_root else MAX_CODE
    if lines > limit:
        hint = "" if long else f" ({MAX_CODE_LONG} where [long] of {BUDGETS} says why)"
        yield source.problem(1, "R1", f"has {lines} lines of code, but may have {limit}{hint}")
    for number, line in enumerate(source.text.splitlines(), 1):
        if len(line) > MAX_WIDTH:
            yield source.problem(number, "R1", f"the line has {len(line)} characters, but may have {MAX_WIDTH}")
    block = main_block(source.tree)
    for node in source.tree.body:
        most = MAX_DEPTH_MAIN if node is block else MAX_DEPTH
        for depth, number in depths([node]):
            if depth == most + 1:
                yield source.problem(number, "R1", f"is nested {depth} deep, but may be {most}")


# ---------------------------------------------------------------------- R5
def check_plumbing(source: Source) -> Iterator[Problem]:
    """R5: the library is called in the main block, in statements that begin with `run.`; its flags are not read."""
    own = set(fields_of(source.tree))
    for name, line in uses_of_args(source.tree):
        if name in NEVER or (name in PLUMBING and name not in own):
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
    beginning = {id(expression) for node in ast.walk(block) for expression in beginnings(node)}
    imported = (node for node in ast.walk(source.tree) if isinstance(node, ast.ImportFrom))
    names = [each for node in imported if (node.module or "").split(".")[0] == "solorl" for each in node.names]
    library = {each.asname or each.name for each in names if each.name not in header.ENTRANCES}
    for node in ast.walk(block):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if root(node.func) in library:
                text = f"calls {name} of the library; only the verbs of `run` are for scripts"
                yield source.problem(node.lineno, "R5", text)
            if root(node.func) == "run" and id(node) not in beginning:
                yield source.problem(node.lineno, "R5", f"hides {name} inside a statement; begin it with `run.`")
        if isinstance(node, ast.Attribute) and root(node) == "run" and node.attr.startswith("_"):
            yield source.problem(node.lineno, "R5", f"uses {ast.unparse(node)}, which is private to the library")


# ---------------------------------------------------------------------- checkpoints
def check_parts(source: Source) -> Iterator[Problem]:
    """A checkpoint holds the objects that `run.resume` got, so what the loop replaces is in a namespace. In JAX the
    library replaces the training."""
    block = main_block(source.tree)
    if block is None or source.script.framework != "torch":
        return
    for name, line in rebound(block):
        text = f"binds {name} again, but checkpoints hold what run.resume was given"
        yield source.problem(line, "resume", f"{text}: put it into a namespace, now = SimpleNamespace({name}=...)")


# ---------------------------------------------------------------------- the checks as a whole
def check_file(path: Path) -> list[Problem]:
    """All that can be said of one file alone, in the order of its lines. A user's own file may be long, and import
    others."""
    try:
        source = Source(path, read_source(path), parse_source(path), parse_header(path))
    except UsageError as error:
        return [Problem(path, 1, "header", str(error).removeprefix(str(path)).lstrip())]
    of_catalogue = (check_imports, check_size) if in_catalogue(path) else ()
    checks = (*of_catalogue, check_header, check_metadata, check_flags, check_plumbing, check_parts)
    return sorted((problem for check in checks for problem in check(source)), key=lambda problem: problem.line)


def header_of(path: Path) -> Script | None:
    """The header of a file; None of one that has none, which `check_file` says."""
    try:
        return parse_header(path)
    except UsageError:
        return None


def check_together(paths: Sequence[Path]) -> list[Problem]:
    """R2 and R3 for the files of all families. Files without a header are left to `check_file`."""
    found = [script for path in paths if (script := header_of(path))]
    return [*check_same_bodies(found), *check_budgets(found)]


def check_own(path: Path) -> list[Problem]:
    """A user's own file against the catalogue, where it comes from a file of it: notes of what has another body there,
    and the problem of a parent that does not exist."""
    script = header_of(path)
    if script is None:
        return []
    origin = budget.origin_of(script)
    others = [parse_header(each) for each in neighbours(origin)] if origin else []
    found = [*check_same_bodies(others, script), *check_budgets([script])]
    return [problem for problem in found if problem.path == path]


def check_same_bodies(scripts: Sequence[Script], own: Script | None = None) -> Iterator[Problem]:
    """R2: a definition with the same name is equal, up to formatting, to that of the first file that has it; roots come
    first. `own` is a user's own file, which comes last and may make other environments."""
    first: dict[str, list[tuple[str, Script]]] = {}  # name -> definitions, of which each binds other files
    ordered = sorted(scripts, key=lambda script: (bool(script.parents or script.relatives), script.path.name))
    for script in [*ordered, own] if own else ordered:
        for name, node in definitions(parse_source(script.path)).items():
            if script is own and name in BY_SPACES:
                continue
            text, known = ast.unparse(node), first.setdefault(name, [])
            wanted, owner = next((each for each in known if is_bound(name, each[1], script)), (text, script))
            if owner is script:
                known.append((text, script))
            elif text != wanted:
                what, source = f"{name} is not the {name} of {owner.path.name}", as_typed(owner.path)
                repair = f"{what}; rename it, or repair it: solo sync {name} --from {source}"
                note = f"{what}: solo diff {source} {as_typed(script.path)}"
                rule, text = (NOTE, note) if script is own else ("R2", repair)
                yield Problem(script.path, node.lineno, rule, text)


def check_budgets(scripts: Sequence[Script]) -> Iterator[Problem]:
    """R3: the diff of each file with a parent stays within its budget; no relative could be a parent."""
    for script in scripts:
        if text := budget.breach(script) if script.parent else budget.bad_relatives(script):
            line = Source(script.path, read_source(script.path), ast.Module([], []), script).header_line("Differs")
            yield Problem(script.path, line, "R3", text)
