# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Adversarial inverse reinforcement learning (AIRL): GAIL whose discriminator contains a reward of its own;
continuous or discrete actions, vector observations.

Paper     Fu et al. 2018, https://arxiv.org/abs/1710.11248; PPO ("Eq. n" below): Schulman et al. 2017,
          https://arxiv.org/abs/1707.06347; GAE: https://arxiv.org/abs/1506.02438
Run       solo train airl --env-id CartPole-v1 --dataset data/cartpole-expert
Spaces    vector -> continuous, or discrete
Differs   from gail.py: the discriminator is made of a reward g(s, a), a shaping h(s) and log-probabilities of the
          policy, which are clipped; no gradient penalty. The default reward is GAIL's, in the paper it is "logit"
Not for   an expert that can be asked: dagger.py; images: ppo_image.py
Details   docs/algorithms/airl.md
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"  # Gymnasium id of the environment
    dataset: str = ""  # folders with recorded transitions of the expert, separated by commas (see solo record)
    expert_episodes: int = 0  # episodes of the data set to learn from, its first whole ones; 0: all
    total_timesteps: int = 1_000_000  # environment steps, summed over environments
    num_envs: int = 4  # environments stepped in parallel
    num_steps: int = 512  # length of a rollout in each environment
    num_minibatches: int = 8  # minibatches per epoch
    update_epochs: int = 10  # epochs per rollout
    learning_rate: float = 3e-4  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 0.5  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE (0: TD(0), 1: Monte Carlo), from 0 to 1
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # epsilon of Eq. 7
    clip_vloss: bool = True  # also clip how far a value moves from the old one, by clip_coef; not in the paper
    vf_coef: float = 0.5  # c1 of Eq. 9, whose L^VF is halved here, as in the authors' code
    ent_coef: float = 0.0  # c2 of Eq. 9
    std_init: float = 1.0  # standard deviation of the policy at the start, in the units of the actions
    reward: Literal["softplus", "logit"] = "softplus"  # -ln(1 - D), never negative; or ln D - ln(1 - D), the paper's
    max_logprob: float = 10.0  # largest size of ln pi(a|s) in the discriminator; inf: do not clip
    discriminator_steps: int = 40  # gradient steps of the discriminator per rollout; 0: it does not learn
    discriminator_batch_size: int = 256  # steps of the expert, and as many of the learner, in each
    discriminator_learning_rate: float = 1e-3  # learning rate of its Adam
    penalty_coef: float = 0.0  # weight of the gradient penalty (WGAN-GP), not in the paper; 0: none
    target_kl: float | None = None  # stop the epochs of a rollout after one whose mean approx_kl is above this


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    action: torch.Tensor  # (batch_size, action_dim), in [-1, 1] once clipped; (batch_size,) if discrete
    logprob: torch.Tensor  # (batch_size,), like all that follow
    value: torch.Tensor
    advantage: torch.Tensor
    returns: torch.Tensor


class Transitions(NamedTuple):
    """Steps of the expert or of the learner, as the discriminator sees them."""

    obs: torch.Tensor  # (n, obs_dim), normalised
    action: torch.Tensor  # (n, action_dim), as the environment took it; one-hot (n, num_actions) if discrete
    next_obs: torch.Tensor  # (n, obs_dim), normalised: where the step led
    terminated: torch.Tensor  # (n,), 1 at the end of the task, 0 at a time limit
    logprob: torch.Tensor  # (n,), ln pi(a|s) of the policy that acted


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
    """One environment, for training and for evaluation; actions in [-1, 1] if continuous, from 0 if discrete."""
    env = gym.make(env_id, **kwargs)
    space = env.action_space
    if isinstance(space, gym.spaces.Discrete) and (space.start != 0 or space.dtype != np.int64):
        from_0 = gym.spaces.Discrete(space.n)
        return gym.wrappers.TransformAction(env, lambda action: (action + space.start).astype(space.dtype), from_0)
    continuous = isinstance(space, gym.spaces.Box) and space.dtype.kind == "f"
    return ScaleAction(env) if continuous and np.isfinite([space.low, space.high]).all() else env


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
    """Two networks of normalised observations; only `act` takes raw ones."""

    def __init__(self, obs_dim, outputs, std, discrete):
        super().__init__()
        self.discrete = discrete
        self.obs_normalizer, self.return_normalizer = RunningMeanStd(obs_dim), RunningMeanStd()
        self.actor = tanh_mlp(obs_dim, 64, 64, outputs, gain=0.01)  # logits of actions, or the mean of a Gaussian
        if not discrete:
            self.log_std = nn.Parameter(torch.full((outputs,), math.log(std)))
        self.critic = tanh_mlp(obs_dim, 64, 64, 1, gain=1.0)

    def forward(self, obs):  # (batch, obs_dim) -> logits or means (batch, outputs), values (batch,)
        return self.actor(obs), self.critic(obs).squeeze(-1)

    def evaluate_actions(self, obs, action):  # -> log-probabilities, entropies, values, all (batch,)
        output, value = self(obs)
        if self.discrete:
            logprobs = output.log_softmax(-1)
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            return logprobs.gather(1, action[:, None]).squeeze(1), entropy, value
        noise = (action - output) / self.log_std.exp()
        logprobs = -0.5 * noise**2 - self.log_std - 0.5 * math.log(2 * math.pi)
        entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return logprobs.sum(-1), entropy.expand(len(obs)), value

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy: the likeliest actions, or the means, clipped
        obs = self.obs_normalizer(obs.reshape(obs.shape[0], -1))
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.actor[0].weight.device)
        output = self.actor(obs)
        return (output.argmax(1) if self.discrete else output.clamp(-1, 1)).cpu().numpy()


class ShapedDiscriminator(nn.Module):
    """L = f(s, a, s') - ln pi(a|s), so that D = sigmoid(L) = exp(f) / (exp(f) + pi), with f = g + gamma h' - h.
    The paper's claim that g outlasts a change of the dynamics is about a g of s alone."""

    def __init__(self, obs_dim, action_dim, gamma):
        super().__init__()
        self.gamma = gamma
        self.g = tanh_mlp(obs_dim + action_dim, 64, 64, 1, gain=1.0)  # the reward
        self.h = tanh_mlp(obs_dim, 64, 64, 1, gain=1.0)  # the shaping: what a state is worth

    def f(self, steps):  # Transitions -> (n,)
        g = self.g(torch.cat([steps.obs, steps.action], 1)).squeeze(1)
        h, next_h = self.h(steps.obs).squeeze(1), self.h(steps.next_obs).squeeze(1)
        return g + self.gamma * (1 - steps.terminated) * next_h - h  # nothing is worth anything after the end

    def forward(self, steps):  # Transitions -> (n,)
        return self.f(steps) - steps.logprob


def sample_categorical(logits):
    """Actions drawn from softmax(logits), and their log-probabilities. NumPy, (batch, num_actions) -> (batch,) each."""
    action = (logits + np.random.gumbel(size=logits.shape)).argmax(1)  # the Gumbel-max trick
    logits = logits - logits.max(1, keepdims=True)  # so that exp does not overflow
    return action, logits[np.arange(len(action)), action] - np.log(np.exp(logits).sum(1))


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


def whole_episodes(dataset, count):
    """Which transitions (n,) are of the first `count` episodes that the end of the recording did not cut; 0: of all.
    dataset.episode (n,): the episode of each transition; dataset.cut: of each episode, whether it was cut."""
    whole = np.flatnonzero(~dataset.cut)
    return np.isin(dataset.episode, whole[:count] if count else whole)


def as_taken(action, num_actions):
    """Actions as the environment takes them: one-hot (n, num_actions), or, where that is None, clipped to [-1, 1]."""
    return action.clamp(-1, 1) if num_actions is None else F.one_hot(action, num_actions).float()


def seen_transitions(agent, obs, action, next_obs, terminated, num_actions, max_logprob):
    """Steps of the discriminator from NumPy arrays, of normalised observations. Log-probabilities are those of actions
    as the environment takes them, and clipped, because an expert's are often in the tails of the policy's Gaussian."""
    device = agent.actor[0].weight.device
    obs, next_obs, terminated = (
        torch.as_tensor(x, dtype=torch.float32, device=device) for x in (obs, next_obs, terminated)
    )
    action = torch.as_tensor(action, device=device)
    taken = as_taken(action, num_actions)
    with torch.no_grad():
        logprob, *_ = agent.evaluate_actions(obs, taken if num_actions is None else action)
    return Transitions(obs, taken, next_obs, terminated, logprob.clamp(-max_logprob, max_logprob))


def drawn(steps, count):
    """`count` of the steps, drawn uniformly with replacement."""
    index = torch.randint(len(steps.obs), (count,), device=steps.obs.device)
    return type(steps)(*(x[index] for x in steps))


def slope_penalty(discriminator, expert, learner):
    """How far the gradient of L by observation and action is from the length 1, squared, at random points between an
    expert's step and a learner's; all else is the expert's. Eq. 3 of Gulrajani et al. 2017, arXiv:1704.00028."""
    share = torch.rand_like(expert.obs[:, :1])
    pairs = ((expert.obs, learner.obs), (expert.action, learner.action))
    obs, action = ((share * x + (1 - share) * y).requires_grad_() for x, y in pairs)
    logit = discriminator(expert._replace(obs=obs, action=action))
    slopes = torch.autograd.grad(logit.sum(), (obs, action), create_graph=True)
    return ((torch.cat(slopes, 1).norm(dim=1) - 1) ** 2).mean()


def discriminator_loss(discriminator, expert, learner, penalty_coef):
    """-E_expert[ln D] - E_learner[ln(1 - D)] and the gradient penalty, and the metrics. In GAIL's paper D and 1 - D
    change places."""
    expert_logit, learner_logit = discriminator(expert), discriminator(learner)
    cross_entropy = F.softplus(-expert_logit).mean() + F.softplus(learner_logit).mean()
    loss = cross_entropy
    if penalty_coef > 0:
        loss = loss + penalty_coef * slope_penalty(discriminator, expert, learner)
    metrics = {
        "losses/discriminator_loss": cross_entropy,
        "losses/expert_accuracy": (expert_logit > 0).float().mean(),
        "losses/learner_accuracy": (learner_logit < 0).float().mean(),
    }
    return loss, metrics


def imitation_reward(logit, kind):
    """The reward of steps (n,) with these logits of D: -ln(1 - D) for "softplus", ln D - ln(1 - D) for "logit"."""
    return F.softplus(logit) if kind == "softplus" else logit


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, args.num_envs)  # where an episode ends, obs begins the next one
    space = envs.single_action_space
    discrete = isinstance(space, gym.spaces.Discrete)
    run.require_spaces(envs, obs="vector", action="discrete" if discrete else "bounded")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    run.require(args.std_init > 0, f"--std-init {args.std_init} must be above 0")
    obs_dim, num_actions = int(np.prod(envs.single_observation_space.shape)), int(space.n) if discrete else None

    dataset = run.dataset(args.dataset, envs)  # empty for `solo play`, which needs only the policy
    chosen = whole_episodes(dataset, args.expert_episodes)
    count = len(np.unique(dataset.episode[chosen]))
    enough = run.play or count >= max(1, args.expert_episodes)
    run.require(enough, f"{args.dataset} has {count} whole episodes; --expert-episodes {args.expert_episodes}")
    expert_obs, expert_next_obs = (x[chosen].reshape(-1, obs_dim) for x in (dataset.obs, dataset.next_obs))
    expert_action, expert_terminated = dataset.action[chosen], dataset.terminated[chosen]
    expert_return = dataset.reward[chosen].sum() / max(1, count)  # the only use of its rewards, to compare with

    agent = Agent(obs_dim, num_actions or space.shape[0], args.std_init, discrete).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on ppo_loss(agent, *inputs); returns its metrics
    gradient_step = run.gradient_step(ppo_loss, agent, optimizer, args.max_grad_norm)
    # NumPy, current weights: (batch, obs_dim) -> logits or means (batch, outputs), values (batch,)
    policy = run.fast(agent)
    discriminator = ShapedDiscriminator(obs_dim, num_actions or space.shape[0], args.gamma).to(run.device)
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=args.discriminator_learning_rate)
    discriminator_step = run.gradient_step(discriminator_loss, discriminator, discriminator_optimizer)
    normalize = agent.obs_normalizer  # NumPy (batch, obs_dim) -> NumPy (batch, obs_dim)
    now = SimpleNamespace(
        so_far=np.zeros(args.num_envs, np.float32),  # discounted rewards of the running episodes
        true_so_far=np.zeros(args.num_envs, np.float32),  # rewards of the environment, without discount
    )
    # what a checkpoint holds
    parts = dict(agent=agent, optimizer=optimizer, now=now, envs=envs)
    parts |= dict(discriminator=discriminator, discriminator_optimizer=discriminator_optimizer)
    start = run.resume(**parts)
    now.so_far[run.restarted] = now.true_so_far[run.restarted] = 0  # episodes that a resume could not continue

    # ---- storage of one rollout
    shape = (args.num_steps, args.num_envs)
    raw_obs = np.zeros((*shape, obs_dim))
    obs, final_obs = (np.zeros((*shape, obs_dim), np.float32) for _ in range(2))  # normalised
    action, timeout = np.zeros((*shape, *space.shape), space.dtype), np.zeros(shape, bool)
    logprob, value, true_reward, done = (np.zeros(shape, np.float32) for _ in range(4))

    next_obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1 of PPO)
        log_std = None if discrete else agent.log_std.detach().cpu().numpy()
        for step in range(args.num_steps):
            raw_obs[step] = next_obs.reshape(args.num_envs, obs_dim)
            obs[step] = normalize(raw_obs[step])
            output, value[step] = policy(obs[step])
            sampled = sample_categorical(output) if discrete else sample_gaussian(output, log_std)
            action[step], logprob[step] = sampled
            next_obs, true_reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step], timeout[step] = terminated | truncated, truncated & ~terminated
            final_obs[step] = normalize(infos["next_obs"].reshape(args.num_envs, obs_dim))  # where the step led
        run.episodes(global_step, true_reward, done)

        # ---- 2. credit: the discriminator learns from these steps and the expert's, both seen with the same statistics
        flat = (x.reshape(batch_size, *x.shape[2:]) for x in (obs, action, final_obs, done * ~timeout))
        learner = seen_transitions(agent, *flat, num_actions, args.max_logprob)
        theirs = (normalize(expert_obs), expert_action, normalize(expert_next_obs), expert_terminated)
        expert = seen_transitions(agent, *theirs, num_actions, args.max_logprob)
        for _ in range(args.discriminator_steps):
            batches = (drawn(each, args.discriminator_batch_size) for each in (expert, learner))
            run.learned(discriminator_step(*batches, args.penalty_coef))

        # it gives the rewards, in units of the standard deviation of the returns; true_reward has no part in them
        with torch.no_grad():
            reward = imitation_reward(discriminator(learner), args.reward).view(shape).cpu().numpy()
        returns, now.so_far = discounted_returns(reward, done, now.so_far, args.gamma)
        agent.return_normalizer.update(returns.flatten())
        scaled_reward = agent.return_normalizer.scale(reward).astype(np.float32)

        # "compute advantage estimates"
        _, next_value = policy(normalize(next_obs.reshape(args.num_envs, obs_dim)))
        final_value = np.zeros(shape, np.float32)
        if timeout.any():  # a time limit does not end the task: bootstrap from the value of the final observation
            final_value[timeout] = policy(final_obs[timeout])[1]
        advantage = gae(scaled_reward, value, done, final_value, next_value, args.gamma, args.gae_lambda)
        rollout = (obs, action, logprob, value, advantage, advantage + value)
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

        # true returns of the episodes that ended as shares of the expert's mean return, where that is positive
        true_returns, now.true_so_far = discounted_returns(true_reward, done, now.true_so_far, 1.0)
        for true_return in true_returns[(done > 0) & (expert_return > 0)]:
            run.learned({"charts/expert_share": true_return / expert_return})

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        explained_variance = 1 - rollout.advantage.var() / (rollout.returns.var() + 1e-8)  # advantage: returns - value
        learning_rate = optimizer.param_groups[0]["lr"]
        metrics = {"charts/learning_rate": learning_rate, "losses/explained_variance": explained_variance}
        run.log(global_step, metrics | {"losses/imitation_reward": reward.mean()})
        run.evaluate(global_step, agent.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(agent.act, make_env)  # a last evaluation; `solo play` takes this policy
