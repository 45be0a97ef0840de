"""`solo report`: groups, tables, verdicts, curves, the pages it writes, and regressions against a commit."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import browser
import numpy as np
import pytest
from conftest import refused

from solorl import cli, scripts
from solorl.errors import UsageError
from solorl.lab.results import comparison, figures, paper, run_folder
from solorl.lab.results import curves as cv
from solorl.lab.results import page as report_page
from solorl.lab.results import result as results
from solorl.lab.results import statistics as st
from solorl.lab.results import text as report_text
from solorl.lab.results.read import read_all
from solorl.lab.results.result import Result

# Scores of 4 runs each; on CartPole all of `new` is above all of `old`, on Acrobot the two are alike.
SCORES = {
    ("CartPole-v1", "old"): [100.0, 110.0, 120.0, 130.0],
    ("CartPole-v1", "new"): [200.0, 300.0, 400.0, 500.0],
    ("Acrobot-v1", "old"): [-100.0, -90.0, -110.0, -80.0],
    ("Acrobot-v1", "new"): [-95.0, -85.0, -105.0, -90.0],
}


def run_of(env_id, script, seed, score, **changes):
    """A result whose evaluations rise to `score` in 5 steps and whose training episodes are 10 below them."""
    steps = [1_000 * i for i in range(1, 6)]
    mean = [score - 10.0 * (5 - i) for i in range(1, 6)]
    episodes = [(step, step / 500, value - 10, 50.0) for step, value in zip(steps, mean, strict=True)]
    rows = [(step, step / 500, value, 1.0, 50.0) for step, value in zip(steps, mean, strict=True)]
    values = {
        "args": {"env_id": env_id, "seed": seed, "gamma": 0.99},
        "script_sha256": script,
        "machine": {"cpu": "a CPU", "device": "cpu"},
        "global_step": 5_000,
        "wall_time": 10.0,
        "eval": run_folder.evaluations(rows),
        "train": run_folder.thinned(episodes, 5_000),
        "last_100_episodes": score - 10,
        "sps": 500.0,
        "source": f"{env_id} {script} {seed}",
    }
    return Result(env_id, script, seed, **(values | changes))


def made(scores=SCORES, **changes):
    """A result for each score."""
    return [
        run_of(env_id, script, seed, score, **changes)
        for (env_id, script), values in scores.items()
        for seed, score in enumerate(values, 1)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a result file for each of SCORES."""
    path = tmp_path_factory.mktemp("results")
    for result in made():
        results.write(result, path)
    return path


@pytest.fixture(scope="module")
def report(folder, tmp_path_factory):
    """A report on them."""
    out = tmp_path_factory.mktemp("out") / "report"
    flags = ["--out", str(out), "--baseline", "old", "--title", "A </script><b> & B"]
    assert cli.main(["report", str(folder), *flags]) == 0
    return out


def page_data(text):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)[1])


def panels_of(text):
    """Title of a panel -> its lines, by metric and axis."""
    return {panel["title"]: panel["lines"] for panel in page_data(text)["panels"]}


# ---------------------------------------------------------------------- tables and verdicts
def test_rows_of_environments():
    compared = comparison.compare(made(), baseline="old")
    rows = {(row.env_id, row.method): row for row in comparison.env_rows(compared)}
    assert list(rows)[:2] == [("CartPole-v1", "old"), ("CartPole-v1", "new")]
    row = rows["CartPole-v1", "new"]
    assert (row.seeds, row.steps, row.seconds, row.sps) == (4, 5_000, 10.0, 500.0)
    assert row.iqm.value == row.mean.value == row.median.value == 350.0
    scores = np.array(SCORES["CartPole-v1", "new"])
    assert list(row.iqm.interval) == st.interval(st.iqm, [scores]).tolist()
    assert 200 <= row.mean.interval[0] < 350 < row.mean.interval[1] <= 500


def test_seeds_trained_at_once_share_their_time():
    """The time of the process stands for all of them, so does the speed, and the table says so."""
    alone, at_once = made(), made({("CartPole-v1", "many"): [1.0, 2.0, 3.0]}, together=3)
    found = comparison.compare(alone + at_once)
    table, caption = report_text.table(*report_text.env_table(found)), report_text.table_caption(found)
    assert "| 10 s (3 at once) | 1,500 |" in table and table.count("at once") == 1 and "| 10 s | 500 |" in table
    assert "of seeds trained at once" in caption
    assert "at once" not in report_text.table_caption(comparison.compare(alone))


def test_what_environments_declare_are_columns():
    """The mean over runs; nothing where no run declares any."""
    fetch = ("Fetch-v4", "new")
    some = [run_of(*fetch, seed, 9.0, declared={"success_rate": rate}) for seed, rate in ((1, 0.5), (2, 0.75))]
    compared = comparison.compare([*made(), *some])
    head, table = report_text.env_table(compared)
    assert head[10:] == ["Success rate"] and "success rate and cost" in report_text.table_caption(compared)
    assert {(row[0], row[1]): row[10] for row in table} == dict.fromkeys(SCORES, "-") | {fetch: "0.62"}
    [names, *summary] = report_text.summary(compared)
    assert names[-1] == "success rate" and {len(row) for row in summary} == {len(names)}
    compared = comparison.compare(made())
    assert report_text.env_table(compared)[0][-1] == "Date" and report_text.summary(compared)[0][-1] == "steps"
    assert "success" not in report_text.table_caption(compared)


def test_totals_are_of_normalised_scores():
    compared = comparison.compare(made(), baseline="old")
    method, runs, _, _, mean, gap = report_text.total_table(compared)[1][1]
    cartpole = (np.array(SCORES["CartPole-v1", "new"]) - 22.6) / (475 - 22.6)
    acrobot = (np.array(SCORES["Acrobot-v1", "new"]) + 498.6) / 398.6
    assert (method, runs) == ("new", "8")
    assert mean.value == pytest.approx((cartpole.mean() + acrobot.mean()) / 2)
    assert gap.value == pytest.approx(1 - np.minimum(np.concatenate([cartpole, acrobot]), 1).mean())
    raw = report_text.total_table(comparison.compare(made(), normalise=False))[1]
    assert raw[0][4].value == pytest.approx((115 - 95) / 2)


def test_verdict_counts_environments_and_gives_the_chance():
    (pair,) = comparison.compare(made(), baseline="old").pairs
    assert (pair.better, pair.worse, pair.envs) == (["CartPole-v1"], [], 2)
    acrobot = np.mean(
        [(a > b) + 0.5 * (a == b) for a in SCORES["Acrobot-v1", "new"] for b in SCORES["Acrobot-v1", "old"]]
    )
    assert pair.probability.value == (1 + acrobot) / 2
    assert report_text.verdict(pair) == (
        "new against old: better on 1 of 2 environments, worse on 0, undecided on 1; "
        "P(improvement) = {:.2f} [{:.2f}, {:.2f}].".format(pair.probability.value, *pair.probability.interval)
    )
    (other,) = comparison.compare(made(), baseline="new").pairs
    assert (other.better, other.worse) == ([], ["CartPole-v1"])
    assert other.probability.value == pytest.approx(1 - pair.probability.value)


def test_methods_are_compared_once_in_a_report(monkeypatch):
    """By the rank-sum test, which takes its time: sentences and tables share what it says."""
    compared, tests = comparison.compare(made(), baseline="old"), []
    monkeypatch.setattr(comparison, "direction", lambda x, y: tests.append(x) or 0)
    assert report_text.verdicts(compared) and report_text.tables(compared) and report_text.report(compared, "", [], [])
    assert len(tests) == len(compared.envs) == 2


@pytest.fixture
def catalogue(tmp_path, monkeypatch):
    """`catalogue("dqn_jax", twin="dqn.py")` writes a file into a catalogue that holds nothing else."""
    folder = tmp_path / "package" / "algorithms" / "family"
    folder.mkdir(parents=True)
    monkeypatch.setattr(scripts, "PACKAGE", folder.parent.parent)

    def write(name, **fields):
        lines = "".join(f"{key.capitalize():10}{value}\n" for key, value in fields.items())
        (folder / f"{name}.py").write_text(f'"""{name}.\n\n{lines}"""\n')

    return write


def test_a_file_in_jax_is_compared_with_the_twin_that_its_header_names(catalogue):
    names = ["ppo", "ppo_jax", "dqn", "dqn_jax", "c51_jax", "fast_dqn"]
    for name, twin in {"ppo_jax": "ppo.py", "dqn_jax": "dqn.py", "c51_jax": "c51.py", "fast_dqn": "dqn.py"}.items():
        catalogue(name, twin=twin)
    catalogue("dqn", differs="root of its family")
    runs = made({("CartPole-v1", name): [1.0, 2.0] for name in names})
    runs += made({("CartPole-v1", "dqn"): [3.0], ("CartPole-v1", "dqn_jax"): [4.0]}, variant="tuned")
    runs += made({("CartPole-v1", "ppo_jax"): [5.0]}, variant="wide")
    found = {pair.x: pair.y for pair in comparison.compare(runs, baseline="ppo").pairs}
    assert found == {"dqn": "ppo", "ppo_jax": "ppo", "dqn_jax": "dqn", "c51_jax": "ppo", "fast_dqn": "dqn",
                     "dqn tuned": "ppo", "dqn_jax tuned": "dqn tuned", "ppo_jax wide": "ppo"}  # fmt: skip


def test_three_runs_decide_nothing():
    scores = {key: values[:3] for key, values in SCORES.items()}
    (pair,) = comparison.compare(made(scores), baseline="old").pairs
    assert pair.few and pair.better == []
    assert "too few runs to decide on any environment" in report_text.verdict(pair)


def test_methods_of_which_nothing_can_be_said_share_a_sentence():
    """Those with the same opponent; what can be said of others keeps a sentence of its own."""
    scores = {("A-v0", name): [1.0] * n for name, n in (("old", 4), ("x", 2), ("new", 4), ("y", 3))}
    decided, together = report_text.verdicts(comparison.compare(made(scores), baseline="old"))
    assert decided.startswith("new is not distinguishable from old; P(improvement)")
    assert together.startswith("x, y against old: too few runs to decide on any environment or for an interval")


def test_fewer_than_four_runs_show_their_range(solo, tmp_path, monkeypatch):
    """In tables, figures and the page, and called so: a 95 % interval of three runs is that range, or less."""
    few = {("CartPole-v1", name): scores for name, scores in (("old", [100.0, 130.0]), ("new", [200.0, 300.0, 500.0]))}
    compared = comparison.compare(made(few), baseline="old")
    row = comparison.env_rows(compared)[1]
    assert row.iqm.interval is None and row.iqm.range == row.mean.range == (200.0, 500.0)
    assert report_text.estimate(row.iqm) == "333.3 (200.0 to 500.0)"
    words = "of fewer than 4 runs the range, smallest to largest"
    caption = report_text.table_caption(compared)
    assert words in caption and "95 %" not in caption and words in report_text.lines_caption(compared)
    curves = cv.curves(compared, "eval", "steps")
    curve = curves["CartPole-v1", "new"]
    assert curve.kind == "range" and curve.band[-1].tolist() == [200.0, 500.0]
    figure = figures.draw_curves(compared, curves, {}, "steps")
    assert "range of the runs" in figure.get_supxlabel()
    lines = panels_of(report_page.page(compared, "title", "steps", []))["CartPole-v1"]["eval steps"]
    assert [line["band"] for line in lines] == ["range", "range"]
    monkeypatch.setattr(figures, "save", written)
    for result in made(few):
        results.write(result, tmp_path / "results")
    out = solo("report", tmp_path / "results", "--out", tmp_path / "out")[1]
    assert "IQM (range)" in out and "95 %" not in out

    many = comparison.compare(made(), baseline="old")
    curves = cv.curves(many, "eval", "steps")
    assert {curve.kind for curve in curves.values()} == {"interval"}
    assert "range" not in report_text.table_caption(many) + report_text.lines_caption(many)
    assert "range" not in figures.draw_curves(many, curves, {}, "steps").get_supxlabel()


def test_totals_of_too_few_runs_have_neither_interval_nor_band():
    scores = {key: values[:3] if key[1] == "old" else values for key, values in SCORES.items()}
    compared = comparison.compare(made(scores), baseline="old")
    old, new = (row[2] for row in report_text.total_table(compared)[1])
    assert (old.interval, old.range) == (None, None) and new.interval is not None
    assert "none with fewer than 4 runs on one" in report_text.total_caption(compared)
    for curves in (cv.total_curves(compared, "eval", "steps"), cv.profiles(compared)):
        assert (curves["old"].band == curves["old"].y[:, None]).all() and curves["old"].kind == ""
        assert curves["new"].kind == "interval"
    assert "fewer than" not in report_text.total_caption(comparison.compare(made()))


def test_a_caption_says_where_the_scale_is_that_of_the_runs():
    """It stands in tables.tex, too, which has no notes: no reference is claimed for an environment that has none."""
    odd = made({("Odd-v0", "old"): [1, 2, 3, 4], ("Odd-v0", "new"): [3, 4, 5, 6]})
    assert "Odd-v0 the worst and the best run" in paper.tables(comparison.compare([*made(), *odd]))
    assert "the worst" not in paper.tables(comparison.compare(made()))
    assert "the worst" not in paper.tables(comparison.compare([*made(), *odd], normalise=False))


def test_the_report_gives_the_address_of_its_page(solo, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "save", written)
    monkeypatch.chdir(tmp_path)
    out = solo("report", folder, "--out", "my report")[1]
    address = re.search(r"file://\S+", out)[0]
    assert address == (tmp_path / "my report/report.html").as_uri()


def test_single_runs_have_no_interval():
    """Resampling one run gives that run again: an interval of no width would claim certainty."""
    scores = {(env, name): values[:1] if name == "old" else values for (env, name), values in SCORES.items()}
    compared = comparison.compare(made(scores), baseline="old")
    (pair,) = compared.pairs
    assert pair.probability.interval is None and "P(improvement)" not in report_text.verdict(pair)
    rows = {(row.env_id, row.method): row for row in comparison.env_rows(compared)}
    old, new = rows["CartPole-v1", "old"], rows["CartPole-v1", "new"]
    assert old.iqm.interval is None and report_text.estimate(old.iqm) == str(old.iqm.value)
    assert new.iqm.interval[0] < new.iqm.value < new.iqm.interval[1]
    totals = {row[0]: row[2] for row in report_text.total_table(compared)[1]}
    assert totals["old"].interval is None and totals["new"].interval is not None
    assert "(a single run has none)" in report_text.table_caption(compared)
    assert "single run" not in report_text.table_caption(comparison.compare(made()))


@pytest.mark.parametrize(
    ("runs", "given"),
    [([(2, 2)], False), ([(2, 2)] * 5, False), ([(3, 4)], False), ([(3, 5)], True), ([(4, 4)], True),
     ([(3, 3)] * 2, True), ([(1, 40)], False), ([(40, 1)] * 3, False)],
)  # fmt: skip
def test_too_few_runs_have_no_interval(runs, given):
    """The bootstrap of two runs that are both better gives [1, 1], which chance gives in a third of cases."""
    scores = {}
    for i, (n, m) in enumerate(runs):
        scores |= {(f"E{i}-v0", "new"): [2.0] * n, (f"E{i}-v0", "old"): [1.0] * m}
    (pair,) = comparison.compare(made(scores), baseline="old").pairs
    assert pair.probability == comparison.Estimate(1.0, (1.0, 1.0) if given else None)
    [[_, shown, *_]] = report_text.pair_table(comparison.compare(made(scores), baseline="old"))[1]
    assert shown == (pair.probability if given else "-")  # 1.00 of one run against one says nothing
    sentence = report_text.verdict(pair)
    assert ("P(improvement)" in sentence) == given
    assert not pair.few or ("too few runs" in sentence and ("or for an interval" in sentence) == (not given))


def test_verdict_on_one_environment():
    scores = {key: values for key, values in SCORES.items() if key[0] == "CartPole-v1"}
    compared = comparison.compare(made(scores), baseline="old")
    assert report_text.verdicts(compared) == ["new is better than old; P(improvement) = 1.00 [1.00, 1.00]."]
    assert report_text.total_table(compared)[1] == []


def test_training_metric_is_the_mean_of_the_last_episodes():
    compared = comparison.compare(made(), metric="train")
    assert compared.scores("CartPole-v1", "new").tolist() == [190.0, 290.0, 390.0, 490.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345.6, "12,346"), (489.65000000000003, "489.6"), (489.6499999999999, "489.6"), (-0.001, "0.00"), (1.0, "1.00"),
     (-86.36, "-86.4"), (9.999, "10.00"), (0.0, "0.00")],
)  # fmt: skip
def test_numbers(value, text):
    assert report_text.number(value) == text


# ---------------------------------------------------------------------- what is not alike is said
def notes(runs, **options):
    return " ".join(report_text.notes_on(comparison.compare(runs, **options)))


def test_alike_runs_need_no_notes():
    assert notes(made()) == ""


def test_notes():
    runs = made()
    assert "the worst and best run compared" in notes(
        [*runs, *made({("Odd-v0", "old"): [1, 2], ("Odd-v0", "new"): [3, 4]})]
    )
    assert "2 versions of its script" in notes([*runs, run_of("CartPole-v1", "old", 9, 1.0, script_sha256="other")])
    odd = run_of("CartPole-v1", "old", 9, 1.0, args={"env_id": "CartPole-v1", "seed": 9, "gamma": 0.9})
    assert "The runs of old on CartPole-v1 differ in gamma." in notes([*runs, odd])
    same = run_of("CartPole-v1", "old", 9, 1.0, args=runs[0].args | {"seed": 9, "save_replay": True, "threads": 2})
    assert notes([*runs, same]) == ""  # what cannot change a result
    assert "2 kinds of machines" in notes([*runs, run_of("CartPole-v1", "old", 9, 1.0, machine={"cpu": "other"})])
    longer = [run_of("CartPole-v1", "longer", seed, 1.0, global_step=9_000) for seed in (1, 2)]
    assert "On CartPole-v1 the methods trained for 5,000 to 9,000 steps." in notes([*runs, *longer])
    assert "longer has no runs on Acrobot-v1" in notes([*runs, *longer])
    bare = run_of("CartPole-v1", "bare", 1, 1.0, eval={})
    assert "training episodes are compared" in notes([*runs, bare])
    assert "Left out, because they have no eval scores: CartPole-v1 bare 1." in notes([*runs, bare], metric="eval")


def test_unknown_environments_are_scaled_by_the_runs():
    compared = comparison.compare(made({("Odd-v0", "old"): [1.0, 2.0], ("Odd-v0", "new"): [3.0, 5.0]}))
    assert compared.scores("Odd-v0", "new", normalised=True).tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("names", "baseline"),
    [
        (["c51", "dqn"], "dqn"),
        (["double_dqn", "dueling_dqn", "d3qn"], "double_dqn"),  # d3qn names both: the first
        (["sac_discrete", "ddpg_continuous_action"], "ddpg_continuous_action"),
        (["a_peer", "c51", "dqn"], "dqn"),
        (["sb3_ppo", "ppo"], "sb3_ppo"),
        (["dqn_jax", "dqn"], "dqn_jax"),
    ],
)
def test_the_baseline_is_what_the_others_derive_from(names, baseline):
    """As the header says, also over a file that is not there; else the first, as where an order is given."""
    runs = made({("CartPole-v1", name): [1.0, 2.0] for name in names})
    assert comparison.compare(runs).baseline == baseline
    assert comparison.compare(runs, as_given=True).baseline == names[0]


def test_methods_in_the_order_given_begin_with_the_baseline(solo, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "save", written)
    for result in made({("CartPole-v1", "c51"): [1.0, 2.0], ("CartPole-v1", "dqn"): [3.0, 4.0]}):
        results.write(result, tmp_path / "results")
    for words, sentence in (((), "c51 against dqn"), (("--methods", "c51", "dqn"), "dqn against c51")):
        code, out, _ = solo("report", tmp_path / "results", "--out", tmp_path / "out", *words)
        assert code == 0 and f"\n{sentence}: " in out


# ---------------------------------------------------------------------- curves
def test_curves_by_steps_and_by_time():
    compared = comparison.compare(made())
    curve = cv.curves(compared, "eval", "steps")["CartPole-v1", "new"]
    assert curve.x.tolist() == [1_000, 2_000, 3_000, 4_000, 5_000]
    assert curve.y.tolist() == [310.0, 320.0, 330.0, 340.0, 350.0]
    assert curve.seeds["2"].tolist() == [260.0, 270.0, 280.0, 290.0, 300.0]
    assert curve.band[-1].tolist() == st.interval(st.iqm, [np.array(SCORES["CartPole-v1", "new"])], reps=1_000).tolist()
    assert cv.curves(compared, "eval", "time")["CartPole-v1", "new"].x.tolist() == [2, 4, 6, 8, 10]


def test_runs_that_stop_early_shorten_the_curve():
    short = run_of("CartPole-v1", "old", 9, 100.0)
    short = run_of("CartPole-v1", "old", 9, 100.0, eval={name: column[:3] for name, column in short.eval.items()})
    curve = cv.curves(comparison.compare([*made(), short]), "eval", "steps")["CartPole-v1", "old"]
    assert (curve.x[0], curve.x[-1]) == (1_000, 3_000)


def slow(seed, first, last, score=100.0):
    """A run with evaluations at these two times."""
    rows = [(1_000, first, score - 10, 1.0, 50.0), (5_000, last, score, 1.0, 50.0)]
    return run_of("CartPole-v1", "old", seed, score, eval=run_folder.evaluations(rows), wall_time=last)


@pytest.mark.parametrize(
    ("times", "axis", "kept"),
    [
        ([(1, 10), (1.2, 11), (1.1, 900)], (1.2, 11), 3),  # stalled after its first evaluation
        ([(1, 10), (1.2, 11), (601, 611)], (1.2, 10), 2),  # and before it
        ([(1, 10), (601, 611)], (1, 10), 1),
        ([(5, 10), (7, 12), (5, 10), (5, 10)], (7, 10), 4),  # within chance
        ([(1, 10), (2, 20), (3, 30), (3.1, 40)], (3.1, 20), 4),
    ],
)
def test_a_stalled_run_hides_nothing_of_the_curve_by_time(times, axis, kept):
    compared = comparison.compare([slow(seed, *time) for seed, time in enumerate(times, 1)])
    curve = cv.curves(compared, "eval", "time")["CartPole-v1", "old"]
    assert (curve.x[0], curve.x[-1], len(curve.seeds)) == (*axis, kept)
    left_out = [note for note in report_text.notes_on(compared) if "curves by time" in note]
    assert len(left_out) == (kept < len(times)) and all(f"old {len(times)}" in note for note in left_out)
    assert len(cv.curves(compared, "eval", "steps")["CartPole-v1", "old"].seeds) == len(times)


def test_a_stalled_run_hides_nothing_of_all_environments_by_time():
    """The axis is that of the environment that takes longest."""
    runs = [slow(seed, *time) for seed, time in enumerate([(1, 10), (1, 10), (601, 611)], 1)]
    long = [replace(slow(seed, 2, 50), env_id="Acrobot-v1") for seed in (1, 2)]
    curve = cv.total_curves(comparison.compare([*runs, *long]), "eval", "time")["old"]
    assert (curve.x[0], curve.x[-1]) == (2, 50)


def test_training_curves_are_means_over_the_last_bins_weighted_by_episodes():
    train = {"global_step": list(range(1, 13)), "wall_time": list(range(12)), "return": [0.0] * 10 + [5.0, 9.0],
             "length": [1] * 12, "episodes": [1] * 10 + [10, 1]}  # fmt: skip
    x, y = cv.points(run_of("CartPole-v1", "old", 1, 1.0, train=train), "train", "steps")
    assert x.tolist() == [10, 11, 12]
    assert y.tolist() == pytest.approx([0, 50 / 19, 59 / 19])


def test_runs_without_training_episodes_have_curves_of_evaluations_only(tmp_path, solo):
    """As offline, where no episode is played in training."""
    for result in made(train=run_folder.thinned([], 5_000)):
        results.write(result, tmp_path / "results")
    assert solo("report", tmp_path / "results", "--out", tmp_path / "out")[0] == 0
    panels = panels_of((tmp_path / "out/report.html").read_text())
    assert {key for lines in panels.values() for key in lines} == {"eval steps", "eval time", "score"}


def test_sample_efficiency_is_the_iqm_of_normalised_curves():
    curve = cv.total_curves(comparison.compare(made()), "eval", "steps")["new"]
    last = [
        (np.array(SCORES["CartPole-v1", "new"]) - 22.6) / 452.4,
        (np.array(SCORES["Acrobot-v1", "new"]) + 498.6) / 398.6,
    ]
    assert curve.y[-1] == pytest.approx(float(st.iqm(last)))


def test_profile_falls_from_one_to_zero():
    """Also where runs score exactly 0, the least on the axis of most reports."""
    at_zero = made({("MountainCar-v0", name): [-200.0] * 4 for name in ("old", "new")})
    for curve in cv.profiles(comparison.compare(made() + at_zero)).values():
        assert curve.y[0] == 1 and curve.y[-1] == 0
        assert (np.diff(curve.y) <= 0).all()
        assert (curve.band[:, 0] <= curve.y).all() and (curve.y <= curve.band[:, 1]).all()


def test_a_row_has_the_date_of_its_oldest_run():
    days = ["2026-11-24T01:00:00Z", "2026-11-23T23:00:00Z", ""]
    runs = made({("CartPole-v1", "new"): [1.0] * 3})
    runs = [replace(run, started=day) for run, day in zip(runs, days, strict=True)]
    [row] = comparison.env_rows(comparison.compare(runs))
    assert row.date == "2026-11-23"


# ---------------------------------------------------------------------- what is written
def test_markdown_report(report):
    text = (report / "report.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| CartPole-v1 | new"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2] == "4" and cells[6:] == ["5,000", "10 s", "500", "-"]  # no date is known
    assert re.fullmatch(r"350\.0 \[\d{3}\.\d, \d{3}\.\d\]", cells[3])
    assert "**new against old: better on 1 of 2 environments" in text
    for name in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (report / name).stat().st_size > 5_000
    assert text.count("![") == 3


def test_figures_are_pictures_and_the_same_each_time(report, folder, tmp_path):
    for name in ("curves_steps", "curves_time", "profiles"):
        assert (report / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n")
        assert ElementTree.parse(report / f"{name}.svg").getroot().tag.endswith("svg")
    text = (report / "curves_steps.svg").read_text()
    assert all(f"<!-- {words} -->" in text for words in ("CartPole-v1", "Acrobot-v1", "steps", "new", "old"))
    compared = comparison.compare(read_all([folder])[0], baseline="old")
    found = cv.curves(compared, "eval", "steps")
    figure = figures.draw_curves(compared, found, cv.total_curves(compared, "eval", "steps"), "steps")
    line = figure.axes[1].lines[1]
    assert (line.get_color(), line.get_ydata()[-1]) == ("#D55E00", 350.0)
    figures.save(figure, tmp_path / "again")
    assert (tmp_path / "again.svg").read_text() == text
    assert (tmp_path / "again.png").read_bytes() == (report / "curves_steps.png").read_bytes()


class Tags(HTMLParser):
    """All tags, and all attributes that could load something."""

    def __init__(self):
        super().__init__()
        self.tags, self.loads, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_loads_nothing_from_elsewhere(report):
    text = (report / "report.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == [] and tags.loads == []
    assert "link" not in tags.tags and "@import" not in text and "fetch(" not in text
    assert re.findall(r"https?://[^\s\"'<]+", text) == ["https://github.com/leeoniya/uPlot"]  # in a comment
    assert tags.tags.count("script") == 3 and "{{" not in text
    assert "<h1>A &lt;/script&gt;&lt;b&gt; &amp; B</h1>" in text


def test_page_has_the_numbers_of_the_curves(report):
    data = page_data((report / "report.html").read_text())
    assert data["methods"] == ["old", "new"]
    panels = panels_of((report / "report.html").read_text())
    new = next(line for line in panels["CartPole-v1"]["eval steps"] if line["m"] == 1)
    assert new["x"] == [1_000, 2_000, 3_000, 4_000, 5_000] and new["y"] == [310, 320, 330, 340, 350]
    assert new["seeds"]["4"] == [460, 470, 480, 490, 500]
    assert all(low <= y <= high for low, y, high in zip(new["lo"], new["y"], new["hi"], strict=True))
    assert panels["CartPole-v1"]["eval time"][0]["x"] == [2, 4, 6, 8, 10] and panels["CartPole-v1"]["train steps"]
    assert list(panels)[-2:] == ["all environments, normalised", "Fraction of runs above a score"]
    assert [len(line["x"]) for line in panels["Fraction of runs above a score"]["score"]] == [101, 101]


def test_names_cannot_break_the_page():
    runs = made() + [run_of("CartPole-v1", "old", seed, 1.0, variant="</script><script>x") for seed in (1, 2)]
    text = report_page.page(comparison.compare(runs), "title", "steps", ["</ul><script>"])
    tags = Tags()
    tags.feed(text)
    assert tags.open == [] and tags.tags.count("script") == 3
    assert "old </script><script>x" in page_data(text)["methods"]


NASTY = ("<!--<script>[x](http://e.org)", "<img src=x onerror=alert(1)>a|b", "$x^$\x1b[2J")


def test_no_name_does_more_than_name(solo, tmp_path):
    """In the page, in Markdown, in the pictures and on the terminal."""
    for name in NASTY:
        results.write(run_of("E" + "".join(NASTY), f"s{name}", 1, 1.0, variant=f"v{name}"), tmp_path / "results")
    code, out, err = solo("report", tmp_path / "results", "--out", tmp_path / "out", "--title", "<b>")
    assert code == 0 and err == "" and "\x1b" not in out and r"s$x^$\x1b[2J v$x^$\x1b[2J" in out
    page, text = ((tmp_path / "out" / name).read_text() for name in ("report.html", "report.md"))
    inside = re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)[1]
    assert "<" not in inside and set(page_data(page)["methods"]) >= {f"s{name} v{name}" for name in NASTY[:-1]}
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and tags.loads == [] and tags.tags.count("script") == 3
    assert not re.search(r"<[a-z!]|[^!]\[[^\]]*\]\((?!\w+\.png)", text) and "# &lt;b&gt;" in text
    assert "1)&gt;a\\|b |" in text


def test_columns_of_the_profile_span_all_shares(report):
    """Its vertical axis is fixed: a profile that begins at 0.75 shows how far it is from 1."""
    text = (report / "report.html").read_text()
    assert '=== "score" ? {y: {range: [-0.02, 1.02]}}' in text
    assert all(line["y"][0] == 1 for line in panels_of(text)["Fraction of runs above a score"]["score"])


@pytest.mark.slow
def test_the_page_works_in_a_browser(report, tmp_path):
    """Methods, seeds, metric and axis can be switched, and the values be read, also with the keyboard."""
    if not browser.find():
        pytest.skip("there is no Chromium")
    page = browser.Browser(tmp_path / "profile")
    try:
        assert page.open(report / "report.html", 1280) == []
        count = "document.querySelectorAll('.chart canvas').length"
        assert page.run(count) == 4  # two environments, both together, the profile
        click = "[...document.querySelectorAll('.controls button')].find(each => each.textContent === '{}').click()"
        key = "new KeyboardEvent('keydown', {key: 'ArrowRight'})"
        said = "done(document.querySelectorAll('.values')[1].textContent)"
        values = f"document.querySelectorAll('[role=img]')[1].dispatchEvent({key}); "
        values += f"new Promise(done => setTimeout(() => {said}, 90))"
        assert re.fullmatch(r"1k  ·  old 75\.0 \[.*\]  ·  new 310\.0 \[.*\]", page.run(values))
        for name in ("single seeds", "by time of training", "training"):
            page.run(click.format(name))
        assert re.match(r"10 s  ·  old .*·  new .*·  nearest: new, seed 4:", page.run(values))  # of one bin
        page.run(click.format("old"))
        assert page.run(count) == 4 and "old" not in page.run(values)
        page.run(click.format("new"))
        assert page.run(count) == 0
    finally:
        page.close()


# ---------------------------------------------------------------------- pictures of many methods
def written(figure, path, *_):
    """In place of drawing, which takes long."""
    path.with_suffix(".png").write_bytes(b"")
    return path.with_suffix(".png")


def test_a_name_that_ends_in_jax_is_no_twin(catalogue):
    catalogue("dqn_jax", differs="root of its family")
    runs = made({("CartPole-v1", name): [1.0, 2.0] for name in ("ppo", "dqn", "dqn_jax", "unknown_jax")})
    found = {pair.x: pair.y for pair in comparison.compare(runs, baseline="ppo").pairs}
    assert set(found.values()) == {"ppo"}


def test_a_picture_has_at_most_four_methods(catalogue):
    """Each next to its opponent, all of them somewhere, with the colour that they have in the page."""
    names = ["ddpg", "td3", "sac", "ddpg_jax", "td3_jax", "sac_jax"]
    for name in names[3:]:
        catalogue(name, twin=f"{name.removesuffix('_jax')}.py")
    runs = made({("CartPole-v1", name): [1.0, 2.0] for name in names} | {("Acrobot-v1", "other"): [1.0]})
    compared = comparison.compare(runs)
    assert cv.split(compared) == [names[:4], ["td3", "sac", "td3_jax", "sac_jax"], ["other"]]
    curves = cv.curves(compared, "eval", "steps")
    parts = cv.pictures(compared, curves)
    assert [{env for env, _ in part} for part in parts] == [{"CartPole-v1"}, {"CartPole-v1"}, {"Acrobot-v1"}]
    assert {key for part in parts for key in part} == curves.keys()
    figure = figures.draw_curves(compared, parts[1], {}, "steps")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["td3", "sac", "td3_jax", "sac_jax"]
    assert [line.get_color() for line in figure.axes[0].lines] == [figures.COLOURS[i] for i in (1, 2, 4, 5)]
    four = comparison.compare(made({("CartPole-v1", name): [1.0] for name in names[:4]}))
    (part,) = cv.pictures(four, cv.curves(four, "eval", "steps"))
    assert [method for _, method in part] == names[:4]


def test_pictures_of_many_methods_are_all_shown(solo, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "save", written)
    for result in made({("CartPole-v1", f"m{i}"): [1.0, 2.0] for i in range(6)}):
        results.write(result, tmp_path / "results")
    assert solo("report", tmp_path / "results", "--out", tmp_path / "out")[0] == 0
    shown = re.findall(r"!\[(.*?)\]\((.*?)\)", (tmp_path / "out/report.md").read_text())
    assert [name for _, name in shown] == [f"curves_{axis}{i}.png" for axis in ("steps", "time") for i in ("", "_2")]
    assert shown[1][0] == "curves, by steps 2" and all((tmp_path / "out" / name).exists() for _, name in shown)


def test_report_says_what_it_could_not_read(solo, folder, tmp_path):
    for path in folder.glob("CartPole-v1__*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "CartPole-v1__new__4.json.gz").write_bytes(b"rubbish")
    code, out, _ = solo("report", tmp_path, "--out", tmp_path / "report", "--x", "time")
    assert code == 0
    assert "CartPole-v1__new__4.json.gz cannot be read" in out
    assert "CartPole-v1__new__4.json.gz cannot be read" in (tmp_path / "report/report.md").read_text()
    assert page_data((tmp_path / "report/report.html").read_text())["start"]["axis"] == "time"
    assert re.search(r"CartPole-v1 +new +3 +300\.0 \(200\.0 to 400\.0\)", out)


def test_only_some_environments_and_methods(solo, folder, tmp_path, monkeypatch):
    """The first method named is the one compared with."""
    monkeypatch.setattr(figures, "save", written)
    command, page = ("report", folder, "--out", tmp_path), tmp_path / "report.md"
    assert solo(*command, "--env-ids", "CartPole-v1", "--methods", "old", "new")[0] == 0
    assert "**new is better than old" in page.read_text() and "Acrobot" not in page.read_text()
    assert solo(*command, "--methods", "new")[0] == 0
    table = page.read_text().partition("## Results")[2].partition("## All")[0]
    rows = [line.split(" | ")[:2] for line in table.splitlines() if line.startswith("| ")][2:]
    assert sorted(rows) == [["| Acrobot-v1", "new"], ["| CartPole-v1", "new"]]
    apart = made({("CartPole-v1", "old"): [1.0], ("Acrobot-v1", "new"): [2.0]})
    with pytest.raises(UsageError, match="new has no result on CartPole-v1"):
        comparison.only(apart, ["CartPole-v1"], ["new"])


# ---------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "needs run folders or results"),
        (["/nowhere"], "nothing to report: there is no /nowhere"),
        (["F", "--baseline", "odl"], "there is no method odl; did you mean old?"),
        (["F", "--baseline", "xyz"], "there is no method xyz; there is new, old"),
        (["F", "--env-ids", "Acrobat-v1"], "no result is of environment Acrobat-v1; did you mean Acrobot-v1?"),
        (["F", "--methods", "old", "xyz"], "no result is of method xyz; there is new, old"),
        (["F", "--metric", "reward"], "invalid choice: 'reward'"),
        (["F", "--metrik", "eval"], "has no flag --metrik; did you mean --metric?"),
        (["F", "--out", "/dev/null/x"], "/dev/null/x cannot be written"),
    ],
)
def test_mistakes_are_one_sentence(solo, folder, words, sentence):
    refused(solo("report", *[folder if word == "F" else word for word in words]), sentence)


def test_a_run_without_any_score_does_not_decide_what_is_compared():
    none = run_of("CartPole-v1", "old", 9, 1.0, eval={}, train={}, last_100_episodes=None)
    assert comparison.compare([*made(), none]).metric == "eval"
    played = run_of("CartPole-v1", "old", 9, 1.0, eval={})
    assert comparison.compare([*made(), none, played]).metric == "train"


def test_no_run_has_the_metric():
    with pytest.raises(UsageError, match="none of the 1 results has evaluations"):
        comparison.compare([run_of("CartPole-v1", "old", 1, 1.0, eval={})], metric="eval")
