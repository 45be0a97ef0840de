"""A game of two players for the tests, whose returns can be computed by hand."""

import gymnasium as gym
import numpy as np
from pettingzoo import ParallelEnv

ROUNDS = 8
BONUS = 2.0  # for who sits in the first seat, from the other


class Duel(ParallelEnv):
    """Both see a card of three. Who plays its number takes a point from the other; `even` has a bonus.

    With `masked` a player may not play the number after the card. `sizes` are the players' numbers of actions."""

    metadata = {"name": "duel_v0", "render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012

    def __init__(self, masked=False, sizes=(3, 3), render_mode=None):
        self.possible_agents, self.render_mode, self.masked = ["even", "odd"], render_mode, masked
        self.sizes = dict(zip(self.possible_agents, sizes, strict=True))

    def observation_space(self, agent):
        return gym.spaces.Box(0, ROUNDS, (2,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(self.sizes[agent])

    def reset(self, seed=None, options=None):
        self.agents, self.time = self.possible_agents[:], 0
        self.cards = np.random.default_rng(seed).integers(3, size=ROUNDS + 1)
        return self.seen(), self.infos()

    def step(self, actions):
        card = self.cards[self.time]
        for name, action in actions.items():
            assert 0 <= action < self.sizes[name] and not (self.masked and action == (card + 1) % 3)
        even, odd = (float(actions[name] == card) for name in self.possible_agents)
        value, self.time = even - odd + BONUS * (self.time == 0), self.time + 1
        over = dict.fromkeys(self.agents, self.time == ROUNDS)
        if self.time == ROUNDS:
            self.agents = []
        return self.seen(), {"even": value, "odd": -value}, dict.fromkeys(over, False), over, self.infos()

    def seen(self):
        return {name: np.array([self.cards[self.time], self.time], np.float32) for name in self.possible_agents}

    def infos(self):
        allowed = np.arange(3) != (self.cards[self.time] + 1) % 3
        mask = {name: {"action_mask": allowed[: self.sizes[name]]} for name in self.possible_agents}
        return mask if self.masked else {name: {} for name in self.possible_agents}

    def state(self):
        raise NotImplementedError

    def render(self):
        return np.full((16, 16, 3), 20 * self.time, np.uint8)

    def close(self):
        pass
