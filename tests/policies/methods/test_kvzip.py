"""KVzip keeps what repeating the context looks at, to the last byte, and for any later question."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from contracts.method import PROTECTED, MethodContract  # noqa: E402
from contracts.synthetic_layers import held, layer_cache, random_vectors  # noqa: E402
from contracts.tiny_models import follow, tiny_engine, tokens  # noqa: E402

from kvtune.policies.compose import nearest_legal, refusals  # noqa: E402
from kvtune.policies.eviction import Span  # noqa: E402
from kvtune.policies.footprint import footprint  # noqa: E402
from kvtune.policies.method import History, LayerShape  # noqa: E402
from kvtune.policies.method_stack import MethodStack, parse_stack  # noqa: E402
from kvtune.policies.methods.kvzip import KVzip  # noqa: E402


class TestKVzip(MethodContract):
    samples = (
        "kvzip:kept_ratio=0.4,chunk_tokens=16,sink_tokens=2",
        "kvzip:kept_ratio=0.5,mode=pair-uniform,chunk_tokens=512",
        "kvzip:kept_ratio=0.6,sink_tokens=1,fairness=proportional",
    )
    exact = "kvzip:kept_ratio=1"
    ladder = (
        "kvzip:kept_ratio=0.1",
        "kvzip:kept_ratio=0.5",
        "kvzip:kept_ratio=0.8",
        "kvzip:kept_ratio=1",
    )


def positions(sequence):
    """Positions held in each layer, one list a KV head."""
    return [
        [row for group in layer.groups for row in group.positions(group.keys).tolist()]
        for layer in sequence.layers
    ]


def scores_by_hand(queries, keys, scale, chunk, always, prompt_tokens):
    """Greatest probability of each token of `chunk`, for one KV head: [Hq, m, d], [n, d]."""
    asked = queries.shape[1]
    attended = [n for n in range(prompt_tokens) if n in chunk or n in always]
    found = np.zeros(len(chunk))
    for head in queries:
        for number in range(asked):
            own = range(prompt_tokens, prompt_tokens + number + 1)
            columns = [*attended, *own]
            logits = keys[columns] @ head[number] * scale
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            picked = [columns.index(token) for token in chunk]
            found = np.maximum(found, weights[picked])
    return found


def fed(method, count, *passes, spans=(), edit=None):
    """A layer of 4 query and 2 KV heads with a prompt staged and scoring passes run."""
    layer = layer_cache(str(method), query_heads=4, kv_heads=2, scale=0.5, spans=spans)
    queries, keys, values = random_vectors(count, query_heads=4, kv_heads=2, seed=7)
    if edit is not None:
        edit(keys)
    layer.prefill(queries, keys, values, torch.arange(count))
    for number, extra in enumerate(passes):
        layer.score(*extra, torch.arange(count, count + extra[0].shape[1]))
        assert layer.evictors[0].scored.passes == number + 1
    return layer, keys


def test_scores_are_the_greatest_probability_within_sinks_chunk_and_pass():
    count, spans = 21, (Span(9, 11, "rules", protected=True),)
    passes = [
        random_vectors(6, query_heads=4, kv_heads=2, seed=1),
        random_vectors(5, query_heads=4, kv_heads=2, seed=2),
        random_vectors(4, query_heads=4, kv_heads=2, seed=3),
    ]
    layer, keys = fed(KVzip(chunk_tokens=8, sink_tokens=2), count, *passes, spans=spans)
    found = layer.evictors[0].scored.scores
    assert ((found >= 0) & (found <= 1)).all()
    for number, (queries, new, _) in enumerate(passes):
        chunk = range(number * 8, min(number * 8 + 8, count))
        for head in range(2):
            expected = scores_by_hand(
                queries[2 * head : 2 * head + 2].double().numpy(),
                torch.cat((keys[head], new[head])).double().numpy(),
                0.5,
                chunk,
                {0, 1, 9, 10},
                count,
            )
            np.testing.assert_allclose(found[head, list(chunk)], expected, atol=1e-6)


def test_a_planted_key_has_the_greatest_score():
    extra = random_vectors(5, query_heads=4, kv_heads=2, seed=1)

    def plant(keys):
        keys[1, 13] = 30 * extra[0][2, 3]

    layer, _ = fed(KVzip(), 20, extra, edit=plant)
    scores = layer.evictors[0].scored.scores
    assert int(scores[1].argmax()) == 13
    assert scores[1, 13] > 0.99


def test_scores_are_forgotten_once_tokens_are_chosen():
    method = KVzip(kept_ratio=0.5)
    layer, _ = fed(method, 20, random_vectors(5, query_heads=4, kv_heads=2))
    assert layer.evictors[0].tensors()["scores"].shape == (2, 20)
    (kept,) = method.select_all(layer.evictors)
    assert layer.evictors[0].tensors() == {}
    assert [len(index) for index in kept] != [10, 10]
    assert sum(len(index) for index in kept) == 20


@pytest.mark.parametrize("ratio", [0.1, 0.29, 0.3, 0.5, 0.77, 0.999])
def test_all_heads_together_keep_the_ratio_rounded_down(ratio):
    engine, count = tiny_engine(), 50
    stack = MethodStack((KVzip(kept_ratio=ratio, sink_tokens=1),))
    _, sequence = follow(engine, stack, tokens(count), [])
    rows = [row for layer in positions(sequence) for row in layer]
    assert len(rows) == 8
    assert sum(map(len, rows)) == int(round(ratio * 1000) * 8 * count // 1000)
    assert len({len(row) for row in rows}) > 1


def test_the_ratio_is_rounded_down_exactly_in_long_prompts_too():
    # 80 layers, 8 heads, 128,000 tokens: floating point is two hundred-millionths below.
    count = 80 * 8 * 128_000
    method = KVzip(kept_ratio=0.57, sink_tokens=1)
    assert method.history(History(count), LayerShape(0, 1, 1, 1, 8, 8, 4)).tokens == 46_694_400


def test_uniform_heads_keep_the_ratio_each():
    stack = MethodStack((KVzip(kept_ratio=0.29, mode="pair-uniform"),))
    _, sequence = follow(tiny_engine(), stack, tokens(100), [])
    rows = [row for layer in positions(sequence) for row in layer]
    assert [len(row) for row in rows] == [29] * 8
    assert len({tuple(row) for row in rows}) > 1
    assert all(len(layer.groups) == 1 for layer in sequence.layers)


@pytest.mark.parametrize("mode", ["pair", "pair-uniform"])
def test_sinks_and_protected_tokens_stay_even_above_the_ratio(mode):
    engine = tiny_engine()
    sequence = engine.start(
        MethodStack((KVzip(kept_ratio=0.01, mode=mode, sink_tokens=4),)), (PROTECTED,)
    )
    engine.prefill([sequence], [tokens(40)])
    assert positions(sequence) == [[[0, 1, 2, 3, 4]] * 2] * 4


def test_what_is_kept_does_not_depend_on_the_question():
    engine, stack, context = tiny_engine(), MethodStack((KVzip(kept_ratio=0.4),)), tokens(60)
    kept = []
    for question in (tokens(7, 1), tokens(7, 2)):
        sequence = engine.start(stack)
        engine.prefill([sequence], [context])
        engine.prefill([sequence], [question])
        rows = [row for layer in positions(sequence) for row in layer]
        assert all(row[-7:] == list(range(60, 67)) for row in rows)
        kept.append([row[:-7] for row in rows])
    assert kept[0] == kept[1]


@pytest.mark.parametrize("mode", ["pair", "pair-uniform"])
def test_a_question_as_a_second_prompt_is_answered_as_one_that_is_decoded(mode):
    engine, stack = tiny_engine(), MethodStack((KVzip(kept_ratio=0.4, mode=mode),))
    question, answers = tokens(7, 1), []
    for asks in ("prefill", "decode", "steps"):
        sequence = engine.start(stack)
        engine.prefill([sequence], [tokens(60)])
        if asks == "prefill":
            engine.prefill([sequence], [question])
        elif asks == "decode":
            engine.decode([sequence], [question])
        else:
            for token in question:
                engine.decode([sequence], [[token]])
        answers.append(engine.decode([sequence], [[5]])[0])
    torch.testing.assert_close(answers[0], answers[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(answers[0], answers[2], atol=1e-4, rtol=1e-4)


def test_each_head_attends_to_its_own_tokens_only():
    count = 20
    layer, keys = fed(KVzip(), count)
    values = random_vectors(count, query_heads=4, kv_heads=2, seed=7)[2]
    kept = [torch.tensor([0, 3, 4, 11, 19]), torch.tensor([0, 1])]
    layer.finish_prefill(kept)
    query, key, value = random_vectors(1, query_heads=4, kv_heads=2, seed=9)
    out = layer.decode(query, key, value, torch.tensor([count]))
    for head in range(4):
        own = kept[head // 2]
        k = torch.cat((keys[head // 2, own], key[head // 2]))
        v = torch.cat((values[head // 2, own], value[head // 2]))
        expected = (k @ query[head, 0] * 0.5).softmax(0) @ v
        torch.testing.assert_close(out[head, 0], expected)
    assert held(layer) == [[0, 3, 4, 11, 19, 20]]
    assert layer.read_bytes_per_step == (6 + 3) * 2 * 8 * 4


def test_one_kv_head_has_layers_of_different_lengths_and_exact_bytes():
    from contracts.tiny_models import tiny_model

    from kvtune.engines.reference.engine import ReferenceEngine

    engine = ReferenceEngine(tiny_model(num_key_value_heads=1, num_hidden_layers=3))
    stack = MethodStack((KVzip(kept_ratio=0.4),))
    _, sequence = follow(engine, stack, tokens(50), tokens(2, 1))
    lengths = [len(row) - 2 for layer in positions(sequence) for row in layer]
    assert sum(lengths) == 60
    assert len(set(lengths)) > 1
    assert sequence.measured() == footprint(stack, engine.layers, 50, 2, sequence.observed())


@pytest.mark.parametrize(
    "rest",
    [
        "kvzip:kept_ratio=0.4 + "
        "kivi:bits=4,key_group_tokens=8,value_group_channels=16,residual_tokens=8",
        "kvzip:kept_ratio=0.4 + vllm-int8-per-token-head",
        "kvzip:kept_ratio=0.5,mode=pair-uniform + "
        "r-kv:budget_tokens=3,buffer_tokens=2,window_tokens=2",
    ],
)
def test_bytes_are_exact_in_any_format_and_with_a_second_eviction(rest):
    engine, stack = tiny_engine(), parse_stack(rest)
    for count, decoded in ((1, 3), (16, 0), (41, 9)):
        _, sequence = follow(engine, stack, tokens(count), tokens(decoded, 1))
        expected = footprint(stack, engine.layers, count, decoded, sequence.observed())
        assert sequence.measured() == expected


def test_passes_announce_each_chunk_and_repeat_it():
    method, prompt = KVzip(chunk_tokens=10), list(range(100, 125))

    def encode(text):
        return [len(text)]

    first = len("\n\nRepeat the previous context exactly.")
    later = len("\n\nRepeat the part of the previous context exactly, starting with ")
    assert method.scoring_passes(prompt, encode, [7, 8]) == [
        [first, 7, 8, *range(100, 110)],
        [later, *range(102, 110), 7, 8, *range(110, 120)],
        [later, *range(112, 120), 7, 8, *range(120, 125)],
    ]
    assert method.scoring_passes(prompt, None, []) == [
        [*range(100, 110)],
        [*range(102, 120)],
        [*range(112, 125)],
    ]


def test_nothing_is_read_again_when_nothing_will_go():
    assert KVzip(kept_ratio=1).scoring_passes(tokens(100), None, []) == []
    assert KVzip(sink_tokens=4).scoring_passes(tokens(4), None, []) == []


def test_fair_eviction_keeps_the_ratio_of_each_span():
    spans = (Span(0, 20, "one"), Span(20, 60, "two"))
    engine = tiny_engine()
    sequence = engine.start(
        parse_stack("kvzip:kept_ratio=0.4,sink_tokens=1,fairness=proportional"), spans
    )
    engine.prefill([sequence], [tokens(60)])
    rows = [row for layer in positions(sequence) for row in layer]
    assert sum(token < 20 for row in rows for token in row) == 8 * 8
    assert sum(token >= 20 for row in rows for token in row) == 16 * 8


def test_where_heads_must_be_of_one_length_the_uniform_mode_is_offered():
    stack = parse_stack("kvzip:kept_ratio=0.4 + quest")
    assert refusals(stack)
    assert nearest_legal(stack) == parse_stack("kvzip:kept_ratio=0.4,mode=pair-uniform + quest")
