"""What `solo report` gives to a paper: LaTeX, CSV, PDF, and scores as rliable takes them."""

import csv
import os
import re

import numpy as np
import pytest
from conftest import refused
from test_report import SCORES, made, run_of

from solorl import cli
from solorl.lab.results import comparison as cmp
from solorl.lab.results import paper, read, text
from solorl.lab.results import result as results
from solorl.lab.results.gather import named
from solorl.lab.results.read import read_all
from solorl.lab.results.result import ResultError


@pytest.fixture(scope="module")
def compared():
    """A comparison of SCORES."""
    return cmp.compare(named(made()), baseline="old")


def test_signs_are_shown_as_they_are_in_latex():
    assert paper.latex("a_b & 5 % of {x}, -81.4 [-84.5, 0.1], Pong-v5, 1e-3") == (
        r"a\_b \& 5 \% of \{x\}, $-$81.4 [$-$84.5, 0.1], Pong-v5, 1e-3"
    )
    assert paper.latex("\\input{x}~^$#<>|") == (
        r"\textbackslash{}input\{x\}\textasciitilde{}\textasciicircum{}\$\#\textless{}\textgreater{}\textbar{}"
    )


def test_tables_have_the_numbers_of_the_report(compared):
    found = paper.tables(compared)
    bodies = re.findall(r"\\begin\{tabular\}\{(l+)(r+)\}\n\\toprule\n(.*?)\\bottomrule", found, re.DOTALL)
    assert [len(left) for left, _, _ in bodies] == [2, 1]
    for left, right, body in bodies:
        rows = [line for line in body.splitlines() if line.endswith(r" \\")]
        assert all(line.count(" & ") == len(left + right) - 1 for line in rows)
    for row in cmp.env_rows(compared):
        numbers = " & ".join(paper.latex(text.estimate(one)) for one in (row.iqm, row.mean, row.median))
        assert f"& {row.method} & {row.seeds} & {numbers} & {row.steps:,.0f} \\\\" in found
    for method, runs, iqm, *_ in text.total_table(compared)[1]:
        assert f"\n{method} & {runs} & {paper.latex(text.estimate(iqm))} &" in found
    assert found.count("CartPole-v1") == 1 and found.count(r"\midrule") == len(bodies) + 1  # one between environments


def test_the_csv_has_every_point_of_every_run(compared):
    rows = list(csv.DictReader(paper.points(compared).splitlines()))
    assert len(rows) == sum(len(run.eval["mean"]) for runs in compared.groups.values() for run in runs)
    for (env_id, method), runs in compared.groups.items():
        for run in runs:
            own = [row for row in rows if (row["environment"], row["method"]) == (env_id, method)]
            own = [row for row in own if int(row["seed"]) == run.seed]
            assert [float(row["step"]) for row in own] == run.eval["global_step"]
            assert [float(row["return"]) for row in own] == run.eval["mean"]


def test_a_report_reads_the_csv_that_it_writes(compared, tmp_path, solo):
    table = tmp_path / "curves.csv"
    table.write_text(paper.points(compared))
    runs, problems = read_all([table])
    assert not problems and len(runs) == sum(map(len, compared.groups.values()))
    assert paper.points(cmp.compare(named(runs), baseline="old")) == table.read_text()
    code, _, _ = solo("report", table, "--out", tmp_path / "report")
    assert code == 0 and (tmp_path / "report" / "curves.csv").read_text() == table.read_text()


def test_what_has_no_times_has_no_curve_by_time(tmp_path, solo):
    (tmp_path / "x.csv").write_text("environment,method,seed,step,return\nX-v0,a,1,10,3\nX-v0,a,1,20,4\n")
    assert solo("report", tmp_path / "x.csv", "--x", "time", "--out", tmp_path / "report")[0] == 0
    assert {path.stem for path in (tmp_path / "report").glob("*.png")} == {"curves_steps"}
    page = (tmp_path / "report/report.html").read_text()
    assert '"axis":"steps"' in page and "eval time" not in page
    assert "| 20 | - | - |" in (tmp_path / "report/report.md").read_text()


def test_a_csv_of_others_may_have_more_columns_in_any_order(tmp_path):
    lines = ["step,seed,return,method,environment,loss", "20,1,5,a,X-v0,0", "10,1,3,a,X-v0,", "10,2,nan,a,X-v0,0"]
    (tmp_path / "theirs.csv").write_text("\n".join(lines))
    (run,), (problem,) = read_all([tmp_path / "theirs.csv"])
    assert "run 2) is left out: the run is not finished (diverged: a return is not finite)" in problem
    assert (run.env_id, run.script, run.seed, run.global_step) == ("X-v0", "a", 1, 20)
    assert run.eval["global_step"] == [10, 20] and run.eval["mean"] == [3, 5]


def test_a_table_of_excel_is_read(tmp_path):
    """It begins with a byte-order mark."""
    (tmp_path / "x.csv").write_text("environment,method,seed,step,return\nX-v0,a,1,10,3\n", encoding="utf-8-sig")
    (run,), problems = read_all([tmp_path / "x.csv"])
    assert not problems and run.env_id == "X-v0"


@pytest.mark.parametrize(
    "text, why",
    [("a,b\n1,2\n", "has no column environment, method, seed, step, return"),
     ("environment,method,seed,step,return\nX,a,1,2,3\nX,a,one,2,3\n", "is damaged in line 3"),
     ("seed,step,return,environment,method\n1,2,3,X,a\n1,2\n", "is damaged in line 3")],
)  # fmt: skip
def test_another_table_is_refused(tmp_path, solo, text, why):
    (tmp_path / "x.csv").write_text(text)
    refused(solo("report", tmp_path / "x.csv"), why)


def test_scores_are_those_of_the_comparison_and_come_back(compared, tmp_path):
    assert paper.write_all(compared, tmp_path) == []
    with np.load(tmp_path / "scores.npz") as file:
        found = dict(file)
    envs = found.pop("environments").tolist()
    assert list(found) == compared.methods and envs == [f"{env}, normalised" for env in compared.shared]
    for method, table in found.items():
        for i, env in enumerate(compared.shared):
            np.testing.assert_array_equal(table[:, i], compared.scores(env, method, normalised=True))
    again, problems = read_all([tmp_path / "scores.npz"])
    assert problems == []
    same = cmp.compare(again, baseline="old", normalise=False)
    for old, new in zip(text.total_table(compared)[1], text.total_table(same)[1], strict=True):
        assert old[:2] == new[:2]
        assert old[2].value == pytest.approx(new[2].value) and old[2].interval == pytest.approx(new[2].interval)


def test_methods_with_runs_missing_are_cut_and_that_is_said(tmp_path):
    values = {**SCORES, ("Acrobot-v1", "new"): SCORES["Acrobot-v1", "new"][:2]}
    compared = cmp.compare(named(made(values)), baseline="old", normalise=False)
    [note] = paper.write_all(compared, tmp_path)
    assert note == "scores.npz has only the first 2 runs of new on each environment."
    with np.load(tmp_path / "scores.npz") as file:
        assert file["new"].shape == (2, 2) and file["old"].shape == (4, 2)
        assert sorted(file["environments"]) == ["Acrobot-v1", "CartPole-v1"]  # as they are: not normalised


@pytest.mark.parametrize("name", ["environments", "file", "allow_pickle"])
def test_a_method_may_be_called_like_what_the_file_of_scores_has(tmp_path, name):
    values = {(env, {"new": name}.get(method, method)): runs for (env, method), runs in SCORES.items()}
    compared = cmp.compare(named(made(values)), baseline="old", normalise=False)
    assert paper.write_all(compared, tmp_path) == [f"scores.npz calls {name} 'method {name}'."]
    with np.load(tmp_path / "scores.npz") as file:
        assert sorted(file) == ["environments", f"method {name}", "old"] and file["environments"].dtype.kind == "U"
    again, problems = read_all([tmp_path / "scores.npz"])
    assert problems == [] and {run.name for run in again} == {f"method {name}", "old"}


def test_scores_of_others_are_read_without_names(tmp_path, solo):
    np.savez(tmp_path / "theirs.npz", a=np.arange(8.0).reshape(4, 2), b=np.ones((5, 2)))
    runs, problems = read_all([tmp_path / "theirs.npz"])
    assert problems == [] and {run.env_id for run in runs} == {"environment 1", "environment 2"}
    assert sorted(run.eval["mean"][0] for run in runs if run.name == "a") == list(range(8))
    code, out, _ = solo("report", tmp_path / "theirs.npz", "--out", tmp_path / "report")
    assert code == 0 and "all environments" in out


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"a": np.ones(3)}, "a is not a table of numbers"),
        ({"a": np.full((3, 2), np.nan)}, "a is not a table of numbers"),
        ({"a": np.array([["x"]])}, "a is not a table of numbers"),
        ({"a": np.array([[object()]])}, "cannot be read"),
        ({}, "holds no result"),
        ({"a": np.ones((0, 2))}, "holds no result"),
        ({"a": np.ones((3, 2)), "environments": np.array(["one"])}, "a has 2 columns, but there are 1 environments"),
        (b"PK\x03\x04 damaged", "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_damaged_scores_are_refused_in_a_sentence(content, sentence, tmp_path, solo):
    path = tmp_path / "x.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.savez(path, **content)
    with pytest.raises(ResultError, match=sentence):
        read._read(path)
    refused(solo("report", path), sentence)


def test_the_report_has_pictures_for_print_and_says_what_makes_it(tmp_path):
    for seed in (1, 2):
        results.write(run_of("CartPole-v1", "new", seed, 400.0), tmp_path / "runs")
    assert cli.main(["report", str(tmp_path / "runs"), "--title", "It's so", "--out", str(tmp_path / "report")]) == 0
    pdf = (tmp_path / "report/curves_steps.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and b"/FontFile2" in pdf and b"/Type3" not in pdf  # fonts embedded, as TrueType
    assert b"/CreationDate" not in pdf  # the same runs give the same bytes
    command = f"solo report {tmp_path}/runs --title 'It'\"'\"'s so' --out {tmp_path}/report"
    assert f"`{command}`" in (tmp_path / "report/report.md").read_text()
    page = (tmp_path / "report/report.html").read_text()
    assert command.replace("'", "&#x27;").replace('"', "&quot;") in page


def test_a_small_file_of_scores_cannot_ask_for_much_memory(tmp_path):
    path = tmp_path / "scores.npz"
    for table, said in (
        (np.zeros((5_000, 5_000), np.int8), "it unpacks to more than 16,777,216 bytes"),
        (np.zeros((500, 1_000), np.uint8), "500,000 scores, more than the 100,000 that a report can have"),
    ):
        np.savez_compressed(path, ppo=table)
        assert path.stat().st_size < 50_000
        with pytest.raises(ResultError, match=said):
            paper.read_scores(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ResultError, match="it is not a regular file"):
        paper.read_scores(path)
