"""Environments in other processes (`--env-workers`): all is as in one process, and none outlives its training."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from conftest import comparable, drop_last_checkpoint, environment, script
from gymnasium.utils.env_checker import data_equivalence
from moody import Moody
from raid import TEAMS, Raid
from safetensors.numpy import load_file

import solorl.games  # noqa: F401  registers them
from solorl.checkpoints import env_state as simulators
from solorl.envs.guest import hosted, wrong
from solorl.envs.pettingzoo import Game, PettingZooEnvs
from solorl.envs.vector import VectorEnvs
from solorl.envs.workers import in_workers

PPO = "--num-envs 4 --num-steps 16 --num-minibatches 2 --total-timesteps 192 --eval-episodes 1 --save-every 64".split()
KINDS = {
    "masks": (VectorEnvs, Moody),
    "dicts": (VectorEnvs, lambda: gym.make("games/TwoSenses-v0")),
    "tuples": (VectorEnvs, lambda: gym.make("games/Tool-v0")),
    "agents": (PettingZooEnvs, lambda: Game(Raid("masked"), TEAMS)),
}


@pytest.fixture(autouse=True)
def fork(request, monkeypatch):
    """Workers start quickly although another test may have imported JAX, except where a test says otherwise."""
    if not request.node.get_closest_marker("slow"):
        monkeypatch.setattr("solorl.envs.workers._start_method", lambda: "fork")


def opened(kind, workers, num_envs=4):
    kind, make_env = KINDS[kind]
    envs = in_workers(kind, [make_env] * num_envs, workers) if workers else kind([make_env] * num_envs)
    simulators.record(envs)
    return envs


def told(envs):
    """What a vector environment says of the present observations."""
    return [getattr(envs, name, None) for name in ("action_mask", "alive", "state")]


def play(envs, seed, steps):
    """Random actions, the allowed ones of a few agents; all that the environments give."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(steps):
        if envs.action_mask is None:
            envs.action_space.seed(int(rng.integers(2**31)))
            action = envs.action_space.sample()
        else:
            action = np.where(envs.action_mask, rng.random(envs.action_mask.shape), -1).argmax(-1)
        found.append([*envs.step(action), *told(envs)])
    return found


def assert_equal(one, two):
    assert data_equivalence(one, two, exact=True), (one, two)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_one_process(kind):
    """Observations, rewards, ends, infos with their types and the order of their keys, masks; reset by seeds or not."""
    one, two = (opened(kind, workers) for workers in (0, 2))
    assert one.single_observation_space == two.single_observation_space
    assert one.observation_space == two.observation_space and one.action_space == two.action_space
    for seed in ([3, 1, 4, 5], 7, None):
        begun = [[*envs.reset(seed=seed), *told(envs)] for envs in (one, two)]
        if seed is not None:
            assert_equal(*begun)
            steps = [play(envs, 1, 40) for envs in (one, two)]
            assert_equal(*steps)
            assert [[*each[4]] for each in steps[0]] == [[*each[4]] for each in steps[1]]
    assert any("final_obs" in each[4] for each in steps[1])


@pytest.mark.parametrize(("kind", "before", "after"), [("masks", 2, 4), ("masks", 0, 2), ("agents", 2, 0)])
def test_a_state_goes_on_with_another_number_of_workers(kind, before, after):
    saved, again = opened(kind, before), opened(kind, after)
    saved.reset(seed=[3, 1, 4, 5])
    play(saved, 1, 25)
    tree = simulators.capture(saved)
    one = opened(kind, 0)
    one.reset(seed=[3, 1, 4, 5])
    play(one, 1, 25)
    for envs in (saved, one):
        for space in (envs.action_space, envs.single_action_space):
            space.seed(1)
    assert_equal(simulators.capture(saved) | {"spaces": 0}, simulators.capture(one) | {"spaces": 0})
    assert simulators.restore(again, tree) == [] and list(simulators.restarted(again)) == []
    assert_equal([simulators.observations(again), *told(again)], [simulators.observations(saved), *told(saved)])
    assert_equal(play(again, 2, 25), play(saved, 2, 25))


def test_environments_that_do_not_replay_restart_and_have_the_index_of_the_training():
    def make_env():
        env = Moody()
        env.np_random_seed  # noqa: B018  has a generator of its own
        return env

    saved, again = (in_workers(VectorEnvs, [make_env] * 4, 2) for _ in range(2))
    for envs in (saved, again):
        simulators.record(envs)
        envs.reset(seed=5)
    tree = simulators.capture(saved)
    tree["envs"][3]["obs"] = tree["envs"][3]["obs"] + 1
    assert "environments [3] restart" in simulators.restore(again, tree)[0]
    tree["envs"].pop()
    with pytest.raises(ValueError, match="there were 3 environments, not 4"):
        simulators.restore(again, tree)
    with pytest.raises(RuntimeError, match=r"worker 1 of 2 .* failed with KeyError"):
        simulators.restore(again, {**tree, "envs": [{}, {}, {}, {}], "autoreset": np.zeros(4, bool)})


def test_numbers_that_are_not_finite_are_found():
    make_envs = [hosted(lambda env_id, spoils=spoils: Moody(spoils=spoils), "Moody-v0") for spoils in (0, 0, 0, 3)]
    one, two = VectorEnvs(make_envs), in_workers(VectorEnvs, make_envs, 2)
    for envs in (one, two):
        envs.reset(seed=1)
        assert wrong(envs) == ""
        play(envs, 1, 5)
        assert wrong(envs).startswith("in environment 3 the reward is nan in step 2")


def test_attributes_of_the_environments_are_within_reach():
    envs = in_workers(VectorEnvs, [Moody] * 4, 2)
    envs.reset(seed=1)
    envs.set_attr("length", [5, 6, 7, 8])
    assert envs.get_attr("length") == (5, 6, 7, 8)
    envs.set_attr("length", 2)
    assert envs.get_attr("length") == (2, 2, 2, 2) and envs.call("now", 0)[3][0].shape == (3,)


# ---------------------------------------------------------------------- trainings
def weights(run):
    return load_file(run.dir / "model_last.safetensors")


def assert_same(a, b):
    """Equal metrics, weights and last checkpoints."""
    assert comparable(a.dir) == comparable(b.dir)
    assert_equal(weights(a), weights(b))
    x, y = (load_file(sorted((run.dir / "checkpoint").iterdir())[-1] / "tensors.safetensors") for run in (a, b))
    assert_equal(x, y)


def test_a_training_and_its_resumption_are_those_of_one_process(train):
    runs = [train("ppo", "--env-id", "CartPole-v1", *PPO, "--env-workers", n)["run"] for n in (0, 2)]
    assert_same(*runs)
    drop_last_checkpoint(runs[0].dir)
    again = train("ppo", "--resume", runs[0].dir, "--env-workers", 4)["run"]
    assert again.args.env_workers == 4 and "warning" not in train.out
    assert_same(*runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "env_id", "flags", "method"),
    [
        ("ppo_masked", "moody:Moody-v0", PPO, "fork"),
        ("ppo_masked", "moody:Moody-v0", PPO, "forkserver"),
        ("ppo_atari", "ALE/Breakout-v5", PPO, "fork"),
        ("mappo", "mpe/simple_spread_v3", ["--num-envs", "4", "--total-timesteps", "800"], "fork"),
        ("dqn", "Acrobot-v1", "--num-envs 4 --total-timesteps 800 --learning-starts 200 --save-replay".split(), "fork"),
    ],
)
def test_trainings_of_all_kinds_are_those_of_one_process(name, env_id, flags, method, train, monkeypatch):
    monkeypatch.setattr("solorl.envs.workers._start_method", lambda: method)
    flags = ["--env-id", env_id, *flags, "--eval-episodes", "1", "--save-every", "64"]
    runs = [train(name, *flags, "--env-workers", n)["run"] for n in (0, 2)]
    assert_same(*runs)
    drop_last_checkpoint(runs[1].dir)
    train(name, "--resume", runs[1].dir)
    assert_same(*runs)


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize("workers", [3, 8])
def test_workers_have_equal_parts(train, workers, tmp_path):
    train("ppo", *PPO, "--env-workers", workers, code=2)
    assert train.out == f"error: --env-workers {workers} cannot have equal parts of 4 environments\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("ppo_jax", [], "ppo_jax.py steps its environments in another way"),
        ("ppo_atari_envpool", [], "ppo_atari_envpool.py steps its environments"),
        ("ippo", ["--env-id", "team/simple_spread_v3"], "team/simple_spread_v3 steps all its games together"),
    ],
)
def test_files_with_other_environments_refuse_the_flag(name, flags, said, train, tmp_path):
    train(name, *flags, "--env-workers", 2, code=2)
    assert train.out.startswith("error: --env-workers: ") and said in train.out and train.out.count("\n") == 1
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------------- how workers end
def is_over(process):
    process.join(10)
    return process.exitcode is not None


def test_workers_end_with_their_environments():
    envs = [opened("masks", 2) for _ in range(3)]
    processes = [each._processes for each in envs]
    envs[0].close()
    assert all(map(is_over, processes[0])) and processes[1][0].is_alive()
    del envs[1]
    gc.collect()
    assert all(map(is_over, processes[1])) and processes[2][0].is_alive()


def test_a_worker_that_is_killed_ends_the_program_with_a_sentence(capfd):
    envs = opened("masks", 2)
    envs.reset(seed=1)
    os.kill(envs._processes[1].pid, signal.SIGKILL)
    assert is_over(envs._processes[1])  # it is not even there to be asked
    with pytest.raises(SystemExit) as end:
        play(envs, 1, 2)
    assert end.value.code == 1
    said = "worker 2 of 2 (--env-workers) has ended with exit code -9; --resume continues from the last checkpoint"
    assert capfd.readouterr().err == f"error: {said}\n"


def test_an_exception_in_an_environment_ends_the_training_with_a_sentence(train, tmp_path):
    train("ppo", "--env-id", "moody:Fails-v0", *PPO, "--env-workers", 2, code=1)
    said = "worker 1 of 2 (--env-workers) failed with ZeroDivisionError: "
    assert train.out.splitlines()[-1].startswith(f"error: {said}"), train.out
    assert "Traceback" not in train.out


def words_of(env_id, tmp_path, *flags):
    words = [sys.executable, script("ppo"), "--env-id", env_id, "--num-envs", 4, "--num-steps", 16, "--log-every", 1]
    words += ["--eval-episodes", 1, "--save-every", 320, "--env-workers", 2, "--runs-dir", tmp_path, *flags]
    return [*map(str, words)]


def begin(words, tmp_path):
    """Start a training in a group of processes of its own, and wait for a checkpoint; it, its workers, its folder."""
    process = subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (found := list(tmp_path.glob("*/checkpoint/step_*/manifest.json"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return process, children(process.pid), found[0].parents[2]


def children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def are_over(pids):
    deadline = time.time() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.time() < deadline:
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_ends_the_training_after_a_save(number, tmp_path):
    process, workers, folder = begin(words_of("CartPole-v1", tmp_path), tmp_path)
    assert len(workers) == 2
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 0) and err == "", err
    assert "saved at step" in out and json.loads((folder / "status.json").read_text())["status"] == "stopped"
    assert are_over(workers)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["training", "worker"])
def test_what_is_killed_leaves_no_process_and_goes_on(killed, train, tmp_path):
    """From the last checkpoint, to the end of a training that nothing has disturbed."""
    length = ["--total-timesteps", "2560"]
    process, workers, folder = begin(words_of("CartPole-v1", tmp_path, *length), tmp_path)
    os.kill(workers[0] if killed == "worker" else process.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert are_over(workers)
    if killed == "worker":
        assert process.returncode == 1 and err.count("\n") == 1, err
        assert "worker 1 of 2 (--env-workers) has ended with exit code -9; --resume continues" in err
        assert json.loads((folder / "status.json").read_text())["status"] == "failed"
    train("ppo", "--resume", folder, "--env-workers", 4)
    words = words_of("CartPole-v1", tmp_path / "whole", *length, "--env-workers", "0")
    run = train("ppo", *words[2:])["run"]
    assert comparable(folder) == comparable(run.dir)
    assert_equal(load_file(folder / "model_last.safetensors"), weights(run))


@pytest.mark.slow
def test_workers_in_the_middle_of_a_step_end_with_a_training_that_is_killed(tmp_path):
    words = words_of("moody:Sleeps-v0", tmp_path)
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL)
    while len(workers := children(process.pid)) < 2:
        time.sleep(0.02)
    time.sleep(3)
    process.kill()
    process.wait()
    assert are_over(workers)
