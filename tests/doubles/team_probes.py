"""Games of several agents for the tests: one whose agents leave early and have masks, and one that needs memory."""

import gymnasium as gym
import numpy as np
from pettingzoo import ParallelEnv
from raid import TEAMS, Raid

from solorl.envs.pettingzoo import register

LENGTH = 4


class Recall(ParallelEnv):
    """Each of two agents sees a card, 0 or 1, and then nothing for two steps; its last action earns 1 if it is the
    card. The central state shows both cards. The game ends after 4 steps."""

    metadata = {"name": "recall_v0", "render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012

    def __init__(self, render_mode=None):
        self.possible_agents, self.render_mode = ["one", "two"], render_mode

    def observation_space(self, agent):
        return gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.time = self.possible_agents[:], 0
        self.cards = np.random.default_rng(seed).integers(2, size=2)
        return self.seen(), {name: {} for name in self.agents}

    def step(self, actions):
        self.time += 1
        over = self.time == LENGTH
        right = [over * float(actions[name] == card) for name, card in zip(actions, self.cards, strict=True)]
        names = self.possible_agents
        self.agents = [] if over else names[:]
        ends = dict.fromkeys(names, over), dict.fromkeys(names, False)
        return self.seen(), dict(zip(names, right, strict=True)), *ends, {name: {} for name in names}

    def seen(self):
        shown = [(2.0 * card - 1) * (self.time == 0) for card in self.cards]
        return {
            name: np.array([card, self.time / LENGTH], np.float32)
            for name, card in zip(self.possible_agents, shown, strict=True)
        }

    def state(self):
        return np.array([*self.cards, self.time], np.float32)

    def render(self):
        return np.full((16, 16, 3), 20 * self.time, np.uint8)

    def close(self):
        pass


class Arrive(Recall):
    """Three steps. In the first one b comes, c terminates, and d comes to a limit of its own; a stays to the end."""

    metadata = {"name": "arrive_v0", "render_modes": []}  # noqa: RUF012

    def __init__(self, render_mode=None):
        self.possible_agents, self.render_mode = [*"abcd"], render_mode

    def reset(self, seed=None, options=None):
        self.agents, self.time = [*"acd"], 0
        return self.given(self.agents)

    def step(self, actions):
        self.time += 1
        were, self.agents = self.agents, [*"ab"] if self.time < 3 else []
        names = [*dict.fromkeys([*were, *self.agents])]
        terminated = {name: name == "c" or self.time == 3 for name in names}
        obs, infos = self.given(names)
        return obs, dict.fromkeys(names, 1.0), terminated, {name: name == "d" for name in names}, infos

    def given(self, names):
        return {name: np.full(2, self.time / 4, np.float32) for name in names}, {name: {} for name in names}

    def state(self):
        raise NotImplementedError


def masked_raid(**kwargs):
    return Raid("masked", **kwargs)


if "TeamRaid-v0" not in gym.registry:
    register("TeamRaid-v0", masked_raid, TEAMS)
    register("TeamRecall-v0", Recall)
    register("TeamArrive-v0", Arrive)
