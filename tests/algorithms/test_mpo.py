"""MPO: weights, dual functions and KL divergences against brute force, the decoupled M-step, bounds that are held."""

import math

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, rows
from test_actor_critic import SMALL, steps_of, weights

import solorl

MPO = definitions("mpo_continuous_action")
DIARY = ["--env-id", "probes_offpolicy:Diary-v0", *SMALL, "--num-samples", "3"]
NAMES = ("eta", "eta_penalty", "alpha_mean", "alpha_std")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_samples(num_samples=4, batch=6, action_dim=2):
    """Samples of a target policy that the losses get, in double precision."""
    mean, std = random(batch, action_dim, seed=1), random(batch, action_dim, seed=2).exp()
    action = mean + std * random(num_samples, batch, action_dim, seed=3)
    q, penalty = random(num_samples, batch, seed=4), -random(num_samples, batch, seed=5).abs()
    return MPO["Samples"](random(batch, 3), mean, std, action, q, penalty)


def fixed(*output):
    """A policy with this output, whatever it sees."""
    return lambda obs: output


# ---------------------------------------------------------------------- E-step
def test_weights_are_the_improved_policy_on_the_samples():
    q, eta = random(5, 3), 0.7
    got = MPO["action_weights"](q, eta)
    for s in range(3):
        powers = [math.exp(q[i, s] / eta) for i in range(5)]
        assert got[:, s].tolist() == pytest.approx([power / sum(powers) for power in powers])


def test_the_dual_function_by_hand_and_its_slope_by_differences():
    q, epsilon = 3 * random(5, 3), 0.3

    def by_hand(eta):
        means = [sum(math.exp(q[i, s] / eta) for i in range(5)) / 5 for s in range(3)]
        return eta * epsilon + eta * sum(map(math.log, means)) / 3

    for number in (0.4, 2.0, 30.0):
        eta = torch.tensor(number, dtype=torch.float64, requires_grad=True)
        value = MPO["dual_function"](q, eta, epsilon)
        value.backward()
        assert value.item() == pytest.approx(by_hand(number))
        assert eta.grad.item() == pytest.approx((by_hand(number + 1e-5) - by_hand(number - 1e-5)) / 2e-5, rel=1e-5)


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.5])
def test_where_the_dual_function_is_least_the_kl_divergence_is_epsilon(epsilon):
    """By a search over eta; the KL divergence of the weights from equal ones by a loop."""
    q = 3 * random(20, 50)
    low, high = 0.05, 500.0
    for _ in range(200):  # golden section would be as good: the function is convex
        a, b = low + (high - low) / 3, high - (high - low) / 3
        if MPO["dual_function"](q, a, epsilon) < MPO["dual_function"](q, b, epsilon):
            high = b
        else:
            low = a
    weights = MPO["action_weights"](q, low)
    kl = sum(w * math.log(w * 20) for w in weights.flatten().tolist()) / 50
    assert kl == pytest.approx(epsilon, rel=1e-4)
    assert MPO["weights_kl"](weights).item() == pytest.approx(kl)


def test_a_weight_of_zero_has_a_finite_kl_divergence():
    assert MPO["weights_kl"](torch.tensor([[1.0], [0.0], [0.0], [0.0]])).item() == pytest.approx(math.log(4))


def test_samples_are_those_of_the_target_policy_and_its_clipped_actions_are_judged():
    torch.manual_seed(0)
    actor, critic, obs = MPO["Actor"](3, 2), MPO["Critic"](3, 2), torch.randn(4, 3)
    torch.nn.init.normal_(actor.net[-1][-1].weight, std=0.3)
    noise = torch.randn(7, 4, 2)
    samples = MPO["draw_and_judge"](actor, critic, obs, noise)
    mean, std = actor(obs)
    assert samples.obs is obs and not any(x.requires_grad for x in samples)
    torch.testing.assert_close(samples.action, mean + std * noise)
    assert (samples.action.abs() > 1).any() and (samples.action.abs() < 1).all(2).any()
    for k in range(7):
        clipped = samples.action[k].clamp(-1, 1)
        torch.testing.assert_close(samples.q[k], critic(obs, clipped))
        for i in range(4):
            assert samples.penalty[k, i].item() == pytest.approx(-math.dist(samples.action[k, i], clipped[i]), abs=1e-6)


# ---------------------------------------------------------------------- policy evaluation
def test_critic_loss_by_hand():
    """The mean value of the drawn actions, by the power of gamma that the return has; none where the task was over."""
    critic, next_q = MPO["Critic"](3, 2).double(), random(5, 4)
    reward, done = random(4, seed=7), torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    discount = torch.tensor([0.9, 0.81, 0.729, 0.9], dtype=torch.float64)
    batch = MPO["Batch"](random(4, 3), random(4, 2), reward, done, random(4, 3), discount)
    loss, metrics = MPO["mpo_critic_loss"](critic, batch, next_q)
    q = critic(batch.obs, batch.action).tolist()
    expected = 0.0
    for i in range(4):
        value = 0.0 if done[i] else discount[i].item() * sum(next_q[:, i].tolist()) / 5
        expected += (q[i] - reward[i].item() - value) ** 2 / 4
    assert loss.item() == metrics["losses/qf1_loss"].item() == pytest.approx(expected)
    assert metrics["losses/qf1_values"].item() == pytest.approx(np.mean(q))


def noting(seen):
    """`run.gradient_step` that also keeps the batches that critics get."""
    original = solorl.Run.gradient_step

    def gradient_step(self, loss_of, module, *others):
        step = original(self, loss_of, module, *others)

        def noted(first, *inputs):
            if loss_of.__name__ == "mpo_critic_loss":
                seen.append(first)
            return step(first, *inputs)

        return noted

    return gradient_step


def test_the_critics_learn_from_returns_of_the_record(train, monkeypatch):
    """Of three environments, whose observations tell the environment, the episode and the step: every batch of the real
    script against a walk from there. Episodes end by turns after 3 steps, and at a time limit after 4."""
    seen = []
    monkeypatch.setattr("solorl.Run.gradient_step", noting(seen))
    train("mpo_continuous_action", *DIARY, "--num-envs", 3, "--n-step", 3, "--gamma", 0.5, "--utd-ratio", 1)
    kinds = set()
    for batch in seen:
        for obs, reward, done, next_obs, discount in zip(
            batch.obs.tolist(), batch.reward, batch.done, batch.next_obs.tolist(), batch.discount, strict=True
        ):
            (who, episode, begin), (same, again, end) = obs, next_obs
            length = (3, 4)[int(episode) % 2]
            assert (who, episode) == (same, again) and begin < end <= min(begin + 3, length)
            rewards = [100 * episode + step + 1 for step in range(int(begin), int(end))]
            assert reward.item() == pytest.approx(sum(0.5**k * x for k, x in enumerate(rewards)))
            assert discount.item() == 0.5 ** len(rewards) and done.item() == (end == 3 and episode % 2 == 0)
            kinds.add((len(rewards), end == length, bool(done)))
    assert {(3, False, False), (3, True, True), (3, True, False), (1, True, True), (1, True, False)} <= kinds


# ---------------------------------------------------------------------- M-step
def test_log_probability_and_kl_divergence_are_those_of_gaussians():
    mean, other_mean, std, other_std = (random(30, 2, seed=i) for i in range(4))
    p, q = (torch.distributions.Normal(m, s.exp()) for m, s in ((mean, std), (other_mean, other_std)))
    expected = torch.distributions.kl_divergence(p, q)
    torch.testing.assert_close(MPO["gaussian_kl"](mean, std.exp(), other_mean, other_std.exp()), expected)
    x = random(7, 30, 2, seed=9)
    torch.testing.assert_close(MPO["gaussian_logprob"](x, mean, std.exp()), p.log_prob(x).sum(-1))
    assert (MPO["gaussian_kl"](mean, std.exp(), mean, std.exp()).abs() < 1e-12).all()


def test_actor_loss_by_brute_force():
    """One state and action at a time, with torch's distributions; the KL divergences are of the target policy from the
    policy, for each dimension with a multiplier of its own."""
    samples, mean, std = some_samples(), random(6, 2, seed=10), random(6, 2, seed=11).exp()
    weights = MPO["action_weights"](samples.q, 1.0) + MPO["action_weights"](samples.penalty, 0.5)
    alpha_mean, alpha_std = torch.tensor([2.0, 3.0]).double(), torch.tensor([5.0, 7.0]).double()
    inputs = (samples, weights, alpha_mean, alpha_std)
    loss, metrics, kls = MPO["mpo_actor_loss"](fixed(mean, std), *inputs)
    normal, kl = torch.distributions.Normal, torch.distributions.kl_divergence
    expected, by_dimension = 0.0, torch.zeros(2, 2, dtype=torch.float64)
    for s in range(6):
        target = normal(samples.mean[s], samples.std[s])
        moved, widened = normal(mean[s], samples.std[s]), normal(samples.mean[s], std[s])
        for i in range(4):
            logprob = moved.log_prob(samples.action[i, s]).sum() + widened.log_prob(samples.action[i, s]).sum()
            expected -= weights[i, s] * logprob / 6
        by_dimension += torch.stack([kl(target, moved), kl(target, widened)]) / 6
    torch.testing.assert_close(torch.stack(kls), by_dimension)
    expected += (alpha_mean * by_dimension[0] + alpha_std * by_dimension[1]).sum()
    assert loss.item() == metrics["losses/actor_loss"].item() == pytest.approx(expected.item())
    assert metrics["losses/kl_mean"].item() == pytest.approx(by_dimension[0].mean().item())
    assert metrics["losses/kl_std"].item() == pytest.approx(by_dimension[1].mean().item())


def test_the_mean_is_pulled_by_the_deviation_of_the_target_policy():
    """Its gradient does not know the policy's own deviation, nor does that of the deviation know the new mean."""
    samples, weights = some_samples(), MPO["action_weights"](some_samples().q, 1.0)
    alphas = torch.tensor([2.0, 3.0]).double(), torch.tensor([5.0, 7.0]).double()

    def gradients(mean, std):
        mean, std = mean.clone().requires_grad_(), std.clone().requires_grad_()
        loss, _, _ = MPO["mpo_actor_loss"](fixed(mean, std), samples, weights, *alphas)
        return torch.autograd.grad(loss, (mean, std))

    mean, std, other_mean, other_std = random(6, 2, seed=10), *(random(6, 2, seed=i).exp() for i in (11, 12, 13))
    by_mean, by_std = gradients(mean, std)
    error = (weights[..., None] * (samples.action - mean)).sum(0)  # towards the mean of the weighted actions
    torch.testing.assert_close(by_mean, (alphas[0] * (mean - samples.mean) - error) / samples.std**2 / 6)
    torch.testing.assert_close(gradients(mean, other_std)[0], by_mean)
    torch.testing.assert_close(gradients(other_mean, std)[1], by_std)


def test_the_gradient_reaches_the_learned_policy_only():
    """Of the M-step that of the actor, of the dual loss that of the four multipliers."""
    torch.manual_seed(0)
    actor, target, critic = MPO["Actor"](3, 2), MPO["Actor"](3, 2), MPO["Critic"](3, 2)
    duals = MPO["Duals"](2, MPO["Args"]())
    samples = MPO["draw_and_judge"](target, critic, torch.randn(8, 3), torch.randn(5, 8, 2))
    eta, eta_penalty, alpha_mean, alpha_std = (x.detach() for x in duals())
    weights = MPO["action_weights"](samples.q, eta) + MPO["action_weights"](samples.penalty, eta_penalty)
    loss, _, (kl_mean, kl_std) = MPO["mpo_actor_loss"](actor, samples, weights, alpha_mean, alpha_std)
    loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in actor.parameters())
    assert all(p.grad is None for net in (target, critic, duals) for p in net.parameters())
    MPO["mpo_dual_loss"](duals, samples, kl_mean.detach(), kl_std.detach(), MPO["Args"]())[0].backward()
    assert all(p.grad.abs().sum() > 0 for p in duals.parameters())
    assert all(p.grad is None for net in (target, critic) for p in net.parameters())


# ---------------------------------------------------------------------- temperatures and multipliers
def test_dual_loss_by_hand():
    args = MPO["Args"](init_eta=2.0, init_alpha_mean=3.0, init_alpha_std=4.0, epsilon=0.2, epsilon_penalty=0.05)
    duals, samples = MPO["Duals"](2, args).double(), some_samples()
    kl_mean, kl_std = torch.tensor([0.1, 0.0]).double(), torch.tensor([0.0, 2e-6]).double()
    loss, metrics = MPO["mpo_dual_loss"](duals, samples, kl_mean, kl_std, args)
    eta, alpha_mean, alpha_std = (math.log(1 + math.exp(x)) + 1e-8 for x in (2, 3, 4))
    expected = MPO["dual_function"](samples.q, eta, 0.2) + MPO["dual_function"](samples.penalty, eta, 0.05)
    expected += alpha_mean * (2 * 0.0025 - 0.1) + alpha_std * (2 * 1e-6 - 2e-6)
    assert loss.item() == metrics["losses/dual_loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    found = MPO["weights_kl"](MPO["action_weights"](samples.q, eta)).item()
    assert metrics["losses/kl_weights"].item() == pytest.approx(found, rel=1e-6)
    loss.backward()  # a multiplier grows where its KL divergence is above the bound
    assert duals.alpha_mean.grad[0] < 0 < duals.alpha_mean.grad[1]
    assert duals.alpha_std.grad[1] < 0 < duals.alpha_std.grad[0]


def test_multipliers_stay_positive_and_can_grow_again():
    duals = MPO["Duals"](2, MPO["Args"]())
    for p in duals.parameters():
        p.data.fill_(-1e4)
    duals.project()
    sum(x.sum() for x in duals()).backward()
    assert all((x > 0).all() for x in duals()) and all((p.grad > 0).all() for p in duals.parameters())


# ---------------------------------------------------------------------- the policy
def test_the_policy_begins_around_zero_with_half_the_range():
    mean, std = MPO["Actor"](3, 2)(torch.randn(100, 3))
    assert mean.abs().max() < 0.1 and (std - 0.5).abs().max() < 0.05


def test_actions_are_samples_of_the_policy_clipped_to_the_bounds():
    torch.manual_seed(0)
    actor, obs = MPO["Actor"](6, 2), np.random.default_rng(0).normal(size=(200, 2, 3))
    torch.nn.init.normal_(actor.net[-1][-1].weight, std=0.2)
    mean, std = (x.detach().numpy() for x in actor(torch.tensor(obs, dtype=torch.float32).flatten(1)))
    np.testing.assert_allclose(actor.act(obs), mean.clip(-1, 1), atol=1e-6)
    noise = np.random.default_rng(1).normal(size=(200, 2))
    action = actor.act(obs, noise)
    np.testing.assert_allclose(action, (mean + std * noise).clip(-1, 1), atol=1e-5)
    assert (action == -1).any() and (action == 1).any() and (np.abs(action) < 1).any()


# ---------------------------------------------------------------------- the loop
def test_updates_are_a_fraction_of_the_steps_and_targets_are_copies(train):
    """A quarter of 40 steps; the targets are equal to what they follow at every fifth update only."""
    runs = [
        train("mpo_continuous_action", *DIARY, "--target-network-frequency", 5, "--total-timesteps", n)
        for n in (36, 40, 44)
    ]
    for v, number in zip(runs, (4, 5, 6), strict=True):
        assert {steps_of(v[f"{who}_optimizer"]) for who in ("actor", "critic", "dual")} == {number}
    before, at, after = runs
    for who in ("actor", "critic"):
        assert torch.equal(weights(at[f"target_{who}"]), weights(at[who]))
        assert not torch.equal(weights(before[f"target_{who}"]), weights(before[who]))
        assert torch.equal(weights(after[f"target_{who}"]), weights(at[who]))
        assert not torch.equal(weights(after[f"target_{who}"]), weights(after[who]))
    assert len(rows(at["run"].dir, "losses/step_kl_mean")) == 1


def test_logged_keys_are_those_of_the_page(train):
    v = train("mpo_continuous_action", *DIARY, "--target-network-frequency", 5)
    logged = {key for row in rows(v["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert logged == documented_keys("mpo_continuous_action")
    row = rows(v["run"].dir, "losses/eta")[-1]
    for name, x in zip(NAMES, v["duals"](), strict=True):
        assert row[f"losses/{name}"] == pytest.approx(x.mean().item(), rel=1e-5)


def test_resumed_with_its_replay_equals_uninterrupted(train):
    """With the temperatures and multipliers, in the middle of a step of the policy; the ring of the replay has
    wrapped."""
    flags = "--total-timesteps 300 --num-envs 2 --learning-starts 100 --buffer-size 200 --save-replay"
    flags += " --target-network-frequency 13 --save-every 200 --log-every 100 --eval-every 150"
    whole = train("mpo_continuous_action", "--env-id", "Pendulum-v1", *SMALL, *flags.split())
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("mpo_continuous_action", "--resume", run_dir)
    assert v["start"] == 100 and comparable(run_dir) == expected
    modules = [key for key, part in whole.items() if isinstance(part, torch.nn.Module)]
    assert {"actor", "critic", "target_actor", "target_critic", "duals"} <= set(modules)
    assert all(torch.equal(weights(v[what]), weights(whole[what])) for what in modules)


AIM = "--env-id probes_offpolicy:AimWhereSeen-v0 --total-timesteps 500 --learning-starts 100 --n-step 1".split()
AIM += "--utd-ratio 1 --batch-size 32 --num-samples 10 --learning-rate 0.003 --dual-lr 0.1 --init-eta 1".split()
AIM += "--init-alpha-mean 1 --init-alpha-std 10 --target-network-frequency 20 --log-every 20".split()


def test_learns_a_policy_of_the_observation_and_holds_its_bounds(train):
    """The best return is 0, that of random actions -1.67. Three constraints are active, and each KL divergence is what
    is asked, in the mean of the second half: of the weights, of the means, of the deviations. (Within a step of the
    policy a KL divergence grows with the square of the distance, so at its end it is above its mean.)"""
    flags = "--epsilon 0.1 --epsilon-mean 0.005 --epsilon-std 0.001 --eval-every 0 --eval-episodes 20".split()
    v = train("mpo_continuous_action", *AIM, *flags)
    assert v["run"].evaluator.score > -0.1
    half = rows(v["run"].dir, "losses/step_kl_mean")[10:]
    assert len(half) == 10
    for name, bound in (("weights", 0.1), ("mean", 0.005), ("std", 0.001)):
        values = np.array([row[f"losses/kl_{name}"] for row in half])
        assert values.mean() == pytest.approx(bound, rel=0.4) and values.max() < 3 * bound, name
        assert name == "weights" or max(row[f"losses/step_kl_{name}"] for row in half) < 6 * bound
