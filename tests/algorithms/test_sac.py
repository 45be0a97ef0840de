"""SAC: the squashed Gaussian against the change of variables, the temperature, and the exact sums of discrete SAC."""

import math

import numpy as np
import pytest
import torch
from conftest import definitions, rows
from test_actor_critic import SMALL, diary, random_batch, reference, spread, values

from solorl.compute.speed import gradients_of

SAC, DISCRETE = definitions("sac_continuous_action"), definitions("sac_discrete")


def double_actor(obs_dim=3, action_dim=2):
    torch.manual_seed(0)
    actor = SAC["Actor"](obs_dim, action_dim).double()
    torch.nn.init.normal_(actor.net[-1].weight, std=0.1)  # means and deviations that differ
    return actor


# ---------------------------------------------------------------------- the policy
def test_log_probability_is_the_change_of_variables():
    """Density of the noise over the numerical Jacobian of noise -> action."""
    actor, generator = double_actor(), torch.Generator().manual_seed(1)
    obs, noise = (torch.randn(200, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    action, logprob = actor(obs, noise)
    assert action.shape == (200, 2) and logprob.shape == (200,) and (action.abs() < 1).all()
    jacobian = torch.empty(200, 2, 2, dtype=torch.float64)
    for j in range(2):
        step = torch.zeros(2, dtype=torch.float64)
        step[j] = 1e-5
        jacobian[:, :, j] = (actor(obs, noise + step)[0] - actor(obs, noise - step)[0]).detach() / 2e-5
    assert (jacobian[:, 0, 1] == 0).all()
    density = torch.distributions.Normal(0, 1).log_prob(noise).sum(1) - jacobian.det().abs().log()
    torch.testing.assert_close(logprob.detach(), density, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_densities_integrate_to_one():
    """Over a grid of actions, which the policy's inverse turns into noise."""
    torch.manual_seed(0)
    actor = SAC["Actor"](1, 1).double()
    obs = torch.zeros(1, 1, dtype=torch.float64)
    mean, log_std = actor.net(obs).detach().chunk(2, 1)
    std = (-5 + (2 + 5) * (log_std.tanh() + 1) / 2).exp()
    u = torch.linspace(-1 + 1e-9, 1 - 1e-9, 200_001, dtype=torch.float64)[:, None]
    noise = (u.atanh() - mean) / std
    action, logprob = actor(obs.expand(len(u), 1), noise)
    torch.testing.assert_close(action, u)
    assert torch.trapezoid(logprob.exp(), action[:, 0]).item() == pytest.approx(1, abs=1e-4)


def test_log_probability_is_finite_where_tanh_is_flat():
    """In single precision, where 1 - tanh(x)^2 is 0; value and gradient."""
    actor = SAC["Actor"](3, 2)
    _, logprob = actor(torch.zeros(2, 3), torch.tensor([[1e3, 1e3], [-1e3, -1e3]]))
    gradient = torch.autograd.grad(logprob.sum(), list(actor.parameters()))
    assert torch.isfinite(logprob).all() and all(torch.isfinite(g).all() for g in gradient)


def test_standard_deviation_stays_within_its_bounds():
    actor = SAC["Actor"](3, 2).double()
    for bias, log_std in ((-50.0, -5.0), (50.0, 2.0), (0.0, -1.5)):
        torch.nn.init.zeros_(actor.net[-1].weight)
        actor.net[-1].bias.data = torch.tensor([0.0, 0.0, bias, bias], dtype=torch.float64)
        noise = torch.full((1, 2), 0.01, dtype=torch.float64)
        action, _ = actor(torch.zeros(1, 3, dtype=torch.float64), noise)
        expected = torch.full_like(action, 0.01 * math.exp(log_std))
        torch.testing.assert_close(action.atanh(), expected, rtol=1e-6, atol=1e-9)


def test_greedy_action_is_the_squashed_mean():
    actor, obs = double_actor().float(), torch.randn(20, 3)
    mean = reference(actor.net, obs)[:, :2]
    np.testing.assert_allclose(actor.act(obs.numpy()), np.tanh(mean), rtol=1e-5, atol=1e-5)


def test_acting_draws_what_the_log_probability_describes():
    """Of observations that are all the same, actions with the noise's own spread, independent in each dimension."""
    actor, obs = double_actor().float(), np.full((200_000, 3), 0.3, np.float32)
    torch.manual_seed(0)
    noise = torch.randn(len(obs), 2)
    action = actor.act(obs, noise)
    again, logprob = actor(torch.as_tensor(obs), noise)
    np.testing.assert_allclose(action, again.detach().numpy(), rtol=1e-6)
    for i in range(2):
        other = np.random.default_rng(0).permutation(action[:, 1 - i])
        assert abs(np.corrcoef(action[:, i], other)[0, 1]) < 0.01
    assert (action.std(0) > 0.01).all()
    # of actions that have this density, those of a small square are as frequent as its mean density times its area
    middle, half = np.median(action, axis=0), action.std(0) / 4
    inside = (np.abs(action - middle) < half).all(1)
    expected = logprob.detach().exp().numpy()[inside].mean() * np.prod(2 * half)
    assert inside.mean() == pytest.approx(expected, rel=0.05)


# ---------------------------------------------------------------------- losses
def test_critic_loss_by_hand():
    """The smaller target value minus alpha logprob, no bootstrap where the task was over; no gradient reaches the
    targets or the actor."""
    actor, critic, target_critic = double_actor(), SAC["Critic"](3, 2).double(), SAC["Critic"](3, 2).double()
    batch, noise = random_batch(), torch.randn(16, 2, dtype=torch.float64)
    spread(target_critic, batch.next_obs, actor(batch.next_obs, torch.zeros(16, 2))[0])
    inputs = (target_critic, actor, torch.tensor(0.3), batch, noise, 0.9)
    loss, metrics = SAC["sac_critic_loss"](critic, *inputs)
    next_action, next_logprob = (x.detach() for x in actor(batch.next_obs, noise))
    first, second = values(target_critic, batch.next_obs, next_action)
    assert (first > second).any() and (second > first).any()
    soft = np.minimum(first, second) - 0.3 * next_logprob.numpy()
    target = batch.reward.numpy() + 0.9 * (1 - batch.done.numpy()) * soft
    q = values(critic, batch.obs, batch.action)
    losses = [np.mean((value - target) ** 2) for value in q]
    assert loss.item() == pytest.approx(sum(losses), rel=1e-6)
    names = ("qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss")
    assert list(metrics) == [f"losses/{name}" for name in names]
    expected = [q[0].mean(), q[1].mean(), *losses, np.mean(losses)]
    np.testing.assert_allclose([x.item() for x in metrics.values()], expected, rtol=1e-6)
    loss.backward()
    assert all(p.grad is None for net in (actor, target_critic) for p in net.parameters())
    assert all(p.grad is not None for p in critic.parameters())


def test_actor_loss_by_hand():
    actor, critic, batch = double_actor(), SAC["Critic"](3, 2).double(), random_batch()
    noise = torch.randn(16, 2, dtype=torch.float64)
    spread(critic, batch.obs, actor(batch.obs, noise)[0])
    loss, metrics, entropy = SAC["sac_actor_loss"](actor, critic, torch.tensor(0.3), batch, noise)
    action, logprob = (x.detach() for x in actor(batch.obs, noise))
    first, second = values(critic, batch.obs, action)
    assert (first > second).any() and (second > first).any()
    smaller = np.minimum(first, second)
    assert loss.item() == pytest.approx(np.mean(0.3 * logprob.numpy() - smaller), rel=1e-6)
    assert list(metrics) == ["losses/actor_loss", "losses/entropy"]
    assert metrics["losses/actor_loss"].item() == loss.item()
    assert metrics["losses/entropy"].item() == entropy.item() == pytest.approx(-logprob.mean().item(), rel=1e-6)


# ---------------------------------------------------------------------- the temperature
@pytest.mark.parametrize(("entropy", "loss"), [(1.5, 1.75), (-2.0, 0.0), (-3.0, -0.5)])
def test_temperature_loss_by_hand(entropy, loss):
    """Eq. 18, the mean of -alpha (log pi + target) with log pi = -entropy, at alpha 0.5 and target -2. It is its own
    derivative in log alpha; the entropy gets none."""
    temperature, entropy = SAC["Temperature"](0.5), torch.tensor(entropy, requires_grad=True)
    assert temperature().item() == pytest.approx(0.5)
    parameters = list(temperature.parameters())
    (gradient,), metrics = gradients_of(False, parameters, SAC["alpha_loss"], temperature, entropy, -2)
    assert list(metrics) == ["losses/alpha_loss"] and entropy.grad is None
    assert metrics["losses/alpha_loss"].item() == pytest.approx(loss, abs=1e-6)
    assert gradient.item() == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("begin", [0.02, 1.0])
def test_temperature_learns_towards_the_target_entropy(begin):
    """Of a policy whose entropy is the logarithm of its temperature: to exp(-2), from both sides."""
    temperature = SAC["Temperature"](begin)
    optimizer = torch.optim.Adam(temperature.parameters(), lr=0.05)
    distances = []
    for _ in range(300):
        entropy = temperature().detach().log()
        distances.append(abs(entropy.item() + 2))
        optimizer.zero_grad()
        SAC["alpha_loss"](temperature, entropy, -2)[0].backward()
        optimizer.step()
    assert distances[0] > distances[10] > distances[20] and distances[-1] < 0.02


@pytest.mark.parametrize("env_id", ["Diary", "AimTiny", "AimHuge"])
def test_target_entropy_is_minus_the_dimension_whatever_the_bounds(env_id, train):
    """Adam's first step is as long as its learning rate, downwards from log 1: the start is broad."""
    flags = f"--env-id probes_offpolicy:{env_id}-v0 --total-timesteps 21 --q-lr 0.01 --policy-frequency 1".split()
    v = train("sac_continuous_action", *SMALL, *flags)
    row = rows(v["run"].dir, "losses/alpha_loss")[-1]
    assert row["losses/entropy"] > -2 and row["losses/alpha_loss"] == pytest.approx(row["losses/entropy"] + 2, rel=1e-5)
    assert v["temperature"].log_alpha.item() == pytest.approx(-0.01, rel=0.01)
    assert row["losses/alpha"] == pytest.approx(math.exp(-0.01), rel=1e-4)


def test_a_temperature_that_is_not_learned_stays(train):
    flags = ["--env-id", diary("sac"), *SMALL, "--total-timesteps", "23", "--no-autotune", "--alpha", "0.3"]
    v = train("sac_continuous_action", *flags)
    assert v["temperature"]().item() == pytest.approx(0.3) and not v["alpha_optimizer"].state


# ---------------------------------------------------------------------- discrete actions
def sampled(logprob, values, n=400_000):
    """Mean of `values` (batch, num_actions) over actions drawn from the policy, and its standard error."""
    i = torch.randint(len(values), (n,))
    action = torch.distributions.Categorical(logits=logprob[i]).sample()
    x = values[i, action]
    return x.mean().item(), x.std().item() / n**0.5


def discrete_networks():
    """An actor, critics and their targets whose policies and values differ from observation to observation."""
    torch.manual_seed(0)
    nets = DISCRETE["Actor"](3, 4), DISCRETE["Critic"](3, 4), DISCRETE["Critic"](3, 4)
    for net in nets:
        for layers in [net.net] if hasattr(net, "net") else [net.q1, net.q2]:
            torch.nn.init.normal_(layers[-1].weight, std=0.3)
    return nets


def discrete_batch(n=16):
    """A Batch as `Replay.sample` gives it."""
    torch.manual_seed(1)
    obs, next_obs = torch.randn(n, 3), torch.randn(n, 3)
    reward, done = torch.randn(n), (torch.rand(n) < 0.5).float()
    return DISCRETE["Batch"](obs, torch.randint(4, (n,)), reward, done, next_obs)


def test_expectations_over_discrete_actions_are_exact():
    """Actor loss, entropy and the target's value agree with actions drawn from the policy, to 4 standard errors."""
    (actor, critic, target_critic), alpha = discrete_networks(), torch.tensor(0.3)
    batch = discrete_batch(32)
    with torch.no_grad():
        loss, _, entropy = DISCRETE["discrete_actor_loss"](actor, critic, alpha, batch)
        logprob, q = actor(batch.obs), torch.minimum(*critic(batch.obs))
        mean, error = sampled(logprob, 0.3 * logprob - q)
        assert abs(loss.item() - mean) < 4 * error and error < 0.01
        mean, error = sampled(logprob, -logprob)
        assert abs(entropy.item() - mean) < 4 * error
        # a critic of 0 and no reward leave the mean target: its square is the loss when all states are the same
        for p in critic.parameters():
            torch.nn.init.zeros_(p)
        state, zero = batch.next_obs[:1].expand(32, 3), torch.zeros(32)
        same = batch._replace(reward=zero, done=zero, next_obs=state)
        loss, _ = DISCRETE["discrete_critic_loss"](critic, target_critic, actor, alpha, same, 0.9)
        logprob = actor(state)
        mean, error = sampled(logprob, torch.minimum(*target_critic(state)) - 0.3 * logprob)
        assert abs((loss.item() / 2) ** 0.5 - 0.9 * abs(mean)) < 4 * error


def test_discrete_critic_loss_by_hand():
    """No gradient reaches the targets or the actor."""
    (actor, critic, target_critic), batch = discrete_networks(), discrete_batch()
    loss, metrics = DISCRETE["discrete_critic_loss"](critic, target_critic, actor, torch.tensor(0.3), batch, 0.9)
    errors, values = np.zeros((2, 16)), np.zeros((2, 16))
    first = []
    with torch.no_grad():
        for n in range(16):
            logprob = actor(batch.next_obs[n : n + 1])[0].numpy()
            q = np.stack([x[0].numpy() for x in target_critic(batch.next_obs[n : n + 1])])  # (2, 4)
            first += list(q[0] < q[1])
            soft = sum(np.exp(logprob[a]) * (min(q[:, a]) - 0.3 * logprob[a]) for a in range(4))
            q_target = batch.reward[n].item() + (0.9 * soft if batch.done[n] == 0 else 0)
            values[:, n] = [x[0, batch.action[n]].item() for x in critic(batch.obs[n : n + 1])]
            errors[:, n] = (values[:, n] - q_target) ** 2
    assert 0 < sum(first) < len(first)  # each is the smaller somewhere
    losses = errors.mean(1)
    assert loss.item() == pytest.approx(losses.sum(), rel=1e-4)
    names = ("qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss")
    expected = [*values.mean(1), *losses, losses.mean()]
    assert list(metrics) == [f"losses/{name}" for name in names]
    np.testing.assert_allclose([x.item() for x in metrics.values()], expected, rtol=1e-4, atol=1e-6)
    loss.backward()
    assert all(p.grad is None for net in (actor, target_critic) for p in net.parameters())
    assert all(p.grad is not None for p in critic.parameters())


def test_discrete_actor_loss_gives_the_critics_no_gradient():
    actor, critic, _ = discrete_networks()
    loss, *_ = DISCRETE["discrete_actor_loss"](actor, critic, torch.tensor(1.0), discrete_batch())
    loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in actor.parameters())
    assert all(p.grad is None for p in critic.parameters())


def test_gumbel_noise_draws_from_the_policy():
    """Frequencies of 40,000 actions within 4 standard errors of the probabilities; without noise the mode."""
    torch.manual_seed(0)
    actor, n = DISCRETE["Actor"](2, 3), 40_000
    torch.nn.init.normal_(actor.net[-1].weight, std=0.3)
    obs = np.tile(np.array([[0.3, -0.7]], np.float32), (n, 1))
    p = actor(torch.as_tensor(obs[:1])).exp().detach().numpy()[0]
    frequency = np.bincount(actor.act(obs, np.random.default_rng(0).gumbel(size=(n, 3))), minlength=3) / n
    assert p.sum() == pytest.approx(1, rel=1e-5) and (np.abs(frequency - p) < 4 * np.sqrt(p * (1 - p) / n)).all()
    assert (actor.act(obs) == p.argmax()).all()


def test_discrete_actions_are_drawn_from_the_policy(train):
    """Without gradient steps the policy stays that of the start: in each of the environments, for each observation."""
    flags = "--total-timesteps 3000 --learning-starts 1 --utd-ratio 0 --buffer-size 3000 --num-envs 2 --batch-size 8"
    env_id = ["--env-id", "probes:SeesReward-v0", "--eval-every", "0", "--eval-episodes", "1"]
    v = train("sac_discrete", *env_id, *flags.split())
    obs, action = v["replay"].arrays["obs"][2:, 0], v["replay"].arrays["action"][2:]
    assert action.dtype == np.int64 and not v["critic_optimizer"].state
    for who in range(2):
        for x in (-1, 1):
            p = v["actor"](torch.tensor([[float(x)]])).exp()[0, 1].item()
            got = action[who::2][obs[who::2] == x]
            assert got.mean() == pytest.approx(p, abs=4 * np.sqrt(p * (1 - p) / len(got)))


def test_discrete_temperature_follows_the_target_entropy(train):
    """Adam's first steps are as long as its learning rate. No policy reaches twice the entropy of the uniform one, and
    that of the start is above a tenth of it."""
    flags = "--total-timesteps 21 --learning-starts 20 --batch-size 8 --utd-ratio 1 --q-lr 0.01 --eval-episodes 1"
    flags = ["--env-id", "probes_offpolicy:DiscreteDiary-v0", *flags.split()]
    for scale, moved in (("2", 0.01), ("0.1", -0.01)):
        v = train("sac_discrete", *flags, "--target-entropy-scale", scale)
        assert v["target_entropy"] == pytest.approx(float(scale) * math.log(4))
        assert v["temperature"].log_alpha.item() == pytest.approx(moved, rel=0.05)
        entropy, alpha_loss = (rows(v["run"].dir, key)[-1][key] for key in ("losses/entropy", "losses/alpha_loss"))
        assert alpha_loss == pytest.approx(entropy - v["target_entropy"], rel=1e-5)  # at temperature 1
    v = train("sac_discrete", *flags, "--no-autotune", "--alpha", "0.3")
    assert v["temperature"]().item() == pytest.approx(0.3)


# ---------------------------------------------------------------------- discrete SAC learns
FAST = "--total-timesteps 364 --learning-starts 64 --batch-size 32 --buffer-size 2000 --utd-ratio 1 --tau 0.2"
RATES = "--target-network-frequency 1 --policy-lr 0.002 --q-lr 0.002 --eval-every 0 --eval-episodes 20"


def learn(train, probe, *flags):
    return train("sac_discrete", "--env-id", f"probes:{probe}-v0", *FAST.split(), *RATES.split(), *flags)


def critic_at(v, obs):
    """The first critic's value, in these probes that of both actions."""
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
    assert entropy == pytest.approx(0.9 * math.log(2), abs=0.06) and v["temperature"]().item() > 1.5
