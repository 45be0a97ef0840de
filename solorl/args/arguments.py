"""The arguments every script shares, from the command line or from a run folder."""

import sys
from argparse import ArgumentError
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, TypeVar

from solorl.args.command_line import check_ranges, given_arguments
from solorl.envs.ids import check_env_id_of, reward_threshold
from solorl.errors import UsageError, fitting, quit_with, refuse, shown
from solorl.files import missing
from solorl.machine import without_screen
from solorl.runfolder import CONFIG, as_written, config_of, refuse_old
from solorl.terminal import warn
from solorl.trust import HOW, refuse_links, was_started

ONCE = ("resume", "resume_changed", "trust_script")  # what is said holds for this command, whatever a run folder says
# What writes elsewhere, publishes, connects or multiplies: a run folder that was not started here cannot set it.
ELSEWHERE = ("runs_dir", "async_envs", "threads", "track", "wandb_project_name", "wandb_entity", "upload_model",
             "hf_entity")  # fmt: skip
Auto = Literal["auto"]  # `parse` puts a number in its place


@dataclass
class RunArgs:
    """What the run library needs to know; a script's `Args` inherits it. Nothing here can change a learning curve
    except `seed` and the device it runs on."""

    env_kind = "gymnasium"  # what --env-id can be, one of solorl.envs.ids.KINDS; not a field, so it is not an option

    exp_name: str = ""  # name of the experiment; empty: the script's name
    seed: int = 1  # seed of Python, NumPy, torch, JAX and the environments, from 0 to 2147483647
    device: str = "auto"  # auto (CUDA where there is one, else the CPU) | cpu | cuda | cuda:1 | mps
    torch_deterministic: bool = True  # ask torch for deterministic algorithms
    async_envs: bool = False  # a process for each environment
    threads: int = 1  # CPU threads for torch, or per seed for XLA; 1 is best for small networks or on a busy machine
    fast: bool = True  # speed-ups that change results only by rounding; --no-fast is plain PyTorch
    compile: bool = False  # compile the marked functions (seconds to minutes at the start, faster after)
    runs_dir: str = "runs"  # where run folders are made
    resume: str = ""  # run folder to continue; its arguments are the defaults
    resume_changed: bool = False  # continue although hyper-parameters differ from those of the run folder
    log_every: int = 500  # environment steps between rows of metrics, at least; 0: only at the end
    save_every: int = 50_000  # environment steps between checkpoints; 0: only at the end
    save_replay: bool = False  # checkpoints hold the replay buffer, so that off-policy runs resume exactly
    save_model: bool = True  # write model.safetensors (best evaluation) and model_last.safetensors
    eval_every: int = 25_000  # environment steps between evaluations; 0: only at the end
    eval_episodes: int = 20  # episodes of one evaluation, on environments and seeds of their own
    eval_more: bool = False  # as many episodes again where an evaluation is the best so far or reaches the target
    target_return: float | Auto | None = None  # evaluation return to end at (auto: the environment's); may be negative
    capture_video: bool = False  # film one greedy episode with every evaluation
    plot: bool = False  # draw curve.png in the run folder with every evaluation, as `solo plot` does
    track: bool = False  # also log to Weights & Biases (pip install 'solorl[wandb]')
    wandb_project_name: str = "solorl"  # project at Weights & Biases
    wandb_entity: str | None = None  # team at Weights & Biases
    upload_model: bool = False  # publish the run on the Hugging Face hub when it has ended (pip install 'solorl[hub]')
    hf_entity: str | None = None  # user or organisation at the hub; None: the owner of the token


A = TypeVar("A", bound=RunArgs)


def parse(args_type: type[A]) -> A:
    """Read the command line into `args_type`. With `--resume RUN_DIR` the run's arguments are the defaults.

    Prints one sentence and exits with code 2 for an unknown option, a value of the wrong type, a number outside its
    range (see command_line.py), an unknown environment, or a run folder that does not fit.
    """
    without_screen()
    try:
        given = given_arguments(args_type, sys.argv[1:])
        folder = given.get("resume")
        saved = saved_arguments(Path(folder), args_type) if folder else args_type()
        foreign = Path(folder) / CONFIG if folder and HOW.get() is None else None
        left_out = _refuse_elsewhere(saved, foreign, given) if foreign else []
        args = replace(saved, **given)
        if hasattr(args, "env_id"):  # what the environment is comes before what the numbers are
            check_env_id_of(script_path(), args.env_id, args.env_kind, typed=not folder or "env_id" in given)
        if "/" in given.get("exp_name", ""):
            raise UsageError(f"--exp-name is part of a folder's name, so it must have no slash, got '{args.exp_name}'")
        if args.target_return == "auto":
            args.target_return = reward_threshold(str(getattr(args, "env_id", "the environment")))
        check_ranges(args)
        refuse(args.seed + getattr(args, "num_seeds", 1) > 2**31, "the last of --num-seeds must be at most 2147483647")
        if folder:
            check_unchanged(args, saved)
        first, last = getattr(args, "learning_starts", -1), getattr(args, "total_timesteps", 0)
        if first >= last:
            warn(f"nothing will be learned: --learning-starts {first} is not less than --total-timesteps {last}")
    except (UsageError, ArgumentError) as error:
        quit_with(str(error))
    if left_out:
        warn(f"{folder} was not started here, so this does not count unless it is typed: {', '.join(left_out)}")
    sys.excepthook = shown
    return args


def saved_arguments(folder: Path, args_type: type[A]) -> A:
    """The arguments of the run in `folder`, which must be a run of the script that asks. Where the folder says the same
    as the script's default, that is taken as it is: JSON has no tuples, paths or classes."""
    if not folder.is_dir():
        raise missing("run folder", folder)
    refuse_links(folder)
    if not {"script", "args"} <= (config := config_of(folder)).keys():
        raise UsageError(f"{folder} is not a run folder: its {CONFIG} cannot be read")
    if config["script"] != script_path().name:
        raise UsageError(f"{folder} is a run of {config['script']}, not of {script_path().name}")
    if HOW.get() is None:  # it is to be trained, not played
        refuse_old(folder)
    known = {name: default for name, default in as_written(args_type()).items() if name not in ONCE}
    with fitting(str(folder / CONFIG)):
        return args_type(**{k: value for k, value in config["args"].items() if k in known and value != known[k]})


def _refuse_elsewhere(saved: RunArgs, config: Path, given: Collection[str]) -> list[str]:
    """Leave out of the arguments of a run folder that was not started here what reaches out of it; what of that has an
    effect and is not `given` again."""
    out = [name for name in ELSEWHERE if getattr(saved, name) != getattr(RunArgs, name) and not was_started(config)]
    named = [f"--{name.replace('_', '-')} {getattr(saved, name)}" for name in out if name not in {*given, "runs_dir"}]
    vars(saved).update({name: getattr(RunArgs, name) for name in out})
    return [flag.removesuffix(" True") for flag in named]  # a switch takes no value


def script_path() -> Path:
    """The file that runs as the program."""
    return Path(getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0])


def check_unchanged(args: RunArgs, saved: RunArgs) -> None:
    """Refuse to resume with other hyper-parameters, unless told to; lists them."""
    shared = {field.name for field in fields(RunArgs)} - {"seed"} | {"num_seeds", *ONCE}
    changed = [
        f"--{field.name.replace('_', '-')} {getattr(saved, field.name)} -> {getattr(args, field.name)}"
        for field in fields(args)
        if field.name not in shared and getattr(args, field.name) != getattr(saved, field.name)
    ]
    if changed and not args.resume_changed:
        raise UsageError(f"the run was started with other arguments ({', '.join(changed)}); --resume-changed allows it")
