"""`solo play`: evaluates the agent of a run folder with the script that made it."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from solorl.cli import Parser
from solorl.cli.train import run_script
from solorl.errors import UsageError, did_you_mean


def script_of(run_dir: Path) -> Path:
    """The copied script in a run folder; UsageError if the folder, its config.json or the script is missing."""
    if not run_dir.is_dir():
        beside = [path.name for path in run_dir.parent.iterdir()] if run_dir.parent.is_dir() else []
        raise UsageError(f"there is no run folder {run_dir}{did_you_mean(run_dir.name, beside)}")
    try:
        config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{run_dir} is no run folder: it has no config.json") from None
    except (ValueError, OSError) as error:
        raise UsageError(f"{run_dir / 'config.json'} cannot be read: {error}") from None
    name = config.get("script") if isinstance(config, dict) else None
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".py"):
        raise UsageError(f'{run_dir / "config.json"} must name the script that ran, as in "script": "ppo.py"')
    if not (run_dir / name).is_file():
        raise UsageError(f"{run_dir} has lost its script {name}; without it the agent cannot be played")
    return run_dir / name


def no_display() -> bool:
    """Whether this is a Linux machine on which no window can open."""
    return sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def main(argv: Sequence[str]) -> int:
    """Play the agent of a run folder; UsageError for a folder that holds no run and for numbers out of range."""
    parser = Parser("play", "Evaluate the agent of a run folder with the script that made it.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a folder below runs/")
    parser.add_argument("--episodes", metavar="N", type=int, default=10, help="how many to play (default 10)")
    parser.add_argument("--video", action="store_true", help="film the episodes into RUN_DIR/videos")
    parser.add_argument("--render", action="store_true", help="show the episodes in a window")
    parser.add_argument("--seed", metavar="S", type=int, help="seed of the first episode")
    args = parser.parse(argv)
    if args.episodes < 1:
        raise UsageError(f"solo play: --episodes must be at least 1, not {args.episodes}")
    if args.seed is not None and args.seed < 0:
        raise UsageError(f"solo play: --seed must be at least 0, not {args.seed}")
    script = script_of(args.run_dir)
    if args.render and no_display():
        raise UsageError("solo play: --render needs a display and there is none here; --video films the episodes")
    from solorl.run import Play, Run  # here, because it loads the numerical libraries

    before, Run.play = Run.play, Play(episodes=args.episodes, video=args.video, render=args.render, seed=args.seed)
    try:
        run_script(script, ["--resume", str(args.run_dir)])
    finally:
        Run.play = before
    return 0
