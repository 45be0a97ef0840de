"""Copy a function or class from one file into every file that must have the same (rule R2), or merge all
changes of a file since a commit into the files that come from it.
"""

import ast
from collections.abc import Sequence
from pathlib import Path

from solorl.catalog.header import Definition, definitions, find_path, parse_header, parse_source, read_source
from solorl.cli import Parser
from solorl.errors import UsageError, hint, refuse
from solorl.files import git, shown, write
from tools.rules import EXEMPT, is_bound
from tools.source import neighbours, parent_paths, split_header
from tools.square import descendants, merge

HEADER = '"""The header of each file is its own."""\n'


def span(node: Definition) -> slice:
    """The lines of a definition, its decorators included, the comments above it not."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return slice(first - 1, node.end_lineno)


def body_of(path: Path, name: str) -> list[str]:
    """The lines of the top-level definition `name`; UsageError with the nearest name if the file has none."""
    found = definitions(parse_source(path))
    if name not in found:
        raise UsageError(f"{shown(path)} has no function or class {name}{hint(name, found, 'it has')}")
    return read_source(path).split("\n")[span(found[name])]


def synced(path: Path, name: str, body: Sequence[str]) -> str | None:
    """The text of `path` with its definition `name` replaced by `body`; None if it has no such definition."""
    node, lines = definitions(parse_source(path)).get(name), read_source(path).split("\n")
    if node is None:
        return None
    lines[span(node)] = body
    return "\n".join(lines)


def put(path: Path, text: str) -> None:
    """Write the new text of a file with the line ends that it has."""
    write(path, text.replace("\n", "\r\n" if b"\r\n" in path.read_bytes() else "\n").encode())


def copy_definition(name: str, source: Path, check: bool) -> int:
    """Copy a definition into all files in which it must be equal."""
    body, own = body_of(source, name), parse_header(source)
    refuse(name in EXEMPT, f"solo sync leaves {', '.join(EXEMPT)} alone: they are meant to differ between files")
    others = [parse_header(path) for path in neighbours(source) if not path.samefile(source)]
    new = {other.path: synced(other.path, name, body) for other in others if is_bound(name, own, other)}
    having = {path: text for path, text in new.items() if text is not None}
    changed = {path: text for path, text in having.items() if text != read_source(path)}
    for path, text in changed.items():
        ast.parse(text)
        if not check:
            put(path, text)
        print(f"{'differs' if check else 'synced'}: {name} in {shown(path)}")
    if not changed:
        print(f"{name} is equal in all {len(having)} other files that must have the same")
    return int(check and bool(changed))


# ---------------------------------------------------------------------- the main block, by three-way merges
def text_at(path: Path, revision: str) -> str:
    """The text of a file in a revision of its git repository. UsageError where there is none."""
    try:
        return git(path.parent, "show", f"{revision}:./{path.name}").decode()
    except UsageError as error:
        raise UsageError(f"git has no {shown(path)} at {revision}: {error}") from None


def without_docstring(text: str) -> str:
    """The text with one and the same line in place of the header's docstring, which is each file's own."""
    head, docstring, body = split_header(text)
    return f"{head}{HEADER}{body}" if docstring else text


def carried(text: str, old: str, new: str) -> tuple[str, int]:
    """`text`, that of a child, with the change of its parent from `old` to `new`, and how many places conflict: they
    are left as they are. The header's docstring stays, too."""
    places = merge(*map(without_docstring, (text, old, new)))[1]
    merged = merge(*map(without_docstring, (text, old, new)), "--ours")[0]
    merged = merged.replace(HEADER, split_header(text)[1], 1)
    try:
        ast.parse(merged)
    except SyntaxError:
        return text, max(places, 1)
    return merged, places


def merge_down(source: Path, revision: str, check: bool) -> int:
    """Merge the change of a file since a revision into all files that come from it, the nearest first."""
    source = source.resolve()
    texts = {source: (text_at(source, revision), read_source(source))}  # path -> before, after
    below = descendants(source, [parse_header(path) for path in neighbours(source)])
    conflicts = 0
    for child in below:
        before = after = read_source(child.path)
        places = 0
        for parent in parent_paths(child):
            old, new = texts.get(parent.resolve(), ("", ""))
            if old != new:
                after, more = carried(after, old, new)
                places += more
        texts[child.path.resolve()] = before, after
        if after != before:
            if not check:
                put(child.path, after)
            print(f"{'would change' if check else 'merged'}: {shown(child.path)}")
        if places:
            print(f"conflict: {shown(child.path)}, {places} place{'s'[: places != 1]}: merge by hand")
        conflicts += places
    changed = [path for path, (before, after) in texts.items() if before != after and path != source]
    if not changed and not conflicts:
        print(f"the {len(below)} files that come from {source.name} need no change")
    return int(bool(conflicts) or (check and bool(changed)))


def main(argv: Sequence[str]) -> int:
    """Copy a definition, or merge a change of the main block; with --check only say what would change and return 1 if
    anything would. A conflict returns 1, too."""
    parser = Parser("sync", __doc__ or "")
    parser.add_argument("name", metavar="NAME", nargs="?", help="a top-level function or class, as in gae")
    parser.add_argument("--from", dest="source", metavar="FILE", help="where NAME is right")
    parser.add_argument("--main", metavar="PARENT", help="merge what has changed in this file into its descendants")
    since = "the commit since which PARENT has changed (HEAD)"
    parser.add_argument("--base", metavar="REV", default="HEAD", help=since)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file would change")
    args = parser.parse(argv)
    if args.main and not (args.name or args.source):
        return merge_down(find_path(args.main), args.base, args.check)
    refuse(args.main or not (args.name and args.source), "solo sync needs either NAME --from FILE or --main PARENT")
    return copy_definition(args.name, find_path(args.source), args.check)
