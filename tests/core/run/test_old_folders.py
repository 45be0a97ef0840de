"""Run folders of version 0.1, made at commit a9e391d: they are played, reported and drawn; to go on is refused."""

import tarfile

import pytest
from conftest import TESTS, refused

RUNS = ["dqn", "ppo", "ppo_jax", "pqn", "sac_continuous_action", "mappo"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Script -> its run folder; of checkpoints it has the manifest only."""
    where = tmp_path_factory.mktemp("old")
    with tarfile.open(TESTS / "data" / "run_folders_0_1.tar.gz") as file:
        file.extractall(where, filter="data")
    return {path.name.split("__")[1]: path for path in where.iterdir()}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_0_1_is_played(name, folders, solo):
    code, out, err = solo("play", folders[name], "--episodes", "1", "--trust-script")
    assert code == 0 and "over 1 greedy episodes" in out, err


def test_runs_of_0_1_are_reported_and_drawn(folders, solo, tmp_path):
    code, out, err = solo("report", *folders.values(), "--out", tmp_path / "report")
    assert code == 0 and all(name in (tmp_path / "report" / "report.md").read_text() for name in RUNS), out + err
    for name, folder in folders.items():
        code, out, err = solo("plot", folder, "--out", tmp_path / f"{name}.png")
        assert code == 0 and (tmp_path / f"{name}.png").stat().st_size > 1_000, out + err


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_0_1_is_not_resumed(name, folders, solo):
    """One sentence, which names the commit that can; nothing in the folder is touched."""
    before = {path: path.read_bytes() for path in folders[name].rglob("*") if path.is_file()}
    refused(solo("train", name, "--resume", folders[name]), "made by SoloRL 0.1", "git checkout a9e391d")
    assert {path: path.read_bytes() for path in folders[name].rglob("*") if path.is_file()} == before
