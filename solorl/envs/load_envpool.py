"""Importing EnvPool, in the one way that lets its games of Procgen be played."""

import contextlib
import ctypes
import importlib
import importlib.util
import sys
from itertools import product
from pathlib import Path
from typing import Any

# Libraries of Qt 5, as the package pyqt5-qt5 has them; each needs those before it.
QT = ("libicudata.so.*", "libicuuc.so.*", "libicui18n.so.*", "libQt5Core.so.5", "libQt5Gui.so.5")


def import_envpool() -> Any:
    """EnvPool, the module; ImportError where it is not installed. All of SoloRL imports it here: Procgen needs Qt 5,
    which must be loaded before EnvPool is imported for the first time."""
    if "envpool" not in sys.modules:
        load_qt()
    return importlib.import_module("envpool")


def load_qt() -> None:
    """Load the libraries of pyqt5-qt5 where it is installed; without them EnvPool takes those of the system."""
    spec = importlib.util.find_spec("PyQt5")
    folders = spec.submodule_search_locations if spec else None
    for folder, name in product(folders or (), QT):
        for path in sorted(Path(folder, "Qt5", "lib").glob(name)):
            with contextlib.suppress(OSError):  # if one cannot be loaded, EnvPool says what is missing
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
