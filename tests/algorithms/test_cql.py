"""CQL: the logarithm of the integral over all actions against numeric integration, the critics' loss against NumPy."""

import math

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint
from recorded import recorded
from test_iql import OBS, batch_of, perceptron, q_values, seen

CQL = definitions("cql")


def networks(actions):
    """An actor and a critic in double precision; the critic's values differ from action to action."""
    torch.manual_seed(0)
    scale = CQL["Standardize"](OBS)
    actor, critic = CQL["Actor"](scale, actions).double(), CQL["Critic"](scale, actions).double()
    for net in (critic.q1, critic.q2):
        net[-1].weight.data *= 20
    return actor, critic


def test_log_sum_exp_is_that_of_all_actions():
    """Against the trapezoidal rule over [-1, 1], with a policy so broad that it draws actions everywhere."""
    actor, critic = networks(1)
    actor.net[-1].weight.data *= 0.1
    actor.net[-1].bias.data = torch.tensor([0.2, 0.65], dtype=torch.float64)  # a standard deviation of about 1.6
    batch = batch_of(CQL, 1, n=4)
    generator = torch.Generator().manual_seed(0)
    uniform = 2 * torch.rand(2_000, 4, 1, generator=generator, dtype=torch.float64) - 1
    noise = torch.randn(2, 2_000, 4, 1, generator=generator, dtype=torch.float64)
    grid = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    with torch.no_grad():
        got = CQL["log_sum_exp"](critic, actor, batch, uniform, noise)
    for i in range(4):
        obs = batch.obs[i].expand(len(grid), 3)
        for estimate, q in zip(got, critic(obs, grid[:, None]), strict=True):
            assert estimate[i].item() == pytest.approx(torch.trapezoid(q.exp(), grid).log().item(), abs=0.05)


def test_the_critics_loss_is_that_of_the_paper():
    actor, critic = networks(2)
    _, target_critic = networks(2)
    for p in target_critic.parameters():
        p.data *= 0.9
    batch, n = batch_of(CQL, 2, n=6), 3
    obs, action, reward, done, next_obs = (x.numpy() for x in batch)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    uniform = 2 * torch.rand(n, 6, 2, generator=generator, dtype=torch.float64) - 1
    cql_noise = torch.randn(2, n, 6, 2, generator=generator, dtype=torch.float64)
    loss, metrics = CQL["cql_critic_loss"](
        critic, target_critic, actor, batch, noise, uniform, cql_noise, cql_alpha=5.0, gamma=0.9
    )

    def policy(x, noise):
        with torch.no_grad():
            action, logprob = actor(x, noise)
        return action.numpy(), logprob.numpy()

    next_action, _ = policy(batch.next_obs, noise)
    target = reward + 0.9 * (1 - done) * q_values(CQL, target_critic, next_obs, next_action).min(0)
    q = q_values(CQL, critic, obs, action)
    terms = []
    for k in range(n):
        here, there = policy(batch.obs, cql_noise[0, k]), policy(batch.next_obs, cql_noise[1, k])
        for a, logprob in ((uniform[k].numpy(), 2 * math.log(0.5)), here, there):
            terms.append(np.exp(q_values(CQL, critic, obs, a) - logprob))
    gap = np.log(np.mean(terms, 0)) - q
    expected = ((q - target) ** 2).mean(1).sum() + 5.0 * gap.mean(1).sum()
    assert loss.item() == pytest.approx(expected)
    assert metrics["losses/cql_gap"].item() == pytest.approx(gap.mean())


def test_the_critics_loss_moves_the_critics_only():
    actor, critic = networks(2)
    batch = batch_of(CQL, 2, n=6)
    noise = torch.zeros(6, 2).double()
    loss, _ = CQL["cql_critic_loss"](
        critic, critic, actor, batch, noise, noise[None], noise.expand(2, 1, 6, 2), cql_alpha=5.0, gamma=0.9
    )
    for net, moved in ((actor, False), (critic, True)):
        gradients = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True, allow_unused=True)
        assert all((g is not None) == moved for g in gradients)


def test_acting_is_the_squashed_mean():
    actor, _ = networks(2)
    obs = OBS[:5].astype(np.float32)
    mean = perceptron(actor.net, seen(obs))[:, :2]
    np.testing.assert_allclose(actor.float().act(obs), np.tanh(mean), atol=1e-5)


@pytest.mark.slow
def test_resumed_as_if_it_had_never_stopped(train):
    words = "--env-id Pendulum-v1 --total-timesteps 40 --batch-size 8 --log-every 10 --save-every 20 --eval-every 40"
    run = train("cql", "--dataset", recorded("Pendulum-v1"), *words.split(), "--eval-episodes", "1")["run"]
    whole = comparable(run.dir)
    drop_last_checkpoint(run.dir)
    train("cql", "--resume", run.dir)
    assert comparable(run.dir) == whole
