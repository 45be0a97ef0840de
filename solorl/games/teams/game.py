"""What a game of several agents in JAX is made of, and many of them side by side inside a compiled loop.

    envs = JaxTeams("team/simple_spread_v3", num_envs=4096)
    state, obs = envs.reset(key)                     # obs (num_envs, num_agents, obs_dim)
    state, step = envs.step(key, state, action)      # a TeamStep
    envs.central(state), envs.action_mask(state)     # of the games as they are now

A game that ends is reset in the same step, as in solorl/envs/classic.py: `final_...` is where the step led, the others
are where the next game starts (both are equal elsewhere). A time limit is `truncated`, never `terminated`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from solorl.envs.interface import where_ended
from solorl.envs.pettingzoo import Game
from solorl.games.teams import GAMES, team_game
from solorl.games.teams.parallel import ParallelGame


@dataclass(frozen=True, eq=False)
class TeamGame:
    """One game: functions of n states side by side. All agents play until the game ends.

    start: (key, n) -> state, a tree of arrays (n, ...)
    step: (state, action (n, num_agents) or (n, num_agents, action_dim)) -> state, reward (n, num_agents), terminated
        (n,)
    observe: state -> obs (n, num_agents, obs_dim); shorter ones are filled up with 0
    central: state -> central state (n, state_dim); None: all observations in a row, without what fills them up
    mask: state -> (n, num_agents, num_actions), True for what is allowed; None: everything
    """

    name: str
    agents: tuple[str, ...]
    obs_dims: tuple[int, ...]  # entries of each agent's observation
    action_dims: tuple[int, ...]  # numbers of discrete actions, or entries of continuous ones, from 0 to 1
    max_steps: int  # then the game is truncated
    start: Callable[..., Any]
    step: Callable[..., Any]
    observe: Callable[..., Any]
    central: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    continuous: bool = False

    def state_of(self, state: Any) -> Any:
        """The central state (n, state_dim)."""
        if self.central is not None:
            return self.central(state)
        obs = self.observe(state)
        return jnp.concatenate([obs[:, k, :size] for k, size in enumerate(self.obs_dims)], 1)

    def mask_of(self, state: Any) -> Any:
        """The mask (n, num_agents, num_actions), False for actions that an agent does not have; None without any."""
        if self.mask is not None:
            return self.mask(state)
        if self.continuous or len(set(self.action_dims)) == 1:
            return None
        has = np.arange(max(self.action_dims)) < np.array(self.action_dims)[:, None]
        return jnp.broadcast_to(has, (len(jax.tree.leaves(state)[0]), *has.shape))


class TeamStep(NamedTuple):
    """What a step of every game brought. `terminated` and `truncated` are (num_envs,): all agents end together."""

    obs: jax.Array  # (num_envs, num_agents, obs_dim)
    reward: jax.Array  # (num_envs, num_agents)
    terminated: jax.Array
    truncated: jax.Array
    final_obs: jax.Array
    central: jax.Array  # (num_envs, state_dim): the central state that belongs to `obs`
    final_central: jax.Array
    action_mask: jax.Array | None  # (num_envs, num_agents, num_actions); None where everything is allowed
    final_action_mask: jax.Array | None


class JaxTeams:
    """`num_envs` games `team/NAME` side by side; see the top of this file. `kwargs` are those of `team_game`.

    Spaces, `agents`, `teams` and true sizes are those of `Game` and `PettingZooEnvs`.
    """

    def __init__(self, env_id: str, num_envs: int, teams: Any = None, **kwargs: Any):
        name = env_id.removeprefix("team/")
        self.game, self.num_envs = team_game(name, **kwargs), num_envs
        one = Game(ParallelGame(self.game), GAMES[name][2] if teams is None else teams, pad=True)
        self.agents, self.num_agents, self.teams = one.agents, len(one.agents), one.teams
        self.agent_observation_space, self.agent_action_space = one.agent_observation_space, one.agent_action_space
        self.agent_obs_dims, self.agent_action_dims = one.agent_obs_dims, one.agent_action_dims
        self.single_observation_space, self.single_action_space = one.observation_space, one.action_space

    def reset(self, key: Any) -> tuple[Any, Any]:
        """New games everywhere: state, obs."""
        state = self.game.start(key, self.num_envs)
        return (state, jnp.zeros(self.num_envs, jnp.int32)), self.game.observe(state)

    def central(self, state: Any) -> Any:
        """The central states (num_envs, state_dim)."""
        return self.game.state_of(state[0])

    def action_mask(self, state: Any) -> Any:
        """The actions that are allowed (num_envs, num_agents, num_actions), or None."""
        return self.game.mask_of(state[0])

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, TeamStep]:
        """One step everywhere: state, TeamStep. Games that end start again in states drawn with `key`."""
        inner, reward, terminated = self.game.step(state[0], action)
        steps = state[1] + 1
        truncated = (steps >= self.game.max_steps) & ~terminated
        done = terminated | truncated
        begin = lambda: where_ended(done, self.game.start(key, self.num_envs), inner)  # noqa: E731
        begun = jax.lax.cond(done.any(), begin, lambda: inner)
        last, state = (inner, steps), (begun, jnp.where(done, 0, steps))
        obs, final_obs = self.game.observe(begun), self.game.observe(inner)
        central, final_central = self.central(state), self.central(last)
        masks = self.action_mask(state), self.action_mask(last)
        return state, TeamStep(obs, reward, terminated, truncated, final_obs, central, final_central, *masks)
