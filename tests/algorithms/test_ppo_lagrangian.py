"""PPO-Lagrangian: its advantage and loss by hand, the multiplier, costs of episodes; a limit that it must keep."""

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows

LAGRANGIAN, PPO = definitions("ppo_lagrangian"), definitions("ppo_continuous_action")
TINY = "--num-envs 2 --num-steps 14 --num-minibatches 2 --eval-every 0 --eval-episodes 1".split()
TOLL = ("--env-id", "probes_cost:Toll-v0", *TINY)


def test_the_advantage_of_costs_counts_against_that_of_rewards():
    rng = np.random.default_rng(0)
    advantage, cost = rng.normal(3, 2, (5, 4)), rng.normal(-1, 4, (5, 4))
    expected = ((advantage - advantage.mean()) / advantage.std() - 1.5 * (cost - cost.mean())) / 2.5
    np.testing.assert_allclose(LAGRANGIAN["penalized_advantage"](advantage, cost, 1.5), expected, rtol=1e-6)


@pytest.mark.parametrize("clip_vloss", [True, False])
def test_the_loss_is_that_of_ppo_and_the_error_of_the_values_of_costs(clip_vloss):
    torch.manual_seed(0)
    agent = LAGRANGIAN["Agent"](3, 2, 0.7).double()
    plain = PPO["Agent"](3, 2, 0.7).double()
    plain.load_state_dict({name: x for name, x in agent.state_dict().items() if not name.startswith("cost_")})
    obs, action = torch.randn(40, 3).double(), torch.randn(40, 2).double()
    logprob, value, advantage, returns, cost_value, cost_returns = torch.randn(6, 40, dtype=torch.float64) * 0.3
    logprob = logprob + PPO["Agent"].evaluate_actions(plain, obs, action)[0].detach()
    args = LAGRANGIAN["Args"](clip_vloss=clip_vloss, ent_coef=0.1)
    batch = LAGRANGIAN["Batch"](obs, action, logprob, value, advantage, returns, cost_value, cost_returns)
    loss, metrics = LAGRANGIAN["ppo_lagrangian_loss"](agent, batch, args)
    settings = PPO["Args"](norm_adv=False, clip_vloss=clip_vloss, ent_coef=0.1)
    expected, same = PPO["ppo_loss"](plain, PPO["Batch"](obs, action, logprob, value, advantage, returns), settings)
    new = agent.cost_critic(obs).squeeze(1).detach().numpy()
    old, target = cost_value.numpy(), cost_returns.numpy()
    errors = (new - target) ** 2
    if clip_vloss:
        errors = np.maximum(errors, (old + np.clip(new - old, -0.2, 0.2) - target) ** 2)
    assert metrics["losses/cost_value_loss"].item() == pytest.approx(0.5 * errors.mean())
    assert loss.item() == pytest.approx(expected.item() + 0.5 * 0.5 * errors.mean())
    assert {name: metrics[name].item() for name in same} == pytest.approx({name: x.item() for name, x in same.items()})


@pytest.mark.parametrize(("limit", "expected"), [(2, 0.001 + 4 * 0.035), (50, 0.0)])
def test_the_multiplier_grows_where_episodes_cost_more_than_allowed(train, limit, expected):
    """Costs stay above or below the limit: each of 4 steps of Adam is as long as its learning rate; at 0 it stays."""
    v = train("ppo_lagrangian", *TOLL, "--total-timesteps", "112", "--cost-limit", limit)
    assert v["iteration"] == 3
    assert v["multiplier"].value.item() == pytest.approx(expected, rel=1e-3)
    assert rows(v["run"].dir, "losses/multiplier")[-1]["losses/multiplier"] == pytest.approx(expected, rel=1e-3)


def test_costs_of_episodes_are_whole(train):
    """Of 14 steps two pairs of episodes: 1 + 2 + 3 and 1 + 2 + 3 + 4, the last steps included, in both environments."""
    v = train("ppo_lagrangian", *TOLL, "--total-timesteps", "28")
    np.testing.assert_array_equal(v["cost"][:7, 0], [1, 2, 3, 1, 2, 3, 4])
    assert v["now"].costs[-8:].tolist() == [6, 6, 10, 10] * 2 and not v["now"].cost.any() and v["now"].num_episodes == 8
    assert rows(v["run"].dir, "charts/episodic_cost")[-1]["charts/episodic_cost"] == 8
    v = train("ppo_lagrangian", "--env-id", "probes_cost:Toll-v0", *TINY, "--total-timesteps", "28", "--num-envs", "1")
    np.testing.assert_array_equal(v["cost"][:7, 0], [1, 2, 3, 1, 2, 3, 4])  # all environments end at once


def test_costs_are_scaled_by_the_deviation_of_their_sums(train):
    """As rewards are: sums with discount, an episode's up to each step."""
    v = train("ppo_lagrangian", *TOLL, "--total-timesteps", "56")
    so_far, sums = 0.0, []
    for cost in [1, 2, 3, 1, 2, 3, 4] * 4:  # two rollouts
        so_far = cost + 0.99 * so_far * (cost != 1)
        sums.append(so_far)
    assert float(v["agent"].cost_normalizer.var) == pytest.approx(np.var(sums), rel=1e-5)
    np.testing.assert_allclose(v["scaled_cost"], v["cost"] / np.std(sums), rtol=1e-5)


def test_the_multiplier_weighs_costs_in_their_own_units(train):
    """The critic has costs in other units; in these a multiplier would be as many times too small."""
    v = train("ppo_lagrangian", *TOLL, "--total-timesteps", "56", "--multiplier-init", "1", "--learning-rate", "0")
    std = float(v["agent"].cost_normalizer.var) ** 0.5
    values = (std * v["cost_value"], v["done"], std * v["final_cost_value"], std * v["next_cost_value"])
    cost_advantage = LAGRANGIAN["gae"](v["cost"], *values, 0.99, 0.95)
    advantage, multiplier = v["advantage"], v["multiplier"].value.item()
    expected = (advantage - advantage.mean()) / advantage.std() - multiplier * (cost_advantage - cost_advantage.mean())
    np.testing.assert_allclose(v["penalized"], expected / (1 + multiplier), rtol=1e-4, atol=1e-5)
    assert std > 2 and multiplier > 0.5


def test_a_rare_cost_counts_whole(train):
    """A crash at the end of 400 steps is twenty deviations of the sums of costs; no scale of it is clipped."""
    flags = "--num-steps 400 --total-timesteps 1600 --multiplier-init 1 --learning-rate 0".split()
    v = train("ppo_lagrangian", "--env-id", "probes_cost:Crash-v0", *TINY, *flags)
    std = float(v["agent"].cost_normalizer.var) ** 0.5
    assert std < 1 / 10 and v["scaled_cost"].max() == pytest.approx(1 / std, rel=1e-5)
    values = (std * v["cost_value"], v["done"], std * v["final_cost_value"], std * v["next_cost_value"])
    whole = LAGRANGIAN["gae"](v["cost"], *values, 0.99, 0.95)
    np.testing.assert_allclose(v["raw_cost_advantage"], whole, rtol=1e-4, atol=1e-5)


def test_the_multiplier_waits_where_no_episode_ended(train):
    """Rollouts of two steps: of seven, four have an end. Their episodes cost 4 and 8 more than allowed in turn."""
    flags = "--num-steps 2 --num-minibatches 1 --total-timesteps 28 --cost-limit 2".split()
    v = train("ppo_lagrangian", *TOLL, *flags)
    assert v["iteration"] == 6 and v["now"].num_episodes == 8
    expected = torch.nn.Parameter(torch.tensor(0.001))
    adam = torch.optim.Adam([expected], lr=0.035)
    for excess in (4.0, 8.0, 4.0, 8.0):
        expected.grad = torch.tensor(-excess)
        adam.step()
    assert v["multiplier"].value.item() == pytest.approx(expected.item(), rel=1e-5)


def test_only_the_last_hundred_episodes_count(train):
    v = train("ppo_lagrangian", *TOLL, "--total-timesteps", "840")
    assert v["now"].num_episodes == 240 and len(v["now"].costs) == 100 and set(v["now"].costs) == {6, 10}


def test_a_time_limit_bootstraps_from_the_value_of_costs(train):
    v = train("ppo_lagrangian", *TOLL, "--total-timesteps", "28", "--learning-rate", "0")
    cut = v["timeout"]
    assert cut.sum() == 4 and (v["final_cost_value"][cut] != 0).all() and not v["final_cost_value"][~cut].any()
    final = torch.as_tensor(v["final_obs"][cut])
    torch.testing.assert_close(
        torch.as_tensor(v["final_cost_value"][cut]), v["agent"].cost_critic(final).detach()[:, 0]
    )


def test_an_environment_without_costs_is_refused(train):
    train("ppo_lagrangian", "--env-id", "probes_cost:Free-v0", *TINY, "--total-timesteps", "28", code=2)
    assert "probes_cost:Free-v0 must give a cost" in train.out


def test_a_robot_that_is_too_fast_costs():
    pytest.importorskip("mujoco")
    env = LAGRANGIAN["make_env"]("HalfCheetah-v5")
    env.reset(seed=0)
    for _ in range(20):
        info = env.step(env.action_space.sample())[4]
        assert info["cost"] == float(info["x_velocity"] > 3.2096)
    env.env.limit = -100.0
    assert env.step(env.action_space.sample())[4]["cost"] == 1


def test_what_runs_in_any_direction_costs_in_any_direction():
    class Runs(gym.Env):
        def step(self, action):
            return None, 0.0, False, False, {"x_velocity": -2.0, "y_velocity": 2.0}

    for robot, cost in (("Ant", 1.0), ("Humanoid", 1.0), ("Swimmer", 0.0)):
        assert LAGRANGIAN["SpeedLimit"](Runs(), robot).step(None)[4]["cost"] == cost


def test_resumed_equals_uninterrupted(train):
    """With the costs of the last episodes and the moments of the multiplier's Adam."""
    flags = ["--env-id", "probes_cost:Temptation-v0", *TINY, "--total-timesteps", "168", "--save-every", "56"]
    whole = train("ppo_lagrangian", *flags, "--cost-limit", "0.2")
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("ppo_lagrangian", "--resume", run_dir)
    assert 0 < v["start"] < 6 and comparable(run_dir) == expected
    assert torch.equal(v["multiplier"].value, whole["multiplier"].value) and v["multiplier"].value > 0.001
    for x, y in zip(v["agent"].parameters(), whole["agent"].parameters(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.slow
def test_keeps_its_limit(train):
    """PPO takes the tempting action; with a limit of 0.1 it is taken rarely, though it is worth most."""
    flags = "--total-timesteps 40000 --num-envs 4 --num-steps 256 --num-minibatches 4 --no-anneal-lr".split()
    flags += (
        "--env-id probes_cost:Temptation-v0 --multiplier-init 2 --multiplier-learning-rate 0.1 --eval-every 0".split()
    )
    free = train("ppo_lagrangian", *flags, "--cost-limit", "2")
    assert free["now"].costs.mean() > 0.9 and free["multiplier"].value.item() == 0
    v = train("ppo_lagrangian", *flags, "--cost-limit", "0.1")
    assert v["now"].costs.mean() < 0.3 and v["multiplier"].value.item() > 2


def test_settings_that_are_new():
    fields = {field.name for field in dataclasses.fields(LAGRANGIAN["Args"])}
    other = {field.name for field in dataclasses.fields(PPO["Args"])}
    assert fields - other == {"cost_limit", "multiplier_learning_rate", "multiplier_init"}
    assert other - fields == {"norm_adv"}
