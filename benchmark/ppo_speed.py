"""Steps per second of PPO: SoloRL (eager and compiled) and Stable-Baselines3, the same work in turn.

    pip install stable-baselines3
    python benchmark/ppo_speed.py --rounds 5 --env-id CartPole-v1

CartPole-v1: 4 environments x 128 steps, 4 minibatches, 4 epochs, value and policy clipping. HalfCheetah-v5: one
environment x 2,048 steps, 32 minibatches, 10 epochs, observations and rewards normalised. Both: two hidden layers of
64 tanh units, Adam, one torch thread, CPU. Each measurement is a process of its own; the clock starts after the
first iterations, so that imports, compilation and caches are left out, and everything a user gets (metrics,
TensorBoard, episode statistics) is in. A round measures every contestant once, in turn; the table gives the median,
the range and the ratio to Stable-Baselines3 within the same round. Writes the numbers to `--out`.
"""

import json
from pathlib import Path

import speed

CASES = {  # environment: (script, steps of one iteration, iterations, iterations before the clock starts)
    "CartPole-v1": ("ppo/ppo.py", 512, 100, 20),
    "HalfCheetah-v5": ("ppo/ppo_continuous_action.py", 2048, 10, 2),
}
NAMES = ["Stable-Baselines3", "SoloRL", "SoloRL compiled"]


def sb3(env_id):
    """Measure Stable-Baselines3's PPO; in a process of its own."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    _, batch, iterations, before = CASES[env_id]
    if env_id == "CartPole-v1":
        envs = make_vec_env(env_id, 4)
        settings = {}
    else:
        envs = VecNormalize(make_vec_env(env_id, 1))
        settings = {"n_steps": 2048, "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-4, "ent_coef": 0.0}
    settings = speed.PEERS["ppo"] | settings
    model = PPO("MlpPolicy", envs, clip_range_vf=0.2, device="cpu", seed=1, **settings)
    speed.time_sb3(model, batch * iterations, batch * before)


def measure(env_id, name):
    if name == "Stable-Baselines3":
        return speed.sb3(__file__, env_id)
    script, batch, iterations, before = CASES[env_id]
    flags = ["--env-id", env_id, "--save-every", 0, *(["--compile"] if "compiled" in name else [])]
    return speed.solorl(script, batch * iterations, batch * before, *flags)


def flops(env_id):
    """Floating-point operations of the matrix products of one step."""
    obs_dim, action_dim, epochs = {"CartPole-v1": (4, 2, 4), "HalfCheetah-v5": (17, 6, 10)}[env_id]
    nets = [(obs_dim, 64, 64, action_dim), (obs_dim, 64, 64, 1)]
    return sum(speed.forward_flops(*widths) + epochs * speed.train_flops(*widths) for widths in nets)


def table(path):
    """The measurements of a file as a Markdown table."""
    about = json.loads(Path(path).read_text())
    rounds, work, most = about["rounds"], flops(about["env_id"]), speed.products(about)
    shares = {name: speed.share(rounds, name, work, most) for name in rounds[0]}
    lines = [
        "| | steps/s, median | range | ratio to Stable-Baselines3 | share of products |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += speed.rows(rounds, ["Stable-Baselines3"], more=shares)
    where = f"{speed.where(rounds, about)}. {work / 1e6:.2f} MFLOP a step; products of matrices reach "
    where += f"{most / 1e9:.0f} GFLOP/s on one thread"
    return "\n".join([*lines, "", f"{where}. Where SoloRL's time goes (eager): {speed.in_words(about['shares'])}."])


def main():
    parser = speed.arguments("ppo", __doc__)
    parser.add_argument("--env-id", default="CartPole-v1", choices=CASES)
    args = parser.parse_args()
    if args.sb3 is not None:
        sb3(args.sb3[0])
        return
    if args.env_id == "HalfCheetah-v5" and args.out == parser.get_default("out"):
        args.out = args.out.with_name("ppo_halfcheetah.json")
    script, batch, iterations, _ = CASES[args.env_id]
    rounds = [{name: measure(args.env_id, name) for name in NAMES} for _ in range(args.rounds)]
    shares = speed.shares(script, batch * iterations, "--env-id", args.env_id)
    speed.write(args.out, env_id=args.env_id, rounds=rounds, shares=shares, threads=1, gemm=speed.gemm(1))
    print(table(args.out))


if __name__ == "__main__":
    main()
