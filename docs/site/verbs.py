"""The page of the verbs: what scripts import from `solorl`, from its docstrings."""

import ast
import html
import inspect
import re
from functools import cache
from pathlib import Path

import writing

import solorl

PACKAGE = Path(solorl.__file__).parent
INTRODUCTION = """# API

What an algorithm file and your own code import from `solorl`. This page is made from the docstrings; the
[design](docs/design.md#the-verbs) shows the verbs in the order in which a script calls them.
"""


@cache
def definition(name):
    """The syntax tree of what `solorl` exports under a name, and its file."""
    path = PACKAGE.parent / (solorl.MODULES[name].replace(".", "/") + ".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next(node for node in tree.body if getattr(node, "name", "") == name), path


def methods(name):
    """The public methods of a class that have a docstring, in the order of the file."""
    node, _ = definition(name)
    functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    return [each for each in functions if not each.name.startswith("_") and ast.get_docstring(each)]


def of_run():
    """The names of the verbs of `Run`."""
    return {each.name for each in methods("Run")}


def signature(node, owner=""):
    """How a function is called, without `self`."""
    text = ast.unparse(node.args)
    text = re.sub(r"^self(, )?", "", text)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    is_property = any(ast.unparse(each) in ("property", "cached_property") for each in node.decorator_list)
    return f"{owner}{node.name}" + (returns if is_property else f"({text}){returns}")


def page(here):
    """The page: a section for each name, below it the methods of classes and the fields of dataclasses."""
    parts, anchors, first = [INTRODUCTION], {}, ("parse", "RunArgs", "Run", "Runs", "load")
    for name in sorted(solorl.__all__, key=lambda name: (name not in first, name)):
        node, _ = definition(name)
        parts.append(f"## {name}\n")
        if isinstance(node, ast.FunctionDef):
            parts += [code(signature(node)), ast.get_docstring(node) or ""]
            continue
        parts += [ast.get_docstring(node) or "", fields(name) if name == "RunArgs" else ""]
        for method in methods(name):
            title, owner = f"{name}.{method.name}", "run." if name in ("Run", "Runs") else f"{name}."
            anchors[title] = title
            parts += [f"### {title}\n", code(signature(method, owner)), inspect.cleandoc(ast.get_docstring(method))]
    made = writing.render("\n\n".join(parts), "README.md", here)
    for anchor in anchors:  # dots are kept, so that `Run.log` and `Runs.log` read as they are called
        made.body = made.body.replace(f'id="{writing.slug(anchor, {})}"', f'id="{anchor}"')
    made.sections = [[anchors.get(title, anchor), title, words] for anchor, title, words in made.sections]
    return made


def code(text):
    """A signature as a block of Python, wrapped where it is long."""
    if len(text) > 100:
        head, _, rest = text.partition("(")
        inside, _, returns = rest.rpartition(")")
        arguments = re.split(r", (?![^\[(]*[\])])", inside)
        text = f"{head}(\n" + "".join(f"    {each},\n" for each in arguments) + f"){returns}"
    return f"```python\n{text}\n```"


def fields(name):
    """The fields of a dataclass with the comments on their lines, as a table."""
    node, path = definition(name)
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and each.value is not None:
            comment = lines[each.end_lineno - 1].partition("  # ")[2].replace("|", "\\|")
            flag = each.target.id.replace("_", "-")
            rows.append(f"| `--{flag}` | `{ast.unparse(each.value)}` | {html.unescape(comment)} |")
    return "\n".join(rows)
