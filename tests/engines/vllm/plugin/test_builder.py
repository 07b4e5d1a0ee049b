"""What a step is made into, around a stock builder that hands back what it is given."""

import sys
import types
from types import SimpleNamespace

import pytest
from contracts.step_metadata import Common

from kvtune.engines.vllm.plugin import builder as under_test
from kvtune.engines.vllm.plugin import self_test
from kvtune.engines.vllm.plugin.counters import Counters
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import PluginConfig, StoreConfig, StreamingLlmConfig

torch = pytest.importorskip("torch")

PAGE = 8
# A page of sinks and two of window.
ASKED = PluginConfig(streaming_llm=StreamingLlmConfig(window_tokens=16, sink_tokens=4))


class Stock:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_attn_metadata


def step(*rows):
    """Rows of (computed tokens, queries, whether they are of a prompt)."""
    starts = torch.tensor([0, *(queries for _, queries, _ in rows)]).cumsum(0).int()
    lengths = torch.tensor([computed + queries for computed, queries, _ in rows]).int()
    return Common(
        starts,
        starts,
        lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(rows),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(queries for _, queries, _ in rows),
        max_seq_len=int(lengths.max()),
        block_table_tensor=torch.arange(20).repeat(len(rows), 1),
        slot_mapping=torch.arange(int(starts[-1])),
        is_prefilling=torch.tensor([is_prompt for *_, is_prompt in rows]),
    )


@pytest.fixture
def figures(monkeypatch):
    found = Counters(None, {})
    monkeypatch.setattr(under_test, "counters", lambda: found)
    return found


@pytest.fixture
def make(monkeypatch, figures):
    module = types.ModuleType("vllm.v1.attention.backend")
    module.AttentionCGSupport = SimpleNamespace(NEVER="never")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(self_test, "check", lambda *_: None)

    def make(asked=ASKED, kernel_tokens=PAGE):
        built = under_test.builder_class(Stock, asked, object)
        return built(
            SimpleNamespace(block_size=kernel_tokens),
            ["0", "1", "2"],
            SimpleNamespace(cache_config=SimpleNamespace(block_size=PAGE)),
            torch.device("cpu"),
        )

    return make


def test_a_step_that_drops_nothing_is_what_vllm_made(make):
    common = step((30, 1, False), (0, 32, True))
    assert make().build(0, common_attn_metadata=common) is common


def test_rows_are_told_of_what_is_kept_and_tokens_of_where_they_are(make):
    # Token 80 is on page 10, which sees page 0, pages 8 and 9, and itself.
    common = step((80, 1, False), (5, 2, True))
    told = make().build(0, common)
    assert told.block_table_tensor[0, :4].tolist() == [0, 8, 9, 10]
    assert told.seq_lens.tolist() == [25, 7]
    assert (told.num_reqs, told.max_seq_len, told.max_query_len) == (2, 25, 2)
    assert told.slot_mapping is common.slot_mapping
    assert common.block_table_tensor[0, :4].tolist() == [0, 1, 2, 3]


def test_no_more_of_a_table_is_rewritten_than_the_longest_request_has(make):
    common = step((80, 1, False), (5, 2, True))
    assert common.block_table_tensor.shape[1] > 11
    assert make().build(0, common).block_table_tensor.shape == (2, 11)


def test_the_rows_of_a_cut_chunk_are_still_of_a_prompt(make):
    told = make().build(0, step((76, 12, True), (80, 1, False)))
    # Tokens 76 to 79 and 80 to 87 are of two pages.
    assert told.query_start_loc.tolist() == [0, 4, 12, 13]
    assert told.is_prefilling.tolist() == [True, True, False]
    assert (told.num_reqs, told.max_query_len, told.num_actual_tokens) == (3, 8, 13)


def test_pages_that_decode_steps_are_spared_are_counted_over_all_layers(make, figures):
    # 11 pages of which 4 are read, and 2 of 2; the chunk of a prompt does not count.
    make().build(0, step((80, 1, False), (9, 1, False), (100, 8, True)))
    assert figures.get("pages_seen") == 3 * (11 + 2)
    assert figures.get("pages_read") == 3 * (4 + 2)


def test_attention_stays_out_of_graphs_and_tables_are_not_put_in_later(make):
    built = type(make())
    assert built.get_cudagraph_support(None, None) == "never"
    assert built.supports_update_block_table is False


def test_kernels_with_pages_of_their_own_are_refused_with_what_helps(make):
    with pytest.raises(BadInput, match="pages of 4 tokens") as refused:
        make(kernel_tokens=4)
    assert refused.value.__notes__ == ["To fix: set --block-size 4."]


@pytest.mark.parametrize(
    ("store", "is_tested"),
    [("kivi", False), ("int8", True), (None, True)],
)
def test_a_start_without_a_self_test_says_so(make, monkeypatch, caplog, store, is_tested):
    tested = []
    monkeypatch.setattr(self_test, "check", lambda *_: tested.append(True))
    make(ASKED if store is None else PluginConfig(store=StoreConfig(format=store)))
    assert tested == [True] * is_tested
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [one.startswith("The self-test of kvtune's plugin cannot be run") for one in said] == (
        [] if is_tested else [True]
    )
    assert all("a kivi store" in one for one in said)
