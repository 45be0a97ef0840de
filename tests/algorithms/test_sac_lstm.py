"""sac_lstm.py: sequences of the replay buffer, and memory that is the same in acting and learning."""

import copy

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows
from test_actor_critic import SMALL

FILE = definitions("sac_lstm")
SEQUENCES = ["--sequence-length", "5", "--burn-in", "2"]


def module(kind):
    torch.manual_seed(0)
    return FILE[kind](3, 2)


def random_batch(steps=9, batch=4):
    generator = np.random.default_rng(0)
    draw = lambda *shape: torch.as_tensor(generator.normal(size=shape), dtype=torch.float32)  # noqa: E731
    obs, next_obs = draw(steps + 1, batch, 3), draw(steps, batch, 3)
    first, done = (torch.as_tensor(generator.random((steps, batch)) < 0.3) for _ in range(2))
    next_obs[:-1] = torch.where(first[1:, :, None], next_obs[:-1], obs[1:-1])
    action, before = draw(steps, batch, 2).tanh(), draw(1, batch, 2).tanh()
    last_action = torch.cat([before, action[:-1]])
    return FILE["Batch"](obs[:-1], action, draw(steps, batch), done.float(), next_obs, last_action, first)


# ---------------------------------------------------------------------- sequences
@pytest.mark.parametrize("capacity", [60, 64])
def test_sequences_are_contiguous_parts_of_one_environment(capacity):
    """Three environments and a buffer that has been overwritten, each row against the record."""
    generator, num_envs, length = np.random.default_rng(0), 3, 6

    class Box:
        shape, dtype = (1,), np.float32

    replay, record, first = FILE["SequenceReplay"](capacity, 1, Box), [], np.ones(3, bool)
    for t in range(40):
        obs = np.array([[100.0 * i + t] for i in range(num_envs)], np.float32)
        done, limit = generator.random((2, num_envs)) < 0.15
        row = (obs, obs + 0.1, obs[:, 0] + 0.2, done, obs + 0.5, obs - 0.9, first)
        record.append(row)
        replay.add(FILE["Batch"](*row))
        first = done | limit
    np.random.seed(0)
    batch, starts = replay.sample(2_000, length, num_envs, "cpu"), set()
    for i in range(2_000):
        env, begin = divmod(int(batch.obs[0, i, 0]), 100)
        starts.add(begin * num_envs + env)
        for step in range(length):
            for got, expected in zip(batch, record[begin + step], strict=True):
                assert got[step, i].tolist() == expected[env].tolist()
    oldest = 40 * num_envs - capacity  # of the transitions that are still there
    assert starts == set(range(oldest, 40 * num_envs - (length - 1) * num_envs))


def test_the_loop_stores_what_happened(train):
    """Diaries: each sampled sequence follows one environment; the action before is the one it has received."""
    v = train("sac_lstm", "--env-id", "probes_offpolicy:Diary-v0", *SMALL, *SEQUENCES, "--num-envs", "2")
    batch, cut = v["replay"].sample(500, 5, 2, "cpu"), 0
    who, episode, step = batch.obs.unbind(-1)
    assert (who == who[0]).all() and (batch.first == (step == 0)).all()
    assert (batch.next_obs == torch.stack([who, episode, step + 1], -1)).all()  # of the same episode, also at its end
    for t in range(4):
        over = step[t] + 1 == torch.where(episode[t] % 2 == 0, 3, 4)
        assert (batch.first[t + 1] == over).all() and (episode[t + 1] == episode[t] + over).all()
        assert (batch.last_action[t + 1] == batch.action[t]).all()
        assert (batch.done[t] == (over & (episode[t] % 2 == 0))).all()
        cut += int((over & (episode[t] % 2 == 1)).sum())
    assert cut


def test_what_counts():
    """After the burn-in all; before it what follows the start of an episode in the sequence."""
    first = torch.zeros(5, 3, dtype=torch.bool)
    first[1, 1] = first[0, 2] = True
    expected = [[0, 0, 1], [0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert FILE["counted"](first, 3).tolist() == expected
    assert FILE["counted"](first, 0).all()


# ---------------------------------------------------------------------- memory
def test_learning_equals_acting():
    """From the start of episodes, step by step with the actor's own actions: the same actions, memory and
    log-probabilities."""
    actor, batch, steps = module("Actor"), random_batch(), 9
    first = batch.first.clone()
    first[0] = True
    noise, state, done = torch.randn(steps, 4, 2), None, []
    for t in range(steps):
        action, state = actor.act(batch.obs[t].numpy(), state, first[t].numpy(), noise[t])
        done.append((torch.as_tensor(action), state))
    action = torch.stack([a for a, _ in done])
    last_action = torch.cat([torch.ones(1, 4, 2), action[:-1]])
    states = actor.memory(batch.obs, last_action, first)
    again, logprob = actor(states[0], batch.obs, noise)
    torch.testing.assert_close(again, action, atol=1e-5, rtol=0)
    for t, (_, state) in enumerate(done):
        torch.testing.assert_close(torch.cat([*states[:, t]], 1), state[:, :128], atol=1e-5, rtol=0)
        _, expected = actor(state[:, :64], batch.obs[t], noise[t])
        torch.testing.assert_close(logprob[t], expected, atol=1e-5, rtol=0)


def test_nothing_is_remembered_across_episodes():
    memory, batch = module("Memory"), random_batch()
    batch.first[5] = True
    whole = memory(batch.obs, batch.last_action, batch.first)
    alone = memory(batch.obs[5:], batch.last_action[5:], batch.first[5:])
    torch.testing.assert_close(whole[:, 5:], alone)
    other = memory(batch.obs[5:], torch.cat([7 + batch.last_action[5:6], batch.last_action[6:]]), batch.first[5:])
    torch.testing.assert_close(other, alone)


def test_the_memory_after_a_step_is_of_the_same_episode():
    """Where the episode continues it is the next row's; at an end it is that of the final observation."""
    memory, batch = module("Memory"), random_batch()
    states, after = memory(batch.obs, batch.last_action, batch.first), memory.after(batch)
    continues = ~batch.first[1:]
    assert continues.any() and (~continues).any()
    torch.testing.assert_close(after[:-1][continues], states[0, 1:][continues])
    for t, i in (~continues).nonzero().tolist():
        one = batch.next_obs[t, i][None, None], batch.action[t, i][None, None], torch.zeros(1, 1, dtype=torch.bool)
        torch.testing.assert_close(after[t, i], memory(*one, states[:, t, i][:, None])[0, 0, 0])


# ---------------------------------------------------------------------- losses
def test_losses_by_hand():
    """Means over what counts; critics and targets from memories of their own; no gradient elsewhere."""
    actor, critic, batch = module("Actor"), module("Critic"), random_batch()
    target_critic, noise, alpha = copy.deepcopy(critic), torch.randn(9, 4, 2), torch.tensor(0.3)
    with torch.no_grad():
        for parameter in target_critic.parameters():
            parameter += 0.1
    weight = FILE["counted"](batch.first, 4)
    assert 0 < weight.sum() < weight.numel()
    loss, _ = FILE["sac_lstm_critic_loss"](critic, target_critic, actor, alpha, batch, noise, weight, 0.9)
    seen = batch.obs, batch.last_action, batch.first
    with torch.no_grad():
        action, logprob = actor(actor.memory.after(batch), batch.next_obs, noise)
        value = torch.min(*target_critic(target_critic.memory.after(batch), batch.next_obs, action)) - 0.3 * logprob
        target = batch.reward + 0.9 * (1 - batch.done) * value
        errors = [(q - target)[weight > 0] for q in critic(critic.memory(*seen)[0], batch.obs, batch.action)]
    assert loss.item() == pytest.approx(sum((error**2).mean().item() for error in errors), rel=1e-5)
    loss.backward()
    assert all(p.grad is None for net in (actor, target_critic) for p in net.parameters())
    assert all(p.grad.abs().sum() > 0 for p in critic.parameters())
    loss, _, entropy = FILE["sac_lstm_actor_loss"](actor, critic, alpha, batch, noise, weight)
    with torch.no_grad():
        action, logprob = actor(actor.memory(*seen)[0], batch.obs, noise)
        value = torch.min(*critic(critic.memory(*seen)[0], batch.obs, action))
    assert loss.item() == pytest.approx((0.3 * logprob - value)[weight > 0].mean().item(), rel=1e-5)
    assert entropy.item() == pytest.approx(-logprob[weight > 0].mean().item(), rel=1e-5)


# ---------------------------------------------------------------------- loops
def test_resumed_with_its_replay_equals_uninterrupted(train):
    """The last checkpoint thrown away, the run continues from the one before, in the middle of episodes."""
    flags = "--total-timesteps 300 --num-envs 2 --learning-starts 40 --buffer-size 200 --batch-size 4 --save-replay"
    flags += " --save-every 60 --log-every 60 --eval-every 150 --eval-episodes 1"
    whole = train("sac_lstm", "--env-id", "Pendulum-v1", *SEQUENCES, *flags.split())
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("sac_lstm", "--resume", run_dir)
    assert v["start"] > 0 and comparable(run_dir) == expected
    for name in ("actor", "critic", "target_critic", "temperature"):
        again = v[name].state_dict()
        assert all(torch.equal(x, again[key]) for key, x in whole[name].state_dict().items())
    assert torch.equal(v["now"].state, whole["now"].state) and v["now"].state.any()


def test_bad_numbers_are_refused(train):
    train("sac_lstm", *SMALL, "--sequence-length", "4", "--burn-in", "4", code=2)
    assert "--burn-in 4 must be less than --sequence-length 4" in train.out
    train("sac_lstm", *SMALL, "--num-envs", "8", "--sequence-length", "8", "--burn-in", "2", code=2)
    assert "--sequence-length must be at most 7" in train.out


@pytest.mark.slow
def test_learns_what_it_must_remember(train):
    v = train("sac_lstm", "--eval-every", "0", "--eval-episodes", "100")
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] >= 0.95
