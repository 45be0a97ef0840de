"""ppo_minatar_jax.py: its network against torch's, one iteration, the probe that it must learn, and whole trainings."""

import json
from functools import partial

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, rows
from safetensors.numpy import load_file

from solorl.envs.interface import Step

JAX = definitions("ppo_minatar_jax")
init_params = jax.jit(JAX["init_params"], static_argnums=(1, 2))
SMALL = "--num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 1 --eval-episodes 2".split()


def begun(envs, **settings):
    """The training before its first iteration, and one iteration as a compiled function."""
    args = JAX["Args"](**{"num_envs": envs.num_envs, "num_minibatches": 1} | settings)
    setup = JAX["Setup"](args, envs, num_iterations=100)
    training = jax.jit(partial(JAX["begin"], setup=setup))(jax.random.PRNGKey(0))
    return training, jax.jit(partial(JAX["train_iteration"], setup=setup))


# ---------------------------------------------------------------------- network
def test_the_network_is_that_of_torch():
    """A convolution of 3 x 3 over the planes, a dense layer, and two heads, with the same random weights."""
    rng = np.random.default_rng(0)
    params = init_params(jax.random.PRNGKey(0), 700, 3)
    params = jax.tree.map(lambda x: np.float32(x + 0.1 * rng.normal(size=x.shape)), params)
    planes = np.float32(rng.random((5, 10, 10, 7)) < 0.2)  # as gymnax has them: row, column, plane
    conv, dense, heads = torch.nn.Conv2d(7, 16, 3), torch.nn.Linear(1024, 128), torch.nn.Linear(128, 4)
    weights = {
        conv: params["conv"]["weight"].transpose(3, 2, 0, 1),
        dense: params["dense"]["weight"].reshape(8, 8, 16, 128).transpose(3, 2, 0, 1).reshape(128, -1),
        heads: np.concatenate([params["actor"]["weight"], params["critic"]["weight"]], 1).T,
    }
    biases = {
        conv: params["conv"]["bias"],
        dense: params["dense"]["bias"],
        heads: np.concatenate([params["actor"]["bias"], params["critic"]["bias"]]),
    }
    for layer, weight in weights.items():
        layer.load_state_dict({"weight": torch.tensor(weight.copy()), "bias": torch.tensor(biases[layer])})
    x = conv(torch.from_numpy(planes.transpose(0, 3, 1, 2).copy())).relu().flatten(1)
    want = heads(dense(x).relu()).detach().numpy()
    logits, value = jax.jit(JAX["logits_and_value"])(params, planes.reshape(5, -1))
    np.testing.assert_allclose(logits, want[:, :3], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(value, want[:, 3], rtol=1e-4, atol=1e-4)
    assert (JAX["act"](params, planes.reshape(5, -1)) == want[:, :3].argmax(1)).all()


def test_weights_begin_orthogonal():
    """Gain root of 2, 0.01 for the policy, 1 for the value; zero biases."""
    params = init_params(jax.random.PRNGKey(1), 400, 3)
    for name, gain in {"conv": 2**0.5, "dense": 2**0.5, "actor": 0.01, "critic": 1}.items():
        weight = np.asarray(params[name]["weight"], float).reshape(-1, params[name]["weight"].shape[-1])
        np.testing.assert_allclose(weight.T @ weight, gain**2 * np.eye(weight.shape[1]), atol=1e-5, err_msg=name)
        assert not np.any(params[name]["bias"])
    assert params["conv"]["weight"].shape == (3, 3, 4, 16) and params["dense"]["weight"].shape == (1024, 128)


# ---------------------------------------------------------------------- one iteration
class Match:
    """A square on the left or on the right half of the first plane, anywhere; in the next step the reward is 1 for the
    action of that side (0: left). The second plane is empty. Every fourth step ends the episode, by a time limit."""

    num_envs, single_action_space = 16, gym.spaces.Discrete(2)
    single_observation_space = gym.spaces.Box(0, 1, (200,))

    def show(self, key):
        row, column = jax.random.randint(key, (2, self.num_envs), 0, 10)
        planes = jnp.zeros((self.num_envs, 10, 10, 2)).at[jnp.arange(self.num_envs), row, column, 0].set(1)
        return column // 5, planes.reshape(self.num_envs, -1)

    def reset(self, key):
        side, obs = self.show(key)
        return (jnp.int32(0), side), obs

    def step(self, key, state, action):
        (time, side), (next_side, obs) = state, self.show(key)
        end = jnp.full(self.num_envs, (time + 1) % 4 == 0)
        return (time + 1, next_side), Step(obs, jnp.float32(action == side), end & False, end, obs)


class Empty(Match):
    """Nothing is shown and every reward is 1, so that each state is worth 1 / (1 - gamma)."""

    def show(self, key):
        return jnp.zeros(self.num_envs, int), jnp.zeros((self.num_envs, 200))

    def step(self, key, state, action):
        state, step = super().step(key, state, action)
        return state, step._replace(reward=jnp.ones(self.num_envs))


@pytest.mark.slow
def test_it_learns_where_the_square_is():
    """A random policy has 0.5. In the very first gradient step of an iteration the ratio is one."""
    settings = {"num_steps": 16, "update_epochs": 1, "anneal_lr": False, "gamma": 0.5}
    training, one = begun(Match(), **settings, learning_rate=0.01)
    for _ in range(60):
        training, (reward, done, sums, count, _) = one(training)
        assert count == 1 and done.sum() == 4 * 16
        assert abs(float(sums["losses/approx_kl"])) < 1e-6 and float(sums["losses/clipfrac"]) == 0
    assert reward.mean() > 0.9, reward.mean()
    side, obs = Match().show(jax.random.PRNGKey(7))
    assert (JAX["act"](training.params, obs) == side).mean() > 0.9


@pytest.mark.slow
def test_a_time_limit_bootstraps():
    training, one = begun(Empty(), num_steps=20, gamma=0.5, learning_rate=0.01, anneal_lr=False, clip_vloss=False)
    for _ in range(100):
        training, _ = one(training)
    value = JAX["logits_and_value"](training.params, jnp.zeros((1, 200)))[1]
    assert float(value[0]) == pytest.approx(2, abs=0.05)


# ---------------------------------------------------------------------- whole trainings
@pytest.mark.slow
def test_a_stopped_training_goes_on_exactly(train, tmp_path):
    """Two seeds of a game ended early, the second resumed alone: all that a checkpoint holds is equal to the bit."""
    pytest.importorskip("gymnax")
    flags = [*SMALL, "--total-timesteps", 2560, "--eval-every", 1024, "--save-every", 1024, "--num-seeds", 2]
    train("ppo_minatar_jax", *flags)
    train("ppo_minatar_jax", *flags, "--target-return", 0, runs_dir=tmp_path / "cut")
    whole, cut = (next((tmp_path / folder).glob("*__2__*")) for folder in ("runs", "cut"))
    stopped_at = rows(cut)[-1]["global_step"]
    train("ppo_minatar_jax", "--resume", cut, "--target-return", "None")
    assert 0 < stopped_at < rows(cut)[-1]["global_step"] == rows(whole)[-1]["global_step"] == 2560
    tensors = [load_file(max((run / "checkpoint").iterdir()) / "tensors.safetensors") for run in (whole, cut)]
    a, b = ({key: x for key, x in each.items() if not key.startswith("/random")} for each in tensors)
    assert a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
    logged = [[row for row in comparable(run) if "eval/episodic_return" not in row] for run in (whole, cut)]
    assert logged[0] == logged[1] and len(logged[0]) > 5


@pytest.mark.slow
def test_it_trains_on_a_game_and_logs_what_the_page_says(train):
    pytest.importorskip("gymnax")
    run = train("ppo_minatar_jax", *SMALL, "--total-timesteps", 256)["run"].runs[0]
    keys = {key for row in rows(run.dir) for key in row} - {"global_step", "wall_time"}
    assert keys == documented_keys("ppo_minatar_jax")
    assert rows(run.dir, "eval/episodic_return")[-1]["global_step"] == 256
    assert json.loads((run.dir / "status.json").read_text())["status"] == "finished"


def test_another_kind_of_environment_is_refused(train, tmp_path):
    """One sentence, and nothing is written."""
    train("ppo_minatar_jax", "--env-id", "CartPole-v1", code=2)
    assert train.out.count("\n") == 1 and "CartPole-v1 is not a MinAtar game" in train.out and "ppo_jax.py" in train.out
    assert not (tmp_path / "runs").exists()
    train("ppo_minatar_jax", "--num-minibatches", 3, code=2)
    assert "--num-minibatches 3 must divide the batch of 8192 steps" in train.out
    train("ppo_minatar_jax", "--total-timesteps", 8191, code=2)
    assert "--total-timesteps 8191 is less than one iteration of 8192 steps" in train.out
