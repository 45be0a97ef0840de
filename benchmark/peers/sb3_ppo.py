"""Stable-Baselines3's PPO with the settings of algorithms/ppo/ppo.py, to compare with.

Run       pip install stable-baselines3; solo bench benchmark/peers/sb3_ppo.py --env-ids CartPole-v1 --num-seeds 10
Writes a run folder like ours, into SOLORL_RUN_DIR or below runs/; evaluated at the same steps on the same episodes.
"""

import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import torch
import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from solorl.compute.device import EVALUATE, env_seed
from solorl.files import git_state, sha256, write_atomically
from solorl.machine import cpu_model
from solorl.run.evaluation import play_episodes
from solorl.run.trackers import MetricsFile


@dataclass
class Args:
    env_id: str = "CartPole-v1"  # Gymnasium id of the environment
    seed: int = 1  # seed of Python, NumPy, torch and the environments
    total_timesteps: int = 500_000  # environment steps, summed over environments
    num_envs: int = 4  # environments stepped side by side
    num_steps: int = 128  # steps of one rollout in each environment
    num_minibatches: int = 4  # minibatches of one epoch
    learning_rate: float = 2.5e-4  # step size of Adam, annealed linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of GAE
    eval_every: int = 25_000  # environment steps between evaluations
    eval_episodes: int = 20  # episodes of one evaluation


class Report(BaseCallback):
    """Logs training episodes, and evaluates behind the update that crosses a multiple of `eval_every` steps."""

    def __init__(self, args, folder):
        super().__init__()
        self.args, self.metrics, self.rows = args, MetricsFile(folder / "metrics.jsonl"), []
        self.envs = [gym.make(args.env_id) for _ in range(args.eval_episodes)]
        self.seeds = [env_seed(args.seed, EVALUATE, i) for i in range(args.eval_episodes)]
        self.began, self.last = time.perf_counter(), 0

    def row(self, step, values):
        self.rows.append({"global_step": step, "wall_time": round(time.perf_counter() - self.began, 3), **values})

    def _on_step(self):
        for end in (info["episode"] for info in self.locals["infos"] if "episode" in info):
            self.row(self.num_timesteps, {"charts/episodic_return": end["r"], "charts/episodic_length": end["l"]})
        return True

    def _on_rollout_start(self):
        if self.num_timesteps // self.args.eval_every > self.last // self.args.eval_every:
            self.evaluate()
        self.last = self.num_timesteps
        self.metrics.write(self.rows)
        self.rows = []

    def evaluate(self):
        returns, lengths = play_episodes(self.envs, lambda x: self.model.predict(x, deterministic=True)[0], self.seeds)
        values = {"return": returns.mean(), "return_std": returns.std(), "length": lengths.mean()}
        row = {f"eval/episodic_{name}": float(value) for name, value in values.items()}
        self.row(self.num_timesteps, row)
        print(f"step {self.num_timesteps:,}  evaluation {returns.mean():.1f}", flush=True)
        return row


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    folder = Path(os.environ.get("SOLORL_RUN_DIR") or f"runs/{args.env_id}__sb3_ppo__{args.seed}__{time.time():.0f}")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "format": 1, "script": Path(__file__).name, "script_sha256": sha256(Path(__file__)), "args": asdict(args),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "git": git_state(Path(__file__).parent),
        "python": platform.python_version(), "machine": {"system": platform.platform(terse=True), "cpu": cpu_model()},
        "versions": {name: version(name) for name in ("stable-baselines3", "gymnasium", "numpy", "torch")},
    }  # fmt: skip
    config["machine"] |= {"cores": os.cpu_count(), "device": "cpu"}
    write_atomically(folder / "config.json", json.dumps(config, indent=2).encode())
    write_atomically(folder / "status.json", b'{"status": "running"}')
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size  # SB3 would round up
    model = PPO(
        "MlpPolicy", make_vec_env(args.env_id, n_envs=args.num_envs), n_steps=args.num_steps,
        batch_size=batch_size // args.num_minibatches, n_epochs=4, gamma=args.gamma, gae_lambda=args.gae_lambda,
        learning_rate=lambda left: args.learning_rate * (left + 1 / num_iterations),  # `left` is of the iteration's end
        # SB3's value loss has no factor 1/2: its 0.25 is our 0.5. SB3's own value clipping is another one (outside the range
        # the gradient is always 0) and off by default; with it, seed 1 of CartPole-v1 ended at 251 rather than 500.
        clip_range=0.2, ent_coef=0.01, vf_coef=0.25, max_grad_norm=0.5,
        policy_kwargs={"net_arch": [64, 64], "activation_fn": torch.nn.Tanh, "optimizer_kwargs": {"eps": 1e-5}},
        seed=args.seed * 1000, device="cpu",  # SB3 gives the environments this seed and the three behind it
    )  # fmt: skip
    report = Report(args, folder)
    model.learn(num_iterations * batch_size, callback=report)
    status = {"status": "finished", "global_step": model.num_timesteps, **report.evaluate()}
    status["wall_time"] = report.rows[-1]["wall_time"]
    report.metrics.write(report.rows)
    write_atomically(folder / "status.json", json.dumps(status).encode())
