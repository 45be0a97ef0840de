"""Recording what environments side by side show while a script steps them (`--record`, `solo record`)."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from solorl.data.dataset import Writer

MOST_ROWS, MOST_BYTES = 10_000, 2**26  # of a piece: so much a killed process loses


class Recording:
    """A data set that is being recorded. The steps that wait are written where they fill a piece, and by `flush`.

    `writing()` is a context in which a piece is written. It may keep an OSError; then nothing more is written.
    """

    def __init__(self, folder: Path, writing: Callable[[], AbstractContextManager[Any]] = nullcontext):
        self.writer, self._writing = Writer(folder), writing
        self.is_open = self._is_broken = False
        self._steps = 0

    def open(self, about: Mapping[str, Any], spaces: tuple[gym.Space, gym.Space], obs: Any) -> None:
        """Make the folder of the data set, see `Writer.open`. `spaces` are those of the observations and actions of one
        environment, `obs` (num_envs, *obs_shape) the observations before the first step."""
        self.writer.open({**about, "num_envs": len(obs)}, spaces)
        (self.obs_space, action_space), self.is_open = spaces, True
        size = len(obs) * (gym.spaces.flatdim(self.obs_space) * self.obs_space.dtype.itemsize + 64)  # type: ignore[union-attr]
        self._most = max(1, min(MOST_ROWS // len(obs), MOST_BYTES // size))

        def rows(steps: int, shape: Any, dtype: Any) -> np.ndarray:
            return np.empty((steps, len(obs), *shape), dtype)

        self._arrays = {
            "obs": rows(self._most + 1, self.obs_space.shape, self.obs_space.dtype),
            "action": rows(self._most, action_space.shape, action_space.dtype),
            "reward": rows(self._most, (), np.float32),
            "terminated": rows(self._most, (), bool),
            "truncated": rows(self._most, (), bool),
        }
        self.begin(obs)

    def begin(self, obs: Any) -> None:
        """Continue from other observations than those after the last step, as after a reset."""
        self._finals: list[np.ndarray] = []
        self._steps, self._arrays["obs"][0] = 0, obs

    def watch(self, envs: Any) -> None:
        """Record all steps of a vector environment from now on, which resets in the same step."""
        step, reset = envs.step, envs.reset

        def recorded_step(actions: Any) -> Any:
            obs, reward, terminated, truncated, infos = step(actions)
            self.add(actions, reward, terminated, truncated, infos.get("final_obs"), obs)
            return obs, reward, terminated, truncated, infos

        def recorded_reset(**how: Any) -> Any:
            self.flush()
            obs, infos = reset(**how)
            self.begin(obs)
            return obs, infos

        envs.step, envs.reset = recorded_step, recorded_reset

    def add(self, action: Any, reward: Any, terminated: Any, truncated: Any, final_obs: Any, obs: Any) -> None:
        """One step of all environments, arrays (num_envs, ...). Where an episode has ended, its last observation is in
        that row of `final_obs`, and `obs` begins the next one."""
        now = self._steps
        for name, row in zip(self._arrays, (obs, action, reward, terminated, truncated), strict=True):
            self._arrays[name][now + 1 if name == "obs" else now] = row
        for i in np.flatnonzero(self._arrays["terminated"][now] | self._arrays["truncated"][now]):
            self._finals.append(np.array(final_obs[i], self.obs_space.dtype))
        self._steps += 1
        if self._steps == self._most:
            self.flush()

    def flush(self) -> None:
        """Write the steps that wait as a piece, if there are any. OSError, unless `writing` keeps it."""
        if not self._steps:
            return
        count, arrays = self._steps, self._arrays
        piece = {name: rows[:count] for name, rows in arrays.items()}
        piece["final_obs"] = np.array(self._finals, arrays["obs"].dtype).reshape(-1, *arrays["obs"].shape[2:])
        piece["after"] = arrays["obs"][count]
        if not self._is_broken:
            self._is_broken = True
            with self._writing():
                self.writer.add(piece)
                self._is_broken = False
        self.begin(arrays["obs"][count])
