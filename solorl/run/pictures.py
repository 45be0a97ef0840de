"""What is to be seen of a run: films of episodes, and the learning curve."""

import contextlib
import os
import traceback
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from solorl.errors import refuse
from solorl.files import write_atomically
from solorl.machine import no_display
from solorl.run.evaluation import EPISODES, SCORE, Policy, open_game, play_episodes
from solorl.runfolder import read_rows
from solorl.terminal import warn

NO_EGL = "MuJoCo draws without a display by EGL, which fails (on Debian: apt-get install libegl1 libgl1): "
# What errors say where an environment draws no pictures: Gymnasium's, that of an environment, ours.
NOT_DRAWN = (
    "unsupported render mode", "keyword argument 'render_mode'", "no render_modes", "NotImplementedError",
    "draws no pictures",
)  # fmt: skip
DRAWN = ("global_step", "charts/episodic_return", SCORE, "eval/episodic_return_std", EPISODES)


def enlarged(frame: Any) -> np.ndarray:
    """An image (height, width, 3), three times as large where its shorter side is below 200 pixels, as Atari's."""
    refuse(frame is None, "the environment draws no pictures")
    frame = np.asarray(frame)
    return frame.repeat(3, axis=0).repeat(3, axis=1) if min(frame.shape[:2]) < 200 else frame


def film(env: gym.Env, policy: Policy, seed: int, path: Path) -> float:
    """Play one episode in an environment made with `render_mode="rgb_array"` and write it as H.264 to `path`.

    Returns the episode's return, with several agents that of the first team. The file appears whole or not at all.
    """
    import imageio.v2 as imageio

    temporary = path.with_name(f".{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.unlink(missing_ok=True)  # it may be a link
    fps = env.metadata.get("render_fps") or 30
    even = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2"]  # H.264 has no odd sizes
    video: Any
    with imageio.get_writer(temporary, format="FFMPEG", fps=fps, macro_block_size=1, output_params=even) as video:
        returns, _ = play_episodes([env], policy, [seed], lambda: video.append_data(enlarged(env.render())))
    temporary.replace(path)
    return float(returns[0])


def film_to(run_dir: Path, name: str, seed: int, policy: Policy, make_env: Any, env_id: str) -> Path | None:
    """Film one episode into a file in `videos`; returns its path, or None, with a warning, where that fails."""
    path = run_dir / "videos" / name
    if no_display():
        os.environ.setdefault("MUJOCO_GL", "egl")  # also where it is missing, so that the error names it
    try:
        run_dir.stat()  # FileNotFoundError where it was moved or removed: it must not be made again
        with contextlib.closing(open_game(make_env, env_id, "rgb_array", seed)) as env:
            film(env, policy, seed, path)
    except Exception as error:  # no renderer, no codec, no space: a film is not worth a training
        frames = {frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)}
        drawing = any(name.startswith(("gymnasium.envs.mujoco.mujoco_r", "mujoco.", "OpenGL")) for name in frames)
        what = f"{NO_EGL * (drawing and no_display())}{type(error).__name__}: {error}"
        warn(f"no video: {'the environment draws no pictures' if any(x in what for x in NOT_DRAWN) else what}")
        return None
    return path


def draw_learning_curve(metrics: Path, picture: Path, title: str, episodes: int) -> None:
    """Draw training returns (grey, and their running mean) and evaluations (mean and standard error, of `episodes`
    where a row does not say how many) from `metrics.jsonl` into a PNG; lines that cannot be read are left out."""
    from io import BytesIO

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    rows = []
    for row in read_rows(metrics)[0] if metrics.exists() else []:
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            rows.append([float(row.get(name, "nan")) for name in DRAWN])
    step, episode, score, std, count = np.array(rows, float).reshape(-1, len(DRAWN)).T
    train, test = np.isfinite(step + episode), np.isfinite(step + score)
    axes: Any = Figure(figsize=(7, 4), dpi=120, layout="constrained").subplots()
    if train.any():
        window = max(1, min(100, train.sum() // 10))
        mean = np.convolve(episode[train], np.ones(window) / window, "valid")
        axes.plot(step[train], episode[train], ".", color="#b8b8b8", markersize=2, label="training episodes")
        axes.plot(step[train][window - 1 :], mean, color="#7a7a7a", label=f"mean of {window} episodes")
    if test.any():
        number = np.where(np.isfinite(count), count, episodes)[test]
        error = np.nan_to_num(std[test]) / np.maximum(1, number - 1) ** 0.5  # the band is within the episodes' returns
        width = 8 if test.sum() == 1 else 0  # of the edge: a single evaluation has a bar
        low, high = score[test] - error, score[test] + error
        axes.fill_between(step[test], low, high, color="#1f6feb", alpha=0.15, linewidth=width)
        axes.plot(step[test], score[test], "o-", color="#1f6feb", ms=3, label="greedy evaluation, standard error")
    axes.set(title=title, xlabel="environment steps", ylabel="episodic return")
    axes.set_xlim(0, 1.05 * max([1, *step[train | test]]))  # also around a single point
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if (train | test).any():
        axes.legend(frameon=False)
    data = BytesIO()
    FigureCanvasAgg(axes.figure).print_png(data)
    write_atomically(picture, data.getvalue())
