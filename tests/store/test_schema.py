import math
from collections import Counter, deque
from types import MappingProxyType

from contracts.store_values import a_run
from hypothesis import given
from hypothesis import strategies as st

from kvtune.store.schema import CompressedRun, Document, compress
from kvtune.types import LoadRun, Measurement, RequestRecord, Status


def unpack(run: LoadRun) -> LoadRun:
    return CompressedRun().process_result_value(compress(run), None)


def test_run_of_any_mapping_and_sequence_is_packed():
    counters = MappingProxyType({"a": 1.0})
    run = LoadRun((), 1.0, 0.1, counters, Counter({"b": deque([(0.0, math.nan)])}))
    unpacked = unpack(run)
    assert unpacked.counters == {"a": 1.0}
    assert repr(unpacked.gauges) == "{'b': [(0.0, nan)]}"


def test_half_a_character_in_broken_output_loses_only_itself():
    record = RequestRecord(0, 0.0, 0.0, 0.1, 0.2, (), 1, 1, 1, text="a\ud83db\0c")
    unpacked = unpack(LoadRun((record,), 1.0, 0.1, {}, {}))
    assert unpacked.records[0].text == "a?b\0c"


def test_packed_run_is_smaller_than_a_tenth_of_its_repetitive_records():
    run = a_run(requests=1000)
    assert len(compress(run)) < len(repr(run)) / 10


@given(st.floats())
def test_every_float_is_kept_to_the_last_bit(value):
    document = Document(Measurement)
    measurement = Measurement(status=Status.OK, metrics={"x": (value,)})
    text = document.process_bind_param(measurement, None)
    assert repr(document.process_result_value(text, None).metrics["x"][0]) == repr(value)
