# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco,ray]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Soft actor-critic (SAC) with explorers, an evaluator and a learner in processes of their own: continuous actions.

Paper     Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905 ("Eq. n" below)
Run       solo train sac_parallel --env-id HalfCheetah-v5
Spaces    vector -> continuous
Differs   from sac_continuous_action.py: explorers play in processes that Ray places, while the learner learns from the
          steps that have arrived; an evaluator plays greedy episodes. Losses are the same; 0.25 updates for each step.
          Asynchronous: which rollout comes next depends on time, so two runs with one seed differ. With --synchronous
          (one explorer, all in this process) they are equal.
Not for   discrete actions: sac_discrete.py
Details   docs/algorithms/sac_parallel.md
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

from solorl import Run, RunArgs, parse, vector_env


@dataclass
class Args(RunArgs):
    env_id: str = "HalfCheetah-v5"  # Gymnasium id of the environment
    total_timesteps: int = 1_000_000  # environment steps, summed over environments
    num_envs: int = 4  # environments stepped in parallel
    num_explorers: int = 1  # processes that play, each in an equal part of the num_envs environments
    num_steps: int = 10  # steps in each of its environments that an explorer takes before it hands them over
    synchronous: bool = False  # one explorer, and all in this process, in a fixed order: reproducible, resumed exactly
    learning_starts: int = 5_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    batch_size: int = 256  # transitions per gradient step
    utd_ratio: float = 0.25  # critic updates per environment step (update-to-data ratio)
    policy_lr: float = 3e-4  # learning rate of the actor's Adam
    q_lr: float = 1e-3  # learning rate of the critics' Adam and of the temperature (the paper: 3e-4)
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
    policy_frequency: int = 2  # number of critic updates after which as many actor updates are made (the paper: 1)
    target_network_frequency: int = 1  # critic updates between target network updates
    alpha: float = 0.2  # temperature, the coefficient of the entropy, with --no-autotune
    autotune: bool = True  # learn the temperature for a target entropy of -action_dim (actions in [-1, 1])


class Batch(NamedTuple):
    """Transitions."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    action: torch.Tensor  # (batch_size, action_dim), in [-1, 1]
    reward: torch.Tensor  # (batch_size,)
    done: torch.Tensor  # (batch_size,), terminated: 0 at a time limit, which is not the end of the task
    next_obs: torch.Tensor  # (batch_size, obs_dim)


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


class Replay:
    """The last `capacity` transitions, in host memory: an array for each field of Batch, in their order."""

    def __init__(self, capacity, obs_dim, action_space):
        self.arrays = {
            "obs": np.zeros((capacity, obs_dim), np.float32),
            "action": np.zeros((capacity, *action_space.shape), action_space.dtype),
            "reward": np.zeros(capacity, np.float32),
            "done": np.zeros(capacity, np.float32),
            "next_obs": np.zeros((capacity, obs_dim), np.float32),
        }
        self.capacity, self.inserted = capacity, 0  # `inserted`: transitions ever inserted

    def add(self, batch):
        """Write transitions over the oldest: a Batch of NumPy arrays, (num_envs, ...) or (num_steps, num_envs, ...)."""
        index = (self.inserted + np.arange(batch.reward.size)) % self.capacity
        for array, rows in zip(self.arrays.values(), batch, strict=True):
            array[index] = rows.reshape(len(index), *array.shape[1:])
        self.inserted += len(index)

    def sample(self, batch_size, device):
        """A Batch of transitions drawn uniformly with replacement."""
        index = np.random.randint(min(self.inserted, self.capacity), size=batch_size)
        return Batch(*(torch.from_numpy(array[index]).to(device) for array in self.arrays.values()))


def mlp(*sizes):
    """Linear layers with ReLU between them."""
    layers = [layer for fan_in, fan_out in pairwise(sizes) for layer in (nn.Linear(fan_in, fan_out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Actor(nn.Module):
    """A Gaussian policy, squashed into [-1, 1] by tanh."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.net = mlp(obs_dim, 256, 256, 2 * action_dim)

    def forward(self, obs, noise):  # (batch, obs_dim), (batch, action_dim) -> (batch, action_dim), (batch,)
        """Actions for standard normal noise, and their log-probabilities (appendix C)."""
        mean, log_std = self.net(obs).chunk(2, 1)
        log_std = 3.5 * log_std.tanh() - 1.5  # in [-5, 2]; SAC's authors clip it instead
        x = mean + log_std.exp() * noise
        logprob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        logprob = logprob - 2 * (math.log(2) - x - F.softplus(-2 * x))  # log(1 - tanh(x)^2), numerically stable
        return x.tanh(), logprob.sum(1)

    @torch.no_grad()
    def act(self, obs, noise=0.0):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim)
        """The actions of the mean; with standard normal noise (batch, action_dim), samples of the policy."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.net[0].weight.device).flatten(1)
        noise = torch.as_tensor(noise, dtype=torch.float32, device=obs.device)
        return self(obs, noise)[0].cpu().numpy()


class Critic(nn.Module):
    """Two estimates of the value of an action."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.q1, self.q2 = (mlp(obs_dim + action_dim, 256, 256, 1) for _ in range(2))

    def forward(self, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,), (batch,)
        x = torch.cat([obs, action], 1)
        return self.q1(x).squeeze(1), self.q2(x).squeeze(1)


class Temperature(nn.Module):
    """alpha, the coefficient of the entropy."""

    def __init__(self, alpha):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(max(alpha, 1e-30)).log())  # 0 has no logarithm

    def forward(self):
        return self.log_alpha.exp()


def get_weights(network):
    """The weights of a network, as a list of NumPy arrays."""
    return [parameter.detach().cpu().numpy() for parameter in network.parameters()]


def set_weights(network, weights):
    """Give a network, on the CPU, the weights of another one."""
    for parameter, array in zip(network.parameters(), weights, strict=True):
        parameter.data.numpy()[...] = array


class Explorer:
    """Plays `num_envs` environments; `envs` are those of this process, with --synchronous."""

    def __init__(self, args, num_envs, obs_dim, action_dim, envs=None):
        self.num_steps, self.actor = args.num_steps, Actor(obs_dim, action_dim)
        self.envs = envs or vector_env(make_env, args.env_id, num_envs)
        # of each environment's episode so far: sum of raw rewards, steps
        self.so_far = SimpleNamespace(returns=np.zeros(num_envs), lengths=np.zeros(num_envs, np.int64))
        if envs is None:
            torch.seed()  # a new process would have the same random numbers as the others
            self.obs = self.envs.reset()[0]  # (num_envs, *obs_shape)

    def rollout(self, weights):
        """Take num_steps steps in each environment with these weights of the actor; without (None), random actions.
        Returns a Batch of NumPy arrays (num_steps, num_envs, ...), and return and length of each episode that ended."""
        steps, episodes, so_far = [], [], self.so_far
        if weights is not None:
            set_weights(self.actor, weights)
        for _ in range(self.num_steps):
            if weights is None:
                action = self.envs.action_space.sample()
            else:
                action = self.actor.act(self.obs, torch.randn(self.envs.action_space.shape))
            obs, reward, terminated, truncated, infos = self.envs.step(action)
            # a time limit is not the end of the task
            steps.append((self.obs, action, reward, terminated, infos["next_obs"]))
            self.obs = obs

            so_far.returns += reward
            so_far.lengths += 1
            for i in np.flatnonzero(terminated | truncated):
                episodes.append((float(so_far.returns[i]), int(so_far.lengths[i])))
                so_far.returns[i] = so_far.lengths[i] = 0
        return Batch(*map(np.array, zip(*steps, strict=True))), episodes


class Evaluator:
    """Plays greedy episodes."""

    def __init__(self, env_id, obs_dim, action_dim):
        self.env_id, self.envs, self.actor = env_id, None, Actor(obs_dim, action_dim)

    def play(self, weights, seeds):
        """An episode for each of the seeds (n,) with these weights of the actor: returns (n,) and lengths (n,)."""
        set_weights(self.actor, weights)
        self.envs = self.envs or vector_env(make_env, self.env_id, len(seeds))
        obs, _ = self.envs.reset(seed=seeds)
        returns, lengths, under_way = np.zeros(len(seeds)), np.zeros(len(seeds), int), np.ones(len(seeds), bool)
        while under_way.any():
            obs, reward, terminated, truncated, _ = self.envs.step(self.actor.act(obs))
            returns += under_way * reward
            lengths += under_way
            under_way &= ~(terminated | truncated)
        return returns, lengths


def sac_critic_loss(critic, target_critic, actor, alpha, batch, noise, gamma):
    """The mean squared errors of both critics, added (Eq. 5 has half of each), and the metrics. The target has the
    smaller value of the two target critics (section 6)."""
    with torch.no_grad():
        next_action, next_logprob = actor(batch.next_obs, noise)
        next_value = torch.min(*target_critic(batch.next_obs, next_action)) - alpha * next_logprob  # Eq. 3
        target = batch.reward + gamma * (1 - batch.done) * next_value
    q1, q2 = critic(batch.obs, batch.action)
    assert q1.shape == q2.shape == target.shape == batch.reward.shape
    loss1, loss2 = F.mse_loss(q1, target), F.mse_loss(q2, target)
    metrics = {
        "losses/qf1_values": q1.mean(),
        "losses/qf2_values": q2.mean(),
        "losses/qf1_loss": loss1,
        "losses/qf2_loss": loss2,
        "losses/qf_loss": (loss1 + loss2) / 2,  # half of what is minimised
    }
    return loss1 + loss2, metrics


def sac_actor_loss(actor, critic, alpha, batch, noise):
    """Eq. 9 with the smaller value of both critics, the metrics, and the entropy of the policy."""
    action, logprob = actor(batch.obs, noise)
    loss = (alpha * logprob - torch.min(*critic(batch.obs, action))).mean()
    entropy = -logprob.mean()
    return loss, {"losses/actor_loss": loss, "losses/entropy": entropy}, entropy


def alpha_loss(temperature, entropy, target_entropy):
    """Eq. 18, and the metrics."""
    loss = temperature() * (entropy - target_entropy)
    return loss, {"losses/alpha_loss": loss}


def soft_update(target, online, tau):
    """Polyak averaging: target <- (1 - tau) * target + tau * online."""
    with torch.no_grad():
        for x, y in zip(target.parameters(), online.parameters(), strict=True):
            x.lerp_(y, tau)


def updates_between(args, before, after, enough):
    """The numbers of the critic updates due for the environment steps after `before` up to `after`: in total utd_ratio
    for each after learning_starts. None where the buffer does not hold `enough`; they are not made up for."""
    first, last = (int(args.utd_ratio * max(0, step - args.learning_starts)) for step in (before, after))
    return range(first, last if enough else first)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    # where an episode ends, obs begins the next one; explorers have environments of their own
    envs = run.vector_env(make_env, args.env_id, args.num_envs)
    run.require_spaces(envs, obs="vector", action="bounded")
    space = envs.single_action_space
    num_explorers = 1 if args.synchronous else args.num_explorers
    own_envs = args.num_envs // num_explorers  # environments of each explorer
    unequal = f"--num-envs {args.num_envs} cannot be divided into equal parts for --num-explorers {num_explorers}"
    run.require(own_envs * num_explorers == args.num_envs, unequal)
    steps = args.num_steps * own_envs  # environment steps of a rollout
    num_iterations = run.iterations(steps, batch=args.batch_size)  # a rollout of one explorer each
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), space.shape[0]

    actor, critic = Actor(obs_dim, action_dim).to(run.device), Critic(obs_dim, action_dim).to(run.device)
    target_critic = copy.deepcopy(critic)
    temperature = Temperature(1.0 if args.autotune else args.alpha).to(run.device)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.policy_lr)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.q_lr)
    alpha_optimizer = torch.optim.Adam(temperature.parameters(), lr=args.q_lr)
    # critic_step(*inputs): an optimiser step on sac_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(sac_critic_loss, critic, critic_optimizer)
    actor_step = run.gradient_step(sac_actor_loss, actor, actor_optimizer)  # also returns the entropy, detached
    alpha_step = run.gradient_step(alpha_loss, temperature, alpha_optimizer)
    replay = Replay(args.buffer_size, obs_dim, space)
    evaluated = copy.deepcopy(actor).cpu()  # the actor as it is evaluated
    # objects in processes of Ray: calls of their methods return at once a promise of the answer, for which run.first
    # waits. With --synchronous the explorer is a plain object of this process, whose method returns the answer
    inputs = (args, own_envs, obs_dim, action_dim, envs if args.synchronous else None)
    explorers = run.place(Explorer, [inputs] * num_explorers, here=args.synchronous)
    num_evaluators = 0 if args.synchronous else 1
    evaluators = run.place(Evaluator, [(args.env_id, obs_dim, action_dim)] * num_evaluators, here=args.synchronous)
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(actor=actor, critic=critic, target_critic=target_critic, temperature=temperature, evaluated=evaluated)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, alpha_optimizer=alpha_optimizer)
    parts |= dict(replay=replay)
    if args.synchronous:  # explorers elsewhere begin again
        parts |= dict(envs=envs, so_far=explorers[0].so_far)
    start = run.resume(**parts)
    if args.synchronous:
        explorers[0].obs = run.reset(envs)
        # run.restarted: episodes that a resume could not continue
        explorers[0].so_far.returns[run.restarted] = explorers[0].so_far.lengths[run.restarted] = 0

    promises = {}  # of each explorer and evaluator that is at work
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * steps  # at the end of this iteration

        # ---- 1. explore: the first rollout that is there, of any explorer; one that has died is asked again
        weights, rollout, played = None, None, None  # without weights: random actions
        if global_step - steps >= args.learning_starts:
            weights = run.share(get_weights(actor))
        while rollout is None:
            for explorer in explorers:
                if explorer not in promises:
                    promises[explorer] = explorer.rollout(weights)
            index, answer = run.first([*promises.values()])  # None of an object that has died
            worker = [*promises][index]
            del promises[worker]
            if worker in explorers:
                rollout = answer
            else:  # the evaluator: returns and lengths
                played = answer
        if not args.synchronous:  # it plays while the learner learns
            if weights is None and global_step >= args.learning_starts:
                weights = run.share(get_weights(actor))
            promises[worker] = worker.rollout(weights)

        # ---- 2. store
        batch, episodes = rollout
        replay.add(batch)
        for episodic_return, length in episodes:
            run.episode(global_step, episodic_return, length)

        # ---- 3. learn: utd_ratio critic updates for each environment step since learning_starts
        # none while the buffer holds too little: learning_starts < batch_size, or a resume without --save-replay
        enough = replay.inserted >= max(args.batch_size, args.learning_starts)
        for update in updates_between(args, global_step - steps, global_step, enough):
            # "update the Q-function parameters" (Algorithm 1)
            batch, alpha = replay.sample(args.batch_size, run.device), temperature().detach()
            noise = torch.randn(args.batch_size, action_dim, device=run.device)
            metrics = critic_step(target_critic, actor, alpha, batch, noise, args.gamma)
            run.learned(metrics)

            # "update policy weights": delayed, with every n-th update (n: policy_frequency), then n steps at once
            if update % args.policy_frequency == 0:
                for _ in range(args.policy_frequency):
                    noise = torch.randn(args.batch_size, action_dim, device=run.device)
                    metrics, entropy = actor_step(critic, temperature().detach(), batch, noise)
                    run.learned(metrics)
                    if args.autotune:  # "adjust temperature", by the entropy of the policy before the actor's step
                        run.learned(alpha_step(entropy, -action_dim))

            # "update target network weights"
            if update % args.target_network_frequency == 0:
                soft_update(target_critic, critic, args.tau)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"losses/alpha": temperature().detach()})

        # ---- 5. evaluate, when due: here with --synchronous and at the end, else by the evaluator while learning
        # continues; `evaluated` keeps the weights that it plays until its answer is there
        if args.synchronous or iteration + 1 == num_iterations:
            evaluated.load_state_dict(actor.state_dict())
            run.evaluate(global_step, evaluated.act, make_env)
        elif played is not None:
            run.evaluate(global_step, evaluated.act, make_env, played=played)
        elif evaluators[0] not in promises:
            evaluated.load_state_dict(actor.state_dict())
            seeds = run.evaluation_seeds(global_step)  # none where no evaluation is due
            if seeds:  # first among the promises: where several answers are there, it is taken first
                promises = {evaluators[0]: evaluators[0].play(get_weights(evaluated), seeds)} | promises
        run.save(global_step)

    envs.close()
    run.close(evaluated.act, make_env)  # a last evaluation; `solo play` takes this policy
