"""Environments in other processes (`--async-envs`): all is as in one process, and none outlives its training."""

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
from probes_cost import Toll
from safetensors.numpy import load_file

import solorl.games  # noqa: F401  registers them
from solorl.checkpoints import env_state as simulators
from solorl.envs import guest
from solorl.envs.async_envs import AsyncEnvs
from solorl.envs.guest import hosted, wrong
from solorl.envs.vector import VectorEnvs

PPO = "--num-envs 4 --num-steps 16 --num-minibatches 2 --total-timesteps 192 --eval-episodes 1 --save-every 64".split()
PENDULUM = "--env-id Pendulum-v1 --num-envs 3 --total-timesteps 600 --learning-starts 100 --save-replay".split()
KINDS = {
    "masks": Moody,
    "dicts": lambda: gym.make("games/TwoSenses-v0"),
    "tuples": lambda: gym.make("games/Tool-v0"),
    "costs": Toll,
}


@pytest.fixture(autouse=True)
def fork(request, monkeypatch):
    """Processes start quickly although another test may have imported JAX, except where a test says otherwise."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.delitem(sys.modules, "jax", raising=False)


def opened(kind, apart, num_envs=4, **named):
    """Environments as `run.vector_env` gives them, of which a checkpoint is made."""
    make = hosted(lambda env_id: KINDS[kind](**named), f"{kind}-v0")
    envs = (AsyncEnvs if apart else VectorEnvs)([make] * num_envs)
    simulators.record(envs)
    return envs


def play(envs, seed, steps):
    """Random actions, those that are allowed; all that the environments give."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(steps):
        if envs.action_mask is None:
            envs.action_space.seed(int(rng.integers(2**31)))
            action = envs.action_space.sample()
        else:
            action = np.where(envs.action_mask, rng.random(envs.action_mask.shape), -1).argmax(-1)
        found.append([*envs.step(action), envs.action_mask])
    return found


def assert_equal(one, two):
    assert data_equivalence(one, two, exact=True), (one, two)


def by_name(steps):
    """The same with the keys of all infos in the order of the alphabet."""
    order = lambda infos: {key: order(x) if isinstance(x, dict) else x for key, x in sorted(infos.items())}  # noqa: E731
    return [[order(x) if i == 4 else x for i, x in enumerate(step)] for step in steps]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_one_process(kind, monkeypatch):
    """Observations, rewards, ends, infos with their types, masks of current and final observations; reset by seeds."""
    monkeypatch.setitem(guest.KNOWN, "masks-v0", guest.Manners(mask=(3,)))
    one, two = (opened(kind, apart) for apart in (False, True))
    assert one.single_observation_space == two.single_observation_space
    assert one.observation_space == two.observation_space and one.action_space == two.action_space
    assert one.metadata["autoreset_mode"] == two.metadata["autoreset_mode"]
    for seed in ([3, 1, 4, 5], 7):
        assert_equal(*([*envs.reset(seed=seed), envs.action_mask] for envs in (one, two)))
        steps = [by_name(play(envs, 1, 40)) for envs in (one, two)]
        assert_equal(*steps)
    ended = [step[4] for step in steps[1] if "final_obs" in step[4]]
    assert ended and (kind != "masks" or all("action_mask" in infos["final_info"] for infos in ended))


@pytest.mark.parametrize(("before", "after"), [(True, True), (False, True), (True, False)])
def test_a_state_continues_in_other_processes(before, after):
    saved, again, one = opened("masks", before), opened("masks", after), opened("masks", False)
    for envs in (saved, one):
        envs.reset(seed=[3, 1, 4, 5])
        play(envs, 1, 25)
    tree = simulators.capture(saved)
    assert_equal(tree["envs"], simulators.capture(one)["envs"])
    assert simulators.restore(again, tree) == [] and list(simulators.restarted(again)) == []
    assert_equal(simulators.observations(again), simulators.observations(saved))
    assert_equal(again.action_mask, saved.action_mask)
    assert_equal(by_name(play(again, 2, 25)), by_name(play(saved, 2, 25)))


def test_environments_that_do_not_replay_restart():
    saved, again = opened("masks", True), opened("masks", True)
    for envs in (saved, again):
        envs.reset(seed=5)
    tree = simulators.capture(saved)
    tree["envs"][3]["obs"] = tree["envs"][3]["obs"] + 1
    assert "environments [3] restart" in simulators.restore(again, tree)[0]
    tree["envs"].pop()
    with pytest.raises(ValueError, match="there were 3 environments, not 4"):
        simulators.restore(again, tree)


def test_numbers_that_are_not_finite_are_found():
    makes = [hosted(lambda env_id, spoils=spoils: Moody(spoils=spoils), "Moody-v0") for spoils in (0, 0, 0, 3)]
    for envs in (VectorEnvs(makes), AsyncEnvs(makes)):
        envs.reset(seed=1)
        assert wrong(envs) == ""
        play(envs, 1, 5)
        assert wrong(envs).startswith("in environment 3 the reward is nan in step 2")


class Draws(gym.Wrapper):
    """Its reward is a number of the global generator."""

    def step(self, action):
        obs, _, *rest = self.env.step(action)
        return obs, np.random.random(), *rest


def test_global_generators_differ_between_processes():
    envs = AsyncEnvs([lambda: Draws(Moody())] * 3)
    envs.reset(seed=1)
    assert len(set(envs.step(np.zeros(3, int))[1])) == 3


# ---------------------------------------------------------------------- trainings
def weights(run):
    return load_file(run.dir / "model_last.safetensors")


def assert_same(a, b):
    """Equal metrics, weights and last checkpoints."""
    assert comparable(a.dir) == comparable(b.dir)
    assert_equal(weights(a), weights(b))
    x, y = (load_file(sorted((run.dir / "checkpoint").iterdir())[-1] / "tensors.safetensors") for run in (a, b))
    assert_equal(*({name: array for name, array in tree.items() if "autoreset" not in name} for tree in (x, y)))


@pytest.mark.parametrize(
    ("name", "flags"), [("ppo", ["--env-id", "CartPole-v1", *PPO]), ("td3_continuous_action", PENDULUM)]
)
def test_a_training_and_its_resumption_are_those_of_one_process(name, flags, train):
    flags = [*flags, "--eval-episodes", "1", "--save-every", "64"]
    runs = [train(name, *flags, *more)["run"] for more in ([], ["--async-envs"])]
    assert_same(*runs)
    drop_last_checkpoint(runs[0].dir)
    drop_last_checkpoint(runs[1].dir)
    again = train(name, "--resume", runs[0].dir, "--async-envs")["run"]
    assert again.args.async_envs and "warning" not in train.out
    assert not train(name, "--resume", runs[1].dir, "--no-async-envs")["run"].args.async_envs
    assert_same(*runs)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize(("name", "env_id"), [("ppo_masked", "moody:Moody-v0"), ("ppo_atari", "ALE/Breakout-v5")])
def test_trainings_of_all_kinds_are_those_of_one_process(name, env_id, method, train, monkeypatch):
    if method == "forkserver":
        monkeypatch.setitem(sys.modules, "jax", sys.modules.get("jax"))
    else:
        monkeypatch.delitem(sys.modules, "jax", raising=False)
    flags = ["--env-id", env_id, *PPO, "--eval-episodes", "1", "--save-every", "64"]
    runs = [train(name, *flags, *more)["run"] for more in ([], ["--async-envs"])]
    assert_same(*runs)
    drop_last_checkpoint(runs[1].dir)
    train(name, "--resume", runs[1].dir)
    assert_same(*runs)


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("ppo_jax", [], "ppo_jax.py steps its environments in another way"),
        ("ippo", ["--env-id", "team/simple_spread_v3"], "ippo.py steps its environments in another way"),
        ("ippo", ["--env-id", "mpe/simple_spread_v3"], "not for games of several as mpe/simple_spread_v3"),
    ],
)
def test_files_with_other_environments_refuse_the_flag(name, flags, said, train, tmp_path):
    train(name, *flags, "--async-envs", code=2)
    assert train.out.startswith("error: --async-envs") and said in train.out and train.out.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_the_flag_of_version_01_names_the_one_of_today(train):
    train("ppo", "--env-workers", "4", code=2)
    assert "--env-workers; use --async-envs" in train.out and train.out.count("\n") == 1


# ---------------------------------------------------------------------- how processes end
def is_over(process):
    process.join(10)
    return process.exitcode is not None


def test_processes_end_with_their_environments():
    envs = [opened("masks", True, 2) for _ in range(3)]
    processes = [each.processes for each in envs]
    envs[0].close()
    assert all(map(is_over, processes[0])) and processes[1][0].is_alive()
    del envs[1]
    gc.collect()
    assert all(map(is_over, processes[1])) and processes[2][0].is_alive()


@pytest.mark.parametrize("ask", [lambda envs: play(envs, 1, 2), simulators.capture])
def test_a_process_that_is_killed_ends_the_program_with_a_sentence(ask, capfd):
    envs = opened("masks", True)
    envs.reset(seed=1)
    os.kill(envs.processes[1].pid, signal.SIGKILL)
    assert is_over(envs.processes[1])  # it is not even there to be asked
    with pytest.raises(SystemExit) as end:
        ask(envs)
    assert end.value.code == 1
    said = "the process of environment 1 has ended with exit code -9; --resume continues from the last checkpoint"
    assert capfd.readouterr().err == f"error: --async-envs: {said}\n"


class Unreadable(Exception):
    """No other process can make it."""

    def __init__(self, one, two):
        super().__init__(lambda: (one, two))


class Raises(Moody):
    def step(self, action):
        raise Unreadable(1, 2)


def test_an_exception_that_no_other_process_can_read_is_one_sentence(capfd):
    envs = AsyncEnvs([Raises] * 2)
    envs.reset(seed=1)
    with pytest.raises(SystemExit):
        envs.step(np.zeros(2, int))
    err = capfd.readouterr().err
    assert "environment 0 failed: Unreadable" in err and err.count("\n") == 1


def test_an_exception_in_an_environment_ends_the_training_with_a_sentence(train):
    train("ppo", "--env-id", "moody:Fails-v0", *PPO, "--async-envs", code=1)
    assert "error: --async-envs: environment " in train.out.splitlines()[-1], train.out
    assert "failed: ZeroDivisionError" in train.out and train.out.count("ZeroDivision") == 1
    assert "Traceback" not in train.out


def words_of(env_id, tmp_path, *flags):
    words = [sys.executable, script("ppo"), "--env-id", env_id, "--num-envs", 2, "--num-steps", 16, "--log-every", 1]
    words += ["--num-minibatches", 2, "--eval-episodes", 1, "--save-every", 320, "--runs-dir", tmp_path, *flags]
    return [*map(str, words)]


def begin(words, tmp_path):
    """Start a training in a group of processes of its own, and wait for a checkpoint; it, its processes, its folder."""
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
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_ends_the_training_after_a_save(number, tmp_path):
    process, others, folder = begin(words_of("CartPole-v1", tmp_path, "--async-envs"), tmp_path)
    assert len(others) == 2
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 0) and err == "", err
    assert "saved at step" in out and json.loads((folder / "status.json").read_text())["status"] == "stopped"
    assert are_over(others)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["training", "other"])
def test_what_is_killed_leaves_no_process_and_continues(killed, train, tmp_path):
    """From the last checkpoint, to the end of a training that nothing has disturbed."""
    length = ["--total-timesteps", "2560"]
    process, others, folder = begin(words_of("CartPole-v1", tmp_path, *length, "--async-envs"), tmp_path)
    os.kill(others[0] if killed == "other" else process.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert are_over(others)
    if killed == "other":
        assert process.returncode == 1 and err.count("\n") == 1, err
        assert "the process of environment 0 has ended with exit code -9; --resume continues" in err
        assert json.loads((folder / "status.json").read_text())["status"] == "failed"
    train("ppo", "--resume", folder)
    run = train("ppo", *words_of("CartPole-v1", tmp_path / "whole", *length)[2:])["run"]
    assert comparable(folder) == comparable(run.dir)
    assert_equal(load_file(folder / "model_last.safetensors"), weights(run))


@pytest.mark.slow
def test_processes_in_the_middle_of_a_step_end_with_a_training_that_is_killed(tmp_path):
    words = words_of("moody:Sleeps-v0", tmp_path, "--async-envs")
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL)
    while len(others := children(process.pid)) < 2:
        time.sleep(0.02)
    time.sleep(3)
    process.kill()
    process.wait()
    assert are_over(others)
