"""`solo dash`: a page on this machine that shows trainings while they run."""

import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from solorl.cli import Parser, at_least, say
from solorl.errors import UsageError
from solorl.files import missing
from solorl.machine import no_display


def main(argv: Sequence[str]) -> int:
    """Show the page until Ctrl+C; UsageError where the folder is missing or the port is taken."""
    parser = Parser("dash", "Watch trainings in the browser: curves over seeds, speed, films.")
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=Path("runs"), help="of runs (runs)")
    parser.add_argument("--port", type=at_least(0, 65535), default=8090, help="8090 by default; 0: any free one")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    args = parser.parse(argv)
    if not args.folder.is_dir():
        raise missing("folder", args.folder)
    from solorl.lab.results.dash import Server, Store  # here, because it loads NumPy

    try:
        server = Server(Store(args.folder), args.port)
    except OSError as error:
        raise UsageError(f"port {args.port} cannot be used ({error.strerror}); --port 0 takes a free one") from None
    say(f"{server.address} shows {args.folder}; Ctrl+C ends it")
    with suppress(KeyboardInterrupt):
        if not args.no_browser and not no_display():
            webbrowser.open(server.address)
        server.serve_forever()
    server.store.keep()
    say("ended")
    return 0
