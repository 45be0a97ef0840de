"""Games of several agents in JAX: they are mpe2's, or those of the papers; many side by side; exact resume."""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import solorl.envs.teams
from solorl.envs.teams import particles, team_game

PARTICLES = [name for name, (entry, *_) in solorl.envs.teams.GAMES.items() if entry.startswith("particles")]
OURS = [name for name in solorl.envs.teams.GAMES if name not in PARTICLES]


def state_of_mpe2(worlds):
    """The state in which mpe2's worlds are, as ours."""
    place = np.stack([[entity.state.p_pos for entity in world.entities] for world in worlds])
    speed = np.stack([[agent.state.p_vel for agent in world.agents] for world in worlds])
    said = np.stack([np.resize(world.agents[0].state.c, 3) for world in worlds])
    goals = [getattr(world.agents[0], "_goal_b", None) for world in worlds]
    goal = [world.landmarks.index(goal) if goal else 0 for world, goal in zip(worlds, goals, strict=True)]
    return particles.Particles(*(jnp.asarray(x, jnp.float32) for x in (place, speed, said)), jnp.array(goal))


@pytest.mark.parametrize("name", PARTICLES)
def test_particles_move_and_are_rewarded_as_in_mpe2(name):
    """Whole games from the same start with the same actions."""
    games = [gym.make(f"team/{name}") for _ in range(8)]
    obs = np.stack([game.reset(seed=seed)[0] for seed, game in enumerate(games)])
    worlds = [game.unwrapped.game.unwrapped.world for game in games]
    for world in worlds:  # close together, so that they touch
        for entity in world.entities:
            entity.state.p_pos *= 0.5
    ours = team_game(name)
    state, step, observe = state_of_mpe2(worlds), jax.jit(ours.step), jax.jit(ours.observe)
    rng = np.random.default_rng(0)
    for game in games:
        game.action_space.seed(int(rng.integers(100)))
    total = 0.0
    for t in range(25):
        action = np.stack([game.action_space.sample() for game in games])
        told = [game.step(a) for game, a in zip(games, action, strict=True)]
        state, reward, terminated = step(state, action)
        obs, wanted = (np.stack([each[k] for each in told]) for k in (0, 1))
        np.testing.assert_allclose(observe(state), obs, atol=1e-5)
        np.testing.assert_allclose(reward, wanted, atol=1e-5)
        np.testing.assert_allclose(ours.state_of(state), np.stack([each[4]["state"] for each in told]), atol=1e-5)
        assert not np.any(terminated) and [each[2:4] for each in told] == [(False, t == 24)] * 8
        total += np.ptp(wanted, axis=1).sum()
    assert total > 0 or "speaker" in name  # somebody has touched somebody
