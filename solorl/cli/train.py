"""`solo train`: runs an algorithm file as `python FILE FLAGS` would."""

from collections.abc import Sequence

from solorl.catalog.header import find_path
from solorl.errors import UsageError
from solorl.run.load import run_script

HELP = """usage: solo train NAME_OR_PATH [flags...]

Runs the file of an algorithm, as `python FILE flags...` does. All flags go to the file:

  solo train ppo --env-id CartPole-v1 --seed 2
  solo train ppo --help          the flags of ppo
  solo train my_ppo.py           any file of your own"""


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
