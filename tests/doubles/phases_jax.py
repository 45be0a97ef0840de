"""`phases.py` for JAX: three loops in a row with a compiled function for each, and with batch sizes and chunks of their
own."""

import math
import os
import signal
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp

from solorl import RunArgs, Runs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"
    num_seeds: int = 1
    total_timesteps: int = 50
    end_at: int = 0  # step at which what `by` says ends the run; 0: none
    by: str = "signal"  # signal | stop | target
    eval_episodes: int = 2


class Training(NamedTuple):
    params: Any  # (4, 2)
    env_state: Any
    obs: Any  # (2, 4)
    key: Any


def make_env(env_id, **kwargs):
    return gym.make(env_id, **kwargs)


def act(params, obs):
    return (obs @ params).argmax(1)


def begin(key, envs):
    env_key, key = jax.random.split(key)
    return Training(jnp.zeros((4, 2)), *envs.reset(env_key), key)


def play(training, envs, choose):
    """Two steps in both environments: the training after them, reward and done (2, 2)."""

    def one(training, _):
        key, step_key, next_key = jax.random.split(training.key, 3)
        env_state, step = envs.step(step_key, training.env_state, choose(training, key))
        training = training._replace(env_state=env_state, obs=step.obs, key=next_key)
        return training, (step.reward, step.terminated | step.truncated)

    return jax.lax.scan(one, training, None, 2)


def learn(training):
    """Move the parameters at random."""
    key, next_key = jax.random.split(training.key)
    change = jax.random.normal(key, (4, 2))
    return training._replace(params=training.params + change, key=next_key), change.mean()


def warm(training, envs):
    return play(training, envs, lambda training, key: jax.random.randint(key, (2,), 0, 2))


def online(training, envs):
    training, found = play(training, envs, lambda training, key: act(training.params, training.obs))
    training, loss = learn(training)
    return training, (*found, loss)


if __name__ == "__main__":
    args = parse(Args)
    run = Runs(args)
    envs = run.open_envs(args.env_id, 2)
    training, start = run.resume(lambda key: begin(key, envs), model="params")
    trace = []  # loop and iterations, as they came

    def end(global_step):
        """What ends the run, at its step."""
        if global_step != args.end_at:
            return
        if args.by == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        for each in run.runs:
            if args.by == "stop":
                (each.dir / "stop").touch()
                each.ending.looked = -math.inf  # seconds: it looks rarely
            each.args.target_return = 1.0 if args.by == "target" else None

    train = run.compile(lambda training: warm(training, envs), chunk=3)
    for iterations in run.loop(start, 4, 4, last=False):  # an iteration is 4 environment steps
        global_step = 4 * iterations.stop
        trace += [("warm", i) for i in iterations]
        training, (reward, done) = train(training, iterations)
        run.episodes(global_step, reward, done)
        run.log(global_step, {"charts/reward": reward.mean((1, 2, 3))})
        end(global_step)
        run.save(global_step, training)

    train = run.compile(learn, chunk=2)
    for iterations in run.loop(start, 5, 2, last=False):  # an iteration is 2 steps
        global_step = 16 + 2 * iterations.stop
        trace += [("offline", i) for i in iterations]
        training, loss = train(training, iterations)
        run.log(global_step, {"losses/loss": loss.mean(1)})
        end(global_step)
        run.evaluate(global_step, act, make_env)
        run.save(global_step, training)

    train = run.compile(lambda training: online(training, envs), chunk=4)
    for iterations in run.loop(start, 6, 4):  # an iteration is 4 environment steps
        global_step = 26 + 4 * iterations.stop
        trace += [("online", i) for i in iterations]
        training, (reward, done, loss) = train(training, iterations)
        run.episodes(global_step, reward, done)
        run.log(global_step, {"losses/loss": loss.mean(1)})
        end(global_step)
        run.evaluate(global_step, act, make_env)
        run.save(global_step, training)
    run.close(act, make_env)
