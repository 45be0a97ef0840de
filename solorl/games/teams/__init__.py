"""Games of several agents as pure JAX functions: thousands side by side in one compiled call.

    import gymnasium as gym
    import solorl.games.teams  # registers team/simple_spread_v3 and its like
    from solorl.games.teams.vector import TeamEnvs
    envs = TeamEnvs("team/simple_spread_v3", num_envs=256)  # trained on, in torch
    env = gym.make("team/simple_spread_v3")  # a `Game`, for evaluation: mpe2's own

The three games of particles are mpe2's, step by step; padded where agents have unequal spaces. docs/multi_agent.md has
a table of all.
"""

from functools import cache
from pkgutil import resolve_name
from typing import Any

import gymnasium as gym

from solorl.envs import register

PREDATORS = {"predators": ["adversary_0", "adversary_1", "adversary_2"], "prey": ["agent_0"]}

# Name -> its function, its arguments, and its teams (None: all agents are one).
GAMES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "simple_spread_v3": ("particles:simple_spread", {}, None),
    "simple_spread_continuous_v3": ("particles:simple_spread", {"continuous_actions": True}, None),
    "simple_speaker_listener_v4": ("particles:simple_speaker_listener", {}, None),
    "simple_speaker_listener_continuous_v4": ("particles:simple_speaker_listener", {"continuous_actions": True}, None),
    "simple_tag_v3": ("particles:simple_tag", {}, PREDATORS),
    "simple_tag_continuous_v3": ("particles:simple_tag", {"continuous_actions": True}, PREDATORS),
    "two_step": ("matrix:two_step", {}, None),
    "qtran_matrix": ("matrix:qtran_matrix", {}, None),
    "climbing": ("matrix:climbing", {}, None),
    "penalty": ("matrix:penalty", {}, None),
    "switch": ("switch:switch", {}, None),
}


def function_of(name: str) -> Any:
    """The function of this name in `GAMES`."""
    return resolve_name(f"{__name__}.{GAMES[name][0]}")


@cache  # so that functions of it are compiled once
def team_game(name: str, **kwargs: Any) -> Any:
    """The `TeamGame` of this name in `GAMES`; `kwargs` are those of its function."""
    return function_of(name)(**{**GAMES[name][1], **kwargs})


for _name in GAMES:
    _entry = "solorl.games.teams.parallel:open_game"
    gym.register(f"team/{_name}", _entry, kwargs={"name": _name}, disable_env_checker=True)


def _compiled(env_id: str, num_envs: int) -> Any:
    return resolve_name(f"{__name__}.game:JaxTeams")(env_id, num_envs)


def _stepped(make_env: Any, env_id: str, num_envs: int) -> Any:
    return resolve_name(f"{__name__}.vector:open_games")(make_env, env_id, num_envs)


register("team/*", compiled=_compiled, stepped=_stepped)
