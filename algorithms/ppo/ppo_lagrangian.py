# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""PPO-Lagrangian: as much return as a limit on costs allows; continuous actions, vector observations.

Paper     Ray et al. 2019, https://cdn.openai.com/safexp-short.pdf; PPO: Schulman et al. 2017,
          https://arxiv.org/abs/1707.06347 ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438
Run       solo train ppo_lagrangian --env-id HalfCheetah-v5
Spaces    vector -> continuous, with costs
Differs   from ppo_continuous_action.py: a value of costs, whose advantage counts against that of rewards; its weight,
          the multiplier, grows while episodes cost more than --cost-limit. Costs are info["cost"] of each step
Not for   discrete actions: ppo.py; tasks without costs: ppo_continuous_action.py; image observations
Details   docs/algorithms/ppo_lagrangian.md
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from gymnasium.wrappers import ClipAction

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "HalfCheetah-v5"  # Gymnasium id of the environment
    total_timesteps: int = 1_000_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    num_steps: int = 2048  # length of a rollout in each environment
    num_minibatches: int = 32  # minibatches per epoch
    update_epochs: int = 10  # epochs per rollout
    learning_rate: float = 3e-4  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 0.5  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE (0: TD(0), 1: Monte Carlo), from 0 to 1
    clip_coef: float = 0.2  # epsilon of Eq. 7
    clip_vloss: bool = True  # also clip how far a value moves from the old one, by clip_coef; not in the paper
    vf_coef: float = 0.5  # c1 of Eq. 9, whose L^VF is halved here, as in the authors' code
    ent_coef: float = 0.0  # c2 of Eq. 9
    std_init: float = 1.0  # standard deviation of the policy at the start, in the units of the actions
    cost_limit: float = 25.0  # largest mean cost of an episode (d), a sum without discount
    multiplier_learning_rate: float = 0.035  # learning rate of Adam for the multiplier
    multiplier_init: float = 0.001  # multiplier (lambda) at the start
    target_kl: float | None = None  # stop the epochs of a rollout after one whose mean approx_kl is above this


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    action: torch.Tensor  # (batch_size, action_dim)
    logprob: torch.Tensor  # (batch_size,), like all that follow
    value: torch.Tensor
    advantage: torch.Tensor
    returns: torch.Tensor
    cost_value: torch.Tensor
    cost_returns: torch.Tensor


# Speeds above which a step costs 1, half of those of trained agents (Ji et al. 2023, arXiv:2310.12567)
SPEED_LIMITS = {
    "Ant": 2.6222, "HalfCheetah": 3.2096, "Hopper": 0.7402, "Humanoid": 1.4149, "Swimmer": 0.2282, "Walker2d": 2.3415
}  # fmt: skip


class SpeedLimit(gym.Wrapper):
    """A step costs 1 where a robot of MuJoCo is faster than the limit: forwards, Ant and Humanoid in any direction."""

    def __init__(self, env, robot):
        super().__init__(env)
        self.limit, self.any_direction = SPEED_LIMITS[robot], robot in ("Ant", "Humanoid")

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        speed = math.hypot(info["x_velocity"], info["y_velocity"]) if self.any_direction else info["x_velocity"]
        return obs, reward, terminated, truncated, info | {"cost": float(speed > self.limit)}


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation; it clips actions to its bounds. Robots get a speed limit."""
    env = gym.make(env_id, **kwargs)
    robot = env_id.partition("-")[0]
    env = SpeedLimit(env, robot) if robot in SPEED_LIMITS else env
    return ClipAction(env) if isinstance(env.action_space, gym.spaces.Box) else env  # others will be refused


def tanh_mlp(*sizes, gain):
    """Linear layers with tanh between them, orthogonal weights and zero biases; `gain` is that of the last layer."""
    layers = []
    for fan_in, fan_out in pairwise(sizes):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(linear.weight, 2**0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    nn.init.orthogonal_(linear.weight, gain)  # the last layer again
    return nn.Sequential(*layers[:-1])


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
    """Three networks of normalised observations; only `act` takes raw ones."""

    def __init__(self, obs_dim, action_dim, std):
        super().__init__()
        self.obs_normalizer = RunningMeanStd(obs_dim)
        self.return_normalizer, self.cost_normalizer = RunningMeanStd(), RunningMeanStd()
        self.actor = tanh_mlp(obs_dim, 64, 64, action_dim, gain=0.01)  # the mean of a Gaussian
        self.log_std = nn.Parameter(torch.full((action_dim,), math.log(std)))
        self.critic = tanh_mlp(obs_dim, 64, 64, 1, gain=1.0)
        self.cost_critic = tanh_mlp(obs_dim, 64, 64, 1, gain=1.0)

    def forward(self, obs):  # (batch, obs_dim) -> means (batch, action_dim), values of rewards and of costs (batch,)
        return self.actor(obs), self.critic(obs).squeeze(-1), self.cost_critic(obs).squeeze(-1)

    def evaluate_actions(self, obs, action):  # two (batch, width) -> logprobs, entropies, two values, all (batch,)
        mean, value, cost_value = self(obs)
        noise = (action - mean) / self.log_std.exp()
        logprobs = -0.5 * noise**2 - self.log_std - 0.5 * math.log(2 * math.pi)
        entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return logprobs.sum(-1), entropy.expand(len(obs)), value, cost_value

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim): the mean actions
        obs = self.obs_normalizer(obs.reshape(obs.shape[0], -1))
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.actor[0].weight.device)
        return self.actor(obs).cpu().numpy()


def sample_gaussian(mean, log_std):
    """Actions drawn from a diagonal Gaussian, and their log-probabilities. NumPy, mean (batch, action_dim), log_std
    (action_dim,) -> (batch, action_dim), (batch,)."""
    noise = np.random.standard_normal(mean.shape).astype(np.float32)
    logprobs = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    return mean + np.exp(log_std) * noise, logprobs.sum(-1)


def discounted_returns(reward, done, so_far, gamma):
    """Sum of the rewards of an episode up to each step, earlier ones discounted. NumPy, both (num_steps, num_envs).

    so_far (num_envs,): the same up to the step before the first, 0 where an episode begins; its new value is returned.
    """
    returns = np.zeros_like(reward)
    for t in range(len(reward)):
        returns[t] = gamma * so_far + reward[t]
        so_far = returns[t] * (1 - done[t])
    return returns, so_far


def gae(reward, value, done, final_value, next_value, gamma, lam):
    """Advantages by Eq. 11-12. NumPy, all (num_steps, num_envs) except next_value (num_envs,).

    next_value: value of the observation after the last step. done[t]: the return ends with step t. final_value[t]: if
    a time limit ended the episode, the value of its final observation, else 0.
    """
    assert reward.shape == value.shape == done.shape == final_value.shape and next_value.shape == reward.shape[1:]
    advantage, next_advantage = np.zeros_like(reward), np.zeros_like(next_value)
    for t in reversed(range(len(reward))):
        bootstrap = (1 - done[t]) * next_value + final_value[t]
        delta = reward[t] + gamma * bootstrap - value[t]  # Eq. 12
        next_advantage = advantage[t] = delta + gamma * lam * (1 - done[t]) * next_advantage  # Eq. 11
        next_value = value[t]
    return advantage


class Multiplier(nn.Module):
    """lambda, what a unit of cost weighs."""

    def __init__(self, value):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))


def multiplier_loss(multiplier, excess):
    """Ascent on lambda (J_c - d); `excess` () is how much more the episodes cost in the mean than allowed."""
    loss = -multiplier.value * excess
    return loss, {"losses/multiplier_loss": loss}


def penalized_advantage(advantage, cost_advantage, multiplier):
    """What the policy maximises: the advantage of rewards, standardised, less that of costs, in their units and
    centred, times the multiplier; divided by 1 + multiplier, so that its size stays. NumPy, both of one shape."""
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return (advantage - multiplier * (cost_advantage - cost_advantage.mean())) / (1 + multiplier)


def clipped_error(value, old_value, returns, args):
    """Half of the mean squared error of values; with --clip-vloss the larger of two errors: of the value, and of the
    value clipped around the old one. All (batch,)."""
    error = (value - returns) ** 2
    if args.clip_vloss:
        clipped_value = old_value + (value - old_value).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, (clipped_value - returns) ** 2)
    return 0.5 * error.mean()


def ppo_lagrangian_loss(agent, batch, args):
    """The negative of Eq. 9 with the values of costs in addition, and the metrics."""
    logprob, entropy, value, cost_value = agent.evaluate_actions(batch.obs, batch.action)
    assert logprob.shape == entropy.shape == value.shape == cost_value.shape == batch.advantage.shape

    # L^CLIP, Eq. 7
    logratio = logprob - batch.logprob
    ratio = logratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    objective = torch.min(ratio * batch.advantage, clipped_ratio * batch.advantage).mean()

    value_loss = clipped_error(value, batch.value, batch.returns, args)  # L^VF
    cost_value_loss = clipped_error(cost_value, batch.cost_value, batch.cost_returns, args)
    loss = -(objective - args.vf_coef * (value_loss + cost_value_loss) + args.ent_coef * entropy.mean())  # Eq. 9
    with torch.no_grad():
        metrics = {
            "losses/value_loss": value_loss,
            "losses/cost_value_loss": cost_value_loss,
            "losses/policy_loss": -objective,
            "losses/entropy": entropy.mean(),
            "losses/old_approx_kl": -logratio.mean(),
            "losses/approx_kl": (ratio - 1 - logratio).mean(),  # k3 of http://joschu.net/blog/kl-approx.html
            "losses/clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean(),
        }
    return loss, metrics


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, args.num_envs)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="vector", action="continuous")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    run.require(args.std_init > 0, f"--std-init {args.std_init} must be above 0")
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), envs.single_action_space.shape[0]

    agent = Agent(obs_dim, action_dim, args.std_init).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on ppo_lagrangian_loss(agent, *inputs); returns its metrics
    gradient_step = run.gradient_step(ppo_lagrangian_loss, agent, optimizer, args.max_grad_norm)
    policy = run.fast(agent)  # NumPy, current weights: (batch, obs_dim) -> means (batch, action_dim), 2 values (batch,)
    multiplier = Multiplier(args.multiplier_init).to(run.device)
    multiplier_optimizer = torch.optim.Adam(multiplier.parameters(), lr=args.multiplier_learning_rate)
    multiplier_step = run.gradient_step(multiplier_loss, multiplier, multiplier_optimizer)
    normalize = agent.obs_normalizer  # NumPy (batch, obs_dim) -> NumPy (batch, obs_dim)
    now = SimpleNamespace(
        so_far=np.zeros(args.num_envs, np.float32),  # discounted rewards of the running episodes
        cost_so_far=np.zeros(args.num_envs, np.float32),  # their discounted costs
        cost=np.zeros(args.num_envs, np.float32),  # their costs, a sum without discount
        costs=np.zeros(100),  # of the last episodes, the newest last
        num_episodes=0,
    )
    # what a checkpoint holds
    parts = dict(agent=agent, optimizer=optimizer, multiplier=multiplier, multiplier_optimizer=multiplier_optimizer)
    start = run.resume(**parts, now=now, envs=envs)
    for x in (now.so_far, now.cost_so_far, now.cost):
        x[run.restarted] = 0  # episodes that a resume could not continue

    # ---- storage of one rollout
    shape = (args.num_steps, args.num_envs)
    raw_obs = np.zeros((*shape, obs_dim))
    obs, final_obs = (np.zeros((*shape, obs_dim), np.float32) for _ in range(2))  # normalised
    action, timeout = np.zeros((*shape, action_dim), np.float32), np.zeros(shape, bool)
    logprob, value, reward, done, cost, cost_value = (np.zeros(shape, np.float32) for _ in range(6))

    next_obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
        log_std = agent.log_std.detach().cpu().numpy()
        for step in range(args.num_steps):
            raw_obs[step] = next_obs.reshape(args.num_envs, obs_dim)
            obs[step] = normalize(raw_obs[step])
            mean, value[step], cost_value[step] = policy(obs[step])
            action[step], logprob[step] = sample_gaussian(mean, log_std)
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step], timeout[step] = terminated | truncated, truncated & ~terminated
            final_obs[step] = normalize(infos["next_obs"].reshape(args.num_envs, obs_dim))  # where the step led
            run.require("next_cost" in infos, f"{args.env_id} must give a cost: a number info['cost'] in each step")
            cost[step] = infos["next_cost"]  # info["cost"] of this step, as next_obs also where an episode ended
        run.episodes(global_step, reward, done)

        # ---- 2. credit: rewards in units of the standard deviation of the returns, costs likewise
        returns, now.so_far = discounted_returns(reward, done, now.so_far, args.gamma)
        agent.return_normalizer.update(returns.flatten())
        scaled_reward = agent.return_normalizer.scale(reward).astype(np.float32)
        returns, now.cost_so_far = discounted_returns(cost, done, now.cost_so_far, args.gamma)
        agent.cost_normalizer.update(returns.flatten())
        cost_std = (agent.cost_normalizer.var.numpy() + 1e-16) ** 0.5
        scaled_cost = (cost / cost_std).astype(np.float32)  # not clipped: a rare cost counts whole

        # "compute advantage estimates", of rewards and of costs
        _, next_value, next_cost_value = policy(normalize(next_obs.reshape(args.num_envs, obs_dim)))
        final_value, final_cost_value = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        if timeout.any():  # a time limit does not end the task: bootstrap from the value of the final observation
            _, final_value[timeout], final_cost_value[timeout] = policy(final_obs[timeout])
        advantage = gae(scaled_reward, value, done, final_value, next_value, args.gamma, args.gae_lambda)
        values = (cost_value, done, final_cost_value, next_cost_value)
        cost_advantage = gae(scaled_cost, *values, args.gamma, args.gae_lambda)

        # before the policy learns: the multiplier grows where the rollout's episodes cost more than allowed
        so_far, now.cost = discounted_returns(cost, done, now.cost, 1.0)  # up to each step, without discount
        episodic_cost = so_far[done > 0]  # of the episodes that have ended, in the order of their ends
        if episodic_cost.size:
            excess = torch.tensor(episodic_cost.mean() - args.cost_limit, dtype=torch.float32, device=run.device)
            run.learned(multiplier_step(excess))
            multiplier.value.data.clamp_(min=0)
        now.costs = np.concatenate([now.costs, episodic_cost])[-100:]
        now.num_episodes += episodic_cost.size
        raw_cost_advantage = agent.cost_normalizer.var.sqrt().item() * cost_advantage  # the multiplier weighs raw costs
        penalized = penalized_advantage(advantage, raw_cost_advantage, multiplier.value.item())
        rollout = (obs, action, logprob, value, penalized, advantage + value, cost_value, cost_advantage + cost_value)
        rollout = Batch(*(torch.as_tensor(x, device=run.device).flatten(0, 1) for x in rollout))

        # ---- 3. learn: "optimize surrogate L wrt theta, with K epochs and minibatch size M <= NT"
        for epoch in range(args.update_epochs):
            kl = []
            for index in torch.randperm(batch_size, device=run.device).split(minibatch_size):
                metrics = gradient_step(Batch(*(x[index] for x in rollout)), args)
                run.learned(metrics)
                kl.append(metrics["losses/approx_kl"])
            if args.target_kl is not None and torch.stack(kl).mean() > args.target_kl:
                break

        # the statistics of observations change only now: learning saw the same observations as acting
        agent.obs_normalizer.update(raw_obs.reshape(batch_size, obs_dim))

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        explained_variance = 1 - advantage.var() / ((advantage + value).var() + 1e-8)  # advantage: returns - value
        learning_rate = optimizer.param_groups[0]["lr"]
        metrics = {"charts/learning_rate": learning_rate, "losses/explained_variance": explained_variance}
        if now.num_episodes:
            metrics["charts/episodic_cost"] = now.costs[-min(now.num_episodes, 100) :].mean()
        run.log(global_step, metrics | {"losses/multiplier": multiplier.value.item()})
        run.evaluate(global_step, agent.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(agent.act, make_env)  # a last evaluation; `solo play` takes this policy
