# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = [
#   "pgx==2.6.0", "mctx==0.0.5", "jax==0.4.35", "jaxlib==0.4.35", "dm-haiku==0.0.13", "optax==0.2.5",
#   "omegaconf==2.3.0", "pydantic>=2",
# ]
# ///
"""Moves per second of pgx's AlphaZero example on connect four: self-play and learning, without evaluations.

Run       uv run --no-project benchmark/peers/pgx_alphazero.py FOLDER [games=256] [num_steps=64] [batch=512] [...]
FOLDER is `examples/alphazero` of a clone of pgx; what follows are values of its Config. Its code runs as it is, except
wandb, which is not installed, its baseline model, which only evaluations need, and the loop around it, which is written
again here. Its network is a residual one with convolutions, 128 channels and 6 blocks unless told otherwise; ours on a
CPU is a dense one. Prints the moves per second of each iteration after the first, which compiles.
"""

import sys
import time
import types

SHORT = {"games": "selfplay_batch_size", "num_steps": "max_num_steps", "batch": "training_batch_size"}


def main(folder, *values):
    sys.modules["wandb"] = types.ModuleType("wandb")
    sys.path.insert(0, folder)
    import jax
    import pgx

    if not hasattr(jax, "tree_map"):
        jax.tree_map = jax.tree_util.tree_map
    pgx.make_baseline_model = lambda name: None
    pairs = [value.split("=") for value in values]
    sys.argv[1:] = ["env_id=connect_four", *(f"{SHORT.get(name, name)}={value}" for name, value in pairs)]
    import train as example

    config, key = example.config, jax.random.PRNGKey(0)
    dummy = jax.vmap(example.env.init)(jax.random.split(key, 2)).observation
    model = example.forward.init(key, dummy)
    state = example.optimizer.init(params=model[0])
    model, state = jax.device_put_replicated((model, state), example.devices)
    for iteration in range(4):
        begin = time.perf_counter()
        key, play_key, shuffle_key = jax.random.split(key, 3)
        data = example.selfplay(model, jax.random.split(play_key, 1))
        samples = jax.device_get(example.compute_loss_input(data))
        samples = jax.tree_util.tree_map(lambda x: x.reshape(-1, *x.shape[3:]), samples)
        count = len(samples.obs)
        order = jax.random.permutation(shuffle_key, count).reshape(-1, 1, config.training_batch_size)
        for rows in order:
            batch = jax.tree_util.tree_map(lambda x, rows=rows: x[rows], samples)
            model, state, policy_loss, _ = example.train(model, state, batch)
        policy_loss.block_until_ready()
        seconds = time.perf_counter() - begin
        print(f"{count / seconds:.1f}" if iteration else f"compiled and {count} moves in {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
