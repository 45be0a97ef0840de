"""Moves the results of the queue to the folders of their families' suites, and says where each went.

python benchmark/collect.py [--from benchmark/results/queue] [--results benchmark/results] [--replace] [--dry-run]

A result belongs where the results of its script on its environment are: those of its variant and its budget before
others. A script that is new on an environment goes by KINDS, else where its other results are, else where those of its
parent or twin are. A file that is there already, with the same contents, is only removed from the queue's folder. Of a
run that was repeated, with other contents, the old result stays and the new one waits, unless --replace is given.
"""

import argparse
import re
import shutil
import sys
from pathlib import Path

from solorl.catalog.header import parse_header, script_paths
from solorl.lab.results.result import Result, read

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark/results"
# Folders of single studies, where nothing new belongs.
CLOSED = ("queue", "stopped", "tune", "halfcheetah_search", "minatar_looks", "qdagger", "muzero_search")
OWN = ("goals", "streaming", "evolution", "imitation", "language", "planning")  # families with a folder of that name
# Environments that have a folder of their own, whatever the script.
KINDS = {
    r"NoFrameskip-v\d$|^(Pong|Breakout|BeamRider)-v5$": "atari",
    r"-MinAtar$": "minatar",
    r"^games/|^atari/|^Starpilot": "games",
    r"^team/": "teams",
    r"^lbf/": "foraging",
}


def home(one: Result, known: list[tuple[str, Result]]) -> str | None:
    """The folder of a result; `known`: the results that have one, with it. None where nothing tells."""
    paths, names = script_paths(), [one.script]
    if one.script in paths and (family := paths[one.script].parent.name) in OWN:
        return family
    for name in names:  # the script, then what its header names, the nearest first
        if found := _nearest(one, [(folder, run) for folder, run in known if run.script == name]):
            return found
        if kind := next((folder for pattern, folder in KINDS.items() if re.search(pattern, one.env_id)), None):
            return kind
        if found := _nearest(one, [(folder, run) for folder, run in known if run.script == name], anywhere=True):
            return found
        header = parse_header(paths[name]) if name in paths else None
        near = [*header.parents, header.twin, *header.relatives] if header else []
        names += [stem for stem in (Path(each).stem for each in near if each) if stem not in names]
    return None


def _nearest(one: Result, known: list[tuple[str, Result]], anywhere: bool = False) -> str | None:
    """The folder with most of the results that are like this one, on its environment or `anywhere`."""
    counts: dict[str, list[int]] = {}
    for folder, run in known:
        if anywhere or run.env_id == one.env_id:
            budget = run.args.get("total_timesteps") == one.args.get("total_timesteps")
            like = (budget and run.variant == one.variant, budget, True)
            counts[folder] = [a + b for a, b in zip(counts.get(folder, (0, 0, 0)), like, strict=True)]
    return max(counts, key=lambda folder: counts[folder]) if counts else None


def collect(source: Path, results: Path, dry: bool = False, replace: bool = False) -> int:
    """Move all that is in `source`; how many files stay: nothing tells where they belong, or another is there, which
    `replace` replaces."""
    folders = [path for path in results.iterdir() if path.is_dir() and path.name not in CLOSED and path != source]
    known = [(folder.name, read(path)) for folder in folders for path in folder.glob("*.json.gz")]
    left = 0
    for path in sorted(source.glob("*.json.gz")):
        folder = home(read(path), known)
        target = results / str(folder) / path.name
        other = folder is not None and target.exists() and target.read_bytes() != path.read_bytes()
        if folder is None or (other and not replace):
            left += 1
            why = f"another is in {folder} (--replace replaces it)" if other else "nothing tells where it belongs"
            print(f"{path.name} stays: {why}")
            continue
        print(f"{path.name} -> {folder}{f', replaced that of {read(target).started[:10]}' if other else ''}")
        if not dry:
            target.parent.mkdir(exist_ok=True)
            shutil.move(path, target)
    return left


def main() -> int:
    """Move them; 1 where some stay."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--from", dest="source", metavar="DIR", type=Path, help="default benchmark/results/queue")
    parser.add_argument("--results", metavar="DIR", type=Path, default=RESULTS, help="the folder of the folders")
    parser.add_argument("--replace", action="store_true", help="results of repeated runs replace the old ones")
    parser.add_argument("--dry-run", action="store_true", help="only say where each would go")
    args = parser.parse_args()
    return int(bool(collect(args.source or args.results / "queue", args.results, args.dry_run, args.replace)))


if __name__ == "__main__":
    sys.exit(main())
