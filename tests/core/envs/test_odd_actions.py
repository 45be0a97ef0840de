"""Discrete actions that start anywhere, MultiBinary, boxes of integers, unbounded boxes: what takes them or helps."""

import gymnasium as gym
import numpy as np
import pytest
from conftest import comparable, definitions, drop_last_checkpoint
from odd_actions import SPACES

from solorl.catalog.header import scripts
from solorl.envs.spaces import wrapper_for

PPO = "--num-envs 2 --num-steps 16 --num-minibatches 2 --total-timesteps 64 --save-every 32 --eval-episodes 2".split()
DQN = "--total-timesteps 64 --learning-starts 16 --batch-size 8 --save-every 32 --save-replay --eval-episodes 2".split()
CHOICES = ("Switches", "Board", "Levels", "Bytes", "Started")
CASES = [("ppo", "FromMinusOne", PPO), ("dqn", "FromTwo", [*DQN, "--target-network-frequency", "16"]),
         ("stream_q", "FromTwo", "--total-timesteps 64 --save-every 32 --eval-episodes 2".split()),
         ("dqn", "Small", DQN), ("c51", "Byte", DQN), ("ppo_continuous_action", "Boundless", PPO),
         *(("ppo_multidiscrete", kind, PPO) for kind in ("Board", "Levels", "Started"))]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "flags"), CASES)
def test_they_are_trained_evaluated_played_and_resumed(name, kind, flags, train, solo):
    """The environment refuses what is not of its space. A resumed run equals the whole one."""
    env_id = f"odd_actions:Odd{kind}-v0"
    whole = train(name, "--env-id", env_id, *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    again = train(name, "--env-id", env_id, *flags, "--resume", run_dir)
    assert "resumed at step" in train.out and comparable(run_dir) == expected
    assert again["run"].dir == run_dir
    code, out, err = solo("play", run_dir, "--episodes", "2", "--trust-script")
    assert code == 0 and "over 2 greedy episodes" in out, out + err


@pytest.mark.parametrize(
    ("name", "kind"),
    [("ppo", "FromMinusOne"), ("dqn", "Small"), ("c51", "Byte"), *(("ppo_multidiscrete", kind) for kind in CHOICES)],
)
def test_every_action_of_the_space_has_a_choice(name, kind):
    """All choices lead to all actions of the space, each to another one."""
    space = SPACES[kind][0]
    env = definitions(name)["make_env"](f"odd_actions:Odd{kind}-v0")
    sizes = np.atleast_1d(env.action_space.nvec if name.endswith("multidiscrete") else env.action_space.n)
    assert sizes.ndim == 1 and not np.any(env.action_space.start)
    found = set()
    for choice in np.ndindex(*sizes):
        action = env.action(np.array(choice) if name.endswith("multidiscrete") else np.int64(choice[0]))
        assert action in space and np.asarray(action).dtype == space.dtype
        found.add(np.asarray(action).tobytes())
    wanted = {
        "FromMinusOne": 3,
        "Small": 2,
        "Byte": 2,
        "Switches": 8,
        "Board": 16,
        "Levels": 6,
        "Bytes": 6,
        "Started": 6,
    }[kind]
    assert len(found) == np.prod(sizes) == wanted


@pytest.mark.parametrize(
    "name",
    [each.name for each in scripts() if each.framework == "torch"
     if each.spaces in ("vector -> discrete", "vector -> continuous, or discrete")],
)  # fmt: skip
def test_files_in_torch_for_vectors_take_actions_from_anywhere(name):
    """As the guide to environments says."""
    for kind, size in (("FromMinusOne", 3), ("Small", 2)):
        env = definitions(name)["make_env"](f"odd_actions:Odd{kind}-v0")
        assert env.action_space == gym.spaces.Discrete(size) and env.action_space.dtype == np.int64


@pytest.mark.parametrize(
    ("name", "env_id"), [("ppo", "CartPole-v1"), ("dqn", "CartPole-v1"), ("ppo_multidiscrete", "games/TwoNumbers-v0")]
)
def test_usual_spaces_are_not_wrapped(name, env_id):
    import solorl.games  # noqa: F401

    made, plain = definitions(name)["make_env"](env_id), gym.make(env_id)
    assert str(made) == str(plain)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("ppo", "Switches", "has multibinary actions, but ppo.py takes discrete actions; use ppo_multidiscrete.py\n"),
        ("dqn", "Levels", "has integer actions, but dqn.py takes discrete actions; use ppo_multidiscrete.py\n"),
        ("sac_continuous_action", "FromTwo", "has discrete (from 2) actions, but sac_continuous_action.py takes continuous actions; use sac_discrete.py\n"),  # noqa: E501
        ("ppo_multidiscrete", "Numbers", "has integer actions, but ppo_multidiscrete.py takes multidiscrete actions"),
        ("ppo_continuous_action", "Table", "but ppo_continuous_action.py takes continuous actions; gymnasium.wrappers.TransformAction makes one axis of all\n"),  # noqa: E501
        ("sac_continuous_action", "Boundless", "has actions without finite bounds; gymnasium.wrappers.TransformAction gives bounds\n"),  # noqa: E501
    ],
)  # fmt: skip
def test_refusals_name_a_file_or_a_wrapper(name, kind, said, train, tmp_path):
    flags = ["--learning-starts", "1"] if name in ("dqn", "sac_continuous_action") else []
    train(name, "--env-id", f"odd_actions:Odd{kind}-v0", *flags, code=2)
    assert said in train.out and train.out.count("\n") == 1 and f"use {name}.py" not in train.out
    assert not (tmp_path / "runs").exists()


def test_wrappers_are_those_that_help():
    box, image = gym.spaces.Box(-1.0, 1.0, (2,)), gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    discrete = gym.spaces.Discrete(3)
    assert "FlattenObservation" in wrapper_for(gym.spaces.Dict(a=box, b=discrete), box)
    assert (
        "FlattenObservation" in wrapper_for(discrete, discrete)
        and wrapper_for(gym.spaces.Dict(a=image), discrete) == ""
    )
    assert "DiscretizeAction" in wrapper_for(image, box) and wrapper_for(image, discrete) == ""
    env = gym.wrappers.DiscretizeAction(gym.make("Pendulum-v1"), 5)  # as the phrase promises
    assert isinstance(env.action_space, gym.spaces.Discrete)
