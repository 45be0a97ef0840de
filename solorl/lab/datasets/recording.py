"""Where data sets come from: environments that `solo record` steps, and the replay buffer that a training has kept."""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np

from solorl.checkpoints.checkpoint import load_checkpoint
from solorl.checkpoints.replay import ReplayLog
from solorl.data.dataset import ARRAYS, Writer, as_flags
from solorl.errors import UsageError, refuse, told
from solorl.runfolder import CHECKPOINTS

MOST_ROWS, MOST_BYTES = 10_000, 2**26  # of a piece: so much a killed process loses
ROWS = ("obs", "action", "reward", "done", "next_obs")  # arrays of a replay buffer of single steps


class Recording:
    """A data set that is being recorded. The steps that wait are written where they fill a piece, and by `flush`."""

    def __init__(self, folder: Path):
        self.writer = Writer(folder)
        self._rows: list[Any] = []  # steps that wait
        self._finals: list[np.ndarray] = []

    def open(self, about: Mapping[str, Any], spaces: tuple[gym.Space, gym.Space], obs: Any) -> None:
        """Make the folder of the data set, see `Writer.open`. `spaces` are those of the observations and actions of one
        environment, `obs` (num_envs, *obs_shape) the observations before the first step."""
        self.writer.open({**about, "num_envs": len(obs)}, spaces)
        self._types = [*(space.dtype for space in spaces), np.dtype(np.float32), np.dtype(bool), np.dtype(bool)]
        self._obs = np.array(obs, spaces[0].dtype)
        size = self._obs.nbytes + 64 * len(obs)  # of a step
        self._most = max(1, min(MOST_ROWS // len(obs), MOST_BYTES // size))  # steps of a piece

    def add(self, action: Any, reward: Any, terminated: Any, truncated: Any, final_obs: Any, obs: Any) -> None:
        """One step of all environments, arrays (num_envs, ...). Where an episode has ended, its last observation is in
        that row of `final_obs`, and `obs` begins the next one."""
        self._rows.append(list(map(np.array, (self._obs, action, reward, terminated, truncated), self._types)))
        ends = np.flatnonzero(self._rows[-1][3] | self._rows[-1][4])
        self._finals += [np.array(final_obs[i], self._obs.dtype) for i in ends]
        self._obs = np.array(obs, self._obs.dtype)
        if len(self._rows) == self._most:
            self.flush()

    def flush(self) -> None:
        """Write the steps that wait as a piece, if there are any. OSError."""
        if self._rows:
            piece = dict(zip(ARRAYS, map(np.stack, zip(*self._rows, strict=True)), strict=False))
            final_obs = np.array(self._finals, self._obs.dtype).reshape(-1, *self._obs.shape[1:])
            self.writer.add({**piece, "final_obs": final_obs, "after": self._obs})
            self._rows, self._finals = [], []


# ---------------------------------------------------------------------- the replay buffer of a run
def replayed(run_dir: Path, args: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """All transitions of a training, from the replay buffer of its newest checkpoint: arrays (steps, num_envs, ...) by
    the names of ROWS. `args` are those of the run. UsageError where the buffer does not hold each step of it."""
    where, buffer = f"the checkpoint in {run_dir}", f"the replay buffer of {run_dir}"
    tree, notes = load_checkpoint(run_dir / CHECKPOINTS)
    if tree is None:
        raise UsageError(f"{run_dir} has no whole checkpoint{': ' * bool(notes)}{'; '.join(notes)}")
    with told(f"{where} does not fit", str):
        steps, num_envs = tree["run"]["step"], int(args.get("num_envs", 1))
        if not tree["replay"]:
            raise UsageError(f"{where} holds no replay buffer: files in torch that have one keep it with --save-replay")
        [(name, saved), *others] = tree["replay"].items()
        log, segments = ReplayLog(run_dir / "replay" / name), saved["segments"]
        arrays = log.arrays(saved) if Path(name).name == name and segments else {}
        if others or arrays.keys() != {*ROWS} or "envs" not in tree["parts"]:
            raise UsageError(f"{buffer} does not hold single steps of its environments, as those of dqn and SAC do")
        inserted = saved["inserted"]
        kept = min(inserted, int(args.get("buffer_size", inserted)), inserted - segments[0]["start"])
        how = "it holds all with --save-replay from the start and a --buffer-size that large"
        lacks = kept < steps or inserted != steps or steps % num_envs
        refuse(lacks, f"{buffer} holds {kept:,} of {steps:,} steps: {how}")
        log.load(SimpleNamespace(arrays=arrays, inserted=0, state=saved.get("state", {})), saved)
        return {key: rows.reshape(-1, num_envs, *rows.shape[1:]) for key, rows in arrays.items()}


def record_replayed(rows: Mapping[str, np.ndarray], recording: Recording, about: Mapping[str, Any], env: Any) -> None:
    """Record what `replayed` has returned of an environment. A buffer knows `terminated` only: an episode that does not
    continue with the next row of its environment has come to a limit. OSError; ValueError where the rows do not fit."""
    spaces = env.observation_space, env.action_space
    shape: Any = (*rows["reward"].shape, *(spaces[0].shape or ()))
    obs, next_obs = (rows[name].reshape(shape) for name in ("obs", "next_obs"))
    large = spaces[0].dtype.kind in "iu" and np.abs(obs).max() >= 2**24
    refuse(large, "observations of 2**24 and more are rounded in a replay buffer; solo record has them as they are")
    terminated = as_flags(rows["done"], "done")
    other = (rows["next_obs"][:-1] != rows["obs"][1:]).any(-1)
    truncated = np.concatenate([other, np.zeros_like(terminated[:1])]) & ~terminated
    recording.open(about, spaces, obs[0])
    after = chain(obs[1:], next_obs[-1:])
    for step in zip(rows["action"], rows["reward"], terminated, truncated, next_obs, after, strict=True):
        recording.add(*step)
    recording.flush()
