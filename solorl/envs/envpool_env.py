"""EnvPool's environments one by one, with Gymnasium's interface and ids: `envpool/Game2048-v1`, in any file.

Importing this module registers them; where an id of EnvPool has a slash, it is a dot here: `envpool/Jumanji.Tetris-v0`.
They are slower than many in one `EnvPoolVectorEnv`. Every episode has a seed of its own, so resuming is exact.
"""

from typing import Any

import gymnasium as gym
import numpy as np

from solorl.envs.envpool import EnvPoolVectorEnv
from solorl.envs.load_envpool import import_envpool


class EnvPoolEnv(gym.Env[np.ndarray, Any]):
    """One environment of EnvPool; `info["action_mask"]` where it tells what is allowed."""

    def __init__(self, env_id: str):
        self.envs = EnvPoolVectorEnv(env_id, 1, 1)
        self.observation_space, self.action_space = self.envs.single_observation_space, self.envs.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        obs, infos = self.envs.reset(seed=int(self.np_random.integers(2**31)))
        return obs[0], self._info(infos)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        obs, reward, terminated, truncated, infos = self.envs.step(np.asarray(action)[None])
        if terminated[0] or truncated[0]:
            obs, infos = infos["final_obs"], infos["final_info"]
        return obs[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), self._info(infos)

    def _info(self, infos: dict[str, Any]) -> dict[str, Any]:
        return {name: infos[name][0] for name in ("action_mask", "lives") if name in infos}


for _id in import_envpool().list_all_envs():
    gym.register(
        f"envpool/{_id.replace('/', '.')}",
        "solorl.envs.envpool_env:EnvPoolEnv",
        kwargs={"env_id": _id},
        disable_env_checker=True,
    )
