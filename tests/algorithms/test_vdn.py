"""vdn.py, and what qmix.py and qtran.py have from it: segments of episodes, the target of a team, memory, the loop."""

import copy
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows
from raid import Raid

from solorl.compute.speed import GradientStep
from solorl.envs.pettingzoo import PettingZooEnvs

VDN = definitions("vdn")
STEPS, GAMES, AGENTS, OBS, STATE, ACTIONS = 5, 6, 3, 2, 4, 3
RAID = ["--env-id", "recall:RecallMaskedRaid-v0"]
SMALL = "--num-envs 3 --max-steps 4 --batch-size 4 --eval-episodes 1 --eval-every 0".split()


def network(own=VDN, seed=0):
    torch.manual_seed(seed)
    return own["QNetwork"](AGENTS, OBS, STATE, ACTIONS)


def random_batch(own=VDN, seed=0):
    """Segments of all lengths from 1 on, which end, are cut by a limit or go on; agents that leave before, or that come
    late; masks."""
    g = np.random.default_rng(seed)
    arrays = own["empty_segments"](GAMES, STEPS, AGENTS, OBS, STATE, ACTIONS)
    for name in ("obs", "state", "reward"):
        arrays[name] = g.normal(size=arrays[name].shape)
    arrays["mask"] = g.random(arrays["mask"].shape) < 0.6
    arrays["mask"][..., 1] |= ~arrays["mask"].any(-1)
    arrays["action"] = np.where(arrays["mask"][:, :-1], g.random((GAMES, STEPS, AGENTS, ACTIONS)), -1).argmax(-1)
    empty = own["empty_segments"](1, STEPS, AGENTS, OBS, STATE, ACTIONS)
    for i in range(GAMES):
        length = 1 + i % STEPS
        arrays["alive"][i, :length], arrays["mask"][i, length + 1 :] = 1, empty["mask"][0, length + 1 :]
        arrays["terminated"][i, length - 1] = (np.arange(AGENTS) < i % 4) | (i == 0)
        if length > 2:  # one agent leaves after the first step, in some games by a limit of its own
            arrays["alive"][i, 1:, i % AGENTS] = 0
            arrays["terminated"][i, 0, i % AGENTS] = i % 2
            arrays["terminated"][i, 1:, i % AGENTS] = i % 2
            arrays["alive"][i, 0, i % AGENTS - 1], arrays["terminated"][i, 0, i % AGENTS - 1] = (
                0,
                1,
            )  # another one comes
    tensors = (torch.as_tensor(array).transpose(0, 1) for array in arrays.values())
    return own["Batch"](*(x.float() if x.is_floating_point() else x for x in tensors))


def stepwise(net, batch):
    """Values and memories of every moment, each game and agent alone, by the equations of a GRU in NumPy; lists
    [step][game][agent]."""
    w = {name: p.detach().numpy() for name, p in net.agents.named_parameters()}
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    values, memories = (np.zeros((STEPS + 1, GAMES, AGENTS, size)) for size in (ACTIONS, 64))
    for i, k in itertools.product(range(GAMES), range(AGENTS)):
        h, last = np.zeros(64), np.zeros(ACTIONS)
        for t in range(STEPS + 1):
            x = np.concatenate([batch.obs[t, i, k].numpy(), last, np.eye(AGENTS)[k]])
            x = np.maximum(w["encoder.0.weight"] @ x + w["encoder.0.bias"], 0)
            a, b = w["memory.weight_ih"] @ x + w["memory.bias_ih"], w["memory.weight_hh"] @ h + w["memory.bias_hh"]
            r, z = sigmoid(a[:64] + b[:64]), sigmoid(a[64:128] + b[64:128])
            h = (1 - z) * np.tanh(a[128:] + r * b[128:]) + z * h
            values[t, i, k], memories[t, i, k] = w["head.weight"] @ h + w["head.bias"], h
            last = np.eye(ACTIONS)[int(batch.action[t, i, k])] if t < STEPS else None
    return values, memories


def best_of(values, mask):
    """The best of the actions that are allowed, by a loop; one agent."""
    return max((a for a in range(ACTIONS) if mask[a]), key=lambda a: values[a])


def targets_of(batch, values, target_of, gamma):
    """(step, game, target) of all steps that were played; `target_of(step, game, actions, who)` is the value of a joint
    action by the target network, `who` the agents that play on."""
    for i, t in itertools.product(range(GAMES), range(STEPS)):
        if not batch.alive[t, i].any():
            continue
        stays, plays_next = batch.alive[t, i] * (1 - batch.terminated[t, i]), batch.alive[t + 1 : t + 2, i].sum(0)
        on = [k for k in range(AGENTS) if stays[k] or plays_next[k]]
        actions = [best_of(values[t + 1, i, k], batch.mask[t + 1, i, k]) for k in range(AGENTS)]
        following = target_of(t + 1, i, actions, on) if on else 0.0
        yield t, i, batch.reward[t, i].item() + gamma * following


# ---------------------------------------------------------------------- the network
def test_the_memory_runs_over_each_agents_own_episode():
    """Against the equations of a GRU, one game and agent at a time: inputs are the own observation, the last action, 0
    at first, and who the agent is."""
    net, batch = network(), random_batch()
    values, _ = stepwise(net, batch)
    np.testing.assert_allclose(net(batch).detach(), values, atol=1e-5)


def test_learning_equals_acting():
    """Step by step with `act`, the values from which it chooses are those of the whole segment."""
    net, batch = network(), random_batch()
    values, state = net(batch).detach(), None
    for t in range(STEPS):
        action, state = net.act(batch.obs[t].numpy(), state, np.full(GAMES, t == 0), batch.mask[t].numpy())
        want = [[best_of(values[t, i, k], batch.mask[t, i, k]) for k in range(AGENTS)] for i in range(GAMES)]
        assert action.tolist() == want
        state[..., 64:] = torch.nn.functional.one_hot(batch.action[t], ACTIONS)


def test_nothing_is_remembered_across_episodes_and_without_a_mask_all_is_allowed():
    net = network()
    obs = np.random.default_rng(0).normal(size=(GAMES, AGENTS, OBS))
    _, state = net.act(obs, None, np.ones(GAMES, bool), None)
    first = np.arange(GAMES) < 2
    action, after = net.act(obs, state, first, None)
    fresh, empty = net.act(obs, None, first, np.ones((GAMES, AGENTS, ACTIONS), bool))
    assert (action[:2] == fresh[:2]).all() and torch.equal(after[:2], empty[:2])
    assert not torch.isclose(after[2:, :, :64], empty[2:, :, :64]).all(-1).any()


def test_each_agent_sees_who_it_is():
    got = VDN["with_agent_id"](torch.zeros(4, 2, 3, 1))
    assert got.shape == (4, 2, 3, 4) and (got[..., 1:] == torch.eye(3)).all()


# ---------------------------------------------------------------------- the loss
def test_the_loss_is_that_of_the_sum_by_hand():
    """Against loops over games, steps and agents: the online network chooses what is allowed, the target network
    judges; agents that have left are worth 0; what is terminated, too; what a limit cuts has the value of its final
    moment."""
    net, target_net, batch = network(), network(seed=1), random_batch()
    loss, metrics = VDN["team_td_loss"](net, target_net, batch, 0.9)
    values, judge = stepwise(net, batch)[0], stepwise(target_net, batch)[0]
    errors, chosen = [], []
    value = lambda t, i, actions, who: sum(judge[t, i, k, actions[k]] for k in who)  # noqa: E731
    for t, i, target in targets_of(batch, values, value, 0.9):
        chosen.append(sum(values[t, i, k, int(batch.action[t, i, k])] for k in range(AGENTS) if batch.alive[t, i, k]))
        errors.append((chosen[-1] - target) ** 2)
    assert len(errors) == batch.alive.any(-1).sum()
    assert loss.item() == pytest.approx(np.mean(errors), rel=1e-4)
    assert metrics["losses/q_values"].item() == pytest.approx(np.mean(chosen), rel=1e-4)
    loss.backward()
    assert all(p.grad is None for p in target_net.parameters())
    assert all(p.grad.abs().sum() > 0 for p in net.parameters())


@pytest.mark.parametrize("script", ["vdn", "qmix", "qtran", "qtran --alt"])
def test_what_is_stored_after_the_end_of_an_episode_changes_nothing(script):
    """Neither the loss nor its gradient, whatever it is."""
    own = definitions(script.split()[0])
    net, target_net, batch = network(own), network(own, seed=1), random_batch(own)
    args = SimpleNamespace(gamma=0.9, lambda_opt=1.0, lambda_nopt=0.1, alt="--alt" in script)
    qtran, found = script.startswith("qtran"), []
    for noise in (0, 1, 5):
        for i in range(GAMES):
            length = 1 + i % STEPS
            batch.obs[length + 1 :, i], batch.state[length + 1 :, i], batch.reward[length:, i] = noise, -noise, noise
            batch.action[length:, i] = noise % ACTIONS
        loss, _ = own["qtran_loss" if qtran else "team_td_loss"](net, target_net, batch, args if qtran else 0.9)
        found.append([loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))])
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            assert torch.isfinite(x).all()
            torch.testing.assert_close(x, y)


# ---------------------------------------------------------------------- the loop
@pytest.fixture
def played(monkeypatch):
    """What the games of the trainings show and get from now on, a dict for each step."""
    found, step = [], PettingZooEnvs.step

    def note(self, actions):
        before = {"obs": np.array(self._env_obs), "state": self.state, "mask": self.action_mask, "alive": self.alive}
        obs, reward, terminated, truncated, infos = step(self, actions)
        after = {"obs": obs, "state": self.state, "mask": self.action_mask, "infos": copy.deepcopy(infos)}
        own = {"action": actions.copy(), "reward": reward, "terminated": terminated, "truncated": truncated}
        found.append(before | own | {"after": after})
        return obs, reward, terminated, truncated, infos

    monkeypatch.setattr(PettingZooEnvs, "step", note)
    return found


def segments_of(played, max_steps):
    """The segments that have been stored, in their order, each a list of (the step, what it led to) of one game."""
    running = [[] for _ in played[0]["reward"]]
    for step in played:
        for i, segment in enumerate(running):
            over = (step["terminated"][i] | step["truncated"][i]).all()
            infos, after = step["after"]["infos"], {key: step["after"][key][i] for key in ("obs", "state", "mask")}
            if over:
                final = infos["final_info"]
                after = {"obs": infos["final_obs"][i], "state": final["state"][i], "mask": final["action_mask"][i]}
            segment.append(({key: step[key][i] for key in step if key != "after"}, after, over))
            if over or len(segment) == max_steps:
                yield segment.copy()
                segment.clear()


def test_segments_hold_what_happened(train, played):
    """Against the record: a game longer than a segment is cut, at its end the final moment follows, also where agents
    have left before; nobody is alive afterwards."""
    v = train("vdn", *RAID, *SMALL, "--total-timesteps", "150", "--batch-size", "10000", "--max-steps", "6")
    arrays, met, count = v["replay"].arrays, set(), 0
    for count, segment in enumerate(segments_of(played, 6), 1):
        stored = {key: array[count - 1] for key, array in arrays.items()}
        for t, (step, after, over) in enumerate(segment):
            for key in ("obs", "state", "mask", "action", "alive", "terminated"):
                np.testing.assert_array_equal(stored[key][t], step[key].astype(stored[key].dtype), err_msg=key)
            assert stored["reward"][t] == pytest.approx(step["reward"].sum(), rel=1e-6)
            for key in ("obs", "state", "mask"):
                np.testing.assert_array_equal(stored[key][t + 1], after[key].astype(stored[key].dtype), err_msg=key)
            met |= {("over", len(segment))} if over else {"left"} if not step["alive"].all() else set()
        assert not stored["alive"][len(segment) :].any()
        met |= {"cut"} if not over else set()
    assert v["replay"].inserted == v["now"].stored == count > 10
    assert met >= {"left", "cut", ("over", 3)}


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_agents_choose_the_best_of_the_allowed_or_at_random(train, played, epsilon):
    """Against `act` along each whole game, which knows what has been done: no memory ends where a segment is full."""
    flags = ["--start-e", epsilon, "--end-e", epsilon, "--batch-size", "10000", "--total-timesteps", "300"]
    v = train("vdn", *RAID, *SMALL, *flags)
    state, first, same = None, np.ones(3, bool), []
    for step in played:
        best, state = v["q_network"].act(step["obs"], state, first, step["mask"])
        state[..., 64:] = torch.nn.functional.one_hot(torch.as_tensor(step["action"]), 3)
        same += (best == step["action"])[step["alive"]].tolist()
        first = (step["terminated"] | step["truncated"]).all(-1)
        assert np.take_along_axis(step["mask"], step["action"][..., None], -1).all()
    torch.testing.assert_close(v["now"].memory, state)  # also what was done at random
    allowed = np.concatenate([step["mask"].sum(-1)[step["alive"]] for step in played])
    assert set(allowed) == {2, 3}
    wanted = 1 - epsilon * (1 - (1 / allowed).mean())
    assert np.mean(same) == pytest.approx(wanted, abs=0.07 if epsilon else 0)


def test_epsilon_falls_to_its_end_in_a_fraction_of_the_training(train):
    flags = "--total-timesteps 60 --start-e 0.9 --end-e 0.1 --exploration-fraction 0.5".split()
    v = train("vdn", *RAID, *SMALL, *flags)
    found = [row["charts/epsilon"] for row in rows(v["run"].dir, "charts/epsilon")]
    assert found == pytest.approx([max(0.9 - 0.8 * i / 10, 0.1) for i in range(20)])


def test_gradient_steps_and_copies_are_made_as_often_as_said(train, monkeypatch):
    """One in 3 segments, once the buffer has a batch; each second one is followed by a copy to the target network."""
    seen, call = [], GradientStep.__call__

    def note(self, target_network, *inputs):
        target = target_network.agents.head.weight.clone()
        metrics = call(self, target_network, *inputs)
        seen.append((target, self.module.agents.head.weight.detach().clone()))
        return metrics

    monkeypatch.setattr(GradientStep, "__call__", note)
    flags = "--total-timesteps 210 --train-frequency 3 --target-network-frequency 2 --tau 1 --batch-size 10".split()
    v = train("vdn", *RAID, *SMALL, *flags)
    total = v["replay"].inserted
    skipped = [n for n in range(1, total // 3 + 1) if n * 3 < 10]
    assert 0 <= total // 3 - len(skipped) - len(seen) <= 1  # several segments can be stored in one iteration
    first = total // 3 - len(seen)  # number of the first gradient step
    for update, ((_, online), (target, _)) in enumerate(itertools.pairwise(seen), first):
        assert torch.equal(online, target) == ((update + 1) % 2 == 0)


@pytest.mark.parametrize("game", ["recall:RecallMaskedRaid-v0", "team/two_step"])
def test_resumed_with_its_replay_equals_uninterrupted(train, game):
    """The last checkpoint thrown away, the run continues from the one before, in the middle of games."""
    flags = "--total-timesteps 150 --save-replay --save-every 63 --log-every 30 --eval-every 75"
    whole = train("vdn", "--env-id", game, *SMALL, *flags.split(), "--target-network-frequency", "5")
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("vdn", "--resume", run_dir)
    assert v["start"] > 0 and comparable(run_dir) == expected
    for name in ("q_network", "target_network"):
        again = v[name].state_dict()
        assert all(torch.equal(x, again[key]) for key, x in whole[name].state_dict().items())
    assert_same_state(v["now"], whole["now"])


def assert_same_state(now, other):
    """Of the games under way."""
    assert now.memory.any() and torch.equal(now.memory, other.memory)
    assert all(np.array_equal(x, now.segments[name]) for name, x in other.segments.items())
    assert np.array_equal(now.length, other.length) and np.array_equal(now.first, other.first)


def test_games_that_could_not_be_continued_begin_new_segments(train, monkeypatch):
    """Nothing of the game before is remembered or stored."""
    flags = "--total-timesteps 87 --save-every 30 --batch-size 10000".split()
    run_dir = train("vdn", *RAID, *SMALL, *flags)["run"].dir
    for _ in range(3):  # 60 steps are left, the next checkpoint was at 87
        if len(list((run_dir / "checkpoint").iterdir())) > 1:
            drop_last_checkpoint(run_dir)
    monkeypatch.setattr(Raid, "reset", _other_reset)
    v = train("vdn", "--resume", run_dir)
    assert v["run"].restarted == [0, 1, 2] and v["start"] == 20
    arrays, stored = v["replay"].arrays, v["replay"].inserted
    times = arrays["obs"][:3].max(2)[..., 1]  # of the first segment of each game
    assert stored > 4 and (times == np.arange(5)).all()


def _other_reset(self, seed=None, options=None, reset=Raid.reset):
    return reset(self, None if seed is None else seed + 1)


def test_too_few_steps_are_refused(train):
    train("vdn", *RAID, "--total-timesteps", "3", code=2)
    assert "--total-timesteps 3 is less than one iteration of 8 steps" in train.out


@pytest.mark.slow
@pytest.mark.parametrize("script", ["vdn", "qmix", "qtran"])
def test_learns_what_must_be_remembered_by_all(train, script):
    """Both see the cue three steps before they must give it, and each may do what the other may not."""
    flags = "--env-id recall:RecallCue-v0 --max-steps 4 --total-timesteps 12000 --learning-rate 0.002 --gamma 0.9"
    flags += " --target-network-frequency 50 --tau 1 --eval-every 0 --eval-episodes 50"
    v = train(script, *flags.split())
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] == 1
