"""Cooperative games for the tests of files that decompose values: `Recall`, and `raid.py` under ids of its own."""

from functools import partial

import gymnasium as gym
import numpy as np
from pettingzoo import ParallelEnv
from raid import Raid

from solorl.envs.pettingzoo import register

DELAY = 3


class Recall(ParallelEnv):
    """Two agents see a cue of two in the first step only, and nothing in the next ones. In the last one both must give
    it, for a reward of 0.5 each; `mute` is not allowed action 2, `loud` not action 0 before the last step."""

    metadata = {"name": "recall_v0", "render_modes": []}  # noqa: RUF012

    def __init__(self, render_mode=None):
        self.possible_agents, self.render_mode = ["mute", "loud"], render_mode

    def observation_space(self, agent):
        return gym.spaces.Box(-1, 2, (1, 2), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.agents, self.time = self.possible_agents[:], 0
        self.cue = int(np.random.default_rng(seed).integers(2))
        return self.seen(), self.infos()

    def seen(self):
        obs = np.array([[2 * self.cue - 1 if self.time == 0 else 0, self.time / DELAY]], np.float32)
        return dict.fromkeys(self.possible_agents, obs)

    def infos(self):
        masks = {"mute": [1, 1, 0], "loud": [self.time == DELAY, 1, 1]}
        return {name: {"action_mask": np.array(mask, np.int8)} for name, mask in masks.items()}

    def step(self, actions):
        assert all(self.infos()[name]["action_mask"][action] for name, action in actions.items())
        over = self.time == DELAY
        won = over and set(actions.values()) == {self.cue}
        names, self.time, self.agents = self.agents, self.time + 1, [] if over else self.agents
        ends, limits = dict.fromkeys(names, over), dict.fromkeys(names, False)
        return self.seen(), dict.fromkeys(names, 0.5 * won), ends, limits, self.infos()

    def state(self):
        raise NotImplementedError

    def close(self):
        pass


for _name, _game in (("RecallCue", Recall), ("RecallRaid", Raid), ("RecallMaskedRaid", partial(Raid, "masked"))):
    if f"{_name}-v0" not in gym.registry:
        register(f"{_name}-v0", _game)
