r"""Makes a film of the first page from a run: an episode of its best model, small enough to be shown there.

    solo train ppo --env-id LunarLander-v3 --total-timesteps 1M --no-clip-vloss --gamma 0.999 --gae-lambda 0.98 \
        --num-envs 8 --num-steps 256 --num-minibatches 32
    python docs/film.py lunarlander runs/LunarLander-v3__ppo__1__*
    python docs/film.py connect_four runs/games_ConnectFour-v0__alphazero_jax__1__* --seed 3
"""

import subprocess
import sys
from pathlib import Path

import imageio.v3 as iio
from PIL import Image

# name -> of how many frames one is taken, the width in pixels, colours, milliseconds of a frame
FILMS = {"lunarlander": (4, 300, 32, 80), "connect_four": (1, 240, 8, 500)}


def main(name, run_dir, *flags):
    """Film an episode; `flags` are those of `solo play`."""
    every, width, number_of_colours, milliseconds = FILMS[name]
    words = ["-m", "solorl.cli", "play", run_dir, "--video", "--episodes", "1", *flags]
    subprocess.run([sys.executable, *words], check=True)
    images = [Image.fromarray(image) for image in iio.imread(Path(run_dir, "videos/play.mp4"))]
    frames = [image.resize((width, width * image.height // image.width)) for image in images[::every] + images[-1:] * 4]
    # one palette for all: the end has all colours, some of them rarely
    palette = frames[-1].quantize(number_of_colours, method=Image.Quantize.MAXCOVERAGE)
    colours = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    film = Path(__file__).with_name(f"{name}.gif")
    colours[0].save(film, save_all=True, append_images=colours[1:], duration=milliseconds, loop=0, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
