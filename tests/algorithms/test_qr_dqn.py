"""QR-DQN: quantile regression against brute force, and a value that it must learn."""

import numpy as np
import pytest
import torch
from conftest import definitions, rows

QR, C51 = definitions("qr_dqn"), definitions("c51")
FAST = "--total-timesteps 3000 --learning-starts 200 --train-frequency 2 --learning-rate 0.003 --batch-size 32".split()
FAST += "--target-network-frequency 50 --num-quantiles 11 --eval-every 0".split()


def networks(n=7):
    torch.manual_seed(0)
    nets = [QR["QNetwork"](3, 4, n).double() for _ in range(2)]
    for net in nets:
        torch.nn.init.normal_(net.net[-1].weight)
    return nets


def batch_of(n=16):
    generator = torch.Generator().manual_seed(1)
    obs, next_obs = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    done = (torch.rand(n, generator=generator) < 0.5).double()
    action = torch.randint(4, (n,), generator=generator)
    return QR["Batch"](obs, action, torch.randn(n, generator=generator, dtype=torch.float64), done, next_obs)


def test_loss_is_that_of_algorithm_1():
    """Sum over quantiles i of the mean over samples j of |fraction_i - 1{u < 0}| L(u), u = sample j - quantile i; the
    samples are the quantiles of the action whose mean is largest; no gradient reaches the target network."""
    (q_network, target_network), batch = networks(), batch_of()
    loss, metrics = QR["qr_dqn_loss"](q_network, target_network, batch, 0.9)
    with torch.no_grad():
        everything, after = q_network.quantiles(batch.obs), target_network.quantiles(batch.next_obs)
    total, chosen = 0.0, []
    for n in range(16):
        best = max(range(4), key=lambda a: after[n, a].mean().item())
        chosen.append(best)
        for i in range(7):
            theta = everything[n, batch.action[n], i].item()
            for j in range(7):
                u = batch.reward[n].item() + 0.9 * (1 - batch.done[n].item()) * after[n, best, j].item() - theta
                huber = 0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5
                total += abs((i + 0.5) / 7 - (u < 0)) * huber / 7 / 16
    assert len(set(chosen)) > 1 and loss.item() == pytest.approx(total, rel=1e-6)
    q = [everything[n, batch.action[n]].mean().item() for n in range(16)]
    assert metrics["losses/q_values"].item() == pytest.approx(np.mean(q))
    loss.backward()
    assert all(p.grad is None for p in target_network.parameters())


def test_values_are_means_of_quantiles_and_acting_is_greedy():
    (net, _), obs = networks(), np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    net = net.float()
    value = net.quantiles(torch.as_tensor(obs)).mean(2)
    torch.testing.assert_close(net(torch.as_tensor(obs)), value)
    assert (net.act(obs) == value.argmax(1).numpy()).all() and len(set(net.act(obs))) > 1


@pytest.mark.slow
def test_learns_to_discount_and_to_choose(train):
    v = train("qr_dqn", "--env-id", "probes:Delayed-v0", *FAST, "--gamma", "0.5")
    q = v["q_network"](torch.tensor([[0.0], [1.0]])).detach()
    assert q[0].mean() == pytest.approx(0.5, abs=0.1) and q[1].mean() == pytest.approx(1, abs=0.1)
    v = train("qr_dqn", "--env-id", "probes:ActionMustMatch-v0", *FAST)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] == 1.0
