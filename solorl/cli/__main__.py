"""`python -m solorl.cli` is `solo`."""

import sys

from solorl.cli import main

sys.exit(main())
