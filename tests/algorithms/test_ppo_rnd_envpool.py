"""ppo_rnd_envpool.py: games with sticky actions, the images that predictor and target see, returns of two kinds."""

import numpy as np
import pytest
import torch
from conftest import definitions, rows
from pixel_probe import Corridor, FakePool, use_fake_envpool

from solorl.envs.envpool import EnvPoolVectorEnv

NAME = "ppo_rnd_envpool"
RND = definitions(NAME)
SMALL = (
    "--env-id Catch-v5 --num-envs 2 --num-steps 16 --total-timesteps 128 --num-minibatches 2 --update-epochs 1 "
    "--eval-episodes 1 --eval-every 0 --warmup-rollouts 2"
).split()
STILL = [*SMALL, "--learning-rate", "0"]  # a function of its rollouts: two of random actions, two that are learned from


@pytest.fixture(autouse=True)
def games(monkeypatch):
    """Doubles in the place of EnvPool's games; a list of what the steps of training and evaluation gave."""
    seen, step = [], EnvPoolVectorEnv.step

    def note(self, actions):
        seen.append(step(self, actions))
        return seen[-1]

    use_fake_envpool(monkeypatch)
    monkeypatch.setattr(EnvPoolVectorEnv, "step", note)
    return seen


def images_after(steps):
    """The newest images (steps, num_envs, 84, 84) after each step, those of games that end their last ones."""
    images = np.stack([obs[:, -1] for obs, *_ in steps])
    for t, (*_, terminated, truncated, infos) in enumerate(steps):
        for i in np.flatnonzero(terminated | truncated):
            images[t, i] = infos["final_obs"][i][-1]
    return images


def limit(monkeypatch, steps):
    """Cut games off after this number of steps; Catch has six."""
    init = EnvPoolVectorEnv.__init__

    def cut(*args, max_steps, **kwargs):
        init(*args, max_steps=steps, **kwargs)

    monkeypatch.setattr(EnvPoolVectorEnv, "__init__", cut)


# ---------------------------------------------------------------------- games
def test_actions_stick_and_games_are_cut_in_training_and_evaluation(train, monkeypatch):
    """18,000 frames are 4,500 steps; EnvPool's own limit is one more."""
    seen, init = [], FakePool.__init__

    def note(self, *args, **kwargs):
        seen.append((kwargs["repeat_action_probability"], kwargs["max_episode_steps"]))
        init(self, *args, **kwargs)

    monkeypatch.setattr(FakePool, "__init__", note)
    train(NAME, *STILL)
    assert len(seen) >= 2 and set(seen) == {(0.25, 4501)}


def test_envpool_takes_the_options(monkeypatch):
    """The real one, if it is installed."""
    monkeypatch.undo()  # the doubles
    pytest.importorskip("envpool")
    envs = RND["sticky_envs"]("Breakout-v5", 1)
    obs, _ = envs.reset(seed=1)
    assert obs.shape == (1, 4, 84, 84) and envs.pool.config["repeat_action_probability"] == 0.25
    assert envs.pool.config["max_episode_steps"] == 4501


def test_a_lost_life_ends_nothing(train, monkeypatch):
    info = FakePool._info

    def with_lives(self, ids, reward, terminated):
        return info(self, ids, reward, terminated) | {"lives": 3 - self.elapsed[ids] // 2}

    expected = train(NAME, *STILL)["returns"]
    monkeypatch.setattr(FakePool, "_info", with_lives)
    v = train(NAME, *STILL)
    lengths = {row["charts/episodic_length"] for row in rows(v["run"].dir, "charts/episodic_length")}
    assert lengths == {6.0} and np.array_equal(v["returns"], expected)


# ---------------------------------------------------------------------- what predictor and target see
def test_statistics_are_those_of_each_pixel_of_all_images(train, games):
    v = train(NAME, *STILL)
    images = images_after(games[:64]).reshape(128, 1, 84, 84).astype(np.float64)
    got = v["obs_normalizer"]
    assert got.count == 128 and got.mean.shape == (1, 84, 84)
    np.testing.assert_allclose(got.mean, images.mean(0), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(got.var, images.var(0), rtol=1e-3, atol=0.1)


def test_each_step_reaches_the_last_image_of_its_game(train, games):
    """Not the first one of the next game; the policy sees four images, predictor and target one."""
    v = train(NAME, *STILL)
    steps = games[48:64]
    assert v["done"].any() and np.array_equal(v["reached"][:, :, 0], images_after(steps))
    assert np.array_equal(v["obs"][1:], np.stack([obs for obs, *_ in steps])[:-1])
    assert not any((v["reached"][t, i] == steps[t][0][i, -1]).all() for t, i in np.argwhere(v["done"]))


def test_pixels_are_normalised_and_clipped_before_the_convolutions():
    """By hand, a network of each kind; pixels that never changed are 0, or 5 once they do."""
    statistics = RND["TensorMeanStd"](1, 84, 84)
    data = torch.randint(0, 256, (50, 1, 84, 84)).float()
    data[:, 0, 0, 0] = 7
    statistics.update(data)
    x = torch.randint(0, 256, (3, 1, 84, 84), dtype=torch.uint8)
    x[0, 0, 0, 0], x[1, 0, 0, 0] = 7, 8
    x[2] = 255
    want = ((x.float() - data.mean(0)) / (data.var(0, correction=0) + 1e-8).sqrt()).clamp(-5, 5)
    assert want[0, 0, 0, 0] == 0 and want[1, 0, 0, 0] == 5
    for num_layers in (1, 3):
        network = RND["frame_cnn"](statistics, num_layers)
        assert sum(isinstance(layer, torch.nn.Linear) for layer in network) == num_layers
        assert not isinstance(network[-1], torch.nn.ReLU)
        torch.testing.assert_close(network[:2](x), want, atol=1e-4, rtol=1e-4)
        assert network(x).shape == (3, 512) and network[0] is statistics


def test_the_target_never_changes_and_the_predictor_does(train):
    flags = [*SMALL, "--learning-rate", "0.01"]
    short, long = (train(NAME, *flags, "--total-timesteps", steps) for steps in (96, 128))
    vector = torch.nn.utils.parameters_to_vector
    assert torch.equal(*(vector(v["target"].parameters()) for v in (short, long)))
    assert not torch.equal(*(vector(v["predictor"].parameters()) for v in (short, long)))
    assert not any(p.requires_grad for p in long["target"].parameters())


# ---------------------------------------------------------------------- rewards and returns
def test_the_intrinsic_reward_is_the_error_on_the_image_reached(train):
    v = train(NAME, *STILL)
    with torch.no_grad():
        images = torch.as_tensor(v["reached"]).flatten(0, 1)
        want = ((v["predictor"](images) - v["target"](images)) ** 2).mean(1).reshape(16, 2)
    np.testing.assert_allclose(v["int_reward"], want, rtol=1e-4)
    torch.testing.assert_close(v["rollout"].features, v["target"](images))


def test_intrinsic_returns_run_over_time_in_each_environment(train):
    """A loop over the rewards of each environment; the ends of games change nothing."""
    v = train(NAME, *STILL, "--total-timesteps", "96", "--int-gamma", "0.9")  # one rollout after the warm-up
    reward, expected = v["int_reward"], np.zeros((16, 2))
    assert v["done"].any()
    for i in range(2):
        for t in range(16):
            expected[t, i] = sum(0.9 ** (t - k) * reward[k, i] for k in range(t + 1))
    np.testing.assert_allclose(v["int_returns"], expected, rtol=1e-4)
    np.testing.assert_allclose(v["now"].so_far, expected[-1], rtol=1e-4)
    np.testing.assert_allclose(v["scaled_int_reward"], reward / expected.std(), rtol=1e-3)


def test_clipped_rewards_end_with_the_game_and_intrinsic_ones_never(train, monkeypatch):
    """Lambda 1: an advantage is the discounted rewards to the end less the value. The log has the raw rewards."""
    step = FakePool.step

    def five_times(self, actions):
        obs, reward, *others = step(self, actions)
        return obs, 5 * reward, *others

    monkeypatch.setattr(FakePool, "step", five_times)
    v = train(NAME, *STILL, "--gae-lambda", "1")
    logged = {row["charts/episodic_return"] for row in rows(v["run"].dir, "charts/episodic_return")}
    reward, done, expected = v["scaled_int_reward"], v["done"], np.zeros((2, 16, 2))
    assert logged and logged <= {5.0, -5.0} and done[:-1].any() and (np.abs(v["reward"]) == 5).any()
    for i in range(2):
        ext, intr = v["next_value"][i]
        for t in reversed(range(16)):
            ext = np.sign(v["reward"][t, i]) + 0.999 * (1 - done[t, i]) * ext
            intr = reward[t, i] + 0.99 * intr
            expected[:, t, i] = ext, intr
    np.testing.assert_allclose(v["returns"], expected.transpose(1, 2, 0), rtol=1e-4, atol=1e-4)
    advantage = 2 * (expected[0] - v["value"][..., 0]) + expected[1] - v["value"][..., 1]
    np.testing.assert_allclose(v["advantage"], advantage, rtol=1e-4, atol=1e-4)


def test_a_time_limit_bootstraps_from_the_four_images_of_the_final_observation(train, monkeypatch, games):
    limit(monkeypatch, 3)
    v = train(NAME, *STILL)
    cut = np.argwhere(v["timeout"])
    assert len(cut) >= 4 and np.array_equal(v["timeout"], v["done"]) and (v["final_value"][~v["timeout"]] == 0).all()
    for t, i in cut:
        final_obs = games[48 + t][4]["final_obs"][i]
        with torch.no_grad():
            want = v["agent"](torch.as_tensor(final_obs[None]))[1][0, 0].item()
        assert v["final_value"][t, i] == pytest.approx(want, abs=1e-5) and not np.array_equal(final_obs, v["obs"][t, i])


# ---------------------------------------------------------------------- runs
@pytest.mark.parametrize(("steps", "start"), [(96, 1), (128, 2)])
def test_a_resumed_run_has_all_that_was_learned(steps, start, train):
    """EnvPool's games begin again: what is equal are networks, statistics and the discounted intrinsic rewards."""
    flags = [*SMALL, "--learning-rate", "0.01", "--total-timesteps", steps, "--save-every", "32"]
    v = train(NAME, *flags)
    state = {name: {k: x.clone() for k, x in v[name].state_dict().items()} for name in ("agent", "predictor", "target")}
    var, so_far = v["return_normalizer"].var.item(), v["now"].so_far.copy()
    resume = ["--resume", v["run"].dir, "--resume-changed", "--total-timesteps", steps + 32, "--learning-rate", "0"]
    again = train(NAME, *resume, "--int-gamma", "1")
    assert again["start"] == start and again["obs_normalizer"].count == steps + 32
    for name, saved in state.items():
        statistics = {"0.mean", "0.var", "0.count"}
        assert all(torch.equal(x, again[name].state_dict()[k]) for k, x in saved.items() if k not in statistics), name
    np.testing.assert_allclose(again["now"].so_far, so_far + again["int_reward"].sum(0), rtol=1e-4)
    assert again["run"].checkpoints.parts["target"] is again["target"]  # the seed alone would draw it again, here
    assert again["predictor"][0] is again["target"][0] is again["obs_normalizer"]
    assert again["return_normalizer"].count == steps - 32 and var != 1


def test_a_budget_that_the_warm_up_uses_up_is_refused(train):
    train(NAME, *SMALL, "--total-timesteps", "64", code=2)
    assert "--total-timesteps leaves no rollout to learn from after --warmup-rollouts" in train.out


# ---------------------------------------------------------------------- exploration
def test_the_corridor_gives_its_reward_behind_the_last_door():
    """The probe itself: ten right handles; a wrong one leads back to the first door."""
    game = Corridor(0)
    game.reset(np.random.default_rng(0))
    played = [*Corridor.handles[:9], (Corridor.handles[9] + 1) % 3, *Corridor.handles]
    seen = [game.step(action) for action in played for _ in range(4)]
    assert [reward for reward, _ in seen] == [0.0] * 79 + [1.0] and [over for _, over in seen] == [False] * 79 + [True]
    game.reset(np.random.default_rng(0))
    assert [over for _, over in (game.step(0) for _ in range(120))] == [False] * 119 + [True]


EXPLORE = "--env-id Corridor-v5 --num-envs 8 --num-steps 32 --total-timesteps 8192 --learning-rate 0.0005 --gamma 0.99"


@pytest.mark.slow
def test_finds_the_reward_behind_ten_doors(train):
    """One attempt in 59,049 of random actions passes them, and there are at most 8,192 steps."""
    flags = [*EXPLORE.split(), "--warmup-rollouts", "2", "--ent-coef", "0.01", "--eval-every", "1024"]
    v = train(NAME, *flags, "--target-return", "0.9")
    assert v["run"].evaluator.score >= 0.9
