"""Other runs that a run needs, such as its teacher: its folder keeps a copy of what they have learned."""

import hashlib
import shutil
import tempfile
from pathlib import Path

from solorl.errors import UsageError
from solorl.run.load import script_of
from solorl.run.upload import solo
from solorl.runfolder import CONFIG, MODEL
from solorl.trust import note_start

PREFIX = "hf://"  # of an address on the Hugging Face hub


class Kept:
    """The folders of other runs, by their addresses, until a run folder has copies of them. Then a resumed run needs
    neither a network nor the other folder, whatever that holds by then."""

    def __init__(self) -> None:
        self._found: dict[str, Path] = {}  # address -> folder
        self._pulled: list[tempfile.TemporaryDirectory[str]] = []  # which are deleted with this object

    def find(self, address: str, run_dir: Path) -> Path:
        """The copy in the run folder, if there is one, else the folder of the address. UsageError where there is
        none."""
        if (copy := _copy(address, run_dir)).is_dir():
            return copy
        folder = Path(address)
        if address.startswith(PREFIX):
            self._pulled.append(tempfile.TemporaryDirectory())
            folder = Path(self._pulled[-1].name, "run")
            repo, _, revision = address.removeprefix(PREFIX).partition("@")
            done, said = solo("pull", repo, str(folder), *(["--revision", revision] if revision else []))
            if not done:
                raise UsageError(said)
        script_of(folder)
        self._found[address] = folder
        return folder

    def copy_to(self, run_dir: Path) -> None:
        """Copy what was found into the run folder, each whole or not at all. Raises OSError."""
        for address, folder in self._found.items():
            (script, trusted), copy = script_of(folder), _copy(address, run_dir)
            half = copy.with_name(f".{copy.name}")
            shutil.rmtree(half, ignore_errors=True)
            half.mkdir(parents=True)
            for name in (script.name, CONFIG, MODEL):
                shutil.copyfile(folder / name, half / name)
            half.rename(copy)
            if trusted is None:  # it has been executed: a resumed run needs not ask again
                note_start((copy / script.name).resolve())


def _copy(address: str, run_dir: Path) -> Path:
    return run_dir / "kept" / hashlib.sha256(address.encode()).hexdigest()[:12]
