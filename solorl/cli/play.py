"""Evaluate the agent of a run folder. This executes the script that made it, with the arguments in the folder's
config.json. A script that is equal to the algorithm of this name, or to your own file from which you have started the
run, is executed there; any other is executed only with --trust-script, and does not find modules next to it. The same
holds for the module of an environment module:Name, unless it is an installed package. A run of the Hugging Face hub is
pulled into a cache (see `solo pull --help`).
"""

import glob
from collections.abc import Sequence
from pathlib import Path

from solorl.cli import Parser, at_least
from solorl.errors import UsageError, refuse
from solorl.machine import no_display
from solorl.runfolder import CONFIG


def newest(given: Sequence[str]) -> str:
    """The run that is meant: of several folders, given or matched by a pattern that the shell left as it is, the one
    that began last. UsageError where one of several is none of this machine's run folders."""
    found = [path for name in given for path in ([name] if Path(name).exists() else glob.glob(name) or [name])]  # noqa: PTH207
    if len(found) == 1:
        return found[0]
    for path in found:
        if not (Path(path) / CONFIG).is_file():
            raise UsageError(f"solo play takes several run folders and plays the newest, but {path} is none")
    last = max(found, key=lambda path: (Path(path) / CONFIG).stat().st_mtime_ns)
    print(f"{last} is the newest of {len(found)} runs")
    return last


def main(argv: Sequence[str]) -> int:
    """Play the agent of a run folder; UsageError for a folder that holds no run and for numbers out of range."""
    parser = Parser("play", __doc__ or "")
    what = "a folder below runs/ (of several the newest is played), a model in it, or hf://USER/NAME"
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help=what)
    parser.add_argument("--episodes", metavar="N", type=at_least(1), default=10, help="how many to play (default 10)")
    parser.add_argument("--video", action="store_true", help="film the first episode into RUN_DIR/videos")
    parser.add_argument("--render", action="store_true", help="show the episodes in a window")
    parser.add_argument("--stochastic", action="store_true", help="draw the actions at random, if the script can")
    who = "on boards: random, one-ply, uct-N, minimax-N, perfect, or human, who plays in this terminal"
    parser.add_argument("--opponent", metavar="NAME", default="", help=who)
    parser.add_argument("--seed", metavar="S", type=at_least(0, 2**31 - 1), help="seed of the first episode")
    parser.add_argument("--trust-script", action="store_true", help="execute the folder's script, whatever it does")
    args = parser.parse(argv)
    from solorl.lab.share.hub import run_dir_of
    from solorl.run.load import Play, play_script, script_of  # here: they load the numerical libraries
    from solorl.trust import FLAG, not_trusted

    run_dir, model = run_dir_of(newest(args.run_dirs)), Play.model
    if run_dir.suffix == ".safetensors" and run_dir.is_file():
        run_dir, model = run_dir.parent, run_dir.name
    copy, original = script_of(run_dir)
    refuse(original is None and not args.trust_script, not_trusted(copy))
    if args.render and no_display():
        raise UsageError("solo play: --render needs a display and there is none here; --video films the episodes")
    play = Play(args.episodes, args.video, args.render, args.seed, args.stochastic, args.opponent, model)
    how = "" if args.trust_script else FLAG
    play_script(original or copy, run_dir, play, neighbours=original not in (None, copy), how=how)
    return 0
