"""Steps per second of PPO on CartPole-v1: SoloRL (eager and compiled) and Stable-Baselines3, the same work in turn.

    pip install stable-baselines3
    python benchmark/ppo_speed.py --rounds 5

Equal settings: 4 environments x 128 steps, 4 minibatches, 4 epochs, two hidden layers of 64 tanh units, Adam, value and
policy clipping, one torch thread, CPU. Each measurement is a process of its own that trains 100 iterations; the clock
starts behind the first 20, so that imports, compilation and caches are left out, and everything a user gets (metrics,
TensorBoard, episode statistics) is in. A round measures every contestant once, in turn; the table gives the median,
the range and the ratio to Stable-Baselines3 within the same round. Writes the numbers to `--out`.
"""

import json
from pathlib import Path

import speed

STEPS, WARM_UP = 100 * 512, 20 * 512
NAMES = ["Stable-Baselines3", "SoloRL", "SoloRL compiled"]


def sb3():
    """Measure Stable-Baselines3's PPO; in a process of its own."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    model = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", 4), n_steps=128, batch_size=128, n_epochs=4, learning_rate=2.5e-4,
        ent_coef=0.01, clip_range=0.2, clip_range_vf=0.2, device="cpu", seed=1,
    )  # fmt: skip
    speed.time_sb3(model, STEPS, WARM_UP)


def measure(name):
    if name == "Stable-Baselines3":
        return speed.sb3(__file__)
    return speed.solorl("ppo/ppo.py", STEPS, WARM_UP, *(["--compile"] if "compiled" in name else []))


def table(path):
    """The measurements of a file as a Markdown table."""
    about = json.loads(Path(path).read_text())
    lines = ["| | steps/s, median | range | ratio to Stable-Baselines3 |", "|---|---:|---:|---:|"]
    for name in about["rounds"][0]:
        ratios = [each[name] / each["Stable-Baselines3"] for each in about["rounds"]]
        lines.append(speed.row(name, [each[name] for each in about["rounds"]], ratios))
    where = speed.where(about["rounds"], about)
    return "\n".join([*lines, "", f"{where}. Where SoloRL's time goes (eager): {speed.in_words(about['shares'])}."])


def main():
    args = speed.arguments("ppo", __doc__).parse_args()
    if args.sb3 is not None:
        sb3()
        return
    rounds = [{name: measure(name) for name in NAMES} for _ in range(args.rounds)]
    speed.write(args.out, rounds=rounds, shares=speed.shares("ppo/ppo.py", STEPS), threads=1)
    print(table(args.out))


if __name__ == "__main__":
    main()
