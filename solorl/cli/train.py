"""usage: solo train NAME_OR_PATH [flags...] [--nproc N]

Runs the file of an algorithm, as `python FILE flags...` does. All flags go to the file:

  solo train ppo --env-id CartPole-v1 --seed 2
  solo train ppo --help          the flags of ppo
  solo train my_ppo.py           any file of your own

  --nproc N   train in N processes of this machine (ranks), each with its part of the environments; for files that say
              so, as ppo_atari_multigpu. On several machines: torchrun FILE flags...
"""

import ast
import os
import socket
import subprocess
import sys
import time
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from solorl import signals
from solorl.args.command_line import check_ranges, given_arguments
from solorl.catalog.header import find_path, parse_source
from solorl.errors import UsageError, refuse
from solorl.machine import command_of, dying_with_parent

LEFT = 3.0  # seconds in which the other ranks end by themselves where one has failed


def main(argv: Sequence[str]) -> int:
    """Run the algorithm `argv[0]`; UsageError if there is no such name or file."""
    refuse(not argv, "solo train needs an algorithm, such as `solo train ppo`; `solo list` shows all")
    if argv[0] in ("-h", "--help"):
        print((__doc__ or "").rstrip())
        return 0
    if argv[0].startswith("-"):
        raise UsageError("solo train: the algorithm comes first, then its flags, as in `solo train ppo --seed 2`")
    path, (count, flags) = find_path(argv[0]), _processes(argv[1:])
    check_flags(path, flags)
    if count > 1:
        return train_together(path, flags, count)
    from solorl.run.load import run_script  # here: it loads torch

    run_script(path, flags)
    return 0


def check_flags(path: Path, flags: Sequence[str]) -> None:
    """Print the help of a file, or refuse its flags, as the file would, but at once: before anything that it imports.
    UsageError."""
    args_type = args_of(path)
    if args_type is None:  # the file itself does it
        return
    try:
        given = given_arguments(args_type, list(flags))
        check_ranges(args_type(**given))
    except ArgumentError as error:
        raise UsageError(str(error)) from None
    finally:
        del sys.modules[args_type.__module__]


def args_of(path: Path) -> Any:
    """The class Args of a file, made from its text alone, in a module of its own; None where it needs more than the
    dataclasses and types of the standard library and RunArgs, or has methods."""
    from solorl.args.arguments import RunArgs

    tree = parse_source(path)
    module = ModuleType(f"{path.stem}.Args", ast.get_docstring(tree, clean=False))
    module.__file__ = str(path.resolve())
    vars(module)["RunArgs"] = RunArgs
    imports = [
        x for x in tree.body if isinstance(x, ast.ImportFrom) and x.module in ("__future__", "dataclasses", "typing")
    ]
    classes = [x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == "Args"]
    if len(classes) != 1 or any(isinstance(x, ast.FunctionDef) for x in classes[0].body):
        return None
    sys.modules[module.__name__] = module
    try:
        exec(compile(ast.Module([*imports, *classes], []), str(path), "exec"), vars(module))
        if issubclass(module.Args, RunArgs):
            return module.Args
    except Exception:  # whatever the class needs of the rest of the file
        pass
    del sys.modules[module.__name__]
    return None


def _processes(flags: Sequence[str]) -> tuple[int, list[str]]:
    """The number after `--nproc`, 1 without it, and the other flags. UsageError where it is not a valid number."""
    count, others, words = "1", [], iter(flags)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--nproc":
            count = value if equals else next(words, "")
        else:
            others.append(word)
    if not count.isdecimal() or not 1 <= int(count) <= 1024:
        raise UsageError(f"solo train: --nproc must be a number of processes from 1 to 1024, not {count!r}")
    return int(count), others


def train_together(path: Path, flags: Sequence[str], count: int) -> int:
    """Run a file in `count` processes that train together; returns the exit code of rank 0, or else of one that has
    failed. A signal goes to all of them."""
    refuse("WORLD_SIZE" in os.environ, "solo train: --nproc starts the processes itself; leave it out below torchrun")
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: Any) -> None:
        for rank in ranks:
            rank.send_signal(number)

    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(count)}
    try:
        signals.listen(pass_on, signals.listened())
        for rank in range(count):
            own = os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            words = [*dying_with_parent(), *command_of("train", path, *flags)]
            # Ctrl+C reaches them through us only
            ranks.append(subprocess.Popen(words, env=own, process_group=0))
        return _wait(ranks)
    finally:
        for each in ranks:
            each.kill()


def _wait(ranks: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Wait for the end of rank 0, or a little longer than that of any that fails."""
    failed = 0.0
    while any(rank.poll() is None for rank in ranks):
        if not failed and any(rank.poll() for rank in ranks):
            failed = time.monotonic()
        if failed and time.monotonic() > failed + LEFT:
            break
        time.sleep(0.05)
    number, code = next(((i, rank.returncode) for i, rank in enumerate(ranks) if rank.returncode), (0, 0))
    if code < 0:
        said = f"error: rank {number} was killed by signal {-code}; --resume continues from the last checkpoint"
        print(said, file=sys.stderr)
    return 128 - code if code < 0 else code
