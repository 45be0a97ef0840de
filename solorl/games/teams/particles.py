"""Particles in the plane: mpe2's simple_spread_v3, simple_speaker_listener_v4 and simple_tag_v3 in single precision.

Agents push themselves; what touches is pushed apart. An entity is an agent or, after all agents, a landmark, which does
not move. Lowe et al. 2017, https://arxiv.org/abs/1706.02275
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from solorl.games.teams.game import TeamGame

DT, DAMPING = 0.1, 0.25  # of a step: its time, the part of the velocity that is lost
CONTACT_FORCE, CONTACT_MARGIN = 100.0, 1e-3  # what touches is pushed apart by a force that begins softly
DIRECTIONS = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]], np.float32)  # stay, left, right, down, up


class Particles(NamedTuple):
    """The state of n games."""

    place: jax.Array  # (n, num_agents + num_landmarks, 2)
    speed: jax.Array  # (n, num_agents, 2): velocities
    said: jax.Array  # (n, 3): what the speaker has said last
    goal: jax.Array  # (n,): the landmark that only the speaker knows


def start(key: Any, n: int, num_agents: int, num_landmarks: int, bound: float = 1.0) -> Particles:
    """Agents at rest anywhere in [-1, 1]^2, landmarks in [-bound, bound]^2."""
    drawn = jax.random.uniform(key, (n, num_agents + num_landmarks + 1, 2))
    place = (2 * drawn[:, :-1] - 1).at[:, num_agents:].multiply(bound)
    goal = (3 * drawn[:, -1, 0]).astype(jnp.int32)
    return Particles(place, jnp.zeros((n, num_agents, 2)), jnp.zeros((n, 3)), goal)


def push_of(action: Any) -> Any:
    """Directions (..., 2) of discrete actions (...), or of continuous ones (..., 5): right less left, up less down."""
    if jnp.issubdtype(action.dtype, jnp.integer):
        return jnp.asarray(DIRECTIONS)[action]
    action = action.clip(0.0, 1.0)
    return jnp.stack([action[..., 2] - action[..., 1], action[..., 4] - action[..., 3]], -1)


def contacts(place: Any, sizes: np.ndarray, num_agents: int) -> Any:
    """The forces (n, num_agents, 2) on agents from all entities that they touch; `sizes` are radii."""
    apart = place[:, :num_agents, None] - place[:, None]  # (n, num_agents, num_entities, 2)
    others = ~np.eye(num_agents, len(sizes), dtype=bool)
    distance = jnp.where(others, norm(apart), 1.0)
    depth = CONTACT_MARGIN * jax.nn.softplus((sizes[:num_agents, None] + sizes - distance) / CONTACT_MARGIN)
    return jnp.where(others[..., None], CONTACT_FORCE * apart / distance[..., None] * depth[..., None], 0.0).sum(2)


def norm(x: Any) -> Any:
    """The Euclidean length over the last axis, (..., 2) -> (...)."""
    return jnp.sqrt((x**2).sum(-1))


def move(state: Particles, force: Any, max_speed: Any = np.inf) -> Particles:
    """One step of time under forces (n, num_agents, 2); `max_speed` (num_agents,)."""
    moved = state.place.at[:, : force.shape[1]].add(state.speed * DT)
    speed = state.speed * (1 - DAMPING) + force * DT
    length = norm(speed)
    too_fast = length > max_speed
    slowed = speed / jnp.where(too_fast, length, 1.0)[..., None] * jnp.where(too_fast, max_speed, 1.0)[..., None]
    return state._replace(place=moved, speed=slowed)


def seen_from(place: Any, agents: int, entities: Sequence[int]) -> Any:
    """Where each of the first agents sees the entities that are not itself: (n, agents, 2 * their number)."""
    others = np.array([[e for e in entities if e != k] for k in range(agents)])
    return (place[:, others] - place[:, :agents, None]).reshape(len(place), agents, -1)


# ---------------------------------------------------------------------- simple_spread_v3
def simple_spread(N: int = 3, continuous_actions: bool = False) -> TeamGame:
    """N agents cover N landmarks without touching each other; half of the reward is the team's, half the agent's."""
    sizes = np.full(N, 0.15, np.float32)

    def step(state: Particles, action: Any) -> Any:
        force = 5.0 * push_of(action) + contacts(state.place[:, :N], sizes, N)
        state = move(state, force)
        agents, landmarks = state.place[:, :N], state.place[:, N:]
        far = norm(landmarks[:, :, None] - agents[:, None]).min(2).sum(1)  # of each landmark, the nearest agent's
        touches = (norm(agents[:, :, None] - agents[:, None]) < 0.3) & ~np.eye(N, dtype=bool)
        return state, 0.5 * -far[:, None] + 0.5 * -touches.sum(2), jnp.zeros(len(far), bool)

    def observe(state: Particles) -> Any:
        landmarks, agents = (seen_from(state.place, N, entities) for entities in (range(N, 2 * N), range(N)))
        silence = jnp.zeros((len(landmarks), N, 2 * (N - 1)))  # the two numbers that each other agent might say
        return jnp.concatenate([state.speed, state.place[:, :N], landmarks, agents, silence], 2)

    names, begin = tuple(f"agent_{k}" for k in range(N)), partial(start, num_agents=N, num_landmarks=N)
    sizes_of = ((6 * N,) * N, (5,) * N, 25)
    return TeamGame("simple_spread_v3", names, *sizes_of, begin, step, observe, continuous=continuous_actions)


# ---------------------------------------------------------------------- simple_speaker_listener_v4
def simple_speaker_listener(continuous_actions: bool = False) -> TeamGame:
    """The speaker, who cannot move, sees the colour of the goal; the listener hears it and must go there."""

    def step(state: Particles, action: Any) -> Any:
        said = action[:, 0, :3].clip(0.0, 1.0) if continuous_actions else jax.nn.one_hot(action[:, 0], 3)
        push = push_of(action[:, 1:])
        state = move(state, 5.0 * jnp.concatenate([jnp.zeros_like(push), push], 1))._replace(said=said)
        goal = jnp.take_along_axis(state.place, 2 + state.goal[:, None, None], 1)[:, 0]
        reward = -((state.place[:, 1] - goal) ** 2).sum(1)
        return state, jnp.stack([reward, reward], 1), jnp.zeros(len(reward), bool)

    def observe(state: Particles) -> Any:
        colour = 0.15 + 0.5 * jax.nn.one_hot(state.goal, 3)
        landmarks = (state.place[:, 2:] - state.place[:, 1:2]).reshape(len(colour), 6)
        listener = jnp.concatenate([state.speed[:, 1], landmarks, state.said], 1)
        return jnp.stack([jnp.pad(colour, ((0, 0), (0, 8))), listener], 1)

    names, begin = ("speaker_0", "listener_0"), partial(start, num_agents=2, num_landmarks=3)
    sizes_of = ((3, 11), (3, 5), 25)
    return TeamGame("simple_speaker_listener_v4", names, *sizes_of, begin, step, observe, continuous=continuous_actions)


# ---------------------------------------------------------------------- simple_tag_v3
TAG_SIZES = np.array([0.075, 0.075, 0.075, 0.05, 0.2, 0.2], np.float32)  # three predators, the prey, two obstacles


def simple_tag(continuous_actions: bool = False) -> TeamGame:
    """Three slow predators get 10 for every touch of a faster prey, which loses 10, and points for leaving the area."""
    accel, max_speed = np.array([3.0, 3.0, 3.0, 4.0], np.float32), np.array([1.0, 1.0, 1.0, 1.3], np.float32)

    def step(state: Particles, action: Any) -> Any:
        force = accel[:, None] * push_of(action) + contacts(state.place, TAG_SIZES, 4)
        state = move(state, force, max_speed)
        caught = (norm(state.place[:, :3] - state.place[:, 3:4]) < 0.125).sum(1)
        x = jnp.abs(state.place[:, 3])
        outside = jnp.where(x < 0.9, 0.0, jnp.where(x < 1.0, 10 * (x - 0.9), jnp.minimum(jnp.exp(2 * x - 2), 10.0)))
        prey = -10.0 * caught - outside.sum(1)
        reward = jnp.concatenate([jnp.repeat(10.0 * caught[:, None], 3, 1), prey[:, None]], 1)
        return state, reward, jnp.zeros(len(prey), bool)

    def observe(state: Particles) -> Any:
        obstacles, agents = (seen_from(state.place, 4, entities) for entities in ((4, 5), range(4)))
        prey = jnp.repeat(state.speed[:, 3:], 4, 1).at[:, 3].set(0.0)  # the prey itself sees nobody's velocity
        return jnp.concatenate([state.speed, state.place[:, :4], obstacles, agents, prey], 2)

    names = ("adversary_0", "adversary_1", "adversary_2", "agent_0")
    begin, sizes_of = partial(start, num_agents=4, num_landmarks=2, bound=0.9), ((16, 16, 16, 14), (5,) * 4, 25)
    return TeamGame("simple_tag_v3", names, *sizes_of, begin, step, observe, continuous=continuous_actions)
