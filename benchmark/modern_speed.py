"""Steps per second of TQC, CrossQ, DroQ and SimBa: SoloRL, sb3-contrib and SBX, the same work in turn.

    pip install sb3-contrib sbx-rl envpool
    python benchmark/modern_speed.py --rounds 5 --groups contrib sbx sbx-utd

HalfCheetah-v5, one environment, batches of 256, two hidden layers of 256 units, Adam, CPU, one thread; the defaults of
our files, to which the libraries are set. `contrib`: tqc.py and crossq.py next to sb3-contrib. `sbx`: tqc_jax.py and
crossq_jax.py next to SBX; they step EnvPool's environment, SBX steps Gymnasium's. `sbx-utd`: droq.py and simba_sac.py,
which are torch, next to SAC of SBX with dropout and with the SimBa networks.

TQC: 2 critics of 25 quantiles, 2 dropped for each; the actor steps once per step in the libraries, twice at every
second step in SoloRL: the same number. CrossQ: 2 critics, batch renormalisation in actor and critics, every third
update is also one of the actor. DroQ: 20 updates for each step, of which the last is also one of the actor. SimBa: 2
updates of critics and actor for each step, AdamW, residual blocks of 128 units (the actor: one, a critic: two),
observations normalised by running statistics (SBX: by VecNormalize).

Each measurement is a process of its own; the clock starts after 1,000 random steps and some of training, so that
imports and compilation are left out, and covers what CASES says with everything a user gets (metrics, episode
statistics). A round measures every contestant once, in turn. XLA gives SBX all cores, unless told otherwise; with "one
thread" it has one. Writes the numbers to `--out`.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import speed

ENV, RANDOM = "HalfCheetah-v5", 1_000
GROUPS = {"contrib": "sb3-contrib", "sbx": "SBX", "sbx-utd": "SBX"}  # group -> library
PEERS = {"sb3-contrib": {"sb3-contrib": {}}, "SBX": {"SBX": {}, "SBX, one thread": {"NPROC": "1"}}}  # variables of each
WIDTHS = {"net_arch": [256, 256], "n_critics": 2}
TQC = {"top_quantiles_to_drop_per_net": 2, "policy_kwargs": WIDTHS | {"n_quantiles": 25}}
CROSSQ = {"policy_delay": 3, "policy_kwargs": WIDTHS}
DROQ = {
    "gradient_steps": 20, "policy_delay": 20, "policy_kwargs": WIDTHS | {"dropout_rate": 0.01, "layer_norm": True},
}  # fmt: skip
SIMBA = {  # a residual block for each width
    "policy": "SimbaPolicy", "learning_rate": 1e-4, "gradient_steps": 2,
    "target_entropy": -3.0, "ent_coef": "auto_0.01",
    "policy_kwargs": {"net_arch": {"pi": [128], "qf": [128, 128]}, "optimizer_kwargs": {"weight_decay": 1e-2}},
}  # fmt: skip


class Case(NamedTuple):
    group: str
    title: str
    script: str  # below algorithms/
    peer: str  # the class of the library
    settings: dict  # that make the library do the work of the script's defaults
    before: int  # steps before the clock starts
    steps: int  # until it stops


CASES = {
    "tqc": Case("contrib", "TQC, torch", "actor_critic/tqc.py", "TQC", TQC, 1_500, 2_500),
    "crossq": Case("contrib", "CrossQ, torch", "actor_critic/crossq.py", "CrossQ", CROSSQ, 1_500, 2_500),
    "tqc_jax": Case("sbx", "TQC, JAX", "actor_critic/tqc_jax.py", "TQC", TQC, 1_500, 2_500),
    "crossq_jax": Case("sbx", "CrossQ, JAX", "actor_critic/crossq_jax.py", "CrossQ", CROSSQ, 1_500, 2_500),
    "droq": Case("sbx-utd", "DroQ, 20 updates a step", "actor_critic/droq.py", "SAC", DROQ, 1_050, 1_150),
    "simba_sac": Case("sbx-utd", "SimBa, 2 updates a step", "actor_critic/simba_sac.py", "SAC", SIMBA, 1_500, 2_000),
}


def sb3(name):
    """Measure the library of a case; in a process of its own."""
    import importlib

    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    case = CASES[name]
    envs = make_vec_env(ENV, 1)
    if case.settings.get("policy") == "SimbaPolicy":
        envs = VecNormalize(envs, norm_reward=False)
    settings = {"policy": "MlpPolicy", "learning_starts": RANDOM, "batch_size": 256, "device": "cpu", "seed": 1}
    if GROUPS[case.group] == "sb3-contrib":
        import torch

        torch.set_num_threads(1)
    module = importlib.import_module("sbx" if GROUPS[case.group] == "SBX" else "sb3_contrib")
    model = getattr(module, case.peer)(env=envs, **settings | case.settings)
    speed.time_sb3(model, case.steps, case.before)


def peers(case):
    """The contestants that are not ours, with the variables of their processes."""
    return PEERS[GROUPS[case.group]]


def contestants(case):
    ours = ["SoloRL, JAX"] if case.script.endswith("_jax.py") else ["SoloRL", "SoloRL compiled"]
    return [*peers(case), *ours]


def measure(name, contestant):
    case = CASES[name]
    if contestant in peers(case):
        return speed.sb3(__file__, name, **peers(case)[contestant])
    flags = ["--env-id", ENV, "--learning-starts", RANDOM, "--save-every", 0]
    flags += ["--log-every", math.gcd(case.before, case.steps)]  # a row at both
    flags += ["--compile"] if "compiled" in contestant else []
    return speed.solorl(case.script, case.steps, case.before, *flags)


def table(path):
    """The measurements of a file as Markdown tables."""
    about, lines = json.loads(Path(path).read_text()), []
    for name, rounds in about["rounds"].items():
        others = list(peers(CASES[name]))
        best = others[0] if len(others) == 1 else f"the best of {GROUPS[CASES[name].group]}"
        lines += [f"| {CASES[name].title} | steps/s, median | range | ratio to {best} |", "|---|---:|---:|---:|"]
        lines += [*speed.rows(rounds, others), ""]
    names = [name for rounds in about["rounds"].values() for name in rounds[0]]
    threads = "one thread each" + (" (SBX: as XLA chooses)" if "SBX" in names else "")
    return "\n".join([*lines, f"{speed.where(max(about['rounds'].values(), key=len), about)}, {ENV}, {threads}."])


def main():
    parser = speed.arguments("modern", __doc__)
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=GROUPS)
    args = parser.parse_args()
    if args.sb3 is not None:
        sb3(*args.sb3)
        return
    rounds = {name: [] for name, case in CASES.items() if case.group in args.groups}
    for _ in range(args.rounds):
        for name in rounds:
            rounds[name].append({each: measure(name, each) for each in contestants(CASES[name])})
        speed.write(args.out, rounds=rounds)  # so that an interruption loses one round
    print(table(args.out))


if __name__ == "__main__":
    main()
