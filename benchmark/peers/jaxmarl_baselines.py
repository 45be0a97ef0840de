# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = [
#   "jaxmarl==0.2.0", "gymnax==0.0.9", "jax==0.4.38", "jaxlib==0.4.38", "numpy==1.26.4", "scipy==1.15.2",
#   "flax==0.10.2", "optax==0.2.4", "chex==0.1.88", "distrax==0.1.5", "tensorflow-probability==0.25.0", "hydra-core",
#   "wandb",
# ]
# ///
"""Steps per second of JaxMARL's baselines on simple_spread, with the settings of mappo_jax.py and pqn_vdn_jax.py.

Run       uv run --no-project benchmark/peers/jaxmarl_baselines.py ippo CHECKOUT_OF_JAXMARL [--one-core]
The package on PyPI has the games, the baselines are in JaxMARL's repository only: its folder is the second argument.
`pqn_vdn` is its pqn_vdn_ff.py with layers of 102 units, which multiply as much as 120 and 84 do. `ippo` is its
ippo_ff_mpe.py: its MAPPO of this game is recurrent. A critic that sees one agent does less than that of mappo_jax.py.
distrax needs an older JAX than ours, hence a Python of its own. Nothing is evaluated or saved. Prints the steps per
second of the fastest of three trainings, compiled before.
"""

import argparse
import os
import sys
import time
from pathlib import Path

GAME = {"ENV_NAME": "MPE_simple_spread_v3", "ENV_KWARGS": {}, "WANDB_MODE": "disabled", "MAX_GRAD_NORM": 10.0}
GAME |= {"LR": 2e-3, "GAMMA": 0.95, "NUM_STEPS": 32, "NUM_MINIBATCHES": 4}
IPPO = GAME | {
    "NUM_ENVS": 128, "UPDATE_EPOCHS": 10, "ACTIVATION": "tanh", "ANNEAL_LR": True, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2,
    "VF_COEF": 0.5, "ENT_COEF": 0.01, "TOTAL_TIMESTEPS": 20 * 128 * 32,
}  # fmt: skip
PQN_VDN = GAME | {
    "NUM_ENVS": 64, "NUM_EPOCHS": 4, "HIDDEN_SIZE": 102, "NUM_LAYERS": 2, "NORM_TYPE": "layer_norm", "LAMBDA": 0.65,
    "LR_LINEAR_DECAY": True, "EPS_START": 1.0, "EPS_FINISH": 0.05, "EPS_DECAY": 0.5, "TEST_DURING_TRAINING": False,
    "TEST_NUM_ENVS": 1, "TOTAL_TIMESTEPS": 50 * 64 * 32,
}  # fmt: skip


def main(name, checkout):
    sys.path[:0] = [str(checkout / "baselines" / folder) for folder in ("IPPO", "QLearning")]
    import jax

    if name == "ippo":
        import ippo_ff_mpe
        import wandb

        wandb.init(mode="disabled")
        config = dict(IPPO)
        train = ippo_ff_mpe.make_train(config)
    else:
        import jaxmarl
        import pqn_vdn_ff
        from jaxmarl.wrappers.baselines import MPELogWrapper

        config = dict(PQN_VDN)
        train = pqn_vdn_ff.make_train(config, MPELogWrapper(jaxmarl.make(config["ENV_NAME"])))
    train, times = jax.jit(train), []
    for seed in range(4):
        began = time.perf_counter()
        jax.block_until_ready(train(jax.random.PRNGKey(seed)))
        times.append(time.perf_counter() - began)
    print(config["TOTAL_TIMESTEPS"] / min(times[1:]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("baseline", choices=["ippo", "pqn_vdn"])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--one-core", action="store_true")
    args = parser.parse_args()
    if args.one_core:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    main(args.baseline, args.checkout)
