"""sac_dict.py: a buffer that stores each observation once, encoders of actor and critics, and that it learns."""

import copy

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, rows
from gymnasium.spaces import Box
from probes_parts import DICTS

from solorl.checkpoints.replay import ReplayLog

SAC = definitions("sac_dict")
SPACES = {"image": Box(0, 255, (2, 3, 1), np.uint8), "vector": Box(-1e9, 1e9, (2,), np.float64)}
ACTION = Box(-1, 1, (1,), np.float32)
WALKS = "goal_probes:WalksContinuous-v0"
SMALL = "--total-timesteps 120 --learning-starts 40 --batch-size 8 --buffer-size 60 --num-envs 4".split()
SMALL += "--eval-every 0 --eval-episodes 1 --utd-ratio 0.25".split()


def shown(i, t):
    """The observation of step t of the environment i: both entries say which it is."""
    return {"image": np.full((2, 3, 1), (7 * i + t) % 256, np.uint8), "vector": np.array([i, t], np.float64)}


def batched(each):
    return {name: np.stack([one[name] for one in each]) for name in SPACES}


def filled(capacity, num_envs=3, steps=40):
    """A buffer of random episodes, and (number, transition) of each step in it: numbers count what was inserted."""
    generator, replay, record = np.random.default_rng(0), SAC["DictReplay"](capacity, num_envs, SPACES, ACTION), []
    clock, inserted = np.zeros(num_envs, int), num_envs
    replay.begin(np.arange(num_envs), batched([shown(i, 0) for i in range(num_envs)]))
    newest = list(range(num_envs))  # the numbers of the newest observations
    for _ in range(steps):
        action, reward = generator.normal(size=(num_envs, 1)), generator.normal(size=num_envs)
        terminated, limit = generator.random((2, num_envs)) < 0.15
        replay.add(batched([shown(i, clock[i] + 1) for i in range(num_envs)]), action, reward, terminated)
        for i in range(num_envs):
            transition = shown(i, clock[i]), action[i], reward[i], terminated[i], shown(i, clock[i] + 1)
            record.append((newest[i], transition))
            newest[i], inserted, clock[i] = inserted, inserted + 1, clock[i] + 1
        over = np.flatnonzero(terminated | limit)
        clock[over] += 100  # the next episode is another one
        replay.begin(over, batched([shown(i, clock[i]) for i in over]) if len(over) else {
            name: np.zeros((0, *space.shape)) for name, space in SPACES.items()})  # fmt: skip
        for i in over:
            newest[i], inserted = inserted, inserted + 1
    assert replay.inserted == inserted
    return replay, record


# ---------------------------------------------------------------------- the buffer
@pytest.mark.parametrize("capacity", [37, 200])
def test_transitions_are_those_whose_observations_are_left(capacity):
    """Each as it was, equally often, and none of which an observation is overwritten."""
    replay, record = filled(capacity)
    left = {tuple(old["vector"]): rest for number, (old, *rest) in record if number >= replay.inserted - capacity}
    np.random.seed(0)
    size = 100 * len(left)
    batch, counts = replay.sample(size, "cpu"), dict.fromkeys(left, 0)
    for row in range(size):
        key = tuple(batch.obs["vector"][row].tolist())
        counts[key] += 1
        action, reward, done, following = left[key]
        assert batch.action[row] == np.float32(action) and batch.reward[row] == np.float32(reward)
        assert batch.done[row] == done and batch.next_obs["vector"][row].tolist() == following["vector"].tolist()
        assert (batch.next_obs["image"][row].numpy() == following["image"]).all()
        assert (batch.obs["image"][row].numpy() == shown(int(key[0]), int(key[1]))["image"]).all()
    assert min(counts.values()) > 50 and max(counts.values()) < 150
    assert batch.obs["image"].dtype == torch.uint8 and batch.obs["vector"].dtype == torch.float32


@pytest.mark.parametrize("capacity", [37, 60])
def test_a_saved_buffer_goes_on_in_one_of_another_size(capacity, tmp_path):
    replay, _ = filled(37)
    saved = ReplayLog(tmp_path).append(replay)
    other = SAC["DictReplay"](capacity, 3, SPACES, ACTION)
    ReplayLog(tmp_path).load(other, saved)
    for each in (replay, other):
        each.add(batched([shown(i, 9) for i in range(3)]), np.zeros((3, 1)), np.ones(3) * 5, np.zeros(3))
    batches = [each.sample(4000, "cpu") for each in (replay, other)]
    pairs = [
        {(*map(float, old), *map(float, new)) for old, new in zip(b.obs["vector"], b.next_obs["vector"], strict=True)}
        for b in batches
    ]
    assert pairs[0] <= pairs[1] and {new[2:] for new in pairs[0] if new[3] == 9} == {(0, 9), (1, 9), (2, 9)}


# ---------------------------------------------------------------------- the networks
def networks():
    torch.manual_seed(0)
    mixed = DICTS["Mixed"]
    actor, critic = SAC["Actor"](mixed.spaces, 2), SAC["Critic"](mixed.spaces, 2)
    mixed.seed(0)
    drawn = [mixed.sample() for _ in range(6)]
    return actor, critic, {name: np.stack([each[name] for each in drawn]) for name in mixed}


def tensors(obs):
    return {name: torch.as_tensor(SAC["compact"](x)) for name, x in obs.items()}


def test_features_are_those_of_each_entry_side_by_side():
    actor, _, obs = networks()
    before, other = actor.encoders(tensors(obs)), tensors({name: x[::-1].copy() for name, x in obs.items()})
    assert before.shape == (6, 192)
    for i, name in enumerate(actor.encoders.names):
        changed = (actor.encoders(tensors(obs) | {name: other[name]}) != before).any(0).nonzero()[:, 0]
        assert len(changed) > 40 and set(changed.tolist()) <= set(range(64 * i, 64 * i + 64))


def test_act_is_the_squashed_mean_of_a_dict_of_arrays():
    """In any order of the entries; with noise it is what the log-probability describes."""
    actor, _, obs = networks()
    mean = actor.net(actor.encoders(tensors(obs)))[:, :2].tanh().detach()
    np.testing.assert_allclose(actor.act(dict(reversed(obs.items()))), mean, atol=1e-6)
    noise = torch.randn(6, 2)
    np.testing.assert_allclose(actor.act(obs, noise), actor(tensors(obs), noise)[0].detach(), atol=1e-6)


def test_losses_reach_the_encoders_of_their_own_network():
    """Those of the critics by both critics, those of the actor by its loss, the target's by none."""
    actor, critic, obs = networks()
    target, noise, alpha = copy.deepcopy(critic), torch.randn(6, 2), torch.tensor(0.2)
    batch = SAC["Batch"](tensors(obs), torch.zeros(6, 2), torch.ones(6), torch.zeros(6), tensors(obs))
    assert all(not a.equal(b) for a, b in zip(actor.encoders.parameters(), critic.encoders.parameters(), strict=True)
               if a.ndim > 1)  # fmt: skip
    SAC["sac_critic_loss"](critic, target, actor, alpha, batch, noise, 0.9)[0].backward()
    assert all(p.grad.abs().sum() > 0 for p in critic.encoders.parameters() if p.ndim > 1)
    assert all(p.grad is None for net in (actor, target) for p in net.parameters())
    loss = torch.autograd.grad(SAC["sac_actor_loss"](actor, critic, alpha, batch, noise)[0], [*actor.parameters()])
    assert all(gradient.abs().sum() > 0 for gradient in loss if gradient.ndim > 1)


# ---------------------------------------------------------------------- the loop
def test_the_buffer_holds_what_the_simulator_did(train):
    """Observations name the episode and the step; a final one is of its own episode, also at a time limit."""
    v = train("sac_dict", "--env-id", WALKS, *SMALL)
    batch = v["replay"].sample(2000, "cpu")
    (episode, step), (same, after) = (each["observation"].T for each in (batch.obs, batch.next_obs))
    assert (same == episode).all() and (after == step + 1).all()
    over, by_time = after == torch.where(episode % 2 == 0, 3, 5), episode // 2 % 2 == 1
    assert (batch.done == (over & ~by_time)).all() and (over & by_time).any() and batch.done.any()
    assert (batch.reward == -(after - episode).abs()).all()
    assert set(v["replay"].arrays) == {"obs.achieved_goal", "obs.desired_goal", "obs.observation", "action", "reward", "done", "back"}  # fmt: skip # noqa: E501


def test_images_are_stored_once_as_bytes(train):
    v = train("sac_dict", *SMALL)
    arrays = v["replay"].arrays
    assert arrays["obs.image"].shape == (60, 8, 8, 1) and arrays["obs.image"].dtype == np.uint8
    assert (arrays["obs.image"].reshape(60, -1).max(1) == 255).all()  # each shows a dot


@pytest.mark.parametrize("saved", [True, False])
def test_resumed_equals_uninterrupted(saved, train):
    """The last checkpoint thrown away, the run continues from the one before; without the buffer it still learns."""
    flags = "--total-timesteps 240 --num-envs 2 --learning-starts 40 --buffer-size 100 --batch-size 4 --utd-ratio 0.25"
    flags += " --save-every 100 --log-every 60 --eval-every 120 --eval-episodes 1" + " --save-replay" * saved
    whole = train("sac_dict", *flags.split())
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("sac_dict", "--resume", run_dir)
    assert v["start"] > 0 and v["run"].restarted == []
    equal = [torch.equal(x, v[name].state_dict()[key]) for name in ("actor", "critic", "target_critic", "temperature")
             for key, x in whole[name].state_dict().items()]  # fmt: skip
    assert all(equal) == (comparable(run_dir) == expected) == saved
    assert (v["replay"].inserted == whole["replay"].inserted) == saved


def test_an_episode_that_a_resume_could_not_continue_begins_again(train):
    """Walks cannot be replayed: no transition leads from what was seen before to what comes after."""
    flags = ["--buffer-size", 300, "--save-replay", "--save-every", 60]
    run_dir = train("sac_dict", "--env-id", WALKS, *SMALL, *flags)["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("sac_dict", "--resume", run_dir)
    assert v["run"].restarted == [0, 1, 2, 3]
    batch = v["replay"].sample(2000, "cpu")
    (episode, step), (same, after) = (each["observation"].T for each in (batch.obs, batch.next_obs))
    assert (same == episode).all() and (after == step + 1).all()


@pytest.mark.parametrize(("name", "said"), [
    ("probes_parts:Nested-v0", "dict"), ("CartPole-v1", "vector"), ("Pendulum-v1", "use sac_continuous_action.py"),
    ("games/TwoSenses-v0", "use ppo_dict.py"),
])  # fmt: skip
def test_other_spaces_are_refused_in_one_sentence(name, said, train):
    train("sac_dict", "--env-id", name, *SMALL, code=2)
    assert train.out.count("\n") == 1 and said in train.out


def test_a_buffer_that_holds_no_transition_is_refused(train):
    train("sac_dict", *SMALL, "--buffer-size", 15, "--batch-size", 8, code=2)
    assert "--buffer-size must be at least 16" in train.out


def test_the_same_seed_gives_the_same_weights_and_logs_what_the_page_says(train):
    runs = [train("sac_dict", "--env-id", WALKS, *SMALL, "--seed", seed) for seed in (1, 1, 2)]
    one, same, other = (run["actor"].state_dict() for run in runs)
    assert all(torch.equal(one[key], same[key]) for key in one) and any((one[key] != other[key]).any() for key in one)
    logged = {key for row in rows(runs[0]["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert logged == documented_keys("sac_dict") | documented_keys("sac_continuous_action")


@pytest.mark.slow
def test_learns_what_only_both_entries_tell(train):
    v = train("sac_dict", "--total-timesteps", 4000, "--eval-every", 0, "--eval-episodes", 50)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] >= 0.9
