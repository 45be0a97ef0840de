"""ppo_atari_lstm.py: what is remembered and what is forgotten, in acting, learning, evaluation and checkpoints."""

import re
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, comparable, definitions, drop_last_checkpoint, rows, run
from gymnasium.vector import SyncVectorEnv
from pixel_doubles import END

import solorl
from solorl.compute.speed import GradientStep
from solorl.run.evaluation import play_episodes

LSTM = definitions("ppo_atari_lstm")
DIARY = "--env-id pixel_doubles:PixelDiary-v0 --num-envs 2 --num-steps 32 --num-minibatches 2 --eval-episodes 1".split()
# With a learning rate of 0 the script is a function of its rollout.
STILL = [*DIARY, "--learning-rate", "0", "--total-timesteps", "128", "--update-epochs", "1"]


@pytest.fixture
def agent():
    torch.manual_seed(0)
    agent = LSTM["Agent"](3)
    torch.nn.init.orthogonal_(agent.actor.weight)  # logits of some size
    return agent


def sequence(steps, envs, seed=0):
    """Random images, starts of games and a memory: obs, state, first."""
    rng = np.random.default_rng(seed)
    obs = torch.as_tensor(rng.integers(256, size=(steps, envs, 1, 84, 84), dtype=np.uint8))
    first = torch.as_tensor(rng.random((steps, envs)) < 0.4)
    assert first.any() and not first.all()
    return obs, torch.as_tensor(rng.normal(size=(2, envs, 128)).astype(np.float32)), first


# ---------------------------------------------------------------------- the networks
def test_a_sequence_equals_acting_step_by_step(agent):
    """Games that begin in the middle included; logits and values differ by rounding only."""
    obs, state, first = sequence(6, 3)
    with torch.no_grad():
        logits, value, last = agent(obs, state, first)
    for t in range(6):
        got_logits, got_value, state = agent.step(obs[t].numpy(), state, first[t].numpy())
        np.testing.assert_allclose(got_logits, logits[t], atol=1e-5)
        np.testing.assert_allclose(got_value, value[t], atol=1e-5)
    torch.testing.assert_close(state, last, atol=1e-6, rtol=0)


def test_the_memory_is_the_lstm_of_the_paper(agent):
    """Gates and states by hand, in double precision, from the features of the convolutional network."""
    obs, state, first = sequence(5, 2, seed=1)
    with torch.no_grad():
        logits, value, last = agent(obs, state, first)
        features = agent.network(obs.flatten(0, 1)).unflatten(0, (5, 2)).double().numpy()
    weights = {name: x.detach().double().numpy() for name, x in agent.named_parameters()}
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    for n in range(2):
        h, c = state[:, n].double().numpy()
        for t in range(5):
            if first[t, n]:
                h, c = np.zeros(128), np.zeros(128)
            gates = weights["lstm.weight_ih"] @ features[t, n] + weights["lstm.weight_hh"] @ h
            i, f, g, o = gates.reshape(4, 128)  # all biases are 0
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            np.testing.assert_allclose(logits[t, n], weights["actor.weight"] @ h, atol=1e-4)
            np.testing.assert_allclose(value[t, n], (weights["critic.weight"] @ h)[0], atol=1e-4)
        np.testing.assert_allclose(last[:, n], [h, c], atol=1e-5)


def test_the_order_of_environments_changes_no_result(agent):
    obs, state, first = sequence(4, 5)
    order = torch.tensor([3, 0, 4, 1, 2])
    with torch.no_grad():
        outputs, permuted = agent(obs, state, first), agent(obs[:, order], state[:, order], first[:, order])
    for x, y in zip(outputs, permuted, strict=True):
        torch.testing.assert_close(x[:, order], y, atol=1e-6, rtol=1e-5)


def test_layers_are_orthogonal_with_their_gains(agent):
    agent = LSTM["Agent"](4)
    gains = {"lstm.weight_ih": 1.0, "lstm.weight_hh": 1.0, "actor.weight": 0.01, "critic.weight": 1.0}
    for name, parameter in agent.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 0).all(), name
            continue
        w = parameter.detach().double().flatten(1)
        gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        gain = gains.get(name, 2**0.5)
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram), dtype=w.dtype), atol=1e-4, rtol=1e-4)
    assert agent.network[1].weight.shape == (32, 1, 8, 8) and agent.lstm.weight_hh.shape == (512, 128)


def test_loss_by_hand(agent):
    """Eq. 9 in NumPy from logits and values of the sequence; advantages normalised over the whole minibatch."""
    obs, state, first = sequence(4, 3)
    action = torch.randint(0, 3, (4, 3))
    with torch.no_grad():
        logits, v, _ = (x.double().numpy() for x in agent(obs, state, first))
        old_logprob = agent.evaluate_actions(obs, state, first, action)[0] + 0.2 * torch.randn(4, 3)
    old_value, advantage, returns = torch.randn(3, 4, 3)
    args = LSTM["Args"](clip_coef=0.1, vf_coef=0.7, ent_coef=0.3)
    batch = LSTM["Batch"](obs, first, state, action, old_logprob, old_value, advantage, returns)
    got, metrics = LSTM["ppo_lstm_loss"](agent, batch, args)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    ratio = np.take_along_axis(p, action[..., None].numpy(), -1)[..., 0] / np.exp(old_logprob.double().numpy())
    adv = advantage.double().numpy()
    adv = (adv - adv.mean()) / (adv.std(ddof=1) + 1e-8)
    policy = np.minimum(ratio * adv, ratio.clip(0.9, 1.1) * adv).mean()
    old, ret = old_value.double().numpy(), returns.double().numpy()
    value_loss = 0.5 * np.maximum((v - ret) ** 2, (old + (v - old).clip(-0.1, 0.1) - ret) ** 2).mean()
    entropy = -(p * np.log(p)).sum(-1).mean()
    assert got.item() == pytest.approx(-policy + 0.7 * value_loss - 0.3 * entropy, rel=1e-4)
    want = {"value_loss": value_loss, "policy_loss": -policy, "entropy": entropy}
    want |= {"old_approx_kl": -np.log(ratio).mean(), "approx_kl": (ratio - 1 - np.log(ratio)).mean()}
    want["clipfrac"] = ((ratio < 0.9) | (ratio > 1.1)).mean()
    assert 0 < want["clipfrac"] < 1 and len(metrics) == len(want)
    for name, value in want.items():
        assert metrics[f"losses/{name}"].item() == pytest.approx(value, rel=1e-3, abs=1e-5)


# ---------------------------------------------------------------------- the rollout
KEPT = []


@pytest.fixture
def still(train, monkeypatch):
    """Variables of two rollouts with frozen weights, and the `infos` of the second; trained once for all tests."""
    infos, step = [], SyncVectorEnv.step
    if KEPT:
        return KEPT[0]

    def note(self, action):
        result = step(self, action)
        infos.append(result[4])
        return result

    monkeypatch.setattr(SyncVectorEnv, "step", note)
    v = train("ppo_atari_lstm", *STILL)
    KEPT.append((v, infos[-32:]))
    return KEPT[0]


def states(v):
    """The memory before each step of the last rollout, (num_steps + 1, 2, num_envs, 128), as the loss sees it."""
    state, found = v["rollout"].state, []
    for obs, first in zip(v["obs"], v["first"], strict=True):
        found.append(state * torch.as_tensor(~first)[:, None])
        state = v["agent"].step(obs, state, first)[2]
    return torch.stack([*found, state])


def test_the_memory_is_empty_after_the_end_of_a_game_and_only_there(still):
    """In the middle of a rollout; not where a life is lost, which ends the return."""
    v, _ = still
    assert (v["first"][1:] == v["over"][:-1]).all() and v["first"][1:].sum() >= 2
    lives_lost = np.argwhere((v["done"] == 1) & ~v["over"])
    assert len(lives_lost) >= 2
    before, fresh, none = states(v), torch.zeros(2, 1, 128), np.zeros(1, bool)
    for t, n in np.argwhere(v["first"]):
        value = v["agent"].step(v["obs"][t, [n]], fresh, none)[1]
        np.testing.assert_allclose(v["value"][t, n], value[0], atol=1e-5)
        assert (before[t, :, n] == 0).all()
    for t, n in lives_lost[lives_lost[:, 0] < 31] + [1, 0]:
        value = v["agent"].step(v["obs"][t, [n]], fresh, none)[1]
        assert abs(v["value"][t, n] - value[0]) > 1e-3  # not an empty memory
        value = v["agent"].step(v["obs"][t, [n]], before[t][:, [n]], none)[1]
        np.testing.assert_allclose(v["value"][t, n], value[0], atol=1e-5)


def test_a_time_limit_bootstraps_with_the_memory_of_the_game_that_was_cut(still):
    v, infos = still
    cut = np.argwhere(v["timeout"])
    assert len(cut) >= 1 and (v["final_value"][~v["timeout"]] == 0).all()
    assert (v["over"] & ~v["timeout"]).any()  # an end of the task does not
    before, none = states(v), np.zeros(1, bool)
    for t, n in cut:
        final_obs = infos[t]["final_obs"][n]
        assert (final_obs[0, :42] >= 3 * END - 9).all()  # of the old game, not the first of the next
        _, _, after = v["agent"].step(v["obs"][t, [n]], before[t][:, [n]], none)
        want = v["agent"].step(final_obs[None], after, none)[1][0]
        forgetful = v["agent"].step(final_obs[None], torch.zeros(2, 1, 128), none)[1][0]
        assert v["final_value"][t, n] == pytest.approx(want, abs=1e-5) and abs(want - forgetful) > 1e-3


def test_the_return_after_a_time_limit_is_the_value_of_what_was_left(still):
    """The last step before the cut: reward plus discounted value of the final observation; none after a lost life."""
    v, _ = still
    returns = v["rollout"].returns.numpy()
    for t, n in np.argwhere(v["timeout"]):
        want = np.sign(v["reward"][t, n]) + 0.99 * v["final_value"][t, n]
        assert returns[t, n] == pytest.approx(want, abs=1e-5) and v["final_value"][t, n] != 0
    for t, n in np.argwhere((v["done"] == 1) & ~v["timeout"]):
        assert returns[t, n] == pytest.approx(np.sign(v["reward"][t, n]), abs=1e-5)


def test_rewards_are_clipped_in_the_loss_and_raw_in_the_episodes(still):
    v, _ = still
    assert set(np.unique(v["reward"])) == {0, 5}
    episodes = rows(v["run"].dir, "charts/episodic_return")
    assert len(episodes) >= 4 and all(row["charts/episodic_return"] == 5 for row in episodes)
    assert all(12 <= row["charts/episodic_length"] <= 19 for row in episodes)  # whole games, in agent steps


# ---------------------------------------------------------------------- learning
def test_the_first_ratio_of_an_iteration_is_one(train, monkeypatch):
    """The loss finds the log-probabilities of acting, over ends of games and rollouts, until the weights change."""
    found, step = [], GradientStep.__call__

    def note(self, batch, args):
        with torch.no_grad():
            logprob = self.module.evaluate_actions(batch.obs, batch.state, batch.first, batch.action)[0]
        found.append((logprob - batch.logprob).exp().sub(1).abs().max().item())
        return step(self, batch, args)

    monkeypatch.setattr(GradientStep, "__call__", note)
    train("ppo_atari_lstm", *DIARY, "--total-timesteps", "192", "--update-epochs", "2", "--learning-rate", "0.001")
    assert len(found) == 3 * 2 * 2
    assert max(found[::4]) < 1e-5 and min(found[1::4]) > 1e-4


def test_a_minibatch_is_the_whole_rollout_of_some_environments(train, batches):
    v = train("ppo_atari_lstm", *DIARY, "--num-envs", "4", "--total-timesteps", "128", "--update-epochs", "2")
    assert len(batches) == 2 * 2 and all(batch.action.shape == (32, 2) for batch in batches)
    whole = {row.tobytes() for row in v["rollout"].logprob.T.numpy()}
    for epoch in (batches[:2], batches[2:]):
        assert {row.tobytes() for batch in epoch for row in batch.logprob.T.numpy()} == whole and len(whole) == 4
    for batch in batches:
        for k in range(2):  # all parts are of the same environment
            n = next(n for n in range(4) if torch.equal(v["rollout"].logprob[:, n], batch.logprob[:, k]))
            assert all(torch.equal(x[:, n], y[:, k]) for x, y in zip(v["rollout"], batch, strict=True))


@pytest.mark.parametrize("flags", ["--num-envs 4 --num-minibatches 3", "--num-envs 2 --num-minibatches 4"])
def test_minibatches_must_divide_the_environments(train, flags):
    train("ppo_atari_lstm", *DIARY, *flags.split(), "--total-timesteps", "128", code=2)
    assert "--num-minibatches must divide --num-envs" in train.out
    assert train.out.count("\n") == 1 and "Traceback" not in train.out


# ---------------------------------------------------------------------- checkpoints, evaluation, play
def test_resumed_equals_uninterrupted(train):
    """In the middle of a game: what was remembered is in the checkpoint."""
    flags = [*DIARY, "--num-steps", "10", "--total-timesteps", "80", "--save-every", "40", "--update-epochs", "1"]
    whole = train("ppo_atari_lstm", *flags, "--learning-rate", "0.01", "--no-anneal-lr")
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("ppo_atari_lstm", "--resume", run_dir)
    assert v["start"] == 2 and comparable(run_dir) == expected
    weights = zip(v["agent"].parameters(), whole["agent"].parameters(), strict=True)
    assert all(torch.equal(x, y) for x, y in weights)
    assert torch.equal(v["now"].state, whole["now"].state) and (v["now"].state != 0).any()
    assert np.array_equal(v["now"].first, whole["now"].first) and np.array_equal(v["obs"], whole["obs"])


def test_the_memory_is_empty_where_resuming_starts_a_game_again(train, monkeypatch):
    """Where a simulator cannot be restored its next image is a first one."""
    flags = [*DIARY, "--num-steps", "10", "--total-timesteps", "40", "--save-every", "20", "--learning-rate", "0"]
    run_dir = train("ppo_atari_lstm", *flags)["run"].dir
    drop_last_checkpoint(run_dir)
    monkeypatch.setattr("solorl.checkpoints.env_state.data_equivalence", lambda *_, **__: False)
    v = train("ppo_atari_lstm", "--resume", run_dir)
    assert "restart" in train.out and v["first"][0].all()
    value = v["agent"].step(v["obs"][0], torch.zeros(2, 2, 128), np.ones(2, bool))[1]
    np.testing.assert_allclose(v["value"][0], value, atol=1e-5)


def test_evaluation_acts_greedily_with_the_memory_of_its_game(agent):
    """A whole game step by step gives the most likely actions of the sequence, over a lost life."""
    env, seen = LSTM["make_env"]("pixel_doubles:PixelDiary-v0"), []

    def act(obs, state, first):
        action, state = agent.act(obs, state, first)
        seen.append((obs.copy(), first, action))
        return action, state

    returns, lengths = play_episodes([env], act, [3])
    obs, first, action = (np.stack(x) for x in zip(*seen, strict=True))
    assert returns == [5] and len(obs) == lengths[0] >= 12 and first[0].all() and not first[1:].any()
    with torch.no_grad():
        logits = agent(torch.as_tensor(obs), torch.zeros(2, 1, 128), torch.as_tensor(first))[0]
        forgetful = agent(torch.as_tensor(obs), torch.zeros(2, 1, 128), torch.ones(len(obs), 1, dtype=torch.bool))[0]
    assert action.tolist() == logits.argmax(-1).tolist() != forgetful.argmax(-1).tolist()


def test_play_and_load_keep_the_memory(train, solo):
    run_dir = train("ppo_atari_lstm", *STILL)["run"].dir
    code, out, err = solo("play", run_dir, "--episodes", "2")
    assert code == 0, err
    assert re.search(r"Diary-v0: 5\.0 ± 0\.0 over 2 greedy episodes", out)
    policy, obs = solorl.load(run_dir), np.full((2, 1, 84, 84), 9, np.uint8)
    action, state = policy(obs, None, np.ones(2, bool))
    assert action.shape == (2,) and (state != 0).any()
    again, _ = policy(obs, state, np.zeros(2, bool))
    assert again.shape == (2,)


def test_every_key_is_on_the_page(train):
    v = train("ppo_atari_lstm", *STILL)
    keys = {key for row in rows(v["run"].dir) for key in row} - {"global_step", "wall_time"}
    page = (ROOT / "algorithms" / "ppo" / "README.md").read_text()
    page = page.partition("## Logged metrics")[2].partition("\n## ")[0]
    assert keys == {word for word in page.split("`") if word.partition("/")[0] in ("charts", "losses", "eval")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_atari", "ppo_atari_lstm", "ppo_atari_envpool"])
def test_a_standalone_copy_learns_the_same(name, train, solo, tmp_path):
    env_id = "Breakout-v5" if name.endswith("envpool") else "BreakoutNoFrameskip-v4"
    flags = [*DIARY, "--env-id", env_id, "--total-timesteps", "128", "--update-epochs", "1"]
    ours = train(name, *flags, "--no-fast")["agent"].state_dict()
    assert solo("copy", name, tmp_path / "mine.py", "--standalone")[0] == 0
    done = run(sys.executable, tmp_path / "mine.py", *flags, "--save-to", tmp_path / "weights.npz")
    assert done.returncode == 0 and "over 1 greedy episodes" in done.stdout, done.stderr
    alone = np.load(tmp_path / "weights.npz")
    assert all(np.array_equal(x, alone[f"agent.{key}"]) for key, x in ours.items())


# ---------------------------------------------------------------------- it learns
RECALL = "--env-id pixel_probe:Recall-v0 --num-envs 8 --num-steps 32 --learning-rate 0.001 --no-anneal-lr --gamma 0.9"
RECALL = [*RECALL.split(), "--save-every", "0", "--log-every", "500", "--target-return", "0.9"]


@pytest.mark.slow
def test_learns_to_remember_what_only_the_first_images_show(train):
    v = train("ppo_atari_lstm", *RECALL, "--eval-every", "4000", "--total-timesteps", "30000")
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] >= 0.9


@pytest.mark.slow
def test_four_images_are_too_few_for_that(train):
    """The same flags and as many steps as the memory needs: half of the games at best, 100 of them."""
    v = train("ppo_atari", *RECALL, "--eval-every", "0", "--total-timesteps", "10000", "--eval-episodes", "100")
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] < 0.4
