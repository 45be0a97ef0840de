"""The policy of a script in JAX as an ONNX file: the operations into which JAX takes `act` apart, each written as one
or a few operations of ONNX.

Converters of whole models (jax2onnx 0.17) need Flax, Equinox, Orbax, Netron and a newer JAX than ours, and refuse a
function that asks for the length of its batch. That is why this module is ours.
The policies here need three dozen operations; one that is not in the tables below is refused by its name.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import onnx
from onnx import helper, numpy_helper

from solorl.errors import UsageError

OPSET, IR_VERSION = 18, 9  # of 2022 and 2023, which every ONNX Runtime of the last years reads
BATCH = 7919  # stands for the size of the batch in traced shapes: a prime number that no layer has
# Operations of JAX that only call others -> the parameter that holds these.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr"}
CALLS |= {"checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
# Operations that are one operation of ONNX without attributes.
SAME = {
    name: name.capitalize()
    for name in "add sub mul div max min exp log sqrt neg abs sign tanh erf floor ceil sin cos".split()
}
SAME |= {"logistic": "Sigmoid", "pow": "Pow", "and": "And", "or": "Or", "not": "Not", "eq": "Equal", "lt": "Less"}
SAME |= {"gt": "Greater", "le": "LessOrEqual", "ge": "GreaterOrEqual", "stop_gradient": "Identity", "copy": "Identity"}
SAME |= {"copy_p": "Identity"}
REDUCTIONS = {"reduce_max": "ReduceMax", "reduce_min": "ReduceMin", "reduce_sum": "ReduceSum"}


def interpret(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], apply: Callable[..., Sequence[Any]]
) -> list[Any]:
    """The outputs of a program of JAX, with `apply(equation, values)` for each operation that they need."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def value(atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype) if hasattr(atom, "val") else known[atom]

    for equation in needed(jaxpr):
        values = [value(atom) for atom in equation.invars]
        inner = equation.params.get(CALLS.get(equation.primitive.name, ""))
        if inner is not None:
            results: Sequence[Any] = interpret(inner.jaxpr, inner.consts, values, apply)
        else:
            results = apply(equation, values)
        known |= dict(zip(equation.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def needed(jaxpr: Any) -> list[Any]:
    """The operations on which the outputs depend, in their order."""
    wanted, found = {atom for atom in jaxpr.outvars if not hasattr(atom, "val")}, []
    for equation in reversed(jaxpr.eqns):
        if not wanted.isdisjoint(equation.outvars):
            found.append(equation)
            wanted |= {atom for atom in equation.invars if not hasattr(atom, "val")}
    return found[::-1]


def pieces(obs: np.ndarray) -> list[np.ndarray]:
    """At most 50 observations at once: a thousand images in a deep network would need more memory than there is."""
    return [obs[i : i + 50] for i in range(0, len(obs), 50)]


class JaxPolicy:
    """See `Exporter`. `policy`: a `PolicyOfSeed`."""

    def __init__(self, policy: Any, scores: str):
        self.policy, self.scores = policy, scores
        self.cpu = jax.devices("cpu")[0]

    def outputs(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The action is that of the compiled policy; the scores are those of the same operations, one by one."""
        with jax.default_device(self.cpu):
            found = self._one_by_one(inputs["obs"], np.float32)
            return found | {"action": np.concatenate([self.policy(piece) for piece in pieces(inputs["obs"])])}

    def exact(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `Exporter`."""
        enable_x64: Any = getattr(jax if hasattr(jax, "enable_x64") else jax.experimental, "enable_x64")  # noqa: B009
        with jax.default_device(self.cpu), enable_x64(True):
            return self._one_by_one(inputs["obs"], np.float64)

    def _one_by_one(self, obs: np.ndarray, precision: Any) -> dict[str, np.ndarray]:
        """The outputs, by the operations that the file will have; scores where the action is the best of them."""
        scores = []

        def bind(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
            if equation.primitive.name == "argmax":
                scores.append(np.asarray(values[0]))
            result = equation.primitive.bind(*values, **equation.params)
            return result if equation.primitive.multiple_results else [result]

        actions, best = [], []
        for piece in pieces(obs.astype(precision) if obs.dtype.kind == "f" else obs):
            program = self._traced(piece.shape, piece.dtype, precision)
            actions.append(np.asarray(*interpret(program.jaxpr, program.consts, [piece], bind)))
            best += scores[-1:]
            scores.clear()
        action = np.concatenate(actions)
        is_best = bool(best) and np.array_equal(np.concatenate(best).argmax(-1), action)
        return {"action": action} | ({self.scores: np.concatenate(best)} if is_best else {})

    def graph(self, inputs: Mapping[str, np.ndarray], batch_axes: Mapping[str, int]) -> Any:
        """See `Exporter`."""
        obs = inputs["obs"]
        wanted = self.outputs(inputs)
        with jax.default_device(self.cpu):
            given, writer = "obs", Writer()
            dtype = jax.dtypes.canonicalize_dtype(obs.dtype)  # JAX makes 32 bits of 64
            if obs.dtype != dtype:
                given = writer.node("Cast", ["obs"], to=helper.np_dtype_to_tensor_dtype(dtype))
            program = self._traced((BATCH, *obs.shape[1:]), dtype, np.float32)
            [action] = interpret(program.jaxpr, program.consts, [given], writer.write)
        names = {"action": action} | ({self.scores: writer.scores} if self.scores in wanted else {})
        return writer.model(obs, {name: (names[name], value) for name, value in wanted.items()})

    def _traced(self, shape: Sequence[int], dtype: Any, precision: Any) -> Any:
        """The operations of the policy for observations of a shape and type, with parameters of a precision."""
        params = self.policy.model()
        model = jax.tree.map(lambda x: np.asarray(x, precision if x.dtype == np.float32 else x.dtype), params)

        def act(obs: Any) -> Any:
            return self.policy.act(model, obs)

        program = jax.make_jaxpr(act)(jax.ShapeDtypeStruct(tuple(shape), dtype))
        if len(program.jaxpr.outvars) != 1:
            raise UsageError("the policy of this script cannot be exported: its action must be one array")
        return program


class Writer:
    """Writes a graph, operation by operation. A value is the name of a tensor, or an array that is known now."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.arrays: list[Any] = []
        self.scores: Any = None  # the input of the last argmax
        self.size = self.node("Shape", ["obs"], start=0, end=1)  # of the batch, (1,)

    def node(self, kind: str, inputs: Sequence[Any], count: int = 1, **attributes: Any) -> Any:
        """Add an operation; its output, or a list of `count` outputs."""
        names = [f"{kind.lower()}_{len(self.nodes)}_{i}" for i in range(count)]
        self.nodes.append(helper.make_node(kind, [self.name(x) for x in inputs], names, **attributes))
        return names[0] if count == 1 else names

    def name(self, value: Any) -> str:
        """The name of a value; an array becomes a part of the file."""
        if isinstance(value, str):
            return value
        self.arrays.append(numpy_helper.from_array(np.asarray(value), f"array_{len(self.arrays)}"))
        return str(self.arrays[-1].name)

    def write(self, equation: Any, values: Sequence[Any]) -> Sequence[Any]:
        """Write one operation of JAX; UsageError where the tables lack it."""
        name, params = equation.primitive.name, equation.params
        shapes = [atom.aval.shape for atom in (*equation.invars, *equation.outvars)]
        if not any(isinstance(x, str) for x in values) and not any(BATCH in shape for shape in shapes):
            results = equation.primitive.bind(*values, **params)  # of numbers that are known now
            return [np.asarray(x) for x in (results if equation.primitive.multiple_results else [results])]
        if name in SAME:
            return [self.node(SAME[name], values)]
        if name in REDUCTIONS:
            return [self.node(REDUCTIONS[name], [values[0], ints(params["axes"])], keepdims=0)]
        method = getattr(self, f"write_{name}", None)
        if method is None:
            raise UsageError(
                f"the policy of this script cannot be exported: JAX's operation {name} has no rule for ONNX"
            )
        result = method(equation, values, **params)
        return result if isinstance(result, list) else [result]

    # Each of these writes the operation of its name. Parameters that JAX's operation has and that do not matter for
    # the result (sharding, precision) are in `_`.
    def write_dot_general(self, equation: Any, values: Any, dimension_numbers: Any, **_: Any) -> Any:
        """A product of matrices; any other sum of products is an Einsum."""
        (left, right), (left_batch, right_batch) = dimension_numbers
        a, b = (atom.aval.ndim for atom in equation.invars)
        dtype = equation.outvars[0].aval.dtype  # JAX multiplies integers with floats, ONNX does not
        to = helper.np_dtype_to_tensor_dtype(dtype)
        pairs = zip(values, equation.invars, strict=True)
        values = [x if atom.aval.dtype == dtype else self.node("Cast", [x], to=to) for x, atom in pairs]
        if (tuple(left), tuple(right)) == ((a - 1,), (0,)) and not left_batch and b <= 2:
            return self.node("MatMul", values)
        letters = iter("abcdefghijklmnopqrstuvwxyz")
        of_left, of_right = [next(letters) for _ in range(a)], [next(letters) for _ in range(b)]
        for i, j in zip([*left, *left_batch], [*right, *right_batch], strict=True):
            of_right[j] = of_left[i]
        out = [of_left[i] for i in left_batch]
        out += [x for i, x in enumerate(of_left) if i not in (*left, *left_batch)]
        out += [x for j, x in enumerate(of_right) if j not in (*right, *right_batch)]
        return self.node("Einsum", values, equation=f"{''.join(of_left)},{''.join(of_right)}->{''.join(out)}")

    def write_reshape(self, equation: Any, values: Any, **_: Any) -> Any:
        """To the shape of the output; also `squeeze` and `expand_dims`."""
        return self.node("Reshape", [values[0], ints(flexible(equation.outvars[0].aval.shape))])

    write_squeeze = write_expand_dims = write_reshape

    def write_broadcast_in_dim(self, equation: Any, values: Any, broadcast_dimensions: Any, **_: Any) -> Any:
        """Axes of length 1 where the output has new ones, then repetition."""
        before, shape = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        ones = [1] * len(shape)
        for axis, size in zip(broadcast_dimensions, before, strict=True):
            ones[axis] = size
        value = self.node("Reshape", [values[0], ints(flexible(ones))])
        if tuple(ones) == tuple(shape):
            return value
        sizes = [self.size if size == BATCH else ints([size]) for size in shape]
        return self.node("Expand", [value, self.node("Concat", sizes, axis=0)])

    def write_transpose(self, equation: Any, values: Any, permutation: Any, **_: Any) -> Any:
        """Axes in another order."""
        return self.node("Transpose", values, perm=list(permutation))

    def write_convert_element_type(self, equation: Any, values: Any, new_dtype: Any, **_: Any) -> Any:
        """Another type."""
        return self.node("Cast", values, to=helper.np_dtype_to_tensor_dtype(np.dtype(new_dtype)))

    def write_argmax(self, equation: Any, values: Any, axes: Any, index_dtype: Any, **_: Any) -> Any:
        """The first of the largest; its input is noted as the scores."""
        self.scores = values[0]
        index = self.node("ArgMax", values, axis=axes[0], keepdims=0)
        return self.node("Cast", [index], to=helper.np_dtype_to_tensor_dtype(np.dtype(index_dtype)))

    def write_clamp(self, equation: Any, values: Any, **_: Any) -> Any:
        """Values between two bounds."""
        low, value, high = values
        return self.node("Min", [self.node("Max", [value, low]), high])

    def write_select_n(self, equation: Any, values: Any, **_: Any) -> Any:
        """One of two values, by a condition."""
        which, *cases = values
        if len(cases) != 2 or equation.invars[0].aval.dtype != bool:
            raise UsageError(
                "the policy of this script cannot be exported: its choice between several has no rule for ONNX"
            )
        return self.node("Where", [which, cases[1], cases[0]])

    def write_concatenate(self, equation: Any, values: Any, dimension: int, **_: Any) -> Any:
        """Tensors one after the other."""
        return self.node("Concat", values, axis=dimension)

    def write_pad(self, equation: Any, values: Any, padding_config: Any, **_: Any) -> Any:
        """A border of one number before and after each axis."""
        before, after, between = zip(*padding_config, strict=True)
        if any(between):
            raise UsageError(
                "the policy of this script cannot be exported: numbers between others have no rule for ONNX"
            )
        return self.node("Pad", [values[0], ints([*before, *after]), values[1]])

    def write_split(self, equation: Any, values: Any, sizes: Any, axis: int, **_: Any) -> Any:
        """Parts of a tensor."""
        found = self.node("Split", [values[0], ints(sizes)], len(sizes), axis=axis)
        return found if isinstance(found, list) else [found]

    def write_slice(self, equation: Any, values: Any, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
        """A part of each axis; the whole of that of the batch."""
        axes = [i for i, size in enumerate(equation.invars[0].aval.shape) if size != BATCH]
        bounds = [[all_axes[i] for i in axes] for all_axes in (start_indices, limit_indices, strides or [1] * 99)]
        starts, ends, steps = map(ints, bounds)
        return self.node("Slice", [values[0], starts, ends, ints(axes), steps])

    def write_integer_pow(self, equation: Any, values: Any, y: int, **_: Any) -> Any:
        """A power with a whole exponent."""
        return self.node("Pow", [values[0], np.asarray(y, equation.outvars[0].aval.dtype)])

    def write_square(self, equation: Any, values: Any, **_: Any) -> Any:
        """The square."""
        return self.node("Mul", [values[0], values[0]])

    def write_rsqrt(self, equation: Any, values: Any, **_: Any) -> Any:
        """One divided by the square root."""
        return self.node("Reciprocal", [self.node("Sqrt", values)])

    def model(self, obs: np.ndarray, outputs: Mapping[str, tuple[Any, np.ndarray]]) -> Any:
        """The file, whose outputs are values of the graph by their names; with an example of each."""
        for name, (value, _) in outputs.items():
            self.nodes.append(helper.make_node("Identity", [self.name(value)], [name]))
        examples = {"obs": obs} | {name: example for name, (_, example) in outputs.items()}
        described = [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(example.dtype), ["batch", *example.shape[1:]]
            )
            for name, example in examples.items()
        ]
        graph = helper.make_graph(self.nodes, "policy", described[:1], described[1:], self.arrays)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        onnx.checker.check_model(model)
        return model


def ints(values: Any) -> np.ndarray:
    """Shapes, axes and sizes as ONNX takes them."""
    return np.asarray([int(x) for x in values], np.int64)


def flexible(shape: Sequence[int]) -> list[int]:
    """A traced shape with -1 where the batch is; UsageError where it is in more than one axis."""
    found = [-1 if size % BATCH == 0 and size else size for size in shape]
    if found.count(-1) > 1:
        raise UsageError("the policy of this script cannot be exported: it has tensors with two axes of the batch")
    return found
