"""dqn_image.py: its replay buffer against one of whole observations, what it stores, refusals, checkpoints."""

import numpy as np
import pictures
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint
from gymnasium.vector import SyncVectorEnv

import solorl

IMAGE = definitions("dqn_image")
CPU = torch.device("cpu")
SHORT = (
    "--num-envs 2 --train-frequency 4 --target-network-frequency 8 --learning-starts 16 --batch-size 4 "
    "--eval-episodes 1 --size 0 --num-frames 2 --buffer-size 60"
).split()


# ---------------------------------------------------------------------- the replay buffer
class Whole:
    """Every transition with its two whole observations. It can be drawn while all its images are among the last
    `capacity` ones."""

    def __init__(self, capacity, num_envs, num_frames):
        self.capacity, self.num_frames, self.inserted = capacity, num_frames, 0
        self.last, self.kept = [None] * num_envs, {}  # last images and their numbers; number of the row -> transition

    def begin(self, env, image):
        self.last[env] = [(self.inserted, image)] * self.num_frames
        self.inserted += 1

    def add(self, env, image, *columns):
        obs = self.last[env]
        self.last[env] = [*obs[1:], (self.inserted, image)]
        self.kept[self.inserted] = (obs, *columns, self.last[env])
        self.inserted += 1

    def drawable(self):
        oldest = self.inserted - self.capacity
        return {number: one for number, one in self.kept.items() if one[0][0][0] >= oldest}


def stacked(images):
    """Images with their numbers as one observation."""
    return np.concatenate([image for _, image in images])


def history(seed):
    """A real and a naive buffer after a random history of episodes, and the environments' images in them."""
    rng = np.random.default_rng(seed)
    num_envs, num_frames = (int(rng.integers(1, 5)) for _ in range(2))
    shape = (int(rng.choice([1, 3, 4])), *rng.integers(1, 4, 2))
    capacity = int(rng.integers(2 * (num_frames + 1) * num_envs, 90))
    real = IMAGE["ImageReplay"](capacity, num_envs, num_frames, shape)
    whole, p_over = Whole(capacity, num_envs, num_frames), rng.choice([0.02, 0.1, 0.4, 1.0])
    begun = np.arange(num_envs)
    for _ in range(int(rng.integers(2, 3 * capacity // num_envs))):
        image = rng.integers(256, size=(len(begun), *shape), dtype=np.uint8)
        real.begin(begun, image)
        for env, one in zip(begun, image, strict=True):
            whole.begin(env, one)
        image = rng.integers(256, size=(num_envs, *shape), dtype=np.uint8)
        action, reward = rng.integers(9, size=num_envs), rng.normal(size=num_envs).astype(np.float32)
        columns = action, reward, rng.random(num_envs) < 0.2
        real.add(image, *columns)
        for env in range(num_envs):
            whole.add(env, image[env], *(column[env] for column in columns))
        begun = np.flatnonzero(rng.random(num_envs) < p_over)
    return real, whole


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_it_holds_what_a_buffer_of_whole_observations_holds(count):
    """For any number of frames, environments and channels: which transitions, and each of their numbers and pixels."""
    overwritten = 0
    for seed in range(count):
        real, whole = history(seed)
        rows, kept = np.arange(max(0, real.inserted - real.capacity), real.inserted), whole.drawable()
        assert real.inserted == whole.inserted and set(rows[real.history(rows)[1]]) == set(kept)
        overwritten += real.inserted > real.capacity
        images = {number: real.arrays["image"][real.history(np.array([number]))[0][0]] for number in kept}
        for number, (obs, action, reward, done, next_obs) in kept.items():
            assert np.array_equal(np.concatenate(images[number][:-1]), stacked(obs))
            assert np.array_equal(np.concatenate(images[number][1:]), stacked(next_obs))
            row = number % real.capacity
            assert (action, reward, done) == tuple(real.arrays[name][row] for name in ("action", "reward", "done"))
        if kept:
            batch = real.sample(20, CPU)
            seen = {(stacked(one[0]).tobytes(), *one[1:4], stacked(one[4]).tobytes()) for one in kept.values()}
            for obs, action, reward, done, next_obs in zip(*(x.numpy() for x in batch), strict=True):
                assert (obs.tobytes(), action, reward, done, next_obs.tobytes()) in seen
    assert overwritten > count / 4


def test_it_draws_all_that_can_be_drawn_alike():
    np.random.seed(0)
    for real, whole in map(history, range(1000)):
        kept = [stacked(one[4]).tobytes() for one in whole.drawable().values()]
        if len(set(kept)) == len(kept) > 30 and real.inserted > real.capacity:
            break
    drawn = [x.tobytes() for _ in range(500) for x in real.sample(32, CPU).next_obs.numpy()]
    counts, expected = np.array([drawn.count(one) for one in kept]), 16_000 / len(kept)
    assert counts.sum() == 16_000 and np.abs(counts - expected).max() < 4.5 * np.sqrt(expected)


def test_an_image_takes_its_bytes_and_20_more():
    """The arrays are never touched, so this takes no memory."""
    replay = IMAGE["ImageReplay"](1_000_000, 8, 4, (3, 64, 64))
    size = sum(array.nbytes for array in (*replay.arrays.values(), replay.state.age))
    assert size == 1_000_000 * (3 * 64 * 64 + 20) + 8 * 8


# ---------------------------------------------------------------------- the network
@pytest.mark.parametrize("size", [(15, 15), (16, 40), (36, 36), (40, 56)])
def test_the_network_takes_images_of_any_size(size):
    network, obs = IMAGE["QNetwork"]((6, *size), 4), torch.randint(0, 256, (2, 6, *size), dtype=torch.uint8)
    q = network(obs)
    assert q.shape == (2, 4) and network.act(obs.numpy()).tolist() == q.argmax(1).tolist()


# ---------------------------------------------------------------------- training
@pytest.mark.parametrize("env_id", ["ColoursLast", "ColoursFirst", "TwoAxes"])
def test_what_is_stored_is_what_happened(env_id, train, monkeypatch):
    """Each transition of the buffer, in the environments' own observations; a time limit is stored as not done, and
    leads to the final images; rewards are stored as they are."""
    steps, step = [], SyncVectorEnv.step

    def note(self, action):
        obs, reward, *others = step(self, action)
        steps.append((obs.copy(), action.copy(), 3 * reward, *others))
        return obs, 3 * reward, *others

    monkeypatch.setattr(SyncVectorEnv, "step", note)
    v = train("dqn_image", "--env-id", f"pictures:{env_id}-v0", *SHORT, "--total-timesteps", "40", "--eval-every", "0")
    replay, before = v["replay"], None
    taken = steps[:20]
    assert sum(truncated.sum() for *_, truncated, _ in taken) == 8  # four time limits in each of two environments
    number = 2
    for obs, action, reward, _, truncated, infos in taken:
        for i in range(2):
            index, _ = replay.history(np.array([number + i]))
            images = replay.arrays["image"][index[0]]
            want = infos["final_obs"][i] if truncated[i] else obs[i]
            assert np.array_equal(np.concatenate(images[1:]), want) and not replay.arrays["done"][number + i]
            assert replay.arrays["action"][number + i] == action[i] and replay.arrays["reward"][number + i] == reward[i]
            assert before is None or np.array_equal(np.concatenate(images[:-1]), before[i])
        number, before = number + 2 + truncated.sum(), obs
    assert replay.inserted == number and replay.arrays["reward"].max() == 3


def test_evaluation_and_play_see_what_training_sees(train):
    """The flags reach their environments, too, and those of a loaded policy."""
    flags = [*SHORT, "--total-timesteps", "24", "--size", "20", "--grey", "--num-frames", "3"]
    v = train("dqn_image", "--env-id", "pictures:ColoursFirst-v0", *flags)
    space = v["envs"].single_observation_space
    assert space.shape == (3, 20, 20) and v["run"].evaluator._envs[""][0].observation_space == space
    assert v["replay"].arrays["image"].shape == (60, 1, 20, 20)
    policy = solorl.load(v["run"].dir)
    obs, _ = policy.make_env().reset(seed=1)
    assert policy(obs[None]).tolist() == v["q_network"].act(obs[None]).tolist()


@pytest.mark.parametrize("saved", [True, False])
def test_resumed_equals_uninterrupted_with_its_buffer(saved, train):
    """In the middle of an episode. Without its buffer a resumed run begins with the images of its observations."""
    flags = [*SHORT, "--total-timesteps", "96", "--save-every", "48", "--learning-rate", "0.01", "--size", "16"]
    whole = train("dqn_image", "--env-id", "pictures:ColoursFirst-v0", *flags, *(["--save-replay"] if saved else []))
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("dqn_image", "--resume", run_dir)
    assert v["start"] == 12 and (comparable(run_dir) == expected) == saved
    same = [
        torch.equal(x, y) for x, y in zip(v["q_network"].parameters(), whole["q_network"].parameters(), strict=True)
    ]
    assert all(same) == saved and len(same) == 10
    if not saved:  # after 24 steps in each environment an episode of 5 has made 4: its last 2 images, then 24 steps
        assert v["replay"].inserted == 2 * 2 + 2 * 24 + 2 * 5


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--env-id games/MovingDot-v0", "--env-id games/MovingDotGrey-v0 --size 0"])
def test_learns_to_compare_two_images(flags, train):
    """More than twice the score of random actions; one image tells nothing."""
    fast = "--total-timesteps 10000 --learning-starts 1000 --num-frames 2 --gamma 0.9 --eval-every 0"
    v = train("dqn_image", *flags.split(), *fast.split())
    assert v["run"].evaluator.score > 0.5


# ---------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("env_id", "flags", "words"),
    [
        ("pictures:Both-v0", "", "has images of shape (3, 20, 4), but its first or last axis must have"),
        ("pictures:FourLast-v0", "--grey", "--grey takes images with 1 or 3 channels, but those of pictures:FourLast"),
        ("pictures:Small-v0", "--size 0", "images of 20 x 14 pixels are too small"),
        (
            "pictures:ColoursLast-v0",
            "--buffer-size 19 --num-envs 2 --total-timesteps 40 --learning-starts 20",
            "--buffer-size must be at least 20, the images",
        ),
        ("CartPole-v1", "", "has vector observations, but dqn_image.py takes image observations; use dqn.py"),
    ],
)
def test_what_it_cannot_see_is_refused_in_one_sentence(env_id, flags, words, train, tmp_path):
    train("dqn_image", "--env-id", env_id, *flags.split(), code=2)
    assert words in train.out and train.out.count("\n") == 1 and not (tmp_path / "runs").exists(), train.out
    assert set(pictures.SHAPES) > {"Both", "FourLast", "Small"}
