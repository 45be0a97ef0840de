"""ppo_atari_envpool_jax.py and EnvPoolGames: networks and updates against torch, games against EnvPoolVectorEnv."""

import importlib.util
import shutil
import sys
from functools import partial

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from conftest import definitions, documented_keys, refused, rows
from pixel_probe import use_fake_envpool
from safetensors.numpy import load_file

from solorl.envs.envpool import EnvPoolVectorEnv
from solorl.envs.envpool_jax import EnvPoolGames
from solorl.envs.interface import Step
from solorl.envs.open import open_envs
from solorl.run.trainings import PolicyOfSeed

JAX, TORCH = definitions("ppo_atari_envpool_jax"), definitions("ppo_atari_envpool")
SHORT = "--env-id Catch-v5 --num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1 --eval-episodes 2".split()


# ---------------------------------------------------------------------- networks
def twins(num_actions=4):
    """The same random weights for both: the parameters of JAX and the Agent of torch."""
    params = jax.jit(JAX["init_params"], static_argnums=1)(jax.random.PRNGKey(0), num_actions)
    params["actor"]["weight"] = jax.random.normal(jax.random.PRNGKey(7), (512, num_actions)) / 20
    agent = TORCH["Agent"](num_actions)
    for name, layer in layers(agent).items():
        layer.load_state_dict({"weight": as_torch(name, params[name]["weight"]), "bias": torch.zeros_like(layer.bias)})
    return params, agent


def layers(agent):
    """The layers of torch's Agent under the names that they have in JAX."""
    names = ("conv1", "conv2", "conv3", "dense")
    found = dict(zip(names, (layer for layer in agent.network if hasattr(layer, "weight")), strict=True))
    return found | {"actor": agent.actor, "critic": agent.critic}


def as_torch(name, weight):
    """Weights as torch orders them; the inputs of `dense` are (7, 7, 64) in JAX and (64, 7, 7) in torch."""
    weight = np.asarray(weight)
    if name == "dense":
        weight = weight.reshape(7, 7, 64, 512).transpose(2, 0, 1, 3).reshape(-1, 512)
    order = (3, 2, 0, 1) if weight.ndim == 4 else (1, 0)
    return torch.tensor(weight.transpose(order).copy())


def minibatch(n=8, seed=0):
    rng = np.random.default_rng(seed)
    obs = rng.integers(0, 256, (n, 4, 84, 84)).astype(np.uint8)
    others = (np.float32(x) for x in (-rng.random(n) - 0.5, *rng.normal(size=(3, n))))
    return JAX["Batch"](obs, rng.integers(4, size=n), *others)


@pytest.mark.slow
def test_one_update_is_that_of_the_torch_twin():
    """From the same weights on the same minibatches: outputs, loss, clipped gradient and Adam, twice."""
    params, agent = twins()
    args = JAX["Args"]()
    optimizer = JAX["clipped_adam"](0.003, max_grad_norm=0.01)
    state, adam = jax.jit(optimizer.init)(params), torch.optim.Adam(agent.parameters(), lr=0.003, eps=1e-5)

    @jax.jit
    def update(params, state, batch):
        losses, gradients = jax.value_and_grad(JAX["ppo_loss"], has_aux=True)(params, batch, args)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, losses

    for seed in range(2):
        batch = minibatch(seed=seed)
        params, state, (loss, metrics) = update(params, state, batch)
        want, want_metrics = TORCH["ppo_loss"](agent, TORCH["Batch"](*map(torch.from_numpy, batch)), TORCH["Args"]())
        assert metrics.keys() == want_metrics.keys()
        np.testing.assert_allclose(loss, want.item(), rtol=1e-4)
        for name, value in metrics.items():
            np.testing.assert_allclose(value, want_metrics[name].item(), rtol=1e-4, atol=1e-5, err_msg=name)
        adam.zero_grad()
        want.backward()
        assert torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.01) > 0.01  # it does clip
        adam.step()
    for name, layer in layers(agent).items():
        np.testing.assert_allclose(as_torch(name, params[name]["weight"]), layer.weight.detach(), atol=1e-4)
        np.testing.assert_allclose(params[name]["bias"], layer.bias.detach(), atol=1e-4)
    obs = minibatch(seed=9).obs
    policy = PolicyOfSeed(JAX["act"], jax.jit(JAX["act"]), lambda: params)  # hands over bytes
    assert policy(obs).tolist() == agent.act(obs).tolist()


@pytest.mark.slow
def test_weights_begin_orthogonal():
    """As in the twin: gain, zero biases, shapes."""
    params, agent = JAX["init_params"](jax.random.PRNGKey(1), 6), TORCH["Agent"](6)
    for name, layer in layers(agent).items():
        mine, theirs = (as_torch(name, params[name]["weight"]).flatten(1), layer.weight.detach().flatten(1))
        assert mine.shape == theirs.shape and not np.any(params[name]["bias"])
        np.testing.assert_allclose(mine @ mine.T, theirs @ theirs.T, atol=1e-4, err_msg=name)


# ---------------------------------------------------------------------- games
def together(env_id, actions, max_steps, seed=3):
    """What EnvPoolGames and EnvPoolVectorEnv say of the same actions (num_steps, num_envs) and seeds: first
    observations, and obs, reward, terminated, truncated, final_obs, lives of all steps; final_obs of ours only."""
    num_envs = actions.shape[1]
    games = EnvPoolGames(env_id, num_envs)
    games._make = partial(EnvPoolVectorEnv, env_id, num_envs, 1, max_steps)
    games.max_steps = max_steps or games.max_steps
    key = jax.random.PRNGKey(seed)
    state, first = jax.jit(games.reset)(key)
    scan = jax.jit(lambda state, actions: jax.lax.scan(lambda s, a: games.step(None, s, a), state, actions))
    mine = jax.tree.map(np.asarray, scan(state, jnp.asarray(actions))[1])
    envs = EnvPoolVectorEnv(env_id, num_envs, 1, max_steps)
    want_first, _ = envs.reset(seed=games.seeds_of(key))
    steps = [envs.step(action) for action in actions]
    envs.close()
    np.testing.assert_array_equal(first, want_first)
    assert first.dtype == mine.obs.dtype == np.uint8
    for name, want in zip(("obs", "reward", "terminated", "truncated"), zip(*steps, strict=True), strict=False):
        np.testing.assert_array_equal(getattr(mine, name), np.stack(want), err_msg=name)
    np.testing.assert_array_equal(mine.lives, [step[4]["lives"] for step in steps])
    final_lives = [step[4].get("final_info", step[4])["lives"] for step in steps]
    np.testing.assert_array_equal(mine.final_lives, final_lives)
    for t, (obs, _, terminated, truncated, infos) in enumerate(steps):
        for n in range(num_envs):
            over = terminated[n] | truncated[n]
            np.testing.assert_array_equal(mine.final_obs[t, n], infos["final_obs"][n] if over else obs[n])
    return mine


def test_games_are_those_of_the_vector_environment():
    """200 steps of Pong, all rewards raw."""
    pytest.importorskip("envpool")
    step = together("Pong-v5", np.random.default_rng(0).integers(6, size=(200, 2)), None)
    assert set(np.unique(step.reward)) == {-1, 0} and not (step.terminated | step.truncated).any()


def test_lives_ends_and_fire_are_those_of_the_vector_environment():
    """Breakout with random actions: lives are lost, FIRE is pressed, games end and begin in the same step."""
    pytest.importorskip("envpool")
    step = together("Breakout-v5", np.random.default_rng(0).integers(4, size=(300, 2)), None)
    lost = (np.diff(step.lives, axis=0) < 0).sum()
    assert step.terminated.sum() >= 2 and lost >= 8 and not step.truncated.any() and step.reward.sum() > 0
    assert (step.lives[step.terminated] == 5).all() and (step.final_lives[step.terminated] == 0).all()


@pytest.mark.parametrize("limit", [5, 6, 7])
def test_the_last_step_allowed(limit, monkeypatch):
    """A game of Catch ends in step 6: by the limit before, else as the end of the task; in whole games only."""
    use_fake_envpool(monkeypatch)
    step = together("Catch-v5", np.random.default_rng(0).integers(3, size=(20, 3)), limit)
    ends, others = (step.truncated, step.terminated) if limit == 5 else (step.terminated, step.truncated)
    length = min(limit, 6)
    assert not others.any() and [(t + 1) % length == 0 for t in range(20)] == ends[:, 0].tolist()
    assert (np.abs(step.reward).sum() > 0) == (limit > 5)


def test_fire_is_pressed_once_after_a_lost_life(monkeypatch):
    """In the games that have the button, whatever the policy wants; never after a game is over."""
    use_fake_envpool(monkeypatch)
    pressed = []
    monkeypatch.setattr("solorl.envs.envpool.has_fire", lambda game, actions: True)
    monkeypatch.setattr("pixel_probe.FakePool._info", lives_of(monkeypatch, pressed))
    envs = EnvPoolGames("Catch-v5", 1)
    state, _ = jax.jit(envs.reset)(jax.random.PRNGKey(0))
    actions = jnp.full((12, 1), 2)
    _, step = jax.jit(lambda s: jax.lax.scan(lambda s, a: envs.step(None, s, a), s, actions))(state)
    assert step.lives[:, 0].tolist() == [3, 3, 2, 2, 2, 3] * 2 and np.flatnonzero(step.terminated).tolist() == [5, 11]
    assert [action[0] for action in pressed] == [2, 2, 2, 1, 2, 2] * 2


def lives_of(monkeypatch, pressed):
    """`FakePool._info` with 3 lives, 2 after step 3, 1 in the last step; actions of the game go to `pressed`."""
    from pixel_probe import FakePool

    plain, step = FakePool._info, FakePool.step

    def note(self, actions):
        pressed.append(actions.tolist())
        return step(self, actions)

    def info(self, ids, reward, terminated):
        elapsed = self.elapsed[ids]
        lives = np.where(elapsed < 3, 3, np.where(elapsed < 6, 2, 1)).astype(np.int32)
        return plain(self, ids, reward, terminated) | {"lives": lives}

    monkeypatch.setattr(FakePool, "step", note)
    return info


def test_games_of_envpool_are_opened_as_such():
    pytest.importorskip("envpool")
    assert isinstance(open_envs("Pong-v5", 2), EnvPoolGames)
    assert not isinstance(open_envs("LunarLander-v3", 2), EnvPoolGames)


# ---------------------------------------------------------------------- the rollout
class Script:
    """Two games in which every step gives 5; step 2 costs a life, step 4 is a time limit in the first game and the end
    in the second. Images tell the step; what a time limit left is 100."""

    num_envs, single_action_space = 2, gym.spaces.Discrete(3)
    last_lives = 2  # at the end of a game; one is lost in its last step if there is only 1

    def image(self, t):
        return jnp.full((2, 4, 84, 84), t, jnp.uint8)

    def reset(self, key):
        return jnp.int32(0), self.image(0)

    def step(self, key, state, action):
        step, first = state + 1, jnp.array([True, False])
        last, shown = jnp.full(2, step == 4), step % 4
        lives = jnp.where((step == 2) | (step == 3), 2, 3) * jnp.ones(2, int)
        left = self.image(100), lives, jnp.where(last, self.last_lives, lives)
        return shown, Step(self.image(shown), jnp.full(2, 5.0), last & ~first, last & first, *left)


@pytest.mark.parametrize("last_lives", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_credit_is_given_for(last_lives, monkeypatch):
    """Clipped rewards, a lost life as an end of the return, also in the step of a time limit, else the value of what
    the limit left; raw rewards and whole games in the report."""
    monkeypatch.setattr(Script, "last_lives", last_lives)
    args = JAX["Args"](num_envs=2, num_steps=6, num_minibatches=1, update_epochs=1)
    setup = JAX["Setup"](args, Script(), num_iterations=1)
    seen, gae = [], JAX["gae"]
    params = {"scale": jnp.full(4, 0.01)}  # a small network, soon compiled

    def noted_gae(*given):
        jax.debug.callback(lambda *arrays: seen.append(arrays), *given)
        return gae(*given)

    def actor_critic(params, obs):
        outputs = obs[:, 0, :1, 0].astype(jnp.float32) * params["scale"] + params["scale"]
        return outputs[:, 1:], outputs[:, 0]

    changes = {"init_params": lambda *given: params, "actor_critic": actor_critic, "gae": noted_gae}
    for name, change in changes.items():
        monkeypatch.setitem(JAX["train_iteration"].__globals__, name, change)
    training = jax.jit(lambda key: JAX["begin"](key, setup))(jax.random.PRNGKey(0))
    value_of = lambda t: actor_critic(params, Script().image(t))[1]  # noqa: E731
    after, (raw, over, sums, count, _) = jax.jit(lambda training: JAX["train_iteration"](training, setup))(training)
    jax.effects_barrier()
    reward, value, done, final_value, next_value = (np.asarray(x) for x in seen[0][:5])
    assert (reward == 1).all() and (raw == 5).all() and count == 1
    assert over.astype(int).tolist() == [[0, 0]] * 3 + [[1, 1]] + [[0, 0]] * 2
    assert done.astype(int).tolist() == [[0, 0], [1, 1], [0, 0], [1, 1], [0, 0], [1, 1]]
    want = np.zeros((6, 2))
    want[3, 0] = value_of(100)[0] if last_lives == 2 else 0
    assert value_of(100)[0] != 0
    np.testing.assert_allclose(final_value, want, atol=1e-5)
    np.testing.assert_allclose(value, [value_of(t) for t in (0, 1, 2, 3, 0, 1)], atol=1e-5)
    np.testing.assert_allclose(next_value, value_of(2), atol=1e-5)
    assert after.lives.tolist() == [2, 2] and (after.obs == 2).all() and after.obs.dtype == jnp.uint8
    assert abs(float(sums["losses/approx_kl"])) < 1e-6 and float(sums["losses/clipfrac"]) == 0  # the first ratio is 1


# ---------------------------------------------------------------------- whole trainings
@pytest.mark.slow
def test_a_resumed_run_starts_its_games_again(train, monkeypatch):
    """And says so; weights and rows go on, no game is counted over the interruption. The keys are those of the page."""
    use_fake_envpool(monkeypatch)
    flags = [*SHORT, "--total-timesteps", 80, "--save-every", 48]
    folder = train("ppo_atari_envpool_jax", *flags)["run"].runs[0].dir
    keys = {key for row in rows(folder) for key in row} - {"global_step", "wall_time"}
    assert keys == documented_keys("ppo_atari_envpool_jax")
    newest = sorted((folder / "checkpoint").iterdir())[-1]
    shutil.rmtree(newest)
    saved = load_file(next((folder / "checkpoint").iterdir()) / "tensors.safetensors")
    assert saved["/parts/training/obs"].dtype == np.uint8
    v = train("ppo_atari_envpool_jax", "--resume", folder)
    assert "the environments of Catch-v5 cannot be saved, so their running episodes start again" in train.out
    assert v["start"] == 3 and rows(folder, "losses/value_loss")[-1]["global_step"] == 80
    games = rows(folder, "charts/episodic_length")
    assert games and all(row["charts/episodic_length"] == 6 for row in games)


@pytest.mark.slow
def test_it_plays_a_game_of_envpool(train, monkeypatch):
    """200 steps of Breakout with a film, in training and evaluation cut off after 30 steps of each game."""
    pytest.importorskip("envpool")
    monkeypatch.setattr("solorl.envs.envpool.ATARI_STEPS", 30)
    flags = "--env-id Breakout-v5 --num-envs 2 --num-steps 50 --total-timesteps 200 --num-minibatches 2".split()
    flags += "--update-epochs 1 --eval-episodes 2 --eval-every 0 --capture-video --seed 4".split()
    run = train("ppo_atari_envpool_jax", *flags)["run"].runs[0]
    assert [row["charts/episodic_length"] for row in rows(run.dir, "charts/episodic_length")] == [30.0] * 6
    assert rows(run.dir, "eval/episodic_length")[-1]["eval/episodic_length"] == 30
    assert next((run.dir / "videos").glob("*.mp4")).stat().st_size > 1_000


# ---------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("ALE/Pong-v5", ["EnvPool has no environment ALE/Pong-v5", "did you mean Pong-v5?"]),
        ("CartPole-v1", ["CartPole-v1 is not an Atari game", "ppo_jax.py"]),
    ],
)
def test_another_kind_of_environment_is_refused(env_id, words, train, tmp_path):
    pytest.importorskip("envpool")
    train("ppo_atari_envpool_jax", "--env-id", env_id, code=2)
    assert train.out.count("\n") == 1 and all(word in train.out for word in words), train.out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("module", "extra"), [("envpool", "envpool"), ("ale_py", "atari")])
def test_a_missing_package_names_its_extra(module, extra, solo, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda one, *more: None if one == module else find_spec(one, *more))
    monkeypatch.setitem(sys.modules, module, None)
    refused(solo("train", "ppo_atari_envpool_jax"), f"solorl[{extra}]")
