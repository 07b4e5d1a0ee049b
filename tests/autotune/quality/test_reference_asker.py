"""The reference engine answers items on one cache each, and scores texts after their contexts."""

import asyncio
import dataclasses

import pytest
import torch
from contracts.tiny_models import VOCABULARY, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvtune.autotune.quality.reference_asker import ReferenceAsker
from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.policies.method_stack import MethodStack, parse_stack
from kvtune.profilers.quality.suite import Item

END = 1
TEMPLATE = (
    "{% for m in messages %}w2 {{ 'w3' if m.role == 'user' else 'w4' }} {{ m.content }} w1 "
    "{% endfor %}{% if add_generation_prompt %}w2 w4 {% endif %}"
)


def text(*ids):
    return " ".join(f"w{number}" for number in ids)


def words(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return text(*torch.randint(5, VOCABULARY, (count,), generator=generator).tolist())


def ids(words):
    return [int(word[1:]) for word in words.split()]


@pytest.fixture(scope="module")
def engine():
    vocabulary = {f"w{number}": number for number in range(VOCABULARY)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.chat_template = TEMPLATE
    tokenizer.eos_token_id = END
    model = tiny_model()
    model.generation_config.eos_token_id = None
    return ReferenceEngine(model, tokenizer)


def ask(engine, items, stack="full", *, seed=0, concurrency=4, **more):
    asker = ReferenceAsker(engine, parse_stack(stack), **more)
    return asyncio.run(asker.ask(items, seed=seed, concurrency=concurrency))


def test_answers_are_those_of_greedy_decoding(engine):
    items = [Item(str(n), "x", prompt=words(20 + n, n), output_tokens=6) for n in range(5)]
    for item, answer in zip(items, ask(engine, items, concurrency=2), strict=True):
        (made,) = engine.generate([ids(item.prompt)], MethodStack(), new_tokens=6, stop_ids=[END])
        assert ids(answer.texts[0]) == [token for token in made.token_ids if token != END]
        assert answer.output_tokens == (len(made.token_ids),)
        assert answer.finish_reasons == ("stop" if END in made.token_ids else "length",)


def test_a_follow_up_goes_on_from_the_cache_of_the_first_answer(engine):
    item = Item("a", "x", prompt=words(20), follow_ups=(" " + words(4, 1),), output_tokens=5)
    (answer,) = ask(engine, [item])
    whole = ids(item.prompt) + ids(answer.texts[0]) + ids(item.follow_ups[0])
    (made,) = engine.generate([whole], MethodStack(), new_tokens=5)
    assert ids(answer.texts[1]) == list(made.token_ids)


def test_a_chat_goes_on_as_its_template_writes_it(engine):
    messages = ({"role": "user", "content": words(20)},)
    item = Item("a", "x", messages=messages, follow_ups=(words(4, 1),), output_tokens=5)
    (answer,) = ask(engine, [item])
    whole = [
        *messages,
        {"role": "assistant", "content": answer.texts[0]},
        {"role": "user", "content": item.follow_ups[0]},
    ]
    written = engine.tokenizer.apply_chat_template(
        whole, tokenize=False, add_generation_prompt=True
    )
    (made,) = engine.generate([engine.tokenizer(written)["input_ids"]], new_tokens=5)
    assert ids(answer.texts[1]) == list(made.token_ids)


def test_what_the_first_question_let_go_is_gone_for_the_second(engine):
    item = Item("a", "x", prompt=words(60), follow_ups=(" " + words(4, 1),), output_tokens=5)
    (full,) = ask(engine, [item])
    (small,) = ask(engine, [item], "snapkv:budget_tokens=8,window_tokens=2")
    assert full.texts[1] != small.texts[1]


@pytest.mark.parametrize("context", [0, 30])
def test_scores_of_the_full_cache_are_the_models_own(engine, context):
    item = Item("a", "x", prompt=words(context, 1), scored=words(90, 2))
    (answer,) = ask(engine, [item])
    whole = ids(item.prompt) + ids(item.scored)
    with engine.plain() as model:
        logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    first = max(context, 1)
    assert answer.scores.token_ids == tuple(whole[first:])
    expected = [float(logprobs[n - 1, whole[n]]) for n in range(first, len(whole))]
    assert answer.scores.logprobs == pytest.approx(expected, abs=1e-4)
    best = answer.scores.top[-1]
    assert max(best, key=best.get) == int(logprobs[-2].argmax())
    assert len(best) == 20


@pytest.mark.parametrize(
    "stack",
    [
        "snapkv:budget_tokens=16,window_tokens=2",
        "streaming-llm:sink_tokens=2,window_tokens=14",
        "h2o:heavy_tokens=8,recent_tokens=8",
    ],
)
def test_an_eviction_shows_in_what_is_scored_after_the_context(engine, stack):
    item = Item("a", "x", prompt=words(60, 1), scored=words(20, 2))
    (full,), (small,) = ask(engine, [item]), ask(engine, [item], stack)
    assert small.scores.token_ids == full.scores.token_ids
    assert small.scores.logprobs != pytest.approx(full.scores.logprobs, abs=1e-3)


def test_the_batch_changes_no_answer(engine):
    items = [
        *(Item(f"s{n}", "x", prompt=words(9 * n, 1), scored=words(30, n)) for n in range(4)),
        *(Item(f"g{n}", "x", prompt=words(20 + n, n), output_tokens=5) for n in range(4)),
    ]
    alone, together = (ask(engine, items, concurrency=count) for count in (1, 3))
    for one, other in zip(alone, together, strict=True):
        assert one.texts == other.texts
        if one.scores is not None:
            assert one.scores.token_ids == other.scores.token_ids
            assert one.scores.logprobs == pytest.approx(other.scores.logprobs, abs=1e-4)


def test_temperature_draws_by_seed_and_item(engine):
    items = [
        Item(key, "x", prompt=words(20), temperature=5.0, output_tokens=12) for key in ("a", "b")
    ]
    first, again, other = ask(engine, items), ask(engine, items), ask(engine, items, seed=1)
    assert first == again
    assert first[0].texts != first[1].texts
    assert first[0].texts != other[0].texts


def test_an_item_that_cannot_be_asked_is_an_error_of_its_own(engine):
    items = [
        Item("a", "x", prompt=words(40), protected=(words(40),), output_tokens=2),
        Item("b", "x", prompt=words(40), output_tokens=2),
        Item("c", "x", prompt="", scored="w7"),
        Item("d", "x", prompt="", scored=words(9)),
    ]
    bad, good, short, long = ask(engine, items, "snapkv:budget_tokens=8,window_tokens=2")
    assert "must be kept" in bad.error
    assert good.error is None
    assert short.error == "the text has no token to score"
    assert long.error is None


def test_protected_parts_of_a_text_survive(engine):
    prompt = words(40)
    kept = " ".join(prompt.split()[10:14])
    stack = "snapkv:budget_tokens=8,window_tokens=2"
    item = Item("a", "x", prompt=prompt, protected=(kept,))
    plain = Item("a", "x", prompt=prompt)
    asker = ReferenceAsker(engine, parse_stack(stack))

    def positions(item):
        asked = asker._begin(item, 0)
        engine.prefill([asked.sequence], [asked.prompt.token_ids])
        group = asked.sequence.layers[0].groups[0]
        return [set(row) for row in group.positions(group.keys).tolist()]

    assert all(set(range(10, 14)) <= row for row in positions(item))
    assert not all(set(range(10, 14)) <= row for row in positions(plain))


def test_progress_counts_answers(engine):
    told = []
    asker = ReferenceAsker(engine, on_progress=lambda done, total: told.append((done, total)))
    items = [Item(str(n), "x", prompt=words(9), output_tokens=1) for n in range(3)]
    asyncio.run(asker.ask(items, seed=0, concurrency=2))
    assert told == [(2, 3), (3, 3)]


@pytest.mark.parametrize(
    "stack",
    [
        "full",
        "snapkv:budget_tokens=8,window_tokens=2",
        "streaming-llm:sink_tokens=2,window_tokens=14",
        "kvzip:kept_ratio=0.5",
    ],
)
def test_a_recorded_prompt_is_answered_as_if_it_was_read(engine, stack, monkeypatch):
    asked = [
        Item(f"g{n}", "x", prompt=words(20 + n, n), follow_ups=(f" {words(4, 9)}",))
        for n in range(3)
    ]
    items = [
        *(dataclasses.replace(item, output_tokens=5) for item in asked),
        Item("s", "x", prompt=words(30, 5), scored=words(20, 6)),
        Item("t", "x", prompt="", scored=words(20, 7)),
    ]
    read, recordings = ask(engine, items, stack), {}
    ask(engine, items, recordings=recordings)
    assert set(recordings) == {tuple(ids(item.prompt)) for item in items[:4]}
    monkeypatch.setattr("kvtune.engines.reference.recording.record", None)
    replayed = ask(engine, items, stack, recordings=recordings)
    for one, other in zip(read, replayed, strict=True):
        assert one.error is None
        assert other.texts == one.texts
        if one.scores is not None:
            assert other.scores.token_ids == one.scores.token_ids
            assert other.scores.logprobs == pytest.approx(one.scores.logprobs, abs=1e-4)


def test_no_prompt_is_recorded_where_stacks_read_their_own(engine):
    recordings = {}
    item = Item("a", "x", prompt=words(20), output_tokens=2)
    ask(engine, [item], exact_prefill=False, recordings=recordings)
    assert recordings == {}
