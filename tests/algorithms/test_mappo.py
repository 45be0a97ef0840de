"""mappo.py: the critic sees the central state and who the agent is, and nothing else. What it has in common with
ippo.py is tested in test_ippo.py."""

import numpy as np
import pytest
import torch
from conftest import definitions, rows
from test_ippo import ONCE

from solorl.envs.pettingzoo import PettingZooEnvs

MAPPO = definitions("mappo")


def rows_of(state, num_agents):
    """What the critic sees of each agent: the central state, then the one-hot id, by hand."""
    return np.array([[*np.ravel(state), *(float(k == j) for j in range(num_agents))] for k in range(num_agents)])


def test_each_agent_has_the_state_and_who_it_is():
    state = np.random.default_rng(0).normal(size=(5, 2, 3))
    got = MAPPO["of_each_agent"](state, 4)
    np.testing.assert_allclose(got, np.stack([rows_of(one, 4) for one in state]), rtol=1e-6)
    assert got.dtype == torch.float32


def test_values_depend_on_the_state_only_and_the_policy_on_the_observation_only():
    torch.manual_seed(0)
    agent = MAPPO["Agent"](5, 7, 3)
    obs, state = torch.randn(30, 5, requires_grad=True), torch.randn(30, 7, requires_grad=True)
    mask, action = torch.ones(30, 3, dtype=torch.bool), torch.zeros(30, dtype=torch.long)
    logprob, entropy, value = agent.evaluate_actions(obs, state, mask, action)
    of_obs, of_state = torch.autograd.grad(value.sum(), (obs, state), allow_unused=True, retain_graph=True)
    assert of_obs is None and (of_state != 0).all()
    of_obs, of_state = torch.autograd.grad((logprob + entropy).sum(), (obs, state), allow_unused=True)
    assert (of_obs != 0).all() and of_state is None


@pytest.fixture
def told(train, monkeypatch):
    """The variables after a rollout without learning, and what the games said in each step: the state acted in, that
    after it, and that of the end of each game that ended."""
    found, step = [], PettingZooEnvs.step

    def noting(envs, actions):
        before = envs.state
        told = step(envs, actions)
        over = (told[2] | told[3]).all(-1)
        last = envs.state
        for i in np.flatnonzero(over):
            last[i] = told[4]["final_info"]["state"][i]
        found.append((before, last))
        return told

    monkeypatch.setattr(PettingZooEnvs, "step", noting)
    return train("mappo", *ONCE, "--learning-rate", "0", "--num-envs", "8", "--total-timesteps", "128"), found[:16]


def test_the_critic_gets_the_state_of_the_game(told):
    """That of the observation acted on, after time limits that of the end of the game, and after the rollout the
    present one."""
    v, found = told
    critic = lambda x: v["agent"].critic(torch.as_tensor(x, dtype=torch.float32)).detach()  # noqa: E731
    for t, (before, last) in enumerate(found):
        for i in range(8):
            seen = rows_of(before[i], 4)
            np.testing.assert_allclose(v["state"][t, i], seen, rtol=1e-6)
            np.testing.assert_allclose(v["value"][t, i], critic(seen), rtol=1e-4, atol=1e-4)
            cut = v["timeout"][t, i]
            np.testing.assert_allclose(
                v["final_value"][t, i][cut], critic(rows_of(last[i], 4))[cut], rtol=1e-4, atol=1e-4
            )
    whole = v["done"].all(-1)
    assert v["timeout"][whole].any() and v["timeout"][~whole].any()
    now = np.stack([rows_of(one, 4) for one in v["envs"].state])
    np.testing.assert_allclose(v["next_value"], critic(now), rtol=1e-4, atol=1e-4)
    assert v["value"].std(-1).min() > 0  # who one is matters


@pytest.mark.slow
@pytest.mark.parametrize(("env_id", "least"), [("team/two_step", 7), ("team/climbing", 125)])
def test_it_learns_a_matrix_game(env_id, least, train):
    flags = "--num-envs 16 --num-steps 16 --total-timesteps 20480 --eval-every 0 --eval-episodes 2".split()
    v = train("mappo", "--env-id", env_id, *flags)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] >= least
