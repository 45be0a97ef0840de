"""Data sets: what environments showed while a policy acted, in folders that NumPy alone can read.

A folder has `dataset.json`, which names its pieces in their order, and a file of NumPy for each piece (`.npz`) with the
arrays below, where `steps` differs from piece to piece. An episode may go on in the next piece.

    obs (steps, num_envs, *obs_shape), action (steps, num_envs, ...), reward, terminated, truncated (steps, num_envs)
    final_obs (ends, *obs_shape): the last observations of the episodes that end here, by step, then by environment
    after (num_envs, *obs_shape): the observations after the last step, with which the next piece begins
"""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from solorl.checkpoints.safety import is_plain_name
from solorl.errors import UsageError
from solorl.files import read_json, sha256, write, write_atomically

FORMAT = 1
ABOUT = "dataset.json"
ARRAYS = ("obs", "action", "reward", "terminated", "truncated", "final_obs", "after")


def described(space: gym.Space) -> dict[str, Any]:
    """A `Box` or `Discrete` space as JSON can hold it; UsageError for another one."""
    if isinstance(space, gym.spaces.Box):
        bounds = {"low": space.low.ravel().tolist(), "high": space.high.ravel().tolist()}
        if space.dtype == np.uint8:
            bounds = {}
        return {"kind": "Box", "shape": list(space.shape), "dtype": str(space.dtype), **bounds}
    if isinstance(space, gym.spaces.Discrete) and space.start == 0:
        return {"kind": "Discrete", "n": int(space.n)}
    raise UsageError(f"{space} cannot be recorded; allowed are Box, and Discrete from 0")


@dataclass(frozen=True)
class Dataset:
    """Transitions of one or several folders: those of an episode follow each other, in their order."""

    obs: np.ndarray  # (n, *obs_shape)
    action: np.ndarray  # (n, *action_shape), integers (n,) if discrete
    reward: np.ndarray  # (n,) float32
    terminated: np.ndarray  # (n,) bool, the end of the task
    truncated: np.ndarray  # (n,) bool, a time limit, or the end of the recording
    next_obs: np.ndarray  # (n, *obs_shape), at the end of an episode its last observation
    episode: np.ndarray  # (n,) int64, the number of the episode, counted from 0

    def __len__(self) -> int:
        return len(self.reward)

    def returns(self) -> np.ndarray:
        """The undiscounted return of each episode (episodes,)."""
        return np.bincount(self.episode, self.reward.astype(np.float64))


class Writer:
    """Writes a data set, a piece at a time, each whole or not at all.

    `about` describes it: `env_id`, `observation_space` and `action_space` (see `described`), `num_envs`, `policy`, ...
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]):
        self.folder, self.about = folder, {"format": FORMAT, **about, "pieces": []}

    def add(self, piece: Mapping[str, np.ndarray]) -> None:
        """Write the arrays of a piece (see the module), then the list that names it; UsageError if that fails."""
        name = f"{len(self.about['pieces']):06}.npz"
        data = io.BytesIO()
        save: Any = np.savez_compressed if piece["obs"].dtype == np.uint8 else np.savez
        save(data, **{key: piece[key] for key in ARRAYS})
        write(self.folder / name, data.getvalue())
        rows, digest = int(piece["reward"].size), sha256(self.folder / name)
        self.about["pieces"].append({"file": name, "transitions": rows, "sha256": digest})
        write_atomically(self.folder / ABOUT, json.dumps(self.about, indent=1).encode())


def read_about(folder: Path) -> dict[str, Any]:
    """The description of a data set; UsageError where there is none, or one that this version cannot read."""
    if not (about := read_json(folder / ABOUT)):
        raise UsageError(f"{folder} is no data set: it has no {ABOUT} that can be read")
    if about.get("format") != FORMAT:
        raise UsageError(f"{folder} has format {about.get('format')}; this version reads format {FORMAT}")
    pieces = about.get("pieces")
    if not isinstance(pieces, list) or not all(
        isinstance(each, dict) and is_plain_name(each.get("file")) for each in pieces
    ):
        raise UsageError(f"{folder / ABOUT} is damaged: its list of pieces cannot be read")
    if not pieces:
        raise UsageError(f"{folder} is an empty data set")
    return about


def _read_piece(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in ARRAYS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def read(folder: Path) -> Dataset:
    """The transitions of one folder; UsageError, with one sentence, where it is none or is damaged."""
    pieces = [_read_piece(folder / each["file"]) for each in read_about(folder)["pieces"]]
    try:
        return _joined(pieces)
    except (ValueError, IndexError) as error:
        raise UsageError(f"the pieces of {folder} do not fit: {' '.join(str(error).split())}") from None


def _joined(pieces: Sequence[Mapping[str, np.ndarray]]) -> Dataset:
    """The transitions of the pieces of one folder, all of the first environment before those of the second."""
    arrays = {key: np.concatenate([piece[key] for piece in pieces]) for key in ARRAYS[:-1]}
    obs, done = arrays["obs"], arrays["terminated"] | arrays["truncated"]
    next_obs = np.concatenate([obs[1:], pieces[-1]["after"][None]])
    next_obs[done] = arrays["final_obs"]  # both by step, then by environment
    truncated = arrays["truncated"].copy()
    truncated[-1] |= ~done[-1]  # the recording ended
    ends = (truncated | arrays["terminated"]).swapaxes(0, 1).ravel()

    def flat(array: np.ndarray) -> np.ndarray:
        return array.swapaxes(0, 1).reshape(-1, *array.shape[2:])

    return Dataset(
        obs=flat(obs),
        action=flat(arrays["action"]),
        reward=flat(arrays["reward"]).astype(np.float32),
        terminated=flat(arrays["terminated"]),
        truncated=flat(truncated),
        next_obs=flat(next_obs),
        episode=np.cumsum(ends) - ends,
    )


def merged(parts: Sequence[Dataset]) -> Dataset:
    """One data set with the episodes of all, in their order."""
    names = ("obs", "action", "reward", "terminated", "truncated", "next_obs")
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    ends = arrays["terminated"] | arrays["truncated"]
    return Dataset(**arrays, episode=np.cumsum(ends) - ends)


def open_datasets(folders: str, env_id: str, envs: Any, empty: bool = False) -> Dataset:
    """The data sets of folders, separated by commas, as one, for a training on `envs`; with `empty` a data set of the
    same shapes without transitions. UsageError unless each is of the environment and of its spaces."""
    spaces = (envs.single_observation_space, envs.single_action_space)
    if empty:
        obs, action = (np.empty((0, *space.shape), space.dtype) for space in spaces)
        nothing = np.empty(0, bool)
        return Dataset(obs, action, np.empty(0, np.float32), nothing, nothing, obs, np.empty(0, np.int64))
    if not folders:
        raise UsageError("--dataset must name a data set, made with --record or by solo record")
    paths = [Path(folder).expanduser() for folder in folders.split(",")]
    for path in paths:
        about = read_about(path)
        if about.get("env_id") != env_id:
            raise UsageError(f"{path} is of {about.get('env_id')}: --env-id {about.get('env_id')}")
        for key, space in zip(("observation_space", "action_space"), spaces, strict=True):
            if about.get(key) != described(space):
                raise UsageError(f"{path} has the {key.replace('_', ' ')} {about.get(key)}, {env_id} has {space}")
    return merged([read(path) for path in paths])
