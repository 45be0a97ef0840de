"""`solo tune`: one set of hyper-parameters over several environments, found by Optuna."""

import shlex
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from solorl.args.command_line import value_of
from solorl.cli import Parser
from solorl.cli.bench import split, worker_count
from solorl.cli.fleet import RESOURCES, add_engine_flags, given_resources, read_options, say
from solorl.envs.ids import check_env_id_of
from solorl.errors import UsageError, did_you_mean
from solorl.lab.studies.elsewhere import Elsewhere
from solorl.lab.studies.engines import ENGINES, open_engine
from solorl.lab.studies.engines.workers import LocalCluster
from solorl.lab.studies.journal import completed, counted, open_study
from solorl.lab.studies.plan import Flags, load_script, merge, seed_range
from solorl.lab.studies.resources import read_resources
from solorl.lab.studies.space import space_from_file, space_of
from solorl.lab.studies.storage import open_storage
from solorl.lab.studies.study import ATTEMPTS, Study
from solorl.lab.studies.task import words
from solorl.lab.studies.tune import METRIC, Search, Tuner
from solorl.terminal import scores

SHARED = ("local", "ray", "slurm")  # engines whose workers share folders with this machine
EPILOG = """the space is in the script, as `lr: float = 2.5e-4  # learning rate [tune: log 1e-5..1e-2]`,
or in a file; ppo, ppo_normalized, ppo_continuous_action, dqn, sac_continuous_action and td3_continuous_action, also in
JAX, have one already:
  learning-rate = "log 1e-5..1e-2"     a number, equally likely on a logarithmic scale
  gamma = "0.9..0.999"                 a number between the two
  num-steps = "32..512 step 32"        a whole number, in steps
  num-minibatches = [1, 2, 4]          one of these

  solo tune ppo --env-ids CartPole-v1 Acrobot-v1 --target-scores CartPole-v1=0,500 Acrobot-v1=-500,-80 \\
    --space space.toml --trials 50 --total-timesteps 100000 -- --num-envs 8

To continue, repeat the command; several at once share the trials. Exit code 0: there is a best trial, 1: all failed."""


def main(argv: Sequence[str]) -> int:
    """Search, and print the best flags; UsageError for a search that cannot be."""
    own, extra = split(argv)
    args = _parser().parse(own)
    study = make_study(args, extra)
    for name, value in (("--trials", args.trials), ("--prune-after", args.prune_after + 1)):
        if value < 1:
            raise UsageError(f"solo tune: {name} must be at least {0 if name == '--prune-after' else 1}")
    workers = make_workers(args)
    storage = args.storage or Path("tune") / f"{study.script.name}.log"
    found = open_study(storage, study.script.name, study.about(), args.pruner, args.prune_after, args.seed)
    where = args.runs_dir or Path("runs/tune") / storage.stem
    limit = 1 if args.engine == "local" else ATTEMPTS  # elsewhere a run may be killed that is not to blame
    runs = Study(open_storage(str(where)), storage.stem, {}, limit)
    say(f"{len(counted(found))} of {args.trials} trials so far, {workers.slots} runs at once; output in {where}")
    say(f"searched: {', '.join(study.space)}")
    say(f"watch them: optuna-dashboard {shlex.quote(str(storage))}")
    code = Tuner(study, found, runs, workers, args.trials, say).run()
    for line in conclusion(study, found, code, args.script):
        print(line)
    return code


def _parser() -> Parser:
    parser = Parser("tune", "Find one set of hyper-parameters for several environments.")
    parser.formatter_class, parser.epilog = RawDescriptionHelpFormatter, EPILOG
    parser.add_argument("script", metavar="SCRIPT", help="an algorithm, or a .py file that takes --env-id and --seed")
    parser.add_argument("--env-ids", metavar="ID", nargs="+", required=True, help="environments")
    parser.add_argument(
        "--target-scores", metavar="ID=LOW,HIGH", nargs="+", default=[], help="scores that count as 0 and 1"
    )
    parser.add_argument("--num-seeds", metavar="N", type=int, default=3, help="seeds of each trial (default 3)")
    parser.add_argument("--start-seed", metavar="S", type=int, default=1, help="the first seed (default 1)")
    parser.add_argument("--trials", metavar="N", type=int, default=50, help="trials of the study in all (default 50)")
    parser.add_argument("--space", metavar="FILE.toml", type=Path, help="what is searched (default: see below)")
    parser.add_argument("--storage", metavar="FILE", type=Path, help="journal of the study (default tune/SCRIPT.log)")
    parser.add_argument(
        "--aggregate", choices=("median", "mean"), default="median", help="of the seeds (default median)"
    )
    parser.add_argument("--metric", metavar="KEY", default=METRIC, help=f"what is maximised (default {METRIC})")
    parser.add_argument("--pruner", choices=("median", "none"), default="median", help="ends hopeless trials early")
    parser.add_argument("--prune-after", metavar="N", type=int, default=4, help="evaluations before that (default 4)")
    parser.add_argument("--seed", metavar="S", type=int, help="seed of the search (default: a new one each time)")
    parser.add_argument("--workers", metavar="N", type=int, help="runs at once (default: one for each core)")
    add_engine_flags(parser.add_argument_group("on a cluster"), SHARED)
    steps = partial(value_of, "--total-timesteps", int)
    parser.add_argument("--total-timesteps", metavar="N", type=steps, help="given to every run")
    parser.add_argument("--runs-dir", metavar="DIR", type=Path, help="default runs/tune/NAME OF THE STORAGE")
    return parser


def make_workers(args: Any) -> LocalCluster | Elsewhere:
    """Who does the runs; UsageError for an engine that cannot."""
    slots = worker_count(args.workers, "solo tune")
    if args.engine == "local":
        for flag in ("--engine-option", *(f"--{name}" for name in RESOURCES)):
            if getattr(args, flag[2:].replace("-", "_")) is not None:
                raise UsageError(f"solo tune: {flag} is for a cluster; here the runs divide the cores")
        return LocalCluster(slots)
    if args.engine in ENGINES and args.engine not in SHARED:
        raise UsageError(f"solo tune: --engine {args.engine} cannot be asked for runs; allowed are {', '.join(SHARED)}")
    options = read_options(args.engine_option, "solo tune")
    return Elsewhere(open_engine(args.engine, options), slots, options, say)


def make_study(args: Any, extra: Flags) -> Search:
    """What the command line asks for; UsageError where it does not fit together."""
    script = load_script(args.script)
    steps: Flags = {} if args.total_timesteps is None else {"--total-timesteps": (str(args.total_timesteps),)}
    flags = merge(steps, extra)
    script.check(flags)
    if script.ours:
        for env_id in args.env_ids:
            check_env_id_of(script.path, env_id, script.env_kind)
    space = space_from_file(args.space, script) if args.space else space_of(script)
    for name in space:
        if f"--{name}" in flags:
            raise UsageError(f"solo tune: --{name} is searched, so it cannot be given")
    return Search(
        script=script,
        env_ids=tuple(dict.fromkeys(args.env_ids)),
        targets=targets(args.target_scores, args.env_ids),
        seeds=tuple(seed_range(args.num_seeds, args.start_seed, "solo tune")),
        space=space,
        flags=flags,
        aggregate=args.aggregate,
        metric=args.metric,
        resources=read_resources(given_resources(args), "the flags of solo tune"),
    )


def targets(given: Sequence[str], env_ids: Sequence[str]) -> dict[str, tuple[float, float]]:
    """`ID=LOW,HIGH` for every environment, or for none where there is only one; else UsageError."""
    found: dict[str, tuple[float, float]] = {}
    for text in given:
        env_id, _, bounds = text.rpartition("=")
        try:
            low, high = map(float, bounds.split(","))
        except ValueError:
            raise UsageError(f"solo tune: --target-scores {text} must look like CartPole-v1=0,500") from None
        if env_id not in env_ids:
            raise UsageError(f"solo tune: --target-scores {env_id} is not in --env-ids{did_you_mean(env_id, env_ids)}")
        if not low < high:
            raise UsageError(f"solo tune: --target-scores {text} must have the lower score first")
        found[env_id] = (low, high)
    missing = [env_id for env_id in env_ids if env_id not in found]
    if missing and (found or len(set(env_ids)) > 1):
        raise UsageError(
            f"solo tune: --target-scores is missing for {missing[0]}; scores of several must be comparable"
        )
    return found


def conclusion(study: Search, found: Any, code: int, script: str) -> list[str]:
    """The last lines: how many trials ended how, the best flags ready to paste, and what to do with them."""
    states = [trial.state.name for trial in found.trials if not trial.user_attrs.get("interrupted")]
    parts = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "still running elsewhere"}
    lines = [", ".join(f"{states.count(state)} trials {word}" for state, word in parts.items() if state in states)]
    if code > 1:
        lines.append("interrupted; the same command continues")
    if not completed(found):
        failed = [trial.user_attrs.get("reason", "") for trial in found.trials if trial.state.name == "FAIL"]
        return [*filter(None, lines), "no trial is complete" + (f"; the last failed: {failed[-1]}" if failed else "")]
    best = found.best_trial
    lines.append(f"best: trial {best.number} with {best.value:.3f}")
    for env_id in study.env_ids:
        texts = ", ".join(scores(*best.user_attrs.get(env_id, [])))
        lines.append(f"  {env_id}: {texts} (seeds {study.seeds[0]} to {study.seeds[-1]})")
    flags = shlex.join(words(study.all_flags(best.params)))
    script, fresh, env_ids = shlex.quote(script), study.seeds[-1] + 1000, shlex.join(study.env_ids)
    lines.append(f"train with it:\n  solo train {script} --env-id {shlex.quote(study.env_ids[0])} {flags}")
    lines.append("the best of many is lucky, too: evaluate it on fresh seeds before you believe it:")
    lines.append(f"  solo bench {script} --env-ids {env_ids} --start-seed {fresh} --num-seeds 10 -- {flags}")
    return lines
