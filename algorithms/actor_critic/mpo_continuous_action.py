# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[envpool]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Maximum a posteriori policy optimisation (MPO), continuous actions, vector observations.

Paper     Abdolmaleki et al. 2018, https://arxiv.org/abs/1806.06920
          bounds for mean and standard deviation apart: Abdolmaleki et al. 2018, https://arxiv.org/abs/1812.02256
          penalty of actions out of bounds: Abdolmaleki et al. 2020, https://arxiv.org/abs/2005.07513
Run       solo train mpo_continuous_action --env-id envpool/CartpoleSwingup-v1
Spaces    vector -> continuous
Differs   from sac_nstep.py: the actor imitates actions that were drawn from the previous policy, better ones more; how
          far it may move is bounded; no entropy in the reward; one critic, larger networks, hard target updates.
          The paper's critic uses Retrace, here returns of n steps are not corrected
Not for   discrete actions: sac_discrete.py
Details   docs/algorithms/mpo_continuous_action.md
"""

import copy
import math
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "envpool/CartpoleSwingup-v1"  # Gymnasium id of the environment
    total_timesteps: int = 250_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    learning_starts: int = 1_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    batch_size: int = 256  # transitions per gradient step
    n_step: int = 5  # rewards in a return before the value counts
    utd_ratio: float = 0.25  # updates per environment step (update-to-data ratio)
    num_samples: int = 20  # actions drawn from the target policy in each state (N)
    learning_rate: float = 3e-4  # learning rate of Adam for actor and critic
    dual_lr: float = 1e-2  # learning rate of Adam for temperatures and multipliers
    max_grad_norm: float = 40.0  # clip the global norms of the gradients of actor and critic; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
    target_network_frequency: int = 100  # updates between copies of actor and critic to their targets
    epsilon: float = 0.1  # KL divergence of the weighted actions from the target policy (E-step)
    epsilon_mean: float = 0.0025  # bound of the KL divergence due to the mean, in each action dimension (M-step)
    epsilon_std: float = 1e-6  # the same, due to the standard deviation
    epsilon_penalty: float = 0.001  # KL divergence of the actions that are weighted by the penalty
    init_eta: float = 10.0  # temperatures (eta) at the start, before the softplus
    init_alpha_mean: float = 10.0  # multipliers (alpha) of the means' KL divergences at the start, likewise
    init_alpha_std: float = 1_000.0  # those of the standard deviations


class Batch(NamedTuple):
    """Transitions over several steps."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    action: torch.Tensor  # (batch_size, action_dim), in [-1, 1]
    reward: torch.Tensor  # (batch_size,), the sum of the discounted rewards
    done: torch.Tensor  # (batch_size,), terminated: 0 at a time limit, which is not the end of the task
    next_obs: torch.Tensor  # (batch_size, obs_dim), after the last of these rewards
    discount: torch.Tensor  # (batch_size,), gamma to the power of their number


class Samples(NamedTuple):
    """Actions that were drawn from the target policy in some states."""

    obs: torch.Tensor  # (batch_size, obs_dim), the states
    mean: torch.Tensor  # (batch_size, action_dim), of the target policy
    std: torch.Tensor  # (batch_size, action_dim)
    action: torch.Tensor  # (num_samples, batch_size, action_dim), not clipped
    q: torch.Tensor  # (num_samples, batch_size), their values by the target critic
    penalty: torch.Tensor  # (num_samples, batch_size), minus their distance from [-1, 1]


class ScaleAction(gym.ActionWrapper):
    """The agent's actions lie in [-1, 1]; the environment gets them in its own finite bounds."""

    def __init__(self, env):
        super().__init__(env)
        self.action_space = gym.spaces.Box(-1.0, 1.0, env.action_space.shape, np.float32)

    def action(self, action):
        space = self.env.action_space
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        share = (action + 1.0) / 2
        scaled = (low * (1 - share) + high * share).astype(space.dtype)
        return np.clip(scaled, space.low, space.high)  # rounding can overstep the bounds


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation; actions in [-1, 1] if continuous and bounded."""
    env = gym.make(env_id, **kwargs)
    space = env.action_space
    continuous = isinstance(space, gym.spaces.Box) and space.dtype.kind == "f"
    return ScaleAction(env) if continuous and np.isfinite([space.low, space.high]).all() else env


class NStepReplay:
    """The last `capacity` transitions, in host memory."""

    def __init__(self, capacity, obs_dim, action_space):
        self.arrays = {
            "obs": np.zeros((capacity, obs_dim), np.float32),
            "action": np.zeros((capacity, *action_space.shape), action_space.dtype),
            "reward": np.zeros(capacity, np.float32),
            "done": np.zeros(capacity, np.float32),
            "next_obs": np.zeros((capacity, obs_dim), np.float32),
            "first": np.zeros(capacity, bool),
        }
        self.capacity, self.inserted = capacity, 0  # `inserted`: transitions ever inserted

    def add(self, *transitions):
        """Write transitions over the oldest: obs, action, reward, done, next_obs and first, NumPy (num_envs, ...)
        each. first: an episode begins with this transition."""
        index = (self.inserted + np.arange(len(transitions[0]))) % self.capacity
        for array, rows in zip(self.arrays.values(), transitions, strict=True):
            array[index] = rows.reshape(len(index), *array.shape[1:])
        self.inserted += len(index)

    def sample(self, batch_size, n_step, num_envs, gamma, device):
        """A Batch of transitions drawn uniformly with replacement, each over `n_step` steps of its environment: over
        fewer where the episode ends or the newest transition comes. Those of an environment are num_envs rows apart."""
        first = last = np.random.randint(min(self.inserted, self.capacity), size=batch_size)
        number = self.inserted - 1 - (self.inserted - 1 - first) % self.capacity  # of all transitions ever inserted
        reward, discount = np.zeros(batch_size, np.float32), np.ones(batch_size, np.float32)
        included = np.ones(batch_size, bool)
        for step in number + num_envs * np.arange(n_step)[:, None]:
            row = step % self.capacity
            included = included & (step < self.inserted) & ((step == number) | ~self.arrays["first"][row])
            last = np.where(included, row, last)
            reward += included * discount * self.arrays["reward"][row]
            discount = np.where(included, gamma * discount, discount).astype(np.float32)
        obs, action, _, done, next_obs, _ = self.arrays.values()
        batch = Batch(obs[first], action[first], reward, done[last], next_obs[last], discount)
        return Batch(*(torch.from_numpy(x).to(device) for x in batch))


def elu_mlp(*sizes):
    """Linear layers with ELU between them."""
    layers = [layer for fan_in, fan_out in pairwise(sizes) for layer in (nn.Linear(fan_in, fan_out), nn.ELU())]
    return nn.Sequential(*layers[:-1])


def normed_elu_mlp(fan_in, fan_out):
    """Three hidden layers: layer normalisation and tanh after the first, ELU after the others."""
    return nn.Sequential(nn.Linear(fan_in, 256), nn.LayerNorm(256), nn.Tanh(), elu_mlp(256, 256, 256, fan_out))


class Actor(nn.Module):
    """A Gaussian policy, not squashed: the environment gets its actions clipped to [-1, 1]."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.net = normed_elu_mlp(obs_dim, 2 * action_dim)
        last = self.net[-1][-1]
        nn.init.normal_(last.weight, std=(1e-4 / last.in_features) ** 0.5)
        nn.init.zeros_(last.bias)

    def forward(self, obs):  # (batch, obs_dim) -> (batch, action_dim), (batch, action_dim)
        """Means, near 0 at the start, and standard deviations, near 0.5 at the start."""
        mean, x = self.net(obs).chunk(2, 1)
        return mean, 0.5 * F.softplus(x) / math.log(2) + 1e-6

    @torch.no_grad()
    def act(self, obs, noise=0.0):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim)
        """The means; with standard normal noise (batch, action_dim), samples of the policy; both clipped."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.net[0].weight.device).flatten(1)
        mean, std = self(obs)
        noise = torch.as_tensor(noise, dtype=torch.float32, device=obs.device)
        return (mean + std * noise).clamp(-1, 1).cpu().numpy()


class Critic(nn.Module):
    """The value of an action, which is that of the clipped action."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.net = normed_elu_mlp(obs_dim + action_dim, 1)

    def forward(self, obs, action):  # (..., obs_dim), (..., action_dim) -> (...)
        return self.net(torch.cat([obs, action.clamp(-1, 1)], -1)).squeeze(-1)


class Duals(nn.Module):
    """The Lagrange multipliers of the constraints, positive by a softplus of what Adam learns."""

    def __init__(self, action_dim, args):
        super().__init__()
        self.eta = nn.Parameter(torch.tensor(args.init_eta))  # the temperature
        self.eta_penalty = nn.Parameter(torch.tensor(args.init_eta))
        self.alpha_mean = nn.Parameter(torch.full((action_dim,), args.init_alpha_mean))
        self.alpha_std = nn.Parameter(torch.full((action_dim,), args.init_alpha_std))

    def forward(self):
        """eta (), eta_penalty (), alpha_mean (action_dim,), alpha_std (action_dim,)."""
        return [F.softplus(x) + 1e-8 for x in (self.eta, self.eta_penalty, self.alpha_mean, self.alpha_std)]

    @torch.no_grad()
    def project(self):
        """Stay above -18: far below, a softplus has no gradient left."""
        for x in self.parameters():
            x.clamp_(min=-18)


@torch.no_grad()
def draw_and_judge(target_actor, target_critic, obs, noise):
    """Samples of the target policy in the states `obs`, for standard normal noise (num_samples, batch, action_dim)."""
    mean, std = target_actor(obs)
    action = mean + std * noise
    q = target_critic(obs.expand(len(noise), *obs.shape), action)
    penalty = -(action - action.clamp(-1, 1)).norm(dim=-1)
    return Samples(obs, mean, std, action, q, penalty)


def mpo_critic_loss(critic, batch, next_q):
    """The mean squared error, and the metrics. The value of the next state is the mean over the actions that were drawn
    there; next_q: (num_samples, batch)."""
    target = batch.reward + batch.discount * (1 - batch.done) * next_q.mean(0)
    q = critic(batch.obs, batch.action)
    assert q.shape == target.shape == batch.reward.shape
    loss = F.mse_loss(q, target)
    return loss, {"losses/qf1_values": q.mean(), "losses/qf1_loss": loss}


def action_weights(value, eta):
    """The improved policy q(a|s), in proportion to pi(a|s) exp(Q(s, a) / eta): the weights of actions drawn from pi.
    value: (num_samples, batch); in each state they add up to 1."""
    return (value / eta).softmax(0)


def dual_function(value, eta, epsilon):
    """g(eta) = eta epsilon + eta E_s[log E_a[exp(Q(s, a) / eta)]], least where KL(q || pi) is epsilon; value:
    (num_samples, batch)."""
    return eta * (epsilon + ((value / eta).logsumexp(0) - math.log(len(value))).mean())


def weights_kl(weights):
    """KL(q || pi), the mean over states; weights: (num_samples, batch), which would all be equal in pi itself."""
    return torch.xlogy(weights, len(weights) * weights).sum(0).mean()


def gaussian_logprob(action, mean, std):  # three (..., action_dim) -> (...)
    return (-0.5 * ((action - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)).sum(-1)


def gaussian_kl(mean, std, other_mean, other_std):  # four (batch, action_dim) -> (batch, action_dim)
    """KL(N(mean, std) || N(other_mean, other_std)) in each dimension."""
    return (other_std / std).log() + (std**2 + (mean - other_mean) ** 2) / (2 * other_std**2) - 0.5


def mpo_actor_loss(actor, samples, weights, alpha_mean, alpha_std):
    """The M-step: the negative log-likelihood of the actions, weighted (num_samples, batch), plus the multipliers times
    the KL divergences from the target policy; the metrics; both KL divergences, (action_dim,) each. The mean is learned
    with the target's standard deviation, the standard deviation with the target's mean."""
    mean, std = actor(samples.obs)
    logprob = gaussian_logprob(samples.action, mean, samples.std) + gaussian_logprob(samples.action, samples.mean, std)
    kl_mean = gaussian_kl(samples.mean, samples.std, mean, samples.std).mean(0)
    kl_std = gaussian_kl(samples.mean, samples.std, samples.mean, std).mean(0)
    loss = -(weights * logprob).sum(0).mean() + (alpha_mean * kl_mean + alpha_std * kl_std).sum()
    metrics = {"losses/actor_loss": loss, "losses/policy_std": std.mean()}
    metrics |= {"losses/kl_mean": kl_mean.mean(), "losses/kl_std": kl_std.mean()}
    return loss, metrics, (kl_mean, kl_std)


def mpo_dual_loss(duals, samples, kl_mean, kl_std, args):
    """The dual functions of both temperatures; the multipliers grow where a KL divergence is above its bound. Both
    added, and the metrics."""
    eta, eta_penalty, alpha_mean, alpha_std = duals()
    loss = dual_function(samples.q, eta, args.epsilon)
    loss = loss + dual_function(samples.penalty, eta_penalty, args.epsilon_penalty)
    loss = loss + (alpha_mean * (args.epsilon_mean - kl_mean) + alpha_std * (args.epsilon_std - kl_std)).sum()
    return loss, {"losses/dual_loss": loss, "losses/kl_weights": weights_kl(action_weights(samples.q, eta))}


def due_updates(args, global_step, enough):
    """The critic updates of the iteration that ends at `global_step`, as a range: utd_ratio for each environment step
    since learning_starts, counted from 0. It is empty until the buffer holds `enough`."""
    before = int(args.utd_ratio * max(0, global_step - args.num_envs - args.learning_starts))
    after = int(args.utd_ratio * max(0, global_step - args.learning_starts))
    return range(before, after if enough else before)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, args.num_envs)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="vector", action="bounded")
    space = envs.single_action_space
    num_iterations = run.iterations(args.num_envs, batch=args.batch_size)  # rounded down; the buffer must hold a batch
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), space.shape[0]

    actor, critic = Actor(obs_dim, action_dim).to(run.device), Critic(obs_dim, action_dim).to(run.device)
    target_actor, target_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    duals = Duals(action_dim, args).to(run.device)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.learning_rate)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.learning_rate)
    dual_optimizer = torch.optim.Adam(duals.parameters(), lr=args.dual_lr)
    # critic_step(*inputs): an optimiser step on mpo_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(mpo_critic_loss, critic, critic_optimizer, args.max_grad_norm)
    actor_step = run.gradient_step(mpo_actor_loss, actor, actor_optimizer, args.max_grad_norm)
    dual_step = run.gradient_step(mpo_dual_loss, duals, dual_optimizer)
    replay = NStepReplay(args.buffer_size, obs_dim, space)
    now = SimpleNamespace(first=np.ones(args.num_envs, bool))  # whether an episode begins with the next step
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(actor=actor, critic=critic, target_actor=target_actor, target_critic=target_critic, duals=duals)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, dual_optimizer=dual_optimizer)
    parts |= dict(replay=replay, envs=envs, now=now)
    start = run.resume(**parts)
    now.first[run.restarted] = True  # episodes that a resume could not continue

    obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * args.num_envs  # at the end of this iteration

        # ---- 1. act: one step in every environment
        if global_step <= args.learning_starts:
            action = envs.action_space.sample()
        else:
            action = actor.act(obs, torch.randn(args.num_envs, action_dim))
        current_obs, reward, terminated, truncated, infos = envs.step(action)  # current_obs: for the next action
        run.episodes(global_step, reward, terminated | truncated)

        # ---- 2. store: a time limit is not the end of the task
        next_obs = infos["next_obs"]  # what the step led to: not current_obs where an episode ended
        replay.add(obs, action, reward, terminated, next_obs, now.first)
        obs, now.first = current_obs, terminated | truncated

        # ---- 3. learn: utd_ratio updates for each environment step since learning_starts
        # none while the buffer holds too little: learning_starts < batch_size, or a resume without --save-replay
        enough = replay.inserted >= max(args.batch_size, args.learning_starts)
        for update in due_updates(args, global_step, enough):
            batch = replay.sample(args.batch_size, args.n_step, args.num_envs, args.gamma, run.device)
            # actions of the target policy, which serve the target of the critic, the E-step and the M-step
            noise = torch.randn(args.num_samples, args.batch_size, action_dim, device=run.device)
            samples = draw_and_judge(target_actor, target_critic, batch.next_obs, noise)

            # policy evaluation
            run.learned(critic_step(batch, samples.q))

            # E-step: better actions get more weight, those within the bounds, too
            eta, eta_penalty, alpha_mean, alpha_std = (x.detach() for x in duals())
            weights = action_weights(samples.q, eta) + action_weights(samples.penalty, eta_penalty)

            # M-step: the actor imitates them, but stays near the target policy
            metrics, (kl_mean, kl_std) = actor_step(samples, weights, alpha_mean, alpha_std)  # both detached
            run.learned(metrics)

            # temperatures and multipliers, so that the KL divergences are at their bounds
            run.learned(dual_step(samples, kl_mean, kl_std, args))
            duals.project()

            # a step of the policy is over: the target networks become the learned ones
            if (update + 1) % args.target_network_frequency == 0:
                target_actor.load_state_dict(actor.state_dict())
                target_critic.load_state_dict(critic.state_dict())
                # the KL divergences of the whole step but its last update, in the dimension where they are largest
                run.learned({"losses/step_kl_mean": kl_mean.max(), "losses/step_kl_std": kl_std.max()})

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        names = ("losses/eta", "losses/eta_penalty", "losses/alpha_mean", "losses/alpha_std")
        run.log(global_step, {name: x.detach().mean() for name, x in zip(names, duals(), strict=True)})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    envs.close()
    # a last evaluation; `solo play` takes these policies, greedy and drawn at random
    run.close(actor.act, make_env, sample=lambda obs: actor.act(obs, torch.randn(len(obs), action_dim)))
