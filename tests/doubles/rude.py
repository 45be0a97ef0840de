"""Environments that do odd things, `rude:Seeds-v0` and so on: for the boundary to environments, `solorl.envs.guest`."""

import os
import random
import signal
import sys
import tempfile

import gymnasium as gym
import numpy as np
import torch
from pettingzoo import ParallelEnv

from solorl.envs.pettingzoo import register


class Rude(gym.Env):
    """Seven steps an episode, two actions; the observation is a number that `draw` gives. `actions` are all actions
    that any of them got."""

    observation_space = gym.spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    actions = []  # noqa: RUF012
    reward = 1.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.begin()
        return self.see(), self.info()

    def begin(self):
        pass

    def draw(self):
        return 0.0

    def see(self):
        return np.array([self.t / 7, self.draw()], np.float32)

    def info(self):
        return {}

    def step(self, action):
        self.t += 1
        Rude.actions.append(int(action))
        return self.see(), self.reward, self.t == 7, False, self.info()


class Seeds(Rude):
    """Seeds all global generators in each reset, and draws its observations from them."""

    def begin(self):
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)

    def draw(self):
        return random.random() + np.random.random() + float(torch.rand(()))


class Levels(Seeds):
    """Seeds them in each reset only, so that each reset leaves the same states."""

    def draw(self):
        return 0.0


class Draws(Seeds):
    """Draws from them without a seed."""

    def begin(self):
        pass


class Built(Rude):
    """Is built with random numbers of the global generators, which it shows."""

    def __init__(self):
        self.mass = random.random() + np.random.random() + float(torch.rand(()))

    def draw(self):
        return self.mass


class Writes(Rude):
    """Writes into the actions that it gets. `seen` are those that any of them got."""

    action_space = gym.spaces.MultiDiscrete([3, 3])
    seen = []  # noqa: RUF012

    def step(self, action):
        Writes.seen.append(action.tolist())
        action[:] = 0
        return super().step(0)


class Moves(Rude):
    """Changes the current folder when it is made, and expects to be there later."""

    def __init__(self):
        self.place = tempfile.mkdtemp()
        os.chdir(self.place)

    def draw(self):
        assert os.path.samefile(self.place, ".")  # noqa: PTH121
        return 0.0


class MovesLate(Rude):
    """Changes the folder in a step of its fifth episode."""

    episodes = 0

    def begin(self):
        self.episodes += 1

    def draw(self):
        if self.episodes == 5 and self.t == 3:
            os.chdir(tempfile.gettempdir())
        return 0.0


class Short(Seeds):
    """Seeds NumPy's global generator by the seed of the reset, which it refuses where it has more than 32 bits; `seeds`
    are all that any of them got."""

    seeds = []  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            np.random.seed(seed)
            Short.seeds.append(seed)
        return super().reset(options=options)

    def begin(self):
        pass


class Types(Rude):
    """Computes with another default type, listens to signals, reads the command line."""

    def begin(self):
        torch.set_default_dtype(torch.float64)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.argv[1:] = ["mine"]

    def draw(self):
        assert torch.zeros(1).dtype == torch.float64
        return 0.0


class Ragged(Rude):
    """Its info changes its shapes, types and keys."""

    def info(self):
        n = int(self.np_random.integers(1, 5))
        kinds = {"path": np.zeros((n, 2)), "x": 0 if n % 2 else "none", f"k{n}": n, "d": {n: np.arange(n)}}
        return kinds | {"final_obs": n} | {"episode": {"r": 1.0}, "score": float(self.t)}


class Counts(Ragged):
    """The same, of which one number is wanted."""

    metadata = {"render_modes": (), "numbers": ("score",)}  # noqa: RUF012


class Declares(Rude):
    """Says in its last step whether its first number was small, and in every second step what it has cost: 2, 4, 6.
    The types of these numbers differ."""

    def begin(self):
        self.small = self.np_random.random() < 0.5

    def info(self):
        cost = {2: 2, 4: np.float32(4), 6: np.array(6)}.get(self.t)
        said = {"cost": cost} if cost is not None else {"cost": [1.0]} if self.t == 3 else {}
        return said | ({"is_success": np.bool_(self.small), "success": "no"} if self.t == 7 else {"is_success": True})


class Late(Rude):
    """Gives masks in some steps only, never in a reset; the second action is then forbidden."""

    mask = None

    def info(self):
        self.mask = np.array([True, False]) if self.t % 3 == 2 else None
        return {} if self.mask is None else {"action_mask": self.mask}

    def step(self, action):
        assert self.mask is None or self.mask[action]
        return super().step(action)


class Gives(Rude):
    """Rewards, or flags, of some kind from its 100th step on."""

    total = 0

    def __init__(self, reward=1.0, flag=False, obs=None):
        self.last = (reward, flag, obs)

    def step(self, action):
        self.total += 1
        obs, reward, terminated, _, info = super().step(action)
        if self.total < 100:
            return obs, reward, terminated, False, info
        return obs if self.last[2] is None else self.last[2], self.last[0], terminated, self.last[1], info


class Exits(Rude):
    """Ends the program in its 100th step."""

    total = 0

    def step(self, action):
        self.total += 1
        if self.total == 100:
            sys.exit()
        return super().step(action)


class NoOptions(Rude):
    """A reset as many write it."""

    def reset(self, seed=None):
        return super().reset(seed=seed)


class Endless(Rude):
    """Never ends."""

    def step(self, action):
        return self.see(), 1.0, False, False, {}

    t = 0


class Of(Rude):
    """Has other spaces."""

    def __init__(self, obs=None, action=None):
        self.observation_space = Rude.observation_space if obs is None else obs
        self.action_space = Rude.action_space if action is None else action

    def see(self):
        return self.observation_space.sample()

    def step(self, action):
        return self.see(), 1.0, True, False, {}


class Forgets(ParallelEnv):
    """A game of two agents whose `what` is wrong from step 3 on: it leaves out a reward, or gives NaN or None."""

    metadata = {"name": "forgets"}  # noqa: RUF012
    possible_agents = ["one", "two"]  # noqa: RUF012

    def __init__(self, what="missing"):
        self.what = what

    def observation_space(self, agent):
        return gym.spaces.Box(0.0, 9.0, (1,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.t = list(self.possible_agents), 0
        return self.each(np.zeros(1, np.float32)), self.each({})

    def each(self, value):
        return dict.fromkeys(self.possible_agents, value)

    def step(self, actions):
        self.t += 1
        over = self.t == 5
        rewards = {"one": 1.0, "two": {"nan": np.nan, "none": None}.get(self.what, 1.0) if self.t >= 3 else 1.0}
        if self.what == "missing" and self.t >= 3:
            del rewards["two"]
        obs, flags = self.each(np.zeros(1, np.float32)), (self.each(over), self.each(False))
        self.agents = [] if over else self.agents
        return obs, rewards, *flags, self.each({})


for _kind in (
    Rude,
    Seeds,
    Levels,
    Draws,
    Built,
    Writes,
    Moves,
    MovesLate,
    Short,
    Types,
    Ragged,
    Counts,
    Declares,
    Late,
    Gives,
    Exits,
    NoOptions,
    Endless,
    Of,
):
    gym.register(f"{_kind.__name__}-v0", _kind, disable_env_checker=_kind in (NoOptions, Of))
register("Forgets-v0", Forgets)
