"""The engine `ray`: what runs on a node, the refusals, and (slow) a real cluster of three nodes on this machine."""

import contextlib
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, environment, refused, section
from study_tasks import FAKE, attempts, finished_once, open_study, until

from solorl.lab.results import result as results
from solorl.lab.studies import engines
from solorl.lab.studies.engines import AGAIN, Submission
from solorl.lab.studies.engines.ray import Again, work
from solorl.lab.studies.resources import Resources

LONG = 600  # seconds: starting a process of Ray takes many on a busy machine


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to be in; the steps of stand-ins are noted in `journal`."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(FAKE, tmp_path / "fake.py")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    return tmp_path


# ---------------------------------------------------------------------- on a node
def test_a_node_runs_a_worker_with_its_own_python():
    code = "import sys; print(sys.executable); print('to stderr', file=sys.stderr); sys.exit(3)"
    assert set(work(["-c", code]).splitlines()) == {sys.executable, "to stderr"}
    text = work(["-c", "print('before'); print('x' * 10_000)"])
    assert text.strip("x\n") == "" and 3000 < len(text) < 5000


@pytest.mark.parametrize("end", [f"sys.exit({AGAIN})", "os.kill(os.getpid(), 9)"])
def test_a_worker_that_was_killed_or_preempted_is_for_ray_to_run_again(end):
    with pytest.raises(Again):
        work(["-c", f"import os, sys; {end}"])


def interrupt_when(path, pauses):
    """Interrupt this thread as `ray.cancel` does, once `path` is there and after each of these seconds."""
    import _thread

    def call():
        until(path.exists)
        for pause in pauses:
            time.sleep(pause)
            _thread.interrupt_main()

    threading.Thread(target=call).start()


WAITS = """
import pathlib, signal, sys, time
def save(*_):
    print("saved", flush=True)
    if sys.argv[2] == "polite": sys.exit(75)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
time.sleep(60)
"""


@pytest.mark.parametrize(("manners", "pauses"), [("polite", [0]), ("deaf", [0, 0.3])])
def test_interruptions_tell_a_worker_to_save_and_then_kill_it(tmp_path, manners, pauses):
    interrupt_when(tmp_path / "up", pauses)
    assert (
        work(["-c", WAITS, str(tmp_path / "up"), manners]) == "saved\n"
    )  # not Again: told to end, it is not run again


# ---------------------------------------------------------------------- refusals
def bench(*words, seeds=1, storage="study", lease=5):
    """The words of a bench of the stand-in on Ray."""
    given = ["bench", "fake.py", "--env-ids", "CartPole-v1", "--num-seeds", seeds, "--engine", "ray", "--storage",
             storage, "--variant", "", "--results", "results", "--lease", lease, *words]  # fmt: skip
    return [str(word) for word in given]


def closed_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_what_is_no_cluster_is_refused_in_one_sentence(solo, place, monkeypatch):
    address = f"127.0.0.1:{closed_port()}"
    at = f"--engine-option address={address}".split()
    refused(solo(*bench(*at)), f"there is no Ray cluster at {address}", "Connection refused", "ray start --head")
    refused(solo(*bench("--engine-option", "address=head")), "must be HOST:PORT, ray://HOST:PORT or auto, not head")
    refused(solo(*bench("--engine-option", "adress=x:1")), "has no option adress; did you mean address")
    refused(solo(*bench("--engine-option", "retries=-1")), "retries", "must be a whole number from 0")
    refused(solo(*bench("--engine-option", "grows=1")), "must be yes or no, not 1")
    monkeypatch.setenv("RAY_ADDRESS", address)
    refused(solo(*bench()), address)
    assert not (place / "study").exists()  # nothing is written


def test_without_the_extra_a_sentence_names_it(solo, place, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "solorl.lab.studies.engines.ray")
    refused(solo(*bench()), "the engine ray needs ray", "pip install 'solorl[ray]'")


# ---------------------------------------------------------------------- a cluster
def patient(get_node):
    """Ray gives a node 30 seconds to begin, which is too short on a busy machine."""

    def call(*words):
        end = time.monotonic() + LONG
        while True:
            try:
                return get_node(*words)
            except RuntimeError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)

    return call


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster on this machine; `on_ray` sees to it that it has three nodes with a core each."""
    import ray
    from ray._private import services
    from ray.cluster_utils import Cluster

    before, get_node = dict(os.environ), services.get_node
    services.get_node = patient(get_node)
    os.environ.update(environment(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0"))
    found = Cluster()
    try:
        add_node(found)
        yield found
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
        found.shutdown()
        services.get_node = get_node
        os.environ.clear()
        os.environ.update(before)


def add_node(cluster):
    return cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False)


@pytest.fixture
def on_ray(cluster, place, monkeypatch):
    """`place`, where commands find the cluster, with all its nodes, by its address in the environment."""
    while len(cluster.list_all_nodes()) < 3:
        add_node(cluster)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    return place


def runner(place, *words, **kwargs):
    """A bench in a process of its own."""
    command = [sys.executable, "-m", "solorl.cli", *bench(*words, **kwargs)]
    env = environment(RAY_ADDRESS=os.environ["RAY_ADDRESS"])
    return subprocess.Popen(command, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def crew_of(study):
    """The actor that has the workers of a study's newest submission."""
    import ray

    return ray.get_actor(study.submissions()[-1]["handles"][0].partition("/")[0], namespace="solorl")


def trained(study):
    """Task -> the steps in the metrics of its accepted result."""
    found = {}
    for task_id in study.done():
        path = study.storage.folder / study.result(task_id)["run_dir"] / "metrics.jsonl"
        found[task_id] = [json.loads(line)["global_step"] for line in path.read_text().splitlines()]
    return found


@pytest.mark.slow
def test_later_commands_find_stop_and_continue_what_one_has_submitted(solo, on_ray):
    import ray

    words = bench("--detach", "--", "--pause", "1", "--total-timesteps", "50", seeds=4)
    code, out, err = solo(*words)
    assert code == 0 and "submitted  4 tasks to ray" in out, err
    study = open_study("study")
    tasks = [*study.tasks.values()]
    until(lambda: len(study.done("leases")) == 3, LONG)  # one on each node
    with runner(on_ray, "--detach", "--", "--pause", "1", "--total-timesteps", "50", seeds=4) as again:
        out, _ = again.communicate(timeout=LONG)
    assert again.returncode == 0 and "submitted  " not in out and len(study.submissions()) == 1  # all four are alive
    assert "3 running" in solo("bench", "status", "study")[1]
    # preempted: it has saved, and Ray runs it again
    first = json.loads(study.storage.read(study.storage.list("leases")[0]))
    os.kill(first["pid"], signal.SIGTERM)
    until(lambda: any(attempts(study, task)[:1] == ["stopped"] for task in tasks), LONG)
    # the crew is lost: its successor begins again with all its jobs
    os.kill(ray.get(crew_of(study).__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
    until(lambda: sum(attempts(study, task)[1:] == ["running"] for task in tasks) == 3, LONG)
    assert solo("bench", "cancel", "study")[0] == 0
    until(lambda: not study.done("leases"), LONG)
    assert "4 cancelled" in solo("bench", "status", "study")[1] and study.done() == set()
    solo("bench", "retry", "study")
    words.remove("--detach")
    code, out, err = solo(*words)
    assert code == 0 and "4 of 4 finished" in out, out + err
    assert trained(study) == {task.id: [*range(1, 51)] for task in tasks}
    states = [attempts(study, task) for task in tasks]
    assert all(one.count("finished") == 1 for one in states), states
    assert sum(one.count("stopped") for one in states) >= 6, states  # by SIGTERM, with the crew, by `cancel`


@pytest.mark.slow
def test_a_worker_that_finds_no_study_leaves_its_sentence_in_the_logs(on_ray):
    ray = engines.open_engine("ray", {})
    [handle] = ray.submit(Submission(str(on_ray / "nowhere"), "submissions/000001.json", "x", ("a",), Resources()))
    until(lambda: not ray.alive([handle]), LONG)
    assert f"there is no folder {on_ray}/nowhere" in ray.logs(handle)
    assert ray.alive(["solo-of-another-cluster/0"]) == set() and ray.logs("solo-of-another-cluster/0") == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--cores", "2"], "no node of the Ray cluster has 2 cores, 0 GPUs and 0 MB; they have at most 1 cores"),
        (["--gpus", "1"], "has 1 cores, 1 GPUs"),
        (["--memory", "900TB"], "900,000,000 MB"),
    ],
)
def test_resources_that_no_node_has_are_refused(solo, on_ray, words, sentence):
    code, _, err = solo(*bench(*words))
    assert code == 2 and err.count("\n") == 1 and sentence in err
    assert open_study("study").submissions() == []


@pytest.mark.slow
def test_the_page_s_commands_train(solo, on_ray):
    """Those of docs/scale.md, with a folder of this test."""
    text = section((ROOT / "docs/scale.md").read_text(), "Ray").replace("/shared", str(on_ray))
    commands = [line.split("#")[0].split() for line in text.splitlines() if line.startswith("solo ")]
    assert [words[1] for words in commands] == ["bench", "bench"]
    code, out, err = solo(*commands[0][1:-5], "--results", "results", *commands[0][-5:])
    assert code == 0 and "3 of 3 finished" in out and "results in results" in out, out + err
    found = {one.seed: one for one in map(results.read, Path("results").iterdir())}
    assert set(found) == {1, 2, 3} and all(one.eval["global_step"][-1] == 2000 for one in found.values())
    assert solo(*commands[1][1:])[:2] == (0, "dqn: 3 tasks: 3 finished\n")


@pytest.mark.slow
def test_a_search_is_done_by_a_cluster_and_loses_nothing(on_ray):
    """Workers and the command itself are killed; the same command continues, and no step is lost or done twice."""
    pytest.importorskip("optuna")
    (on_ray / "space.toml").write_text('learning-rate = "log 1e-5..1e-1"')
    words = ["tune", "fake.py", "--env-ids", "CartPole-v1", "--space", "space.toml", "--trials", 20, "--num-seeds", 1]
    words += ["--pruner", "none", "--engine", "ray", "--workers", 3, "--", "--total-timesteps", 30, "--pause", 0.1]
    env = environment(RAY_ADDRESS=os.environ["RAY_ADDRESS"], PYTHONUNBUFFERED="1")

    def begin():
        command = [sys.executable, "-m", "solorl.cli", *map(str, words)]
        return subprocess.Popen(
            command, cwd=on_ray, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    leases, done = on_ray / "runs/tune/fake/leases", on_ray / "runs/tune/fake/results"

    def kill_a_worker_of_each(process, counts):
        """When so many runs have finished."""
        for count in counts:
            assert process.poll() is None, process.communicate()[0]
            until(lambda count=count: len(list(done.glob("*"))) >= count and any(leases.glob("*.json")), LONG)
            with contextlib.suppress(OSError, ValueError):
                os.kill(json.loads(next(leases.glob("*.json")).read_text())["pid"], signal.SIGKILL)
                killed.append(count)

    killed = []
    with begin() as first:
        kill_a_worker_of_each(first, [1, 4, 7])
        first.kill()
    with begin() as second:
        kill_a_worker_of_each(second, [10, 13])
        out = second.communicate(timeout=LONG)[0]
    assert second.returncode == 0 and "20 trials complete" in out and len(killed) > 2, out
    study = open_study(str(on_ray / "runs/tune/fake"))
    assert study.done() == set(study.tasks) and len(study.tasks) == 20
    assert finished_once(study)
    assert trained(study) == {task: [*range(1, 31)] for task in study.tasks}


@pytest.mark.slow
def test_five_hundred_tasks_with_killed_workers_and_a_lost_node_have_one_result_each(cluster, on_ray):
    """The worker of every tenth task, in the mean, is killed with SIGKILL at a random moment, and after a third of the
    tasks one of the nodes."""
    seeds, draw, killed, lost = int(os.environ.get("SOLORL_TEST_TASKS", "500")), random.Random(1), set(), ""
    delays: dict[str, float] = {}  # task -> the moment to kill its first worker; infinite for most
    leases, done = on_ray / "study/leases", on_ray / "study/results"
    with runner(on_ray, "--", "--pause", "0.05", seeds=seeds) as process:
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout))
        reader.start()
        while process.poll() is None:
            time.sleep(0.02)
            for path in leases.glob("*.json"):
                if path.stem not in delays:
                    chosen = draw.random() < 0.1
                    delays[path.stem] = time.monotonic() + draw.uniform(0, 0.4) if chosen else math.inf
                elif time.monotonic() > delays[path.stem]:
                    delays[path.stem] = math.inf
                    with contextlib.suppress(OSError, ValueError):
                        os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
                        killed.add(path.stem)
            if not lost and done.exists() and len(list(done.iterdir())) > seeds / 3:
                lost = cluster.list_all_nodes()[-1]
                cluster.remove_node(lost, allow_graceful=False)
        reader.join()
    assert process.returncode == 0 and lost, "".join(lines[-20:])
    study = open_study(str(on_ray / "study"))
    assert study.done() == set(study.tasks) and len(study.storage.list("results")) == seeds
    assert Counter(result.seed for result in map(results.read, (on_ray / "results").iterdir())) == Counter(
        range(1, seeds + 1)
    )
    found = [one["state"] for task in study.tasks for one in study.attempts(task)]
    print(f"{len(killed)} killed, attempts: {Counter(found)}, {len(study.submissions())} submissions")
    assert finished_once(study) and len(killed) >= seeds / 25
    assert trained(study) == {task: [*range(1, 6)] for task in study.tasks}
