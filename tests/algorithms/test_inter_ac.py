"""InterAC: spectral norm, exploration, its network and losses by hand, its hard copies. What it shares with InterSAC,
and what all files from ElegantRL have in common, is tested in test_inter_sac.py."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import definitions
from test_actor_critic import SMALL, random_batch, weights
from test_inter_sac import dense_net, huber, linear, numpy_of, two_layers

import solorl

INTER_AC = definitions("inter_ac")
DIARY = ["--env-id", "probes_offpolicy:Diary-v0", *SMALL, "--width", "16"]


def double_agent(seed=0):
    torch.manual_seed(seed)
    return INTER_AC["Agent"](3, 2, 8).double()


def hidden(net, x):
    """The HardSwish of the first layer of a head."""
    x = linear(x, net[0])
    return x * np.clip(x + 3, 0, 6) / 6


def policy(agent, obs):
    return np.tanh(
        linear(hidden(agent.action, dense_net(agent.trunk, two_layers(agent.encode_obs, obs))), agent.action[2])
    )


def value(agent, obs, action):
    x = dense_net(agent.trunk, two_layers(agent.encode_obs, obs) + two_layers(agent.encode_action, action))
    [weight], bias = numpy_of(agent.q[2].weight, agent.q[2].bias)[0], agent.q[2].bias.item()
    return hidden(agent.q, x) @ weight / np.sqrt((weight**2).sum()) + bias


@pytest.mark.parametrize(("fan_in", "fan_out"), [(7, 5), (5, 7), (6, 1)])
def test_a_layer_has_spectral_norm_1(fan_in, fan_out):
    """By the singular values of the matrix that it multiplies with, whatever the size of its weight."""
    torch.manual_seed(0)
    layer = INTER_AC["SpectralLinear"](fan_in, fan_out).double()
    with torch.no_grad():
        layer.weight *= 30
    matrix = (layer(torch.eye(fan_in, dtype=torch.float64)) - layer.bias).detach().numpy()
    singular = np.linalg.svd(matrix, compute_uv=False)
    assert singular[0] == pytest.approx(1)
    np.testing.assert_allclose(matrix * np.linalg.svd(layer.weight.detach())[1][0], layer.weight.detach().T, rtol=1e-6)


def test_policy_and_values_by_hand():
    agent, batch = double_agent(), random_batch()
    obs, action = numpy_of(batch.obs, batch.action)
    np.testing.assert_allclose(agent.policy(batch.obs).detach(), policy(agent, obs), rtol=1e-7)
    np.testing.assert_allclose(agent(batch.obs, batch.action).detach(), value(agent, obs, action), rtol=1e-7)
    np.testing.assert_allclose(agent.float().act(obs), policy(agent, obs), rtol=1e-4, atol=1e-5)


def test_actions_that_leave_the_bounds_become_uniform():
    action, noise = np.array([[0.9, -0.9, 0.9, 0.0]]), np.array([[0.2, -0.2, 0.05, -0.3]])
    got = INTER_AC["explored"](action, noise, np.full((1, 4), 0.125))
    np.testing.assert_allclose(got, [[0.125, 0.125, 0.95, -0.3]])


def test_uniform_actions_are_on_both_sides_of_0(train):
    v = train("inter_ac", *DIARY, "--exploration-noise", "100")
    action = v["replay"].arrays["action"][20:60]
    assert (np.abs(action) <= 1).all() and action.min() < -0.5 and action.max() > 0.5


@pytest.mark.parametrize("turn", [True, False])
def test_loss_by_hand(turn):
    """The mean of the next values with and without noise; lambda weighs the actor against the target's policy."""
    agent, target_agent, batch = double_agent(0), double_agent(1), random_batch()
    batch = batch._replace(reward=8 * batch.reward)  # errors on both sides of 1
    noise = torch.randn(16, 2, dtype=torch.float64)
    loss, metrics = INTER_AC["inter_ac_loss"](agent, target_agent, torch.tensor(0.2), batch, noise, 0.5, 0.9, turn)
    own = type(batch)(*numpy_of(*batch))
    next_action = policy(target_agent, own.next_obs)
    noisy = np.clip(next_action + noise.numpy(), -1, 1)
    next_value = (value(target_agent, own.next_obs, next_action) + value(target_agent, own.next_obs, noisy)) / 2
    errors = value(agent, own.obs, own.action) - 0.5 * own.reward - 0.9 * (1 - own.done) * next_value
    assert (np.abs(errors) > 1).any() and (np.abs(errors) < 1).any()
    distance = huber(policy(agent, own.next_obs) - next_action)
    actor_loss = -value(agent, own.obs, policy(agent, own.obs)).mean()
    assert metrics["losses/qf1_loss"].item() == pytest.approx(huber(errors), rel=1e-6)
    assert loss.item() == pytest.approx(huber(errors) + 0.8 * distance + 0.1 * actor_loss * turn, rel=1e-6)
    loss.backward()
    assert all(p.grad is None for p in target_agent.parameters())


def test_the_actor_climbs_its_own_critic_and_leaves_it_as_it_is():
    """The gradient is that of a network whose critic belongs to a copy."""
    agent, batch = double_agent(), random_batch()
    critic, named = copy.deepcopy(agent), dict(agent.named_parameters())
    losses = [INTER_AC["inter_ac_actor_loss"](agent, batch.obs), -critic(batch.obs, agent.policy(batch.obs)).mean()]
    torch.testing.assert_close(*losses)
    got, expected = (torch.autograd.grad(x, list(named.values()), allow_unused=True) for x in losses)
    reached = {name.partition(".")[0] for name, x in zip(named, got, strict=True) if x is not None}
    assert reached == {"encode_obs", "trunk", "action"}
    for one, other in zip(got, expected, strict=True):
        assert one is other is None or torch.allclose(one, other)


def targets(train, monkeypatch, *flags):
    """The weights of (agent, target) after each environment step."""
    after = []

    class Watched(solorl.Run):
        def resume(self, **parts):
            self.parts = parts
            return super().resume(**parts)

        def save(self, step):
            after.append([weights(self.parts[name]).clone() for name in ("agent", "target_agent")])
            return super().save(step)

    monkeypatch.setattr("solorl.Run", Watched)
    train("inter_ac", *DIARY, *flags)
    return after


def test_targets_are_hard_copies_unless_lambda_is_small(train, monkeypatch):
    """After updates 16 and 32, of the environment steps 36 and 52; never where losses are large."""
    after = targets(train, monkeypatch, "--target-network-frequency", "16", "--reward-scale", "0.001")
    for step, ((_, before), (agent, target)) in enumerate(pairwise(after), 2):
        assert torch.equal(target, agent if step in (36, 52) else before)
    after = targets(train, monkeypatch, "--target-network-frequency", "16", "--reward-scale", "1000")
    assert torch.equal(after[0][1], after[-1][1]) and not torch.equal(after[0][0], after[-1][0])
