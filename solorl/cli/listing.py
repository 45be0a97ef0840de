"""`solo list`: the algorithms, one line each."""

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from solorl.catalog.header import Script, scripts
from solorl.cli import Parser
from solorl.errors import UsageError, hint
from solorl.terminal import aligned, paint

COLUMNS = ("name", "family", "spaces", "framework", "paper", "title")
FILTERS = {  # flag -> its help
    "family": "only this family, as in ppo",
    "framework": "only torch or jax",
    "observations": "only those for these observations, as in vector",
    "actions": "only those for these actions, discrete or continuous",
}
MORE = (*FILTERS, "run", "parent", "parents", "relatives", "twin", "not_for", "lines")  # for --json


def short_title(script: Script) -> str:
    """The title without what the name and the spaces say already."""
    title = re.sub(r"[;,] in JAX\b.*", "", script.title).rstrip(".")
    for kind in (f"{script.observations} observations", f"{script.actions} actions", script.actions):
        title = re.sub(rf"[;,] {re.escape(kind)}(?=[;,]|$)", "", title)
    return title


def groups(found: Sequence[Script], width: int) -> Iterator[str]:
    """The algorithms below a line for each family and its spaces, no line longer than `width`."""
    column = 2 + max(len(script.name) for script in found) + 2
    by_kind = sorted(found, key=lambda script: (script.family, script.spaces))  # keeps the order of names
    for (family, spaces), members in groupby(by_kind, key=lambda script: (script.family, script.spaces)):
        yield f"{paint(family, 'bold')}: {spaces}"
        for script in members:
            title = textwrap.wrap(short_title(script), max(20, width - column)) or [""]
            yield f"  {script.name:{column - 2}}{title[0]}".rstrip()
            yield from (" " * column + line for line in title[1:])


def chosen(found: Sequence[Script], wanted: dict[str, str | None]) -> list[Script]:
    """The scripts with all the properties that are given; UsageError for one that no script has."""
    for name, value in wanted.items():
        there = sorted({getattr(script, name) for script in found})
        if value is not None and value not in there:
            what = "family" if name == "family" else f"algorithm with {name}"
            raise UsageError(f"there is no {what} {value}{hint(value, there, 'there are')}")
    given = {name: value for name, value in wanted.items() if value is not None}
    return [script for script in found if all(getattr(script, name) == value for name, value in given.items())]


def show_choice(env_id: str, as_json: bool) -> None:
    """Print what an environment is and which files take it; UsageError where there is no such environment."""
    from solorl.catalog import choice  # here: it loads the numerical libraries

    seen = choice.look(env_id)
    found, (near, change), (obs, action) = choice.best(seen), choice.nearest(seen), seen.pair
    of_obs, of_action = choice.in_words(seen.obs), choice.in_words(seen.action)
    if as_json:
        take = [{"name": name, "for": words} for name, words in found.items()]
        known: dict[str, Any] = {"env_id": env_id, "observations": obs, "observation": of_obs, "actions": action}
        known |= {"action": of_action, "several_agents": seen.agents, "action_mask": seen.masks, "take": take}
        print(json.dumps(known | ({} if found else {"nearest": near, "change": change}), indent=2))
        return
    whose, masks = " of each agent" * seen.agents, ", some are masked" * seen.masks
    print(f"{env_id}: {obs} observations ({of_obs}), {action} actions ({of_action}){whose}{masks}")
    if not found:
        print(f"no file takes it; the nearest: {', '.join(near) or 'none'}" + f"; {change}" * bool(change))
    for line in aligned([(f"  {name}", words) for name, words in found.items() if words], right=()):
        print(line)
    if others := ", ".join(name for name, words in found.items() if not words):
        print("\n".join(textwrap.wrap(f"also: {others}", 100, subsequent_indent="  ")))


def main(argv: Sequence[str]) -> int:
    """Print the algorithms; UsageError for a property that no algorithm has."""
    parser = Parser("list", "Show the algorithms: name, family, spaces, framework, paper and title.")
    for name, what in FILTERS.items():
        parser.add_argument(f"--{name}", metavar="KIND", help=what)
    parser.add_argument("--for", metavar="ENV_ID", dest="env_id", help="files that take this environment, best first")
    parser.add_argument("--json", action="store_true", help="all that is known, for programs")
    args = parser.parse(argv)
    if args.env_id:
        show_choice(args.env_id, args.json)
        return 0
    found = chosen(scripts(), {name: getattr(args, name) for name in FILTERS})
    names = dict.fromkeys((*COLUMNS, *MORE))
    if args.json:
        known = [{name: getattr(script, name) for name in names} | {"path": str(script.path)} for script in found]
        print(json.dumps(known, indent=2))
    elif not found:
        print("no algorithm is of all these kinds")
    else:  # of the paper only authors and year
        rows = [[getattr(script, name).split(", http")[0] for name in COLUMNS] for script in found]
        lines = aligned([COLUMNS, *rows], right=())
        width = shutil.get_terminal_size().columns
        if sys.stdout.isatty() and max(map(len, lines)) > width:
            lines = list(groups(found, width))
        print("\n".join(lines))
    return 0
