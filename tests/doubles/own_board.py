"""A board as a user would register it: three in a row on 3 x 4 cells."""

import gymnasium as gym

gym.register(
    "ThreeInARow-v0",
    "solorl.games.matches:Match",
    vector_entry_point="solorl.games.matches:Matches",
    kwargs={"rules": (3, 4, 3, False)},
)
