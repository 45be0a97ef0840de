"""The actor-critic family: its replay and loops against the simulator, DDPG's and TD3's formulas by hand, learning."""

import copy
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, definitions, rows, script
from probes_offpolicy import HIGH, LOW
from test_resume import assert_same_run, finish, start, wait_for_steps

CONTINUOUS = ["ddpg_continuous_action", "td3_continuous_action", "sac_continuous_action"]
SCRIPTS = [*CONTINUOUS, "sac_discrete"]
DDPG, TD3 = definitions("ddpg_continuous_action"), definitions("td3_continuous_action")
SMALL = "--total-timesteps 60 --learning-starts 20 --batch-size 8 --buffer-size 64".split()
SMALL += "--eval-every 0 --eval-episodes 1".split()
HALF_RANGE = (HIGH - LOW) / 2


def diary(name):
    return "probes_offpolicy:DiscreteDiary-v0" if name == "sac_discrete" else "probes_offpolicy:Diary-v0"


def steps_of(optimizer):
    """Steps an optimiser has made on its first parameter."""
    state = optimizer.state.get(optimizer.param_groups[0]["params"][0], {"step": 0})
    return int(state["step"])


def random_batch(n=16, obs_dim=3, action_dim=2):
    """obs, action, reward, done, next_obs in double precision."""
    generator = torch.Generator().manual_seed(0)
    low, high = torch.as_tensor(LOW).double(), torch.as_tensor(HIGH).double()
    obs, next_obs = (torch.randn(n, obs_dim, generator=generator, dtype=torch.float64) for _ in range(2))
    action = low + (high - low) * torch.rand(n, action_dim, generator=generator, dtype=torch.float64)
    reward = torch.randn(n, generator=generator, dtype=torch.float64)
    done = (torch.rand(n, generator=generator) < 0.5).double()
    return obs, action, reward, done, next_obs


def spread(critic, obs, action):
    """Let the values of both critics differ from state to state around the same mean: each is the smaller somewhere."""
    with torch.no_grad():
        weight, bias = critic.layers()[-1]
        weight.normal_()
        bias -= critic(obs, action).mean(1)[:, None, None]
    return critic


def value_of(critic, i, obs, action):
    """Critic i of a pair, layer by layer in NumPy."""
    x = np.concatenate([obs.numpy(), action.detach().numpy()], axis=1)
    for n, (weight, bias) in enumerate(critic.layers()):
        x = x @ weight.detach().numpy()[i] + bias.detach().numpy()[i]
        x = np.maximum(x, 0) if n < 2 else x
    return x[:, 0]


# ---------------------------------------------------------------------- replay
@pytest.mark.parametrize("name", SCRIPTS)
def test_replay_holds_what_the_simulator_did(name, train):
    """Three environments whose observations name the environment, the episode and the step: every row is one step of
    one episode of one environment; its next_obs is where that step led, also at an end; done only where it was over."""
    v = train(name, "--env-id", diary(name), *SMALL, "--num-envs", "3", "--buffer-size", "128")
    replay = v["replay"]
    assert replay.inserted == replay.size == 60
    got = replay.arrays["rows"][:60]
    width = 1 if name == "sac_discrete" else 2
    expected = []
    for who in range(3):
        episode, step = 0, 0
        for k in range(20):
            last = (3, 4)[episode % 2]
            done = step + 1 == last and episode % 2 == 0
            row = [who, episode, step, 100 * episode + step + 1, done, who, episode, step + 1]
            expected.append((3 * k + who, row))
            episode, step = (episode + 1, 0) if step + 1 == last else (episode, step + 1)
    for k, row in expected:
        np.testing.assert_array_equal(np.delete(got[k], range(3, 3 + width)), row)
    action = got[:, 3 : 3 + width]
    if name == "sac_discrete":
        assert set(action[:, 0]) <= {0, 1, 2, 3} and len(set(action[:, 0])) > 1
    else:
        assert (action >= LOW).all() and (action <= HIGH).all() and len(np.unique(action[:, 0])) == 60


def test_replay_overwrites_the_oldest_rows():
    replay = DDPG["Replay"](8, 1, 2)
    for k in range(0, 12, 3):  # 12 transitions, 3 at a time
        x = np.arange(k, k + 3, dtype=float)
        replay.add(x[:, None], np.stack([x, -x], 1), 10 * x, x > 5, x[:, None] + 0.5)
    assert replay.inserted == 12 and replay.size == 8
    for i in range(8):
        x = i + 8 if i + 8 < 12 else i
        np.testing.assert_array_equal(replay.arrays["rows"][i], [x, x, -x, 10 * x, x > 5, x + 0.5])


def test_replay_samples_all_stored_rows_alike_and_no_others():
    np.random.seed(0)
    replay = DDPG["Replay"](1000, 1, 1)
    x = np.arange(10.0) + 1
    replay.add(x[:, None], x[:, None], x, x > 5, x[:, None])
    obs, action, reward, done, next_obs = replay.sample(10_000, torch.device("cpu"))
    assert obs.shape == action.shape == next_obs.shape == (10_000, 1) and reward.shape == done.shape == (10_000,)
    assert torch.equal(obs[:, 0], reward) and torch.equal(done, (reward > 5).float())
    assert torch.equal(obs, action) and torch.equal(obs, next_obs)
    counts = np.bincount(reward.int().numpy(), minlength=11)
    assert counts[0] == 0 and (np.abs(counts[1:] - 1000) < 4 * np.sqrt(900)).all()


def test_observations_of_any_shape_are_flattened(train):
    v = train("td3_continuous_action", "--env-id", "probes_offpolicy:WideBox-v0", *SMALL, "--num-envs", "2")
    rows = v["replay"].arrays["rows"]
    assert rows.shape == (64, 6 + 2 + 2 + 6)
    assert np.array_equal(rows[0, 10:], rows[2, :6]) and not np.array_equal(rows[0, 10:], rows[1, :6])
    np.testing.assert_allclose(rows[59, 10:], v["final_obs"][1].flatten(), rtol=1e-6)


# ---------------------------------------------------------------------- the loop
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(("num_envs", "utd_ratio"), [(1, 1.0), (3, 1.0), (3, 0.5)])
def test_update_to_data_ratio_and_delayed_policy(name, num_envs, utd_ratio, train):
    """Gradient steps of the critics are utd_ratio times the environment steps since learning_starts, however many
    environments; every third moves the actor, once in DDPG and TD3, three times in SAC."""
    flags = ["--num-envs", num_envs, "--utd-ratio", utd_ratio, "--policy-frequency", "3"]
    v = train(name, "--env-id", diary(name), *SMALL, *flags)
    assert v["global_step"] == v["replay"].inserted == 60
    assert steps_of(v["critic_optimizer"]) == utd_ratio * 40
    delayed = {40: 14, 20: 7}[utd_ratio * 40]
    assert steps_of(v["actor_optimizer"]) == (3 * delayed if "sac" in name else delayed)


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_update_before_the_buffer_holds_a_batch(name, train):
    flags = "--learning-starts 4 --batch-size 32 --utd-ratio 1".split()
    v = train(name, "--env-id", diary(name), *SMALL, *flags)
    assert steps_of(v["critic_optimizer"]) == 60 - 31


@pytest.mark.parametrize("name", SCRIPTS)
def test_targets_move_by_polyak_averaging(name, train):
    """After one gradient step the targets are (1 - tau) old + tau new weights."""
    flags = ["--env-id", diary(name), *SMALL, "--total-timesteps", "21", "--utd-ratio", "1"]
    still, mixed = (train(name, *flags, "--tau", tau) for tau in (0, 0.25))
    for what in ("critic",) if "sac" in name else ("critic", "actor"):
        old, new, target = still[f"target_{what}_vector"], still[f"{what}_vector"], mixed[f"target_{what}_vector"]
        assert not torch.equal(old, new) and torch.equal(new, mixed[f"{what}_vector"])
        torch.testing.assert_close(target, 0.75 * old + 0.25 * new, rtol=1e-5, atol=1e-7)
        weights = torch.cat([p.flatten() for p in mixed[f"target_{what}"].parameters()])
        assert torch.equal(weights, target.detach())  # the module's weights are the vector's


def test_targets_of_ddpg_and_td3_move_with_the_policy(train):
    for name in CONTINUOUS[:2]:
        once, twice = (
            train(name, "--env-id", diary(name), *SMALL, "--total-timesteps", n, "--tau", "1") for n in (21, 22)
        )
        assert torch.equal(once["target_critic_vector"], twice["target_critic_vector"])
        assert not torch.equal(once["critic_vector"], twice["critic_vector"])


@pytest.mark.parametrize("name", CONTINUOUS)
def test_start_actions_are_uniform_within_the_bounds(name, train):
    v = train(name, "--env-id", diary(name), *SMALL, *"--total-timesteps 400 --learning-starts 400".split())
    share = (v["replay"].arrays["rows"][:, 3:5] - LOW) / (HIGH - LOW)
    assert steps_of(v["critic_optimizer"]) == 0
    for i in range(2):
        assert np.histogram(share[:, i], bins=4, range=(0, 1))[0].min() >= 5  # of 64 rows


@pytest.mark.parametrize("name", CONTINUOUS)
def test_exploration_noise_is_drawn_for_each_environment_and_scaled_to_each_dimension(name, train):
    """With no gradient step the policy is fixed and the observation always 0: what varies is the noise."""
    flags = "--total-timesteps 1000 --learning-starts 1 --num-envs 2 --utd-ratio 0 --buffer-size 1000 --seed 3".split()
    v = train(name, "--env-id", "probes_offpolicy:OneStepBox-v0", *SMALL, *flags)
    action = v["replay"].arrays["rows"][2:, 1:3].reshape(499, 2, 2)  # (steps, envs, dimensions)
    noise = (action - v["actor"].act(np.zeros((1, 1)))) / HALF_RANGE
    assert abs(np.corrcoef(noise[:, 0, 0], noise[:, 1, 0])[0, 1]) < 0.15  # environments are independent
    assert abs(np.corrcoef(noise[:, 0, 0], noise[:, 0, 1])[0, 1]) < 0.15  # and dimensions
    if "sac" not in name:
        np.testing.assert_allclose(noise.std((0, 1)), 0.1, rtol=0.1)


@pytest.mark.parametrize("name", CONTINUOUS[:2])
def test_noisy_actions_stay_within_the_bounds(name, train):
    v = train(name, "--env-id", "probes_offpolicy:OneStepBox-v0", *SMALL, "--exploration-noise", "5")
    action = v["replay"].arrays["rows"][20:60, 1:3]
    assert (action >= LOW).all() and (action <= HIGH).all()
    assert (action == LOW).any(0).all() and (action == HIGH).any(0).all()


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_seed_same_weights(name, train):
    flags = ["--env-id", diary(name), *SMALL, "--num-envs", "2"]
    a, b = (train(name, *flags, "--seed", 5) for _ in range(2))
    for what in ("actor_vector", "critic_vector", "target_critic_vector"):
        assert torch.equal(a[what], b[what])
    assert np.array_equal(a["replay"].arrays["rows"], b["replay"].arrays["rows"])


@pytest.mark.parametrize("name", [SCRIPTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS[1:])])
def test_killed_and_resumed_with_its_replay_equals_uninterrupted(name, tmp_path):
    """kill -9 amidst training, also between two rows of metrics; the ring of the replay has wrapped by then."""
    env_id = "CartPole-v1" if name == "sac_discrete" else "Pendulum-v1"
    flags = "--total-timesteps 1400 --num-envs 2 --learning-starts 200 --batch-size 16 --buffer-size 300 --save-replay"
    flags += " --utd-ratio 0.5 --save-every 130 --eval-every 500 --eval-episodes 1"
    words = [sys.executable, str(script(name)), "--env-id", env_id, *flags.split(), "--runs-dir"]
    finish([*words, str(tmp_path / "whole")])
    process = start([*words, str(tmp_path / "killed")])
    run_dir = wait_for_steps(tmp_path / "killed", 800, process)
    process.kill()
    process.wait()
    out = finish([sys.executable, str(script(name)), "--resume", str(run_dir)])
    assert "resumed at step" in out
    assert_same_run(next((tmp_path / "whole").iterdir()), run_dir)


def test_another_seed_other_weights(train):
    a, b = (train("td3_continuous_action", "--env-id", diary("td3"), *SMALL, "--seed", seed) for seed in (5, 6))
    assert not torch.equal(a["actor_vector"], b["actor_vector"])
    assert not np.array_equal(a["replay"].arrays["rows"][:, 3:5], b["replay"].arrays["rows"][:, 3:5])


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_logged_key_is_on_the_page(name, train):
    v = train(name, "--env-id", diary(name), *SMALL, *"--total-timesteps 200 --learning-starts 150".split())
    logged = {key for row in rows(v["run"].dir) for key in row} - {"global_step", "wall_time"}
    page = (ROOT / "algorithms" / "actor_critic" / "README.md").read_text()
    assert [key for key in sorted(logged) if f"`{key}`" not in page] == []
    assert {"losses/qf1_values", "losses/qf1_loss", "losses/actor_loss"} <= logged


def test_logged_metrics_are_means_since_the_last_row(train, monkeypatch):
    """The means over steps 101 to 200, from those of a run that ends one step before: the last step is logged, whatever
    its number."""
    v = train("td3_continuous_action", "--env-id", diary("td3"), *SMALL, *"--total-timesteps 200".split())
    row = rows(v["run"].dir, "losses/qf1_loss")[-1]
    assert row["global_step"] == 200
    assert row["losses/qf_loss"] == pytest.approx((row["losses/qf1_loss"] + row["losses/qf2_loss"]) / 2, rel=1e-5)
    assert (v["totals"] == 0).all()
    last = v["metrics"].tolist()  # of gradient step 179, the critics' alone
    v = train("td3_continuous_action", "--env-id", diary("td3"), *SMALL, *"--total-timesteps 199".split())
    early = rows(v["run"].dir, "losses/qf1_loss")[-1]
    assert early["global_step"] == 199 and early["losses/actor_loss"] == pytest.approx(row["losses/actor_loss"])
    for name, value in zip(("qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss"), last, strict=True):
        assert row[f"losses/{name}"] == pytest.approx((99 * early[f"losses/{name}"] + value) / 100, rel=1e-5)


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_diverges_behind_the_last_row_is_seen(name, train):
    flags = ["--policy-lr", "1e30", "--q-lr", "1e30"] if "sac" in name else ["--learning-rate", "1e30"]
    train(name, "--env-id", diary(name.partition("_c")[0]), *SMALL, "--total-timesteps", "90", *flags, code=3)
    assert "losses/" in train.out and "Traceback" not in train.out


def test_actions_without_bounds_are_refused_with_a_sentence(train):
    for name in CONTINUOUS:
        train(name, "--env-id", "probes_offpolicy:Boundless-v0", *SMALL, code=2)
        assert "finite bounds" in train.out and "Traceback" not in train.out


def test_other_kinds_of_actions_are_refused_with_the_file_to_use(train):
    for name in CONTINUOUS:
        train(name, "--env-id", "CartPole-v1", *SMALL, code=2)
        assert "use sac_discrete.py" in train.out
    train("sac_discrete", "--env-id", "Pendulum-v1", *SMALL, code=2)
    assert "use sac_continuous_action.py" in train.out


def test_a_buffer_smaller_than_a_batch_is_refused(train):
    train("ddpg_continuous_action", "--env-id", diary("ddpg"), "--buffer-size", "100", code=2)
    assert "--buffer-size" in train.out


# ---------------------------------------------------------------------- pure functions
@pytest.mark.parametrize("name", CONTINUOUS)
def test_the_evaluated_policy_is_greedy(name):
    """Twice the same observation, twice the same action, however the generators stand; within the bounds."""
    torch.manual_seed(0)
    low, high = np.array([0.1, -3.0], np.float32), np.array([0.7, 0.3], np.float32)
    actor = definitions(name)["Actor"](3, low, high)
    obs = np.random.default_rng(0).normal(size=(1000, 3)) * 1000
    first = actor.act(obs)
    assert isinstance(first, np.ndarray) and np.array_equal(first, actor.act(obs)) and first.shape == (1000, 2)
    assert (first >= low).all() and (first <= high).all()
    np.testing.assert_allclose([first.min(0), first.max(0)], [low, high], atol=1e-3)  # all of the ranges is reached


def linear_layers(layers, i=...):
    """The layers as `nn.Linear`, of network i where there are several."""
    made = []
    for weight, bias in layers():
        made.append(torch.nn.Linear(*weight[i].shape))
        made[-1].weight.data, made[-1].bias.data = weight[i].T.detach().clone(), bias[i].flatten().detach().clone()
    return made


def test_layers_are_linear_layers_with_relu_between_them():
    """Also for one output, which is computed in another way, and for two networks side by side."""
    torch.manual_seed(0)
    for outputs in (1, 5):
        for copies in ((), (2,)):
            layers, x = TD3["Layers"](10, 30, 20, outputs, copies=copies), torch.randn(*copies, 7, 10)
            got = TD3["mlp"](layers(), x)
            assert got.shape == (*copies, 7, outputs) and len(list(layers.parameters())) == 1
            for i in range(2) if copies else (...,):
                first, second, third = linear_layers(layers, i)
                torch.testing.assert_close(got[i], third(second(first(x[i]).relu()).relu()), rtol=1e-5, atol=1e-5)


def test_layers_begin_like_torch_linear_layers():
    """Uniform up to 1 / sqrt(fan_in), weights and biases; networks side by side begin differently."""
    torch.manual_seed(0)
    for (weight, bias), fan_in in zip(TD3["Layers"](100, 400, 900, copies=(2,))(), (100, 400), strict=True):
        for p in (weight, bias):
            assert p.abs().max() <= fan_in**-0.5
            assert p.std().item() == pytest.approx((3 * fan_in) ** -0.5, rel=0.1)
            assert p.mean().item() == pytest.approx(0, abs=0.1 * fan_in**-0.5) and not torch.equal(p[0], p[1])


def test_gradient_and_vector_train_as_torch_does():
    """Five steps by `gradient` and Adam on the vector give the weights of zero_grad, backward and Adam on separate
    linear layers."""
    torch.manual_seed(0)
    obs, action, reward, done, next_obs = batch = [x.float() for x in random_batch()]
    critic, actor = DDPG["Critic"](3, 2), DDPG["Actor"](3, LOW, HIGH)
    vector, target = critic.layers.vector, copy.deepcopy(critic)
    first, second, third = other = torch.nn.ModuleList(linear_layers(critic.layers))
    optimizers = torch.optim.Adam([vector], lr=0.01, fused=True), torch.optim.Adam(other.parameters(), lr=0.01)
    for _ in range(5):
        vector.grad, _ = DDPG["gradient"](DDPG["ddpg_critic_loss"], critic, target, actor, *batch, 0.9)
        with torch.no_grad():
            q_target = reward + 0.9 * (1 - done) * target(next_obs, actor(next_obs))
        q = third(second(first(torch.cat([obs, action], 1)).relu()).relu()).squeeze(1)
        optimizers[1].zero_grad()
        torch.nn.functional.mse_loss(q, q_target).backward()
        for optimizer in optimizers:
            optimizer.step()
    for x, y in zip(linear_layers(critic.layers), other, strict=True):
        torch.testing.assert_close(x.weight, y.weight, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(x.bias, y.bias, rtol=1e-4, atol=1e-5)
    assert all(p.grad is None for p in [*actor.parameters(), *target.parameters()])


@pytest.mark.parametrize("name", CONTINUOUS)
def test_the_actor_loss_gives_the_critics_no_gradient(name):
    """The gradient has the actor's length, is the derivative of the loss in its weights, and nothing else gets one."""
    torch.manual_seed(0)
    file = definitions(name)
    actor, critic = file["Actor"](3, LOW, HIGH).double(), file["Critic"](3, 2).double()
    vector, obs = actor.layers.vector, random_batch()[0]
    inputs = (critic, torch.tensor(0.3), obs, torch.randn(16, 2), -2) if "sac" in name else (critic, obs)
    loss_of = next(value for key, value in file.items() if key.endswith("_actor_loss"))
    gradient, _ = file["gradient"](loss_of, actor, *inputs)
    assert gradient.shape == vector.shape and gradient.abs().sum() > 0
    assert all(p.grad is None for p in critic.parameters()) and not gradient.requires_grad
    direction = torch.randn_like(vector)
    with torch.no_grad():
        values = []
        for step in (1e-8, -1e-8):  # small, so that no ReLU turns over
            vector += step * direction
            values.append(loss_of(actor, *inputs)[0].item())
            vector -= step * direction
    assert (values[0] - values[1]) / 2e-8 == pytest.approx((gradient @ direction).item(), rel=1e-4)


def test_ddpg_losses_by_hand():
    torch.manual_seed(0)
    actor, critic = DDPG["Actor"](3, LOW, HIGH).double(), DDPG["Critic"](3, 2).double()
    target_actor, target_critic = DDPG["Actor"](3, LOW, HIGH).double(), DDPG["Critic"](3, 2).double()
    obs, action, reward, done, next_obs = batch = random_batch()
    loss, metrics = DDPG["ddpg_critic_loss"](critic, target_critic, target_actor, *batch, 0.9)
    errors, values = [], []
    for i in range(16):
        next_action = target_actor(next_obs[i : i + 1])
        bootstrap = 0.0 if done[i] else 0.9 * target_critic(next_obs[i : i + 1], next_action).item()
        values.append(critic(obs[i : i + 1], action[i : i + 1]).item())
        errors.append((values[-1] - reward[i].item() - bootstrap) ** 2)
    assert loss.item() == pytest.approx(np.mean(errors))
    np.testing.assert_allclose(metrics.numpy(), [np.mean(values), np.mean(errors)])
    loss, metrics = DDPG["ddpg_actor_loss"](actor, critic, obs)
    assert loss.item() == metrics.item() == pytest.approx(-critic(obs, actor(obs)).mean().item())


def test_td3_takes_the_smaller_of_two_targets():
    torch.manual_seed(0)
    actor, critic, target_critic = (
        make.double() for make in (TD3["Actor"](3, LOW, HIGH), TD3["Critic"](3, 2), TD3["Critic"](3, 2))
    )
    obs, action, reward, done, next_obs = batch = random_batch()
    spread(target_critic, next_obs, actor(next_obs))
    noise = torch.randn(16, 2, dtype=torch.float64)
    loss, metrics = TD3["td3_critic_loss"](critic, target_critic, actor, *batch, noise, 0.5, 0.9)
    next_action = actor(next_obs).detach().numpy() + np.clip(noise.numpy(), -0.5, 0.5) * HALF_RANGE
    next_action = torch.as_tensor(np.clip(next_action, LOW, HIGH))
    smaller = np.minimum(*(value_of(target_critic, i, next_obs, next_action) for i in (0, 1)))
    assert (value_of(target_critic, 0, next_obs, next_action) > smaller).any()
    assert (value_of(target_critic, 1, next_obs, next_action) > smaller).any()
    q_target = reward.numpy() + 0.9 * (1 - done.numpy()) * smaller
    values = [value_of(critic, i, obs, action) for i in (0, 1)]
    losses = [np.mean((value - q_target) ** 2) for value in values]
    assert loss.item() == pytest.approx(sum(losses), rel=1e-6)
    expected = [values[0].mean(), values[1].mean(), *losses, np.mean(losses)]
    np.testing.assert_allclose(metrics.numpy(), expected, rtol=1e-6)
    loss, _ = TD3["td3_actor_loss"](actor, critic, obs)
    assert loss.item() == pytest.approx(-value_of(critic, 0, obs, actor(obs)).mean(), rel=1e-6)


def test_target_smoothing_is_clipped_per_dimension_and_drawn_per_transition():
    low, high, n = torch.as_tensor(LOW), torch.as_tensor(HIGH), 50_000
    torch.manual_seed(0)
    middle = ((low + high) / 2).expand(n, 2)
    moved = (TD3["smoothed"](middle, 0.2 * torch.randn(n, 2), 0.3, low, high) - middle) / torch.as_tensor(HALF_RANGE)
    np.testing.assert_allclose(moved.abs().amax(0).numpy(), 0.3, rtol=1e-5)
    clipped = (moved.abs() > 0.2999).float().mean(0)  # 1.5 standard deviations: 13.4 % of a Gaussian
    np.testing.assert_allclose(clipped.numpy(), 0.1336, atol=0.01)
    assert abs(np.corrcoef(moved[:, 0], moved[:, 1])[0, 1]) < 0.03
    assert len(moved[:, 0].unique()) > n / 2
    for edge in (low, high):
        action = TD3["smoothed"](edge.expand(n, 2), torch.randn(n, 2), 0.5, low, high)
        assert (action >= low).all() and (action <= high).all() and (action == edge).any(0).all()


def test_td3_draws_the_smoothing_noise_for_every_transition(train):
    v = train("td3_continuous_action", "--env-id", diary("td3"), *SMALL, "--batch-size", "50")
    assert v["noise"].shape == (50, 2) and len(v["noise"].unique()) == 100
    assert v["noise"].std().item() == pytest.approx(0.2, rel=0.3)


# ---------------------------------------------------------------------- they learn
FAST = "--total-timesteps 300 --learning-starts 64 --batch-size 32 --buffer-size 2000 --policy-frequency 1 --tau 0.2"
RATES = {name: ["--learning-rate", "0.002"] for name in CONTINUOUS[:2]}
RATES["sac_continuous_action"] = "--policy-lr 0.002 --q-lr 0.002".split()


def learn(train, name, probe, *flags):
    env_id, plumbing = f"probes_offpolicy:{probe}-v0", "--eval-every 0 --eval-episodes 20".split()
    if "sac" in name and "--gamma" in flags:  # values without the entropy's part
        flags = [*flags, "--no-autotune", "--alpha", "0"]
    return train(name, "--env-id", env_id, *FAST.split(), *plumbing, *RATES[name], *flags)


def critic_at(v, obs):
    """The first critic's value of the greedy action."""
    obs = torch.tensor([[float(obs)]])
    value = v["critic"](obs, torch.as_tensor(v["actor"].act(obs.numpy())))
    return value.flatten()[0].item()


@pytest.mark.parametrize("name", CONTINUOUS)
def test_learns_a_policy_of_the_observation(name, train):
    """Random actions give -1.2; 0.1 of the range away from the best action in both dimensions gives -0.08."""
    v = learn(train, name, "AimWhereSeen", "--num-envs", "2", "--total-timesteps", "364")
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > -0.2


@pytest.mark.parametrize("name", CONTINUOUS)
def test_learns_to_discount(name, train):
    v = learn(train, name, "DelayedBox", "--gamma", "0.5")
    assert critic_at(v, 0) == pytest.approx(0.5, abs=0.1) and critic_at(v, 1) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_value_of_a_constant_reward_under_a_time_limit(name, train):
    """The time limit is no end of the task: 1 / (1 - gamma) = 5, where a limit taken for an end would give 3.3."""
    v = learn(train, name, "ForeverBox", "--gamma", "0.8")
    assert critic_at(v, 0) == pytest.approx(5, abs=0.3)
