# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Proximal policy optimisation (PPO), discrete actions, observations of several entries.

Paper     Schulman et al. 2017, https://arxiv.org/abs/1707.06347 ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438
Run       solo train ppo_dict --env-id games/TwoSenses-v0
Spaces    dict -> discrete, vectors and images
Differs   from ppo.py: an encoder for each entry of the observation, whose features are concatenated; policy and value
          share the encoders
Not for   vector observations: ppo.py; continuous actions: ppo_dict_continuous_action.py; Atari games:
          ppo_atari.py
Details   docs/algorithms/ppo_dict.md
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from gymnasium.spaces import Box

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "games/TwoSenses-v0"  # Gymnasium id of the environment
    total_timesteps: int = 50_000  # environment steps, summed over environments
    num_envs: int = 4  # environments stepped in parallel
    num_steps: int = 128  # length of a rollout in each environment
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs per rollout
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

    obs: dict[str, torch.Tensor]  # (batch_size, *shape of the entry)
    action: torch.Tensor  # (batch_size,), like all that follow
    logprob: torch.Tensor
    value: torch.Tensor
    advantage: torch.Tensor
    returns: torch.Tensor

    def rows(self, index):
        """The minibatch of some rows."""
        obs, *others = self
        return Batch({name: x[index] for name, x in obs.items()}, *(x[index] for x in others))


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation; its actions are int64 and count from 0."""
    env = gym.make(env_id, **kwargs)
    space = env.action_space
    if isinstance(space, gym.spaces.Discrete) and (space.start != 0 or space.dtype != np.int64):
        from_0 = gym.spaces.Discrete(space.n)
        env = gym.wrappers.TransformAction(env, lambda action: (action + space.start).astype(space.dtype), from_0)
    return env


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


def orthogonal(layer, gain):
    """The layer with orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def compact(x):
    """Bytes stay bytes, all other numbers become float32. NumPy."""
    return x.astype(np.uint8 if x.dtype == np.uint8 else np.float32, copy=False)


def is_image(space):
    """Bytes with 3 axes, which are taken as height, width, channels."""
    return space.dtype == np.uint8 and len(space.shape) == 3


class Vectors(nn.Module):
    """The encoder of vectors, or arrays of any shape: (batch, *shape) -> (batch, 64)."""

    def __init__(self, *shape):
        super().__init__()
        self.network = tanh_mlp(math.prod(shape), 64, 64, gain=2**0.5)

    def forward(self, x):
        return self.network(x.to(torch.float32).flatten(1)).tanh()


class Images(nn.Module):
    """The encoder of images: (batch, height, width, channels) bytes -> (batch, 64). A convolution halves both sides."""

    def __init__(self, height, width, channels):
        super().__init__()
        first, second = nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        last = nn.Linear(32 * math.ceil(height / 4) * math.ceil(width / 4), 64)
        for layer in (first, second, last):
            orthogonal(layer, 2**0.5)
        self.network = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), last, nn.Tanh())

    def forward(self, x):
        return self.network(x.permute(0, 3, 1, 2).to(torch.float32) / 255)


class Agent(nn.Module):
    """`spaces` maps the name of each entry to its Box."""

    def __init__(self, spaces, num_actions):
        super().__init__()
        self.names = list(spaces)
        encoders = ((Images if is_image(space) else Vectors)(*space.shape) for space in spaces.values())
        self.encoders = nn.ModuleList(encoders)
        self.actor = tanh_mlp(64 * len(spaces), 64, num_actions, gain=0.01)
        self.critic = tanh_mlp(64 * len(spaces), 64, 1, gain=1.0)

    def forward(self, obs):  # (batch, *shape) for each entry -> logits (batch, num_actions), values (batch,)
        features = [encoder(obs[name]) for name, encoder in zip(self.names, self.encoders, strict=True)]
        features = torch.cat(features, 1)
        return self.actor(features), self.critic(features).squeeze(-1)

    def evaluate_actions(self, obs, action):  # entries, (batch,) -> logprobs, entropies, values: (batch,)
        logits, value = self(obs)
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, action[:, None]).squeeze(1), entropy, value

    @torch.no_grad()
    def step(self, obs):  # `forward` from NumPy to NumPy
        device = self.actor[0].weight.device
        logits, value = self({name: torch.as_tensor(compact(obs[name]), device=device) for name in self.names})
        return logits.cpu().numpy(), value.cpu().numpy()

    def act(self, obs):  # NumPy (batch, *shape) for each entry -> NumPy (batch,): the most likely actions
        return self.step(obs)[0].argmax(1)


def sample_categorical(logits):
    """Actions drawn from softmax(logits), and their log-probabilities. NumPy, (batch, num_actions) -> (batch,) each."""
    action = (logits + np.random.gumbel(size=logits.shape)).argmax(1)  # the Gumbel-max trick
    logits = logits - logits.max(1, keepdims=True)  # so that exp does not overflow
    return action, logits[np.arange(len(action)), action] - np.log(np.exp(logits).sum(1))


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
    envs = run.vector_env(make_env, args.env_id, args.num_envs)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="dict", action="discrete")
    spaces, num_actions = envs.single_observation_space.spaces, int(envs.single_action_space.n)
    for name, space in spaces.items():
        has_axes = isinstance(space, Box) and len(space.shape) > 0
        run.require(has_axes, f"{args.env_id}: {name} must be a Box with one axis or more, but is {space!s:.60}")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches

    agent = Agent(spaces, num_actions).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on ppo_loss(agent, *inputs); returns its metrics
    gradient_step = run.gradient_step(ppo_loss, agent, optimizer, args.max_grad_norm)
    start = run.resume(agent=agent, optimizer=optimizer, envs=envs)  # what a checkpoint holds

    # ---- storage of one rollout
    shape = (args.num_steps, args.num_envs)
    obs, final_obs = (
        {name: compact(np.zeros((*shape, *space.shape), space.dtype)) for name, space in spaces.items()}
        for _ in range(2)
    )
    action, timeout = np.zeros(shape, np.int64), np.zeros(shape, bool)
    logprob, value, reward, done = (np.zeros(shape, np.float32) for _ in range(4))

    next_obs = run.reset(envs)  # (num_envs, *shape) for each entry
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
        for step in range(args.num_steps):
            for name in spaces:
                obs[name][step] = next_obs[name]
            logits, value[step] = agent.step(next_obs)
            action[step], logprob[step] = sample_categorical(logits)
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step], timeout[step] = terminated | truncated, truncated & ~terminated
            for name in spaces:
                final_obs[name][step] = infos["next_obs"][name]  # what the step led to, also where an episode ended
        run.episodes(global_step, reward, done)

        # ---- 2. credit: "compute advantage estimates"
        _, next_value = agent.step(next_obs)
        final_value = np.zeros(shape, np.float32)
        if timeout.any():  # a time limit does not end the task: bootstrap from the value of the final observation
            final_value[timeout] = agent.step({name: x[timeout] for name, x in final_obs.items()})[1]
        advantage = gae(reward, value, done, final_value, next_value, args.gamma, args.gae_lambda)
        rollout = (action, logprob, value, advantage, advantage + value)
        entries = {name: torch.as_tensor(x, device=run.device).flatten(0, 1) for name, x in obs.items()}
        rollout = Batch(entries, *(torch.as_tensor(x, device=run.device).flatten(0, 1) for x in rollout))

        # ---- 3. learn: "optimize surrogate L wrt theta, with K epochs and minibatch size M <= NT"
        for epoch in range(args.update_epochs):
            kl = []
            for index in torch.randperm(batch_size, device=run.device).split(minibatch_size):
                metrics = gradient_step(rollout.rows(index), args)
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
