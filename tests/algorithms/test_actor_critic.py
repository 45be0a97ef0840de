"""The actor-critic family: its replay and loops against the simulator, its formulas by hand, learning. What all files
share is tested on `ddpg_continuous_action.py`, and on another file what is different there; SAC's own formulas are in
test_sac.py, the replay buffer's in test_dqn.py."""

import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, rows, script
from probes_offpolicy import HIGH, LOW
from test_resume import assert_same_run, finish, start, wait_for_steps

import solorl
from solorl.compute.speed import gradients_of

CONTINUOUS = ["ddpg_continuous_action", "td3_continuous_action", "sac_continuous_action"]
SCRIPTS = [*CONTINUOUS, "sac_discrete"]
DDPG, TD3 = definitions("ddpg_continuous_action"), definitions("td3_continuous_action")
SMALL = "--total-timesteps 60 --learning-starts 20 --batch-size 8 --buffer-size 64".split()
SMALL += "--eval-every 0 --eval-episodes 1".split()


def diary(name):
    return "probes_offpolicy:DiscreteDiary-v0" if name == "sac_discrete" else "probes_offpolicy:Diary-v0"


def steps_of(optimizer):
    """Steps an optimiser has made on its first parameter."""
    state = optimizer.state.get(optimizer.param_groups[0]["params"][0], {"step": 0})
    return int(state["step"])


def weights(module):
    """All parameters in one vector."""
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach()


def stored(v):
    """The transitions in the buffer that have been inserted, a Batch of NumPy arrays."""
    return DDPG["Batch"](**{name: array[: v["replay"].inserted] for name, array in v["replay"].arrays.items()})


def random_batch(n=16, obs_dim=3, action_dim=2):
    """A Batch as `Replay.sample` gives it, in double precision."""
    generator = torch.Generator().manual_seed(0)
    obs, next_obs = (torch.randn(n, obs_dim, generator=generator, dtype=torch.float64) for _ in range(2))
    action = 2 * torch.rand(n, action_dim, generator=generator, dtype=torch.float64) - 1
    reward = torch.randn(n, generator=generator, dtype=torch.float64)
    done = (torch.rand(n, generator=generator) < 0.5).double()
    return DDPG["Batch"](obs, action, reward, done, next_obs)


def reference(net, *inputs):
    """A multi-layer perceptron with ReLU in NumPy, its layers taken one by one."""
    x = np.concatenate([torch.as_tensor(x).detach().numpy() for x in inputs], axis=1)
    layers = [layer for layer in net if isinstance(layer, torch.nn.Linear)]
    assert len(layers) == 3
    for i, layer in enumerate(layers):
        x = x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
        x = np.maximum(x, 0) if i < len(layers) - 1 else x
    return x


def values(critic, obs, action):
    """The values of both critics of a pair."""
    return [reference(q, obs, action)[:, 0] for q in (critic.q1, critic.q2)]


def spread(critic, obs, action):
    """Let the values of both critics differ from state to state around the same mean: each is the smaller somewhere."""
    with torch.no_grad():
        for q in (critic.q1, critic.q2):
            q[-1].weight.normal_()
            q[-1].bias -= reference(q, obs, action).mean()
    return critic


TRAINED = {}  # name -> the variables of the training on the diary, for all tests of what every file has


def trained(name, train):
    """One training of a file with three environments, half a gradient step per environment step and a delay of 3; the
    inputs that its networks got while they learned are in `seen`."""
    if name not in TRAINED:
        seen = {}

        class Watched(solorl.Run):
            def gradient_step(self, loss_of, module, optimizer):
                inputs = seen[type(module).__name__] = []
                module.register_forward_pre_hook(lambda module, given: inputs.append(given))
                return super().gradient_step(loss_of, module, optimizer)

        flags = "--num-envs 3 --utd-ratio 0.5 --policy-frequency 3 --buffer-size 128".split()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("solorl.Run", Watched)
            TRAINED[name] = train(name, "--env-id", diary(name), *SMALL, *flags) | {"seen": seen}
    return TRAINED[name]


# ---------------------------------------------------------------------- replay
@pytest.mark.parametrize("name", SCRIPTS)
def test_replay_holds_what_the_simulator_did(name, train):
    """Three environments whose observations name the environment, the episode and the step: every transition is one
    step of one episode of one environment; its next_obs is where that step led, also at an end; done only where the
    task was over."""
    v = trained(name, train)
    got = stored(v)
    assert v["replay"].inserted == len(got.obs) == 60
    for who in range(3):
        episode, step = 0, 0
        for k in range(who, 60, 3):
            last = (3, 4)[episode % 2]
            done = step + 1 == last and episode % 2 == 0
            np.testing.assert_array_equal(got.obs[k], [who, episode, step])
            assert (got.reward[k], got.done[k]) == (100 * episode + step + 1, done)
            np.testing.assert_array_equal(got.next_obs[k], [who, episode, step + 1])
            episode, step = (episode + 1, 0) if step + 1 == last else (episode, step + 1)
    if name == "sac_discrete":
        assert set(got.action) <= {0, 1, 2, 3} and len(set(got.action)) > 1
    else:
        assert got.action.shape == (60, 2) and (np.abs(got.action) <= 1).all() and len(np.unique(got.action)) == 120


def test_observations_of_any_shape_are_flattened(train):
    v = train("ddpg_continuous_action", "--env-id", "probes_offpolicy:WideBox-v0", *SMALL, "--num-envs", "2")
    got = stored(v)
    assert got.obs.shape == got.next_obs.shape == (60, 6)
    assert np.array_equal(got.next_obs[0], got.obs[2]) and not np.array_equal(got.next_obs[0], got.obs[1])
    np.testing.assert_allclose(got.next_obs[59], v["next_obs"][1].flatten(), rtol=1e-6)


# ---------------------------------------------------------------------- actions
@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        ([-3.0], [0.6], np.float32),
        ([-3.0], [0.6], np.float64),
        ([0.0], [0.1], np.float32),
        ([0.0], [0.1], np.float64),
        ([-3.0, 0.0], [1.0, 10.0], np.float32),
        ([-3.0, 0.0], [1.0, 10.0], np.float64),
        ([0.0, -1e-3], [1e-3, 1e-3], np.float64),
        ([0.0, -1e6], [1e6, 1e6], np.float32),
        ([1e6], [1e6 + 1], np.float32),  # a seventeenth of which is a float32's step there
        ([-0.1], [0.1], np.float16),
        ([0.7], [0.7], np.float32),  # one action only
    ],
)
def test_scaled_actions_fill_the_bounds_and_never_leave_them(low, high, dtype):
    space = gym.spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)
    env = gym.Env()
    env.action_space, env.observation_space = space, gym.spaces.Box(-1.0, 1.0, (1,))
    scaled = DDPG["ScaleAction"](env)
    assert scaled.action_space == gym.spaces.Box(-1.0, 1.0, space.shape, np.float32)
    ones = np.ones(space.shape, np.float32)
    assert np.array_equal(scaled.action(-ones), space.low) and np.array_equal(scaled.action(ones), space.high)
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    np.testing.assert_allclose(scaled.action(0 * ones), (low + high) / 2, rtol=np.finfo(dtype).eps)
    rng = np.random.default_rng(0)
    for kind in (np.float32, np.float64):
        actions = rng.uniform(-1, 1, (10_000, *space.shape)).astype(kind)
        got = [scaled.action(action) for action in actions]
        assert all(space.contains(action) for action in got) and got[0].dtype == dtype
        share = (actions.astype(np.float64) + 1) / 2
        error = 1e-6 * (high - low) + np.finfo(dtype).eps * np.maximum(abs(low), abs(high))
        assert (abs(np.array(got, np.float64) - (1 - share) * low - share * high) <= error).all()


@pytest.mark.parametrize("name", CONTINUOUS)
def test_the_environment_alone_sees_its_own_bounds(name, train):
    """Replay and critics have the actions in [-1, 1], random ones and the policy's; the environments got them scaled,
    each its own."""
    v = trained(name, train)
    action = stored(v).action
    for who, env in enumerate(v["envs"].envs):
        received = np.array(env.unwrapped.received)
        assert received.dtype == np.float32 and all(map(env.unwrapped.action_space.contains, received))
        share = (action[who::3].astype(np.float64) + 1) / 2
        np.testing.assert_allclose(received, LOW + (HIGH - LOW) * share, rtol=1e-6, atol=1e-6)
    judged = torch.cat([action for _, action in v["seen"]["Critic"]]).detach().numpy()
    assert judged.shape[0] >= 20 * 8 and (np.abs(judged) <= 1).all()
    assert {tuple(row) for row in v["batch"].action.numpy()} <= {tuple(row) for row in action}


@pytest.mark.parametrize("env_id", ["Boundless", "HalfBounded"])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_actions_without_bounds_are_refused_with_a_sentence(name, env_id, train, tmp_path):
    train(name, "--env-id", f"probes_offpolicy:{env_id}-v0", *SMALL, code=2)
    said = "has actions without finite bounds; gymnasium.wrappers.TransformAction gives bounds"
    assert train.out == f"error: probes_offpolicy:{env_id}-v0 {said}\n"
    assert not (tmp_path / "runs").exists()


def test_start_actions_are_uniform_within_the_bounds(train):
    flags = "--total-timesteps 400 --learning-starts 400 --buffer-size 400".split()
    v = train("ddpg_continuous_action", "--env-id", "probes_offpolicy:Diary-v0", *SMALL, *flags)
    received = np.array(v["envs"].envs[0].unwrapped.received)
    share = (received - LOW) / (HIGH - LOW)
    assert steps_of(v["critic_optimizer"]) == 0 and received.shape == (400, 2)
    for i in range(2):
        assert np.histogram(share[:, i], bins=4, range=(0, 1))[0].min() >= 70  # of 100, 3.5 standard deviations less


@pytest.mark.parametrize("name", ["ddpg_continuous_action", "sac_continuous_action"])
def test_exploration_noise_is_drawn_for_each_environment_and_dimension(name, train):
    """With no gradient step the policy is fixed and the observation always 0: what varies is the noise."""
    flags = "--total-timesteps 1000 --learning-starts 1 --num-envs 2 --utd-ratio 0 --buffer-size 1000 --seed 3".split()
    v = train(name, "--env-id", "probes_offpolicy:OneStepBox-v0", *SMALL, *flags)
    noise = stored(v).action - v["actor"].act(np.zeros((1, 1)))
    noise = noise[2:].reshape(499, 2, 2)  # (steps, envs, dimensions)
    assert abs(np.corrcoef(noise[:, 0, 0], noise[:, 1, 0])[0, 1]) < 0.15  # environments are independent
    assert abs(np.corrcoef(noise[:, 0, 0], noise[:, 0, 1])[0, 1]) < 0.15  # and dimensions
    if "sac" not in name:
        np.testing.assert_allclose(noise.std((0, 1)), 0.1, rtol=0.1)


@pytest.mark.parametrize("name", CONTINUOUS[:2])
def test_noisy_actions_stay_within_the_bounds(name):
    torch.manual_seed(0)
    actor, obs = definitions(name)["Actor"](3, 2), np.random.default_rng(0).normal(size=(100, 3))
    noise = np.random.default_rng(1).normal(size=(100, 2))
    action = actor.act(obs, noise)
    np.testing.assert_allclose(action, np.clip(actor.act(obs) + noise, -1, 1), rtol=1e-6)
    assert (action == -1).any(0).all() and (action == 1).any(0).all() and (np.abs(action) < 1).any(0).all()


# ---------------------------------------------------------------------- the loop
@pytest.mark.parametrize("name", SCRIPTS)
def test_update_to_data_ratio_and_delayed_policy(name, train):
    """Gradient steps of the critics are half the environment steps since learning_starts; every third moves the actor,
    once in DDPG and TD3, three times in SAC."""
    v = trained(name, train)
    assert v["global_step"] == 60 and steps_of(v["critic_optimizer"]) == 20
    assert steps_of(v["actor_optimizer"]) == (3 * 7 if "sac" in name else 7)
    assert "sac" not in name or steps_of(v["alpha_optimizer"]) == 3 * 7


@pytest.mark.parametrize("num_envs", [1, 3])
def test_update_to_data_ratio_of_1(num_envs, train):
    flags = ["--env-id", diary("ddpg"), *SMALL, "--num-envs", num_envs]
    v = train("ddpg_continuous_action", *flags)
    assert v["global_step"] == v["replay"].inserted == 60
    assert steps_of(v["critic_optimizer"]) == 40 and steps_of(v["actor_optimizer"]) == 20


def test_no_update_before_the_buffer_holds_a_batch(train):
    flags = "--learning-starts 4 --batch-size 32 --utd-ratio 1".split()
    v = train("ddpg_continuous_action", "--env-id", diary("ddpg"), *SMALL, *flags)
    assert steps_of(v["critic_optimizer"]) == 60 - 31


def test_soft_update_by_hand():
    """Online 3 and -2, target 1 and 2: by a quarter to 1.5 and 1, by another to 1.875 and 0.25; in place, and nothing
    else moves."""
    target, online = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    for net, (weight, bias) in ((target, (1.0, 2.0)), (online, (3.0, -2.0))):
        torch.nn.init.constant_(net.weight, weight)
        torch.nn.init.constant_(net.bias, bias)
    parameters = list(target.parameters())
    for expected in ([1.5, 1.0], [1.875, 0.25]):
        DDPG["soft_update"](target, online, 0.25)
        assert weights(target).tolist() == expected and weights(online).tolist() == [3, -2]
    assert all(x is y for x, y in zip(parameters, target.parameters(), strict=True))
    assert all(p.is_leaf and p.requires_grad for p in parameters)


def test_targets_move_with_the_policy_by_tau(train):
    """They begin as the online networks. After one gradient step they are (1 - tau) old + tau new weights, and the
    second step, which moves no actor, leaves them there."""
    flags = ["--env-id", diary("ddpg"), *SMALL]
    runs = [("20", 0.25), ("21", 0), ("21", 0.25), ("22", 0.25)]
    begin, still, mixed, then = (
        train("ddpg_continuous_action", *flags, "--total-timesteps", n, "--tau", tau) for n, tau in runs
    )
    for what in ("actor", "critic"):
        old, new, target = weights(begin[what]), weights(still[what]), weights(mixed[f"target_{what}"])
        assert not torch.equal(old, new) and torch.equal(new, weights(mixed[what]))
        assert torch.equal(old, weights(begin[f"target_{what}"])) and torch.equal(old, weights(still[f"target_{what}"]))
        torch.testing.assert_close(target, 0.75 * old + 0.25 * new, rtol=1e-5, atol=1e-7)
        assert torch.equal(target, weights(then[f"target_{what}"]))
    assert not torch.equal(weights(mixed["critic"]), weights(then["critic"]))
    assert torch.equal(weights(mixed["actor"]), weights(then["actor"]))


def test_targets_of_sac_move_when_due(train):
    """At every third gradient step, with tau = 1 to the critics; the temperature and the actor have none."""
    flags = ["--env-id", diary("sac"), *SMALL, "--target-network-frequency", "3", "--tau", "1"]
    runs = [train("sac_continuous_action", *flags, "--total-timesteps", n) for n in (21, 23, 24)]
    first, third, fourth = (weights(v["critic"]) for v in runs)
    moved, still, again = (weights(v["target_critic"]) for v in runs)
    assert torch.equal(first, moved) and torch.equal(first, still) and torch.equal(fourth, again)
    assert not torch.equal(first, third) and not torch.equal(first, fourth)


def test_same_seed_same_weights_and_another_seed_others(train):
    flags = ["--env-id", diary("ddpg"), *SMALL, "--num-envs", "2"]
    a, b, c = (train("ddpg_continuous_action", *flags, "--seed", seed) for seed in (5, 5, 6))
    for what in ("actor", "critic", "target_actor", "target_critic"):
        assert torch.equal(weights(a[what]), weights(b[what])) and not torch.equal(weights(a[what]), weights(c[what]))
    for x, y in zip(stored(a), stored(b), strict=True):
        assert np.array_equal(x, y)
    assert not np.array_equal(stored(a).action, stored(c).action)


@pytest.mark.parametrize("name", ["ddpg_continuous_action", "sac_continuous_action"])
def test_fast_changes_results_only_by_rounding(name, train):
    """Without it Adam steps each parameter, not one vector."""
    flags = "--num-envs 3 --utd-ratio 0.5 --policy-frequency 3 --buffer-size 128".split()
    fast, plain = trained(name, train), train(name, "--env-id", diary(name), *SMALL, *flags, "--no-fast")
    for what in ("actor", "critic"):
        assert len(fast[f"{what}_optimizer"].state) == 1
        assert len(plain[f"{what}_optimizer"].state) == len(list(plain[what].parameters())) >= 6
    for what in ("actor", "critic", "target_critic", *(["temperature"] if "sac" in name else [])):
        torch.testing.assert_close(weights(fast[what]), weights(plain[what]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stored(fast).action, stored(plain).action, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["ddpg_continuous_action", "sac_continuous_action"])
def test_resumed_with_its_replay_equals_uninterrupted(name, train):
    """The last checkpoint thrown away, the run goes on from the one before, in the middle of a row of metrics; the ring
    of the replay has wrapped by then."""
    flags = "--total-timesteps 700 --num-envs 2 --learning-starts 200 --batch-size 16 --buffer-size 300 --save-replay"
    flags += " --utd-ratio 0.25 --save-every 400 --log-every 300 --eval-every 300"
    whole = train(name, "--env-id", "Pendulum-v1", *SMALL, *flags.split())
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train(name, "--resume", run_dir)
    assert v["start"] == 200 and comparable(run_dir) == expected
    modules = [key for key, part in whole.items() if isinstance(part, torch.nn.Module)]
    assert {"actor", "critic", "target_critic"} < set(modules)
    for what in modules:
        assert torch.equal(weights(v[what]), weights(whole[what]))
    for what in [key for key in whole if key.endswith("_optimizer")]:
        (state,), (same,) = v[what].state.values(), whole[what].state.values()
        assert all(torch.equal(state[key], same[key]) for key in same)
    for x, y in zip(v["replay"].arrays.values(), whole["replay"].arrays.values(), strict=True):
        assert np.array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
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


@pytest.mark.parametrize("name", SCRIPTS)
def test_logged_keys_are_those_of_the_page(name, train):
    logged = {key for row in rows(trained(name, train)["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert logged == documented_keys(name)
    assert {"losses/qf1_values", "losses/qf1_loss", "losses/actor_loss"} <= logged
    assert "sac" not in name or {"losses/entropy", "losses/alpha", "losses/alpha_loss", "losses/qf_loss"} <= logged


def test_logged_metrics_are_means_since_the_last_row(train):
    """The means over the gradient steps of steps 51 to 100, the actor's over its own, from those of a run that ends one
    iteration before: the last iteration is logged, whatever its step."""
    flags = ["--env-id", diary("ddpg"), *SMALL, "--log-every", "50"]
    end, before = (train("ddpg_continuous_action", *flags, "--total-timesteps", n) for n in (100, 99))
    early, row = (rows(v["run"].dir, "losses/qf1_loss")[-1] for v in (before, end))
    assert (early["global_step"], row["global_step"]) == (99, 100)
    assert set(end["metrics"]) == {"losses/qf1_values", "losses/qf1_loss"}  # of gradient step 79, the critic's alone
    for name, last in end["metrics"].items():
        assert row[name] == pytest.approx((49 * early[name] + last.item()) / 50, rel=1e-5)
    assert row["losses/actor_loss"] == pytest.approx(early["losses/actor_loss"], rel=1e-6)


def test_what_diverges_after_the_last_row_is_seen(train):
    flags = "--total-timesteps 90 --learning-rate 1e30 --log-every 100".split()
    train("ddpg_continuous_action", "--env-id", diary("ddpg"), *SMALL, *flags, code=3)
    assert "losses/" in train.out and "Traceback" not in train.out


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
    """Twice the same observation, twice the same action, however the generators stand; observations of any shape and
    type, all of the range is reached."""
    torch.manual_seed(0)
    actor = definitions(name)["Actor"](6, 2)
    obs = np.random.default_rng(0).normal(size=(1000, 2, 3)) * 1000
    first = actor.act(obs)
    assert isinstance(first, np.ndarray) and np.array_equal(first, actor.act(obs)) and first.shape == (1000, 2)
    expected = np.tanh(reference(actor.net, obs.reshape(1000, 6).astype(np.float32))[:, :2])
    np.testing.assert_allclose(first, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose([first.min(0), first.max(0)], [[-1, -1], [1, 1]], atol=1e-3)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_the_actor_loss_gives_the_critics_no_gradient(name):
    """The gradient is the derivative of the loss in the actor's weights, and nothing else gets one."""
    torch.manual_seed(0)
    file, batch = definitions(name), random_batch()
    actor, critic = file["Actor"](3, 2).double(), file["Critic"](3, 2).double()
    inputs = (critic, torch.tensor(0.3), batch, torch.randn(16, 2)) if "sac" in name else (critic, batch)
    loss_of = next(value for key, value in file.items() if key.endswith("_actor_loss"))
    gradient, *_ = gradients_of(True, list(actor.parameters()), loss_of, actor, *inputs)
    vector = weights(actor)
    assert gradient.shape == vector.shape and gradient.abs().sum() > 0
    assert all(p.grad is None for p in critic.parameters()) and not gradient.requires_grad
    direction, losses = torch.randn_like(vector), []
    for step in (1e-8, -1e-8):  # small, so that no ReLU turns over
        torch.nn.utils.vector_to_parameters(vector + step * direction, actor.parameters())
        losses.append(loss_of(actor, *inputs)[0].item())
    assert (losses[0] - losses[1]) / 2e-8 == pytest.approx((gradient @ direction).item(), rel=1e-4)


def test_ddpg_losses_by_hand():
    """Sample by sample; no gradient reaches the targets."""
    torch.manual_seed(0)
    (actor, target_actor), (critic, target_critic) = (
        [make(3, 2).double() for _ in range(2)] for make in (DDPG["Actor"], DDPG["Critic"])
    )
    batch = random_batch()
    loss, metrics = DDPG["ddpg_critic_loss"](critic, target_critic, target_actor, batch, 0.9)
    next_action = np.tanh(reference(target_actor.net, batch.next_obs))
    bootstrap = reference(target_critic.q, batch.next_obs, next_action)[:, 0]
    value = reference(critic.q, batch.obs, batch.action)[:, 0]
    errors = []
    for i in range(16):
        target = batch.reward[i].item() + (0.0 if batch.done[i] else 0.9 * bootstrap[i])
        errors.append((value[i] - target) ** 2)
    assert loss.item() == pytest.approx(np.mean(errors))
    assert set(metrics) == {"losses/qf1_values", "losses/qf1_loss"}
    assert metrics["losses/qf1_values"].item() == pytest.approx(value.mean())
    assert metrics["losses/qf1_loss"].item() == pytest.approx(np.mean(errors))
    loss.backward()
    assert all(p.grad is None for net in (target_actor, target_critic) for p in net.parameters())
    assert all(p.grad is not None for p in critic.parameters())
    loss, metrics = DDPG["ddpg_actor_loss"](actor, critic, batch)
    expected = -reference(critic.q, batch.obs, np.tanh(reference(actor.net, batch.obs))).mean()
    assert set(metrics) == {"losses/actor_loss"}
    assert loss.item() == metrics["losses/actor_loss"].item() == pytest.approx(expected)


def test_td3_takes_the_smaller_of_two_targets():
    torch.manual_seed(0)
    actor, critic, target_critic = (
        make.double() for make in (TD3["Actor"](3, 2), TD3["Critic"](3, 2), TD3["Critic"](3, 2))
    )
    batch = random_batch()
    assert not torch.equal(critic.q1[0].weight, critic.q2[0].weight)
    spread(target_critic, batch.next_obs, actor(batch.next_obs))
    noise = torch.randn(16, 2, dtype=torch.float64)
    loss, metrics = TD3["td3_critic_loss"](critic, target_critic, actor, batch, noise, 0.5, 0.9)
    next_action = np.tanh(reference(actor.net, batch.next_obs)) + np.clip(noise.numpy(), -0.5, 0.5)
    first, second = values(target_critic, batch.next_obs, np.clip(next_action, -1, 1))
    assert (first > second).any() and (second > first).any()
    target = batch.reward.numpy() + 0.9 * (1 - batch.done.numpy()) * np.minimum(first, second)
    q = values(critic, batch.obs, batch.action)
    losses = [np.mean((value - target) ** 2) for value in q]
    assert loss.item() == pytest.approx(sum(losses), rel=1e-6)
    names = ("qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss")
    assert list(metrics) == [f"losses/{name}" for name in names]
    expected = [q[0].mean(), q[1].mean(), *losses, np.mean(losses)]
    np.testing.assert_allclose([x.item() for x in metrics.values()], expected, rtol=1e-6)
    loss.backward()
    assert all(p.grad is None for net in (actor, target_critic) for p in net.parameters())
    assert all(p.grad is not None for p in critic.parameters())
    loss, metrics = TD3["td3_actor_loss"](actor, critic, batch)
    expected = -values(critic, batch.obs, actor(batch.obs))[0].mean()
    assert loss.item() == metrics["losses/actor_loss"].item() == pytest.approx(expected, rel=1e-6)


def test_target_smoothing_is_clipped_and_stays_within_the_bounds():
    n = 50_000
    torch.manual_seed(0)
    moved = TD3["smoothed"](torch.zeros(n, 2), 0.2 * torch.randn(n, 2), 0.3)
    np.testing.assert_allclose(moved.abs().amax(0).numpy(), 0.3, rtol=1e-5)
    clipped = (moved.abs() > 0.2999).float().mean(0)  # 1.5 standard deviations: 13.4 % of a Gaussian
    np.testing.assert_allclose(clipped.numpy(), 0.1336, atol=0.01)
    assert abs(np.corrcoef(moved[:, 0], moved[:, 1])[0, 1]) < 0.03
    assert len(moved[:, 0].unique()) > n / 2
    for edge in (-1, 1):
        action = TD3["smoothed"](torch.full((n, 2), float(edge)), torch.randn(n, 2), 0.5)
        assert (action.abs() <= 1).all() and (action == edge).any(0).all() and (action != edge).any(0).all()


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


def regulated(train, name, *flags):
    """The return of what `name` has learned in 1,000 steps on Regulator: without actions -3.3 on average, with the best
    ones 0, with random ones far less."""
    words = "--total-timesteps 1000 --learning-starts 200 --batch-size 64 --gamma 0.9 --eval-every 0 --eval-episodes 50"
    v = train(name, "--env-id", "probes_offpolicy:Regulator-v0", *words.split(), *flags)
    return rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"]


def critic_at(v, obs):
    """The first critic's value of the greedy action."""
    obs = torch.tensor([[float(obs)]])
    value = v["critic"](obs, torch.as_tensor(v["actor"].act(obs.numpy())))
    return (value[0] if isinstance(value, tuple) else value).item()


def slow_except(quick, cases):
    """The cases as parameters, all but the quick ones marked as slow."""
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    ("name", "probe"),
    slow_except(
        [(CONTINUOUS[0], "AimAside"), (CONTINUOUS[1], "AimTiny"), (CONTINUOUS[2], "AimHuge")],
        [(name, probe) for name in CONTINUOUS for probe in ("AimAside", "AimTiny", "AimHuge")],
    ),
)
def test_learns_a_policy_of_the_observation_within_any_bounds(name, probe, train):
    """Random actions give -1.2; 0.1 of the range away from the best action in both dimensions gives -0.08."""
    v = learn(train, name, probe, "--num-envs", "2", "--total-timesteps", "364")
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > -0.2


@pytest.mark.parametrize(("name",), slow_except([CONTINUOUS[:1]], [[name] for name in CONTINUOUS]))
def test_learns_to_discount(name, train):
    v = learn(train, name, "DelayedBox", "--gamma", "0.5")
    assert critic_at(v, 0) == pytest.approx(0.5, abs=0.1) and critic_at(v, 1) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("name",), slow_except([CONTINUOUS[:1]], [[name] for name in CONTINUOUS]))
def test_value_of_a_constant_reward_under_a_time_limit(name, train):
    """The time limit is not the end of the task: 1 / (1 - gamma) = 5, where a limit taken for an end would give 3.3."""
    v = learn(train, name, "ForeverBox", "--gamma", "0.8")
    assert critic_at(v, 0) == pytest.approx(5, abs=0.3)
