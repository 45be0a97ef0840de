"""dqn_jax.py: its pure functions against brute force and its torch twin, its replay buffer, and whole trainings."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from conftest import copy_layers, definitions, rows
from jax.flatten_util import ravel_pytree

SCRIPTS = {name: definitions(name) for name in ("dqn_jax", "c51_jax")}
JAX, TORCH = SCRIPTS["dqn_jax"], definitions("dqn")
SMALL = "--total-timesteps 400 --learning-starts 100 --batch-size 16 --eval-episodes 2".split()


def twin(params, num_actions):
    """The torch network with the same weights."""
    network = TORCH["QNetwork"](len(params[0]["weight"]), num_actions)
    copy_layers(params, network.layers)
    return network


def batch(rng, n=32):
    obs, next_obs = rng.normal(size=(2, n, 3))
    columns = obs, rng.integers(4, size=n), rng.normal(size=n), rng.random(n) < 0.3, next_obs
    return [np.asarray(x, np.float32) for x in columns]


def test_loss_and_one_update_are_those_of_the_torch_twin():
    params, target_params = (JAX["init_params"](jax.random.PRNGKey(i), 3, 4) for i in range(2))
    network, target = twin(params, 4), twin(target_params, 4)
    vector, unravel = ravel_pytree(params)
    optimizer = optax.scale_by_adam()
    state, adam = optimizer.init(vector), torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(3):
        columns = batch(np.random.default_rng(0))
        loss_of = lambda vector, columns=columns: JAX["td_loss"](unravel(vector), target_params, *columns, 0.9)  # noqa: E731
        (loss, metrics), gradient = jax.value_and_grad(loss_of, has_aux=True)(vector)
        direction, state = optimizer.update(gradient, state)
        vector -= 0.01 * direction
        obs, action, *others = map(torch.from_numpy, columns)
        want, want_metrics = TORCH["td_loss"](network, target, obs, action.long()[:, None], *others, 0.9)
        np.testing.assert_allclose(loss, want.item(), rtol=1e-5)
        np.testing.assert_allclose(metrics, want_metrics[:2].numpy(), rtol=1e-4, atol=1e-5)
        adam.zero_grad()
        want.backward()
        adam.step()
    for layer, mine in zip(network.layers, unravel(vector), strict=True):
        np.testing.assert_allclose(mine["weight"].T, layer.weight.detach().numpy(), rtol=1e-4, atol=1e-5)


def iterations(count, capacity, env_id="CartPole-v1", name="dqn_jax", **settings):
    """The training after `count` iterations and all they reported, stacked."""
    script = SCRIPTS[name]
    args = script["Args"](env_id=env_id, batch_size=16, buffer_size=capacity, **settings)
    atoms = jnp.linspace(0, 100, 11)
    of_begin, of_iteration = ({"n_atoms": 11}, {"atoms": atoms}) if name == "c51_jax" else ({}, {})
    envs, optimizer = script["make_envs"](args.env_id, args.num_envs), optax.scale_by_adam()
    training = script["begin"](jax.random.PRNGKey(3), envs, optimizer, capacity, **of_begin)
    constant = {"envs": envs, "optimizer": optimizer, "num_iterations": count, "args": args, **of_iteration}
    one = jax.jit(partial(script["iteration"], **constant))
    history = [training]
    reports = []
    for _ in range(count):
        training, report = one(training)
        history.append(training)
        reports.append(report)
    return history, jax.tree.map(lambda *x: np.stack(x), *reports)


@pytest.mark.parametrize(("name", "num_envs"), [("dqn_jax", 1), ("dqn_jax", 2), ("c51_jax", 2)])
def test_the_buffer_holds_the_last_transitions_of_each_environment(name, num_envs):
    """Rows follow each other within an environment; at an end `next_obs` is where it led; old rows are overwritten."""
    count, steps = 30, 10 // num_envs
    history, (_, done, _, _) = iterations(count, 250, name=name, num_envs=num_envs, learning_starts=10_000)
    rows = np.asarray(history[-1].replay)
    order = np.roll(rows, -(count * 10 % 250), axis=0).reshape(25, steps, num_envs, -1)  # oldest first
    flat = order.reshape(-1, num_envs, rows.shape[1])
    ends = done[-25:].reshape(-1, num_envs)
    assert ends.sum() >= 5
    same = (flat[:-1, :, -4:] == flat[1:, :, :4]).all(-1)  # next_obs is the obs of the row after it ...
    np.testing.assert_array_equal(same, ~ends[:-1])  # ... but at ends
    np.testing.assert_array_equal(flat[..., 6 - 1] == 1, flat[..., 5] == 1)
    fallen = (np.abs(flat[..., -4]) > 2.4) | (np.abs(flat[..., -2]) > 12 * 2 * np.pi / 360)
    np.testing.assert_array_equal(flat[..., 6] == 1, fallen)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_time_limit_is_not_stored_as_an_end(name):
    history, (_, done, _, _) = iterations(25, 250, name=name, env_id="MountainCar-v0", learning_starts=10_000)
    rows = np.asarray(history[-1].replay)  # [obs 2 | action | reward | done | next_obs 2]
    assert done.sum() == 1 and (rows[:, 4] == 0).all() and (rows[:, 3] == -1).all()


@pytest.mark.parametrize("name", SCRIPTS)
def test_updates_begin_behind_learning_starts_and_come_every_train_frequency_steps(name):
    for num_envs in (1, 4, 20):
        history, (*_, metrics) = iterations(20, 400, name=name, num_envs=num_envs, learning_starts=100)
        steps = num_envs * max(1, 10 // num_envs)
        total = steps * 20
        assert metrics[:, 2].sum() == total // 10 - 100 // 10 == int(history[-1].optimizer.count)
        first = int(np.argmax(metrics[:, 2] > 0))
        assert first * steps < 110 <= (first + 1) * steps


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_target_network_is_the_q_network_of_the_last_move(name):
    history, _ = iterations(30, 400, name=name, learning_starts=20, target_network_frequency=100)
    for i in range(1, 31):
        moved = i - i % 10
        for x, y in zip(jax.tree.leaves(history[i].target_params), jax.tree.leaves(history[moved].params), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-7)
    half, _ = iterations(30, 400, name=name, learning_starts=20, target_network_frequency=100, tau=0.25)
    old, new, got = (ravel_pytree(x)[0] for x in (half[19].target_params, half[20].params, half[20].target_params))
    np.testing.assert_allclose(got, 0.75 * old + 0.25 * new, atol=1e-6)


@pytest.mark.parametrize("name", SCRIPTS)
def test_epsilon_falls_linearly_and_actions_are_random_as_often(name):
    envs, first = JAX["make_envs"]("CartPole-v1", 4), lambda obs: jnp.zeros(len(obs), int)  # the greedy action is 0
    state, obs = envs.reset(jax.random.PRNGKey(0))
    _, (_, action, _) = SCRIPTS[name]["explore"](first, envs, state, obs, jax.random.PRNGKey(1), 5_000, 0.3)
    assert np.mean(action) == pytest.approx(0.15, abs=0.01)
    _, (_, _, epsilon, _) = iterations(40, 400, name=name, exploration_fraction=0.5, start_e=0.9, end_e=0.1)
    np.testing.assert_allclose(epsilon, np.maximum(0.9 - 0.8 * np.arange(40) / 20, 0.1), rtol=1e-5)


@pytest.mark.parametrize("name", SCRIPTS)
def test_samples_are_uniform_over_what_is_stored_and_column_by_column(name):
    """A row of the buffer is [obs 4 | action | reward | done | next_obs 4]; each cell here says where it is."""
    replay = 100.0 * jnp.arange(50)[:, None] + jnp.arange(11)
    obs, *columns, next_obs = SCRIPTS[name]["sample"](replay, jax.random.PRNGKey(0), 20, 40_000, 4)
    row = np.asarray(obs[:, 0], int) // 100
    np.testing.assert_array_equal(np.concatenate([obs, np.stack(columns, 1), next_obs], 1), replay[row])
    counts = np.bincount(row, minlength=50)
    assert (counts[20:] == 0).all() and abs(counts[:20] - 2000).max() < 250


def test_it_logs_what_its_twin_logs(train):
    flags = [*SMALL, "--total-timesteps", 2000, "--eval-every", 350]
    run = train("dqn_jax", *flags)["run"].runs[0]
    twin = train("dqn", *flags)["run"]
    keys = [{key for row in rows(r.dir) for key in row} for r in (run, twin)]
    assert keys[0] == keys[1]
    evaluated = [[row["global_step"] for row in rows(r.dir, "eval/episodic_return")] for r in (run, twin)]
    assert evaluated[0] == evaluated[1] and len(evaluated[0]) > 1  # also where a chunk must end for it


def test_it_learns_cartpole(train):
    flags = (
        "--total-timesteps 60000 --learning-starts 1000 --train-frequency 2 --learning-rate 1e-3 --eval-every 0".split()
    )
    variables = train("dqn_jax", *flags, "--num-seeds", 2)
    means = [run.last_evaluation[1] for run in variables["run"].runs]
    assert min(means) > 100, means  # a random policy gets 22
