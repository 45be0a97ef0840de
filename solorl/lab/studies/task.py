"""A task: one script on one environment with one seed and fixed flags. It can be read without the libraries, so that a
worker starts fast."""

import ast
import hashlib
import json
import re
import sys
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

from solorl.errors import UsageError, did_you_mean, refuse, told
from solorl.lab.studies.resources import Resources

Flags = dict[str, tuple[str, ...]]  # "--learning-rate" -> its values, none for a switch
RESERVED = {"--env-id": "env_ids", "--seed": "seeds", "--num-seeds": "num_seeds", "--runs-dir": "--runs-dir",
            "--resume": "the same command again"}  # fmt: skip


def words(flags: Flags) -> tuple[str, ...]:
    """Flags as the words of a command line."""
    return tuple(word for name, values in flags.items() for word in (name, *values))


@dataclass(frozen=True)
class Script:
    """A file that takes --env-id and --seed."""

    path: Path
    sha256: str
    ours: bool  # it imports RunArgs from solorl: it takes --runs-dir and --resume, and writes a run folder there
    args: tuple[str, ...]  # fields of its class Args, empty where it has none
    env_kind: str = "gymnasium"  # what its --env-id can be; asked only where tasks are made

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    @property
    def many_seeds(self) -> bool:
        """Whether one process trains several seeds."""
        return self.ours and "num_seeds" in self.args

    def check(self, flags: Flags) -> None:
        """UsageError for a flag that bench sets itself, and one or a value that a script of ours does not take."""
        from solorl.args.command_line import value_of
        from solorl.catalog.header import fields_of, parse_source

        items = fields_of(parse_source(self.path)) if self.ours else {}
        for name, values in flags.items():
            plain = name.replace("_", "-")
            if plain in RESERVED:
                raise UsageError(f"{name} cannot be a flag for the scripts; use {RESERVED[plain]}")
            allowed = [f"--{'no-' * no}{arg.replace('_', '-')}" for arg in self.arguments() for no in (False, True)]
            if self.ours and self.args and plain not in allowed:
                raise UsageError(f"{self.path.name} has no flag {name}{did_you_mean(plain, allowed)}")
            item = items.get(plain.removeprefix("--no-" if not values else "--").replace("-", "_"))
            kind = ast.unparse(item.annotation) if item else ""
            refuse(kind == "bool" and values, f"{name} takes no value; write {name} or --no-{plain[2:]}")
            if kind in ("int", "float"):
                with told(self.path.name, str):
                    value_of(name, int if kind == "int" else float, " ".join(values))

    def arguments(self) -> list[str]:
        """The names of all its arguments."""
        from solorl.args.arguments import RunArgs

        return [*self.args, *(item.name for item in fields(RunArgs))]


@dataclass(frozen=True)
class Task:
    """One script on one environment with one seed and fixed flags."""

    script: Script
    env_id: str
    seed: int
    flags: Flags = field(default_factory=dict)
    variant: str = ""
    python: str = ""  # absolute path of the Python that runs it, empty for this one
    resources: Resources = field(default=Resources(), compare=False)  # for engines that ask for them

    @cached_property
    def id(self) -> str:
        """A file name that people can read, with a hash of the script's contents, environment, seed and flags. Not of
        the Python, which machines that share a study have at different paths: what has finished, has, whatever ran it.
        """
        flags = sorted([name, *values] for name, values in self.flags.items())
        key = json.dumps([self.script.sha256, self.env_id, self.seed, flags])
        parts = (self.script.name, self.variant, self.env_id, str(self.seed))
        name = "__".join(re.sub(r"[^A-Za-z0-9.=-]+", "_", part)[:60] for part in parts if part)
        return f"{name}__{hashlib.sha256(key.encode()).hexdigest()[:12]}"

    @cached_property
    def kind(self) -> str:
        """What tasks that differ in their seeds only have in common."""
        return replace(self, seed=0).id

    def __str__(self) -> str:
        variant = f" [{self.variant}]" if self.variant else ""
        return f"{self.script.name}{variant} {self.env_id} seed {self.seed}"

    def argv(self, *more: str, seeds: int = 1) -> tuple[str, ...]:
        """The command line, with `seeds` seeds from this one on in one process."""
        path = self.script.path if self.script.ours else self.script.path.resolve()
        given = ("--env-id", self.env_id, "--seed", str(self.seed), *(("--num-seeds", str(seeds)) if seeds > 1 else ()))
        return (self.python or sys.executable, str(path), *given, *words(self.flags), *more)
