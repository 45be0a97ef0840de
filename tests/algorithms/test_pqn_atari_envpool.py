"""pqn_atari_envpool.py: its network, and the rewards, lives and time limits of its rollout. Whether it learns Catch is
tested in test_pixels.py."""

import numpy as np
import pytest
import torch
from conftest import definitions, documented_keys, rows
from pixel_probe import FakePool, use_fake_envpool

from solorl.envs.envpool import EnvPoolVectorEnv

NAME = "pqn_atari_envpool"
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


def limit(monkeypatch, steps):
    """Cut games off after so many steps; Catch has six."""
    monkeypatch.setattr("solorl.envs.envpool.ATARI_STEPS", steps)


def returns_of(v):
    """Q(lambda) of the last rollout, by the function that test_pqn.py compares with the definition."""
    names = ("value", "done", "final_value", "next_value")
    return PQN["q_lambda"](np.sign(v["reward"]), *(v[name] for name in names), 0.99, 0.65)


def test_layer_normalisation_is_over_the_channels():
    norm, x = PQN["ChannelNorm"](3), torch.randn(2, 3, 4, 5)
    torch.nn.init.normal_(norm.norm.weight)
    torch.nn.init.normal_(norm.norm.bias)
    got, weight, bias = norm(x), norm.norm.weight, norm.norm.bias
    for index in np.ndindex(2, 4, 5):
        column = x[index[0], :, index[1], index[2]]
        want = (column - column.mean()) / (column.var(unbiased=False) + 1e-5).sqrt() * weight + bias
        torch.testing.assert_close(got[index[0], :, index[1], index[2]], want)


def test_every_layer_of_the_network_is_normalised_and_orthogonal():
    net = PQN["QNetwork"](6)
    kinds = [type(layer).__name__ for layer in net.network]
    block = ["Conv2d", "ChannelNorm", "ReLU"]
    assert kinds == ["Scaled", *block, *block, *block, "Flatten", "Linear", "LayerNorm", "ReLU"]
    for layer in (*net.network, net.head):
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            w = layer.weight.detach().double().flatten(1)
            gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
            torch.testing.assert_close(gram, 2 * torch.eye(len(gram), dtype=torch.float64), atol=1e-4, rtol=1e-4)
            assert (layer.bias == 0).all()


def test_acts_greedily():
    torch.manual_seed(0)
    net = PQN["QNetwork"](5)
    obs = np.random.default_rng(0).integers(256, size=(20, 4, 84, 84), dtype=np.uint8)
    action, q = net.act(obs), net(torch.as_tensor(obs)).detach().numpy()
    assert isinstance(action, np.ndarray) and action.shape == (20,) and q.shape == (20, 5)
    np.testing.assert_allclose(q[np.arange(20), action], q.max(1), atol=1e-5)


def test_rollout_values_and_returns(train, games):
    """Observations are bytes of 4 images; values are those of the network; the returns are Q(lambda)."""
    v = train(NAME, *STILL)
    assert v["obs"].shape == (8, 2, 4, 84, 84) and v["obs"].dtype == np.uint8
    with torch.no_grad():
        q = v["q_network"](v["rollout"].obs).numpy()
        last = v["q_network"](torch.as_tensor(v["next_obs"])).amax(1).numpy()
    np.testing.assert_allclose(q.max(1), v["value"].flatten(), atol=1e-5)
    np.testing.assert_allclose(last, v["next_value"], atol=1e-5)
    np.testing.assert_allclose(v["rollout"].returns.numpy(), returns_of(v).flatten(), rtol=1e-6)
    assert np.array_equal(games[8][0], v["obs"][1]) and np.array_equal(v["rollout"].action, v["action"].flatten())


def test_rewards_are_clipped_for_learning_and_raw_in_the_log(train, monkeypatch):
    step = FakePool.step

    def five_times(self, actions):
        obs, reward, *others = step(self, actions)
        return obs, 5 * reward, *others

    monkeypatch.setattr(FakePool, "step", five_times)
    v = train(NAME, *STILL)
    logged = {row["charts/episodic_return"] for row in rows(v["run"].dir, "charts/episodic_return")}
    assert logged and logged <= {5.0, -5.0}
    assert set(np.unique(v["reward"])) <= {-5.0, 0.0, 5.0} and v["reward"].any()
    ends = v["done"] == 1
    np.testing.assert_allclose(v["rollout"].returns.numpy().reshape(8, 2)[ends], np.sign(v["reward"])[ends])


def test_a_lost_life_ends_the_return_but_not_the_game(train, monkeypatch):
    info = FakePool._info

    def with_lives(self, ids, reward, terminated):
        return info(self, ids, reward, terminated) | {"lives": 3 - self.elapsed[ids] // 2}

    monkeypatch.setattr(FakePool, "_info", with_lives)
    v = train(NAME, *STILL)
    lost = (v["done"] == 1) & ~v["over"]
    assert lost.sum() >= 4 and v["over"].sum() >= 2 and not v["timeout"].any()
    np.testing.assert_allclose(v["rollout"].returns.numpy().reshape(8, 2)[lost], v["reward"][lost])
    lengths = [row["charts/episodic_length"] for row in rows(v["run"].dir, "charts/episodic_length")]
    assert lengths and set(lengths) == {6.0}


def test_time_limit_bootstraps_from_the_final_observation(train, monkeypatch, games):
    limit(monkeypatch, 3)
    v = train(NAME, *STILL)
    steps = games[8:16]  # of the second rollout
    cut = np.argwhere(v["timeout"])
    assert len(cut) >= 4 and np.array_equal(v["timeout"], v["done"]) and (v["final_value"][~v["timeout"]] == 0).all()
    for t, n in cut:
        final_obs = steps[t][4]["final_obs"][n]
        assert not np.array_equal(final_obs, steps[t][0][n])  # which is the next game's
        with torch.no_grad():
            expected = v["q_network"](torch.as_tensor(final_obs)[None]).max().item()
        assert v["final_value"][t, n] == pytest.approx(expected, abs=1e-5) and expected != 0
    returns = v["rollout"].returns.numpy().reshape(8, 2)[v["timeout"]]
    np.testing.assert_allclose(returns, 0.99 * v["final_value"][v["timeout"]], rtol=1e-5)


def test_the_end_of_a_game_on_the_last_step_allowed_is_no_time_limit(train, monkeypatch):
    limit(monkeypatch, 6)
    v = train(NAME, *STILL)
    assert v["over"].any() and not v["timeout"].any() and (v["final_value"] == 0).all()


def test_learning_changes_the_network_and_a_resumed_run_goes_on(train):
    v = train(NAME, *SMALL, "--save-every", "16")
    torch.manual_seed(1)
    first = torch.nn.utils.parameters_to_vector(PQN["QNetwork"](3).parameters())
    learned = torch.nn.utils.parameters_to_vector(v["q_network"].parameters())
    assert not torch.equal(first, learned)
    again = train(NAME, "--resume", v["run"].dir, "--total-timesteps", "48", "--resume-changed")
    assert again["start"] == 2 and "episodes restart" in train.out


def test_other_games_are_refused(train):
    train(NAME, "--env-id", "Catsh-v5", *SMALL[2:], code=2)
    assert "EnvPool has no environment Catsh-v5" in train.out and "Traceback" not in train.out


def test_every_logged_key_is_on_the_page(train):
    logged = {key for row in rows(train(NAME, *SMALL)["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert logged == documented_keys(NAME)
