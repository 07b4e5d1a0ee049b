"""What makes two measurements the same one, and what is written down of each."""

from dataclasses import replace

import pytest
from contracts.landscape import requests

from kvtune.autotune.ledger import RUNG_CONFIRM, RUNG_LOSSLESS, RequestSet
from kvtune.profilers.load.client import ClosedLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.types import Choice, Goal, Harm, PolicyStack

LOAD = RequestSet(requests(4), "a digest")


def stack(because="", **arguments):
    choice = Choice(
        policy="p", parameters={}, arguments=arguments, harm=Harm.LOSSLESS, because=because
    )
    return PolicyStack(choices=(choice,))


@pytest.fixture
def run(landscape, tuning_on):
    """Run a point on the ledger of a study made with `study`."""

    def go(settings, load=LOAD, *, study=None, repeats=1, seed=0, canary=False, parent=None):
        ledger = tuning_on(**(study or {})).ledger
        return ledger.run(
            settings,
            load,
            repeats=repeats,
            seed=seed,
            rung=RUNG_LOSSLESS,
            canary=canary,
            parent=parent,
        )

    return go


def test_a_point_is_known_by_its_arguments_however_they_are_explained(run, landscape):
    first = run(stack(block=32))
    again = run(stack("for another reason", block=32))
    assert (first.reused, again.reused) == (False, True)
    assert first.trial == again.trial
    assert first.measurement == again.measurement
    assert len(landscape.asked) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"load": RequestSet(requests(4), "another digest")},
        {"seed": 1},
        {"repeats": 2},
        {"canary": True},
        {"study": {"goal": Goal()}},
        {"study": {"plan": LoadPlan(ClosedLoop(5))}},
        {"study": {"model": "org/other"}},
        {"study": {"base": {"enforce-eager": True}}},
    ],
    ids=str,
)
def test_a_measurement_under_other_conditions_is_not_taken(change, run, landscape):
    run(stack(block=32), study={"name": "one"})
    change = {**change, "study": {"name": "two", **change.get("study", {})}}
    assert not run(stack(block=32), **change).reused
    assert len(landscape.asked) == 2


def test_a_measurement_under_the_same_conditions_is_taken_by_another_study(run, landscape, store):
    first = run(stack(block=32), study={"name": "one"})
    taken = run(stack(block=32), study={"name": "two"})
    assert taken.reused
    assert taken.measurement == first.measurement
    assert store.records("two", 0) == store.records("one", 0)
    assert len(landscape.asked) == 1


def test_trials_are_numbered_on(run, store):
    assert [run(stack(block=size)).trial.number for size in (32, 64, 32, 256)] == [0, 1, 0, 2]
    confirming = run(stack(block=64), seed=1, parent=1)
    assert confirming.trial.number == 3
    assert confirming.trial.parent == 1


def test_a_checkpoint_that_was_written_anew_is_another_one(run, landscape, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    study = {"model": str(model)}
    run(stack(block=32), study={"name": "one", **study})
    assert run(stack(block=32), study={"name": "two", **study}).reused
    (model / "model.safetensors").write_bytes(b"other weights")
    assert not run(stack(block=32), study={"name": "three", **study}).reused


def test_an_empty_digest_is_no_wildcard(run, landscape):
    run(stack(block=32), replace(LOAD, digest=""), study={"name": "one"})
    assert not run(stack(block=32), study={"name": "two"}).reused


def test_an_entry_says_why_its_point_was_tried_also_when_the_study_is_opened_again(run, tuning_on):
    assert run(stack(block=32)).rung == RUNG_LOSSLESS
    ledger = tuning_on().ledger
    confirmation = {"rung": RUNG_CONFIRM, "canary": False, "repeats": 1, "seed": 1, "parent": 0}
    ledger.run(stack(block=32), LOAD, **confirmation)
    for one in (ledger, tuning_on().ledger):
        assert [entry.rung for entry in one.entries] == [RUNG_LOSSLESS, RUNG_CONFIRM]
