"""The tests that matter after an edit, in less than a minute: rules, golden starts, the files' own tests.

make quick FILES="ppo dqn"
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from solorl.catalog.header import find_path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
ALWAYS = (TESTS / "test_house.py", TESTS / "tools" / "test_rules.py")


def chosen_for(name: str) -> list[str]:
    """The golden start of an algorithm file and the modules with tests of its own, else all that name it."""
    modules = sorted((TESTS / "algorithms").glob("test_*.py"))
    own = [path for path in modules if path.stem == f"test_{name}"]
    found = own or [path for path in modules if f'"{name}"' in path.read_text(encoding="utf-8")]
    return [f"{TESTS / 'test_golden.py'}::test_the_first_iterations_are_the_recorded_ones[{name}]", *map(str, found)]


def main(names: Sequence[str]) -> int:
    """Run the tests of the named algorithm files; UsageError for one that does not exist."""
    chosen = dict.fromkeys([*map(str, ALWAYS), *(test for name in names for test in chosen_for(find_path(name).stem))])
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", "not slow", *chosen]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
