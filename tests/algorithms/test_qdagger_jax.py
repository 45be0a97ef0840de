"""qdagger_dqn_atari_impalacnn_jax.py: its networks and updates against the torch twin, what an iteration does in each
of the three phases, and whole trainings, stopped and resumed."""

import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from catch_teacher import scored
from catch_teacher_jax import teacher_folder
from conftest import comparable, definitions, documented_keys, rows
from pixel_probe import use_fake_envpool
from test_dqn_atari_jax import Script
from test_dqn_atari_jax import twin as torch_teacher

import solorl
from solorl.compute.xla import compiled
from solorl.envs.envpool_jax import EnvPoolGames

NAME = "qdagger_dqn_atari_impalacnn_jax"
JAX, TORCH, DQN = definitions(NAME), definitions("qdagger_dqn_atari_impalacnn"), definitions("dqn_atari_jax")
SMALL = "--env-id Catch-v5 --num-envs 2 --teacher-steps 40 --offline-steps 24 --total-timesteps 128".split()
SMALL += "--learning-starts 20 --batch-size 4 --buffer-size 100 --eval-episodes 2 --eval-every 0".split()


@pytest.fixture
def short(train, monkeypatch):
    """The variables of a short training with the teacher whom nobody has trained, or another one."""
    use_fake_envpool(monkeypatch)
    return lambda *flags, teacher=None, **kwargs: train(
        NAME, *SMALL, "--teacher", teacher or teacher_folder(), *flags, **kwargs
    )


# ---------------------------------------------------------------------- networks and losses
def layers(params):
    """The layers in the order in which torch's network has them."""
    for stage in params["stages"]:
        yield stage["conv"]
        for block in stage["blocks"]:
            yield from block
    yield from (params["dense"], params["head"])


def as_torch(weight):
    """A weight in torch's order; the input of the dense layer is an image of 11 x 11 with 32 channels."""
    weight = np.asarray(weight)
    if weight.ndim == 4:
        return torch.tensor(weight.transpose(3, 2, 0, 1))
    if weight.shape[0] == 11 * 11 * 32:
        weight = weight.reshape(11, 11, 32, -1).transpose(2, 0, 1, 3).reshape(weight.shape)
    return torch.tensor(weight.T)


def torch_layers(network):
    return [layer for layer in network.modules() if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear))]


def twin(params):
    """The torch network with the same weights."""
    network = TORCH["QNetwork"](4)
    for mine, layer in zip(layers(params), torch_layers(network), strict=True):
        layer.load_state_dict({"weight": as_torch(mine["weight"]), "bias": torch.tensor(np.asarray(mine["bias"]))})
    return network


def random_params(seed):
    return jax.jit(JAX["init_params"], static_argnums=1)(jax.random.PRNGKey(seed), 4)


@pytest.mark.slow
def test_one_update_is_that_of_the_torch_twin():
    """From the same weights, teacher and batch: networks, losses, metrics and Adam with the settings of the files."""
    params, target_params = random_params(0), random_params(1)
    teacher_params = jax.jit(DQN["init_params"], static_argnums=1)(jax.random.PRNGKey(2), 4)
    network, target, teacher = twin(params), twin(target_params), torch_teacher(teacher_params)
    args, rng = JAX["Args"](), np.random.default_rng(0)
    optimizer, adam = optax.adam(args.learning_rate), torch.optim.Adam(network.parameters(), lr=args.learning_rate)
    obs, next_obs = rng.integers(0, 256, (2, 4, 4, 84, 84)).astype(np.uint8)
    columns = (obs, rng.integers(4, size=4), np.float32(rng.normal(size=4)), np.float32([0, 1, 0, 0]), next_obs)
    settings = args.gamma, 0.05, 0.7  # a temperature at which the policies differ

    @jax.jit
    def update(params):
        inputs = target_params, teacher_params, JAX["Batch"](*columns), *settings
        (loss, metrics), gradients = jax.value_and_grad(JAX["qdagger_loss"], has_aux=True)(params, *inputs)
        updates, _ = optimizer.update(gradients, optimizer.init(params))
        return optax.apply_updates(params, updates), loss, metrics

    params, loss, metrics = update(params)
    want, want_metrics = TORCH["qdagger_loss"](
        network, target, teacher, TORCH["Batch"](*map(torch.from_numpy, columns)), *settings
    )
    np.testing.assert_allclose(loss, want.item(), rtol=1e-4)
    assert metrics.keys() == want_metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(value, want_metrics[name].item(), rtol=1e-4, atol=1e-5, err_msg=name)
    want.backward()
    adam.step()
    for mine, layer in zip(layers(params), torch_layers(network), strict=True):
        np.testing.assert_allclose(as_torch(mine["weight"]), layer.weight.detach(), atol=1e-5)
        np.testing.assert_allclose(mine["bias"], layer.bias.detach(), atol=1e-5)


def test_maxima_are_those_of_torch():
    for side in (42, 21):
        x = np.random.default_rng(0).normal(size=(2, 3, side, side)).astype(np.float32) - 5
        want = F.max_pool2d(torch.tensor(x), 3, stride=2, padding=1).numpy()
        np.testing.assert_array_equal(JAX["max_pool"](x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2), want)


@pytest.mark.slow
def test_weights_begin_as_in_torch():
    """Uniform within the same bounds, with the same spread."""
    for mine, layer in zip(layers(random_params(2)), torch_layers(TORCH["QNetwork"](4)), strict=True):
        bound, weight = np.sqrt(1 / layer.weight[0].numel()), as_torch(mine["weight"]).numpy()
        assert weight.shape == tuple(layer.weight.shape) and np.abs(weight).max() <= bound >= np.abs(mine["bias"]).max()
        np.testing.assert_allclose(weight.std(), layer.weight.detach().std(), rtol=0.1)


@pytest.mark.slow
def test_the_teacher_has_the_network_of_its_file():
    params = DQN["init_params"](jax.random.PRNGKey(0), 5)
    assert jax.tree.map(jnp.shape, params) == JAX["teacher_shapes"](5)
    obs = np.random.default_rng(0).integers(0, 256, (3, 4, 84, 84), dtype=np.uint8)
    np.testing.assert_array_equal(JAX["teacher_values"](params, obs), DQN["q_values"](params, obs))


def test_returns_are_counted_as_by_the_torch_twin():
    rng = np.random.default_rng(0)
    unfinished, returns = np.zeros(3), np.zeros(4)
    mine = jnp.zeros(3), jnp.zeros(4)
    for _ in range(10):
        reward, over = rng.integers(-3, 4, (5, 3)).astype(np.float32), rng.random((5, 3)) < 0.2
        unfinished, returns = TORCH["count_returns"](unfinished, returns, reward, over)
        mine = JAX["count_returns"](*mine, reward, over)
        np.testing.assert_array_equal(mine[0], unfinished)
        np.testing.assert_array_equal(mine[1], returns)
    assert len(set(returns)) > 2


# ---------------------------------------------------------------------- the iteration
class Restarted(Script):
    """`Script`, whose games can begin again."""

    def restart(self, state):
        return jnp.int32(0), self.image(0)


@pytest.fixture
def scripted(monkeypatch):
    """`training, teach, offline, online = scripted(**settings)`: the training on `Script` before its first iteration,
    with small networks, and the iterations of six steps in both games: one of the teacher, who scored 10 and takes
    action 2, one offline, ten of the student, who takes action 1."""

    def q_values(params, obs):
        return obs[:, 0, :1, 0].astype(jnp.float32) * params["scale"] + params["scale"]

    changes = {"init_params": lambda *given: {"scale": jnp.array([0.1, 0.3, 0.2])}, "q_values": q_values}
    changes["teacher_values"] = q_values
    for name, change in changes.items():
        monkeypatch.setitem(JAX["teach"].__globals__, name, change)

    def make(**settings):
        settings = {"teacher_steps": 24, "offline_steps": 12, "buffer_size": 40, "learning_starts": 12} | settings
        args = JAX["Args"](batch_size=4, num_envs=2, train_frequency=12, **settings)
        setup = JAX["Setup"](args, Restarted(), optax.adam(1e-5), 12, 1, 1, 10, 10.0)
        teacher = {"scale": jnp.array([0.1, 0.2, 0.3])}
        training = jax.jit(lambda key: JAX["begin"](key, setup, teacher))(jax.random.PRNGKey(0))
        return training, *(partial(JAX[name], setup=setup) for name in ("teach", "offline", "online"))

    return make


def test_the_phases_one_after_the_other(scripted):
    """Whose actions go where, how many updates there are, that the student begins new games, and the weight. A game of
    four steps brings 20."""
    training, *phases = scripted(start_e=0, end_e=0)
    teach, offline, online = map(jax.jit, phases)
    training, _ = teach(training)
    seen = [(int(training.teacher_replay.inserted), int(training.replay.inserted), 0)]
    for iterate in (offline, online, online):
        training, (*found, weight, sums, count) = iterate(training)
        seen.append((int(training.teacher_replay.inserted), int(training.replay.inserted), int(count)))
        if len(seen) == 2:
            assert training.env_state == 2 and not training.returns.any()  # as after six steps
            assert sums["losses/distill_loss"] > 0 and weight == 1
        if len(seen) == 3:
            assert found[1].astype(int).tolist() == [[0, 0]] * 3 + [[1, 1]] + [[0, 0]] * 2
            assert training.returns.tolist() == [0] * 8 + [20, 20] and training.unfinished.tolist() == [10, 10]
            assert weight == pytest.approx(0.6)
    assert seen == [(16, 0, 0), (16, 0, 12), (16, 16, 0), (16, 30, 1)]
    assert training.returns.tolist() == [0] * 4 + [20] * 6 and weight == 0
    for replay, action in ((training.teacher_replay, 2), (training.replay, 1)):
        whole = np.asarray(replay.back)[: int(replay.inserted)] > 0
        assert whole.sum() in (12, 24) and (np.asarray(replay.action)[: int(replay.inserted)][whole] == action).all()
    stacks = np.asarray(training.replay.image)[:6, 0, 0].reshape(3, 2)
    assert stacks.tolist() == [[0, 0], [1, 1], [2, 2]]  # the student's first images are those of new games


@pytest.mark.slow
def test_a_life_lost_in_the_step_of_the_time_limit_ends_the_return(scripted, monkeypatch):
    monkeypatch.setattr(Script, "last_lives", 4)
    training, teach, *_ = scripted()
    replay = jax.jit(teach)(training)[0].teacher_replay
    done = np.asarray(replay.done)[np.flatnonzero(replay.back)].reshape(6, 2).astype(int)
    assert done.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1], [0, 0], [1, 1]]


@pytest.mark.slow
def test_each_player_begins_with_the_first_epsilon(scripted):
    training, teach, offline, online = scripted(exploration_fraction=0.5)
    for iteration, want in ((2, 1), (3, 1 - 0.99 / 5)):
        assert online(training._replace(iteration=jnp.int32(iteration)))[1][2] == pytest.approx(want, abs=1e-6)
    assert teach(training)[1] == 1
    # a run that was resumed without its images has nothing to learn from offline
    *_, count = offline(training._replace(iteration=jnp.int32(1)))[1]
    assert count == 0


@pytest.mark.slow
def test_no_buffer_is_ever_copied(scripted):
    """The compiled calls of a whole chunk write into them: they need little memory next to them."""
    training, *phases = scripted(teacher_steps=10_000, buffer_size=20_000)
    size = training.replay.image.nbytes + training.teacher_replay.image.nbytes
    for iterate in phases:
        memory = compiled(iterate, 3, training).memory_analysis()
        assert memory.temp_size_in_bytes < 0.1 * size < memory.alias_size_in_bytes


def test_games_of_envpool_begin_again_in_compiled_code(monkeypatch):
    """First images, as many steps to the end as in a new game; the pool is the same."""
    use_fake_envpool(monkeypatch)
    envs = EnvPoolGames("Catch-v5", 2)
    state, obs = envs.reset(jax.random.PRNGKey(0))
    first, action = np.asarray(obs), jnp.zeros(2, jnp.int32)
    step = jax.jit(envs.step)
    for _ in range(3):
        state, result = step(None, state, action)
    assert (np.asarray(result.obs) != first).any()
    state, obs = jax.jit(envs.restart)(state)
    assert np.asarray(obs).any() and not np.asarray(obs)[:, :, 12:72].any() and state.steps.tolist() == [0, 0]
    ends = []
    for _ in range(6):
        state, result = step(None, state, action)
        ends.append(result.terminated.tolist())
    assert ends == [[False] * 2] * 5 + [[True] * 2] and len(envs.pools) == 1


# ---------------------------------------------------------------------- whole trainings
@pytest.mark.slow
def test_a_training_and_its_policy(short, train, solo):
    """The keys are those of the page; the run goes on from its own copy of the teacher; the student is played and
    loaded without one."""
    folder = shutil.copytree(teacher_folder(), teacher_folder().with_name("gone"))
    v = short("--save-every", "48", teacher=folder)
    run, run_dir = v["run"], v["run"].runs[0].dir
    shutil.rmtree(folder)
    keys = {key for row in rows(run_dir) for key in row} - {"global_step", "wall_time"}
    assert keys == documented_keys(NAME)
    assert rows(run_dir, "charts/episodic_return")[0]["global_step"] == 64 + 12
    want = run.trainings.of(0, "teacher_params")
    shutil.rmtree(max((run_dir / "checkpoint").iterdir()))
    again = train(NAME, "--resume", run_dir)
    for name in ("replay", "teacher_replay"):
        assert f"the part {name} was not saved (--save-replay does it): it starts empty" in train.out
    assert again["start"] * 4 == 96 - 64 and rows(run_dir)[-1]["global_step"] == 128
    assert jax.tree.all(jax.tree.map(np.array_equal, again["run"].trainings.of(0, "teacher_params"), want))
    shutil.rmtree(run_dir / "kept")
    policy, obs = solorl.load(run_dir), np.random.default_rng(0).integers(0, 256, (5, 4, 84, 84), dtype=np.uint8)
    assert policy(obs).tolist() == JAX["q_values"](policy.models["params"], obs).argmax(1).tolist()
    assert solo("play", run_dir, "--episodes", "1")[0] == 0


@pytest.mark.slow
def test_resumed_with_its_images_it_has_them_all(short, train, tmp_path, monkeypatch):
    """While the teacher plays, offline, where no game can differ, between two phases and while the student plays: until
    the games differ all is equal."""
    monkeypatch.setattr("solorl.checkpoints.checkpoint.KEEP", 100)
    flags = ["--save-replay", "--save-every", "8", "--log-every", "8", "--eval-every", "0"]
    run_dir = short(*flags)["run"].runs[0].dir
    for step in (24, 40, 48, 64, 80):
        again = shutil.copytree(run_dir, tmp_path / str(step) / run_dir.name)
        for path in (again / "checkpoint").iterdir():
            if int(path.name.removeprefix("step_")) > step:
                shutil.rmtree(path)
        v = train(NAME, "--resume", again)
        assert v["run"].runs[0].checkpoints.resumed["step"] == step and "starts empty" not in train.out
        training = v["run"].trainings.of(0)
        assert training.teacher_replay.inserted >= 48 and training.replay.inserted >= 64 + 2 * 6
        if step in (40, 48):
            runs = map(comparable, (again, run_dir))
            found, expected = ([row for row in each if step < row["global_step"] <= 64] for each in runs)
            assert found == expected and len(found) == (64 - step) // 8


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--teacher=", "there is no teacher: --teacher must name a run folder"),
        ("--temperature 0", "--temperature must be more than 0"),
        ("--teacher-steps 19", "--teacher-steps and --buffer-size must be at least 20, the images"),
        ("--train-frequency 60 --buffer-size 200", "--teacher-steps 40 is less than one iteration of 60"),
        ("--total-timesteps 64", "--total-timesteps 64 leaves no iteration of"),
    ],
)
def test_what_cannot_be_is_refused(flags, words, short, train, tmp_path):
    short(*flags.split(), teacher="nowhere", code=2)
    assert words in train.out and train.out.count("\n") == 1 and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_other_teachers_are_refused(short, train, tmp_path):
    folder = shutil.copytree(teacher_folder(), tmp_path / "teacher")
    short(teacher=scored(folder, -0.5), code=2)
    assert "must have scored more than 0" in train.out
    short(teacher=teacher_folder("--num-actions", "4"), code=2)
    assert "must be a run of dqn_atari_jax.py, or have its network" in train.out


@pytest.mark.slow
def test_a_teacher_in_torch_is_refused(short, train):
    import catch_teacher

    short(teacher=catch_teacher.teacher_folder(), code=2)
    assert "was trained on pixel_probe:Catch-v0, not on Catch-v5" in train.out


@pytest.mark.slow
def test_it_learns_catch_from_a_trained_teacher(short, train):
    """The whole story: dqn_atari_jax learns Catch, and its student most of it offline."""
    flags = "--env-id Catch-v5 --num-envs 1 --buffer-size 5000 --learning-rate 0.0005 --gamma 0.9".split()
    flags += "--target-network-frequency 200 --end-e 0.05 --learning-starts 200".split()
    own = "--total-timesteps 12000 --eval-every 1000 --target-return 0.9 --learning-starts 500 --save-every 0".split()
    teacher = train("dqn_atari_jax", *flags, *own)["run"].runs[0].dir
    own = "--teacher-steps 1000 --offline-steps 400 --total-timesteps 2400 --eval-every 0 --batch-size 32".split()
    own += "--temperature 0.1 --eval-episodes 20".split()
    run_dir = short(*flags, *own, teacher=teacher)["run"].runs[0].dir
    assert rows(run_dir, "eval/episodic_return")[-1]["eval/episodic_return"] >= 0.8
