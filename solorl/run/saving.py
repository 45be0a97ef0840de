"""What a checkpoint of a run holds, and its models: brought back, looked through for NaN, and written."""

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from solorl.checkpoints import checkpoint, env_state
from solorl.checkpoints.replay import ReplayLog, is_replay
from solorl.compute.ranks import Ranks
from solorl.envs.spaces import not_finite
from solorl.envs.surroundings import random_states, set_random_states
from solorl.errors import UsageError, fitting, refuse, told
from solorl.files import near, write_atomically
from solorl.run.meter import Diverged
from solorl.runfolder import CHECKPOINTS, MODEL, status_of
from solorl.terminal import warn


class Checkpoints:
    """The parts of one training, which its checkpoints and models hold.

    A part is what `checkpoint.capture` takes, or a replay buffer. One with a method `must_be_finite()` names
    itself what of it must be so. `models` are the parts that a model file holds; None: all modules of torch.
    """

    def __init__(self, run_dir: Path, ranks: Ranks | None = None):
        self.run_dir, self.ranks = run_dir, ranks or Ranks()
        self.parts: dict[str, Any] = {}
        self.models: dict[str, Any] = {}
        self.replays: dict[str, Any] = {}
        self.steps: list[Any] = []  # gradient steps of the script
        self.newest: int | None = None  # step of the newest checkpoint
        self.until = math.inf  # step of the newest checkpoint that may be resumed
        self.resumed: dict[str, Any] = {}  # counters of the checkpoint that is resumed; empty: none is
        self._random: dict[str, Any] = {}  # its states of the random generators
        self._logs: dict[str, ReplayLog] = {}

    def name(self, parts: Mapping[str, Any], models: Mapping[str, Any] | None = None) -> None:
        """Say what a checkpoint must hold; environments begin to note how they came about."""
        self.replays = {name: part for name, part in parts.items() if is_replay(part)}
        self._logs = {name: ReplayLog(self.run_dir / "replay" / name) for name in self.replays}
        self.parts = {name: part for name, part in parts.items() if name not in self.replays}
        modules = {name: part for name, part in self.parts.items() if hasattr(part, "named_parameters")}
        self.models = modules if models is None else dict(models)
        for name, part in self.parts.items():
            if env_state.is_vector_env(part):
                env_state.record(part)
            elif not hasattr(part, "load_state_dict"):  # now rather than when it is saved first
                with told(f"the part {name}", str):
                    checkpoint.encode(checkpoint.capture(part), {}, name)

    def open(self, run_dir: Path) -> None:
        """Write there from now on; checkpoints newer than the one that is resumed are deleted. Warns of what gradient
        steps change but no part holds, be it as an attribute."""
        self.run_dir = run_dir
        for name, log in self._logs.items():
            log.folder = run_dir / "replay" / name
        checkpoint.delete_newer(run_dir / CHECKPOINTS, self.resumed.get("step", 0))
        given = [x for part in self.parts.values() for x in (part, *getattr(part, "__dict__", {}).values())]
        held = {id(x) for one in given for x in (one, *(one.parameters() if hasattr(one, "named_parameters") else ()))}
        for step in self.steps:
            if kinds := dict.fromkeys(type(x).__name__ for x in step.changes if id(x) not in held):
                warn(f"run.resume is not given {' and '.join(kinds)} of {step.name}: a resumed run makes new ones")

    # ------------------------------------------------------------------ bringing back
    def resume(self) -> list[int]:
        """Bring all parts into the state of the newest whole checkpoint, if there is one; `resumed` has its counters.
        Returns the environments whose episodes begin again. UsageError where that cannot be done. Writes nothing."""
        tree = self._load()
        if tree is None:
            return []
        with fitting(f"the checkpoint in {near(self.run_dir)}"):
            self._take_those_of_rank(tree)
            self.resumed, self._random = tree["run"], tree["random"]
        for name, part in self.parts.items():
            with fitting(f"the part {name} of the checkpoint"):
                notes = checkpoint.restore(part, tree["parts"].pop(name))  # a restored part is not kept in memory
            for note in notes:
                warn(note)
        self._resume_replays(tree["replay"])
        self.newest = self.resumed["step"]
        return [i for envs in filter(env_state.is_vector_env, self.parts.values()) for i in env_state.restarted(envs)]

    def _take_those_of_rank(self, tree: dict[str, Any]) -> None:
        """Put the parts and random generators of this rank in the place of those of rank 0. UsageError where there were
        more or fewer ranks."""
        others, now = tree.get("ranks", []), self.ranks.world_size
        if (count := len(others) + 1) != now:
            flag = f"with --nproc {count}" if others else "without --nproc"
            what = f"the run in {near(self.run_dir)} was trained by {count} ranks, not {now}"
            raise UsageError(f"{what}: resume it {flag}")
        if self.ranks.rank > 0:
            own = others[self.ranks.rank - 1]
            tree["random"], tree["parts"] = own["random"], tree["parts"] | own["parts"]

    def same_in_all_ranks(self, start: int, restarted: list[int], num_envs: int) -> list[int]:
        """Let modules begin with the values that they have in rank 0. Returns the `restarted` environments of all
        ranks, which have `num_envs` each. UsageError where the ranks do not fit together."""
        if self.ranks.world_size == 1:
            return restarted
        refuse(self.replays, "replay buffers are not supported with several ranks")
        found = self.ranks.everyone((start, restarted))
        starts = [at for at, _ in found]
        refuse(len(set(starts)) > 1, f"the ranks do not see the same run folder: they start from {starts}")
        for part in self.parts.values():
            if hasattr(part, "named_parameters"):
                self.ranks.copy_from_first(part)
        return [rank * num_envs + i for rank, (_, own) in enumerate(found) for i in own]

    def _load(self) -> dict[str, Any] | None:
        """The newest whole checkpoint, None where there is none yet. UsageError where all are damaged or gone."""
        tree, notes = checkpoint.load_checkpoint(self.run_dir / CHECKPOINTS, self.until)
        what = f"no checkpoint in {near(self.run_dir)} is whole ({'; '.join(notes)})"
        refuse(notes and tree is None, f"{what}; the run is left as it is")
        said = status_of(self.run_dir) if tree is None and self.until != 0 else {}
        newest, status = said.get("checkpoint"), said.get("status", "running")
        killed = newest is None and status in ("running", "failed")  # before its first checkpoint
        lost = f"has lost its checkpoint (its status is {status}, its newest step {newest})"
        refuse(not killed, f"{near(self.run_dir)} {lost} and is left as it is; start a new run instead")
        for note in notes:
            warn(f"{note}; continuing from the checkpoint before it")
        return tree

    def _resume_replays(self, saved: Mapping[str, Any]) -> None:
        for name, part in self.replays.items():
            if name not in saved:
                warn(f"the part {name} was not saved (--save-replay does it): it starts empty, so this run will differ")
                continue
            try:
                self._logs[name].load(part, saved[name])
            except checkpoint.CheckpointError as error:
                warn(f"{error}: the part {name} starts empty, so this run will differ")

    def resume_random(self) -> None:
        """Bring the global random generators into the state of the checkpoint that is resumed, if there is one."""
        if self._random:
            with fitting(f"the checkpoint in {near(self.run_dir)}"):
                set_random_states(self._random)

    # ------------------------------------------------------------------ writing
    def check_finite(self, more: Mapping[str, Any]) -> None:
        """Diverged where something that was learned is NaN or infinite, or a number of `more`: all parts but
        environments and replay buffers are looked through."""
        trees: list[tuple[str, Any]] = []
        for name, part in self.parts.items():
            if not env_state.is_vector_env(part):
                own = getattr(part, "must_be_finite", None)
                trees += own().items() if own else [(name, checkpoint.capture(part))]
        for name, tree in (*trees, *more.items()):
            if found := not_finite(tree, name):
                raise Diverged(f"{found[0]} is {found[1]}")

    def of_rank(self) -> dict[str, Any]:
        """What a checkpoint must hold of this rank: all but modules and optimisers, which are equal in all ranks."""
        own = [name for name, part in self.parts.items() if not hasattr(part, "load_state_dict")]
        return {"random": random_states(), "parts": {name: checkpoint.capture(self.parts[name]) for name in own}}

    def save(
        self, step: int, counters: Mapping[str, Any], with_replays: bool, others: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Write the checkpoint of `step`; `others`: what the other ranks have from `of_rank`. Raises OSError."""
        tree = {
            "run": counters,
            "random": random_states(),
            "parts": {name: checkpoint.capture(part) for name, part in self.parts.items()},
            "replay": {name: log.append(self.replays[name]) for name, log in self._logs.items() if with_replays},
            "ranks": list(others),
        }
        checkpoint.save_checkpoint(self.run_dir / CHECKPOINTS, step, tree)
        for log in self._logs.values():
            log.forget()
        self.newest = step

    def save_crash(self, step: int) -> Path:
        """Write a snapshot of a training that has diverged; returns its folder. Raises OSError."""
        where = self.run_dir / "crash"
        shutil.rmtree(where, ignore_errors=True)
        parts = {name: checkpoint.capture(part) for name, part in self.parts.items()}
        checkpoint.write_state(where, {"parts": parts, "random": random_states(), "step": step})
        return where

    # ------------------------------------------------------------------ models
    def networks(self) -> dict[str, Any]:
        """What a model holds, as a script computes with it: modules of torch, in JAX trees of arrays."""
        return {name: x if hasattr(x, "named_parameters") else x.tree() for name, x in self.models.items()}

    def save_model(self, name: str, about: Mapping[str, str]) -> None:
        """Write the models into one file, keys prefixed by the part's name, with metadata. Raises OSError."""
        arrays: dict[str, np.ndarray] = {}
        for part, model in self.models.items():
            for key, tensor in model.state_dict().items():
                half = str(getattr(tensor, "dtype", "")) == "torch.bfloat16"  # NumPy has no such type
                checkpoint.encode(tensor.float() if half else tensor, arrays, f"{part}.{key}")
        write_atomically(self.run_dir / name, checkpoint.safetensors(arrays, about))

    def load_model(self, name: str) -> None:
        """Bring the models into the state of such a file. UsageError where it cannot be read or does not fit."""
        from safetensors import SafetensorError, safe_open

        path = self.run_dir / name
        try:
            with safe_open(path, "numpy") as file:
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 it is not a dict
                without = (file.metadata() or {}).get("without", "").split()  # parts that do not act, as in zoo/
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:  # the last: types NumPy has not
            when = "with its first evaluation" if name == MODEL else "at its end"
            raise UsageError(f"{path} cannot be read ({error}); the run writes it {when}") from None
        torch = sys.modules.get("torch")
        for part, model in self.models.items():
            if part in without:
                continue
            prefix = f"{part}."
            mine: dict[str, Any] = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
            if torch and isinstance(model, torch.nn.Module):
                mine = {k: torch.from_numpy(v) for k, v in mine.items()}
            with fitting(f"the model {path}"):
                model.load_state_dict(mine)
