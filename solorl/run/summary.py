"""What is said when a run ends: where everything is, and the commands to continue and to play."""

import shlex
import shutil
import sys
from pathlib import Path

from solorl.files import near
from solorl.runfolder import MODEL, PICTURE
from solorl.scripts import as_typed
from solorl.terminal import duration, paint


def how_to_go_on(script: Path, run_dir: Path, world_size: int = 1) -> str:
    """The command that resumes a run with this number of ranks, as it can be typed here."""
    ranks = f" --nproc {world_size}" if world_size > 1 else ""
    return f"continue with: {_solo()} train {as_typed(script)} --resume {shlex.quote(near(run_dir))}{ranks}"


def summary(run_dir: Path, step: int, seconds: float, evaluation: str, save_model: bool) -> list[str]:
    """Lines that say how the training went and where its curve, video and model are."""
    videos = sorted((run_dir / "videos").glob("*.mp4"), key=lambda path: path.stat().st_mtime)
    curve, model = run_dir / PICTURE, run_dir / MODEL
    facts = {
        "trained": f"{step:,} steps in {duration(seconds)}",
        "evaluation": evaluation,
        "curve": near(curve) if curve.exists() else "none",
        "video": near(videos[-1]) if videos else "none (--capture-video)",
        "model": near(model) if model.exists() else "none" if save_model else "none (--save-model)",
    }
    if model.exists():
        facts["play it"] = f"{_solo()} play {shlex.quote(near(run_dir))}"
    return ["", *(f"{paint(f'{name:<11}', 'bold')} {value}" for name, value in facts.items())]


def _solo() -> str:
    """The command `solo` as it can be typed here, be it on the PATH or only next to the running Python."""
    own = Path(sys.executable).parent / "solo"
    if shutil.which("solo") or not own.exists():
        return "solo"
    return shlex.quote(near(own))
