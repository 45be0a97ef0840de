# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Augmented random search (ARS), continuous actions, vector observations: a linear policy, no gradients.

Paper     Mania et al. 2018, https://arxiv.org/abs/1803.07055 (Algorithm 2: V2, V2-t where num_top < num_directions)
Run       solo train ars --env-id Swimmer-v5
Spaces    vector -> continuous
Differs   from ppo_continuous_action.py: a linear policy, moved along random directions by the returns of episodes;
          no value, no gradient. Normalised observations are clipped to 10, in the paper they are not
Not for   discrete actions: ppo.py; image observations: ppo_image.py
Details   docs/algorithms/ars.md
"""

from dataclasses import dataclass
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from gymnasium.wrappers import ClipAction

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "Swimmer-v5"  # Gymnasium id of the environment
    total_timesteps: int = 2_000_000  # environment steps
    num_directions: int = 8  # N, random directions in each iteration, two episodes for each
    num_top: int = 8  # b, directions that are used: those whose better return is highest
    learning_rate: float = 0.02  # alpha
    noise_std: float = 0.03  # nu, how far the two policies of a direction are from the current one
    reward_shift: float = 0.0  # subtracted from every reward: 1 where surviving a step is rewarded with 1


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation; it clips actions to its bounds."""
    env = gym.make(env_id, **kwargs)
    return ClipAction(env) if isinstance(env.action_space, gym.spaces.Box) else env  # others will be refused


class RunningMeanStd(nn.Module):
    """Mean and variance of all that was seen, by Eq. 2.1 of Chan et al. 1979: on the host in float64, so that small
    differences of large numbers count."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def _apply(self, function, recurse=True):  # what `to(device)` calls: the statistics stay where they are
        return self

    def update(self, x):  # NumPy (n, *shape)
        x = torch.as_tensor(x, dtype=torch.float64)
        self.count += len(x)
        weight, delta = len(x) / self.count, x.mean(0) - self.mean
        self.var += weight * (x.var(0, correction=0) - self.var + (1 - weight) * delta**2)
        self.mean += weight * delta

    def scale(self, x):  # NumPy (n, *shape) -> NumPy (n, *shape)
        return (x / (self.var.numpy() + 1e-16) ** 0.5).clip(-10, 10)

    def forward(self, x):  # NumPy (n, *shape) -> NumPy (n, *shape)
        return self.scale(x - self.mean.numpy())


class Agent(nn.Module):
    """A linear policy of normalised observations."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.obs_normalizer = RunningMeanStd(obs_dim)  # of all states before this iteration
        self.seen = RunningMeanStd(obs_dim)  # of all states so far: the next obs_normalizer
        self.register_buffer("weight", torch.zeros(action_dim, obs_dim, dtype=torch.float64))  # M

    def _apply(self, function, recurse=True):  # what `to(device)` calls: all is NumPy, on the host
        return self

    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim)
        obs = torch.as_tensor(self.obs_normalizer(obs.reshape(obs.shape[0], -1)))
        return (obs @ self.weight.T).to(torch.float32).numpy()


def update_direction(returns, noise, num_top):
    """The sum of Algorithm 2, line 7, before the learning rate. NumPy, returns (num_directions, 2): of the policies at
    +noise and -noise; noise (num_directions, *shape) -> (*shape)."""
    best = np.argsort(-returns.max(1), kind="stable")[:num_top]  # line 6
    std = returns[best].std()  # sigma_R, of the 2b returns that are used
    steps = np.tensordot(returns[best, 0] - returns[best, 1], noise[best], 1)
    return steps / (num_top * (std + 1e-8))  # 1e-8: equal returns move nothing


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, 1)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="vector", action="continuous")
    fits = 1 <= args.num_top <= args.num_directions
    run.require(fits, f"--num-top {args.num_top} must be from 1 to --num-directions {args.num_directions}")
    run.require(args.noise_std > 0, f"--noise-std {args.noise_std} must be above 0")
    num_iterations = run.iterations(1)  # steps of the environment; Algorithm 2's iterations are 2N episodes
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), envs.single_action_space.shape[0]

    agent = Agent(obs_dim, action_dim).to(run.device)
    now = SimpleNamespace(
        noise=np.random.standard_normal((args.num_directions, action_dim, obs_dim)),  # delta, the directions
        returns=np.zeros((args.num_directions, 2)),  # of the policies at +delta and -delta
        episode=0,  # of 2N, which of these policies plays
        so_far=np.zeros(1),  # return of the running episode
    )
    start = run.resume(agent=agent, now=now, envs=envs)  # what a checkpoint holds
    now.so_far[run.restarted] = 0  # an episode that a resume could not continue

    obs = run.reset(envs)  # (1, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = iteration + 1

        # ---- 1. act: one episode with each of the 2N policies (Algorithm 2, lines 4 and 5)
        direction, side = divmod(now.episode, 2)
        weight = agent.weight.numpy() + (args.noise_std if side == 0 else -args.noise_std) * now.noise[direction]
        agent.seen.update(obs.reshape(1, obs_dim))
        action = agent.obs_normalizer(obs.reshape(1, obs_dim)) @ weight.T
        obs, reward, terminated, truncated, _ = envs.step(action.astype(np.float32))
        done = terminated | truncated
        run.episodes(global_step, reward, done)

        # ---- 2. credit: the return of a policy is that of its episode
        now.so_far += reward - args.reward_shift
        if done[0]:
            now.returns[direction, side], now.so_far[:] = now.so_far[0], 0.0
            now.episode += 1

        # ---- 3. learn: a step along the directions, better ones further; then the statistics of all states
        if now.episode == 2 * args.num_directions:
            step = args.learning_rate * torch.from_numpy(update_direction(now.returns, now.noise, args.num_top))
            agent.weight += step
            agent.obs_normalizer.load_state_dict(agent.seen.state_dict())
            now.noise, now.episode = np.random.standard_normal(now.noise.shape), 0
            run.learned({"losses/update_norm": step.norm(), "losses/returns_std": torch.tensor(now.returns.std())})

        # ---- 4. report, when due: a row has the means of the metrics of all updates since the last row
        run.log(global_step, {"charts/learning_rate": args.learning_rate})
        run.evaluate(global_step, agent.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(agent.act, make_env)  # a last evaluation; `solo play` takes this policy
