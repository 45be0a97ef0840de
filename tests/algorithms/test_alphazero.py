"""AlphaZero: its search against mctx's and against a plain recursion, its targets by hand; perfect tic-tac-toe."""

import io
import runpy
from itertools import pairwise
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, comparable, definitions, documented_keys, drop_last_checkpoint, refused, rows

import solorl.games  # noqa: F401  registers games/...
from solorl.games.matches import Matches
from solorl.run.evaluation import interval

ALPHA = definitions("alphazero")
TIC, FOUR = (gym.make(f"games/{name}-v0").unwrapped.game for name in ("TicTacToe", "ConnectFour"))
SETTINGS = SimpleNamespace(
    hidden_dim=64, num_simulations=32, eval_simulations=32, pb_c_init=1.25, pb_c_base=19652.0, exploration_fraction=0.25
)
TINY = "--env-id games/TicTacToe-v0 --num-envs 8 --num-simulations 8 --eval-simulations 8 --batch-size 32".split()
TINY += "--hidden-dim 32 --opponents one-ply --eval-every 0 --eval-episodes 2".split()
TRAINING = "--env-id games/TicTacToe-v0 --num-envs 256 --opponents one-ply --temperature-moves 4".split()
TRAINING += "--buffer-size 40000 --eval-simulations 128 --eval-every 0 --eval-episodes 2".split()


def network(game, seed=0):
    """A fixed one whose priors and values are far from equal."""
    torch.manual_seed(seed)
    agent = ALPHA["Agent"](game, SETTINGS)
    with torch.no_grad():
        for x in agent.parameters():
            x.mul_(3.0)
    return agent


def searched(*inputs):
    """Visit counts and values of the roots."""
    tree = ALPHA["search"](*inputs)
    return tree.root_visits(), tree.value[tree.root]


def random_positions(game, count, seed=0):
    """Positions of random games that are not over, and the moves that lead there, (max_moves, count); -1: none."""
    rng = np.random.default_rng(seed)
    position, length = game.start(count), rng.integers(game.max_moves - 1, size=count)
    moves = np.full((game.max_moves, count), -1)
    for t in range(game.max_moves):
        mask = game.mask(position)
        action = (rng.random(mask.shape) * mask).argmax(1)
        after = game.play(position, action)
        goes_on = (t < length) & ~game.over(after)
        position[goes_on], moves[t, goes_on] = after[goes_on], action[goes_on]
        length[~goes_on] = 0
    return position, moves


def plain_search(game, predict, position, num_simulations):
    """Visit counts of one position (1, 2) by a recursion on nodes that are dicts, Eq. 2 in plain numbers."""

    def make(position):
        lost, mask = bool(game.lost(position)[0]), game.mask(position)[0]
        logits, value = (x[0] for x in predict(game.observation(position).reshape(1, -1)))
        prior = np.where(mask, np.exp(logits.astype(float)), 0.0)
        over = bool(game.over(position)[0])
        value = -1.0 if lost else 0.0 if over else float(value)
        return {"over": over, "prior": prior / max(prior.sum(), 1e-30), "n": 1, "w": value, "children": {},
                "position": position}  # fmt: skip

    def score(node, action):
        """Q of an edge in [0, 1], and what the prior adds."""
        known = {a: -child["w"] / child["n"] for a, child in node["children"].items()}
        mean = node["w"] / node["n"]
        low, high = min([mean, *known.values()]), max([mean, *known.values()])
        q = (known.get(action, low) - low) / max(high - low, 1e-8)
        c = 1.25 + np.log((node["n"] + 19652.0 + 1) / 19652.0)
        visits = node["children"][action]["n"] if action in known else 0
        return q + c * node["prior"][action] * node["n"] ** 0.5 / (1 + visits)

    def simulate(node):
        """Adds one visit; the value for who is to move."""
        if node["over"]:
            value = node["w"] / node["n"]
        else:
            action = max(np.flatnonzero(game.mask(node["position"])[0]), key=lambda a: score(node, a))
            if action in node["children"]:
                value = -simulate(node["children"][action])
            else:
                node["children"][action] = make(game.play(node["position"], np.array([action])))
                value = -node["children"][action]["w"]
        node["n"], node["w"] = node["n"] + 1, node["w"] + value
        return value

    root = make(position)
    for _ in range(num_simulations):
        simulate(root)
    return [root["children"][a]["n"] if a in root["children"] else 0 for a in range(game.num_actions)]


@pytest.mark.parametrize("game", [TIC, FOUR], ids=["tic-tac-toe", "connect-four"])
def test_visits_are_those_of_a_plain_recursion(game):
    """Of trees that are searched side by side, near the end of games too."""
    predict, (position, _) = network(game).predict, random_positions(game, 20)
    visits, value = searched(game, predict, position, 48, SETTINGS)
    assert (visits.sum(1) == 48).all() and (abs(value) <= 1).all()
    assert visits.tolist() == [plain_search(game, predict, one[None], 48) for one in position]


def test_visits_of_500_positions_are_those_of_mctx():
    """With one fixed network, which mctx's search calls back, on pgx's rules: connect four."""
    jax, mctx, pgx = (pytest.importorskip(name) for name in ("jax", "mctx", "pgx"))
    jnp, env, predict = jax.numpy, pgx.make("connect_four"), network(FOUR).predict
    position, moves = random_positions(FOUR, 500)
    init, step = jax.jit(jax.vmap(env.init)), jax.vmap(env.step)
    state = init(jax.random.split(jax.random.PRNGKey(0), 500))
    where = jax.jit(lambda state, action: jax.tree.map(
        lambda old, new: jnp.where((action >= 0).reshape(-1, *[1] * (old.ndim - 1)), new, old),
        state, step(state, jnp.maximum(action, 0))))  # fmt: skip
    for action in moves:
        state = where(state, action)
    obs = np.asarray(state.observation)
    np.testing.assert_array_equal(FOUR.position(obs), position)

    def outputs(observation, mask):
        shapes = (jax.ShapeDtypeStruct((500, 7), jnp.float32), jax.ShapeDtypeStruct((500,), jnp.float32))
        flat = observation.reshape(500, -1).astype(jnp.float32)
        logits, value = jax.pure_callback(lambda x: predict(np.array(x)), shapes, flat)
        return jnp.where(mask, logits - logits.max(-1, keepdims=True), jnp.finfo(jnp.float32).min), value

    def recurrent(params, key, action, state):
        mover, state = state.current_player, step(state, action)
        logits, value = outputs(state.observation, state.legal_action_mask)
        reward = state.rewards[jnp.arange(500), mover]
        value, discount = (jnp.where(state.terminated, 0.0, x) for x in (value, -jnp.ones(500)))
        return mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value), state

    logits, value = outputs(state.observation, state.legal_action_mask)
    root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=state)
    found = mctx.muzero_policy(
        None, jax.random.PRNGKey(1), root, recurrent, 32, ~state.legal_action_mask, dirichlet_fraction=0.0,
        temperature=0.0, pb_c_init=1.25, pb_c_base=19652.0,
    )  # fmt: skip
    visits, mine = searched(FOUR, predict, position, 32, SETTINGS)
    theirs = found.search_tree.summary()
    np.testing.assert_array_equal(visits, np.asarray(theirs.visit_counts))
    np.testing.assert_allclose(mine, np.asarray(theirs.value), atol=1e-4)


def test_noise_is_mixed_into_the_prior_of_the_root_only():
    """With all of the weight the prior of the network does not count there."""
    position, agent = random_positions(FOUR, 10)[0], network(FOUR)
    only = SimpleNamespace(**vars(SETTINGS) | {"exploration_fraction": 1.0})
    noise = np.zeros((10, 7))
    noise[np.arange(10), FOUR.mask(position).argmax(1)] = 1.0  # on one allowed move
    visits, _ = searched(FOUR, agent.predict, position, 16, only, noise)
    assert (visits.argmax(1) == FOUR.mask(position).argmax(1)).all() and (visits.max(1) == 16).all()
    plain, _ = searched(FOUR, agent.predict, position, 16, SETTINGS)
    none, _ = searched(FOUR, agent.predict, position, 16,
                              SimpleNamespace(**vars(SETTINGS) | {"exploration_fraction": 0.0}), noise)  # fmt: skip
    np.testing.assert_array_equal(plain, none)


def test_dirichlet_noise_is_of_allowed_moves():
    """Its variance is that of a Dirichlet distribution over as many moves as are allowed."""
    mask = np.zeros((20_000, 9), bool)
    mask[:, [0, 3, 8]] = True
    noise = ALPHA["dirichlet"](0.5, mask)
    assert not noise[~mask].any()
    np.testing.assert_allclose(noise.sum(1), 1.0)
    np.testing.assert_allclose(noise[:, 3].var(), (1 / 3) * (2 / 3) / (3 * 0.5 + 1), rtol=0.05)


def test_results_alternate_from_the_end_of_a_game():
    """Lost after 5 moves: who moved first has won. Lost after 2, and a draw after 4."""
    z = ALPHA["results"](np.array([True, True, False]), np.array([5, 2, 4]), 5)
    assert z[:5, 0].tolist() == [1, -1, 1, -1, 1] and z[:2, 1].tolist() == [-1, 1] and not z[:4, 2].any()


def test_the_loss_is_that_of_the_paper():
    """Squared error and cross entropy over allowed moves, by hand."""
    obs = torch.rand(5, 18)
    mask = torch.rand(5, 9) > 0.3
    mask[:, 0] = True
    policy = torch.rand(5, 9) * mask
    policy /= policy.sum(1, keepdim=True)
    agent, result = network(TIC), torch.tensor([1.0, 0.0, -1.0, 1.0, 0.0])
    loss, metrics = ALPHA["alphazero_loss"](agent, ALPHA["Batch"](obs, mask, policy, result))
    logits, value = (x.detach().numpy().astype(float) for x in agent(obs))
    entropy = 0.0
    for i in range(5):
        allowed = np.flatnonzero(mask[i])
        logprob = logits[i, allowed] - np.log(np.exp(logits[i, allowed]).sum())
        entropy -= (policy[i, allowed].numpy() * logprob).sum() / 5
    error = ((value - result.numpy()) ** 2).mean()
    np.testing.assert_allclose(metrics["losses/policy_loss"].item(), entropy, rtol=1e-5)
    np.testing.assert_allclose(metrics["losses/value_loss"].item(), error, rtol=1e-5)
    np.testing.assert_allclose(loss.item(), entropy + error, rtol=1e-5)


@pytest.mark.parametrize("game", [TIC, FOUR], ids=["tic-tac-toe", "connect-four"])
def test_half_of_a_batch_is_mirrored(game):
    replay, (position, _) = ALPHA["SelfPlayReplay"](game, 1), random_positions(game, 1, seed=5)
    policy = np.arange(game.num_actions, dtype=np.float32)[None]
    replay.add(position, policy, np.ones(1))
    batch = replay.sample(2, True, "cpu")
    mirrored = game.observation(position)[:, :, ::-1]
    np.testing.assert_array_equal(batch.obs[1].numpy(), game.observation(position).ravel())
    np.testing.assert_array_equal(batch.obs[0].numpy(), mirrored.ravel())
    np.testing.assert_array_equal(batch.mask[0].numpy(), game.mask(game.position(mirrored))[0])
    flipped = policy.reshape(game.action_shape)[..., ::-1]
    np.testing.assert_array_equal(batch.policy[0].numpy(), flipped.ravel())
    assert torch.equal(replay.sample(2, False, "cpu").obs[0], batch.obs[1])


def test_replay_holds_whole_games_in_which_each_move_follows_the_search(train):
    """Of one game after the other: the positions follow each other, z is the result for who is to move."""
    v = train(
        "alphazero", *TINY, "--num-envs", "1", *"--total-timesteps 60 --opening-moves 0 --num-simulations 4".split()
    )
    replay, game = v["replay"], v["game"]
    position, policy, result = (x[: replay.inserted] for x in replay.arrays.values())
    begins = [*np.flatnonzero((position == 0).all(1)), replay.inserted]
    assert len(begins) > 6
    np.testing.assert_allclose(policy.sum(1), 1.0, rtol=1e-6)
    assert not policy[~game.mask(position)].any()
    returns = [row["charts/episodic_return"] for row in rows(v["run"].dir, "charts/episodic_return")]
    for k, (a, b) in enumerate(pairwise(begins)):
        for t in range(a, b - 1):
            next_of = game.children(position[t])
            moved = np.flatnonzero((next_of == position[t + 1]).all(1))
            assert len(moved) == 1 and policy[t, moved[0]] > 0 and result[t] == -result[t + 1]
        assert returns[k] == 0.5 + 0.5 * result[a]  # the points of who began


def test_games_begin_with_random_moves_that_are_not_learned(train):
    """Up to two, each number as often; then the search, whose policy is stored with every position."""
    v = train(
        "alphazero",
        *TINY,
        *"--num-envs 32 --total-timesteps 6400 --opening-moves 2 --replay-ratio 0 --num-simulations 2".split(),
    )
    replay, returns = v["replay"], rows(v["run"].dir, "charts/episodic_length")
    stones = np.array([int(a | b).bit_count() for a, b in replay.arrays["position"][: replay.inserted]])
    games, lengths = len(returns), sum(row["charts/episodic_length"] for row in returns)
    counts = [(stones == number).sum() / games for number in range(3)]
    np.testing.assert_allclose(counts, [1 / 3, 2 / 3, 1], atol=0.07)
    assert replay.inserted < lengths - 0.9 * games


def test_moves_are_drawn_first_and_then_the_most_visited(train):
    v = train(
        "alphazero", *TINY, *"--total-timesteps 1280 --temperature-moves 2 --opening-moves 0 --num-envs 32".split()
    )
    replay, game = v["replay"], v["game"]
    position, policy, _ = (x[: replay.inserted] for x in replay.arrays.values())
    known = {tuple(each) for each in position}
    moves = np.array([int(a | b).bit_count() for a, b in position])
    best = game.play(position, policy.argmax(1))
    followed = np.array([tuple(each) in known or game.over(each) for each in best])
    assert followed[moves >= 2].all() and not followed[moves < 2].all()


def test_a_policy_takes_allowed_moves_and_tells_what_it_has_seen():
    agent, (position, _) = network(FOUR), random_positions(FOUR, 8)
    obs, mask = FOUR.observation(position), FOUR.mask(position)
    action, told = agent.act(obs, mask), agent.tell(obs, mask)
    assert mask[np.arange(8), action].all() and (action == told[1].argmax(1)).all()
    tree = agent.search(obs)
    assert (told[0] == tree.value[tree.root]).all() and (told[1] == tree.root_visits()).all()


def test_gradient_steps_are_as_many_as_the_replay_ratio_says(train, batches):
    """From the first whole batch on: 8 moves per iteration, 4 times each, 32 in a batch."""
    v = train("alphazero", *TINY, "--num-steps", "1", "--total-timesteps", "400", "--replay-ratio", "6")
    first = next(row["global_step"] for row in rows(v["run"].dir) if "losses/value_loss" in row)
    assert len(batches) == int((400 - first) / 8 * 1.5 + 1.5)


def test_resumed_equals_uninterrupted(train):
    """In the middle of games; the replay buffer with --save-replay."""
    flags = ("--total-timesteps", "640", "--save-every", "320", "--save-replay", "--replay-ratio", "3")
    whole = train("alphazero", *TINY, *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("alphazero", "--resume", run_dir)
    assert v["start"] == 10 and comparable(run_dir) == expected
    for x, y in zip(v["agent"].parameters(), whole["agent"].parameters(), strict=True):
        assert torch.equal(x, y)


def test_what_is_logged_is_documented(train):
    v = train("alphazero", *TINY, "--total-timesteps", "320")
    logged = {key for row in rows(v["run"].dir) for key in row if "/" in key}
    sides, ends = ("first", "second"), ("", "_low", "_high")
    patterns = {f"eval/episodic_return_vs_one_ply_{side}{end}" for side in sides for end in ends}
    assert patterns <= logged and logged - patterns == documented_keys("alphazero")


@pytest.mark.parametrize(("name", "cells"), [("ThreeInARow", 12), ("NoDiagonals", 9)])
def test_a_board_of_ones_own_is_a_line_in_a_module(train, name, cells):
    env = ("--env-id", f"own_board:{name}-v0", "--opponents", "perfect")
    v = train("alphazero", *TINY, *env, "--total-timesteps", "64")
    assert v["game"].max_moves == cells and v["replay"].inserted > 0


def test_games_begin_as_the_rules_say(train):
    """In self-play, where all games but the first of each follow another one, and in evaluations."""
    env = ("--env-id", "own_board:Begun-v0", "--opponents", "random", "--opening-moves", "0")
    v = train("alphazero", *TINY, *env, "--total-timesteps", "128")
    stones = v["replay"].arrays["position"][: v["replay"].inserted].reshape(-1, 2)
    assert len(stones) > 50 and ((stones[:, 0] | stones[:, 1]) & 3 == 3).all()
    assert (v["now"].position[0] == v["game"].start(8)).all()
    games = Matches(v["game"], 4, "random")
    games.reset(seed=0)
    for _ in range(30):
        mask = games.game.mask(games.position)
        games.step(mask.argmax(1))
        assert ((games.position[:, 0] | games.position[:, 1]) & 3 == 3).all()


def test_the_tree_on_the_page_is_that_of_the_file():
    page = runpy.run_path(str(ROOT / "benchmark/search_tree.py"))
    tree = page["grown"]()
    assert tree.root_visits()[0].tolist() == [0, 0, 6, 2, 0, 2, 2, 2, 2]  # what the page tells: block at 3
    assert page["picture"](tree, TIC) == (ROOT / "docs/search_tree.svg").read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--env-id", "CartPole-v1"), "is not a board"),
        (("--opponents", "one-ply,nobody"), "there is no opponent nobody"),
        (("--opponents", "perfect", "--env-id", "games/ConnectFour-v0"), "only on"),
        (("--dirichlet-alpha", "0"), "--dirichlet-alpha"),
        (("--pb-c-base", "0"), "--pb-c-base"),
    ],
)
def test_bad_input_is_one_sentence(train, flags, words):
    train("alphazero", *TINY, *flags, code=2)
    assert words in train.out and train.out.count("\n") == 1


def test_a_human_plays_in_the_terminal_and_named_opponents_on_both_sides(train, solo, monkeypatch):
    run_dir = train("alphazero", *TINY, "--total-timesteps", "64")["run"].dir
    lines = "no\n" + "".join(f"{move}\n" for move in range(1, 10)) * 5
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code, out, _ = solo("play", run_dir, "--opponent", "human", "--episodes", 1, "--seed", 3)
    assert code == 0 and "value " in out and "visits 1: " in out and "q leaves" in out
    assert any(words in out for words in ("you lose\n", "you win\n", "a draw\n")) and "1 greedy episodes" in out
    monkeypatch.setattr("sys.stdin", io.StringIO("q\n"))
    code, out, _ = solo("play", run_dir, "--opponent", "human")
    assert code == 0 and "episodes" not in out
    code, out, _ = solo("play", run_dir, "--opponent", "random", "--episodes", 6)
    assert code == 0 and out.count("\n") == 2
    for line, word in zip(out.splitlines(), ("first", "second"), strict=True):
        assert f"against random, moving {word}: " in line and "of the points in 6 games, 95 % interval" in line
    refused(solo("play", run_dir, "--opponent", "nobody"), "there is no opponent nobody")


def test_other_environments_have_no_opponents(train, solo):
    run_dir = train("ppo", "--env-id", "CartPole-v1", "--total-timesteps", "512", "--eval-every", "0")["run"].dir
    refused(solo("play", run_dir, "--opponent", "random"), "CartPole-v1 has no opponents")


def test_the_interval_of_points_is_that_of_wilson():
    """Textbook numbers: 10 of 10 wins, and half of 100."""
    low, high = interval(np.ones(10))
    assert low == pytest.approx(0.722, abs=1e-3) and high == pytest.approx(1.0)
    assert interval(np.repeat([0.0, 1.0], 50)) == pytest.approx((0.404, 0.596), abs=1e-3)


def losses_on_all_lines(agent, game, side):
    """How many positions the greedy policy with search can come to in which it has lost, whatever the other plays."""
    position, turn, lost = game.start(1), 0, 0
    while len(position):
        if turn % 2 == side:
            action = agent.act(game.observation(position), game.mask(position))
            position = game.play(position, action)
        else:
            position = game.children(position)[game.mask(position)]
            lost += game.lost(np.unique(position, axis=0)).sum()
        position, turn = np.unique(position[~game.over(position)], axis=0), turn + 1
    return lost


def points_against(v, opponent, side, games, seed=7):
    """The points of the trained policy in each of so many games."""
    envs = v["make_envs"]("games/TicTacToe-v0", games, opponent=opponent, side=side)
    obs, infos = envs.reset(seed=[seed + i for i in range(games)])
    points, running = np.zeros(games), np.ones(games, bool)
    while running.any():
        obs, reward, over, _, infos = envs.step(v["agent"].act(obs, infos["action_mask"]))
        points += reward * running
        running &= ~over
    return points


def test_counting_of_lost_lines_finds_those_of_a_player_that_takes_the_first_cell():
    first = SimpleNamespace(act=lambda obs, mask: mask.argmax(1))
    assert all(losses_on_all_lines(first, TIC, side) > 5 for side in range(2))


def test_some_seconds_of_training_do_not_lose_to_one_ply(train):
    v = train("alphazero", *TRAINING, "--total-timesteps", "10000")
    for side in range(2):
        assert points_against(v, "one-ply", side, 100).mean() >= 0.5


@pytest.mark.slow
def test_perfect_tic_tac_toe(train):
    """Three minutes of two idle cores: it loses on no line, and no game against a perfect player."""
    v = train("alphazero", *TRAINING, "--total-timesteps", "100000")
    for side in range(2):
        assert losses_on_all_lines(v["agent"], v["game"], side) == 0
        assert (points_against(v, "perfect", side, 250) == 0.5).all()
