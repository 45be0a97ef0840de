"""ppo_multidiscrete.py: the joint distribution against all actions one by one, masks, and that it learns."""

from itertools import product

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint

MULTI = definitions("ppo_multidiscrete")
SMALL = "--num-envs 2 --num-steps 16 --total-timesteps 128 --num-minibatches 2 --eval-episodes 1".split()
SIZES = [2, 4, 3]
ACTIONS = list(product(*map(range, SIZES)))  # all 24
MASK = np.array([1, 1, 0, 1, 1, 0, 1, 0, 1], bool)
VALID = [action for action in ACTIONS if MASK[[action[0], 2 + action[1], 6 + action[2]]].all()]


def agent_of():
    """An agent whose policy is far from uniform."""
    torch.manual_seed(0)
    agent = MULTI["Agent"](3, SIZES)
    torch.nn.init.normal_(agent.actor[-1].weight)
    return agent


def joint(agent, obs, actions):
    """The probability of each action: a softmax over the sums of logits of all of them."""
    logits = agent(obs)[0][0].detach().double()
    return torch.stack([logits[a] + logits[2 + b] + logits[6 + c] for a, b, c in actions]).softmax(0)


# ---------------------------------------------------------------------- pure functions
@pytest.mark.parametrize("masked", [False, True])
def test_the_joint_distribution_is_that_of_all_actions_one_by_one(masked):
    agent, obs, actions = agent_of(), torch.tensor([[0.3, -1.0, 2.0]]), VALID if masked else ACTIONS
    mask = torch.as_tensor(MASK if masked else np.ones(9, bool)).expand(len(actions), 9)
    logprob, entropy, value = agent.evaluate_actions(obs.expand(len(actions), 3), mask, torch.tensor(actions))
    p = joint(agent, obs, actions)
    assert logprob.shape == entropy.shape == value.shape == (len(actions),)
    torch.testing.assert_close(logprob.double(), p.log(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), -(p * p.log()).sum().expand(len(actions)), atol=1e-5, rtol=1e-5)


def test_samples_are_as_frequent_as_the_joint_distribution_says():
    agent, obs = agent_of(), torch.tensor([[0.3, -1.0, 2.0]])
    np.random.seed(0)
    logits = MULTI["allowed_logits"](agent(obs)[0].detach().numpy(), MASK).repeat(20_000, 0)
    action, logprob = MULTI["sample_parts"](logits, SIZES)
    p = joint(agent, obs, VALID).numpy()
    drawn = np.array([VALID.index(tuple(a)) for a in action.tolist()])  # ValueError for an invalid one
    np.testing.assert_allclose(np.bincount(drawn, minlength=len(VALID)) / 20_000, p, atol=0.02)
    np.testing.assert_allclose(logprob, np.log(p)[drawn], atol=1e-5)


def test_logits_of_invalid_choices_get_no_gradient_and_nothing_is_nan():
    agent, mask = agent_of(), torch.as_tensor(MASK).expand(8, 9)
    logits = agent(torch.randn(8, 3))[0].detach().requires_grad_()
    agent.forward = lambda obs: (logits, torch.zeros(8))
    batch = MULTI["Batch"](None, mask, torch.tensor(VALID), torch.full((8,), -1.0), *torch.randn(3, 8))
    MULTI["ppo_masked_loss"](agent, batch, MULTI["Args"](ent_coef=0.5))[0].backward()
    assert torch.isfinite(logits.grad).all() and (logits.grad[~mask] == 0).all() and (logits.grad != 0).any()


def test_act_is_the_most_likely_valid_action():
    agent, obs = agent_of(), torch.randn(30, 3)
    for actions, mask in ((ACTIONS, None), (VALID, MASK)):
        expected = [actions[joint(agent, x[None], actions).argmax()] for x in obs]
        masks = None if mask is None else mask[None].repeat(30, 0)
        assert list(map(tuple, agent.act(obs.numpy(), masks).tolist())) == expected


# ---------------------------------------------------------------------- the real script's variables
def test_without_masks_all_is_valid_and_with_masks_nothing_invalid_is_done(train):
    v = train("ppo_multidiscrete", *SMALL)
    assert v["mask"].all() and v["mask"].shape == (16, 2, 8) and v["action"].shape == (16, 2, 2)
    v = train("ppo_multidiscrete", "--env-id", "games/TwoNumbersMasked-v0", *SMALL)  # which raises for an invalid one
    assert (v["mask"].sum(-1) == 6).all() and (v["mask"][..., :4] == v["obs"][..., 4:]).all()


def test_the_first_ratio_is_one(train):
    flags = ["--env-id", "games/TwoNumbersMasked-v0", "--num-minibatches", 1, "--update-epochs", 1]
    v = train("ppo_multidiscrete", *SMALL, *flags, "--learning-rate", "0.01")
    assert all(abs(v["metrics"][f"losses/{name}"]) < 1e-6 for name in ("approx_kl", "clipfrac"))


class Stuck(gym.Env):
    """The mask allows the first number, and nothing of the second one."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, shape):
        self.action_space = gym.spaces.MultiDiscrete(np.full(shape, 2))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {"action_mask": np.array([True, True, False, False])}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, self.reset()[1]


class Seldom(Stuck):
    """A mask in step 120 only."""

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return super().reset(seed=seed)[0], {}

    def step(self, action):
        self.time += 1
        info = {"action_mask": np.array([True, False, True, False])} if self.time == 120 else {}
        return np.zeros(1, np.float32), 0.0, False, False, info


gym.register("Seldom-v0", Seldom, kwargs={"shape": 2}, max_episode_steps=999, disable_env_checker=True)
gym.register("Stuck-v0", Stuck, kwargs={"shape": 2}, max_episode_steps=9, disable_env_checker=True)
gym.register("Square-v0", Stuck, kwargs={"shape": (2, 2)}, max_episode_steps=9, disable_env_checker=True)


def test_a_mask_is_not_that_of_the_rollout_before(train):
    """Of step 120, the ninth of its rollout, nothing is left in the ninth of a later one."""
    flags = "--env-id Seldom-v0 --num-envs 1 --num-steps 16 --num-minibatches 1 --eval-episodes 1".split()
    assert (
        train("ppo_multidiscrete", *flags, "--total-timesteps", 128)["mask"].sum(-1).flatten().tolist()
        == [4] * 8 + [2] + [4] * 7
    )
    assert train("ppo_multidiscrete", *flags, "--total-timesteps", 144)["mask"].all()


@pytest.mark.parametrize(
    ("env_id", "sentence"),
    [
        ("Stuck-v0", "Stuck-v0 gives an action_mask that allows nothing for a part of the action"),
        ("Square-v0", "Square-v0 has actions of shape (2, 2); make them one row of numbers"),
        ("CartPole-v1", "CartPole-v1 has discrete actions, but ppo_multidiscrete.py takes multidiscrete actions"),
    ],
)
def test_what_does_not_fit_ends_in_one_sentence(env_id, sentence, train):
    train("ppo_multidiscrete", "--env-id", env_id, *SMALL, code=2)
    assert sentence in train.out


def test_resumed_equals_uninterrupted(train):
    flags = [*SMALL, "--env-id", "games/TwoNumbersMasked-v0", "--save-every", "64", "--learning-rate", "0.01"]
    whole = train("ppo_multidiscrete", *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("ppo_multidiscrete", "--resume", run_dir)
    assert v["start"] == 2 and comparable(run_dir) == expected and np.array_equal(v["mask"], whole["mask"])
    assert all(torch.equal(x, y) for x, y in zip(v["agent"].parameters(), whole["agent"].parameters(), strict=True))


# ---------------------------------------------------------------------- it learns
@pytest.mark.slow
def test_learns_that_two_numbers_must_agree(train):
    v = train("ppo_multidiscrete", "--total-timesteps", "40000", "--eval-episodes", "20", "--log-every", "10000")
    assert v["run"].evaluator.score >= 0.95
