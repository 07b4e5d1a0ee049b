from kvtune.autotune.front_words import figure_text, roles
from kvtune.types import Front, FrontPoint, Interval


def test_a_point_may_be_more_than_one_thing():
    point = FrontPoint(trial=3, figures={})
    front = Front(
        objectives=("goodput", "memory"), points=(point,), ends={"goodput": 3, "memory": 1}, knee=3
    )
    assert roles(point, front, 3) == "recommended, best goodput, knee"
    assert roles(point.model_copy(update={"trial": 2}), front, 3) == ""


def test_bytes_are_told_in_mib_and_what_is_0_by_definition_without_an_interval():
    assert figure_text(Interval(estimate=3 << 20, low=0, high=1, unit="bytes")) == "3 MiB"
    assert figure_text(Interval(estimate=0.0, low=0.0, high=0.1, unit="nats")) == "0"
    assert figure_text(Interval(estimate=0.01, low=0.0, high=0.1, unit="nats")) == "0.01 (0 to 0.1)"
