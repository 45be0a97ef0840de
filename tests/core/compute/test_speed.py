"""The verbs fast, gradient_step, learned and log: what is fast is what PyTorch does, and means are means."""

import copy
import math
import shutil
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import comparable, rows
from torch.nn.utils import prune

from solorl.compute.speed import Forward, GradientStep


# ---------------------------------------------------------------------- fast: a module in NumPy
class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.value, self.advantage = nn.Sequential(nn.Linear(3, 8), nn.ReLU()), nn.Linear(8, 1), Plain(8, 4)

    def forward(self, x):
        x = self.body(x)
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(1, keepdim=True)


class Categorical(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 20))
        self.register_buffer("atoms", torch.linspace(-2, 2, 5))

    def forward(self, x):
        return (self.net(x).unflatten(1, (4, 5)).softmax(-1) * self.atoms).sum(-1)


class Scaled(nn.Module):
    """What is computed from a buffer and a parameter alone must follow them, too."""

    def __init__(self):
        super().__init__()
        self.log_std = nn.Parameter(torch.randn(3))
        self.register_buffer("var", torch.rand(3))

    def forward(self, x):
        return (x * self.log_std.exp() / (self.var + 1e-8).sqrt()).clamp(-2, 2)


class Plain(nn.Sequential):
    def __init__(self, *sizes):
        super().__init__(nn.Linear(*sizes), nn.Identity())


class OwnLinear(nn.Linear):
    """A layer that is not what NumPy knows under the name of its parent."""

    def forward(self, x):
        return 2 * super().forward(x)


class Calls(nn.Module):
    """An operation that NumPy knows, with other arguments than ours has."""

    def __init__(self, call):
        super().__init__()
        self.net, self.call = nn.Linear(3, 4), call

    def forward(self, x):
        return self.call(self.net(x))


class Tempered(nn.Module):
    """Numbers and modes, of it and of a part, which Python reads."""

    def __init__(self):
        super().__init__()
        self.net, self.temperature = nn.Sequential(Noisy(), nn.Linear(3, 4)), 1.0

    def forward(self, x):
        return self.net(x) * self.temperature


class Noisy(nn.Module):
    def forward(self, x):
        return x + 1.0 if self.training else x


class Counting(nn.Module):
    """Its forward pass changes a number."""

    def __init__(self):
        super().__init__()
        self.net, self.calls = nn.Linear(3, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.net(x) * self.calls


def hooked(module):
    module[2].register_forward_hook(lambda module, inputs, output: 2 * output)
    return module


def prehooked(module):
    module.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    return module


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 4)

    def forward(self, x):
        return self.net(x) if x.sum() > 0 else -self.net(x)


def net():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


KNOWN = {
    "bounds by name": lambda: Calls(lambda x: x.clamp(max=2, min=-2).squeeze(1)),
    "layers": net,
    "dueling": Dueling,
    "softmax": Categorical,
    "buffers": Scaled,
}
UNKNOWN = {
    "another layer": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)),
    "a layer without bias": lambda: nn.Sequential(nn.Linear(3, 4, bias=False)),
    "a layer of one's own": lambda: nn.Sequential(OwnLinear(3, 4), nn.Tanh()),
    "a layer whose weight is computed": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))),
    "a branch": Branches,
    "a mean of all": lambda: Calls(lambda x: x.mean() + x),
    "a sum of all": lambda: Calls(lambda x: x.sum() + x),
    "one bound": lambda: Calls(lambda x: x.clamp(min=0)),
    "a mean over a list": lambda: Calls(lambda x: x.mean([1], keepdim=True) + x),
    "a sum over a list": lambda: Calls(lambda x: x.sum(dim=[0, 1]) + x),
    "dimensions to squeeze": lambda: Calls(lambda x: x.unflatten(1, (1, 4)).squeeze((1, 2))),
    "a hook": lambda: hooked(net()),
    "a hook before it": lambda: prehooked(net()),
    "a weight by hooks": lambda: nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Tanh()).eval(),
    "another end": lambda: Calls(lambda x: x.flatten(0, 1)),
}


def in_torch(module, x):
    with torch.no_grad():
        return module(torch.as_tensor(x, dtype=torch.float32)).numpy()


def assert_same(forward, x):
    np.testing.assert_allclose(forward(x), in_torch(forward.module, x), rtol=1e-6, atol=1e-6)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


X = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)


@pytest.mark.parametrize("name", KNOWN)
def test_a_module_in_numpy_is_that_of_torch(name):
    forward = Forward(KNOWN[name](), fast=True)
    assert forward.in_numpy
    for x in (X, X[:1], X.astype(np.float64)):
        assert_same(forward, x)
        assert forward(x).dtype == np.float32
    assert np.abs(forward(X)).max() > 0.01


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_module_that_numpy_does_not_know_is_called_in_torch(name):
    forward = Forward(UNKNOWN[name](), fast=True)
    assert not forward.in_numpy
    assert (forward(X) == in_torch(forward.module, X)).all() and isinstance(forward(X), np.ndarray)


@pytest.mark.parametrize("name", KNOWN)
def test_without_fast_it_is_torch(name):
    forward = Forward(KNOWN[name](), fast=False)
    assert not forward.in_numpy and (forward(X) == in_torch(forward.module, X)).all()


def step_optimizer(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def step_flat(module):  # which moves the parameters into one vector
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    GradientStep(lambda module, x: (module(x).sum(), {}), module, optimizer, math.inf, lambda f: f, True)(
        torch.ones(2, 3)
    )


def load(module):
    module.load_state_dict({name: torch.rand(value.shape) for name, value in module.state_dict().items()})


def change_buffers(module):
    for buffer in module.buffers():
        buffer += 1


def move(module):
    for parameter in module.parameters():
        parameter.data = parameter.detach() + 1


@pytest.mark.parametrize("change", [step_optimizer, step_flat, load, change_buffers, move])
@pytest.mark.parametrize("name", KNOWN)
def test_it_follows_the_weights(name, change):
    forward = Forward(KNOWN[name](), fast=True)
    before = forward(X)
    for _ in range(2):
        change(forward.module)
        assert forward.in_numpy
        assert_same(forward, X)
    if change is not change_buffers or name in ("softmax", "buffers"):
        assert np.abs(forward(X) - before).max() > 1e-3


def test_it_follows_numbers_and_modes():
    forward = Forward(Tempered(), fast=True)
    assert forward.in_numpy
    assert_same(forward, X)
    for change in (lambda m: setattr(m, "temperature", 2.0), lambda m: m.eval(), step_flat, lambda m: m.train(), move):
        before = forward(X)
        change(forward.module)
        assert_same(forward, X)
        assert np.abs(forward(X) - before).max() > 1e-3
    assert_same(copy.deepcopy(forward), X)


def test_it_follows_parts_that_are_replaced():
    """As the opponent of self-play is, by a copy of the learner."""
    forward = Forward(nn.Sequential(net(), nn.Tanh()), fast=True)
    assert forward.in_numpy
    for change in (
        lambda m: setattr(m, "0", net()),
        lambda m: m[0].__setitem__(1, nn.ReLU()),
        lambda m: setattr(m, "1", nn.Identity()),
        lambda m: setattr(m, "0", copy.deepcopy(m[0])),
        step_flat,
    ):
        change(forward.module)
        assert_same(forward, X)


class Holds(nn.Module):
    """Its result depends on what it holds: x times it."""

    def __init__(self, held):
        super().__init__()
        self.net, self.held = nn.Linear(3, 4), held

    def forward(self, x):
        return self.net(x) * (1.0 if self.held is None else float(getattr(self.held, "t", self.held)))


def test_a_module_that_holds_what_may_change_unseen_is_called_in_torch():
    forward = Forward(Holds(SimpleNamespace(t=1.0)), fast=True)
    assert not forward.in_numpy
    before = forward(X)
    forward.module.held.t = 2.0
    np.testing.assert_allclose(forward(X), 2 * before, rtol=1e-6)


def test_nothing_may_become_a_number():
    forward = Forward(Holds(None), fast=True)
    assert forward.in_numpy
    before = forward(X)
    forward.module.held = 3.0
    np.testing.assert_allclose(forward(X), 3 * before, rtol=1e-6)


def test_a_forward_pass_that_counts_its_calls_is_one_of_torch():
    forward = Forward(Counting(), fast=True)
    first, second = forward(X), forward(X)
    calls = forward.module.calls
    np.testing.assert_allclose(first / (calls - 1), second / calls, rtol=1e-5)


def test_inputs_go_where_the_parameters_are():
    """A buffer may stay on the host, also one that comes first."""
    forward = Forward(nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 4, device="meta")), fast=True)
    assert forward.device.type == "meta"


def test_a_weight_may_be_computed_later_and_be_itself_again():
    forward = Forward(net(), fast=True)
    for change in (
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: prune.remove(layer, "weight"),
        nn.utils.parametrizations.weight_norm,
        lambda layer: nn.utils.parametrize.remove_parametrizations(layer, "weight"),
    ):
        change(forward.module[2])
        assert_same(forward, X)
        move(forward.module)
        assert_same(forward, X)
    assert forward.in_numpy


# ---------------------------------------------------------------------- gradient_step
def loss_of(module, x, y):
    loss = ((module(x) - y) ** 2).mean()
    return loss, {"losses/td_loss": loss, "losses/q_values": y.mean()}


def batch():
    return torch.randn(16, 3), 10 * torch.randn(16, 4)


def stepper(module, max_grad_norm=math.inf, fast=True, optimizer=torch.optim.Adam, lr=0.01, compiled=lambda f: f):
    return GradientStep(loss_of, module, optimizer(module.parameters(), lr=lr), max_grad_norm, compiled, fast)


@pytest.mark.parametrize("max_grad_norm", [0.5, 1e6, math.inf])
def test_fast_and_plain_steps_give_the_same_parameters(max_grad_norm):
    fast, plain = net(), net()
    plain.load_state_dict(fast.state_dict())
    steps = stepper(fast, max_grad_norm), stepper(plain, max_grad_norm, fast=False)
    inputs = batch()
    a, b = (step(*inputs) for step in steps)
    assert a.keys() == b.keys() == {"losses/td_loss", "losses/q_values"}
    assert all(torch.equal(a[name], b[name]) and not a[name].requires_grad for name in a)
    for x, y in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


def test_the_optimizer_sees_one_vector_or_the_parameters():
    fast, plain = stepper(net()), stepper(net(), fast=False)
    (vector,) = fast.optimizer.param_groups[0]["params"]
    assert vector.shape == (8 * 4 + 8 * 9 + 4 * 9,) and fast.optimizer.param_groups[0]["fused"]
    for step in (fast, plain):
        step(*batch())
    assert list(fast.optimizer.state) == [vector] and vector.data_ptr() == next(fast.module.parameters()).data_ptr()
    parameters = plain.optimizer.param_groups[0]["params"]
    assert all(x is y for x, y in zip(parameters, plain.module.parameters(), strict=True))


@pytest.mark.parametrize("max_grad_norm", [0.5, math.inf])
def test_a_plain_step_is_the_one_everybody_writes(max_grad_norm):
    """To the last bit: zero_grad, backward, clip_grad_norm_, step."""
    mine, other = net(), net()
    other.load_state_dict(mine.state_dict())
    step, optimizer = stepper(mine, max_grad_norm, fast=False), torch.optim.Adam(other.parameters(), lr=0.01)
    for _ in range(3):
        inputs = batch()
        step(*inputs)
        optimizer.zero_grad()
        loss_of(other, *inputs)[0].backward()
        if max_grad_norm < math.inf:
            nn.utils.clip_grad_norm_(other.parameters(), max_grad_norm)
        optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip(mine.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("fast", [True, False])
def test_the_norm_of_the_gradient_is_clipped(fast):
    """Plain gradient descent moves the parameters by learning rate times gradient."""
    for max_grad_norm, larger in ((0.25, True), (1e6, False), (math.inf, False)):
        module = net()
        before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
        inputs = batch()
        gradients = torch.autograd.grad(loss_of(module, *inputs)[0], list(module.parameters()))
        norm = torch.cat([x.flatten() for x in gradients]).norm()
        stepper(module, max_grad_norm, fast, torch.optim.SGD, lr=1.0)(*inputs)
        moved = (nn.utils.parameters_to_vector(module.parameters()) - before).norm().item()
        assert norm > 1 and moved == pytest.approx(max_grad_norm if larger else norm.item(), rel=1e-4)


def test_loss_and_derivative_are_compiled_together():
    calls = []

    def compiled(function):
        def call(flat, *inputs):
            gradients, metrics = function(flat, *inputs)
            calls.append((function.__name__, [x.shape for x in gradients], list(metrics)))
            return gradients, metrics

        return call

    stepper(net(), fast=False, compiled=compiled)(*batch())
    shapes = [parameter.shape for parameter in net().parameters()]
    assert calls == [("gradients_of", shapes, ["losses/td_loss", "losses/q_values"])]


# ---------------------------------------------------------------------- learned and log
SCRIPT = """
from dataclasses import dataclass
import gymnasium as gym
import numpy as np
import torch
from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "probes:OneStep-v0"
    total_timesteps: int = 120
    eval_every: int = 0
    eval_episodes: int = 1


if __name__ == "__main__":
    args = parse(Args)
    run = Run(args)
    start = run.resume(model=torch.nn.Linear(1, 1))
    for iteration in run.loop(start, args.total_timesteps // 10):
        global_step = 10 * (iteration + 1)
        for i in range(iteration % 3):
            run.learned({"losses/x": torch.tensor(0.1) * iteration + i, "losses/y": 10 * iteration + i})
            if i == 1:
                run.learned({"losses/seldom": np.float32(iteration)})
        run.log(global_step, {"charts/now": global_step})
        run.save(global_step)
    run.close(lambda obs: np.zeros(len(obs), int), gym.make)
"""


@pytest.fixture
def counting(tmp_path):
    """A script of 12 iterations of 10 steps, with 0, 1 and 2 gradient steps by turns."""
    path = tmp_path / "counting.py"
    path.write_text(SCRIPT)
    return path


def logged(run_dir):
    return [{k: v for k, v in row.items() if "eval" not in k} for row in comparable(run_dir) if "charts/now" in row]


def expected(begin, end):
    """The row at step `end`, with the means of the gradient steps after step `begin`."""
    done = [(k, i) for k in range(begin // 10, end // 10) for i in range(k % 3)]
    row = {"global_step": end, "charts/now": end}
    if done:
        row["losses/x"] = pytest.approx(np.mean([0.1 * k + i for k, i in done]), rel=1e-5)
        row["losses/y"] = np.mean([10 * k + i for k, i in done])
    if seldom := [k for k, i in done if i == 1]:
        row["losses/seldom"] = np.mean(seldom)
    return row


@pytest.mark.parametrize(
    ("every", "steps"),
    [(1, [*range(10, 121, 10)]), (50, [50, 100, 120]), (35, [40, 70, 110, 120]), (0, [120]), (1000, [120])],
)
def test_rows_are_due_every_so_many_steps_with_means_over_the_gradient_steps_since(every, steps, counting, train):
    v = train(counting, "--log-every", every)
    assert logged(v["run"].dir) == [expected(*pair) for pair in pairwise([0, *steps])]
    assert all("charts/SPS" in row for row in rows(v["run"].dir, "charts/now"))


def test_means_survive_a_checkpoint_between_two_rows(counting, train, tmp_path):
    """Saved at step 80, after gradient steps that no row has yet: the rows are those of the run never stopped."""
    whole = train(counting, "--log-every", 50, "--save-every", 0)["run"].dir
    cut = train(counting, "--log-every", 50, "--save-every", 40, runs_dir=tmp_path / "cut")["run"].dir
    *_, at_80, at_120 = sorted((cut / "checkpoint").iterdir())
    shutil.rmtree(at_120)
    assert "80" in at_80.name
    train(counting, "--resume", cut)
    assert "resumed at step 80" in train.out
    assert logged(cut) == logged(whole) and [row["global_step"] for row in logged(cut)] == [50, 100, 120]
