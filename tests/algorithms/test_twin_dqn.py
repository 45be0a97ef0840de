"""twin_dqn.py and twin_d3qn.py: the target against a loop, exploration by the softmax of the values, the loop."""

import copy

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, rows
from test_dqn import DIARY, SMALL, network, random_batch, reference, stored, value_at, weights

BOTH = ["twin_dqn", "twin_d3qn"]
TWIN = definitions("twin_dqn")


def values_of(head, x):
    """The values of one head, dueling or not."""
    if not hasattr(head, "value"):
        return reference(head, x)
    value, advantage = reference(head.value, x), reference(head.advantage, x)
    return np.array([[v + a - sum(row) / len(row) for a in row] for v, row in zip(value[:, 0], advantage, strict=True)])


def heads(net, obs):
    """The values of both heads, in NumPy and double precision, layer by layer."""
    x = np.maximum(reference(net.torso, obs.double().numpy()), 0)
    return values_of(net.head1, x), values_of(net.head2, x)


# ---------------------------------------------------------------------- the target
@pytest.mark.parametrize("name", BOTH)
def test_loss_by_hand(name):
    """Sample by sample and action by action: the smaller of two values at each action, then the largest of these. It is
    neither the smaller of two largest values, nor Double DQN's. No gradient reaches the target network."""
    loss_of = definitions(name)["twin_td_loss"]
    net, target_net, batch = network(name, seed=0), network(name, seed=2), random_batch()
    loss, metrics = loss_of(net, target_net, batch, 0.9)
    q1, q2 = heads(net, batch.obs)
    next1, next2 = heads(target_net, batch.next_obs)
    errors, taken, others = [], [], []
    for i in range(32):
        smaller = [min(next1[i, a], next2[i, a]) for a in range(4)]
        target = batch.reward[i].item() + (0 if batch.done[i] else 0.9 * max(smaller))
        action = batch.action[i]
        errors.append((q1[i, action] - target) ** 2 + (q2[i, action] - target) ** 2)
        taken.append(q1[i, action])
        others.append(min(next1[i].max(), next2[i].max()) - max(smaller))
    assert max(others) > 0.01
    assert metrics["losses/td_loss"].item() == loss.item() == pytest.approx(np.mean(errors), rel=1e-4)
    assert metrics["losses/q_values"].item() == pytest.approx(np.mean(taken), rel=1e-4)
    loss.backward()
    assert all(p.grad is None for p in target_net.parameters()) and all(p.grad is not None for p in net.parameters())


def test_each_head_learns_and_each_head_limits_the_target():
    """Raising all values of one head of the target network raises no target; lowering them lowers all."""
    net, target_net, batch = network("twin_dqn", seed=0), network("twin_dqn", seed=2), random_batch()
    batch = batch._replace(done=torch.zeros(32))
    for head in ("head1", "head2"):
        changed = copy.deepcopy(target_net)
        losses = []
        for shift in (0.0, 100.0, 1000.0):
            getattr(changed, head)[-1].bias.data.copy_(getattr(target_net, head)[-1].bias + shift)
            losses.append(TWIN["twin_td_loss"](net, changed, batch, 0.9)[0].item())
        assert losses[1] == pytest.approx(losses[2], rel=1e-6)  # only the other head is left
        getattr(changed, head)[-1].bias.data.copy_(getattr(target_net, head)[-1].bias - 1000)
        assert TWIN["twin_td_loss"](net, changed, batch, 0.9)[0].item() > 1e5


@pytest.mark.parametrize("name", BOTH)
def test_heads_begin_differently(name):
    net = definitions(name)["QNetwork"](3, 4)
    one, two = net.both(torch.randn(10, 3))
    assert one.shape == two.shape == (10, 4) and (one - two).abs().min() > 1e-5


@pytest.mark.parametrize("name", BOTH)
def test_the_first_head_acts_greedily(name):
    """For observations of any shape and type."""
    net, obs = network(name, 6), np.random.default_rng(0).normal(size=(500, 2, 3))
    one, two = heads(net, torch.as_tensor(obs, dtype=torch.float32).flatten(1))
    action = net.act(obs)
    assert isinstance(action, np.ndarray) and action.shape == (500,) and len(set(action)) > 1
    np.testing.assert_allclose(one[np.arange(500), action], one.max(1), atol=1e-4)
    assert (action != two.argmax(1)).any()


def test_dueling_streams_have_the_mean_advantage_zero():
    """Eq. 9 of Wang et al.: the mean of a head's values over actions is the output of its value stream."""
    net, obs = network("twin_d3qn"), torch.randn(10, 3)
    x = net.torso(obs).relu()
    for head, q in zip((net.head1, net.head2), net.both(obs), strict=True):
        torch.testing.assert_close(q.mean(1, keepdim=True), head.value(x))
        assert q.std(1).min() > 0.01


# ---------------------------------------------------------------------- exploration
def test_samples_have_the_distribution_of_the_softmax():
    """Row by row, also where values are large; each row by itself."""
    np.random.seed(0)
    q = np.array([[0.0, 1.0, 2.0], [500.0, 499.0, 400.0], [-3.0, -3.0, -3.0]])
    drawn = np.array([TWIN["softmax_sample"](q) for _ in range(20_000)])
    p = np.exp(q - q.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    for row in range(3):
        counts = np.bincount(drawn[:, row], minlength=3)
        assert (np.abs(counts - 20_000 * p[row]) <= 4.5 * np.sqrt(20_000 * p[row] * (1 - p[row])) + 1e-9).all()
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 2])[0, 1]) < 0.03


@pytest.mark.parametrize("name", BOTH)
def test_actions_are_sampled_with_probability_epsilon(name, train):
    """A network that does not learn: random actions until step 2000; then the greedy action, except with probability
    0.4, where the softmax of the values of the first head is drawn from; in both environments."""
    flags = "--total-timesteps 6000 --learning-starts 2000 --buffer-size 6000 --num-envs 2 --train-frequency 8".split()
    flags += ["--epsilon", "0.4", "--learning-rate", "0", "--log-every", "1000"]
    v = train(name, "--env-id", DIARY, *SMALL, *flags)
    got, net = stored(v), v["q_network"]
    first, later = got.action[:2000], slice(2000, 6000)
    np.testing.assert_allclose(np.bincount(first, minlength=4), 500, atol=4.5 * np.sqrt(500 * 0.75))
    with torch.no_grad():
        q = net(torch.from_numpy(got.obs[later])).double()
    p, best = q.softmax(1).numpy(), q.argmax(1).numpy()
    expected = 0.4 * p
    expected[np.arange(4000), best] += 0.6
    for who in range(2):
        for action in range(4):
            mine = expected[who::2, action]
            taken = np.sum(got.action[later][who::2] == action)
            assert abs(taken - mine.sum()) <= 4.5 * np.sqrt(np.sum(mine * (1 - mine))) + 1e-9
    other = got.action[later] != best  # the probability of another action depends on the values
    close = p[np.arange(4000), best] < np.median(p[np.arange(4000), best])
    uniform = 0.4 * 0.75
    wanted = [0.4 * (1 - p[np.arange(4000), best])[x].mean() for x in (close, ~close)]
    for x, share in zip((close, ~close), wanted, strict=True):
        assert other[x].mean() == pytest.approx(share, abs=4.5 * np.sqrt(share * (1 - share) / np.sum(x)) + 1e-9)
    assert wanted[1] < uniform - 0.1


@pytest.mark.parametrize("name", BOTH)
def test_without_exploration_actions_are_greedy_after_learning_starts(name, train):
    """Step 20 lies in the middle of the third iteration, which is still random."""
    flags = "--epsilon 0 --learning-rate 0 --total-timesteps 200 --buffer-size 200 --train-frequency 8".split()
    v = train(name, "--env-id", DIARY, *SMALL, *flags)
    got = stored(v)
    greedy = got.action == v["q_network"].act(got.obs)
    assert greedy[24:].all() and not greedy[16:24].all() and not greedy[:16].all()


# ---------------------------------------------------------------------- the loop
@pytest.mark.parametrize("name", BOTH)
def test_resumed_with_its_replay_equals_uninterrupted(name, train):
    """The last checkpoint thrown away, the run continues from the one before, in the middle of a row of metrics."""
    flags = "--total-timesteps 2500 --learning-starts 500 --train-frequency 10 --num-envs 2 --buffer-size 1000".split()
    flags = ["--env-id", "CartPole-v1", *SMALL, *flags, "--save-every", "1700", "--save-replay", "--epsilon", "0.9"]
    whole = train(name, *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train(name, "--resume", run_dir)
    assert v["start"] == 170 and comparable(run_dir) == expected
    for what in ("q_network", "target_network"):
        assert torch.equal(weights(v[what]), weights(whole[what]))
    for x, y in zip(stored(v), stored(whole), strict=True):
        assert np.array_equal(x, y)


PROBE = "--total-timesteps 1500 --learning-starts 100 --train-frequency 2 --batch-size 32 --buffer-size 2000".split()
PROBE += "--learning-rate 0.003 --target-network-frequency 20 --eval-every 0 --eval-episodes 10".split()


@pytest.mark.parametrize("name", BOTH)
def test_learns_to_discount(name, train):
    """And acts in NumPy as in torch; the page names what is logged."""
    v = train(name, "--env-id", "probes:Delayed-v0", *PROBE, "--gamma", "0.5")
    assert value_at(v, 0) == pytest.approx(0.5, abs=0.07) and value_at(v, 1) == pytest.approx(1, abs=0.07)
    obs = np.random.default_rng(0).normal(size=(100, 1)).astype(np.float32)
    assert v["q_values"].in_numpy
    np.testing.assert_allclose(v["q_values"](obs), v["q_network"](torch.from_numpy(obs)).detach(), rtol=1e-5, atol=1e-6)
    logged = {key for row in rows(v["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert logged == documented_keys(name) - {"charts/epsilon"}


@pytest.mark.parametrize("name", BOTH)
def test_learns_a_policy_of_the_observation(name, train):
    v = train(name, "--env-id", "probes:ActionMustMatch-v0", *PROBE, "--num-envs", "2")
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] == 1.0
    assert v["q_network"].act(np.array([[1.0], [-1.0]])).tolist() == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_learns_cartpole(name, train):
    v = train(name, "--env-id", "CartPole-v1", *"--total-timesteps 200000 --eval-every 0 --log-every 10000".split())
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > 400
