"""mappo_rnn.py: the memory of each agent, whole rollouts in minibatches, limits with the memory of the game that was
cut. What it has in common with its parents is tested in test_ippo.py and test_mappo.py."""

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows
from test_ippo import ONCE, RAID, SMALL, later_advantages, masks
from test_mappo import rows_of

from solorl.envs.pettingzoo import PettingZooEnvs

RNN = definitions("mappo_rnn")
RECALL = "team_probes:TeamRecall-v0"


def remembered(network, x, hidden, first):
    """One agent of one game by itself, step by step: x (steps, dim), hidden (64,), first (steps,) -> outputs."""
    outputs = []
    for row, begins in zip(x, first, strict=True):
        hidden = torch.zeros(64, dtype=hidden.dtype) if begins else hidden
        hidden = network.gru(network.encoder(row)[None], hidden[None])[0]
        outputs.append(network.head(hidden))
    return torch.stack(outputs), hidden


@torch.no_grad()
def test_every_agent_of_every_game_has_a_memory_of_its_own():
    """Which is empty where a game begins: against each agent by itself."""
    torch.manual_seed(0)
    network = RNN["Recurrent"](3, 2, 1.0).double()
    x, hidden = torch.randn(7, 4, 2, 3).double(), torch.randn(4, 2, 64).double()
    first = torch.as_tensor(np.random.default_rng(0).random((7, 4)) < 0.3)
    output, after = network(x, hidden, first)
    for i, k in np.ndindex(4, 2):
        want, last = remembered(network, x[:, i, k], hidden[i, k], first[:, i])
        torch.testing.assert_close(output[:, i, k], want)
        torch.testing.assert_close(after[i, k], last)
    assert first.any() and not first.all()


@torch.no_grad()
def test_evaluation_remembers_and_keeps_to_masks():
    """Step by step as in one sequence; the first observation matters later."""
    torch.manual_seed(0)
    agent, rng = RNN["Agent"](6, 5, 4), np.random.default_rng(0)
    torch.nn.init.orthogonal_(agent.actor.head.weight, 50.0)
    obs, mask, first = rng.normal(size=(5, 20, 2, 4)).astype(np.float32), masks(5, 20, 2, 4), np.zeros((5, 20), bool)
    first[0] = True
    seen = RNN["with_agent_id"](torch.as_tensor(obs))
    logits, _ = agent.actor(seen, torch.zeros(20, 2, 64), torch.as_tensor(first))
    state, actions = None, []
    for t in range(5):
        action, state = agent.act(obs[t], state, first[t], mask[t])
        actions.append(action)
        np.testing.assert_array_equal(action, np.where(mask[t], logits[t], -np.inf).argmax(-1))
    _, state = agent.act(-obs[0], None, first[0], None)
    other, _ = agent.act(obs[1], state, first[1], mask[1])
    assert (other != actions[1]).any()


@pytest.fixture
def played(train, monkeypatch):
    """The variables after a rollout without learning, and the state of the end of each step: that to which it led."""
    found, step = [], PettingZooEnvs.step

    def noting(envs, actions):
        told = step(envs, actions)
        last = envs.state
        for i in np.flatnonzero((told[2] | told[3]).all(-1)):
            last[i] = told[4]["final_info"]["state"][i]
        found.append(last)
        return told

    monkeypatch.setattr(PettingZooEnvs, "step", noting)
    flags = [*ONCE, "--learning-rate", "0", "--num-envs", "8", "--total-timesteps", "256"]  # two rollouts
    return train("mappo_rnn", *flags), found[16:]


@torch.no_grad()
def test_values_and_limits_remember_the_game(played):
    """Each agent by itself, from the memory before the rollout: the values of all steps, of the states that time limits
    led to, and of the one after the rollout."""
    v, found = played
    critic, limits = v["agent"].critic, 0
    first = np.concatenate([v["first"], v["now"].first[None]])
    now = np.stack([rows_of(one, 4) for one in v["envs"].state])
    state = torch.as_tensor(np.concatenate([v["state"], now[None]]), dtype=torch.float32)
    for i, k in np.ndindex(8, 4):
        want, _ = remembered(critic.net, state[:, i, k], v["memory_before"][1, i, k], first[:, i])
        want = (critic.mean + critic.std() * want[:, 0]).numpy()
        np.testing.assert_allclose(v["value"][:, i, k], want[:-1], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(v["next_value"][i, k], want[-1], rtol=1e-4, atol=1e-4)
        for t in np.flatnonzero(v["timeout"][:, i, k]):
            last = torch.as_tensor(rows_of(found[t][i], 4)[k], dtype=torch.float32)
            x = torch.cat([state[: t + 1, i, k], last[None]])
            cut, _ = remembered(critic.net, x, v["memory_before"][1, i, k], [*first[: t + 1, i], False])
            value = critic.mean + critic.std() * cut[-1, 0]
            np.testing.assert_allclose(v["final_value"][t, i, k], value, rtol=1e-4, atol=1e-4)
            limits += 1
    assert limits and v["memory_before"].abs().max() > 0 and not v["final_value"][~v["timeout"]].any()
    np.testing.assert_array_equal(first[1:], v["done"].all(-1))


def test_the_advantage_of_each_agent_is_that_of_its_own_time_in_the_game(train):
    v = train("mappo_rnn", *ONCE, "--learning-rate", "0", "--no-common-reward")
    want, alive = later_advantages(v, v["reward"], v["args"].gamma, 0.95), v["alive"]
    np.testing.assert_allclose(v["advantage"][alive], want[alive], rtol=1e-4, atol=1e-4)
    assert not alive.all()


def test_the_loss_has_the_memory_of_acting(train, batches):
    """Of a rollout that begins in the middle of games: the GRUs give the values and probabilities of acting again."""
    v = train("mappo_rnn", *ONCE, "--learning-rate", "0", "--update-epochs", "1", "--total-timesteps", "96")
    batch = batches[-1]
    with torch.no_grad():
        inputs = (batch.obs, batch.state, batch.first, batch.memory, batch.mask, batch.action)
        logprob, _, value = v["agent"].evaluate_actions(*inputs)
    alive = batch.alive
    np.testing.assert_allclose(value[alive], batch.value[alive], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logprob[alive], batch.logprob[alive], atol=1e-5)
    assert len(batches) == 2 and not batch.first[0].all() and batch.memory.abs().max() > 0


def test_minibatches_are_whole_rollouts_of_some_games(train, batches):
    """Each game once in an epoch, with its own memory."""
    flags = ["--num-envs", "4", "--num-minibatches", "2", "--update-epochs", "1", "--total-timesteps", "64"]
    v = train("mappo_rnn", *ONCE, *flags)
    assert [tuple(batch.obs.shape[:3]) for batch in batches] == [(16, 2, 4)] * 2
    rollout = v["rollout"]
    games = [
        next(i for i in range(4) if torch.equal(batch.obs[:, j], rollout.obs[:, i]))
        for batch in batches
        for j in (0, 1)
    ]
    assert sorted(games) == [0, 1, 2, 3]
    for place, i in enumerate(games):
        batch, j = batches[place // 2], place % 2
        assert torch.equal(batch.memory[:, j], rollout.memory[:, i])
        assert all(torch.equal(x[:, j], y[:, i]) for x, y in zip(batch, rollout, strict=True))


@pytest.mark.parametrize("env_id", [RAID, RECALL])
def test_resumed_equals_uninterrupted(env_id, train):
    """In the middle of games: what was remembered is in the checkpoint."""
    flags = ["--env-id", env_id, *SMALL, "--num-steps", "7", "--total-timesteps", "42", "--save-every", "21"]
    whole = train("mappo_rnn", *flags, "--learning-rate", "0.01")
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("mappo_rnn", "--resume", run_dir)
    assert v["start"] == 1 and comparable(run_dir) == expected and "restart" not in train.out
    for key, x in whole["agent"].state_dict().items():
        assert torch.equal(x, v["agent"].state_dict()[key]), key
    assert torch.equal(v["now"].memory, whole["now"].memory) and v["now"].memory.abs().max() > 0
    for key in ("obs", "action", "first", "alive"):
        assert np.array_equal(v[key], whole[key]), key


def test_rollouts_of_games_stay_whole(train):
    train("mappo_rnn", *ONCE, "--num-minibatches", "2", code=2)
    assert train.out.startswith("error: --num-minibatches 2 must divide the 3 environments of --num-envs")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least", "most"), [("mappo_rnn", 1.9, 2.0), ("mappo", 0.0, 1.5)])
def test_it_learns_to_remember(name, least, most, train):
    """Both agents play the card that they saw in the first step; without memory half of them are right."""
    flags = "--num-envs 32 --num-steps 16 --total-timesteps 40960 --eval-every 0 --eval-episodes 100".split()
    v = train(name, "--env-id", RECALL, *flags, "--learning-rate", "0.003")
    assert least <= rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] <= most
