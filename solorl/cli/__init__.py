"""The command `solo`: finds the verb and calls it.

A verb is one line in VERBS and a module with `main(argv)`; a module must not bear the name of a builtin, which it would
hide in this file once it is imported.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from solorl import __version__
from solorl.errors import UsageError, hint, quit_with, refuse
from solorl.scripts import PACKAGE, in_checkout

ASKED = "_ARGCOMPLETE"  # set where a shell asks which words may follow
# Verb -> its module (imported only when it is called) and its line in `solo --help`.
VERBS = {
    "list": ("solorl.cli.listing", "show the algorithms"),
    "train": ("solorl.cli.train", "run an algorithm:  solo train ppo --env-id CartPole-v1"),
    "play": ("solorl.cli.play", "watch and score a trained agent:  solo play RUN_DIR --video"),
    "record": ("solorl.cli.record", "transitions of a policy as a data set:  solo record RUN_DIR --steps 200000"),
    "dataset": ("solorl.cli.dataset", "look at data sets, to and from Minari:  solo dataset info DIR"),
    "push": ("solorl.cli.push", "publish a run on the Hugging Face hub:  solo push RUN_DIR USER/NAME"),
    "pull": ("solorl.cli.pull", "fetch a published run:  solo pull USER/NAME"),
    "export": ("solorl.cli.export", "a trained policy as ONNX or StableHLO:  solo export RUN_DIR policy.onnx"),
    "copy": ("solorl.cli.copy", "take a file home:  solo copy ppo my_ppo.py"),
    "diff": ("solorl.cli.diff", "what two files differ in:  solo diff ppo my_ppo.py"),
    "new": ("solorl.cli.new", "start a variant:  solo new ppo_mine --from ppo"),
    "runs": ("solorl.cli.runs", "list and delete run folders:  solo runs --status failed"),
    "bench": ("solorl.cli.bench", "many runs at once:  solo bench ppo --env-ids CartPole-v1 --num-seeds 10"),
    "work": ("solorl.cli.work", "a worker of a study, started anywhere:  solo work STORAGE"),
    "tune": ("solorl.cli.tune", "search hyper-parameters:  solo tune ppo --env-ids CartPole-v1 --space FILE.toml"),
    "report": ("solorl.cli.report", "tables, curves and verdicts from runs:  solo report runs/"),
    "dash": ("solorl.cli.dash", "watch trainings in the browser:  solo dash runs/"),
    "repro": ("solorl.cli.repro", "does a published number still hold:  solo repro ppo --env-ids CartPole-v1"),
    "doctor": ("solorl.cli.doctor", "what looks wrong in a training, and what to try:  solo doctor RUN_DIR"),
    "plot": ("solorl.cli.plot", "a picture of trainings, also while they run:  solo plot RUN_DIR"),
    "completion": ("solorl.cli.completion", 'completion of your shell:  eval "$(solo completion bash)"'),
}
# Verbs for work on the project itself, in its checkout.
OURS = {
    "check": ("tools.check", "check algorithm files against the rules of the project"),
    "sync": ("tools.sync", "repair drift between siblings:  solo sync gae --from ppo"),
}


def all_verbs() -> dict[str, tuple[str, str]]:
    """The verbs that there are here."""
    return VERBS | OURS if in_checkout() else VERBS


say = partial(print, flush=True)  # a line that also the log of a scheduler has at once


def at_least(least: int, most: int = sys.maxsize, kind: type = int) -> Callable[[str], Any]:
    """The type of a flag that takes numbers of a kind from `least` to `most`."""

    def read(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most:
            end = f" and at most {most:,}" if most < sys.maxsize else ""
            raise argparse.ArgumentTypeError(f"must be at least {least}{end}, not {value:,}")
        return value

    read.__name__ = kind.__name__
    return read


class Parser(argparse.ArgumentParser):
    """argparse that says what is wrong in one sentence (UsageError) and suggests the nearest flag. What `about` says
    after its first paragraph stands below the flags, as it is."""

    def __init__(self, verb: str, about: str) -> None:
        first, _, more = about.partition("\n\n")
        form = argparse.RawDescriptionHelpFormatter if more else argparse.HelpFormatter
        super().__init__(f"solo {verb}", None, first, more or None, formatter_class=form, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of printing the usage and leaving."""
        said = re.sub(r"^argument (\S+): must", r"\1 must", message)
        raise UsageError(f"{self.prog}: {said}; see `{self.prog} --help`")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of `argv`; UsageError for a flag or an argument that does not exist."""
        if ASKED in os.environ:
            import_module("solorl.cli.completion").answer(self)
        args, unknown = self.parse_known_intermixed_args(argv)  # flags may stand between names
        if not unknown:
            return args
        flag = unknown[0].split("=")[0]
        refuse(not flag.startswith("-"), f"{self.prog} takes no further argument {flag}; see `{self.prog} --help`")
        flags = [option for option in self._option_string_actions if option.startswith("--")]
        raise UsageError(f"{self.prog} has no flag {flag}{hint(flag, flags, 'it has')}")


def usage() -> str:
    """The text of `solo --help`."""
    verbs = "\n".join(f"  {verb:10} {line}" for verb, (_, line) in all_verbs().items())
    return f"solo: one file per algorithm of deep reinforcement learning\n\n{verbs}\n\n`solo VERB --help` says more."


def dispatch(argv: Sequence[str]) -> int:
    """Call the verb `argv[0]` with the rest; UsageError if there is no such verb."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    verb, rest = argv[0], list(argv[1:])
    if verb in ("-V", "--version"):
        print(f"solorl {__version__}")
        return 0
    verbs = all_verbs()
    if verb in OURS and verb not in verbs:
        raise UsageError(f"solo {verb} is for a checkout of SoloRL, installed with `pip install -e .`")
    if verb not in verbs:
        kind = "flag" if verb.startswith("-") else "verb"
        raise UsageError(f"solo has no {kind} {verb}{hint(verb, verbs, 'it has')}")
    if verb in OURS:
        sys.path.insert(0, str(PACKAGE.parent))
    return int(import_module(verbs[verb][0]).main(rest) or 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `solo` and return the exit code; bad input is one sentence on standard error and exit code 2."""
    try:
        if ASKED in os.environ:
            import_module("solorl.cli.completion").complete()
        return dispatch(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        quit_with(error)
    except KeyboardInterrupt:  # before the verb listens for it, as while it is imported
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:  # `solo list | head`: the reader has left; write what is still buffered nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
