"""What a study's page says of how its trials were measured."""

import pytest
from contracts.studies import measured, of

from kvtune.autotune.report.study_evidence import measured_blocks
from kvtune.store.database import open_store
from kvtune.types import EffectiveConfig


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (("warm", "narrowed"), "Every trial, and every round of the confirmation, had a server"),
        (("warm", "live", "live"), "2 of 3 trials had the running server of the trial before"),
    ],
)
def test_whose_server_trials_had_is_told_as_it_was(kinds, said, tmp_path):
    found = [measured(2.0, effective=EffectiveConfig(start_kind=kind)) for kind in kinds]
    with open_store(tmp_path / "s.db") as store:
        view = of(store, *(({"a": n} if n else {}, one) for n, one in enumerate(found)))
    (text,) = [block for block in measured_blocks(view) if isinstance(block, str)]
    assert said in text
