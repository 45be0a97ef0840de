"""FlashSAC: unit norms, batch normalisation, categorical critics, reward scale and repeated noise by hand; its loop."""

import math
from itertools import groupby

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, rows
from test_actor_critic import SMALL, random_batch
from test_c51 import projected

import solorl

FLASH = definitions("flash_sac")
NARROW = "--actor-width 8 --critic-width 16".split()
DIARY = ["--env-id", "probes_offpolicy:Diary-v0", *SMALL, *NARROW]
ATOMS = torch.linspace(-5, 5, 11)


def networks():
    """An actor, a critic and a target critic whose normalisations have statistics and parameters that all count."""
    torch.manual_seed(0)
    actor = FLASH["Actor"](3, 2, 8)
    critic, target_critic = (FLASH["Critic"](3, 2, 16, ATOMS) for _ in range(2))
    for net in (actor, critic, target_critic):
        for layer in net.modules():
            if isinstance(layer, FLASH["UnitBatchNorm"]):
                torch.nn.init.normal_(layer.weight)
                torch.nn.init.normal_(layer.bias)
                torch.nn.init.normal_(layer.mean)
                torch.nn.init.uniform_(layer.var, 0.5, 2)
            elif isinstance(layer, torch.nn.RMSNorm):
                torch.nn.init.normal_(layer.weight)
            elif isinstance(layer, torch.nn.Linear) and layer.bias is not None:
                torch.nn.init.normal_(layer.bias, std=0.1)
    return actor, critic, target_critic


def batch_of_floats():
    batch = random_batch()
    return FLASH["Batch"](*(x.float() for x in batch))


def buffers(module):
    return {name: x.clone() for name, x in module.named_buffers()}


def noise():
    return torch.randn(16, 2, generator=torch.Generator().manual_seed(3))


# ---------------------------------------------------------------------- networks in NumPy
def batch_norm(x, layer, train):
    mean, var = (x.mean(0), x.var(0)) if train else (layer.mean.numpy(), layer.var.numpy())
    x = (x - mean) / np.sqrt(var + 1e-5)
    return x * layer.weight.detach().numpy() + layer.bias.detach().numpy()


def linear(x, layer):
    x = x @ layer.weight.detach().numpy().T
    return x if layer.bias is None else x + layer.bias.detach().numpy()


def by_hand(net, x, train):
    """A UnitNet in NumPy."""
    x = linear(batch_norm(np.asarray(x, np.float64), net.norm, train), net.first)
    assert len(net.blocks) == 2
    for block in net.blocks:
        wide = np.maximum(batch_norm(linear(x, block.widen), block.wide_norm, train), 0)
        x = x + np.maximum(batch_norm(linear(wide, block.narrow), block.norm, train), 0)
    x = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6) * net.last_norm.weight.detach().numpy()
    return linear(x, net.head)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@pytest.mark.parametrize("train", [False, True])
def test_a_network_by_hand(train):
    """With the statistics of the batch in training, the running ones otherwise."""
    actor, *_ = networks()
    x = torch.randn(6, 3)
    expected = by_hand(actor.net, x, train)
    assert expected.shape == (6, 4) and actor.net.blocks[0].widen.weight.shape == (32, 8)
    np.testing.assert_allclose(actor.net(x, train).detach(), expected, rtol=1e-4, atol=1e-5)


def test_batch_normalisation_is_that_of_pytorch():
    """Output, gradient and running statistics, in training and in evaluation."""
    mine, theirs = FLASH["UnitBatchNorm"](4).double(), torch.nn.BatchNorm1d(4, momentum=0.01, eps=1e-5).double()
    generator = torch.Generator().manual_seed(0)
    for train in (True, True, False):
        x = 3 + 2 * torch.randn(8, 4, generator=generator, dtype=torch.float64)
        got, expected = mine(x, train), theirs.train(train)(x)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close((mine.mean, mine.var), (theirs.running_mean, theirs.running_var))
        for net, y in ((mine, got), (theirs, expected)):
            net.zero_grad()
            (y**3).sum().backward()
        torch.testing.assert_close(mine.weight.grad, theirs.weight.grad)


# ---------------------------------------------------------------------- unit norms
def norms_of(module):
    """The norms of the weights into each unit; and, over sqrt(width), those of the normalisations."""
    units, others = [], []
    for layer in module.modules():
        own = [x.detach().double() for x in layer.parameters(recurse=False)]
        if isinstance(layer, torch.nn.Linear):
            units += own[0].norm(dim=1).tolist()
        elif own:
            others.append(sum((x**2).sum() for x in own).item() ** 0.5 / len(own[0]) ** 0.5)
    return np.array(units), np.array(others)


def test_networks_begin_with_unit_norms_and_orthogonal():
    torch.manual_seed(0)
    critic = FLASH["Critic"](3, 2, 16, ATOMS)
    units, others = norms_of(critic)
    assert len(units) == 2 * (16 + 2 * (64 + 16) + 11) and len(others) == 2 * 6
    np.testing.assert_allclose(np.concatenate([units, others]), 1, rtol=1e-5)
    narrow = critic.nets[0].blocks[0].narrow.weight  # more inputs than units, so that the units are orthogonal
    torch.testing.assert_close(narrow @ narrow.T, torch.eye(16), atol=1e-5, rtol=0)
    assert (critic.nets[0].head.weight != critic.nets[1].head.weight).any()
    assert not critic.nets[0].head.bias.any()


def test_normalisation_keeps_directions_and_the_bias_of_the_head():
    actor, *_ = networks()
    before = {name: x.detach().clone() for name, x in actor.named_parameters()}
    places = [x.data_ptr() for x in actor.parameters()]
    FLASH["normalize_parameters"](actor)
    np.testing.assert_allclose(np.concatenate(norms_of(actor)), 1, rtol=1e-5)
    after = dict(actor.named_parameters())
    assert [x.data_ptr() for x in actor.parameters()] == places
    assert torch.equal(after["net.head.bias"], before["net.head.bias"])
    ratio = after["net.norm.weight"] / before["net.norm.weight"]
    torch.testing.assert_close(ratio, after["net.norm.bias"] / before["net.norm.bias"])
    torch.testing.assert_close(ratio, ratio[0].expand(3))
    first = before["net.first.weight"]
    torch.testing.assert_close(after["net.first.weight"], first / first.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("fast", ["--fast", "--no-fast"])
def test_networks_have_unit_norms_after_every_step_and_the_target_averages(fast, train, monkeypatch):
    seen = []

    class Watched(solorl.Run):
        def resume(self, **parts):
            self.parts = parts
            return super().resume(**parts)

        def save(self, step):
            seen.extend(np.concatenate(norms_of(self.parts[x])) for x in ("actor", "critic"))
            return super().save(step)

    monkeypatch.setattr("solorl.Run", Watched)
    v = train("flash_sac", *DIARY, fast, "--learning-rate", "0.1", "--final-learning-rate", "0.1")
    assert len(seen) == 120
    np.testing.assert_allclose(np.concatenate(seen), 1, rtol=1e-4)
    assert v["critic"].nets[0].head.bias.abs().max() > 0.1  # which is free
    norms = np.concatenate(norms_of(v["target_critic"]))  # an average of unit vectors is shorter
    assert norms.max() <= 1 + 1e-4 and norms.min() < 0.99


# ---------------------------------------------------------------------- losses
def test_critic_loss_by_hand():
    """Next actions by the actor's running statistics; the distribution of the target critic with the smaller mean, from
    one batch with both transitions; cross entropy sample by sample."""
    actor, critic, target_critic = networks()
    batch = batch_of_floats()._replace(reward=3 * batch_of_floats().reward)  # some values leave the atoms
    with torch.no_grad():
        next_action, next_logprob = actor(batch.next_obs, noise())
    x = torch.cat([torch.cat([batch.obs, batch.action], 1), torch.cat([batch.next_obs, next_action], 1)]).numpy()
    next_p = np.array([softmax(by_hand(net, x, train=True)[16:]) for net in target_critic.nets])
    logprob = np.log([softmax(by_hand(net, x, train=True)[:16]) for net in critic.nets])
    z, smaller = ATOMS.numpy().astype(np.float64), (next_p @ ATOMS.numpy()).argmin(0)
    assert 0 < smaller.sum() < 16  # now one, now the other
    expected = 0.0
    for i in range(16):
        soft = z - 0.3 * next_logprob[i].item()
        value = batch.reward[i].item() + 0.9 * (1 - batch.done[i].item()) * soft
        target = projected(next_p[smaller[i], i], value, z)
        expected -= sum((target * logprob[k, i]).sum() for k in range(2)) / 32
    args = (target_critic, actor, torch.tensor(0.3), batch, noise(), 0.9)
    loss, metrics = FLASH["flash_critic_loss"](critic, *args)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert metrics["losses/qf_values"].item() == pytest.approx((np.exp(logprob) @ z).mean(), rel=1e-3, abs=1e-4)
    loss.backward()
    assert all(p.grad is None for net in (actor, target_critic) for p in net.parameters())
    assert all(p.grad is not None for p in critic.parameters())


def test_critics_are_normalised_by_both_transitions_in_one_batch():
    """Critic and target critic count it in statistics of their own; the actor's rest."""
    actor, critic, target_critic = networks()
    batch, before = batch_of_floats(), [buffers(net) for net in (actor, critic, target_critic)]
    FLASH["flash_critic_loss"](critic, target_critic, actor, torch.tensor(0.3), batch, noise(), 0.9)
    with torch.no_grad():
        next_action, _ = actor(batch.next_obs, noise())
    x = torch.cat([torch.cat([batch.obs, batch.action], 1), torch.cat([batch.next_obs, next_action], 1)])
    for net, old in ((critic, before[1]), (target_critic, before[2])):
        for k in range(2):
            norm = net.nets[k].norm
            torch.testing.assert_close(norm.mean, 0.99 * old[f"nets.{k}.norm.mean"] + 0.01 * x.mean(0))
            torch.testing.assert_close(norm.var, 0.99 * old[f"nets.{k}.norm.var"] + 0.01 * x.var(0))
    assert all(torch.equal(x, before[0][name]) for name, x in actor.named_buffers())


def test_actor_loss_by_hand():
    """The actor is normalised by s and s', of which s counts; the critics, of which the smaller counts, do not."""
    actor, critic, _ = networks()
    batch, before, old = batch_of_floats(), buffers(critic), buffers(actor)
    both = torch.cat([batch.obs, batch.next_obs])
    mean, raw = np.split(by_hand(actor.net, both, train=True)[:16], 2, axis=1)
    log_std = -10 + 12 * 0.5 * (1 + np.tanh(raw))
    u = mean + np.exp(log_std) * noise().numpy()
    logprob = -0.5 * noise().numpy() ** 2 - log_std - 0.5 * np.log(2 * np.pi) - 2 * (np.log(2) - np.logaddexp(u, -u))
    x = np.concatenate([batch.obs.numpy(), np.tanh(u)], 1)
    q = np.array([softmax(by_hand(net, x, train=False)) @ ATOMS.numpy() for net in critic.nets])
    expected = (0.3 * logprob.sum(1) - q.min(0)).mean()
    loss, _, entropy = FLASH["flash_actor_loss"](actor, critic, torch.tensor(0.3), batch, noise())
    assert loss.item() == pytest.approx(expected, rel=1e-3)
    assert entropy.item() == pytest.approx(-logprob.sum(1).mean(), rel=1e-3)
    assert all(torch.equal(x, before[name]) for name, x in critic.named_buffers())
    torch.testing.assert_close(actor.net.norm.mean, 0.99 * old["net.norm.mean"] + 0.01 * both.mean(0))


def test_running_statistics_rest_in_acting():
    """In `act` a row does not depend on the others, and nothing is counted."""
    actor, *_ = networks()
    before, obs = buffers(actor), np.random.default_rng(0).normal(size=(5, 3))
    whole, alone = actor.act(obs), actor.act(obs[:1])
    np.testing.assert_allclose(whole[:1], alone, rtol=1e-5)
    assert all(torch.equal(x, before[name]) for name, x in actor.named_buffers())
    mean, _ = np.split(by_hand(actor.net, obs, train=False), 2, axis=1)
    np.testing.assert_allclose(whole, np.tanh(mean), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- schedule, temperature, rewards
def test_the_learning_rate_follows_half_a_cosine(train):
    """Over all gradient steps, for all three optimisers."""
    halfway = [FLASH["cosine"](3e-4, 1.5e-4, x) for x in (0, 1 / 3, 0.5, 1)]
    np.testing.assert_allclose(halfway, [3e-4, 2.625e-4, 2.25e-4, 1.5e-4])
    v = train("flash_sac", *DIARY)
    got = [row["charts/learning_rate"] for row in rows(v["run"].dir, "charts/learning_rate")]
    expected = [1.5e-4 + 0.75e-4 * (1 + math.cos(math.pi * max(0, step - 21) / 40)) for step in range(1, 61)]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    rates = [v[f"{who}_optimizer"].param_groups[0]["lr"] for who in ("actor", "critic", "alpha")]
    np.testing.assert_allclose(rates, expected[-1], rtol=1e-6)


def test_temperature_starts_low_with_the_entropy_of_a_narrow_gaussian(train):
    v = train("flash_sac", *DIARY, "--total-timesteps", "21")
    row = rows(v["run"].dir, "losses/alpha_loss")[-1]
    target = 2 * math.log(0.15 * math.sqrt(2 * math.pi * math.e))  # 2 dimensions
    assert row["losses/alpha_loss"] == pytest.approx(0.01 * (row["losses/entropy"] - target), rel=1e-4)


def test_actor_learns_before_the_critics_from_the_same_batch(train, monkeypatch):
    seen = []

    class Watched(solorl.Run):
        def gradient_step(self, loss_of, module, optimizer):
            step = super().gradient_step(loss_of, module, optimizer)

            def watched(*inputs):
                batch = next((x for x in inputs if hasattr(x, "next_obs")), None)
                seen.append((loss_of.__name__, batch))
                return step(*inputs)

            return watched

    monkeypatch.setattr("solorl.Run", Watched)
    train("flash_sac", *DIARY)
    names = [name for name, _ in seen]
    assert names == ["flash_actor_loss", "alpha_loss", "flash_critic_loss", "flash_critic_loss"] * 20
    assert all(one[1] is two[1] for one, two in zip(seen[::4], seen[2::4], strict=True))


def test_reward_scale_by_hand():
    """The standard deviation, or what keeps the largest return at the largest atom."""
    assert FLASH["reward_scale"](torch.tensor(4.0), 9.0, 5.0) == pytest.approx(2.0)
    assert FLASH["reward_scale"](torch.tensor(4.0), 30.0, 5.0) == pytest.approx(6.0)
    assert FLASH["reward_scale"](torch.tensor(0.0), 0.0, 5.0) == pytest.approx(1e-8)


def test_rewards_are_scaled_by_all_returns_so_far(train, monkeypatch):
    """Returns begin again after an end of the task and after a time limit; random actions count; the buffer holds raw
    rewards. Two environments, gradient steps after each step of both."""
    seen = []

    class Watched(solorl.Run):
        def gradient_step(self, loss_of, module, optimizer):
            step = super().gradient_step(loss_of, module, optimizer)

            def watched(*inputs):
                if loss_of.__name__ == "flash_critic_loss":
                    seen.append(inputs[3].reward.numpy())
                return step(*inputs)

            return watched

    monkeypatch.setattr("solorl.Run", Watched)
    flags = "--num-envs 2 --utd-ratio 0.5 --gamma 0.9 --max-value 2.5".split()
    v = train("flash_sac", *DIARY, *flags)
    running, returns, scales, step, episode = 0.0, [], [], 0, 0
    for _ in range(30):
        step += 1
        running = 0.9 * running + 100 * episode + step
        returns += [running, running]  # both environments
        scales.append(max(np.sqrt(np.var(returns) + 1e-8), max(returns) / 2.5))
        if step == (3, 4)[episode % 2]:
            running, step, episode = 0.0, 0, episode + 1
    got = [row["charts/reward_scale"] for row in rows(v["run"].dir, "charts/reward_scale")]
    np.testing.assert_allclose(got, scales, rtol=1e-4)
    raw = v["replay"].arrays["reward"][:60]
    assert set(raw) == {100 * k + s for k in range(9) for s in range(1, 4 + k % 2)} - {803}
    assert len(seen) == 20
    for rewards, scale in zip(seen, scales[10:], strict=True):
        assert np.abs(rewards[:, None] * scale - raw[None]).min(1).max() < 0.01


# ---------------------------------------------------------------------- repeated noise
class Noise(solorl.Run):
    """Notes the noise of each step after the random actions."""

    seen: list = []  # noqa: RUF012

    def resume(self, **parts):
        self.parts = parts
        return super().resume(**parts)

    def save(self, step):
        if step > 20:
            self.seen.append(self.parts["now"].noise.clone())
        return super().save(step)


@pytest.fixture
def seen_noise(monkeypatch):
    monkeypatch.setattr("solorl.Run", Noise)
    monkeypatch.setattr(Noise, "seen", [])
    return Noise.seen


def test_noise_is_repeated_for_a_number_of_steps_from_a_zeta_distribution(train, seen_noise):
    """n of 1 to 16 with a probability in proportion to n^-2, also over the ends of episodes; each environment has its
    own noise."""
    flags = "--total-timesteps 4000 --num-envs 2 --utd-ratio 0 --log-every 0".split()
    train("flash_sac", *DIARY, *flags)
    lengths = [len(list(group)) for _, group in groupby(x.flatten().tolist() for x in seen_noise)][:-1]
    probabilities = np.arange(1, 17) ** -2.0 / sum(n**-2.0 for n in range(1, 17))
    counts = np.bincount(lengths, minlength=17)[1:]
    assert len(counts) == 16 and len(lengths) > 800
    error = 4 * np.sqrt(probabilities / len(lengths))
    assert (np.abs(counts / len(lengths) - probabilities) < error).all()
    noise = torch.stack(seen_noise).flatten(1)  # (steps, 2 environments of 2 actions)
    assert noise.mean().item() == pytest.approx(0, abs=0.15) and noise.std().item() == pytest.approx(1, abs=0.15)
    correlation = np.corrcoef(noise.T) - np.eye(4)
    assert np.abs(correlation).max() < 0.15


def test_actions_have_the_repeated_noise(train, seen_noise):
    """The action stored is that of the actor for the noise of its step; with lengths of 1 no noise is repeated."""
    v = train("flash_sac", *DIARY, "--utd-ratio", "0", "--max-repeat", "1")
    arrays = v["replay"].arrays
    expected = v["actor"].act(arrays["obs"][20:60], torch.cat(seen_noise))
    np.testing.assert_allclose(arrays["action"][20:60], expected, rtol=1e-4, atol=1e-5)
    assert len({tuple(x[0].tolist()) for x in seen_noise}) == 40


# ---------------------------------------------------------------------- the loop
def test_resumed_with_its_replay_equals_uninterrupted(train, seen_noise):
    """The last checkpoint thrown away, the run continues from the one before, in the middle of a repetition."""
    flags = "--total-timesteps 300 --num-envs 2 --learning-starts 100 --buffer-size 200 --save-replay --utd-ratio 0.25"
    flags += " --save-every 200 --log-every 100 --eval-every 150 --seed 7"
    whole = train("flash_sac", "--env-id", "Pendulum-v1", *SMALL, *NARROW, *flags.split())
    expected, run_dir, noise = comparable(whole["run"].dir), whole["run"].dir, torch.stack(seen_noise[-51:])
    assert torch.equal(noise[0], noise[1]) and not torch.equal(noise[0], noise[-1])  # the resumed steps are the last 50
    drop_last_checkpoint(run_dir)
    seen_noise.clear()
    v = train("flash_sac", "--resume", run_dir)
    assert v["start"] == 100 and comparable(run_dir) == expected
    assert torch.equal(torch.stack(seen_noise), noise[1:])
    for part in ("actor", "critic", "target_critic", "temperature", "return_statistics"):
        again = v[part].state_dict()
        assert all(torch.equal(x, again[key]) for key, x in whole[part].state_dict().items())
    assert v["now"].returns.tolist() == whole["now"].returns.tolist()
    assert v["now"].largest_return == whole["now"].largest_return > 0


def test_statistics_travel_with_the_model(train):
    """The policy loaded from the run folder acts as the trained one."""
    v = train("flash_sac", *DIARY)
    obs = v["replay"].arrays["obs"][:10]
    assert v["actor"].net.norm.mean.any()
    np.testing.assert_allclose(solorl.load(v["run"].dir)(obs), v["actor"].act(obs), rtol=1e-6)


def test_metrics_are_documented(train):
    v = train("flash_sac", *DIARY)
    keys = {key for row in rows(v["run"].dir) for key in row if "/" in key}
    extra = {"losses/qf1_values", "losses/qf1_loss", "losses/qf2_values", "losses/qf2_loss"}  # of other files
    assert keys == documented_keys("flash_sac") - extra


def test_bad_numbers_are_refused(train):
    train("flash_sac", *DIARY, "--n-atoms", "1", code=2)
    assert train.out == "error: --n-atoms must be 2 or more, got 1\n"
    for flag in ("--max-value", "--target-std"):
        train("flash_sac", *DIARY, flag, "0", code=2)
        assert train.out == "error: --max-value and --target-std must be greater than 0\n"
    train("flash_sac", *DIARY, "--alpha", "0", code=2)
    assert train.out == "error: --alpha must be above 0 to be learned\n"


@pytest.mark.slow
def test_learns_pendulum(train):
    """With narrower critics and smaller batches than the defaults, which are for MuJoCo."""
    flags = "--env-id Pendulum-v1 --total-timesteps 8000 --learning-starts 1000 --eval-every 0 --eval-episodes 20"
    flags += " --critic-width 64 --actor-width 64 --batch-size 128 --learning-rate 1e-3"
    v = train("flash_sac", *flags.split())
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > -250
