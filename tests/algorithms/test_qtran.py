"""qtran.py: the three losses against loops over games, agents and joint actions; what the matrix game shows."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import definitions, rows
from test_vdn import ACTIONS, AGENTS, GAMES, STEPS, best_of, network, random_batch, stepwise, targets_of

QTRAN = definitions("qtran")
MATRIX = "--env-id team/qtran_matrix --max-steps 1 --start-e 1 --end-e 1 --total-timesteps 10000 --buffer-size 500"
MATRIX += " --train-frequency 4 --learning-rate 0.002 --target-network-frequency 50 --tau 1"
MATRIX += " --eval-every 0 --eval-episodes 1"


def arguments(alt=False, lambda_opt=1.0, lambda_nopt=0.1):
    return SimpleNamespace(gamma=0.9, alt=alt, lambda_opt=lambda_opt, lambda_nopt=lambda_nopt)


def perceptron(net, x):
    """The output of a multilayer perceptron for one row."""
    layers = [layer for layer in net if hasattr(layer, "weight")]
    for i, layer in enumerate(layers):
        x = layer.weight.detach().numpy() @ x + layer.bias.detach().numpy()
        x = np.maximum(x, 0) if i < len(layers) - 1 else x
    return x


class ByHand:
    """Q_jt and V_jt of a network, one joint action at a time."""

    def __init__(self, net, batch):
        self.joint, self.state = net.joint, batch.state.numpy()
        self.values, self.memories = stepwise(net, batch)

    def q(self, t, i, actions, who):
        parts = (perceptron(self.joint.encoder, np.append(self.memories[t, i, k], np.eye(ACTIONS)[actions[k]]))
                 for k in who)  # fmt: skip
        return perceptron(self.joint.q, np.append(sum(parts), self.state[t, i]))[0]

    def v(self, t, i, who):
        memory = sum(self.memories[t, i, k] for k in who)
        return perceptron(self.joint.v, np.append(memory, self.state[t, i]))[0]

    def total(self, t, i, actions, who):
        return sum(self.values[t, i, k, actions[k]] for k in who)


def losses_by_hand(net, target_net, batch, alt):
    """L_td, L_opt and L_nopt, or with `alt` L_nopt-min, means over the steps that were played."""
    own, judge, found = ByHand(net, batch), ByHand(target_net, batch), []
    for t, i, target in targets_of(batch, own.values, judge.q, 0.9):
        who = [k for k in range(AGENTS) if batch.alive[t, i, k]]
        taken = [int(a) for a in batch.action[t, i]]
        best = [best_of(own.values[t, i, k], batch.mask[t, i, k]) for k in range(AGENTS)]
        difference = lambda actions: own.total(t, i, actions, who) - own.q(t, i, actions, who) + own.v(t, i, who)  # noqa: E731
        other = min(difference(taken), 0) ** 2
        if alt:
            own_actions = [
                [difference([*taken[:k], a, *taken[k + 1 :]]) for a in range(ACTIONS) if batch.mask[t, i, k, a]]
                for k in who
            ]
            other = np.mean([min(each) ** 2 for each in own_actions])
        found.append(((own.q(t, i, taken, who) - target) ** 2, difference(best) ** 2, other))
    return np.mean(found, 0)


@pytest.mark.parametrize("alt", [False, True])
def test_the_losses_by_hand(alt):
    """Agents that have left are in no sum; only actions that are allowed count in the smallest difference."""
    net, target_net, batch = network(QTRAN), network(QTRAN, seed=1), random_batch(QTRAN)
    loss, metrics = QTRAN["qtran_loss"](net, target_net, batch, arguments(alt, 0.7, 0.3))
    want = losses_by_hand(net, target_net, batch, alt)
    assert (want > 1e-4).all()
    got = [metrics[f"losses/{name}_loss"].item() for name in ("td", "opt", "nopt")]
    assert got == pytest.approx(want, rel=1e-4)
    assert loss.item() == pytest.approx(want @ [1, 0.7, 0.3], rel=1e-4)


def test_q_of_all_own_actions_is_that_of_each():
    """One agent at a time in place of all at once, with the others' actions as they were."""
    net, batch = network(QTRAN), random_batch(QTRAN)
    with torch.no_grad():
        hidden, state = net(batch)[1][:-1], batch.state[:-1]
        got = net.joint.own_actions(hidden, batch.action, batch.alive, state)
        assert got.shape == (STEPS, GAMES, AGENTS, ACTIONS)
        for k, a in itertools.product(range(AGENTS), range(ACTIONS)):
            action = batch.action.clone()
            action[..., k] = a
            torch.testing.assert_close(got[..., k, a], net.joint(hidden, action, batch.alive, state))


@pytest.mark.parametrize("alt", [False, True])
def test_the_conditions_move_the_agents_and_not_the_joint_value(alt):
    """L_opt and L_nopt have no gradient in the network of Q_jt; L_td has none in that of V_jt and the agents' values,
    but all have one in the agents' memories."""
    net, target_net, batch = network(QTRAN), network(QTRAN, seed=1), random_batch(QTRAN)
    td, opt, nopt = (
        QTRAN["qtran_loss"](net, target_net, batch, arguments(alt, *lambdas))[0] for lambdas in [(0, 0), (1, 0), (0, 1)]
    )

    def moved(loss):
        found = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True, allow_unused=True)
        named = zip((name for name, _ in net.named_parameters()), found, strict=True)
        return {name.rpartition(".")[0] for name, x in named if x is not None and x.abs().max() > 1e-6}

    joint, agents = {"joint.encoder.0", "joint.q.4"}, {"joint.v.4", "agents.head"}
    assert moved(td) >= joint | {"agents.memory"} and not moved(td) & agents
    for loss in (opt - td, nopt - td):
        assert moved(loss) >= agents | {"agents.memory"} and not moved(loss) & joint


def matrix_return(train, script, *flags):
    v = train(script, *MATRIX.split(), *flags)
    return rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"]


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--no-alt", "--alt"])
def test_finds_the_best_joint_action_of_the_matrix_game(train, flag):
    """Where the best action of each agent is the worst with any other; vdn.py does not find it."""
    assert matrix_return(train, "qtran", flag) == 8
    assert flag == "--alt" or matrix_return(train, "vdn") == 0
