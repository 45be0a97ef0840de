"""Hindsight experience replay: its buffer against a list of all legal goals, both files' loops, and that they learn."""

from collections import Counter

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, rows

import solorl.games
from solorl.compute.speed import GradientStep

DQN, SAC = definitions("dqn_her"), definitions("sac_her")
ENVS = {"dqn_her": "goal_probes:Walks-v0", "sac_her": "goal_probes:WalksContinuous-v0"}
SMALL = "--total-timesteps 120 --learning-starts 40 --batch-size 8 --buffer-size 80 --num-envs 4".split()
SMALL += "--eval-every 0 --eval-episodes 1".split()
SMALL = {"dqn_her": SMALL, "sac_her": [*SMALL, "--utd-ratio", "0.25"]}
EITHER = pytest.mark.parametrize("name", ENVS)
ALWAYS = 10**12  # original transitions per replaced one


class Box:
    shape, dtype = (1,), np.float32


def minus_distance(achieved, desired, info):
    """The reward of a random task."""
    return -np.abs(achieved - desired).sum(-1)


def never(achieved, desired, info):
    return np.zeros(len(achieved), bool)


def filled(capacity, num_envs=4, steps=40, seed=0):
    """A buffer of random episodes, and the record: (environment, step) -> what was inserted. An achieved goal names the
    environment and the step, so that it says of which row it is; an episode's goal is negative. A terminal step costs
    100 more, as a crash does."""
    generator = np.random.default_rng(seed)
    spaces = dict.fromkeys(("observation", "desired_goal"), Box)
    replay, record, first, goal = DQN["GoalReplay"](capacity, num_envs, spaces, Box), {}, np.ones(num_envs, bool), None
    for t in range(steps):
        goal = np.where(first, -generator.integers(1, 10**6, num_envs), goal if t else 0)
        achieved = 1000.0 * np.arange(num_envs) + t
        terminated, limit = generator.random((2, num_envs)) < 0.1
        reward = minus_distance(achieved[:, None], goal[:, None], {}) - 100 * terminated
        action = generator.normal(size=(num_envs, 1))
        row = (
            achieved[:, None] - 1,
            goal[:, None],
            action,
            reward,
            terminated,
            achieved[:, None],
            achieved[:, None],
            first,
        )
        replay.add(*row)
        for i in range(num_envs):
            record[i, t] = [np.asarray(x[i], np.float32) for x in row]
        first = terminated | limit
    return replay, record


def legal(record, i, t, steps=40):
    """The achieved goals of a row and of all later ones of its episode, one by one."""
    goals = [record[i, t][6].item()]
    while t + 1 < steps and not record[i, t + 1][7]:
        t += 1
        goals.append(record[i, t][6].item())
    return goals


def place(batch, row):
    """The environment and the step of a sampled transition."""
    return divmod(int(batch.next_obs[row, 0]), 1000)


# ---------------------------------------------------------------------- the buffer
@pytest.mark.parametrize("capacity", [64, 61, 200])
@pytest.mark.parametrize("strategy", ["future", "final"])
def test_goals_are_those_that_the_episode_reached_later(capacity, strategy):
    """Each row that is left, and each goal that is legal for it, comes; equally often, and no other."""
    replay, record = filled(capacity)
    np.random.seed(0)
    size = 30_000
    batch, seen = replay.sample(size, ALWAYS, strategy, minus_distance, never, "cpu"), {}
    for row in range(size):
        seen.setdefault(place(batch, row), Counter())[batch.obs[row, 1].item()] += 1
    left = [(n % 4, n // 4) for n in range(max(0, 160 - capacity), 160)]
    assert set(seen) == set(left)
    lengths = set()
    for (i, t), counts in seen.items():
        goals = legal(record, i, t) if strategy == "future" else legal(record, i, t)[-1:]
        lengths.add(len(goals))
        assert set(counts) == set(goals)
        expected = sum(counts.values()) / len(goals)
        assert max(abs(count - expected) for count in counts.values()) < 5 * expected**0.5 + 1e-9
        assert sum(counts.values()) == pytest.approx(size / len(left), abs=5 * (size / len(left)) ** 0.5)
    assert (len(lengths) > 5) == (strategy == "future")


def test_the_last_row_is_that_of_the_episode():
    """Of every row, in a buffer that has gone round; of episodes under way the newest row."""
    replay, record = filled(61)
    number = np.arange(160 - 61, 160)
    expected = [n + 4 * (len(legal(record, n % 4, n // 4)) - 1) for n in number]
    assert replay.last(number).tolist() == expected and sum(n >= 156 for n in set(expected)) == 4


@pytest.mark.parametrize("k", [0, 1, 4])
def test_of_k_plus_1_transitions_k_have_another_goal(k):
    """The others are as they were stored; all keep observation, action, end, and what the end costs; the rest of their
    rewards is that of the goal."""
    replay, record = filled(64)
    np.random.seed(0)
    size = 4_000
    batch, replaced = replay.sample(size, k, "future", minus_distance, never, "cpu"), 0
    for row in range(size):
        obs, goal, action, reward, done, next_obs, achieved, _ = record[place(batch, row)]
        new = batch.obs[row, 1]
        assert new == batch.next_obs[row, 1] and batch.obs[row, 0] == obs and batch.next_obs[row, 0] == next_obs
        assert batch.action[row] == action and batch.done[row] == done
        replaced += int(new >= 0)
        assert new >= 0 or (new == goal and batch.reward[row] == reward)
        expected = -abs(achieved.item() - new.item()) - 100 * done
        assert batch.reward[row].item() == pytest.approx(expected, abs=0.2)
    assert replaced / size == pytest.approx(k / (k + 1), abs=5 * 0.5 / size**0.5 if k else 0)


def test_a_step_to_a_replaced_goal_ends_the_task_where_reaching_does():
    """Its target would have the value of a state beyond the end, from which one has to leave and come back. A crash
    stays an end; with a goal that was not reached nothing changes."""
    replay, record = filled(64)
    np.random.seed(0)
    arrives = lambda achieved, goal, info: (achieved == goal).all(1)  # noqa: E731
    batch, ends = replay.sample(4_000, 1, "future", minus_distance, arrives, "cpu"), Counter()
    for row in range(4_000):
        reached, crashed = batch.next_obs[row, 0] == batch.next_obs[row, 1], record[place(batch, row)][4]
        assert batch.done[row] == (reached or bool(crashed))
        ends[bool(reached), bool(crashed)] += 1
    assert len(ends) == 4 and min(ends.values()) > 20


@EITHER
def test_the_task_says_where_it_ends(name, train):
    """Where an environment has no compute_terminated, nothing ends at the goal."""
    v = train(name, "--env-id", ENVS[name], *SMALL[name])
    assert not v["compute_terminated"](np.zeros((3, 1)), np.zeros((3, 1)), {}).any()
    env_id, size = ("games/BitFlip15-v0", 15) if name == "dqn_her" else ("games/PointReach-v0", 2)
    v = train(name, "--env-id", env_id, *SMALL[name])
    achieved, goal = np.zeros((2, size)), np.stack([np.zeros(size), np.eye(size)[0]])
    assert v["compute_terminated"](achieved, goal, {}).tolist() == [name == "dqn_her", False]


def test_the_rewards_are_those_of_the_task_with_the_other_goal():
    """A real episode, played again with each goal that it reached later, has the rewards that are computed."""
    env = gym.make("games/PointReach-v0").unwrapped
    env.reset(seed=3)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(50)]
    achieved = np.stack([env.step(action)[0]["achieved_goal"] for action in actions])
    for goal in achieved[::7]:
        env.reset(seed=3)
        env.goal = goal
        rewards = [env.step(action)[1] for action in actions]
        again = env.compute_reward(achieved, np.tile(goal, (50, 1)), {})
        assert again.tolist() == rewards and -50 < sum(rewards) < 0


@pytest.mark.parametrize("name", ENVS)
def test_goals_far_from_zero_keep_their_rewards(name):
    """In metres of a map: float32 would round them to half a metre, and rewards of 0 and -1 would become others."""
    generator, near = np.random.default_rng(0), 4.5e6

    def reward(achieved, desired, info):
        return -(np.abs(achieved - desired).sum(-1) > 0.2).astype(np.float64)

    class Far(Box):
        dtype = np.float64

    part = {"dqn_her": DQN, "sac_her": SAC}[name]["GoalReplay"]
    replay = part(400, 4, {"observation": Box, "desired_goal": Far}, Box)
    for t in range(100):
        achieved, goal = near + generator.uniform(0, 1, (2, 4, 1))
        columns = (achieved, goal, np.zeros((4, 1)), reward(achieved, goal, {}), np.zeros(4), achieved, achieved)
        replay.add(*columns, np.full(4, t % 20 == 0))
    batch = replay.sample(4_000, 4, "future", reward, never, "cpu")
    assert set(batch.reward.tolist()) == {0.0, -1.0} and batch.obs.dtype == torch.float32


# ---------------------------------------------------------------------- the loops
@EITHER
def test_the_buffer_holds_what_the_simulator_did(name, train):
    """Every step of an episode is one row, its goal is that of the episode, the rewards follow from the goals; a time
    limit is not the end of the task; episodes begin where `first` says."""
    v = train(name, "--env-id", ENVS[name], *SMALL[name])
    replay = v["replay"]
    a = {key: array[np.arange(replay.inserted - 80, replay.inserted) % 80] for key, array in replay.arrays.items()}
    (episode, step), (_, after) = a["obs"].T, a["next_obs"].T
    assert replay.inserted == 120 and (after == step + 1).all() and (a["achieved"][:, 0] == after).all()
    assert (a["goal"][:, 0] == episode).all() and (a["first"] == (step == 0)).all() and a["first"].any()
    over, by_time = after == np.where(episode % 2 == 0, 3, 5), episode // 2 % 2 == 1
    assert (a["done"] == (over & ~by_time)).all() and (over & by_time).any()
    assert (a["reward"] == -np.abs(a["achieved"] - a["goal"])[:, 0]).all()
    for i in range(4):  # of each environment, one after the other
        assert (np.diff(10 * episode[i::4] + step[i::4]) > 0).all()


@EITHER
@pytest.mark.parametrize("k", [0, 4])
def test_the_losses_see_goals_of_the_same_episode(name, k, train, monkeypatch):
    """Inputs are the observation and the goal; with k = 0 the goal is always that of the episode."""
    batch, step = [], GradientStep.__call__

    def note(self, *inputs):
        batch.extend(each for each in inputs if hasattr(each, "reward"))
        return step(self, *inputs)

    monkeypatch.setattr(GradientStep, "__call__", note)
    train(name, "--env-id", ENVS[name], *SMALL[name], "--n-sampled-goal", k)
    whole = [torch.cat([each.next_obs for each in batch]), torch.cat([each.obs for each in batch])]
    episode, step, goal = whole[0].T
    assert (whole[1][:, 2] == goal).all() and (whole[1][:, 1] == step - 1).all() and whole[0].shape[1] == 3
    length = torch.where(episode % 2 == 0, 3, 5)
    assert (goal == episode).all() if k == 0 else (goal != episode).float().mean() > 0.5
    assert ((goal == episode) | ((goal >= step) & (goal <= length))).all()
    reward = torch.cat([each.reward for each in batch])
    assert (reward == -(step - goal).abs()).all()


@EITHER
def test_the_policy_sees_observation_and_goal(name, train):
    """It takes a dict of arrays in any order; what was achieved does not matter."""
    v = train(name, "--env-id", ENVS[name], *SMALL[name])
    policy, draw = v["q_network" if name == "dqn_her" else "actor"], np.random.default_rng(0).normal
    obs = {"observation": draw(size=(30, 2)), "achieved_goal": draw(size=(30, 1)), "desired_goal": draw(size=(30, 1))}
    action, x = policy.act(obs), torch.as_tensor(np.concatenate([obs["observation"], obs["desired_goal"]], 1)).float()
    expected = policy(x).argmax(1) if name == "dqn_her" else policy(x, torch.zeros(30, 1))[0]
    np.testing.assert_allclose(action, expected.detach().numpy(), atol=1e-6)
    other = dict(reversed((obs | {"achieved_goal": 0 * obs["achieved_goal"]}).items()))
    assert (policy.act(other) == action).all()
    assert (policy.act(obs | {"desired_goal": 5 + obs["desired_goal"]}) != action).any()


@pytest.mark.parametrize("name", ["sac_her", "sac_dict"])
def test_as_many_actions_are_drawn_as_there_are_observations(name, train):
    """A batch of observations is a dict of three arrays, not of three rows."""
    policy = solorl.load(train(name, "--env-id", ENVS["sac_her"], *SMALL["sac_her"])["run"].dir)
    obs = {key: np.zeros((5, *space.shape)) for key, space in policy.make_env().observation_space.items()}
    action = policy.sample(obs)
    assert action.shape == (5, 1) and len({*action[:, 0].tolist()}) == 5


@EITHER
def test_rewards_that_do_not_follow_from_the_goals_end_the_run(name, train):
    env_id = ENVS[name].replace("Walks", "Wrong")
    train(name, "--env-id", env_id, *SMALL[name], code=2)
    assert train.out.count("\n") <= 3 and "compute_reward of" in train.out and "Traceback" not in train.out


@EITHER
@pytest.mark.parametrize("kind", ["ByOne", "WithInfo", "EndsByOne", "EndsByBool", "EndsInColumns"])
def test_rewards_and_ends_that_are_not_those_of_a_batch_of_goals_are_refused(name, kind, train, tmp_path):
    """With one environment the check of the first steps sees a batch of one, for which a single number looks right."""
    env_id = ENVS[name].replace("Walks", kind)
    train(name, "--env-id", env_id, *SMALL[name], "--num-envs", 1, code=2, runs_dir=tmp_path / "none")
    assert train.out.count("\n") == 1 and "compute_reward" in train.out and "batch" in train.out
    assert not (tmp_path / "none").exists()


@EITHER
def test_a_task_may_say_of_all_goals_at_once_that_nothing_ends_there(name, train):
    v = train(name, "--env-id", ENVS[name].replace("Walks", "GoesOn"), *SMALL[name])
    assert v["compute_terminated"](np.zeros((3, 1)), np.zeros((3, 1)), {}) is False


@pytest.mark.parametrize("kind", ["NoGoals", "WithoutRewards"])
def test_what_has_no_goals_is_refused(kind, train):
    train("dqn_her", "--env-id", f"goal_probes:{kind}-v0", *SMALL["dqn_her"], code=2)
    assert "must have vectors" in train.out and "compute_reward" in train.out
    train("dqn_her", "--env-id", "games/TwoSenses-v0", *SMALL["dqn_her"], code=2)
    assert train.out.count("\n") == 1 and "achieved_goal" in train.out


@pytest.mark.parametrize(("name", "env_id", "said"), [
    ("dqn_her", "games/PointReach-v0", "use sac_her.py"), ("sac_her", "games/BitFlip15-v0", "use dqn_her.py"),
    ("dqn_her", "CartPole-v1", "use dqn.py"), ("sac_her", "Pendulum-v1", "use sac_continuous_action.py"),
])  # fmt: skip
def test_other_spaces_are_refused_with_the_file_to_use(name, env_id, said, train):
    train(name, "--env-id", env_id, *SMALL[name], code=2)
    assert said in train.out


@EITHER
def test_resumed_with_its_replay_equals_uninterrupted(name, train):
    """The last checkpoint thrown away, the run continues from the one before, in the middle of episodes."""
    env_id = "games/BitFlip15-v0" if name == "dqn_her" else "games/PointReach-v0"
    flags = "--total-timesteps 320 --num-envs 2 --learning-starts 40 --buffer-size 200 --batch-size 4 --save-replay"
    flags += " --save-every 110 --log-every 60 --eval-every 160 --eval-episodes 1" + " --utd-ratio 0.25" * (
        name == "sac_her"
    )
    whole = train(name, "--env-id", env_id, *flags.split())
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train(name, "--resume", run_dir)
    assert v["start"] > 0 and comparable(run_dir) == expected
    for part in ("q_network",) if name == "dqn_her" else ("actor", "critic", "target_critic", "temperature"):
        again = v[part].state_dict()
        assert all(torch.equal(x, again[key]) for key, x in whole[part].state_dict().items())
    assert all((array == whole["replay"].arrays[key]).all() for key, array in v["replay"].arrays.items())


@EITHER
def test_an_episode_that_a_resume_could_not_continue_ends_there(name, train):
    """Walks cannot be replayed: those that run at the checkpoint have no later rows, and all others begin again."""
    run_dir = train(name, "--env-id", ENVS[name], *SMALL[name], "--save-replay", "--save-every", 60)["run"].dir
    drop_last_checkpoint(run_dir)
    v = train(name, "--resume", run_dir)
    saved, replay = v["start"] * 4, v["replay"]
    assert v["run"].restarted == [0, 1, 2, 3] and saved == 60 and replay.inserted == 120
    number = np.arange(saved - 4, saved)
    assert replay.arrays["first"][number + 4].all() and (replay.last(number) == number).all()
    assert not (replay.arrays["done"][number]).all()


@EITHER
def test_the_same_seed_gives_the_same_weights_and_logs_what_the_page_says(name, train):
    part = "q_network" if name == "dqn_her" else "actor"
    runs = [train(name, "--env-id", ENVS[name], *SMALL[name], "--seed", seed) for seed in (1, 1, 2)]
    one, same, other = (run[part].state_dict() for run in runs)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert any((one[key] != other[key]).any() for key in one)
    logged = {key for row in rows(runs[0]["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert logged == documented_keys(name)


# ---------------------------------------------------------------------- learning
BITS = "--env-id goal_probes:BitFlip5-v0 --total-timesteps 1000 --learning-starts 200 --target-network-frequency 100"


@pytest.mark.parametrize("strategy", ["future", pytest.param("final", marks=pytest.mark.slow)])
def test_flips_bits(strategy, train):
    """Five of them in seconds: the return of a failure is -5."""
    v = train("dqn_her", *BITS.split(), "--eval-every", 0, "--eval-episodes", 50, "--goal-strategy", strategy)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > -2.2


@pytest.mark.slow
def test_fifteen_bits_need_hindsight(train):
    """Mean return of the best policy -6.5, of failures -15."""
    score = []
    for k in (4, 0):
        flags = ["--total-timesteps", 8000, "--eval-every", 0, "--eval-episodes", 100, "--n-sampled-goal", k]
        v = train("dqn_her", *flags)
        score.append(rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"])
    assert score[0] > -7.5 and score[1] < -14


@pytest.mark.slow
def test_reaches_points(train):
    v = train("sac_her", "--total-timesteps", 10_000, "--eval-every", 0, "--eval-episodes", 50)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > -20
