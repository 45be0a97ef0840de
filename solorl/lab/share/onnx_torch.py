"""The policy of a script in torch as an ONNX file, by torch's own exporter.

A script hands over `act`, from NumPy to NumPy. It is traced with tensors in the place of the arrays: what it does to
them in NumPy must be a method that a tensor has, too (`argmax`, `clip`, arithmetic).
"""

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from solorl.errors import UsageError, reason


class Noting(TorchFunctionMode):
    """Inside, tensors stay tensors where they would become arrays, and the input of the last `argmax` is noted. If
    `double`, what would become single precision becomes double precision."""

    def __init__(self, double: bool = False):
        super().__init__()
        self.scores: torch.Tensor | None = None
        self.double = double

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchFunctionMode."""
        name = getattr(function, "__name__", "")
        if name == "numpy":
            return args[0]
        if name == "argmax":
            self.scores = args[0]
        if self.double:
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            kwargs = {key: torch.float64 if x is torch.float32 else x for key, x in (kwargs or {}).items()}
            function = torch.Tensor.double if name == "float" else function
        return function(*args, **(kwargs or {}))


class Graph(nn.Module):
    """`act` as a module, from tensors to tensors: actions, scores where there are any, memory."""

    def __init__(self, act: Callable[..., Any]):
        super().__init__()
        self.act, self.with_scores, self.double_precision = act, True, False
        self.parts = nn.ModuleList(modules_of(act))  # whose parameters the graph has

    def forward(self, obs: torch.Tensor, *memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs in the order of `TorchPolicy.names`."""
        with torch.no_grad(), Noting(self.double_precision) as noted:
            result = self.act(obs, *memory)
        action, state = result if memory else (result, None)
        scores = noted.scores if self.with_scores else None
        return tuple(each for each in (action, scores, state) if each is not None)


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a method or a function uses: its own, those of its closure and of its globals."""
    found = [getattr(function, "__self__", None)]
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        found += [*variables.nonlocals.values(), *variables.globals.values()]
    return [each for each in found if isinstance(each, nn.Module)]


class TorchPolicy:
    """See `Exporter`."""

    def __init__(self, act: Callable[..., Any], scores: str):
        self.act, self.scores, self.names = act, scores, [""]
        self.module = Graph(act).eval()

    def outputs(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The action is that of the script's own call, from NumPy to NumPy; the rest is noted in a second one."""
        obs, *memory = inputs.values()
        with torch.no_grad():
            result = self.act(obs, *(torch.as_tensor(x) if i == 0 else x for i, x in enumerate(memory)))
            _, *others = self._in_torch(inputs)
        action = np.asarray(result[0] if memory else result)
        return dict(zip(self.names, [action, *(each.numpy() for each in others)], strict=True))

    def exact(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `Exporter`."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        before = [tensor.data for tensor in tensors]
        wide = {name: x.astype(np.float64) if x.dtype.kind == "f" else x for name, x in inputs.items()}
        try:
            self.module.double_precision = True
            for tensor in tensors:
                tensor.data = tensor.data.double() if tensor.is_floating_point() else tensor.data
            return dict(zip(self.names, [each.numpy() for each in self._in_torch(wide)], strict=True))
        finally:
            self.module.double_precision = False
            for tensor, data in zip(tensors, before, strict=True):
                tensor.data = data

    def graph(self, inputs: Mapping[str, np.ndarray], batch_axes: Mapping[str, int]) -> Any:
        """See `Exporter`."""
        self._choose_outputs(inputs)
        count = torch.export.Dim("batch")
        obs, *memory = ({batch_axes[name]: count} for name in inputs)
        try:
            with quiet():
                tensors = tuple(torch.as_tensor(x) for x in inputs.values())
                shapes = (obs, tuple(memory)) if memory else (obs,)
                program = torch.export.export(self.module, tensors, dynamic_shapes=shapes, strict=False)
                exported = torch.onnx.export(
                    program, dynamo=True, verbose=False, input_names=list(inputs), output_names=self.names
                )
        except Exception as error:  # of torch's compiler and exporter, for each thing that they do not know
            raise UsageError(cannot(error)) from error
        assert exported is not None
        return exported.model_proto

    def _in_torch(self, inputs: Mapping[str, np.ndarray]) -> tuple[torch.Tensor, ...]:
        return self.module(*(torch.as_tensor(x) for x in inputs.values()))

    def _choose_outputs(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Which outputs there are: scores only where the action is the best of them."""
        try:
            action, *others = self._in_torch(inputs)
        except Exception as error:  # whatever somebody's own script does
            raise UsageError(cannot(error)) from error
        if not isinstance(action, torch.Tensor):
            raise UsageError(cannot(TypeError(f"it gives a {type(action).__name__} for a tensor")))
        memory = len(inputs) > 1
        noted = len(others) > memory
        self.module.with_scores = noted and torch.equal(others[0].argmax(-1), action)
        self.names = ["action", *[self.scores] * self.module.with_scores, *["next_state"] * memory]


def cannot(error: Exception) -> str:
    """The sentence for a policy that torch cannot trace."""
    what = reason(error).partition(". ")[0]
    must = "its policy must compute in torch, in the same way for all observations"
    return f"the policy of this script cannot be exported: {must} ({what:.200})"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch's exporter says much that helps only who writes one."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        heard = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
