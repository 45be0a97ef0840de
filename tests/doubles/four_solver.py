"""Who wins connect four: alpha-beta on two integers (`solorl.games.boards`), for positions of 12 stones and more.

Only moves that do not lose at once are looked at, those with most threats first; positions are remembered.
"""

COLUMNS, ROWS = 7, 6
BOTTOM = sum(1 << (column * (ROWS + 1)) for column in range(COLUMNS))
CELLS = BOTTOM * ((1 << ROWS) - 1)
COLUMN = [((1 << ROWS) - 1) << (column * (ROWS + 1)) for column in (3, 2, 4, 1, 5, 0, 6)]  # the middle first


class TooMany(Exception):
    """More positions than allowed."""


def winning(own, stones):
    """The empty cells that complete a row of `own`."""
    found = (own << 1) & (own << 2) & (own << 3)
    for shift in (ROWS, ROWS + 1, ROWS + 2):
        pair = (own << shift) & (own << 2 * shift)
        found |= pair & (own << 3 * shift) | pair & (own >> shift)
        pair = (own >> shift) & (own >> 2 * shift)
        found |= pair & (own >> 3 * shift) | pair & (own << shift)
    return found & CELLS & ~stones


class Solver:
    """Values for who is to move: 1, 0 or -1. A position that takes more than `most` others raises TooMany."""

    def __init__(self, most=300_000):
        self.most, self.known = most, {}  # (own, stones) -> lowest and highest value that is possible

    def value(self, own, other):
        """Of a position that is not over."""
        stones = own | other
        if winning(own, stones) & (stones + BOTTOM):
            return 1
        self.count = 0
        if len(self.known) > 3_000_000:
            self.known.clear()
        return self._search(own, stones, -1, 1)

    def after(self, own, other, column):
        """The value of a move, for who makes it."""
        stones = own | other
        move = (stones + BOTTOM) & (((1 << ROWS) - 1) << (column * (ROWS + 1)))
        if move & winning(own, stones):
            return 1
        if stones | move == CELLS:
            return 0
        return -self.value(other, own | move)

    def _search(self, own, stones, alpha, beta):
        """Who is to move cannot win with this move."""
        self.count += 1
        if self.count > self.most:
            raise TooMany
        moves, threats = (stones + BOTTOM) & CELLS, winning(own ^ stones, stones)
        if forced := moves & threats:
            if forced & (forced - 1):
                return -1
            moves = forced
        moves &= ~(threats >> 1)  # not below a cell with which the other player wins
        if not moves:
            return -1
        if stones.bit_count() >= COLUMNS * ROWS - 2:
            return 0
        low, high = self.known.get((own, stones), (-1, 1))
        alpha, beta = max(alpha, low), min(beta, high)
        if alpha >= beta:
            return alpha
        first, best = alpha, -1
        order = [move for column in COLUMN if (move := moves & column)]
        order.sort(key=lambda move: -winning(own | move, stones).bit_count())
        for move in order:
            best = max(best, -self._search(own ^ stones, stones | move, -beta, -max(alpha, best)))
            if best >= beta:
                break
        bounds = (best, high) if best >= beta else (low, best) if best <= first else (best, best)
        self.known[own, stones] = bounds
        return best
