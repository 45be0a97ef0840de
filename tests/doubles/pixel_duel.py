"""Games of several players on images, made like PettingZoo's games of Atari: `pixel_duel:atari/signals_v0` of two is
learned in a minute; in `pixel_duel:atari/walkout_v0` two of three players leave early."""

import gymnasium as gym
import numpy as np
from pettingzoo import ParallelEnv

from solorl.envs.pettingzoo import Game

SIZE, ROUND, ROUNDS = 84, 8, 8  # pixels; frames of a round; rounds of a game
NAMES = ("first_0", "second_0", "third_0")
LEAVES = {"first_0": (37, False), "second_0": (46, True)}  # frame in which a player leaves, and whether it is a limit


class Signals(ParallelEnv):
    """One screen for all, with a column for each player: a bar above or below, which is drawn in every round. Who
    presses the button of the own bar (1: above, 2: below) in the last frame of a round hits. The reward is n times the
    own hits less the hits of all n who play."""

    metadata = {"name": "signals_v0", "render_modes": ["rgb_array"], "render_fps": 60}  # noqa: RUF012

    def __init__(self, obs_type, players=2, leaves=None, render_mode=None):
        assert obs_type == "grayscale_image"
        self.possible_agents, self.leaves, self.render_mode = list(NAMES[:players]), leaves or {}, render_mode

    def observation_space(self, agent):
        return gym.spaces.Box(0, 255, (SIZE, SIZE, 1), np.uint8)

    def action_space(self, agent):
        return gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.bars = np.random.default_rng(seed).integers(2, size=(ROUNDS + 1, len(self.possible_agents)))
        self.agents, self.frame = self.possible_agents[:], 0
        return self.seen(self.agents)

    def step(self, actions):
        acting, bars = self.agents, self.bars[self.frame // ROUND]
        self.frame += 1
        places = {name: self.possible_agents.index(name) for name in acting}
        hits = {name: int(self.frame % ROUND == 0 and actions[name] == 1 + bars[k]) for name, k in places.items()}
        rewards = {name: float(len(acting) * hits[name] - sum(hits.values())) for name in acting}
        left = {name: self.leaves.get(name, (-1, False)) for name in acting}
        over = self.frame == ROUND * ROUNDS
        terminated = {name: over or (frame == self.frame and not limit) for name, (frame, limit) in left.items()}
        truncated = {name: frame == self.frame and limit for name, (frame, limit) in left.items()}
        self.agents = [name for name in acting if not (terminated[name] or truncated[name])]
        obs, infos = self.seen(acting)
        return obs, rewards, terminated, truncated, infos

    def seen(self, names):
        screen, width = np.zeros((SIZE, SIZE, 1), np.uint8), SIZE // len(self.possible_agents)
        for k, bar in enumerate(self.bars[self.frame // ROUND]):
            screen[SIZE // 2 * bar :][: SIZE // 2, k * width :][:, : width // 2] = 255
        screen[-4:] = 0
        screen[-4:, : self.frame] = 128  # frames that were played
        return dict.fromkeys(names, screen), {name: {} for name in names}

    def state(self):
        raise NotImplementedError

    def render(self):
        return self.seen(["first_0"])[0]["first_0"].repeat(3, -1)

    def close(self):
        pass


def walkout(**kwargs):
    return Signals(players=3, leaves=LEAVES, **kwargs)


for _name, _game in (("signals", Signals), ("walkout", walkout)):
    if f"atari/{_name}_v0" not in gym.registry:
        gym.register(
            f"atari/{_name}_v0",
            lambda teams=None, game=_game, **kwargs: Game(game(**kwargs), teams),
            disable_env_checker=True,
        )
