"""Steps per second of environments that compute for a given time, in one process and with `--env-workers`, in turn.

    python benchmark/env_workers.py --rounds 5

An environment does nothing but arithmetic: as much as takes `--ms` milliseconds of an idle core, measured at the start.
It is stepped and no more, so the ratio is the most that workers can bring to a training on this machine.
"""

import argparse
import os
import statistics
import time

import gymnasium as gym
import numpy as np

from solorl.envs.vector import VectorEnvs
from solorl.envs.workers import in_workers


def compute(turns):
    """Arithmetic, `turns` times."""
    x = 1.0
    for _ in range(turns):
        x = x * 0.999 + 0.001
    return x


def turns_of(ms):
    """How many turns take `ms` milliseconds: of 50 trials the fastest counts, which other work has disturbed least."""
    seconds = []
    for _ in range(50):
        began = time.perf_counter()
        compute(10_000)
        seconds.append(time.perf_counter() - began)
    return round(10_000 * ms / 1000 / min(seconds))


class Busy(gym.Env):
    """Computes in each step; episodes have 100 steps."""

    observation_space = gym.spaces.Box(0.0, 2.0, (8,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, turns):
        self.turns = turns

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(8, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(8, compute(self.turns), np.float32), 1.0, False, self.steps == 100, {}


def speed(envs, steps):
    """Environment steps per second."""
    action = np.zeros(envs.num_envs, np.int64)
    began = time.perf_counter()
    for _ in range(steps):
        envs.step(action)
    return steps * envs.num_envs / (time.perf_counter() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--env-workers", type=int, default=2)
    parser.add_argument("--ms", type=float, default=1.0, help="milliseconds of a step")
    parser.add_argument("--steps", type=int, default=100, help="steps of all environments in one measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each; the median counts")
    args = parser.parse_args()
    turns = turns_of(args.ms)
    make_envs = [lambda: Busy(turns)] * args.num_envs
    both = {"one process": VectorEnvs(make_envs), "workers": in_workers(VectorEnvs, make_envs, args.env_workers)}
    for envs in both.values():
        envs.reset(seed=1)
        speed(envs, 20)  # to warm up
    found = {name: [] for name in both}
    print(f"load before: {os.getloadavg()[0]:.2f}, cores: {len(os.sched_getaffinity(0))}, turns of a step: {turns}")
    for _ in range(args.rounds):
        for name, envs in both.items():
            found[name].append(speed(envs, args.steps))
    for name, speeds in found.items():
        print(f"{name}: {statistics.median(speeds):.0f} steps/s ({min(speeds):.0f} to {max(speeds):.0f})")
    one, workers = (statistics.median(speeds) for speeds in found.values())
    print(f"ratio: {workers / one:.2f} with {args.env_workers} workers; load after: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
