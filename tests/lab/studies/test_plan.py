"""What `solo bench` is to run: suites, sweeps, scripts and Pythons, plans on the disk, and what people see."""

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from conftest import ROOT, refused
from rich.console import Console
from study_tasks import FAKE, MANY, command, once, planned, steps

from solorl.cli.view import Table
from solorl.errors import UsageError
from solorl.lab.results import result as results
from solorl.lab.results.comparison import compare
from solorl.lab.results.read import read_all
from solorl.lab.studies import plan, task
from solorl.lab.studies import until as end_by
from solorl.lab.studies.bench import Bench
from solorl.lab.studies.storage import Folder, refusal
from solorl.lab.studies.study import Study, open_study
from solorl.lab.studies.worker import Pool


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to be in, with a copy of the stand-in; its steps are noted in `journal`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_JOURNAL", str(tmp_path / "journal"))
    shutil.copy(FAKE, tmp_path / "fake.py")
    return tmp_path


SUITE = """
name = "s"
[[job]]
script = "fake.py"
env_ids = "CartPole-v1"
seeds = "1-2"
"""


# ---------------------------------------------------------------------- suites
def test_task_is_the_same_only_for_the_same_script_environment_seed_and_flags(place):
    script = plan.load_script("fake.py")
    base = plan.Task(script, "CartPole-v1", 1, {"--a": ("1",), "--b": ()})
    assert base.id == plan.Task(plan.load_script("./fake.py"), "CartPole-v1", 1, {"--b": (), "--a": ("1",)}).id
    (place / "fake.py").write_text(FAKE.read_text() + "\n")
    others = [
        plan.Task(plan.load_script("fake.py"), "CartPole-v1", 1, base.flags),
        plan.Task(script, "ALE/Pong-v5", 1, base.flags),
        plan.Task(script, "CartPole-v1", 2, base.flags),
        plan.Task(script, "CartPole-v1", 1, {"--a": ("2",), "--b": ()}),
    ]
    assert len({task.id for task in [base, *others]}) == 5 and all("/" not in task.id for task in others)


def test_flags_replace_each_other():
    flags = plan.merge(plan.parse_flags(["--a", "1", "--no-c", "--d=-3"]), plan.table_flags({"a": 2.5, "c": True}, ""))
    assert task.words(flags) == ("--a", "2.5", "--d", "-3", "--c")
    assert task.words(plan.table_flags({"sizes": [64, 64], "x": False}, "")) == ("--sizes", "64", "64", "--no-x")


@pytest.mark.parametrize("given", ["--total_timesteps", "--total-timesteps"])
def test_a_flag_replaces_another_spelling_of_it(place, given):
    """For a script of ours all are the same; a foreign one may know only that which was typed."""
    (place / "foreign.py").write_text("")
    parts = {"--total-timesteps": ("3",), "--anneal-lr": ()}, {"--total_timesteps": ("4",), "--no-anneal_lr": ()}
    flags = plan.merge(*parts, plan.parse_flags([given, "5"]))
    scripts = [plan.load_script("ppo"), plan.load_script("foreign.py")]
    ours, foreign = plan.make_tasks(scripts, ["CartPole-v1"], [1], {"": flags})
    assert foreign.flags == {given: ("5",), "--no-anneal_lr": ()}
    assert ours.flags == {"--total-timesteps": ("5",), "--no-anneal-lr": ()}


def test_a_suite_in_order_finishes_a_job_before_the_next(place):
    """Else all jobs train their first seed before any second one."""
    job = '[[job]]\nscript = "fake.py"\nenv_ids = "{}"\nseeds = "1-2"\n'
    jobs = job.format("Pendulum-v1") + job.format("Acrobot-v1")
    for head, wanted in (("", "P1 A1 P2 A2"), ("in_order = true\n", "P1 P2 A1 A2")):
        (place / "s.toml").write_text(head + jobs)
        tasks = plan.load_suite(place / "s.toml", {}).tasks
        assert " ".join(f"{task.env_id[0]}{task.seed}" for task in tasks) == wanted
    (place / "s.toml").write_text("in_order = 1\n" + jobs)
    with pytest.raises(UsageError, match="in_order must be true or false, not 1"):
        plan.load_suite(place / "s.toml", {})


def test_suites_of_the_project_are_valid():
    found = {path.stem: plan.load_suite(path, {}) for path in (ROOT / "benchmark/suites").glob("*.toml")}
    assert len(found["classic"].tasks) == 95 and len(found["smoke"].tasks) == 10
    says = {name: (ROOT / f"benchmark/suites/{name}.toml").read_text().partition("\n")[0] for name in found}
    counts = {name: int(count[1]) for name, line in says.items() if (count := re.search(r"(\d+) runs", line))}
    assert counts == {name: len(found[name].tasks) for name in counts} and {"jax", "actor_critic", "minatar"} <= set(
        counts
    )
    lander = [task for task in found["classic"].tasks if task.env_id == "LunarLander-v3"]
    assert {task.flags["--total-timesteps"] for task in lander} == {("1000000",)} and len(lander) == 35
    fewer = plan.load_suite(ROOT / "benchmark/suites/classic.toml", {"--total-timesteps": ("5",)}, ["Acrobot-v1"], 3)
    assert len(fewer.tasks) == 6 and {task.flags["--total-timesteps"] for task in fewer.tasks} == {("5",)}


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('name = "s"', 'nam = "s"', "has the unknown key nam; did you mean name?"),
        ("env_ids", "env_id", "unknown key env_id; did you mean env_ids?"),
        ("[[job]]", "[[jobs]]", "unknown key jobs; did you mean job?"),
        ("[[job]]", "[engine.slum]\n[[job]]", "has the unknown key slum; did you mean slurm?"),
        ('"1-2"', '"one"', "seeds in a [[job]]"),
        ('"1-2"', "[]", "seeds in a [[job]]"),
        ('"1-2"', '"1-2"\nnum_seeds = 2', "must have either seeds, or num_seeds"),
        ('seeds = "1-2"', "num_seeds = 0", "at least 1 seed"),
        ('"1-2"', '"1-2"\nflags = 3', "must be a table such as"),
        ('"1-2"', '"1-2"\nflags = {seed = 3}', "--seed cannot be a flag for the scripts; use seeds"),
        ('"1-2"', '"1-2"\nflags = ["lr"]', "lr is not a flag"),
        ('"1-2"', '"1-2"\nvariants = {a = {x = 1}, b = {x = 1}}', "have the same flags: a, b"),
        ('"1-2"', '"1-2"\nenv_flags = {CartPole-v0 = {x = 1}}', "not in env_ids; did you mean CartPole-v1?"),
        ('"CartPole-v1"', '"CartPoll-v1"', "there is no environment CartPoll-v1; did you mean CartPole-v1"),
        ('"fake.py"', '"fak.py"', "there is no file fak.py"),
        ('"fake.py"', '"pp0"', "there is no algorithm pp0; did you mean ppo"),
        ('script = "fake.py"', "", "must have script or scripts"),
        (
            'script = "fake.py"',
            'script = "ppo"\nflags = {learning-rat = 1}',
            "no flag --learning-rat; did you mean --lear",
        ),
        ('name = "s"', 'name = "../s"', "name must be the name of a folder"),
        ('name = "s"', 'name = ".."', "name must be the name of a folder"),
        ('name = "s"', 'name = "."', "name must be the name of a folder"),
        ('name = "s"', 'name = "/s"', "name must be the name of a folder"),
        ('name = "s"', 'name = "s\\u001b[31m"', r"control characters and their like, unlike 's\x1b[31m'"),
        ('name = "s"', f'name = "{"s" * 300}"', "name must be the name of a folder"),
        ('seeds = "1-2"', "num_seeds = 1000000000", "100,000 seeds at most, all smaller than 2**31, not 1000000000"),
        ('seeds = "1-2"', "num_seeds = 1e9", "both whole, not 1000000000.0"),
        ('seeds = "1-2"', "num_seeds = nan", "both whole, not nan"),
        ('seeds = "1-2"', f"num_seeds = 1{'0' * 40}", "100,000 seeds at most"),
        ('seeds = "1-2"', f"num_seeds = 1{'0' * 5000}", "is not valid TOML"),
        ('seeds = "1-2"', "num_seeds = 1\nstart_seed = 2147483648", "smaller than 2**31"),
        ('"1-2"', '"1-1000000000"', "100,000 seeds at most"),
        ('"1-2"', f'"1-{"9" * 5000}"', "at most 1,000 characters"),
        ('"1-2"', '"2-1"', "seeds in a [[job]]"),
        ('"1-2"', "[2147483648]", "smaller than 2**31"),
        ('"1-2"', '"1-60000"\nvariants = {a = {x = 1}, b = {x = 2}}', "120,000 runs are too many for one command"),
        ('"1-2"', f"{'[' * 3000}{']' * 3000}", "nested too deeply"),
        ('"1-2"', '"1-2"\nflags = {x = nan}', "x must be a finite number"),
        ('"1-2"', '"1-2"\nflags = {x = [[1]]}', "x must be a finite number, a text, true, false or a list"),
        ('"1-2"', '"1-2"\nflags = {"" = 1}', "'' is not a flag"),
        ('"1-2"', '"1-2"\nflags = {"x y" = 1}', "'x y' is not a flag"),
        ('"1-2"', '"1-2"\nflags = {x = "\\u0000"}', "control characters"),
        ('"1-2"', f'"1-2"\nvariants = {{{"v" * 300} = {{x = 1}}}}', "too long for the name of a result file"),
        ('"1-2"', '"1-2"\nvariants = {"a/b" = {x = 1}, "a_b" = {x = 2}}', "would have the same result file"),
        ('"fake.py"', f'"{"x" * 300}.py"', "File name too long"),
        ('"1-2"', '"1-2"\npython = 3', "python in a [[job]] of s.toml must be the path of a Python, not 3"),
        (
            '"1-2"',
            '"1-2"\npython = "no/python"',
            "there is no Python interpreter 'no/python' that can be executed; name one such as venv/bin/python",
        ),
        ('name = "s"', "engine = 5", "engine in s.toml must be a table, not 5"),
        ('name = "s"', 'engine = {ray = "x"}', "ray in s.toml must be a table, not 'x'"),
        ('"1-2"', '"1-2"\npython = "fake.py"', "interpreter 'fake.py' that can be executed"),
        ('name = "s"', "name = ", "is not valid TOML"),
    ],
)
def test_bad_suite_is_one_sentence(solo, place, old, new, sentence):
    (place / "s.toml").write_text(SUITE.replace(old, new))
    refused(solo("bench", "s.toml"), sentence)
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fake.py"], "needs --env-ids"),
        (["fake.py", "--env-ids", "CartPole-v1", "--num-seed", "3"], "no flag --num-seed; did you mean --num-seeds"),
        (["fake.py", "--env-ids", "CartPole-v1", "--num-seeds", "0"], "--num-seeds must be at least 1"),
        (["fake.py", "--env-ids", "CartPole-v1", "--workers", "-1"], "--workers must be at least 0"),
        (["fake.py", "--env-ids", "CartPole-v1", "--results", "fake.py"], "fake.py is a file"),
        (["fake.py", "--env-ids", "CartPole-v1", "--workers", "1000000000"], "at most 1,000, not 1,000,000,000"),
        (["fake.py", "--env-ids", "CartPole-v1", "--num-seeds", "1000000000"], "100,000 seeds at most"),
        (["fake.py", "--env-ids", "CartPole-v1", "--variant", "a\x1b[31m"], "control characters"),
        (["fake.py", "--env-ids", "CartPole-v1", "--variant", "v" * 300], "too long for the name of a result file"),
        (["...py", "--env-ids", "CartPole-v1"], "must be the name of a folder, not '..'"),
        (
            ["fake.py", "--env-ids", "CartPole-v1", "--python", "venv"],
            "did you mean venv/bin/python?",
        ),
        (
            ["fake.py", "--env-ids", "CartPole-v1", "--python", "fake.py"],
            "interpreter 'fake.py' that can be executed",
        ),
        (["t.toml", "--python", "venv/python"], "there is no Python interpreter 'venv/python'"),
        (["t.toml", "--python", "~nobody_here/p"], "there is no Python interpreter '~nobody_here/p'"),
        (["ppo", "--env-ids", "CartPole-v1", "--", "--gama", "1"], "ppo.py has no flag --gama; did you mean --gamma?"),
        (["s.toml"], "there is no file s.toml; did you mean t.toml?"),
        (["t.toml", "--variant", "x"], "--variant is for scripts"),
        (["t.toml", "--env-ids", "Acrobot-v1"], "has no environment Acrobot-v1"),
        (["t.toml", "fake.py"], "takes one suite or scripts"),
        (["fake.py", "sub/fake.py", "--env-ids", "CartPole-v1"], "would have the same result file"),
    ],
)
def test_bad_command_line_is_one_sentence(solo, place, words, sentence):
    (place / "t.toml").write_text(SUITE)
    (place / "s.tom").write_text("no suite, by its name")
    (place / "venv/bin").mkdir(parents=True)
    (place / "venv/bin/python").symlink_to(sys.executable)
    shutil.copy(FAKE, place / "...py")
    (place / "sub").mkdir()
    (place / "sub/fake.py").write_text(FAKE.read_text() + "\n")
    refused(solo("bench", *words), sentence)
    assert not (place / "runs").exists()


SWEEP = ["bench", "ppo", "--env-ids", "CartPole-v1", "--dry-run"]


def test_a_sweep_has_a_variant_for_each_value(solo, place):
    code, out, err = solo(
        *SWEEP, "--sweep", "clip-coef=0.1,0.2", "--sweep", "anneal-lr=true,false", "--", "--gamma", "1"
    )
    assert code == 0, err
    found = [line.partition("--runs-dir")[0].split("--seed 1 ")[1].strip() for line in out.splitlines()]
    assert found == [f"--gamma 1 --clip-coef {c} --{no}anneal-lr" for c in ("0.1", "0.2") for no in ("", "no-")]
    names = [Path(line.split()[-1]).name.split("__")[1] for line in out.splitlines()]
    assert names[0] == "anneal-lr_clip-coef=0.1_gamma=1" and len(set(names)) == 4
    named = solo(*SWEEP, "--sweep", "clip-coef=0.1,0.2", "--variant", "mine")[1].splitlines()
    assert [Path(line.split()[-1]).name.split("__")[1] for line in named] == [
        "mine_clip-coef=0.1",
        "mine_clip-coef=0.2",
    ]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [(["clip-coef"], "--sweep is a flag with different values, as kl-coef=0,0.1,1, not clip-coef"),
     (["clip-coef=1,,2"], "not clip-coef=1,,2"), (["clip-coef=1,1"], "not clip-coef=1,1"),
     (["clip-coff=1,2"], "no flag --clip-coff; did you mean --clip-coef?"),
     (["gamma=0.9", "gamma=0.99,1"], "--sweep names a flag twice"), (["seed=1,2"], "--seed cannot be a flag")],
)  # fmt: skip
def test_a_sweep_that_cannot_be(solo, place, given, sentence):
    refused(solo(*SWEEP, *(word for text in given for word in ("--sweep", text))), sentence)


def test_a_suite_sweeps_by_its_variants(solo, place):
    (place / "s.toml").write_text(SUITE)
    refused(solo("bench", "s.toml", "--sweep", "x=1,2"), "--sweep is for scripts; s.toml says it itself")


def test_the_first_variant_of_a_suite_is_the_baseline_of_its_report(solo, place):
    """Whatever the order of the names and of the runs."""
    variants = "variants = {b = {total-timesteps = 3}, a = {total-timesteps = 2}, c = {total-timesteps = 4}}"
    (place / "s.toml").write_text(SUITE + variants)
    code, out, err = solo("bench", "s.toml", "--results", "results", "--workers", "2")
    assert code == 0, out + err
    found, _ = read_all([place / "results"])
    assert {run.variant for run in found if run.first} == {"b"} and len(found) == 6
    found = [replace(run, last_100_episodes=float(run.seed)) for run in found]  # the stand-in has no score
    compared = compare(found, metric="train")
    assert compared.baseline == "fake b" and set(compared.opponents.values()) == {"fake b"}
    assert compare(found, metric="train", baseline="fake c").baseline == "fake c"


def test_variants_that_a_flag_of_the_command_line_makes_the_same_are_refused(solo, place):
    (place / "s.toml").write_text(SUITE + "variants = {a = {x = 1}, b = {x = 2}}")
    refused(solo("bench", "s.toml", "--", "--x", "3"), "have the same flags: a, b")


def test_same_name_for_different_flags_is_refused(place):
    (place / "s.toml").write_text(SUITE + SUITE.replace('name = "s"', "") + "flags = {x = 1}")
    with pytest.raises(UsageError, match="would have the same result file"):
        plan.load_suite(place / "s.toml", {})


# ---------------------------------------------------------------------- a time of day
def finished(place, name, seconds, steps, seed=9, env_id="CartPole-v1", script="fake", together=1):
    """A result of a training in a folder next to that of the bench."""
    made = results.Result(env_id, script, seed, args={"total_timesteps": steps}, global_step=steps, wall_time=seconds)
    results.write(replace(made, together=together), place / f"tables/{name}")


def test_what_a_run_takes_is_told_by_the_runs_of_its_script_on_its_environment(place):
    script = plan.load_script("fake.py")
    made = task.Task(script, "CartPole-v1", 1, {"--total-timesteps": ("40",)})
    study, own = Study(Folder(place / "work"), "s", {made.id: made}), place / "tables/own"
    assert end_by.expected(study, [made], own) == 0  # nothing is known
    finished(place, "other", 100.0, 10)
    finished(place, "own", 900.0, 10, env_id="Acrobot-v1")
    assert end_by.expected(study, [made], own) == 400  # 10 seconds a step
    folder = place / f"work/tasks/{made.id}/run"
    (folder / "checkpoint/step_000000000030").mkdir(parents=True)
    (folder / "config.json").write_text('{"args": {"seed": 1}}')
    assert end_by.expected(study, [made], own) == 100  # of which it has done three quarters
    usual = task.Task(script, "CartPole-v1", 2)
    assert end_by.expected(study, [usual], own) == 100  # as long as the others, which had no flag


def test_a_run_that_cannot_end_in_time_does_not_begin(place, solo):
    words = command(seeds=2, workers=1)
    words = ["bench", "--until", "00:00", *words[1:]]
    words[words.index("results")] = "tables/own"
    finished(place, "other", 8 * 86_400, 5)  # a run takes eight days
    code, out, _ = solo(*words)
    assert code == 1 and "2 not begun, because they could not end in time; the same command continues" in out
    assert not steps(place)
    finished(place, "other", 0.1, 5)
    code, out, _ = solo(*words)
    assert code == 0 and "2 of 2 finished" in out
    assert steps(place) == once(2, 5)


def test_seeds_that_one_process_trains_take_as_long_as_such_a_process_took(place):
    tasks = [task.Task(plan.load_script("fake.py"), "CartPole-v1", seed) for seed in range(1, 9)]
    study, own = Study(Folder(place / "work"), "s", {each.id: each for each in tasks}), place / "tables/own"
    finished(place, "own", 100.0, 10, together=4)
    assert [end_by.expected(study, tasks[:count], own) for count in (1, 4, 8)] == [100, 100, 200]


def test_no_more_seeds_are_trained_together_than_can_end_in_time(place):
    (place / "many.py").write_text(MANY)
    tasks = plan.make_tasks([plan.load_script("many.py")], ["CartPole-v1"], range(1, 6), {"": {}})
    study, asked = Study(Folder(place / "work"), "s", {each.id: each for each in tasks}), []
    pool = Pool(study, tasks, 1, lambda text: None)
    pool.may_begin = lambda some: asked.append(len(some)) or len(some) <= 3
    pool.run()
    assert {path.parent.parent.name for path in place.glob("work/tasks/*/seed*/config.json")} == {
        tasks[0].id, tasks[3].id,
    }  # fmt: skip
    assert asked == [1, 2, 3, 4, 1, 2] and not pool.late and study.ids() == {each.id for each in tasks}


def test_the_time_of_day_is_the_next_one_and_for_this_machine_only(place, solo):
    then = end_by.read_time("06:30")
    assert 0 < then - time.time() <= 86_400 and time.localtime(then)[3:6] == (6, 30, 0)
    bench = ["bench", "fake.py", "--env-ids", "CartPole-v1"]
    refused(solo(*bench, "--until", "25:00"), "--until must be a time of day, such as 06:30, not 25:00")
    refused(solo(*bench, "--until", ""), "--until must be a time of day, such as 06:30")
    refused(solo(*bench, "--until", "06:30", "--engine", "ray"), "--until is for this machine")


def test_the_time_of_day_is_right_in_the_night_when_the_clock_changes(monkeypatch):
    class Evening(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 3, 28, 22, 0)  # the next night has 23 hours

    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    monkeypatch.setattr(end_by, "datetime", Evening)
    found = time.localtime(end_by.read_time("06:30"))
    monkeypatch.undo()
    time.tzset()
    assert found[:5] == (2026, 3, 29, 6, 30)


# ---------------------------------------------------------------------- the plan on the disk
def written(where, script, seeds, name, barrier):
    """Write a plan of these seeds at the same time as others."""
    tasks = plan.make_tasks([plan.load_script(script)], ["CartPole-v1"], seeds, {"": {}})
    study = Study(Folder(Path(where)), name, {task.id: task for task in tasks})
    barrier.wait()
    study.write()


def test_plans_that_begin_at_the_same_time_are_all_kept(place):
    context = multiprocessing.get_context("fork")
    for trial in range(8):
        where, barrier = str(place / str(trial)), context.Barrier(2)
        parts = [(range(1, 4), "one"), (range(3, 8), "two")]
        args = [(where, "fake.py", seeds, name, barrier) for seeds, name in parts]
        processes = [context.Process(target=written, args=each) for each in args]
        [process.start() for process in processes]
        [process.join() for process in processes]
        assert sorted(task.seed for task in open_study(where).tasks.values()) == [*range(1, 8)]
    before = [*(place / "0/plans").iterdir()]
    open_study("0").write()  # nothing new, nothing written
    assert [*(place / "0/plans").iterdir()] == before


def test_scripts_of_the_same_contents_under_two_names_are_two(solo, place):
    """A script compared with a copy of itself shows how much two equal ones differ."""
    shutil.copy(FAKE, place / "twin.py")
    words = ["bench", "fake.py", "twin.py", "--env-ids", "CartPole-v1", "--storage", "work", "--results", "results"]
    assert solo(*words)[0] == 0 and "2 of 2 finished (2 of them before)" in solo(*words)[1]
    assert {run.script for run in read_all([place / "results"])[0]} == {"fake", "twin"}
    assert {Path(name).name for name in Folder(place / "work").list("scripts")} == {"fake.py", "twin.py"}


def test_of_two_versions_of_a_script_the_later_one_has_the_table_and_that_is_said(solo, place):
    words = ["bench", "fake.py", "--env-ids", "CartPole-v1", "--storage", "work", "--results", "results"]
    script = (place / "fake.py").read_text()
    assert solo(*words)[0] == 0
    (place / "fake.py").write_text(script.replace("if step == args.fail_at", "if step == 2"))
    code, out, _ = solo(*words)
    assert code == 1 and "1 of these runs have the table of an earlier one" in out
    (place / "fake.py").write_text(f"{script}# the third version")
    code, out, _ = solo(*words)
    assert code == 0 and "earlier" not in out
    code, out, _ = solo("bench", "collect", "work", "--results", "again")
    assert code == 0 and "1 left out" in out and "1 tables in again" in out
    (run,), problems = read_all([place / "again"])
    assert run.script_sha256 == plan.sha256(place / "fake.py") and problems == []


def test_a_plan_whose_scripts_are_named_by_their_hashes_alone_can_be_read(place):
    """As earlier versions wrote it."""
    study, [made] = planned(place / "work", place)
    [path] = (place / "work/plans").iterdir()
    path.write_text(path.read_text().replace(f"scripts/{made.script.sha256}/fake.py", made.script.sha256))
    assert json.loads(path.read_text())["scripts"].keys() == {made.script.sha256}
    assert open_study("work").tasks == study.tasks


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"format": 1}', "\xff", "[" * 100_000])
def test_a_damaged_or_forged_plan_is_refused_and_not_written_over(place, solo, text):
    planned(place / "work", place)
    [path] = (place / "work/plans").iterdir()
    forged = path.read_text().replace('"seed": 1', '"seed": 2')
    for damaged in (text, forged):
        path.write_text(damaged)
        for words in (["work", "work"], ["bench", "status", "work"], command(seeds=1)):
            refused(solo(*words), path.name, "is damaged")
        assert path.read_text() == damaged


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["work", "nowhere"], "there is no folder nowhere"), (["work", "empty"], "there is no study in empty"),
     (["work", "nope://x"], "nope://x cannot be opened"), (["bench", "status", "x"], "there is no folder x"),
     (["bench", "logs", "work"], "TASK"), (["bench", "logs", "work", "other"], "has no task other"),
     (["bench", "logs", "work", "fake"], "has no task fake: 2 begin so")],
)  # fmt: skip
def test_a_study_or_task_that_is_not_there_is_one_sentence(place, solo, words, sentence):
    planned(place / "work", place, seeds=2)
    (place / "empty").mkdir()
    refused(solo(*words), sentence)


# ---------------------------------------------------------------------- what people see
def test_dry_run_prints_commands_that_work_and_writes_nothing(solo, place):
    words = command("--total-timesteps", 3, seeds=2, words=["--dry-run"])
    code, out, _ = solo(*words)
    assert code == 0 and len(out.splitlines()) == 2 and sorted(place.iterdir()) == [place / "fake.py"]
    assert subprocess.run(["bash", "-c", out.splitlines()[0]]).returncode == 0
    code, out, err = solo(*words)
    assert len(out.splitlines()) == 1 and "1 of 2 are finished" in err  # the pasted one counts
    (place / "foreign.py").write_text("open('made_here', 'w')")
    out = solo("bench", "foreign.py", "--env-ids", "A", "--dry-run")[1]
    assert subprocess.run(["bash", "-c", out]).returncode == 0
    assert next(place.glob("runs/bench/foreign/tasks/*/attempt-1/made_here")).exists()


@pytest.mark.parametrize("script", ["ppo", "ppo_jax", "ppo_atari"])
def test_a_plan_that_is_there_is_not_written_again(script, solo, place):
    """Whatever the kind of the script's environments."""
    env_id = {"ppo_atari": "PongNoFrameskip-v4"}.get(script, "CartPole-v1")
    words = ["bench", script, "--env-ids", env_id, "--num-seeds", 1, "--storage", "work", "--workers", 0]
    assert solo(*words)[0] == solo(*words)[0] == 0
    assert len([*(place / "work/plans").iterdir()]) == 1


def test_the_baseline_is_the_first_variant_of_this_command(solo, place):
    """Not that of the plan that the storage had first."""
    words = ["bench", "fake.py", "--env-ids", "CartPole-v1", "--num-seeds", 1, "--storage", "work", "--workers", 1]
    assert solo(*words, "--results", "one")[0] == 0
    code, out, err = solo(*words, "--results", "two", "--sweep", "total-timesteps=3,4")
    assert code == 0, out + err
    found, _ = read_all([place / "two"])
    assert {run.variant: run.first for run in found} == {"total-timesteps=3": True, "total-timesteps=4": False}


def test_no_workers_are_submitted_where_none_are_wanted(solo, place, monkeypatch):
    monkeypatch.setattr("solorl.cli.bench.start", lambda *given: pytest.fail("submitted"))
    code, out, _ = solo(*command(seeds=2, workers=0, words=["--engine", "slurm"]))
    assert code == 0 and "look: solo bench status work" in out


def test_an_empty_task_is_none(solo, place):
    """As that of a variable of the shell that is not set: not all of them."""
    assert solo(*command(seeds=2, workers=0))[0] == 0
    refused(solo("bench", "cancel", "work", ""), "has no task")


def test_who_stops_reading_is_no_bad_input(place, monkeypatch):
    with pytest.raises(BrokenPipeError):
        refusal(BrokenPipeError(32, "Broken pipe"), "work")


def test_without_workers_the_plan_is_written_for_others(solo, place):
    code, out, _ = solo(*command(seeds=2, workers=0))
    assert code == 0 and "look: solo bench status work" in out and len(open_study("work").tasks) == 2
    assert not (place / "work/tasks").exists()


def test_bars_show_what_runs_and_the_time_left(place, monkeypatch):
    study, tasks = planned(place / "work", place, "--total-timesteps", 200, seeds=5)
    clock = iter(range(0, 10_000))
    view = Table()
    view.progress.get_time = lambda: float(next(clock))
    bench = Bench(study, tasks, Pool(study, tasks, 3, print), view, place / "results")
    run_dir = place / f"work/tasks/{tasks[0].id}/run"
    (run_dir).mkdir(parents=True)
    (run_dir / "config.json").write_text('{"args": {"seed": 1, "total_timesteps": 200}}')
    for worker, each in zip(bench.pool.workers, tasks, strict=False):
        worker.tasks = [each]
    for step in (0, 25, 50):
        (run_dir / "metrics.jsonl").write_text(f'{{"global_step": {step}, "eval/episodic_return": 12.34}}\n{{"cut')
        monkeypatch.setattr(view, "_next", 0.0)
        view.refresh(bench)
    console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view.progress)
    first, row, *_ = console.export_text().splitlines()
    assert first.startswith("0 of 5 finished, 3 running") and " 5%" in first and re.search(r"left: \d:\d\d:\d\d", first)
    assert row.startswith("fake CartPole-v1 seed 1") and " 25%" in row and "12.3" in row
    bench.finished = {tasks[0].id}
    bench.pool.workers[0].tasks = []
    monkeypatch.setattr(view, "_next", 0.0)
    view.refresh(bench)
    console.print(view.progress)
    assert "seed 1" not in console.export_text()


def other_python(path):
    """A Python of another environment: the scripts see MARK."""
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\nMARK=other exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)


MARKED = "import os\nfrom pathlib import Path\nPath('mark').write_text(os.environ.get('MARK', 'own'))\n"


def test_scripts_run_with_the_python_that_is_named(solo, place):
    (place / "marked.py").write_text(MARKED)
    other_python(place / "venv/bin/python")
    words = ["bench", "marked.py", "--env-ids", "Only/There-v0", "--workers", 1]
    assert solo(*words, "--python", "venv/bin/python", "--num-seeds", 1)[0] == 0
    assert solo(*words, "--num-seeds", 2)[0] == 0  # the first is finished, whatever ran it
    marks = {path.parent.parent.name.split("__")[2]: path.read_text() for path in place.glob("runs/**/mark")}
    assert marks == {"1": "other", "2": "own"}


def test_jobs_of_a_suite_run_with_the_python_that_they_name(solo, place):
    other_python(place / "suites/venv/bin/python")
    (place / "suites/marked.py").write_text(MARKED)
    (place / "suites/s.toml").write_text("""
        [[job]]
        script = "marked.py"
        env_ids = ["A", "A"]
        seeds = [1, 1]
        [[job]]
        script = "marked.py"
        python = "venv/bin/python"
        env_ids = "B"
        num_seeds = 1
    """)
    assert solo("bench", "suites/s.toml", "--workers", 1)[0] == 0
    marks = {path.parent.parent.name.split("__")[1]: path.read_text() for path in place.glob("runs/**/mark")}
    assert marks == {"A": "own", "B": "other"}
    [task, _] = plan.load_suite(place / "suites/s.toml", {}, python="/bin/sh").tasks
    assert task.argv()[0] == "/bin/sh"  # the command line has the last word
    text = (place / "suites/s.toml").read_text().replace('"B"', '"A"')
    (place / "suites/s.toml").write_text('python = "/bin/sh"\n' + text.replace('python = "venv/bin/python"', ""))
    assert [task.python for task in plan.load_suite(place / "suites/s.toml", {}).tasks] == ["/bin/sh"]
    (place / "suites/s.toml").write_text(text)
    with pytest.raises(UsageError, match="would have the same result file"):
        plan.load_suite(place / "suites/s.toml", {})


def test_a_script_of_ours_with_another_python_may_have_environments_that_this_one_has_not(place):
    script = plan.load_script("fake.py")
    assert script.ours and plan.make_tasks([script], ["Only/There-v0"], [1], {"": {}}, python="/bin/sh")
    with pytest.raises(UsageError, match="there is no environment"):
        plan.make_tasks([script], ["Only/There-v0"], [1], {"": {}})
