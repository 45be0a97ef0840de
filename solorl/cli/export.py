"""Write the greedy policy of a run folder, with its normaliser, as a file that runs without SoloRL: as ONNX
(.onnx) of a script in torch, as StableHLO (.stablehlo) of one in JAX. It is put in place only after it has computed the
same as the policy on 1,000 observations; otherwise nothing is written and the exit code is 1.
This executes the script that made the folder, by the rule of `solo play`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from solorl.cli import Parser
from solorl.terminal import paint, plain


def main(argv: Sequence[str]) -> int:
    """Export the policy of a run folder; UsageError for a folder without a run and a file that cannot be written."""
    parser = Parser("export", __doc__ or "")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a folder below runs/, or hf://USER/NAME[@REVISION]")
    parser.add_argument("path", metavar="FILE", type=Path, help="the file to write; one that exists is replaced")
    parser.add_argument("--last", action="store_true", help="the model of the end, not that of the best evaluation")
    parser.add_argument("--trust-script", action="store_true", help="execute the folder's script, whatever it does")
    args = parser.parse(argv)
    from solorl.lab.share.export import CheckFailed, export, require_place  # here: they load the numerical libraries
    from solorl.lab.share.hub import run_dir_of

    require_place(args.path)
    try:
        print(export(run_dir_of(args.run_dir), args.path, last=args.last, trust_script=args.trust_script))
    except CheckFailed as error:
        print(f"{paint('error:', 'red', sys.stderr)} {plain(str(error))}", file=sys.stderr)
        return 1
    return 0
