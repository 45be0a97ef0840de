"""EnvPool's environments one by one, with Gymnasium's interface and ids: `envpool/Game2048-v1`, in any file.

Importing this module registers them; where an id of EnvPool has a slash, it is a dot here: `envpool/Jumanji.Tetris-v0`.
They are slower than many in one `EnvPoolVectorEnv`. Every episode has a seed of its own, so resuming is exact.
"""

import gymnasium as gym

from solorl.envs.envpool import EnvPoolVectorEnv
from solorl.envs.load_envpool import import_envpool
from solorl.envs.spaces import Seeded


class EnvPoolEnv(Seeded):
    """One environment of EnvPool; `info["action_mask"]` where it tells what is allowed."""

    def __init__(self, env_id: str):
        super().__init__(EnvPoolVectorEnv(env_id, 1, 1))


_entry = "solorl.envs.envpool_env:EnvPoolEnv"
for _id in import_envpool().list_all_envs():
    gym.register(f"envpool/{_id.replace('/', '.')}", _entry, kwargs={"env_id": _id}, disable_env_checker=True)
