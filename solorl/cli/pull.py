"""Fetch a run that `solo push` has published into a run folder, for `solo play` and solorl.load. The folder has
the files of one commit, named in its hub.json, or is not made at all. The script in it is the code of somebody else: it
is executed only if it is equal to the algorithm of this name in your installation, any other only with
--trust-script.
"""

from collections.abc import Sequence
from pathlib import Path

from solorl.cli import Parser
from solorl.errors import UsageError
from solorl.files import shown


def main(argv: Sequence[str]) -> int:
    """Pull a run; UsageError where that cannot be done, and then there is no folder."""
    parser = Parser("pull", __doc__ or "")
    parser.add_argument("repo", metavar="USER/NAME", help="a repository of the hub")
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path, help="the folder to make (default: runs/NAME)")
    parser.add_argument("--revision", metavar="REV", help="a branch, a tag or a commit (default: the newest commit)")
    parser.add_argument("--max-size", metavar="MB", type=float, default=2000, help="size of all files (default 2000)")
    args = parser.parse(argv)
    if not 0 < args.max_size < float("inf"):
        raise UsageError(f"solo pull: --max-size must be a positive number of MB, not {args.max_size:g}")
    from solorl.lab.share.hub import PREFIX, pull  # here: it loads the numerical libraries

    repo = args.repo.removeprefix(PREFIX)
    folder = args.folder or Path("runs", repo.rpartition("/")[2])
    commit = pull(repo, folder, args.revision, args.max_size)
    print(f"{shown(folder)}: {repo} at commit {commit}")
    return 0
