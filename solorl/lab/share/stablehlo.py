"""The policy of a script in JAX as StableHLO, by `jax.export`: `jax.export.deserialize(data).call(obs)` computes it."""

from collections.abc import Callable
from typing import Any

import numpy as np

from solorl.errors import told
from solorl.run.load import LoadedPolicy

Arrays = dict[str, np.ndarray]
Compute = Callable[[Arrays], Arrays]  # inputs of a batch, by name -> outputs
PLATFORMS = ("cpu", "cuda", "tpu")  # on which the file runs


def converted(loaded: LoadedPolicy, inputs: Arrays, axes: dict[str, int]) -> tuple[bytes, Compute, Compute]:
    """The bytes of the file, what the policy computes, and what the file computes."""
    import jax
    from jax import export

    policy: Any = loaded.policy
    model, places, remembers = policy.model(), [axes[name] for name in inputs], "state" in inputs

    def one(*x: Any) -> Any:  # for one observation: scripts ask for `len(obs)`, which must be a number
        result = policy.compiled(model, *map(jax.numpy.expand_dims, x, places))
        return (result[0][0], result[1].squeeze(axes["state"])) if remembers else result[0]

    [count] = export.symbolic_shape("batch")
    shapes = [[*x.shape[:at], count, *x.shape[at + 1 :]] for x, at in zip(inputs.values(), places, strict=True)]
    kinds = [jax.dtypes.canonicalize_dtype(x.dtype) for x in inputs.values()]
    act = jax.jit(jax.vmap(one, places, (0, axes["state"]) if remembers else 0))
    with told("the policy of this script cannot be exported"):
        data = bytes(export.export(act, platforms=PLATFORMS)(*map(jax.ShapeDtypeStruct, shapes, kinds)).serialize())
    call = export.deserialize(bytearray(data)).call

    def named(result: Any) -> Arrays:
        return dict(zip(("action", "next_state"), map(np.asarray, result if remembers else [result])))  # noqa: B905

    return data, lambda x: named(policy(*x.values())), lambda x: named(call(*x.values()))
