"""The documentation site: its links, sources, sizes, and in a browser its scripts, widths and accessibility."""

import html
import json
import re
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from urllib.parse import urldefrag, urlsplit

import browser
import pytest
from conftest import ROOT

from solorl.catalog.header import scripts
from solorl.lab.results import comparison, curves
from solorl.lab.results.read import read_all

sys.path.insert(0, str(ROOT / "docs/site"))

import charts
import diffs
import make_site
import sources
import verbs

SOME = ["ppo", "a2c", "d3qn"]  # a root, its child, a child of two parents
NAMES = ("ppo", "sb3_ppo")
LARGEST = 500_000  # bytes of a page
SCRIPTS = {script.name: script for script in scripts()}


class Links(HTMLParser):
    """What a page names: addresses of links, of what is loaded, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loaded, self.anchors, self.pictures = set(), set(), set(), 0
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.pictures += tag == "img"
        self.anchors.add(attrs.get("id"))
        if tag in ("a", "form"):
            self.links.add(attrs.get("href") or attrs.get("action"))
        self.loaded |= {attrs.get("src"), attrs.get("href") if tag == "link" else None} - {None}


def check(site, folder, whole):
    """Each page is small, each link leads to a page and an anchor that exist, and nothing is loaded from elsewhere."""
    pages = {path: Links(path) for path in folder.rglob("*.html")}
    planned = {make_site.address(name) for name in site.texts()} | {make_site.address(name) for name in site.wanted}
    planned |= {f"algorithms/{name}.html" for name in SCRIPTS}
    planned |= {"index.html", "search.html", "api.html", "lineage.html", "compare.html"}
    for path, page in pages.items():
        assert path.stat().st_size < LARGEST, path
        text = path.read_text()
        assert page.pictures <= text.count("<figcaption>"), f"{path}: a picture without the command that makes it"
        for target in page.loaded - {"data:,"}:
            assert not urlsplit(target).scheme and (path.parent / target).exists(), f"{path} loads {target}"
        for target in page.links:
            if urlsplit(target).scheme:
                continue
            name, anchor = urldefrag(target)
            there = (path.parent / name.partition("?")[0]).resolve() if name else path
            if there in pages:
                assert not anchor or anchor in pages[there].anchors, f"{path}: {target}"
            else:
                known = not whole and there.relative_to(folder.resolve()).as_posix() in planned
                assert known or there.exists(), f"{path}: {target}"
    return pages


@pytest.mark.parametrize("page", sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "algorithms").rglob("*.md")]))
def test_every_picture_has_a_command_that_makes_it_again(page):
    """Without it the site cannot be built."""
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()):
        name = (page.parent / picture).resolve().relative_to(ROOT).as_posix()
        assert [command for start, command in make_site.COMMANDS if name.startswith(start)], name


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    """A part of the site, without charts, whose data take seconds."""
    folder = tmp_path_factory.mktemp("site").resolve()
    site = make_site.Site(folder, SOME)
    site.charts = dict
    for name in SOME:
        site.algorithm(SCRIPTS[name])
    for name in ("docs/using.md", "docs/guides/README.md", "algorithms/dqn/README.md"):
        site.markdown(name)
    site.differences()
    site.api()
    site.front()
    site.write("search.html", "search.html", "Search")
    site.static()
    return SimpleNamespace(site=site, folder=folder)


def test_a_part_of_the_site_has_no_dead_link(part):
    pages = check(part.site, part.folder, whole=False)
    assert len(pages) > len(SOME) + 6


def test_a_file_that_is_not_text_is_copied_and_linked(part):
    (picture,) = sorted((ROOT / "docs/results").glob("ppo.pdf"))
    part.site.file("docs/results/ppo.pdf")
    page = part.folder / make_site.address("docs/results/ppo.pdf")
    there = re.search(r'<a href="([^"]+)"><code>ppo.pdf</code>', page.read_text())[1]
    assert (page.parent / there).read_bytes() == picture.read_bytes()


def test_a_page_has_the_source_and_details_lead_to_its_lines(part):
    text = (part.folder / "algorithms/ppo.html").read_text()
    lines = SCRIPTS["ppo"].path.read_text().splitlines()
    assert len(re.findall(r'<li id="L\d+"', text)) == len(lines)
    line = int(re.search(r'<a href="#L(\d+)"><code>gae</code>', text)[1])
    assert lines[line - 1].startswith("def gae(")
    phase = int(re.search(r'<a href="#L(\d+)">phase\s+3</a>', text)[1])
    assert "# ---- 3. learn" in lines[phase - 1]
    field = int(re.search(r'<a class="quiet" href="#L(\d+)"><code>--no-clip-vloss</code>', text)[1])
    assert "clip_vloss: bool" in lines[field - 1]
    assert 'href="../api.html#Run.gradient_step"' in text and "losses/explained_variance" in text


def test_every_name_in_a_detail_has_its_line():
    """A link from a page to a definition or a phase of an algorithm file, of all algorithms."""
    found, missing = 0, []
    for name in SCRIPTS:
        page = ROOT / f"docs/algorithms/{name}.md"
        assert page.exists(), name
        for words, target in re.findall(r"\[([^\]\[]*)\]\(([^)#]*algorithms/\w+/\w+\.py)\)", page.read_text()):
            words = re.sub(r"\s+", " ", words.replace("`", ""))
            if not words.endswith(".py"):
                found += 1
                missing += [] if sources.line_of((page.parent / target).resolve(), words) else [f"{name}: {words}"]
    assert missing == [], missing
    assert found > 300


def test_marks_and_colours_keep_the_text():
    [line] = sources.coloured("x = foo(1) < 'a&b'", "a.py")
    marked = sources.to_html(line, [("x = fo", False), ("o(1", True), (") < 'a&b'", False)])
    assert re.sub(r"<[^>]+>", "", marked) == "x = foo(1) &lt; 'a&amp;b'"
    assert marked.startswith("x = fo<mark>o(<i ") and "1</i></mark>)" in marked


def test_the_trees_have_every_file_once_and_an_arrow_for_each_parent(part):
    picture = (part.folder / "lineage.html").read_text()
    names = re.findall(r'<a href="algorithms/(\w+)\.html">', picture)
    assert sorted(names) == sorted(SCRIPTS)
    arrows = set(map(html.unescape, re.findall(r'href="(compare\.html\?[^"]+)"', picture)))
    assert arrows == {diffs.address(*pair) for pair in diffs.edges(SCRIPTS)} and len(arrows) > 60
    words = "ppo to a2c: {} lines added, {} removed".format(*diffs.changes(SCRIPTS["ppo"], SCRIPTS["a2c"]))
    assert f'<a href="compare.html?a=ppo&amp;b=a2c" aria-label="{words}">' in picture
    spots = re.findall(r'class="name" x="(\S+)" y="(\S+)"', picture)
    assert len(set(spots)) == len(SCRIPTS)  # no name lies on another one


def test_the_verbs_are_on_the_page_of_the_api(part):
    text = (part.folder / "api.html").read_text()
    assert {"loop", "log", "save", "evaluate", "resume", "close"} <= verbs.of_run()
    for verb in verbs.of_run():
        assert f'id="Run.{verb}"' in text
    assert "--eval-episodes" in text and "def parse" not in text


def test_the_index_finds_words(part):
    entries = part.site.entries
    assert ["algorithms/ppo.html#implementation-details", "ppo", "Implementation details"] in [e[:3] for e in entries]
    assert any("orthogonal" in words.split() for *_, words in entries)


def test_the_commands_below_a_chart_name_what_differs_from_the_defaults():
    args = {"env_id": "X-v0", "gamma": 0.9, "clip_vloss": False, "num_envs": 4, "seed": 2, "eval_every": 7}
    runs = [SimpleNamespace(seed=seed, args=args, env_id="X-v0", together=1) for seed in (3, 2)]
    command = charts.command(runs, SCRIPTS["ppo"])
    assert command == "solo train ppo --env-id X-v0 --gamma 0.9 --no-clip-vloss --seed 2"


def test_a_chart_has_every_curve_by_steps_and_by_time():
    runs, _ = read_all(
        ROOT / f"benchmark/results/classic/CartPole-v1__{name}__{i}.json.gz" for name in NAMES for i in (1, 2)
    )
    compared = comparison.compare(runs, "eval")
    drawn = {axis: curves.curves(compared, "eval", axis) for axis in ("steps", "time")}
    data = charts.Chart(SCRIPTS["ppo"], compared, drawn["steps"]).data()
    [panel] = data["panels"]
    assert panel["title"] == "CartPole-v1" and sorted(data["methods"]) == sorted(NAMES)
    for axis, of_methods in drawn.items():
        assert {data["methods"][line["m"]] for line in panel["lines"][f"eval {axis}"]} == set(NAMES)
        for line in panel["lines"][f"eval {axis}"]:
            curve = of_methods["CartPole-v1", data["methods"][line["m"]]]
            assert line["x"] == pytest.approx(curve.x.tolist(), rel=1e-4)
            assert line["y"] == pytest.approx(curve.y.tolist(), rel=1e-4)
            assert line["seeds"].keys() == {"1", "2"} and len(line["lo"]) == len(line["hi"]) == len(line["x"])


def test_a_chart_of_several_files_has_the_own_curve_of_each():
    """On the task that was chosen, with its colour; a file without data is left out."""
    found = {}
    for name in ("ppo", "a2c"):
        runs, _ = read_all(ROOT / f"benchmark/results/classic/CartPole-v1__{each}__1.json.gz" for each in NAMES)
        runs = [replace(run, script=name, method=name) if run.script == "ppo" else run for run in runs]
        compared = comparison.compare(runs, "eval")
        found[name] = charts.Chart(SCRIPTS[name], compared, curves.curves(compared, "eval", "steps"))
    data, bands = charts.chosen(found, [("ppo", "CartPole-v1"), ("c51", "CartPole-v1"), ("a2c", "CartPole-v1")])
    assert data["methods"] == ["ppo", "a2c"] and bands == set()
    for number, panel in enumerate(data["panels"]):
        assert panel["title"] == f"{data['methods'][number]}, CartPole-v1"
        assert [[line["m"] for line in lines] for lines in panel["lines"].values()] == [[number], [number]]


def test_the_first_page_says_how_to_get_the_project(part):
    """As README does."""
    text, readme = (part.folder / "index.html").read_text(), (ROOT / "README.md").read_text()
    [command] = re.findall(r"`(git clone \S+)`", readme)
    assert f"<code>{command}\ncd solorl\nmake train</code>" in text and "\nmake train " in readme
    assert "<code>pip install .</code>" in text and "`pip install .`" in readme


def test_what_scrolls_sideways_has_a_name_and_can_be_reached_by_keyboard(part):
    count = 0
    for path in part.folder.rglob("*.html"):
        regions = re.findall(r'<div class="scroll[^"]*"([^>]*)>', path.read_text())
        labels = [re.fullmatch(r' tabindex="0" role="region" aria-label="([^"]+)"', each)[1] for each in regions]
        assert len({*labels}) == len(labels), path
        assert path.read_text().count("<table") <= len(labels), path
        count += len(labels)
    assert count > 10


def test_an_empty_cell_in_the_head_of_a_table_is_not_the_name_of_a_column():
    head = make_site.writing.render("| | b |\n|---|---|\n| x | y |", "page.md", None).body.partition("</thead>")[0]
    assert "<td></td>" in head and '<th scope="col">b</th>' in head and head.count("scope=") == 1


def test_the_search_stays_small():
    assert len((ROOT / "docs/site/scripts/search.js").read_text().splitlines()) < 80


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole").resolve()
    site = make_site.Site(folder)
    site.build()
    return SimpleNamespace(site=site, folder=folder)


@pytest.mark.slow
def test_the_whole_site_has_no_dead_link(whole):
    pages = check(whole.site, whole.folder, whole=True)
    assert {f"{name}.html" for name in SCRIPTS} <= {path.name for path in pages}
    with_chart = [path for path in pages if 'class="chart"' in path.read_text()]
    assert {path.stem for path in with_chart} == {path.stem for path in (ROOT / "docs/curves").glob("*.png")} | {
        "index"
    }


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if not browser.find():
        pytest.skip("there is no Chromium")
    page = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield page
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_scrolls_sideways_or_complains(whole, chromium, width):
    found = {}
    for path in sorted(whole.folder.rglob("*.html")):
        problems = chromium.open(path, width)
        if wide := chromium.run("document.documentElement.scrollWidth") - width:
            problems = [*problems, f"{wide} pixels too wide"]
        found |= {path.relative_to(whole.folder): problems} if problems else {}
    assert found == {}


@pytest.mark.slow
def test_scripts_of_the_pages_work(whole, chromium):
    chromium.open(f"{(whole.folder / 'search.html').as_uri()}?q=orthogonal")
    assert "ppo" in chromium.run("document.getElementById('found').textContent")
    chromium.open(f"{(whole.folder / 'compare.html').as_uri()}?a=ppo&b=a2c")
    ready = "const go = () => window.diff.children.length ? done() : setTimeout(go, 50); go();"
    chromium.run(f"new Promise(done => {{ {ready} }})")
    counts = chromium.run("document.getElementById('counts').textContent.split(':')[1]")
    added, removed = map(int, re.findall(r"\d+", counts))
    assert (added, removed) == (31, 68)  # of the whole files, the line Details included
    chromium.open(whole.folder / "algorithms/ppo.html")
    assert chromium.run("document.querySelectorAll('.chart canvas').length") == 4
    chromium.run("document.querySelector('.controls .method').click()")
    assert chromium.run("document.querySelectorAll('.chart canvas').length") == 1  # of the method that is left
    line = sources.line_of(SCRIPTS["ppo"].path, "gae")
    chromium.open(f"{(whole.folder / 'algorithms/ppo.html').as_uri()}#L{line}")
    assert (
        chromium.run("new Promise(done => setTimeout(done, 200)).then(() => document.querySelectorAll('.lit').length)")
        > 9
    )
    assert chromium.run("document.querySelector('.source').scrollTop") > 0


@pytest.mark.slow
def test_four_curves_of_the_first_page_rise(whole):
    """What the last evaluations scored, in the worst case of the interval, is above the best case of the first ones."""
    text = (whole.folder / "index.html").read_text()
    [data] = [json.loads(each) for each in re.findall(r'<script type="application/json">(.*?)</script>', text)]
    assert len(data["panels"]) == len(data["methods"]) == 4
    for panel in data["panels"]:
        [line] = panel["lines"]["eval steps"]
        assert line["lo"][-1] > line["hi"][0] and len(line["seeds"]) >= 3, panel["title"]


@pytest.mark.slow
def test_code_is_copied_and_wide_tables_say_so(whole, chromium):
    """Also where a browser gives pages no clipboard."""
    path = whole.folder / "algorithms/ppo.html"
    chromium.open(path, 390)
    press = {"expression": "document.querySelector('.copy').click()", "userGesture": True}
    heard = "new Promise(done => document.addEventListener('copy', () => done(getSelection().toString())))"
    label = "new Promise(done => setTimeout(() => done(document.querySelector('.copy').textContent), 300))"
    for clipboard in ("undefined", "{writeText: () => Promise.reject()}"):
        chromium.run(f"Object.defineProperty(navigator, 'clipboard', {{value: {clipboard}, configurable: true}})")
        chromium.run(f"window.heard = {heard}, 0")
        chromium.call("Runtime.evaluate", **press)
        assert chromium.run(label) == "Copied"
        assert chromium.run("window.heard") == SCRIPTS["ppo"].run
    chromium.run("window.kept = [], 0")
    clipboard = "{value: {writeText: text => { kept.push(text); return Promise.resolve(); }}, configurable: true}"
    chromium.run(f"Object.defineProperty(navigator, 'clipboard', {clipboard})")
    chromium.call("Runtime.evaluate", **press)
    assert chromium.run(label) == "Copied" and chromium.run("kept") == [SCRIPTS["ppo"].run]
    both = "[each.classList.contains('wide'), each.scrollWidth > each.clientWidth + 1]"
    wide = f"[...document.querySelectorAll('.scroll')].map(each => {both})"
    wide = f"new Promise(done => setTimeout(() => done({wide}), 300))"
    hint = "getComputedStyle(document.querySelector(name), '::before').content"
    hints = f"['.wide', '.scroll:not(.wide)'].map(name => {hint})"
    for width in (390, 1280):
        chromium.open(path, width)
        found = chromium.run(wide)
        assert all(says == is_wide for says, is_wide in found) and {says for says, _ in found} == {True, False}
        says, silent = chromium.run(hints)
        assert "Scroll sideways" in says and silent == "none"
    assert chromium.run("document.querySelectorAll('.copy').length") == chromium.run(
        "document.querySelectorAll('pre > code').length"
    )


AXE = ROOT / "node_modules/axe-core/axe.min.js"
EXAMPLES = "index algorithms/ppo lineage compare search api guides/first_hour results algorithms".split()


@pytest.mark.slow
@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed (npm install --no-save axe-core)")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_are_accessible(whole, chromium, dark):
    found = {}
    for name in EXAMPLES:
        chromium.open(whole.folder / f"{name}.html", dark=dark)
        chromium.run(AXE.read_text())
        rules = "['wcag2a', 'wcag2aa', 'wcag21aa', 'best-practice']"
        broken = chromium.run(
            f"axe.run({{runOnly: {rules}}}).then(found => found.violations.map(v => v.id + ': ' + v.nodes[0].html))"
        )
        found |= {name: broken} if broken else {}
    assert found == {}


def test_a_folder_that_is_not_a_site_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["make_site.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="is not a site"):
        make_site.main()
    assert (tmp_path / "mine.txt").exists()
    shutil.rmtree(tmp_path)
