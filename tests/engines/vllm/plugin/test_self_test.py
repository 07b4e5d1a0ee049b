"""The self-test over a stock backend of a few lines, whole and with faults that it is there for."""

import sys
import types
from dataclasses import replace
from types import SimpleNamespace

import pytest
from contracts.step_metadata import Common

from kvtune.errors import BadInput

torch = pytest.importorskip("torch")

from kvtune.engines.vllm.plugin import self_test  # noqa: E402
from kvtune.engines.vllm.plugin.rows import kept_rows, without_middle  # noqa: E402

PAGE, HEADS, KV_HEADS, WIDTH = 4, 4, 2, 8


class StockImpl:
    """Attention as vLLM's kernels do it, in loops: row by row, query by query."""

    num_heads = HEADS

    def do_kv_cache_update(self, layer, keys, values, cache, slots):
        for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
            cache[slot // PAGE, :, slot % PAGE] = torch.cat([key, value], dim=-1)

    def forward(self, layer, queries, key, value, cache, metadata, output):
        starts = metadata.query_start_loc.tolist()
        for row, length in enumerate(metadata.seq_lens.tolist()):
            pages = metadata.block_table_tensor[row, : -(-length // PAGE)].tolist()
            held = torch.cat([cache[page].transpose(0, 1).float() for page in pages])
            for token in range(starts[row], starts[row + 1]):
                seen = held[: length - (starts[row + 1] - 1 - token)]
                keys, values = seen.repeat_interleave(HEADS // KV_HEADS, 1).chunk(2, dim=-1)
                scores = torch.einsum("hd,thd->ht", queries[token].float(), keys) / WIDTH**0.5
                output[token] = torch.einsum("ht,thd->hd", scores.softmax(-1), values)


def config_of(dtype, cache_dtype="auto"):
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )


class StockBuilder:
    layer_names = ("layer.0",)
    device = torch.device("cpu")
    vllm_config = config_of(torch.float32)
    kv_cache_spec = SimpleNamespace(
        block_size=PAGE, num_kv_heads=KV_HEADS, head_size=WIDTH, dtype=torch.float32
    )

    def build(self, common_prefix_len, common):
        return common


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    layer = SimpleNamespace(impl=StockImpl())
    contents = {
        "vllm": {},
        "vllm.config": {"get_layers_from_vllm_config": lambda *_: {"layer.0": layer}},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.attention": {"Attention": object},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {"CommonAttentionMetadata": Common},
        "vllm.v1.kv_cache_interface": {
            "compute_layer_kv_cache_shape_bytes": lambda spec, blocks: (
                blocks,
                KV_HEADS,
                PAGE,
                2 * WIDTH * spec.dtype.itemsize,
            )
        },
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def builder_of(dtype, cache_dtype="auto"):
    """A builder for layers that compute and store in `dtype`."""
    builder = StockBuilder()
    builder.vllm_config = config_of(dtype, cache_dtype)
    builder.kv_cache_spec = SimpleNamespace(
        block_size=PAGE, num_kv_heads=KV_HEADS, head_size=WIDTH, dtype=dtype
    )
    return builder


def keep(common, window, *, late=0, longer=0, split=True):
    """As the builder does it, but `late` pages too many go, and lengths are `longer`."""
    rows = kept_rows(common.query_start_loc, common.seq_lens, window)
    dropped = torch.where(rows.dropped > 0, rows.dropped + late, rows.dropped)
    if not split:
        rows = replace(rows, query_starts=rows.query_starts.clamp(max=1))
    return replace(
        common,
        query_start_loc=rows.query_starts,
        seq_lens=rows.lengths + longer * (rows.dropped > 0),
        block_table_tensor=without_middle(
            common.block_table_tensor[rows.source], window.sink_blocks, dropped
        ),
    )


def test_a_stock_backend_that_is_as_we_take_it_passes():
    self_test.check(StockBuilder(), StockBuilder, StockImpl, keep)


@pytest.mark.parametrize("fault", [{"late": 1}, {"late": -1}, {"longer": -1}, {"split": False}])
def test_rows_that_are_off_by_a_page_or_a_token_are_found(fault):
    with pytest.raises(BadInput, match="self-test"):
        self_test.check(
            StockBuilder(), StockBuilder, StockImpl, lambda *given: keep(*given, **fault)
        )


@pytest.mark.parametrize("fault", [{"late": 1}, {"late": -1}, {"longer": -1}, {"split": False}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_token_too_few_is_found_also_on_long_pages_and_in_few_bits(monkeypatch, dtype, fault):
    monkeypatch.setattr(sys.modules[__name__], "PAGE", 128)
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 64)
    builder = builder_of(getattr(torch, dtype))
    self_test.check(builder, StockBuilder, StockImpl, keep)
    with pytest.raises(BadInput, match="self-test"):
        self_test.check(builder, StockBuilder, StockImpl, lambda *given: keep(*given, **fault))


def test_a_kernel_for_fp8_may_round_more_roughly_and_still_not_lose_a_page():
    class Rough(StockImpl):
        def forward(self, layer, queries, key, value, cache, metadata, output):
            StockImpl.forward(self, layer, queries, key, value, cache, metadata, output)
            # Rows that ask more at once are rounded to one part in 16, up or down.
            if metadata.max_query_len > 1:
                output *= 1 + torch.tensor([1 / 32, -1 / 32]).repeat(WIDTH // 2)

    self_test.check(builder_of(torch.float32, "fp8_e4m3"), StockBuilder, Rough, keep)
    with pytest.raises(BadInput, match="self-test"):
        self_test.check(builder_of(torch.float32), StockBuilder, Rough, keep)
    with pytest.raises(BadInput, match="self-test"):
        self_test.check(
            builder_of(torch.float32, "fp8"),
            StockBuilder,
            Rough,
            lambda *given: keep(*given, late=1),
        )


def test_an_answer_that_is_no_number_is_found():
    class Broken(StockImpl):
        def forward(self, layer, queries, key, value, cache, metadata, output):
            output.fill_(float("nan"))

    with pytest.raises(BadInput, match="self-test"):
        self_test.check(StockBuilder(), StockBuilder, Broken, keep)


def test_a_kernel_that_reads_pages_in_an_order_of_its_own_is_found():
    class Sorted(StockImpl):
        def forward(self, layer, queries, key, value, cache, metadata, output):
            table = metadata.block_table_tensor.sort(dim=1).values
            ordered = replace(metadata, block_table_tensor=table)
            StockImpl.forward(self, layer, queries, key, value, cache, ordered, output)

    with pytest.raises(BadInput, match="self-test"):
        self_test.check(StockBuilder(), StockBuilder, Sorted, keep)
