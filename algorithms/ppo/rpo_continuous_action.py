# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Robust policy optimisation (RPO), continuous actions, vector observations.

Paper     Rahman & Xue 2022, https://arxiv.org/abs/2212.07536 ("Eq. n" below: https://arxiv.org/abs/1707.06347)
Run       solo train rpo_continuous_action --env-id HalfCheetah-v5
Spaces    vector -> continuous
Differs   from ppo_continuous_action.py: while learning, the mean of the Gaussian is moved by uniform noise
Not for   discrete actions: ppo.py
Details   algorithms/ppo/README.md
"""

import math
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import ClipAction

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "HalfCheetah-v5"  # Gymnasium id of the environment
    total_timesteps: int = 1_000_000  # environment steps, summed over environments; whole iterations of them
    num_envs: int = 1  # environments stepped side by side
    num_steps: int = 2048  # steps of one rollout in each environment
    num_minibatches: int = 32  # minibatches of one epoch
    update_epochs: int = 10  # passes over one rollout
    learning_rate: float = 3e-4  # step size of Adam
    anneal_lr: bool = True  # anneal the step size linearly to 0
    max_grad_norm: float = 0.5  # largest global norm of a gradient
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of GAE: 0 is TD(0), 1 is Monte Carlo
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # epsilon of Eq. 7
    clip_vloss: bool = True  # clip the change of the value, too
    vf_coef: float = 0.5  # c1 of Eq. 9
    ent_coef: float = 0.0  # c2 of Eq. 9
    std_init: float = 1.0  # standard deviation of the policy in the beginning
    rpo_alpha: float = 0.5  # largest move of the mean while learning
    target_kl: float | None = None  # no further epoch once an epoch's mean KL divergence is above this


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation; all that is specific to the environment stands here."""
    env = gym.make(env_id, **kwargs)
    return ClipAction(env) if isinstance(env.action_space, gym.spaces.Box) else env  # others will be refused


def linear(fan_in, fan_out, gain=2**0.5):
    """A linear layer with orthogonal weights and zero bias."""
    layer = nn.Linear(fan_in, fan_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def flatten_parameters(module):
    """Make all parameters of `module` views of one vector, the parameter that is returned: one operation steps all."""
    vector = nn.Parameter(nn.utils.parameters_to_vector(module.parameters()).detach())
    nn.utils.vector_to_parameters(vector.data, module.parameters())
    return vector


def mlp(layers, x):
    """The layers with tanh between them, (batch, fan_in) -> (batch, fan_out); faster than calling modules."""
    *hidden, last = layers
    for layer in hidden:
        x = F.linear(x, layer.weight, layer.bias).tanh()
    return F.linear(x, last.weight, last.bias)


def numpy_mlp(layers):
    """`mlp` for NumPy arrays, with the present weights: for a few rows several times faster than torch."""
    *hidden, last = [(layer.weight.numpy(force=True).T, layer.bias.numpy(force=True)) for layer in layers]

    def forward(x):
        for weight, bias in hidden:
            x = np.tanh(x @ weight + bias)
        return x @ last[0] + last[1]

    return forward


class RunningMeanStd(nn.Module):
    """Mean and variance of all that was seen, by Eq. 2.1 of Chan et al. 1979; saved with the weights."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.zeros(()))

    def update(self, x):  # (n, *shape)
        self.count += len(x)
        share, delta = len(x) / self.count, x.mean(0) - self.mean
        self.var += share * (x.var(0, correction=0) - self.var + (1 - share) * delta**2)
        self.mean += share * delta

    def scale(self, x):  # (n, *shape) -> (n, *shape)
        return (x / (self.var + 1e-8).sqrt()).clamp(-10, 10)


class Agent(nn.Module):
    def __init__(self, obs_dim, action_dim, std):
        super().__init__()
        self.actor = nn.ModuleList([linear(obs_dim, 64), linear(64, 64), linear(64, action_dim, gain=0.01)])
        self.critic = nn.ModuleList([linear(obs_dim, 64), linear(64, 64), linear(64, 1, gain=1.0)])
        self.log_std = nn.Parameter(torch.full((action_dim,), math.log(std)))
        self.seen_obs, self.seen_returns = RunningMeanStd(obs_dim), RunningMeanStd()

    def normalize(self, obs):  # (batch, obs_dim) -> (batch, obs_dim)
        return self.seen_obs.scale(obs - self.seen_obs.mean)

    def policy(self, obs, action):  # (batch, obs_dim), (batch, action_dim) -> log-probs (batch,), entropies (batch,)
        noise = (action - mlp(self.actor, self.normalize(obs))) * (-self.log_std).exp()
        entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return (0.5 - 0.5 * noise**2).sum(-1) - entropy, entropy.expand(len(obs))

    def value(self, obs):  # (batch, obs_dim) -> (batch,)
        return mlp(self.critic, self.normalize(obs)).squeeze(-1)

    def numpy_policy(self):
        """`act` with the present weights and for flat observations, NumPy (batch, obs_dim): to be called many times."""
        mean, std = self.seen_obs.mean.numpy(force=True), (self.seen_obs.var + 1e-8).sqrt().numpy(force=True)
        action, deviation = numpy_mlp(self.actor), self.log_std.exp().numpy(force=True)
        return lambda obs, noise=0.0: action(((obs - mean) / std).clip(-10, 10)) + deviation * noise

    def act(self, obs, noise=0.0):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim)
        """The mean actions; with standard normal noise (batch, action_dim), samples of the policy."""
        return self.numpy_policy()(np.asarray(obs, np.float32).reshape(len(obs), -1), noise)


def discounted_returns(reward, done, so_far, gamma):
    """What an episode has brought up to each step, earlier rewards discounted: NumPy, both (num_steps, num_envs).
    so_far (num_envs,) is what it had brought before, 0 at its beginning; in the end, what it has brought now."""
    returns = np.zeros_like(reward)
    for t in range(len(reward)):
        returns[t] = so_far[:] = gamma * so_far + reward[t]
        so_far *= 1 - done[t]
    return returns


def gae(reward, value, done, final_value, next_value, gamma, lam):
    """Advantages by Eq. 11-12. NumPy, all (num_steps, num_envs) but next_value (num_envs,).

    next_value: of the state behind the rollout; done[t]: the episode ended with step t; final_value[t]: then, the value
    of where it ended, 0 if the task was over.
    """
    advantage, next_advantage = np.zeros_like(reward), np.zeros_like(next_value)
    alive = 1.0 - done
    for t in reversed(range(len(reward))):
        delta = reward[t] + gamma * (alive[t] * next_value + final_value[t]) - value[t]  # Eq. 12
        next_advantage = advantage[t] = delta + gamma * lam * alive[t] * next_advantage  # Eq. 11
        next_value = value[t]
    return advantage


def ppo_loss(agent, obs, action, old_logprob, old_value, advantage, returns, args):
    """The negative of Eq. 9 on a minibatch, and for the metrics its three terms and log-ratios (minibatch_size,).

    obs and action (minibatch_size, ...), all others (minibatch_size,).
    """
    (logprob, entropy), value = agent.policy(obs, action), agent.value(obs)
    logratio = logprob - old_logprob
    ratio = logratio.exp()
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    objective = torch.min(ratio * advantage, clipped_ratio * advantage).mean()  # Eq. 7
    error = (value - returns) ** 2
    if args.clip_vloss:
        clipped_value = old_value + (value - old_value).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, (clipped_value - returns) ** 2)
    value_loss, entropy = 0.5 * error.mean(), entropy.mean()
    loss = -(objective - args.vf_coef * value_loss + args.ent_coef * entropy)  # Eq. 9
    return loss, [x.detach() for x in (objective, value_loss, entropy, logratio)]


def gradient(loss_of, module, *inputs):
    """Gradient of `loss_of(module, *inputs)` for all parameters of `module` as one vector, and the loss's metrics."""
    loss, metrics = loss_of(module, *inputs)
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(module.parameters()))]), metrics


def approx_kl(logratio):
    """KL divergence of the old policy from the new: estimator k3 of http://joschu.net/blog/kl-approx.html."""
    return (logratio.exp() - 1 - logratio).mean()


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    run.require(
        num_iterations, f"--total-timesteps {args.total_timesteps} is less than one batch of {batch_size} steps"
    )
    run.require(
        batch_size % args.num_minibatches == 0 and minibatch_size > 1,
        f"--num-minibatches {args.num_minibatches} must divide the batch of {batch_size} steps into parts of 2 or more",
    )
    run.require(args.std_init > 0, f"--std-init {args.std_init} must be above 0")
    envs = SyncVectorEnv([lambda: make_env(args.env_id)] * args.num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    run.require_spaces(envs, obs="vector", action="continuous")
    obs_dim, action_dim = (int(np.prod(x.shape)) for x in (envs.single_observation_space, envs.single_action_space))

    agent = Agent(obs_dim, action_dim, args.std_init).to(run.device)
    parameters = flatten_parameters(agent)
    optimizer = torch.optim.Adam([parameters], lr=args.learning_rate, eps=1e-5, fused=True)
    gradient_of = run.compile(gradient)
    so_far = torch.zeros(args.num_envs)  # discounted rewards of the running episodes
    start = run.resume(agent=agent, optimizer=optimizer, so_far=so_far, envs=envs)
    so_far[run.restarted] = 0

    # ---- storage of one rollout, in host memory
    shape = (args.num_steps, args.num_envs)
    obs, action = (np.zeros((*shape, n), np.float32) for n in (obs_dim, action_dim))
    reward, done = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    next_obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: num_steps steps in every environment
        cut = []  # (step, environment, final observation) of the episodes that a time limit ended
        policy, noise = agent.numpy_policy(), np.random.standard_normal((*shape, action_dim))
        for step in range(args.num_steps):
            obs[step] = next_obs.reshape(args.num_envs, obs_dim)
            action[step] = policy(obs[step], noise[step])
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step] = terminated | truncated
            cut += [(step, i, infos["final_obs"][i]) for i in np.flatnonzero(truncated & ~terminated)]
        run.episodes(global_step, reward, done)

        # ---- 2. credit: advantages and returns, with values and log-probabilities of the policy that acted
        returns = torch.as_tensor(discounted_returns(reward, done, so_far.numpy(), args.gamma), device=run.device)
        agent.seen_returns.update(returns.flatten())
        scaled_reward = agent.seen_returns.scale(torch.as_tensor(reward, device=run.device)).cpu().numpy()
        batch_obs, batch_action = (torch.as_tensor(x, device=run.device).flatten(0, 1) for x in (obs, action))
        final_value = np.zeros(shape, np.float32)
        with torch.no_grad():
            (logprob, _), value = agent.policy(batch_obs, batch_action), agent.value(batch_obs)
            next_value = agent.value(torch.as_tensor(next_obs, dtype=torch.float32, device=run.device).flatten(1))
            if cut:  # a time limit is no end of the task: what would have come has the value of the final observation
                steps, indices, final_obs = zip(*cut, strict=True)
                final_obs = torch.as_tensor(np.stack(final_obs), dtype=torch.float32, device=run.device).flatten(1)
                final_value[steps, indices] = agent.value(final_obs).cpu().numpy()
        value_then, next_value = value.cpu().numpy().reshape(shape), next_value.cpu().numpy()
        advantage = gae(scaled_reward, value_then, done, final_value, next_value, args.gamma, args.gae_lambda)
        advantage = torch.as_tensor(advantage, device=run.device).flatten()
        rollout = (batch_obs, batch_action, logprob, value, advantage, advantage + value)  # all (batch_size, ...)

        # ---- 3. learn: update_epochs passes over the rollout in shuffled minibatches
        terms = []  # of every minibatch: objective, value loss, entropy, log-ratios
        for epoch in range(args.update_epochs):
            move = args.rpo_alpha * (2 * torch.rand_like(batch_action) - 1)
            rollout = (batch_obs, batch_action - move, *rollout[2:])  # the same as a mean moved by +move
            shuffle = torch.randperm(batch_size, device=run.device)
            for minibatch in zip(*(x[shuffle].split(minibatch_size) for x in rollout), strict=True):
                parameters.grad, metrics = gradient_of(ppo_loss, agent, *minibatch, args)
                parameters.grad *= (args.max_grad_norm / (parameters.grad.norm() + 1e-6)).clamp(max=1)
                optimizer.step()
                terms.append(metrics)
            if args.target_kl is not None:
                last_epoch = torch.stack([logratio for *_, logratio in terms[-args.num_minibatches :]])
                if approx_kl(last_epoch) > args.target_kl:
                    break

        agent.seen_obs.update(batch_obs)  # not before: learning sees what acting saw

        # ---- 4. report: means over all minibatches
        objective, value_loss, entropy, logratio = (torch.stack(x) for x in zip(*terms, strict=True))
        metrics = {
            "charts/learning_rate": optimizer.param_groups[0]["lr"],
            "losses/value_loss": value_loss.mean(),
            "losses/policy_loss": -objective.mean(),
            "losses/entropy": entropy.mean(),
            "losses/old_approx_kl": -logratio.mean(),
            "losses/approx_kl": approx_kl(logratio),
            "losses/clipfrac": ((logratio.exp() - 1).abs() > args.clip_coef).float().mean(),
            "losses/explained_variance": 1 - advantage.var() / ((advantage + value).var() + 1e-8),
        }
        run.log(global_step, metrics)
        run.evaluate(global_step, agent.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(agent.act, make_env)
