"""DDPG, TD3 and SAC in JAX: whole gradient steps against the torch twins, replay, schedules, metrics, resume."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from conftest import comparable, definitions, rows
from jax.flatten_util import ravel_pytree
from safetensors.numpy import load_file

NAMES = ["ddpg", "td3", "sac"]
JAX = {name: definitions(f"{name}_continuous_action_jax") for name in NAMES}
TORCH = {name: definitions(f"{name}_continuous_action") for name in NAMES}
LOW, HIGH = np.float32([-1, -3]), np.float32([2, 1])  # asymmetric, another range in each dimension
TARGET_ENTROPY = float(np.log(1.5) + np.log(2)) - 2  # half ranges; minus the number of dimensions
SMALL = "--total-timesteps 400 --learning-starts 100 --batch-size 16 --eval-episodes 2 --eval-every 200".split()


def flat(layers):
    """The parameters of a network of JAX in the order of the torch twin's vector: its Layers hold (fan_in, fan_out)."""
    nets = [layers] if isinstance(layers[0], dict) else layers
    parts = []
    for level in range(len(nets[0])):
        for key in ("weight", "bias"):
            parts.append(np.concatenate([np.ravel(net[level][key]) for net in nets]))
    return torch.from_numpy(np.concatenate(parts))


def twins(name, seed=0):
    """Actor and critic of JAX as layers, and the modules of torch with the same weights."""
    actor, critic = JAX[name]["init_params"](jax.random.PRNGKey(seed), 3, 2)
    modules = TORCH[name]["Actor"](3, LOW, HIGH), TORCH[name]["Critic"](3, 2)
    for module, layers in zip(modules, (actor, critic), strict=True):
        module.layers.vector.data.copy_(flat(layers))
    return actor, critic, *modules


def random_batch(n=16):
    rng = np.random.default_rng(0)
    obs, next_obs = rng.normal(size=(2, n, 3))
    columns = obs, rng.uniform(LOW, HIGH, (n, 2)), rng.normal(size=n), rng.random(n) < 0.3, next_obs
    return [np.asarray(x, np.float32) for x in columns], rng


def same(layers, module):
    np.testing.assert_allclose(flat(layers), module.layers.vector.detach(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_steps_are_those_of_the_torch_twin(name):
    """Two updates, of which the first moves the actor: weights, targets, temperature and metrics agree."""
    here, there = JAX[name], TORCH[name]
    actor, critic, t_actor, t_critic = twins(name)
    target_actor, target_critic, t_target_actor, t_target_critic = twins(name, seed=1)
    args = here["Args"](tau=0.1)
    optimizer, unravel = optax.scale_by_adam(), [ravel_pytree(x)[1] for x in (actor, critic)]
    a, c, ta, tc = (ravel_pytree(x)[0] for x in (actor, critic, target_actor, target_critic))
    lr = (args.policy_lr, args.q_lr) if name == "sac" else (args.learning_rate,) * 2
    adams = [torch.optim.Adam([m.layers.vector], lr=x) for m, x in zip((t_actor, t_critic), lr, strict=True)]
    log_alpha = torch.tensor(0.3)
    if name == "sac":
        adams.append(torch.optim.Adam([log_alpha], lr=args.q_lr))
        learner = here["Learner"](a, c, tc, jnp.float32(0.3), *(optimizer.init(x) for x in (a, c, jnp.float32(0))))
    else:
        learner = here["Learner"](a, c, ta, tc, optimizer.init(a), optimizer.init(c))
    for update in range(2):
        batch, rng = random_batch()
        noise = rng.normal(size=(3, 16, 2)).astype(np.float32) * (1 if name == "sac" else 0.5)
        extra = {"ddpg": (), "td3": (noise[0],), "sac": (noise,)}[name]
        step = here["learn" if name == "ddpg" else f"learn_{name}"]
        settings = {"unravel": unravel, "bounds": (LOW, HIGH), "optimizer": optimizer, "args": args}
        learner, (sums, counts) = jax.jit(partial(step, **settings))(update, learner, batch, *extra)
        tensors, noises = [torch.from_numpy(x) for x in batch], torch.from_numpy(noise)
        inputs = {
            "ddpg": (t_target_critic, t_target_actor, *tensors, args.gamma),
            "td3": (t_target_critic, t_target_actor, *tensors, noises[0], 0.5, args.gamma),
            "sac": (t_target_critic, t_actor, log_alpha, *tensors, noises[0], args.gamma),
        }[name]
        t_critic.layers.vector.grad, metrics = there["gradient"](there[f"{name}_critic_loss"], t_critic, *inputs)
        adams[1].step()
        np.testing.assert_allclose(sums[: len(metrics)], metrics.numpy(), rtol=1e-4, atol=1e-5)
        for k in range((2 if name == "sac" else 1) * (update == 0)):
            inputs = (log_alpha, tensors[0], noises[1 + k], TARGET_ENTROPY) if name == "sac" else (tensors[0],)
            loss_of = there[f"{name}_actor_loss"]
            t_actor.layers.vector.grad, metrics = there["gradient"](loss_of, t_actor, t_critic, *inputs)
            adams[0].step()
            if name == "sac":
                log_alpha.grad = metrics[2]
                adams[2].step()
        moved = [(t_target_critic, t_critic)] + [(t_target_actor, t_actor)] * (name != "sac")
        for target, online in moved if name == "sac" or update == 0 else ():
            target.layers.vector.data.lerp_(online.layers.vector.data, 0.1)
        actor_steps = (2 if name == "sac" else 1) * (update == 0)
        assert counts[0] == 1 and counts[-1] == actor_steps
    same(unravel[0](learner.actor), t_actor)
    same(unravel[1](learner.critic), t_critic)
    same(unravel[1](learner.target_critic), t_target_critic)
    if name == "sac":
        np.testing.assert_allclose(learner.log_alpha, log_alpha, rtol=1e-5)
    else:
        same(unravel[0](learner.target_actor), t_target_actor)


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_those_of_the_torch_twin_and_within_their_bounds(name):
    actor, _, module, _ = twins(name)
    rng = np.random.default_rng(0)
    obs, noise = rng.normal(size=(50, 3)).astype(np.float32), rng.normal(size=(50, 2)).astype(np.float32)
    for z in (0.0, noise, 100 * noise):
        mine = JAX[name]["act"](actor, obs, z, (LOW, HIGH))
        np.testing.assert_allclose(mine, module.act(obs, torch.as_tensor(z)), rtol=1e-4, atol=1e-4)
        assert (mine >= LOW).all() and (mine <= HIGH).all()


def iterations(name, count, capacity=300, learning_starts=20, **settings):
    """The trainings after 0 to `count` iterations on Pendulum-v1, and all they reported, stacked."""
    here = JAX[name]
    args = here["Args"](batch_size=8, learning_starts=learning_starts, **settings)
    envs, optimizer = here["make_envs"]("Pendulum-v1", args.num_envs), optax.scale_by_adam()
    bounds = envs.single_action_space.low, envs.single_action_space.high
    extra = {"alpha": 1.0} if name == "sac" else {}
    training = here["begin"](jax.random.PRNGKey(3), envs, optimizer, capacity, **extra)
    unravel = [ravel_pytree(x)[1] for x in here["init_params"](jax.random.PRNGKey(0), 3, 1)]
    one = partial(here["iteration"], envs=envs, unravel=unravel, bounds=bounds, optimizer=optimizer, args=args)
    one, history, reports = jax.jit(one), [training], []
    for _ in range(count):
        training, report = one(training)
        history.append(training)
        reports.append(report)
    return history, jax.tree.map(lambda *x: np.stack(x), *reports)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_envs", "utd_ratio"), [(1, 1.0), (3, 1.0), (1, 0.25), (2, 2.0)])
def test_the_number_of_gradient_steps_is_the_ratio_times_the_environment_steps(name, num_envs, utd_ratio):
    history, report = iterations(name, 24, num_envs=num_envs, utd_ratio=utd_ratio)
    total = int(utd_ratio * (24 * num_envs - 20))
    assert report[2][:, 1, 0].sum() == total == int(history[-1].learner.critic_adam.count)
    expected = -(-total // 2)  # every second one moves the actor, SAC's twice
    assert int(history[-1].learner.actor_adam.count) == expected * (2 if name == "sac" else 1)


@pytest.mark.parametrize(("name", "num_envs"), [("ddpg", 1), ("ddpg", 2), ("td3", 2), ("sac", 2)])
def test_the_buffer_holds_the_last_transitions_of_each_environment(name, num_envs):
    """More than an episode of Pendulum's 200 steps: a time limit is no end, and next_obs is where it led."""
    history, (reward, done, *_) = iterations(name, 260, capacity=240, learning_starts=10_000, num_envs=num_envs)
    stored = np.asarray(history[-1].replay)
    kept = 240 // num_envs
    order = np.roll(stored, -(260 * num_envs % 240), axis=0).reshape(kept, num_envs, -1)  # oldest first
    ends = done[-kept:]
    assert ends.sum() == num_envs and (order[..., 5] == 0).all()
    np.testing.assert_allclose(order[..., 4], reward[-kept:])
    together = (order[:-1, :, 6:] == order[1:, :, :3]).all(-1)  # next_obs is the obs of the row after it ...
    np.testing.assert_array_equal(together, ~ends[:-1])  # ... but at ends
    assert (np.abs(order[..., 3]) <= 2).all() and order[..., 3].std() > 1  # uniform within the bounds before learning


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_uniform_over_what_is_stored_and_column_by_column(name):
    """A row of the buffer is [obs 3 | action 2 | reward | done | next_obs 3]; each cell here says where it is."""
    replay = 100.0 * jnp.arange(50)[:, None] + jnp.arange(10)
    obs, action, reward, done, next_obs = JAX[name]["sample"](replay, jax.random.PRNGKey(0), 20, 40_000, 3)
    got = np.concatenate([obs, action, reward[:, None], done[:, None], next_obs], 1)
    np.testing.assert_array_equal(got, replay[np.asarray(reward).astype(int) // 100])
    counts = np.bincount(np.asarray(reward).astype(int) // 100, minlength=50)
    assert (counts[20:] == 0).all() and abs(counts[:20] - 2000).max() < 250


@pytest.mark.parametrize("name", NAMES)
def test_training_acts_by_the_present_policy_with_its_noise(name):
    """After `learning_starts` a stored action is that of the weights before the step, moved by the policy's noise."""
    history, _ = iterations(name, 300)
    z = []
    for before, after in pairwise(history[21:]):  # the buffer of 300 rows is not full yet
        action = np.asarray(after.replay)[int(before.iteration), 3] / 2  # in half ranges
        if name == "sac":
            mean, log_std = np.asarray(JAX[name]["mlp"](before.actor, before.obs))[0]
            z.append((np.arctanh(np.clip(action, -0.999, 0.999)) - mean) / np.exp(3.5 * np.tanh(log_std) - 1.5))
        else:
            policy = float(JAX[name]["act"](before.actor, before.obs, 0.0, (-2.0, 2.0))[0, 0]) / 2
            if abs(policy) < 0.5:  # elsewhere the bounds cut the noise
                z.append((action - policy) / 0.1)
    assert len(z) > 100 and abs(np.mean(z)) < 0.25 and 0.85 < np.std(z) < 1.15
    assert abs(np.corrcoef(z[1:], z[:-1])[0, 1]) < 0.25  # new noise at every step


@pytest.mark.parametrize(("name", "every"), [("td3", 3), ("sac", 3), ("sac", 1)])
def test_the_actor_moves_every_policy_frequency_updates(name, every):
    """As many steps in a row as were left out in SAC, one in TD3, whose targets move with it."""
    history, _ = iterations(name, 32, policy_frequency=every, tau=0.5)
    learners = [training.learner for training in history[20:]]  # before and after each of 12 updates
    for update, (old, new) in enumerate(pairwise(learners)):
        steps = (every if name == "sac" else 1) if update % every == 0 else 0
        assert int(new.actor_adam.count - old.actor_adam.count) == steps
        assert (old.actor != new.actor).any() == (steps > 0)
        assert (old.target_critic != new.target_critic).any() == (steps > 0 or name == "sac")


def test_the_temperature_stays_without_autotune_and_targets_move_when_due():
    history, report = iterations("sac", 32, autotune=False, target_network_frequency=4, tau=0.5)
    for update, (old, new) in enumerate(pairwise(history[20:])):
        old, new = old.learner, new.learner
        wanted = (old.target_critic + new.critic) / 2 if update % 4 == 0 else old.target_critic
        np.testing.assert_allclose(new.target_critic, wanted, atol=1e-7)
    assert (report[3] == 1).all() and int(history[-1].learner.alpha_adam.count) == 0  # begun with alpha 1
    moved = iterations("sac", 32)[1][3]
    assert (moved[:20] == 1).all() and len(set(moved[20:].tolist())) > 5


@pytest.mark.parametrize("name", NAMES)
def test_it_logs_what_its_twin_logs_and_is_reproducible(name, train, tmp_path):
    flags = ["--env-id", "Pendulum-v1", *SMALL]
    a = train(f"{name}_continuous_action_jax", *flags)["run"].runs[0]
    b = train(f"{name}_continuous_action_jax", *flags, runs_dir=tmp_path / "again")["run"].runs[0]
    twin = train(f"{name}_continuous_action", *flags)["run"]
    assert {key for row in rows(a.dir) for key in row} == {key for row in rows(twin.dir) for key in row}
    assert comparable(a.dir) == comparable(b.dir)
    assert load_file(a.dir / "model_last.safetensors")["actor.0.weight"].shape == (3, 256)
