"""SAC with the SimBa architecture: its networks against NumPy, running statistics, AdamW, the loop."""

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows
from safetensors.torch import load_file
from test_actor_critic import SMALL, weights

import solorl
from solorl.compute.speed import GradientStep, vector_of

SIMBA = definitions("simba_sac")
DIARY = ["--env-id", "probes_offpolicy:Diary-v0", *SMALL, "--critic-width", "16"]


# ---------------------------------------------------------------------- networks
def linear(x, layer):
    return x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()


def layer_norm(x, layer):
    x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    return x * layer.weight.detach().numpy() + layer.bias.detach().numpy()


def test_a_network_by_hand():
    """Linear layer, x + MLP(LayerNorm(x)) for each block, LayerNorm, head; with parameters that all count."""
    torch.manual_seed(0)
    net = SIMBA["simba"](5, 8, 2, 3).double()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter)
    first, *blocks, norm, head = net
    assert len(blocks) == 2 and all(block.net[0].weight.shape == (32, 8) for block in blocks)
    inputs = torch.randn(6, 5, dtype=torch.float64)
    x = linear(inputs.numpy(), first)
    for block in blocks:
        hidden = np.maximum(linear(layer_norm(x, block.norm), block.net[0]), 0)
        x = x + linear(hidden, block.net[2])
    np.testing.assert_allclose(net(inputs).detach(), linear(layer_norm(x, norm), head), rtol=1e-9)


def test_networks_begin_orthogonal_with_he_normal_blocks():
    """The actor has one block of 128 units, each critic two of its width; the critics differ."""
    torch.manual_seed(0)
    actor, critic = SIMBA["Actor"](3, 2), SIMBA["Critic"](3, 2, 256)
    for net, width, num_blocks, sizes in ((actor.net, 128, 1, (3, 4)), (critic.q1, 256, 2, (5, 1))):
        first, *blocks, _, head = net
        assert (len(blocks), first.in_features, head.out_features) == (num_blocks, *sizes)
        torch.testing.assert_close(first.weight.T @ first.weight, torch.eye(sizes[0]), atol=1e-5, rtol=0)
        torch.testing.assert_close(head.weight @ head.weight.T, torch.eye(sizes[1]), atol=1e-5, rtol=0)
        for layer, fan_in in [(b.net[0], width) for b in blocks] + [(b.net[2], 4 * width) for b in blocks]:
            assert layer.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.02)
            assert layer.weight.abs().max() > 3 * (2 / fan_in) ** 0.5  # normal, not uniform
        biases = [x for name, x in net.named_parameters() if name.endswith("bias")]
        assert len(biases) == 3 + 3 * num_blocks and not any(x.any() for x in biases)
    assert (critic.q1[0].weight != critic.q2[0].weight).any()


# ---------------------------------------------------------------------- running statistics
def test_actions_do_not_depend_on_the_units_of_observations():
    """Each of two actors sees the same states in units of its own, and learns the statistics of them."""
    torch.manual_seed(0)
    actor, other = SIMBA["Actor"](3, 2), SIMBA["Actor"](3, 2)
    other.load_state_dict(actor.state_dict())
    obs = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    foreign = obs * np.array([1000, 0.1, 1], np.float32) + np.array([500, 0, -3], np.float32)
    for row, foreign_row in zip(obs, foreign, strict=True):
        actor.obs_normalizer.update(row[None])
        other.obs_normalizer.update(foreign_row[None])
    np.testing.assert_allclose(actor.act(obs), other.act(foreign), rtol=1e-3, atol=1e-4)


def test_statistics_count_each_observation_acted_on_once(train):
    """Random actions, too; evaluation, acting and learning leave them alone."""
    v = train("simba_sac", *DIARY, "--num-envs", "2", "--eval-every", "20")
    statistics, obs = v["actor"].obs_normalizer, v["replay"].arrays["obs"][:60]
    assert statistics.count == v["replay"].inserted == 60
    np.testing.assert_allclose(statistics.mean, obs.mean(0), rtol=1e-4)
    np.testing.assert_allclose(statistics.var, obs.var(0), rtol=1e-3)
    before = {name: x.clone() for name, x in v["actor"].state_dict().items()}
    v["actor"].act(obs + 100)
    assert all(torch.equal(x, before[name]) for name, x in v["actor"].state_dict().items())
    assert not list(v["critic"].buffers()) and not list(v["target_critic"].buffers())  # one set, without a target


def test_networks_learn_from_normalised_observations(train, monkeypatch):
    """Both observations of a transition, by the statistics of the gradient step; the buffer holds raw ones."""
    seen = []

    class Watched(solorl.Run):
        def gradient_step(self, loss_of, module, optimizer):
            step = super().gradient_step(loss_of, module, optimizer)

            def watched(*inputs):
                if loss_of.__name__ == "sac_critic_loss":
                    statistics = inputs[1].obs_normalizer
                    seen.append((inputs[3], statistics.mean.clone(), statistics.var.clone(), int(statistics.count)))
                return step(*inputs)

            return watched

    monkeypatch.setattr("solorl.Run", Watched)
    v = train("simba_sac", *DIARY)
    assert [count for *_, count in seen] == [21 + i // 2 for i in range(80)]  # two updates for each environment step
    arrays = v["replay"].arrays
    pairs = np.concatenate([arrays["obs"], arrays["next_obs"]], 1)[:60]
    for batch, mean, var, _ in seen:
        raw = torch.cat([x * (var + 1e-16).sqrt() + mean for x in (batch.obs, batch.next_obs)], 1).numpy()
        distance = np.abs(raw[:, None] - pairs[None]).max(2).min(1)
        assert (distance < 1e-3).all()


def test_statistics_travel_with_the_model(train):
    """The policy loaded from the run folder acts as the trained one."""
    v = train("simba_sac", *DIARY)
    saved = load_file(v["run"].dir / "model.safetensors")
    key = next(key for key in saved if key.endswith("obs_normalizer.mean"))
    assert torch.equal(saved[key], v["actor"].obs_normalizer.mean) and saved[key].any()
    obs = v["replay"].arrays["obs"][:10]
    np.testing.assert_allclose(solorl.load(v["run"].dir)(obs), v["actor"].act(obs), rtol=1e-6)


# ---------------------------------------------------------------------- AdamW, the temperature
def test_weights_decay_by_adamw(train):
    """With a learning rate of 1e-3 and a decay of 100 every parameter loses a tenth at each step, and moves by the
    learning rate at most (first step: exactly, unless its gradient is 0)."""
    flags = "--total-timesteps 21 --utd-ratio 1 --policy-lr 1e-3 --q-lr 1e-3 --weight-decay 100".split()
    v = train("simba_sac", *DIARY, *flags)
    start = train("simba_sac", *DIARY, *flags, "--utd-ratio", "0")
    for part in ("actor", "critic"):
        moved = weights(v[part]) - 0.9 * weights(start[part])
        assert ((moved.abs() - 1e-3).abs() < 1e-5).float().mean() > 0.5 and moved.abs().max() < 1.01e-3
    moved = v["temperature"].log_alpha.item() - np.log(0.01)
    assert abs(moved) == pytest.approx(1e-3, abs=2e-5)  # not decayed


def test_adamw_on_one_vector_is_adamw():
    """The optimiser that sees all parameters as one vector, and the one that sees each."""
    nets = []
    for fast in (False, True):
        torch.manual_seed(0)
        net = SIMBA["simba"](3, 8, 2, 1)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.5)
        loss_of = lambda net, x: ((net(x) - x.sum(1, keepdim=True)).square().mean(), {})  # noqa: E731
        step = GradientStep(loss_of, net, optimizer, float("inf"), lambda f: f, fast)
        for _ in range(20):
            step(torch.randn(16, 3))
        assert (vector_of(optimizer) is not None) == fast
        nets.append(net)
    torch.testing.assert_close(weights(nets[0]), weights(nets[1]), rtol=1e-4, atol=1e-5)


def test_temperature_starts_low_with_half_the_target_entropy(train):
    v = train("simba_sac", *DIARY, "--total-timesteps", "21", "--utd-ratio", "1")
    row = rows(v["run"].dir, "losses/alpha_loss")[-1]
    assert row["losses/alpha_loss"] == pytest.approx(0.01 * (row["losses/entropy"] + 1), rel=1e-4)  # 2 dimensions


# ---------------------------------------------------------------------- the loop
def test_resumed_with_its_replay_equals_uninterrupted(train):
    """The last checkpoint thrown away, the run continues from the one before; running statistics, too."""
    flags = "--total-timesteps 300 --num-envs 2 --learning-starts 100 --buffer-size 200 --save-replay --utd-ratio 0.25"
    flags += " --critic-width 16 --save-every 200 --log-every 100 --eval-every 150"
    whole = train("simba_sac", "--env-id", "Pendulum-v1", *SMALL, *flags.split())
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("simba_sac", "--resume", run_dir)
    assert v["start"] == 100 and comparable(run_dir) == expected
    for part in ("actor", "critic", "target_critic", "temperature"):
        again = v[part].state_dict()
        assert all(torch.equal(x, again[key]) for key, x in whole[part].state_dict().items())
    assert v["actor"].obs_normalizer.count == 300


@pytest.mark.slow
def test_learns_pendulum(train):
    """With larger learning rates than the defaults, which are for a million steps."""
    flags = "--env-id Pendulum-v1 --total-timesteps 5000 --learning-starts 1000 --eval-every 0 --eval-episodes 20"
    flags += " --critic-width 64 --policy-lr 1e-3 --q-lr 1e-3 --utd-ratio 1"
    v = train("simba_sac", *flags.split())
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > -250
