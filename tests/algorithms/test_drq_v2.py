"""drq_v2.py: random shifts, returns of several steps from images stored once, the noise, and that it learns."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint

FILE = definitions("drq_v2")
SMALL = "--total-timesteps 120 --learning-starts 60 --batch-size 8 --buffer-size 400 --hidden-dim 16".split()
SMALL += "--eval-every 0 --eval-episodes 1".split()


class Spot(gym.Env):
    """A bright column in an image; the reward is how near to its place the action is. `length` steps an episode."""

    observation_space = gym.spaces.Box(0, 255, (15, 16, 1), np.uint8)
    action_space = gym.spaces.Box(-2.0, 2.0, (1,), np.float32)

    def __init__(self, length=1):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.see(), {}

    def see(self):
        self.column = int(self.np_random.integers(16))
        image = np.zeros((15, 16, 1), np.uint8)
        image[:, self.column] = 255
        return image

    def step(self, action):
        reward = -abs(float(action[0]) - (self.column - 7.5) / 5)
        self.steps += 1
        return self.see(), reward, self.steps == self.length, False, {}


gym.register("Spot-v0", Spot, disable_env_checker=True)
gym.register("Spots-v0", Spot, kwargs={"length": 9}, max_episode_steps=7, disable_env_checker=True)


# ---------------------------------------------------------------------- pure functions
def test_shifts_are_crops_of_padded_images():
    """Against a loop; every shift occurs, and an image and its channels are shifted as one."""
    torch.manual_seed(0)
    images = torch.randint(256, (400, 2, 5, 7), dtype=torch.uint8)
    shifted, seen = FILE["random_shift"](images, 2), set()
    assert shifted.dtype == torch.uint8 and shifted.shape == images.shape
    for image, result in zip(images.numpy(), shifted.numpy(), strict=True):
        padded = np.pad(image, ((0, 0), (2, 2), (2, 2)), "edge")
        crops = {(i, j): padded[:, i : i + 5, j : j + 7] for i in range(5) for j in range(5)}
        fits = [place for place, crop in crops.items() if np.array_equal(crop, result)]
        assert fits
        seen |= {*fits}
    assert len(seen) == 25
    assert torch.equal(FILE["random_shift"](images, 0), images)


@pytest.mark.parametrize(("capacity", "num_envs", "frames", "n_step"), [(60, 1, 2, 3), (37, 3, 3, 4), (80, 2, 1, 1)])
def test_samples_are_those_of_a_record(capacity, num_envs, frames, n_step, monkeypatch):
    """Every row that can be sampled, against the record of whole episodes: at the end of a task the value counts
    nothing, at a time limit it does, also where the return is cut there; the newest images have shorter returns."""
    generator, gamma = np.random.default_rng(0), 0.9
    replay = FILE["NStepImageReplay"](capacity, num_envs, frames, (1, 1, 2), 1)
    episodes = [[] for _ in range(num_envs)]  # of each environment: those of (images, steps), the running one last
    count, wanted, last = 0, {}, {}  # number of a row -> (episode, step)

    def image():
        nonlocal count
        count += 1
        return np.array([[[count % 256, count // 256]]], np.uint8)

    def begin(who):
        images = np.array([image() for _ in who], np.uint8).reshape(-1, 1, 1, 2)
        for i, first in zip(who, images, strict=True):
            episodes[i].append(([first], []))
        replay.begin(np.array(who, int), images)

    begin(list(range(num_envs)))
    for _ in range(60):
        images = np.stack([image() for _ in range(num_envs)])
        action, reward = generator.uniform(-1, 1, (num_envs, 1)).astype(np.float32), generator.normal(size=num_envs)
        ends, done = generator.random(num_envs) < 0.25, generator.random(num_envs) < 0.5
        for i in range(num_envs):
            wanted[replay.inserted + i] = (episodes[i][-1], len(episodes[i][-1][1]))
            episodes[i][-1][0].append(images[i])
            episodes[i][-1][1].append((action[i], np.float32(reward[i]), bool(ends[i] and done[i])))
        replay.add(images, action, reward, ends & done)
        begin(list(np.flatnonzero(ends)))
    oldest = replay.inserted - capacity
    numbers = np.arange(max(0, oldest), replay.inserted)
    whole = {int(number) for number in numbers[replay.whole(numbers)]}
    last = max(0, oldest) + (frames + 1) * 2 * num_envs  # rows whose images are surely there
    assert {n for n in wanted if n >= last} <= whole <= wanted.keys() and len(whole) > 10
    chosen = np.array(sorted(whole))
    monkeypatch.setattr(np.random, "randint", lambda low, high=None, size=None: chosen.copy())
    batch = FILE["Batch"](*(x.numpy() for x in replay.sample(len(chosen), n_step, gamma, "cpu")))
    for row, number in enumerate(chosen):
        (images, steps), t = wanted[int(number)]
        window = steps[t : t + n_step]
        stack = lambda end: np.concatenate([images[max(0, end - k)] for k in range(frames)][::-1])  # noqa: E731
        assert np.array_equal(batch.obs[row], stack(t)) and np.array_equal(batch.next_obs[row], stack(t + len(window)))
        assert batch.action[row] == window[0][0]
        np.testing.assert_allclose(
            batch.reward[row], sum(gamma**k * step[1] for k, step in enumerate(window)), atol=1e-5
        )
        assert batch.discount[row] == pytest.approx(0 if window[-1][2] else gamma ** len(window))
    assert {len(steps[t : t + n_step]) for (_, steps), t in (wanted[int(n)] for n in chosen)} == set(
        range(1, n_step + 1)
    )


def test_the_noise_falls_in_a_line():
    args = FILE["Args"](start_std=1.0, end_std=0.2, noise_fraction=0.5)
    assert [FILE["noise_std"](args, x) for x in (0, 0.25, 0.5, 1)] == pytest.approx([1, 0.6, 0.2, 0.2])
    assert FILE["noise_std"](FILE["Args"](noise_fraction=0.0), 0.1) == pytest.approx(0.1)


def test_noise_in_losses_is_clipped_and_gives_the_gradient_of_the_action():
    torch.manual_seed(0)
    action = torch.full((2000, 1), 0.9, requires_grad=True)
    noisy = FILE["with_noise"](action, 1.0, 0.3)
    assert noisy.max().item() == 1 and noisy.min().item() == pytest.approx(0.6) and noisy.std().item() > 0.1
    noisy.sum().backward()
    assert (action.grad == 1).all()


def test_targets_and_losses_are_those_of_the_equations():
    """Without noise and shifts; the smaller of the two target critics counts, its encoder is the agent's own."""
    torch.manual_seed(0)
    agent, target = (FILE["Agent"]((2, 15, 16), 5, 8, 1) for _ in range(2))
    obs, next_obs = torch.randint(256, (2, 6, 2, 15, 16), dtype=torch.uint8)
    batch = FILE["Batch"](obs, torch.rand(6, 1), torch.randn(6), torch.tensor([0.0, 0.5] * 3), next_obs)
    args = SimpleNamespace(pad=0, noise_clip=0.0)
    loss, metrics, features = FILE["drq_critic_loss"](agent, target.critic, batch, 1.0, args)
    with torch.no_grad():
        next_features = agent.encoder(next_obs)
        q = torch.stack(target.critic(next_features, agent.actor(next_features))).amin(0)
        errors = [
            ((q_k - batch.reward - batch.discount * q) ** 2).mean()
            for q_k in agent.critic(agent.encoder(obs), batch.action)
        ]
    assert loss.item() == pytest.approx(sum(errors).item(), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in [*agent.encoder.parameters(), *agent.critic.parameters()])
    assert all(p.grad is None for p in [*agent.actor.parameters(), *target.parameters()])
    agent.zero_grad()
    actor_loss, _ = FILE["drq_actor_loss"](agent, features.detach(), 1.0, args)
    actor_loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in agent.actor.parameters())
    assert all(p.grad is None or not p.grad.any() for p in agent.encoder.parameters())
    assert metrics["losses/qf_loss"].item() == pytest.approx(loss.item() / 2)


# ---------------------------------------------------------------------- the real script
def test_the_encoder_learns_from_the_critics_only(train):
    """What the actor's optimiser has are the actor's parameters, and no target has an encoder."""
    v = train("drq_v2", "--env-id", "Spots-v0", "--num-envs", "2", *SMALL)
    size = lambda parameters: sum(p.numel() for p in parameters)  # noqa: E731
    learned = [size(v[f"{who}_optimizer"].param_groups[0]["params"]) for who in ("actor", "critic")]
    of_actor = size(v["agent"].actor.parameters())
    assert learned == [of_actor, size(v["agent"].parameters()) - of_actor]
    assert not any(isinstance(part, FILE["PixelEncoder"]) for part in v["target_critic"].modules())
    done = v["replay"].arrays["done"][: v["replay"].inserted]
    assert not done.any()  # a time limit comes before the end of the task
    assert (v["replay"].state.ahead[: v["replay"].inserted] == 0).sum() >= 120 // 7


def test_resumed_with_its_replay_equals_uninterrupted(train):
    """From the third of four checkpoints, so that the rows come from three files."""
    flags = ["--env-id", "Spots-v0", "--num-envs", 2, *SMALL, "--save-every", 30, "--save-replay", "--log-every", 20]
    whole = train("drq_v2", *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("drq_v2", "--resume", run_dir)
    assert v["start"] > 0 and comparable(run_dir) == expected
    assert all(torch.equal(x, y) for x, y in zip(v["agent"].parameters(), whole["agent"].parameters(), strict=True))


@pytest.mark.slow
def test_learns_where_the_column_is(train):
    flags = (
        "--total-timesteps 1200 --learning-starts 200 --batch-size 32 --num-frames 1 --pad 1 --hidden-dim 64".split()
    )
    flags += "--utd-ratio 1 --learning-rate 0.001 --eval-every 0 --eval-episodes 40".split()
    v = train("drq_v2", "--env-id", "Spot-v0", *flags)
    assert v["run"].evaluator.score > -0.3  # always the middle: -0.8
