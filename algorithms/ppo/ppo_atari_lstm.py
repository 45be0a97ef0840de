# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[atari]>=0.1", "ale-py>=0.11", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Proximal policy optimisation (PPO) on Atari with an LSTM: discrete actions, images, one at a time.

Paper     Schulman et al. 2017, https://arxiv.org/abs/1707.06347 ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438
          LSTM: Hochreiter & Schmidhuber 1997, https://doi.org/10.1162/neco.1997.9.8.1735
Run       solo train ppo_atari_lstm --env-id ALE/Pong-v5
Spaces    image -> discrete, one frame
Differs   from ppo_atari.py: the policy sees one image and remembers the others with an LSTM, which forgets where a game
          begins, not where a life is lost; minibatches are rollouts of some environments, in their order
Not for   vector observations: ppo.py; continuous actions: ppo_continuous_action.py; several agents:
          ppo_pettingzoo_atari.py
Details   docs/algorithms/ppo_atari_lstm.md
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
    clip_coef: float = 0.1  # epsilon of Eq. 7
    clip_vloss: bool = True  # also clip how far a value moves from the old one, by clip_coef; not in the paper
    vf_coef: float = 0.5  # c1 of Eq. 9, whose L^VF is halved here, as in the authors' code
    ent_coef: float = 0.01  # c2 of Eq. 9
    target_kl: float | None = None  # stop the epochs of a rollout after one whose mean approx_kl is above this
    eval_episodes: int = 10  # games of one evaluation, on environments and seeds of their own


class Batch(NamedTuple):
    """A rollout, or the part of some environments of it."""

    obs: torch.Tensor  # (num_steps, num_envs, 1, 84, 84), bytes
    first: torch.Tensor  # (num_steps, num_envs): whether a game begins with obs
    state: torch.Tensor  # (2, num_envs, 128), the memory before the rollout
    action: torch.Tensor  # (num_steps, num_envs), like all that follow
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
    """One whole game, for training and for evaluation: observations are grey images, (1, 84, 84) bytes."""
    env = gym.make(env_id, obs_type="grayscale", frameskip=1, max_num_frames_per_episode=0, **kwargs)
    env = MaxAndSkipObservation(RandomNoops(env), skip=4)  # pixelwise maximum of the last two frames: objects flicker
    env = ResizeObservation(PressFire(env), (84, 84))
    return TimeLimit(FrameStackObservation(env, 1), 27_000)


class Scaled(nn.Module):
    """Bytes to numbers from 0 to 1, on the device: bytes are copied there faster. Channels last: fast convolutions."""

    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last).to(torch.float32) / 255


def one_frame_cnn():
    """The convolutional network of Mnih et al. 2015 for one image, (batch, 1, 84, 84) bytes -> (batch, 512)."""
    convolutions = [nn.Conv2d(1, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3)]
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
        self.network = one_frame_cnn()
        for layer in self.network:
            if hasattr(layer, "weight"):
                orthogonal(layer, 2**0.5)
        self.lstm = nn.LSTMCell(512, 128)
        for weight in (self.lstm.weight_ih, self.lstm.weight_hh):
            nn.init.orthogonal_(weight)
        for bias in (self.lstm.bias_ih, self.lstm.bias_hh):
            nn.init.zeros_(bias)
        self.actor = orthogonal(nn.Linear(128, num_actions), 0.01)
        self.critic = orthogonal(nn.Linear(128, 1), 1.0)

    def forward(self, obs, state, first):
        """Some steps in some environments; the memory is empty where a game begins.

        obs (steps, envs, 1, 84, 84), state (2, envs, 128), first (steps, envs)
        -> logits (steps, envs, num_actions), values (steps, envs), state after the last step
        """
        features = self.network(obs.flatten(0, 1)).unflatten(0, first.shape)  # all images in one batch
        (hidden, cell), outputs = state, []
        for x, begins in zip(features, first, strict=True):
            kept = (~begins).float()[:, None]
            hidden, cell = self.lstm(x, (kept * hidden, kept * cell))
            outputs.append(hidden)
        output = torch.stack(outputs)
        return self.actor(output), self.critic(output).squeeze(-1), torch.stack([hidden, cell])

    def evaluate_actions(self, obs, state, first, action):  # -> logprobs, entropies, values: all (steps, envs)
        logits, value, _ = self(obs, state, first)
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, action[..., None]).squeeze(-1), entropy, value

    @torch.no_grad()
    def step(self, obs, state, first):  # NumPy (envs, 1, 84, 84), state, (envs,) -> NumPy logits, NumPy values, state
        obs, first = (torch.as_tensor(x, device=state.device)[None] for x in (obs, first))
        logits, value, state = self(obs, state, first)
        return logits[0].cpu().numpy(), value[0].cpu().numpy(), state

    def act(self, obs, state, first):  # the most likely actions, NumPy (envs,), and the state after them
        if state is None:
            state = torch.zeros(2, len(obs), 128, device=self.actor.weight.device)
        logits, _, state = self.step(obs, state, first)
        return logits.argmax(1), state


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


def ppo_lstm_loss(agent, batch, args):
    """The negative of Eq. 9, and the metrics; the LSTM runs again from the state stored before the rollout."""
    logprob, entropy, value = agent.evaluate_actions(batch.obs, batch.state, batch.first, batch.action)
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
    run.require_spaces(envs, obs="image", action="discrete")
    batch_size = args.num_envs * args.num_steps
    minibatch_envs = args.num_envs // args.num_minibatches
    run.require(args.num_envs % args.num_minibatches == 0, "--num-minibatches must divide --num-envs (whole rollouts)")
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    obs_shape, num_actions = envs.single_observation_space.shape, int(envs.single_action_space.n)

    agent = Agent(num_actions).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on ppo_lstm_loss(agent, *inputs); returns its metrics
    gradient_step = run.gradient_step(ppo_lstm_loss, agent, optimizer, args.max_grad_norm)
    state = torch.zeros(2, args.num_envs, 128, device=run.device)  # hidden and cell state of each environment
    # first: whether a game begins with next_obs
    now = SimpleNamespace(state=state, first=np.ones(args.num_envs, bool), lives=np.zeros(args.num_envs, np.int64))
    start = run.resume(agent=agent, optimizer=optimizer, envs=envs, now=now)  # what a checkpoint holds
    now.lives[run.restarted] = 0  # games that a resume had to begin again: no life is lost yet
    now.first[run.restarted] = True  # episodes that a resume could not continue

    # ---- storage of one rollout
    shape = (args.num_steps, args.num_envs)
    obs, first = np.zeros((*shape, *obs_shape), np.uint8), np.zeros(shape, bool)
    action, over, timeout = np.zeros(shape, np.int64), np.zeros(shape, bool), np.zeros(shape, bool)
    logprob, value, reward, done = (np.zeros(shape, np.float32) for _ in range(4))

    next_obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
        state_before, final_value = now.state, np.zeros(shape, np.float32)
        for step in range(args.num_steps):
            obs[step], first[step] = next_obs, now.first
            logits, value[step], now.state = agent.step(next_obs, now.state, now.first)
            action[step], logprob[step] = sample_categorical(logits)
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            over[step], timeout[step] = terminated | truncated, truncated & ~terminated
            if timeout[step].any():  # a life lost in the last step allowed ends the return, too
                timeout[step] &= infos["final_info"]["lives"] >= now.lives
            done[step] = over[step] | (infos["lives"] < now.lives)  # a lost life ends the return, but not the game
            now.lives, now.first = infos["lives"], terminated | truncated
            if timeout[step].any():
                # A time limit does not end the task: bootstrap from the value of the final observation, computed with
                # the memory of the episode that was cut.
                cut = np.flatnonzero(timeout[step])
                final_obs, memory = infos["next_obs"][cut], now.state[:, cut]  # what the step led to
                _, final_value[step, cut], _ = agent.step(final_obs, memory, np.zeros(len(cut), bool))
        run.episodes(global_step, reward, over)

        # ---- 2. credit: "compute advantage estimates"
        _, next_value, _ = agent.step(next_obs, now.state, now.first)
        advantage = gae(np.sign(reward), value, done, final_value, next_value, args.gamma, args.gae_lambda)
        rollout = (obs, first, state_before, action, logprob, value, advantage, advantage + value)
        rollout = Batch(*(torch.as_tensor(x, device=run.device) for x in rollout))

        # ---- 3. learn: "optimize surrogate L wrt theta, with K epochs and minibatch size M <= NT"
        for epoch in range(args.update_epochs):
            kl = []
            for index in torch.randperm(args.num_envs, device=run.device).split(minibatch_envs):
                metrics = gradient_step(Batch(*(x[:, index] for x in rollout)), args)
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
