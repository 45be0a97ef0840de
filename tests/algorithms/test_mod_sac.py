"""ModSAC: its networks and losses by hand, and how often its actor learns. What it shares with InterSAC (lambda,
DenseNet, the growing batch) and what all four files have in common is tested in test_inter_sac.py."""

import numpy as np
import pytest
import torch
from conftest import definitions
from test_actor_critic import SMALL, random_batch, steps_of, weights
from test_inter_sac import dense_net, huber, linear, numpy_of

MOD = definitions("mod_sac")
DIARY = ["--env-id", "probes_offpolicy:Diary-v0", *SMALL, "--width", "16"]


def perceptron(net, x):
    first, _, trunk, last = net
    return linear(dense_net(trunk, np.maximum(linear(x, first), 0)), last)


def double(kind, seed, *sizes):
    torch.manual_seed(seed)
    return MOD[kind](*sizes).double()


def test_two_critics_share_all_layers_except_the_last():
    critic, batch = double("Critic", 0, 3, 2, 16), random_batch()
    q1, q2 = critic(batch.obs, batch.action)
    expected = perceptron(critic.net, np.concatenate(numpy_of(batch.obs, batch.action), 1))
    np.testing.assert_allclose(np.stack(numpy_of(q1, q2), 1), expected, rtol=1e-9)
    assert q1.shape == (16,) and (q1 != q2).all() and [len(critic.net), len(critic.net[-1].weight)] == [4, 2]


def test_critic_loss_by_hand():
    """Scaled rewards; the smaller value of the target critics for an action of the target actor; Huber losses."""
    critic, target_critic = double("Critic", 0, 3, 2, 16), double("Critic", 1, 3, 2, 16)
    target_actor, batch = double("Actor", 2, 3, 2, 16), random_batch()
    batch = batch._replace(reward=8 * batch.reward)  # errors on both sides of 1
    noise = torch.randn(16, 2, dtype=torch.float64)
    with torch.no_grad():  # each of the two is the smaller one somewhere
        target_critic.net[-1].weight.normal_()
        q = torch.stack(target_critic(batch.next_obs, target_actor(batch.next_obs, noise)[0]), 1)
        target_critic.net[-1].bias -= q.mean(0)
    inputs = (target_critic, target_actor, torch.tensor(0.3), batch, noise, 0.5, 0.9)
    loss, metrics = MOD["mod_critic_loss"](critic, *inputs)
    own = type(batch)(*numpy_of(*batch))
    next_action, next_logprob = numpy_of(*target_actor(batch.next_obs, noise))
    next_q = perceptron(target_critic.net, np.concatenate([own.next_obs, next_action], 1))
    assert {0, 1} == set(next_q.argmin(1))
    target = 0.5 * own.reward + 0.9 * (1 - own.done) * (next_q.min(1) - 0.3 * next_logprob)
    errors = perceptron(critic.net, np.concatenate([own.obs, own.action], 1)) - target[:, None]
    assert (np.abs(errors) > 1).any() and (np.abs(errors) < 1).any()
    assert loss.item() == pytest.approx(huber(errors[:, 0]) + huber(errors[:, 1]), rel=1e-6)
    assert metrics["losses/qf_loss"].item() == pytest.approx(loss.item() / 2)
    loss.backward()
    assert all(p.grad is None for net in (target_critic, target_actor) for p in net.parameters())


def test_the_critics_are_five_quarters_as_wide(train):
    v = train("mod_sac", *DIARY)
    assert v["actor"].net[0].out_features == 16 and v["critic"].net[0].out_features == 20


@pytest.mark.parametrize(
    ("flags", "least", "most"),
    [("--reward-scale 100", 20, 21), ("--reward-scale 0.001", 23, 38), ("--no-reliable-lambda", 40, 40)],
)
def test_the_actor_learns_as_often_as_lambda_says(flags, least, most, train):
    """Of 40 updates: huge rewards make lambda 0; with small ones it stays around a half; without it all."""
    v = train("mod_sac", *DIARY, *flags.split())
    assert steps_of(v["critic_optimizer"]) == 40
    actor_steps = steps_of(v["actor_optimizer"])
    assert actor_steps == steps_of(v["alpha_optimizer"]) and least <= actor_steps <= most


def test_the_target_actor_follows_only_in_the_turns_of_the_actor(train):
    """One update: not yet the actor's turn. Two: its first."""
    for total, turn in ((21, False), (22, True)):
        v = train("mod_sac", *DIARY, "--total-timesteps", total, "--tau", "1")
        assert torch.equal(weights(v["target_critic"]), weights(v["critic"]))
        assert torch.equal(weights(v["target_actor"]), weights(v["actor"]))
        assert (steps_of(v["actor_optimizer"]) == 1) == turn
