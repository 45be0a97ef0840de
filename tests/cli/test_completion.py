"""Shell completion: the words that are offered, and that bash offers them."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, environment, refused

from solorl import scripts
from solorl.cli import all_verbs
from solorl.cli.completion import SHELLS


@pytest.fixture
def words(tmp_path, monkeypatch):
    """`words("solo tr")`: what is offered at the end of a line, in a folder with a run, a .py file and a text."""
    (tmp_path / "runs" / "CartPole-v1__ppo__1").mkdir(parents=True)
    shutil.copy(ROOT / "algorithms" / "ppo" / "ppo.py", tmp_path / "my_ppo.py")
    (tmp_path / "notes.txt").touch()

    def call(line):
        asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
        own = environment() | asked | {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "said"), "COMP_TYPE": "9"}
        (tmp_path / "said").unlink(missing_ok=True)
        command = (sys.executable, "-m", "solorl.cli")
        subprocess.run(command, env=own, cwd=tmp_path, capture_output=True, timeout=120)
        said = (tmp_path / "said").read_text() if (tmp_path / "said").exists() else ""
        return [word.strip() for word in said.split("\n") if word.strip()]

    return call


def test_verbs_and_algorithms(words):
    assert set(words("solo ")) == set(all_verbs())
    assert set(words("solo co")) == {"copy", "completion"}
    assert set(words("solo train ")) == {*scripts.script_paths(), "my_ppo.py", "runs/"}
    assert set(words("solo copy ppo_n")) == {"ppo_normalized"}
    assert set(words("solo new x --from ppo_n")) == {"ppo_normalized"}


def test_flags_are_those_of_the_script_or_of_the_verb(words):
    for name in ("ppo", "my_ppo.py"):
        assert set(words(f"solo train {name} --seed 2 --anneal")) == {"--anneal-lr"}
    assert words("solo train dqn_jax --num-s") == ["--num-seeds"]
    assert set(words("solo plot --")) == {"--help", "--out"}
    assert words("solo train nothing --") == []


def test_run_folders(words):
    assert words("solo play ru") == ["runs/"]
    assert words("solo play runs/") == ["runs/CartPole-v1__ppo__1/"]
    assert words("solo dataset i") and set(words("solo dataset i")) == {"info", "import"}


def test_bash_completes(words, tmp_path):
    """The script as bash runs it."""
    (tmp_path / "solo").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m solorl.cli "$@"\n')
    (tmp_path / "solo").chmod(0o755)
    script = """eval "$(solo completion bash)"
    COMP_LINE="solo comp"; COMP_POINT=${#COMP_LINE}; COMP_TYPE=9; COMP_WORDS=(solo comp); COMP_CWORD=1
    $(complete -p solo | sed 's/.*-F \\([^ ]*\\) .*/\\1/') solo comp solo; printf "<%s>" "${COMPREPLY[@]}" """
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout.replace(" ", "") == "<completion>", done


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_is_one_the_shell_can_read(solo, shell, tmp_path):
    code, out, _ = solo("completion", shell)
    assert code == 0 and "_ARGCOMPLETE" in out
    if shutil.which(shell):
        (tmp_path / "script").write_text(out)
        assert subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True).returncode == 0


def test_an_unknown_shell_is_refused(solo):
    refused(solo("completion", "bsh"), "solo completion does not know the shell bsh; did you mean bash?")
    refused(solo("completion"), "bash|zsh|fish")
