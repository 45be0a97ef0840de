# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[atari,envpool]>=0.1", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""PPO with random network distillation (RND) on EnvPool's Atari games: exploration by novelty, discrete actions.

Paper     Burda et al. 2018, https://arxiv.org/abs/1810.12894; PPO: https://arxiv.org/abs/1707.06347 ("Eq. n" below)
          EnvPool: Weng et al. 2022, https://arxiv.org/abs/2206.10558
Run       solo train ppo_rnd_envpool --env-id MontezumaRevenge-v5 --threads 8
Spaces    image -> discrete
Differs   from ppo_rnd.py: whole games of EnvPool with sticky actions; convolutional networks, those of predictor and
          target for the newest image only, with statistics of each pixel; clipped rewards
Not for   vector observations: ppo_rnd.py; continuous actions: ppo_continuous_action.py
Details   docs/algorithms/ppo_rnd_envpool.md
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn

from solorl import EnvPoolVectorEnv, Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_kind = "envpool-atari"  # --env-id is one of EnvPool's Atari games
    env_id: str = "MontezumaRevenge-v5"  # id of the game in EnvPool
    total_timesteps: int = 500_000_000  # environment steps of 4 frames, summed over environments
    num_envs: int = 128  # environments stepped in parallel
    num_steps: int = 128  # length of a rollout in each environment
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs per rollout
    learning_rate: float = 1e-4  # learning rate of Adam
    anneal_lr: bool = False  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 0.5  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.999  # discount factor, from 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE (0: TD(0), 1: Monte Carlo), from 0 to 1
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.1  # epsilon of Eq. 7
    vf_coef: float = 0.5  # c1 of Eq. 9, whose L^VF is halved here, as in the authors' code
    ent_coef: float = 0.001  # c2 of Eq. 9
    int_gamma: float = 0.99  # discount factor of the intrinsic reward, from 0 to 1
    ext_coef: float = 2.0  # weight of the extrinsic advantage
    int_coef: float = 1.0  # weight of the intrinsic advantage
    update_proportion: float = 0.25  # fraction of each minibatch that the predictor learns from, from 0 to 1
    warmup_rollouts: int = 50  # rollouts of random actions before training, for the statistics; 0: none
    target_kl: float | None = None  # stop the epochs of a rollout after one whose mean approx_kl is above this
    eval_episodes: int = 10  # games of one evaluation, on environments and seeds of their own


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: torch.Tensor  # (batch_size, 4, 84, 84), bytes
    action: torch.Tensor  # (batch_size,)
    logprob: torch.Tensor  # (batch_size,)
    advantage: torch.Tensor  # (batch_size,), extrinsic and intrinsic
    returns: torch.Tensor  # (batch_size, 2), extrinsic, intrinsic
    reached: torch.Tensor  # (batch_size, 1, 84, 84), bytes: the newest images after the actions
    features: torch.Tensor  # (batch_size, 512), what the target network makes of them


def sticky_envs(env_id, num_envs, **kwargs):
    """Whole games, for training and for evaluation: observations are the last 4 grey images, (4, 84, 84) bytes. In each
    frame the previous action is repeated with probability 0.25; a game has at most 18,000 frames."""
    return EnvPoolVectorEnv(env_id, num_envs, max_steps=4500, repeat_action_probability=0.25, **kwargs)


class Scaled(nn.Module):
    """Bytes to numbers from 0 to 1, on the device: bytes are copied there faster. Channels last: fast convolutions."""

    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last).to(torch.float32) / 255


def nature_cnn():
    """The convolutional network of Mnih et al. 2015, (batch, 4, 84, 84) bytes -> (batch, 512)."""
    convolutions = [nn.Conv2d(4, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3)]
    layers = [layer for convolution in convolutions for layer in (convolution, nn.ReLU())]
    return nn.Sequential(Scaled(), *layers, nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU())


def orthogonal(layer, gain):
    """The layer with orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class TensorMeanStd(nn.Module):
    """Mean and variance of all that was seen, by Eq. 2.1 of Chan et al. 1979; in float32, on the device."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.zeros(()))

    def update(self, x):  # (n, *shape)
        self.count += len(x)
        weight, delta = len(x) / self.count, x.mean(0) - self.mean
        self.var += weight * (x.var(0, correction=0) - self.var + (1 - weight) * delta**2)
        self.mean += weight * delta

    def scale(self, x):  # (n, *shape) -> (n, *shape)
        return (x / (self.var + 1e-8).sqrt()).clamp(-10, 10)

    def forward(self, x):  # (n, *shape) -> (n, *shape)
        return self.scale(x - self.mean)


def frame_cnn(statistics, num_layers):
    """A network for the newest image, (batch, 1, 84, 84) bytes -> (batch, 512): each pixel is normalised and clipped to
    5 standard deviations; then the convolutions of Mnih et al. 2015, and num_layers linear layers."""
    layers = [statistics, nn.Hardtanh(-5, 5)]
    for layer in (nn.Conv2d(1, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3)):
        layers += [orthogonal(layer, 2**0.5), nn.LeakyReLU()]
    layers.append(nn.Flatten())
    for fan_in in [64 * 7 * 7] + [512] * (num_layers - 1):
        layers += [orthogonal(nn.Linear(fan_in, 512), 2**0.5), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """A policy, and a critic with two heads: extrinsic and intrinsic values."""

    def __init__(self, num_actions):
        super().__init__()
        self.network = nature_cnn()
        for layer in self.network:
            if hasattr(layer, "weight"):
                orthogonal(layer, 2**0.5)
        self.actor = orthogonal(nn.Linear(512, num_actions), 0.01)
        self.critic = orthogonal(nn.Linear(512, 2), 1.0)

    def forward(self, obs):  # (batch, 4, 84, 84) -> logits (batch, num_actions), values (batch, 2)
        features = self.network(obs)
        return self.actor(features), self.critic(features)

    def evaluate_actions(self, obs, action):  # (batch, *obs_shape), (batch,) -> logprobs, entropies, values (batch, 2)
        logits, value = self(obs)
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, action[:, None]).squeeze(1), entropy, value

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, 4, 84, 84) -> NumPy (batch,): the most likely actions
        return self(torch.as_tensor(obs, device=self.actor.weight.device))[0].argmax(1).cpu().numpy()


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
    envs = sticky_envs(args.env_id, args.num_envs)  # where a game ends, obs begins the next one
    run.require_spaces(envs, obs="image", action="discrete")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_rollouts = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    num_iterations = num_rollouts - args.warmup_rollouts
    run.require(num_iterations > 0, "--total-timesteps leaves no rollout to learn from after --warmup-rollouts")
    obs_shape, num_actions = envs.single_observation_space.shape, int(envs.single_action_space.n)

    agent = Agent(num_actions).to(run.device)
    obs_normalizer, return_normalizer = TensorMeanStd(1, 84, 84).to(run.device), TensorMeanStd().to(run.device)
    target = frame_cnn(obs_normalizer, 1).to(run.device).requires_grad_(False)  # random, never trained
    predictor = frame_cnn(obs_normalizer, 3).to(run.device)
    modules = nn.ModuleDict({"agent": agent, "predictor": predictor})
    optimizer = torch.optim.Adam(modules.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on rnd_loss(modules, *inputs); returns its metrics
    gradient_step = run.gradient_step(rnd_loss, modules, optimizer, args.max_grad_norm)
    policy = run.fast(agent)  # NumPy in and out: (batch, 4, 84, 84) -> logits (batch, num_actions), values (batch, 2)
    # so_far: discounted intrinsic rewards until now, over all games
    now = SimpleNamespace(so_far=np.zeros(args.num_envs, np.float32))
    # what a checkpoint holds; target and predictor bring the statistics of the pixels with them
    parts = dict(agent=agent, predictor=predictor, target=target, optimizer=optimizer)
    start = run.resume(**parts, return_normalizer=return_normalizer, now=now, envs=envs)

    # ---- storage of one rollout
    shape = (args.num_steps, args.num_envs)
    obs, final_obs = (np.zeros((*shape, *obs_shape), np.uint8) for _ in range(2))
    reached = np.zeros((*shape, 1, *obs_shape[1:]), np.uint8)  # the newest images after the actions
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
            done[step], reached[step] = terminated | truncated, infos["next_obs"][:, -1:]  # what the step led to
        for chunk in torch.as_tensor(reached, device=run.device).flatten(0, 1).split(minibatch_size):
            obs_normalizer.update(chunk.float())
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
            obs[step] = next_obs
            logits, value[step] = policy(next_obs)
            action[step], logprob[step] = sample_categorical(logits)
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step], timeout[step] = terminated | truncated, truncated & ~terminated
            final_obs[step], reached[step] = infos["next_obs"], infos["next_obs"][:, -1:]  # where the step led
        run.episodes(global_step, reward, done)

        # ---- 2. credit: the intrinsic reward is the predictor's error on the image reached, divided by the standard
        # deviation of the discounted intrinsic returns
        images = torch.as_tensor(reached, device=run.device).flatten(0, 1)
        chunks = images.split(minibatch_size)  # as floats, all images at once would take much memory
        for chunk in chunks:
            obs_normalizer.update(chunk.float())
        with torch.no_grad():
            features, predicted = (torch.cat([network(chunk) for chunk in chunks]) for network in (target, predictor))
        int_reward = squared_error(predicted, features).reshape(shape).cpu().numpy()
        never = np.zeros(shape, np.float32)  # intrinsic returns continue in the next game: never done, no final value
        int_returns, now.so_far = discounted_returns(int_reward, never, now.so_far, args.int_gamma)
        return_normalizer.update(torch.as_tensor(int_returns, device=run.device).flatten())
        scaled_int_reward = int_reward / np.sqrt(return_normalizer.var.item() + 1e-8, dtype=np.float32)

        # "compute advantage estimates"
        _, next_value = policy(next_obs)
        final_value = np.zeros(shape, np.float32)
        if timeout.any():  # a time limit does not end the task: bootstrap from the value of the final observation
            final_value[timeout] = policy(final_obs[timeout])[1][:, 0]
        ext = gae(np.sign(reward), value[..., 0], done, final_value, next_value[:, 0], args.gamma, args.gae_lambda)
        intr = gae(scaled_int_reward, value[..., 1], never, never, next_value[:, 1], args.int_gamma, args.gae_lambda)
        advantage = args.ext_coef * ext + args.int_coef * intr
        returns = np.stack([ext, intr], -1) + value  # of each head
        rollout = (torch.as_tensor(x, device=run.device) for x in (obs, action, logprob, advantage, returns))
        rollout = Batch(*(x.flatten(0, 1) for x in rollout), images, features)

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
        run.evaluate(global_step, agent.act, sticky_envs)
        run.save(global_step)

    envs.close()
    run.close(agent.act, sticky_envs)  # a last evaluation; `solo play` takes this policy
