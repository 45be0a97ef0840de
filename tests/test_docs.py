"""Every command printed in README and docs works: all of them are run here, shortened where they train."""

import ast
import functools
import importlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tokenize
import tomllib
from dataclasses import replace
from pathlib import Path

import forked
import pytest
from conftest import ROOT, documented_keys, environment, section

from solorl import __version__, scripts
from solorl.catalog import header as catalog
from solorl.catalog.header import definitions, fields_of
from solorl.lab.results.result import Result
from solorl.lab.studies import plan
from tools.claims import PROVIDERS
from tools.source import code_lines

LOG = sorted((ROOT / "docs/log").glob("20*.md"))  # a page for each day, which stays as it was written
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md"))]
PAGES += [page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in LOG]
OWN_PAGES = sorted((ROOT / "docs/algorithms").glob("*.md"))  # of the algorithm files
PAGES += [ROOT / "algorithms/README.md", *sorted((ROOT / "algorithms").glob("*/README.md"))]
SHORT = "--total-timesteps 2100 --eval-episodes 1".split()
FEW = "--num-envs 8 --num-minibatches 1".split()  # of files whose iteration has more steps than SHORT
# Run elsewhere: these set up the environment in which the tests run, or take many minutes.
ELSEWHERE = {"make train", "make test", "make lint", "make bench", "pip install ."}
DESIGN = "docs/design.md"
SHARING = ROOT / "docs/share.md"  # its commands need a hub: tests/lab/share/test_hub.py runs them


def commands(page):
    """The commands of all ```bash blocks of a page, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.S)
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of what the commands read, so that nothing lands in the checkout."""
    copy = tmp_path_factory.mktemp("docs") / "checkout"
    ignore = shutil.ignore_patterns(".venv", ".git", "runs", "__pycache__")
    data = str(ROOT / "benchmark")
    shutil.copytree(ROOT, copy, ignore=lambda at, names: {*ignore(at, names), *({"results"} if at == data else ())})
    return copy


def python_blocks(page):
    """The texts of all ```python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)


def shell(command, folder):
    env = environment(PYTHONPATH=f"{folder}:{folder / 'tests'}", MUJOCO_GL="egl")
    if command.startswith("solo ") and not re.search("[|&;<>$*?~]", command):
        return forked.run("solorl.cli", shlex.split(command)[1:], folder, env, folder.parent / "output.txt")
    python = shlex.quote(sys.executable)
    command = re.sub(r"^solo ", f"{python} -m solorl.cli ", command)
    command = re.sub(r"^python ", f"{python} ", command)
    return subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "page",
    [page if page.parent == ROOT else pytest.param(page, marks=pytest.mark.slow) for page in PAGES if page != SHARING],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_command_works(page, folder):
    """In a folder that has the modules which the page shows: blocks of code that begin with `# name.py`."""
    seen = commands(page)
    for name in ("runs", "data"):  # every page works by itself
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in folder.glob("my_*.py"):
        path.unlink()
    for block in python_blocks(page):
        if name := re.match(r"# (\w+\.py)\n", block):
            (folder / name[1]).write_text(block)
    for command in seen:
        if command in ELSEWHERE or command.startswith("pip install"):
            continue
        if re.search("--(teacher|expert|dataset) ", command):  # test_qdagger.py, test_imitation.py, test_offline.py
            continue
        if re.match("python benchmark/offline_data.py.* --out|solo dataset import", command):  # tests of data sets
            continue
        if re.match("solo (dash|repro)", command):  # until Ctrl+C, hours: test_dash.py, test_repro.py
            continue
        command = re.sub("--steps [0-9]+", "--steps 80", command)
        if re.match(r"(solo train|python (algorithms/|my_))", command):
            command += " " + " ".join([*SHORT, *FEW * bool(re.search("minatar|ippo|mappo|procgen|_rnd", command))])
            command += " --warmup-rollouts 1" * ("_rnd" in command)
            if "procgen" in command:  # a rollout of the defaults takes minutes
                command += " --num-steps 32 --total-timesteps 256" + " --policy-iterations 1" * ("ppg" in command)
        done = shell(command, folder)
        assert done.returncode == 0, f"{page.name}: {command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "docs/using.md"])
def test_the_code_that_uses_a_trained_model_works(name, folder):
    shutil.rmtree(folder / "mine", ignore_errors=True)
    done = shell(f"solo train ppo --env-id Acrobot-v1 --runs-dir mine --seed 2 {' '.join(SHORT)}", folder)
    assert done.returncode == 0, done.stderr
    [run_dir] = (folder / "mine").glob("*")
    blocks = [block for block in python_blocks(ROOT / name) if '"runs/' in block]
    assert len(blocks) == {"README.md": 1, "docs/using.md": 2}[name]
    for block in blocks:
        (folder / "block.py").write_text("import solorl\n" + re.sub(r'runs/[^/"]+', str(run_dir), block))
        done = shell("python block.py", folder)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_make_targets_of_the_readme_exist_and_are_dry_runnable():
    for command in ELSEWHERE:
        if command.startswith("make"):
            done = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize(("version", "fits"), [("3, 10", False), ("3, 11", True), ("3, 14", True), ("3, 15", False)])
def test_make_says_which_python_it_needs(tmp_path, version, fits):
    """One line, before anything is made or fetched; a Python that fits goes on to `venv`."""
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    say = f"import sys; sys.version_info = ({version}, 0, 'final', 0); exec(sys.argv[1])"
    python = tmp_path / "other"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || exit 7\nexec "{sys.executable}" -c "{say}" "$2"\n')
    python.chmod(0o755)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    command = ["make", ".venv/.run", "PYTHON=./other"]  # as typed in a shell, also where `make test` runs this test
    done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True)
    shown = f"SoloRL needs Python 3.11 to 3.14, but ./other is {version.replace(', ', '.')}; name another one: "
    assert done.returncode == 2 and (shown not in done.stderr) == fits, done.stderr
    assert "PYTHON=" in (ROOT / "README.md").read_text() and not (tmp_path / ".venv").exists()
    if not fits:
        assert done.stdout == "" and len(done.stderr.splitlines()) == 2  # the sentence, and make's own


def test_the_address_of_the_project_is_the_same_everywhere():
    """So that one commit fills it in when it is known."""
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    texts = {name: (ROOT / name).read_text() for name in ("README.md", "CITATION.cff", "docs/guides/cite.md")}
    assert f"`git clone {address}`" in texts["README.md"]
    assert f"`git clone {address}`" in (ROOT / "docs/guides/first_hour.md").read_text()
    assert f"\nurl: {address}\nrepository-code: {address}\n" in texts["CITATION.cff"]
    assert f"url     = {{{address}}}" in texts["docs/guides/cite.md"]
    year = re.search(r"date-released: (\d{4})-\d\d-\d\d", texts["CITATION.cff"])[1]
    assert f"year    = {{{year}}}" in texts["docs/guides/cite.md"]
    others = [
        path
        for path in (*PAGES, ROOT / "CITATION.cff")
        if "repository.invalid" in path.read_text().replace(address, "")
    ]
    assert others == []


def test_the_suites_of_the_page_on_studies_are_valid(tmp_path):
    """And it names every key."""
    page = (ROOT / "docs/studies.md").read_text()
    for block in re.findall(r"```toml\n(.*?)```", page, flags=re.S):
        (tmp_path / "clip.toml").write_text(block)
        found = plan.load_suite(tmp_path / "clip.toml", {})
        assert found.name == "clip" and len(found.tasks) == 2 * 3 * 10 and found.tasks[0].variant == "default"
    named = {*re.findall(r"`(\w+)`", "".join(line for line in page.splitlines() if line.startswith("| `")))}
    assert {*plan.JOB_KEYS, "name", "in_order", "engine", "job"} <= named


RESULTS = runpy.run_path(str(ROOT / "docs/results.py"))


@pytest.mark.parametrize("entry", RESULTS["TABLES"], ids=lambda entry: f"{entry[0]}-{entry[1]}")
def test_results_are_those_of_the_data(entry):
    page, marker, words = entry
    table = RESULTS["pages"].table(page, words)
    assert f"<!-- {marker} -->\n{table}\n<!-- /{marker} -->" in (ROOT / page).read_text(), "run python docs/results.py"


def test_a_part_is_put_between_its_markers(tmp_path):
    """And nothing else of the page changes."""
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- m -->\nold\n<!-- /m -->\nafter <!-- n -->\n")
    RESULTS["put"](page, "m", "new\n| \\1 |")
    assert page.read_text() == "before\n<!-- m -->\nnew\n| \\1 |\n<!-- /m -->\nafter <!-- n -->\n"
    begin, end = "<!-- m -->\n", "<!-- /m -->\n"
    for text in ("nothing", begin, end + begin, begin + end + begin + end, begin + begin + end):
        page.write_text(text)
        with pytest.raises(AssertionError, match="must have the line <!-- m --> once, its end below it"):
            RESULTS["put"](page, "m", "new")
        assert page.read_text() == text


@pytest.mark.parametrize(
    ("variant", "data", "method"),
    [("medium short", "medium", "bc short"), ("medium", "medium", "bc"), ("5 episodes", "5 episodes", "bc")],
)
def test_the_data_set_of_an_offline_run_is_part_of_its_environment(variant, data, method):
    one = RESULTS["with_data"](Result("CartPole-v1", "bc", 1, variant))
    assert (one.env_id, one.name) == (f"CartPole-v1, {data}", method)


def test_the_report_is_that_of_the_data():
    """It has the headline and the first table of results, which the test above compares with the same data."""
    shown = re.search(r"<!-- classic -->\n(.*?)<!-- /classic -->", (ROOT / "docs/results.md").read_text(), flags=re.S)[
        1
    ]
    lines = [line for line in shown.splitlines() if line.startswith(("|", "**"))]
    report = (ROOT / RESULTS["REPORT"][3] / "report.md").read_text().splitlines()
    assert len(lines) == 15 and set(lines) <= set(report)


@pytest.mark.slow
def test_curves_are_those_of_the_data():
    """One picture for each file with results, of at most four lines in a panel, and no other picture."""
    curves = RESULTS["curves"]()
    assert curves.keys() == set((ROOT / "docs/curves").iterdir())
    for path, (_, shown) in curves.items():
        assert RESULTS["pages"].shows(path, shown), f"{path.name}: run python docs/results.py"
        methods = {method for _, method in shown}
        assert len(methods) <= 4 and path.stem in {method.split()[0] for method in methods}


@pytest.mark.slow
def test_every_family_has_a_picture_of_several_methods():
    for path, (_, shown) in RESULTS["families"]().items():
        assert RESULTS["pages"].shows(path, shown), f"{path.name}: run python docs/results.py"
        assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
        assert f"]({path.name})" in path.with_suffix(".md").read_text()
        files = [script for script in catalog.scripts() if script.family == path.stem]
        assert len({method for _, method in shown}) > 1 or len(files) == 1


HEADINGS = ["When to take it", "Can I use?", "Implementation details", "Differences from CleanRL", "Results"]
HEADINGS += ["Logged metrics"]


@pytest.mark.parametrize("algorithm", catalog.scripts(), ids=lambda each: each.name)
def test_every_algorithm_has_its_page(algorithm):
    """What a page must have: title, what it is, the command of the header, links to file and family, when to take it,
    what it can be used for, details, CleanRL, the curve with its numbers, metrics; in this order."""
    text = (ROOT / f"docs/algorithms/{algorithm.name}.md").read_text()
    assert text.startswith(f"# {algorithm.name}\n\n") and re.match(r"[A-Z\[`]", text.splitlines()[2])
    assert re.findall(r"```bash\n(.*?)\n```", text, flags=re.S) == [algorithm.run]
    file, family = (
        f"algorithms/{algorithm.family}/{algorithm.name}.py",
        f"../../algorithms/{algorithm.family}/README.md",
    )
    assert f"\nFile: [`{file}`](../../{file}) of [" in text and f"]({family})" in text
    titles = [title for title in re.findall(r"^## (.*)$", text, flags=re.M) if title in HEADINGS]
    assert titles == HEADINGS and section(text, "Results").strip()
    assert section(text, "Logged metrics").startswith(f"\n[Those of every file]({family}#logged-metrics)")
    pictures = re.findall(r"^!\[.*?\]\(\.\./curves/(.*?)\.png\)$", text, flags=re.M)
    assert pictures == [algorithm.name] * (ROOT / f"docs/curves/{algorithm.name}.png").exists()
    assert f"(../results/{algorithm.family}.md#" in text or not pictures
    if algorithm.twin:
        assert documented_keys(algorithm.name) == documented_keys(Path(algorithm.twin).stem)


def test_a_page_gets_its_part_results_and_its_curve():
    """As soon as there are data; a second time nothing changes."""
    script = next(script for script in catalog.scripts() if (ROOT / f"docs/curves/{script.name}.png").exists())
    bare = "# x\n\n## Logged metrics\n\nrows\n"
    made = RESULTS["with_results"](bare, script)
    picture = f"![Learning curves of {script.name}](../curves/{script.name}.png)"
    assert f"\n## Results\n\n{picture}\n" in made and made.endswith("\n## Logged metrics\n\nrows\n")
    assert RESULTS["with_results"](made, script) == made
    none = RESULTS["with_results"](bare, replace(script, name="nobody"))
    assert f"\n## Results\n\n{RESULTS['NO_RUN']}\n" in none


def details(page):
    """The numbers of the implementation details on a page."""
    return [int(number) for number in re.findall(r"^(\d+)\. \*\*", page.read_text(), flags=re.M)]


def test_details_of_a_page_are_numbered_in_turn():
    """From 1 on each page; all are on the pages of the files."""
    found = {page.stem: details(page) for page in OWN_PAGES}
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in found.values()), found
    assert sum(map(bool, found.values())) > 40
    assert not any(details(page) for page in (ROOT / "algorithms").glob("**/*.md"))


def test_there_is_no_page_without_its_file():
    assert {page.stem for page in OWN_PAGES} == {script.name for script in catalog.scripts()}


def test_pages_and_results_of_a_family_lead_to_each_other():
    for log in RESULTS["LOGS"]:
        page = f"algorithms/{Path(log).stem}/README.md"
        assert f"(../../{log})" in (ROOT / page).read_text() and f"(../../{page})" in (ROOT / log).read_text()
    assert {Path(log).stem for log in RESULTS["LOGS"]} == {each.family for each in catalog.scripts()}


def test_every_table_of_results_is_made_from_data():
    """No page has one that `docs/results.py` does not make."""
    made = {(page, marker) for page, marker, *_ in RESULTS["TABLES"]}
    for page in PAGES:
        for marker, table in re.findall(r"<!-- ([\w-]+) -->\n(.*?)<!-- /\1 -->", page.read_text(), flags=re.S):
            if "Interquartile mean" in table:
                assert (str(page.relative_to(ROOT)), marker) in made


def test_every_algorithm_has_its_row():
    """In the table of all and on its family's page."""
    for path in (ROOT / "algorithms").glob("*/*.py"):
        assert f"({path.parent.name}/{path.name})" in (ROOT / "algorithms/README.md").read_text(), path.name
        assert f"({path.name})" in (path.parent / "README.md").read_text(), path.name


# each takes 2 to 4 seconds
@pytest.mark.parametrize(
    ("page", "marker"),
    [
        pytest.param(page, marker, marks=[pytest.mark.slow] if str(page).startswith("docs") else [])
        for page, marker in RESULTS["blocks"]()
    ],
)
def test_generated_parts_are_those_of_the_data(page, marker):
    """Tables of speed and the table of algorithms follow from data and headers."""
    block = RESULTS["blocks"]()[page, marker]()
    text = (ROOT / page).read_text()
    assert f"<!-- {marker} -->\n{block}\n<!-- /{marker} -->" in text, "run python docs/results.py"


@pytest.mark.slow  # reads all data and the history of all files
def test_the_proof_is_that_of_the_data():
    for (page, marker), block in RESULTS["proof"]().items():
        text = (ROOT / page).read_text()
        assert f"<!-- {marker} -->\n{block}\n<!-- /{marker} -->" in text, "run python docs/results.py"


def test_readme_design_and_lessons_are_short():
    """And the design has no long line: it is read in a terminal, too."""
    lines = {name: (ROOT / name).read_text().splitlines() for name in ("README.md", DESIGN, "docs/log/README.md")}
    assert all(len(each) <= most for each, most in zip(lines.values(), (75, 150, 120), strict=True)), lines.keys()
    assert [line for line in lines[DESIGN] if len(line) > 120] == []


def test_every_day_of_the_log_is_in_its_contents():
    """And a page has entries of its own day only."""
    contents = (ROOT / "docs/log/README.md").read_text()
    for page in LOG:
        assert f"]({page.name})" in contents
        days = re.findall(r"^## (\d{4}-\d\d-\d\d)", page.read_text(), flags=re.M)
        assert days and {*days} == {page.stem}, page.name


def test_the_version_is_the_same_everywhere():
    """In the package, the citation and as the newest of the changelog."""
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"version = {{{__version__}}}" in (ROOT / "docs/guides/cite.md").read_text()
    versions = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert versions[0] == __version__ and len(versions) == len({*versions}) > 1


def test_the_builders_stay_small():
    """Those of pages, pictures and the site together."""
    builders = [*(ROOT / "docs").glob("*.py"), *(ROOT / "docs/site").glob("*.py")]
    assert sum(code_lines(path.read_text()) for path in builders) <= 1100


USES = importlib.import_module("uses")  # RESULTS has put its folder on the path
# What a table "Can I use?" must say, by hand: memory, masks, environments, resuming, exporting.
SAVED, EITHER = "`--save-replay`", "episodes in those of EnvPool"
CAN_USE = {
    "ppo": ("no", "no", "by default 4", "yes; exact", "yes: ONNX"),
    "ppo_lstm": ("yes", "no", "by default 32", "yes; exact", "yes: ONNX"),
    "ppo_trxl": ("yes", "no", "by default 32", "yes; exact", "yes: ONNX"),
    "ppo_masked": ("no", "required", "by default 4", "yes; exact", "no: masks"),
    "ppo_multidiscrete": ("no", "yes, if", "by default 4", "yes; exact", "no: masks"),
    "ppo_dict": ("no", "no", "by default 4", "yes; exact", "no: several spaces"),
    "ppo_image_continuous_action": ("no", "no", "by default 8", "yes; exact", "yes: ONNX"),
    "ppo_lstm_continuous_action": ("yes", "no", "by default 32", "yes; exact", "yes: ONNX"),
    "ppo_dict_continuous_action": ("no", "no", "by default 8", "yes; exact", "no: several spaces"),
    "ppo_jax": ("no", "no", "by default 4", EITHER, "yes: StableHLO"),
    "ppo_lstm_jax": ("yes", "no", "by default 32", EITHER, "yes: StableHLO"),
    "ppo_atari_envpool": ("no", "no", "by default 8", "episodes begin again", "yes: ONNX"),
    "sac_continuous_action": ("no", "no", "by default 1", SAVED, "yes: ONNX"),
    "sac_her": ("no", "no", "by default 1", SAVED, "no: several spaces"),
    "dqn_atari": ("no", "no", "by default 1", SAVED, "yes: ONNX"),
    "apex_dqn": ("no", "no", "`--num-actors`", "`--synchronous --save-replay`", "yes: ONNX"),
    "mappo": ("no", "yes, if", "by default 128", "yes; exact", "no: masks"),
    "qmix": ("yes", "yes, if", "by default 8", SAVED, "no: masks"),
    "td3_bc": ("no", "no", "the data set", "yes; exact", "yes: ONNX"),
    "grpo": ("no", "no", "`--num-prompts`, by default 32", "yes; exact", "yes: ONNX"),
}
SEEN_AND_DONE = {
    "ppo": ("vectors", "`Discrete`"),
    "ppo_dict": ("`Dict` of vectors and images", "`Discrete`"),
    "sac_dict": ("`Dict` of vectors and images", "`Box`"),
    "dqn_her": ("`Dict` with goals", "`Discrete`"),
    "ppo_dict_continuous_action": ("`Dict` of vectors and images", "`Box`"),
    "ppo_image_continuous_action": ("images", "`Box`"),
    "ppo_hybrid": ("vectors", "`Tuple`, of Discrete and Box"),
    "ppo_multidiscrete": ("vectors", "`MultiDiscrete`"),
    "ppo_masked": ("vectors", "`Discrete`"),
    "dqn_atari": ("images", "`Discrete`"),
    "ppo_atari_lstm": ("images, one frame", "`Discrete`"),
    "mappo": ("vectors", "`Discrete`, of each agent"),
    "maddpg": ("vectors", "`Box` or `Discrete`, of each agent"),
    "bc": ("vectors", "`Box` or `Discrete`"),
    "gail": ("vectors", "`Box` or `Discrete`"),
    "ppo_continuous_action_batched": ("vectors in batches of tensors", "`Box`"),
    "grpo": ("vectors: the tokens of a prompt", "`MultiDiscrete`"),
    "ppo_minatar_jax": ("vectors: MinAtar's planes", "`Discrete`"),
}


@pytest.mark.parametrize("name", CAN_USE)
def test_what_a_file_can_be_used_for_is_what_its_source_does(name):
    rows = USES.uses(catalog.parse_header(catalog.find_path(name)))
    found = [rows[what] for what in ("memory", "action masks", "several environments", "resume", "export")]
    assert all(words in answer for words, answer in zip(CAN_USE[name], found, strict=True)), found
    assert [answer == "no" for answer in found[:2]] == [words == "no" for words in CAN_USE[name][:2]]
    assert SAVED in found[3] or SAVED not in CAN_USE[name][3]
    assert ("save-replay" in found[3]) == ("save-replay" in CAN_USE[name][3])


@pytest.mark.parametrize("name", SEEN_AND_DONE)
def test_spaces_of_a_file_are_told_by_gymnasiums_names(name):
    rows = USES.uses(catalog.parse_header(catalog.find_path(name)))
    assert (rows["observations"], rows["actions"]) == SEEN_AND_DONE[name]


def test_what_a_file_is_not_made_for_names_the_other_file():
    rows = USES.uses(catalog.parse_header(catalog.find_path("ppo")))
    assert rows["Atari games"] == "no: [`ppo_atari.py`](ppo_atari.md)"
    assert all(Path(link).stem in scripts.script_paths() for link in re.findall(r"\((\w+\.md)\)", str(rows)))


@pytest.mark.parametrize("algorithm", catalog.scripts(), ids=lambda each: each.name)
def test_every_page_says_what_its_file_can_be_used_for(algorithm):
    """By header and source as they are now; where it is not there, or old, the builder puts it in its place."""
    page = (ROOT / f"docs/algorithms/{algorithm.name}.md").read_text()
    assert USES.with_uses(page, algorithm) == page, "run python docs/results.py"
    old = page.replace("\n| memory |", "\n| memories |")
    without = re.sub(r"^## Can I use\?\n.*?(?=^## )", "", page, flags=re.M | re.S)
    assert old != page != without
    assert USES.with_uses(old, algorithm) == USES.with_uses(without, algorithm) == page


@pytest.mark.parametrize("family", sorted({script.family for script in catalog.scripts()}))
def test_the_page_of_a_family_says_which_file_to_take(family):
    """It is short, and names each of its files with a link to the page."""
    text = (ROOT / f"algorithms/{family}/README.md").read_text()
    assert len(text.split()) < 3000
    assert {"Which file?", "Files", "What all files share", "Logged metrics"} <= set(
        re.findall(r"^## (.*)$", text, flags=re.M)
    )
    choice = section(text, "Which file?")
    for script in catalog.scripts():
        page = f"../../docs/algorithms/{script.name}.md"
        assert script.family != family or (f"[`{script.name}`]({page})" in choice and text.count(f"({page})") >= 2), (
            script.name
        )


def test_sizes_and_times_on_the_pages_of_families_are_measured():
    """The last two columns of a family's table, and that a header names no file that does not exist."""
    for script in catalog.scripts():
        page = (script.path.parent / "README.md").read_text()
        assert RESULTS["with_sizes"](page, script) == page, f"{script.path.name}: run python docs/results.py"
        for other in scripts.not_for(script.fields).values():
            assert Path(other).stem in scripts.script_paths(), f"{script.path.name} names {other}"


def test_a_benchmark_that_was_not_run_says_so():
    assert RESULTS["speed"]("contrib_speed", "no_such_file") == "Not measured yet."
    assert RESULTS["speed"]("contrib_speed", "contrib").startswith("| ")


def defined(path):
    """The functions, classes, methods (`Actor.forward`) and settings of an algorithm file."""
    tree = ast.parse(path.read_text())
    found = set(fields_of(tree, "Args"))
    for name, node in definitions(tree).items():
        inner = definitions(node) if isinstance(node, ast.ClassDef) else {}
        found |= {name, *(f"{name}.{each}" for each in inner)}
    return found


def test_names_linked_on_the_pages_are_in_the_files():
    """[`gae`](../../algorithms/ppo/ppo.py) leads to a file that defines gae."""
    count = 0
    for page in [*OWN_PAGES, *(ROOT / "algorithms").glob("*/README.md")]:
        found = re.findall(r"\[`([\w.]+)`\]\(((?:[\w.]+/)*\w+\.py)([^)]*)\)", page.read_text())
        named = [(name, file) for name, file, _ in found if not name.endswith(".py")]
        assert not any(place for _, _, place in found), page
        assert [each for each in named if each[0] not in defined(page.parent / each[1])] == [], page
        count += len(named)
    assert count > 100


def test_links_of_every_page_lead_somewhere():
    for page in [*PAGES, *LOG]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def anchors(page):
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    titles = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, flags=re.M)]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_anchors_in_links_are_headings():
    for page in [*PAGES, *LOG]:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            there = page.parent / target if target else page
            assert there.exists() and anchor in anchors(there), f"{page.name}: {target}#{anchor}"


def test_files_named_in_the_pages_exist():
    for page in PAGES:
        for name in re.findall(r"`((?:tests|benchmark|docs|algorithms)/[\w/.]+\.\w+)`", page.read_text()):
            assert (ROOT / name).exists() or "mine" in name, f"{page.name}: {name}"


def test_the_page_on_environments_names_the_offline_files_that_normalise_nothing():
    text = " ".join((ROOT / "docs" / "environments.md").read_text().split())
    told = text.partition("with the statistics of the data, `offline`")[2].partition(";")[0]
    files = sorted((ROOT / "algorithms" / "offline").glob("*.py"))
    raw = [path.stem for path in files if not re.search("standardi[sz]e", path.read_text(), re.IGNORECASE)]
    assert raw and re.findall(r"`(\w+)`", told) == raw


def test_inline_dependencies_name_what_a_script_imports():
    """The PEP 723 block of every script is complete: `uv run` on a copied file installs all it needs."""
    import tomllib

    for path in (ROOT / "algorithms").glob("*/*.py"):
        text = path.read_text()
        block = re.match(r"# /// script\n((?:# .*\n)+?)# ///", text)
        meta = tomllib.loads("".join(line[2:] + "\n" for line in block[1].splitlines()))
        names = {re.match(r"[\w-]+", dependency)[0].lower().replace("-", "_") for dependency in meta["dependencies"]}
        names |= {module for module, given in PROVIDERS.items() if names & {one.replace("-", "_") for one in given}}
        imported = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
        assert imported - set(sys.stdlib_module_names) <= names, path
        assert meta["requires-python"] == ">=3.11"


def test_no_page_names_a_path_of_somebodys_machine():
    for page in [*PAGES, *LOG, *Path(ROOT / "solorl").rglob("*.py")]:
        assert not re.search(r"/(home|root|Users|work)/\w", page.read_text()), page


def test_the_picture_of_the_terminal_shows_what_is_printed():
    """The line about the device, a bar, more than one colour; no error."""
    text = (ROOT / "docs/terminal.svg").read_text()
    assert "device&#160;cpu,&#160;1&#160;thread" in text and "━" in text
    assert len(set(re.findall(r"terminal-\d+-(r\d+) {", text))) >= 4
    assert "play it" in text.replace("&#160;", " ") and "error" not in text and "warning" not in text


# Words that are not plain English where these texts use them, and what to write instead.
GLOSSARY = {
    r"\bbehind\b": "after",
    r"\banew\b": "again",
    r"\bbut for\b": "except",
    r"\bbesides?\b": "next to, compared with",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bof before\b": "previous",
    r"\ba (\w+ )?reading\b": "a review",
    r"\basked: \d": "target: ",
    r"\bstep sizes?\b": "learning rate",
    r"\bunasked\b": "without being told to",
    r"\bthe very\b (?!last|first)": "the same",
    r"\bnobody knows\b": "it is unknown",
}
# Patterns of a dialect, and the standard terms instead. They are for what users read: pages, library and files.
TERMS = {
    r"(?<!there )\b(is|are) no (?!longer\b|more\b|less\b|better\b|deeper\b|other\b)[a-z]\w*": "is not a",
    r"\b(go|goes|going) on\b": "continue",
    r"\bshare of\b(?! products\b)": "fraction of",
    r"\bthe least\b": "the smallest",
    r"\bpresent (weights|policy)\b": "current",
    r"\bso many\b": "the number of",
    r"\bfalls (linearly|over|to|towards|with)\b": "decays",
    r"# of (R?Adam|RMSProp)$": "learning rate of Adam",
    r"(\. |\*\*)(?-i:What (was|ends|waits))\b": "name the thing",
    r"\bgraphics cards?\b": "GPU",
    r"\b(are parted|parts \w+ from)\b": "decouple",
    r"\bhas come damaged\b": "is corrupted",
}
MEANT = {"solorl/run/verbs.py": "behind a few verbs", DESIGN: "behind a few verbs"}  # that is the place
PLAIN_SINCE = "2026-11-23"  # pages of the log before this day stay as they were


@functools.cache
def texts():
    """Path -> text of all that must be plain English."""
    paths = [*PAGES, *(page for page in LOG if page.stem >= PLAIN_SINCE)]
    for folder, pattern in (("docs", "*.py"), ("solorl", "**/*.py"), ("benchmark", "*.py")):
        paths += sorted((ROOT / folder).glob(pattern))
    found = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    tests = [path for path in sorted((ROOT / "tests").rglob("*.py")) if "faults" not in path.parent.parts[-2:-1]]
    for path in [*sorted((ROOT / "algorithms").glob("*/*.py")), *tests]:
        found[str(path.relative_to(ROOT))] = remarks(path.read_text())
    return found


def remarks(source):
    """The comments and docstrings of a module, each on its line."""
    lines = [""] * (source.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] += token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            for number, line in enumerate(node.body[0].value.value.splitlines(), node.body[0].lineno):
                lines[number - 1] += line
    return "\n".join(lines)


def odd_words(text, glossary=GLOSSARY):
    """(line, words, what to write instead) wherever a text has an entry of the glossary."""
    for word, better in glossary.items():
        for match in re.finditer(word, text, flags=re.I | re.M):
            yield text.count("\n", 0, match.start()) + 1, match[0], better


def test_the_texts_are_plain_english_with_standard_terms():
    known = texts()
    found = {name: list(odd_words(text.replace(MEANT.get(name, "\0"), ""))) for name, text in known.items()}
    assert {name: odd for name, odd in found.items() if odd} == {}
    not_ours = r"tests/|benchmark/|docs/(log/20|results/)"
    found = {name: [*odd_words(text, TERMS)] for name, text in known.items() if not re.match(not_ours, name)}
    assert {name: odd for name, odd in found.items() if odd} == {}
    assert list(odd_words("All was well,\nbut for one.")) == [(2, "but for", "except")]
    source = 'x = "behind"\n\n\ndef f():\n    """Shapes\n    beside."""\n    return x  # anew\n'
    assert [(line, word) for line, word, _ in odd_words(remarks(source))] == [(7, "anew"), (6, "beside")]

    wrong = """x is no flag, there is no file; this is no longer so. It goes on: a share of the steps, the least
of them, so many, with its present weights, falls linearly. What ends is replaced. A graphics card pays.
lr: float = 1  # of Adam
Ape-X parts playing from learning, and the file has come damaged."""
    assert len({better for _, _, better in odd_words(wrong, TERMS)}) == len(TERMS)
    assert next(word for _, word, _ in odd_words(wrong, TERMS)) == "is no flag"
