"""Find one set of hyper-parameters for several environments.

the space is in the script, as `lr: float = 2.5e-4  # learning rate [tune: log 1e-5..1e-2]`,
or in a file; ppo, ppo_normalized, ppo_continuous_action, dqn, sac_continuous_action and td3_continuous_action, also in
JAX, have one already:
  learning-rate = "log 1e-5..1e-2"     a number, equally likely on a logarithmic scale
  gamma = "0.9..0.999"                 a number between the two
  num-steps = "32..512 step 32"        a whole number, in steps
  num-minibatches = [1, 2, 4]          one of these

  solo tune ppo --env-ids CartPole-v1 Acrobot-v1 --target-scores CartPole-v1=0,500 Acrobot-v1=-500,-80 \\
    --space space.toml --trials 50 --total-timesteps 100000 -- --num-envs 8

To continue, repeat the command; several at once share the trials. Exit code 0: there is a best trial, 1: all failed.
"""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from solorl.args.command_line import value_of
from solorl.cli import Parser, at_least, say
from solorl.cli.bench import MOST_WORKERS, RESOURCES, add_engine_flags, job, split
from solorl.envs.ids import check_env_id_of
from solorl.errors import UsageError, did_you_mean, missing_extra, reason, refuse
from solorl.lab.studies.engines import start
from solorl.lab.studies.plan import Flags, load_script, merge, seed_range
from solorl.lab.studies.resources import read_resources
from solorl.lab.studies.storage import open_storage, refusal
from solorl.lab.studies.study import Study
from solorl.lab.studies.task import words
from solorl.lab.studies.worker import SCORE
from solorl.machine import own_cores
from solorl.terminal import scores


def main(argv: Sequence[str]) -> int:
    """Search, and print the best flags; UsageError for a search that cannot be."""
    own, extra = split(argv)
    args = _parser().parse(own)
    try:
        from solorl.lab.studies import tune  # here: it loads Optuna
    except ModuleNotFoundError as error:
        raise UsageError(missing_extra("solo tune", error) or reason(error)) from None
    search = make_search(args, extra)
    where = args.storage or f"runs/tune/{search.script.name}"
    refuse("://" in where, f"solo tune: the trials need a folder that all machines see, not {where}")
    if args.engine != "local":
        mine = f"--engine local --workers 1 --storage {shlex.quote(str(Path(where).absolute()))}"
        again = (*(word for word in own if word != "--dry-run"), *shlex.split(mine), *argv[len(own) :])
        count, one = args.workers or len(own_cores()), search.tasks({}, 1)
        workers = replace(job(where, search.script.name, one, count), words=("tune", *again))
        say(start(args.engine, workers, dict(args.engine_option), args.dry_run))
        return 0
    refuse(args.dry_run, "solo tune: --dry-run goes with --engine")
    found = tune.open_trials(Path(where), search, args.pruner, args.prune_after, args.seed)
    study = Study(open_storage(where), search.script.name, {}, attempts=1)
    tuner = tune.Tuner(search, found, study, args.trials, args.workers or 0, say)
    say(f"{len(tuner.trials())} of {tuner.wanted} trials so far, {len(tuner.workers)} runs at once; output in {where}")
    say(f"searched: {', '.join(search.space)}")
    say(f"watch them: optuna-dashboard {shlex.quote(str(Path(where) / tune.JOURNAL))}")
    try:
        code = tuner.search_all()
    except OSError as error:
        raise UsageError(refusal(error, where)) from None
    for line in conclusion(search, tuner, code, args.script):
        print(line)
    return code


def _parser() -> Parser:
    parser = Parser("tune", __doc__ or "")
    add, some, number = parser.add_argument, at_least(1, 10**6), at_least(0, 10**6)
    add("script", metavar="SCRIPT", help="an algorithm, or a .py file that takes --env-id and --seed")
    add("--env-ids", metavar="ID", nargs="+", required=True, help="environments")
    add("--target-scores", metavar="ID=LOW,HIGH", nargs="+", default=[], help="scores that count as 0 and 1")
    add("--num-seeds", metavar="N", type=int, default=3, help="seeds of each trial (default 3)")
    add("--start-seed", metavar="S", type=int, default=1, help="the first seed (default 1)")
    add("--trials", metavar="N", type=some, default=50, help="trials of the study in all (default 50)")
    add("--space", metavar="FILE.toml", type=Path, help="what is searched (default: see below)")
    add("--storage", "--runs-dir", metavar="DIR", help="the search, which others may join (default runs/tune/SCRIPT)")
    add("--aggregate", choices=("median", "mean"), default="median", help="of seeds (default median)")
    add("--metric", metavar="KEY", default=SCORE, help=f"what is maximised (default {SCORE})")
    add("--pruner", choices=("median", "none"), default="median", help="ends hopeless trials early")
    add("--prune-after", metavar="N", type=number, default=4, help="evaluations before (default 4)")
    add("--seed", metavar="S", type=at_least(0, 2**31 - 1), help="seed of the search (default: a new one each time)")
    add("--workers", metavar="N", type=at_least(1, MOST_WORKERS), help="runs at once (default: one for each core)")
    add("--dry-run", action="store_true", help="print what would be submitted to the engine")
    add_engine_flags(parser)
    steps = partial(value_of, "--total-timesteps", int)
    add("--total-timesteps", metavar="N", type=steps, help="given to every run")
    return parser


def make_search(args: Any, extra: Flags) -> Any:
    """What the command line asks for; UsageError where it does not fit together."""
    from solorl.lab.studies.space import space_from_file, space_of
    from solorl.lab.studies.tune import Search

    script = load_script(args.script)
    steps: Flags = {} if args.total_timesteps is None else {"--total-timesteps": (str(args.total_timesteps),)}
    flags = merge(steps, extra)
    script.check(flags)
    if script.ours:
        for env_id in args.env_ids:
            check_env_id_of(script.path, env_id, script.env_kind)
    space = space_from_file(args.space, script) if args.space else space_of(script)
    for name in space:
        if {f"--{name}", f"--no-{name}"} & {flag.replace("_", "-") for flag in flags}:
            raise UsageError(f"solo tune: --{name} is searched, so it cannot be given")
    given = {name: getattr(args, name) for name in RESOURCES if getattr(args, name) is not None}
    env_ids, scale = tuple(dict.fromkeys(args.env_ids)), targets(args.target_scores, args.env_ids)
    seeds = tuple(seed_range(args.num_seeds, args.start_seed, "solo tune"))
    resources = read_resources(given, "the flags of solo tune")
    return Search(script, env_ids, scale, seeds, space, flags, args.aggregate, args.metric, resources)


def targets(given: Sequence[str], env_ids: Sequence[str]) -> dict[str, tuple[float, float]]:
    """`ID=LOW,HIGH` for every environment, or for none where there is only one; else UsageError."""
    found: dict[str, tuple[float, float]] = {}
    for text in given:
        env_id, _, bounds = text.rpartition("=")
        try:
            low, high = map(float, bounds.split(","))
        except ValueError:
            low, high = 0.0, 0.0
        if env_id and env_id not in env_ids:
            raise UsageError(f"solo tune: --target-scores {env_id} is not in --env-ids{did_you_mean(env_id, env_ids)}")
        such = "must look like CartPole-v1=0,500, the lower score first"
        refuse(not low < high < low + 1e300, f"solo tune: --target-scores {text} {such}")
        found[env_id] = (low, high)
    missing = [env_id for env_id in env_ids if env_id not in found]
    if missing and (found or len(set(env_ids)) > 1):
        more = f"is missing for {missing[0]}; scores of several must be comparable"
        raise UsageError(f"solo tune: --target-scores {more}")
    return found


def conclusion(search: Any, tuner: Any, code: int, script: str) -> list[str]:
    """The last lines: how many trials ended how, the best flags ready to paste, and what to do with them."""
    states = Counter(trial.state.name for trial in tuner.trials())
    parts = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "not at their end"}
    lines = [", ".join(f"{states[state]} trials {word}" for state, word in parts.items() if states[state])]
    if code > 1:
        lines.append("interrupted; the same command continues")
    if not states["COMPLETE"]:
        failed = [trial.user_attrs.get("reason", "") for trial in tuner.trials() if trial.state.name == "FAIL"]
        return [*filter(None, lines), "no trial is complete" + (f"; the last failed: {failed[-1]}" if failed else "")]
    best = tuner.found.best_trial
    lines.append(f"best: trial {best.number} with {best.value:.3f}")
    for env_id in search.env_ids:
        texts = ", ".join(scores(*best.user_attrs.get(env_id, [])))
        lines.append(f"  {env_id}: {texts} (seeds {search.seeds[0]} to {search.seeds[-1]})")
    flags = shlex.join(words(search.all_flags(best.params)))
    script, fresh, env_ids = shlex.quote(script), search.seeds[-1] + 1000, shlex.join(search.env_ids)
    lines.append(f"train with it:\n  solo train {script} --env-id {shlex.quote(search.env_ids[0])} {flags}")
    lines.append("the best of many is lucky, too: evaluate it on fresh seeds before you believe it:")
    lines.append(f"  solo bench {script} --env-ids {env_ids} --start-seed {fresh} --num-seeds 10 -- {flags}")
    return lines
