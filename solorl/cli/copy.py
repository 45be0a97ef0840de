"""`solo copy`: an algorithm file to take home, with or without the library inside it."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from solorl import __version__
from solorl.catalog.header import find_path, parse_header, with_header
from solorl.catalog.standalone import standalone
from solorl.cli import Parser
from solorl.errors import UsageError, refuse
from solorl.files import expanded, shown, write


def target(source: Path, to: str | None) -> Path:
    """Where the copy goes: ./NAME.py, below TO if that is a folder, else the file TO; UsageError for other endings."""
    path = expanded(to) if to else Path.cwd()
    if path.is_dir() or (to or "").endswith("/"):
        return path / source.name
    refuse(path.suffix != ".py", f"solo copy writes Python: {path} must end in .py or be a folder that exists")
    return path


def copied(source: Path, data: bytes) -> bytes:
    """The bytes of a copy, with a line in its header that says what it is a copy of; without a header as they are."""
    try:
        parse_header(source)
    except UsageError:
        return data
    return with_header(data.decode(), {"Copy of": f"{source.name} (SoloRL {__version__})"}).encode()


def main(argv: Sequence[str]) -> int:
    """Copy one file; UsageError for an unknown name and for a file that exists already."""
    parser = Parser("copy", "Copy the file of an algorithm, to read it and to change it.")
    parser.add_argument("name", metavar="NAME", help="an algorithm, or a path to a .py file")
    parser.add_argument("to", metavar="TO", nargs="?", help="file or folder (default ./NAME.py)")
    parser.add_argument("--standalone", action="store_true", help="a file that does not need SoloRL")
    parser.add_argument("--force", action="store_true", help="replace a file that exists")
    args = parser.parse(argv)
    source = find_path(args.name)
    path = target(source, args.to)
    if path.exists():
        if path.samefile(source):
            raise UsageError(f"solo copy: {shown(path)} is {args.name} itself; name another place for the copy")
        refuse(not args.force, f"solo copy: {shown(path)} exists; --force replaces it")
    data = standalone(source, path.name).encode() if args.standalone else source.read_bytes()
    write(path, copied(source, data))
    print(f"copied {source.stem} to {shown(path)}; run it: python {shlex.quote(shown(path))}")
    return 0
