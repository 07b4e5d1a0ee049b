from kvtune.autotune.explore.reasons import Aim, Known, because
from kvtune.types import Interval

EXPECTED = Interval(
    estimate=41.1, low=35.0, high=50.0, unit="1/s", confidence=0.9, repeats=5, method="draws"
)


def test_what_is_expected_comes_with_its_range_and_beside_the_best():
    said = because(Aim.GAIN, EXPECTED, Known(measured=5, is_simulated=True, best=48.7))
    assert said == (
        "what it shows, of points alike too, should better the choice most: the simulation and "
        "5 measurements expect 41.1 (35 to 50) 1/s of it, 48.7 of the best so far"
    )


def test_one_measurement_is_one():
    alone = because(Aim.GAIN, EXPECTED, Known(measured=1, is_simulated=False, best=None))
    assert alone.endswith(": 1 measurement expects 41.1 (35 to 50) 1/s of it")
    both = because(Aim.GAIN, EXPECTED, Known(measured=1, is_simulated=True, best=None))
    assert "the simulation and 1 measurement expect 41.1" in both


def test_a_look_says_that_it_is_one_and_a_repeat_why_it_comes_again():
    known = Known(measured=5, is_simulated=False, best=48.7)
    assert "looks where the best may still hide" in because(Aim.LOOK, EXPECTED, known)
    assert because(Aim.AGAIN, EXPECTED, known) == Aim.AGAIN.value
