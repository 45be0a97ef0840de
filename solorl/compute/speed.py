"""Speed that changes no result except by rounding: forward passes in NumPy, gradient steps on flat parameters.

`--no-fast` switches it off: then everything here is plain PyTorch.
"""

import copy
import inspect
import math
import operator
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.fx
import torch.nn as nn
from torch.utils._pytree import tree_map_only

from solorl.compute.graphs import Entry, Recorded
from solorl.errors import UsageError, refuse
from solorl.terminal import warn


def softmax(x: np.ndarray, dim: int) -> np.ndarray:
    """What `torch.softmax` does."""
    x = np.exp(x - x.max(dim, keepdims=True))
    return x / x.sum(dim, keepdims=True)


def log_softmax(x: np.ndarray, dim: int) -> np.ndarray:
    """What `torch.log_softmax` does."""
    x = x - x.max(dim, keepdims=True)
    return x - np.log(np.exp(x).sum(dim, keepdims=True))


# Optimisers that treat each number alone: what they do to a vector is what they do to its parts.
ELEMENTWISE = tuple(getattr(torch.optim, x) for x in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop"))
ZERO = np.zeros((), np.float32)  # NumPy is faster with an array than with a number of Python
SAME = ("add", "sub", "mul", "truediv", "neg", "getitem", "matmul")  # in NumPy as in torch
# What NumPy does instead of torch. Methods and functions of tensors have the same arguments as in torch.
OPERATIONS: dict[Any, Callable[..., Any]] = {
    **{function: function for function in map(vars(operator).__getitem__, SAME)},
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, ZERO),
    "exp": np.exp,
    "sqrt": np.sqrt,
    "clamp": lambda x, min, max: np.minimum(np.maximum(x, min), max),  # np.clip takes twice as long
    "mean": lambda x, dim, keepdim=False: x.mean(dim, keepdims=keepdim),
    "sum": lambda x, dim, keepdim=False: x.sum(dim, keepdims=keepdim),
    "squeeze": lambda x, dim: x.squeeze(dim) if x.shape[dim] == 1 else x,
    "flatten": lambda x, start_dim: x.reshape(*x.shape[:start_dim], -1),
    "unflatten": lambda x, dim, sizes: x.reshape(*x.shape[:dim], *sizes, *x.shape[dim:][1:]),
    "softmax": softmax,
    "log_softmax": log_softmax,
}
KNOWN = (int, float, str, tuple, type(None), nn.Module, type(math.sqrt), type(softmax))  # `!=` sees that one changes
LAYERS: dict[type, Callable[..., Any]] = {nn.Identity: lambda x: x, nn.Tanh: np.tanh, nn.ReLU: OPERATIONS["relu"]}


class Tracer(torch.fx.Tracer):
    """Notes also what is computed from buffers, which change as parameters do."""

    proxy_buffer_attributes = True


class Forward:
    """A module as a function from a NumPy batch (n, ...) to a NumPy batch, always with its current weights and buffers.

    On the CPU, if `fast`, its operations are traced once and then done by NumPy, which needs several microseconds less
    for each. A module is called in torch if it has hooks or other operations than those of the tables above, if it
    holds other things than KNOWN ones, and where its parts, numbers and modes are not those of the trace: to trace
    again takes as long as hundreds of calls. Weights and buffers may change in place, move to other memory, or be
    replaced by others of their name.
    """

    def __init__(self, module: nn.Module, fast: bool, graphs: Any = None):
        self.module, self.fast = module, fast
        name = f"the forward pass of {type(module).__name__}"
        self.in_torch = Recorded(self._in_torch, name, graphs, [module], from_host=True) if graphs else self._in_torch
        self._look()

    def __call__(self, x: np.ndarray) -> Any:
        """The output of the module; a tuple where it gives one."""
        if self._find() != self._addresses:  # some weights are in other memory now
            self._look()
        if self.in_numpy and (result := self.in_numpy(x.astype(np.float32, copy=False))) is not None:
            return result
        dtype = torch.uint8 if x.dtype == np.uint8 else torch.float32  # images are moved as bytes
        with torch.no_grad():
            together, shapes = self.in_torch(torch.as_tensor(x, dtype=dtype))
        ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
        y = [part.reshape(shape) for part, shape in zip(np.split(together.cpu().numpy(), ends), shapes, strict=True)]
        return tuple(y) if self.is_tuple else y[0]

    def _in_torch(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """The outputs of the module one after the other in one vector, since each copy from a GPU waits for it; and
        their shapes."""
        y = self.module(x.to(self.device))
        self.is_tuple = isinstance(y, tuple)
        parts = y if isinstance(y, tuple) else (y,)
        return torch.cat([part.flatten() for part in parts]), tuple(tuple(part.shape) for part in parts)

    def _look(self) -> None:
        """Note where the weights and buffers are, which modules there are, and what numbers and modes outside of
        torch's own layers; trace with these."""
        entry = Entry([self.module])
        self._places = entry.places
        self.device = [*self.module.parameters(), *entry.tensors()][0].device  # a buffer may be elsewhere
        own = [vars(x) for x in entry.modules if not x.__module__.startswith("torch.nn")]
        self._held = [(x, name, x[name]) for x in own for name in x if name[0] != "_"]
        self._held += [(x._modules, name, part) for x in entry.modules for name, part in x._modules.items()]
        self._addresses, self.in_numpy = self._find(), self._trace()  # None where NumPy lacks an operation

    def _find(self) -> list[int]:
        """Where in memory each of the weights and buffers is; those that are gone are left out."""
        return [table[name].data_ptr() for table, name in self._places if name in table]

    def _trace(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """The module as a function of NumPy with views of the weights, giving None where a number has changed; None if
        NumPy lacks one of its operations."""
        hooks = any(x._forward_hooks or x._forward_pre_hooks for x in self.module.modules())
        unseen = not all(isinstance(held, KNOWN) for _, _, held in self._held)  # as what changes in a list
        if not self.fast or self.device.type != "cpu" or hooks or unseen:
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

            for table, name, held in self._held:
                lines.append(f"    if {name_of(table)}.get({name!r}) != {name_of(held)}:\n        return None\n")
            for node in nodes:
                if node.op == "get_attr":
                    names[node] = name_of(operator.attrgetter(str(node.target))(self.module).detach().numpy())
                    continue
                function, weights = self._operation(node)
                if inspect.isfunction(function):  # of our tables: are these all of its arguments?
                    given = inspect.signature(function).bind(*node.args, *weights, **node.kwargs).arguments
                    operator.index(given.get("dim", 0))  # TypeError for lists, which NumPy does not take
                operands = [name_of(x) for x in (*node.args, *weights)]
                operands += [f"{key}={name_of(x)}" for key, x in node.kwargs.items()]
                names[node] = f"x{len(lines)}"
                lines.append(f"    {names[node]} = {name_of(function)}({', '.join(operands)})\n")
            results = output.args[0] if isinstance(output.args[0], tuple) else output.args
            exec(f"def forward(x):\n{''.join(lines)}    return {', '.join(names[node] for node in results)}\n", objects)
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
) -> tuple[Any, ...]:
    """The gradients of `loss_of(module, *inputs)`, None for a parameter that takes no part in it; as one vector if
    `flat` and there are all. And what else the loss gives, detached: metrics, or metrics and extra.

    Loss and derivative are in one function to be compiled together: compiling the loss alone gains nothing.
    """
    loss, *rest = loss_of(module, *inputs)
    gradients: Any = (None,) * len(parameters)
    if parameters and loss.requires_grad:
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    if flat and all(x is not None for x in gradients):
        gradients = torch.cat([x.flatten() for x in gradients])
    return gradients, *tree_map_only(torch.Tensor, torch.Tensor.detach, rest)


def parameters_of(optimizer: Any) -> list[Any]:
    """The parameters of an optimiser, also where it sees one vector instead of them."""
    return [x for group in optimizer.param_groups for one in group["params"] for x in getattr(one, "views", (one,))]


def vector_of(optimizer: Any) -> Any:
    """The vector that an optimiser sees instead of its parameters, else None."""
    return next((x for x in optimizer.param_groups[0]["params"] if hasattr(x, "views")), None)


def flatten(optimizer: Any) -> None:
    """Make the parameters of an optimiser views of one vector, which is all that the optimiser sees from now on.

    Nothing is done where that could change what is learned: several groups, parameters of several types, frozen ones,
    an optimiser that has begun or does not treat each number alone.
    """
    parameters, (group, *others) = parameters_of(optimizer), optimizer.param_groups
    kinds = {(x.dtype, x.device, x.requires_grad) for x in parameters}
    if others or optimizer.state or type(optimizer) not in ELEMENTWISE or len(kinds) > 1:
        return
    if not parameters[0].requires_grad:
        return
    vector: Any = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach())
    nn.utils.vector_to_parameters(vector.data, parameters)
    vector.views, vector.addresses = parameters, [x.data_ptr() for x in parameters]
    group["params"] = [vector]
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):  # fused SGD fails where some parameters have begun
        group["fused"] = True
    optimizer.register_load_state_dict_pre_hook(_before_loading)


def unflatten(optimizer: Any) -> None:
    """Give an optimiser its parameters back, each with its part of the state; they stay where they are in memory."""
    vector = vector_of(optimizer)
    optimizer.param_groups[0]["params"] = vector.views
    sizes = [x.numel() for x in vector.views]
    for name, value in optimizer.state.pop(vector, {}).items():
        whole = torch.is_tensor(value) and value.shape == vector.shape  # else one number, as that of the steps
        parts = value.split(sizes) if whole else [copy.deepcopy(value) for _ in sizes]
        for x, part in zip(vector.views, parts, strict=True):
            optimizer.state[x][name] = part.view(x.shape) if whole else part


def stays_flat(optimizer: Any) -> bool:
    """Whether an optimiser sees a vector. It gets its parameters back as soon as one of them is frozen or has left the
    memory of the vector, as by `module.to(...)` or to another vector, or others have been added."""
    vector = vector_of(optimizer)
    if vector is None:
        return False
    parts = zip(vector.views, vector.addresses, strict=True)
    flat = len(optimizer.param_groups) == 1 and all(x.requires_grad and x.data_ptr() == place for x, place in parts)
    if not flat:
        unflatten(optimizer)
    return flat


def _before_loading(optimizer: Any, saved: Any) -> None:
    """Give an optimiser its parameters back if it had them when its state was saved: several, or one as it is."""
    vector = vector_of(optimizer)
    if vector is None:
        return
    shapes = {getattr(x, "shape", None) for state in saved["state"].values() for x in state.values()}
    one_as_it_was = len(vector.views) == 1 and shapes and vector.shape not in shapes
    if len(saved["param_groups"][0]["params"]) > 1 or one_as_it_was:
        unflatten(optimizer)


class Metrics(dict[str, Any]):
    """Metrics of a gradient step as views of one `vector`, which can be added up at once."""

    def __init__(self, names: tuple[str, ...], vector: torch.Tensor):
        super().__init__(zip(names, vector.unbind(), strict=True))
        self.vector = vector


@dataclass
class GradientStep:
    """`metrics = step(*inputs)`: one step of the optimiser down the gradient of `loss_of(module, *inputs)`, as plain
    PyTorch takes it; `metrics, extra = step(*inputs)` where the loss gives (loss, metrics, extra).

    Gradients are those of the optimiser's parameters, which must be parameters of `module`. One that is frozen or takes
    no part in the loss stays as it is. If `fast`, they become views of one vector (see `flatten`): clipping and
    stepping are single operations. Where a parameter is in memory and what an optimiser sees is looked up at each step,
    so several steps may share both. `average` maps a list of tensors, gradients and metrics, to what they
    are over all ranks. With `graphs` (see `Recorded`) the whole step is recorded.
    """

    loss_of: Callable[..., Any]
    module: nn.Module
    optimizer: Any
    max_grad_norm: float
    compiled: Callable[..., Any]
    fast: bool
    average: Callable[[list[Any]], list[Any]] | None = None
    graphs: Any = None

    def __post_init__(self) -> None:
        loss_of, optimizer, graphs = self.loss_of, self.optimizer, self.graphs
        self.gradients = self.compiled(gradients_of)
        self._check()
        self.changes = [optimizer, *parameters_of(optimizer)]
        if self.fast:
            flatten(optimizer)
        self.step: Any = None
        self.name = name = f"the gradient step of {getattr(loss_of, '__name__', type(loss_of).__name__)}"
        if graphs and "capturable" not in optimizer.param_groups[0]:
            warn(f"{name} runs without a CUDA graph: {type(optimizer).__name__} cannot be recorded")
        elif graphs:
            for group in optimizer.param_groups:
                group["capturable"] = True
            self.rates = [torch.tensor(0.0, device=graphs.device) for _ in optimizer.param_groups]
            self.written = [0.0 for _ in optimizer.param_groups]  # the numbers in `rates`
            self.step = Recorded(self._vectors, name, graphs, [self.module], self._settings, self._state)

    def __call__(self, *inputs: Any) -> Any:
        """Take the step; returns the metrics of the loss, or (metrics, extra)."""
        if self.step is None:
            return self._take(*inputs)
        now = [group["lr"] for group in self.optimizer.param_groups]
        if now != self.written:
            for rate, number in zip(self.rates, now, strict=True):
                rate.fill_(number)
            self.written = now
        names, metrics, *extra = self.step(*inputs)
        named = Metrics(names, metrics)
        return (named, *extra) if extra else named

    def _vectors(self, *inputs: Any) -> tuple[Any, ...]:
        """`_take` for a recording: the metrics are their names and one vector, learning rates and numbers of steps on
        the device."""
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for state in self.optimizer.state.values():
            state["step"] = state["step"].to(self.rates[0].device, torch.float32)
        try:
            for group, rate in zip(groups, self.rates, strict=True):
                group["lr"] = rate
            found = self._take(*inputs)
        finally:
            for group, number in zip(groups, rates, strict=True):
                group["lr"] = number
        metrics, *extra = found if isinstance(found, tuple) else (found,)
        device = self.rates[0].device
        values = [x.float() if torch.is_tensor(x) else torch.full((), x, device=device) for x in metrics.values()]
        return tuple(metrics), torch.stack(values) if values else torch.zeros(0, device=device), *extra

    def _settings(self) -> Any:
        """What the step takes for granted of the optimiser: its parameters, where its state is, all but the rates."""
        kept = [{**group, "params": [*map(id, group["params"])], "lr": None} for group in self.optimizer.param_groups]
        return id(self.optimizer.state), kept

    def _state(self) -> list[torch.Tensor]:
        """The tensors of the optimiser's state."""
        return [x for state in self.optimizer.state.values() for x in state.values() if torch.is_tensor(x)]

    def _take(self, *inputs: Any) -> Any:
        flat = stays_flat(self.optimizer)
        parameters = [x for x in parameters_of(self.optimizer) if x.requires_grad]
        gradients, metrics, *extra = self.gradients(flat, parameters, self.loss_of, self.module, *inputs)
        if torch.is_tensor(gradients):
            parameters, gradients = self.optimizer.param_groups[0]["params"], [gradients]
        elif flat:  # a parameter takes no part in the loss, but a vector steps as a whole
            unflatten(self.optimizer)
        found = {x: gradient for x, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
        if not found or len(found) < len(parameters):
            self._check(bool(found))
        if self.average is not None:
            means = self.average([*found.values(), *metrics.values()])
            found = dict(zip(found, means[: len(found)], strict=True))
            metrics = dict(zip(metrics, means[len(found) :], strict=True))
        self._step(found)
        return (metrics, *extra) if extra else metrics

    def _step(self, found: dict[Any, Any]) -> None:
        """Clip the gradients found and let the optimiser take its step; a parameter without one stays as it is."""
        seen = [x for group in self.optimizer.param_groups for x in group["params"]]
        for x in seen:
            x.grad = found.get(x)
        if self.max_grad_norm < math.inf and vector_of(self.optimizer) is not None:
            seen[0].grad *= (self.max_grad_norm / (seen[0].grad.norm() + 1e-6)).clamp(max=1)
        elif self.max_grad_norm < math.inf:
            for x in found:  # two parameters may have one gradient, as those of a sum
                x.grad = x.grad.clone()
            nn.utils.clip_grad_norm_(seen, self.max_grad_norm)
        self.optimizer.step()

    def _check(self, found: bool = True) -> None:
        """UsageError where a parameter of the optimiser is not one of the module, or no gradient was `found`."""
        name, own = type(self.module).__name__, set(map(id, self.module.parameters()))
        for x in parameters_of(self.optimizer):
            if id(x) not in own:
                what = f"the optimizer of a gradient step has a parameter of shape {tuple(x.shape)}"
                raise UsageError(f"{what} that {name} does not have; give it only parameters that {name} has now")
        refuse(not found, f"the loss of a gradient step of {name} depends on no parameter of its optimizer")


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`torch.compile(function)`, on the CPU with calls in C++. UsageError where torch cannot compile here."""
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):  # else torch.autograd.grad cuts the graph in two
        torch._dynamo.config.trace_autograd_ops = True
    # the random numbers of plain PyTorch, on the CPU in half the time of the compiler's own
    options: dict[str, Any] = {"fallback_random": True}
    if device.type == "cpu":
        problem = compile_problem(Path(torch.__file__).parent)
        refuse(problem, f"--compile {problem}; train without --compile")
        options["cpp_wrapper"] = True
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
