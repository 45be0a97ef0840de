"""Catch on images of 84 x 84: a pixel problem that is learned in minutes. As a game of the Arcade Learning Environment
(`pixel_probe:Catch-v0`, the wrappers of the Atari files fit around it) and as games of EnvPool after
`use_fake_envpool`: `Catch-v5`, of Atari, and `CatchEasy-v0`, of Procgen, on colour images of 64 x 64.

A ball falls in one of 7 columns; the paddle at the bottom moves by a column in 4 frames. The game ends when the ball is
down: +1 if it is caught, else -1. A random policy has about -0.6, the best one 1.

`Corridor-v5` of that EnvPool asks for exploration: ten doors, of whose three handles one opens and the others lead back
to the first door. Only the last door gives 1; a random policy passes it in one of 59,049 attempts.

`pixel_probe:Recall-v0` asks for memory: a square left or right in the first images, then empty images, then a bar: +1
for the button of that side, else -1. A random policy has about -0.33, the best one without memory 0, the best one 1.

`python -m pixel_probe train NAME ...` is `solo train NAME ...` with that EnvPool.
"""

import sys
import types
from importlib.machinery import ModuleSpec

import gymnasium as gym
import numpy as np

SIZE, CELL, SPEED = 84, 12, 3  # pixels; pixels per frame
WAIT = 31  # frames before the ball appears: no-ops at the start of a game change nothing


class Catch:
    """One game, frame by frame."""

    def __init__(self, wait):
        self.wait = wait

    def reset(self, rng):
        self.frames, self.paddle, self.ball = 0, SIZE // 2 - CELL // 2, int(rng.integers(SIZE // CELL)) * CELL

    def step(self, action):
        """One frame with 0: stay, 1: left, 2: right. Reward and whether the game is over."""
        self.frames += 1
        if self.frames <= self.wait:
            return 0.0, False
        self.paddle = int(np.clip(self.paddle + SPEED * (0, -1, 1)[action], 0, SIZE - CELL))
        if self.height() < SIZE - CELL:
            return 0.0, False
        return (1.0 if abs(self.ball - self.paddle) < CELL else -1.0), True

    def height(self):
        return SPEED * (self.frames - self.wait)

    def image(self):
        image = np.zeros((SIZE, SIZE), np.uint8)
        image[-CELL:, self.paddle : self.paddle + CELL] = 255
        if self.frames >= self.wait:
            image[self.height() : self.height() + CELL, self.ball : self.ball + CELL] = 255
        return image


class Recall:
    """A side is shown first and is to be named at the end, 29 frames later: more than a stack of four images holds."""

    def __init__(self, wait):
        self.shown = wait + 4  # frames, so that the first image after up to 30 no-ops shows the side

    def reset(self, rng):
        self.frames, self.side = 0, int(rng.integers(2))

    def step(self, action):
        """One frame with 0: nothing, 1: left, 2: right; the last one counts. Reward and whether the game is over."""
        self.frames += 1
        if self.frames < self.shown + 29:
            return 0.0, False
        return (1.0 if action == self.side + 1 else -1.0), True

    def image(self):
        image = np.zeros((SIZE, SIZE), np.uint8)
        if self.frames < self.shown:
            image[:, self.side * SIZE // 2 :][:, : SIZE // 2] = 255
        if self.frames >= self.shown + 21:
            image[-CELL:] = 255
        return image


class Corridor:
    """Ten doors, 4 frames each: the right handle leads to the next door, any other one back to the first. The last door
    gives 1 and ends the game, 30 attempts at doors end it, too."""

    handles = (1, 0, 2, 2, 0, 1, 0, 2, 1, 1)

    def __init__(self, wait):
        self.wait = wait

    def reset(self, rng):
        self.frames, self.door = 0, 0

    def step(self, action):
        """One frame with one of 3 actions; the last of 4 counts. Reward and whether the game is over."""
        self.frames += 1
        if self.frames % 4 == 0:
            self.door = self.door + 1 if action == self.handles[self.door] else 0
        opened = self.door == len(self.handles)
        return float(opened), opened or self.frames == 120

    def image(self):
        image = np.zeros((SIZE, SIZE), np.uint8)
        row, column = divmod(self.door, 4)
        image[20 * row :, 20 * column :][:20, :20] = 255
        return image


class CatchEnv(gym.Env):
    """Frames of `Catch` or `Recall`, with what the Atari files expect of a game: grey images, lives, meanings."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 as in Gymnasium
    observation_space = gym.spaces.Box(0, 255, (SIZE, SIZE), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, game, obs_type, frameskip, max_num_frames_per_episode, render_mode=None):
        assert (obs_type, frameskip, max_num_frames_per_episode) == ("grayscale", 1, 0)
        self.game, self.render_mode = {"catch": Catch, "recall": Recall}[game](WAIT), render_mode

    def get_action_meanings(self):
        return ["NOOP", "LEFT", "RIGHT"]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.game.reset(self.np_random)
        return self.game.image(), {"lives": 0}

    def step(self, action):
        reward, over = self.game.step(int(action))
        return self.game.image(), reward, over, False, {"lives": 0}

    def render(self):
        return np.repeat(self.game.image()[..., None], 3, 2)


if "Catch-v0" not in gym.registry:
    gym.register("Catch-v0", CatchEnv, kwargs={"game": "catch"})
    gym.register("Recall-v0", CatchEnv, kwargs={"game": "recall"})


class FakePool:
    """Games as EnvPool has them: 4 frames a step, the last `stack_num` images; resets one step late."""

    def __init__(
        self, num_envs, env_seed, max_episode_steps, num_threads=1, render_mode=None, stack_num=4, game=Catch,
        repeat_action_probability=0.0,
    ):  # fmt: skip
        self.games, self.limit = [game(0) for _ in range(num_envs)], max_episode_steps
        self.sticky, self.pressed = repeat_action_probability, np.zeros(num_envs, np.int64)  # of the last frame
        self.rngs = [np.random.default_rng(seed) for seed in env_seed]
        self.stacks, self.done = np.zeros((num_envs, stack_num, SIZE, SIZE), np.uint8), np.ones(num_envs, bool)
        self.elapsed = np.zeros(num_envs, np.int32)

    def _begin(self, i):
        self.games[i].reset(self.rngs[i])
        self.pressed[i] = 0
        self.stacks[i], self.done[i], self.elapsed[i] = self.games[i].image(), False, 0

    def _info(self, ids, reward, terminated):
        numbers = np.zeros(len(ids), np.int32)
        return {
            "env_id": np.asarray(ids, np.int32),
            "lives": numbers,
            "reward": reward,
            "terminated": terminated.astype(np.int32),
            "elapsed_step": self.elapsed[ids],
        }

    def reset(self, ids=None):
        ids = np.arange(len(self.games)) if ids is None else np.asarray(ids)
        for i in ids:
            self._begin(i)
        zeros = np.zeros(len(ids), np.float32)
        return self.stacks[ids].copy(), self._info(ids, zeros, zeros)

    def step(self, actions):
        n = len(self.games)
        reward, terminated, truncated = np.zeros(n, np.float32), np.zeros(n, bool), np.zeros(n, bool)
        for i, game in enumerate(self.games):
            if self.done[i]:  # a dummy transition
                self._begin(i)
                continue
            for _ in range(4):
                if not (self.sticky and self.rngs[i].random() < self.sticky):
                    self.pressed[i] = actions[i]
                if not terminated[i]:
                    reward[i], terminated[i] = game.step(int(self.pressed[i]))
            self.stacks[i] = np.concatenate([self.stacks[i, 1:], game.image()[None]])
            self.elapsed[i] += 1
            truncated[i] = self.elapsed[i] >= self.limit
            self.done[i] = terminated[i] | truncated[i]
        info = self._info(np.arange(n), reward, terminated)
        return self.stacks.copy(), reward, terminated & ~truncated, truncated, info

    def xla(self):
        """A handle and three functions for compiled code, of which only `step` works; it calls `step` of Python."""
        import jax
        from jax.experimental import io_callback

        def like(tree):
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)

        n = len(self.games)
        zeros = np.zeros(n, np.float32)
        shapes = like((self.stacks, zeros, self.done, self.done, self._info(np.arange(n), zeros, zeros)))
        handle = np.zeros(8, np.uint8)

        def called(handle, action):
            return np.asarray(handle), self.step(np.asarray(action))

        def step(handle, action):
            return io_callback(called, (like(handle), shapes), handle, action)

        return handle, None, None, step

    def render(self):
        return np.repeat(self.stacks[:, -1, :, :, None], 3, 3)


class FakeProcgen:
    """Catch as a game of Procgen: the level (a number) decides where the ball falls; action 2 moves to the left, 12 to
    the right. As EnvPool plays those: also after LIMIT steps the game tells the end of the task."""

    LENGTH, LIMIT = 8, 20  # steps until the ball is down, and of any game

    def __init__(self, num_envs, env_seed, max_episode_steps, num_levels, start_level, num_threads=1, render_mode=None):
        self.rngs = [np.random.default_rng(seed) for seed in env_seed]
        self.low, self.high = (start_level, start_level + num_levels) if num_levels else (0, 2**31 - 1)
        self.levels, self.longest = np.zeros(num_envs, np.int32), max_episode_steps
        self.steps, self.paddle, self.played = np.zeros(num_envs, int), np.zeros(num_envs, int), []

    def _begin(self, i):
        self.levels[i], self.steps[i], self.paddle[i] = self.rngs[i].integers(self.low, self.high), 0, 24

    def _images(self, ids):
        images = np.zeros((len(ids), 3, 64, 64), np.uint8)
        for image, i in zip(images, ids, strict=True):
            ball, height = self.levels[i] % 8 * 8, min(7 * self.steps[i], 56)
            image[0, height : height + 8, ball : ball + 8] = 255
            image[1, 56:, self.paddle[i] : self.paddle[i] + 8] = 255
            image[2] = self.levels[i] % 10 * 10  # a theme
        return images

    def _info(self, ids):
        return {"env_id": np.asarray(ids, np.int32), "level_seed": self.levels[ids], "elapsed_step": self.steps[ids]}

    def reset(self, ids=None):
        ids = np.arange(len(self.rngs)) if ids is None else np.asarray(ids)
        for i in ids:
            self._begin(i)
        self.played += self.levels[ids].tolist()
        return self._images(ids), self._info(ids)

    def step(self, actions):
        n = len(self.rngs)
        reward, over = np.zeros(n, np.float32), np.zeros(n, bool)
        for i, action in enumerate(actions):
            self.steps[i] += 1
            self.paddle[i] = np.clip(self.paddle[i] + 8 * {2: -1, 12: 1}.get(int(action), 0), 0, 56)
            if self.steps[i] == self.LENGTH:
                reward[i] = 10.0 * (self.levels[i] % 8 * 8 == self.paddle[i])
            over[i] = self.steps[i] in (self.LENGTH, self.LIMIT)
        return self._images(range(n)), reward, over, (self.steps >= self.longest) & ~over, self._info(np.arange(n))

    def render(self):
        return self._images(range(len(self.rngs))).transpose(0, 2, 3, 1)


def plays_envpool(name):
    """Whether an algorithm's games are EnvPool's."""
    return "envpool" in name or "procgen" in name or ("atari" in name and name.endswith("_jax"))


def use_fake_envpool(monkeypatch):
    """Put a module in the place of `envpool` that has the games `Catch-v5`, `Corridor-v5` and `CatchEasy-v0` only."""
    games = {"Catch-v5": Catch, "Corridor-v5": Corridor}

    def make_spec(env_id, stack_num=4, repeat_action_probability=0.0, **levels):
        if env_id == "CatchEasy-v0":
            config = types.SimpleNamespace(distribution_mode=0, max_episode_steps=FakeProcgen.LIMIT)
            space = gym.spaces.Box(0, 255, (3, 64, 64), np.uint8)
            return types.SimpleNamespace(config=config, observation_space=space, action_space=gym.spaces.Discrete(15))
        config = types.SimpleNamespace(use_fire_reset=True, max_episode_steps=27_000, task="catch")
        space = gym.spaces.Box(0, 255, (stack_num, SIZE, SIZE), np.uint8)
        return types.SimpleNamespace(config=config, observation_space=space, action_space=gym.spaces.Discrete(3))

    def make_gymnasium(env_id, **options):
        return FakePool(game=games[env_id], **options) if env_id in games else FakeProcgen(**options)

    module = types.ModuleType("envpool")
    module.__spec__ = ModuleSpec("envpool", None)
    module.list_all_envs, module.make_spec = lambda: [*games, "CatchEasy-v0"], make_spec
    module.make_gymnasium = make_gymnasium
    monkeypatch.setitem(sys.modules, "envpool", module)
    monkeypatch.setattr("solorl.envs.envpool.has_fire", lambda game, actions: False)


if __name__ == "__main__":
    import pytest

    from solorl import cli

    use_fake_envpool(pytest.MonkeyPatch())
    sys.exit(cli.main(sys.argv[1:]))
