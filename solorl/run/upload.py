"""`--upload-model`: what it needs, and handing a finished run to `solo push`; other verbs called from a training."""

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from solorl.args.arguments import RunArgs
from solorl.errors import UsageError, needs_extra
from solorl.files import near
from solorl.machine import command_of
from solorl.terminal import warn


def check_upload(args: RunArgs) -> None:
    """UsageError where `--upload-model` cannot work: it is better known before the training than after it."""
    without = "--no-upload-model trains without"
    if not args.upload_model:
        return
    try:
        from huggingface_hub import get_token
    except ImportError:
        raise UsageError(f"{needs_extra('--upload-model', 'hub')}; {without}") from None
    if not args.save_model:
        raise UsageError("--upload-model needs a model: leave --no-save-model out")
    if not get_token():
        raise UsageError(f"--upload-model needs a token: run `hf auth login`, or set HF_TOKEN; {without}")


def upload(run_dir: Path, args: RunArgs, say: Callable[[str], None]) -> None:
    """Publish the run; where that fails, one warning says so, and the run is what it would be without."""
    done, said = solo("push", str(run_dir), f"{args.hf_entity}/" if args.hf_entity else "")
    if done:
        say(said)
    else:
        warn(f"the model was not uploaded: {said}; `solo push {shlex.quote(near(run_dir))}` does it later")


def solo(*words: str) -> tuple[bool, str]:
    """Call `solo`, in a process of its own, so that nothing there can harm this one. Returns whether that has
    succeeded, and the last line that it said."""
    done = subprocess.run(command_of(*words), capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode == 0, said[-1].removeprefix("error: ") if said else f"exit code {done.returncode}"
