"""The arguments every script shares, and reading the command line with errors a person can act on."""

import contextlib
import dataclasses
import inspect
import io
import json
import math
import re
import sys
import textwrap
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from solorl.envs.ids import check_env_id, check_envpool_id
from solorl.errors import UsageError, did_you_mean, quit_with
from solorl.run import memory
from solorl.run.safety import refuse_links
from solorl.terminal import warn

# What a number may be, where its default does not tell (see check_values).
SHARES = {"gamma", "gae_lambda", "tau", "start_e", "end_e", "exploration_fraction"}
MAY_BE_0 = {"learning_starts"}
MAY_BE_INFINITE = {"max_grad_norm", "noise_clip"}
MAY_BE_NEGATIVE = {"target_return", "v_min", "v_max"}
# Types of fields -> those of their values in JSON.
KINDS: dict[Any, tuple[type, ...]] = {kind: (kind,) for kind in (int, bool, str, type(None))} | {float: (int, float)}


@dataclass
class RunArgs:
    """What the run library needs to know; a script's `Args` inherits it. Nothing here can change a learning curve
    except `seed` and the device it runs on."""

    exp_name: str = ""  # name of the experiment; empty: the script's name
    seed: int = 1  # seed of Python, NumPy, torch, JAX and the environments
    device: str = "auto"  # auto (CUDA where there is one, else the CPU) | cpu | cuda | cuda:1 | mps
    cuda: bool = True  # --no-cuda keeps `--device auto` on the CPU
    torch_deterministic: bool = True  # ask torch for deterministic algorithms
    threads: int = 1  # CPU threads for torch, or per seed for XLA; 1 is best for small networks or on a busy machine
    fast: bool = True  # speed-ups that change results only by rounding; --no-fast is plain PyTorch
    compile: bool = False  # compile the marked functions (seconds to minutes at the start, faster after)
    runs_dir: str = "runs"  # where run folders are made
    resume: str = ""  # run folder to go on with; its arguments are the defaults
    resume_changed: bool = False  # go on although hyper-parameters differ from those of the run folder
    log_every: int = 500  # environment steps between rows of metrics, at least
    save_every: int = 50_000  # environment steps between checkpoints; 0: only at the end
    save_replay: bool = False  # checkpoints hold the replay buffer, so that off-policy runs resume exactly
    save_model: bool = True  # write model.safetensors (best evaluation) and model_last.safetensors
    eval_every: int = 25_000  # environment steps between evaluations; 0: only at the end
    eval_episodes: int = 20  # episodes of one evaluation, on environments and seeds of their own
    target_return: float | None = None  # end once the mean evaluation return reaches this, confirmed on fresh seeds
    capture_video: bool = False  # film one greedy episode with every evaluation
    track: bool = False  # also log to Weights & Biases (pip install 'solorl[wandb]')
    wandb_project_name: str = "solorl"  # project at Weights & Biases
    wandb_entity: str | None = None  # team at Weights & Biases


A = TypeVar("A", bound=RunArgs)


def parse(args_type: type[A]) -> A:
    """Read the command line into `args_type`. With `--resume RUN_DIR` the run's arguments are the defaults.

    Prints one sentence and exits with code 2 for an unknown option, a value of the wrong type, a size that is not
    positive, an unknown environment, or a run folder that does not fit.
    """
    try:
        argv = sys.argv[1:]
        if "--help" in argv or "-h" in argv:
            print(help_text(args_type))
            raise SystemExit(0)
        folder = _option(argv, "--resume")
        saved = saved_arguments(Path(folder), args_type) if folder else args_type()
        args = _tyro(args_type, saved, argv)
        check_values(args)
        if folder:
            check_unchanged(args, saved)
        if "solorl.envs.envpool" in sys.modules:  # the script has imported EnvPoolVectorEnv
            check_envpool_id(args.env_id)  # type: ignore[attr-defined]
        elif hasattr(args, "env_id"):
            check_env_id(args.env_id)
        first, last = getattr(args, "learning_starts", -1), getattr(args, "total_timesteps", 0)
        if first >= last:
            warn(f"nothing will be learned: --learning-starts {first} is not less than --total-timesteps {last}")
    except UsageError as error:
        quit_with(error)
    memory.explain(args)
    return args


def _option(argv: list[str], name: str) -> str | None:
    """The value of `name` in a command line, written with a space or with `=`."""
    value = None
    for i, word in enumerate(argv):
        if word == name and i + 1 < len(argv):
            value = argv[i + 1]
        if word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value  # the last one, as with every flag


def _tyro(args_type: type[A], default: A, argv: list[str]) -> A:
    """tyro's parser, its error boxes turned into one sentence."""
    import tyro

    flags = _flags(args_type)
    for word in argv:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name not in flags and name != "--help":
            raise UsageError(f"unknown option {name}{did_you_mean(name, flags)} (--help lists all)")
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(args_type, default=default, args=argv)
    except SystemExit as exit:
        if not exit.code:
            raise
    text = " ".join(re.sub(r"[╭╮╰╯│─]+|-{5,}", " ", box.getvalue()).split())
    text = re.split(r"Argument helptext:|For full helptext|Perhaps you meant", text)[0].strip()
    text = re.sub(r"^(Value error|Missing argument|Unrecognized options|Parsing error)\s+", "", text)
    text = re.sub(
        r"^Error parsing (\S+): invalid literal for (\w+)\(\) with base 10: (.*)$", r"\1 is \3, not an \2", text
    )
    raise UsageError(text or f"cannot read the command line {' '.join(argv)}")


def _flags(args_type: type[RunArgs]) -> list[str]:
    flags = []
    for field in dataclasses.fields(args_type):
        name = field.name.replace("_", "-")
        flags += [f"--{name}", f"--no-{name}"] if isinstance(field.default, bool) else [f"--{name}"]
    return flags


def help_text(args_type: type[RunArgs]) -> str:
    """What `--help` prints: the script's header, its own options, then those every script has; each with its
    default and the comment after its field."""
    own: list[str] = []
    shared: list[str] = []
    names = {field.name for field in dataclasses.fields(RunArgs)}
    comments = _comments(RunArgs) | _comments(args_type)
    for field in dataclasses.fields(args_type):
        flag = "--" + field.name.replace("_", "-")
        flag += f", --no-{flag[2:]}" if isinstance(field.default, bool) else ""
        default = "" if field.default in (None, "") else f" [{field.default}]"
        text = textwrap.fill(comments.get(field.name, "") + default, 88, subsequent_indent=" " * 32)
        lead = f"  {flag:<28}  " if len(flag) <= 28 else f"  {flag}\n{'':32}"
        (shared if field.name in names else own).append(lead + text)
    header = (sys.modules["__main__"].__doc__ or "").strip()
    return "\n".join([header, "", f"options of {script_path().stem}:", *own, "", "options of every run:", *shared])


def _comments(cls: type) -> dict[str, str]:
    """The comment on the line of each field."""
    lines = inspect.getsource(cls).splitlines()
    matches = (re.match(r"    (\w+): .*?  # (.*)", line) for line in lines)
    return {match[1]: match[2] for match in matches if match}


def saved_arguments(folder: Path, args_type: type[A]) -> A:
    """The arguments of the run in `folder`, which must be a run of the script that asks."""
    file = folder / "config.json"
    if not folder.is_dir():
        raise UsageError(f"there is no run folder {folder}{did_you_mean(folder.name, _siblings(folder))}")
    refuse_links(folder)
    try:
        config = json.loads(file.read_text())
        script, saved, changes = config["script"], config["args"], config.get("changes", [])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{folder} is no run folder: its config.json cannot be read") from error
    if not isinstance(saved, dict) or not isinstance(changes, list):
        raise UsageError(f"{file} is malformed: args must be an object and changes a list")
    if script != script_path().name:
        raise UsageError(f"{folder} is a run of {script}, not of {script_path().name}")
    hints = typing.get_type_hints(args_type)
    known = {field.name: field for field in dataclasses.fields(args_type) if field.name in saved}
    for name, field in known.items():
        if not _is_of(saved[name], hints[name]) and repr(saved[name]) != repr(field.default):
            kind = getattr(hints[name], "__name__", hints[name])
            raise UsageError(f"{file} says --{name.replace('_', '-')} {saved[name]!r:.80}, which is no {kind}")
    return args_type(**{name: saved[name] for name in known})


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value from JSON is of the type of a field; of other types than the plain ones any value is."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return any(type(value) in KINDS.get(kind, (type(value),)) for kind in kinds)


def _siblings(folder: Path) -> list[str]:
    return [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []


def script_path() -> Path:
    """The file that runs as the program."""
    return Path(getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0])


def check_values(args: RunArgs) -> None:
    """Refuse numbers outside their range: a script's integer with a positive default is a size and must be at least
    1, those in SHARES lie between 0 and 1, every other number must be finite and not negative unless its default is."""
    shared = {field.name for field in dataclasses.fields(RunArgs)}
    for field in dataclasses.fields(args):
        value, default, name = getattr(args, field.name), field.default, field.name
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        flag, positive = "--" + name.replace("_", "-"), isinstance(default, int) and default > 0
        least = 1 if (positive and name not in shared | MAY_BE_0) or name in ("eval_episodes", "threads") else 0
        signed = name in MAY_BE_NEGATIVE or (isinstance(default, (int, float)) and default < 0)
        if isinstance(value, int) and value >= 2**63:
            raise UsageError(f"{flag} is too large: it must be smaller than 2**63")
        if math.isnan(value) or (math.isinf(value) and name not in MAY_BE_INFINITE):
            raise UsageError(f"{flag} is {value}, but must be a finite number")
        if value < least and not signed:
            raise UsageError(f"{flag} is {value}, but must be at least {least}")
        if value > 1 and name in SHARES:
            raise UsageError(f"{flag} is {value}, but must be at most 1")
        if name == "seed" and value >= 2**31:
            raise UsageError(f"--seed is {value}, but must be smaller than 2**31")


def check_unchanged(args: RunArgs, saved: RunArgs) -> None:
    """Refuse to resume with other hyper-parameters, unless told to; lists them."""
    shared = {field.name for field in dataclasses.fields(RunArgs)} - {"seed"} | {"num_seeds"}
    changed = [
        f"--{field.name.replace('_', '-')} {getattr(saved, field.name)} -> {getattr(args, field.name)}"
        for field in dataclasses.fields(args)
        if field.name not in shared and getattr(args, field.name) != getattr(saved, field.name)
    ]
    if changed and not args.resume_changed:
        raise UsageError(f"the run was started with other arguments ({', '.join(changed)}); --resume-changed allows it")
