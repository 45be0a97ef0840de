"""Record transitions of the policy of a run folder, in the environment of the run, as a data set. Actions are
greedy unless a flag says otherwise. This executes the script that made the folder, by the rule of `solo play`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solorl.cli import Parser, at_least
from solorl.errors import denied, refuse
from solorl.files import shown
from solorl.runfolder import config_of
from solorl.terminal import plain


def main(argv: Sequence[str]) -> int:
    """Record a data set; UsageError for a folder without a run, numbers out of range and what cannot be recorded."""
    p = Parser("record", __doc__ or "")
    p.add_argument("run_dir", metavar="RUN_DIR", help="a folder below runs/, or hf://USER/NAME[@REVISION]")
    p.add_argument("--steps", metavar="N", type=at_least(1), required=True, help="transitions of all environments")
    p.add_argument("--out", metavar="DIR", type=Path, help="the folder of the data set (RUN_DIR/dataset)")
    how = p.add_mutually_exclusive_group()
    how.add_argument("--stochastic", action="store_true", help="draw the actions at random, if the script can")
    how.add_argument("--random", action="store_true", help="uniformly random actions; the policy is not asked")
    p.add_argument("--num-envs", metavar="N", type=at_least(1), default=8, help="environments side by side (8)")
    p.add_argument("--seed", metavar="S", type=at_least(0, 2**31 - 1), help="of environments and actions (the run's)")
    p.add_argument("--trust-script", action="store_true", help="execute the folder's script, whatever it does")
    args = p.parse(argv)
    from solorl.envs.surroundings import undisturbed  # here: they load the numerical libraries
    from solorl.lab.datasets.recording import Recording
    from solorl.lab.share.hub import run_dir_of
    from solorl.run.load import load

    run_dir = run_dir_of(args.run_dir)
    recording = Recording(args.out or run_dir / "dataset")
    recording.writer.check()
    loaded = load(run_dir, trust_script=args.trust_script)
    act = None if args.random else loaded.required_sampler() if args.stochastic else loaded.policy
    with denied(f"{recording.writer.folder} cannot be written"), undisturbed():
        record(loaded, act, recording, args, run_dir)
    about, where = recording.writer.about, shown(recording.writer.folder)
    count = sum(piece["transitions"] for piece in about["pieces"])
    print(f"recorded {count:,} transitions of {plain(about['policy'])} in {where}")
    return 0


def record(loaded: Any, act: Any, recording: Any, args: Any, run_dir: Path) -> None:
    """Play `act`, without one random actions, in environments side by side until all steps are recorded."""
    import inspect
    from dataclasses import replace

    import numpy as np
    from gymnasium.vector.utils import batch_space

    from solorl.compute.device import RECORD, env_seed, seed_all
    from solorl.envs.guest import hosted
    from solorl.envs.returns import teams_of
    from solorl.envs.spaces import action_kind, bare_action_space
    from solorl.envs.vector import VectorEnvs, masks_in
    from solorl.run.evaluation import stepwise

    together = "num_envs" in inspect.signature(loaded.maker).parameters
    count, env_id, make = args.num_envs, loaded.env_id, loaded.maker
    envs: Any = make(env_id, count) if together else VectorEnvs([hosted(make, env_id, seed=i) for i in range(count)])
    refuse(not together and teams_of(envs.envs[0]), f"{env_id} has several agents; what is recorded is one agent's")
    seed = loaded.args.seed if args.seed is None else args.seed
    seed_all(replace(loaded.args, seed=seed))
    spaces = (envs.single_observation_space, envs.single_action_space)
    bare = bare_action_space(envs)
    boxes = {action_kind(space) for space in (bare, spaces[1])} == {"continuous"} and bare.shape == spaces[1].shape
    clips = boxes and bare.is_bounded() and not spaces[1].is_bounded()  # what a wrapper gives the environment counts
    drawn: Any = batch_space(bare, count) if clips else envs.action_space  # without bounds nothing is uniform
    drawn.seed(seed)
    spaces[1].seed(seed)
    obs, infos = envs.reset(seed=[env_seed(seed, RECORD, i) for i in range(count)])
    run, config = run_dir.resolve().name, config_of(run_dir)
    how = "random actions" if act is None else f"the {'stochastic' if args.stochastic else 'greedy'} policy of {run}"
    about = {"env_id": env_id, "policy": how, "of_run": run, "seed": seed}
    about |= {key: config.get(key) for key in ("script", "git")}
    recording.open(about, (spaces[0], bare) if clips else spaces, obs)
    player, first = stepwise(act, count) if act else None, np.ones(count, bool)
    for _ in range(-(-args.steps // count)):
        masks: Any = masks_in(infos)
        if player:
            action = player(obs, infos, first)
        elif masks is None:
            action = drawn.sample()
        else:
            action = np.array([spaces[1].sample(mask=mask.astype(np.int8)) for mask in masks])
        obs, reward, terminated, truncated, infos = envs.step(action)
        given = action.clip(bare.low, bare.high) if clips else action
        recording.add(given, reward, terminated, truncated, infos["next_obs"], obs)
        first = terminated | truncated
    recording.flush()
    envs.close()
