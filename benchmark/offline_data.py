"""Data sets like D4RL's, made here: random, medium, medium-replay, expert (docs/offline_data.md).

    python benchmark/offline_data.py HalfCheetah-v5 Hopper-v5 --out data

Each step runs a command of `solo`, which it prints; what is there already is left. Killed, it continues where it was.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = "sac_continuous_action"


def solo(*words, dry):
    """Run a command of `solo`; ends the script where that fails."""
    words = [str(word) for word in words]
    print(f"solo {shlex.join(words)}", flush=True)
    if not dry and (code := subprocess.run([sys.executable, "-m", "solorl.cli", *words]).returncode):
        sys.exit(code)


def made(folder, *words, dry):
    """Make the data set `folder` unless it is there: in a folder of its own, which gets the name when it is whole."""
    if dry:
        solo(*words, "--out", folder, dry=True)
    elif not folder.exists():
        place = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        solo(*words, "--out", place, dry=False)
        place.rename(folder)


def trained(folder, flags, dry):
    """The folder of the only run below `folder`, trained to its end: begun, or resumed where it was stopped."""
    found = sorted(folder.glob("*/config.json"))
    if not found:
        solo("train", SCRIPT, *flags, "--save-replay", "--runs-dir", folder, dry=dry)
    elif json.loads((found[0].parent / "status.json").read_text())["status"] != "finished":
        solo("train", SCRIPT, "--resume", found[0].parent, dry=dry)
    return next((path.parent for path in folder.glob("*/config.json")), folder / "RUN")


def last_score(run):
    """The mean return of a run's last evaluation."""
    return json.loads((run / "status.json").read_text())["eval/episodic_return"]


def main():
    """Make the data sets of each environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env_ids", metavar="ENV_ID", nargs="+")
    parser.add_argument("--out", type=Path, default=Path("data"), help="a folder for each environment is made there")
    parser.add_argument("--steps", type=int, default=200_000, help="transitions of a data set")
    parser.add_argument(
        "--expert-steps", type=int, default=1_000_000, help="environment steps of the expert's training"
    )
    parser.add_argument("--share", type=float, default=1 / 3, help="of the expert's return at which medium ends")
    parser.add_argument("--flags", default="", help="more flags of both trainings, in one word")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    args = parser.parse_args()
    dry, more = args.dry_run, shlex.split(args.flags)
    for env_id in args.env_ids:
        folder = args.out / env_id.replace("/", "_")
        own = ["--env-id", env_id, "--total-timesteps", args.expert_steps, *more]
        expert = trained(folder / "runs_expert", own, dry)
        target = f"{args.share * last_score(expert):.1f}" if (expert / "status.json").exists() else "TARGET"
        own += ["--target-return", target, "--eval-every", 5000, "--seed", 2, "--buffer-size", args.expert_steps]
        medium = trained(folder / "runs_medium", own, dry)
        made(folder / "medium-replay", "dataset", "from", medium, dry=dry)
        for name, run, flag in (
            ("random", expert, "--random"),
            ("medium", medium, "--stochastic"),
            ("expert", expert, "--stochastic"),
        ):
            made(folder / name, "record", run, "--steps", args.steps, flag, dry=dry)
        sets = [folder / name for name in ("random", "medium-replay", "medium", "expert")]
        references = ("--random", folder / "random", "--expert", folder / "expert")
        solo("dataset", "info", *sets, *references, "--out", folder / "returns.png", dry=dry)


if __name__ == "__main__":
    main()
