"""Data sets: what environments showed while a policy acted, in folders that NumPy alone can read.

A folder has `dataset.json`, which names its pieces in their order, and a file of NumPy for each piece (`.npz`) with the
arrays below, where `steps` differs from piece to piece. An episode continues in the next piece where that begins with
the observation `after` this one; else it was cut.

    obs (steps, num_envs, *obs_shape), action (steps, num_envs, ...), reward, terminated, truncated (steps, num_envs)
    final_obs (ends, *obs_shape): the last observations of the episodes that end here, by step, then by environment
    after (num_envs, *obs_shape): the observations after the last step, with which the next piece begins
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from solorl.checkpoints.safety import is_plain_name
from solorl.errors import UsageError
from solorl.files import read_json, write_atomically

FORMAT = 1
ABOUT = "dataset.json"
SPACES = ("observation_space", "action_space")
ARRAYS = ("obs", "action", "reward", "terminated", "truncated", "final_obs", "after")


def described(space: gym.Space) -> dict[str, Any]:
    """A `Box` or `Discrete` space as JSON can hold it; UsageError for another one."""
    if isinstance(space, gym.spaces.Box):
        names = () if space.dtype == np.uint8 else ("low", "high")
        bounds = {name: getattr(space, name).ravel().tolist() for name in names}
        return {"kind": "Box", "shape": list(space.shape), "dtype": str(space.dtype), **bounds}
    if isinstance(space, gym.spaces.Discrete) and space.start == 0:
        return {"kind": "Discrete", "n": int(space.n)}
    raise UsageError(f"{space} cannot be recorded; allowed are Box, and Discrete from 0")


def space_of(text: Mapping[str, Any]) -> gym.Space:
    """The space that `described` has described."""
    if text["kind"] == "Discrete":
        return gym.spaces.Discrete(text["n"])
    dtype, shape = np.dtype(text["dtype"]), tuple(text["shape"])
    if "low" not in text:
        return gym.spaces.Box(0, 255, shape, np.uint8)
    low, high = (np.array(text[key], dtype).reshape(shape) for key in ("low", "high"))
    return gym.spaces.Box(low, high, dtype=dtype.type)


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
    cut: np.ndarray = field(default_factory=lambda: np.empty(0, bool))  # (episodes,), the recording ended before it did

    def __len__(self) -> int:
        return len(self.reward)

    def returns(self) -> np.ndarray:
        """The undiscounted return of each episode (episodes,)."""
        return np.bincount(self.episode, self.reward.astype(np.float64))

    def whole_returns(self) -> np.ndarray:
        """The returns of the episodes that were not cut; UsageError where there is none."""
        if self.cut.all():
            raise UsageError("the data set has no whole episode")
        return self.returns()[~self.cut]


class Writer:
    """Writes a data set into a folder, a piece at a time, each whole or not at all."""

    def __init__(self, folder: Path):
        self.folder, self._kept = folder, 0
        self.about: dict[str, Any] = {}

    def check(self, run: str = "", kept: int = 0) -> None:
        """UsageError where the folder has a data set already, unless that is of `run`, which continues after its first
        `kept` pieces."""
        there = read_json(self.folder / ABOUT)
        if (self.folder / ABOUT).exists() and (not run or there.get("run") != run):
            raise UsageError(f"{self.folder} has a data set already; name another folder, or delete it")
        if len(there.get("pieces", ())) < kept:
            raise UsageError(f"{self.folder} lacks what this run has recorded before it was stopped")
        self._kept = kept

    def open(self, about: Mapping[str, Any], spaces: tuple[gym.Space, gym.Space]) -> None:
        """Make the folder, and delete the pieces that `check` was not told to keep. `about` describes the data:
        `env_id`, `policy`, ...; `spaces`: see `described`. UsageError where nothing can be written."""
        kept = read_json(self.folder / ABOUT).get("pieces", [])[: self._kept]
        described_spaces = {key: described(space) for key, space in zip(SPACES, spaces, strict=True)}
        self.about = {"format": FORMAT, **about, **described_spaces, "pieces": kept}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob("[0-9]*.npz"):
                if path.name not in [each["file"] for each in kept]:
                    path.unlink()
            self._write_about()
        except OSError as error:
            raise UsageError(f"{self.folder} cannot be written: {error.strerror}") from None

    def add(self, piece: Mapping[str, np.ndarray]) -> None:
        """Write the arrays of a piece (see the module), then the list that names it. OSError."""
        name = f"{len(self.about['pieces']):06}.npz"
        data = io.BytesIO()
        save: Any = np.savez_compressed if piece["obs"].dtype == np.uint8 else np.savez
        save(data, **{key: piece[key] for key in ARRAYS})
        write_atomically(self.folder / name, data.getvalue())
        rows, digest = int(piece["reward"].size), hashlib.sha256(data.getvalue()).hexdigest()
        self.about["pieces"].append({"file": name, "transitions": rows, "sha256": digest})
        self._write_about()

    def _write_about(self) -> None:
        write_atomically(self.folder / ABOUT, json.dumps(self.about, indent=1).encode())


def read_about(folder: Path) -> dict[str, Any]:
    """The description of a data set; UsageError where there is none, or one that this version cannot read."""
    if not (about := read_json(folder / ABOUT)):
        raise UsageError(f"{folder} is not a data set: it has no {ABOUT} that can be read")
    if about.get("format") != FORMAT:
        raise UsageError(f"{folder} has format {about.get('format')}; this version reads format {FORMAT}")
    pieces = about.get("pieces")
    named = isinstance(pieces, list) and all(isinstance(p, dict) and is_plain_name(p.get("file")) for p in pieces)
    if not named:
        raise UsageError(f"{folder / ABOUT} is damaged: its list of pieces cannot be read")
    if not pieces:
        raise UsageError(f"{folder} is an empty data set")
    return about


def digest(about: Mapping[str, Any]) -> str:
    """The SHA-256 of those of all pieces of a data set, in their order."""
    return hashlib.sha256("".join(str(piece["sha256"]) for piece in about["pieces"]).encode()).hexdigest()


def _read_piece(path: Path, digest: Any) -> dict[str, np.ndarray]:
    try:
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError("it is damaged")
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            return {key: file[key] for key in ARRAYS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        what = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise UsageError(f"{path} cannot be read: {what}") from None


def read(folder: Path) -> Dataset:
    """The transitions of one folder; UsageError, with one sentence, where it is none or is damaged."""
    pieces = [_read_piece(folder / each["file"], each.get("sha256")) for each in read_about(folder)["pieces"]]
    try:
        return _joined(pieces)
    except (ValueError, IndexError) as error:
        raise UsageError(f"the pieces of {folder} do not fit: {' '.join(str(error).split())}") from None


def _joined(pieces: Sequence[Mapping[str, np.ndarray]]) -> Dataset:
    """The transitions of the pieces of one folder, all of the first environment before those of the second."""
    arrays = {key: np.concatenate([piece[key] for piece in pieces]) for key in ARRAYS[:-1]}
    obs, done, truncated = arrays["obs"], arrays["terminated"] | arrays["truncated"], arrays["truncated"].copy()
    next_obs = np.concatenate([each for piece in pieces for each in (piece["obs"][1:], piece["after"][None])])
    last = np.cumsum([len(piece["reward"]) for piece in pieces]) - 1  # the last step of each piece
    goes_on = np.zeros((len(pieces), obs.shape[1]), bool)
    same = next_obs[last[:-1]] == obs[last[:-1] + 1]
    goes_on[:-1] = same.all(tuple(range(2, obs.ndim)))
    truncated[last] |= ~goes_on & ~done[last]
    next_obs[done] = arrays["final_obs"]  # both by step, then by environment
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
        cut=flat(truncated & ~arrays["truncated"])[ends],
    )


def merged(parts: Sequence[Dataset]) -> Dataset:
    """One data set with the episodes of all, in their order."""
    names = ("obs", "action", "reward", "terminated", "truncated", "next_obs", "cut")
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
        for key, space in zip(SPACES, spaces, strict=True):
            if about.get(key) != described(space):
                raise UsageError(f"{path} has the {key.replace('_', ' ')} {about.get(key)}, {env_id} has {space}")
    parts = [read(path) for path in paths]
    return merged(parts) if len(parts) > 1 else parts[0]
