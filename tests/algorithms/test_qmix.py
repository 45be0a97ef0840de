"""qmix.py: the mixing network is the formula, monotonic everywhere; what the two-step game shows."""

import itertools

import numpy as np
import pytest
import torch
from conftest import definitions, rows
from test_vdn import AGENTS, GAMES, STATE, VDN, network, random_batch, stepwise, targets_of

QMIX = definitions("qmix")
TWO_STEP = "--env-id team/two_step --max-steps 2 --start-e 1 --end-e 1 --total-timesteps 6000 --buffer-size 500"
TWO_STEP += " --train-frequency 5 --learning-rate 0.004 --target-network-frequency 50 --tau 1"
TWO_STEP += " --eval-every 0 --eval-episodes 1"


def mixer(seed=0):
    torch.manual_seed(seed)
    return QMIX["MonotonicMixer"](AGENTS, STATE)


def by_hand(mix, values, state):
    """One joint value, entry by entry: elu(q |W1(s)| + b1(s)) |W2(s)| + V(s), each linear in the encoded state."""
    w = {name: p.detach().numpy() for name, p in mix.named_parameters()}
    linear = lambda name, x: w[f"{name}.weight"] @ x + w[f"{name}.bias"]  # noqa: E731
    x = linear("encoder.0", state)
    x = (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
    encoded = np.maximum(x * w["encoder.1.weight"] + w["encoder.1.bias"], 0)
    weight1 = np.abs(linear("weight1", encoded)).reshape(len(values), 32)
    hidden = linear("bias1", encoded).astype(float)
    for k, value in enumerate(values):
        hidden += value * weight1[k]
    hidden = np.where(hidden > 0, hidden, np.expm1(np.minimum(hidden, 0)))
    return hidden @ np.abs(linear("weight2", encoded)) + linear("bias2", encoded)[0]


def test_the_mixing_network_is_the_formula():
    mix, g = mixer(), np.random.default_rng(0)
    values, state = g.normal(size=(5, 2, AGENTS)).astype(np.float32), g.normal(size=(5, 2, STATE)).astype(np.float32)
    got = mix(torch.as_tensor(values), torch.as_tensor(state)).detach()
    want = [[by_hand(mix, *each) for each in zip(*rows, strict=True)] for rows in zip(values, state, strict=True)]
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.std(want) > 0.01


def test_the_weights_stay_bounded_where_the_state_is_far_away():
    """A final state is in no loss, so what the mixer makes of one must not grow with its distance."""
    mix, g = mixer(), torch.Generator().manual_seed(0)
    values, state = torch.randn(200, AGENTS, generator=g), torch.randn(200, STATE, generator=g)
    near, far = mix(values, 10 * state), mix(values, 1e4 * state)
    assert (far - near).abs().max() < 0.5 and far.std() > 0.01


def test_the_joint_value_never_falls_where_an_agents_value_rises():
    """At random and at extreme values and states, also after parameters have become anything; and it does rise."""
    for seed in range(5):
        mix, g = mixer(seed), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in mix.parameters():
                p.copy_(3 * torch.randn(p.shape, generator=g))
        scale = torch.tensor([0.1, 1.0, 100.0])[:, None, None]
        values = (scale * torch.randn(3, 200, AGENTS, generator=g)).requires_grad_()
        [gradient] = torch.autograd.grad(mix(values, scale * torch.randn(3, 200, STATE, generator=g)).sum(), values)
        assert (gradient >= 0).all() and (gradient > 0).float().mean() > 0.5


def test_the_best_joint_action_is_the_best_one_of_each_agent():
    """Against all joint actions."""
    mix, g = mixer(), torch.Generator().manual_seed(0)
    for _ in range(50):
        values, state = 3 * torch.randn(AGENTS, 3, generator=g), torch.randn(STATE, generator=g)
        actions = list(itertools.product(range(3), repeat=AGENTS))
        mixed = [mix(values[range(AGENTS), list(joint)], state).item() for joint in actions]
        assert mixed[actions.index(tuple(values.argmax(1).tolist()))] == pytest.approx(max(mixed), abs=1e-6)


def test_the_loss_is_that_of_the_mixed_values_by_hand():
    """As in vdn.py, with the states of both moments; agents that have left are worth 0 in the mixing."""
    net, target_net, batch = network(QMIX), network(QMIX, seed=1), random_batch(QMIX)
    loss, _ = QMIX["team_td_loss"](net, target_net, batch, 0.9)
    values, judge = stepwise(net, batch)[0], stepwise(target_net, batch)[0]

    def mixed(own, of, t, i, actions, who):
        one = np.array([of[t, i, k, int(actions[k])] if k in who else 0.0 for k in range(AGENTS)])
        return by_hand(own.mixer, one, batch.state[t, i].numpy())

    errors = []
    for t, i, target in targets_of(batch, values, lambda *each: mixed(target_net, judge, *each), 0.9):
        playing = [k for k in range(AGENTS) if batch.alive[t, i, k]]
        errors.append((mixed(net, values, t, i, batch.action[t, i], playing) - target) ** 2)
    assert len(errors) > GAMES and loss.item() == pytest.approx(np.mean(errors), rel=1e-4)
    assert QMIX["team_td_loss"].__code__.co_code == VDN["team_td_loss"].__code__.co_code


def table(v, first):
    """Q_tot of all joint actions in the second state of the two-step game, after the first agent's action `first` and
    either of the other's, (2, 2, 2)."""
    one_hot, net = torch.eye(3), v["q_network"]
    found = np.zeros((2, 2, 2))
    for other, a, b in itertools.product(range(2), repeat=3):
        moments = one_hot[[0, 1 + first, 0]][:, None]
        action = torch.tensor([[first, other], [a, b]])[:, None]
        batch = v["Batch"](moments[:, :, None].expand(3, 1, 2, 3), moments, *[None] * 5)._replace(action=action)
        with torch.no_grad():
            q = v["value_of"](net(batch)[1], action[1])
            found[other, a, b] = net.mixer(q, moments[1]).item()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_in_the_two_step_game_qmix_finds_8_and_vdn_7(train, seed):
    """By random actions only. The table of QMIX is the payoff; no sum of values is."""
    v = train("qmix", *TWO_STEP.split(), "--seed", seed)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] == 8
    np.testing.assert_allclose(table(v, 0), np.full((2, 2, 2), 7), atol=0.1)
    np.testing.assert_allclose(table(v, 1), [[[0, 1], [1, 8]]] * 2, atol=0.1)
    v = train("vdn", *TWO_STEP.split(), "--seed", seed)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] == 7
