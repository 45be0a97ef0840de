"""c51.py: the projection against its definition sample by sample, and the loss by hand."""

import numpy as np
import pytest
import torch
from conftest import definitions

C51 = definitions("c51")
SMALL = "--total-timesteps 60 --learning-starts 20 --train-frequency 1 --batch-size 8 --buffer-size 64".split()
SMALL += "--eval-every 0 --eval-episodes 1 --env-id probes_offpolicy:DiscreteDiary-v0".split()


def projected(p, value, atoms):
    """Alg. 1 for one sample: each value's probability goes to the atoms next to it, all of it to the atom it meets."""
    m, delta = np.zeros(len(atoms)), (atoms[-1] - atoms[0]) / (len(atoms) - 1)
    for probability, v in zip(p, value, strict=True):
        b = (min(max(v, atoms[0]), atoms[-1]) - atoms[0]) / delta
        lower, upper = int(np.floor(b)), int(np.ceil(b))
        if lower == upper:
            m[lower] += probability
        else:
            m[lower] += probability * (upper - b)
            m[upper] += probability * (b - lower)
    return m


def distributions(n, n_atoms):
    return np.random.default_rng(0).dirichlet(np.ones(n_atoms), n)


SUPPORTS = [(-100, 100, 101), (-10, 10, 51), (0, 1, 2), (-3, 0.5, 8)]


def samples(v_min, v_max, n_atoms):
    """Distributions, values, atoms and the projections by definition: values between the atoms, on them (an integer b),
    at both edges and far beyond."""
    rng, atoms = np.random.default_rng(0), np.linspace(v_min, v_max, n_atoms)
    p, span = distributions(60, n_atoms), v_max - v_min
    value = rng.uniform(v_min - 0.3 * span, v_max + 0.3 * span, (60, n_atoms))
    value[10:20] = rng.choice(atoms, (10, n_atoms))
    value[20:40] = np.repeat([v_min, v_max, v_min - 1000 * span, v_max + 1000 * span], 5)[:, None]
    value[40:50] = atoms  # reward 0, discount 1: nothing changes
    value[50:60] = 0.99 * atoms + np.arange(10)[:, None]
    return p, value, atoms, np.array([projected(*sample, atoms) for sample in zip(p, value, strict=True)])


@pytest.mark.parametrize("support", SUPPORTS)
def test_projection_is_that_of_every_sample(support):
    """And probability is kept."""
    p, value, atoms, expected = samples(*support)
    got = C51["project"](*(torch.as_tensor(x, dtype=torch.float32) for x in (p, value, atoms))).numpy()
    np.testing.assert_allclose(got, expected, atol=2e-5)
    np.testing.assert_allclose(got.sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(got[40:50], p[40:50], atol=1e-5)
    for rows, atom in ((slice(20, 25), 0), (slice(25, 30), -1), (slice(30, 35), 0), (slice(35, 40), -1)):
        np.testing.assert_allclose(got[rows, atom], 1, atol=1e-5)


@pytest.mark.parametrize("name", ["c51", "c51_atari", "rainbow_atari", "flash_sac"])
def test_projection_of_nan_is_nan(name):
    """In its row, so that the loss is NaN and the run ends with a sentence; it is no index of an atom."""
    p, atoms = torch.full((2, 3), 1 / 3), torch.tensor([0.0, 1.0, 2.0])
    got = definitions(name)["project"](p, torch.tensor([[0.0, float("nan"), 2.0], [0.0, 1.0, 2.0]]), atoms)
    assert got[0].isnan().any()
    torch.testing.assert_close(got[1], p[1])


def test_projection_keeps_the_mean_within_the_range():
    atoms = torch.linspace(-10, 10, 51)
    p, value = torch.as_tensor(distributions(20, 51), dtype=torch.float32), 0.9 * atoms + torch.rand(20, 1) - 0.5
    torch.testing.assert_close(C51["project"](p, value, atoms) @ atoms, (p * value).sum(1), rtol=1e-4, atol=1e-4)


def test_loss_by_hand():
    """Cross entropy with the projected distribution of the best next action, sample by sample in NumPy."""
    torch.manual_seed(0)
    atoms = torch.linspace(-3, 3, 7)
    nets = [C51["QNetwork"](3, 4, atoms) for _ in range(2)]
    for net in nets:
        for p in net.parameters():
            torch.nn.init.normal_(p, std=0.3)
    obs, next_obs, action = torch.randn(32, 3), torch.randn(32, 3), torch.randint(4, (32,))
    reward, done = torch.randn(32), (torch.rand(32) < 0.5).float()
    loss, metrics = C51["c51_loss"](*nets, C51["Batch"](obs, action, reward, done, next_obs), 0.9)

    def probabilities(net, obs):
        x = obs.double().numpy()
        for i, layer in enumerate(net.net[::2]):
            x = x @ layer.weight.detach().double().numpy().T + layer.bias.detach().double().numpy()
            x = np.maximum(x, 0) if i < 2 else x
        x = np.exp(x.reshape(len(x), 4, 7))
        return x / x.sum(2, keepdims=True)

    p, next_p, z = probabilities(nets[0], obs), probabilities(nets[1], next_obs), atoms.double().numpy()
    losses, taken = [], []
    for i in range(32):
        best = np.argmax([sum(z * next_p[i, a]) for a in range(4)])
        target = projected(next_p[i, best], reward[i].item() + 0.9 * (1 - done[i].item()) * z, z)
        losses.append(-sum(target * np.log(p[i, action[i]])))
        taken.append(sum(z * p[i, action[i]]))
    assert metrics["losses/td_loss"].item() == loss.item() == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics["losses/q_values"].item() == pytest.approx(np.mean(taken), rel=1e-4)
    loss.backward()
    assert all(p.grad is None for p in nets[1].parameters()) and all(p.grad is not None for p in nets[0].parameters())


def test_probabilities_are_those_of_actions_and_atoms():
    """The network's output is cut into n_atoms logits for each action, in this order; a value is their mean."""
    net = C51["QNetwork"](3, 4, torch.linspace(-1, 1, 5))
    obs = torch.randn(6, 3)
    logits = net.logits(obs)
    assert logits.shape == (6, 4, 5)
    torch.testing.assert_close(logits[2, 3], net.net(obs)[2, 15:20])
    torch.testing.assert_close(net(obs)[2, 3], (logits[2, 3].softmax(0) * torch.linspace(-1, 1, 5)).sum())


def test_adam_has_the_epsilon_of_its_batch(train):
    v = train("c51", *SMALL)
    assert v["optimizer"].param_groups[0]["eps"] == 0.01 / 8


def test_the_atoms_are_saved_with_the_network_and_are_no_parameter(train):
    v = train("c51", *SMALL, "--n-atoms", "5", "--v-min", "-1", "--v-max", "3")
    assert v["q_network"].state_dict()["atoms"].tolist() == [-1, 0, 1, 2, 3]
    assert "atoms" not in dict(v["q_network"].named_parameters())
    assert v["q_network"].atoms.tolist() == v["target_network"].atoms.tolist() == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize("flags", ["--n-atoms 1", "--v-min 3 --v-max 3", "--v-min 4 --v-max 3"])
def test_atoms_that_are_no_range_are_refused(flags, train):
    train("c51", *SMALL, *flags.split(), code=2)
    assert "--v-min" in train.out and "Traceback" not in train.out
