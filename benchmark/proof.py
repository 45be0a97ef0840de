"""What proves each algorithm file: its most telling tasks, scores, what others published, and whether it is current.

`docs/results.py` puts it into docs/proof.md. The data are in benchmark/results, the scores of others in published.toml.
"""

import hashlib
import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from core_hours import cores

from solorl.catalog.header import Script, parse_header
from solorl.lab.results import comparison as cmp
from solorl.lab.results import statistics as st
from solorl.lab.results import text
from solorl.lab.results.read import read_all
from solorl.lab.results.result import Result
from solorl.scripts import script_paths

ROOT = Path(__file__).resolve().parent.parent
SEEDS = 5  # from which on there is a verdict
# Words of a variant whose runs were cut, or had other settings than the page: they are curves only.
CUT = r"\b(early|short|budget|half|until|narrow|small)\b"
# Folders of searches, and of what has not moved yet.
ASIDE = ("queue", "tune", "halfcheetah_search", "minatar_looks", "muzero_search")
# Tasks by what they tell, the hardest first; what is not here comes after them.
HARD = (
    r"^(Pong|Breakout|BeamRider)|NoFrameskip|^Starpilot|^atari/", r"-MinAtar$", r"^(Humanoid|Ant|HalfCheetah|Walker)",
    r"^Hopper-", r"^team/simple_|^lbf/", r"^(BipedalWalker|LunarLander)", r"^games/", r"^team/", r"^Pendulum", "^Mount",
)  # fmt: skip
BOARDS = r"^games/(TicTacToe|ConnectFour)"  # where a score is a fraction of points
PROBES = r"^(pixel_probe|probes|penal|ppo_trxl_cue|Corridor)"  # tasks of the tests


@dataclass(frozen=True)
class Peer:
    """What somebody has published of a script's method on an environment."""

    score: float
    source: str
    url: str
    steps: int  # 0: any
    conditions: str


@dataclass(frozen=True)
class Row:
    """The runs of one script on one environment with one variant and one budget."""

    script: str
    env_id: str
    variant: str
    runs: Sequence[Result]
    is_full: bool  # all had the budget that their arguments and their name say
    peers: Sequence[Peer]
    current: int  # how many runs are of the file as it is

    @property
    def score(self) -> cmp.Estimate | None:
        """The mean of the runs, because others publish means, with its interval; None where no run was evaluated."""
        found = [value for run in self.runs if (value := cmp.score(run, "eval")) is not None]
        return cmp.estimate(st.mean, [np.array(found)]) if found else None

    @property
    def budget(self) -> int:
        """The steps that its runs were given."""
        return self.runs[0].args.get("total_timesteps") or 0

    @property
    def steps(self) -> float:
        """Environment steps, offline gradient steps, of a run."""
        return float(np.median([run.global_step for run in self.runs]))

    @property
    def core_hours(self) -> float:
        """Of all runs together."""
        return sum(run.wall_time * cores(run) for run in self.runs) / 3600

    @property
    def verdict(self) -> str:
        """Against the best of the peers: above or below where the interval excludes it."""
        if not self.is_full:
            return "curve only"
        if not self.peers:
            return "no peer"
        if len(self.runs) < SEEDS or self.score is None or self.score.interval is None:
            return "undecided"
        best, (low, high) = max(peer.score for peer in self.peers), self.score.interval
        return "above" if low > best else "below" if high < best else "equal"


# ---------------------------------------------------------------------- data
@cache
def published(path: Path = ROOT / "benchmark/published.toml") -> dict[str, Any]:
    """The scores of others, and what belongs to them."""
    return tomllib.loads(path.read_text())


def cut(run: Result) -> str:
    """Why the budget of a run is too small for its task to tell what the file can do, by the table "cut"; else ""."""
    for one in published()["cut"]:
        ours = run.script in one.get("scripts", [run.script]) and re.search(one["env_ids"], run.env_id)
        if ours and (run.args.get("total_timesteps") or 0) < 0.95 * one["steps"]:
            return str(one["why"])
    return ""


def is_full(run: Result) -> bool:
    """Whether a run came to the end of its budget, with the settings of its page, on a task that tells something.
    Not where it could have ended at a return, which makes those that did not a choice of the weak."""
    total = run.args.get("total_timesteps") or 0
    whole = run.status == "finished" and run.global_step > 0.95 * total and run.args.get("target_return") is None
    named = re.search(CUT, run.variant.replace("_", " ")) or re.match(PROBES, run.env_id)
    return whole and not named and not cut(run)


def peers(script: str, env_id: str, steps: float, path: Path = ROOT / "benchmark/published.toml") -> list[Peer]:
    """Scores that others have published with this budget; next to a file in JAX also those of its twin in torch."""
    twin, found = twin_of(script), []
    for one in published(path)["source"]:
        name = script if env_id in one.get(script, ()) else twin
        if env_id in one.get(name, ()) and (not one["steps"] or 0.95 < steps / one["steps"] < 1.05):
            conditions = one["conditions"] + (", not in JAX" if name != script else "")
            found.append(Peer(one[name][env_id], one["name"], one["url"], one["steps"], conditions))
    return found


@cache
def twin_of(script: str) -> str:
    """The torch file that a script in JAX corresponds to, "" where there is none."""
    path = script_paths().get(script)
    return Path((path and parse_header(path).twin) or "").stem


def rows(results: Path, is_current: Callable[[Result], bool]) -> list[Row]:
    """A row for each script, environment, variant and budget in a folder of folders of results."""
    folders = [path for path in sorted(results.iterdir()) if path.is_dir() and path.name not in ASIDE]
    runs = read_all(folders, whole=True, unfinished=True)[0]
    groups: dict[tuple[str, str, str, int, bool], list[Result]] = {}
    for run in runs:
        budget = run.args.get("total_timesteps") or 0
        groups.setdefault((run.script, run.env_id, run.variant, budget, is_full(run)), []).append(run)
    found = []
    for (script, env_id, variant, _, full), group in groups.items():
        row = Row(script, env_id, variant, group, full, [], sum(map(is_current, group)))
        found.append(replace(row, peers=peers(script, env_id, row.steps)))
    return found


def telling(found: Sequence[Row]) -> list[Row]:
    """Of the rows of one script the most telling one, then those that stand next to a peer: one for each environment
    and budget, and all with SEEDS seeds.

    Full runs come before others, tasks of the tests last, then many seeds, up to SEEDS, of SEEDS those of the file as
    it is, then a hard task, then the settings without a name.
    """

    def rank(row: Row) -> tuple[float, ...]:
        hard = next((i for i, pattern in enumerate(HARD) if re.search(pattern, row.env_id)), len(HARD))
        seeds = min(len(row.runs), SEEDS)
        old = seeds == SEEDS and row.current < len(row.runs)
        probe = bool(re.match(PROBES, row.env_id))
        return (-row.is_full, probe, -seeds, old, hard, bool(row.variant), -row.steps, -len(row.runs))

    first, *others = sorted(found, key=rank)
    chosen, seen = [first], {(first.env_id, first.budget)}
    for row in (one for one in others if one.peers and one.is_full):
        if (row.env_id, row.budget) not in seen or len(row.runs) >= SEEDS:
            chosen.append(row)
            seen.add((row.env_id, row.budget))
    return chosen


# ---------------------------------------------------------------------- current or not
class History:
    """The algorithm files and golden starts of a repository, now and at earlier commits."""

    def __init__(self, root: Path = ROOT):
        self.root = root

    def _git(self, *words: str, given: str = "") -> bytes:
        """What git prints; nothing where it fails."""
        done = subprocess.run(["git", *words], cwd=self.root, input=given.encode(), capture_output=True, check=False)
        return done.stdout if done.returncode == 0 else b""

    def _contents(self, names: Sequence[str]) -> list[bytes]:
        """The files COMMIT:PATH, empty where there is none; by one process."""
        data, found = self._git("cat-file", "--batch", given="\n".join(names)), []
        while data:
            head, _, data = data.partition(b"\n")
            size = int(head.split()[-1]) if head.split()[-1].isdigit() else -1
            found.append(data[: max(0, size)])
            data = data[size + 1 :]
        return found

    @cache  # noqa: B019, one of these lives as long as the process
    def versions(self, script: str) -> list[tuple[str, str]]:
        """SHA-256 of the script and its golden start, at each commit that changed one of them."""
        golden = f"tests/golden/{script}.json"
        paths = [*self._git("ls-files", f"algorithms/*/{script}.py").decode().split(), golden]
        commits = self._git("log", "--format=%H", "--", *paths).decode().split()
        found = self._contents([f"{commit}:{path}" for commit in commits for path in (paths[0], golden)])
        return [(hashlib.sha256(a).hexdigest(), start(b)) for a, b in zip(found[::2], found[1::2], strict=True)]

    @cache  # noqa: B019
    def golden(self, script: str, commit: str) -> str:
        """The golden start of a script at a commit."""
        return start(self._git("show", f"{commit}:tests/golden/{script}.json")) if commit else ""

    @cache  # noqa: B019
    def commit(self, commit: str, moment: str) -> str:
        """A commit, or, where the repository has not got it, the last one before a moment; "" before the first."""
        if self._git("cat-file", "-t", commit) == b"commit\n":
            return commit
        return self._git("rev-list", "-1", f"--before={moment}", "HEAD").decode().strip()

    @cache  # noqa: B019
    def same(self, script: str) -> set[str]:
        """The golden start of a script as it is, and those of the same contents that had other flags."""
        here = self.root / f"tests/golden/{script}.json"
        found = {start(here.read_bytes())} if here.is_file() else set()
        starts: dict[str, set[str]] = {}
        for sha256, golden in self.versions(script) if found else ():
            starts.setdefault(sha256, set()).update({golden} - {""})
        for each in starts.values():
            flags = [json.loads(golden)[0] for golden in each]
            if found & each and len(set(flags)) == len(flags):  # recorded again for its flags, not for its rows
                found |= each
        return found

    @cache  # noqa: B019
    def moved(self) -> list[dict[str, str]]:
        """The commits that moved results though no golden start shows it."""
        path = self.root / "tests/golden/moved.toml"
        return tomllib.loads(path.read_text())["moved"] if path.is_file() else []

    def is_current(self, run: Result) -> bool:
        """Whether the golden start of the run's file is the one that it had when the run was made: by the contents of
        the script where these had one golden start, whatever its flags, else by the commit. And that no commit since is
        one of moved()."""
        same = self.same(run.script)
        then = {golden for sha256, golden in self.versions(run.script) if golden and sha256 == run.script_sha256}
        commit = self.commit(str((run.git or {}).get("commit", "none")), run.started)
        if len(then) != 1 and not (then and then <= same):
            then = {self.golden(run.script, commit)}
        for one in self.moved():
            mine = (one["script"], one["env_id"]) == (run.script, run.env_id)
            if mine and (not commit or self._git("rev-list", "-1", f"{commit}..{one['commit']}")):
                return False
        return then <= same


def start(data: bytes) -> str:
    """What counts of a golden start: its flags and rows; "" of an empty file."""
    parts = json.loads(data) if data else {}
    return json.dumps([parts["flags"], parts["rows"]]) if parts else ""


# ---------------------------------------------------------------------- Markdown
HEAD = ["file", "task", "steps", "seeds", "mean score", "published", "verdict", "core-hours", "date", "current"]


def line(row: Row) -> str:
    """A row of the table."""
    findings = published().get("findings", {})
    verdict, score, runs = row.verdict, row.score, len(row.runs)
    if not row.is_full and (why := cut(row.runs[0])):
        verdict += f": {why}"
    if verdict == "below":
        why = findings.get(f"{row.script} {row.env_id} {row.variant}".strip())
        verdict = f"below: [why]({why})" if why else "below, not looked into"
    others = sorted(row.peers, key=lambda peer: -peer.score)
    task = f"{row.env_id}{row.variant and ', '}{row.variant}"
    if re.search(BOARDS, row.env_id) and (opponents := row.runs[0].args.get("opponents")):
        task += f", points against {opponents.partition(',')[0]}"
    shown = [f"{text.number(p.score)}: [{p.source}]({p.url}), {p.conditions}" for p in others]
    return " | ".join([
        f"| [`{row.script}`](algorithms/{row.script}.md)", task,
        f"{row.steps:,.0f}", str(runs), text.estimate(score) if score else "–", "; ".join(shown) or "–", verdict,
        f"{row.core_hours:.1f}" if row.core_hours >= 0.05 else "< 0.1",
        min((run.started[:10] for run in row.runs if run.started), default="–"),
        "yes" if row.current == runs else f"{row.current} of {runs}" if row.current else "no",
    ]) + " |"  # fmt: skip


def tables(scripts: Sequence[Script], found: Sequence[Row]) -> tuple[str, str]:
    """The sums, and a table for each family with at least one row for each of its files."""
    by_script = {one.name: [row for row in found if row.script == one.name] for one in scripts}
    chosen = {name: telling(mine) for name, mine in by_script.items() if mine}
    full = {name: [row for row in mine if row.is_full] for name, mine in by_script.items()}
    five = sum(any(len(row.runs) >= SEEDS for row in mine) for mine in full.values())
    verdicts = [row.verdict for mine in chosen.values() for row in mine]
    words = ("above", "equal", "below", "undecided")
    sums = (
        f"{five} of {len(by_script)} files have five seeds of a full run, {sum(map(bool, full.values()))} a full run, "
        f"{len(chosen)} any data. Of {sum(verdicts.count(word) for word in words)} rows with a published score "
        f"{', '.join(f'{verdicts.count(word)} {word}' for word in words)}."
    )
    parts = []
    for family in dict.fromkeys(one.family for one in scripts):
        lines = [f"| {' | '.join(HEAD)} |", "|---|---|---:|---:|---:|---|---|---:|---|---|"]
        for one in (one for one in scripts if one.family == family):
            none = f"| [`{one.name}`](algorithms/{one.name}.md) | no row yet |{' |' * 8}"
            lines += [line(row) for row in chosen.get(one.name, [])] or [none]
        parts.append(f"## {family}\n\n" + "\n".join(lines))
    return sums, "\n\n".join(parts)
