"""Make data sets of runs, look at data sets, and exchange them with Minari.

solo dataset from RUN_DIR        all steps of a training that has kept its replay buffer (--save-replay)
solo dataset info DIR...         episodes, returns, what observations and actions cover
solo dataset export DIR ID       as a data set of Minari, such as hopper/medium-v0
solo dataset import ID DIR       from a data set of Minari on this machine

`solo record` makes one of a policy that plays. `from` executes the script of the run, by the rule of `solo play`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solorl.cli import Parser
from solorl.errors import UsageError, refuse, told
from solorl.files import shown
from solorl.runfolder import config_of
from solorl.terminal import aligned, plain

MOST = 40  # dimensions in a table


def main(argv: Sequence[str]) -> int:
    """Do what is asked; UsageError for what is not a data set and what cannot be written."""
    p = Parser("dataset", __doc__ or "")
    p.add_argument("what", metavar="from|info|export|import", choices=("from", "info", "export", "import"))
    p.add_argument("names", metavar="NAME", nargs="+", help="folders of runs and data sets, names of Minari's")
    p.add_argument("--random", metavar="DIR", type=Path, help="data of random actions: its mean return is the score 0")
    p.add_argument("--expert", metavar="DIR", type=Path, help="data of an expert: its mean return is the score 100")
    out = "of info: a histogram of the returns, PNG or SVG; of from: the data set (RUN_DIR/dataset)"
    p.add_argument("--out", metavar="PATH", type=Path, help=out)
    p.add_argument("--trust-script", action="store_true", help="execute the run's script, whatever it does")
    args = p.parse(argv)
    picture = args.what == "info" and args.out is not None and args.out.suffix in (".png", ".svg")
    takes = "takes a folder and a name of Minari's; see `solo dataset --help`"
    for wrong, why in (
        (args.what == "from" and len(args.names) > 1, " from takes one run folder, and with --out the data set's"),
        (args.what in ("export", "import") and len(args.names) != 2, f" {args.what} {takes}"),
        ((args.random is None) != (args.expert is None), ": --random and --expert go together"),
        (args.out and args.what != "from" and not picture, f": --out is a picture of info, PNG or SVG, not {args.out}"),
    ):
        refuse(wrong, f"solo dataset{why}")
    from solorl.lab.datasets import exchange  # here: they load the numerical libraries

    first, *others = map(Path, args.names)
    own = (_mean(args.random), _mean(args.expert)) if args.random else None
    try:
        if args.what == "from":
            made(args)
        elif args.what == "info":
            returns = {str(folder): info(folder, own) for folder in (first, *others)}
            if args.out:
                from solorl.lab.results import figures

                figures.write_histogram(returns, args.out)
                print(f"picture {shown(args.out)}")
        elif args.what == "export":
            count = exchange.export(first, args.names[1], *(own or _d4rl(first) or (None, None)))
            print(f"Minari has {plain(args.names[1])} now: {count:,} episodes")
        else:
            print(f"{exchange.bring(args.names[0], others[0]):,} episodes in {shown(others[0])}")
    except OSError as error:
        from solorl.lab.studies.storage import refusal

        raise UsageError(refusal(error, args.names[-1])) from None
    return 0


def made(args: Any) -> None:
    """Make a data set of the replay buffer of a run."""
    from solorl.lab.datasets.recording import Recording, record_replayed, replayed
    from solorl.lab.share.hub import run_dir_of
    from solorl.run.load import environment_of, script_of

    run_dir = run_dir_of(args.names[0])
    script, recording = script_of(run_dir)[0], Recording(args.out or run_dir / "dataset")
    recording.writer.check()
    with told(f"{run_dir} does not fit"):
        config = config_of(run_dir)
        rows, env = replayed(run_dir, config["args"]), environment_of(run_dir, args.trust_script)
        about = {key: (config["args"] | config)[key] for key in ("env_id", "seed", "script", "git")}
        about |= {"policy": f"{script.stem} while it trained", "of_run": run_dir.resolve().name}
        record_replayed(rows, recording, about, env)
    print(f"{rows['reward'].size:,} transitions of {plain(about['policy'])} in {shown(recording.writer.folder)}")


def _mean(folder: Path) -> float:
    from solorl.data.dataset import read

    returns = read(folder).whole_returns()
    refuse(not len(returns), f"{folder} has no whole episode, so no mean return")
    return float(returns.mean())


def _d4rl(folder: Path) -> tuple[float, float] | None:
    from solorl.data.dataset import read_about
    from solorl.lab.results.reference_scores import D4RL

    return D4RL.get(str(read_about(folder).get("env_id")).partition("-")[0])


def info(folder: Path, own: tuple[float, float] | None) -> Any:
    """Print what is in a data set; returns the returns of its whole episodes."""
    import numpy as np

    from solorl.data.dataset import digest, read, read_about
    from solorl.lab.results.statistics import normalise
    from solorl.lab.results.text import number

    about, data = read_about(folder), read(folder)
    returns, lengths = data.whole_returns(), np.bincount(data.episode)

    def spread(x: np.ndarray) -> str:
        return f"mean {number(x.mean())}, from {number(x.min())} to {number(x.max())}"

    pieces, at_limit = len(about["pieces"]), (data.truncated & ~data.terminated).sum() - data.cut.sum()
    lines = [
        ("data set", f"{shown(folder)}: {about.get('policy')} on {about.get('env_id')}"),
        ("transitions", f"{len(data):,} in {pieces} piece{'s'[: pieces != 1]}, {about.get('num_envs')} side by side"),
        ("episodes", f"{len(lengths):,}, of which {data.cut.sum():,} were cut short; length {spread(lengths)}"),
        ("ends", f"{data.terminated.sum():,} terminated, {at_limit:,} at a limit"),
        ("returns", f"{spread(returns)}, standard deviation {number(returns.std())}" if len(returns) else "unknown"),
    ]
    for name, scores in (("D4RL", _d4rl(folder)), ("own", own)):
        if scores and len(returns):
            low, high = map(number, scores)
            lines.append((f"{name} score", f"{spread(100 * normalise(returns, *scores))} (0: {low}, 100: {high})"))
    lines.append(("SHA-256", digest(about)))
    print("\n".join(aligned(lines)))
    rows: list[Sequence[str]] = [("", "mean", "std", "min", "max", "values")]
    for name, values in (("obs", data.obs), ("action", data.action)):
        columns = values.reshape(len(values), -1).T if values.size <= MOST * len(values) else values.reshape(1, -1)
        for i, column in enumerate(columns):
            cells = [number(float(f(column))) for f in (np.mean, np.std, np.min, np.max)]
            rows.append((f"{name} {i}" if len(columns) > 1 else name, *cells, f"{len(np.unique(column)):,}"))
    print("\n".join(["", *aligned(rows, right=range(1, 6)), ""]))
    return returns
