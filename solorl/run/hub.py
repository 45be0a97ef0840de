"""The Hugging Face hub and other runs: what a run needs of them, such as its teacher, and what it gives to the hub.
Other verbs of `solo` do it, in processes of their own."""

import hashlib
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from solorl.args.arguments import RunArgs
from solorl.errors import UsageError, needs_extra, refuse
from solorl.files import near
from solorl.machine import command_of
from solorl.run.load import script_of
from solorl.runfolder import CONFIG, MODEL
from solorl.terminal import warn
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
            refuse(not done, said)
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


def check_upload(args: RunArgs) -> None:
    """UsageError where `--upload-model` cannot work: it is better known before the training than after it."""
    without = "--no-upload-model trains without"
    if not args.upload_model:
        return
    try:
        from huggingface_hub import get_token
    except ImportError:
        raise UsageError(f"{needs_extra('--upload-model', 'hub')}; {without}") from None
    refuse(not args.save_model, "--upload-model needs a model: leave --no-save-model out")
    refuse(not get_token(), f"--upload-model needs a token: run `hf auth login`, or set HF_TOKEN; {without}")


def upload(run_dir: Path, args: RunArgs, say: Callable[[str], None]) -> None:
    """Publish the run; where that fails, one warning says so, and the run is what it would be without."""
    done, said = solo("push", str(run_dir), f"{args.hf_entity}/" if args.hf_entity else "")
    if done:
        say(said)
    else:
        warn(f"the model was not uploaded: {said}; `solo push {shlex.quote(near(run_dir))}` does it later")


def solo(*words: str) -> tuple[bool, str]:
    """Call `solo`, in a process of its own, so that nothing there can harm this one. Returns whether that has
    succeeded, and the last line that it said."""
    done = subprocess.run(command_of(*words), capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode == 0, said[-1].removeprefix("error: ") if said else f"exit code {done.returncode}"
