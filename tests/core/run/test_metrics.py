"""Reading metrics.jsonl: whole rows only, from any byte on, and damage said or passed over."""

import json

import pytest

from solorl.runfolder import TAIL, read_rows, rows_of


@pytest.fixture
def file(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_torn_last_line_is_no_row_until_it_is_whole(file):
    file.write_text('{"a": 1}\n\n{"a": 2}\n{"a": 3')
    assert read_rows(file) == read_rows(file, strict=True) == ([{"a": 1}, {"a": 2}], 19)
    with open(file, "a") as more:
        more.write("}")
    assert read_rows(file, 19) == ([], 19)  # its line end is missing
    with open(file, "a") as more:
        more.write("\n")
    assert read_rows(file, 19) == ([{"a": 3}], 28) and read_rows(file, 28) == ([], 28)


def test_only_the_rows_with_a_key_are_read(file):
    file.write_text('{"a/b": 1, "a": 2}\n{"a": 3}\n{"b": "\\"a/b\\":", "c": {"a/b": 1}}\n{"a/b": null}\n')
    assert read_rows(file, key="a/b")[0] == [{"a/b": 1, "a": 2}, {"a/b": None}]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "damaged in line 2: Expecting property name"),
        (b"3", "damaged in line 2: it holds no JSON object"),
        (b"[" * 10_000, "damaged in line 2: maximum recursion"),
        (b'{"a": ' + b"1" * 5000 + b"}", "damaged in line 2: Exceeds the limit"),
        (b"\xff", "can't decode byte 0xff"),
        (b"\0" * 4, "damaged in line 2: Expecting value"),
    ],
)
def test_a_damaged_line_is_left_out_or_named(file, line, why):
    file.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    assert read_rows(file)[0] == [{"a": 1}, {"a": 2}] == rows_of(file, -TAIL)
    with pytest.raises(ValueError, match=why):
        read_rows(file, strict=True)


def test_last_rows_are_those_of_the_end_of_the_file(file):
    assert rows_of(file) == [] == rows_of(file.parent)
    file.write_text("".join(json.dumps({"global_step": i}) + "\n" for i in range(10_000)))
    found = [row["global_step"] for row in rows_of(file, -TAIL)]
    assert found == list(range(found[0], 10_000)) and found[0] == 10_000 - TAIL // len('{"global_step": 9999}\n')
    with pytest.raises(FileNotFoundError):
        read_rows(file.with_name("other"))
