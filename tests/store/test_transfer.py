import io
from pathlib import Path

import pytest
from contracts.store_fixtures import exported, lines
from contracts.store_values import a_full_history, a_study
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtune.errors import BadInput
from kvtune.store import open_store
from kvtune.types import Failure, LoadRun, Measurement, PolicyStack, RequestRecord, Trial

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
any_text = st.text(st.characters(categories=("Cs", "Cc", "L")))  # NUL, and half characters
records = st.builds(RequestRecord, error=st.none() | any_text, text=st.none() | any_text)
runs = st.builds(
    LoadRun,
    records=st.lists(records, max_size=3).map(tuple),
    counters=st.dictionaries(st.text(), st.floats(), max_size=3),
    gauges=st.dictionaries(
        st.text(), st.lists(st.tuples(st.floats(), st.floats()), max_size=2), max_size=2
    ),
    warnings=st.lists(any_text, max_size=2).map(tuple),
)
measurements = st.builds(
    Measurement,
    failure=st.none() | st.builds(Failure),
    metrics=st.dictionaries(st.text(), st.lists(st.floats(), max_size=3).map(tuple), max_size=3),
    counters=st.lists(st.dictionaries(st.text(), st.floats(), max_size=2), max_size=2).map(tuple),
    effective=st.none(),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("transfer")


@pytest.fixture(scope="module")
def stores(directory):
    with open_store(directory / "one.db") as one, open_store(directory / "two.db") as two:
        yield one, two, a_study(one)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    measurement=measurements,
    runs=st.lists(runs, max_size=2),
    figures=st.dictionaries(st.text(), json_values, max_size=2),
    arguments=st.dictionaries(st.text(), json_values, max_size=2),
)
def test_whatever_is_saved_is_exported_and_imported_unchanged(
    stores, measurement, runs, figures, arguments
):
    one, two, study = stores
    trial = Trial(
        number=len(one.trials(study)),
        stack=PolicyStack(),
        base_arguments=arguments,
        repeats=1,
        seed=0,
    )
    one.finish_attempt(one.begin_attempt(study, trial, "k"), measurement, runs, figures=figures)
    two.import_(exported(one))
    assert lines(two) == lines(one)
    stored = one.trial(study, trial.number)
    assert repr(stored.measurement.metrics) == repr(measurement.metrics)
    assert [len(records) for records in one.records(study, trial.number)] == [
        len(run.records) for run in runs
    ]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_export_is_refused_or_harmless(data, directory, damaged_export, empty):
    start = data.draw(st.integers(0, len(damaged_export) - 1))
    length = data.draw(st.integers(1, 40))
    filler = data.draw(st.text(max_size=5))
    text = damaged_export[:start] + filler + damaged_export[start + length :]
    before = lines(empty)
    refused = None
    try:
        empty.import_(io.StringIO(text))
    except BadInput as error:
        refused = error.message
    assert refused is None or (refused.startswith("line ") and lines(empty) == before)


@pytest.fixture(scope="module")
def damaged_export(directory) -> str:
    with open_store(directory / "full.db") as store:
        a_full_history(store)
        return exported(store).getvalue()


@pytest.fixture(scope="module")
def empty(directory):
    with open_store(directory / "empty.db") as store:
        yield store


def test_file_that_is_not_text_is_named_by_line(tmp_path, empty):
    binary = tmp_path / "export"
    binary.write_bytes(b'{"kind":"kvtune-export"}\n\xff\xfe\n')
    with binary.open(encoding="utf-8") as stream, pytest.raises(BadInput, match="not UTF-8 text"):
        empty.import_(stream)
