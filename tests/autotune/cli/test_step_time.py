"""The step-time model in words: units that suit, and no speed where none was seen."""

import pytest

from kvtune.autotune.cli.step_time import print_step_time
from kvtune.types import Interval, StepTimeModel


def interval(estimate, low, high, unit="s"):
    return Interval(estimate=estimate, low=low, high=high, unit=unit)


def model(**changed):
    known = {
        "source": "probe",
        "fixed_s": interval(0.0401, 0.0391, 0.0412),
        "per_sequence_s": interval(0.00101, 0.0009, 0.0012),
        "per_kv_token_s": interval(3.1e-6, 2.9e-6, 3.3e-6),
        "observations": 1234,
        "error_share": 0.0412,
        "kv_bytes_per_s": interval(7.4e9, 7e9, 8e9, "bytes/s"),
    }
    return StepTimeModel(**{**known, **changed})


@pytest.fixture
def said(capsys):
    def said(model):
        print_step_time(model)
        return capsys.readouterr().out.splitlines()

    return said


def test_each_part_has_its_unit_and_interval(said):
    assert said(model(weight_read_s=0.0209)) == [
        "",
        "A decode step costs (from 1,234 steps seen in the probe):",
        "- 40.1 ms (39.1 ms to 41.2 ms) in any case, of which reading the weights 20.9 ms",
        "- 1.01 ms (0.9 ms to 1.2 ms) a sequence",
        "- 3.1 µs (2.9 µs to 3.3 µs) a resident token, KV read at 7.4 GB/s",
        "half of the steps are within 4.12% of that",
    ]


def test_a_part_that_may_be_nothing_has_no_speed(said):
    lines = said(model(source="load", per_kv_token_s=interval(1e-7, 0.0, 2e-6)))
    assert lines[1].endswith("seen in the load itself):")
    assert lines[4] == "- 0.1 µs (0 µs to 2 µs) a resident token; it cannot be told from nothing"


def test_without_bytes_a_token_there_is_no_speed(said):
    assert said(model(kv_bytes_per_s=None))[4].endswith("(2.9 µs to 3.3 µs) a resident token")


def test_without_a_model_nothing_is_said(said):
    assert said(None) == []
