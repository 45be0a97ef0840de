"""Continuous actions: balance a pole on a cart, seen as a vector, as images, as both, or without velocities."""

from typing import Any

import gymnasium as gym
import numpy as np

GRAVITY, CART, POLE, LENGTH, FORCE = 9.8, 1.0, 0.1, 0.5, 10.0  # m/s², two masses in kg, half of the pole in m, N
SECONDS, TRACK, FALLEN = 0.05, 1.5, 0.4  # of a step; the cart leaves the track at 1.5 m, the pole is down at 0.4 rad
GUST = 0.1  # standard deviation of what the wind adds to the angular velocity in a step, in rad/s
HEIGHT, WIDTH, PIVOT, SIDE = 24, 32, 19, 16  # of the image; the row in which the pole begins, its length in pixels
ROWS, COLUMNS = np.ogrid[-PIVOT : HEIGHT - PIVOT, :WIDTH]


class Pole(gym.Env[Any, np.ndarray]):
    """Push a cart so that the pole on it stays upright, in a wind that never stops: the equations of CartPole (Barto,
    Sutton, Anderson 1983) in steps of 0.05 s. The reward is 1 divided by the number of steps of an episode (150) while
    the pole is up and the cart on its track; else the episode ends. Random actions have 0.08 in the mean, at best 1.

    Actions: Box(1) from -1 to 1, a force in units of 10 N. What the agent `sees`:
    - "vector" (4,): position and velocity of the cart, angle and angular velocity of the pole;
    - "positions" (2,): position and angle. Without memory no linear policy gets more than 0.4;
    - "image" (24, 32, 1) bytes: the cart on the whole track. Velocities are the difference of two images;
    - "dict": `image` (24, 32, 2), the pole now and one step before, the cart always in the middle; `cart` (2,), its
      position and velocity. With one of the two entries no linear policy gets more than 0.7.
    """

    def __init__(self, sees: str = "vector", render_mode: str | None = None):
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
        boxes = {n: gym.spaces.Box(-np.inf, np.inf, (n,), np.float32) for n in (2, 4)}
        one, two = (gym.spaces.Box(0, 255, (HEIGHT, WIDTH, frames), np.uint8) for frames in (1, 2))
        both = gym.spaces.Dict({"image": two, "cart": boxes[2]})
        spaces: dict[str, gym.Space] = {"vector": boxes[4], "positions": boxes[2], "image": one, "dict": both}
        if sees not in spaces:
            raise ValueError(f"sees must be one of {', '.join(spaces)}, not {sees!r}")
        self.sees, self.render_mode, self.observation_space = sees, render_mode, spaces[sees]
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        self.state = self.np_random.uniform(-1, 1, 4) * (0.5, 0.5, 0.1, 0.5)
        self.before = self.state
        return self._obs(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        _, speed, angle, spin = self.before = self.state
        sin, cos, mass = np.sin(angle), np.cos(angle), CART + POLE
        push = (FORCE * float(np.clip(action, -1, 1).item()) + POLE * LENGTH * spin**2 * sin) / mass
        spin_up = (GRAVITY * sin - cos * push) / (LENGTH * (4 / 3 - POLE * cos**2 / mass))
        speed_up = push - POLE * LENGTH * spin_up * cos / mass
        self.state = self.state + SECONDS * np.array([speed, speed_up, spin, spin_up])
        self.state[3] += GUST * self.np_random.normal()
        over = bool(abs(self.state[0]) > TRACK or abs(self.state[2]) > FALLEN)
        return self._obs(), float(not over) / 150, over, False, {}

    def render(self) -> np.ndarray | None:
        """The cart on the whole track, enlarged."""
        if self.render_mode is None:
            return None
        return _image(self.state[0], self.state[2]).repeat(10, 0).repeat(10, 1)[..., None].repeat(3, 2)

    def _obs(self) -> Any:
        if self.sees == "dict":
            frames = [_image(0.0, state[2]) for state in (self.before, self.state)]
            return {"image": np.stack(frames, -1), "cart": self.state[:2].astype(np.float32)}
        if self.sees == "image":
            return _image(self.state[0], self.state[2])[..., None]
        return self.state[:: 2 if self.sees == "positions" else 1].astype(np.float32)


def _image(position: float, angle: float) -> np.ndarray:
    """Cart and pole as two bars with soft edges, so that grey levels tell places between two pixels."""
    columns, sin, cos = COLUMNS - (position / TRACK + 1) * (WIDTH - 1) / 2, np.sin(angle), np.cos(angle)
    along = np.clip(columns * sin - ROWS * cos, 0, SIDE)
    pole = np.hypot(columns - along * sin, ROWS + along * cos)  # distance of each pixel from it
    cart = np.hypot(np.abs(columns).clip(3) - 3, ROWS - 2)
    return (255 * np.clip(1.5 - np.minimum(pole, cart), 0, 1)).astype(np.uint8)
