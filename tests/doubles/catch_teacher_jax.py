"""A teacher for tests of files in JAX, which nobody has to train: a script with the network of dqn_atari_jax.py and
random weights. `teacher_folder()` is a run folder of it on Catch-v5, which says that it scored 1."""

import functools
import runpy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from solorl import EnvPoolVectorEnv, RunArgs, Runs, parse

DQN = runpy.run_path(str(Path(__file__).parents[2] / "algorithms/dqn/dqn_atari_jax.py"), run_name="imported")


@dataclass
class Args(RunArgs):
    env_kind = "envpool-atari"
    env_id: str = "Catch-v5"
    num_seeds: int = 1
    total_timesteps: int = 1
    num_actions: int = 3  # of the network
    eval_episodes: int = 2


class Training(NamedTuple):
    params: Any


def make_envs(env_id, num_envs, **kwargs):
    return EnvPoolVectorEnv(env_id, num_envs, **kwargs)


def act(params, obs):
    return DQN["act"](params, obs)


@functools.cache
def teacher_folder(*flags):
    """The run folder of a training that learns nothing, in a temporary folder that stays as long as this process."""
    from catch_teacher import scored
    from pixel_probe import use_fake_envpool

    folder = tempfile.TemporaryDirectory()
    teacher_folder.kept = [*getattr(teacher_folder, "kept", ()), folder]
    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.object(sys, "argv", [__file__, "--runs-dir", folder.name, *flags]),
    ):
        use_fake_envpool(patch)
        runpy.run_path(__file__, run_name="__main__")
    [run_dir] = Path(folder.name).iterdir()
    return scored(run_dir, 1.0)


if __name__ == "__main__":
    args = parse(Args)
    run = Runs(args)
    run.open_envs(args.env_id, 1)
    init = functools.partial(DQN["init_params"], num_actions=args.num_actions)
    training, start = run.resume(lambda key: Training(init(key)), model="params")
    for iterations in run.loop(start, 1, 1):
        run.evaluate(iterations.stop, act, make_envs)
        run.save(iterations.stop, training)
    run.close(act, make_envs)
