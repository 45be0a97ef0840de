"""`solo plot`: what the axes of the picture hold is what the rows of the runs say."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from conftest import refused

from solorl.lab.results import comparison, figures
from solorl.lab.results import curves as cv
from solorl.lab.results import result as results
from solorl.lab.results import statistics as st
from solorl.lab.results.read import read_all

STEPS = (100, 200, 300, 400)


def a_run(folder, *, env_id="CartPole-v1", script="dqn.py", seed=1, up=0.0, losses=(), status="finished", **more):
    """A run folder with an episode, an evaluation and a row of losses at each of STEPS; `up` is added to returns."""
    folder.mkdir(parents=True)
    config = {"script": script, "args": {"env_id": env_id, "seed": seed, "gamma": 0.99} | more, "started": f"{up}"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "status.json").write_text(json.dumps({"status": status, "global_step": STEPS[-1]}))
    rows = []
    for step in STEPS:
        row = {"global_step": step, "wall_time": step / 10}
        rows.append(row | {"charts/episodic_return": step / 10 + up, "charts/episodic_length": step / 5})
        rows.append(row | {name: step * scale for name, scale in dict(losses).items()})
        rows.append(row | {"eval/episodic_return": step + up, "eval/episodic_return_std": step / 4})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


DQN = {"losses/td_loss": 0.01, "losses/q_values": 0.5}


@pytest.fixture
def plot(solo, tmp_path, monkeypatch):
    """`plot("RUN_DIR", ...)` draws these; returns the axes (upper, upper right, lower, lower right of each environment)
    and what was printed. `plot.figure` is the figure."""
    real = figures.save

    def keep(figure, *rest):
        call.figure = figure
        return real(figure, *rest)

    def call(*words):
        monkeypatch.setattr(figures, "save", keep)
        code, call.out, err = solo("plot", *words, "--out", tmp_path / "picture.png")
        assert code == 0 and err == "" and (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
        axes = call.figure.axes  # the second ones of twins come last within a column
        places = [place for place in axes if place.get_subplotspec() and place.yaxis.get_label_position() == "left"]
        return [(place, next(other for other in axes if twins(place, other))) for place in places]

    return call


def twins(place, other):
    return other is not place and other.get_subplotspec() == place.get_subplotspec()


def lines(place):
    """The points of all lines: [[(x, y), ...], ...]."""
    return [list(zip(*map(np.ndarray.tolist, map(np.asarray, line.get_data())), strict=True)) for line in place.lines]


def edges(collection):
    """x -> lowest and highest point of a filled area."""
    points = collection.get_paths()[0].vertices
    return {x: (points[points[:, 0] == x, 1].min(), points[points[:, 0] == x, 1].max()) for x in points[:, 0].tolist()}


def labels(legend):
    return [text.get_text() for text in legend.get_texts()]


def test_the_panels_hold_what_the_rows_say(plot, tmp_path):
    (upper, length), (lower, loss) = plot(a_run(tmp_path / "run", losses=DQN))
    training, evaluation = lines(upper)
    assert training == [(step, step / 10) for step in STEPS] and evaluation == [(step, step) for step in STEPS]
    assert edges(upper.collections[1]) == {step: (step - step / 4, step + step / 4) for step in STEPS}
    assert edges(length.collections[0]) == {step: (0, step / 5) for step in STEPS}
    assert lines(lower) == [[(step, step * 0.5) for step in STEPS]]
    assert edges(loss.collections[0]) == {step: (0, step * 0.01) for step in STEPS}
    assert [upper.get_ylabel(), length.get_ylabel()] == ["episodic return", "episode length (agent steps)"]
    assert [lower.get_ylabel(), loss.get_ylabel()] == ["mean Q", "critic loss"]
    assert plot.figure.get_supxlabel() == "steps" and upper.get_xlim() == lower.get_xlim()
    assert labels(upper.get_legend()) == [
        "episode length",
        "training episodes",
        "greedy evaluation ± standard deviation",
    ]
    assert labels(lower.get_legend()) == ["critic loss", "mean Q"]
    assert upper.get_legend().get_title().get_text() == "CartPole-v1: dqn" and not plot.figure.legends
    colours = [line.get_color() for line in (*upper.lines, *lower.lines)]
    assert len(set(colours)) == 3 and set(colours) <= set(figures.COLOURS)
    assert upper.get_zorder() > length.get_zorder()  # or the area would cover the lines


def test_seeds_of_one_method_are_one_curve_with_the_band_of_the_report(plot, tmp_path):
    for seed, up in enumerate((0.0, 10.0, 50.0), 1):
        a_run(tmp_path / "runs" / str(seed), seed=seed, up=up, losses=DQN)
    (upper, _), (lower, _) = plot(tmp_path / "runs")
    expected = [[step / 10 + 20 for step in STEPS], [step + 20 for step in STEPS]]
    assert [[y for _, y in line] for line in lines(upper)] == [pytest.approx(ys) for ys in expected]  # of 3 the mean
    assert edges(upper.collections[1]) == {step: (step, step + 50) for step in STEPS}
    assert len(lower.lines) == 1 and "greedy evaluation" in labels(upper.get_legend())
    assert "range of the runs" in plot.figure.get_supxlabel()
    compared = comparison.compare(read_all([tmp_path / "runs"])[0])
    reported = cv.curves(compared, "eval", "steps")["CartPole-v1", "dqn"]
    shown = cv.trainings(read_all([tmp_path / "runs"])[0])["CartPole-v1", "dqn"]["evaluation"]
    assert np.array_equal(shown.y, reported.y) and np.array_equal(shown.band, reported.band)


def test_four_seeds_have_an_interval(plot, tmp_path):
    for seed in range(1, 5):
        a_run(tmp_path / "runs" / str(seed), seed=seed, up=10.0 * seed)
    (upper, _), _ = plot(tmp_path / "runs")
    scores = np.array([400 + 10.0 * seed for seed in range(1, 5)])
    assert edges(upper.collections[1])[400] == pytest.approx(st.interval(st.iqm, [scores]), abs=3)


def test_methods_have_colours_and_environments_panels(plot, tmp_path):
    a_run(tmp_path / "runs" / "a", losses=DQN)
    a_run(tmp_path / "runs" / "b", losses=DQN, gamma=0.5)
    a_run(tmp_path / "runs" / "c", losses=DQN, env_id="Acrobot-v1")
    panels = plot(tmp_path / "runs")
    assert len(panels) == 4  # row by row
    titles = [upper.get_legend().get_title().get_text() for upper, _ in panels[:2]]
    methods = labels(plot.figure.legends[0])
    assert titles == ["CartPole-v1", "Acrobot-v1"] and methods[:2] == ["dqn gamma=0.99", "dqn gamma=0.5"]
    first, second = figures.COLOURS[:2]
    assert [line.get_color() for line in panels[0][0].lines] == [first, second] * 2
    assert [line.get_linestyle() for line in panels[0][0].lines] == [":", ":", "-", "-"]
    assert len(panels[0][1].collections) == len(panels[2][0].lines) == len(panels[2][1].collections) == 2


def test_a_training_is_drawn_while_it_runs(plot, solo, tmp_path):
    run = a_run(tmp_path / "run", status="running")
    refused(solo("report", run, "--out", tmp_path / "report"), "the run is not finished (killed)")
    (upper, _), _ = plot(run)
    assert len(lines(upper)[1]) == 4
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"global_step": 500, "wall_time": 50.0, "eval/episodic_return": 7.0}\n{"global_step": 510, "wa')
    (upper, _), _ = plot(run)
    assert lines(upper)[1][-1] == (500, 7.0)


@pytest.mark.parametrize("command", ["plot", "doctor"])
def test_scores_without_steps_have_no_curve(command, solo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("scores.npz", a=np.ones((3, 2)))
    refused(solo(command, "scores.npz"), "scores.npz holds scores without steps", "solo report")
    assert not Path("curve.png").exists()


def test_the_newest_run_of_a_seed_counts_and_the_others_are_named(plot, tmp_path):
    a_run(tmp_path / "runs" / "old", up=1.0)
    a_run(tmp_path / "runs" / "new", up=2.0)
    (upper, _), _ = plot(tmp_path / "runs")
    assert lines(upper)[1][0] == (100, 102.0)
    assert "old is left out" in plot.out and "new is newer" in plot.out


@pytest.mark.parametrize(
    ("losses", "loss", "value"),
    [
        ({"losses/qf_loss": 1.0, "losses/qf1_loss": 2.0, "losses/qf1_values": 3.0}, 1.0, 3.0),
        ({"losses/qf_loss": 1.0, "losses/qf1_values": 3.0, "losses/qf_values": 4.0}, 1.0, 4.0),
        ({"losses/value_loss": 5.0, "losses/policy_loss": 6.0}, 5.0, None),
        ({}, None, None),
    ],
)
def test_the_critic_is_known_by_its_metrics(plot, tmp_path, losses, loss, value):
    """An axis of which nothing is known has no numbers."""
    _, (lower, right) = plot(a_run(tmp_path / "run", losses=losses))
    assert [dict(line)[100] for line in lines(lower)] == ([] if value is None else [100 * value])
    assert [edges(area)[100] for area in right.collections] == ([] if loss is None else [(0, 100 * loss)])
    assert lower.yaxis.get_visible() == (value is not None) and right.yaxis.get_visible() == (loss is not None)
    wanted = ["critic loss"] * (loss is not None) + ["mean Q"] * (value is not None)
    assert labels(lower.get_legend()) == wanted


def test_many_rows_of_losses_are_drawn_as_means(plot, tmp_path):
    run = a_run(tmp_path / "run")
    rows = [{"global_step": step, "wall_time": 1.0, "losses/q_values": float(step)} for step in range(1, 401)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, (lower, _) = plot(run)
    assert lines(lower) == [[(step, step - 0.5) for step in range(2, 401, 2)]]  # 200 bins of two rows


def test_losses_are_not_stored_in_result_files(plot, tmp_path):
    """So that these stay as small and as equal as they are."""
    [result] = read_all([a_run(tmp_path / "run", losses=DQN)], unfinished=True)[0]
    path = results.write(result, tmp_path / "results")
    assert result.curves["losses/td_loss"][1].tolist() == [1.0, 2.0, 3.0, 4.0] and results.read(path).curves == {}
    assert "losses" not in gzip.decompress(path.read_bytes()).decode()
    (upper, _), (lower, _) = plot(path)
    assert len(upper.lines) == 2 and not lower.lines


def test_a_picture_can_be_svg(solo, tmp_path):
    a_run(tmp_path / "run", losses=DQN)
    code, out, err = solo("plot", tmp_path / "run", "--out", tmp_path / "v1.2.svg")
    assert (code, out, err) == (0, f"picture {tmp_path / 'v1.2.svg'}\n", "")
    assert "<!-- critic loss -->" in (tmp_path / "v1.2.svg").read_text()


def test_what_cannot_be_drawn_is_one_sentence(solo, tmp_path):
    run = a_run(tmp_path / "run")
    refused(solo("plot", run, "--out", tmp_path / "no" / "curve.png"), "the folder ", "no does not exist")
    (run / "metrics.jsonl").write_text("")
    refused(solo("plot", run), "nothing to draw: no episode has ended yet")
