"""Quest around a stock backend of a few lines, which attends to pages as vLLM's kernels do."""

import sys
import types
from types import SimpleNamespace

import pytest
import torch
from contracts.step_metadata import Common

from kvtune.engines.vllm.plugin import prompts, quest
from kvtune.engines.vllm.plugin.builder import kept
from kvtune.engines.vllm.plugin.counters import Counters
from kvtune.kernels import pages as kernel
from kvtune.kernels.topk import top_indices
from kvtune.policies.plugin_config import QuestConfig
from kvtune.policies.sink_window import SinkWindow

PAGE, HEADS, GROUP, WIDTH, BLOCKS, LAYERS = 4, 2, 2, 8, 64, 3
STARTS = {"a": 1, "b": 20, "c": 40}
"""The first page of each request in the cache."""


class Builder:
    """What stock builders do: pass on what they are given, with what heads it is for."""

    def __init__(self):
        self.kv_cache_spec = SimpleNamespace(block_size=PAGE)
        self.layer_names = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]
        self.num_heads, self.num_kv_heads = HEADS * GROUP, HEADS
        self.sink_window = self.quest = None

    def build(self, prefix, common, fast_build=False):
        assert self.quest is None
        return SimpleNamespace(
            starts=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            heads=(self.num_heads, self.num_kv_heads),
        )


class Stock:
    """Attention over pages, row by row; counts what it reads."""

    def __init__(self, **named):
        self.num_heads, self.num_kv_heads, self.head_size = HEADS * GROUP, HEADS, WIDTH
        self.attn_type = "decoder"
        self.kv_sharing_target_layer_name = self.alibi_slopes = self.sinks = None
        for name, value in named.items():
            setattr(self, name, value)
        self.calls = []

    def forward(self, layer, query, key, value, cache, metadata, output, output_scale=None):
        self.calls.append(metadata)
        if metadata is None:
            return output
        assert metadata.heads == (query.shape[1], cache.shape[1])
        for row, length in enumerate(metadata.seq_lens.tolist()):
            first, end = metadata.starts[row : row + 2].tolist()
            held = metadata.block_table[row, : -(-length // PAGE)].long()
            kv = cache[held].transpose(0, 1).flatten(1, 2)[:, :length]
            mask = torch.ones(end - first, length).tril(length - (end - first)).bool()
            output[first:end] = attention(query[first:end], *kv.chunk(2, dim=-1), mask)
        return output


def attention(queries, keys, values, mask=None):
    """Queries [tokens, Hq, d] over keys and values [Hk, n, d]."""
    return torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1), keys, values, attn_mask=mask, enable_gqa=True
    ).transpose(0, 1)


class Engine:
    """One layer of a server: requests grow in it by steps."""

    def __init__(self, asked, layer=LAYERS - 1, protected_tokens=0, window=None):
        self.steps = quest.Steps(Builder(), asked, protected_tokens)
        self.impl = quest.impl_class(Stock, asked)()
        self.layer = SimpleNamespace(layer_name=f"model.layers.{layer}.self_attn.attn")
        self.cache = torch.zeros(BLOCKS, HEADS, PAGE, 2 * WIDTH)
        self.keys = {name: torch.zeros(HEADS, 0, WIDTH) for name in STARTS}
        self.values = {name: torch.zeros(HEADS, 0, WIDTH) for name in STARTS}
        self.random = torch.Generator().manual_seed(3)
        self.tells_prompts = True
        self.window = window
        self.drawn = []

    def step(self, **tokens):
        """Compute so many more tokens of each request; those in `prompt` are still its prompt.

        Returns the queries, and what attention made of them.
        """
        prompt = tokens.pop("prompt", ())
        count = sum(tokens.values())
        draw = torch.randint(-3, 4, (3, count, HEADS * GROUP, WIDTH), generator=self.random).float()
        self.drawn.append(draw)
        return self.compute(draw, tokens, prompt)

    def compute(self, draw, tokens, prompt=()):
        """Compute tokens of which this was drawn, as `step` does."""
        count = sum(tokens.values())
        queries, keys, values = draw[0], draw[1, :, :HEADS], draw[2, :, :HEADS]
        slots, lengths, at = [], [], 0
        for name, more in tokens.items():
            before = self.keys[name].shape[1]
            new = slice(at, at + more)
            at += more
            self.keys[name] = torch.cat((self.keys[name], keys[new].transpose(0, 1)), dim=1)
            self.values[name] = torch.cat((self.values[name], values[new].transpose(0, 1)), dim=1)
            slots += [STARTS[name] * PAGE + before + token for token in range(more)]
            lengths.append(before + more)
        for token, slot in enumerate(slots):
            cell = self.cache[slot // PAGE, :, slot % PAGE]
            cell.copy_(torch.cat((keys[token], values[token]), dim=-1))
        starts = torch.tensor([0, *tokens.values()]).cumsum(0).int()
        common = Common(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lengths).int(),
            seq_lens_cpu_upper_bound=torch.tensor(lengths).int(),
            is_prefilling=(
                torch.tensor([name in prompt for name in tokens]) if self.tells_prompts else None
            ),
            block_table_tensor=torch.stack(
                [torch.arange(20).int() + STARTS[name] for name in tokens]
            ),
            slot_mapping=torch.tensor(slots),
            num_reqs=len(tokens),
            num_actual_tokens=count,
            max_query_len=max(tokens.values()),
            max_seq_len=max(lengths),
        )
        answers = prompts.answers(common)
        if self.window is not None:
            common = kept(common, self.window)
        self.metadata = self.steps.prepare(Builder().build(0, common), common, answers)
        self.impl.calls.clear()
        output = torch.full_like(queries, float("nan"))
        self.impl.forward(
            self.layer, queries, keys, values, self.cache, self.metadata, output, output_scale=None
        )
        return queries, output

    def dense(self, name, queries):
        """Attention of a request's latest queries to all before them."""
        length, count = self.keys[name].shape[1], len(queries)
        mask = torch.ones(count, length).tril(length - count).bool()
        return attention(queries, self.keys[name], self.values[name], mask)

    def sparse(self, name, query, pages, *, per_kv_head, protected=0):
        """Attention of one query to the pages that the reference engine's Quest takes.

        Beside them, the first `protected` pages.
        """
        keys, values = self.keys[name], self.values[name]
        low, high = kernel.page_bounds(keys, PAGE)
        scores = kernel.page_scores(query[0], low, high, "max")
        if not per_kv_head:
            scores = scores.sum(dim=0, keepdim=True).expand(HEADS, -1)
        best = top_indices(scores[:, protected:-1], pages - 1 - protected) + protected
        outputs = []
        for head in range(HEADS):
            chosen = [*range(protected), *best[head].tolist(), low.shape[1] - 1]
            tokens = [t for t in range(keys.shape[1]) if t // PAGE in chosen]
            of_group = query[:, head * GROUP : (head + 1) * GROUP]
            of_head = slice(head, head + 1)
            outputs.append(attention(of_group, keys[of_head, tokens], values[of_head, tokens]))
        return torch.cat(outputs, dim=1)


def close(ours, theirs):
    return torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("per_kv_head", [False, True])
@pytest.mark.parametrize("pages", [1, 2, 5])
def test_decode_steps_read_what_the_reference_reads(per_kv_head, pages):
    engine = Engine(QuestConfig(pages=pages, per_kv_head=per_kv_head))
    engine.step(a=37, b=50, prompt="ab")
    for _ in range(2 * PAGE):
        queries, output = engine.step(a=1, b=1)
        for row, name in enumerate("ab"):
            query = queries[row : row + 1]
            expected = engine.sparse(name, query, pages, per_kv_head=per_kv_head)
            assert close(output[row : row + 1], expected)
            assert not close(output[row : row + 1], engine.dense(name, query))
        assert len(engine.impl.calls) == 1


@pytest.mark.parametrize("per_kv_head", [False, True])
@pytest.mark.parametrize("pages", [1, 5])
def test_protected_pages_are_read_in_each_step_also_beyond_the_budget(per_kv_head, pages):
    asked = QuestConfig(pages=pages, per_kv_head=per_kv_head)
    engine = Engine(asked, protected_tokens=2 * PAGE - 1)
    engine.step(a=37, b=PAGE, prompt="ab")
    for _ in range(PAGE):
        queries, output = engine.step(a=1, b=1)
        wanted = engine.sparse(
            "a", queries[:1], max(pages, 3), per_kv_head=per_kv_head, protected=2
        )
        assert close(output[:1], wanted)
        assert close(output[1:], engine.dense("b", queries[1:]))


def test_bounds_are_those_of_keys_as_a_store_has_rounded_them():
    class Store(Stock):
        def written_keys(self, key, cache, metadata):
            return key / 2

    engine = Engine(QuestConfig(pages=2))
    engine.impl = quest.impl_class(Store, engine.steps.asked)()
    engine.step(a=9, prompt="a")
    greatest = engine.impl.summaries.bounds[:, STARTS["a"], :WIDTH]
    assert torch.equal(greatest, engine.keys["a"][:, :PAGE].amax(dim=1) / 2)


@pytest.mark.parametrize("per_kv_head", [False, True])
def test_short_requests_and_prompts_of_the_same_step_read_everything(per_kv_head):
    engine = Engine(QuestConfig(pages=3, per_kv_head=per_kv_head))
    engine.step(a=9, b=45, prompt="ab")
    queries, output = engine.step(c=7, a=1, b=1, prompt="c")
    assert close(output[:7], engine.dense("c", queries[:7]))
    assert close(output[7:8], engine.dense("a", queries[7:8]))
    assert close(output[8:], engine.sparse("b", queries[8:], 3, per_kv_head=per_kv_head))


def test_rows_read_different_shares_of_their_pages():
    engine = Engine(QuestConfig(share=0.5))
    engine.step(a=17, b=45, prompt="ab")
    queries, output = engine.step(a=1, b=1)
    assert close(output[:1], engine.sparse("a", queries[:1], 3, per_kv_head=False))
    assert close(output[1:], engine.sparse("b", queries[1:], 6, per_kv_head=False))


def test_the_last_token_of_a_prompt_reads_everything_though_it_comes_alone():
    engine = Engine(QuestConfig(pages=2))
    engine.step(a=40, prompt="a")
    queries, output = engine.step(a=1, prompt="a")
    assert close(output, engine.dense("a", queries))
    assert engine.impl.calls == [engine.metadata]


@pytest.mark.parametrize("window", [None, SinkWindow(PAGE, 4 * PAGE, PAGE)], ids=["all", "window"])
@pytest.mark.parametrize("per_kv_head", [False, True])
def test_an_answer_that_is_computed_again_reads_what_it_read_at_first(
    per_kv_head, window, monkeypatch
):
    asked = QuestConfig(pages=3, per_kv_head=per_kv_head)
    first = Engine(asked, window=window)
    _, prompt = first.step(a=37, prompt="a")
    answered = [first.step(a=1)[1] for _ in range(3 * PAGE)]
    drawn = torch.cat(first.drawn, dim=1)

    again = Engine(asked, window=window)
    monkeypatch.setattr(prompts, "_told", torch.tensor([37]))
    # In chunks: of the prompt and some of the answer, and of the rest.
    _, output = again.compute(drawn[:, :42], {"a": 42}, "a")
    assert close(output, torch.cat([prompt, *answered[:5]]))
    assert not close(output[37:], again.dense("a", drawn[0, 37:42]))
    _, output = again.compute(drawn[:, 42:], {"a": 3 * PAGE - 5})
    assert close(output, torch.cat(answered[5:]))


def test_where_prompts_are_not_told_from_answers_everything_is_read(caplog):
    engine = Engine(QuestConfig(pages=2))
    engine.step(a=40, prompt="a")
    engine.tells_prompts = False
    for _ in range(2):
        queries, output = engine.step(a=1)
        assert close(output, engine.dense("a", queries))
    assert caplog.text.count("does not tell prompts") == 1


def builder_in_vllm(monkeypatch, asked, pages):
    """A builder whose layers vLLM knows, where the cache has so many pages; and its layers."""
    builder = Builder()
    layers = {
        name: SimpleNamespace(impl=quest.impl_class(Stock, asked)()) for name in builder.layer_names
    }
    contents = {
        "vllm": {},
        "vllm.config": {"get_layers_from_vllm_config": lambda *_: layers},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.attention": {"Attention": object},
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    builder.device = torch.device("cpu")
    builder.vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=pages),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )
    return builder, layers


def test_memory_for_bounds_is_taken_before_the_first_request(monkeypatch):
    asked = QuestConfig(pages=2, dense_layers=1)
    builder, layers = builder_in_vllm(monkeypatch, asked, BLOCKS)
    quest.make_room(builder, asked)
    first, *others = (layer.impl.summaries for layer in layers.values())
    assert first is None
    assert [each.bounds.shape for each in others] == [(HEADS, BLOCKS, 2 * WIDTH)] * (LAYERS - 1)
    assert {each.bounds.dtype for each in others} == {torch.bfloat16}
    # A step finds what is there.
    assert layers[builder.layer_names[1]].impl.make_room(BLOCKS, torch.bfloat16, "cpu") is others[0]


def test_while_the_cache_has_no_size_yet_no_memory_is_taken(monkeypatch):
    asked = QuestConfig(pages=2, dense_layers=1)
    builder, layers = builder_in_vllm(monkeypatch, asked, None)
    quest.make_room(builder, asked)
    assert [layer.impl.summaries for layer in layers.values()] == [None] * LAYERS
    # A step of the profile takes what its few pages need, and the real cache gets its own.
    impl = layers[builder.layer_names[1]].impl
    assert impl.make_room(2, torch.bfloat16, "cpu").bounds.shape == (HEADS, 2, 2 * WIDTH)
    builder.vllm_config.cache_config.num_gpu_blocks = BLOCKS
    quest.make_room(builder, asked)
    assert impl.summaries.bounds.shape == (HEADS, BLOCKS, 2 * WIDTH)


def test_a_budget_of_all_pages_leaves_the_step_to_the_stock_kernel():
    engine = Engine(QuestConfig(budget_tokens=41))
    engine.step(a=40, prompt="a")
    queries, output = engine.step(a=1)
    assert close(output, engine.dense("a", queries))
    assert engine.impl.calls == [engine.metadata]


def test_the_first_layers_read_everything_and_hold_no_summaries():
    engine = Engine(QuestConfig(pages=2, dense_layers=2), layer=1)
    engine.step(a=40, prompt="a")
    queries, output = engine.step(a=1)
    assert close(output, engine.dense("a", queries))
    assert engine.impl.summaries is None


def test_a_warm_up_without_requests_goes_to_the_stock_kernel():
    engine = Engine(QuestConfig(pages=2))
    output = torch.zeros(1, HEADS * GROUP, WIDTH)
    engine.impl.forward(engine.layer, output, output, output, engine.cache, None, output)
    assert engine.impl.calls == [None]


def test_pages_and_bytes_are_counted(monkeypatch):
    figures = Counters(None, {})
    monkeypatch.setattr(quest, "counters", lambda: figures)
    engine = Engine(QuestConfig(pages=3, dense_layers=1))
    engine.step(a=40, b=8, prompt="ab")
    assert figures.get("pages_seen") == 0
    engine.step(a=1, b=1, c=6, prompt="c")
    # 11 pages of a and 3 of b; one layer of three reads all of them, two layers read 3 and 3.
    assert figures.get("pages_seen") == 3 * 14
    assert figures.get("pages_read") == 14 + 2 * 6
    # Two bounds of 8 channels of 4 bytes, for each page and KV head of this one layer.
    assert figures.get("summary_bytes") == 2 * 8 * 4 * BLOCKS * HEADS


def test_summaries_follow_a_cache_of_another_size(monkeypatch):
    figures = Counters(None, {})
    monkeypatch.setattr(quest, "counters", lambda: figures)
    engine = Engine(QuestConfig(pages=3))
    engine.step(a=1, prompt="a")
    engine.cache = torch.zeros(BLOCKS + 10, HEADS, PAGE, 2 * WIDTH)
    engine.step(b=1, prompt="b")
    assert figures.get("summary_bytes") == 2 * 8 * 4 * (BLOCKS + 10) * HEADS
