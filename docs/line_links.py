"""Links the implementation details of every family's page to the lines they speak of, anew after each change of a file.

python docs/line_links.py

In the section "Implementation details" a name in backticks (`gae`, `Actor.forward`) that a file of the family defines,
and the words "phase 3", become links to the line. The file is the one named behind it ("`project` of `c51.py`"), else
the one last linked to at the beginning of a paragraph, else the first of the family's table that defines the name.
"""

import ast
import re
from pathlib import Path

FAMILIES = Path(__file__).resolve().parent.parent / "algorithms"
LINK = re.compile(r"\[(`[\w.]+`|phase \d)\]\((\w+\.py)#L\d+\)")
SPAN = re.compile(r"(?<![\[`])(`([A-Za-z_]\w*(?:\.\w+)?)`|phase (\d))(?! \d)(?:( of )`(\w+\.py)`)?")


def places(path):
    """Where the functions, classes, methods and phases of a file begin: name -> line."""
    source, found = path.read_text(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node.lineno
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{each.name}": each.lineno for each in methods}
    phases = re.finditer(r"^ *# ---- (\d)\.", source, flags=re.M)
    return found | {f"phase {each[1]}": source.count("\n", 0, each.start()) + 1 for each in phases}


def linked(page):
    """The text of a page with its links to lines as they should be."""
    text = page.read_text()
    head, middle, tail = re.split(r"(?<=\n)(?=## (?:Implementation details|Results)\n)", text)
    files = list(dict.fromkeys(re.findall(r"\]\((\w+\.py)\)", head)))
    lines = {name: places(page.parent / name) for name in files}
    current = files[0]

    def link(match):
        span, name, phase, of, file = match.groups()
        name = name or f"phase {phase}"
        there = [each for each in ([file] if file else [current, *files]) if name in lines[each]]
        if not there:
            return match[0]
        return f"[{span}]({there[0]}#L{lines[there[0]][name]})" + (f"{of}`{file}`" if of else "")

    paragraphs = re.split(r"(\n\n|\n(?=\d+\. ))", LINK.sub(r"\1", middle))
    for i, paragraph in enumerate(paragraphs):
        if not re.match(r"\d+\. ", paragraph):  # an introduction: of which file what follows speaks
            current = next(iter(re.findall(r"\]\((\w+\.py)\)", paragraph)), current)
        paragraphs[i] = SPAN.sub(link, paragraph)
    return head + "".join(paragraphs) + tail


if __name__ == "__main__":
    for page in sorted(FAMILIES.glob("*/README.md")):
        page.write_text(linked(page))
