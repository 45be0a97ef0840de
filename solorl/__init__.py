"""SoloRL's run library: seeds, run folder, metrics, checkpoints, evaluation. It knows no algorithm."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from solorl.args.arguments import RunArgs, parse
    from solorl.run.verbs import Run

__all__ = ["EnvPoolVectorEnv", "PettingZooEnvs", "Run", "RunArgs", "Runs", "conv2d", "load", "parse", "vector_env"]
__version__ = "0.2.0"

# Name -> its module, imported where the name is first used: `solo work` and its like need none of the libraries, and
# some modules are extras.
MODULES = {
    "EnvPoolVectorEnv": "solorl.envs.envpool",
    "PettingZooEnvs": "solorl.envs.pettingzoo",
    "Run": "solorl.run.verbs",
    "RunArgs": "solorl.args.arguments",
    "Runs": "solorl.run.seeds",
    "conv2d": "solorl.compute.convolution",
    "load": "solorl.run.load",
    "parse": "solorl.args.arguments",
    "vector_env": "solorl.envs.guest",
}


def __getattr__(name: str) -> Any:
    """The names that scripts import, each from its module."""
    if name in MODULES:
        return getattr(import_module(MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
