# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Proximal policy optimisation (PPO), actions of several numbers (MultiDiscrete), vector observations.

Paper     Schulman et al. 2017, https://arxiv.org/abs/1707.06347 ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438
Run       solo train ppo_multidiscrete --env-id games/TwoNumbers-v0
Spaces    vector -> multidiscrete
Differs   from ppo.py: an action has several parts, each with a categorical distribution; switches and integers are
          parts too; masks where there are any
Not for   discrete actions: ppo.py; continuous actions: ppo_continuous_action.py; images
Details   docs/algorithms/ppo_multidiscrete.md
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "games/TwoNumbers-v0"  # Gymnasium id of the environment
    total_timesteps: int = 500_000  # environment steps, summed over environments
    num_envs: int = 4  # environments stepped in parallel
    num_steps: int = 128  # length of a rollout in each environment
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 10  # epochs per rollout
    learning_rate: float = 1e-3  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 0.5  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE (0: TD(0), 1: Monte Carlo), from 0 to 1
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # epsilon of Eq. 7
    clip_vloss: bool = True  # also clip how far a value moves from the old one, by clip_coef; not in the paper
    vf_coef: float = 0.5  # c1 of Eq. 9, whose L^VF is halved here, as in the authors' code
    ent_coef: float = 0.01  # c2 of Eq. 9
    target_kl: float | None = None  # stop the epochs of a rollout after one whose mean approx_kl is above this


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    mask: torch.Tensor  # (batch_size, sum of sizes) bool, True: valid
    action: torch.Tensor  # (batch_size, num_parts)
    logprob: torch.Tensor  # (batch_size,), like all that follow
    value: torch.Tensor
    advantage: torch.Tensor
    returns: torch.Tensor


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation; its actions are a row of choices that count from 0, also if
    their space is MultiBinary, a small box of integers, or a MultiDiscrete that starts elsewhere."""
    env = gym.make(env_id, **kwargs)
    space = env.action_space
    if isinstance(space, gym.spaces.MultiBinary):
        low, high = np.zeros(space.shape), np.ones(space.shape)
    elif isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.integer):
        low, high = space.low, space.high.astype(float)
    elif isinstance(space, gym.spaces.MultiDiscrete) and np.any(space.start):
        low, high = space.start, space.start + space.nvec - 1.0
    else:
        return env
    sizes = (high - low + 1).flatten()
    if sizes.max() > 1_000:  # too many to choose from
        return env
    choices = gym.spaces.MultiDiscrete(sizes.astype(np.int64))
    to_space = lambda action: (low + action.reshape(space.shape)).astype(space.dtype)  # noqa: E731
    return gym.wrappers.TransformAction(env, to_space, choices)


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


class Agent(nn.Module):
    def __init__(self, obs_dim, sizes):  # sizes: number of choices of each part of an action
        super().__init__()
        self.sizes = tuple(sizes)
        self.actor = tanh_mlp(obs_dim, 64, 64, sum(sizes), gain=0.01)
        self.critic = tanh_mlp(obs_dim, 64, 64, 1, gain=1.0)

    def forward(self, obs):  # (batch, obs_dim) -> logits (batch, sum of sizes), values (batch,)
        return self.actor(obs), self.critic(obs).squeeze(-1)

    def evaluate_actions(self, obs, mask, action):
        """Log-probabilities, entropies, values: (batch,) each, of obs (batch, obs_dim), mask (batch, sum of sizes) and
        action (batch, num_parts). The parts are independent: log-probabilities and entropies add up."""
        logits, value = self(obs)
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)  # probability and gradient are exactly 0
        logprob, entropy = torch.zeros_like(value), torch.zeros_like(value)
        for i, part in enumerate(logits.split(self.sizes, 1)):
            logprobs = part.log_softmax(-1)
            entropy = entropy - (logprobs.exp() * logprobs).sum(-1)
            logprob = logprob + logprobs.gather(1, action[:, i, None]).squeeze(1)
        return logprob, entropy, value

    @torch.no_grad()
    def act(self, obs, action_mask=None):
        """The most likely valid actions. NumPy (batch, *obs_shape), (batch, sum of sizes) -> (batch, num_parts)."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.actor[0].weight.device).flatten(1)
        logits = self.actor(obs).cpu().numpy()
        logits = logits if action_mask is None else allowed_logits(logits, action_mask)
        return np.stack([part.argmax(1) for part in split(logits, self.sizes)], 1)


def split(x, sizes):
    """Columns (batch, sum of sizes) as one array (batch, size) for each part of an action. NumPy."""
    return np.split(x, np.cumsum(sizes)[:-1], 1)


def allowed_logits(logits, mask):
    """The logits, those of actions that are not allowed so low that softmax gives 0. NumPy, (batch, num_actions)."""
    return np.where(mask, logits, np.finfo(np.float32).min)


def sample_categorical(logits):
    """Actions drawn from softmax(logits), and their log-probabilities. NumPy, (batch, num_actions) -> (batch,) each."""
    action = (logits + np.random.gumbel(size=logits.shape)).argmax(1)  # the Gumbel-max trick
    logits = logits - logits.max(1, keepdims=True)  # so that exp does not overflow
    return action, logits[np.arange(len(action)), action] - np.log(np.exp(logits).sum(1))


def sample_parts(logits, sizes):
    """Actions of several parts and their log-probabilities. NumPy, (batch, sum of sizes) -> (batch, num_parts) and
    (batch,)."""
    actions, logprobs = zip(*(sample_categorical(part) for part in split(logits, sizes)), strict=True)
    return np.stack(actions, 1), sum(logprobs)


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


def ppo_masked_loss(agent, batch, args):
    """The negative of Eq. 9, and the metrics."""
    logprob, entropy, value = agent.evaluate_actions(batch.obs, batch.mask, batch.action)
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
    envs = run.vector_env(make_env, args.env_id, args.num_envs)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="vector", action="multidiscrete")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    obs_dim = int(np.prod(envs.single_observation_space.shape))
    nvec = envs.single_action_space.nvec
    run.require(nvec.ndim == 1, f"{args.env_id} has actions of shape {nvec.shape}; make them one row of numbers")
    sizes = nvec.tolist()

    agent = Agent(obs_dim, sizes).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on ppo_masked_loss(agent, *inputs); returns its metrics
    gradient_step = run.gradient_step(ppo_masked_loss, agent, optimizer, args.max_grad_norm)
    policy = run.fast(agent)  # the agent in NumPy: (batch, obs_dim) -> logits (batch, sum of sizes), values (batch,)
    start = run.resume(agent=agent, optimizer=optimizer, envs=envs)  # what a checkpoint holds

    # ---- storage of one rollout
    shape = (args.num_steps, args.num_envs)
    obs, final_obs = (np.zeros((*shape, obs_dim), np.float32) for _ in range(2))
    mask = np.ones((*shape, sum(sizes)), bool)  # all that is valid where the environment gives no masks
    action, timeout = np.zeros((*shape, len(sizes)), np.int64), np.zeros(shape, bool)
    logprob, value, reward, done = (np.zeros(shape, np.float32) for _ in range(4))

    next_obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
        for step in range(args.num_steps):
            obs[step] = next_obs.reshape(args.num_envs, obs_dim)
            mask[step] = True if envs.action_mask is None else envs.action_mask
            some = all(part.any(1).all() for part in split(mask[step], sizes))
            run.require(some, f"{args.env_id} gives an action_mask that allows nothing for a part of the action")
            logits, value[step] = policy(obs[step])
            action[step], logprob[step] = sample_parts(allowed_logits(logits, mask[step]), sizes)
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step], timeout[step] = terminated | truncated, truncated & ~terminated
            final_obs[step] = infos["next_obs"].reshape(args.num_envs, obs_dim)  # where the step led
        run.episodes(global_step, reward, done)

        # ---- 2. credit: "compute advantage estimates"
        _, next_value = policy(next_obs.reshape(args.num_envs, obs_dim))
        final_value = np.zeros(shape, np.float32)
        if timeout.any():  # a time limit does not end the task: bootstrap from the value of the final observation
            final_value[timeout] = policy(final_obs[timeout])[1]
        advantage = gae(reward, value, done, final_value, next_value, args.gamma, args.gae_lambda)
        rollout = (obs, mask, action, logprob, value, advantage, advantage + value)
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

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        explained_variance = 1 - rollout.advantage.var() / (rollout.returns.var() + 1e-8)  # advantage: returns - value
        learning_rate = optimizer.param_groups[0]["lr"]
        run.log(global_step, {"charts/learning_rate": learning_rate, "losses/explained_variance": explained_variance})
        run.evaluate(global_step, agent.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(agent.act, make_env)  # a last evaluation; `solo play` takes this policy
