# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Stream AC(lambda): an actor and a critic that learn from single steps, without replay or batches; discrete actions,
vector observations.

Paper     Elsayed et al. 2024, https://arxiv.org/abs/2410.14606
Run       solo train stream_ac --env-id CartPole-v1
Spaces    vector -> discrete
Differs   from stream_q.py: a policy, which explores by itself, and a value of states; one optimiser for each
Not for   image observations: dqn_image.py; continuous actions: stream_ac_continuous.py
Details   docs/algorithms/stream_ac.md
"""

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"  # Gymnasium id of the environment
    total_timesteps: int = 300_000  # environment steps
    learning_rate: float = 1.0  # alpha, the largest learning rate of ObGD
    kappa: float = 2.0  # of ObGD for the critic: safety factor of the bound; the larger, the smaller the steps
    kappa_policy: float = 3.0  # the same for the actor
    gamma: float = 0.99  # discount factor, from 0 to 1
    trace_lambda: float = 0.8  # lambda of the eligibility traces, from 0 to 1
    ent_coef: float = 0.01  # coefficient of the entropy of the policy


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation; its actions are int64 and count from 0."""
    env = gym.make(env_id, **kwargs)
    space = env.action_space
    if isinstance(space, gym.spaces.Discrete) and (space.start != 0 or space.dtype != np.int64):
        from_0 = gym.spaces.Discrete(space.n)
        env = gym.wrappers.TransformAction(env, lambda action: (action + space.start).astype(space.dtype), from_0)
    return env


class SampleMeanStd(nn.Module):
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
        var = torch.where(self.count > 1, self.var, 1.0).numpy()  # one sample has no variance
        return (x / (var + 1e-16) ** 0.5).clip(-10, 10)

    def forward(self, x):  # NumPy (n, *shape) -> NumPy (n, *shape)
        return self.scale(x - self.mean.numpy())


def sparse_mlp(*sizes):
    """Linear layers with layer normalisation and leaky ReLU between them. At the start 90 % of the weights of each unit
    are 0, but at least one is not; biases are 0 (Alg. 1 of the paper, "SparseInit")."""
    layers = []
    for fan_in, fan_out in pairwise(sizes):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.uniform_(linear.weight, -(fan_in**-0.5), fan_in**-0.5)
        nn.init.zeros_(linear.bias)
        for row in linear.weight.data:
            row[torch.randperm(fan_in)[max(1, fan_in // 10) :]] = 0
        layers += [linear, nn.LayerNorm(fan_out, elementwise_affine=False), nn.LeakyReLU()]
    return nn.Sequential(*layers[:-2])


class ObGD(torch.optim.Optimizer):
    """Overshooting-bounded gradient descent with eligibility traces (Alg. 3 of the paper): the larger traces and error,
    the smaller the learning rate, so that a step does not change the sign of the TD error. To first order, and where
    no derivative is much above 1."""

    def __init__(self, params, lr, kappa):
        super().__init__(params, dict(lr=lr, kappa=kappa))
        for p in self.param_groups[0]["params"]:
            self.state[p]["trace"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, delta, decay):  # the TD error; gamma * lambda. The gradients are of what is credited: Q, V, log pi
        (group,) = self.param_groups
        traces = [self.state[p]["trace"].mul_(decay).add_(p.grad) for p in group["params"]]
        overshoot = group["lr"] * group["kappa"] * max(abs(delta), 1.0) * sum(trace.abs().sum() for trace in traces)
        learning_rate = group["lr"] / overshoot.clamp(min=1.0)
        for p, trace in zip(group["params"], traces, strict=True):
            p += learning_rate * delta * trace
            p.grad = None
        return learning_rate

    def forget(self):
        """What comes next owes nothing to earlier steps: all traces are 0."""
        for p in self.param_groups[0]["params"]:
            self.state[p]["trace"].zero_()


class Agent(nn.Module):
    """Policy and value of normalised observations, two networks; only `act` takes raw ones."""

    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.obs_normalizer, self.return_normalizer = SampleMeanStd(obs_dim), SampleMeanStd()
        self.actor = sparse_mlp(obs_dim, 128, 128, num_actions)
        self.critic = sparse_mlp(obs_dim, 128, 128, 1)

    def normalize(self, obs):  # NumPy (batch, *obs_shape) -> (batch, obs_dim)
        obs = self.obs_normalizer(obs.reshape(obs.shape[0], -1))
        return torch.as_tensor(obs, dtype=torch.float32, device=next(self.parameters()).device)

    def policy(self, obs):  # (batch, obs_dim) -> log-probabilities (batch, num_actions)
        return self.actor(obs).log_softmax(-1)

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch,): the most likely actions
        return self.policy(self.normalize(obs)).argmax(1).cpu().numpy()


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, 1)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="vector", action="discrete")
    num_iterations = run.iterations(1)  # steps of the environment
    obs_dim, num_actions = int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n)

    agent = Agent(obs_dim, num_actions).to(run.device)
    actor_optimizer = ObGD(agent.actor.parameters(), args.learning_rate, args.kappa_policy)
    critic_optimizer = ObGD(agent.critic.parameters(), args.learning_rate, args.kappa)
    now = SimpleNamespace(so_far=np.zeros(1))  # discounted rewards of the running episode
    # what a checkpoint holds
    parts = dict(agent=agent, actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, now=now, envs=envs)
    start = run.resume(**parts)
    if run.restarted:  # an episode that a resume could not continue
        now.so_far[:] = 0
        actor_optimizer.forget()
        critic_optimizer.forget()

    obs = run.reset(envs)  # (1, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = iteration + 1

        # ---- 1. act
        agent.obs_normalizer.update(obs.reshape(1, obs_dim))
        x = agent.normalize(obs)  # (1, obs_dim)
        logprobs = agent.policy(x)[0]  # (num_actions,)
        action = int(logprobs.detach().exp().multinomial(1))
        obs, reward, terminated, truncated, infos = envs.step(np.array([action]))
        done = terminated | truncated
        run.episodes(global_step, reward, done)

        # ---- 2. credit: the TD error; rewards in units of the standard deviation of the returns so far
        now.so_far = args.gamma * now.so_far + reward
        agent.return_normalizer.update(now.so_far)
        scaled_reward = float(agent.return_normalizer.scale(reward)[0])
        with torch.no_grad():  # 0 after the end of the task, which a time limit is not
            next_value = 0.0 if terminated[0] else agent.critic(agent.normalize(infos["next_obs"]))
        value = agent.critic(x).squeeze()
        delta = float(scaled_reward + args.gamma * next_value - value.detach())

        # ---- 3. learn from this step, then it is gone
        # the step multiplies by delta: with its sign, entropy is a bonus where delta is negative, too
        entropy = -(logprobs.exp() * logprobs).sum()
        (logprobs[action] + args.ent_coef * np.sign(delta) * entropy).backward()
        value.backward()
        decay = args.gamma * args.trace_lambda
        actor_optimizer.step(delta, decay)
        learning_rate = critic_optimizer.step(delta, decay)
        if done[0]:
            actor_optimizer.forget()
            critic_optimizer.forget()
        now.so_far[done] = 0
        metrics = {"charts/learning_rate": learning_rate, "losses/entropy": entropy.detach()}
        run.learned(metrics | {"losses/td_loss": torch.tensor(delta**2), "losses/values": value.detach()})

        # ---- 4. report, when due: a row has the means of the metrics of all steps since the last row
        run.log(global_step, {})
        run.evaluate(global_step, agent.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(agent.act, make_env)  # a last evaluation; `solo play` takes this policy
