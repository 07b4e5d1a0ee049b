"""Divergence by place: exact where all is known, and never silent about garbage."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.quality.suite import Answer, Item, Size, SuitePlan, TokenScores, suites
from kvtune.profilers.quality.suites.fidelity import Fidelity, divergence

ITEM = Item("t", "0-512", prompt="", scored="a b")

weights = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4)


def logs(*probabilities):
    return {token: math.log(p) for token, p in enumerate(probabilities)}


def shares(raw):
    return [weight / sum(raw) for weight in raw]


def answer(*tops, token_ids=None, logprobs=None):
    ids = tuple(range(len(tops))) if token_ids is None else token_ids
    said = (-1.0,) * len(tops) if logprobs is None else logprobs
    return Answer(scores=TokenScores(ids, said, tops))


def test_the_suite_is_found():
    assert isinstance(suites()["fidelity"], Fidelity)


@given(weights, weights)
def test_divergence_of_wholly_known_distributions_is_that_of_the_textbook(ours, theirs):
    ours, theirs = shares(ours), shares(theirs)
    expected = sum(q * math.log(q / p) for p, q in zip(ours, theirs, strict=True))
    assert divergence(logs(*ours), logs(*theirs)) == pytest.approx(expected, abs=2e-5)


@given(weights, weights, st.integers(1, 3))
def test_knowing_only_the_likeliest_tokens_never_makes_more_of_it(ours, theirs, kept):
    ours, theirs = shares(ours), shares(theirs)
    whole = sum(q * math.log(q / p) for p, q in zip(ours, theirs, strict=True))
    known = divergence(logs(*ours[:kept]), logs(*theirs[:kept]))
    assert -1e-9 <= known <= whole + 2e-5


def test_the_same_distribution_does_not_diverge():
    assert divergence(logs(0.5, 0.2), logs(0.5, 0.2)) == pytest.approx(0.0, abs=1e-12)


def test_a_distribution_over_other_tokens_diverges_by_nats():
    garbage = {100: math.log(0.6), 101: math.log(0.01)}
    assert divergence(garbage, logs(0.6, 0.3)) > 2


def test_figures_are_means_over_the_tokens():
    theirs = answer(logs(0.5, 0.5), logs(0.9, 0.1), logprobs=(-1.0, -2.0))
    ours = answer(logs(0.5, 0.5), logs(0.1, 0.9), logprobs=(-1.0, -4.0))
    found = Fidelity().figures(ITEM, ours, theirs)
    assert found["kl"] == (pytest.approx(0.8 * math.log(9) / 2, abs=1e-5), 0.0)
    assert found["top1"] == (0.5, 1.0)
    assert found["log-perplexity"] == (2.5, 1.5)


def test_equally_likely_tokens_agree_in_any_order():
    tie = {7: math.log(0.5), 3: math.log(0.5)}
    same = {3: math.log(0.5), 7: math.log(0.5)}
    assert Fidelity().figures(ITEM, answer(tie), answer(same))["top1"] == (1.0, 1.0)


def test_other_tokens_or_no_scores_say_nothing():
    one, other = answer(logs(1.0), token_ids=(1,)), answer(logs(1.0), token_ids=(2,))
    assert Fidelity().figures(ITEM, one, other) == {}
    assert Fidelity().figures(ITEM, Answer(texts=("x",)), other) == {}


def test_parts_of_a_text_follow_each_other_and_make_it_up():
    parts = {}
    for item in Fidelity().items(SuitePlan(size=Size.STANDARD)):
        key, _, place = item.key.partition("/")
        assert place == item.category
        assert item.prompt == parts.get(key, "")
        assert item.scored.startswith(" ") is bool(item.prompt)
        parts[key] = item.prompt + item.scored
    assert len(parts) == 16
    assert len(set(parts.values())) == 16


def test_categories_are_places_in_the_context():
    items = Fidelity().items(SuitePlan(size=Size.STANDARD))
    assert {item.category for item in items} == {"0-512", "512-1k", "1k-2k"}
    assert {item.place["length_tokens"] for item in items} == {512, 1024, 2048}


@pytest.mark.parametrize("size", [Size.STANDARD, Size.FULL])
def test_a_larger_size_extends_the_screen(size):
    screen = Fidelity().items(SuitePlan(size=Size.SCREEN, max_tokens=4096))
    larger = Fidelity().items(SuitePlan(size=size, max_tokens=4096))
    assert set(map(repr, screen)) < set(map(repr, larger))


def test_another_seed_gives_other_texts():
    first, second = (Fidelity().items(SuitePlan(seed=seed)) for seed in (0, 1))
    assert not {item.scored for item in first} & {item.scored for item in second}


@given(st.integers(64, 5000))
def test_nothing_is_made_that_cannot_fit(max_tokens):
    for item in Fidelity().items(SuitePlan(size=Size.SCREEN, max_tokens=max_tokens)):
        assert len(item.prompt + item.scored) / 3 < max_tokens  # English is never denser


def test_the_workloads_own_prompts_are_scored_too():
    prompts = ("a short one", "word " * 600)
    items = Fidelity().items(SuitePlan(size=Size.SCREEN, workload=prompts))
    own = [item for item in items if item.key.startswith("prompt-")]
    assert [item.key for item in own] == ["prompt-1/0-512", "prompt-1/512-1k"]
    assert "".join(item.scored for item in own) == prompts[1]
    assert {item.key.partition("/")[0] for item in items} == {
        *("prompt-1", "text-0", "text-1", "text-2")
    }


@pytest.mark.parametrize("script", ["春眠不覺曉處處聞啼鳥", "Съешь ещё этих мягких булок ", "🙂🙃"])
def test_prompts_in_other_scripts_are_cut_where_even_bytes_would_fit(script):
    prompt = script * 2000
    items = Fidelity().items(
        SuitePlan(size=Size.STANDARD, per_category=1, max_tokens=4096, workload=(prompt,))
    )
    assert items
    assert {item.key.partition("/")[0] for item in items} == {"prompt-0"}
    told = "".join(item.scored for item in items)
    assert prompt.startswith(told)
    assert len(told.encode()) < 4096  # a token is a byte or more


def test_sections_say_again_what_stands_before_them():
    text = Fidelity().items(SuitePlan(size=Size.SCREEN))[0].scored
    sentences = [sentence.strip() for sentence in text.split(".") if sentence.strip()]
    repeated = len(sentences) - len(set(sentences))
    assert 0.1 < repeated / len(sentences) < 0.4


def test_detail_tells_the_perplexity():
    told = Fidelity().detail(ITEM, answer(logs(1.0), logprobs=(-math.log(8),)))
    assert told == "perplexity 8"
