"""Which pages go, against the reference engine's ChunkKV and SnapKV on the same attention."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvtune.engines.vllm.plugin.evict.choice import page_scores, pages_to_drop  # noqa: E402
from kvtune.engines.vllm.plugin.evict.scores import received  # noqa: E402
from kvtune.policies.eviction import EvictorContext, Seen, Span  # noqa: E402
from kvtune.policies.method import LayerShape  # noqa: E402
from kvtune.policies.methods.chunkkv import ChunkKV  # noqa: E402
from kvtune.policies.methods.snapkv import SnapKV  # noqa: E402
from kvtune.policies.page_budget import PageBudget  # noqa: E402
from kvtune.policies.plugin_config import PageEvictionConfig  # noqa: E402

WIDTH, WINDOW = 4, 8
CHUNKKV = PageEvictionConfig(budget_tokens=1, window_tokens=WINDOW)
SNAPKV = CHUNKKV.model_copy(update={"method": "snapkv"})


def prompt(tokens, heads, kv_heads, seed, spans=()):
    """What the reference sees of a prompt's end, and all queries."""
    random = torch.Generator().manual_seed(seed)
    queries = torch.randn(heads, tokens, WIDTH, generator=random) * 2
    keys = torch.randn(kv_heads, tokens, WIDTH, generator=random)
    shape = LayerShape(0, 1, heads, kv_heads, WIDTH, WIDTH, 4)
    ctx = EvictorContext(shape, WIDTH**-0.5, None, torch.float32, torch.device("cpu"), spans=spans)
    places = torch.arange(tokens)
    return Seen(queries, places, keys, keys, places[None], ctx)


def reference(method, seen):
    """The tokens that the reference engine keeps."""
    evictor = method.evictor(seen.ctx)
    evictor.observe(seen, "prefill")
    (kept,) = evictor.select(seen, "prefill").tolist()
    return kept


def ours(seen, budget, asked):
    """The tokens that are left, when the window came in two chunks."""
    tokens = seen.queries.shape[1]
    total = torch.zeros(tokens)
    for start, end in ((tokens - WINDOW, tokens - 3), (tokens - 3, tokens)):
        queries = seen.queries[:, start:end].transpose(0, 1)
        total[:end] += received(queries, seen.keys[:, :end], start, seen.ctx.scale, None)
    gone = set(pages_to_drop(total, budget, asked))
    return [place for place in range(tokens) if place // budget.block_tokens not in gone]


@settings(deadline=None)
@given(st.integers(40, 120), st.integers(1, 120), st.sampled_from([1, 4, 8]), st.integers(0, 9))
def test_chunkkv_keeps_what_the_reference_keeps_with_pages_as_chunks(tokens, wanted, size, seed):
    budget = PageBudget(
        sink_tokens=3, window_tokens=WINDOW, block_tokens=size, budget_tokens=wanted
    )
    if not budget.evicts(tokens):
        return
    tail = tokens - budget.first_window_page(tokens) * size
    old = budget.kept(tokens) - (budget.pages(tokens) - budget.first_window_page(tokens))
    if old == 0:
        return  # the reference refuses a budget for the window alone
    method = ChunkKV(budget_tokens=tail + old * size, window_tokens=WINDOW, chunk_tokens=size)
    seen = prompt(tokens, 4, 2, seed, spans=(Span(0, 3, protected=True),))
    assert ours(seen, budget, CHUNKKV) == reference(method, seen)


@settings(deadline=None)
@given(st.integers(40, 120), st.integers(WINDOW + 1, 120), st.integers(0, 9))
def test_snapkv_keeps_what_the_reference_keeps_with_pages_of_one_token(tokens, wanted, seed):
    budget = PageBudget(0, WINDOW, 1, budget_tokens=wanted)
    if not budget.evicts(tokens):
        return
    method = SnapKV(budget_tokens=wanted, window_tokens=WINDOW)
    seen = prompt(tokens, 3, 1, seed)
    assert ours(seen, budget, SNAPKV) == reference(method, seen)


def test_a_page_is_worth_all_that_its_tokens_received():
    got = torch.tensor([0.1, 0.2, 0.0, 0.5, 0.0, 0.1, 0.1])
    assert page_scores(got, 3, CHUNKKV).tolist() == pytest.approx([0.3, 0.6, 0.1])


def test_to_snapkv_a_page_is_worth_its_best_token_and_the_window_nothing():
    asked = SNAPKV.model_copy(update={"window_tokens": 2, "kernel_tokens": 3})
    got = torch.tensor([0.0, 0.0, 9.0, 0.0, 0.0, 3.0, 0.0, 0.0, 8.0, 8.0])
    # Smoothed over three: 0 3 3 3 1 1 1 0, and nothing for the window.
    assert page_scores(got, 4, asked).tolist() == pytest.approx([3.0, 1.0, 0.0])


def test_of_pages_of_the_same_worth_the_first_stays():
    budget = PageBudget(0, 1, 2, budget_tokens=6)
    assert pages_to_drop(torch.ones(11), budget, CHUNKKV) == [2, 3, 4]
