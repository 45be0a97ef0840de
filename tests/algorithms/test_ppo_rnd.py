"""ppo_rnd.py: what it adds to ppo.py: statistics, the intrinsic reward, its endless returns, the predictor."""

import shutil

import numpy as np
import pytest
import torch
from conftest import comparable, definitions

RND = definitions("ppo_rnd")
SMALL = (
    "--num-envs 2 --num-steps 16 --total-timesteps 192 --num-minibatches 2 --update-epochs 2 --eval-episodes 1 "
    "--warmup-rollouts 2 --learning-rate 0.01 --no-anneal-lr"
).split()
SHORT = [*SMALL, "--env-id", "probes:ShortCartPole-v0"]  # episodes of 5 steps


def test_statistics_are_those_of_all_data():
    """Of each entry over the other axes, as NumPy computes them at once."""
    data = np.random.default_rng(0).normal([3, -50, 0], [0.1, 9, 1], size=(500, 3)).astype(np.float32)
    statistics = RND["RunningMeanStd"](3)
    for part in np.split(data, [7, 8, 200]):
        statistics.update(part)
    np.testing.assert_allclose(statistics.mean, data.mean(0, dtype=np.float64), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(statistics.var, data.var(0, dtype=np.float64), rtol=1e-4)


def test_observations_of_warm_up_and_training_are_counted(train):
    v = train("ppo_rnd", *SHORT)
    assert v["obs_normalizer"].count == 192 and v["return_normalizer"].count == 128  # 2 of 6 rollouts warm up
    assert v["obs_normalizer"].mean.shape == (4,) and (v["obs_normalizer"].var > 0).all()
    assert v["normalized"].abs().max() <= 5


def test_intrinsic_returns_run_over_time_in_each_environment(train):
    """A loop over the rewards of each environment: over rollouts, and over the ends of episodes."""
    gamma, rewards = 0.9, np.random.default_rng(1).random((12, 3)).astype(np.float32)
    so_far, endless = np.zeros(3, np.float32), np.zeros((6, 3), np.float32)
    got = []
    for part in np.split(rewards, 2):
        returns, so_far = RND["discounted_returns"](part, endless, so_far, gamma)
        got.append(returns)
    expected = [[sum(gamma ** (t - k) * rewards[k, i] for k in range(t + 1)) for i in range(3)] for t in range(12)]
    np.testing.assert_allclose(np.concatenate(got), expected, rtol=1e-5)

    v = train("ppo_rnd", *SHORT, "--total-timesteps", "96", "--int-gamma", "0.9")  # one rollout after the warm-up
    assert v["done"].sum() == 6
    reward, expected = v["int_reward"], np.zeros((16, 2))
    for i in range(2):
        for t in range(16):
            expected[t, i] = sum(gamma ** (t - k) * reward[k, i] for k in range(t + 1))
    np.testing.assert_allclose(v["int_returns"], expected, rtol=1e-4)
    np.testing.assert_allclose(v["now"].so_far, expected[-1], rtol=1e-4)
    np.testing.assert_allclose(v["scaled_int_reward"], reward / expected.std(), rtol=1e-3)
    assert v["scaled_int_reward"].dtype == np.float32  # with NumPy 2, too


def test_only_the_extrinsic_return_ends_with_the_episode(train):
    """Lambda 1: an advantage is the discounted rewards to the end less the value; intrinsic ones cross all ends."""
    v = train("ppo_rnd", *SHORT, "--total-timesteps", "96", "--gae-lambda", "1")
    reward, done, value = v["scaled_int_reward"], v["done"], v["value"]
    assert done[:-1].any()
    expected = np.zeros((2, 16, 2))
    for i in range(2):
        ext, intr = v["next_value"][i]
        for t in reversed(range(16)):
            ext = v["reward"][t, i] + 0.99 * ((1 - done[t, i]) * ext + v["final_value"][t, i])
            intr = reward[t, i] + 0.99 * intr
            expected[:, t, i] = ext, intr
    np.testing.assert_allclose(v["returns"], expected.transpose(1, 2, 0), rtol=1e-4, atol=1e-4)
    advantage = 2 * (expected[0] - value[..., 0]) + expected[1] - value[..., 1]
    np.testing.assert_allclose(v["advantage"], advantage, rtol=1e-4, atol=1e-4)


def test_the_observation_reached_is_the_last_one_of_its_episode(train):
    """Not the first of the next one: its pole has moved."""
    v = train("ppo_rnd", *SHORT)
    inside = ~v["done"][:-1].astype(bool)
    assert np.array_equal(v["reached"][:-1][inside], v["obs"][1:][inside])
    assert not (v["reached"][:-1][~inside] == v["obs"][1:][~inside]).any()


def test_the_target_never_changes_and_the_predictor_does(train):
    short, long = (train("ppo_rnd", *SHORT, "--total-timesteps", steps) for steps in (96, 192))
    vector = torch.nn.utils.parameters_to_vector
    assert torch.equal(*(vector(v["target"].parameters()) for v in (short, long)))
    assert not torch.equal(*(vector(v["predictor"].parameters()) for v in (short, long)))
    assert not any(p.requires_grad for p in long["target"].parameters())


def test_the_predictor_learns_from_the_chosen_part_only():
    torch.manual_seed(0)
    predictor = RND["tanh_mlp"](3, 128, gain=1.0)
    modules = torch.nn.ModuleDict({"agent": RND["Agent"](3, 2), "predictor": predictor})
    args, n = RND["Args"](), 8
    x, zeros = torch.randn(n, 3), torch.zeros(n)
    batch = RND["Batch"](x, zeros.long(), zeros, torch.randn(n), torch.zeros(n, 2), x, torch.randn(n, 128))
    chosen = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])
    loss, metrics = RND["rnd_loss"](modules, batch, chosen, args)
    expected = ((predictor(x) - batch.features) ** 2)[[0, 3]].mean()
    torch.testing.assert_close(metrics["losses/predictor_loss"], expected)
    torch.testing.assert_close(loss - RND["rnd_loss"](modules, batch, zeros, args)[0], expected)
    value = modules["agent"](x)[1]
    torch.testing.assert_close(metrics["losses/value_loss"], 0.5 * (value**2).sum(1).mean())


@pytest.mark.parametrize("step", [32, 64, 128])
def test_resumed_in_any_phase_equals_uninterrupted(step, train, monkeypatch):
    """In the warm-up, between it and the training, in the training."""
    monkeypatch.setattr("solorl.checkpoints.checkpoint.KEEP", 100)
    whole = train("ppo_rnd", *SHORT, "--save-every", "32")
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    for path in (run_dir / "checkpoint").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    v = train("ppo_rnd", "--resume", run_dir)
    assert v["run"].checkpoints.resumed["step"] == step and comparable(run_dir) == expected
    for name in ("agent", "predictor", "target", "obs_normalizer", "return_normalizer"):
        states = zip(v[name].state_dict().values(), whole[name].state_dict().values(), strict=True)
        assert all(torch.equal(x, y) for x, y in states), name
    assert v["run"].checkpoints.parts["target"] is v["target"]  # the seed alone would draw it again, here
    assert np.array_equal(v["now"].so_far, whole["now"].so_far) and np.array_equal(v["reached"], whole["reached"])


def test_a_budget_that_the_warm_up_uses_up_is_refused(train):
    train("ppo_rnd", *SHORT, "--total-timesteps", "64", code=2)
    assert "--total-timesteps leaves no rollout to learn from after --warmup-rollouts" in train.out


@pytest.mark.slow
def test_finds_the_door_behind_the_key(train):
    v = train("ppo_rnd", "--total-timesteps", 60_000, "--log-every", 5000, "--eval-every", 0)
    assert v["run"].evaluator.score == pytest.approx(1.0)
