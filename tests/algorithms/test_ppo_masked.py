"""ppo_masked.py: invalid actions have probability 0 in acting, learning and evaluation, and it learns what few are."""

import shutil

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions

MASKED = definitions("ppo_masked")
SMALL = "--num-envs 2 --num-steps 16 --total-timesteps 128 --num-minibatches 2 --eval-episodes 1".split()
OBS, ACTION = torch.linspace(-1, 1, 15).reshape(5, 3), torch.tensor([0, 2, 3, 0, 1])
MASK = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)


def agent_of(num_actions=4):
    """An agent whose policy is far from uniform."""
    torch.manual_seed(0)
    agent = MASKED["Agent"](3, num_actions)
    torch.nn.init.normal_(agent.actor[-1].weight)
    return agent


def counts_valid(games):
    """The grid, which notes whether each action is valid."""

    class Noting(gym.Wrapper):
        def step(self, action):
            games.append(bool(self.unwrapped._mask()[action]))
            return super().step(action)

    return Noting


# ---------------------------------------------------------------------- pure functions
def test_log_probability_and_entropy_are_those_of_a_softmax_over_the_valid_actions_alone():
    agent = agent_of()
    logprob, entropy, _ = agent.evaluate(OBS, MASK, ACTION)
    logits = agent(OBS)[0].detach().double()
    for i in range(5):
        valid = np.flatnonzero(MASK[i])
        p = logits[i, valid].softmax(0)
        assert logprob[i].item() == pytest.approx(p[list(valid).index(ACTION[i])].log().item(), abs=1e-5)
        assert entropy[i].item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-5)
    assert entropy[1] == 0 and logprob[1] == 0  # one action alone


def test_logits_of_invalid_actions_get_no_gradient_and_nothing_is_nan():
    agent = agent_of()
    logits = agent(OBS)[0].detach().requires_grad_()
    agent.forward = lambda obs: (logits, torch.zeros(5))
    batch = MASKED["Batch"](OBS, MASK, ACTION, torch.full((5,), -1.0), torch.zeros(5), torch.randn(5), torch.zeros(5))
    MASKED["ppo_masked_loss"](agent, batch, MASKED["Args"](ent_coef=0.5))[0].backward()
    assert torch.isfinite(logits.grad).all() and (logits.grad[~MASK] == 0).all()
    assert (logits.grad[MASK][[0, 1]] != 0).all()


def test_samples_are_valid_and_as_frequent_as_the_policy_says():
    logits, mask = np.array([[0.0, 900.0, 1.0, -5.0]], np.float32), np.array([[True, False, True, True]])
    np.random.seed(0)
    masked = MASKED["masked"](logits, mask).repeat(20_000, 0)
    action, logprob = MASKED["sample_categorical"](masked)
    p = np.exp(logits[0, [0, 2, 3]]) / np.exp(logits[0, [0, 2, 3]]).sum()
    frequency = np.bincount(action, minlength=4) / 20_000
    assert masked.dtype == np.float32 and frequency[1] == 0
    np.testing.assert_allclose(frequency[[0, 2, 3]], p, atol=0.02)
    np.testing.assert_allclose(logprob, np.log(p)[[0, -1, 1, 2]][action], atol=1e-5)


def test_act_is_the_most_likely_valid_action_also_where_an_invalid_one_is_more_likely():
    agent = agent_of()
    logits = agent(OBS)[0].detach().numpy()
    expected = [max(np.flatnonzero(MASK[i]), key=lambda a: row[a]) for i, row in enumerate(logits)]
    assert agent.act(OBS.numpy(), MASK.numpy()).tolist() == expected != logits.argmax(1).tolist()


# ---------------------------------------------------------------------- the real script's variables
def test_no_invalid_action_is_taken_in_training_and_evaluation(train, monkeypatch):
    games = []
    make, noting = gym.make, counts_valid(games)
    monkeypatch.setattr(gym, "make", lambda *words, **kwargs: noting(make(*words, **kwargs)))
    v = train("ppo_masked", *SMALL)
    assert v["mask"].shape == (16, 2, 96) and v["mask"].dtype == bool
    assert len(games) >= 128 + 40 and all(games[1:])  # the first is the trial step of the library
    assert np.take_along_axis(v["mask"], v["action"][..., None], 2).all()


def test_the_first_ratio_is_one(train):
    v = train("ppo_masked", *SMALL, "--num-minibatches", "1", "--update-epochs", "1", "--learning-rate", "0.01")
    assert all(abs(v["metrics"][f"losses/{name}"]) < 1e-6 for name in ("approx_kl", "clipfrac"))


def test_an_environment_without_masks_ends_in_one_sentence(train, tmp_path):
    train("ppo_masked", "--env-id", "CartPole-v1", *SMALL, code=2)
    assert "CartPole-v1 gives no action_mask; use ppo.py, which needs none" in train.out
    assert not (tmp_path / "runs").exists()


class Dead(gym.Env):
    """Actions run out after `last` steps; with `ends` the game ends there."""

    observation_space, action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32), gym.spaces.Discrete(2)

    def __init__(self, ends):
        self.ends = ends

    def answer(self):
        return np.zeros(1, np.float32), {"action_mask": np.full(2, self.steps < 5)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.answer()

    def step(self, action):
        self.steps += 1
        obs, info = self.answer()
        return obs, 1.0, self.ends and self.steps == 5, False, info


gym.register("Dead-v0", Dead, kwargs={"ends": False}, max_episode_steps=9, disable_env_checker=True)
gym.register("DeadEnd-v0", Dead, kwargs={"ends": True}, disable_env_checker=True)


def test_a_mask_that_allows_nothing_ends_in_one_sentence_unless_the_game_is_over(train):
    train("ppo_masked", "--env-id", "Dead-v0", *SMALL, code=2)
    assert "Dead-v0 gives an action_mask that allows no action" in train.out
    assert train("ppo_masked", "--env-id", "DeadEnd-v0", *SMALL)["mask"].all()


def test_resumed_equals_uninterrupted(train):
    flags = [*SMALL, "--save-every", "64", "--learning-rate", "0.01", "--no-anneal-lr"]
    whole = train("ppo_masked", *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    shutil.rmtree(sorted((run_dir / "checkpoint").iterdir())[-1])
    v = train("ppo_masked", "--resume", run_dir)
    assert v["start"] == 2 and comparable(run_dir) == expected and np.array_equal(v["mask"], whole["mask"])
    assert all(torch.equal(x, y) for x, y in zip(v["agent"].parameters(), whole["agent"].parameters(), strict=True))


# ---------------------------------------------------------------------- it learns
@pytest.mark.slow
def test_learns_the_grid(train):
    v = train("ppo_masked", "--total-timesteps", "50000", "--eval-episodes", "20", "--log-every", "10000")
    assert v["run"].evaluator.score > 2.5  # the best policy: 2.7
