"""How fast a second tier gives back what it holds."""

from kvtune.autotune.forecast.loading import LOADED_ON_CPU, LOADED_ON_GPU, load_speeds


def test_what_nobody_measured_is_the_assumption():
    assert load_speeds(LOADED_ON_GPU, None) == (10e9, 20e9, 50e9)


def test_nothing_is_copied_faster_than_memory_is_read_and_written():
    assert load_speeds((1.0, 2.0, 8.0), 6.0) == (1.0, 2.0, 3.0)


def test_least_expected_and_most_are_in_order():
    for speeds in (LOADED_ON_CPU, LOADED_ON_GPU):
        assert list(speeds) == sorted(speeds)
