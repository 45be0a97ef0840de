"""c51_atari_jax.py: what is neither C51's (test_c51_jax.py) nor the frames' and the loop's (test_dqn_atari_jax.py): its
network and updates against the torch twin, its settings, and whole trainings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from conftest import definitions, documented_keys, rows
from pixel_probe import FakePool, use_fake_envpool
from test_dqn_atari_jax import SHORT, layers
from test_ppo_atari_envpool_jax import as_torch

from solorl.run.trainings import PolicyOfSeed

JAX, TORCH = definitions("c51_atari_jax"), definitions("c51_atari")
ATOMS = np.linspace(-2, 2, 7).astype(np.float32)


def twins(seed):
    """The same random weights for both: the parameters of JAX and the QNetwork of torch; 4 actions."""
    params = jax.jit(JAX["init_params"], static_argnums=(1, 2))(jax.random.PRNGKey(seed), 4, 7)
    params["head"]["weight"] *= 5  # so that the best actions differ
    network = TORCH["QNetwork"](4, torch.from_numpy(ATOMS))
    for name, layer in layers(network).items():
        bias = torch.tensor(np.asarray(params[name]["bias"]))
        layer.load_state_dict({"weight": as_torch(name, params[name]["weight"]), "bias": bias})
    return params, network


def test_one_update_is_that_of_the_torch_twin():
    """From the same weights on the same batches: loss, metrics and Adam with the settings of the files, twice."""
    (params, network), (target_params, target) = twins(0), twins(1)
    args, atoms = JAX["Args"](), jnp.asarray(ATOMS)
    optimizer, adam = (
        optimizer_of(args.learning_rate, eps=0.01 / args.batch_size)
        for optimizer_of in (optax.adam, lambda lr, eps: torch.optim.Adam(network.parameters(), lr=lr, eps=eps))
    )
    state = optimizer.init(params)

    @jax.jit
    def update(params, state, batch):
        inputs = params, target_params, batch, atoms, args.gamma
        losses, gradients = jax.value_and_grad(JAX["c51_loss"], has_aux=True)(*inputs)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, losses

    for seed in range(2):
        rng = np.random.default_rng(seed)
        obs, next_obs = rng.integers(0, 256, (2, 8, 4, 84, 84)).astype(np.uint8)
        columns = obs, rng.integers(4, size=8), np.sign(np.float32(rng.normal(size=8))), np.float32(rng.random(8) < 0.4)
        columns = *columns, next_obs
        params, state, (loss, metrics) = update(params, state, JAX["Batch"](*columns))
        batch = TORCH["Batch"](*map(torch.from_numpy, columns))
        want, want_metrics = TORCH["c51_loss"](network, target, batch, args.gamma)
        np.testing.assert_allclose(loss, want.item(), rtol=1e-4)
        assert metrics.keys() == want_metrics.keys()
        for name, value in metrics.items():
            np.testing.assert_allclose(value, want_metrics[name].item(), rtol=1e-4, atol=1e-5, err_msg=name)
        adam.zero_grad()
        want.backward()
        adam.step()
    for name, layer in layers(network).items():
        np.testing.assert_allclose(as_torch(name, params[name]["weight"]), layer.weight.detach(), atol=1e-4)
        np.testing.assert_allclose(params[name]["bias"], layer.bias.detach(), atol=1e-4)
    greedy = lambda params, obs: JAX["act"](params, obs, atoms)  # noqa: E731
    policy = PolicyOfSeed(greedy, jax.jit(greedy), lambda: params)  # hands over bytes
    action = policy(rng.integers(0, 256, (30, 4, 84, 84), np.uint8))
    assert action.shape == (30,) and policy(obs).tolist() == network.act(obs).tolist()


@pytest.mark.slow
def test_its_settings_are_those_of_the_paper(train, monkeypatch):
    """Of one short training: Adam's epsilon, the atoms, the logged keys."""
    use_fake_envpool(monkeypatch)
    v = train("c51_atari_jax", *SHORT, "--total-timesteps", 48, "--learning-rate", 0.5)
    update, _ = v["optimizer"].update(jnp.float32([1e-4]), v["optimizer"].init(jnp.zeros(1)))
    np.testing.assert_allclose(update, [-0.5 * 1e-4 / (1e-4 + 0.01 / 4)], rtol=1e-4)
    np.testing.assert_allclose(v["atoms"], np.linspace(-10, 10, 51), atol=1e-5)
    logged = {key for row in rows(v["run"].runs[0].dir) for key in row} - {"global_step", "wall_time"}
    assert logged == documented_keys("c51_atari_jax")


@pytest.mark.slow
def test_a_life_lost_in_the_step_of_the_time_limit_ends_the_return(train, monkeypatch):
    use_fake_envpool(monkeypatch)
    info = FakePool._info

    def with_lives(self, ids, reward, terminated):
        return info(self, ids, reward, terminated) | {"lives": 3 - self.elapsed[ids] // 4}

    monkeypatch.setattr(FakePool, "_info", with_lives)
    monkeypatch.setattr("solorl.envs.envpool.ATARI_STEPS", 4)
    v = train("c51_atari_jax", *SHORT, "--total-timesteps", 48)
    replay, overs = v["run"].trainings.of(0, "replay"), len(rows(v["run"].runs[0].dir, "charts/episodic_return"))
    assert overs >= 10 and replay.done.sum() == overs


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--v-min 3 --v-max 3", "--v-min less than --v-max"),
        ("--n-atoms 1", "--n-atoms must be 2 or more"),
        ("--buffer-size 9", "--buffer-size must be at least 10"),
        ("--env-id CartPole-v1", "use c51_jax.py for vector observations"),
    ],
)
def test_what_it_cannot_train_is_refused(flags, sentence, train, tmp_path):
    pytest.importorskip("envpool")
    train("c51_atari_jax", *flags.split(), code=2)
    assert train.out.count("\n") == 1 and sentence in train.out, train.out
    assert not (tmp_path / "runs").exists()
