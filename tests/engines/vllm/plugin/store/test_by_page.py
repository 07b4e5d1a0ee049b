"""KIVI's layers: full pages are quantized, and a token sees its own page as it was computed."""

import pytest
import torch

from kvtune.engines.vllm.plugin.store import attend
from kvtune.engines.vllm.plugin.store.grouped import GroupedPages
from kvtune.policies.plugin_config import StoreConfig

PAGE, HEADS, WIDTH = 32, 2, 64
KIVI = StoreConfig(format="kivi", bits_key=2, bits_value=3)
TWO_BITS = StoreConfig(format="kivi", bits_key=2, bits_value=2)


def by_token(attention, engine, name, query, gone=()):
    """What the latest tokens of a request get, token by token, page by page."""
    fmt = GroupedPages(engine.asked, WIDTH, PAGE)
    keys, values = engine.written(name)
    quantized = [x.clone() for x in (keys, values)]
    for start in range(0, keys.shape[1] // PAGE * PAGE, PAGE):
        page = slice(start, start + PAGE)
        pages = fmt.decode(fmt.encode(keys[:, page], values[:, page]), torch.float32)
        for x, decoded in zip(quantized, pages, strict=True):
            x[:, page] = decoded
    first = keys.shape[1] - len(query)
    outputs = []
    for at in range(len(query)):
        token = first + at
        own = token // PAGE * PAGE
        before = [place for place in range(own) if place // PAGE not in gone]
        seen = [
            torch.cat((old[:, before], new[:, own : token + 1]), dim=1)
            for old, new in zip(quantized, (keys, values), strict=True)
        ]
        outputs.append(attention(query[at : at + 1], *seen))
    return torch.cat(outputs)


STEPS = (
    {"a": 41},
    {"a": 22, "b": 1},
    {"a": 1, "b": 70},
    {"a": 1, "b": 1, "c": 32},
    {"c": 1, "b": 24},
    {"a": 1, "b": 1, "c": 1},
)


def test_tokens_see_earlier_pages_quantized_and_their_own_in_full(engine, attention):
    served = engine(KIVI)
    for more in STEPS:
        for name, (query, output) in served.step(**more).items():
            expected = by_token(attention, served, name, query)
            assert torch.allclose(output, expected, atol=1e-5)
    query, output = served.step(b=1)["b"]
    assert not torch.allclose(output, attention(query, *served.written("b")), atol=1e-3)


def test_pages_that_left_a_row_are_not_seen(engine, attention):
    """As under StreamingLLM, whose rows are closed up before."""
    served = engine(KIVI)
    served.step(a=150, b=40)
    served.gone = {"a": [1, 2]}
    for more in ({"a": 1, "b": 1}, {"a": 8}, {"a": 5, "b": 30}, {"a": 60}, {"a": 1}):
        for name, (query, output) in served.step(**more).items():
            expected = by_token(attention, served, name, query, served.gone.get(name, ()))
            assert torch.allclose(output, expected, atol=1e-5)


def test_what_a_token_gets_does_not_depend_on_chunks(engine):
    whole, chunked = engine(KIVI), engine(KIVI)
    random = torch.Generator().manual_seed(1)
    drawn = [torch.randn(150, heads, WIDTH, generator=random) for heads in (6, HEADS, HEADS)]

    def feed(served, sizes):
        outputs, at = [], 0
        for size in sizes:
            parts = iter(x[at : at + size] for x in drawn)
            served.draw = lambda *shape, parts=parts: next(parts)
            outputs.append(served.step(a=size)["a"][1])
            at += size
        return torch.cat(outputs)

    expected = feed(whole, [150])
    assert torch.allclose(feed(chunked, [1, 30, 1, 1, 64, 20, 11, 1, 21]), expected, atol=1e-5)
    assert torch.equal(whole.cache, chunked.cache)


def test_requests_that_end_leave_nothing_to_those_that_take_their_pages(engine, attention):
    served = engine(KIVI, max_num_seqs=2)
    for number in range(30):
        name = f"r{number}"
        for more in ({name: 20 + number}, {name: 1}, {name: 15}):
            query, output = served.step(**more)[name]
            expected = by_token(attention, served, name, query)
            assert torch.allclose(output, expected, atol=1e-5)
        served.end(name)
    # Two that wait, those of a step and those that the step before it filled.
    assert len(served.impl.open) <= 2 + 3 + 3


def test_a_request_whose_open_page_was_crowded_out_goes_on_from_its_codes(
    engine, attention, figures
):
    served = engine(StoreConfig(format="kivi", bits_key=8, bits_value=8), max_num_seqs=1)
    served.step(a=40)
    served.step(b=3)
    served.step(c=3)
    # Should c have ended, nobody minds that its page went early.
    assert figures.get("early_pages") == 0
    query, output = served.step(a=1)["a"]
    assert figures.get("early_pages") == 1
    assert torch.allclose(output, attention(query, *served.written("a")), atol=0.05)


def test_rows_that_are_too_much_at_once_are_attended_one_by_one(engine, monkeypatch):
    together, apart = engine(TWO_BITS), engine(TWO_BITS)
    expected = [together.step(**more) for more in STEPS]
    monkeypatch.setattr(attend, "TOGETHER_BYTES", 1)
    monkeypatch.setattr(attend, "BLOCK_QUERIES", 7)
    for more, before in zip(STEPS, expected, strict=True):
        after = apart.step(**more)
        assert all(torch.allclose(after[name][1], before[name][1], atol=1e-6) for name in more)


def test_a_warm_up_reads_and_opens_no_pages(engine):
    output, served = torch.ones(2, 3), engine(KIVI)
    assert served.impl.forward(None, None, None, None, None, None, output) is output
    assert not len(served.impl.open)


def test_bytes_are_counted_when_pages_are_quantized_and_read(engine, figures):
    served = engine(TWO_BITS)
    served.step(a=70)
    # Codes of 16 bytes, and a scale and minimum for 32 values, in keys and in values.
    page = HEADS * 2 * (PAGE * 16 + PAGE * WIDTH // 32 * 4)
    open_page = HEADS * PAGE * 2 * WIDTH * 4
    assert figures.get("kv_bytes_stored") == 2 * page
    assert figures.get("kv_bytes_read") == 2 * page + 3 * open_page
    assert figures.get("open_page_bytes") == 3 * open_page


@pytest.mark.parametrize("asked", [KIVI, TWO_BITS], ids=["3 bits", "2 bits"])
def test_a_step_without_a_full_page_stores_nothing_in_the_cache(engine, asked):
    served = engine(asked)
    served.step(a=31, b=5)
    assert not served.cache.any()
    served.step(a=1)
    assert served.cache.any()
