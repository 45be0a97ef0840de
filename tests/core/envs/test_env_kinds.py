"""What a file takes is declared by `env_kind` of its Args; what a sentence recommends leads to an end."""

import functools
import importlib.util
import re
import sys
from types import ModuleType, SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from conftest import script

from solorl.catalog import header
from solorl.envs import ids
from solorl.errors import UsageError
from solorl.lab.studies.plan import load_script
from solorl.run.environments import check_spaces
from solorl.scripts import facts_of, script_paths

FILES = {each.path.name: each for each in header.scripts()}
# kind of actions -> environment with other ones
OTHER = {"discrete": "Pendulum-v1", "continuous": "CartPole-v1", "tuple": "CartPole-v1", "multidiscrete": "CartPole-v1"}
IMAGES = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
OBS = {"vector": gym.spaces.Box(-1.0, 1.0, (3,)), "image": IMAGES, "dict": gym.spaces.Dict(a=IMAGES)}
ACTIONS = {"discrete": gym.spaces.Discrete(3), "continuous": gym.spaces.Box(-1.0, 1.0, (1,))}
ENVIRONMENTS = {
    "CartPole-v1": ("vector", "discrete"),
    "Pendulum-v1": ("vector", "continuous"),
    "probes:Pixels-v0": ("image", "discrete"),
    "kinds:Camera-v0": ("image", "continuous"),
    "probes:Entries-v0": ("dict", "discrete"),
    "ALE/Pong-v5": ("image", "discrete"),
    "PongNoFrameskip-v4": ("image", "discrete"),
    "Pong-v5": ("image", "discrete"),
    "Pong": ("image", "discrete"),
    "gfootball/1_vs_1_easy-v1": ("image", "discrete"),
    "HalfCheetah-v4": ("vector", "continuous"),
    "Breakout-MinAtar": ("vector", "discrete"),
    "MazeEasy-v0": ("image", "discrete"),
}


@pytest.mark.parametrize("name", script_paths())
def test_what_the_environment_is_comes_before_what_the_numbers_are(name, train):
    """So in every file: with a wrong environment and too few steps the sentence is about the environment."""
    if "envpool" in load_script(name).env_kind:
        pytest.importorskip("envpool")
    each = FILES[f"{name}.py"]
    env_id = "CartPole-v1" if each.observations == "image" else OTHER[each.actions]
    if name in ("bc", "dagger", "gail", "airl"):  # take continuous and discrete actions
        env_id = "kinds:Pairs-v0"
    train(name, "--env-id", env_id, "--total-timesteps", 1, code=2)
    *warnings, sentence = train.out.splitlines()
    assert sentence.startswith(f"error: {env_id} ") and all(line.startswith("warning: ") for line in warnings)


@pytest.mark.parametrize("name", script_paths())
def test_a_plan_reads_what_a_file_declares(name):
    """The line in the source says what the class has; files of games and of EnvPool say so."""
    kind = load_script(name).env_kind
    text = script(name).read_text()
    assert (f'    env_kind = "{kind}"' in text) == (kind != "gymnasium") and kind in ids.KINDS
    any_images = "_image" in name or name == "drq_v2"
    images = FILES[f"{name}.py"].observations == "image" and not any_images
    assert kind.endswith("procgen") == name.endswith("_procgen")
    assert kind.endswith(("atari", "procgen")) == images
    assert kind.startswith("envpool") == ("import EnvPoolVectorEnv" in text)
    in_jax = name.endswith("_jax")
    opens = in_jax and "run.dataset(" not in text and kind != "board"  # whose rules a file in JAX has itself
    assert ("run.open_envs(" in text) == opens and (kind != "jax" or in_jax)


@functools.cache
def advice(name, env_id):
    """The sentence with which a file refuses an environment, by what its header, Args and `require_spaces` say."""
    path, (obs, action) = FILES[name].path, ENVIRONMENTS[env_id]
    try:
        ids.check_env_id_of(path, env_id, facts_of(path).env_kind)
    except UsageError as error:
        return str(error)
    envs = SimpleNamespace(single_observation_space=OBS[obs], single_action_space=ACTIONS[action])
    wanted = re.search(r'run\.require_spaces\(envs, obs="(\w+)", action="(\w+)"( if discrete else)?', path.read_text())
    own, kind, either = wanted.groups()
    try:
        check_spaces(path, env_id, envs, own, "bounded" if either and action == "continuous" else kind)
    except UsageError as error:
        return str(error)
    return ""


@pytest.fixture
def camera(monkeypatch):
    """An own environment with images and continuous actions."""
    monkeypatch.setitem(sys.modules, "kinds", ModuleType("kinds"))
    if "Camera-v0" not in gym.registry:
        gym.register("Camera-v0", "kinds:Camera")


@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_no_advice_leads_in_a_circle(env_id, camera):
    """From any file, whoever takes the file or the id that each sentence names comes to a file that takes the
    environment, or to a sentence that names no other."""
    for package in ("envpool", "gymnax"):
        pytest.importorskip(package)
    ends = set()
    for start in FILES:
        here, seen = (start, env_id), []
        while sentence := advice(*here):
            seen.append(here)
            name, at = here
            if "no file takes" in sentence:
                break
            others = [file for file in re.findall(r"\w+\.py", sentence) if file != name]
            meant = re.search(r"did you mean (\S+?)[? ]", sentence)
            if not others and not meant:
                break
            here = (others[0], at) if others else (name, meant[1])
            if here[1] not in ENVIRONMENTS:
                break
            assert here not in seen, (seen, sentence)
        ends.add(here)
    assert ends


def test_images_are_said_to_be_for_the_files_that_take_them():
    for name in ("ppo.py", "ppo_continuous_action.py", "ppo_normalized.py"):
        assert advice(name, "probes:Pixels-v0").endswith("; use ppo_image.py"), name
    for name in ("dqn.py", "c51.py", "sac_discrete.py", "pqn.py"):
        assert advice(name, "probes:Pixels-v0").endswith("; use dqn_image.py"), name


def own(tmp_path, kind, head="", obs="image", env="EnvPoolVectorEnv(args.env_id, 2)"):
    """An own script that opens environments and steps them once."""
    path = tmp_path / "own.py"
    path.write_text(f'''"""Own.

Spaces    {obs} -> discrete
Not for   vector observations: ppo.py
"""
from dataclasses import dataclass

import gymnasium as gym

from solorl import EnvPoolVectorEnv, Run, RunArgs, parse

{head}
@dataclass
class Args(RunArgs):
    {kind}
    env_id: str = "CartPole-v1"  # the environment

args = parse(Args)
run = Run(args)
envs = {env}
run.require_spaces(envs, obs="{obs}", action="discrete")
obs = run.reset(envs)
obs, reward, terminated, truncated, infos = envs.step(envs.action_space.sample())
envs.close()
''')
    return path


def test_any_images_of_envpool_open_where_a_file_takes_them_without_the_package_of_atari(train, tmp_path, monkeypatch):
    pytest.importorskip("envpool")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ale_py" else real(name))
    path = own(tmp_path, 'env_kind = "envpool"')
    assert train(path, "--env-id", "gfootball/1_vs_1_easy-v1")["obs"].shape == (2, 72, 96, 4)
    train(path, "--env-id", "Pong-v5", code=2)
    assert "Pong-v5 needs an extra: pip install 'solorl[atari]'" in train.out


def test_files_for_games_of_envpool_refuse_its_other_images(train, tmp_path):
    pytest.importorskip("envpool")
    train(own(tmp_path, 'env_kind = "envpool-atari"'), "--env-id", "gfootball/1_vs_1_easy-v1", code=2)
    assert train.out == ("error: gfootball/1_vs_1_easy-v1 is not an Atari game; use ppo.py for vector observations\n")


def test_a_comment_does_not_change_what_an_id_means(train, tmp_path):
    path = own(tmp_path, "", "# not EnvPoolVectorEnv", "vector", "gym.make_vec(args.env_id, 2)")
    assert train(path, "--env-id", "probes:Delayed-v0")["args"].env_kind == "gymnasium"


def test_an_unknown_kind_is_refused(train, tmp_path):
    train(own(tmp_path, 'env_kind = "envpol"'), code=2)
    assert "own.py says env_kind = 'envpol', which is not known; did you mean envpool?" in train.out


def test_a_plan_refuses_what_a_file_does_not_take(solo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, env_id, sentence in (
        ("ppo_atari", "CartPole-v1", "CartPole-v1 is not an Atari game; use ppo.py for vector observations"),
        (
            "dqn_atari",
            "games/MovingDot-v0",
            "games/MovingDot-v0 is not an Atari game; use dqn.py for vector observations; use dqn_image.py for other "
            "images",
        ),
        ("ppo_jax", "ALE/Pong-v5", "ppo_jax.py takes vector observations; use ppo_atari_envpool_jax.py"),
    ):
        code, _, err = solo("bench", name, "--env-ids", env_id, "--num-seeds", 1, "--results", "results", "--dry-run")
        assert code == 2 and sentence in err


@pytest.mark.parametrize("env_id", ["Pong", "pong-v5", "ALE/Pong-v5", "PongNoFrameskip-v4", "Pong-v0"])
def test_the_id_of_a_game_in_envpool_is_found(env_id):
    pytest.importorskip("envpool")
    with pytest.raises(UsageError, match=rf"^EnvPool has no environment {env_id}; did you mean Pong-v5\?$"):
        ids.check_envpool_id(env_id)


@pytest.mark.parametrize("installed", [True, False])
def test_a_library_of_the_system_that_envpool_lacks_is_one_sentence(installed, monkeypatch):
    """Procgen's Qt is that of an extra; where this is installed and does not help, EnvPool says what is missing."""
    envpool = pytest.importorskip("envpool")
    real = importlib.util.find_spec

    def lacks(env_id):
        raise ImportError("EnvPool needs\nthe system Qt 5")

    monkeypatch.setattr(envpool, "make_spec", lacks)
    monkeypatch.setattr(ids, "_envpool_config", ids._envpool_config.__wrapped__)
    found = ModuleType("PyQt5") if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "PyQt5" else real(name))
    sentence = "EnvPool cannot make MazeHard-v0: ImportError EnvPool needs the system Qt 5"
    with pytest.raises(UsageError) as caught:
        ids.check_envpool_id("MazeHard-v0")
    assert str(caught.value) == (sentence if installed else "MazeHard-v0 needs an extra: pip install 'solorl[procgen]'")
    monkeypatch.setattr(envpool, "make_spec", lambda env_id: importlib.import_module("no_such_library"))
    with pytest.raises(UsageError, match=r"^EnvPool cannot make Pong-v5: ModuleNotFoundError No module named"):
        ids.check_envpool_id("Pong-v5")


def test_what_is_no_game_of_procgen_is_refused(train):
    pytest.importorskip("envpool")
    for env_id, use in (("Pong-v5", "ppo_atari_envpool.py for Atari games"), ("CartPole-v1", "ppo.py for vector")):
        train("ppo_procgen", "--env-id", env_id, code=2)
        assert train.out.startswith(f"error: {env_id} is not a game of Procgen; use {use}"), train.out
    train("ppo_procgen", "--env-id", "Starpilot", code=2)
    assert "EnvPool has no environment Starpilot; did you mean Starpilot" in train.out
    train("ppo_atari_envpool", "--env-id", "MazeEasy-v0", code=2)
    assert "MazeEasy-v0 is not an Atari game; use ppo_procgen.py for games of Procgen" in train.out
