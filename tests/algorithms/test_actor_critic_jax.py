"""DDPG, TD3 and SAC in JAX: whole updates against the torch twins, replay, schedules, bounds, metrics, learning."""

from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from conftest import copy_layers, definitions, linear_layers, rows
from safetensors.numpy import load_file

from solorl.envs.classic import DYNAMICS, Dynamics
from solorl.envs.open import open_envs
from solorl.run.trainings import Trainings

NAMES = ["ddpg", "td3", "sac"]
JAX = {name: definitions(f"{name}_continuous_action_jax") for name in NAMES}
TORCH = {name: definitions(f"{name}_continuous_action") for name in NAMES}
LOW, HIGH = np.float32([-3, 0]), np.float32([1, 10])  # asymmetric, another range in each dimension


# ---------------------------------------------------------------------- against the torch twins
def critics(critic):
    """The nets of a critic with their torch layers: one, or a pair."""
    return [critic["q1"], critic["q2"]] if isinstance(critic, dict) else [critic]


def torch_critics(critic):
    return [critic.q1, critic.q2] if hasattr(critic, "q1") else [critic.q]


def twins(name, seed=0):
    """Actor and critic of JAX, and the modules of torch with the same weights."""
    actor, critic = JAX[name]["init_params"](jax.random.PRNGKey(seed), 3, 2)
    modules = TORCH[name]["Actor"](3, 2), TORCH[name]["Critic"](3, 2)
    copy_layers(actor, modules[0].net)
    for mine, layers in zip(critics(critic), torch_critics(modules[1]), strict=True):
        copy_layers(mine, layers)
    return actor, critic, *modules


@pytest.mark.parametrize("ratio", [0.25, 1.0, 3.0])
def test_as_many_updates_are_due_as_in_torch(ratio):
    """First and last number of each iteration; none where the buffer holds too little."""
    args = SimpleNamespace(utd_ratio=ratio, num_envs=3, learning_starts=7)
    of_jax, of_torch = (each["sac"]["due_updates"] for each in (JAX, TORCH))
    for step in range(3, 40, 3):
        for enough in (True, False):
            first, last = map(int, of_jax(args, jnp.int32(step), enough))
            assert range(first, last) == of_torch(args, step, enough)


def random_batch(name, n=16):
    rng = np.random.default_rng(0)
    obs, next_obs = rng.normal(size=(2, n, 3))
    columns = obs, rng.uniform(-1, 1, (n, 2)), rng.normal(size=n), rng.random(n) < 0.3, next_obs
    columns = [np.asarray(x, np.float32) for x in columns]
    return JAX[name]["Batch"](*columns), TORCH[name]["Batch"](*map(torch.from_numpy, columns)), rng


def same(params, layers):
    for mine, layer in zip(params, linear_layers(layers), strict=True):
        np.testing.assert_allclose(mine["weight"].T, layer.weight.detach(), rtol=1e-4, atol=2e-6)
        np.testing.assert_allclose(mine["bias"], layer.bias.detach(), rtol=1e-4, atol=2e-6)


def descend(loss_of, module, optimizer, *inputs):
    """One gradient step of torch, written out; its metrics as numbers."""
    loss, metrics, *_ = loss_of(module, *inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {key: value.item() for key, value in metrics.items()}


def nothing_learned(name, autotune):
    """Sums of no metrics, with how many there were: of the critic and of the actor."""
    single, pair = ("qf1_values", "qf1_loss"), ("qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss")
    actor = ("actor_loss", *(("entropy",) if name == "sac" else ()), *(("alpha_loss",) if autotune else ()))
    return tuple(({f"losses/{key}": 0.0 for key in each}, 0) for each in (single if name == "ddpg" else pair, actor))


@pytest.mark.parametrize(
    ("name", "autotune"),
    [
        ("sac", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("ddpg", False), ("td3", False), ("sac", False))),
    ],
)
def test_updates_are_those_of_the_torch_twin(name, autotune):
    """Two updates, of which the first moves the actor: weights, targets, temperature and metrics agree."""
    here, there, sac = JAX[name], TORCH[name], name == "sac"
    actor, critic, t_actor, t_critic = twins(name)
    target_actor, target_critic, t_target_actor, t_target_critic = twins(name, seed=1)
    args = here["Args"](tau=0.1, autotune=autotune) if sac else here["Args"](tau=0.1)
    rates = (args.policy_lr, args.q_lr, args.q_lr) if sac else (args.learning_rate,) * 2
    setup = here["Setup"](args, None, *map(optax.adam, rates))
    actor_adam, critic_adam = (
        torch.optim.Adam(m.parameters(), lr=x) for m, x in zip((t_actor, t_critic), rates[:2], strict=True)
    )
    log_alpha = jnp.float32(0.3)
    states = setup.actor_optimizer.init(actor), setup.critic_optimizer.init(critic)
    if sac:
        temperature = there["Temperature"](float(np.exp(np.float32(0.3))))
        alpha_adam = torch.optim.Adam(temperature.parameters(), lr=args.q_lr)
        alpha_state = setup.alpha_optimizer.init(log_alpha)
        learner = here["Learner"](actor, critic, target_critic, log_alpha, *states, alpha_state)
    else:
        learner = here["Learner"](actor, critic, target_actor, target_critic, *states)
    learn, learned = jax.jit(partial(here[f"learn_{name}"], setup=setup)), nothing_learned(name, autotune)
    wanted, actor_steps = {}, []
    for update in range(2):
        batch, t_batch, rng = random_batch(name)
        noise = rng.normal(size=(3, 16, 2)).astype(np.float32) * (1 if sac else 0.5)
        extra = {"ddpg": (), "td3": (noise[0],), "sac": (noise,)}[name]
        learner, learned = learn(update, learner, learned, batch, *extra)
        noise = torch.from_numpy(noise)
        inputs = {
            "ddpg": (t_target_critic, t_target_actor, t_batch, args.gamma),
            "td3": (t_target_critic, t_target_actor, t_batch, noise[0], 0.5, args.gamma),
            "sac": (t_target_critic, t_actor, temperature().detach() if sac else 0, t_batch, noise[0], args.gamma),
        }[name]
        for key, value in descend(there[f"{name}_critic_loss"], t_critic, critic_adam, *inputs).items():
            wanted[key] = wanted.get(key, 0) + value
        for k in range((2 if sac else 1) * (update == 0)):
            inputs = (temperature().detach(), t_batch, noise[1 + k]) if sac else (t_batch,)
            actor_steps.append(descend(there[f"{name}_actor_loss"], t_actor, actor_adam, t_critic, *inputs))
            if autotune:
                entropy = torch.tensor(actor_steps[-1]["losses/entropy"])
                actor_steps[-1] |= descend(there["alpha_loss"], temperature, alpha_adam, entropy, -2)
        if sac or update == 0:
            there["soft_update"](t_target_critic, t_critic, 0.1)
        if not sac and update == 0:
            there["soft_update"](t_target_actor, t_actor, 0.1)
    (sums, count), (actor_sums, actor_count) = learned
    assert count == 2 and actor_count == len(actor_steps) == (2 if sac else 1)
    assert sums.keys() == wanted.keys() and actor_sums.keys() == actor_steps[0].keys()
    for key, value in sums.items():
        np.testing.assert_allclose(value, wanted[key], rtol=1e-4, atol=1e-5)
    for key, value in actor_sums.items():
        np.testing.assert_allclose(value, sum(step[key] for step in actor_steps), rtol=1e-4, atol=1e-5)
    same(learner.actor, t_actor.net)
    for mine, layers in zip(critics(learner.critic), torch_critics(t_critic), strict=True):
        same(mine, layers)
    for mine, layers in zip(critics(learner.target_critic), torch_critics(t_target_critic), strict=True):
        same(mine, layers)
    if sac:
        np.testing.assert_allclose(learner.log_alpha, temperature.log_alpha.detach(), rtol=1e-5)
    else:
        same(learner.target_actor, t_target_actor.net)


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_those_of_the_torch_twin_and_lie_in_their_range(name):
    actor, _, module, _ = twins(name)
    rng = np.random.default_rng(0)
    obs, noise = rng.normal(size=(50, 3)).astype(np.float32), rng.normal(size=(50, 2)).astype(np.float32)
    for z in (0.0, noise, 100 * noise):
        mine = JAX[name]["act"](actor, obs, z)
        np.testing.assert_allclose(mine, module.act(obs, z), rtol=1e-4, atol=1e-4)
        assert (np.abs(mine) <= 1).all()


def test_target_actions_are_smoothed_as_in_the_torch_twin():
    rng = np.random.default_rng(0)
    action, noise = rng.uniform(-1, 1, (50, 2)).astype(np.float32), rng.normal(size=(50, 2)).astype(np.float32)
    mine = JAX["td3"]["smoothed"](action, noise, 0.5)
    want = TORCH["td3"]["smoothed"](torch.from_numpy(action), torch.from_numpy(noise), 0.5)
    np.testing.assert_array_equal(mine, want)
    assert (np.abs(mine - action) <= 0.5 + 1e-6).all() and (mine == 1).any() and (mine == -1).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scaled_actions_are_those_of_scale_action_in_torch(dtype):
    """Asymmetric, tiny, huge, distant and equal bounds; at both ends exactly the bounds."""
    low = np.array([-3, 0, -1, -1e-20, 1e-6, -3e38, 999.99, -1e30, 2], dtype)
    high = np.array([1, 10, 1, 1e-19, 3e-6, 3e38, 1000.01, 1, 2], dtype)

    class Wide(gym.Env):
        observation_space = action_space = gym.spaces.Box(low, high, dtype=dtype)

    wrapper = TORCH["ddpg"]["ScaleAction"](Wide())
    action = np.random.default_rng(0).uniform(-1, 1, (200, len(low))).astype(np.float32)
    action[:4] = [[-1], [1], [0], [0.999999]]
    got = np.asarray(jax.jit(JAX["ddpg"]["scale_action"])(action, low, high))
    want = np.array([wrapper.action(x) for x in action])
    assert got.dtype == np.float32
    assert (got >= low.astype(np.float32)).all() and (got <= high.astype(np.float32)).all()
    largest = np.maximum(abs(low.astype(float)), abs(high.astype(float)))
    np.testing.assert_allclose(got / largest, want / largest, rtol=0, atol=3e-7)
    np.testing.assert_array_equal(got[0], low.astype(np.float32))
    np.testing.assert_array_equal(got[1], high.astype(np.float32))


# ---------------------------------------------------------------------- the loop
def iterations(name, count, batch_size=8, buffer_size=240, **settings):
    """The trainings after 0 to 60 iterations on Pendulum-v1 and that after `count`, and all they reported, stacked."""
    here = JAX[name]
    args = here["Args"](batch_size=batch_size, buffer_size=buffer_size, **settings)
    optimizers = [optax.adam(1e-4)] * (3 if name == "sac" else 2)
    setup = here["Setup"](args, open_envs("Pendulum-v1", args.num_envs), *optimizers)
    training = jax.jit(partial(here["begin"], setup=setup))(jax.random.PRNGKey(3))
    one, history, reports = jax.jit(partial(here["train_iteration"], setup=setup)), [training], []
    for i in range(count):
        training, report = one(training)
        history[i + 1 if i < 60 else 61 :] = [training]
        reports.append(report)
    return history, jax.tree.map(lambda *x: np.stack(x), *reports)


@cache
def played(name):
    """250 iterations of four environments; one update in each after the fifth, every third of which moves the actor."""
    extra = {"target_network_frequency": 4} if name == "sac" else {"exploration_noise": 0.05}
    settings = {"learning_starts": 20, "num_envs": 4, "utd_ratio": 0.25, "policy_frequency": 3, "tau": 0.5}
    return iterations(name, 250 if name == "ddpg" else 60, **settings, **extra)


def count_of(optimizer_state):
    return int(optimizer_state[0].count)


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("utd_ratio", [0.25, 2.0])
def test_the_number_of_gradient_steps_is_the_ratio_times_the_environment_steps(utd_ratio):
    """Since learning_starts; and there are none before the buffer holds a batch."""
    if utd_ratio == 0.25:
        (*_, last), (_, _, (of_critic, of_actor)) = played("ddpg")
        assert of_critic[1].tolist() == [0] * 5 + [1] * 245 and of_actor[1].sum() == 82
    else:
        settings = {"learning_starts": 2, "utd_ratio": utd_ratio, "policy_frequency": 5}
        (*_, last), (_, _, (of_critic, of_actor)) = iterations("ddpg", 12, **settings)
        assert of_critic[1].tolist() == [0] * 7 + [2] * 5 and of_actor[1].sum() == 2  # updates 10 to 19
        assert not of_critic[0]["losses/qf1_loss"][:7].any() and of_critic[0]["losses/qf1_loss"][7:].all()
    assert count_of(last.learner.critic_optimizer_state) == of_critic[1].sum()
    assert count_of(last.learner.actor_optimizer_state) == of_actor[1].sum()


@pytest.mark.slow
def test_the_buffer_holds_the_last_transitions_of_each_environment():
    """More than an episode of Pendulum's 200 steps: a time limit is not an end, and next_obs is where it led."""
    history, (reward, done, _) = iterations("ddpg", 260, learning_starts=10_000, num_envs=2)
    shape = (120, 2)  # what is kept, oldest first
    replay = history[-1].replay
    stored = jax.tree.map(lambda x: np.roll(x, -(520 % 240), axis=0).reshape(*shape, *x.shape[1:]), replay)
    ends = done[-120:]
    assert ends.sum() == 2 and (stored.done == 0).all()
    np.testing.assert_allclose(stored.reward, reward[-120:])
    together = (stored.next_obs[:-1] == stored.obs[1:]).all(-1)  # next_obs is the obs of the next transition ...
    np.testing.assert_array_equal(together, ~ends[:-1])  # ... except at ends
    counts = np.histogram(stored.action, bins=4, range=(-1, 1))[0]  # uniform before learning
    assert counts.sum() == 240 and counts.min() > 35


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddpg", "sac"])
def test_training_acts_by_the_present_policy_with_its_noise(name):
    """After `learning_starts` a stored action is that of the weights before the step, moved by the policy's noise."""
    z = []
    for before, after in pairwise(played(name)[0][5:61]):
        rows = slice(4 * int(before.iteration), 4 * int(after.iteration))  # the buffer is not full yet
        action, actor = np.asarray(after.replay.action)[rows, 0], before.learner.actor
        if name == "sac":
            mean, log_std = np.asarray(JAX[name]["mlp"](actor, before.obs)).T
            z.append((np.arctanh(np.clip(action, -0.999, 0.999)) - mean) / np.exp(3.5 * np.tanh(log_std) - 1.5))
        else:
            policy = np.asarray(JAX[name]["act"](actor, before.obs))[:, 0]
            assert (abs(policy) < 0.7).all()  # far from the bounds, which cut the noise
            z.append((action - policy) / 0.05)
    z = np.array(z)  # (55, 4)
    assert abs(z.mean()) < 0.25 and 0.85 < z.std() < 1.15
    assert abs(np.corrcoef(z[1:].ravel(), z[:-1].ravel())[0, 1]) < 0.25  # new noise at every step
    assert abs(np.corrcoef(z.T) - np.eye(4)).max() < 0.5  # and in each environment


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddpg", "td3", "sac"])
def test_the_actor_moves_every_policy_frequency_updates(name):
    """As many steps in a row as were left out in SAC, else one, and then the targets move with it."""
    history, (_, _, (of_critic, of_actor), *_) = played(name)
    learners = [training.learner for training in history[5:61]]  # before and after each of 55 updates
    assert of_critic[1][:60].tolist() == [0] * 5 + [1] * 55 and equal(history[0].learner, history[5].learner)
    for update, (old, new) in enumerate(pairwise(learners)):
        steps = (3 if name == "sac" else 1) if update % 3 == 0 else 0
        assert count_of(new.actor_optimizer_state) - count_of(old.actor_optimizer_state) == steps
        assert of_actor[1][5 + update] == steps
        assert equal(old.actor, new.actor) == (steps == 0)
        moves = update % 4 == 0 if name == "sac" else steps > 0
        for target, online in [("target_critic", "critic")] + [("target_actor", "actor")] * (name != "sac"):
            before, now, after = getattr(old, target), getattr(new, online), getattr(new, target)
            wanted = jax.tree.map(lambda x, y: (x + y) / 2, before, now) if moves else before
            for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_allclose(x, y, atol=1e-7)


@pytest.mark.slow
def test_the_temperature_is_learned_or_begins_as_given():
    alpha = played("sac")[1][3]
    assert (alpha[:5] == 1).all() and len(set(alpha[5:].tolist())) == 19  # it moves with the actor
    begin, envs, adam = JAX["sac"]["begin"], open_envs("Pendulum-v1", 1), optax.adam(1e-3)
    for given, wanted in ((0.2, 0.2), (0.0, 1e-30)):  # 0 has no logarithm
        args = JAX["sac"]["Args"](autotune=False, alpha=given, buffer_size=8)
        training = jax.jit(partial(begin, setup=JAX["sac"]["Setup"](args, envs, adam, adam, adam)))(
            jax.random.PRNGKey(0)
        )
        np.testing.assert_allclose(jnp.exp(training.learner.log_alpha), wanted, rtol=1e-4)


# ---------------------------------------------------------------------- whole trainings
class Aim(gym.Env):
    """One step; the best action stands at a quarter and three quarters of the two ranges for observation 1, at three
    quarters and a quarter for -1: reward 0, and -2 in the opposite corners. Beyond the bounds the reward is NaN."""

    observation_space, action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32), gym.spaces.Box(LOW, HIGH)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.np_random.choice(np.float32([-1, 1]), 1)
        return self.obs, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.obs, aim_reward(self.obs[None], action[None])[0].item(), True, False, {}


def aim_reward(obs, action):
    share = (action - LOW) / (HIGH - LOW)
    within = ((action >= LOW) & (action <= HIGH)).all(1)
    return jnp.where(within, -4 * ((share - 0.5 - 0.25 * obs * jnp.array([-1, 1])) ** 2).sum(1), jnp.nan)


@pytest.fixture
def aim(monkeypatch):
    """The id of `Aim`, in Gymnasium and in JAX."""
    dynamics = Dynamics(
        start=lambda key, num_envs: jax.random.choice(key, jnp.array([-1.0, 1.0]), (num_envs, 1)),
        step=lambda obs, action: (obs, aim_reward(obs, action), jnp.ones(len(obs), bool)),
    )
    monkeypatch.setitem(DYNAMICS, "Aim-v0", dynamics)
    monkeypatch.setitem(gym.registry, "Aim-v0", gym.envs.registration.EnvSpec("Aim-v0", Aim, max_episode_steps=9))
    return "Aim-v0"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_learns_where_to_aim_within_asymmetric_bounds(name, train, solo, aim):
    """No environment, of training or of evaluation, sees an action beyond its bounds; all is logged and saved."""
    flags = "--total-timesteps 1000 --num-envs 2 --learning-starts 200 --batch-size 64 --policy-frequency 1".split()
    rates = ["--policy-lr", 0.002, "--q-lr", 0.002] if name == "sac" else ["--learning-rate", 0.002]
    flags = ["--env-id", aim, *flags, *rates, "--tau", 0.2, "--eval-every", 0]
    v = train(f"{name}_continuous_action_jax", *flags)
    run, replay = v["run"].runs[0], v["run"].trainings.of(0).replay
    action = np.asarray(replay.action)
    assert (np.abs(action) <= 1).all()
    assert (action[:200].min(0) < -0.9).all() and (action[:200].max(0) > 0.9).all()  # all of the range
    share = (action + 1) / 2  # as the environment saw it
    wanted = -4 * ((share - 0.5 - 0.25 * np.asarray(replay.obs) * [-1, 1]) ** 2).sum(1)
    np.testing.assert_allclose(replay.reward, wanted, atol=1e-5)
    assert run.evaluator.last[1] > -0.05  # half a range away: -1, at random: -0.8

    small = ["--total-timesteps", 240, "--eval-episodes", 1]
    twin = train(f"{name}_continuous_action", *flags, *small)["run"]
    assert {key for row in rows(run.dir) for key in row} == {key for row in rows(twin.dir) for key in row}
    assert load_file(run.dir / "model_last.safetensors")["actor.0.weight"].shape == (1, 256)
    code, out, err = solo("play", run.dir, "--episodes", 3)
    assert code == 0 and "over 3 greedy episodes" in out and "Aim-v0: -0.0" in out, out + err


@pytest.mark.slow
def test_a_loaded_actor_takes_the_place_of_the_actor_alone():
    """It is a field of a field of the training."""
    training = played("td3")[0][20]
    trainings = Trainings(lambda key: training, [jax.random.PRNGKey(0)], side_by_side=False)
    before = trainings.of(0)
    zero = jax.tree.map(jnp.zeros_like, before.learner.actor)
    trainings.put(0, "learner.actor", zero)
    after = trainings.of(0)
    assert equal(after.learner.actor, zero) and equal(trainings.of(0, "learner.actor"), zero)
    assert equal(after._replace(learner=after.learner._replace(actor=before.learner.actor)), before)


def test_wrong_input_is_one_sentence(train, aim, monkeypatch):
    small = ["--env-id", aim, "--learning-starts", 10, "--batch-size", 100, "--total-timesteps"]
    for name in NAMES:
        train(f"{name}_continuous_action_jax", *small, 101, "--num-envs", 3, code=2)  # 99 steps in whole iterations
        assert "--batch-size must be at most 99 by --buffer-size and --total-timesteps" in train.out
    monkeypatch.setattr(Aim, "action_space", gym.spaces.Box(LOW, np.float32([1, np.inf])))
    for name in NAMES:
        train(f"{name}_continuous_action_jax", *small, 200, code=2)
        assert "Aim-v0 has actions without finite bounds" in train.out and train.out.count("\n") == 1
