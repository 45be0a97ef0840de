r"""Makes docs/lunarlander.gif from a run: an episode of its best model, small enough for the first page.

    solo train ppo --env-id LunarLander-v3 --total-timesteps 1M --no-clip-vloss --gamma 0.999 --gae-lambda 0.98 \
        --num-envs 8 --num-steps 256 --num-minibatches 32
    python docs/film.py runs/LunarLander-v3__ppo__1__*
"""

import subprocess
import sys
from pathlib import Path

import imageio.v3 as iio
from PIL import Image

FILM = Path(__file__).resolve().parent / "lunarlander.gif"
EVERY, WIDTH = 4, 300  # of the frames, and of each frame in pixels


def main(run_dir, *flags):
    """Film an episode, and write every fourth frame; `flags` are those of `solo play`."""
    subprocess.run(
        [sys.executable, "-m", "solorl.cli", "play", run_dir, "--video", "--episodes", "1", *flags], check=True
    )
    newest = max(Path(run_dir).glob("videos/*.mp4"), key=lambda path: path.stat().st_mtime)
    frames = [Image.fromarray(frame) for frame in iio.imread(newest)[::EVERY]]
    frames = [frame.resize((WIDTH, WIDTH * frame.height // frame.width)) for frame in frames]
    colours = [frame.quantize(32, dither=Image.Dither.NONE) for frame in frames]
    colours[0].save(FILM, save_all=True, append_images=colours[1:], duration=80, loop=0, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
