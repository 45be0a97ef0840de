"""The policy of a script in torch as ONNX, by torch's own exporter.

A script hands over `act`, from NumPy to NumPy. It is traced with tensors in the place of the arrays: what it does to
them in NumPy must be a method that a tensor has, too (`argmax`, `clip`, arithmetic). Where the action is the best of
several, the file also has their scores as an output, `logits` or `q_values`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from solorl.errors import reason, told
from solorl.lab.datasets.exchange import quiet
from solorl.lab.share.stablehlo import Arrays, Compute
from solorl.run.load import LoadedPolicy


class Noting(TorchFunctionMode):
    """Inside, tensors stay tensors where they would become arrays, and the input of the last `argmax` is noted."""

    scores: torch.Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchFunctionMode."""
        name = getattr(function, "__name__", "")
        if name == "numpy":
            return args[0]
        if name == "argmax":
            self.scores = args[0]
        return function(*args, **(kwargs or {}))


class Graph(nn.Module):
    """`act` as a module, from tensors to tensors: action, scores where there are any, memory."""

    def __init__(self, act: Callable[..., Any], remembers: bool):
        super().__init__()
        self.act, self.remembers, self.with_scores = act, remembers, True
        self.parts = nn.ModuleList(modules_of(act))  # whose parameters the graph has

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs."""
        with torch.no_grad(), Noting() as noted:
            result = self.act(*inputs)
        action, state = result if self.remembers else (result, None)
        return tuple(x for x in (action, noted.scores if self.with_scores else None, state) if x is not None)


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a method or a function uses: its own, those of its closure and of its globals."""
    found = [getattr(function, "__self__", None)]
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        found += [*variables.nonlocals.values(), *variables.globals.values()]
    return [each for each in found if isinstance(each, nn.Module)]


def converted(loaded: LoadedPolicy, inputs: Arrays, axes: dict[str, int]) -> tuple[bytes, Compute, Compute]:
    """The bytes of the file, what the policy computes, and what the file computes. UsageError where torch cannot trace
    the policy."""
    import onnxruntime
    from onnx.helper import set_model_props

    graph, example = Graph(loaded.policy, "state" in inputs).eval(), tensors(inputs)
    example = [x.narrow(axes[name], 0, 3).contiguous() for name, x in zip(inputs, example, strict=True)]
    parts = [name for key, part in loaded.models.items() for name in (key, *dict(part.named_modules()))]
    scores = "logits" if any("actor" in name.split(".") for name in parts) else "q_values"
    batch = torch.export.Dim("batch")
    must = "its policy must compute in torch, in the same way for all observations"
    what = "the policy of this script cannot be exported"
    with told(what, lambda error: f"{must} ({reason(error).partition('. ')[0]:.200})"), quiet():
        action, *others = graph(*example)
        graph.with_scores = len(others) > graph.remembers and torch.equal(others[0].argmax(-1), action)
        names = ["action", *[scores] * graph.with_scores, *["next_state"] * graph.remembers]
        shapes = (tuple({axes[name]: batch} for name in inputs),)
        program = torch.export.export(graph, tuple(example), dynamic_shapes=shapes, strict=False)
        named: Any = {"input_names": list(inputs), "output_names": names}
        made: Any = torch.onnx.export(program, dynamo=True, verbose=False, **named)
    together = "num_envs" in inspect.signature(loaded.maker).parameters
    space = loaded.make_env(num_envs=1).single_action_space if together else loaded.make_env().action_space
    model = made.model_proto  # a new one each time
    set_model_props(model, {"env_id": loaded.env_id, "action_space": str(space)})
    data = model.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def policy(given: Arrays) -> Arrays:
        """The action is that of the script's own call, from NumPy to NumPy; the rest is noted in a second one."""
        own = [torch.as_tensor(x) if name == "state" else x for name, x in given.items()]
        with torch.no_grad():
            result, (_, *others) = loaded.policy(*own), graph(*tensors(given))
        action = np.asarray(result[0] if graph.remembers else result)
        return dict(zip(names, [action, *(each.numpy() for each in others)], strict=True))

    return data, policy, lambda given: dict(zip(names, session.run(names, given), strict=True))


def tensors(arrays: Arrays) -> list[torch.Tensor]:
    """The arrays as tensors."""
    return [torch.as_tensor(x) for x in arrays.values()]
