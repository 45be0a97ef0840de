"""`python fake_envpool.py train ...` is `solo train ...` with the probe's EnvPool, which has the game Catch-v5 only."""

import sys

import pytest
from pixel_probe import use_fake_envpool

from solorl import cli

if __name__ == "__main__":
    use_fake_envpool(pytest.MonkeyPatch())
    sys.exit(cli.main(sys.argv[1:]))
