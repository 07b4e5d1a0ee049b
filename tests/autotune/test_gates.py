"""Whatever speaks against a trial keeps it from being shipped."""

from types import SimpleNamespace

import pytest
from contracts.landscape import RIGHT, WRONG

from kvtune.autotune.gates import Gates
from kvtune.autotune.ledger import Entry
from kvtune.autotune.quality.words import NOT_ASKED
from kvtune.types import Choice, Harm, Measurement, OutputHealth, PolicyStack, Status, Trial

STOCK_OUTPUTS = OutputHealth(answers=100, text_prompts=100, long_prompts=100)
BROKEN_OUTPUTS = STOCK_OUTPUTS.model_copy(update={"looping": 60})


def measured(canary=RIGHT, outputs=STOCK_OUTPUTS):
    return Measurement(status=Status.OK, canary_answers=canary, outputs=outputs)


def entry(harm, measurement):
    choice = Choice(policy="p", parameters={}, arguments={"a": 1}, harm=harm)
    stack = PolicyStack(choices=(choice,))
    return Entry(
        Trial(number=1, stack=stack, base_arguments={}, repeats=1, seed=0), measurement, True
    )


def quality(objection=None, unproved=None):
    return SimpleNamespace(objection=lambda trial: objection, unproved=lambda trial: unproved)


@pytest.mark.parametrize("harm", list(Harm))
def test_broken_answers_to_its_own_traffic_speak_against_every_trial(harm):
    said = Gates(measured(), None).objection(entry(harm, measured(outputs=BROKEN_OUTPUTS)))
    assert said.startswith("60 of 100 answers")
    assert Gates(measured(), None).objection(entry(harm, measured())) is None


def test_each_gate_alone_is_enough():
    harmful = entry(Harm.NEAR_LOSSLESS, measured())
    assert Gates(measured(), quality("too much was lost")).objection(harmful) == "too much was lost"
    assert Gates(measured(), quality()).objection(harmful) is None
    lost = entry(Harm.NEAR_LOSSLESS, measured(canary=WRONG))
    assert "'7194'" in Gates(measured(), quality("too much was lost")).objection(lost)


def test_what_nobody_asked_proves_nothing_where_proof_is_wanted():
    harmful = entry(Harm.NEAR_LOSSLESS, measured())
    assert Gates(measured(), quality(unproved="not asked")).unproved(harmful) == "not asked"
    assert Gates(measured(), None).unproved(harmful) is None


@pytest.mark.parametrize(
    ("harm", "found", "said"),
    [
        (Harm.LOSSLESS, "it passed", None),
        (Harm.NEAR_LOSSLESS, "it passed", "it passed"),
        (Harm.NEAR_LOSSLESS, None, NOT_ASKED),
    ],
)
def test_what_is_known_of_answers_is_said_of_what_may_change_them(harm, found, said):
    judged = SimpleNamespace(verdict=lambda number: found)
    assert Gates(measured(), judged).vouched(entry(harm, measured())) == said
    if found is None:
        assert Gates(measured(), None).vouched(entry(harm, measured())) == said
