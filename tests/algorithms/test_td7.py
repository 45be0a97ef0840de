"""TD7: embeddings, priorities, clipped targets and the assessment of policies by hand; its loop; learning."""

import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, rows
from probes_offpolicy import Diary
from test_actor_critic import SMALL, random_batch, weights

import solorl

TD7 = definitions("td7")
Batch = TD7["Batch"]
DIARY = ["--env-id", "probes_offpolicy:Diary-v0", *SMALL]


def agents():
    """An encoder and two agents with encoders of their own, in double precision."""
    torch.manual_seed(0)
    encoders = [TD7["Encoder"](3, 2).double() for _ in range(3)]
    return encoders[0], *(TD7["Agent"](encoder, 3, 2).double() for encoder in encoders[1:])


def perceptron(net, x, rectifier):
    """An MLP in NumPy, its layers taken one by one."""
    layers = [layer for layer in net if isinstance(layer, torch.nn.Linear)]
    for i, layer in enumerate(layers):
        x = x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
        x = rectifier(x) if i < len(layers) - 1 else x
    return x


def elu(x):
    return np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1)


def normalised(x):
    return x / np.abs(x).mean(1, keepdims=True)


def embeddings(encoder, obs, action):
    """zs and zsa."""
    zs = normalised(perceptron(encoder.f, obs, elu))
    return zs, perceptron(encoder.g, np.concatenate([zs, action], 1), elu)


def head(net, x, embedding, rectifier):
    """A network of x and an embedding."""
    inner = normalised(perceptron([net.inner], x, elu))
    return perceptron(net.net, np.concatenate([inner, embedding], 1), rectifier)


def actions(agent, obs):
    zs = normalised(perceptron(agent.encoder.f, obs, elu))
    return np.tanh(head(agent.actor, obs, zs, lambda x: np.maximum(x, 0)))


def values(agent, obs, action):
    """The values of both critics (2, batch)."""
    x, embedding = np.concatenate([obs, action], 1), np.concatenate(embeddings(agent.encoder, obs, action), 1)
    return np.array([head(critic, x, embedding, elu)[:, 0] for critic in agent.critics])


def arrays(batch):
    return Batch(*(np.asarray(x) for x in batch))


# ---------------------------------------------------------------------- embeddings
def test_avg_l1_norm_makes_the_mean_size_one():
    x = torch.tensor([[1.0, -3.0], [0.1, 0.1], [0.0, 0.0]])
    torch.testing.assert_close(TD7["avg_l1_norm"](x), torch.tensor([[0.5, -1.5], [1.0, 1.0], [0.0, 0.0]]))


def test_encoder_loss_by_hand_and_without_gradient_of_the_next_state():
    encoder, *_ = agents()
    batch = random_batch()
    loss, _ = TD7["td7_encoder_loss"](encoder, batch)
    own = arrays(batch)
    _, zsa = embeddings(encoder, own.obs, own.action)
    next_zs, _ = embeddings(encoder, own.next_obs, own.action)
    assert loss.item() == pytest.approx(((zsa - next_zs) ** 2).mean(), rel=1e-6)
    loss.backward()
    got = [p.grad.clone() for p in encoder.f.parameters()]
    target = torch.from_numpy(next_zs)
    again = ((encoder.predict(encoder(batch.obs), batch.action) - target) ** 2).mean()
    torch.testing.assert_close(got, list(torch.autograd.grad(again, encoder.f.parameters())))


def test_policy_and_values_by_hand():
    _, agent, _ = agents()
    batch = random_batch()
    own = arrays(batch)
    np.testing.assert_allclose(agent(batch.obs).detach(), actions(agent, own.obs), rtol=1e-6)
    got = torch.stack(agent.values(batch.obs, batch.action)).detach()
    np.testing.assert_allclose(got, values(agent, own.obs, own.action), rtol=1e-6)
    loss, _ = TD7["td7_actor_loss"](agent, batch)
    assert loss.item() == pytest.approx(-values(agent, own.obs, actions(agent, own.obs)).mean(), rel=1e-6)
    loss.backward()
    assert all(p.grad is None for p in agent.encoder.parameters())
    assert all(p.grad is not None for p in agent.actor.parameters())


# ---------------------------------------------------------------------- critics
@pytest.mark.parametrize("bounds", [(-1e8, 1e8), (-0.05, 0.02)])
def test_critic_loss_by_hand(bounds):
    """The smaller value of the target agent, with its own encoder, within the bounds; Huber losses; larger errors."""
    _, agent, target_agent = agents()
    batch, noise = random_batch(), 0.5 * torch.randn(16, 2, dtype=torch.float64)
    batch = batch._replace(reward=2 * batch.reward)  # errors on both sides of 1
    inputs = (torch.tensor(bounds, dtype=torch.float64), batch, noise, 0.3, 0.9)
    loss, metrics, (error, target) = TD7["td7_critic_loss"](agent, target_agent, *inputs)
    own = arrays(batch)
    next_action = np.clip(actions(target_agent, own.next_obs) + np.clip(noise.numpy(), -0.3, 0.3), -1, 1)
    next_value = values(target_agent, own.next_obs, next_action).min(0)
    expected = own.reward + 0.9 * (1 - own.done) * np.clip(next_value, *bounds)
    np.testing.assert_allclose(target, expected, rtol=1e-6)
    q = values(agent, own.obs, own.action)
    errors = np.abs(q - expected)
    assert (errors > 1).any() and (errors < 1).any()
    huber = np.where(errors < 1, 0.5 * errors**2, errors - 0.5)
    assert loss.item() == pytest.approx(huber.mean(1).sum(), rel=1e-6)
    np.testing.assert_allclose(error.detach(), errors.max(0), rtol=1e-6)
    assert metrics["losses/qf1_loss"].item() == pytest.approx(huber[0].mean())
    loss.backward()
    still = [*target_agent.parameters(), *agent.encoder.parameters(), *agent.actor.parameters()]
    assert all(p.grad is None for p in still) and all(p.grad is not None for p in agent.critics.parameters())


# ---------------------------------------------------------------------- replay
class Box:
    shape, dtype = (1,), np.float32


def filled(capacity, n):
    """A buffer to which n transitions have been added, one by one; obs is the number of each."""
    replay = TD7["LAPReplay"](capacity, 1, Box)
    for k in range(n):
        one = np.full((1, 1), k, np.float32)
        replay.add(Batch(one, one, one[0], np.zeros(1), one))
    return replay


def test_transitions_are_drawn_in_proportion_to_their_priorities():
    replay = filled(8, 5)
    replay.update(np.arange(5), torch.tensor([0.5, 1.0, 16.0, 81.0, 256.0]), 0.5)
    priorities = np.array([1, 1, 4, 9, 16])
    np.testing.assert_allclose(replay.state.priority, [*priorities, 0, 0, 0])
    np.random.seed(0)
    batch, index = replay.sample(50_000, "cpu")
    np.testing.assert_array_equal(batch.obs[:, 0], index)
    np.testing.assert_allclose(np.bincount(index) / 50_000, priorities / 31, atol=0.01)


def test_new_transitions_have_the_largest_priority():
    """The largest ever, until `forget_largest`: then the largest in the buffer."""
    replay = filled(3, 1)
    replay.update(np.array([0]), torch.tensor([100.0]), 0.5)
    replay.update(np.array([0]), torch.tensor([4.0]), 0.5)
    one = np.ones((1, 1), np.float32)
    transition = Batch(one, one, one[0], np.zeros(1), one)
    replay.add(transition)
    assert replay.state.priority.tolist() == [2, 10, 0]
    replay.update(np.array([1]), torch.tensor([9.0]), 0.5)
    replay.forget_largest()
    replay.add(transition)
    replay.add(transition)  # over the oldest
    assert replay.state.priority.tolist() == [3, 3, 3]


# ---------------------------------------------------------------------- assessment
def test_an_assessment_ends_after_its_episodes_or_when_the_policy_is_worse():
    assessment = SimpleNamespace(steps=0, episodes=0, episode_return=0.0, smallest=math.inf, best=2.0)
    played = [(1, False), (2, True), (9, True), (4, False), (0, True)]  # returns 3, 9, 4
    assert [TD7["count_step"](assessment, *step, 3) for step in played] == [False, False, False, False, True]
    assert (assessment.steps, assessment.episodes, assessment.smallest) == (5, 3, 3.0)
    assessment = SimpleNamespace(steps=0, episodes=0, episode_return=0.0, smallest=math.inf, best=2.0)
    played = [(5, True), (1, False), (0.5, True)]
    assert [TD7["count_step"](assessment, *step, 3) for step in played] == [False, False, True]
    assert assessment.smallest == 1.5


class Given(Diary):
    """Diary with given rewards, by turns above and below 0."""

    table = np.random.default_rng(3).normal(0.3, 1, size=(40, 4))

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float(self.table[self.episode, self.steps - 1]), *rest


gym.register("Given-v0", Given, disable_env_checker=True)


def judged(returns, lengths, learning_starts, early_steps, episodes, weight):
    """By a plain loop over episodes: for the end of each, as a step, (the number of the best agent so far, the return
    it stands for, whether an assessment is over). Agents are numbered by their assessments."""
    number, best, bar, played, began, step, history = 0, None, -math.inf, [], 0, 0, {}
    for got, length in zip(returns, lengths, strict=True):
        played, step = [*played, got], step + length
        over = len(played) == episodes[began >= early_steps] or min(played) < bar
        if over and began >= learning_starts and min(played) >= bar:
            best, bar = number, min(played)
        if over and began < early_steps <= step and bar > -math.inf:
            bar -= (1 - weight) * abs(bar)
        if over:
            played, began, number = [], step, number + 1
        history[step] = (best, bar, over)
    return history


def watched(train, monkeypatch, *flags):
    """Trains on given rewards; weights of the agent and the best agent, and the return it stands for, by step."""
    seen = {}

    class Watched(solorl.Run):
        def resume(self, **parts):
            self.parts = parts
            return super().resume(**parts)

        def save(self, step):
            networks = (self.parts[name] for name in ("agent", "best_agent"))
            seen[step] = (*(weights(x).clone() for x in networks), self.parts["assessment"].best)
            return super().save(step)

    monkeypatch.setattr("solorl.Run", Watched)
    return train("td7", "--env-id", "Given-v0", *SMALL, *flags), seen


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_best_agent_is_that_of_the_largest_smallest_return(weight, train, monkeypatch):
    """One episode each for the first steps, then three; agents stay as they are in between, and learn afterwards."""
    flags = f"--total-timesteps 136 --early-steps 50 --late-episodes 3 --reset-weight {weight} --policy-frequency 1"
    _, seen = watched(train, monkeypatch, *flags.split(), "--target-network-frequency", "5")
    lengths = [3 + k % 2 for k in range(39)]
    returns = [row[:length].sum() for row, length in zip(Given.table, lengths, strict=False)]
    history = judged(returns, lengths, 20, 50, (1, 3), weight)
    agents, before = [seen[1][0]], seen[1][0]
    for step, (agent, best_agent, bar) in seen.items():
        best, expected_bar, over = history.get(step, (None, None, False))
        assert torch.equal(agent, before) == (not over or step <= 20)
        if step in history:
            assert bar == pytest.approx(expected_bar) and torch.equal(best_agent, agents[best or 0])
        if over:
            agents.append(agent)
        before = agent
    assert len({best for best, _, _ in history.values()}) > 2
    assert len(history) > sum(over for *_, over in history.values()) > 15


def test_an_episode_that_a_resume_has_lost_is_not_counted(train, monkeypatch):
    class Lost(solorl.Run):
        def resume(self, **parts):
            start = super().resume(**parts)
            parts["assessment"].episode_return, self.restarted = 1e6, [0]
            return start

    monkeypatch.setattr("solorl.Run", Lost)
    v = train("td7", "--env-id", "Given-v0", *SMALL, "--learning-starts", "0")
    assert 0 < v["assessment"].best < 10


# ---------------------------------------------------------------------- loop
def test_fixed_encoders_and_bounds_follow_with_each_target_update(train, monkeypatch):
    """Every fifth update: the targets get the agent, then the agent the encoder; in between all stay."""
    steps, original = [], torch.nn.Module.load_state_dict

    def note(module, state, *more, **named):
        done = original(module, state, *more, **named)
        steps.append(type(module).__name__)
        return done

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", note)
    v = train("td7", *DIARY, "--target-network-frequency", "5", "--early-steps", "0", "--late-episodes", "99")
    assert steps == [] and v["now"].bounds.tolist() == [0, 0]  # never judged
    # 32 updates, of the steps 21 to 52, at which an episode ends; the last one updates the targets if `frequency` is 4
    for frequency, copies in ((4, 8), (5, 6)):
        steps.clear()
        v = train("td7", *DIARY, "--target-network-frequency", frequency, "--total-timesteps", "55")
        assert [name for name in steps if name == "Encoder"] == ["Encoder"] * copies
        assert int(next(iter(v["critic_optimizer"].state.values()))["step"]) == 32
        fixed, learned, before = weights(v["agent"].encoder), weights(v["encoder"]), weights(v["target_agent"].encoder)
        assert torch.equal(fixed, learned) == (frequency == 4) and not torch.equal(before, fixed)
        assert torch.equal(weights(v["target_agent"].critics), weights(v["agent"].critics)) == (frequency == 4)
        assert torch.equal(weights(v["target_agent"].actor), weights(v["agent"].actor)) == (frequency == 4)
        low, high = v["now"].bounds
        assert low < high and (frequency == 5 or (low, high) == (v["now"].smallest_target, v["now"].largest_target))


def test_resumed_with_its_replay_equals_uninterrupted(train):
    """The last checkpoint thrown away, the run continues from the one before: within an assessment."""
    flags = "--total-timesteps 1000 --learning-starts 250 --buffer-size 500 --save-replay --utd-ratio 0.1 "
    flags += "--target-network-frequency 7 --early-steps 300 --late-episodes 2 --save-every 700 --log-every 100"
    whole = train("td7", "--env-id", "Pendulum-v1", *SMALL, *flags.split(), "--eval-every", "500")
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("td7", "--resume", run_dir)
    assert v["start"] == 700 and comparable(run_dir) == expected
    for what in ("encoder", "agent", "target_agent", "best_agent"):
        again = v[what].state_dict()
        assert all(torch.equal(x, again[key]) for key, x in whole[what].state_dict().items())
    for what in ("bounds", "smallest_target", "largest_target"):
        assert torch.equal(getattr(v["now"], what), getattr(whole["now"], what))
    np.testing.assert_array_equal(v["replay"].state.priority, whole["replay"].state.priority)
    assert v["replay"].state.largest == whole["replay"].state.largest > 1
    assert v["assessment"] == whole["assessment"] and v["assessment"].best > -math.inf


def test_evaluations_play_the_best_agent(train, monkeypatch):
    played = []
    monkeypatch.setattr(solorl.Run, "evaluate", lambda run, step, policy, make_env: played.append(policy.__self__))
    v = train("td7", *DIARY)
    assert all(agent is v["best_agent"] for agent in played) and len(played) == 60


def test_logged_metrics_are_documented(train):
    v = train("td7", *DIARY)
    logged = {key for row in comparable(v["run"].dir) for key in row if "/" in key}
    assert logged <= documented_keys("td7") and "losses/encoder_loss" in logged


@pytest.mark.slow
def test_learns_pendulum(train):
    flags = "--total-timesteps 6000 --learning-starts 1000 --eval-every 0 --eval-episodes 20".split()
    v = train("td7", "--env-id", "Pendulum-v1", *flags)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > -250
