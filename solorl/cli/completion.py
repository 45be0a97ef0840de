"""`solo completion`: a script with which a shell completes the words of `solo`.

The script asks `solo completion words WORD...` at each press of the key, so that it knows all there is at that moment:
verbs, flags, algorithms, .py files and run folders.
"""

import contextlib
import glob
import io
import re
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path

from solorl.args.arguments import RunArgs
from solorl.catalog.header import fields_of, find_path, parse_source, scripts
from solorl.cli import Parser, all_verbs
from solorl.cli.runs import STATUSES, is_run
from solorl.errors import UsageError, hint
from solorl.scripts import script_paths

SHELLS = ("bash", "zsh", "fish")  # each with its script next to this file
ABOUT = """Print a script with which the shell completes verbs, algorithms, their flags and run folders:

  eval "$(solo completion bash)"      in ~/.bashrc
  eval "$(solo completion zsh)"       in ~/.zshrc, below compinit
  solo completion fish | source       in ~/.config/fish/config.fish"""


# ---------------------------------------------------------------------- what there is
def algorithms(start: str) -> list[str]:
    """The algorithms, and the .py files and folders here."""
    files = [path for path in beginning(start) if path.endswith(".py") or (start and path.endswith("/"))]
    return [*script_paths(), *files]


def folders(start: str) -> list[str]:
    """The run folders whose path begins with `start`, those below runs where it is empty, and folders on the way."""
    paths = [path for path in beginning(start or "runs/") if path.endswith("/")]
    return [path.rstrip("/") if is_run(Path(path)) else path for path in paths]


def beginning(start: str) -> list[str]:
    """The files and folders, these with a slash at their end, whose path begins with `start`."""
    paths = sorted(glob.glob(glob.escape(start) + "*"))  # noqa: PTH207, for Path.glob would drop a leading ./
    return [f"{path}/" if Path(path).is_dir() else path for path in paths]


def flags_of_script(name: str) -> list[str]:
    """The flags of an algorithm or a .py file: those of its class Args and, where that is a RunArgs, of every run."""
    nodes = fields_of(parse_source(find_path(name)))
    kinds = {field.name: field.type in (bool, "bool") for field in fields(RunArgs)}
    kinds |= {field: getattr(node.annotation, "id", "") == "bool" for field, node in nodes.items()}
    flags = [f"--{name.replace('_', '-')}" for name in kinds]
    return [*flags, *(f"--no-{name.replace('_', '-')}" for name, is_switch in kinds.items() if is_switch), "--help"]


def flags_of_verb(verb: str) -> list[str]:
    """The flags that a verb's own help names."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        import_module(all_verbs()[verb][0]).main(["--help"])
    return sorted(set(re.findall(r"^ +(?:-\w, )?(--[a-z][a-z-]*)", text.getvalue(), flags=re.M)) | {"--help"})


def _property(name: str) -> Callable[[str], list[str]]:
    return lambda start: sorted({getattr(script, name) for script in scripts()})


# What may follow a verb and a flag: beginning of the word -> words. Where nothing fits, a shell shows files.
AFTER_VERB: dict[str, Callable[[str], list[str]]] = {
    **dict.fromkeys(("train", "copy", "diff", "check", "bench", "tune"), algorithms),
    **dict.fromkeys(("play", "record", "push", "export", "report", "plot"), folders),
    "runs": lambda start: ["delete", *folders(start)],
    "completion": lambda start: [*SHELLS],
    "dataset": lambda start: ["info", "export", "import", *beginning(start)],
}
TAKE_ONE = ("train", "play", "record", "push", "export", "tune", "completion")  # verbs that one name follows
AFTER_FLAG: dict[str, Callable[[str], list[str]]] = {
    "--from": algorithms,
    "--resume": folders,
    "--script": lambda start: list(script_paths()),
    "--status": lambda start: [*STATUSES],
    **{f"--{name}": _property(name) for name in ("family", "framework", "observations", "actions")},
}


def words(typed: Sequence[str]) -> list[str]:
    """What may stand for the last of the words typed after `solo`, which may be empty."""
    *before, last = typed or [""]
    if not before:
        found = list(all_verbs())
    elif before[-1] in AFTER_FLAG:
        found = AFTER_FLAG[before[-1]](last)
    elif before[0] not in all_verbs():
        found = []
    elif last.startswith("-"):
        found = flags(before)
    elif before[0] in TAKE_ONE and len(before) > 1:
        found = []
    else:
        found = AFTER_VERB.get(before[0], lambda start: [])(last)
    return [word for word in found if word.startswith(last)]


def flags(before: Sequence[str]) -> list[str]:
    """The flags that may follow these words: of the script after `train` and after `--`, else those of the verb."""
    try:
        if before[0] in ("train", "bench", "tune") and len(before) > 1 and (before[0] == "train" or "--" in before):
            return flags_of_script(before[1]) + (["--nproc"] if before[0] == "train" else [])
        return flags_of_verb(before[0])
    except (UsageError, ImportError):
        return []


def main(argv: Sequence[str]) -> int:
    """Print the script of a shell, or the words that complete what is typed; UsageError for an unknown shell."""
    if argv[:1] == ["words"]:
        print("\n".join(words(argv[1:])))
        return 0
    parser = Parser("completion", ABOUT)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("shell", metavar="bash|zsh|fish", help="the shell")
    args = parser.parse(argv)
    if args.shell not in SHELLS:
        others = hint(args.shell, SHELLS, "there are")
        raise UsageError(f"solo completion does not know the shell {args.shell}{others}")
    print(Path(__file__).with_name(f"completion.{args.shell}").read_text(), end="")
    return 0
