from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.quality.sizes import fitting, numbered
from kvtune.profilers.quality.suite import Item, Size, SuitePlan

STAGES = ((Size.SCREEN, 3, "short"), (Size.STANDARD, 5, "middle"), (Size.FULL, 9, "long"))


def _asked(size, count=None):
    return list(numbered(SuitePlan(size, per_category=count), STAGES))


def test_each_size_adds_its_own_items_to_those_of_the_smaller_one():
    short = [(0, "short"), (1, "short"), (2, "short")]
    middle = [(3, "middle"), (4, "middle")]
    assert _asked(Size.SCREEN) == short
    assert _asked(Size.STANDARD) == short + middle
    assert _asked(Size.FULL) == short + middle + [(number, "long") for number in range(5, 9)]


@given(st.sampled_from(Size), st.integers(0, 20))
def test_a_number_of_items_that_is_asked_for_is_kept(size, count):
    asked = _asked(size, count)
    assert [number for number, _ in asked] == list(range(count))
    if count > 9:
        assert asked[-1][1] == dict(zip(Size, ("short", "middle", "long"), strict=True))[size]


def test_only_chats_that_fit_with_all_their_answers_are_left():
    chat = Item(
        key="one",
        category="any",
        messages=({"role": "user", "content": "x" * 300},),
        follow_ups=("y" * 30,),
        output_tokens=20,
    )
    least = 300 // 3 + 30 // 3 + 2 * 12 + 2 * 20
    assert fitting([chat], least) == (chat,)
    assert fitting([chat], least - 1) == ()
    assert fitting([chat], None) == (chat,)
