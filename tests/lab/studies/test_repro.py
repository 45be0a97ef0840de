"""`solo repro`: the same training again, and a verdict on new seeds."""

import gzip
import json

import pytest
from conftest import refused

from solorl.errors import UsageError
from solorl.lab.results.read import collect
from solorl.lab.results.result import Result, read
from solorl.lab.studies import repro

SHORT = ("--total-timesteps", 1024, "--eval-every", 512, "--eval-episodes", 3, "--no-save-model")


@pytest.mark.parametrize("df, t", [(3, 3.1824), (4, 2.7764), (9, 2.2622), (29, 2.0452)])
def test_students_t(df, t):
    assert repro.quantile(df) == pytest.approx(t, rel=0.01)


def test_verdicts_are_those_of_a_prediction_interval():
    old = [10.0, 12.0, 14.0, 16.0]  # mean 13, deviation 2.582; t(3) = 3.182; one new seed: 13 +- 9.19, four: 13 +- 5.81
    assert repro.verdict(old, [21.0]).startswith("consistent: 1 new seeds have 21")
    assert repro.verdict(old, [22.5]).startswith("not consistent")
    assert repro.verdict(old, [19.5] * 4).startswith("not consistent")
    assert repro.verdict(old, [18.0] * 4).startswith("consistent")
    assert repro.verdict(old[:3], [13.0]).startswith("too few: 3 seeds then")
    assert repro.verdict(old, []).startswith("too few")
    assert repro.verdict([500.0] * 5, [500.0]).startswith("consistent")


def test_the_flags_are_those_of_the_result_that_the_script_still_has():
    args = {"learning_rate": 0.1, "anneal_lr": False, "cuda": True, "target_kl": None, "seed": 1, "num_envs": 2}
    result = Result("CartPole-v1", "ppo", 1, args=args)
    task = repro.task_of(result, 7)
    assert task.seed == 7 and task.flags == {"--learning-rate": ("0.1",), "--no-anneal-lr": (), "--num-envs": ("2",)}
    with pytest.raises(UsageError, match="no_such"):
        repro.task_of(Result("CartPole-v1", "no_such", 1), 1)


@pytest.fixture
def stored(train, tmp_path):
    """The result file of a short training."""
    train("ppo", *SHORT)
    return collect(next((tmp_path / "runs").iterdir()), tmp_path / "results")


def test_a_training_is_repeated_and_a_wrong_number_is_found(stored, solo, monkeypatch):
    monkeypatch.setattr(repro, "in_checkout", lambda: False)  # golden starts have their own tests
    code, out, err = solo("repro", stored)
    assert code == 0 and err == "" and "script      as it was" in out and "packages    as they were" in out
    assert "  evaluation  equal" in solo("repro", next((stored.parent.parent / "runs").iterdir()))[1]  # not rounded
    then = read(stored).eval
    assert f"equal: {then['mean'][0]:g} at step {then['global_step'][0]:,}" in out
    content = json.loads(gzip.decompress(stored.read_bytes()))
    content["eval"]["mean"][0] += 1
    content["script_sha256"], content["versions"]["numpy"] = "other", "1.0"
    stored.write_bytes(gzip.compress(json.dumps(content).encode()))
    code, out, _ = solo("repro", stored, "--seeds", 1)
    assert code == 1 and "not equal" in out and "difference 1;" in out and "has changed since" in out
    assert "numpy 1.0 -> " in out and "too few: 1 seeds then" in out


def test_a_training_that_fails_is_said_in_one_line(stored, solo, monkeypatch):
    monkeypatch.setattr(repro, "in_checkout", lambda: False)
    content = json.loads(gzip.decompress(stored.read_bytes()))
    content["args"]["num_envs"] = 0
    stored.write_bytes(gzip.compress(json.dumps(content).encode()))
    code, out, _ = solo("repro", stored)
    assert code == 1 and "cannot be repeated" in out and "--num-envs" in out


def test_nothing_to_repeat_is_refused(stored, solo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(solo("repro", "ppo"), "no result of ppo")
    refused(solo("repro", stored, "dqn"), "no result of dqn")  # before anything is trained
    (tmp_path / "benchmark").mkdir()
    (tmp_path / "results").rename(tmp_path / "benchmark/results")
    refused(solo("repro", "ppo", "dqn"), "no result of dqn")
    refused(solo("repro", "pppo"), "no result of pppo; did you mean ppo?")
