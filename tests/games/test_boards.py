"""Boards: rules against pgx's and against a brute-force search for rows; opponents by what they must see; matches."""

import itertools

import gymnasium as gym
import numpy as np
import pytest

import solorl.games  # noqa: F401  registers games/...
from solorl.errors import UsageError
from solorl.games.boards import Board
from solorl.games.opponents import minimax, player, uct

RULES = {"games/TicTacToe-v0": (3, 3, 3, False), "games/ConnectFour-v0": (6, 7, 4, True)}
TIC, FOUR = (Board(*rules) for rules in RULES.values())


def played(board, *moves):
    """The position after these moves, counted from 1, (1, 2)."""
    position = board.start(1)
    for move in moves:
        position = board.play(position, np.array([move - 1]))
    return position


def rows_by_hand(cells, length):
    """Whether `length` True in a row stand in an array of cells."""
    height, width = cells.shape
    for y, x, (down, right) in itertools.product(range(height), range(width), [(0, 1), (1, 0), (1, 1), (1, -1)]):
        run = [(y + i * down, x + i * right) for i in range(length)]
        if all(0 <= a < height and 0 <= b < width and cells[a, b] for a, b in run):
            return True
    return False


@pytest.mark.parametrize("shape", [(3, 3, 3, False), (6, 7, 4, True), (4, 5, 3, False)])
def test_rows_and_gaps_are_those_that_brute_force_finds(shape):
    board, rng = Board(*shape), np.random.default_rng(0)
    for density in (0.2, 0.4, 0.6):
        cells = rng.random((200, board.height, board.width)) < density
        stones = np.where(cells, board.bit, 0).sum((1, 2))
        assert board.has_row(stones).tolist() == [rows_by_hand(each, board.length) for each in cells]
        gaps = board.gaps(stones)
        assert not (gaps & ~board.cells).any()
        for one, found in zip(cells[:40], gaps[:40], strict=True):
            for (row, column), bit in np.ndenumerate(board.bit):
                alone, without = np.zeros_like(one), one.copy()
                without[row, column] = False
                alone = without.copy()
                alone[row, column] = True
                new = rows_by_hand(alone, board.length) and not rows_by_hand(without, board.length)
                assert not new or found & bit, (one, row, column)
                assert not found & bit or rows_by_hand(alone, board.length)


@pytest.mark.parametrize("env_id", RULES)
def test_1000_random_games_are_those_of_pgx(env_id):
    """States, masks and results, from the side of the player to move."""
    pgx, jax = pytest.importorskip("pgx"), pytest.importorskip("jax")
    theirs = pgx.make("tic_tac_toe" if "Tic" in env_id else "connect_four")
    init, step = (jax.jit(jax.vmap(function)) for function in (theirs.init, theirs.step))
    board, rng, games = Board(*RULES[env_id]), np.random.default_rng(1), 1000
    state, running = init(jax.random.split(jax.random.PRNGKey(0), games)), np.arange(games)
    position = board.start(games)
    results = []
    while running.size:
        obs = np.asarray(state.observation).reshape(games, board.height, board.width, 2)
        np.testing.assert_array_equal(board.observation(position)[running], obs[running])
        np.testing.assert_array_equal(board.position(obs)[running], position[running])
        mask = board.mask(position)
        np.testing.assert_array_equal(mask[running], np.asarray(state.legal_action_mask)[running])
        action = (rng.random(mask.shape) * mask).argmax(1)
        state, mover, after = step(state, action), np.asarray(state.current_player), board.play(position, action)
        position[running] = after[running]
        over, lost = board.over(position)[running], board.lost(position)[running]
        np.testing.assert_array_equal(over, np.asarray(state.terminated)[running])
        reward = np.asarray(state.rewards)[running, mover[running]]  # of who has moved
        np.testing.assert_array_equal(reward, lost.astype(float))
        results += reward[over].tolist()
        running = running[~over]
    assert 0 < np.mean(results) < 1  # wins, and draws too


def test_a_stone_falls_on_the_lowest_empty_cell_and_a_full_column_is_closed():
    position = played(FOUR, 3, 3, 3, 3, 3)
    assert FOUR.mask(position).all()
    position = FOUR.play(position, np.array([2]))
    assert FOUR.mask(position)[0].tolist() == [True, True, False, True, True, True, True]
    assert FOUR.text(position[0]).splitlines()[0] == ". . O . . . ."
    assert FOUR.observation(position)[0, :, 2, 0].tolist() == [0, 1, 0, 1, 0, 1]


def test_text_and_picture_show_who_began():
    position = played(TIC, 5, 1)
    assert TIC.text(position[0]) == "O 2 3\n4 X 6\n7 8 9"
    assert TIC.text(played(TIC, 5)[0]) == "1 2 3\n4 X 6\n7 8 9"
    picture = TIC.picture(position[0])
    assert picture.shape == (120, 120, 3) and tuple(picture[60, 60]) == (220, 50, 40)
    assert tuple(picture[20, 20]) == (250, 210, 60)


@pytest.mark.parametrize("name", ["one-ply", "minimax-2", "minimax-4"])
@pytest.mark.parametrize(
    ("moves", "best"),
    [
        ((1, 2, 1, 2, 1, 2), 1),  # win rather than block
        ((1, 2, 1, 2, 7, 2), 2),  # block
        ((3, 1, 4, 1, 5, 1), {1, 2, 6}),  # three ways to win
    ],
)
def test_opponents_win_and_block(name, moves, best):
    choose, rng = player(name, FOUR), np.random.default_rng(0)
    chosen = {int(choose(played(FOUR, *moves), rng)[0]) + 1 for _ in range(20)}
    assert chosen <= (best if isinstance(best, set) else {best})


def test_minimax_sees_a_double_threat_that_one_ply_does_not():
    """Of 3 and 4 at the bottom the other player must close one side at once."""
    position = played(FOUR, 3, 3, 4)
    choose, rng = player("minimax-4", FOUR), np.random.default_rng(0)
    assert {int(choose(position, rng)[0]) + 1 for _ in range(20)} <= {2, 5}
    wide = {int(player("one-ply", FOUR)(position, rng)[0]) + 1 for _ in range(60)}
    assert len(wide) == 7


@pytest.mark.parametrize(("height", "width"), [(8, 8), (15, 15)])
def test_a_board_that_does_not_fit_into_64_bits_is_refused(height, width):
    with pytest.raises(UsageError, match=f"a board of {height} x {width} cells is too large"):
        Board(height, width, 5, stones_fall=False)


def test_minimax_tells_positions_of_a_large_board_apart():
    """They differ in a low bit next to a high one: more digits than a float has."""
    board = Board(6, 8, 4, stones_fall=True)  # 56 bits
    position = np.concatenate([played(board, 8, 1, 8, 1, 8, 1), played(board, 8, 1, 8, 1, 7, 1)])
    assert minimax(board, position, 1).argmax(1)[0] == 7  # wins on top of three stones
    assert minimax(board, position, 2)[1].argmax() == 0  # three of the other one have to be blocked
    alone = [minimax(board, each[None], 2)[0].tolist() for each in position]
    assert minimax(board, position, 2).tolist() == alone


def test_minimax_is_the_plain_recursion():
    """To the end of tic-tac-toe, without the sharing of equal positions."""

    def value(position, depth):
        if TIC.lost(position)[0]:
            return -1.0 - depth
        if TIC.over(position)[0]:
            return 0.0
        moves = np.flatnonzero(TIC.mask(position)[0])
        return max(-value(TIC.play(position, np.array([move])), depth - 1) for move in moves)

    for moves in ((1, 5, 9), (5, 2, 1), (1, 2, 5, 9), (2, 1, 9, 5)):
        position = played(TIC, *moves)
        got, mask = minimax(TIC, position, 9)[0], TIC.mask(position)[0]
        want = [-value(TIC.play(position, np.array([a])), 8) if mask[a] else -np.inf for a in range(9)]
        assert got.tolist() == want


def test_uct_counts_its_playouts_and_finds_the_win():
    position = np.concatenate([played(FOUR, 1, 2, 1, 2, 1, 2), played(FOUR, 4, 3, 4, 3, 4, 1)])
    visits = uct(FOUR, position, 200, np.random.default_rng(0))
    assert visits.sum(1).tolist() == [200, 200] and visits.argmax(1).tolist() == [0, 3]


def points(board, first, second, games, seed=0):
    """The share of points of the first of two players."""
    rng, players = np.random.default_rng(seed), [player(name, board) for name in (first, second)]
    position, found, turn = board.start(games), [], 0
    while len(position):
        position = board.play(position, players[turn % 2](position, rng))
        lost, over = board.lost(position), board.over(position)
        found += np.where(lost, 1.0 - turn % 2, 0.5)[over].tolist()
        position, turn = position[~over], turn + 1
    return np.mean(found)


def test_stronger_opponents_beat_weaker_ones_and_perfect_play_is_a_draw():
    assert points(TIC, "perfect", "perfect", 200) == 0.5
    assert points(TIC, "random", "perfect", 200) < 0.15 and points(TIC, "perfect", "random", 200) > 0.95
    assert abs(points(TIC, "random", "random", 4000) - 0.649) < 0.03  # 0.585 wins, 0.127 draws: all games counted
    assert points(FOUR, "random", "one-ply", 200) < 0.1
    assert points(FOUR, "one-ply", "minimax-2", 100) < 0.3
    assert points(TIC, "uct-100", "one-ply", 30) > 0.6


@pytest.mark.parametrize("name", ["nobody", "uct", "uct-0", "minimax", "minimax-00", "random-3", "perfect-2", ""])
def test_unknown_opponents_are_refused(name):
    with pytest.raises(UsageError, match="there is no opponent"):
        player(name, TIC)


def test_the_perfect_opponent_is_for_small_boards():
    with pytest.raises(UsageError, match="only on"):
        player("perfect", FOUR)


@pytest.mark.parametrize("env_id", RULES)
def test_a_match_gives_points_and_both_sides(env_id):
    """Against random moves, played by the perfect or by the one-ply player, on both sides."""
    name = "perfect" if "Tic" in env_id else "one-ply"
    for side in (0, 1):
        envs = gym.make_vec(env_id, 100, "vector_entry_point", opponent="random", side=side)
        choose, rng = player(name, envs.game), np.random.default_rng(0)
        obs, infos = envs.reset(seed=list(range(100)))
        assert (obs[..., 1].sum((1, 2)) == side).all() and not obs[..., 0].any()
        total, running = np.zeros(100), np.ones(100, bool)
        while running.any():
            position = envs.game.position(obs)
            np.testing.assert_array_equal(infos["action_mask"], envs.game.mask(position))
            obs, reward, terminated, _, infos = envs.step(choose(position, rng))
            total += reward * running
            if terminated.any():
                last = envs.game.position(infos["final_obs"][terminated])
                won, lost = (envs.game.has_row(last[:, i]) for i in range(2))
                np.testing.assert_array_equal(reward[terminated], 0.5 + 0.5 * won - 0.5 * lost)
                assert (obs[terminated][..., 1].sum((1, 2)) == side).all()
            running &= ~terminated
        assert total.mean() > 0.85 and set(total) <= {0.0, 0.5, 1.0}


def test_a_single_match_has_both_sides_by_its_seed_and_refuses_what_the_mask_does():
    env = gym.make("games/TicTacToe-v0", opponent="random")
    begins = {seed: env.reset(seed=seed)[0].sum() for seed in range(20)}
    assert set(begins.values()) == {0.0, 1.0}
    assert [env.reset(seed=seed)[0].sum() for seed in range(20)] == [*begins.values()]
    _, info = env.reset(seed=1)
    env.step(np.flatnonzero(info["action_mask"])[0])
    with pytest.raises(ValueError, match="not allowed"):
        env.step(np.flatnonzero(info["action_mask"])[0])


@pytest.mark.parametrize(("side", "colour"), [(0, (220, 50, 40)), (1, (250, 210, 60))])
def test_the_last_picture_of_a_match_is_its_end(side, colour):
    """Whoever has made the last move: who began is red. Most of these games are won by the agent."""
    env = gym.make("games/TicTacToe-v0", opponent="random", render_mode="rgb_array", side=side)
    points = []
    for seed in range(6):
        obs, info = env.reset(seed=seed)
        done = False
        while not done:
            obs, reward, done, _, info = env.step(np.flatnonzero(info["action_mask"])[0])
        image = env.render().reshape(3, 40, 3, 40, 3)[:, 20, :, 20]  # the middle of each cell
        assert ((image == colour).all(-1) == obs[..., 0]).all()
        points.append(reward)
    assert 0.0 in points and 1.0 in points
