"""What the files of others import and these measurements do not need: wandb, TensorBoard, distrax, hydra. Each number
that they log becomes a line "[step, time]" in the file that the variable POINTS names."""

import json
import os
import time

import numpy as np


def point(step):
    with open(os.environ["POINTS"], "a") as file:
        file.write(json.dumps([int(step), time.perf_counter()]) + "\n")


# ---- wandb
def init(**settings):
    pass


def log(values, step):
    point(step)


# ---- torch.utils.tensorboard
class SummaryWriter:
    def __init__(self, folder):
        pass

    def add_text(self, name, text):
        pass

    def add_scalar(self, name, value, step):
        if name == "charts/SPS":
            point(step)

    def close(self):
        pass


# ---- distrax
class Categorical:
    def __init__(self, logits):
        import jax

        self.logprobs, self.jax = jax.nn.log_softmax(logits), jax

    def sample(self, seed):
        return self.jax.random.categorical(seed, self.logprobs)

    def log_prob(self, action):
        return self.jax.numpy.take_along_axis(self.logprobs, action[..., None], -1)[..., 0]

    def entropy(self):
        return -(self.jax.numpy.exp(self.logprobs) * self.logprobs).sum(-1)


# ---- hydra
def main(**settings):
    return lambda function: function


def first_episode(infos):
    """The statistics of an episode that has ended, as Gymnasium before 1.0 gave them; for one environment."""
    return [{"episode": {name: np.asarray(value)[0] for name, value in infos["final_info"]["episode"].items()}}]
