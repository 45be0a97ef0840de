"""Where the files of a study are: a folder, or any URL of fsspec (`s3://bucket/study`).

A name is a path below it, with slashes. A file appears whole or not at all. No rename and no append are assumed:
object stores have neither. What cannot be done raises OSError, and FileNotFoundError where a file is absent.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from solorl.errors import UsageError, missing_extra, reason
from solorl.files import sync_file

FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk
PASSING = ("attempts/", "collected/", "leases/")  # what a power cut may take


def open_storage(where: str, make: bool = True) -> "Storage":
    """The storage at a path or URL; with `make` a folder is made. UsageError, in one sentence, where it cannot be read:
    no such folder or bucket, no rights, no package for such URLs."""
    if "://" not in where:
        return _open_folder(Path(where), make)
    try:
        import fsspec
    except ModuleNotFoundError:
        raise UsageError(f"{where} needs fsspec, which is not installed: pip install fsspec") from None
    try:
        system, path = fsspec.core.url_to_fs(where)
        found = Objects(where.rstrip("/"), system, path)
        found.list("submissions")
    except ImportError as error:
        why = missing_extra(where, _cause(error)) or f"{where} needs a package that is not installed: {reason(error)}"
        raise UsageError(why) from None
    except Exception as error:  # of any kind: each store has its own
        raise UsageError(f"{where} cannot be opened: {why_not(error)}") from None
    return found


def _cause(error: ImportError) -> ImportError:
    return error.__cause__ if isinstance(error.__cause__, ImportError) else error


def _open_folder(path: Path, make: bool) -> "Folder":
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file, but should be the folder of a study")
    try:
        if make:
            path.mkdir(parents=True, exist_ok=True)
        elif not path.is_dir():
            raise UsageError(f"there is no folder {path}")
    except OSError as error:
        raise UsageError(f"the folder {path} cannot be made: {error.strerror}") from None
    return Folder(path)


def why_not(error: BaseException) -> str:
    """What an error of a store says, in a few words."""
    if isinstance(error, FileNotFoundError):
        return f"it does not exist ({reason(error)})"
    if isinstance(error, PermissionError):
        return f"the rights are missing ({reason(error)})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return reason(error)


def refusal(error: OSError, where: object = "") -> str:
    """What the system refuses: the file, which is `where` if the error names none, and the reason."""
    return ": ".join(filter(None, (str(error.filename or where), error.strerror or str(error))))


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
        self._root = folder.absolute()
        self.folder: Path | None = self._root  # that this machine sees: files may be made there in place
        self.where = str(self._root)  # what another process must be told to find it

    def read(self, name: str) -> bytes:
        """The contents of a file."""
        return (self._root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Write a file, or replace it."""
        with self._beside(name) as (path, temporary):
            _write(temporary, data, name)
            temporary.replace(path)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless it exists; False where it does. Of several at once one succeeds: the file is written
        under another name, then linked to its own."""
        with self._beside(name) as (path, temporary):
            _write(temporary, data, name)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError:  # a file system without links
                return self._create_alone(path, data)
        return True

    def _create_alone(self, path: Path, data: bytes) -> bool:
        try:
            with open(path, "xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        except OSError:  # the disk is full, say: nothing of it stays
            path.unlink(missing_ok=True)
            raise
        return True

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return (self._root / name).is_file()

    def list(self, name: str) -> list[str]:
        """The names of all files at any depth below a name, sorted; none where there is nothing. Those that begin with
        a point are passed over: they are being written."""
        found = []
        for at, _, names in os.walk(self._root / name):
            found += [str((Path(at) / each).relative_to(self._root)) for each in names if not each.startswith(".")]
        return sorted(found)

    def delete(self, name: str) -> None:
        """Delete a file; nothing where there is none."""
        (self._root / name).unlink(missing_ok=True)

    def put(self, path: Path, name: str) -> None:
        """Copy a file of this machine here."""
        with self._beside(name) as (target, temporary):
            shutil.copyfile(path, temporary)
            temporary.replace(target)

    def get(self, name: str, path: Path) -> None:
        """Copy a file to this machine; its folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._root / name, path)

    @contextlib.contextmanager
    def _beside(self, name: str) -> Iterator[tuple[Path, Path]]:
        """The path of a name, and one next to it that no other process has (machines share process ids), deleted
        at the end."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}")
        try:
            yield path, temporary
        finally:
            temporary.unlink(missing_ok=True)


def _write(path: Path, data: bytes, name: str) -> None:
    path.write_bytes(data)
    if not name.startswith(PASSING):
        sync_file(path)


class Objects:
    """Objects of any file system that fsspec knows. `file://` is one, too: a stand-in for an object store."""

    folder: Path | None = None

    def __init__(self, where: str, system: Any, path: str):
        self.where, self._system, self._path = where, system, path.rstrip("/")
        protocol = system.protocol
        local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)
        self._files = Folder(Path(path)) if local else None  # fsspec writes a local file little by little

    def read(self, name: str) -> bytes:
        """See `Folder.read`."""
        with self._told(name):
            data: bytes = self._system.cat_file(f"{self._path}/{name}")
            return data

    def write(self, name: str, data: bytes) -> None:
        """See `Folder.write`."""
        if self._files:
            return self._files.write(name, data)
        with self._told(name):
            self._system.pipe_file(f"{self._path}/{name}", data)

    def create(self, name: str, data: bytes, tries: int = 3) -> bool:
        """See `Folder.create`: a conditional write where the store has it. Elsewhere two may succeed at once, and the
        last one stays."""
        if self._files:
            return self._files.create(name, data)
        with self._told(name):
            try:
                self._system.pipe_file(f"{self._path}/{name}", data, mode="create")
            except FileExistsError:
                return False
            except (NotImplementedError, TypeError, ValueError):
                return self._create_alone(name, data)
            except OSError as error:
                if error.errno == errno.ENOSYS:  # a store like S3 that has no conditional writes
                    return self._create_alone(name, data)
                if "ConditionalRequestConflict" not in str(error) or not tries:
                    raise
                return self.create(name, data, tries - 1)  # another write was under way, S3 says to ask again
        return True

    def _create_alone(self, name: str, data: bytes) -> bool:
        if self.exists(name):
            return False
        self._system.pipe_file(f"{self._path}/{name}", data)
        return True

    def exists(self, name: str) -> bool:
        """See `Folder.exists`."""
        self._system.invalidate_cache()  # others write there, too
        with self._told(name):
            return bool(self._system.isfile(f"{self._path}/{name}"))

    def list(self, name: str) -> list[str]:
        """See `Folder.list`."""
        self._system.invalidate_cache()
        with self._told(name):
            found = self._system.find(f"{self._path}/{name}")
        root = self._system._strip_protocol(self._path)
        return sorted(each.removeprefix(root).lstrip("/") for each in found if "/." not in each.removeprefix(root))

    def delete(self, name: str) -> None:
        """See `Folder.delete`."""
        with contextlib.suppress(FileNotFoundError), self._told(name):
            self._system.rm_file(f"{self._path}/{name}")

    def put(self, path: Path, name: str) -> None:
        """See `Folder.put`."""
        if self._files:
            return self._files.put(path, name)
        with self._told(name):
            self._system.put_file(str(path), f"{self._path}/{name}")

    def get(self, name: str, path: Path) -> None:
        """See `Folder.get`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._told(name):
            self._system.get_file(f"{self._path}/{name}", str(path))

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Whatever a store raises inside becomes an OSError that names the file."""
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", f"{self.where}/{name}") from error
        except PermissionError as error:
            raise PermissionError(errno.EACCES, why_not(error), f"{self.where}/{name}") from error
        except OSError as error:
            raise OSError(error.errno or 0, why_not(error), f"{self.where}/{name}") from error
        except Exception as error:  # of any kind: each store has its own
            raise OSError(0, reason(error), f"{self.where}/{name}") from error


Storage = Folder | Objects
