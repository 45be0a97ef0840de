"""Where the time of a script goes: samples the running line and adds up the phases that the script's comments name.

    python benchmark/phases.py algorithms/ppo/ppo.py --total-timesteps 100000 --eval-every 0

A timer interrupts the program a thousand times per second of its own CPU time. A sample inside an environment counts as
"environment", every other one as the phase (`# ---- 1. act` and so on) above the script's running line.
"""

import json
import re
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path

PHASE = re.compile(r"\s*# ---- (\d+\. )?([a-z ]+)")


def phase_of_line(script):
    """For each line of the script the phase it belongs to; functions above the main block belong to their caller."""
    phase, phases = "setup", [""]
    for line in Path(script).read_text().splitlines():
        match = PHASE.match(line)
        if match:  # those of the loop have numbers
            phase = match[2].strip() if match[1] else "setup"
        phases.append(phase)
    return phases


def sample(script, flags):
    """Run `script` with `flags` and return the share of CPU time of each phase of its loop, adding up to 1."""
    phases, counts = phase_of_line(script), Counter()

    def tick(number, frame):
        environment = False
        while frame is not None:
            if frame.f_code.co_filename == script and frame.f_code.co_name == "<module>":
                counts["environment" if environment else phases[frame.f_lineno or 0]] += 1
                return
            environment = environment or "/gymnasium/" in frame.f_code.co_filename
            frame = frame.f_back

    signal.signal(signal.SIGPROF, tick)
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    sys.argv = [script, *flags]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    loop = {phase: n for phase, n in counts.items() if phase not in ("", "setup")}
    total = sum(loop.values())
    return {phase: n / total for phase, n in sorted(loop.items(), key=lambda item: -item[1])}


if __name__ == "__main__":
    shares = sample(sys.argv[1], sys.argv[2:])
    print(json.dumps({phase: round(share, 3) for phase, share in shares.items()}))
