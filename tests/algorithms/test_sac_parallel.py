"""SAC in processes: what the learner stores, how often it learns, how old the weights are that explorers play, and what
the evaluator's answers become. `Later` has the objects in this process, and their answers come in any order; slow tests
have the processes of Ray."""

import copy
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, environment, rows, script
from probes_offpolicy import HIGH, LOW
from safetensors.numpy import load_file
from test_actor_critic import SMALL, steps_of, weights
from test_apex_dqn import checkpoint_of, newcomers, processes_of, still_running, wait_for

import solorl
from solorl.compute.processes import Processes
from solorl.run.ending import Ending
from solorl.run.evaluation import Evaluator

SAC = definitions("sac_parallel")
HERE = ["--synchronous", "--num-steps", "5"]


class Journal(gym.Env):
    """Episodes of three steps, after which the task is over, and of four, which a time limit cuts, by turns. The
    observation, always in the same array, is (number of this environment, episode, step). `notes`: what was played."""

    observation_space = gym.spaces.Box(0.0, np.inf, (3,), np.float64)
    action_space = gym.spaces.Box(LOW, HIGH)
    numbers = itertools.count()

    def __init__(self):
        self.number, self.episode, self.array, self.notes = next(self.numbers), -1, np.zeros(3), []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return self.look(), {}

    def look(self):
        self.array[:] = self.number, self.episode, self.steps
        return self.array

    def step(self, action):
        before, reward = self.look().copy(), float(self.np_random.normal())
        self.steps += 1
        over, is_end = self.steps == (3, 4)[self.episode % 2], self.episode % 2 == 0
        self.notes.append((before, action, reward, over and is_end, self.look().copy(), over))
        return self.look(), reward, over and is_end, over and not is_end, {}


class Aim(gym.Env):
    """One step; the reward, at most 0, is greater the nearer the action is to 0.5."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.obs, {}

    def step(self, action):
        return self.obs, -float((action[0] - 0.5) ** 2), True, False, {}


class Dice(Aim):
    """Episodes of 1 to 8 steps."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.np_random.integers(1, 9)
        return self.obs, {}

    def step(self, action):
        self.left -= 1
        return self.obs, -float((action[0] - self.obs[0]) ** 2), self.left == 0, False, {}


for cls in (Journal, Aim, Dice):
    gym.register(f"{cls.__name__}-v0", cls, disable_env_checker=True)


class Later(Processes):
    """Objects of this process. What they are asked for is done where the answer is waited for; that is any of the
    promises. `deaths`: name of a class -> numbers of the calls in which its object dies."""

    deaths = {}  # noqa: RUF012

    def __init__(self, say):
        super().__init__(say)
        self.rng, self.objects, self.shared, self.asked, self.calls = np.random.default_rng(0), [], [], [], Counter()

    def place(self, cls, inputs):
        return [Deputy(self, cls, each) for each in inputs]

    def make(self, cls, inputs):
        self.objects.append(cls(*inputs))
        return self.objects[-1]

    def share(self, value):
        self.shared.append(copy.deepcopy(value))
        return self.shared[-1]

    def first(self, promises):
        index = int(self.rng.integers(len(promises)))
        return index, promises[index]() if callable(promises[index]) else promises[index]  # with --synchronous


class Deputy:
    """Stands for one object of `Later`."""

    def __init__(self, processes, cls, inputs):
        self.processes, self.cls, self.inputs = processes, cls, inputs
        self.object = processes.make(cls, inputs)

    def ask(self, method, inputs):
        name = self.cls.__name__
        self.processes.calls[name] += 1
        if self.processes.calls[name] in self.processes.deaths.get(name, ()):
            self.object = self.processes.make(self.cls, self.inputs)
            return None
        return getattr(self.object, method)(*inputs)

    def rollout(self, given):
        self.processes.asked.append((self, given))
        return lambda: self.ask("rollout", [given])

    def play(self, given, seeds):
        given = copy.deepcopy(given)
        return lambda: self.ask("play", [given, seeds])


def variables():
    """The variables of the script that is running."""
    frame = sys._getframe(1)
    while "num_iterations" not in frame.f_globals:
        frame = frame.f_back
    return frame.f_globals


@pytest.fixture
def later(monkeypatch):
    """`later(cls=numbers)` says in which calls the objects of a class die."""
    monkeypatch.setattr("solorl.run.verbs.Processes", Later)
    return lambda **deaths: monkeypatch.setattr(Later, "deaths", deaths)


def journal(*flags):
    return ["sac_parallel", "--env-id", "Journal-v0", *SMALL, "--num-steps", "5", "--batch-size", "8", *map(str, flags)]


def stored(v):
    """The transitions in the replay buffer, in order: obs, action, reward, done, next_obs of each."""
    count = v["replay"].inserted
    assert count <= v["replay"].capacity
    return list(zip(*(array[:count] for array in v["replay"].arrays.values()), strict=True))


def players(v):
    """All explorers of a run, also those that have died."""
    return [each for each in v["run"].processes.objects if hasattr(each, "rollout")]


def notes_of(explorers):
    """Number of an environment -> what was played there."""
    envs = [env.unwrapped for explorer in explorers for env in explorer.envs.envs]
    return {env.number: env.notes for env in envs}


def check_stored(v, explorers):
    """Every transition of these explorers is stored once, in the order of its environment, those that died gave
    what they had handed over; a time limit is not an end, and no transition leads into the next episode."""
    notes, found = notes_of(explorers), {}
    for transition in stored(v):
        found.setdefault(int(transition[0][0]), []).append(transition)
    assert found.keys() <= notes.keys()
    scale = SAC["make_env"]("Journal-v0")
    for number, transitions in found.items():
        assert len(transitions) == len(notes[number])
        for (obs, action, reward, done, next_obs), note in zip(transitions, notes[number], strict=True):
            np.testing.assert_array_equal(obs, note[0])
            np.testing.assert_array_equal(scale.action(action), note[1])
            assert (reward, done) == (np.float32(note[2]), note[3])
            np.testing.assert_array_equal(next_obs, note[4])
    ends = [(t[3], t[4][2]) for transitions in found.values() for t in transitions]
    assert {end for end in ends if end[1] == 4 or end[0]} == {(0, 4), (1, 3)}
    return found


# ---------------------------------------------------------------------- the same algorithm
def test_synchronous_with_rollouts_of_one_step_it_is_sac_continuous_action(train, monkeypatch):
    """The same weights and rows, bit for bit, from the same random numbers."""
    reset = solorl.Run.reset

    def seeded(self, envs):  # what was drawn before differs: the explorer has an actor of its own
        torch.manual_seed(5)
        return reset(self, envs)

    monkeypatch.setattr("solorl.Run.reset", seeded)
    flags = ["--env-id", "probes_offpolicy:Diary-v0", *SMALL, "--num-envs", "3", "--utd-ratio", "0.5"]
    flags += ["--learning-starts", "21", "--eval-every", "10"]
    root = train("sac_continuous_action", *flags)
    v = train("sac_parallel", *flags, "--synchronous", "--num-steps", "1")
    for part in ("actor", "critic", "target_critic", "temperature"):
        assert torch.equal(weights(v[part]), weights(root[part]))
    assert comparable(v["run"].dir) == comparable(root["run"].dir)
    assert (
        len(rows(v["run"].dir, "charts/episodic_return")) > 10 and len(rows(v["run"].dir, "eval/episodic_return")) > 3
    )


# ---------------------------------------------------------------------- what is stored
@pytest.mark.parametrize("flags", ["--num-envs 3 --synchronous", "--num-envs 3", "--num-envs 4 --num-explorers 2"])
def test_replay_holds_what_was_played(flags, train, later):
    v = train(*journal(*flags.split(), "--total-timesteps", 240, "--buffer-size", 300, "--learning-starts", 90))
    explorers = v["explorers"] if "--synchronous" in flags else players(v)
    assert v["replay"].inserted == 240
    check_stored(v, explorers)
    actions = np.array([transition[1] for transition in stored(v)])
    assert np.abs(actions).max() <= 1 and len(np.unique(actions[:, 0])) > 200
    episodes = rows(v["run"].dir, "charts/episodic_return")
    wanted = Counter()
    for notes in notes_of(explorers).values():
        ends = np.flatnonzero([note[5] for note in notes])
        for a, b in itertools.pairwise([-1, *ends]):
            wanted[round(sum(note[2] for note in notes[a + 1 : b + 1]), 6), b - a] += 1
    got = Counter((round(row["charts/episodic_return"], 6), row["charts/episodic_length"]) for row in episodes)
    assert got == wanted


def test_two_explorers_have_random_numbers_of_their_own():
    """Although each process would begin with the same ones."""
    args = SimpleNamespace(env_id="Journal-v0", num_steps=1)
    actions = []
    for _ in range(2):
        torch.manual_seed(0)
        explorer = SAC["Explorer"](args, 2, 3, 2)
        explorer.obs[:] = 0  # the same for both
        actions.append(explorer.rollout(SAC["get_weights"](explorer.actor))[0].action)
    assert (np.abs(actions[0] - actions[1]) > 1e-6).all()  # independent draws are once in a million nearer


def test_a_dead_explorer_is_asked_again(train, later):
    """What it was playing is lost, neither stored nor counted as an episode; the run has all its steps."""
    later(Explorer={2, 3, 9})
    v = train(*journal("--num-envs", 4, "--num-explorers", 2, "--total-timesteps", 240, "--buffer-size", 300))
    explorers = players(v)
    assert len(explorers) == 2 + 3 and v["replay"].inserted == 240
    check_stored(v, explorers)
    lengths = {row["charts/episodic_length"] for row in rows(v["run"].dir, "charts/episodic_length")}
    assert lengths == {3, 4} and steps_of(v["critic_optimizer"]) == (240 - 20) // 4


# ---------------------------------------------------------------------- how often, how old
@pytest.mark.parametrize("flags", ["--synchronous", "--num-explorers 1", "--num-explorers 2"])
@pytest.mark.parametrize(("utd_ratio", "num_steps"), [(0.25, 5), (0.3, 3), (2.0, 1)])
def test_updates_are_those_for_the_steps_that_have_arrived(flags, utd_ratio, num_steps, train, later, monkeypatch):
    seen, learned = [], solorl.Run.log

    def note(self, global_step, metrics):
        v = variables()
        seen.append(
            (global_step, v["replay"].inserted, steps_of(v["critic_optimizer"]), steps_of(v["actor_optimizer"]))
        )
        return learned(self, global_step, metrics)

    monkeypatch.setattr("solorl.Run.log", note)
    more = ["--num-steps", num_steps, "--utd-ratio", utd_ratio, "--learning-starts", 20, "--policy-frequency", 1]
    train(*journal("--num-envs", 2, *flags.split(), *more))
    assert len(seen) == 60 // num_steps // (1 if flags.endswith("2") else 2)
    for global_step, inserted, critic, actor in seen:
        assert inserted == global_step
        assert critic == actor == int(utd_ratio * max(0, global_step - 20))


@pytest.mark.parametrize("num_explorers", [1, 2])
def test_explorers_get_the_newest_weights(num_explorers, train, later, monkeypatch):
    """Each rollout is asked for with the actor's weights of that moment; and with one explorer, when its rollout
    arrives, at most one update of the weights came after. One rollout is always under way."""
    arrived, first = [], Later.first

    def newest(self, promises):
        v = variables()
        assert len(promises) == len(v["promises"]) >= num_explorers
        arrived.append((len(self.shared), len(self.asked)))
        return first(self, promises)

    monkeypatch.setattr(Later, "first", newest)
    share = Later.share

    def same(self, value):
        current = variables()["actor"].parameters()
        assert all(np.array_equal(x, y.detach()) for x, y in zip(value, current, strict=True))
        return share(self, value)

    monkeypatch.setattr(Later, "share", same)
    v = train(*journal("--num-envs", 2, "--num-explorers", num_explorers))
    processes = v["run"].processes
    of_asked, count = [], 0
    for _, given in processes.asked:
        while given is not None and given is not processes.shared[count]:
            count += 1
        of_asked.append(count)
    assert count == len(processes.shared) - 1 >= 3  # the last one was handed out, too; none older after a newer one
    if num_explorers == 1:
        rollouts = 60 // 10
        assert len(processes.asked) == rollouts + 1
        for number in range(1, rollouts):
            shared_by_then, _ = arrived[number]
            assert processes.asked[number][1] is None or of_asked[number] >= shared_by_then - 2


def test_actions_are_random_until_learning_starts(train, later):
    """Rollouts that are asked for before these steps have arrived have random actions, that after them has not."""
    v = train(*journal("--num-envs", 2, "--learning-starts", 20))
    given = [weights for _, weights in v["run"].processes.asked]
    assert [weights is None for weights in given] == [True] * 2 + [False] * 5


# ---------------------------------------------------------------------- evaluations
def aim(*flags):
    flags = ["--eval-every", 40, "--eval-episodes", 4, "--num-envs", 2, "--q-lr", 0.01, "--policy-lr", 0.01, *flags]
    return ["sac_parallel", "--env-id", "Aim-v0", *SMALL, *map(str, flags), "--total-timesteps", 400]


def test_the_evaluator_gives_the_score_that_the_run_would_give():
    """For the same weights, on the same seeds; episodes of different lengths are counted once."""
    there = Evaluator(SimpleNamespace(env_id="Dice-v0", eval_episodes=5, seed=3))
    evaluator, actor = SAC["Evaluator"]("Dice-v0", 1, 1), SAC["Actor"](1, 1)
    for _ in range(2):
        returns, lengths = evaluator.play(SAC["get_weights"](actor), there.seeds(1, 0))
    played, wanted = there.play(1, 0, actor.act, SAC["make_env"])
    np.testing.assert_allclose(returns, played, rtol=1e-4)
    assert lengths.tolist() == wanted.tolist() and len(set(wanted)) > 1


def test_an_answer_of_the_evaluator_is_an_evaluation_of_the_weights_that_it_has_played(train, later, monkeypatch):
    """Its score is in the metrics, and the best one's weights are in the model, although the learner has others by
    then; the last evaluation is of the last weights."""
    answers, ask, save = [], Deputy.ask, Ending.save_model

    def note(self, method, inputs):
        answer = ask(self, method, inputs)
        if method == "play":
            answers.append((answer[0].mean(), inputs[0]))
        return answer

    models = []

    def saved(self, name):
        save(self, name)
        models.append((self.evaluator.last[1], load_file(self.folder.path / name)))

    monkeypatch.setattr(Deputy, "ask", note)
    monkeypatch.setattr(Ending, "save_model", saved)
    v = train(*aim())
    scores = [row["eval/episodic_return"] for row in rows(v["run"].dir, "eval/episodic_return")]
    handed = [score for score, _ in answers[: len(scores) - 1]]  # not one that comes in the last iteration
    assert len(scores) > 4 and scores[:-1] == pytest.approx(handed) and len(answers) <= len(scores)
    names = [name for name, _ in v["evaluated"].named_parameters()]
    of_answers = dict(answers)
    for score, model in models[:-2]:
        for name, array in zip(names, of_answers[score], strict=True):
            assert np.array_equal(model[f"evaluated.{name}"], array)
    others = [(model[f"evaluated.{names[0]}"] != model[f"actor.{names[0]}"]).any() for _, model in models]
    assert any(others) and not others[-1]
    assert torch.equal(weights(v["evaluated"]), weights(v["actor"]))


def test_a_dead_evaluator_is_replaced(train, later):
    """The evaluations that are lost are left out."""
    later(Evaluator={1, 3})
    v = train(*aim())
    objects = [x for x in v["run"].processes.objects if hasattr(x, "play")]
    calls, scores = v["run"].processes.calls["Evaluator"], rows(v["run"].dir, "eval/episodic_return")
    assert len(objects) == 3 and 3 < calls - 2 <= len(scores) <= calls - 2 + 1  # and one at the end


def test_target_return_ends_the_run_with_the_weights_that_have_reached_it(train, later):
    v = train(*aim("--target-return", -0.2, "--policy-frequency", 1, "--utd-ratio", 1))
    assert v["run"].ending.why == "target" and v["iteration"] + 1 < v["num_iterations"]
    assert "target -0.2 reached" in train.out


def test_eval_every_0_asks_no_evaluator(train, later):
    v = train(*aim("--eval-every", 0))
    assert v["run"].processes.calls["Evaluator"] == 0 and len(rows(v["run"].dir, "eval/episodic_return")) == 1


# ---------------------------------------------------------------------- the run
def test_a_resumed_run_is_the_uninterrupted_one(train, tmp_path):
    """With --synchronous and --save-replay, bit for bit, where it stopped within episodes."""
    flags = ["--save-replay", "--save-every", 220, "--eval-every", 220, "--num-envs", 2, *HERE, "--log-every", 1]
    whole = train("sac_parallel", "--env-id", "Pendulum-v1", *SMALL, *flags, "--total-timesteps", 660)
    run_dir = tmp_path / "copy"
    shutil.copytree(whole["run"].dir, run_dir)
    drop_last_checkpoint(run_dir)
    v = train("sac_parallel", "--resume", run_dir)
    assert v["start"] == 44 and comparable(run_dir) == comparable(whole["run"].dir)
    for part in ("actor", "critic", "target_critic", "temperature", "evaluated"):
        assert torch.equal(weights(v[part]), weights(whole[part]))
    assert (v["explorers"][0].so_far.returns == whole["explorers"][0].so_far.returns).all()
    assert v["explorers"][0].so_far.returns.any()


def test_returns_of_resumed_episodes_begin_again_where_the_episodes_do(train):
    flags = ["--save-replay", "--save-every", 20, "--num-envs", 2, *HERE, "--num-steps", 1]
    run_dir = train("sac_parallel", "--env-id", "Journal-v0", *SMALL, *flags)["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("sac_parallel", "--resume", run_dir)
    assert "did not replay exactly" in train.out and v["run"].restarted == [0, 1]
    lengths = [row["charts/episodic_length"] for row in rows(run_dir, "charts/episodic_length")]
    assert set(lengths) == {3, 4}


def test_plumbing_is_inert(train):
    """Evaluations and checkpoints change no weight; and the page names all that is logged."""
    words = ["sac_parallel", "--env-id", "probes_offpolicy:Diary-v0", *SMALL, *HERE]
    plain = train(*words)
    other = train(*words, "--eval-every", "20", "--save-every", "20", "--save-replay")
    for part in ("actor", "critic"):
        assert torch.equal(weights(plain[part]), weights(other[part]))
    logged = {key for row in rows(other["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert logged == documented_keys("sac_parallel")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--num-envs 4 --num-explorers 3", "--num-envs 4 cannot be divided into equal parts for --num-explorers 3"),
        ("--num-envs 2 --num-explorers 4", "--num-envs 2 cannot be divided into equal parts for --num-explorers 4"),
        (
            "--total-timesteps 9 --num-envs 2 --learning-starts 0",
            "--total-timesteps 9 is less than one iteration",
        ),
        ("--batch-size 65", "--batch-size must be at most 60 by --buffer-size and --total-timesteps"),
        ("--num-explorers 0", "--num-explorers is 0, but must be at least 1"),
        (
            "--env-id CartPole-v1 --num-explorers 3",
            "CartPole-v1 has discrete actions, but sac_parallel.py",
        ),
        ("--env-id probes_offpolicy:Boundless-v0", "probes_offpolicy:Boundless-v0 has actions without finite bounds"),
    ],
)
def test_bad_input_is_one_sentence(flags, sentence, train, tmp_path, later):
    train(*journal(*flags.split()), code=2)
    assert train.out.startswith(f"error: {sentence}") and train.out.count("\n") == 1, train.out
    assert not (tmp_path / "runs").exists()


def test_without_ray_a_sentence_names_the_extra(train, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    train(*journal(), code=2)
    assert train.out == "error: sac_parallel.py needs ray, which is not installed: pip install 'solorl[ray]'\n"
    assert not (tmp_path / "runs").exists()
    train(*journal("--synchronous"))  # nor is it needed


# ---------------------------------------------------------------------- in processes of Ray
@pytest.fixture
def begun(tmp_path):
    """A training in processes that has written a checkpoint, and its file of words."""
    pytest.importorskip("ray")
    words = [sys.executable, script("sac_parallel"), "--env-id", "Pendulum-v1", "--total-timesteps", 10**7]
    words += ["--num-explorers", 2, "--learning-starts", 200, "--batch-size", 32, "--eval-every", 500]
    words += ["--save-every", 500, "--eval-episodes", 2, "--runs-dir", tmp_path]
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


def evaluations(tmp_path):
    return rows(next(tmp_path.glob("*/metrics.jsonl")).parent, "eval/episodic_return")


@pytest.mark.slow
@pytest.mark.parametrize("which", ["Explorer", "Evaluator"])
def test_what_is_killed_is_replaced_and_the_training_continues(which, tmp_path, begun):
    """Evaluations, too. No process is left after SIGTERM, which saves."""
    process, out = begun
    wait_for(lambda: evaluations(tmp_path), process)
    family = processes_of(process.pid)
    victim = next(pid for pid, words in family.items() if words.startswith(f"ray::{which}"))
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: re.search(rf"{which} \d has ended, .*starts another one", out.read_text()), process)
    step, count = checkpoint_of(tmp_path), len(evaluations(tmp_path))
    wait_for(lambda: checkpoint_of(tmp_path) > step + 1500, process)
    found = wait_for(lambda: newcomers(process.pid, family, f"ray::{which}"), process)
    assert len(found) == 1
    wait_for(lambda: len(evaluations(tmp_path)) > count + 1, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0 and "Traceback" not in out.read_text()
    assert still_running(family) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "method"), [("Explorer", "rollout"), ("Evaluator", "play")])
def test_what_fails_in_a_process_ends_the_run(cls, method, tmp_path):
    pytest.importorskip("ray")
    setup, main = Path(script("sac_parallel")).read_text().split("if __name__")
    fails = f"def fails(self, *inputs):\n    raise ValueError('in {method}')\n\n\n{cls}.{method} = fails\n\n\n"
    (tmp_path / "fails.py").write_text(setup + fails + "if __name__" + main)
    words = [sys.executable, tmp_path / "fails.py", "--env-id", "Pendulum-v1", "--total-timesteps", 5000]
    words += ["--learning-starts", 200, "--eval-every", 400, "--eval-episodes", 1, "--runs-dir", tmp_path / "runs"]
    ended = subprocess.run([*map(str, words)], env=environment(), capture_output=True, text=True, timeout=240)
    assert ended.returncode not in (0, 2) and f"ValueError: in {method}" in ended.stderr


@pytest.mark.slow
def test_a_killed_learner_leaves_no_process_and_a_checkpoint_from_which_the_run_continues(tmp_path, begun):
    process, _ = begun
    wait_for(lambda: checkpoint_of(tmp_path) >= 1000, process)
    family = processes_of(process.pid)
    assert sum(words.startswith(("ray::Explorer", "ray::Evaluator")) for words in family.values()) == 3
    process.kill()
    process.wait()
    left = SimpleNamespace(poll=lambda: None)
    # two agents of Ray look for it less often
    wait_for(lambda: not [words for words in still_running(family).values() if "Agent" not in words], left, 60)
    run_dir, saved = next(tmp_path.glob("*/metrics.jsonl")).parent, checkpoint_of(tmp_path)
    words = [sys.executable, script("sac_parallel"), "--resume", run_dir, "--total-timesteps", saved + 1000]
    done = subprocess.run(
        [*map(str, words), "--resume-changed"], env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resumed at step {saved:,}" in done.stdout and rows(run_dir)[-1]["global_step"] == saved + 1000
    assert [row for row in rows(run_dir, "losses/qf_loss") if row["global_step"] > saved]


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--synchronous", "--num-explorers 2"])
def test_learns_pendulum(flags, train):
    """Random actions give about -1200, a good policy -150."""
    if "--synchronous" not in flags:
        pytest.importorskip("ray")
    words = "--env-id Pendulum-v1 --total-timesteps 12000 --learning-starts 1000 --utd-ratio 0.5 --num-envs 4"
    words += " --eval-every 0 --eval-episodes 10 --log-every 1000"
    v = train("sac_parallel", *words.split(), *flags.split())
    assert v["run"].evaluator.last[1] > -350
