"""CUDA graphs without a GPU: a recording here is what `make_fx` traces, kernels with fixed tensors and numbers, as on a
GPU. Those marked `gpu` record for real."""

import copy
import importlib
import math
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten

from solorl.compute import graphs
from solorl.compute.graphs import Cuda, Recorded, wanted
from solorl.compute.speed import Forward, GradientStep
from solorl.run.meter import Meter


@pytest.fixture(autouse=True)
def optimizers_can_be_recorded_on_the_cpu(monkeypatch):
    """Which torch allows on GPUs only."""
    for name in ("adam", "radam", "rmsprop"):
        module = importlib.import_module(f"torch.optim.{name}")
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *args, **kwargs: ["cpu", "cuda"])


class Waits(RuntimeError):
    """What CUDA says of a function that waits for the GPU."""


class Traced:
    """A backend for the CPU. `.item()` raises in a strict warm-up, as `set_sync_debug_mode` makes it."""

    device = torch.device("cpu")

    def __init__(self):
        self.recordings = self.replays = 0

    @contextmanager
    def warming_up(self, strict):
        item = torch.Tensor.item

        def refuse(tensor):
            raise Waits("called a synchronizing CUDA operation")

        torch.Tensor.item = torch.Tensor.__bool__ = refuse if strict else item
        try:
            yield
        finally:
            torch.Tensor.item = item
            del torch.Tensor.__bool__

    def record(self, function):
        self.recordings += 1
        found = []

        def traced():
            found.append(function())
            return [x for x in tree_flatten(found[0])[0] if torch.is_tensor(x)]

        again = make_fx(traced)()
        outputs = [x for x in tree_flatten(found[0])[0] if torch.is_tensor(x)]

        def replay():
            self.replays += 1
            with torch.no_grad():
                for here, x in zip(outputs, again(), strict=True):
                    here.copy_(x)

        return found[0], replay

    def random_state(self):
        return torch.get_rng_state()

    def set_random_state(self, state):
        torch.set_rng_state(state)


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.body, self.head, self.dropout = nn.Linear(3, 8), nn.Linear(8, 2), nn.Dropout(dropout)
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x):
        return self.head(self.dropout(self.body(x).tanh()))


def regression_loss(net, batch, scale):
    error = net(batch.x) - batch.y
    loss = scale * (error**2).mean()
    with torch.no_grad():
        net.batches += 1
    return loss, {"losses/loss": loss, "losses/error": error.abs().mean()}, error.detach()


def deciding_loss(net, batch, scale):
    """It waits for a number, after it has changed a buffer."""
    loss, metrics, extra = regression_loss(net, batch, scale)
    return (loss if metrics["losses/loss"].item() > 0.5 else 2 * loss), metrics, extra


class WaitingAdam(torch.optim.Adam):
    """It waits for a number after it has changed the weights."""

    def step(self):
        super().step()
        self.norm = self.param_groups[0]["params"][0].norm().item()


def counting_loss(net, batch, scale):
    """A number in Python decides."""
    net.calls = getattr(net, "calls", 0) + 1
    return regression_loss(net, batch, scale if net.calls < 6 else 2 * scale)


def batches(number, sizes=(16,), device="cpu"):
    generator = torch.Generator().manual_seed(3)
    for i in range(number):
        x, y = (torch.randn(sizes[i % len(sizes)], width, generator=generator) for width in (3, 2))
        yield SimpleBatch(x.to(device), y.to(device))


class SimpleBatch(tuple):
    """What a namedtuple is to the library."""

    _fields = ("x", "y")

    def __new__(cls, x, y):
        return super().__new__(cls, (x, y))

    x, y = property(lambda self: self[0]), property(lambda self: self[1])


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, foreach=True),  # as torch chooses on a GPU
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
    "several groups": lambda p: torch.optim.Adam([{"params": [x], "lr": 0.01 * (i + 1)} for i, x in enumerate(p)]),
}


def both(
    loss_of, make=OPTIMIZERS["Adam"], number=12, sizes=(16,), change=None, dropout=0.0, backend=None, device="cpu"
):
    """The same steps with and without recording: [(net, optimizer, (metrics, extra) of each step)], and the backend."""
    found, backend = [], backend or Traced()
    for recorded in (None, backend):
        torch.manual_seed(1)
        net = Net(dropout).to(device)
        optimizer = make(list(net.parameters()))
        step = GradientStep(loss_of, net, optimizer, 0.5, lambda f: f, True, graphs=recorded)
        said = []
        for i, batch in enumerate(batches(number, sizes, device)):
            scale = change(i, net, optimizer, step) if change else 1.0
            said.append(step(batch, 1.0 if scale is None else scale))
        found.append((net, optimizer, said))
    return found, backend


def assert_equal(found, tolerance=1e-5):
    (net, optimizer, said), (other, other_optimizer, other_said) = found
    for (metrics, extra), (other_metrics, other_extra) in zip(said, other_said, strict=True):
        assert list(metrics) == list(other_metrics)
        torch.testing.assert_close(list(metrics.values()), list(other_metrics.values()), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(extra, other_extra, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(other.state_dict(), net.state_dict(), rtol=tolerance, atol=tolerance)
    mine, others = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert [state["step"].item() for state in mine.values()] == [state["step"].item() for state in others.values()]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "several groups"])  # make_fx counts a step of the others twice
def test_a_recorded_step_is_the_step(name, capsys):
    found, backend = both(regression_loss, OPTIMIZERS[name])
    assert_equal(found)
    assert (backend.recordings, backend.replays) == (1, 12 - graphs.WARM_UP - 1) and capsys.readouterr().err == ""


def test_outputs_of_earlier_steps_stay():
    """A recording writes to the same memory each time; what the script was given is its own."""
    (_, (_, _, said)), _ = both(regression_loss)
    losses = [float(metrics["losses/loss"]) for metrics, _ in said]
    assert len(set(losses)) == len(losses) and not torch.equal(said[-1][1], said[-2][1])


@pytest.mark.parametrize("metrics", [{}, {"losses/number": 3.0}])
def test_metrics_may_be_none_or_plain_numbers(metrics):
    net = Net()
    step = GradientStep(lambda net, x: (net(x).mean(), metrics), net, OPTIMIZERS["Adam"](list(net.parameters())),
                        0.5, lambda f: f, True, graphs=Traced())  # fmt: skip
    assert [dict(step(torch.ones(2, 3))) for _ in range(6)] == [metrics] * 6


def anneal(i, net, optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (1 - i / 12)


def other_number(i, net, optimizer, step):
    return 1.0 if i < 6 else 3.0


def other_mode(i, net, optimizer, step):
    net.train(i < 6)


def freeze(i, net, optimizer, step):
    net.body.weight.requires_grad_(i < 6)


def move(i, net, optimizer, step):
    if i == 6:
        net.body.weight.data = net.body.weight.data.clone()


def load(i, net, optimizer, step):
    if i == 6:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def other_betas(i, net, optimizer, step):
    if i == 6:
        optimizer.param_groups[0]["betas"] = (0.5, 0.9)


@pytest.mark.parametrize(
    ("change", "recordings"),
    [(anneal, 1), (other_number, 2), (other_mode, 2), (freeze, 2), (move, 2), (load, 2), (other_betas, 2)],
)
def test_what_changes_is_seen(change, recordings, capsys):
    """Learning rates reach the recording; everything else that it takes for granted has it made again."""
    found, backend = both(regression_loss, number=14, change=change)
    assert_equal(found)
    assert backend.recordings == recordings and capsys.readouterr().err == ""


def test_shapes_that_take_turns_have_a_recording_each():
    found, backend = both(regression_loss, number=16, sizes=(16, 5))
    assert_equal(found)
    assert (backend.recordings, backend.replays) == (2, 16 - 2 * (graphs.WARM_UP + 1))


def turning_loss(net, batch, scale):
    """One more metric in some steps."""
    loss, metrics, extra = regression_loss(net, batch, scale)
    return loss, metrics | ({"losses/turn": 2 * loss} if scale == 2 else {}), extra


def test_metrics_may_take_turns():
    found, backend = both(turning_loss, number=20, change=lambda i, *rest: 1.0 if i % 3 else 2.0)
    assert_equal(found)
    assert [len(metrics) for metrics, _ in found[1][2]] == [3 if i % 3 == 0 else 2 for i in range(20)]
    assert (backend.recordings, backend.replays) == (2, 20 - 2 * (graphs.WARM_UP + 1))


@pytest.mark.parametrize(
    ("loss_of", "why"),
    [
        (deciding_loss, "it waits for a number from the GPU"),
        (counting_loss, "a number of one of its modules changes in Python"),
    ],
)
def test_what_cannot_be_recorded_runs_as_before_and_says_so_once(loss_of, why, capsys):
    found, backend = both(loss_of)
    assert_equal(found)  # the buffer, which was changed before the wait, too
    said = capsys.readouterr().err
    assert backend.recordings == 0 and said.count("without a CUDA graph") == 1
    assert f"the gradient step of {loss_of.__name__} runs without a CUDA graph: {why}" in said


def test_an_optimizer_that_waits_after_its_step_takes_it_once(capsys):
    found, backend = both(regression_loss, lambda p: WaitingAdam(p, lr=0.01))
    assert_equal(found)
    assert backend.recordings == 0 and "it waits for a number from the GPU" in capsys.readouterr().err


def test_new_numbers_at_each_call_are_said_once(capsys, monkeypatch):
    monkeypatch.setattr(graphs, "LIMIT", 8)
    found, backend = both(regression_loss, change=lambda i, *rest: 1.0 + i)
    assert_equal(found)
    said = capsys.readouterr().err
    assert backend.recordings == 0 and said.count("its inputs or settings have changed 9 times") == 1


def test_numbers_of_each_iteration_are_recorded_until_it_is_too_often(capsys, monkeypatch):
    monkeypatch.setattr(graphs, "LIMIT", 2)
    found, backend = both(regression_loss, number=20, change=lambda i, *rest: 1.0 + i // 5)
    assert_equal(found)
    assert backend.recordings == 2 and "its inputs or settings have changed 3 times" in capsys.readouterr().err


def test_an_optimizer_that_takes_its_rate_from_python_is_said(capsys):
    found, backend = both(regression_loss, lambda p: torch.optim.SGD(p, lr=0.01), number=6)
    torch.testing.assert_close(found[0][0].state_dict(), found[1][0].state_dict())
    assert backend.recordings == 0 and "SGD cannot be recorded" in capsys.readouterr().err


def test_a_recording_that_fails_is_said_and_the_step_is_taken(capsys):
    class Fails(Traced):
        def record(self, function):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    found, _ = both(regression_loss, backend=Fails())
    assert_equal(found)
    assert "graph: CUDA error: operation not permitted when stream is capturing\n" in capsys.readouterr().err


def test_an_input_that_is_not_on_the_device_is_said(capsys):
    backend = Traced()
    recorded = Recorded(lambda x: 2 * x, "doubling", backend, [])
    backend.device = torch.device("cuda")
    for i in range(6):
        assert float(recorded(torch.tensor(float(i)))) == 2 * i
    assert (
        backend.recordings == 0 and "doubling runs without a CUDA graph: one of its inputs" in capsys.readouterr().err
    )


@pytest.mark.parametrize("bad", [np.ones(2), torch.ones(2, requires_grad=True), SimpleNamespace(a=[1])])
def test_inputs_whose_change_would_not_be_seen_are_said(bad, capsys):
    recorded = Recorded(lambda x: torch.ones(1), "one", Traced(), [])
    assert [float(recorded(bad)) for _ in range(5)] == [1.0] * 5
    assert capsys.readouterr().err.count("one runs without a CUDA graph") == 1


def test_arguments_of_equal_values_are_one_recording_and_a_changed_one_another():
    backend, args = Traced(), SimpleNamespace(scale=2.0)
    recorded = Recorded(lambda x, args: args.scale * x, "scaling", backend, [])
    x = torch.ones(3)
    assert [float(recorded(x, args).sum()) for _ in range(6)] == [6.0] * 6 and backend.recordings == 1
    args.scale = 3.0
    assert [float(recorded(x, args).sum()) for _ in range(6)] == [9.0] * 6 and backend.recordings == 2


# ---------------------------------------------------------------------- acting
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Sequential(nn.Linear(3, 4), nn.GELU()), nn.Linear(3, 1)  # GELU: not in NumPy

    def forward(self, x):
        return self.actor(x), self.critic(x).squeeze(1)


def test_a_forward_pass_is_recorded_and_has_the_current_weights():
    torch.manual_seed(0)
    module, backend = Heads(), Traced()
    forward = Forward(module, True, backend)
    for i in range(8):
        x = np.random.default_rng(i).normal(size=(5, 3)).astype(np.float32)
        if i == 6:
            with torch.no_grad():
                module.critic.bias += 1
        logits, value = forward(x)
        with torch.no_grad():
            expected = [y.numpy() for y in module(torch.from_numpy(x))]
        assert logits.shape == (5, 4) and value.shape == (5,)
        np.testing.assert_allclose(logits, expected[0], rtol=1e-6)
        np.testing.assert_allclose(value, expected[1], rtol=1e-6)
    assert (backend.recordings, backend.replays) == (1, 8 - graphs.WARM_UP - 1)


def test_a_forward_pass_does_not_wait_for_its_input(monkeypatch, capsys):
    """A copy from the host waits for the GPU, which a strict warm-up refuses."""
    to, x = torch.Tensor.to, np.ones((5, 3), np.float32)

    def refuse(tensor, *args, **kwargs):
        if tensor.data_ptr() == x.ctypes.data and "copy" not in kwargs:
            raise Waits("called a synchronizing CUDA operation")
        return to(tensor, *args, **kwargs)

    forward = Forward(Heads(), True, Traced())
    monkeypatch.setattr(torch.Tensor, "to", refuse)
    for _ in range(graphs.WARM_UP + 2):
        forward(x)
    assert forward.in_torch.why == "" and "without" not in capsys.readouterr().err


# ---------------------------------------------------------------------- when, and the means of metrics
def test_graphs_are_for_cuda(monkeypatch):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.delenv("SOLORL_GRAPHS", raising=False)
    assert wanted(cuda, True) and not wanted(cuda, False) and not wanted(cpu, True)
    monkeypatch.setenv("SOLORL_GRAPHS", "0")
    assert not wanted(cuda, True)


def test_metrics_of_recorded_steps_have_the_means_of_plain_ones():
    """Also where a checkpoint lies between them, bit for bit."""
    (plain, recorded), _ = both(regression_loss)
    meters = [Meter() for _ in range(3)]
    for meter, (_, _, said) in zip(meters, (plain, recorded, recorded), strict=True):
        for i, (metrics, _) in enumerate(said):
            meter.learned(dict(metrics) if meter is meters[0] else metrics)
            if meter is meters[2] and i == 6:
                saved = meter.counters() | {"due": {}, "wall_time": 0.0, "step": 0}
                meter.__init__()
                meter.resume(copy.deepcopy(saved))
    means = [meter.report(1, {}) for meter in meters]
    keys = [key for key in means[0] if key.startswith("losses/")]
    assert len(keys) == 2 and all(means[1][key] == means[2][key] for key in keys)
    for key in keys:
        assert math.isclose(means[0][key], means[1][key], rel_tol=1e-5)


# ---------------------------------------------------------------------- on a GPU
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_gpu_a_recorded_step_is_the_step(name, capsys):
    found, _ = both(regression_loss, OPTIMIZERS[name], backend=Cuda(torch.device("cuda")), device="cuda", change=anneal)
    # in float32 the rectification of RAdam loses most of its digits
    assert_equal(found, 1e-3 if name == "RAdam" else 1e-5)
    assert capsys.readouterr().err == ""


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_dropout_draws_the_same():
    found, _ = both(regression_loss, dropout=0.3, backend=Cuda(torch.device("cuda")), device="cuda")
    assert_equal(found, 1e-5)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("loss_of", [deciding_loss, counting_loss])
def test_on_a_gpu_what_cannot_be_recorded_is_said(loss_of, capsys):
    found, _ = both(loss_of, dropout=0.3, backend=Cuda(torch.device("cuda")), device="cuda")
    assert_equal(found, 1e-5)
    assert capsys.readouterr().err.count("without a CUDA graph") == 1


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_a_recording_that_fails_leaves_the_random_numbers(capsys):
    backend = Cuda(torch.device("cuda"))

    def waits(x):
        return x + torch.randn_like(x).sum().item() * 0

    backend.warming_up = lambda strict: __import__("contextlib").nullcontext()  # so that the wait is not found before
    recorded, x = Recorded(waits, "waiting", backend, []), torch.ones(3, device="cuda")
    for _ in range(6):
        recorded(x)
    assert "waiting runs without a CUDA graph" in capsys.readouterr().err
    assert torch.isfinite(torch.randn(3, device="cuda")).all()


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_a_forward_pass_is_recorded():
    module = Heads().cuda()
    forward = Forward(module, True, Cuda(torch.device("cuda")))
    for i in range(8):
        x = np.random.default_rng(i).normal(size=(5, 3)).astype(np.float32)
        logits, value = forward(x)
        with torch.no_grad():
            expected = [y.cpu().numpy() for y in module(torch.from_numpy(x).cuda())]
        np.testing.assert_allclose(logits, expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(value, expected[1], rtol=1e-5, atol=1e-6)
    assert forward.in_torch.why == ""
