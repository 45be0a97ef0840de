"""The teacher of a run: the trained policy of another run, of which the run folder keeps a copy.

So a resumed run has the teacher with which it began, wherever the other folder is and whatever it holds by then.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solorl.errors import UsageError
from solorl.files import near, read_json, write_atomically
from solorl.run.evaluation import open_games
from solorl.run.load import LoadedPolicy, load, script_of
from solorl.run.upload import solo
from solorl.terminal import scores
from solorl.trust import note_start

PREFIX = "hf://"  # of an address on the Hugging Face hub
KEPT = ("config.json", "model.safetensors")  # what is copied of a teacher's folder, with its script
ORIGIN = "origin.json"  # in the copy: the address


@dataclass(frozen=True)
class Teacher:
    """The trained policy of another run."""

    address: str  # its run folder, or hf://USER/NAME
    script: str  # the name of its script
    policy: LoadedPolicy
    files: dict[str, bytes]  # what the copy holds, by name; empty where there is one already

    def __str__(self) -> str:
        return f"{self.address}: {self.script}, evaluation {scores(self.policy.score or 0.0)[0]}"

    @classmethod
    def find(cls, address: str, run_dir: Path, device: str, trust_script: bool) -> "Teacher":
        """The copy in the run folder, if it is of this address, else the teacher itself. UsageError where there is
        none, or where its script is neither trusted nor to be trusted."""
        with _folder_of(address, run_dir / "teacher") as folder:
            script, _ = script_of(folder)
            policy = load(folder, trust_script=trust_script, device=device)
            files = {}
            if folder != run_dir / "teacher":
                paths = [path for path in (folder / name for name in (script.name, *KEPT)) if path.exists()]
                files = {path.name: path.read_bytes() for path in paths}
                files[ORIGIN] = json.dumps({"address": address}).encode()
        return cls(address, script.name, policy, files)

    def check(self, env_id: str, envs: Any, part: str) -> None:
        """UsageError unless the teacher has a model named `part` and a score, and has learned on the environment
        `env_id` with the spaces of the vector environment `envs`."""
        who, policy = f"{self.address}, a run of {self.script},", self.policy
        if policy.env_id != env_id:
            raise UsageError(f"{who} was trained on {policy.env_id}, not on {env_id}")
        if part not in policy.models:
            raise UsageError(f"{who} has no {part}, but {' and '.join(policy.models)}: it cannot be the teacher here")
        if policy.score is None:
            raise UsageError(f"{who} does not say what its model scored, so it cannot be the teacher here")
        [game] = open_games(policy.maker, policy.env_id, 1)
        for kind in ("observation", "action"):
            theirs = getattr(game, f"single_{kind}_space", getattr(game, f"{kind}_space"))
            ours = getattr(envs, f"single_{kind}_space")
            if theirs != ours:
                raise UsageError(f"{who} has the {kind} space {theirs}, not {ours}: it cannot be the teacher here")
        game.close()

    def keep(self, run_dir: Path) -> None:
        """Put the copy into the run folder. UsageError where that cannot be done."""
        folder = run_dir / "teacher"
        try:
            if self.files:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            for name, data in self.files.items():  # ORIGIN comes last: without it a copy is none
                write_atomically(folder / name, data)
            if self.files and script_of(folder)[1] is None:  # it has been executed: a resumed run needs not ask again
                note_start((folder / self.script).resolve())
        except OSError as error:
            raise UsageError(f"the run folder {near(run_dir)} cannot be written: {error.strerror}") from None


@contextmanager
def _folder_of(address: str, copy: Path) -> Iterator[Path]:
    """The copy, if it is of this address; else the folder of a run, pulled for as long as this lasts if it is on the
    hub. UsageError where there is none."""
    if not address:
        raise UsageError("there is no teacher: --teacher must name a run folder, or hf://USER/NAME")
    if read_json(copy / ORIGIN).get("address") == address:
        yield copy
    elif address.startswith(PREFIX):
        with tempfile.TemporaryDirectory() as place:
            yield _pulled(address, str(Path(place, "run")))
    else:
        yield Path(address)


def _pulled(address: str, folder: str) -> Path:
    """The folder, with the run of an address on the hub: pulled by another process, for this room does not know the
    hub."""
    repo, _, revision = address.removeprefix(PREFIX).partition("@")
    done, said = solo("pull", repo, folder, *(["--revision", revision] if revision else []))
    if not done:
        raise UsageError(said)
    return Path(folder)
