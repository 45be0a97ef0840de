# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Soft actor-critic (SAC), continuous actions, vector observations.

Paper     Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905 ("Eq. n" below)
Run       solo train sac_continuous_action --env-id Hopper-v5
Spaces    vector -> continuous
Differs   from td3_continuous_action.py: a stochastic policy; its entropy is rewarded, by a learned temperature
Not for   discrete actions: sac_discrete.py
Details   algorithms/actor_critic/README.md
"""

import copy
import math
from dataclasses import dataclass
from itertools import pairwise

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "Hopper-v5"  # Gymnasium id of the environment
    total_timesteps: int = 1_000_000  # environment steps, summed over environments; whole iterations of them
    num_envs: int = 1  # environments stepped side by side
    learning_starts: int = 5_000  # environment steps of random actions before the first gradient step
    buffer_size: int = 1_000_000  # transitions the replay buffer holds
    batch_size: int = 256  # transitions of one gradient step
    utd_ratio: float = 1.0  # gradient steps of the critics per environment step (update-to-data ratio)
    policy_lr: float = 3e-4  # step size of the actor's Adam
    q_lr: float = 1e-3  # step size of Adam for the critics and the temperature
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # share of the critics that their targets take over
    policy_frequency: int = 2  # every so many gradient steps of the critics, as many of the actor in a row
    target_network_frequency: int = 1  # gradient steps of the critics per move of their targets
    alpha: float = 0.2  # temperature, the weight of the entropy, with --no-autotune
    autotune: bool = True  # learn the temperature so that the entropy, actions in half ranges, is minus their dimension


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation; all that is specific to the environment stands here."""
    return gym.make(env_id, **kwargs)


class Replay:
    """The last `capacity` transitions, a row [obs | action | reward | done | next_obs] each: one gather is a batch."""

    def __init__(self, capacity, obs_dim, action_dim):
        self.widths = [obs_dim, action_dim, 1, 1, obs_dim]
        self.rows = np.zeros((capacity, sum(self.widths)), np.float32)
        self.arrays = {"rows": self.rows}
        self.inserted = 0  # rows ever inserted

    @property
    def size(self):
        return min(self.inserted, len(self.rows))

    def add(self, obs, action, reward, done, next_obs):
        """Insert a transition of each environment over the oldest ones; all (num_envs, ...)."""
        parts = [np.reshape(x, (len(obs), -1)) for x in (obs, action, reward, done, next_obs)]
        self.rows[(self.inserted + np.arange(len(obs))) % len(self.rows)] = np.concatenate(parts, axis=1)
        self.inserted += len(obs)

    def sample(self, batch_size, device):
        """Transitions drawn uniformly with replacement: (batch_size, ...) each, reward and done (batch_size,)."""
        rows = self.rows.take(np.random.randint(self.size, size=batch_size), axis=0)
        obs, action, reward, done, next_obs = torch.from_numpy(rows).to(device).split(self.widths, dim=1)
        return obs, action, reward.squeeze(1), done.squeeze(1), next_obs


class Layers(nn.Module):
    """Weights and biases of linear layers, initialised as `nn.Linear` is. All are parts of one vector, so that one
    operation steps or averages them. With copies=(2,) those of two networks side by side."""

    def __init__(self, *sizes, copies=()):
        super().__init__()
        pairs = list(pairwise(sizes))  # (fan_in, fan_out) of each layer
        self.shapes = [(*copies, rows, fan_out) for fan_in, fan_out in pairs for rows in (fan_in, 1)]
        self.widths = [math.prod(shape) for shape in self.shapes]
        bound = torch.cat([torch.full((math.prod(copies) * (i + 1) * o,), i**-0.5) for i, o in pairs])
        self.vector = nn.Parameter(bound * (2 * torch.rand(len(bound)) - 1))

    def forward(self):  # weights (*copies, fan_in, fan_out), biases (*copies, 1, fan_out)
        parts = [part.view(shape) for part, shape in zip(self.vector.split(self.widths), self.shapes, strict=True)]
        return list(zip(parts[::2], parts[1::2], strict=True))


def mlp(layers, x):
    """The layers with ReLU between them, (*copies, batch, fan_in) -> (*copies, batch, fan_out)."""
    linear = torch.addmm if x.ndim == 2 else torch.baddbmm
    *hidden, (weight, bias) = layers
    for w, b in hidden:
        x = linear(b, x, w).relu_()
    if weight.shape[-1] == 1:  # for one column a product of matrices is several times slower than this
        return (x * weight.mT).sum(-1, keepdim=True) + bias
    return linear(bias, x, weight)


class Actor(nn.Module):
    def __init__(self, obs_dim, low, high):
        super().__init__()
        self.layers = Layers(obs_dim, 256, 256, 2 * len(low))
        self.register_buffer("low", torch.as_tensor(low, dtype=torch.float32))
        self.register_buffer("high", torch.as_tensor(high, dtype=torch.float32))
        self.bounds = low, high  # as exact as the environment's: a float32 may lie beyond a bound of another dtype

    def forward(self, obs, noise):  # (batch, obs_dim), (batch, action_dim) -> (batch, action_dim), (batch,)
        """Actions for standard normal noise, and their log-probabilities: appendix C with the range of the actions as
        a factor more, and with log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2x)), which is exact for every x."""
        mean, log_std = mlp(self.layers(), obs).chunk(2, 1)
        log_std = 3.5 * log_std.tanh() - 1.5  # in [-5, 2]
        x, half_range = mean + log_std.exp() * noise, (self.high - self.low) / 2
        normal_logprob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = half_range.log() + 2 * (math.log(2) - x - F.softplus(-2 * x))
        return self.low + half_range * (x.tanh() + 1), (normal_logprob - log_slope).sum(1)

    @torch.inference_mode()
    def act(self, obs, noise=0.0):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim)
        """The actions of the mean; with standard normal noise (batch, action_dim), actions drawn from the policy."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.low.device).flatten(1)
        return self(obs, noise)[0].cpu().numpy().astype(self.bounds[0].dtype).clip(*self.bounds)


class Critic(nn.Module):
    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.layers = Layers(obs_dim + action_dim, 256, 256, 1, copies=(2,))

    def forward(self, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (2, batch)
        return mlp(self.layers(), torch.cat([obs, action], 1).expand(2, -1, -1)).squeeze(2)


def gradient(loss_of, module, *inputs):
    """Gradient of `loss_of(module, *inputs)` for the parameters of `module` only, and the metrics of the loss."""
    loss, metrics = loss_of(module, *inputs)
    return torch.autograd.grad(loss, module.layers.vector)[0], metrics


def sac_critic_loss(critic, target_critic, actor, log_alpha, obs, action, reward, done, next_obs, noise, gamma):
    """Twice Eq. 5, both critics added; metrics: their mean values, losses, mean loss. `done` is 0 at a time limit."""
    with torch.no_grad():
        next_action, next_logprob = actor(next_obs, noise)
        next_value = target_critic(next_obs, next_action).amin(0) - log_alpha.exp() * next_logprob  # Eq. 3
        q_target = reward + gamma * (1 - done) * next_value
    q = critic(obs, action)  # (2, batch)
    loss = ((q - q_target) ** 2).mean(1)
    return loss.sum(), torch.cat([q.mean(1), loss, loss.mean(0, True)]).detach()


def sac_actor_loss(actor, critic, log_alpha, obs, noise, target_entropy):
    """Eq. 9; metrics: the loss, the entropy of the policy and the loss of the temperature (Eq. 18)."""
    action, logprob = actor(obs, noise)
    alpha = log_alpha.detach().exp()
    loss = (alpha * logprob - critic(obs, action).amin(0)).mean()
    entropy = -logprob.detach().mean()
    return loss, torch.stack([loss.detach(), entropy, alpha * (entropy - target_entropy)])


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)
    num_iterations = args.total_timesteps // args.num_envs
    run.require(num_iterations, f"--total-timesteps {args.total_timesteps} is less than --num-envs {args.num_envs}")
    most = min(args.buffer_size, num_iterations * args.num_envs)  # transitions that a batch can be drawn from
    run.require(args.batch_size <= most, f"--batch-size must be at most {most} by --buffer-size and --total-timesteps")
    envs = SyncVectorEnv([lambda: make_env(args.env_id)] * args.num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    run.require_spaces(envs, obs="vector", action="continuous")
    low, high = envs.single_action_space.low, envs.single_action_space.high
    finite = np.isfinite([low, high]).all() and (low < high).all()
    run.require(finite, f"{args.env_id} has actions without finite bounds")
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), len(low)

    actor, critic = Actor(obs_dim, low, high).to(run.device), Critic(obs_dim, action_dim).to(run.device)
    target_critic = copy.deepcopy(critic)
    actor_vector, critic_vector = actor.layers.vector, critic.layers.vector
    target_critic_vector = target_critic.layers.vector
    target_entropy = float(np.log((high - low) / 2).sum()) - action_dim
    log_alpha = torch.tensor(1.0 if args.autotune else max(args.alpha, 1e-30), device=run.device).log()
    actor_optimizer = torch.optim.Adam([actor_vector], lr=args.policy_lr, fused=True)
    if args.autotune:
        actor_optimizer.add_param_group({"params": [log_alpha], "lr": args.q_lr})
    critic_optimizer = torch.optim.Adam([critic_vector], lr=args.q_lr, fused=True)
    gradient_of = run.compile(gradient)
    replay = Replay(args.buffer_size, obs_dim, action_dim)
    names = "qf1_values qf2_values qf1_loss qf2_loss qf_loss actor_loss entropy alpha_loss".split()
    totals = torch.zeros(2, len(names), device=run.device)  # sums and counts of the metrics since the last row
    parts = {"actor": actor, "critic": critic, "target_critic": target_critic, "log_alpha": log_alpha}
    parts |= {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer, "totals": totals}
    start = run.resume(**parts, replay=replay, envs=envs)

    obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * args.num_envs

        # ---- 1. act: one step in every environment
        if global_step <= args.learning_starts:
            action = envs.action_space.sample()
        else:
            action = actor.act(obs, torch.randn(args.num_envs, action_dim, device=run.device))
        next_obs, reward, terminated, truncated, infos = envs.step(action)
        run.episodes(global_step, reward, terminated | truncated)

        # ---- 2. store: next_obs is already the next episode's where one ended; a time limit is no end of the task
        final_obs = next_obs.copy()
        for i in np.flatnonzero(terminated | truncated):
            final_obs[i] = infos["final_obs"][i]
        replay.add(obs, action, reward, terminated, final_obs)
        obs = next_obs

        # ---- 3. learn: utd_ratio gradient steps for each environment step since learning_starts
        steps = (global_step - args.num_envs - args.learning_starts, global_step - args.learning_starts)
        updates = range(*(int(args.utd_ratio * max(0, step)) for step in steps))
        for update in updates if replay.inserted >= max(args.batch_size, args.learning_starts) else ():
            batch = replay.sample(args.batch_size, run.device)
            noise = torch.randn(args.batch_size, action_dim, device=run.device)
            inputs = (target_critic, actor, log_alpha, *batch, noise, args.gamma)
            critic_vector.grad, metrics = gradient_of(sac_critic_loss, critic, *inputs)
            critic_optimizer.step()
            totals[:, :5] += torch.stack([metrics, torch.ones_like(metrics)])
            if update % args.policy_frequency == 0:
                for _ in range(args.policy_frequency):  # makes up for the steps left out
                    inputs = (critic, log_alpha, batch[0], noise.normal_(), target_entropy)
                    actor_vector.grad, metrics = gradient_of(sac_actor_loss, actor, *inputs)
                    log_alpha.grad = metrics[2]  # the loss of the temperature is its own derivative in log_alpha
                    actor_optimizer.step()
                    totals[:, 5:] += torch.stack([metrics, torch.ones_like(metrics)])
            if update % args.target_network_frequency == 0:
                target_critic_vector.data.lerp_(critic_vector.data, args.tau)

        # ---- 4. report: means over all gradient steps since the last row
        if (iteration + 1) % 100 == 0 or iteration + 1 == num_iterations:
            losses = {f"losses/{name}": x / n for name, x, n in zip(names, *totals.tolist(), strict=True) if n}
            run.log(global_step, losses | {"losses/alpha": log_alpha.exp()})
            totals.zero_()
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(actor.act, make_env)
