"""A game of images for tests, with all that can happen in a game of Atari at frames that are known."""

import gymnasium as gym
import numpy as np

LIFE, REWARD, END = 56, 64, 80  # frames at which a life is lost, a reward comes, the game ends


class Diary(gym.Env):
    """`pixel_doubles:PixelDiary-v0`: the upper half of an image tells the frame, the lower half is its game's number.

    Lives fall from 3 to 2 at frame 56; the reward is 5 at frame 64; frame 80 is the end: of the task, or by a time
    limit if the number is odd. `pressed` are the actions of the game, frame by frame.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 as in Gymnasium
    observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, game, obs_type, frameskip, max_num_frames_per_episode, render_mode=None):
        assert (obs_type, frameskip, max_num_frames_per_episode) == ("grayscale", 1, 0)
        self.render_mode = render_mode

    def get_action_meanings(self):
        return ["NOOP", "FIRE", "RIGHT"]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.frames, self.number, self.pressed = 0, int(self.np_random.integers(256)), []
        return self.image(), {"lives": 3}

    def step(self, action):
        self.pressed.append(int(action))
        self.frames += 1
        over, limited = self.frames == END, self.number % 2 == 1
        info = {"lives": 3 if self.frames < LIFE else 2}
        return self.image(), 5.0 * (self.frames == REWARD), over and not limited, over and limited, info

    def image(self):
        image = np.full((84, 84), self.number, np.uint8)
        image[:42] = 3 * self.frames
        return image

    def render(self):
        return np.repeat(self.image()[..., None], 3, 2)


if "PixelDiary-v0" not in gym.registry:
    gym.register("PixelDiary-v0", Diary, kwargs={"game": "diary"})


class Bonus(Diary):
    """`pixel_doubles:PixelBonus-v0`: a fourth life comes at frame 56, none is ever lost, frame 80 is a time limit."""

    def step(self, action):
        image, reward, *_ = super().step(action)
        return image, reward, False, self.frames == END, {"lives": 3 if self.frames < LIFE else 4}


if "PixelBonus-v0" not in gym.registry:
    gym.register("PixelBonus-v0", Bonus, kwargs={"game": "bonus"})


class LastLife(Diary):
    """`pixel_doubles:PixelLastLife-v0`: a life is lost at frame 80 only, which is a time limit."""

    def step(self, action):
        image, reward, *_ = super().step(action)
        return image, reward, False, self.frames == END, {"lives": 2 if self.frames == END else 3}


class Forever(Diary):
    """`pixel_doubles:PixelForever-v0`: every frame gives 1, frame 80 is a time limit; all images are the same."""

    def step(self, action):
        image, *_ = super().step(action)
        return image, 1.0, False, self.frames == END, {"lives": 3}

    def image(self):
        return np.full((84, 84), 128, np.uint8)


class Fickle(Diary):
    """`pixel_doubles:PixelFickle-v0`: games have the numbers 0, 1, 2, ..., whatever the seed, so none comes again."""

    begun = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number, Fickle.begun = Fickle.begun, Fickle.begun + 1
        return self.image(), {"lives": 3}


if "PixelLastLife-v0" not in gym.registry:
    gym.register("PixelLastLife-v0", LastLife, kwargs={"game": "last_life"})
    gym.register("PixelForever-v0", Forever, kwargs={"game": "forever"})
    gym.register("PixelFickle-v0", Fickle, kwargs={"game": "fickle"})
