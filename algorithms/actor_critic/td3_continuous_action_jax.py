# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2.3"]
# ///
"""Twin delayed deep deterministic policy gradient (TD3), continuous actions, vector observations; in JAX, all compiled.

Paper     Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477 ("Alg. 1" below)
Run       solo train td3_continuous_action_jax --env-id Pendulum-v1 --total-timesteps 20000 --learning-starts 1000
Spaces    vector -> continuous
Differs   from ddpg_continuous_action_jax.py: two critics, the smaller target counts; noise on the target action
Twin      td3_continuous_action.py
Not for   discrete actions: dqn_jax.py
Details   docs/algorithms/td3_continuous_action_jax.md
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax

from solorl import RunArgs, Runs, parse


@dataclass
class Args(RunArgs):
    env_kind = "jax"  # ids of environments written in JAX, or known to both EnvPool and Gymnasium
    env_id: str = "Pendulum-v1"  # id of the environment, in JAX or EnvPool for training, in Gymnasium for evaluation
    num_seeds: int = 1  # seeds trained together, from `seed` on, each with a run folder of its own
    total_timesteps: int = 1_000_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    learning_starts: int = 25_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    batch_size: int = 256  # transitions per gradient step
    utd_ratio: float = 1.0  # critic updates per environment step (update-to-data ratio)
    learning_rate: float = 3e-4  # learning rate of Adam
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
    policy_frequency: int = 2  # critic updates per actor update (delayed updates)
    exploration_noise: float = 0.1  # standard deviation of the noise on actions
    policy_noise: float = 0.2  # standard deviation of the noise on target actions
    noise_clip: float = 0.5  # largest noise on target actions (c); inf: do not clip


class Setup(NamedTuple):
    """What stays the same while a seed trains."""

    args: Args
    envs: Any
    actor_optimizer: optax.GradientTransformation
    critic_optimizer: optax.GradientTransformation


class Batch(NamedTuple):
    """Transitions."""

    obs: jax.Array  # (batch_size, obs_dim)
    action: jax.Array  # (batch_size, action_dim), in [-1, 1]
    reward: jax.Array  # (batch_size,)
    done: jax.Array  # (batch_size,), terminated: 0 at a time limit, which is not the end of the task
    next_obs: jax.Array  # (batch_size, obs_dim)


class Learner(NamedTuple):
    """What gradient steps change."""

    actor: list
    critic: dict  # of two, q1 and q2
    target_actor: list
    target_critic: dict
    actor_optimizer_state: Any
    critic_optimizer_state: Any


class Training(NamedTuple):
    """The training state of one seed: all that changes."""

    learner: Learner
    replay: Batch  # the last transitions, (capacity, ...)
    env_state: Any
    obs: jax.Array  # (num_envs, obs_dim), the current observations
    key: jax.Array  # of the random numbers to come
    iteration: jax.Array  # iterations done, ()


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
    """One environment, for evaluation; actions in [-1, 1] if it has finite bounds."""
    env = gym.make(env_id, **kwargs)
    space = env.action_space
    bounded = isinstance(space, gym.spaces.Box) and np.isfinite([space.low, space.high]).all()
    return ScaleAction(env) if bounded else env


def scale_action(action, low, high):
    """What ScaleAction does, in training; without the difference of the bounds, which can be infinite in float32."""
    share = (action + 1) / 2
    return (low * (1 - share) + high * share).clip(low, high)  # rounding can overstep the bounds


def init_mlp(key, *sizes):
    """Layers with weights and biases uniform within 1 / sqrt(fan_in), as in torch."""
    keys = jax.random.split(key, (len(sizes) - 1, 2))
    return [
        {
            "weight": jax.random.uniform(k[0], (i, o), minval=-(i**-0.5), maxval=i**-0.5),
            "bias": jax.random.uniform(k[1], (o,), minval=-(i**-0.5), maxval=i**-0.5),
        }
        for k, (i, o) in zip(keys, pairwise(sizes), strict=True)
    ]


def mlp(layers, x):
    """The layers with ReLU between them, (batch, fan_in) -> (batch, fan_out)."""
    *hidden, last = layers
    for layer in hidden:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return x @ last["weight"] + last["bias"]


def init_params(key, obs_dim, action_dim):
    """The actor and the two critics."""
    actor, q1, q2 = jax.random.split(key, 3)
    critic = {name: init_mlp(k, obs_dim + action_dim, 256, 256, 1) for name, k in (("q1", q1), ("q2", q2))}
    return init_mlp(actor, obs_dim, 256, 256, action_dim), critic


def action_of(actor, obs):  # (batch, obs_dim) -> (batch, action_dim), in [-1, 1]
    return jnp.tanh(mlp(actor, obs))


def act(actor, obs, noise=0.0):  # (batch, *obs_shape) -> (batch, action_dim)
    """The policy's actions with `noise` (batch, action_dim) added."""
    obs = obs.reshape(len(obs), -1)
    return (action_of(actor, obs) + noise).clip(-1, 1)


def q_value(critic, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,)
    return mlp(critic, jnp.concatenate([obs, action], 1)).squeeze(1)


def q_pair(critic, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,), (batch,)
    return q_value(critic["q1"], obs, action), q_value(critic["q2"], obs, action)


def smoothed(action, noise, noise_clip):
    """Target actions with clipped noise, both (batch, action_dim), kept within [-1, 1]."""
    return (action + noise.clip(-noise_clip, noise_clip)).clip(-1, 1)


def td3_critic_loss(critic, target_critic, target_actor, batch, noise, noise_clip, gamma):
    """The losses of both critics (Alg. 1), added, and the metrics."""
    next_action = smoothed(action_of(target_actor, batch.next_obs), noise, noise_clip)
    next_value = jnp.minimum(*q_pair(target_critic, batch.next_obs, next_action))
    target = batch.reward + gamma * (1 - batch.done) * next_value
    q1, q2 = q_pair(critic, batch.obs, batch.action)
    assert q1.shape == q2.shape == target.shape == batch.reward.shape
    loss1, loss2 = ((q1 - target) ** 2).mean(), ((q2 - target) ** 2).mean()
    metrics = {
        "losses/qf1_values": q1.mean(),
        "losses/qf2_values": q2.mean(),
        "losses/qf1_loss": loss1,
        "losses/qf2_loss": loss2,
        "losses/qf_loss": (loss1 + loss2) / 2,  # half of what is minimised
    }
    return loss1 + loss2, metrics


def td3_actor_loss(actor, critic, batch):
    """The negative of the first critic's value, which Alg. 1 ascends, and the metrics."""
    loss = -q_value(critic["q1"], batch.obs, action_of(actor, batch.obs)).mean()
    return loss, {"losses/actor_loss": loss}


def begin(key, setup):
    """The initial training state of one seed."""
    args, envs = setup.args, setup.envs
    params_key, envs_key, key = jax.random.split(key, 3)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    actor, critic = init_params(params_key, obs_dim, action_dim)
    optimizer_states = setup.actor_optimizer.init(actor), setup.critic_optimizer.init(critic)
    learner = Learner(actor, critic, actor, critic, *optimizer_states)
    env_state, obs = envs.reset(envs_key)
    transition = Batch(jnp.zeros(obs_dim), jnp.zeros(action_dim), jnp.float32(0), jnp.float32(0), jnp.zeros(obs_dim))
    capacity = min(args.buffer_size, args.total_timesteps)
    replay = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), transition)
    return Training(learner, replay, env_state, obs, key, jnp.int32(0))


def insert(replay, batch, inserted):
    """Write transitions over the oldest ones: a Batch of arrays, (num_envs, ...) or (num_steps, num_envs, ...).
    `inserted`: transitions ever inserted before."""
    index = (inserted + jnp.arange(batch.reward.size)) % len(replay.reward)
    return jax.tree.map(lambda x, new: x.at[index].set(new.reshape(-1, *x.shape[1:]).astype(x.dtype)), replay, batch)


def sample(replay, key, size, batch_size):
    """A Batch of transitions drawn uniformly with replacement from the first `size`."""
    index = jax.random.randint(key, (batch_size,), 0, size)
    return jax.tree.map(lambda x: x[index], replay)


def learn_td3(update, learner, learned, batch, noise, setup):
    """One update with a batch; `learned` are the sums of the metrics of the critics and of the actor, each with the
    number of gradient steps."""
    args, (of_critic, of_actor) = setup.args, learned

    # "update critics" (Algorithm 1)
    inputs = learner.target_critic, learner.target_actor, batch, noise, args.noise_clip, args.gamma
    gradients, metrics = jax.grad(td3_critic_loss, has_aux=True)(learner.critic, *inputs)
    updates, optimizer_state = setup.critic_optimizer.update(gradients, learner.critic_optimizer_state)
    critic = optax.apply_updates(learner.critic, updates)
    learner = learner._replace(critic=critic, critic_optimizer_state=optimizer_state)
    of_critic = jax.tree.map(jnp.add, of_critic, (metrics, 1))

    # "if t mod d then: update phi by the deterministic policy gradient, update target networks", with t from 0
    def delayed(learner, of_actor):
        gradients, metrics = jax.grad(td3_actor_loss, has_aux=True)(learner.actor, learner.critic, batch)
        updates, optimizer_state = setup.actor_optimizer.update(gradients, learner.actor_optimizer_state)
        actor = optax.apply_updates(learner.actor, updates)
        learner = learner._replace(
            actor=actor,
            actor_optimizer_state=optimizer_state,
            target_actor=optax.incremental_update(actor, learner.target_actor, args.tau),
            target_critic=optax.incremental_update(learner.critic, learner.target_critic, args.tau),
        )
        return learner, jax.tree.map(jnp.add, of_actor, (metrics, 1))

    due = update % args.policy_frequency == 0
    learner, of_actor = jax.lax.cond(due, delayed, lambda *unchanged: unchanged, learner, of_actor)
    return learner, (of_critic, of_actor)


def due_updates(args, global_step, enough):
    """Number of the first critic update due in the iteration that ends at `global_step`, and the one after the last: in
    total utd_ratio for each environment step after learning_starts. None where the buffer does not hold `enough`; they
    are not made up for."""
    steps = jnp.stack([global_step - args.num_envs, global_step])
    first, last = jnp.floor(args.utd_ratio * jnp.maximum(0, steps - args.learning_starts)).astype(int)
    return first, jnp.where(enough, last, first)


def train_iteration(training, setup):
    """One iteration of one seed: the next training state, and what is reported."""
    args, envs = setup.args, setup.envs
    random_key, noise_key, step_key, sample_key, key = jax.random.split(training.key, 5)
    space, shape = envs.single_action_space, (args.num_envs, envs.single_action_space.shape[0])
    before, global_step = training.iteration * args.num_envs, (training.iteration + 1) * args.num_envs

    # ---- 1. act: one step in every environment, "select action with exploration noise" (Algorithm 1)
    random = jax.random.uniform(random_key, shape, minval=-1, maxval=1)
    noise = args.exploration_noise * jax.random.normal(noise_key, shape)
    action = jnp.where(global_step <= args.learning_starts, random, act(training.learner.actor, training.obs, noise))
    env_state, step = envs.step(step_key, training.env_state, scale_action(action, space.low, space.high))

    # ---- 2. store: a time limit is not the end of the task
    batch = Batch(training.obs, action, step.reward, step.terminated, step.final_obs)
    replay = insert(training.replay, batch, before)

    # ---- 3. learn: utd_ratio critic updates for each environment step since learning_starts
    size = jnp.minimum(global_step, len(replay.reward))  # transitions in the buffer

    def update(i, carry):
        batch_key, noise_key = jax.random.split(jax.random.fold_in(sample_key, i))
        batch = sample(replay, batch_key, size, args.batch_size)
        noise = args.policy_noise * jax.random.normal(noise_key, batch.action.shape)
        return learn_td3(i, *carry, batch, noise, setup)

    first, last = due_updates(args, global_step, size >= args.batch_size)
    critics = ("losses/qf1_values", "losses/qf2_values", "losses/qf1_loss", "losses/qf2_loss", "losses/qf_loss")
    nothing = (dict.fromkeys(critics, 0.0), 0), ({"losses/actor_loss": 0.0}, 0)
    learner, learned = jax.lax.fori_loop(first, last, update, (training.learner, nothing))

    # ---- 4. report: sums of the metrics over the gradient steps, and how many there were
    training = Training(learner, replay, env_state, step.obs, key, training.iteration + 1)
    return training, (step.reward, step.terminated | step.truncated, learned)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    envs = run.open_envs(args.env_id, args.num_envs)  # written in JAX if we have this id, else EnvPool's
    run.require_spaces(envs, obs="vector", action="bounded")
    space = envs.single_action_space
    num_iterations = run.iterations(args.num_envs, batch=args.batch_size)  # rounded down; the buffer must hold a batch

    setup = Setup(args, envs, optax.adam(args.learning_rate), optax.adam(args.learning_rate))
    training, start = run.resume(lambda key: begin(key, setup), model="learner.actor", envs=("env_state", "obs"))
    # train(training, iterations): those iterations in compiled code; reports: NumPy (num_seeds, iterations, ...)
    train = run.compile(lambda training: train_iteration(training, setup), chunk=max(1, 500 // args.num_envs))

    for iterations in run.loop(start, num_iterations, args.num_envs):  # ranges of at most `chunk` iterations
        global_step = iterations.stop * args.num_envs
        training, (reward, done, (of_critic, of_actor)) = train(training, iterations)
        run.episodes(global_step, reward, done)
        run.learned(*of_critic)
        run.learned(*of_actor)
        run.log(global_step, {})
        run.evaluate(global_step, act, make_env)
        run.save(global_step, training)
    run.close(act, make_env)  # a last evaluation; `solo play` takes this policy
