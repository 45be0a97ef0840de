"""`solo tune`: every parameter reaches the script, scores are what they should be, and kills lose nothing."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, environment, refused

optuna = pytest.importorskip("optuna")

from solorl.lab.studies.engines.workers import LocalCluster  # noqa: E402
from solorl.lab.studies.journal import open_study  # noqa: E402

from solorl import scripts  # noqa: E402
from solorl.errors import UsageError  # noqa: E402
from solorl.lab.studies import tune  # noqa: E402
from solorl.lab.studies.plan import load_script  # noqa: E402
from solorl.lab.studies.space import Choice, Range, parse_space, space_of  # noqa: E402
from solorl.lab.studies.storage import Folder  # noqa: E402
from solorl.lab.studies.study import Study  # noqa: E402

FAKE = ROOT / "tests/doubles/fake_training.py"
SPACE = 'learning-rate = "log 1e-5..1e-1"\nwidth = "16..64 step 16"\n'


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to be in, with a copy of the fake training and a space."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_JOURNAL", str(tmp_path / "journal"))
    shutil.copy(FAKE, tmp_path / "fake.py")
    (tmp_path / "space.toml").write_text(SPACE)
    return tmp_path


def command(*words, trials=4, seeds=1, flags=("--total-timesteps", 3)):
    """A search with the fake training."""
    return ["tune", "fake.py", "--env-ids", "CartPole-v1", "--space", "space.toml", "--trials", str(trials),
            "--num-seeds", str(seeds), "--workers", "2", *map(str, words), "--", *map(str, flags)]  # fmt: skip


@contextlib.contextmanager
def tuner(place, *words, **kwargs):
    """The same in a process of its own."""
    argv = [sys.executable, "-m", "solorl.cli", *command(*words, **kwargs)]
    env = environment(FAKE_JOURNAL=str(place / "journal"), PYTHONUNBUFFERED="1")
    process = subprocess.Popen(argv, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def study(name="fake", path="tune/fake.log"):
    """The study as Optuna reads it from the file."""
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))
    return optuna.load_study(study_name=name, storage=storage)


def states(found):
    return Counter(t.state.name for t in found.trials if not t.user_attrs.get("interrupted"))


def commands(place):
    """(learning rate, width, seed) of every run, as it arrived in the script."""
    found = []
    for path in (place / "runs/tune").glob("*/tasks/*/*/config.json"):
        argv = json.loads(path.read_text())["command"]
        flags = dict(zip(argv[1::2], argv[2::2], strict=True))
        found.append((float(flags["--learning-rate"]), int(flags["--width"]), int(flags["--seed"])))
    return sorted(found)


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def journal(place):
    path = place / "journal"
    return path.read_text().splitlines() if path.exists() else []


# ---------------------------------------------------------------------- searching
def test_every_parameter_reaches_the_script_and_the_best_flags_are_printed(solo, place):
    # no pruner: it judges the sixth trial where five are complete before, and that is up to the clock
    code, out, _ = solo(*command("--pruner", "none", trials=6, seeds=2))
    found = study()
    assert code == 0 and states(found) == {"COMPLETE": 6}
    asked = sorted((t.params["learning-rate"], t.params["width"], seed) for t in found.trials for seed in (1, 2))
    assert commands(place) == asked  # exactly the same numbers, all of them
    best = found.best_trial.params
    flags = f"--total-timesteps 3 --learning-rate {best['learning-rate']!r} --width {best['width']}"
    assert f"solo train fake.py --env-id CartPole-v1 {flags}\n" in out
    assert f"solo bench fake.py --env-ids CartPole-v1 --start-seed 1002 --num-seeds 10 -- {flags}\n" in out
    assert "optuna-dashboard tune/fake.log" in out and f"best: trial {found.best_trial.number} with" in out


def test_scores_are_normalised_and_aggregated_as_documented(solo, place):
    (place / "space.toml").write_text("learning-rate = [1e-3]")
    scale = ["--env-ids", "CartPole-v1", "Acrobot-v1", "--target-scores", "CartPole-v1=0,200", "Acrobot-v1=100,101"]
    size = ["--space", "space.toml", "--num-seeds", "3", "--start-seed", "2", "--trials", "1"]
    assert solo("tune", "fake.py", *size, *scale)[0] == 0
    # final scores are 100 + seed / 100 with the seeds 2, 3, 4
    per_seed = [((100 + seed / 100) / 200 + seed / 100) / 2 for seed in (2, 3, 4)]
    [trial] = study().trials
    assert trial.value == pytest.approx(per_seed[1]) and trial.user_attrs["Acrobot-v1"] == [100.02, 100.03, 100.04]
    assert trial.intermediate_values[9_999] == pytest.approx(per_seed[0])
    assert trial.intermediate_values[19_999] == pytest.approx(sum(per_seed[:2]) / 2)


def test_aggregate_is_the_median_or_the_mean_over_seeds(place):
    one = tune.Search(load_script("fake.py"), ("A",), {}, (1, 2, 3), {})
    assert one.value([0.0, 9.0, 1.0]) == 1 and replace(one, aggregate="mean").value([0.0, 9.0, 1.0]) == 10 / 3


def test_study_goes_on_and_counts_all_its_trials(solo, place):
    assert solo(*command(trials=2))[0] == 0
    runs = len(journal(place))
    code, out, _ = solo(*command(trials=2))
    assert code == 0 and "2 of 2 trials so far" in out and len(journal(place)) == runs
    assert solo(*command(trials=5))[0] == 0 and states(study()) == {"COMPLETE": 5}
    other = solo(*command(trials=5, flags=("--total-timesteps", 4)))
    refused(other, "the study in tune/fake.log was made with different flags")


def test_failures_are_failed_trials_with_their_reason(solo, place):
    (place / "space.toml").write_text("fail-at = [-1, 1]\nlearning-rate = [1e-3, 1e-2]")
    code, out, _ = solo(*command("--seed", 1, trials=8))
    found = study()
    failed = [t for t in found.trials if t.state.name == "FAIL"]
    assert code == 0 and failed and {t.params["fail-at"] for t in failed} == {1}
    reason = "fake CartPole-v1 seed 1: exit code 1: RuntimeError: the simulator has crashed"
    assert failed[0].user_attrs["reason"] == reason and f"failed, {reason}" in out
    assert all("seed 1: exit code 1" in t.user_attrs["reason"] for t in failed)
    assert f"{len(failed)} trials failed" in out and found.best_trial.params["fail-at"] == -1
    (place / "space.toml").write_text("fail-at = [1]")
    code, out, _ = solo(*command("--storage", "tune/bad.log", trials=1))
    assert code == 1 and f"no trial is complete; the last failed: {reason}" in out


def prune_with(place, pruner, *, seeds, steps, values):
    """A search whose learning rates are `values`, one after the other, with a pruner of our choice."""
    script = load_script("fake.py")
    space = {"learning-rate": Choice(tuple(values))}
    flags = {"--total-timesteps": (str(steps),), "--pause": ("0.1",)}
    targets = {"CartPole-v1": (0.0, 100.0)}
    asked = tune.Search(script, ("CartPole-v1",), targets, tuple(range(1, seeds + 1)), space, flags)
    found = open_study(place / "log", asked.script.name, asked.about(), "none", 0, 1)
    found.pruner = pruner
    for value in values:
        found.enqueue_trial({"learning-rate": value})
    runs = Study(Folder(place / "work"), "work", {}, 1)
    work = tune.Tuner(asked, found, runs, LocalCluster(1), len(values), print)
    assert work.run() == 0
    return found


@pytest.mark.slow
def test_hopeless_curve_ends_the_running_process(place, capfd):
    class Hopeless(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.last_step % 10_000 >= 3 and trial.params["learning-rate"] == 1e-5

    found = prune_with(place, Hopeless(), seeds=1, steps=30, values=[1e-3, 1e-5])
    good, bad = found.trials
    assert good.state.name == "COMPLETE" and good.intermediate_values[30] == pytest.approx(1.0001)
    assert bad.state.name == "PRUNED" and bad.intermediate_values[3] == pytest.approx(0.0601)
    steps = [line for line in journal(place) if " 1e-05 " in line]
    assert 3 <= len(steps) < 25  # terminated long before its 30 steps
    assert "trial 1: pruned, 0.060 at evaluation 3 of seed 1" in capfd.readouterr().out
    status = [json.loads(path.read_text())["status"] for path in (place / "work/tasks").glob("*/*/status.json")]
    assert sorted(status) == ["finished", "stopped"] and not list((place / "work/leases").iterdir())


def test_hopeless_first_seed_spares_the_others(place, capfd):
    class Hopeless(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.last_step == 9_999 and trial.params["learning-rate"] == 1e-5

    found = prune_with(place, Hopeless(), seeds=2, steps=2, values=[1e-5, 1e-3])
    assert [t.state.name for t in found.trials] == ["PRUNED", "COMPLETE"]
    assert Counter(line.split()[1] for line in journal(place) if " 1e-05 " in line) == {"1": 2}
    assert "pruned, 0.600 after seed 1" in capfd.readouterr().out


def test_median_pruner_is_the_default_and_starts_after_some_evaluations(place):
    asked = tune.Search(load_script("fake.py"), ("A",), {}, (1,), {"width": Choice((1,))})
    found = open_study(place / "log", asked.script.name, asked.about(), "median", 7, None)
    assert isinstance(found.pruner, optuna.pruners.MedianPruner) and found.pruner._n_warmup_steps == 7


# ---------------------------------------------------------------------- kills and company
def test_killed_search_goes_on_with_the_same_parameters(solo, place):
    flags = ("--total-timesteps", 40, "--pause", 0.02)
    with tuner(place, trials=3, flags=flags) as first:
        until(lambda: len(journal(place)) > 20)
        first.send_signal(signal.SIGKILL)
        first.wait()
    running = [t.params for t in study().trials if t.state.name == "RUNNING"]
    assert len(running) == 2
    code, out, _ = solo(*command(trials=3, flags=flags))
    found = study()
    assert code == 0 and states(found) == {"COMPLETE": 3} and out.count("its command was killed") == 2
    complete = [t.params for t in found.trials if t.state.name == "COMPLETE"]
    assert all(params in complete for params in running)
    assert set(Counter(journal(place)).values()) == {1} and len(journal(place)) == 3 * 40  # no step twice


@pytest.mark.parametrize("number", [signal.SIGINT])
def test_interrupted_search_goes_on(solo, place, number):
    flags = ("--total-timesteps", 40, "--pause", 0.02)
    with tuner(place, trials=2, flags=flags) as first:
        until(lambda: len(journal(place)) > 10)
        first.send_signal(number)
        out = first.communicate()[0]
    assert first.returncode == 128 + number and "interrupted; the same command continues" in out
    assert not states(study())["RUNNING"]
    code, out, _ = solo(*command(trials=2, flags=flags))
    assert code == 0 and states(study())["COMPLETE"] == 2
    assert set(Counter(journal(place)).values()) == {1} and len(journal(place)) == 2 * 40


def test_two_searches_at_once_share_the_trials(place):
    with tuner(place, trials=8) as one, tuner(place, trials=8) as two:
        outs = [one.communicate()[0], two.communicate()[0]]
    assert (one.returncode, two.returncode) == (0, 0), outs
    assert states(study()) == {"COMPLETE": 8} and len(journal(place)) == 8 * 3
    assert any("(best" in out or ": 0." in out for out in outs)  # how they share the trials is up to the clock


def test_the_lock_that_a_killed_command_leaves_can_be_released(place):
    """Optuna looks at the age of what the lock, a link, points to; else it would wait for ever."""
    asked = tune.Search(load_script("fake.py"), ("A",), {}, (1,), {"width": Choice((1,))})
    open_study(Path("tune/log"), asked.script.name, asked.about(), "none", 0, None)
    locks = []
    symlink = os.symlink
    os.symlink = lambda target, path: (symlink(target, path), locks.append(Path(path).stat()))
    try:
        open_study(Path("tune/log"), asked.script.name, asked.about(), "none", 0, None)
    finally:
        os.symlink = symlink
    assert locks


# ---------------------------------------------------------------------- the space
@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("log 1e-5..1e-2", "float", Range(1e-5, 1e-2, log=True)),
        ("0.9..0.999", "", Range(0.9, 0.999)),
        ("1..8", "", Range(1, 8, whole=True)),
        ("1..8", "float", Range(1, 8)),
        ("1..8", "float | None", Range(1, 8)),
        ("32..512 step 32", "int", Range(32, 512, step=32, whole=True)),
        ("log 1_000..100_000", "int", Range(1000, 100_000, log=True, whole=True)),
        ("1e3..1.5M", "int", Range(1_000, 1_500_000, whole=True)),
        ("log 1k..100k", "", Range(1_000, 100_000, log=True, whole=True)),
        ("1k..2k step 0.5k", "int", Range(1_000, 2_000, step=500, whole=True)),
        ("0.5k..2k", "float", Range(500.0, 2_000.0)),
        ("1e4 | 50k", "int", Choice((10_000, 50_000))),
        ("-1.5..2", "", Range(-1.5, 2)),
        ("64 | 128", "int", Choice((64, 128))),
        ("1 | 2.5", "float", Choice((1.0, 2.5))),
        ("true | false", "bool", Choice((True, False))),
        ("relu | tanh", "str", Choice(("relu", "tanh"))),
    ],
)
def test_space_language(text, kind, expected):
    assert parse_space(text, "here", kind) == expected


@pytest.mark.parametrize("text", ["1e-5", "2..1", "log 0..1", "log 1..8 step 2", "1..8 step 0", "a..b", "", "1,3"])
def test_bad_space_is_one_sentence(text):
    with pytest.raises(UsageError, match=r"^here: "):
        parse_space(text, "here")


def test_space_stands_in_the_comments_of_the_script(place):
    (place / "mine.py").write_text("""
from solorl import RunArgs
class Args(RunArgs):
    env_id: str = "CartPole-v1"  # the environment
    learning_rate: float = 2.5e-4  # step size of Adam [tune: log 1e-5..1e-2]
    num_steps: int = 128  # steps of one rollout [tune: 32 | 64 | 128]
    anneal_lr: bool = True  # [tune: true | false]
""")
    assert space_of(load_script("mine.py")) == {
        "learning-rate": Range(1e-5, 1e-2, log=True),
        "num-steps": Choice((32, 64, 128)),
        "anneal-lr": Choice((True, False)),
    }
    script = load_script("mine.py")
    asked = tune.Search(script, ("A",), {}, (1,), space_of(script))
    [task] = asked.tasks({"learning-rate": 1e-4, "num-steps": 32, "anneal-lr": False}, 1)
    assert task.argv()[-5:] == ("--learning-rate", "0.0001", "--num-steps", "32", "--no-anneal-lr")


OFF_POLICY = ["sac_continuous_action", "sac_continuous_action_jax", "td3_continuous_action"]


@pytest.mark.parametrize("name", ["ppo", "ppo_normalized", "ppo_jax", "dqn", "ppo_continuous_action", *OFF_POLICY])
@pytest.mark.parametrize("installed", [False, True])
def test_space_of_an_algorithm_is_the_one_that_is_shipped(tmp_path, monkeypatch, name, installed):
    """In a checkout that of `benchmark/spaces`, which the wheel has inside the package."""
    table = ROOT / f"benchmark/spaces/{name.removesuffix('_jax')}.toml"
    if installed:
        config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
        monkeypatch.setattr(scripts, "PACKAGE", tmp_path / "solorl")
        for source, target in config["wheel"]["force-include"].items():
            assert any(f"{source}/".startswith(f"{part}/") for part in config["sdist"]["include"])
            shutil.copytree(ROOT / source, tmp_path / target)
    space = space_of(load_script(name))
    assert list(space) == list(tomllib.loads(table.read_text())) and len(space) > 5


@pytest.mark.parametrize(
    ("space", "words", "sentence"),
    [
        ("learning-rat = [1]", ["ppo", "--env-ids", "CartPole-v1"], "no flag --learning-rat; did you mean --learning-"),
        ("gamma = 3", ["ppo", "--env-ids", "CartPole-v1"], "gamma in space.toml must be a text such as"),
        ("seed = [1]", ["ppo", "--env-ids", "CartPole-v1"], "--seed cannot be a flag for the scripts"),
        ("", ["ppo", "--env-ids", "CartPole-v1"], "space.toml names no parameter"),
        (SPACE, ["fake.py", "--env-ids", "CartPole-v1", "Acrobot-v1"], "--target-scores is missing for CartPole-v1"),
        (SPACE, ["fake.py", "--env-ids", "CartPole-v1", "--target-scores", "CartPole-v1=5"], "must look like"),
        (SPACE, ["fake.py", "--env-ids", "CartPole-v1", "--target-scores", "CartPole-v1=5,1"], "the lower score first"),
        (
            SPACE,
            ["fake.py", "--env-ids", "CartPole-v1", "--target-scores", "CartPole-v0=1,5"],
            "did you mean CartPole-v1?",
        ),
        (
            SPACE,
            ["fake.py", "--env-ids", "CartPole-v1", "--total-timesteps", "1.5"],
            "--total-timesteps must be an integer",
        ),
        (SPACE, ["fake.py", "--env-ids", "CartPole-v7"], "there is no environment CartPole-v7"),
        (SPACE, ["fake.py", "--env-ids", "CartPole-v1", "--trials", "0"], "--trials must be at least 1"),
        (SPACE, ["fake.py", "--env-ids", "CartPole-v1", "--workers", "1000000000"], "at most 1,000, not 1,000,000,000"),
        (SPACE, ["fake.py", "--env-ids", "CartPole-v1", "--num-seeds", "1000000000"], "100,000 seeds at most"),
        (SPACE, ["fake.py", "--env-ids", "CartPole-v1", "--", "--width", "3"], "--width is searched"),
        (SPACE, ["fake.py"], "--env-ids"),
    ],
)
def test_bad_command_line_is_one_sentence(solo, place, space, words, sentence):
    (place / "space.toml").write_text(space)
    refused(solo("tune", words[0], "--space", "space.toml", *words[1:]), sentence)
    assert not (place / "tune").exists()


def test_script_without_a_space_says_how_to_give_one(solo, place):
    sentence = "fake.py has no field with `[tune: log 1e-5..1e-2]` in its comment; use --space FILE.toml (`solo tune"
    refused(solo("tune", "fake.py", "--env-ids", "CartPole-v1"), sentence)


def test_curve_is_read_as_it_grows_and_anew_after_a_cut(tmp_path):
    file, curve = tmp_path / "metrics.jsonl", tune.Curve("eval/episodic_return")
    assert curve.read(None) == [] and curve.read(tmp_path) == []
    file.write_text('{"eval/episodic_return": 1}\n{"charts/SPS": 5}\n{"eval/epi')
    assert curve.read(tmp_path) == [1]
    file.write_text('{"eval/episodic_return": 1}\n{"charts/SPS": 5}\n{"eval/episodic_return": 2.5}\n')
    assert curve.read(tmp_path) == [1, 2.5]
    file.write_text('{"eval/episodic_return": 7}\n')
    assert curve.read(tmp_path) == [7]
    assert tune.final_score(tmp_path, "eval/episodic_return") == 7


def test_final_score_of_a_run_without_evaluations(tmp_path):
    rows = [json.dumps({"charts/episodic_return": i}) for i in range(100)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    assert tune.final_score(tmp_path, "eval/episodic_return") == sum(range(50, 100)) / 50
    assert tune.final_score(tmp_path, "losses/nothing") is None
