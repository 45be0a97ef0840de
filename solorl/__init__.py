"""SoloRL's run library: seeds, run folder, metrics, checkpoints, evaluation. It knows no algorithm."""

from solorl.arguments import RunArgs, parse
from solorl.run import Run

__all__ = ["Run", "RunArgs", "parse"]
__version__ = "0.1.0"
