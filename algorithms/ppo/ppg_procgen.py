# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[procgen]>=0.1", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Phasic policy gradient (PPG) on the games of Procgen: now and then the policy's network learns the values, too.

Paper     Cobbe et al. 2021, https://arxiv.org/abs/2009.04416 ("Alg. 1" below); PPO: https://arxiv.org/abs/1707.06347
          ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438; Procgen: https://arxiv.org/abs/1912.01588; EnvPool:
          https://arxiv.org/abs/2206.10558; network: Espeholt et al. 2018, https://arxiv.org/abs/1802.01561
Run       solo train ppg_procgen --env-id StarpilotEasy-v0 --threads 2
Spaces    image -> discrete
Differs   from ppo_procgen.py: the values have a network of their own; every 32 rollouts an auxiliary phase, in which
          the policy's network learns the values, too, while the policy is kept as it is. The rollouts of a phase take
          6.4 GB of memory, less with a smaller --policy-iterations, --num-envs or --num-steps
Not for   Atari games: ppo_atari_envpool.py; vector observations: ppo.py; continuous actions: ppo_continuous_action.py
Details   docs/algorithms/ppg_procgen.md
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn

from solorl import EnvPoolVectorEnv, Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_kind = "envpool-procgen"  # --env-id is one of EnvPool's Procgen games
    env_id: str = "StarpilotEasy-v0"  # id of the game in EnvPool, which ends with Easy-v0 or Hard-v0
    num_levels: int = 200  # levels of training, evaluation has all after them; 0: both have all there are
    start_level: int = 0  # number of the first level of training
    total_timesteps: int = 25_000_000  # environment steps, summed over environments
    num_envs: int = 64  # environments stepped in parallel
    num_steps: int = 256  # length of a rollout in each environment
    num_minibatches: int = 8  # minibatches per epoch
    update_epochs: int = 1  # epochs per rollout
    learning_rate: float = 5e-4  # learning rate of Adam
    anneal_lr: bool = False  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 0.5  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.999  # discount factor, from 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE (0: TD(0), 1: Monte Carlo), from 0 to 1
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # epsilon of Eq. 7
    clip_vloss: bool = False  # also clip how far a value moves from the old one, by clip_coef; not in the paper
    vf_coef: float = 0.5  # c1 of Eq. 9, whose L^VF is halved here, as in the authors' code
    ent_coef: float = 0.01  # c2 of Eq. 9
    policy_iterations: int = 32  # N_pi: rollouts in a phase, whose images of 12 kB stay in memory
    aux_epochs: int = 6  # E_aux: epochs of the auxiliary phase; 0: no such phase
    aux_minibatches: int = 16  # minibatches that a rollout has in an epoch of the auxiliary phase
    beta_clone: float = 1.0  # weight of the distance from the policy before the auxiliary phase
    target_kl: float | None = None  # stop the epochs of a rollout after one whose mean approx_kl is above this
    eval_episodes: int = 50  # games of one evaluation, on environments and seeds of their own


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: torch.Tensor  # (batch_size, 3, 64, 64), bytes
    action: torch.Tensor  # (batch_size,), like all that follow
    logprob: torch.Tensor
    value: torch.Tensor
    advantage: torch.Tensor
    returns: torch.Tensor


class Buffer:
    """The buffer B of Alg. 1, in host memory: what the auxiliary phase learns from. A checkpoint holds it with
    --save-replay; a run that is resumed without it has only the rollouts since then in its first auxiliary phase."""

    def __init__(self, capacity, obs_shape):
        self.arrays = {"obs": np.zeros((capacity, *obs_shape), np.uint8), "returns": np.zeros(capacity, np.float32)}
        self.capacity, self.inserted = capacity, 0

    def __len__(self):
        return min(self.inserted, self.capacity)

    def add(self, obs, returns):
        """Insert a rollout, (batch_size, *obs_shape) and (batch_size,), where the oldest one was."""
        index = (self.inserted + np.arange(len(returns))) % self.capacity
        self.arrays["obs"][index], self.arrays["returns"][index] = obs, returns
        self.inserted += len(returns)


def make_games(env_id, num_envs, num_levels, start_level, **kwargs):
    """Games on the levels from `start_level` on, each drawn at random: observations are images, (3, 64, 64) bytes."""
    return EnvPoolVectorEnv(env_id, num_envs, num_levels=num_levels, start_level=start_level, **kwargs)


def unseen_levels(num_levels, start_level):
    """How many levels there are after those of training, and the first one; all if training has all (0)."""
    first = start_level + num_levels
    return (2**31 - 1 - first, first) if num_levels else (0, 0)


class Scaled(nn.Module):
    """Bytes to numbers from 0 to 1, on the device: bytes are copied there faster. Channels last: fast convolutions."""

    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last).to(torch.float32) / 255


class ResidualBlock(nn.Module):
    """x + f(x) with two convolutions as f, (batch, channels, height, width) -> the same."""

    def __init__(self, channels):
        super().__init__()
        convolutions = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
        self.layers = nn.Sequential(*(layer for convolution in convolutions for layer in (nn.ReLU(), convolution)))

    def forward(self, x):
        return x + self.layers(x)


def procgen_cnn():
    """The deep convolutional network of IMPALA (Fig. 3, right), (batch, 3, 64, 64) bytes -> (batch, 256)."""
    layers = []
    for inputs, channels in ((3, 16), (16, 32), (32, 32)):  # each halves height and width: 32, 16, 8
        layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
        layers += [ResidualBlock(channels), ResidualBlock(channels)]
    return nn.Sequential(Scaled(), *layers, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 8 * 8, 256), nn.ReLU())


def orthogonal(layer, gain):
    """The layer with orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


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
    def __init__(self, num_actions):
        super().__init__()
        self.policy_network, self.value_network = procgen_cnn(), procgen_cnn()
        self.actor = orthogonal(nn.Linear(256, num_actions), 0.01)
        self.critic, self.aux_critic = (orthogonal(nn.Linear(256, 1), 1.0) for _ in range(2))

    def forward(self, obs):  # (batch, 3, 64, 64) -> logits (batch, num_actions), values (batch,)
        return self.actor(self.policy_network(obs)), self.critic(self.value_network(obs)).squeeze(-1)

    def auxiliary(self, obs):  # (batch, 3, 64, 64) -> logits (batch, num_actions), auxiliary values, values: (batch,)
        features = self.policy_network(obs)
        value = self.critic(self.value_network(obs)).squeeze(-1)
        return self.actor(features), self.aux_critic(features).squeeze(-1), value

    @torch.no_grad()
    def logits(self, obs):  # NumPy (batch, 3, 64, 64) -> (batch, num_actions)
        return self.actor(self.policy_network(torch.as_tensor(obs, device=self.actor.weight.device)))

    def evaluate_actions(self, obs, action):  # (batch, *obs_shape), (batch,) -> logprobs, entropies, values: (batch,)
        logits, value = self(obs)
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, action[:, None]).squeeze(1), entropy, value

    def sample(self, obs):  # NumPy (batch, 3, 64, 64) -> NumPy (batch,): actions drawn at random
        return sample_categorical(self.logits(obs).cpu().numpy())[0]

    def act(self, obs):  # NumPy (batch, 3, 64, 64) -> NumPy (batch,): the most likely actions
        return self.logits(obs).argmax(1).cpu().numpy()


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


def aux_loss(agent, obs, returns, old_logits, beta_clone):
    """L_joint of the policy's network, plus L_value of the other one (Sec. 2 of PPG), and the metrics.

    obs (batch, *obs_shape), value targets `returns` (batch,), old_logits (batch, num_actions) of the policy to be kept.
    """
    logits, aux_value, value = agent.auxiliary(obs)
    assert aux_value.shape == value.shape == returns.shape and logits.shape == old_logits.shape
    aux_value_loss = 0.5 * ((aux_value - returns) ** 2).mean()  # L_aux
    value_loss = 0.5 * ((value - returns) ** 2).mean()  # L_value
    old_logprobs, logprobs = old_logits.log_softmax(-1), logits.log_softmax(-1)
    kl = (old_logprobs.exp() * (old_logprobs - logprobs)).sum(-1).mean()  # KL[old policy, policy]
    metrics = {"losses/aux_value_loss": aux_value_loss, "losses/aux_policy_kl": kl}
    return aux_value_loss + beta_clone * kl + value_loss, metrics | {"losses/aux_true_value_loss": value_loss}


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    num_unseen, first_unseen = unseen_levels(args.num_levels, args.start_level)
    run.require(first_unseen < 2**31 - 1, "--start-level and --num-levels must add up to less than 2147483647")
    unseen_games = partial(make_games, num_levels=num_unseen, start_level=first_unseen)  # of evaluation
    envs = make_games(args.env_id, args.num_envs, args.num_levels, args.start_level)
    run.require_spaces(envs, obs="image", action="discrete")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    aux_minibatch_size = batch_size // args.aux_minibatches
    sentence = f"--aux-minibatches must divide the {batch_size} steps of a rollout"
    run.require(batch_size % args.aux_minibatches == 0, sentence)
    one_phase = num_iterations >= args.policy_iterations or not args.aux_epochs
    run.require(one_phase, f"--total-timesteps is less than {args.policy_iterations} rollouts (--policy-iterations)")
    obs_shape, num_actions = envs.single_observation_space.shape, int(envs.single_action_space.n)

    agent = Agent(num_actions).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on ppo_loss(agent, *inputs); returns its metrics
    gradient_step = run.gradient_step(ppo_loss, agent, optimizer, args.max_grad_norm)
    aux_optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)  # with moments of its own
    aux_step = run.gradient_step(aux_loss, agent, aux_optimizer, args.max_grad_norm)
    policy = run.fast(agent)  # NumPy in and out: (batch, 3, 64, 64) -> logits (batch, num_actions), values (batch,)
    return_normalizer = RunningMeanStd()
    now = SimpleNamespace(so_far=np.zeros(args.num_envs, np.float32))  # discounted rewards of the running episodes
    buffer = Buffer(args.policy_iterations * batch_size, obs_shape)
    parts = dict(agent=agent, optimizer=optimizer, aux_optimizer=aux_optimizer)
    parts |= dict(return_normalizer=return_normalizer, buffer=buffer, now=now, envs=envs)
    start = run.resume(**parts)  # what a checkpoint holds
    now.so_far[run.restarted] = 0  # episodes that a resume could not continue

    # ---- storage of one rollout
    shape = (args.num_steps, args.num_envs)
    obs, final_obs = (np.zeros((*shape, *obs_shape), np.uint8) for _ in range(2))
    action, timeout = np.zeros(shape, np.int64), np.zeros(shape, bool)
    logprob, value, reward, done = (np.zeros(shape, np.float32) for _ in range(4))

    next_obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            for each in (optimizer, aux_optimizer):
                each.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
        for step in range(args.num_steps):
            obs[step] = next_obs
            logits, value[step] = policy(next_obs)
            action[step], logprob[step] = sample_categorical(logits)
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step], timeout[step] = terminated | truncated, truncated & ~terminated
            final_obs[step] = infos["next_obs"]  # what the step led to, also where an episode ended
        run.episodes(global_step, reward, done)

        # ---- 2. credit: rewards in units of the standard deviation of the returns
        returns, now.so_far = discounted_returns(reward, done, now.so_far, args.gamma)
        return_normalizer.update(returns.flatten())
        scaled_reward = return_normalizer.scale(reward).astype(np.float32)

        # "compute advantage estimates"
        _, next_value = policy(next_obs)
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

        # ---- 4. auxiliary phase: "optimise L_joint and L_value on all data in B", for E_aux epochs
        buffer.add(obs.reshape(batch_size, *obs_shape), rollout.returns.cpu().numpy())
        if args.aux_epochs and (iteration + 1) % args.policy_iterations == 0:
            images = np.array_split(buffer.arrays["obs"][: len(buffer)], len(buffer) // aux_minibatch_size)
            old_logits = torch.cat([agent.logits(x) for x in images])  # "compute and store current policy"
            for epoch in range(args.aux_epochs):
                for index in torch.randperm(len(buffer)).split(aux_minibatch_size):
                    aux_batch = (torch.as_tensor(x[index.numpy()], device=run.device) for x in buffer.arrays.values())
                    run.learned(aux_step(*aux_batch, old_logits[index.to(run.device)], args.beta_clone))

        # ---- 5. report, when due: a row has the means of the metrics of all gradient steps since the last row
        explained_variance = 1 - rollout.advantage.var() / (rollout.returns.var() + 1e-8)  # advantage: returns - value
        learning_rate = optimizer.param_groups[0]["lr"]
        run.log(global_step, {"charts/learning_rate": learning_rate, "losses/explained_variance": explained_variance})
        run.evaluate(global_step, agent.act, unseen_games)
        run.save(global_step)

    envs.close()
    run.close(agent.act, unseen_games, sample=agent.sample)  # a last evaluation; `solo play` takes this policy
