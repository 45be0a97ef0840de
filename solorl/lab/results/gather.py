"""Results side by side: each once, the newest run of a seed, and the names of methods."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from solorl.args.arguments import RunArgs
from solorl.args.command_line import whole_number
from solorl.lab.results.result import Result, rounded
from solorl.terminal import plain

SAME = {"env_id", "seed", "num_seeds"}  # arguments in which the runs of one method may differ
BUDGET = {"total_timesteps", "target_return"}  # how long a run trains: of a method on one environment the same
NOT_OWN = (SAME | {item.name for item in fields(RunArgs)} | {"torch_threads"}) - BUDGET  # and what no script adds


def printable(result: Result) -> Result:
    """The result with names that a terminal and a page show as they are."""
    names = ("env_id", "script", "variant", "status", "source")
    texts: dict[str, Any] = {name: plain(getattr(result, name)) for name in names}
    return replace(result, **texts)


def each_once(results: Sequence[Result]) -> list[Result]:
    """The results without the copies: a run folder and the file made of it are one, and its variant is the file's."""
    names = ("env_id", "script", "seed", "started", "global_step", "args", "eval", "last_100_episodes")
    contents = [repr(rounded([getattr(one, name) for name in names])) for one in results]
    with_variant = {content for one, content in zip(results, contents, strict=True) if one.variant}
    kept: dict[tuple[str, str], Result] = {}
    for one, content in zip(results, contents, strict=True):
        if one.variant or content not in with_variant:
            kept.setdefault((content, one.variant), one)
    return list(kept.values())


def newest(results: Sequence[Result]) -> tuple[list[Result], list[str]]:
    """One result for each environment, method and seed, the newest, and a sentence for each of the others."""
    kept: dict[tuple[str, str, int], Result] = {}
    left_out = []
    for result in results:
        key = (result.env_id, result.name, result.seed)
        other = kept.setdefault(key, result)
        if other is not result:
            kept[key] = best = max(other, result, key=lambda one: (one.started, one.global_step))
            worse = other if best is result else result
            why = f"{best.source} is newer, of the same seed and {_alike(best, worse)}"
            left_out.append(f"{worse.source} is left out: {why}")
    return list(kept.values()), left_out


def _alike(one: Result, other: Result) -> str:
    """The same settings, or what else than these two runs differ in."""
    differing = sorted(name for name in one.args.keys() | other.args if one.args.get(name) != other.args.get(name))
    differing += ["the script itself"] * (one.script_sha256 != other.script_sha256)
    return f"the same settings{' except ' * bool(differing)}{', '.join(differing)}"


# ---------------------------------------------------------------------- names of methods
def named(results: Sequence[Result], whole: bool = False) -> list[Result]:
    """The results with the names of their methods: the script, its variant, and the arguments in which runs differ.

    Runs of one script and variant on one environment belong to one method if the script's own arguments are equal;
    those of RunArgs count where a variant is made of them. What differs is in the name on every environment, but how
    long a run trains (BUDGET) only where it differs, because each environment has its own. A variant that only lists
    flags, as `solo bench` has it, is not a name: the arguments say it. With `whole` it is one like any other.
    """
    listed = [None if whole and one.variant else _listed_flags(one) for one in results]
    groups: dict[tuple[str, str], list[int]] = {}
    for i, one in enumerate(results):
        groups.setdefault((one.script, one.variant if listed[i] is None else ""), []).append(i)
    names = {}
    for (script, variant), members in groups.items():
        flags = {name for i in members for name in listed[i] or ()} - SAME
        differing = _differing([results[i] for i in members], flags)
        for i in members:
            args, env_id = _arguments(results[i]), results[i].env_id
            counted = {name for name, env in differing if name not in BUDGET or env == env_id}
            words = [_word(name, args[name]) for name in sorted(counted) if name in args]
            names[i] = " ".join(filter(None, [script, variant, *words]))
    return [replace(one, method=names[i]) for i, one in enumerate(results)]


def _arguments(result: Result) -> dict[str, Any]:
    """The arguments as their file would hold them; those of other libraries' scripts are flags, with dashes."""
    return {name.replace("-", "_"): rounded(value) for name, value in result.args.items()}


def _listed_flags(result: Result) -> list[str] | None:
    """The arguments whose values the variant lists, as in `learning-rate=0.001 no-anneal-lr`; None for a name."""
    args, found = _arguments(result), []
    for word in result.variant.split():
        flag, _, value = word.partition("=")
        name = flag.replace("-", "_")
        if name not in args and name.startswith("no_") and args.get(name[3:]) is False:
            name = name[3:]
        elif name not in args or not _is_value(args[name], value):
            return None
        found.append(name)
    return found


def _is_value(value: Any, text: str) -> bool:
    """Whether `text` is how a command line has this value, "" for a switch."""
    if not text or isinstance(value, bool):
        return not text and (value is True or value == "")
    try:
        return float(value) == (whole_number(text) if isinstance(value, int) else float(text))
    except (TypeError, ValueError, OverflowError):
        return _text(value).replace(" ", ",") == text


def _differing(results: Sequence[Result], flags: set[str]) -> set[tuple[str, str]]:
    """The own arguments of a script, and `flags`, that have several values on one environment, with that environment.

    A missing value is one only among `flags`: a script that got a new argument is not another method.
    """
    values: dict[tuple[str, str], set[str]] = {}
    for result in results:
        args = _arguments(result)
        own = [name for name in args if name not in NOT_OWN]
        for name in {*own, *flags}:
            values.setdefault((name, result.env_id), set()).add(repr(args.get(name)))
    return {key for key, several in values.items() if len(several) > 1}


def _word(name: str, value: Any) -> str:
    """An argument in the name of a method: `learning-rate=0.001`, `no-anneal-lr`."""
    flag = name.replace("_", "-")
    if isinstance(value, bool) or value == "":
        return f"no-{flag}" if value is False else flag
    return f"{flag}={plain(_text(value))}"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
