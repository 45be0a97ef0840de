"""Speed that changes no result except by rounding: forward passes in NumPy, gradient steps on flat parameters.

`--no-fast` switches it off: then everything here is plain PyTorch.
"""

import importlib.util
import math
import operator
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.fx
import torch.nn as nn

from solorl.errors import UsageError

ZERO = np.zeros((), np.float32)  # NumPy is faster with an array than with a number of Python
SAME = ("add", "sub", "mul", "truediv", "neg", "getitem", "matmul")  # in NumPy as in torch
# What NumPy does instead of torch. Methods and functions of tensors have the same arguments as in torch.
OPERATIONS: dict[Any, Callable[..., Any]] = {
    **{function: function for function in map(vars(operator).__getitem__, SAME)},
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, ZERO),
    "exp": np.exp,
    "sqrt": np.sqrt,
    "clamp": lambda x, low, high: np.minimum(np.maximum(x, low), high),  # np.clip takes twice as long
    "mean": lambda x, dim, keepdim=False: x.mean(dim, keepdims=keepdim),
    "sum": lambda x, dim, keepdim=False: x.sum(dim, keepdims=keepdim),
    "squeeze": lambda x, dim: x.squeeze(dim),
    "flatten": lambda x, start_dim: x.reshape(*x.shape[:start_dim], -1),
    "unflatten": lambda x, dim, sizes: x.reshape(*x.shape[:dim], *sizes, *x.shape[dim:][1:]),
    "softmax": lambda x, dim: _softmax(x, dim),
    "log_softmax": lambda x, dim: _log_softmax(x, dim),
}
LAYERS: dict[type, Callable[..., Any]] = {nn.Identity: lambda x: x, nn.Tanh: np.tanh, nn.ReLU: OPERATIONS["relu"]}


def _softmax(x: np.ndarray, dim: int) -> np.ndarray:
    x = np.exp(x - x.max(dim, keepdims=True))
    return x / x.sum(dim, keepdims=True)


def _log_softmax(x: np.ndarray, dim: int) -> np.ndarray:
    x = x - x.max(dim, keepdims=True)
    return x - np.log(np.exp(x).sum(dim, keepdims=True))


class Tracer(torch.fx.Tracer):
    """Notes also what is computed from buffers, which change as parameters do."""

    proxy_buffer_attributes = True


class Forward:
    """A module as a function from a NumPy batch (n, ...) to a NumPy batch, always with its present weights and buffers.

    On the CPU, if `fast`, its operations are traced once and then done by NumPy, which needs several microseconds less
    for each; a module with other operations than those of the tables above is called in torch. Weights and buffers must
    change in place (`buffer += ...`, `buffer.copy_(...)`); only all of them together may move to other memory.
    """

    def __init__(self, module: nn.Module, fast: bool):
        self.module, self.fast = module, fast
        self.weight = next(chain(module.parameters(), module.buffers()))
        self._address, self._in_numpy = self.weight.data_ptr(), self._trace()

    def __call__(self, x: np.ndarray) -> Any:
        """The output of the module; a tuple where it gives one."""
        if self.weight.data_ptr() != self._address:  # the weights have moved to other memory
            self._address, self._in_numpy = self.weight.data_ptr(), self._trace()
        if self._in_numpy is not None:
            return self._in_numpy(x.astype(np.float32, copy=False))
        dtype = torch.uint8 if x.dtype == np.uint8 else torch.float32  # images are moved as bytes
        with torch.no_grad():
            y = self.module(torch.as_tensor(x, dtype=dtype, device=self.weight.device))
        return tuple(one.cpu().numpy() for one in y) if isinstance(y, tuple) else y.cpu().numpy()

    @property
    def in_numpy(self) -> bool:
        """Whether NumPy knows all operations of the module."""
        return self._in_numpy is not None

    def _trace(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """The module as a function of NumPy with views of the weights; None if NumPy lacks one of its operations."""
        if not self.fast or self.weight.device.type != "cpu":
            return None
        try:
            first, *nodes, output = Tracer().trace(self.module).nodes
            # One line of Python for each operation: a loop over a list of them would take a third of their time.
            lines: list[str] = []
            objects: dict[str, Any] = {}
            names: dict[Any, str] = {first: "x"}

            def name_of(operand: Any) -> str:
                if isinstance(operand, torch.fx.Node):
                    return names[operand]
                objects[f"o{len(objects)}"] = operand
                return f"o{len(objects) - 1}"

            for node in nodes:
                if node.op == "get_attr":
                    names[node] = name_of(operator.attrgetter(str(node.target))(self.module).detach().numpy())
                    continue
                function, weights = self._operation(node)
                operands = [name_of(x) for x in (*node.args, *weights)]
                operands += [f"{key}={name_of(x)}" for key, x in node.kwargs.items()]
                names[node] = f"x{len(lines)}"
                lines.append(f"    {names[node]} = {name_of(function)}({', '.join(operands)})\n")
            results = output.args[0] if isinstance(output.args[0], tuple) else output.args
            returned = ", ".join(names[node] for node in results)
            source = f"def forward(x):\n{''.join(lines)}    return {returned}\n"
            exec(source, objects)
            return objects["forward"] if first.op == "placeholder" else None
        except Exception:  # an operation that is not in the tables, a control flow that depends on the data
            return None

    def _operation(self, node: torch.fx.Node) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function that does the operation of a node, and the weights it takes."""
        if node.op != "call_module":
            return OPERATIONS[node.target], ()
        layer = self.module.get_submodule(str(node.target))
        if type(layer) is nn.Linear:
            return linear, (layer.weight.detach().numpy().T, layer.bias.detach().numpy())
        return LAYERS[type(layer)], ()


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """What `nn.Linear` does; weight (fan_in, fan_out)."""
    return np.dot(x, weight) + bias  # faster than `x @ weight` where x has few rows


def gradients_of(
    flat: bool, parameters: list[Any], loss_of: Callable[..., Any], module: nn.Module, *inputs: Any
) -> tuple[Any, Any]:
    """The gradients of `loss_of(module, *inputs)` for the parameters of `module`, as one vector if `flat`, and the
    metrics of the loss.

    Loss and derivative are in one function to be compiled together: compiling the loss alone gains nothing.
    """
    loss, metrics = loss_of(module, *inputs)
    gradients = torch.autograd.grad(loss, parameters)
    metrics = {name: value.detach() for name, value in metrics.items()}
    return torch.cat([x.flatten() for x in gradients]) if flat else gradients, metrics


class GradientStep:
    """`metrics = step(*inputs)`: one step of the optimiser down the gradient of `loss_of(module, *inputs)`.

    If `fast`, the parameters of `module` become views of one vector, and that vector is all that the optimiser sees:
    clipping and stepping are single operations; not so where the optimiser has several groups of parameters. All
    parameters of `module` must take part in the loss. `average` maps a list of tensors, gradients and metrics, to what
    they are over all ranks.
    """

    def __init__(
        self,
        loss_of: Any,
        module: nn.Module,
        optimizer: Any,
        max_grad_norm: float,
        compiled: Any,
        fast: bool,
        average: Callable[[list[Any]], list[Any]] | None = None,
    ):
        self.average = average
        self.loss_of, self.module, self.optimizer, self.max_grad_norm = loss_of, module, optimizer, max_grad_norm
        self.parameters = list(module.parameters())
        self.gradients = compiled(gradients_of)
        self.vector: Any = None
        if fast and len(optimizer.param_groups) == 1:
            self.vector = nn.Parameter(nn.utils.parameters_to_vector(self.parameters).detach())
            nn.utils.vector_to_parameters(self.vector.data, self.parameters)
            group = optimizer.param_groups[0]
            group["params"] = [self.vector]
            if "fused" in group:
                group["fused"] = True

    def __call__(self, *inputs: Any) -> Any:
        """Take the step; returns the metrics of the loss."""
        flat = self.vector is not None
        gradients, metrics = self.gradients(flat, self.parameters, self.loss_of, self.module, *inputs)
        if self.average is not None:
            own = [gradients] if flat else gradients
            means = self.average([*own, *metrics.values()])
            gradients = means[0] if flat else means[: len(own)]
            metrics = dict(zip(metrics, means[len(own) :], strict=True))
        if self.vector is None:
            for parameter, one in zip(self.parameters, gradients, strict=True):
                parameter.grad = one
            if self.max_grad_norm < math.inf:
                nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        else:
            self.vector.grad = gradients
            if self.max_grad_norm < math.inf:
                gradients *= (self.max_grad_norm / (gradients.norm() + 1e-6)).clamp(max=1)
        self.optimizer.step()
        return metrics


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`torch.compile(function)`, on the CPU with calls in C++ and the products of `onednn`. UsageError where torch
    cannot compile here."""
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):  # else torch.autograd.grad cuts the graph in two
        torch._dynamo.config.trace_autograd_ops = True
    options: dict[str, Any] = {}
    if device.type == "cpu":
        problem = compile_problem(Path(torch.__file__).parent)
        if problem:
            raise UsageError(f"--compile {problem}; train without --compile")
        options["cpp_wrapper"] = True
        if importlib.util.find_spec("torch._inductor.custom_graph_pass"):  # since torch 2.6
            from solorl.compute.onednn import ProductsByOneDNN, onednn_is_faster

            if onednn_is_faster():
                options["post_grad_custom_pre_pass"] = ProductsByOneDNN()
    return torch.compile(function, dynamic=False, options=options)


def compile_problem(folder: Path) -> str | None:
    """Why torch, which is in `folder`, cannot compile for the CPU here."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    headers = sysconfig.get_path("include")
    if " " in str(folder):
        return f"fails where the path of torch has a space, as {folder} has"
    if not shutil.which(compiler):
        return f"needs a C++ compiler, but there is no {compiler} (Debian: apt install g++)"
    if not Path(headers, "Python.h").is_file():
        return f"needs the headers of Python, but {headers} lacks Python.h (Debian: apt install python3-dev)"
    return None
