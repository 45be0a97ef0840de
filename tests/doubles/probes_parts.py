"""Environments whose actions or observations have several parts; use them as `probes_parts:Strict-v0` and so on."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from probes import Probe


class Strict(Probe):
    """Actions of two parts whose bounds are checked; the reward is the continuous part times 1 + the discrete one."""

    action_space = Tuple((Discrete(3), Box(np.array([-0.5, 0.0]), np.array([1.0, 0.25]), (2,), np.float64)))

    def step(self, action):
        discrete, continuous = action
        assert self.action_space[1].contains(np.asarray(continuous, np.float64)), continuous
        return np.zeros(1, np.float32), (1 + discrete) * float(continuous[0]), True, False, {}


def acts(space):
    """An environment with another action space."""
    step = lambda self, action: (np.zeros(1, np.float32), 1.0, True, False, {})  # noqa: E731
    return type("Other", (Probe,), {"action_space": space, "step": step})


TUPLES = {
    "One": Tuple((Discrete(2),)),
    "Swapped": Tuple((Box(-1.0, 1.0, (1,)), Discrete(2))),
    "Three": Tuple((Discrete(2), Box(-1.0, 1.0, (1,)), Discrete(2))),
    "FromOne": Tuple((Discrete(2, start=1), Box(-1.0, 1.0, (1,)))),
    "Flat": Tuple((Discrete(2), Box(-1.0, 1.0, (2, 2)))),
    "Integers": Tuple((Discrete(2), Box(0, 5, (1,), np.int64))),
    "Choices": Tuple((MultiDiscrete([2, 2]), Box(-1.0, 1.0, (1,)))),
}
gym.register("Strict-v0", "probes_parts:Strict", disable_env_checker=True)
gym.register("ShortTool-v0", "solorl.games.tool:Tool", max_episode_steps=5)
for _name, _space in TUPLES.items():
    gym.register(f"{_name}-v0", lambda space=_space: acts(space)(), disable_env_checker=True)


def sees(space):
    """An environment with another observation space, which shows samples of it."""

    class Other(Probe):
        observation_space = space

        def reset(self, *, seed=None, options=None):
            gym.Env.reset(self, seed=seed)
            space.seed(seed)
            return space.sample(), {}

        def step(self, action):
            return space.sample(), 1.0, True, False, {}

    return Other


DICTS = {
    "Nested": Dict(inner=Dict(x=Box(-1.0, 1.0, (1,))), y=Box(-1.0, 1.0, (1,))),
    "Number": Dict(number=Discrete(3), y=Box(-1.0, 1.0, (1,))),
    "Point": Dict(point=Box(-1.0, 1.0, ()), y=Box(-1.0, 1.0, (1,))),
    "Mixed": Dict(items=Box(0, 255, (84, 84, 3), np.uint8), keys=Box(-1.0, 1.0, (2, 3), np.float64), z=Box(0, 9, (2,))),
}
for _name, _space in DICTS.items():
    gym.register(f"{_name}-v0", lambda space=_space: sees(space)(), disable_env_checker=True)
for _name, _entry in {"Blind": "image", "Deaf": "vector"}.items():
    gym.register(f"{_name}-v0", "solorl.games.two_senses:TwoSenses", max_episode_steps=10, kwargs={"hide": _entry})
gym.register("ShortTwoSenses-v0", "solorl.games.two_senses:TwoSenses", max_episode_steps=5)
