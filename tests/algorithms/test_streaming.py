"""Streaming agents: optimiser and network by hand, what the traces hold, ends of episodes; what they must learn."""

import math

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows

FILES = ("stream_q", "stream_ac", "stream_ac_continuous")
Q, AC, BOX = (definitions(name) for name in FILES)
ENVS = {"stream_q": "CartPole-v1", "stream_ac": "CartPole-v1", "stream_ac_continuous": "Pendulum-v1"}
SHORT = "--eval-every 0 --eval-episodes 1".split()


def prediction(weight):
    return torch.nn.Parameter(torch.tensor(weight))


def test_a_step_by_hand():
    """Two steps: the trace decays, and what it would overshoot bounds the learning rate."""
    w = prediction([1.0, 2.0])
    optimizer = Q["ObGD"]([w], lr=1.0, kappa=2.0)
    (w * torch.tensor([0.1, 0.2])).sum().backward()
    # trace (.1, .2), sum .3; |delta| below 1 counts as 1: 1 * 2 * 1 * .3 = .6 does not overshoot
    assert optimizer.step(0.5, 0.9) == pytest.approx(1.0)
    np.testing.assert_allclose(w.detach().numpy(), [1.05, 2.1], rtol=1e-6)
    (w * torch.tensor([1.0, 0.0])).sum().backward()
    # trace (1.09, .18), sum 1.27; 1 * 2 * 3 * 1.27 = 7.62
    assert optimizer.step(-3.0, 0.9) == pytest.approx(1 / 7.62)
    np.testing.assert_allclose(w.detach().numpy(), [1.05 - 3 * 1.09 / 7.62, 2.1 - 3 * 0.18 / 7.62], rtol=1e-6)
    optimizer.forget()
    assert not optimizer.state[w]["trace"].any()


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_a_step_does_not_overshoot(scale):
    """Of a linear prediction with inputs in [-1, 1]: the error keeps its sign, 1 / kappa of it at most is removed."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.rand(30, generator=generator) * 2 - 1
        w, target = prediction(torch.zeros(30).tolist()), scale
        optimizer = Q["ObGD"]([w], lr=1.0, kappa=2.0)
        (w * x).sum().backward()
        optimizer.step(target, 0.0)
        assert 0 <= float((w.detach() * x).sum()) <= 0.5 * target + 1e-6


@pytest.mark.parametrize("fan_in", [1, 4, 50, 128])
def test_nine_inputs_of_ten_do_not_count(fan_in):
    first, *_, last = Q["sparse_mlp"](fan_in, 128, 3)
    for layer, inputs in ((first, fan_in), (last, 128)):
        assert ((layer.weight != 0).sum(1) == max(1, inputs // 10)).all() and not layer.bias.any()
        assert layer.weight.abs().max() <= inputs**-0.5
    assert len({tuple(row.nonzero().flatten().tolist()) for row in first.weight}) > 1 or fan_in == 1


def test_layers_are_normalised_without_parameters():
    net = Q["sparse_mlp"](5, 128, 128, 2)
    hidden = net[:2](torch.randn(7, 5))
    torch.testing.assert_close(hidden.mean(1), torch.zeros(7), atol=1e-5, rtol=0)
    assert len(list(net.parameters())) == 6


def traces(optimizer):
    return [state["trace"] for state in optimizer.state.values()]


def test_traces_are_discounted_sums_of_gradients(train):
    """Weights and observations stand still: after n greedy steps the trace is a geometric sum of one gradient."""
    flags = "--learning-rate 0 --start-e 0 --end-e 0 --total-timesteps 17".split()
    v = train("stream_q", "--env-id", "probes:Forever-v0", *flags, *SHORT)  # time limit 10: 7 steps since the reset
    net, x, decay = v["q_network"], v["q_network"].normalize(v["obs"]), 0.99 * 0.8
    net.zero_grad()
    net(x)[0, v["action"]].backward()
    factor = (1 - decay**7) / (1 - decay)
    for trace, p in zip(traces(v["optimizer"]), net.parameters(), strict=True):
        torch.testing.assert_close(trace, factor * p.grad)
    assert sum(trace.abs().sum() for trace in traces(v["optimizer"])) > 0


def test_an_exploring_action_clears_the_traces_after_the_step(train):
    """Random actions: they are cleared where the action is not the greedy one, and only there."""
    found = set()
    for steps in range(3, 10):
        flags = "--start-e 1 --end-e 1 --total-timesteps".split()
        v = train("stream_q", "--env-id", "probes:Forever-v0", *flags, steps, *SHORT)
        cleared = not any(trace.any() for trace in traces(v["optimizer"]))
        assert cleared == (v["action"] != v["greedy"])
        found.add(cleared)
    assert found == {True, False}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("ends", ["time limit", "task"])
def test_only_the_end_of_the_task_ends_the_return(train, name, ends):
    """Both clear traces and the return so far; after a time limit delta has the value of the final observation."""
    if name == "stream_ac_continuous":
        env_id, steps = ("Pendulum-v1", 200) if ends == "time limit" else ("probes_offpolicy:DelayedBox-v0", 6)
    else:
        env_id, steps = ("probes:ShortCartPole-v0", 5) if ends == "time limit" else ("probes:Delayed-v0", 6)
    v = train(name, "--env-id", env_id, "--learning-rate", "0", "--total-timesteps", steps, *SHORT)
    optimizers = [v[x] for x in ("optimizer", "actor_optimizer", "critic_optimizer") if x in v]
    assert v["done"][0] and not v["now"].so_far.any()
    assert not any(trace.any() for optimizer in optimizers for trace in traces(optimizer))
    agent = v["q_network"] if name == "stream_q" else v["agent"]
    final = agent.normalize(v["infos"]["next_obs"])
    following = (agent(final).max() if name == "stream_q" else agent.critic(final)).item()
    assert following != 0
    value = (v["q"][v["action"]] if name == "stream_q" else v["value"]).item()
    following *= ends == "time limit"
    assert v["delta"] == pytest.approx(v["scaled_reward"] + 0.99 * following - value, abs=1e-5)
    assert bool(v["truncated"][0]) == (ends == "time limit")


def test_rewards_are_scaled_by_the_deviation_of_the_returns(train):
    v = train("stream_q", "--env-id", "CartPole-v1", "--total-timesteps", "60", *SHORT)
    lengths, so_far, seen = [], 0.0, []
    for row in rows(v["run"].dir, "charts/episodic_length"):
        lengths += [int(row["charts/episodic_length"])]
    ends = set(np.cumsum(lengths))
    for step in range(1, 61):
        so_far = 0.99 * so_far + 1
        seen.append(so_far)
        so_far *= step not in ends
    assert float(v["q_network"].return_normalizer.var) == pytest.approx(np.var(seen))
    assert v["scaled_reward"] == pytest.approx(1 / np.std(seen))


def test_the_actor_follows_the_error_and_keeps_entropy_where_it_is_a_surprise(train):
    """One step from zero traces: the actor's trace is the gradient of log pi + 0.01 sign(delta) H at the weights that
    acted, which a learning rate of 0 keeps."""
    v = train("stream_ac", "--env-id", "probes:Delayed-v0", "--learning-rate", "0", "--total-timesteps", "7", *SHORT)
    agent = v["agent"]
    agent.zero_grad()
    logits = agent.actor(v["x"])[0]
    p = logits.softmax(0)
    entropy = -(p * p.log()).sum()
    (p[v["action"]].log() + 0.01 * math.copysign(1, v["delta"]) * entropy).backward()
    for trace, parameter in zip(traces(v["actor_optimizer"]), agent.actor.parameters(), strict=True):
        torch.testing.assert_close(trace, parameter.grad)
    assert not v["done"][0] and sum(trace.abs().sum() for trace in traces(v["actor_optimizer"])) > 0


def test_continuous_actions_are_clipped_by_the_environment():
    env = BOX["make_env"]("Pendulum-v1")
    env.reset(seed=0)
    plain = BOX["make_env"]("Pendulum-v1")
    plain.reset(seed=0)
    np.testing.assert_array_equal(env.step(np.array([9.0], np.float32))[0], plain.step(np.array([2.0], np.float32))[0])


@pytest.mark.parametrize("name", FILES)
def test_resumed_equals_uninterrupted(train, name):
    flags = ["--env-id", ENVS[name], "--total-timesteps", "260", "--save-every", "100", *SHORT]
    whole = train(name, *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train(name, "--resume", run_dir)
    assert v["start"] == 200 and comparable(run_dir) == expected
    agent = "q_network" if name == "stream_q" else "agent"
    for x, y in zip(v[agent].parameters(), whole[agent].parameters(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", FILES)
def test_an_episode_that_cannot_go_on_leaves_no_traces(train, name):
    """They would credit states of the lost episode with the errors of the new one. The derivative by the last bias is 1
    in each step, so the trace of it counts steps, of which there was one."""
    env_id = "test_sac_parallel:Journal-v0" if name == "stream_ac_continuous" else "probes:Fickle-v0"
    flags = ["--learning-rate", 0, "--save-every", 9, "--total-timesteps", 10, *SHORT]
    flags += ["--start-e", 0, "--end-e", 0] * (name == "stream_q")  # greedy actions only
    run_dir = train(name, "--env-id", env_id, *flags)["run"].dir
    drop_last_checkpoint(run_dir)
    v = train(name, "--resume", run_dir)
    assert v["run"].restarted == [0] and v["start"] == 9 and not v["done"][0]
    optimizers = [v[x] for x in ("optimizer", "actor_optimizer", "critic_optimizer") if x in v]
    assert float(traces(optimizers[-1])[-1].sum()) == pytest.approx(1.0)
    assert float(v["now"].so_far[0]) == pytest.approx(float(v["reward"][0]))


def test_one_observation_has_no_deviation():
    """The first one and the first reward stay as they are; from two on there is a deviation."""
    normalizer = Q["SampleMeanStd"](2)
    normalizer.update(np.array([[3.0, -1.0]]))
    np.testing.assert_array_equal(normalizer(np.array([[4.0, -1.0]])), [[1.0, 0.0]])
    normalizer.update(np.array([[5.0, -1.0]]))
    np.testing.assert_allclose(normalizer(np.array([[4.5, -1.0]])), [[0.5, 0.0]])


@pytest.mark.parametrize("name", ["stream_q", "stream_ac"])
def test_learns_a_policy_of_the_observation(train, name):
    v = train(name, "--env-id", "probes:ActionMustMatch-v0", "--total-timesteps", "3000", "--eval-every", "0")
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] == 1.0


def test_learns_continuous_actions_of_the_observation(train):
    """The best return is 0, that of the middle of the bounds -0.5."""
    flags = "--total-timesteps 6000 --eval-every 0".split()
    v = train("stream_ac_continuous", "--env-id", "probes_offpolicy:AimWhereSeen-v0", *flags)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > -0.15
