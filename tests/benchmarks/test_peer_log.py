"""Parts of a long measurement are kept, found again, and never mixed with another one's."""

import pytest
from peer_log import Log

from kvtune.errors import BadInput

ASKED = {"case": "capacity", "peers": ("a", "b")}


def test_parts_are_there_when_it_goes_on(tmp_path):
    path = tmp_path / "deep" / "log.jsonl"
    first = Log(path, ASKED)
    first.add({"part": "search", "round": 0, "who": "a", "arguments": {"x": 1}})
    first.add({"part": "search", "round": 1, "who": "a"})
    again = Log(path, ASKED)
    assert again.parts == first.parts
    assert again.find(who="a", round=1) == {"part": "search", "round": 1, "who": "a"}
    assert again.find(who="a", round=2) is None
    assert len(again.all(part="search")) == 2


def test_a_line_that_was_cut_off_is_forgotten(tmp_path):
    path = tmp_path / "log.jsonl"
    Log(path, ASKED).add({"part": "one"})
    with path.open("a") as file:
        file.write('{"part": "tw')
    again = Log(path, ASKED)
    assert again.parts == [{"part": "one"}]
    again.add({"part": "three"})
    assert [part["part"] for part in Log(path, ASKED).parts] == ["one", "three"]


def test_another_question_is_refused_with_what_changed(tmp_path):
    path = tmp_path / "log.jsonl"
    Log(path, ASKED)
    with pytest.raises(BadInput, match="another case"):
        Log(path, {**ASKED, "case": "bandwidth"})


def test_what_is_no_log_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("a letter\n")
    with pytest.raises(BadInput, match="cannot be read"):
        Log(path, ASKED)
    assert path.read_text() == "a letter\n"
