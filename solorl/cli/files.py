"""Writing files for the verbs: whole or not at all, and every failure one sentence."""

import stat
from pathlib import Path

from solorl.errors import UsageError
from solorl.state import write_atomically


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, keeping the permissions of one it replaces; UsageError if that fails."""
    path = path.resolve()  # a link keeps pointing to the file
    try:
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
        write_atomically(path, data)
        if mode is not None:
            path.chmod(mode)
    except FileNotFoundError:
        raise UsageError(f"the folder {path.parent} does not exist") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


def shown(path: Path) -> str:
    """A path as people want to read it: relative to the current folder where it lies below it."""
    path = path.resolve()
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
