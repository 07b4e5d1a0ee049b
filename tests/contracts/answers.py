"""Compare what tests/integration/small_vllm.py `answer`s: calls of prompts, by their tokens."""

import pytest

ROUNDING = 1e-3
"""How far a log probability may be off where float32 sums come in another order: measured are 1e-4
at most, and 0.01 and more where a page is lost, or another is read in its place."""


def assert_same(ours, theirs, off=ROUNDING):
    """Hold calls to the tokens of others, and to their log probabilities."""
    assert [call["ids"] for call in ours] == [call["ids"] for call in theirs]
    assert same_but_for_ties(ours, theirs, off) == sum(
        len(ids) for call in ours for ids in call["ids"]
    )


def same_but_for_ties(ours, theirs, off):
    """Hold calls to the tokens of others, up to one whose best two `off` could swap.

    After such a token texts are different ones. Returns how many tokens were compared.
    """
    compared = 0
    for call, other_call in zip(ours, theirs, strict=True):
        for answer, other in zip(call["best"], other_call["best"], strict=True):
            for mine, others in zip(answer, other, strict=True):
                compared += 1
                (token, score), (_, second) = mine
                (other_token, other_score), _ = others
                assert score == pytest.approx(other_score, abs=off)
                if token != other_token:
                    assert score - second < 2 * off
                    break
    return compared
