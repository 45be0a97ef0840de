"""Steps per second of MAPPO and PQN-VDN in JAX on simple_spread: SoloRL and JaxMARL's baselines, the same work in turn.

    python benchmark/teams_speed.py --rounds 5 --jaxmarl PYTHON CHECKOUT

simple_spread_v3 of three agents, in JAX, inside the compiled code of both. PQN-VDN: 64 games x 32 steps, 4 epochs of
4 minibatches, two layers with layer normalisation, which multiply equally often. MAPPO: 128 games x 32 steps, 10 epochs
of 4 minibatches, two layers of 64 units for actor and critic; JaxMARL's MAPPO of this game is recurrent, so its IPPO
stands here, whose critic sees one agent instead of the whole game: less work. PYTHON and CHECKOUT (a clone of
https://github.com/FLAIROx/JaxMARL): see peers/jaxmarl_baselines.py.

Each measurement is a process of its own on the CPU; compilation is left out. A step is one of a game, with all its
agents. XLA gives JaxMARL all cores, unless told otherwise; ours gets one. A round measures every contestant once, in
turn. Writes the numbers to `--out`.
"""

from pathlib import Path

import speed

PEERS = {"JaxMARL": [], "JaxMARL, one core": ["--one-core"]}
PEER_FILE = Path(__file__).parent / "peers/jaxmarl_baselines.py"
CASES = {  # script: title, the peer's baseline, steps of an iteration, iterations before the clock starts, and all
    "mappo_jax": ("MAPPO (JaxMARL: IPPO)", "ippo", 128 * 32, 16, 48),
    "pqn_vdn_jax": ("PQN-VDN", "pqn_vdn", 64 * 32, 16, 80),
}
OURS = "SoloRL"


def measure(name, contestant, python, checkout):
    _, baseline, batch, before, iterations = CASES[name]
    if contestant in PEERS:
        return speed.printed(python, PEER_FILE, baseline, checkout, *PEERS[contestant])
    flags = ["--save-every", 0, "--log-every", before * batch]
    return speed.solorl(f"multi_agent/{name}.py", iterations * batch, before * batch, *flags)


def table(path):
    """The measurements of a file as Markdown tables."""
    titles = {name: title for name, (title, *_) in CASES.items()}
    return speed.tables(path, titles, "the best of JaxMARL", list(PEERS), "; SoloRL on one core.")


def main():
    parser = speed.arguments("teams", __doc__)
    parser.add_argument("--jaxmarl", nargs=2, metavar=("PYTHON", "CHECKOUT"), required=True)
    args = parser.parse_args()
    rounds = {name: [] for name in CASES}
    for _ in range(args.rounds):
        for name in CASES:
            rounds[name].append({each: measure(name, each, *args.jaxmarl) for each in (*PEERS, OURS)})
        speed.write(args.out, rounds=rounds)  # so that an interruption loses one round
    print(table(args.out))


if __name__ == "__main__":
    main()
