"""pqn_jax.py: its pure functions against their definitions and the torch twin, one iteration against brute force, and
that it learns."""

from functools import partial

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from conftest import copy_layers, definitions, documented_keys, rows

from solorl.envs.interface import Step

JAX, TORCH = definitions("pqn_jax"), definitions("pqn")
q_lambda, layer_norm_mlp = jax.jit(JAX["q_lambda"]), jax.jit(JAX["layer_norm_mlp"])
init_params = jax.jit(JAX["init_params"], static_argnums=(1, 2))
SMALL = "--num-envs 2 --num-steps 16 --total-timesteps 128 --num-minibatches 2 --eval-episodes 1".split()


def twins(obs_dim=3, num_actions=4):
    """The same random weights for both, also of the normalisation: the parameters of JAX and the QNetwork of torch."""
    params = init_params(jax.random.PRNGKey(0), obs_dim, num_actions)
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: np.float32(x + 0.1 * rng.normal(size=x.shape)), jax.device_get(params))
    network = TORCH["QNetwork"](obs_dim, num_actions)
    copy_layers(params["linear"], network.net)
    for mine, layer in zip(params["norm"], (network.net[1], network.net[4]), strict=True):
        layer.load_state_dict({name: torch.tensor(np.array(x)) for name, x in mine.items()})
    return params, network


def are_equal(params, network, rtol=1e-4, atol=1e-5):
    """Whether weights of JAX are those of torch."""
    nets = (params["linear"], network.net[::3]), (params["norm"], (network.net[1], network.net[4]))
    for mine, layers in nets:
        for x, layer in zip(mine, layers, strict=True):
            np.testing.assert_allclose(x["weight"].T, layer.weight.detach().numpy(), rtol=rtol, atol=atol)
            np.testing.assert_allclose(x["bias"], layer.bias.detach().numpy(), rtol=rtol, atol=atol)


def torch_update(network, optimizer, batch, max_grad_norm):
    """One gradient step in plain torch: the loss, and the norm of its gradient."""
    loss, _ = TORCH["q_lambda_loss"](network, batch)
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), max_grad_norm)
    optimizer.step()
    return loss.item(), norm.item()


# ---------------------------------------------------------------------- pure functions
def test_q_lambda_by_hand():
    """Three steps, gamma 0.5, lambda 0.5; the last one leads to a state of value 8, which a time limit may cut off."""
    reward, value = np.array([[1.0], [2.0], [3.0]]), np.array([[10.0], [20.0], [30.0]])
    done, no = np.array([[False], [True], [False]]), np.zeros((3, 1))
    compute = lambda *args: q_lambda(reward, value, *args, 0.5, 0.5)[:, 0].tolist()  # noqa: E731
    # last: 3 + 0.5 * 8 = 7; middle: 2 + 0.5 * (7 + 30) / 2 = 11.25; first: 1 + 0.5 * (11.25 + 20) / 2 = 8.8125
    assert compute(no, no, np.array([8.0])) == [8.8125, 11.25, 7.0]
    # the task is over with the middle step: 2; first: 1 + 0.5 * (2 + 20) / 2 = 6.5
    assert compute(done, no, np.array([8.0])) == [6.5, 2.0, 7.0]
    # a time limit there, at a state of value 6: 2 + 0.5 * 6 = 5; first: 1 + 0.5 * (5 + 20) / 2 = 7.25
    assert compute(done, 6 * done, np.array([8.0])) == [7.25, 5.0, 7.0]


@pytest.mark.parametrize("lam", [0.0, 0.65, 1.0])
def test_q_lambda_is_that_of_the_torch_twin(lam):
    """Which test_pqn.py compares with the definition; also where the last step of the rollout is an end."""
    rng = np.random.default_rng(0)
    reward, value, next_value = rng.normal(size=(40, 3)), rng.normal(size=(40, 3)), rng.normal(size=3)
    done = rng.random((40, 3)) < 0.2
    done[-1] = [True, True, False]
    final_value = done * rng.normal(size=(40, 3)) * (rng.random((40, 3)) < 0.5)
    final_value[-1, 0] = 3.0
    inputs = [np.float32(x) for x in (reward, value, done, final_value, next_value)]
    np.testing.assert_allclose(q_lambda(*inputs, 0.9, lam), TORCH["q_lambda"](*inputs, 0.9, lam), rtol=1e-5, atol=1e-5)


def test_values_and_greedy_actions_are_those_of_the_torch_twin():
    """Also far from 0, where a variance as mean(x^2) - mean(x)^2 would be wrong."""
    (params, network), obs = twins(), np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    q = layer_norm_mlp(params, obs)
    np.testing.assert_allclose(q, network(torch.from_numpy(obs)).detach().numpy(), rtol=1e-4, atol=1e-5)
    action = np.asarray(jax.jit(JAX["act"])(params, obs))
    assert (action == network.act(obs)).all() and len(set(action.tolist())) == 4
    shifted = params | {"linear": [params["linear"][0] | {"bias": params["linear"][0]["bias"] + 1000}]}
    shifted["linear"] += params["linear"][1:]
    np.testing.assert_allclose(layer_norm_mlp(shifted, obs), q, rtol=0.01, atol=0.01)


def test_layers_are_orthogonal_and_normalisation_begins_as_none():
    params = jax.device_get(init_params(jax.random.PRNGKey(3), 5, 3))
    assert [x["weight"].shape for x in params["linear"]] == [(5, 120), (120, 84), (84, 3)]
    for layer in params["linear"]:
        w = np.asarray(layer["weight"], float)
        gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        np.testing.assert_allclose(gram, 2 * np.eye(len(gram)), atol=1e-5)
        assert (layer["bias"] == 0).all()
    assert all((norm["weight"] == 1).all() and (norm["bias"] == 0).all() for norm in params["norm"])


@pytest.mark.slow
@pytest.mark.parametrize("max_grad_norm", [100.0, 0.5])
def test_updates_are_those_of_the_torch_twin(max_grad_norm):
    """From the same weights on the same batches: loss, clipped gradient and RAdam; the sixth step is the first that is
    divided by the root of the second moment."""
    (params, network), rng = twins(), np.random.default_rng(0)
    optimizer, radam = JAX["flat_radam"](0.01, max_grad_norm), torch.optim.RAdam(network.parameters(), lr=0.01)
    state = optimizer.init(params)

    @jax.jit
    def update(params, state, batch):
        (loss, metrics), gradients = jax.value_and_grad(JAX["q_lambda_loss"], has_aux=True)(params, batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, loss, metrics

    for _ in range(8):
        obs, action, returns = rng.normal(size=(32, 3)), rng.integers(4, size=32), rng.normal(size=32)
        batch = np.float32(obs), action, np.float32(returns)
        t_batch = TORCH["Batch"](*map(torch.from_numpy, batch))
        q_values = TORCH["q_lambda_loss"](network, t_batch)[1]["losses/q_values"].item()
        params, state, loss, metrics = update(params, state, JAX["Batch"](*batch))
        want, norm = torch_update(network, radam, t_batch, max_grad_norm)
        np.testing.assert_allclose([loss, metrics["losses/td_loss"]], want, rtol=1e-3)
        np.testing.assert_allclose(metrics["losses/q_values"], q_values, rtol=1e-3, atol=1e-4)
        assert 0.5 < norm < 100 and metrics.keys() == {"losses/td_loss", "losses/q_values"}
    are_equal(params, network, rtol=1e-3, atol=1e-4)  # the factor of those steps is in single precision here


# ---------------------------------------------------------------------- one iteration
class Clock:
    """Deterministic: the observation tells the time and the number of the environment. Of every 5 steps the last ends
    the episode: in the first environment it is the end of the task, in the second one a time limit."""

    num_envs, single_action_space = 2, gym.spaces.Discrete(2)
    single_observation_space = gym.spaces.Box(-1, 1, (3,))

    def reset(self, key):
        return jnp.zeros((), int), self.observe(0)

    def observe(self, time):
        return jnp.stack([jnp.full(2, jnp.sin(time)), jnp.full(2, jnp.cos(time)), jnp.arange(2.0)], 1)

    def step(self, key, state, action):
        obs, end = self.observe(state + 1), jnp.full(2, (state + 1) % 5 == 0)
        limit, final_obs = jnp.array([False, True]), jnp.where(end[:, None], -obs, obs)
        return state + 1, Step(obs, 1 + 0.5 * action, end & ~limit, end & limit, final_obs)


class Constant(Clock):
    """There is one observation, and every reward is 1. The state has the time and whether the ends are time limits."""

    def reset(self, key):
        return (jnp.zeros((), int), jnp.array(False)), self.observe(0)

    def observe(self, time):
        return jnp.ones((2, 3))

    def step(self, key, state, action):
        (time, limit), end = state, jnp.full(2, (state[0] + 1) % 5 == 0)
        obs = self.observe(time)
        return (time + 1, limit), Step(obs, jnp.ones(2), end & ~limit, end & limit, obs)


def begun(envs, num_iterations=1, seed=3, **settings):
    """The training before its first iteration, and one iteration as a compiled function."""
    args = JAX["Args"](**{"num_envs": 2, "start_e": 0.0, "end_e": 0.0} | settings)
    setup = JAX["Setup"](args, envs, num_iterations)
    training = jax.jit(partial(JAX["begin"], setup=setup))(jax.random.PRNGKey(seed))
    return training, jax.jit(partial(JAX["train_iteration"], setup=setup))


def rollout_of(network, num_steps):
    """What the greedy policy of a torch network does in `Clock`, by hand; as one Batch, and the mean of its values."""
    envs, shape = Clock(), (num_steps, 2)
    obs = np.zeros((*shape, 3), np.float32)
    action, (reward, value, done, final_value) = np.zeros(shape, int), np.zeros((4, *shape), np.float32)
    (state, now), env_step = envs.reset(None), jax.jit(partial(envs.step, None))
    q_values = lambda x: network(torch.from_numpy(np.array(x))).detach().numpy()  # noqa: E731
    for t in range(num_steps):
        obs[t], q = now, q_values(now)
        action[t], value[t] = q.argmax(1), q.max(1)
        state, step = jax.device_get(env_step(state, action[t]))
        now, reward[t], done[t] = step.obs, step.reward, step.terminated | step.truncated
        final_value[t] = q_values(step.final_obs).max(1) * step.truncated
    returns = TORCH["q_lambda"](reward, value, done, final_value, q_values(now).max(1), 0.99, 0.65)
    assert done.sum() == num_steps // 5 * 2 and (final_value != 0).sum() == num_steps // 5
    return TORCH["Batch"](*(torch.from_numpy(x).flatten(0, 1) for x in (obs, action, returns))), reward


def test_one_iteration_is_that_of_the_torch_twin():
    """Acting, time limits, returns and one gradient step over the whole rollout: the same weights after it."""
    training, one = begun(Clock(), num_steps=16, num_minibatches=1, update_epochs=1, learning_rate=0.01)
    params, network = twins(num_actions=2)
    batch, reward = rollout_of(network, 16)
    after, (got_reward, done, sums, count, charts) = one(training._replace(params=params))
    np.testing.assert_allclose(got_reward, reward)
    assert count == 1 and done.sum() == 6 and len(set(reward.ravel().tolist())) == 2
    loss, norm = torch_update(network, torch.optim.RAdam(network.parameters(), lr=0.01), batch, 10.0)
    np.testing.assert_allclose(sums["losses/td_loss"], loss, rtol=1e-4)
    assert norm > 0.1 and charts["charts/learning_rate"] == pytest.approx(0.01)
    are_equal(after.params, network)
    assert not np.allclose(after.params["linear"][1]["weight"], params["linear"][1]["weight"], atol=1e-4)


@pytest.mark.slow
def test_minibatches_cover_the_rollout_once_per_epoch_and_are_shuffled():
    """With a learning rate of 0 the means over all minibatches are those of the whole rollout; a moment of the
    gradients tells their order, which is another one where the key is another one."""
    training, one = begun(Clock(), num_steps=16, num_minibatches=4, update_epochs=3, learning_rate=0.0)
    params, network = twins(num_actions=2)
    loss, metrics = TORCH["q_lambda_loss"](network, rollout_of(network, 16)[0])
    training, moments = training._replace(params=params), []
    for i in range(2):
        after, (_, _, sums, count, _) = one(training._replace(key=jax.random.PRNGKey(i)))
        assert count == 12 == after.optimizer_state[1].count
        np.testing.assert_allclose(sums["losses/td_loss"] / count, loss.item(), rtol=1e-4)
        np.testing.assert_allclose(sums["losses/q_values"] / count, metrics["losses/q_values"].item(), rtol=1e-4)
        moments.append(np.asarray(after.optimizer_state[1].mu))
    assert not np.allclose(*moments, rtol=0.01)


@pytest.mark.slow
def test_actions_are_random_with_probability_epsilon():
    """With a network whose greedy action is 0, half of the random actions are 1: within 4 standard errors, in each
    environment, which draw independently. Epsilon falls linearly."""
    settings = {"num_steps": 4096, "num_minibatches": 1, "update_epochs": 1, "learning_rate": 0.0}
    training, one = begun(Clock(), num_iterations=40, **settings, start_e=0.9, end_e=0.1)
    *hidden, last = training.params["linear"]
    params = training.params | {"linear": [*hidden, {"weight": 0 * last["weight"], "bias": jnp.array([1.0, 0.0])}]}
    for iteration in (0, 10, 30):
        _, (reward, _, _, _, charts) = one(training._replace(params=params, iteration=jnp.int32(iteration)))
        epsilon = max(0.9 - 0.8 * iteration / 20, 0.1)
        assert charts["charts/epsilon"] == pytest.approx(epsilon, rel=1e-5)
        action, p = 2 * (np.asarray(reward) - 1), epsilon / 2
        assert set(action.ravel().tolist()) == {0, 1}
        np.testing.assert_allclose(action.mean(0), p, atol=4 * (p * (1 - p) / 4096) ** 0.5)
        assert (action[:, 0] * action[:, 1]).mean() == pytest.approx(p**2, abs=4 * (p**2 * (1 - p**2) / 4096) ** 0.5)


def test_a_time_limit_bootstraps():
    """The only state is worth 1 / (1 - gamma) under a time limit; where the task ends, a mean of what is left."""
    settings = {"num_steps": 20, "gamma": 0.5, "learning_rate": 0.01, "anneal_lr": False}
    training, one = begun(Constant(), **settings)
    values = []
    for limit in (True, False):
        now = training._replace(env_state=(training.env_state[0], jnp.array(limit)))
        for _ in range(200):
            now, _ = one(now)
        values.append(float(np.max(layer_norm_mlp(now.params, np.ones((1, 3), np.float32)))))
    assert values[0] == pytest.approx(2, abs=0.05) and 1.4 < values[1] < 1.8


# ---------------------------------------------------------------------- whole trainings
@pytest.mark.slow
def test_it_logs_what_its_twin_logs(train):
    """The same keys at the same steps, the same schedules, and what the page says."""
    flags = [*SMALL, "--total-timesteps", 256, "--eval-every", 96]
    run, twin = train("pqn_jax", *flags)["run"].runs[0], train("pqn", *flags)["run"]
    keys = [{key for row in rows(r.dir) for key in row} for r in (run, twin)]
    assert keys[0] == keys[1] == documented_keys("pqn_jax") | {"global_step", "wall_time"}
    evaluated = [[row["global_step"] for row in rows(r.dir, "eval/episodic_return")] for r in (run, twin)]
    assert evaluated[0] == evaluated[1] == [96, 192, 256]
    for key in ("charts/epsilon", "charts/learning_rate"):
        mine, other = ({row["global_step"]: row[key] for row in rows(r.dir, key)} for r in (run, twin))
        common = sorted(mine.keys() & other.keys())  # a chunk of iterations has one row
        assert len(common) > 2 and len({mine[step] for step in common}) > 1
        np.testing.assert_allclose([mine[step] for step in common], [other[step] for step in common], rtol=1e-5)


def test_wrong_input_is_one_sentence(train):
    train("pqn_jax", "--env-id", "Pendulum-v1", code=2)
    assert "use ppo_continuous_action_jax.py" in train.out
    train("pqn_jax", *SMALL, "--num-minibatches", 3, code=2)
    assert "--num-minibatches 3 must divide the batch of 32 steps" in train.out and "Traceback" not in train.out
    train("pqn_jax", "--total-timesteps", 511, code=2)
    assert "--total-timesteps 511 is less than one iteration of 512 steps" in train.out


@pytest.mark.slow
def test_it_trains_on_minatar(train):
    pytest.importorskip("gymnax")
    run = train("pqn_jax", "--env-id", "Breakout-MinAtar", *SMALL, "--total-timesteps", 512)["run"].runs[0]
    assert rows(run.dir, "eval/episodic_return") and rows(run.dir, "losses/td_loss")[-1]["global_step"] == 512
    assert run.evaluator.last[0] == 512


@pytest.mark.slow
def test_it_learns_cartpole(train):
    flags = ["--total-timesteps", 100_000, "--num-seeds", 2, "--eval-every", 0, "--learning-rate", 1e-3]
    means = [run.evaluator.last[1] for run in train("pqn_jax", *flags)["run"].runs]
    assert min(means) > 150, means  # a random policy gets 22
