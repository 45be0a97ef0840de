"""What `solo tune` searches in.

A search space is written in one small language, in a TOML file (`learning-rate = "log 1e-5..1e-2"`) or in the comment
after a field of the script's Args (`# learning rate [tune: log 1e-5..1e-2]`):

    0.9..0.999        between two numbers, whole ones where both are (and the field is an int)
    log 1e-5..1e-2    the same, equally likely on a logarithmic scale
    32..512 step 32   a multiple of the step above the lower bound
    64 | 128 | 256    one of these; true | false for a switch
"""

import ast
import contextlib
import re
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from solorl.args.command_line import whole_number
from solorl.catalog.header import fields_of, lines_of, parse_source, read_source
from solorl.errors import UsageError, refuse, told
from solorl.lab.studies.plan import Script, as_flag, read_toml
from solorl.scripts import in_catalogue, spaces_folder

NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+|[kKM])?"


# A space: flag name without its dashes in front -> what it may be, a distribution of Optuna


def parse_space(text: str, where: str, kind: str = "") -> Any:
    """The language above; `kind` is the field's annotation, if there is one. UsageError for anything else."""
    if "|" in text:
        return CategoricalDistribution([_value(part.strip(), kind) for part in text.split("|")])
    match = re.fullmatch(rf"(log )?\s*({NUMBER})\s*\.\.\s*({NUMBER})\s*(?:step ({NUMBER}))?", text.strip())
    if not match:
        raise UsageError(f'{where}: {text!r} is none of "0.9..0.999", "log 1e-5..1e-2", "32..512 step 32", "64 | 128"')
    low, high, step = (_number(part, kind) for part in (match[2], match[3], match[4] or "1"))
    whole = all(isinstance(part, int) for part in (low, high, step))
    if kind.startswith("int") and not whole:
        raise UsageError(f"{where}: {text!r} must have whole bounds, because the field is an integer")
    with told(f"{where}: {text!r}"):
        if whole:
            return IntDistribution(low, high, bool(match[1]), step)
        return FloatDistribution(low, high, bool(match[1]), step if match[4] else None)


def _value(text: str, kind: str) -> Any:
    """A number where the text is one, true or false, else the text."""
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(NUMBER, text) and not kind.startswith("str"):
        return _number(text, kind)
    return text


def _number(text: str, kind: str) -> Any:
    """An int where the field is one, as on a command line, or where it may be and the text is one without a point or an
    exponent; else a float."""
    if kind.startswith("int") or not (kind.startswith("float") or re.search(r"[.eE]", text)):
        with contextlib.suppress(ValueError):
            return whole_number(text)
    return float(re.sub("[kK]$", "e3", text).replace("M", "e6"))


def space_of(script: Script) -> dict[str, Any]:
    """The space in the comments of a script's Args, else the one that we ship for an algorithm; UsageError where there
    is none."""
    lines, space = lines_of(read_source(script.path)), dict[str, Any]()
    for name, item in fields_of(parse_source(script.path)).items():
        comment = lines[(item.end_lineno or item.lineno) - 1].partition("#")[2]
        if match := re.search(r"\[tune: ([^\]]+)\]", comment):
            where = f"{script.path.name}:{item.lineno}"
            space[name.replace("_", "-")] = parse_space(match[1], where, ast.unparse(item.annotation))
    shipped = spaces_folder() / f"{script.path.stem.removesuffix('_jax')}.toml"
    if not space and in_catalogue(script.path) and shipped.is_file():
        return space_from_file(shipped, script)
    lacks = f"{script.path.name} has no field with `[tune: log 1e-5..1e-2]` in its comment"
    refuse(not space, f"{lacks}; use --space FILE.toml (`solo tune --help` shows one)")
    return space


def space_from_file(path: Path, script: Script) -> dict[str, Any]:
    """The space in a TOML file; UsageError for what is not a space and for a flag that the script does not have."""
    space, annotations = dict[str, Any](), fields_of(parse_source(script.path))
    for key, text in read_toml(path).items():
        name, where = key.removeprefix("--").replace("_", "-"), f"{key} in {path}"
        item = annotations.get(name.replace("-", "_"))
        if isinstance(text, list) and text and all(isinstance(part, (bool, int, float, str)) for part in text):
            space[name] = CategoricalDistribution(text)
        elif isinstance(text, str):
            space[name] = parse_space(text, where, ast.unparse(item.annotation) if item else "")
        else:
            raise UsageError(f'{where} must be a text such as "log 1e-5..1e-2" or a list of values')
    refuse(not space, f"{path} names no parameter")
    for name, what in space.items():
        for value in getattr(what, "choices", None) or [what.low]:
            script.check(as_flag(name, value))
    return space
