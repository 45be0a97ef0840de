"""CUDA graphs: a function that launches many small kernels is recorded once and then launched with one call.

A small network takes less time on a GPU than Python takes to launch its kernels. What is recorded is kernels and
addresses. So inputs are copied to where they were, weights must be where they were, and what Python decides must be as
it was: shapes, numbers, modes. Where one of these is new, the function is recorded again. A function that waits for
the GPU, to decide something or to copy, cannot be recorded: it runs as before, and the run says so once.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from solorl.terminal import warn

WARM_UP = 3  # calls before a function is recorded: memory of libraries and optimisers, compiling
MOST = 4  # recordings of one function that are kept, for shapes that take turns
LIMIT = 32  # changes after which a function is not recorded again: each costs as many calls, and a recording


def wanted(device: Any, fast: bool) -> bool:
    """Whether functions are recorded: on CUDA, but not with `--no-fast` or SOLORL_GRAPHS=0."""
    return device.type == "cuda" and fast and os.environ.get("SOLORL_GRAPHS") != "0"


class Unfit(Exception):
    """Why a function cannot be recorded."""


class Cuda:
    """Recording on a CUDA device. A test has another class with these three methods, which needs no GPU."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)

    @contextmanager
    def warming_up(self, strict: bool) -> Iterator[None]:
        """What is done inside prepares a recording; if `strict`, RuntimeError where it waits for the GPU."""
        before, mode = torch.cuda.current_stream(self.device), torch.cuda.get_sync_debug_mode()
        self.stream.wait_stream(before)
        try:
            with torch.cuda.stream(self.stream), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
                torch.cuda.set_sync_debug_mode("error" if strict else mode)
                yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            before.wait_stream(self.stream)

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """The output of `function()`, which is done once, and what does it again, into the same output."""
        generator = torch.cuda.default_generators[self.stream.device.index]
        state, graph = generator.clone_state(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                output = function()
        except BaseException:  # which leaves the generator to the recording that failed
            generator.graphsafe_set_state(state)
            raise
        graph.replay()
        return output, graph.replay

    def random_state(self) -> Any:
        """The state of the random numbers that a function draws."""
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: Any) -> None:
        """Draw the numbers again that came after `state`."""
        torch.cuda.set_rng_state(state, self.device)


class Entry:
    """What is known of inputs of one signature: how often they came, and the recording."""

    def __init__(self, modules: list[nn.Module]):
        self.modules = [part for module in modules for part in module.modules()]
        tables: list[Any] = [table for part in self.modules for table in (part._parameters, part._buffers)]
        self.places = [(table, name) for table in tables for name, x in table.items() if x is not None]
        self.calls = 0
        self.state: Any = None
        self.inputs: list[torch.Tensor] = []  # those of the recording are copied here
        self.output: Any = None
        self.outputs: list[torch.Tensor] = []  # the tensors of the output
        self.again: Callable[[], None] | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Weights and buffers."""
        return [table[name] for table, name in self.places]

    def now(self) -> tuple[Any, ...]:
        """What a recording takes for granted: where weights and buffers are, which of them learn, modes of modules."""
        return [(x.data_ptr(), x.requires_grad) for x in self.tensors()], [part.training for part in self.modules]

    def numbers(self) -> list[Any]:
        """The plain numbers that modules hold. A recording would not see them change."""
        kinds = (int, float, str)
        return [[(name, x) for name, x in vars(part).items() if isinstance(x, kinds)] for part in self.modules]


@dataclass
class Recorded:
    """A function of tensors, modules and numbers that is recorded after a few calls. Its output is a tree of tensors,
    which are new at each call."""

    function: Callable[..., Any]
    name: str
    backend: Any
    modules: list[nn.Module]
    state: Callable[[], Any] = tuple  # what else a recording takes for granted
    kept: Callable[[], Any] = tuple  # the tensors that the function changes, weights and buffers of modules apart
    from_host: bool = False  # inputs may be anywhere, since the function brings them to the device
    entries: dict[Any, Entry] = field(default_factory=dict)  # the latest is the last
    changes = 0
    why = ""  # why it is not recorded

    def __call__(self, *inputs: Any) -> Any:
        """The output of the function."""
        if self.why:
            return self.function(*inputs)
        tensors: list[torch.Tensor] = []
        modules = list(self.modules)
        try:
            key = signature(inputs, tensors, modules)
            entry = self.entries.pop(key, None) or Entry(modules)
            self.entries[key] = entry
            if len(self.entries) > MOST:
                del self.entries[next(iter(self.entries))]  # it has not come for the longest time
            state = (entry.now(), self.state())
            if entry.state != state:  # a new entry, or what its recording takes for granted has changed
                self.changes += 1
                if self.changes > LIMIT:
                    raise Unfit(f"its inputs or settings have changed {self.changes} times")
                entry.calls, entry.state, entry.again = 0, state, None
            entry.calls += 1
            if entry.calls <= WARM_UP:
                if self.from_host:  # which waits
                    inputs = replace(inputs, (x.to(self.backend.device, copy=True) for x in tensors))
                return self._warm_up(entry, inputs)
            if entry.again is None:
                self._record(entry, inputs, tensors)
            else:
                self._copy(entry.inputs, tensors)
                entry.again()
            return replace(entry.output, map(torch.clone, entry.outputs))
        except Unfit as error:
            self.why = str(error)
        self.entries.clear()
        warn(f"{self.name} runs without a CUDA graph: {self.why}")
        return self.function(*inputs)

    def _copy(self, there: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        """Copy inputs to where the recording reads them: those of one type in one call."""
        for kind in {x.dtype for x in there}:
            those = [i for i, here in enumerate(there) if here.dtype == kind]
            torch._foreach_copy_([there[i] for i in those], [tensors[i] for i in those])

    def _warm_up(self, entry: Entry, inputs: tuple[Any, ...]) -> Any:
        strict = entry.calls == WARM_UP
        before = [(x, x.detach().clone()) for x in ([*entry.tensors(), *self.kept()] if strict else [])]
        random, numbers = self.backend.random_state() if strict else None, entry.numbers() if strict else []
        try:
            with self.backend.warming_up(strict):
                output = self.function(*inputs)
        except RuntimeError as error:
            if not strict or "synchroniz" not in str(error):
                raise
            for x, value in before:
                x.detach().copy_(value)
            self.backend.set_random_state(random)
            raise Unfit("it waits for a number from the GPU") from None
        if strict and entry.numbers() != numbers:
            self.why = "a number of one of its modules changes in Python"
            warn(f"{self.name} runs without a CUDA graph: {self.why}")
        return output

    def _record(self, entry: Entry, inputs: tuple[Any, ...], tensors: list[torch.Tensor]) -> None:
        if not self.from_host and any(x.device.type != self.backend.device.type for x in tensors):
            raise Unfit(f"one of its inputs is a tensor that is not on {self.backend.device}")
        entry.inputs, entry.outputs = [x.to(self.backend.device, copy=True) for x in tensors], []
        fixed = replace(inputs, iter(entry.inputs))
        try:
            entry.output, entry.again = self.backend.record(lambda: self.function(*fixed))
        except Exception as error:  # whatever CUDA or a library says that cannot be recorded
            raise Unfit((str(error).strip() or type(error).__name__).splitlines()[0]) from None
        signature(entry.output, entry.outputs, [])


def signature(tree: Any, tensors: list[torch.Tensor], modules: list[nn.Module]) -> Any:
    """All of `tree` that a recording takes for granted; collects its tensors and modules. Unfit for what can change
    without being seen."""
    if isinstance(tree, torch.Tensor):
        if tree.requires_grad:
            raise Unfit("one of its inputs is a tensor with a gradient")
        tensors.append(tree)
        return tree.shape, tree.dtype, tree.device
    if isinstance(tree, (tuple, list)):
        return type(tree), *[signature(x, tensors, modules) for x in tree]
    if isinstance(tree, dict):
        return dict, *[(name, signature(x, tensors, modules)) for name, x in tree.items()]
    if callable(tree):
        modules += [tree] if isinstance(tree, nn.Module) else []
        return id(tree)
    if tree is None or isinstance(tree, (int, float, str)):
        return type(tree), tree
    values = tuple(vars(tree).values()) if hasattr(tree, "__dict__") else tree  # arguments
    try:
        hash(values)
    except TypeError:
        raise Unfit(f"one of its inputs is a {type(tree).__name__}") from None
    return id(tree), values


def replace(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The tree with other tensors in place of its own, in the order in which `signature` collects them."""
    if isinstance(tree, torch.Tensor):
        return next(tensors)
    if isinstance(tree, (tuple, list)):
        parts = [replace(x, tensors) for x in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, dict):
        return {name: replace(x, tensors) for name, x in tree.items()}
    return tree
