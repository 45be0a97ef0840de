"""The plan of a study on the disk: what several commands write at once, what is refused, and what may be shown."""

import copy
import errno
import json
import multiprocessing
import os
import time

import pytest
from conftest import refused
from solorl.lab.studies.engines.workers import LocalCluster
from study_tasks import Said, open_study, planned

from solorl.errors import UsageError
from solorl.files import remove_old
from solorl.lab.studies import fleet
from solorl.lab.studies.collect import Collector
from solorl.lab.studies.lease import Lease
from solorl.lab.studies.plan import load_script, make_tasks
from solorl.lab.studies.storage import Folder, open_storage
from solorl.lab.studies.study import Study

DEEP = "[" * 100_000 + "]" * 100_000


def written(where, script, seeds, name, barrier):
    """Write a plan of these seeds at the same time as others."""
    tasks = make_tasks([load_script(script)], ["CartPole-v1"], seeds, {"": {}})
    study = Study(open_storage(where), name, {task.id: task for task in tasks})
    barrier.wait()
    study.write()


def test_plans_that_begin_at_the_same_time_are_all_kept(tmp_path):
    planned(tmp_path / "other", tmp_path)
    context = multiprocessing.get_context("fork")
    for trial in range(8):
        where, barrier = f"{tmp_path}/{trial}", context.Barrier(2)
        parts = [(range(1, 4), "one"), (range(3, 8), "two")]
        args = [(where, str(tmp_path / "fake.py"), seeds, name, barrier) for seeds, name in parts]
        processes = [context.Process(target=written, args=each) for each in args]
        [process.start() for process in processes]
        [process.join() for process in processes]
        assert sorted(task.seed for task in open_study(where).tasks.values()) == [*range(1, 8)]


def test_a_plan_of_an_earlier_version_counts_with_later_ones(tmp_path):
    study, _ = planned(tmp_path / "study", tmp_path, seeds=2)
    [name] = study.storage.list("plans")
    (tmp_path / "study" / name).rename(tmp_path / "study/plan.json")
    assert len(open_study(str(tmp_path / "study")).tasks) == 2
    _, tasks = planned(tmp_path / "study", tmp_path, seeds=5, limit=7)
    found = open_study(str(tmp_path / "study"))
    assert list(found.tasks) == [task.id for task in tasks] and found.limit == 7
    before = study.storage.list("plans")
    for _ in range(3):
        planned(tmp_path / "study", tmp_path, seeds=5, limit=7)  # nothing new, nothing written
    assert study.storage.list("plans") == before


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["name"], "../../OUT"),
        (["name"], ".."),
        (["name"], "x\x1b[31m"),
        (["name"], "x" * 300),
        (["name"], ["x"]),
        (["format"], 2),
        (["attempts"], 0),
        (["attempts"], 10**9),
        (["attempts"], True),
        (["lease"], 0),
        (["lease"], float("nan")),
        (["lease"], float("inf")),
        (["lease"], "60"),
        (["solorl"], None),
        (["solorl", "sha256"], "x"),
        (["scripts"], []),
        (["scripts", 0, "path"], "/tmp/.."),
        (["scripts", 0, "path"], "x\n.py"),
        (["scripts", 0, "ours"], 1),
        (["scripts", 0, "args"], [1]),
        (["tasks"], {}),
        (["tasks", 0], None),
        (["tasks", 0, "id"], "../x"),
        (["tasks", 0, "script"], "0" * 64),
        (["tasks", 0, "env_id"], 3),
        (["tasks", 0, "env_id"], "x" * 2000),
        (["tasks", 0, "seed"], -1),
        (["tasks", 0, "seed"], "1"),
        (["tasks", 0, "seed"], 2**31),
        (["tasks", 0, "flags"], {"--runs-dir": ["/"]}),
        (["tasks", 0, "flags"], {"x": []}),
        (["tasks", 0, "flags"], {"--x": "y"}),
        (["tasks", 0, "variant"], "a\x1b"),
        (["tasks", 0, "python"], None),
        (["tasks", 0, "resources"], {"cores": 1}),
        (["tasks", 0, "resources", "cores"], 0),
        (["tasks", 0, "resources", "time"], -1),
        (["tasks", 0, "resources", "memory"], 1.5),
    ],
)
def test_every_field_of_a_plan_is_checked(tmp_path, keys, value):
    study, _ = planned(tmp_path / "study", tmp_path)
    [name] = study.storage.list("plans")
    table = part = json.loads(study.storage.read(name))
    for key in keys[:-1]:
        part = part[[*part][key] if isinstance(part, dict) and isinstance(key, int) else key]
    part[keys[-1]] = value
    study.storage.write(name, json.dumps(table).encode())
    with pytest.raises(UsageError, match=r"plans/000001-\w+.json is damaged: ") as told:
        open_study(str(tmp_path / "study"))
    assert str(told.value).isprintable() and len(str(told.value)) < 400


@pytest.mark.parametrize("text", ["{", "[]", "null", '"x"', "", DEEP, "\xff\xfe", '{"format": 1}'])
@pytest.mark.parametrize("name", ["plan.json", "plans/000001-abc.json"])
def test_a_damaged_plan_is_refused_and_not_written_over(tmp_path, name, text, solo):
    (tmp_path / "study" / name).parent.mkdir(parents=True)
    (tmp_path / "study" / name).write_text(text, encoding="latin-1")
    refused(solo("bench", "status", tmp_path / "study"), f"{name} is damaged")
    with pytest.raises(UsageError, match="is damaged"):
        planned(tmp_path / "study", tmp_path)
    assert (tmp_path / "study" / name).read_text(encoding="latin-1") == text


def test_results_are_collected_from_the_folder_of_their_task_only(tmp_path):
    study, [task] = planned(tmp_path / "study", tmp_path)
    for name in (f"tasks/{task.id}/../../../out", "/etc", "", 3, f"tasks/{task.id}/a\0b", "tasks/other/run"):
        study.storage.write(f"results/{task.id}.json", json.dumps({"run_dir": name}).encode())
        collector = Collector(study, tmp_path / "results", print)
        assert not collector.keep(task) and not collector.tables and not collector.problems


# ---------------------------------------------------------------------- damaged files of what happens
STRANGE = ["{", "null", "[]", '"x"', DEEP, '{"beat": "soon", "handle": [], "machine": null}', '{"beat": [[]]}', "{}"]


@pytest.mark.parametrize("text", [*STRANGE, '{"beat": true, "handle": "\\u00b2:1", "machine": "MINE"}'])
def test_a_damaged_lease_is_taken_over(tmp_path, text, solo):
    study, [task] = planned(tmp_path / "study", tmp_path)
    lease = Lease(study, task.id)
    study.storage.write(f"leases/{task.id}.json", text.replace("MINE", lease.owner["machine"]).encode())
    assert solo("bench", "status", tmp_path / "study")[0] == 0
    assert lease.take() and lease.is_mine()


@pytest.mark.parametrize("text", [*STRANGE, '{"state": [], "reason": 3, "tail": 5, "forgiven": []}'])
def test_a_damaged_attempt_is_one_that_was_made(tmp_path, text, solo):
    study, [task] = planned(tmp_path / "study", tmp_path)
    study.storage.write(f"attempts/{task.id}/1.json", text.encode())
    code, out, err = solo("bench", "status", tmp_path / "study")
    assert code == 0 and "after 1 of 3 attempts" in out and not err
    assert solo("bench", "retry", tmp_path / "study")[0] == 0


@pytest.mark.parametrize("text", ["{", "null", '{"tasks": 3, "handles": {}, "options": 7}'])
def test_a_damaged_submission_names_no_tasks(tmp_path, text, solo):
    study, [task] = planned(tmp_path / "study", tmp_path)
    study.storage.write("submissions/000001.json", text.encode())
    assert solo("bench", "logs", tmp_path / "study", task.id)[0] == 0
    assert solo("bench", "status", tmp_path / "study")[0] == 0


def test_a_lease_from_the_future_does_not_count_and_is_said(tmp_path, solo):
    study, [task] = planned(tmp_path / "study", tmp_path, lease=60)
    lease = Lease(study, task.id)
    for ahead, fresh in ((30, True), (120, False), (1e18, False)):
        about = {"machine": "elsewhere:1", "handle": "1:1", "beat": time.time() + ahead}
        study.storage.write(f"leases/{task.id}.json", json.dumps(about).encode())
        assert lease.is_fresh(lease.holder()) == fresh and ("from the future" in lease.oddity) == (not fresh)
    assert "its lease is from the future" in solo("bench", "status", tmp_path / "study")[1]
    assert lease.take()


def test_a_foreign_study_does_not_control_the_terminal(tmp_path, solo):
    study, [task] = planned(tmp_path / "study", tmp_path, limit=1)
    bad = "\x1b]0;owned\x07\x1b[2J\u202e"
    about = {"state": "failed", "reason": bad, "tail": [bad, 3]}
    study.storage.write(f"attempts/{task.id}/1.json", json.dumps(about).encode())
    study.storage.write(f"tasks/{task.id}/output-1.txt", f"one\n{bad}\ntwo\n".encode())
    for words in (["status", tmp_path / "study"], ["logs", tmp_path / "study", task.id]):
        out = solo("bench", *words)[1]
        assert "\\x1b]0;owned" in out and all(line.isprintable() for line in out.splitlines())
    assert solo("bench", "logs", tmp_path / "study", task.id)[1].splitlines()[-1] == "two"


# ---------------------------------------------------------------------- disks
def test_a_full_disk_ends_the_command_with_a_sentence(tmp_path, monkeypatch):
    study, [task] = planned(tmp_path / "study", tmp_path)

    def full(self, name, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    monkeypatch.setattr(Folder, "create", full)
    with pytest.raises(UsageError, match="the disk is full"):
        fleet.Fleet(study, [task], LocalCluster(), {}, Said(), tmp_path / "tables").run()


def test_a_study_that_cannot_be_written_prints_its_tables_when_all_is_there(tmp_path, monkeypatch, solo):
    monkeypatch.chdir(tmp_path)
    planned(tmp_path / "other", tmp_path)
    words = ["bench", "fake.py", "--env-ids", "CartPole-v1", "--storage", "study", "--variant", "", "--results"]
    assert solo(*words, "results")[0] == 0

    def refuse(self, name, *data):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)

    for method in ("write", "create", "put"):
        monkeypatch.setattr(Folder, method, refuse)
    monkeypatch.setattr("solorl.lab.studies.study.ATTEMPTS", 2)
    code, out, _ = solo(*words, "again", "--attempts", "2")
    assert code == 0 and "1 of 1 finished" in out and len([*(tmp_path / "again").iterdir()]) == 1
    refused(solo(*words, "again", "--num-seeds", "2"), "study cannot be written: Read-only file system")


def test_what_killed_processes_have_left_goes_after_a_day(tmp_path):
    study, _ = planned(tmp_path / "study", tmp_path)
    root, old = tmp_path / "study", time.time() - 90_000
    names = [".plan.json.0123456789ab", "leases/.x.json.0123456789ab", "attempts/x/.1.json.0123456789ab"]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
        os.utime(root / name, (old, old))
    (root / ".plan.json.ba9876543210").touch()  # somebody writes it now
    kept = copy.copy(study.storage.list(""))
    study.write()
    assert not any((root / name).exists() for name in names) and (root / ".plan.json.ba9876543210").exists()
    assert study.storage.list("") == kept
    for name, young in (("a/.pull-x", False), ("b/.pull-y", True)):
        (tmp_path / "hub" / name / "deep").mkdir(parents=True)
        (tmp_path / "hub" / name / "deep/file").touch()
        for path in (tmp_path / "hub" / name, tmp_path / "hub" / name / "deep"):
            os.utime(path, (old, old))
        if not young:
            os.utime(tmp_path / "hub" / name / "deep/file", (old, old))
    remove_old(tmp_path / "hub", "*/.pull-*")
    assert [path.name for path in (tmp_path / "hub").glob("*/.*")] == [".pull-y"]
