"""AWS on this machine: moto's server, and an agent that does what Batch and its machines would do with the jobs."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from fnmatch import fnmatch

import boto3
from conftest import environment
from moto.batch.models import Job, batch_backends
from moto.moto_server import threaded_moto_server as moto_server

REGION, ACCOUNT, BUCKET, QUEUE = "eu-central-1", "123456789012", "studies", "spot"
PAUSE = 0.05  # seconds between two looks of the agent
GRACE = 30.0  # seconds between SIGTERM and SIGKILL, as on a machine of Batch


class Gate:
    """In front of moto: notes each request, and answers those for which a rule has an answer itself."""

    def __init__(self, app):
        self._app, self.seen, self.rule = app, [], None

    def __call__(self, environ, start_response):
        self.seen.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        answer = self.rule(environ) if self.rule else None
        if answer is None:
            return self._app(environ, start_response)
        status, body = answer
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]


@contextlib.contextmanager
def aws():
    """moto's server, until the block ends: its URL and its gate."""
    gates = []

    def gated(create):
        gates.append(Gate(original(create)))
        return gates[0]

    original, moto_server.DomainDispatcherApplication = moto_server.DomainDispatcherApplication, gated
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    start, Job.start = Job.start, lambda job: None  # the agent does the jobs, not moto's threads with Docker
    try:
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}", gates[0]
        server.stop()
    finally:
        moto_server.DomainDispatcherApplication, Job.start = original, start


def furnish():
    """A bucket and a job queue, empty."""
    boto3.client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    boto3.client("iam").create_role(RoleName="batch", AssumeRolePolicyDocument="{}")
    batch, role = boto3.client("batch"), f"arn:aws:iam::{ACCOUNT}:role/batch"
    name = batch.create_compute_environment(
        computeEnvironmentName="machines", type="UNMANAGED", state="ENABLED", serviceRole=role
    )["computeEnvironmentArn"]
    order = [{"order": 1, "computeEnvironment": name}]
    batch.create_job_queue(jobQueueName=QUEUE, state="ENABLED", priority=1, computeEnvironmentOrder=order)


class Agent(threading.Thread):
    """Does what waits in the queue, so many jobs at once: each part of an array is a process in a temporary folder of
    its own. Follows the retry rules of the job definition. `harm(job)` may say (seconds, signal) for a start, counted
    from the worker's first words: spot machines that are taken away (SIGTERM), and killed ones (SIGKILL)."""

    def __init__(self, place, slots=2, harm=lambda job: None):
        super().__init__(daemon=True)
        self._place, self._slots, self._harm, self._over = place, slots, harm, threading.Event()
        self._running = {}  # job id -> (job, process, seconds, signal)
        self._talks = {}  # job id -> when its worker said something
        self._told = {}  # job id -> when SIGTERM was sent
        self.ended = []  # (job id, attempt, exit code, reason)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self._over.set()
        self.join()
        for _, process, _, _ in self._running.values():
            process.kill()
            process.wait()

    def run(self):
        jobs = batch_backends[ACCOUNT][REGION]._jobs
        while not self._over.wait(PAUSE):
            for job in list(jobs.values()):
                if job._child_jobs:
                    self._sum_up(job)
                elif job.job_id in self._running:
                    self._look_after(job)
                elif job.status in ("SUBMITTED", "RUNNABLE"):
                    if job.stop:
                        job._mark_stopped(success=False)
                    elif len(self._running) < self._slots:
                        self._begin(job)

    def _begin(self, job):
        [about] = boto3.client("batch").describe_jobs(jobs=[job.job_id])["jobs"]
        attempt = len(job.attempts) + 1
        machine = self._place / f"{job.job_id.replace(':', '-')}-{attempt}"
        machine.mkdir(parents=True)
        given = {each["name"]: each["value"] for each in about["container"]["environment"]}
        given |= {"AWS_BATCH_JOB_ATTEMPT": str(attempt), "TMPDIR": str(machine)}
        if ":" in job.job_id:
            given["AWS_BATCH_JOB_ARRAY_INDEX"] = job.job_id.partition(":")[2]
        command = [sys.executable, "-m", "solorl.cli", *about["container"]["command"]]  # the image's entry point
        with open(machine / "output", "wb") as output:
            process = subprocess.Popen(command, env=environment(**given), stdout=output, stderr=subprocess.STDOUT)
        job.job_started_at, job.log_stream_name = (
            job.job_created_at,
            f"{job.job_definition.name}/default/{machine.name}",
        )
        job._start_attempt()
        job.status = "RUNNING"
        seconds, number = self._harm(job) or (1e9, signal.SIGTERM)
        self._running[job.job_id] = (job, process, seconds, number)

    def _look_after(self, job):
        _, process, seconds, number = self._running[job.job_id]
        now, told = time.monotonic(), self._told.get(job.job_id)
        if self._output(job).stat().st_size:
            self._talks.setdefault(job.job_id, now)
        moment = self._talks.get(job.job_id, now) + seconds
        if process.poll() is not None:
            return self._end(job, process.returncode, number if told or now > moment else 0)
        if told is None and (job.stop or now > moment):
            self._told[job.job_id] = now
            process.send_signal(signal.SIGTERM if job.stop else number)
        elif told is not None and now - told > GRACE:
            process.kill()

    def _end(self, job, code, number):
        del self._running[job.job_id]
        self._talks.pop(job.job_id, None)
        told = self._told.pop(job.job_id, None)
        reason = "Host EC2 (instance i-0) terminated." if told and number == signal.SIGTERM and not job.stop else ""
        reason = reason or "Essential container in task exited"
        code = 128 - code if code < 0 else code  # as Docker says it
        self._print(job)
        job._stop_attempt()
        self.ended.append((job.job_id, len(job.attempts), code, reason))
        job.exit_code, job.job_stopped_reason = code, reason
        if code == 0 or job.stop or not self._again(job, code, reason):
            job._mark_stopped(success=code == 0)
        else:
            job.status = "RUNNABLE"

    def _again(self, job, code, reason):
        strategy = job.job_definition.retry_strategy or {"attempts": 1}
        if len(job.attempts) >= strategy["attempts"]:
            return False
        for rule in strategy["evaluateOnExit"]:
            if fnmatch(reason, rule.get("onStatusReason", "*")) and fnmatch(str(code), rule.get("onExitCode", "*")):
                return rule["action"].upper() == "RETRY"
        return True

    def _output(self, job):
        return self._place / job.log_stream_name.rpartition("/")[2] / "output"

    def _print(self, job):
        """What a container printed goes to CloudWatch."""
        logs, stream = boto3.client("logs"), job.log_stream_name
        where = {"logGroupName": "/aws/batch/job", "logStreamName": stream}
        with contextlib.suppress(logs.exceptions.ResourceAlreadyExistsException):
            logs.create_log_group(logGroupName=where["logGroupName"])
        logs.create_log_stream(**where)
        lines = self._output(job).read_text(errors="replace").splitlines()
        events = [{"timestamp": int(time.time() * 1000), "message": line} for line in lines if line]
        if events:
            logs.put_log_events(**where, logEvents=events)

    def _sum_up(self, parent):
        states = {child.status for child in parent._child_jobs}
        if states <= {"SUCCEEDED", "FAILED"} and not parent.job_stopped:
            parent._mark_stopped(success=states == {"SUCCEEDED"})
        elif not parent.job_stopped:
            parent.status = "PENDING"


def sometimes(share, most, seed=1):
    """Harm for so large a share of the first starts, half of it by SIGTERM, after up to `most` seconds. A task that is
    submitted again is spared: by chance one of them would be killed as often as it may be."""
    draw = random.Random(seed)

    def harm(job):
        [about] = boto3.client("batch").describe_jobs(jobs=[job.job_id])["jobs"]
        again = "submissions/000001.json" not in about["container"]["command"]
        if draw.random() >= share or len(job.attempts) > 1 or again:
            return None
        return draw.uniform(0, most), draw.choice((signal.SIGTERM, signal.SIGKILL))

    return harm


def keys():
    """The environment of somebody with an account."""
    return {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true"}  # fmt: skip
