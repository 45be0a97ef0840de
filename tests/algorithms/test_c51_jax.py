"""c51_jax.py: the projection against its definition sample by sample, loss and policy against the torch twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import copy_layers, definitions, linear_layers
from test_c51 import SUPPORTS, samples

JAX, TORCH = definitions("c51_jax"), definitions("c51")


@pytest.mark.parametrize("support", SUPPORTS)
def test_projection_is_that_of_every_sample(support):
    p, value, atoms, expected = samples(*support)
    got = jax.jit(JAX["project"])(*(jnp.asarray(x, jnp.float32) for x in (p, value, atoms)))
    np.testing.assert_allclose(got, expected, atol=2e-5)
    np.testing.assert_allclose(got[40:50], p[40:50], atol=1e-5)


@pytest.mark.parametrize("name", ["c51_jax", "c51_atari_jax"])
def test_projection_of_nan_is_nan(name):
    """In its row, as in torch."""
    value = jnp.array([[0.0, jnp.nan, 2.0], [0.0, 1.0, 2.0]])
    got = jax.jit(definitions(name)["project"])(jnp.full((2, 3), 1 / 3), value, jnp.arange(3.0))
    assert jnp.isnan(got[0]).any()
    np.testing.assert_allclose(got[1], 1 / 3, rtol=1e-5)


@pytest.mark.slow
def test_loss_gradient_and_policy_are_those_of_the_torch_twin():
    atoms = np.linspace(-3, 3, 7).astype(np.float32)
    params, target_params = (JAX["init_params"](jax.random.PRNGKey(i), 3, 4, 7) for i in range(2))
    networks = [TORCH["QNetwork"](3, 4, torch.from_numpy(atoms)) for _ in range(2)]
    copy_layers(params, networks[0].net)
    copy_layers(target_params, networks[1].net)
    rng = np.random.default_rng(0)
    obs, next_obs = rng.normal(size=(2, 32, 3)).astype(np.float32)
    reward, done = rng.normal(size=32).astype(np.float32), (rng.random(32) < 0.3).astype(np.float32)
    columns = obs, rng.integers(4, size=32), reward, done, next_obs
    inputs = params, target_params, JAX["Batch"](*columns), jnp.asarray(atoms), 0.9
    (loss, metrics), gradient = jax.value_and_grad(JAX["c51_loss"], has_aux=True)(*inputs)
    want, want_metrics = TORCH["c51_loss"](*networks, TORCH["Batch"](*map(torch.from_numpy, columns)), 0.9)
    want.backward()
    np.testing.assert_allclose(loss, want.item(), rtol=1e-5)
    assert metrics.keys() == want_metrics.keys()
    for key, value in metrics.items():
        np.testing.assert_allclose(value, want_metrics[key].item(), rtol=1e-4, atol=1e-5)
    for layer, mine in zip(linear_layers(networks[0].net), gradient, strict=True):
        np.testing.assert_allclose(mine["weight"].T, layer.weight.grad.numpy(), rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(JAX["act"](params, obs, jnp.asarray(atoms)), networks[0].act(obs))


@pytest.mark.slow
def test_adam_has_the_epsilon_of_its_batch(train):
    """A first step of Adam is gradient / (gradient + epsilon)."""
    flags = ["--total-timesteps", 10, "--batch-size", 50, "--learning-rate", 0.5]
    optimizer = train("c51_jax", *flags)["optimizer"]
    update, _ = optimizer.update(jnp.float32([1e-4]), optimizer.init(jnp.zeros(1)))
    np.testing.assert_allclose(update, [-0.5 * 1e-4 / (1e-4 + 0.01 / 50)], rtol=1e-4)


@pytest.mark.slow
def test_it_learns_cartpole(train):
    flags = (
        "--total-timesteps 40000 --learning-starts 1000 --train-frequency 2 --learning-rate 1e-3 --eval-every 0".split()
    )
    run = train("c51_jax", *flags)["run"].runs[0]
    assert run.evaluator.last[1] > 60  # a random policy gets 22
