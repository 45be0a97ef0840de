"""Steps per second on a GPU: SoloRL next to the fastest files of others, the same work. See README.md.

    python benchmark/gpu/speed.py --rows 4 1 2 --minutes 7 --peers .peers --out benchmark/results/speed

A row starts only if its minutes are left. A call's programs in torch start side by side, as many as there are cores.
Each is stopped (SIGSTOP) once it is past imports, compilation and warm-up. Then one at a time goes on alone and is
ended after about `--seconds`. A program in JAX starts when its turn has come: its loops continue on the GPU while it
is stopped, and would slow the others. Three windows of equal numbers of points "step, time" give the rates. Metrics and
statistics of episodes are on; evaluations and checkpoints are off. Every number is written at once.
"""

import argparse
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DATA = ROOT / "benchmark/results/speed/gpu.json"
PACKAGES = ("torch", "jax", "gymnasium", "mujoco", "mujoco-mjx", "gymnax", "envpool", "tensordict", "torchrl")
WINDOWS = 3


class Case(NamedTuple):
    row: str  # "1" to "6"
    title: str  # of its table
    name: str  # who does it how
    words: list  # script below algorithms/ and flags; or, for a peer, file and flags
    after: int  # steps (of one seed) before the clock starts
    priority: int = 1  # those of 1 are measured first
    seeds: int = 1
    variables: dict = {}  # noqa: RUF012
    published: str = ""
    until: int = 0  # 0, or: how many seconds from the start to this step, alone

    @property
    def in_jax(self):
        return "jax" in self.words[0]


MINUTES = {"1": 1.5, "2": 2, "3": 1, "4": 3, "5": 3, "6": 3}
PURE = ["purejax.py", "purejaxrl_ppo"]
PURE_MINATAR = ["ENV_NAME=Breakout-MinAtar", "NUM_ENVS=64", "NUM_MINIBATCHES=8", "ACTIVATION=relu", "LR=5e-3"]
MINATAR = ["--env-id", "Breakout-MinAtar", "--num-envs", 64, "--num-minibatches", 8]
PQN = ["--num-envs", 128, "--num-steps", 32, "--num-minibatches", 32, "--update-epochs", 2]
BREAKOUT = ["ppo/ppo_atari_envpool.py", "--env-id", "Breakout-v5", "--num-envs", 8]
MJX = ["--num-envs", 2048, "--num-steps", 10, "--num-minibatches", 32, "--update-epochs", 4]


def halfcheetah(name, script, after, published, *flags):
    """The cases of row 4 for one algorithm: `published` is LeanRL's, eager and compiled with graphs."""
    title = f"{name.upper()} on HalfCheetah-v5"
    ours = [script, "--env-id", "HalfCheetah-v5", *flags]
    theirs = ["--env-id", "HalfCheetah-v5", *flags[:2]]
    clean, lean = published
    return [
        Case("4", title, "SoloRL --compile, CUDA graphs", [*ours, "--compile"], after),
        Case("4", title, "LeanRL, compiled, CUDA graphs", [f"leanrl_{name}.py", *theirs, "--compile", "--cudagraphs"],
             after, published=lean),
        Case("4", title, "SoloRL, CUDA graphs", ours, after),
        Case("4", title, "LeanRL, CUDA graphs", [f"leanrl_{name}.py", *theirs, "--cudagraphs"], after),
        Case("4", title, "SoloRL", ours, after, 2, variables={"SOLORL_GRAPHS": "0"}),
        Case("4", title, "CleanRL", [f"cleanrl_{name}.py", *theirs], after, 2, published=clean),
        Case("4", title, "SoloRL --compile", [*ours, "--compile"], after, 3, variables={"SOLORL_GRAPHS": "0"}),
    ]  # fmt: skip


OFF_POLICY = ["--learning-starts", 1_000, "--log-every", 100]
CASES = [
    *halfcheetah("sac", "actor_critic/sac_continuous_action.py", 1_300, ("127", "725"), *OFF_POLICY),
    *halfcheetah("td3", "actor_critic/td3_continuous_action.py", 1_300, ("272", "936"), *OFF_POLICY),
    *halfcheetah("ppo", "ppo/ppo_continuous_action.py", 3 * 2_048, ("652", "1,774")),
    *(
        case
        for seeds, priority, calls in ((1, 1, 51_200), (2_048, 1, 10_240), (64, 2, 51_200))
        for case in (
            Case("1", f"PPO on CartPole-v1, {seeds:,} seeds", "SoloRL ppo_jax",
                 ["ppo/ppo_jax.py", "--num-seeds", seeds], 8_192, priority, seeds),
            Case("1", f"PPO on CartPole-v1, {seeds:,} seeds", "PureJaxRL", [*PURE, "--seeds", seeds, "--steps", calls],
                 0, priority, seeds, published={1: "29,000 (A40)", 2_048: "10,400,000 (A100)"}.get(seeds, "")),
        )
    ),
    Case("2", "PPO on Breakout-MinAtar", "SoloRL ppo_jax", ["ppo/ppo_jax.py", *MINATAR, "--learning-rate", 5e-3], 1),
    Case("2", "PPO on Breakout-MinAtar", "PureJaxRL", [*PURE, "--steps", 819_200, *PURE_MINATAR], 0,
         published="220,000 to 300,000 (A40)"),
    Case("2", "PPO on Breakout-MinAtar", "SoloRL ppo_minatar_jax, convolutional",
         ["ppo/ppo_minatar_jax.py", "--env-id", "Breakout-MinAtar"], 1, 2),
    Case("2", "PPO on Breakout-MinAtar, 10M steps from the start of the program", "SoloRL ppo_jax",
         ["ppo/ppo_jax.py", *MINATAR, "--learning-rate", 5e-3, "--total-timesteps", 10_000_000], 0, 1,
         published="33 to 45 (PureJaxRL, A40)", until=9_900_000),
    Case("3", "PQN on Breakout-MinAtar", "SoloRL pqn_jax",
         ["pqn/pqn_jax.py", "--env-id", "Breakout-MinAtar", *PQN, "--learning-rate", 5e-4], 1),
    Case("3", "PQN on Breakout-MinAtar", "PureJaxQL, convolutional",
         ["purejax.py", "purejaxql_pqn", "--steps", 819_200], 0, published="170,000 (A40)"),
    Case("5", "PPO on Breakout-v5", "SoloRL --compile, CUDA graphs", [*BREAKOUT, "--compile"], 3_072, published=""),
    Case("5", "PPO on Breakout-v5", "SoloRL", BREAKOUT, 3_072),
    Case("5", "PPO on Breakout-v5", "SoloRL ppo_atari_envpool_jax",
         ["ppo/ppo_atari_envpool_jax.py", *BREAKOUT[1:]], 3_072, 2),
    Case("5", "PQN on Breakout-v5", "SoloRL --compile, CUDA graphs",
         ["pqn/pqn_atari_envpool.py", "--env-id", "Breakout-v5", *PQN, "--compile"], 12_288),
    Case("6", "PPO on mjx/HalfCheetah", "SoloRL ppo_continuous_action_jax",
         ["ppo/ppo_continuous_action_jax.py", "--env-id", "mjx/HalfCheetah", *MJX], 20_480,
         published="333,000 (Brax Hopper, A40)"),
]  # fmt: skip


def chosen(rows, minutes):
    """Those rows, in their order, whose minutes are left after those before them."""
    left, found = minutes, []
    for row in rows:
        if MINUTES[row] <= left:
            left -= MINUTES[row]
            found.append(row)
    return found


def rates(points, count=WINDOWS):
    """Steps per second in `count` windows (fewer where there are fewer points) of as many points each."""
    count = min(count, len(points) - 1)
    ends = [points[i * (len(points) - 1) // count] for i in range(count + 1)] if count else []
    return [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(ends)]


def tiny(case):
    """The same with little work, to see that it runs."""
    less = {1_000: 100, 2_048: 2, 64: 2, 51_200: 1_024, 10_240: 1_024, 819_200: 1_024, 10_000_000: 20_000}
    words = [less.get(word, word) if word != 64 or case.row == "1" else word for word in case.words]
    if case.title.startswith("PPO on HalfCheetah"):
        words += ["--num-steps", 256, "--num-minibatches", 2, "--update-epochs", 1]
    after = min(case.after, 200)
    return case._replace(words=words, after=after, seeds=min(case.seeds, 2), until=min(case.until, 10_000))


class Program:
    """One case that runs in a session of its own."""

    def __init__(self, case, args):
        self.case, self.folder = case, Path(tempfile.mkdtemp())
        self.began, self.ready = time.perf_counter(), None
        variables = {"OMP_NUM_THREADS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "POINTS": self.folder / "points"}
        variables |= {"TORCHINDUCTOR_COMPILE_THREADS": "2", "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
        variables = {name: str(value) for name, value in (variables | case.variables).items()}
        self.peer = "/" not in case.words[0]
        if self.peer:
            file = HERE / case.words[0] if case.words[0] == "purejax.py" else args.peers / case.words[0]
            cpu = ["--no-cuda"] if args.device == "cpu" and file.parent != HERE else []
            words = [file, *case.words[1:], *cpu]
        else:
            words = ["-m", "solorl.cli", "train", ROOT / "algorithms" / case.words[0], "--total-timesteps", 10**9]
            words += ["--eval-every", 0, "--save-every", 0, "--runs-dir", self.folder, "--device", args.device]
            words += case.words[1:]
        self.words = [sys.executable, *map(str, words)]
        self.output = self.folder / "output"
        self.process = subprocess.Popen(
            self.words, env=os.environ | variables, start_new_session=True, stdout=self.output.open("wb"),
            stderr=subprocess.STDOUT, cwd=args.peers if self.peer else ROOT,
        )  # fmt: skip

    def points(self):
        """Steps and times so far. The clock of ours starts with the training: only differences count."""
        if self.peer:
            files = [self.folder / "points"]
        else:
            files = sorted(self.folder.glob("*/metrics.jsonl"), key=lambda file: file.parent.name)[:1]
        lines = files[0].read_text().splitlines(keepends=True) if files and files[0].exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        if self.peer:
            return [tuple(row) for row in rows]
        return [(row["global_step"], row["wall_time"]) for row in rows if "charts/SPS" in row]

    def signal(self, number):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self):
        self.signal(signal.SIGKILL)
        self.process.wait()

    def is_ready(self):
        """Past the warm-up; stops it then."""
        points = self.points()
        if self.ready is None and points and points[-1][0] >= self.case.after:
            self.signal(signal.SIGSTOP)
            self.ready = round(time.perf_counter() - self.began, 1)
        return self.ready is not None

    def tail(self):
        return self.output.read_text(errors="replace")[-1500:].splitlines()[-12:]

    def measure(self, seconds, most):
        """Its points while it goes on alone, at least those of three windows; at most for `most` seconds."""
        stood = len(self.points())
        self.signal(signal.SIGCONT)
        began = time.perf_counter()
        points = []
        while time.perf_counter() - began < most and self.process.poll() is None:
            time.sleep(0.2)
            points = self.points()[stood:]
            if len(points) > WINDOWS and points[-1][1] - points[0][1] >= seconds:
                break
        return points


def entry(case, **found):
    """What is written about a case."""
    return {"row": case.row, "title": case.title, "name": case.name, "published": case.published, **found}


def warm_up(cases, args, limit, side_by_side):
    """Start programs, so many at a time, until each is ready, has ended, or has had `limit` seconds."""
    waiting, running, ended = list(cases), [], []
    try:
        while waiting or running:
            while waiting and len(running) < side_by_side:
                running.append(Program(waiting.pop(0), args))
            time.sleep(0.1)
            for program in list(running):
                late = time.perf_counter() - program.began > limit
                if program.is_ready() or program.process.poll() is not None or late:
                    running.remove(program)
                    ended.append(program)
                    if program.ready is None:
                        program.end()
    except BaseException:
        for program in (*running, *ended):
            program.end()
        raise
    return ended


def whole(case, args, most):
    """Seconds from the start of a program to the step `until`, alone."""
    program = Program(case, args)
    try:
        while time.perf_counter() - program.began < most and program.process.poll() is None:
            time.sleep(0.1)
            points = program.points()
            if points and points[-1][0] >= case.until:
                return entry(case, seconds=round(time.perf_counter() - program.began, 1), steps=points[-1][0])
        return entry(case, error=f"not there after {most:.0f} seconds", tail=program.tail())
    finally:
        program.end()


def measure(cases, args, say):
    """All cases; calls `say` with each entry as soon as it is there."""
    deadline = time.perf_counter() + 60 * args.minutes
    together = [case for case in cases if not case.until and not case.in_jax]
    programs = warm_up(together, args, args.warm_up, args.side_by_side)
    try:
        for case in cases:
            left = deadline - time.perf_counter()
            if left < 2 * args.seconds:
                say(entry(case, error="no time was left"))
            elif case.until:
                say(whole(case, args, min(left, 90)))
            else:
                if case.in_jax:
                    programs += warm_up([case], args, min(args.warm_up, left), 1)
                [program] = [each for each in programs if each.case is case]
                if program.ready is None:
                    how = f"not ready in {args.warm_up:.0f} seconds, or ended (code {program.process.returncode})"
                    say(entry(case, error=how, tail=program.tail()))
                    continue
                points = program.measure(args.seconds, min(left, 3 * args.seconds))
                found = [round(case.seeds * rate, 1) for rate in rates(points)]
                tail = {} if found else {"error": "no window was measured", "tail": program.tail()}
                middle = statistics.median(found) if found else None
                say(entry(case, rate=middle, windows=found, ready=program.ready, words=program.words[1:], **tail))
                program.end()
    finally:
        for program in programs:
            program.end()


def about(args):
    """When, where and with what."""
    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        gpu = subprocess.check_output(words, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        gpu = ""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    commits = args.peers / "COMMITS"
    return {
        "date": time.strftime("%Y-%m-%d"), "gpu": gpu, "query": query, "python": platform.python_version(),
        "versions": found, "cores": os.cpu_count(), "threads": 1, "device": args.device,
        "peers": commits.read_text().splitlines() if commits.exists() else [],
    }  # fmt: skip


def table(path=DATA):
    """The measurements of all calls as Markdown: a table for each title."""
    lines, places = [], []
    for call in json.loads(Path(path).read_text()):
        places.append(f"{call['date']}: {call['gpu'].partition(',')[0] or call['device']}, {call['cores']} cores, ")
        places[-1] += ", ".join(f"{name} {number}" for name, number in call["versions"].items())
        lines += [f"*{call['note']}*", ""] if call.get("note") else []
        for title in dict.fromkeys(case["title"] for case in call["cases"]):
            cases = [case for case in call["cases"] if case["title"] == title]
            peers = [case["rate"] for case in cases if case.get("rate") and not case["name"].startswith("SoloRL")]
            unit = "seconds" if any("seconds" in case for case in cases) else "steps/s, median"
            shown = title.replace(", 1 seeds", ", 1 seed")
            head = f"| {shown} | {unit} | range | ratio to the fastest other | published |"
            lines += [head, "|---|---:|---:|---:|---:|"]
            for case in cases:
                rate, windows = case.get("rate"), case.get("windows")
                number = f"{rate:,.0f}" if rate else str(case.get("seconds", "not measured"))
                span = f"{min(windows):,.0f} to {max(windows):,.0f}" if windows else ""
                ratio = f"{rate / max(peers):.2f}" if rate and peers else ""
                lines.append(f"| {case['name']} | {number} | {span} | {ratio} | {case['published']} |")
            lines.append("")
    return "\n".join([*lines, "\n\n".join(dict.fromkeys(places))])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=["4", "1", "2"], choices=MINUTES)
    parser.add_argument("--minutes", type=float, default=7)
    parser.add_argument("--seconds", type=float, default=10, help="of one measurement")
    parser.add_argument("--warm-up", type=float, default=110, help="seconds that a program has to be ready")
    parser.add_argument("--side-by-side", type=int, default=os.cpu_count(), help="programs in the warm-up")
    parser.add_argument("--names", nargs="*", default=[], help="only cases in whose names one of these words is")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT", "."), help="folder for gpu.json")
    parser.add_argument("--smoke", action="store_true", help="each case for a second, a few seeds, rows always begin")
    parser.add_argument("--add", type=Path, metavar="FILE", help=f"add what another call wrote to {DATA.name} here")
    args = parser.parse_args()
    args.peers = args.peers.resolve()
    if args.add:
        calls = json.loads(DATA.read_text()) if DATA.exists() else []
        DATA.write_text(json.dumps(calls + json.loads(args.add.read_text()), indent=1) + "\n")
        return
    rows = args.rows if args.smoke else chosen(args.rows, args.minutes)
    cases = [case for row in rows for case in CASES if case.row == row]
    cases = [case for case in cases if not args.names or any(word in case.name for word in args.names)]
    cases = sorted(cases, key=lambda case: case.priority)
    if args.smoke:
        cases, args.seconds = [tiny(case) for case in cases], 2
    call = about(args) | {"left out": [row for row in args.rows if row not in rows], "cases": []}
    args.out = Path(args.out)
    args.out.mkdir(parents=True, exist_ok=True)

    def say(found):
        call["cases"].append(found)
        (args.out / "gpu.json").write_text(json.dumps([call], indent=1) + "\n")
        value = found.get("rate") or found.get("seconds") or [found["error"], *found.get("tail", [])[-3:]]
        print(found["title"], "|", found["name"], "|", value, flush=True)

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # 2,048 seeds write as many files
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the programs, too
    measure(cases, args, say)
    print(table(args.out / "gpu.json"))


if __name__ == "__main__":
    main()
