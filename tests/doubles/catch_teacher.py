"""A teacher for tests, which nobody has to train: a script that plays `pixel_probe:Catch-v0` without a mistake, from
the columns of the ball and of the paddle in the image. `teacher_folder()` is a run folder of it.
"""

import functools
import runpy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import gymnasium as gym
import torch
import torch.nn as nn
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation, MaxAndSkipObservation, TimeLimit
from safetensors.numpy import load_file

from solorl import Run, RunArgs, parse
from solorl.checkpoints.checkpoint import safetensors


@dataclass
class Args(RunArgs):
    env_id: str = "pixel_probe:Catch-v0"
    gain: float = 1.0  # how much the values of the actions differ; may be negative
    eval_episodes: int = 3


def make_env(env_id, **kwargs):
    env = gym.make(env_id, obs_type="grayscale", frameskip=1, max_num_frames_per_episode=0, **kwargs)
    return TimeLimit(FrameStackObservation(MaxAndSkipObservation(env, skip=4), 4), 27_000)


class QNetwork(nn.Module):
    """Less the farther the paddle is from the ball after the action."""

    def __init__(self, gain):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, obs):  # (batch, 4, 84, 84) -> (batch, 3)
        image = obs[:, -1] > 0
        paddle, ball = image[:, -1], image[:, :72].any(1)  # (batch, 84): their columns
        columns = torch.arange(84, device=obs.device)
        centres = [(columns * there).sum(1) / there.sum(1).clamp(min=1) for there in (paddle, ball)]
        distance = torch.where(ball.any(1), centres[0] - centres[1], 0)[:, None]
        return -self.gain * (distance + torch.tensor([0, -12, 12], device=obs.device)).abs() / 12

    @torch.no_grad()
    def act(self, obs):
        return self(torch.as_tensor(obs, device=self.gain.device)).argmax(1).cpu().numpy()


def scored(run_dir, score):
    """Have the model of a run folder say that it scored this; None: nothing."""
    path = run_dir / "model.safetensors"
    about = {} if score is None else {"eval/episodic_return": repr(score)}
    path.write_bytes(safetensors(load_file(path), about))
    return run_dir


@functools.cache
def teacher_folder(*flags):
    """The run folder of a training that learns nothing, in a temporary folder that stays as long as this process."""
    folder = tempfile.TemporaryDirectory()
    teacher_folder.kept = [*getattr(teacher_folder, "kept", ()), folder]
    words = [__file__, "--runs-dir", folder.name, *flags]
    with mock.patch.object(sys, "argv", words):
        runpy.run_path(__file__, run_name="__main__")
    [run_dir] = Path(folder.name).iterdir()
    return run_dir


if __name__ == "__main__":
    args = parse(Args)
    run = Run(args)
    envs = SyncVectorEnv([lambda: make_env(args.env_id)], autoreset_mode=AutoresetMode.SAME_STEP)
    q_network = QNetwork(args.gain)
    start = run.resume(q_network=q_network)
    for iteration in run.loop(start, 1):
        run.evaluate(iteration + 1, q_network.act, make_env)
        run.save(iteration + 1)
    envs.close()
    run.close(q_network.act, make_env)
