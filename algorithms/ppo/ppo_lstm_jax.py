# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2.3"]
# ///
"""PPO with an LSTM: discrete actions, vector observations that need memory; in JAX, the whole training compiled.

Paper     Schulman et al. 2017, https://arxiv.org/abs/1707.06347 ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438
          LSTM: Hochreiter & Schmidhuber 1997, https://doi.org/10.1162/neco.1997.9.8.1735
          bias of the forget gates: Gers et al. 2000, https://doi.org/10.1162/089976600300015015
Run       solo train ppo_lstm_jax --env-id games/Cue-v0 --num-seeds 4
Spaces    vector -> discrete
Differs   from ppo_jax.py: the policy remembers what it saw in an episode with an LSTM, which policy and value have in
          common; minibatches are rollouts of some environments, in their order
Twin      ppo_lstm.py
Not for   Atari games: ppo_atari_lstm.py; other images; continuous actions: ppo_continuous_action_jax.py
Details   docs/algorithms/ppo_lstm_jax.md
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import optax

from solorl import RunArgs, Runs, parse


@dataclass
class Args(RunArgs):
    env_kind = "jax"  # ids of environments written in JAX, or known to both EnvPool and Gymnasium
    env_id: str = "games/Cue-v0"  # id of the environment, in JAX or EnvPool for training, in Gymnasium for evaluation
    num_seeds: int = 1  # seeds trained together, from `seed` on, each with a run folder of its own
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


class Setup(NamedTuple):
    """What stays the same while a seed trains."""

    args: Args
    envs: Any
    num_iterations: int


class Training(NamedTuple):
    """The training state of one seed: all that changes."""

    params: dict  # of the network
    optimizer_state: Any
    env_state: Any
    obs: jax.Array  # (num_envs, obs_dim), the current observations
    first: jax.Array  # (num_envs,), whether an episode begins with them
    state: jax.Array  # (2, num_envs, 64), the memory before them
    key: jax.Array  # of the random numbers to come
    iteration: jax.Array  # iterations done, ()


class Batch(NamedTuple):
    """A rollout, or the part of some environments of it."""

    obs: jax.Array  # (num_steps, num_envs, obs_dim)
    first: jax.Array  # (num_steps, num_envs): whether an episode begins with obs
    state: jax.Array  # (2, num_envs, 64), the memory before the rollout
    action: jax.Array  # (num_steps, num_envs), like all that follow
    logprob: jax.Array
    value: jax.Array
    advantage: jax.Array
    returns: jax.Array


def make_env(env_id, **kwargs):
    """One environment, for evaluation."""
    return gym.make(env_id, **kwargs)


def orthogonal(key, shape, gain):
    """A layer with orthogonal weights (..., fan_out) and zero biases."""
    return {"weight": jax.nn.initializers.orthogonal(gain)(key, shape), "bias": jnp.zeros(shape[-1])}


def linear(layer, x):  # (batch, fan_in) -> (batch, fan_out)
    return x @ layer["weight"] + layer["bias"]


def init_params(key, obs_dim, num_actions):
    shapes = {
        "encoder": ((obs_dim, 64), 2**0.5),
        "input": ((64, 4 * 64), 1.0),  # to the gates of the LSTM, from the encoder
        "memory": ((64, 4 * 64), 1.0),  # to the gates, from the hidden state
        "actor": ((64, num_actions), 0.01),
        "critic": ((64, 1), 1.0),
    }
    keys = jax.random.split(key, len(shapes))
    params = {name: orthogonal(key, *each) for key, (name, each) in zip(keys, shapes.items(), strict=True)}
    forget = jnp.zeros(4 * 64).at[64:128].set(3.0)  # gates in the order i, f, g, o: at first little is forgotten
    return params | {"input": params["input"] | {"bias": forget}}


def lstm_cell(gates, cell):  # (envs, 4 * 64) before their nonlinearities, (envs, 64) -> hidden and cell state
    i, f, g, o = jnp.split(gates, 4, 1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jnp.stack([jax.nn.sigmoid(o) * jnp.tanh(cell), cell])


def lstm_network(params, obs, state, first):
    """Some steps in some environments; the memory is empty where an episode begins.

    obs (steps, envs, obs_dim), state (2, envs, 64), first (steps, envs)
    -> logits (steps, envs, num_actions), values (steps, envs), state after the last step
    """

    def step(state, seen):
        inputs, begins = seen
        hidden, cell = jnp.where(begins[:, None], 0, state)
        state = lstm_cell(inputs + linear(params["memory"], hidden), cell)
        return state, state[0]

    inputs = linear(params["input"], jnp.tanh(linear(params["encoder"], obs)))
    state, output = jax.lax.scan(step, state, (inputs, first))
    return linear(params["actor"], output), linear(params["critic"], output).squeeze(-1), state


def evaluate_actions(params, obs, state, first, action):  # -> logprobs, entropies, values: all (steps, envs)
    logits, value, _ = lstm_network(params, obs, state, first)
    logprobs = jax.nn.log_softmax(logits)
    entropy = -(jnp.exp(logprobs) * logprobs).sum(-1)
    return jnp.take_along_axis(logprobs, action[..., None], -1).squeeze(-1), entropy, value


def act(params, obs, state, first):  # (batch, *obs_shape) -> (batch,): the most likely actions; the state after them
    if state is None:
        state = jnp.zeros((2, len(obs), 64))
    logits, _, state = lstm_network(params, obs.reshape(1, len(obs), -1), state, first[None])
    return logits[0].argmax(1), state


def sample_categorical(logits, gumbel):
    """Actions drawn from softmax(logits), and their log-probabilities. (batch, num_actions) twice -> (batch,) each."""
    action = (logits + gumbel).argmax(1)  # the Gumbel-max trick
    return action, jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1).squeeze(1)


def gae(reward, value, done, final_value, next_value, gamma, lam):
    """Advantages by Eq. 11-12. All (num_steps, num_envs) except next_value (num_envs,).

    next_value: value of the observation after the last step. done[t]: the return ends with step t. final_value[t]: if
    a time limit ended the episode, the value of its final observation, else 0.
    """
    assert reward.shape == value.shape == done.shape == final_value.shape and next_value.shape == reward.shape[1:]
    bootstrap = (1 - done) * jnp.concatenate([value[1:], next_value[None]]) + final_value
    delta = reward + gamma * bootstrap - value  # Eq. 12

    def backwards(next_advantage, step):
        delta, done = step
        advantage = delta + gamma * lam * (1 - done) * next_advantage  # Eq. 11
        return advantage, advantage

    return jax.lax.scan(backwards, jnp.zeros_like(value[0]), (delta, done), reverse=True, unroll=16)[1]


def ppo_lstm_loss(params, batch, args):
    """The negative of Eq. 9, and the metrics; the LSTM runs again from the state stored before the rollout."""
    logprob, entropy, value = evaluate_actions(params, batch.obs, batch.state, batch.first, batch.action)
    assert logprob.shape == entropy.shape == value.shape == batch.advantage.shape

    # L^CLIP, Eq. 7
    logratio = logprob - batch.logprob
    ratio = jnp.exp(logratio)
    advantage = batch.advantage
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
    objective = jnp.minimum(ratio * advantage, clipped_ratio * advantage).mean()

    # L^VF; with --clip-vloss the larger of two errors: of the value, and of the value clipped around the old one
    error = (value - batch.returns) ** 2
    if args.clip_vloss:
        clipped_value = batch.value + (value - batch.value).clip(-args.clip_coef, args.clip_coef)
        error = jnp.maximum(error, (clipped_value - batch.returns) ** 2)
    value_loss = 0.5 * error.mean()

    loss = -(objective - args.vf_coef * value_loss + args.ent_coef * entropy.mean())  # Eq. 9
    metrics = {
        "losses/value_loss": value_loss,
        "losses/policy_loss": -objective,
        "losses/entropy": entropy.mean(),
        "losses/old_approx_kl": -logratio.mean(),
        "losses/approx_kl": (ratio - 1 - logratio).mean(),  # k3 of http://joschu.net/blog/kl-approx.html
        "losses/clipfrac": (jnp.abs(ratio - 1) > args.clip_coef).mean(),
    }
    return loss, metrics


def flat_adam(learning_rate, max_grad_norm):
    """Adam on clipped gradients, all of them as one vector: fewer, larger operations."""
    clip, adam = optax.clip_by_global_norm(max_grad_norm), optax.scale_by_adam(eps=1e-5)
    return optax.flatten(optax.chain(clip, adam, optax.scale_by_learning_rate(learning_rate)))


def begin(key, setup):
    """The initial training state of one seed."""
    params_key, envs_key, key = jax.random.split(key, 3)
    obs_dim, num_actions = setup.envs.single_observation_space.shape[0], int(setup.envs.single_action_space.n)
    params = init_params(params_key, obs_dim, num_actions)
    env_state, obs = setup.envs.reset(envs_key)
    optimizer_state = flat_adam(setup.args.learning_rate, setup.args.max_grad_norm).init(params)
    first, state = jnp.ones(len(obs), bool), jnp.zeros((2, len(obs), 64))
    return Training(params, optimizer_state, env_state, obs, first, state, key, jnp.int32(0))


def train_iteration(training, setup):
    """One iteration of one seed: the next training state, and what is reported."""
    args, envs, num_iterations = setup
    params = training.params
    action_key, steps_key, learn_key, key = jax.random.split(training.key, 4)

    # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
    def env_step(carry, drawn):
        (env_state, obs, first, state), (step_key, gumbel) = carry, drawn
        logits, value, state = lstm_network(params, obs[None], state, first[None])
        action, logprob = sample_categorical(logits[0], gumbel)
        env_state, step = envs.step(step_key, env_state, action)
        # a time limit does not end the task: bootstrap from the value of the final observation, computed with the
        # memory of the episode that was cut
        _, final_value, _ = lstm_network(params, step.final_obs[None], state, jnp.zeros_like(first)[None])
        done = step.terminated | step.truncated
        return (env_state, step.obs, done, state), (obs, first, action, logprob, value[0], final_value[0], step)

    # random numbers of the whole rollout in one call: faster than a few in each step
    gumbel = jax.random.gumbel(action_key, (args.num_steps, args.num_envs, int(envs.single_action_space.n)))
    drawn = (jax.random.split(steps_key, args.num_steps), gumbel)
    carry = (training.env_state, training.obs, training.first, training.state)
    (env_state, next_obs, next_first, state), steps = jax.lax.scan(env_step, carry, drawn)
    obs, first, action, logprob, value, final_value, step = steps  # (num_steps, num_envs, ...) each
    done = step.terminated | step.truncated

    # ---- 2. credit: "compute advantage estimates"
    final_value = jnp.where(step.truncated & ~step.terminated, final_value, 0)
    _, next_value, _ = lstm_network(params, next_obs[None], state, next_first[None])
    advantage = gae(step.reward, value, done, final_value, next_value[0], args.gamma, args.gae_lambda)
    rollout = Batch(obs, first, training.state, action, logprob, value, advantage, advantage + value)

    # ---- 3. learn: "optimize surrogate L wrt theta, with K epochs and minibatch size M <= NT"
    # not a schedule of optax, which would count gradient steps: --target-kl leaves some of them out
    learning_rate = args.learning_rate * ((1 - training.iteration / num_iterations) if args.anneal_lr else 1)
    optimizer = flat_adam(learning_rate, args.max_grad_norm)  # its state fits any learning rate

    def gradient_step(learner, index):
        params, optimizer_state = learner
        minibatch = jax.tree.map(lambda x: x[:, index], rollout)
        gradients, metrics = jax.grad(ppo_lstm_loss, has_aux=True)(params, minibatch, args)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state)
        return (optax.apply_updates(params, updates), optimizer_state), metrics

    def epoch(carry, key):
        learner, stopped = carry
        index = jax.random.permutation(key, args.num_envs).reshape(args.num_minibatches, -1)
        new_learner, metrics = jax.lax.scan(gradient_step, learner, index)
        if args.target_kl is None:
            return (new_learner, stopped), (metrics, ~stopped)
        # a scan computes all epochs: those after the one that stopped the rollout change nothing
        learner = jax.tree.map(lambda old, new: jnp.where(stopped, old, new), learner, new_learner)
        return (learner, stopped | (metrics["losses/approx_kl"].mean() > args.target_kl)), (metrics, ~stopped)

    carry = ((params, training.optimizer_state), jnp.array(False))
    keys = jax.random.split(learn_key, args.update_epochs)
    ((params, optimizer_state), _), (metrics, epoch_ran) = jax.lax.scan(epoch, carry, keys)

    # ---- 4. report: sums of the metrics over the gradient steps, and how many there were
    # metrics: (update_epochs, num_minibatches) each
    assert all(values.ndim == 2 for values in metrics.values()), "a metric of a gradient step must be one number"
    sums = {name: values.sum(where=epoch_ran[:, None]) for name, values in metrics.items()}
    count = epoch_ran.sum() * args.num_minibatches
    # advantage: returns - value
    explained_variance = 1 - rollout.advantage.var(ddof=1) / (rollout.returns.var(ddof=1) + 1e-8)
    charts = {"charts/learning_rate": jnp.float32(learning_rate), "losses/explained_variance": explained_variance}
    training = Training(params, optimizer_state, env_state, next_obs, next_first, state, key, training.iteration + 1)
    return training, (step.reward, done, sums, count, charts)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    envs = run.open_envs(args.env_id, args.num_envs)  # written in JAX if we have this id, else EnvPool's
    run.require_spaces(envs, obs="vector", action="discrete")
    batch_size = args.num_envs * args.num_steps
    run.require(args.num_envs % args.num_minibatches == 0, "--num-minibatches must divide --num-envs (whole rollouts)")
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches

    setup = Setup(args, envs, num_iterations)
    # model: the fields that `act` needs; envs: what begins again where EnvPool cannot be saved; `first` clears `state`
    training, start = run.resume(lambda key: begin(key, setup), model="params", envs=("env_state", "obs", "first"))
    # train(training, iterations): those iterations in compiled code; reports: NumPy (num_seeds, iterations, ...)
    train = run.compile(lambda training: train_iteration(training, setup), chunk=16)

    for iterations in run.loop(start, num_iterations, batch_size):  # ranges of at most `chunk` iterations
        global_step = iterations.stop * batch_size
        training, (reward, done, sums, count, charts) = train(training, iterations)
        run.episodes(global_step, reward, done)
        run.learned(sums, count)
        run.log(global_step, {name: values[:, -1] for name, values in charts.items()})  # of the last iteration
        run.evaluate(global_step, act, make_env)
        run.save(global_step, training)
    run.close(act, make_env)  # a last evaluation; `solo play` takes this policy
