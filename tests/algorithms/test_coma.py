"""coma.py: the counterfactual advantage and TD(lambda) against loops, what the critic sees, the loop."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows
from test_vdn import ACTIONS, AGENTS, GAMES, OBS, RAID, SMALL, STATE, STEPS, played, random_batch, stepwise

__all__ = ["played"]
COMA = definitions("coma")


def networks(seed=0):
    """An actor, a critic and another critic."""
    torch.manual_seed(seed)
    actor = COMA["Actor"](AGENTS, OBS, ACTIONS)
    return actor, *(COMA["Critic"](AGENTS, OBS, STATE, ACTIONS) for _ in range(2))


def policy_by_hand(logits, mask, epsilon):
    """Of one agent, in NumPy."""
    e = np.where(mask, np.exp(logits), 0)
    return (1 - epsilon) * e / e.sum() + epsilon * mask / mask.sum()


def value_by_hand(critic, batch, t, i, k, actions, play):
    """All values of one agent: state, observation, who it is, and the actions of the others that `play`, all else 0."""
    seen = [np.eye(ACTIONS)[actions[j]] * (j != k and bool(play[j])) for j in range(AGENTS)]
    x = np.concatenate([batch.state[t, i], batch.obs[t, i, k], np.eye(AGENTS)[k], *seen])
    layers = [layer for layer in critic.net if hasattr(layer, "weight")]
    for n, layer in enumerate(layers):
        x = layer.weight.detach().numpy() @ x + layer.bias.detach().numpy()
        x = np.maximum(x, 0) if n < len(layers) - 1 else x
    return x


# ---------------------------------------------------------------------- pure functions
def test_policies_are_mixed_with_uniform_ones_over_what_is_allowed():
    g = np.random.default_rng(0)
    logits, mask = g.normal(size=(50, 4)), g.random((50, 4)) < 0.5
    mask[:, 2] = True
    got = COMA["mixed_policy"](torch.as_tensor(logits), torch.as_tensor(mask), 0.3)
    np.testing.assert_allclose(got, [policy_by_hand(*each, 0.3) for each in zip(logits, mask, strict=True)], atol=1e-12)
    assert (got[~mask] == 0).all() and torch.allclose(got.sum(-1), torch.ones(50, dtype=torch.float64))


def test_actions_are_drawn_with_their_probabilities():
    torch.manual_seed(0)
    policy = torch.tensor([[0.2, 0.0, 0.8], [0.5, 0.5, 0.0]]).expand(5_000, 2, 3)
    drawn = torch.nn.functional.one_hot(COMA["sampled"](policy), 3).float().mean(0)
    torch.testing.assert_close(drawn, policy[0], atol=0.03, rtol=0)


def test_actions_of_nan_are_actions():
    """So that the losses are NaN, and the run ends with a sentence."""
    policy = torch.tensor([[float("nan"), float("nan")], [0.0, 1.0]])
    action = COMA["sampled"](policy.repeat(20, 1))
    assert action[::2].unique().tolist() == [0, 1] and (action[1::2] == 1).all()


def test_td_lambda_is_the_mean_of_n_step_returns():
    """By the definition: weights (1 - lam) lam^(n - 1), the rest on the longest one that the segment has."""
    g, gamma, lam, steps = np.random.default_rng(0), 0.9, 0.7, 6
    reward, value = g.normal(size=(2, steps, 40))
    length = g.integers(1, steps + 1, 40)
    follows = np.arange(1, steps + 1)[:, None] < length
    ends = g.random(40) < 0.5
    goes_on = np.where(np.arange(steps)[:, None] == length - 1, ~ends, True)
    arrays = (torch.as_tensor(np.asarray(x, float)) for x in (reward, value, goes_on, follows))
    got = COMA["td_lambda"](*arrays, gamma, lam)
    for i in range(40):
        for t in range(length[i]):
            n_step = [
                sum(gamma**m * reward[t + m, i] for m in range(n))
                + gamma**n * value[t + n - 1, i] * goes_on[t + n - 1, i]
                for n in range(1, length[i] - t + 1)
            ]
            want = sum((1 - lam) * lam**n * each for n, each in enumerate(n_step[:-1]))
            assert got[t, i].item() == pytest.approx(want + lam ** (len(n_step) - 1) * n_step[-1])


# ---------------------------------------------------------------------- critic and actor
def test_the_critic_sees_all_but_the_agents_own_action():
    _, critic, _ = networks()
    batch = random_batch(COMA)
    got = critic(batch.obs[:-1], batch.state[:-1], batch.action, batch.alive).detach()
    for t, i, k in np.ndindex(STEPS, GAMES, AGENTS):
        actions = batch.action[t, i].tolist()
        want = value_by_hand(critic, batch, t, i, k, actions, batch.alive[t, i])
        np.testing.assert_allclose(got[t, i, k], want, atol=1e-5)
        assert got[t, i, k].std() > 0


def test_what_an_agent_that_left_would_have_done_changes_nothing():
    """An action is drawn for every row, also of those that play no more; the game ignores it. One that a limit of its
    own has cut still acts in the observation after it."""
    _, critic, target = networks()
    batch, args = random_batch(COMA), SimpleNamespace(gamma=0.9, td_lambda=0.7)
    acts = batch.alive.bool()
    acts[1:] |= (batch.alive * (1 - batch.terminated))[:-1].bool()
    other = batch._replace(action=torch.where(acts, batch.action, (batch.action + 1) % ACTIONS))
    assert not torch.equal(other.action, batch.action)
    found = []
    for each in (batch, other):
        action = torch.cat([each.action, torch.zeros_like(each.action[:1])])
        targets = COMA["critic_targets"](target, each, action, args)
        found.append([targets, COMA["coma_critic_loss"](critic, each, targets)[0]])
        with torch.no_grad():
            found[-1].append(critic(each.obs[:-1], each.state[:-1], each.action, each.alive))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


def test_targets_are_those_of_the_team_by_hand():
    """The next value: the mean over the agents that play on or come next, of the action that follows, or of one that is
    drawn, here the only one that is likely."""
    actor, _, target = networks()
    batch, args = random_batch(COMA), SimpleNamespace(gamma=0.9, td_lambda=0.7)
    with torch.no_grad():
        actor.agents.head.weight *= 1e4
        actor.agents.head.bias *= 1e4
    logits = stepwise(actor, batch)[0]
    got = COMA["critic_targets"](target, batch, COMA["all_actions"](actor, batch, 0.0), args)
    for i in range(GAMES):
        length = int(batch.alive[:, i].any(-1).sum())
        following = None
        for t in reversed(range(length)):
            stays, plays_next = batch.alive[t, i] * (1 - batch.terminated[t, i]), batch.alive[t + 1 : t + 2, i].sum(0)
            on = [k for k in range(AGENTS) if stays[k] or plays_next[k]]
            likely = [np.where(batch.mask[t + 1, i, k], logits[t + 1, i, k], -np.inf).argmax() for k in range(AGENTS)]
            actions = [
                int(batch.action[t + 1, i, k]) if t + 1 < length and batch.alive[t + 1, i, k] else likely[k]
                for k in range(AGENTS)
            ]
            play = [k in on for k in range(AGENTS)]
            values = [value_by_hand(target, batch, t + 1, i, k, actions, play)[actions[k]] for k in on]
            value = np.mean(values) if on else 0.0
            mixed = value if following is None else 0.3 * value + 0.7 * following
            following = batch.reward[t, i].item() + 0.9 * bool(on) * mixed
            assert got[t, i].item() == pytest.approx(following, rel=1e-4, abs=1e-5)


def test_the_losses_by_hand():
    """Means over agents that acted; the advantage is over the mean of the own policy, and has no gradient."""
    actor, critic, _ = networks()
    batch, targets = random_batch(COMA), torch.randn(STEPS, GAMES)
    errors, gains, entropies = [], [], []
    logits = stepwise(actor, batch)[0]
    for t, i, k in np.ndindex(STEPS, GAMES, AGENTS):
        if batch.alive[t, i, k]:
            actions = batch.action[t, i].tolist()
            q = value_by_hand(critic, batch, t, i, k, actions, batch.alive[t, i])
            policy = policy_by_hand(logits[t, i, k], batch.mask[t, i, k].numpy(), 0.2)
            errors.append((q[actions[k]] - targets[t, i].item()) ** 2)
            gains.append((q[actions[k]] - policy @ q) * np.log(policy[actions[k]]))
            entropies.append(-sum(p * np.log(p) for p in policy if p))
    loss, _ = COMA["coma_critic_loss"](critic, batch, targets)
    assert loss.item() == pytest.approx(np.mean(errors), rel=1e-4)
    loss, metrics = COMA["coma_actor_loss"](actor, critic, batch, 0.2)
    assert loss.item() == pytest.approx(-np.mean(gains), rel=1e-3)
    assert metrics["losses/entropy"].item() == pytest.approx(np.mean(entropies), rel=1e-4)
    loss.backward()
    assert all(p.grad is None for p in critic.parameters())


def test_the_gradient_is_that_of_the_value_of_the_policy():
    """For one agent, in expectation over its actions: the derivative of the mean value by the policy. The baseline
    changes no expectation."""
    actor, critic, _ = networks()
    batch, total = random_batch(COMA), 0
    alone = batch._replace(alive=torch.zeros_like(batch.alive))
    alone.alive[0, 0, 0] = 1
    policy = COMA["mixed_policy"](actor(batch)[0, 0, 0], batch.mask[0, 0, 0], 0.2)
    q = critic(batch.obs[:-1], batch.state[:-1], batch.action, alone.alive)[0, 0, 0].detach()
    want = torch.autograd.grad(policy @ q, list(actor.parameters()))
    for a in range(ACTIONS):
        action = batch.action.clone()
        action[0, 0, 0] = a
        loss, _ = COMA["coma_actor_loss"](actor, critic, alone._replace(action=action), 0.2)
        total = total - policy[a].detach() * loss
    for x, y in zip(want, torch.autograd.grad(total, list(actor.parameters())), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-3)


# ---------------------------------------------------------------------- the loop
def test_updates_have_the_newest_segments_once(train, played, monkeypatch):
    """Every segment is learned from in one update, of 4 to 6 segments; targets are copied every 3 critic steps."""
    from solorl.compute.speed import GradientStep

    seen, weights, call = [], [], GradientStep.__call__

    def note(self, *inputs):
        seen.append((type(self.module).__name__, copy.deepcopy(inputs)))
        metrics = call(self, *inputs)
        if isinstance(inputs[1], torch.Tensor):  # the critic's
            weights.append(self.module.net[0].weight.detach().clone())
        return metrics

    monkeypatch.setattr(GradientStep, "__call__", note)
    flags = [*RAID, *SMALL, "--total-timesteps", "150", "--critic-steps", "2", "--target-network-frequency", "3"]
    v = train("coma", *flags)
    assert [name for name, _ in seen] == ["Critic", "Critic", "Actor"] * (len(seen) // 3)
    sizes = [inputs[1].alive.shape[1] for name, inputs in seen if name == "Actor"]
    waiting = [segment["alive"].max(-1).sum() for segment in v["now"].waiting]
    stored = sum(sizes) + len(waiting)
    assert set(sizes) <= {4, 5, 6} and len(sizes) > 4 and v["now"].updates == 2 * len(sizes)
    copied = [torch.equal(each, v["target_critic"].net[0].weight) for each in weights]
    assert np.flatnonzero(copied).tolist() == [len(weights) // 3 * 3 - 1] and len(weights) % 3
    numbers = [inputs[1].obs[0].sum((1, 2)).tolist() for name, inputs in seen if name == "Actor"]
    assert len({number for each in numbers for number in each}) == sum(sizes)  # no segment twice
    steps = sum(inputs[1].alive.amax(-1).sum().item() for name, inputs in seen if name == "Actor")
    steps += sum(waiting) + v["now"].segments["alive"].max(-1).sum()
    assert steps == 150 and stored > 20  # and none is missing
    assert all(np.take_along_axis(x["mask"], x["action"][..., None], -1).all() for x in played)


def test_without_epsilon_actions_are_drawn_from_the_policy(train):
    """Not the most likely ones, which `act` takes: the gradient is that of drawn actions."""
    v = train("coma", *RAID, *SMALL, "--total-timesteps", "20", "--start-e", "0", "--end-e", "0")
    actor, num_actions = v["actor"], v["num_actions"]
    for p in actor.parameters():
        torch.nn.init.zeros_(p)  # all actions have the same probability
    obs, first = np.zeros((300, *v["obs"].shape[1:])), np.ones(300, bool)
    drawn, _ = actor.draw(obs, None, first, None, 0.0)
    assert len(set(drawn.ravel().tolist())) == num_actions
    assert not actor.act(obs, None, first, None)[0].any()


def test_a_segment_begins_with_an_empty_memory(train):
    """In acting as in learning, also in the middle of a game: after a cut the memory is that of one step."""
    v = train("coma", *RAID, *SMALL, "--max-steps", "3", "--total-timesteps", "200")
    cut = v["now"].length == 0
    assert cut.any() and (cut & ~v["now"].first).any()
    assert not v["now"].memory[torch.as_tensor(cut)].any() and v["now"].memory[torch.as_tensor(~cut)].any()


def test_resumed_equals_uninterrupted(train):
    """The last checkpoint thrown away, the run continues from the one before, in the middle of games."""
    flags = "--total-timesteps 150 --save-every 63 --log-every 30 --eval-every 75 --critic-steps 2"
    whole = train("coma", *RAID, *SMALL, *flags.split(), "--target-network-frequency", "5")
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("coma", "--resume", run_dir)
    assert v["start"] > 0 and comparable(run_dir) == expected
    for name in ("actor", "critic", "target_critic"):
        again = v[name].state_dict()
        assert all(torch.equal(x, again[key]) for key, x in whole[name].state_dict().items())
    now, other = v["now"], whole["now"]
    assert torch.equal(now.memory, other.memory) and now.memory.any() and now.updates == other.updates
    assert all(np.array_equal(x, now.segments[name]) for name, x in other.segments.items())
    for mine, expected in zip(now.waiting, other.waiting, strict=True):
        assert all(np.array_equal(x, mine[name]) for name, x in expected.items())


@pytest.mark.slow
def test_in_the_two_step_game_it_does_not_choose_the_state_that_is_worse_with_random_actions(train):
    """7 at least, where random actions have 4.75."""
    flags = "--env-id team/two_step --max-steps 2 --total-timesteps 6000 --critic-steps 4 --actor-lr 0.005"
    flags += " --critic-lr 0.005 --target-network-frequency 20 --eval-every 0 --eval-episodes 1"
    v = train("coma", *flags.split())
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] >= 7
