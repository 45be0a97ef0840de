"""A script with three loops in a row, for tests: it plays at random, learns from that offline, and plays what it has
learned. A step of the second loop is a gradient step."""

import math
import os
import signal
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"
    num_envs: int = 2
    total_timesteps: int = 50
    warm: int = 4  # iterations of 4 steps
    offline: int = 5  # iterations of 2 steps; 0: none
    online: int = 6  # iterations of 4 steps
    end_at: int = 0  # step at which what `by` says ends the run; 0: none
    by: str = "signal"  # signal | stop | target
    falls: bool = False  # the last loop does not count on
    twice: bool = False  # the second loop says that it is the last one
    breaks: bool = False  # the script leaves the first loop after two iterations
    eval_episodes: int = 2


def make_env(env_id, **kwargs):
    return gym.make(env_id, **kwargs)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    @torch.no_grad()
    def act(self, obs):
        return self.layer(torch.as_tensor(obs)).argmax(1).numpy()


def learn(actor, optimizer, seen):
    """A gradient step on drawn observations, with noise of torch's."""
    x = torch.from_numpy(seen[np.random.randint(len(seen), size=8)])
    loss = (actor.layer(x + torch.rand(8, 4)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"losses/loss": loss.detach()}


if __name__ == "__main__":
    args = parse(Args)
    run = Run(args)
    envs = SyncVectorEnv([lambda: make_env(args.env_id)] * args.num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    actor = Actor()
    optimizer = torch.optim.Adam(actor.parameters(), lr=0.01)
    seen, reward, done = np.zeros((32, 4), np.float32), np.zeros((2, 2)), np.zeros((2, 2), bool)
    start = run.resume(actor=actor, optimizer=optimizer, envs=envs, seen=seen)
    obs, trace = run.reset(envs), []  # trace: loop and iteration, as they came

    def end(global_step):
        """What ends the run, at its step."""
        if global_step != args.end_at:
            return
        if args.by == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if args.by == "stop":
            (run.dir / "stop").touch()
            run.ending.looked = -math.inf  # seconds: it looks rarely
        if args.by == "target":
            args.target_return, args.eval_every = 1.0, 1
            run.evaluate(global_step, actor.act, make_env)

    for iteration in run.loop(start, args.warm, last=False):  # a step is an environment step
        global_step = 4 * (iteration + 1)
        trace.append(("warm", iteration))
        for step in range(2):
            seen[global_step + 2 * step - 4 :][:2] = obs
            obs, reward[step], terminated, truncated, _ = envs.step(np.random.randint(2, size=2))
            done[step] = terminated | truncated
        run.episodes(global_step, reward, done)
        run.log(global_step, {"charts/drawn": np.random.random()})
        end(global_step)
        run.save(global_step)
        if args.breaks and iteration == 1:
            break

    for iteration in run.loop(start, args.offline, last=args.twice):  # a step is a gradient step
        global_step = 16 + 2 * (iteration + 1)
        trace.append(("offline", iteration))
        for _ in range(2):
            metrics = learn(actor, optimizer, seen)
            run.learned(metrics)
        run.log(global_step, {})
        end(global_step)
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    np.random.random()  # also in a run that is resumed later, before its random numbers are those of the checkpoint
    for iteration in run.loop(start, args.online):  # a step is an environment step
        global_step = (0 if args.falls else 16 + 2 * args.offline) + 4 * (iteration + 1)
        trace.append(("online", iteration))
        if iteration == 0:
            obs = envs.reset()[0]
        for step in range(2):
            obs, reward[step], terminated, truncated, _ = envs.step(actor.act(obs))
            done[step] = terminated | truncated
        seen[:2] = obs
        run.episodes(global_step, reward, done)
        metrics = learn(actor, optimizer, seen)
        run.learned(metrics)
        run.log(global_step, {})
        end(global_step)
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(actor.act, make_env)
