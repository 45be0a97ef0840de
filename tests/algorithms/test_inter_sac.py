"""InterSAC: lambda and the actor's turns, DenseNet, the growing batch, the anchor and the losses by hand; its loop. The
parts that the other files from ElegantRL share with it are tested here."""

import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, rows
from test_actor_critic import SMALL, random_batch, regulated, weights

import solorl

INTER = definitions("inter_sac")
PENDULUM = ["--env-id", "Pendulum-v1", *SMALL, "--width", "16"]
DIARY = ["--env-id", "probes_offpolicy:Diary-v0", *SMALL, "--width", "16", "--reward-scale", "0.001"]


def double_agent(seed=0, dense=True):
    torch.manual_seed(seed)
    return INTER["Agent"](3, 2, 8, dense).double()


def numpy_of(*tensors):
    return [x.detach().numpy() for x in tensors]


def linear(x, layer):
    return x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()


def two_layers(net, x):
    first, _, last = net
    return linear(np.maximum(linear(x, first), 0), last)


def dense_net(trunk, x):
    """[x, d1, d2], where d1 sees x and d2 sees both."""
    x = np.concatenate([x, np.maximum(linear(x, trunk.first), 0)], 1)
    y = linear(x, trunk.second)
    return np.concatenate([x, y * np.clip(y + 3, 0, 6) / 6], 1)


def policy(agent, obs):
    """Mean and logarithm of the standard deviation."""
    x = dense_net(agent.trunk, two_layers(agent.encode_obs, obs))
    return two_layers(agent.mean, x), 3.5 * np.tanh(two_layers(agent.log_std, x)) - 1.5


def both_values(agent, obs, action):
    """The values of both critics (2, batch)."""
    x = dense_net(agent.trunk, two_layers(agent.encode_obs, obs) + two_layers(agent.encode_action, action))
    return np.array([two_layers(q, x)[:, 0] for q in (agent.q1, agent.q2)])


def sample(agent, obs, noise):
    """Actions and log-probabilities."""
    mean, log_std = policy(agent, obs)
    x = mean + np.exp(log_std) * noise
    logprob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - np.log(1 - np.tanh(x) ** 2)
    return np.tanh(x), logprob.sum(1)


def huber(x):
    return np.where(np.abs(x) < 1, 0.5 * x**2, np.abs(x) - 0.5).mean()


# ---------------------------------------------------------------------- lambda
def test_lambda_by_hand():
    """exp(-m^2), where m moves by 0.005 towards each loss; it begins at a half, or at 1 and stays there."""
    reliability = INTER["Reliability"](0.5)
    assert reliability().item() == pytest.approx(0.5)
    mean = math.sqrt(math.log(2))
    for loss in (3.0, 0.0, 0.5, 20.0, 1.0):
        reliability.update(torch.tensor(loss))
        mean = 0.995 * mean + 0.005 * loss
        assert reliability().item() == pytest.approx(math.exp(-(mean**2)), rel=1e-5)
    assert INTER["Reliability"](1.0)() == 1.0


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_the_actor_learns_in_n_of_n_times_2_minus_lambda_updates(lam):
    """Evenly spread: at 0 in every second one, at 1 in each, never two updates apart by more than one."""
    reliability = INTER["Reliability"](max(lam, 1e-30))
    turns = [reliability.actor_turn() for _ in range(3_000)]
    assert abs(sum(turns) - 3_000 / (2 - lam)) <= 2
    gaps = np.diff(np.flatnonzero(turns))
    assert set(gaps) == {0.0: {2}, 1.0: {1}}.get(lam, {1, 2})
    for part in np.split(np.array(turns), 30):
        assert abs(part.sum() - 100 / (2 - lam)) <= 1


def test_turns_follow_lambda_without_a_memory_of_earlier_ones():
    reliability = INTER["Reliability"](1.0)
    assert all(reliability.actor_turn() for _ in range(100))
    reliability.mean_loss.fill_(100.0)
    assert sum(reliability.actor_turn() for _ in range(100)) == 50
    reliability.mean_loss.fill_(0.0)
    assert all(reliability.actor_turn() for _ in range(100))


# ---------------------------------------------------------------------- network
def test_dense_net_by_hand():
    """Nine quarters as wide as its input, of which the input and the first layer are parts; it begins orthogonal."""
    torch.manual_seed(0)
    trunk, x = INTER["DenseNet"](8).double(), torch.randn(6, 8, dtype=torch.float64)
    got = trunk(x).detach().numpy()
    assert got.shape == (6, 18) and trunk.first.weight.shape == (4, 8) and trunk.second.weight.shape == (6, 12)
    np.testing.assert_allclose(got, dense_net(trunk, x.numpy()), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(got[:, :8], x)
    for layer in (trunk.first, trunk.second):
        torch.testing.assert_close(
            layer.weight @ layer.weight.T, torch.eye(len(layer.weight)).double(), atol=1e-5, rtol=0
        )


def test_the_plain_trunk_has_as_many_weights_and_outputs():
    dense, plain = INTER["DenseNet"](64), INTER["plain_trunk"](64)
    size = lambda net: sum(x.numel() for name, x in net.named_parameters() if name.endswith("weight"))  # noqa: E731
    assert size(dense) == size(plain) and plain(torch.zeros(1, 64)).shape == dense(torch.zeros(1, 64)).shape
    assert type(double_agent(dense=False).trunk) is torch.nn.Sequential


def test_one_trunk_sees_codes_of_observations_and_sums_of_codes():
    agent, batch = double_agent(), random_batch()
    obs, action = numpy_of(batch.obs, batch.action)
    np.testing.assert_allclose(numpy_of(*agent.policy(batch.obs)), policy(agent, obs), rtol=1e-9)
    np.testing.assert_allclose(numpy_of(*agent(batch.obs, batch.action)), both_values(agent, obs, action), rtol=1e-9)
    noise = torch.randn(16, 2, dtype=torch.float64)
    got = numpy_of(*INTER["squashed"](*agent.policy(batch.obs), noise))
    expected = sample(agent, obs, noise.numpy())
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    agent.float()
    np.testing.assert_allclose(agent.act(obs), np.tanh(policy(agent, obs)[0]), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- losses
def test_critic_loss_by_hand():
    """Scaled rewards; the smaller value of the target critics for an action of the target policy; Huber losses."""
    agent, target_agent, batch = double_agent(0), double_agent(1), random_batch()
    batch = batch._replace(reward=8 * batch.reward)  # errors on both sides of 1
    noise = torch.randn(16, 2, dtype=torch.float64)
    inputs = (target_agent, torch.tensor(0.3), batch, noise, 0.5, 0.9)
    loss, metrics = INTER["inter_critic_loss"](agent, *inputs)
    own = type(batch)(*numpy_of(*batch))
    next_action, next_logprob = sample(target_agent, own.next_obs, noise.numpy())
    soft = both_values(target_agent, own.next_obs, next_action).min(0) - 0.3 * next_logprob
    target = 0.5 * own.reward + 0.9 * (1 - own.done) * soft
    errors = both_values(agent, own.obs, own.action) - target
    assert (np.abs(errors) > 1).any() and (np.abs(errors) < 1).any()
    assert loss.item() == pytest.approx(huber(errors[0]) + huber(errors[1]), rel=1e-6)
    assert metrics["losses/qf_loss"].item() == pytest.approx(loss.item() / 2)
    loss.backward()
    assert all(p.grad is None for p in target_agent.parameters())


def test_the_actor_climbs_its_own_critics_and_leaves_them_as_they_are():
    """The gradient is that of a network whose critics belong to a copy."""
    agent, batch, noise = double_agent(), random_batch(), torch.randn(16, 2, dtype=torch.float64)
    critics = copy.deepcopy(agent)
    losses = []
    action, logprob = INTER["squashed"](*agent.policy(batch.obs), noise)
    losses.append(INTER["inter_actor_loss"](agent, torch.tensor(0.3), batch.obs, action, logprob))
    losses.append((0.3 * logprob - torch.min(*critics(batch.obs, action))).mean())
    torch.testing.assert_close(*losses)
    named = dict(agent.named_parameters())
    got, expected = (torch.autograd.grad(x, list(named.values()), retain_graph=True, allow_unused=True) for x in losses)
    reached = {name.partition(".")[0] for name, x in zip(named, got, strict=True) if x is not None}
    assert reached == {"encode_obs", "trunk", "mean", "log_std"}
    for one, other in zip(got, expected, strict=True):
        assert one is other is None or torch.allclose(one, other)


@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("turn", [True, False])
def test_lambda_weighs_actor_against_anchor(turn, anchored):
    agent, target_agent, anchor, batch = double_agent(0), double_agent(1), double_agent(2), random_batch()
    alpha, lam, noise = torch.tensor(0.3), torch.tensor(0.2), torch.randn(2, 16, 2, dtype=torch.float64)
    inputs = (target_agent, anchor if anchored else None, lam, alpha, batch, noise, 0.5, 0.9, turn)
    loss, metrics, entropy = INTER["inter_sac_loss"](agent, *inputs)
    expected, _ = INTER["inter_critic_loss"](agent, target_agent, alpha, batch, noise[0], 0.5, 0.9)
    [obs] = numpy_of(batch.obs)
    action, logprob = sample(agent, obs, noise[1].numpy())
    actor_loss = (0.3 * logprob - both_values(agent, obs, action).min(0)).mean()
    (mean, log_std), (anchor_mean, anchor_log_std) = policy(agent, obs), policy(anchor, obs)
    distance = huber(np.tanh(mean) - np.tanh(anchor_mean)) + huber(log_std - anchor_log_std)
    expected = expected.item() + 0.2 * actor_loss * turn + 0.8 * distance * anchored
    assert loss.item() == pytest.approx(expected, rel=1e-6) and entropy.item() == pytest.approx(-logprob.mean())
    assert ("losses/actor_loss" in metrics) == turn and ("losses/anchor_loss" in metrics) == anchored
    loss.backward()
    assert all(p.grad is None for p in target_agent.parameters())
    assert all((p.grad is None) == (not turn and not anchored) for p in agent.mean.parameters())


# ---------------------------------------------------------------------- loop
def watched(train, monkeypatch, *flags):
    """The variables of a training on the diary; the inputs of the steps of its network; and after each environment step
    the weights of (agent, anchor) and lambda."""
    steps, after = [], []

    class Watched(solorl.Run):
        def gradient_step(self, loss_of, module, optimizer):
            step = super().gradient_step(loss_of, module, optimizer)

            def noted(*inputs):
                if loss_of.__name__ == "inter_sac_loss":
                    steps.append(inputs)
                return step(*inputs)

            return noted

        def resume(self, **parts):
            self.parts = parts
            return super().resume(**parts)

        def save(self, step):
            agent, anchor = (weights(self.parts[name]).clone() for name in ("agent", "anchor_agent"))
            after.append((agent, anchor, self.parts["reliability"]().item()))
            return super().save(step)

    monkeypatch.setattr("solorl.Run", Watched)
    return train("inter_sac", *DIARY, *flags), steps, after


def test_the_batch_grows_with_the_filled_part_of_the_buffer(train, monkeypatch):
    """From step 21 on, with room for 50: 1 + 21/50 times 8, and twice as much from step 50 on."""
    assert [INTER["grown"](256, n, 1000) for n in (0, 1, 500, 999, 1000, 5000)] == [256, 256, 384, 511, 512, 512]
    _, steps, _ = watched(train, monkeypatch, "--buffer-size", "50")
    sizes = [len(inputs[4].obs) for inputs in steps]
    assert sizes == [int(8 * (1 + min(n / 50, 1))) for n in range(21, 61)] and sizes[-1] == 16
    assert all(inputs[5].shape == (2, size, 2) for inputs, size in zip(steps, sizes, strict=True))
    _, steps, _ = watched(train, monkeypatch, "--buffer-size", "50", "--no-growing-batch")
    assert {len(inputs[4].obs) for inputs in steps} == {8}


def test_the_anchor_goes_lambda_of_the_way_now_and_then(train, monkeypatch):
    """After updates 10, 20, 30 and 40, which are those of the environment steps 30, 40, 50 and 60."""
    _, _, after = watched(train, monkeypatch, "--anchor-frequency", "10")
    assert not torch.equal(after[0][1], after[-1][1])
    for step, ((_, before, _), (agent, anchor, lam)) in enumerate(pairwise(after), 2):
        due = step in (30, 40, 50, 60)
        assert 0.1 < lam < 1
        torch.testing.assert_close(anchor, before + lam * (agent - before) * due, rtol=1e-5, atol=1e-6)


def test_the_anchor_stays_while_lambda_is_small(train, monkeypatch):
    """Losses rise: at the environment steps 30 and 40 lambda is above 0.1, at 50 and 60 below."""
    _, _, after = watched(train, monkeypatch, "--anchor-frequency", "10", "--reward-scale", "0.02")
    anchors, lams = [after[step - 1][1] for step in (29, 30, 40, 50, 60)], [after[step - 1][2] for step in (40, 50, 60)]
    assert lams[0] > 0.1 > lams[1] > lams[2] > 0.001
    assert [torch.equal(*pair) for pair in pairwise(anchors)] == [False, False, True, True]


def test_each_part_has_its_flag(train, monkeypatch):
    v, steps, after = watched(train, monkeypatch)
    assert {inputs[1] for inputs in steps} == {v["anchor_agent"]}
    turns = [inputs[-1] for inputs in steps]
    assert 20 <= sum(turns) < 40 and [inputs[2].item() for inputs in steps[1:]] == [lam for *_, lam in after[20:-1]]
    _, steps, after = watched(train, monkeypatch, "--no-reliable-lambda")
    assert all(inputs[-1] for inputs in steps) and {lam for *_, lam in after} == {1.0}
    _, steps, _ = watched(train, monkeypatch, "--no-anchor")
    assert {inputs[1] for inputs in steps} == {None}
    v, _, _ = watched(train, monkeypatch, "--no-dense")
    assert type(v["agent"].trunk) is torch.nn.Sequential


def test_targets_follow_by_tau(train, monkeypatch):
    v, _, after = watched(train, monkeypatch, "--tau", "0.25")
    target = after[0][0]
    for agent, *_ in after[20:]:
        target = target + 0.25 * (agent - target)
    torch.testing.assert_close(weights(v["target_agent"]), target, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["inter_sac", "mod_sac", "basic_ac", "inter_ac"])
def test_a_time_limit_is_not_the_end_of_the_task(name, train):
    """Episodes end by turns after 3 steps, where the task is over, and after 4 by a time limit."""
    flags = DIARY if name != "basic_ac" else ["--env-id", "probes_offpolicy:Diary-v0", *SMALL]
    v = train(name, *flags)
    arrays = v["replay"].arrays
    episode, step = arrays["obs"][:60, 1], arrays["obs"][:60, 2]
    np.testing.assert_array_equal(arrays["done"][:60], (episode % 2 == 0) & (step == 2))
    np.testing.assert_array_equal(arrays["next_obs"][:60, 1:], np.stack([episode, step + 1], 1))


@pytest.mark.parametrize("name", ["inter_sac", "mod_sac", "basic_ac", "inter_ac"])
def test_resumed_with_its_replay_equals_uninterrupted(name, train):
    """The last checkpoint thrown away, the run continues from the one before; lambda and the actor's turns, too."""
    flags = "--total-timesteps 300 --num-envs 2 --learning-starts 100 --buffer-size 200 --save-replay --utd-ratio 0.25"
    flags += " --save-every 200 --log-every 100 --eval-every 150"
    more = {"basic_ac": "", "inter_sac": "--width 16 --anchor-frequency 10", "mod_sac": "--width 16"}
    flags += f" {more.get(name, '--width 16 --target-network-frequency 10')}"
    whole = train(name, "--env-id", "Pendulum-v1", *SMALL, *flags.split())
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train(name, "--resume", run_dir)
    assert v["start"] == 100 and comparable(run_dir) == expected
    modules = {key: part for key, part in whole.items() if isinstance(part, torch.nn.Module)}
    assert len(set(map(id, modules.values()))) == {"inter_sac": 5, "mod_sac": 6, "basic_ac": 4, "inter_ac": 3}[name]
    for what, module in modules.items():
        again = v[what].state_dict()
        assert all(torch.equal(x, again[key]) for key, x in module.state_dict().items())
    if name != "basic_ac":
        assert v["reliability"].mean_loss != math.sqrt(math.log(2)) and v["reliability"].due > 0


@pytest.mark.parametrize("name", ["inter_sac", "mod_sac", "basic_ac", "inter_ac"])
def test_logged_metrics_are_documented(name, train):
    v = train(name, *PENDULUM[: -2 if name == "basic_ac" else None])
    logged = {key for row in rows(v["run"].dir) for key in row if "/" in key}
    assert logged <= documented_keys(name)
    assert ("losses/reliable_lambda" in logged) == (name != "basic_ac")


@pytest.mark.parametrize(("name", "factor"), [("inter_sac", 4), ("mod_sac", 16), ("inter_ac", 4)])
def test_a_width_that_does_not_divide_is_refused(name, factor, train):
    train(name, *PENDULUM, "--width", str(factor + 2), code=2)
    assert f"--width {factor + 2} must be a multiple of {factor}" in train.out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inter_sac", "mod_sac", "basic_ac", "inter_ac"])
def test_learns_to_return_to_zero_at_once(name, train):
    rates = ["--policy-lr", "0.001", "--q-lr", "0.001"] if name == "mod_sac" else ["--learning-rate", "0.001"]
    width = [] if name == "basic_ac" else ["--width", "64"]
    assert regulated(train, name, *rates, *width) > -0.6
