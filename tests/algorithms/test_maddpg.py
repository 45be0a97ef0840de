"""maddpg.py and matd3.py: formulas against loops over agents and rows, agents that leave, unequal spaces, loops."""

import copy
import math

import numpy as np
import pytest
import targets
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows

from solorl.envs.pettingzoo import PettingZooEnvs

MADDPG = definitions("maddpg")
SCRIPTS = {"maddpg": MADDPG, "matd3": definitions("matd3")}
DIMS, ACTIONS = [2, 4, 3], [3, 2, 2]  # of three agents with unequal spaces
SMALL = "--num-envs 2 --total-timesteps 60 --learning-starts 20 --batch-size 16 --buffer-size 100 --utd-ratio 0.5"
SMALL = [*SMALL.split(), "--eval-episodes", "1", "--eval-every", "0"]
RAID, MASKED, TARGETS = "targets:TargetsRaid-v0", "targets:RaidMasked-v0", "targets:Targets-v0"
CONTINUOUS = "targets:TargetsContinuous-v0"


def nets(own, discrete, independent=False):
    """An actor, a critic and their targets, all different, in double precision."""
    torch.manual_seed(0)
    actors = [own["Actor"](DIMS, ACTIONS, discrete).double() for _ in range(2)]
    critics = [own["Critic"](DIMS, ACTIONS, independent).double() for _ in range(2)]
    return actors[0], critics[0], actors[1], critics[1]


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_batch(own, discrete, size=16):
    """Agents that have left and ended, actions that are not allowed; padding is not a number but NaN."""
    g = torch.Generator().manual_seed(1)
    obs, next_obs = (normal(g, size, 3, 4) for _ in range(2))
    action, masks = normal(g, size, 3, 3).tanh(), [torch.rand(size, 3, 3, generator=g) < 0.7 for _ in range(2)]
    for k, (n, m) in enumerate(zip(DIMS, ACTIONS, strict=True)):
        obs[:, k, n:], next_obs[:, k, n:] = torch.nan, torch.nan
        for mask in masks:
            mask[:, k] |= ~mask[:, k, :m].any(1, keepdim=True) | (not discrete)
            mask[:, k, m:] = False
        action[:, k, m:] = torch.nan
    alive = (torch.rand(size, 3, generator=g) < 0.8).double()
    done = (torch.rand(size, 3, generator=g) < 0.3).double()
    action[alive == 0] = 0
    if discrete:
        chosen = torch.where(masks[0], torch.rand(size, 3, 3, generator=g), -1.0).argmax(2)
        action = torch.nn.functional.one_hot(chosen, 3).double() * alive[..., None]
    plays = torch.where(alive.bool(), 1 - done, (torch.rand(size, 3, generator=g) < 0.3).double())  # some come next
    return own["Batch"](obs, action, normal(g, size, 3), done, next_obs, alive, plays, *masks)


def numpy_mlp(net, x):
    """The output of a multilayer perceptron for one row."""
    layers = [layer for layer in net if hasattr(layer, "weight")]
    for i, layer in enumerate(layers):
        x = layer.weight.detach().numpy() @ x + layer.bias.detach().numpy()
        x = np.maximum(x, 0) if i < len(layers) - 1 else x
    return x


def joint(critic, k, obs, action):
    """What the critic of agent k sees of one row, by Python lists."""
    agents = [k] if len(critic.seen[k]) == 1 else range(3)
    return np.concatenate([[*obs[j, : DIMS[j]], *action[j, : ACTIONS[j]]] for j in agents])


def brute_action(actor, k, obs, mask, discrete, noise=None):
    """The action of agent k for one row, without padding."""
    out = numpy_mlp(actor.nets[k], np.array(obs[k, : DIMS[k]]))
    noise = np.zeros(3) if noise is None else noise
    if not discrete:
        return np.clip(np.tanh(out) + noise[: ACTIONS[k]], -1, 1)
    best = max((a for a in range(ACTIONS[k]) if mask[k, a]), key=lambda a: out[a] + noise[a])
    return np.eye(ACTIONS[k])[best]


# ---------------------------------------------------------------------- discrete actions
def test_straight_through_is_one_hot_with_the_gradient_of_the_softmax():
    logits = normal(torch.Generator().manual_seed(0), 7, 5).requires_grad_()
    with torch.no_grad():
        logits[0, 2] = -torch.inf  # an action that is not allowed
    weight = normal(torch.Generator().manual_seed(1), 7, 5)
    action = MADDPG["straight_through"](logits)
    assert torch.equal(action.detach(), torch.eye(5, dtype=torch.float64)[logits.argmax(1)])
    [got] = torch.autograd.grad((action * weight).sum(), logits)
    p = logits.detach().softmax(1).numpy()
    for i in range(7):  # by the Jacobian of the softmax, one entry at a time
        for a in range(5):
            want = sum(weight[i, b].item() * p[i, b] * ((a == b) - p[i, a]) for b in range(5))
            assert got[i, a].item() == pytest.approx(want, abs=1e-12)
    assert got[0, 2] == 0


def test_the_largest_of_logits_and_noise_is_a_sample_of_the_softmax():
    np.random.seed(0)
    logits = np.array([0.0, 1.0, -1.0, -np.inf], np.float32)
    noise = MADDPG["action_noise"]((40_000, 4), True, 0.1, "cpu")
    found = np.bincount((logits + noise.numpy()).argmax(1), minlength=4) / 40_000
    np.testing.assert_allclose(found, np.exp(logits) / np.exp(logits).sum(), atol=0.01)
    assert noise.dtype == torch.float32 == MADDPG["action_noise"]((2, 3, 4), False, 0.1, "cpu").dtype
    assert MADDPG["action_noise"]((10_000,), False, 0.3, "cpu").std().item() == pytest.approx(0.3, rel=0.05)


@pytest.mark.parametrize("discrete", [True, False])
def test_policies_take_their_own_observation_and_what_is_allowed(discrete):
    """Greedy and with noise, against a loop; rows of all agents and games, padding is never seen."""
    actor, *_ = nets(MADDPG, discrete)
    batch = random_batch(MADDPG, discrete)
    noise = 2 * normal(torch.Generator().manual_seed(5), 16, 3, 3).numpy()
    for extra in (None, noise):
        got = actor.double().action(actor(batch.obs), batch.mask, 0.0 if extra is None else torch.as_tensor(extra))
        for i in range(16):
            for k in range(3):
                args = (actor, k, batch.obs[i].numpy(), batch.mask[i].numpy(), discrete)
                want = brute_action(*args, None if extra is None else extra[i, k])
                np.testing.assert_allclose(got[i, k].detach(), np.append(want, [0] * (3 - len(want))), atol=1e-9)


def test_act_gives_what_the_games_take():
    obs, mask = np.random.default_rng(0).normal(size=(5, 3, 4)), np.ones((5, 3, 3), bool)
    mask[:, 1:, 2] = False
    mask[2, 0, :2] = False  # one action is left
    actor = MADDPG["Actor"](DIMS, ACTIONS, True)
    action = actor.act(obs, mask)
    assert action.shape == (5, 3) and action.dtype.kind == "i" and action[2, 0] == 2 and (action[:, 1:] < 2).all()
    with torch.no_grad():
        logits = actor(torch.as_tensor(obs, dtype=torch.float32)).numpy()
    np.testing.assert_array_equal(action, np.where(mask, logits, -np.inf).argmax(2))
    sampled = np.array([actor.act(obs, mask, MADDPG["action_noise"]((5, 3, 3), True, 0, "cpu")) for _ in range(30)])
    assert (sampled != action).any() and (sampled[:, 2, 0] == 2).all() and (sampled[:, :, 1:] < 2).all()
    assert MADDPG["Actor"]([4], [3], True).act(obs[:, :1], None).shape == (5, 1)  # a game without masks
    continuous = MADDPG["Actor"](DIMS, ACTIONS, False).act(obs, None)
    assert continuous.shape == (5, 3, 3) and (np.abs(continuous) < 1).all() and (continuous[:, 1:, 2] == 0).all()


# ---------------------------------------------------------------------- losses
def noise_for(own, discrete, std=0.0):
    np.random.seed(2)
    return own["action_noise"]((16, 3, 3), discrete, std, "cpu").double()


def critics_of(critic):
    """The lists of nets of a critic: one, or two."""
    return list(critic.children())


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("discrete", [True, False])
@pytest.mark.parametrize("name", SCRIPTS)
def test_critic_losses_by_a_loop_over_agents_and_rows(name, discrete, independent):
    own = SCRIPTS[name]
    actor, critic, target_actor, target_critic = nets(own, discrete, independent)
    batch, noise = random_batch(own, discrete), noise_for(own, discrete, 0.2)
    loss, metrics = own[f"{name}_critic_loss"](critic, target_critic, target_actor, batch, noise, 0.9)
    b, total, smaller = type(batch)(*(x.numpy() for x in batch)), 0.0, set()
    for k in range(3):
        errors = []
        for i in np.flatnonzero(b.alive[:, k]):
            next_action = np.zeros((3, 3))
            for j in range(3):
                if b.plays[i, j]:  # who has left, or leaves now, takes none
                    inputs = (target_actor, j, b.next_obs[i], b.next_mask[i], discrete, noise[i, j].numpy())
                    next_action[j, : ACTIONS[j]] = brute_action(*inputs)
            seen = joint(critic, k, b.next_obs[i], next_action)
            values = [numpy_mlp(q[k], seen)[0] for q in critics_of(target_critic)]
            smaller.add(int(np.argmin(values)))
            y = b.reward[i, k] + 0.9 * (0.0 if b.done[i, k] else min(values))
            seen = joint(critic, k, b.obs[i], b.action[i])
            errors.append([(numpy_mlp(q[k], seen)[0] - y) ** 2 for q in critics_of(critic)])
        total += np.mean(errors, 0)
    assert len(smaller) == len(total) == (1 if name == "maddpg" else 2)
    assert loss.item() == pytest.approx(total.sum(), rel=1e-9)
    for i, one in enumerate(total):
        assert metrics[f"losses/qf{i + 1}_loss"].item() == pytest.approx(one / 3, rel=1e-9)
    loss.backward()
    assert all(p.grad is None for net in (actor, target_actor, target_critic) for p in net.parameters())
    assert all(p.grad.isfinite().all() for p in critic.parameters())


def one_actor_loss(k, actor, critic, batch, noise, discrete):
    """The loss of agent k alone, rows one by one: its action is the policy's, those of others are in the batch."""
    losses = []
    for i in torch.nonzero(batch.alive[:, k]).flatten():
        out = actor.nets[k](batch.obs[i, k, : DIMS[k]])
        if discrete:
            allowed = batch.mask[i, k, : ACTIONS[k]]
            logits = torch.where(allowed, out + noise[i, k, : ACTIONS[k]], -torch.inf)
            soft = logits.softmax(0)
            mine = torch.eye(ACTIONS[k], dtype=torch.float64)[logits.argmax()] + soft - soft.detach()
        else:
            mine = out.tanh()
        seen = []
        for j in critic.seen[k]:
            seen += [batch.obs[i, j, : DIMS[j]], mine if j == k else batch.action[i, j, : ACTIONS[j]]]
        losses.append(0.01 * out.square().sum() / 3 - critics_of(critic)[0][k](torch.cat(seen))[0])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("discrete", [True, False])
@pytest.mark.parametrize("name", SCRIPTS)
def test_each_policy_follows_its_own_critic_through_its_own_action(name, discrete, independent):
    """Weight by weight the gradient of one agent alone, in which nothing is known of the others' policies."""
    own = SCRIPTS[name]
    actor, critic, *_ = nets(own, discrete, independent)
    batch, noise = random_batch(own, discrete), noise_for(own, discrete)
    loss, metrics = own[f"{name}_actor_loss"](actor, critic, batch, noise, 0.01)
    losses = [one_actor_loss(k, actor, critic, batch, noise, discrete) for k in range(3)]
    assert loss.item() == pytest.approx(sum(losses).item(), rel=1e-9)
    assert metrics["losses/actor_loss"].item() == pytest.approx(sum(losses).item() / 3, rel=1e-9)
    got = torch.autograd.grad(loss, list(actor.parameters()))
    want = [x for k in range(3) for x in torch.autograd.grad(losses[k], list(actor.nets[k].parameters()))]
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
    assert all(x.abs().sum() > 0 for x in got)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_critic_sees_all_agents_and_an_independent_one_its_own(name):
    """Each entry of one agent, varied: the values of which agents change?"""
    batch = random_batch(SCRIPTS[name], False, 2)
    obs, action = batch.obs.nan_to_num(), batch.action.nan_to_num()
    for independent in (False, True):
        critic = nets(SCRIPTS[name], False, independent)[1]
        value = first(critic(obs, action))
        for j in range(3):
            for which, sizes in ((0, DIMS), (1, ACTIONS)):
                for entry in range((obs, action)[which].shape[2]):
                    varied = [obs.clone(), action.clone()]
                    varied[which][:, j, entry] += 1
                    changed = (first(critic(*varied)) != value).any(0).tolist()
                    known = entry < sizes[j]  # padding is not seen
                    assert changed == [known and (k == j or not independent) for k in range(3)]


def first(values):
    return values[0] if isinstance(values, tuple) else values


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_agent_that_never_plays_learns_nothing(name):
    own = SCRIPTS[name]
    actor, critic, target_actor, target_critic = nets(own, True)
    batch = random_batch(own, True)
    batch = batch._replace(alive=batch.alive * torch.tensor([1.0, 0.0, 1.0]))
    noise = noise_for(own, True)
    own[f"{name}_critic_loss"](critic, target_critic, target_actor, batch, noise, 0.9)[0].backward()
    own[f"{name}_actor_loss"](actor, critic, batch, noise, 0.01)[0].backward()
    for net in actor.nets[1], *(q[1] for q in critics_of(critic)):
        assert all(p.grad.abs().sum() == 0 for p in net.parameters())
    assert all(p.grad.abs().sum() > 0 for p in actor.nets[0].parameters())


# ---------------------------------------------------------------------- loops
@pytest.fixture
def steps(monkeypatch):
    """What goes into and comes out of each step of the games: what was known before it, actions, answers."""
    seen, step = [], PettingZooEnvs.step

    def note(envs, actions):
        before = {"alive": envs.alive, "mask": envs.action_mask, "obs": np.array(envs._env_obs)}
        answer = step(envs, actions)
        seen.append((before, np.array(actions), copy.deepcopy(answer), envs.action_mask))
        return answer

    monkeypatch.setattr(PettingZooEnvs, "step", note)
    return seen


@pytest.mark.parametrize("name", SCRIPTS)
def test_who_plays_next_are_those_that_stay_or_come(name, train):
    """Also an agent that a limit of its own cuts, in its last step; not one that terminates, nor one that has left."""
    v = train(name, "--env-id", "team_probes:TeamArrive-v0", *SMALL)
    arrays, num_envs = v["replay"].arrays, v["args"].num_envs
    first, second, last = [1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]  # a and b, which comes, c and d
    steps = [arrays[key][: 6 * num_envs : num_envs].astype(int).tolist() for key in ("plays", "alive")]
    assert steps[0] == [first, second, last] * 2
    assert steps[1] == [[1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]] * 2


@pytest.mark.parametrize("env_id", [RAID, MASKED, TARGETS, CONTINUOUS])
def test_the_buffer_holds_what_happened(env_id, train, steps):
    """Ends of the task and time limits, agents that have left, masks, actions as vectors without padding."""
    v, t = train("maddpg", "--env-id", env_id, *SMALL), 0
    arrays, sizes, limits = v["replay"].arrays, v["envs"].agent_action_dims, 0
    for before, action, (obs, reward, terminated, truncated, infos), after in steps[:30]:
        done = terminated | truncated
        for i in range(2):
            over = done[i].all()
            limits += bool(over and truncated[i].any())
            row = {name: array[t] for name, array in arrays.items()}
            final = infos["final_obs"][i] if over else obs[i]
            np.testing.assert_array_equal(row["obs"], before["obs"][i].astype(np.float32))
            np.testing.assert_array_equal(row["next_obs"], final.astype(np.float32))
            np.testing.assert_array_equal(row["alive"], before["alive"][i])
            np.testing.assert_allclose(row["reward"], reward[i], rtol=1e-6)
            np.testing.assert_array_equal(row["done"], terminated[i])
            for k, size in enumerate(sizes):
                want = np.eye(max(sizes))[action[i, k]] if env_id != CONTINUOUS else action[i, k]
                want = np.where(np.arange(max(sizes)) < size, want, 0) * before["alive"][i, k]
                np.testing.assert_array_equal(row["action"][k], want.astype(np.float32))
                own = np.arange(max(sizes)) < size
                mask = own if before["mask"] is None else before["mask"][i, k]
                next_mask = own if after is None else after[i, k]
                next_mask = infos["final_info"]["action_mask"][i][k] if over and after is not None else next_mask
                np.testing.assert_array_equal(row["mask"][k], mask)
                np.testing.assert_array_equal(row["next_mask"][k], next_mask)
            t += 1
    assert t == 60 == v["replay"].inserted and limits
    assert (arrays["alive"][:60] == 0).any() == (arrays["done"][:60] > 0).any() == (env_id in (RAID, MASKED))


def test_actions_are_random_before_learning_and_never_forbidden(train, steps):
    train("maddpg", "--env-id", MASKED, *SMALL, "--total-timesteps", "400", "--learning-starts", "300")
    forbidden, counts = 0, np.zeros(3)
    for before, action, *_ in steps[:150]:
        allowed = np.take_along_axis(before["mask"], action[..., None], 2)[..., 0]
        assert allowed.all()
        free = before["mask"].all(2)
        forbidden, counts = forbidden + (~free).sum(), counts + np.bincount(action[free], minlength=3)
    assert forbidden and counts.min() > 0.8 * counts.max()


@pytest.mark.parametrize("name", SCRIPTS)
def test_updates_are_those_of_the_ratio(name, train):
    """20 critic updates in 40 steps after learning_starts, an actor update for each 4 of them."""
    v = train(name, "--env-id", TARGETS, *SMALL, "--policy-frequency", "4")
    counts = [int(next(iter(v[f"{who}_optimizer"].state.values()))["step"]) for who in ("critic", "actor")]
    assert counts == [20, 5]


def test_agents_have_weights_of_their_own_and_all_of_them_learn(train):
    v, still = (train("maddpg", "--env-id", RAID, *SMALL, "--learning-rate", lr) for lr in ("0.001", "0"))
    for now, before in ((v["actor"].nets, still["actor"].nets), (v["critic"].q, still["critic"].q)):
        for one, two in zip(now, before, strict=True):
            assert all((x != y).any() for x, y in zip(one.parameters(), two.parameters(), strict=True))
        assert len({one[0].weight.sum().item() for one in now}) == 4


@pytest.mark.parametrize("env_id", [MASKED, CONTINUOUS])
@pytest.mark.parametrize("name", SCRIPTS)
def test_resumed_with_its_replay_equals_uninterrupted(name, env_id, train):
    """In the middle of games; the last checkpoint lost, as after a kill."""
    flags = "--total-timesteps 120 --save-replay --save-every 50 --log-every 20 --eval-every 60".split()
    whole = train(name, "--env-id", env_id, *SMALL, *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train(name, "--resume", run_dir)
    assert 0 < v["start"] < 60 and comparable(run_dir) == expected
    for part in ("actor", "critic", "target_actor", "target_critic"):
        again = v[part].state_dict()
        assert all(torch.equal(x, again[key]) for key, x in whole[part].state_dict().items())


def test_what_it_cannot_learn_is_refused(train):
    train("maddpg", "--env-id", "CartPole-v1", *SMALL, code=2)
    assert "CartPole-v1 has one agent, but maddpg.py takes several; use ddpg_continuous_action.py" in train.out
    train("maddpg", "--env-id", "targets:TargetsUnbounded-v0", *SMALL, code=2)
    assert "TargetsUnbounded-v0 has actions without finite bounds" in train.out
    train("maddpg", "--env-id", TARGETS, *SMALL, "--batch-size", "61", code=2)
    assert "--batch-size must be at most 60 by --buffer-size and --total-timesteps" in train.out


def test_returns_of_each_agent_are_logged(train):
    v = train("maddpg", "--env-id", TARGETS, *SMALL)
    keys = {f"charts/episodic_return{end}" for end in ("", "_one", "_two")}
    assert any(keys <= set(row) for row in rows(v["run"].dir))


@pytest.mark.parametrize(("name", "env_id"), [("maddpg", TARGETS), ("matd3", CONTINUOUS)])
def test_learns_the_targets_of_both_agents(name, env_id, train):
    flags = "--num-envs 8 --total-timesteps 2400 --learning-starts 400 --batch-size 64 --utd-ratio 0.2 --gamma 0"
    flags += " --eval-every 0 --eval-episodes 20 --log-every 1000 --learning-rate 0.01"
    v = train(name, "--env-id", env_id, *flags.split())
    score = rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"]
    assert score > (0.95 if env_id == TARGETS else 0.8) * targets.BEST


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flags"), [("maddpg", ["--independent"]), ("matd3", [])])
def test_learns_simple_spread(name, flags, train):
    """Random actions have a return of -84."""
    short = "--total-timesteps 100000 --learning-starts 5000 --eval-every 0 --eval-episodes 40 --log-every 10000"
    v = train(name, "--env-id", "team/simple_spread_v3", *short.split(), *flags)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > -60
    assert math.isfinite(sum(comparable(v["run"].dir)[-1].values()))
