"""A stock attention of a few lines, and one layer of a server around it."""

from types import SimpleNamespace

import pytest
import torch
from contracts.step_metadata import Common

from kvtune.engines.vllm.plugin import store
from kvtune.engines.vllm.plugin.counters import Counters
from kvtune.engines.vllm.plugin.store import by_page, by_token
from kvtune.engines.vllm.plugin.store.spec import packed

torch.set_num_threads(1)

PAGE, HEADS, GROUP, WIDTH, BLOCKS = 32, 2, 3, 64, 24


class StockBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.vllm_config = kv_cache_spec, vllm_config

    def build(self, prefix, common, fast_build=False):
        return SimpleNamespace(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )


class Stock:
    """What a layer is told of itself; it attends to nothing."""

    def __init__(self, **named):
        self.head_size, self.scale, self.attn_type = WIDTH, 0.125, "decoder"
        self.kv_sharing_target_layer_name = self.alibi_slopes = self.sinks = None
        self.logits_soft_cap = 0
        for name, value in named.items():
            setattr(self, name, value)

    def forward(self, layer, query, key, value, cache, metadata, output):
        assert metadata is None
        return output


def attend(queries, keys, values):
    """The last tokens [m, Hq, d] over all keys and values [Hk, n, d]."""
    count, length = len(queries), keys.shape[1]
    mask = torch.ones(count, length).tril(length - count).bool()
    return torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1), keys, values, attn_mask=mask, enable_gqa=True
    ).transpose(0, 1)


class Engine:
    """One layer of a server whose requests take pages in no order; `gone` pages left their row."""

    def __init__(self, asked, max_num_seqs=8):
        spec = SimpleNamespace(
            block_size=PAGE,
            num_kv_heads=HEADS,
            head_size=WIDTH,
            head_size_v=WIDTH,
            dtype=torch.float32,
        )
        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.float32),
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        )
        self.asked = asked
        impl, builder = store.wrapped(Stock, StockBuilder, asked)
        self.impl, self.builder = impl(), builder(spec, ["layers.0"], config, "cpu")
        cell_bytes = packed(spec, asked)["state_content_bytes"]
        self.cache = torch.zeros(BLOCKS, HEADS, PAGE, cell_bytes, dtype=torch.uint8)
        self.random = torch.Generator().manual_seed(3)
        self.free = torch.randperm(BLOCKS, generator=self.random).tolist()
        self.tokens, self.pages, self.gone = {}, {}, {}

    def draw(self, *shape):
        return torch.randn(shape, generator=self.random)

    def end(self, name):
        """Let a request go, and others have its pages."""
        self.free += self.pages.pop(name)
        del self.tokens[name]

    def step(self, **more):
        """Compute so many more tokens of each request: what the queries of each are and got."""
        count = sum(more.values())
        query = self.draw(count, HEADS * GROUP, WIDTH)
        key, value = self.draw(count, HEADS, WIDTH), self.draw(count, HEADS, WIDTH)
        slots, at, places = [], 0, {}
        for name, new in more.items():
            held, pages = self.tokens.setdefault(name, []), self.pages.setdefault(name, [])
            places[name] = slice(at, at + new)
            for token in range(at, at + new):
                if len(held) % PAGE == 0:
                    pages.append(self.free.pop(0))
                slots.append(pages[-1] * PAGE + len(held) % PAGE)
                held.append((key[token], value[token]))
            at += new
        starts = torch.tensor([0, *more.values()]).cumsum(0).int()
        gone = [self.gone.get(name, ()) for name in more]
        lengths = [len(self.tokens[name]) for name in more]
        lengths = torch.tensor(lengths).int() - PAGE * torch.tensor([*map(len, gone)]).int()
        table = torch.full((len(more), 10), BLOCKS + 5).int()
        for row, name in enumerate(more):
            pages = [page for at, page in enumerate(self.pages[name]) if at not in gone[row]]
            table[row, : len(pages)] = torch.tensor(pages)
        common = Common(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=len(more),
            num_actual_tokens=count,
            max_query_len=max(more.values()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots),
        )
        metadata = self.builder.build(0, common)
        self.impl.do_kv_cache_update(None, key, value, self.cache, common.slot_mapping)
        output = torch.full_like(query, float("nan"))
        self.impl.forward(None, query, key, value, self.cache, metadata, output)
        return {name: (query[place], output[place]) for name, place in places.items()}

    def written(self, name):
        """Keys and values [Hk, n, d] of a request, as they were computed."""
        return [torch.stack(each, dim=1) for each in zip(*self.tokens[name], strict=True)]


@pytest.fixture
def figures(monkeypatch):
    counters = Counters(None, {})
    for module in (by_page, by_token):
        monkeypatch.setattr(module, "counters", lambda: counters)
    return counters


@pytest.fixture
def engine(figures):
    """Starts an engine: `engine(StoreConfig(...))`."""
    return Engine


@pytest.fixture
def attention():
    """The last tokens [m, Hq, d] over all keys and values [Hk, n, d]."""
    return attend
