"""Data sets: what environments showed while a policy acted, in folders that NumPy alone can read.

A folder has `dataset.json`, which names its pieces in their order, and a file of NumPy for each piece (`.npz`) with the
arrays below, where `steps` differs from piece to piece. An episode continues in the next piece where that begins with
the observation `after` this one; else it was cut.

    obs (steps, num_envs, *obs_shape), action (steps, num_envs, ...), reward, terminated, truncated (steps, num_envs)
    final_obs (ends, *obs_shape): the last observations of the episodes that end here, by step, then by environment
    after (num_envs, *obs_shape): the observations after the last step, with which the next piece begins
    cut (steps, num_envs), which may be missing: which of the truncated steps end the recording and not the episode

A folder may be anybody's: sizes and types are looked at before the data.
"""

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from solorl import machine
from solorl.envs.spaces import bare_action_space
from solorl.errors import UsageError, denied, fitting, reason, refuse, told
from solorl.files import expanded, is_plain_name, read_json, read_regular, write_atomically
from solorl.trust import refuse_links

FORMAT = 1
ABOUT = "dataset.json"
SPACES = ("observation_space", "action_space")
ARRAYS = ("obs", "action", "reward", "terminated", "truncated", "final_obs", "after")
MOST_ABOUT = 2**24  # bytes of the description
MOST_NUMBERS = 2**24  # of one observation or action
HEADERS = 2**16  # bytes of a piece that are not in its arrays
FLAGS = ("terminated", "truncated", "cut")
NUMBERS = "biuf"  # kinds of types: bool, integers, floating-point numbers


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
    """The space that `described` has described. ValueError and others where it was not `described`."""
    if text["kind"] == "Discrete":
        return gym.spaces.Discrete(text["n"])
    dtype, shape = np.dtype(text["dtype"]), tuple(text["shape"])
    if dtype.kind not in NUMBERS or not all(map(is_count, shape)) or math.prod(shape) > MOST_NUMBERS:
        raise ValueError(f"{shape!s:.80} of type {dtype!s:.20} cannot be")
    if "low" not in text:
        return gym.spaces.Box(0, 255, shape, np.uint8)
    low, high = (np.array(text[key], dtype).reshape(shape) for key in ("low", "high"))
    return gym.spaces.Box(low, high, dtype=dtype.type)


def is_count(value: Any) -> bool:
    """Whether `value` is an integer that is not negative and fits into 64 bits."""
    return type(value) is int and 0 <= value < 2**63


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
    sha256: Any = field(default_factory=list)  # the `digest` of each folder

    def __len__(self) -> int:
        return len(self.reward)

    def returns(self) -> np.ndarray:
        """The undiscounted return of each episode (episodes,)."""
        return np.bincount(self.episode, self.reward.astype(np.float64))

    def whole_returns(self) -> np.ndarray:
        """The returns of the episodes that were not cut; there may be none."""
        return self.returns()[~self.cut]


class Writer:
    """Writes a data set into a folder of its own, a piece at a time, each whole or not at all. Deletes nothing."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.about: dict[str, Any] = {}

    def check(self) -> None:
        """UsageError where something is in the folder already."""
        with told(f"{self.folder} cannot be read"):
            what = "has a data set already" if (self.folder / ABOUT).exists() else "is not empty"
            full = self.folder.is_dir() and any(self.folder.iterdir())
            refuse(full, f"{self.folder} {what}; name another folder, or delete it")

    def open(self, about: Mapping[str, Any], spaces: tuple[gym.Space, gym.Space]) -> None:
        """Make the folder. `about` describes the data: `env_id`, `policy`, `num_envs`, ...; `spaces`: see `described`.
        UsageError where something is there already, or nothing can be written."""
        self.check()
        described_spaces = {key: described(space) for key, space in zip(SPACES, spaces, strict=True)}
        self.about = {"format": FORMAT, **about, **described_spaces, "pieces": []}
        with denied(f"{self.folder} cannot be written"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_about()

    def add(self, piece: Mapping[str, np.ndarray]) -> None:
        """Write the arrays of a piece (see the module), then the list that names it. OSError."""
        name = f"{len(self.about['pieces']):06}.npz"
        data = io.BytesIO()
        save: Any = np.savez_compressed if piece["obs"].dtype == np.uint8 else np.savez
        save(data, **piece)
        write_atomically(self.folder / name, data.getvalue())
        rows, digest = int(piece["reward"].size), hashlib.sha256(data.getvalue()).hexdigest()
        self.about["pieces"].append({"file": name, "transitions": rows, "sha256": digest})
        self._write_about()

    def _write_about(self) -> None:
        write_atomically(self.folder / ABOUT, json.dumps(self.about, indent=1).encode())


def read_about(folder: Path) -> dict[str, Any]:
    """The description of a data set; UsageError where there is none, or one that this version cannot read."""
    if folder.is_dir():
        refuse_links(folder)
    if not (about := read_json(folder / ABOUT, MOST_ABOUT)):
        raise UsageError(f"{folder} is not a data set: it has no {ABOUT} that can be read")
    found, pieces = about.get("format"), about.get("pieces")
    refuse(found != FORMAT, f"{folder} has format {found!r:.40}; this version reads format {FORMAT}")
    named = isinstance(pieces, list) and all(isinstance(p, dict) and is_plain_name(p.get("file")) for p in pieces)
    if not named or not all(map(is_count, (about.get("num_envs"), *(p.get("transitions") for p in pieces)))):  # type: ignore[union-attr]
        raise UsageError(f"{folder / ABOUT} is damaged: its list of pieces cannot be read")
    refuse(not pieces or not about["num_envs"], f"{folder} is an empty data set")
    return about


def digest(about: Mapping[str, Any]) -> str:
    """The SHA-256 of those of all pieces of a data set, in their order."""
    return hashlib.sha256("".join(str(piece["sha256"]) for piece in about["pieces"]).encode()).hexdigest()


def unpacked(data: bytes, most: int, kinds: str = NUMBERS) -> dict[str, np.ndarray]:
    """The arrays of a file of NumPy (`.npz`), which may be anybody's. ValueError, or what zipfile and NumPy raise,
    unless they have at most `most` bytes together and types of `kinds`."""
    with np.load(io.BytesIO(data)) as file:  # it executes nothing, and reads what the list of the file says, no more
        if sum(member.file_size for member in file.zip.infolist()) > most + HEADERS:
            raise ValueError(f"it unpacks to more than {most:,} bytes")
        try:
            arrays = dict(file)
        except MemoryError as error:  # a header lies
            raise ValueError(str(error)) from None
    for name, array in arrays.items():
        if array.dtype.kind not in kinds:
            raise ValueError(f"{name} of type {array.dtype} and shape {array.shape!s:.80} is not allowed")
    return arrays


def as_flags(values: Any, name: str) -> np.ndarray:
    """Flags of any type of numbers as booleans; ValueError where one is neither 0 nor 1."""
    values = np.asarray(values)
    if values.dtype.kind not in NUMBERS or not np.isin(values, (0, 1)).all():
        raise ValueError(f"{name} must be 0 or 1")
    return values != 0


def read(folder: Path) -> Dataset:
    """The transitions of one folder; UsageError, with one sentence, where it is none, is damaged, or holds numbers that
    cannot be learned from."""
    about = read_about(folder)
    with fitting(str(folder / ABOUT)):
        spaces = [space_of(about[key]) for key in SPACES]
        size, action_size = (math.prod(space.shape) * space.dtype.itemsize for space in spaces)  # type: ignore
    # per transition: two observations (one in final_obs), an action, a reward and three flags; and `after`
    most = [each["transitions"] * (2 * size + action_size + 32) + about["num_envs"] * size for each in about["pieces"]]
    needed, there = sum(most) / 2**30, machine.memory() / 2**30
    refuse(needed > there, f"{folder} needs {needed:,.1f} GiB of memory, but there are {there:,.1f}")
    pieces = [_read_piece(folder, about, *each, *spaces) for each in zip(about["pieces"], most, strict=True)]
    with told(f"the pieces of {folder} do not fit"):
        data = replace(_joined(pieces), sha256=[digest(about)])
    _check_numbers(data, folder, spaces[1])
    return data


def _read_piece(folder: Path, about: Any, listed: Any, most: int, *spaces: Any) -> dict[str, np.ndarray]:
    path, num_envs = folder / listed["file"], about["num_envs"]
    with told(f"{path} cannot be read", lambda error: str(getattr(error, "strerror", None) or reason(error))):
        data = read_regular(path, int(1.1 * most) + HEADERS)
        if hashlib.sha256(data).hexdigest() != listed.get("sha256"):
            raise ValueError("it is damaged")
        row, (obs, action) = (listed["transitions"] // num_envs, num_envs), (space.shape for space in spaces)
        piece = {"cut": np.zeros(row, bool), **unpacked(data, int(1.1 * most))}
        piece |= {name: as_flags(piece.get(name), name) for name in FLAGS}
        shapes = {**dict.fromkeys(FLAGS, row), "reward": row, "obs": (*row, *obs), "action": (*row, *action)}
        ends = int((piece["terminated"] | piece["truncated"]).sum())
        for name, shape in (shapes | {"after": (num_envs, *obs), "final_obs": (ends, *obs)}).items():
            if name not in piece or piece[name].shape != shape:
                raise ValueError(f"{name} has the shape {getattr(piece.get(name), 'shape', None)}, not {shape}")
        return piece


def _check_numbers(data: Dataset, folder: Path, space: Any) -> None:
    """UsageError where a reward or an observation is not finite, or an action does not lie in its space."""
    good = {name: np.isfinite(getattr(data, name)) for name in ("reward", "obs", "next_obs", "action")}
    if isinstance(space, gym.spaces.Discrete):
        good["action"] = (data.action >= 0) & (data.action < space.n) & (data.action % 1 == 0)
    else:
        bounds, rounding = (space.low, space.high), 1e-5 * (space.dtype.kind == "f")
        low, high = (rounding * np.where(np.isfinite(x), np.maximum(1, np.abs(x)), 0) for x in bounds)
        good["action"] &= (data.action >= space.low - low) & (data.action <= space.high + high)
    for name, each in good.items():
        if not (rows := each.reshape(len(data), -1).all(1)).all():
            row, why = int(np.argmin(rows)), f"in {space}" if name == "action" else "finite"
            what = f"{name.replace('_', ' ')} {getattr(data, name)[row]!s:.60} of transition {row:,} is not {why}"
            raise UsageError(f"{folder}: {what} ({(~rows).sum():,} such transitions of {len(data):,})")


def _joined(pieces: Sequence[Mapping[str, np.ndarray]]) -> Dataset:
    """The transitions of the pieces of one folder, all of the first environment before those of the second."""
    arrays = {key: np.concatenate([piece[key] for piece in pieces]) for key in (*ARRAYS[:-1], "cut")}
    obs, done, truncated = arrays["obs"], arrays["terminated"] | arrays["truncated"], arrays["truncated"].copy()
    next_obs = np.concatenate([each for piece in pieces for each in (piece["obs"][1:], piece["after"][None])])
    last = np.cumsum([len(piece["reward"]) for piece in pieces]) - 1  # the last step of each piece
    goes_on = np.zeros((len(pieces), obs.shape[1]), bool)
    goes_on[:-1] = (next_obs[last[:-1]] == obs[last[:-1] + 1]).all(tuple(range(2, obs.ndim)))
    truncated[last] |= ~goes_on & ~done[last]
    next_obs[done] = arrays["final_obs"]  # both by step, then by environment
    ends = (truncated | arrays["terminated"]).swapaxes(0, 1).ravel()

    def flat(array: np.ndarray) -> np.ndarray:
        return array.swapaxes(0, 1).reshape(-1, *array.shape[2:])

    cut = flat(truncated & ~arrays["truncated"] | arrays["cut"])[ends]
    columns = (obs, arrays["action"], arrays["reward"].astype(np.float32), arrays["terminated"], truncated, next_obs)
    return Dataset(*map(flat, columns), np.cumsum(ends) - ends, cut)  # type: ignore[call-arg]


def merged(parts: Sequence[Dataset]) -> Dataset:
    """One data set with the episodes of all, in their order."""
    arrays = {x: np.concatenate([getattr(part, x) for part in parts]) for x in (*ARRAYS[:5], "next_obs", "cut")}
    ends = arrays["terminated"] | arrays["truncated"]
    return Dataset(**arrays, episode=np.cumsum(ends) - ends, sha256=[x for part in parts for x in part.sha256])


def open_datasets(folders: str, env_id: str, envs: Any, empty: bool = False) -> Dataset:
    """The data sets of folders, separated by commas, as one, for a training on `envs`; with `empty` a data set of the
    same shapes without transitions. UsageError unless each is of the environment and of its spaces."""
    if empty:
        spaces = (envs.single_observation_space, envs.single_action_space)
        obs, action = (np.empty((0, *space.shape), space.dtype) for space in spaces)
        return Dataset(obs, action, np.empty(0, np.float32), *np.empty((2, 0), bool), obs, np.empty(0, np.int64))  # type: ignore[call-arg]
    refuse(not folders, "--dataset must name a data set, made by solo record or solo dataset")
    parts = [_fitted(path, env_id, envs) for path in map(expanded, folders.split(","))]
    return merged(parts) if len(parts) > 1 else parts[0]


def _fitted(path: Path, env_id: str, envs: Any) -> Dataset:
    """One data set for a training on `envs`; its actions in the bounds of `envs`, if it has those of the environment
    without the wrappers of `make_env`. UsageError where it is of another environment or of other spaces."""
    about, (obs, ours) = read_about(path), (envs.single_observation_space, envs.single_action_space)
    theirs = str(about.get("env_id") or "")  # a data set from elsewhere may not say it
    if theirs and theirs.rpartition(":")[2] != env_id.rpartition(":")[2]:  # of `module:Name` it may know the name only
        raise UsageError(f"{path} is of {theirs}: --env-id {theirs}")
    bare, actions = bare_action_space(envs), about.get("action_space")
    boxes = isinstance(bare, gym.spaces.Box) and bare.shape == ours.shape and bare.is_bounded() and ours.is_bounded()
    scaled = boxes and described(bare) == actions != described(ours)
    for name, space in (("observation", obs), ("action", bare if scaled else ours)):
        if (found := about.get(f"{name}_space")) != described(space):
            note = "; its actions must be in these bounds, or in those of the environment itself" * (name == "action")
            raise UsageError(f"{path} has the {name} space {found!s:.300}, {env_id} has {space}{note}")
    data = read(path)
    if not scaled:  # types are those of the space, whatever the pieces have
        return replace(data, action=data.action.astype(ours.dtype, copy=False))
    low, high, to, end = (x.astype(np.float64) for space in (bare, ours) for x in (space.low, space.high))
    share = np.clip((data.action - low) / np.where(high > low, high - low, 1), 0, 1)
    return replace(data, action=(to + share * (end - to)).astype(ours.dtype))
