"""Boards on which two players set stones in turn until one has a row of them, for many games at once in NumPy.

A position is two integers with a bit for each cell: the stones of the player to move, and those of the other one. So a
million positions are an array of two million numbers, (..., 2), and a row of stones is found by a few shifts.
"""

from functools import reduce
from typing import Any

import numpy as np

from solorl.errors import UsageError


class Board:
    """`height` times `width` cells; `length` stones in a row, in any direction, win. A player sets a stone on any empty
    cell, or, where stones fall, on the lowest empty cell of a column. A full board without a row is a draw.

    Row 0 is the top one. A column of the board has `height` bits, its lowest cell first, and one more that is always 0,
    so that no row continues from the top of a column to the bottom of the next.
    """

    def __init__(self, height: int, width: int, length: int, stones_fall: bool):
        self.height, self.width, self.length, self.stones_fall = height, width, length, stones_fall
        if width * (height + 1) > 63:
            raise UsageError(f"a board of {height} x {width} cells is too large: width x (height + 1) can be 63")
        self.bit = np.int64(1) << (np.arange(width) * (height + 1) + np.arange(height)[::-1, None])  # of each cell
        self.cells, self.column = self.bit.sum(), self.bit.sum(0)  # all bits; those of each column
        self.shifts = np.array([1, height, height + 1, height + 2])  # to the next cell: up; right and down, level, up
        self.action_shape = (width,) if stones_fall else (height, width)
        self.num_actions = int(np.prod(self.action_shape))
        self.max_moves = height * width

    def start(self, count: int) -> np.ndarray:
        """Empty boards (count, 2)."""
        return np.zeros((count, 2), np.int64)

    def stone(self, position: np.ndarray, action: Any) -> np.ndarray:
        """The bit that a move sets, 0 where it is not allowed: (..., 2), (...) -> (...)."""
        stones = position[..., 0] | position[..., 1]
        if not self.stones_fall:
            return self.bit.ravel()[action] & ~stones
        column = self.column[action]
        return ((stones & column) + self.bit[-1][action]) & column  # the sum carries to the lowest empty cell

    def mask(self, position: np.ndarray) -> np.ndarray:
        """Which moves are allowed, as long as the game is not over: (..., 2) -> (..., num_actions)."""
        return self.stone(position[..., None, :], np.arange(self.num_actions)) != 0

    def play(self, position: np.ndarray, action: Any) -> np.ndarray:
        """The positions after these moves, from the side of the next player: (..., 2), (...) -> (..., 2)."""
        own = position[..., 0] | self.stone(position, action)
        return np.stack(np.broadcast_arrays(position[..., 1], own), -1)

    def children(self, position: np.ndarray) -> np.ndarray:
        """The positions after each move, allowed or not: (..., 2) -> (..., num_actions, 2)."""
        return self.play(position[..., None, :], np.arange(self.num_actions))

    def has_row(self, stones: np.ndarray) -> np.ndarray:
        """Whether `length` of these stones are in a row: (...) -> (...)."""
        rows = stones[..., None]
        for _ in range(self.length - 1):  # first cells of two in each direction, then of three, and so on
            rows = rows & (rows >> self.shifts)
        return np.asarray(rows.any(-1))

    def gaps(self, stones: np.ndarray) -> np.ndarray:
        """The cells that complete a row of these stones: (...) -> (...)."""
        found = np.zeros_like(stones)
        for shift in self.shifts:
            for gap in range(self.length):
                steps = [shift * (i - gap) for i in range(self.length) if i != gap]
                found |= reduce(np.bitwise_and, [stones >> step if step > 0 else stones << -step for step in steps])
        return found & self.cells

    def lost(self, position: np.ndarray) -> np.ndarray:
        """Whether the player to move has lost, because the other one has a row: (..., 2) -> (...)."""
        return self.has_row(position[..., 1])

    def over(self, position: np.ndarray) -> np.ndarray:
        """Whether the game is over: a row, or a full board."""
        return self.lost(position) | ((position[..., 0] | position[..., 1]) == self.cells)

    def observation(self, position: np.ndarray) -> np.ndarray:
        """A plane of the own stones and one of the other's: (..., 2) -> (..., height, width, 2)."""
        return ((position[..., None, None, :] & self.bit[..., None]) != 0).astype(np.float32)

    def position(self, observation: np.ndarray) -> np.ndarray:
        """The position of an observation: (..., height, width, 2) -> (..., 2)."""
        return np.where(observation > 0.5, self.bit[..., None], 0).sum((-3, -2))

    def sides(self, position: np.ndarray) -> tuple[int, int]:
        """The stones of who began, and those of the other: of one position (2,)."""
        own, other = map(int, position)
        return (own, other) if own.bit_count() == other.bit_count() else (other, own)

    def text(self, position: np.ndarray) -> str:
        """One position as lines: X for the stones of who began, O for the other's, and the numbers of the moves."""
        first, second = self.sides(position)
        numbers = np.arange(1, self.num_actions + 1).reshape(self.action_shape).astype(str)
        empty = "." if self.stones_fall else numbers
        signs = np.where(first & self.bit, "X", np.where(second & self.bit, "O", empty))
        return "\n".join(" ".join(row) for row in (*signs, *([numbers] if self.stones_fall else [])))

    def picture(self, position: np.ndarray, size: int = 40) -> np.ndarray:
        """One position as an image (height * size, width * size, 3); the stones of who began are red."""
        first, second = self.sides(position)
        axis = np.arange(size) - (size - 1) / 2
        disc = np.hypot(axis, axis[:, None]) < 0.4 * size
        image = np.tile(np.array([40, 80, 160], np.uint8), (self.height * size, self.width * size, 1))
        for (row, column), bit in np.ndenumerate(self.bit):
            colour = (220, 50, 40) if first & bit else (250, 210, 60) if second & bit else (235, 235, 235)
            image[row * size : (row + 1) * size, column * size : (column + 1) * size][disc] = colour
        return image
