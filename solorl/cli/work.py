"""`solo work`: a worker of a study, wherever it is started."""

from collections.abc import Sequence

from solorl.cli import Parser, say
from solorl.lab.studies.storage import refusal
from solorl.lab.studies.study import open_study
from solorl.lab.studies.worker import AGAIN, Pool


def main(argv: Sequence[str]) -> int:
    """Do tasks until none is free; UsageError where there is no study, or this machine cannot do its tasks."""
    parser = Parser("work", "Do one task of a study after the other, until none is free: what --engine starts.")
    parser.add_argument("storage", metavar="STORAGE", help="the folder or URL of the study")
    args = parser.parse(argv)
    study = open_study(args.storage)
    study.check_package()
    pool = Pool(study, list(study.tasks.values()), 1, say, stay=False)
    try:
        pool.run()
    except OSError as error:
        say(refusal(error, args.storage))
        return AGAIN
    return AGAIN if pool.signal else int(bool(pool.failed))
