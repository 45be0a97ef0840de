"""`solo runs`: what it lists, and that it deletes run folders only, and only those in which nobody trains."""

import fcntl
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
from conftest import refused


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """`runs(name, **changes)` makes a run folder below ./runs, the later ones with later changes; returns its path."""
    monkeypatch.chdir(tmp_path)
    count = [0]

    def call(name, script="ppo.py", env_id="CartPole-v1", seed=1, status="finished", step=500, score=None):
        folder = tmp_path / "runs" / name
        (folder / "checkpoint").mkdir(parents=True)
        args = {"env_id": env_id, "seed": seed}
        (folder / "config.json").write_text(json.dumps({"script": script, "script_sha256": "0", "args": args}))
        (folder / "status.json").write_text(json.dumps({"status": status, "global_step": step}))
        row = {"global_step": step, "wall_time": 1.0} | ({} if score is None else {"eval/episodic_return": score})
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (folder / "checkpoint" / "big").write_bytes(bytes(2_000_000))
        (folder / ".lock").touch()
        count[0] += 1
        for path in folder.iterdir():
            os.utime(path, (1e9 + count[0], 1e9 + count[0]))
        return folder

    return call


def names(out):
    """The last words of the lines of a table, without its head."""
    return [line.split()[-1] for line in out.splitlines()[1:]]


def test_runs_shows_what_a_folder_holds(solo, runs):
    runs("a", step=12_345, score=-107.25)
    runs("bench/suite/task/b", script="dqn.py", env_id="Acrobot-v1", seed=7, status="diverged: loss is nan")
    code, out, err = solo("runs")
    head, first, second = out.splitlines()
    assert code == 0 and err == ""
    assert head.split() == "env script seed status step evaluation size age folder".split()
    days = first.split()[-3]
    assert first.split() == [
        "CartPole-v1",
        "ppo",
        "1",
        "finished",
        "12,345",
        "-107.2",
        "2.0",
        "MB",
        days,
        "days",
        "runs/a",
    ]
    assert second.split()[:6] == ["Acrobot-v1", "dqn", "7", "diverged", "500", "-"]
    assert second.endswith(" runs/bench/suite/task/b") and int(days) > 5000


def test_runs_json_filters_and_folders(solo, runs):
    for name, more in (
        ("a", {}),
        ("b", {"script": "dqn.py"}),
        ("c", {"status": "failed"}),
        ("x/d", {"env_id": "E-v0"}),
    ):
        runs(name, **more)
    assert [row["folder"] for row in json.loads(solo("runs", "--json")[1])] == [
        f"runs/{n}" for n in ("a", "b", "c", "x/d")
    ]
    assert names(solo("runs", "--script", "dqn")[1]) == ["runs/b"]
    assert names(solo("runs", "--env-id", "CartPole-v1", "--script", "ppo")[1]) == ["runs/a", "runs/c"]
    assert names(solo("runs", "--status", "failed", "--status", "finished", "runs/c", "runs/x")[1]) == [
        "runs/c",
        "runs/x/d",
    ]
    refused(solo("runs", "--script", "dnq"), "no run has --script dnq; did you mean dqn?")
    refused(solo("runs", "--status", "fnished"), "did you mean finished?")
    refused(solo("runs", "rns"), "there is no folder rns; did you mean runs?")
    Path("notes").touch()
    code, _, err = solo("runs", "notes")
    assert code == 2 and "there is no folder notes" in err and "mean notes" not in err


def test_a_run_without_its_process_was_killed(solo, runs):
    folder = runs("a", status="running")
    assert " killed " in solo("runs")[1]
    with open(folder / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert " running " in solo("runs")[1]


def test_files_that_go_while_they_are_looked_at_do_not_count(solo, runs, monkeypatch):
    """A run that trains replaces its checkpoints, and a status that it writes is under another name first."""
    folder = runs("a")
    gone, lstat = {folder / "checkpoint/step_1/big", folder / ".status.json.tmp"}, Path.lstat
    for path in gone:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(1_000_000))

    def goes(path):
        if path.absolute() in gone and path.exists():
            shutil.rmtree(path.parent) if path.name == "big" else path.unlink()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", goes)
    [run] = json.loads(solo("runs", "--json")[1])
    assert not any(path.exists() for path in gone) and 2_000_000 < run["size"] < 2_001_000


def test_odd_values_are_shown_as_far_as_they_mean_something(solo, runs):
    folder = runs("a\x1b[31m")
    config = {"script": "x.py", "script_sha256": 3, "args": {"env_id": ["E"]}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "status.json").write_text('{"status": 3}')
    (folder / "metrics.jsonl").write_text('3\n{"global_st')
    code, out, _ = solo("runs")
    assert code == 0 and "\x1b" not in out
    assert out.splitlines()[1].split()[:6] == ["['E']", "x", "-", "unknown", "0", "-"]


def test_no_runs_is_no_error(solo, runs):
    assert solo("runs")[:2] == (0, "no run folders below runs\n")


# ---------------------------------------------------------------------- deleting
def test_delete_asks(solo, runs, monkeypatch):
    a, b = runs("a"), runs("b")
    for answer in ("", "n", "no", "maybe"):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: print(question) or answer)
        code, out, _ = solo("runs", "delete", a)
        assert code == 1 and a.exists() and out.endswith("delete 1 run folder (2.0 MB)? [y/N] \nnothing is deleted\n")
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert solo("runs", "delete", a)[0] == 0
    assert not a.exists() and b.exists()


def test_delete_without_an_answer_keeps_all(solo, runs, monkeypatch):
    folder = runs("a")

    def closed(question):
        raise EOFError

    monkeypatch.setattr("builtins.input", closed)
    assert solo("runs", "delete", folder)[0] == 1 and folder.exists()


def test_delete_by_filter(solo, runs):
    kept, gone = runs("a"), [runs("b", status="failed"), runs("bench/c", status="failed")]
    code, out, _ = solo("runs", "delete", "--status", "failed", "--yes")
    assert code == 0 and out == "runs/b\nruns/bench/c\ndeleted 2 run folders, 4.0 MB\n"
    assert kept.exists() and not any(folder.exists() for folder in gone)


def test_delete_leaves_what_is_no_run_folder(solo, runs, tmp_path):
    folder = runs("a")
    other = tmp_path / "model"
    other.mkdir()
    for config in ("{}", '{"script": "ppo.py", "args": {}}', "[]", "{"):  # somebody else's config.json
        (other / "config.json").write_text(config)
        (other / "metrics.jsonl").touch()
        refused(solo("runs", "delete", folder, other, "--yes"), "model is not a run folder, so it is not deleted")
    refused(solo("runs", "delete", "runs", "--yes"), "runs is not a run folder")
    refused(solo("runs", "delete", "--yes"), "needs run folders, or a filter")
    assert (folder / "checkpoint" / "big").exists() and (other / "metrics.jsonl").exists()


def test_delete_leaves_where_a_process_trains(solo, runs):
    """No folder is deleted then, not even those before it."""
    first, second = runs("a"), runs("b")
    with open(second / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for words in ((first, second), ("--script", "ppo")):
            code, _, err = solo("runs", "delete", *words, "--yes")
            assert code == 2 and "nothing is deleted: a process is training in " in err and "runs/b" in err
    (second / ".lock").unlink()
    (second / "status.json").write_text('{"status": "running"}')
    assert solo("runs", "delete", second, "--yes")[0] == 2  # on a disk without locks, too
    assert (first / "checkpoint" / "big").exists() and (second / "checkpoint" / "big").exists()


def test_delete_more_than_a_process_may_open(solo, runs):
    several = [runs(str(i)) for i in range(40)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/dev/fd").iterdir()]) + 20, before[1]))
    try:
        assert solo("runs", "delete", *several, "--yes")[0] == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not any(folder.exists() for folder in several)


def test_delete_follows_no_links(solo, runs, tmp_path):
    folder, other = runs("a"), runs("b")
    (folder / "link").symlink_to(other)
    (tmp_path / "runs" / "c").symlink_to(other)
    refused(solo("runs", "delete", "runs/c", "--yes"), "runs/c is a link")
    assert names(solo("runs")[1]) == ["runs/a", "runs/b"]
    assert solo("runs", "delete", folder, "--yes")[0] == 0
    assert not folder.exists() and (other / "checkpoint" / "big").exists()
