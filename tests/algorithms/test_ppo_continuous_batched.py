"""ppo_continuous_action_batched.py: tensors from the simulator to the gradient and back, statistics, resume."""

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows

PPO = definitions("ppo_continuous_action_batched")
PARENT = definitions("ppo_continuous_action")
SMALL = (
    "--env-id simulators:SavedAim-v0 --num-envs 6 --num-steps 8 --total-timesteps 192 --num-minibatches 2 "
    "--eval-episodes 2 --learning-rate 0.01 --gamma 0.99 --update-epochs 4"
).split()


# ---------------------------------------------------------------------- pure functions
def test_returns_are_the_discounted_rewards_of_the_episode_so_far():
    """A sum over the steps of the episode, over two rollouts."""
    rng, gamma = np.random.default_rng(0), 0.9
    reward, done = rng.normal(size=(12, 3)).astype(np.float32), (rng.random((12, 3)) < 0.3).astype(np.float32)
    so_far, got = torch.zeros(3), []
    for part in (slice(0, 7), slice(7, 12)):
        returns, so_far = PPO["tensor_returns"](torch.tensor(reward[part]), torch.tensor(done[part]), so_far, gamma)
        got.append(returns)
    expected = np.zeros((12, 3))
    for t in range(12):
        for i in range(3):
            first = max((k + 1 for k in range(t) if done[k, i]), default=0)
            expected[t, i] = sum(gamma ** (t - k) * reward[k, i] for k in range(first, t + 1))
    np.testing.assert_allclose(torch.cat(got), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(so_far, expected[-1] * (1 - done[-1]), rtol=1e-4, atol=1e-5)


def test_advantages_are_those_of_numpy():
    rng = np.random.default_rng(1)
    reward, value, final_value = (rng.normal(size=(9, 4)).astype(np.float32) for _ in range(3))
    done, next_value = (rng.random((9, 4)) < 0.3).astype(np.float32), rng.normal(size=4).astype(np.float32)
    final_value *= done
    inputs = (reward, value, done, final_value, next_value)
    got = PPO["tensor_gae"](*map(torch.tensor, inputs), 0.97, 0.9)
    np.testing.assert_allclose(got, PARENT["gae"](*inputs, 0.97, 0.9), rtol=1e-4, atol=1e-5)
    assert not np.allclose(got, PARENT["gae"](reward, value, 0 * done, final_value, next_value, 0.97, 0.9))


def test_samples_have_the_log_probabilities_that_learning_gives_them():
    torch.manual_seed(0)
    agent = PPO["Agent"](2, 3, 0.7)
    obs = torch.randn(1, 2).expand(20_000, 2)
    action, logprob, value = agent.sample(obs)
    again = agent.evaluate_actions(obs, action)
    torch.testing.assert_close(logprob, again[0].detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(value, again[2].detach())
    torch.testing.assert_close(action.mean(0), agent(obs[:1])[0][0].detach(), atol=0.02, rtol=0)
    torch.testing.assert_close(action.std(0), torch.full((3,), 0.7), atol=0.02, rtol=0)
    assert not (action.requires_grad or logprob.requires_grad or value.requires_grad)


# ---------------------------------------------------------------------- a training
def test_statistics_are_those_of_all_raw_observations_and_frozen_in_evaluation(train):
    v = train("ppo_continuous_action_batched", *SMALL, "--total-timesteps", "48")
    statistics, seen = v["agent"].obs_normalizer, v["raw_obs"].flatten(0, 1).double()
    assert statistics.count == 48 and v["agent"].return_normalizer.count == 48  # an evaluation came after it
    torch.testing.assert_close(statistics.mean.double(), seen.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(statistics.var.double(), seen.var(0, correction=0), rtol=1e-4, atol=1e-6)
    assert torch.equal(v["obs"], v["raw_obs"].clamp(-10, 10))  # acting and learning saw those from before the rollout
    returns, _ = PARENT["discounted_returns"](v["reward"].numpy(), v["done"].numpy(), np.zeros(6, np.float32), 0.99)
    scaled = (v["reward"] / returns.std()).clamp(-10, 10)
    torch.testing.assert_close(v["scaled_reward"], scaled, rtol=1e-4, atol=1e-5)


def test_a_time_limit_bootstraps_from_the_final_observation_and_an_end_does_not(train):
    """The final observation of an episode is not the observation that comes next."""
    flags = [*SMALL, "--learning-rate", "0", "--std-init", "2"]
    agent = train("ppo_continuous_action_batched", *flags, "--total-timesteps", "96")["agent"]
    before = train("ppo_continuous_action_batched", *flags, "--total-timesteps", "48")["agent"].obs_normalizer
    v = train("ppo_continuous_action_batched", *flags, "--total-timesteps", "96")
    timeout, done = v["timeout"], v["done"].bool()
    assert timeout.sum() > 3 and (done & ~timeout).sum() > 3
    final_obs = torch.stack([v["raw_obs"][..., 0], v["raw_obs"][..., 1] + 1], -1)
    expected = agent(before(final_obs[timeout]))[1].detach()
    torch.testing.assert_close(v["final_value"][timeout], expected, rtol=1e-4, atol=1e-5)
    assert (v["final_value"][~timeout] == 0).all() and v["advantage"].isfinite().all()
    assert torch.equal(timeout, done & (v["raw_obs"][..., 1] == 4) & (v["action"][..., 0] <= 0.9))


def test_nothing_goes_through_numpy_step_by_step(train, monkeypatch):
    """Twice as many steps in a rollout: as often does a tensor become an array, or an array a tensor."""
    counts = []
    for num_steps in (8, 16):
        with monkeypatch.context() as patch:
            calls = []
            for name in ("numpy", "__array__", "tolist", "item", "cpu"):
                real = getattr(torch.Tensor, name)
                patch.setattr(torch.Tensor, name, lambda x, *a, real=real, **k: calls.append(1) or real(x, *a, **k))
            for name in ("from_numpy", "as_tensor", "tensor"):
                real = getattr(torch, name)
                patch.setattr(torch, name, lambda *a, real=real, **k: calls.append(1) or real(*a, **k))
            flags = [*SMALL, "--num-steps", num_steps, "--total-timesteps", num_steps * 18, "--log-every", "0"]
            v = train("ppo_continuous_action_batched", *flags)
            assert v["num_iterations"] == 3
            counts.append(len(calls))
    assert counts[0] == counts[1] > 0


def test_resumed_equals_uninterrupted(train, tmp_path):
    """In the middle of episodes, where the simulator tells its state."""
    flags = [*SMALL, "--std-init", "0.5"]
    whole = train("ppo_continuous_action_batched", *flags, runs_dir=tmp_path / "whole")
    stopped = train("ppo_continuous_action_batched", *flags, "--save-every", "96", runs_dir=tmp_path / "cut")
    run_dir = stopped["run"].dir
    drop_last_checkpoint(run_dir)
    again = train("ppo_continuous_action_batched", "--resume", run_dir)
    assert again["run"].checkpoints.resumed["step"] == 96 and comparable(run_dir) == comparable(whole["run"].dir)
    for key, value in whole["agent"].state_dict().items():
        assert torch.equal(value, again["agent"].state_dict()[key]), key
    assert torch.equal(whole["now"].so_far, again["now"].so_far) and (whole["now"].so_far != 0).any()
    assert torch.equal(whole["next_obs"], again["next_obs"])


def test_without_a_state_the_running_episodes_restart_and_the_run_says_so(train):
    flags = [
        *SMALL,
        "--env-id",
        "simulators:TensorAim-v0",
        "--num-steps",
        2,
        "--total-timesteps",
        24,
        "--save-every",
        12,
    ]
    run_dir = train("ppo_continuous_action_batched", *flags)["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("ppo_continuous_action_batched", "--resume", run_dir)
    assert "the state of Aim cannot be saved, so its running episodes restart" in train.out
    assert list(v["run"].restarted) == list(range(6)) and v["raw_obs"][0, :, 1].eq(0).all()
    assert not v["done"].all()
    returns, _ = PARENT["discounted_returns"](v["reward"].numpy(), v["done"].numpy(), np.zeros(6, np.float32), 0.99)
    np.testing.assert_allclose(v["now"].so_far, returns[-1] * (1 - v["done"][-1].numpy()), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- simulators that do not fit
NO_BATCHES = "does not step batches of tensors; use ppo_continuous_action.py for other environments"


@pytest.mark.parametrize(
    ("env_id", "sentence"),
    [
        ("Pendulum-v1", f"Pendulum-v1 {NO_BATCHES}"),
        ("CartPole-v1", f"CartPole-v1 {NO_BATCHES}"),
        (
            "simulators:ArrayAim-v0",
            "simulators:ArrayAim-v0 must give the observations of all environments as one tensor on cpu",
        ),
    ],
)
def test_a_simulator_that_does_not_fit_is_one_sentence(env_id, sentence, train):
    train("ppo_continuous_action_batched", *SMALL, "--env-id", env_id, code=2)
    assert train.out == f"error: {sentence}\n"


def test_learns_where_to_aim(train):
    """The best return is 5, that of actions 0 is about 3."""
    flags = "--num-envs 32 --num-steps 16 --total-timesteps 10240 --gamma 0 --std-init 0.5 --learning-rate 0.002"
    flags += " --num-minibatches 2 --update-epochs 4"
    v = train("ppo_continuous_action_batched", *SMALL[:2], *flags.split(), "--log-every", 5000)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > 4.6
