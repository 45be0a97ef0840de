"""Makes docs/search_tree.svg: the tree that `alphazero.py` builds in a position of tic-tac-toe, with no network at all.

python benchmark/search_tree.py
"""

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from solorl.games.boards import Board

ROOT = Path(__file__).resolve().parent.parent
SIMULATIONS, MOVES = 16, (0, 4, 1)  # X has 1 and 2, O has 5 and must move to 3
CELL, WIDTH, HEIGHT = 14, 96, 112  # of a cell of a board; of the place of a node


def predict(obs):
    """All moves are equally likely, all positions even."""
    return np.zeros((len(obs), 9)), np.zeros(len(obs))


def grown():
    """The tree."""
    file = runpy.run_path(str(ROOT / "algorithms/planning/alphazero.py"), run_name="imported")
    game, settings = Board(3, 3, 3, False), SimpleNamespace(pb_c_init=1.25, pb_c_base=19_652.0)
    position = game.start(1)
    for move in MOVES:
        position = game.play(position, np.array([move]))
    return file["search"](game, predict, position, SIMULATIONS, settings)


def picture(tree, game):
    """It as SVG: a board for each node, with N and the mean value for who is to move there; P is on the edges."""
    places, parts, leaves = {}, [], 0

    def place(node, depth):
        nonlocal leaves
        children = [int(child) for child in tree.child[node] if child > 0]
        for child in children:
            place(child, depth + 1)
        x = np.mean([places[child][0] for child in children]) if children else leaves * WIDTH + WIDTH / 2
        leaves += not children
        places[node] = (float(x), depth * HEIGHT + 8)

    place(0, 0)
    for node, (x, y) in places.items():
        if (parent := int(tree.parent[node])) >= 0:
            above, action = places[parent], int(np.flatnonzero(tree.child[parent] == node)[0])
            best = tree.visits[node] == tree.visits[tree.child[parent][tree.child[parent] > 0]].max()
            parts.append(
                f'<line x1="{above[0]:.0f}" y1="{above[1] + 76:.0f}" x2="{x:.0f}" y2="{y:.0f}" stroke="#888" '
                f'stroke-width="{2.5 if best else 1}"/>'
            )
            parts.append(f'<text x="{x + 26:.0f}" y="{y + 8:.0f}" fill="#888">{action + 1}</text>')
        first, second = game.sides(tree.position[node])
        for (row, column), bit in np.ndenumerate(game.bit):
            left, top = x + (column - 1.5) * CELL, y + row * CELL
            sign = "X" if first & bit else "O" if second & bit else ""
            side = f'width="{CELL}" height="{CELL}" fill="#fff" stroke="#aaa"'
            parts.append(f'<rect x="{left:.0f}" y="{top:.0f}" {side}/>')
            if sign:
                colour = "#c33" if sign == "X" else "#b80"
                parts.append(f'<text x="{left + CELL / 2:.0f}" y="{top + 11:.0f}" fill="{colour}">{sign}</text>')
        over = "lost" if game.lost(tree.position[node]) else "draw" if tree.over[node] else f"{tree.value[node]:+.2f}"
        parts.append(f'<text x="{x:.0f}" y="{y + 56:.0f}" fill="#777">N {tree.visits[node]}</text>')
        parts.append(f'<text x="{x:.0f}" y="{y + 70:.0f}" fill="#777">{over}</text>')
    width, height = leaves * WIDTH, (max(y for _, y in places.values()) + HEIGHT)
    style = 'font-family="sans-serif" font-size="11" text-anchor="middle"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" {style}>'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (ROOT / "docs/search_tree.svg").write_text(picture(grown(), Board(3, 3, 3, False)))
