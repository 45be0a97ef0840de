"""pqn_atari_envpool_lstm.py: when its memory is empty and when it goes on, in learning, at time limits, in evaluation
and after a resume. Whether it learns Catch is tested in test_pixels.py."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import definitions, documented_keys, rows
from pixel_probe import FakePool, use_fake_envpool

from solorl.envs.envpool import EnvPoolVectorEnv
from solorl.run.evaluation import stepwise

NAME = "pqn_atari_envpool_lstm"
PQN = definitions(NAME)
SMALL = "--env-id Catch-v5 --num-envs 2 --num-steps 8 --total-timesteps 32 --num-minibatches 2".split()
SMALL += "--update-epochs 1 --eval-episodes 1 --eval-every 0".split()
STILL = [*SMALL, "--learning-rate", "0", "--start-e", "0.5", "--end-e", "0.5"]


@pytest.fixture(autouse=True)
def games(monkeypatch):
    """Catch in the place of EnvPool's games; a list of what the steps of training and evaluation gave."""
    seen, step = [], EnvPoolVectorEnv.step

    def note(self, actions):
        seen.append(step(self, actions))
        return seen[-1]

    use_fake_envpool(monkeypatch)
    monkeypatch.setattr(EnvPoolVectorEnv, "step", note)
    return seen


def network(num_actions=3, seed=0):
    torch.manual_seed(seed)
    return PQN["QNetwork"](num_actions)


def images(*shape):
    return np.random.default_rng(0).integers(256, size=(*shape, 1, 84, 84), dtype=np.uint8)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@torch.no_grad()
def remembered(net, obs, state=None):
    """Values (steps, num_actions) and the state after the images (steps, 1, 84, 84) of one game, from the equations of
    an LSTM in NumPy and double precision."""
    arrays = [x.double().numpy() for x in (net.lstm.weight_ih, net.lstm.weight_hh, net.head.weight, net.head.bias)]
    w_in, w_hidden, w_head, b_head = arrays
    bias = (net.lstm.bias_ih + net.lstm.bias_hh).double().numpy()
    hidden, cell = np.zeros((2, 128)) if state is None else np.asarray(state, np.float64)
    values = []
    for x in net.network(torch.as_tensor(obs)).double().numpy():
        i, f, g, o = np.split(w_in @ x + w_hidden @ hidden + bias, 4)
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
        hidden = sigmoid(o) * np.tanh(cell)
        values.append(w_head @ hidden + b_head)
    return np.array(values), np.stack([hidden, cell])


def test_memory_is_empty_exactly_where_a_game_begins():
    """Each game by itself gives the same values, also those that begin in the middle; what began before the first step
    goes on from the state."""
    net, obs, state = network(), images(7, 3), torch.randn(2, 3, 128)
    first = np.zeros((7, 3), bool)
    first[0, 0] = first[3, 0] = first[4, 0] = first[6, 1] = True
    with torch.no_grad():
        q, after = net(torch.as_tensor(obs), state, torch.as_tensor(first))
    assert q.shape == (7, 3, 3) and after.shape == (2, 3, 128)
    for n in range(3):
        cuts = sorted({0, *np.flatnonzero(first[:, n]), 7})
        for begin, end in pairwise(cuts):
            known = None if first[begin, n] else state[:, n]
            want, last = remembered(net, obs[begin:end, n], known)
            np.testing.assert_allclose(q[begin:end, n], want, atol=1e-4)
        np.testing.assert_allclose(after[:, n], last, atol=1e-4)


def test_loss_by_hand():
    """The mean over all steps of all environments of a minibatch, each step with the memory of those before it."""
    net, obs, state = network(), torch.as_tensor(images(5, 2)), torch.randn(2, 2, 128)
    first = torch.zeros(5, 2, dtype=torch.bool)
    first[2, 1] = True
    action, returns = torch.randint(3, (5, 2)), torch.randn(5, 2)
    loss, metrics = PQN["q_lambda_lstm_loss"](net, PQN["Batch"](obs, first, state, action, returns))
    q = np.zeros((5, 2, 3))
    q[:, 0] = remembered(net, obs[:, 0], state[:, 0])[0]
    q[:2, 1], q[2:, 1] = remembered(net, obs[:2, 1], state[:, 1])[0], remembered(net, obs[2:, 1])[0]
    taken = np.take_along_axis(q, action.numpy()[..., None], -1)[..., 0]
    assert loss.item() == pytest.approx(np.mean((taken - returns.numpy()) ** 2), rel=1e-3)
    assert metrics["losses/td_loss"].item() == loss.item()
    assert metrics["losses/q_values"].item() == pytest.approx(taken.mean(), rel=1e-3)


def test_gradients_reach_back_to_the_start_of_the_game_and_no_further():
    net, obs = network(), torch.as_tensor(images(4, 1)).float().requires_grad_()
    first = torch.tensor([[True], [False], [True], [False]])
    net(obs, torch.zeros(2, 1, 128), first)[0][3].sum().backward()
    reached = obs.grad.abs().flatten(1).sum(1) > 0
    assert reached.tolist() == [False, False, True, True]


def test_acts_greedily_with_its_memory():
    """Step by step, as in evaluation, the actions are those of the whole game at once; without memory they are not."""
    net, obs = network(6), images(12, 2)
    net.head.weight.data *= 20
    act = stepwise(net.act, 2)
    got = np.array([act(x, []) for x in obs])
    want = np.stack([remembered(net, obs[:, n])[0] for n in range(2)], 1)
    np.testing.assert_allclose(np.take_along_axis(want, got[..., None], -1)[..., 0], want.max(-1), atol=1e-3)
    alone = np.array([net.act(x, None, np.ones(2, bool))[0] for x in obs])
    assert not np.array_equal(alone, got)
    state = net.act(obs[0], None, np.ones(2, bool))[1]
    assert state.shape == (2, 2, 128) and torch.equal(state, net.act(obs[0], state, np.ones(2, bool))[1])


def test_rollout_goes_on_with_the_memory_of_the_last_one(train):
    """Of three rollouts with a learning rate of 0: what learning computes from the state before the rollout is what
    acting saw; a game that began in the rollout starts with an empty memory."""
    v = train(NAME, *STILL, "--total-timesteps", "48")
    rollout, net = v["rollout"], v["q_network"]
    assert v["obs"].shape == (8, 2, 1, 84, 84) and v["obs"].dtype == np.uint8
    with torch.no_grad():
        q, state = net(rollout.obs, rollout.state, rollout.first)
        last, _ = net(torch.as_tensor(v["next_obs"])[None], state, torch.as_tensor(v["now"].first)[None])
    np.testing.assert_allclose(q.amax(-1), v["value"], atol=1e-5)
    torch.testing.assert_close(state, v["now"].state, atol=1e-5, rtol=1e-4)
    np.testing.assert_allclose(v["next_value"], last[0].amax(-1), atol=1e-5)
    assert np.array_equal(v["first"][1:], v["over"][:-1]) and v["first"][1:].any() and not v["first"][0].any()
    assert rollout.state.abs().sum() > 0 and np.array_equal(v["now"].first, v["over"][-1])
    begins = np.argwhere(v["first"])
    for t, n in begins:
        end = min([8, *(s for s, m in begins if m == n and s > t)])
        want, _ = remembered(net, v["obs"][t:end, n])
        np.testing.assert_allclose(v["value"][t:end, n], want.max(1), atol=1e-4)
    names = ("value", "done", "final_value", "next_value")
    want = PQN["q_lambda"](np.sign(v["reward"]), *(v[name] for name in names), 0.99, 0.65)
    np.testing.assert_allclose(rollout.returns, want, rtol=1e-6)


def test_time_limit_bootstraps_with_the_memory_before_the_reset(train, monkeypatch, games):
    monkeypatch.setattr("solorl.envs.envpool.ATARI_STEPS", 3)
    v = train(NAME, *STILL, "--num-steps", "9", "--total-timesteps", "18")
    cut = np.argwhere(v["timeout"])
    assert len(cut) == 6 and (v["final_value"][~v["timeout"]] == 0).all()
    for t, n in cut:
        game = np.concatenate([v["obs"][t - 2 : t + 1, n], games[t][4]["final_obs"][n][None]])
        expected = remembered(v["q_network"], game)[0][-1].max()
        forgotten = remembered(v["q_network"], game[-1:])[0][-1].max()
        assert v["final_value"][t, n] == pytest.approx(expected, abs=1e-4) and abs(expected - forgotten) > 1e-3
    returns = v["rollout"].returns.numpy()[v["timeout"]]
    np.testing.assert_allclose(returns, 0.99 * v["final_value"][v["timeout"]], rtol=1e-5)


def test_memory_outlasts_a_lost_life(train, monkeypatch):
    info = FakePool._info

    def with_lives(self, ids, reward, terminated):
        return info(self, ids, reward, terminated) | {"lives": 3 - self.elapsed[ids] // 2}

    monkeypatch.setattr(FakePool, "_info", with_lives)
    v = train(NAME, *STILL)
    lost = (v["done"] == 1) & ~v["over"]
    assert lost[:-1].any() and not v["first"][1:][lost[:-1]].any()
    np.testing.assert_allclose(v["rollout"].returns.numpy()[lost], v["reward"][lost])


def test_minibatches_are_whole_environments(train, batches):
    rollout = train(NAME, *SMALL, "--num-envs", "4", "--total-timesteps", "32", "--update-epochs", "2")["rollout"]
    assert len(batches) == 2 * 2
    for epoch in (batches[:2], batches[2:]):
        found = []
        for batch in epoch:
            assert batch.obs.shape == (8, 2, 1, 84, 84) and batch.state.shape == (2, 2, 128)
            for k in range(2):
                [n] = [n for n in range(4) if torch.equal(rollout.returns[:, n], batch.returns[:, k])]
                for whole, part in zip(rollout, batch, strict=True):
                    assert torch.equal(whole[:, n], part[:, k])
                found.append(n)
        assert sorted(found) == [0, 1, 2, 3]


def test_minibatches_that_do_not_divide_the_environments_are_refused(train):
    train(NAME, *SMALL, "--num-envs", "3", code=2)
    assert "--num-minibatches must divide --num-envs" in train.out
    assert "Traceback" not in train.out


def test_a_resumed_run_has_its_memory_and_begins_new_games(train):
    """EnvPool gives its games away no state: they begin again, so what is remembered does not count."""
    v = train(NAME, *SMALL)
    again = train(NAME, "--resume", v["run"].dir, "--total-timesteps", "48", "--resume-changed")
    assert again["start"] == 2 and "episodes restart" in train.out
    assert torch.equal(again["rollout"].state, v["now"].state) and v["now"].state.abs().sum() > 0
    assert again["rollout"].first[0].all()


def test_every_logged_key_is_on_the_page(train):
    logged = {key for row in rows(train(NAME, *SMALL)["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert logged == documented_keys(NAME)
