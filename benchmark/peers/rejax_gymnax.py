"""rejax's PPO and PQN in gymnax's games, to compare scores with ppo_jax.py, ppo_minatar_jax.py and pqn_jax.py.

Run       PYTHONPATH=PEER solo bench benchmark/peers/rejax_gymnax.py --env-ids Asterix-MinAtar -- --algorithm ppo
PEER is a folder that holds rejax without what it asks for, so that JAX and gymnax are SoloRL's: pip install --no-deps
--target PEER rejax==0.1.3 distrax==0.1.9 tfp-nightly==0.26.0.dev20261027 chex dm-tree toolz decorator gast
rejax is written for a gymnax that does not tell a time limit from the end of a task: to it, both are an end
(`old_game`). Its learning rate stays as it is. The settings of PPO are those of gymnax's published runs
(gymnax-blines), those of PQN its authors' for MinAtar.
Writes a run folder like ours, into SOLORL_RUN_DIR or below runs/; the greedy policy is evaluated at the same steps on
the same episodes.
"""

import argparse
import json
import os
import platform
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import gymnax
import jax
import jax.numpy as jnp

import solorl.envs.gymnax  # noqa: F401  registers the games of evaluation
from solorl.compute.device import EVALUATE, env_seed
from solorl.files import git_state, sha256, write_atomically
from solorl.machine import cpu_model
from solorl.run.evaluation import play_episodes
from solorl.run.trackers import MetricsFile

PPO = {
    "num_envs": 64, "num_steps": 128, "num_minibatches": 8, "num_epochs": 4, "learning_rate": 5e-4, "gamma": 0.999,
    "gae_lambda": 0.95, "clip_eps": 0.2, "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5,
    "agent_kwargs": {"activation": "relu", "hidden_layer_sizes": (256, 256)},
}  # fmt: skip
PQN = {
    "num_envs": 128, "num_steps": 32, "num_minibatches": 32, "num_epochs": 2, "learning_rate": 5e-4, "gamma": 0.99,
    "td_lambda": 0.65, "eps_start": 1.0, "eps_end": 0.05, "exploration_fraction": 0.1, "max_grad_norm": 10.0,
    "agent_kwargs": {},
}  # fmt: skip


def old_game(env_id):
    """One of gymnax's games with the five results of `step` that rejax expects, and its parameters."""
    game, params = gymnax.make(env_id)

    class OldGame(type(game)):
        def step(self, key, state, action, params=None):
            """The last but one tells whether the episode has ended, in whichever way."""
            obs, state, reward, terminated, truncated, info = super().step(key, state, action, params)
            return obs, state, reward, terminated | truncated, info

    return OldGame(), params


def main(args):
    import rejax

    settings = {"ppo": PPO, "pqn": PQN}[args.algorithm]
    batch_size = settings["num_envs"] * settings["num_steps"]
    num_iterations = args.total_timesteps // batch_size
    name = f"{args.env_id}__rejax_gymnax__{args.seed}__{time.time():.0f}"
    folder = Path(os.environ.get("SOLORL_RUN_DIR") or f"runs/{name}")
    folder.mkdir(parents=True, exist_ok=True)
    stored = {**vars(args), **{name: value for name, value in settings.items() if name != "agent_kwargs"}}
    config = {
        "format": 1, "script": Path(__file__).name, "script_sha256": sha256(Path(__file__)), "args": stored,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "git": git_state(Path(__file__).parent),
        "python": platform.python_version(), "machine": {"system": platform.platform(terse=True), "cpu": cpu_model()},
        "versions": {name: version(name) for name in ("rejax", "gymnax", "gymnasium", "numpy", "jax")},
    }  # fmt: skip
    config["machine"] |= {"cores": os.cpu_count(), "device": "cpu"}
    write_atomically(folder / "config.json", json.dumps(config, indent=2).encode())
    write_atomically(folder / "status.json", b'{"status": "running"}')
    metrics = MetricsFile(folder / "metrics.jsonl")

    total = num_iterations * batch_size
    game, params = old_game(args.env_id)
    create = {"ppo": rejax.PPO, "pqn": rejax.PQN}[args.algorithm].create
    algorithm = create(env=game, env_params=params, total_timesteps=total, **settings)
    state = jax.jit(algorithm.init_state)(jax.random.PRNGKey(args.seed))
    train = jax.jit(lambda state, n: jax.lax.fori_loop(0, n, lambda _, s: algorithm.train_iteration(s), state))
    shape = algorithm.env.observation_space(algorithm.env_params).shape

    @jax.jit
    def greedy(trained, obs):
        obs = obs.reshape(-1, *shape)
        if args.algorithm == "pqn":
            return algorithm.agent.apply(trained.q_ts.params, obs).argmax(1)
        return algorithm.actor.apply(trained.actor_ts.params, obs, method="_action_dist").logits.argmax(1)

    envs = [gym.make(args.env_id) for _ in range(args.eval_episodes)]
    seeds = [env_seed(args.seed, EVALUATE, i) for i in range(args.eval_episodes)]
    seconds, done, row = 0.0, 0, {}
    while done < num_iterations:
        due = -(-(done * batch_size // args.eval_every + 1) * args.eval_every // batch_size)
        count = min(due, num_iterations) - done
        began = time.perf_counter()
        state = jax.block_until_ready(train(state, jnp.int32(count)))
        seconds, done = seconds + time.perf_counter() - began, done + count
        returns, lengths = play_episodes(envs, partial(greedy, state), seeds)
        values = {"return": returns.mean(), "return_std": returns.std(), "length": lengths.mean()}
        row = {f"eval/episodic_{name}": float(value) for name, value in values.items()}
        metrics.write([{"global_step": done * batch_size, "wall_time": round(seconds, 3), **row}])
        print(f"step {done * batch_size:,}  evaluation {returns.mean():.1f}", flush=True)
    status = {"status": "finished", "global_step": total, "wall_time": round(seconds, 3), **row}
    write_atomically(folder / "status.json", json.dumps(status).encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=["ppo", "pqn"], default="ppo", help="which of rejax's algorithms")
    parser.add_argument("--env-id", default="Asterix-MinAtar", help="gymnax's id of the game")
    parser.add_argument("--seed", type=int, default=1, help="seed of the training and of the environments")
    parser.add_argument("--total-timesteps", type=int, default=10_000_000, help="environment steps")
    parser.add_argument("--eval-every", type=int, default=1_000_000, help="environment steps between evaluations")
    parser.add_argument("--eval-episodes", type=int, default=20, help="episodes of one evaluation")
    main(parser.parse_args())
