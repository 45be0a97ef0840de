"""One checkpoint format for torch modules and optimisers, arrays, random states and environments.

A checkpoint is a folder: `tensors.safetensors` holds every array, `state.json` everything else, `manifest.json` their
SHA-256. Loading never executes code from a file (no pickle). A checkpoint is written next to its final name, synced to
the disk and renamed, so that it is there whole or not at all; the previous one is kept.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from solorl.checkpoints import env_state
from solorl.errors import reason
from solorl.files import sha256, sync_file
from solorl.runfolder import step_of, steps_in

KEEP = 2  # checkpoints that stay on the disk
FILES = ("tensors.safetensors", "state.json")


class CheckpointError(Exception):
    """A checkpoint is damaged or does not fit; the message is one sentence."""


# ---------------------------------------------------------------------- trees of plain values and arrays
def encode(tree: Any, arrays: dict[str, np.ndarray], path: str = "") -> Any:
    """Turn `tree` into JSON; its arrays and tensors go into `arrays`, keyed by their place in the tree.

    Raises TypeError for a value that is not a number, string, None, list, tuple, dict, array or torch tensor.
    """
    if isinstance(tree, np.generic) and tree.dtype.kind in "biuf":
        return {"$scalar": tree.item(), "dtype": tree.dtype.name}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, np.ndarray):
        arrays[path] = np.array(tree, order="C")
        return {"$array": path}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tree, torch.Tensor):
        tensor = tree.detach().cpu()
        half = tensor.dtype == torch.bfloat16  # NumPy has no such type
        arrays[path] = np.array((tensor.view(torch.int16) if half else tensor).numpy(), order="C")
        return {"$tensor": path, "bfloat16": True} if half else {"$tensor": path}
    if isinstance(tree, (tuple, list)):
        items = [encode(value, arrays, f"{path}/{i}") for i, value in enumerate(tree)]
        return {"$tuple": items} if isinstance(tree, tuple) else items
    if isinstance(tree, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in tree):
            return {key: encode(value, arrays, f"{path}/{key}") for key, value in tree.items()}
        return {"$items": [[encode(k, arrays), encode(v, arrays, f"{path}/{k}")] for k, v in tree.items()]}
    raise TypeError(f"a checkpoint cannot hold {path or 'a value'} of type {type(tree).__name__}")


def decode(tree: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The inverse of `encode`."""
    if isinstance(tree, list):
        return [decode(value, arrays) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if "$array" in tree:
        return arrays[tree["$array"]].copy()
    if "$tensor" in tree:
        import torch

        tensor = torch.from_numpy(arrays[tree["$tensor"]].copy())
        return tensor.view(torch.bfloat16) if tree.get("bfloat16") else tensor
    if "$scalar" in tree:
        return np.dtype(tree["dtype"]).type(tree["$scalar"])
    if "$tuple" in tree:
        return tuple(decode(value, arrays) for value in tree["$tuple"])
    if "$items" in tree:
        return {decode(key, arrays): decode(value, arrays) for key, value in tree["$items"]}
    return {key: decode(value, arrays) for key, value in tree.items()}


# ---------------------------------------------------------------------- the parts a script hands over
def capture(part: Any) -> Any:
    """The state of one part as a tree: a module, optimiser, array, tensor, vector environment, or a `SimpleNamespace`
    of numbers, arrays, tensors and what else `encode` takes.

    Raises TypeError, with the kinds allowed, for anything else.
    """
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return part.state_dict()
    if isinstance(part, np.ndarray) or hasattr(part, "requires_grad"):  # the tensors of torch
        return part
    if env_state.is_vector_env(part):
        return env_state.capture(part)
    if isinstance(part, SimpleNamespace):
        return dict(vars(part))
    raise TypeError(
        f"a checkpoint cannot hold a {type(part).__name__}; allowed are objects with state_dict and load_state_dict, "
        "NumPy arrays, torch tensors, vector environments and namespaces of numbers and arrays"
    )


def restore(part: Any, tree: Any) -> list[str]:
    """Bring `part` into the captured state, in place; returns what could not be restored, a sentence each.

    The settings of a torch optimiser (learning rate, ...) stay those it was made with. Where the state does not fit,
    whatever the part raises for it.
    """
    if hasattr(part, "param_groups"):
        settings = [{key: value for key, value in group.items() if key != "params"} for group in part.param_groups]
        part.load_state_dict(tree)
        for group, kept in zip(part.param_groups, settings, strict=True):
            group.update(kept)
    elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        part.load_state_dict(tree)
        if hasattr(part, "get_last_lr"):  # a scheduler of torch does not set the learning rate that it was at
            for group, rate in zip(part.optimizer.param_groups, part.get_last_lr(), strict=True):
                group["lr"] = rate
    elif env_state.is_vector_env(part):
        return env_state.restore(part, tree)
    elif isinstance(part, SimpleNamespace):
        if tree.keys() != vars(part).keys():
            raise ValueError(f"it has {', '.join(tree)}, not {', '.join(vars(part))}")
        vars(part).update(_in_place_of(vars(part), tree))
    else:
        _check_shape(part, tree)
        if isinstance(part, np.ndarray):
            np.copyto(part, tree)
        else:
            part.detach().copy_(tree)
    return []


def _in_place_of(own: Any, saved: Any) -> Any:
    """The saved value, with tensors on the devices of those in `own`. One with a gradient is filled, since an optimiser
    may know it."""
    if isinstance(own, dict):
        return {name: _in_place_of(own.get(name), value) for name, value in saved.items()}
    if isinstance(own, (tuple, list)) and isinstance(saved, (tuple, list)) and len(own) == len(saved):
        return type(saved)(map(_in_place_of, own, saved))
    if hasattr(own, "shape") and hasattr(saved, "shape"):
        _check_shape(own, saved)
    if getattr(own, "requires_grad", False):
        own.detach().copy_(saved)
        return own
    return saved.to(own.device) if hasattr(own, "requires_grad") else saved


def _check_shape(part: Any, saved: Any) -> None:
    """An array of another shape may be repeated where it is copied, without a word."""
    shape = tuple(getattr(saved, "shape", ()))
    if shape != tuple(part.shape):
        raise ValueError(f"its shape is {shape}, not {tuple(part.shape)}")


# ---------------------------------------------------------------------- files
def safetensors(arrays: Mapping[str, np.ndarray], about: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file with `about` as metadata: equal arrays give equal bytes, which the library does not promise of
    metadata."""
    from safetensors.numpy import save

    data = save({name: np.asarray(array, order="C") for name, array in arrays.items()})  # it writes others wrongly
    if not about:
        return data
    end = 8 + int.from_bytes(data[:8], "little")  # of the header, after its length
    header = {"__metadata__": dict(sorted(about.items())), **json.loads(data[8:end])}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


def write_state(folder: Path, tree: Any) -> None:
    """Write one tree as the three files of a checkpoint into `folder`, which must not exist, and sync them."""
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(encode(tree, arrays))
    folder.mkdir(parents=True)
    (folder / "tensors.safetensors").write_bytes(safetensors(arrays))
    (folder / "state.json").write_text(text)
    manifest = {"format": 1, "sha256": {name: sha256(folder / name) for name in FILES}}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))
    for name in (*FILES, "manifest.json"):
        sync_file(folder / name)
    sync_file(folder)


def read_state(folder: Path) -> Any:
    """The tree of a checkpoint. Raises CheckpointError where a file is missing, truncated, changed or malformed."""
    from safetensors.numpy import load_file

    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        wrong = [name for name in FILES if sha256(folder / name) != manifest["sha256"][name]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder.name} is incomplete ({type(error).__name__}: {error})") from error
    if wrong:
        raise CheckpointError(f"{folder.name} is damaged: the checksum of {' and '.join(wrong)} does not match")
    try:
        return decode(json.loads((folder / "state.json").read_text()), load_file(folder / "tensors.safetensors"))
    except Exception as error:  # its sums are right, but it was not `write_state` that wrote it
        raise CheckpointError(f"{folder.name} is malformed ({reason(error)})") from error


def save_checkpoint(folder: Path, step: int, tree: Any) -> Path:
    """Write the checkpoint of `step`, then delete all but the newest two. Raises OSError (disk full, say): then the
    earlier checkpoints are as they were."""
    for leftover in folder.glob(".writing-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary, final = folder / f".writing-{os.getpid()}", folder / f"step_{step:012d}"
    try:
        write_state(temporary, tree)
        if final.exists():  # of an earlier session of this run: the same step, or damaged
            shutil.rmtree(final)
        temporary.rename(final)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_file(folder)
    for old in steps_in(folder)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_checkpoint(folder: Path, until: float = math.inf) -> tuple[Any | None, list[str]]:
    """The newest whole checkpoint of step `until` or before (None where there is none) and a sentence for each damaged
    one passed over."""
    notes: list[str] = []
    for path in reversed(steps_in(folder)):
        if step_of(path) <= until:
            try:
                return read_state(path), notes
            except CheckpointError as error:
                notes.append(str(error))
    return None, notes


def delete_newer(folder: Path, step: int) -> None:
    """Delete the checkpoints after `step`: a run that continues from there writes others."""
    for path in reversed(steps_in(folder)):
        if step_of(path) > step:
            shutil.rmtree(path, ignore_errors=True)
