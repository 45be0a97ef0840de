"""Steps per second of SAC and TD3 on HalfCheetah-v5: SoloRL and Stable-Baselines3, the same work in turn.

    pip install stable-baselines3
    python benchmark/actor_critic_speed.py --rounds 5

Equal settings: one environment, one gradient step per environment step, batches of 256, two hidden layers of 256 units,
Adam, CPU. SAC's actor steps once per step in Stable-Baselines3, twice at every second step in SoloRL: the same number.
Each measurement is a process of its own; the clock starts after 1,000 random steps and 500 steps of training, so that
imports, compilation and caches are left out, and covers 1,000 steps with everything a user gets (metrics, TensorBoard,
episode statistics). A round measures every contestant once, in turn. The table gives the median, the range, the ratio
to the best of Stable-Baselines3 within the same round, and the share of what matrix products allow: the floating-point
operations of one step, over the rate of a product of 256 x 256 matrices, by MKL (what torch takes) or oneDNN (what
compiled code takes where it is faster), whichever is faster. Writes the numbers to `--out`.
"""

import json
import statistics
from pathlib import Path

import speed

RANDOM, WARM_UP, STEPS = 1_000, 1_500, 2_500
PEER = "Stable-Baselines3"
WAYS = [PEER, "SoloRL", "SoloRL compiled"]
NAMES = {f"{way}, {threads} thread{'s' * (threads > 1)}": (way, threads) for way in WAYS for threads in (1, 2)}


def sb3(algorithm, threads):
    """Measure Stable-Baselines3's SAC or TD3; in a process of its own."""
    import gymnasium as gym
    import numpy as np
    import stable_baselines3
    import torch
    from stable_baselines3.common.noise import NormalActionNoise

    torch.set_num_threads(threads)
    extra = {"action_noise": NormalActionNoise(np.zeros(6), np.full(6, 0.1))} if algorithm == "td3" else {}
    model = getattr(stable_baselines3, algorithm.upper())(
        "MlpPolicy", gym.make("HalfCheetah-v5"), learning_starts=RANDOM, batch_size=256, train_freq=1, gradient_steps=1,
        policy_kwargs={"net_arch": [256, 256]}, device="cpu", seed=1, **extra,
    )  # fmt: skip
    speed.time_sb3(model, STEPS, WARM_UP)


def flops(algorithm):
    """Floating-point operations of the matrix products of one step."""
    obs_dim, action_dim, hidden, batch = 17, 6, 256, 256

    policy = (obs_dim, hidden, hidden, 2 * action_dim if algorithm == "sac" else action_dim)
    value = (obs_dim + action_dim, hidden, hidden, 1)
    forward, train = speed.forward_flops, speed.train_flops
    critics = forward(*policy) + 2 * forward(*value) + 2 * train(*value)
    critics_of_actor, frequency = (2, 1) if algorithm == "sac" else (1, 0.5)
    return batch * (critics + frequency * (train(*policy) + critics_of_actor * 2 * forward(*value)))


def measure(algorithm, name):
    way, threads = NAMES[name]
    if way == PEER:
        return speed.sb3(__file__, algorithm, threads, threads=threads)
    flags = ["--env-id", "HalfCheetah-v5", "--learning-starts", RANDOM, "--save-every", 0]
    flags += ["--compile"] if "compiled" in way else []
    return speed.solorl(f"actor_critic/{algorithm}_continuous_action.py", STEPS, WARM_UP, *flags, threads=threads)


def best(rates, way):
    """The best rate of a contestant in one round, over its settings."""
    return max(rate for name, rate in rates.items() if name.startswith(way))


def table(path):
    """The measurements of a file as a Markdown table."""
    about = json.loads(Path(path).read_text())
    head = "| steps/s, median | range | ratio to the best Stable-Baselines3 | share of the machine's products |"
    lines = []
    for algorithm, rounds in about["rounds"].items():
        lines += ["", f"| {algorithm.upper()} {head}", "|---|---:|---:|---:|---:|"]
        for name in rounds[0]:
            rates = [each[name] for each in rounds]
            share = statistics.median(rates) * flops(algorithm) / about["gemm"][str(NAMES[name][1])]
            ratios = [each[name] / best(each, PEER) for each in rounds]
            lines.append(speed.row(name, rates, ratios, f"{100 * share:.0f} %"))
        ratio = statistics.median(best(each, "SoloRL") / best(each, PEER) for each in rounds)
        lines.append(f"| best of SoloRL over best of {PEER} | | | **{ratio:.2f}** | |")
    where = speed.where(max(about["rounds"].values(), key=len), about)
    rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s (threads: {threads})" for threads, rate in about["gemm"].items())
    work = ", ".join(
        f"{flops(algorithm) / 1e6:.0f} MFLOP a step of {algorithm.upper()}" for algorithm in about["rounds"]
    )
    return "\n".join([*lines[1:], "", f"{where}. {work}; matrix products reach {rates}."])


def main():
    parser = speed.arguments("actor_critic", __doc__)
    parser.add_argument("--algorithms", nargs="+", default=["sac", "td3"], choices=["sac", "td3"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    args = parser.parse_args()
    if args.sb3 is not None:
        sb3(args.sb3[0], int(args.sb3[1]))
        return
    names = [name for name, (_, threads) in NAMES.items() if threads in args.threads]
    rounds = {algorithm: [] for algorithm in args.algorithms}
    rates = {threads: [] for threads in args.threads}
    for _ in range(args.rounds):
        for threads in args.threads:
            rates[threads].append(speed.gemm(threads))
        for algorithm in args.algorithms:
            rounds[algorithm].append({name: measure(algorithm, name) for name in names})
        gemms = {str(threads): max(each) for threads, each in rates.items()}
        speed.write(args.out, rounds=rounds, gemm=gemms)  # so that an interruption loses one round
    print(table(args.out))


if __name__ == "__main__":
    main()
