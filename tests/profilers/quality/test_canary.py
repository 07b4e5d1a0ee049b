import asyncio
import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.quality.canary import (
    CanaryReport,
    broken_output,
    canary_requests,
    grade_canary,
    judge_canary,
    run_canary,
)

# What SmolLM2-135M answered on vLLM 0.32 for CPU, block size 128: by default and with an fp8 cache,
# and with int8_per_token_head, which that platform accepts and corrupts.
SANE = (" 7194 on the green door.", " 5823, written on the wall by Nelle.", " 3461.")
CORRUPT = (
    " of 93220-alums- find inopterspot Nestting page to 94-9",
    " is-c toend242 you 15ms 1\ufffdfwards_casto and is ",
    " 15 enoughto.in 2 line line All. J. gonna this property in  from..1",
)


def test_answers_seen_from_a_correct_cache_pass():
    report = grade_canary(SANE)
    assert all(answer.right and answer.garbage is None for answer in report.answers)
    assert judge_canary(report, grade_canary(SANE)).outcome == "ok"


def test_answers_seen_from_a_corrupt_cache_are_caught():
    verdict = judge_canary(grade_canary(CORRUPT), grade_canary(SANE))
    assert verdict.outcome == "broken"
    assert len(verdict.reasons) == 3
    assert "7194" in verdict.reasons[0]
    assert verdict.candidate.answers[1].text == CORRUPT[1]
    assert verdict.baseline.answers[1].text == SANE[1]


def test_one_lost_fact_is_enough():
    assert judge_canary(grade_canary((*SANE[:2], " 9.")), grade_canary(SANE)).outcome == "broken"


def test_model_that_cannot_answer_proves_nothing():
    lost = grade_canary((" a door.", " a wall.", " a train."))
    verdict = judge_canary(lost, lost)
    assert verdict.outcome == "uninformative"
    assert "cannot vouch" in verdict.reasons[0]


def test_a_context_that_no_prompt_fits_into_is_told_as_that_with_what_is_enough():
    nothing = grade_canary((), 128)
    for whole_tokens in (None, 0):
        verdict = judge_canary(nothing, nothing, whole_tokens=whole_tokens)
        assert verdict.outcome == "uninformative"
        (said,) = verdict.reasons
        assert said.startswith("no canary prompt fits into max-model-len")
        enough = int(re.search(r"raise it to (\d+) tokens", said)[1])
        assert len(canary_requests(enough)) == 1
        assert canary_requests(enough - 1) == ()


def test_what_only_one_of_them_could_take_is_not_compared():
    short, long = grade_canary((" 2956 stones.",), 512), grade_canary(SANE)
    verdict = judge_canary(short, long)
    assert (verdict.outcome, len(verdict.reasons)) == ("uninformative", 1)
    one = grade_canary(SANE[:1], 1000)
    assert judge_canary(one, long).outcome == "ok"


@pytest.mark.parametrize(
    ("ours", "stock", "outcome"),
    [
        ((" a door.", " a wall.", " a train."), SANE, "ok"),
        ((" a door.", " a wall.", " a train."), (" a door.",) * 3, "ok"),
        (("", " a wall.", " a train."), SANE, "broken"),
        ((" door" * 30, *SANE[1:]), SANE, "broken"),
        ((" door" * 30,) * 3, (" door" * 30,) * 3, "uninformative"),
    ],
)
def test_who_may_forget_is_held_to_sane_texts_alone(ours, stock, outcome):
    verdict = judge_canary(grade_canary(ours), grade_canary(stock), whole_tokens=256)
    assert verdict.outcome == outcome


def test_what_is_read_whole_may_not_be_forgotten():
    forgot = (" a door.", *SANE[1:])
    longest = grade_canary(SANE).answers[0].most_tokens
    assert longest < grade_canary(SANE).answers[1].most_tokens
    for whole_tokens, outcome in ((longest - 1, "ok"), (longest, "broken"), (None, "broken")):
        verdict = judge_canary(grade_canary(forgot), grade_canary(SANE), whole_tokens=whole_tokens)
        assert verdict.outcome == outcome
    later = grade_canary((SANE[0], " a wall.", " a train."))
    assert judge_canary(later, grade_canary(SANE), whole_tokens=longest).outcome == "ok"


def test_fact_that_the_baseline_misses_too_is_not_held_against_the_candidate():
    partly = grade_canary((SANE[0], " unknown", SANE[2]))
    assert judge_canary(partly, partly).outcome == "ok"


def test_degenerate_text_is_broken_only_where_the_baseline_is_sane():
    looping = grade_canary((SANE[0] + " door" * 30, *SANE[1:]))
    assert judge_canary(looping, grade_canary(SANE)).outcome == "broken"
    assert judge_canary(looping, looping).outcome == "ok"


def test_digits_inside_a_longer_number_are_not_the_answer():
    assert not grade_canary((" 71940",)).answers[0].right
    assert grade_canary((" 7194.",)).answers[0].right


def test_prompts_are_fixed_long_and_hide_their_fact_early():
    first, second = canary_requests(), canary_requests()
    assert [dataclasses.astuple(request) for request in first] == [
        dataclasses.astuple(request) for request in second
    ]
    assert len(first) == 3
    for request, answer in zip(first, grade_canary(SANE).answers, strict=True):
        prompt = request.prompt
        assert 450 <= len(prompt.split()) <= 1300  # about 700 to 1,500 tokens
        assert prompt.count(answer.expected) == 1
        assert prompt.index(answer.expected) < 0.1 * len(prompt)
        assert prompt.rstrip().endswith(("number", "is"))


def test_prompts_that_may_not_fit_are_left_out():
    assert len(canary_requests(4096)) == 3
    assert len(canary_requests(1100)) == 1
    assert canary_requests(128) == ()


def test_where_no_long_prompt_fits_a_shorter_one_is_asked_and_graded_by_its_own_fact():
    (short,) = canary_requests(512)
    assert short not in canary_requests()
    assert 180 <= len(short.prompt.split()) <= 260  # about 300 tokens
    assert short.prompt.count("2956") == 1
    (answer,) = grade_canary((" 2956 stones.",), 512).answers
    assert answer.right
    report = asyncio.run(run_canary(always_2956, 512))
    assert report == CanaryReport((answer,))
    lost = judge_canary(grade_canary((" many stones.",), 512), report)
    assert lost.outcome == "broken"


async def always_2956(request):
    return " 2956 stones."


def test_every_prompt_is_asked_in_order():
    asked = []

    async def ask(request):
        asked.append(request)
        return SANE[len(asked) - 1]

    report = asyncio.run(run_canary(ask))
    assert asked == list(canary_requests())
    assert report == grade_canary(SANE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n\t ",
        "\ufffd\ufffd\ufffd abc",
        "\x00\x01\x02\x03",
        "no no no no no no no no no",
        "the cat sat. " * 10,
        "a b c d " * 6,
        "well then " + "on and on and " * 8,
        "x" * 80,
        "哈" * 80,
    ],
)
def test_degenerate_text_is_found(text):
    assert broken_output(text) is not None


@pytest.mark.parametrize(
    "text",
    [
        *SANE,
        "no no no",
        "The answer is 4. The answer to the second question is 9, and that is all I know.",
        "A caf\ufffd",
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11",
        "def f(x):\n    return x + 1\n\n\ndef g(x):\n    return x - 1\n",
        "春天的早晨,小镇上的人们在市场里买花、面包和牛奶,孩子们在河边放风筝,老人坐在桥上看着远处的山,"
        "渔夫把船推进水里,风从南方吹来,钟声在教堂上空响了很久,直到雾慢慢散去,太阳照在屋顶上。",
    ],
)
def test_ordinary_text_is_not_called_degenerate(text):
    assert broken_output(text) is None


@given(
    st.lists(st.sampled_from(["alpha", "beta", "gamma", "delta"]), min_size=3, max_size=3),
    st.integers(5, 30),
)
def test_any_phrase_repeated_long_enough_is_a_loop(words, times):
    assert broken_output(" ".join(words * times)) is not None
