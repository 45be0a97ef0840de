# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Decision transformer (DT): acts so that a return that is asked for follows; continuous actions, vector observations.

Nothing is played but evaluations: `global_step` counts gradient steps.

Paper     Chen et al. 2021, https://arxiv.org/abs/2106.01345
Run       solo train decision_transformer --dataset data/hopper-medium --env-id Hopper-v5
Spaces    vector -> continuous
Differs   from bc.py: the policy is a transformer that sees the last steps and, before each observation, the sum of the
          rewards that are still to come; in evaluation that sum is asked for
Not for   discrete actions: iql_discrete.py; learning by playing: sac_continuous_action.py
Details   docs/algorithms/decision_transformer.md
"""

from dataclasses import dataclass
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "Hopper-v5"  # Gymnasium id of the environment, for evaluation
    dataset: str = ""  # folders with recorded transitions, separated by commas (see solo record)
    total_timesteps: int = 100_000  # gradient steps
    batch_size: int = 64  # windows per gradient step
    learning_rate: float = 1e-4  # learning rate of AdamW after the warm-up
    warmup_steps: int = 10_000  # gradient steps in which the learning rate rises linearly; 1 does without
    weight_decay: float = 1e-4  # of AdamW, for all parameters
    max_grad_norm: float = 0.25  # clip the global norm of the gradient; inf: do not clip
    dropout: float = 0.1  # fraction of the numbers that are dropped in learning, from 0 to 1
    target_return_to_go: float = 3_600.0  # the return that evaluations ask for; may be negative
    return_scale: float = 1_000.0  # returns are divided by it
    context_length: int = 20  # steps of a window
    num_layers: int = 3  # layers of the transformer
    num_heads: int = 1  # attention heads of a layer
    width: int = 128  # numbers that a layer has for each token; a multiple of --num-heads
    max_steps: int = 1_000  # steps of an episode that have an embedding of their own; all later ones share the last


class Batch(NamedTuple):
    """Windows of steps that follow each other in an episode, the newest last; places before them may be empty."""

    return_to_go: torch.Tensor  # (batch_size, context_length, 1), sum of rewards from here on / --return-scale
    obs: torch.Tensor  # (batch_size, context_length, obs_dim)
    action: torch.Tensor  # (batch_size, context_length, action_dim), in [-1, 1]
    time: torch.Tensor  # (batch_size, context_length, 1), steps since the episode began
    filled: torch.Tensor  # (batch_size, context_length, 1), 1, or 0 where the place is empty


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


class AppendReward(gym.Wrapper):
    """Observations are vectors that end with the reward of the step before, 0 where an episode begins."""

    def __init__(self, env):
        super().__init__(env)
        size = int(np.prod(env.observation_space.shape)) + 1
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return np.append(obs, 0.0).astype(np.float32), info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return np.append(obs, reward).astype(np.float32), reward, terminated, truncated, info


def make_eval_env(env_id, **kwargs):
    """One environment for evaluation only, whose policy must know the rewards; a data set has the plain observations,
    so `make_env` gives the spaces with which it is compared."""
    return AppendReward(make_env(env_id, **kwargs))


def returns_to_go(reward, last, gamma):
    """The discounted sums of rewards (n,) to the end of the episode, which is where `last` (n,) is True."""
    returns, total = np.zeros_like(reward), 0.0
    for i in reversed(range(len(reward))):
        total = reward[i] + gamma * (0.0 if last[i] else total)
        returns[i] = total
    return returns


def steps_of(dataset, obs_dim, return_scale):
    """A data set of n transitions as vectors, NumPy (n, obs_dim + action_dim + 3), with the fields of Batch in turn."""
    n = len(dataset)
    first = np.searchsorted(dataset.episode, dataset.episode)  # (n,), of the same episode: numbers ascend
    return_to_go = returns_to_go(dataset.reward, dataset.terminated | dataset.truncated, 1.0) / return_scale
    time = np.arange(n) - first
    fields = [return_to_go[:, None], dataset.obs.reshape(n, obs_dim), dataset.action, time[:, None], np.ones((n, 1))]
    return np.concatenate(fields, 1).astype(np.float32)


class Windows:
    """Steps in host memory, of which windows are drawn."""

    def __init__(self, steps, episode, context_length):
        self.steps = steps  # NumPy (n, obs_dim + action_dim + 3)
        self.last = np.searchsorted(episode, episode, "right") - 1  # (n,), the last step of the same episode
        self.context_length = context_length

    def sample(self, batch_size, device):
        """Windows (batch_size, context_length, obs_dim + action_dim + 3), zeros in empty places.

        Each begins with any step and has those that follow in its episode: so an episode is drawn with a probability
        proportional to its length, then a step of it uniformly.
        """
        begin = np.random.randint(len(self.steps), size=(batch_size, 1))
        end = np.minimum(begin + self.context_length - 1, self.last[begin])
        index = end + np.arange(1 - self.context_length, 1)
        window = self.steps[np.maximum(index, begin)] * (index >= begin)[..., None].astype(np.float32)
        return torch.from_numpy(window).to(device)


class Standardize(nn.Module):
    """(obs - mean) / (std + 1e-3), with mean and standard deviation of a data set; 0 and 1 if it is empty."""

    def __init__(self, obs):  # NumPy (n, obs_dim)
        super().__init__()
        mean, std = np.zeros(obs.shape[1]), np.ones(obs.shape[1])
        if len(obs):
            mean, std = obs.mean(0, np.float64), obs.std(0, np.float64)
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std + 1e-3, dtype=torch.float32))

    def forward(self, obs):  # (batch, obs_dim) -> (batch, obs_dim)
        return (obs - self.mean) / self.std


def attention_mask(filled):
    """Which tokens a token sees (batch, 3 * steps, 3 * steps): itself and those before it, but none of an empty place.

    filled (batch, steps, 1); a step has three tokens: return-to-go, observation, action
    """
    key = filled.squeeze(-1).repeat_interleave(3, 1) > 0
    length = key.shape[1]
    return key[:, None] & torch.ones(length, length, dtype=torch.bool, device=key.device).tril()


def masked_attention(query, key, value, allowed, dropout):
    """Softmax attention. query, key and value (batch, heads, length, size), allowed (batch, length, length)."""
    score = query @ key.mT / query.shape[-1] ** 0.5
    weight = score.masked_fill(~allowed[:, None], torch.finfo(score.dtype).min).softmax(-1)
    return F.dropout(weight, dropout) @ value


class Block(nn.Module):
    """A layer of GPT-2, with ReLU: layer normalisation stands before attention and MLP."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        for linear in (self.query_key_value, self.out, self.mlp[0], self.mlp[2]):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x, allowed, dropout):  # (batch, length, width) -> (batch, length, width)
        parts = self.query_key_value(self.norm1(x)).chunk(3, -1)
        query, key, value = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in parts)
        attended = masked_attention(query, key, value, allowed, dropout).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(attended), dropout)
        return x + F.dropout(self.mlp(self.norm2(x)), dropout)


class Actor(nn.Module):
    """The action of each step, from the tokens up to its observation."""

    def __init__(self, scale, action_dim, args):
        super().__init__()
        self.scale, self.target, self.return_scale = scale, args.target_return_to_go, args.return_scale
        self.sizes = [1, len(scale.mean), action_dim, 1, 1]  # of the fields of Batch
        self.context_length = args.context_length
        self.embed_return = nn.Linear(1, args.width)
        self.embed_obs = nn.Linear(len(scale.mean), args.width)
        self.embed_action = nn.Linear(action_dim, args.width)
        self.embed_time = nn.Embedding(args.max_steps, args.width)
        self.norm1, self.norm2 = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.num_heads) for _ in range(args.num_layers))
        self.head = nn.Linear(args.width, action_dim)

    def forward(self, batch, dropout=0.0):  # a Batch -> (batch_size, context_length, action_dim)
        time = batch.time.squeeze(-1).long().clamp(max=self.embed_time.num_embeddings - 1)
        tokens = (
            self.embed_return(batch.return_to_go),
            self.embed_obs(self.scale(batch.obs)),
            self.embed_action(batch.action),
        )
        x = torch.stack([token + self.embed_time(time) for token in tokens], 2).flatten(1, 2)
        x = F.dropout(self.norm1(x), dropout)
        allowed = attention_mask(batch.filled)
        for block in self.blocks:
            x = block(x, allowed, dropout)
        return self.head(self.norm2(x[:, 1::3])).tanh()  # where the observations are

    def empty_memory(self, envs):
        """The memory before any step, zeros (envs, context_length, obs_dim + action_dim + 3): places for the fields of
        Batch of the last steps, the newest last."""
        return self.scale.mean.new_zeros(envs, self.context_length, sum(self.sizes))

    @torch.no_grad()
    def act(self, obs, state, first):  # NumPy (envs, obs_dim + 1), memory, (envs,) -> NumPy (envs, action_dim), memory
        """The actions, and the memory after them; what is left of the return asked for falls by each reward."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.scale.mean.device)
        state = self.empty_memory(len(obs)) if state is None else state
        state = state * ~torch.as_tensor(first, device=obs.device)[:, None, None]
        obs, reward = obs[:, :-1], obs[:, -1:]
        left, _, action, time, filled = state[:, -1].split(self.sizes, -1)  # of the step before, zeros if there is none
        left = torch.where(filled > 0, left - reward / self.return_scale, self.target / self.return_scale)
        time, filled, unknown = time + filled, torch.ones_like(filled), torch.zeros_like(action)
        newest = torch.cat([left, obs, unknown, time, filled], 1)
        state = torch.cat([state[:, 1:], newest[:, None]], 1)
        action = self(Batch(*state.split(self.sizes, -1)))[:, -1]
        state[:, -1] = torch.cat([left, obs, action, time, filled], 1)
        return action.cpu().numpy(), state


def decision_transformer_loss(actor, batch, dropout):
    """The mean squared error of the actions of all steps, empty places left out, and the metrics."""
    action = actor(batch, dropout)
    assert action.shape == batch.action.shape
    loss = ((action - batch.action) ** 2 * batch.filled).sum() / (batch.filled.sum() * action.shape[-1])
    return loss, {"losses/bc_loss": loss}


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, 1)  # for its spaces
    run.require_spaces(envs, obs="vector", action="bounded")
    space = envs.single_action_space
    run.require(args.return_scale > 0, "--return-scale must be more than 0")
    equal = args.width % args.num_heads == 0
    run.require(equal, f"--width {args.width} must be a multiple of the {args.num_heads} of --num-heads")
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), space.shape[0]
    dataset = run.dataset(args.dataset, envs)  # none for `solo play`, which needs only the policy
    envs.close()

    data = Windows(steps_of(dataset, obs_dim, args.return_scale), dataset.episode, args.context_length)
    actor = Actor(Standardize(dataset.obs.reshape(-1, obs_dim)), action_dim, args).to(run.device)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    # actor_step(*inputs): an optimiser step on decision_transformer_loss(actor, *inputs); returns its metrics
    actor_step = run.gradient_step(decision_transformer_loss, actor, optimizer, args.max_grad_norm)
    # what a checkpoint holds; start: the first iteration, 0 unless resumed
    start = run.resume(actor=actor, optimizer=optimizer)

    for iteration in run.loop(start, args.total_timesteps):
        global_step = iteration + 1  # gradient steps
        optimizer.param_groups[0]["lr"] = args.learning_rate * min(global_step / args.warmup_steps, 1)

        # ---- 1. learn: one gradient step
        batch = Batch(*data.sample(args.batch_size, run.device).split(actor.sizes, -1))
        run.learned(actor_step(batch, args.dropout))

        # ---- 2. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"charts/learning_rate": optimizer.param_groups[0]["lr"]})
        run.evaluate(global_step, actor.act, make_eval_env)
        run.save(global_step)

    run.close(actor.act, make_eval_env)  # a last evaluation; `solo play` takes this policy
