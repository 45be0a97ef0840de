"""Runs `make_train` of PureJaxRL's ppo.py or of PureJaxQL's pqn_minatar.py again and again; a point after each call.

    POINTS=points python benchmark/gpu/purejax.py purejaxrl_ppo --seeds 64 --steps 51200 NUM_ENVS=4 ...

The learning rate is annealed within a call. Compilation is over before the first point.
"""

import argparse
import importlib
import sys
from pathlib import Path

import jax
import stand_ins

SETTINGS = {  # those of the files, or of their configuration
    "purejaxrl_ppo": {
        "LR": 2.5e-4, "NUM_ENVS": 4, "NUM_STEPS": 128, "UPDATE_EPOCHS": 4, "NUM_MINIBATCHES": 4, "GAMMA": 0.99,
        "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5, "MAX_GRAD_NORM": 0.5,
        "ACTIVATION": "tanh", "ENV_NAME": "CartPole-v1", "ANNEAL_LR": True,
    },
    "purejaxql_pqn": {
        "ENV_NAME": "Breakout-MinAtar", "NUM_ENVS": 128, "NUM_STEPS": 32, "NUM_MINIBATCHES": 32, "NUM_EPOCHS": 2,
        "EPS_START": 1.0, "EPS_FINISH": 0.05, "EPS_DECAY": 0.1, "NORM_TYPE": "layer_norm", "NORM_INPUT": False,
        "LR": 5e-4, "LR_LINEAR_DECAY": True, "MAX_GRAD_NORM": 10, "GAMMA": 0.99, "LAMBDA": 0.65, "REW_SCALE": 1,
        "WANDB_MODE": "disabled",
    },
}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", choices=SETTINGS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, required=True, help="of a seed in one call")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    args = parser.parse_intermixed_args()
    sys.path.insert(0, str(Path.cwd()))
    config = SETTINGS[args.file] | {"TOTAL_TIMESTEPS": args.steps, "TOTAL_TIMESTEPS_DECAY": args.steps}
    for name, value in (each.split("=") for each in args.settings):
        config[name] = type(config[name])(value)
    make_train = importlib.import_module(args.file).make_train
    keys = jax.random.split(jax.random.PRNGKey(30), args.seeds)

    def train(keys):  # the curves, which they also return, would fill the memory: only the end is asked for
        return jax.vmap(make_train(config))(keys)["runner_state"][0].params

    train = jax.jit(train).lower(keys).compile()
    step, call = 0, config["NUM_ENVS"] * config["NUM_STEPS"]
    call = args.steps // call * call
    stand_ins.point(0)
    while True:
        jax.block_until_ready(train(keys))
        step += call
        stand_ins.point(step)
