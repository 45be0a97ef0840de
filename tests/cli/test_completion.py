"""Shell completion: the words that are offered, and that bash offers them."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, environment, refused

from solorl import scripts
from solorl.cli import all_verbs
from solorl.cli.completion import SHELLS, words


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with two run folders, one of them in a folder of its own, a .py file and a folder of .py files."""
    for name in ("CartPole-v1__ppo__1", "bench/Acrobot-v1__dqn__2"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"script": "ppo.py", "script_sha256": "0", "args": {}}')
        (folder / "status.json").touch()
    shutil.copy(ROOT / "algorithms" / "ppo" / "ppo.py", tmp_path / "my_ppo.py")
    (tmp_path / "mine").mkdir()
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_verbs_and_algorithms(place):
    assert words([""]) == words([]) == list(all_verbs()) and words(["co"]) == ["copy", "completion"]
    for verb in ("train", "copy", "diff", "check", "bench", "tune"):
        assert set(scripts.script_paths()) <= set(words([verb, ""])), verb
        assert words([verb, "mi"]) == ["mine/"] and words([verb, "my"]) == ["my_ppo.py"]
    assert words(["new", "x", "--from", "ppo_n"]) == ["ppo_normalized"]
    assert words(["train", "ppo", ""]) == [] and words(["nonsense", ""]) == []


def test_flags_are_those_of_the_script_or_of_the_verb(place):
    for name in ("ppo", "my_ppo.py"):
        assert words(["train", name, "--anneal"]) == ["--anneal-lr"]
        assert words(["train", name, "--seed", "2", "--no-anneal"]) == ["--no-anneal-lr"]
        assert words(["train", name, "--resume-"]) == ["--resume-changed"]
        assert words(["train", name, "--no-learning"]) == []
    assert words(["train", "dqn_jax", "--num-s"]) == ["--num-seeds"]
    assert words(["train", "dqn", "--plo"]) == ["--plot"] and words(["train", "dqn", "--eval-m"]) == ["--eval-more"]
    assert words(["plot", "--"]) == ["--help", "--out"]
    assert words(["train", "nothing", "--"]) == []
    assert words(["list", "--"]) == [
        "--actions",
        "--family",
        "--framework",
        "--help",
        "--json",
        "--observations",
        "--times",
    ]
    assert words(["bench", "ppo", "--num-s"]) == ["--num-seeds"]
    assert words(["bench", "ppo", "--num-seeds", "2", "--", "--num-s"]) == ["--num-steps"]


@pytest.mark.parametrize("verb", sorted(all_verbs()))
def test_each_verb_offers_its_flags(verb):
    if verb != "train":
        assert "--help" in words([verb, "-"])


def test_run_folders(place):
    for before in (["train", "ppo", "--resume"], ["play"], ["record"], ["runs", "delete"], ["report"], ["plot"]):
        assert [word for word in words([*before, ""]) if word != "delete"] == [
            "runs/CartPole-v1__ppo__1",
            "runs/bench/",
        ]
    assert words(["dataset", "i"]) == ["info", "import"] and words(["dataset", "info", "ru"]) == ["runs/"]
    assert words(["play", "runs/b"]) == ["runs/bench/"]
    assert words(["plot", "runs/CartPole-v1__ppo__1", "runs/b"]) == ["runs/bench/"]  # several may follow
    assert words(["play", "runs/bench/"]) == ["runs/bench/Acrobot-v1__dqn__2"]
    assert words(["play", f"{place}/runs/C"]) == [f"{place}/runs/CartPole-v1__ppo__1"]
    assert words(["play", "./ru"]) == ["./runs/"] and words(["play", "runs/[C"]) == []


def test_values_of_flags():
    assert words(["list", "--actions", ""]) == ["continuous", "discrete", "multidiscrete", "tuple"]
    assert words(["list", "--framework", "j"]) == ["jax"]
    assert words(["runs", "--status", "f"]) == ["finished", "failed"]


def test_bash_completes(place):
    """The script as bash runs it; names with spaces stay whole."""
    (place / "my own.py").touch()
    (place / "solo").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m solorl.cli "$@"\n')
    (place / "solo").chmod(0o755)
    shown = 'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _solo; printf "<%s>" "${COMPREPLY[@]}"; echo'
    script = f"""eval "$(solo completion bash)"
    COMP_WORDS=(solo tr); {shown}
    COMP_WORDS=(solo train my); {shown}
    COMP_WORDS=(solo train ppo --resume ""); {shown}"""
    env = environment(PATH=f"{place}:/usr/bin:/bin")
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines == ["<train>", "<my own.py><my_ppo.py>", "<runs/CartPole-v1__ppo__1><runs/bench/>"], done


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_is_one_the_shell_can_read(solo, shell, tmp_path):
    code, out, _ = solo("completion", shell)
    assert code == 0 and "completion words" in out
    if shutil.which(shell):
        (tmp_path / "script").write_text(out)
        assert subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True).returncode == 0


def test_an_unknown_shell_is_refused(solo):
    refused(solo("completion", "bsh"), "solo completion does not know the shell bsh; did you mean bash?")
    refused(solo("completion"), "bash|zsh|fish")
