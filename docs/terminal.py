"""Makes docs/terminal.svg and docs/learning_curve.png from a real run of what `make train` runs.

python docs/terminal.py
"""

import contextlib
import os
import pty
import re
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).resolve().parent
COMMAND = "solo train ppo --env-id CartPole-v1 --target-return 500 --capture-video"


def in_a_terminal(words, folder):
    """Run a command in a pseudo-terminal of 100 columns and return what it printed."""
    data = bytearray()

    def read(terminal):
        part = os.read(terminal, 65536)
        data.extend(part)
        return part

    for name in ("NO_COLOR", "FORCE_COLOR"):
        os.environ.pop(name, None)
    os.environ |= {"COLUMNS": "100", "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
    with contextlib.chdir(folder):
        if pty.spawn(words, read):
            raise SystemExit(data.decode())
    return data.decode()


def screen(text):
    """The lines as they stand at the end, with their colours; of the progress line its last state before each
    evaluation."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        states = [state for state in line.split("\r\x1b[K") if state.strip()]
        lines += states[-2:] if len(states) > 1 else states
        lines += [""] if not states else []
    return [re.sub(r"\x1b\[[0-9;]*[A-Za-ln-z]", "", line) for line in lines]  # all control sequences but colours


def main():
    """Train, and write the two pictures."""
    with tempfile.TemporaryDirectory() as folder:
        out = in_a_terminal([sys.executable, "-m", "solorl.cli", *COMMAND.split()[1:]], folder)
        shutil.copy(next(Path(folder).glob("runs/*")) / "learning_curve.png", DOCS / "learning_curve.png")
    lines = [line.replace(str(Path(sys.executable).parent) + "/", "") for line in screen(out)]
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text(f"$ {COMMAND}", style="bold"))
    for line in lines:
        console.print(Text.from_ansi(line))
    svg = console.export_svg(title="SoloRL", clear=False)
    (DOCS / "terminal.svg").write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S))


if __name__ == "__main__":
    main()
