"""dqn_jax.py: its pure functions against brute force and its torch twin, its replay buffer, and whole trainings; for
c51_jax.py, which has the same loop, what could differ."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from conftest import copy_layers, definitions, linear_layers, rows

from solorl.envs.open import open_envs

SCRIPTS = {name: definitions(name) for name in ("dqn_jax", "c51_jax")}
JAX, TORCH = SCRIPTS["dqn_jax"], definitions("dqn")
SMALL = "--total-timesteps 400 --learning-starts 100 --batch-size 16 --eval-episodes 2".split()


def twin(params, num_actions):
    """The torch network with the same weights."""
    network = TORCH["QNetwork"](len(params[0]["weight"]), num_actions)
    copy_layers(params, network.net)
    return network


def random_batches(n=32):
    """The same transitions for both."""
    rng = np.random.default_rng(0)
    obs, next_obs = rng.normal(size=(2, n, 3)).astype(np.float32)
    columns = obs, rng.integers(4, size=n), rng.normal(size=n), rng.random(n) < 0.3, next_obs
    columns = [x.astype(np.float32) if x.dtype != int else x for x in columns]
    return JAX["Batch"](*columns), TORCH["Batch"](*map(torch.from_numpy, columns))


@pytest.mark.slow
def test_loss_and_one_update_are_those_of_the_torch_twin():
    params, target_params = (JAX["init_params"](jax.random.PRNGKey(i), 3, 4) for i in range(2))
    network, target = twin(params, 4), twin(target_params, 4)
    optimizer = optax.adam(0.01)
    state, adam = optimizer.init(params), torch.optim.Adam(network.parameters(), lr=0.01)
    batch, t_batch = random_batches()
    for _ in range(3):
        (loss, metrics), gradients = jax.value_and_grad(JAX["td_loss"], has_aux=True)(params, target_params, batch, 0.9)
        updates, state = optimizer.update(gradients, state)
        params = optax.apply_updates(params, updates)
        want, want_metrics = TORCH["td_loss"](network, target, t_batch, 0.9)
        np.testing.assert_allclose(loss, want.item(), rtol=1e-5)
        assert metrics.keys() == want_metrics.keys()
        for key, value in metrics.items():
            np.testing.assert_allclose(value, want_metrics[key].item(), rtol=1e-4, atol=1e-5)
        adam.zero_grad()
        want.backward()
        adam.step()
    for layer, mine in zip(linear_layers(network.net), params, strict=True):
        np.testing.assert_allclose(mine["weight"].T, layer.weight.detach().numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(mine["bias"], layer.bias.detach().numpy(), rtol=1e-4, atol=1e-5)


def slow(values):
    """Parameters that are left to the second tier: the body is the same in both files."""
    return pytest.param(*values, marks=pytest.mark.slow)


def begun(name, count, env_id="CartPole-v1", batch_size=16, **settings):
    """The training before its first iteration, and one iteration as a compiled function."""
    script = SCRIPTS[name]
    atoms = {"n_atoms": 11} if name == "c51_jax" else {}
    args = script["Args"](env_id=env_id, batch_size=batch_size, **atoms, **settings)
    atoms = [jnp.linspace(0, 100, 11)] if name == "c51_jax" else []
    setup = script["Setup"](args, open_envs(args.env_id, args.num_envs), optax.adam(1e-3), count, *atoms)
    training = jax.jit(partial(script["begin"], setup=setup))(jax.random.PRNGKey(3))
    return training, jax.jit(partial(script["train_iteration"], setup=setup))


def iterations(name, count, **settings):
    """The trainings after 0 to `count` iterations and all they reported, stacked."""
    training, one = begun(name, count, **settings)
    history, reports = [training], []
    for _ in range(count):
        training, report = one(training)
        history.append(training)
        reports.append(report)
    return history, jax.tree.map(lambda *x: np.stack(x), *reports)


@pytest.mark.parametrize(("name", "num_envs"), [("dqn_jax", 2), *map(slow, [("dqn_jax", 1), ("c51_jax", 2)])])
def test_the_buffer_holds_the_last_transitions_of_each_environment(name, num_envs):
    """They follow each other within an environment; at an end `next_obs` is where it led; the oldest are gone."""
    settings = {"buffer_size": 250, "num_envs": num_envs, "learning_starts": 10_000}
    history, (_, done, *_) = iterations(name, 30, **settings)
    replay = jax.tree.map(lambda x: np.roll(x, -(300 % 250), axis=0), history[-1].replay)  # oldest first
    obs, action, reward, over, next_obs = (x.reshape(-1, num_envs, *x.shape[1:]) for x in replay)
    ends = done[-25:].reshape(-1, num_envs)
    assert ends.sum() >= 5 and action.dtype == np.int32 and set(action.ravel()) == {0, 1} and (reward == 1).all()
    same = (next_obs[:-1] == obs[1:]).all(-1)  # next_obs is the obs of the next transition ...
    np.testing.assert_array_equal(same, ~ends[:-1])  # ... except at ends
    fallen = (np.abs(next_obs[..., 0]) > 2.4) | (np.abs(next_obs[..., 2]) > 12 * 2 * np.pi / 360)
    np.testing.assert_array_equal(over, fallen)


def test_a_time_limit_is_not_stored_as_an_end():
    history, (_, done, *_) = iterations("dqn_jax", 25, env_id="MountainCar-v0", buffer_size=250, learning_starts=10_000)
    replay = history[-1].replay
    assert done.sum() == 1 and (replay.done == 0).all() and (replay.reward == -1).all()


@pytest.mark.parametrize(("name", "num_envs"), [("dqn_jax", 20), *map(slow, [("dqn_jax", 1), ("c51_jax", 4)])])
def test_gradient_steps_begin_after_learning_starts_and_come_every_train_frequency_steps(name, num_envs):
    history, (*_, sums, count) = iterations(name, 20, num_envs=num_envs, learning_starts=100, buffer_size=400)
    steps = num_envs * max(1, 10 // num_envs)
    total = steps * 20
    assert count.sum() == total // 10 - 100 // 10 == int(history[-1].optimizer_state[0].count)
    first = int(np.argmax(count > 0))
    assert first * steps < 110 <= (first + 1) * steps
    np.testing.assert_array_equal(sums["losses/td_loss"] > 0, count > 0)


def test_the_target_network_is_the_q_network_of_the_last_move():
    settings = {"learning_starts": 20, "target_network_frequency": 100, "buffer_size": 400}
    history, _ = iterations("dqn_jax", 30, **settings)
    for i in range(1, 31):
        moved = i - i % 10
        for x, y in zip(jax.tree.leaves(history[i].target_params), jax.tree.leaves(history[moved].params), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-7)
    quarter, _ = iterations("dqn_jax", 20, **settings, tau=0.25)
    trees = quarter[19].target_params, quarter[20].params, quarter[20].target_params
    for old, new, got in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_allclose(got, 0.75 * old + 0.25 * new, atol=1e-6)


@pytest.mark.parametrize("name", ["dqn_jax", pytest.param("c51_jax", marks=pytest.mark.slow)])
def test_epsilon_falls_linearly_and_actions_are_random_as_often(name):
    """With a network whose greedy action is 0: half of the random actions are 1."""
    settings = {"num_envs": 4, "train_frequency": 2_000, "learning_starts": 10**6, "buffer_size": 2_000}
    training, one = begun(name, 40, **settings, exploration_fraction=0.5, start_e=0.9, end_e=0.1)
    *hidden, last = training.params
    bias = jnp.zeros_like(last["bias"]).reshape(2, -1).at[0, -1].set(50.0).ravel()  # of C51: the largest atom
    training = training._replace(params=[*hidden, {"weight": 0 * last["weight"], "bias": bias}])
    for i in range(0, 40, 4):
        _, (_, _, epsilon, *_) = after = one(training._replace(iteration=jnp.int32(i)))
        np.testing.assert_allclose(epsilon, max(0.9 - 0.8 * i / 20, 0.1), rtol=1e-5)
        assert np.mean(after[0].replay.action) == pytest.approx(float(epsilon) / 2, abs=0.04)


def test_samples_are_uniform_over_what_is_stored_and_field_by_field():
    """Each number here says where it stands: 100 times the transition and its place in it."""
    first = 100 * jnp.arange(50)
    obs, next_obs = first[:, None] + jnp.arange(3.0), first[:, None] + jnp.arange(6.0, 9.0)
    replay = JAX["Batch"](obs, first + 3, first + 4.0, first + 5.0, next_obs)
    got = JAX["sample"](replay, jax.random.PRNGKey(0), 20, 40_000)
    row = np.asarray(got.action) // 100
    for stored, drawn in zip(replay, got, strict=True):
        np.testing.assert_array_equal(drawn, stored[row])
    counts = np.bincount(row, minlength=50)
    assert (counts[20:] == 0).all() and abs(counts[:20] - 2000).max() < 250


def test_inserted_transitions_go_over_the_oldest_ones():
    """Also those of two environments, which come as (num_steps, num_envs, ...), step by step."""
    replay = JAX["Batch"](jnp.zeros((5, 2)), jnp.zeros(5, jnp.int32), jnp.zeros(5), jnp.zeros(5), jnp.zeros((5, 2)))
    for inserted in (0, 4):
        number = inserted + jnp.arange(4).reshape(2, 2)
        obs = jnp.stack([number, -number], 2) * 1.0
        replay = JAX["insert"](replay, JAX["Batch"](obs, number, 10.0 * number, number > 3, obs + 0.5), inserted)
    number = np.array([5, 6, 7, 3, 4])
    np.testing.assert_array_equal(replay.action, number)
    np.testing.assert_array_equal(replay.reward, 10 * number)
    np.testing.assert_array_equal(replay.done, number > 3)
    np.testing.assert_array_equal(replay.obs, np.stack([number, -number], 1))
    np.testing.assert_array_equal(replay.next_obs, replay.obs + 0.5)
    assert [x.dtype for x in replay] == [np.float32, np.int32, np.float32, np.float32, np.float32]


def test_it_logs_what_its_twin_logs(train):
    flags = [*SMALL, "--total-timesteps", 2000, "--eval-every", 350]
    run = train("dqn_jax", *flags)["run"].runs[0]
    twin = train("dqn", *flags)["run"]
    keys = [{key for row in rows(r.dir) for key in row} for r in (run, twin)]
    assert keys[0] == keys[1]
    evaluated = [[row["global_step"] for row in rows(r.dir, "eval/episodic_return")] for r in (run, twin)]
    assert evaluated[0] == evaluated[1] and len(evaluated[0]) > 1  # also where a chunk must end for it


@pytest.mark.slow
def test_it_learns_cartpole(train):
    flags = (
        "--total-timesteps 60000 --learning-starts 1000 --train-frequency 2 --learning-rate 1e-3 --eval-every 0".split()
    )
    variables = train("dqn_jax", *flags, "--num-seeds", 2)
    means = [run.evaluator.last[1] for run in variables["run"].runs]
    assert min(means) > 100, means  # a random policy gets 22
