"""The reference engine gives transformers' own answers, in any batch, padding and chunking."""

import pytest
import torch
from contracts.tiny_models import tiny_engine, tiny_model, tokens

from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.errors import BadInput
from kvtune.policies.footprint import footprint
from kvtune.policies.method_stack import MethodStack

WINDOWED = {"sliding_window": 12, "max_window_layers": 1, "use_sliding_window": True}
FAMILIES = {
    "LlamaConfig": {},
    "MistralConfig": {"sliding_window": 12},
    "Qwen2Config": {},
    "Qwen3Config": WINDOWED,
    "GemmaConfig": {},
    "Gemma2Config": {"sliding_window": 12, "query_pre_attn_scalar": 32},
    "Gemma3TextConfig": {"sliding_window": 12, "query_pre_attn_scalar": 32},
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def own_answer(engine, prompt):
    with engine.plain() as model, torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0]


@pytest.fixture(scope="module", params=list(FAMILIES))
def engine(request):
    return ReferenceEngine(tiny_model(request.param, **FAMILIES[request.param]))


def test_prompt_logits_are_those_of_transformers(engine):
    prompt = tokens(40)
    expected = own_answer(engine, prompt)
    for chunk in (None, 7):
        (found,) = engine.prefill([engine.start()], [prompt], chunk_tokens=chunk, every=True)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_decoded_logits_are_those_of_one_long_prompt(engine):
    prompt, more = tokens(20), tokens(20, 1)
    expected = own_answer(engine, prompt + more)
    sequence = engine.start()
    engine.prefill([sequence], [prompt])
    found = torch.stack([engine.decode([sequence], [[token]])[0][-1] for token in more])
    torch.testing.assert_close(found, expected[len(prompt) :], atol=1e-4, rtol=1e-4)


def test_forced_tokens_at_once_equal_one_after_another(engine):
    prompt, more = tokens(20), tokens(9, 1)
    sequence = engine.start()
    engine.prefill([sequence], [prompt])
    (found,) = engine.decode([sequence], [more])
    expected = own_answer(engine, prompt + more)
    torch.testing.assert_close(found, expected[len(prompt) :], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_rows_of_other_lengths_change_nothing(engine, padding):
    prompts = [tokens(30), tokens(3, 1), tokens(17, 2)]
    sequences = [engine.start() for _ in prompts]
    found = engine.prefill(sequences, prompts, padding=padding, chunk_tokens=8)
    for row, prompt in zip(found, prompts, strict=True):
        torch.testing.assert_close(row, own_answer(engine, prompt)[-1], atol=1e-4, rtol=1e-4)


def test_windowed_layers_hold_their_window_and_no_more(engine):
    sequence = engine.start()
    engine.prefill([sequence], [tokens(40)])
    engine.decode([sequence], [[1]])
    for facts, layer in zip(engine.facts, sequence.layers, strict=True):
        assert layer.tokens == (41 if facts.window_tokens is None else min(41, 12))


def test_greedy_decoding_gives_the_tokens_of_transformers_generate():
    engine = tiny_engine()
    prompts = [tokens(30), tokens(3, 1)]
    found = engine.generate(prompts, new_tokens=12)
    for prompt, made in zip(prompts, found, strict=True):
        with engine.plain() as model, torch.inference_mode():
            whole = model.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0
            )
        assert list(made.token_ids) == whole[0, len(prompt) :].tolist()


def test_a_stop_id_ends_its_row_alone():
    engine = tiny_engine()
    prompts = [tokens(30), tokens(3, 1)]
    free = engine.generate(prompts, new_tokens=12)
    stop = free[0].token_ids[4]
    stopped = engine.generate(prompts, new_tokens=12, stop_ids=[stop])
    for before, after in zip(free, stopped, strict=True):
        ids = list(before.token_ids)
        end = ids.index(stop) + 1 if stop in ids else len(ids)
        assert list(after.token_ids) == ids[:end]


def test_scaled_frequencies_survive_storing_keys_before_the_rotation():
    engine = ReferenceEngine(tiny_model(rope_parameters=SCALED))
    rope, count = engine.facts[0].rope, 200
    keys = torch.randn(2, count, 32)
    there = rope.rotate(keys, torch.arange(count))
    back = rope.unrotate(there, torch.arange(count))
    torch.testing.assert_close(back, keys, atol=1e-5, rtol=1e-5)
    moved = rope.move(there, torch.arange(count), torch.arange(count) + 9)
    torch.testing.assert_close(
        moved, rope.rotate(keys, torch.arange(count) + 9), atol=1e-4, rtol=1e-4
    )


def test_full_cache_takes_what_the_formula_says():
    engine = tiny_engine()
    (made,) = engine.generate([tokens(33)], new_tokens=5)
    assert made.sequence.measured() == footprint(MethodStack(), engine.layers, 33, 4)
    # By hand: 4 layers x 2 heads x (32 + 32) numbers x 4 bytes.
    assert made.sequence.resident_bytes == 37 * 2048


def test_the_hash_tells_weights_apart():
    one, two = ReferenceEngine(tiny_model()), ReferenceEngine(tiny_model())
    assert one.model_hash == two.model_hash
    two.model.model.layers[2].self_attn.v_proj.weight.data[0, 0] += 1
    three = ReferenceEngine(two.model)
    assert three.model_hash != one.model_hash


def test_an_unknown_family_is_refused():
    model = tiny_model("Starcoder2Config")
    with pytest.raises(BadInput, match="starcoder2"):
        ReferenceEngine(model)


def test_an_empty_prompt_is_refused():
    engine = tiny_engine()
    with pytest.raises(BadInput, match="empty"):
        engine.prefill([engine.start()], [[]])


def test_a_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(BadInput, match="no checkpoint"):
        ReferenceEngine.load(tmp_path / "none")
