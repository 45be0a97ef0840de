"""Players of boards with names, for many games at once: `random`, `one-ply`, `uct-1000`, `minimax-4`, `perfect`.

    from solorl.games.boards import Board
    from solorl.games.opponents import player
    board = Board(6, 7, length=4, stones_fall=True)
    choose = player("uct-1000", board)
    action = choose(board.start(10), np.random.default_rng(1))  # (10,)

Each gives all moves of a position a score and draws one of the best.
"""

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from solorl.errors import UsageError
from solorl.games.boards import Board

Player = Callable[[np.ndarray, np.random.Generator], np.ndarray]  # positions (n, 2) -> actions (n,)
SMALL = 12  # cells of a board on which all games can be looked at
NAMES = "random, one-ply, uct-N (N playouts), minimax-N (N moves ahead), perfect (tic-tac-toe) and human"


def player(name: str, board: Board) -> Player:
    """The player of this name on a board; UsageError where there is none."""
    kind, number = re.fullmatch(r"(.*?)(?:-(\d+))?", name, flags=re.DOTALL).groups()  # type: ignore[union-attr]
    known: dict[tuple[str, bool], Callable[[np.ndarray, np.random.Generator], Any]] = {
        ("random", False): lambda position, rng: 0,
        ("one-ply", False): lambda position, rng: one_ply(board, position),
        ("uct", True): lambda position, rng: uct(board, position, int(number), rng),
        ("minimax", True): lambda position, rng: minimax(board, position, int(number)),
        ("perfect", False): lambda position, rng: np.sign(minimax(board, position, board.max_moves)),
        ("human", False): lambda position, rng: ask(board, position),
    }
    if (kind, number is not None) not in known or (number and not int(number)):
        raise UsageError(f"there is no opponent {name}; there are {NAMES}")
    if kind == "perfect" and board.max_moves > SMALL:
        raise UsageError(f"there is no perfect opponent on a board of {board.max_moves} cells, only on {SMALL} or less")
    score = known[kind, number is not None]
    return lambda position, rng: best(np.where(board.mask(position), score(position, rng), -np.inf), rng)


def best(score: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One of the moves with the highest score, each with the same probability: (n, num_actions) -> (n,)."""
    return np.where(score == score.max(-1, keepdims=True), rng.random(score.shape), -1).argmax(-1)


def one_ply(board: Board, position: np.ndarray) -> np.ndarray:
    """2 for a move that wins, 1 for one with which the other player would win: (n, 2) -> (n, num_actions)."""
    wins, blocks = (board.lost(board.children(x)) for x in (position, position[:, ::-1]))
    return np.where(wins, 2, blocks)


def minimax(board: Board, position: np.ndarray, depth: int) -> np.ndarray:
    """The values of all moves, `depth` moves ahead: (n, 2) -> (n, num_actions). A win that is nearer is worth more;
    where the game is not over by then, so is each empty cell that completes a row."""

    def value(position: np.ndarray, depth: int) -> np.ndarray:
        pairs = position.view([("own", np.int64), ("other", np.int64)])[:, 0]
        pairs, back = np.unique(pairs, return_inverse=True)  # each position once
        position = pairs.view(np.int64).reshape(-1, 2)
        lost, over = board.lost(position), board.over(position)
        if depth == 0 or over.all():
            empty = board.cells & ~(position[:, :1] | position[:, 1:])
            gaps = board.observation(board.gaps(position) & empty).sum((1, 2))
            found = (gaps[:, 0] - gaps[:, 1]) / (2 * board.max_moves)
        else:
            found = moves(position, depth).max(1, initial=-np.inf)
        return np.where(lost, -1.0 - depth, np.where(over, 0.0, found))[back]

    def moves(position: np.ndarray, depth: int) -> np.ndarray:
        mask = board.mask(position)
        found = np.full(mask.shape, -np.inf)
        found[mask] = -value(board.children(position)[mask], depth - 1)
        return found

    return moves(position, depth)


def playout(board: Board, position: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The results of games that are played on at random, for who is to move: 1, 0 or -1, (n, 2) -> (n,)."""
    result, sign, running = np.zeros(len(position)), 1.0, np.arange(len(position))
    while running.size:
        lost, over = board.lost(position), (position[:, 0] | position[:, 1]) == board.cells
        result[running[lost]] = -sign
        running, position, sign = running[~(lost | over)], position[~(lost | over)], -sign
        position = board.play(position, best(board.mask(position), rng))
    return result


def uct(board: Board, position: np.ndarray, playouts: int, rng: np.random.Generator) -> np.ndarray:
    """How often UCT visits each move (Kocsis & Szepesvari 2006): the tree grows by one position with each random game;
    in it the move with the highest upper confidence bound (UCB1) is taken: (n, 2) -> (n, num_actions)."""
    n, root = len(position), np.arange(len(position))
    node_of = np.concatenate([position, board.start(n * playouts)])  # the positions of all nodes, roots first
    child = np.zeros((len(node_of), board.num_actions), int)  # 0: none
    parent, visits, total = np.full(len(child), -1), np.zeros(len(child)), np.zeros(len(child))
    for new in root + n * np.arange(1, playouts + 1)[:, None]:
        node, walking = root.copy(), np.flatnonzero(~board.over(position))
        while walking.size:
            at = node[walking]
            count = visits[child[at]] * (child[at] > 0)
            with np.errstate(divide="ignore", invalid="ignore"):
                bound = -total[child[at]] / count + np.sqrt(2 * np.log(visits[at])[:, None] / count)
            bound = np.where(board.mask(node_of[at]), np.where(count > 0, bound, np.inf), -np.inf)
            action = best(bound, rng)
            fresh = child[at, action] == 0  # there the walk ends with a new node
            made = new[walking[fresh]]
            node_of[made] = board.play(node_of[at[fresh]], action[fresh])
            child[at[fresh], action[fresh]], parent[made] = made, at[fresh]
            node[walking] = child[at, action]
            walking = walking[~fresh & ~board.over(node_of[node[walking]])]
        result = playout(board, node_of[node], rng)
        while node.size:
            visits[node] += 1
            total[node] += result
            node, result = parent[node], -result
            node, result = node[node >= 0], result[node >= 0]
    return visits[child[root]] * (child[root] > 0)


def ask(board: Board, position: np.ndarray) -> np.ndarray:
    """Show the board and ask in the terminal for a move; `q` ends the program: (1, 2) -> (1, num_actions)."""
    print(board.text(position[0]))
    allowed = [str(action + 1) for action in np.flatnonzero(board.mask(position)[0])]
    sign = "X" if board.sides(position[0])[0] == position[0, 0] else "O"
    word = ""
    while word not in allowed:
        print(f"your move, {sign} ({', '.join(allowed)}; q leaves): ", end="", flush=True)
        if (line := sys.stdin.readline()) in ("", "q\n"):
            raise SystemExit(0)
        word = line.strip()
    return np.eye(board.num_actions)[[int(word) - 1]]
