# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Stream Q(lambda): deep Q-learning from single steps, without replay, batches or target network; discrete actions,
vector observations.

Paper     Elsayed et al. 2024, https://arxiv.org/abs/2410.14606
Run       solo train stream_q --env-id CartPole-v1
Spaces    vector -> discrete
Differs   root of its family
Not for   image observations: dqn_image.py; continuous actions: stream_ac_continuous.py
Details   docs/algorithms/stream_q.md
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
    kappa: float = 2.0  # of ObGD: safety factor of the bound on a step; the larger, the smaller the steps
    gamma: float = 0.99  # discount factor, from 0 to 1
    trace_lambda: float = 0.8  # lambda of the eligibility traces, from 0 to 1
    start_e: float = 1.0  # initial epsilon: probability of a random action, from 0 to 1
    end_e: float = 0.01  # final epsilon, from 0 to 1
    exploration_fraction: float = 0.2  # fraction of total_timesteps over which epsilon is annealed, from 0 to 1


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


class QNetwork(nn.Module):
    """The values of all actions, of normalised observations; only `act` takes raw ones."""

    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.obs_normalizer, self.return_normalizer = SampleMeanStd(obs_dim), SampleMeanStd()
        self.net = sparse_mlp(obs_dim, 128, 128, num_actions)

    def forward(self, obs):  # (batch, obs_dim) -> (batch, num_actions)
        return self.net(obs)

    def normalize(self, obs):  # NumPy (batch, *obs_shape) -> (batch, obs_dim)
        obs = self.obs_normalizer(obs.reshape(obs.shape[0], -1))
        return torch.as_tensor(obs, dtype=torch.float32, device=next(self.parameters()).device)

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch,): the greedy actions
        return self(self.normalize(obs)).argmax(1).cpu().numpy()


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, 1)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="vector", action="discrete")
    num_iterations = run.iterations(1)  # steps of the environment
    obs_dim, num_actions = int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n)

    q_network = QNetwork(obs_dim, num_actions).to(run.device)
    optimizer = ObGD(q_network.parameters(), args.learning_rate, args.kappa)
    now = SimpleNamespace(so_far=np.zeros(1))  # discounted rewards of the running episode
    start = run.resume(q_network=q_network, optimizer=optimizer, now=now, envs=envs)  # what a checkpoint holds
    if run.restarted:  # an episode that a resume could not continue
        now.so_far[:] = 0
        optimizer.forget()

    obs = run.reset(envs)  # (1, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = iteration + 1

        # ---- 1. act: with probability epsilon at random, else greedily
        progress = min(1.0, iteration / max(1.0, args.exploration_fraction * num_iterations))
        epsilon = args.start_e + (args.end_e - args.start_e) * progress
        q_network.obs_normalizer.update(obs.reshape(1, obs_dim))
        q = q_network(q_network.normalize(obs))[0]  # (num_actions,)
        greedy = int(q.argmax())
        action = greedy if np.random.random() >= epsilon else np.random.randint(num_actions)
        obs, reward, terminated, truncated, infos = envs.step(np.array([action]))
        done = terminated | truncated
        run.episodes(global_step, reward, done)

        # ---- 2. credit: the TD error; rewards in units of the standard deviation of the returns so far
        now.so_far = args.gamma * now.so_far + reward
        q_network.return_normalizer.update(now.so_far)
        scaled_reward = float(q_network.return_normalizer.scale(reward)[0])
        with torch.no_grad():  # 0 after the end of the task, which a time limit is not
            next_value = 0.0 if terminated[0] else q_network(q_network.normalize(infos["next_obs"])).max()
        delta = float(scaled_reward + args.gamma * next_value - q[action].detach())

        # ---- 3. learn from this step, then it is gone
        q[action].backward()
        learning_rate = optimizer.step(delta, args.gamma * args.trace_lambda)
        if done[0] or action != greedy:  # a return of greedy actions ends here; as in the paper's code, after the step
            optimizer.forget()
        now.so_far[done] = 0
        metrics = {"charts/learning_rate": learning_rate, "losses/q_values": q[action].detach()}
        run.learned(metrics | {"losses/td_loss": torch.tensor(delta**2)})

        # ---- 4. report, when due: a row has the means of the metrics of all steps since the last row
        run.log(global_step, {"charts/epsilon": epsilon})
        run.evaluate(global_step, q_network.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(q_network.act, make_env)  # a last evaluation; `solo play` takes this policy
