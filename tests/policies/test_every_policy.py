import pytest
from contracts.policy import VLLM_OPTIONS, PolicyContract
from contracts.policy_samples import SITUATIONS

from kvtune.policies.base import policies
from kvtune.policies.plugin_arguments import PROTECTED_TOKENS
from kvtune.policies.stack import ORDER, RULES


class TestEveryPolicy(PolicyContract):
    @pytest.fixture(params=sorted(policies()))
    def policy(self, request):
        return policies()[request.param]()

    @pytest.fixture(params=SITUATIONS)
    def ctx(self, request):
        return SITUATIONS[request.param]


def test_every_lever_has_its_place_in_the_order():
    assert set(ORDER) == set(policies())


def test_together_the_levers_cover_every_known_option_once():
    arguments = [argument for policy in policies().values() for argument in policy.arguments]
    # StreamingLLM and page eviction, which never go together, both protect the same beginning.
    arguments.remove(PROTECTED_TOKENS)
    assert sorted(arguments) == sorted(VLLM_OPTIONS)


def test_knob_names_are_unique_and_conditions_name_knobs_that_come_earlier():
    owners = {}
    for ctx in SITUATIONS.values():
        for name in ORDER:
            for knob in policies()[name]().knobs(ctx):
                assert owners.setdefault(knob.name, name) == name
                for parent in knob.active_when or {}:
                    assert ORDER.index(owners[parent]) <= ORDER.index(name)


def test_every_repair_names_a_knob_that_some_policy_has():
    contexts = SITUATIONS.values()
    names = {
        knob.name
        for policy in policies().values()
        for ctx in contexts
        for knob in policy().knobs(ctx)
    }
    assert {name for rule in RULES for name in rule.repairs} <= names
