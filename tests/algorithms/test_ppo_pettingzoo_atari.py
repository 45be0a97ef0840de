"""ppo_pettingzoo_atari.py: what each player sees, credit for each of them, players who leave early, opponents."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, refused, rows
from gymnasium.utils.seeding import np_random
from pixel_duel import LEAVES, ROUND, ROUNDS, Signals, walkout

from solorl.envs.pettingzoo import Game, PettingZooEnvs
from solorl.run.evaluation import play_episodes
from solorl.run.verbs import Run

PLAYERS = definitions("ppo_pettingzoo_atari")
FILE = "ppo_pettingzoo_atari.py"
SIGNALS, WALKOUT = "pixel_duel:atari/signals_v0", "pixel_duel:atari/walkout_v0"
SMALL = (
    "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 1 --total-timesteps 64 --eval-episodes 1".split()
)
ONCE = [*SMALL, "--total-timesteps", "32", "--env-id", WALKOUT]


def frames_of(game, seed):
    """Frame by frame with the raw API: `play(actions)` gives the screen, the rewards and who still plays."""
    rng = np_random(seed)[0]
    obs, _ = game.reset(seed=int(rng.integers(2**31)))
    noops = int(rng.integers(1, 31))

    def play(actions):
        acting = dict(zip(game.possible_agents, actions, strict=True))
        obs, rewards, *_ = game.step({name: acting[name] for name in game.agents})
        return next(iter(obs.values()))[..., 0], [rewards.get(name, 0.0) for name in game.possible_agents]

    return obs["first_0"][..., 0], play, noops


@pytest.mark.parametrize(("make", "players"), [(Signals, 2), (walkout, 3)])
def test_players_see_the_last_four_images_of_the_screen_and_who_they_are(make, players):
    """Against a loop over frames: the larger of the last two of each four, rewards summed, each player's own plane."""
    env, rng = PLAYERS["Players"](Game(make(obs_type="grayscale_image"), "each")), np.random.default_rng(0)
    for seed in (1, 2, 3):
        screen, play, noops = frames_of(make(obs_type="grayscale_image"), seed)
        obs, _ = env.reset(seed=seed)
        for _ in range(noops):
            screen, _ = play([0] * players)
        images, over = [screen] * 4, False
        while not over:
            assert obs.shape == (players, 4 + players, 84, 84) and obs.dtype == np.uint8
            assert env.observation_space.contains(obs)
            for k in range(players):
                np.testing.assert_array_equal(obs[k, :4], images[-4:])
                assert [plane.min() for plane in obs[k, 4:]] == [plane.max() for plane in obs[k, 4:]]
                assert [plane.max() for plane in obs[k, 4:]] == [32 * (k == j) for j in range(players)]
            action, screens, total = rng.integers(3, size=players), [], np.zeros(players)
            obs, reward, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
            for _ in range(4 if not over else env.unwrapped.game.frame - (noops + 4 * (len(images) - 4))):
                screen, rewards = play(action)
                screens, total = [*screens, screen], total + rewards
            images.append(np.max(screens[-2:], axis=0))
            np.testing.assert_array_equal(reward, total)
        assert env.unwrapped.game.frame == ROUND * ROUNDS


def test_games_begin_with_1_to_30_frames_of_doing_nothing():
    env = PLAYERS["Players"](Game(Signals("grayscale_image"), "each"))
    env.reset(seed=1)
    found = []
    for _ in range(300):
        env.reset()
        found.append(env.unwrapped.game.frame)
    assert set(found) == set(range(1, 31))


def test_every_row_of_the_policy_is_one_player_of_one_game():
    agent = PLAYERS["Agent"](6, 5)
    obs = np.random.default_rng(0).integers(256, size=(3, 2, 6, 84, 84), dtype=np.uint8)
    with torch.no_grad():
        agent.actor.bias -= agent(torch.as_tensor(obs).flatten(0, 1))[0].mean(0)
    want = np.array([[int(agent(torch.as_tensor(one[None]))[0].argmax()) for one in game] for game in obs])
    assert np.array_equal(agent.act(obs), want) and want.std() > 0


def test_the_background_of_an_image_is_not_seen_and_who_one_is_is():
    """A screen that is brighter everywhere is the same to the network; planes are left as they are."""
    obs = np.random.default_rng(0).integers(200, size=(2, 6, 84, 84), dtype=np.uint8)
    brighter = obs.copy()
    brighter[:, :4] += 50
    one, two = (PLAYERS["Centred"]()(torch.as_tensor(x)) for x in (obs, brighter))
    np.testing.assert_allclose(one, two, atol=1e-6)
    np.testing.assert_allclose(one[:, 4:], obs[:, 4:] / 255, atol=1e-6)
    want = obs[:, :4] / 255 - (obs[:, :4] / 255).mean((2, 3), keepdims=True)
    np.testing.assert_allclose(one[:, :4], want, atol=1e-6)


# ---------------------------------------------------------------------- credit
@pytest.fixture
def walked(train):
    """The variables after one rollout of 16 steps in which players leave, and weights did not change."""
    return train("ppo_pettingzoo_atari", *ONCE, "--learning-rate", "0")


def frames_played(v):
    """(17, num_envs): how many frames of its game were played at each observation, as the screen shows."""
    screens = np.concatenate([v["obs"], v["next_obs"][None]])[:, :, 0, 3, -1]
    return (screens == 128).sum(-1)


def test_the_advantage_of_each_player_is_that_of_its_own_life(walked):
    """By the sum of Eq. 11 over the steps from here to where the player leaves, without a look at anybody else."""
    v, gamma, lam = walked, 0.99, 0.95
    frames, alive, limits = frames_played(v), np.zeros((16, 2, 3), bool), 0
    for i, (k, name), start in itertools.product(range(2), enumerate(v["envs"].agents), range(16)):
        leaves, by_limit = LEAVES.get(name, (ROUND * ROUNDS, False))
        if frames[start, i] >= leaves:
            continue
        want, weight, t, left = 0.0, 1.0, start, False
        while t < 16 and not left:
            left = frames[t + 1, i] < frames[t, i] or frames[t + 1, i] >= leaves  # the next game, or this one after it
            after = v["next_value"][i, k] if t == 15 else v["value"][t + 1, i, k]
            if left:
                after, limits = v["final_value"][t, i, k] if by_limit else 0.0, limits + by_limit
            want += weight * (np.sign(v["reward"][t, i, k]) + gamma * after - v["value"][t, i, k])
            weight, t = weight * gamma * lam, t + 1
        assert v["advantage"][start, i, k] == pytest.approx(want, abs=1e-5), (start, i, k)
        alive[start, i, k] = True
    np.testing.assert_array_equal(alive, v["alive"])
    with torch.no_grad():
        for images, values in (("obs", "value"), ("next_obs", "next_value")):
            want = v["agent"](torch.as_tensor(v[images]).flatten(0, -4))[1].numpy()
            np.testing.assert_allclose(v[values].flatten(), want, atol=1e-5)
    assert limits and not alive.all() and np.abs(v["reward"]).max() == 2


def test_nothing_is_learned_from_players_who_have_left(walked):
    """A batch has the rows of those who played, each once."""
    v = walked
    alive, rollout = v["alive"], v["rollout"]
    assert len(rollout.action) == alive.sum() < alive.size and alive.any(-1).all()
    for name in ("obs", "action", "logprob", "value", "advantage"):
        np.testing.assert_array_equal(getattr(rollout, name).numpy(), v[name][alive])
    np.testing.assert_allclose(rollout.returns, rollout.advantage + rollout.value)


def test_what_players_who_have_left_see_and_get_changes_no_weight(train, monkeypatch):
    plain, noises, step = train("ppo_pettingzoo_atari", *ONCE), [], PettingZooEnvs.step

    def noisy(envs, actions):
        left = ~envs.alive
        obs, reward, terminated, truncated, infos = step(envs, actions)
        left &= ~envs.alive  # also now: of the same game
        obs[left], reward[left] = np.random.default_rng(0).integers(256, size=obs[left].shape), 1.0
        noises.append(left.sum())
        return obs, reward, terminated, truncated, infos

    monkeypatch.setattr(PettingZooEnvs, "step", noisy)
    other = train("ppo_pettingzoo_atari", *ONCE)
    assert sum(noises) and not np.array_equal(plain["obs"], other["obs"])
    for one, two in zip(plain["agent"].parameters(), other["agent"].parameters(), strict=True):
        assert torch.equal(one, two)


def test_minibatches_are_all_rows_of_those_who_played(train, monkeypatch):
    sizes = []

    def counting(run, loss, *inputs):
        def step(batch, args):
            sizes.append(len(batch.action))
            return {"losses/approx_kl": torch.zeros(())}

        return step

    monkeypatch.setattr(Run, "gradient_step", counting)
    v = train("ppo_pettingzoo_atari", *ONCE, "--num-minibatches", "4", "--update-epochs", "2")
    assert len(sizes) == 8 and sum(sizes) == 2 * v["alive"].sum() and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("steps", [3, 2500])
def test_a_limit_bootstraps_from_the_last_observation_of_the_player(steps, train):
    """Of a whole game that --max-steps cuts, and of a player who leaves it by a limit of its own."""
    v = train("ppo_pettingzoo_atari", *ONCE, "--learning-rate", "0", "--max-steps", steps)
    cut = v["timeout"]
    assert cut.any() and not v["final_value"][~cut].any() and not (cut & ~v["alive"]).any()
    np.testing.assert_array_equal(cut.any(0).any(0), [True] * 3 if steps == 3 else [False, True, False])
    with torch.no_grad():
        want = v["agent"](torch.as_tensor(v["final_obs"][cut]))[1]
    np.testing.assert_allclose(v["final_value"][cut], want, atol=1e-6)
    for t, i, k in np.argwhere(cut):
        final, before = v["final_obs"][t, i, k], v["obs"][t, i, k]
        np.testing.assert_array_equal(final[:3], before[1:4])  # the images go on
        np.testing.assert_array_equal(final[4:], before[4:])
        assert (final[3, -1] == 128).sum() > (before[3, -1] == 128).sum()


def test_the_first_ratio_is_one(train):
    flags = ["--num-minibatches", "1", "--learning-rate", "0.01"]
    v = train("ppo_pettingzoo_atari", *ONCE, *flags)
    assert len(v["kl"]) == 1 and all(abs(v["metrics"][f"losses/{key}"]) < 1e-6 for key in ("approx_kl", "clipfrac"))


# ---------------------------------------------------------------------- evaluation
def right(obs):
    """The bar in the own column: above (1) or below (2)."""
    want = np.zeros(obs.shape[:2], int)
    for k in range(2):
        own = obs[:, k, 4:].reshape(len(obs), 2, -1).max(-1).argmax(-1)
        assert (own == k).all()
        want[:, k] = 1 + (obs[:, k, 3, 0, 42 * k] == 0)
    return want


def wrong(obs):
    return 3 - right(obs)


def test_the_policy_has_every_seat_in_turn_and_only_its_rewards_count():
    """One that presses the right buttons wins from each; random actions hit a third of the time."""
    envs = [PLAYERS["against_env"](SIGNALS, 2500) for _ in range(20)]
    returns, lengths = play_episodes(envs, right, range(20))
    assert returns[::2].mean() > 2 < returns[1::2].mean() and (lengths <= ROUND * ROUNDS / 4).all()
    assert [env.own.tolist() for env in envs[:2]] == [[True, False], [False, True]]
    again, _ = play_episodes(envs, right, range(20))
    np.testing.assert_array_equal(returns, again)  # the opponent's random actions follow from the seed
    envs = [PLAYERS["against_env"](SIGNALS, 2500, act=wrong) for _ in range(4)]
    assert play_episodes(envs, right, range(4))[0].min() >= 4  # a hit in each round that it sees, the opponent none
    assert play_episodes(envs, wrong, range(4))[0].tolist() == [0.0] * 4


def test_the_older_opponent_is_between_a_quarter_and_a_half(train):
    """It has the weights that the policy had then, and the score against it is a metric."""
    flags = ["--env-id", SIGNALS, "--total-timesteps", "320", "--learning-rate", "0.01", "--eval-every", "32"]
    v = train("ppo_pettingzoo_atari", *SMALL, *flags, "--save-every", "32")
    past = v["past"]
    assert past.step == 256  # the later copy: after 32, 64, 128, 256 steps; the older one is that of 128
    for name, x in v["older"].state_dict().items():
        assert torch.equal(x, past.older[name]), name
    assert any(not torch.equal(past.older[name], past.later[name]) for name in past.older)
    assert any(not torch.equal(past.later[name], x) for name, x in v["agent"].state_dict().items())
    found = rows(v["run"].dir, "eval/episodic_return_vs_older")
    assert len(found) == 10 and "eval/episodic_return" in found[0]


def test_a_run_is_played_against_random_actions(train, solo):
    v = train("ppo_pettingzoo_atari", *SMALL, "--env-id", SIGNALS, "--capture-video", "--total-timesteps", "32")
    assert list((v["run"].dir / "videos").glob("step_32.mp4"))
    code, out, err = solo("play", v["run"].dir, "--episodes", "2")
    assert code == 0 and "over 2 greedy episodes" in out, err


# ---------------------------------------------------------------------- resuming
@pytest.mark.parametrize("env_id", [WALKOUT, pytest.param("atari/pong_v3", marks=pytest.mark.slow)])
def test_resumed_equals_uninterrupted(env_id, train):
    """In the middle of games, which are replayed; the last checkpoint lost, as after a kill."""
    flags = [*SMALL, "--env-id", env_id, "--save-every", "32", "--learning-rate", "0.001", "--max-steps", "25"]
    whole = train("ppo_pettingzoo_atari", *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("ppo_pettingzoo_atari", "--resume", run_dir)
    assert v["start"] == 1 and comparable(run_dir) == expected and "restart" not in train.out
    for name, x in whole["agent"].state_dict().items():
        assert torch.equal(x, v["agent"].state_dict()[name]), name
    for name in ("obs", "action", "reward", "done", "alive"):
        assert np.array_equal(v[name], whole[name]), name
    for name, x in whole["past"].older.items():
        assert torch.equal(x, v["past"].older[name]) and torch.equal(x, v["older"].state_dict()[name]), name
    assert whole["done"].any() and (whole["obs"][0] != whole["obs"][-1]).any()


# ---------------------------------------------------------------------- learning
@pytest.mark.slow
def test_learns_to_press_the_own_button(train):
    """Which is the other player's button half of the time, on the same screen."""
    flags = "--num-envs 8 --num-steps 64 --total-timesteps 6144 --learning-rate 0.001 --eval-every 0".split()
    v = train("ppo_pettingzoo_atari", "--env-id", SIGNALS, *flags, "--eval-episodes", "20")
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > 3.3


# ---------------------------------------------------------------------- bad input
def test_a_game_that_goes_wrong_ends_the_training_with_a_sentence(train, monkeypatch):
    step = Signals.step

    def forgetful(self, actions):
        obs, rewards, *others = step(self, actions)
        return obs, rewards if self.frame < 60 else {}, *others

    monkeypatch.setattr(Signals, "step", forgetful)
    train(FILE.removesuffix(".py"), *SMALL, "--env-id", SIGNALS, code=1)
    assert "the reward of first_0 must be" in train.out and "Traceback" not in train.out


@pytest.mark.parametrize(
    ("name", "env_id", "words"),
    [
        ("ppo_pettingzoo_atari", "ALE/Pong-v5", f"has one agent, but {FILE} takes several; use ppo_atari.py"),
        ("ppo_pettingzoo_atari", "CartPole-v1", "is not an Atari game; use ppo.py for vector observations"),
        ("ppo_pettingzoo_atari", "mpe/simple_spread_v3", "is not an Atari game"),
        ("ppo_atari", "atari/pong_v3", f"has several agents, but ppo_atari.py takes one; use {FILE}"),
        ("dqn_atari", "atari/pong_v3", "has several agents, but dqn_atari.py takes one"),
    ],
)  # fmt: skip
def test_another_kind_of_environment_is_refused(name, env_id, words, train):
    train(name, "--env-id", env_id, code=2)
    assert train.out.startswith(f"error: {env_id} {words}") and train.out.count("\n") == 1, train.out


@pytest.mark.parametrize("module", ["pettingzoo", "multi_agent_ale_py", "ale_py"])
def test_a_missing_package_names_its_extra(module, solo, monkeypatch):
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda one, *more: None if one == module else found(one, *more))
    refused(
        solo("train", "ppo_pettingzoo_atari", "--total-timesteps", "1"),
        "atari/pong_v3 needs an extra: pip install 'solorl[pettingzoo]'",
    )


def test_it_opens_pong_without_a_flag():
    env = PLAYERS["players_env"]("atari/pong_v3", 3, teams="each")
    obs, _ = env.reset(seed=1)
    assert obs.shape == (2, 6, 84, 84) and env.unwrapped.agents == ["first_0", "second_0"] and obs[:, :4].std() > 1
    assert list(env.unwrapped.teams) == env.unwrapped.agents and isinstance(env.action_space, gym.spaces.MultiDiscrete)
    cuts = [env.step(env.action_space.sample())[3] for _ in range(3)]
    assert cuts == [False, False, True]
    assert env.unwrapped.name == "pong_v3"
