"""ppo_continuous_action_jax.py: policy, normalisation and loss against NumPy and the torch twin; a training."""

import math

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import copy_layers, definitions, rows
from safetensors.numpy import load_file

from solorl.envs.interface import Step
from solorl.envs.open import open_envs

JAX, TORCH = definitions("ppo_continuous_action_jax"), definitions("ppo_continuous_action")


def twins():
    """The same random weights for both: the parameters of JAX and the Agent of torch."""
    params = JAX["init_params"](jax.random.PRNGKey(0), 3, 2, 1.0) | {"log_std": jnp.array([-0.3, 0.4])}
    params["actor"][-1]["weight"] = jax.random.normal(jax.random.PRNGKey(7), (64, 2))
    agent = TORCH["Agent"](3, 2, 1.0)
    agent.log_std.data.copy_(torch.from_numpy(np.array(params["log_std"])))
    copy_layers(params["actor"], agent.actor[::2])
    copy_layers(params["critic"], agent.critic[::2])
    return params, agent


def test_policy_loss_and_actions_are_those_of_the_torch_twin():
    params, agent = twins()
    rng = np.random.default_rng(0)
    obs, action = rng.normal(size=(32, 3)), rng.normal(size=(32, 2))
    others = -rng.random(32) - 0.5, *rng.normal(size=(3, 32))
    columns = [np.asarray(x, np.float32) for x in (obs, action, *others)]
    mean, var = np.float32([0.5, -1, 2]), np.float32([4, 0.25, 1])
    agent.obs_normalizer.mean.copy_(torch.from_numpy(mean))
    agent.obs_normalizer.var.copy_(torch.from_numpy(var))
    normalizer = JAX["RunningMeanStd"](jnp.asarray(mean), jnp.asarray(var))
    normal = agent.obs_normalizer(columns[0])
    np.testing.assert_allclose(normalizer.normalize(columns[0]), normal, rtol=1e-5, atol=1e-6)
    settings = {"clip_coef": 0.1, "vf_coef": 0.7, "ent_coef": 0.3}
    loss, metrics = JAX["ppo_loss"](params, JAX["Batch"](*columns), JAX["Args"](**settings))
    batch = TORCH["Batch"](*map(torch.from_numpy, columns))
    want, want_metrics = TORCH["ppo_loss"](agent, batch, TORCH["Args"](**settings))
    assert metrics.keys() == want_metrics.keys()
    for x, y in [(loss, want), *((metrics[name], want_metrics[name]) for name in metrics)]:
        np.testing.assert_allclose(x, y.detach().numpy(), rtol=1e-4, atol=1e-5)
    mine = JAX["act"](JAX["Agent"](params, normalizer), columns[0])
    np.testing.assert_allclose(mine, agent.act(columns[0]), rtol=1e-4, atol=1e-5)


def test_running_statistics_are_those_of_all_that_was_seen():
    rng, seen = np.random.default_rng(0), []
    statistics = JAX["RunningMeanStd"](jnp.zeros(2), jnp.ones(2), jnp.float32(0))
    for n in (5, 1, 300, 40):
        seen.append(rng.normal([1, -5], [0.1, 8], (n, 2)).astype(np.float32))
        statistics = statistics.update(jnp.asarray(seen[-1]))
    everything = np.concatenate(seen)
    np.testing.assert_allclose(statistics.mean, everything.mean(0), rtol=1e-5)
    np.testing.assert_allclose(statistics.var, everything.var(0), rtol=1e-4)
    assert (jnp.abs(statistics.normalize(1e9 * everything)) <= 10).all()


def test_discounted_returns_are_those_of_the_torch_twin():
    rng = np.random.default_rng(0)
    reward, done = rng.normal(size=(40, 3)).astype(np.float32), (rng.random((40, 3)) < 0.2).astype(np.float32)
    so_far = rng.normal(size=3).astype(np.float32)
    mine = jax.jit(JAX["discounted_returns"])(reward, done, so_far, 0.9)
    for got, want in zip(mine, TORCH["discounted_returns"](reward, done, so_far, 0.9), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_an_iteration_normalises_by_what_was_seen_before_it():
    """Statistics of observations move after an iteration by exactly its observations, those of returns within it."""
    args = JAX["Args"](num_envs=2, num_steps=64, num_minibatches=4, update_epochs=1)
    setup = JAX["Setup"](args, open_envs("Pendulum-v1", 2), num_iterations=10)
    before = JAX["begin"](jax.random.PRNGKey(3), setup)
    after, (reward, done, sums, count, _) = jax.jit(lambda training: JAX["train_iteration"](training, setup))(before)
    seen = after.agent.obs_normalizer
    assert seen.count == 128 and after.return_normalizer.count == 128 and not done.any()
    assert abs(float(seen.mean[0])) < 1 and float(seen.var[2]) > 0.05
    returns, _ = TORCH["discounted_returns"](
        np.array(reward), np.array(done, np.float32), np.zeros(2, np.float32), 0.99
    )
    np.testing.assert_allclose(after.return_normalizer.mean, returns.mean(), rtol=1e-4)
    np.testing.assert_allclose(after.so_far, returns[-1], rtol=1e-4)
    np.testing.assert_allclose(sums["losses/entropy"] / count, 0.5 * np.log(2 * np.pi * np.e), atol=0.02)


def test_actions_and_their_log_probabilities_are_those_of_the_torch_twin(monkeypatch):
    """From the same means, deviations and noise; learning finds the same log-probabilities."""
    rng = np.random.default_rng(0)
    mean, noise, log_std = (np.float32(rng.normal(size=shape)) for shape in ((50, 2), (50, 2), 2))
    monkeypatch.setattr(np.random, "standard_normal", lambda size: noise)
    action, logprob = JAX["sample_gaussian"](mean, log_std, noise)
    want, want_logprob = TORCH["sample_gaussian"](mean, log_std)
    np.testing.assert_allclose(action, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logprob, want_logprob, rtol=1e-5, atol=1e-5)
    bias_only = [{"weight": jnp.zeros((2, 2)), "bias": jnp.float32(mean[0])}]
    params = {"actor": bias_only, "critic": [{"weight": jnp.zeros((2, 1)), "bias": jnp.zeros(1)}], "log_std": log_std}
    learned = JAX["evaluate_actions"](params, jnp.zeros((1, 2)), action[:1])[0]
    np.testing.assert_allclose(logprob[:1], learned, rtol=1e-4, atol=1e-5)


class Blind:
    """The observation is always 3; the reward is the action, every fifth step ends the episode by a time limit."""

    num_envs, single_action_space = 1, gym.spaces.Box(-1, 1, (1,))
    single_observation_space = gym.spaces.Box(-5, 5, (1,))

    def reset(self, key):
        return jnp.zeros(1, int), jnp.full((1, 1), 3.0)

    def step(self, key, state, action):
        end, obs = (state + 1) % 5 == 0, jnp.full((1, 1), 3.0)
        return state + 1, Step(obs, action[:, 0], end & False, end, obs)


@pytest.mark.slow
def test_actions_are_samples_of_a_policy_whose_first_deviation_is_a_flag(train):
    args = JAX["Args"](num_steps=4096, num_minibatches=1, update_epochs=1, std_init=0.3, learning_rate=0.01)
    setup = JAX["Setup"](args, Blind(), num_iterations=10)
    training = JAX["begin"](jax.random.PRNGKey(0), setup)
    mean = float(JAX["act"](training.agent, jnp.full((1, 1), 3.0))[0, 0])
    one = jax.jit(lambda training: JAX["train_iteration"](training, setup))
    training, (reward, _, metrics, count, _) = one(training)
    assert count == 1
    assert float(reward.mean()) == pytest.approx(mean, abs=4 * 0.3 / 4096**0.5)
    assert float(reward.std()) == pytest.approx(0.3, abs=4 * 0.3 / 8192**0.5)
    entropy = math.log(0.3 * math.sqrt(2 * math.pi * math.e))
    assert float(metrics["losses/entropy"]) == pytest.approx(entropy, rel=1e-5)
    _, (_, _, moved, _, _) = one(training)  # the first ratio is 1, also when the statistics of observations have moved
    for each in (metrics, moved):
        assert abs(float(each["losses/approx_kl"])) < 1e-6 and float(each["losses/clipfrac"]) == 0
    train("ppo_continuous_action_jax", "--std-init", 0, code=2)
    assert "--std-init 0.0 must be above 0" in train.out


def test_statistics_are_saved_with_the_weights_and_the_twin_logs_the_same(train):
    flags = "--num-steps 64 --num-minibatches 4 --update-epochs 2 --total-timesteps 512 --eval-episodes 2".split()
    a = train("ppo_continuous_action_jax", *flags)["run"].runs[0]
    model = load_file(a.dir / "model_last.safetensors")
    assert model["agent.obs_normalizer.count"] == 512 and model["agent.params.log_std"].shape == (1,)
    twin = train("ppo_continuous_action", *flags, "--env-id", "Pendulum-v1")["run"]
    assert {key for row in rows(a.dir) for key in row} == {key for row in rows(twin.dir) for key in row}


@pytest.mark.slow
def test_it_learns_pendulum(train):
    flags = "--num-envs 4 --num-steps 512 --gamma 0.9 --learning-rate 0.001 --total-timesteps 90000 --eval-every 0"
    variables = train("ppo_continuous_action_jax", *flags.split(), "--num-seeds", 2)
    means = [run.evaluator.last[1] for run in variables["run"].runs]
    assert min(means) > -600, means  # a random policy gets -1200
