"""`solo play`: evaluates the agent of a run folder with the script that made it."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solorl.cli import Parser
from solorl.cli.train import run_script
from solorl.errors import UsageError, did_you_mean
from solorl.run.safety import is_plain_name, refuse_links
from solorl.scripts import script_paths

ABOUT = """Evaluate the agent of a run folder. This executes the script that made it, with the arguments in the folder's
config.json. A script that is equal to the algorithm of this name, or to your own file outside of the folder from which
the run was started, is executed there; any other is executed only with --trust-script, and does not find modules next
to it. An environment whose id is module:Name imports that module."""


def script_of(run_dir: Path) -> tuple[Path, Path | None]:
    """The copied script in a run folder, and the file outside of it that may be executed for it, if there is one;
    UsageError if the folder, its config.json or the script is missing, or the folder holds links."""
    if not run_dir.is_dir():
        beside = [path.name for path in run_dir.parent.iterdir()] if run_dir.parent.is_dir() else []
        raise UsageError(f"there is no run folder {run_dir}{did_you_mean(run_dir.name, beside)}")
    refuse_links(run_dir)
    try:
        config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{run_dir} is no run folder: it has no config.json") from None
    except (ValueError, OSError, RecursionError) as error:
        raise UsageError(f"{run_dir / 'config.json'} cannot be read: {error}") from None
    name = config.get("script") if isinstance(config, dict) else None
    if not is_plain_name(name) or not name.endswith(".py"):
        raise UsageError(f'{run_dir / "config.json"} must name the script that ran, as in "script": "ppo.py"')
    if not (run_dir / name).is_file():
        raise UsageError(f"{run_dir} has lost its script {name}; without it the agent cannot be played")
    return run_dir / name, trusted(run_dir / name, config.get("script_path"))


def trusted(copy: Path, started_from: Any) -> Path | None:
    """The file to execute in the place of `copy`, a script in a run folder, whose name and contents it has: an
    algorithm of this installation, or the file outside of the folder from which the run was started; else None."""
    files = [path for path in script_paths().values() if path.name == copy.name]
    if isinstance(started_from, str) and Path(started_from).is_absolute() and "\0" not in started_from:
        path = Path(started_from)
        files += [] if path.resolve().is_relative_to(copy.parent.resolve()) else [path]
    same = (path for path in files if path.name == copy.name and path.is_file())
    return next((path for path in same if path.read_bytes() == copy.read_bytes()), None)


def no_display() -> bool:
    """Whether this is a Linux machine on which no window can open."""
    return sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def main(argv: Sequence[str]) -> int:
    """Play the agent of a run folder; UsageError for a folder that holds no run and for numbers out of range."""
    parser = Parser("play", ABOUT)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a folder below runs/")
    parser.add_argument("--episodes", metavar="N", type=int, default=10, help="how many to play (default 10)")
    parser.add_argument("--video", action="store_true", help="film the episodes into RUN_DIR/videos")
    parser.add_argument("--render", action="store_true", help="show the episodes in a window")
    parser.add_argument("--seed", metavar="S", type=int, help="seed of the first episode")
    parser.add_argument("--trust-script", action="store_true", help="execute the folder's script, whatever it does")
    args = parser.parse(argv)
    if args.episodes < 1:
        raise UsageError(f"solo play: --episodes must be at least 1, not {args.episodes}")
    if args.seed is not None and args.seed < 0:
        raise UsageError(f"solo play: --seed must be at least 0, not {args.seed}")
    copy, original = script_of(args.run_dir)
    if original is None and not args.trust_script:
        raise UsageError(
            f"{copy} is neither an algorithm of this installation nor equal to your own file from which the run was "
            "started: read it, for it would be executed, then add --trust-script"
        )
    if args.render and no_display():
        raise UsageError("solo play: --render needs a display and there is none here; --video films the episodes")
    from solorl.run.verbs import Play, Run  # here, because it loads the numerical libraries

    before, Run.play = Run.play, Play(episodes=args.episodes, video=args.video, render=args.render, seed=args.seed)
    try:
        run_script(original or copy, ["--resume", str(args.run_dir)], neighbours=original is not None)
    finally:
        Run.play = before
    return 0
