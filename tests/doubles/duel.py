"""A game of two players for the tests, whose returns can be computed by hand, and trainings for it."""

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


HEAD = """
from dataclasses import dataclass
from typing import Any, NamedTuple
import gymnasium as gym
import numpy as np
"""

# After n iterations of 10 steps the policy plays the card in the first n rounds, and never afterwards.
TORCH = (
    HEAD
    + """
import torch
from solorl import PettingZooEnvs, Run, RunArgs, parse

@dataclass
class Args(RunArgs):
    env_id: str = "Duel-v0"
    total_timesteps: int = 80
    num_envs: int = 2

def make_env(env_id, **kwargs):
    return gym.make(env_id, **kwargs)

def level_loss(agent):
    loss = -agent.bias.sum() + 0 * agent.weight.sum()
    return loss, {"losses/level": agent.bias[0]}

if __name__ == "__main__":
    args = parse(Args)
    run = Run(args)
    envs = PettingZooEnvs([lambda: make_env(args.env_id) for _ in range(args.num_envs)])
    agent = torch.nn.Linear(2, 1)
    agent.load_state_dict({"weight": torch.tensor([[0.0, -1.0]]), "bias": torch.zeros(1)})
    optimizer = torch.optim.SGD(agent.parameters(), lr=1.0)
    gradient_step, actor = run.gradient_step(level_loss, agent, optimizer), run.fast(agent)

    def act(obs):
        knows, card = actor(obs.reshape(-1, 2)).reshape(obs.shape[:2]) > 0, obs[..., 0].astype(int)
        return np.where(knows, card, (card + 1) % 3)

    start = run.resume(agent=agent, optimizer=optimizer, envs=envs)
    obs = run.reset(envs)
    for iteration in run.loop(start, args.total_timesteps // 10):
        for step in range(5):
            action = np.where(np.random.random((2, 2)) < 0.5, act(obs), 0)
            obs, reward, terminated, truncated, _ = envs.step(action)
            global_step = iteration * 10 + 2 * (step + 1)
            run.episodes(global_step, reward, terminated | truncated)
        run.learned(gradient_step())
        run.log(global_step, {})
        run.evaluate(global_step, act, make_env, opponents=EVALUATED)
        run.save(global_step)
    run.close(act, make_env, opponents=CLOSED)
"""
)

JAX = (
    HEAD
    + """
import jax.numpy as jnp
from solorl import RunArgs, Runs, parse

@dataclass
class Args(RunArgs):
    env_id: str = "Duel-v0"
    total_timesteps: int = 80
    num_seeds: int = 1

class Training(NamedTuple):
    params: Any

def make_env(env_id, **kwargs):
    return gym.make(env_id, **kwargs)

def begin(key):
    return Training({"level": jnp.zeros(())})

def iteration(training):
    level = training.params["level"] + 1
    return Training({"level": level}), level

def act(params, obs):
    card, time = jnp.moveaxis(obs.reshape(-1, 2, 2), -1, 0)
    return jnp.where(time < params["level"], card, (card + 1) % 3).astype(int)

if __name__ == "__main__":
    args = parse(Args)
    run = Runs(args)
    run.open_envs("CartPole-v1", 1)  # nothing is learned from them
    training, start = run.resume(begin, model="params")
    train = run.compile(iteration, chunk=4)
    for iterations in run.loop(start, args.total_timesteps // 10, 10):
        global_step = iterations.stop * 10
        training, level = train(training, iterations)
        run.log(global_step, {"losses/level": level[:, -1]})
        run.evaluate(global_step, act, make_env, opponents=EVALUATED)
        run.save(global_step, training)
    run.close(act, make_env, opponents=CLOSED)
"""
)
