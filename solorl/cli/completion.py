"""Print a script with which the shell completes verbs, algorithms, their flags and files:

eval "$(solo completion bash)"      in ~/.bashrc
eval "$(solo completion zsh)"       in ~/.zshrc, below compinit
solo completion fish | source       in ~/.config/fish/config.fish
"""

import argparse
import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import argcomplete

from solorl.args.command_line import parser_of
from solorl.catalog.header import find_path
from solorl.cli import Parser, all_verbs
from solorl.errors import UsageError, hint
from solorl.scripts import script_paths

SHELLS = ("bash", "zsh", "fish")
# What of a verb is the name of an algorithm or a .py file. Where nothing else is known, files and folders are offered.
ALGORITHMS = {"copy": "name", "diff": "ab", "new": "source", "bench": "what", "tune": "script", "check": "files"}


def answer(parser: argparse.ArgumentParser) -> None:
    """Tell the shell that asks which words may follow, and end."""
    verb = parser.prog.rpartition(" ")[2]
    for action in parser._actions:
        if action.dest == "script" or (action.dest and action.dest in ALGORITHMS.get(verb, "")):
            action.completer = algorithms  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options=False)


def algorithms(prefix: str, **_: Any) -> list[str]:
    """The algorithms, and the .py files and folders here."""
    return [*script_paths(), *argcomplete.FilesCompleter(("py",))(prefix)]


def complete() -> None:
    """Answer the shell that asks, as far as the verb is known; its own `main` does the rest (see `Parser.parse`). The
    script calls `solo` with _ARGCOMPLETE at each press of the key."""
    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    words = f"{line}|".split()[:-1]  # those that are complete
    verb = words[1] if len(words) > 1 else ""
    if verb not in all_verbs():
        first = argparse.ArgumentParser(prog="solo")
        first.add_argument("verb", choices=list(all_verbs()))
        answer(first)
    os.environ["_ARGCOMPLETE"] = "2"  # the words of the verb begin there
    if verb == "train":
        from solorl.cli.train import args_of

        args_type = args_of(find_path(words[2])) if len(words) > 2 else None
        parser = parser_of(args_type) if args_type else Parser("train", "")
        parser.add_argument("script")
        parser.add_argument("--nproc")
        answer(parser)
    import_module(all_verbs()[verb][0]).main([])


def main(argv: Sequence[str]) -> int:
    """Print the script of a shell; UsageError for an unknown shell."""
    parser = Parser("completion", __doc__ or "")
    parser.add_argument("shell", metavar="bash|zsh|fish", help="the shell")
    args = parser.parse(argv)
    if args.shell not in SHELLS:
        others = hint(args.shell, SHELLS, "there are")
        raise UsageError(f"solo completion does not know the shell {args.shell}{others}")
    print(argcomplete.shellcode(["solo"], shell=args.shell))
    return 0
