"""The reader of command lines: a field of a dataclass is a flag, the comment after it its help and its range.

It needs the standard library only, for `solo copy --standalone` puts this text into the copy, which therefore shows the
same help and refuses the same input. What it refuses it raises as argparse.ArgumentError, whose text is one sentence.

The last part of a field's comment, after a comma or a semicolon, may say in one of four phrases what a number can be:

    from 0 to 1       any two numbers, both included
    0: WHAT IT DOES   an integer with a positive default may also be 0
    inf: ...          a number may also be infinite
    may be negative   a number may also be less than 0

Without a phrase an integer with a positive default is a size and must be at least 1; every other number must be finite,
and not negative unless its default is. Integers must be smaller than 2**63; they may be written as 500000, 500_000,
500k, 2M or 1e6.
"""

import argparse
import dataclasses
import difflib
import functools
import inspect
import math
import re
import sys
import types
import typing
from fractions import Fraction
from pathlib import Path

# The phrases; the space that `solo tune` searches may follow them.
RANGE = re.compile(
    r"(?:^|[,;] )(from (-?\d+(?:\.\d+)?) to (-?\d+(?:\.\d+)?)|0: [^;]+?|inf: [^;]+?|may be negative)"
    r"(?: \[tune: [^\]]+\])?$"
)
# Flags of CleanRL and of version 0.1.
GONE = {"--env-workers": "--async-envs", "--no-cuda": "--device cpu", "--cuda": "--device cuda or --device cpu"}


def given_arguments(args_type: type, argv: list[str]) -> dict[str, typing.Any]:
    """Field -> value for the flags of a command line. `--help` prints the help and ends the program.

    ArgumentError for an unknown flag, a missing value, and a value that is not of the field's type.
    """
    if "--help" in argv or "-h" in argv:
        parser_of(args_type).print_help()
        raise SystemExit(0)
    parser = parser_of(args_type)
    flags = [flag for action in parser._actions for flag in action.option_strings]
    words = [re.sub(r"^--[^=]*", lambda flag: flag[0].replace("_", "-"), word) for word in argv]
    try:
        found, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        if error.argument_name is None:  # of value_of
            raise
        needs = "takes no value" if "/" in error.argument_name else "needs a value"
        raise argparse.ArgumentError(None, f"{error.argument_name.replace('/', ' or ')} {needs}") from None
    for word in unknown:
        if not word.startswith("-"):
            switch = re.sub("^--(no-)?", "--no-", words[words.index(word) - 1])  # False after --anneal-lr
            yes = switch.replace("no-", "", 1)
            what = f"{yes} takes no value, got {word!r:.80}; write {yes} or {switch}"
            meant = "--env-id" in flags and not hasattr(found, "env_id")
            hint = f"; did you mean --env-id {word:.80}?" if meant else ""
            outside = f"{word!r:.80} does not follow a flag that takes a value{hint}"
            raise argparse.ArgumentError(None, what if words[0] != word and switch in flags else outside)
        name = word.partition("=")[0]
        near = difflib.get_close_matches(name, flags, n=1)
        nearest = f"; use {GONE[name]}" if name in GONE else f"; did you mean {near[0]}?" if near else ""
        raise argparse.ArgumentError(None, f"unknown option {name}{nearest} (--help lists all)")
    return vars(found)


def parser_of(args_type: type) -> argparse.ArgumentParser:
    """argparse with the fields as flags. Its help has the script's header, its own options, then those every script
    has; each with the comment after its field and its default."""
    base, comments, hints = args_type.__mro__[-2], comments_of(args_type), typing.get_type_hints(args_type)  # RunArgs
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS,
        usage=argparse.SUPPRESS, description=(sys.modules[args_type.__module__].__doc__ or "").strip(),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=120),
    )  # fmt: skip
    parser._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)")  # for argparse, -1e3 would be a flag
    own = parser.add_argument_group(f"options of {Path(inspect.getfile(args_type)).stem}")
    shared = parser.add_argument_group("options of every run")
    for field in dataclasses.fields(args_type):
        flag, hint = "--" + field.name.replace("_", "-"), hints[field.name]
        default = "" if field.default in (None, "") else f" [{field.default}]"
        text = f"{comments.get(field.name, '')}{default}".replace("%", "%%")
        group = shared if hasattr(base, field.name) else own
        if hint is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            group.add_argument(flag, type=functools.partial(value_of, flag, hint), metavar="", help=text)
    return parser


def value_of(flag: str, hint: typing.Any, text: str) -> typing.Any:
    """The value of type `hint` that a text stands for; ArgumentError where it stands for none. The words of a `Literal`
    in a union may stand in place of a number."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    words = [word for each in kinds if typing.get_origin(each) is typing.Literal for word in typing.get_args(each)]
    nothing = ["None"] * (type(None) in kinds)
    if text in [*words, *nothing]:
        return text if text in words else None
    kind = kinds[0]
    if kind not in (int, float, str):
        what = f"must be {' or '.join(words)}, got {text!r:.80}" if words else f"is of type {hint}, which only the file"
        raise argparse.ArgumentError(None, f"{flag} {what}{'' if words else ' itself can set'}")
    try:
        return whole_number(text) if kind is int else kind(text)
    except ValueError:
        name = " or ".join([{int: "an integer such as 8, 500k, 2M or 1e6", float: "a number"}[kind], *words, *nothing])
        raise argparse.ArgumentError(None, f"{flag} must be {name}, got {text!r:.80}") from None


def whole_number(text: str) -> int:
    """The integer that is written as 500000, 500_000, 500k, 1.5M or 1e6; ValueError for anything else."""
    match = re.fullmatch(r"\s*([-+]?[\d_]+(?:\.\d+)?)([eE]\+?\d{1,2}|[kKM]?)\s*", text)
    number = Fraction(match[1] + {"k": "e3", "K": "e3", "M": "e6"}.get(match[2], match[2])) if match else Fraction(1, 2)
    if number.denominator > 1:
        raise ValueError(f"{text!r} is not a whole number")
    return number.numerator


def check_ranges(args: typing.Any) -> None:
    """ArgumentError for a number outside its range, as the comment of its field says it (see the top)."""
    comments = comments_of(type(args))
    for field in dataclasses.fields(args):
        value, default = getattr(args, field.name), field.default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        match = RANGE.search(comments.get(field.name, ""))
        phrase = match[1] if match else ""
        signed = phrase == "may be negative" or (isinstance(default, (int, float)) and default < 0)
        size = isinstance(default, int) and default > 0 and not phrase.startswith("0:")
        low, high = "-inf" if signed else "1" if size else "0", "inf"
        if match and match[2]:
            low, high = match[2], match[3]
        flag, wrong = "--" + field.name.replace("_", "-"), ""
        if isinstance(value, int) and value >= 2**63:
            raise argparse.ArgumentError(None, f"{flag} is too large: it must be smaller than 2**63")
        if math.isnan(value) or (math.isinf(value) and not phrase.startswith("inf:")):
            wrong = "a finite number"
        elif value < float(low):
            wrong = f"at least {low}"
        elif value > float(high):
            wrong = f"at most {high}"
        if wrong:
            raise argparse.ArgumentError(None, f"{flag} is {value}, but must be {wrong}")


def comments_of(args_type: type) -> dict[str, str]:
    """The comment on the line of each field; ArgumentError where the source cannot be read."""
    try:
        sources = [inspect.getsource(kind) for kind in reversed(args_type.__mro__[:-1])]
    except (OSError, TypeError):
        sentence = f"the source of {args_type.__name__}, which has the ranges of the arguments, cannot be read here, "
        sentence += "as in a notebook: save the script as a file and run `python FILE.py` or `solo train FILE.py`"
        raise argparse.ArgumentError(None, sentence) from None
    lines = "\n".join(sources).splitlines()
    return {match[1]: match[2] for line in lines if (match := re.match(r"    (\w+): .*?  # (.*)", line))}
