"""Source code for the pages: coloured lines, and the lines on which names of a file stand."""

import ast
import html
import re
from functools import lru_cache
from itertools import pairwise

from pygments.lexers import TextLexer, get_lexer_by_name, get_lexer_for_filename
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, String
from pygments.util import ClassNotFound

# What has a colour -> its class in the style sheet; the first that fits counts.
COLOURED = (
    (String.Doc, "c"), (Comment, "c"), (String, "s"), (Keyword, "k"), (Operator.Word, "k"), (Number, "n"),
    (Name.Function, "f"), (Name.Class, "f"), (Name.Decorator, "d"), (Name.Tag, "k"), (Generic.Prompt, "c"),
)  # fmt: skip
PHASE = re.compile(r"\s*# -{3,} (\d)\. ")  # the comment above one of the four phases of a file

Piece = tuple[str, str]  # class in the style sheet or "", and text


def lexer_of(name):
    """The lexer of Pygments for a file name or the word after the backticks of Markdown; plain text if it has none."""
    try:
        return get_lexer_for_filename(name) if "." in name else get_lexer_by_name(name)
    except ClassNotFound:
        return TextLexer()


@lru_cache(maxsize=256)
def coloured(text, name):
    """The lines of a text, each a list of pieces `(class, text)`."""
    lines = [[]]
    for token, value in lexer_of(name).get_tokens(text):
        kind = next((kind for parent, kind in COLOURED if token in parent), "")
        for i, part in enumerate(value.split("\n")):
            if i:
                lines.append([])
            if part:
                lines[-1].append((kind, part))
    return lines[: len(text.splitlines())]


def to_html(pieces, parts=(), tag="mark"):
    """A line as HTML; `parts` are the same text cut at other places, each with whether it is marked with `tag`."""
    ends, at, marked = [], 0, {}
    for text, mark in parts:
        marked |= dict.fromkeys(range(at, at + len(text)), mark)
        at += len(text)
        ends.append(at)
    found, at = [], 0
    for kind, text in pieces:
        cuts = [0, *(end - at for end in ends if at < end < at + len(text)), len(text)]
        for start, end in pairwise(cuts):
            part = html.escape(text[start:end], quote=False)
            part = f'<i class="{kind}">{part}</i>' if kind else part
            found.append(f"<{tag}>{part}</{tag}>" if marked.get(at + start) else part)
        at += len(text)
    return "".join(found).replace(f"</{tag}><{tag}>", "")


def block(text, name):
    """A block of code on a page of text."""
    lines = "\n".join(map(to_html, coloured(text.rstrip("\n"), name)))
    return f'<pre tabindex="0"><code>{lines}</code></pre>\n'


def listing(text, name, path=None):
    """A whole file, its lines numbered; the first line of a definition knows the last one (`data-end`)."""
    ends = dict(places(path).values()) if path else {}
    rows = []
    for number, pieces in enumerate(coloured(text, name), 1):
        end = f' data-end="{ends[number]}"' if number in ends else ""
        rows.append(f'<li id="L{number}"{end}>{to_html(pieces)}</li>')
    return f'<ol class="listing">{"".join(rows)}</ol>'


@lru_cache(maxsize=256)
def places(path):
    """What a Python file defines -> its first and last line: functions, classes, methods (`Actor.rollout`), the fields
    of `Args` (`--num-envs`) and the phases of the loop (`phase 1`)."""
    text = path.read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = first_line(node), node.end_lineno
            for child in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(child, ast.FunctionDef):
                    found[f"{node.name}.{child.name}"] = first_line(child), child.end_lineno
                elif node.name == "Args" and isinstance(child, ast.AnnAssign):
                    flag = child.target.id.replace("_", "-")
                    found[f"--{flag}"] = found[f"--no-{flag}"] = child.lineno, child.end_lineno
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, (node.lineno, node.end_lineno))
    for number, line in enumerate(text.splitlines(), 1):
        if match := PHASE.match(line):
            found.setdefault(f"phase {match[1]}", (number, number))
    return found


def first_line(node):
    """The line of the decorator of a definition, or of the definition."""
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def line_of(path, name):
    """The line of a name in a file: also of names in the main block and of the last part of a dotted one; None if the
    file has no such name."""
    name = re.sub(r"\s+", " ", name).removesuffix("()").partition(" ")[0] if name.startswith("--") else name
    known = places(path)
    for each in (name, re.sub(r"\s+", " ", name).lower(), name.rpartition(".")[2]):
        if each in known:
            return known[each][0]
    words = set(re.findall(r"\w+", name))
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if re.fullmatch(r"\w+", name) and re.search(rf"\b{name}\b[^=]*=|\bdef {name}\b|\bclass {name}\b", line):
            return number
        if words and " " in name and line.strip().startswith("# ----") and words <= set(re.findall(r"\w+", line)):
            return number
    return None
