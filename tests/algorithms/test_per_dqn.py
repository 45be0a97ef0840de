"""per_dqn.py: its priorities against a naive buffer, what it draws, weights by brute force, the loss by hand, the loop.
The sum tree is that of rainbow_atari.py, whose tests it has in test_rainbow_atari.py."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, rows
from test_dqn import DIARY, DQN, PROBE, SMALL, network, random_batch, stored, value_at, values, weights

from solorl.checkpoints.checkpoint import CheckpointError
from solorl.checkpoints.replay import ReplayLog
from solorl.compute.speed import GradientStep

PER = definitions("per_dqn")
CPU = torch.device("cpu")


def transitions(x, num_envs=1):
    """A Batch as the loop adds it; all its fields tell the number x (n,) of the transition."""
    x = np.asarray(x, float).reshape(-1, num_envs)
    return PER["Batch"](x[..., None], x.astype(int), 10 * x, x % 2, x[..., None] + 0.5)


def filled(count=50, capacity=64):
    """A buffer with the transitions 0 to count - 1."""
    replay = PER["PERReplay"](capacity, 1, gym.spaces.Discrete(1000))
    replay.add(transitions(np.arange(count)))
    return replay


def leaves(replay):
    """The priority at each index."""
    return replay.tree.sum[replay.tree.size :][: replay.capacity]


# ---------------------------------------------------------------------- replay
@pytest.mark.parametrize("seed", range(10))
def test_priorities_are_those_of_a_naive_buffer(seed):
    """New transitions have the largest priority that there ever was, at first 1; others the last one they were given;
    an overwritten one leaves nothing."""
    rng = np.random.default_rng(seed)
    capacity, num_envs = int(rng.integers(6, 20)), int(rng.integers(1, 4))
    replay, expected, largest, count = filled(0, capacity), {}, 1.0, 0
    for _ in range(40):
        n = num_envs * int(rng.integers(1, 3))
        replay.add(transitions(np.arange(count, count + n), num_envs))
        expected |= dict.fromkeys(range(count, count + n), largest)
        count += n
        expected = {number: one for number, one in expected.items() if number >= count - capacity}
        index = rng.integers(min(count, capacity), size=3)
        new = rng.random(3) * rng.choice([0.1, 3])
        replay.update(index, new)
        at = {number % capacity: number for number in expected}
        expected |= {at[i]: value for i, value in zip(index, new, strict=True)}
        largest = max(largest, *new)
        wanted = np.zeros(capacity)
        for number, value in expected.items():
            wanted[number % capacity] = value
        np.testing.assert_array_equal(leaves(replay), wanted)
    assert replay.inserted == count > 2 * capacity and largest > 1


def test_transitions_are_drawn_in_proportion_to_their_priorities():
    """And only those that are there; the batch has the transitions of the indices."""
    np.random.seed(0)
    replay, priority = filled(), np.random.default_rng(0).random(50) ** 2 + 0.01
    replay.update(np.arange(50), priority)
    counts = np.zeros(64)
    for _ in range(1000):
        batch, _, index = replay.sample(32, 0.4, CPU)
        assert torch.equal(batch.action, torch.as_tensor(index)) and torch.equal(batch.reward, 10.0 * batch.action)
        assert torch.equal(batch.next_obs, batch.obs + 0.5) and torch.equal(batch.done, (batch.action % 2).float())
        counts += np.bincount(index, minlength=64)
    expected = 32_000 * priority / priority.sum()
    assert not counts[50:].any() and (np.abs(counts[:50] - expected) < 4.5 * np.sqrt(expected)).all()


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_by_brute_force(beta):
    """(N P(i))^-beta over the largest of all transitions in the buffer, drawn or not."""
    np.random.seed(0)
    replay, priority = filled(), np.random.default_rng(1).random(50) + 0.5
    priority[7] = 1e-9  # of the largest weight, and too small to be drawn
    replay.update(np.arange(50), priority)
    _, weight, index = replay.sample(200, beta, CPU)
    p = priority / priority.sum()
    w = [(50 * each) ** -beta for each in p]
    assert 7 not in index and weight.dtype == torch.float32
    np.testing.assert_allclose(weight, [w[i] / max(w) for i in index], rtol=1e-5)


def test_priorities_are_powers_of_the_errors():
    """Both signs alike; none is 0; with alpha 0 all transitions are drawn alike."""
    error = torch.tensor([2.0, -2.0, 0.0, 0.25])
    np.testing.assert_allclose(PER["priorities"](error, 0.5), [2**0.5, 2**0.5, 1e-3, 0.5], rtol=1e-5)
    assert (PER["priorities"](error, 0.0) == 1).all()


def test_a_rare_reward_is_drawn_more_often_than_the_others():
    """One of 200 transitions has a reward; the values begin at 0 and learn. Drawn uniformly it would come 10 times."""
    torch.manual_seed(0)
    np.random.seed(0)
    replay, net = filled(200, 256), network("per_dqn", 1, 2)
    torch.nn.init.zeros_(net.net[-1].weight)
    torch.nn.init.zeros_(net.net[-1].bias)
    replay.arrays["obs"][:] = np.random.default_rng(0).normal(size=(256, 1))
    replay.arrays["action"][:], replay.arrays["reward"][:], replay.arrays["done"][:] = 0, 0, 1
    replay.arrays["reward"][123] = 1
    optimizer, count = torch.optim.SGD(net.parameters(), lr=1e-3), 0
    for _ in range(125):
        batch, weight, index = replay.sample(16, 0.4, CPU)
        loss, _, error = PER["per_td_loss"](net, net, batch, weight, 0.9)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        replay.update(index, PER["priorities"](error, 0.6))
        count += np.sum(index == 123)
    assert count > 50


# ---------------------------------------------------------------------- loss
def test_loss_by_hand():
    """Sample by sample: weight times squared error with DQN's target; the errors are those without the weight."""
    net, target_net, batch = network("per_dqn", seed=0), network("per_dqn", seed=2), random_batch()
    weight = torch.rand(32)
    loss, metrics, error = PER["per_td_loss"](net, target_net, batch, weight, 0.9)
    q, judged = values(net, batch.obs), values(target_net, batch.next_obs)
    errors = [
        batch.reward[i].item() + (0 if batch.done[i] else 0.9 * judged[i].max()) - q[i, batch.action[i]]
        for i in range(32)
    ]
    np.testing.assert_allclose(error.detach(), errors, rtol=1e-4, atol=1e-5)
    expected = np.mean(weight.numpy() * np.square(errors))
    assert metrics["losses/td_loss"].item() == loss.item() == pytest.approx(expected, rel=1e-4)
    taken = [q[i, action] for i, action in enumerate(batch.action)]
    assert metrics["losses/q_values"].item() == pytest.approx(np.mean(taken), rel=1e-4)
    loss.backward()
    assert all(p.grad is None for p in target_net.parameters()) and all(p.grad is not None for p in net.parameters())


def test_with_equal_weights_the_loss_is_that_of_dqn():
    nets, batch = (network("dqn", seed=0), network("dqn", seed=2)), random_batch()
    assert PER["per_td_loss"](*nets, batch, torch.ones(32), 0.9)[0].item() == pytest.approx(
        DQN["td_loss"](*nets, batch, 0.9)[0].item(), rel=1e-6
    )


# ---------------------------------------------------------------------- the loop
def test_the_loop_gives_priorities_and_weights_and_raises_beta(train, monkeypatch):
    """After the last step its transitions have the priorities of its errors; beta ends at 1; the page has the keys."""
    seen = []

    def note(self, target_network, batch, weight, gamma):
        metrics, error = step(self, target_network, batch, weight, gamma)
        seen.append((weight, error.clone()))
        return metrics, error

    step = GradientStep.__call__
    monkeypatch.setattr(GradientStep, "__call__", note)
    v = train("per_dqn", "--env-id", DIARY, *SMALL, "--prioritized-replay-alpha", "0.7")
    assert len(seen) == 40 and v["beta"] == 1.0
    last = {i: abs(e) for i, e in zip(v["index"], seen[-1][1].double().tolist(), strict=True)}
    np.testing.assert_allclose(leaves(v["replay"])[list(last)], (np.array([*last.values()]) + 1e-6) ** 0.7, rtol=1e-6)
    assert seen[0][0].eq(1).all() and seen[-1][0].max() <= 1 and len(set(seen[-1][0].tolist())) > 1
    beta = [row["charts/beta"] for row in rows(v["run"].dir, "charts/beta")]
    np.testing.assert_allclose(beta, 0.4 + 0.6 * np.arange(1, 61) / 60)
    logged = {key for row in rows(v["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert logged == documented_keys("per_dqn")


def test_resumed_with_its_replay_equals_uninterrupted(train):
    """The last checkpoint thrown away, the run continues from the one before: weights, transitions, priorities."""
    flags = "--total-timesteps 2500 --learning-starts 500 --train-frequency 10 --num-envs 2 --buffer-size 1000".split()
    flags = ["--env-id", "CartPole-v1", *SMALL, *flags, "--save-every", "1700", "--save-replay", "--end-e", "0.9"]
    whole = train("per_dqn", *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("per_dqn", "--resume", run_dir)
    assert v["start"] == 170 and comparable(run_dir) == expected
    for what in ("q_network", "target_network"):
        assert torch.equal(weights(v[what]), weights(whole[what]))
    mine, other = v["replay"], whole["replay"]
    for x, y in zip(stored(v), stored(whole), strict=True):
        assert np.array_equal(x, y)
    assert set(vars(mine.state)) == {"leaves", "sum", "least", "largest"} and other.state.largest > 1
    assert all(np.array_equal(value, getattr(other.state, key)) for key, value in vars(mine.state).items())
    assert np.shares_memory(mine.state.sum, mine.tree.sum) and len(set(leaves(mine))) > 100


def test_priorities_fit_a_buffer_of_the_same_size_only(tmp_path):
    log = ReplayLog(tmp_path)
    saved = log.append(filled(20, 50))
    log.load(filled(0, 50), saved)
    for capacity in (40, 60):  # with as many leaves in the tree
        with pytest.raises(CheckpointError, match="does not fit"):
            log.load(filled(0, capacity), saved)


def test_what_diverges_is_seen(train):
    train("per_dqn", "--env-id", DIARY, *SMALL, "--total-timesteps", "90", "--learning-rate", "1e30", code=3)
    assert "losses/" in train.out and "Traceback" not in train.out


def test_learns_what_is_to_come(train):
    v = train("per_dqn", "--env-id", "probes:Delayed-v0", *PROBE, "--gamma", "0.5")
    assert value_at(v, 0) == pytest.approx(0.5, abs=0.07) and value_at(v, 1) == pytest.approx(1, abs=0.07)


@pytest.mark.slow
def test_learns_cartpole(train):
    flags = "--total-timesteps 200000 --eval-every 0 --log-every 10000".split()
    v = train("per_dqn", "--env-id", "CartPole-v1", *flags)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > 400
