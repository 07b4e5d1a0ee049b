"""How long questions will take."""

import pytest

from kvtune.autotune.quality.answers import Questions
from kvtune.autotune.quality.prices import ITEM_S, OUTPUT_CHARACTERS, Prices, characters
from kvtune.profilers.quality.compare import Asked, AskedSuite
from kvtune.profilers.quality.suite import Answer, Item, Size, Suite, SuitePlan


class Texts(Suite):
    """Items with prompts of `length` characters that are answered by one token."""

    says, metrics = "", ()
    length = 90

    def items(self, plan):
        count = 4 if plan.size is Size.SCREEN else 10
        prompt = "x" * self.length
        return tuple(Item(f"{n}", "one", prompt=prompt, output_tokens=1) for n in range(count))

    def figures(self, item, ours, theirs):
        return {}


class Short(Texts):
    name = "short"


class Long(Texts):
    name, length = "long", 990


SCREEN = Questions((Short(), Long()), SuitePlan(Size.SCREEN))
PROOF = Questions((Short(), Long()), SuitePlan())
BOTH = ("short", "long")


def test_before_anybody_was_asked_each_item_takes_what_is_stated():
    assert Prices().of_s(PROOF, BOTH, SCREEN) == 20 * ITEM_S
    assert Prices().of_screen_s(SCREEN) == 8 * ITEM_S


def test_a_screen_tells_what_suites_take_by_what_there_is_to_read_and_to_write():
    prices = Prices()
    prices.learn_screen(44.0)  # Four items of 100 characters, and four of 1000: 10 ms each.
    assert prices.of_s(PROOF, ["short"], SCREEN) == pytest.approx(10 * 1.0)
    assert prices.of_s(PROOF, ["long", "long"], SCREEN) == pytest.approx(2 * 10 * 10.0)


def test_a_suite_that_was_asked_alone_takes_what_it_took():
    prices = Prices()
    prices.learn_screen(44.0)
    items = Short().items(SuitePlan(per_category=10))
    answers = tuple(Answer(texts=("y",)) for _ in items)
    suites = (AskedSuite(name="short", items=items, answers=answers),)
    asked = Asked(suites=suites, plan=SuitePlan(), seed=0, concurrency=1, wall_s=70.0)
    prices.learn([{"short": asked}])
    assert prices.of_s(PROOF, BOTH, SCREEN) == pytest.approx(70.0 + 100.0)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (Item("a", "c", prompt="1234", output_tokens=3), 4 + 3 * OUTPUT_CHARACTERS),
        (Item("a", "c", prompt="1234", scored="56"), 6),
        (
            Item("a", "c", messages=({"role": "user", "content": "12"},), follow_ups=("3", "4")),
            4 + 3 * 64 * OUTPUT_CHARACTERS,
        ),
    ],
)
def test_what_there_is_to_read_and_to_write_counts(item, expected):
    assert characters(item) == expected
