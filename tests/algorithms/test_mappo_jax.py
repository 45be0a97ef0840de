"""mappo_jax.py: its pure functions against the torch twin, one iteration against brute force, and what it learns."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from clock_team import ClockTeam, compiled
from conftest import copy_layers, definitions, rows

JAX, TORCH = definitions("mappo_jax"), definitions("mappo")
SMALL = "--env-id team/two_step --num-envs 4 --num-steps 16 --eval-episodes 1".split()


def twins(obs_dim=6, state_dim=6, num_actions=4, scale=3.0):
    """The same random weights for both, and returns counted before: the parameters of JAX and the Agent of torch."""
    params = jax.device_get(JAX["init_params"](jax.random.PRNGKey(0), obs_dim, state_dim, num_actions))
    params["actor"][-1]["weight"] = np.float32(np.random.default_rng(7).normal(size=(64, num_actions)))
    params["returns"] = {"mean": np.float32(-scale), "var": np.float32(scale**2), "count": np.float32(50)}
    agent = TORCH["Agent"](obs_dim, state_dim, num_actions)
    copy_layers(params["actor"], agent.actor)
    copy_layers(params["critic"], agent.critic.net)
    for name, value in params["returns"].items():
        getattr(agent.critic, name).fill_(value.item())
    return params, agent


def minibatch(n=48):
    """Random rows for both, of which some actions are not allowed."""
    rng = np.random.default_rng(0)
    action, mask = rng.integers(4, size=n), rng.random((n, 4)) < 0.6
    mask[np.arange(n), action] = True
    obs, state = rng.normal(size=(2, n, 6))
    others = (-rng.random(n) - 0.5, *rng.normal(size=(3, n)) * [[3.0], [1.0], [3.0]])
    batch = [np.float32(obs), np.float32(state), mask, action, *(np.float32(x) for x in others)]
    return JAX["Batch"](*batch), TORCH["Batch"](*map(torch.from_numpy, batch))


def are_equal(params, agent):
    """Whether the weights and statistics of JAX are those of torch."""
    for name, net in (("actor", agent.actor), ("critic", agent.critic.net)):
        for mine, layer in zip(params[name], net[::2], strict=True):
            np.testing.assert_allclose(mine["weight"].T, layer.weight.detach(), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(mine["bias"], layer.bias.detach(), rtol=1e-4, atol=1e-5)
    for name, value in params["returns"].items():
        np.testing.assert_allclose(value, getattr(agent.critic, name), rtol=1e-5)


# ---------------------------------------------------------------------- pure functions
def test_statistics_of_the_returns_are_those_of_the_torch_twin_and_change_no_value():
    """With three rollouts far from each other, which count alike until the smallest weight, here 0.4, is more."""
    (params, agent), rng = twins(), np.random.default_rng(0)
    params["returns"] = {"mean": np.float32(0), "var": np.float32(1), "count": np.float32(0)}
    for name, value in params["returns"].items():
        getattr(agent.critic, name).fill_(value.item())
    state, value = np.float32(rng.normal(size=(20, 6))), jax.jit(JAX["state_value"])
    count, before = jax.jit(partial(JAX["count_team_returns"], rate=0.4)), value(params, state)
    rollouts = [np.float32(rng.normal(mean, std, size=30)) for mean, std in ((5, 1), (-40, 9), (100, 20))]
    for returns in rollouts:
        params = count(params, returns)
        agent.critic.count_returns(torch.from_numpy(returns), 0.4)
        are_equal(params, agent)
        np.testing.assert_allclose(value(params, state), before, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(value(params, state), agent.critic(torch.from_numpy(state)).detach(), rtol=1e-3)
    weights = np.repeat([0.3, 0.3, 0.4], 30) / 30
    mean = weights @ np.concatenate(rollouts)
    var = weights @ (np.concatenate(rollouts) - mean) ** 2
    for name, expected in {"mean": mean, "var": var, "count": 3}.items():
        np.testing.assert_allclose(params["returns"][name], expected, rtol=1e-4)


@pytest.mark.parametrize(("norm_adv", "clip_vloss"), [(True, True), (False, False)])
def test_loss_is_that_of_the_torch_twin(norm_adv, clip_vloss):
    """With masks, and with statistics that are not those of the batch."""
    settings = {"norm_adv": norm_adv, "clip_vloss": clip_vloss, "clip_coef": 0.1, "vf_coef": 0.7, "ent_coef": 0.3}
    (params, agent), (batch, t_batch) = twins(), minibatch()
    loss, metrics = JAX["mappo_loss"](params, batch, JAX["Args"](**settings))
    want, want_metrics = TORCH["mappo_loss"](agent, t_batch, TORCH["Args"](**settings))
    assert metrics.keys() == want_metrics.keys() and np.isfinite(loss)
    for x, y in [(loss, want), *((metrics[name], want_metrics[name]) for name in metrics)]:
        np.testing.assert_allclose(x, y.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_updates_are_those_of_the_torch_twin_and_leave_the_statistics_alone():
    """From the same weights on the same rows: loss, clipped gradient and Adam, three times."""
    (params, agent), (batch, t_batch) = twins(), minibatch()
    optimizer, args = JAX["flat_adam"](0.003, max_grad_norm=0.1), JAX["Args"]()
    state, adam = optimizer.init(params), torch.optim.Adam(agent.parameters(), lr=0.003, eps=1e-5)

    @jax.jit
    def update(params, state):
        gradients, _ = jax.grad(JAX["mappo_loss"], has_aux=True)(params, batch, args)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state

    statistics = params["returns"]
    for _ in range(3):
        params, state = update(params, state)
        loss, _ = TORCH["mappo_loss"](agent, t_batch, TORCH["Args"]())
        adam.zero_grad()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.1) > 0.1  # it does clip
        adam.step()
    are_equal(params, agent)
    assert all(params["returns"][name] == value for name, value in statistics.items())


def test_greedy_actions_are_those_of_the_torch_twin_within_the_masks():
    (params, agent), rng = twins(), np.random.default_rng(0)
    obs, mask = np.float32(rng.normal(size=(60, 3, 3))), rng.random((60, 3, 4)) < 0.4
    mask[..., 2] |= ~mask.any(-1)
    act = jax.jit(JAX["act"])
    got, free = np.asarray(act(params, obs, mask)), np.asarray(act(params, obs, None))
    assert (got == agent.act(obs, mask)).all() and (free == agent.act(obs, None)).all()
    assert np.take_along_axis(mask, got[..., None], 2).all() and not np.take_along_axis(mask, free[..., None], 2).all()
    same = np.repeat(obs[:, :1], 3, 1)  # all see the same, and who they are
    assert (np.ptp(np.asarray(act(params, same, None)), axis=1) > 0).any()


# ---------------------------------------------------------------------- one iteration
def advantages_by_hand(reward, value, ends, last, after, gamma=0.95, lam=0.95):
    """GAE of one agent, as a sum over what follows. ends[t]: "no", "over" or "limit"; last[t]: the value of a final
    state; after: that of the state after the rollout."""
    follows = [*value[1:], after]
    worth = [{"no": follows[t], "over": 0.0, "limit": last[t]}[end] for t, end in enumerate(ends)]
    delta, out = [r + gamma * w - v for r, w, v in zip(reward, worth, value, strict=True)], []
    for t in range(len(reward)):
        stop = next((k for k in range(t, len(reward)) if ends[k] != "no"), len(reward) - 1)
        out.append(sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, stop + 1)))
    return out


def rows_by_hand(x):
    """(num_agents, size) or (size,), then the same for all -> (num_agents, size + num_agents), torch."""
    x = np.broadcast_to(np.asarray(x, np.float32), (3, np.shape(x)[-1]))
    return torch.from_numpy(np.concatenate([x, np.eye(3, dtype=np.float32)], 1))


def rollout_by_hand(agent, gumbel, common):
    """What the agents do in ClockTeam with this noise (num_steps, 2, 3, 4): a Batch of torch, and rewards."""
    envs, batch, reward, critic = ClockTeam(), [], [], lambda x: agent.critic(rows_by_hand(x)).detach().numpy()
    (time, obs), last = envs.reset(None), []
    for noise in np.asarray(gumbel):
        mask, central = np.array(envs.action_mask(time)), envs.central(time)
        rows = [(rows_by_hand(obs[i]), rows_by_hand(central[i]), torch.from_numpy(mask[i])) for i in range(2)]
        logprobs = [agent.actor(x).masked_fill(~m, -torch.inf).log_softmax(1).detach() for x, _, m in rows]
        action = np.stack([(p.numpy() + noise[i]).argmax(1) for i, p in enumerate(logprobs)])
        time, step = envs.step(None, time, jnp.asarray(action))
        taken = [p[torch.arange(3), torch.from_numpy(action[i])] for i, p in enumerate(logprobs)]
        batch.append([(*rows[i], torch.from_numpy(action[i]), taken[i]) for i in range(2)])
        obs, got = step.obs, np.asarray(step.reward)
        reward.append(got)
        last.append([critic(step.final_central[i]) for i in range(2)])
    after, fields = [critic(envs.central(time)[i]) for i in range(2)], [[] for _ in TORCH["Batch"]._fields]
    for i, k in np.ndindex(2, 3):
        kind, steps = ("over", "limit")[i], range(len(batch))
        value = [agent.critic(batch[t][i][1])[k].item() for t in steps]
        own = [reward[t][i].sum() if common else reward[t][i, k] for t in steps]
        ends = [kind if (t + 1) % 5 == 0 else "no" for t in steps]
        advantage = advantages_by_hand(own, value, ends, [last[t][i][k] for t in steps], after[i][k])
        for t in steps:
            row = [x[k] for x in batch[t][i]], [value[t], advantage[t], advantage[t] + value[t]]
            for field, x in zip(fields, [*row[0], *map(torch.tensor, row[1])], strict=True):
                field.append(x)
    return TORCH["Batch"](*(torch.stack(field) for field in fields)), np.stack(reward)


@pytest.mark.slow
@pytest.mark.parametrize("common", [True, False])
def test_one_iteration_is_that_of_brute_force(common):
    """Actions drawn within the masks, the advantages of each agent with ends and time limits, from common or own
    rewards, the statistics of the returns, and one step of Adam: the same weights after it."""
    settings = {"num_steps": 13, "num_minibatches": 1, "update_epochs": 1, "learning_rate": 0.01}
    setup = JAX["Setup"](JAX["Args"](num_envs=2, **settings, common_reward=common), ClockTeam(), 1)
    (params, agent), key = twins(scale=10.0), jax.random.PRNGKey(3)
    training = compiled(partial(JAX["begin"], setup=setup), key)(key)
    one = compiled(partial(JAX["train_iteration"], setup=setup), training)
    after, (got_reward, done, sums, count, charts) = one(training._replace(params=params))
    gumbel = jax.random.gumbel(jax.random.split(training.key, 4)[0], (13, 2, 3, 4))
    batch, reward = rollout_by_hand(agent, gumbel, common)
    np.testing.assert_allclose(got_reward, reward, rtol=1e-5)
    assert count == 1 and done.shape == reward.shape and done.sum() == 2 * 2 * 3 and done[4].all()
    explained = 1 - batch.advantage.var() / (batch.returns.var() + 1e-8)
    np.testing.assert_allclose(charts["losses/explained_variance"], explained, rtol=1e-3, atol=1e-3)
    agent.critic.count_returns(batch.returns.float(), 0.1)
    batch = TORCH["Batch"](*(x.float() if x.is_floating_point() else x for x in batch))
    loss, metrics = TORCH["mappo_loss"](agent, batch, TORCH["Args"](**settings))
    for name, value in metrics.items():
        np.testing.assert_allclose(sums[name], value.item(), rtol=1e-3, atol=1e-5)
    adam = torch.optim.Adam(agent.parameters(), lr=0.01, eps=1e-5)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(agent.parameters(), 10.0)
    adam.step()
    for name in ("mean", "var", "count"):
        np.testing.assert_allclose(after.params["returns"][name], getattr(agent.critic, name), rtol=1e-4)
    for name, net in (("actor", agent.actor), ("critic", agent.critic.net)):
        for mine, layer, old in zip(after.params[name], net[::2], params[name], strict=True):
            np.testing.assert_allclose(mine["weight"].T, layer.weight.detach(), rtol=1e-3, atol=2e-4)
            assert not np.allclose(mine["weight"], old["weight"], atol=2e-3)


# ---------------------------------------------------------------------- whole trainings
@pytest.mark.slow
def test_it_logs_what_its_twin_logs(train):
    """The same keys at the same steps."""
    flags = [*SMALL, "--total-timesteps", 256, "--eval-every", 128]
    run, twin = train("mappo_jax", *flags)["run"].runs[0], train("mappo", *flags)["run"]
    keys = [{key for row in rows(r.dir) for key in row} for r in (run, twin)]
    assert keys[0] == keys[1] and "charts/episodic_return_agent_1" in keys[0]
    evaluated = [[row["global_step"] for row in rows(r.dir, "eval/episodic_return")] for r in (run, twin)]
    assert evaluated[0] == evaluated[1] == [128, 256]


@pytest.mark.slow
def test_games_in_which_agents_have_unequal_actions_are_evaluated_within_the_masks(train):
    """The speaker has three actions, the listener five; mpe2's game would refuse others."""
    flags = ["--env-id", "team/simple_speaker_listener_v4", "--num-envs", 4, "--num-steps", 16, "--eval-episodes", 2]
    run = train("mappo_jax", *flags, "--total-timesteps", 256)["run"].runs[0]
    assert run.evaluator.last[0] == 256 and np.isfinite(run.evaluator.last[1])


def test_wrong_input_is_one_sentence(train):
    train("mappo_jax", "--env-id", "team/simple_spread_continuous_v3", code=2)
    assert "takes discrete actions; use maddpg.py" in train.out
    train("mappo_jax", "--env-id", "CartPole-v1", code=2)
    assert "CartPole-v1 has one agent, but mappo_jax.py takes several; use ppo_jax.py" in train.out
    train("mappo_jax", "--env-id", "mpe/simple_spread_v3", code=2)
    assert "is not a game of several agents written in JAX" in train.out and "use mappo.py" in train.out
    train("mappo_jax", *SMALL, "--num-minibatches", 3, code=2)
    assert "--num-minibatches 3 must divide the batch of 64 steps" in train.out and "Traceback" not in train.out


@pytest.mark.slow
def test_it_learns_the_two_step_game(train):
    """Two seeds in one process."""
    flags = [*SMALL, "--num-envs", 16, "--total-timesteps", 20_000, "--num-seeds", 2]
    means = [run.evaluator.last[1] for run in train("mappo_jax", *flags, "--eval-every", 0)["run"].runs]
    assert min(means) >= 7, means  # random actions get 4.75
