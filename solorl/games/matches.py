"""Games on boards against an opponent with a name, as environments of one agent, with masks."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from solorl.envs.spaces import Seeded
from solorl.games import opponents
from solorl.games.boards import Board


class Matches(gym.vector.VectorEnv):
    """`num_envs` games side by side on a `Board(*rules)`, or on the board that `rules` is, against a player of
    `solorl.games.opponents`. The agent moves first where `side` is 0, second where it is 1; without a side in every
    second game, a single one by chance. The return of an episode is its points: 1 for a win, 0.5 for a draw, else 0.

    Observations (height, width, 2): 1 where the agent has a stone, 1 where the opponent has one. Actions are columns,
    or cells row by row, of which `infos["action_mask"]` allows those that are free. `game` has the rules.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 2, "points": True}  # noqa: RUF012
    metadata["autoreset_mode"] = AutoresetMode.SAME_STEP

    def __init__(
        self,
        rules: tuple[int, int, int, bool] | Board,
        num_envs: int = 1,
        opponent: str = "one-ply",
        side: int | None = None,
        render_mode: str | None = None,
    ):
        self.num_envs, self.side, self.render_mode = num_envs, side, render_mode
        self.game = rules if isinstance(rules, Board) else Board(*rules)
        self.opponent, self.choose = opponent, opponents.player(opponent, self.game)
        self.single_action_space = gym.spaces.Discrete(self.game.num_actions)
        self.single_observation_space = gym.spaces.Box(0.0, 1.0, (self.game.height, self.game.width, 2), np.float32)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.vector.VectorEnv.reset`. One generator draws what happens in all games."""
        if seed is not None and seed != [None]:
            self.np_random = np.random.default_rng(seed)
        turns = np.arange(self.num_envs) + self.np_random.integers(2)
        self.second = (turns if self.side is None else np.full(self.num_envs, self.side)) % 2 == 1
        self.position = self.game.start(self.num_envs)  # from the agent's side
        self._answer(self.second)
        self.shown = self.position.copy()
        return self.game.observation(self.position), self._infos()

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """See `gymnasium.vector.VectorEnv.step`. ValueError for a move that the mask does not allow."""
        if not self.game.mask(self.position)[np.arange(self.num_envs), actions].all():
            raise ValueError(f"one of the moves {actions} is not allowed")
        self.position = self.game.play(self.position, np.asarray(actions))[:, ::-1]
        won = self.game.has_row(self.position[:, 0])
        done = won | self.game.over(self.position)  # by the agent's move, so that the opponent is to move
        self._answer(~done)
        lost, over = self.game.lost(self.position), done | self.game.over(self.position)
        obs, infos = self.game.observation(self.position), self._infos()
        reward, self.shown = over * (1 + won - lost) / 2, np.where(done[:, None], self.position[:, ::-1], self.position)
        if over.any():
            ends = {"final_obs": obs, "_final_obs": over, "final_info": infos}
            self.position[over] = self.game.start(int(over.sum()))
            if self.opponent == "human":
                said = {1.0: "you lose", 0.5: "a draw", 0.0: "you win"}[reward[0]]
                print(self.game.text(self.shown[0]), said, "", sep="\n")
            self._answer(over & self.second & (self.opponent != "human"))  # who is asked after the next reset
            obs, infos = self.game.observation(self.position), self._infos() | ends
        return obs, reward, over, np.zeros(self.num_envs, bool), infos

    def _answer(self, where: np.ndarray) -> None:
        """The opponent moves in some of the games."""
        if where.any():
            theirs = self.position[where][:, ::-1]
            self.position[where] = self.game.play(theirs, self.choose(theirs, self.np_random))

    def _infos(self) -> dict[str, Any]:
        return {"action_mask": self.game.mask(self.position)}

    def render(self) -> Any:
        """Each game as an image; one that has ended in the last step at its end."""
        return None if self.render_mode is None else tuple(map(self.game.picture, self.shown))


class Match(Seeded):
    """One of them."""

    metadata = Matches.metadata

    def __init__(self, **kwargs: Any):
        super().__init__(Matches(**kwargs))
        self.game, self.render_mode = self.envs.game, self.envs.render_mode  # type: ignore[attr-defined]
