"""Prompts put together from modules: where they are exact, and where they are not."""

import pytest
import torch
from contracts.tiny_models import ready, tiny_engine, tiny_model, tokens

from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.engines.reference.modules import ModuleCache, Prompt
from kvtune.errors import BadInput
from kvtune.policies.footprint import footprint
from kvtune.policies.method_stack import parse_stack
from kvtune.policies.methods.prompt_cache import PromptCache
from kvtune.policies.prompt_schema import Module, Parameter, Schema, Union

A, B, C, TEXT = (tuple(tokens(count, count)) for count in (11, 9, 14, 6))
INT8 = "vllm-int8-per-token-head"
PLAIN = Schema([Module("a", (A,)), Module("b", (B,)), Module("c", (C,))])


def modules(schema=PLAIN, text="prompt-cache", engine=None):
    engine = engine or tiny_engine()
    return ModuleCache(engine, ready(engine, parse_stack(text)), schema)


def serve(cache, names, text=TEXT, **arguments):
    return cache.prefill(Prompt(tuple(names), text, arguments))


def whole(*parts):
    """Logits after an ordinary prompt."""
    engine = tiny_engine()
    return engine.prefill([engine.start()], [[token for part in parts for token in part]])[0]


def same(one, two):
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def differ(one, two):
    assert (one - two).abs().max() > 1e-3


def test_one_module_in_front_is_a_cached_prefix():
    sequence, logits = serve(modules(), ["a"])
    same(logits, whole(A, TEXT))
    assert (sequence.reused_tokens, sequence.seen_tokens) == (11, 17)


def test_the_order_in_which_modules_are_put_together_changes_nothing():
    cache = modules()
    _, expected = serve(cache, ["a", "b", "c"])
    for names in (["c", "a", "b"], ["b", "c", "a"]):
        sequence, logits = serve(cache, names)
        same(logits, expected)
    for token in (5, 6):
        (found,) = tiny_engine().decode([sequence], [[token]])
    first, _ = serve(cache, ["a", "b", "c"])
    for token in (5, 6):
        (wanted,) = tiny_engine().decode([first], [[token]])
    same(found, wanted)


def test_modules_of_one_scaffold_are_an_ordinary_prompt():
    schema = Schema([Module("a", (A,)), Module("b", (B,)), Module("c", (C,))], ["abc"])
    cache = modules(schema)
    sequence, logits = serve(cache, ["b", "c", "a"])
    same(logits, whole(A, B, C, TEXT))
    (found,) = tiny_engine().decode([sequence], [[7]])
    same(found[-1], whole(A, B, C, TEXT, (7,)))


def test_modules_that_do_not_see_each_other_lose_something():
    _, logits = serve(modules(), ["a", "b", "c"])
    differ(logits, whole(A, B, C, TEXT))


def test_a_scaffold_that_is_not_complete_is_not_used():
    schema = Schema([Module("a", (A,)), Module("b", (B,)), Module("c", (C,))], ["abc"])
    _, logits = serve(modules(schema), ["a", "b"])
    same(logits, serve(modules(), ["a", "b"])[1])


def test_every_module_is_encoded_once_and_alone():
    engine = ReferenceEngine(tiny_model())
    seen = []
    engine.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"][0].tolist()),
        with_kwargs=True,
    )
    cache = modules(engine=engine)
    for _ in range(2):
        serve(cache, ["b", "c"])
    text = list(range(34, 40))
    assert seen == [list(range(11, 20)), list(range(20, 34)), text, text]


def test_text_follows_the_last_position_of_the_modules_and_decoding_follows_the_text():
    schema = Schema([Module("a", (A,)), Union((Module("b", (B,)), Module("c", (C,))))])
    sequence, _ = serve(modules(schema), ["a", "b"])
    group = sequence.layers[0].groups[0]
    # The union has room for 14 tokens; b fills 9 of them, and text starts where b ends.
    assert group.positions(group.keys)[0].tolist() == list(range(26))
    assert sequence.next_position == 26
    sequence, _ = serve(modules(schema), ["c"])
    assert sequence.next_position == 11 + 14 + 6
    tiny_engine().decode([sequence], [[1]])
    group = sequence.layers[0].groups[0]
    assert group.positions(group.keys)[0].tolist() == list(range(11, 32))


def with_parameter(length=4):
    return Schema([Module("a", (A, Parameter("p", length), B)), Module("c", (C,))])


def test_an_argument_is_computed_at_its_parameters_positions():
    cache = modules(with_parameter())
    sequence, _ = serve(cache, ["a", "c"], p=[3, 4])
    group = sequence.layers[0].groups[0]
    at = group.positions(group.keys)[0].tolist()
    assert at == [*range(11), *range(15, 24), *range(24, 38), 11, 12, *range(38, 44)]
    assert sequence.reused_tokens == 11 + 9 + 14


def test_the_placeholder_is_not_served():
    schema = with_parameter(1)
    logits = [
        serve(modules(schema, f"prompt-cache:placeholder_id={token}"), ["a"], p=[3])[1]
        for token in (0, 3)
    ]
    # Tokens after a parameter saw its placeholder: with the argument itself they are exact.
    expected = whole(A, (3,), B, TEXT)
    differ(logits[0], logits[1])
    before = modules(schema, "prompt-cache:placeholder_id=3,arguments_see=before")
    same(serve(before, ["a"], p=[3])[1], expected)


def test_arguments_see_what_stands_after_them_unless_told_otherwise():
    everything = serve(modules(with_parameter()), ["a"], p=[3, 4])[1]
    before = modules(with_parameter(), "prompt-cache:arguments_see=before")
    differ(serve(before, ["a"], p=[3, 4])[1], everything)
    same(serve(before, ["c"])[1], serve(modules(with_parameter()), ["c"])[1])


def test_an_argument_that_is_too_long_is_refused():
    with pytest.raises(BadInput, match="room for 4 tokens"):
        serve(modules(with_parameter()), ["a"], p=[1, 2, 3, 4, 5])


def test_a_prompt_without_text_is_refused():
    with pytest.raises(BadInput, match="needs text"):
        serve(modules(), ["a"], text=())


@pytest.mark.parametrize(
    "rest",
    ["", *(f" + {name}" for name in ("paging", INT8, "palu", "kvquant:exact_tokens=0"))],
)
def test_formulas_give_the_bytes_of_prompts_and_modules(rest):
    cache = modules(with_parameter(), "prompt-cache" + rest)
    engine, stack = tiny_engine(), cache.stack
    sequence, _ = serve(cache, ["c", "a"], p=[3, 4])
    for decoded in range(3):
        expected = footprint(stack, engine.layers, 42, decoded, observed=sequence.observed())
        assert sequence.measured() == expected
        engine.decode([sequence], [[decoded]])
    if "paging" not in rest:
        held = sum(len(run.token_ids) for name in "ac" for run in cache.schema.modules[name].runs)
        assert cache.nbytes == PromptCache().module_bytes(stack, engine.layers, held)


def test_quantized_modules_are_what_the_format_makes_of_them():
    cache = modules(text="prompt-cache + vllm-int8-per-token-head")
    _, logits = serve(cache, ["a"])
    exact = whole(A, TEXT)
    differ(logits, exact)
    assert (logits - exact).square().mean() < 0.05 * exact.square().mean()


@pytest.mark.parametrize(
    "text",
    [
        "paging",
        *(
            f"prompt-cache + {rest}"
            for rest in ("kivi", "streaming-llm", "kvquant", "ojakv", "turboquant:center_keys=true")
        ),
    ],
)
def test_stacks_that_cannot_hold_modules_are_refused(text):
    with pytest.raises(BadInput, match=r"modules cannot|no prompt-cache"):
        modules(text=text)


def test_generation_goes_on_from_modules():
    schema = Schema([Module("a", (A,)), Module("b", (B,)), Module("c", (C,))], ["abc"])
    made = modules(schema).generate(Prompt(("a", "b", "c"), TEXT, {}), new_tokens=8)
    (expected,) = tiny_engine().generate([[*A, *B, *C, *TEXT]], new_tokens=8)
    assert made.token_ids == expected.token_ids
