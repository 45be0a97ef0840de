"""ppo_hybrid.py: the distribution of actions with two parts, what the environment gets, and that it learns both."""

import shutil

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, rows
from gymnasium.vector import SyncVectorEnv
from probes_parts import TUPLES
from torch.distributions import Categorical, Independent, Normal

import solorl

HYBRID = definitions("ppo_hybrid")
SMALL = "--num-envs 2 --num-steps 16 --total-timesteps 128 --num-minibatches 2 --eval-episodes 1".split()


@pytest.fixture
def agent():
    torch.manual_seed(0)
    agent = HYBRID["Agent"](4, 3, 2, 0.7)
    torch.nn.init.normal_(agent.actor[-1].weight)  # logits and means of some size
    agent.log_std.data += torch.tensor([0.3, -0.4])
    return agent


def distributions(agent, obs):
    """The two of torch, from the output of the network of the policy."""
    out = agent.actor(obs)
    return Categorical(logits=out[:, :3]), Independent(Normal(out[:, 3:], agent.log_std.exp()), 1)


def test_log_probabilities_and_entropies_are_sums_over_the_two_distributions(agent):
    obs, action = torch.randn(50, 4), (torch.randint(0, 3, (50,)), torch.randn(50, 2))
    logprob, entropy, value = agent.evaluate_actions(obs, action)
    first, second = distributions(agent, obs)
    torch.testing.assert_close(logprob, first.log_prob(action[0]) + second.log_prob(action[1]))
    torch.testing.assert_close(entropy, first.entropy() + second.entropy())
    torch.testing.assert_close(value, agent.critic(obs)[:, 0])
    assert logprob.shape == entropy.shape == value.shape == (50,)


def test_the_density_of_all_actions_is_one(agent):
    """Summed over the discrete part and integrated over the continuous one, on a grid."""
    axis = torch.linspace(-12, 12, 121)
    grid = torch.cartesian_prod(axis, axis)
    obs = torch.randn(1, 4).expand(len(grid), 4)
    logprob = [agent.evaluate_actions(obs, (torch.full((len(grid),), i), grid))[0] for i in range(3)]
    total = sum(each.exp().sum() for each in logprob) * 0.2**2
    assert total.item() == pytest.approx(1, abs=1e-3)


def test_act_gives_the_mode_of_both_parts(agent):
    obs = np.random.default_rng(0).normal(size=(40, 2, 2)).astype(np.float32)
    discrete, continuous = agent.act(obs)
    first, second = distributions(agent, torch.as_tensor(obs).flatten(1))
    assert discrete.tolist() == first.probs.argmax(1).tolist() and len(set(discrete.tolist())) > 1
    np.testing.assert_allclose(continuous, second.mean.detach(), atol=1e-6)
    assert discrete.shape == (40,) and continuous.shape == (40, 2)


def test_the_network_of_the_policy_begins_near_zero_and_the_deviation_is_a_flag(train):
    agent = HYBRID["Agent"](4, 3, 2, 0.1)
    assert agent.actor(torch.randn(20, 4)).abs().max() < 0.1
    np.testing.assert_allclose(agent.log_std.detach().exp(), [0.1, 0.1], rtol=1e-6)
    v = train("ppo_hybrid", *SMALL, "--learning-rate", 0, "--num-steps", 256, "--total-timesteps", 512, "--std-init", 2)
    assert v["continuous"].std() == pytest.approx(2, rel=0.15)
    train("ppo_hybrid", *SMALL, "--std-init", 0, code=2)
    assert train.out == "error: --std-init 0.0 must be above 0\n"


# ---------------------------------------------------------------------- the rollout
def test_first_ratio_is_one(train):
    """The log-probability stored is that of both parts as they were drawn."""
    v = train("ppo_hybrid", *SMALL, "--num-minibatches", "1", "--update-epochs", "1", "--learning-rate", "0.01")
    assert len(v["kl"]) == 1 and all(abs(v["metrics"][f"losses/{name}"]) < 1e-6 for name in ("approx_kl", "clipfrac"))


def test_both_parts_are_drawn_from_the_policy_and_independently(train):
    """4096 actions of a policy that has learned one observation: within 4 standard errors of what it says."""
    flags = ["--num-steps", 2048, "--total-timesteps", 4096, "--std-init", 0.5]
    v = train("ppo_hybrid", "--env-id", "probes_parts:Strict-v0", *SMALL, *flags, "--learning-rate", 0)
    first, second = distributions(v["agent"], torch.zeros(1, 1))
    discrete, continuous = v["discrete"].ravel(), v["continuous"].reshape(-1, 2)
    frequency = np.bincount(discrete, minlength=3) / 4096
    np.testing.assert_allclose(frequency, first.probs[0].detach(), atol=4 * 0.5 / 64)
    np.testing.assert_allclose(continuous.mean(0), second.mean[0].detach(), atol=4 * 0.5 / 64)
    np.testing.assert_allclose(continuous.std(0), 0.5, atol=4 * 0.5 / 90)
    together = np.corrcoef(np.column_stack([discrete, continuous]).T)
    assert np.abs(together - np.eye(3)).max() < 4 / 64


def test_the_environment_gets_both_parts_and_only_it_clips_the_continuous_one(train, monkeypatch):
    """What is stored is what was drawn, beyond the bounds, too; the probe checks its bounds and its reward says what it
    got."""
    sent, step = [], SyncVectorEnv.step
    monkeypatch.setattr(SyncVectorEnv, "step", lambda self, action: sent.append(action) or step(self, action))
    v = train("ppo_hybrid", "--env-id", "probes_parts:Strict-v0", *SMALL, "--total-timesteps", 32)
    assert (v["continuous"] < [-0.5, 0]).any() and (v["continuous"] > [1, 0.25]).any()
    np.testing.assert_allclose(v["reward"], (1 + v["discrete"]) * v["continuous"][..., 0].clip(-0.5, 1), rtol=1e-5)
    assert len(sent) >= 16 and all(type(action) is tuple for action in sent[:16])
    np.testing.assert_array_equal(v["rollout"].continuous, v["continuous"].reshape(32, 2))
    np.testing.assert_array_equal(v["rollout"].discrete, v["discrete"].ravel())


def test_time_limit_bootstraps(train):
    """A cut step holds the value of the final observation, which is not the one that begins the next episode."""
    seen, step = [], SyncVectorEnv.step

    def note(self, action):
        result = step(self, action)
        seen.append(result)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SyncVectorEnv, "step", note)
        v = train("ppo_hybrid", "--env-id", "probes_parts:ShortTool-v0", "--learning-rate", "0", *SMALL)
    ends, last = np.argwhere(v["done"]), [each for each in seen if len(each[1]) == 2][-16:]
    assert len(ends) > 4
    for t, n in ends:
        final_obs = torch.as_tensor(last[t][4]["final_obs"][n])
        assert v["final_value"][t, n] == pytest.approx(v["agent"](final_obs[None])[2].item(), abs=1e-5)
    assert (v["final_value"][v["done"] == 0] == 0).all() and (v["final_value"][v["done"] == 1] != 0).all()


@pytest.mark.parametrize("name", TUPLES)
def test_other_tuples_are_refused_in_one_sentence(name, train):
    train("ppo_hybrid", "--env-id", f"probes_parts:{name}-v0", "--total-timesteps", 1, code=2)
    assert train.out == "error: actions must be Discrete from 0 and Box of floats, one axis\n"


def test_actions_that_are_no_tuple_are_refused_with_the_file_to_use(train):
    for env_id, file in (("CartPole-v1", "ppo.py"), ("Pendulum-v1", "ppo_continuous_action.py")):
        train("ppo_hybrid", "--env-id", env_id, code=2)
        assert train.out.endswith(f" actions, but ppo_hybrid.py takes tuple actions; use {file}\n")


# ---------------------------------------------------------------------- whole trainings
def test_same_seed_same_weights_and_another_seed_others(train):
    a, b, c = (train("ppo_hybrid", *SMALL, "--seed", seed)["agent"].state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a if name.endswith("weight") or name == "log_std")


def test_resumed_equals_uninterrupted(train, tmp_path):
    """Stopped in the middle of an episode: bit for bit the same in the end, and the same rows."""
    flags = [*SMALL, "--num-steps", 12, "--total-timesteps", 192]
    whole = train("ppo_hybrid", *flags, runs_dir=tmp_path / "whole")
    run_dir = train("ppo_hybrid", *flags, "--save-every", "96", runs_dir=tmp_path / "cut")["run"].dir
    parts = sorted((run_dir / "checkpoint").iterdir())
    assert len(parts) >= 2
    shutil.rmtree(parts[-1])  # the one of the end: what is resumed is the one before
    again = train("ppo_hybrid", "--resume", run_dir)
    assert again["start"] > 0 and again["run"].restarted == []
    for key, value in whole["agent"].state_dict().items():
        assert torch.equal(value, again["agent"].state_dict()[key]), key
    losses = [[row for row in comparable(each["run"].dir) if "losses/entropy" in row] for each in (whole, again)]
    assert losses[0][-1] == losses[1][-1]


def test_a_trained_policy_is_loaded_and_played(train, solo):
    run_dir = train("ppo_hybrid", *SMALL)["run"].dir
    discrete, continuous = solorl.load(run_dir)(np.zeros((3, 4), np.float32))
    assert discrete.shape == (3,) and continuous.shape == (3, 1)
    assert "over 2 greedy episodes" in solo("play", run_dir, "--episodes", "2")[1]


def score(strength, episodes=200):
    """Mean return in games/Tool-v0 of the right tool with a strength, which is a number or None: the named one."""
    env = gym.make("games/Tool-v0")
    total = 0.0
    for seed in range(episodes):
        (obs, _), over = env.reset(seed=seed), False
        while not over:
            action = int(obs[:3].argmax()), obs[3:] if strength is None else np.full(1, strength, np.float32)
            obs, reward, _, over, _ = env.step(action)
            total += reward
    return total / episodes


def test_without_the_continuous_part_no_policy_of_the_game_gets_more_than_a_half():
    """The right tool with each of 21 strengths that look at nothing: the best is 0, with 1 - E|s| = 0.5."""
    scores = {round(x, 1): score(x) for x in np.linspace(-1, 1, 21)}
    assert max(scores.values()) == pytest.approx(0.5, abs=0.02) and scores[1.0] < 0.3
    assert score(None) == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_learns_both_parts(train):
    """With the default flags: far above 0.5, which is the best without the continuous part."""
    v = train("ppo_hybrid", "--log-every", 10_000, "--eval-every", 0, "--eval-episodes", 50)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > 0.9
