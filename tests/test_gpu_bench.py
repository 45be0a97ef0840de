"""benchmark/gpu: which rows begin, windows of steps, programs that fail, the table, archives of trainings."""

import argparse
import importlib.util
import json
import sys
import time
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

FOLDER = ROOT / "benchmark/gpu"


def module(name):
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", FOLDER / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def speed():
    return module("speed")


def test_a_row_begins_only_if_its_minutes_are_left(speed):
    assert speed.chosen(["4", "1", "2"], 7) == ["4", "1", "2"]
    assert speed.chosen(["4", "1", "2"], 6) == ["4", "1"]
    assert speed.chosen(["5", "1"], 2) == ["1"]
    assert speed.chosen(["5"], 2) == []


def test_rates_of_three_windows_of_as_many_points(speed):
    points = [(0, 0.0), (10, 1.0), (20, 2.0), (40, 3.0), (60, 4.0), (100, 5.0), (140, 6.0)]
    assert speed.rates(points) == [10, 20, 40]
    assert speed.rates(points[:3]) == [10, 10]  # fewer points, fewer windows
    assert speed.rates(points[:1]) == speed.rates([]) == []


def arguments(folder, **changed):
    settings = {"peers": folder, "device": "cpu", "seconds": 0.3, "minutes": 1, "warm_up": 60, "side_by_side": 2}
    return argparse.Namespace(**settings | changed)


def peer(folder, name, code):
    (folder / name).write_text(f"import sys, time\nsys.path.insert(0, {str(FOLDER)!r})\nimport stand_ins\n{code}\n")


STEADY = "step = 0\nwhile True:\n    stand_ins.point(step)\n    step += 10\n    time.sleep(0.02)"


def test_a_program_that_fails_is_noted_and_the_next_is_measured(speed, tmp_path):
    peer(tmp_path, "broken.py", "print('what went wrong')\nsys.exit(3)")
    peer(tmp_path, "steady.py", STEADY)
    cases = [speed.Case("4", "title", name, [f"{name}.py"], 50, seeds=2) for name in ("broken", "steady")]
    said = []
    speed.measure(cases, arguments(tmp_path, device="cuda"), said.append)
    broken, steady = said
    assert "code 3" in broken["error"] and broken["tail"] == ["what went wrong"] and "rate" not in broken
    assert len(steady["windows"]) == 3 and steady["rate"] > 0
    assert steady["ready"] > 0  # it was stopped there until its turn


def test_without_time_left_nothing_is_measured(speed, tmp_path):
    peer(tmp_path, "steady.py", STEADY)
    said = []
    case = speed.Case("4", "title", "steady", ["steady.py"], 50)
    speed.measure([case], arguments(tmp_path, device="cuda", minutes=0), said.append)
    assert said[0]["error"] == "no time was left"


def test_one_that_is_not_ready_in_time_is_noted(speed, tmp_path):
    peer(tmp_path, "slow.py", "time.sleep(60)")
    said = []
    began = time.monotonic()
    case = speed.Case("4", "title", "slow", ["slow.py"], 50)
    speed.measure([case], arguments(tmp_path, device="cuda", warm_up=1), said.append)
    assert "not ready" in said[0]["error"] and time.monotonic() - began < 60


def test_ours_is_read_from_its_metrics(speed, tmp_path):
    program = speed.Program.__new__(speed.Program)
    program.peer, program.folder = False, tmp_path
    assert program.points() == []
    (tmp_path / "run").mkdir()
    rows = [{"global_step": step, "wall_time": step / 10, "charts/SPS": 10} for step in (10, 20)]
    episode = {"global_step": 15, "wall_time": 1.5, "charts/episodic_return": 1.0}
    text = "\n".join(map(json.dumps, [rows[0], episode, rows[1]])) + '\n{"global_step": 30, "wal'
    (tmp_path / "run/metrics.jsonl").write_text(text)  # the last line is being written
    assert program.points() == [(10, 1.0), (20, 2.0)]


def test_table(speed, tmp_path):
    case = speed.Case("4", "SAC", "SoloRL", [], 0)
    cases = [
        speed.entry(case, rate=300.0, windows=[200.0, 300.0, 400.0]),
        speed.entry(case._replace(name="LeanRL", published="725"), rate=200.0, windows=[190.0, 200.0, 210.0]),
        speed.entry(case._replace(name="CleanRL"), error="no time was left"),
        speed.entry(case._replace(title="whole", name="SoloRL"), seconds=12.5),
    ]
    call = {"date": "2026-11-26", "gpu": "NVIDIA H100, 580", "cores": 16, "versions": {"torch": "2.11"}, "cases": cases}
    (tmp_path / "gpu.json").write_text(json.dumps([call]))
    lines = speed.table(tmp_path / "gpu.json").splitlines()
    assert lines[0].startswith("| SAC | steps/s, median |")
    assert lines[2] == "| SoloRL | 300 | 200 to 400 | 1.50 |  |"
    assert lines[3] == "| LeanRL | 200 | 190 to 210 | 1.00 | 725 |"
    assert lines[4] == "| CleanRL | not measured |  |  |  |"
    assert "| SoloRL | 12.5 |  |  |  |" in lines
    assert lines[-1] == "2026-11-26: NVIDIA H100, 16 cores, torch 2.11"


def test_every_case_names_a_file_and_a_row(speed):
    peers = {target for files in module("peers").CHANGES.values() for target, _ in files.values()} | {"purejax.py"}
    for case in speed.CASES:
        assert case.row in speed.MINUTES
        assert case.words[0] in peers or (ROOT / "algorithms" / case.words[0]).exists()


def test_trainings_name_files_and_options():
    for _, share, words, flags in module("evidence").jobs([]):
        text = Path(words[0]).read_text() + (ROOT / "solorl/args/arguments.py").read_text()
        assert 0 < share <= 1 and all(f"{name.replace('-', '_')}: " in text for name in flags)


def test_archives_are_unpacked_as_they_were(tmp_path, monkeypatch):
    evidence = module("evidence")
    monkeypatch.setattr(evidence, "MOST", 100)  # several parts
    (tmp_path / "job").mkdir()
    (tmp_path / "job/file").write_bytes(bytes(range(256)) * 4)
    out = tmp_path / "out"
    out.mkdir()
    evidence.pack(tmp_path / "job", out)
    assert len(list(out.iterdir())) > 1
    evidence.unpack(out, tmp_path / "new")
    assert (tmp_path / "new/job/file").read_bytes() == (tmp_path / "job/file").read_bytes()


def test_a_wheel_of_some_files(tmp_path):
    wheels = module("wheels")
    files = {
        "envpool/entry.py": '"""All."""\nimport envpool.atari.registration\nimport envpool.box2d.registration\n',
        "envpool/atari/a.so": "1",
        "envpool/box2d/b.so": "2",
        "envpool-1.dist-info/RECORD": "envpool/entry.py,,\nenvpool/atari/a.so,,\nenvpool/box2d/b.so,,\n",
    }
    with zipfile.ZipFile(tmp_path / "old.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    wheels.keep(tmp_path / "old.whl", tmp_path / "new.whl", ["*.py", "*.dist-info/*", "envpool/atari/*"])
    with zipfile.ZipFile(tmp_path / "new.whl") as wheel:
        assert "envpool/box2d/b.so" not in wheel.namelist() and "envpool/atari/a.so" in wheel.namelist()
        assert wheel.read("envpool/entry.py").decode() == '"""All."""\nimport envpool.atari.registration\n'
        assert "box2d" not in wheel.read("envpool-1.dist-info/RECORD").decode()


def test_files_that_no_table_names():
    files = module("files")
    assert "apex_dqn" in files.unseen() and "ppo" not in files.unseen()
    assert files.outcome("", 0) == "yes" and files.outcome("a\nb", 2) == ["a", "b", "exit code 2"]
    assert "Pong-v5" in files.short("ppo_atari_envpool")
    sys.path.remove(str(ROOT / "tests"))
