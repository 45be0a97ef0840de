"""`solo report --against REV`: have the results in the working tree become worse than those of a commit?

Results are matched by environment, script and variant (and by arguments, where runs of one variant differ in them); a
match with other scores than before and enough runs for an interval (4) on both sides is tested. It is a regression
where both hold:

- the 95 % bootstrap interval of IQM(now) - IQM(then) lies wholly below 0: more than chance;
- the IQM fell by more than TOLERANCE of the range from random play to solved (of |IQM then| where that range is not
  known): more than a difference nobody would notice, as between 500.0 and 499.8 on CartPole.

How often a change that is none is called a regression, simulated with normally distributed scores (3,000 pairs each,
before TOLERANCE): 3.5 % with 4 runs on both sides, 2.8 % with 5, 2.6 % with 10. With 3 it would be 9.5 %, because
there the bootstrap interval is too narrow.
"""

from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from tarfile import TarFile
from tempfile import TemporaryDirectory

import numpy as np

from solorl.errors import UsageError
from solorl.files import git
from solorl.lab.results import comparison as cmp
from solorl.lab.results import statistics as st
from solorl.lab.results import text
from solorl.lab.results.read import read_all
from solorl.lab.results.reference_scores import reference
from solorl.lab.results.result import Result
from solorl.terminal import aligned

TOLERANCE = 0.01


def run(revision: str, folders: Sequence[Path], metric: str) -> int:
    """Print how the results in `folders` changed since `revision`; 1 where one regressed, else 0.

    Raises UsageError where `revision` is not known, a folder lies outside a repository, or there is nothing to compare.
    """
    (then, problems), (now, new_problems) = results_at(revision, folders), read_all(folders, whole=True)
    for problem in [*problems, *new_problems]:
        print(f"note: {problem}")
    before, after = cmp.grouped(then), cmp.grouped(now)
    rows = [["Environment", "Method", "Seeds", f"IQM at {revision}", "IQM now", "Difference", "Verdict"]]
    for env_id, method in [key for key in before if key in after]:
        old, new = (_scores(runs[env_id, method], metric) for runs in (before, after))
        if len(old) and len(new):
            rows.append([env_id, method, f"{len(old)}, {len(new)}", *_judged(env_id, old, new)])
    if not rows[1:]:
        raise UsageError(f"no environment and method has {metric} scores both here and at {revision}")
    print("\n".join(aligned(rows)))
    for name, one, other in (("new", after, before), ("gone", before, after)):
        if keys := sorted(one.keys() - other.keys()):
            print(f"{name}: {', '.join(f'{method} on {env}' for env, method in keys)}")
    worse = sum(row[-1] == "REGRESSION" for row in rows)
    print(f"\n{worse} of {len(rows) - 1} compared regressed since {revision}" if worse else "\nno regression")
    return int(bool(worse))


def results_at(revision: str, folders: Sequence[Path]) -> tuple[list[Result], list[str]]:
    """What `read_all` finds in folders at a commit.

    Raises UsageError where the commit is not known, a folder does not exist or lies in no repository.
    """
    with TemporaryDirectory() as place:
        for folder in folders:
            if not folder.is_dir():
                raise UsageError(f"there is no folder {folder} to compare with {revision}")
            git(folder, "rev-parse", "--git-dir")
            try:
                git(folder, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
            except UsageError:
                raise UsageError(f"git does not know a commit or tag {revision}") from None
            with suppress(UsageError):  # the folder was not there
                archive = TarFile(fileobj=BytesIO(git(folder, "archive", revision, ".")))
                archive.extractall(f"{place}{folder.resolve()}", filter="data")
        found, problems = read_all([*Path(place).iterdir()], whole=True)
    return found, [problem.replace(place, f"{revision}:") for problem in problems]


def _scores(runs: Sequence[Result], metric: str) -> st.Array:
    scores = [cmp.score(run, metric) for run in sorted(runs, key=lambda run: run.seed)]
    return np.array([score for score in scores if score is not None], np.float64)


def _judged(env_id: str, then: st.Array, now: st.Array) -> list[str]:
    """The IQM then and now, the difference and the verdict, in words."""
    several = min(len(then), len(now)) >= cmp.ENOUGH
    change = lambda x, y: st.iqm(x) - st.iqm(y)  # noqa: E731
    interval = tuple(st.paired_interval(change, [now], [then]).tolist()) if several else None
    difference = cmp.Estimate(float(change([now], [then])), interval)
    words = [text.number(float(st.iqm([then]))), text.number(float(st.iqm([now]))), text.estimate(difference)]
    return [*words, _verdict(env_id, then, now, difference)]


def _verdict(env_id: str, then: st.Array, now: st.Array, difference: cmp.Estimate) -> str:
    if np.array_equal(then, now):
        return "unchanged"
    if difference.interval is None:
        return f"too few runs (at least {cmp.ENOUGH} each are needed)"
    known = reference(env_id)
    scale = abs(known[1] - known[0]) if known else abs(float(st.iqm([then])))
    low, high = difference.interval
    if high < 0:
        return "REGRESSION" if -difference.value > TOLERANCE * scale else "worse, but by less than 1 %"
    return "improvement" if low > 0 else "no change beyond chance"
