"""ppo_lstm_jax.py: its functions against its torch twin, the memory in acting, learning and evaluation."""

import shutil
from functools import partial

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, rows
from safetensors.numpy import load_file

from solorl.envs.interface import Step
from solorl.games.cue import Cue
from solorl.run.evaluation import play_episodes
from solorl.run.trainings import PolicyOfSeed

JAX, TORCH = definitions("ppo_lstm_jax"), definitions("ppo_lstm")
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiles in half the time
init_params = jit(JAX["init_params"], static_argnums=(1, 2))
LAYERS = {"encoder": "encoder.0", "actor": "actor", "critic": "critic"}  # JAX -> torch
SMALL = "--num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 1 --eval-episodes 2".split()


def twins(obs_dim=3, num_actions=3):
    """The same random weights for both, biases too: the parameters of JAX and the Agent of torch."""
    torch.manual_seed(0)
    params = init_params(jax.random.PRNGKey(0), obs_dim, num_actions)
    params["actor"]["weight"] *= 100
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: np.float32(x + 0.1 * rng.normal(size=x.shape)), params)
    agent = TORCH["Agent"](obs_dim, num_actions)
    agent.load_state_dict({name: torch.tensor(x) for name, x in as_torch(params).items()})
    return params, agent


def as_torch(params):
    """The parameters (or their gradients) under the names of torch, weights transposed."""
    parts = {"weight": "weight", "bias": "bias"}
    named = {f"{name}.{part}": params[mine][part].T for mine, name in LAYERS.items() for part in parts}
    cells = {"ih": "input", "hh": "memory"}
    return named | {f"lstm.{part}_{end}": params[mine][part].T for end, mine in cells.items() for part in parts}


def sequence(steps, envs, seed=0):
    """Random observations, a memory, starts of episodes."""
    rng = np.random.default_rng(seed)
    obs, state = np.float32(rng.normal(size=(steps, envs, 3))), np.float32(rng.normal(size=(2, envs, 64)))
    return obs, state, rng.random((steps, envs)) < 0.4


# ---------------------------------------------------------------------- its functions and those of torch
def test_network_is_that_of_the_torch_twin():
    """The order of the gates, both biases, and where the memory is emptied."""
    (params, agent), inputs = twins(), sequence(6, 5)
    assert inputs[2].any() and not inputs[2].all()
    got = jit(JAX["lstm_network"])(params, *inputs)
    with torch.no_grad():
        want = agent(*map(torch.from_numpy, inputs))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("free", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_loss_and_gradient_are_those_of_the_torch_twin(free):
    (params, agent), (obs, state, first) = twins(), sequence(6, 4)
    rng = np.random.default_rng(1)
    numbers = np.float32(rng.normal(size=(4, 6, 4)))
    numbers[0] -= 1.2  # the old log-probabilities
    batch = (obs, first, state, rng.integers(3, size=(6, 4)), *numbers)
    settings = {"clip_coef": 0.1, "vf_coef": 0.7, "ent_coef": 0.3, "norm_adv": not free, "clip_vloss": not free}
    loss = partial(JAX["ppo_lstm_loss"], args=JAX["Args"](**settings))
    (got, metrics), gradients = jit(jax.value_and_grad(loss, has_aux=True))(params, JAX["Batch"](*batch))
    batch = TORCH["Batch"](*map(torch.from_numpy, batch))
    want, want_metrics = TORCH["ppo_lstm_loss"](agent, batch, TORCH["Args"](**settings))
    want.backward()
    assert metrics.keys() == want_metrics.keys()
    for x, y in [(got, want), *((metrics[name], want_metrics[name]) for name in metrics)]:
        np.testing.assert_allclose(x, y.detach(), rtol=1e-5, atol=1e-5)
    gradients = as_torch(gradients)
    for name, parameter in agent.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5, err_msg=name)


def test_weights_begin_as_those_of_the_torch_twin():
    """Orthogonal with the same gains; all biases are 0, but 3 for the forget gates."""
    params = as_torch(init_params(jax.random.PRNGKey(1), 3, 3))
    for name, y in TORCH["Agent"](3, 3).state_dict().items():
        x, y = np.asarray(params[name], float), y.double().numpy()
        assert x.shape == y.shape, name
        if "bias" in name:
            assert (x == y).all(), name
        else:
            grams = [w @ w.T if len(w) <= w.shape[1] else w.T @ w for w in (x, y)]
            np.testing.assert_allclose(*grams, atol=1e-5, err_msg=name)


def test_evaluation_remembers():
    """A whole game step by step gives the most likely actions of the sequence by torch, and its memory."""
    (params, agent), seen = twins(num_actions=2), []
    policy = PolicyOfSeed(JAX["act"], jit(JAX["act"]), lambda: params)

    def act(obs, state, first):
        action, state = policy(obs, state, first)
        seen.append((obs.copy(), first, action, state))
        return action, state

    play_episodes([Cue(), Cue()], act, [3, 4])
    obs, first, action, state = (np.stack(list(map(np.asarray, x))) for x in zip(*seen, strict=True))
    assert len(obs) == 31 and first[0].all() and not first[1:].any()
    with torch.no_grad():
        want = agent(torch.tensor(obs), torch.zeros(2, 2, 64), torch.tensor(first))
    logits, _, last = (x.numpy() for x in want)
    assert (action == logits.argmax(-1)).all() and np.abs(last).max() > 0.1
    np.testing.assert_allclose(state[-1], last, atol=1e-5)
    _, fresh = policy(obs[0], last, np.ones(2, bool))  # after the memory of another episode
    np.testing.assert_allclose(fresh, state[0], atol=1e-5)


# ---------------------------------------------------------------------- one iteration
class Lessons:
    """Random observations; an episode is cut after 5 steps in environments with an even index, and ends after 4 in the
    others. The reward is the action."""

    num_envs, single_action_space = 4, gym.spaces.Discrete(3)
    single_observation_space = gym.spaces.Box(-1, 1, (3,))

    def reset(self, key):
        return jnp.zeros(4, jnp.int32), jax.random.normal(key, (4, 3))

    def step(self, key, time, action):
        time, even = time + 1, jnp.arange(4) % 2 == 0
        over, cut = ~even & (time == 4), even & (time == 5)
        final_obs, begin = jax.random.normal(key, (2, 4, 3))
        obs = jnp.where((over | cut)[:, None], begin, final_obs)
        return jnp.where(over | cut, 0, time), Step(obs, jnp.float32(action), over, cut, final_obs)


@pytest.fixture(scope="module")
def iterated():
    """The training before and after an iteration with frozen weights that begins with a memory, what it reports, its
    rollout, what `gae` got, and the Agent of torch with the same weights."""
    args = JAX["Args"](num_envs=4, num_steps=8, num_minibatches=2, learning_rate=0.0, clip_coef=1e-3)
    setup = JAX["Setup"](args, Lessons(), num_iterations=10)
    names, seen = JAX["train_iteration"].__globals__, {}

    def noted(name):
        function = JAX[name]

        def call(*inputs):
            seen.setdefault(name, function(*inputs) if name == "Batch" else inputs)
            return function(*inputs)

        return call

    def one(training):
        seen.clear()
        training, report = JAX["train_iteration"](training, setup)
        return training, report, seen["Batch"], seen["gae"][:5]

    params, agent = twins()
    first = jit(partial(JAX["begin"], setup=setup))(jax.random.PRNGKey(3))._replace(params=params)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("Batch", "gae"):
            patch.setitem(names, name, noted(name))
        one = jit(one)
        before, *_ = one(first)
        after, *found = one(before)
    return *jax.tree.map(np.array, (before, after, *found)), agent


def test_the_memory_is_forgotten_between_episodes_and_bootstraps_where_one_is_cut(iterated):
    """Step by step by torch, from the memory before the rollout: the values, and that of each final observation, which
    is seen with the memory of the episode that was cut. An end of the task has none."""
    before, after, _, batch, (_, _, done, final_value, next_value), agent = iterated
    assert np.abs(before.state).max() > 0.1 and np.array_equal(batch.state, before.state)
    assert np.array_equal(batch.first, np.concatenate([before.first[None], done[:-1]]))
    assert np.array_equal(after.first, done[-1]) and np.array_equal(batch.obs[0], before.obs)
    env_state, state = before.env_state, torch.tensor(before.state)
    cuts = 0
    for t in range(8):
        state = state * torch.tensor(~batch.first[t])[:, None]  # by hand, so that no step forgets
        _, value, state = agent.step(batch.obs[t], state, np.zeros(4, bool))
        np.testing.assert_allclose(batch.value[t], value, atol=1e-5)
        cut = env_state == 4
        cut[1::2] = False
        env_state = np.where(done[t], 0, env_state + 1)
        assert (final_value[t, ~cut] == 0).all() and (final_value[t, cut] != 0).all()
        cuts += cut.sum()
    np.testing.assert_allclose(after.state, state, atol=1e-5)
    _, value, _ = agent.step(after.obs, state, done[-1])
    np.testing.assert_allclose(next_value, value, atol=1e-5)
    assert cuts >= 2 and done[:, 1::2].any()


def test_the_final_observation_is_seen_with_the_memory_of_the_episode_that_was_cut(iterated):
    """The environment is stepped again with the keys of the training."""
    before, _, _, batch, (*_, final_value, _), agent = iterated
    keys = jax.random.split(jax.random.split(before.key, 4)[1], 8)
    env_state, state, found = before.env_state, torch.tensor(before.state), []
    advance = jit(Lessons().step)
    for t in range(8):
        _, _, state = agent.step(batch.obs[t], state, batch.first[t])
        env_state, step = advance(keys[t], env_state, batch.action[t])
        for n in np.flatnonzero(step.truncated):
            final_obs = np.asarray(step.final_obs)[[n]]
            memories = state[:, [n]], 0 * state[:, [n]]
            want, empty = (agent.step(final_obs, memory, np.zeros(1, bool))[1][0] for memory in memories)
            assert abs(want - empty) > 1e-3
            np.testing.assert_allclose(final_value[t, n], want, atol=1e-5)
            want = batch.action[t, n] + 0.99 * want
            np.testing.assert_allclose(batch.returns[t, n], want, rtol=1e-4)
            found.append(n)
    assert set(found) == {0, 2}


def test_without_steps_the_ratio_is_one(iterated):
    """In every minibatch: each is the whole rollout of some environments, from the memory before it, over ends of
    episodes."""
    _, _, (_, _, sums, count, _), batch, _, _ = iterated
    assert count == 8 and sums["losses/clipfrac"] == 0
    assert abs(sums["losses/old_approx_kl"]) < 1e-5 * count and np.ptp(batch.logprob) > 0.3


# ---------------------------------------------------------------------- whole trainings
@pytest.mark.slow
def test_a_seed_goes_on_exactly_and_is_the_same_alone_and_together(train, tmp_path):
    """Resumed in the middle of an episode: what was remembered is in the checkpoint."""
    flags = [*SMALL, "--total-timesteps", 256, "--save-every", 128, "--learning-rate", "0.01"]
    train("ppo_lstm_jax", *flags, "--num-seeds", 2)
    together = next((tmp_path / "runs").glob("*__2__*"))
    train("ppo_lstm_jax", *flags, "--seed", 2, runs_dir=tmp_path / "alone")
    alone = next((tmp_path / "alone").iterdir())
    expected = comparable(together)
    last = [sorted((run / "checkpoint").iterdir())[-1] for run in (together, alone)]
    a, b = (load_file(path / "tensors.safetensors") for path in last)
    shutil.rmtree(last[0])
    v = train("ppo_lstm_jax", "--resume", together)
    c = load_file(last[0] / "tensors.safetensors")
    assert v["start"] == 2 and not np.asarray(v["training"].first).all()
    assert comparable(together) == expected == comparable(alone) and len(expected) > 3
    keys = [key for key in a if not key.startswith("/random")]  # which JAX does not use
    assert "/parts/training/state" in keys and np.abs(a["/parts/training/state"]).max() > 0
    assert all(np.array_equal(a[key], b[key]) and np.array_equal(a[key], c[key]) for key in keys)


def test_minibatches_must_divide_the_environments(train):
    train("ppo_lstm_jax", *SMALL, "--num-minibatches", 3, code=2)
    assert "--num-minibatches must divide --num-envs" in train.out
    assert train.out.count("\n") == 1


@pytest.mark.slow
def test_remembers_a_cue_over_30_steps(train):
    flags = ["--target-return", "0.95", "--eval-every", "20000", "--eval-episodes", "100", "--save-every", "0"]
    v = train("ppo_lstm_jax", *flags, "--log-every", "20000", "--num-seeds", 2)
    for run in v["run"].runs:
        assert rows(run.dir, "eval/episodic_return")[-1]["eval/episodic_return"] >= 0.95
