# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2.3"]
# ///
"""PPO with random network distillation (RND): exploration by novelty; in JAX, the whole training compiled.

Paper     Burda et al. 2018, https://arxiv.org/abs/1810.12894; PPO: https://arxiv.org/abs/1707.06347 ("Eq. n" below)
Run       solo train ppo_rnd_jax --env-id games/KeyAndDoor-v0 --num-seeds 4
Spaces    vector -> discrete
Differs   from ppo_jax.py: a second reward, the error of a network that learns to predict a fixed random network; a
          critic with two heads and no clipping of values; a warm-up of random actions for the statistics
Twin      ppo_rnd.py
Not for   Atari games: ppo_atari_envpool_jax.py; other images; continuous actions: ppo_continuous_action_jax.py
Details   docs/algorithms/ppo_rnd_jax.md
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import optax

from solorl import RunArgs, Runs, parse


@dataclass
class Args(RunArgs):
    env_kind = "jax"  # ids of environments written in JAX, or known to both EnvPool and Gymnasium
    env_id: str = "games/KeyAndDoor-v0"  # id of the environment, in JAX or EnvPool to train, in Gymnasium to evaluate
    num_seeds: int = 1  # seeds trained together, from `seed` on, each with a run folder of its own
    total_timesteps: int = 500_000  # environment steps, summed over environments
    num_envs: int = 4  # environments stepped in parallel
    num_steps: int = 128  # length of a rollout in each environment
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs per rollout
    learning_rate: float = 2.5e-4  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 0.5  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE (0: TD(0), 1: Monte Carlo), from 0 to 1
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # epsilon of Eq. 7
    vf_coef: float = 0.5  # c1 of Eq. 9, whose L^VF is halved here, as in the authors' code
    ent_coef: float = 0.01  # c2 of Eq. 9
    int_gamma: float = 0.99  # discount factor of the intrinsic reward, from 0 to 1
    ext_coef: float = 2.0  # weight of the extrinsic advantage
    int_coef: float = 1.0  # weight of the intrinsic advantage
    update_proportion: float = 0.25  # fraction of each minibatch that the predictor learns from, from 0 to 1
    warmup_rollouts: int = 10  # rollouts of random actions before training, for the statistics; 0: none
    target_kl: float | None = None  # stop the epochs of a rollout after one whose mean approx_kl is above this


class RunningMeanStd(NamedTuple):
    """Mean and variance of all that was seen, by Eq. 2.1 of Chan et al. 1979; in float32, in torch in float64."""

    mean: jax.Array
    var: jax.Array
    count: jax.Array = 0.0

    def update(self, x):  # (n, *shape)
        count = self.count + len(x)
        weight, delta = len(x) / count, x.mean(0) - self.mean
        var = self.var + weight * (x.var(0) - self.var + (1 - weight) * delta**2)
        return RunningMeanStd(self.mean + weight * delta, var, count)

    def scale(self, x):  # (n, *shape) -> (n, *shape)
        return (x / jnp.sqrt(self.var + 1e-8)).clip(-10, 10)

    def normalize(self, x):  # (n, *shape) -> (n, *shape)
        return self.scale(x - self.mean)


class Setup(NamedTuple):
    """What stays the same while a seed trains."""

    args: Args
    envs: Any
    num_iterations: int


class Training(NamedTuple):
    """The training state of one seed: all that changes, and the target network."""

    params: dict  # of policy, critic and predictor
    optimizer_state: Any
    target: list  # the parameters of the target network: random, never trained
    obs_normalizer: RunningMeanStd  # (obs_dim,)
    return_normalizer: RunningMeanStd  # (), of the intrinsic returns
    so_far: jax.Array  # (num_envs,), discounted intrinsic rewards until now, over all episodes
    env_state: Any
    obs: jax.Array  # (num_envs, obs_dim), the current observations
    key: jax.Array  # of the random numbers to come
    iteration: jax.Array  # iterations of the training done, without the warm-up, ()


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: jax.Array  # (batch_size, obs_dim)
    action: jax.Array  # (batch_size,)
    logprob: jax.Array  # (batch_size,)
    advantage: jax.Array  # (batch_size,), extrinsic and intrinsic
    returns: jax.Array  # (batch_size, 2), extrinsic, intrinsic
    reached: jax.Array  # (batch_size, obs_dim), the normalised observations after the actions
    features: jax.Array  # (batch_size, 128), what the target network makes of them


def make_env(env_id, **kwargs):
    """One environment, for evaluation."""
    return gym.make(env_id, **kwargs)


def orthogonal_mlp(key, *sizes, gain):
    """Layers with orthogonal weights and zero biases; `gain` is that of the last layer."""
    gains = [2**0.5] * (len(sizes) - 2) + [gain]
    weights = [
        jax.nn.initializers.orthogonal(g)(k, shape)
        for g, k, shape in zip(gains, jax.random.split(key, len(gains)), pairwise(sizes), strict=True)
    ]
    return [{"weight": weight, "bias": jnp.zeros(weight.shape[1])} for weight in weights]


def tanh_mlp(layers, x):
    """The layers with tanh between them, (batch, fan_in) -> (batch, fan_out)."""
    *hidden, last = layers
    for layer in hidden:
        x = jnp.tanh(x @ layer["weight"] + layer["bias"])
    return x @ last["weight"] + last["bias"]


def init_params(key, obs_dim, num_actions):
    actor, critic, predictor = jax.random.split(key, 3)
    return {
        "actor": orthogonal_mlp(actor, obs_dim, 64, 64, num_actions, gain=0.01),
        "critic": orthogonal_mlp(critic, obs_dim, 64, 64, 2, gain=1.0),  # two heads: extrinsic and intrinsic values
        "predictor": orthogonal_mlp(predictor, obs_dim, 128, 128, 128, gain=1.0),
    }


def evaluate_actions(params, obs, action):  # (batch, obs_dim), (batch,) -> logprobs, entropies, values (batch, 2)
    logprobs = jax.nn.log_softmax(tanh_mlp(params["actor"], obs))
    entropy = -(jnp.exp(logprobs) * logprobs).sum(1)
    return jnp.take_along_axis(logprobs, action[:, None], 1).squeeze(1), entropy, tanh_mlp(params["critic"], obs)


def act(params, obs):  # (batch, *obs_shape), as Gymnasium has them -> (batch,): the most likely actions
    return tanh_mlp(params["actor"], obs.reshape(len(obs), -1)).argmax(1)


def sample_categorical(logits, gumbel):
    """Actions drawn from softmax(logits), and their log-probabilities. (batch, num_actions) twice -> (batch,) each."""
    action = (logits + gumbel).argmax(1)  # the Gumbel-max trick
    return action, jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1).squeeze(1)


def discounted_returns(reward, done, so_far, gamma):
    """Sum of the rewards of an episode up to each step, earlier ones discounted. Both (num_steps, num_envs).

    so_far (num_envs,): the same up to the step before the first, 0 where an episode begins; its new value is returned.
    """

    def forwards(so_far, step):
        reward, done = step
        returns = gamma * so_far + reward
        return returns * (1 - done), returns

    so_far, returns = jax.lax.scan(forwards, so_far, (reward, done), unroll=16)
    return returns, so_far


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


def squared_error(predicted, features):
    """The intrinsic reward, and the loss of the predictor. (batch, num_features) twice -> (batch,)."""
    return ((predicted - features) ** 2).mean(-1)


def rnd_loss(params, batch, chosen, args):
    """The negative of Eq. 9 plus the error of the predictor where chosen (batch_size,) is 1, and the metrics."""
    logprob, entropy, value = evaluate_actions(params, batch.obs, batch.action)
    assert logprob.shape == entropy.shape == batch.advantage.shape and value.shape == batch.returns.shape

    # L^CLIP, Eq. 7
    logratio = logprob - batch.logprob
    ratio = jnp.exp(logratio)
    advantage = batch.advantage
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
    objective = jnp.minimum(ratio * advantage, clipped_ratio * advantage).mean()

    value_loss = 0.5 * ((value - batch.returns) ** 2).sum(-1).mean()  # L^VF of both heads, never clipped
    error = squared_error(tanh_mlp(params["predictor"], batch.reached), batch.features)
    predictor_loss = (error * chosen).sum() / chosen.sum().clip(1)

    loss = -(objective - args.vf_coef * value_loss + args.ent_coef * entropy.mean()) + predictor_loss
    metrics = {
        "losses/value_loss": value_loss,
        "losses/policy_loss": -objective,
        "losses/predictor_loss": predictor_loss,
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
    params_key, target_key, envs_key, key = jax.random.split(key, 4)
    obs_dim, num_actions = setup.envs.single_observation_space.shape[0], int(setup.envs.single_action_space.n)
    params = init_params(params_key, obs_dim, num_actions)
    target = orthogonal_mlp(target_key, obs_dim, 128, 128, gain=1.0)
    obs_normalizer = RunningMeanStd(jnp.zeros(obs_dim), jnp.ones(obs_dim), jnp.float32(0))
    return_normalizer = RunningMeanStd(jnp.zeros(()), jnp.ones(()), jnp.float32(0))
    novelty = (target, obs_normalizer, return_normalizer, jnp.zeros(setup.args.num_envs))
    env_state, obs = setup.envs.reset(envs_key)
    optimizer_state = flat_adam(setup.args.learning_rate, setup.args.max_grad_norm).init(params)
    return Training(params, optimizer_state, *novelty, env_state, obs, key, jnp.int32(0))


def warm_up(training, setup):
    """One iteration of random actions: the statistics of observations begin with those that they reach."""
    args, envs, _ = setup
    action_key, steps_key, key = jax.random.split(training.key, 3)
    shape = (args.num_steps, args.num_envs)
    action = jax.random.randint(action_key, shape, 0, int(envs.single_action_space.n))
    drawn = (jax.random.split(steps_key, args.num_steps), action)
    env_state, step = jax.lax.scan(lambda state, x: envs.step(x[0], state, x[1]), training.env_state, drawn)
    obs_normalizer = training.obs_normalizer.update(step.final_obs.reshape(args.num_envs * args.num_steps, -1))
    training = training._replace(obs_normalizer=obs_normalizer, env_state=env_state, obs=step.obs[-1], key=key)
    return training, (step.reward, step.terminated | step.truncated)


def train_iteration(training, setup):
    """One iteration of one seed: the next training state, and what is reported."""
    args, envs, num_iterations = setup
    params, batch_size = training.params, args.num_envs * args.num_steps
    action_key, steps_key, learn_key, chosen_key, key = jax.random.split(training.key, 5)

    # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
    def env_step(carry, drawn):
        (env_state, obs), (step_key, gumbel) = carry, drawn
        action, logprob = sample_categorical(tanh_mlp(params["actor"], obs), gumbel)
        # step: obs (where an episode ends, the next one's), reward, terminated, truncated, final_obs
        env_state, step = envs.step(step_key, env_state, action)
        return (env_state, step.obs), (obs, action, logprob, tanh_mlp(params["critic"], obs), step)

    # random numbers of the whole rollout in one call: faster than a few in each step
    gumbel = jax.random.gumbel(action_key, (args.num_steps, args.num_envs, int(envs.single_action_space.n)))
    drawn = (jax.random.split(steps_key, args.num_steps), gumbel)
    (env_state, next_obs), steps = jax.lax.scan(env_step, (training.env_state, training.obs), drawn)
    obs, action, logprob, value, step = steps  # (num_steps, num_envs, ...) each
    done = step.terminated | step.truncated

    # ---- 2. credit: the intrinsic reward is the predictor's error on the next observation, divided by the standard
    # deviation of the discounted intrinsic returns
    final_obs = step.final_obs.reshape(batch_size, -1)  # where the step led, also at the end of an episode
    obs_normalizer = training.obs_normalizer.update(final_obs)
    reached = obs_normalizer.normalize(final_obs).clip(-5, 5)
    features = tanh_mlp(training.target, reached)
    int_reward = squared_error(tanh_mlp(params["predictor"], reached), features).reshape(done.shape)
    never = jnp.zeros_like(int_reward)  # intrinsic returns continue in the next episode: never done, no final value
    int_returns, so_far = discounted_returns(int_reward, never, training.so_far, args.int_gamma)
    return_normalizer = training.return_normalizer.update(int_returns.reshape(batch_size))
    scaled_int_reward = int_reward / jnp.sqrt(return_normalizer.var + 1e-8)

    # "compute advantage estimates"
    # a time limit does not end the task: bootstrap from the value of the final observation
    final_value = tanh_mlp(params["critic"], final_obs)[:, 0].reshape(done.shape)
    final_value = jnp.where(step.truncated & ~step.terminated, final_value, 0)
    next_value = tanh_mlp(params["critic"], next_obs)
    ext = gae(step.reward, value[..., 0], done, final_value, next_value[:, 0], args.gamma, args.gae_lambda)
    intr = gae(scaled_int_reward, value[..., 1], never, never, next_value[:, 1], args.int_gamma, args.gae_lambda)
    advantage = args.ext_coef * ext + args.int_coef * intr
    returns = jnp.stack([ext, intr], -1) + value  # of each head
    rollout = (x.reshape(batch_size, *x.shape[2:]) for x in (obs, action, logprob, advantage, returns))
    rollout = Batch(*rollout, reached, features)

    # ---- 3. learn: "optimize surrogate L wrt theta, with K epochs and minibatch size M <= NT"
    # not a schedule of optax, which would count gradient steps: --target-kl leaves some of them out
    learning_rate = args.learning_rate * ((1 - training.iteration / num_iterations) if args.anneal_lr else 1)
    optimizer = flat_adam(learning_rate, args.max_grad_norm)  # its state fits any learning rate

    def gradient_step(learner, drawn):
        (params, optimizer_state), (index, chosen) = learner, drawn
        minibatch = jax.tree.map(lambda x: x[index], rollout)
        gradients, metrics = jax.grad(rnd_loss, has_aux=True)(params, minibatch, chosen, args)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state)
        return (optax.apply_updates(params, updates), optimizer_state), metrics

    def epoch(carry, drawn):
        (learner, stopped), (key, chosen) = carry, drawn
        index = jax.random.permutation(key, batch_size).reshape(args.num_minibatches, -1)
        new_learner, metrics = jax.lax.scan(gradient_step, learner, (index, chosen.reshape(index.shape)))
        if args.target_kl is None:
            return (new_learner, stopped), (metrics, ~stopped)
        # a scan computes all epochs: those after the one that stopped the rollout change nothing
        learner = jax.tree.map(lambda old, new: jnp.where(stopped, old, new), learner, new_learner)
        return (learner, stopped | (metrics["losses/approx_kl"].mean() > args.target_kl)), (metrics, ~stopped)

    carry = ((params, training.optimizer_state), jnp.array(False))
    chosen = jax.random.uniform(chosen_key, (args.update_epochs, batch_size)) < args.update_proportion
    drawn = (jax.random.split(learn_key, args.update_epochs), chosen)
    ((params, optimizer_state), _), (metrics, epoch_ran) = jax.lax.scan(epoch, carry, drawn)

    # ---- 4. report: sums of the metrics over the gradient steps, and how many there were
    # metrics: (update_epochs, num_minibatches) each
    assert all(values.ndim == 2 for values in metrics.values()), "a metric of a gradient step must be one number"
    sums = {name: values.sum(where=epoch_ran[:, None]) for name, values in metrics.items()}
    count = epoch_ran.sum() * args.num_minibatches
    charts = {"charts/learning_rate": jnp.float32(learning_rate), "charts/intrinsic_reward": int_reward.mean()}
    novelty = (training.target, obs_normalizer, return_normalizer, so_far)
    training = Training(params, optimizer_state, *novelty, env_state, next_obs, key, training.iteration + 1)
    return training, (step.reward, done, sums, count, charts)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    envs = run.open_envs(args.env_id, args.num_envs)  # written in JAX if we have this id, else EnvPool's
    run.require_spaces(envs, obs="vector", action="discrete")
    batch_size = args.num_envs * args.num_steps
    num_rollouts = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    num_iterations = num_rollouts - args.warmup_rollouts
    run.require(num_iterations > 0, "--total-timesteps leaves no rollout to learn from after --warmup-rollouts")

    setup = Setup(args, envs, num_iterations)
    # model: the fields that `act` needs; envs: those that a resume restarts where EnvPool cannot be saved
    training, start = run.resume(lambda key: begin(key, setup), model="params", envs=("env_state", "obs"))

    # ---- warm-up: the statistics of observations begin with those of random actions
    # train(training, iterations): those iterations in compiled code; reports: NumPy (num_seeds, iterations, ...)
    train = run.compile(lambda training: warm_up(training, setup), chunk=16)
    for iterations in run.loop(start, args.warmup_rollouts, batch_size, last=False):
        global_step = iterations.stop * batch_size
        training, (reward, done) = train(training, iterations)
        run.episodes(global_step, reward, done)
        run.log(global_step, {})
        run.save(global_step, training)

    # ---- training
    train = run.compile(lambda training: train_iteration(training, setup), chunk=16)
    for iterations in run.loop(start, num_iterations, batch_size):  # ranges of at most `chunk` iterations
        global_step = (args.warmup_rollouts + iterations.stop) * batch_size
        training, (reward, done, sums, count, charts) = train(training, iterations)
        run.episodes(global_step, reward, done)
        run.learned(sums, count)
        run.log(global_step, {name: values[:, -1] for name, values in charts.items()})  # of the last iteration
        run.evaluate(global_step, act, make_env)
        run.save(global_step, training)
    run.close(act, make_env)  # a last evaluation; `solo play` takes this policy
