"""pqn_vdn_jax.py: values of all joint actions, one iteration against brute force, and what it learns."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from clock_team import ClockTeam, compiled
from conftest import comparable, copy_layers, definitions, rows
from safetensors.numpy import load_file

from solorl.games.teams.game import JaxTeams

JAX, TORCH = definitions("pqn_vdn_jax"), definitions("pqn")
q_values = jax.jit(JAX["q_values"])
SMALL = "--env-id team/two_step --num-envs 2 --num-steps 16 --num-minibatches 2 --eval-episodes 1".split()
AGAIN = "--total-timesteps 512 --eval-every 128 --save-every 128 --num-seeds 2".split()


def twins(obs_dim=6, num_actions=4):
    """The same random weights for both: the parameters of JAX and the QNetwork of pqn.py, for one row per agent."""
    params = jax.device_get(JAX["init_params"](jax.random.PRNGKey(0), obs_dim, num_actions))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: np.float32(x + 0.1 * rng.normal(size=x.shape)), params)
    network = TORCH["QNetwork"](obs_dim, num_actions)
    copy_layers(params["linear"], network.net)
    for mine, layer in zip(params["norm"], (network.net[1], network.net[4]), strict=True):
        layer.load_state_dict({name: torch.tensor(np.array(x)) for name, x in mine.items()})
    return params, network


def values_by_hand(network, obs):
    """(..., num_agents, obs_dim) -> (..., num_agents, num_actions): each agent's row with the one-hot vector of its
    place, one after the other."""
    obs = np.asarray(obs)
    out = torch.zeros(*obs.shape[:-1], network.net[-1].out_features)
    for place in np.ndindex(*obs.shape[:-1]):
        row = np.concatenate([obs[place], np.eye(obs.shape[-2], dtype=np.float32)[place[-1]]])
        out[place] = network(torch.from_numpy(row)[None])[0]
    return out


def begun(envs, num_iterations=1, seed=3, **settings):
    """The training before its first iteration, and one iteration as a compiled function."""
    args = JAX["Args"](**{"num_envs": envs.num_envs, "start_e": 0.0, "end_e": 0.0} | settings)
    setup = JAX["Setup"](args, envs, num_iterations)
    key, begin = jax.random.PRNGKey(seed), partial(JAX["begin"], setup=setup)
    training = compiled(begin, key)(key)
    return training, compiled(partial(JAX["train_iteration"], setup=setup), training)


# ---------------------------------------------------------------------- pure functions
def test_agents_with_the_same_observation_have_different_values():
    """They share the weights, and see who they are."""
    (params, network), obs = twins(), np.float32(np.random.default_rng(0).normal(size=(5, 7, 3, 3)))
    obs[:, :, 1] = obs[:, :, 0]
    q = q_values(params, obs)
    np.testing.assert_allclose(q, values_by_hand(network, obs).detach(), rtol=1e-4, atol=1e-5)
    assert q.shape == (5, 7, 3, 4) and np.abs(q[:, :, 1] - q[:, :, 0]).min() > 1e-4


def test_the_best_joint_action_is_the_best_of_each_agent():
    """Of all joint actions that are allowed, one after the other."""
    rng = np.random.default_rng(0)
    (params, _), obs = twins(), np.float32(rng.normal(size=(40, 3, 3)))
    mask = rng.random((40, 3, 4)) < 0.5
    mask[np.arange(40)[:, None], np.arange(3), rng.integers(4, size=(40, 3))] = True  # at least one
    q, action = np.asarray(q_values(params, obs)), np.asarray(jax.jit(JAX["act"])(params, obs, mask))
    got, free = JAX["team_value"](q_values(params, obs, mask)), np.asarray(JAX["act"](params, obs, None))
    for i in range(40):
        total = {joint: sum(q[i, k, joint[k]] for k in range(3)) for joint in product(range(4), repeat=3)}
        legal = {joint: value for joint, value in total.items() if all(mask[i, k, joint[k]] for k in range(3))}
        assert tuple(action[i]) == max(legal, key=legal.get) and tuple(free[i]) == max(total, key=total.get)
        np.testing.assert_allclose(got[i], max(legal.values()), rtol=1e-5)
    assert (action != free).any()


# ---------------------------------------------------------------------- one iteration
def returns_by_hand(reward, best, ends, last, after, gamma=0.95, lam=0.65):
    """Q(lambda) of one game, step by step from the end. best[t]: the team's value before step t; ends[t]: "no", "over"
    or "limit"; last[t]: the value of a final observation; after: that of the observation after the rollout."""
    returns, follows, value = [], after, after
    for t in reversed(range(len(reward))):
        worth = {"no": lam * follows + (1 - lam) * value, "over": 0.0, "limit": last[t]}[ends[t]]
        follows, value = reward[t] + gamma * worth, best[t]
        returns.insert(0, follows)
    return returns


def rollout_by_hand(network, num_steps):
    """What the greedy policy does in ClockTeam: observations, actions, returns of each game, and rewards."""
    envs = ClockTeam()
    (state, obs), seen = envs.reset(None), {"obs": [], "action": [], "best": [], "reward": [], "last": []}
    bests = lambda obs, mask: values_by_hand(network, obs).detach().masked_fill(~torch.tensor(mask), -torch.inf)  # noqa: E731
    for _ in range(num_steps):
        q = bests(obs, np.array(envs.action_mask(state)))
        action = q.argmax(-1).numpy()
        state, step = envs.step(None, state, jnp.asarray(action))
        last = bests(step.final_obs, np.array(step.final_action_mask)).amax(-1).sum(-1)
        new = (np.asarray(obs), action, q.amax(-1).sum(-1).numpy(), np.asarray(step.reward), last.numpy())
        for name, value in zip(seen, new, strict=True):
            seen[name].append(value)
        obs = step.obs
    seen = {name: np.stack(values) for name, values in seen.items()}
    after = bests(obs, np.array(envs.action_mask(state))).amax(-1).sum(-1).numpy()
    returns = []
    for game, kind in enumerate(("over", "limit")):
        ends = [kind if (t + 1) % 5 == 0 else "no" for t in range(num_steps)]
        total = seen["reward"][:, game].sum(-1)
        returns.append(returns_by_hand(total, seen["best"][:, game], ends, seen["last"][:, game], after[game]))
    return seen["obs"], seen["action"], np.array(returns, np.float32).T, seen["reward"]


def test_one_iteration_is_that_of_brute_force():
    """Greedy actions within the masks, the returns of the team with ends and time limits, the loss of the sum, one step
    of RAdam: the same weights after it."""
    training, one = begun(ClockTeam(), num_steps=13, num_minibatches=1, update_epochs=1, learning_rate=0.01)
    params, network = twins()
    after, (got_reward, done, sums, count, _) = one(training._replace(params=params))
    obs, action, returns, reward = rollout_by_hand(network, 13)
    np.testing.assert_allclose(got_reward, reward, rtol=1e-5)
    assert count == 1 and done.shape == reward.shape and done.sum() == 2 * 2 * 3 and done[4].all()
    q, loss = values_by_hand(network, obs), 0.0
    for t, game in np.ndindex(13, 2):
        team = sum(q[t, game, k, action[t, game, k]] for k in range(3))
        loss = loss + (team - returns[t, game].item()) ** 2 / 26
    np.testing.assert_allclose(sums["losses/td_loss"], loss.item(), rtol=1e-4)
    radam = torch.optim.RAdam(network.parameters(), lr=0.01)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 10.0)
    radam.step()
    for mine, layer in zip(after.params["linear"], network.net[::3], strict=True):
        np.testing.assert_allclose(mine["weight"].T, layer.weight.detach(), rtol=1e-4, atol=1e-5)
    assert not np.allclose(after.params["linear"][1]["weight"], params["linear"][1]["weight"], atol=1e-4)


@pytest.mark.slow
def test_random_actions_are_all_that_are_allowed_equally_often():
    """With epsilon 1, each agent on its own; a forbidden action would be a reward of NaN."""
    training, one = begun(ClockTeam(), num_steps=4000, num_minibatches=1, update_epochs=1, start_e=1.0, end_e=1.0)
    _, (reward, *_) = one(training)
    time = np.arange(4000)[:, None, None]
    action = (np.asarray(reward) + 1 - 0.1 * np.cos(time)) / 0.3 / (1 + np.arange(3))
    assert np.abs(action - action.round()).max() < 1e-3
    action, mask = action.round().astype(int), np.stack([ClockTeam().action_mask(t) for t in range(4)])
    for t, game, k in np.ndindex(4, 2, 3):
        often = np.bincount(action[t::4, game, k], minlength=4) / 1000
        wanted = mask[t, game, k] / mask[t, game, k].sum()
        np.testing.assert_allclose(often, wanted, atol=4 * (0.25 / 1000) ** 0.5)
        assert (often[~mask[t, game, k]] == 0).all()
    both = action[::4, 0, 0] == action[::4, 0, 1]  # {1, 2, 3} and {0, 2, 3} have two in common
    assert both.mean() == pytest.approx(2 / 9, abs=4 * (2 / 9 * 7 / 9 / 1000) ** 0.5)


@pytest.mark.slow
def test_it_learns_the_best_sum_of_the_two_step_game():
    """With random actions only and targets of one step the values are a least-squares fit by sums: -1.5, 2.5, 2.5 and
    6.5 in state 2B, so that 7 looks better than the 8 of the best play. The first two seeds of a training by vmap."""
    settings = {"q_lambda": 0.0, "gamma": 0.99, "num_steps": 16, "learning_rate": 1e-3, "start_e": 1.0, "end_e": 1.0}
    envs = JaxTeams("team/two_step", 32)
    setup = JAX["Setup"](JAX["Args"](num_envs=32, anneal_lr=True, **settings), envs, 150)
    training = jax.vmap(partial(JAX["begin"], setup=setup))(jax.vmap(jax.random.PRNGKey)(jnp.arange(2)))
    one = jax.jit(jax.vmap(lambda training: JAX["train_iteration"](training, setup)[0]))
    for _ in range(150):
        training = one(training)
    states = jnp.repeat(jnp.eye(3)[:, None], 2, 1)  # 1, 2A, 2B
    q = jax.vmap(lambda params: JAX["q_values"](params, states))(training.params)  # (seeds, states, agents, actions)
    joint = q[:, :, 0, :, None] + q[:, :, 1, None]
    np.testing.assert_allclose(joint[:, 1], 7, atol=0.3)
    np.testing.assert_allclose(joint[:, 2], [[[-1.5, 2.5], [2.5, 6.5]]] * 2, atol=0.5)
    assert (joint[:, 0].min(2)[:, 0] > joint[:, 0].max(2)[:, 1]).all()  # the first agent goes to 2A
    np.testing.assert_allclose(joint[:, 0, 0], 0.99 * 7, atol=0.3)


# ---------------------------------------------------------------------- whole trainings
@pytest.mark.slow
def test_a_stopped_training_goes_on_exactly(train, tmp_path):
    """Two seeds ended after a chunk, the second resumed alone: all that a checkpoint holds is equal to the bit, and the
    seeds differ from each other."""
    flags = ["pqn_vdn_jax", *SMALL, *AGAIN]
    train(*flags)
    train(*flags, "--target-return", -100, runs_dir=tmp_path / "cut")
    one, two, cut = (
        next((tmp_path / folder).glob(f"*__{seed}__*")) for folder, seed in (("runs", 1), ("runs", 2), ("cut", 2))
    )
    assert rows(cut)[-1]["global_step"] < 512
    train("pqn_vdn_jax", "--resume", cut, "--target-return", "None")
    saved = [load_file(max((run / "checkpoint").iterdir()) / "tensors.safetensors") for run in (one, two, cut)]
    other, a, b = ({k: x for k, x in each.items() if not k.startswith("/random")} for each in saved)
    assert a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
    assert any("env_state" in key for key in a) and any("optimizer" in key for key in a)
    weights = [key for key in a if "params.linear" in key and "weight" in key]
    assert len(weights) == 3 and all(not np.array_equal(a[key], other[key]) for key in weights)
    logged = [[row for row in comparable(run) if "eval/episodic_return" not in row] for run in (two, cut)]
    assert logged[0] == logged[1] and len(logged[0]) > 5


@pytest.mark.slow
def test_its_rows_have_the_returns_of_the_team_and_of_each_agent(train):
    run = train("pqn_vdn_jax", *SMALL, "--total-timesteps", 256)["run"].runs[0]
    ended = rows(run.dir, "charts/episodic_return")
    assert len(ended) == 128 and {row["charts/episodic_length"] for row in ended} == {2}
    for row in ended:
        assert row["charts/episodic_return"] in (0, 1, 7, 8)
        agents = [row[f"charts/episodic_return_agent_{k}"] for k in range(2)]
        assert agents[0] == agents[1] == row["charts/episodic_return"] / 2
    assert rows(run.dir, "losses/td_loss")[-1]["global_step"] == 256 and rows(run.dir, "eval/episodic_return")


@pytest.mark.slow
def test_games_in_which_agents_have_unequal_actions_are_evaluated_within_the_masks(train):
    """The speaker has three actions, the listener five; mpe2's game would refuse others."""
    flags = ["--env-id", "team/simple_speaker_listener_v4", "--num-envs", 4, "--num-steps", 16, "--eval-episodes", 2]
    run = train("pqn_vdn_jax", *flags, "--total-timesteps", 256)["run"].runs[0]
    assert run.evaluator.last[0] == 256 and np.isfinite(run.evaluator.last[1])


def test_wrong_input_is_one_sentence(train):
    train("pqn_vdn_jax", "--env-id", "team/simple_spread_continuous_v3", code=2)
    assert "takes discrete actions; use maddpg.py" in train.out
    train("pqn_vdn_jax", "--env-id", "CartPole-v1", code=2)
    assert "CartPole-v1 has one agent, but pqn_vdn_jax.py takes several; use pqn_jax.py" in train.out
    train("pqn_vdn_jax", "--env-id", "mpe/simple_spread_v3", code=2)
    assert "is not a game of several agents written in JAX" in train.out and "use vdn.py" in train.out
    train("pqn_vdn_jax", *SMALL, "--num-minibatches", 3, code=2)
    assert "--num-minibatches 3 must divide the batch of 32 steps" in train.out and "Traceback" not in train.out


@pytest.mark.slow
def test_it_learns_the_two_step_game(train):
    flags = [*SMALL, "--num-envs", 16, "--total-timesteps", 40_000, "--num-seeds", 2]
    means = [run.evaluator.last[1] for run in train("pqn_vdn_jax", *flags, "--eval-every", 0)["run"].runs]
    assert min(means) >= 7, means  # random actions get 4.75
