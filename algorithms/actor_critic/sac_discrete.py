# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[box2d]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Soft actor-critic (SAC), discrete actions, vector observations.

Paper     Christodoulou 2019, https://arxiv.org/abs/1910.07207 ("Eq. n" below)
Run       solo train sac_discrete --env-id CartPole-v1
Spaces    vector -> discrete
Differs   from sac_continuous_action.py: a categorical policy: expectations and entropies are exact sums over actions
Not for   continuous actions: sac_continuous_action.py; image observations
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
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"  # Gymnasium id of the environment
    total_timesteps: int = 500_000  # environment steps, summed over environments; whole iterations of them
    num_envs: int = 1  # environments stepped side by side
    learning_starts: int = 5_000  # environment steps of random actions before the first gradient step
    buffer_size: int = 1_000_000  # transitions the replay buffer holds
    batch_size: int = 64  # transitions of one gradient step
    utd_ratio: float = 0.25  # gradient steps of the critics per environment step (update-to-data ratio)
    policy_lr: float = 3e-4  # step size of the actor's Adam
    q_lr: float = 3e-4  # step size of Adam for the critics and the temperature
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # share of the critics that their targets take over
    policy_frequency: int = 1  # every so many gradient steps of the critics, as many of the actor in a row
    target_network_frequency: int = 1  # gradient steps of the critics per move of their targets
    alpha: float = 0.2  # temperature, the weight of the entropy, with --no-autotune
    autotune: bool = True  # learn the temperature so that the entropy is the target entropy
    target_entropy_scale: float = 0.89  # target entropy, in entropies of the uniform policy


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
    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.layers = Layers(obs_dim, 256, 256, num_actions)

    def forward(self, obs):  # (batch, obs_dim) -> (batch, num_actions) log-probabilities
        return mlp(self.layers(), obs).log_softmax(1)

    @torch.inference_mode()
    def act(self, obs, noise=0.0):  # NumPy (batch, *obs_shape) -> NumPy (batch,)
        """The most likely actions; with Gumbel noise (batch, num_actions), actions drawn from the policy."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.layers.vector.device).flatten(1)
        return (mlp(self.layers(), obs) + noise).argmax(1).cpu().numpy()


class Critic(nn.Module):
    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.layers = Layers(obs_dim, 256, 256, num_actions, copies=(2,))

    def forward(self, obs):  # (batch, obs_dim) -> (2, batch, num_actions)
        return mlp(self.layers(), obs.expand(2, -1, -1))


def gradient(loss_of, module, *inputs):
    """Gradient of `loss_of(module, *inputs)` for the parameters of `module` only, and the metrics of the loss."""
    loss, metrics = loss_of(module, *inputs)
    return torch.autograd.grad(loss, module.layers.vector)[0], metrics


def sac_discrete_critic_loss(critic, target_critic, actor, log_alpha, obs, action, reward, done, next_obs, gamma):
    """Both critics' squared errors; metrics: their mean values, losses, mean loss. `done` is 0 at a time limit."""
    with torch.no_grad():
        next_logprob = actor(next_obs)
        next_q = target_critic(next_obs).amin(0) - log_alpha.exp() * next_logprob
        q_target = reward + gamma * (1 - done) * (next_logprob.exp() * next_q).sum(1)  # Eq. 10
    q = critic(obs).gather(2, action.long().expand(2, -1, -1)).squeeze(2)  # (2, batch)
    loss = ((q - q_target) ** 2).mean(1)
    return loss.sum(), torch.cat([q.mean(1), loss, loss.mean(0, True)]).detach()


def sac_discrete_actor_loss(actor, critic, log_alpha, obs, target_entropy):
    """Eq. 12; metrics: the loss, the entropy of the policy and the loss of the temperature (Eq. 11)."""
    logprob, alpha = actor(obs), log_alpha.detach().exp()
    with torch.no_grad():
        q = critic(obs).amin(0)
    loss = (logprob.exp() * (alpha * logprob - q)).sum(1).mean()
    entropy = -(logprob.exp() * logprob).sum(1).detach().mean()
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
    run.require_spaces(envs, obs="vector", action="discrete")
    obs_dim, num_actions = int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n)
    target_entropy = args.target_entropy_scale * math.log(num_actions)

    actor, critic = Actor(obs_dim, num_actions).to(run.device), Critic(obs_dim, num_actions).to(run.device)
    target_critic = copy.deepcopy(critic)
    actor_vector, critic_vector = actor.layers.vector, critic.layers.vector
    target_critic_vector = target_critic.layers.vector
    log_alpha = torch.tensor(1.0 if args.autotune else max(args.alpha, 1e-30), device=run.device).log()
    actor_optimizer = torch.optim.Adam([actor_vector], lr=args.policy_lr, fused=True)
    if args.autotune:
        actor_optimizer.add_param_group({"params": [log_alpha], "lr": args.q_lr})
    critic_optimizer = torch.optim.Adam([critic_vector], lr=args.q_lr, fused=True)
    gradient_of = run.compile(gradient)
    replay = Replay(args.buffer_size, obs_dim, action_dim=1)
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
            gumbel = -torch.empty(args.num_envs, num_actions, device=run.device).exponential_().log()
            action = actor.act(obs, gumbel)
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
            inputs = (target_critic, actor, log_alpha, *batch, args.gamma)
            critic_vector.grad, metrics = gradient_of(sac_discrete_critic_loss, critic, *inputs)
            critic_optimizer.step()
            totals[:, :5] += torch.stack([metrics, torch.ones_like(metrics)])
            if update % args.policy_frequency == 0:
                for _ in range(args.policy_frequency):  # makes up for the steps left out
                    inputs = (critic, log_alpha, batch[0], target_entropy)
                    actor_vector.grad, metrics = gradient_of(sac_discrete_actor_loss, actor, *inputs)
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
