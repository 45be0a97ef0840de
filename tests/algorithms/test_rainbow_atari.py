"""rainbow_atari.py: n-step returns and priorities against a naive buffer, the sum tree against a loop, noise and loss
by hand, and the loop."""

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, rows
from test_c51 import projected
from test_frame_replay import CPU, DQN, histories, images, numbers_on

from solorl.compute.speed import GradientStep

RAINBOW = definitions("rainbow_atari")
SMALL = (
    "--env-id pixel_probe:Catch-v0 --total-timesteps 60 --learning-starts 40 --batch-size 4 --buffer-size 200".split()
)
SMALL += "--eval-every 0 --eval-episodes 1".split()


# ---------------------------------------------------------------------- sum tree
@pytest.mark.parametrize("capacity", [1, 2, 5, 64, 100])
def test_sum_tree_against_a_loop(capacity):
    """The sum and the least priority of every node, after random settings with repeated leaves and zeros."""
    rng, tree, priority = np.random.default_rng(0), RAINBOW["SumTree"](capacity), np.zeros(capacity)
    for _ in range(30):
        leaf = rng.integers(capacity, size=rng.integers(0, 8))
        value = rng.random(capacity)[leaf] * rng.integers(0, 2, capacity)[leaf]
        tree.set(leaf, value)
        for i, x in zip(leaf, value, strict=True):
            priority[i] = x
        assert tree.sum.dtype == np.float64 and tree.size >= capacity
        for node in range(1, 2 * tree.size):
            level = node.bit_length()
            first = (node << (tree.size.bit_length() - level)) - tree.size
            below = priority[first : first + (tree.size >> (level - 1))]
            assert tree.sum[node] == pytest.approx(sum(below), abs=1e-12)
            assert tree.least[node] == min((x for x in below if x > 0), default=np.inf)


def test_it_draws_in_proportion_to_the_priorities():
    np.random.seed(0)
    tree, priority = RAINBOW["SumTree"](50), np.random.default_rng(0).random(50) ** 3
    priority[::4] = 0
    tree.set(np.arange(50), priority)
    counts = np.bincount(np.concatenate([tree.draw(50) for _ in range(2000)]), minlength=50)
    expected = 100_000 * priority / priority.sum()
    assert (np.abs(counts - expected) <= 4.5 * np.sqrt(expected)).all()


def test_draws_are_spread_over_the_sum():
    """One from each n-th part of it: of equal priorities each leaf is drawn once."""
    tree = RAINBOW["SumTree"](16)
    tree.set(np.arange(16), 0.3)
    assert tree.draw(16).tolist() == list(range(16))


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_it_never_draws_an_empty_leaf(u, monkeypatch):
    """Also at both ends of the sum, and where the sum of many orders of magnitude is rounded."""
    monkeypatch.setattr("numpy.random.random", lambda n: np.full(n, u))
    rng, tree = np.random.default_rng(0), RAINBOW["SumTree"](64)
    for _ in range(300):
        priority = 10.0 ** rng.uniform(-20, 3, 64) * (rng.random(64) < rng.choice([0.05, 0.5]))
        priority[rng.integers(64)] = 1e-3
        tree.set(np.arange(64), priority)
        assert (priority[np.concatenate([tree.draw(n) for n in (1, 3, 32)])] > 0).all()


# ---------------------------------------------------------------------- replay
class Prioritized:
    """A PrioritizedReplay with the names that `histories` and its naive buffer use."""

    def __init__(self, capacity, num_envs, n_step):
        self.replay = RAINBOW["PrioritizedReplay"](capacity, num_envs, n_step)
        self.begin, self.add, self.capacity = self.replay.begin, self.replay.add, capacity

    @property
    def inserted(self):
        return self.replay.inserted

    def leaf(self, number):
        """The leaf of the transition whose first step led to the image of this number."""
        return number % self.capacity

    def priorities(self):
        return self.replay.tree.sum[self.replay.tree.size :][: self.capacity]


def returns(naive, n_step, gamma):
    """First step -> obs, action, return, done, discount, next_obs of every transition that is complete, by definition:
    game by game, step by step."""
    found = {}
    for numbers, over in naive.games:
        for t, first in enumerate(numbers):
            total, complete = 0.0, False
            for k, number in enumerate(numbers[t : t + n_step]):
                _, _, reward, done, next_obs = naive.transitions[number]
                total += gamma**k * reward
                complete = done or k + 1 == n_step or (over and number == numbers[-1])
                if complete:
                    break
            if complete:
                obs, action = naive.transitions[first][:2]
                found[first] = (obs, action, total, done, gamma ** (k + 1), next_obs)
    oldest = naive.inserted - naive.capacity
    return {first: one for first, one in found.items() if min(one[0]) >= oldest}


def assert_prioritized(mine, naive, expected, known):
    """Which rows have a priority, and which one; what is drawn; and the weights. `known`: first step -> priority; under
    None the largest so far."""
    priority, first = mine.priorities(), np.array(sorted(expected), int)
    assert set(np.flatnonzero(priority)) == set(mine.leaf(first))
    for number in expected:
        assert priority[mine.leaf(number)] == known[number]
    if not expected:
        return
    batch, discount, weight, index = mine.replay.sample(6, 0.9, 0.7, CPU)
    number_at = dict(zip(mine.leaf(first), first, strict=True))
    least = min(priority[mine.leaf(first)])
    for k, leaf in enumerate(index):
        obs, action, total, done, power, next_obs = expected[number_at[leaf]]
        assert tuple(numbers_on(batch.obs[k])) == obs and tuple(numbers_on(batch.next_obs[k])) == next_obs
        assert (batch.action[k], batch.done[k]) == (action, done)
        assert batch.reward[k].item() == pytest.approx(total, abs=1e-6)
        assert discount[k].item() == pytest.approx(power)
        assert weight[k].item() == pytest.approx((priority[leaf] / least) ** -0.7, rel=1e-5)
    new = np.random.random(6) * 3 + 1e-3
    mine.replay.update(index, new)
    known |= {number_at[leaf]: value for leaf, value in zip(index, new, strict=True)}
    known[None] = max(known[None], new.max())


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_returns_and_priorities_are_those_of_a_naive_buffer(count):
    """On random histories with terminations, time limits, lost lives, several environments and overwritten rows. No
    return mixes two games, and the last starts of a game are there, too."""
    short = 0
    for seed in range(count):
        rng, n_step = np.random.default_rng([seed, 2]), 1 + seed % 4
        history = histories(seed, lambda capacity, num_envs: Prioritized(capacity, num_envs, n_step))
        known = {None: 1.0}
        for mine, naive in history:
            expected = returns(naive, n_step, 0.9)
            for number in expected:  # what is complete from this step on has the largest priority of this moment
                known.setdefault(number, known[None])
            if rng.random() < 0.05:
                assert_prioritized(mine, naive, expected, known)
        assert_prioritized(mine, naive, expected, known)
        short += any(one[4] > 0.9**n_step + 1e-9 for one in expected.values())
    assert short > count / 3  # at the end of many there are returns of fewer steps


def filled(steps=40, capacity=64, n_step=3, num_envs=1):
    """A buffer with one endless game per environment."""
    mine = RAINBOW["PrioritizedReplay"](capacity, num_envs, n_step)
    mine.begin(np.arange(num_envs), images(np.zeros(num_envs)))
    for k in range(steps):
        zeros = np.zeros(num_envs)
        mine.add(images(np.full(num_envs, k + 1)), zeros.astype(int), zeros + 1, zeros)
    return mine


def test_transitions_are_drawn_in_proportion_to_their_priorities():
    np.random.seed(0)
    replay = filled()
    index = np.flatnonzero(replay.tree.sum[replay.tree.size :])
    assert index.tolist() == list(range(1, 39))  # neither the first image nor the two last rows
    priority = np.random.default_rng(0).random(38) + 0.01
    replay.update(index, priority)
    drawn = np.concatenate([replay.sample(32, 0.9, 0.4, CPU)[3] for _ in range(300)])
    expected = 9600 * priority / priority.sum()
    assert (np.abs(np.bincount(drawn, minlength=64)[1:39] - expected) < 4.5 * np.sqrt(expected)).all()


def test_weights_by_hand():
    """(N P(i))^-beta over the largest of the buffer, which is that of the least priority, drawn or not."""
    np.random.seed(0)
    replay = filled(steps=5)
    replay.update(np.array([1, 2, 3]), np.array([1e-9, 4.0, 16.0]))
    _, _, weight, index = replay.sample(8, 0.9, 0.5, CPU)
    assert set(index) == {2, 3}
    p = np.array([1e-9, 4, 16]) / (20 + 1e-9)
    expected = {i + 1: (3 * p[i]) ** -0.5 / max((3 * p) ** -0.5) for i in range(3)}
    np.testing.assert_allclose(weight, [expected[i] for i in index], rtol=1e-5)


def test_new_transitions_get_the_largest_priority_that_ever_was():
    replay = filled()
    replay.update(np.array([5, 6]), np.array([7.0, 0.1]))
    replay.update(np.array([5]), np.array([0.2]))
    replay.add(images([99]), np.array([0]), np.array([0.0]), np.array([False]))
    assert replay.tree.sum[replay.tree.size + 39] == 7 and replay.tree.sum[replay.tree.size + 40] == 0


def test_a_million_images_and_their_priorities_fit_into_7_gigabytes():
    """Of 10^9 bytes; the images are never touched, so this takes no memory."""
    frames = RAINBOW["PrioritizedReplay"](1_000_000, 1, 3)
    held = (*frames.arrays.values(), *vars(frames.state).values())
    assert sum(np.asarray(each).nbytes for each in held) < 7.2e9


# ---------------------------------------------------------------------- noise
def networks(seed=0, num_actions=3, n_atoms=7):
    """An online and a target network, with weights large enough that actions differ."""
    torch.manual_seed(seed)
    nets = [RAINBOW["QNetwork"](num_actions, torch.linspace(-2, 2, n_atoms)) for _ in range(2)]
    for net in nets:
        for stream in (net.value, net.advantage):
            torch.nn.init.normal_(stream[1].mean.weight, std=0.3)
    return nets


def random_images(n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (n, 4, 84, 84), dtype=np.uint8))


def test_noise_is_the_factorised_one():
    """y = (mu + sigma * f(out) f(in)^T) x + mu_b + sigma_b * f(out), f(x) = sign(x) sqrt(|x|), for each row its own."""
    torch.manual_seed(0)
    layer = RAINBOW["NoisyLinear"](5, 4)
    torch.nn.init.normal_(layer.sigma.weight)
    torch.nn.init.normal_(layer.sigma.bias)
    torch.manual_seed(1)
    raw = [torch.randn(3, 5), torch.randn(3, 4)]
    torch.manual_seed(1)
    noise, x = layer.noise(3), torch.randn(3, 5)
    f = [torch.tensor([[float(np.sign(v) * abs(v) ** 0.5) for v in row] for row in e.tolist()]) for e in raw]
    for i in range(3):
        weight = layer.mean.weight + layer.sigma.weight * torch.outer(f[1][i], f[0][i])
        bias = layer.mean.bias + layer.sigma.bias * f[1][i]
        torch.testing.assert_close(layer(x, noise)[i], weight @ x[i] + bias)
    torch.testing.assert_close(layer(x, None), x @ layer.mean.weight.T + layer.mean.bias)
    one = layer.noise(1)  # the same for all rows
    torch.testing.assert_close(layer(x, one)[2], layer(x[2:], one)[0])


def test_noise_begins_as_the_paper_says():
    """mu uniform in +-1/sqrt(p), sigma 0.5/sqrt(p), for p inputs; weights and biases."""
    torch.manual_seed(0)
    layer = RAINBOW["NoisyLinear"](400, 1000)
    for p in layer.mean.parameters():
        assert 0.048 < p.max() <= 0.05 and -0.05 <= p.min() < -0.048
        assert p.detach().std() == pytest.approx(0.05 / 3**0.5, rel=0.05)
    assert all((p == 0.025).all() for p in layer.sigma.parameters())


def test_evaluation_has_no_noise():
    net, _ = networks()
    obs = random_images(20).numpy()
    expected = net(torch.from_numpy(obs)).argmax(1).numpy()
    state = torch.get_rng_state()
    assert (net.act(obs) == expected).all() and torch.equal(torch.get_rng_state(), state)
    for layer in (*net.value, *net.advantage):
        torch.nn.init.constant_(layer.sigma.weight, 100.0)
    assert (net.act(obs) == expected).all()
    assert (net.act(obs, net.noise(20)) != expected).any()


def test_streams_meet_as_in_the_paper():
    """Atom by atom: softmax of v + a - the mean of a over actions; values from the means."""
    net, _ = networks()
    obs, noise = random_images(5), net.noise(1)
    with torch.no_grad():
        x = net.torso(obs)
        assert x.shape == (5, 3136)
        v = net.value[1](net.value[0](x, noise[0]).relu(), noise[1])
        a = net.advantage[1](net.advantage[0](x, noise[2]).relu(), noise[3]).reshape(5, 3, 7)
        logit = torch.stack([v + a[:, i] - (a[:, 0] + a[:, 1] + a[:, 2]) / 3 for i in range(3)], 1)
        p = logit.exp() / logit.exp().sum(2, keepdim=True)
        torch.testing.assert_close(net.logits(obs, noise).softmax(2), p, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(net(obs, noise), (p * net.atoms).sum(2), rtol=1e-4, atol=1e-5)


@pytest.fixture
def noises(monkeypatch):
    """The noise of each forward pass of the networks in trainings from now on, flattened; None where there is none."""
    seen, call = [], torch.nn.Module.__call__

    def note(self, *inputs, **kwargs):
        if type(self).__name__ == "NoisyLinear":
            seen.append(None if inputs[1] is None else torch.cat([x.flatten() for x in inputs[1]]))
        return call(self, *inputs, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__call__", note)
    return seen


@pytest.mark.parametrize("num_envs", [1, 2])
def test_noise_is_fresh_at_each_step_and_for_each_part_of_each_loss(num_envs, noises, train):
    """4 layers a pass: a pass at each step, with noise of its own for each environment; 3 passes a gradient step, and
    none of them shares its noise; the evaluation has none."""
    flags = ["--num-envs", num_envs, "--total-timesteps", "48", "--learning-starts", "40"]
    v = train("rainbow_atari", *SMALL, *flags)
    noise = [x for x in noises if x is not None]
    steps, updates = 48 // num_envs, 2
    assert len(noise) == 4 * (steps + 3 * updates) and noises[-1] is None
    first = [x for x in noise if len(x) in (3136 + 512, num_envs * (3136 + 512))]
    assert len({tuple(x[:20].tolist()) for x in first}) == len(first)
    if num_envs == 2:
        (rows_of_inputs,) = {len(x) for x in first[:4]}
        assert rows_of_inputs == 2 * 3648 and not torch.equal(first[0][:3136], first[0][3136:6272])
    assert v["global_step"] == 48


# ---------------------------------------------------------------------- loss
def test_loss_by_hand():
    """Double: the online network chooses with noise of its own; cross entropy with the projected target sample by
    sample, weighted; the priority is the divergence from the target. No gradient reaches the target network."""
    net, target_net = networks()
    noise = [net.noise(1) for _ in range(3)]
    n, obs, next_obs = 12, random_images(12, 1), random_images(12, 2)
    torch.manual_seed(3)
    action, reward, done = torch.randint(3, (n,)), torch.randn(n), (torch.rand(n) < 0.4).float()
    discount, weight = 0.9 ** torch.randint(1, 4, (n,)).float(), torch.rand(n)
    batch = RAINBOW["Batch"](obs, action, reward, done, next_obs)
    loss, metrics, divergence = RAINBOW["rainbow_loss"](net, target_net, batch, discount, weight, noise)
    z = net.atoms.double().numpy()
    with torch.no_grad():
        p, chosen, judged = (
            each.logits(x, e).softmax(2).double().numpy()
            for each, x, e in ((net, obs, noise[0]), (net, next_obs, noise[1]), (target_net, next_obs, noise[2]))
        )
    losses, divergences, taken = [], [], []
    for i in range(n):
        best = np.argmax(chosen[i] @ z)
        target = projected(judged[i, best], reward[i].item() + discount[i].item() * (1 - done[i].item()) * z, z)
        q = p[i, action[i]]
        losses.append(-weight[i].item() * sum(target * np.log(q)))
        divergences.append(sum(t * np.log(t / x) for t, x in zip(target, q, strict=True) if t > 0))
        taken.append(q @ z)
    assert (np.argmax(chosen @ z, 1) != np.argmax(judged @ z, 1)).any()  # double makes a difference
    assert metrics["losses/td_loss"].item() == loss.item() == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics["losses/q_values"].item() == pytest.approx(np.mean(taken), rel=1e-3)
    np.testing.assert_allclose(divergence.detach(), divergences, rtol=1e-3, atol=1e-5)
    loss.backward()
    assert all(p.grad is None for p in target_net.parameters()) and all(p.grad is not None for p in net.parameters())


# ---------------------------------------------------------------------- the loop
def test_priorities_are_the_divergences_to_the_power_alpha(train, monkeypatch):
    """And beta rises to 1; the page names what is logged."""
    seen = []

    def note(self, *inputs):
        metrics, divergence = step(self, *inputs)
        seen.append(divergence.clone())
        return metrics, divergence

    step = GradientStep.__call__
    monkeypatch.setattr(GradientStep, "__call__", note)
    v = train("rainbow_atari", *SMALL, "--total-timesteps", "44", "--prioritized-replay-alpha", "0.7")
    (divergence,), index, replay = seen, v["index"], v["replay"]
    np.testing.assert_allclose(replay.tree.sum[replay.tree.size + index], (divergence.numpy() + 1e-6) ** 0.7, rtol=1e-5)
    assert v["beta"] == 1.0
    assert rows(v["run"].dir, "charts/beta")[0]["charts/beta"] == pytest.approx(0.4 + 0.6 / 11)
    logged = {key for row in rows(v["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert logged == documented_keys("rainbow_atari") - {"charts/epsilon"}


@pytest.mark.slow
def test_resumed_with_its_replay_equals_uninterrupted(train):
    """The last checkpoint thrown away, the run goes on from the one before: weights, priorities, images, metrics."""
    flags = "--total-timesteps 72 --num-envs 2 --buffer-size 50 --save-every 44 --save-replay".split()
    whole = train("rainbow_atari", *SMALL, *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("rainbow_atari", "--resume", run_dir)
    assert 0 < v["start"] < whole["num_iterations"] and comparable(run_dir) == expected
    for what in ("q_network", "target_network"):
        for x, y in zip(v[what].parameters(), whole[what].parameters(), strict=True):
            assert torch.equal(x, y)
    mine, other = v["replay"], whole["replay"]
    assert mine.inserted == other.inserted > 50
    assert set(vars(mine.state)) == {"age", "ahead", "largest", "sum", "least"}
    expected = other.arrays | vars(other.state)
    for key, value in (mine.arrays | vars(mine.state)).items():
        assert np.array_equal(value, expected[key]), key


@pytest.mark.parametrize("flags", ["--buffer-size 15", "--num-envs 3 --buffer-size 47", "--n-step 16 --buffer-size 41"])
def test_sizes_without_a_whole_transition_are_refused(flags, train):
    train("rainbow_atari", *SMALL, *flags.split(), code=2)
    assert "--buffer-size must be at least" in train.out and "Traceback" not in train.out


def test_without_learning_starts_it_learns_once_a_transition_is_whole(train):
    """With rows for a transition of 3 steps in one environment, 16, after 15 steps: first at step 16."""
    v = train("rainbow_atari", *SMALL, "--learning-starts", "0", "--total-timesteps", "24")
    (step,) = {int(state["step"]) for state in v["optimizer"].state.values()}
    assert step == 3 and v["min_rows"] == 16  # at steps 16, 20 and 24


def test_the_smallest_sizes_work(train):
    """With games of 11 steps, in two environments."""
    flags = "--num-envs 2 --buffer-size 32 --learning-starts 32 --train-frequency 8 --total-timesteps 64".split()
    assert train("rainbow_atari", *SMALL, *flags)["replay"].inserted > 64


def test_frames_are_stored_as_by_its_parents():
    """The same class, with its own uniform sampling."""
    *_, (replay, naive) = histories(10, RAINBOW["FrameReplay"])
    *_, (same, _) = histories(10, DQN["FrameReplay"])
    assert all(np.array_equal(replay.arrays[key], same.arrays[key]) for key in same.arrays) and naive.kept()
