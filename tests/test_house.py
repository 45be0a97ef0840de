"""The rooms of the library: an arrow points down only, no import goes in a circle, and no room grows unnoticed."""

import ast
from pathlib import Path

import pytest
from conftest import ROOT

from solorl.catalog.header import code_lines

PACKAGE = ROOT / "solorl"
GROUND = ("errors", "files", "machine", "memory", "metrics", "scripts", "signals", "terminal", "trust")
# A room may import those before it.
FLOORS = (
    "ground",
    "envs",
    "checkpoints",
    "data",
    "args",
    "compute",
    "run",
    "catalog",
    "results",
    "studies",
    "share",
    "cli",
)
# Lines of code (as rule R1 counts them) that a room may have: what it has. A commit that raises a number says why.
# In brackets: what took how many of them. Together: 15,363.
BUDGETS = {
    "ground": 551,  # trust.py: what may be executed, the zoo (6), scripts (before in checkpoints and run) and modules
    # (50); what killed processes leave, texts that a terminal may show (12)
    # eight small games, two of them also in JAX (230); games of unequal spaces, PettingZoo's registry (60); masks of
    # one agent, kinds of spaces, batches of Dict and Tuple spaces (75); what a file declares of its environments (40);
    # the mistakes of a user's own environment (41); Procgen: its Qt, its kind, its limit (36); the packages and the
    # kind of PettingZoo's games of Atari (22); simulators in batches of tensors (65); EnvPool's environments one by
    # one, and vectors of its dicts (55); games of several agents in JAX, one and many: mpe2's particles, matrices,
    # switch, and their ids (410); foraging and the warehouse (52); environments in other processes (180)
    "envs": 2133,
    "checkpoints": 650,  # what the bytes of Atari's emulator lack (35)
    "data": 326,  # data sets on the disk: format, pieces, reading (135), recording (96), Minari (95)
    "args": 222,
    # XLA (50, before in run); gradient steps that share parameters (60), the convolution in JAX, which five files had
    # (22)
    "compute": 628,
    "run": 2352,  # episodes that another process plays (20); models without what does not act (5); opponents in
    # evaluation (111), policies in JAX with memory, masks, agents (35), several loops (30), recording, also what JAX
    # compiles (69);
    # a login of Weights & Biases (15), films of Atari; data sets in JAX (5)
    # files with a data set (2)
    "catalog": 984,  # relatives (16); parts that are changed in place (20), what a file comes from (18); the stub (20)
    # what a picture of a training shows, and drawing it (107); what a method is compared with; the range of few runs;
    # which run of a seed counts (60); what goes into a paper (90); returns of data sets (20);
    # one sentence for all methods with too few runs (8)
    "results": 1640,
    "studies": 2841,  # and the studies of clusters: storage, plan on disk, worker, fleet, engines; no run that
    # cannot end in time (38), for which the folders of an earlier version went; each field of a plan is checked (80),
    # damaged files of leases, attempts, submissions (15); a search on a cluster (65)
    "share": 929,  # the Hugging Face hub: card, push, pull, refusals; ONNX: the check, torch, operations of JAX
    "cli": 2107,  # and the verbs of clusters; core-hours of the defaults (34); `solo plot` (33), `solo
    # record` (85), `solo dataset` (94)
}


def modules(package):
    """Name (`solorl.run.verbs`) -> file of every module; a package is named like its folder."""
    names = {path: ".".join(path.relative_to(package.parent).with_suffix("").parts) for path in package.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def room(name):
    """The room of a module; `solorl` itself, which hands on what the scripts import, is in none."""
    parts = name.split(".")
    return None if len(parts) == 1 else "ground" if parts[1] in GROUND else parts[1]


def imports(package):
    """Module -> the modules of the package that it imports, at its top or in a function."""
    known = modules(package)
    arrows = {name: set() for name in known}
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{name} imports relative to its folder"
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                named = [f"{node.module}.{alias.name}" for alias in node.names]
                named = [each if each in known else node.module for each in named]
            else:
                continue
            arrows[name] |= {each for each in named if each in known} - {name}
    return arrows


def breaches(package):
    """`from -> to` of every import that goes up, or from a room that is not known."""
    rooms = {name: room(name) for name in modules(package)} | {package.name: None}
    arrows = [(a, b) for a, targets in imports(package).items() for b in targets if rooms[a] and rooms[b]]
    unknown = {name for name, there in rooms.items() if there and there not in FLOORS}
    up = [f"{a} -> {b}" for a, b in arrows if not {a, b} & unknown and FLOORS.index(rooms[a]) < FLOORS.index(rooms[b])]
    return sorted({*up, *unknown})


def circle(arrows):
    """The modules of one circle of imports; an empty list if there is none."""
    left = {name: set(targets) for name, targets in arrows.items()}
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    path = list(left)[:1]  # each of those left imports one of those left
    while path and path[-1] not in path[:-1]:
        path.append(min(left[path[-1]] & left.keys()))
    return path[path.index(path[-1]) :] if path else []


def lines(package):
    """Room -> lines of code."""
    found = {}
    for name, path in modules(package).items():
        if there := room(name):
            found[there] = found.get(there, 0) + code_lines(path.read_text())
    return found


def test_imports_point_down():
    assert breaches(PACKAGE) == []


def test_no_import_goes_in_a_circle():
    assert circle(imports(PACKAGE)) == []


def test_rooms_keep_their_budgets():
    found = lines(PACKAGE)
    assert found.keys() == BUDGETS.keys()
    assert {room: count for room, count in found.items() if count > BUDGETS[room]} == {}


def test_the_sum_of_the_budgets_is_told():
    assert f"Together: {sum(BUDGETS.values()):,}." in Path(__file__).read_text()


@pytest.mark.parametrize(
    ("files", "wrong", "loop"),
    [
        ({"run/a.py": "from solorl.envs import b", "envs/b.py": "import solorl.errors", "errors.py": ""}, [], []),
        ({"run/a.py": "from solorl.catalog.b import x", "catalog/b.py": ""}, ["solorl.run.a -> solorl.catalog.b"], []),
        ({"run/a.py": "def f():\n    import solorl.cli.b", "cli/b.py": ""}, ["solorl.run.a -> solorl.cli.b"], []),
        ({"envs/a.py": "from solorl.run import b", "run/b.py": ""}, ["solorl.envs.a -> solorl.run.b"], []),
        ({"files.py": "import solorl.envs.b", "envs/b.py": ""}, ["solorl.files -> solorl.envs.b"], []),
        ({"results/a.py": "from solorl.studies.b import x", "studies/b.py": ""},
         ["solorl.results.a -> solorl.studies.b"], []),
        ({"attic/a.py": ""}, ["solorl.attic.a"], []),
        ({"run/a.py": "from solorl.run import b", "run/b.py": "def f():\n    from solorl.run.c import x",
          "run/c.py": "import solorl.run.a"}, [], ["solorl.run.a", "solorl.run.b", "solorl.run.c", "solorl.run.a"]),
    ],
)  # fmt: skip
def test_breaches_are_found(tmp_path, files, wrong, loop):
    package = tmp_path / "solorl"
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert breaches(package) == wrong
    assert circle(imports(package)) == loop
