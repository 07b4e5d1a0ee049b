"""The plugin on a real vLLM beside the reference engine, under the same policy and texts.

Not held to it are SnapKV and H2O: the plugin's rank pages for all heads and layers together, the
methods as they were published, and the reference engine's, tokens for each KV head.
"""

from pathlib import Path
from statistics import fmean

import pytest
from contracts.answers import ROUNDING
from verdict_models import cut_model

from kvtune.profilers.quality.texts import filler, seeded

pytestmark = pytest.mark.integration

PROMPTS = [" ".join(filler(seeded("reference", length), length)) for length in (250, 500)]
TOKENS = 24

FULL = {"stack": "full"}
QUEST = {"quest": {"budget_tokens": 128, "per_kv_head": True}}
STREAMING = {"streaming_llm": {"window_tokens": 64, "sink_tokens": 4}}
EVICTION = {"page_eviction": {"budget_tokens": 256}}


@pytest.fixture
def cut(model, tmp_path_factory):
    """The first layers of the model, in a folder that tests share."""
    return lambda layers: cut_model(Path(model), layers, tmp_path_factory.getbasetemp())


@pytest.fixture
def beside(ask):
    """What vLLM tells of its answers, and the reference engine of the same under each stack."""

    def beside(model, asked, *stacks):
        ours = ask("reference_engine", model, asked=asked, prompts=PROMPTS, tokens=TOKENS)
        texts = list(zip(ours["prompts"], ours["ids"], strict=True))
        given = {"stacks": stacks, "texts": texts, "named": ours["named"]}
        return ours, *ask("reference_engine", model, **given)

    return beside


def off(ours, theirs):
    """How far apart log probabilities are, of the 20 best tokens in each place."""
    return [
        abs(mine - others)
        for answer, other_answer in zip(ours["named"], theirs["named"], strict=True)
        for told, other_told in zip(answer, other_answer, strict=True)
        for (_, mine), (_, others) in zip(told, other_told, strict=True)
    ]


def assert_seen(ours, theirs, layers):
    """Hold what each token attended to, layer by layer, to that of others."""
    assert [len(sees) for sees in ours["sees"]] == [TOKENS - 1] * len(PROMPTS)
    assert {len(of) for sees in ours["sees"] for of in sees.values()} == {layers}
    assert ours["sees"] == theirs["sees"]


def chunkkv(tokens, **more):
    stack = f"chunkkv:budget_tokens={tokens},chunk_tokens=32,reuse_layers=1"
    return {"stack": stack, "protected": [[0, 4]], **more}


def quest(tokens):
    return {"stack": f"quest:page_tokens=32,budget_tokens={tokens},dense_layers=2"}


def streaming(tokens):
    # The plugin's window moves by pages: a token sees so many before its own, and its own.
    stack = f"streaming-llm:sink_tokens=32,window_tokens={tokens},positions=keep"
    return {"stack": stack, "by_pages": True}


@pytest.mark.parametrize(
    ("asked", "stack", "less", "layers"),
    [
        pytest.param(QUEST, quest(128), quest(96), 4, id="quest"),
        pytest.param(STREAMING, streaming(64), streaming(32), 4, id="streaming-llm"),
        pytest.param(EVICTION, chunkkv(256), chunkkv(224), 1, id="chunkkv"),
        pytest.param(
            EVICTION,
            chunkkv(256, all_layers=True),
            chunkkv(224, all_layers=True),
            4,
            id="chunkkv-of-all-layers",
        ),
    ],
)
def test_each_token_sees_what_the_reference_engine_lets_it_see(
    beside, cut, asked, stack, less, layers
):
    ours, theirs, others = beside(cut(layers), asked, stack, less)
    assert_seen(ours, theirs, layers)
    assert max(off(ours, theirs)) < ROUNDING
    # A page less is another thing.
    assert ours["sees"] != others["sees"]
    assert max(off(ours, others)) > 10 * ROUNDING


TURBOQUANT = {"stack": "turboquant:bits_key=4,bits_value=4", "exact": False}
KIVI = {
    "stack": "kivi:bits=4,residual_tokens=32",
    # The plugin quantizes a page once it is full; of values the paper keeps the last tokens.
    "by_pages": True,
    "values_by_page": True,
}


@pytest.mark.parametrize(
    ("store", "stack"),
    [
        ("int8", {"stack": "vllm-int8-per-token-head", "exact": False}),
        ("int4", {"stack": "vllm-int4-per-token-head", "exact": False}),
        ("turboquant", TURBOQUANT),
        ("kivi", KIVI),
    ],
)
def test_a_store_keeps_the_codes_of_the_reference_engine(beside, cut, store, stack):
    ours, theirs, full = beside(cut(1), {"store": {"format": store}}, stack, FULL)
    assert max(off(ours, theirs)) < ROUNDING
    assert max(off(ours, full)) > 10 * ROUNDING


def test_codes_that_rounding_moves_stay_few_in_more_layers(beside, cut):
    """Sums in another order move a few codes by a step, which the layers above make more of."""
    asked = {"store": {"format": "turboquant"}}
    ours, theirs, full = beside(cut(4), asked, TURBOQUANT, FULL)
    assert fmean(off(ours, theirs)) < 0.2 * fmean(off(ours, full))
