"""Ape-X: returns, priorities and weights against brute force, what a shard holds against what was played, the loop with
--synchronous; and, in processes of Ray, what happens where one of them is killed."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, environment, rows, script
from test_frame_replay import images, numbers_on, picture

from solorl.checkpoints.checkpoint import CheckpointError
from solorl.checkpoints.replay import ReplayLog
from solorl.compute.processes import Processes, Promise
from solorl.compute.speed import GradientStep

APEX = {name: definitions(name) for name in ("apex_dqn", "apex_dqn_atari")}
BOTH = ["apex_dqn", pytest.param("apex_dqn_atari", marks=pytest.mark.slow)]  # images take seconds
SMALL = "--synchronous --total-timesteps 120 --learning-starts 40 --train-frequency 5 --batch-size 8 --num-steps 10"
SMALL += " --target-network-frequency 20 --broadcast-frequency 3 --buffer-size 150 --eval-every 0 --eval-episodes 1"
ENVS = {"apex_dqn": "CartPole-v1", "apex_dqn_atari": "pixel_probe:Catch-v0"}
GAMMA, ALPHA = 0.9, 0.6


def settings(num_steps, n_step):
    return SimpleNamespace(
        env_id="CartPole-v1", num_steps=num_steps, n_step=n_step, gamma=GAMMA, prioritized_replay_alpha=ALPHA,
        base_epsilon=0.4, epsilon_exponent=7.0,
    )  # fmt: skip


def priority_by_hand(network, obs, action, reward, discount, next_obs):
    """(|R + discount max_a Q(s', a) - Q(s, a)| + 1e-6) ** alpha of one transition."""
    with torch.no_grad():
        q, after = (network(torch.from_numpy(np.asarray(x)[None]))[0].double().numpy() for x in (obs, next_obs))
    return (abs(reward + discount * max(after) - q[action]) + 1e-6) ** ALPHA


def complete_returns(reward, done, end, n_step):
    """Step -> return, discount, last step, by definition, of the steps whose return is complete."""
    found = {}
    for t in range(len(reward)):
        total = 0.0
        for k in range(n_step):
            if t + k == len(reward):
                break
            total += GAMMA**k * reward[t + k]
            if end[t + k] or k + 1 == n_step:
                found[t] = (total, GAMMA ** (k + 1) * (not done[t + k]), t + k)
                break
    return found


# ---------------------------------------------------------------------- returns, draws
@pytest.mark.parametrize("n_step", [1, 2, 3, 5])
def test_returns_against_brute_force(n_step):
    """Random ends by termination and time limits; those that are complete are the first ones."""
    open_at_the_end = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        steps = int(rng.integers(1, 20))
        end = rng.random(steps) < rng.choice([0.05, 0.3, 1.0])
        reward, done = rng.normal(size=steps), end & (rng.random(steps) < 0.5)
        expected = complete_returns(reward, done, end, n_step)
        total, discount, last = APEX["apex_dqn"]["n_step_returns"](reward, done, end, n_step, GAMMA)
        assert list(expected) == list(range(len(total)))
        got = zip(total, discount, last, strict=True)
        for found, wanted in zip(got, expected.values(), strict=True):
            assert found == pytest.approx(wanted, abs=1e-5)
        open_at_the_end += len(total) < steps
    assert n_step == 1 or 50 < open_at_the_end < 200


def test_shards_are_drawn_from_as_one_buffer():
    """Of n transitions each shard gets n times its share of the sum of all priorities, up to the parts at its borders;
    none without any; on average exactly."""
    np.random.seed(0)
    sums = np.array([0.0, 3.0, 0.5, 0.0, 6.5, 0.0])
    summaries = [APEX["apex_dqn"]["ShardSummary"](1, priority_sum, 1.0) for priority_sum in sums]
    counts = np.array([APEX["apex_dqn"]["draw_counts"](summaries, 33) for _ in range(4000)])
    assert (counts.sum(1) == 33).all() and (counts[:, sums == 0] == 0).all()
    assert np.abs(counts - 33 * sums / 10).max() < 2
    np.testing.assert_allclose(counts.mean(0), 33 * sums / 10, atol=0.05)


@pytest.mark.parametrize("name", APEX)
def test_each_actor_has_its_epsilon(name):
    """epsilon ** (1 + i / (N - 1) alpha), and the first one's where there is only one."""
    envs = SimpleNamespace(
        single_action_space=gym.spaces.Discrete(3), single_observation_space=gym.spaces.Box(0, 1, (4,))
    )
    for count in (2, 5):
        for i in range(count):
            actor = APEX[name]["Actor"](settings(5, 3), i / (count - 1), [], envs)
            assert actor.epsilon == pytest.approx(0.4 ** (1 + i / (count - 1) * 7))


# ---------------------------------------------------------------------- what a shard holds
class Story:
    """A vector environment of one game in which all is random: ends, lost lives, rewards. Notes what has happened, step
    by step; `look(number)` is the observation that shows a number, each of which comes once."""

    single_action_space = gym.spaces.Discrete(3)

    def __init__(self, seed, look, space):
        self.rng, self.look, self.single_observation_space = np.random.default_rng(seed), look, space
        self.p_over, self.p_life = self.rng.choice([0.05, 0.3, 1.0]), self.rng.choice([0.0, 0.3])
        self.number, self.lives, self.steps = 0, 3, []
        self.begin()

    def begin(self):
        self.game = [self.number] * 4

    def step(self, action):
        self.number += 1
        before, self.game = self.game, [*self.game[1:], self.number]
        over, reward = self.rng.random() < self.p_over, float(self.rng.integers(-3, 4))
        terminated, lost = over and self.rng.random() < 0.5, self.rng.random() < self.p_life
        lives_left = self.lives - lost
        self.lives = 3 if over else lives_left
        self.steps.append((before, self.game, int(action[0]), reward, terminated, lost, over))
        infos = {"lives": np.array([self.lives]), "next_lives": np.array([lives_left])}
        infos["next_obs"] = self.look(self.game)[None]
        if over:
            self.number += 1
            self.begin()
        flags = (np.array([x]) for x in (reward, terminated, over and not terminated))
        return self.look(self.game)[None], *flags, infos


def played(name, seed, capacity=4000, steps=40):
    """An actor's rollouts in a Story into one shard: actor, story, shard, and the returns that it has reported."""
    rng = np.random.default_rng([seed, 1])
    pixels = name.endswith("atari")
    look = images if pixels else (lambda game: np.array([game[3], 1 / (1 + game[3])], np.float32))
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8) if pixels else gym.spaces.Box(0, np.inf, (2,))
    torch.manual_seed(seed)
    story = Story(seed, look, space)
    shard = APEX[name]["FrameShard"](capacity) if pixels else APEX[name]["ReplayShard"](capacity, 2)
    args = settings(int(rng.integers(1, 12)), int(rng.integers(1, 6)))
    actor = APEX[name]["Actor"](args, 0.0, [shard], story)
    actor.obs = look(story.game)[None]
    weights = [p.detach().numpy() + rng.normal(size=p.shape) / 20 for p in actor.q_network.parameters()]
    episodes = []
    for _ in range(1 + int(rng.integers(steps // 2, steps)) // args.num_steps):
        episodes += actor.rollout(weights, 0)[0]
        assert len(actor.now.steps) < args.n_step
    return actor, story, shard, episodes


def expected_of(story, n_step, pixels):
    """Number of the newest image of obs -> obs, action, return, discount, next_obs, by definition."""
    reward = [np.sign(step[3]) if pixels else step[3] for step in story.steps]
    done = [step[4] or (pixels and step[5]) for step in story.steps]
    end = [step[6] or done[t] for t, step in enumerate(story.steps)]
    found = complete_returns(reward, done, end, n_step)
    at = {t: story.steps[t] for t in range(len(story.steps))}
    return {
        at[t][0][3]: (at[t][0], at[t][2], total, discount, at[last][1]) for t, (total, discount, last) in found.items()
    }


def held(shard, pixels):
    """Number of the newest image of obs -> the same of what a shard can give, and the priority."""
    index = np.flatnonzero(shard.tree.sum[shard.tree.size :])
    found = {}
    for i in index:
        if pixels:
            shown = numbers_on(shard.arrays["image"][(i + shard.arrays["near"][i]) % shard.capacity])
            obs, next_obs = shown[:4].tolist(), shown[4:].tolist()
        else:
            obs, next_obs = ([int(shard.arrays[key][i][0])] * 4 for key in ("obs", "next_obs"))
        row = [shard.arrays[key][i] for key in ("action", "reward", "discount")]
        assert obs[3] not in found  # each once
        found[obs[3]] = (obs, *row, next_obs, shard.tree.sum[shard.tree.size + i])
    return found


@pytest.mark.parametrize(("name", "count"), [("apex_dqn", 40), ("apex_dqn_atari", 6)])
def test_a_shard_holds_what_was_played_and_how_wrong_the_actor_was(name, count):
    """Rollouts of any length, returns of any number of steps: every transition once, no return across two games, a time
    limit bootstraps; the priority is the actor's error, by hand. And episodes have their raw rewards."""
    pixels, total = name.endswith("atari"), 0
    for seed in range(count):
        actor, story, shard, episodes = played(name, seed)
        expected, found = expected_of(story, actor.args.n_step, pixels), held(shard, pixels)
        assert found.keys() == expected.keys()
        for number, (obs, action, reward, discount, next_obs) in expected.items():
            got = found[number]
            assert got[1] == action and got[2:4] == pytest.approx((reward, discount), abs=1e-5)
            if pixels:
                assert (got[0], got[4]) == (obs, next_obs)
            else:
                assert (got[0][3], got[4][3]) == (obs[3], next_obs[3])
            if seed < (40 if not pixels else 1):
                looks = [story.look(x) for x in (obs, next_obs)]
                wanted = priority_by_hand(actor.q_network, looks[0], action, reward, discount, looks[1])
                assert got[5] == pytest.approx(wanted, rel=1e-3, abs=1e-4)
        cuts = [0, *(t + 1 for t, step in enumerate(story.steps) if step[6])]
        wanted = [[step[3] for step in story.steps[a:b]] for a, b in pairwise(cuts)]
        assert episodes == wanted
        total += len(expected)
    assert total > 10 * count


def test_no_transition_has_an_image_that_was_overwritten():
    """A small shard filled several times over: all that it gives was played, and at most the 3 oldest of what could be
    given are missing."""
    wraps = 0
    for seed in range(4):
        actor, story, shard, _ = played("apex_dqn_atari", seed, capacity=60, steps=120)
        expected, found = expected_of(story, actor.args.n_step, True), held(shard, True)
        assert found.items() and all(found[k][0] == expected[k][0] and found[k][4] == expected[k][4] for k in found)
        newest = sorted(expected)[-len(found) :]
        assert sorted(found) == newest
        wraps += shard.inserted > 2 * shard.capacity
    assert wraps > 1


def test_the_picture_in_the_docstring_shows_what_a_shard_holds():
    """Game A ends with its sixth image, game B has three so far, and the shard has room for six."""
    cls = APEX["apex_dqn_atari"]["FrameShard"]
    shown, shard = picture(cls), cls(6)

    def near(length):  # of the transitions of one step in a game of this many images
        stacks = np.maximum(np.arange(length)[:, None] - [3, 2, 1, 0], 0)  # (length, 4)
        return np.hstack([stacks[:-1], stacks[1:]]) - np.arange(length - 1)[:, None]

    for numbers, discount in ((range(6), [0.99] * 4 + [0]), (range(6, 9), [0.99] * 2)):
        count = len(discount)
        columns = (near(count + 1), np.zeros(count), np.zeros(count), np.array(discount))
        shard.add(images(numbers), np.arange(count), np.ones(count), *columns)
    assert numbers_on(shard.arrays["image"]).tolist() == [number for _, number, *_ in shown] == [6, 7, 8, 3, 4, 5]
    for i, _, _, _, *more in shown:
        if more:  # a transition begins here
            assert [*shard.arrays["near"][i], shard.arrays["discount"][i]] == pytest.approx(more)
    assert [row[0] for row in shown if len(row) == 4] == [2, 5]
    assert np.flatnonzero(shard.tree.sum[shard.tree.size :]).tolist() == [0, 1] and shard.inserted == 9


def test_priorities_of_what_was_overwritten_are_not_taken():
    """Nor of numbers that a shard does not have: of the one in whose place it was started."""
    shard = APEX["apex_dqn"]["ReplayShard"](4, 1)
    for _ in range(3):
        shard.add((np.zeros((2, 1)), np.zeros(2), np.zeros(2), np.zeros(2), np.zeros((2, 1))), np.ones(2))
    shard.update(np.array([0, 1, 2, 5, 6, 9]), np.full(6, 7.0))
    assert shard.tree.sum[shard.tree.size :].tolist() == [1, 7, 7, 1]
    summary = shard.summary()
    assert (summary.inserted, summary.priority_sum, summary.least_priority) == (6, 16, 1)


@pytest.mark.parametrize("name", APEX)
def test_an_empty_shard_gives_nothing(name):
    """As one that was started in the place of another."""
    inputs = (8,) if name.endswith("atari") else (8, 2)
    shard = APEX[name]["FrameShard" if name.endswith("atari") else "ReplayShard"](*inputs)
    columns, priority, number, summary = shard.sample(5)
    assert [len(x) for x in (*columns, priority, number)] == [0] * 7 and summary == (0, 0, np.inf)


# ---------------------------------------------------------------------- the loop
def small(name, *flags):
    return [name, "--env-id", ENVS[name], *SMALL.split(), *map(str, flags)]


@pytest.mark.parametrize("name", APEX)
def test_weights_over_shards_are_those_of_one_buffer(name, train, monkeypatch):
    """(N P(i)) ** -beta over the largest of all transitions in all shards, of which P(i) is the share of the sum."""
    seen, step = [], GradientStep.__call__

    def note(self, target_network, batch, weight):
        v = sys._getframe(2).f_globals  # of the file, above the clock of gradient steps
        trees = [shard.tree.sum[shard.tree.size :] for shard in v["shards"]]
        every = np.concatenate(trees)
        every = every[every > 0]
        nominal = (len(every) * every / every.sum()) ** -0.4
        own = [trees[i][each[2] % v["capacity"]] for i, each in v["samples"].items()]
        expected = (len(every) * np.concatenate(own) / every.sum()) ** -0.4 / nominal.max()
        np.testing.assert_allclose(weight, expected, rtol=1e-4)
        rewards = [v["shards"][i].arrays["reward"][each[2] % v["capacity"]] for i, each in v["samples"].items()]
        np.testing.assert_array_equal(batch.reward, np.concatenate(rewards))
        seen.append(len(v["samples"]))
        return step(self, target_network, batch, weight)

    monkeypatch.setattr(GradientStep, "__call__", note)
    train(*small(name, "--num-replay-shards", 3, "--buffer-size", 210))
    assert len(seen) == (120 - 40) // 5 and max(seen) == 3


@pytest.mark.parametrize("name", BOTH)
def test_a_resumed_run_is_the_uninterrupted_one(name, train, tmp_path):
    """With --synchronous and --save-replay, bit for bit, where it stopped within returns and an episode."""
    flags = ["--save-replay", "--save-every", 50, "--num-replay-shards", 2]
    whole = train(*small(name, *flags))
    run_dir = tmp_path / "copy"
    shutil.copytree(whole["run"].dir, run_dir)
    drop_last_checkpoint(run_dir)
    v = train(name, "--resume", run_dir)
    assert v["start"] == 10 and comparable(run_dir) == comparable(whole["run"].dir)
    for key in ("q_network", "target_network", "actor_network"):
        for x, y in zip(v[key].parameters(), whole[key].parameters(), strict=True):
            assert torch.equal(x, y)
    for mine, other in zip(v["shards"], whole["shards"], strict=True):
        assert mine.inserted == other.inserted > 0 and np.array_equal(mine.tree.sum, other.tree.sum)


@pytest.mark.parametrize("name", APEX)
def test_priorities_fit_a_buffer_of_the_same_size_only(name, tmp_path):
    """The tree is saved leaf by leaf, and `--resume-changed --buffer-size` gives rows other leaves."""
    cls, more = ("FrameShard", ()) if name.endswith("atari") else ("ReplayShard", (2,))
    log = ReplayLog(tmp_path)
    saved = log.append(APEX[name][cls](50, *more))
    log.load(APEX[name][cls](50, *more), saved)
    for capacity in (40, 60):  # with as many leaves in the tree
        with pytest.raises(CheckpointError, match="does not fit"):
            log.load(APEX[name][cls](capacity, *more), saved)


def test_returns_end_where_a_resumed_episode_begins_again(train):
    """The steps before, whose returns were not complete, belong to an episode that is gone."""
    flags = ["--save-replay", "--save-every", 50, "--env-id", "probes:Fickle-v0"]
    run_dir = train(*small("apex_dqn"), *flags)["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("apex_dqn", "--resume", run_dir)
    assert "did not replay exactly" in train.out and v["start"] == 10
    assert len(v["actors"][0].now.rewards) == 20  # of the steps since: an episode of this probe lasts 1,000
    assert sum(shard.inserted for shard in v["shards"]) == 100 + 20 - 2 * 2  # two are not complete, two are gone


def test_no_transition_is_of_two_games_where_a_resumed_game_begins_again(train):
    """Neither the images nor the rewards of the game that is gone are in those of the next one."""
    flags = ["--env-id", "pixel_doubles:PixelFickle-v0", "--save-replay", "--save-every", 50, "--learning-starts", 200]
    run_dir = train("apex_dqn_atari", *SMALL.split(), *flags)["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("apex_dqn_atari", "--resume", run_dir)
    assert v["run"].restarted == [0] and v["start"] == 10
    columns, *_ = v["shards"][0].sample(300)
    games = [set(stack[:, -1, -1].tolist()) for stack in np.hstack([columns[0], columns[4]])]
    assert all(len(each) == 1 for each in games) and len(set.union(*games)) > 4


@pytest.mark.parametrize("name", BOTH)
def test_plumbing_is_inert(name, train):
    """Evaluations and checkpoints change no weight; and the page names all that is logged."""
    plain = train(*small(name))
    other = train(*small(name, "--eval-every", 20, "--save-every", 20, "--save-replay"))
    for x, y in zip(plain["q_network"].parameters(), other["q_network"].parameters(), strict=True):
        assert torch.equal(x, y)
    logged = {key for row in rows(other["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert logged == documented_keys(name) - {"charts/epsilon"}


@pytest.mark.parametrize("name", BOTH)
def test_updates_targets_and_broadcasts_come_when_due(name, train):
    """A gradient step for every train_frequency steps after learning_starts; the target network is the Q-network of
    the last multiple of target_network_frequency; the actors have that of the last multiple of broadcast_frequency."""
    runs = {total: train(*small(name, "--total-timesteps", total)) for total in (40, 100, 110, 120)}
    flat = {t: torch.nn.utils.parameters_to_vector(v["q_network"].parameters()).detach() for t, v in runs.items()}
    for total, v in runs.items():
        (state,) = v["optimizer"].state.values() or [{"step": 0}]
        assert int(state["step"]) == (total - 40) // 5
        target = torch.nn.utils.parameters_to_vector(v["target_network"].parameters())
        assert torch.equal(target, flat[total - total % 20])
    acting = torch.nn.utils.parameters_to_vector(runs[120]["actor_network"].parameters())
    assert runs[120]["env_step"] // runs[120]["args"].train_frequency == 24 and torch.equal(
        acting, flat[120]
    )  # the 24th since step 0


def test_no_life_is_lost_where_the_next_game_begins_with_fewer(train):
    """A time limit after a bonus life does not end the task, though the next game begins with fewer lives."""
    v = train("apex_dqn_atari", *SMALL.split(), "--env-id", "pixel_doubles:PixelBonus-v0", "--buffer-size", 200)
    [shard] = v["shards"]
    stored = shard.tree.sum[shard.tree.size :][:200] > 0
    assert len(rows(v["run"].dir, "charts/episodic_return")) > 3  # games that a time limit has ended
    assert np.sum(stored) > 100 and np.all(shard.arrays["discount"][stored] > 0)


@pytest.mark.parametrize("n_step", [12, 25])
def test_a_return_may_be_longer_than_a_rollout(n_step, train):
    v = train(*small("apex_dqn", "--n-step", n_step))
    assert v["shards"][0].inserted >= 120 - n_step and len(v["optimizer"].state) == 1


PROBE = "--synchronous --learning-starts 100 --train-frequency 2 --batch-size 32 --num-steps 10 --buffer-size 2000 "
PROBE += "--learning-rate 0.003 --target-network-frequency 20 --broadcast-frequency 1 --eval-every 0 --eval-episodes 1"


@pytest.mark.parametrize(
    ("probe", "flags", "values"),
    [
        ("Delayed", "--gamma 0.5 --total-timesteps 1500", [0.5, 1.0]),
        ("Forever", "--gamma 0.8 --total-timesteps 3000", [5.0]),  # 1 / (1 - gamma); less if its time limit were an end
    ],
)
@pytest.mark.slow
def test_learns_the_values_of_probes(probe, flags, values, train):
    """With returns of three steps, which end with the episode and bootstrap from its last observation."""
    v = train("apex_dqn", "--env-id", f"probes:{probe}-v0", *PROBE.split(), *flags.split())
    for obs, value in enumerate(values):
        assert v["q_network"](torch.tensor([[float(obs)]])).max().item() == pytest.approx(value, rel=0.07)


# ---------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("name", "flags", "sentence"),
    [
        (
            "apex_dqn",
            "--total-timesteps 9 --learning-starts 0",
            "--total-timesteps 9 is less than one iteration of 10 steps",
        ),
        ("apex_dqn", "--buffer-size 25 --num-replay-shards 2", "--buffer-size must be at least 26,"),
        ("apex_dqn_atari", "--buffer-size 65 --num-replay-shards 2", "--buffer-size must be at least 66,"),
        ("apex_dqn", "--target-network-frequency 9", "--target-network-frequency must be at least 10,"),
        ("apex_dqn", "--num-actors 0", "--num-actors is 0, but must be at least 1"),
        ("apex_dqn", "--base-epsilon 1.5", "--base-epsilon is 1.5, but must be at most 1"),
        ("apex_dqn", "--env-id Pendulum-v1", "Pendulum-v1 has continuous actions, but apex_dqn.py takes discrete"),
    ],
)
def test_bad_input_is_one_sentence(name, flags, sentence, train, tmp_path):
    train(*small(name, *flags.split()), code=2)
    assert (
        train.out.startswith(f"error: {sentence}") and train.out.count("\n") == 1 and not (tmp_path / "runs").exists()
    )


@pytest.mark.parametrize("name", APEX)
def test_without_ray_a_sentence_names_the_extra(name, train, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    train(*small(name, "--no-synchronous"), code=2)
    assert train.out == f"error: {name}.py needs ray, which is not installed: pip install 'solorl[ray]'\n"
    assert not (tmp_path / "runs").exists()
    train(*small("apex_dqn"))  # nor is it needed


def test_a_cluster_that_is_not_there_is_one_sentence(train, monkeypatch, tmp_path):
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    train(*small("apex_dqn", "--no-synchronous"), code=2)
    assert train.out.startswith(f"error: the Ray cluster at RAY_ADDRESS=127.0.0.1:{port} cannot be reached (")
    assert train.out.count("\n") == 1 and not (tmp_path / "runs").exists()


class FakeRay:
    """A cluster of 3 cores; what is placed there does nothing."""

    exceptions = SimpleNamespace(ActorUnavailableError=KeyError, ObjectLostError=IndexError, RayTaskError=TimeoutError)
    cloudpickle = SimpleNamespace(dumps=lambda inputs: inputs)

    def cluster_resources(self):
        return {"CPU": 3.0}

    def remote(self, cls):
        placed = SimpleNamespace(remote=lambda inputs: (cls.__name__, inputs))
        return SimpleNamespace(options=lambda **options: self.note(options) or placed)

    def note(self, options):
        self.options = options

    def get(self, ref):
        raise ref


def test_a_cluster_that_is_too_small_is_refused(monkeypatch):
    """On a cluster each object takes a core; on this machine there may be more of them than cores."""
    said, ray = [], FakeRay()
    processes = Processes(said.append)
    processes.ray = ray
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    assert len(processes.place(dict, [()] * 3)) == 3 and ray.options["num_cpus"] == 1
    with pytest.raises(ConnectionError, match="the Ray cluster has 3 cores, but this training needs 4"):
        processes.place(dict, [()])
    monkeypatch.delenv("RAY_ADDRESS")
    assert len(processes.place(dict, [()] * 9)) == 9 and ray.options == {"num_cpus": 0, "max_restarts": -1}


def test_the_end_of_a_process_is_said_once_and_exceptions_are_raised():
    said = []
    processes = Processes(said.append)
    processes.ray = FakeRay()
    promises = [Promise(KeyError(), "Actor 1"), Promise(IndexError(), "Actor 1"), 5, Promise(KeyError(), "Actor 0")]
    assert processes.answers(promises) == [None, None, 5, None]
    assert [line.partition(" has ended")[0] for line in said] == ["Actor 1", "Actor 0"]
    with pytest.raises(ValueError, match="of the actor"):
        processes.answers([Promise(ValueError("of the actor"), "Actor 0")])


# ---------------------------------------------------------------------- in processes of Ray
def processes():
    """Process id -> parent, state and command line of all processes."""
    found = {}
    for path in Path("/proc").glob("[1-9]*"):
        try:
            facts = (path / "stat").read_text().rpartition(")")[2].split()
            words = (path / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        found[int(path.name)] = (int(facts[1]), facts[0], words)
    return found


def processes_of(root):
    """Process id -> command line of a process and of all those below it that run."""
    found, family = processes(), {root}
    while more := {pid for pid, facts in found.items() if facts[0] in family} - family:
        family |= more
    return {pid: found[pid][2] for pid in family if pid in found and found[pid][1] != "Z"}


def still_running(family):
    """Those of the processes that run; one that has ended may wait as a zombie for its new parent."""
    found = processes()
    return {pid: found[pid][2] for pid in family if pid in found and found[pid][1] != "Z"}


def newcomers(root, family, start):
    """The processes below `root` that are not of the family, and whose command lines start so."""
    return [pid for pid, words in processes_of(root).items() if pid not in family and words.startswith(start)]


def wait_for(condition, process, seconds=240):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert process.poll() is None and time.monotonic() < deadline, process.poll()
        time.sleep(0.2)
    return value


@pytest.fixture
def begun(tmp_path):
    """A training in processes that has written a checkpoint, and its file of words."""
    pytest.importorskip("ray")
    words = [
        sys.executable,
        script("apex_dqn"),
        "--total-timesteps",
        10**7,
        "--learning-starts",
        200,
        "--eval-every",
        0,
    ]
    words += ["--save-every", 500, "--eval-episodes", 1, "--runs-dir", tmp_path]
    out = tmp_path / "out.txt"
    with out.open("a") as file:
        process = subprocess.Popen(
            [*map(str, words)], env=environment(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_for(lambda: list(tmp_path.glob("*/checkpoint/step_*")), process)
        yield process, out
    finally:
        process.kill()
        process.wait()


def checkpoint_of(tmp_path):
    return max((int(path.name[5:]) for path in tmp_path.glob("*/checkpoint/step_*")), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["Actor", "ReplayShard"])
def test_what_is_killed_is_replaced_and_the_training_goes_on(which, tmp_path, begun):
    """And no process is left after SIGTERM, which saves."""
    process, out = begun
    family = processes_of(process.pid)
    victim = next(pid for pid, words in family.items() if words.startswith(f"ray::{which}"))
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: re.search(rf"{which} \d has ended, .*starts another one", out.read_text()), process)
    step = checkpoint_of(tmp_path)
    wait_for(lambda: checkpoint_of(tmp_path) > step + 1500, process)
    found = wait_for(lambda: newcomers(process.pid, family, f"ray::{which}"), process)
    assert len(found) == 1
    learned = rows(next(tmp_path.glob("*/metrics.jsonl")).parent, "losses/td_loss")
    assert learned[-1]["global_step"] > step
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0 and "Traceback" not in out.read_text()
    assert still_running(family) == {}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["add", "update"])
def test_what_fails_in_a_shard_ends_the_run(method, tmp_path):
    """Although neither an actor nor the learner needs an answer of these methods."""
    pytest.importorskip("ray")
    setup, main = Path(script("apex_dqn")).read_text().split("if __name__")
    fails = f"def fails(self, *inputs):\n    raise ValueError('in {method}')\n\n\nReplayShard.{method} = fails\n\n\n"
    (tmp_path / "fails.py").write_text(setup + fails + "if __name__" + main)
    words = [sys.executable, tmp_path / "fails.py", "--total-timesteps", 5000, "--learning-starts", 200]
    words += ["--eval-every", 0, "--eval-episodes", 1, "--runs-dir", tmp_path / "runs"]
    ended = subprocess.run([*map(str, words)], env=environment(), capture_output=True, text=True, timeout=240)
    assert ended.returncode not in (0, 2) and f"ValueError: in {method}" in ended.stderr


@pytest.mark.slow
def test_a_killed_learner_leaves_nothing_and_resumes(tmp_path, begun):
    """No actor, no shard, nothing of Ray's that works; and from its last checkpoint it goes on, with an empty replay
    buffer, which it fills before it learns again."""
    process, _ = begun
    wait_for(lambda: checkpoint_of(tmp_path) >= 1000, process)
    family = processes_of(process.pid)
    assert sum(words.startswith(("ray::Actor", "ray::ReplayShard")) for words in family.values()) == 3
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    # two agents of Ray look for it less often
    while left := [words for words in still_running(family).values() if "Agent" not in words]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    run_dir = next(tmp_path.glob("*/metrics.jsonl")).parent
    saved = checkpoint_of(tmp_path)
    total = saved + 1000
    words = [sys.executable, script("apex_dqn"), "--resume", run_dir, "--total-timesteps", total, "--resume-changed"]
    done = subprocess.run([*map(str, words)], env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resumed at step {saved:,}" in done.stdout
    after = [row["global_step"] for row in rows(run_dir, "losses/td_loss") if row["global_step"] > saved]
    assert after and rows(run_dir)[-1]["global_step"] == total
