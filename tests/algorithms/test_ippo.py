"""ippo.py, and what mappo.py has in common with it: credit, masks, agents that leave, values in units of returns."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows
from raid import LIMIT

from solorl.compute.speed import GradientStep
from solorl.envs.ids import check_env_id
from solorl.envs.pettingzoo import PettingZooEnvs
from solorl.run.environments import Opened

IPPO = definitions("ippo")
RAID = "team_probes:TeamRaid-v0"  # 4 agents with masks, some leave early, one by a limit of its own
SMALL = (
    "--num-envs 3 --num-steps 16 --num-minibatches 1 --update-epochs 2 --total-timesteps 96 --eval-episodes 1".split()
)
ONCE = ["--env-id", RAID, *SMALL, "--total-timesteps", "48"]
BOTH = pytest.mark.parametrize("name", ["ippo", "mappo"])


def make_agent(obs_dim=5, num_actions=4):
    """An agent whose logits are of some size."""
    torch.manual_seed(0)
    agent = IPPO["Agent"](obs_dim, num_actions)
    torch.nn.init.orthogonal_(agent.actor[-1].weight, 300.0)
    return agent


def masks(*shape):
    """Masks that allow at least one action."""
    mask = np.random.default_rng(0).random(shape) < 0.5
    mask[..., 1] |= ~mask.any(-1)
    return mask


# ---------------------------------------------------------------------- what agents see
def test_each_agent_sees_who_it_is():
    obs = torch.arange(24.0).reshape(2, 3, 4)
    seen = IPPO["with_agent_id"](obs)
    assert seen.shape == (2, 3, 7)
    for game in range(2):
        for k in range(3):
            assert seen[game, k].tolist() == [*obs[game, k].tolist(), *(float(k == j) for j in range(3))]


def test_every_row_of_the_policy_is_one_agent_of_one_game():
    """Agents with the same weights and the same observation choose differently, by who they are."""
    agent, obs = make_agent(), np.random.default_rng(0).normal(size=(20, 1, 2)).repeat(3, 1)
    want = np.empty((20, 3), int)
    for game, k in np.ndindex(20, 3):
        row = torch.tensor([*obs[game, k], *np.eye(3)[k]], dtype=torch.float32)
        want[game, k] = agent.actor(row[None]).argmax()
    np.testing.assert_array_equal(agent.act(obs, None), want)
    assert (want[:, 0] != want[:, 1]).any() and (want.std(0) > 0).all()


# ---------------------------------------------------------------------- masks
def test_masked_actions_have_probability_0():
    """Softmax over the allowed actions alone, by brute force; in acting, learning and evaluation."""
    agent, obs, mask = make_agent(), torch.randn(200, 5), torch.as_tensor(masks(200, 4))
    with torch.no_grad():
        logits = agent.actor(obs).double().numpy()
    assert not mask.numpy()[np.arange(200), logits.argmax(1)].all()  # some of the largest logits are not allowed
    p = np.exp(logits - logits.max(1, keepdims=True, where=mask.numpy(), initial=-np.inf)) * mask.numpy()
    p /= p.sum(1, keepdims=True)
    for action in range(4):
        logprob, entropy, _ = agent.evaluate_actions(obs, mask, torch.full((200,), action))
        np.testing.assert_allclose(logprob.exp().detach(), p[:, action], atol=1e-5)
        assert (logprob.exp()[~mask[:, action]] == 0).all() and logprob.isfinite().all()
    np.testing.assert_allclose(entropy.detach(), -(p * np.log(np.where(p > 0, p, 1))).sum(1), atol=1e-4)
    np.random.seed(0)
    for _ in range(20):
        action, _ = IPPO["sample_categorical"](IPPO["allowed_logits"](logits, mask.numpy()))
        assert mask.numpy()[np.arange(200), action].all()
    games, allowed = np.random.default_rng(1).normal(size=(50, 3, 2)), masks(50, 3, 4)
    free = agent.act(games, None)
    chosen = agent.act(games, allowed)
    assert np.take_along_axis(allowed, chosen[..., None], -1).all() and (chosen != free).any()
    kept = np.take_along_axis(allowed, free[..., None], -1)[..., 0]
    np.testing.assert_array_equal(chosen[kept], free[kept])


@pytest.mark.parametrize("name", ["ippo", "mappo", "mappo_rnn"])
def test_no_masked_action_is_ever_taken(name, train, monkeypatch):
    """In training and evaluation, with the mask that the game gave with the observation."""
    taken, step = [], PettingZooEnvs.step

    def noting(envs, actions):
        taken.append(np.take_along_axis(envs.action_mask, np.asarray(actions)[..., None], -1).all())
        return step(envs, actions)

    monkeypatch.setattr(PettingZooEnvs, "step", noting)
    v = train(name, "--env-id", RAID, *SMALL, "--num-steps", "32", "--total-timesteps", "192")
    assert all(taken) and len(taken) == 64 and not v["mask"].all()
    assert set(np.unique(v["action"])) == {0, 1, 2}


# ---------------------------------------------------------------------- credit
def later_advantages(v, reward, gamma, lam):
    """Eq. 11 of each agent, from the end of its own time in the game: a sum over the steps from here to there."""
    steps = len(reward)
    want = np.full(reward.shape, np.nan)
    for start, i, k in np.argwhere(v["alive"]):
        total, weight = 0.0, 1.0
        for t in range(start, steps):
            after = v["next_value"][i, k] if t == steps - 1 else v["value"][t + 1, i, k]
            if left := v["done"][t, i, k]:
                after = v["final_value"][t, i, k]
            total += weight * (reward[t, i, k] + gamma * after - v["value"][t, i, k])
            if left:
                break
            weight *= gamma * lam
        want[start, i, k] = total
    return want


@BOTH
@pytest.mark.parametrize("common", [True, False])
def test_the_advantage_of_each_agent_is_that_of_its_own_time_in_the_game(name, common, train):
    """From the sum of all rewards, or from its own."""
    flag = "--common-reward" if common else "--no-common-reward"
    v = train(name, *ONCE, "--learning-rate", "0", flag)
    reward = v["reward"]
    if common:
        reward = np.stack([np.stack([game.sum() for game in step]) for step in reward])[..., None].repeat(4, -1)
    want, alive = later_advantages(v, reward, v["args"].gamma, 0.95), v["alive"]
    np.testing.assert_allclose(v["advantage"][alive], want[alive], rtol=1e-4, atol=1e-4)
    done = v["done"].astype(bool)
    early = done & ~done.all(-1, keepdims=True) & alive
    assert early.any() and not alive.all()  # some have left before the others


@BOTH
def test_a_limit_bootstraps_and_an_end_does_not(name, train):
    """Of the whole game, and of an agent that leaves it by a limit of its own; never of one that has left before."""
    v = train(name, *ONCE, "--learning-rate", "0", "--num-envs", "8", "--total-timesteps", "128")
    cut, whole = v["timeout"], v["done"].all(-1)
    assert not v["final_value"][~cut].any() and (v["final_value"][cut] != 0).all()
    assert not (cut & ~v["alive"]).any() and not v["final_value"][v["done"].astype(bool) & ~cut].any()
    assert cut[whole].any() and cut[~whole].any()
    home = v["envs"].agents.index("blue_1")  # which goes home after 3 steps
    assert set(np.argwhere(cut[~whole])[:, 1]) == {home}


def test_the_limit_of_an_agent_bootstraps_from_its_own_last_observation(train):
    """What the game showed it in the step in which it left, with who it is."""
    v = train("ippo", *ONCE, "--learning-rate", "0", "--num-envs", "8", "--total-timesteps", "128")
    cut, final = v["timeout"], v["final_obs"]
    with torch.no_grad():
        want = v["agent"].critic(torch.as_tensor(final[cut])).numpy()
    np.testing.assert_allclose(v["final_value"][cut], want, atol=1e-5)
    for t, i, k in np.argwhere(cut):
        assert final[t, i, k, 1] == v["obs"][t, i, k, 1] + 1  # the next step of the same game
        assert final[t, i, k, 1] == (LIMIT if v["done"][t, i].all() else 3)
        np.testing.assert_array_equal(final[t, i, k, 3:], np.eye(4)[k])


# ---------------------------------------------------------------------- agents that leave
@BOTH
def test_a_batch_has_the_rows_of_those_who_played(name, train):
    v = train(name, *ONCE, "--learning-rate", "0")
    alive, rollout = v["alive"], v["rollout"]
    assert len(rollout.action) == alive.sum() < alive.size and alive.any(-1).all()
    for field in ("obs", "mask", "action", "logprob", "value", "advantage"):
        np.testing.assert_array_equal(getattr(rollout, field).numpy(), v[field][alive])
    np.testing.assert_allclose(rollout.returns, rollout.advantage + rollout.value)


@pytest.mark.parametrize("name", ["ippo", "mappo_rnn"])
def test_what_agents_that_have_left_see_and_get_changes_no_weight(name, train, monkeypatch):
    flags = [*ONCE, "--no-common-reward"]
    plain, noises, step = train(name, *flags), [], PettingZooEnvs.step

    def noisy(envs, actions):
        left = ~envs.alive
        obs, reward, terminated, truncated, infos = step(envs, actions)
        left &= ~envs.alive  # also now: of the same game
        obs[left], reward[left] = 7.0, 9.0
        noises.append(left.sum())
        return obs, reward, terminated, truncated, infos

    monkeypatch.setattr(PettingZooEnvs, "step", noisy)
    other = train(name, *flags)
    assert sum(noises) and not np.array_equal(plain["obs"], other["obs"])
    for one, two in zip(plain["agent"].parameters(), other["agent"].parameters(), strict=True):
        assert torch.equal(one, two)


# ---------------------------------------------------------------------- values in units of returns
def brute_statistics(rollouts, rate):
    """Mean and variance in which rollout n has the weight 1 / n, or `rate` where that is more."""
    mean = square = 0.0
    for n, returns in enumerate(rollouts, 1):
        weight = max(1 / n, rate)
        mean = (1 - weight) * mean + weight * returns.mean().item()
        square = (1 - weight) * square + weight * (returns**2).mean().item()
    return mean, square - mean**2


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_the_statistics_are_those_of_the_returns(rate):
    """Against a loop. With rate 0 they are of all returns alike, with 1 of the last rollout."""
    critic, generator = IPPO["Critic"](3).double(), torch.Generator().manual_seed(0)
    rollouts = [3 + n + n * torch.randn(50, generator=generator, dtype=torch.float64) for n in range(1, 7)]
    for n, returns in enumerate(rollouts, 1):
        critic.count_returns(returns, rate)
        mean, var = brute_statistics(rollouts[:n], rate)
        np.testing.assert_allclose([critic.mean, critic.var], [mean, var], rtol=1e-9)
    whole = torch.cat(rollouts) if rate == 0 else rollouts[-1]
    if rate in (0, 1):
        np.testing.assert_allclose([critic.mean, critic.var], [whole.mean(), whole.var(correction=0)], rtol=1e-9)


@pytest.mark.parametrize("name", ["ippo", "mappo"])
def test_value_normalisation_keeps_outputs(name):
    """No value changes where statistics move; the numbers that the network gives do."""
    critic, x = definitions(name)["Critic"](3).double(), torch.randn(40, 3, dtype=torch.float64)
    for returns in (torch.tensor([5.0, 9.0, 100.0]).double(), torch.tensor([-3.0, -2.5]).double()):
        before, raw = critic(x), critic.net(x)
        critic.count_returns(returns, 0.1)
        torch.testing.assert_close(critic(x), before, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(critic.net(x), raw, rtol=0.1)
    assert critic(x).std() > 0


def test_the_value_loss_is_that_of_normalised_values():
    """By hand, each row by itself: the larger of the errors of the value and of the clipped value, in deviations."""
    agent, args = make_agent().double(), IPPO["Args"](clip_coef=0.3, clip_vloss=True)
    agent.critic.count_returns(torch.tensor([10.0, 30.0, 50.0]).double(), 0.1)
    rng = np.random.default_rng(0)
    obs, mask, action = torch.randn(40, 5).double(), torch.as_tensor(masks(40, 4)), torch.zeros(40, dtype=torch.long)
    mask[:, 0] = True
    old, returns = (torch.as_tensor(30 + 20 * rng.normal(size=40)) for _ in range(2))
    logprob, advantage = torch.zeros(40).double(), torch.randn(40).double()
    batch = IPPO["Batch"](obs, mask, action, logprob, old, advantage, returns)
    _, metrics = IPPO["ippo_loss"](agent, batch, args)
    std, value, want = (800 / 3 + 1e-5) ** 0.5, agent.critic(obs), 0.0
    for v, v_old, target in zip(value.tolist(), old.tolist(), returns.tolist(), strict=True):
        clipped = v_old + min(max(v - v_old, -0.3 * std), 0.3 * std)
        want += 0.5 * max(((v - target) / std) ** 2, ((clipped - target) / std) ** 2) / 40
    assert metrics["losses/value_loss"].item() == pytest.approx(want, rel=1e-6)


def test_statistics_follow_the_rollouts_and_are_saved(train):
    """Those of the training are those of a loop over its returns, and a checkpoint has them."""
    seen, found = [], {}

    def note(self, batch, args, step=GradientStep.__call__):
        if not seen or seen[-1] is not batch.returns:
            seen.append(batch.returns)
        return step(self, batch, args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientStep, "__call__", note)
        flags = ["--update-epochs", "1", "--total-timesteps", "144", "--norm-rate", "0.8"]
        v = train("ippo", "--env-id", RAID, *SMALL, *flags)
    mean, var = brute_statistics(seen, v["args"].norm_rate)
    found = {name: x.item() for name, x in v["agent"].critic.named_buffers()}
    assert len(seen) == 3 == found["count"]
    assert (found["mean"], found["var"]) == (pytest.approx(mean, rel=1e-4), pytest.approx(var, rel=1e-3))


# ---------------------------------------------------------------------- the run
@pytest.mark.parametrize("name", ["ippo", "mappo", "mappo_rnn"])
def test_the_first_ratio_is_one(name, train):
    """Learning sees each row with the mask, and the memory, of acting."""
    v = train(name, *ONCE, "--update-epochs", "1", "--learning-rate", "0.01")
    assert all(abs(v["metrics"][f"losses/{key}"]) < 1e-6 for key in ("approx_kl", "clipfrac"))


@BOTH
@pytest.mark.parametrize("env_id", [RAID, "team/two_step"])
def test_resumed_equals_uninterrupted(name, env_id, train):
    """In the middle of games; the last checkpoint lost, as after a kill. Statistics and weights are the same."""
    flags = ["--env-id", env_id, *SMALL, "--save-every", "48", "--learning-rate", "0.01"]
    whole = train(name, *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train(name, "--resume", run_dir)
    assert v["start"] == 1 and comparable(run_dir) == expected and "restart" not in train.out
    for key, x in whole["agent"].state_dict().items():
        assert torch.equal(x, v["agent"].state_dict()[key]), key
    for key in ("obs", "action", "reward", "done", "alive", "mask"):
        assert np.array_equal(v[key], whole[key]), key


def test_opening_games_moves_no_random_number_of_the_training():
    """As some modules do where they are imported for the first time."""

    def make_env(env_id):
        np.random.random(), torch.rand(1)
        return gym.make(env_id)

    np.random.seed(1), torch.manual_seed(1)
    want = np.random.random(), torch.rand(1)
    np.random.seed(1), torch.manual_seed(1)
    for env_id in ("team/two_step", "mpe/simple_spread_v3"):
        check_env_id(env_id)
        Opened(Path(__file__), False, 1, 0).multi_agent_env(make_env, env_id, 2)
    assert (np.random.random(), torch.rand(1)) == want


def test_returns_of_each_agent_are_logged(train):
    v = train("ippo", *ONCE)
    row = rows(v["run"].dir, "charts/episodic_return")[0]
    agents = {f"charts/episodic_return_{agent}" for agent in v["envs"].agents}
    assert agents <= set(row) and row["charts/episodic_length"] <= LIMIT


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("CartPole-v1", "has one agent, but ippo.py takes several; use ppo.py"),
        ("team/simple_spread_continuous_v3", "has continuous actions, but ippo.py takes discrete actions"),
        ("atari/pong_v3", "has image observations, but ippo.py takes vector observations"),
    ],
)
def test_another_kind_of_environment_is_refused(env_id, words, train):
    train("ippo", "--env-id", env_id, "--num-envs", "1", code=2)
    assert train.out.startswith(f"error: {env_id} {words}") and train.out.count("\n") == 1, train.out


def test_unequal_spaces_of_agents_are_refused_in_one_sentence(train):
    """Which is that of the game, and does not call it a call of sys.exit()."""
    train("ippo", "--env-id", "targets:Targets-v0", "--num-envs", "1", code=2)
    assert "all agents must have equal spaces" in train.out and train.out.count("\n") == 1, train.out


# ---------------------------------------------------------------------- learning
@pytest.mark.slow
@pytest.mark.parametrize(("env_id", "least"), [("team/two_step", 7), ("team/climbing", 125)])
def test_it_learns_a_matrix_game(env_id, least, train):
    flags = "--num-envs 16 --num-steps 16 --total-timesteps 20480 --eval-every 0 --eval-episodes 2".split()
    v = train("ippo", "--env-id", env_id, *flags)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] >= least
