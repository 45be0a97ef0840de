"""Where the algorithm files are, and the fields of their headers."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).resolve().parent


KEYS = ("Paper", "Run", "Spaces", "Differs", "Not for", "Details")
OPTIONAL = ("Twin", "Copy of")  # keys that not every header has


PAGES = "docs/algorithms"  # the page of each algorithm file, NAME.md: from the folder above that of the families


FIRST = ("ppo", "dqn", "actor_critic")  # families that a file of any other may be told of


WRAPPED = {"integer": "multidiscrete", "multibinary": "multidiscrete"}  # actions -> what `make_env` makes of them


BUDGETS = "diff_budget.toml"  # the table of rule R3, next to the folders of the families


VALUE_COLUMN = 10  # keys stand before this column, values and continuation lines start at it


def in_checkout() -> bool:
    """Whether the package runs from a checkout of the project, where the algorithm files may be edited."""
    return (PACKAGE.parent / "algorithms").is_dir() and (PACKAGE.parent / "pyproject.toml").is_file()


def algorithms_folder() -> Path:
    """The folder of the families: next to the package in a checkout, inside the package when it is installed."""
    return (PACKAGE.parent if in_checkout() else PACKAGE) / "algorithms"


def spaces_folder() -> Path:
    """The folder of the search spaces for `solo tune`, which the wheel has inside the package."""
    return PACKAGE.parent / "benchmark" / "spaces" if in_checkout() else PACKAGE / "spaces"


def in_catalogue(path: Path) -> bool:
    """Whether a file stands in a folder of families, of this installation or of a checkout; else it is a user's own."""
    folder = path.resolve().parent.parent
    return folder == algorithms_folder().resolve() or (folder / BUDGETS).is_file()


def script_paths(folder: Path | None = None) -> dict[str, Path]:
    """Name -> file of every algorithm below `folder` (default: the catalogue), family by family."""
    paths = sorted((folder or algorithms_folder()).glob("*/*.py"))
    return {path.stem: path for path in paths if not path.name.startswith("_")}


def header_fields(docstring: str) -> dict[str, str]:
    """Key -> value of a header; a line that starts with ten spaces continues the value above it."""
    fields: dict[str, str] = {}
    key = ""
    for line in docstring.splitlines()[1:]:
        start, value = line[:VALUE_COLUMN].strip(), line[VALUE_COLUMN:].strip()
        if start in KEYS or start in OPTIONAL:
            key = start
            fields[key] = value
        elif key and value and not start:
            fields[key] += f" {value}"
        else:
            key = ""
    return fields


def not_for(fields: dict[str, str]) -> dict[str, str]:
    """What a file is not made for, each with the file that is: `{"images": "ppo_atari.py"}`."""
    parts = [part.rpartition(":") for part in fields.get("Not for", "").split(";")]
    return {what.strip(): file.strip() for what, colon, file in parts if colon}


def use_instead(script: Path, what: str) -> str:
    """`"; use FILE"` where a script's header names a file for what the script is not made for, else an empty string."""
    other = not_for(facts_of(script).fields).get(what)
    return f"; use {other}" if other else ""


class Facts(NamedTuple):
    """What decides which environments a file takes."""

    fields: dict[str, str]  # of the header
    spaces: set[tuple[str, str]]  # kinds of observations and actions, as its Spaces names them
    env_kind: str  # see `envs.ids.KINDS`
    bounded: bool  # whether its actions need finite bounds
    needs: str  # what it cannot do without, as its Spaces says after `with`: `info["action_mask"]`, goals, costs ...


def facts_of(script: Path) -> Facts:
    """What a file says of itself; somebody's own may be anything."""
    try:
        text = script.read_text(encoding="utf-8")
        fields = header_fields(ast.get_docstring(ast.parse(text), clean=False) or "")
    except (OSError, ValueError, SyntaxError):
        text, fields = "", {}
    obs, _, actions = fields.get("Spaces", "").partition(" -> ")
    kinds = {(obs, action.removeprefix("or ")) for action in re.split(", (?=or )|(?=,)", actions)}
    kind = (re.findall(r"""^    env_kind = ["']([\w-]+)["']""", text, flags=re.M) or ["gymnasium"])[0]
    return Facts(fields, kinds, kind, '"bounded"' in text, fields.get("Spaces", "").partition(", with ")[2])


known_facts = cache(facts_of)  # of the catalogue


def file_for(script: Path, obs: str, action: str, atari: bool = False) -> str:
    """`"; use FILE"`: a file of the catalogue that takes these kinds of observations and actions, one that the script's
    header names if there is any, else the nearest to the script. Where there is none, a phrase that says so and names
    the two nearest; empty where no file takes one of the two kinds."""
    own, paths = facts_of(script), script_paths()
    action = WRAPPED.get(action.partition(" (")[0], action.partition(" (")[0])
    home = paths.get(Path(own.fields.get("Copy of", script.name).partition(" ")[0]).stem, script).parent.name
    agents = "of each agent" in own.fields.get("Spaces", "")

    def distance(name: str) -> tuple[Any, ...]:
        named = f"{name}.py" in not_for(own.fields).values()
        return not named, paths[name].parent.name != home, ("_jax" in name) != ("_jax" in script.stem), len(name), name

    near = []
    for name in sorted((name for name in paths if paths[name].parent.name in (home, *FIRST)), key=distance):
        facts = known_facts(paths[name])
        kind, alike = facts.env_kind, ("of each agent" in facts.fields.get("Spaces", "")) == agents
        fits = kind.endswith("atari") if atari else kind in ("gymnasium", "agents", own.env_kind)
        if fits and alike and facts.needs in ("", own.needs):
            near.append((f"{name}.py", facts))
    same_obs = [name for name, facts in near if obs in {kinds[0] for kinds in facts.spaces}]
    same_action = [name for name, facts in near if action in {kinds[1] for kinds in facts.spaces}]
    if both := [name for name in same_obs if name in same_action and name != script.name]:
        return f"; use {both[0]}"
    two = [f"{name} ({dict(near)[name].fields['Spaces']})" for name in (*same_obs[:1], *same_action[:1])]
    none = f"; no file takes {obs} observations with {action} actions, the nearest are"
    return f"{none} {' and '.join(two)}" if len(two) == 2 else ""


def as_typed(path: Path) -> str:
    """How a command names a file, quoted: a file of the catalogue by its name, any other by its path from here."""
    known, full, here = script_paths().get(path.stem), path.resolve(), Path.cwd()
    if known and known.resolve() == full:
        return shlex.quote(path.stem)
    return shlex.quote(str(full.relative_to(here) if full.is_relative_to(here) else path))
