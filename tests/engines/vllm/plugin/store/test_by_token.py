"""Layers of cells: what tokens see is what is stored."""

from types import SimpleNamespace

import pytest
import torch

from kvtune.engines.vllm.plugin.store import attend
from kvtune.engines.vllm.plugin.store.cells import cells_of
from kvtune.policies.plugin_config import StoreConfig

PAGE, HEADS, WIDTH = 32, 2, 64
INT8 = StoreConfig(format="int8")
FORMATS = [INT8, StoreConfig(format="int4"), StoreConfig(format="turboquant", bits_value=2)]


def stored(engine, name):
    """Keys and values [Hk, n, d] of a request, each quantized alone by the codec."""
    cells = cells_of(engine.asked, WIDTH, torch.float32)
    tokens = engine.tokens[name]
    for at, part in enumerate((cells.key, cells.value)):
        codec = part.codec
        yield torch.cat([codec.decode(codec.encode(kv[at][:, None])) for kv in tokens], dim=1)


@pytest.mark.parametrize("asked", FORMATS, ids=lambda asked: asked.format)
def test_prompts_in_chunks_and_decode_steps_see_what_is_stored(engine, attention, asked):
    served = engine(asked)
    for more in ({"a": 41}, {"a": 23, "b": 1}, {"a": 1, "b": 70}, {"a": 1, "b": 1, "c": 3}):
        for name, (query, output) in served.step(**more).items():
            expected = attention(query, *stored(served, name))
            assert torch.allclose(output, expected, atol=1e-5)
            assert not torch.allclose(output, attention(query, *served.written(name)), atol=1e-4)


@pytest.mark.parametrize("asked", FORMATS, ids=lambda asked: asked.format)
def test_the_keys_of_a_step_are_told_as_they_are_stored(engine, asked):
    served = engine(asked)
    served.step(a=41)
    slots = [page * PAGE + offset for page in served.pages["a"] for offset in range(PAGE)][:41]
    told = served.impl.written_keys(
        torch.empty(0), served.cache, SimpleNamespace(slot_mapping=torch.tensor(slots))
    )
    keys, _ = stored(served, "a")
    assert torch.allclose(told.transpose(0, 1), keys, atol=1e-5)


def test_padding_is_not_stored(engine):
    served = engine(INT8)
    served.step(a=3)
    before = served.cache.clone()
    key = value = served.draw(4, HEADS, WIDTH)
    served.impl.do_kv_cache_update(None, key, value, served.cache, torch.tensor([-1, -1]))
    assert torch.equal(served.cache, before)


def test_bytes_that_are_written_and_read_are_counted(engine, figures):
    served = engine(INT8)
    served.step(a=70)
    served.step(b=33)
    served.step(a=1, b=1)
    cell = 2 * (WIDTH + 4)
    assert figures.get("kv_bytes_stored") == 105 * HEADS * cell
    assert figures.get("kv_bytes_read") == (3 + 2 + 3 + 2) * PAGE * HEADS * cell


def test_rows_that_are_too_much_at_once_are_attended_one_by_one(engine, monkeypatch):
    together, apart = engine(INT8), engine(INT8)
    steps = ({"a": 70, "b": 2, "c": 300}, {"a": 1, "b": 1, "c": 1, "d": 3}, {"b": 1, "d": 40})
    expected = [together.step(**more) for more in steps]
    monkeypatch.setattr(attend, "TOGETHER_BYTES", 1)
    monkeypatch.setattr(attend, "BLOCK_QUERIES", 7)
    for more, before in zip(steps, expected, strict=True):
        after = apart.step(**more)
        assert all(torch.allclose(after[name][1], before[name][1], atol=1e-6) for name in more)


def test_a_warm_up_reads_no_pages(engine):
    output = torch.ones(2, 3)
    assert engine(INT8).impl.forward(None, None, None, None, None, None, output) is output


def test_heads_that_are_shown_as_requests_of_their_own_get_the_same(engine):
    """As Quest does where heads choose apart: a page of one head is a page."""
    served = engine(FORMATS[2])
    served.step(a=70, b=40)
    queries, expected = (
        torch.cat(each) for each in zip(*served.step(a=1, b=1).values(), strict=True)
    )
    cache = served.cache.view(-1, 1, *served.cache.shape[2:])
    tables = [
        torch.tensor(served.pages[name] + [0] * (3 - len(served.pages[name]))) * HEADS + head
        for name in "ab"
        for head in range(HEADS)
    ]
    metadata = SimpleNamespace(
        query_start_loc=torch.arange(5),
        seq_lens=torch.tensor([71, 71, 41, 41]),
        block_table=torch.stack(tables).int(),
    )
    output = torch.empty(2 * HEADS, 3, WIDTH)
    by_head = queries.view(2 * HEADS, 3, WIDTH)
    served.impl.forward(None, by_head, None, None, cache, metadata, output)
    assert torch.allclose(output.view_as(expected), expected, atol=1e-6)
