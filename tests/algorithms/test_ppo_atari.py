"""ppo_atari.py and ppo_atari_envpool.py: the wrappers against the raw emulator, what a rollout holds, resuming."""

import sys

import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, comparable, definitions, drop_last_checkpoint, refused, rows
from gymnasium.vector import SyncVectorEnv
from pixel_doubles import LIFE
from pixel_probe import use_fake_envpool

from solorl.run.ending import Ending
from solorl.run.evaluation import play_episodes

ATARI = definitions("ppo_atari")
FILES = ["ppo_atari", "ppo_atari_envpool"]
DIARY = "--env-id pixel_doubles:PixelDiary-v0 --num-envs 2 --num-steps 32 --num-minibatches 2 --eval-episodes 1".split()
STILL = [*DIARY, "--learning-rate", "0", "--total-timesteps", "128", "--update-epochs", "1"]
SHORT = "--num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1 --eval-episodes 1".split()


def diary():
    return gym.make("pixel_doubles:PixelDiary-v0", obs_type="grayscale", frameskip=1, max_num_frames_per_episode=0)


# ---------------------------------------------------------------------- wrappers
def test_a_game_begins_with_1_to_30_no_ops():
    env = ATARI["RandomNoops"](diary())
    counts = []
    for seed in range(400):
        env.reset(seed=seed)
        assert set(env.unwrapped.pressed) == {0}
        counts.append(len(env.unwrapped.pressed))
    assert set(counts) == set(range(1, 31))


def test_fire_is_pressed_at_the_start_and_after_a_lost_life():
    """Whatever the policy wants in that step; never else."""
    env = ATARI["make_env"]("pixel_doubles:PixelDiary-v0")
    for _ in range(3):
        env.reset(seed=5)
        game = env.unwrapped
        noops = len(game.pressed) - 4
        assert 1 <= noops <= 30 and game.pressed == [0] * noops + [1] * 4
        over, lost, wanted = False, None, [0] * noops + [1] * 4
        while not over:
            action = 1 if lost is not None and lost == len(wanted) else 2
            wanted += [action] * 4
            lives_before = game.frames < LIFE
            _, _, terminated, truncated, info = env.step(2)
            if lives_before and info["lives"] == 2:
                lost = len(wanted)
            over = terminated or truncated
        assert game.pressed == wanted[: len(game.pressed)] and lost and game.pressed[lost : lost + 4] == [1] * 4


def test_games_without_the_button_fire_are_left_alone():
    """Freeway's second action is UP."""
    env = ATARI["make_env"]("ALE/Freeway-v5")
    before = env.unwrapped.step
    pressed = []
    env.unwrapped.step = lambda action: pressed.append(action) or before(action)
    env.reset(seed=1)
    assert set(pressed) == {0} and 1 <= len(pressed) <= 30


def test_breakout_goes_on_after_a_lost_life():
    """A policy that never presses FIRE loses all five lives in one episode: of `make_env`, so in training and in
    evaluation. In the game alone the ball would never come again."""
    env, lives = ATARI["make_env"]("BreakoutNoFrameskip-v4"), []
    env.reset(seed=1)
    over = False
    while not over:
        _, _, over, truncated, info = env.step(0)
        lives.append(info["lives"])
        assert not truncated and len(lives) < 1_000
    assert set(lives) == {5, 4, 3, 2, 1, 0} and lives.index(0) == len(lives) - 1
    returns, lengths = play_episodes([env], lambda obs: np.zeros(len(obs), int), [1])
    assert lengths == [len(lives)] and returns[0] >= 0
    raw = gym.make("BreakoutNoFrameskip-v4")
    raw.reset(seed=1)
    raw.step(1)
    assert {raw.step(0)[4]["lives"] for _ in range(1_500)} == {5, 4}


@pytest.mark.parametrize("env_id", ["ALE/Breakout-v5", "BreakoutNoFrameskip-v4", "ALE/Pong-v5"])
def test_observations_are_those_of_a_loop_over_the_emulator(env_id):
    """Four frames a step, the larger of the last two images, made smaller, the last four of them; rewards are sums.
    With the sticky actions of the version v5, whose draws are those of the emulator."""
    env, raw = ATARI["make_env"](env_id), gym.make(env_id, obs_type="grayscale", frameskip=1)
    obs, _ = env.reset(seed=3)
    raw.reset(seed=3)
    lives, images = raw.unwrapped.ale.lives(), []

    def step(action):
        frames, total = [], 0.0
        for _ in range(4):
            frame, reward, over, _, _ = raw.step(action)
            frames.append(frame)
            total += reward
            if over:
                break
        images.append(cv2.resize(np.maximum(*frames[-2:]), (84, 84), interpolation=cv2.INTER_AREA))
        return total, over

    for _ in range(raw.unwrapped.np_random.integers(1, 31)):
        raw.step(0)
    step(1)
    images *= 4
    np.testing.assert_array_equal(obs, images)
    rng, total = np.random.default_rng(0), 0.0
    for _ in range(120):
        action = int(rng.integers(4))
        obs, reward, terminated, truncated, _ = env.step(action)
        now = raw.unwrapped.ale.lives()
        fire, lives = now < lives, now
        want, over = step(1 if fire else action)
        np.testing.assert_array_equal(obs, images[-4:])
        assert (reward, terminated, truncated) == (want, over, False) and obs.dtype == np.uint8
        total += abs(reward)
        if over:
            break
    assert total > 0


def test_sticky_actions_are_those_of_the_id():
    kwargs = {env_id: ATARI["make_env"](env_id).unwrapped for env_id in ("ALE/Pong-v5", "PongNoFrameskip-v4")}
    repeat = [game.ale.getFloat("repeat_action_probability") for game in kwargs.values()]
    assert repeat == [0.25, 0.0]


@pytest.mark.parametrize("env_id", ["ALE/Breakout-v5", "BreakoutNoFrameskip-v4", "pixel_doubles:PixelDiary-v0"])
def test_the_limit_is_27000_steps(env_id):
    """And no other limit comes before: neither the emulator's nor one that the id brings."""
    env = ATARI["make_env"](env_id)
    env.reset(seed=1)
    env._elapsed_steps = 26_998
    assert [env.step(0)[2:4] for _ in range(2)] == [(False, False), (False, True)]
    if "Diary" not in env_id:
        assert env.unwrapped.ale.getInt("max_num_frames_per_episode") == 0
    inner = env.env
    while isinstance(inner, gym.Wrapper):
        assert (getattr(inner, "_max_episode_steps", None) or 10**9) > 108_100, inner  # frames
        inner = inner.env


# ---------------------------------------------------------------------- the rollout
KEPT = []


@pytest.fixture
def still(train, monkeypatch):
    """Variables of two rollouts with frozen weights, and the `infos` of the second; trained once for all tests."""
    infos, step = [], SyncVectorEnv.step
    if KEPT:
        return KEPT[0]

    def note(self, action):
        result = step(self, action)
        infos.append(result[4])
        return result

    monkeypatch.setattr(SyncVectorEnv, "step", note)
    v = train("ppo_atari", *STILL)
    KEPT.append((v, infos[-32:]))
    return KEPT[0]


def test_rewards_are_clipped_in_the_loss_and_raw_in_the_episodes(still):
    v, _ = still
    assert set(np.unique(v["reward"])) == {0, 5}
    episodes = rows(v["run"].dir, "charts/episodic_return")
    assert len(episodes) >= 4 and all(row["charts/episodic_return"] == 5 for row in episodes)
    value, returns = v["value"], v["rollout"].returns.reshape(32, 2).numpy()
    want = ATARI["gae"](v["reward"] / 5, value, v["done"], v["final_value"], v["next_value"], 0.99, 0.95) + value
    np.testing.assert_allclose(returns, want, atol=1e-5)
    assert np.abs(returns).max() < 3


def test_a_lost_life_ends_the_return_but_not_the_episode(still):
    v, _ = still
    returns = v["rollout"].returns.reshape(32, 2).numpy()
    lost = np.argwhere((v["done"] == 1) & ~v["over"])
    assert len(lost) >= 2
    for t, n in lost:
        assert returns[t, n] == pytest.approx(0, abs=1e-6) and v["final_value"][t, n] == 0
        assert t == 31 or v["obs"][t + 1, n, -1, 0, 0] > v["obs"][t, n, -1, 0, 0]  # the frames go on
    lengths = [row["charts/episodic_length"] for row in rows(v["run"].dir, "charts/episodic_length")]
    assert len(lengths) >= 4 and all(12 <= length <= 19 for length in lengths)  # whole games


def test_a_time_limit_bootstraps_and_an_end_does_not(still):
    v, infos = still
    assert v["timeout"].any() and (v["over"] & ~v["timeout"]).any()
    returns = v["rollout"].returns.reshape(32, 2).numpy()
    for t, n in np.argwhere(v["over"]):
        want = 0.0
        if v["timeout"][t, n]:
            final_obs = torch.as_tensor(infos[t]["final_obs"][n])[None]
            assert not np.array_equal(final_obs[0], infos[t]["final_obs"][n] * 0)
            with torch.no_grad():
                want = v["agent"](final_obs)[1].item()
            assert want != 0
        assert v["final_value"][t, n] == pytest.approx(want, abs=1e-5)
        assert returns[t, n] == pytest.approx(np.sign(v["reward"][t, n]) + 0.99 * want, abs=1e-5)
    assert (v["final_value"][~v["timeout"]] == 0).all()


@pytest.mark.parametrize("name", FILES)
def test_loss_and_act_are_those_of_the_network(name):
    """Eq. 9 in NumPy from logits and values; the greedy action is the most likely one."""
    torch.manual_seed(0)
    file = definitions(name)
    agent, obs = file["Agent"](4), torch.randint(0, 256, (6, 4, 84, 84), dtype=torch.uint8)
    torch.nn.init.orthogonal_(agent.actor.weight)
    action, (old_value, advantage, returns) = torch.randint(0, 4, (6,)), torch.randn(3, 6)
    with torch.no_grad():
        logits, v = (x.double().numpy() for x in agent(obs))
        old_logprob = agent.evaluate_actions(obs, action)[0] + 0.2 * torch.randn(6)
    assert agent.act(obs.numpy()).tolist() == logits.argmax(1).tolist() and len(set(logits.argmax(1))) > 1
    args = file["Args"](norm_adv=False, clip_vloss=False)
    batch = file["Batch"](obs, action, old_logprob, old_value, advantage, returns)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    ratio = p[np.arange(6), action] / np.exp(old_logprob.double().numpy())
    adv = advantage.double().numpy()
    policy = np.minimum(ratio * adv, ratio.clip(0.9, 1.1) * adv).mean()
    value_loss, entropy = 0.5 * ((v - returns.numpy()) ** 2).mean(), -(p * np.log(p)).sum(1).mean()
    loss = file["ppo_loss"](agent, batch, args)[0].item()
    assert loss == pytest.approx(-policy + 0.5 * value_loss - 0.01 * entropy, rel=1e-4)


@pytest.mark.parametrize("name", FILES)
def test_first_ratio_is_one(name, train, monkeypatch):
    use_fake_envpool(monkeypatch)
    env_id = "Catch-v5" if "envpool" in name else "pixel_probe:Catch-v0"
    flags = [*SHORT, "--num-minibatches", "1", "--total-timesteps", "32", "--learning-rate", "0.01"]
    v = train(name, "--env-id", env_id, *flags)
    assert len(v["kl"]) == 1 and all(abs(v["metrics"][f"losses/{key}"]) < 1e-6 for key in ("approx_kl", "clipfrac"))
    keys = {key for row in rows(v["run"].dir) for key in row} - {"global_step", "wall_time"}
    page = (ROOT / "algorithms" / "ppo" / "README.md").read_text()
    assert keys <= {word for word in page.split("`") if word.partition("/")[0] in ("charts", "losses", "eval")}


# ---------------------------------------------------------------------- EnvPool
@pytest.mark.slow
def test_trains_on_envpool_itself(train, monkeypatch):
    """200 steps of Pong: images, raw rewards, evaluation in EnvPool (cut, for a game is a thousand steps)."""
    pytest.importorskip("envpool")
    monkeypatch.setattr("solorl.run.evaluation.MAX_STEPS", 20)
    flags = "--num-envs 4 --num-steps 25 --num-minibatches 2 --update-epochs 1 --total-timesteps 200".split()
    v = train("ppo_atari_envpool", "--env-id", "Pong-v5", *flags, "--eval-episodes", "2", "--seed", "3")
    assert v["obs"].shape == (25, 4, 4, 84, 84) and v["obs"].dtype == np.uint8 and v["num_actions"] == 6
    assert set(np.unique(v["reward"])) <= {-1, 0, 1} and not v["over"].any()
    np.testing.assert_array_equal(v["obs"][1:, :, :3], v["obs"][:-1, :, 1:])  # stacks of the last four images
    assert v["obs"].std() > 1 and rows(v["run"].dir, "losses/value_loss")[-1]["global_step"] == 200


def test_envpool_resumes_with_new_games_and_says_so(train, monkeypatch):
    use_fake_envpool(monkeypatch)
    flags = ["--env-id", "Catch-v5", *SHORT, "--total-timesteps", "80", "--save-every", "48"]
    whole = train("ppo_atari_envpool", *flags)
    run_dir = whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("ppo_atari_envpool", "--resume", run_dir)
    assert "the state of EnvPoolVectorEnv cannot be saved, so its running episodes restart" in train.out
    assert v["start"] == 3 and rows(run_dir, "losses/value_loss")[-1]["global_step"] == 80
    games = rows(run_dir, "charts/episodic_length")
    assert games and all(row["charts/episodic_length"] == 6 for row in games)  # none counted over the interruption


# ---------------------------------------------------------------------- resuming
@pytest.mark.slow
@pytest.mark.parametrize("stop", [True, False])
def test_resumed_equals_uninterrupted_with_sticky_actions(stop, train, monkeypatch):
    """Stopped after half of it, or its last checkpoint lost as after a kill; in the middle of games of Breakout."""
    flags = ["--env-id", "ALE/Breakout-v5", *SHORT, "--num-steps", "32", "--total-timesteps", "256", "--eval-every=0"]
    flags += ["--learning-rate", "0.001", "--save-every", "128", "--ent-coef", "0.1"]
    whole = train("ppo_atari", *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    if stop:
        with monkeypatch.context() as asked:
            asked.setattr(Ending, "_stop_asked", lambda ending: ending.meter.iteration == 1)
            run_dir = train("ppo_atari", *flags)["run"].dir
    else:
        drop_last_checkpoint(run_dir)
    assert [path.name for path in sorted((run_dir / "checkpoint").iterdir())][-1] == "step_000000000128"
    v = train("ppo_atari", "--resume", run_dir)
    assert v["start"] == 2 and comparable(run_dir) == expected
    for name, x in whole["agent"].state_dict().items():
        assert torch.equal(x, v["agent"].state_dict()[name]), name
    for name in ("obs", "action", "reward", "done"):
        assert np.array_equal(v[name], whole[name]), name
    assert np.array_equal(v["now"].lives, whole["now"].lives)
    assert whole["done"].any() and (whole["obs"][0] != whole["obs"][-1]).any()


# ---------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("name", "env_id", "words"),
    [
        ("ppo_atari", "CartPole-v1", ["CartPole-v1 is not an Atari game", "ppo.py"]),
        ("ppo_atari", "Pong-v5", ["there is no environment Pong-v5", "ALE/Pong-v5"]),
        ("ppo_atari_envpool", "ALE/Pong-v5", ["EnvPool has no environment ALE/Pong-v5", "Pong-v5"]),
        ("ppo_atari_envpool", "PongNoFrameskip-v4", ["EnvPool has no environment", "did you mean Pong-v5?"]),
        ("ppo_atari_envpool", "CartPole-v1", ["CartPole-v1 is not an Atari game", "ppo.py"]),
    ],
)
def test_another_kind_of_environment_is_refused(name, env_id, words, train):
    train(name, "--env-id", env_id, code=2)
    assert train.out.count("\n") == 1 and "Traceback" not in train.out, train.out
    assert all(word in train.out for word in words), train.out


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("ppo_atari", "ale_py", "atari"),
        ("ppo_atari", "cv2", "atari"),
        ("ppo_atari_envpool", "envpool", "envpool"),
        ("ppo_atari_envpool", "ale_py", "atari"),
    ],
)
def test_a_missing_package_names_its_extra(name, module, extra, solo, monkeypatch):
    find_spec = "importlib.util.find_spec"
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr(find_spec, lambda one, *more: None if one == module else found(one, *more))
    monkeypatch.setitem(sys.modules, module, None)
    refused(solo("train", name), f"solorl[{extra}]")
