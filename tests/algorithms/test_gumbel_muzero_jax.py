"""gumbel_muzero_jax.py: value targets and masks by loops, the unrolled loss by hand, what the search may see, self-play
as an environment, and that it learns."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, rows
from test_alphazero import TIC

from solorl.envs.classic import JaxEnvs

pytest.importorskip("mctx")
JAX, ALPHA = definitions("gumbel_muzero_jax"), definitions("alphazero_jax")
SIZES = "--num-simulations 4 --eval-simulations 4 --hidden-dim 16 --num-updates 2 --batch-size 8 --num-envs 8"
TINY = f"{SIZES} --num-steps 16 --td-steps 10 --total-timesteps 512 --eval-every 0 --eval-episodes 2".split()
BOARD = "--env-id games/TicTacToe-v0 --opponents one-ply".split()


def setup_of(envs=None, game=None, discount=0.9, scale=0.1, n=3, **args):
    """What stays the same, with few steps of the model."""
    settings = {"unroll_steps": 2, "hidden_dim": 16, "num_simulations": 6, "eval_simulations": 6} | args
    args = dataclasses.replace(JAX["Args"](), **settings)
    return JAX["Setup"](args, envs, game, optax.adam(1e-3), discount, scale, n)


def board_setup(num_envs=8, opening_moves=0, **args):
    """Tic-tac-toe as the main block sets it up."""
    game = JAX["make_game"](TIC.height, TIC.width, TIC.length, TIC.stones_fall)
    envs = JAX["Boards"](game, num_envs, opening_moves)
    return setup_of(envs, game, -1.0, 1.0, 9, num_envs=num_envs, opening_moves=opening_moves, **args)


def model(obs_dim=4, num_actions=2, width=16, seed=0):
    """Weights far from 0, so that predictions differ."""
    params = JAX["init_params"](jax.random.PRNGKey(seed), obs_dim, num_actions, width)
    return jax.tree.map(lambda x: 2 * x, params)


def stored(rows_=20, envs=30, num_actions=3, seed=0, board=False):
    """Random steps with many ends of both kinds, as the replay buffer has them."""
    rng = np.random.default_rng(seed)
    done = rng.random((rows_, envs)) < 0.25
    terminated = done & (board | (rng.random((rows_, envs)) < 0.5))
    policy = rng.dirichlet(np.ones(num_actions), (rows_, envs))
    reward, value, end = rng.normal(size=(3, rows_, envs))
    action, obs = rng.integers(num_actions, size=(rows_, envs)), rng.normal(size=(rows_, envs, 4))
    fields = obs, action, reward, terminated, done, policy, value, np.where(terminated, 0, end)
    return JAX["Batch"](*map(jnp.asarray, fields))


# ---------------------------------------------------------------------- targets
@pytest.mark.parametrize(("discount", "scale", "n"), [(0.9, 0.1, 3), (0.5, 0.5, 1), (-1.0, 1.0, 9)])
def test_value_targets_are_those_of_a_loop(discount, scale, n):
    """Forwards, step by step, from every state that has n steps after it."""
    batch, setup = stored(), setup_of(discount=discount, scale=scale, n=n)
    got = np.asarray(JAX["n_step_targets"](batch, n, setup))
    assert got.shape == (20 - n, 30)
    for t, i in np.ndindex(*got.shape):
        total, weight = 0.0, 1.0
        for step in range(t, t + n):
            total += weight * scale * batch.reward[step, i]
            weight *= discount
            if batch.done[step, i]:
                total += weight * (0 if batch.terminated[step, i] else batch.end_value[step, i])
                break
        else:
            total += weight * batch.value[t + n, i]
        np.testing.assert_allclose(got[t, i], total, rtol=1e-4, atol=1e-5)


def test_on_a_board_targets_are_results_with_the_other_sign_at_each_move():
    """A game won by its fifth move, then one that is a draw after nine, whatever the search said."""
    batch, setup = stored(rows_=14 + 9, envs=1, board=True), setup_of(discount=-1.0, scale=1.0, n=9)
    ends = np.isin(np.arange(23), [4, 13, 22])[:, None]
    won = (np.arange(23) == 4)[:, None]
    batch = batch._replace(done=jnp.asarray(ends), terminated=jnp.asarray(ends), reward=jnp.float32(won))
    got = JAX["n_step_targets"](batch._replace(end_value=jnp.zeros((23, 1))), 9, setup)[:, 0]
    assert got.tolist() == [1, -1, 1, -1, 1, *[0] * 9]


def test_after_a_termination_all_is_zero_and_after_a_time_limit_nothing_is_known():
    """Against a loop that walks through each sequence; actions after an end are drawn, those before are kept."""
    setup = setup_of(unroll_steps=4)
    batch = jax.tree.map(lambda x: x[:8], stored(envs=200))
    got = JAX["targets_of"](batch, jax.random.PRNGKey(0), setup)
    value = JAX["n_step_targets"](batch, 3, setup)
    drawn, kinds = [], set()
    for i in range(200):
        kind = "running"
        for k in range(5):
            assert got.running[k, i] == (kind == "running") and got.known[k, i] == (kind != "time limit")
            if kind != "time limit":
                np.testing.assert_allclose(got.value[k, i], value[k, i] if kind == "running" else 0)
            if k == 4:
                continue
            if kind == "running":
                assert got.action[k, i] == batch.action[k, i] and got.reward[k, i] == batch.reward[k, i]
                if batch.done[k, i]:
                    kind = "over" if batch.terminated[k, i] else "time limit"
            else:
                drawn.append(int(got.action[k, i]))
                assert kind != "over" or got.reward[k, i] == 0
        kinds.add(kind)
    assert kinds == {"running", "over", "time limit"} and set(drawn) == {0, 1, 2}
    np.testing.assert_array_equal(got.policy, batch.policy[:5])
    np.testing.assert_array_equal(got.obs, batch.obs[0])


# ---------------------------------------------------------------------- replay
def test_windows_are_steps_in_a_row_of_one_environment_and_reach_all_that_is_stored():
    """Of a ring of 12 rows after 4 (none is overwritten yet) and after 20 (the first 8 are)."""
    number = jnp.arange(24.0)[:, None] * 10 + jnp.arange(3)
    replay = jax.tree.map(lambda x: jnp.zeros((12, *x.shape[1:]), x.dtype), stored(envs=3))
    for written, oldest in ((4, 0), (20, 8)):
        for first in range(0, written, 4):
            steps = jax.tree.map(lambda x: x[:4], stored(envs=3))._replace(reward=number[first : first + 4])
            replay = JAX["store"](replay, steps, first)
        got = np.asarray(JAX["sample_windows"](replay, jax.random.PRNGKey(0), written, 3, 500).reward)
        assert got.shape == (3, 500) and (np.diff(got, axis=0) == 10).all()
        assert set(got[0]) == {10 * row + env for row in range(oldest, written - 2) for env in range(3)}


# ---------------------------------------------------------------------- the model and its loss
def test_latent_states_are_between_0_and_1():
    """Each has both ends; and one whose units are all equal is finite."""
    latent = JAX["scaled"](jnp.asarray(np.random.default_rng(0).normal(3, 50, (7, 16))))
    np.testing.assert_allclose(latent.min(1), 0, atol=1e-6)
    np.testing.assert_allclose(latent.max(1), 1, atol=1e-4)
    assert np.isfinite(JAX["scaled"](jnp.ones((2, 16)))).all()
    params, obs = model(), jnp.asarray(np.random.default_rng(0).normal(size=(7, 4)))
    first = JAX["represent"](params, obs)
    then, reward = JAX["imagine"](params, first, jnp.zeros(7, int))
    assert first.shape == then.shape == (7, 16) and reward.shape == (7,) and (first != then).any()
    assert min(first.min(), then.min()) >= 0 and max(first.max(), then.max()) <= 1
    other, _ = JAX["imagine"](params, first, jnp.ones(7, int))
    assert (other != then).any()


def case(batch_size=3, k=2, num_actions=2, seed=0):
    """Targets of a few sequences, some with an end."""
    rng = np.random.default_rng(seed)
    running = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]], bool)
    known = np.array([[1, 1, 1], [1, 1, 1], [1, 0, 0]], bool)  # the second has terminated, the third has not
    policy = rng.dirichlet(np.ones(num_actions), (k + 1, batch_size))
    value, reward = rng.normal(size=(k + 1, batch_size)), rng.normal(size=(k, batch_size))
    obs, action = rng.normal(size=(batch_size, 4)), rng.integers(num_actions, size=(k, batch_size))
    return JAX["Targets"](*map(jnp.asarray, (obs, action, reward, value, policy, running.T, known.T)))


def test_the_loss_is_the_weighted_sum_of_the_steps():
    """By hand, one sequence at a time: step 0 counts 1, the two unrolled ones 1/2 each."""
    params, targets, setup = model(), case(), setup_of()
    loss, metrics = JAX["muzero_loss"](params, targets, setup)
    want = {"policy": 0.0, "value": 0.0, "reward": 0.0}
    for i in range(3):
        latent = JAX["represent"](params, targets.obs[i : i + 1])
        for k in range(3):
            weight = (1 if k == 0 else 0.5) / 3
            if k:
                latent, reward = JAX["imagine"](params, latent, targets.action[k - 1, i : i + 1])
                # the reward of the step that ends an episode is known
                step_known = targets.known[k - 1, i]
                want["reward"] += weight * step_known * float(reward[0] - targets.reward[k - 1, i]) ** 2
            logits, value = JAX["policy_and_value"](params, latent)
            probability = np.exp(logits[0]) / np.exp(logits[0]).sum()
            cross = -float((targets.policy[k, i] * np.log(probability)).sum())
            want["policy"] += weight * targets.running[k, i] * cross
            want["value"] += weight * targets.known[k, i] * float(value[0] - targets.value[k, i]) ** 2
    for name, value in want.items():
        np.testing.assert_allclose(metrics[f"losses/{name}_loss"], value, rtol=1e-4)
    total = want["policy"] + setup.args.vf_coef * want["value"] + want["reward"]
    np.testing.assert_allclose(loss, total, rtol=1e-4)


def test_what_is_not_known_teaches_nothing():
    """Other targets after a time limit, and another policy after a termination, leave the gradient as it is."""
    params, targets, setup = model(), case(), setup_of()
    gradient = jax.grad(lambda params, targets: JAX["muzero_loss"](params, targets, setup)[0])
    same = targets._replace(
        value=jnp.where(targets.known, targets.value, 99),
        reward=jnp.where(targets.known[:-1], targets.reward, 99),
        policy=jnp.where(targets.running[..., None], targets.policy, 99),
    )
    other = targets._replace(value=jnp.where(targets.running, targets.value, 99))
    want, got, differs = (jax.tree.leaves(gradient(params, x)) for x in (targets, same, other))
    assert all((x == y).all() for x, y in zip(want, got, strict=True))
    assert any((x != y).any() for x, y in zip(want, differs, strict=True))


@pytest.mark.slow
def test_the_gradient_is_halved_at_each_entrance_to_the_dynamics(monkeypatch):
    """The representation learns from the value after k steps with 1/2^k of the gradient."""
    params, targets, setup = model(), case(), setup_of()

    def reaches_the_representation(k, halved):
        """The gradient of the value loss of step k alone in the weights of h."""
        at_k = jnp.arange(3)[:, None] == k
        known = at_k & jnp.ones((3, 3), bool)
        only = targets._replace(running=jnp.zeros((3, 3), bool), known=known, reward=jnp.zeros((2, 3)))

        def value_loss(h):
            return JAX["muzero_loss"](params | {"representation": h}, only, setup)[1]["losses/value_loss"]

        with monkeypatch.context() as patch:
            if not halved:
                patch.setattr(jax.lax, "stop_gradient", lambda x: x)
            return jax.tree.leaves(jax.grad(value_loss)(params["representation"]))

    for k in range(3):
        halved, whole = (reaches_the_representation(k, x) for x in (True, False))
        assert any(np.abs(x).max() > 0 for x in whole)
        for x, y in zip(halved, whole, strict=True):
            np.testing.assert_allclose(x, 0.5**k * y, rtol=1e-3, atol=1e-7)


# ---------------------------------------------------------------------- search
@pytest.mark.slow
def test_the_search_never_steps_the_environment():
    """In one iteration the environment is stepped once for each real step, and an action in evaluation needs none."""
    setup, calls = board_setup(num_steps=15, num_updates=1, batch_size=4, buffer_size=400), []
    step = setup.envs.step
    setup.envs.step = lambda *x: calls.append(x) or step(*x)
    training = JAX["begin"](jax.random.PRNGKey(0), setup)
    jax.eval_shape(partial(JAX["train_iteration"], setup=setup), training)
    assert len(calls) == 1  # traced once, in the scan over num_steps; a search would have traced it again
    blind = setup._replace(envs=None, game=None)
    mask = np.arange(9) % 2 == np.ones((5, 1))
    action = jax.jit(partial(JAX["act"], setup=blind))(training.params, training.obs[:5], mask)
    assert action.shape == (5,) and len(calls) == 1 and mask[np.arange(5), action].all()


def test_policies_have_one_action_for_each_observation():
    """Without a mask all actions are allowed; the same observation gives the same action."""
    setup = setup_of(JaxEnvs("CartPole-v1", 1))
    obs = np.repeat(np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32), 2, 0)
    action = np.asarray(jax.jit(partial(JAX["act"], setup=setup))(model(), obs, None))
    assert action.shape == (10,) and (action[::2] == action[1::2]).all() and set(action) <= {0, 1}


@pytest.mark.parametrize("discount", [-1.0, 0.5])
def test_values_of_the_search_are_rewards_and_discounted_values_of_the_model(discount):
    """With 2 actions and 2 simulations each action is tried once: Q = scale * r + discount * v."""
    setup, params = setup_of(discount=discount, scale=0.2), model(num_actions=2)
    obs, mask = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4))), jnp.ones((6, 2), bool)
    search = jax.jit(partial(JAX["plan"], num_simulations=2, setup=setup, noise=False))
    found = search(params, jax.random.PRNGKey(0), obs, mask)
    summary = found.search_tree.summary()
    assert (summary.visit_counts == 1).all()
    logits, _ = JAX["policy_and_value"](params, JAX["represent"](params, obs))
    for action in range(2):
        latent, reward = JAX["imagine"](params, JAX["represent"](params, obs), jnp.full(6, action))
        want = 0.2 * reward + discount * JAX["policy_and_value"](params, latent)[1]
        np.testing.assert_allclose(summary.qvalues[:, action], want, rtol=1e-4, atol=1e-5)
    score = logits + (50 + 1) * setup.args.value_scale * summary.qvalues
    np.testing.assert_allclose(found.action_weights, jax.nn.softmax(score), atol=1e-4)
    np.testing.assert_array_equal(found.action, score.argmax(1))


# ---------------------------------------------------------------------- boards as an environment
def test_games_follow_the_rules_and_reward_who_moved():
    """Random moves, against the library's board."""
    setup, rng = board_setup(num_envs=50), np.random.default_rng(0)
    (state, obs), step, ends = setup.envs.reset(jax.random.PRNGKey(0)), jax.jit(setup.envs.step), 0
    assert not np.asarray(obs).any()
    for t in range(20):
        mask = np.asarray(JAX["action_mask"](setup.game, setup.envs, obs))
        position = TIC.position(np.asarray(obs))
        np.testing.assert_array_equal(mask, TIC.mask(position))
        action = (rng.random((50, 9)) * mask).argmax(1)
        want = TIC.play(position, action)
        state, got = step(jax.random.PRNGKey(t), state, action)
        points = np.asarray(JAX["points_or_rewards"](setup.game, obs, got))
        np.testing.assert_array_equal(got.final_obs, TIC.observation(want))
        np.testing.assert_array_equal(got.reward, TIC.lost(want))
        np.testing.assert_array_equal(got.terminated, TIC.over(want))
        first = np.asarray(obs).sum((1, 2, 3)) % 2 == 0
        np.testing.assert_array_equal(points, TIC.over(want) * np.where(TIC.lost(want), first, 0.5))
        fresh = np.where(TIC.over(want)[:, None, None, None], 0, got.final_obs)
        np.testing.assert_array_equal(got.obs, fresh)
        assert not got.truncated.any()
        obs, ends = got.obs, ends + got.terminated.sum()
    assert ends > 50


@pytest.mark.slow
def test_rules_are_those_of_alphazero():
    """Rule R2 holds their text; and new games begin with random moves, as there."""
    setup = board_setup(num_envs=300, opening_moves=4)
    _, obs = setup.envs.reset(jax.random.PRNGKey(0))
    stones = np.asarray(obs).sum((1, 2, 3))
    assert set(stones) == {0, 1, 2, 3, 4}
    np.testing.assert_array_equal(obs, ALPHA["openings"](jax.random.PRNGKey(0), setup.game, 300, 4))


@pytest.mark.slow
def test_one_iteration_stores_what_was_seen_done_and_found():
    """On CartPole, whose time limit is made short: the buffer has the steps in order, with values of final
    observations where time was up."""
    envs = JaxEnvs("CartPole-v1", 4)
    envs.max_steps = 7
    setup = setup_of(envs, num_envs=4, num_steps=12, num_updates=3, batch_size=5, buffer_size=96)
    training = JAX["begin"](jax.random.PRNGKey(3), setup)
    iteration = jax.jit(partial(JAX["train_iteration"], setup=setup))
    after, (reward, done, sums, count) = iteration(training)
    replay = jax.tree.map(lambda x: np.asarray(x[:12]), after.replay)
    assert after.replay.reward.shape == (24, 4) and count == 3 and after.iteration == 1
    assert not np.asarray(after.replay.obs[12:]).any() and (reward == 1).all()
    np.testing.assert_array_equal(done, replay.done)
    np.testing.assert_array_equal(replay.obs[0], training.obs)
    np.testing.assert_allclose(replay.policy.sum(-1), 1, atol=1e-5)
    assert all(np.isfinite(x) for x in sums.values()) and set(sums) == {
        "losses/policy_loss", "losses/value_loss", "losses/reward_loss",
    }  # fmt: skip
    state = training.env_state
    for t in range(12):
        state, step = envs.step(jax.random.PRNGKey(0), state, replay.action[t])
        cut = np.asarray(step.truncated)
        _, value = JAX["policy_and_value"](training.params, JAX["represent"](training.params, step.final_obs))
        np.testing.assert_allclose(replay.end_value[t], np.where(step.terminated, 0, value), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(replay.done[t], cut | step.terminated)
        np.testing.assert_array_equal(replay.terminated[t], step.terminated)
        if cut.any() or t == 11:
            break
        np.testing.assert_allclose(step.obs, replay.obs[t + 1], rtol=1e-5, atol=1e-6)
    assert cut.any()


@pytest.mark.slow
def test_an_episode_that_a_resume_could_not_continue_is_cut_off():
    """At the last row that was stored before, also across the seam of the buffer; nowhere else."""
    setup = setup_of(JaxEnvs("CartPole-v1", 4), num_envs=4, num_steps=12, num_updates=1, batch_size=5, buffer_size=96)
    training = JAX["begin"](jax.random.PRNGKey(3), setup)
    iteration = jax.jit(partial(JAX["train_iteration"], setup=setup))
    first, second = iteration(training)[0], iteration(iteration(training)[0])[0]
    assert not (first.restarted or second.restarted)
    for before, row in ((first, 11), (second, 23)):
        whole, cut = (iteration(before._replace(restarted=jnp.bool_(word)))[0].replay.done for word in (False, True))
        assert cut[row].all() and not whole[row].all()
        np.testing.assert_array_equal(np.delete(cut, row, 0), np.delete(whole, row, 0))


# ---------------------------------------------------------------------- the script
@pytest.mark.slow
@pytest.mark.parametrize("env", [["--env-id", "CartPole-v1"], BOARD], ids=["CartPole", "board"])
def test_a_resumed_run_equals_an_uninterrupted_one(train, env):
    """Bit for bit, with the replay buffer and the running episodes."""
    flags = [*TINY, *env, "--save-every", "256"]
    run_dir = train("gumbel_muzero_jax", *flags)["run"].runs[0].dir
    whole = comparable(run_dir)
    drop_last_checkpoint(run_dir)
    v = train("gumbel_muzero_jax", "--resume", run_dir)
    assert comparable(v["run"].runs[0].dir) == whole and v["start"] > 0


@pytest.mark.slow
def test_a_resume_cuts_off_the_episodes_of_envpool(train):
    """Which no checkpoint holds: 128 of 256 steps of 8 environments are 16 rows."""
    pytest.importorskip("envpool")
    flags = [*TINY, "--env-id", "LunarLander-v3", "--total-timesteps", "256", "--save-every", "128"]
    run_dir = train("gumbel_muzero_jax", *flags)["run"].runs[0].dir
    drop_last_checkpoint(run_dir)
    v = train("gumbel_muzero_jax", "--resume", run_dir)
    done = np.asarray(jax.tree.leaves(v["training"], is_leaf=lambda x: isinstance(x, v["Training"]))[0].replay.done)
    assert v["start"] == 1 and done[15].all() and not done[14].all() and not done[16].all()


@pytest.mark.slow
def test_it_logs_what_is_documented(train):
    """Rows of CartPole have nothing of opponents; those of a board of one's own have each side."""
    v = train("gumbel_muzero_jax", *TINY)
    logged = {key for row in rows(v["run"].runs[0].dir) for key in row if "/" in key}
    assert logged == documented_keys("gumbel_muzero_jax")
    flags = "--env-id own_board:ThreeInARow-v0 --opponents perfect --num-steps 32".split()
    v = train("gumbel_muzero_jax", *TINY, *flags)
    more = {key for row in rows(v["run"].runs[0].dir) for key in row if "/" in key} - logged
    ends = ("", "_low", "_high")
    assert more == {f"eval/episodic_return_vs_perfect_{side}{end}" for side in ("first", "second") for end in ends}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--env-id", "Pendulum-v1"), "has continuous actions"),
        (("--env-id", "own_board:NoDiagonals-v0", "--opponents", "one-ply"), "rules of its own"),
        (("--env-id", "own_board:ThreeInARow-v0", "--opponents", "one-ply"), "--num-steps must be at least 18"),
        (("--env-id", "games/TicTacToe-v0", "--opponents", "nobody"), "there is no opponent nobody"),
        (("--num-steps", "15"), "--num-steps must be at least 16"),
        ((*BOARD, "--num-steps", "14"), "--num-steps must be at least 15"),
        (("--buffer-size", "64"), "--buffer-size"),
        (("--gamma", "1"), "--gamma"),
    ],
)
def test_bad_input_is_one_sentence(train, flags, words):
    train("gumbel_muzero_jax", *TINY, *flags, code=2)
    assert words in train.out and train.out.count("\n") == 1


@pytest.mark.slow
def test_it_balances_the_pole(train):
    """With the default settings and half of their steps; a random policy falls after 22."""
    v = train("gumbel_muzero_jax", *"--total-timesteps 50000 --eval-every 10000 --eval-episodes 10".split())
    assert v["run"].runs[0].evaluator.best > 300
