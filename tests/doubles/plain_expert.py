"""Experts for tests, which nobody has to train: a script whose policy is a formula. `expert_folder("CartPole-v1")` is a
run folder of one."""

import functools
import runpy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers import ClipAction, RescaleAction

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"
    clipped: bool = False  # actions without bounds, which the environment clips, as those of PPO; else in [-1, 1]
    remembers: bool = False  # a policy with a memory
    eval_episodes: int = 2


def balance(obs, rng=None):
    """CartPole: to the side to which the pole falls."""
    return (obs[:, 2] + 0.5 * obs[:, 3] + 0.1 * obs[:, 1] > 0).astype(np.int64)


def swing(obs, rng=None):
    """Pendulum: a torque with the turn, in [-1, 1]."""
    return np.tanh(obs[:, 2:] * 0.5 + obs[:, 1:2]).astype(np.float32)


def match(obs, rng=None):
    """probes:ActionMustMatch-v0: the action that is rewarded."""
    return (obs[:, 0] > 0).astype(np.int64)


def aim(obs, rng=None):
    """probes_offpolicy:AimWhereSeen-v0: the best action, in [-1, 1]."""
    return (0.5 * obs[:, :1] * np.array([[-1.0, 1.0]])).astype(np.float32)


POLICIES = {
    "CartPole-v1": balance,
    "Pendulum-v1": swing,
    "turned:Turned-v0": swing,
    "probes:ActionMustMatch-v0": match,
    "probes_offpolicy:AimWhereSeen-v0": aim,
}


@functools.cache
def expert_folder(*flags):
    """The run folder of an expert, in a temporary folder that stays as long as this process."""
    folder = tempfile.TemporaryDirectory()
    expert_folder.kept = [*getattr(expert_folder, "kept", ()), folder]
    with mock.patch.object(sys, "argv", [__file__, "--runs-dir", folder.name, *flags]):
        runpy.run_path(__file__, run_name="__main__")
    [run_dir] = Path(folder.name).iterdir()
    return run_dir


if __name__ == "__main__":
    args = parse(Args)
    run = Run(args)
    policy = POLICIES[args.env_id]

    def make_env(env_id, **kwargs):
        env = gym.make(env_id, **kwargs)
        if isinstance(env.action_space, gym.spaces.Discrete):
            return env
        return ClipAction(env) if args.clipped else RescaleAction(env, -1.0, 1.0)

    def act(obs):
        """Clipped ones in the units of the environment, up to one and a half times as far as its bounds."""
        if not args.clipped:
            return policy(obs)
        space = gym.make(args.env_id).action_space
        return (1.5 * policy(obs) * (space.high - space.low) / 2 + (space.high + space.low) / 2).astype(np.float32)

    def act_with_memory(obs, state, first):
        return policy(obs), state

    module = torch.nn.Linear(1, 1)
    chosen = act_with_memory if args.remembers else act
    start = run.resume(module=module)
    for iteration in run.loop(start, 1):
        run.evaluate(iteration + 1, chosen, make_env)
        run.save(iteration + 1)
    run.close(chosen, make_env)
