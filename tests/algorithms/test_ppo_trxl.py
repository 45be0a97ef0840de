"""ppo_trxl.py: attention to a window of an episode, the same in acting, learning and evaluation."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows
from gymnasium.vector import SyncVectorEnv
from test_ppo_lstm import Lessons

from solorl.compute.speed import GradientStep
from solorl.games.cue import Cue
from solorl.run.evaluation import play_episodes

FILE = definitions("ppo_trxl")
SMALL = "--num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 1 --eval-episodes 2 --width 16".split()
# Shorter than most episodes of Lessons, which have 5 or 7 steps; longer than a rollout.
WINDOWS = pytest.mark.parametrize("window", [3, 20])

gym.register("LessonsInWindows-v0", Lessons)
gym.register("CueInWindows-v0", Cue, kwargs={"steps": 4})


def make_agent(window=5, layers=2, heads=2, width=8, obs_dim=3, num_actions=3):
    """An agent all of whose parameters are large enough to matter."""
    torch.manual_seed(0)
    args = FILE["Args"](memory_length=window, num_layers=layers, num_heads=heads, width=width)
    agent = FILE["Agent"](obs_dim, num_actions, args)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return agent


def sequence(steps, envs, seed=0, ends=0.15):
    """Random observations and starts of episodes; a step in each environment begins one, too."""
    rng = np.random.default_rng(seed)
    first = rng.random((steps, envs)) < ends
    first[0] = True
    return torch.as_tensor(rng.normal(size=(steps, envs, 3)), dtype=torch.float32), torch.as_tensor(first)


def one_by_one(agent, obs, first):
    """Logits, values and the memory after each step, as in acting."""
    state, seen = agent.empty_memory(obs.shape[1]), []
    for t in range(len(obs)):
        *outputs, state = agent.step(obs[t].numpy(), state, first[t].numpy())
        seen.append((*(torch.as_tensor(x) for x in outputs), state))
    return [torch.stack(x) for x in zip(*seen, strict=True)]


# ---------------------------------------------------------------------- by hand
def codes_by_hand(distance, width):
    angles = [distance / 10_000 ** (2 * i / width) for i in range(width // 2)]
    return np.array([*np.sin(angles), *np.cos(angles)])


def attention_by_hand(query, keys, values, codes, u, v):
    """One query, one head, the keys it may see: the four terms of A^rel one after the other."""
    scores = []
    for key, code in zip(keys, codes, strict=True):
        score = sum(query[i] * key[i] for i in range(len(query)))
        score += sum(query[i] * code[i] for i in range(len(query)))
        score += sum(u[i] * key[i] for i in range(len(query)))
        score += sum(v[i] * code[i] for i in range(len(query)))
        scores.append(score / len(query) ** 0.5)
    weights = np.exp(np.array(scores) - max(scores))
    return sum(weight * value for weight, value in zip(weights / weights.sum(), values, strict=True))


def norm_by_hand(x, w, name):
    deviation = np.sqrt(x.var() + 1e-5)
    return (x - x.mean()) / deviation * w[f"{name}.weight"] + w[f"{name}.bias"]


def layer_by_hand(w, name, inputs, t, allowed, heads):
    """What a layer makes of step t, from its inputs at all steps, of which those of `allowed` may be seen."""
    seen = {s: norm_by_hand(inputs[s], w, f"{name}.norm1") for s in allowed}
    width = len(inputs[t])
    size, attended = width // heads, []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        query = (w[f"{name}.query.weight"] @ seen[t])[part]
        keys, values = ([(w[f"{name}.{x}.weight"] @ seen[s])[part] for s in allowed] for x in ("key", "value"))
        codes = [(w[f"{name}.code.weight"] @ codes_by_hand(t - s, width))[part] for s in allowed]
        attended.append(attention_by_hand(query, keys, values, codes, w[f"{name}.u"][head, 0], w[f"{name}.v"][head, 0]))
    x = inputs[t] + w[f"{name}.out.weight"] @ np.concatenate(attended) + w[f"{name}.out.bias"]
    hidden = w[f"{name}.mlp.0.weight"] @ norm_by_hand(x, w, f"{name}.norm2") + w[f"{name}.mlp.0.bias"]
    return x + w[f"{name}.mlp.2.weight"] @ np.maximum(hidden, 0) + w[f"{name}.mlp.2.bias"]


def test_the_codes_are_sines_and_cosines_of_the_distance():
    codes = FILE["sinusoids"](7, 6)
    np.testing.assert_allclose(codes, [codes_by_hand(distance, 6) for distance in range(7)], atol=1e-6)


def test_attention_is_that_of_a_loop_over_the_allowed_keys():
    """Random masks, sizes and distances, in double precision; what is not allowed has no weight at all."""
    rng = np.random.default_rng(0)
    envs, heads, steps, keys, size = 3, 2, 4, 7, 5
    query, key, value = (rng.normal(size=(envs, heads, n, size)) for n in (steps, keys, keys))
    code, u, v = rng.normal(size=(heads, keys, size)), *rng.normal(size=(2, heads, 1, size))
    distance = np.arange(steps)[:, None] + keys - steps - np.arange(keys)
    allowed = rng.random((envs, steps, keys)) < 0.5
    allowed[:, distance == 0] = True
    allowed &= distance >= 0
    inputs = [torch.as_tensor(x) for x in (query, key, value, code, u, v, distance, allowed)]
    got = FILE["relative_attention"](*inputs).numpy()
    for n, h, t in np.ndindex(envs, heads, steps):
        seen = np.flatnonzero(allowed[n, t])
        codes = code[h, distance[t, seen]]
        want = attention_by_hand(query[n, h, t], key[n, h, seen], value[n, h, seen], codes, u[h, 0], v[h, 0])
        np.testing.assert_allclose(got[n, h, t], want, atol=1e-10)


@pytest.mark.parametrize("window", [1, 5, 40])
def test_a_step_attends_to_its_episode_within_the_window(window):
    """The whole network by hand, a step, a layer, a head, a key at a time, against acting step by step."""
    agent, (obs, first) = make_agent(window), sequence(24, 2)
    logits, value, _ = one_by_one(agent, obs, first)
    w = {key: x.detach().double().numpy() for key, x in agent.named_parameters()}
    for n in range(2):
        x = np.tanh(obs[:, n].double().numpy() @ w["encoder.0.weight"].T + w["encoder.0.bias"])
        begins = [max(s for s in range(t + 1) if first[s, n]) for t in range(24)]
        for layer in ("layers.0", "layers.1"):
            allowed = [[s for s in range(24) if begins[t] <= s <= t and t - s <= window] for t in range(24)]
            x = np.stack([layer_by_hand(w, layer, x, t, allowed[t], 2) for t in range(24)])
        x = np.stack([norm_by_hand(each, w, "norm") for each in x])
        np.testing.assert_allclose(logits[:, n], x @ w["actor.weight"].T + w["actor.bias"], atol=1e-4)
        np.testing.assert_allclose(value[:, n], (x @ w["critic.weight"].T + w["critic.bias"])[:, 0], atol=1e-4)


@pytest.mark.parametrize("window", [1, 5, 40])
@pytest.mark.parametrize("start", [0, 1, 3, 9, 17])
def test_a_sequence_gives_what_its_steps_give(window, start):
    """From the memory before it, over ends of episodes: outputs, and the memory after it."""
    agent, (obs, first) = make_agent(window), sequence(24, 4)
    logits, value, states = one_by_one(agent, obs, first)
    before = states[start - 1] if start else agent.empty_memory(4)
    with torch.no_grad():
        got = agent(obs[start:], before, first[start:])
    for x, want in zip(got, (logits[start:], value[start:], states[-1]), strict=True):
        torch.testing.assert_close(x, want, atol=1e-5, rtol=1e-5)


def test_the_memory_has_the_last_steps_of_the_episode_and_else_zeros():
    agent, first = make_agent(window=4), torch.zeros(7, 1, dtype=torch.bool)
    first[0] = first[5] = True
    states = one_by_one(agent, torch.ones(7, 1, 3), first)[2]  # after each step, (layers, 1, 4, width + 1)
    counts = [1, 2, 3, 4, 4, 1, 2]
    for state, count in zip(states, counts, strict=True):
        assert (state[:, 0, : 4 - count] == 0).all() and (state[:, 0, 4 - count :, -1] == 1).all()
    first_layer = agent.encoder(torch.ones(3)).detach()
    torch.testing.assert_close(states[-1, 0, 0, 2:, :-1], first_layer.expand(2, -1))


# ---------------------------------------------------------------------- what cannot be seen
def test_nothing_of_an_episode_is_seen_in_the_next_one():
    """Change what was observed in the first one: outputs of the second one stay the same to the last bit, in learning
    as in acting, and so does the memory. Within its episode the change is seen."""
    agent, (obs, first) = make_agent(window=40), sequence(12, 3, ends=0)
    first[7] = True
    changed = obs.clone()
    changed[2] += 1
    for play in (lambda x: one_by_one(agent, x, first), lambda x: agent(x, agent.empty_memory(3), first)):
        (logits, value, memory), (new_logits, new_value, new_memory) = play(obs), play(changed)
        assert torch.equal(logits[7:], new_logits[7:]) and torch.equal(value[7:], new_value[7:])
        assert torch.equal(memory[-1], new_memory[-1])
        assert ((value - new_value)[2:7].abs() > 1e-6).all()
        assert torch.equal(logits[:2], new_logits[:2])  # nor does a step see a later one


def test_a_memory_of_the_episode_before_is_not_seen_where_one_begins_with_the_rollout():
    agent, (obs, first) = make_agent(), sequence(6, 3, ends=0)
    state = one_by_one(agent, *sequence(9, 3))[2][-1]
    with torch.no_grad():
        after, fresh = (agent(obs, memory, first) for memory in (state, agent.empty_memory(3)))
        first[0] = False
        continued = agent(obs, state, first)
    assert all(torch.equal(x, y) for x, y in zip(after, fresh, strict=True))
    assert ((after[1] - continued[1])[0].abs() > 1e-6).all()


def test_gradients_reach_earlier_steps_of_the_rollout_in_the_same_episode_only():
    agent, (obs, first) = make_agent(), sequence(6, 1, ends=0)
    first[2] = True
    obs.requires_grad_()
    agent(obs, agent.empty_memory(1), first)[1][4].sum().backward()
    assert [bool(x.any()) for x in obs.grad[:, 0]] == [False, False, True, True, True, False]


# ---------------------------------------------------------------------- the rollout
@WINDOWS
def test_learning_finds_the_probabilities_and_values_of_acting(window, train, monkeypatch):
    """Until the weights change, in each iteration: over ends of episodes and of rollouts."""
    found, step = [], GradientStep.__call__

    def note(self, batch, args):
        with torch.no_grad():
            logprob, _, value = self.module.evaluate_actions(batch.obs, batch.state, batch.first, batch.action)
        found.append(max((x - y).abs().max().item() for x, y in ((logprob, batch.logprob), (value, batch.value))))
        return step(self, batch, args)

    monkeypatch.setattr(GradientStep, "__call__", note)
    flags = [*SMALL, "--total-timesteps", "256", "--learning-rate", "0.01", "--memory-length", window]
    v = train("ppo_trxl", "--env-id", "LessonsInWindows-v0", *flags)
    assert len(found) == 4 * 2 and max(found[::2]) < 1e-5 and min(found[1::2]) > 1e-4
    assert v["first"].any() and not v["first"][0].all() and (v["rollout"].state != 0).any()
    assert not v["now"].state.requires_grad


@WINDOWS
def test_a_time_limit_bootstraps_with_the_memory_of_the_episode_that_was_cut(window, train, monkeypatch):
    """Frozen weights; step by step from the memory before the rollout. An end of the task has no final value."""
    infos, step = [], SyncVectorEnv.step

    def note(self, action):
        result = step(self, action)
        infos.append(result[4])
        return result

    monkeypatch.setattr(SyncVectorEnv, "step", note)
    flags = [*SMALL, "--total-timesteps", "128", "--learning-rate", "0", "--memory-length", window]
    v = train("ppo_trxl", "--env-id", "LessonsInWindows-v0", *flags)
    agent, state, infos = v["agent"], v["rollout"].state, infos[-16:]
    assert (v["first"][1:] == v["done"][:-1]).all() and v["timeout"].any() and (v["done"] > v["timeout"]).any()
    assert (v["final_value"][~v["timeout"]] == 0).all()
    for t in range(16):
        state = state * torch.as_tensor(~v["first"][t])[:, None, None]  # by hand, so that no step forgets
        _, value, state = agent.step(v["obs"][t], state, np.zeros(4, bool))
        np.testing.assert_allclose(v["value"][t], value, atol=1e-5)
        for n in np.flatnonzero(v["timeout"][t]):
            final_obs = infos[t]["final_obs"][n][None]
            want, empty = (
                agent.step(final_obs, s, np.zeros(1, bool))[1][0] for s in (state[:, [n]], 0 * state[:, [n]])
            )
            assert v["final_value"][t, n] == pytest.approx(want, abs=1e-5) and abs(want - empty) > 1e-3
            target = v["reward"][t, n] + 0.99 * want
            assert v["rollout"].returns[t, n].item() == pytest.approx(target, abs=1e-4)


def test_the_width_must_be_even_and_divided_by_the_heads(train):
    for width in ("10", "9"):
        flags = ["--env-id", "LessonsInWindows-v0", "--width", width, "--num-heads", "3" if width == "9" else "4"]
        train("ppo_trxl", *flags, code=2)
        assert train.out.startswith(f"error: --width {width} must be even and a multiple of the ")
        assert train.out.count("\n") == 1


# ---------------------------------------------------------------------- checkpoints and evaluation
def test_resumed_equals_uninterrupted(train):
    """In the middle of episodes: what was remembered is in the checkpoint."""
    flags = ["--env-id", "LessonsInWindows-v0", *SMALL, "--total-timesteps", "256", "--save-every", "128"]
    whole = train("ppo_trxl", *flags, "--learning-rate", "0.01", "--no-anneal-lr")
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("ppo_trxl", "--resume", run_dir)
    assert v["start"] == 2 and comparable(run_dir) == expected
    weights = zip(v["agent"].parameters(), whole["agent"].parameters(), strict=True)
    assert all(torch.equal(x, y) for x, y in weights)
    assert torch.equal(v["now"].state, whole["now"].state) and np.array_equal(v["obs"], whole["obs"])


def test_evaluation_remembers():
    """A whole game step by step gives the likeliest actions of the sequence, and its memory; without memory others."""
    agent, seen = make_agent(window=20, obs_dim=4), []

    def act(obs, state, first):
        action, state = agent.act(obs, state, first)
        seen.append((obs.reshape(1, 4).copy(), first, action, state))
        return action, state

    play_episodes([Lessons()], act, [3])
    obs, first, action, states = zip(*seen, strict=True)
    obs, first, action = (torch.as_tensor(np.stack(x)) for x in (obs, first, action))
    assert len(obs) in (5, 7) and first[0].all() and not first[1:].any()
    with torch.no_grad():
        logits, _, state = agent(obs, agent.empty_memory(1), first)
        forgetful, _, _ = agent(obs, agent.empty_memory(1), torch.ones_like(first))
    assert torch.equal(action, logits.argmax(-1)) and not torch.equal(action, forgetful.argmax(-1))
    torch.testing.assert_close(states[-1], state)


# ---------------------------------------------------------------------- it learns
def test_remembers_a_cue_over_4_steps(train):
    flags = "--total-timesteps 12k --num-envs 16 --num-steps 20 --memory-length 4 --num-layers 1 --width 32".split()
    flags += "--learning-rate 0.003 --eval-episodes 50 --eval-every 1600 --target-return 1 --save-every 0".split()
    v = train("ppo_trxl", "--env-id", "CueInWindows-v0", *flags, "--log-every", "6000")
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] == 1


@pytest.mark.slow
def test_remembers_a_cue_over_60_steps(train):
    flags = ["--target-return", "0.95", "--eval-every", "20000", "--eval-episodes", "100", "--save-every", "0"]
    v = train("ppo_trxl", *flags, "--log-every", "20000")
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] >= 0.95
