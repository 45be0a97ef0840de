"""Engines: what they submit, how they refuse, and (slow) that each task has one result on real schedulers."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import environment, refused
from study_tasks import FAKE, children, steps, until

from solorl.lab.studies.engines import Job, slurm, start
from solorl.lab.studies.resources import Resources
from solorl.lab.studies.study import open_study
from solorl.lab.studies.worker import AGAIN

JOB = Job("a study", ("work", "/there/a study"), "/there/a study", 5, Resources(2, 1, 4000, 60))
AWS = {"queue": "q", "definition": "d", "region": "eu-central-1"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to be in, with a copy of the stand-in; its steps are noted in `journal`."""
    monkeypatch.chdir(tmp_path)
    for name, value in environment(FAKE_JOURNAL=str(tmp_path / "journal"), OMP_NUM_THREADS="1").items():
        monkeypatch.setenv(name, value)
    shutil.copy(FAKE, tmp_path / "fake.py")
    return tmp_path


def bench(*flags, seeds=4, words=()):
    """A bench of the stand-in on an engine."""
    return ["bench", "fake.py", "--env-ids", "CartPole-v1", "--num-seeds", str(seeds), "--storage", "work",
            "--variant", "", "--results", "results", *map(str, words), "--", *map(str, flags)]  # fmt: skip


# ---------------------------------------------------------------------- what is submitted
def test_a_dry_run_prints_what_would_be_submitted_and_writes_nothing(solo, place):
    code, out, err = solo(
        *bench(
            words=[
                "--engine",
                "slurm",
                "--workers",
                3,
                "--cores",
                2,
                "--dry-run",
                "--engine-option",
                "partition=a b",
                "--engine-option",
                "setup=module load x",
            ]
        )
    )
    assert code == 0 and out.startswith("#!/bin/bash\n"), err
    for line in ("#SBATCH --array=0-2", "#SBATCH --cpus-per-task=2", "#SBATCH --requeue", "module load x"):
        assert f"{line}\n" in out
    assert "#SBATCH --partition='a b'\n" in out and f"-m solorl.cli work {place}/work &\n" in out
    code, out, _ = solo(*bench(words=["--engine", "ray", "--dry-run"]))
    assert code == 0 and out.startswith("4 tasks of Ray with {'num_cpus': 1, 'num_gpus': 0}: solo work ")
    options = [word for key, value in AWS.items() for word in ("--engine-option", f"{key}={value}")]
    code, out, _ = solo(*bench(words=["--engine", "aws", "--storage", "s3://b/s", "--dry-run", *options]))
    assert code == 0 and json.loads(out)["arrayProperties"] == {"size": 4}
    (place / "space.toml").write_text("learning-rate = [1e-3, 1e-2]")
    words = [
        "tune",
        "fake.py",
        "--env-ids",
        "CartPole-v1",
        "--space",
        "space.toml",
        "--engine",
        "slurm",
        "--workers",
        2,
    ]
    code, out, err = solo(*words, "--workers", 2, "--storage", "search", "--dry-run", "--", "--pause", 0)
    assert code == 0 and f"--engine local --workers 1 --storage {place}/search -- --pause 0 &\n" in out, err
    assert "--dry-run" not in out  # the workers are to work
    assert sorted(path.name for path in place.iterdir()) == ["fake.py", "space.toml"]


@pytest.mark.parametrize(("code", "again"), [(0, False), (1, False), (2, False), (AGAIN, True), (137, True)])
def test_a_job_of_slurm_goes_back_into_the_queue_where_its_worker_has_saved_or_was_killed(place, code, again):
    (place / "bin").mkdir()
    for name, text in (("squeue", "echo RUNNING"), ("scontrol", f"echo $@ >> {place}/requeued")):
        (place / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (place / "bin" / name).chmod(0o755)
    script = slurm.SCRIPT.format(directives="", setup="", command=f"sh -c 'exit {code}'", again=AGAIN)
    env = {"PATH": f"{place}/bin:{os.environ['PATH']}", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert subprocess.run(["bash"], input=script, text=True, env=env).returncode == code
    assert (place / "requeued").exists() == again
    assert not again or (place / "requeued").read_text() == "requeue 7_3\n"


def test_batch_takes_the_request(monkeypatch):
    boto3 = pytest.importorskip("boto3")
    from botocore.stub import Stubber

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    client = boto3.client("batch", region_name="eu-central-1")
    monkeypatch.setattr(boto3, "client", lambda name, **words: client)
    job = Job(JOB.title, ("work", "s3://b/s"), "s3://b/s", 5, JOB.resources)
    amounts = [{"type": kind, "value": value} for kind, value in (("VCPU", "2"), ("MEMORY", "3815"), ("GPU", "1"))]
    overrides = {"command": ["work", "s3://b/s"], "resourceRequirements": amounts}
    wanted = {"jobName": "solo-a-study", "jobQueue": "q", "jobDefinition": "d", "containerOverrides": overrides,
              "arrayProperties": {"size": 5}}  # fmt: skip
    with Stubber(client) as stub:  # which checks the request by the model of the service
        stub.add_response("submit_job", {"jobId": "77", "jobName": "x"}, wanted)
        stub.add_client_error("submit_job", "AccessDenied", "no rights", expected_params=wanted)
        assert start("aws", job, AWS) == "job 77 of AWS Batch"
        with pytest.raises(Exception, match="AWS Batch takes no workers: AccessDenied no rights"):
            start("aws", job, AWS)


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--engine", "slurn"], "there is no engine slurn; did you mean slurm?"),
        (["--engine", "slurm", "--engine-option", "partitions=x"], "unknown key partitions; did you mean partition"),
        (["--engine", "slurm", "--engine-option", "partition"], "--engine-option must be KEY=VALUE"),
        (["--engine", "slurm"], "this machine has no sbatch: the engine slurm needs a login node"),
        (["--engine", "aws"], "the engine aws needs --storage s3://BUCKET/STUDY, not /"),
        (["--engine", "aws", "--storage", "s3://b/s", "--dry-run"], "needs the name of a job queue"),
        (
            ["--engine", "ray", "--engine-option", "address=127.0.0.1:1"],
            "no workers begin on a Ray cluster",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(solo, place, monkeypatch, words, sentence):
    pytest.importorskip("ray")
    if words[-1] == "address=127.0.0.1:1":
        import ray

        def refuse(*given, **more):
            raise ConnectionError("nobody is there")

        monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setenv("PATH", str(place))
    refused(solo(*bench(words=words)), sentence)


def test_slurms_own_refusal_is_passed_on(solo, place, monkeypatch):
    (place / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpu' >&2\nexit 1\n")
    (place / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    refused(solo(*bench(words=["--engine", "slurm"])), "Slurm refuses the workers: sbatch: invalid partition")


def test_without_the_extra_a_sentence_names_it(solo, place, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "solorl.lab.studies.engines.ray", raising=False)
    refused(solo(*bench(words=["--engine", "ray"])), "the engine ray needs ray", "pip install 'solorl[ray]'")


# ---------------------------------------------------------------------- on schedulers
def workers(place):
    """Process ids of `solo work` of this study."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_text().split("\0")
            found += [int(path.parent.name)] if words[-3:-1] == ["work", str(place / "work")] else []
    return found


def kill(place, count, done):
    """Kill so many workers and trainings by SIGKILL, at random moments; how many of each. `done`: whether all is."""
    draw, killed = random.Random(1), Counter()
    while sum(killed.values()) < count and not done():
        time.sleep(draw.uniform(0.5, 2.0))
        kind, pids = draw.choice([("worker", workers(place)), ("training", children(place))])
        if pids and children(place):
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(pids), signal.SIGKILL)
                killed[kind] += 1
    return killed


def proved(solo, place, seeds, total, killed, words):
    """Every task has one result, and every step was run; the same command collects the tables."""
    study = open_study("work")
    print(killed, len([*steps(place).elements()]), "steps of", seeds * total)
    assert study.ids() == set(study.tasks) and len(study.tasks) == seeds and sum(killed.values()) > 4
    assert set(steps(place)) == {(seed, step) for seed in range(1, seeds + 1) for step in range(total)}
    code, out, _ = solo("bench", "collect", "work", "--results", "results")
    assert code == 0 and f"{seeds} tables in results" in out and len(list((place / "results").iterdir())) == seeds
    code, out, _ = solo("bench", "status", "work")
    assert code == 0 and out.endswith(f"fake: {seeds} tasks: {seeds} finished\n")


@pytest.mark.slow
def test_a_hundred_tasks_on_ray_under_ten_kills_have_one_result_each(solo, place, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # the path of a socket has 107 bytes at most
    ray, output = str(Path(sys.executable).with_name("ray")), place / "ray.txt"
    words = ["start", "--head", "--block", "--port=0", "--num-cpus=2", "--include-dashboard=false"]
    words += ["--disable-usage-stats", f"--temp-dir={folder}"]
    with output.open("w") as file:
        head = subprocess.Popen([ray, *words], stdout=file, stderr=file)
    try:
        until(lambda: "--address='" in output.read_text() or head.poll() is not None, 600)
        monkeypatch.setenv("RAY_ADDRESS", output.read_text().split("--address='")[1].split("'")[0])
        options = ["--engine", "ray", "--workers", 2, "--lease", 5, "--attempts", 9]
        words = bench("--pause", 0.1, seeds=100, words=options)
        code, out, err = solo(*words)
        assert code == 0 and "2 tasks of Ray" in out, out + err
        study = open_study("work")
        killed = kill(place, 10, lambda: study.ids() == set(study.tasks))
        until(lambda: study.ids() == set(study.tasks), 1200)
        proved(solo, place, 100, 5, killed, words)
    finally:
        for pid in workers(place):
            os.kill(pid, signal.SIGTERM)
        head.terminate()  # which ends the processes of this cluster, and of no other one
        head.wait(120)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("apt-get") is None, reason="Slurm comes from Debian's packages")
def test_tasks_on_slurm_under_kills_and_preemption_have_one_result_each(solo, place, monkeypatch, tmp_path_factory):
    from slurm_cluster import slurm_cluster

    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as own:
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        options = [
            "--engine",
            "slurm",
            "--workers",
            2,
            "--lease",
            5,
            "--attempts",
            9,
            "--engine-option",
            "partition=low",
        ]
        words = bench("--pause", 0.2, "--total-timesteps", 10, seeds=20, words=options)
        code, out, err = solo(*words)
        assert code == 0 and " of Slurm; its output is in " in out, out + err
        study = open_study("work")
        killed = kill(place, 5, lambda: study.ids() == set(study.tasks))
        high = ["sbatch", "--partition=high", "--cpus-per-task=2", "--output=/dev/null", "--wrap=sleep 2"]
        subprocess.run(high, check=True)
        until(lambda: study.ids() == set(study.tasks), 900)
        proved(solo, place, 20, 10, killed, words)
