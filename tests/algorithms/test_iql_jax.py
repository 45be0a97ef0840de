"""IQL in JAX: a whole update against the torch twin, its data, and that it plays without them."""

import copy
import json
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from conftest import copy_layers, definitions, linear_layers, rows
from recorded import recorded

import solorl
from solorl.data.dataset import read
from solorl.run.trainings import Trainings

JAX, TORCH = definitions("iql_jax"), definitions("iql")
OBS = np.random.default_rng(0).normal(2, 3, (50, 3))


def twins():
    """The parameters of actor, critic and value in JAX, and the modules of torch with the same weights."""
    actor, critic, value = JAX["init_params"](jax.random.PRNGKey(0), *JAX["mean_and_std"](OBS), 2)
    actor["log_std"] = jnp.array([-0.5, 0.3])
    scale = TORCH["Standardize"](OBS)
    modules = TORCH["Actor"](scale, 2), TORCH["Critic"](scale, 2), TORCH["Value"](scale)
    modules[0].log_std.data = torch.tensor([-0.5, 0.3])
    nets = ((actor["net"], modules[0]), (critic["q1"], modules[1].q1), (critic["q2"], modules[1].q2))
    for params, net in (*nets, (value, modules[2])):
        copy_layers(params, getattr(net, "net", net))
    return (actor, critic, value), modules


def batches(n=40):
    rng = np.random.default_rng(1)
    obs, next_obs = rng.normal(2, 3, (2, n, 3))
    columns = obs, rng.uniform(-1, 1, (n, 2)), rng.normal(size=n), rng.random(n) < 0.3, next_obs
    columns = [np.asarray(x, np.float32) for x in columns]
    return JAX["Batch"](*columns), TORCH["Batch"](*map(torch.from_numpy, columns))


def same(params, net):
    """Equal up to 2 % of a step of Adam, except for a few weights: it enlarges the rounding of gradients near 0."""
    for mine, layer in zip(params, linear_layers(getattr(net, "net", net)), strict=True):
        assert (abs(mine["weight"].T - layer.weight.detach().numpy()) < 2e-5).mean() > 0.999
        assert (abs(mine["bias"] - layer.bias.detach().numpy()) < 2e-5).mean() > 0.999


def test_the_losses_are_those_of_the_torch_twin():
    """With their metrics; some weights are clipped."""
    (actor, critic, value), (t_actor, t_critic, t_value) = twins()
    batch, t_batch = batches()
    seen = batch._replace(**{name: JAX["standardize"](actor, getattr(batch, name)) for name in ("obs", "next_obs")})
    for name, inputs, t_inputs in (
        ("iql_value_loss", (value, critic, seen, 0.8), (t_value, t_critic, t_batch, 0.8)),
        ("iql_actor_loss", (actor, value, critic, seen, 4.0, 1.1), (t_actor, t_value, t_critic, t_batch, 4.0, 1.1)),
        ("iql_critic_loss", (critic, value, seen, 0.9), (t_critic, t_value, t_batch, 0.9)),
    ):
        (loss, metrics), (t_loss, t_metrics) = JAX[name](*inputs), TORCH[name](*t_inputs)
        np.testing.assert_allclose(loss, t_loss.item(), rtol=1e-4)
        assert metrics.keys() == t_metrics.keys()
        for key, number in metrics.items():
            np.testing.assert_allclose(number, t_metrics[key].item(), rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.slow
def test_an_update_is_that_of_the_torch_twin():
    """The losses, the metrics and the weights after one step of each network; some weights are clipped."""
    (actor, critic, value), (t_actor, t_critic, t_value) = twins()
    target, t_target = jax.tree.map(lambda x: 1.5 * x, critic), copy.deepcopy(t_critic)
    for parameter in t_target.parameters():
        parameter.data *= 1.5
    args = JAX["Args"](learning_rate=1e-3, gamma=0.9, tau=0.1, expectile=0.8, beta=4.0, max_weight=1.1)
    states = [optax.adam(1e-3).init(params) for params in (actor, critic, value)]
    batch, t_batch = batches()
    learner = JAX["Learner"](actor, critic, target, value, *states)
    learner, metrics = jax.jit(lambda *x: JAX["learn_iql"](*x, 5e-4, args))(learner, batch)

    wanted = {}
    for module, name, rate, inputs in (
        (t_value, "iql_value_loss", 1e-3, (t_target, t_batch, 0.8)),
        (t_actor, "iql_actor_loss", 5e-4, (t_value, t_target, t_batch, 4.0, 1.1)),
        (t_critic, "iql_critic_loss", 1e-3, (t_value, t_batch, 0.9)),
    ):
        loss, told = TORCH[name](module, *inputs)
        optimizer = torch.optim.Adam(module.parameters(), lr=rate)
        loss.backward()
        optimizer.step()
        wanted |= told
    TORCH["soft_update"](t_target, t_critic, 0.1)

    assert metrics.keys() == wanted.keys()
    for key, number in metrics.items():
        np.testing.assert_allclose(number, wanted[key].item(), rtol=1e-4, atol=1e-5, err_msg=key)
    assert 0.1 < metrics["losses/weight"] < 1.09
    same(learner.actor["net"], t_actor)
    np.testing.assert_allclose(learner.actor["log_std"], t_actor.log_std.detach(), rtol=1e-5)
    for name in ("mean", "std"):  # no step moves them
        np.testing.assert_array_equal(learner.actor[name], getattr(t_actor.scale, name))
    same(learner.value, t_value)
    for name in ("q1", "q2"):
        same(learner.critic[name], getattr(t_critic, name))
        same(learner.target_critic[name], getattr(t_target, name))


def test_actions_are_those_of_the_torch_twin_and_lie_in_their_range():
    (actor, *_), (module, *_) = twins()
    obs, noise = OBS.astype(np.float32), np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    for z in (0.0, noise, 100 * noise):
        mine = JAX["act"](actor, obs, z)
        np.testing.assert_allclose(mine, module.act(obs, z), rtol=1e-4, atol=1e-4)
        assert (np.abs(mine) <= 1).all()


def test_each_seed_draws_its_own_batches_from_the_same_data():
    """Uniformly and with replacement, others in each iteration; seeds side by side in one call (vmap) as alone."""
    data = jnp.arange(20)

    class Training(NamedTuple):
        key: jax.Array

    def iteration(training, data):
        draw, key = jax.random.split(training.key)
        return Training(key), JAX["sample"](data, draw, 20, 8)

    keys, found = [jax.random.PRNGKey(seed) for seed in (1, 2)], []
    for stacked in (False, True):
        trainings = Trainings(lambda key: Training(key), keys, stacked)
        if stacked:
            trainings.stack()
        train = trainings.train(iteration, 100, data)
        found.append(np.concatenate([train(range(n), [0, 1]) for n in (100, 40)], axis=1))
    one, other = found
    assert one.shape == (2, 140, 8) and np.array_equal(one, other)
    assert (one[0] == one[1]).mean() < 0.1 and (one[:, 1:] == one[:, :-1]).mean() < 0.1
    assert (np.abs(np.bincount(one.ravel(), minlength=20) / one.size - 1 / 20) < 0.02).all()


@pytest.mark.slow
def test_the_policy_plays_without_the_data(train, tmp_path, solo):
    """With mean and standard deviation of the data, which are in the model; the data set is read once for all seeds."""
    folder = shutil.copytree(recorded("Pendulum-v1"), tmp_path / "data")
    flags = "--env-id Pendulum-v1 --total-timesteps 100 --batch-size 16 --log-every 50 --save-every 50 --num-seeds 2"
    v = train("iql_jax", "--dataset", folder, *flags.split())
    shutil.rmtree(folder)
    obs = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    for run, training in zip(v["run"].runs, v["training"], strict=True):
        np.testing.assert_allclose(solorl.load(run.dir)(obs), v["act"](training.learner.actor, obs), atol=1e-6)
        np.testing.assert_array_equal(training.learner.actor["mean"], v["setup"].mean)
        config = json.loads((run.dir / "config.json").read_text())
        assert config["dataset_sha256"] == read(recorded("Pendulum-v1")).sha256
        rates = {row["global_step"]: row["charts/learning_rate"] for row in rows(run.dir, "charts/learning_rate")}
        cosines = {step: 1.5e-4 * (1 + np.cos(np.pi * (step - 1) / 100)) for step in (50, 100)}
        assert rates == pytest.approx(cosines, rel=1e-3)
    code, out, err = solo("play", run.dir, "--episodes", 1)
    assert code == 0 and "over 1 greedy episode" in out, out + err


def test_wrong_data_sets_are_refused_in_one_sentence(train):
    """And flags that need an environment to be stepped."""
    pendulum = ["--env-id", "Pendulum-v1", "--dataset"]
    for words, said in (
        (pendulum[:2], "--dataset must name a data set"),
        ((*pendulum, recorded("CartPole-v1")), "is of CartPole-v1"),
    ):
        train("iql_jax", *words, code=2)
        assert said in train.out and train.out.count("\n") == 1
