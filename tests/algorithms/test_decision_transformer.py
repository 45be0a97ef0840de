"""decision_transformer.py: windows of a data set, what a token sees, acting with a memory, and doing what is asked."""

import shutil
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows
from recorded import recorded

import solorl
from solorl.run.evaluation import play_episodes

FILE = definitions("decision_transformer")
Batch = FILE["Batch"]
K, OBS, ACTIONS = 4, 3, 2
SIZES = [1, OBS, ACTIONS, 1, 1]
TINY = "--width 8 --num-layers 1 --context-length 5 --batch-size 8 --eval-every 0 --eval-episodes 1".split()
SHORT = [*TINY, "--env-id", "Pendulum-v1", "--total-timesteps", "30", "--target-return-to-go", "-500"]


class Earn(gym.Env):
    """Each reward is the action; nothing is seen."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(action[0]), False, False, {}


gym.register("Earn-v0", Earn, max_episode_steps=6)


def steady(obs, rng):
    """In each episode of `Earn-v0` always the same random action."""
    steady.count = getattr(steady, "count", -1) + 1
    if steady.count % 6 == 0:
        steady.action = rng.uniform(-1, 1, (len(obs), 1)).astype(np.float32)
    return steady.action


def make_actor(layers=2, heads=2, max_steps=50, target=7.0):
    """An actor all of whose parameters are large enough to matter, in double precision."""
    torch.manual_seed(0)
    args = FILE["Args"](context_length=K, num_layers=layers, num_heads=heads, width=8, max_steps=max_steps)
    args.target_return_to_go, args.return_scale = target, 2.0
    actor = FILE["Actor"](FILE["Standardize"](np.random.default_rng(0).normal(2, 3, (50, OBS))), ACTIONS, args)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return actor


def windows(filled, seed=1):
    """Random windows whose last `filled` (batch,) places are filled, as a Batch in double precision."""
    rng = np.random.default_rng(seed)
    fields = [rng.normal(size=(len(filled), K, size)) for size in SIZES]
    fields[3] = rng.integers(0, 40, fields[3].shape)
    fields[4] = (np.arange(K) >= K - np.array(filled)[:, None])[..., None]
    return Batch(*(torch.as_tensor(field, dtype=torch.float64) for field in fields))


def episodes(lengths, seed=0):
    """A data set of episodes of these lengths; every second one ends at a time limit."""
    rng, n = np.random.default_rng(seed), sum(lengths)
    last = np.isin(np.arange(n), np.cumsum(lengths) - 1)
    episode = np.repeat(np.arange(len(lengths)), lengths)

    class Data(SimpleNamespace):
        def __len__(self):
            return n

    return Data(
        obs=rng.normal(size=(n, OBS)),
        action=rng.uniform(-1, 1, (n, ACTIONS)).astype(np.float32),
        reward=rng.normal(size=n).astype(np.float32),
        terminated=last & (episode % 2 == 0),
        truncated=last & (episode % 2 == 1),
        episode=episode,
    )


# ---------------------------------------------------------------------- data
def test_returns_to_go_and_times_are_those_of_a_loop_over_episodes():
    lengths = [3, 1, 6, 2]
    data, begin = episodes(lengths), 0
    return_to_go, obs, action, time, filled = np.split(FILE["steps_of"](data, OBS, 10.0), np.cumsum(SIZES)[:-1], 1)
    for length in lengths:
        for t in range(length):
            assert return_to_go[begin + t, 0] == pytest.approx(data.reward[begin + t : begin + length].sum() / 10)
            assert time[begin + t, 0] == t
        begin += length
    np.testing.assert_allclose(obs, data.obs, rtol=1e-6)
    assert np.array_equal(action, data.action) and (filled == 1).all()


def test_a_window_has_the_steps_after_its_first_in_their_episode():
    """And zeros before them. Steps are numbered here, episodes have 7, 2 and 5 of them."""
    episode = np.repeat([0, 1, 2], [7, 2, 5])
    steps = np.arange(1, 15, dtype=np.float32)[:, None]
    drawn = FILE["Windows"](steps, episode, K).sample(200, "cpu")[..., 0].int().tolist()
    possible = []
    for begin in range(14):
        follow = [i + 1 for i in range(begin, min(begin + K, 14)) if episode[i] == episode[begin]]
        possible.append([0] * (K - len(follow)) + follow)
    assert sorted(set(map(tuple, drawn))) == sorted(map(tuple, possible))


def test_an_episode_is_drawn_with_a_probability_proportional_to_its_length():
    """And each of its steps as often to begin with."""
    episode = np.repeat([0, 1, 2], [7, 2, 5])
    steps = np.stack([episode, np.arange(14)], 1).astype(np.float32)
    drawn = FILE["Windows"](steps, episode, 1).sample(28_000, "cpu")[:, -1]
    assert np.bincount(drawn[:, 1].int(), minlength=14) == pytest.approx(np.full(14, 2000), abs=200)
    assert np.bincount(drawn[:, 0].int()) / 28_000 == pytest.approx(np.array([7, 2, 5]) / 14, abs=0.02)


# ---------------------------------------------------------------------- what a token sees
def test_the_mask_is_that_of_a_loop_over_tokens():
    filled = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]])[..., None]
    mask = FILE["attention_mask"](filled.float())
    assert mask.shape == (3, 12, 12)
    for n, query, key in np.ndindex(3, 12, 12):
        assert mask[n, query, key] == (key <= query and filled[n, key // 3, 0] == 1)


def test_attention_is_that_of_a_loop_over_the_allowed_keys():
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 2, 2, 5, 3))
    allowed = (rng.random((2, 5, 5)) < 0.5) | np.eye(5, dtype=bool)
    got = FILE["masked_attention"](*map(torch.as_tensor, (query, key, value, allowed)), 0.0)
    for n, head, i in np.ndindex(2, 2, 5):
        keys = np.flatnonzero(allowed[n, i])
        weight = np.exp([query[n, head, i] @ key[n, head, j] / 3**0.5 for j in keys])
        want = sum(w * value[n, head, j] for w, j in zip(weight / weight.sum(), keys, strict=True))
        np.testing.assert_allclose(got[n, head, i], want)


def test_an_action_depends_on_earlier_tokens_and_its_observation_only():
    """By the gradient of each action by each token: exactly 0 for later ones and for empty places, else not."""
    actor, batch = make_actor().double(), windows([4, 2, 1])
    inputs = [field.requires_grad_() for field in batch[:3]]
    for n, filled in enumerate([4, 2, 1]):
        for t in range(K - filled, K):
            found = torch.autograd.grad(actor(batch)[n, t].square().sum(), inputs)
            for field, gradient in enumerate(found):  # return-to-go, observation, action: the order of the tokens
                seen = gradient.abs().sum(-1)
                for m, s in np.ndindex(3, K):
                    earlier = s < t or (s == t and field < 2)
                    assert bool(seen[m, s] > 0) == (m == n and s >= K - filled and earlier)


def test_what_stands_in_empty_places_does_not_matter():
    """Nor whether there are any: a window of 2 steps gives what it gives alone."""
    actor, batch = make_actor().double(), windows([2, 2])
    other = Batch(*(torch.where(batch.filled > 0, field, 9.0) for field in batch[:4]), batch.filled)
    alone = Batch(*(field[:, -2:] for field in batch))
    action = actor(batch)[:, -2:]
    assert torch.equal(actor(other)[:, -2:], action)
    torch.testing.assert_close(actor(alone), action)


def test_times_beyond_the_last_embedding_share_it():
    actor, batch = make_actor(max_steps=10).double(), windows([4])
    first, second, third = (actor(batch._replace(time=torch.full_like(batch.time, t))) for t in (8, 9, 30))
    assert torch.equal(second, third) and not torch.equal(first, second)


# ---------------------------------------------------------------------- the loss
def test_the_loss_is_the_mean_over_filled_places():
    actor, batch = make_actor().double(), windows([4, 1, 3])
    action = actor(batch).detach()
    errors = [
        (action[n, t] - batch.action[n, t]) ** 2 for n, filled in enumerate([4, 1, 3]) for t in range(K - filled, K)
    ]
    loss, metrics = FILE["decision_transformer_loss"](actor, batch, 0.0)
    torch.testing.assert_close(loss, torch.stack(errors).mean())
    assert metrics["losses/bc_loss"] is loss


def test_only_learning_drops():
    actor, batch = make_actor().double(), windows([4])
    assert torch.equal(actor(batch), actor(batch))
    losses = [FILE["decision_transformer_loss"](actor, batch, 0.5)[0] for _ in range(2)]
    assert losses[0] != losses[1]


# ---------------------------------------------------------------------- acting
def play(actor, steps=11, envs=3, begin=(), seed=2):
    """Random observations and rewards in the last place; episodes begin at step 0, and at the (step, env) of `begin`.
    Observations, rewards, actions (steps, envs, ...) and the memory after each step."""
    rng = np.random.default_rng(seed)
    seen = rng.normal(size=(steps, envs, OBS + 1)).astype(np.float32)
    first = np.zeros((steps, envs), bool)
    first[0] = True
    for place in begin:
        first[place] = True
    state, actions, states = None, [], []
    for t in range(steps):
        action, state = actor.act(seen[t], state, first[t])
        actions.append(action)
        states.append(state.clone())
    return seen, first, np.stack(actions), torch.stack(states)


def test_acting_step_by_step_is_the_window_in_one_pass():
    """Each window by hand, of the last steps of the episode; up to the length of a window one pass gives all of it."""
    actor = make_actor()
    seen, first, actions, _ = play(actor, begin=[(3, 1), (5, 1), (6, 2)])
    for n in range(3):
        begin, left = 0, []
        for t in range(11):
            if first[t, n]:
                begin, left = t, [7.0]
            else:
                left.append(left[-1] - seen[t, n, -1])
            since = range(max(begin, t - K + 1), t + 1)
            field = [[left[s - begin] / 2] for s in since], [seen[s, n, :OBS] for s in since]
            fields = *field, [actions[s, n] for s in since], [[s - begin] for s in since], [[1.0] for s in since]
            window = Batch(*(torch.as_tensor(np.array(x), dtype=torch.float32)[None] for x in fields))
            window.action[0, -1] = 99.0  # not known yet
            with torch.no_grad():
                whole = actor(window)[0].numpy()
            np.testing.assert_allclose(whole[-1], actions[t, n], atol=1e-5)
            if t - begin < K:
                np.testing.assert_allclose(whole, actions[begin : t + 1, n], atol=1e-5)


def test_the_memory_is_emptied_where_an_episode_begins():
    """From there on the game acts as a new one; the others as if nothing had been."""
    actor = make_actor()
    seen, _, actions, states = play(actor, begin=[(6, 1)])
    _, _, without, other = play(actor)
    assert np.array_equal(actions[:, [0, 2]], without[:, [0, 2]]) and torch.equal(states[:, [0, 2]], other[:, [0, 2]])
    assert (np.abs(actions[6:, 1] - without[6:, 1]) > 1e-6).any(1).all()
    state = None
    for t in range(6, 11):
        action, state = actor.act(seen[t], state, np.full(3, t == 6))
        np.testing.assert_allclose(action[1], actions[t, 1], atol=1e-6)
        torch.testing.assert_close(state[1], states[t, 1])


def test_an_empty_memory_is_zeros():
    """Of one tensor, as exported policies need it; it acts as no memory."""
    actor, obs = make_actor(), np.ones((2, OBS + 1), np.float32)
    assert not actor.empty_memory(2).any()
    for x, y in zip(
        actor.act(obs, None, np.ones(2, bool)), actor.act(obs, actor.empty_memory(2), np.zeros(2, bool)), strict=True
    ):
        assert np.array_equal(x, y)


def test_what_is_left_of_the_return_falls_by_the_rewards_of_the_environment():
    """In evaluation, over a whole episode of Pendulum; the observations are those of the environment."""
    args = FILE["Args"](context_length=K, width=8, num_layers=1, target_return_to_go=-100.0, return_scale=50.0)
    actor = FILE["Actor"](FILE["Standardize"](np.zeros((0, 3))), 1, args)
    left, obs, actions = [], [], []

    def act(seen, state, first):
        action, state = actor.act(seen, state, first)
        left.append(state[0, -1, 0].item())
        obs.append(seen[0, :3].copy())
        actions.append(action[0])
        return action, state

    play_episodes([FILE["make_eval_env"]("Pendulum-v1")], act, [3])
    env, asked = FILE["make_env"]("Pendulum-v1"), -100.0
    expected = env.reset(seed=3)[0]
    for t in range(200):
        np.testing.assert_allclose(obs[t], expected, atol=1e-6)
        assert left[t] == pytest.approx(asked / 50, rel=1e-3, abs=1e-3)
        expected, reward, *_ = env.step(actions[t])
        asked -= reward


def test_evaluation_appends_the_reward_to_vectors_of_any_shape():
    class Square(Earn):
        observation_space = gym.spaces.Box(-1, 1, (2, 2), np.float64)

        def reset(self, *, seed=None, options=None):
            return np.full((2, 2), 0.5), {}

        def step(self, action):
            return np.full((2, 2), 0.25), -3.0, True, False, {}

    env = FILE["AppendReward"](Square())
    assert env.observation_space.shape == (5,)
    for obs, want in ((env.reset()[0], [0.5] * 4 + [0]), (env.step(env.action_space.sample())[0], [0.25] * 4 + [-3])):
        assert obs.tolist() == want and obs in env.observation_space


# ---------------------------------------------------------------------- the run
@pytest.mark.slow
def test_a_resumed_run_ends_where_a_whole_one_does(train, tmp_path):
    """With dropout and in the middle of the warm-up, whose learning rates are logged."""
    words = ["--dataset", recorded("Pendulum-v1"), *SHORT, "--warmup-steps", 25, "--save-every", 10]
    whole = train("decision_transformer", *words)
    rates = [row["charts/learning_rate"] for row in rows(whole["run"].dir, "charts/learning_rate")]
    np.testing.assert_allclose(rates, [1e-4 * min(i / 25, 1) for i in range(1, 31)])
    cut = shutil.copytree(whole["run"].dir, tmp_path / "cut")
    drop_last_checkpoint(cut)
    last = train("decision_transformer", "--resume", cut)
    assert last["start"] == 20 and comparable(last["run"].dir) == comparable(whole["run"].dir)
    weights = zip(last["actor"].state_dict().values(), whole["actor"].state_dict().values(), strict=True)
    assert all(torch.equal(x, y) for x, y in weights)


def test_the_policy_plays_without_the_data(train, tmp_path):
    """With the mean and the standard deviation of the data, which are in the model; another return can be asked for."""
    folder = shutil.copytree(recorded("Pendulum-v1"), tmp_path / "data")
    v = train("decision_transformer", "--dataset", folder, *SHORT, "--learning-rate", 0.01, "--warmup-steps", 1)
    shutil.rmtree(folder)
    policy, obs = solorl.load(v["run"].dir, device="cpu"), np.random.default_rng(1).normal(size=(5, 4))
    mine, theirs = (act(obs.astype(np.float32), None, np.ones(5, bool))[0] for act in (policy, v["actor"].act))
    np.testing.assert_allclose(mine, theirs, atol=1e-6)
    policy.models["actor"].target = 5000.0
    assert (policy(obs.astype(np.float32), None, np.ones(5, bool))[0] != mine).all()
    assert policy.make_env().observation_space.shape == (4,)


def test_wrong_numbers_are_refused_in_one_sentence(train):
    words = ["--dataset", recorded("Pendulum-v1"), *SHORT]
    train("decision_transformer", *words, "--return-scale", 0, code=2)
    assert train.out == "error: --return-scale must be more than 0\n"
    train("decision_transformer", *words, "--num-heads", 3, code=2)
    assert train.out == "error: --width 8 must be a multiple of the 3 of --num-heads\n"
    train("decision_transformer", *SHORT, code=2)
    assert "error: --dataset must name a data set" in train.out
    train("decision_transformer", *SHORT, "--dataset", recorded("CartPole-v1"), code=2)
    assert "is of CartPole-v1" in train.out and train.out.count("\n") == 1


# ---------------------------------------------------------------------- it learns
@pytest.mark.slow
def test_the_return_that_is_asked_for_follows(train):
    """Data of steady players, each with its own return between -6 and 6: two returns are asked for in turn."""
    flags = "--env-id Earn-v0 --total-timesteps 600 --learning-rate 0.003 --warmup-steps 50 --width 32 --return-scale 6"
    words = ["--dataset", recorded("Earn-v0", 1200, policy=steady), *TINY, *flags.split(), "--dropout", 0]
    v = train("decision_transformer", *words, "--target-return-to-go", 4, "--log-every", 600)
    returns = [row["eval/episodic_return"] for row in rows(v["run"].dir, "eval/episodic_return")]
    assert returns == pytest.approx([4], abs=0.7)
    v["actor"].target = -3.0
    assert play_episodes([FILE["make_eval_env"]("Earn-v0")], v["actor"].act, [1])[0][0] == pytest.approx(-3, abs=0.7)
