"""Games of several agents with unequal spaces for the tests, whose best return is known; and `raid.py` under ids."""

from functools import partial

import gymnasium as gym
import numpy as np
from pettingzoo import ParallelEnv
from raid import Raid

from solorl.envs.pettingzoo import register

ROUNDS = 4
BEST = 2 * ROUNDS  # the sum of the best rewards of both agents


class Targets(ParallelEnv):
    """Each agent has a number, and a reward of 1 where its action is the number: `one` of two numbers, `two` of three.

    `one` sees its own number, `two` both. What `one` misses, `two` loses: its reward depends on the action of `one`.
    The game is truncated after ROUNDS steps. `continuous`: `one` has one action in [-1, 3], `two` two, the number in
    the first and its opposite in the second; the reward is less by the distance."""

    metadata = {"name": "targets_v0", "render_modes": []}  # noqa: RUF012
    NUMBERS = {"one": 2, "two": 3}  # noqa: RUF012

    def __init__(self, continuous=False, bound=3.0, render_mode=None):
        self.possible_agents, self.render_mode = list(self.NUMBERS), render_mode
        self.continuous, self.bound = continuous, bound

    def observation_space(self, agent):
        return gym.spaces.Box(0, 1, (2 if agent == "one" else 5,), np.float32)

    def action_space(self, agent):
        if not self.continuous:
            return gym.spaces.Discrete(self.NUMBERS[agent])
        return gym.spaces.Box(-1, self.bound, (1 if agent == "one" else 2,), np.float32)

    def reset(self, seed=None, options=None):
        self.agents, self.time = self.possible_agents[:], 0
        self.rng = np.random.default_rng(seed)
        return self.seen(), {name: {} for name in self.agents}

    def seen(self):
        self.number = {name: int(self.rng.integers(n)) for name, n in self.NUMBERS.items()}
        one, two = (np.eye(n, dtype=np.float32)[self.number[name]] for name, n in self.NUMBERS.items())
        return {"one": one, "two": np.concatenate([one, two])}

    def missed(self, name, action):
        """How far an action is from the number."""
        want = self.number[name]
        if not self.continuous:
            return float(action != want)
        assert len(action) == (1 if name == "one" else 2) and (np.abs(action - 1) <= 2).all()
        return float(np.abs(np.array([want, 2 - want])[: len(action)] - action).mean())

    def step(self, actions):
        one, two = (self.missed(name, actions[name]) for name in self.possible_agents)
        rewards, self.time = {"one": 1 - one, "two": 1 - one - two}, self.time + 1
        over = self.time == ROUNDS
        names, self.agents = self.agents, [] if over else self.agents
        return self.seen(), rewards, dict.fromkeys(names, False), dict.fromkeys(names, over), {x: {} for x in names}

    def state(self):
        raise NotImplementedError

    def close(self):
        pass


register("Targets-v0", Targets)
register("TargetsContinuous-v0", partial(Targets, continuous=True))
register("TargetsUnbounded-v0", partial(Targets, continuous=True, bound=np.inf))
register("TargetsRaid-v0", Raid)
register("RaidMasked-v0", partial(Raid, "masked"))
