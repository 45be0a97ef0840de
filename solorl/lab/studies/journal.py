"""The journal file of a search: all its trials, for Optuna. Several commands may share it."""

import hashlib
import platform
import time
from pathlib import Path
from typing import Any

from solorl.errors import UsageError
from solorl.machine import is_alive, own_handle


def open_study(path: Path, name: str, about: dict[str, Any], pruner: str, prune_after: int, seed: int | None) -> Any:
    """The Optuna study in a journal file, made where there is none.

    UsageError where Optuna is not installed, or the study in the file searches for something else.
    """
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ModuleNotFoundError:
        raise UsageError("solo tune needs an extra: pip install 'solorl[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruners = {
        "median": optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=prune_after, n_min_trials=3),
        "none": optuna.pruners.NopPruner(),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # absolute: Optuna's lock is a link to it, and one of a killed command that points nowhere is never released
        storage = JournalStorage(JournalFileBackend(str(path.absolute())))
        found = optuna.create_study(
            storage=storage, study_name=name, direction="maximize", load_if_exists=True,
            pruner=pruners[pruner],
        )  # fmt: skip
        # a study that continues must not draw the same again
        first = None if seed is None else seed + len(found.trials)
        found.sampler = optuna.samplers.TPESampler(seed=first, multivariate=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    except (ValueError, KeyError) as error:
        raise UsageError(f"{path} is not a journal of Optuna: {error}") from None
    _check_same(path, found, about)
    return found


def _check_same(path: Path, found: Any, about: dict[str, Any]) -> None:
    """UsageError unless the trials in the file were made for the same question."""
    saved = found.user_attrs.get("solorl")
    if saved is None:
        found.set_user_attr("solorl", about)
    elif different := [key for key in about if saved.get(key) != about[key]]:
        raise UsageError(f"the study in {path} was made with different {different[0]}; --storage names a new file")


def states(*names: str) -> tuple[Any, ...]:
    """Optuna's states of these names."""
    from optuna.trial import TrialState

    return tuple(TrialState[name] for name in names)


def completed(found: Any) -> list[Any]:
    """The trials that ran to their end."""
    return found.get_trials(deepcopy=False, states=states("COMPLETE"))


def counted(found: Any) -> list[int]:
    """Numbers of the trials that count: over in any way but interruption, or running in a process that lives."""
    over = found.get_trials(deepcopy=False, states=states("COMPLETE", "PRUNED", "FAIL"))
    running = found.get_trials(deepcopy=False, states=states("RUNNING"))
    valid = [trial for trial in over if not trial.user_attrs.get("interrupted")] + [*filter(is_owned, running)]
    return [trial.number for trial in valid]


def is_owned(trial: Any) -> bool:
    """Whether the command that runs a trial is alive, as far as this machine can tell."""
    owner = trial.user_attrs.get("owner")
    if owner is None:  # asked for a moment ago, or its command died in that moment
        return trial.datetime_start is not None and time.time() - trial.datetime_start.timestamp() < 60
    return owner["host"] != _host() or is_alive(owner["handle"])


def this_command() -> dict[str, str]:
    """What is noted of the command that runs a trial."""
    return {"handle": own_handle(), "host": _host()}


def _host() -> str:
    """This machine, by a number that does not tell its name."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]
