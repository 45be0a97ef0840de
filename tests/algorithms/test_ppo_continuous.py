"""ppo_continuous_action.py and rpo_continuous_action.py: their pure functions against brute force, the real script's
variables, and that they learn. What they share with ppo.py is tested there (rule R2 keeps it equal)."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import definitions, rows
from probes_offpolicy import HIGH, LOW

SCRIPTS = ["ppo_continuous_action", "rpo_continuous_action"]
PPO = definitions("ppo_continuous_action")
SMALL = "--env-id probes_offpolicy:AimWhereSeen-v0 --num-envs 2 --num-steps 16 --total-timesteps 128".split()
SMALL += "--num-minibatches 2 --update-epochs 2 --eval-episodes 1 --log-every 1".split()
PROBE = "--total-timesteps 16384 --num-envs 4 --num-steps 64 --num-minibatches 4 --learning-rate 0.003".split()
PROBE += "--eval-every 0 --eval-episodes 10".split()


# ---------------------------------------------------------------------- pure functions
def test_running_statistics_are_those_of_all_that_was_seen():
    """Batches of unequal size, far from 0: mean and variance of the whole, from the first batch on."""
    rng = np.random.default_rng(0)
    statistics, seen = PPO["RunningMeanStd"](3), []
    for n in (5, 1, 200, 17):
        seen.append(rng.normal([100, -3, 0], [2, 0.1, 30], (n, 3)))
        statistics.update(seen[-1])
        everything = np.concatenate(seen)
        np.testing.assert_allclose(statistics.mean, everything.mean(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(statistics.var, everything.var(0), rtol=1e-10)
        assert statistics.count == len(everything)


def test_scaling_divides_by_the_deviation_and_clips_at_10():
    statistics = PPO["RunningMeanStd"](2)
    statistics.var.copy_(torch.tensor([4.0, 0.0]))
    got = statistics.scale(np.float32([[6.0, 1.0], [-100.0, -1.0]]))
    np.testing.assert_allclose(got, [[3, 10], [-10, -10]], rtol=1e-6)


def test_normalised_observations_have_mean_0_and_deviation_1():
    """Also where all are a clock of 1.7e9 seconds, or as small as 1e-6; one that never changes is 0."""
    statistics, rng = PPO["RunningMeanStd"](5), np.random.default_rng(0)
    obs = rng.normal(size=(1000, 5)) * [5, 0.1, 1, 1e-6, 0] + [7, 7, 1.7e9, 0, 0.1]
    for part in np.split(obs, [1, 300]):
        statistics.update(part)
    got = statistics(obs)
    np.testing.assert_allclose(got.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(got.std(0), [1, 1, 1, 1, 0], rtol=1e-3, atol=1e-6)


def test_statistics_stay_on_the_host_in_double_precision():
    """Wherever the networks go: not every device has double precision."""
    agent = PPO["Agent"](3, 2, 1.0).to("meta")
    assert agent.actor[0].weight.device.type == "meta"
    assert all(x.dtype == torch.float64 and x.device.type == "cpu" for x in agent.half().buffers())


def test_statistics_of_older_models_were_in_single_precision():
    """They load, with their numbers."""
    old, new = PPO["Agent"](3, 2, 1.0), PPO["Agent"](3, 2, 1.0)
    old.obs_normalizer.update(np.random.default_rng(0).normal(size=(50, 3)))
    saved = {name: x.float() for name, x in old.state_dict().items()}
    new.load_state_dict(saved)
    assert new.obs_normalizer.mean.dtype == torch.float64 and new.obs_normalizer.count == 50
    assert torch.equal(new.obs_normalizer.var.float(), saved["obs_normalizer.var"])


def test_discounted_returns_start_again_after_every_end():
    """By the definition, step by step; the reward of an episode's last step counts in it and not in the next."""
    rng = np.random.default_rng(1)
    T, N, gamma = 30, 3, 0.9
    reward, done = rng.normal(size=(2 * T, N)), (rng.random((2 * T, N)) < 0.2).astype(float)
    so_far, got = np.zeros(N), []
    for part in (slice(0, T), slice(T, 2 * T)):
        returns, so_far = PPO["discounted_returns"](reward[part], done[part], so_far, gamma)
        got.append(returns)
    for n in range(N):
        for t in range(2 * T):
            first = max([s + 1 for s in range(t) if done[s, n]], default=0)
            expected = sum(gamma ** (t - s) * reward[s, n] for s in range(first, t + 1))
            assert np.concatenate(got)[t, n] == pytest.approx(expected)


def test_policy_is_a_gaussian():
    """Log-probabilities and entropy are those of torch.distributions; its mean is what `act` does."""
    torch.manual_seed(0)
    agent = PPO["Agent"](3, 2, 1.0)
    torch.nn.init.normal_(agent.actor[-1].weight)
    agent.log_std.data = torch.tensor([0.3, -1.2])
    agent.obs_normalizer.update(np.random.default_rng(0).normal(1, 3, (50, 3)))
    obs, action = torch.randn(10, 3), torch.randn(10, 2)
    mean = torch.as_tensor(agent.act(obs.numpy()))
    obs = torch.as_tensor(agent.obs_normalizer(obs.numpy()), dtype=torch.float32)
    gaussian = torch.distributions.Normal(mean, agent.log_std.exp())
    logprob, entropy, value = agent.evaluate_actions(obs, action)
    torch.testing.assert_close(logprob, gaussian.log_prob(action).sum(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, gaussian.entropy().sum(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(value, agent.critic(obs)[:, 0])


def test_samples_are_gaussian_and_know_their_density():
    mean, log_std = np.array([[1.0, -3.0]], np.float32), np.array([-1.0, 0.5], np.float32)
    np.random.seed(1)
    action, logprob = PPO["sample_gaussian"](mean.repeat(20_000, 0), log_std)
    np.testing.assert_allclose(action.mean(0), mean[0], atol=0.05)
    np.testing.assert_allclose(action.std(0), np.exp(log_std), rtol=0.02)
    expected = torch.distributions.Normal(torch.as_tensor(mean), torch.as_tensor(log_std).exp())
    np.testing.assert_allclose(logprob, expected.log_prob(torch.as_tensor(action)).sum(1), rtol=1e-3, atol=1e-4)


def test_moving_the_action_is_moving_the_mean_the_other_way():
    """What rpo_continuous_action.py relies on."""
    agent = PPO["Agent"](3, 2, 1.0)
    obs, action, move = torch.randn(10, 3), torch.randn(10, 2), torch.rand(10, 2)
    mean = agent.actor(obs)
    moved = torch.distributions.Normal(mean + move, agent.log_std.exp()).log_prob(action).sum(1)
    torch.testing.assert_close(agent.evaluate_actions(obs, action - move)[0], moved, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------- the real script's variables
def test_first_ratio_is_one_in_ppo_and_noisy_in_rpo(train):
    """Also in later iterations: learning sees the observations as acting did. RPO's noise is in the update only."""
    one = ["--num-minibatches", "1", "--update-epochs", "1", "--learning-rate", "0.01"]
    v = train("ppo_continuous_action", *SMALL, *one)
    assert abs(v["metrics"]["losses/approx_kl"]) < 1e-6 and v["iteration"] == 3
    v = train("rpo_continuous_action", *SMALL, *one)
    assert v["metrics"]["losses/approx_kl"] > 1e-3
    assert (v["noise"].abs() <= 0.5).all() and v["noise"].max() > 0.4 and v["noise"].min() < -0.4
    torch.testing.assert_close(v["perturbed"].action + v["noise"], v["rollout"].action)
    v = train("rpo_continuous_action", *SMALL, *one, "--rpo-alpha", "0")
    assert abs(v["metrics"]["losses/approx_kl"]) < 1e-6


def test_rpo_moves_every_sample_anew_in_every_epoch(train, batches):
    v = train("rpo_continuous_action", *SMALL, "--total-timesteps", "32", "--num-minibatches", "1")
    rollout = v["rollout"]
    order = [(batch.logprob[:, None] == rollout.logprob).float().argmax(1) for batch in batches]
    first, second = (rollout.action[i] - batch.action for i, batch in zip(order, batches, strict=True))
    assert first.shape == (32, 2) and len(first.unique()) > 60  # and nothing else has changed:
    assert not torch.isclose(first[order[0].argsort()], second[order[1].argsort()]).any()
    for name in ("obs", "logprob", "value", "advantage", "returns"):
        assert all(
            torch.equal(getattr(b, name), getattr(rollout, name)[i]) for i, b in zip(order, batches, strict=True)
        )


def test_actions_are_samples_of_the_policy(train):
    """Where the observation is always the same: mean and deviation of 2048 actions are the policy's."""
    flags = ["--env-id", "probes_offpolicy:OneStepBox-v0", "--num-envs", 1, "--num-steps", 2048, "--std-init", 0.3]
    v = train("ppo_continuous_action", *SMALL, *flags, "--total-timesteps", 2048, "--learning-rate", 0)
    action = v["action"][:, 0]
    np.testing.assert_allclose(action.mean(0), v["agent"].act(np.zeros((1, 1)))[0], atol=4 * 0.3 / 2048**0.5)
    np.testing.assert_allclose(action.std(0), 0.3, atol=4 * 0.3 / 4096**0.5)
    assert abs(np.corrcoef(action.T)[0, 1]) < 0.1


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_first_deviation_is_a_flag(name, train):
    """Entropy and actions of the policy that has not learned."""
    v = train(name, *SMALL, "--learning-rate", 0, "--std-init", 0.1, "--num-steps", 64)
    entropy = [row["losses/entropy"] for row in rows(v["run"].dir, "losses/entropy")]
    np.testing.assert_allclose(entropy, 2 * math.log(0.1 * math.sqrt(2 * math.pi * math.e)), rtol=1e-5)
    assert v["action"].std() == pytest.approx(0.1, rel=0.15)
    train(name, *SMALL, "--std-init", 0, code=2)
    assert "--std-init 0.0 must be above 0" in train.out


@pytest.mark.parametrize("name", SCRIPTS)
def test_rewards_are_scaled_by_the_returns_of_all_environments(name, train):
    """The statistics after one rollout are those of its discounted returns; training episodes report raw rewards."""
    v = train(name, *SMALL, "--total-timesteps", "32")
    returns, _ = PPO["discounted_returns"](v["reward"], v["done"], np.zeros(2), 0.99)
    assert v["agent"].return_normalizer.count == 32
    deviation = np.sqrt(np.float64(returns).var())
    assert v["agent"].return_normalizer.var.sqrt().item() == pytest.approx(deviation, rel=1e-4)
    np.testing.assert_allclose(v["scaled_reward"], np.clip(v["reward"] / deviation, -10, 10), rtol=1e-4)
    got = [row["charts/episodic_return"] for row in rows(v["run"].dir, "charts/episodic_return")]
    np.testing.assert_allclose(np.sort(got), np.sort(v["reward"][v["done"] == 1]), rtol=1e-5)


@pytest.mark.parametrize("name", SCRIPTS)
def test_observation_statistics_are_shared_and_frozen_outside_training(name, train):
    """All environments feed one statistic with the raw observations; evaluating and acting leave it alone."""
    v = train(name, *SMALL, "--total-timesteps", "32")
    agent, obs = v["agent"], v["raw_obs"].reshape(32, -1)
    np.testing.assert_allclose(agent.obs_normalizer.mean, obs.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(agent.obs_normalizer.var, obs.var(0), rtol=1e-4)
    before = {key: value.clone() for key, value in agent.state_dict().items()}
    agent.act(100 + np.zeros((5, 1)))
    assert all(torch.equal(before[key], value) for key, value in agent.state_dict().items())
    names = {f"{which}_normalizer.{what}" for which in ("obs", "return") for what in ("mean", "var", "count")}
    assert names <= set(before)


def test_statistics_travel_with_the_model(train):
    """The file of the model holds them, so that `solo play` scores the policy that was trained."""
    from safetensors.torch import load_file

    v = train("ppo_continuous_action", *SMALL)
    saved = load_file(v["run"].dir / "model.safetensors")
    key = next(key for key in saved if key.endswith("obs_normalizer.mean"))
    assert torch.equal(saved[key], v["agent"].obs_normalizer.mean) and v["agent"].obs_normalizer.count == 128


def test_actions_are_clipped_by_the_environment_only(train):
    """The simulator gets actions within its bounds (the probe asserts it), the update those that were drawn."""
    v = train("ppo_continuous_action", *SMALL)
    assert (v["action"] > HIGH).any() or (v["action"] < LOW).any()
    assert isinstance(v["make_env"]("Pendulum-v1"), gym.wrappers.ClipAction)


def test_what_is_learned_from_is_normalised_once_by_the_statistics_before(train):
    """All observations of the second rollout, also the last and the final ones, by the statistics of the first."""
    flags = ["--env-id", "probes_offpolicy:Diary-v0", *SMALL[2:], "--learning-rate", "0"]
    first = train("ppo_continuous_action", *flags, "--total-timesteps", "32")
    v = train("ppo_continuous_action", *flags, "--total-timesteps", "64")
    frozen = first["agent"].obs_normalizer
    seen, now = np.concatenate([first["raw_obs"], v["raw_obs"]]).reshape(64, 3), v["agent"].obs_normalizer
    np.testing.assert_allclose(now.mean, seen.mean(0), rtol=1e-5)
    np.testing.assert_allclose(now.var, seen.var(0), rtol=1e-4)
    assert frozen.count == 32 and (frozen.mean != now.mean)[1:].all()
    scaled = lambda x: ((x - frozen.mean.numpy()) / (frozen.var + 1e-8).sqrt().numpy()).clip(-10, 10)  # noqa: E731
    np.testing.assert_allclose(v["obs"], scaled(v["raw_obs"]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(v["rollout"].obs, v["obs"].reshape(32, 3))
    last_obs = torch.as_tensor(scaled(v["next_obs"]).reshape(v["args"].num_envs, -1), dtype=torch.float32)
    np.testing.assert_allclose(v["next_value"], v["agent"](last_obs)[1].detach(), rtol=1e-4, atol=1e-5)
    ends = np.argwhere(v["timeout"])
    assert len(ends) > 2
    for t, n in ends:  # the final observation is the one before, a step later
        final_obs = scaled(v["raw_obs"][t, n] + np.array([0, 0, 1]))
        np.testing.assert_allclose(v["final_obs"][t, n], final_obs, rtol=1e-4, atol=1e-5)
        value = v["agent"](torch.as_tensor(final_obs, dtype=torch.float32)[None])[1].item()
        assert v["final_value"][t, n] == pytest.approx(value, rel=1e-4)


def test_time_limit_bootstraps_in_the_units_of_the_value(train):
    """The value of the final observation is already one of scaled rewards: it is not scaled again."""
    v = train("ppo_continuous_action", *SMALL, "--env-id", "probes_offpolicy:ForeverBox-v0", "--learning-rate", "0")
    ends = np.argwhere(v["done"])
    assert len(ends) > 1
    for t, n in ends:  # the observation is always 0
        assert v["final_value"][t, n] == pytest.approx(v["value"][t, n], rel=1e-5)
        assert v["advantage"][t, n] == pytest.approx(
            v["scaled_reward"][t, n] + 0.99 * v["final_value"][t, n] - v["value"][t, n], rel=1e-4
        )


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_seed_same_weights_and_another_seed_others(name, train):
    a, b, c = (train(name, *SMALL, "--seed", seed)["agent"].state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not any(torch.equal(a[key], c[key]) for key in a if key.endswith("weight"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_resumed_equals_uninterrupted(name, train, tmp_path):
    """Stopped in the middle of an episode, with statistics and running returns: bit for bit the same in the end."""
    flags = ["--env-id", "Pendulum-v1", *SMALL[2:], "--num-steps", "30", "--total-timesteps", "480"]
    whole = train(name, *flags, runs_dir=tmp_path / "whole")
    stopped = train(name, *flags, "--save-every", "240", runs_dir=tmp_path / "cut")
    checkpoint = stopped["run"].dir
    import shutil

    parts = sorted((checkpoint / "checkpoint").iterdir())
    assert len(parts) >= 2
    shutil.rmtree(parts[-1])  # the last one, of the end: go on from the one before
    again = train(name, "--resume", checkpoint)
    for key, value in whole["agent"].state_dict().items():
        assert torch.equal(value, again["agent"].state_dict()[key]), key
    assert (whole["now"].so_far == again["now"].so_far).all() and (whole["now"].so_far != 0).all()


@pytest.mark.slow
# ---------------------------------------------------------------------- they learn
@pytest.mark.parametrize("name", SCRIPTS)
def test_learns_where_to_aim(name, train):
    """A policy of the observation in two dimensions with other bounds; the best return is 0, that of 0.5 is -0.5."""
    v = train(name, "--env-id", "probes_offpolicy:AimWhereSeen-v0", *PROBE)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > -0.05


@pytest.mark.slow
def test_value_of_a_constant_reward_under_a_time_limit(train):
    """1 / (1 - gamma) in units of the reward's scale, where a limit taken for an end would give 6.5."""
    flags = ["--env-id", "probes_offpolicy:ForeverBox-v0", "--gamma", "0.9", *PROBE]
    v = train("ppo_continuous_action", *flags)
    value = v["agent"](torch.zeros(1, 1))[1].item() * v["agent"].return_normalizer.var.sqrt().item()
    assert value == pytest.approx(10, abs=0.6)
