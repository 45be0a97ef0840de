"""The files for images refuse vectors, and the files for vectors images: one sentence that names the file to use."""

import shutil

import numpy as np
import pytest
from pixel_probe import use_fake_envpool

from solorl.catalog import header
from solorl.run.saving import Checkpoints

FILES = {each.name: each for each in header.scripts() if each.framework == "torch"}
PIXELS = [name for name, each in FILES.items() if each.spaces.startswith("image ->")]
VECTORS = [name for name, each in FILES.items() if each.spaces == "vector -> discrete"]


def refused(train, tmp_path, name, env_id):
    """The sentence with which a file refuses an environment; nothing has been written."""
    train(name, "--env-id", env_id, code=2)
    assert train.out.startswith("error: ") and train.out.count("\n") == 1 and not (tmp_path / "runs").exists()
    return train.out


def test_there_are_both_kinds():
    assert {"ppo_atari", "ppo_atari_envpool", "dqn_atari", "sac_atari"} <= set(PIXELS)
    assert {"ppo", "dqn", "sac_discrete"} <= set(VECTORS)


@pytest.mark.parametrize("name", PIXELS)
def test_pixel_files_refuse_vectors(name, train, tmp_path):
    """They name a file of their family that takes vectors and discrete actions."""
    if "envpool" in name:
        pytest.importorskip("envpool")
    sentence, use = refused(train, tmp_path, name, "CartPole-v1"), FILES[name].not_for["vector observations"]
    assert "CartPole-v1" in sentence and f" {use}" in sentence
    other = FILES[use.removesuffix(".py")]
    assert other.spaces == "vector -> discrete" and other.family == FILES[name].family


@pytest.mark.parametrize("name", VECTORS)
def test_vector_files_refuse_images(name, train, tmp_path):
    """They name a file of their family that takes images."""
    sentence, use = refused(train, tmp_path, name, "ALE/Pong-v5"), FILES[name].not_for["Atari games"]
    assert sentence.endswith(f"has image observations, but {name}.py takes vector observations; use {use}\n")
    other = FILES[use.removesuffix(".py")]
    assert other.spaces.startswith("image -> discrete") and other.family == FILES[name].family


@pytest.mark.parametrize(
    "name",
    ["dqn_atari", *(pytest.param(x, marks=pytest.mark.slow) for x in ("c51_atari", "rainbow_atari", "sac_atari"))],
)
def test_no_life_is_lost_where_the_next_game_begins_with_fewer(name, train):
    """A time limit after a bonus life does not end the task, though the next game begins with fewer lives. QDagger and
    Ape-X, which have other flags and buffers, are tested with them."""
    flags = "--env-id pixel_doubles:PixelBonus-v0 --total-timesteps 120 --buffer-size 200 --learning-starts 110".split()
    v = train(name, *flags, "--batch-size", 4, "--eval-episodes", 1, "--eval-every", 0, "--save-every", 0)
    arrays = v["replay"].arrays
    assert np.sum(arrays["back"][:120] == 0) > 3 and not arrays["done"].any()  # 0: the first image of a game


@pytest.mark.parametrize("name", ["ppo_atari_envpool", "pqn_atari_envpool", "pqn_atari_envpool_lstm"])
def test_new_games_of_a_resumed_run_lose_no_life_in_their_first_step(name, train, monkeypatch):
    """EnvPool's games begin again; the lives in the checkpoint are those of games that are gone."""
    use_fake_envpool(monkeypatch)
    flags = "--env-id Catch-v5 --num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1 --total-timesteps 32"
    run_dir = train(name, *flags.split(), "--eval-episodes", 1, "--eval-every", 0, "--save-every", 16)["run"].dir
    shutil.rmtree(sorted((run_dir / "checkpoint").iterdir())[-1])
    resumed, resume = [], Checkpoints.resume

    def noted(self, *inputs):
        found = resume(self, *inputs)
        self.parts["lives"][:] = 9  # a bonus life was saved
        resumed.append(found)
        return found

    monkeypatch.setattr(Checkpoints, "resume", noted)
    v = train(name, "--resume", run_dir)
    assert len(resumed) == 1 and v["start"] == 1 and not v["done"][0].any() and v["done"].any()
