# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[atari]>=0.1", "ale-py>=0.11", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Proximal policy optimisation (PPO) on Atari in several processes: discrete actions, images.

Paper     Schulman et al. 2017, https://arxiv.org/abs/1707.06347 ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438
          Games as in Mnih et al. 2015, https://www.nature.com/articles/nature14236
Run       solo train ppo_atari_multigpu --env-id ALE/Pong-v5
Spaces    image -> discrete
Differs   from ppo_atari.py: started with --nproc 2 or by torchrun, each process (rank) steps its part of the
          environments and learns from its part of each minibatch; gradients are averaged over the ranks. Their number
          changes what is learned by rounding only
Not for   vector observations: ppo.py; continuous actions: ppo_continuous_action.py
Details   docs/algorithms/ppo_atari_multigpu.md
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from gymnasium.wrappers import FrameStackObservation, MaxAndSkipObservation, ResizeObservation, TimeLimit

from solorl import Run, RunArgs, parse

gym.register_envs(ale_py)


@dataclass
class Args(RunArgs):
    env_kind = "atari"  # --env-id is one of Gymnasium's Atari games
    env_id: str = "ALE/Pong-v5"  # Gymnasium id of the game; PongNoFrameskip-v4 has no sticky actions
    total_timesteps: int = 10_000_000  # environment steps of 4 frames, summed over environments
    num_envs: int = 8  # environments stepped in parallel, by all ranks together
    num_steps: int = 128  # length of a rollout in each environment
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs per rollout
    learning_rate: float = 2.5e-4  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 0.5  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE (0: TD(0), 1: Monte Carlo), from 0 to 1
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.1  # epsilon of Eq. 7
    clip_vloss: bool = True  # also clip how far a value moves from the old one, by clip_coef; not in the paper
    vf_coef: float = 0.5  # c1 of Eq. 9, whose L^VF is halved here, as in the authors' code
    ent_coef: float = 0.01  # c2 of Eq. 9
    target_kl: float | None = None  # stop the epochs of a rollout after one whose mean approx_kl is above this
    eval_episodes: int = 10  # games of one evaluation, on environments and seeds of their own


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: torch.Tensor  # (batch_size, 4, 84, 84), bytes
    action: torch.Tensor  # (batch_size,), like all that follow
    logprob: torch.Tensor
    value: torch.Tensor
    advantage: torch.Tensor
    returns: torch.Tensor


class RandomNoops(gym.Wrapper):
    """Begins each game with 1 to 30 frames of doing nothing, so that games differ."""

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        for _ in range(self.unwrapped.np_random.integers(1, 31)):
            obs, _, _, _, info = self.env.step(0)
        return obs, info


class PressFire(gym.Wrapper):
    """Presses FIRE at the start of a game and after a lost life, in all games with this button: some wait for it.
    After a lost life FIRE replaces the agent's action, which is stored as the agent chose it."""

    def __init__(self, env):
        super().__init__(env)
        self.fire, self.lives, self.life_lost = env.unwrapped.get_action_meanings()[1] == "FIRE", 0, False

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        if self.fire:
            obs, _, _, _, info = self.env.step(1)
        self.lives, self.life_lost = info["lives"], False
        return obs, info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(1 if self.fire and self.life_lost else action)
        self.life_lost, self.lives = info["lives"] < self.lives, info["lives"]
        return obs, reward, terminated, truncated, info


def make_env(env_id, **kwargs):
    """One whole game, for training and for evaluation: observations are the last 4 grey images, (4, 84, 84) bytes."""
    env = gym.make(env_id, obs_type="grayscale", frameskip=1, max_num_frames_per_episode=0, **kwargs)
    env = MaxAndSkipObservation(RandomNoops(env), skip=4)  # pixelwise maximum of the last two frames: objects flicker
    env = ResizeObservation(PressFire(env), (84, 84))
    return TimeLimit(FrameStackObservation(env, 4), 27_000)


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


class Agent(nn.Module):
    def __init__(self, num_actions):
        super().__init__()
        self.network = nature_cnn()
        for layer in self.network:
            if hasattr(layer, "weight"):
                orthogonal(layer, 2**0.5)
        self.actor = orthogonal(nn.Linear(512, num_actions), 0.01)
        self.critic = orthogonal(nn.Linear(512, 1), 1.0)

    def forward(self, obs):  # (batch, 4, 84, 84) -> logits (batch, num_actions), values (batch,)
        features = self.network(obs)
        return self.actor(features), self.critic(features).squeeze(-1)

    def evaluate_actions(self, obs, action):  # (batch, *obs_shape), (batch,) -> logprobs, entropies, values: (batch,)
        logits, value = self(obs)
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, action[:, None]).squeeze(1), entropy, value

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, 4, 84, 84) -> NumPy (batch,): the most likely actions
        return self(torch.as_tensor(obs, device=self.actor.weight.device))[0].argmax(1).cpu().numpy()


def sample_share(logits, num_envs, mine):
    """Actions of the environments `mine` of this rank, drawn from logits (local_envs, num_actions), and their
    log-probabilities; all ranks draw the noise of all environments, so that their number changes nothing."""
    gumbel = np.random.gumbel(size=(num_envs, logits.shape[1]))[mine]
    action = (logits + gumbel).argmax(1)  # the Gumbel-max trick
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


def ppo_loss_of_share(agent, batch, args):
    """The negative of Eq. 9, and the metrics. The advantages are normalised already, with those of the other ranks."""
    logprob, entropy, value = agent.evaluate_actions(batch.obs, batch.action)
    assert logprob.shape == entropy.shape == value.shape == batch.advantage.shape

    # L^CLIP, Eq. 7
    logratio = logprob - batch.logprob
    ratio = logratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    objective = torch.min(ratio * batch.advantage, clipped_ratio * batch.advantage).mean()

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
    run = Run(args, parallel=True)  # seeds Python, NumPy and torch, in all ranks alike: they draw the same numbers
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    equal_shares = args.num_envs % run.world_size == minibatch_size % run.world_size == 0
    run.require(
        equal_shares, f"--num-envs and minibatches ({minibatch_size} steps) must divide by {run.world_size} ranks"
    )
    local_envs = args.num_envs // run.world_size
    mine = slice(run.rank * local_envs, (run.rank + 1) * local_envs)  # the environments of this rank
    envs = run.vector_env(make_env, args.env_id, local_envs)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="image", action="discrete")
    obs_shape, num_actions = envs.single_observation_space.shape, int(envs.single_action_space.n)

    agent = Agent(num_actions).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step averages gradients and metrics over the ranks, then clips
    gradient_step = run.gradient_step(ppo_loss_of_share, agent, optimizer, args.max_grad_norm)
    policy = run.fast(agent)  # NumPy in and out: (batch, 4, 84, 84) -> logits (batch, num_actions), values (batch,)
    now = SimpleNamespace(lives=np.zeros(local_envs, np.int64))
    start = run.resume(agent=agent, optimizer=optimizer, envs=envs, now=now)  # what a checkpoint holds
    now.lives[run.restarted] = 0  # games that a resume had to begin again: no life is lost yet

    # ---- storage of one rollout
    shape = (args.num_steps, local_envs)
    obs, final_obs = (np.zeros((*shape, *obs_shape), np.uint8) for _ in range(2))
    action, over, timeout = np.zeros(shape, np.int64), np.zeros(shape, bool), np.zeros(shape, bool)
    logprob, value, reward, done = (np.zeros(shape, np.float32) for _ in range(4))

    next_obs = run.reset(envs)  # (local_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
        for step in range(args.num_steps):
            obs[step] = next_obs
            logits, value[step] = policy(next_obs)
            action[step], logprob[step] = sample_share(logits, args.num_envs, mine)
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            over[step], timeout[step] = terminated | truncated, truncated & ~terminated
            if timeout[step].any():  # a life lost in the last step allowed ends the return, too
                timeout[step] &= infos["final_info"]["lives"] >= now.lives
            done[step] = over[step] | (infos["lives"] < now.lives)  # a lost life ends the return, but not the game
            now.lives = infos["lives"]
            final_obs[step] = infos["next_obs"]  # what the step led to, also where an episode ended
        run.episodes(global_step, reward, over)

        # ---- 2. credit: "compute advantage estimates"
        _, next_value = policy(next_obs)
        final_value = np.zeros(shape, np.float32)
        if timeout.any():  # a time limit does not end the task: bootstrap from the value of the final observation
            final_value[timeout] = policy(final_obs[timeout])[1]
        advantage = gae(np.sign(reward), value, done, final_value, next_value, args.gamma, args.gae_lambda)
        rollout = (obs, action, logprob, value, advantage, advantage + value)
        rollout = run.gather([torch.as_tensor(x, device=run.device) for x in rollout], dim=1)  # of all ranks
        rollout = Batch(*(x.flatten(0, 1) for x in rollout))

        # ---- 3. learn: "optimize surrogate L wrt theta, with K epochs and minibatch size M <= NT"
        for epoch in range(args.update_epochs):
            kl = []
            for index in torch.randperm(batch_size, device=run.device).split(minibatch_size):
                share = index.chunk(run.world_size)[run.rank]
                minibatch = Batch(*(x[share] for x in rollout))
                if args.norm_adv:
                    advantage = rollout.advantage[index]  # of the whole minibatch
                    advantage = (minibatch.advantage - advantage.mean()) / (advantage.std() + 1e-8)
                    minibatch = minibatch._replace(advantage=advantage)
                metrics = gradient_step(minibatch, args)
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
