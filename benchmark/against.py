"""Compares the results of a suite with those that it had at an earlier commit, whose methods are called `old`. A
run that was not made again counts as old only.

python benchmark/against.py REV NAME [what `solo report` takes, as --out report]
"""

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

from solorl.errors import UsageError
from solorl.files import git
from solorl.lab.results.result import read, write

ROOT = Path(__file__).resolve().parent.parent


def earlier(root: Path, rev: str, name: str, folder: Path) -> None:
    """Write the results of a suite at a commit into a folder, as variants `old`. Raises UsageError where there are
    none."""
    with tarfile.open(fileobj=io.BytesIO(git(root, "archive", rev, f"benchmark/results/{name}"))) as archive:
        archive.extractall(folder / "then", filter="data")
    for path in sorted((folder / "then").rglob("*.json.gz")):
        one = read(path)
        write(replace(one, variant=f"old {one.variant}".strip()), folder / "old")


def main() -> int:
    """Report both; the exit code of `solo report`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rev", metavar="REV", help="a commit")
    parser.add_argument("name", metavar="NAME", help="a suite, which has a folder in benchmark/results")
    args, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as place:
        try:
            earlier(ROOT, args.rev, args.name, Path(place))
        except UsageError as error:
            parser.error(str(error))
        now = str(ROOT / "benchmark/results" / args.name)
        return subprocess.run([sys.executable, "-m", "solorl.cli", "report", f"{place}/old", now, *words]).returncode


if __name__ == "__main__":
    sys.exit(main())
