"""`make quick`: the tests that it chooses exist and are those of the file."""

from pathlib import Path

import pytest
from conftest import ROOT, TESTS

from solorl.errors import UsageError
from tools.quick import ALWAYS, chosen_for, main


@pytest.mark.parametrize(
    ("name", "module"), [("ppo", "test_ppo.py"), ("d3qn", "test_dqn.py"), ("qmix", "test_qmix.py")]
)
def test_the_golden_start_and_the_tests_of_a_file_are_chosen(name, module):
    golden, *modules = chosen_for(name)
    assert golden.endswith(f"[{name}]") and (TESTS / "golden" / f"{name}.json").is_file()
    assert str(TESTS / "algorithms" / module) in modules
    assert f'"{name}"' in "".join(Path(path).read_text() for path in modules)


def test_what_is_always_run_exists():
    assert all(path.is_file() and path.is_relative_to(ROOT) for path in ALWAYS)


def test_a_file_that_does_not_exist_is_refused():
    with pytest.raises(UsageError, match="no algorithm pppo"):
        main(["pppo"])
