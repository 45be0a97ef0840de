"""ppo_normalized.py: what it adds to ppo.py stands where it should. The functions themselves are those of
ppo_continuous_action.py (rule R2) and tested there."""

import numpy as np
import pytest
import torch
from conftest import definitions, rows

PPO = definitions("ppo_normalized")
SMALL = (
    "--num-envs 2 --num-steps 16 --total-timesteps 128 --num-minibatches 2 --update-epochs 2 --eval-episodes 1".split()
)


def test_first_ratio_is_one_also_when_the_statistics_have_moved(train):
    v = train("ppo_normalized", *SMALL, "--num-minibatches", "1", "--update-epochs", "1", "--learning-rate", "0.01")
    assert abs(v["metrics"]["losses/approx_kl"]) < 1e-6 and v["iteration"] == 3
    assert v["agent"].obs_normalizer.count == 128 == v["agent"].return_normalizer.count


def test_act_sees_normalised_observations():
    """Shifting and scaling what was seen and what is shown alike changes nothing."""
    torch.manual_seed(0)
    a, b = PPO["Agent"](3, 2), PPO["Agent"](3, 2)
    torch.nn.init.normal_(a.actor[-1].weight)
    b.load_state_dict(a.state_dict())
    seen, obs = (torch.randn(n, 3).numpy() for n in (100, 20))
    a.obs_normalizer.update(seen)
    b.obs_normalizer.update(30 * seen - 7)
    np.testing.assert_allclose(a.obs_normalizer(obs), b.obs_normalizer(30 * obs - 7), rtol=1e-3, atol=1e-4)
    assert (a.act(obs) == b.act(30 * obs - 7)).all() and len(set(a.act(obs))) == 2


def test_rewards_are_scaled_and_reported_raw(train):
    v = train("ppo_normalized", *SMALL, "--total-timesteps", "32", "--env-id", "probes:ShortCartPole-v0")
    returns, _ = PPO["discounted_returns"](v["reward"], v["done"], np.zeros(2), 0.99)
    deviation = np.sqrt(np.float64(returns).var())
    np.testing.assert_allclose(v["scaled_reward"], np.clip(v["reward"] / deviation, -10, 10), rtol=1e-4)
    got = {row["charts/episodic_return"] for row in rows(v["run"].dir, "charts/episodic_return")}
    assert got == {5.0}


def test_advantages_are_those_of_the_scaled_rewards(train):
    v = train("ppo_normalized", *SMALL, "--gae-lambda", "0", "--gamma", "0.5", "--env-id", "probes:OneStep-v0")
    np.testing.assert_allclose(v["advantage"], v["scaled_reward"] - v["value"], rtol=1e-4, atol=1e-5)
    assert (v["scaled_reward"] == 10).all()  # returns that never vary: the clip decides


def test_same_seed_same_weights(train):
    a, b, c = (train("ppo_normalized", *SMALL, "--seed", seed)["agent"].state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not any(torch.equal(a[key], c[key]) for key in a if key.endswith("weight"))


def test_learns_a_policy_of_a_hidden_observation(train):
    """The better action depends on a number that is far from 0 and hardly varies: 100 or 100.01."""
    probe = "--total-timesteps 8192 --num-steps 32 --learning-rate 0.003 --eval-every 0 --eval-episodes 10".split()
    v = train("ppo_normalized", "--env-id", "probes:Faint-v0", *probe)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] == pytest.approx(1.0)
