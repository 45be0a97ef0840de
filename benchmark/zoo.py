"""Puts one trained model for each algorithm file into zoo/, for `solo play zoo/NAME`.

python benchmark/zoo.py --runs runs/bench/queue [--zoo zoo]

The rule: of the most telling row of the file in docs/proof.md, once it has five seeds, the run with the score nearest
to the median of the row, the smaller seed first, of those whose folders are below --runs or which the zoo has already.
Of its folder stay the script, config.json without paths, and the weights that act: parts of model.safetensors without
which every action of an episode is the same are left out. At most 300 kB each, 15 MB in all.
"""

import argparse
import functools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import proof
from safetensors import safe_open
from safetensors.numpy import save_file

import solorl
from solorl.compute.device import CONFIRM, env_seed
from solorl.errors import UsageError
from solorl.files import read_json, sha256
from solorl.lab.results import comparison as cmp
from solorl.lab.results.run_folder import LOCAL
from solorl.run.evaluation import open_games, play_games

ROOT = Path(__file__).resolve().parent.parent
MODEL = "model.safetensors"
MOST, MOST_IN_ALL = 300_000, 15_000_000  # bytes
EPISODES = 1  # that are played to see which parts act
KEPT = ("format", "script", "script_sha256", "args", "git", "python", "versions", "started")


def folders(places: Iterable[Path]) -> dict[tuple[str, str, int, str], Path]:
    """Script, environment, seed and beginning of a run -> its folder."""
    found = {}
    for path in (path for place in places for path in sorted(place.rglob("config.json"))):
        config = read_json(path)
        if isinstance(args := config.get("args"), dict) and (path.parent / MODEL).is_file():
            key = (Path(str(config["script"])).stem, args["env_id"], args["seed"], config["started"])
            found[key] = path.parent
    return found


def chosen(rows: Iterable[proof.Row], found: Mapping[tuple[str, str, int, str], Path]) -> list[tuple[Any, Path]]:
    """The run of each script that belongs into the zoo, and its folder."""
    by_script: dict[str, list[proof.Row]] = {}
    for row in rows:
        by_script.setdefault(row.script, []).append(row)
    best = []
    for row in (proof.telling(mine)[0] for mine in by_script.values()):
        scored = [(score, run) for run in row.runs if (score := cmp.score(run, "eval")) is not None]
        if row.is_full and len(scored) >= proof.SEEDS:
            middle = np.median([score for score, _ in scored])
            for _, run in sorted(scored, key=lambda one: (abs(one[0] - middle), one[1].seed)):
                if folder := found.get((run.script, run.env_id, run.seed, run.started)):
                    best.append((run, folder))
                    break
    return best


def played(run_dir: Path) -> list[bytes]:
    """All actions of an episode, as bytes."""
    policy, seen = solorl.load(run_dir, trust_script=True, device="cpu"), []

    @functools.wraps(policy.policy)
    def act(*inputs: Any, **named: Any) -> Any:
        result = policy.policy(*inputs, **named)
        action = result[0] if isinstance(result, tuple) and len(inputs) > 1 else result
        parts = action.values() if isinstance(action, dict) else action if isinstance(action, tuple) else [action]
        seen.extend(np.asarray(part).tobytes() for part in parts)
        return result

    seeds = [env_seed(policy.args.seed, CONFIRM, i) for i in range(EPISODES)]
    play_games(open_games(policy.maker, policy.env_id, seeds), act, seeds)
    return seen


def write_entry(run_dir: Path, entry: Path) -> list[str]:
    """Make an entry of a run folder; the names of the parts that were left out."""
    config, entry_args = read_json(run_dir / "config.json"), {}
    entry.mkdir(parents=True)
    shutil.copy(run_dir / config["script"], entry)
    entry_args = {name: value for name, value in config["args"].items() if name not in LOCAL}
    kept = {name: config[name] for name in KEPT if name in config} | {"args": entry_args}
    (entry / "config.json").write_text(json.dumps(kept, indent=1) + "\n")
    with safe_open(run_dir / MODEL, "numpy") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    shutil.copy(run_dir / MODEL, entry)
    actions, without = played(entry), list[str]()
    for part in sorted({name.partition(".")[0] for name in tensors}):
        rest = {name: value for name, value in tensors.items() if not name.startswith(f"{part}.")}
        if not rest:
            continue
        save_file(rest, entry / MODEL, {**about, "without": " ".join([*without, part])})
        try:
            same = played(entry) == actions
        except UsageError:
            same = False
        if same:
            tensors, without = rest, [*without, part]
    save_file(tensors, entry / MODEL, {**about, **({"without": " ".join(without)} if without else {})})
    return without


def page(index: Mapping[str, Any]) -> str:
    """The zoo's README: what each entry is, and how to play it."""
    lines = [
        "# Trained models",
        "One for each of the algorithm files whose row in [the proof](../docs/proof.md) has five seeds, where a folder",
        "of these runs was kept and its weights take at most 300 kB: of the runs that were kept, that with the score",
        "nearest to the median of all. Made by `python benchmark/zoo.py`. To play one:",
        "```bash",
        "solo play zoo/d3qn",
        "```",
        "",
        "| model | environment | steps | score of this run |",
        "|---|---|---:|---:|",
    ]
    for name, about in index.items():
        task = ", ".join(filter(None, (about["env_id"], about["variant"])))
        lines.append(
            f"| [`{name}`](../docs/algorithms/{name}.md) | {task} | {about['steps']:,} | {about['score']:,.4g} |"
        )
    return "\n".join(lines) + "\n"


def build(rows: Iterable[proof.Row], places: Iterable[Path], zoo: Path) -> None:
    """Bring the zoo to what the rule says of these rows and run folders, and say what changes."""
    zoo.mkdir(exist_ok=True)
    index = read_json(zoo / "index.json")
    for run, run_dir in chosen(rows, folders([*places, zoo])):
        if run_dir.parent.resolve() == zoo.resolve():
            continue
        with tempfile.TemporaryDirectory(dir=zoo) as scratch:
            entry = Path(scratch) / run.script
            without = write_entry(run_dir, entry)
            size = sum(path.stat().st_size for path in entry.iterdir())
            others = sum(about["bytes"] for name, about in index.items() if name != run.script)
            if size > MOST or size + others > MOST_IN_ALL:
                print(f"{run.script}: not kept, it has {size:,} bytes next to {others:,} of others")
                continue
            shutil.rmtree(zoo / run.script, ignore_errors=True)
            entry.rename(zoo / run.script)
        index[run.script] = {
            "env_id": run.env_id, "variant": run.variant, "seed": run.seed, "score": run.eval["mean"][-1],
            "steps": run.global_step, "without": without, "bytes": size,
            "script_sha256": sha256(next((zoo / run.script).glob("*.py"))),
        }  # fmt: skip
        print(f"{run.script}: {run.env_id}, seed {run.seed}, {size:,} bytes")
    index = dict(sorted(index.items()))
    (zoo / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    (zoo / "README.md").write_text(page(index))


def main() -> int:
    """Build the zoo of the results in benchmark/results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", nargs="+", required=True, type=Path, help="folders with run folders, at any depth")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmark/results", help="the folder of the folders")
    parser.add_argument("--zoo", type=Path, default=ROOT / "zoo", help="the folder to bring up to date")
    args = parser.parse_args()
    build(proof.rows(args.results, proof.History().is_current), args.runs, args.zoo)
    return 0


if __name__ == "__main__":
    sys.exit(main())
