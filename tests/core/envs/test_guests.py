"""The boundary to environments: what they change of the process, give and lack must not make a training wrong."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, drop_last_checkpoint, own_registry, rows, script
from rude import Rude, Short, Writes

from solorl import EnvPoolVectorEnv
from solorl.checkpoints import env_state
from solorl.compute.device import EVALUATE, env_seed
from solorl.envs.guest import KNOWN, SAID, guest_in, hosted, try_out, vector_env
from solorl.envs.returns import declared, means, note
from solorl.envs.spaces import First
from solorl.envs.surroundings import plain, random_states, seeded
from solorl.envs.vector import VectorEnvs
from solorl.errors import UsageError
from solorl.run.evaluation import open_games, play_episodes

PPO = "--num-envs 2 --num-steps 32 --num-minibatches 2 --eval-episodes 1 --save-every 64 --total-timesteps".split()


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch, tmp_path):
    """What an environment of a test changes of this process."""
    monkeypatch.chdir(tmp_path)
    SAID.clear()
    folder, dtype, handler, argv = Path.cwd(), torch.get_default_dtype(), signal.getsignal(signal.SIGINT), [*sys.argv]
    KNOWN.clear()
    Rude.actions.clear()
    yield
    os.chdir(folder)
    torch.set_default_dtype(dtype)
    signal.signal(signal.SIGINT, handler)
    sys.argv[:] = argv


def only_run():
    (folder,) = Path("runs").iterdir()
    return folder


# ---------------------------------------------------------------------- what it changes of the process
@pytest.mark.parametrize("kind", ["Seeds", "Levels", "Draws"])
def test_who_touches_the_global_generators_has_random_states_of_its_own(kind, train):
    """The actions are those of the same training on an environment that does not, although it seeds in each reset."""
    v = train("ppo", "--env-id", f"rude:{kind}-v0", *PPO, "256", "--learning-rate", "0")
    assert train.out.count(f"rude:{kind}-v0 seeds or draws from the global random generators: it gets its own") == 1
    weights = {name: x.clone() for name, x in v["agent"].state_dict().items()}
    actions = np.array(Rude.actions[-30:])
    rude = [tuple(Rude.actions[i : i + 7]) for i in range(0, 210, 7)]
    assert len(set(rude)) > 10, actions
    plain = train("ppo", "--env-id", "rude:Rude-v0", *PPO, "256", "--learning-rate", "0")
    for name, weight in plain["agent"].state_dict().items():
        assert torch.equal(weight, weights[name])
    assert "random generators" not in train.out


def test_its_random_states_follow_its_seed_and_leave_those_of_the_process():
    try_out(gym.make, "rude:Draws-v0")
    before = plain(random_states())
    one, two, other = (hosted(gym.make, "rude:Draws-v0")() for _ in range(3))
    seen = [[env.reset(seed=seed)[0][1], *(env.step(0)[0][1] for _ in range(7)), env.reset()[0][1]]
            for env, seed in ((one, 5), (two, 5), (other, 6))]  # fmt: skip
    assert seen[0] == seen[1] != seen[2] and len(set(seen[0])) == 9
    assert plain(random_states()) == before
    assert KNOWN["rude:Draws-v0"].changes == ("the global random generators",)


def test_what_is_drawn_where_it_is_built_depends_on_the_seed_of_the_run_and_its_place_only(train):
    """Whatever has been drawn before: in two environments that train and two of an evaluation, which a run that was
    stopped builds later; each environment has its own, in a process of its own, too."""

    def masses(*flags):
        seen, v = [], train("ppo", "--env-id", "rude:Built-v0", *PPO, "128", "--eval-every", "64", *flags)
        played = v["run"].evaluator._envs[""]
        seen += [*v["obs"][0][:, 1], *(env.reset(seed=3)[0][1] for env in played)]
        return np.array(seen).tolist()

    flags = ["--eval-episodes", "2"]
    first = masses(*flags)
    np.random.random(7)
    assert masses(*flags) == first and len(set(first)) == 4
    assert masses(*flags, "--async-envs") == first
    assert not set(masses(*flags, "--seed", "2")) & set(first)
    before = plain(random_states())
    assert len(set(vector_env(gym.make, "rude:Built-v0", 3).reset(seed=3)[0][:, 1].tolist())) == 3
    assert plain(random_states()) == before


def test_who_writes_into_an_action_writes_into_a_copy(train):
    """The file keeps the action that the policy took: what it learns from is what the environment got."""
    Writes.seen.clear()
    v = train("ppo_multidiscrete", "--env-id", "rude:Writes-v0", *PPO, "64")
    kept = v["action"].astype(int).tolist()  # (num_steps, num_envs, 2), of the last rollout
    tried = len(Writes.seen) - 64 - 7  # those of the trial come first, of the evaluation last
    assert [one for step in kept for one in step] == Writes.seen[tried : tried + 64] and np.any(kept)


def test_random_states_of_two_run_seeds_differ():
    """NumPy and torch read 32 bits of a seed, in which those of two runs are equal."""
    states = [plain(seeded(env_seed(seed, 0, 0))) for seed in range(1, 5)]
    for part in range(3):  # of Python, NumPy and torch
        assert len({str(state[part]) for state in states}) == 4


def test_who_refuses_large_seeds_gets_short_ones(train):
    """Of 31 bits, which differ from each other and between runs, also where the last bits of the large ones do not."""
    found = []
    for seed in ("1", "2", "2147483647"):
        Short.seeds.clear()
        train("ppo", "--env-id", "rude:Short-v0", *PPO, "64", "--seed", seed)
        found.append(set(Short.seeds) - {0})
        assert len(found[-1]) == 3 and max(found[-1]) < 2**31  # two that train, one of the evaluation
    assert len(set.union(*found)) == 9
    assert not try_out(gym.make, "rude:Seeds-v0").short


@pytest.mark.parametrize(
    ("step", "mask", "said"),
    [
        (
            lambda self, action: None,
            None,
            "its step must return five values, obs, reward, terminated, truncated, info, but",
        ),
        (None, np.ones(3, np.int8), "its action_mask does not fit Discrete(2)"),
    ],
)
def test_usual_mistakes_are_one_sentence(step, mask, said, monkeypatch):
    if step:
        monkeypatch.setattr(Rude, "step", step)
    if mask is not None:
        monkeypatch.setattr(Rude, "info", lambda self: {"action_mask": mask})
    with pytest.raises(UsageError, match="rude:Rude-v0") as error:
        try_out(lambda env_id: gym.make(env_id, disable_env_checker=True), "rude:Rude-v0")
    assert said in str(error.value)


@pytest.mark.parametrize("wrong", ["reset", "reward", None])
def test_an_environment_that_fails_in_its_close_hides_nothing(wrong, train, monkeypatch):
    """No sentence about what was wrong before, and not that the run has finished."""

    def close(self):
        raise RuntimeError("it does not close")

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32)

    monkeypatch.setattr(Rude, "close", close)
    if wrong == "reset":
        monkeypatch.setattr(Rude, "reset", reset)
        with pytest.raises(UsageError, match="its reset must return two values, obs and a dict info"):
            try_out(lambda env_id: gym.make(env_id, disable_env_checker=True), "rude:Rude-v0")
        return
    flags = [*PPO, "128", "--eval-every", "32"]
    if wrong == "reward":
        monkeypatch.setattr(Rude, "reward", property(lambda self: np.nan if len(Rude.actions) > 100 else 1.0))
        train("ppo", "--env-id", "rude:Rude-v0", *flags, code=3)
        assert "in environment" in train.out and "the reward is nan in step" in train.out
    else:
        train("ppo", "--env-id", "rude:Rude-v0", *flags)
    status = "diverged" if wrong else "finished"
    assert json.loads((only_run() / "status.json").read_text())["status"].startswith(status)


def test_what_only_games_of_several_agents_say_is_not_read_of_others(monkeypatch):
    """Of one agent `state` may have another shape in each step."""
    monkeypatch.setattr(Rude, "info", lambda self: {"state": np.zeros(self.t), "alive": "no", "lives": 3})
    env = hosted(lambda env_id: gym.make(env_id, disable_env_checker=True), "rude:Rude-v0")()
    assert env.reset(seed=1)[1] == env.step(0)[4] == {"lives": 3}


def test_environments_of_a_placed_object_are_guests_too():
    """In its process nobody has tried them out: one that seeds the global generators gets its own."""
    assert not KNOWN
    envs = vector_env(gym.make, "rude:Seeds-v0", 2)
    envs.reset(seed=[1, 2])
    before = plain(random_states())
    for _ in range(20):
        envs.step(np.zeros(2, np.int64))
    assert plain(random_states()) == before and all(guest_in(env).own for env in envs.envs)


def test_others_have_none_of_their_own():
    assert try_out(gym.make, "CartPole-v1")[:2] == ((), None)
    assert hosted(gym.make, "CartPole-v1")().own is None


@pytest.mark.parametrize("kind", ["Seeds", "Draws"])
def test_its_random_states_are_part_of_a_checkpoint(kind):
    try_out(gym.make, f"rude:{kind}-v0")
    whole, cut = (VectorEnvs([hosted(gym.make, f"rude:{kind}-v0")] * 2) for _ in range(2))
    for envs in (whole, cut):
        env_state.record(envs)
        envs.reset(seed=[1, 2])
    for _ in range(10):
        whole.step([0, 1])
    assert env_state.restore(cut, env_state.capture(whole)) == [] and list(env_state.restarted(cut)) == []
    for _ in range(10):
        np.testing.assert_array_equal(whole.step([1, 0])[0], cut.step([1, 0])[0])


def test_a_resumed_training_continues_exactly_with_them(train, tmp_path):
    flags = ["--env-id", "rude:Draws-v0", *PPO, "320"]
    whole = train("ppo", *flags)
    folder = only_run()
    want = comparable(folder)
    drop_last_checkpoint(folder)
    again = train("ppo", "--resume", folder)
    assert comparable(folder) == want and "restart" not in train.out
    for name, weight in whole["agent"].state_dict().items():
        assert torch.equal(weight, again["agent"].state_dict()[name])


@pytest.mark.parametrize("kind", ["Moves", "MovesLate"])
def test_the_current_folder_is_the_environments_own(kind, train, tmp_path):
    train("ppo", "--env-id", f"rude:{kind}-v0", *PPO, "256", "--eval-every", "128")
    assert Path.cwd() == tmp_path
    assert f"rude:{kind}-v0 changes the current folder: it gets its own" in train.out
    assert "run folder runs/" in train.out and "play runs/" in train.out
    folder = only_run()
    names = {"metrics.jsonl", "model.safetensors", "model_last.safetensors", "learning_curve.png", "checkpoint"}
    assert names <= {path.name for path in folder.iterdir()} and rows(folder)


def test_types_signals_and_arguments_are_put_back(train):
    train("ppo", "--env-id", "rude:Types-v0", *PPO, "128")
    assert torch.get_default_dtype() == torch.float32 and signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    assert "mine" not in sys.argv and "torch's default type" in train.out


def test_what_the_script_changes_before_the_first_reset_stays(tmp_path, capsys):
    """Of the current folder and torch's default type, after the environments were made."""
    env = hosted(gym.make, "rude:Rude-v0")()
    (tmp_path / "new").mkdir()
    os.chdir(tmp_path / "new")
    torch.set_default_dtype(torch.float64)
    for _ in range(2):
        env.reset(seed=1)
        env.step(0)
    assert (Path.cwd(), torch.get_default_dtype()) == (tmp_path / "new", torch.float64)
    assert capsys.readouterr().err == "" and env.own is None


@pytest.mark.parametrize("kind", ["Rude", "Moves"])
def test_a_current_folder_that_is_removed_ends_no_training(kind, tmp_path, capsys):
    """Also where the environment has a folder of its own."""
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    env = hosted(gym.make, f"rude:{kind}-v0")()
    env.reset(seed=1)
    (tmp_path / "gone").rmdir()
    for _ in range(2):
        env.step(0)
        env.reset()
    assert kind == "Moves" or (env.own is None and capsys.readouterr().err == "")
    assert len(VectorEnvs([hosted(gym.make, f"rude:{kind}-v0")]).reset(seed=1)[0]) == 1


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("import argparse; argparse.ArgumentParser().parse_args()", 0, "evaluation"),
        ("import sys; print('demo'); sys.exit(0)", 2, "importing the module script_a ends the program by sys.exit(0)"),
    ],
)
def test_a_module_may_read_the_command_line_but_not_end_the_program(end, code, said, train, monkeypatch, tmp_path):
    own_registry(monkeypatch)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "script_a", raising=False)
    text = "import gymnasium, rude\ngymnasium.register('A-v0', rude.Rude)\n"
    (tmp_path / "script_a.py").write_text(text + end)
    train("ppo", "--env-id", "script_a:A-v0", *PPO, "64", code=code)
    assert said in train.out and "Traceback" not in train.out


# ---------------------------------------------------------------------- what it gives
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"reward": None}, "its reward must be one number, but is None"),
        ({"reward": "1.0"}, "its reward must be one number, but is '1.0'"),
        ({"reward": np.ones(1)}, "its reward must be one number, but is an array of shape (1,)"),
        ({"flag": None}, "its step ends by False and None, which are not True or False"),
        ({"flag": "no"}, "its step ends by False and 'no', which are not True or False"),
        ({"flag": np.zeros(2, bool)}, "its step ends by False and array([False, False]), which are not True or False"),
        ({"obs": np.zeros(3, np.float32)}, "the observation of its step has shape (3,), but its space has (2,)"),
    ],
)
def test_what_is_wrong_later_is_one_sentence(given, said):
    env = hosted(lambda env_id: gym.make("rude:Gives-v0", disable_env_checker=True, **given), "Mine-v0")()
    env.reset(seed=1)
    with pytest.raises(UsageError, match="Mine-v0") as error:
        for _ in range(101):
            if env.step(0)[2]:
                env.reset()
    assert said in str(error.value)


@pytest.mark.parametrize("flags", [[], ["--async-envs"]])
def test_an_environment_that_ends_the_program_ends_the_training_with_a_sentence(flags, train, monkeypatch):
    monkeypatch.delitem(sys.modules, "jax", raising=False)  # or processes would start slowly
    train("ppo", "--env-id", "rude:Exits-v0", *PPO, "512", *flags, code=1)
    assert "rude:Exits-v0: step ends the program by sys.exit(None)" in train.out and "Traceback" not in train.out
    assert "--resume continues from the last checkpoint" in train.out
    assert list(only_run().glob("checkpoint/step_*"))


def test_a_reset_without_options_is_one_sentence(train):
    train("ppo", "--env-id", "rude:NoOptions-v0", *PPO, "64", code=2)
    assert "rude:NoOptions-v0: its reset takes no options; write `def reset(self, *, seed=None" in train.out
    assert not Path("runs").exists()


@pytest.mark.parametrize("flags", [[], ["--async-envs"]])
def test_info_of_any_kind_is_not_read(flags, train, monkeypatch):
    monkeypatch.delitem(sys.modules, "jax", raising=False)  # or processes would start slowly
    v = train("ppo", "--env-id", "rude:Ragged-v0", *PPO, "64", *flags)
    if not flags:
        assert set(v["envs"].step(np.zeros(2, int))[4]) - {"next_obs"} <= {
            "final_obs", "_final_obs", "final_info", "_final_info"
        }  # fmt: skip


def test_numbers_of_info_that_an_environment_declares_are_given():
    envs = VectorEnvs([hosted(gym.make, "rude:Counts-v0")] * 2)
    envs.reset(seed=1)
    assert envs.step([0, 0])[4]["score"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("what", ["missing", "none"])
def test_a_game_that_gives_no_reward_is_one_sentence(what):
    env = hosted(lambda env_id: gym.make("rude:Forgets-v0", what=what), "Mine-v0")()
    env.reset(seed=1)
    with pytest.raises(UsageError, match=r"Mine-v0: forgets: the reward of two must be .* not None"):
        for _ in range(3):
            env.step(np.zeros(2, int))


def test_the_game_and_the_step_of_a_nan_are_named(train, tmp_path):
    source = script("ippo").read_text().replace("gym.make(env_id", "gym.make(env_id, what='nan'")
    (tmp_path / "mine.py").write_text(source)
    flags = "--num-envs 2 --num-steps 16 --num-minibatches 2 --total-timesteps 64 --eval-episodes 1 --log-every 1"
    train(tmp_path / "mine.py", "--env-id", "rude:Forgets-v0", *flags.split(), code=3)
    assert "in environment 0 the reward of two is nan in step 3 of an episode" in train.out


# ---------------------------------------------------------------------- success and cost
def small(seeds):
    """What `Declares` says in the last step of the first episode of each seed."""
    return [float(np.random.default_rng(np.random.SeedSequence(seed)).random() < 0.5) for seed in seeds]


@pytest.mark.parametrize("together", [False, True])
def test_success_is_that_of_the_last_step_and_costs_are_summed(together):
    """Of environments one by one and of a vector environment, whatever the types of the numbers are."""
    hosts, seeds = [hosted(gym.make, "rude:Declares-v0")] * 4, [1, 2, 3, 6]
    assert 0 < sum(small(seeds)) < 4
    said = []
    envs = [VectorEnvs(hosts)] if together else [make() for make in hosts]
    play_episodes(envs, lambda obs: np.zeros(4, int), seeds, said=said)
    assert said == [{"success_rate": value, "episodic_cost": 12.0} for value in small(seeds)]
    play_episodes(envs, lambda obs: np.zeros(4, int), seeds, said=said)
    assert len(said) == 8 and said[:4] == said[4:]


def test_what_is_no_finite_number_declares_nothing():
    assert declared({"is_success": "yes", "success": None, "cost": [1.0], "x": 1}) == {}
    assert declared({"is_success": np.nan, "cost": np.zeros(2), "success": np.array(True)}) == {"success": 1.0}


def test_an_episode_that_never_says_success_has_failed():
    """Where others say it: some environments only say when there is one."""
    episodes = [{}, {}]
    for numbers in ({"success": 1.0}, {"is_success": 0.0, "success": 1.0}, {"success": 1.0}):
        note(episodes[0], numbers)
    assert means(episodes) == {"success_rate": 0.5}
    note(episodes[0], {})
    assert means(episodes) == {"success_rate": 0.0} and means([{}, {}]) == {}


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_declared_numbers_are_metrics_of_evaluations(name, train, solo):
    """Of two evaluations; also `solo play` says them. The training sees the same environment."""
    sizes = [*PPO, "128"] if name == "ppo" else "--total-timesteps 128 --learning-starts 32 --eval-episodes 1".split()
    v = train(name, "--env-id", "rude:Declares-v0", *sizes, "--eval-episodes", "3", "--eval-every", "64")
    found = rows(v["run"].dir, "eval/success_rate")
    wanted = np.mean(small(v["run"].evaluator.seeds(EVALUATE, 0)))
    assert [(row["eval/success_rate"], row["eval/episodic_cost"]) for row in found] == [(wanted, 12.0)] * 2
    assert len(rows(v["run"].dir, "eval/episodic_return")) == 2
    code, out, err = solo("play", v["run"].dir, "--episodes", "2", "--trust-script")
    assert code == 0 and re.search(r"to 7.0, episodic cost 12, success rate (0|0.5|1)$", out, re.M), out + err
    train("ppo", "--env-id", "rude:Rude-v0", *PPO, "64")
    assert not any("success" in name or "cost" in name for folder in Path("runs").glob("*Rude*")
                   for row in rows(folder) for name in row)  # fmt: skip


def test_envpool_declares_too():
    """Whose infos are arrays, as those of its MetaWorld (slow to open); also of one environment of it."""
    envpool = pytest.importorskip("envpool")

    class Pool:
        """Says success with the second step of the first environment."""

        def __init__(self, *args, **kwargs):
            self.pool, self.steps = envpool.make_gymnasium(*args, **kwargs), 0

        def reset(self, *args):
            self.steps = 0
            obs, info = self.pool.reset(*args)
            return obs, info | {"success": np.full(len(obs), 9.0)}

        def step(self, action):
            self.steps += 1
            *step, info = self.pool.step(action)
            return *step, info | {"success": np.array([self.steps == 2, False])[: len(action)]}

    def saying(num_envs):
        envs = EnvPoolVectorEnv("CartPole-v1", num_envs, 1, max_steps=2)
        envs.envpool = SimpleNamespace(make_gymnasium=Pool)
        return envs

    said, envs, one = [], saying(2), First(saying(1))
    play_episodes([envs], lambda obs: np.zeros(2, int), [1, 2], said=said)
    play_episodes([one], lambda obs: np.zeros(1, int), [1], said=said)
    assert said == [{"success_rate": 1.0}, {"success_rate": 0.0}, {"success_rate": 1.0}]
    envs.reset(seed=[1, 2])
    assert envs.step(np.zeros(2, int))[4]["success"].tolist() == [False, False]
    assert envs.step(np.zeros(2, int))[4]["final_info"]["success"].tolist() == [True, False]


# ---------------------------------------------------------------------- wrappers, masks, ends
def test_wrappers_with_running_statistics_are_refused(train, tmp_path):
    line = "    env = gym.make(env_id, **kwargs)"
    for wrapper in ("NormalizeObservation", "NormalizeReward"):
        mine = script("ppo").read_text().replace(line, f"    env = gym.wrappers.{wrapper}(gym.make(env_id, **kwargs))")
        (tmp_path / "mine.py").write_text(mine)
        train(tmp_path / "mine.py", "--env-id", "CartPole-v1", *PPO, "64", code=2)
        assert f"CartPole-v1: the wrapper {wrapper} has running statistics" in train.out
        assert "ppo_normalized.py and ppo_continuous_action.py have a normaliser" in train.out
    line = "    run.require_spaces"
    mine = script("ppo").read_text().replace(line, f"    envs = gym.wrappers.vector.NormalizeReward(envs)\n{line}")
    (tmp_path / "mine.py").write_text(mine)
    train(tmp_path / "mine.py", "--env-id", "CartPole-v1", *PPO, "64", code=2)
    assert "the wrapper NormalizeReward has running statistics" in train.out and not Path("runs").exists()


@pytest.mark.parametrize("name", ["ppo_masked", "ppo_lstm_masked"])
def test_masks_that_only_some_steps_give_are_used(name, train):
    """The environment refuses what they forbid, also in the evaluation."""
    v = train(name, "--env-id", "rude:Late-v0", *PPO, "128")
    assert v["envs"].action_mask.shape == (2, 2) and "action_mask" not in train.out


def test_an_evaluation_without_an_end_is_spoken_of(monkeypatch, capsys):
    monkeypatch.setattr("solorl.run.evaluation.MAX_STEPS", 10_100)
    [env] = open_games(gym.make, "rude:Endless-v0", [0])
    assert play_episodes([env], lambda obs: np.zeros(1, int), [1])[1].tolist() == [10_100]
    assert capsys.readouterr().err.count("has come to 10,000 steps in an evaluation, which cuts it at") == 1


# ---------------------------------------------------------------------- advice
BOX, IMAGE = gym.spaces.Box(-1.0, 1.0, (2,), np.float32), gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
FORCE = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
FLAT = "FlattenObservation makes a vector"


@pytest.mark.parametrize(
    ("name", "obs", "action", "said", "not_said"),
    [
        ("ppo", BOX, FORCE, "; use ppo_continuous_action.py\n", FLAT),
        ("ppo", IMAGE, FORCE, "; use ppo_image_continuous_action.py\n", FLAT),
        ("ppo_continuous_action", IMAGE, FORCE, "; use ppo_image_continuous_action.py\n", FLAT),
        ("ppo_dict", gym.spaces.Dict({"a": BOX}), FORCE, "; use ppo_dict_continuous_action.py\n", FLAT),
        ("ppo_lstm", BOX, FORCE, "; use ppo_lstm_continuous_action.py\n", FLAT),
        ("ppo_dict", IMAGE, gym.spaces.MultiDiscrete([2, 2]), "no file takes image observations with multidiscrete actions, the nearest are ppo_image.py (image -> discrete) and ppo_multidiscrete.py (vector -> multidiscrete)\n", FLAT),  # noqa: E501
        ("dqn", IMAGE, gym.spaces.MultiDiscrete([2, 2]), "no file takes image observations with multidiscrete", FLAT),
        ("ppo_dict", BOX, FORCE, "; use ppo_continuous_action.py\n", FLAT),
        ("dqn", IMAGE, FORCE, "; use drq_v2.py\n", FLAT),
        ("sac_continuous_action", BOX, gym.spaces.MultiDiscrete([2, 2]), "; use ppo_multidiscrete.py\n", FLAT),
        ("ppo", gym.spaces.Sequence(BOX), None, "has sequence observations, but ppo.py takes vector observations\n", FLAT),  # noqa: E501
        ("ppo", gym.spaces.Graph(BOX, None), None, "has graph observations, but ppo.py takes vector observations\n", FLAT),  # noqa: E501
        ("ppo", gym.spaces.Dict({}), None, "has empty dict observations, but ppo.py takes vector observations", FLAT),
        ("ppo_dict", gym.spaces.Dict({}), None, "has empty dict observations, but ppo_dict.py takes dict", FLAT),
        ("dqn", gym.spaces.Discrete(5), None, FLAT, "; use"),
    ],
)  # fmt: skip
def test_refusals_look_at_observations_and_actions(name, obs, action, said, not_said, train, monkeypatch):
    monkeypatch.setitem(gym.registry, "Of-v0", gym.registry["Of-v0"])
    gym.register("Of-v0", lambda: __import__("rude").Of(obs, action), disable_env_checker=True)
    flags = ["--learning-starts", "1"] if name in ("dqn", "sac_continuous_action") else []
    train(name, "--env-id", "Of-v0", *flags, code=2)
    assert said in train.out and not_said not in train.out and train.out.count("\n") == 1
    assert not Path("runs").exists()


def test_minatar_of_its_authors_is_found(train):
    """Its package registers nothing when it is imported, and Gymnasium no longer calls its entry point."""
    v = train("ppo", "--env-id", "MinAtar/Breakout-v1", *PPO, "256")
    assert v["envs"].single_observation_space.shape == (10, 10, 4) and v["envs"].single_action_space.n == 3
    games = [step["charts/episodic_return"] for step in rows(only_run()) if "charts/episodic_return" in step]
    assert len(games) > 10 and max(games) > 0
