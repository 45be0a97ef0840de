"""What an algorithm file says of itself: header, script metadata (PEP 723) and flags, checked against what it is."""

import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence

from solorl.catalog.header import METADATA, Script, fields_of, find_named, parse_header, top_modules
from solorl.errors import did_you_mean
from solorl.scripts import KEYS, PAGES, as_typed, in_catalogue, script_paths
from tools.source import PLUMBING, Problem, Source, families_of, uses_of_args

# Where the name of a module is not that of its distribution or extra.
PROVIDERS = {
    "yaml": ("pyyaml",),
    "cv2": ("opencv-python", "opencv-python-headless"),
    "PIL": ("pillow",),
    "ale_py": ("ale-py", "atari"),
    "stable_baselines3": ("stable-baselines3",),
}


def check_header(source: Source) -> Iterator[Problem]:
    """All keys are there; parent, page and command exist."""
    script, fields = source.script, source.script.fields
    for key in KEYS:
        if not fields.get(key):
            place = "keys stand in columns 0-9, values start at column 10"
            yield source.problem(1, "header", f"the header has no line {key} ({place})")
    named = script.parents or script.relatives
    if fields.get("Differs") and not named and not fields["Differs"].startswith("root of its family"):
        ways = "`from SIBLING.py: how`, `from ONE.py, OTHER.py: how`, `relatives ONE.py, OTHER.py: how`"
        text = f"Differs must say {ways} or `root of its family`"
        yield source.problem(source.header_line("Differs"), "header", text)
    path, families = source.path.resolve(), families_of(source.path)
    page = re.split(r"[\s:;,]", fields.get("Details", ""))[0]
    if page and not (families.parent / page).is_file():
        yield source.problem(source.header_line("Details"), "header", f"there is no file {page}")
    elif in_catalogue(path) and page != (own := f"{PAGES}/{script.name}.md"):
        yield source.problem(source.header_line("Details"), "header", f"Details must name the file's own page, {own}")
    if script.run and (text := bad_command(script, source.tree)):
        yield source.problem(source.header_line("Run"), "header", text)
    taken = set(families.glob(f"*/{path.name}")) - {path} if in_catalogue(path) else set()
    for other in sorted(taken):
        yield source.problem(1, "header", f"the name is taken by {other.parent.name}/{other.name}")
    if text := bad_twin(script):
        yield source.problem(source.header_line("Twin"), "header", text)


def bad_twin(script: Script) -> str:
    """What is wrong with the header's line Twin, or an empty string: files in JAX may name their twin in torch."""
    if "Twin" not in script.fields:
        return ""
    if script.framework != "jax":
        return "only files in JAX name a Twin, the torch file that they correspond to"
    path = find_named(script, script.twin or "")
    if path is None or path.suffix != ".py":
        return f"Twin names {script.twin or 'nothing'}, but there is no such file"
    return f"Twin names {path.name}, which is in JAX, too" if parse_header(path).framework == "jax" else ""


def bad_command(script: Script, tree: ast.Module) -> str:
    """What is wrong with the header's line Run, or an empty string."""
    try:
        words = shlex.split(script.run)
    except ValueError as error:
        return f"the command under Run cannot be read: {error}"
    names = [script.name, script.path.name]
    if not in_catalogue(script.path):  # a copy may say what the original says
        names += [name + end for name in script_paths() for end in ("", ".py")]
    if words[:2] != ["solo", "train"] or not set(words[2:3]) & set(names):
        return f"Run must start with `solo train {as_typed(script.path)}`"
    allowed = PLUMBING | set(fields_of(tree))
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
    provided, siblings = provided_names(block.get("dependencies", [])), {x.name for x in source.path.parent.iterdir()}
    for module, line in top_modules(source.tree).items():
        names = PROVIDERS.get(module, (normal(module),))
        if not in_catalogue(source.path) and {module, f"{module}.py"} & siblings:
            continue  # a module of the user's own
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
    runs = any(isinstance(node, ast.alias) and node.name == "Runs" for node in ast.walk(source.tree))
    used |= {"num_seeds"} if runs else set()  # Runs reads it
    named = (node for node in ast.walk(source.tree) if getattr(node, "attr", "") == "iterations")
    used |= {"total_timesteps"} if "run.iterations" in map(ast.unparse, named) else set()  # which it reads
    for name, node in fields_of(source.tree).items():
        if name not in used and name not in PLUMBING:
            yield source.problem(node.lineno, "flags", f"args.{name} is never used; a flag that does nothing misleads")
