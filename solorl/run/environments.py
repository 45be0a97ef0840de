"""The environments of a run: opened side by side, and refused where a script cannot take them."""

from pathlib import Path
from typing import Any

import gymnasium as gym

from solorl.compute.device import TRAIN, env_seed
from solorl.envs import openers
from solorl.envs.async_envs import AsyncEnvs
from solorl.envs.guest import hosted, refuse_statistics, try_out
from solorl.envs.ids import is_atari
from solorl.envs.returns import teams_of
from solorl.envs.spaces import action_kind, obs_kind, wrapper_for
from solorl.envs.surroundings import undisturbed
from solorl.envs.vector import VectorEnvs
from solorl.errors import UsageError, refuse
from solorl.run.evaluation import MakeEnv
from solorl.scripts import file_for, use_instead


class Opened:
    """Opens environments for one script; `apart`: each in a process of its own."""

    def __init__(self, script: Path, apart: bool, seed: int, rank: int):
        self.script, self.apart, self.seed, self.rank = script, apart, seed, rank
        self.unread_mask = False  # whether the environment gives masks, which the script does not read

    def vector_env(self, kind: type, make_env: MakeEnv, env_id: str, num_envs: int) -> Any:
        """`num_envs` environments as one of this kind. UsageError where one makes a mistake."""
        reads = ".action_mask" in self.script.read_text(encoding="utf-8")
        manners = try_out(make_env, env_id, reads and kind is VectorEnvs)
        self.unread_mask = manners.mask is not None and not reads
        if self.apart and (manners.agents or kind is not VectorEnvs):
            raise UsageError(f"--async-envs is for environments of one agent, not for games of several as {env_id}")
        kind = AsyncEnvs if self.apart else kind
        seeds = [env_seed(self.seed, TRAIN, self.rank * num_envs + i) for i in range(num_envs)]
        return kind([hosted(make_env, env_id, ends=not self.apart, seed=each) for each in seeds])

    def multi_agent_env(self, make_env: MakeEnv, env_id: str, num_envs: int) -> Any:
        """`num_envs` games of several agents. UsageError as above."""
        with undisturbed():  # some modules draw random numbers where they are imported for the first time
            from solorl.envs.pettingzoo import PettingZooEnvs

            if (stepped := openers(env_id).stepped) and (games := stepped(make_env, env_id, num_envs)):
                return games
            return self.vector_env(PettingZooEnvs, make_env, env_id, num_envs)


def check_spaces(script: Path, env_id: str, envs: Any, obs: str, action: str) -> gym.Space:
    """The space of observations. UsageError unless both spaces are of the kinds named, see `Run.require_spaces`; it
    names the script that fits."""
    games = teams_of(envs.envs[0] if isinstance(envs, gym.vector.SyncVectorEnv) else envs)
    if games and not teams_of(envs):
        use = use_instead(script, "several agents")
        raise UsageError(f"{env_id} has several agents, but {script.name} takes one{use}")
    spaces = [getattr(envs, f"{'agent' if games else 'single'}_{what}_space") for what in ("observation", "action")]
    found, wanted = (obs_kind(spaces[0]), action_kind(spaces[1])), (obs, action.replace("bounded", "continuous"))
    for what, want, kind in zip(("observations", "actions"), wanted, found, strict=True):
        if kind != want:
            use = file_for(script, *found, atari=found[0] == "image" and is_atari(env_id))
            use += "" if use.startswith("; use") or games else wrapper_for(*spaces)
            use = " of bytes (uint8)" * (want == "image" and len(spaces[0].shape or ()) == 3) + use  # not of floats
            raise UsageError(f"{env_id} has {kind} {what}, but {script.name} takes {want} {what}{use}")
    if action == "bounded" and not spaces[1].is_bounded():
        raise UsageError(f"{env_id} has actions without finite bounds{'' if games else wrapper_for(*spaces)}")
    refuse_statistics(envs, env_id)
    return spaces[0]


def count_iterations(args: Any, sizes: list[int], steps: int, minibatches: int | None, batch: int | None) -> int:
    """See `Run.iterations`; UsageError where that ends the run. Adds `steps` to `sizes`."""
    sizes.append(steps)
    total = int(args.total_timesteps)
    refuse(total < steps, f"--total-timesteps {total} is less than one iteration of {steps} steps")
    what = f"--num-minibatches {minibatches} must divide the batch of {steps} steps into parts of 2 or more"
    refuse(minibatches is not None and (steps % minibatches or steps <= minibatches), what)
    if batch is not None and batch > (most := min(int(args.buffer_size), total // steps * steps)):
        raise UsageError(f"--batch-size must be at most {most} by --buffer-size and --total-timesteps")
    return total // steps


def first_observations(envs: Any, seed: int, first: int) -> Any:
    """Of a reset with seeds that no other environment has; `first` is the number of the first one among all."""
    seeds = [env_seed(seed, TRAIN, first + i) for i in range(envs.num_envs)]
    envs.action_space.seed(seeds[0])
    envs.single_action_space.seed(seeds[0])
    return envs.reset(seed=seeds)[0]
