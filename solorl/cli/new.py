"""`solo new`: the first minute of a variant."""

import keyword
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from solorl.catalog import header
from solorl.catalog.header import Script, find_path, parse_header, parse_source
from solorl.cli import Parser
from solorl.errors import UsageError
from solorl.files import shown, write
from solorl.scripts import KEYS, PAGES, algorithms_folder, as_typed, in_catalogue, in_checkout, script_paths


def check_name(what: str, name: str) -> None:
    """Raise UsageError unless `name` is good for a Python file or folder: lower case, digits and underscores."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(f"{name!r} cannot name a {what}: use a-z, 0-9 and _, a letter first, and no word of Python")


def run_line(run: str, name: str) -> str:
    """The header's command for the new file: the old flags after the new name."""
    words = shlex.split(run)
    flags = words[3:] if words[:2] == ["solo", "train"] else []
    return shlex.join(["solo", "train", name, *flags])


def in_own_checkout() -> bool:
    """Whether the current folder lies in the checkout from which the package runs."""
    return in_checkout() and Path.cwd().is_relative_to(algorithms_folder().parent)


def destination(name: str, family: str) -> tuple[Path, Path]:
    """The file, within the checkout in the family's folder, elsewhere in the current one; and its page, which only the
    checkout has. UsageError if the name is taken."""
    taken = script_paths()
    if name in taken:
        raise UsageError(f"there is an algorithm {name} already: {shown(taken[name])}")
    path = algorithms_folder() / family / f"{name}.py" if in_own_checkout() else Path.cwd() / f"{name}.py"
    page = algorithms_folder().parent / PAGES / f"{name}.md"
    for taken_path in filter(Path.exists, (path, page)[: 1 + in_own_checkout()]):
        raise UsageError(f"{shown(taken_path)} exists already")
    return path, page


def family_of(source: Script) -> str:
    """The family of a file; for a user's own file that of the algorithm it comes from."""
    paths = {} if in_catalogue(source.path) else script_paths()
    return next((paths[name].parent.name for name in header.origins(source.path) if name in paths), source.family)


def page_of(source: Script, path: Path, run: str) -> str:
    """The page of a new file: headings, the command, links to the file, its family and the page of what it comes
    from."""
    theirs = re.split(r"[\s:;,]", source.fields["Details"])[0]
    known = (algorithms_folder().parent / theirs).is_file() and theirs.startswith(f"{PAGES}/")
    origin = f"[`{source.path.name}`]({Path(theirs).name})" if known else f"`{source.path.name}`"
    file, family = f"algorithms/{path.parent.name}/{path.name}", f"algorithms/{path.parent.name}/README.md"
    parts = [
        f"# {path.stem}",
        f"From {origin}: nothing yet.",
        f"```bash\n{run}\n```",
        f"File: [`{file}`](../../{file}) of [its family](../../{family}).",
        f"## When to take it\n\nAs {origin}.",
        f"## Implementation details\n\nIn addition to those of {origin}: none.",
        "## Differences from CleanRL\n\nCleanRL has no such file.",
        "## Results\n\nNo run has been made yet.",
        f"## Logged metrics\n\n[Those of every file](../../{family}#logged-metrics).",
    ]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str]) -> int:
    """Create a variant; UsageError for a bad or taken name and for a source without a header."""
    parser = Parser("new", "Start a variant from an algorithm: a file that runs and differs in its header only.")
    parser.add_argument("name", metavar="NAME", help="of the new algorithm, as in ppo_mine")
    parser.add_argument("--from", dest="source", metavar="FILE", required=True, help="what to start from")
    parser.add_argument("--family", metavar="F", help="its folder (default: that of FILE)")
    args = parser.parse(argv)
    name, ours = args.name.removesuffix(".py"), in_own_checkout()
    check_name("file", name)
    source = parse_header(find_path(args.source))
    family = args.family or family_of(source)
    if args.family or ours:
        check_name("family", family)
    if missing := [key for key in KEYS if key not in source.fields]:
        raise UsageError(f"{shown(source.path)} has no line {missing[0]} in its header")
    if name in sys.stdlib_module_names or name in header.top_modules(parse_source(source.path)):
        raise UsageError(f"a file {name}.py would hide the module {name} from `import {name}`")
    path, page = destination(name, family)
    typed = name if ours else path.name
    values = {"Run": run_line(source.run, typed), "Differs": f"from {source.path.name}: nothing yet"}
    if ours:
        values["Details"] = f"{PAGES}/{name}.md"
        path.parent.mkdir(exist_ok=True)
        write(page, page_of(source, path, values["Run"]).encode())
    write(path, header.with_header(header.read_source(source.path), values | {"Twin": "", "Copy of": ""}).encode())
    said = f"how it differs from {source.path.name}, and in its title what it is"
    of_page = f"\n  say in its page, {shown(page)}, when to take it, and its implementation details" if ours else ""
    print(f"created {shown(path)} from {source.path.name}. Next:\n  edit it; say in its line `Differs` {said}{of_page}")
    budget = f"\n  solo check --set-budget {name}     once the difference is what you want" if ours else ""
    print(f"  solo train {typed}\n  solo diff {as_typed(source.path)} {typed}{budget}")
    print(f"  solo check {'' if ours else typed:18} before you share it")
    return 0
