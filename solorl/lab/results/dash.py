"""`solo dash`: a page on 127.0.0.1 that shows the runs below a folder while they train.

Methods, curves and bands are those of `solo report`, and runs are read as it reads them, again where one has changed.
What they have said is kept, thinned, in `.solo/dash.json` below the folder, for the next start. Nothing of a run is
executed, and of its files only films are handed out.
"""

import base64
import contextlib
import hashlib
import html
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

import numpy as np

from solorl import runfolder
from solorl.files import read_json, read_regular, write_atomically
from solorl.lab.results import comparison, curves, page, statistics, text
from solorl.lab.results.gather import SAME, named, newest, printable
from solorl.lab.results.read import places
from solorl.lab.results.result import Result, ResultError, reading
from solorl.lab.results.run_folder import read_run
from solorl.terminal import duration, plain

FORMAT = 3  # of what is kept
FAR = 0.9  # of the steps that half of its runs have come: a run that has come less far is not in a group's curve
MOST_FILM = 2**28  # bytes
FILES = (runfolder.CONFIG, runfolder.STATUS, runfolder.METRICS)
SHOWN = {"eval steps": "evaluation", "train steps": "training"}  # curves; the first that a group has is its score
HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")  # any port: a tunnel may begin at another one
SCRIPT = page.CHART / "dash.js"
POLICY = "default-src 'none'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'; style-src 'unsafe-inline'"
LIVE = ["Run", "Steps", "Steps/s", "Time left", "Return", "Evaluation", "Time goes to"]
CAPTION = """Lines are interquartile means over runs, bands their 95 % bootstrap intervals; of fewer than 4 runs means
and ranges. A curve ends where its shortest run does; runs not 0.9 times as far as half of their group are left out. A
click on a curve shows the film nearest to that step."""
SEEDS = """More seeds: the number that would find a difference like that of now, at the last common step, in 80 % of
studies (two-sided 5 %), if difference and deviations are as they seem and scores normal. It takes two seeds of each."""


class Store:
    """What is known of the runs below a folder."""

    def __init__(self, folder: Path):
        self.folder, self.file, self.lock = folder, folder / ".solo" / "dash.json", threading.Lock()
        kept = read_json(self.file)
        kept = kept if kept.get("format") == FORMAT else {}
        self.runs: dict[str, Any] = dict(kept.get("runs", {}))  # run -> the state of its files, and what they say
        self.groups: dict[str, Any] = dict(kept.get("groups", {}))  # group -> the state of its runs, and its curves
        self.films: dict[str, Path] = {}  # address -> file
        self._shown: tuple[Any, bytes] = (None, b"")  # what all runs have said, and the page of it

    def keep(self) -> None:
        """Write what was read for the next start, where the folder can be written."""
        content = {"format": FORMAT, "runs": self.runs, "groups": self.groups}
        with contextlib.suppress(OSError):
            if not self.file.parent.is_symlink():
                self.file.parent.mkdir(exist_ok=True)
                write_atomically(self.file, json.dumps(content, separators=(",", ":")).encode())

    # ------------------------------------------------------------------ reading
    def read(self) -> list[Result | str]:
        """What each run has said so far, or why it cannot be read; what links lead to elsewhere is left out."""
        paths, problems = places(self.folder)
        runs = [path for path in paths if (path / runfolder.CONFIG).is_file()]
        there = [run for run in runs if run.resolve().is_relative_to(self.folder.resolve())]
        return [*problems, *map(self._result, there)]

    def _result(self, run: Path) -> Result | str:
        """What a run has said so far, of which files that have not changed are not read again."""
        name, files = str(run.relative_to(self.folder)), [run / name for name in FILES]
        try:
            with reading(run):
                if any(file.is_symlink() or not file.is_file() for file in files):
                    raise ResultError(f"{run} is left out: not all of its files are regular files")
                state = [[file.stat().st_size, file.stat().st_mtime_ns] for file in files]
                if self.runs.get(name, {}).get("state") != state:
                    last = {key: row[key] for row in runfolder.rows_of(files[-1], -runfolder.TAIL) for key in row}
                    self.runs[name] = {"state": state, "said": asdict(read_run(run)), "last": last}
                found = printable(Result(**self.runs[name]["said"]))
        except ResultError as error:
            return plain(str(error))
        return replace(found, source=name, status=runfolder.status_now(run, found.status.partition(":")[0]))

    # ------------------------------------------------------------------ showing
    def page(self, first: str = "") -> bytes:
        """The page; groups are compared with those of the method `first`."""
        with self.lock:
            began, said = time.monotonic(), self.read()
            films = [(run, f) for run in said if isinstance(run, Result) for f in films_of(self.folder / run.source)]
            seen = said, films, first, [run["state"] for run in self.runs.values()]
            if self._shown[0] != seen:
                whole = page.filled_in(self._parts(said, films, first), SCRIPT.read_text(encoding="utf-8"))
                self._shown = seen, whole.encode()
            if time.monotonic() > began + 2:  # so much was new that it should not be read again
                self.keep()
            return self._shown[1]

    def _parts(self, said: list[Result | str], films: list[tuple[Result, Path]], first: str) -> dict[str, str]:
        runs, left_out = newest(named([one for one in said if isinstance(one, Result)]))
        groups = comparison.grouped(runs)
        self.groups = {"\n".join(key): self._group(key, members) for key, members in groups.items()}
        lines = {key: self.groups["\n".join(key)]["lines"] for key in groups}
        methods, panels = list(dict.fromkeys(name for _, name in groups)), dict[str, dict[str, Any]]()
        for (env, name), drawn in lines.items():
            for key, line in drawn.items():
                panels.setdefault(env, {}).setdefault(key, []).append(line | {"m": methods.index(name)})
        metric = "eval" if all("eval steps" in drawn for drawn in panels.values()) else "train"
        data = {"methods": methods, "start": {"axis": "steps", "metric": metric},
                "panels": [{"title": env, "lines": drawn} for env, drawn in panels.items()]}  # fmt: skip
        live = [progress(one, self.runs[one.source]["last"]) for one in runs if one.status == "running"]
        rows, pairs = list[list[text.Cell]](), list[list[text.Cell]]()
        first = first if first in methods or not methods else methods[0]
        for (env, name), members in groups.items():
            words = ", ".join(f"{count} {word}" for word, count in Counter(run.status for run in members).items())
            rows.append([env, name, words, *score(lines[env, name])])
            if name != first and (env, first) in groups:
                differ, more = changes(groups[env, first][0], members[0]), hint(lines[env, first], lines[env, name])
                pairs.append([env, name, differ, more])
        links = ", ".join(f'<a href="?first={quote(name)}">{html.escape(name)}</a>' for name in methods)
        notes = (*(one for one in said if isinstance(one, str)), *left_out)
        items = "".join(f"<li>{html.escape(plain(note))}</li>" for note in notes)
        self.films = {f"/film/{quote(os.fsencode(path.relative_to(self.folder)))}": path for _, path in films}
        options = "".join(
            f'<option value="{address[1:]}" data-env="{html.escape(run.env_id)}" data-step="{step_of(path)}">'
            f"{html.escape(plain(f'{run.source}: {path.stem}'))}</option>"
            for address, (run, path) in zip(self.films, films, strict=True)
        )
        return {
            "TITLE": "Trainings", "COMMAND": "", "CAPTION": CAPTION, "DATA": page.as_json(data),
            "INTRO": f'<h2>Running</h2>\n<div id="live">{page.table(LIVE, live) if live else "Nothing runs."}</div>',
            "TABLES": f'<aside hidden><h3>Films</h3><select id="films" aria-label="film">{options}</select>'
            '<video id="film" controls loop muted></video></aside>\n<div id="groups"><h2>Groups</h2>'
            f'{page.by_environment(["Environment", "Method", "Runs", "Score", "At step", "Of"], rows)}'
            f"<h2>Against {html.escape(first)}</h2>\n"
            f'{page.by_environment(["Environment", "Method", "Arguments that differ", "More seeds"], pairs)}'
            f"<p>{SEEDS} Against another method: {links}.</p></div>",
            "NOTES": f'<ul class="quiet" id="notes">{items}</ul>',
        }  # fmt: skip

    def _group(self, key: tuple[str, str], runs: Sequence[Result]) -> dict[str, Any]:
        """The state of a group's runs and its curves, made again where one of them has changed."""
        known, of = self.groups.get("\n".join(key), {}), [[run.source, self.runs[run.source]["state"]] for run in runs]
        if known.get("of") == of:
            return dict(known)
        kinds = product(comparison.METRICS, comparison.AXES)
        drawn = {f"{metric} {axis}": curve_of(runs, metric, axis) for metric, axis in kinds}
        return {"of": of, "lines": {key: page.line(0, curve) for key, curve in drawn.items() if curve}}


def films_of(run: Path) -> list[Path]:
    """The films of a run, that of the first steps first."""
    return sorted((run / "videos").glob("[!.]*.mp4"), key=step_of)


def step_of(film: Path) -> int:
    """The step after which a film was made; that of `solo play` counts as made at the end."""
    return int(film.stem[5:]) if film.stem[5:].isdecimal() else 10**15


# ---------------------------------------------------------------------- what is seen
def curve_of(runs: Sequence[Result], metric: str, axis: str) -> curves.Curve | None:
    """The curve of a group, over the runs that have come nearly as far as half of them have."""
    ends = {run.seed: x[-1] for run in runs if len(x := curves.points(run, metric, "steps")[0])}
    far = [run for run in runs if run.seed in ends and ends[run.seed] >= FAR * curves.most(ends.values())]
    return curves.curve_of(far, metric, axis)


def score(lines: Mapping[str, Any]) -> list[text.Cell]:
    """Where the curve of a group ends, at which step, and what it is of."""
    key = next((key for key in SHOWN if key in lines), "")
    if not key:
        return ["-", "-", "-"]
    line = lines[key]
    step, value, *ends = (line[name][-1] for name in ("x", "y", "lo", "hi"))
    band = {line["band"]: (ends[0], ends[1])}
    return [comparison.Estimate(value, band.get("interval"), band.get("range")), f"{step:,.0f}", SHOWN[key]]


def progress(run: Result, last: Mapping[str, float]) -> list[text.Cell]:
    """A run that trains, as a row of LIVE; `last` are the newest values of all metrics."""
    total, speed = run.args.get("total_timesteps"), last.get("charts/SPS")
    step = max(run.global_step, int(last.get("global_step", 0)))
    done = f"{step:,}" + (f" ({step / total:.0%})" if total else "")
    left = duration(max(0.0, total - step) / speed) if total and speed else "-"
    scores = ["-" if x is None else text.number(x) for x in (run.last_100_episodes, [None, *run.eval["mean"]][-1])]
    times = {key.removeprefix("time/"): value for key, value in last.items() if key.startswith("time/")}
    shares = ", ".join(f"{name} {value / (sum(times.values()) or 1):.0%}" for name, value in times.items())
    name = f"{run.env_id}: {run.name}, seed {run.seed}"
    return [name, done, f"{speed:,.0f}" if speed else "-", left, *scores, shares or "-"]


def changes(one: Result, other: Result) -> list[str]:
    """The arguments in which a run differs from another one."""
    names = sorted({*one.args, *other.args} - SAME - {"exp_name"})
    pairs = [(name, *(plain(str(run.args.get(name, "missing"))) for run in (other, one))) for name in names]
    said = [f"{name} {new} (there {old})" for name, new, old in pairs if new != old]
    return said + ["the script itself"] * (one.script_sha256 != other.script_sha256)


def hint(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """How many more seeds would separate two groups, by their curves."""
    pair = next(((one[key], other[key]) for key in SHOWN if key in one and key in other), ())
    step = min((line["x"][-1] for line in pair), default=0.0)
    runs = [np.array([np.interp(step, line["x"], run) for run in line["seeds"].values()]) for line in pair]
    if min(map(len, runs), default=0) < 2 or step < max(line["x"][0] for line in pair):
        return "-"
    if not (needed := statistics.seeds_needed(*runs)):
        return "they do not differ"
    more = needed - min(map(len, runs))
    return f"about {more:,} of each, {needed:,} in all" if more > 0 else f"enough: {needed:,} of each"


# ---------------------------------------------------------------------- serving
class Server(ThreadingHTTPServer):
    """The server of the page, for this machine only. OSError where the port is taken."""

    def __init__(self, store: Store, port: int):
        super().__init__(("127.0.0.1", port), Handler)
        self.store, self.address = store, f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD: the page, films."""

    server: Server
    timeout = 60

    def do_GET(self) -> None:
        """Answer, where the request names this machine: another site's name may lead here, too."""
        store, (name, _, query) = self.server.store, self.path.partition("?")
        if not HOST.fullmatch(self.headers.get("Host", "")):
            self.send_error(403, "This page is for this machine only")
        elif name == "/":
            self._send(store.page(parse_qs(query).get("first", [""])[0]), "text/html; charset=utf-8")
        else:
            film, path = b"", store.films.get(name)
            with contextlib.suppress(OSError):  # it is gone, or too large
                if path and path.resolve().is_relative_to(store.folder.resolve()):
                    film = read_regular(path, MOST_FILM)
            self._send(film, "video/mp4") if film else self.send_error(404)

    do_HEAD = do_GET

    def _send(self, data: bytes, kind: str) -> None:
        scripts = [hashlib.sha256(one).digest() for one in re.findall(rb"<script>(.*?)</script>", data, re.DOTALL)]
        allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in scripts) or "'none'"
        headers = {
            "Content-Type": kind, "Content-Length": str(len(data)), "Cache-Control": "no-store",
            "Content-Security-Policy": f"{POLICY}; script-src {allowed}; connect-src 'self'; media-src blob:",
            "X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin",
        }  # fmt: skip
        self.send_response(200)
        for header in headers.items():
            self.send_header(*header)
        with contextlib.suppress(ConnectionError):  # the reader has left
            self.end_headers()
            self.wfile.write(data if self.command == "GET" else b"")

    def log_message(self, *words: object) -> None:
        """Nothing: the terminal is for what went wrong."""
