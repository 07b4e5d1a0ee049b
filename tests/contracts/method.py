"""What every KV-cache method must do, whatever it is: subclass it and say which stacks to try."""

import itertools

import pytest
import torch
from contracts.tiny_models import follow, ready, tiny_engine, tokens

from kvtune.policies.eviction import Span
from kvtune.policies.footprint import footprint
from kvtune.policies.method import History
from kvtune.policies.method_stack import MethodStack, parse_stack

PROMPT = 41
DECODED = 6
PROTECTED = Span(2, 5, "system", protected=True)


class MethodContract:
    """The properties of a method on a tiny random Llama (4 layers, 2 KV heads of 32).

    `samples` are stacks that compress a prompt of 41 tokens, `exact` one that must not change a
    logit (None: the format can't be exact), `ladder` stacks from the strongest compression to the
    weakest. `block_tokens` and `window_tokens` are the sizes at whose edges bytes are checked.
    """

    samples: tuple[str, ...]
    exact: str | None = None
    ladder: tuple[str, ...] = ()
    block_tokens = 16
    window_tokens = 32
    stores_each_token_alone = False
    logit_tolerance = 2e-4

    def __init_subclass__(cls):
        """Leave out, rather than skip, what cannot be asked of a method."""
        super().__init_subclass__()
        if cls.exact is None:
            cls.test_nothing_taken_away_leaves_the_logits_alone = None
        if not cls.stores_each_token_alone:
            cls.test_prefill_then_decode_stores_what_decoding_alone_stores = None
        if len(cls.ladder) < 2:
            cls.test_error_falls_as_more_is_kept = None
        stacks = [parse_stack(text) for text in cls.samples]
        if not any(stack.evictors for stack in stacks):
            cls.test_kept_tokens_are_sorted_distinct_within_budget_and_protected = None
        if not any(stack.selection for stack in stacks):
            cls.test_a_selection_reads_less_than_is_held = None

    @property
    def stacks(self):
        return [parse_stack(text) for text in self.samples]

    def test_nothing_taken_away_leaves_the_logits_alone(self):
        engine = tiny_engine()
        prompt, continuation = tokens(PROMPT), tokens(DECODED, 1)
        plain, _ = follow(engine, MethodStack(), prompt, continuation)
        found, _ = follow(engine, parse_stack(self.exact), prompt, continuation)
        torch.testing.assert_close(found, plain, atol=1e-4, rtol=1e-4)

    def test_kept_tokens_are_sorted_distinct_within_budget_and_protected(self):
        engine = tiny_engine()
        for stack in self.stacks:
            if not stack.evictors:
                continue
            _, sequence = follow(
                engine, stack, tokens(PROMPT), tokens(DECODED, 1), spans=(PROTECTED,)
            )
            for layer in sequence.layers:
                held = stack.held(History(PROMPT, DECODED), layer.setup.shape).tokens
                for group in layer.groups:
                    positions = group.positions(group.keys)
                    assert (positions.diff(dim=-1) > 0).all()
                    assert positions.min() >= 0
                    assert positions.max() < PROMPT + DECODED
                    for row in positions.tolist():
                        assert set(range(PROTECTED.start, PROTECTED.end)) <= set(row)
                if len(layer.groups) == 1:
                    assert layer.tokens == held

    def test_formulas_give_the_bytes_of_the_tensors(self):
        engine = tiny_engine()
        block, window = self.block_tokens, self.window_tokens
        # The last is more than two blocks of queries, and more than any chunk that a sample reads.
        sizes = {1, block - 1, block, block + 1, window - 1, window, window + 1, 600} - {0}
        for stack in self.stacks:
            for size in sorted(sizes):
                sequence = engine.start(ready(engine, stack))
                engine.prefill([sequence], [tokens(size)])
                for decoded in range(4):
                    if decoded:
                        engine.decode([sequence], [[decoded]])
                    expected = footprint(
                        stack, engine.layers, size, decoded, observed=sequence.observed()
                    )
                    assert sequence.measured() == expected, (str(stack), size, decoded)

    def test_a_row_does_not_depend_on_its_batch(self):
        engine = tiny_engine()
        tolerance = self.logit_tolerance
        prompts = [tokens(PROMPT, seed) for seed in (0, 1)] + [tokens(9, 2)]
        for stack in self.stacks:
            alone = [follow(engine, stack, prompt, [5 + n])[0] for n, prompt in enumerate(prompts)]
            for padding in ("left", "right"):
                sequences = [engine.start(ready(engine, stack)) for _ in prompts]
                first = engine.prefill(sequences, prompts, padding=padding)
                second = [row[-1] for row in engine.decode(sequences, [[5], [6], [7]])]
                for row, expected in enumerate(alone):
                    together = torch.stack([first[row], second[row]])
                    torch.testing.assert_close(together, expected, atol=tolerance, rtol=tolerance)

    def test_a_prompt_in_chunks_ends_like_one_in_a_piece(self):
        engine = tiny_engine()
        for stack in self.stacks:
            whole, one = follow(engine, stack, tokens(PROMPT), tokens(DECODED, 1))
            pieces, two = follow(engine, stack, tokens(PROMPT), tokens(DECODED, 1), chunk_tokens=7)
            tolerance = self.logit_tolerance
            torch.testing.assert_close(pieces, whole, atol=tolerance, rtol=tolerance)
            assert one.resident_bytes == two.resident_bytes

    def test_prefill_then_decode_stores_what_decoding_alone_stores(self):
        engine = tiny_engine()
        everything = tokens(PROMPT)
        for stack in self.stacks:
            late, _ = follow(engine, stack, everything[:20], everything[20:], exact_prefill=False)
            early, _ = follow(engine, stack, everything[:1], everything[1:], exact_prefill=False)
            tolerance = self.logit_tolerance
            torch.testing.assert_close(late[1:], early[20:], atol=tolerance, rtol=tolerance)

    def test_error_falls_as_more_is_kept(self):
        engine = tiny_engine()
        errors = [0.0] * len(self.ladder)
        for seed in range(4):
            prompt, continuation = tokens(64, seed), tokens(DECODED, seed + 50)
            plain, _ = follow(engine, MethodStack(), prompt, continuation)
            for number, text in enumerate(self.ladder):
                found, _ = follow(engine, parse_stack(text), prompt, continuation)
                errors[number] += float((found[1:] - plain[1:]).square().mean())
        for stronger, weaker in itertools.pairwise(errors):
            assert weaker <= stronger * 1.05, errors
        assert errors[-1] < 0.8 * errors[0], errors

    @pytest.mark.parametrize("case", ["zeros", "constant channels", "one token", "equal tokens"])
    def test_degenerate_vectors_give_numbers(self, case):
        engine = tiny_engine()
        for stack in self.stacks:
            layers = engine.start(ready(engine, stack)).layers
            for layer in layers[:2] + layers[-2:]:
                _run_layer(layer, *_degenerate(case, layer.setup.shape))

    def test_the_same_method_written_down_gives_the_same_answers(self):
        engine = tiny_engine()
        for stack in self.stacks:
            copies = tuple(
                type(method).model_validate_json(method.model_dump_json())
                for method in stack.methods
            )
            assert [m.fingerprint for m in copies] == [m.fingerprint for m in stack.methods]
            assert parse_stack(str(stack)) == stack
            one, _ = follow(engine, stack, tokens(PROMPT), tokens(DECODED, 1))
            two, _ = follow(engine, MethodStack(copies), tokens(PROMPT), tokens(DECODED, 1))
            assert torch.equal(one, two)

    def test_a_selection_reads_less_than_is_held(self):
        engine = tiny_engine()
        for stack in self.stacks:
            if stack.selection is None:
                continue
            _, sequence = follow(engine, stack, tokens(400), tokens(1, 1))
            found = sequence.measured()
            assert found.read_bytes_per_step < found.resident_bytes


def _degenerate(case, shape):
    count = 1 if case == "one token" else 50
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(shape.query_heads, count, shape.key_dim, generator=generator)
    keys = torch.randn(shape.kv_heads, count, shape.key_dim, generator=generator)
    values = torch.randn(shape.kv_heads, count, shape.value_dim, generator=generator)
    if case == "zeros":
        keys, values = torch.zeros_like(keys), torch.zeros_like(values)
    elif case == "constant channels":
        keys[..., :4], values[..., :4] = 3.0, -2.0
    elif case == "equal tokens":
        keys, values = keys[:, :1].repeat(1, count, 1), values[:, :1].repeat(1, count, 1)
    return queries, keys, values


def _run_layer(layer, queries, keys, values):
    """Prompt of all tokens, then the last one three times more."""
    count = keys.shape[1]
    out, seen = layer.prefill(queries, keys, values, torch.arange(count))
    assert out.isfinite().all()
    if all(method.scope == "layer" for method in layer.stack.evictors):
        layer.finish_prefill(layer.choose(seen))
    else:
        layer.finish_prefill(None)
    for step in range(3):
        position = torch.tensor([count + step])
        out = layer.decode(queries[:, -1:], keys[:, -1:], values[:, -1:], position)
        assert out.isfinite().all()
