import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.quality.suite import Answer, Size, SuitePlan, suites
from kvtune.profilers.quality.suites.length_shift import LengthShift, repetition

SUITE = LengthShift()
ITEM = SUITE.items(SuitePlan(size=Size.SCREEN))[0]


def said(tokens: int, text: str = "It is old.", reason: str = "stop") -> Answer:
    return Answer(texts=(text,), output_tokens=(tokens,), finish_reasons=(reason,))


def test_it_is_found_by_name():
    assert isinstance(suites()["length-shift"], LengthShift)


def test_a_larger_size_extends_a_smaller_one():
    sizes = [SUITE.items(SuitePlan(size=size, seed=5)) for size in Size]
    assert all(large[: len(small)] == small for small, large in itertools.pairwise(sizes))
    assert sizes[0] != SUITE.items(SuitePlan(size=Size.SCREEN, seed=6))


def test_each_passage_is_asked_about_greedily_and_sampled():
    items = SUITE.items(SuitePlan(per_category=12))
    assert len({item.key for item in items}) == len(items) == 24
    for greedy, sampled in zip(items[::2], items[1::2], strict=True):
        assert (greedy.category, sampled.category) == ("greedy", "sampled")
        assert greedy.messages == sampled.messages
        assert greedy.temperature == 0 < sampled.temperature
    assert len({item.messages[0]["content"] for item in items}) == 12
    assert all(len(item.messages[0]["content"].split()) > 250 for item in items)


@pytest.mark.parametrize("max_tokens", [300, 600])
def test_items_fit_what_the_model_takes(max_tokens):
    items = SUITE.items(SuitePlan(per_category=3, max_tokens=max_tokens))
    assert bool(items) == (max_tokens == 600)
    for item in items:
        assert len(item.messages[0]["content"]) / 4.5 + item.output_tokens < max_tokens


def test_the_change_of_length_is_the_log_of_the_ratio():
    ours, theirs = SUITE.figures(ITEM, said(90), said(60))["length"]
    assert ours - theirs == pytest.approx(math.log(1.5))


def test_lengths_of_sampled_answers_are_a_figure_of_their_own():
    sampled = SUITE.items(SuitePlan(size=Size.SCREEN))[1]
    found = SUITE.figures(sampled, said(90), said(60))
    assert found["sampled-length"] == SUITE.figures(ITEM, said(90), said(60))["length"]
    assert "length" not in found
    assert not SUITE.metrics[1].decides


def test_only_a_much_longer_answer_is_long():
    assert SUITE.figures(ITEM, said(90), said(60))["long"] == (0, 0)
    assert SUITE.figures(ITEM, said(91), said(60))["long"] == (1, 0)
    assert SUITE.figures(ITEM, said(60), said(91))["long"] == (0, 1)


def test_without_a_shift_much_longer_and_much_shorter_answers_cancel():
    rng = random.Random(1)
    pairs = [(said(rng.randint(10, 100)), said(rng.randint(10, 100))) for _ in range(2000)]
    found = [SUITE.figures(ITEM, *pair)["long"] for pair in pairs]
    longer, shorter = (sum(side) / len(found) for side in zip(*found, strict=True))
    assert longer > 0.2
    assert abs(longer - shorter) < 0.05


def test_an_answer_that_was_cut_off_is_endless():
    cut = said(160, reason="length")
    assert SUITE.figures(ITEM, cut, said(60))["endless"] == (1, 0)
    assert "cut off" in SUITE.detail(ITEM, cut)
    assert SUITE.detail(ITEM, said(60)) == "60 tokens"


def test_two_answers_that_were_cut_off_say_nothing_about_length():
    cut = said(160, reason="length")
    assert set(SUITE.figures(ITEM, cut, cut)) == {"endless", "repetition"}
    assert set(SUITE.figures(ITEM, cut, said(60))) == {"length", "long", "endless", "repetition"}


def test_an_empty_answer_has_figures():
    assert SUITE.figures(ITEM, said(0, ""), said(60))["length"][0] == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two three four five six", 0),
        ("a b c d a b c d", 1 / 5),  # abcd bcda cdab dabc abcd
        ("so so so so so so", 2 / 3),  # one of three runs is new
        ("狗在门前等朋友。狗在门前等朋友。", 4 / 11),
        ("too short", 0),
        ("", 0),
    ],
)
def test_repetition_is_the_share_of_runs_said_before(text, expected):
    assert repetition(text) == pytest.approx(expected)


@given(text=st.text(max_size=80), copies=st.integers(2, 4))
def test_saying_a_text_again_never_lowers_its_repetition(text, copies):
    once = repetition(text)
    assert 0 <= once < 1
    assert repetition(" ".join([text] * copies)) >= once - 1e-9
