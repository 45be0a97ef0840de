"""A study in a bucket: leases by conditional writes, run folders that go up and down, nothing left on the machine."""

import os
import shutil
import signal
import threading

import pytest
from conftest import refused
from study_tasks import FAKE, once, planned, process, steps, until

pytest.importorskip("fsspec")

from solorl.lab.studies.mirror import Mirror
from solorl.lab.studies.storage import open_storage
from solorl.lab.studies.worker import Pool


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to be in, with a copy of the stand-in; its steps are noted in `journal`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "machine"))
    (tmp_path / "machine").mkdir()
    shutil.copy(FAKE, tmp_path / "fake.py")
    return tmp_path


def test_a_stopped_run_continues_on_another_machine_from_its_last_checkpoint(place, solo):
    where = f"memory://{place.name}"
    study, tasks = planned(where, place, "--total-timesteps", 60, "--pause", 0.05, seeds=2, lease=60)
    said = []
    first = Pool(study, tasks, 1, said.append, stay=False)
    thread = threading.Timer(0.0, lambda: until(lambda: sum(steps(place).values()) > 20) or first.hear(15, None))
    thread.start()
    first.run()
    thread.join()
    assert any(line.startswith("stopped") for line in said) and not study.storage.list("leases")
    assert not list((place / "machine").glob("solorl-*"))
    code, out, _ = solo("work", where)
    assert code == 0 and "resumed    fake CartPole-v1 seed 1" in out and steps(place) == once(2, 60)
    names = [name.split("/") for name in study.storage.list(f"tasks/{tasks[0].id}")]
    assert {"metrics.jsonl", "step_000000000060", "output.txt"} <= {part for name in names for part in name}
    assert len({part for name in names for part in name if part.startswith("step_")}) == 1  # old ones are gone
    code, out, _ = solo("bench", "collect", where, "--results", "results")
    assert code == 0 and len(list((place / "results").iterdir())) == 2
    assert "CartPole" not in solo("bench", "logs", where, tasks[0].id)[1]
    words = ["bench", "fake.py", "--env-ids", "CartPole-v1", "--storage", where]
    refused(solo(*words, "--dry-run"), "--dry-run prints commands for folders, not buckets")


def test_of_several_that_create_a_file_one_succeeds(place):
    storage, won = open_storage(f"memory://{place.name}"), []
    threads = [threading.Thread(target=lambda i=i: storage.create("x/y", b"1") and won.append(i)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(won) == 1 and storage.list("x") == ["x/y"] and storage.read("x/y") == b"1"
    storage.delete("x/y")
    storage.delete("x/y")
    assert not storage.exists("x/y")
    with pytest.raises(FileNotFoundError):
        storage.read("x/y")


def test_a_checkpoint_counts_once_its_manifest_is_up(place):
    storage, work = open_storage(f"memory://{place.name}"), place / "work"
    (work / "run/checkpoint/step_1").mkdir(parents=True)
    (work / "run/config.json").write_text("{}")
    (work / "run/checkpoint/step_1/state.json").write_text("1")
    Mirror(storage, work, "tasks/a").upload()
    Mirror(storage, place / "other", "tasks/a").download()
    assert not (place / "other").exists()  # no whole checkpoint: it begins again
    (work / "run/checkpoint/step_1/manifest.json").write_text("{}")
    mirror = Mirror(storage, work, "tasks/a")
    mirror.upload()
    (work / "run/checkpoint/step_1").rename(work / "run/checkpoint/step_2")
    mirror.upload()
    Mirror(storage, place / "other", "tasks/a").download()
    assert sorted(path.name for path in (place / "other").rglob("*") if path.is_file()) == [
        "config.json", "manifest.json", "state.json",
    ]  # fmt: skip


@pytest.mark.slow
def test_in_s3_killed_workers_are_followed_by_others_and_each_task_has_one_result(place, monkeypatch):
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    pytest.importorskip("s3fs")
    import boto3

    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_CONFIG_FILE": os.devnull}  # fmt: skip
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="studies")
    study, _ = planned("s3://studies/one", place, "--total-timesteps", 30, "--pause", 0.1, seeds=6, lease=4)
    assert study.storage.create("x", b"1") and not study.storage.create("x", b"2")
    killed = 0
    while study.ids() != set(study.tasks):
        (machine := place / f"machine{killed}").mkdir()
        with process(place, "work", "s3://studies/one", TMPDIR=str(machine)) as one:
            seen = len(study.ids())
            until(lambda one=one, seen=seen: one.poll() is not None or len(study.ids()) > seen, 300)
            if killed < 3 and one.poll() is None:
                one.kill()
                killed += 1
            out = one.communicate()[0]
        assert one.returncode in (0, -signal.SIGKILL), out
    server.stop()
    assert killed == 3 and set(steps(place)) == set(once(6, 30))
