"""SAC: the squashed Gaussian against the change of variables, the temperature, and the exact sums of discrete SAC."""

import math

import numpy as np
import pytest
import torch
from conftest import definitions, rows
from probes_offpolicy import HIGH, LOW
from test_actor_critic import SMALL, diary, random_batch, spread, value_of

SAC, DISCRETE = definitions("sac_continuous_action"), definitions("sac_discrete")


def double_actor(obs_dim=3):
    torch.manual_seed(0)
    actor = SAC["Actor"](obs_dim, LOW, HIGH).double()
    actor.layers()[-1][0].data.normal_(std=0.1)  # means and deviations that differ
    return actor


# ---------------------------------------------------------------------- the policy
def test_log_probability_is_the_change_of_variables():
    """Density of the noise over the numerical Jacobian of noise -> action, for bounds that lie differently."""
    actor, generator = double_actor(), torch.Generator().manual_seed(1)
    obs, noise = (torch.randn(200, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    action, logprob = actor(obs, noise)
    assert (action > torch.as_tensor(LOW)).all() and (action < torch.as_tensor(HIGH)).all()
    jacobian = torch.empty(200, 2, 2, dtype=torch.float64)
    for j in range(2):
        step = torch.zeros(2, dtype=torch.float64)
        step[j] = 1e-5
        jacobian[:, :, j] = (actor(obs, noise + step)[0] - actor(obs, noise - step)[0]).detach() / 2e-5
    assert (jacobian[:, 0, 1] == 0).all()
    density = torch.distributions.Normal(0, 1).log_prob(noise).sum(1) - jacobian.det().abs().log()
    torch.testing.assert_close(logprob.detach(), density, rtol=1e-5, atol=1e-6)


def test_densities_integrate_to_one():
    """Over a grid of actions, which the policy's inverse turns into noise."""
    torch.manual_seed(0)
    actor = SAC["Actor"](1, LOW[:1], HIGH[:1]).double()
    obs = torch.zeros(1, 1, dtype=torch.float64)
    mean, log_std = SAC["mlp"](actor.layers(), obs).detach().chunk(2, 1)
    std = (-5 + (2 + 5) * (log_std.tanh() + 1) / 2).exp()
    u = torch.linspace(-1 + 1e-9, 1 - 1e-9, 200_001, dtype=torch.float64)[:, None]
    noise = (u.atanh() - mean) / std
    action, logprob = actor(obs.expand(len(u), 1), noise)
    torch.testing.assert_close(action[:, 0], torch.as_tensor(LOW[0]) + 1.5 * (u[:, 0] + 1))
    assert torch.trapezoid(logprob.exp(), action[:, 0]).item() == pytest.approx(1, abs=1e-4)


def test_log_probability_is_finite_where_tanh_is_flat():
    """In single precision, where 1 - tanh(x)^2 is 0; value and gradient."""
    actor = SAC["Actor"](3, LOW, HIGH)
    _, logprob = actor(torch.zeros(2, 3), torch.tensor([[1e3, 1e3], [-1e3, -1e3]]))
    gradient = torch.autograd.grad(logprob.sum(), list(actor.parameters()))
    assert torch.isfinite(logprob).all() and all(torch.isfinite(g).all() for g in gradient)


def test_standard_deviation_stays_within_its_bounds():
    actor = SAC["Actor"](3, LOW, HIGH).double()
    for bias, log_std in ((-50.0, -5.0), (50.0, 2.0), (0.0, -1.5)):
        weight, last_bias = (part.data for part in actor.layers()[-1])
        weight.zero_()
        last_bias.fill_(bias)[:, :2] = 0
        noise = torch.full((1, 2), 0.01, dtype=torch.float64)
        action, _ = actor(torch.zeros(1, 3, dtype=torch.float64), noise)
        share = (action - torch.as_tensor(LOW)) / torch.as_tensor((HIGH - LOW) / 2) - 1
        expected = torch.full_like(share, 0.01 * math.exp(log_std))
        torch.testing.assert_close(share.atanh(), expected, rtol=1e-4, atol=1e-6)


def test_greedy_action_is_the_squashed_mean():
    actor = SAC["Actor"](3, LOW, HIGH)
    obs = torch.randn(20, 3)
    mean = SAC["mlp"](actor.layers(), obs).chunk(2, 1)[0].detach().numpy()
    expected = LOW + (HIGH - LOW) * (np.tanh(mean) + 1) / 2
    np.testing.assert_allclose(actor.act(obs.numpy()), expected, rtol=1e-5, atol=1e-5)


def test_acting_draws_what_the_log_probability_describes():
    """Mean of exp(-logprob) over drawn actions is the volume of the actions, if they have that density."""
    actor, obs = double_actor().float(), np.full((200_000, 3), 0.3, np.float32)
    torch.manual_seed(0)
    noise = torch.randn(len(obs), 2)
    action = actor.act(obs, noise)
    again, _ = actor(torch.as_tensor(obs), noise)
    np.testing.assert_allclose(action, again.detach().numpy(), rtol=1e-6)
    share = (action - LOW) / (HIGH - LOW)
    for i in range(2):
        other = np.random.default_rng(0).permutation(share[:, 1 - i])
        assert abs(np.corrcoef(share[:, i], other)[0, 1]) < 0.01
    assert (share.std(0) > 0.01).all()


# ---------------------------------------------------------------------- losses
def test_critic_loss_by_hand():
    """The smaller target value minus alpha logprob, no bootstrap where the task was over."""
    actor, critic, target_critic = double_actor(), SAC["Critic"](3, 2).double(), SAC["Critic"](3, 2).double()
    obs, action, reward, done, next_obs = batch = random_batch()
    spread(target_critic, next_obs, actor(next_obs, torch.zeros(16, 2))[0])
    noise, log_alpha = torch.randn(16, 2, dtype=torch.float64), torch.tensor(math.log(0.3))
    loss, metrics = SAC["sac_critic_loss"](critic, target_critic, actor, log_alpha, *batch, noise, 0.9)
    next_action, next_logprob = (x.detach() for x in actor(next_obs, noise))
    first, second = (value_of(target_critic, i, next_obs, next_action) for i in (0, 1))
    assert (first > second).any() and (second > first).any()
    soft = np.minimum(first, second) - 0.3 * next_logprob.numpy()
    q_target = reward.numpy() + 0.9 * (1 - done.numpy()) * soft
    values = [value_of(critic, i, obs, action) for i in (0, 1)]
    losses = [np.mean((value - q_target) ** 2) for value in values]
    assert loss.item() == pytest.approx(sum(losses), rel=1e-6)
    expected = [values[0].mean(), values[1].mean(), *losses, np.mean(losses)]
    np.testing.assert_allclose(metrics.numpy(), expected, rtol=1e-6)


def test_actor_and_temperature_loss_by_hand():
    actor, critic, obs = double_actor(), SAC["Critic"](3, 2).double(), random_batch()[0]
    noise, log_alpha = torch.randn(16, 2, dtype=torch.float64), torch.tensor(math.log(0.3))
    spread(critic, obs, actor(obs, noise)[0])
    loss, metrics = SAC["sac_actor_loss"](actor, critic, log_alpha, obs, noise, -2)
    action, logprob = (x.detach() for x in actor(obs, noise))
    first, second = (value_of(critic, i, obs, action) for i in (0, 1))
    assert (first > second).any() and (second > first).any()
    smaller = np.minimum(first, second)
    assert loss.item() == pytest.approx(np.mean(0.3 * logprob.numpy() - smaller), rel=1e-6)
    alpha_loss = np.mean(-0.3 * (logprob.numpy() - 2))
    np.testing.assert_allclose(metrics.numpy(), [loss.item(), -logprob.mean().item(), alpha_loss], rtol=1e-6)


def test_the_loss_of_the_temperature_is_its_own_derivative():
    """What stands in `log_alpha.grad` is the derivative of Eq. 18 in log_alpha."""
    actor, critic, obs = SAC["Actor"](3, LOW, HIGH), SAC["Critic"](3, 2), torch.randn(16, 3)
    noise, log_alpha = torch.randn(16, 2), torch.tensor(-0.7, requires_grad=True)
    logprob = actor(obs, noise)[1].detach()
    (-log_alpha.exp() * (logprob - 2)).mean().backward()
    _, metrics = SAC["sac_actor_loss"](actor, critic, log_alpha, obs, noise, -2)
    assert metrics[2].item() == pytest.approx(log_alpha.grad.item(), rel=1e-5)


def test_temperature_falls_where_the_entropy_is_above_its_target(train):
    """Adam's first steps are as long as its step size: two of them, downwards from log 1. The start is broad."""
    flags = ["--env-id", diary("sac"), *SMALL, "--total-timesteps", "21", "--q-lr", "0.01"]
    v = train("sac_continuous_action", *flags)
    half_range = (v["high"] - v["low"]) / 2
    assert half_range.tolist() != [1, 1]
    target = np.log(half_range).sum() - 2  # minus the number of dimensions, in half ranges of the action
    assert v["metrics"][1] > target and v["log_alpha"].item() == pytest.approx(-0.02, rel=0.05)
    entropy, alpha_loss = v["metrics"][1:].tolist()  # of the second step, at a temperature of exp(-0.01)
    assert alpha_loss == pytest.approx(math.exp(-0.01) * (entropy - target), rel=1e-3)
    v = train("sac_continuous_action", *flags, "--no-autotune", "--alpha", "0.3")
    assert v["log_alpha"].item() == pytest.approx(math.log(0.3))


def test_temperature_rises_where_the_entropy_is_below_its_target(train):
    """No policy reaches twice the entropy of the uniform one."""
    flags = ["--env-id", diary("sac_discrete"), *SMALL, "--total-timesteps", "21", "--q-lr", "0.01", "--utd-ratio", "1"]
    for scale, moved in (("2", 0.01), ("0.1", -0.01)):
        v = train("sac_discrete", *flags, "--target-entropy-scale", scale)
        assert v["log_alpha"].item() == pytest.approx(moved * v["args"].policy_frequency, rel=0.05)


# ---------------------------------------------------------------------- discrete actions
def sampled(logprob, values, n=400_000):
    """Mean of `values` (batch, num_actions) over actions drawn from the policy, and its standard error."""
    i = torch.randint(len(values), (n,))
    action = torch.distributions.Categorical(logits=logprob[i]).sample()
    x = values[i, action]
    return x.mean().item(), x.std().item() / n**0.5


def test_expectations_over_discrete_actions_are_exact():
    """Actor loss, entropy and the target's value agree with actions drawn from the policy, to 4 standard errors."""
    torch.manual_seed(0)
    actor, critic, target_critic = DISCRETE["Actor"](3, 4), DISCRETE["Critic"](3, 4), DISCRETE["Critic"](3, 4)
    for net in (actor, critic, target_critic):
        net.layers()[-1][0].data.normal_(std=0.3)
    obs, _, _, _, next_obs = (x.float() for x in random_batch(32))
    log_alpha = torch.tensor(math.log(0.3))
    with torch.no_grad():
        loss, metrics = DISCRETE["sac_discrete_actor_loss"](actor, critic, log_alpha, obs, 1.0)
        logprob, q = actor(obs), torch.minimum(*critic(obs))
        mean, error = sampled(logprob, 0.3 * logprob - q)
        assert abs(loss.item() - mean) < 4 * error and error < 0.01
        mean, error = sampled(logprob, -logprob)
        assert abs(metrics[1].item() - mean) < 4 * error
        assert metrics[2].item() == pytest.approx(0.3 * (metrics[1].item() - 1.0), rel=1e-5)
        # a critic of 0 and no reward leave the mean target: its square is the loss when all states are the same
        for p in critic.parameters():
            torch.nn.init.zeros_(p)
        state, zero = next_obs[:1].expand(32, 3), torch.zeros(32)
        inputs = (obs, torch.zeros(32, 1), zero, zero, state, 0.9)
        loss, _ = DISCRETE["sac_discrete_critic_loss"](critic, target_critic, actor, log_alpha, *inputs)
        logprob = actor(state)
        mean, error = sampled(logprob, torch.minimum(*target_critic(state)) - 0.3 * logprob)
        assert abs((loss.item() / 2) ** 0.5 - 0.9 * abs(mean)) < 4 * error


def test_discrete_critic_loss_by_hand():
    torch.manual_seed(0)
    actor, critic, target_critic = DISCRETE["Actor"](3, 4), DISCRETE["Critic"](3, 4), DISCRETE["Critic"](3, 4)
    target_critic.layers()[-1][0].data.normal_(std=0.3)
    obs, _, reward, done, next_obs = (x.float() for x in random_batch())
    action, log_alpha = torch.randint(0, 4, (16, 1)).float(), torch.tensor(math.log(0.3))
    inputs = (obs, action, reward, done, next_obs, 0.9)
    loss, metrics = DISCRETE["sac_discrete_critic_loss"](critic, target_critic, actor, log_alpha, *inputs)
    errors, values = np.zeros((2, 16)), np.zeros((2, 16))
    with torch.no_grad():
        for n in range(16):
            logprob = actor(next_obs[n : n + 1])[0].numpy()
            q = target_critic(next_obs[n : n + 1])[:, 0].numpy()  # (2, 4)
            soft = sum(np.exp(logprob[a]) * (min(q[:, a]) - 0.3 * logprob[a]) for a in range(4))
            q_target = reward[n].item() + (0.9 * soft if done[n] == 0 else 0)
            values[:, n] = critic(obs[n : n + 1])[:, 0, int(action[n])].numpy()
            errors[:, n] = (values[:, n] - q_target) ** 2
    losses = errors.mean(1)
    assert loss.item() == pytest.approx(losses.sum(), rel=1e-4)
    expected = [*values.mean(1), *losses, losses.mean()]
    np.testing.assert_allclose(metrics.numpy(), expected, rtol=1e-4, atol=1e-6)


def test_discrete_actor_loss_gives_the_critics_no_gradient():
    torch.manual_seed(0)
    actor, critic = DISCRETE["Actor"](3, 4), DISCRETE["Critic"](3, 4)
    inputs = (critic, torch.tensor(0.0), torch.randn(16, 3), 1.0)
    gradient, _ = DISCRETE["gradient"](DISCRETE["sac_discrete_actor_loss"], actor, *inputs)
    assert gradient.shape == actor.layers.vector.shape and gradient.abs().sum() > 0
    assert all(p.grad is None for p in critic.parameters())


def test_gumbel_noise_draws_from_the_policy():
    """Frequencies of 40,000 actions within 4 standard errors of the probabilities; without noise the mode."""
    torch.manual_seed(0)
    actor, n = DISCRETE["Actor"](2, 3), 40_000
    actor.layers()[-1][0].data.normal_(std=0.3)
    obs = np.tile(np.array([[0.3, -0.7]], np.float32), (n, 1))
    p = actor(torch.as_tensor(obs[:1])).exp().detach().numpy()[0]
    frequency = np.bincount(actor.act(obs, -torch.empty(n, 3).exponential_().log()), minlength=3) / n
    assert p.sum() == pytest.approx(1, rel=1e-5) and (np.abs(frequency - p) < 4 * np.sqrt(p * (1 - p) / n)).all()
    assert (actor.act(obs) == p.argmax()).all()


# ---------------------------------------------------------------------- discrete SAC learns
FAST = "--total-timesteps 364 --learning-starts 64 --batch-size 32 --buffer-size 2000 --utd-ratio 1 --tau 0.2"
RATES = "--target-network-frequency 1 --policy-lr 0.002 --q-lr 0.002 --eval-every 0 --eval-episodes 20"


def learn(train, probe, *flags):
    return train("sac_discrete", "--env-id", f"probes:{probe}-v0", *FAST.split(), *RATES.split(), *flags)


def critic_at(v, obs):
    return v["critic"](torch.tensor([[float(obs)]]))[0].mean().item()


def test_learns_a_policy_of_the_observation(train):
    v = learn(train, "ActionMustMatch", "--num-envs", "2")
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] == 1.0


def test_learns_to_discount(train):
    v = learn(train, "Delayed", "--gamma", "0.5", "--no-autotune", "--alpha", "0")
    assert critic_at(v, 0) == pytest.approx(0.5, abs=0.1) and critic_at(v, 1) == pytest.approx(1, abs=0.1)


def test_value_of_a_constant_reward_under_a_time_limit(train):
    """The time limit is no end of the task: 1 / (1 - gamma) = 5."""
    v = learn(train, "Forever", "--gamma", "0.8", "--no-autotune", "--alpha", "0")
    assert critic_at(v, 0) == pytest.approx(5, abs=0.3)


def test_entropy_settles_at_its_target(train):
    """At temperature 1 the entropy for values 1 and -1 would be 0.37; its target is 0.9 log 2."""
    v = learn(train, "ActionCounts", "--target-entropy-scale", "0.9", "--q-lr", "0.02")
    entropy = v["actor"](torch.zeros(1, 1)).exp().mul(-v["actor"](torch.zeros(1, 1))).sum().item()
    assert entropy == pytest.approx(0.9 * math.log(2), abs=0.06) and v["log_alpha"].exp() > 1.5
