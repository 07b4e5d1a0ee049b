"""Which items of the shipped suites are about the same text."""

from collections import defaultdict

import pytest

from kvtune.profilers.quality.suite import Size, SuitePlan, suites

GENERATED = sorted(set(suites()) - {"yours"})


@pytest.mark.parametrize("name", GENERATED)
def test_items_of_a_category_are_about_different_texts(name):
    seen = defaultdict(list)
    for item in suites()[name].items(SuitePlan(size=Size.STANDARD)):
        seen[item.category].append(item.about or item.key)
    assert all(len(set(texts)) == len(texts) > 1 for texts in seen.values())


@pytest.mark.parametrize("name", GENERATED)
def test_items_that_share_most_of_their_prompt_say_so(name):
    items = suites()[name].items(SuitePlan(size=Size.SCREEN))
    for number, item in enumerate(items):
        for other in items[:number]:
            alike = longest_common(whole(item), whole(other))
            shares = alike > 0.5 * min(len(whole(item)), len(whole(other)))
            if shares and alike > 500:
                assert item.about == other.about != ""


def whole(item):
    if item.messages is not None:
        return "".join(message["content"] for message in item.messages)
    return (item.prompt or "") + (item.scored or "")


def longest_common(one, other):
    """Characters that two texts begin with alike."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def test_suites_about_the_same_passages_say_so():
    plan = SuitePlan(size=Size.SCREEN)
    abouts = [
        {item.about for item in suites()[name].items(plan)}
        for name in ("instructions", "length-shift")
    ]
    assert set.intersection(*abouts)


@pytest.mark.parametrize("name", GENERATED)
def test_suites_say_whether_they_have_given_texts_scored(name):
    suite = suites()[name]
    kinds = {item.scored is not None for item in suite.items(SuitePlan(size=Size.SCREEN))}
    assert kinds == {suite.scores}
