"""dqn_atari_jax.py: its replay buffer against one of whole stacks, its network and updates against the torch twin, what
its iteration stores and when it learns, and whole trainings, stopped and resumed."""

import shutil
from functools import partial

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from conftest import definitions, documented_keys, rows
from pixel_probe import use_fake_envpool
from safetensors.numpy import load_file
from test_frame_replay import NaiveReplay, images, numbers_on, picture
from test_ppo_atari_envpool_jax import as_torch

from solorl.compute.xla import compiled
from solorl.envs.interface import Step
from solorl.run.trainings import PolicyOfSeed

JAX, TORCH = definitions("dqn_atari_jax"), definitions("dqn_atari")
FrameReplay = JAX["FrameReplay"]
SHORT = "--env-id Catch-v5 --num-envs 2 --train-frequency 8 --learning-starts 24 --batch-size 4 --eval-episodes 2 "
SHORT = [*SHORT.split(), "--buffer-size", 100]
insert, history = jax.jit(FrameReplay.insert), jax.jit(FrameReplay.history)
sample = jax.jit(FrameReplay.sample, static_argnums=2)


# ---------------------------------------------------------------------- replay
def histories(seed):
    """A random history: yields the real and the naive buffer after each insertion of one to four steps. Games end by
    termination or a time limit, lives are lost on the way, and the buffer is filled several times over."""
    rng = np.random.default_rng(seed)
    num_envs, num_steps = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    capacity = 40  # one, so that little is compiled
    replay, naive = FrameReplay.empty(capacity), NaiveReplay(capacity, num_envs)
    p_over, p_life = rng.choice([0.02, 0.1, 0.4, 1.0]), rng.choice([0.0, 0.2, 0.6])
    new_game = np.ones(num_envs, bool)
    for _ in range(int(rng.integers(1, 3 * capacity // (num_envs * num_steps)))):
        steps = []
        for _ in range(num_steps):
            before = np.zeros(num_envs, int)
            before[new_game] = naive.begin(np.flatnonzero(new_game))
            action, reward = rng.integers(18, size=num_envs), rng.integers(-1, 2, num_envs).astype(np.float32)
            over = rng.random(num_envs) < p_over
            done = (over & (rng.random(num_envs) < 0.5)) | (rng.random(num_envs) < p_life)
            after = naive.add(action, reward, done)
            steps.append((new_game, images(before), images(after), action, reward, done))
            new_game = over
        replay = insert(replay, *(np.stack(column) for column in zip(*steps, strict=True)))
        yield replay, naive


def test_the_picture_in_the_docstring_shows_what_it_holds():
    """Game A ends with its sixth image, game B has three so far, and the buffer has room for six."""
    replay = FrameReplay.empty(6)
    for number, action in [(1, 4), (2, 4), (3, 2), (4, 2), (5, 1), (7, 3), (8, 0)]:
        before, new_game = images([number - 1])[None], np.array([[number in (1, 7)]])
        rest = (np.array([[x]]) for x in (action, 0.0, number == 5))
        replay = insert(replay, new_game, before, images([number])[None], *rest)
    held = [np.asarray(x).tolist() for x in (numbers_on(replay.image), replay.action, replay.done, replay.back)]
    assert [(number, *more) for _, number, _, _, *more in picture(FrameReplay)] == [*zip(*held, strict=True)]
    index, whole = history(replay, np.array([8, 5]))
    assert numbers_on(replay.image)[np.asarray(index[0])].tolist() == [6, 6, 6, 7, 8]
    assert whole.tolist() == [True, False] and replay.inserted == 9


def assert_same(replay, naive, key):
    """All rows: which of them can be drawn, and the images of those that can."""
    assert replay.inserted == naive.inserted
    kept, row = naive.kept(), np.arange(naive.inserted - naive.capacity, naive.inserted)
    index, whole = map(np.asarray, history(replay, row))
    assert set(row[whole & (row >= 0)]) == set(kept)
    row, index = row[whole & (row >= 0)], index[whole & (row >= 0)]
    expected = np.array([(*kept[number][0], number) for number in row]).reshape(-1, 5)
    np.testing.assert_array_equal(numbers_on(np.asarray(replay.image)[index]), expected)
    if kept:
        obs, action, reward, done, next_obs = map(np.asarray, sample(replay, key, 8))
        for k, number in enumerate(numbers_on(next_obs[:, -1])):
            expected = kept[number]
            assert tuple(numbers_on(obs[k])) == expected[0] and tuple(numbers_on(next_obs[k])) == expected[4]
            assert (action[k], reward[k], done[k]) == expected[1:4]


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_it_holds_what_a_buffer_of_whole_stacks_holds(count):
    ends, drawn = 0, 0
    for seed in range(count):
        for i, (replay, naive) in enumerate(histories(seed)):
            if i % 7 == 3:
                assert_same(replay, naive, jax.random.PRNGKey(seed))
        assert_same(replay, naive, jax.random.PRNGKey(seed))
        ends += naive.inserted > naive.capacity
        drawn += len(naive.kept()) > 0
    assert ends > count / 4 and drawn > count / 2  # many have overwritten rows, most can be drawn from


def test_it_draws_all_that_can_be_drawn_alike():
    *_, (replay, naive) = (one for seed in range(5) for one in histories(seed))
    kept = naive.kept()
    assert replay.inserted > 40 and 10 < len(kept) < 40
    drawn = numbers_on(sample(replay, jax.random.PRNGKey(1), 640 * len(kept)).next_obs[:, -1])
    numbers, counts = np.unique(drawn, return_counts=True)
    assert set(numbers) == set(kept)
    assert np.abs(counts - 640).max() < 4.5 * np.sqrt(640)


def test_a_million_images_fit_into_7_gigabytes():
    """Of 10^9 bytes; shapes only, so this takes no memory."""
    leaves = jax.tree.leaves(jax.eval_shape(partial(FrameReplay.empty, 1_000_000)))
    assert 7.056e9 < sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) < 7.2e9


# ---------------------------------------------------------------------- network
def twin(params, num_actions=4):
    """The torch network with the same weights."""
    network = TORCH["QNetwork"](num_actions)
    for name, layer in layers(network).items():
        bias = torch.tensor(np.asarray(params[name]["bias"]))
        layer.load_state_dict({"weight": as_torch(name, params[name]["weight"]), "bias": bias})
    return network


def layers(network):
    """The layers of torch's QNetwork under the names that they have in JAX."""
    names = ("conv1", "conv2", "conv3", "dense")
    found = dict(zip(names, (layer for layer in network.network if hasattr(layer, "weight")), strict=True))
    return found | {"head": network.head}


def random_params(seed):
    return jax.jit(JAX["init_params"], static_argnums=1)(jax.random.PRNGKey(seed), 4)


def test_one_update_is_that_of_the_torch_twin():
    """From the same weights on the same batches: loss, metrics and Adam with the settings of the files, twice."""
    params, target_params = random_params(0), random_params(1)
    network, target = twin(params), twin(target_params)
    args = JAX["Args"]()
    optimizer = optax.adam(args.learning_rate)
    state, adam = optimizer.init(params), torch.optim.Adam(network.parameters(), lr=args.learning_rate)

    @jax.jit
    def update(params, state, batch):
        losses, gradients = jax.value_and_grad(JAX["td_loss"], has_aux=True)(params, target_params, batch, args.gamma)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, losses

    for seed in range(2):
        rng = np.random.default_rng(seed)
        obs, next_obs = rng.integers(0, 256, (2, 8, 4, 84, 84)).astype(np.uint8)
        columns = (
            obs,
            rng.integers(4, size=8),
            np.float32(rng.normal(size=8)),
            np.float32(rng.random(8) < 0.4),
            next_obs,
        )
        params, state, (loss, metrics) = update(params, state, JAX["Batch"](*columns))
        want, want_metrics = TORCH["td_loss"](
            network, target, TORCH["Batch"](*map(torch.from_numpy, columns)), args.gamma
        )
        np.testing.assert_allclose(loss, want.item(), rtol=1e-4)
        assert metrics.keys() == want_metrics.keys()
        for name, value in metrics.items():
            np.testing.assert_allclose(value, want_metrics[name].item(), rtol=1e-4, atol=1e-5, err_msg=name)
        adam.zero_grad()
        want.backward()
        adam.step()
    for name, layer in layers(network).items():
        np.testing.assert_allclose(as_torch(name, params[name]["weight"]), layer.weight.detach(), atol=1e-4)
        np.testing.assert_allclose(params[name]["bias"], layer.bias.detach(), atol=1e-4)
    policy = PolicyOfSeed(JAX["act"], jax.jit(JAX["act"]), lambda: params)  # hands over bytes
    assert policy(obs).tolist() == network.act(obs).tolist()


def test_weights_begin_as_in_torch():
    """Uniform within the same bounds, weights and biases, with the same spread."""
    params, network = random_params(2), TORCH["QNetwork"](4)
    for name, layer in layers(network).items():
        for mine, theirs in zip((params[name]["weight"], params[name]["bias"]), layer.parameters(), strict=True):
            mine, theirs, bound = np.ravel(mine), theirs.detach().ravel().numpy(), np.sqrt(1 / layer.weight[0].numel())
            assert mine.shape == theirs.shape and np.abs(mine).max() <= bound and np.abs(theirs).max() <= bound + 1e-6
            if mine.size > 1000:
                np.testing.assert_allclose(mine.std(), theirs.std(), rtol=0.05)
                assert abs(mine.mean()) < 0.05 * bound


# ---------------------------------------------------------------------- the iteration
class Script:
    """Two games in which every step gives 5. Step 2 costs a life, step 3 brings three; step 4 is a time limit in the
    first game and the end in the second, with an image of 100. Images tell the step."""

    num_envs, single_action_space = 2, gym.spaces.Discrete(3)
    last_lives = 5  # at the end of a game

    def image(self, t):
        return jnp.full((2, 4, 84, 84), t, jnp.uint8)

    def reset(self, key):
        return jnp.int32(0), self.image(0)

    def step(self, key, state, action):
        step, first = state + 1, jnp.array([True, False])
        last, shown = jnp.full(2, step == 4), step % 4
        lives = jnp.array([3, 3, 2, 5, 3], jnp.int32)[step] * jnp.ones(2, jnp.int32)
        left = self.image(jnp.where(step == 4, 100, shown)), lives, jnp.where(last, self.last_lives, lives)
        return shown, Step(self.image(shown), jnp.full(2, 5.0), last & ~first, last & first, *left)


@pytest.fixture
def scripted(monkeypatch):
    """`training, iterate = scripted(**settings)`: the training on `Script` before its first iteration, with a small
    network, and the compiled iteration of six steps in both games."""

    def q_values(params, obs):
        return obs[:, 0, :1, 0].astype(jnp.float32) * params["scale"] + params["scale"]

    changes = {"init_params": lambda *given: {"scale": jnp.array([0.1, 0.3, 0.2])}, "q_values": q_values}
    for name, change in changes.items():
        monkeypatch.setitem(JAX["train_iteration"].__globals__, name, change)

    def make(**settings):
        settings = {"num_envs": 2, "train_frequency": 12, "buffer_size": 40, "learning_starts": 0} | settings
        args = JAX["Args"](batch_size=4, **settings)
        setup = JAX["Setup"](args, Script(), optax.adam(0.1), 10)
        training = jax.jit(partial(JAX["begin"], setup=setup))(jax.random.PRNGKey(0))
        return training, partial(JAX["train_iteration"], setup=setup)

    return make


def test_what_a_step_stores(scripted):
    """Clipped rewards; a lost life and the end of the task end the return, a time limit does not, even if the next game
    has fewer lives; the image that a game left; no stack with images of two games. Raw rewards in the report."""
    training, iterate = scripted(learning_starts=1000, start_e=0, end_e=0)
    training, (raw, over, *_, count) = jax.jit(iterate)(training)
    replay = training.replay
    assert replay.inserted == 16 and count == 0 and (raw == 5).all()
    assert over.astype(int).tolist() == [[0, 0]] * 3 + [[1, 1]] + [[0, 0]] * 2
    index, whole = map(np.asarray, history(replay, np.arange(16)))
    assert whole.astype(int).tolist() == [0, 0, *[1] * 8, 0, 0, *[1] * 4]
    stacks = np.asarray(replay.image)[:, 0, 0][index[whole]].tolist()
    first = [[0, 0, 0, 0, 1], [0, 0, 0, 1, 2]]
    want = [*first, [0, 0, 1, 2, 3], [0, 1, 2, 3, 100], *first]
    assert stacks == [stack for stack in want for _ in range(2)]
    done = np.asarray(replay.done)[:16][whole].reshape(6, 2).astype(int)
    assert done.tolist() == [[0, 0], [1, 1], [0, 0], [0, 1], [0, 0], [1, 1]]
    assert (np.asarray(replay.reward)[:16][whole] == 1).all()
    assert (np.asarray(replay.action)[:16][whole] == 1).all()  # the greedy one, for epsilon is 0
    assert training.lives.tolist() == [2, 2] and not training.new_game.any() and (training.obs == 2).all()


def test_a_life_lost_in_the_step_of_the_time_limit_ends_the_return(scripted, monkeypatch):
    monkeypatch.setattr(Script, "last_lives", 4)
    training, iterate = scripted(learning_starts=1000)
    replay = jax.jit(iterate)(training)[0].replay
    done = np.asarray(replay.done)[np.flatnonzero(replay.back)].reshape(6, 2).astype(int)
    assert done.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1], [0, 0], [1, 1]]


def test_it_learns_after_learning_starts_and_once_there_are_as_many_images(scripted):
    """The second: after a run was resumed without its images."""
    training, iterate = scripted(learning_starts=24)
    iterate = jax.jit(iterate)
    counts = []
    for _ in range(4):
        training, (*_, count) = iterate(training)
        counts.append(int(count))
    assert counts == [0, 0, 1, 1]
    again = training._replace(replay=FrameReplay.empty(40), new_game=jnp.ones(2, bool))
    counts = []
    for _ in range(3):
        again, (*_, count) = iterate(again)
        counts.append(int(count))
    assert counts == [0, 1, 1]


def test_the_buffer_is_never_copied(scripted):
    """The compiled calls of a whole chunk write into it: they need little memory next to it."""
    training, iterate = scripted(buffer_size=20_000)
    call = compiled(iterate, 3, training)
    memory, size, place = call.memory_analysis(), training.replay.image.nbytes, training.replay.image
    assert memory.temp_size_in_bytes < 0.1 * size < memory.alias_size_in_bytes
    place = place.unsafe_buffer_pointer()
    training, _ = call(jax.tree.map(jnp.array, training._replace(replay=None))._replace(replay=training.replay), 3)
    assert training.replay.image.unsafe_buffer_pointer() == place and training.replay.inserted == 46


# ---------------------------------------------------------------------- whole trainings
def cut(folder):
    """Throw the last checkpoint away; returns the arrays of the one before it."""
    newest, before = sorted((folder / "checkpoint").iterdir(), reverse=True)
    shutil.rmtree(newest)
    return load_file(before / "tensors.safetensors")


@pytest.mark.slow
def test_a_resumed_run_without_its_images_says_so_and_fills_its_buffer_first(train, monkeypatch):
    """Weights and rows go on, no game is counted over the interruption. The keys are those of the page."""
    use_fake_envpool(monkeypatch)
    folder = train("dqn_atari_jax", *SHORT, "--total-timesteps", 80, "--save-every", 40)["run"].runs[0].dir
    keys = {key for row in rows(folder) for key in row} - {"global_step", "wall_time"}
    assert keys == documented_keys("dqn_atari_jax") and not (folder / "replay").exists()
    saved = cut(folder)
    assert "/parts/training/obs" in saved and not any("replay" in name for name in saved)
    v = train("dqn_atari_jax", "--resume", folder)
    assert "the part replay was not saved (--save-replay does it): it starts empty" in train.out
    assert "the environments of Catch-v5 cannot be saved, so their running episodes start again" in train.out
    assert v["start"] == 5
    assert [row["global_step"] for row in rows(folder, "losses/td_loss")] == [40, 64, 80]
    # at the steps 32 and 40, and from 64 on: there are 20 images after step 56, 28 after step 64
    assert v["run"].trainings.of(0, "optimizer_state")[0].count == 2 + 3
    games = rows(folder, "charts/episodic_length")
    assert games and all(row["charts/episodic_length"] == 6 for row in games)


@pytest.mark.slow
def test_a_run_resumed_with_its_images_has_them_all(train, monkeypatch):
    """In a buffer that has been filled before; also in a larger one. The new games have stacks of their own."""
    use_fake_envpool(monkeypatch)
    flags = [*SHORT, "--total-timesteps", 80, "--save-every", 40, "--save-replay", "--buffer-size", 40]
    first = train("dqn_atari_jax", *flags)
    folder, replay = first["run"].runs[0].dir, first["run"].trainings.of(0, "replay")
    v = train("dqn_atari_jax", "--resume", folder)
    for name in FrameReplay._fields:
        np.testing.assert_array_equal(getattr(v["run"].trainings.of(0, "replay"), name), getattr(replay, name), name)
    assert replay.inserted == 80 + 14  # 40 steps in two environments, and the first images of 7 games in each
    cut(folder)
    v = train("dqn_atari_jax", "--resume", folder, "--buffer-size", 90, "--resume-changed")
    assert "starts empty" not in train.out and v["start"] == 5
    again = v["run"].trainings.of(0, "replay")
    assert again.inserted == 40 + 40 + 8 and rows(folder, "losses/td_loss")[-1]["global_step"] == 80
    first = np.flatnonzero(np.asarray(again.back)[40:88] == 0)  # 20 steps of games that are 6 steps long
    assert first.tolist() == [0, 1, 14, 15, 28, 29, 42, 43]


@pytest.mark.slow
def test_it_plays_a_game_of_envpool(train, monkeypatch):
    """200 steps of Breakout with a film, in training and evaluation cut off after 30 steps of each game."""
    pytest.importorskip("envpool")
    monkeypatch.setattr("solorl.envs.envpool.ATARI_STEPS", 30)
    flags = "--env-id Breakout-v5 --num-envs 2 --total-timesteps 200 --learning-starts 150 --batch-size 8".split()
    flags += "--buffer-size 500 --eval-episodes 2 --eval-every 0 --capture-video --seed 4".split()
    v = train("dqn_atari_jax", *flags)
    run, replay = v["run"].runs[0], v["run"].trainings.of(0, "replay")
    assert [row["charts/episodic_length"] for row in rows(run.dir, "charts/episodic_length")] == [30.0] * 6
    assert rows(run.dir, "eval/episodic_length")[-1]["eval/episodic_length"] == 30
    assert next((run.dir / "videos").glob("*.mp4")).stat().st_size > 1_000
    assert replay.inserted == 208 and len(np.unique(np.asarray(replay.image)[:208], axis=0)) > 50
    assert rows(run.dir, "losses/td_loss")


@pytest.mark.parametrize("name", ["dqn_atari_jax", "c51_atari_jax", "qdagger_dqn_atari_impalacnn_jax"])
def test_no_image_is_taken_from_before_the_first_row(name):
    """After `--resume-changed --buffer-size` rows are counted from the oldest one that is left, and the first of them
    point to rows that are gone."""
    replay = definitions(name)["FrameReplay"].empty(20)._replace(back=jnp.full(20, 2), inserted=jnp.int32(14))
    assert replay.history(jnp.arange(14))[1].tolist() == [False] * 8 + [True] * 6


# ---------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--env-id ALE/Pong-v5", ["EnvPool has no environment ALE/Pong-v5", "did you mean Pong-v5?"]),
        ("--env-id CartPole-v1", ["CartPole-v1 is not an Atari game", "dqn_jax.py"]),
        ("--buffer-size 9", ["--buffer-size must be at least 10, the images"]),
        ("--num-envs 3 --buffer-size 29", ["--buffer-size must be at least 30, the images"]),
        ("--train-frequency 30 --buffer-size 59", ["--buffer-size must be at least 60, the images of one iteration"]),
        ("--target-network-frequency 3", ["--target-network-frequency must be at least 4"]),
    ],
)
def test_what_it_cannot_train_is_refused(flags, words, train, tmp_path):
    pytest.importorskip("envpool")
    train("dqn_atari_jax", *flags.split(), code=2)
    assert train.out.count("\n") == 1 and all(word in train.out for word in words), train.out
    assert not (tmp_path / "runs").exists()
