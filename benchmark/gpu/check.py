"""Does a GPU learn the same with CUDA graphs, compiled and eager? The weights after some 100 updates, next to those of
eager updates, as a fraction of what was learned; and which functions could not be recorded.

    python benchmark/gpu/check.py --out check.json            # all files below, 14 processes at once
    python benchmark/gpu/check.py --device cpu --only ppo     # without a GPU: that the script works
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEARN = "--learning-rate"
CRITIC = "--total-timesteps 300 --learning-starts 200 --batch-size 64"
# flags of some 100 updates, the flag of the learning rate, the variables that learn
FILES = {
    "ppo/ppo": ("--total-timesteps 512 --num-minibatches 16 --update-epochs 6", "agent"),
    "ppo/a2c": ("--total-timesteps 2000", "agent"),
    "ppo/ppo_continuous_action": (
        "--env-id Pendulum-v1 --total-timesteps 2048 --num-minibatches 16 --update-epochs 6",
        "agent",
    ),
    "ppo/ppo_lstm": ("--total-timesteps 2048", "agent"),
    "ppo/ppo_trxl": ("--total-timesteps 2048", "agent"),
    "ppo/ppo_rnd": ("--total-timesteps 10240", "agent"),
    "pqn/pqn": ("--total-timesteps 2560", "q_network"),
    "dqn/dqn": ("--total-timesteps 1200 --learning-starts 200", "q_network"),
    "dqn/c51": ("--total-timesteps 1200 --learning-starts 200", "q_network"),
    "dqn/per_dqn": ("--total-timesteps 1200 --learning-starts 200", "q_network"),
    "actor_critic/sac_continuous_action": (CRITIC, "actor critic temperature"),
    "actor_critic/td3_continuous_action": (CRITIC, "actor critic"),
    "actor_critic/droq": ("--total-timesteps 210 --learning-starts 200 --batch-size 64", "actor critic"),
    "actor_critic/crossq": (CRITIC, "actor critic"),
    "actor_critic/tqc": (CRITIC, "actor critic"),
    "actor_critic/td7": (CRITIC, "actor critic encoder"),
    "actor_critic/simba_sac": (CRITIC, "actor critic"),
    "multi_agent/mappo": ("--total-timesteps 4096", "agent"),
    "multi_agent/qmix": ("--total-timesteps 2000", "q_network mixer"),
}
MODES = {"eager": ("0", ()), "graphs": ("1", ()), "compiled": ("0", ("--compile",)), "both": ("1", ("--compile",))}


def train(name, mode, device, out):
    """Train in this process and write the weights: first those of a training whose optimisers do nothing."""
    import numpy as np
    import torch

    flags, variables = FILES[name]
    script = ROOT / "algorithms" / f"{name}.py"
    if mode == "start":
        for kind in {torch.optim.Adam, torch.optim.AdamW, torch.optim.RAdam, torch.optim.RMSprop}:
            kind.step = lambda self, *args, **kwargs: None
    os.chdir(out)
    more = () if mode == "start" else MODES[mode][1]
    sys.argv = [str(script), *flags.split(), *more, "--device", device, "--eval-every", "0", "--save-every", "0"]
    sys.argv += ["--eval-episodes", "1", "--seed", "3", "--runs-dir", str(Path(out, mode))]
    found = runpy.run_path(str(script), run_name="__main__")
    weights = [x.detach().cpu().flatten() for v in variables.split() if v in found for x in found[v].parameters()]
    np.save(Path(out, f"{mode}.npy"), torch.cat(weights).numpy())


def measure(name, modes, device):
    """Errors of all modes next to eager, relative to the norm of what eager learned."""
    import numpy as np

    row = {"file": name}
    with tempfile.TemporaryDirectory() as out:
        for mode in ("start", *modes):
            graphs = "0" if mode == "start" else MODES[mode][0]
            environment = os.environ | {"SOLORL_GRAPHS": graphs, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--train", name, mode, device, out]
            began = time.monotonic()
            try:
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
                said, code = done.stdout + done.stderr, done.returncode
            except subprocess.TimeoutExpired as error:
                said, code = f"{error.stdout}{error.stderr}", "time-out"
            row[mode] = {"seconds": round(time.monotonic() - began, 1)}
            row[mode]["said"] = [line for line in said.splitlines() if "CUDA graph" in line]
            if code:
                row[mode]["failed"] = f"{code}: {said[-1500:]}"
        weights = {mode: np.load(path) for mode in ("start", *modes) if (path := Path(out, f"{mode}.npy")).exists()}
    if {"start", "eager"} <= weights.keys():
        learned = float(np.linalg.norm(weights["eager"] - weights["start"]))
        row["learned"] = learned
        for mode in weights.keys() - {"start"}:
            row[mode]["error"] = float(np.linalg.norm(weights[mode] - weights["eager"])) / max(learned, 1e-30)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", default=None, help="parts of names")
    parser.add_argument("--modes", nargs="+", default=["eager", "graphs", "both"], choices=MODES)
    parser.add_argument("--at-once", type=int, default=14)
    parser.add_argument("--out", type=Path, default=Path("check.json"))
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        return train(*args.train)
    names = [name for name in FILES if not args.only or any(part in name for part in args.only)]
    rows = []
    with ThreadPoolExecutor(args.at_once) as pool:
        for row in pool.map(lambda name: measure(name, args.modes, args.device), names):
            rows.append(row)
            args.out.write_text(json.dumps(rows, indent=1))
            words = [f"{mode} {row[mode].get('error', 'failed')}" for mode in args.modes]
            said = sorted({line for mode in args.modes for line in row[mode]["said"]})
            print(f"{row['file']:<38} {'; '.join(words)}", *said, sep="\n    ", flush=True)


if __name__ == "__main__":
    main()
