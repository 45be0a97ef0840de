"""SoloRL's run library: seeds, run folder, metrics, checkpoints, evaluation. It knows no algorithm."""

from typing import Any

from solorl.run.arguments import RunArgs, parse
from solorl.run.verbs import Run

__all__ = ["PettingZooEnvs", "Run", "RunArgs", "Runs", "load", "parse"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`Runs`, the verbs of `Run` for JAX, is imported only where it is used: JAX is an extra. So are `load` and
    `PettingZooEnvs`."""
    if name == "Runs":
        from solorl.run.seeds import Runs

        return Runs
    if name == "PettingZooEnvs":
        from solorl.envs.pettingzoo import PettingZooEnvs

        return PettingZooEnvs
    if name == "load":
        from solorl.run.load import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
