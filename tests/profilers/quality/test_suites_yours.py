import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from kvtune.errors import BadInput, NotFound
from kvtune.profilers.quality.compare import Asked, ask_suites
from kvtune.profilers.quality.suite import Answer, Asker, Item, Size, SuitePlan, suites
from kvtune.profilers.quality.suites.yours import Yours

SUITE = Yours()
JUDGE = {"url": "http://localhost:9", "model": "big", "rubric": "Is it polite?"}


@pytest.fixture
def items(tmp_path: Path):
    """Items of the lines, each an object or raw text."""

    def read(*lines: object, size: Size = Size.FULL, **plan: int) -> tuple[Item, ...]:
        path = tmp_path / "mine.jsonl"
        path.write_text(
            "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        )
        return SUITE.items(SuitePlan(size=size, data=str(path), **plan))

    return read


def said(text: str, verdict: float | None = None) -> Answer:
    return Answer(texts=(text,), verdict=verdict)


def test_it_is_found_by_name():
    assert isinstance(suites()["yours"], Yours)


def test_without_a_file_there_are_no_items():
    assert SUITE.items(SuitePlan()) == ()


def test_lines_become_items(items):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    first, second = items(
        {"prompt": "Once", "output_tokens": 7, "temperature": 0.5, "category": "tales"},
        "",
        {"messages": chat, "note": "kept for myself"},
    )
    assert (first.key, first.category, first.prompt) == ("line-1", "tales", "Once")
    assert (first.output_tokens, first.temperature) == (7, 0.5)
    assert (second.key, second.category, second.prompt) == ("line-3", "all", None)
    assert second.messages == tuple(chat)
    assert json.loads(json.dumps(second.check)) == second.check


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ({}, "exactly one of 'prompt' and 'messages'"),
        ({"prompt": "a", "messages": []}, "exactly one of"),
        ({"prompt": ""}, "'prompt'"),
        ({"messages": []}, "not empty"),
        ({"messages": [{"role": "user"}]}, "'content'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "'role'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "user's turn"),
        ({"prompt": "a", "refrence": "b"}, "no key 'refrence'"),
        ({"prompt": "a", "check": {"regex": "("}}, "regular expression"),
        ({"prompt": "a", "check": "exact"}, "reference"),
        ({"prompt": "a", "output_tokens": 0}, "output_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(items, line, why):
    with pytest.raises(BadInput, match=why) as caught:
        items({"prompt": "fine"}, line)
    assert "line 2" in caught.value.message


def test_an_empty_or_missing_file_is_refused(items, tmp_path):
    with pytest.raises(BadInput, match="no items"):
        items("", "")
    with pytest.raises(NotFound):
        SUITE.items(SuitePlan(data=str(tmp_path / "none.jsonl")))


def test_a_larger_size_extends_a_smaller_one_by_category(items):
    lines = [{"prompt": f"p{n}", "category": "ab"[n % 2]} for n in range(150)]
    screen, standard, full = (items(*lines, size=size) for size in Size)
    keys = [[item.key for item in found] for found in (screen, standard, full)]
    assert set(keys[0]) < set(keys[1]) < set(keys[2])
    assert (len(keys[0]), len(keys[1]), len(keys[2])) == (8, 120, 150)
    assert len(items(*lines, per_category=3)) == 6


def test_a_check_decides(items):
    [item] = items({"prompt": "p", "check": {"contains": ["7194", "door"]}})
    assert SUITE.figures(item, said("7194"), said("the door 7194")) == {"score": (0.5, 1.0)}
    assert SUITE.detail(item, said("7194")) == "no 'door'"
    assert SUITE.detail(item, said("the door 7194")) == ""


def test_without_a_check_the_words_of_the_reference_count(items):
    [item] = items({"prompt": "p", "reference": "a green door"})
    ours, theirs = SUITE.figures(item, said("the green door"), said("A green door."))["score"]
    assert ours == pytest.approx(2 / 3)
    assert theirs == 1
    assert "a green door" in SUITE.detail(item, said("no"))


def test_with_neither_the_baseline_is_the_reference(items):
    [item] = items({"prompt": "p"})
    figures = SUITE.figures(item, said("the green door"), said("a green door"))
    assert figures == {"agreement": (pytest.approx(2 / 3), 1.0)}
    assert SUITE.figures(item, said("same"), said("Same")) == {"agreement": (1.0, 1.0)}
    assert SUITE.detail(item, said("same")) == ""


def test_a_function_gets_the_whole_line(items, tmp_path, monkeypatch):
    (tmp_path / "checks_of_yours.py").write_text("def f(answer, line): return line['x'] in answer")
    monkeypatch.chdir(tmp_path)
    [item] = items({"prompt": "p", "x": "door", "check": {"python": "checks_of_yours:f"}})
    assert SUITE.figures(item, said("a door"), said("a wall")) == {"score": (1.0, 0.0)}


def test_a_verdict_is_the_score_of_a_judged_item(items):
    [item] = items({"prompt": "p", "check": {"judge": JUDGE}})
    assert SUITE.figures(item, said("x", 0.4), said("y", 1.0)) == {"score": (0.4, 1.0)}
    assert SUITE.detail(item, said("x", 0.4)) == "the judge gave 4 of 10"


def test_only_judged_items_go_to_the_judge(items):
    asked: list[Item] = []

    class Kind:
        async def ask(self, items: Sequence[Item], *, seed: int, concurrency: int) -> list[Answer]:
            asked.extend(items)
            return [Answer(texts=("VERDICT: 9",)) for _ in items]

    def kind(judge: Mapping[str, str]) -> Asker:
        return Kind()

    found = items(
        {"prompt": "p", "check": {"judge": JUDGE}},
        {"prompt": "q", "reference": "r"},
        {"prompt": "s", "check": {"judge": JUDGE}},
    )
    answers = [said("one"), said("two"), Answer(error="HTTP 500")]
    settled = asyncio.run(Yours(judge=kind).settle(found, answers))
    assert settled == [said("one", 0.9), *answers[1:]]
    assert [item.key for item in asked] == ["line-1"]


def test_verdicts_are_kept_with_the_answers(tmp_path):
    class Echo:
        def __init__(self, text: str) -> None:
            self.text = text

        async def ask(self, items: Sequence[Item], *, seed: int, concurrency: int) -> list[Answer]:
            return [said(self.text) for _ in items]

    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"prompt": "p", "check": {"judge": JUDGE}}))
    suite = Yours(judge=lambda judge: Echo("VERDICT: 7"))
    plan = SuitePlan(data=str(path))
    asked = asyncio.run(ask_suites([suite], plan, Echo("an answer")))
    assert asked.suites[0].answers == (said("an answer", 0.7),)
    stored = Asked.model_validate_json(asked.model_dump_json())
    assert stored.suites[0].answers[0].verdict == 0.7
