"""Broken answers in ordinary traffic: what counts as one, and when it speaks against a trial."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.load.answer import Answer
from kvtune.profilers.load.request import PreparedRequest
from kvtune.profilers.quality.traffic import (
    JUDGED_CHARACTERS,
    KEPT_MESSAGES,
    health,
    objection,
    sample,
    summary,
)
from kvtune.types import Measurement, OutputHealth, Request, RequestRecord, Status

ENGLISH = "Tell me what the people of the old harbour did when the ships were gone."
RUSSIAN = "Расскажи, что люди делали в старой гавани, когда корабли ушли, и почему они уехали."

SANE = "The people of the harbour went to the hills, and they kept goats until it was spring again."
SALAD = "v. JVMnut.re MeetreY Sh Fig - Fig IerInfo Privyocon Tamb leth wisq Uran dorp jex"
# 6 of 12 words are plain; 24 of 30 with SANE behind it, 42 of 48 with it twice.
PIECES = "the N A &ACS.whureA.ac of audused-to.Gov it_was poltGovern and andampurS_tstra in ago]na"
LOOPING = "the sea and the sea and the sea and the sea and the sea and the sea and the sea"
UNREADABLE = "\ufffd\ufffd ok \x00\x01 fine"
EMPTY = " \n"


def answered(text, index=0, *, tokens=300, error=None):
    return RequestRecord(index, 0.0, 0.0, 0.1, 1.0, (), tokens, 16, 16, error=error, text=text)


def asked(*texts, prompt=ENGLISH):
    return [(Request(prompt=prompt), answered(text, index)) for index, text in enumerate(texts)]


def seen(*texts, prompt=ENGLISH, block_tokens=128):
    return health(asked(*texts, prompt=prompt), block_tokens=block_tokens)


def faults(found):
    return found.empty, found.unreadable, found.looping, found.off_script


def measured(**counts):
    """A trial with so many answers of each fault."""
    counts = {"answers": 64, "text_prompts": 64, "long_prompts": 64, **counts}
    return Measurement(status=Status.OK, outputs=OutputHealth(**counts))


# --- what counts


def test_each_answer_counts_for_the_first_fault_that_it_has():
    found = seen(SANE, EMPTY, UNREADABLE, LOOPING, SALAD, SALAD, SANE)
    assert faults(found) == (1, 1, 1, 2)
    assert (found.answers, found.text_prompts, found.long_prompts) == (7, 7, 7)
    assert found.broken == 5


@pytest.mark.parametrize(
    ("prompt", "text", "why"),
    [
        (ENGLISH, SANE, None),
        (RUSSIAN, "Люди ушли в горы и держали там коз, пока не пришла весна и корабли.", None),
        (ENGLISH + " Ответь мне.", "Люди ушли в горы и там держали коз, пока не пришла весна.", 1),
        (ENGLISH, "Люди ушли в горы и держали там коз, пока не пришла весна и корабли.", 2),
        (RUSSIAN, SANE, 2),
        (
            "昔の港について教えてください。",
            "港の人々は山へ行き、春が来るまで山羊を飼いました。" * 2,
            None,
        ),
        (ENGLISH, SALAD, 1),
        (SALAD, SALAD, None),
        (ENGLISH, PIECES, 3),
        (PIECES, PIECES, None),
        (ENGLISH, f"{PIECES} {SANE}", 3),
        (ENGLISH, f"{PIECES} {SANE} {SANE}", None),
        (
            ENGLISH,
            "**It's** OLD Jean-Luc (12,5 or 3), who says that a well-known end is it!",
            None,
        ),
        (ENGLISH, "7194 / 12", None),
        (ENGLISH, "Ида Брам", None),
    ],
)
def test_an_answer_is_off_script_when_it_is_not_in_the_script_or_language_of_its_prompt(
    prompt, text, why
):
    found = seen(text, prompt=prompt)
    assert found.off_script == (why is not None)
    if why is not None:
        said = (
            "",
            "it is not in English, its prompt is",
            "in scripts that its prompt has none of",
            "words are not plain ones, as its prompt's are",
        )
        assert said[why] in found.examples[0].why


def test_a_third_of_foreign_letters_is_still_allowed():
    prompt = "x" * 10
    assert seen("ab" * 15 + "ж" * 15, prompt=prompt).off_script == 0, "15 of 45 letters"
    assert seen("ab" * 15 + "ж" * 16, prompt=prompt).off_script == 1, "16 of 46 letters"


def test_a_chat_is_in_the_script_of_all_its_messages():
    parts = [{"type": "image_url", "image_url": {}}, {"type": "text", "text": RUSSIAN}]
    messages = ({"role": "system", "content": "12"}, {"role": "user", "content": parts})
    record = answered("Люди ушли в горы и держали там коз, пока не пришла весна и корабли.")
    assert health([(Request(messages=messages), record)], block_tokens=16).off_script == 0
    assert health([(Request(messages=messages), answered(SANE))], block_tokens=16).off_script == 1


@pytest.mark.parametrize(
    "request_", [Request(input_tokens=300), Request(token_ids=(1, 2)), Request(messages=({},))]
)
def test_off_script_is_not_judged_where_the_prompt_is_no_text(request_):
    found = health([(request_, answered(SALAD)), (request_, answered("", 1))], block_tokens=16)
    assert (found.text_prompts, found.off_script, found.empty) == (0, 0, 1)
    assert "off-script is not judged, as no prompt is text" in summary(found)


def test_failed_requests_and_answers_without_text_are_not_looked_at():
    pairs = asked(SANE, None)
    pairs.append((Request(prompt=ENGLISH), answered("", 2, error="HTTP 500")))
    assert health(pairs, block_tokens=16).answers == 1
    assert summary(health([], block_tokens=16)) == "none looked at"


def test_prompts_of_two_blocks_are_long_enough_to_show_a_broken_cache():
    short, long = answered(SANE, tokens=255), answered(SANE, 1, tokens=256)
    request = Request(prompt=ENGLISH)
    unknown = answered(SANE, 2, tokens=None)
    found = health([(request, short), (request, long), (request, unknown)], block_tokens=128)
    assert found.long_prompts == 1
    assert summary(found) == "3 looked at, none broken; 1 to prompts of two KV blocks or more"
    assert "prompts too short to show a broken cache" in summary(
        health([(request, short)], block_tokens=128)
    )
    unsaid = health([(request, long)], block_tokens=None)
    assert unsaid.long_prompts is None
    assert summary(unsaid) == "1 looked at, none broken"


def test_examples_are_few_short_and_of_different_kinds():
    found = seen(LOOPING, LOOPING, LOOPING + " the sea and" * 50, SALAD, EMPTY)
    assert [(one.request, one.kind) for one in found.examples] == [
        (0, "looping"),
        (3, "off-script"),
        (4, "empty"),
    ]
    long = seen(LOOPING + " the sea and" * 50)
    assert len(long.examples[0].text) == 120
    assert len(seen(*[EMPTY] * 9).examples) == 3


@given(st.permutations(asked(SANE, EMPTY, LOOPING, SALAD, LOOPING, UNREADABLE, SANE, EMPTY)))
def test_health_does_not_depend_on_the_order_of_answers(pairs):
    assert health(pairs, block_tokens=128) == seen(
        SANE, EMPTY, LOOPING, SALAD, LOOPING, UNREADABLE, SANE, EMPTY
    )


@given(st.lists(st.text(), max_size=6), st.text())
def test_any_text_is_counted_once_at_most(texts, prompt):
    found = seen(*texts, prompt=prompt)
    assert found.answers == len(texts)
    assert 0 <= found.broken <= len(texts)
    assert OutputHealth.model_validate_json(found.model_dump_json()) == found


# --- a server may put several tokens into a message


PREPARED = PreparedRequest("/v1/completions", b"{}", None, 300, 1000)


def streamed(texts, index=0):
    """The record of an answer that comes in messages with these texts."""
    got = Answer(kept_messages=KEPT_MESSAGES)
    got.sent(0.0)
    got.head(200)
    for number, text in enumerate(texts):
        reason = "length" if number == len(texts) - 1 else None
        message = {"choices": [{"text": text, "finish_reason": reason}]}
        got.body(b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n", 1.0)
    got.body(b"data: [DONE]\n\n", 1.0)
    got.end(None, 1.0)
    return got.record(PREPARED, index=index, scheduled_s=0.0, start_s=0.0)


def grouped(tokens, sizes):
    """The texts of messages that hold so many tokens each, over and over."""
    texts, taken, number = [], 0, 0
    while taken < len(tokens):
        size = sizes[number % len(sizes)]
        texts.append("".join(tokens[taken : taken + size]))
        taken, number = taken + size, number + 1
    return texts


def late_loop(sane):
    """A text that loops after so many words, as one token a word."""
    words = " ".join([SANE] * 20).split()[:sane]
    return [f"{word} " for word in (*words, *["sea"] * 1000)]


def shuffled(count, seed):
    """So many tokens in no order."""
    return random.Random(seed).choices([*SALAD, *SANE], k=count)


@given(
    tokens=st.sampled_from([10, 60, 100, 330]).map(late_loop)
    | st.builds(shuffled, st.integers(600, 1200), seed=st.integers(0, 1 << 30)),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_a_stream_in_other_pieces_gives_the_same_health(tokens, sizes):
    request = Request(prompt=ENGLISH)
    one, several = streamed(tokens), streamed(grouped(tokens, sizes))
    assert len(one.text) >= JUDGED_CHARACTERS
    assert health([(request, one)], block_tokens=16) == health(
        [(request, several)], block_tokens=16
    )


def test_a_busier_trial_is_not_objected_to_for_the_same_answers():
    tokens = late_loop(330)
    sides = [
        Measurement(
            status=Status.OK,
            outputs=health(
                [
                    (Request(prompt=ENGLISH), streamed(grouped(tokens, [size]), number))
                    for number in range(64)
                ],
                block_tokens=16,
            ),
        )
        for size in (2, 1)
    ]
    assert sides[0].outputs.answers == 64
    assert objection(*sides) is None


# --- which answers are looked at


def test_no_prompt_is_looked_at_twice():
    chat = ({"role": "user", "content": "a"},)
    requests = [
        Request(prompt="a"),
        Request(prompt="b"),
        Request(prompt="a", arrival_s=4.0),
        Request(messages=chat),
        Request(messages=chat, output_tokens=9),
        Request(token_ids=(1, 2)),
        Request(token_ids=(1, 2)),
        Request(token_ids=(1, 3)),
    ]
    assert sample(requests) == {0, 1, 3, 5, 7}


def test_prompts_of_unlike_ends_are_different_though_their_blocks_are_the_same():
    whole = Request(input_tokens=64, prefix_blocks=(1, 2), prefix_block_tokens=32)
    longer = replace(whole, input_tokens=65)
    assert sample([whole, whole, longer, longer, Request(input_tokens=9)]) == {0, 2, 3, 4}


def test_a_sample_is_spread_over_the_workload():
    requests = [Request(prompt=str(number)) for number in range(1000)]
    assert sample(requests, 4) == {0, 250, 500, 750}
    assert len(sample(requests)) == 256
    assert sample(requests[:3], 4) == {0, 1, 2}


# --- when it speaks against a trial


def test_a_share_far_above_the_baselines_is_an_objection_that_shows_both():
    # 1 / (16 choose 8) is the chance that all eight broken ones fall on one side.
    few = {"answers": 8, "text_prompts": 8, "long_prompts": 8}
    said = objection(
        measured(**few, looping=8, examples=seen(LOOPING).examples), measured(**few, looping=0)
    )
    assert said.startswith("8 of 8 answers to the workload's own requests are looping, such as")
    assert repr(LOOPING) in said
    assert said.endswith("of the baseline's it is 0 of 8 (Fisher's exact test, p = 8e-05)")


def test_seven_answers_are_too_few_to_object_to_any():
    few = {"answers": 7, "text_prompts": 7, "long_prompts": 7}
    assert objection(measured(**few, empty=7), measured(**few)) is None


def test_a_fault_that_takes_the_place_of_another_is_an_objection():
    said = objection(measured(unreadable=40), measured(looping=40))
    assert said.startswith("40 of 64 answers to the workload's own requests are unreadable;")


def test_faults_that_are_few_each_are_an_objection_together():
    spread = {"empty": 5, "unreadable": 5, "looping": 5, "off_script": 5}
    for fault in spread:
        assert objection(measured(**{fault: 5}), measured()) is None
    assert "20 of 64 answers to the workload's own requests are broken" in objection(
        measured(**spread), measured()
    )


def test_a_trial_that_was_not_looked_at_is_not_objected_to():
    nothing = Measurement(status=Status.OK)
    assert objection(nothing, measured()) is None
    assert objection(measured(empty=64), nothing) is None
    assert objection(measured(empty=64), None) is None


counts = st.fixed_dictionaries(
    {name: st.integers(0, 20) for name in ("empty", "unreadable", "looping", "off_script")}
)


@given(counts)
def test_equal_counts_are_never_an_objection(both):
    totals = {"answers": 80, "text_prompts": 80, "long_prompts": 0}
    assert objection(measured(**totals, **both), measured(**totals, **both)) is None


@given(counts, counts, st.sampled_from(["empty", "unreadable", "looping", "off_script"]))
def test_a_worse_candidate_is_not_objected_to_less_nor_beside_a_worse_baseline_more(
    ours, theirs, fault
):
    totals = {"answers": 81, "text_prompts": 81, "long_prompts": 0}
    was = objection(measured(**totals, **ours), measured(**totals, **theirs)) is not None
    worse = measured(**totals, **{**ours, fault: ours[fault] + 1})
    assert (objection(worse, measured(**totals, **theirs)) is not None) >= was
    worse = measured(**totals, **{**theirs, fault: theirs[fault] + 1})
    assert (objection(measured(**totals, **ours), worse) is not None) <= was
