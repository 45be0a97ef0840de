"""IQL: the expectile of a sample, the three losses against NumPy, and resuming."""

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows
from recorded import recorded

import solorl

IQL, DISCRETE = definitions("iql"), definitions("iql_discrete")
OBS = np.random.default_rng(0).normal(2, 3, (50, 3))


def standardize():
    return IQL["Standardize"](OBS)


def networks(module, actions):
    """An actor, a critic and a value in double precision."""
    torch.manual_seed(0)
    made = (module["Actor"](standardize(), actions), module["Critic"](standardize(), actions))
    return *(net.double() for net in made), module["Value"](standardize()).double()


def batch_of(module, actions, n=40):
    rng = np.random.default_rng(1)
    action = rng.integers(actions, size=n) if module is DISCRETE else rng.uniform(-1, 1, (n, actions))
    fields = rng.normal(size=(n, 3)), action, rng.normal(size=n), rng.random(n) < 0.3, rng.normal(size=(n, 3))
    return module["Batch"](
        *(torch.as_tensor(x, dtype=torch.int64 if x.dtype == int else torch.float64) for x in fields)
    )


def perceptron(net, x):
    """An MLP with ReLU in NumPy."""
    layers = [layer for layer in net if isinstance(layer, torch.nn.Linear)]
    for i, layer in enumerate(layers):
        x = x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
        x = np.maximum(x, 0) if i < len(layers) - 1 else x
    return x


def seen(obs):
    """What the networks see of the observations."""
    return (np.asarray(obs) - OBS.mean(0)) / (OBS.std(0) + 1e-3)


def q_values(module, critic, obs, action):
    """Both values of the actions, (2, batch)."""
    if module is DISCRETE:
        return np.stack([perceptron(q, seen(obs))[np.arange(len(action)), action] for q in (critic.q1, critic.q2)])
    x = np.concatenate([seen(obs), action], 1)
    return np.stack([perceptron(q, x)[:, 0] for q in (critic.q1, critic.q2)])


BOTH = pytest.mark.parametrize("module", [IQL, DISCRETE], ids=["iql", "iql_discrete"])


@pytest.mark.parametrize("expectile", [0.1, 0.5, 0.7, 0.9])
def test_the_minimum_of_the_loss_is_the_expectile(expectile):
    """Definition: expectile * mean(max(x - m, 0)) = (1 - expectile) * mean(max(m - x, 0)); of 0.5 it is the mean."""
    x = torch.from_numpy(np.random.default_rng(2).exponential(size=200))
    grid = torch.linspace(float(x.min()), float(x.max()), 2_001, dtype=torch.float64)
    losses = torch.stack([IQL["expectile_loss"](x - m, expectile) for m in grid])
    m = grid[losses.argmin()]
    above, below = (x - m).clamp(min=0).mean(), (m - x).clamp(min=0).mean()
    assert float(expectile * above) == pytest.approx(float((1 - expectile) * below), abs=2e-3)
    if expectile == 0.5:
        assert float(m) == pytest.approx(float(x.mean()), abs=2e-3)


@BOTH
def test_the_losses_are_those_of_the_paper(module):
    actor, critic, value = networks(module, 2)
    batch, gamma, expectile, beta, most = batch_of(module, 2), 0.9, 0.8, 4.0, 1.1
    obs, action, reward, done, next_obs = (x.numpy() for x in batch)
    q1, q2 = q_values(module, critic, obs, action)
    v, next_v = (perceptron(value.net, seen(x))[:, 0] for x in (obs, next_obs))

    # Eq. 5
    u = np.minimum(q1, q2) - v
    loss, _ = module["iql_value_loss"](value, critic, batch, expectile)
    assert loss.item() == pytest.approx(np.mean(np.abs(expectile - (u < 0)) * u**2))

    # Eq. 6
    target = reward + gamma * (1 - done) * next_v
    loss, _ = module["iql_critic_loss"](critic, value, batch, gamma)
    assert loss.item() == pytest.approx(np.mean((q1 - target) ** 2) + np.mean((q2 - target) ** 2))

    # Eq. 7; some weights are clipped, others are not
    weight = np.minimum(np.exp(beta * u), most)
    assert 0 < (weight == most).mean() < 1
    if module is DISCRETE:
        logits = perceptron(actor.net, seen(obs))
        logprob = (logits - np.log(np.exp(logits).sum(1, keepdims=True)))[np.arange(len(obs)), action]
    else:
        actor.log_std.data = torch.tensor([-0.5, 0.3], dtype=torch.float64)
        mean = torch.from_numpy(np.tanh(perceptron(actor.net, seen(obs))))
        normal = torch.distributions.Normal(mean, actor.log_std.detach().exp())
        logprob = normal.log_prob(batch.action).sum(1).numpy()
    name = "iql_discrete_actor_loss" if module is DISCRETE else "iql_actor_loss"
    loss, _ = module[name](actor, value, critic, batch, beta, most)
    assert loss.item() == pytest.approx(-np.mean(weight * logprob))


@BOTH
def test_each_loss_moves_its_own_network_only(module):
    actor, critic, value = networks(module, 2)
    batch, name = batch_of(module, 2), "iql_discrete_actor_loss" if module is DISCRETE else "iql_actor_loss"
    losses = {
        value: module["iql_value_loss"](value, critic, batch, 0.7),
        critic: module["iql_critic_loss"](critic, value, batch, 0.9),
        actor: module[name](actor, value, critic, batch, 3.0, 100.0),
    }
    for own, (loss, _) in losses.items():
        for net in losses:
            gradients = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True, allow_unused=True)
            assert all((g is not None) == (net is own) for g in gradients)


def test_acting_is_the_mean_and_a_sample_has_the_standard_deviation():
    actor, _, _ = networks(IQL, 2)
    actor = actor.float()
    actor.log_std.data = torch.tensor([-3.0, -2.0])
    obs = OBS[:5].astype(np.float32)
    mean = np.tanh(perceptron(actor.net, seen(obs)))
    np.testing.assert_allclose(actor.act(obs), mean, atol=1e-5)
    np.testing.assert_allclose(actor.act(obs, np.ones((5, 2))), mean + np.exp([-3, -2]), atol=1e-5)
    assert np.abs(actor.act(obs, np.full((5, 2), 100.0))).max() == 1  # within the bounds


def test_discrete_actions_are_the_most_probable_ones_and_samples_have_their_probabilities():
    actor, _, _ = networks(DISCRETE, 3)
    actor = actor.float()
    obs = np.repeat(OBS[:1], 20_000, 0)
    logits = perceptron(actor.net, seen(obs[:1]))[0]
    share = np.bincount(actor.sample(obs), minlength=3) / len(obs)
    np.testing.assert_allclose(share, np.exp(logits) / np.exp(logits).sum(), atol=0.02)
    assert actor.act(obs[:1]) == logits.argmax()


CARTPOLE = ["--env-id", "CartPole-v1", "--total-timesteps", "200", "--batch-size", "16", "--log-every", "50"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iql", "iql_discrete"])
def test_resumed_and_played_as_if_it_had_never_stopped(name, train):
    env_id = "CartPole-v1" if name == "iql_discrete" else "Pendulum-v1"
    folder = recorded(env_id)
    words = ["--dataset", folder, *CARTPOLE, "--env-id", env_id, "--save-every", "100", "--eval-every", "200"]
    run = train(name, *words, "--eval-episodes", "1")["run"]
    whole = comparable(run.dir)
    drop_last_checkpoint(run.dir)
    train(name, "--resume", run.dir)
    assert comparable(run.dir) == whole
    obs = np.zeros((2, 4 if name == "iql_discrete" else 3), np.float32)
    assert len(solorl.load(run.dir)(obs)) == 2
    assert rows(run.dir, "losses/value_loss")
