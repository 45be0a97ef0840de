"""Steps per second of PPO and DQN on Pong: SoloRL and Stable-Baselines3, the same work in turn, two threads each.

    pip install stable-baselines3
    python benchmark/atari_speed.py --rounds 3

Equal settings: 4 grey images of 84 x 84, 4 frames an action, the network of Mnih et al. 2015, CPU. PPO: 8 games,
rollouts of 128 steps, 4 epochs of 4 minibatches. DQN: 1 game, a buffer of 10,000, an update of 32 transitions every 4
steps. The clock starts when imports, the first rollouts and the steps without updates are over. SoloRL's PPO plays
EnvPool's games, Stable-Baselines3 those of Gymnasium in its own process, as its `make_atari_env` makes them; the DQN
of both plays Gymnasium's, but in JAX EnvPool's. "Compiled" is `--compile`. Each measurement is a process of its own; a
round measures every contestant once, in turn; the table gives the median, the range and the ratio within the same
round. Writes the numbers to `--out`.
"""

import json
from pathlib import Path

import speed

THREADS = 2
PPO, DQN = "Stable-Baselines3, PPO", "Stable-Baselines3, DQN"
WORK = {  # steps, where the clock starts, flags
    "ppo": (8 * 1024, 2 * 1024, "--log-every", 1024),
    "dqn": (
        4_096, 1_024, "--log-every", 512, "--learning-starts", 500, "--buffer-size", 10_000,
        "--exploration-fraction", 0.1,
    ),
}  # fmt: skip
OURS = {  # contestant: script
    "SoloRL ppo_atari_envpool": "ppo/ppo_atari_envpool.py",
    "SoloRL ppo_atari_envpool compiled": "ppo/ppo_atari_envpool.py",
    "SoloRL ppo_atari_envpool_jax": "ppo/ppo_atari_envpool_jax.py",
    "SoloRL dqn_atari": "dqn/dqn_atari.py",
    "SoloRL dqn_atari compiled": "dqn/dqn_atari.py",
    "SoloRL dqn_atari_jax": "dqn/dqn_atari_jax.py",
}


def sb3(name):
    """Measure Stable-Baselines3; in a process of its own."""
    import ale_py
    import gymnasium
    import stable_baselines3
    import torch
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gymnasium.register_envs(ale_py)
    torch.set_num_threads(THREADS)
    envs = VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=8 if name == PPO else 1, seed=1), 4)
    if name == PPO:
        settings = {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "learning_rate": 2.5e-4, "clip_range": 0.1}
    else:
        settings = {
            "learning_rate": 1e-4, "buffer_size": 10_000, "learning_starts": 500, "batch_size": 32, "train_freq": 4,
            "target_update_interval": 1000, "exploration_fraction": 0.1, "exploration_final_eps": 0.01,
        }  # fmt: skip
    model = getattr(stable_baselines3, name[-3:])("CnnPolicy", envs, device="cpu", seed=1, **settings)
    speed.time_sb3(model, *WORK[name[-3:].lower()][:2])


def measure(name):
    if name not in OURS:
        return speed.sb3(__file__, name, threads=THREADS)
    steps, warm_up, *flags = WORK["ppo" if "ppo" in name else "dqn"]
    flags += ["--env-id", "PongNoFrameskip-v4" if "dqn_atari" in name and "jax" not in name else "Pong-v5"]
    flags += ["--compile"] * name.endswith("compiled")
    return speed.solorl(OURS[name], steps, warm_up, *flags, threads=THREADS)


def flops(name):
    """Floating-point operations of the products of one step."""
    first = 2 * 20 * 20 * 32 * 4 * 8 * 8
    forward = first + 2 * (9 * 9 * 64 * 32 * 4 * 4 + 7 * 7 * 64 * 64 * 3 * 3 + 64 * 7 * 7 * 512)
    learn = 3 * forward - first  # the first layer's derivative in its input is not needed
    return forward + 4 * learn if "ppo" in name.lower() else forward + 32 / 4 * (forward + learn)


def table(path):
    """The measurements of a file as a Markdown table."""
    about = json.loads(Path(path).read_text())
    rounds = about["rounds"]
    lines = [
        "| | steps/s, median | range | ratio to Stable-Baselines3 | share of products |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in rounds[0]:
        peer = PPO if "ppo" in name.lower() else DQN
        ratios = [each[name] / each[peer] for each in rounds]
        share = speed.share(rounds, name, flops(name), about["gemm"])
        lines.append(speed.row(name, [each[name] for each in rounds], ratios, share))
    where = f"{speed.where(rounds, about)}, {THREADS} threads. {flops('ppo') / 1e6:.0f} MFLOP a step of PPO, "
    where += f"{flops('dqn') / 1e6:.0f} of DQN; products of matrices reach {about['gemm'] / 1e9:.0f} GFLOP/s on them."
    return "\n".join([*lines, "", where])


def main():
    args = speed.arguments("atari", __doc__).parse_args()
    if args.sb3 is not None:
        sb3(args.sb3[0])
        return
    rounds = []
    for _ in range(args.rounds):
        rounds.append({})
        for name in (PPO, *OURS, DQN):
            rounds[-1][name] = measure(name)
            print(name, round(rounds[-1][name]), flush=True)
    speed.write(args.out, rounds=rounds, threads=THREADS, gemm=speed.gemm(THREADS))
    print(table(args.out))


if __name__ == "__main__":
    main()
