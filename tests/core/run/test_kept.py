"""Other runs that a run needs: found by their address, copied into its folder, and taken from there when resumed."""

import gc
import json
import shutil

import pytest

from solorl.errors import UsageError
from solorl.run.hub import Kept

FILES = {"config.json": json.dumps({"script": "ppo.py"}), "ppo.py": "print()\n", "model.safetensors": "weights"}


def run_folder(path):
    path.mkdir(parents=True)
    for name, text in (FILES | {"metrics.jsonl": "{}\n"}).items():
        (path / name).write_text(text)
    return path


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_resumed_run_takes_its_copy(tmp_path):
    """Whatever has become of the other folder; it is not copied again, and half a copy is none."""
    other, run_dir = run_folder(tmp_path / "other"), tmp_path / "run"
    kept = Kept()
    assert kept.find(str(other), run_dir) == other and not run_dir.exists()
    kept.copy_to(run_dir)
    [copy] = (run_dir / "kept").iterdir()
    assert contents(copy) == FILES
    shutil.rmtree(other)
    again = Kept()
    assert again.find(str(other), run_dir) == copy
    again.copy_to(run_dir)
    assert contents(copy) == FILES
    copy.rename(copy.with_name(f".{copy.name}"))
    with pytest.raises(UsageError, match="there is no run folder"):
        Kept().find(str(other), run_dir)


def test_two_runs_may_be_kept(tmp_path):
    one, two, kept = run_folder(tmp_path / "a/run"), run_folder(tmp_path / "b/run"), Kept()
    for folder in (one, two):
        kept.find(str(folder), tmp_path / "own")
    kept.copy_to(tmp_path / "own")
    assert len(list((tmp_path / "own/kept").iterdir())) == 2


def test_an_address_on_the_hub_is_pulled_once(tmp_path, monkeypatch):
    """By `solo pull`, as a process; the copy needs no network, and what was pulled goes with the run."""
    asked = []

    def solo(*words):
        asked.append(words)
        run_folder(tmp_path.__class__(words[2]))
        return True, ""

    monkeypatch.setattr("solorl.run.hub.solo", solo)
    kept = Kept()
    folder = kept.find("hf://ann/teacher@v2", tmp_path / "run")
    assert [(*words[:2], *words[3:]) for words in asked] == [("pull", "ann/teacher", "--revision", "v2")]
    kept.copy_to(tmp_path / "run")
    del kept
    gc.collect()
    assert not folder.exists() and contents(Kept().find("hf://ann/teacher@v2", tmp_path / "run")) == FILES
    monkeypatch.setattr("solorl.run.hub.solo", lambda *words: (False, "there is no such repository"))
    with pytest.raises(UsageError, match="there is no such repository"):
        Kept().find("hf://ann/other", tmp_path / "run")
