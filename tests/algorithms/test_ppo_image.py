"""ppo_image.py: which axis has the channels, what an observation is, images of any size, refusals, checkpoints."""

import importlib.util

import cv2
import gymnasium as gym
import numpy as np
import pictures
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows
from gymnasium.vector import SyncVectorEnv

import solorl

IMAGE = definitions("ppo_image")
SHORT = "--num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1 --eval-episodes 1 --size 0".split()


# ---------------------------------------------------------------------- observations
@pytest.mark.parametrize("name", ["ColoursLast", "ColoursFirst", "FourLast", "OneFirst", "OneLast", "TwoAxes"])
def test_the_axis_of_the_channels_is_found(name):
    """The pixel (row, column) of each channel is that of the environment."""
    env = IMAGE["image_env"](f"pictures:{name}-v0", 0, False, 1)
    obs, _ = env.reset(seed=1)
    seen = env.unwrapped.seen[-1]
    first = len(seen) == 3 or len(seen) == 1
    channels = seen if first else [seen] if seen.ndim == 2 else [seen[..., i] for i in range(seen.shape[2])]
    assert obs.shape == (len(channels), 20, 30) == env.observation_space.shape and obs.dtype == np.uint8
    assert all((x == y).all() for x, y in zip(obs, channels, strict=True))


@pytest.mark.parametrize("name", ["Both", "Neither", "Floats"])
def test_without_an_axis_of_channels_the_environment_is_left_as_it_is(name):
    env = IMAGE["image_env"](f"pictures:{name}-v0", 64, False, 4)
    assert env.observation_space == env.unwrapped.observation_space
    assert IMAGE["channels_last"](gym.make("CartPole-v1")) is None


@pytest.mark.parametrize("frames", [1, 3])
def test_an_observation_is_the_last_images_the_newest_last(frames):
    """Before there are as many, the first image stands for those that are missing."""
    env = IMAGE["image_env"]("pictures:ColoursLast-v0", 0, False, frames)
    obs, _ = env.reset(seed=2)
    for _ in range(2):
        for step in range(5):
            seen = env.unwrapped.seen
            images = [seen[max(0, i)] for i in range(step - frames + 1, step + 1)]
            want = np.concatenate([image.transpose(2, 0, 1) for image in images])
            np.testing.assert_array_equal(obs, want)
            obs, *_ = env.step(0)
        obs, _ = env.reset()


def test_images_are_made_grey_and_resized():
    """By the weights of the colours (ITU-R 709), then by the means of areas; other channels stay."""
    grey = IMAGE["image_env"]("pictures:ColoursFirst-v0", 16, True, 2)
    obs, _ = grey.reset(seed=3)
    mixed = np.tensordot([0.2125, 0.7154, 0.0721], grey.unwrapped.seen[0], 1).astype(np.uint8)
    want = cv2.resize(mixed, (16, 16), interpolation=cv2.INTER_AREA)
    np.testing.assert_array_equal(obs, [want, want])
    colour = IMAGE["image_env"]("pictures:ColoursFirst-v0", 16, False, 1)
    obs, _ = colour.reset(seed=3)
    for channel, image in zip(obs, colour.unwrapped.seen[0], strict=True):
        np.testing.assert_array_equal(channel, cv2.resize(image, (16, 16), interpolation=cv2.INTER_AREA))
    already = IMAGE["image_env"]("pictures:TwoAxes-v0", 24, True, 1)
    assert already.reset(seed=3)[0].shape == (1, 24, 24)


# ---------------------------------------------------------------------- the network
@pytest.mark.parametrize("size", [(15, 15), (16, 40), (35, 90), (36, 36), (64, 64), (40, 56), (96, 130)])
def test_the_network_takes_images_of_any_size(size):
    """The convolutions of Mnih et al. where they fit, and bytes from 0 to 255 as numbers from 0 to 1."""
    torch.manual_seed(0)
    agent, obs = IMAGE["Agent"]((6, *size), 4), torch.randint(0, 256, (2, 6, *size), dtype=torch.uint8)
    kernels = [layer.kernel_size[0] for layer in agent.network if isinstance(layer, torch.nn.Conv2d)]
    assert kernels == ([8, 4, 3] if min(size) >= 36 else [3, 3, 3])
    with torch.no_grad():
        logits, value = agent(obs)
        x = obs.float() / 255
        for layer in list(agent.network)[1:]:
            x = layer(x)
    assert logits.shape == (2, 4) and value.shape == (2,) and x.shape == (2, 512)
    torch.testing.assert_close(agent.critic(x).squeeze(1), value)
    assert agent.act(obs.numpy()).tolist() == logits.argmax(1).tolist()


def test_layers_are_orthogonal_with_their_gains():
    for name, parameter in IMAGE["Agent"]((3, 20, 20), 4).named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 0).all(), name
            continue
        gain = {"actor.weight": 0.01, "critic.weight": 1.0}.get(name, 2**0.5)
        w = parameter.detach().double().flatten(1)
        gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram), dtype=w.dtype), atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------- training
def test_a_time_limit_bootstraps_from_the_last_images_of_its_episode(train, monkeypatch):
    infos, step = [], SyncVectorEnv.step

    def note(self, action):
        result = step(self, action)
        infos.append(result[4])
        return result

    monkeypatch.setattr(SyncVectorEnv, "step", note)
    flags = [*SHORT, "--total-timesteps", "16", "--learning-rate", "0", "--num-frames", "2"]
    v = train("ppo_image", "--env-id", "pictures:ColoursLast-v0", *flags)
    assert v["timeout"].sum() == 2 and v["timeout"][4].all() and (v["done"] == v["timeout"]).all()
    with torch.no_grad():
        want = v["agent"](torch.as_tensor(np.stack(list(infos[-8:][4]["final_obs"]))))[1].numpy()
    np.testing.assert_allclose(v["final_value"][4], want, atol=1e-6)
    returns = v["rollout"].returns.reshape(8, 2).numpy()
    np.testing.assert_allclose(returns[4], v["reward"][4] + 0.99 * want, atol=1e-5)
    assert (want != 0).all() and (v["obs"][5, :, :3] == v["obs"][5, :, 3:]).all()  # the next one has a first image


def test_first_ratio_is_one(train):
    flags = [*SHORT, "--num-minibatches", "1", "--total-timesteps", "32", "--learning-rate", "0.01"]
    v = train("ppo_image", "--env-id", "games/MovingDotGrey-v0", *flags)
    assert len(v["kl"]) == 1 and all(abs(v["metrics"][f"losses/{key}"]) < 1e-6 for key in ("approx_kl", "clipfrac"))


def test_evaluation_and_play_see_what_training_sees(train):
    """The flags reach their environments, too, and those of a loaded policy."""
    flags = [*SHORT, "--total-timesteps", "16", "--size", "20", "--grey", "--num-frames", "3"]
    v = train("ppo_image", "--env-id", "pictures:ColoursFirst-v0", *flags)
    space = v["envs"].single_observation_space
    assert space.shape == (3, 20, 20) and v["run"].evaluator._envs[""][0].observation_space == space
    policy = solorl.load(v["run"].dir)
    env = policy.make_env()
    obs, _ = env.reset(seed=1)
    assert env.observation_space == space and policy.sample is not None and obs.shape == (3, 20, 20)
    assert policy(obs[None]).tolist() == v["agent"].act(obs[None]).tolist()


def test_resumed_equals_uninterrupted(train):
    """In the middle of an episode: the images before come back."""
    flags = [*SHORT, "--total-timesteps", "96", "--save-every", "48", "--learning-rate", "0.01", "--size", "16"]
    whole = train("ppo_image", "--env-id", "pictures:ColoursFirst-v0", *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("ppo_image", "--resume", run_dir)
    assert v["start"] == 3 and "restart" not in train.out and comparable(run_dir) == expected
    weights = zip(v["agent"].parameters(), whole["agent"].parameters(), strict=True)
    assert all(torch.equal(x, y) for x, y in weights) and np.array_equal(v["obs"], whole["obs"])


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--env-id games/MovingDot-v0", "--env-id games/MovingDotGrey-v0 --size 0"])
def test_learns_to_compare_two_images(flags, train):
    """Twice the score of random actions, and more; one image tells nothing."""
    fast = "--total-timesteps 24576 --learning-rate 1e-3 --num-minibatches 8 --gamma 0.9 --gae-lambda 0.5"
    v = train("ppo_image", *flags.split(), *fast.split(), "--num-frames", "2", "--eval-every", "0")
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > 0.5


# ---------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("env_id", "flags", "words"),
    [
        ("pictures:Both-v0", "", "images of shape (3, 20, 4) must have 1, 3 or 4 channels on their first or last axis"),
        (
            "pictures:Neither-v0",
            "",
            "images of shape (20, 30, 5) must have 1, 3 or 4 channels on their first or last axis",
        ),
        ("pictures:FourLast-v0", "--grey", "--grey takes images with 1 or 3 channels"),
        ("pictures:Small-v0", "--size 0", "images of (20, 14) pixels are too small"),
        ("pictures:ColoursLast-v0", "--size 14", "images of (14, 14) pixels are too small"),
        ("pictures:Floats-v0", "", "vector observations, but ppo_image.py takes image observations of bytes (uint8)"),
        ("CartPole-v1", "", "has vector observations, but ppo_image.py takes image observations; use ppo.py"),
    ],
)
def test_what_it_cannot_see_is_refused_in_one_sentence(env_id, flags, words, train, tmp_path):
    train("ppo_image", "--env-id", env_id, *flags.split(), code=2)
    assert words in train.out and train.out.count("\n") == 1 and not (tmp_path / "runs").exists(), train.out
    assert set(pictures.SHAPES) > {"Both", "Neither", "FourLast", "Small"}


def test_resizing_without_opencv_is_refused(train, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "cv2" else found(name, *more))
    train("ppo_image", code=2)
    assert "--size needs OpenCV" in train.out and train.out.count("\n") == 1
    train("ppo_image", "--env-id", "pictures:ColoursLast-v0", *SHORT, "--total-timesteps", "16")  # --size 0
