"""Running the real scripts and looking at their variables and files."""

import contextlib
import importlib
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from solorl import cli
from solorl.compute.speed import GradientStep
from solorl.envs.load_envpool import load_qt
from solorl.errors import UsageError

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NPROC", "1")  # threads of XLA: the first training of a process would choose for all others
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # so in a job after `&`, but what is tested must hear Ctrl+C
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # so below `nohup`, but the trainings of the tests must hear it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
for name in ("NO_COLOR", "FORCE_COLOR"):  # what is tested are plain words, unless a test says otherwise
    os.environ.pop(name, None)
load_qt()  # before a test imports EnvPool by itself
ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
# `probes:...` as environment ids; some modules of tests take a fixture or a reference from one in another folder.
FOLDERS = [x for x in sorted(TESTS.rglob("[!_]*")) if x.is_dir() and TESTS / "data" not in x.parents]
sys.path[:0] = [str(TESTS), *map(str, FOLDERS)]


def pytest_addoption(parser):
    parser.addoption(
        "--costs", metavar="FILE", help="append a line for each test: seconds of CPU, children's too; name"
    )


def costly():
    """Tests whose properties cheaper ones of the fast tier hold, too, or that take minutes: see the file."""
    lines = (TESTS / "costly.txt").read_text().splitlines()
    return {line.split(maxsplit=1)[1] for line in lines if line and not line.startswith("#")}


def pytest_collection_modifyitems(items):
    left_out = costly()
    for item in items:
        if item.nodeid.removeprefix("tests/") in left_out:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """What a test costs, with its fixtures: seconds of CPU say the same on a loaded machine."""
    before = os.times()
    yield
    if file := item.config.getoption("--costs"):
        with open(file, "a") as table:
            table.write(f"{sum(os.times()[:4]) - sum(before[:4]):.2f} {item.nodeid}\n")


def own_registry(monkeypatch):
    """A registry of Gymnasium for one test. What modules register where they are imported for the first time must
    outlive it, so they are imported before."""
    for module in ("ale_py", "solorl.envs.gymnax", "solorl.envs.mjx", "solorl.envs.pettingzoo", "solorl.games.teams"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    monkeypatch.setattr(gym, "registry", gym.envs.registration.registry)


def script(name):
    """The path of an algorithm file."""
    return next((ROOT / "algorithms").glob(f"*/{name}.py"))


def definitions(name):
    """The names an algorithm file defines, its main block not run."""
    return runpy.run_path(str(script(name)), run_name="imported")


def rows(run_dir, key=None):
    """The rows of metrics.jsonl, without where the time went (`time/...`); with `key` only those that have it."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    found = [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]
    return [row for row in found if key is None or key in row]


def comparable(run_dir):
    """All rows without what depends on the clock."""
    return [{k: v for k, v in row.items() if k not in ("wall_time", "charts/SPS")} for row in rows(run_dir)]


def drop_last_checkpoint(run_dir):
    """Remove the newest checkpoint of a run, as if it had been killed before it."""
    shutil.rmtree(sorted((run_dir / "checkpoint").iterdir())[-1])


def linear_layers(layers):
    """The Linear layers among the modules of a net."""
    return [layer for layer in layers if isinstance(layer, torch.nn.Linear)]


def copy_layers(params, layers):
    """The weights of a net in JAX, a list of {"weight": (fan_in, fan_out), "bias"}, into torch's Linear layers; all
    else among `layers` is passed over."""
    for mine, layer in zip(params, linear_layers(layers), strict=True):
        layer.load_state_dict(
            {"weight": torch.tensor(np.array(mine["weight"].T)), "bias": torch.tensor(np.array(mine["bias"]))}
        )


@pytest.fixture
def solo(capfd):
    """`code, out, err = solo("bench", ...)` is `solo bench ...` in this process, with its children's words."""

    def call(*words):
        capfd.readouterr()
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        return code, *capfd.readouterr()

    return call


def refused(result, *fragments):
    """One sentence on standard error, exit code 2, nothing else."""
    code, out, err = result
    assert code == 2 and out == "", (code, out)
    assert err.count("\n") == 1 and "Traceback" not in err, err
    for fragment in fragments:
        assert fragment in err, err


@pytest.fixture(autouse=True, scope="session")
def own_notes(tmp_path_factory):
    """What the library notes in the home folder, of scripts that were started, is noted in a folder of the tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("notes"))


@pytest.fixture(autouse=True)
def same_folder():
    """A test that leaves the process in another folder, or in one that is gone, spoils those after it."""
    yield
    os.chdir(ROOT)


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """No test draws a learning curve or waits for the disk, except those marked `disk`: of hundreds of trainings each
    would do both."""
    if not request.node.get_closest_marker("disk"):
        monkeypatch.setattr("solorl.run.ending.draw_learning_curve", lambda rows, path, *about: path.touch())
        monkeypatch.setattr("os.fsync", lambda handle: None)


@pytest.fixture(autouse=True)
def own_signals():
    """A script that ends early leaves its signal handlers; its process would have ended with it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """`train("ppo", "--flag", ...)` runs the script in this process, as a user would, and returns its variables; what
    it printed is in `train.out`. Its exit code must be `code`."""

    def call(name, *flags, runs_dir=tmp_path / "runs", code=0):
        path = str(script(name)) if not str(name).endswith(".py") else str(name)
        words = [path, *map(str, flags)]
        if "--runs-dir" not in words and "--resume" not in words:
            words += ["--runs-dir", str(runs_dir)]
        if "--log-every" not in words and "--resume" not in words:
            words += ["--log-every", "1"]  # a row for each iteration
        monkeypatch.setattr(sys, "argv", words)
        out, call.code, variables = io.StringIO(), 0, {}
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                try:
                    variables = runpy.run_path(path, run_name="__main__")
                except UsageError as error:
                    sys.excepthook(UsageError, error, error.__traceback__)
                    raise
            except SystemExit as end:
                call.code = end.code
        call.out = out.getvalue()
        assert call.code == code, call.out
        return variables

    call.out, call.code = "", 0
    return call


def section(page, title):
    """The text of a page of Markdown between the heading `## title` and the next one of its kind."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, flags=re.M | re.S)
    assert found, f"the page has no section {title}"
    return found[1]


def documented_keys(name):
    """The metrics that a file logs: those of every file by its family's page, and those that its own page names."""
    pages = script(name).with_name("README.md"), ROOT / f"docs/algorithms/{name}.md"
    text = "".join(section(page.read_text(), "Logged metrics") for page in pages)
    return {word for word in text.split("`") if re.fullmatch(r"(charts|losses|eval)/\w+", word)}


@pytest.fixture
def batches(monkeypatch):
    """What the losses of the trainings see from now on: the first input of each gradient step."""
    seen, step = [], GradientStep.__call__

    def note(self, batch, *inputs):
        seen.append(batch)
        return step(self, batch, *inputs)

    monkeypatch.setattr(GradientStep, "__call__", note)
    return seen


def environment(**extra):
    """The environment of a subprocess: the probes importable, one thread."""
    paths = [str(ROOT), str(TESTS / "doubles")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | extra


def run(*words, **kwargs):
    """Run a command to its end and return it, output captured as text."""
    return subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, env=environment(), timeout=300, **kwargs
    )
