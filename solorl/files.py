"""Writing files for the verbs: whole or not at all, and every failure one sentence; and reading JSON and digests."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from solorl.errors import UsageError, denied, did_you_mean, refuse
from solorl.machine import process_start


def near(path: Path) -> str:
    """The path as one would type it here: relative where it lies below the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path)


def expanded(name: str) -> Path:
    """The path of a name, `~` and `~user` replaced by the home folder where there is such a user."""
    return Path(os.path.expanduser(name))  # noqa: PTH111  Path.expanduser raises RuntimeError where there is none


DAY = 86_400.0  # seconds
MOST_JSON = 2**28  # bytes of a file of JSON


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, keeping the permissions of one it replaces; UsageError if that fails."""
    path = path.resolve()  # a link keeps pointing to the file
    with denied(f"{path} cannot be written"):
        refuse(not path.parent.exists(), f"the folder {path.parent} does not exist")
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
        write_atomically(path, data)
        if mode is not None:
            path.chmod(mode)


def shown(path: Path) -> str:
    """`near` of a path whose links are followed."""
    return near(path.resolve())


def missing(what: str, path: Path, pattern: str = "*") -> UsageError:
    """The error that a path does not exist, with the nearest name next to it of those that fit to a pattern."""
    names = [one.name for one in path.parent.glob(pattern) if one.name != path.name]  # it may be of another kind
    return UsageError(f"there is no {what} {path}{did_you_mean(path.name, names)}")


def sync_file(path: Path) -> None:
    """Wait until the file's (or folder's) contents are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old contents or the new ones and nothing between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)  # it may be a link
        temporary.write_bytes(data)
        sync_file(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_old(folder: Path, pattern: str) -> None:
    """Delete what killed processes have left below a folder: what has such a name, and has not changed for a day."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # it goes, or is somebody else's
            if time.time() - max(each.lstat().st_mtime for each in [path, *path.rglob("*")]) > DAY:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def remove_leftovers(folder: Path) -> None:
    """Delete what killed processes have left of `write_atomically` in a folder."""
    for path in folder.glob(".*"):
        match = re.fullmatch(r"\..+\.(\d+)", path.name)
        if match and process_start(int(match[1])) is None and not path.is_dir():
            path.unlink(missing_ok=True)


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a file that may be anybody's. OSError for what is not a regular file, as a pipe or a device, which
    might never end, and where it has more than `most` bytes."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most / 2**20:,.4g} MiB")
    return data


def read_json(path: Path, most: int = MOST_JSON) -> dict[str, Any]:
    """The object in a JSON file of at most `most` bytes; empty where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_regular(path, most))
        return content if isinstance(content, dict) else {}
    return {}


def filled(template: Path, parts: Mapping[str, str]) -> str:
    """The text of a template with its {{NAMES}} replaced, once: what a part says is never a name."""
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], template.read_text(encoding="utf-8"))


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def git(place: Path, *words: str, given: str = "") -> bytes:
    """What git prints in a folder, given a text to read; UsageError with its last line where it fails."""
    try:
        command = ["git", "-C", str(place), *words]
        return subprocess.run(command, input=given.encode(), capture_output=True, check=True, timeout=20).stdout
    except FileNotFoundError:
        raise UsageError("this needs git, which is not installed") from None
    except subprocess.SubprocessError as error:
        reason = (getattr(error, "stderr", None) or b"git failed").decode(errors="replace").strip().splitlines()
        raise UsageError(f"{place}: {reason[-1]}") from None


def git_state(folder: Path, *paths: str) -> dict[str, Any] | None:
    """Commit of the repository around `folder` and whether its files (of some `paths`) differ from it; None outside a
    repository."""
    with contextlib.suppress(UsageError):
        commit = git(folder, "rev-parse", "HEAD").decode().strip()
        return {"commit": commit, "dirty": bool(git(folder, "status", "--porcelain", "--", *paths))}
    return None


def is_plain_name(name: Any) -> TypeGuard[str]:
    """Whether `name` is the name of a file or folder, without a path."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", "..") and "\0" not in name
