# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2.3"]
# ///
"""CrossQ: SAC with batch renormalisation and without target networks, continuous actions, vector observations; in JAX.

Paper     Bhatt et al. 2024, https://arxiv.org/abs/1902.05605; SAC: https://arxiv.org/abs/1812.05905 ("Eq. n" below)
          Batch renormalisation: Ioffe 2017, https://arxiv.org/abs/1702.03275
Run       solo train crossq_jax --env-id Pendulum-v1 --total-timesteps 20000 --learning-starts 1000
Spaces    vector -> continuous
Differs   from sac_continuous_action_jax.py: batch renormalisation in actor and critics, which see a transition and the
          next action in one batch; no target critics
Twin      crossq.py
Not for   discrete actions: dqn_jax.py
Details   docs/algorithms/crossq_jax.md
"""

import math
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
    learning_starts: int = 5_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    batch_size: int = 256  # transitions per gradient step
    width: int = 256  # units of a hidden layer of the critics (the paper: 2048)
    utd_ratio: float = 1.0  # critic updates per environment step (update-to-data ratio)
    policy_lr: float = 1e-3  # learning rate of the actor's Adam
    q_lr: float = 1e-3  # learning rate of the critics' Adam and of the temperature
    gamma: float = 0.99  # discount factor, from 0 to 1
    policy_frequency: int = 3  # critic updates per actor update (delayed updates)
    alpha: float = 0.2  # temperature, the coefficient of the entropy, with --no-autotune
    autotune: bool = True  # learn the temperature for a target entropy of -action_dim (actions in [-1, 1])


class Setup(NamedTuple):
    """What stays the same while a seed trains."""

    args: Args
    envs: Any
    actor_optimizer: optax.GradientTransformation
    critic_optimizer: optax.GradientTransformation
    alpha_optimizer: optax.GradientTransformation


class Batch(NamedTuple):
    """Transitions."""

    obs: jax.Array  # (batch_size, obs_dim)
    action: jax.Array  # (batch_size, action_dim), in [-1, 1]
    reward: jax.Array  # (batch_size,)
    done: jax.Array  # (batch_size,), terminated: 0 at a time limit, which is not the end of the task
    next_obs: jax.Array  # (batch_size, obs_dim)


class RunningStats(NamedTuple):
    """Running statistics of what a layer gets, and how many batches they have seen."""

    mean: jax.Array  # (fan_in,)
    var: jax.Array  # (fan_in,)
    batches: jax.Array  # ()


class Net(NamedTuple):
    """A network with batch renormalisation before each layer; `critic` is a pair, each field a dict of q1 and q2."""

    layers: Any  # what gradient steps change
    running: Any  # RunningStats of each layer, which batches in training change


class Learner(NamedTuple):
    """What gradient steps change."""

    actor: Net
    critic: Net  # of two, q1 and q2
    log_alpha: jax.Array  # logarithm of the temperature, ()
    actor_optimizer_state: Any
    critic_optimizer_state: Any
    alpha_optimizer_state: Any


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


def init_net(key, *sizes):
    """The layers of `init_mlp`, each after a batch renormalisation, and running statistics that have seen nothing."""
    layers, widths = init_mlp(key, *sizes), sizes[:-1]
    for layer, width in zip(layers, widths, strict=True):
        layer |= {"norm_weight": jnp.ones(width), "norm_bias": jnp.zeros(width)}
    return Net(layers, [RunningStats(jnp.zeros(width), jnp.ones(width), jnp.int32(0)) for width in widths])


def batch_renorm(layer, running, x, train):  # (batch, fan_in) -> (batch, fan_in), and the next running statistics
    """Batch renormalisation: in training the statistics of the batch, corrected towards the running ones once these
    have seen 100,000 batches; else the running ones."""
    running_std = jnp.sqrt(running.var + 1e-3)
    if not train:
        return (x - running.mean) / running_std * layer["norm_weight"] + layer["norm_bias"], running
    mean, var = x.mean(0), x.var(0)
    std = jnp.sqrt(var + 1e-3)
    warm = running.batches >= 100_000
    r = jax.lax.stop_gradient(jnp.where(warm, (std / running_std).clip(1 / 3, 3), 1.0))
    d = jax.lax.stop_gradient(jnp.where(warm, ((mean - running.mean) / running_std).clip(-5, 5), 0.0))
    x = ((x - mean) / std * r + d) * layer["norm_weight"] + layer["norm_bias"]
    new_mean, new_var = running.mean + 0.01 * (mean - running.mean), running.var + 0.01 * (var - running.var)
    return x, RunningStats(new_mean, new_var, running.batches + 1)


def normalized_mlp(net, x, train):  # (batch, fan_in) -> (batch, fan_out), and the next running statistics
    """The layers with ReLU between them, and batch renormalisation before each."""
    running = []
    for i, (layer, stats) in enumerate(zip(net.layers, net.running, strict=True)):
        x, stats = batch_renorm(layer, stats, jax.nn.relu(x) if i else x, train)
        x = x @ layer["weight"] + layer["bias"]
        running.append(stats)
    return x, running


def init_params(key, obs_dim, action_dim, width):
    """The actor and the two critics."""
    actor, q1, q2 = jax.random.split(key, 3)
    q1, q2 = (init_net(k, obs_dim + action_dim, width, width, 1) for k in (q1, q2))
    critic = Net({"q1": q1.layers, "q2": q2.layers}, {"q1": q1.running, "q2": q2.running})
    return init_net(actor, obs_dim, 256, 256, 2 * action_dim), critic


def crossq_action(actor, obs, noise, train=False):  # (batch, obs_dim) -> (batch, action_dim), (batch,)
    """Actions for standard normal noise, their log-probabilities (appendix C), and the next running statistics."""
    out, running = normalized_mlp(actor, obs, train)
    mean, log_std = jnp.split(out, 2, axis=1)
    log_std = 3.5 * jnp.tanh(log_std) - 1.5  # in [-5, 2]; SAC's authors clip it instead
    x = mean + jnp.exp(log_std) * noise
    logprob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    logprob = logprob - 2 * (math.log(2) - x - jax.nn.softplus(-2 * x))  # log(1 - tanh(x)^2), numerically stable
    return jnp.tanh(x), logprob.sum(1), running


def act(actor, obs, noise=0.0):  # (batch, *obs_shape) -> (batch, action_dim)
    """The actions of the mean; with standard normal noise (batch, action_dim), samples of the policy."""
    obs = obs.reshape(len(obs), -1)
    return crossq_action(actor, obs, noise)[0]


def drawn(actor, obs, key):  # (batch, *obs_shape) -> (batch, action_dim)
    """Samples of the policy."""
    return act(actor, obs, jax.random.normal(key, act(actor, obs).shape))


def crossq_values(critic, obs, action, train=False):  # (batch, obs_dim), (batch, action_dim) -> (batch,), (batch,)
    """Two estimates of the value of an action, and the next running statistics."""
    x = jnp.concatenate([obs, action], 1)
    q1, running1 = normalized_mlp(Net(critic.layers["q1"], critic.running["q1"]), x, train)
    q2, running2 = normalized_mlp(Net(critic.layers["q2"], critic.running["q2"]), x, train)
    return q1.squeeze(1), q2.squeeze(1), {"q1": running1, "q2": running2}


def crossq_critic_loss(layers, running, actor, alpha, batch, noise, gamma):
    """The mean squared errors of both critics, added (Eq. 5 has half of each), the metrics, and the next running
    statistics. The target has the smaller value of the same critics, without gradient. Both come from one batch:
    (s, a) and (s', a')."""
    next_action, next_logprob, _ = crossq_action(actor, batch.next_obs, noise)
    obs, action = jnp.concatenate([batch.obs, batch.next_obs]), jnp.concatenate([batch.action, next_action])
    *pair, running = crossq_values(Net(layers, running), obs, action, train=True)
    (q1, next_q1), (q2, next_q2) = (jnp.split(q, 2) for q in pair)
    next_value = jax.lax.stop_gradient(jnp.minimum(next_q1, next_q2)) - alpha * next_logprob  # Eq. 3
    target = batch.reward + gamma * (1 - batch.done) * next_value
    assert q1.shape == q2.shape == target.shape == batch.reward.shape
    loss1, loss2 = ((q1 - target) ** 2).mean(), ((q2 - target) ** 2).mean()
    metrics = {
        "losses/qf1_values": q1.mean(),
        "losses/qf2_values": q2.mean(),
        "losses/qf1_loss": loss1,
        "losses/qf2_loss": loss2,
        "losses/qf_loss": (loss1 + loss2) / 2,  # half of what is minimised
    }
    return loss1 + loss2, (metrics, running)


def crossq_actor_loss(layers, running, critic, alpha, batch, noise):
    """Eq. 9, the metrics, the entropy of the policy, and the next running statistics. The critics use their own."""
    action, logprob, running = crossq_action(Net(layers, running), batch.obs, noise, train=True)
    q1, q2, _ = crossq_values(critic, batch.obs, action)
    loss = (alpha * logprob - jnp.minimum(q1, q2)).mean()
    entropy = -logprob.mean()
    return loss, ({"losses/actor_loss": loss, "losses/entropy": entropy}, entropy, running)


def alpha_loss(log_alpha, entropy, target_entropy):
    """Eq. 18, and the metrics."""
    loss = jnp.exp(log_alpha) * (entropy - target_entropy)
    return loss, {"losses/alpha_loss": loss}


def begin(key, setup):
    """The initial training state of one seed."""
    args, envs = setup.args, setup.envs
    params_key, envs_key, key = jax.random.split(key, 3)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    actor, critic = init_params(params_key, obs_dim, action_dim, args.width)
    log_alpha = jnp.log(1.0 if args.autotune else max(args.alpha, 1e-30))  # 0 has no logarithm
    optimizers = setup.actor_optimizer, setup.critic_optimizer, setup.alpha_optimizer
    learned = actor.layers, critic.layers, log_alpha
    states = (optimizer.init(x) for optimizer, x in zip(optimizers, learned, strict=True))
    learner = Learner(actor, critic, log_alpha, *states)
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


def learn_crossq(update, learner, learned, batch, noise, setup):
    """One update with a batch; `learned` are the sums of the metrics of the critics and of the actor, each with the
    number of gradient steps. Standard normal noise (2, batch_size, action_dim)."""
    args, (of_critic, of_actor) = setup.args, learned

    # "update the Q-function parameters" (Algorithm 1)
    inputs = learner.critic.running, learner.actor, jnp.exp(learner.log_alpha), batch, noise[0], args.gamma
    gradients, (metrics, running) = jax.grad(crossq_critic_loss, has_aux=True)(learner.critic.layers, *inputs)
    updates, optimizer_state = setup.critic_optimizer.update(gradients, learner.critic_optimizer_state)
    critic = Net(optax.apply_updates(learner.critic.layers, updates), running)
    learner = learner._replace(critic=critic, critic_optimizer_state=optimizer_state)
    of_critic = jax.tree.map(jnp.add, of_critic, (metrics, 1))

    # "update policy weights", "adjust temperature": once in policy_frequency updates
    def actor_step(_, carry):
        learner, of_actor = carry
        inputs = learner.actor.running, learner.critic, jnp.exp(learner.log_alpha), batch, noise[1]
        gradients, aux = jax.grad(crossq_actor_loss, has_aux=True)(learner.actor.layers, *inputs)
        metrics, entropy, running = aux
        updates, optimizer_state = setup.actor_optimizer.update(gradients, learner.actor_optimizer_state)
        actor = Net(optax.apply_updates(learner.actor.layers, updates), running)
        learner = learner._replace(actor=actor, actor_optimizer_state=optimizer_state)
        if args.autotune:
            inputs = entropy, -batch.action.shape[1]
            gradient, alpha_metrics = jax.grad(alpha_loss, has_aux=True)(learner.log_alpha, *inputs)
            updates, optimizer_state = setup.alpha_optimizer.update(gradient, learner.alpha_optimizer_state)
            log_alpha = optax.apply_updates(learner.log_alpha, updates)
            learner = learner._replace(log_alpha=log_alpha, alpha_optimizer_state=optimizer_state)
            metrics |= alpha_metrics
        return learner, jax.tree.map(jnp.add, of_actor, (metrics, 1))

    steps = jnp.where((update + 1) % args.policy_frequency == 0, 1, 0)
    learner, of_actor = jax.lax.fori_loop(0, steps, actor_step, (learner, of_actor))
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

    # ---- 1. act: one step in every environment
    random = jax.random.uniform(random_key, shape, minval=-1, maxval=1)
    noise = jax.random.normal(noise_key, shape)
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
        noise = jax.random.normal(noise_key, (2, *batch.action.shape))
        return learn_crossq(i, *carry, batch, noise, setup)

    first, last = due_updates(args, global_step, size >= args.batch_size)
    critics = ("losses/qf1_values", "losses/qf2_values", "losses/qf1_loss", "losses/qf2_loss", "losses/qf_loss")
    actor = ("losses/actor_loss", "losses/entropy", *(["losses/alpha_loss"] if args.autotune else []))
    nothing = (dict.fromkeys(critics, 0.0), 0), (dict.fromkeys(actor, 0.0), 0)
    learner, learned = jax.lax.fori_loop(first, last, update, (training.learner, nothing))

    # ---- 4. report: sums of the metrics over the gradient steps, and how many there were
    training = Training(learner, replay, env_state, step.obs, key, training.iteration + 1)
    return training, (step.reward, step.terminated | step.truncated, learned, jnp.exp(learner.log_alpha))


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    envs = run.open_envs(args.env_id, args.num_envs)  # written in JAX if we have this id, else EnvPool's
    run.require_spaces(envs, obs="vector", action="bounded")
    space = envs.single_action_space
    num_iterations = run.iterations(args.num_envs, batch=args.batch_size)  # rounded down; the buffer must hold a batch

    rates = args.policy_lr, args.q_lr
    setup = Setup(args, envs, *(optax.adam(rate, b1=0.5) for rate in rates), optax.adam(args.q_lr))
    training, start = run.resume(lambda key: begin(key, setup), model="learner.actor", envs=("env_state", "obs"))
    # train(training, iterations): those iterations in compiled code; reports: NumPy (num_seeds, iterations, ...)
    train = run.compile(lambda training: train_iteration(training, setup), chunk=max(1, 500 // args.num_envs))

    for iterations in run.loop(start, num_iterations, args.num_envs):  # ranges of at most `chunk` iterations
        global_step = iterations.stop * args.num_envs
        training, (reward, done, (of_critic, of_actor), alpha) = train(training, iterations)
        run.episodes(global_step, reward, done)
        run.learned(*of_critic)
        run.learned(*of_actor)
        run.log(global_step, {"losses/alpha": alpha[:, -1]})
        run.evaluate(global_step, act, make_env)
        run.save(global_step, training)
    run.close(act, make_env, sample=drawn)  # a last evaluation; `solo play` takes this policy
