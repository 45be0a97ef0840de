# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""PPO with random network distillation (RND): exploration by novelty, discrete actions, vector observations.

Paper     Burda et al. 2018, https://arxiv.org/abs/1810.12894; PPO: https://arxiv.org/abs/1707.06347 ("Eq. n" below)
Run       solo train ppo_rnd --env-id games/KeyAndDoor-v0
Spaces    vector -> discrete
Differs   from ppo.py: a second reward, the error of a network that learns to predict a fixed random network; a critic
          with two heads and no clipping of values; a warm-up of random actions for the statistics of observations
Not for   Atari games: ppo_atari.py; other images; continuous actions: ppo_continuous_action.py
Details   docs/algorithms/ppo_rnd.md
"""

from dataclasses import dataclass
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
    env_id: str = "games/KeyAndDoor-v0"  # Gymnasium id of the environment
    total_timesteps: int = 500_000  # environment steps, summed over environments
    num_envs: int = 4  # environments stepped in parallel
    num_steps: int = 128  # length of a rollout in each environment
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs per rollout
    learning_rate: float = 2.5e-4  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 0.5  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE (0: TD(0), 1: Monte Carlo), from 0 to 1
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # epsilon of Eq. 7
    vf_coef: float = 0.5  # c1 of Eq. 9, whose L^VF is halved here, as in the authors' code
    ent_coef: float = 0.01  # c2 of Eq. 9
    int_gamma: float = 0.99  # discount factor of the intrinsic reward, from 0 to 1
    ext_coef: float = 2.0  # weight of the extrinsic advantage
    int_coef: float = 1.0  # weight of the intrinsic advantage
    update_proportion: float = 0.25  # fraction of each minibatch on which the predictor is trained, from 0 to 1
    warmup_rollouts: int = 10  # rollouts of random actions before training, for the statistics; 0: none
    target_kl: float | None = None  # stop the epochs of a rollout after one whose mean approx_kl is above this


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    action: torch.Tensor  # (batch_size,)
    logprob: torch.Tensor  # (batch_size,)
    advantage: torch.Tensor  # (batch_size,), extrinsic and intrinsic
    returns: torch.Tensor  # (batch_size, 2), extrinsic, intrinsic
    reached: torch.Tensor  # (batch_size, obs_dim), the observations after the actions, normalised
    features: torch.Tensor  # (batch_size, 128), the outputs of the target network for `reached`


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
    """A policy, and a critic with two heads: extrinsic and intrinsic values."""

    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.actor = tanh_mlp(obs_dim, 64, 64, num_actions, gain=0.01)
        self.critic = tanh_mlp(obs_dim, 64, 64, 2, gain=1.0)

    def forward(self, obs):  # (batch, obs_dim) -> logits (batch, num_actions), values (batch, 2)
        return self.actor(obs), self.critic(obs)

    def evaluate_actions(self, obs, action):  # (batch, obs_dim), (batch,) -> logprobs, entropies, values (batch, 2)
        logits, value = self(obs)
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, action[:, None]).squeeze(1), entropy, value

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch,): the most likely actions
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.actor[0].weight.device).flatten(1)
        return self.actor(obs).argmax(1).cpu().numpy()


def sample_categorical(logits):
    """Actions drawn from softmax(logits), and their log-probabilities. NumPy, (batch, num_actions) -> (batch,) each."""
    action = (logits + np.random.gumbel(size=logits.shape)).argmax(1)  # the Gumbel-max trick
    logits = logits - logits.max(1, keepdims=True)  # so that exp does not overflow
    return action, logits[np.arange(len(action)), action] - np.log(np.exp(logits).sum(1))


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


def squared_error(predicted, features):
    """The intrinsic reward, and the loss of the predictor. (batch, num_features) twice -> (batch,)."""
    return ((predicted - features) ** 2).mean(-1)


def rnd_loss(modules, batch, chosen, args):
    """The negative of Eq. 9 plus the error of the predictor where chosen (batch_size,) is 1, and the metrics."""
    logprob, entropy, value = modules["agent"].evaluate_actions(batch.obs, batch.action)
    assert logprob.shape == entropy.shape == batch.advantage.shape and value.shape == batch.returns.shape

    # L^CLIP, Eq. 7
    logratio = logprob - batch.logprob
    ratio = logratio.exp()
    advantage = batch.advantage
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    objective = torch.min(ratio * advantage, clipped_ratio * advantage).mean()

    value_loss = 0.5 * ((value - batch.returns) ** 2).sum(-1).mean()  # L^VF of both heads, never clipped
    error = squared_error(modules["predictor"](batch.reached), batch.features)
    predictor_loss = (error * chosen).sum() / chosen.sum().clamp(min=1)

    loss = -(objective - args.vf_coef * value_loss + args.ent_coef * entropy.mean()) + predictor_loss
    with torch.no_grad():
        metrics = {
            "losses/value_loss": value_loss,
            "losses/policy_loss": -objective,
            "losses/predictor_loss": predictor_loss,
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
    run.require_spaces(envs, obs="vector", action="discrete")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_rollouts = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    num_iterations = num_rollouts - args.warmup_rollouts
    run.require(num_iterations > 0, "--total-timesteps leaves no rollout to learn from after --warmup-rollouts")
    obs_dim, num_actions = int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n)

    agent = Agent(obs_dim, num_actions).to(run.device)
    target = tanh_mlp(obs_dim, 128, 128, gain=1.0).to(run.device).requires_grad_(False)  # random, never trained
    predictor = tanh_mlp(obs_dim, 128, 128, 128, gain=1.0).to(run.device)
    obs_normalizer, return_normalizer = RunningMeanStd(obs_dim), RunningMeanStd()
    modules = nn.ModuleDict({"agent": agent, "predictor": predictor})
    optimizer = torch.optim.Adam(modules.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on rnd_loss(modules, *inputs); returns its metrics
    gradient_step = run.gradient_step(rnd_loss, modules, optimizer, args.max_grad_norm)
    policy = run.fast(agent)  # the agent in NumPy: (batch, obs_dim) -> logits (batch, num_actions), values (batch, 2)
    # so_far: discounted intrinsic rewards until now, over all episodes
    now = SimpleNamespace(so_far=np.zeros(args.num_envs, np.float32))
    parts = dict(agent=agent, predictor=predictor, target=target, optimizer=optimizer)
    parts |= dict(obs_normalizer=obs_normalizer, return_normalizer=return_normalizer, now=now, envs=envs)
    start = run.resume(**parts)  # what a checkpoint holds

    # ---- storage of one rollout
    shape = (args.num_steps, args.num_envs)
    obs, reached = np.zeros((*shape, obs_dim), np.float32), np.zeros((*shape, obs_dim))  # before and after the action
    action, timeout = np.zeros(shape, np.int64), np.zeros(shape, bool)
    logprob, reward, done = (np.zeros(shape, np.float32) for _ in range(3))
    value = np.zeros((*shape, 2), np.float32)

    next_obs = run.reset(envs)  # (num_envs, *obs_shape)

    # ---- warm-up: the statistics of observations begin with those of random actions
    for iteration in run.loop(start, args.warmup_rollouts, last=False):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        for step in range(args.num_steps):
            action[step] = np.random.randint(num_actions, size=args.num_envs)
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step] = terminated | truncated
            reached[step] = infos["next_obs"].reshape(args.num_envs, obs_dim)  # what the step led to
        obs_normalizer.update(reached.reshape(batch_size, obs_dim))
        run.episodes(global_step, reward, done)
        run.log(global_step, {})
        run.save(global_step)

    # ---- training; a resumed run continues with iteration `start` of the loop in which it was saved
    for iteration in run.loop(start, num_iterations):
        global_step = (args.warmup_rollouts + iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
        for step in range(args.num_steps):
            obs[step] = next_obs.reshape(args.num_envs, obs_dim)
            logits, value[step] = policy(obs[step])
            action[step], logprob[step] = sample_categorical(logits)
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step], timeout[step] = terminated | truncated, truncated & ~terminated
            reached[step] = infos["next_obs"].reshape(args.num_envs, obs_dim)  # what the step led to
        run.episodes(global_step, reward, done)

        # ---- 2. credit: the intrinsic reward is the predictor's error on the next observation, divided by the standard
        # deviation of the discounted intrinsic returns
        obs_normalizer.update(reached.reshape(batch_size, obs_dim))
        normalized = obs_normalizer(reached.reshape(batch_size, obs_dim)).clip(-5, 5)
        normalized = torch.as_tensor(normalized, dtype=torch.float32, device=run.device)
        with torch.no_grad():
            features = target(normalized)
            int_reward = squared_error(predictor(normalized), features).reshape(shape).cpu().numpy()
        never = np.zeros(shape, np.float32)  # intrinsic returns continue over episodes: never done, no final value
        int_returns, now.so_far = discounted_returns(int_reward, never, now.so_far, args.int_gamma)
        return_normalizer.update(int_returns.flatten())
        scaled_int_reward = int_reward / np.sqrt(return_normalizer.var.item() + 1e-8, dtype=np.float32)

        # "compute advantage estimates"
        _, next_value = policy(next_obs.reshape(args.num_envs, obs_dim))
        final_value = np.zeros(shape, np.float32)
        if timeout.any():  # a time limit does not end the task: bootstrap from the value of the final observation
            final_value[timeout] = policy(reached[timeout])[1][:, 0]
        ext = gae(reward, value[..., 0], done, final_value, next_value[:, 0], args.gamma, args.gae_lambda)
        intr = gae(scaled_int_reward, value[..., 1], never, never, next_value[:, 1], args.int_gamma, args.gae_lambda)
        advantage = args.ext_coef * ext + args.int_coef * intr
        returns = np.stack([ext, intr], -1) + value  # of each head
        rollout = (torch.as_tensor(x, device=run.device) for x in (obs, action, logprob, advantage, returns))
        rollout = Batch(*(x.flatten(0, 1) for x in rollout), normalized, features)

        # ---- 3. learn: "optimize surrogate L wrt theta, with K epochs and minibatch size M <= NT"
        for epoch in range(args.update_epochs):
            kl = []
            for index in torch.randperm(batch_size, device=run.device).split(minibatch_size):
                chosen = (torch.rand(minibatch_size, device=run.device) < args.update_proportion).float()
                metrics = gradient_step(Batch(*(x[index] for x in rollout)), chosen, args)
                run.learned(metrics)
                kl.append(metrics["losses/approx_kl"])
            if args.target_kl is not None and torch.stack(kl).mean() > args.target_kl:
                break

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        learning_rate = optimizer.param_groups[0]["lr"]
        run.log(global_step, {"charts/learning_rate": learning_rate, "charts/intrinsic_reward": int_reward.mean()})
        run.evaluate(global_step, agent.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(agent.act, make_env)  # a last evaluation; `solo play` takes this policy
