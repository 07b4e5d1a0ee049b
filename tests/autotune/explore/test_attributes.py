"""What the sampler's tables say of a trial."""

from contracts.studies import failed, measured, stack

from kvtune.autotune.explore.attributes import attributes_of, attributes_unmeasured
from kvtune.autotune.ledger import RUNG_NEAR_LOSSLESS, Entry
from kvtune.types import Trial

FP8 = stack({"kv-cache-dtype": "fp8", "block-size": 32})


def entry(found):
    trial = Trial(number=7, stack=FP8, base_arguments={}, repeats=1, seed=0)
    return Entry(trial, found, reused=False, rung=RUNG_NEAR_LOSSLESS)


def test_a_measured_trial_says_what_it_is_and_took():
    assert attributes_of(entry(measured(2.0, wall_s=12.5))) == {
        "settings": "kv-cache-dtype fp8, block-size 32",
        "kvtune trial": 7,
        "rung": "L2",
        "seconds": 12.5,
        "outcome": "ok",
        "why": "",
    }


def test_a_failed_trial_says_its_class():
    said = attributes_of(entry(failed(message="no room")))
    assert (said["outcome"], said["why"]) == ("crash-under-load", "no room")
    assert said["seconds"] is None


def test_what_was_never_launched_says_why():
    assert attributes_unmeasured(FP8, "too small") == {
        "settings": "kv-cache-dtype fp8, block-size 32",
        "outcome": "not launched",
        "why": "too small",
    }
