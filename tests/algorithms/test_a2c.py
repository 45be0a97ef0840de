"""A2C: its gradient is that of PPO in the first step on a rollout; its loop; a policy that it must learn."""

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows

A2C, PPO = definitions("a2c"), definitions("ppo")


def agent_and_batch():
    torch.manual_seed(0)
    agent = A2C["Agent"](3, 4).double()
    torch.nn.init.normal_(agent.actor[-1].weight)
    obs, action = torch.randn(40, 3, dtype=torch.float64), torch.randint(4, (40,))
    return agent, A2C["Batch"](obs, action, *torch.randn(2, 40, dtype=torch.float64))


def gradient(loss, agent):
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(agent.parameters()))])


def test_it_is_ppo_with_one_step_on_a_rollout():
    """Ratio 1: the gradient of PPO's clipped objective without normalised advantages is that of the policy gradient."""
    agent, batch = agent_and_batch()
    args = A2C["Args"]()
    loss, metrics = A2C["a2c_loss"](agent, batch, args)
    with torch.no_grad():
        logprob, _, value = agent.evaluate_actions(batch.obs, batch.action)
    whole = PPO["Batch"](batch.obs, batch.action, logprob, value, batch.advantage, batch.returns)
    settings = PPO["Args"](norm_adv=False, vf_coef=args.vf_coef, ent_coef=args.ent_coef)
    ppo, same = PPO["ppo_loss"](agent, whole, settings)
    torch.testing.assert_close(gradient(loss, agent), gradient(ppo, agent))
    for name in ("losses/value_loss", "losses/entropy"):
        assert metrics[name].item() == pytest.approx(same[name].item())


def test_loss_by_hand():
    agent, batch = agent_and_batch()
    loss, metrics = A2C["a2c_loss"](agent, batch, A2C["Args"](vf_coef=0.7, ent_coef=0.2))
    with torch.no_grad():
        logits, value = agent(batch.obs)
    p = logits.softmax(1).numpy()
    policy = -np.mean([np.log(p[i, a]) * batch.advantage[i].item() for i, a in enumerate(batch.action.tolist())])
    error = 0.5 * np.mean((value.numpy() - batch.returns.numpy()) ** 2)
    entropy = -(p * np.log(p)).sum(1).mean()
    assert loss.item() == pytest.approx(policy + 0.7 * error - 0.2 * entropy)
    expected = {"losses/value_loss": error, "losses/policy_loss": policy, "losses/entropy": entropy}
    assert {name: x.item() for name, x in metrics.items()} == pytest.approx(expected)


FLAGS = "--num-envs 2 --total-timesteps 400 --eval-every 0 --eval-episodes 1".split()


def test_one_gradient_step_for_each_rollout(train):
    v = train("a2c", "--env-id", "CartPole-v1", *FLAGS)
    (state,) = v["optimizer"].state.values()
    assert v["num_iterations"] == 40 and int(state["step"]) == 40


def test_returns_end_where_the_rollout_does(train):
    """With lambda 1 the returns of a rollout are its rewards, discounted, and the value after it."""
    v = train("a2c", "--env-id", "probes:Forever-v0", *FLAGS, "--gamma", "0.9")
    reward, done = v["reward"], v["done"]
    final, following = v["final_value"], v["next_value"]
    expected = np.zeros_like(reward)
    for t in reversed(range(len(reward))):
        following = expected[t] = reward[t] + 0.9 * ((1 - done[t]) * following + final[t])
    np.testing.assert_allclose(v["advantage"] + v["value"], expected, rtol=1e-4, atol=1e-4)


def test_resumed_equals_uninterrupted(train):
    flags = [*FLAGS, "--save-every", "100", "--env-id", "CartPole-v1"]
    whole = train("a2c", *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("a2c", "--resume", run_dir)
    assert 0 < v["start"] < 40 and comparable(run_dir) == expected
    for x, y in zip(v["agent"].parameters(), whole["agent"].parameters(), strict=True):
        assert torch.equal(x, y)


def test_learns_a_policy_of_the_observation(train):
    flags = "--total-timesteps 4000 --learning-rate 0.003 --eval-every 0".split()
    v = train("a2c", "--env-id", "probes:ActionMustMatch-v0", *flags)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] == 1.0


def test_a_rollout_has_two_or_more_steps(train):
    """Else the explained variance, which is no part of the loss, would be nan and the run called diverged."""
    train("a2c", "--num-envs", 1, "--num-steps", 1, "--total-timesteps", 64, code=2)
    assert "--num-envs times --num-steps, must have two or more steps" in train.out
