"""The notebook of the first hour is the guide, and its cells work."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment

sys.path.insert(0, str(ROOT / "docs"))

import notebook

NOTEBOOK = json.loads(notebook.NOTEBOOK.read_text())


def sources(kind):
    """The texts of the cells of a kind."""
    return ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == kind]


def test_the_notebook_is_made_from_the_guide():
    assert notebook.notebook() == notebook.NOTEBOOK.read_text(), "run python docs/notebook.py"


def test_its_cells_are_the_commands_and_the_text_of_the_guide():
    guide = notebook.GUIDE.read_text()
    blocks = [block.strip().splitlines() for block in re.findall(r"```bash\n(.*?)```", guide, flags=re.S)]
    assert len(blocks) > 4 and sources("code") == ["\n".join(f"!{line}" for line in block) for block in blocks]
    words = re.sub(r"```bash\n.*?```|\]\([^)]*\)", " ", guide, flags=re.S).split()
    text = re.sub(r"\]\([^)]*\)", " ", " ".join(sources("markdown")).replace(notebook.START, "")).split()
    assert text == words
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", "\n".join(sources("markdown")))
    assert len(links) > 8
    for link in links:
        assert (notebook.NOTEBOOK.parent / link).exists(), link


@pytest.mark.slow
def test_every_cell_works(tmp_path, monkeypatch):
    """The trainings are shortened."""
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel, which the lock does not have")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel, which the lock does not have")
    pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel, which the lock does not have")
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, words in {"solo": "-m solorl.cli", "python": ""}.items():
        (bin_ / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (bin_ / name).chmod(0o755)
    for name, value in environment(PYTHONPATH=str(ROOT), PATH=f"{bin_}:{os.environ['PATH']}").items():
        monkeypatch.setenv(name, value)
    made = nbformat.reads(notebook.NOTEBOOK.read_text(), as_version=4)
    nbformat.validate(made)
    for cell in made.cells:
        if cell.cell_type == "code":
            short = r"\1 --total-timesteps 2100 --eval-episodes 1\2"
            lines = re.sub(r"^(!(?:solo train|python my_).*?)( +#.*)?$", short, cell.source, flags=re.M)
            cell.source = "\n".join(f"{line}\nassert _exit_code == 0" for line in lines.splitlines())
    folder = tmp_path / "work"
    folder.mkdir()
    nbclient.NotebookClient(made, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    printed = "".join(out.get("text", "") for cell in made.cells for out in cell.get("outputs", ()))
    assert "play it" in printed and (folder / "report/report.html").exists() and (folder / "curve.png").exists()
    assert Path(folder / "my_ppo.py").read_text().startswith("# /// script")
