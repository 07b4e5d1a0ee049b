"""Which methods go together, and what is said of those that do not."""

import itertools

import pytest

from kvtune.errors import BadInput
from kvtune.policies.compose import nearest_legal, notes, publish_of, refusals, require_legal
from kvtune.policies.method import SelectionMethod, StoreMethod, TokenMethod, methods
from kvtune.policies.method_stack import MethodStack, parse_stack

LEGAL = (
    "full",
    "snapkv + kivi",
    "snapkv + minicache + palu + turboquant",
    "quest + turboquant",
    "quest + kivi",
    "snapkv + r-kv",
    "streaming-llm + vllm-fp8",
    "kvzip:mode=pair + turboquant",
    "paging + turboquant",
    "palu + kivi",
    "h2o + quest + vllm-int4-per-token-head",
)
REFUSED = (
    ("kivi + turboquant", "two number formats"),
    ("palu + ojakv", "two low-rank projections"),
    ("snapkv + chunkkv", "same phase"),
    ("h2o + r-kv", "same phase"),
    ("h2o + streaming-llm", "same phase"),
    ("kvzip:mode=pair + minicache", "same tokens"),
    ("kvzip:mode=pair + quest", "same number of tokens"),
    ("kvzip:mode=pair + r-kv", "heads of one length"),
    ("kvzip:mode=pair + paging", "block table"),
    ("paging + kivi", "second kind of page"),
    ("paging + gear", "second kind of page"),
    ("paging + kvquant", "second kind of page"),
    ("paging + turboquant:center_keys=true", "second kind of page"),
    ("kvzip:mode=pair + palu", "heads"),
    ("ojakv + kivi", "change their basis"),
    ("palu + kvquant", "what was learned"),
    ("minicache + kvquant", "what was learned"),
    ("kivi + kivi", "named twice"),
)


@pytest.mark.parametrize("text", LEGAL)
def test_stacks_that_work_are_let_through(text):
    stack = parse_stack(text)
    require_legal(stack)
    assert nearest_legal(stack) == stack


@pytest.mark.parametrize(("text", "why"), REFUSED)
def test_stacks_that_cannot_work_are_refused_with_the_reason_and_a_way_out(text, why):
    stack = parse_stack(text)
    with pytest.raises(BadInput, match=why) as caught:
        require_legal(stack)
    nearest = nearest_legal(stack)
    assert not refusals(nearest)
    assert str(nearest) in caught.value.fix
    assert len(nearest.methods) >= len(stack.methods) - 1


def test_a_milder_parameter_is_nearer_than_a_method_less():
    nearest = nearest_legal(parse_stack("kvzip:mode=pair + quest"))
    assert [method.name for method in nearest.methods] == ["kvzip", "quest"]


def test_every_pair_of_methods_is_legal_or_has_a_legal_neighbour():
    kinds = (StoreMethod, TokenMethod, SelectionMethod)
    parts = [cls() for cls in methods().values() if issubclass(cls, kinds)]
    refused = 0
    for one, two in itertools.combinations(parts, 2):
        stack = MethodStack((one, two))
        assert not refusals(nearest_legal(stack)), str(stack)
        refused += bool(refusals(stack))
        assert refusals(stack) == refusals(MethodStack((two, one))), "order must not matter"
    assert 0 < refused < len(parts) * (len(parts) - 1) / 2


def test_a_store_that_must_be_rebuilt_is_noted_beside_an_evictor_that_decodes():
    assert any("rebuilds the groups" in text for text in notes(parse_stack("h2o + kivi")))
    assert notes(parse_stack("snapkv + kivi")) == ()
    assert notes(parse_stack("h2o + turboquant")) == ()


def test_what_depends_on_later_tokens_is_never_published():
    assert publish_of(parse_stack("full")) == "plain"
    assert publish_of(parse_stack("turboquant")) == "fingerprint"
    assert publish_of(parse_stack("kvzip + turboquant")) == "fingerprint"
    assert publish_of(parse_stack("snapkv + turboquant")) == "never"
    text = notes(parse_stack("prefix-caching + paging + snapkv"))
    assert any("private" in note for note in text)


@pytest.mark.parametrize("method", ["kvzip", "streaming-llm:positions=keep", "kivi", "kvquant"])
def test_what_could_be_shared_but_is_not_here_is_noted(method):
    (note,) = notes(parse_stack(f"prefix-caching + {method}"))
    assert "reference engine keeps blocks private" in note
    for shared in ("turboquant", "kvquant:exact_tokens=0"):
        assert notes(parse_stack(f"prefix-caching + {shared}")) == ()
