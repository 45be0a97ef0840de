"""ppo_rnd_jax.py: its functions against its torch twin, what an iteration makes of them, and whole trainings."""

import shutil
from functools import partial
from itertools import pairwise

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import comparable, copy_layers, definitions, rows
from safetensors.numpy import load_file

from solorl.envs.interface import Step

JAX, TORCH = definitions("ppo_rnd_jax"), definitions("ppo_rnd")
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiles in half the time
SMALL = (
    "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 2 --eval-episodes 1 --warmup-rollouts 2 "
    "--learning-rate 0.01 --no-anneal-lr"
).split()


def as_torch(params):
    """The networks of torch with the weights of JAX: the modules that are trained."""
    agent, predictor = TORCH["Agent"](3, 4), TORCH["tanh_mlp"](3, 128, 128, 128, gain=1.0)
    copy_layers(params["actor"], agent.actor)
    copy_layers(params["critic"], agent.critic)
    copy_layers(params["predictor"], predictor)
    return torch.nn.ModuleDict({"agent": agent, "predictor": predictor})


# ---------------------------------------------------------------------- its functions and those of torch
def test_loss_and_gradient_are_those_of_the_torch_twin():
    """The sum of both value losses, and the error of the predictor where it is chosen."""
    rng, n = np.random.default_rng(0), 32
    params = jit(JAX["init_params"], static_argnums=(1, 2))(jax.random.PRNGKey(0), 3, 4)
    params["actor"][-1]["weight"] *= 100
    modules, number = as_torch(params), lambda *shape: np.float32(rng.normal(size=shape))
    batch = (number(n, 3), rng.integers(4, size=n), number(n) - 1.4, number(n), number(n, 2), number(n, 3))
    batch, chosen = (*batch, number(n, 128)), np.float32(rng.random(n) < 0.3)
    settings = {"clip_coef": 0.1, "vf_coef": 0.7, "ent_coef": 0.3}
    loss = partial(JAX["rnd_loss"], args=JAX["Args"](**settings))
    (got, metrics), gradients = jit(jax.value_and_grad(loss, has_aux=True))(params, JAX["Batch"](*batch), chosen)
    batch = TORCH["Batch"](*map(torch.from_numpy, batch))
    want, want_metrics = TORCH["rnd_loss"](modules, batch, torch.from_numpy(chosen), TORCH["Args"](**settings))
    want.backward()
    assert metrics.keys() == want_metrics.keys() and 0 < chosen.sum() < n
    for x, y in [(got, want), *((metrics[name], want_metrics[name]) for name in metrics)]:
        np.testing.assert_allclose(x, y.detach(), rtol=1e-5, atol=1e-5)
    for name, parameter in as_torch(gradients).named_parameters():
        np.testing.assert_allclose(
            parameter.detach(), modules.get_parameter(name).grad, rtol=1e-4, atol=1e-5, err_msg=name
        )


def test_statistics_and_intrinsic_returns_are_those_of_the_torch_twin():
    """Over parts of the data; returns over the ends of parts, too."""
    rng, endless = np.random.default_rng(0), np.zeros((8, 3), np.float32)
    data = np.float32(rng.normal([3, -50, 0], [0.1, 9, 1], size=(40, 3)))
    mine, twin = JAX["RunningMeanStd"](jnp.zeros(3), jnp.ones(3), jnp.float32(0)), TORCH["RunningMeanStd"](3)
    update, returns = jit(lambda statistics, x: statistics.update(x)), jit(JAX["discounted_returns"])
    so_far, twins_so_far = jnp.zeros(3), np.zeros(3, np.float32)
    for part in np.split(data, 5):
        mine = update(mine, part)
        twin.update(part)
        got, so_far = returns(part, endless, so_far, 0.9)
        want, twins_so_far = TORCH["discounted_returns"](part, endless, twins_so_far, 0.9)
        np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(so_far, twins_so_far, rtol=1e-5)
    for x, y in zip(mine, (twin.mean, twin.var, twin.count), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mine.var, data.var(0), rtol=1e-4)
    np.testing.assert_allclose(mine.normalize(data), twin(data), rtol=1e-5, atol=1e-4)


# ---------------------------------------------------------------------- iterations
class Clock:
    """Observations: steps in the episode, steps since ever, index of the environment. An episode is cut after 5 steps
    in the first environment, and ends after 4 in the second. The reward is the action."""

    num_envs, single_action_space = 2, gym.spaces.Discrete(4)
    single_observation_space = gym.spaces.Box(-1, 1, (3,))

    def see(self, time, total):
        return jnp.stack([time, jnp.full(2, total), jnp.arange(2)], 1).astype(jnp.float32)

    def reset(self, key):
        time, total = jnp.zeros(2, jnp.int32), jnp.int32(0)
        return (time, total), self.see(time, total)

    def step(self, key, state, action):
        time, total = state[0] + 1, state[1] + 1
        cut, over = (time == 5) & jnp.array([True, False]), (time == 4) & jnp.array([False, True])
        begun = jnp.where(cut | over, 0, time)
        step = Step(self.see(begun, total), jnp.float32(action), over, cut, self.see(time, total))
        return (begun, total), step


# One gradient step an iteration, from all that was seen: no order of minibatches, no chance.
SETTINGS = {"num_envs": 2, "num_steps": 8, "num_minibatches": 1, "update_epochs": 1, "update_proportion": 1.0}
SETTINGS |= {"learning_rate": 0.01, "int_gamma": 0.9}
REACHED = np.array([[[t % 5 + 1, t + 1, 0], [t % 4 + 1, t + 1, 1]] for t in range(24)], np.float64)  # step by step


@pytest.fixture(scope="module")
def iterated():
    """The trainings at first, after a warm-up and after each of two iterations of 8 steps; of each iteration its
    report, its rollout, and the inputs of `gae` for both rewards and of `discounted_returns`."""
    setup = JAX["Setup"](JAX["Args"](**SETTINGS), Clock(), num_iterations=10)
    names, seen = JAX["train_iteration"].__globals__, []

    def noted(name):
        function = JAX[name]

        def call(*inputs):
            result = function(*inputs)
            seen.append(result if name == "Batch" else inputs[:-1] if name == "discounted_returns" else inputs[:5])
            return result

        return call

    def one(training):
        seen.clear()
        return *JAX["train_iteration"](training, setup), seen[:4]

    first = jit(partial(JAX["begin"], setup=setup))(jax.random.PRNGKey(3))
    warm, report = jit(lambda training: JAX["warm_up"](training, setup))(first)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("discounted_returns", "gae", "Batch"):
            patch.setitem(names, name, noted(name))
        one = jit(one)
        second, *found = one(warm)
        third, *more = one(second)
    trainings = first, warm, second, third
    return jax.tree.map(np.array, (trainings, report, (found, more)))


def test_statistics_begin_with_those_of_random_actions_and_include_each_rollout(iterated):
    """Of each entry, of the observations that were reached: the last one of an episode, never the first of the next."""
    trainings, (reward, done), found = iterated
    assert len(np.unique(reward)) > 2 and done.sum() == 3  # all actions, in whole episodes
    assert trainings[0].obs_normalizer.count == 0 and [int(x.iteration) for x in trainings] == [0, 0, 1, 2]
    for k, training in enumerate(trainings[1:], 1):
        data, statistics = REACHED[: 8 * k].reshape(-1, 3), training.obs_normalizer
        assert statistics.count == 16 * k
        np.testing.assert_allclose(statistics.mean, data.mean(0), rtol=1e-5)
        np.testing.assert_allclose(statistics.var, data.var(0), rtol=1e-4)
        if k > 1:
            expected = ((data - data.mean(0)) / data.std(0)).clip(-5, 5)[-16:]
            np.testing.assert_allclose(found[k - 2][1][-1].reached, expected, atol=1e-4)


def test_the_intrinsic_reward_is_the_error_of_the_predictor_in_units_of_its_returns(iterated):
    """By the networks of torch; its returns run on over ends of episodes and iterations. All predictors are those
    before the iteration."""
    trainings, _, found = iterated
    target = TORCH["tanh_mlp"](3, 128, 128, gain=1.0)
    copy_layers(trainings[0].target, target)
    rewards = []
    for k in (0, 1):
        (report, (returns_of, _, intrinsic, batch)), before, after = found[k], trainings[k + 1], trainings[k + 2]
        predictor = as_torch(before.params)["predictor"]
        with torch.no_grad():
            features = target(torch.from_numpy(batch.reached))
            reward = TORCH["squared_error"](predictor(torch.from_numpy(batch.reached)), features).reshape(8, 2).numpy()
        np.testing.assert_allclose(batch.features, features, atol=1e-5)
        np.testing.assert_allclose(returns_of[0], reward, rtol=1e-4, atol=1e-6)
        assert float(report[-1]["charts/intrinsic_reward"]) == pytest.approx(reward.mean(), rel=1e-4)
        rewards.extend(reward)
        returns = [sum(0.9 ** (t - j) * rewards[j] for j in range(t + 1)) for t in range(8 * k + 8)]
        np.testing.assert_allclose(after.so_far, returns[-1], rtol=1e-4)
        assert after.return_normalizer.count == len(returns) * 2
        np.testing.assert_allclose(after.return_normalizer.var, np.var(returns), rtol=1e-3)
        np.testing.assert_allclose(intrinsic[0], reward / np.std(returns), rtol=1e-3)


def test_only_the_extrinsic_return_ends_with_the_episode(iterated):
    """A time limit bootstraps from the value of the final observation, by the first head; both advantages are those of
    torch's `gae`."""
    trainings, _, found = iterated
    before, (report, (_, extrinsic, intrinsic, batch)) = trainings[2], found[1]
    agent = as_torch(before.params)["agent"]
    with torch.no_grad():
        seen = batch.obs.reshape(8, 2, 3), trainings[3].obs, np.float32(REACHED[16:])
        value, next_value, final_value = (agent.critic(torch.from_numpy(obs)).numpy() for obs in seen)
    done, cut = REACHED[16:, :, 0] == [5, 4], REACHED[16:, :, 0] == [5, np.inf]
    assert np.array_equal(report[1], done) and cut.any() and (done & ~cut).any() and done[:-1].any()
    endless, action = np.zeros((8, 2), np.float32), np.float32(batch.action.reshape(8, 2))
    of_each = (action, value[..., 0], done, np.where(cut, final_value[..., 0], 0), next_value[:, 0])
    for got, want in zip(extrinsic, of_each, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)
    for got, want in zip(intrinsic[1:], (value[..., 1], endless, endless, next_value[:, 1]), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)
    ext = TORCH["gae"](*np.float32(of_each[:2]), *np.float32(of_each[2:4]), of_each[4], 0.99, 0.95)
    intr = TORCH["gae"](intrinsic[0], value[..., 1], endless, endless, next_value[:, 1], 0.9, 0.95)
    np.testing.assert_allclose(batch.advantage.reshape(8, 2), 2 * ext + intr, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(batch.returns.reshape(8, 2, 2), np.stack([ext, intr], -1) + value, rtol=1e-4, atol=1e-4)


def test_an_iteration_moves_the_weights_as_torch_does(iterated):
    """Both: loss, clipping, Adam and the learning rate of the iteration."""
    trainings, _, found = iterated
    modules, args = as_torch(trainings[1].params), TORCH["Args"](**SETTINGS)
    adam = torch.optim.Adam(modules.parameters(), eps=1e-5)
    for k, after in enumerate(trainings[2:]):
        adam.param_groups[0]["lr"] = 0.01 * (1 - k / 10)
        batch = TORCH["Batch"](*map(torch.from_numpy, found[k][1][-1]))
        adam.zero_grad()
        TORCH["rnd_loss"](modules, batch, torch.ones(16), args)[0].backward()
        torch.nn.utils.clip_grad_norm_(modules.parameters(), args.max_grad_norm)
        adam.step()
        for (name, want), got in zip(modules.named_parameters(), as_torch(after.params).parameters(), strict=True):
            np.testing.assert_allclose(got.detach(), want.detach(), atol=1e-5, err_msg=name)


def test_the_target_never_changes_and_the_predictor_does(iterated):
    trainings, *_ = iterated
    parts = [[x.target for x in trainings], *([x.params[name] for x in trainings] for name in trainings[0].params)]
    equal = [[jax.tree.all(jax.tree.map(np.array_equal, a, b)) for a, b in pairwise(part)] for part in parts]
    assert equal == [[True, True, True], *[[True, False, False]] * 3]  # the warm-up trains nothing


@pytest.mark.slow
def test_the_predictor_learns_from_a_fraction_of_each_minibatch():
    """From none of it: it stays, and all else is trained."""
    args = JAX["Args"](num_envs=2, num_steps=8, num_minibatches=2, update_proportion=0.0)
    setup = JAX["Setup"](args, Clock(), num_iterations=10)
    before = jit(partial(JAX["begin"], setup=setup))(jax.random.PRNGKey(3))
    after, (_, _, sums, count, _) = jit(lambda training: JAX["train_iteration"](training, setup))(before)
    assert count == 8 and sums["losses/predictor_loss"] == 0
    same = {
        name: jax.tree.all(jax.tree.map(np.array_equal, x, after.params[name])) for name, x in before.params.items()
    }
    assert same == {"actor": False, "critic": False, "predictor": True}


# ---------------------------------------------------------------------- whole trainings
def test_a_budget_that_the_warm_up_uses_up_is_refused(train):
    train("ppo_rnd_jax", *SMALL, "--total-timesteps", 64, code=2)
    assert "--total-timesteps leaves no rollout to learn from after --warmup-rollouts" in train.out
    assert train.out.count("\n") == 1


@pytest.mark.slow
def test_a_seed_goes_on_exactly_in_any_phase_and_is_the_same_alone_and_together(train, tmp_path, monkeypatch):
    """In the warm-up, between it and the training, in the training."""
    monkeypatch.setattr("solorl.checkpoints.checkpoint.KEEP", 100)
    flags = [*SMALL, "--total-timesteps", 192, "--save-every", 32]
    train("ppo_rnd_jax", *flags, "--num-seeds", 2)
    train("ppo_rnd_jax", *flags, "--seed", 2, runs_dir=tmp_path / "alone")
    together, alone = next((tmp_path / "runs").glob("*__2__*")), next((tmp_path / "alone").iterdir())
    expected = comparable(together)
    assert comparable(alone) == expected and len(expected) > 6

    def saved(run):
        tensors = load_file(max((run / "checkpoint").iterdir()) / "tensors.safetensors")
        return {key: x for key, x in tensors.items() if not key.startswith("/random")}  # which JAX does not use

    whole = saved(together)
    assert {f"/parts/training/{key}" for key in ("so_far", "target.0.weight", "obs_normalizer.mean")} <= whole.keys()
    for step in (32, 64, 128):
        folder = tmp_path / str(step) / together.name
        shutil.copytree(together, folder)
        for path in (folder / "checkpoint").iterdir():
            if int(path.name.removeprefix("step_")) > step:
                shutil.rmtree(path)
        v = train("ppo_rnd_jax", "--resume", folder)
        assert v["run"].runs[0].checkpoints.resumed["step"] == step and comparable(folder) == expected
        for other in (saved(folder), saved(alone)):
            assert whole.keys() == other.keys() and all(np.array_equal(whole[key], other[key]) for key in whole)


@pytest.mark.slow
def test_it_logs_what_its_twin_logs(train):
    run = train("ppo_rnd_jax", *SMALL, "--total-timesteps", 192)["run"].runs[0]
    twin = train("ppo_rnd", *SMALL, "--total-timesteps", 192)["run"]
    keys = [{key for row in rows(each.dir) for key in row} for each in (run, twin)]
    assert keys[0] == keys[1] and {"charts/intrinsic_reward", "losses/predictor_loss"} <= keys[0]


@pytest.mark.slow
def test_finds_the_door_behind_the_key(train):
    """In 120,000 steps 37 of 48 seeds did, and 4 of 16 of ppo_jax.py, none of these four."""
    flags = ["--total-timesteps", 120_000, "--target-return", "0.95", "--eval-every", 60_000, "--log-every", 5000]
    v = train("ppo_rnd_jax", *flags, "--seed", 10, "--num-seeds", 4, "--save-every", 0)
    scores = [rows(run.dir, "eval/episodic_return")[-1]["eval/episodic_return"] for run in v["run"].runs]
    assert sum(score >= 0.95 for score in scores) >= 3, scores
