# /// script
# requires-python = ">=3.11"
# dependencies = ["d3rlpy==2.8.1", "torch>=2.5", "numpy"]
# ///
"""Gradient steps per second of d3rlpy's TD3+BC, IQL or CQL, with the settings of the files in algorithms/offline/.

Run       uv run --no-project benchmark/peers/d3rlpy_offline.py td3_bc PIECE.npz --before 300 --steps 1300
d3rlpy 2.8 imports Gym, which ours does without, so it may have an environment of its own. Its `compile_graph` works on
a GPU only. It computes no evaluation here and writes no file.
"""

import argparse
import time

import d3rlpy
import numpy as np
import torch
from d3rlpy.models.encoders import VectorEncoderFactory

DEEP = VectorEncoderFactory([256, 256, 256])
ALGORITHMS = {
    "td3_bc": d3rlpy.algos.TD3PlusBCConfig(),
    "iql": d3rlpy.algos.IQLConfig(),
    # without the Lagrange multiplier and with a learned temperature, as ours
    "cql": d3rlpy.algos.CQLConfig(
        actor_learning_rate=3e-5,
        temp_learning_rate=3e-5,
        alpha_learning_rate=0.0,
        initial_alpha=1.0,
        conservative_weight=10.0,
        actor_encoder_factory=DEEP,
        critic_encoder_factory=DEEP,
    ),
}


def main(name, piece, before, steps):
    torch.set_num_threads(1)
    with np.load(piece) as arrays:
        count = len(arrays["reward"])
        obs, action = (arrays[key].reshape(count, -1).astype(np.float32) for key in ("obs", "action"))
        terminals = arrays["terminated"].reshape(count).astype(np.float32)
        timeouts = np.arange(1, count + 1) % 1_000 == 0
        data = d3rlpy.dataset.MDPDataset(obs, action, arrays["reward"].reshape(count, 1), terminals, timeouts)
    config = ALGORITHMS[name]
    config.observation_scaler = d3rlpy.preprocessing.StandardObservationScaler()
    agent, began = config.create(device="cpu"), {}

    def clock(agent, epoch, step):
        if step in (before, steps):
            began[step] = time.perf_counter()

    quiet = {"logger_adapter": d3rlpy.logging.NoopAdapterFactory(), "show_progress": False}
    agent.fit(data, steps, n_steps_per_epoch=steps, callback=clock, **quiet)
    print((steps - before) / (began[steps] - began[before]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("algorithm", choices=ALGORITHMS)
    parser.add_argument("piece", help="a piece of a data set: docs/offline_data.md, one environment")
    parser.add_argument("--before", type=int, default=300, help="gradient steps before the clock starts")
    parser.add_argument("--steps", type=int, default=1_300, help="gradient steps until it stops")
    args = parser.parse_args()
    main(args.algorithm, args.piece, args.before, args.steps)
