"""ppo_masked.py: what a mask does not allow has probability 0 in acting, learning and evaluation."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows

from solorl.compute.speed import GradientStep

FILE = definitions("ppo_masked")
SMALL = "--num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 1 --eval-episodes 2".split()


class Gates(gym.Env):
    """Random observations (2,); one of 4 actions, drawn in each step, is not allowed, and to take it is an error. An
    episode is cut after 7 steps, and nothing is allowed at its last observation."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, nothing_at=-1):
        self.nothing_at = nothing_at

    def _seen(self):
        self.mask = np.arange(4) != self.np_random.integers(4)
        self.mask &= self.time not in (7, self.nothing_at)
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {"action_mask": self.mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._seen()

    def step(self, action):
        if not self.mask[action]:
            raise ValueError(f"action {action} is not allowed")
        self.time += 1
        obs, info = self._seen()
        return obs, float(action), False, self.time == 7, info


gym.register("Gates-v0", Gates)
gym.register("GatesStuck-v0", Gates, kwargs={"nothing_at": 3})


def make_agent(gain=1.0):
    """An agent of 3 numbers and 4 actions with logits of some size."""
    torch.manual_seed(0)
    agent = FILE["Agent"](3, 4)
    torch.nn.init.orthogonal_(agent.actor[-1].weight, gain)
    return agent


def masks(batch, seed=0):
    """Masks (batch, 4) that allow at least one action."""
    mask = np.random.default_rng(seed).random((batch, 4)) < 0.5
    mask[:, 1] |= ~mask.any(1)
    return torch.as_tensor(mask)


def test_probability_and_entropy_are_those_of_the_allowed_actions():
    """Softmax over the allowed actions alone, by brute force; the others have exactly 0, and the gradient is finite."""
    agent, obs, mask = make_agent(gain=300.0), torch.randn(200, 3), masks(200)
    logits = agent(obs)[0].detach().double().numpy()
    assert not mask.numpy()[np.arange(200), logits.argmax(1)].all()  # some of the largest logits are not allowed
    p = np.exp(logits - logits.max(1, keepdims=True, where=mask.numpy(), initial=-np.inf)) * mask.numpy()
    p /= p.sum(1, keepdims=True)
    for action in range(4):
        logprob, entropy, _ = agent.evaluate_actions(obs, mask, torch.full((200,), action))
        np.testing.assert_allclose(logprob.exp().detach(), p[:, action], atol=1e-5)
        assert (logprob.exp()[~mask[:, action]] == 0).all() and logprob.isfinite().all()
    np.testing.assert_allclose(entropy.detach(), -(p * np.log(np.where(p > 0, p, 1))).sum(1), atol=1e-4)
    entropy.sum().backward()
    assert all(weight.grad.isfinite().all() for weight in agent.actor.parameters())


def test_acting_and_evaluation_choose_allowed_actions_only():
    agent, obs, mask = make_agent(gain=300.0), np.random.default_rng(0).normal(size=(200, 3)), masks(200).numpy()
    with torch.no_grad():
        logits = agent(torch.as_tensor(obs, dtype=torch.float32))[0].numpy()
    np.random.seed(0)
    for _ in range(20):
        action, logprob = FILE["sample_categorical"](FILE["allowed_logits"](logits, mask))
        assert mask[np.arange(200), action].all() and np.isfinite(logprob).all()
    best = np.where(mask, logits, -np.inf).argmax(1)
    np.testing.assert_array_equal(agent.act(obs, action_mask=mask), best)


def test_no_masked_action_is_ever_taken(train):
    """The environment refuses them with an error, in training and evaluation. Nothing allowed at a final observation is
    not an error; the stored masks are those of the observations acted on."""
    v = train("ppo_masked", "--env-id", "Gates-v0", *SMALL, "--total-timesteps", "512")
    taken = np.take_along_axis(v["mask"], v["action"][..., None], -1)
    assert taken.all() and (v["mask"].sum(-1) == 3).all() and set(np.unique(v["action"])) == {0, 1, 2, 3}
    assert v["timeout"].any() and (v["final_value"] != 0)[v["timeout"]].all()


def test_the_first_ratio_of_an_iteration_is_one(train, monkeypatch):
    """Learning sees each observation with the mask of acting."""
    found, step = [], GradientStep.__call__

    def note(self, batch, args):
        with torch.no_grad():
            logprob = self.module.evaluate_actions(batch.obs, batch.mask, batch.action)[0]
        found.append((logprob - batch.logprob).abs().max().item())
        return step(self, batch, args)

    monkeypatch.setattr(GradientStep, "__call__", note)
    train("ppo_masked", "--env-id", "Gates-v0", *SMALL, "--total-timesteps", "192", "--learning-rate", "0.01")
    assert len(found) == 3 * 2 and max(found[::2]) < 1e-4 and min(found[1::2]) > 1e-4


def test_without_masks_another_file_is_named(train, tmp_path):
    train("ppo_masked", "--env-id", "CartPole-v1", *SMALL, code=2)
    assert train.out == "error: CartPole-v1 gives no action_mask; use ppo.py\n" and not list(tmp_path.iterdir())


def test_a_mask_that_allows_nothing_ends_the_run_in_one_sentence(train):
    train("ppo_masked", "--env-id", "GatesStuck-v0", *SMALL, code=2)
    assert train.out.splitlines()[-1] == "error: GatesStuck-v0 gives an action_mask that allows no action"
    assert "Traceback" not in train.out


def test_resumed_equals_uninterrupted(train):
    flags = ["--env-id", "Gates-v0", *SMALL, "--total-timesteps", "256", "--save-every", "128"]
    whole = train("ppo_masked", *flags, "--learning-rate", "0.01", "--no-anneal-lr")
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("ppo_masked", "--resume", run_dir)
    assert v["start"] == 2 and comparable(run_dir) == expected and np.array_equal(v["mask"], whole["mask"])
    assert all(torch.equal(x, y) for x, y in zip(v["agent"].parameters(), whole["agent"].parameters(), strict=True))


@pytest.mark.slow
def test_it_learns_the_grid(train):
    """A random policy of allowed actions returns no resource, the best one 2.9 in the mean."""
    v = train("ppo_masked", "--total-timesteps", "100000", "--eval-episodes", "50", "--eval-every", "0")
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] >= 2.5
