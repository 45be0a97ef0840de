"""Names in Chinese in pictures: a font that has the signs, or their codes; no warning and no empty box."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont

from solorl import glyphs
from solorl.lab.results import figures
from solorl.run.pictures import draw_learning_curve

NAME = "\u6570\u636e"


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def texts(figure):
    glyphs.legible(figure)
    return [(text.get_text(), text.get_fontfamily()) for text in figure.findobj(glyphs.Text) if text.get_text()]


def test_signs_without_a_font_are_written_as_codes(monkeypatch):
    monkeypatch.setattr(glyphs, "fontManager", SimpleNamespace(ttflist=[]))
    figure = Figure()
    figure.suptitle(f"ppo {NAME}")
    [(words, _)] = texts(figure)
    assert words == r"ppo \u6570\u636e"


def test_a_font_that_has_them_is_taken(monkeypatch):
    """A stand-in for a font of this machine."""
    usual = findfont("DejaVu Sans")
    own = SimpleNamespace(name="Some CJK", fname="cjk.ttf")
    fonts = {
        usual: glyphs.get_font(usual),
        "cjk.ttf": SimpleNamespace(get_charmap=lambda: dict.fromkeys(map(ord, NAME))),
    }
    monkeypatch.setattr(glyphs, "fontManager", SimpleNamespace(ttflist=[own]))
    monkeypatch.setattr(glyphs, "get_font", fonts.__getitem__)
    figure = Figure()
    figure.suptitle(f"ppo {NAME}")
    [(words, family)] = texts(figure)
    assert words == f"ppo {NAME}" and family == ["DejaVu Sans", "Some CJK"]


def test_other_texts_keep_their_font():
    figure = Figure()
    figure.suptitle("ppo \u00e9t\u00e9 \u00b1 \u2212 \u03b1\nB")
    before = [(text.get_text(), text.get_fontfamily()) for text in figure.findobj(glyphs.Text) if text.get_text()]
    assert texts(figure) == before


def test_pictures_with_such_names_are_drawn_without_a_warning(tmp_path):
    row = '{"global_step": 100, "eval/episodic_return": 1.0}\n{"global_step": 200, "eval/episodic_return": 2.0}\n'
    (tmp_path / "metrics.jsonl").write_text(row)
    draw_learning_curve(tmp_path / "metrics.jsonl", tmp_path / "a.png", f"CartPole-v1 {NAME}", 20)
    figures.write_histogram({NAME: np.arange(5.0), "b": np.arange(3.0)}, tmp_path / "b.png")
    assert (tmp_path / "a.png").stat().st_size > 5_000 and (tmp_path / "b.png").stat().st_size > 5_000
