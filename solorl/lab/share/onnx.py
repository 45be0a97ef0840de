"""A trained policy as an ONNX file, which is put in place only after ONNX Runtime has computed the same with it.

The file has the input `obs` (batch, *obs_shape) and the output `action`; `logits` or `q_values` where the action is the
best of several. A policy with memory has also the inputs `state` and `first` and the output `next_state`.
"""

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from solorl.compute.device import CONFIRM, env_seed
from solorl.envs.surroundings import undisturbed
from solorl.errors import UsageError, needs_extra
from solorl.files import write
from solorl.run.evaluation import open_games, play_episodes
from solorl.run.load import LoadedPolicy, load
from solorl.terminal import plain

Arrays = dict[str, np.ndarray]
PACKAGES = ("onnx", "onnxruntime", "onnxscript")  # what the extra brings
TOLERANCE = 1e-5  # of relative errors
MORE = 4  # times as far from double precision as the run may the file be: twice as far was measured
BATCHES = (1, 7, 64, 428, 500)  # sizes of the batches of observations on which a file is checked
OBSERVATIONS = sum(BATCHES)
NUM_ENVS = 8  # that play for half of the observations
FIRST_SEED = 2**18  # of the stream CONFIRM, apart from those of trainings and of `solo play`


class CheckFailed(Exception):
    """What ONNX Runtime computes differs from what the policy computes; one sentence."""


class Exporter(Protocol):
    """A policy of one framework."""

    def outputs(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """What the policy computes, in its own framework."""

    def exact(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """The same in double precision."""

    def graph(self, inputs: Mapping[str, np.ndarray], batch_axes: Mapping[str, int]) -> Any:
        """The policy as an `onnx.ModelProto` with the outputs of `outputs`; UsageError where that cannot be done."""


def export(run_dir: Path, path: Path, *, last: bool = False, trust_script: bool = False) -> str:
    """Write the greedy policy of a run folder, with its normaliser, as an ONNX file. Returns what was written and how
    exact it is, in words.

    `last` and `trust_script`: see `load`. UsageError for bad input, CheckFailed where the file would not compute what
    the policy does; nothing is written then.
    """
    require_packages()
    require_place(path)
    loaded = load(run_dir, last=last, trust_script=trust_script, device="cpu")
    names = names_of_model(run_dir / ("model_last.safetensors" if last else "model.safetensors"))
    scores = "logits" if any("actor" in name.split(".") for name in names) else "q_values"
    with undisturbed():
        exporter = exporter_of(loaded, scores)
        inputs, batch_axes = observations(loaded)
        model = exporter.graph(batch(inputs, batch_axes, 0, 3), batch_axes)
        describe(model, loaded)
        data = model.SerializeToString()
        errors, ties = check(data, exporter, inputs, batch_axes)
    write(path, data)
    found = [f"largest relative error of {name} {error:.1e}" for name, error in errors.items()]
    if "action" not in errors:
        found.append(f"actions equal except {ties} where the two best are equally good")
    checked = f"checked with ONNX Runtime on {OBSERVATIONS:,} observations: {'; '.join(found)}"
    sides = (("input ", model.graph.input), ("output", model.graph.output))
    lines = [f"{side} {', '.join(f'{name} {kind}' for name, kind in types_of(of).items())}" for side, of in sides]
    return "\n".join(map(plain, [f"wrote {path}", *lines, checked]))


# ---------------------------------------------------------------------- before
def require_packages() -> None:
    """UsageError where a package of the extra is missing."""
    for name in PACKAGES:
        if find_spec(name) is None:
            raise UsageError(needs_extra(f"solo export, which needs {name},", "onnx"))


def require_place(path: Path) -> None:
    """UsageError where no ONNX file can be written at `path`."""
    if path.suffix != ".onnx":
        raise UsageError(f"solo export writes an ONNX file, whose name ends in .onnx: {path.with_suffix('.onnx')}")
    if not path.resolve().parent.is_dir():
        raise UsageError(f"the folder {path.resolve().parent} does not exist")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it: {path / 'policy.onnx'}")


def names_of_model(path: Path) -> list[str]:
    """The names of the arrays in a file of safetensors."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return list(file.keys())


def exporter_of(loaded: LoadedPolicy, scores: str) -> Exporter:
    """The policy as its framework exports it. `scores`: the name of the numbers of which the action has the largest."""
    if hasattr(loaded.policy, "compiled"):
        from solorl.lab.share.onnx_jax import JaxPolicy

        if "state" in inspect.signature(loaded.policy).parameters:
            raise UsageError("the policy of this script cannot be exported: it is in JAX and has memory")
        return JaxPolicy(loaded.policy, scores)
    from solorl.lab.share.onnx_torch import TorchPolicy

    return TorchPolicy(loaded.policy, scores)


# ---------------------------------------------------------------------- observations
class _Enough(Exception):
    """The number of observations that were seen."""


def observations(loaded: LoadedPolicy) -> tuple[Arrays, dict[str, int]]:
    """Inputs of the policy, `OBSERVATIONS` of them, half from games and half random; and the axis of each input that
    counts them. UsageError where the policy or its environment is of a kind that cannot be exported."""
    half = OBSERVATIONS // 2
    seen = played(loaded, half)
    if not isinstance(seen[0][0], np.ndarray) or seen[0][0].dtype.kind not in "fiu":
        raise UsageError(f"{loaded.env_id} has observations that are not arrays of numbers; they cannot be exported")
    inputs = {"obs": np.concatenate([obs for obs, *_ in seen])[:half]}
    axes, rng = {"obs": 0}, np.random.default_rng(0)
    if len(seen[0]) > 1:
        states, axis = states_of(loaded, seen)
        order = rng.permutation(half)
        inputs["state"] = np.concatenate([states, states.take(order, axis)], axis)
        inputs["first"] = np.concatenate(
            [[first for *_, firsts in seen for first in firsts][:half], rng.random(half) < 0.1]
        )
        axes |= {"state": axis, "first": 0}
    inputs["obs"] = np.concatenate([inputs["obs"], like(inputs["obs"], rng)])
    return inputs, axes


def played(loaded: LoadedPolicy, count: int) -> list[tuple[Any, ...]]:
    """What the policy was given, call by call, until it has seen `count` observations."""
    games = open_games(loaded.maker, loaded.env_id, NUM_ENVS)
    seen: list[tuple[Any, ...]] = []

    @functools.wraps(loaded.policy)  # with its parameters, which say whether it has memory
    def noted(obs: Any, *memory: Any, **others: Any) -> Any:
        if others:
            raise UsageError(f"the policy takes {', '.join(others)}, which an exported one cannot")
        seen.append((np.array(obs) if isinstance(obs, np.ndarray) else obs, *memory))
        if len(seen) * NUM_ENVS >= count:
            raise _Enough
        return loaded.policy(obs, *memory)

    try:
        for i in range(count):
            play_episodes(games, noted, [env_seed(0, CONFIRM, FIRST_SEED + i * NUM_ENVS + j) for j in range(NUM_ENVS)])
    except _Enough:
        pass
    finally:
        for game in games:
            game.close()
    return seen


def states_of(loaded: LoadedPolicy, seen: Sequence[tuple[Any, ...]]) -> tuple[np.ndarray, int]:
    """The memory that the policy was given with each observation, and the axis that counts the observations."""
    import torch

    obs = seen[0][0]
    shapes = []
    for n in (2, 3):
        _, state = loaded.policy(obs[:n], None, np.ones(n, bool))
        if not isinstance(state, torch.Tensor):
            raise UsageError(
                f"the memory of the policy is of type {type(state).__name__}; only one tensor can be exported"
            )
        shapes.append(state.shape)
    axes = [axis for axis, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b]
    if len(axes) != 1:
        raise UsageError(
            f"the memory of the policy must have one axis of environments, but is {tuple(shapes[0])} for 2"
        )
    empty = np.zeros([NUM_ENVS if axis == axes[0] else size for axis, size in enumerate(shapes[0])], np.float32)
    states = np.concatenate([empty if state is None else state.numpy() for _, state, _ in seen], axes[0])
    return states.take(np.arange(OBSERVATIONS // 2), axes[0]), axes[0]


def like(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Random observations of the type of `obs`: bytes of any value, else numbers spread three times as far."""
    if obs.dtype.kind in "iu":
        low, high = (0, 255) if obs.dtype == np.uint8 else (obs.min(), obs.max())
        return rng.integers(low, high, obs.shape, obs.dtype, endpoint=True)
    return (obs.mean(0) + 3 * obs.std(0) * rng.standard_normal(obs.shape)).astype(obs.dtype)


def batch(inputs: Mapping[str, np.ndarray], axes: Mapping[str, int], start: int, size: int) -> Arrays:
    """`size` observations from number `start` on, and what belongs to them."""
    return {name: value.take(np.arange(start, start + size), axes[name]) for name, value in inputs.items()}


# ---------------------------------------------------------------------- the check
def check(
    data: bytes, exporter: Exporter, inputs: Mapping[str, np.ndarray], axes: Mapping[str, int]
) -> tuple[dict[str, float], int]:
    """The largest relative error of each output that is not a discrete action, and how many actions differ because the
    two best scores are equal. CheckFailed where ONNX Runtime computes something else from `data`."""
    wanted, got = [], []
    for part, result in computed(data, inputs, axes):
        wanted.append(exporter.outputs(part))
        got.append({name: result.get(name) for name in wanted[-1]})
        for name, value in wanted[-1].items():
            found = (getattr(result.get(name), "dtype", "missing"), getattr(result.get(name), "shape", ""))
            if found != (value.dtype, value.shape):
                fail(f"{name} is {found[0]} {found[1]} instead of {value.dtype} {value.shape}")
    batch_axis = {name: axes["state"] if name == "next_state" else 0 for name in wanted[0]}
    whole, found_whole = (joined(parts, batch_axis) for parts in (wanted, got))
    errors, ties = {}, 0
    for name, value in whole.items():
        if value.dtype.kind == "f":
            errors[name] = relative_error(value, found_whole[name])
            if not errors[name] <= TOLERANCE:
                check_rounding(exporter, inputs, name, value, found_whole[name])
    differ = whole["action"] != found_whole["action"]
    if "action" not in errors and differ.any():
        scores = next((name for name in ("logits", "q_values") if name in errors), "")
        allowed = max(TOLERANCE, 2 * errors.get(scores, 0.0))  # each of the two may be off
        if not scores or not equally_good(whole[scores][differ], allowed * scale_of(whole[scores])[differ]):
            fail(f"{differ.sum()} of {OBSERVATIONS:,} actions differ")
        ties = int(differ.sum())
    return errors, ties


def joined(parts: Sequence[Mapping[str, Any]], batch_axis: Mapping[str, int]) -> Arrays:
    """The outputs of several batches in one; the batch is the first axis then."""
    return {
        name: np.moveaxis(np.concatenate([part[name] for part in parts], axis), axis, 0)
        for name, axis in batch_axis.items()
    }


def check_rounding(
    exporter: Exporter, inputs: Mapping[str, np.ndarray], name: str, wanted: np.ndarray, got: np.ndarray
) -> None:
    """Where numbers cancel each other, as in the mean of a distribution around zero, each order of sums rounds in its
    own way. CheckFailed where the output `got` of the file is further from double precision than MORE times that of the
    run, `wanted`."""
    try:
        exact = exporter.exact(inputs)[name]
        exact = np.moveaxis(exact, exact.shape.index(OBSERVATIONS), 0)
    except Exception:  # somebody's own script may be unable to do it: then what the run computes is right
        exact = wanted
    error, limit = relative_error(exact, got), max(TOLERANCE, MORE * relative_error(exact, wanted))
    if not error <= limit:
        fail(f"{name} has a relative error of {error:.1e}, more than {limit:.1g}")


def computed(data: bytes, inputs: Mapping[str, np.ndarray], axes: Mapping[str, int]) -> Iterator[tuple[Arrays, Arrays]]:
    """The inputs of each batch, and what ONNX Runtime computes from them. CheckFailed where it cannot."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    try:
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        start = 0
        for size in BATCHES:
            part = batch(inputs, axes, start, size)
            yield part, dict(zip(names, session.run(names, part), strict=True))
            start += size
    except Exception as error:  # ONNX Runtime has its own exceptions for everything
        if isinstance(error, (CheckFailed, UsageError)):
            raise
        fail(f"ONNX Runtime says: {' '.join(str(error).split()):.200}")


def fail(what: str) -> NoReturn:
    """Raise CheckFailed."""
    raise CheckFailed(
        f"the exported policy does not compute what the policy of the run does: {what}; nothing was written"
    )


def relative_error(wanted: np.ndarray, got: np.ndarray) -> float:
    """The largest difference (n, ...), relative to `scale_of`."""
    error = np.abs(wanted.astype(np.float64) - got).reshape(len(wanted), -1).max(1)
    return float(np.max(np.where(error == 0, 0.0, error / scale_of(wanted))))


def scale_of(values: np.ndarray) -> np.ndarray:
    """Of each row of (n, ...) the largest number or, where that is larger, the root mean square of all rows: a number
    near zero is often a difference of larger ones, and has their rounding errors."""
    rows = np.abs(values.astype(np.float64)).reshape(len(values), -1)
    return np.maximum(np.maximum(rows.max(1), np.sqrt((rows**2).mean())), np.finfo(np.float64).tiny)


def equally_good(scores: np.ndarray, limit: np.ndarray) -> bool:
    """Whether everywhere the two best differ by less than a limit; scores (n, ..., num_actions), limit (n,)."""
    best = np.sort(scores, -1)
    return bool((best[..., -1] - best[..., -2] < limit).all())


# ---------------------------------------------------------------------- what the file says
def describe(model: Any, loaded: LoadedPolicy) -> None:
    """Note in the file which policy it is, and what its actions are."""
    from onnx.helper import set_model_props

    [env, *_] = games = open_games(loaded.maker, loaded.env_id, 1)
    space = getattr(env, "single_action_space", env.action_space)
    for game in games:
        game.close()
    set_model_props(model, {"env_id": loaded.env_id, "action_space": str(space)})


def types_of(values: Sequence[Any]) -> dict[str, str]:
    """Name -> type and shape of the inputs or outputs of a graph."""
    from onnx.helper import tensor_dtype_to_np_dtype

    found = {}
    for value in values:
        kind = value.type.tensor_type
        shape = ", ".join("batch" if dim.dim_param else str(dim.dim_value) for dim in kind.shape.dim)
        found[value.name] = f"{tensor_dtype_to_np_dtype(kind.elem_type)} ({shape})"
    return found
