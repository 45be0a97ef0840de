"""Reference scores, so that environments with different scales can be averaged: low is 0, high is 1.

low: the return of uniformly random actions. high: what counts as solved. The numbers are in reference_scores.toml.
"""

import re
import tomllib
from pathlib import Path

READ = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TABLES = {key: {name: tuple(pair) for name, pair in table.items()} for key, table in READ.items()}
CONTROL, D4RL, ATARI = TABLES["control"], TABLES["d4rl"], TABLES["atari"]


def reference(env_id: str) -> tuple[float, float] | None:
    """(low, high) of an environment, or None where no reference is known.

    The versions of a MuJoCo task share one entry; Atari games are known by the names of Gymnasium ("ALE/Pong-v5",
    "PongNoFrameskip-v4") and EnvPool ("Pong-v5").
    """
    name = re.sub(r"-v\d+$", "", env_id)
    game = re.sub(r"(NoFrameskip|Deterministic)$", "", name.removeprefix("ALE/"))
    return CONTROL.get(env_id) or CONTROL.get(name) or ATARI.get(game)
