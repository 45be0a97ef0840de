"""ppo_continuous_action_jax.py: policy, normalisation and loss against NumPy and the torch twin; a training."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from conftest import comparable, copy_layers, definitions, rows
from safetensors.numpy import load_file

JAX, TORCH = definitions("ppo_continuous_action_jax"), definitions("ppo_continuous_action")


def twins():
    """The same random weights for both: the parameters of JAX and the Agent of torch."""
    params = JAX["init_params"](jax.random.PRNGKey(0), 3, 2, 1.0) | {"log_std": jnp.array([-0.3, 0.4])}
    params["actor"][-1]["weight"] = jax.random.normal(jax.random.PRNGKey(7), (64, 2))
    agent = TORCH["Agent"](3, 2, 1.0)
    agent.log_std.data.copy_(torch.from_numpy(np.array(params["log_std"])))
    copy_layers(params["actor"], agent.actor)
    copy_layers(params["critic"], agent.critic)
    return params, agent


def test_policy_loss_and_actions_are_those_of_the_torch_twin():
    params, agent = twins()
    rng = np.random.default_rng(0)
    obs, action = rng.normal(size=(32, 3)), rng.normal(size=(32, 2))
    others = -rng.random(32) - 0.5, *rng.normal(size=(3, 32))
    columns = [np.asarray(x, np.float32) for x in (obs, action, *others)]
    mean, var = np.float32([0.5, -1, 2]), np.float32([4, 0.25, 1])
    agent.seen_obs.mean.copy_(torch.from_numpy(mean))
    agent.seen_obs.var.copy_(torch.from_numpy(var))
    seen = JAX["Moments"](jnp.asarray(mean), jnp.asarray(var))
    normal = [seen.normalize(columns[0]), *columns[1:]]
    settings = {"clip_coef": 0.1, "vf_coef": 0.7, "ent_coef": 0.3}
    loss, terms = JAX["ppo_loss"](params, *normal, JAX["Args"](**settings))
    want, want_terms = TORCH["ppo_loss"](agent, *map(torch.from_numpy, columns), TORCH["Args"](**settings))
    for x, y in zip((loss, *terms), (want, *want_terms), strict=True):
        np.testing.assert_allclose(x, y.detach().numpy(), rtol=1e-4, atol=1e-5)
    noise = rng.normal(size=(32, 2)).astype(np.float32)
    for z in (0.0, noise):
        mine = JAX["act"](JAX["Agent"](params, seen), columns[0], z)
        np.testing.assert_allclose(mine, agent.act(columns[0], z), rtol=1e-4, atol=1e-5)


def test_moments_are_those_of_all_that_was_seen():
    rng, seen, moments = np.random.default_rng(0), [], JAX["Moments"](jnp.zeros(2), jnp.ones(2), jnp.float32(0))
    for n in (5, 1, 300, 40):
        seen.append(rng.normal([1, -5], [0.1, 8], (n, 2)).astype(np.float32))
        moments = moments.update(jnp.asarray(seen[-1]))
    everything = np.concatenate(seen)
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.var, everything.var(0), rtol=1e-4)
    assert (jnp.abs(moments.normalize(1e9 * everything)) <= 10).all()


def test_discounted_returns_are_those_of_the_torch_twin():
    rng = np.random.default_rng(0)
    reward, done = rng.normal(size=(40, 3)).astype(np.float32), (rng.random((40, 3)) < 0.2).astype(np.float32)
    so_far = rng.normal(size=3).astype(np.float32)
    before = so_far.copy()  # JAX shares NumPy's memory and computes while the twin below writes to `so_far`
    after, returns = jax.jit(JAX["discounted_returns"])(reward, done, before, 0.9)
    np.testing.assert_allclose(returns, TORCH["discounted_returns"](reward, done, so_far, 0.9), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(after, so_far, rtol=1e-5, atol=1e-5)  # the twin writes there


def test_an_iteration_normalises_by_what_was_seen_before_it():
    """Statistics of observations move after an iteration by exactly its observations, those of returns within it."""
    args = JAX["Args"](num_envs=2, num_steps=64, num_minibatches=4, update_epochs=1)
    envs, optimizer = JAX["make_envs"]("Pendulum-v1", 2), optax.scale_by_adam(eps=1e-5)
    before = JAX["begin"](jax.random.PRNGKey(3), envs, optimizer, args)
    call = jax.jit(partial(JAX["iteration"], envs=envs, optimizer=optimizer, num_iterations=10, args=args))
    after, (reward, done, metrics) = call(before)
    assert after.agent.seen_obs.count == 128 and after.seen_returns.count == 128 and not done.any()
    assert abs(float(after.agent.seen_obs.mean[0])) < 1 and float(after.agent.seen_obs.var[2]) > 0.05
    returns = TORCH["discounted_returns"](np.array(reward), np.array(done, np.float32), np.zeros(2, np.float32), 0.99)
    np.testing.assert_allclose(after.seen_returns.mean, returns.mean(), rtol=1e-4)
    np.testing.assert_allclose(after.so_far, returns[-1], rtol=1e-4)
    np.testing.assert_allclose(metrics["losses/entropy"], 0.5 * np.log(2 * np.pi * np.e), atol=0.02)


def test_statistics_are_saved_with_the_weights_and_a_seed_is_reproducible(train, tmp_path):
    flags = "--num-steps 64 --num-minibatches 4 --update-epochs 2 --total-timesteps 512 --eval-episodes 2".split()
    a = train("ppo_continuous_action_jax", *flags)["run"].runs[0]
    b = train("ppo_continuous_action_jax", *flags, runs_dir=tmp_path / "again")["run"].runs[0]
    assert comparable(a.dir) == comparable(b.dir)
    model = load_file(a.dir / "model_last.safetensors")
    assert model["agent.seen_obs.count"] == 512 and model["agent.params.log_std"].shape == (1,)
    twin = train("ppo_continuous_action", *flags, "--env-id", "Pendulum-v1")["run"]
    assert {key for row in rows(a.dir) for key in row} == {key for row in rows(twin.dir) for key in row}


def test_it_learns_pendulum(train):
    variables = train("ppo_continuous_action_jax", "--total-timesteps", 150_000, "--num-seeds", 2, "--eval-every", 0)
    means = [run.last_evaluation[1] for run in variables["run"].runs]
    assert min(means) > -600, means  # a random policy gets -1200
