"""Every command printed in README and docs works: all of them are run here, shortened where they train."""

import ast
import importlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment

from solorl import scripts
from solorl.catalog import budget, rules
from solorl.catalog import header as catalog

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "algorithms").glob("*/README.md"))
SHORT = "--total-timesteps 2100 --eval-episodes 1".split()
# Run elsewhere: these set up the environment in which the tests run, or take many minutes.
ELSEWHERE = {"make train", "make test", "make lint", "make bench", "pip install ."}


def commands(page):
    """The commands of all ```bash blocks of a page, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.S)
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of what the commands read, so that nothing lands in the checkout."""
    copy = tmp_path_factory.mktemp("docs") / "checkout"
    ignore = shutil.ignore_patterns(".venv", ".git", "runs", "__pycache__", "results")
    shutil.copytree(ROOT, copy, ignore=ignore)
    return copy


def shell(command, folder):
    python = shlex.quote(sys.executable)
    command = re.sub(r"^solo ", f"{python} -m solorl.cli ", command)
    command = re.sub(r"^python ", f"{python} ", command)
    env = environment(PYTHONPATH=f"{folder}:{folder / 'tests'}", MUJOCO_GL="egl")
    return subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "page",
    [page if page.parent == ROOT else pytest.param(page, marks=pytest.mark.slow) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_command_works(page, folder):
    seen = commands(page)
    for command in seen:
        if command in ELSEWHERE or command.startswith("pip install"):
            continue
        if re.match(r"(solo train|python (algorithms/|my_))", command):
            command += " " + " ".join(SHORT)
        done = shell(command, folder)
        assert done.returncode == 0, f"{page.name}: {command}\n{done.stdout}\n{done.stderr}"


def test_make_targets_of_the_readme_exist_and_are_dry_runnable():
    for command in ELSEWHERE:
        if command.startswith("make"):
            done = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0 and done.stdout, done.stderr


RESULTS = runpy.run_path(str(ROOT / "docs/results.py"))


@pytest.mark.parametrize("entry", RESULTS["TABLES"], ids=lambda entry: f"{entry[0]}-{entry[1]}")
def test_results_are_those_of_the_data(entry):
    """Table and picture are what `solo report` makes of the committed results now."""
    words = [*RESULTS["words"](*entry), "--check"]
    done = subprocess.run(
        [sys.executable, "-m", "solorl.cli", *words], cwd=ROOT, env=environment(), capture_output=True
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


def test_the_report_is_that_of_the_data():
    """It has the headline and the table of README, which the test above compares with the same data."""
    shown = re.search(r"<!-- results -->\n(.*?)<!-- /results -->", (ROOT / "README.md").read_text(), flags=re.S)[1]
    lines = [line for line in shown.splitlines() if line.startswith(("|", "**"))]
    report = (ROOT / RESULTS["REPORT"][3] / "report.md").read_text().splitlines()
    assert len(lines) == 11 and set(lines) <= set(report)


def test_every_table_of_results_is_made_from_data():
    """No page has one that `docs/results.py` does not make."""
    made = {(page, marker) for page, marker, *_ in RESULTS["TABLES"]}
    for page in PAGES:
        for marker, table in re.findall(r"<!-- ([\w-]+) -->\n(.*?)<!-- /\1 -->", page.read_text(), flags=re.S):
            if "Interquartile mean" in table:
                assert (str(page.relative_to(ROOT)), marker) in made


def test_every_algorithm_has_its_row():
    """In README and on its family's page."""
    for path in (ROOT / "algorithms").glob("*/*.py"):
        assert f"({path.relative_to(ROOT)})" in (ROOT / "README.md").read_text(), path.name
        assert f"({path.name})" in (path.parent / "README.md").read_text(), path.name


def test_the_sizes_of_diffs_on_the_pages_are_measured():
    """The last column of a family's first table, and that a header names no file that does not exist."""
    for script in catalog.scripts():
        page = (script.path.parent / "README.md").read_text()
        size = re.search(rf"^\| \[`{script.path.name}`\].*\| (.*?) \|$", page, flags=re.M)[1]
        names = "` and `".join(script.parents)
        wanted = f"{budget.measure(script)[0]} of `{names}`" if names else "–"
        assert size == wanted, script.path.name
        for other in script.not_for.values():
            assert Path(other).stem in scripts.script_paths(), f"{script.path.name} names {other}"


@pytest.mark.parametrize(
    ("page", "marker", "benchmark", "data"),
    [
        ("README.md", "speed", "ppo_speed", "ppo"),
        ("README.md", "jax", "jax_speed", "jax"),
        ("algorithms/ppo/README.md", "speed", "ppo_speed", "ppo_halfcheetah"),
        ("algorithms/ppo/README.md", "wide", "jax_speed", "jax_wide"),
        ("algorithms/ppo/README.md", "rejax", "jax_speed", "jax_rejax"),
        ("algorithms/ppo/README.md", "start", "jax_start", "jax_start"),
        ("algorithms/dqn/README.md", "speed", "dqn_speed", "dqn"),
        ("algorithms/actor_critic/README.md", "speed", "actor_critic_speed", "actor_critic"),
        ("algorithms/actor_critic/README.md", "jax-speed", "jax_speed", "jax_actor_critic"),
    ],
)
def test_speed_tables_are_those_of_the_data(page, marker, benchmark, data):
    """The table on the page follows from benchmark/results/speed."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    table = importlib.import_module(benchmark).table(ROOT / f"benchmark/results/speed/{data}.json")
    assert f"<!-- {marker} -->\n{table}\n<!-- /{marker} -->" in (ROOT / page).read_text()


def defined(path):
    """The functions, classes, methods (`Actor.forward`) and settings of an algorithm file."""
    tree = ast.parse(path.read_text())
    found = set(rules.fields_of(tree, "Args"))
    for name, node in rules.definitions(tree).items():
        inner = rules.definitions(node) if isinstance(node, ast.ClassDef) else {}
        found |= {name, *(f"{name}.{each}" for each in inner)}
    return found


def test_names_linked_on_the_pages_are_in_the_files():
    """[`gae`](ppo.py) leads to a file that defines gae."""
    for page in (ROOT / "algorithms").glob("*/README.md"):
        found = re.findall(r"\[`([\w.]+)`\]\((\w+\.py)([^)]*)\)", page.read_text())
        named = [(name, file) for name, file, _ in found if name != file]
        assert len(named) >= 8 and not any(place for _, _, place in found), page
        assert [each for each in named if each[0] not in defined(page.parent / each[1])] == [], page


def test_links_of_every_page_lead_somewhere():
    for page in [*PAGES, ROOT / "LOG.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_files_named_in_the_pages_exist():
    for page in PAGES:
        for name in re.findall(r"`((?:tests|benchmark|docs|algorithms)/[\w/.]+\.\w+)`", page.read_text()):
            assert (ROOT / name).exists() or "mine" in name, f"{page.name}: {name}"


def test_inline_dependencies_name_what_a_script_imports():
    """The PEP 723 block of every script is complete: `uv run` on a copied file installs all it needs."""
    import tomllib

    for path in (ROOT / "algorithms").glob("*/*.py"):
        text = path.read_text()
        block = re.match(r"# /// script\n((?:# .*\n)+?)# ///", text)
        meta = tomllib.loads("".join(line[2:] + "\n" for line in block[1].splitlines()))
        names = {re.match(r"[\w-]+", dependency)[0].lower() for dependency in meta["dependencies"]}
        imported = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
        assert imported - set(sys.stdlib_module_names) <= names, path
        assert meta["requires-python"] == ">=3.11"


def test_no_page_names_a_path_of_somebodys_machine():
    for page in [*PAGES, ROOT / "LOG.md", *Path(ROOT / "solorl").rglob("*.py")]:
        assert not re.search(r"/(home|root|Users|work)/\w", page.read_text()), page


def test_the_picture_of_the_terminal_shows_what_is_printed():
    """The line about the device, a bar, more than one colour; no error."""
    text = (ROOT / "docs/terminal.svg").read_text()
    assert "device&#160;cpu,&#160;1&#160;thread" in text and "━" in text
    assert len(set(re.findall(r"terminal-\d+-(r\d+) {", text))) >= 4
    assert "play it" in text.replace("&#160;", " ") and "error" not in text and "warning" not in text
