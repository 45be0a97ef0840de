"""Results: collected from run folders, read back, and read from what other libraries write."""

import gzip
import json
import os
import sys
import time

import pytest
from conftest import rows

from solorl import results
from solorl.results import ResultError, collect, read, read_all, thinned

MACHINE = {"system": "Linux-6.1.0-secret-host-x86_64", "cpu": "a CPU", "cores": 2, "device": "cpu"}


def make_run(
    folder, env_id="CartPole-v1", seed=1, status="finished", started="2026-11-21T05:00:00Z", args=(), lines=()
):
    """A run folder as `solorl.run` writes it: 150 episodes of return 1, 2, ..., evaluations 10 and 20."""
    folder.mkdir(parents=True)
    places = {"runs_dir": "/home/me/runs", "resume": "/home/me/old", "wandb_entity": "me"}
    config = {
        "format": 1,
        "script": "ppo.py",
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


def test_seeds_trained_at_once_are_counted(tmp_path):
    run = make_run(tmp_path / "run")
    assert read(collect(run, tmp_path / "results")).together == 1
    (run / "together.json").write_text(json.dumps(["run", "run2", "run3"]))
    assert read(collect(run, tmp_path / "results")).together == 3
    (run / "together.json").write_text("[")
    with pytest.raises(ResultError, match="is damaged"):
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


@pytest.mark.parametrize("status", ["running", "stopped", "failed", "diverged: losses/value_loss is nan"])
def test_an_unfinished_run_is_refused(tmp_path, status):
    run = make_run(tmp_path / "run", status=status)
    with pytest.raises(ValueError, match="is not finished"):
        collect(run, tmp_path / "results")
    assert not (tmp_path / "results").exists()
    found, problems = read_all([run])
    assert found == [] and problems == [f"{run} is left out: the run is not finished ({status})"]


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


def test_a_last_line_cut_by_a_kill_is_no_row(tmp_path):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"global_step": 1600, "eval/episodic_re')
    assert results.read_run(run).eval["global_step"] == [1000, 1500]


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


def test_of_two_runs_of_a_seed_the_later_counts(tmp_path):
    early = make_run(tmp_path / "z_early", started="2026-11-20T00:00:00Z")
    late = make_run(tmp_path / "a_late", started="2026-11-21T00:00:00Z")
    for order in ([early, late], [late, early]):
        found, problems = read_all(order)
        assert [result.source for result in found] == [str(late)]
        assert problems == [f"{early} is left out: {late} is a later run of the same seed"]


def test_two_runs_that_began_in_the_same_second_are_two(tmp_path):
    """As a sweep started with `&` has them; the run of a folder and of the file made of it is one."""
    one, other = (make_run(tmp_path / name, args={"learning_rate": rate}) for name, rate in (("a", 1e-3), ("b", 1e-5)))
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
    assert results.read_run(run).name == "ppo wide"
    assert results.read_run(make_run(tmp_path / "run2", args={"exp_name": "ppo"})).name == "ppo"


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
