"""What may be executed that a run folder names, scripts and modules: the one place that decides it.

A folder may come from elsewhere and say anything. Executed is what is installed, and what the user has started here: a
script, or the module of an environment whose id was typed, in the same place with the same contents. By the same list
a run folder is known that was started here: of any other, `--resume` takes no argument that reaches out of it. Nothing
in a folder may write elsewhere, or stop us by surprise, either.
"""

import contextlib
import importlib.util
import os
import shlex
import site
import stat
import sys
import sysconfig
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from solorl.errors import UsageError, refuse
from solorl.files import read_json, sha256
from solorl.runfolder import CONFIG
from solorl.scripts import PACKAGE, in_checkout, script_paths

WANDB = ("wandb", ".wandb")  # Weights & Biases links to its newest files there
FLAG = "--trust-script (in Python: trust_script=True)"
# How the user may allow what is refused; empty: all is allowed; None: by a flag on the command line of the training.
HOW: ContextVar[str | None] = ContextVar("how", default=None)


def not_trusted(file: Path, how: str = FLAG, kind: str = "an algorithm of this installation") -> str:
    """The sentence that refuses to execute a file, which is not of the trusted `kind`, unless by `how`."""
    return (
        f"{file} is neither {kind} nor equal to a file that you have started here: "
        f"read it, because it would be executed, then add {how}"
    )


def trusted(copy: Path, started_from: Any) -> Path | None:
    """The file to execute for `copy`, a script in a run folder, whose name and contents it has: an algorithm of this
    installation, or the file from which the run was started, or the copy, if the user has started that or it is one of
    this checkout's zoo; else None.
    What a folder says of its origin is not a proof: it may come from elsewhere and name a file that came with it."""
    files = [*script_paths().values()]
    if isinstance(started_from, str) and Path(started_from).is_absolute() and was_started(Path(started_from)):
        files.append(Path(started_from))
    files += [copy] if was_started(copy.resolve()) or sha256(copy) in _of_zoo() else []
    return next((path for path in files if path.name == copy.name and path.read_bytes() == copy.read_bytes()), None)


def _of_zoo() -> set[Any]:
    """The hashes of the scripts that the zoo of a checkout lists: earlier versions of ours."""
    listed = read_json(PACKAGE.parent / "zoo/index.json") if in_checkout() else {}
    return {about.get("script_sha256") for about in listed.values() if isinstance(about, dict)}


def check_module(env_id: str, module: str, typed: bool) -> None:
    """Note the module of an id that the user has `typed` as started. UsageError where a run folder names it and it is
    neither installed nor started. Imports its parents, each of them after it was looked at."""
    names, how = module.split("."), HOW.get()
    for name in (".".join(names[: i + 1]) for i in range(len(names))):
        there = name in sys.modules  # then nothing of it is executed any more
        spec = getattr(sys.modules[name], "__spec__", None) if there else importlib.util.find_spec(name)
        if spec is None:
            return  # it is not there
        if spec.origin is None or _is_installed(Path(spec.origin)):
            continue  # it has no code, or was chosen by who installed it
        if typed:
            note_start(Path(spec.origin).resolve())
        elif how != "" and not there and not was_started(Path(spec.origin).resolve()):
            raise UsageError(not_trusted(Path(spec.origin), how or f"--env-id {shlex.quote(env_id)}", "installed"))


def _is_installed(file: Path) -> bool:
    """Whether a file lies among the installed packages. A module of Python itself has no environments."""
    places = [*map(sysconfig.get_path, ("purelib", "platlib")), site.getusersitepackages(), *site.getsitepackages()]
    return any(file.parent.resolve().is_relative_to(Path(place).resolve()) for place in places)


# ---------------------------------------------------------------------- links in a folder
def refuse_links(folder: Path) -> None:
    """UsageError where a run folder holds a link, a pipe, a socket or a device: who writes there writes elsewhere, who
    reads there may wait for ever. The folder itself may be reached through a link."""

    def unreadable(error: OSError) -> None:
        # a file that is gone: as below
        refuse(not isinstance(error, FileNotFoundError), f"{error.filename} cannot be read: {error.strerror}")

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
    """Whether the path is a link from a folder of Weights & Biases to a place in the same folder, or that to the log of
    its service, which lies in the user's cache: nobody writes by that link, each session of a run makes its own."""
    top = folder / path.relative_to(folder).parts[0]
    inside = path.name == "debug-core.log" or path.resolve().is_relative_to(top.resolve())
    return top.name in WANDB and path.is_symlink() and inside


# ---------------------------------------------------------------------- what was started here
def note_start(file: Path) -> None:
    """Note the place and the contents of a file that the user starts, in the home folder, where no run folder that
    comes from elsewhere can write. Where that cannot be done, `solo play` will ask before it executes the file."""
    with contextlib.suppress(OSError, RuntimeError):
        if not was_started(file):
            _started().parent.mkdir(parents=True, exist_ok=True)
            with open(_started(), "a", encoding="utf-8") as notes:
                notes.write(f"{_place_and_contents(file)}\n")


def was_started(file: Path) -> bool:
    """Whether the user has started this file, in this place and with these contents."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        return file.is_file() and _place_and_contents(file) in _started().read_text(encoding="utf-8").split("\n")
    return False


def _started() -> Path:
    """The list of files; RuntimeError where there is no home folder."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "solorl" / "started.txt"


def _place_and_contents(file: Path) -> str:
    """A line, whatever characters the path has. A run folder may be moved: of its config.json the contents count."""
    return f"{sha256(file)} {file.name if file.name == CONFIG else str(file)!r}"
