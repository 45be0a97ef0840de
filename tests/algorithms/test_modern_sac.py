"""SAC's descendants TQC, REDQ, DroQ, CrossQ and SAC with n-step returns: formulas against brute force, loops."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint
from test_actor_critic import SMALL, random_batch, regulated, weights

TQC, REDQ, DROQ = definitions("tqc"), definitions("redq"), definitions("droq")
CROSSQ, NSTEP = definitions("crossq"), definitions("sac_nstep")
DIARY = ["--env-id", "probes_offpolicy:Diary-v0", *SMALL]
SCRIPTS = ["tqc", "redq", "droq", "crossq", "sac_nstep"]


def double(kind, *sizes):
    torch.manual_seed(0)
    return kind(*sizes).double()


def noise():
    return torch.randn(16, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


# ---------------------------------------------------------------------- ensembles
@pytest.mark.parametrize(("critic", "outputs"), [(REDQ["Critic"](3, 2, 4), 1), (TQC["Critic"](3, 2, 4, 7), 7)])
def test_an_ensemble_is_its_members_side_by_side(critic, outputs):
    """One by one in NumPy; and each begins differently, within the bounds of nn.Linear."""
    layers = [layer for layer in critic.net if hasattr(layer, "weight")]
    obs, action = torch.randn(5, 3), torch.rand(5, 2)
    got = critic(obs, action).detach().numpy().reshape(4, 5, outputs)
    for k in range(4):
        x = np.concatenate([obs, action], 1)
        for i, layer in enumerate(layers):
            x = x @ layer.weight[k].detach().numpy() + layer.bias[k].detach().numpy()
            x = np.maximum(x, 0) if i < 2 else x
        np.testing.assert_allclose(got[k], x, rtol=1e-4, atol=1e-5)
    for layer in layers:
        bound = layer.weight.shape[1] ** -0.5
        assert 0.9 * bound < layer.weight.abs().max() <= bound and layer.bias.abs().max() <= bound
        assert all((one != two).any() for one, two in pairwise(layer.weight))


# ---------------------------------------------------------------------- TQC
def test_truncation_leaves_out_the_largest_of_the_mixture():
    """Of all critics together, not of each: the largest may all be one critic's."""
    quantiles = torch.tensor([[[5.0, 1.0, 9.0]], [[2.0, 8.0, 3.0]]])  # (2 critics, batch 1, 3 quantiles)
    assert TQC["truncate"](quantiles, 1).tolist() == [[1.0, 2.0, 3.0, 5.0]]
    assert TQC["truncate"](quantiles, 0).tolist() == [[1.0, 2.0, 3.0, 5.0, 8.0, 9.0]]


def brute_quantile_loss(quantiles, target):
    """Sum over quantiles and samples of |fraction - 1{error < 0}| times the Huber loss, one pair at a time."""
    total, n = 0.0, len(quantiles)
    for m, quantile in enumerate(quantiles):
        for sample in target:
            error = sample - quantile
            huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
            total += abs((m + 0.5) / n - float(error < 0)) * huber
    return total / len(target)


def test_tqc_critic_loss_by_hand():
    actor, critic, target_critic = (
        double(TQC["Actor"], 3, 2),
        double(TQC["Critic"], 3, 2, 2, 5),
        double(TQC["Critic"], 3, 2, 2, 5),
    )
    torch.nn.init.normal_(target_critic.net[-1].weight)
    batch = random_batch()
    loss, metrics = TQC["tqc_critic_loss"](critic, target_critic, actor, torch.tensor(0.3), batch, noise(), 0.9, 2)
    with torch.no_grad():
        next_action, next_logprob = actor(batch.next_obs, noise())
        mixture, quantiles = target_critic(batch.next_obs, next_action), critic(batch.obs, batch.action)
    expected = 0.0
    for i in range(16):
        samples = sorted(mixture[:, i].flatten().tolist())[:6]
        soft = np.array(samples) - 0.3 * next_logprob[i].item()
        target = batch.reward[i].item() + 0.9 * (1 - batch.done[i].item()) * soft
        expected += sum(brute_quantile_loss(quantiles[k, i].tolist(), target) / 5 for k in range(2)) / 16
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert metrics["losses/qf_values"].item() == pytest.approx(quantiles.mean().item())
    loss.backward()
    assert all(p.grad is None for net in (actor, target_critic) for p in net.parameters())


def test_quantile_regression_finds_the_quantiles():
    """Of a uniform distribution on [0, 100], so wide that the Huber loss is that of quantile regression."""
    quantiles = torch.full((5,), 50.0, requires_grad=True)
    optimizer, fraction = torch.optim.Adam([quantiles], lr=1.0), (torch.arange(5) + 0.5) / 5
    target = torch.linspace(0, 100, 501)
    for _ in range(300):
        loss = TQC["quantile_huber"](target[None] - quantiles[:, None], fraction[:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    np.testing.assert_allclose(quantiles.detach(), [10, 30, 50, 70, 90], atol=1.5)


# ---------------------------------------------------------------------- REDQ, DroQ
def test_redq_target_is_the_smallest_of_the_subset():
    actor, batch = double(REDQ["Actor"], 3, 2), random_batch()
    critic, target_critic = double(REDQ["Critic"], 3, 2, 4), double(REDQ["Critic"], 3, 2, 4)
    torch.nn.init.normal_(target_critic.net[-1].weight)
    inputs = (torch.tensor([3, 1]), actor, torch.tensor(0.3), batch, noise(), 0.9)
    loss, _ = REDQ["redq_critic_loss"](critic, target_critic, *inputs)
    with torch.no_grad():
        next_action, next_logprob = actor(batch.next_obs, noise())
        next_q, q = target_critic(batch.next_obs, next_action), critic(batch.obs, batch.action)
    assert (next_q.argmin(0) == 0).any() or (next_q.argmin(0) == 2).any()  # the smallest of all would be another
    soft = torch.minimum(next_q[3], next_q[1]) - 0.3 * next_logprob
    target = batch.reward + 0.9 * (1 - batch.done) * soft
    assert loss.item() == pytest.approx(sum(((q[k] - target) ** 2).mean().item() for k in range(4)), rel=1e-6)
    loss.backward()
    assert all(p.grad is None for net in (actor, target_critic) for p in net.parameters())


def test_actors_follow_the_mean_of_the_critics():
    for own, name, critic in (
        (REDQ, "redq_actor_loss", double(REDQ["Critic"], 3, 2, 4)),
        (DROQ, "droq_actor_loss", double(DROQ["Critic"], 3, 2, 0.0)),
    ):
        actor, batch = double(own["Actor"], 3, 2), random_batch()
        loss, _, entropy = own[name](actor, critic, torch.tensor(0.3), batch, noise())
        action, logprob = actor(batch.obs, noise())
        q = critic(batch.obs, action)
        mean = q.mean(0) if torch.is_tensor(q) else (q[0] + q[1]) / 2
        assert loss.item() == pytest.approx((0.3 * logprob - mean).mean().item(), rel=1e-6)
        assert entropy.item() == pytest.approx(-logprob.mean().item())


def test_dropout_acts_before_normalisation_and_is_always_on():
    kinds = [type(layer).__name__ for layer in DROQ["Critic"](3, 2, 0.1).q1]
    hidden = ["Linear", "Dropout", "LayerNorm", "ReLU"]
    assert kinds == [*hidden, *hidden, "Linear"]
    critic, batch = double(DROQ["Critic"], 3, 2, 0.1), random_batch()
    target = copy.deepcopy(critic)
    for net in (critic, target):  # two passes draw two masks
        assert (net(batch.obs, batch.action)[0] != net(batch.obs, batch.action)[0]).any()


@pytest.mark.parametrize("name", ["redq", "droq", "crossq"])
def test_the_actor_takes_one_step_in_policy_frequency_updates(name, train):
    v = train(name, *DIARY, "--utd-ratio", "3", "--policy-frequency", "4", "--q-lr", "3e-4")
    steps = [int(next(iter(v[f"{who}_optimizer"].state.values()))["step"]) for who in ("critic", "actor", "alpha")]
    assert steps == [120, 30, 30]  # of 40 environment steps after learning_starts


def test_redq_draws_another_subset_for_each_update(train, monkeypatch):
    seen = []
    original = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *a, **k: seen.append(original(*a, **k)) or seen[-1])
    train("redq", *DIARY, "--utd-ratio", "1", "--num-critics", "5", "--subset-size", "3")
    assert len(seen) == 40 and len({tuple(x[:3].tolist()) for x in seen}) > 10


# ---------------------------------------------------------------------- CrossQ
def brute_renorm(x, mean, var, warm):
    """Ioffe's Algorithm 1, one unit at a time."""
    out = np.empty_like(x)
    for k in range(x.shape[1]):
        m, s = x[:, k].mean(), np.sqrt(x[:, k].var() + 1e-3)
        running = np.sqrt(var[k] + 1e-3)
        r = min(max(s / running, 1 / 3), 3) if warm else 1
        d = min(max((m - mean[k]) / running, -5), 5) if warm else 0
        out[:, k] = (x[:, k] - m) / s * r + d
    return out


@pytest.mark.parametrize("warm", [False, True])
def test_batch_renormalisation_by_hand(warm):
    layer = CROSSQ["BatchRenorm"](4).double()
    generator = np.random.default_rng(0)
    mean, var = generator.normal(size=4), np.array([0.01, 0.5, 1.0, 9.0])  # of which some r and d are clipped
    layer.mean.copy_(torch.as_tensor(mean))
    layer.var.copy_(torch.as_tensor(var))
    layer.batches.fill_(100_000 if warm else 99_999)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        layer.bias.fill_(0.5)
    x = generator.normal(2, 1.5, size=(32, 4))
    got = layer(torch.as_tensor(x), train=True).detach().numpy()
    np.testing.assert_allclose(got, brute_renorm(x, mean, var, warm) * [1, 2, 3, 4] + 0.5, rtol=1e-6)
    np.testing.assert_allclose(layer.mean, 0.99 * mean + 0.01 * x.mean(0))
    np.testing.assert_allclose(layer.var, 0.99 * var + 0.01 * x.var(0))
    assert layer.batches.item() == (100_001 if warm else 100_000)


def test_running_statistics_rest_where_nothing_is_trained():
    """In evaluation a row does not depend on the others, and nothing is counted."""
    actor, batch = double(CROSSQ["Actor"], 3, 2), random_batch()
    actor(batch.obs, noise(), train=True)
    before = {name: x.clone() for name, x in actor.named_buffers()}
    with torch.no_grad():
        whole, alone = actor(batch.obs, noise())[0], actor(batch.obs[:1], noise()[:1])[0]
    torch.testing.assert_close(whole[:1], alone)
    assert all((x == before[name]).all() for name, x in actor.named_buffers())


def test_crossq_normalises_both_transitions_in_one_batch():
    """The running mean of the first layer is that of (s, a) and (s', a') together, from one pass."""
    actor, critic, batch = double(CROSSQ["Actor"], 3, 2), double(CROSSQ["Critic"], 3, 2, 8), random_batch()
    loss, _ = CROSSQ["crossq_critic_loss"](critic, actor, torch.tensor(0.3), batch, noise(), 0.9)
    with torch.no_grad():
        next_action, next_logprob = actor(batch.next_obs, noise())
    x = torch.cat([torch.cat([batch.obs, batch.action], 1), torch.cat([batch.next_obs, next_action], 1)])
    assert critic.q1.norms[0].batches == 1
    torch.testing.assert_close(critic.q1.norms[0].mean, 0.01 * x.mean(0))
    again = double(CROSSQ["Critic"], 3, 2, 8)
    with torch.no_grad():
        q1, q2 = (q(x, True).squeeze(1) for q in (again.q1, again.q2))
    soft = torch.minimum(q1[16:], q2[16:]) - 0.3 * next_logprob
    target = batch.reward + 0.9 * (1 - batch.done) * soft
    expected = sum(((q[:16] - target) ** 2).mean().item() for q in (q1, q2))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert all((x == 0).all() for name, x in actor.named_buffers() if name.endswith("batches"))
    loss.backward()
    assert all(p.grad is None for p in actor.parameters())


# ---------------------------------------------------------------------- n-step returns
def test_n_step_returns_by_brute_force():
    """Three environments, episodes that end by themselves and at time limits, a buffer that has been overwritten: each
    sample against a walk along the record of its environment."""
    generator, num_envs, capacity, gamma = np.random.default_rng(0), 3, 64, 0.9

    class Box:
        shape, dtype = (1,), np.float32

    replay, record = NSTEP["NStepReplay"](capacity, 1, Box), []
    first = np.ones(num_envs, bool)
    for t in range(40):
        obs = np.array([[100.0 * i + t] for i in range(num_envs)], np.float32)
        reward = generator.normal(size=num_envs).astype(np.float32)
        done, limit = generator.random((2, num_envs)) < 0.15
        record.append((reward, done, done | limit))
        replay.add(obs, np.zeros((num_envs, 1), np.float32), reward, done, obs + 0.5, first)
        first = done | limit
    np.random.seed(0)
    batch = replay.sample(2_000, 3, num_envs, gamma, "cpu")
    oldest = 40 * num_envs - capacity  # of the transitions that are still there
    starts, kinds = set(), set()
    for i in range(2_000):
        env, begin = divmod(int(batch.obs[i, 0]), 100)
        starts.add(begin * num_envs + env)
        total, discount, t = 0.0, 1.0, begin
        while True:
            reward, done, over = (x[env] for x in record[t])
            total, discount = total + discount * reward, gamma * discount
            if over or t - begin == 2 or t == 39:
                break
            t += 1
        kinds.add((t - begin, bool(done), bool(over)))
        assert batch.reward[i].item() == pytest.approx(total, rel=1e-4, abs=1e-5)
        assert batch.discount[i].item() == pytest.approx(discount, rel=1e-5)
        assert batch.next_obs[i, 0].item() == 100 * env + t + 0.5 and batch.done[i].item() == done
    assert starts == set(range(oldest, 40 * num_envs))  # all of them, and none that was overwritten
    assert {(0, True, True), (0, False, True), (1, False, True), (2, False, False), (0, False, False)} <= kinds


def test_one_step_returns_are_sac(train):
    """With --n-step 1 the same weights as sac_continuous_action, from the same random numbers."""
    sac, nstep = train("sac_continuous_action", *DIARY), train("sac_nstep", *DIARY, "--n-step", "1")
    for part in ("actor", "critic", "target_critic"):
        torch.testing.assert_close(weights(sac[part]), weights(nstep[part]))


def test_returns_end_where_a_resume_has_lost_an_episode(train, tmp_path):
    """Journal's episodes cannot be replayed: those that run at the checkpoint are gone, and all others begin again."""
    flags = ["--save-replay", "--save-every", 20, "--num-envs", 2, "--n-step", 3]
    run_dir = train("sac_nstep", "--env-id", "test_sac_parallel:Journal-v0", *SMALL, *flags)["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("sac_nstep", "--resume", run_dir)
    saved, replay = 2 * v["start"], v["replay"]
    assert v["run"].restarted == [0, 1] and 0 < saved < replay.inserted
    assert replay.arrays["first"][saved : saved + 2].all() and replay.arrays["first"][:2].all()
    np.random.seed(0)
    batch = replay.sample(2000, 3, 2, 0.5, "cpu")
    last = np.abs(replay.arrays["obs"][saved - 2] - batch.obs.numpy()).max(1) == 0
    assert last.any() and (batch.discount.numpy()[last] == 0.5).all()  # one step, to the observation it led to


# ---------------------------------------------------------------------- loops
@pytest.mark.parametrize("name", SCRIPTS)
def test_resumed_with_its_replay_equals_uninterrupted(name, train):
    """The last checkpoint thrown away, the run continues from the one before; running statistics, too."""
    flags = "--total-timesteps 300 --num-envs 2 --learning-starts 100 --buffer-size 200 --save-replay --utd-ratio 0.25"
    flags += " --policy-frequency 2 --save-every 200 --log-every 100 --eval-every 150"
    whole = train(name, "--env-id", "Pendulum-v1", *SMALL, *flags.split())
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train(name, "--resume", run_dir)
    assert v["start"] == 100 and comparable(run_dir) == expected
    modules = {key: part for key, part in whole.items() if isinstance(part, torch.nn.Module)}
    assert {"actor", "critic", "temperature"} <= set(modules)
    for what, module in modules.items():
        again = v[what].state_dict()
        assert all(torch.equal(x, again[key]) for key, x in module.state_dict().items())


def test_bad_numbers_are_refused(train):
    train("tqc", *DIARY, "--num-dropped", "25", code=2)
    assert "--num-dropped 25 must be less than --num-quantiles 25" in train.out
    train("simba_sac", *DIARY, "--alpha", "0", code=2)
    assert train.out == "error: --alpha must be above 0 to be learned\n"
    train("redq", *DIARY, "--subset-size", "11", code=2)
    assert "--subset-size 11 must be at most --num-critics 10" in train.out


@pytest.mark.parametrize("name", [SCRIPTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS[1:])])
def test_learns_to_return_to_zero_at_once(name, train):
    rates = [] if name == "crossq" else ["--policy-lr", "0.001", "--q-lr", "0.001"]
    utd = ["--utd-ratio", "2", "--policy-frequency", "2"] if name in ("redq", "droq") else []
    utd += ["--num-critics", "4"] if name == "redq" else []
    assert regulated(train, name, *rates, *utd) > -0.6
