# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""PPO for simulators that step batches of tensors on one device, continuous actions, vector observations.

Paper     Schulman et al. 2017, https://arxiv.org/abs/1707.06347 ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438
Run       solo train ppo_continuous_action_batched --env-id games/TensorPendulum-v0
Spaces    vector -> continuous, batches of tensors
Differs   from ppo_continuous_action.py: rollouts are tensors that stay on the device of the simulator, and so does what
          is computed from them; settings for many environments. solorl/envs/batched.py says what a simulator needs
Not for   other environments: ppo_continuous_action.py; discrete actions: ppo.py; image observations:
          ppo_image_continuous_action.py
Details   docs/algorithms/ppo_continuous_action_batched.md
"""

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_kind = "batched"  # simulators that step batches of tensors
    env_id: str = "games/TensorPendulum-v0"  # id of the simulator, one of your own: module:Name-v0
    total_timesteps: int = 200_000  # environment steps, summed over environments
    num_envs: int = 64  # environments stepped in parallel
    num_steps: int = 32  # length of a rollout in each environment
    num_minibatches: int = 16  # minibatches per epoch
    update_epochs: int = 10  # epochs per rollout
    learning_rate: float = 3e-4  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 1.0  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.95  # discount factor, from 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE (0: TD(0), 1: Monte Carlo), from 0 to 1
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # epsilon of Eq. 7
    clip_vloss: bool = False  # also clip how far a value moves from the old one, by clip_coef; not in the paper
    vf_coef: float = 2.0  # c1 of Eq. 9, whose L^VF is halved here, as in the authors' code
    ent_coef: float = 0.0  # c2 of Eq. 9
    std_init: float = 1.0  # standard deviation of the policy at the start, in the units of the actions
    target_kl: float | None = None  # stop the epochs of a rollout after one whose mean approx_kl is above this


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    action: torch.Tensor  # (batch_size, action_dim)
    logprob: torch.Tensor  # (batch_size,), like all that follow
    value: torch.Tensor
    advantage: torch.Tensor
    returns: torch.Tensor


def make_envs(env_id, num_envs, device, **kwargs):
    """A simulator for training; it clips actions to its bounds."""
    return gym.make_vec(env_id, num_envs, "vector_entry_point", device=str(device), **kwargs)


class InNumpy(gym.vector.VectorWrapper):
    """A simulator with NumPy arrays in the place of tensors."""

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=seed, options=options)[0].cpu().numpy(), {}

    def step(self, actions):
        *arrays, infos = self.env.step(torch.as_tensor(actions, device=self.env.device))
        return *(x.cpu().numpy() for x in arrays), {"next_obs": infos["next_obs"].cpu().numpy()}


def make_numpy_envs(env_id, num_envs, device, **kwargs):
    """Another one, for evaluation."""
    return InNumpy(make_envs(env_id, num_envs, device, **kwargs))


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


class TensorMeanStd(nn.Module):
    """Mean and variance of all that was seen, by Eq. 2.1 of Chan et al. 1979; in float32, on the device."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.zeros(()))

    def update(self, x):  # (n, *shape)
        self.count += len(x)
        weight, delta = len(x) / self.count, x.mean(0) - self.mean
        self.var += weight * (x.var(0, correction=0) - self.var + (1 - weight) * delta**2)
        self.mean += weight * delta

    def scale(self, x):  # (n, *shape) -> (n, *shape)
        return (x / (self.var + 1e-8).sqrt()).clamp(-10, 10)

    def forward(self, x):  # (n, *shape) -> (n, *shape)
        return self.scale(x - self.mean)


class Agent(nn.Module):
    """Two networks of normalised observations; only `act` takes raw ones."""

    def __init__(self, obs_dim, action_dim, std):
        super().__init__()
        self.obs_normalizer, self.return_normalizer = TensorMeanStd(obs_dim), TensorMeanStd()
        self.actor = tanh_mlp(obs_dim, 256, 256, action_dim, gain=0.01)  # the mean of a Gaussian
        self.log_std = nn.Parameter(torch.full((action_dim,), math.log(std)))
        self.critic = tanh_mlp(obs_dim, 256, 256, 1, gain=1.0)

    def forward(self, obs):  # (batch, obs_dim) -> means (batch, action_dim), values (batch,)
        return self.actor(obs), self.critic(obs).squeeze(-1)

    def evaluate_actions(self, obs, action):  # two (batch, width) -> log-probabilities, entropies, values, all (batch,)
        mean, value = self(obs)
        noise = (action - mean) / self.log_std.exp()
        logprobs = -0.5 * noise**2 - self.log_std - 0.5 * math.log(2 * math.pi)
        entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return logprobs.sum(-1), entropy.expand(len(obs)), value

    @torch.no_grad()
    def sample(self, obs):  # (batch, obs_dim) -> actions (batch, action_dim), log-probabilities, values (batch,)
        mean, value = self(obs)
        noise = torch.randn_like(mean)
        logprobs = -0.5 * noise**2 - self.log_std - 0.5 * math.log(2 * math.pi)
        return mean + self.log_std.exp() * noise, logprobs.sum(-1), value

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim): the mean actions
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.actor[0].weight.device).flatten(1)
        return self.actor(self.obs_normalizer(obs)).cpu().numpy()


def tensor_returns(reward, done, so_far, gamma):
    """Sum of the rewards of an episode up to each step, earlier ones discounted. Tensors, both (num_steps, num_envs).

    so_far (num_envs,): the same up to the step before the first, 0 where an episode begins; its new value is returned.
    """
    returns = torch.zeros_like(reward)
    for t in range(len(reward)):
        returns[t] = gamma * so_far + reward[t]
        so_far = returns[t] * (1 - done[t])
    return returns, so_far


def tensor_gae(reward, value, done, final_value, next_value, gamma, lam):
    """Advantages by Eq. 11-12. Tensors, all (num_steps, num_envs) except next_value (num_envs,).

    next_value: value of the observation after the last step. done[t]: the return ends with step t. final_value[t]: if
    a time limit ended the episode, the value of its final observation, else 0.
    """
    assert reward.shape == value.shape == done.shape == final_value.shape and next_value.shape == reward.shape[1:]
    advantage, next_advantage = torch.zeros_like(reward), torch.zeros_like(next_value)
    for t in reversed(range(len(reward))):
        bootstrap = (1 - done[t]) * next_value + final_value[t]
        delta = reward[t] + gamma * bootstrap - value[t]  # Eq. 12
        next_advantage = advantage[t] = delta + gamma * lam * (1 - done[t]) * next_advantage  # Eq. 11
        next_value = value[t]
    return advantage


def ppo_loss(agent, batch, args):
    """The negative of Eq. 9, and the metrics."""
    logprob, entropy, value = agent.evaluate_actions(batch.obs, batch.action)
    assert logprob.shape == entropy.shape == value.shape == batch.advantage.shape

    # L^CLIP, Eq. 7
    logratio = logprob - batch.logprob
    ratio = logratio.exp()
    advantage = batch.advantage
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    objective = torch.min(ratio * advantage, clipped_ratio * advantage).mean()

    # L^VF; with --clip-vloss the larger of two errors: of the value, and of the value clipped around the old one
    error = (value - batch.returns) ** 2
    if args.clip_vloss:
        clipped_value = batch.value + (value - batch.value).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, (clipped_value - batch.returns) ** 2)
    value_loss = 0.5 * error.mean()

    loss = -(objective - args.vf_coef * value_loss + args.ent_coef * entropy.mean())  # Eq. 9
    with torch.no_grad():
        metrics = {
            "losses/value_loss": value_loss,
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
    envs = make_envs(args.env_id, args.num_envs, run.device)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="vector", action="continuous")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    run.require(args.std_init > 0, f"--std-init {args.std_init} must be above 0")
    first = envs.reset(seed=0)[0]  # to look at; run.reset below has seeds of its own
    fits = torch.is_tensor(first) and first.device.type == run.device.type and len(first) == args.num_envs
    run.require(fits, f"{args.env_id} must give the observations of all environments as one tensor on {run.device}")
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), envs.single_action_space.shape[0]

    agent = Agent(obs_dim, action_dim, args.std_init).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on ppo_loss(agent, *inputs); returns its metrics
    gradient_step = run.gradient_step(ppo_loss, agent, optimizer, args.max_grad_norm)
    normalize = agent.obs_normalizer
    # so_far: discounted rewards of the running episodes
    now = SimpleNamespace(so_far=torch.zeros(args.num_envs, device=run.device))
    start = run.resume(agent=agent, optimizer=optimizer, now=now, envs=envs)  # what a checkpoint holds
    now.so_far[run.restarted] = 0  # episodes that a resume could not continue
    make_eval_envs = partial(make_numpy_envs, device=run.device)

    # ---- storage of one rollout
    shape = (args.num_steps, args.num_envs)
    tensor = partial(torch.zeros, device=run.device)
    raw_obs, obs, final_obs = (tensor(*shape, obs_dim) for _ in range(3))  # the second one normalised
    action, timeout = tensor(*shape, action_dim), tensor(*shape, dtype=torch.bool)
    logprob, value, reward, done = (tensor(*shape) for _ in range(4))

    next_obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
        for step in range(args.num_steps):
            raw_obs[step] = next_obs.flatten(1)
            obs[step] = normalize(raw_obs[step])
            action[step], logprob[step], value[step] = agent.sample(obs[step])
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step], timeout[step] = terminated | truncated, truncated & ~terminated
            final_obs[step] = infos["next_obs"].flatten(1)  # what the step led to, also where an episode ended
        run.episodes(global_step, reward.cpu().numpy(), done.cpu().numpy())  # the only arrays copied to the CPU

        # ---- 2. credit: rewards in units of the standard deviation of the returns
        returns, now.so_far = tensor_returns(reward, done, now.so_far, args.gamma)
        agent.return_normalizer.update(returns.flatten())
        scaled_reward = agent.return_normalizer.scale(reward)

        # "compute advantage estimates"
        with torch.no_grad():
            _, next_value = agent(normalize(next_obs.flatten(1)))
            final_value = torch.zeros_like(value)
            if timeout.any():  # a time limit does not end the task: bootstrap from the value of the final observation
                final_value[timeout] = agent(normalize(final_obs[timeout]))[1]
        advantage = tensor_gae(scaled_reward, value, done, final_value, next_value, args.gamma, args.gae_lambda)
        rollout = Batch(*(x.flatten(0, 1) for x in (obs, action, logprob, value, advantage, advantage + value)))

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
        agent.obs_normalizer.update(raw_obs.flatten(0, 1))

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        explained_variance = 1 - rollout.advantage.var() / (rollout.returns.var() + 1e-8)  # advantage: returns - value
        learning_rate = optimizer.param_groups[0]["lr"]
        run.log(global_step, {"charts/learning_rate": learning_rate, "losses/explained_variance": explained_variance})
        run.evaluate(global_step, agent.act, make_eval_envs)
        run.save(global_step)

    envs.close()
    run.close(agent.act, make_eval_envs)  # a last evaluation; `solo play` takes this policy
