"""`solo tune`: every parameter reaches the script, scores are what they should be, and kills lose nothing."""

import json
import re
import shutil
import signal
import tomllib
from collections import Counter
from dataclasses import replace

import pytest
from conftest import ROOT, refused
from study_tasks import FAKE, kill_some, process, until

optuna = pytest.importorskip("optuna")

from solorl import scripts  # noqa: E402
from solorl.errors import UsageError  # noqa: E402
from solorl.lab.studies import tune  # noqa: E402
from solorl.lab.studies.plan import load_script  # noqa: E402
from solorl.lab.studies.space import parse_space, space_from_file, space_of  # noqa: E402
from solorl.lab.studies.storage import Folder  # noqa: E402
from solorl.lab.studies.study import Study  # noqa: E402
from solorl.machine import own_cores  # noqa: E402

Choice = optuna.distributions.CategoricalDistribution
Int, Range = optuna.distributions.IntDistribution, optuna.distributions.FloatDistribution
SPACE = 'learning-rate = "log 1e-5..1e-1"\nwidth = "16..64 step 16"\n'


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to be in, with a copy of the stand-in and a space."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_JOURNAL", str(tmp_path / "journal"))
    shutil.copy(FAKE, tmp_path / "fake.py")
    (tmp_path / "space.toml").write_text(SPACE)
    return tmp_path


def command(*words, trials=4, seeds=1, flags=("--total-timesteps", 3)):
    """A search with the stand-in."""
    return ["tune", "fake.py", "--env-ids", "CartPole-v1", "--space", "space.toml", "--trials", str(trials),
            "--num-seeds", str(seeds), "--workers", "2", "--storage", "work", *map(str, words), "--",
            *map(str, flags)]  # fmt: skip


def trials(path="work/optuna.log", name="fake"):
    """The trials as Optuna reads them from the file."""
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))
    return optuna.load_study(study_name=name, storage=storage)


def states(found):
    return Counter(trial.state.name for trial in found.trials)


def runs(place):
    """(learning rate, width, seed) of every run, as it arrived in the script."""
    found = []
    for path in (place / "work/tasks").glob("*/*/config.json"):
        argv = json.loads(path.read_text())["command"]
        flags = dict(zip(argv[1::2], argv[2::2], strict=True))
        found.append((float(flags["--learning-rate"]), int(flags["--width"]), int(flags["--seed"])))
    return sorted(found)


def journal(place):
    path = place / "journal"
    return path.read_text().splitlines() if path.exists() else []


# ---------------------------------------------------------------------- searching
def test_every_parameter_reaches_the_script_and_the_best_flags_are_printed(solo, place):
    code, out, _ = solo(*command("--pruner", "none", trials=3, seeds=2))
    found = trials()
    assert code == 0 and states(found) == {"COMPLETE": 3}
    asked = sorted((t.params["learning-rate"], t.params["width"], seed) for t in found.trials for seed in (1, 2))
    assert runs(place) == asked  # exactly the same numbers, all of them
    best = found.best_trial.params
    flags = f"--total-timesteps 3 --learning-rate {best['learning-rate']!r} --width {best['width']}"
    assert f"solo train fake.py --env-id CartPole-v1 {flags}\n" in out
    assert f"solo bench fake.py --env-ids CartPole-v1 --start-seed 1002 --num-seeds 10 -- {flags}\n" in out
    assert "optuna-dashboard work/optuna.log" in out and f"best: trial {found.best_trial.number} with" in out
    before = len(journal(place))
    code, out, _ = solo(*command("--pruner", "none", trials=3, seeds=2))
    assert code == 0 and "3 of 3 trials so far" in out and len(journal(place)) == before
    assert solo(*command("--pruner", "none", trials=4, seeds=2))[0] == 0 and states(trials()) == {"COMPLETE": 4}
    other = solo(*command("--pruner", "none", trials=5, seeds=2, flags=("--total-timesteps", 4)))
    refused(other, "the search in work was made with different flags")
    refused(solo(*command("--storage", "s3://bucket/study")), "the trials need a folder that all machines see")


def test_scores_are_normalised_and_aggregated_as_documented(solo, place):
    (place / "space.toml").write_text("learning-rate = [1e-3]")
    scale = ["--env-ids", "CartPole-v1", "Acrobot-v1", "--target-scores", "CartPole-v1=0,200", "Acrobot-v1=100,101"]
    size = ["--space", "space.toml", "--num-seeds", "3", "--start-seed", "2", "--trials", "1", "--storage", "work"]
    assert solo("tune", "fake.py", *size, *scale)[0] == 0
    # final scores are 100 + seed / 100 with the seeds 2, 3, 4
    per_seed = [((100 + seed / 100) / 200 + seed / 100) / 2 for seed in (2, 3, 4)]
    [trial] = trials().trials
    assert trial.value == pytest.approx(per_seed[1]) and trial.user_attrs["Acrobot-v1"] == [100.02, 100.03, 100.04]
    assert trial.intermediate_values[9_999] == pytest.approx(per_seed[0])
    assert trial.intermediate_values[19_999] == pytest.approx(sum(per_seed[:2]) / 2)
    assert trial.intermediate_values[5] == pytest.approx(per_seed[0])  # the last evaluation of the first seed
    one = tune.Search(load_script("fake.py"), ("A",), {}, (1, 2, 3), {})
    assert one.value([0.0, 9.0, 1.0]) == 1 and replace(one, aggregate="mean").value([0.0, 9.0, 1.0]) == 10 / 3


def test_the_cores_of_a_run_count_on_this_machine_too(solo, place):
    search = ["tune", "fake.py", "--env-ids", "CartPole-v1", "--space", "space.toml", "--trials", 1, "--num-seeds", 1]
    few = [*search, "--storage", "few", "--cores", len(own_cores())]
    assert ", 1 runs at once" in solo(*few, "--", "--total-timesteps", 1)[1]
    refused(solo(*search, "--gpus", 99), "a task wants 99 gpus")


def test_failures_are_failed_trials_with_their_reason(solo, place):
    (place / "space.toml").write_text("fail-at = [1]")
    code, out, _ = solo(*command(trials=1))
    reason = "fake CartPole-v1 seed 1: exit code 1: RuntimeError: the simulator has crashed"
    assert code == 1 and states(trials()) == {"FAIL": 1} and f"no trial is complete; the last failed: {reason}" in out
    assert trials().trials[0].user_attrs["reason"] == reason and f"failed, {reason}" in out


def test_what_is_no_finite_number_is_no_score(solo, place):
    """A script of one's own may log words, null and infinity."""
    script = (place / "fake.py").read_text()
    for number, logged in enumerate(('"a word"', "None", "math.inf")):
        (place / "fake.py").write_text(script.replace("row = {", f'row = {{"mine/x": {logged}, '))
        code, out, _ = solo(*command("--metric", "mine/x", "--storage", f"work{number}", trials=1))
        assert code == 1 and "1 trials failed" in out and "no finite mine/x" in out
    rows = ['{"mine/x": 1.5}', '{"mine/x": null}', '{"mine/x": "2"}', '{"mine/x": 3}']
    (place / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    assert tune.values(place, "mine/x") == [1.5, 3.0]


def test_a_metric_that_is_not_logged_is_refused_after_the_first_run(solo, place):
    code, out, err = solo(*command("--metric", "eval/episodic_retrun", trials=5))
    assert code == 2 and "has no metric eval/episodic_retrun; did you mean eval/episodic_return?" in err
    assert "trial 0" not in out
    assert set(states(trials())) == {"RUNNING"}


def test_trials_that_have_failed_are_made_up_for_by_the_same_command(solo, place):
    (place / "space.toml").write_text("fail-at = [1]")
    assert solo(*command(trials=2))[0] == 1 and states(trials()) == {"FAIL": 2}
    code, out, _ = solo(*command(trials=2))
    assert code == 1 and "2 of 4 trials so far" in out and states(trials()) == {"FAIL": 4}


def prune_with(place, hopeless, *, seeds, steps, values):
    """A search whose learning rates are `values`, one after the other, with a pruner of our choice."""

    class Hopeless(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return hopeless(trial)

    space = {"learning-rate": Choice(tuple(values))}
    flags = {"--total-timesteps": (str(steps),), "--pause": ("0.1",)}
    targets = {"CartPole-v1": (0.0, 100.0)}
    asked = tune.Search(load_script("fake.py"), ("CartPole-v1",), targets, tuple(range(1, seeds + 1)), space, flags)
    found = tune.open_trials(place / "work", asked, "none", 0, 1)
    found.pruner = Hopeless()
    for value in values:
        found.enqueue_trial({"learning-rate": value})
    tuner = tune.Tuner(asked, found, Study(Folder(place / "work"), "work", {}, 1), len(values), 1, print)
    assert tuner.search_all() == 0
    return found


def test_a_hopeless_curve_ends_the_running_process(place, capfd):
    found = prune_with(
        place, lambda trial: trial.last_step == 3 and trial.params["learning-rate"] == 1e-5, seeds=1, steps=60,
        values=[1e-5, 1e-3],
    )  # fmt: skip
    bad, good = found.trials
    assert good.state.name == "COMPLETE" and good.intermediate_values[60] == pytest.approx(1.0001)
    assert bad.state.name == "PRUNED" and bad.intermediate_values[3] == pytest.approx(0.0301)
    assert 3 <= len([line for line in journal(place) if " 1e-05 " in line]) < 60
    assert "trial 0: pruned, 0.030 at evaluation 3 of seed 1" in capfd.readouterr().out
    status = [json.loads(path.read_text())["status"] for path in (place / "work/tasks").glob("*/*/status.json")]
    assert sorted(status) == ["finished", "stopped"] and not list((place / "work/leases").iterdir())


def test_a_hopeless_first_seed_spares_the_others(place, capfd):
    found = prune_with(
        place, lambda trial: trial.last_step == 9_999 and trial.params["learning-rate"] == 1e-5, seeds=2, steps=2,
        values=[1e-5, 1e-3],
    )  # fmt: skip
    assert [t.state.name for t in found.trials] == ["PRUNED", "COMPLETE"]
    assert Counter(line.split()[1] for line in journal(place) if " 1e-05 " in line) == {"1": 2}
    assert "pruned, 0.600 after seed 1" in capfd.readouterr().out


def test_median_pruner_is_the_default_and_starts_after_some_evaluations(place):
    asked = tune.Search(load_script("fake.py"), ("A",), {}, (1,), {"width": Choice((1,))})
    found = tune.open_trials(place / "work", asked, "median", 7, None)
    assert isinstance(found.pruner, optuna.pruners.MedianPruner) and found.pruner._n_warmup_steps == 7


@pytest.mark.parametrize("count", [3, 14])  # of 10 finished trials on Optuna looks at them
def test_commands_that_share_a_seed_draw_different_trials_those_that_one_would_draw(place, count):
    script, drawn = load_script("fake.py"), []
    for name, commands in (("one", 1), ("three", 3)):
        asked = tune.Search(script, ("A",), {}, (1,), space_from_file(place / "space.toml", script))
        studies = [tune.open_trials(place / name, asked, "none", 0, 1) for _ in range(commands)]
        tuners = [
            tune.Tuner(asked, each, Study(Folder(place / name), name, {}, 1), count, 1, print) for each in studies
        ]
        for number in range(count):
            trial = tuners[number % commands]._next_trial()
            tuners[0].found.tell(number, -abs(trial.params["learning-rate"]))
        drawn.append([trial.params for trial in tuners[0].trials()])
    assert drawn[0] == drawn[1] and len({str(params) for params in drawn[0]}) == count


def test_searches_with_seeds_side_by_side_have_no_trial_in_common(place):
    asked = tune.Search(load_script("fake.py"), ("A",), {}, (1,), {"x": Range(0, 1)})
    found = [tune.open_trials(place / str(seed), asked, "none", 0, seed) for seed in (1, 2, None, None)]
    drawn = [asked.params(each.ask())["x"] for each in found for _ in range(5)]
    assert len(set(drawn)) == 20


# ---------------------------------------------------------------------- kills and company
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_trials_of_an_ended_search_continue(solo, place, number):
    """They are the same trials, with the same parameters and runs."""
    flags = ("--total-timesteps", 40, "--pause", 0.05)
    with process(place, *command(trials=2, flags=flags)) as first:
        until(lambda: len(journal(place)) > 10)
        first.send_signal(number)
        out = first.communicate()[0]
    assert (first.returncode, "interrupted; the same command" in out) in ((130, True), (-signal.SIGKILL, False)), out
    before = [trial.params for trial in trials().trials]
    assert solo(*command(trials=2, flags=flags))[0] == 0 and states(trials()) == {"COMPLETE": 2}
    assert [trial.params for trial in trials().trials][: len(before)] == before
    assert set(Counter(journal(place)).values()) == {1} and len(journal(place)) == 2 * 40  # no step twice


@pytest.mark.slow
def test_twenty_trials_under_five_kills_have_one_value_each(place):
    words = command("--pruner", "none", trials=20, flags=("--total-timesteps", 20, "--pause", 0.05))
    out, code, killed = kill_some(place, lambda: process(place, *words), 5, 2.0)
    print(killed, len(journal(place)), "steps of", 20 * 20)
    found = trials()
    assert code == 0 and states(found) == {"COMPLETE": 20} and sum(killed.values()) == 5, out
    assert len({str(trial.params) for trial in found.trials}) == 20 == len(list((place / "work/results").iterdir()))
    assert len(journal(place)) <= 20 * 20 + 2 * 5


@pytest.mark.slow
def test_two_searches_at_once_share_the_trials(place):
    with process(place, *command(trials=8)) as one, process(place, *command(trials=8)) as two:
        outs = [one.communicate()[0], two.communicate()[0]]
    assert (one.returncode, two.returncode) == (0, 0), outs
    assert states(trials()) == {"COMPLETE": 8} and len(journal(place)) == 8 * 3


# ---------------------------------------------------------------------- the space
@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("log 1e-5..1e-2", "float", Range(1e-5, 1e-2, log=True)),
        ("0.9..0.999", "", Range(0.9, 0.999)),
        ("1..8", "", Int(1, 8)),
        ("1..8", "float", Range(1, 8)),
        ("1..8", "float | None", Range(1, 8)),
        ("32..512 step 32", "int", Int(32, 512, step=32)),
        ("log 1_000..100_000", "int", Int(1000, 100_000, log=True)),
        ("1e3..1.5M", "int", Int(1_000, 1_500_000)),
        ("log 1k..100k", "", Int(1_000, 100_000, log=True)),
        ("1k..2k step 0.5k", "int", Int(1_000, 2_000, step=500)),
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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("num-steps = [1.5, 2.5]", "--num-steps must be an integer such as 8, 500k, 2M or 1e6, got '1.5'"),
        ('learning-rate = "a | b"', "--learning-rate must be a number, got 'a'"),
        ('anneal-lr = "0..1"', "--anneal-lr takes no value; write --anneal-lr or --no-anneal-lr"),
        ('anneal-lr = ["yes", "no"]', "--anneal-lr takes no value"),
    ],
)
def test_values_that_the_script_cannot_have_are_refused(line, said, place):
    (place / "space.toml").write_text(line)
    with pytest.raises(UsageError, match=re.escape(said)):
        space_from_file(place / "space.toml", load_script("ppo"))


def test_space_stands_in_the_comments_of_the_script(place):
    (place / "mine.py").write_text("""
# a page ends here: \f
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
        (SPACE, ["fake.py", "--env-ids", "CartPole-v1", "--dry-run"], "--dry-run goes with --engine"),
        (SPACE, ["fake.py", "--env-ids", "CartPole-v1", "--target-scores", "CartPole-v1=0,inf"], "lower score first"),
        (SPACE, ["fake.py", "--env-ids", "CartPole-v1", "--seed", "-1"], "--seed"),
        (SPACE, ["fake.py"], "--env-ids"),
    ],
)
def test_bad_command_line_is_one_sentence(solo, place, space, words, sentence):
    (place / "space.toml").write_text(space)
    refused(solo("tune", words[0], "--space", "space.toml", *words[1:]), sentence)
    assert not (place / "runs").exists()


def test_script_without_a_space_says_how_to_give_one(solo, place):
    sentence = "fake.py has no field with `[tune: log 1e-5..1e-2]` in its comment; use --space FILE.toml (`solo tune"
    refused(solo("tune", "fake.py", "--env-ids", "CartPole-v1"), sentence)


def test_final_score_of_a_run_without_evaluations(tmp_path):
    rows = [json.dumps({"charts/episodic_return": i}) for i in range(100)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    assert tune.final_score(tmp_path, "eval/episodic_return") == sum(range(50, 100)) / 50
    assert tune.final_score(tmp_path, "losses/nothing") is None
