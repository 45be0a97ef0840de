"""A game of several agents in JAX in which all can be computed by hand."""

import gymnasium as gym
import jax
import jax.numpy as jnp

from solorl.games.teams.game import TeamStep


def compiled(function, *args):
    """The function for arguments of these shapes, compiled as quickly as XLA can."""
    return jax.jit(function).lower(*args).compile({"xla_backend_optimization_level": 0})


class ClockTeam:
    """Deterministic, two games of three agents. What an agent sees tells the time, its place and the number of the
    game, the central state the time and the number of the game. Of every 5 steps the last ends the game: the first one
    is then over, the second one truncated.

    In each step every agent may take all of its 4 actions except one or two, other ones at the end of a game; where one
    takes another, its reward is NaN, else it grows with the number of the action and the place of the agent.
    """

    saved, num_envs, num_agents = True, 2, 3
    agents, teams = ["a", "b", "c"], {"all": [0, 1, 2]}
    agent_observation_space, agent_action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(4)

    def reset(self, key):
        return jnp.zeros((), jnp.int32), self.observe(0)

    def observe(self, time):
        place, game = jnp.broadcast_to(jnp.arange(3), (2, 3)), jnp.broadcast_to(jnp.arange(2)[:, None], (2, 3))
        return jnp.stack([jnp.sin(time + place), jnp.cos(time - 0.5 * place), 1.0 * game], -1)

    def central(self, state):
        return jnp.stack([jnp.full(2, jnp.sin(state)), jnp.full(2, jnp.cos(state)), 1.0 * jnp.arange(2)], 1)

    def action_mask(self, state):
        return self.allowed(state, 1)

    def allowed(self, time, shift):
        """(2, 3, 4), False for action (time + place) % 4, in the second game also for `shift` more."""
        first = jnp.broadcast_to((time + jnp.arange(3)) % 4, (2, 3))
        second = jnp.where(jnp.arange(2)[:, None] == 1, (first + shift) % 4, first)
        action = jnp.arange(4)
        return (action != first[..., None]) & (action != second[..., None])

    def step(self, key, state, action):
        mask = self.action_mask(state)
        legal = jnp.take_along_axis(mask, action[..., None], 2)[..., 0]
        reward = jnp.where(legal, 0.3 * action * (1 + jnp.arange(3)) + 0.1 * jnp.cos(state) - 1, jnp.nan)
        state = state + 1
        end, limit = jnp.full(2, state % 5 == 0), jnp.array([False, True])
        obs, central, mask = self.observe(state), self.central(state), self.action_mask(state)
        final_obs, final_central = (jnp.where(state % 5 == 0, -x, x) for x in (obs, central))
        final_mask = jnp.where(state % 5 == 0, self.allowed(state, 2), mask)
        ends = end & ~limit, end & limit
        return state, TeamStep(obs, reward, *ends, final_obs, central, final_central, mask, final_mask)
