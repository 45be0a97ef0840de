"""The rules of the algorithm files: kept by all of them, and each seen to fail where it is broken."""

import ast
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, refused

from solorl import cli, scripts
from solorl.catalog import header as catalog
from tools import budget, claims, rules, square
from tools.check import problems_of
from tools.main_block import beginnings, main_block, rebound, root
from tools.source import Source, code_lines, split_header

REAL = ROOT / "algorithms"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of the real algorithms in a checkout of its own, with a sibling of ppo.py to break; returns its path."""
    (tmp_path / "pyproject.toml").write_text("")
    shutil.copytree(REAL, tmp_path / "algorithms", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / scripts.PAGES, tmp_path / scripts.PAGES)
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


def test_files_keep_the_rules_between_them():
    assert [str(problem) for problem in rules.check_together(list(scripts.script_paths().values()))] == []


def test_the_table_names_files_that_exist():
    """Budgets of files with parents, and reasons for files that need them."""
    found = {script.path.name: script for script in catalog.scripts()}
    tables = budget.read_table(REAL / scripts.BUDGETS)
    assert set(tables["diff"]) == {name for name, script in found.items() if script.parents}
    assert all(code_lines(found[name].path.read_text()) > rules.MAX_CODE_ROOT for name in tables["long"])


def test_each_family_has_a_root_and_each_parent_exists():
    found = catalog.scripts()
    family = {script.path.name: script.family for script in found}
    for name in set(family.values()):  # a root, or a file whose parent is in another family
        assert any(family.get(script.parent) != name for script in found if script.family == name), name
    assert all(catalog.find_named(script, name) for script in found for name in script.parents)


# ---------------------------------------------------------------------- rules about one file, each broken once
MAIN = 'if __name__ == "__main__":\n'
SIX_DEEP = "def deep(x):\n" + "".join(f"{'    ' * i}if x:\n" for i in range(1, 6)) + f"{'    ' * 6}pass\n\n\n{MAIN}"
SEVEN_DEEP = MAIN + "".join(f"{'    ' * i}if True:\n" for i in range(1, 7)) + f"{'    ' * 7}pass\n"
BREAKS = {
    "import of another algorithm": ("import torch\n", "import ppo\nimport torch\n", "R1: imports ppo, another"),
    "import from another algorithm": ("import torch\n", "from ppo import gae\nimport torch\n", "R1: imports ppo"),
    "relative import": ("import torch\n", "from .ppo import gae\nimport torch\n", "R1: imports relative"),
    "long line": ("import torch\n", f"import torch  # {'x' * 105}\n", "R1: the line has 121 characters"),
    "many lines": (MAIN, "x = 1\n" * 250 + MAIN, " lines of code, but may have 240 (320 where [long] of"),
    "deep nesting": (MAIN, SIX_DEEP, "R1: is nested 6 deep, but may be 5"),
    "deep nesting in the main block": (MAIN, SEVEN_DEEP, "R1: is nested 7 deep, but may be 6"),
    "missing key": ("Spaces    vector", "Space     vector", "header: the header has no line Spaces"),
    "value in the wrong column": ("Paper     Sch", "Paper  Sch", "header: the header has no line Paper"),
    "no docstring": ('"""Proximal', 'x = """Proximal', "header: has no header"),
    "command of another file": ("solo train ppo_mine", "solo train ppo", "header: Run must start with"),
    "command in other words": ("solo train ppo_mine", "python ppo_mine.py", "header: Run must start with"),
    "unknown flag in the command": ("--env-id Cart", "--env-idd Cart", "unknown flag --env-idd; did you mean env_id?"),
    "no such page": ("s/ppo_mine.md", "s/NOTHING.md", "header: there is no file docs/algorithms/NOTHING.md"),
    "page of another file": ("s/ppo_mine.md", "s/ppo.md", "header: Details must name the file's own page, docs/alg"),
    "no parent": ("from ppo.py: nothing", "nothing", "header: Differs must say"),
    "no script metadata": ("# /// script", "# script", "PEP 723: the file must start with"),
    "script metadata not first": ("# /// script", "# hello\n# /// script", "PEP 723: the file must start with"),
    "broken script metadata": ("dependencies = [", "dependencies = ", "PEP 723: the block is not TOML"),
    "no version of Python": ("requires-python", "requires-pyton", "PEP 723: the block has no requires-python"),
    "missing dependency": ('"numpy>=1.26,<3", ', "", "PEP 723: imports numpy, but the dependencies do not name numpy"),
    "missing library": ('"solorl>=0.1", ', "", "PEP 723: imports solorl, but"),
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
        MAIN,
        f"from solorl.checkpoints.checkpoint import sha256\n\n{MAIN}    sha256(1)\n",
        "R5: calls sha256 of the library",
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


# ---------------------------------------------------------------------- what a checkpoint holds is not bound again
LOOP = """
    lives = np.zeros(2)
    start = run.resume(agent=agent, {given})
    for iteration in run.loop(start, 3):
        agent.act()
        {line}
        run.save(3)
"""


def rebinding(line, given="lives=lives", before=""):
    """The names that a loop binds again, with their lines in it."""
    text = MAIN + before + LOOP.format(line=line, given=given)
    first = text[: text.index("agent.act")].count("\n") + 1
    return [(name, number - first) for name, number in rebound(main_block(ast.parse(text)))]


@pytest.mark.parametrize(
    "line",
    ["lives = x", "a, (b, lives) = x", "a, *lives = x", "lives: int = x", "a = lives = x", "print(lives := x)",
     "for lives in x: pass", "for a, lives in x: pass", "with x as lives: pass", "if x: lives = x",
     "agent = lives = x"],
)  # fmt: skip
def test_a_name_that_a_checkpoint_holds_is_not_bound_again(line):
    assert ("lives", 1) in rebinding(line)


@pytest.mark.parametrize(
    "line",
    ["lives[:] = x", "a, lives[:] = x", "lives[0] = x", "lives.x = x", "lives += x", "others = lives", "next_lives = x",
     "x = [0 for lives in x]", "np.copyto(lives, x)"],
)  # fmt: skip
def test_what_a_checkpoint_holds_can_be_changed_in_place(line):
    assert rebinding(line) == []


def test_parts_of_a_checkpoint_may_stand_in_a_dict():
    before = "    parts = dict(other=lives, agent=agent)\n    parts |= dict(more=state)\n"
    assert rebinding("state = lives = parts = x", "**parts", before=before) == [("state", 1), ("lives", 1)]
    assert rebinding("lives = x", "other=other") == []


def plumbing(text):
    """Lines of code of a file's main block, and of those the statements whose value is a call of `run.`."""
    block, lines = main_block(ast.parse(text)), text.splitlines()
    if block is None:
        return 0, 0

    def count(first, last):
        return sum(not line.strip().startswith("#") and bool(line.strip()) for line in lines[first - 1 : last])

    found = 0
    for node in ast.walk(block):
        calls = [each for each in beginnings(node) if isinstance(each, ast.Call) and root(each.func) == "run"]
        end = node.lineno if isinstance(node, ast.For) else getattr(node, "end_lineno", 0)
        found += count(node.lineno, end) if calls else 0
    return count(block.lineno + 1, block.end_lineno or 0), found


def test_lines_of_plumbing_are_counted():
    text = 'if __name__ == "__main__":\n    run = Run(args)\n    # why\n    a = run.b(\n        1\n    )\n'
    text += "    for i in run.loop(3):\n"
    text += "        x = i\n        run.save(\n            i\n        )\n"
    assert plumbing(text) == (9, 7)


def test_main_blocks_are_about_the_algorithm():
    """Design: at most 30 % of their lines are plumbing; it only falls."""
    found = [plumbing(catalog.read_source(script.path)) for script in catalog.scripts()]
    assert sum(lines for _, lines in found) <= 0.311 * sum(lines for lines, _ in found)


def test_the_main_block_may_nest_one_level_deeper(tree):
    """A delayed step that is repeated stands in two loops, a condition and a loop, with a condition in it."""
    before = messages(rules.check_file(tree))
    edit(tree, MAIN, SEVEN_DEEP.replace("    " * 6 + "if True:\n" + "    " * 7, "    " * 6))
    assert messages(rules.check_file(tree)) == before


def test_elif_is_no_nesting():
    source = "if a:\n    pass\n" + "".join(f"elif a == {i}:\n    pass\n" for i in range(9)) + "else:\n    pass\n"
    assert {depth for depth, _ in rules.depths(ast.parse(source).body)} == {1}


def test_every_kind_of_block_nests():
    source = "try:\n  for x in y:\n    with z:\n      while 1:\n        match x:\n          case _:\n"
    source += "            if x: pass\nexcept E:\n  if x:\n    pass\nelse:\n  pass\n"
    tree = ast.parse(source)
    assert max(depth for depth, _ in rules.depths(tree.body)) == 6
    assert (2, 9) in list(rules.depths(tree.body))


CODE = '''# /// script
"""Title
over two lines."""

import os  # a comment


# free
class A:
    """One line."""

    def f(self):
        r"""Three

        lines."""
        text = """not

        free"""
        return (
            text  # after code

        )


async def g(): "the docstring and the code of one line"
'''


def test_comments_docstrings_and_blank_lines_are_free():
    """Counted by hand: import, class, def, text (3 lines), return (3, its blank line is free), async def."""
    assert code_lines(CODE) == 10
    assert code_lines("") == code_lines("# x\n\n") == 0
    assert code_lines('"""Title."""\n"""no docstring\n"""\n') == 2


def of_length(path, count):
    """Fill a file up to `count` lines of code; the sentences of R1 about it."""
    more = count - code_lines(path.read_text())
    edit(path, MAIN, "x = 1  # y\n# free\n\n" * more + MAIN)
    assert code_lines(path.read_text()) == count
    return [message for message in messages(rules.check_file(path)) if "lines of code" in message]


@pytest.mark.parametrize(("name", "limit"), [("ppo", 180), ("ppo_mine", 240), ("ppo_jax", 240)])
def test_roots_variants_and_files_in_jax_have_limits(tree, name, limit):
    path = tree.with_name(f"{name}.py")
    assert of_length(path, limit) == []
    (sentence,) = of_length(path, limit + 1)
    assert sentence.startswith(f"R1: has {limit + 1} lines of code, but may have {limit} (320 where [long] of")


def test_a_reason_in_the_table_allows_more_lines(tree):
    assert len(of_length(tree, 241)) == 1
    table = tree.parent.parent / scripts.BUDGETS
    budget.write_table(table, budget.read_table(table) | {"long": {"ppo_mine.py": "it is a test"}})
    assert of_length(tree, 320) == []
    assert of_length(tree, 321) == ["R1: has 321 lines of code, but may have 320"]


def test_name_in_two_families_is_found(tree):
    (tree.parent.parent / "other").mkdir()
    shutil.copy(tree, tree.parent.parent / "other" / tree.name)
    assert "header: the name is taken by other/ppo_mine.py" in messages(rules.check_file(tree))


def test_plumbing_flags_are_those_of_the_library():
    assert {"track", "seed", "device", "capture_video", "runs_dir"} <= rules.PLUMBING
    assert "learning_rate" not in rules.PLUMBING


# ---------------------------------------------------------------------- R2 and R3, on files made up
FILE = '''"""{name}.

Spaces    {spaces}
Differs   {differs}
{more}"""

{imports}
{body}'''
F = "def f(x):\n    return x\n\n\n"
MAKE_ENV = "def make_env(env_id):\n    return env_id\n\n\n"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """`made("fam/a.py", body, differs=..., spaces=..., jax=False)` writes a file into a checkout of its own."""
    folder = tmp_path / "algorithms"
    folder.mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    (folder / scripts.BUDGETS).write_text("")
    monkeypatch.setattr(scripts, "PACKAGE", tmp_path / "solorl")
    monkeypatch.chdir(tmp_path)

    def write(name, body, differs="root of its family", spaces="vector -> discrete", jax=False, more=""):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        imports = "import jax\n" if jax else "import torch\n"
        path.write_text(
            FILE.format(name=path.stem, spaces=spaces, differs=differs, more=more, imports=imports, body=body)
        )
        return path

    return write


def between(rule, path=None):
    """The problems of a rule between all files of the catalogue, or of one of them."""
    found = rules.check_together(list(scripts.script_paths().values()))
    return [problem for problem in found if problem.rule == rule and path in (None, problem.path)]


def test_same_name_same_body(made):
    """In every family; the sentence gives the command that repairs all of them."""
    root = made("fam/root.py", F)
    others = [made("fam/b.py", "x = 1\n" + F, "from root.py: x"), made("other/c.py", F), made("third/d.py", F)]
    assert between("R2") == []
    edit(others[2], "return x", "return -x")
    edit(root, "return x", "return x + 1")
    found = between("R2")
    assert [problem.path for problem in found] == [others[2], root]  # the first root, c.py, is the measure
    assert str(found[1]).startswith(f"{root}:9: R2: f is not the f of c.py; rename it, or repair it: solo ")
    assert cli.main(found[1].text.rpartition(": solo ")[2].split()) == 0
    assert between("R2") == [] and all("return x\n" in path.read_text() for path in [root, *others])


def test_formatting_exempt_names_and_other_frameworks_may_differ(made):
    made("fam/root.py", F + "class Args:\n    x = 1\n")
    made("fam/b.py", F.replace("x)", " x )  # other") + "class Args:\n    x = 2\n", "from root.py: x")
    made("other/c_jax.py", F.replace("return x", "return -x"), jax=True)
    assert between("R2") == []
    made("other/d_jax.py", F.replace("return x", "return 2 * x"), jax=True)
    assert len(between("R2")) == 1
    assert all(reason for reason in rules.EXEMPT.values())


def test_environments_are_equal_where_the_spaces_are(made, solo):
    other = MAKE_ENV.replace("return env_id", "return Scaled(env_id)")
    made("fam/root.py", MAKE_ENV)
    b = made("other/b.py", other, spaces="vector -> continuous")
    c = made("other/c.py", other, spaces="vector -> continuous")
    d = made("other/d_jax.py", MAKE_ENV, spaces="vector -> continuous", jax=True)
    made("third/e.py", MAKE_ENV, spaces="vector -> continuous")  # another family may scale otherwise
    assert between("R2") == []
    edit(c, "Scaled", "Clipped")
    assert [(problem.path, problem.text[:35]) for problem in between("R2")] == [
        (c, "make_env is not the make_env of b.p")
    ]
    assert solo("sync", "make_env", "--from", "b")[:2] == (0, "synced: make_env in algorithms/other/c.py\n")
    assert between("R2") == [] and "Scaled" in b.read_text() and "Scaled" not in d.read_text()


def set_budget(path):
    """`solo check --set-budget` for a file."""
    return budget.set_budget(catalog.parse_header(path))


def test_diff_budget_holds(made):
    made("fam/root.py", F)
    b = made("fam/b.py", F, "from root.py: x")
    (problem,) = between("R3")
    assert "differs from root.py in 4 lines and has no budget; `solo check --set-budget b`" in problem.text
    assert b.read_text().splitlines()[problem.line - 1].startswith("Differs ")
    assert set_budget(b) == (4, 10) and between("R3") == []
    edit(b, F, F + "x = 1\n" * 6)
    assert between("R3") == []
    edit(b, F, F + "x = 2\n")
    (problem,) = between("R3")
    assert "differs from root.py in 11 lines, budget 10; make the diff smaller, or" in problem.text
    assert set_budget(b) == (11, 20) and between("R3") == []
    edit(b, "x = 1\n" * 6, "")
    assert between("R3") == [] and set_budget(b) == (5, 10)


def test_the_page_of_a_file_does_not_count_in_its_diff(made):
    root = made("fam/root.py", F, more="Details   docs/algorithms/root.md\n")
    b = made("fam/b.py", F, "from root.py: x", more="Details   docs/algorithms/b.md\n")
    assert budget.measure(catalog.parse_header(b))[0] == 4
    edit(root, "Details ", "Paper   ")
    assert budget.measure(catalog.parse_header(b))[0] == 5


def test_missing_parent_is_found(made):
    made("fam/b.py", F, "from gone.py: x")
    assert [problem.text for problem in between("R3")] == ["Differs names gone.py, but there is no such file"]


def test_budget_keeps_the_other_entries(made):
    made("fam/root.py", F)
    b = made("fam/b.py", F, "from root.py: x")
    table = b.parent.parent / scripts.BUDGETS
    tables = {"diff": {"z.py": 30}, "long": {"y.py": 'says "why" — ü'}}
    budget.write_table(table, tables)
    set_budget(b)
    assert budget.read_table(table) == {"diff": {"b.py": 10, "z.py": 30}, "long": tables["long"]}
    assert table.read_text().index('"b.py" = 10\n"z.py" = 30\n') < table.read_text().index("[long]")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[diff]\n"b.py" = 15\n', "the budget of b.py must be a multiple of 10, but is 15"),
        ('[diff]\n"b.py" = -10\n', "must be a multiple of 10"),
        ('[diff]\n"b.py" = true\n', "must be a multiple of 10"),
        ('[long]\n"b.py" = " "\n', "must say why b.py may be longer"),
        ('"b.py" = { lines = 20 }\n', "has an entry b.py; it may have [diff] and [long]"),
        ("[diff\n", "is not TOML"),
    ],
)
def test_a_table_that_says_something_else_is_refused(made, solo, text, sentence):
    made("fam/root.py", F)
    b = made("fam/b.py", F, "from root.py: x")
    (b.parent.parent / scripts.BUDGETS).write_text(text)
    refused(solo("check", "b"), sentence)


# ---------------------------------------------------------------------- R3: two parents
LINES = [f"x{i} = {i}" for i in range(20)]


def lines(**changed):
    """The body of a file: twenty lines, some of them other ones."""
    return "".join(f"{changed.get(line.split()[0], line)}\n" for line in LINES)


@pytest.fixture
def corners(made):
    """The four files of a square; returns the fourth."""
    made("fam/root.py", lines())
    made("fam/left.py", lines(x2="left"), "from root.py: left")
    made("other/right.py", lines(x15="right"), "from root.py: right")
    path = made("fam/both.py", lines(x2="left", x15="right"), "from left.py, right.py: both")
    for name in ("left", "right", "both"):
        set_budget(scripts.script_paths()[name])
    return path


def test_the_merge_of_two_parents_gives_the_file(corners):
    assert catalog.parse_header(corners).parents == ["left.py", "right.py"]
    assert budget.read_table(corners.parent.parent / scripts.BUDGETS)["diff"]["both.py"] == 0
    assert between("R3") == []
    edit(corners, "Spaces    vector", "Spaces    image")  # the header is its own
    edit(corners, '"""both.', '# /// script\n# ///\n"""Both, over\ntwo lines.')
    assert between("R3") == []


def test_a_file_that_is_not_the_merge_of_its_parents_is_found(corners):
    edit(corners, "x7 = 7\n", "x7 = 8\nmore\n")
    (problem,) = between("R3", corners)
    number = corners.read_text().splitlines().index("x7 = 8") + 1
    assert problem.text.startswith(
        "differs from the merge of left.py and right.py in 3 lines "
        f"(line {number} has `x7 = 8` where the merge has `x7 = 7`), budget 0; "
    )
    assert set_budget(corners) == (3, 10) and between("R3") == []


def test_a_fix_of_one_parent_must_reach_the_fourth_file(corners):
    edit(corners.with_name("left.py"), "x9 = 9", "x9 = 10")
    (problem,) = between("R3", corners)
    assert "in 2 lines" in problem.text and "has `x9 = 9` where the merge has `x9 = 10`" in problem.text


def test_all_lines_of_a_conflict_count(corners, made):
    """Both parents change x2: two lines in conflict, and one line in their place."""
    made("other/right.py", lines(x2="right"), "from root.py: right")
    for body in (lines(x2="left"), lines(x2="right"), lines(x2="both")):
        made("fam/both.py", body, "from left.py, right.py: both")
        assert budget.measure(catalog.parse_header(corners))[0] == 3
    (problem,) = between("R3", corners)
    assert "has `both` where the merge has a conflict" in problem.text


def test_one_parent_may_come_from_the_other(corners, made):
    path = made("fam/three.py", lines(x2="left", x15="right"), "from left.py, both.py: nothing")
    assert budget.measure(catalog.parse_header(path)) == (0, "")


def test_parents_must_have_a_common_file(corners, made):
    made("third/lonely.py", lines())
    path = made("fam/three.py", lines(), "from left.py, lonely.py: x")
    sentences = [problem.text for problem in between("R3", path)]
    assert sentences == ["Differs names left.py and lonely.py, which come from no common file"]
    edit(path, "lonely.py:", "right.py, root.py:")
    assert [problem.text for problem in between("R3", path)] == ["Differs names 3 parents, but may name two at most"]
    edit(path, "right.py, root.py:", "gone.py:")
    assert [problem.text for problem in between("R3", path)] == ["Differs names gone.py, but there is no such file"]


def test_parents_in_a_circle_end(made):
    made("fam/left.py", F, "from right.py: x")
    made("fam/right.py", F, "from left.py: x")
    path = made("fam/both.py", F, "from left.py, right.py: both")
    assert budget.measure(catalog.parse_header(path))[0] == 0


def test_d3qn_is_a_square():
    """Dueling and double DQN, each a change of DQN, merged: the file, except its header."""
    found = {script.name: script for script in catalog.scripts()}
    assert square.square(*(found["d3qn"], found["dueling_dqn"].path, found["double_dqn"].path))[0] == 0


# ---------------------------------------------------------------------- R3: relatives
NEW = "".join(f"y{i} = {i}\n" for i in range(60))


def test_a_file_that_is_mostly_new_names_relatives(made):
    """Not a parent; it needs no budget, but is not a root: its limit is that of a variant."""
    made("fam/root.py", F)
    made("fam/other.py", "z = 1\n")
    b = made("fam/b.py", F + NEW, "from root.py: x")
    (problem,) = between("R3", b)
    assert problem.text == (
        "has more than two thirds of its lines not from root.py; write `Differs   relatives root.py: ...`"
    )
    b = made("fam/b.py", F + NEW, "relatives root.py, other.py: x")
    script = catalog.parse_header(b)
    assert script.relatives == ["root.py", "other.py"] and script.parents == [] and between("R3", b) == []
    assert not any("Differs must say" in problem.text for problem in rules.check_file(b))
    assert catalog.origins(b) == ["root", "other"]
    edit(b, NEW, "x = 1\n" * (rules.MAX_CODE_ROOT + 20))
    assert not any("lines of code" in problem.text for problem in rules.check_file(b))
    edit(b, "x = 1\n", "x = 1\n" * (rules.MAX_CODE - rules.MAX_CODE_ROOT))
    assert any("lines of code, but may have 240" in problem.text for problem in rules.check_file(b))


def test_a_relative_that_could_be_a_parent_is_found(made):
    made("fam/root.py", F)
    b = made("fam/b.py", F, "relatives root.py: x")
    (problem,) = between("R3", b)
    assert "has much of root.py, so that it is a parent and no relative" in problem.text
    edit(b, "relatives root.py", "relatives gone.py")
    assert [problem.text for problem in between("R3", b)] == ["Differs names gone.py, but there is no such file"]


# ---------------------------------------------------------------------- Twin
def test_a_file_in_jax_may_name_its_twin_in_torch(made):
    made("fam/a.py", F)
    path = made("other/a_jax.py", F, jax=True, more="Twin      a.py\n")
    script = catalog.parse_header(path)
    assert script.twin == "a.py" and claims.bad_twin(script) == ""
    assert catalog.parse_header(made("other/b_jax.py", F, jax=True)).twin is None


@pytest.mark.parametrize(
    ("name", "jax", "twin", "sentence"),
    [
        ("b", False, "a.py", "only files in JAX name a Twin"),
        ("b", True, "gone.py", "Twin names gone.py, but there is no such file"),
        ("b", True, "", "Twin names nothing, but there is no such file"),
        ("b", True, "a_jax.py", "Twin names a_jax.py, which is in JAX, too"),
    ],
)
def test_a_wrong_twin_is_found(made, name, jax, twin, sentence):
    made("fam/a.py", F)
    made("fam/a_jax.py", F, jax=True)
    path = made(f"fam/{name}.py", F, jax=jax, more=f"Twin      {twin}\n")
    found = [problem for problem in rules.check_file(path) if sentence in problem.text]
    assert len(found) == 1 and path.read_text().splitlines()[found[0].line - 1].startswith("Twin ")


def test_a_new_variant_has_no_twin(tree, solo):
    edit(tree.with_name("ppo_jax.py"), "Differs ", "Twin      ppo.py\n          and more\nDiffers ")
    assert solo("new", "mine", "--from", "ppo_jax")[0] == 0
    script = catalog.parse_header(tree.with_name("mine.py"))
    assert script.twin is None and script.parents == ["ppo_jax.py"] and "and more" not in script.path.read_text()


# ---------------------------------------------------------------------- the command
def test_check_prints_a_line_for_each_problem(tree, solo):
    solo("check", "--set-budget", "ppo_mine")
    edit(tree, "import torch\n", "import torch\nimport ppo\n")
    code, out, _ = solo("check", "ppo_mine")
    lines = out.splitlines()
    assert code == 1
    form = re.compile(r"algorithms/ppo/ppo_mine\.py:\d+: (R\d|header|PEP 723|flags): \S")
    assert all(form.match(line) for line in lines[:-1])
    assert lines[-1] == f"{len(lines) - 1} problems in 1 of 1 files" and len(lines) > 2


@pytest.mark.slow
def test_check_shows_problems_of_the_named_files_only(tree):
    edit(tree, "gamma * lam * (1 - done[t])", "gamma * lam * alive[t]")
    assert any(problem.rule == "R2" for problem in problems_of([tree]))
    assert not any(problem.path == tree for problem in problems_of([tree.with_name("ppo.py")]))


def test_check_is_content_with_the_real_files(solo):
    code, out, _ = solo("check")
    assert code == 0 and out.endswith("no problems\n"), out


def test_set_budget_says_what_it_did(tree, solo):
    code, out, _ = solo("check", "--set-budget", "ppo_mine")
    assert (code, out) == (0, "ppo_mine.py differs from ppo.py in 4 lines; its budget is 10 now\n")


# ---------------------------------------------------------------------- files of a user's own, outside of the catalogue
@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder of a user's own, far from the checkout from which the package runs."""
    package, home = tmp_path / "site" / "solorl", tmp_path / "somewhere" / "home"
    shutil.copytree(REAL, package.parent / "algorithms", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / scripts.PAGES, package.parent / scripts.PAGES)
    shutil.copytree(ROOT / "solorl/args", package / "args", ignore=shutil.ignore_patterns("__pycache__"))
    (package.parent / "pyproject.toml").write_text("")
    home.mkdir(parents=True)
    monkeypatch.setattr(scripts, "PACKAGE", package)
    monkeypatch.chdir(home)
    assert scripts.in_checkout()
    return home


PLAIN = ["ppo_normalized", "ppo_jax", "rpo_continuous_action", "dqn"]


@pytest.mark.parametrize("name", ["ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in PLAIN)])
def test_a_plain_copy_passes(home, solo, name):
    """Roots and variants, under their own names and under others."""
    for target in (f"{name}.py", "mine.py"):
        assert solo("copy", name, target)[0] == 0
        assert solo("check", target)[:2] == (0, "1 file, no problems\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_normalized", "ppo", "td3_continuous_action_jax"])
def test_a_new_variant_passes_without_a_budget(home, solo, name):
    assert solo("new", "mine", "--from", name)[0] == 0
    assert "solo train mine.py" in (home / "mine.py").read_text()
    assert solo("check", "mine.py")[:2] == (0, "1 file, no problems\n")
    assert solo("new", "second", "--from", "mine.py")[0] == 0
    assert solo("check", "second.py", "mine.py")[:2] == (0, "2 files, no problems\n")
    assert not list(home.parent.rglob(scripts.BUDGETS))


def test_a_plain_copy_in_a_checkout_passes(tree, solo, tmp_path):
    assert solo("copy", "ppo_normalized", "mine.py")[0] == solo("check", "mine.py")[0] == 0


def test_a_changed_body_in_an_own_file_is_a_note(home, solo):
    """Which stands against the catalogue's, also where a file of the parent's name lies next to it."""
    solo("new", "mine", "--from", "ppo_normalized")
    solo("copy", "ppo")
    edit(home / "ppo.py", "gamma * lam * (1 - done[t])", "gamma * lam * alive[t]")
    assert solo("check", "mine.py")[0] == 0
    edit(home / "mine.py", "gamma * lam * (1 - done[t])", "gamma * lam * alive[t]")
    line = "note: gae is not the gae of ppo.py: solo diff ppo mine.py\n"
    code, out, _ = solo("check", "mine.py")
    assert code == 0 and line in out and out.endswith("1 file, no problems\n") and out.count("\n") == 2


def test_an_own_file_is_checked_for_what_helps_its_author(home, solo):
    """It may be long and import what lies next to it; header, metadata, `run.` lines and resuming must be right."""
    solo("new", "mine", "--from", "ppo")
    solo("copy", "ppo")
    text = (home / "mine.py").read_text() + "def more():\n" + "    print()\n" * 200 + "    #" + "." * 150 + "\n"
    (home / "mine.py").write_text(text)
    edit(home / "mine.py", "import torch\n", "import ppo\nimport torch\n")
    assert solo("check", "mine.py")[:2] == (0, "1 file, no problems\n")
    edit(home / "mine.py", "import torch\n", "import scipy\nimport torch\n")
    edit(home / "mine.py", "algorithms/ppo.md", "algorithms/NOTHING.md")
    edit(home / "mine.py", "    run.close(", "    print(run.close)\n    total = 1 + run.close(")
    edit(home / "mine.py", "        run.save(", "        optimizer = 1\n        run.save(")
    code, out, _ = solo("check", "mine.py")
    assert code == 1 and out.endswith("4 problems in 1 of 1 files\n"), out
    assert "no file docs/algorithms/NOTHING.md" in out and "imports scipy, but the dependencies" in out
    assert "R5: hides run.close" in out and "resume: binds optimizer again" in out


def test_an_own_file_needs_a_parent_that_exists_and_no_budget(home, solo):
    solo("new", "mine", "--from", "ppo")
    edit(home / "mine.py", "from ppo.py:", "from ppo_gone.py:")
    assert "R3: Differs names ppo_gone.py, but there is no such file" in solo("check", "mine.py")[1]
    refused(solo("check", "--set-budget", "mine.py"), "mine.py is not in a folder of algorithms")
    assert not list(home.parent.rglob(scripts.BUDGETS))


def test_own_files_that_name_each_other_as_parents_end(home, solo):
    solo("new", "mine", "--from", "ppo")
    solo("new", "second", "--from", "mine.py")
    edit(home / "mine.py", "from ppo.py:", "from second.py:")
    assert budget.origin_of(catalog.parse_header(home / "mine.py")) is None
    assert solo("check", "mine.py", "second.py")[:2] == (0, "2 files, no problems\n")


def test_new_outside_of_the_checkout_writes_into_the_current_folder(tree, solo, tmp_path, monkeypatch):
    (tmp_path.parent / "away").mkdir()
    monkeypatch.chdir(tmp_path.parent / "away")
    assert solo("new", "mine", "--from", "ppo")[0] == 0
    assert Path("mine.py").is_file() and "Run       solo train mine.py" in Path("mine.py").read_text()
    assert not (tmp_path / "algorithms" / "ppo" / "mine.py").exists()
    assert solo("check", "mine.py")[:2] == (0, "1 file, no problems\n")


def test_new_from_an_own_file_in_a_checkout_goes_to_the_family_it_comes_from(tree, solo, tmp_path):
    (tmp_path / "my-files").mkdir()
    assert solo("copy", "dqn", "my-files/base.py")[0] == 0
    assert solo("new", "mine", "--from", "my-files/base.py")[0] == 0
    assert (tmp_path / "algorithms" / "dqn" / "mine.py").is_file()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("odd", ["\f", "\u2028", "\x85", "\x1c"])
def test_lines_are_those_of_python(odd, end):
    """Where a page or a paragraph ends, Python's line does not."""
    head, docstring = f"# a{odd} comment\n", '"""Title.\n\nPaper     A\nRun       solo train a.py\n"""\n'
    parts = [part.replace("\n", end) for part in (head, docstring, f"x = 'b'  # {odd}\n")]
    text = "".join(parts)
    assert list(split_header(text)) == parts
    assert Source(Path("a.py"), text, ast.parse(text), None).header_line("Run") == 5
    changed = catalog.with_header(text, {"Run": "python a.py"})
    assert changed.replace(end, "\n") == text.replace(end, "\n").replace("solo train", "python")


@pytest.mark.slow
def test_the_installed_catalogue_passes(home, solo):
    assert solo("check")[0] == 0


def test_the_next_commands_can_be_pasted(home, solo):
    """A source that is no algorithm of the catalogue is named by its path, quoted."""
    (home / "my files").mkdir()
    solo("copy", "ppo", "my files/base.py")
    out = solo("new", "mine", "--from", "my files/base.py")[1]
    assert "  solo train mine.py\n  solo diff 'my files/base.py' mine.py\n  solo check mine.py " in out
