"""The wheel works without a checkout: built, installed into an environment of its own, used from another folder."""

import os
import subprocess
import sys
import sysconfig
import zipfile

import pytest
from conftest import ROOT, run

pytestmark = pytest.mark.slow  # a wheel, and an environment of its own


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The Python of a fresh virtual environment with the wheel; third-party packages come from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    build = run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    assert build.returncode == 0, build.stderr
    wheel = next(folder.glob("solorl-*.whl"))
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
    python = folder / "env" / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    site = subprocess.check_output([str(python), "-c", "import site; print(site.getsitepackages()[0])"], text=True)
    # Append the packages of this environment, but none of its .pth files: those name the checkout.
    (folder / "env" / "deps.txt").write_text(sysconfig.get_paths()["purelib"])
    line = "import sys; sys.path.append(open(sys.prefix + '/deps.txt').read())\n"
    (folder / site.strip() / "deps.pth").write_text(line)
    return python, wheel


def use(python, *words, cwd):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env["OMP_NUM_THREADS"] = "1"
    return subprocess.run([str(python), *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True)


def test_the_wheel_carries_scripts_types_and_stub(installed):
    names = set(zipfile.ZipFile(installed[1]).namelist())
    files = ("algorithms/ppo/ppo.py", "spaces/ppo.toml", "py.typed", "catalog/stub.py", "docs/algorithms/ppo.md")
    assert {f"solorl/{name}" for name in files} <= names
    assert not any(name.startswith(("tests/", "algorithms/")) for name in names)


def test_list_train_play_and_copy_without_a_checkout(installed, tmp_path):
    python, _ = installed
    where = use(python, "-c", "import solorl; print(solorl.__file__)", cwd=tmp_path).stdout
    assert str(ROOT) not in where and "site-packages" in where
    solo = python.with_name("solo")
    done = use(solo, "list", cwd=tmp_path)
    assert done.returncode == 0 and "ppo" in done.stdout, done.stderr
    flags = "--num-envs 2 --num-steps 32 --total-timesteps 128 --eval-episodes 1".split()
    done = use(solo, "train", "ppo", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    play = next(line for line in done.stdout.splitlines() if line.startswith("play it")).split()[2:]
    done = use(solo, *play[1:], "--episodes", "1", cwd=tmp_path)
    assert done.returncode == 0 and "over 1 greedy episodes" in done.stdout, done.stderr
    assert use(solo, "copy", "ppo", "mine.py", cwd=tmp_path).returncode == 0
    assert use(solo, "new", "newer", "--from", "ppo", cwd=tmp_path).returncode == 0
    done = use(solo, "check", "mine.py", cwd=tmp_path)  # a tool of the project, in no wheel
    assert done.returncode == 2 and "checkout" in done.stderr
    done = use(python, "mine.py", *flags, "--exp-name", "copied", cwd=tmp_path)
    assert done.returncode == 0 and list(tmp_path.glob("runs/*__copied__*/metrics.jsonl")), done.stderr
