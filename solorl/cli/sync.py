"""`solo sync`: one definition, copied into every sibling that has it."""

import ast
from collections.abc import Sequence
from pathlib import Path

from solorl.catalog.header import find_path, parse_header, parse_source
from solorl.catalog.rules import EXEMPT, Definition, definitions, siblings
from solorl.cli import Parser
from solorl.errors import UsageError, did_you_mean
from solorl.files import shown, write


def span(node: Definition) -> slice:
    """The lines of a definition, its decorators included, the comments above it not."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return slice(first - 1, node.end_lineno)


def body_of(path: Path, name: str) -> list[bytes]:
    """The lines of the top-level definition `name`; UsageError with the nearest name if the file has none."""
    found = definitions(parse_source(path))
    if name not in found:
        hint = did_you_mean(name, found) or f"; it has {', '.join(found) or 'none'}"
        raise UsageError(f"{shown(path)} has no function or class {name}{hint}")
    return path.read_bytes().splitlines(keepends=True)[span(found[name])]


def synced(path: Path, name: str, body: Sequence[bytes]) -> bytes | None:
    """The contents of `path` with its definition `name` replaced by `body`; None if it has no such definition.

    All other bytes stay as they are, and the file keeps its own line ends.
    """
    node = definitions(parse_source(path)).get(name)
    if node is None:
        return None
    lines = path.read_bytes().splitlines(keepends=True)
    end = b"\r\n" if lines[0].endswith(b"\r\n") else b"\n"
    new = [line.rstrip(b"\r\n") + end for line in body]
    if not lines[span(node)][-1].endswith((b"\r", b"\n")):  # the file ends here, without a line end
        new[-1] = new[-1].rstrip(b"\r\n")
    lines[span(node)] = new
    return b"".join(lines)


def main(argv: Sequence[str]) -> int:
    """Copy a definition into the siblings; with --check only say what would change and return 1 if anything would."""
    parser = Parser("sync", "Copy a function or class from one file into every sibling of its family that has it.")
    parser.add_argument("name", metavar="NAME", help="a top-level function or class, as in gae")
    parser.add_argument("--from", dest="source", metavar="FILE", required=True, help="where it is right")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a sibling differs")
    args = parser.parse(argv)
    source = find_path(args.source)
    body = body_of(source, args.name)
    if args.name in EXEMPT:
        raise UsageError(f"solo sync leaves {', '.join(EXEMPT)} alone: they are meant to differ between siblings")
    new = {path: synced(path, args.name, body) for path in siblings(parse_header(source))}
    having = {path: data for path, data in new.items() if data is not None}
    changed = {path: data for path, data in having.items() if data != path.read_bytes()}
    for path, data in changed.items():
        ast.parse(data)
        if not args.check:
            write(path, data)
        print(f"{'differs' if args.check else 'synced'}: {args.name} in {shown(path)}")
    if not changed:
        print(f"{args.name} is equal in all {len(having)} siblings that have it")
    return int(args.check and bool(changed))
