import gzip

import pytest

from kvtune.errors import BadInput, BadTrace, NotFound
from kvtune.profilers.traces import base
from kvtune.profilers.traces.base import csv_rows, json_rows, numbered_lines, open_bytes, read_head
from kvtune.profilers.workload import trace_formats


def write(tmp_path, content, name="trace"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_lines_are_numbered_from_one_and_a_byte_order_mark_is_dropped(tmp_path):
    path = write(tmp_path, b"\xef\xbb\xbfone\ntwo")
    assert list(numbered_lines(path)) == [(1, "one\n"), (2, "two")]


def test_a_gzip_file_reads_like_a_plain_one_whatever_its_name(tmp_path):
    path = write(tmp_path, gzip.compress(b'{"a": 1}\n{"a": 2}\n'), "trace.jsonl")
    assert [row.fields for row in json_rows(path)] == [{"a": 1}, {"a": 2}]


def test_a_gzip_file_that_is_cut_off_is_refused(tmp_path):
    lines = "".join(f'{{"a": {i}}}\n' for i in range(20_000)).encode()
    path = write(tmp_path, gzip.compress(lines)[:-2000])
    with pytest.raises(BadTrace, match="cannot be read on"):
        list(json_rows(path))


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(NotFound, match="there is no file"):
        open_bytes(tmp_path / "absent")


def test_a_directory_is_refused_as_one(tmp_path):
    with pytest.raises(BadInput, match="is a directory"):
        open_bytes(tmp_path)


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(BadTrace, match="line 1: the file is empty"):
        read_head(write(tmp_path, b""))


@pytest.mark.parametrize("content", [b"\x00\x01\x02", '{"prompt": "é"}'.encode("utf-16")])
def test_a_binary_file_is_refused(tmp_path, content):
    with pytest.raises(BadTrace, match="binary file, or text in UTF-16"):
        read_head(write(tmp_path, content))


def test_text_in_another_encoding_is_refused_by_line(tmp_path):
    path = write(tmp_path, b'{"a": 1}\n{"a": "caf\xe9"}\n')
    with pytest.raises(BadTrace, match="not UTF-8") as caught:
        list(json_rows(path))
    assert caught.value.line == 2


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "MAX_RECORD_BYTES", 1 << 20)
    path = write(tmp_path, b"[" + b"1," * (1 << 20))
    with pytest.raises(BadTrace, match="longer than 1 MiB"):
        list(numbered_lines(path))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object, got \\[1\\]"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": -Infinity}', "-Infinity is not a number"),
        ("[" * 100_000, "not JSON"),
        ('{"a": ' + "1" * 5000 + "}", "not JSON"),
    ],
)
def test_a_line_that_is_no_object_is_named_by_number_and_reason(tmp_path, line, reason):
    path = write(tmp_path, f'{{"a": 1}}\n\n{line}\n')
    with pytest.raises(BadTrace, match=reason) as caught:
        list(json_rows(path))
    assert caught.value.line == 3
    assert str(caught.value).startswith(f"{path}, line 3: ")


@pytest.mark.parametrize("value", [-1, 1.0, 1.5, "1", None, True, [1], 10**9, 10**400])
def test_a_length_must_be_a_whole_number_in_range(tmp_path, value):
    row = base.Row(tmp_path, 7, {"n": value})
    with pytest.raises(BadTrace, match="line 7: 'n' must be"):
        row.whole("n")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None, False, 10**400])
def test_a_number_must_be_finite(tmp_path, value):
    with pytest.raises(BadTrace, match="'n' must be a finite number"):
        base.Row(tmp_path, 7, {"n": value}).number("n")


@pytest.mark.parametrize("value", [[1, -1], [1, 2.0], [True], "12", None])
def test_ids_must_be_whole_numbers_from_zero(tmp_path, value):
    with pytest.raises(BadTrace, match="'n'"):
        base.Row(tmp_path, 7, {"n": value}).ids("n")


def test_a_missing_key_is_named_with_the_keys_that_are_there(tmp_path):
    with pytest.raises(BadTrace, match="there is no 'n', only 'm'"):
        base.Row(tmp_path, 7, {"m": 1}).get("n")


def test_more_blocks_than_the_prompt_holds_are_refused(tmp_path):
    row = base.Row(tmp_path, 7, {"ids": [1, 2, 3]})
    assert row.blocks("ids", 512, 1025) == (1, 2, 3)
    with pytest.raises(BadTrace, match="3 blocks of 512 tokens"):
        row.blocks("ids", 512, 1024)


def test_csv_columns_are_found_by_name_and_numbers_are_numbers(tmp_path):
    path = write(tmp_path, 'b, a ,c\n1,-2,x\n\n3.5,"4",\n')
    assert [row.fields for row in csv_rows(path, ("a", "b"))] == [
        {"b": 1, "a": -2, "c": "x"},
        {"b": 3.5, "a": 4, "c": ""},
    ]


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ("a,c\n1,2\n", 1, "no column 'b'"),
        ("a,b\n1,2\n3\n", 3, "1 fields, but the header has 2"),
        ('a,b\n1,"2"x\n', 2, "not CSV"),
    ],
)
def test_a_bad_csv_line_is_named_by_number_and_reason(tmp_path, content, line, reason):
    with pytest.raises(BadTrace, match=reason) as caught:
        list(csv_rows(write(tmp_path, content), ("a", "b")))
    assert caught.value.line == line


def test_arrivals_count_from_the_first_and_never_go_back(tmp_path):
    arrivals = base.Arrivals()
    rows = [base.Row(tmp_path, line, {}) for line in (1, 2, 3, 4)]
    times_s = [arrivals.since_first_s(time_s, rows[0]) for time_s in (1700.25, 1700.25, 1702)]
    assert times_s == [0.0, 0.0, 1.75]
    with pytest.raises(BadTrace, match=r"line 4: the time goes back by 0\.5 s") as caught:
        arrivals.since_first_s(1701.5, rows[3])
    assert "Sort" in caught.value.fix


def test_keys_are_found_even_when_the_head_cuts_the_first_line_off():
    assert base.first_keys('{"prompt": "a", "n": 1}\n{') == {"prompt", "n"}
    assert base.first_keys('{"prompt": "aaaa') == {"prompt"}
    assert base.first_keys("[1, 2]") == frozenset()


def test_every_format_is_found_by_its_own_name():
    formats = trace_formats()
    assert set(formats) >= {
        *("prompts_jsonl", "sharegpt", "sharegpt_turns", "mooncake", "azure_csv", "burstgpt_csv")
    }
    for name, reader in formats.items():
        assert reader.name == name
        assert reader.title
        assert reader.__doc__
