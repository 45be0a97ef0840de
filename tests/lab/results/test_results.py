"""Results: collected from run folders, read back, and read from what other libraries write."""

import ast
import fcntl
import gzip
import importlib
import json
import os
import sys
import time

import pytest
from conftest import ROOT, rows

from solorl.catalog.header import fields_of, parse_source
from solorl.lab.results import comparison, run_folder
from solorl.lab.results import page as report_page
from solorl.lab.results import result as results
from solorl.lab.results.read import collect, read_all
from solorl.lab.results.result import ResultError, read
from solorl.lab.results.run_folder import thinned

MACHINE = {"system": "Linux-6.1.0-secret-host-x86_64", "cpu": "a CPU", "cores": 2, "device": "cpu"}


def make_run(
    folder,
    env_id="CartPole-v1",
    seed=1,
    status="finished",
    started="2026-11-21T05:00:00Z",
    args=(),
    lines=(),
    script="ppo.py",
):
    """A run folder as `solorl.run.verbs` writes it: 150 episodes of return 1, 2, ..., evaluations 10 and 20."""
    folder.mkdir(parents=True)
    places = {"runs_dir": "/home/me/runs", "resume": "/home/me/old", "wandb_entity": "me"}
    config = {
        "format": 1,
        "script": script,
        "script_sha256": "ab" * 32,
        "args": {"env_id": env_id, "seed": seed} | places | dict(args),
        "command": ["ppo.py", "--runs-dir", "/home/me/runs"],
        "started": started,
        "git": {"commit": "c" * 40, "dirty": False},
        "python": "3.11.7",
        "versions": {"torch": "2.13.0"},
        "machine": MACHINE,
    }
    (folder / "config.json").write_text(json.dumps(config))
    table = [row(10 * i, i / 3, charts__episodic_return=i, charts__episodic_length=2 * i) for i in range(1, 151)]
    table += [row(step, step / 30, eval__episodic_return=mean, eval__episodic_return_std=1.5, eval__episodic_length=7)
              for step, mean in ((1_000, 10), (1_500, 20))]  # fmt: skip
    table += [row(500 * i, 1, charts__SPS=sps) for i, sps in enumerate((100, 300, 200), 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*table, *lines]))
    (folder / "status.json").write_text(json.dumps({"status": status, "global_step": 1_500, "wall_time": 50.123456789}))
    return folder


def row(step, seconds, **values):
    """A row of metrics.jsonl; `__` stands for `/`."""
    floats = {name.replace("__", "/"): float(value) for name, value in values.items()}
    return {"global_step": step, "wall_time": float(seconds), **floats}


def content(path):
    return json.loads(gzip.decompress(path.read_bytes()))


# ---------------------------------------------------------------------- writing
def test_collected_numbers(tmp_path):
    result = read(collect(make_run(tmp_path / "run"), tmp_path / "results"))
    assert result.key == ("CartPole-v1", "ppo", "", 1)
    assert result.eval == {
        "global_step": [1000, 1500], "wall_time": [33.3333, 50], "mean": [10, 20], "std": [1.5, 1.5], "length": [7, 7],
    }  # fmt: skip
    assert result.train["global_step"][:3] == [16, 24, 32]  # bins of 1500 / 200 -> 8 steps; none ends in (0, 8]
    assert result.train["return"][:2] == [1, 2]
    assert sum(result.train["episodes"]) == 150
    assert result.last_100_episodes == sum(range(51, 151)) / 100
    assert result.sps == 200
    assert (result.global_step, result.wall_time, result.status) == (1500, 50.1235, "finished")
    assert result.git == {"commit": "c" * 40, "dirty": False}
    assert result.versions == {"torch": "2.13.0"}
    assert result.script_sha256 == "ab" * 32


def test_success_and_cost_are_those_of_the_last_evaluation(tmp_path):
    run = make_run(tmp_path / "run")
    assert read(collect(run, tmp_path / "results")).declared == {}
    late = [row(step, 1, eval__success_rate=rate, eval__episodic_cost=3.5) for step, rate in ((1_500, 0.75), (9, 0.5))]
    run = make_run(tmp_path / "other", lines=late)
    result = read(collect(run, tmp_path / "results"))
    assert result.declared == {"success_rate": 0.75, "episodic_cost": 3.5}
    for wrong in ("[1.0]", '{"success_rate":"much"}'):
        data = json.dumps(content(results.write(result, tmp_path / "results")))
        before = json.dumps({"success_rate": 0.75, "episodic_cost": 3.5})
        assert before in data
        with pytest.raises(ResultError, match=r"its declared is of another kind|cannot be read"):
            (tmp_path / "wrong.json.gz").write_bytes(gzip.compress(data.replace(before, wrong).encode()))
            read(tmp_path / "wrong.json.gz")


def test_seeds_trained_at_once_are_counted(tmp_path):
    run = make_run(tmp_path / "run")
    assert read(collect(run, tmp_path / "results")).together == 1
    (run / "together.json").write_text(json.dumps({"runs": ["run", "run2", "run3"]}))
    assert read(collect(run, tmp_path / "results")).together == 3
    (run / "together.json").write_text(json.dumps(["run", "run2"]))  # as version 0.1 wrote it
    assert read(collect(run, tmp_path / "results")).together == 2
    for wrong in ("[", "3"):
        (run / "together.json").write_text(wrong)
        with pytest.raises(ResultError, match="cannot be read"):
            collect(run, tmp_path / "results")


def test_training_episodes_are_thinned_to_means_of_equal_bins():
    episodes = [(step, step / 10, float(step), 1.0) for step in range(1, 10_001)]
    table = thinned(episodes, 10_000)
    assert table["global_step"] == list(range(50, 10_001, 50))  # 200 bins
    assert table["episodes"] == [50] * 200
    assert table["return"][0] == sum(range(1, 51)) / 50
    assert table["wall_time"][0] == 5.0
    assert thinned([(7, 1.0, 5.0, 1.0), (9, 2.0, 6.0, 3.0)], 1_000) == {
        "global_step": [10], "wall_time": [2.0], "return": [5.5], "length": [2.0], "episodes": [2],
    }  # fmt: skip
    assert thinned([], 100)["return"] == []


def test_steps_beyond_a_million_are_exact(tmp_path):
    late = row(12_345_678, 1, eval__episodic_return=1 / 3, eval__episodic_length=1)
    result = read(collect(make_run(tmp_path / "run", lines=[late]), tmp_path))
    assert result.eval["global_step"][-1] == 12_345_678
    assert result.eval["mean"][-1] == 0.333333


def test_bytes_depend_on_the_run_only(tmp_path):
    run = make_run(tmp_path / "run")
    first = collect(run, tmp_path / "a").read_bytes()
    os.utime(run / "metrics.jsonl", (1, 1))
    again = collect(run, tmp_path / "b")
    run.rename(tmp_path / "elsewhere")
    assert collect(tmp_path / "elsewhere", tmp_path / "b") == again
    assert again.read_bytes() == first
    assert first[4:8] == bytes(4)  # gzip would keep the time here
    assert len(first) < 4_000


def test_no_local_name_gets_into_a_result(tmp_path):
    path = collect(make_run(tmp_path / "run", args={"data_path": "/srv/data/expert.npz"}), tmp_path)
    text = json.dumps(content(path))
    assert "/home" not in text and "/srv" not in text and str(tmp_path) not in text and "secret-host" not in text
    assert content(path)["args"] == {"env_id": "CartPole-v1", "seed": 1, "data_path": "expert.npz"}
    assert content(path)["machine"] == MACHINE | {"system": "Linux-6.1.0"}


def test_file_name(tmp_path):
    path = collect(make_run(tmp_path / "run", env_id="ALE/Pong-v5", seed=12), tmp_path, variant="learning-rate=1e-3 x")
    assert path.name == "ALE_Pong-v5__ppo__learning-rate=1e-3_x__12.json.gz"
    assert read(path).key == ("ALE/Pong-v5", "ppo", "learning-rate=1e-3 x", 12)
    assert collect(make_run(tmp_path / "run2"), tmp_path).name == "CartPole-v1__ppo__1.json.gz"


@pytest.mark.parametrize("status", ["stopped", "failed", "diverged: losses/value_loss is nan"])
def test_an_unfinished_run_is_refused(tmp_path, status):
    """One that has diverged is kept, so that who reads the table hears of it."""
    run = make_run(tmp_path / "run", status=status)
    if status.startswith("diverged"):
        file = collect(run, tmp_path / "results")
        assert read_all([file]) == ([], [f"{file} is left out: the run is not finished ({status})"])
    else:
        with pytest.raises(ValueError, match="is not finished"):
            collect(run, tmp_path / "results")
        assert not (tmp_path / "results").exists()
    found, problems = read_all([run])
    assert found == [] and problems == [f"{run} is left out: the run is not finished ({status})"]


def test_a_run_that_says_running_and_has_no_process_was_killed(tmp_path):
    run = make_run(tmp_path / "run", status="running")
    assert read_all([run])[1] == [f"{run} is left out: the run is not finished (killed)"]
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_all([run])[1] == [f"{run} is left out: the run is not finished (running)"]
    (run / ".lock").unlink()
    os.mkfifo(run / ".lock")  # of somebody else's run: nobody waits for it
    assert read_all([run])[1] == [f"{run} is left out: the run is not finished (killed)"]


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    collect(make_run(tmp_path / "run"), tmp_path / "results")
    before = (tmp_path / "results/CartPole-v1__ppo__1.json.gz").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        collect(make_run(tmp_path / "run3", lines=[{"global_step": 1, "charts/SPS": 1}]), tmp_path / "results")
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["CartPole-v1__ppo__1.json.gz"]
    assert (tmp_path / "results/CartPole-v1__ppo__1.json.gz").read_bytes() == before


def test_infinite_values_become_null(tmp_path):
    result = results.Result("E-v0", "ppo", 1, args={"target_kl": float("inf")}, sps=float("nan"))
    assert content(results.write(result, tmp_path))["args"] == {"target_kl": None}


# ---------------------------------------------------------------------- damaged files
def damaged(path, change):
    data = content(path)
    change(data)
    path.write_bytes(gzip.compress(json.dumps(data).encode()))


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-40]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"hello"),
        lambda path: path.write_bytes(path.read_bytes()[:60] + b"\0\0\0\0" + path.read_bytes()[64:]),
        lambda path: path.write_bytes(gzip.compress(b"[1, 2]")),
        lambda path: path.write_bytes(gzip.compress(b"{")),
        lambda path: damaged(path, lambda data: data.update(format=2)),
        lambda path: damaged(path, lambda data: data.pop("seed")),
        lambda path: damaged(path, lambda data: data.update(seed="one")),
        lambda path: damaged(path, lambda data: data["eval"].pop("mean")),
        lambda path: damaged(path, lambda data: data["eval"]["mean"].pop()),
        lambda path: damaged(path, lambda data: data["train"]["return"].append(None)),
        lambda path: damaged(path, lambda data: data.update(eval=3)),
    ],
    ids=[
        "cut",
        "empty",
        "text",
        "bytes",
        "list",
        "json",
        "format",
        "no seed",
        "seed",
        "column",
        "short",
        "null",
        "kind",
    ],
)
def test_a_damaged_file_is_named_and_the_others_are_read(tmp_path, harm):
    bad = collect(make_run(tmp_path / "runs/1", seed=1), tmp_path / "results")
    collect(make_run(tmp_path / "runs/2", seed=2), tmp_path / "results")
    harm(bad)
    with pytest.raises(ResultError, match="CartPole-v1__ppo__1"):
        read(bad)
    found, problems = read_all([tmp_path / "results"])
    assert [result.seed for result in found] == [2]
    assert len(problems) == 1 and str(bad) in problems[0] and "\n" not in problems[0]


def test_a_damaged_run_folder_is_named(tmp_path):
    for name, file, text in (
        ("a", "config.json", "{"),
        ("b", "config.json", '{"args": {}}'),
        ("c", "config.json", "[]"),
        ("d", "metrics.jsonl", '{"global_step": 1}\n{"global\n{"global_step": 3}\n'),
        ("e", "metrics.jsonl", "3\n"),
        ("f", "status.json", ""),
    ):
        (make_run(tmp_path / name) / file).write_text(text)
    found, problems = read_all([tmp_path])
    assert found == []
    assert [f"{tmp_path / name}" in problem for name, problem in zip("abcdef", problems, strict=True)] == [True] * 6


@pytest.mark.parametrize("wrong", [None, [], {}, "x", "1", 1.5, 10**400, [None], {"a": [1]}])
@pytest.mark.parametrize("name", ["env_id", "script", "seed", "args", "global_step", "wall_time", "eval", "train"])
def test_a_result_file_with_a_wrong_value_is_read_or_named(tmp_path, name, wrong):
    path = collect(make_run(tmp_path / "run", seed=2), tmp_path)
    damaged(path, lambda data: data.update({name: wrong}))
    found, problems = read_all([path])
    assert len(found) + len(problems) == 1 and all(str(path) in problem for problem in problems)
    assert json.dumps(report_page._data(comparison.compare(found), "steps")) if found else problems


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000,
     b" " * 2**24 + b'{"format":1,"env_id":"E","script":"s","seed":1}', b'{"format":1,"seed":' + b"9" * 5000 + b"}"],
    ids=["deep", "bomb", "digits"],
)  # fmt: skip
def test_a_file_made_to_harm_is_named(tmp_path, data):
    bad = tmp_path / "bad.json.gz"
    bad.write_bytes(gzip.compress(data))
    found, problems = read_all([tmp_path])
    assert found == [] and len(problems) == 1 and str(bad) in problems[0] and len(problems[0]) < 400


def test_only_regular_files_are_read(tmp_path):
    """A pipe or a device in place of a file would never end."""
    for name in ("config.json", "status.json", "metrics.jsonl", "together.json"):
        run = make_run(tmp_path / name)
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    os.mkfifo(tmp_path / "pipe.json.gz")
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero/events.out.tfevents.1").symlink_to("/dev/zero")
    found, problems = read_all([tmp_path])
    assert found == []
    assert len(problems) == 4


def test_links_in_a_circle_end(tmp_path):
    """Seven in each of six folders: 42**39 paths."""
    make_run(tmp_path / "a/run")
    for name in "abcdef":
        (tmp_path / name).mkdir(exist_ok=True)
        for other in "abcdefg":
            (tmp_path / name / f"to_{other}").symlink_to(tmp_path / other if other != "g" else tmp_path)
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    found, problems = read_all([tmp_path])
    assert len(found) == 1 and problems == []
    assert read_all([tmp_path / "itself"]) == ([], [f"there is no {tmp_path / 'itself'}"])


def test_names_cannot_control_the_terminal(tmp_path):
    """Characters that do are written as what they are, also in sentences on damage, and half a letter of a name."""
    run = make_run(tmp_path / "run\x1b[2J", env_id="E\x1b[31m-v0\u202e", args={"exp_name": "\x07wide", "gamma": 1})
    make_run(tmp_path / "bad\x1b[2J", status="odd\x1b")
    make_run(tmp_path / os.fsdecode(b"\xff") / "run", status="running")
    (result,), problems = read_all([tmp_path])
    assert (result.env_id, result.name) == (r"E\x1b[31m-v0\u202e", r"ppo \x07wide")
    assert len(problems) == 2 and all(problem.isprintable() for problem in [*problems, result.source])
    assert r"odd\x1b" in "".join(problems) and r"/\udcff/run" in "".join(problems)
    assert run.exists()


def test_file_names_with_odd_digits_are_sorted(tmp_path):
    for name in ("2\u00b2", "run2", "2run", "\u0664"):
        make_run(tmp_path / name, seed=len(name), env_id=name)
    assert len(read_all([tmp_path])[0]) == 4


def test_a_last_line_cut_by_a_kill_is_no_row(tmp_path):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"global_step": 1600, "eval/episodic_re')
    assert run_folder.read_run(run).eval["global_step"] == [1000, 1500]


# ---------------------------------------------------------------------- reading many
def test_files_run_folders_and_folders_of_them(tmp_path):
    for seed in (10, 2, 1):
        collect(make_run(tmp_path / f"runs/deep/{seed}", seed=seed), tmp_path / "results")
    found, problems = read_all([tmp_path / "results"])
    assert [result.seed for result in found] == [1, 2, 10]
    assert problems == []
    both, problems = read_all([tmp_path / "runs", tmp_path / "results", tmp_path / "results"])
    assert [result.seed for result in both] == [1, 2, 10]  # a run and the file made of it count once
    assert problems == []
    one, _ = read_all([tmp_path / "results/CartPole-v1__ppo__2.json.gz"])
    assert one[0].eval == both[1].eval | {"wall_time": [33.3333, 50]}


def experiment(folder, steps=1_500, **args):
    """A run folder of `steps` steps with these arguments and the usual ones of a run."""
    run = make_run(folder, args={"total_timesteps": steps, "eval_every": steps, "gamma": 0.99} | args)
    (run / "status.json").write_text(json.dumps({"status": "finished", "global_step": steps, "wall_time": 5}))
    return run


def names(found):
    return [(result.name, result.seed) for result in found]


def test_runs_with_other_arguments_are_other_methods(tmp_path):
    """A sweep is all there, each method named by the arguments that differ and by no other."""
    for rate in (2.5e-4, 1e-3):
        for seed in (1, 2):
            experiment(tmp_path / f"{rate}_{seed}", seed=seed, learning_rate=rate, threads=seed, eval_every=seed)
    found, problems = read_all([tmp_path])
    methods = ("ppo learning-rate=0.00025", "ppo learning-rate=0.001")
    assert sorted(names(found)) == [(method, seed) for method in methods for seed in (1, 2)]
    assert problems == []


def test_words_of_a_name(tmp_path):
    sets = ({"anneal_lr": True, "target_kl": None}, {"anneal_lr": False, "target_kl": 0.015, "sizes": [1, 2.5]},
            {"anneal_lr": True, "target_kl": 1.0, "sizes": [3], "data": "a\x1bb"})  # fmt: skip
    for i, args in enumerate(sets):
        experiment(tmp_path / str(i), **args)
    found, _ = read_all([tmp_path])
    assert [result.name for result in found] == [
        "ppo anneal-lr target-kl=None",
        "ppo no-anneal-lr sizes=1,2.5 target-kl=0.015",
        "ppo anneal-lr sizes=3 target-kl=1",
    ]


def test_arguments_of_another_environment_do_not_count(tmp_path):
    """A suite gives each environment its own; a method keeps one name on all of them."""
    for env_id, gamma in (("CartPole-v1", 0.99), ("LunarLander-v3", 0.999)):
        experiment(tmp_path / env_id, env_id=env_id, gamma=gamma)
    assert {result.name for result in read_all([tmp_path])[0]} == {"ppo"}
    experiment(tmp_path / "third", gamma=0.9)
    assert {result.name for result in read_all([tmp_path])[0]} == {"ppo gamma=0.99", "ppo gamma=0.999", "ppo gamma=0.9"}


def test_an_argument_that_a_script_got_later_makes_no_method(tmp_path):
    experiment(tmp_path / "old", seed=1)
    experiment(tmp_path / "new", seed=2, norm_adv=True)
    found, problems = read_all([tmp_path])
    assert sorted(names(found)) == [("ppo", 1), ("ppo", 2)] and problems == []


@pytest.mark.parametrize("flag", ["total_timesteps", "target_return"])
def test_a_run_with_another_budget_is_another_method(tmp_path, flag):
    """It takes the place of no run of the same seed; an environment with one budget keeps the plain name."""
    for seed, value in ((1, 30_000), (1, 150_000), (2, 30_000)):
        experiment(tmp_path / f"{seed}_{value}", seed=seed, **{flag: value})
    experiment(tmp_path / "other", env_id="Acrobot-v1", **{flag: 500_000})
    found, problems = read_all([tmp_path])
    words = flag.replace("_", "-")
    assert sorted(names(found)) == [
        ("ppo", 1),
        *((f"ppo {words}={n}", s) for n, s in ((150_000, 1), (30_000, 1), (30_000, 2))),
    ]
    assert problems == []


def test_flags_that_all_methods_share_are_no_part_of_their_names(tmp_path):
    """Result files as `solo bench ... -- FLAGS` names them; a name that a person gave stays."""
    for i, (rate, variant) in enumerate(((1e-3, "eval-every=1500 learning-rate=1e-3 total-timesteps=1500"),
                                         (1e-2, "eval-every=1500 learning-rate=0.01 total-timesteps=1500"),
                                         (1e-2, "mine"))):  # fmt: skip
        collect(experiment(tmp_path / f"runs/{i}", learning_rate=rate, clip=i), tmp_path / "results", variant)
    found, problems = read_all([tmp_path / "results"])
    assert sorted(result.name for result in found) == [
        "ppo clip=0 learning-rate=0.001", "ppo clip=1 learning-rate=0.01", "ppo mine",
    ]  # fmt: skip
    assert problems == []
    both, problems = read_all([tmp_path])  # the run folder of a file with a name is that run once more
    assert sorted(names(both)) == sorted(names(found)) and problems == []
    whole, _ = read_all([tmp_path / "results"], whole=True)
    assert "ppo eval-every=1500 learning-rate=1e-3 total-timesteps=1500" in {result.name for result in whole}


def test_arguments_of_every_run_count_where_a_variant_is_made_of_them(tmp_path):
    """As in a comparison of --compile with none."""
    for i, variant in enumerate(("", "compile")):
        collect(experiment(tmp_path / f"runs/{i}", compile=bool(i)), tmp_path / "results", variant)
    assert [result.name for result in read_all([tmp_path / "results"])[0]] == ["ppo no-compile", "ppo compile"]


def test_flags_of_other_libraries_scripts(tmp_path):
    """Their results hold the given flags only: what is missing has its default."""
    for seed, flags in ((1, {}), (1, {"lr": "1e-3", "no-norm": ""}), (1, {"lr": "2e-3", "no-norm": ""})):
        variant = " ".join("=".join(filter(None, pair)) for pair in flags.items())
        results.write(results.Result("E-v0", "peer", seed, variant, args=flags), tmp_path)
    assert {result.name for result in read_all([tmp_path])[0]} == {
        "peer", "peer lr=1e-3 no-norm", "peer lr=2e-3 no-norm",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "sha", "differing"),
    [
        ({}, "ab" * 32, ""),
        ({"threads": 2, "eval_every": 10}, "cd" * 32, " except eval_every, threads, the script itself"),
    ],
)
def test_of_two_runs_of_a_seed_with_the_same_settings_the_newer_counts(tmp_path, args, sha, differing):
    """Also where the other one has more steps; what differs without being a setting of the training is said."""
    early = make_run(tmp_path / "z_early", started="2026-11-20T00:00:00Z")
    (early / "status.json").write_text(json.dumps({"status": "finished", "global_step": 9_999, "wall_time": 5}))
    late = make_run(tmp_path / "a_late", started="2026-11-21T00:00:00Z", args=args)
    config = json.loads((late / "config.json").read_text()) | {"script_sha256": sha}
    (late / "config.json").write_text(json.dumps(config))
    for order in ([early, late], [late, early]):
        found, problems = read_all(order)
        assert [result.source for result in found] == [str(late)]
        alike = f"of the same seed and the same settings{differing}"
        assert problems == [f"{early} is left out: {late} is newer, {alike}"]


def test_two_runs_that_began_in_the_same_second_are_two(tmp_path):
    """As a sweep started with `&` has them; the run of a folder and of the file made of it is one."""
    one, other = (make_run(tmp_path / name, args={"threads": threads}) for name, threads in (("a", 1), ("b", 2)))
    found, problems = read_all([one, other])
    assert len(found) == 1 and len(problems) == 1 and "is left out" in problems[0]
    found, problems = read_all([one, collect(one, tmp_path / "results")])
    assert len(found) == 1 and problems == []


def test_what_is_not_there_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    found, problems = read_all([tmp_path / "empty", tmp_path / "nothing"])
    assert found == []
    assert problems == [f"{tmp_path / 'empty'} holds no result", f"there is no {tmp_path / 'nothing'}"]


def test_the_experiment_name_is_the_variant(tmp_path):
    run = make_run(tmp_path / "run", args={"exp_name": "wide"})
    assert run_folder.read_run(run).name == "ppo wide"
    assert run_folder.read_run(make_run(tmp_path / "run2", args={"exp_name": "ppo"})).name == "ppo"


# ---------------------------------------------------------------------- where a script comes from
def own_run(folder, name, header, seed=1, **changes):
    """A run of a user's own file with this header, and its folder's copy of the file."""
    run = make_run(folder, script=f"{name}.py", seed=seed, **changes)
    (run / f"{name}.py").write_text(f'"""Mine.\n\n{header}"""\n')
    return run


@pytest.mark.parametrize(
    ("header", "opponent"),
    [
        ("Copy of   ppo.py (SoloRL 0.1.0)\nRun       solo train ppo\nDiffers   root of its family\n", "ppo"),
        ("Run       solo train ppo --seed 1\n", "ppo"),  # copied by hand
        ("Differs   from ppo.py: all\n", "ppo"),
        ("Copy of   rpo_continuous_action.py (SoloRL 0.1.0)\n", "ppo"),  # over two files that are not there
        ("Copy of   dqn.py (SoloRL 0.1.0)\n", "a_mine"),  # which does not come from ppo
        ("Run       solo train a_mine\n", "a_mine"),
    ],
)
def test_a_change_is_judged_against_its_original(tmp_path, header, opponent):
    """As the copy of the script in the run folder says, also after its result went into a file."""
    own = own_run(tmp_path / "runs/a_mine", "a_mine", header)
    make_run(tmp_path / "runs/ppo")
    collect(own, tmp_path / "files")
    for paths in ([tmp_path / "runs"], [tmp_path / "files", tmp_path / "runs/ppo"]):
        compared = comparison.compare(read_all(paths)[0])
        assert compared.baseline == opponent
        assert [pair.y for pair in compared.pairs] == [opponent]


def test_each_change_has_its_own_original(tmp_path):
    """The nearest of those that are there, and of its variants the one with the same budget; else the baseline."""
    copy = "Copy of   {} (SoloRL 0.1.0)\n"
    make_run(tmp_path / "ppo1", args={"total_timesteps": 30})
    make_run(tmp_path / "ppo2", args={"total_timesteps": 150})
    make_run(tmp_path / "dqn", script="dqn.py")
    own_run(tmp_path / "my_ppo", "my_ppo", copy.format("ppo.py"), args={"total_timesteps": 150})
    own_run(tmp_path / "my_ppo2", "my_ppo2", copy.format("my_ppo.py"), args={"total_timesteps": 150})
    own_run(tmp_path / "my_dqn", "my_dqn", copy.format("dqn.py"))
    own_run(tmp_path / "elsewhere", "elsewhere", copy.format("dqn.py"), env_id="Acrobot-v1")
    compared = comparison.compare(read_all([tmp_path])[0])
    assert {pair.x: pair.y for pair in compared.pairs} == {
        "ppo total-timesteps=30": "dqn",
        "ppo total-timesteps=150": "dqn",
        "my_ppo": "ppo total-timesteps=150",
        "my_ppo2": "my_ppo",
        "my_dqn": "dqn",
    }
    given = comparison.compare(read_all([tmp_path])[0], baseline="ppo total-timesteps=30")
    assert {pair.y for pair in given.pairs} == {"ppo total-timesteps=30"}


# ---------------------------------------------------------------------- other libraries
def write_events(folder, **series):
    """TensorBoard files with one scalar series per tag; `__` stands for `/`."""
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(folder))
    for tag, values in series.items():
        for i, value in enumerate(values, 1):
            writer.add_scalar(tag.replace("__", "/"), value, 100 * i, walltime=1e9 + i)
    writer.close()


def test_cleanrl_folder(tmp_path):
    pytest.importorskip("tensorboard")
    folder = tmp_path / "runs/CartPole-v1__ppo__3__1700000000"
    write_events(folder, charts__episodic_return=range(300), charts__episodic_length=range(300), charts__SPS=[9, 7, 8])
    found, problems = read_all([tmp_path / "runs"])
    assert problems == []
    assert found[0].key == ("CartPole-v1", "cleanrl_ppo", "", 3)
    assert found[0].last_100_episodes == sum(range(200, 300)) / 100
    assert (found[0].global_step, found[0].wall_time, found[0].sps) == (30_000, 299.0, 8)
    assert found[0].train["global_step"][-1] == 30_000
    assert sum(found[0].train["episodes"]) == 300  # no point is dropped by the reader's reservoir
    assert found[0].eval["mean"] == []
    assert time.strptime(found[0].started, "%Y-%m-%dT%H:%M:%SZ").tm_year == 2001
    assert read(collect(folder, tmp_path / "results")).last_100_episodes == found[0].last_100_episodes


@pytest.mark.parametrize(
    ("folder", "key"),
    [
        ("Hopper-v4/PPO_2", ("Hopper-v4", "sb3_ppo", "", 2)),
        ("ppo/Hopper-v4_5", ("Hopper-v4", "sb3_ppo", "", 5)),
        ("ppo/Hopper-v4_5/PPO_1", ("Hopper-v4", "sb3_ppo", "", 5)),
        ("ALE/Pong-v5__dqn_atari__1__17", ("ALE/Pong-v5", "sb3_dqn_atari", "", 1)),
        ("Hopper-v4__mine__3/PPO_1", ("Hopper-v4", "sb3_mine", "", 3)),
        ("ALE/Pong-v5__sb3_dqn__4__17/DQN_2", ("ALE/Pong-v5", "sb3_dqn", "", 4)),
    ],
)
def test_names_of_folders(tmp_path, folder, key):
    pytest.importorskip("tensorboard")
    write_events(tmp_path / folder, rollout__ep_rew_mean=[1, 2, 5], eval__mean_reward=[4, 6], time__fps=[50])
    (found,), problems = read_all([tmp_path])
    assert problems == []
    assert found.key == key
    assert found.last_100_episodes == 5  # the series is a mean over 100 episodes already
    assert found.eval["mean"] == [4, 6] and found.eval["global_step"] == [100, 200]
    assert found.sps == 50


def test_a_folder_whose_losses_stay_nan_is_left_out(tmp_path):
    pytest.importorskip("tensorboard")
    nan = float("nan")
    write_events(tmp_path / "CartPole-v1/PPO_1", rollout__ep_rew_mean=[1, 2, 5], train__value_loss=[nan, 3, 2])
    write_events(tmp_path / "CartPole-v1/PPO_2", rollout__ep_rew_mean=[1, 2, 2], train__value_loss=[3, nan, nan])
    found, problems = read_all([tmp_path])
    assert [one.seed for one in found] == [1]
    assert len(problems) == 1 and "PPO_2" in problems[0] and "train/value_loss" in problems[0]
    drawn, _ = read_all([tmp_path], unfinished=True)  # as a picture has it, with the losses by our names
    assert {one.seed: list(one.curves["losses/value_loss"][1]) for one in drawn} == {1: [3, 2], 2: [3]}


def test_folders_that_do_not_tell_are_said(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    write_events(tmp_path / "PPO_1", rollout__ep_rew_mean=[1])
    write_events(tmp_path / "Hopper-v4__x__1__2", losses__value=[1])
    found, problems = read_all([tmp_path])
    assert found == []
    assert "holds none of the tags charts/episodic_return" in problems[0]
    assert "does not tell its environment" in problems[1]
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    _, problems = read_all([tmp_path / "Hopper-v4__x__1__2"])
    assert problems[0].endswith("needs an extra to be read: pip install 'solorl[tensorboard]'")


# ---------------------------------------------------------------------- a real run
def test_a_real_run_is_collected(train, tmp_path):
    train("ppo", "--total-timesteps", 1024, "--eval-every", 512, "--eval-episodes", 2, "--seed", 5)
    (run,) = (tmp_path / "runs").iterdir()
    result = read(collect(run, tmp_path / "results"))
    last = rows(run, "eval/episodic_return")[-1]
    episodes = [row["charts/episodic_return"] for row in rows(run, "charts/episodic_return")]
    assert result.key == ("CartPole-v1", "ppo", "", 5)
    assert result.eval["global_step"] == [512, 1024]
    assert result.eval["mean"][-1] == pytest.approx(last["eval/episodic_return"], rel=1e-5)
    assert sum(result.train["episodes"]) == len(episodes)
    assert result.last_100_episodes == pytest.approx(sum(episodes[-100:]) / len(episodes[-100:]), rel=1e-5)
    assert result.global_step == 1024 and result.sps > 0
    assert str(tmp_path) not in json.dumps(content(tmp_path / "results/CartPole-v1__ppo__5.json.gz"))


def test_speed_benchmarks_write_where_they_were_measured(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    speed = importlib.import_module("speed")
    speed.write(tmp_path / "new/folder/ppo.json", rounds=[{"a": 1.0}])
    about = json.loads((tmp_path / "new/folder/ppo.json").read_text())
    assert about["rounds"] == [{"a": 1.0}] and about["cpu"] and about["cores"] == os.cpu_count()
    assert about["python"].startswith("3.") and about["date"] == time.strftime("%Y-%m-%d")
    assert about["git"] is None or set(about["git"]) == {"commit", "dirty"}


def test_modern_speed_compares_with_the_faster_setting_of_a_library(tmp_path, monkeypatch):
    """The ratio is to the best of SBX in the same round; sb3-contrib has one setting."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    modern = importlib.import_module("modern_speed")
    droq = [
        {"SBX": 10.0, "SBX, one thread": 20.0, "SoloRL": 30.0, "SoloRL compiled": 40.0},
        {"SBX": 40.0, "SBX, one thread": 20.0, "SoloRL": 100.0, "SoloRL compiled": 40.0},
    ]
    rounds = {"tqc": [{"sb3-contrib": 10.0, "SoloRL": 12.0, "SoloRL compiled": 15.0}], "droq": droq}
    importlib.import_module("speed").write(tmp_path / "modern.json", rounds=rounds)
    lines = modern.table(tmp_path / "modern.json").splitlines()
    assert "| SoloRL | 65 | 30 to 100 | 2.00 |" in lines and "| SBX | 25 | 10 to 40 | 0.75 |" in lines
    assert "| SoloRL | 12 | 12 to 12 | 1.20 |" in lines and lines[-1].startswith("2 rounds in turn")
    for name, of_case in rounds.items():
        assert list(of_case[0]) == modern.contestants(modern.CASES[name])


def test_modern_speed_gives_the_libraries_the_settings_of_our_files(monkeypatch):
    """The defaults of the file that decide how much work a step is."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    for name, case in importlib.import_module("modern_speed").CASES.items():
        fields = fields_of(parse_source(ROOT / "algorithms" / case.script))
        ours = {each: ast.literal_eval(field.value) for each, field in fields.items() if field.value}
        theirs, policy = case.settings, case.settings["policy_kwargs"]
        assert ours["batch_size"] == 256 and ours["utd_ratio"] == theirs.get("gradient_steps", 1), name
        if name.startswith(("crossq", "droq")):  # the others: as many updates of the actor as of the critics
            assert ours["policy_frequency"] == theirs["policy_delay"], name
        if name.startswith("tqc"):
            assert ours["num_dropped"] == theirs["top_quantiles_to_drop_per_net"], name
            assert (ours["num_critics"], ours["num_quantiles"]) == (policy["n_critics"], policy["n_quantiles"]), name
        if name == "droq":
            assert ours["dropout"] == policy["dropout_rate"] and policy["layer_norm"]
        width = ours.get("width") or ours.get("critic_width") or 256
        assert policy["net_arch"] in ([width, width], {"pi": [128], "qf": [width, width]}), name


def test_a_number_is_one_method_however_it_was_typed(tmp_path):
    """`--total-timesteps 2k` and `2000`, both of which `solo bench` writes into the variant."""
    for seed, text in enumerate(("2k", "2000", "2_000", "2e3"), 1):
        args = {"total_timesteps": 2000, "clip_coef": 0.2}
        run = make_run(tmp_path / f"run{seed}", seed=seed, args=args)
        collect(run, tmp_path / "results", variant=f"clip-coef=0.20 total-timesteps={text}")
    assert {one.name for one in read_all([tmp_path / "results"])[0]} == {"ppo"}
