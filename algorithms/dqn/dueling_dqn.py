# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[box2d]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Dueling DQN: the network estimates a state's value and its actions' advantages; discrete, vector observations.

Paper     Wang et al. 2016, https://arxiv.org/abs/1511.06581 ("Eq. n" below); loss: Alg. 1 of
          Mnih et al. 2015, https://www.nature.com/articles/nature14236
Run       solo train dueling_dqn --env-id CartPole-v1
Spaces    vector -> discrete
Differs   from dqn.py: behind its first layer the network has two streams, for the value and for the advantages
Not for   image observations; continuous actions: ddpg_continuous_action.py
Details   algorithms/dqn/README.md
"""

import copy
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"  # Gymnasium id of the environment
    total_timesteps: int = 500_000  # environment steps, summed over environments; whole iterations of them
    num_envs: int = 1  # environments stepped side by side
    buffer_size: int = 10_000  # transitions the replay buffer holds
    batch_size: int = 128  # transitions of one update
    learning_starts: int = 10_000  # environment steps before the first update
    train_frequency: int = 10  # environment steps per update
    learning_rate: float = 2.5e-4  # step size of Adam
    gamma: float = 0.99  # discount factor
    target_network_frequency: int = 500  # environment steps between moves of the target network
    tau: float = 1.0  # how far it moves towards the Q-network: 1 is a copy
    start_e: float = 1.0  # epsilon at the start: probability of a random action
    end_e: float = 0.05  # epsilon at the end
    exploration_fraction: float = 0.5  # share of total_timesteps in which epsilon falls linearly


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation; all that is specific to the environment stands here."""
    return gym.make(env_id, **kwargs)


def flatten_parameters(module):
    """Make all parameters of `module` views of one vector, the parameter that is returned: one operation steps all."""
    vector = nn.Parameter(nn.utils.parameters_to_vector(module.parameters()).detach())
    nn.utils.vector_to_parameters(vector.data, module.parameters())
    return vector


def mlp(layers, x):
    """The layers with ReLU between them, (batch, fan_in) -> (batch, fan_out); faster than calling modules."""
    *hidden, last = layers
    for layer in hidden:
        x = F.linear(x, layer.weight, layer.bias).relu()
    return F.linear(x, last.weight, last.bias)


def numpy_mlp(layers):
    """`mlp` for NumPy arrays, with the present weights: for a few rows several times faster than torch."""
    *hidden, last = [(layer.weight.numpy(force=True).T, layer.bias.numpy(force=True)) for layer in layers]

    def forward(x):
        for weight, bias in hidden:
            x = np.maximum(x @ weight + bias, 0)
        return x @ last[0] + last[1]

    return forward


class QNetwork(nn.Module):
    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.torso = nn.ModuleList([nn.Linear(obs_dim, 120)])
        self.value = nn.ModuleList([nn.Linear(120, 84), nn.Linear(84, 1)])
        self.advantage = nn.ModuleList([nn.Linear(120, 84), nn.Linear(84, num_actions)])

    def q(self, obs):  # (batch, obs_dim) -> (batch, num_actions)
        x = mlp(self.torso, obs).relu()
        advantage = mlp(self.advantage, x)
        return mlp(self.value, x) + advantage - advantage.mean(1, keepdim=True)  # Eq. 9

    def numpy_policy(self):
        """The greedy policy with the present weights, a function: NumPy (batch, obs_dim) -> NumPy (batch,)."""
        advantage = numpy_mlp([*self.torso, *self.advantage])  # the value is the same for all actions
        return lambda obs: advantage(obs).argmax(1)

    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch,)
        return self.numpy_policy()(np.asarray(obs, np.float32).reshape(len(obs), -1))


class Replay:
    """The last `capacity` transitions, a row [obs | action | reward | done | next_obs] each: one gather is a batch."""

    def __init__(self, capacity, obs_dim, action_dim):
        self.widths = [obs_dim, action_dim, 1, 1, obs_dim]
        self.rows = np.zeros((capacity, sum(self.widths)), np.float32)
        self.arrays = {"rows": self.rows}
        self.inserted = 0  # rows ever inserted

    @property
    def size(self):
        return min(self.inserted, len(self.rows))

    def add(self, *parts):
        """Insert obs, action, reward, done, next_obs over the oldest rows; all (..., n, width)."""
        rows = np.concatenate([np.reshape(x, (-1, n)) for x, n in zip(parts, self.widths, strict=True)], axis=1)
        self.rows[(self.inserted + np.arange(len(rows))) % len(self.rows)] = rows
        self.inserted += len(rows)

    def sample(self, batch_size, device):
        """Transitions drawn uniformly with replacement: (batch_size, ...) each, reward and done (batch_size,)."""
        rows = self.rows.take(np.random.randint(self.size, size=batch_size), axis=0)
        obs, action, reward, done, next_obs = torch.from_numpy(rows).to(device).split(self.widths, dim=1)
        return obs, action.long(), reward.squeeze(1), done.squeeze(1), next_obs


def td_loss(q_network, target_network, obs, action, reward, done, next_obs, gamma):
    """Mean squared error of Alg. 1; metrics: the loss, the mean value, 1.

    All inputs (batch_size,) but obs, next_obs (batch_size, obs_dim) and action (batch_size, 1). `done` is 0 at a limit.
    """
    with torch.no_grad():
        target = reward + gamma * (1 - done) * target_network.q(next_obs).amax(1)
    q = q_network.q(obs).gather(1, action).squeeze(1)
    loss = F.mse_loss(q, target)
    return loss, torch.stack([loss, q.mean(), torch.ones_like(loss)]).detach()


def gradient(loss_of, module, *inputs):
    """Gradient of `loss_of(module, *inputs)` for all parameters of `module` as one vector, and the loss's metrics."""
    loss, metrics = loss_of(module, *inputs)
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(module.parameters()))]), metrics


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)
    num_steps = max(1, args.train_frequency // args.num_envs)  # of each environment in one iteration
    batch_steps = args.num_envs * num_steps
    num_iterations = args.total_timesteps // batch_steps
    run.require(num_iterations, f"--total-timesteps {args.total_timesteps} is less than one iteration of {batch_steps}")
    often = args.target_network_frequency >= batch_steps
    run.require(often, f"--target-network-frequency must be at least {batch_steps}, the steps of one iteration")
    make_envs = [lambda: make_env(args.env_id)] * args.num_envs
    envs = SyncVectorEnv(make_envs, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)  # its array changes with a step
    run.require_spaces(envs, obs="vector", action="discrete")
    obs_dim, num_actions = int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n)

    q_network = QNetwork(obs_dim, num_actions).to(run.device)
    target_network = copy.deepcopy(q_network)
    parameters, target_parameters = flatten_parameters(q_network), flatten_parameters(target_network)
    optimizer = torch.optim.Adam([parameters], lr=args.learning_rate, fused=True)
    gradient_of = run.compile(gradient)
    replay = Replay(args.buffer_size, obs_dim, action_dim=1)
    totals = torch.zeros(3, device=run.device)  # since the last row: sums of the two metrics, number of updates
    parts = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer, "totals": totals}
    start = run.resume(**parts, replay=replay, envs=envs)

    # ---- storage of one iteration, in host memory
    shape = (num_steps, args.num_envs)
    obs, final_obs = (np.zeros((*shape, obs_dim), np.float32) for _ in range(2))
    reward, terminated, truncated = np.zeros(shape, np.float32), np.zeros(shape, bool), np.zeros(shape, bool)

    next_obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_steps

        # ---- 1. act: num_steps steps in every environment, at random with probability epsilon
        progress = min(1.0, iteration / max(1.0, args.exploration_fraction * num_iterations))
        epsilon = args.start_e + (args.end_e - args.start_e) * progress
        action = np.random.randint(num_actions, size=shape)
        greedy = np.random.random(shape) >= epsilon
        policy = q_network.numpy_policy()
        for step in range(num_steps):
            obs[step] = next_obs.reshape(args.num_envs, obs_dim)
            if greedy[step].any():
                action[step] = np.where(greedy[step], policy(obs[step]), action[step])
            next_obs, reward[step], terminated[step], truncated[step], infos = envs.step(action[step])
            final_obs[step] = next_obs.reshape(args.num_envs, obs_dim)
            if "final_obs" in infos:  # where an episode ended, next_obs is already the next one's
                for i in np.flatnonzero(infos["_final_obs"]):
                    final_obs[step, i] = infos["final_obs"][i].flatten()
        run.episodes(global_step, reward, terminated | truncated)

        # ---- 2. store: where a step led and whether the task was over there; a time limit is no end of the task
        replay.add(obs, action, reward, terminated, final_obs)

        # ---- 3. learn: an update for every train_frequency environment steps after learning_starts
        begin = max(global_step - batch_steps, args.learning_starts)
        updates = range(begin // args.train_frequency, global_step // args.train_frequency)
        for _ in updates if replay.inserted >= args.learning_starts else ():
            batch = replay.sample(args.batch_size, run.device)
            parameters.grad, metrics = gradient_of(td_loss, q_network, target_network, *batch, args.gamma)
            optimizer.step()
            totals += metrics
        if global_step % args.target_network_frequency < batch_steps:
            target_parameters.data.lerp_(parameters.data, args.tau)

        # ---- 4. report: means over all updates since the last row
        if global_step % 1000 < batch_steps or iteration + 1 == num_iterations:
            td_error, q, n = totals.tolist()
            losses = {"losses/td_loss": td_error / n, "losses/q_values": q / n} if n else {}
            run.log(global_step, {"charts/epsilon": epsilon, **losses})
            totals.zero_()
        run.evaluate(global_step, q_network.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(q_network.act, make_env)
