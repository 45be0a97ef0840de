"""AWS Batch and S3, as moto's server has them: requests, refusals, studies in a bucket, jobs that are really run."""

import json
import logging
import shutil
import signal
import threading
import time
import urllib.request
from pathlib import Path

import boto3
import pytest
from batch_agent import BUCKET, QUEUE, REGION, Agent, aws, furnish, keys, sometimes
from conftest import refused
from moto.core.authorization import enable_iam_authentication
from study_tasks import FAKE, Said, attempts, finished_once, open_study, planned, rows, steps, until, worker

from solorl.errors import UsageError
from solorl.lab.results import result as results
from solorl.lab.studies import fleet, plan
from solorl.lab.studies.collect import Collector
from solorl.lab.studies.engines import aws_batch, open_engine
from solorl.lab.studies.engines.cluster import Submission
from solorl.lab.studies.lease import Lease
from solorl.lab.studies.mirror import Mirror
from solorl.lab.studies.resources import Resources
from solorl.lab.studies.storage import open_storage
from solorl.lab.studies.study import Study

IMAGE = "example.org/solorl:1"
OPTIONS = {"queue": QUEUE, "image": IMAGE}
WHERE = f"s3://{BUCKET}/studies/x"
LONG = ("--total-timesteps", 40, "--pause", 0.2)


@pytest.fixture(scope="module")
def server():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with aws() as found:
        yield found


@pytest.fixture
def cloud(server, monkeypatch, tmp_path):
    """An account with a bucket and a queue; the gate in front of it. Steps of stand-ins are noted in `journal`."""
    import s3fs

    url, gate = server
    monkeypatch.chdir(tmp_path)
    for name, value in {**keys(), "AWS_ENDPOINT_URL": url, "FAKE_JOURNAL": str(tmp_path / "journal")}.items():
        monkeypatch.setenv(name, value)
    boto3.DEFAULT_SESSION = None
    s3fs.S3FileSystem.clear_instance_cache()
    urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST")).read()
    furnish()
    gate.seen.clear()
    yield gate
    gate.rule = None


def bench(*flags, seeds=3, storage=WHERE, lease=60, image=IMAGE):
    """A bench of the stand-in on AWS Batch."""
    shutil.copy(FAKE, "fake.py")
    words = ["bench", "fake.py", "--env-ids", "CartPole-v1", "--num-seeds", seeds, "--variant", "", "--engine",
             "aws-batch", "--storage", storage, "--image", image, "--engine-option", f"queue={QUEUE}",
             "--results", "results", "--lease", lease, "--", *flags]  # fmt: skip
    return [str(word) for word in words]


# ---------------------------------------------------------------------- requests
class Recorder:
    """The clients of an engine: what was asked for, and answers."""

    def __init__(self, options=OPTIONS, answers=None):
        from botocore.session import Session
        from botocore.stub import Stubber

        session = Session()
        session.set_credentials("test", "test")
        clients = [session.create_client(name, region_name=REGION) for name in ("batch", "logs")]
        self.asked, self.batch = [], Stubber(clients[0])
        clients[0].meta.events.register("provide-client-params.batch.*", self._note)
        self.batch.activate()
        self.engine = aws_batch.BatchCluster(options, *clients)

    def _note(self, params, model, **_):
        self.asked.append((model.name, params))


def submission(count, **wanted):
    tasks = tuple(f"task{i}" for i in range(count))
    return Submission("s3://b/study", "submissions/000007.json", "My study, 2!", tasks, Resources(**wanted))


def test_requests_for_an_array():
    """The stubber refuses what the service's model does not know."""
    recorder = Recorder({**OPTIONS, "job_role": "arn:aws:iam::1:role/j", "log_group": "/solo"})
    recorder.batch.add_response("describe_job_definitions", {"jobDefinitions": []})
    recorder.batch.add_response("register_job_definition", {"jobDefinitionName": "d", "jobDefinitionArn": "a",
                                                            "revision": 1})  # fmt: skip
    recorder.batch.add_response("submit_job", {"jobId": "abc", "jobName": "n"})
    handles = recorder.engine.submit(submission(3, cores=2, gpus=1, memory=4000, time=3600))
    assert handles == ["abc:0", "abc:1", "abc:2"]
    (_, asked), (_, registered), (_, submitted) = recorder.asked
    name = registered.pop("jobDefinitionName")
    assert asked == {"jobDefinitionName": name, "status": "ACTIVE"} and name.startswith("solo-")
    assert registered == {
        "type": "container",
        "containerProperties": {
            "image": IMAGE, "command": ["--help"], "jobRoleArn": "arn:aws:iam::1:role/j",
            "resourceRequirements": [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "4096"}],
            "environment": [{"name": "AWS_DEFAULT_REGION", "value": REGION}],
            "logConfiguration": {"logDriver": "awslogs", "options": {
                "awslogs-group": "/solo", "awslogs-region": REGION, "awslogs-stream-prefix": "work"}},
        },
        "retryStrategy": {"attempts": 10, "evaluateOnExit": [
            {"onStatusReason": "Host EC2*", "action": "RETRY"}, {"onExitCode": "75", "action": "RETRY"},
            {"onReason": "*", "action": "EXIT"}]},
    }  # fmt: skip
    assert submitted == {
        "jobName": "solo-My-study-2-000007", "jobQueue": QUEUE, "jobDefinition": name,
        "arrayProperties": {"size": 3}, "timeout": {"attemptDurationSeconds": 4200},
        "containerOverrides": {
            "command": ["work", "s3://b/study", "submissions/000007.json"],
            "resourceRequirements": [{"type": "VCPU", "value": "2"}, {"type": "MEMORY", "value": "3815"},
                                     {"type": "GPU", "value": "1"}]},
    }  # fmt: skip


def test_one_task_is_no_array_and_a_given_definition_is_not_registered():
    recorder = Recorder({"queue": QUEUE, "definition": "mine:3"})
    recorder.batch.add_response("submit_job", {"jobId": "abc", "jobName": "n"})
    assert recorder.engine.submit(submission(1)) == ["abc"]
    [(_, submitted)] = recorder.asked
    assert submitted["jobDefinition"] == "mine:3" and not {"arrayProperties", "timeout"} & submitted.keys()
    assert submitted["containerOverrides"]["command"][-2:] == ["--index", "0"]
    assert submitted["containerOverrides"]["resourceRequirements"][1] == {"type": "MEMORY", "value": "4096"}


def described(*states, **more):
    jobs = [{"jobName": "n", "jobQueue": "q", "startedAt": 0, "jobDefinition": "d", "jobId": name, "status": state}
            for name, state in states]  # fmt: skip
    return {"jobs": [job | more for job in jobs]}


def test_what_is_alive_is_asked_in_groups_of_a_hundred():
    recorder, handles = Recorder(), [*(f"a:{i}" for i in range(150)), *(f"b:{i}" for i in range(50)), "c"]
    recorder.batch.add_response("describe_jobs", described(("a", "PENDING"), ("b", "FAILED")))
    recorder.batch.add_response("describe_jobs", described(("a:0", "RUNNING"), ("a:1", "SUCCEEDED")))
    recorder.batch.add_response("describe_jobs", described(("a:120", "RUNNABLE"), ("a:121", "STARTING")))
    assert recorder.engine.alive(handles) == {"a:0", "a:120", "a:121"}
    asked = [params["jobs"] for _, params in recorder.asked]
    assert [len(names) for names in asked] == [3, 100, 50] and asked[0] == ["a", "b", "c"]
    assert sorted(asked[1] + asked[2]) == sorted(handles[:150])  # an array that has ended, or is unknown: no more
    recorder.batch.assert_no_pending_responses()
    assert Recorder().engine.alive([]) == set()


def test_no_answer_is_no_end_but_a_refusal_is():
    for code, status, kind in [("ServerException", 500, OSError), ("TooManyRequestsException", 429, OSError),
                               ("ThrottlingException", 400, OSError), ("AccessDeniedException", 403, UsageError),
                               ("ClientException", 400, UsageError)]:  # fmt: skip
        recorder = Recorder()
        recorder.batch.add_client_error("describe_jobs", code, "the words", status)
        with pytest.raises(kind, match=f"{code} the words"):
            recorder.engine.alive(["a"])
    recorder = Recorder()
    about = described(("a", "RUNNABLE"), statusReason="MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - too large")
    [recorder.batch.add_response("describe_jobs", about) for _ in range(4)]
    recorder.batch.add_response("cancel_job", {})
    with pytest.raises(UsageError, match="cannot start n: MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"):
        recorder.engine.alive(["a"])
    recorder.engine.cancel(["a"])  # as the sentence says
    assert recorder.asked[-1] == ("CancelJob", {"jobId": "a", "reason": "solo bench cancel"})


def test_what_waits_is_cancelled_and_what_runs_is_terminated_only_by_force():
    for force, name in [(False, "CancelJob"), (True, "TerminateJob")]:
        recorder = Recorder()
        recorder.batch.add_response("describe_jobs", described(("a", "PENDING")))
        recorder.batch.add_response("describe_jobs", described(("a:0", "RUNNING"), ("a:1", "FAILED")))
        recorder.batch.add_response("terminate_job" if force else "cancel_job", {})
        recorder.engine.cancel(["a:0", "a:1"], force)
        assert recorder.asked[2:] == [(name, {"jobId": "a:0", "reason": "solo bench cancel"})]


@pytest.mark.slow
def test_equal_jobs_share_a_definition_and_others_do_not(cloud):
    engine = open_engine("aws-batch", OPTIONS)
    engine.submit(submission(2))
    engine.submit(submission(3, cores=2))
    open_engine("aws-batch", OPTIONS | {"image": "other:2"}).submit(submission(2))
    found = boto3.client("batch").describe_job_definitions()["jobDefinitions"]
    assert sorted(one["containerProperties"]["image"] for one in found) == [IMAGE, "other:2"]
    assert [path for _, path in cloud.seen].count("/v1/registerjobdefinition") == 2


# ---------------------------------------------------------------------- S3
def test_a_bucket_keeps_files(cloud, tmp_path):
    storage = open_storage(WHERE)
    assert storage.folder is None and storage.list("") == [] and not storage.exists("a/b")
    storage.write("a/b", b"old")
    storage.write("a/b", b"new")
    assert storage.read("a/b") == b"new" and storage.list("a") == ["a/b"]
    assert not storage.create("a/b", b"other") and storage.read("a/b") == b"new"
    others = boto3.client("s3")
    others.put_object(Bucket=BUCKET, Key="studies/x/a/c", Body=b"by another machine")
    assert storage.list("") == ["a/b", "a/c"] and storage.exists("a/c")
    others.delete_object(Bucket=BUCKET, Key="studies/x/a/c")
    assert storage.list("a") == ["a/b"] and not storage.exists("a/c")
    with pytest.raises(FileNotFoundError):
        storage.read("a/c")
    (tmp_path / "here").write_bytes(b"content")
    storage.put(tmp_path / "here", "up")
    storage.get("up", tmp_path / "down/here")
    assert (tmp_path / "down/here").read_bytes() == b"content"
    storage.delete("up")
    storage.delete("up")
    assert not storage.exists("up")


def at_once(create, count=8):
    """Which of several threads have created a file."""
    won = []
    threads = [threading.Thread(target=lambda i=i: won.append((i, create("f", b"%d" % i)))) for i in range(count)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return [i for i, succeeded in won if succeeded]


def conditional(environ):
    return "HTTP_IF_NONE_MATCH" in environ and environ["REQUEST_METHOD"] == "PUT"


def test_a_file_is_created_once(cloud):
    headers = []
    cloud.rule = lambda environ: headers.append(conditional(environ))
    storage = open_storage(WHERE)
    [winner] = at_once(storage.create)
    assert storage.read("f") == b"%d" % winner and sum(headers) == 8  # the store decides, not a look before


def error(code):
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>words</Message></Error>".encode()


def test_stores_without_conditional_writes(cloud):
    """One that says so is looked at before; one that passes over the header lets two create a file, the last stays."""
    storage = open_storage(WHERE)
    cloud.rule = lambda environ: ("501 Not Implemented", error("NotImplemented")) if conditional(environ) else None
    assert storage.create("f", b"1") and not storage.create("f", b"2") and storage.read("f") == b"1"
    cloud.rule = lambda environ: environ.pop("HTTP_IF_NONE_MATCH", None) and None
    assert storage.create("f", b"3") and storage.read("f") == b"3"


@pytest.mark.slow
def test_a_conflict_of_writes_is_asked_again(cloud):
    storage, conflicts = open_storage(WHERE), [1, 1]
    answer = ("409 Conflict", error("ConditionalRequestConflict"))
    cloud.rule = lambda environ: answer if conditional(environ) and conflicts and conflicts.pop() else None
    assert storage.create("f", b"1") and not conflicts and storage.read("f") == b"1"
    conflicts += [1] * 9
    with pytest.raises(OSError, match="ConditionalRequestConflict"):
        storage.create("g", b"1")
    assert not storage.exists("g")


@pytest.mark.slow
def test_a_lease_in_a_bucket_is_taken_over(cloud, tmp_path):
    study, [task] = planned(WHERE, tmp_path, lease=100.0)
    dead = {"machine": "gone:1", "handle": "1:1", "beat": time.time() - 101}
    study.storage.write(f"leases/{task.id}.json", json.dumps(dead).encode())
    lease = Lease(study, task.id)
    assert lease.take() and lease.is_mine() and lease.is_fresh(lease.holder())
    study.storage.write(f"leases/{task.id}.json", json.dumps({**dead, "beat": time.time() + 60}).encode())
    assert not Lease(study, task.id).take() and not lease.is_mine()


def test_an_upload_that_ends_half_way_leaves_the_checkpoint_before(cloud, tmp_path):
    """The manifest is last: without it nobody takes the checkpoint for whole."""

    def checkpoint(step):
        folder = tmp_path / f"one/run/checkpoint/step_{step}"
        folder.mkdir(parents=True)
        for name in ("a.bin", "b.bin", "manifest.json"):
            (folder / name).write_text(str(step))

    storage = open_storage(WHERE)
    checkpoint(1)
    (tmp_path / "one/run/config.json").write_text("{}")
    mirror = Mirror(storage, tmp_path / "one", "tasks/x")
    mirror.upload()
    checkpoint(2)
    shutil.rmtree(tmp_path / "one/run/checkpoint/step_1")
    refusal = ("403 Forbidden", error("AccessDenied"))
    cloud.rule = lambda environ: refusal if environ["PATH_INFO"].endswith("step_2/b.bin") else None
    with pytest.raises(OSError, match="rights are missing"):
        mirror.upload()
    cloud.rule = None
    assert "tasks/x/run/checkpoint/step_2/a.bin" in storage.list("tasks")
    Mirror(storage, tmp_path / "two", "tasks/x").download()
    found = sorted(path.parent.name for path in (tmp_path / "two").rglob("*.*") if path.name != "config.json")
    assert found == ["step_1"] * 3
    mirror.upload()
    Mirror(storage, tmp_path / "three", "tasks/x").download()
    found = sorted(path.parent.name for path in (tmp_path / "three").rglob("*.*") if path.name != "config.json")
    assert found == ["step_2"] * 3


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"--storage": "study"}, "the engine aws-batch needs --storage s3://BUCKET/STUDY, not study"),
        ({"--storage": "s3://absent/x"}, "s3://absent/x cannot be opened: it does not exist"),
        ({"--engine-option": "queue=spott"}, "has no job queue spott in eu-central-1; did you mean spot?"),
        ({"--engine-option": "quue=spot"}, "has no option quue; did you mean queue?"),
        ({"--engine-option": "region=eu-central-1"}, "needs the name of a job queue"),
        ({"--image": ""}, "needs either --image NAME:TAG or --engine-option definition=NAME"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_one_sentence(cloud, solo, changes, sentence):
    words = bench()
    for flag, value in changes.items():
        words[words.index(flag) + 1] = value
    refused(solo(*words), sentence)
    assert not boto3.client("s3").list_objects_v2(Bucket=BUCKET)["KeyCount"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (OPTIONS | {"definition": "mine"}, "needs either --image"),
        (OPTIONS | {"job_role": "me"}, "the option job_role of the engine aws-batch must be an ARN"),
        ({"queue": QUEUE, "definition": "d", "job_role": "arn:x"}, "job_role .* belongs to the job definition"),
        (OPTIONS | {"endpoint_url": "nonsense"}, "AWS: it cannot be used: Invalid endpoint: nonsense"),
        ({"queue": QUEUE, "definition": "absent"}, "no active job definition absent in eu-central-1"),
    ],
)
def test_wrong_options_are_one_sentence(cloud, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        open_engine("aws-batch", options)


@pytest.mark.slow
def test_no_account_no_region_no_answer(cloud, solo, monkeypatch):
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    refused(solo(*bench()), "no region is set; give --engine-option region=eu-central-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    boto3.client("batch").update_job_queue(jobQueue=QUEUE, state="DISABLED")
    refused(solo(*bench()), "the job queue spot takes no jobs: it is DISABLED")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    boto3.DEFAULT_SESSION = None  # which keeps what it has found
    refused(solo(*bench()), "there are no credentials; run `aws configure`")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    boto3.DEFAULT_SESSION = None
    words = bench()
    words[words.index("--engine-option")] = "--engine-option=endpoint_url=http://127.0.0.1:9"
    words = [*words[: words.index("--")], "--engine-option", f"queue={QUEUE}", *words[words.index("--") :]]
    words.remove(f"queue={QUEUE}")
    refused(solo(*words), "the queue cannot be looked at", "Could not connect")
    assert not boto3.client("s3").list_objects_v2(Bucket=BUCKET)["KeyCount"]


def somebody(*actions):
    """The keys of a new user who may do these actions only."""
    iam, name = boto3.client("iam"), f"user-{time.time_ns()}"
    iam.create_user(UserName=name)
    allowed = {"Effect": "Allow", "Action": list(actions), "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_user_policy(UserName=name, PolicyName="p", PolicyDocument=policy)
    found = iam.create_access_key(UserName=name)["AccessKey"]
    return {"AWS_ACCESS_KEY_ID": found["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": found["SecretAccessKey"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("actions", "sentence"),
    [
        (["s3:*"], "AWS: the queue cannot be looked at: 403"),
        (["batch:*"], f"{WHERE} cannot be opened: the rights are missing"),
        (["batch:*", "s3:ListBucket", "s3:GetObject"], f"{WHERE} cannot be written: the rights are missing"),
        (["batch:describejob*", "s3:*"], "is refused: 403"),  # lower case is moto's
    ],
)
def test_missing_rights_are_one_sentence(cloud, solo, monkeypatch, actions, sentence):
    import s3fs

    for name, value in somebody(*actions).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    boto3.DEFAULT_SESSION = None
    with enable_iam_authentication():
        code, _, err = solo(*bench())
    assert code == 2 and err.count("\n") == 1 and sentence in err, err
    assert not boto3.client("s3").list_objects_v2(Bucket=BUCKET, Prefix="studies/x/submissions")["KeyCount"]


# ---------------------------------------------------------------------- jobs, really run
@pytest.fixture
def often(monkeypatch):
    """The fleet looks often, as tests are short."""
    monkeypatch.setitem(fleet.LOOK, "aws-batch", 0.3)


def tables():
    """Seed -> result of every file in the results folder."""
    return {result.seed: result for result in map(results.read, Path("results").iterdir())}


SUITE = f"""
resources = {{cores = 1, memory = "1 GB", time = "1 h"}}

[engine.aws-batch]
queue = "{QUEUE}"
image = "{IMAGE}"

[[job]]
script = "fake.py"
env_ids = ["CartPole-v1"]
num_seeds = 30
"""


@pytest.mark.slow
def test_thirty_tasks_of_an_array_with_interruptions_have_one_result_each(cloud, solo, often, tmp_path):
    """Machines are taken away and workers killed at random; Batch retries, and the fleet submits what it does not."""
    shutil.copy(FAKE, "fake.py")
    Path("fakes.toml").write_text(SUITE)
    words = ("bench", "fakes.toml", "--engine", "aws-batch", "--storage", WHERE, "--results", "results", "--",
             "--pause", 0.2, "--total-timesteps", 10)  # fmt: skip
    with Agent(tmp_path / "machines", slots=4, harm=sometimes(0.4, 2.5)) as agent:
        code, out, err = solo(*words)
    assert code == 0 and "30 of 30 finished" in out and "results in results; compare" in out, out + err
    study = open_study(WHERE)
    assert len(study.storage.list("results")) == 30 and study.done() == set(study.tasks)
    assert set(tables()) == set(range(1, 31))
    assert all(len(one.eval["global_step"]) == 10 for one in tables().values())
    states = [one["state"] for task in study.tasks for one in study.attempts(task)]
    codes = [code for _, _, code, _ in agent.ended]
    print(f"{len(study.submissions())} submissions, {len(codes)} starts, exit codes "
          f"{ {code: codes.count(code) for code in sorted(set(codes))} }, attempts "
          f"{ {state: states.count(state) for state in sorted(set(states))} }")  # fmt: skip
    assert finished_once(study)
    assert 75 in codes and 137 in codes and len(study.submissions()) > 1
    assert {"stopped", "running"} <= set(states)
    retried = {job for job, attempt, _, _ in agent.ended if attempt > 1}
    assert retried >= {job for job, attempt, code, _ in agent.ended if code == 75 and attempt < 10}
    assert not retried & {job for job, attempt, code, reason in agent.ended if code == 137 and "Host" not in reason}
    assert solo("bench", "collect", WHERE, "--results", "again")[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "results").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == before
    assert solo("bench", "status", WHERE)[:2] == (0, "fakes: 30 tasks: 30 finished\n")
    assert "submitted" not in solo(*words)[1]


@pytest.mark.slow
def test_what_cannot_work_is_told_once_with_its_log(cloud, solo, often, tmp_path):
    """A package that is not the plan's would never fit: no second start, and the sentence of the worker."""
    study, tasks = planned(WHERE, tmp_path, seeds=2)
    study.package = {"version": "0.0.9", "sha256": "0" * 64}
    study.write()
    said, engine = Said(), open_engine("aws-batch", OPTIONS)
    with Agent(tmp_path / "machines") as agent:
        assert fleet.Fleet(study, tasks, engine, OPTIONS, said, tmp_path / "tables").run() == 1
        handle = study.submissions()[0]["handles"][0]
        until(lambda: engine.logs(handle), seconds=60)
    assert [code for _, _, code, _ in agent.ended] == [2, 2] and len(study.submissions()) == 1
    assert sum("is not the 0.0.9 (00000000) of the plan" in line for line in said) == 2
    assert "is not the 0.0.9" in engine.logs(handle) and engine.alive([handle]) == set()
    assert "is not the 0.0.9" in solo("bench", "logs", WHERE, tasks[0].id)[1]
    fleet.retry(study, tasks)
    assert [one.state for one in fleet.standings(study, tasks).values()] == ["waiting", "waiting"]


@pytest.mark.slow
def test_cancelled_jobs_are_taken_back_and_what_runs_saves(cloud, solo, often, tmp_path):
    study, tasks = planned(WHERE, tmp_path, "--total-timesteps", 2000, "--pause", 0.2, seeds=3, lease=8)
    engine = open_engine("aws-batch", OPTIONS)
    assert fleet.Fleet(study, tasks, engine, OPTIONS, Said(), tmp_path / "tables").run(detach=True) == 0
    handles = study.submissions()[0]["handles"]
    with Agent(tmp_path / "machines", slots=1) as agent:
        until(lambda: steps(tmp_path), seconds=120)
        assert engine.alive(handles) == set(handles)
        assert solo("bench", "cancel", WHERE)[0] == 0
        until(lambda: not engine.alive(handles), seconds=120)
    assert [code for _, _, code, _ in agent.ended] == [0]  # one had begun
    assert sorted(state for task in tasks for state in attempts(study, task)) == ["stopped"]
    assert "3 tasks: 3 cancelled" in solo("bench", "status", WHERE)[1]


@pytest.mark.slow
def test_a_bucket_that_does_not_answer_is_asked_again(cloud, often, tmp_path, monkeypatch):
    """A runner outlives the silence of S3; without rights any more it ends with a sentence."""
    study, [task] = planned(WHERE, tmp_path)
    said, engine, silent = Said(), open_engine("aws-batch", OPTIONS), [1] * 6
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    answer = ("503 Service Unavailable", error("SlowDown"))
    cloud.rule = lambda environ: answer if environ["PATH_INFO"] == f"/{BUCKET}" and silent and silent.pop() else None
    runner = fleet.Fleet(study, [task], engine, OPTIONS, said, tmp_path / "tables")
    monkeypatch.setattr(runner, "_submit", lambda tasks: study.accept(task.id, {"run_dir": ""}))
    assert runner.run() == 0 and not silent
    assert sum("does not answer" in line for line in said) == 1, said
    cloud.rule = lambda environ: (
        ("403 Forbidden", error("AccessDenied")) if environ["PATH_INFO"] == f"/{BUCKET}" else None
    )
    with pytest.raises(UsageError, match=f"{WHERE}/.*: the rights are missing"):
        fleet.Fleet(study, [task], engine, OPTIONS, said, tmp_path / "tables").run()


# ---------------------------------------------------------------------- workers and the bucket
def saved(study, task, step):
    """Whether a checkpoint of that step or a later one is in the bucket, whole."""

    def there():
        names = [name for name in study.storage.list(f"tasks/{task.id}") if name.endswith("/manifest.json")]
        return any(int(name.split("step_")[1].split("/")[0]) >= step for name in names)

    return there


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_task_that_ends_on_one_machine_goes_on_at_another(cloud, tmp_path, number):
    study, [task] = planned(WHERE, tmp_path, *LONG, lease=30)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with worker(WHERE, task.id, folder=tmp_path, TMPDIR=str(tmp_path / "one")) as first:
        until(saved(study, task, 3), seconds=120)
        at = max(name for name in study.storage.list("tasks") if name.endswith("metrics.jsonl"))
        assert len(study.storage.read(at).splitlines()) >= 3  # metrics come up with checkpoints
        first.send_signal(number)
        out, _ = first.communicate()
        assert first.returncode == (75 if number == signal.SIGTERM else -9), out
    until(lambda: "tail" in study.attempts(task.id)[0] or number == signal.SIGKILL)
    before = sum(steps(tmp_path).values())
    assert before < 40 and attempts(study, task) == ["stopped" if number == signal.SIGTERM else "running"]
    code, out = work_long(WHERE, task.id, folder=tmp_path, TMPDIR=str(tmp_path / "two"))
    assert code == 0 and "--resume" in out and rows(study, task, tmp_path) == [*range(1, 41)]
    twice = [step for (_, step), count in steps(tmp_path).items() if count > 1]
    assert twice == [] if number == signal.SIGTERM else 0 not in twice
    assert list((tmp_path / "two").glob("solorl-*")) == [] and not study.storage.list("leases")
    assert len({name.split("step_")[1].split("/")[0] for name in study.storage.list("tasks") if "step_" in name}) == 1


def work_long(where, *words, **more):
    """`solo work` to its end, with time for a machine that is busy."""
    with worker(where, *words, **more) as process:
        out, _ = process.communicate(timeout=300)
        return process.returncode, out


@pytest.mark.slow
def test_a_real_training_with_its_replay_goes_on_at_another_machine(cloud, solo, tmp_path):
    """DQN with --save-replay, stopped and continued through the bucket: all rows are those of a run without a stop."""
    words = ["--total-timesteps", "3000", "--learning-starts", "500", "--buffer-size", "3000", "--save-every", "500",
             "--eval-every", "1500", "--eval-episodes", "1", "--log-every", "100", "--save-replay"]  # fmt: skip
    tasks = plan.make_tasks([plan.load_script("dqn")], ["CartPole-v1"], [1], {"": plan.parse_flags(words)})
    found = {}
    for name in ("whole", "stopped"):
        study = Study(open_storage(f"s3://{BUCKET}/{name}"), "dqn", {task.id: task for task in tasks})
        study.write()
        [task] = tasks
        (tmp_path / name).mkdir()
        if name == "stopped":
            with worker(study.storage.where, task.id, TMPDIR=str(tmp_path / name)) as first:
                until(saved(study, task, 1000), seconds=300)
                first.send_signal(signal.SIGTERM)
                out, _ = first.communicate()
            assert first.returncode == 75, out
            assert any("/replay" in each for each in study.storage.list("tasks")), study.storage.list("tasks")
            (tmp_path / "elsewhere").mkdir()
        code, out = work_long(study.storage.where, task.id, TMPDIR=str(tmp_path / ("elsewhere", name)[name == "whole"]))
        assert code == 0, out
        at = study.result(task.id)["run_dir"]
        lines = study.storage.read(f"{at}/metrics.jsonl").decode().splitlines()
        timed = ("wall_time", "charts/SPS")
        found[name] = [{key: value for key, value in json.loads(line).items() if key not in timed} for line in lines]
        assert Collector(study, tmp_path / f"results-{name}", print).keep(task)
    assert attempts(study, task) == ["stopped", "finished"] and "--resume" in out
    assert found["whole"] == found["stopped"] and len(found["whole"]) >= 30
