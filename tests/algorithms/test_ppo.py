"""ppo.py: its pure functions against brute force, its rollout against the rules, and that it learns."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import definitions, rows

from solorl.compute.speed import Forward

PPO = definitions("ppo")
SMALL = "--num-envs 2 --num-steps 16 --total-timesteps 128 --num-minibatches 2 --eval-episodes 1".split()
SMALL += ["--log-every", "1"]
PROBE = "--total-timesteps 8192 --num-steps 32 --learning-rate 0.003 --eval-every 0 --eval-episodes 10".split()


# ---------------------------------------------------------------------- pure functions
def reference(net, x):
    """A multi-layer perceptron with tanh in NumPy and double precision."""
    layers = [layer for layer in net if isinstance(layer, torch.nn.Linear)]
    for i, layer in enumerate(layers):
        x = x @ layer.weight.detach().double().numpy().T + layer.bias.detach().double().numpy()
        x = np.tanh(x) if i < len(layers) - 1 else x
    return x


def test_gae_is_the_double_sum_of_its_definition():
    rng = np.random.default_rng(0)
    T, N, gamma, lam = 20, 3, 0.9, 0.8
    reward, value, next_value = rng.normal(size=(T, N)), rng.normal(size=(T, N)), rng.normal(size=N)
    done = (rng.random((T, N)) < 0.3).astype(float)
    final_value = done * rng.normal(size=(T, N)) * (rng.random((T, N)) < 0.5)  # half of the ends are time limits
    assert done.sum() > 5 and (final_value != 0).sum() > 2
    expected = np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            for k in range(t, T):
                after = value[k + 1, n] if k + 1 < T else next_value[n]
                after = final_value[k, n] if done[k, n] else after
                expected[t, n] += (gamma * lam) ** (k - t) * (reward[k, n] + gamma * after - value[k, n])
                if done[k, n]:
                    break
    got = PPO["gae"](reward, value, done, final_value, next_value, gamma, lam)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_loss_by_hand():
    """Every term of Eq. 9 and every metric recomputed in NumPy from the networks' outputs, each switch on and off."""
    torch.manual_seed(0)
    agent = PPO["Agent"](3, 4)
    torch.nn.init.normal_(agent.actor[-1].weight)
    obs, action = torch.randn(10, 3), torch.randint(0, 4, (10,))
    old_logprob = agent.evaluate_actions(obs, action)[0].detach() + 0.2 * torch.randn(10)
    old_value, advantage, returns = torch.randn(3, 10)
    for norm_adv in (True, False):
        for clip_vloss in (True, False):
            args = PPO["Args"](norm_adv=norm_adv, clip_vloss=clip_vloss, clip_coef=0.1, vf_coef=0.7, ent_coef=0.3)
            batch = PPO["Batch"](obs, action, old_logprob, old_value, advantage, returns)
            got, metrics = PPO["ppo_loss"](agent, batch, args)
            with torch.no_grad():
                logits, v = (reference(net, obs.double().numpy()) for net in (agent.actor, agent.critic))
                v = v[:, 0]
            p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            logratio = np.log(p[np.arange(10), action]) - old_logprob.numpy()
            adv = advantage.double().numpy()
            if norm_adv:
                adv = (adv - adv.mean()) / (adv.std(ddof=1) + 1e-8)
            ratio = np.exp(logratio)
            policy = np.mean([min(r * a, np.clip(r, 0.9, 1.1) * a) for r, a in zip(ratio, adv, strict=True)])
            ret, old = returns.numpy(), old_value.numpy()
            error = [(x - y) ** 2 for x, y in zip(v, ret, strict=True)]
            if clip_vloss:
                clipped = [o + np.clip(x - o, -0.1, 0.1) for x, o in zip(v, old, strict=True)]
                error = [max(e, (c - y) ** 2) for e, c, y in zip(error, clipped, ret, strict=True)]
            value_loss, entropy = 0.5 * np.mean(error), np.mean(-(p * np.log(p)).sum(1))
            assert got.item() == pytest.approx(-policy + 0.7 * value_loss - 0.3 * entropy, rel=1e-4)
            want = {"value_loss": value_loss, "policy_loss": -policy, "entropy": entropy}
            want |= {"old_approx_kl": -logratio.mean(), "approx_kl": np.mean(ratio - 1 - logratio)}
            want["clipfrac"] = np.mean((ratio < 0.9) | (ratio > 1.1))
            assert 0 < want["clipfrac"] < 1 and len(metrics) == len(want)
            for name, value in want.items():
                assert metrics[f"losses/{name}"].item() == pytest.approx(value, rel=1e-4, abs=1e-6)


def test_gradient_of_the_clipped_objective_vanishes_outside_the_clip():
    """Where the ratio has left [1 - eps, 1 + eps] in the advantage's direction, the policy gets no gradient."""
    agent = PPO["Agent"](3, 4)
    obs, action = torch.randn(6, 3), torch.randint(0, 4, (6,))
    logprob = agent.evaluate_actions(obs, action)[0].detach() - 1  # ratio e
    args = PPO["Args"](norm_adv=False, ent_coef=0.0)
    batch = PPO["Batch"](obs, action, logprob, torch.zeros(6), torch.ones(6), torch.zeros(6))
    loss, _ = PPO["ppo_loss"](agent, batch, args)
    loss.backward()
    assert all(p.grad.abs().max() == 0 for p in agent.actor.parameters())
    assert agent.critic[0].weight.grad.abs().max() > 0


def test_approx_kl_is_unbiased():
    """Its mean over actions as frequent as under the old policy is the exact KL divergence of the old from the new."""
    agent, old, new = PPO["Agent"](2, 3), torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    agent.actor[-1].weight.data.zero_()
    agent.actor[-1].bias.data.copy_(new.log())
    action = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    batch = PPO["Batch"](torch.zeros(10, 2), action, old[action].log(), *torch.zeros(3, 10))
    kl = PPO["ppo_loss"](agent, batch, PPO["Args"]())[1]["losses/approx_kl"]
    assert kl.item() == pytest.approx((old * (old / new).log()).sum().item(), rel=1e-4)


def test_layers_are_orthogonal_with_their_gains():
    agent = PPO["Agent"](5, 3)
    for net, gains in ((agent.actor, (2**0.5, 2**0.5, 0.01)), (agent.critic, (2**0.5, 2**0.5, 1.0))):
        assert [type(layer).__name__ for layer in net] == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
        for layer, gain in zip(net[::2], gains, strict=True):
            w = layer.weight.detach().double()
            gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
            torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram), dtype=torch.float64), atol=1e-5, rtol=1e-4)
            assert (layer.bias == 0).all()


@pytest.mark.parametrize("name", ["ppo", "ppo_normalized", "ppo_continuous_action", "rpo_continuous_action"])
def test_act_is_the_greedy_action_and_acting_is_fast(name):
    """The networks in double precision, also where the clip of normalised observations bites; in NumPy the same."""
    torch.manual_seed(0)
    file, continuous = definitions(name), "continuous" in name
    agent = file["Agent"](3, 4, *([0.7] if continuous else []))
    for parameter in agent.actor.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    obs = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    obs[::10] *= 100
    shown = obs
    if name != "ppo":
        agent.obs_normalizer.update(np.random.default_rng(1).normal(1, 2, (50, 3)))
        mean, var = agent.obs_normalizer.mean.numpy(), agent.obs_normalizer.var.numpy()
        shown = ((obs - mean) / np.sqrt(var)).clip(-10, 10)
        assert (np.abs(shown) == 10).any()
        np.testing.assert_allclose(agent.obs_normalizer(obs), shown, rtol=1e-5, atol=1e-6)
    actor, out = Forward(agent.actor, fast=True), reference(agent.actor, shown)
    assert actor.in_numpy
    np.testing.assert_allclose(actor(shown), out, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(agent.act(obs), out if continuous else out.argmax(1), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------- the real script's variables
def test_samples_follow_the_softmax_and_know_their_probability():
    logits = np.array([[0.0, 1.0, -2.0], [500.0, 501.0, 0.0]], np.float32)  # the second overflows in exp
    np.random.seed(1)
    action, logprob = PPO["sample_categorical"](logits.repeat(20_000, 0))
    expected = torch.distributions.Categorical(logits=torch.as_tensor(logits))
    for row in range(2):
        part = slice(20_000 * row, 20_000 * (row + 1))
        frequency = np.bincount(action[part], minlength=3) / 20_000
        np.testing.assert_allclose(frequency, expected.probs[row], atol=0.02)
        drawn = torch.as_tensor(action[part])
        np.testing.assert_allclose(logprob[part], expected.logits[row][drawn], rtol=1e-5, atol=1e-5)


def test_first_ratio_is_one(train):
    v = train("ppo", *SMALL, "--num-minibatches", "1", "--update-epochs", "1", "--learning-rate", "0.01")
    assert len(v["kl"]) == 1 and all(abs(v["metrics"][f"losses/{name}"]) < 1e-6 for name in ("approx_kl", "clipfrac"))


def test_actions_are_samples_of_the_policy(train):
    """How often they are taken in the second of two rollouts, where the observation is always the same: within 4
    standard errors of the policy's probability."""
    flags = ["--num-steps", 1024, "--total-timesteps", 8192, "--no-anneal-lr", "--learning-rate", 0.003]
    v = train("ppo", "--env-id", "probes:ActionCounts-v0", *flags, "--eval-episodes", 1)
    action, logprob = v["rollout"].action, v["rollout"].logprob
    p = logprob[action == 1][0].exp().item()
    assert 0.6 < p < 0.95
    assert action.float().mean().item() == pytest.approx(p, abs=4 * (p * (1 - p) / 4096) ** 0.5)


def test_minibatches_cover_the_batch_once_per_epoch(train, batches):
    rollout = train("ppo", *SMALL, "--update-epochs", "3")["rollout"]
    assert len(batches) == 4 * 3 * 2 and all(len(x) == 16 for batch in batches for x in batch)
    rows_of = lambda batch: torch.cat([x.reshape(len(x), -1).double() for x in batch], 1)  # noqa: E731
    epochs = [torch.cat([rows_of(batch) for batch in batches[i : i + 2]]).tolist() for i in (18, 20, 22)]
    assert all(sorted(epoch) == sorted(rows_of(rollout).tolist()) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_time_limit_bootstraps(train):
    """With a learning rate of 0 the script is a pure function of its rollout: recompute what a cut step must hold."""
    v = train("ppo", "--env-id", "probes:ShortCartPole-v0", "--learning-rate", "0", *SMALL)
    env = gym.make("CartPole-v1").unwrapped
    env.reset()
    ends = np.argwhere(v["done"])
    assert len(ends) == 6
    for t, n in ends:
        env.state = v["obs"][t, n]
        final_obs, _, terminated, _, _ = env.step(int(v["action"][t, n]))
        assert not terminated
        expected = v["agent"](torch.as_tensor(final_obs)[None])[1].item()
        assert v["final_value"][t, n] == pytest.approx(expected, abs=1e-5) and expected != 0
    assert (v["final_value"][v["done"] == 0] == 0).all()


def test_a_real_end_does_not_bootstrap(train):
    v = train("ppo", "--env-id", "probes:OneStep-v0", *SMALL)
    assert v["done"].all() and (v["final_value"] == 0).all()


def test_rollout_continues_where_the_last_one_stopped(train):
    """Observations of a rollout are the simulator's: step the stored actions again from the stored states."""
    v = train("ppo", "--learning-rate", "0", *SMALL)
    env = gym.make("CartPole-v1").unwrapped
    env.reset()
    for t in range(15):
        for n in range(2):
            if not v["done"][t, n]:
                env.state = v["obs"][t, n].astype(np.float64)
                np.testing.assert_allclose(env.step(int(v["action"][t, n]))[0], v["obs"][t + 1, n], atol=1e-5)


def test_learning_rate_is_annealed_to_zero(train):
    v = train("ppo", *SMALL)
    rates = [row["charts/learning_rate"] for row in rows(v["run"].dir, "charts/learning_rate")]
    np.testing.assert_allclose(rates, 2.5e-4 * np.array([1, 0.75, 0.5, 0.25]))
    v = train("ppo", *SMALL, "--no-anneal-lr")
    assert {row["charts/learning_rate"] for row in rows(v["run"].dir, "charts/learning_rate")} == {2.5e-4}


def steps(variables):
    """Gradient steps of a training."""
    (state,) = variables["optimizer"].state.values()
    return state["step"].item()


def test_target_kl_ends_the_epochs(train):
    v = train("ppo", *SMALL, "--target-kl", "0", "--learning-rate", "0.01", "--update-epochs", "5")
    assert steps(v) == 4 * 2  # one epoch of two minibatches moves the policy
    v = train("ppo", *SMALL, "--target-kl", "1000", "--update-epochs", "5")
    assert steps(v) == 4 * 10


def test_same_seed_same_weights_and_another_seed_others(train):
    a, b, c = (train("ppo", *SMALL, "--seed", seed)["agent"].state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a if name.endswith("weight"))


def test_observations_of_any_shape_are_flattened(train):
    v = train("ppo", "--env-id", "probes:Matrix-v0", *SMALL)
    assert v["obs"].shape == (16, 2, 6) and v["obs"].dtype == np.float32


def test_explained_variance_by_hand(train):
    v = train("ppo", *SMALL)
    returns = v["rollout"].returns.numpy()
    expected = 1 - np.var(returns - v["rollout"].value.numpy(), ddof=1) / np.var(returns, ddof=1)
    assert rows(v["run"].dir, "losses/explained_variance")[-1]["losses/explained_variance"] == pytest.approx(
        expected, abs=1e-4
    )


# ---------------------------------------------------------------------- it learns
def value_at(variables, obs):
    return variables["agent"](torch.tensor([[float(obs)]]))[1].item()


@pytest.mark.slow
def test_learns_a_constant_value(train):
    assert value_at(train("ppo", "--env-id", "probes:OneStep-v0", *PROBE), 0) == pytest.approx(1, abs=0.05)


@pytest.mark.slow
def test_learns_a_value_from_the_observation(train):
    v = train("ppo", "--env-id", "probes:SeesReward-v0", *PROBE)
    assert value_at(v, 1) == pytest.approx(1, abs=0.1) and value_at(v, -1) == pytest.approx(-1, abs=0.1)


@pytest.mark.slow
def test_learns_to_discount(train):
    v = train("ppo", "--env-id", "probes:Delayed-v0", "--gamma", "0.5", *PROBE)
    assert value_at(v, 0) == pytest.approx(0.5, abs=0.07) and value_at(v, 1) == pytest.approx(1, abs=0.07)


def test_learns_the_better_action(train):
    v = train("ppo", "--env-id", "probes:ActionCounts-v0", *PROBE)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] == 1.0


def test_learns_a_policy_of_the_observation(train):
    v = train("ppo", "--env-id", "probes:ActionMustMatch-v0", *PROBE)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] == 1.0
    assert v["agent"].act(np.array([[1.0], [-1.0]])).tolist() == [1, 0]


@pytest.mark.slow
def test_value_of_a_constant_reward_under_a_time_limit(train):
    """The time limit is no end of the task: 1 / (1 - gamma), where a limit taken for an end would give 6.5."""
    v = train("ppo", "--env-id", "probes:Forever-v0", "--gamma", "0.9", *PROBE, "--total-timesteps", "24576")
    assert value_at(v, 0) == pytest.approx(10, abs=0.5)
