# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Proximal policy optimisation (PPO) with an LSTM and action masks: discrete actions, vector observations.

Paper     Schulman et al. 2017, https://arxiv.org/abs/1707.06347 ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438
          LSTM: Hochreiter & Schmidhuber 1997, https://doi.org/10.1162/neco.1997.9.8.1735
          bias of the forget gates: Gers et al. 2000, https://doi.org/10.1162/089976600300015015
          masks: Huang & Ontañón 2020, https://arxiv.org/abs/2006.14171
Run       solo train ppo_lstm_masked --env-id games/CueMasked-v0
Spaces    vector -> discrete, with info["action_mask"]
Differs   from ppo_lstm.py: actions that the mask of a step does not allow have probability 0 in acting, learning and
          evaluation; the entropy is that of the allowed ones
Not for   environments without masks: ppo_lstm.py; images; continuous actions: ppo_lstm_continuous_action.py
Details   docs/algorithms/ppo_lstm_masked.md
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "games/CueMasked-v0"  # Gymnasium id of the environment
    total_timesteps: int = 100_000  # environment steps, summed over environments
    num_envs: int = 32  # environments stepped in parallel
    num_steps: int = 64  # length of a rollout in each environment
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
    """A rollout, or the part of some environments of it."""

    obs: torch.Tensor  # (num_steps, num_envs, obs_dim)
    first: torch.Tensor  # (num_steps, num_envs): whether an episode begins with obs
    state: torch.Tensor  # (2, num_envs, 64), the memory before the rollout
    mask: torch.Tensor  # (num_steps, num_envs, num_actions): whether an action is allowed
    action: torch.Tensor  # (num_steps, num_envs), like all that follow
    logprob: torch.Tensor
    value: torch.Tensor
    advantage: torch.Tensor
    returns: torch.Tensor


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation; its actions are int64 and count from 0."""
    env = gym.make(env_id, **kwargs)
    space = env.action_space
    if isinstance(space, gym.spaces.Discrete) and (space.start != 0 or space.dtype != np.int64):
        from_0 = gym.spaces.Discrete(space.n)
        env = gym.wrappers.TransformAction(env, lambda action: (action + space.start).astype(space.dtype), from_0)
    return env


def orthogonal(layer, gain):
    """The layer with orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.encoder = nn.Sequential(orthogonal(nn.Linear(obs_dim, 64), 2**0.5), nn.Tanh())
        self.lstm = nn.LSTMCell(64, 64)
        for weight in (self.lstm.weight_ih, self.lstm.weight_hh):
            nn.init.orthogonal_(weight)
        for bias in (self.lstm.bias_ih, self.lstm.bias_hh):
            nn.init.zeros_(bias)
        nn.init.constant_(self.lstm.bias_ih[64:128], 3.0)  # gates in the order i, f, g, o: at first little is forgotten
        self.actor = orthogonal(nn.Linear(64, num_actions), 0.01)
        self.critic = orthogonal(nn.Linear(64, 1), 1.0)

    def forward(self, obs, state, first):
        """Some steps in some environments; the memory is empty where an episode begins.

        obs (steps, envs, obs_dim), state (2, envs, 64), first (steps, envs)
        -> logits (steps, envs, num_actions), values (steps, envs), state after the last step
        """
        (hidden, cell), outputs = state, []
        for x, begins in zip(self.encoder(obs), first, strict=True):
            kept = (~begins).float()[:, None]
            hidden, cell = self.lstm(x, (kept * hidden, kept * cell))
            outputs.append(hidden)
        output = torch.stack(outputs)
        return self.actor(output), self.critic(output).squeeze(-1), torch.stack([hidden, cell])

    def evaluate_actions(self, obs, state, first, mask, action):  # -> logprobs, entropies, values: all (steps, envs)
        logits, value, _ = self(obs, state, first)
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)  # probability 0, and finite, as its gradient
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, action[..., None]).squeeze(-1), entropy, value

    @torch.no_grad()
    def step(self, obs, state, first):  # NumPy (envs, *obs_shape), state, (envs,) -> NumPy logits, NumPy values, state
        obs = torch.as_tensor(obs, dtype=torch.float32, device=state.device).flatten(1)
        logits, value, state = self(obs[None], state, torch.as_tensor(first, device=state.device)[None])
        return logits[0].cpu().numpy(), value[0].cpu().numpy(), state

    def act(self, obs, state, first, action_mask):  # the most likely actions, NumPy (envs,), and the state after them
        if state is None:
            state = torch.zeros(2, len(obs), 64, device=self.actor.weight.device)
        logits, _, state = self.step(obs, state, first)
        return allowed_logits(logits, action_mask).argmax(1), state


def allowed_logits(logits, mask):
    """The logits, those of actions that are not allowed so low that softmax gives 0. NumPy, (batch, num_actions)."""
    return np.where(mask, logits, np.finfo(np.float32).min)


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


def ppo_lstm_masked_loss(agent, batch, args):
    """The negative of Eq. 9, and the metrics; the LSTM runs again from the state stored before the rollout."""
    logprob, entropy, value = agent.evaluate_actions(batch.obs, batch.state, batch.first, batch.mask, batch.action)
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
    run.require_spaces(envs, obs="vector", action="discrete")
    batch_size = args.num_envs * args.num_steps
    minibatch_envs = args.num_envs // args.num_minibatches
    run.require(args.num_envs % args.num_minibatches == 0, "--num-minibatches must divide --num-envs (whole rollouts)")
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    envs.reset(seed=0)  # for the masks; run.reset below has seeds of its own
    run.require(envs.action_mask is not None, f"{args.env_id} gives no action_mask; use ppo_lstm.py")
    obs_dim, num_actions = int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n)

    agent = Agent(obs_dim, num_actions).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on ppo_lstm_masked_loss(agent, *inputs); returns its metrics
    gradient_step = run.gradient_step(ppo_lstm_masked_loss, agent, optimizer, args.max_grad_norm)
    state = torch.zeros(2, args.num_envs, 64, device=run.device)  # hidden and cell state of each environment
    now = SimpleNamespace(state=state, first=np.ones(args.num_envs, bool))  # first: an episode begins with next_obs
    start = run.resume(agent=agent, optimizer=optimizer, envs=envs, now=now)  # what a checkpoint holds
    now.first[run.restarted] = True  # episodes that a resume could not continue

    # ---- storage of one rollout
    shape = (args.num_steps, args.num_envs)
    obs, first = np.zeros((*shape, obs_dim), np.float32), np.zeros(shape, bool)
    mask, timeout = np.zeros((*shape, num_actions), bool), np.zeros(shape, bool)
    action = np.zeros(shape, np.int64)
    logprob, value, reward, done = (np.zeros(shape, np.float32) for _ in range(4))

    next_obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
        state_before, final_value = now.state, np.zeros(shape, np.float32)
        for step in range(args.num_steps):
            obs[step], first[step] = next_obs.reshape(args.num_envs, obs_dim), now.first
            mask[step] = envs.action_mask
            run.require(mask[step].any(1).all(), f"{args.env_id} gives an action_mask that allows no action")
            logits, value[step], now.state = agent.step(next_obs, now.state, now.first)
            action[step], logprob[step] = sample_categorical(allowed_logits(logits, mask[step]))
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step], timeout[step] = terminated | truncated, truncated & ~terminated
            now.first = terminated | truncated
            if timeout[step].any():
                # A time limit does not end the task: bootstrap from the value of the final observation, computed with
                # the memory of the episode that was cut.
                cut = np.flatnonzero(timeout[step])
                final_obs, memory = infos["next_obs"][cut], now.state[:, cut]  # what the step led to
                _, final_value[step, cut], _ = agent.step(final_obs, memory, np.zeros(len(cut), bool))
        run.episodes(global_step, reward, done)

        # ---- 2. credit: "compute advantage estimates"
        _, next_value, _ = agent.step(next_obs, now.state, now.first)
        advantage = gae(reward, value, done, final_value, next_value, args.gamma, args.gae_lambda)
        rollout = (obs, first, state_before, mask, action, logprob, value, advantage, advantage + value)
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
