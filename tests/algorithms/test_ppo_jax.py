"""ppo_jax.py: its pure functions against brute force and its torch twin, and whole trainings."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from conftest import comparable, copy_layers, definitions, environment, rows, script
from conftest import run as shell
from safetensors.numpy import load_file

from solorl.compute import xla
from solorl.envs.interface import Step
from solorl.envs.open import open_envs
from solorl.machine import own_cores

JAX, TORCH = definitions("ppo_jax"), definitions("ppo")
SMALL = "--num-envs 2 --num-steps 16 --num-minibatches 2 --eval-episodes 2 --eval-every 256 --save-every 256".split()


def twins(seed=0):
    """The same random weights for both: the parameters of JAX and the Agent of torch."""
    params = JAX["init_params"](jax.random.PRNGKey(seed), 3, 4)
    params["actor"][-1]["weight"] = jax.random.normal(jax.random.PRNGKey(7), (64, 4))
    agent = TORCH["Agent"](3, 4)
    copy_layers(params["actor"], agent.actor[::2])
    copy_layers(params["critic"], agent.critic[::2])
    return params, agent


def minibatch(n=32):
    rng = np.random.default_rng(0)
    obs, action = rng.normal(size=(n, 3)), rng.integers(4, size=n)
    others = (np.float32(x) for x in (-rng.random(n) - 0.5, *rng.normal(size=(3, n))))
    return JAX["Batch"](np.float32(obs), action, *others)


def as_torch(batch):
    return TORCH["Batch"](*map(torch.from_numpy, batch))


def test_gae_is_that_of_the_torch_twin():
    rng = np.random.default_rng(0)
    reward, value, next_value = rng.normal(size=(40, 3)), rng.normal(size=(40, 3)), rng.normal(size=3)
    done = (rng.random((40, 3)) < 0.2).astype(float)
    final_value = done * rng.normal(size=(40, 3)) * (rng.random((40, 3)) < 0.5)
    inputs = [np.float32(x) for x in (reward, value, done, final_value, next_value)]
    got = jax.jit(JAX["gae"])(*inputs, 0.9, 0.8)
    np.testing.assert_allclose(got, TORCH["gae"](*inputs, 0.9, 0.8), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_adv", [True, False])
@pytest.mark.parametrize("clip_vloss", [True, False])
def test_loss_is_that_of_the_torch_twin(norm_adv, clip_vloss):
    settings = {"norm_adv": norm_adv, "clip_vloss": clip_vloss, "clip_coef": 0.1, "vf_coef": 0.7, "ent_coef": 0.3}
    (params, agent), batch = twins(), minibatch()
    loss, metrics = JAX["ppo_loss"](params, batch, JAX["Args"](**settings))
    want, want_metrics = TORCH["ppo_loss"](agent, as_torch(batch), TORCH["Args"](**settings))
    assert metrics.keys() == want_metrics.keys()
    for x, y in [(loss, want), *((metrics[name], want_metrics[name]) for name in metrics)]:
        np.testing.assert_allclose(x, y.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_one_update_is_that_of_the_torch_twin():
    """From the same weights on the same minibatches: loss, clipped gradient and Adam, three times."""
    params, agent = twins()
    optimizer, args = JAX["flat_adam"](0.003, max_grad_norm=0.01), JAX["Args"]()
    state = optimizer.init(params)
    adam = torch.optim.Adam(agent.parameters(), lr=0.003, eps=1e-5)
    for k in range(3):
        batch = JAX["Batch"](*(np.roll(x, k, 0) * (1 + k * (x.ndim == 2)) for x in minibatch()))
        gradients, _ = jax.grad(JAX["ppo_loss"], has_aux=True)(params, batch, args)
        updates, state = optimizer.update(gradients, state)
        params = optax.apply_updates(params, updates)
        loss, _ = TORCH["ppo_loss"](agent, as_torch(batch), TORCH["Args"]())
        adam.zero_grad()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.01) > 0.01  # it does clip
        adam.step()
    for name, net in (("actor", agent.actor), ("critic", agent.critic)):
        for layer, mine in zip(net[::2], params[name], strict=True):
            np.testing.assert_allclose(mine["weight"].T, layer.weight.detach().numpy(), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(mine["bias"], layer.bias.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_act_is_the_most_likely_action():
    params, agent = twins()
    obs = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
    logprobs = [JAX["evaluate_actions"](params, obs, np.full(100, a))[0] for a in range(4)]
    np.testing.assert_allclose(np.exp(logprobs).sum(0), 1, rtol=1e-5)
    got = JAX["act"](params, obs)
    assert (got == np.argmax(logprobs, 0)).all() and (got == agent.act(obs)).all() and len(set(got.tolist())) > 1


def test_actions_and_their_log_probabilities_are_those_of_the_torch_twin(monkeypatch):
    """From the same logits, also large ones, and the same noise."""
    rng = np.random.default_rng(0)
    logits, gumbel = np.float32(rng.normal(size=(50, 4)) * 30), np.float32(rng.gumbel(size=(50, 4)))
    monkeypatch.setattr(np.random, "gumbel", lambda size: gumbel)
    action, logprob = JAX["sample_categorical"](logits, gumbel)
    want, want_logprob = TORCH["sample_categorical"](logits)
    assert (action == want).all() and len(set(want.tolist())) == 4
    np.testing.assert_allclose(logprob, want_logprob, rtol=1e-4, atol=1e-5)


def one_iteration(**settings):
    args = JAX["Args"](num_steps=64, **settings)
    setup = JAX["Setup"](args, open_envs("CartPole-v1", args.num_envs), num_iterations=10)
    training = JAX["begin"](jax.random.PRNGKey(3), setup)
    return training, *jax.jit(lambda training: JAX["train_iteration"](training, setup))(training)


def test_without_steps_the_policy_stays_and_the_ratio_is_one():
    before, after, (_, _, sums, count, _) = one_iteration(learning_rate=0.0)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: (x == y).all(), before.params, after.params)))
    assert count == 16
    assert float(jnp.abs(sums["losses/approx_kl"])) < 1e-9 * count and float(sums["losses/clipfrac"]) == 0


def test_the_learning_rate_belongs_to_the_iteration_and_not_to_the_gradient_steps():
    """The same gradient moves the weights (1 - 7 / 10) times as far in iteration 7, whatever Adam has counted."""
    args = JAX["Args"](num_steps=64, num_minibatches=1, update_epochs=1, learning_rate=0.01)
    setup = JAX["Setup"](args, open_envs("CartPole-v1", 4), num_iterations=10)
    before = JAX["begin"](jax.random.PRNGKey(3), setup)
    one = jax.jit(lambda training: JAX["train_iteration"](training, setup))
    (first, report), (seventh, later) = one(before), one(before._replace(iteration=jnp.int32(7)))
    rates = [float(charts["charts/learning_rate"]) for *_, charts in (report, later)]
    np.testing.assert_allclose(rates, [0.01, 0.003], rtol=1e-5)
    weights = [training.params["critic"][0]["weight"] for training in (before, first, seventh)]
    moved = [after - weights[0] for after in weights[1:]]
    assert np.abs(moved[0]).max() == pytest.approx(0.01, rel=0.01)  # the first step of Adam
    np.testing.assert_allclose(moved[1], 0.3 * moved[0], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_target_kl_ends_the_epochs():
    """With a bound that the first epoch breaks, the weights are those of one epoch."""
    _, stopped, _ = one_iteration(target_kl=0.0, learning_rate=0.01)
    _, free, _ = one_iteration(target_kl=1e9, learning_rate=0.01)
    _, plain, _ = one_iteration(learning_rate=0.01)
    assert [int(x.optimizer_state[1].count) for x in (stopped, free, plain)] == [4, 16, 16]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), free.params, plain.params)


class Constant:
    """A reward of 1 at every step; every fifth step ends the episode, by a time limit or as the end of the task."""

    num_envs, single_action_space = 2, gym.spaces.Discrete(2)
    single_observation_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, time_limit):
        self.time_limit = time_limit

    def reset(self, key):
        return jnp.zeros(2, int), jnp.ones((2, 1))

    def step(self, key, state, action):
        end, obs = (state + 1) % 5 == 0, jnp.ones((2, 1))
        limit = jnp.full(2, self.time_limit)
        return state + 1, Step(obs, jnp.ones(2), end & ~limit, end & limit, obs)


@pytest.mark.parametrize("time_limit", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_time_limit_bootstraps(time_limit):
    """The only state is worth 1 / (1 - gamma) under a time limit; where the task ends, a mean of what is left."""
    args = JAX["Args"](num_envs=2, num_steps=20, gamma=0.5, learning_rate=0.02, anneal_lr=False, clip_vloss=False)
    setup = JAX["Setup"](args, Constant(time_limit), num_iterations=1)
    training = JAX["begin"](jax.random.PRNGKey(0), setup)
    one = lambda training, _: JAX["train_iteration"](training, setup)  # noqa: E731
    training, _ = jax.jit(lambda training: jax.lax.scan(one, training, length=200))(training)
    value = float(JAX["value_of"](training.params, jnp.ones((1, 1)))[0])
    # without the limit: lambda-returns weigh how many steps are left, 1 to 5 of them
    assert value == pytest.approx(2, abs=0.05) if time_limit else 1.4 < value < 1.8


class Counts(Constant):
    """The reward tells the action; a policy that has learned is not uniform."""

    def step(self, key, state, action):
        state, step = super().step(key, state, action)
        return state, step._replace(reward=jnp.float32(action))


def test_actions_are_samples_of_the_policy():
    """Action 1 is as frequent as likely, within 4 standard errors, in each environment and in both together."""
    args = JAX["Args"](num_envs=2, num_steps=4096, learning_rate=0.0)
    setup = JAX["Setup"](args, Counts(True), num_iterations=1)
    training = JAX["begin"](jax.random.PRNGKey(0), setup)
    actor = [*training.params["actor"][:-1], training.params["actor"][-1] | {"bias": jnp.array([0.0, 1.0])}]
    training = training._replace(params=training.params | {"actor": actor})
    _, (reward, *_) = jax.jit(lambda training: JAX["train_iteration"](training, setup))(training)
    p = float(jnp.exp(JAX["evaluate_actions"](training.params, jnp.ones((1, 1)), jnp.ones(1, int))[0][0]))
    assert 0.6 < p < 0.85
    np.testing.assert_allclose(reward.mean(0), p, atol=4 * (p * (1 - p) / 4096) ** 0.5)
    both = float((reward[:, 0] * reward[:, 1]).mean())  # the environments draw independently
    assert both == pytest.approx(p**2, abs=4 * (p**2 * (1 - p**2) / 4096) ** 0.5)


# ---------------------------------------------------------------------- whole trainings
def folders(path):
    return sorted((path / "runs").iterdir(), key=lambda folder: int(folder.name.split("__")[2]))


def same(a, b):
    """Metrics but the clock's, weights and the state of the training are bit-equal."""
    assert comparable(a) == comparable(b)
    states = [sorted((run / "checkpoint").iterdir())[-1] / "tensors.safetensors" for run in (a, b)]
    for x, y in ((a / "model_last.safetensors", b / "model_last.safetensors"), states):
        x, y = load_file(x), load_file(y)
        x, y = ({k: v for k, v in z.items() if not k.startswith("/random")} for z in (x, y))  # not used by JAX
        assert x.keys() == y.keys() and all(np.array_equal(x[key], y[key]) for key in x)


def test_a_seed_is_the_same_alone_and_together(train, tmp_path):
    flags = [*SMALL, "--total-timesteps", 1024]
    train("ppo_jax", *flags, "--seed", 5, "--num-seeds", 3)
    together = folders(tmp_path)
    assert [run.name.split("__")[2] for run in together] == ["5", "6", "7"]
    for seed in (5, 7):
        train("ppo_jax", *flags, "--seed", seed, runs_dir=tmp_path / "alone")
    for alone in (tmp_path / "alone").iterdir():
        same(alone, together[int(alone.name.split("__")[2]) - 5])
    assert comparable(together[0]) != comparable(together[1])


def test_a_stopped_training_goes_on_exactly(train, tmp_path):
    """Ended after a chunk, resumed together and one seed alone; equal to the training never stopped."""
    flags = [*SMALL, "--num-seeds", 2]
    train("ppo_jax", *flags, "--total-timesteps", 4096)
    whole = folders(tmp_path)
    train("ppo_jax", *flags, "--total-timesteps", 4096, "--target-return", 5, runs_dir=tmp_path / "cut" / "runs")
    cut = folders(tmp_path / "cut")
    assert rows(cut[0])[-1]["global_step"] < 4096
    shutil.copytree(cut[1], tmp_path / "alone" / cut[1].name)
    train("ppo_jax", "--resume", cut[0], "--num-seeds", 2, "--target-return", "None")
    train("ppo_jax", "--resume", tmp_path / "alone" / cut[1].name, "--target-return", "None")
    whole, cut = [*whole, whole[1]], [*cut, tmp_path / "alone" / cut[1].name]
    for a, b in zip(whole, cut, strict=True):
        assert rows(b)[-1]["global_step"] == 4096
        finals = [load_file(run / "model_last.safetensors") for run in (a, b)]
        assert all(np.array_equal(finals[0][key], finals[1][key]) for key in finals[0])


def test_it_logs_what_its_twin_logs(train):
    run = train("ppo_jax", *SMALL, "--total-timesteps", 512)["run"].runs[0]
    twin = train("ppo", *SMALL, "--total-timesteps", 512)["run"]
    keys = [{key for row in rows(r.dir) for key in row} for r in (run, twin)]
    assert keys[0] == keys[1]
    evaluated = [[row["global_step"] for row in rows(r.dir, "eval/episodic_return")] for r in (run, twin)]
    assert evaluated[0] == evaluated[1] and len(evaluated[0]) > 1  # also where a chunk must end for it
    config = dataclasses.asdict(run.args).keys() - {"num_seeds"}
    assert config == dataclasses.asdict(twin.args).keys()


@pytest.mark.slow
def test_flags_that_change_nothing_say_so(train):
    train("ppo_jax", "--total-timesteps", "512", "--eval-episodes", "1")
    assert "warning" not in train.out
    flags = ["--compile", "--no-fast", "--no-torch-deterministic"]
    train("ppo_jax", "--total-timesteps", "512", "--eval-episodes", "1", *flags)
    assert re.findall(r"warning: (\S+) changes nothing here: it is for files in torch", train.out) == flags


@pytest.mark.slow
def test_a_model_can_be_played(train, tmp_path):
    run = train("ppo_jax", *SMALL, "--total-timesteps", 512)["run"].runs[0]
    model = load_file(run.dir / "model.safetensors")
    assert model["params.actor.0.weight"].shape == (4, 64)
    before = comparable(run.dir)
    played = [
        shell(sys.executable, "-m", "solorl.cli", "play", run.dir, "--episodes", 3, "--seed", 7) for _ in range(2)
    ]
    assert "over 3 greedy episodes" in played[0].stdout and played[0].stdout == played[1].stdout
    assert comparable(run.dir) == before  # nothing of the run was touched


@pytest.mark.slow
def test_seeds_side_by_side_are_trained_as_in_threads(train, tmp_path, monkeypatch):
    """As on a GPU, one call for all seeds: rows, models and checkpoints are those of threads except for rounding."""
    flags = [*SMALL, "--num-seeds", 2, "--total-timesteps", 256]
    train("ppo_jax", *flags)
    monkeypatch.setattr("solorl.compute.xla.is_cpu", lambda device: False)
    run = train("ppo_jax", *flags, runs_dir=tmp_path / "beside" / "runs")["run"]
    assert run.side_by_side
    for a, b in zip(folders(tmp_path), folders(tmp_path / "beside"), strict=True):
        for mine, other in zip(comparable(a), comparable(b), strict=True):
            assert mine.keys() == other.keys()
            np.testing.assert_allclose(list(mine.values()), list(other.values()), rtol=2e-3, atol=2e-4)
        for file in ("model_last.safetensors", next((a / "checkpoint").glob("*/tensors.safetensors")).relative_to(a)):
            mine, other = load_file(a / file), load_file(b / file)
            assert mine.keys() == other.keys()
            for key, array in mine.items():
                np.testing.assert_allclose(array, other[key], rtol=2e-3, atol=2e-3, err_msg=key)
    first, second = (load_file(run / "model_last.safetensors") for run in folders(tmp_path / "beside"))
    assert not np.allclose(first["params.actor.0.weight"], second["params.actor.0.weight"])


@pytest.mark.slow
def test_a_seed_that_diverges_ends_alone(train, tmp_path):
    """The first of two: its row has a NaN in the second chunk; the other seed trains as it would alone."""
    source, line = script("ppo_jax").read_text(), "        run.log(global_step"
    assert source.count(line) == 1
    change = "        if global_step > 700:\n            charts['losses/explained_variance'][0] = float('nan')\n"
    (tmp_path / "ppo_jax.py").write_text(source.replace(line, change + line))
    train(tmp_path / "ppo_jax.py", *SMALL, "--num-seeds", 2, "--total-timesteps", 2048, code=3)
    diverged, other = folders(tmp_path)
    assert "losses/explained_variance is nan" in train.out and (diverged / "crash").is_dir()
    assert [json.loads((run / "status.json").read_text())["status"] for run in (diverged, other)] == [
        "diverged: losses/explained_variance is nan",
        "finished",
    ]
    train("ppo_jax", *SMALL, "--seed", 2, "--total-timesteps", 2048, runs_dir=tmp_path / "alone" / "runs")
    assert comparable(other) == comparable(*folders(tmp_path / "alone"))


def test_it_learns_cartpole(train):
    """60,000 steps; ppo.py needs about as many for a greedy return of 300."""
    variables = train("ppo_jax", "--total-timesteps", 60_000, "--num-seeds", 2, "--eval-every", 0)
    means = [run.evaluator.last[1] for run in variables["run"].runs]
    assert min(means) > 200, means


def test_wrong_input_is_one_sentence(train):
    train("ppo_jax", "--env-id", "Pendulum-v1", code=2)
    assert "ppo_continuous_action_jax.py" in train.out
    train("ppo_jax", "--num-seeds", 0, code=2)
    assert "--num-seeds" in train.out


THREADS = """
import collections, pathlib, runpy, sys
path, *flags = sys.argv[1:]
sys.argv = [path, *flags]
runpy.run_path(path, run_name="__main__")
names = collections.Counter(file.read_text().strip() for file in pathlib.Path("/proc/self/task").glob("*/comm"))
print("XLA threads:", names["tf_XLAEigen"])
"""


@pytest.mark.slow
def test_the_number_of_threads_is_kept(train, tmp_path, monkeypatch):
    """For each seed while they are trained together; the run folders hold the sum."""
    asked = []
    monkeypatch.setattr(xla, "start_xla", lambda threads: asked.append(threads) or threads)
    train("ppo_jax", *SMALL, "--total-timesteps", 256, "--num-seeds", 3, "--threads", 2)
    first, second, _ = folders(tmp_path)
    more = ["--total-timesteps", 512, "--resume-changed"]
    train("ppo_jax", "--resume", first, "--num-seeds", 3, *more)
    train("ppo_jax", "--resume", second, *more)
    assert asked == [6, 6, 6]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux") or len(own_cores()) < 2, reason="needs two cores")
def test_xla_has_as_many_threads_as_asked_for_and_resumed_seeds_have_the_same(tmp_path):
    """Counted in processes of their own, because XLA starts once in a process."""

    def threads(*flags, **variables):
        words = [sys.executable, "-c", THREADS, script("ppo_jax"), *SMALL, "--total-timesteps", 256, *flags]
        clean = {name: value for name, value in environment(**variables).items() if variables or name != "NPROC"}
        clean["XDG_CACHE_HOME"] = str(tmp_path / "cache")
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, env=clean, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return int(done.stdout.rpartition("XLA threads:")[2])

    assert threads() == 1
    assert threads("--threads", 2) == threads("--num-seeds", 2, "--seed", 5) == 2
    assert threads("--threads", 2, NPROC="1") == 1
    of = {json.loads((run / "config.json").read_text())["args"]["seed"]: run for run in folders(tmp_path)}
    more = ["--total-timesteps", 512, "--resume-changed"]
    assert threads("--resume", of[6], *more) == 2  # of two seeds together, one alone
    kept = {path.name for path in (tmp_path / "cache/solorl/jax").iterdir()}
    assert kept == {"threads_1", "threads_2"}


def test_a_key_that_no_checkpoint_can_hold_is_refused_at_the_start(train, tmp_path):
    """Else the first save would lose what was trained."""
    text, mine = script("ppo_jax").read_text(), tmp_path / "mine.py"
    old = "obs, key, jnp.int32(0))"
    assert text.count(old) == 1
    mine.write_text(text.replace(old, "obs, jax.random.key(3), jnp.int32(0))"))
    train(mine, *SMALL, "--total-timesteps", 512, code=2)
    assert "key must be a key of jax.random.PRNGKey" in train.out
    assert train.out.count("\n") == 1 and not (tmp_path / "runs").exists()


def test_a_metric_that_is_not_one_number_is_no_sum_of_its_entries(train, tmp_path):
    text, mine = script("ppo_jax").read_text(), tmp_path / "mine.py"
    old = '"losses/entropy": entropy.mean(),'
    assert text.count(old) == 1
    mine.write_text(text.replace(old, f'{old}\n        "mine/vector": jnp.abs(logratio),'))
    with pytest.raises(AssertionError, match="a metric of a gradient step must be one number"):
        train(mine, *SMALL, "--total-timesteps", 512, "--num-minibatches", 4)  # as many as epochs
