"""Bad input gets one sentence and exit code 2, and nothing is written."""

import dataclasses
import re
import shutil
import sys
import tomllib

import gymnasium as gym
import pytest
from conftest import ROOT, refused, run, script

from solorl import RunArgs, errors
from solorl.envs import ids
from solorl.envs.spaces import action_kind

CASES = {
    "--env-id CartPol-v1": "there is no environment CartPol-v1; did you mean CartPole-v1",
    "--env-id NoSuchThing-v0": "there is no environment NoSuchThing-v0",
    "--env-id=": "there is no environment",
    "--env-id Pong-MinAtar": "there is no environment Pong-MinAtar",
    "--env-id nopackage:Env-v0": "there is no environment nopackage:Env-v0",
    "--env-id :CartPole-v1": "there is no environment :CartPole-v1",
    "--env-id .package:CartPole-v1": "there is no environment .package:CartPole-v1",
    "--env-id CartPole-v9": "there is no environment CartPole-v9; did you mean CartPole-v1",
    "--env-id Hopper-v3": "Hopper-v3 can no longer be made; take Hopper-v5",
    "--env-id Pusher-v4": "Pusher-v4 can no longer be made; take Pusher-v5",
    "--env-id Pendulum-v1": "Pendulum-v1 has continuous actions, but ppo.py takes discrete actions; "
    "use ppo_continuous_action.py",
    "--env-id probes:Pixels-v0": "probes:Pixels-v0 has image observations, but ppo.py takes vector observations; "
    "use ppo_image.py",
    "--env-id Pong": "there is no environment Pong; did you mean ALE/Pong-v5?",
    "--env-id Pong-v5": "there is no environment Pong-v5; did you mean ALE/Pong-v5?",
    "--env-id cartpole": "there is no environment cartpole; did you mean CartPole-v1",
    "--env-id CartPol-v1 --gamma 7": "there is no environment CartPol-v1",
    "--env-id probes:Entries-v0": "probes:Entries-v0 has dict observations, but ppo.py takes vector observations",
    "--total-timesteps 511": "--total-timesteps 511 is less than one iteration of 512 steps",
    "--num-minibatches 3": "--num-minibatches 3 must divide the batch of 512 steps",
    "--num-envs 0": "--num-envs is 0, but must be at least 1",
    "--num-steps -1": "--num-steps is -1, but must be at least 1",
    "--learning-rate -0.1": "--learning-rate is -0.1, but must be at least 0",
    "--learning-rate nan": "--learning-rate is nan, but must be a finite number",
    "--learning-rate inf": "--learning-rate is inf, but must be a finite number",
    "--gamma 1.5": "--gamma is 1.5, but must be at most 1",
    "--target-kl -1": "--target-kl is -1.0, but must be at least 0",
    "--seed -1": "--seed is -1, but must be at least 0",
    "--seed 2147483648": "--seed is 2147483648, but must be at most 2147483647",
    "--eval-episodes 0": "--eval-episodes is 0, but must be at least 1",
    "--lerning-rate 1": "unknown option --lerning-rate; did you mean --learning-rate?",
    "--num-envs many": "--num-envs must be an integer such as 8, 500k, 2M or 1e6, got 'many'",
    "--num-envs": "--num-envs needs a value",
    "extra": "'extra' does not follow a flag that takes a value",
    "--device cuda": "--device cuda was asked for, but torch sees 0 CUDA and 0 MPS devices; --device cpu",
    "--device tpu9": "--device tpu9 was asked for, but torch sees",
    "--device mps": "--device mps was asked for, but torch sees 0 CUDA and 0 MPS devices",
    "--target-return often": "--target-return must be a number or auto or None, got 'often'",
    "--env-id probes:ActionCounts-v0 --target-return auto": "probes:ActionCounts-v0 has no reward threshold for "
    "--target-return auto; give a number",
    "--resume nowhere": "there is no run folder nowhere",
    "--env-id FetchReach-v4": "FetchReach-v4 needs a package: pip install gymnasium-robotics",
    "--env-id MiniGrid-Empty-5x5-v0": "MiniGrid-Empty-5x5-v0 needs a package: pip install minigrid",
}


@pytest.mark.parametrize("flags", list(CASES))
def test_one_sentence_and_exit_code_2(train, tmp_path, flags):
    train("ppo", *flags.split(), "--runs-dir", str(tmp_path / "runs"), code=2)
    assert CASES[flags] in train.out and "Traceback" not in train.out
    assert len(train.out.strip().splitlines()) == 1, train.out
    assert not (tmp_path / "runs").exists()


def test_in_a_real_process(tmp_path):
    done = run("python3", "-c", "pass")
    assert done.returncode == 0
    done = run(sys.executable, script("ppo"), "--num-envs", "0", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and list(tmp_path.iterdir()) == []
    assert done.stderr == "error: --num-envs is 0, but must be at least 1\n"


def test_a_run_folder_that_cannot_be_written(train, tmp_path):
    (tmp_path / "file").write_text("")
    train("ppo", "--runs-dir", tmp_path / "file", code=2)
    assert "cannot be written" in train.out and len(train.out.strip().splitlines()) == 1


@pytest.fixture
def finished(train):
    return train("ppo", *"--num-envs 2 --num-steps 32 --total-timesteps 128 --eval-episodes 1".split())["run"].dir


def test_resume_of_another_script(train, finished, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(script("ppo").read_text())
    before = sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*"))
    train(str(other), "--resume", finished, code=2)
    assert f"{finished} is a run of ppo.py, not of other.py" in train.out
    assert before == sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*"))


def test_resume_with_other_hyper_parameters(train, finished):
    train("ppo", "--resume", finished, "--gamma", "0.5", "--seed", "7", code=2)
    assert "--seed 1 -> 7" in train.out and "--gamma 0.99 -> 0.5" in train.out and "--resume-changed" in train.out
    v = train("ppo", "--resume", finished, "--total-timesteps", "256", "--resume-changed")
    assert v["args"].num_envs == 2 and v["start"] == 2 and v["iteration"] == 3
    train("ppo", "--resume", finished, "--eval-episodes", "2")  # plumbing may differ


def test_resume_of_something_else(train, tmp_path):
    train("ppo", "--resume", tmp_path, code=2)
    assert "is not a run folder: its config.json cannot be read" in train.out


def test_resume_names_the_nearest_folder(train, finished):
    train("ppo", "--resume", str(finished)[:-1], code=2)
    assert f"did you mean {finished.name}?" in train.out


def test_a_missing_simulator_names_the_extra(monkeypatch):
    real = ids.importlib.util.find_spec
    hidden = ("Box2D", "ale_py", "gymnax")
    monkeypatch.setattr(ids.importlib.util, "find_spec", lambda name: None if name in hidden else real(name))
    for env_id, sentence in (
        ("LunarLander-v3", "needs an extra: pip install 'solorl[box2d]'"),
        ("ALE/Pong-v5", "needs an extra: pip install 'solorl[atari]'"),
        ("PongNoFrameskip-v4", "needs an extra: pip install 'solorl[atari]'"),
        ("Asterix-MinAtar", "needs an extra: pip install 'solorl[gymnax]' (which takes Gymnasium back to 1.3)"),
    ):
        with pytest.raises(errors.UsageError, match=re.escape(f"{env_id} {sentence}")):
            ids.check_env_id(env_id)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("ppo_jax", "ppo_jax.py needs jax, which is not installed: pip install 'solorl[jax]'"),
        ("ppo --env-id phys2d/CartPole-v1", "phys2d/CartPole-v1 needs an extra: pip install 'solorl[jax]'"),
        ("ppo --env-id needs_jax:Walk-v0", "needs_jax:Walk-v0 needs jax, which is not installed: pip install"),
        ("ppo --env-id CartPole-v7", "there is no environment CartPole-v7; did you mean"),
    ],
)
def test_without_jax_a_sentence_names_the_extra(solo, tmp_path, monkeypatch, flags, sentence):
    (tmp_path / "needs_jax.py").write_text("import jax.numpy")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "jax", None)
    for module in ("solorl.envs.gymnax", "solorl.envs.mjx"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    refused(solo("train", *flags.split()), sentence)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("module", ["optax", "envpool", "gymnax", "mujoco.mjx", "pettingzoo", "mpe2"])
def test_any_module_of_an_extra_that_a_script_misses_is_named(module, solo, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "own.py").write_text(f"import {module}.part")
    extra = {"optax": "jax", "mujoco.mjx": "mjx", "mpe2": "pettingzoo"}.get(module, module)
    refused(solo("train", tmp_path / "own.py"), f"own.py needs {module}, which is not installed", f"solorl[{extra}]'")
    (tmp_path / "own.py").write_text("import no_extra_has_it")
    with pytest.raises(ModuleNotFoundError):
        solo("train", tmp_path / "own.py")


def test_every_extra_that_a_sentence_names_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "".join(path.read_text() for path in (ROOT / "solorl").rglob("*.py"))
    named = set(re.findall(r"solorl\[(\w+)\]", text)) | {extra for _, extra in ids.EXTRAS.values()}
    named |= set(errors.BRINGS.values())
    assert len(named) >= 5 and named <= set(extras)


def test_discrete_actions_that_do_not_start_at_zero():
    assert action_kind(gym.spaces.Discrete(3, start=1)) == "discrete (from 1)"
    assert action_kind(gym.spaces.Discrete(3)) == "discrete"
    assert action_kind(gym.spaces.MultiDiscrete([2, 2])) == "multidiscrete"
    assert action_kind(gym.spaces.MultiDiscrete([2, 2], start=[0, 1])) == "multidiscrete (not from 0)"


def test_help_lists_every_option_with_its_comment(train):
    train("ppo", "--help")
    own, shared = train.out.split("options of every run:")
    assert "--clip-coef" in own and "epsilon of Eq. 7 [0.2]" in own and "--anneal-lr, --no-anneal-lr" in own
    assert "--target-return" in shared and "--seed" in shared and "--clip-coef" not in shared
    for field in dataclasses.fields(RunArgs):
        assert "--" + field.name.replace("_", "-") in shared


@pytest.mark.parametrize("name", ["ppo_continuous_action", "rpo_continuous_action"])
def test_discrete_actions_are_refused_by_continuous_files(name, train):
    train(name, "--env-id", "CartPole-v1", code=2)
    sentence = f"CartPole-v1 has discrete actions, but {name}.py takes continuous actions; use ppo.py"
    assert sentence in train.out and len(train.out.strip().splitlines()) == 1


def test_a_training_that_is_too_short_to_learn_says_so(train):
    flags = "--total-timesteps 100 --learning-starts 100 --eval-episodes 1".split()
    train("dqn", *flags)
    assert "warning: nothing will be learned: --learning-starts 100 is not less than --total-timesteps 100" in train.out


def test_spaces_are_those_of_the_environment_as_the_script_makes_it(train, tmp_path):
    """Who changes `make_env` so that a discrete environment takes numbers can train on it."""
    source, line = script("ppo_continuous_action").read_text(), "    env = gym.make(env_id, **kwargs)\n"
    assert source.count(line) == 1
    change = "    box = gym.spaces.Box(-1, 1, (1,))\n"
    change += "    env = gym.wrappers.TransformAction(env, lambda action: int(action[0] > 0), box)\n"
    (tmp_path / "mine.py").write_text(source.replace(line, line + change))
    flags = "--env-id CartPole-v1 --total-timesteps 64 --num-steps 64 --num-minibatches 2 --eval-episodes 1".split()
    train(tmp_path / "mine.py", *flags)


MASK = '{"action_mask": np.ones(2, np.int8)}'
WALK = """import gymnasium as gym
import numpy as np

class Walk(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}
    def step(self, action):
        return np.zeros(3, np.float64), 0.0, True, False, {}

gym.register("Walk-v0", Walk)
"""


@pytest.fixture
def walk(train, tmp_path, monkeypatch):
    """`walk(script, old, new)` trains on an environment with a mistake; returns the sentence of the end, if any."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    flags = "--num-envs 2 --total-timesteps 64 --eval-episodes 1".split()
    more = {"dqn": ["--learning-starts", "0"]}

    def call(name, old="", new="", code=2):
        assert old in WALK
        (tmp_path / "walking.py").write_text(WALK.replace(old, new))
        monkeypatch.delitem(sys.modules, "walking", raising=False)
        train(name, "--env-id", "walking:Walk-v0", *flags, *more.get(name, ["--num-steps", "32"]), code=code)
        assert (tmp_path / "runs").exists() == (code == 0)
        return train.out

    yield call
    gym.registry.pop("Walk-v0", None)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("self, *, seed=None, options=None", "self", "its reset takes no seed; write `def reset(self, *, seed=None"),
        ("np.float32), {}", "np.float32)", "its reset must return two values, obs and a dict info"),
        ("True, False", "True", "its step must return five values, obs, reward, terminated, truncated, info, but"),
        ("np.zeros(3, np.float32)", "np.zeros(4, np.float32)", "of its reset has shape (4,), but its space has (3,)"),
        ("np.zeros(3, np.float64)", "np.zeros(2)", "of its step has shape (2,), but its space has (3,)"),
        ("np.zeros(3, np.float64)", "np.zeros(3, complex)", "its step is of type complex128, but its space of float32"),
        ("0.0, True", "np.zeros(1), True", "its reward must be one number, but is an array of shape (1,)"),
        ("np.zeros(3, np.float32)", "np.full(3, np.nan)", "the observation of its reset is nan: all its numbers must"),
        ("np.zeros(3, np.float64)", "np.full(3, np.inf)", "the observation of its step is inf: all its numbers must"),
        ("0.0, True", "np.nan, True", "the reward is nan in step 1 of an episode"),
    ],
)
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_a_mistake_in_an_environment_is_one_sentence(walk, name, old, new, sentence):
    """Before the run folder is made."""
    out = walk(name, old, new)
    assert "error: walking:Walk-v0: " in out and sentence in out and "Traceback" not in out


def test_an_environment_may_compute_with_more_digits_than_its_space(walk):
    assert "error" not in walk("ppo", code=0)


def test_masks_that_a_file_does_not_use_are_a_warning(walk, tmp_path):
    warning = "gives an action_mask, which ppo.py does not use"
    given = ("np.float32), {}", f"np.float32), {MASK}")
    (tmp_path / "ppo.py").write_text(script("ppo").read_text() + "    print('action_mask')\n")  # the word is not a use
    assert f"warning: walking:Walk-v0 {warning}" in walk(tmp_path / "ppo.py", *given, code=0)
    shutil.rmtree(tmp_path / "runs")
    assert warning not in walk("ppo", code=0)
    (tmp_path / "ppo.py").write_text(script("ppo").read_text() + "    print(envs.action_mask)\n")
    assert "warning" not in walk(tmp_path / "ppo.py", *given, code=0)
