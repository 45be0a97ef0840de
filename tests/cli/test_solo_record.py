"""`solo record`: the transitions of a policy, of its samples, or of random actions, as a data set."""

import numpy as np
import pytest
from conftest import refused

import solorl
from solorl.data.dataset import read, read_about
from solorl.envs.vector import VectorEnvs
from solorl.run import evaluation

SHORT = ("--total-timesteps", "256", "--eval-episodes", "1")
SAC = ("sac_continuous_action", "--env-id", "Pendulum-v1", *SHORT, "--learning-starts", "200", "--batch-size", "8")


@pytest.fixture
def folder(train):
    return train(*SAC)["run"].dir


def test_the_policies_of_a_run(folder, solo, tmp_path):
    kinds = {"greedy": [], "stochastic": ["--stochastic"], "random": ["--random"], "again": ["--stochastic"],
             "other": ["--stochastic", "--seed", "7"]}  # fmt: skip
    for name, flags in kinds.items():
        code, out, _ = solo("record", folder, "--steps", 805, "--num-envs", 4, "--out", tmp_path / name, *flags)
        assert code == 0 and out.startswith("recorded 808 transitions of ")
    sets = {name: read(tmp_path / name) for name in kinds}
    greedy = sets["greedy"]
    policy = solorl.load(folder)
    np.testing.assert_allclose(policy(greedy.obs), greedy.action, atol=1e-5)
    assert len(greedy) == 808 and greedy.truncated.sum() == 8 and not greedy.terminated.any()
    follow = ~greedy.truncated[:-1]
    np.testing.assert_array_equal(greedy.next_obs[:-1][follow], greedy.obs[1:][follow])
    errors = {name: np.abs(policy(data.obs) - data.action).mean() for name, data in sets.items()}
    assert errors["stochastic"] > 0.1 and errors["random"] > 0.1
    assert np.abs(np.histogram(sets["random"].action, 4, (-1, 1))[0] - 202).max() < 50  # uniform
    np.testing.assert_array_equal(sets["again"].action, sets["stochastic"].action)
    assert not np.array_equal(sets["other"].obs, sets["stochastic"].obs)
    about = read_about(tmp_path / "stochastic")
    assert about["policy"] == f"the stochastic policy of {folder.name}" and about["env_id"] == "Pendulum-v1"


def test_actions_that_a_wrapper_clips_are_those_of_the_environment(train, solo, tmp_path, monkeypatch):
    """As of PPO, whose policy knows no bounds; so that others can learn from them. Random ones are uniform in them."""
    flags = ("--env-id", "Pendulum-v1", *SHORT, "--num-envs", 1, "--num-steps", 64, "--num-minibatches", 1)
    folder = train("ppo_continuous_action", *flags)["run"].dir
    words = ("record", folder, "--steps", 400, "--num-envs", 4, "--out")
    assert solo(*words, tmp_path / "random", "--random")[0] == 0
    monkeypatch.setattr(evaluation, "stepwise", lambda act, count: lambda *_: np.full((count, 1), 3, np.float32))
    assert solo(*words, tmp_path / "greedy")[0] == 0
    for name in ("random", "greedy"):
        space = read_about(tmp_path / name)["action_space"]
        assert (space["low"], space["high"]) == ([-2.0], [2.0])
    random, action = (read(tmp_path / name).action for name in ("random", "greedy"))
    assert np.abs(np.histogram(random, 4, (-2, 2))[0] - 100).max() < 40 and np.abs(random).max() < 2
    assert len({*random[:, 0].tolist()}) > 390 and (action == 2).all()
    train("bc", "--env-id", "Pendulum-v1", "--dataset", tmp_path / "random", "--total-timesteps", 4)


def test_choices_made_of_integers_are_refused_in_one_sentence(train, solo):
    """A wrapper of the file makes them, of a Box; no bounds are clipped."""
    flags = ("--env-id", "odd_actions:OddLevels-v0", *SHORT, "--num-envs", 2, "--num-steps", 64)
    folder = train("ppo_multidiscrete", *flags)["run"].dir
    refused(solo("record", folder, "--steps", 100), "MultiDiscrete([3 2]) cannot be recorded; allowed are Box")


def test_random_actions_are_allowed_ones(train, solo, tmp_path, monkeypatch):
    folder = train("ppo_masked", "--env-id", "moody:Moody-v0", *SHORT, "--num-envs", 2, "--num-steps", 64)["run"].dir
    step, seen = VectorEnvs.step, []

    def checked(self, actions):
        seen.append(self.action_mask[np.arange(2), actions].all())
        return step(self, actions)

    monkeypatch.setattr(VectorEnvs, "step", checked)
    for flags in (["--random"], []):
        words = ("record", folder, "--steps", 100, "--num-envs", 2, "--out", tmp_path / f"{flags}", *flags)
        assert solo(*words)[0] == 0
    assert len(seen) == 100 and all(seen)


def test_a_policy_with_memory_forgets_at_the_end_of_an_episode(train, solo, tmp_path):
    words = ("--env-id", "CartPole-v1", *SHORT, "--num-envs", 2, "--num-steps", 64, "--num-minibatches", 1)
    folder = train("ppo_lstm", *words)["run"].dir
    assert solo("record", folder, "--steps", 400, "--num-envs", 2)[0] == 0
    data, policy, state = read(folder / "dataset"), solorl.load(folder), None
    first = np.append(True, np.diff(data.episode) > 0)
    for i in range(200):
        action, state = policy(data.obs[i : i + 1], state, first[i : i + 1])
        assert action[0] == data.action[i]
    assert first[:200].sum() > 2


@pytest.mark.slow
def test_a_policy_in_jax(train, solo, tmp_path):
    v = train("sac_continuous_action_jax", *SAC[1:], "--utd-ratio", "0.1")
    folder = v["run"].runs[0].dir
    assert solo("record", folder, "--steps", 64, "--stochastic")[0] == 0
    data = read(folder / "dataset")
    assert np.abs(solorl.load(folder)(data.obs) - data.action).mean() > 0.1 and len(np.unique(data.action)) > 60


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--steps", "0"), "solo record: --steps must be at least 1, not 0"),
        (("--steps", "8", "--num-envs", "0"), "solo record: --num-envs must be at least 1, not 0"),
        (("--steps", "8", "--seed", "-1"), "solo record: --seed must be at least 0 and at most 2,147,483,647, not -1"),
        (("--steps", "8", "--random", "--stochastic"), "not allowed with argument"),
        ((), "the following arguments are required: --steps"),
        (("--steps", "8"), "there is no run folder nowhere"),
    ],
)
def test_mistakes_are_said_in_one_sentence(words, said, solo):
    refused(solo("record", "nowhere", *words), said)


def test_what_is_not_there_is_said(train, solo, tmp_path):
    folder = train("ppo", "--env-id", "CartPole-v1", *SHORT, "--num-envs", 2, "--num-steps", 64)["run"].dir
    refused(solo("record", folder, "--steps", 8, "--stochastic"), "this script has no stochastic policy")
    assert solo("record", folder, "--steps", 8)[0] == 0
    refused(solo("record", folder, "--steps", 8), f"{folder / 'dataset'} has a data set already")
    (tmp_path / "file").touch()
    refused(solo("record", folder, "--steps", 8, "--out", tmp_path / "file"), "cannot be written: File exists")
