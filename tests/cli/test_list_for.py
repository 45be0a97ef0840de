"""`solo list --for ENV_ID`: what an environment is, the files that take it, the best first, or what to change."""

import json
import re

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT, own_registry, refused

from solorl.catalog import choice
from solorl.scripts import known_facts, script_paths

TABLES = choice.tomllib.loads(choice.TABLE.read_text())


def asked(solo, env_id):
    code, out, err = solo("list", "--for", env_id, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize(
    ("env_id", "kinds", "best", "not_taken"),
    [
        ("CartPole-v1", ("vector", "discrete"), ["ppo", "pqn", "dqn"], ["ppo_masked", "ppo_atari", "sac_lstm"]),
        ("Pendulum-v1", ("vector", "continuous"), ["ppo_continuous_action"], ["ppo", "ppo_continuous_action_batched"]),
        ("odd_actions:OddBoundless-v0", ("vector", "continuous"), ["ppo_continuous_action"], ["crossq", "ppo_jax"]),
        ("odd_actions:OddBoard-v0", ("vector", "multidiscrete"), ["ppo_multidiscrete"], ["ppo"]),
        ("odd_actions:OddFromTwo-v0", ("vector", "discrete"), ["ppo", "pqn", "dqn"], ["ppo_jax"]),
        ("MountainCar-v0", ("vector", "discrete"), ["ppo", "pqn", "dqn"], ["ppo_masked", "ppo_minatar_jax"]),
        ("games/TwoSenses-v0", ("dict", "discrete"), ["ppo_dict"], ["ppo"]),
        ("games/MovingDot-v0", ("image", "discrete"), ["ppo_image", "dqn_image"], ["dqn_atari", "ppo"]),
        ("games/CueMasked-v0", ("vector", "discrete"), ["ppo_masked", "ppo_lstm_masked", "ppo"], ["ppo_image"]),
        ("games/Tool-v0", ("vector", "tuple"), ["ppo_hybrid"], ["ppo"]),
        ("games/BitFlip15-v0", ("dict", "discrete"), ["dqn_her", "ppo_dict"], ["sac_her"]),
        ("games/TwoSensesContinuous-v0", ("dict", "continuous"), ["ppo_dict_continuous_action"], ["sac_her"]),
        ("games/CueContinuous-v0", ("vector", "continuous"), ["ppo_continuous_action"], ["sac_continuous_action_jax"]),
        ("games/TensorPendulum-v0", ("vector", "continuous"), ["ppo_continuous_action_batched"], ["crossq"]),
        ("text/sum-2", ("vector", "multidiscrete"), ["grpo", "ppo_multidiscrete"], ["ppo"]),
        ("games/TwoNumbers-v0", ("vector", "multidiscrete"), ["ppo_multidiscrete"], ["grpo"]),
    ],
)
def test_the_files_that_take_it_are_listed_the_best_first(env_id, kinds, best, not_taken, solo):
    found = asked(solo, env_id)
    names = [each["name"] for each in found["take"]]
    assert (found["observations"], found["actions"]) == kinds and names[: len(best)] == best
    assert not {*names} & {*not_taken} and "nearest" not in found and not found["several_agents"]
    assert found["action_mask"] == ("Masked" in env_id)


def test_files_of_images_take_grey_ones_of_two_axes():
    """`ppo_image` and its kin add the axis; files of vectors take such a space, too."""
    grey, vector = gym.spaces.Box(0, 255, (40, 40), np.uint8), gym.spaces.Box(0, 1, (40, 40))
    seen = choice.Seen("Grey-v0", grey, gym.spaces.Discrete(2), ["gymnasium"])
    assert {"ppo_image", "dqn_image", "ppo"} <= set(choice.best(seen))
    assert "ppo_image" not in choice.best(seen._replace(obs=vector))


def test_games_of_several_agents(solo):
    pytest.importorskip("mpe2")
    found = asked(solo, "mpe/simple_spread_v3")
    names = [each["name"] for each in found["take"]]
    assert found["several_agents"] and names[:2] == ["mappo", "mappo_rnn"] and "ppo" not in names
    assert {"ippo", "vdn", "qmix", "coma"} <= {*names} and "mappo_jax" not in names  # which takes those of team/


@pytest.mark.parametrize(
    ("env_id", "package", "best", "not_taken"),
    [("ALE/Pong-v5", "ale_py", ["dqn_atari"], ["ppo_atari_envpool", "ppo"]),
     ("Pong-v5", "envpool", ["ppo_atari_envpool", "pqn_atari_envpool"], ["dqn_atari", "ppo_procgen"])],
)  # fmt: skip
def test_games_of_atari(env_id, package, best, not_taken, solo):
    pytest.importorskip(package)
    names = [each["name"] for each in asked(solo, env_id)["take"]]
    assert names[: len(best)] == best and not {*names} & {*not_taken}


def test_games_of_minatar(solo):
    pytest.importorskip("gymnax")
    assert asked(solo, "Asterix-MinAtar")["take"][0]["name"] == "ppo_minatar_jax"


def test_it_is_told_in_words(solo):
    code, out, _ = solo("list", "--for", "games/TwoSenses-v0")
    first, second = out.splitlines()
    assert code == 0 and second.split() == "ppo_dict dict of vectors and images; steps are cheap".split()
    words = "dict observations (image: 8 x 8 x 1 bytes; vector: 2 numbers), discrete actions (one of 2)"
    assert first == f"games/TwoSenses-v0: {words}"
    code, out, _ = solo("list", "--for", "CartPole-v1")
    assert out.splitlines()[0] == "CartPole-v1: vector observations (4 numbers), discrete actions (one of 2)"
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["ppo", "pqn", "dqn"] and "\nalso: " in out


@pytest.mark.parametrize(
    ("env_id", "near", "change"),
    [("FrozenLake-v1", ["ppo", "pqn"], "FlattenObservation makes a vector"),
     ("odd_actions:OddTable-v0", [], "TransformAction makes one axis")],
)  # fmt: skip
def test_where_no_file_takes_it_a_wrapper_is_named(env_id, near, change, solo):
    found = asked(solo, env_id)
    assert found["take"] == [] and found["nearest"] == near and change in found["change"]
    code, out, _ = solo("list", "--for", env_id)
    assert code == 0 and "no file takes it; the nearest: " in out and change in out


def test_an_environment_that_does_not_exist_is_one_sentence(solo):
    refused(solo("list", "--for", "CartPol-v1"), "there is no environment CartPol-v1; did you mean CartPole-v1")
    refused(solo("list", "--for", "no_such_module:X-v0", "--json"), "no module no_such_module")
    refused(solo("list", "--for", "odd_actions:"), "without a name", "odd_actions:Name-v0")


def test_an_environment_that_does_not_work_is_one_sentence(solo, monkeypatch):
    class Broken(gym.Env):
        observation_space, action_space = gym.spaces.Discrete(2), gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return 0

    own_registry(monkeypatch)
    gym.register("Broken-v0", Broken, disable_env_checker=True)
    refused(solo("list", "--for", "Broken-v0"), "Broken-v0: its reset must return two values")


# ---------------------------------------------------------------------- the table
def test_the_guide_shows_the_table():
    page = (ROOT / "docs/guides/which_algorithm.md").read_text().split("\n## ")
    for table, title in (("one", "One agent"), ("several", "Several agents")):
        (section,) = [part for part in page if part.startswith(title)]
        linked = [[choice.NAMES.sub(r"[`\1`](../algorithms/\1.md)", cell) for cell in row] for row in TABLES[table]]
        wanted = ["| " + " | ".join(row).replace("|  |", "| |") + (" |" if row[-1] else "|") for row in linked]
        shown = [line for line in section.splitlines() if line.startswith("|")][2:]
        assert shown == wanted


def test_the_table_names_files_that_there_are():
    named = {name for rows in TABLES.values() for row in rows for cell in row for name in choice.NAMES.findall(cell)}
    assert named <= script_paths().keys() and all(len(row) == 4 for rows in TABLES.values() for row in rows)


def test_every_file_says_its_kinds():
    """What decides is read from the header and the source."""
    for name, path in script_paths().items():
        facts, text = known_facts(path), path.read_text()
        assert facts.bounded == bool(re.search(r'require_spaces\(.*"bounded"', text)), name
        assert any(" " not in "".join(pair) for pair in facts.spaces), name
