"""Finding results: in result files, run folders, TensorBoard folders, and folders of these at any depth."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from solorl import runfolder
from solorl.lab.results.gather import each_once, named, newest, printable
from solorl.lab.results.result import Result, ResultError, read, write
from solorl.lab.results.run_folder import read_run
from solorl.lab.results.tensorboard import read_tensorboard
from solorl.lab.results.training import Training, of_result, of_run, of_tensorboard
from solorl.terminal import plain

OF_RUN = (runfolder.METRICS, runfolder.STATUS)


def collect(run_dir: Path, folder: Path, variant: str = "", first: bool = False) -> Path:
    """Turn the finished run in `run_dir` into one file in `folder` and return its path.

    The bytes depend on the run only, and the file appears whole or not at all. Raises ResultError (a ValueError) where
    the run has neither finished nor diverged or cannot be read, OSError where the file cannot be written.
    """
    result = read_folder(run_dir)
    if not result.status.startswith(("finished", "diverged")):
        raise ResultError(f"{run_dir} is not finished ({result.status})")
    return write(replace(result, variant=variant, first=first), folder)


def read_all(paths: Iterable[Path], whole: bool = False, unfinished: bool = False) -> tuple[list[Result], list[str]]:
    """Everything found in result files, run folders, TensorBoard folders, and folders of these at any depth; and in
    files of scores (`read_scores`) that are named.

    Returns the results, ordered as found and `named`, and a sentence for each file that could not be read or was left
    out. Of two runs of one method with the same environment and seed the one started last counts. Finds nothing
    silently: a path that does not exist or holds no result is a sentence, too. Runs that have not come to their end
    are left out unless `unfinished` ones are wanted, as by what draws trainings: then run folders have their `curves`.
    """
    results: list[Result] = []
    sources, problems = _all_places(paths)
    for source in sources:
        try:
            found = list(map(printable, _read(source, curves=unfinished)))
            early = [] if unfinished else [one for one in found if one.status != "finished"]
            problems += [f"{one.source} is left out: the run is not finished ({one.status[:99]})" for one in early]
            results += [one for one in found if unfinished or one.status == "finished"]
        except ResultError as error:
            problems.append(str(error))
    kept, left_out = newest(named(each_once(results), whole))
    return kept, [*map(plain, problems), *left_out]


def trainings(paths: Iterable[Path]) -> tuple[list[Training], list[str]]:
    """The trainings at or below `paths` with all that they have logged, also those that have not ended, and a sentence
    for each that cannot be read."""
    found: list[Training] = []
    sources, problems = _all_places(paths)
    for source in sources:
        try:
            of_folder = of_run if (source / runfolder.CONFIG).is_file() else of_tensorboard
            found += [of_folder(source)] if source.is_dir() else map(of_result, _read(source, curves=True))
        except ResultError as error:
            problems.append(str(error))
    return found, problems


# ---------------------------------------------------------------------- files and folders
def _all_places(paths: Iterable[Path]) -> tuple[Iterable[Path], list[str]]:
    """What `places` finds at or below all `paths`, each once, and a sentence for a path where that is nothing."""
    found: dict[str, Path] = {}
    problems = []
    for path in paths:
        sources, refused = places(path)
        problems += refused
        if not sources and not refused:
            problems.append(f"{path} holds no result" if path.exists() else f"there is no {path}")
        found |= {str(source.resolve()): source for source in sources}
    return found.values(), problems


def places(path: Path) -> tuple[list[Path], list[str]]:
    """The result files, run folders and TensorBoard folders at or below `path`, sorted by name.

    And a sentence for each folder that cannot be read. A folder counts once, so that links in a circle end.
    """
    found: list[Path] = []
    problems: list[str] = []
    seen: set[tuple[int, int]] = set()
    waiting = [path]
    while waiting:
        place = waiting.pop()
        try:
            if place.is_file() and (place is path or place.name.endswith(".json.gz")):
                found.append(place)
            if not place.is_dir() or (place.stat().st_dev, place.stat().st_ino) in seen:
                continue
            seen.add((place.stat().st_dev, place.stat().st_ino))
            if (place / runfolder.CONFIG).is_file() and any((place / name).exists() for name in OF_RUN):
                found.append(place)
                continue
            children = sorted(place.iterdir(), key=_natural)
        except OSError as error:
            problems.append(f"{place} cannot be read: {error.strerror}")
            continue
        found += [place] if any(child.name.startswith("events.out.tfevents.") for child in children) else []
        waiting += [child for child in reversed(children) if not child.name.startswith(".")]
    return found, problems


def _read(source: Path, curves: bool = False) -> list[Result]:
    """The results in a file or folder that `places` has found. Raises ResultError, with `curves` also for scores, which
    have none."""
    if source.suffix in (".npz", ".csv") and source.is_file():
        from solorl.lab.results import paper  # here, because it loads NumPy

        if curves and source.suffix == ".npz":
            raise ResultError(f"{source} holds scores without steps, so there is no curve; `solo report` compares them")
        if found := paper.read_scores(source) if source.suffix == ".npz" else paper.read_points(source):
            return found
        raise ResultError(f"{source} holds no result")
    return [read_folder(source, curves) if source.is_dir() else read(source)]


def _natural(path: Path) -> list[Any]:
    """A key that sorts seed 2 before seed 10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", path.name))]


def read_folder(path: Path, curves: bool = False) -> Result:
    """The result of a run folder, on request with its `curves`, or of a TensorBoard folder. Raises ResultError where it
    is neither or damaged."""
    if (path / runfolder.CONFIG).is_file():
        return read_run(path, curves)
    if events := list(path.glob("events.out.tfevents.*")):
        if not all(event.is_file() for event in events):
            raise ResultError(f"{path} cannot be read: its TensorBoard files are not all regular files")
        return read_tensorboard(path)
    raise ResultError(f"{path} is not a run folder: it has neither config.json nor TensorBoard files")
