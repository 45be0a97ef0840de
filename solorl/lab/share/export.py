"""A trained policy as one file that runs without SoloRL: ONNX from torch, StableHLO from JAX.

Its input is `obs` (batch, *obs_shape), its output `action`; of a policy with memory also `state` and `first`, and
`next_state`. The file is put in place only after it has computed the same as the policy of the run.
"""

import inspect
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from solorl.errors import UsageError, needs_extra, refuse
from solorl.files import write
from solorl.lab.share import stablehlo
from solorl.lab.share.stablehlo import Arrays, Compute
from solorl.run.load import LoadedPolicy, load
from solorl.terminal import plain

# How a file ends -> what it is, the packages that writing it needs, and the extra that brings them.
FORMATS = {
    ".onnx": ("ONNX, of a script in torch", ("onnx", "onnxruntime", "onnxscript"), "onnx"),
    ".stablehlo": ("StableHLO, of a script in JAX", ("jax", "flatbuffers"), "jax"),
}
TOLERANCE = 1e-4  # of relative errors; C51's means round by 2e-5
BATCHES = (1, 7, 64, 428, 500)  # sizes of the batches of observations on which a file is checked
OBSERVATIONS = sum(BATCHES)
FIRST_SEED = 2**40  # of the games, apart from those of trainings


class CheckFailed(Exception):
    """What a file computes differs from what the policy computes; one sentence."""


def export(run_dir: Path, path: Path, *, last: bool = False, trust_script: bool = False) -> str:
    """Write the greedy policy of a run folder, with its normaliser, into a file. Returns what was written and how exact
    it is, in words.

    `last` and `trust_script`: see `load`. UsageError for bad input, CheckFailed where the file would not compute what
    the policy does; nothing is written then.
    """
    require_place(path)
    loaded = load(run_dir, last=last, trust_script=trust_script, device="cpu")
    suffix = ".stablehlo" if hasattr(loaded.policy, "compiled") else ".onnx"
    if path.suffix != suffix:
        raise UsageError(f"the policy of this run is exported as {path.with_suffix(suffix)}: {FORMATS[suffix][0]}")
    inputs, axes = observations(loaded)
    if suffix == ".onnx":
        from solorl.lab.share import onnx  # here: it needs torch

        data, policy, file = onnx.converted(loaded, inputs, axes)
    else:
        data, policy, file = stablehlo.converted(loaded, inputs, axes)
    axes |= {"next_state": axes.get("state", 0)}
    wanted, got = outputs(policy, inputs, axes), outputs(file, inputs, axes)
    said = compare(wanted, got, axes)
    write(path, data)
    lines = [f"wrote {path}", f"input  {described(inputs, axes)}", f"output {described(wanted, axes)}"]
    lines.append(f"checked on {OBSERVATIONS:,} observations: {said}")
    return "\n".join(map(plain, lines))


def require_place(path: Path) -> None:
    """UsageError where no such file can be written at `path`, or a package for it is missing."""
    kinds = " or ".join(f"in {suffix} ({kind})" for suffix, (kind, *_) in FORMATS.items())
    refuse(path.suffix not in FORMATS, f"solo export writes a file whose name ends {kinds}, as in policy.onnx")
    refuse(not path.resolve().parent.is_dir(), f"the folder {path.resolve().parent} does not exist")
    refuse(path.is_dir(), f"{path} is a folder; name a file in it: {(path / 'policy').with_suffix(path.suffix)}")
    _, packages, extra = FORMATS[path.suffix]
    for name in packages:
        refuse(find_spec(name) is None, needs_extra(f"solo export, which needs {name},", extra))


# ---------------------------------------------------------------------- observations
def observations(loaded: LoadedPolicy) -> tuple[Arrays, dict[str, int]]:
    """Inputs of the policy, `OBSERVATIONS` of them, half from games and half random; and the axis of each that counts
    them. UsageError where the policy or its environment is of a kind that cannot be exported."""
    half, rng = OBSERVATIONS // 2, np.random.default_rng(0)
    seen = list(played(loaded, half))
    axes = dict.fromkeys(seen[0], 0)
    if "state" in axes:
        obs = np.concatenate([each["obs"] for each in seen[:3]])
        two, three = (np.shape(loaded.policy(obs[:n], None, np.ones(n, bool))[1]) for n in (2, 3))
        axes["state"] = next(i for i, (a, b) in enumerate(zip(two, three, strict=True)) if a != b)
        empty = np.zeros_like(seen[-1]["state"])
        seen = [each | {"state": empty if each["state"] is None else each["state"]} for each in seen]
    inputs = {name: np.concatenate([each[name] for each in seen], axis) for name, axis in axes.items()}
    order = rng.permutation(half)
    random = {name: values.take(order, axes[name]) for name, values in inputs.items()}
    random["obs"] = like(inputs["obs"], rng)
    if "first" in random:
        random["first"] = rng.random(half) < 0.1
    return {name: np.concatenate([inputs[name], random[name]], axis) for name, axis in axes.items()}, axes


def played(loaded: LoadedPolicy, count: int) -> Iterator[dict[str, Any]]:
    """What the policy is given in each of `count` steps of its own games, by the names of its parameters."""
    act, known = loaded.policy, inspect.signature(loaded.policy).parameters
    refuse("action_mask" in known, "the policy takes action_mask, which an exported one cannot")
    together = "num_envs" in inspect.signature(loaded.maker).parameters  # it makes vector environments
    env = loaded.make_env(num_envs=1) if together else loaded.make_env()
    state, first, obs = None, True, env.reset(seed=FIRST_SEED)[0]
    for i in range(count):
        if isinstance(obs, (dict, tuple)) or (obs := np.array(obs)).dtype.kind not in "fiu":
            what = "observations that are not arrays of numbers; they cannot be exported"
            raise UsageError(f"{loaded.env_id} has {what}")
        given = {"obs": obs if together else obs[None]}
        given |= {"state": state, "first": np.array([first])} if "state" in known else {}
        result = act(*given.values())
        action, state = result if "state" in known else (result, None)
        if not isinstance(action, np.ndarray) or isinstance(state, (dict, list, tuple)):
            raise UsageError("the policy of this script cannot be exported: action and memory must each be one array")
        yield {name: x if x is None else np.asarray(x) for name, x in given.items()}
        obs, _, terminated, truncated, _ = env.step(action if together else action[0])
        first = bool(np.any(terminated) or np.any(truncated))
        if first and not together:
            obs, _ = env.reset(seed=FIRST_SEED + i + 1)
    env.close()


def like(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Random observations of the type of `obs`: bytes of any value, else numbers spread three times as far."""
    if obs.dtype.kind in "iu":
        low, high = (0, 255) if obs.dtype == np.uint8 else (obs.min(), obs.max())
        return rng.integers(low, high, obs.shape, obs.dtype, endpoint=True)
    return (obs.mean(0) + 3 * obs.std(0) * rng.standard_normal(obs.shape)).astype(obs.dtype)


# ---------------------------------------------------------------------- the check
def outputs(compute: Compute, inputs: Arrays, axes: Mapping[str, int]) -> Arrays:
    """What is computed from all inputs, in BATCHES. CheckFailed where it cannot."""
    parts = []
    for rows in np.split(np.arange(OBSERVATIONS), np.cumsum(BATCHES)[:-1]):
        try:
            parts.append(compute({name: value.take(rows, axes[name]) for name, value in inputs.items()}))
        except Exception as error:  # each runtime has its own exceptions for everything
            fail(f"it says: {' '.join(str(error).split()):.200}")
    return {name: np.concatenate([part[name] for part in parts], axes.get(name, 0)) for name in parts[0]}


def compare(wanted: Arrays, got: Arrays, axes: Mapping[str, int]) -> str:
    """How exact the outputs of a file are, in words. CheckFailed where they differ from the policy's; discrete actions
    may, where the two best are equally good."""
    found, scales = [], {}
    for name, value in wanted.items():
        other = got.get(name, np.zeros(0))
        if (other.dtype, other.shape) != (value.dtype, value.shape):
            fail(f"{name} is {other.dtype} {other.shape} instead of {value.dtype} {value.shape}")
        if value.dtype.kind == "f":
            value, other = (np.moveaxis(x.astype(np.float64), axes.get(name, 0), 0) for x in (value, other))
            scales[name] = scale_of(value)
            error = np.abs(value - other).reshape(len(value), -1).max(1) / scales[name]
            if not error.max() <= TOLERANCE:
                fail(f"{name} has a relative error of {error.max():.1e}, more than {TOLERANCE:.1g}")
            found.append(f"largest relative error of {name} {error.max():.1e}")
    differ = np.nonzero(wanted["action"] != got["action"]) if "action" not in scales else ()
    if len(differ):
        name = next((name for name in ("logits", "q_values") if name in wanted), "")
        best = np.sort(wanted[name][differ], -1)[..., -2:] if name else np.zeros((len(differ[0]), 2))
        if len(differ[0]) and not (name and np.all(np.ptp(best, -1) <= 2 * TOLERANCE * scales[name][differ[0]])):
            fail(f"{len(differ[0])} of {OBSERVATIONS:,} actions differ")
        ties = f", except {len(differ[0])} where the two best are equally good" if len(differ[0]) else ""
        found.append(f"discrete actions equal{ties}")
    return "; ".join(found)


def scale_of(values: np.ndarray) -> np.ndarray:
    """Of each row of (n, ...) the largest number or, where that is larger, the root mean square of all rows: a number
    near zero is often a difference of larger ones, and has their rounding errors."""
    rows = np.abs(values).reshape(len(values), -1)
    return np.maximum(np.maximum(rows.max(1), np.sqrt((rows**2).mean())), np.finfo(np.float64).tiny)


def fail(what: str) -> NoReturn:
    """Raise CheckFailed."""
    differs = "the exported policy does not compute what the policy of the run does"
    raise CheckFailed(f"{differs}: {what}; nothing was written")


def described(arrays: Arrays, axes: Mapping[str, int]) -> str:
    """The names, types and shapes of inputs or outputs."""
    found = []
    for name, value in arrays.items():
        shape = ", ".join("batch" if i == axes.get(name, 0) else str(n) for i, n in enumerate(value.shape))
        found.append(f"{name} {value.dtype} ({shape})")
    return ", ".join(found)
