"""SoloRL's run library: seeds, run folder, metrics, checkpoints, evaluation. It knows no algorithm."""

from typing import Any

from solorl.run.arguments import RunArgs, parse
from solorl.run.verbs import Run

__all__ = ["EnvPoolVectorEnv", "PettingZooEnvs", "Run", "RunArgs", "Runs", "load", "parse"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What is imported only where it is used: `Runs`, the verbs of `Run` for JAX, an extra; `load`; `PettingZooEnvs`;
    and `EnvPoolVectorEnv`, the name of which tells `parse` that a script's ids are EnvPool's."""
    if name == "Runs":
        from solorl.run.seeds import Runs

        return Runs
    if name == "PettingZooEnvs":
        from solorl.envs.pettingzoo import PettingZooEnvs

        return PettingZooEnvs
    if name == "load":
        from solorl.run.load import load

        return load
    if name == "EnvPoolVectorEnv":
        from solorl.envs.envpool import EnvPoolVectorEnv

        return EnvPoolVectorEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
