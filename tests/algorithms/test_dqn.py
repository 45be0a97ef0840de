"""The DQN family: its replay and loop against the simulator, its targets by hand, and that it learns. What all files
share is tested on `dqn.py`, and on another file what is different there; C51's own formulas are in test_c51.py."""

import copy
import subprocess

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, rows, script

SCRIPTS = ["dqn", "c51", "double_dqn", "dueling_dqn", "d3qn", "ez_greedy_dqn"]
DQN = definitions("dqn")
DIARY = "probes_offpolicy:DiscreteDiary-v0"
SMALL = "--total-timesteps 60 --learning-starts 20 --train-frequency 1 --batch-size 8 --buffer-size 64".split()
SMALL += "--eval-every 0 --eval-episodes 1".split()


def updates_of(v):
    """Steps the optimiser has made."""
    (state,) = v["optimizer"].state.values() or [{"step": 0}]
    return int(state["step"])


def weights(module):
    """All parameters in one vector."""
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach()


def stored(v):
    """The transitions in the buffer that have been inserted, a Batch of NumPy arrays."""
    return DQN["Batch"](**{name: array[: v["replay"].inserted] for name, array in v["replay"].arrays.items()})


def network(name, obs_dim=3, num_actions=4, seed=0):
    """A Q-network with weights large enough that actions differ."""
    torch.manual_seed(seed)
    net = definitions(name)["QNetwork"](obs_dim, num_actions)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return net


def random_batch(n=32, obs_dim=3, num_actions=4):
    """A Batch as `Replay.sample` gives it."""
    torch.manual_seed(1)
    obs, next_obs = torch.randn(n, obs_dim), torch.randn(n, obs_dim)
    return DQN["Batch"](obs, torch.randint(num_actions, (n,)), torch.randn(n), (torch.rand(n) < 0.5).float(), next_obs)


def reference(net, x):
    """A multi-layer perceptron with ReLU in NumPy and double precision, its layers taken one by one."""
    layers = [layer for layer in net if isinstance(layer, torch.nn.Linear)]
    for i, layer in enumerate(layers):
        x = x @ layer.weight.detach().double().numpy().T + layer.bias.detach().double().numpy()
        x = np.maximum(x, 0) if i < len(layers) - 1 else x
    return x


def values(net, obs):
    """All Q-values of a network."""
    x = obs.double().numpy()
    if not hasattr(net, "torso"):
        return reference(net.net, x)
    x = np.maximum(reference(net.torso, x), 0)
    value, advantage = reference(net.value, x), reference(net.advantage, x)
    return np.array([[v + a - sum(row) / len(row) for a in row] for v, row in zip(value[:, 0], advantage, strict=True)])


# ---------------------------------------------------------------------- replay
@pytest.mark.parametrize(("name", "num_envs"), [("dqn", 1), ("dqn", 3), ("ez_greedy_dqn", 3)])
def test_replay_holds_what_the_simulator_did(name, num_envs, train):
    """The observation names the environment, the episode and the step: every transition is one step of one episode of
    one environment; its next_obs is where that step led, also at an end; done only where the task was over."""
    flags = ["--num-envs", num_envs, "--buffer-size", "128", "--train-frequency", "6"]
    v = train(name, "--env-id", DIARY, *SMALL, *flags)
    got, steps = stored(v), 60 // num_envs
    assert v["num_steps"] == 6 // num_envs and v["replay"].inserted == len(got.obs) == 60
    for who in range(num_envs):
        episode, step = 0, 0
        for k in range(who, num_envs * steps, num_envs):
            last = (3, 4)[episode % 2]
            done = step + 1 == last and episode % 2 == 0
            np.testing.assert_array_equal(got.obs[k], [who, episode, step])
            assert (got.reward[k], got.done[k]) == (100 * episode + step + 1, done)
            np.testing.assert_array_equal(got.next_obs[k], [who, episode, step + 1])
            episode, step = (episode + 1, 0) if step + 1 == last else (episode, step + 1)
    assert set(got.action) <= {0, 1, 2, 3} and len(set(got.action)) > 1


def test_replay_overwrites_the_oldest_transitions():
    """Transitions come with any number of leading dimensions, here (num_steps 2, num_envs 3)."""
    Batch, box = DQN["Batch"], gym.spaces.Box(-20, 20, (2,))
    replay = DQN["Replay"](8, 1, box)
    for k in range(0, 12, 6):
        x = np.arange(k, k + 6, dtype=float).reshape(2, 3)
        replay.add(Batch(x[..., None], np.stack([x, -x], -1), 10 * x, x > 5, x[..., None] + 0.5))
    assert replay.inserted == 12
    for i in range(8):
        x = i + 8 if i + 8 < 12 else i
        row = [part for array in replay.arrays.values() for part in np.ravel(array[i])]
        np.testing.assert_array_equal(row, [x, x, -x, 10 * x, x > 5, x + 0.5])


def test_replay_samples_all_stored_transitions_alike_and_no_others():
    np.random.seed(0)
    replay = DQN["Replay"](1000, 2, gym.spaces.Discrete(20))
    x = np.arange(10.0) + 1
    replay.add(DQN["Batch"](np.stack([x, -x], 1), x, x, x > 5, np.stack([x, 2 * x], 1)))
    obs, action, reward, done, next_obs = replay.sample(10_000, torch.device("cpu"))
    assert obs.shape == next_obs.shape == (10_000, 2) and action.shape == (10_000,)
    assert reward.shape == done.shape == (10_000,) and action.dtype == torch.int64
    assert torch.equal(obs, torch.stack([reward, -reward], 1)) and torch.equal(next_obs[:, 1], 2 * reward)
    assert torch.equal(action.float(), reward) and torch.equal(done, (reward > 5).float())
    counts = np.bincount(reward.int().numpy(), minlength=11)
    assert counts[0] == 0 and (np.abs(counts[1:] - 1000) < 4 * np.sqrt(900)).all()


def test_observations_of_any_shape_are_flattened(train):
    got = stored(train("dqn", "--env-id", "probes:Matrix-v0", *SMALL, "--num-envs", "2"))
    assert got.obs.shape == got.next_obs.shape == (60, 6)
    assert np.array_equal(got.next_obs[0], got.obs[2]) and not np.array_equal(got.next_obs[0], got.obs[1])


# ---------------------------------------------------------------------- the loop
@pytest.mark.parametrize(("num_envs", "train_frequency"), [(1, 10), (3, 10), (3, 2), (5, 1)])
def test_updates_per_environment_step(num_envs, train_frequency, train):
    """A gradient step for every train_frequency environment steps after learning_starts, however many environments."""
    flags = ["--num-envs", num_envs, "--train-frequency", train_frequency, "--total-timesteps", "182"]
    v = train("dqn", "--env-id", DIARY, *SMALL, *flags)
    batch_steps = num_envs * max(1, train_frequency // num_envs)
    assert v["global_step"] == v["replay"].inserted == 182 // batch_steps * batch_steps
    assert updates_of(v) == v["global_step"] // train_frequency - 20 // train_frequency


def test_no_update_until_learning_starts(train):
    assert updates_of(train("dqn", "--env-id", DIARY, *SMALL, "--learning-starts", "60")) == 0
    assert updates_of(train("dqn", "--env-id", DIARY, *SMALL, "--learning-starts", "59")) == 1


def test_the_target_network_moves_exactly_when_due(train):
    """Due at step 50: it is the network of the start before, the Q-network of step 50 from then on."""
    flags = ["--env-id", DIARY, *SMALL, "--target-network-frequency", "50", "--end-e", "1"]
    runs = [train("dqn", *flags, "--total-timesteps", n) for n in (20, 49, 50, 60)]
    first, before, due, after = (weights(v["q_network"]) for v in runs)
    _, target_before, target_due, target_after = (weights(v["target_network"]) for v in runs)
    assert torch.equal(first, target_before) and not torch.equal(before, target_before)
    assert torch.equal(due, target_due) and torch.equal(due, target_after)
    assert not torch.equal(after, due)


def test_the_target_network_moves_by_tau(train):
    flags = ["--env-id", DIARY, *SMALL, "--target-network-frequency", "50", "--total-timesteps", "50"]
    runs = [train("dqn", *flags, "--tau", tau) for tau in (0, 0.25)]
    online, same = (weights(v["q_network"]) for v in runs)
    still, mixed = (weights(v["target_network"]) for v in runs)
    assert torch.equal(online, same) and not torch.equal(online, still)
    torch.testing.assert_close(mixed, 0.75 * still + 0.25 * online, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("num_envs", [1, 4])
def test_epsilon_falls_linearly_over_environment_steps(num_envs, train):
    flags = "--total-timesteps 4000 --train-frequency 20 --start-e 0.9 --end-e 0.1 --exploration-fraction 0.5".split()
    flags += ["--num-envs", num_envs, "--learning-starts", "4000", "--log-every", "200"]
    v = train("dqn", "--env-id", DIARY, *SMALL, *flags)
    got = [row["charts/epsilon"] for row in rows(v["run"].dir, "charts/epsilon")]
    expected = [0.9 - 0.8 * min(1, (step - 20) / 2000) for step in range(200, 4001, 200)]
    np.testing.assert_allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize("name", ["dqn", "ez_greedy_dqn"])
def test_actions_are_random_with_probability_epsilon(name, train):
    """Of four actions one is greedy: with epsilon 0.4 it is taken with probability 0.6 + 0.1, in every environment."""
    flags = "--total-timesteps 4000 --learning-starts 4000 --buffer-size 4000 --num-envs 2 --start-e 0.4".split()
    flags += ["--duration-exponent", "50"] if name == "ez_greedy_dqn" else []  # every random action lasts one step
    v = train(name, "--env-id", DIARY, *SMALL, *flags, "--end-e", "0.4", "--train-frequency", "8")
    got = stored(v)
    is_greedy = got.action == v["q_network"].act(got.obs)
    for share in (is_greedy[::2].mean(), is_greedy[1::2].mean()):
        assert share == pytest.approx(0.7, abs=4 * np.sqrt(0.7 * 0.3 / 2000))
    flags = ["--start-e", "0", "--end-e", "0"]
    v = train(name, "--env-id", DIARY, *SMALL, "--learning-starts", "60", *flags)
    got = stored(v)
    assert (got.action == v["q_network"].act(got.obs)).all()


def test_random_actions_last_as_long_as_the_zeta_distribution_says(train):
    """With epsilon 1 a new random action begins at step t of an episode with probability u(t) = sum over n of p(n)
    u(t - n), u(0) = 1, where p(n) = n**-2 / (pi**2 / 6); three of four of them are other actions than the last.

    No action goes on from one episode to the next, whether it ended or was cut off, in either environment.
    """
    flags = "--total-timesteps 28000 --learning-starts 28000 --buffer-size 28000 --num-envs 2".split()
    flags += "--start-e 1 --end-e 1 --train-frequency 8".split()
    v = train("ez_greedy_dqn", "--env-id", DIARY, *SMALL, *flags)
    got = stored(v)
    p = [0] + [6 / np.pi**2 / n**2 for n in range(1, 4)]
    u = [1.0]
    for t in range(1, 4):
        u.append(sum(p[n] * u[t - n] for n in range(1, t + 1)))
    for who in range(2):
        step, action = got.obs[who::2, 2], got.action[who::2]
        for t in range(4):
            changes = (action[1:] != action[:-1])[step[1:] == t]
            expected = 0.75 * u[t]
            assert changes.mean() == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / len(changes)))
        np.testing.assert_allclose(np.bincount(action) / 14_000, 0.25, atol=0.02)


def test_a_random_action_lasts_for_its_steps():
    """Environment by environment, step by step, as Alg. 1 says; a beginning while another lasts does not count."""
    rng, num_envs = np.random.default_rng(0), 5
    keep_up = definitions("ez_greedy_dqn")["keep_up"]
    held, left = np.zeros((2, num_envs), np.int64)
    expected = [(0, 0)] * num_envs  # action, steps left
    lasted = 0
    for _ in range(500):
        begins, action, duration = rng.random(num_envs) < 0.3, rng.integers(4, size=num_envs), rng.zipf(2.0, num_envs)
        held, left = keep_up(held, left, begins, action, duration)
        for i, (kept, steps) in enumerate(expected):
            if steps == 0 and begins[i]:
                kept, steps = action[i], duration[i]
            lasted += steps > 0 and bool(begins[i]) and kept != action[i]
            expected[i] = (kept, steps)
        assert list(zip(held, left, strict=True)) == expected
        left -= left > 0
        expected = [(kept, max(0, steps - 1)) for kept, steps in expected]
    assert lasted > 100


def test_between_random_actions_the_policy_acts(train):
    """An action that is not the greedy one is random: it, or another random one, lasts as the loop's arrays say."""
    flags = "--total-timesteps 4000 --learning-starts 4000 --buffer-size 4000 --start-e 0.2 --end-e 0.2".split()
    v = train("ez_greedy_dqn", "--env-id", DIARY, *SMALL, *flags, "--train-frequency", "8", "--num-envs", "2")
    batch = stored(v)
    other, step = batch.action != v["q_network"].act(batch.obs), batch.obs[:, 2]
    # random at step t: one began at s <= t and lasts beyond t; it can begin where none lasts
    p = np.array([0] + [6 / np.pi**2 / n**2 for n in range(1, 4)])
    begins = [0.2]
    for t in range(1, 4):
        lasts = sum(begins[s] * (1 - p[: t - s + 1].sum()) for s in range(t))
        begins.append(0.2 * (1 - lasts))
    for t in range(4):  # three of four random actions are not the greedy one
        share = sum(begins[s] * (1 - p[: t - s + 1].sum()) for s in range(t + 1))
        got = other[step == t]
        expected = 0.75 * share
        assert got.mean() == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / len(got)))


def test_durations_need_an_exponent_above_1(train):
    train("ez_greedy_dqn", "--env-id", DIARY, *SMALL, "--duration-exponent", "1", code=2)
    assert "--duration-exponent must be above 1, not 1.0" in train.out and "Traceback" not in train.out


def test_same_seed_same_weights_and_another_seed_others(train):
    flags = ["--env-id", DIARY, *SMALL, "--num-envs", "2"]
    a, b, c = (train("dqn", *flags, "--seed", seed) for seed in (5, 5, 6))
    for what in ("q_network", "target_network"):
        assert torch.equal(weights(a[what]), weights(b[what])) and not torch.equal(weights(a[what]), weights(c[what]))
    for x, y in zip(stored(a), stored(b), strict=True):
        assert np.array_equal(x, y)
    assert not np.array_equal(stored(a).action, stored(c).action)


@pytest.mark.parametrize("name", ["dqn", "ez_greedy_dqn"])
def test_resumed_with_its_replay_equals_uninterrupted(name, train):
    """The last checkpoint thrown away, the run goes on from the one before, in the middle of a row of metrics."""
    flags = "--total-timesteps 2500 --learning-starts 500 --train-frequency 10 --num-envs 2 --buffer-size 1000".split()
    flags = ["--env-id", "CartPole-v1", *SMALL, *flags, "--save-every", "1700", "--save-replay", "--end-e", "0.9"]
    whole = train(name, *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train(name, "--resume", run_dir)
    assert v["start"] == 170 and comparable(run_dir) == expected
    for what in ("q_network", "target_network"):
        assert torch.equal(weights(v[what]), weights(whole[what]))
    for x, y in zip(stored(v), stored(whole), strict=True):
        assert np.array_equal(x, y)
    if name == "ez_greedy_dqn":
        for name in ("held", "left"):
            assert np.array_equal(getattr(v["now"], name), getattr(whole["now"], name)) and whole["now"].left.any()
    (state,), (same) = v["optimizer"].state.values(), next(iter(whole["optimizer"].state.values()))
    assert all(torch.equal(state[key], same[key]) for key in same)


def test_fast_changes_results_only_by_rounding(train):
    """Without it the networks act and learn in plain PyTorch; its Adam steps each parameter, not one vector."""
    flags = ["--env-id", DIARY, *SMALL, "--target-network-frequency", "10", "--end-e", "0"]
    fast, plain = (train("dqn", *flags, *more) for more in ([], ["--no-fast"]))
    assert len(fast["optimizer"].state) == 1 and len(plain["optimizer"].state) == 6
    assert fast["q_values"].in_numpy and not plain["q_values"].in_numpy
    assert np.array_equal(stored(fast).action, stored(plain).action)
    torch.testing.assert_close(weights(fast["q_network"]), weights(plain["q_network"]), rtol=1e-5, atol=1e-6)


def test_logged_losses_are_means_since_the_last_row(train):
    """The means over the gradient steps of steps 1001 to 2000, from those of a run that ends one iteration before: the
    last iteration is logged, whatever its step."""
    flags = ["--env-id", DIARY, *SMALL, "--learning-starts", "900", "--train-frequency", "10", "--log-every", "1000"]
    flags += ["--exploration-fraction", "0", "--target-network-frequency", "5000"]
    end = train("dqn", *flags, "--total-timesteps", "2000")
    before = train("dqn", *flags, "--total-timesteps", "1990")
    early, row = (rows(v["run"].dir, "losses/td_loss")[-1] for v in (before, end))
    assert (early["global_step"], row["global_step"]) == (1990, 2000)
    assert set(end["metrics"]) == {"losses/td_loss", "losses/q_values"}
    for name, last in end["metrics"].items():
        assert row[name] == pytest.approx((99 * early[name] + last.item()) / 100, rel=1e-5)


def test_what_diverges_after_the_last_row_is_seen(train):
    flags = "--total-timesteps 90 --learning-rate 1e30 --log-every 100".split()
    train("dqn", "--env-id", DIARY, *SMALL, *flags, code=3)
    assert "losses/" in train.out and "Traceback" not in train.out


def test_a_target_network_that_should_move_within_an_iteration_is_refused(train):
    train("dqn", "--env-id", DIARY, *SMALL, *"--train-frequency 10 --target-network-frequency 9".split(), code=2)
    assert "--target-network-frequency must be at least 10, the steps of one iteration" in train.out


def test_other_spaces_are_refused_with_the_file_to_use(train):
    train("dqn", "--env-id", "Pendulum-v1", *SMALL, code=2)
    assert "use ddpg_continuous_action.py" in train.out
    train("dqn", "--env-id", "probes:Pixels-v0", *SMALL, code=2)
    assert "image observations" in train.out and "Traceback" not in train.out


# ---------------------------------------------------------------------- pure functions
@pytest.mark.parametrize("name", ["dqn", "double_dqn", "dueling_dqn", "d3qn"])
def test_loss_by_hand(name):
    """The target sample by sample from Q-values computed layer by layer; no gradient reaches the target network."""
    double = name in ("double_dqn", "d3qn")
    loss_of = definitions(name)["double_td_loss" if double else "td_loss"]
    net, target_net, batch = network(name, seed=0), network(name, seed=2), random_batch()
    loss, metrics = loss_of(net, target_net, batch, 0.9)
    q, next_q, judged = values(net, batch.obs), values(net, batch.next_obs), values(target_net, batch.next_obs)
    errors, taken = [], []
    for i in range(32):
        best = next_q[i].argmax() if double else judged[i].argmax()
        target = batch.reward[i].item() + (0 if batch.done[i] else 0.9 * judged[i, best])
        taken.append(q[i, batch.action[i]])
        errors.append((taken[-1] - target) ** 2)
    assert (next_q.argmax(1) != judged.argmax(1)).any()  # the two targets are not the same
    assert metrics["losses/td_loss"].item() == loss.item() == pytest.approx(np.mean(errors), rel=1e-4)
    assert metrics["losses/q_values"].item() == pytest.approx(np.mean(taken), rel=1e-4)
    loss.backward()
    assert all(p.grad is None for p in target_net.parameters()) and all(p.grad is not None for p in net.parameters())


def test_dueling_streams_have_the_mean_advantage_zero():
    """Eq. 9: the mean of the values over actions is the value stream's output."""
    net, obs = network("dueling_dqn"), torch.randn(10, 3)
    value = net.value(net.torso(obs).relu())
    torch.testing.assert_close(net(obs).mean(1, keepdim=True), value)
    assert net(obs).std(1).min() > 0.01


def test_d3qn_is_dueling_and_double():
    """What Double DQN and dueling DQN change in DQN, merged, is D3QN, except its header."""
    files = [str(script(name)) for name in ("dueling_dqn", "dqn", "double_dqn")]
    merged = subprocess.run(["git", "merge-file", "-p", *files], capture_output=True, text=True)
    code, expected = (text[text.index("\nimport copy\n") :] for text in (merged.stdout, script("d3qn").read_text()))
    assert code == expected


# ---------------------------------------------------------------------- they learn
PROBE = "--total-timesteps 1500 --learning-starts 100 --train-frequency 2 --batch-size 32 --buffer-size 2000".split()
PROBE += "--learning-rate 0.003 --target-network-frequency 20 --start-e 1 --end-e 1".split()
PROBE += "--eval-every 0 --eval-episodes 10".split()


def learn(train, name, probe, *flags):
    atoms = ["--v-min", "-2", "--v-max", "2"] if name == "c51" else []
    return train(name, "--env-id", f"probes:{probe}-v0", *PROBE, *atoms, *flags)


def value_at(v, obs):
    """The value of the best action."""
    return v["q_network"](torch.tensor([[float(obs)]])).max().item()


def learns_to_discount(v):
    assert value_at(v, 0) == pytest.approx(0.5, abs=0.07) and value_at(v, 1) == pytest.approx(1, abs=0.07)


def learns_a_policy_of_the_observation(v):
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] == 1.0
    assert v["q_network"].act(np.array([[1.0], [-1.0]])).tolist() == [1, 0]


def learns_that_a_time_limit_is_not_the_end(v):
    """The value is 1 / (1 - gamma) = 5, where a limit taken for an end would give 3.3."""
    assert value_at(v, 0) == pytest.approx(5, abs=0.3)


DISCOUNT = ("Delayed", ["--gamma", "0.5"], learns_to_discount)
POLICY = ("ActionMustMatch", ["--num-envs", "2"], learns_a_policy_of_the_observation)
FOREVER = ("Forever", ["--gamma", "0.8", "--total-timesteps", "3000"], learns_that_a_time_limit_is_not_the_end)
PROBES = {"dqn": POLICY, "dueling_dqn": POLICY, "ez_greedy_dqn": POLICY}  # another network, other exploration
PROBES |= {"c51": DISCOUNT, "double_dqn": DISCOUNT, "d3qn": DISCOUNT}  # other targets
TRAINED = {}  # name -> the variables of the training on its probe, for all tests of what every file has


def trained(name, train):
    """One training of a file on its probe."""
    if name not in TRAINED:
        probe, flags, _ = PROBES[name]
        TRAINED[name] = learn(train, name, probe, *flags)
    return TRAINED[name]


@pytest.mark.parametrize("name", SCRIPTS)
def test_learns_its_probe(name, train):
    PROBES[name][2](trained(name, train))


@pytest.mark.parametrize("name", SCRIPTS)
def test_acts_in_numpy_as_in_torch(name, train):
    """With the weights of the moment."""
    v = trained(name, train)
    obs = np.random.default_rng(0).normal(size=(100, 1)).astype(np.float32)
    q_network, q_values = copy.deepcopy(v["q_network"]), v["q_values"]
    assert q_values.in_numpy and q_values.module is v["q_network"]
    for _ in range(2):
        expected = v["q_network"](torch.from_numpy(obs)).detach().numpy()
        assert expected.shape == (100, 2) and expected.std() > 0.01
        np.testing.assert_allclose(q_values(obs), expected, rtol=1e-6, atol=1e-6)
        for p in v["q_network"].parameters():
            p.data.mul_(0.5)
    v["q_network"].load_state_dict(q_network.state_dict())


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_evaluated_policy_is_greedy(name):
    """The actions of the largest values, for observations of any shape and type."""
    atoms = (torch.linspace(-2, 2, 11),) if name == "c51" else ()
    torch.manual_seed(0)
    net = definitions(name)["QNetwork"](6, 4, *atoms)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3)
    obs = np.random.default_rng(0).normal(size=(500, 2, 3))
    q = net(torch.as_tensor(obs, dtype=torch.float32).flatten(1)).detach().numpy()
    action = net.act(obs)
    assert isinstance(action, np.ndarray) and action.shape == (500,) and len(set(action)) > 1
    np.testing.assert_allclose(q[np.arange(500), action], q.max(1), atol=1e-5)


@pytest.mark.parametrize("name", SCRIPTS)
def test_logged_keys_are_those_of_the_page(name, train):
    logged = {key for row in rows(trained(name, train)["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert logged == documented_keys(name)
    assert {"losses/td_loss", "losses/q_values", "charts/epsilon"} <= logged


def test_dqn_learns_a_constant_value(train):
    assert value_at(learn(train, "dqn", "OneStep"), 0) == pytest.approx(1, abs=0.05)


def test_dqn_learns_a_value_from_the_observation(train):
    v = learn(train, "dqn", "SeesReward")
    assert value_at(v, 1) == pytest.approx(1, abs=0.1) and value_at(v, -1) == pytest.approx(-1, abs=0.1)


@pytest.mark.parametrize(("probe", "flags", "learns"), [DISCOUNT, FOREVER])
def test_dqn_learns_what_is_to_come(probe, flags, learns, train):
    learns(learn(train, "dqn", probe, *flags))
