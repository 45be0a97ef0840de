"""Gradient steps that share modules, parameters and optimisers are those of plain PyTorch."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import comparable
from test_multigpu import Ranks, weights

from solorl.catalog import stub
from solorl.checkpoints.checkpoint import restore
from solorl.compute.speed import Forward, GradientStep, compile_problem, compiled
from solorl.errors import UsageError


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.policy, self.value = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 1)


class Shift(nn.Module):
    """Two parameters whose gradients are one tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(3)) for _ in range(2))


def policy_loss(agent, x):
    """The value takes no part in it."""
    loss = (10 * agent.policy(agent.encoder(x).tanh()).softmax(1)[:, 0] * x.sum(1)).mean()
    return loss, {"losses/policy_loss": loss}


def value_loss(agent, x):
    """The policy takes no part in it."""
    loss = ((agent.value(agent.encoder(x).tanh()) - x.sum(1, keepdim=True)) ** 2).mean()
    return loss, {"losses/value_loss": loss}


def joint_loss(agent, x):
    loss = policy_loss(agent, x)[0] + value_loss(agent, x)[0]
    return loss, {"losses/loss": loss}


def twice_loss(agent, x):
    loss = (joint_loss(agent, 2 * x)[0] - 1) ** 2
    return loss, {"losses/loss": loss}


def critic_loss(critic, x):
    loss = ((critic(x) - x.sum(1, keepdim=True)) ** 2).mean()
    return loss, {"losses/loss": loss}


def shift_loss(module, x):
    loss = ((module.a + module.b + x) ** 2).sum()
    return loss, {"losses/loss": loss}


def adam(*modules, **settings):
    return torch.optim.Adam([x for module in modules for x in module.parameters()], lr=0.01, **settings)


# Each makes modules, optimisers and the steps that they take in turn: (loss, module, optimiser); and what happens
# before a round of them, if anything.
def two_losses(agent):
    optimizer = adam(agent)
    return [(joint_loss, agent, optimizer), (twice_loss, agent, optimizer)], {}


def two_optimizers(agent):
    return [(joint_loss, agent, adam(agent)), (twice_loss, agent, torch.optim.RMSprop(agent.parameters(), lr=0.01))], {}


def two_orders(agent):
    backwards = torch.optim.SGD(list(agent.parameters())[::-1], lr=0.01, momentum=0.9)
    return [(joint_loss, agent, adam(agent)), (twice_loss, agent, backwards)], {}


def shared_encoder(agent):
    modules = [nn.Sequential(agent.encoder, head) for head in (agent.value, nn.Linear(8, 1).double())]
    return [(critic_loss, each, adam(each)) for each in modules], {}


def encoder_of_the_critic(agent):
    """The policy's loss does not move it."""
    critic = nn.Sequential(agent.encoder, agent.value)
    return [(critic_loss, critic, adam(critic)), (policy_loss, agent, adam(agent.policy))], {}


def one_part_of_two_modules(agent):
    """The optimiser has the encoder only, which is in both modules."""
    critic, optimizer = nn.Sequential(agent.encoder, agent.value), adam(agent.encoder)
    return [(critic_loss, critic, optimizer), (policy_loss, agent, optimizer)], {}


def unused_parts(agent):
    """The first loss has all parameters, so there is a state of the optimiser to divide."""
    optimizer = adam(agent, weight_decay=0.1)
    return [(loss, agent, optimizer) for loss in (joint_loss, policy_loss, value_loss)], {}


def unused_from_the_first_step(agent):
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.01, momentum=0.9)
    return [(policy_loss, agent, optimizer), (joint_loss, agent, optimizer)], {}


def several_groups(agent):
    groups = [{"params": agent.encoder.parameters(), "lr": 0.02}, {"params": agent.policy.parameters()}]
    return [(joint_loss, agent, torch.optim.Adam(groups, lr=0.01)), (twice_loss, agent, adam(agent))], {}


def frozen(agent):
    agent.encoder.requires_grad_(False)
    return [(joint_loss, agent, adam(agent))], {}


def frozen_for_a_while(agent):
    optimizer = adam(agent)
    events = {1: lambda: agent.encoder.requires_grad_(False), 2: lambda: agent.encoder.requires_grad_(True)}
    return [(joint_loss, agent, optimizer), (twice_loss, agent, optimizer)], events


def one_more_group(agent):
    optimizer = adam(agent.encoder)
    add = {1: lambda: optimizer.add_param_group({"params": agent.value.parameters()})}
    return [(joint_loss, agent, optimizer)], add


def moved(agent):
    """All of it to other memory and back to its type, and then a part."""
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.01)
    events = {1: lambda: agent.float().double(), 2: lambda: move(agent.value)}
    return [(joint_loss, agent, optimizer), (twice_loss, agent, adam(agent.encoder))], events


def begun_before(agent):
    optimizer = adam(agent)
    joint_loss(agent, torch.ones(1, 3, dtype=torch.float64))[0].backward()
    optimizer.step()
    return [(joint_loss, agent, optimizer)], {}


def other_optimizer(agent):
    """Which does not treat each number alone."""
    return [(joint_loss, agent, torch.optim.Adafactor(agent.parameters(), lr=0.01))], {}


def one_gradient_of_two_parameters(agent):
    agent.shift = Shift().double()
    return [(shift_loss, agent.shift, torch.optim.SGD(agent.shift.parameters(), lr=0.01))], {}


def move(module):
    for x in module.parameters():
        x.data = x.data + 1


COMBINATIONS = [
    *(two_losses, two_optimizers, two_orders, shared_encoder, encoder_of_the_critic, one_part_of_two_modules),
    *(unused_parts, unused_from_the_first_step, several_groups, frozen, frozen_for_a_while, one_more_group, moved),
    *(begun_before, other_optimizer, one_gradient_of_two_parameters),
]


def parameters_of(optimizer):
    """Also where it sees one vector."""
    return [x for group in optimizer.param_groups for one in group["params"] for x in getattr(one, "views", [one])]


def plain_step(loss_of, module, optimizer, max_grad_norm):
    """What everybody writes."""

    def step(*inputs):
        optimizer.zero_grad()
        loss_of(module, *inputs)[0].backward()
        nn.utils.clip_grad_norm_(parameters_of(optimizer), max_grad_norm)
        optimizer.step()

    return step


def fast_step(loss_of, module, optimizer, max_grad_norm, compiled=lambda function: function, fast=True):
    return GradientStep(loss_of, module, optimizer, max_grad_norm, compiled, fast)


def step_without_fast(*inputs):
    return fast_step(*inputs, fast=False)


def step_of_the_stub(*inputs):
    run = stub.Run.__new__(stub.Run)
    run.args = SimpleNamespace(compile=False)
    return run.gradient_step(*inputs)


def step_compiled(*inputs):
    if problem := compile_problem(Path(torch.__file__).parent):
        pytest.skip(f"compiling {problem}")
    return fast_step(*inputs, compiled=lambda function: compiled(function, torch.device("cpu")))


def train_with(make_step, combination, max_grad_norm):
    """Weights and states of the optimisers after each of three rounds of steps."""
    torch.manual_seed(0)
    agent = Agent().double()
    plan, events = combination(agent)
    steps = [make_step(*each, max_grad_norm) for each in plan]
    found, x = [], torch.randn(3, len(steps), 16, 3, dtype=torch.float64)
    for i, inputs in enumerate(x):
        events.get(i, lambda: None)()
        for step, each in zip(steps, inputs, strict=True):
            step(each)
            modules = nn.ModuleList([agent, *(module for _, module, _ in plan)])
            found.append({name: value.detach().clone() for name, value in modules.named_parameters()})
    return found, [[optimizer.state.get(x) for x in parameters_of(optimizer)] for _, _, optimizer in plan]


@pytest.mark.parametrize("max_grad_norm", [0.3, math.inf])
@pytest.mark.parametrize("make_step", [fast_step, step_without_fast, step_of_the_stub])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_every_combination_is_that_of_plain_pytorch(combination, make_step, max_grad_norm):
    """After each update. The norm is that of the optimiser's parameters."""
    found, expected = (train_with(make, combination, max_grad_norm)[0] for make in (make_step, plain_step))
    for mine, other in zip(found, expected, strict=True):
        for name in other:
            torch.testing.assert_close(mine[name], other[name], rtol=0, atol=1e-9, msg=name)
    first, last = expected[0], expected[-1]
    assert any((first[name] - last[name]).abs().max() > 1e-3 for name in first)


@pytest.mark.slow  # half a minute each
@pytest.mark.parametrize("combination", [two_losses, shared_encoder, unused_parts, frozen_for_a_while])
def test_compiled_combinations_are_those_of_plain_pytorch(combination):
    torch._dynamo.reset()
    found, expected = (train_with(make, combination, 0.3)[0] for make in (step_compiled, plain_step))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("combination", [unused_parts, unused_from_the_first_step, frozen_for_a_while])
def test_the_divided_state_of_an_optimizer_is_that_of_plain_pytorch(combination):
    """Moments and numbers of steps of each parameter."""
    found, expected = (train_with(make, combination, math.inf)[1] for make in (fast_step, plain_step))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert all(state for state in found[0])


@pytest.mark.parametrize(
    ("combination", "sizes"),
    [(two_losses, [59, 59]), (encoder_of_the_critic, [41, 18]), (one_part_of_two_modules, [32, 32])],
)
def test_steps_that_can_have_one_vector(combination, sizes):
    """One that belongs to the optimiser; clipping and stepping are single operations."""
    plan, _ = combination(Agent())
    for each in plan:
        fast_step(*each, 0.5)
    for (_, _, optimizer), size in zip(plan, sizes, strict=True):
        (vector,) = optimizer.param_groups[0]["params"]
        assert vector.shape == (size,) and optimizer.param_groups[0]["fused"]


def test_an_optimizer_gets_its_own_list_of_parameters_back():
    agent = Agent()
    optimizer = adam(agent)
    step = fast_step(policy_loss, agent, optimizer, 0.5)
    assert len(optimizer.param_groups[0]["params"]) == 1
    step(torch.randn(4, 3))
    assert all(x is y for x, y in zip(optimizer.param_groups[0]["params"], agent.parameters(), strict=True))


@pytest.mark.parametrize("fast", [True, False])
def test_other_parameters_get_no_gradient(fast):
    agent = Agent()
    before = [x.clone() for x in agent.encoder.parameters()]
    fast_step(joint_loss, agent, adam(agent.policy, agent.value), 0.5, fast=fast)(torch.randn(4, 3))
    assert all(x.grad is None and torch.equal(x, y) for x, y in zip(agent.encoder.parameters(), before, strict=True))


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize("fast", [True, False])
def test_an_optimizer_of_other_parameters_is_refused(fast):
    agent, sentence = Agent(), "a parameter of shape (1, 8) that Sequential does not have"
    optimizer = adam(agent)
    if fast:
        fast_step(joint_loss, agent, optimizer, 0.5)
    with pytest.raises(UsageError) as error:
        fast_step(critic_loss, nn.Sequential(agent.encoder, agent.policy), optimizer, 0.5, fast=fast)
    assert sentence in str(error.value) and str(error.value).endswith("only parameters that Sequential has now")
    with pytest.raises(SystemExit):
        step_of_the_stub(critic_loss, nn.Sequential(agent.encoder, agent.policy), adam(agent), 0.5)


SCRIPT = """
from dataclasses import dataclass
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "probes:OneStep-v0"
    total_timesteps: int = 60
    eval_every: int = 0
    eval_episodes: int = 1
    foreign: bool = False  # the optimiser has a parameter too many


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.policy, self.value = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 1)


def policy_loss(agent, x):
    loss = agent.policy(agent.encoder(x).tanh()).softmax(1)[:, 0].mean()
    return loss, {"losses/policy_loss": loss}


def joint_loss(agent, x):
    x = agent.encoder(x).tanh()
    loss = (agent.value(x) ** 2).mean() + agent.policy(x).mean()
    return loss, {"losses/loss": loss}, {"x": x}


if __name__ == "__main__":
    args = parse(Args)
    run = Run(args, parallel=True)
    agent = Agent()
    optimizer = torch.optim.Adam([*agent.parameters(), *nn.Linear(2, 5).parameters()][: 8 if args.foreign else 6])
    joint_step = run.gradient_step(joint_loss, agent, optimizer, 0.5)
    policy_step = run.gradient_step(policy_loss, agent, optimizer)
    start = run.resume(agent=agent, optimizer=optimizer)
    for iteration in run.loop(start, args.total_timesteps // 10):
        x = torch.randn(16, 3).chunk(run.world_size)[run.rank]
        features = agent.encoder(x).tanh().detach()
        metrics, extra = joint_step(x)
        assert torch.equal(extra["x"], features)  # of this rank alone
        run.learned(metrics)
        if iteration > 2:
            run.learned(policy_step(x))
        run.log(10 * (iteration + 1), {"charts/sum": sum(p.sum() for p in agent.parameters()).detach()})
        run.save(10 * (iteration + 1))
    run.close(lambda obs: np.zeros(len(obs), int), gym.make)
"""


@pytest.fixture
def phases(tmp_path):
    """A script with two losses and one optimiser, of which the second has no use for the value and begins late."""
    path = tmp_path / "phases.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("flags", [(), ("--no-fast",)])
def test_a_run_says_it_in_one_sentence_and_writes_nothing(flags, phases, train, tmp_path):
    train(phases, "--foreign", *flags, code=2)
    assert train.out.startswith("error: ") and train.out.count("\n") == 1
    assert "a parameter of shape (5, 2) that Agent does not have" in train.out and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("fast", [True, False])
def test_replaced_parameters_are_refused(fast):
    """By `load_state_dict(assign=True)`, all or a part: the optimiser would move what no loss sees."""
    for part in ("encoder", ""):
        agent = Agent()
        step = fast_step(joint_loss, agent, adam(agent), 0.5, fast=fast)
        step(torch.randn(4, 3))
        module = agent.get_submodule(part)
        module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
        with pytest.raises(UsageError, match=r"shape \(8, 3\) that Agent does not have; give it only parameters that"):
            step(torch.randn(4, 3))


@pytest.mark.parametrize("fast", [True, False])
def test_a_loss_without_any_of_the_parameters_is_refused(fast):
    agent = Agent()
    step = fast_step(policy_loss, agent, adam(agent.value), 0.5, fast=fast)
    with pytest.raises(UsageError, match="the loss of a gradient step of Agent depends on no parameter of its optim"):
        step(torch.randn(4, 3))
    agent.requires_grad_(False)
    with pytest.raises(UsageError, match="depends on no parameter"):
        fast_step(policy_loss, agent, adam(agent), 0.5, fast=fast)(torch.randn(4, 3))


# ---------------------------------------------------------------------- extra
def loss_with(extra_of):
    def loss_of(module, x):
        y = module(x)
        return (y**2).mean(), {"losses/loss": (y**2).mean()}, extra_of(y)

    return loss_of


@pytest.mark.parametrize(
    "make_step", [fast_step, step_without_fast, step_of_the_stub, pytest.param(step_compiled, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "extra_of",
    [
        lambda y: y,
        lambda y: (y, 2 * y),
        lambda y: {"a": y, "b": (y.sum(), 3)},
        lambda y: torch.return_types.max((y, y)),
    ],
)
def test_extra_comes_back_as_it_was_detached(extra_of, make_step):
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    expected = extra_of(module(x).detach())
    metrics, extra = make_step(loss_with(extra_of), module, adam(module), 0.5)(x)
    assert list(metrics) == ["losses/loss"] and type(extra) is type(expected)
    torch.testing.assert_close(extra, expected, rtol=0, atol=0)
    tensors = torch.utils._pytree.tree_leaves((metrics, extra))
    assert all(not x.requires_grad for x in tensors if torch.is_tensor(x))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("loss_of", [joint_loss, policy_loss])
def test_ranks_average_gradients_and_metrics_but_not_extra(loss_of, fast):
    """With an average that doubles and negates, the weights move up the gradient. Extra is handed on."""
    seen, agent, x = [], Agent(), torch.randn(4, 3)

    def average(tensors):
        seen.append(len(tensors))
        return [-2 * tensor for tensor in tensors]

    def with_extra(agent, x):
        loss, metrics = loss_of(agent, x)
        return loss, metrics, (loss, x)

    before = {name: value.clone() for name, value in agent.named_parameters()}
    loss_of(agent, x)[0].backward()
    gradients = {name: value.grad for name, value in agent.named_parameters() if value.grad is not None}
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.5)
    step = GradientStep(with_extra, agent, optimizer, math.inf, lambda f: f, fast, average)
    metrics, (loss, same) = step(x)
    assert seen == [(1 if fast and loss_of is joint_loss else len(gradients)) + 1]
    assert next(iter(metrics.values())) == -2 * loss and torch.equal(same, x)
    for name, value in agent.named_parameters():
        torch.testing.assert_close(value, before[name] + gradients.get(name, torch.zeros(())))


@pytest.mark.parametrize("flags", [(), ("--no-fast",)])
def test_two_ranks_take_the_steps_of_one(flags, phases, train, tmp_path):
    """With one optimiser in two steps, and extra, which the script compares with what its own rank has."""
    one = train(phases, *flags)
    two = Ranks(tmp_path / "two", 2, *flags, path=phases)
    assert two.codes() == [0, 0], two.words(0) + two.words(1)
    assert np.array_equal(two.weights(0), two.weights(1))
    np.testing.assert_allclose(two.weights(0), weights(one["agent"]), rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- fast forward passes
@pytest.mark.parametrize("change", ["flatten", "move", "assign"])
def test_a_fast_forward_pass_sees_a_part_of_the_weights_move(change):
    """The last layer alone, while the first stays where it is in memory."""
    module, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)), np.ones((2, 3), np.float32)
    forward = Forward(module, fast=True)
    before = forward(x)
    if change == "flatten":
        fast_step(critic_loss, module, adam(module[2]), math.inf)(torch.randn(16, 3))
    elif change == "move":
        move(module[2])
    else:
        module[2].load_state_dict({"weight": torch.ones(4, 8), "bias": torch.ones(4)}, assign=True)
    assert forward.in_numpy and np.abs(forward(x) - before).max() > 1e-3
    np.testing.assert_allclose(forward(x), module(torch.from_numpy(x)).detach(), rtol=1e-5)


# ---------------------------------------------------------------------- resuming
@pytest.mark.parametrize("moves", [False, True])
def test_the_state_of_a_single_parameter_is_loaded(moves):
    """Whether its optimiser saw a vector when it was saved, or the parameter, which has no dimension."""

    def make():
        module = nn.Module()
        module.log_alpha = nn.Parameter(torch.tensor(0.5))
        optimizer = adam(module)
        return module, optimizer, fast_step(lambda module, x: (module.log_alpha * x, {}), module, optimizer, math.inf)

    (module, optimizer, step), (other, other_optimizer, other_step) = make(), make()
    step(torch.tensor(3.0))
    if moves:
        move(module)
        step(torch.tensor(2.0))
    state = copy.deepcopy(optimizer.state_dict())
    assert state["state"][0]["exp_avg"].shape == (() if moves else (1,))
    restore(other_optimizer, state)
    other.load_state_dict(module.state_dict())
    for each in (step, other_step):
        each(torch.tensor(-1.0))
    assert torch.equal(module.log_alpha, other.log_alpha)
    torch.testing.assert_close(other_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("flags", [(), ("--no-fast",)])
@pytest.mark.parametrize("cut", [20, 50])
def test_two_steps_with_one_optimizer_resume_exactly(cut, flags, phases, train, tmp_path):
    """Stopped before and after the optimiser got its parameters back: weights, state and metrics, bit for bit."""
    whole = train(phases, "--save-every", 10, *flags)
    part = train(phases, "--save-every", 10, "--total-timesteps", cut, *flags, runs_dir=tmp_path / "cut")["run"].dir
    v = train(phases, "--resume", part, "--total-timesteps", 60, "--resume-changed")
    assert v["start"] == cut // 10 and comparable(part) == comparable(whole["run"].dir)
    for x, y in zip(v["agent"].parameters(), whole["agent"].parameters(), strict=True):
        assert torch.equal(x, y)
    mine, other = (each["optimizer"].state_dict()["state"] for each in (v, whole))
    torch.testing.assert_close(mine, other, rtol=0, atol=0)
    assert [mine[i]["step"].item() for i in range(6)] == [9, 9, 9, 9, 6, 6]
