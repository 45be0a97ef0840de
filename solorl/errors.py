"""Mistakes of the user, said in one sentence with exit code 2 and no traceback."""

import difflib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

from solorl.terminal import paint, plain


class UsageError(Exception):
    """What was wrong, what is allowed and the nearest valid name, in one sentence."""


def refuse(wrong: object, sentence: str) -> None:
    """Raises UsageError with the sentence where something is wrong. For sentences that cost nothing and cannot fail:
    they are made in any case; and where no line below needs that mypy has seen an `if`."""
    if wrong:
        raise UsageError(sentence)


def nearest(name: str, allowed: Iterable[str], n: int = 1) -> list[str]:
    """The `n` valid names most like `name` (at least 60 % alike, letter case ignored), best first; may be empty."""
    by_lower = {choice.lower(): choice for choice in allowed}
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=n, cutoff=0.6)]


def did_you_mean(name: str, allowed: Iterable[str], n: int = 1) -> str:
    """`"; did you mean X?"` for the nearest names, or an empty string where nothing is near."""
    return f"; did you mean {' or '.join(near)}?" if (near := nearest(name, allowed, n)) else ""


def hint(name: str, allowed: Collection[str], those: str) -> str:
    """What `did_you_mean` says, or where nothing is near all there is: `; it has a, b` if `those` is "it has"."""
    return did_you_mean(name, allowed) or f"; {those} {', '.join(allowed) or 'none'}"


def quit_with(error: UsageError | str, code: int = 2) -> NoReturn:
    """Print the sentence on standard error and leave with exit code 2, that of bad input, or another one."""
    if os.environ.get("RANK", "0") not in ("0", ""):
        time.sleep(15)  # seconds: rank 0 says the same in most cases, and what has started the ranks ends the others
    prefix = "" if str(error).startswith("solo") else f"{paint('error:', 'red', sys.stderr)} "
    print(f"{prefix}{plain(str(error))}", file=sys.stderr)
    end = SystemExit(code)
    end.add_note(str(error))  # for code that runs a script and catches its end
    raise end


def reason(error: BaseException) -> str:
    """What an exception says, on one line; with the exception's name where that alone would tell too little."""
    text = " ".join(str(error).split())
    return text if isinstance(error, (ValueError, RuntimeError)) and text else f"{type(error).__name__} {text}".strip()


@contextmanager
def told(what: str, why: Callable[[BaseException], str] = reason) -> Iterator[None]:
    """Whatever is raised inside becomes a UsageError of one sentence: `what`, and `why` by the exception."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{what}: {why(error)}") from error


@contextmanager
def denied(what: str) -> Iterator[None]:
    """What the system denies inside becomes a UsageError of one sentence: `what`, and its reason."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}") from None


def fitting(what: str) -> AbstractContextManager[None]:
    """Whatever is raised inside becomes a UsageError: `what`, read from a file, does not fit. A file can be well-formed
    and wrong in more ways than can be listed, hence every exception."""
    return told(f"{what} does not fit")


_HOOK = sys.excepthook


def shown(kind: Any, error: Any, trace: Any) -> None:
    """To be `sys.excepthook`: a UsageError that nobody has caught, or that memory is not enough, as one sentence."""
    if isinstance(error, UsageError | MemoryError):
        quit_with(str(error) if isinstance(error, UsageError) else f"there is not so much memory: {error}")
    _HOOK(kind, error, trace)


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """A UsageError inside ends the program with its sentence and exit code 2."""
    try:
        yield
    except UsageError as error:
        quit_with(error)


# Module that a script or an environment may import -> our extra that brings it.
BRINGS = {
    **{name: name for name in ("jax", "envpool", "gymnax", "mujoco", "wandb", "pettingzoo", "ray")},
    **dict.fromkeys(("jaxlib", "optax", "flatbuffers"), "jax"),
    **{"Box2D": "box2d", "optuna": "tune", "ale_py": "atari", "cv2": "atari"},
    **{"mujoco.mjx": "mjx", "lbforaging": "lbf", "boto3": "aws", "s3fs": "aws", "huggingface_hub": "hub"},
    **dict.fromkeys(("mpe2", "multi_agent_ale_py"), "pettingzoo"),
    **dict.fromkeys(("pgx", "mctx"), "planning"),
    **dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "onnx"),
    **dict.fromkeys(("minari", "h5py"), "minari"),
}


def needs_extra(what: str, extra: str) -> str:
    """The sentence that recommends one of our extras."""
    note = " (which takes Gymnasium back to 1.3)" if extra == "gymnax" else ""
    return f"{what} needs an extra: pip install 'solorl[{extra}]'{note}"


def missing_extra(who: str, error: BaseException) -> str:
    """The sentence that names the extra for a module that `who` cannot import; empty where none brings it."""
    parts = (getattr(error, "name", None) or "").split(".")
    module = next((each for each in (".".join(parts[:2]), parts[0]) if each in BRINGS), "")
    if not isinstance(error, ModuleNotFoundError) or not module:
        return ""
    return f"{who} needs {module}, which is not installed: pip install 'solorl[{BRINGS[module]}]'"
