import asyncio
from collections.abc import Sequence

import pytest

from kvtune.errors import BadInput
from kvtune.profilers.quality.judge import judge_answers, read_judge, read_verdict, server_of
from kvtune.profilers.quality.suite import Answer, Item

JUDGE = {"url": "http://localhost:9", "model": "big", "rubric": "Is it polite?"}
ITEM = Item(key="line-1", category="all", prompt="Say hello.", check={"reference": "Hello!"})


class Replies:
    """An asker that says what it is told to, and keeps what it was asked."""

    def __init__(self, *texts: str | Answer) -> None:
        self.texts = list(texts)
        self.asked: list[Item] = []

    async def ask(self, items: Sequence[Item], *, seed: int, concurrency: int) -> list[Answer]:
        self.asked += items
        found = [self.texts.pop(0) for _ in items]
        return [each if isinstance(each, Answer) else Answer(texts=(each,)) for each in found]


def verdicts(replies: Replies, answers: list[Answer], judges: list[dict[str, str]] | None = None):
    judges = judges or [JUDGE] * len(answers)
    return asyncio.run(
        judge_answers(judges, [ITEM] * len(answers), answers, ask=lambda judge: replies)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is polite.\nVERDICT: yes", 1),
        ("verdict: No", 0),
        ("VERDICT: 7", 0.7),
        ("**Verdict:** 7.5/10", 0.75),
        ("VERDICT: 3\nWait.\nVERDICT: 10", 1),
        ("VERDICT: 11", None),
        ("VERDICT: maybe", None),
        ("It is a 7.", None),
        ("", None),
    ],
)
def test_the_last_verdict_counts(text, expected):
    assert read_verdict(text) == (None if expected is None else pytest.approx(expected))


def test_a_judge_gets_rubric_question_reference_and_answer():
    replies = Replies("VERDICT: 8")
    [settled] = verdicts(replies, [Answer(texts=("Hi there",))])
    assert settled == Answer(texts=("Hi there",), verdict=0.8)
    told = " ".join(message["content"] for message in replies.asked[0].messages)
    assert all(part in told for part in ("Is it polite?", "Say hello.", "Hello!", "Hi there"))


def test_a_judge_that_fails_or_gives_no_verdict_makes_an_error():
    replies = Replies(Answer(error="timeout"), "Well, well.")
    failed, silent = verdicts(replies, [Answer(texts=("a",)), Answer(texts=("b",))])
    assert failed == Answer(error="the judge failed: timeout")
    assert "no verdict" in str(silent.error)
    assert "Well, well." in str(silent.error)


def test_what_has_no_answer_is_not_judged():
    replies = Replies("VERDICT: yes")
    answers = [Answer(error="HTTP 500"), Answer(texts=("a",))]
    first, second = verdicts(replies, answers)
    assert first == answers[0]
    assert second.verdict == 1
    assert len(replies.asked) == 1


def test_each_judge_gets_its_own_answers():
    other = {**JUDGE, "model": "other"}
    asked: dict[str, Replies] = {
        "big": Replies("VERDICT: 1", "VERDICT: 3"),
        "other": Replies("VERDICT: 2"),
    }
    settled = asyncio.run(
        judge_answers(
            [JUDGE, other, JUDGE],
            [ITEM] * 3,
            [Answer(texts=(text,)) for text in "abc"],
            ask=lambda judge: asked[judge["model"]],
        )
    )
    assert [answer.verdict for answer in settled] == [0.1, 0.2, 0.3]
    assert [answer.texts[0] for answer in settled] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model": ""}, "needs 'model'"),
        ({"rubrik": "x"}, "no 'rubrik'"),
        ({"url": "localhost"}, "localhost"),
        ({"url": "http://me:secret@localhost:9"}, "password"),
        ({"api_key_env": "KVTUNE_TEST_UNSET_KEY"}, "KVTUNE_TEST_UNSET_KEY is not set"),
        ({"model": 3}, "object of texts"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused(change, why):
    with pytest.raises(BadInput, match=why) as caught:
        read_judge({**JUDGE, **change})
    assert "secret" not in str(caught.value)


def test_a_judge_gets_its_own_key_and_never_that_of_the_server_under_test(monkeypatch):
    monkeypatch.setenv("KVTUNE_API_KEY", "of-the-server")
    monkeypatch.setenv("JUDGE_KEY", "of-the-judge")
    with_key = read_judge({**JUDGE, "api_key_env": "JUDGE_KEY"})
    assert "of-the-judge" not in str(with_key)
    assert server_of(with_key).endpoint.authorization == "Bearer of-the-judge"
    assert "of-the-server" not in server_of(read_judge(JUDGE)).endpoint.authorization
