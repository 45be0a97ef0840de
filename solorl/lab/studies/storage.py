"""Where the files of a study are: a folder, or a bucket, which is any URL of fsspec (`s3://bucket/study`).

A name is a path below it, with slashes. A file appears whole or not at all. What cannot be done raises OSError, and
FileNotFoundError where a file is absent.
"""

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from solorl.errors import UsageError, missing_extra, reason, told
from solorl.files import sync_file

FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk


def open_storage(where: str, make: bool = True) -> "Storage":
    """The storage at a path or URL; with `make` a folder is made. UsageError where it cannot be read."""

    def why(error: BaseException) -> str:
        return missing_extra(where, error.__cause__ or error) or reason(error)  # fsspec raises from an ImportError

    with told(f"{where} cannot be opened", why):
        if "://" not in where:
            if make:
                Path(where).mkdir(parents=True, exist_ok=True)
            elif not Path(where).is_dir():
                raise UsageError(f"there is no folder {where}")
            return Folder(Path(where))
        import fsspec

        found = Bucket(where.rstrip("/"), *fsspec.core.url_to_fs(where))
        found.list("plans")
        return found


def refusal(error: OSError, where: object = "") -> str:
    """What the system refuses: the file, which is `where` if the error names none, and the reason. Raises the error
    where nobody reads any more, which `solo` itself sees to."""
    if isinstance(error, BrokenPipeError):
        raise error
    why = "the disk is full; make room and repeat the command" if error.errno in FULL else error.strerror or str(error)
    return ": ".join(filter(None, (str(error.filename or where), why)))


def read_object(storage: "Storage", name: str) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none, or what is there is no object."""
    try:
        content = json.loads(storage.read(name))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


class Folder:
    """A folder, which several machines may share."""

    def __init__(self, folder: Path):
        self.folder: Path = folder.absolute()
        self.where = str(self.folder)  # what another process must be told to find it

    def read(self, name: str) -> bytes:
        """The contents of a file."""
        return (self.folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Write a file, or replace it."""
        with self._written(name, data) as temporary:
            temporary.replace(self.folder / name)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless it exists; False where it does. Of several at once one succeeds."""
        with self._written(name, data) as temporary:
            try:
                os.link(temporary, self.folder / name)
            except FileExistsError:
                return False
            except OSError:  # a file system without links
                if self.exists(name):
                    return False
                with open(self.folder / name, "xb") as file:
                    file.write(data)
        return True

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return (self.folder / name).is_file()

    def list(self, name: str) -> list[str]:
        """The names of all files at any depth below a name, sorted; none where there is nothing. Those that begin with
        a point are passed over: they are being written."""
        paths = (Path(at, each) for at, _, names in os.walk(self.folder / name) for each in names if each[0] != ".")
        return sorted(str(path.relative_to(self.folder)) for path in paths)

    def delete(self, name: str) -> None:
        """Delete a file; nothing where there is none."""
        (self.folder / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _written(self, name: str, data: bytes) -> Iterator[Path]:
        """A file next to a name that no other process has (machines share process ids), gone at the end."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}")
        try:
            temporary.write_bytes(data)
            if not name.startswith("leases/"):  # which a power cut may take
                sync_file(temporary)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


class Bucket:
    """Objects of any file system that fsspec knows: no renaming, no appending."""

    folder = None

    def __init__(self, where: str, system: Any, path: str):
        self.where, self._system, self._path = where, system, path.rstrip("/")

    def read(self, name: str) -> bytes:
        """See `Folder.read`."""
        return bytes(self._call("cat_file", name))

    def write(self, name: str, data: bytes) -> None:
        """See `Folder.write`."""
        self._call("pipe_file", name, data)

    def create(self, name: str, data: bytes) -> bool:
        """See `Folder.create`: a conditional write, where the store has it. Elsewhere it looks first, and of two at
        once the last one stays."""
        try:
            self._call("pipe_file", name, data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            if "ConditionalRequestConflict" in str(error):  # another write was under way
                return False
            if error.errno != errno.ENOSYS:
                raise
            if self.exists(name):
                return False
            self.write(name, data)
        return True

    def exists(self, name: str) -> bool:
        """See `Folder.exists`."""
        return bool(self._call("isfile", name))

    def list(self, name: str) -> list[str]:
        """See `Folder.list`."""
        root = self._system._strip_protocol(self._path)
        return sorted(each.removeprefix(root).lstrip("/") for each in self._call("find", name))

    def delete(self, name: str) -> None:
        """See `Folder.delete`."""
        with contextlib.suppress(FileNotFoundError):
            self._call("rm_file", name)

    def put(self, path: Path, name: str) -> None:
        """Copy a file of this machine here."""
        self._call("put_file", name, before=(str(path),))

    def get(self, name: str, path: Path) -> None:
        """Copy a file to this machine; its folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._call("get_file", name, str(path))

    def _call(self, method: str, name: str, *more: Any, before: Sequence[str] = (), **words: Any) -> Any:
        """What a method of the store returns. Whatever it raises becomes an OSError that names the file."""
        try:
            self._system.invalidate_cache()  # others write there, too
            return getattr(self._system, method)(*before, f"{self._path}/{name}", *more, **words)
        except Exception as error:  # of any kind: each store has its own
            kinds = {FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST, PermissionError: errno.EACCES,
                     NotImplementedError: errno.ENOSYS, TypeError: errno.ENOSYS, ValueError: errno.ENOSYS}  # fmt: skip
            number = next((n for kind, n in kinds.items() if isinstance(error, kind)), getattr(error, "errno", 0) or 0)
            raise OSError(number, getattr(error, "strerror", "") or reason(error), f"{self.where}/{name}") from error


Storage = Folder | Bucket
