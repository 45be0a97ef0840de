"""Products of matrices by oneDNN in compiled code: which ones, and that they are the same products."""

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from torch.fx.experimental.proxy_tensor import make_fx

from solorl.compute import onednn as products

N = 256


def matrix(*shape, **kwargs):
    return torch.randn(*shape, **kwargs)


FORMS = {
    "mm": (torch.mm, matrix(N, N), matrix(N, N)),
    "mm of transposes": (lambda a, b: a.t() @ b.t(), matrix(N, 100), matrix(90, N)),
    "mm of parts of rows": (lambda a, b: a[:, 3:] @ b[3:], matrix(N, N), matrix(N, 80)),
    "linear": (F.linear, matrix(N, 90), matrix(70, 90), matrix(70)),
    "addmm with a row": (torch.addmm, matrix(1, 70), matrix(N, 90), matrix(90, 70)),
    "bmm": (torch.bmm, matrix(3, N, 90), matrix(3, 90, 70)),
    "bmm of one matrix for all": (lambda a, b: a.expand(2, -1, -1) @ b.mT, matrix(N, 90), matrix(2, 70, 90)),
    "baddbmm with rows": (torch.baddbmm, matrix(2, 1, 70), matrix(2, N, 90), matrix(2, 90, 70)),
}
LEFT = {
    "small": (torch.mm, matrix(128, 64), matrix(64, 64)),
    "stack of small ones": (torch.bmm, matrix(64, 128, 64), matrix(64, 64, 64)),
    "float64": (torch.mm, matrix(N, N, dtype=torch.float64), matrix(N, N, dtype=torch.float64)),
    "plus a matrix": (torch.addmm, matrix(N, N), matrix(N, N), matrix(N, N)),
    "plus a column": (torch.addmm, matrix(N, 1), matrix(N, N), matrix(N, N)),
    "plus the same row for all": (torch.baddbmm, matrix(N), matrix(2, N, N), matrix(2, N, N)),
    "plus matrices": (torch.baddbmm, matrix(2, N, N), matrix(2, N, N), matrix(2, N, N)),
    "scaled": (lambda c, a, b: torch.addmm(c, a, b, alpha=2), matrix(N), matrix(N, N), matrix(N, N)),
}


def changed(function, *inputs):
    """The traced function after the change, and how many products of each kind it has."""
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    products.ProductsByOneDNN()(traced.graph)
    traced.graph.lint()
    traced.recompile()
    names = [str(node.target) for node in traced.graph.nodes if "mm" in str(node.target)]
    return traced, {name: names.count(name) for name in names}


@pytest.mark.parametrize("form", FORMS)
def test_large_products_are_by_onednn_and_equal(form):
    function, *inputs = FORMS[form]
    traced, found = changed(function, *inputs)
    products_of_one = len(function(*inputs)) if function(*inputs).ndim == 3 else 1
    assert found == {f"solorl.{'addmm' if len(inputs) == 3 else 'mm'}.default": products_of_one}
    got, expected = traced(*inputs), function(*inputs)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
    assert got.is_contiguous()


@pytest.mark.parametrize("form", LEFT)
def test_other_products_are_left_alone(form):
    function, *inputs = LEFT[form]
    traced, found = changed(function, *inputs)
    assert len(found) == 1 and next(iter(found)).startswith("aten.")
    torch.testing.assert_close(traced(*inputs), function(*inputs))


@pytest.mark.parametrize("faster", [True, False])
def test_compile_asks_for_it_where_it_is_faster(faster, train, monkeypatch):
    seen = []

    def compiler(function, dynamic, options):
        seen.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(torch, "__file__", "/environment/torch/__init__.py")  # no space, wherever the tests run
    monkeypatch.setattr(products, "onednn_is_faster", lambda: faster)
    train("ppo", "--total-timesteps", 512, "--eval-episodes", 1, "--compile")
    (options,) = seen
    assert isinstance(options.pop("post_grad_custom_pre_pass", None), products.ProductsByOneDNN) == faster
    assert options == {"cpp_wrapper": True, "fallback_random": True}


@pytest.mark.parametrize(
    ("cpuinfo", "capability", "mkl", "expected"),
    [
        ("vendor_id\t: AuthenticAMD\n", "AVX512", True, True),
        ("vendor_id\t: AuthenticAMD\n", "AVX2", True, False),
        ("vendor_id\t: AuthenticAMD\n", "AVX512", False, False),
        ("vendor_id\t: GenuineIntel\n", "AVX512", True, False),
        (None, "AVX512", True, False),
    ],
)
def test_it_is_faster_where_mkl_leaves_avx512_unused(cpuinfo, capability, mkl, expected, monkeypatch):
    def read_text(path):
        assert str(path) == "/proc/cpuinfo"
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return cpuinfo

    monkeypatch.setattr(products.Path, "read_text", read_text)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    assert products.onednn_is_faster() == expected


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__, reason="torch's compiler fails below a folder with a space")
def test_a_compiled_derivative_has_its_products_by_onednn():
    """Through the whole of torch's compiler, with the options of `Run.compile`."""
    from torch._inductor.utils import run_and_get_code

    def loss(x, weight, bias):
        return F.linear(x, weight, bias).relu().square().mean()

    inputs = [matrix(N, 90), matrix(70, 90, requires_grad=True), matrix(70, requires_grad=True)]
    options = {
        "cpp_wrapper": True,
        "post_grad_custom_pre_pass": products.ProductsByOneDNN(),
        "fx_graph_cache": False,
    }
    compiled = torch.compile(loss, dynamic=False, options=options)

    def gradients(function):
        return torch.autograd.grad(function(*inputs), inputs[1:])

    got, codes = run_and_get_code(lambda: gradients(compiled))
    assert sum("solorl.addmm" in code for code in codes) == 1 and sum("solorl.mm" in code for code in codes) == 1
    torch.testing.assert_close(got, gradients(loss), rtol=1e-5, atol=1e-5)


def test_no_other_file_uses_the_operators():
    """Algorithm files name torch's own products; the exchange is the library's."""
    files = [*ROOT.glob("algorithms/*/*.py"), *ROOT.glob("solorl/**/*.py")]
    assert [path.name for path in files if "mkldnn._linear" in path.read_text()] == ["onednn.py"]
