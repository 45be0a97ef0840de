"""BasicAC: its loss by hand, and its targets. What all files from ElegantRL have in common is tested in
test_inter_sac.py."""

import numpy as np
import pytest
import torch
from conftest import definitions
from test_actor_critic import SMALL, random_batch, reference, steps_of, weights
from test_inter_sac import huber, numpy_of

BASIC = definitions("basic_ac")
DIARY = ["--env-id", "probes_offpolicy:Diary-v0", *SMALL]


def double(kind, seed):
    torch.manual_seed(seed)
    return BASIC[kind](3, 2).double()


def test_critic_loss_by_hand():
    """Clipped noise on the target action, the Huber loss; no gradient reaches the targets."""
    critic, target_critic, target_actor = double("Critic", 0), double("Critic", 1), double("Actor", 2)
    batch, noise = random_batch(), torch.randn(16, 2, dtype=torch.float64)
    batch = batch._replace(reward=4 * batch.reward)  # errors on both sides of 1
    loss, metrics = BASIC["basic_critic_loss"](critic, target_critic, target_actor, batch, noise, 0.5, 0.9)
    own = type(batch)(*numpy_of(*batch))
    next_action = np.tanh(reference(target_actor.net, own.next_obs)) + np.clip(noise.numpy(), -0.5, 0.5)
    next_value = reference(target_critic.q, own.next_obs, np.clip(next_action, -1, 1))[:, 0]
    errors = reference(critic.q, own.obs, own.action)[:, 0] - own.reward - 0.9 * (1 - own.done) * next_value
    assert (np.abs(errors) > 1).any() and (np.abs(errors) < 1).any()
    assert loss.item() == metrics["losses/qf1_loss"].item() == pytest.approx(huber(errors), rel=1e-6)
    loss.backward()
    assert all(p.grad is None for net in (target_critic, target_actor) for p in net.parameters())


def test_targets_follow_at_each_gradient_step_the_actor_when_due(train):
    """Of 40 updates the actor has 14; with tau 1 both targets are the newest networks, also between its steps."""
    v = train("basic_ac", *DIARY, "--policy-frequency", "3", "--tau", "1", "--total-timesteps", "62")
    assert [steps_of(v[f"{who}_optimizer"]) for who in ("critic", "actor")] == [42, 14]
    for who in ("critic", "actor"):
        assert torch.equal(weights(v[f"target_{who}"]), weights(v[who]))


def test_noise_on_target_actions_has_its_own_size(train, monkeypatch):
    seen = []
    step = BASIC["F"].smooth_l1_loss
    monkeypatch.setattr("torch.nn.functional.smooth_l1_loss", lambda q, y: seen.append(y.clone()) or step(q, y))
    targets = []
    for size in ("0", "0.5"):
        seen.clear()
        train("basic_ac", *DIARY, "--policy-noise", size, "--total-timesteps", "21")
        targets.append(seen[0])
    assert not torch.equal(*targets)
