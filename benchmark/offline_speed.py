"""Gradient steps per second of TD3+BC, IQL and CQL: SoloRL and d3rlpy, the same work in turn.

    python benchmark/offline_speed.py --rounds 5 --d3rlpy PYTHON_WITH_D3RLPY

10,000 random transitions of HalfCheetah-v5, batches of 256, hidden layers of 256 units (two, CQL: three),
standardised observations, Adam, CPU, one thread; the defaults of our files, to which d3rlpy is set (see
peers/d3rlpy_offline.py). CQL draws 10 actions of each of three distributions for each observation.

Each measurement is a process of its own; the clock starts after STEPS[0] gradient steps, so that imports and
compilation are left out, and stops after STEPS[1]. A round measures every contestant once, in turn. Writes the numbers
to `--out`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import speed

ENV, PEER, TRANSITIONS = "HalfCheetah-v5", "d3rlpy", 10_000
PEER_FILE = Path(__file__).parent / "peers/d3rlpy_offline.py"
CASES = {"td3_bc": "TD3+BC", "iql": "IQL", "cql": "CQL"}
STEPS = {"td3_bc": (500, 2_000), "iql": (500, 2_000), "cql": (50, 200)}  # when the clock starts and stops


def record(folder):
    """A data set of random actions in one environment; its folder, with a single piece."""
    words = ["train", "td3_continuous_action", "--env-id", ENV, "--save-replay", "--runs-dir", folder / "runs"]
    words += ["--total-timesteps", TRANSITIONS, "--learning-starts", TRANSITIONS, "--eval-episodes", 1]
    solo(*words, "--save-every", 0, "--eval-every", 0)
    solo("dataset", "from", *(folder / "runs").iterdir(), "--out", folder / "random")
    return folder / "random"


def solo(*words):
    subprocess.run([sys.executable, "-m", "solorl.cli", *map(str, words)], check=True, capture_output=True)


def measure(name, contestant, data, python):
    before, steps = STEPS[name]
    if contestant == PEER:
        return speed.printed(python, PEER_FILE, name, data / "000000.npz", "--before", before, "--steps", steps)
    flags = ["--env-id", ENV, "--dataset", data, "--save-every", 0, "--log-every", before]
    flags += ["--compile"] if "compiled" in contestant else []
    return speed.solorl(f"offline/{name}.py", steps, before, *flags)


def table(path):
    """The measurements of a file as Markdown tables."""
    return speed.tables(path, CASES, PEER, [PEER], ", one thread.", "gradient steps/s")


def main():
    parser = speed.arguments("offline", __doc__)
    parser.add_argument("--d3rlpy", metavar="PATH", default=sys.executable, help="the Python that has d3rlpy")
    args = parser.parse_args()
    rounds = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        data = record(Path(folder))
        for _ in range(args.rounds):
            for name in CASES:
                names = (PEER, "SoloRL", "SoloRL compiled")
                rounds[name].append({each: measure(name, each, data, args.d3rlpy) for each in names})
            speed.write(args.out, rounds=rounds)  # so that an interruption loses one round
    print(table(args.out))


if __name__ == "__main__":
    main()
