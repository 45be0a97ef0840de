"""A game of two teams for the tests: agents leave early, by the game or by a limit of their own; time is limited."""

import gymnasium as gym
import numpy as np
from pettingzoo import ParallelEnv

TEAMS = {"red": ["red_0", "red_1"], "blue": ["blue_0", "blue_1"]}
LIMIT = 9


class Raid(ParallelEnv):
    """Every agent has a number; its action pushes it up or down, and it is out above 4. blue_1 goes home after 3 steps.

    The reward is the number after the step; red_1 gets 0.5 in the step after it has left (what it threw still hits).
    The central state is all numbers and the step. `observed`: "plain", "masked" (Dict with action_mask), "told" (the
    mask stands in infos) or "told late" (but not in those of a reset); action 2 is forbidden where the number is above
    2. `exact=False` plays differently each time.
    """

    metadata = {"name": "raid_v0", "render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012

    def __init__(self, observed="plain", own_state=True, exact=True, render_mode=None):
        self.possible_agents = [name for names in zip(*TEAMS.values(), strict=True) for name in names]
        self.observed, self.own_state, self.exact, self.render_mode = observed, own_state, exact, render_mode
        self.rng = np.random.default_rng(0)

    def observation_space(self, agent):
        box = gym.spaces.Box(-50.0, 50.0, (3,), np.float32)
        mask = gym.spaces.MultiBinary(3)
        return gym.spaces.Dict({"observation": box, "action_mask": mask}) if self.observed == "masked" else box

    def action_space(self, agent):
        return gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        if seed is not None and self.exact:
            self.rng = np.random.default_rng(seed)
        self.agents, self.time = self.possible_agents[:], 0
        self.number = dict(zip(self.agents, self.rng.normal(size=4), strict=True))
        return self.seen(self.agents), self.infos(self.agents)

    def step(self, actions):
        assert set(actions) == set(self.agents), (set(actions), self.agents)
        assert all(action in range(3) for action in actions.values())
        acting, self.time = self.agents, self.time + 1
        for name in acting:
            self.number[name] += int(actions[name]) - 0.7 + self.rng.normal()
        rewards = {name: float(self.number[name]) for name in acting}
        if "red_1" not in acting and "red_1" in self.before:
            rewards["red_1"] = 0.5
        self.before = acting
        terminated = {name: self.number[name] > 4 for name in acting}
        truncated = {name: self.time == LIMIT or (name == "blue_1" and self.time == 3) for name in acting}
        self.agents = [name for name in acting if not (terminated[name] or truncated[name])]
        return self.seen(acting), rewards, terminated, truncated, self.infos(acting)

    def allowed(self, name):
        return np.array([1, 1, self.number[name] <= 2], np.int8)

    def infos(self, names):
        told = self.observed == "told" or (self.observed == "told late" and self.time > 0)
        return {name: {"action_mask": self.allowed(name)} if told else {} for name in names}

    def seen(self, names):
        self.before = getattr(self, "before", names) if self.time else names
        obs = {name: np.array([self.number[name], self.time, len(names)], np.float32) for name in names}
        if self.observed == "masked":
            return {name: {"observation": one, "action_mask": self.allowed(name)} for name, one in obs.items()}
        return obs

    def state(self):
        if not self.own_state:
            raise NotImplementedError
        return np.array([*self.number.values(), self.time])

    def render(self):
        return np.full((16, 16, 3), 20 * self.time, np.uint8)

    def close(self):
        pass
