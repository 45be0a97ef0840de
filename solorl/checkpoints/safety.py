"""What a run folder may hold that somebody else has made: nothing in it may write elsewhere, or stop us by surprise."""

import os
import stat
from pathlib import Path
from typing import Any, TypeGuard

from solorl.errors import UsageError

WANDB = ("wandb", ".wandb")  # Weights & Biases links to its newest files there


def refuse_links(folder: Path) -> None:
    """UsageError where a run folder holds a link, a pipe, a socket or a device: who writes there writes elsewhere, who
    reads there may wait for ever. The folder itself may be reached through a link."""

    def unreadable(error: OSError) -> None:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}")

    for where, folders, files in os.walk(folder, onerror=unreadable):
        for path in (Path(where, name) for name in sorted(folders + files)):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:  # another process trains here: `locked` refuses that
                continue
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or _is_of_wandb(path, folder):
                continue
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "a pipe, a socket or a device"
            raise UsageError(f"{path} is {kind}; such a folder may hold plain files and folders only")


def refuse_hard_link(path: Path) -> None:
    """UsageError where a file that is about to be written in place is a file elsewhere, too."""
    if path.exists() and path.stat().st_nlink > 1:
        raise UsageError(f"{path} is a hard link: writing there would change another file; resume a copy of the folder")


def _is_of_wandb(path: Path, folder: Path) -> bool:
    """Whether the path is a link from a folder of Weights & Biases to a place in the same folder."""
    top = folder / path.relative_to(folder).parts[0]
    return top.name in WANDB and path.is_symlink() and path.resolve().is_relative_to(top.resolve())


def is_plain_name(name: Any) -> TypeGuard[str]:
    """Whether `name` is the name of a file or folder, without a path."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", "..") and "\0" not in name


def is_count(value: Any) -> bool:
    """Whether `value` is an integer that is not negative and fits into 64 bits."""
    return type(value) is int and 0 <= value < 2**63


def check_running_episodes(run: dict[str, Any], num_envs: int | None, num_agents: int = 0) -> None:
    """ValueError unless a checkpoint's returns and lengths of running episodes, if it has them, are those of as many
    environments (None: the number is unknown) and agents (0: no axis of agents) as there are."""
    found = [None if run[name] is None else len(run[name]) for name in ("returns", "lengths")]
    if found[0] != found[1] or found[0] not in (None, num_envs or found[0]):
        raise ValueError(f"it has returns of {found[0]} running episodes and lengths of {found[1]}, not of {num_envs}")
    if run["returns"] is not None and run["returns"].shape[1:] != ((num_agents,) if num_agents else ()):
        raise ValueError(f"its returns of running episodes are {run['returns'].shape}, not of {num_agents or 1} agents")
