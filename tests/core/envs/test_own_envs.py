"""Environments of the user: where their modules lie, the arrays they hand out, their kinds and bounds of numbers."""

import importlib
import runpy
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import definitions, own_registry, refused, script

from solorl.catalog.standalone import standalone
from solorl.checkpoints import env_state as simulators

PPO = "--num-envs 1 --total-timesteps 64 --num-steps 32 --num-minibatches 2 --eval-episodes 1".split()
SMALL = "--total-timesteps 60 --learning-starts 20 --batch-size 8 --eval-episodes 1".split()
OFF_POLICY = ["ddpg_continuous_action", "td3_continuous_action", "sac_continuous_action"]
ON_POLICY = ["ppo_continuous_action", "rpo_continuous_action"]
MODULE = """
import gymnasium as gym
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
class Walk(CartPoleEnv):
    pass
gym.register("Walk-v0", "{name}:Walk", max_episode_steps=5)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to be in, which is not on the path of Python yet; `here(name, text)` writes a module there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    own_registry(monkeypatch)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text.format(name=name))
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


# ---------------------------------------------------------------------- modules in the current folder
def test_a_module_of_the_current_folder_is_found(train, here, tmp_path):
    here("walks_a", MODULE)
    v = train("ppo", "--env-id", "walks_a:Walk-v0", *PPO)
    assert sys.modules["walks_a"].__file__ == str(tmp_path / "walks_a.py")
    assert v["envs"].envs[0].spec.id == "Walk-v0" and v["run"].dir.name.startswith("walks_a_Walk-v0__ppo")
    assert sys.path[-1] == "" and "" not in sys.path[:-1]


@pytest.mark.slow
def test_bench_and_play_find_it_too(solo, here, tmp_path):
    """The trainings of a bench are processes of their own."""
    here("walks_b", MODULE)
    flags = ["bench", "ppo", "--env-ids", "walks_b:Walk-v0", "--num-seeds", "1", "--workers", "1"]
    code, out, err = solo(*flags, "--results", "results", "--runs-dir", "work", "--", *PPO)
    assert code == 0, out + err
    folder = next((tmp_path / "work").rglob("model.safetensors")).parent
    code, out, err = solo("play", folder, "--episodes", "2")
    assert code == 0 and out.startswith("walks_b:Walk-v0: 5.0 ± 0.0 over 2 "), out + err


def test_it_hides_no_other_module(train, here):
    here("colorsys", MODULE)
    train("ppo", "--env-id", "colorsys:Walk-v0", *PPO, code=2)
    library = importlib.import_module("colorsys").__file__
    assert f"there is no environment colorsys:Walk-v0: the module colorsys ({library}) registers no Walk" in train.out


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("from gymnasium import no_such_thing", "ImportError: cannot import name 'no_such_thing'"),
        ("x = = 1", "SyntaxError: invalid syntax (walks_c.py, line 1)"),
        ("raise KeyError('many' + chr(10) + 'lines')", "KeyError: 'many\\nlines'"),
    ],
)
def test_an_error_inside_the_module_is_told(train, here, tmp_path, text, reason):
    here("walks_c", text)
    train("ppo", "--env-id", "walks_c:Walk-v0", *PPO, code=2)
    assert f"walks_c:Walk-v0 cannot be used: importing the module walks_c fails with {reason}" in train.out
    assert train.out.count("\n") == 1 and "there is no environment" not in train.out
    assert not (tmp_path / "runs").exists()


def test_the_nearest_module_and_id_are_named(train, here):
    here("walks_d", MODULE)
    train("ppo", "--env-id", "walk_d:Walk-v0", *PPO, code=2)
    assert "no module walk_d is installed or in this folder; did you mean walks_d?" in train.out
    train("ppo", "--env-id", "walks_d:Wolk-v0", *PPO, code=2)
    assert "registers no Wolk-v0; did you mean walks_d:Walk-v0" in train.out


# ---------------------------------------------------------------------- observations in an array that is reused
class Reuses(gym.Env):
    """Counts steps in an array, a dict or a tuple that is the same object all the time; 3 steps an episode."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, kind):
        box = gym.spaces.Box(-1.0, 9.0, (1,), np.float64)
        self.array = np.zeros(1)
        self.obs, self.observation_space = {
            "array": (self.array, box),
            "dict": ({"x": self.array}, gym.spaces.Dict({"x": box})),
            "tuple": ((self.array,), gym.spaces.Tuple([box])),
        }[kind]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.array[:] = 0
        return self.obs, {}

    def step(self, action):
        self.array += 1
        return self.obs, 1.0, self.array[0] == 3, False, {}


@pytest.mark.parametrize("kind", ["array", "dict", "tuple"])
def test_a_recorded_environment_may_reuse_its_observation(kind):
    envs = gym.vector.SyncVectorEnv([lambda: Reuses(kind)] * 2, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    simulators.record(envs)
    number = {"array": lambda obs: obs, "dict": lambda obs: obs["x"], "tuple": lambda obs: obs[0]}[kind]
    envs.reset(seed=1)
    for _ in range(3):
        obs, *_, infos = envs.step(np.zeros(2, int))
    assert [number(final).item() for final in infos["final_obs"]] == [3.0, 3.0]
    assert number(obs).ravel().tolist() == [0.0, 0.0]
    assert [number(env.obs).item() for env in envs.envs] == [0.0, 0.0]
    simulators.restore(envs, simulators.capture(envs))
    assert number(simulators.observations(envs)).ravel().tolist() == [0.0, 0.0]


def dqn_flags(env_id):
    return ["--env-id", f"probes_offpolicy:{env_id}-v0", *SMALL, "--num-envs", "2", "--buffer-size", "100"]


def test_it_changes_no_row_of_a_replay_buffer(train):
    plain, reused = (train("dqn", *dqn_flags(name)) for name in ("DiscreteDiary", "ReusedDiary"))
    for name, array in plain["replay"].arrays.items():
        assert np.array_equal(array, reused["replay"].arrays[name]), name
    assert plain["replay"].inserted == 60
    arrays = reused["replay"].arrays
    assert set(arrays["next_obs"][:60][arrays["done"][:60] == 1][:, -1]) == {3.0}  # the task was over after 3 steps


def test_a_standalone_copy_learns_the_same_from_it(train, tmp_path, monkeypatch):
    """R4 with an environment that reuses its array."""
    ours = train("dqn", *dqn_flags("ReusedDiary"), "--no-fast")
    (tmp_path / "mine.py").write_text(standalone(script("dqn"), "mine.py"))
    monkeypatch.setattr(sys, "argv", ["mine.py", *dqn_flags("ReusedDiary"), "--save-to", str(tmp_path / "w.npz")])
    alone = runpy.run_path(str(tmp_path / "mine.py"), run_name="__main__")
    for name, array in ours["replay"].arrays.items():
        assert np.array_equal(array, alone["replay"].arrays[name]), name
    assert ours["optimizer"].state
    for name, weight in ours["q_network"].state_dict().items():
        assert torch.equal(weight, alone["q_network"].state_dict()[name]), name


# ---------------------------------------------------------------------- kinds of spaces, and bounds
@pytest.mark.parametrize("name", ["ppo", "dqn", "sac_discrete"])
def test_scalar_observations_are_refused(train, tmp_path, name):
    train(name, "--env-id", "probes:Scalar-v0", *(PPO if name == "ppo" else SMALL), code=2)
    assert f"probes:Scalar-v0 has scalar observations, but {name}.py takes vector observations" in train.out
    assert train.out.count("\n") == 1 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", [*OFF_POLICY, *ON_POLICY, "dqn"])
def test_whole_numbers_as_actions_are_refused(train, tmp_path, name):
    train(name, "--env-id", "probes_offpolicy:WholeBox-v0", *(PPO if name in ON_POLICY else SMALL), code=2)
    kind = "discrete" if name == "dqn" else "continuous"
    assert f"probes_offpolicy:WholeBox-v0 has integer actions, but {name}.py takes {kind} actions" in train.out
    assert train.out.count("\n") == 1 and not (tmp_path / "runs").exists()


def test_a_standalone_copy_refuses_them_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, env_id, sentence in (
        ("dqn", "probes:Scalar-v0", "the observations must be of the kind vector and the actions discrete"),
        (
            "ddpg_continuous_action",
            "probes_offpolicy:WholeBox-v0",
            "the observations must be of the kind vector and the actions bounded",
        ),
    ):
        (tmp_path / "mine.py").write_text(standalone(script(name), "mine.py"))
        monkeypatch.setattr(sys, "argv", ["mine.py", "--env-id", env_id, *SMALL])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(tmp_path / "mine.py"), run_name="__main__")
        refused((end.value.code, *capsys.readouterr()), sentence)


@pytest.mark.parametrize("name", [*OFF_POLICY, *ON_POLICY])
def test_actions_stay_within_bounds_of_double_precision(train, name):
    """The environment refuses every action beyond them: of the training, and of the evaluation in the end."""
    noise = [] if name.startswith("sac") else ["--exploration-noise", "9"]
    flags = [*PPO, "--std-init", "9"] if name in ON_POLICY else [*SMALL, *noise]
    train(name, "--env-id", "probes_offpolicy:ExactBox-v0", *flags)


@pytest.mark.parametrize("name", OFF_POLICY)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_greatest_action_is_the_bound_itself(name, dtype):
    space, file, env = gym.spaces.Box(-0.1, 0.1, (2,), dtype), definitions(name), gym.Env()
    env.action_space = space
    actor = file["Actor"](1, 2)
    with torch.no_grad():
        actor.net[-1].bias[:2] = torch.tensor([-99.0, 99.0])
    action = file["ScaleAction"](env).action(actor.act(np.zeros((1, 1)))[0])
    assert action.dtype == dtype and action.tolist() == [space.low[0], space.high[1]]
    assert space.contains(action)


# ---------------------------------------------------------------------- trainings that could learn nothing
@pytest.mark.parametrize("name", [*OFF_POLICY, "sac_discrete", "sac_continuous_action_jax"])
def test_a_training_shorter_than_a_batch_is_refused(train, tmp_path, name):
    env_id = "CartPole-v1" if name == "sac_discrete" else "Pendulum-v1"
    flags = f"--env-id {env_id} --learning-starts 10 --num-envs 3 --batch-size 100 --total-timesteps".split()
    if name.endswith("_jax"):
        pytest.importorskip("jax")
    train(name, *flags, "101", code=2)  # 99 steps in whole iterations
    assert "--batch-size must be at most 99 by --buffer-size and --total-timesteps" in train.out
    assert train.out.count("\n") == 1 and not (tmp_path / "runs").exists()
