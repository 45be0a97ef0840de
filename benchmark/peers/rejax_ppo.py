# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = [
#   "rejax==0.1.3", "gymnax==0.0.9", "jax==0.4.38", "jaxlib==0.4.38", "numpy==1.26.4", "scipy==1.15.2", "flax==0.10.2",
#   "optax==0.2.4", "chex==0.1.88", "distrax==0.1.5", "tensorflow-probability==0.25.0",
# ]
# ///
"""Steps per second of rejax's PPO on gymnax's CartPole-v1, with the settings of algorithms/ppo/ppo_jax.py.

Run       uv run --no-project benchmark/peers/rejax_ppo.py [--num-seeds N] [--one-core]     seeds by `vmap`
rejax holds environments, networks and the whole training in one compiled function, as PureJaxRL does, which is no
package. Its last version does not work with a current JAX (distrax and TensorFlow Probability use what JAX removed),
so it has an environment of its own. It reports nothing while it trains and counts no episodes, and its step size stays
as it is: less work than ours. Prints the steps per second of the fastest of three trainings, compiled before.
"""

import argparse
import os
import time

import jax
from rejax import PPO

STEPS = 200 * 512


def main(num_seeds):
    settings = {
        "env": "CartPole-v1", "num_envs": 4, "num_steps": 128, "num_minibatches": 4, "num_epochs": 4, "gamma": 0.99,
        "learning_rate": 2.5e-4, "gae_lambda": 0.95, "clip_eps": 0.2, "ent_coef": 0.01, "vf_coef": 0.5,
        "max_grad_norm": 0.5, "agent_kwargs": {"activation": "tanh", "hidden_layer_sizes": (64, 64)},
        "total_timesteps": STEPS, "eval_freq": STEPS, "skip_initial_evaluation": True,
    }  # fmt: skip
    algorithm = PPO.create(**settings).replace(eval_callback=lambda _, state, key: state.global_step)
    keys = jax.random.split(jax.random.PRNGKey(1), num_seeds)
    train = jax.vmap(algorithm.train) if num_seeds > 1 else lambda keys: algorithm.train(keys[0])
    train = jax.jit(train).lower(keys).compile()
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        _, steps = jax.block_until_ready(train(keys))
        seconds.append(time.perf_counter() - begin)
    assert steps.reshape(-1).tolist() == [STEPS] * num_seeds
    print(num_seeds * STEPS / min(seconds))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-seeds", type=int, default=1, help="seeds trained together")
    parser.add_argument("--one-core", action="store_true", help="stay on one core")
    args = parser.parse_args()
    if args.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    main(args.num_seeds)
