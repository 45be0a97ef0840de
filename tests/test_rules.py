"""The rules of the algorithm files: kept by all of them, and each seen to fail where it is broken."""

import ast
import re
import shutil

import pytest
from conftest import ROOT, refused

from solorl import cli, scripts
from solorl.catalog import budget, rules
from solorl.catalog import header as catalog
from solorl.cli.check import problems_of
from solorl.errors import UsageError

REAL = ROOT / "algorithms"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of the real algorithms in a checkout of its own, with a sibling of ppo.py to break; returns its path."""
    (tmp_path / "pyproject.toml").write_text("")
    shutil.copytree(REAL, tmp_path / "algorithms", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(scripts, "PACKAGE", tmp_path / "solorl")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "ppo_mine", "--from", "ppo"]) == 0
    return tmp_path / "algorithms" / "ppo" / "ppo_mine.py"


def edit(path, old, new):
    """Replace the first `old` in a file."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def messages(problems):
    """`rule: sentence` of each problem."""
    return [f"{problem.rule}: {problem.text}" for problem in problems]


# ---------------------------------------------------------------------- the real files
@pytest.mark.parametrize("path", sorted(REAL.glob("*/*.py")), ids=lambda path: path.stem)
def test_file_keeps_the_rules(path):
    assert [str(problem) for problem in rules.check_file(path)] == []


@pytest.mark.parametrize("folder", sorted(path for path in REAL.iterdir() if path.is_dir()), ids=lambda path: path.name)
def test_family_keeps_the_rules(folder):
    assert [str(problem) for problem in rules.check_family(sorted(folder.glob("*.py")))] == []


def test_each_family_has_a_root_and_each_parent_exists():
    found = catalog.scripts()
    for family in {script.family for script in found}:
        assert any(script.parent is None for script in found if script.family == family), family
    assert all(budget.parent_path(script) for script in found if script.parent)


# ---------------------------------------------------------------------- rules about one file, each broken once
MAIN = 'if __name__ == "__main__":\n'
SIX_DEEP = "def deep(x):\n" + "".join(f"{'    ' * i}if x:\n" for i in range(1, 6)) + f"{'    ' * 6}pass\n\n\n{MAIN}"
BREAKS = {
    "import of another algorithm": ("import torch\n", "import ppo\nimport torch\n", "R1: imports ppo, another"),
    "import from another algorithm": ("import torch\n", "from ppo import gae\nimport torch\n", "R1: imports ppo"),
    "relative import": ("import torch\n", "from .ppo import gae\nimport torch\n", "R1: imports relative"),
    "long line": ("import torch\n", f"import torch  # {'x' * 105}\n", "R1: the line has 121 characters"),
    "many lines": (MAIN, "# x\n" * 100 + MAIN, " lines, but may have 250 (demanding"),
    "deep nesting": (MAIN, SIX_DEEP, "R1: is nested 6 deep, but may be 5"),
    "missing key": ("Spaces    vector", "Space     vector", "header: the header has no line Spaces"),
    "value in the wrong column": ("Paper     Sch", "Paper  Sch", "header: the header has no line Paper"),
    "no docstring": ('"""Proximal', 'x = """Proximal', "header: has no header"),
    "command of another file": ("solo train ppo_mine", "solo train ppo", "header: Run must start with"),
    "command in other words": ("solo train ppo_mine", "python ppo_mine.py", "header: Run must start with"),
    "unknown flag in the command": ("--env-id Cart", "--env-idd Cart", "unknown flag --env-idd; did you mean env_id?"),
    "no such page": ("ppo/README.md", "ppo/NOTHING.md", "header: there is no file algorithms/ppo/NOTHING.md"),
    "no parent": ("from ppo.py: nothing", "nothing", "header: Differs must say"),
    "no script metadata": ("# /// script", "# script", "PEP 723: the file must start with"),
    "script metadata not first": ("# /// script", "# hello\n# /// script", "PEP 723: the file must start with"),
    "broken script metadata": ("dependencies = [", "dependencies = ", "PEP 723: the block is not TOML"),
    "no version of Python": ("requires-python", "requires-pyton", "PEP 723: the block has no requires-python"),
    "missing dependency": ('"numpy>=1.26,<3", ', "", "PEP 723: imports numpy, but the dependencies do not name numpy"),
    "missing library": ('"solorl[box2d]>=0.1", ', "", "PEP 723: imports solorl, but"),
    "module of another name": ("import torch\n", "import yaml\nimport torch\n", "the dependencies do not name pyyaml"),
    "dead flag": ("    num_envs: int", "    idle: int = 3\n    num_envs: int", "flags: args.idle is never used"),
    "flag of the library": (MAIN, f"{MAIN}    if args.track:\n        pass\n", "R5: reads args.track"),
    "seed": (MAIN, f"{MAIN}    print(args.seed)\n", "R5: reads args.seed"),
    "device": (MAIN, f"{MAIN}    print(args.device)\n", "R5: reads args.device"),
    "run in a function": (MAIN, f"def f():\n    run.log(0, {{}})\n\n\n{MAIN}", "R5: uses run outside the main block"),
    "call inside an expression": ("start = run.resume(", "start = 0 + run.resume(", "R5: hides run.resume inside"),
    "call in a condition": (MAIN, f"{MAIN}    if run.save(0):\n        pass\n", "R5: hides run.save inside"),
    "private part": (MAIN, f"{MAIN}    print(run._due)\n", "R5: uses run._due, which is private"),
    "function of the library": (
        MAIN, f"from solorl.run.checkpoint import sha256\n\n{MAIN}    sha256(1)\n", "R5: calls sha256 of the library"
    ),
    "no main block": (MAIN, 'if __name__ == "main":\n', "R5: the file has no block"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_broken_file_is_found(tree, name):
    old, new, sentence = BREAKS[name]
    before = messages(rules.check_file(tree))
    edit(tree, old, new)
    after = messages(rules.check_file(tree))
    count = [sum(sentence in message for message in messages) for messages in (before, after)]
    assert count[1] == count[0] + 1, after


def test_problem_names_its_line(tree):
    edit(tree, "    # ---- setup\n", "    # ---- setup\n    print(args.seed)\n")
    line = tree.read_text().splitlines().index("    print(args.seed)") + 1
    found = [problem for problem in rules.check_file(tree) if problem.rule == "R5"]
    assert [str(problem) for problem in found] == [f"{tree}:{line}: R5: reads args.seed, which only the library uses"]


def test_own_defaults_of_library_flags_are_allowed_but_not_their_use(tree):
    edit(tree, "    num_envs: int", "    seed: int = 2\n    eval_episodes: int = 5\n    num_envs: int")
    assert not any(problem.rule in ("R5", "flags") for problem in rules.check_file(tree))
    edit(tree, MAIN, f"{MAIN}    print(args.seed)\n")
    assert "R5: reads args.seed, which only the library uses" in messages(rules.check_file(tree))


def test_elif_is_no_nesting():
    source = "if a:\n    pass\n" + "".join(f"elif a == {i}:\n    pass\n" for i in range(9)) + "else:\n    pass\n"
    assert {depth for depth, _ in rules.depths(ast.parse(source).body)} == {1}


def test_every_kind_of_block_nests():
    source = "try:\n  for x in y:\n    with z:\n      while 1:\n        match x:\n          case _:\n"
    source += "            if x: pass\nexcept E:\n  if x:\n    pass\nelse:\n  pass\n"
    tree = ast.parse(source)
    assert max(depth for depth, _ in rules.depths(tree.body)) == 6
    assert (2, 9) in list(rules.depths(tree.body))


def test_demanding_files_may_be_longer(tree):
    lines = len(tree.read_text().splitlines())
    edit(tree, MAIN, "# x\n" * (260 - lines) + MAIN)
    assert any("has 260 lines, but may have 250" in message for message in messages(rules.check_file(tree)))
    table = tree.parent.parent / budget.TABLE
    budget.write_table(table, budget.read_table(table) | {"ppo_mine.py": {"demanding": "it is a test"}})
    assert not any("has 260 lines" in message for message in messages(rules.check_file(tree)))


def test_name_in_two_families_is_found(tree):
    (tree.parent.parent / "other").mkdir()
    shutil.copy(tree, tree.parent.parent / "other" / tree.name)
    assert "header: the name is taken by other/ppo_mine.py" in messages(rules.check_file(tree))


def test_plumbing_flags_are_those_of_the_library():
    assert {"track", "seed", "device", "capture_video", "runs_dir"} <= rules.plumbing_flags()
    assert "learning_rate" not in rules.plumbing_flags()


# ---------------------------------------------------------------------- R2
def drifted(tree):
    """The problems of rule R2 in the family."""
    return [problem for problem in rules.check_family(sorted(tree.parent.glob("*.py"))) if problem.rule == "R2"]


def test_same_name_same_body(tree):
    assert drifted(tree) == []
    edit(tree, "gamma * lam * alive[t]", "gamma * lam * (1 - done[t])")
    (problem,) = drifted(tree)
    assert problem.path == tree and problem.text.startswith("gae is not the gae of ppo.py; ")
    assert tree.read_text().splitlines()[problem.line - 1].startswith("def gae(")
    assert cli.main(problem.text.rpartition(": solo ")[2].split()) == 0  # the command that the sentence gives
    assert drifted(tree) == []


def test_formatting_and_exempt_names_may_differ(tree):
    edit(tree, "    for t in reversed(", "    # backwards\n    for t in  reversed(")
    edit(tree, "class Agent(nn.Module):\n", "class Agent(nn.Module):\n    extra = 1\n\n")
    edit(tree, "    return gym.make(env_id, **kwargs)", "    return gym.make(env_id, **dict(kwargs))")
    assert drifted(tree) == []


def test_other_framework_may_differ(tree):
    for twin in tree.parent.glob("*_jax.py"):
        twin.unlink()
    edit(tree, "gamma * lam * alive[t]", "gamma * lam * (1 - done[t])")
    assert len(drifted(tree)) == 1
    edit(tree, "import torch\n", "import jax\nimport torch\n")
    assert catalog.parse_header(tree).framework == "jax" and drifted(tree) == []


# ---------------------------------------------------------------------- R3
def over_budget(tree):
    """The sentence of rule R3 about the sibling, or an empty string."""
    found = [p for p in rules.check_family(sorted(tree.parent.glob("*.py"))) if p.rule == "R3" and p.path == tree]
    assert all(tree.read_text().splitlines()[problem.line - 1].startswith("Differs ") for problem in found)
    return "".join(problem.text for problem in found)


def set_budget(tree):
    """`solo check --set-budget` for the sibling."""
    return budget.set_budget(catalog.parse_header(tree))


def test_diff_budget_holds(tree):
    assert "differs from ppo.py in 4 lines and has no budget" in over_budget(tree)
    assert set_budget(tree) == 4 and over_budget(tree) == ""
    edit(tree, MAIN, f"# one more line\n{MAIN}")
    assert "differs from ppo.py in 5 lines, budget 4; " in over_budget(tree)
    with pytest.raises(UsageError, match="say in its line Differs what is new"):
        set_budget(tree)
    edit(tree, "nothing yet", "one more line")
    assert "its line Differs has changed since" in over_budget(tree)
    assert set_budget(tree) == 5 and over_budget(tree) == ""


def test_budget_cannot_be_raised_by_hand(tree):
    set_budget(tree)
    edit(tree, MAIN, f"# one more line\n{MAIN}")
    table = tree.parent.parent / budget.TABLE
    edit(table, '"ppo_mine.py" = { lines = 4,', '"ppo_mine.py" = { lines = 40,')
    assert "was changed by hand" in over_budget(tree)
    with pytest.raises(UsageError, match="was changed by hand; restore it first"):
        set_budget(tree)


def test_smaller_diff_needs_no_words(tree):
    edit(tree, MAIN, f"# one\n# two\n{MAIN}")
    assert set_budget(tree) == 6
    edit(tree, "# two\n", "")
    assert over_budget(tree) == "" and set_budget(tree) == 5


def test_budget_keeps_the_other_entries(tree):
    table = tree.parent.parent / budget.TABLE
    entries = budget.read_table(table) | {"z.py": {"demanding": 'says "why" — ü'}, "ppo_mine.py": {"demanding": "x"}}
    budget.write_table(table, entries)
    set_budget(tree)
    new = budget.read_table(table)
    assert new["ppo_mine.py"]["lines"] == 4 and new["ppo_mine.py"]["demanding"] == "x"
    assert {**new, "ppo_mine.py": entries["ppo_mine.py"]} == entries


def test_missing_parent_is_found(tree):
    edit(tree, "from ppo.py: nothing", "from ppo_gone.py: nothing")
    assert over_budget(tree) == "Differs names ppo_gone.py, but there is no such file"


# ---------------------------------------------------------------------- the command
def test_check_prints_a_line_for_each_problem(tree, solo):
    set_budget(tree)
    edit(tree, "import torch\n", "import torch\nimport ppo\n")
    code, out, _ = solo("check", "ppo_mine")
    lines = out.splitlines()
    assert code == 1
    form = re.compile(r"algorithms/ppo/ppo_mine\.py:\d+: (R\d|header|PEP 723|flags): \S")
    assert all(form.match(line) for line in lines[:-1])
    assert lines[-1] == f"{len(lines) - 1} problems in 1 of 1 files" and len(lines) > 2


def test_check_shows_problems_of_the_named_files_only(tree):
    edit(tree, "gamma * lam * alive[t]", "gamma * lam * (1 - done[t])")
    assert any(problem.rule == "R2" for problem in problems_of([tree]))
    assert not any(problem.path == tree for problem in problems_of([tree.with_name("ppo.py")]))


def test_check_is_content_with_the_real_files(solo):
    code, out, _ = solo("check")
    assert code == 0 and out.endswith("no problems\n"), out


def test_set_budget_says_what_it_did(tree, solo):
    code, out, _ = solo("check", "--set-budget", "ppo_mine")
    assert (code, out) == (0, "ppo_mine.py differs from ppo.py in 4 lines, which is its budget now\n")


# ---------------------------------------------------------------------- files of a user's own, outside of the catalogue
@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder of a user's own; the package lies elsewhere with the algorithms inside it, as a wheel installs it."""
    package, home = tmp_path / "site" / "solorl", tmp_path / "somewhere" / "home"
    shutil.copytree(REAL, package / "algorithms", ignore=shutil.ignore_patterns("__pycache__"))
    home.mkdir(parents=True)
    monkeypatch.setattr(scripts, "PACKAGE", package)
    monkeypatch.chdir(home)
    assert not scripts.in_checkout()
    return home


@pytest.mark.parametrize("name", ["ppo", "ppo_normalized", "ppo_jax", "rpo_continuous_action", "dqn"])
def test_a_plain_copy_passes(home, solo, name):
    """Roots, variants and demanding files, under their own names and under others."""
    for target in (f"{name}.py", "mine.py"):
        assert solo("copy", name, target)[0] == 0
        assert solo("check", target)[:2] == (0, "1 file, no problems\n")


@pytest.mark.parametrize("name", ["ppo", "ppo_normalized", "td3_continuous_action_jax"])
def test_a_new_variant_passes_without_a_budget(home, solo, name):
    assert solo("new", "mine", "--from", name)[0] == 0
    assert "solo train mine.py" in (home / "mine.py").read_text()
    assert solo("check", "mine.py")[:2] == (0, "1 file, no problems\n")
    assert solo("new", "second", "--from", "mine.py")[0] == 0
    assert solo("check", "second.py", "mine.py")[:2] == (0, "2 files, no problems\n")
    assert not list(home.parent.rglob(budget.TABLE))


def test_a_plain_copy_in_a_checkout_passes(tree, solo, tmp_path):
    assert solo("copy", "ppo_normalized", "mine.py")[0] == solo("check", "mine.py")[0] == 0


def test_an_own_file_is_checked_against_the_catalogue(home, solo):
    """Also where a file of the parent's name lies next to it."""
    solo("new", "mine", "--from", "ppo_normalized")
    solo("copy", "ppo")
    edit(home / "ppo.py", "gamma * lam * alive[t]", "gamma * lam * (1 - done[t])")
    assert solo("check", "mine.py")[0] == 0
    edit(home / "mine.py", "gamma * lam * alive[t]", "gamma * lam * (1 - done[t])")
    edit(home / "mine.py", "import torch\n", "import ppo\nimport dqn\nimport torch\n")
    edit(home / "mine.py", "ppo/README.md", "ppo/NOTHING.md")
    code, out, _ = solo("check", "mine.py")
    assert code == 1 and out.endswith("6 problems in 1 of 1 files\n"), out
    assert "R2: gae is not the gae of ppo.py; rename it, or repair it: solo diff ppo mine.py\n" in out
    assert "R1: imports ppo," in out and "R1: imports dqn," in out and "no file algorithms/ppo/NOTHING.md" in out
    assert "imports ppo, but the dependencies" in out and "imports dqn, but the dependencies" in out
    assert "R3" not in out


def test_an_own_file_needs_a_parent_that_exists_and_no_budget(home, solo):
    solo("new", "mine", "--from", "ppo")
    edit(home / "mine.py", "from ppo.py:", "from ppo_gone.py:")
    assert "R3: Differs names ppo_gone.py, but there is no such file" in solo("check", "mine.py")[1]
    refused(solo("check", "--set-budget", "mine.py"), "mine.py is not in a folder of algorithms")
    assert not list(home.parent.rglob(budget.TABLE))


def test_own_files_that_name_each_other_as_parents_end(home, solo):
    solo("new", "mine", "--from", "ppo")
    solo("new", "second", "--from", "mine.py")
    edit(home / "mine.py", "from ppo.py:", "from second.py:")
    assert budget.origin_of(catalog.parse_header(home / "mine.py")) is None
    assert solo("check", "mine.py", "second.py")[:2] == (0, "2 files, no problems\n")


def test_new_from_an_own_file_in_a_checkout_goes_to_the_family_it_comes_from(tree, solo, tmp_path):
    (tmp_path / "my-files").mkdir()
    assert solo("copy", "dqn", "my-files/base.py")[0] == 0
    assert solo("new", "mine", "--from", "my-files/base.py")[0] == 0
    assert (tmp_path / "algorithms" / "dqn" / "mine.py").is_file()


def test_the_installed_catalogue_passes(home, solo):
    assert solo("check")[0] == 0


def test_the_next_commands_can_be_pasted(home, solo):
    """A source that is no algorithm of the catalogue is named by its path, quoted."""
    (home / "my files").mkdir()
    solo("copy", "ppo", "my files/base.py")
    out = solo("new", "mine", "--from", "my files/base.py")[1]
    assert "  solo train mine.py\n  solo diff 'my files/base.py' mine.py\n  solo check mine.py " in out
