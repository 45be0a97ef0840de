"""Makes the documentation site: static pages that open from the disk and that any web server can serve.

python docs/site/make_site.py [--out site]
"""

import argparse
import html
import json
import os
import re
import shutil
import sys
import tomllib
from functools import cache
from pathlib import Path
from urllib.parse import urldefrag

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import charts  # noqa: E402
import diffs  # noqa: E402
import lineage  # noqa: E402
import sources  # noqa: E402
import verbs  # noqa: E402
import writing  # noqa: E402
from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: E402
from markupsafe import Markup  # noqa: E402

from solorl.catalog.header import scripts  # noqa: E402
from solorl.lab.results.page import CHART, as_json  # noqa: E402

REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
# Page of the repository -> its address where that does not follow from its place, as `address` says.
ADDRESSES = {
    "README.md": "index.html", "CONTRIBUTING.md": "contributing.html", "CHANGELOG.md": "changelog.html",
    "docs/log/README.md": "log.html", "docs/internals/README.md": "internals.html",
    "algorithms": "algorithms.html", "algorithms/README.md": "algorithms.html",
    "docs/algorithms": "algorithms.html", "docs/guides/README.md": "guides.html", "docs/guides": "guides.html",
}  # fmt: skip
# Picture of the repository -> the command that makes it again.
COMMANDS = (
    ("docs/curves/", "python docs/results.py"),
    ("docs/results/costs.png", "python benchmark/costs.py"),
    ("docs/results/", "python docs/results.py"),
    ("docs/search_tree.svg", "python benchmark/search_tree.py"),
    ("docs/terminal.svg", "python docs/terminal.py"),
    ("docs/learning_curve.png", "python docs/terminal.py"),
    ("docs/lunarlander.gif", "python docs/film.py lunarlander runs/LunarLander-v3__ppo__1__*"),
    ("docs/connect_four.gif", "python docs/film.py connect_four runs/*ConnectFour*alphazero_jax__1__* --seed 3"),
    ("benchmark/reports/classic/", "solo report benchmark/results/classic --out benchmark/reports/classic"),
)
NAVIGATION = [
    ("algorithms.html", "Algorithms"), ("lineage.html", "Lineage"), ("compare.html", "Compare"),
    ("guides.html", "Guides"), ("results.html", "Results"), ("proof.html", "Proof"),
    ("api.html", "API"),
]  # fmt: skip
# The part of the navigation that a page belongs to, by the beginning of its address.
SECTIONS = {"algorithms/": "algorithms.html", "families/": "algorithms.html", "guides/": "guides.html",
            "results/": "results.html", "reports/": "results.html"}  # fmt: skip
# Algorithm and task of the curves on the first page.
CURVES = (("ppo", "LunarLander-v3"), ("c51", "CartPole-v1"), ("sac_continuous_action", "Pendulum-v1"),
          ("mappo", "team/simple_spread_v3"))  # fmt: skip
MOST_BYTES = 400_000  # of a file that is shown whole


def address(path):
    """The address of the page of a file or folder of the repository, relative to the top of the site."""
    if path in ADDRESSES:
        return ADDRESSES[path]
    for pattern, place in (
        (r"algorithms/(\w+)(?:/README\.md)?", r"families/\1.html"),
        (r"algorithms/\w+/(\w+)\.py", r"algorithms/\1.html"),
        (r"benchmark/reports/(\w+)/report\.md", r"reports/\1.html"),
        (r"docs/(.+)\.md", r"\1.html"),
        (r"(.+)", r"files/\1.html"),
    ):
        if match := re.fullmatch(pattern, path):
            return match.expand(place)
    raise ValueError(path)


class Place:
    """A page of the site while it is written: its address, and links as seen from it."""

    def __init__(self, site, url):
        self.site, self.url = site, url

    def to(self, url):
        """The address of another page of the site from this one."""
        url, anchor = urldefrag(url)
        found = os.path.relpath(url, Path(self.url).parent) if url and url != self.url else ""
        return found + (f"#{anchor}" if anchor else "") or Path(self.url).name

    def link(self, target, path, words=""):
        """The address of what the page `path` of the repository links to; the line in a source that `words` name."""
        if re.match(r"[a-z]+:", target):
            return target
        target, anchor = urldefrag(target)
        there = (ROOT / path).parent / target if target else ROOT / path
        name = Path(os.path.relpath(there, ROOT)).as_posix()
        if script := re.fullmatch(r"algorithms/\w+/(\w+)\.py", name):
            line = None if words.endswith(".py") or words == script[1] else sources.line_of(ROOT / name, words)
            return self.to(f"{address(name)}#{f'L{line}' if line else 'source'}")
        if address(name).startswith("files/"):
            self.site.wanted.add(name)
        return self.to(address(name) + (f"#{anchor}" if anchor else ""))

    def code_link(self, words, path):
        """The address of a flag of the algorithm whose page this is, or of a verb; None for all else."""
        if words.startswith("--") and (script := re.fullmatch(r"docs/algorithms/(\w+)\.md", str(path))):
            line = sources.line_of(self.site.scripts[script[1]].path, words)
            return f"#L{line}" if line else None
        verb = re.fullmatch(r"run\.(\w+)(\(.*\))?", words)
        return self.to(f"api.html#Run.{verb[1]}") if verb and verb[1] in self.site.verbs else None

    def figure(self, source, words, path):
        """A picture with the command that makes it again; a chart where its data are known."""
        name = Path(os.path.relpath((ROOT / path).parent / source, ROOT)).as_posix()
        command = next(command for start, command in COMMANDS if name.startswith(start))
        script = re.fullmatch(r"docs/curves/(\w+)\.png", name)
        chart = self.site.charts().get(script[1]) if script else None
        drawn = (chart.data(), chart.bands(), chart) if chart else ()
        return self.chart(self.picture(name, words), command, words, *drawn)

    def picture(self, name, words):
        """A picture alone."""
        self.site.copy(name)
        return f'<img src="{self.to(f"pictures/{name}")}" alt="{html.escape(words)}" loading="lazy">'

    def chart(self, picture, command, words, data=None, bands=(), chart=None):
        """A picture, or in its place curves that a script draws, and of one algorithm a table and commands."""
        page = self.site.jinja.get_template("chart.html")
        return page.render(picture=picture, command=command, words=words, data=data, bands=bands, chart=chart)


class Site:
    """All pages, written into a folder."""

    def __init__(self, out, names=None):
        self.out, self.wanted, self.written, self.entries = Path(out), set(), set(), []
        self.scripts = {script.name: script for script in scripts()}
        self.chosen = [self.scripts[name] for name in names or self.scripts]
        self.families = {}
        for script in self.scripts.values():
            self.families.setdefault(script.family, []).append(script)
        self.verbs = verbs.of_run()
        self.jinja = Environment(
            loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self.jinja.globals |= {"navigation": NAVIGATION, "repository": REPOSITORY, "as_json": as_json}

    @cache  # noqa: B019
    def charts(self):
        """The data of all charts, by algorithm."""
        return charts.all_of(self.scripts)

    def write(self, url, template, title, description="", **values):
        """Write a page."""
        assert url not in self.written, f"{url} is written twice"
        self.written.add(url)
        section = next((there for start, there in SECTIONS.items() if url.startswith(start)), url)
        page, to = self.jinja.get_template(template), Place(self, url).to
        text = page.render(title=title, description=description, to=to, url=url, section=section, **values)
        path = self.out / url
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def copy(self, name, folder="pictures"):
        """Copy a file of the repository."""
        there = self.out / folder / name
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, there)

    def index(self, url, page):
        """Add the sections of a page to the search."""
        for anchor, heading, texts in page.sections:
            words = dict.fromkeys(re.findall(r"[\w-]{2,}", " ".join([heading, *texts]).lower()))
            start = re.sub(r"\s+", " ", " ".join(texts))[:160]
            if texts:
                self.entries.append([f"{url}#{anchor}" if anchor else url, page.title, heading, start, " ".join(words)])

    def text(self, url, page, source):
        """A page of text, with its contents."""
        self.index(url, page)
        parts = [part for part in page.headings if part[0] == 2]
        self.write(url, "page.html", page.title, body=Markup(page.body), parts=parts, source=source)

    def markdown(self, name):
        """The page of a Markdown file of the repository."""
        url = address(name)
        self.text(url, writing.render((ROOT / name).read_text(encoding="utf-8"), name, Place(self, url)), name)

    def algorithm(self, script):
        """The page of an algorithm file."""
        name = f"docs/algorithms/{script.name}.md"
        url, here = address(name), Place(self, address(name))
        page = writing.render((ROOT / name).read_text(encoding="utf-8"), name, here)
        self.index(url, page)
        family = f"algorithms/{script.family}/README.md"
        readme = (ROOT / family).read_text(encoding="utf-8")
        metrics = writing.render(writing.part(readme, "Logged metrics"), family, here)
        body = page.body.partition("</h1>")[2]
        listing = sources.listing(script.path.read_text(encoding="utf-8"), script.path.name, script.path)
        self.write(
            url, "algorithm.html", script.name, script.title, script=script, body=Markup(body),
            metrics=Markup(metrics.body), listing=Markup(listing), family=readme.partition("\n")[0].removeprefix("# "),
            parents=diffs.parents(script, self.scripts), children=diffs.children(script, self.scripts),
            source=script.path.relative_to(ROOT).as_posix(), chart=bool(re.search(r"class=.chart", body)),
        )  # fmt: skip

    def file(self, name):
        """The page of a file or folder that pages link to."""
        path, url = ROOT / name, address(name)
        here, values = Place(self, url), {"source": name}
        if path.is_dir():
            below = sorted(each for each in path.iterdir() if not each.name.startswith((".", "__")))
            runs = charts.runs_below(path, ROOT)
            for each in path.glob("*.gz") if runs else ():
                self.copy(each.relative_to(ROOT).as_posix(), "data")
            links = [] if runs else [each.relative_to(ROOT).as_posix() for each in below]
            self.wanted |= {each for each in links if address(each).startswith("files/")}
            values |= {"runs": runs, "links": [(Path(each).name, here.to(address(each))) for each in links]}
        elif path.suffix == ".ipynb" or b"\0" in path.read_bytes():  # a notebook, a picture, a model, data of a run
            self.copy(name, "data")
            values |= {"runs": charts.runs_below(path, ROOT), "links": [(path.name, here.to(f"data/{name}"))]}
        else:
            text = path.read_text(encoding="utf-8")
            assert len(text) < MOST_BYTES, f"{name} is too long for a page"
            values["listing"] = Markup(sources.listing(text, path.name))
        self.write(url, "file.html", name, **values)

    def front(self):
        """The first page."""
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        here = Place(self, "index.html")
        proof = re.search(r"<!-- proof -->\n(.*?)\n<!-- /proof -->", readme, flags=re.S)[1]
        ppo = self.scripts["ppo"].path
        start, end = sources.places(ppo)["ppo_loss"]
        code = "\n".join(ppo.read_text(encoding="utf-8").splitlines()[start - 1 : end])
        picture = here.picture("docs/curves/dqn.png", "Learning curves of DQN on three small tasks")
        chart = here.chart(picture, COMMANDS[0][1], "Four files, each on a task", *charts.chosen(self.charts(), CURVES))
        film = here.figure("docs/lunarlander.gif", "PPO lands on LunarLander-v3 after a million steps", "README.md")
        self.write(
            "index.html", "front.html", "SoloRL", "Deep reinforcement learning, one file per algorithm.",
            code=Markup(sources.block(code, "ppo.py")), line=start, film=Markup(film),
            proof=Markup(writing.render(proof, "README.md", here).body), families=self.families,
            titles=self.titles(), count=len(self.scripts), chart=Markup(chart), curves=CURVES,
        )  # fmt: skip

    def titles(self):
        """Family -> the title of its page."""
        return {
            name: (ROOT / f"algorithms/{name}/README.md").read_text(encoding="utf-8").partition("\n")[0][2:]
            for name in self.families
        }

    def static(self):
        """Styles, scripts, the sources for the comparison and the index of the search."""
        for folder in (HERE / "scripts", CHART):
            ours = shutil.ignore_patterns("*.html", "page.css", "dash.js")  # of pages of their own
            shutil.copytree(folder, self.out / "scripts", dirs_exist_ok=True, ignore=ours)
        shutil.copyfile(HERE / "style.css", self.out / "style.css")
        (self.out / "search").mkdir(exist_ok=True)
        data = json.dumps(self.entries, ensure_ascii=False, separators=(",", ":"))
        (self.out / "search/index.js").write_text(f"window.INDEX = {data};\n", encoding="utf-8")
        (self.out / "sources").mkdir(exist_ok=True)
        for script in self.chosen:
            text = script.path.read_text(encoding="utf-8")
            lines = [sources.to_html(line) for line in sources.coloured(text, script.path.name)]
            call = f"SOURCES[{json.dumps(script.name)}] = {json.dumps(lines, ensure_ascii=False)};\n"
            (self.out / f"sources/{script.name}.js").write_text(call, encoding="utf-8")

    def texts(self):
        """The Markdown files that have a page."""
        found = [path for name in ("docs", "algorithms", "benchmark/reports") for path in (ROOT / name).rglob("*.md")]
        names = [path.relative_to(ROOT).as_posix() for path in sorted(found)]
        return ["CONTRIBUTING.md", "CHANGELOG.md", *(n for n in names if not n.startswith("docs/algorithms/"))]

    def differences(self):
        """The family trees, and the page on which any two files are compared."""
        names = {family: [script.name for script in files] for family, files in self.families.items()}
        trees = lineage.picture(self.families, self.scripts, self.titles())
        self.write("lineage.html", "lineage.html", "Lineage", **trees)
        self.write("compare.html", "compare.html", "Compare two files", names=names, titles=self.titles())

    def api(self):
        """The page of the verbs."""
        self.text("api.html", verbs.page(Place(self, "api.html")), "solorl/__init__.py")

    def files(self):
        """The files and folders that pages link to; known when all other pages are written."""
        done = set()
        while left := sorted(self.wanted - done):
            for name in left:
                self.file(name)
            done.update(left)

    def build(self):
        """All pages."""
        self.front()
        for script in self.chosen:
            self.algorithm(script)
        for name in self.texts():
            self.markdown(name)
        self.differences()
        self.api()
        self.write("search.html", "search.html", "Search")
        self.files()
        self.static()


def main():
    """Make the site, in place of the one that was there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the pages")
    out = parser.parse_args().out
    if out.exists() and not (out / "search.html").exists() and any(out.iterdir()):
        sys.exit(f"{out} is not a site made by this program, and is left as it is")
    shutil.rmtree(out, ignore_errors=True)
    Site(out).build()
    print(f"open {out / 'index.html'}")


if __name__ == "__main__":
    main()
