"""Small games that need memory, exploration, masks, goals, an opponent, or more than one kind of observation or action.

    import gymnasium as gym
    import solorl.games  # registers games/Cue-v0 and its like
    env = gym.make("games/Cue-v0", steps=30)

Each lasts seconds to learn, not hours, and needs exactly one ability. The score is the return of an episode.
docs/environments.md has a table.
"""

from typing import Any

import gymnasium as gym

from solorl.envs import register

# Name -> its module and class, the time limit in steps (None: the game ends by itself) and arguments.
GAMES: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    "Cue-v0": ("cue:Cue", None, {}),
    "Cue60-v0": ("cue:Cue", None, {"steps": 60}),
    "CueMasked-v0": ("cue:Cue", None, {"masked": True}),
    "CueContinuous-v0": ("cue:Cue", None, {"continuous": True, "steps": 20}),
    "KeyAndDoor-v0": ("key_and_door:KeyAndDoor", 60, {}),
    "KeyAndDoorLarge-v0": ("key_and_door:KeyAndDoor", 72, {"size": 12}),
    "ResourceGrid-v0": ("resource_grid:ResourceGrid", 40, {}),
    "Tool-v0": ("tool:Tool", 10, {}),
    "TwoNumbers-v0": ("two_numbers:TwoNumbers", 10, {}),
    "TwoNumbersMasked-v0": ("two_numbers:TwoNumbers", 10, {"masked": True}),
    "TwoSenses-v0": ("two_senses:TwoSenses", 10, {}),
    "TwoSensesContinuous-v0": ("two_senses:TwoSenses", 10, {"continuous": True}),
    "MovingDot-v0": ("moving_dot:MovingDot", 20, {}),
    "MovingDotGrey-v0": ("moving_dot:MovingDot", 20, {"height": 40, "width": 56, "grey": True}),
    "BitFlip15-v0": ("goals:BitFlip", None, {"bits": 15}),
    "PointReach-v0": ("goals:PointReach", None, {}),
    "Pole-v0": ("pole:Pole", 150, {}),
    "PoleImage-v0": ("pole:Pole", 150, {"sees": "image"}),
    "PoleDict-v0": ("pole:Pole", 150, {"sees": "dict"}),
    "PoleHidden-v0": ("pole:Pole", 150, {"sees": "positions"}),
}
# Boards: height, width, stones in a row that win, whether stones fall.
BOARDS = {"TicTacToe-v0": (3, 3, 3, False), "ConnectFour-v0": (6, 7, 4, True)}
# Tasks of EnvPool with goals: the distance that counts as reached; the reward elsewhere, which is 1 less than there.
# The reward of parking is minus the distance.
GOALS = {"FetchReach-v4": (0.05, -1.0), "PointMaze_UMaze-v3": (0.45, 0.0), "parking-v0": (0.0, 0.0)}

gym.register("games/TensorPendulum-v0", vector_entry_point="solorl.envs.batched:Pendulum")
for _name, (_entry, _steps, _kwargs) in GAMES.items():
    gym.register(f"games/{_name}", f"solorl.games.{_entry}", max_episode_steps=_steps, kwargs=_kwargs)
for _name, _rules in BOARDS.items():
    _entry, _many = (f"solorl.games.matches:{_kind}" for _kind in ("Match", "Matches"))
    gym.register(f"games/{_name}", _entry, vector_entry_point=_many, kwargs={"rules": _rules})
for _name, (_near, _offset) in GOALS.items():
    _kwargs = {"env_id": _name, "near": _near, "offset": _offset}
    gym.register(f"games/{_name}", "solorl.games.goals_envpool:EnvPoolGoals", kwargs=_kwargs)


def _compiled(env_id: str, num_envs: int) -> Any:
    """A game written in JAX."""
    from solorl.envs.classic import JaxEnvs
    from solorl.games.in_jax import DYNAMICS

    return JaxEnvs(env_id, num_envs, DYNAMICS[env_id])


for _id in ("games/Cue-v0", "games/KeyAndDoor-v0"):
    register(_id, compiled=_compiled)
