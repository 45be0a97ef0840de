"""Little data sets for tests, of a policy that nobody has to train: `recorded("Pendulum-v1")` is the folder of one."""

import functools
import tempfile
from pathlib import Path

import numpy as np
from conftest import definitions

from solorl.data.dataset import Writer
from solorl.envs.vector import VectorEnvs


@functools.cache
def recorded(env_id, steps=400, num_envs=2, policy=None):
    """A data set of `steps` transitions in two pieces, the same at each call, in a temporary folder that stays as long
    as this process. `policy(obs, rng)` maps observations (num_envs, *obs_shape) to actions, in [-1, 1] if continuous;
    None: random ones."""
    folder = tempfile.TemporaryDirectory()
    recorded.kept = [*getattr(recorded, "kept", ()), folder]
    make_env, rng = definitions("td3_continuous_action")["make_env"], np.random.default_rng(1)
    envs = VectorEnvs([lambda: make_env(env_id)] * num_envs)
    envs.action_space.seed(1)
    writer = Writer(Path(folder.name))
    spaces = (envs.single_observation_space, envs.single_action_space)
    writer.open({"env_id": env_id, "num_envs": num_envs, "policy": "tests"}, spaces)
    obs = envs.reset(seed=1)[0]
    for _ in range(2):
        rows, final = [], [np.empty((0, *obs.shape[1:]), obs.dtype)]
        for _ in range(steps // num_envs // 2):
            action = envs.action_space.sample() if policy is None else policy(obs, rng)
            next_obs, reward, terminated, truncated, infos = envs.step(action)
            rows.append((obs.copy(), action, reward, terminated, truncated))
            final += [infos["final_obs"][i][None] for i in np.flatnonzero(terminated | truncated)]
            obs = next_obs.copy()
        names = ("obs", "action", "reward", "terminated", "truncated")
        piece = dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))
        writer.add({**piece, "final_obs": np.concatenate(final), "after": obs})
    envs.close()
    return Path(folder.name)
