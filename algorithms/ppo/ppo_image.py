# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[atari]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Proximal policy optimisation (PPO) on images of any size: discrete actions.

Paper     Schulman et al. 2017, https://arxiv.org/abs/1707.06347 ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438
          Network: Mnih et al. 2015, https://www.nature.com/articles/nature14236
Run       solo train ppo_image --env-id games/MovingDot-v0
Spaces    image -> discrete
Differs   from ppo.py: observations are the last images, grey or in colour, resized; one convolutional network for actor
          and critic
Not for   Atari games: ppo_atari.py; vector observations: ppo.py; continuous actions:
          ppo_image_continuous_action.py
Details   docs/algorithms/ppo_image.md
"""

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from gymnasium.wrappers import FrameStackObservation, GrayscaleObservation, ResizeObservation, TransformObservation

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "games/MovingDot-v0"  # Gymnasium id of the environment
    size: int = 64  # height and width of the images after resizing; 0: leave them as they are
    grey: bool = False  # make the images grey
    num_frames: int = 4  # last images in one observation
    total_timesteps: int = 1_000_000  # environment steps, summed over environments
    num_envs: int = 8  # environments stepped in parallel
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
    clip_vloss: bool = True  # also clip how far a value moves from the old one, by clip_coef; not in the paper
    vf_coef: float = 0.5  # c1 of Eq. 9, whose L^VF is halved here, as in the authors' code
    ent_coef: float = 0.01  # c2 of Eq. 9
    target_kl: float | None = None  # stop the epochs of a rollout after one whose mean approx_kl is above this


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: torch.Tensor  # (batch_size, channels, height, width), bytes
    action: torch.Tensor  # (batch_size,), like all that follow
    logprob: torch.Tensor
    value: torch.Tensor
    advantage: torch.Tensor
    returns: torch.Tensor


def channels_last(env):
    """The environment with images (height, width, channels); channels are the axis of size 1, 3 or 4, first or last.
    None where it has no images, or where both axes can be the one of channels, or neither."""
    space = env.observation_space
    if not isinstance(space, gym.spaces.Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3):
        return None
    shape = space.shape if len(space.shape) == 3 else (*space.shape, 1)  # two axes: grey
    first, last = (shape[axis] in (1, 3, 4) for axis in (0, 2))
    if first == last:
        return None
    order = (1, 2, 0) if first else (0, 1, 2)
    space = gym.spaces.Box(0, 255, tuple(shape[axis] for axis in order), np.uint8)
    return TransformObservation(env, lambda obs: obs.reshape(shape).transpose(order), space)


def image_env(env_id, size, grey, num_frames, **kwargs):
    """One environment, for training and for evaluation: observations are the last images, all channels of one after
    those of the one before, (num_frames * channels, height, width) bytes. Without images it is left as it is."""
    env = gym.make(env_id, **kwargs)
    if (images := channels_last(env)) is None:
        return env
    if grey and images.observation_space.shape[2] == 3:
        images = GrayscaleObservation(images, keep_dim=True)
    if size and images.observation_space.shape[:2] != (size, size):
        images = ResizeObservation(images, (size, size))
    height, width, channels = images.observation_space.shape
    shape = (num_frames * channels, height, width)
    images, space = FrameStackObservation(images, num_frames), gym.spaces.Box(0, 255, shape, np.uint8)
    return TransformObservation(images, lambda obs: obs.transpose(0, 3, 1, 2).reshape(shape), space)


class Scaled(nn.Module):
    """Bytes to numbers from 0 to 1, on the device: bytes are copied there faster. Channels last: fast convolutions."""

    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last).to(torch.float32) / 255


def image_cnn(obs_shape):
    """The convolutional network of Mnih et al. 2015, (batch, *obs_shape) bytes -> (batch, 512). Its kernels need images
    of at least 36 pixels; those of smaller images are smaller, and need 15."""
    small = min(obs_shape[1:]) < 36
    convolutions = [(32, 3, 2), (64, 3, 2), (64, 3, 1)] if small else [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
    layers, channels = [Scaled()], obs_shape[0]
    for filters, kernel, stride in convolutions:
        layers += [nn.Conv2d(channels, filters, kernel, stride), nn.ReLU()]
        channels = filters
    layers = nn.Sequential(*layers, nn.Flatten())
    with torch.no_grad():
        size = layers(torch.zeros(1, *obs_shape, dtype=torch.uint8)).shape[1]
    return layers.extend([nn.Linear(size, 512), nn.ReLU()])


def orthogonal(layer, gain):
    """The layer with orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self, obs_shape, num_actions):
        super().__init__()
        self.network = image_cnn(obs_shape)
        for layer in self.network:
            if hasattr(layer, "weight"):
                orthogonal(layer, 2**0.5)
        self.actor = orthogonal(nn.Linear(512, num_actions), 0.01)
        self.critic = orthogonal(nn.Linear(512, 1), 1.0)

    def forward(self, obs):  # (batch, *obs_shape) -> logits (batch, num_actions), values (batch,)
        features = self.network(obs)
        return self.actor(features), self.critic(features).squeeze(-1)

    def evaluate_actions(self, obs, action):  # (batch, *obs_shape), (batch,) -> logprobs, entropies, values: (batch,)
        logits, value = self(obs)
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, action[:, None]).squeeze(1), entropy, value

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch,): the most likely actions
        return self(torch.as_tensor(obs, device=self.actor.weight.device))[0].argmax(1).cpu().numpy()


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
    run.require(not args.size or find_spec("cv2"), "--size needs OpenCV: pip install 'solorl[atari]', or take --size 0")
    make_env = partial(image_env, size=args.size, grey=args.grey, num_frames=args.num_frames)
    envs = run.vector_env(make_env, args.env_id, args.num_envs)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="image", action="discrete")
    obs_shape, num_actions = envs.single_observation_space.shape, int(envs.single_action_space.n)
    has_channels = channels_last(gym.make(args.env_id)) is not None
    run.require(has_channels, f"images of shape {obs_shape} must have 1, 3 or 4 channels on their first or last axis")
    run.require(not args.grey or obs_shape[0] == args.num_frames, "--grey takes images with 1 or 3 channels")
    run.require(min(obs_shape[1:]) >= 15, f"images of {obs_shape[1:]} pixels are too small: --size must be at least 15")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches

    agent = Agent(obs_shape, num_actions).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on ppo_loss(agent, *inputs); returns its metrics
    gradient_step = run.gradient_step(ppo_loss, agent, optimizer, args.max_grad_norm)
    policy = run.fast(agent)  # NumPy in and out: (batch, *obs_shape) -> logits (batch, num_actions), values (batch,)
    start = run.resume(agent=agent, optimizer=optimizer, envs=envs)  # what a checkpoint holds

    # ---- storage of one rollout
    shape = (args.num_steps, args.num_envs)
    obs, final_obs = (np.zeros((*shape, *obs_shape), np.uint8) for _ in range(2))
    action, timeout = np.zeros(shape, np.int64), np.zeros(shape, bool)
    logprob, value, reward, done = (np.zeros(shape, np.float32) for _ in range(4))

    next_obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
        for step in range(args.num_steps):
            obs[step] = next_obs
            logits, value[step] = policy(next_obs)
            action[step], logprob[step] = sample_categorical(logits)
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step], timeout[step] = terminated | truncated, truncated & ~terminated
            final_obs[step] = infos["next_obs"]  # what the step led to, also where an episode ended
        run.episodes(global_step, reward, done)

        # ---- 2. credit: "compute advantage estimates"
        _, next_value = policy(next_obs)
        final_value = np.zeros(shape, np.float32)
        if timeout.any():  # a time limit does not end the task: bootstrap from the value of the final observation
            final_value[timeout] = policy(final_obs[timeout])[1]
        advantage = gae(reward, value, done, final_value, next_value, args.gamma, args.gae_lambda)
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

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        explained_variance = 1 - rollout.advantage.var() / (rollout.returns.var() + 1e-8)  # advantage: returns - value
        learning_rate = optimizer.param_groups[0]["lr"]
        run.log(global_step, {"charts/learning_rate": learning_rate, "losses/explained_variance": explained_variance})
        run.evaluate(global_step, agent.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(agent.act, make_env)  # a last evaluation; `solo play` takes this policy
