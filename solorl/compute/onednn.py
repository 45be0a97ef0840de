"""Products of matrices by oneDNN in compiled code.

torch leaves them to MKL, which does not use AVX-512 on processors that are not Intel's and then takes up to twice as
long as oneDNN, the other library inside torch.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

LEAST = 600_000  # multiplications from which on the shorter time outweighs the 10 µs that oneDNN needs for a call


def onednn_is_faster() -> bool:
    """Whether MKL leaves AVX-512 unused on this processor."""
    try:
        maker = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    libraries = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return maker and libraries and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _linear(a: Any, b: Any, bias: Any = None) -> Any:
    """oneDNN's a @ b + bias, matrices with any strides; it takes the transpose of b and the name of an activation."""
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")


LIBRARY = torch.library.Library("solorl", "DEF")
LIBRARY.define("mm(Tensor a, Tensor b) -> Tensor")
LIBRARY.define("addmm(Tensor bias, Tensor a, Tensor b) -> Tensor")
LIBRARY.impl("mm", _linear, "CPU")
LIBRARY.impl("addmm", lambda bias, a, b: _linear(a, b, bias.reshape(-1)), "CPU")
torch.library.register_fake("solorl::mm", lambda a, b: a.new_empty(len(a), b.shape[1]), lib=LIBRARY)
torch.library.register_fake("solorl::addmm", lambda bias, a, b: a.new_empty(len(a), b.shape[1]), lib=LIBRARY)
OPERATIONS = {2: torch.ops.solorl.mm.default, 3: torch.ops.solorl.addmm.default}  # by the number of arguments


class ProductsByOneDNN(CustomGraphPass):
    """Puts oneDNN in the place of every product of float32 matrices, or of stacks of them, that is large enough, on the
    CPU; to be an option of torch.compile: `post_grad_custom_pre_pass`."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Change the graph in place."""
        aten = torch.ops.aten
        for node in list(graph.nodes):
            if node.target in (aten.mm.default, aten.addmm.default) and _is_large(node):
                node.target = OPERATIONS[len(node.args)]
            elif node.target in (aten.bmm.default, aten.baddbmm.default) and _is_large(node):
                with graph.inserting_before(node):
                    products = []
                    for i in range(len(node.meta["val"])):
                        matrices = [_call(graph, aten.select.int, part, 0, i) for part in node.args]
                        product = _call(graph, OPERATIONS[len(node.args)], *matrices)
                        products.append(_call(graph, aten.unsqueeze.default, product, 0))
                    node.replace_all_uses_with(_call(graph, aten.cat.default, products))
                graph.erase_node(node)

    def uuid(self) -> Any:
        """What torch's cache of compiled code knows this pass by."""
        return get_hash_for_files((__file__,))


def _is_large(node: Any) -> bool:
    """Whether it is a product of large float32 matrices on the CPU, plus nothing or a row."""
    *bias, a, b = (part.meta["val"] for part in node.args)
    of_rows = all(
        part.shape[:-2] == a.shape[:-2] and part.shape[-2:] in ((1, b.shape[-1]), b.shape[-1:]) for part in bias
    )
    fits = of_rows and a.device.type == "cpu" and a.dtype == torch.float32
    return fits and not node.kwargs and math.prod(a.shape[-2:]) * b.shape[-1] >= LEAST


def _call(graph: torch.fx.Graph, operation: Any, *args: Any) -> torch.fx.Node:
    """A new node, with the shape of its value."""
    node = graph.call_function(operation, args)
    node.meta["val"] = operation(*torch.fx.map_arg(args, lambda part: part.meta["val"]))
    return node
