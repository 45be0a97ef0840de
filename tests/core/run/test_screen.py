"""Films of MuJoCo on a machine without a display."""

import ctypes
import os
import sys

import pytest
from conftest import run

from solorl.machine import without_screen

FILM = """
import sys
from pathlib import Path
from solorl.machine import without_screen
without_screen()
import gymnasium as gym, numpy as np
from solorl.run.pictures import film_to
folder = Path(sys.argv[1])
make_env = lambda env_id, **kwargs: gym.wrappers.TimeLimit(gym.make(env_id, **kwargs), 2)
print(film_to(folder, "a.mp4", 1, lambda obs: np.zeros((1, 1)), make_env, "InvertedPendulum-v5"))
"""


@pytest.fixture
def variables(monkeypatch):
    """The environment variables of a machine without a display."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "SDL_VIDEODRIVER"):
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "platform", "linux")
    return monkeypatch


def test_mujoco_draws_by_egl_where_there_is_no_display(variables):
    variables.setattr(ctypes, "CDLL", lambda name: name)
    without_screen()
    assert (os.environ["MUJOCO_GL"], os.environ["SDL_VIDEODRIVER"]) == ("egl", "dummy")
    variables.setenv("MUJOCO_GL", "osmesa")  # what the user says stays
    without_screen()
    assert os.environ["MUJOCO_GL"] == "osmesa"


def test_mujoco_can_be_imported_where_egl_is_missing(variables):
    def fails(name):
        raise OSError(f"{name}: cannot open shared object file")

    variables.setattr(ctypes, "CDLL", fails)
    without_screen()
    assert "MUJOCO_GL" not in os.environ


def test_a_display_is_used(variables):
    variables.setenv("DISPLAY", ":0")
    without_screen()
    assert "MUJOCO_GL" not in os.environ and "SDL_VIDEODRIVER" not in os.environ


def test_a_film_without_libegl_is_one_sentence(tmp_path, variables):
    pytest.importorskip("mujoco")
    for name in ("libEGL.so.1", "libEGL.so"):
        (tmp_path / name).write_text("not a library")
    variables.setenv("LD_LIBRARY_PATH", str(tmp_path))
    done = run(sys.executable, "-c", FILM, tmp_path)
    assert done.returncode == 0 and done.stdout == "None\n", done.stderr
    said = [line for line in done.stderr.splitlines() if "no video" in line]
    assert len(said) == 1 and "Traceback" not in done.stderr and "GLFW" not in done.stderr, done.stderr
    assert "without a display by EGL, which fails (on Debian: apt-get install libegl1 libgl1)" in said[0]
