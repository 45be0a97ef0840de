"""`solo train`: runs an algorithm file as `python FILE FLAGS` would."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from solorl.catalog.header import find_path
from solorl.errors import UsageError, missing_extra

HELP = """usage: solo train NAME_OR_PATH [flags...]

Runs the file of an algorithm, as `python FILE flags...` does. All flags go to the file:

  solo train ppo --env-id CartPole-v1 --seed 2
  solo train ppo --help          the flags of ppo
  solo train my_ppo.py           any file of your own"""


def run_script(path: Path, flags: Sequence[str], neighbours: bool = True) -> None:
    """Run a file in this process as `python path flags...` would; its exceptions and SystemExit pass through. Without
    `neighbours` it does not find the modules in its folder. UsageError if it imports a module that is missing and that
    one of our extras brings."""
    argv, search = sys.argv, list(sys.path)
    sys.argv = [str(path), *flags]
    if neighbours:
        sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except ModuleNotFoundError as error:
        if sentence := missing_extra(path.name, error):
            raise UsageError(sentence) from error
        raise
    finally:
        sys.argv, sys.path[:] = argv, search


def main(argv: Sequence[str]) -> int:
    """Run the algorithm `argv[0]`; UsageError if there is no such name or file."""
    if not argv:
        raise UsageError("solo train needs an algorithm, such as `solo train ppo`; `solo list` shows all")
    if argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if argv[0].startswith("-"):
        raise UsageError("solo train: the algorithm comes first, then its flags, as in `solo train ppo --seed 2`")
    run_script(find_path(argv[0]), argv[1:])
    return 0
