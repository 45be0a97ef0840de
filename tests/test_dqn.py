"""The DQN family: its replay and loop against the simulator, its targets by hand, and that it learns; C51's own
formulas are in test_c51.py."""

import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT, comparable, definitions, rows

SCRIPTS = ["dqn", "c51", "double_dqn", "dueling_dqn", "d3qn", "ez_greedy_dqn"]
DQN = definitions("dqn")
DIARY = "probes_offpolicy:DiscreteDiary-v0"
SMALL = "--total-timesteps 60 --learning-starts 20 --train-frequency 1 --batch-size 8 --buffer-size 64".split()
SMALL += "--eval-every 0 --eval-episodes 1".split()


def updates_of(v):
    """Steps the optimiser has made."""
    return int(v["optimizer"].state.get(v["parameters"], {"step": 0})["step"])


def network(name, obs_dim=3, num_actions=4, seed=0):
    """A Q-network with weights large enough that actions differ."""
    torch.manual_seed(seed)
    net = definitions(name)["QNetwork"](obs_dim, num_actions)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return net


def random_batch(n=32, obs_dim=3, num_actions=4):
    """obs, action, reward, done, next_obs as `Replay.sample` gives them."""
    torch.manual_seed(1)
    obs, next_obs = torch.randn(n, obs_dim), torch.randn(n, obs_dim)
    return obs, torch.randint(num_actions, (n, 1)), torch.randn(n), (torch.rand(n) < 0.5).float(), next_obs


def reference(layers, x):
    """A multi-layer perceptron with ReLU in NumPy and double precision."""
    for i, layer in enumerate(layers):
        x = x @ layer.weight.detach().double().numpy().T + layer.bias.detach().double().numpy()
        x = np.maximum(x, 0) if i < len(layers) - 1 else x
    return x


def values(net, obs):
    """All Q-values of a network, its layers taken one by one."""
    x = obs.double().numpy()
    if not hasattr(net, "torso"):
        return reference(net.layers, x)
    x = np.maximum(reference(net.torso, x), 0)
    value, advantage = reference(net.value, x), reference(net.advantage, x)
    return np.array([[v + a - sum(row) / len(row) for a in row] for v, row in zip(value[:, 0], advantage, strict=True)])


# ---------------------------------------------------------------------- replay
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_replay_holds_what_the_simulator_did(name, num_envs, train):
    """The observation names the environment, the episode and the step: every row is one step of one episode of one
    environment; its next_obs is where that step led, also at an end; done only where the task was over."""
    flags = ["--num-envs", num_envs, "--buffer-size", "128", "--train-frequency", "6"]
    v = train(name, "--env-id", DIARY, *SMALL, *flags)
    replay = v["replay"]
    assert v["num_steps"] == 6 // num_envs and replay.inserted == replay.size == 60
    got, steps = replay.arrays["rows"][:60], 60 // num_envs
    for who in range(num_envs):
        episode, step = 0, 0
        for k in range(steps):
            last = (3, 4)[episode % 2]
            done = step + 1 == last and episode % 2 == 0
            row = [who, episode, step, 100 * episode + step + 1, done, who, episode, step + 1]
            np.testing.assert_array_equal(np.delete(got[num_envs * k + who], 3), row)
            episode, step = (episode + 1, 0) if step + 1 == last else (episode, step + 1)
    assert set(got[:, 3]) <= {0, 1, 2, 3} and len(set(got[:, 3])) > 1


def test_replay_overwrites_the_oldest_rows():
    replay = DQN["Replay"](8, 1, 1)
    for k in range(0, 12, 3):  # 12 transitions, 3 at a time
        x = np.arange(k, k + 3, dtype=float)
        replay.add(x[:, None], -x, 10 * x, x > 5, x + 0.5)
    assert replay.inserted == 12 and replay.size == 8
    for i in range(8):
        x = i + 8 if i + 8 < 12 else i
        np.testing.assert_array_equal(replay.arrays["rows"][i], [x, -x, 10 * x, x > 5, x + 0.5])


def test_replay_samples_all_stored_rows_alike_and_no_others():
    np.random.seed(0)
    replay = DQN["Replay"](1000, 2, 1)
    x = np.arange(10.0) + 1
    replay.add(np.stack([x, -x], 1), x, x, x > 5, np.stack([x, 2 * x], 1))
    obs, action, reward, done, next_obs = replay.sample(10_000, torch.device("cpu"))
    assert obs.shape == next_obs.shape == (10_000, 2) and action.shape == (10_000, 1)
    assert reward.shape == done.shape == (10_000,) and action.dtype == torch.int64
    assert torch.equal(obs, torch.stack([reward, -reward], 1)) and torch.equal(next_obs[:, 1], 2 * reward)
    assert torch.equal(action[:, 0].float(), reward) and torch.equal(done, (reward > 5).float())
    counts = np.bincount(reward.int().numpy(), minlength=11)
    assert counts[0] == 0 and (np.abs(counts[1:] - 1000) < 4 * np.sqrt(900)).all()


def test_observations_of_any_shape_are_flattened(train):
    v = train("dqn", "--env-id", "probes:Matrix-v0", *SMALL, "--num-envs", "2")
    stored = v["replay"].arrays["rows"]
    assert stored.shape == (64, 6 + 1 + 2 + 6)
    assert np.array_equal(stored[0, 9:], stored[2, :6]) and not np.array_equal(stored[0, 9:], stored[1, :6])


# ---------------------------------------------------------------------- the loop
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(("num_envs", "train_frequency"), [(1, 1), (1, 10), (3, 10), (3, 2), (4, 4), (5, 1)])
def test_updates_per_environment_step(name, num_envs, train_frequency, train):
    """One update for every train_frequency environment steps after learning_starts, however many environments."""
    flags = ["--num-envs", num_envs, "--train-frequency", train_frequency, "--total-timesteps", "182"]
    v = train(name, "--env-id", DIARY, *SMALL, *flags)
    batch_steps = num_envs * max(1, train_frequency // num_envs)
    assert v["global_step"] == v["replay"].inserted == 182 // batch_steps * batch_steps
    assert updates_of(v) == v["global_step"] // train_frequency - 20 // train_frequency


def test_no_update_until_learning_starts(train):
    assert updates_of(train("dqn", "--env-id", DIARY, *SMALL, "--learning-starts", "60")) == 0
    assert updates_of(train("dqn", "--env-id", DIARY, *SMALL, "--learning-starts", "59")) == 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_target_network_moves_exactly_when_due(name, train):
    """Due at step 50: it is the network of the start before, the Q-network of step 50 from then on."""
    flags = ["--env-id", DIARY, *SMALL, "--target-network-frequency", "50", "--end-e", "1"]
    first, before, due, after = (train(name, *flags, "--total-timesteps", n) for n in (20, 49, 50, 60))
    assert torch.equal(first["parameters"], before["target_parameters"])
    assert not torch.equal(before["parameters"], before["target_parameters"])
    assert torch.equal(due["target_parameters"], due["parameters"])
    assert torch.equal(after["target_parameters"], due["parameters"])
    assert not torch.equal(after["parameters"], due["parameters"])
    weights = torch.cat([p.flatten() for p in after["target_network"].parameters()])
    assert torch.equal(weights, after["target_parameters"])  # the module's weights are the vector's


def test_the_target_network_moves_by_tau(train):
    flags = ["--env-id", DIARY, *SMALL, "--target-network-frequency", "50", "--total-timesteps", "50"]
    still, mixed = (train("dqn", *flags, "--tau", tau) for tau in (0, 0.25))
    assert torch.equal(still["parameters"], mixed["parameters"])
    assert not torch.equal(still["parameters"], still["target_parameters"])
    expected = 0.75 * still["target_parameters"] + 0.25 * still["parameters"]
    torch.testing.assert_close(mixed["target_parameters"], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("num_envs", [1, 4])
def test_epsilon_falls_linearly_over_environment_steps(num_envs, train):
    flags = "--total-timesteps 20000 --train-frequency 20 --start-e 0.9 --end-e 0.1 --exploration-fraction 0.5".split()
    flags += ["--num-envs", num_envs, "--learning-starts", "20000"]
    v = train("dqn", "--env-id", DIARY, *SMALL, *flags)
    got = [row["charts/epsilon"] for row in rows(v["run"].dir, "charts/epsilon")]
    expected = [0.9 - 0.8 * min(1, (step - 20) / 10_000) for step in range(1000, 20_001, 1000)]
    np.testing.assert_allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize("name", SCRIPTS)
def test_actions_are_random_with_probability_epsilon(name, train):
    """Of four actions one is greedy: with epsilon 0.4 it is taken with probability 0.6 + 0.1, in every environment."""
    flags = "--total-timesteps 4000 --learning-starts 4000 --buffer-size 4000 --num-envs 2 --start-e 0.4".split()
    flags += ["--duration-exponent", "50"] if name == "ez_greedy_dqn" else []  # every random action lasts one step
    v = train(name, "--env-id", DIARY, *SMALL, *flags, "--end-e", "0.4", "--train-frequency", "8")
    stored = v["replay"].arrays["rows"]
    is_greedy = stored[:, 3] == v["q_network"].act(stored[:, :3])
    for share in (is_greedy[::2].mean(), is_greedy[1::2].mean()):
        assert share == pytest.approx(0.7, abs=4 * np.sqrt(0.7 * 0.3 / 2000))
    flags = ["--start-e", "0", "--end-e", "0"]
    v = train(name, "--env-id", DIARY, *SMALL, "--learning-starts", "60", *flags)
    stored = v["replay"].arrays["rows"][:60]
    assert (stored[:, 3] == v["q_network"].act(stored[:, :3])).all()


def test_random_actions_last_as_long_as_the_zeta_distribution_says(train):
    """With epsilon 1 a new random action begins at step t of an episode with probability u(t) = sum over n of p(n)
    u(t - n), u(0) = 1, where p(n) = n**-2 / (pi**2 / 6); three of four of them are other actions than the last.

    No action is kept up from one episode to the next, whether it ended or was cut off, in either environment.
    """
    flags = "--total-timesteps 28000 --learning-starts 28000 --buffer-size 28000 --num-envs 2".split()
    flags += "--start-e 1 --end-e 1 --train-frequency 8".split()
    v = train("ez_greedy_dqn", "--env-id", DIARY, *SMALL, *flags)
    stored = v["replay"].arrays["rows"]
    p = [0] + [6 / np.pi**2 / n**2 for n in range(1, 4)]
    u = [1.0]
    for t in range(1, 4):
        u.append(sum(p[n] * u[t - n] for n in range(1, t + 1)))
    for who in range(2):
        step, action = stored[who::2, 2].astype(int), stored[who::2, 3]
        for t in range(4):
            changes = (action[1:] != action[:-1])[step[1:] == t]
            expected = 0.75 * u[t]
            assert changes.mean() == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / len(changes)))
        np.testing.assert_allclose(np.bincount(action.astype(int)) / 14_000, 0.25, atol=0.02)


def test_a_random_action_is_kept_up_for_its_steps():
    """Environment by environment, step by step, as Alg. 1 says; a beginning while another lasts does not count."""
    rng, num_envs = np.random.default_rng(0), 5
    keep_up = definitions("ez_greedy_dqn")["keep_up"]
    held, left = np.zeros((2, num_envs), np.int64)
    expected = [(0, 0)] * num_envs  # action, steps left
    lasted = 0
    for _ in range(500):
        begins, action, duration = rng.random(num_envs) < 0.3, rng.integers(4, size=num_envs), rng.zipf(2.0, num_envs)
        keep_up(held, left, begins, action, duration)
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
    stored = v["replay"].arrays["rows"]
    other, step = stored[:, 3] != v["q_network"].act(stored[:, :3]), stored[:, 2]
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


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_evaluated_policy_is_greedy(name):
    """NumPy acting agrees with the network that learns, on observations of any shape and type."""
    atoms = (torch.linspace(-2, 2, 11),) if name == "c51" else ()
    torch.manual_seed(0)
    net = definitions(name)["QNetwork"](6, 4, *atoms)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3)
    obs = np.random.default_rng(0).normal(size=(500, 2, 3))
    x = torch.as_tensor(obs, dtype=torch.float32).flatten(1)
    q = (net.logits(x).softmax(2) @ net.atoms if name == "c51" else net.q(x)).detach().numpy()
    action = net.act(obs)
    assert isinstance(action, np.ndarray) and action.shape == (500,) and len(set(action)) > 1
    np.testing.assert_allclose(q[np.arange(500), action], q.max(1), atol=1e-5)


def test_the_policy_follows_the_weights():
    """A policy made after an update acts by the new weights, the module's views of the vector."""
    net = network("dqn")
    vector = DQN["flatten_parameters"](net)
    obs = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
    before = net.numpy_policy()(obs)
    with torch.no_grad():
        vector.neg_()
    after = net.numpy_policy()(obs)
    np.testing.assert_array_equal(after, values(net, torch.as_tensor(obs)).argmax(1))
    assert (before != after).any()


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_seed_same_weights_and_another_seed_others(name, train):
    flags = ["--env-id", DIARY, *SMALL, "--num-envs", "2"]
    a, b, c = (train(name, *flags, "--seed", seed) for seed in (5, 5, 6))
    for what in ("parameters", "target_parameters"):
        assert torch.equal(a[what], b[what]) and not torch.equal(a[what], c[what])
    assert np.array_equal(a["replay"].arrays["rows"], b["replay"].arrays["rows"])
    assert not np.array_equal(a["replay"].arrays["rows"][:, 3], c["replay"].arrays["rows"][:, 3])


@pytest.mark.parametrize("name", SCRIPTS)
def test_resumed_with_its_replay_equals_uninterrupted(name, train):
    """The last checkpoint thrown away, the run goes on from the one before, in the middle of a row of metrics."""
    flags = "--total-timesteps 3000 --learning-starts 500 --train-frequency 10 --num-envs 2 --buffer-size 1000".split()
    flags = ["--env-id", "CartPole-v1", *SMALL, *flags, "--save-every", "1700", "--save-replay", "--end-e", "0.9"]
    whole = train(name, *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    shutil.rmtree(sorted((run_dir / "checkpoint").iterdir())[-1])
    v = train(name, "--resume", run_dir)
    assert v["start"] == 170 and comparable(run_dir) == expected
    for what in ("parameters", "target_parameters", "totals", *(["exploring"] if name == "ez_greedy_dqn" else [])):
        assert torch.equal(v[what], whole[what])
    assert np.array_equal(v["replay"].arrays["rows"], whole["replay"].arrays["rows"])
    states = (x["optimizer"].state[x["parameters"]] for x in (v, whole))
    assert all(torch.equal(x, y) for x, y in zip(*(state.values() for state in states), strict=True))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_logged_key_is_on_the_page(name, train):
    v = train(name, "--env-id", DIARY, *SMALL, *"--total-timesteps 1000 --learning-starts 900".split())
    logged = {key for row in rows(v["run"].dir) for key in row} - {"global_step", "wall_time"}
    page = (ROOT / "algorithms" / "dqn" / "README.md").read_text()
    assert [key for key in sorted(logged) if f"`{key}`" not in page] == []
    assert {"losses/td_loss", "losses/q_values", "charts/epsilon"} <= logged


def test_logged_losses_are_means_since_the_last_row(train, monkeypatch):
    """The means over the updates of steps 1001 to 2000, from those of a run that ends one iteration before: the last
    iteration is logged, whatever its step."""
    flags = ["--env-id", DIARY, *SMALL, "--learning-starts", "900", "--train-frequency", "10"]
    flags += ["--exploration-fraction", "0", "--target-network-frequency", "5000"]
    end = train("dqn", *flags, "--total-timesteps", "2000")
    before = train("dqn", *flags, "--total-timesteps", "1990")
    assert (before["totals"] == 0).all() and (end["totals"] == 0).all() and end["metrics"][2] == 1
    early, row = (rows(v["run"].dir, "losses/td_loss")[-1] for v in (before, end))
    assert (early["global_step"], row["global_step"]) == (1990, 2000)
    for name, last in zip(("td_loss", "q_values"), end["metrics"].tolist(), strict=False):
        assert row[f"losses/{name}"] == pytest.approx((99 * early[f"losses/{name}"] + last) / 100, rel=1e-5)


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_diverges_behind_the_last_row_is_seen(name, train):
    train(name, "--env-id", DIARY, *SMALL, "--total-timesteps", "990", "--learning-rate", "1e30", code=3)
    assert "losses/" in train.out and "Traceback" not in train.out


def test_a_target_network_that_should_move_within_an_iteration_is_refused(train):
    for name in SCRIPTS:
        train(name, "--env-id", DIARY, *SMALL, *"--train-frequency 10 --target-network-frequency 9".split(), code=2)
        assert "--target-network-frequency must be at least 10, the steps of one iteration" in train.out


def test_other_spaces_are_refused_with_the_file_to_use(train):
    for name in SCRIPTS:
        train(name, "--env-id", "Pendulum-v1", *SMALL, code=2)
        assert "use ddpg_continuous_action.py" in train.out
        train(name, "--env-id", "probes:Pixels-v0", *SMALL, code=2)
        assert "image observations" in train.out and "Traceback" not in train.out


# ---------------------------------------------------------------------- pure functions
@pytest.mark.parametrize("name", ["dqn", "double_dqn", "dueling_dqn", "d3qn", "ez_greedy_dqn"])
def test_loss_by_hand(name):
    """The target sample by sample from Q-values computed layer by layer; no gradient reaches the target network."""
    loss_of = definitions(name)["double_td_loss" if name in ("double_dqn", "d3qn") else "td_loss"]
    net, target_net, batch = network(name, seed=0), network(name, seed=2), random_batch()
    obs, action, reward, done, next_obs = batch
    loss, metrics = loss_of(net, target_net, *batch, 0.9)
    q, next_q, judged = values(net, obs), values(net, next_obs), values(target_net, next_obs)
    errors, taken = [], []
    for i in range(32):
        best = next_q[i].argmax() if name in ("double_dqn", "d3qn") else judged[i].argmax()
        target = reward[i].item() + (0 if done[i] else 0.9 * judged[i, best])
        taken.append(q[i, action[i, 0]])
        errors.append((taken[-1] - target) ** 2)
    assert (next_q.argmax(1) != judged.argmax(1)).any()  # the two targets are not the same
    np.testing.assert_allclose(metrics.numpy(), [np.mean(errors), np.mean(taken), 1], rtol=1e-4)
    assert loss.item() == pytest.approx(np.mean(errors), rel=1e-4)
    loss.backward()
    assert all(p.grad is None for p in target_net.parameters()) and all(p.grad is not None for p in net.parameters())


def test_dueling_streams_have_the_mean_advantage_zero():
    """Eq. 9: the mean of the values over actions is the value stream's output."""
    net, obs = network("dueling_dqn"), torch.randn(10, 3)
    value = DQN["mlp"](net.value, DQN["mlp"](net.torso, obs).relu())
    torch.testing.assert_close(net.q(obs).mean(1, keepdim=True), value)
    assert net.q(obs).std(1).min() > 0.01


def test_one_vector_steps_as_torch_does():
    """The flat vector gives the weights that Adam on the separate parameters gives."""
    a, b, target = network("dqn"), network("dqn"), network("dqn", seed=2)
    vector = DQN["flatten_parameters"](b)
    adam_a, adam_b = torch.optim.Adam(a.parameters(), lr=0.01), torch.optim.Adam([vector], lr=0.01, fused=True)
    for _ in range(5):
        adam_a.zero_grad()
        loss, expected = DQN["td_loss"](a, target, *random_batch(), 0.9)
        loss.backward()
        vector.grad, metrics = DQN["gradient"](DQN["td_loss"], b, target, *random_batch(), 0.9)
        torch.testing.assert_close(metrics, expected)
        adam_a.step(), adam_b.step()
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- they learn
PROBE = "--total-timesteps 1500 --learning-starts 100 --train-frequency 2 --batch-size 32 --buffer-size 2000".split()
PROBE += "--learning-rate 0.003 --target-network-frequency 20 --start-e 1 --end-e 1".split()
PROBE += "--eval-every 0 --eval-episodes 10".split()


def learn(train, name, probe, *flags):
    atoms = ["--v-min", "-2", "--v-max", "2"] if name == "c51" else []
    return train(name, "--env-id", f"probes:{probe}-v0", *PROBE, *atoms, *flags)


def value_at(v, obs):
    """The value of the best action."""
    net, obs = v["q_network"], torch.tensor([[float(obs)]])
    return (net.logits(obs).softmax(2) @ net.atoms if hasattr(net, "atoms") else net.q(obs)).max().item()


@pytest.mark.parametrize("name", SCRIPTS)
def test_learns_a_constant_value(name, train):
    assert value_at(learn(train, name, "OneStep"), 0) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("name", SCRIPTS)
def test_learns_a_value_from_the_observation(name, train):
    v = learn(train, name, "SeesReward")
    assert value_at(v, 1) == pytest.approx(1, abs=0.1) and value_at(v, -1) == pytest.approx(-1, abs=0.1)


@pytest.mark.parametrize("name", SCRIPTS)
def test_learns_to_discount(name, train):
    v = learn(train, name, "Delayed", "--gamma", "0.5")
    assert value_at(v, 0) == pytest.approx(0.5, abs=0.07) and value_at(v, 1) == pytest.approx(1, abs=0.07)


@pytest.mark.parametrize("name", SCRIPTS)
def test_learns_a_policy_of_the_observation(name, train):
    v = learn(train, name, "ActionMustMatch", "--num-envs", "2")
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] == 1.0
    assert v["q_network"].act(np.array([[1.0], [-1.0]])).tolist() == [1, 0]


@pytest.mark.parametrize("name", SCRIPTS)
def test_value_of_a_constant_reward_under_a_time_limit(name, train):
    """The time limit is no end of the task: 1 / (1 - gamma) = 5, where a limit taken for an end would give 3.3."""
    flags = ["--gamma", "0.8", "--total-timesteps", "3000"]
    flags += ["--v-min", "0", "--v-max", "10"] if name == "c51" else []
    assert value_at(learn(train, name, "Forever", *flags), 0) == pytest.approx(5, abs=0.3)
