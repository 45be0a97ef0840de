"""sac_atari.py: losses by hand with sums over actions, the networks, and the loop on a game that tells its frame."""

import copy
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, rows

from solorl.compute.device import EVALUATE

SAC = definitions("sac_atari")
SMALL = "--num-envs 2 --batch-size 4 --buffer-size 200 --eval-every 0 --eval-episodes 2 --save-every 0 --no-save-model"
SMALL = ["--env-id", "pixel_probe:Catch-v0", *SMALL.split()]


# ---------------------------------------------------------------------- losses by hand
class Table(torch.nn.Module):
    """In place of a convolutional network: the first byte of an image is the row of a table, (states, actions)."""

    def __init__(self, rows):
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor(rows, dtype=torch.float64))

    def forward(self, obs):
        return self.table[obs[:, 0, 0, 0].long()]


class Tables(torch.nn.Module):
    """In place of a critic: two tables."""

    def __init__(self, first, second):
        super().__init__()
        self.q1, self.q2 = Table(first), Table(second)

    def forward(self, obs):
        return self.q1(obs), self.q2(obs)


class Policy(Table):
    """In place of an actor: a table of logits."""

    def forward(self, obs):
        return super().forward(obs).log_softmax(1)


def images_of(states):
    """Stacks of images (n, 4, 2, 2) of these states."""
    return torch.tensor(states, dtype=torch.uint8)[:, None, None, None].expand(-1, 4, 2, 2)


def batch_of(obs, action, reward, done, next_obs):
    numbers = (torch.tensor(column, dtype=torch.float64) for column in (reward, done))
    return SAC["Batch"](images_of(obs), torch.tensor(action), *numbers, images_of(next_obs))


HALVES = [math.log(2), math.log(1), math.log(1)]  # logits of the probabilities 1/2, 1/4, 1/4
ENTROPY = 1.5 * math.log(2)  # of these


def test_critic_loss_by_hand():
    """In state 1 the policy is 1/2, 1/4, 1/4 and the smaller target values are 2, 0, -4: their expectation is 0, their
    sum is -2, their mean -2/3. With temperature 2 the entropy adds 3 log 2. A lost life has no next value."""
    actor = Policy([[0, 0, 0], HALVES])
    target_critic = Tables([[9, 9, 9], [2, 5, -4]], [[9, 9, 9], [3, 0, 1]])
    critic = Tables([[1, 2, 3], [0, 0, 0]], [[4, 5, 6], [0, 0, 0]])
    batch = batch_of(obs=[0, 0], action=[2, 1], reward=[1, -1], done=[0, 1], next_obs=[1, 1])
    loss, metrics = SAC["discrete_critic_loss"](critic, target_critic, actor, torch.tensor(2.0), batch, 0.5)
    target = np.array([1 + 0.5 * 2 * ENTROPY, -1])  # values of the actions: 3, 2 and 6, 5
    losses = [np.mean((np.array([3, 2]) - target) ** 2), np.mean((np.array([6, 5]) - target) ** 2)]
    assert loss.item() == pytest.approx(sum(losses))
    expected = {"qf1_values": 2.5, "qf2_values": 5.5, "qf1_loss": losses[0], "qf2_loss": losses[1]}
    expected["qf_loss"] = sum(losses) / 2
    assert {key.removeprefix("losses/"): x.item() for key, x in metrics.items()} == pytest.approx(expected)
    loss.backward()
    assert all(p.grad is None for net in (actor, target_critic) for p in net.parameters())
    gradient = np.zeros((2, 3))
    gradient[0, 2], gradient[0, 1] = 3 - target[0], 2 - target[1]  # 2 (q - target), divided by a batch of 2
    np.testing.assert_allclose(critic.q1.table.grad, gradient)


class Disagreeing(torch.nn.Module):
    """In place of a critic: two constants that learn, plus and minus half of `gap`, with signs for 4 states."""

    def __init__(self, gap, num_actions=3):
        super().__init__()
        self.q, self.num_actions = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)), num_actions
        self.error = gap / 2 * torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)

    def forward(self, obs):
        error = self.error[obs[:, 0, 0, 0].long(), None].expand(-1, self.num_actions)
        return self.q[0] + error, self.q[1] - error


@pytest.mark.parametrize(("gap", "alpha"), [(0.0, 0.0), (0.4, 0.0), (0.0, 0.1)])
def test_value_of_a_constant_reward_by_critics_that_disagree(gap, alpha):
    """The reward is 1 and gamma 0.9. Critics that agree reach 10, and with a temperature the discounted entropy more.
    Those that differ by `gap` reach less, for each target has the lesser of the two (Fujimoto et al. 2018): gap / 2 at
    each step, hence 0.9 / (1 - 0.9) * gap / 2."""
    critic, batch = Disagreeing(gap), batch_of([0, 1, 2, 3], [0, 1, 2, 0], [1.0] * 4, [0.0] * 4, [1, 2, 3, 0])
    target, optimizer = (
        copy.deepcopy(critic),
        torch.optim.SGD(critic.parameters(), 0.5),
    )  # to the least loss in one step
    uniform = lambda obs: torch.full((len(obs), 3), 1 / 3, dtype=torch.float64).log()  # noqa: E731
    for _ in range(250):
        optimizer.zero_grad()
        SAC["discrete_critic_loss"](critic, target, uniform, alpha, batch, 0.9)[0].backward()
        optimizer.step()
        target.load_state_dict(critic.state_dict())
    assert critic.q.tolist() == pytest.approx([10 - 9 * gap / 2 + 9 * alpha * math.log(3)] * 2, abs=1e-4)


def test_actor_loss_by_hand():
    """The expectation of alpha log pi - q: a sum over actions. Its gradient in a logit is the action's probability
    times what its term has more than the expectation; a mean over actions would have a third of it."""
    actor, critic = Policy([HALVES]), Tables([[1, 4, 8]], [[3, 2, 9]])  # the smaller values: 1, 2, 8
    batch = batch_of([0, 0], [0, 0], [0, 0], [0, 0], [0, 0])
    loss, metrics, entropy = SAC["discrete_actor_loss"](actor, critic, torch.tensor(0.5), batch)
    expected = -0.5 * ENTROPY - (1 / 2 + 2 / 4 + 8 / 4)
    assert loss.item() == pytest.approx(expected) == metrics["losses/actor_loss"].item()
    assert metrics["losses/entropy"].item() == entropy.item() == pytest.approx(ENTROPY)
    loss.backward()
    assert all(p.grad is None for p in critic.parameters())
    probability = np.array([1 / 2, 1 / 4, 1 / 4])
    terms = 0.5 * np.log(probability) - [1, 2, 8]
    np.testing.assert_allclose(actor.table.grad[0], probability * (terms - expected))


# ---------------------------------------------------------------------- networks
def test_networks_are_separate_and_begin_with_he_weights():
    """Deviation of the weights: sqrt(2 / fan in); biases of 0. Bytes of 255 are inputs of 1."""
    torch.manual_seed(0)
    actor, critic = SAC["Actor"](6), SAC["Critic"](6)
    nets = [actor.net, critic.q1, critic.q2]
    parameters = [p for net in nets for p in net.parameters()]
    assert len({p.data_ptr() for p in parameters}) == len(parameters) == 3 * 10
    fans = [4 * 64, 32 * 16, 64 * 9, 3136, 512]
    for net in nets:
        layers = [layer for layer in net if hasattr(layer, "weight")]
        assert [layer.weight[0].numel() for layer in layers] == fans and layers[-1].out_features == 6
        for layer, fan_in in zip(layers, fans, strict=True):
            assert layer.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.06)
            assert not layer.bias.any()
    obs = torch.full((2, 4, 84, 84), 255, dtype=torch.uint8)
    with torch.no_grad():
        x = torch.ones(2, 4, 84, 84)
        for layer in list(critic.q1)[1:]:
            x = layer(x)
        q1, q2 = critic(obs)
        torch.testing.assert_close(q1, x, rtol=1e-4, atol=1e-4)
        assert q1.shape == q2.shape == (2, 6) and not torch.equal(q1, q2)
        torch.testing.assert_close(actor(obs).exp().sum(1), torch.ones(2))


def test_acting_is_greedy_and_with_gumbel_noise_a_sample():
    """Frequencies of 20,000 actions within 4 standard errors of the probabilities; without noise the mode."""
    torch.manual_seed(0)
    actor, n = SAC["Actor"](3), 20_000
    actor.net = torch.nn.Sequential(SAC["Scaled"](), torch.nn.Flatten(), torch.nn.Linear(4, 3))
    obs = np.tile(np.array([[0, 80, 160, 255]], np.uint8).reshape(1, 4, 1, 1), (n, 1, 1, 1))
    p = actor(torch.as_tensor(obs[:1])).exp().detach().numpy()[0]
    frequency = np.bincount(actor.act(obs, np.random.default_rng(0).gumbel(size=(n, 3))), minlength=3) / n
    assert (np.abs(frequency - p) < 4 * np.sqrt(p * (1 - p) / n)).all() and p.std() > 0.05
    assert (actor.act(obs) == p.argmax()).all()


# ---------------------------------------------------------------------- loop
class Frames(gym.Env):
    """A game whose images tell the frame, and below the game's own number. A life is lost at frame 40, rewards come at
    44 and 52, frame 58 is the end: of the task, or by a time limit if the number is odd."""

    observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gym.spaces.Discrete(3)
    rewards = {44: 7.0, 52: -3.0}  # noqa: RUF012

    def __init__(self, game, obs_type, frameskip, max_num_frames_per_episode):
        assert (obs_type, frameskip, max_num_frames_per_episode) == ("grayscale", 1, 0)

    def get_action_meanings(self):
        return ["NOOP", "LEFT", "RIGHT"]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.frame, self.number = 0, int(self.np_random.integers(256))
        return self.image(), {"lives": 2}

    def step(self, action):
        self.frame += 1
        over, limited, lives = self.frame == 58, self.number % 2 == 1, 2 if self.frame < 40 else 1
        reward = self.rewards.get(self.frame, 0.0)
        return self.image(), reward, over and not limited, over and limited, {"lives": lives}

    def image(self):
        image = np.full((84, 84), self.frame, np.uint8)
        image[42:] = self.number
        return image


if "FramesOfTests-v0" not in gym.registry:
    gym.register("FramesOfTests-v0", Frames, kwargs={"game": "frames"})


def test_replay_holds_what_the_game_did(train):
    """Each image once; clipped rewards; done at a lost life and at the end of the task, not at a time limit. The game
    goes on after a lost life, and its return is of raw rewards."""
    words = "--num-envs 3 --total-timesteps 120 --learning-starts 60 --utd-ratio 0 --batch-size 4 --buffer-size 600"
    flags = [*words.split(), "--eval-episodes", "1", "--eval-every", "0", "--save-every", "0", "--no-save-model"]
    v = train("sac_atari", "--env-id", "FramesOfTests-v0", *flags)
    replay = v["replay"]
    a = {key: array[: replay.inserted] for key, array in replay.arrays.items()}
    assert a["image"].shape[1:] == (84, 84) and a["image"].dtype == np.uint8 and not v["critic_optimizer"].state
    frame, number, steps, ends = a["image"][:, 0, 0].astype(int), a["image"][:, -1, -1], 0, []
    for i in np.flatnonzero(a["back"]):
        before = i - a["back"][i]
        passed = range(frame[before] + 1, min(frame[before] + 4, 58) + 1)
        # MaxAndSkipObservation shows the images before a step that ends in its first two frames
        assert number[before] == number[i] and frame[i] in (passed[-1], *([frame[before]] if len(passed) < 3 else []))
        assert a["reward"][i] == np.sign(sum(Frames.rewards.get(one, 0) for one in passed))
        assert a["done"][i] == (40 in passed or (58 in passed and number[i] % 2 == 0))
        steps, ends = steps + 1, [*ends, *([number[i] % 2] if 58 in passed else [])]
    begins = np.sum(a["back"] == 0)
    assert steps == 120 and set(ends) == {0, 1} and begins == replay.inserted - 120 == 3 + len(ends)
    returns = {row["charts/episodic_return"] for row in rows(v["run"].dir, "charts/episodic_return")}
    assert returns == {4.0}
    obs = replay.sample(50, "cpu").obs.numpy()  # stacks of consecutive images of a game
    gaps = np.diff(obs[:, :, 0, 0].astype(int))
    assert obs.shape == (50, 4, 84, 84) and set(gaps.ravel()) <= {0, 1, 2, 3, 4} and {0, 4} <= set(gaps.ravel())


def test_updates_are_counted_in_environment_steps(train):
    """utd_ratio gradient steps for each environment step after learning_starts, of all networks; the targets are copied
    at every third of them."""
    flags = "--total-timesteps 52 --learning-starts 20 --target-network-frequency 3 --policy-frequency 2".split()
    v = train("sac_atari", *SMALL, *flags)
    steps = {name: next(iter(v[f"{name}_optimizer"].state.values()))["step"].item() for name in ("critic", "actor")}
    assert steps == {"critic": 8, "actor": 8}  # (52 - 20) / 4
    assert all(v[f"{name}_optimizer"].defaults["eps"] == 1e-4 for name in ("critic", "actor", "alpha"))
    pairs = zip(v["target_critic"].parameters(), v["critic"].parameters(), strict=True)
    assert not any(torch.equal(x, y) for x, y in pairs)  # the last copy was made after step 7
    assert v["target_entropy"] == pytest.approx(0.89 * math.log(3))
    keys = {key for row in rows(v["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert keys == documented_keys("sac_atari")


def test_evaluation_is_greedy(train):
    """The evaluation of the run is that of the most likely actions; sampled ones play other games."""
    v = train("sac_atari", *SMALL, "--total-timesteps", "8", "--eval-episodes", "8", "--seed", "2")
    evaluator, actor = v["run"].evaluator, v["actor"]

    def most_likely(obs):
        return np.array([actor(torch.as_tensor(one[None])).argmax(1).item() for one in obs])

    row = rows(v["run"].dir, "eval/episodic_return")[-1]
    returns, lengths = evaluator.play(EVALUATE, 0, most_likely, SAC["make_env"])
    assert row["eval/episodic_return"] == pytest.approx(np.mean(returns))
    assert row["eval/episodic_length"] == pytest.approx(np.mean(lengths))


@pytest.mark.slow
def test_value_of_a_constant_reward_under_a_time_limit(train):
    """1 / (1 - gamma) = 10 where all images are the same. (Where they tell the time, those at which the limit ends a
    game have values that nothing is learned about: docs/log/2026-11-24.md.)"""
    flags = "--total-timesteps 900 --learning-starts 100 --utd-ratio 1 --batch-size 16 --buffer-size 2000 --gamma 0.9"
    flags += " --target-network-frequency 10 --no-autotune --alpha 0 --eval-every 0 --eval-episodes 1 --save-every 0"
    v = train("sac_atari", "--env-id", "pixel_doubles:PixelForever-v0", *flags.split(), "--log-every", "100")
    settled = [row["losses/qf1_values"] for row in rows(v["run"].dir, "losses/qf1_values")[-2:]]
    assert len(rows(v["run"].dir, "charts/episodic_return")) > 30 and settled == pytest.approx([10, 10], abs=0.5)


@pytest.mark.slow
def test_resumed_with_its_replay_equals_uninterrupted(train):
    """In the middle of a game, after gradient steps and before others; the buffer has been written over once."""
    flags = "--total-timesteps 96 --learning-starts 32 --target-network-frequency 5 --save-every 64 --buffer-size 60"
    whole = train("sac_atari", *SMALL, *flags.split(), "--save-replay")
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("sac_atari", "--resume", run_dir)
    assert v["start"] == 32 and comparable(run_dir) == expected and whole["replay"].inserted > 60
    for what in ("actor", "critic", "target_critic", "temperature"):
        pairs = zip(v[what].parameters(), whole[what].parameters(), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs), what
    for name in ("actor_optimizer", "critic_optimizer", "alpha_optimizer"):
        (state,), (same,) = (list(x[name].state.values()) for x in (v, whole))
        assert all(torch.equal(state[key], same[key]) for key in same), name
    for x, y in zip(v["replay"].arrays.values(), whole["replay"].arrays.values(), strict=True):
        assert np.array_equal(x, y)
    assert np.array_equal(v["replay"].state["age"], whole["replay"].state["age"])
    assert np.array_equal(v["now"].lives, whole["now"].lives) and np.array_equal(v["obs"], whole["obs"])
