"""Publish a run folder on the Hugging Face hub, as one commit: models, script, arguments, metrics, learning
curve, video and a page with the scores of its evaluations. It needs an account: `hf auth login`, or HF_TOKEN. The
published config.json leaves out the command and paths of your machine. A run without a video is played for one
episode.
"""

from collections.abc import Sequence
from pathlib import Path

from solorl.cli import Parser


def main(argv: Sequence[str]) -> int:
    """Push a run folder; UsageError where that cannot be done, and then the hub has no file of it."""
    parser = Parser("push", __doc__ or "")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a folder below runs/")
    repo = "the repository, made if it is not there (default: your own, named after the run)"
    parser.add_argument("repo", metavar="USER/NAME", nargs="?", default="", help=repo)
    parser.add_argument("--private", action="store_true", help="make a repository that only you see")
    parser.add_argument("--revision", metavar="BRANCH", help="commit to this branch, made if it is not there")
    args = parser.parse(argv)
    from solorl.lab.share.hub import push  # here: it loads the numerical libraries

    print(f"pushed to {push(args.run_dir, args.repo, args.private, args.revision)}")
    return 0
